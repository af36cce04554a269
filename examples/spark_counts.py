"""The same orders in Spark: a streaming query that counts them by customer, into a topic, exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from examples.shop import orders
from pyspark.sql import SparkSession

import penstock.spark
from penstock import Bus, Topic
from penstock.batch import Batch

counts = Topic("counts", bytes, partitions=2)


async def _create(url: str) -> None:
    bus = Bus(url, topics=[counts])  # opening a bus that declares a topic makes it
    await bus.open()
    await bus.close()


def count_in_spark(spark: SparkSession, url: str, checkpoint: Path, say: Callable[[str], None]) -> None:
    """Count the orders by customer, and write all counts to the topic `counts` with every batch."""
    asyncio.run(_create(url))
    events = penstock.spark.stream(spark, url, orders, subscription="counting", maxRowsPerTrigger=20_000)
    found = events.groupBy("key").count().selectExpr("key", "cast(count as string) as data")
    query = (
        found.writeStream.format("penstock")
        .outputMode("complete")
        .options(url=url, topic=counts.name, sinkName="counting", checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    say(f"  stream    {sum(batches):>9,} orders in {len(batches)} batches, counted by customer into a topic")


async def check_counts(url: str, say: Callable[[str], None]) -> None:
    """Show that the last count of every customer is what the log says."""
    found: dict[bytes | None, int] = {}
    expected: Counter[bytes | None] = Counter()
    bus = Bus(url, topics=[orders, counts])
    async for batch in bus.read_batches(orders):
        assert isinstance(batch, Batch)
        expected.update(batch.columns.column("key").to_pylist())
    async for event in bus.read(counts):
        found[event.key] = int(event.data)  # a later batch counts more: the last one stays
    await bus.close()
    assert found == expected, "the counts differ from the log"
    say(f"            the counts of {len(found):,} customers, {sum(found.values()):,} orders, equal the log")
