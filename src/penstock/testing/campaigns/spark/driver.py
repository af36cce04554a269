"""The driver of a query, as a program: from the topic `input` to the topic `output`, until it ends or is killed.

It is started as `python -m penstock.testing.campaigns.spark.driver <query as JSON>`. Should the campaign
vanish it ends, and Java and the workers with it.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.testing.campaigns.spark.steps import Post, Told

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

INPUT: Final = "input"
OUTPUT: Final = "output"
SINK: Final = "copied"
MASTER: Final = "local[2,4]"
"""Two tasks at a time, and a task may fail three times."""
_PLACES: Final = ("topic", "partition", "offset", "appended_at")


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver is asked to run."""

    url: str
    checkpoint: str
    post: str
    scratch: str
    rows: int
    """In a batch, at most."""
    ends: bool
    """With what is there; else it waits for more."""
    min_partitions: int | None = None
    starting: str = "earliest"
    adopt: bool = False
    plant: str = ""


_decode = msgspec.json.Decoder(Query).decode


def main(query: Query) -> None:
    """Run the query, and say how it goes."""
    post = Post(query.post)
    threading.Thread(target=_end_with_the_campaign, args=[post], daemon=True).start()
    try:
        spark = start_spark(query)
        post.say(Told(pid=os.getpid(), driver="running"))  # so that nobody takes it for dead on a busy machine
        running = start(spark, query)
        post.say(Told(pid=os.getpid(), driver="running"))
        running.awaitTermination()
    except Exception as error:  # noqa: BLE001 - the campaign decides what it means
        post.say(Told(pid=os.getpid(), driver="failed", why=f"{type(error).__name__}: {error}"))
    else:
        post.say(Told(pid=os.getpid(), driver="ended"))
    threading.Event().wait()  # for the campaign, which ends all processes of this driver at once


def _end_with_the_campaign(post: Post) -> None:
    post.socket.recv(1)  # nothing is ever said: this is the end
    os._exit(1)


def start_spark(query: Query) -> SparkSession:
    """Start Spark."""
    from penstock.spark.session import session

    # What is quick to start, and is killed soon.
    java = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData -Djava.io.tmpdir={query.scratch}"
    return session(
        MASTER,
        app_name="penstock-campaign",
        config={
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": java,
            "spark.sql.warehouse.dir": query.scratch,
        },
    )


def start(spark: SparkSession, query: Query) -> StreamingQuery:
    """Start the query."""
    from penstock.testing.campaigns.spark.faulty import FORMAT, FaultySource

    spark.dataSource.register(FaultySource)
    reading = spark.readStream.format("penstock").option("url", query.url).option("topic", INPUT)
    reading = reading.option("maxRowsPerTrigger", query.rows).option("startingOffsets", query.starting)
    if query.min_partitions is not None:
        reading = reading.option("minPartitions", query.min_partitions)
    writing = reading.load().drop(*_PLACES).writeStream.format(FORMAT).option("post", query.post)
    writing = writing.option("url", query.url).option("topic", OUTPUT).option("sinkName", SINK)
    writing = writing.option("checkpointLocation", query.checkpoint).option("adoptSink", query.adopt)
    if query.plant:
        writing = writing.option("plant", query.plant)
    trigger = writing.trigger(availableNow=True) if query.ends else writing.trigger(processingTime="0 seconds")
    return trigger.start()


if __name__ == "__main__":
    main(_decode(sys.argv[1]))
