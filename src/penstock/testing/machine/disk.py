"""A disk in memory that knows what a power loss may leave of it.

It is a `Disk` of the file store, so the production code runs on it unchanged. Each file and each directory remembers
what was last synced and every change since. What becomes of those changes in a power loss is decided by a `Survival`;
what was synced is always there. It takes nothing for granted that POSIX does not promise:

* a sync of a file makes its bytes and its length durable, and not its name;
* a name is durable once its directory is synced; without that, a file that was made, renamed or removed may be there
  under its old name, its new one, or not at all;
* un-synced writes survive in any order, in parts of a sector or of a page, with or without the new length.

A rename is atomic, and durable with its new directory. A process that is killed leaves everything as it is; what was
not synced may still be lost by a power loss that comes later.
"""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

SECTOR_BYTES = 512
PAGE_BYTES = 4096
SPACE_BYTES = 1 << 40


class Survival(NamedTuple):
    """What a power loss leaves of the changes that were not synced."""

    data: str
    """`kept`, `dropped`, `torn` (in order, up to somewhere inside of one), or `shuffled` (each part by itself)."""
    names: str
    """The same for names in directories; `torn` is between two of them."""
    unit: int = SECTOR_BYTES
    """What is never torn itself."""

    def __str__(self) -> str:
        return f"data {self.data} by {self.unit} bytes, names {self.names}"


SURVIVALS = (
    Survival("kept", "kept"),
    Survival("dropped", "dropped"),
    Survival("dropped", "kept"),
    Survival("kept", "dropped"),
    Survival("torn", "torn", SECTOR_BYTES),
    Survival("torn", "torn", PAGE_BYTES),
    Survival("shuffled", "shuffled", SECTOR_BYTES),
    Survival("shuffled", "shuffled", PAGE_BYTES),
)


# --- files and directories ----------------------------------------------------------------------


class _Write(NamedTuple):
    position: int
    data: bytes

    def apply(self, content: bytearray) -> None:
        if len(content) < self.position:
            content.extend(bytes(self.position - len(content)))
        content[self.position : self.position + len(self.data)] = self.data

    def parts(self, unit: int) -> list[_Write]:
        """Return the write as writes of single units; units are those of the medium, not of the write."""
        cuts = [0, *range(unit - self.position % unit, len(self.data), unit), len(self.data)]
        return [_Write(self.position + start, self.data[start:stop]) for start, stop in pairwise(cuts)]


class _Resize(NamedTuple):
    length: int

    def apply(self, content: bytearray) -> None:
        if self.length < len(content):
            del content[self.length :]
        else:
            content.extend(bytes(self.length - len(content)))

    def parts(self, _unit: int) -> list[_Resize]:
        return [self]


class File:
    """The bytes of a file, now and on the medium."""

    __slots__ = ("content", "durable", "number", "pending")

    def __init__(self, number: int, content: bytes = b"") -> None:
        self.number = number
        self.content = bytearray(content)
        self.durable = bytearray(content)
        self.pending: list[_Write | _Resize] = []

    def change(self, change: _Write | _Resize) -> None:
        """Change the bytes, which a power loss may undo."""
        change.apply(self.content)
        self.pending.append(change)

    def sync(self) -> None:
        """Let all changes be durable."""
        for change in self.pending:
            change.apply(self.durable)
        self.pending.clear()

    def replace(self, content: bytes) -> None:
        """Let the file be these bytes, durably and at once."""
        self.content, self.durable, self.pending = bytearray(content), bytearray(content), []

    def copy(self) -> File:
        """Return the same file, with what is not synced."""
        copy = File(self.number)
        copy.content, copy.durable, copy.pending = bytearray(self.content), bytearray(self.durable), [*self.pending]
        return copy

    def survivor(self, survival: Survival, chance: random.Random) -> File:
        """Return what a power loss leaves."""
        content = bytearray(self.durable)
        for change in _survivors(self.pending, survival.data, chance, survival.unit):
            change.apply(content)
        return File(self.number, bytes(content))


def _survivors(
    pending: Sequence[_Write | _Resize], how: str, chance: random.Random, unit: int
) -> list[_Write | _Resize]:
    match how:
        case "kept":
            return [*pending]
        case "dropped":
            return []
    parts = [part for change in pending for part in change.parts(unit)]
    if how == "torn":
        return parts[: chance.randint(0, len(parts))]
    return [part for part in parts if chance.random() < 0.5]


