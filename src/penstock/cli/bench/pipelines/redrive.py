"""Redriving: seconds for a preview of so many dead letters and the run that brings them back, beyond Spark's start.

Every round has the same letters: they are dead again before it, untimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

from penstock.cli.bench.harness import Figure, sample
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.cli.output import say
from penstock.events import Event
from penstock.rows import Commit, Parked, Shard, Subscription, TopicInfo, TopicSettings
from penstock.spark.pipelines.redrive import preview_redrive
from penstock.stores import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.ports import Store

TOPIC: Final = "orders"
FAILING: Final = "billing"
ROWS_AT_A_TIME: Final = 2_000
TRACE: Final = "Traceback (most recent call last):\n" + "".join(
    f'  File "/srv/shop/{name}.py", line {line}, in {name}\n    {name}(order)\n'
    for line, name in enumerate(("handle", "bill", "charge", "post", "connect"))
)
WHERE: Final = "error_type = 'TimeoutError' and get_json_object(cast(data as string), '$.total') >= 0"


def figures(spark: SparkSession, directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure redriving."""
    url = f"file:{directory}"
    with closing(open_store(url)) as store:
        topic = store.log.create_topic(TOPIC, TopicSettings(partitions=sizes.redrive_partitions))
        store.cursors.put_subscription(Subscription(log_id=topic.log_id, name=FAILING, mode="key_shared"))

        def redrive() -> None:
            job = preview_redrive(spark, url, TOPIC, FAILING, where=WHERE)
            done = job.run()
            assert job.planned == job.marked == done.replayed == sizes.redrive_letters, (job, done)

        say(f"redrive: {sizes.redrive_letters:,} dead letters")
        # The first one also starts Python in Spark's tasks.
        sample([redrive], 1, before=lambda: die(store, topic, sizes))
        [seconds] = sample([redrive], rounds, before=lambda: die(store, topic, sizes))
    yield Figure.of("redrive", median(seconds), "s", goal="value <= 5 s")


def die(store: Store, topic: TopicInfo, sizes: Sizes) -> None:
    """Let all letters be dead, as if they had just failed."""
    count = sizes.redrive_letters
    for start in range(0, count, ROWS_AT_A_TIME):
        rows = tuple(_letter(topic, number) for number in range(start, min(start + ROWS_AT_A_TIME, count)))
        assert store.cursors.commit([Commit(parked=rows)]) == [None]


def _letter(topic: TopicInfo, number: int) -> Parked:
    offset, partition = divmod(number, topic.settings.partitions)
    return Parked(
        shard=Shard(topic.log_id, FAILING, 0, partition),
        offset=offset,
        state="dead",
        lane=0,
        event=Event(data=b'{"order":"order-%d","customer":"customer-%d","total":%d}' % (number, number % 97, number)),
        attempts=4,
        error_type="TimeoutError",
        error_message=f"order {number}: no answer within 5 s",
        error_trace=TRACE,
        parked_at=1_767_225_600_000_000 + number,
        last_retry_at=1_767_225_700_000_000 + number,
    )
