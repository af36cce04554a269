"""Writing a stream to a topic, against the same query into a sink that drops what it is given.

Both read the same rows from memory, a key and 100 bytes, so that nothing else is measured than what becomes of them.
Every round writes to a new topic, and under a name that has not written yet. Spark, and the way through Python, are in
both.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import BinaryType, StructField, StructType

from penstock.cli.bench.batch import KEYS, PAYLOADS
from penstock.cli.bench.harness import Figure, Timing, sample
from penstock.cli.bench.spark import queries
from penstock.cli.bench.spark.memory import SINK, memory_source, nothing_sink
from penstock.cli.bench.spark.sizes import Sizes
from penstock.cli.bench.spark.topics import BenchTopic, create
from penstock.errors import PenstockError
from penstock.spark.session import ROWS_PER_ARROW_BATCH

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MEMORY = "penstock_bench_payloads"
SCHEMA = StructType([StructField("key", BinaryType()), StructField("data", BinaryType())])


def figures(spark: SparkSession, directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure writing."""
    contest = Contest(spark, directory, sizes)
    contestants = [contest.write, contest.drop]
    sample(contestants, sizes.warm_ups, before=contest.prepare)
    seconds = sample(contestants, rounds, before=contest.prepare)
    yield Timing(*seconds).events_per_second("write.stream", contest.rows, goal="ratio >= 0.5")


class Contest:
    """The two queries, and the topic that one of them writes to."""

    def __init__(self, spark: SparkSession, directory: Path, sizes: Sizes) -> None:
        self._directory = directory
        self._sizes = sizes
        self._stores = (directory / f"written-{number}" for number in count())
        self._store = next(self._stores)
        self._topic: BenchTopic | None = None
        self._written = False
        tasks = [sizes.write_rows // sizes.partitions] * sizes.partitions
        self.rows = sum(tasks)
        spark.dataSource.register(memory_source(MEMORY, _template(), SCHEMA, directory / "write.arrow", tasks))
        spark.dataSource.register(nothing_sink())
        self._frame = spark.readStream.format(MEMORY).load()

    def prepare(self) -> None:
        """Make a topic to write to, unless there is one; check the last one first, and remove it."""
        if self._written and self._topic is not None:
            self._check(self._topic)
            shutil.rmtree(self._store, ignore_errors=True)
            self._store, self._topic, self._written = next(self._stores), None, False
        if self._topic is None:
            self._topic = create(self._store, self._sizes)

    def _check(self, topic: BenchTopic) -> None:
        rows = topic.rows()
        if rows != self.rows:
            raise PenstockError(f"the topic has {rows} events, and {self.rows} were written: the time tells nothing")

    def write(self) -> None:
        """Write to the topic."""
        assert self._topic is not None
        self._written = True
        options = {**self._topic.options, "sinkName": self._store.name}
        queries.run(self._frame, self._directory, "penstock", options, rows=self.rows)

    def drop(self) -> None:
        """Write to nowhere."""
        queries.run(self._frame, self._directory, SINK, {}, rows=self.rows)


def _template() -> pa.RecordBatch:
    times = ROWS_PER_ARROW_BATCH // len(PAYLOADS)
    return pa.record_batch(
        {"key": pa.array(KEYS * times, pa.binary()), "data": pa.array(PAYLOADS * times, pa.binary())}
    )
