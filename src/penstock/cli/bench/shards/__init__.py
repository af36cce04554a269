"""Area `shards`: what it costs that consumers share a subscription, and how long it takes until they do.

Rates are compared with those of one exclusive consumer, or one process, of the same log in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.cli.bench.harness import Figure, scratch_directory
from penstock.cli.bench.shards import processes, together
from penstock.cli.bench.shards.sizes import Sizes

SIZES = Sizes()

_PARTS = (together, processes)


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    for part in _PARTS:
        with scratch_directory() as directory:
            yield from part.figures(directory, SIZES, rounds)
