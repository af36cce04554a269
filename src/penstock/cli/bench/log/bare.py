"""The ceilings: bytes to the disk and back by nothing but system calls."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.stores.file.platform import SystemDisk

FILE_BYTES = 256 << 20
"""As much as a segment, so that both begin a new file equally often."""
ROOM_BYTES = 8 << 20
"""More than any one write."""
READ_BYTES = 1 << 20


class BareFile:
    """A file that was allocated before anything is written to it; when it is full, the next one begins."""

    def __init__(self, path: Path, *, room: int = ROOM_BYTES) -> None:
        """Say where it is, and below how much room the next one begins."""
        self._path = path
        self._room = room
        self._disk = SystemDisk()
        self._descriptor = -1
        self._position = FILE_BYTES

    def write(self, parts: Sequence[Any]) -> None:
        """Write buffers one after another, and wait until they are on the medium."""
        if self._position + self._room > FILE_BYTES:
            self._begin()
        self._position += self._disk.write_many(self._descriptor, parts, self._position)
        self._disk.sync(self._descriptor)

    def _begin(self) -> None:
        self.close()
        self._path.unlink(missing_ok=True)
        self._descriptor = self._disk.open(self._path, create=True)
        self._disk.allocate(self._descriptor, 0, FILE_BYTES)
        os.fsync(self._descriptor)
        self._position = 0

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)
            self._descriptor = -1


def read_files(paths: Iterable[Path]) -> None:
    """Read files from beginning to end, into one buffer."""
    buffer = bytearray(READ_BYTES)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            position = 0
            while length := os.preadv(descriptor, [buffer], position):
                position += length
        finally:
            os.close(descriptor)


def drop_from_memory(paths: Iterable[Path]) -> None:
    """Make the system forget what it keeps of files in memory; any user may ask for that, of synced files."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
