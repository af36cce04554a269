"""Reading topics with Spark: everything, nothing twice, and clear words for what cannot be."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.spark_topics import data_of, fill, info_of, plain, read, rich, rows_of, stored

from penstock import Bus, Topic, event
from penstock.errors import TrimRefused
from penstock.rows import Subscription
from penstock.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark


@pytest.fixture
def url(root: Path) -> str:
    return f"file:{root}"


def refused(frame: DataFrame) -> str:
    """Return what Spark says when this is run."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        frame.collect()
    return str(caught.value)


# --- a batch ------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_published_column_by_column(spark: SparkSession, url: str) -> None:
    fill(url, "orders", rich(500), at_a_time=7)
    frame = read(spark, url, "orders")
    assert frame.dtypes == [
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("id", "string"),
        ("source", "string"),
        ("type", "string"),
        ("subject", "string"),
        ("time", "timestamp"),
        ("appended_at", "timestamp"),
        ("expires_at", "timestamp"),
        ("key", "binary"),
        ("content_type", "string"),
        ("headers", "map<string,binary>"),
        ("data", "binary"),
    ]
    found = rows_of(frame)
    assert len(found) == 500
    assert found == stored(url, "orders")


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, url: str) -> None:
    fill(url, "orders", [])
    assert read(spark, url, "orders").count() == 0


def test_ranges_are_divided_among_tasks_as_wanted(spark: SparkSession, url: str) -> None:
    fill(url, "orders", plain(1_000), partitions=1)
    frame = read(spark, url, "orders", minPartitions="7")
    assert frame.rdd.getNumPartitions() == 7
    assert rows_of(frame) == stored(url, "orders")
    assert read(spark, url, "orders").rdd.getNumPartitions() == 1  # so few are not worth another task


def test_offsets_times_types_and_keys_choose_what_is_read(spark: SparkSession, url: str) -> None:
    fill(url, "orders", rich(300), partitions=2, at_a_time=10)
    every = stored(url, "orders")
    ends = [max(row["offset"] for row in every if row["partition"] == number) + 1 for number in (0, 1)]
    starting = f'{{"orders": {{"0": {ends[0] - 3}, "1": "latest"}}}}'
    assert rows_of(read(spark, url, "orders", startingOffsets=starting)) == [
        row for row in every if row["partition"] == 0 and row["offset"] >= ends[0] - 3
    ]
    ending = '{"orders": {"0": 2, "1": 3}}'
    assert rows_of(read(spark, url, "orders", endingOffsets=ending)) == [
        row for row in every if row["offset"] < 2 + row["partition"]
    ]
    middle = sorted(row["appended_at"] for row in every)[150]
    since = [row for row in every if row["appended_at"] >= middle]
    assert 0 < len(since) < 300
    assert rows_of(read(spark, url, "orders", startingOffsets=middle.isoformat())) == since
    assert rows_of(read(spark, url, "orders", fromTime=middle.isoformat())) == since
    assert rows_of(read(spark, url, "orders", toTime=middle.isoformat())) == [row for row in every if row not in since]
    chosen = read(spark, url, "orders", types="order.paid,penstock.untyped", keys='["\\u0000key-1"]')
    assert rows_of(chosen) == [row for row in every if row["type"] == "order.paid" and row["key"] == b"\x00key-1"]


def test_lists_and_patterns_mean_several_topics_but_never_internal_ones(spark: SparkSession, url: str) -> None:
    for name in ("shop.eu", "shop.us", "other", "left-out"):
        fill(url, name, plain(5))
    with closing(open_store(url)) as store:
        store.log.create_topic("_hidden.shop", info_of(store, "other").settings)
    found = rows_of(read(spark, url, "*shop*, other"))
    assert found == [*stored(url, "other"), *stored(url, "shop.eu"), *stored(url, "shop.us")]


def test_a_query_may_ask_for_some_columns_only(spark: SparkSession, url: str) -> None:
    fill(url, "orders", rich(50))
    reader = spark.read.format("penstock").options(url=url, topic="orders")
    frame = reader.schema("offset long, partition int, data binary").load()
    assert frame.columns == ["offset", "partition", "data"]
    wanted = [{name: row[name] for name in frame.columns} for row in stored(url, "orders")]
    assert rows_of(frame) == wanted
    assert "column 'data' is binary, not string" in refused(reader.schema("data string").load())
    assert "no column 'dat'; did you mean 'data'?" in refused(reader.schema("dat binary").load())


