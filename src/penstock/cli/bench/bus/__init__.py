"""Area `bus`: what an application has of it: typed handlers, effects once, a buffered publisher; and a peer.

Everything is durable: the log is synced before a publish returns, and cursors are written as they would be for anybody.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.cli.bench.bus import handlers, peer, publishing
from penstock.cli.bench.bus.sizes import Sizes
from penstock.cli.bench.harness import Figure, scratch_directory

SIZES = Sizes()

_PARTS = (handlers, publishing, peer)


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    for part in _PARTS:
        with scratch_directory() as directory:
            yield from part.figures(directory, SIZES, rounds)
