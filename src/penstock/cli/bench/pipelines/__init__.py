"""Area `pipelines`: the pipelines against the least that Spark needs for the same rows, or in seconds for so many.

Each part is a module of this package with a function `figures(spark, directory, sizes, rounds)`, and a name in
`PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.cli.bench.harness import Figure, scratch_directory
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.cli.output import say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER = "local[*]"
SIZES = Sizes()
PARTS: tuple[str, ...] = ("archive", "audit", "redrive", "project")


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    rounds = min(rounds, SIZES.rounds_max)
    with _session() as spark, scratch_directory() as directory:
        say(f"Spark {spark.version}, rounds: {rounds}")
        for part in PARTS:
            yield from import_module(f"{__name__}.{part}").figures(spark, directory / part, SIZES, rounds)


@contextmanager
def _session() -> Iterator[SparkSession]:
    from penstock.spark.session import session

    spark = session(MASTER, app_name="penstock-bench")
    try:
        yield spark
    finally:
        spark.stop()