def test_what_was_trimmed_is_told_with_its_numbers_or_passed_over(spark: SparkSession, url: str) -> None:
    fill(url, "orders", plain(100), partitions=1)
    trim(url, "orders", 100)
    fill(url, "orders", plain(20, first=100), partitions=1)
    text = refused(read(spark, url, "orders", startingOffsets='{"orders": {"0": 40}}'))
    assert "DataLost: topic 'orders', partition 0: offsets 40 to 99 were trimmed; the log now holds [100, 120)" in text
    lenient = read(spark, url, "orders", startingOffsets='{"orders": {"0": 40}}', failOnDataLoss="false")
    assert [row["offset"] for row in rows_of(lenient)] == list(range(100, 120))
    assert read(spark, url, "orders").count() == 20


def trim(url: str, name: str, before: int) -> None:
    with closing(open_store(url)) as store:
        assert store.log.trim(info_of(store, name).partitions[0], before) == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topic": "order"}, "UnknownTopic: there is no topic 'order'; did you mean 'orders'?"),
        ({"topic": "x*"}, "no topic matches 'x*'"),
        ({"startingOffset": "latest"}, "did you mean 'startingOffsets'?"),
        ({"startingOffsets": '{"orders": {"0": 9}}'}, "the log ends at 5, and was read up to 9"),
        (
            {"startingOffsets": '{"orders": {"0": 4}}', "endingOffsets": '{"orders": {"0": 2}}'},
            "begins at offset 4 and ends before it, at 2",
        ),
        ({"url": "memory:"}, "lives in one process, and Spark's tasks are others"),
        ({"url": "file:/nowhere/at/all"}, "is no store"),
    ],
)
def test_what_cannot_be_read_is_told_before_anything_runs(
    spark: SparkSession, url: str, options: dict[str, str], said: str
) -> None:
    fill(url, "orders", plain(5), partitions=1)
    assert said in refused(spark.read.format("penstock").options(**{"url": url, "topic": "orders", **options}).load())


def test_a_bus_or_a_url_and_python_values_will_do(spark: SparkSession, url: str) -> None:
    import penstock.spark

    fill(url, "orders", plain(30))
    orders = Topic("orders", bytes, partitions=3)
    for bus in (url, Bus(url)):
        frame = penstock.spark.read(
            spark, bus, [orders], keys=["key-1"], fromTime=datetime(2020, 1, 1, tzinfo=UTC), failOnDataLoss=True
        )
        assert {row["key"] for row in rows_of(frame)} == {b"key-1"}
    placed = penstock.spark.decode(penstock.spark.read(spark, url, "orders"), Wrapped)
    assert placed.where("_corrupt is not null").count() == 30


@event("test.wrapped")
class Wrapped(msgspec.Struct):
    total: float


# --- a stream -----------------------------------------------------------------------------------


class Collected:
    """A streaming query into memory that can be run again and again on its checkpoint."""

    def __init__(self, spark: SparkSession, url: str, checkpoint: Path, topic: str = "orders", **options: str) -> None:
        self._spark = spark
        self._options = {"url": url, "topic": topic, **options}
        self._checkpoint = checkpoint
        self.batches: list[list[dict[str, Any]]] = []

    def run(self, **more: str) -> list[dict[str, Any]]:
        """Run until nothing is left; return its progress."""
        frame = self._spark.readStream.format("penstock").options(**self._options, **more).load()

        def keep(batch: DataFrame, _: int) -> None:
            self.batches.append(rows_of(batch))

        query = (
            frame.writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [msgspec.json.decode(progress.json) for progress in query.recentProgress]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.batches for row in batch]


def by_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["topic"], row["partition"], row["offset"]))


def test_a_stream_reads_everything_once_in_bounded_batches_and_goes_on(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, "orders", plain(250))
    query = Collected(spark, url, tmp_path, maxRowsPerTrigger="100")
    progress = query.run()
    assert [len(batch) for batch in query.batches] == [100, 100, 50]
    assert progress[-1]["sources"][0]["latestOffset"] == progress[-1]["sources"][0]["endOffset"]
    fill(url, "orders", plain(30, first=250))
    query.run()
    assert by_place(query.rows) == stored(url, "orders")


def test_batches_are_bounded_by_bytes_too(spark: SparkSession, url: str, tmp_path: Path) -> None:
    fill(url, "orders", [b"x" * 1_000] * 60, partitions=1, at_a_time=60)
    query = Collected(spark, url, tmp_path, maxBytesPerTrigger="25000")
    query.run()
    assert [len(batch) for batch in query.batches] == [25, 25, 10]


