"""Area `log`: how near the file store comes to the disk below it, in one process and in several.

The ceiling is the same bytes through bare system calls: `pwritev` and `fdatasync` into a file that was allocated
before, or `pread`, in the same file system, alternating with the store in one run. All files are in one directory below
the current one, so that the disk is that of whoever asks, and are removed at the end, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.cli.bench.harness import Figure, scratch_directory
from penstock.cli.bench.log import cursors, opening, processes, reading, volume, writing
from penstock.cli.bench.log.sizes import Sizes
from penstock.cli.output import say
from penstock.stores.file.filesystem import describe

SIZES = Sizes()

_PARTS = (writing, reading, cursors, opening, processes, volume)


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    if not describe(Path.cwd()).persistent:
        say(
            "the current directory is in memory, where a sync costs nothing: measure on the disk that will hold the log"
        )
    for part in _PARTS:
        with scratch_directory() as directory:
            yield from part.figures(directory, SIZES, rounds)
