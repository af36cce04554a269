"""Area `pipelines`: the pipelines against the least that Spark needs for the same rows, or in seconds for so many.

Each part is a module of this package with a function `figures(spark, directory, sizes, rounds)`, and a name in
`PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from penstock.cli.bench.harness import Figure, scratch_directory, spark_session
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.cli.output import say

SIZES = Sizes()
PARTS: tuple[str, ...] = ("archive", "audit", "redrive", "project")


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    rounds = min(rounds, SIZES.rounds_max)
    with spark_session() as spark, scratch_directory() as directory:
        say(f"Spark {spark.version}, rounds: {rounds}")
        for part in PARTS:
            yield from import_module(f"{__name__}.{part}").figures(spark, directory / part, SIZES, rounds)
