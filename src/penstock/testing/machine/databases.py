"""SQLite on a virtual machine: real SQLite, in memory, whose image at each commit is what the medium has.

SQLite promises that with `synchronous = FULL` a transaction is on the medium when its COMMIT returns, and that a crash
leaves all of it or nothing. That promise is SQLite's own, and tested by its makers harder than we could. What is ours,
and tested here, is when we commit in relation to what else we write. So a commit is one operation, like a sync, and a
machine may crash right before and right after it. Hooks below it (a VFS of our own) would test SQLite instead, are out
of the reach of Python's `sqlite3`, and would make every crash state a hundred times slower.
"""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.testing.machine.disk import File, VirtualDisk

_numbers = itertools.count()


class Databases:
    """All databases of one machine: each is a file of its disk, open for as long as the machine runs."""

    def __init__(self, disk: VirtualDisk) -> None:
        self._disk = disk
        # By the number of the file, so that one that is renamed stays the same.
        self._keepers: dict[int, tuple[str, sqlite3.Connection]] = {}

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open a database for use by any one thread at a time; transactions are begun and ended by hand."""
        return self._connect(path, isolation_level=None)

    def connect_application(self, path: Path) -> sqlite3.Connection:
        """Open a database as applications do: a transaction begins with the first change."""
        return self._connect(path, isolation_level="DEFERRED")

    def _connect(self, path: Path, isolation_level: Literal["DEFERRED"] | None) -> sqlite3.Connection:
        if not self._disk.exists(path):
            self._disk.close(self._disk.open(path, create=True))
            self._disk.sync_directory(path.parent)
        file = self._disk.file(path)
        if file.number not in self._keepers:
            self._keepers[file.number] = _restored(bytes(file.content))
        uri, _ = self._keepers[file.number]
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=isolation_level, check_same_thread=False, factory=_Connection
        )
        connection.belongs_to(file, self._disk.step, path.name)
        return connection

    def close(self) -> None:
        """Close what keeps the databases in memory; their files have everything that was committed."""
        for _, keeper in self._keepers.values():
            keeper.close()
        self._keepers.clear()


def _restored(image: bytes) -> tuple[str, sqlite3.Connection]:
    uri = f"file:/penstock-{next(_numbers)}?vfs=memdb"
    keeper = sqlite3.connect(uri, uri=True, check_same_thread=False, factory=_Mortal)
    if image:
        with closing(sqlite3.connect(":memory:")) as source:
            source.deserialize(image)
            source.backup(keeper)
    return uri, keeper


class _Mortal(sqlite3.Connection):
    """A connection that nobody need close: a process that is killed closes none."""

    def __del__(self) -> None:
        self.close()


class _Connection(_Mortal):
    """A connection whose commits are operations of the machine."""

    def belongs_to(self, file: File, step: Callable[[str], None], name: str) -> None:
        """Let this file be what is on the medium."""
        self._file = file
        self._step = step
        self._name = name
        self._changes = 0
        """How many there were when the transaction began; one fewer if it is one that means to write."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        if sql.startswith("BEGIN"):
            self._changes = self.total_changes - sql.startswith("BEGIN IMMEDIATE")
        commits = sql.startswith("COMMIT") and self._has_changed
        if commits:
            self._step(f"commit {self._name}")
        cursor = super().execute(sql, parameters)
        if commits:
            self._committed()
        return cursor

    def commit(self) -> None:
        if self._has_changed:
            self._step(f"commit {self._name}")
            super().commit()
            self._committed()
        else:
            super().commit()

    @property
    def _has_changed(self) -> bool:
        return self.in_transaction and self.total_changes > self._changes

    def _committed(self) -> None:
        self._file.replace(self.serialize())
        self._changes = self.total_changes
        self._step(f"after the commit of {self._name}")
