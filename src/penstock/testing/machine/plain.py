"""Disks for campaigns in which the power stays on.

`MemoryDisk` is a dictionary: files are put there, damaged or whole, and looked at by the code that reads real ones. It
is quick enough to look at every bit of a file that could have changed. `HastyDisk` is the machine's own, without the
waiting. Neither knows crashes: what is written is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.stores.file.platform import SystemDisk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer, WriteableBuffer

FREE_BYTES: Final = 1 << 40


class HastyDisk(SystemDisk):
    """The machine's own files, which nobody waits for."""

    def sync(self, descriptor: int) -> None:
        """See `Disk`."""

    def sync_directory(self, path: Path) -> None:
        """See `Disk`."""


class MemoryDisk:
    """The `Disk` of the file store, in memory."""

    def __init__(self) -> None:
        self._files: dict[Path, bytes | bytearray] = {}
        self._inodes: dict[Path, int] = {}
        self._opened: dict[int, Path] = {}
        self._descriptors = 0

    def hold(self, files: Mapping[Path, bytes], inodes: Mapping[Path, int]) -> None:
        """Hold these files, and nothing else; a file without an inode number gets a new one."""
        self._files = dict(files)
        self._inodes = dict(inodes)

    def content(self) -> dict[Path, bytes]:
        """Return what is there now."""
        return {path: bytes(data) for path, data in self._files.items()}

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        """See `Disk`."""
        if path not in self._files:
            if not create:
                raise FileNotFoundError(path)
            self._files[path] = b""
        elif exclusive:
            raise FileExistsError(path)
        self._descriptors += 1
        self._opened[self._descriptors] = path
        return self._descriptors

    def close(self, descriptor: int) -> None:
        """See `Disk`."""
        del self._opened[descriptor]

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        """See `Disk`."""
        return bytes(self._files[self._opened[descriptor]][position : position + count])

    def read_into(self, descriptor: int, buffer: WriteableBuffer, position: int) -> int:
        """See `Disk`."""
        view = memoryview(buffer).cast("B")
        data = self._files[self._opened[descriptor]][position : position + len(view)]
        view[: len(data)] = data
        return len(data)

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        """See `Disk`."""
        path = self._opened[descriptor]
        content = bytearray(self._files[path])
        content.extend(bytes(max(position - len(content), 0)))
        written = bytes(data)
        content[position : position + len(written)] = written
        self._files[path] = content
        return len(written)

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """See `Disk`."""
        return self.write(descriptor, b"".join(map(bytes, buffers)), position)

    def sync(self, descriptor: int) -> None:
        """See `Disk`."""

    def sync_directory(self, path: Path) -> None:
        """See `Disk`."""

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        """See `Disk`."""
        self.truncate(descriptor, max(self.size(descriptor), position + count))

    def free(self, descriptor: int) -> tuple[int, int]:
        """See `Disk`."""
        return FREE_BYTES, FREE_BYTES

    def truncate(self, descriptor: int, length: int) -> None:
        """See `Disk`."""
        path = self._opened[descriptor]
        self._files[path] = bytes(self._files[path][:length]).ljust(length, b"\0")

    def size(self, descriptor: int) -> int:
        """See `Disk`."""
        return len(self._files[self._opened[descriptor]])

    def inode(self, descriptor: int) -> int:
        """See `Disk`."""
        return self._inodes.setdefault(self._opened[descriptor], len(self._inodes) + 1)

    def names(self, path: Path) -> list[str]:
        """See `Disk`."""
        return sorted(file.name for file in self._files if file.parent == path)

    def exists(self, path: Path) -> bool:
        """See `Disk`. A directory is there if something is in it."""
        return path in self._files or any(file.parent == path for file in self._files)

    def make_directory(self, path: Path) -> None:
        """See `Disk`."""

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        self._files[new] = self._files.pop(old)

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        del self._files[path]

    def remove_directory(self, path: Path) -> None:
        """See `Disk`."""
