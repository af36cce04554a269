"""Single calls that are sent together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.cli.bench.bus.sizes import Sizes
from penstock.cli.bench.harness import Figure


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure the buffered publisher."""
    yield from ()