def test_topics_that_match_the_pattern_later_are_read_whole(spark: SparkSession, url: str, tmp_path: Path) -> None:
    fill(url, "shop.eu", plain(20))
    query = Collected(spark, url, tmp_path, topic="shop.*", startingOffsets="latest")
    query.run()
    assert query.rows == []
    fill(url, "shop.us", plain(40))
    fill(url, "shop.eu", plain(5))
    fill(url, "other", plain(5))
    query.run()
    assert len([row for row in query.rows if row["topic"] == "shop.eu"]) == 5
    assert by_place([row for row in query.rows if row["topic"] == "shop.us"]) == stored(url, "shop.us")


def test_a_query_is_a_subscription_with_its_lag_and_retention_waits_for_it(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, "orders", plain(50), partitions=1)
    query = Collected(spark, url, tmp_path, maxRowsPerTrigger="20", subscription="report")
    query.run()
    with closing(open_store(url)) as store:
        topic = info_of(store, "orders")
        (subscription,) = store.cursors.subscriptions(topic.log_id)
        assert (subscription.name, subscription.external, subscription.protect) == ("report", True, True)
        (cursor,) = store.cursors.load(topic.log_id, "report")
        assert cursor.next_offset in {40, 50}  # Spark need not tell of the last batch of such a run
    fill(url, "orders", plain(10, first=50), partitions=1)
    query.run()
    with closing(open_store(url)) as store:
        (cursor,) = store.cursors.load(topic.log_id, "report")
        assert cursor.next_offset >= 50  # by the next run at the latest
    fill(url, "orders", plain(10, first=60), partitions=1)
    with closing(open_store(url)) as store, pytest.raises(TrimRefused, match="'report' has only passed"):
        store.log.trim(topic.partitions[0], 70)


def test_a_query_that_begins_anew_moves_its_cursor_back(spark: SparkSession, url: str, tmp_path: Path) -> None:
    fill(url, "orders", plain(20), partitions=1)
    Collected(spark, url, tmp_path / "first", subscription="report", startingOffsets="latest").run()
    again = Collected(spark, url, tmp_path / "second", subscription="report", maxRowsPerTrigger="5")
    again.run()
    assert len(again.rows) == 20
    with closing(open_store(url)) as store:
        (cursor,) = store.cursors.load(info_of(store, "orders").log_id, "report")
    assert cursor.generation == 1
    assert cursor.next_offset in {15, 20}


def test_a_subscription_of_handlers_is_not_taken_over(spark: SparkSession, url: str, tmp_path: Path) -> None:
    fill(url, "orders", plain(20))
    with closing(open_store(url)) as store:
        log_id = info_of(store, "orders").log_id
        store.cursors.put_subscription(Subscription(log_id=log_id, name="mail", mode="exclusive"))
    assert "subscription 'mail' that is consumed by handlers" in failure(
        Collected(spark, url, tmp_path, subscription="mail")
    )


def failure(query: Collected) -> str:
    from pyspark.errors import StreamingQueryException

    with pytest.raises(StreamingQueryException) as caught:
        query.run()
    return str(caught.value)


def test_a_log_trimmed_below_the_querys_start_ends_it_with_the_range_or_by_option_is_passed_over(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, "orders", plain(10), partitions=1)
    query = Collected(spark, url, tmp_path)
    query.run()
    fill(url, "orders", plain(90, first=10), partitions=1)
    trim(url, "orders", 100)
    fill(url, "orders", plain(5, first=100), partitions=1)
    assert "topic 'orders', partition 0: offsets 10 to 99 were trimmed; the log now holds [100, 105)" in failure(query)
    query.run(failOnDataLoss="false")
    assert [row["offset"] for row in query.rows] == [*range(10), *range(100, 105)]


def test_a_topic_that_was_deleted_and_created_anew_is_not_taken_for_the_old_one(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    fill(url, "orders", plain(10))
    query = Collected(spark, url, tmp_path)
    query.run()
    with closing(open_store(url)) as store:
        store.log.delete_topic(info_of(store, "orders").log_id)
    fill(url, "orders", plain(15, first=50))
    assert "topic 'orders' was deleted and created anew" in failure(query)
    query.run(failOnDataLoss="false")
    assert sorted(row["data"] for row in query.rows[10:]) == sorted(data_of(url, "orders"))


# --- finding it ---------------------------------------------------------------------------------


def test_registering_never_fails_whatever_is_missing() -> None:
    program = """
import sys
for missing in (["pyspark", "pyspark.sql"], ["pyarrow"], ["penstock.spark.source"]):
    for name in [name for name in sys.modules if name.split(".")[0] in {"pyspark", "penstock", "pyspark_penstock"}]:
        del sys.modules[name]
    for name in missing:
        sys.modules[name] = None
    import pyspark_penstock
    assert not hasattr(pyspark_penstock, "DefaultSource"), missing
    for name in missing:
        del sys.modules[name]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
