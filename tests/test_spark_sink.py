"""Writing topics with Spark: each batch once, whole or not at all, and clear words for what cannot be."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark_topics import data_of, fill, plain, read, rich, rows_of, stored

from penstock.clock import SystemClock
from penstock.runtime import sinks
from penstock.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

DECIDED_BY_THE_LOG = ("topic", "partition", "offset", "appended_at")


@pytest.fixture
def url(root: Path) -> str:
    """Return a store with an empty topic `copies`."""
    url = f"file:{root}"
    fill(url, "copies", [])
    return url


def write(frame: DataFrame, url: str, **options: str) -> None:
    frame.write.format("penstock").options(**{"url": url, "topic": "copies", **options}).mode("append").save()


def refusal(frame: DataFrame, url: str, **options: str) -> str:
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        write(frame, url, **options)
    return str(caught.value)


def names_of(url: str) -> list[str]:
    """Return all topics, internal ones included."""
    with closing(open_store(url)) as store:
        assert store.manifests.unfinished() == []
        return [topic.name for topic in store.log.topics()]


# --- a batch ------------------------------------------------------------------------------------


def test_a_topic_is_copied_with_all_that_its_events_say(spark: SparkSession, url: str) -> None:
    fill(url, "orders", rich(400), partitions=2, at_a_time=50)
    write(read(spark, url, "orders").drop(*DECIDED_BY_THE_LOG), url)

    def said(name: str) -> list[dict[str, Any]]:
        rows = [{key: row[key] for key in row if key not in DECIDED_BY_THE_LOG} for row in stored(url, name)]
        return sorted(rows, key=repr)

    assert said("copies") == said("orders")
    assert names_of(url) == ["copies", "orders"]


def test_rows_keep_their_order_within_a_partition(spark: SparkSession, url: str) -> None:
    write(spark.range(0, 1_000, 1, 3).selectExpr("cast('same' as binary) key", "cast(id as string) data"), url)
    assert [int(data) for data in data_of(url, "copies")] == list(range(1_000))


def test_rows_may_say_their_partition(spark: SparkSession, url: str) -> None:
    write(spark.range(30).selectExpr("cast(id % 3 as int) partition", "cast(id as string) data"), url)
    assert [int(row["data"]) % 3 for row in stored(url, "copies")] == [0] * 10 + [1] * 10 + [2] * 10


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["'x' dta"], "no column 'dta'; did you mean 'data'?"),
        (["'x' type"], "the column 'data' is missing"),
        (["'x' data", "1L offset"], "column 'offset' is decided by the log"),
        (["'x' data", "'now' time"], "column 'time' must be timestamp, not string: cast it"),
        (["'x' data", "map('a', 1) headers"], "column 'headers' must be map<string,binary>"),
        (["1 data"], "column 'data' must be binary, not int"),
    ],
)
def test_wrong_columns_are_told_before_anything_runs(
    spark: SparkSession, url: str, columns: list[str], said: str
) -> None:
    assert said in refusal(spark.range(1).selectExpr(*columns), url)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["if(id = 77, null, cast(id as string)) data"], "an event has no data"),
        (["cast(id as string) data", "cast(if(id = 77, 3, 0) as int) partition"], "has no partition 3; it has 0 to 2"),
        (["if(id = 77, repeat('x', 2000000), 'x') data"], "limits.event_bytes_max"),
    ],
)
def test_a_wrong_row_leaves_the_topic_as_it_was(spark: SparkSession, url: str, columns: list[str], said: str) -> None:
    assert said in refusal(spark.range(0, 100, 1, 2).selectExpr(*columns), url)
    assert data_of(url, "copies") == []
    with closing(open_store(url)) as store:
        sinks.sweep(store, clock=SystemClock(), idle_seconds=0)  # what a task had staged that ended after the job
    assert names_of(url) == ["copies"]


def test_a_topic_is_never_overwritten_and_must_exist(spark: SparkSession, url: str) -> None:
    from pyspark.errors import PySparkException

    frame = spark.range(3).selectExpr("'x' data")
    with pytest.raises(PySparkException, match="a topic is never overwritten"):
        frame.write.format("penstock").options(url=url, topic="copies").mode("overwrite").save()
    assert "no topic 'copy'; did you mean 'copies'?" in refusal(frame, url, topic="copy")
    assert "is for streams" in refusal(frame, url, sinkName="x")


# --- a stream -----------------------------------------------------------------------------------


class Copying:
    """A query that copies `orders` to `copies`."""

    def __init__(self, spark: SparkSession, url: str, checkpoint: Path) -> None:
        self._spark = spark
        self._url = url
        self.checkpoint = checkpoint

    def run(self, **options: str) -> None:
        frame = self._spark.readStream.format("penstock").options(url=self._url, topic="orders", maxRowsPerTrigger="40")
        query = (
            frame.load()
            .select("key", "data")
            .writeStream.format("penstock")
            .options(**{"url": self._url, "topic": "copies", "sinkName": "copier", **options})
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def failure(self, **options: str) -> str:
        from pyspark.errors import PySparkException

        with pytest.raises(PySparkException) as caught:
            self.run(**options)
        return str(caught.value)

    def forget_last_commit(self) -> None:
        """Make Spark believe that it was killed before it had noted its last batch."""
        last = max((self.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def test_a_batch_that_spark_repeats_is_delivered_once(spark: SparkSession, url: str, tmp_path: Path) -> None:
    fill(url, "orders", plain(100))
    query = Copying(spark, url, tmp_path / "checkpoint")
    query.run()
    query.forget_last_commit()
    fill(url, "orders", plain(30, first=100))
    query.run()
    assert sorted(data_of(url, "copies")) == [event.data for event in plain(130)]


def test_a_deleted_checkpoint_is_noticed_and_the_sink_can_be_adopted(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, "orders", plain(50))
    Copying(spark, url, tmp_path / "lost").run()
    anew = Copying(spark, url, tmp_path / "new")
    said = anew.failure()
    assert "SinkConflict: sink 'copier' belongs to query" in said
    assert "adopt" in said
    assert len(data_of(url, "copies")) == 50
    anew.run(adoptSink="true")
    assert len(data_of(url, "copies")) == 100  # it was told to, and reads from the beginning
    fill(url, "orders", plain(1, first=50))
    assert "SinkConflict" in Copying(spark, url, tmp_path / "lost").failure()


def test_a_stream_needs_a_name_for_its_sink(spark: SparkSession, url: str, tmp_path: Path) -> None:
    fill(url, "orders", plain(5))
    said = Copying(spark, url, tmp_path).failure(sinkName=" ")
    assert "sinkName" in said
    frame = spark.readStream.format("penstock").options(url=url, topic="orders").load().select("data")
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match="option 'sinkName' is missing"):
        frame.writeStream.format("penstock").options(url=url, topic="copies").option(
            "checkpointLocation", str(tmp_path / "c")
        ).trigger(availableNow=True).start().awaitTermination()


def test_counts_per_key_are_delivered_as_a_whole_with_every_batch(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, "orders", plain(70))
    frame = spark.readStream.format("penstock").options(url=url, topic="orders", maxRowsPerTrigger="35").load()
    counts = frame.groupBy("key").count().selectExpr("key", "to_json(struct(count)) data")
    counts.writeStream.outputMode("complete").format("penstock").options(
        url=url, topic="copies", sinkName="counts", checkpointLocation=str(tmp_path)
    ).trigger(availableNow=True).start().awaitTermination()
    rows = stored(url, "copies")
    assert len(rows) == 2 * 7
    found = {row["key"]: row["data"] for row in rows}
    assert found == {b"key-%d" % number: b'{"count":10}' for number in range(7)}


def test_what_is_written_can_be_read_at_once(spark: SparkSession, url: str) -> None:
    write(spark.range(10).selectExpr("cast(id as string) data", "'order.placed' type"), url)
    assert [row["type"] for row in rows_of(read(spark, url, "copies"))] == ["order.placed"] * 10
