"""What a row costs in a topic, and in one with ten times as many rows, read as a batch.

A query costs something by itself, however few rows it reads: planning, processes, opening the store. Of the small topic
that is the larger part, so that a plain quotient of time and rows would flatter the large one. It is measured, by
reading a topic of hardly any rows in as many tasks, and taken off both. The topics are large enough for the rest to be
told from chance. Each is in a store of its own, so that it also counts if a larger one is opened more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from penstock.cli.bench.harness import Figure, Work, sample
from penstock.cli.bench.spark import queries
from penstock.cli.bench.spark.sizes import Sizes
from penstock.cli.bench.spark.topics import BenchTopic, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def figures(spark: SparkSession, directory: Path, large: BenchTopic, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure growth."""
    none = fill(directory / "none", sizes, sizes.growth_none)
    small = fill(directory / "small", sizes, sizes.read_rows // sizes.growth)
    topics = (none, small, large)
    contestants: list[Work] = [partial(queries.read_batch, spark, "penstock", topic.options) for topic in topics]
    sample(contestants, sizes.warm_ups)
    seconds = map(median, sample(contestants, rounds))
    yield figure(*zip((topic.rows() for topic in topics), seconds, strict=True))


def figure(none: tuple[int, float], small: tuple[int, float], large: tuple[int, float]) -> Figure:
    """Return the figure for three topics, each with its rows and how many seconds it took to read them."""

    def nanoseconds_per_row(topic: tuple[int, float]) -> float:
        return (topic[1] - none[1]) / (topic[0] - none[0]) * 1e9

    before, after = nanoseconds_per_row(small), nanoseconds_per_row(large)
    # A fifth more is allowed: 1 / 1.2.
    return Figure.of("growth", after, "ns/event", ceiling=before, ratio=before / after, goal="ratio >= 0.833")
