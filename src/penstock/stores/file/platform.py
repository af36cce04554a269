"""What the file store asks of the machine, as arguments: files, locks, threads, chance, databases, sockets.

Nothing else in this package opens a file, starts a thread or draws a random number. So a test can put a fault into
any single operation, and a simulator can run the very code that runs in production.

`Disk` is deliberately low: one method, one system call. What must happen in which order, and what is synced when, is
decided by those who call it, where a reader sees it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.clock import Clock, SystemClock
from penstock.stores.file.filesystem import check_filesystem
from penstock.stores.file.sockets import DatagramSockets, UnixDatagramSockets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer, WriteableBuffer

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


# --- files ------------------------------------------------------------------------------------


class Disk(Protocol):
    """Files, one system call at a time. Errors are `OSError`, as the system gives them."""

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        """Open a file for reading and writing (or reading alone), and return its descriptor."""

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        """Read up to `count` bytes at a position; fewer only at the end of the file."""

    def read_into(self, descriptor: int, buffer: WriteableBuffer, position: int) -> int:
        """Read into a buffer, and return how many bytes came."""

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        """Write at a position, and return how many bytes went out."""

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        """Write buffers one after the other, in one call, and return how many bytes went out."""

    def sync(self, descriptor: int) -> None:
        """Return when the data of the file, and what is needed to read it back, is on the medium."""

    def sync_directory(self, path: Path) -> None:
        """Return when the entries of a directory are on the medium."""

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        """Make sure that these bytes can be written; the file grows to hold them, as zeros."""

    def free(self, descriptor: int) -> tuple[int, int]:
        """Return how many bytes of the file system are free to use, and how many it has."""

    def truncate(self, descriptor: int, length: int) -> None:
        """Cut the file, or extend it by zeros."""

    def size(self, descriptor: int) -> int:
        """Return the length of the file."""

    def inode(self, descriptor: int) -> int:
        """Return the number of the file: a copy of it has another one."""

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory, sorted; empty if there is no such directory."""

    def exists(self, path: Path) -> bool:
        """Say whether there is such a file or directory; an error if that cannot be told."""

    def make_directory(self, path: Path) -> None:
        """Make a directory; it may exist already, its parent must."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, replacing what had it."""

    def remove(self, path: Path) -> None:
        """Remove a file."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""


class SystemDisk:
    """The machine's own files."""

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        flags |= os.O_CREAT if create else 0
        flags |= os.O_EXCL if exclusive else 0
        return os.open(path, flags, FILE_MODE)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        return os.pread(descriptor, count, position)

    def read_into(self, descriptor: int, buffer: WriteableBuffer, position: int) -> int:
        return os.preadv(descriptor, [buffer], position)

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        return os.pwrite(descriptor, data, position)

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        return os.pwritev(descriptor, buffers, position)

    def sync(self, descriptor: int) -> None:
        if sys.platform == "darwin":
            # There `fsync` hands the data to the drive and does not wait for the medium.
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        if sys.platform == "darwin":
            os.ftruncate(descriptor, position + count)
        else:
            os.posix_fallocate(descriptor, position, count)

    def free(self, descriptor: int) -> tuple[int, int]:
        status = os.fstatvfs(descriptor)
        return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize

    def truncate(self, descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def inode(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_ino

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - the names are wanted, not paths
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        try:
            os.stat(path)  # noqa: PTH116 - asked in every turn, and `Path.exists` takes five times as long
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def make_directory(self, path: Path) -> None:
        path.mkdir(DIRECTORY_MODE, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        path.rmdir()


# --- record locks -----------------------------------------------------------------------------


class RecordLocks(Protocol):
    """Exclusive locks on single bytes of one file, held by this process as a whole.

    They vanish when the process ends, however it ends, and a forked child does not inherit them. Threads of one
    process do not exclude each other: somebody else has to see to that.
    """

    def try_lock(self, byte: int) -> bool:
        """Lock the byte if no other process has it."""

    def lock(self, byte: int) -> None:
        """Lock the byte, waiting for as long as another process has it."""

    def unlock(self, byte: int) -> None:
        """Give it back."""

    def holder(self, byte: int) -> int | None:
        """Return the process that has it; None if it is free or this process's own."""


CLOSED = 0x7FFF_FFFF
"""A number that no descriptor has: the system refuses whatever is tried with it."""
DEADLOCK_PAUSE_SECONDS = 0.0003
# struct flock: Linux begins with type and whence, the BSDs with start and length.
_FLOCK = "qqihh" if sys.platform == "darwin" else "hhqqi4x"


class SystemRecordLocks:
    """POSIX record locks. The descriptor stays open: closing any one of a file drops all its locks."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def close_if_removed(self) -> bool:
        """Close the descriptor of a file that has no name any more: nobody can ever come to lock it."""
        if os.fstat(self._descriptor).st_nlink:
            return False
        descriptor, self._descriptor = self._descriptor, CLOSED
        os.close(descriptor)
        return True

    def try_lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def lock(self, byte: int) -> None:
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, byte)
            except OSError as error:
                # With several locks in several processes the kernel sees cycles that are none, since it takes all
                # threads of a process for one. It means no more than "busy".
                if error.errno not in {errno.EDEADLK, errno.EINTR}:
                    raise
                time.sleep(DEADLOCK_PAUSE_SECONDS)
            else:
                return

    def unlock(self, byte: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)

    def holder(self, byte: int) -> int | None:
        if sys.platform == "darwin":
            asked = struct.pack(_FLOCK, byte, 1, 0, fcntl.F_WRLCK, os.SEEK_SET)
            _, _, pid, kind, _ = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        else:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else pid


_opened: dict[tuple[int, int], SystemRecordLocks] = {}
_opening = threading.Lock()


def system_record_locks(path: Path) -> SystemRecordLocks:
    """Return this process's locks on a file, the same object for the same file."""
    with _opening:
        try:
            status = os.stat(path)  # noqa: PTH116 - never open it only to look: closing it again would drop all locks
        except FileNotFoundError:
            status = None
        if status is None or (status.st_dev, status.st_ino) not in _opened:
            # A process that makes and removes many stores, such as a test suite, must not run out of descriptors.
            for removed in [file for file, locks in _opened.items() if locks.close_if_removed()]:
                del _opened[removed]
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            status = os.fstat(descriptor)
            _opened[status.st_dev, status.st_ino] = SystemRecordLocks(descriptor)
        return _opened[status.st_dev, status.st_ino]


def _forget_locks_after_fork() -> None:
    # The descriptors stay open, and unused: they are the parent's.
    global _opening  # noqa: PLW0603 - it may be held by a thread that the child does not have
    _opened.clear()
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forget_locks_after_fork)


# --- the rest ---------------------------------------------------------------------------------


def connect_sqlite(path: Path) -> sqlite3.Connection:
    """Open a database for use by any one thread at a time; transactions are begun and ended by hand."""
    return sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False, cached_statements=256)


def spawn_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a thread that does not keep the program alive."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def read_boot_id() -> bytes:
    """Return 16 bytes that change when the machine boots."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 - not a file of ours
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except FileNotFoundError:
        # When it booted, to ten seconds: without the file this is the best that there is.
        booted = (time.time() - SystemClock().monotonic()) // 10
        return int(booted).to_bytes(16, "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Everything that the file store asks of its surroundings."""

    disk: Disk = field(default_factory=SystemDisk)
    clock: Clock = field(default_factory=SystemClock)
    boot_id: bytes = field(default_factory=read_boot_id)
    random: Callable[[int], bytes] = secrets.token_bytes
    spawn: Callable[[str, Callable[[], None]], threading.Thread] = spawn_thread
    record_locks: Callable[[Path], RecordLocks] = system_record_locks
    """Returns the same object for the same file within a process."""
    connect: Callable[[Path], sqlite3.Connection] = connect_sqlite
    sockets: DatagramSockets = field(default_factory=UnixDatagramSockets)
    check_directory: Callable[[Path], None] = check_filesystem
    """Refuses a place where a store could lose data."""
