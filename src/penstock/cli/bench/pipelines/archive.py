"""`archive`: a topic into a lake, against Spark writing the same rows from memory to Parquet.

The ceiling is Spark's own writer, with its own settings, fed by a Python source that has its rows in memory: as many
tasks as we have pieces, with as many rows each. We read a log, check it, compress harder, compute a digest, sync, and
put a manifest. A round has a new lake; what the rounds before have left is removed in between.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.bench.harness import Figure, Timing, Work, sample
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MEMORY = "penstock_bench_archived"


def figures(spark: SparkSession, directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure archiving."""
    # Not before: they import pyspark, and the session is what says how to get it.
    from penstock.cli.bench.spark.reading import as_read
    from penstock.cli.bench.spark.sizes import Sizes as TopicSizes
    from penstock.cli.bench.spark.topics import fill

    directory.mkdir()
    filling = TopicSizes(partitions=sizes.archive_partitions, batch_events=sizes.archive_batch_events)
    topic = fill(directory / "store", filling, sizes.archive_rows)
    contest = _Contest(spark, directory, topic.url, topic.name, topic.rows())
    contest.register(*as_read(topic))
    contestants: list[Work] = [contest.archive, contest.write]
    sample(contestants, sizes.warm_ups, before=contest.clear)
    timing = Timing(*sample(contestants, rounds, before=contest.clear))
    contest.clear()
    yield timing.events_per_second("archive", contest.rows, goal="ratio >= 0.6")


class _Contest:
    """The two, and where they write."""

    def __init__(self, spark: SparkSession, directory: Path, url: str, topic: str, rows: int) -> None:
        self._spark = spark
        self._directory = directory
        self._url = url
        self._topic = topic
        self._numbers = count()
        self.rows = rows

    def register(self, tasks: list[int], template: object) -> None:
        """Make the source of rows from memory."""
        from penstock.cli.bench.spark.memory import memory_source
        from penstock.spark.source import SCHEMA

        source = memory_source(MEMORY, template, SCHEMA, self._directory / "rows.arrow", tasks)
        self._spark.dataSource.register(source)

    def clear(self) -> None:
        """Remove what the last call has written."""
        for name in ("lake", "parquet"):
            shutil.rmtree(self._directory / name, ignore_errors=True)

    def archive(self) -> None:
        """Archive the whole topic; a new lake needs a subscription of its own."""
        from penstock.spark import archive

        name = f"archive-{next(self._numbers)}"
        done = archive(self._spark, self._url, self._topic, self._directory / "lake", subscription=name)
        if done.events != self.rows:
            raise PenstockError(f"{done.events} of {self.rows} events were archived: the time tells nothing")

    def write(self) -> None:
        """Let Spark write as many rows."""
        self._spark.read.format(MEMORY).load().write.parquet(str(self._directory / "parquet"))