class _Naming(NamedTuple):
    """A change of names: the first is gone, the second is there; either may be None."""

    old: tuple[int, str] | None
    """A directory's number, and a name in it."""
    new: tuple[int, str] | None
    node: int

    @property
    def directory(self) -> int:
        """The directory whose sync makes it durable."""
        if self.new is not None:
            return self.new[0]
        assert self.old is not None
        return self.old[0]

    def apply(self, directories: dict[int, dict[str, int]]) -> None:
        if self.old is not None and self.old[0] in directories:
            directories[self.old[0]].pop(self.old[1], None)
        if self.new is not None and self.new[0] in directories:
            directories[self.new[0]][self.new[1]] = self.node


# --- the disk -----------------------------------------------------------------------------------


class VirtualDisk:
    """The `Disk` protocol of the file store, in memory. For one thread at a time.

    `step` is called with a description right before every operation that changes something: there it may be copied.
    """

    def __init__(self, step: Callable[[str], None] = lambda _: None) -> None:
        self.step = step
        self._next_number = 2
        self._files: dict[int, File] = {}
        # Names now, names on the medium, and the changes between the two, in their order.
        self._directories: dict[int, dict[str, int]] = {1: {}}
        self._durable: dict[int, dict[str, int]] = {1: {}}
        self._namings: list[_Naming] = []
        self._opened: dict[int, File] = {}
        self._next_descriptor = 3
        # What files are called, for descriptions; until a name changes.
        self._names: dict[int, str] = {}

    # --- what a crash leaves --------------------------------------------------------------------

    def after_kill(self) -> VirtualDisk:
        """Return the disk as the next process finds it."""
        after = VirtualDisk()
        after._next_number = self._next_number
        after._files = {number: file.copy() for number, file in self._files.items()}
        after._directories = {number: dict(names) for number, names in self._directories.items()}
        after._durable = {number: dict(names) for number, names in self._durable.items()}
        after._namings = [*self._namings]
        return after

    def after_power_loss(self, survival: Survival, chance: random.Random) -> VirtualDisk:
        """Return the disk as the next boot finds it."""
        after = VirtualDisk()
        after._next_number = self._next_number
        after._files = {number: file.survivor(survival, chance) for number, file in sorted(self._files.items())}
        after._directories = {number: dict(names) for number, names in self._durable.items()}
        match survival.names:
            case "kept":
                namings = self._namings
            case "dropped":
                namings = []
            case "torn":
                namings = self._namings[: chance.randint(0, len(self._namings))]
            case _:
                namings = [naming for naming in self._namings if chance.random() < 0.5]
        for naming in namings:
            naming.apply(after._directories)
        after._durable = {number: dict(names) for number, names in after._directories.items()}
        return after

    # --- finding --------------------------------------------------------------------------------

    def _find(self, path: Path) -> int | None:
        number = 1
        for name in path.parts[1:]:
            names = self._directories.get(number)
            if names is None:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            found = names.get(name)
            if found is None:
                return None
            number = found
        return number

    def _parent(self, path: Path) -> int:
        number = self._find(path.parent)
        if number is None:
            raise _missing(path)
        if number not in self._directories:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        return number

    def _name(self, naming: _Naming) -> None:
        self._names.clear()
        naming.apply(self._directories)
        self._namings.append(naming)

    def file(self, path: Path) -> File:
        """Return the file of this name, as it is now."""
        number = self._find(path)
        if number is None or number not in self._files:
            raise _missing(path)
        return self._files[number]

    def paths(self) -> list[Path]:
        """Return the paths of all files."""
        found: list[Path] = []
        pending = [(Path("/"), 1)]
        while pending:
            path, number = pending.pop()
            for name, node in self._directories[number].items():
                if node in self._directories:
                    pending.append((path / name, node))
                else:
                    found.append(path / name)
        return sorted(found)

    def differences(self, before: VirtualDisk) -> list[str]:
        """Return, in words, what a crash has taken away or left half done, file by file."""
        mine, others = set(self.paths()), set(before.paths())
        found = [f"{path} is gone" for path in sorted(others - mine)]
        found += [f"{path} is back" for path in sorted(mine - others)]
        for path in sorted(mine & others):
            now, then = self.file(path).content, before.file(path).content
            if now != then:
                same = next((at for at, pair in enumerate(zip(now, then, strict=False)) if pair[0] != pair[1]), None)
                where = "" if same is None else f", and differs from byte {same} on"
                found.append(f"{path} has {len(now)} bytes of {len(then)}{where}")
        return found

    # --- the protocol ---------------------------------------------------------------------------

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        number = self._find(path)
        if number is None and create:
            parent = self._parent(path)
            self.step(f"create {path}")
            number = self._next_number
            self._next_number += 1
            self._files[number] = File(number)
            self._name(_Naming(None, (parent, path.name), number))
        elif number is None:
            raise _missing(path)
        elif exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if number not in self._files:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        descriptor = self._next_descriptor
        self._next_descriptor += 1
        self._opened[descriptor] = self._files[number]
        return descriptor

    def _file(self, descriptor: int) -> File:
        try:
            return self._opened[descriptor]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def close(self, descriptor: int) -> None:
        self._file(descriptor)
        del self._opened[descriptor]

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        return bytes(self._file(descriptor).content[position : position + count])

    def read_into(self, descriptor: int, buffer: WriteableBuffer, position: int) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(descriptor, len(view), position)
        view[: len(data)] = data
        return len(data)

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        return self.write_many(descriptor, [data], position)

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        data = b"".join(bytes(buffer) for buffer in buffers)
        file = self._file(descriptor)
        self.step(f"write {len(data)} bytes at {position} of {self._called(file)}")
        file.change(_Write(position, data))
        return len(data)

    def sync(self, descriptor: int) -> None:
        file = self._file(descriptor)
        self.step(f"sync {self._called(file)}")
        file.sync()

    def sync_in_vain(self, descriptor: int, chance: random.Random) -> None:
        """Fail as Linux does: some pages are on the medium, all count as clean, and no later sync writes them."""
        file = self._file(descriptor)
        self.step(f"sync in vain {self._called(file)}")
        for change in file.pending:
            for part in change.parts(PAGE_BYTES):
                if chance.random() < 0.5:
                    part.apply(file.durable)
        file.pending.clear()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def sync_directory(self, path: Path) -> None:
        number = self._find(path)
        if number is None:
            raise _missing(path)
        self.step(f"sync directory {path}")
        kept = []
        for naming in self._namings:
            if naming.directory == number:
                naming.apply(self._durable)
            else:
                kept.append(naming)
        self._namings = kept

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        file = self._file(descriptor)
        if position + count > len(file.content):
            self.step(f"allocate up to {position + count} of {self._called(file)}")
            file.change(_Resize(position + count))

    def free(self, descriptor: int) -> tuple[int, int]:
        self._file(descriptor)
        return SPACE_BYTES, SPACE_BYTES

    def truncate(self, descriptor: int, length: int) -> None:
        file = self._file(descriptor)
        self.step(f"truncate {self._called(file)} to {length}")
        file.change(_Resize(length))

    def size(self, descriptor: int) -> int:
        return len(self._file(descriptor).content)

    def inode(self, descriptor: int) -> int:
        return self._file(descriptor).number

    def names(self, path: Path) -> list[str]:
        number = self._find(path)
        return [] if number is None else sorted(self._directories[number])

    def exists(self, path: Path) -> bool:
        try:
            return self._find(path) is not None
        except NotADirectoryError:
            return False

    def make_directory(self, path: Path) -> None:
        parent = self._parent(path)
        if path.name in self._directories[parent]:
            return
        self.step(f"make directory {path}")
        number = self._next_number
        self._next_number += 1
        self._directories[number], self._durable[number] = {}, {}
        self._name(_Naming(None, (parent, path.name), number))

    def rename(self, old: Path, new: Path) -> None:
        node = self._find(old)
        if node is None:
            raise _missing(old)
        names = (self._parent(old), old.name), (self._parent(new), new.name)
        self.step(f"rename {old} to {new.name if new.parent == old.parent else new}")
        self._name(_Naming(*names, node))

    def remove(self, path: Path) -> None:
        node = self._find(path)
        if node is None:
            raise _missing(path)
        self.step(f"remove {path}")
        self._name(_Naming((self._parent(path), path.name), None, node))

    def remove_directory(self, path: Path) -> None:
        if self.names(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self.remove(path)

    def _called(self, file: File) -> str:
        if file.number not in self._names:
            self._names[file.number] = self._search_name(file)
        return self._names[file.number]

    def _search_name(self, file: File) -> str:
        for number, names in self._directories.items():
            for name, node in names.items():
                if node == file.number:
                    return f"{self._directory_name(number)}{name}"
        return f"removed file {file.number}"

    def _directory_name(self, number: int) -> str:
        for above, names in self._directories.items():
            for name, node in names.items():
                if node == number:
                    return f"{self._directory_name(above)}{name}/"
        return "/"


def _missing(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
