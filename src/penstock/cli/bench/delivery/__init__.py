"""Area `delivery`: what a consumer costs, against the bare log and the bare disk; and what very many of them cost.

Rates are compared with reading the same log, and latencies with a bare sync, in the same run. All files are in one
directory below the current one, so that the disk is that of whoever asks, and are removed at the end, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.cli.bench.delivery import behind, consuming, latency, subscriptions
from penstock.cli.bench.delivery.sizes import Sizes
from penstock.cli.bench.harness import Figure, scratch_directory
from penstock.cli.output import say
from penstock.stores.file.filesystem import describe

SIZES = Sizes()

_PARTS = (consuming, latency, subscriptions, behind)


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    if not describe(Path.cwd()).persistent:
        say("the current directory is in memory, where a sync costs nothing: latencies mean little there")
    for part in _PARTS:
        with scratch_directory() as directory:
            yield from part.figures(directory, SIZES, rounds)
