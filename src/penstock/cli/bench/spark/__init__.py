"""Area `spark`: how near the data source and the sink come to the least that Python code in Spark can cost.

The ceiling is a Python data source that yields the same rows from memory as Arrow, or a sink that drops them, in the
same session and the same query otherwise, in rounds that alternate. All files are in one directory below the current
one, checkpoints too, so that the disk is that of whoever asks, and are removed at the end, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.cli.bench.harness import Figure, scratch_directory, spark_session
from penstock.cli.bench.spark.sizes import Sizes
from penstock.cli.output import say

SIZES = Sizes()


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    rounds = min(rounds, SIZES.rounds_max)
    with spark_session() as spark, scratch_directory() as directory:
        # Not before: they import pyspark, and the session is what says how to get it.
        from penstock.cli.bench.spark import growth, reading, writing
        from penstock.cli.bench.spark.topics import fill

        say(f"Spark {spark.version}, rounds: {rounds}")
        large = fill(directory / "large", SIZES, SIZES.read_rows)
        yield from reading.figures(spark, directory, large, SIZES, rounds)
        yield from writing.figures(spark, directory, SIZES, rounds)
        yield from growth.figures(spark, directory, large, SIZES, rounds)
