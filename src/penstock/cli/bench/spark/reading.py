"""Reading a topic, all 14 columns, against the same rows from memory: as a stream and as a batch.

The ceiling has as many tasks as we have, with as many rows each, in Arrow batches of the same size. What a query costs
by itself is in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.bench.harness import Figure, Timing, Work, sample
from penstock.cli.bench.spark import queries
from penstock.cli.bench.spark.memory import memory_source
from penstock.cli.bench.spark.sizes import Sizes
from penstock.cli.bench.spark.topics import BenchTopic
from penstock.spark.reader import SpanPartition
from penstock.spark.source import SCHEMA, PenstockSource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

MEMORY = "penstock_bench_events"


def figures(spark: SparkSession, directory: Path, topic: BenchTopic, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure reading."""
    rows = register_ceiling(spark, directory, topic)

    def events_per_second(name: str, contestants: list[Work]) -> Figure:
        sample(contestants, sizes.warm_ups)
        timing = Timing(*sample(contestants, rounds))
        return timing.events_per_second(name, rows, goal="ratio >= 0.6")

    stream: list[Work] = [
        lambda: queries.read_stream(spark, directory, "penstock", topic.options, rows=rows),
        lambda: queries.read_stream(spark, directory, MEMORY, {}, rows=rows),
    ]
    yield events_per_second("read.stream", stream)
    batch: list[Work] = [
        lambda: queries.read_batch(spark, "penstock", topic.options),
        lambda: queries.read_batch(spark, MEMORY, {}),
    ]
    yield events_per_second("read.batch", batch)


def register_ceiling(spark: SparkSession, directory: Path, topic: BenchTopic) -> int:
    """Make the source `MEMORY` of what we yield for a topic; return how many rows that are."""
    tasks, template = as_read(topic)
    spark.dataSource.register(memory_source(MEMORY, template, SCHEMA, directory / "read.arrow", tasks))
    return sum(tasks)


def as_read(topic: BenchTopic) -> tuple[list[int], pa.RecordBatch]:
    """Return how many rows each task reads, and the first batch of the first."""
    reader = PenstockSource(topic.options).reader(SCHEMA)
    partitions = [partition for partition in reader.partitions() if isinstance(partition, SpanPartition)]
    return [partition.span.stop - partition.span.start for partition in partitions], next(reader.read(partitions[0]))
