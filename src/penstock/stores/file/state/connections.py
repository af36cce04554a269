"""The connections of one process to one database: one that writes, and a few that read.

**A fork never copies an open connection.** SQLite keeps the locks of a process in memory, which a child inherits while
the locks themselves stay with the parent. A child that opens the file anew would then believe that it holds locks
which it does not hold; when the parent closes, the WAL is deleted under the child, and what the child committed is
gone. So all connections are closed right before a fork, and opened again when somebody needs one. If somebody is
still at work after `FORK_PATIENCE_SECONDS`, the child keeps what it inherited alive and never touches it.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.errors import StateMissing, StoreClosed
from penstock.stores.file.state.schema import configure
from penstock.stores.file.state.sealing import REPAIR

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from penstock.stores.file.platform import Platform

IDLE_READERS_MAX = 16
FORK_PATIENCE_SECONDS = 5.0


class Connections:
    """Lends connections; each to one thread at a time."""

    def __init__(self, path: Path, platform: Platform) -> None:
        self._path = path
        self._platform = platform
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._writer: sqlite3.Connection | None = None
        self._idle: list[sqlite3.Connection] = []
        self._lent: list[sqlite3.Connection | None] = []
        self._opened = 0
        self._forking = False
        self._closed = False
        with _registering:  # never in the middle of a fork
            self._number = next(_numbers)
            _living.add(self)

    @property
    def writer_number(self) -> int:
        """Which one the writing connection is: another number, another connection."""
        return self._opened

    def lend_reader(self) -> sqlite3.Connection:
        """Return a connection that only reads; give it back."""
        self._begin()
        connection = self._idle.pop() if self._idle else None
        return self._lend(connection, reading=True)

    def lend_writer(self) -> sqlite3.Connection:
        """Return the connection that writes; only the one who leads a group commit asks, and gives it back."""
        self._begin()
        return self._lend(self._writer, reading=False)

    def take_back(
        self, connection: sqlite3.Connection, *, reading: bool, discard: bool = False, failed: bool = False
    ) -> None:
        """Take back what was lent; what ended with an error is closed, which undoes all that it left unfinished.

        After an error of SQLite itself so is everything that is idle: it keeps what it knows of its locks, and whether
        a file could be opened for writing, for all connections of a process together, until the last one is closed.
        """
        with self._changed:
            if connection not in self._lent:
                return  # a child's, and abandoned
            self._lent.remove(connection)
            if failed:
                self._close_idle()
            if failed or discard or self._closed or (reading and len(self._idle) >= IDLE_READERS_MAX):
                connection.close()
            elif reading:
                self._idle.append(connection)
            else:
                self._writer = connection
            self._changed.notify_all()

    def close(self) -> None:
        """Close all, waiting for those who are at work; later calls raise `StoreClosed`."""
        with self._changed:
            self._closed = True
            while self._lent:
                self._changed.wait()
            self._close_idle()

    def _begin(self) -> None:
        self._changed.acquire()
        while self._forking:
            self._changed.wait()
        if self._closed:
            self._changed.release()
            raise StoreClosed(f"{self._path.name} is closed with its store: open it anew")

    def _lend(self, connection: sqlite3.Connection | None, *, reading: bool) -> sqlite3.Connection:
        # Entered with `_changed` held. A new connection is opened under it, too: a fork must not come between.
        try:
            if connection is None:
                connection = self._open(reading=reading)
                self._opened += not reading
            if not reading:
                self._writer = None
            self._lent.append(connection)
            return connection
        finally:
            self._changed.release()

    def _open(self, *, reading: bool) -> sqlite3.Connection:
        if not self._platform.disk.exists(self._path):  # SQLite would make an empty one
            raise StateMissing(f"{self._path} is missing; {REPAIR}")
        connection = self._platform.connect(self._path)
        try:
            configure(connection, reading=reading)
        except BaseException:
            connection.close()
            raise
        return connection

    def _close_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        # Last, so that a connection that writes takes over what is left in the WAL.
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # --- forks ---------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Close everything, and hold up whoever wants a connection."""
        with self._changed:
            self._forking = True
            self._changed.wait_for(lambda: not self._lent, FORK_PATIENCE_SECONDS)
            self._close_idle()

    def after_fork_in_parent(self) -> None:
        """Let them go on."""
        with self._changed:
            self._forking = False
            self._changed.notify_all()

    def after_fork_in_child(self) -> None:
        """Refuse every call; what could not be closed before stays alive and unused."""
        _abandoned.append(self._lent)
        self._lent = []
        self._changed = threading.Condition()
        self._forking = False
        self._closed = True


_living: weakref.WeakSet[Connections] = weakref.WeakSet()
_registering = threading.Lock()
_numbers = itertools.count()
_abandoned: list[object] = []


def _before_fork() -> None:
    _registering.acquire()
    # Those opened first come first: whoever writes to `control.db` may have to look into `bulk.db` to get done.
    for connections in sorted(_living, key=attrgetter("_number")):
        connections.before_fork()


def _after_fork_in_parent() -> None:
    for connections in list(_living):
        connections.after_fork_in_parent()
    _registering.release()


def _after_fork_in_child() -> None:
    global _registering  # noqa: PLW0603 - held by the parent's thread
    _registering = threading.Lock()
    for connections in list(_living):
        connections.after_fork_in_child()
    _living.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
