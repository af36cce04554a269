"""One SQLite file of the store, as the ports use it: reads from snapshots, writes by group commit.

**Writing.** There is one group-committing writer per process and file, and it needs no thread of its own: whoever
writes first becomes the leader. The leader takes the fair gate, begins a transaction, runs its own call and those that
queued meanwhile, commits once for all of them, gives the gate back, and hands the lead to the first of those who came
too late. So a single writer pays for no hand-over between threads, and many writers share one sync. After about
`GROUP_SECONDS` of work a transaction takes no further call.

Each call but the first runs in a savepoint: one that is refused leaves nothing behind, and the others go on. If the
transaction as a whole cannot be written, every call of it gets the error, and nothing of them is there: also not after
a crash, because what a failed sync may have left in the WAL is overwritten before anybody is answered, or writing
stops.

**Reading** never uses the writing connection, never waits for a writer, and sees everything that was committed by
whichever process before it began. Whoever reads fetches what it needs and lets go, so that no reader keeps the WAL
from being reused for long.
"""

from __future__ import annotations

import copy
import sqlite3
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

from penstock.errors import PenstockError, StateMissing, StoreClosed, StoreError, StoreFull, WritingStopped
from penstock.stores.file.gate import BULK_GATE, CONTROL_GATE
from penstock.stores.file.state.connections import Connections
from penstock.stores.file.state.schema import BULK, CONTROL, read_identity
from penstock.stores.file.state.sealing import REPAIR

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.stores.file.gate import Gate, Gates
    from penstock.stores.file.platform import Platform
    from penstock.stores.file.state.schema import Identity

T = TypeVar("T")

BEGIN_WRITING = "BEGIN IMMEDIATE"
BEGIN_READING = "BEGIN"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"
BEGIN_CALL = "SAVEPOINT call"
END_CALL = "RELEASE call"
UNDO_CALL = "ROLLBACK TO call"
DATA_VERSION = "PRAGMA data_version"
MEND = "UPDATE mends SET number = number + 1"

GROUP_SECONDS = 0.010
"""After so much work a transaction takes no further call."""

SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite's calls end with; the second if the message quotes a damaged schema, which need not be text."""
_PRIMARY = 0xFF  # what an extended error code begins with
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# After these a transaction is not worth going on with, nor is its connection: SQLite opens a file for reading alone
# when it cannot be opened for writing at that moment.
_FATAL = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_CANTOPEN,
    *_DAMAGE,
}


class _Call(Generic[T]):
    """A write that waits for its turn; `wake` is released when it is answered, or has to lead."""

    __slots__ = ("answer", "answered", "error", "wake", "work")

    def __init__(self, work: Callable[[sqlite3.Connection], T]) -> None:
        self.work = work
        self.answer: T | None = None
        self.error: BaseException | None = None
        self.answered = False
        self.wake: threading.Lock | None = None


class Database:
    """One of the two files; closed with the store."""

    def __init__(self, path: Path, platform: Platform, gate: Gate, stall_seconds: float) -> None:
        self.path = path
        self._clock = platform.clock
        self._gate = gate
        self._stall_seconds = stall_seconds
        self._connections = Connections(path, platform)
        self._mutex = threading.Lock()
        # Guarded by the mutex. The leader's call is the first of the queue.
        self._queue: deque[_Call[Any]] = deque()
        self._led = False
        self._stopped: str | None = None  # changed by the leader alone

    def close(self) -> None:
        """Close all connections; those at work are waited for, later calls raise `StoreClosed`."""
        self._connections.close()

    def identity(self, store_id: str) -> Identity:
        """Return what the file says of itself; `StateMissing` unless it is a sound one of this store."""
        return self.read(lambda connection: read_identity(connection, self.path.name, store_id))

    # --- reading -------------------------------------------------------------------------------

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` on one snapshot and return its answer."""
        try:
            connection = self._connections.lend_reader()
        except SQLITE_ERRORS as error:
            raise self._explained(error) from error
        failed = False
        try:
            connection.execute(BEGIN_READING)
            answer = work(connection)
            connection.execute(COMMIT)
        except SQLITE_ERRORS as error:
            failed = True
            raise self._explained(error) from error
        else:
            return answer
        finally:
            discard = connection.in_transaction
            self._connections.take_back(connection, reading=True, discard=discard, failed=failed)

    # --- writing -------------------------------------------------------------------------------

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction, perhaps with others, and return its answer once that is durable.

        What `work` raises reaches the caller, and nothing that it did is there.
        """
        call = _Call(work)
        with self._mutex:
            self._queue.append(call)
            leads = not self._led
            if leads:
                self._led = True
            else:
                call.wake = threading.Lock()
                call.wake.acquire()
        if not leads:
            self._wait(call)
        if not call.answered:
            self._lead()
        if call.error is not None:
            raise call.error
        return cast("T", call.answer)

    def era(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Return what changes when anybody else wrote, or a group failed here.

        Until then, what the calls of this database have seen and written may be remembered.
        """
        [version] = connection.execute(DATA_VERSION).fetchone()
        return self._connections.writer_number, version

    def _wait(self, call: _Call[Any]) -> None:
        assert call.wake is not None
        try:
            call.wake.acquire()
        except BaseException:
            # Interrupted. If nobody has begun with it, it was not written; a lead that it was given goes on.
            with self._mutex:
                if call in self._queue:
                    leads = call.wake.acquire(blocking=False)
                    self._queue.remove(call)
                    if leads:
                        self._hand_over()
            raise

    def _lead(self) -> None:
        """Commit for those who queued, and hand the lead over. The own call is the first."""
        begun: list[_Call[Any]] = []
        error: BaseException | None = None
        try:
            with self._gate.turn(self.path.name, self._stall_seconds):
                self._commit_group(begun)
        except BaseException as raised:  # noqa: BLE001 - it is the answer of every call, and raised by each
            error = raised
        with self._mutex:
            if error is not None and not begun:
                # The gate or the file cannot be had: that is so for everybody who waits.
                begun.extend(self._queue)
                self._queue.clear()
            self._hand_over()
        for index, call in enumerate(begun):
            if error is not None:
                call.error = error if index == 0 else _shared(error)
            call.answered = True
            if call.wake is not None and index > 0:
                call.wake.release()

    def _hand_over(self) -> None:
        # The mutex is held.
        if not self._queue:
            self._led = False
            return
        following = self._queue[0]
        assert following.wake is not None
        following.wake.release()

    def _commit_group(self, begun: list[_Call[Any]]) -> None:
        if self._stopped is not None:
            raise WritingStopped(self._stopped)
        try:
            connection = self._connections.lend_writer()
        except SQLITE_ERRORS as error:
            raise self._explained(error) from error
        done = failed = False
        try:
            connection.execute(BEGIN_WRITING)
            self._run_calls(connection, begun)
            self._commit(connection)
            done = True
        except SQLITE_ERRORS as error:
            failed = True
            raise self._explained(error) from error
        finally:
            self._connections.take_back(connection, reading=False, discard=not done, failed=failed)

    def _run_calls(self, connection: sqlite3.Connection, begun: list[_Call[Any]]) -> None:
        end = self._clock.monotonic() + GROUP_SECONDS
        while True:
            with self._mutex:
                if not self._queue:
                    return
                call = self._queue.popleft()
            begun.append(call)
            self._run_call(connection, call, first=len(begun) == 1)
            if self._clock.monotonic() >= end:
                return

    def _run_call(self, connection: sqlite3.Connection, call: _Call[Any], *, first: bool) -> None:
        # The first one needs no savepoint: there is nothing before it that would have to stay.
        if not first:
            connection.execute(BEGIN_CALL)
        try:
            call.answer = call.work(connection)
        except sqlite3.Error as error:
            if not connection.in_transaction or _primary(error) in _FATAL:
                raise
            call.error = self._explained(error)
        except Exception as error:  # noqa: BLE001 - it is the caller's, and raised there
            call.error = error
        if call.error is None:
            if not first:
                connection.execute(END_CALL)
        elif first:
            connection.execute(ROLLBACK)
            connection.execute(BEGIN_WRITING)
        else:
            connection.execute(UNDO_CALL)
            connection.execute(END_CALL)

    def _commit(self, connection: sqlite3.Connection) -> None:
        try:
            connection.execute(COMMIT)
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute(ROLLBACK)
            if _primary(error) == sqlite3.SQLITE_IOERR:
                self._mend(connection, error)
            raise

    def _mend(self, connection: sqlite3.Connection, cause: sqlite3.Error) -> None:
        """Overwrite what a failed sync may have left in the WAL: after a crash it would count as committed."""
        try:
            connection.execute(BEGIN_WRITING)
            connection.execute(MEND)
            connection.execute(COMMIT)
        except sqlite3.Error as error:
            self._stopped = (
                f"{self.path}: a sync failed ({cause}), and so did what should have mended that ({error}). "
                f"What was to be written is not there, but may appear after a crash; look at the disk, then open the "
                f"store anew"
            )
            raise WritingStopped(self._stopped) from error

    # --- errors --------------------------------------------------------------------------------

    def _explained(self, error: sqlite3.Error | UnicodeDecodeError) -> PenstockError:
        """Return what an error of SQLite means here. Nothing was written."""
        kind = _primary(error)
        if kind in _DAMAGE or isinstance(error, UnicodeDecodeError) or "Could not decode to UTF-8" in str(error):
            return StateMissing(f"{self.path} is damaged ({error}); {REPAIR}")
        if kind == sqlite3.SQLITE_CANTOPEN:
            # It is there (`Connections` looks first), but this process may not open it, or no more files at all.
            return StoreError(
                f"{self.path} cannot be opened ({error}); nothing was written. Look at its permissions, and at how "
                f"many files this process may open"
            )
        if kind == sqlite3.SQLITE_FULL:
            return StoreFull(f"{self.path}: the disk is full; nothing was written, and writing goes on with space")
        if isinstance(error, sqlite3.ProgrammingError) and "closed database" in str(error):
            return StoreClosed(f"{self.path.name} is closed with its store: open it anew")
        return StoreError(f"{self.path}: {error}; nothing was written")


def _primary(error: sqlite3.Error | UnicodeDecodeError) -> int:
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & _PRIMARY


def _shared(error: BaseException) -> BaseException:
    """Return the error of a group for one of its calls; each thread raises its own."""
    if isinstance(error, PenstockError):
        return copy.copy(error)
    # An interrupt may have come just after the commit, so this is no `PenstockError`, which would say "not written".
    return InterruptedError(f"the thread that committed for others was interrupted by {type(error).__name__}")


# --- both files -------------------------------------------------------------------------------


class Databases(NamedTuple):
    """The two files of a store, opened."""

    control: Database
    bulk: Database
    identity: Identity
    """Of `control.db`."""

    def close(self) -> None:
        """Close both."""
        self.control.close()
        self.bulk.close()


def open_databases(
    directory: Path, store_id: str, platform: Platform, gates: Gates, *, stall_seconds: float
) -> Databases:
    """Open both files; `StateMissing` if one is missing, of another store or damaged, `NewerFormat` if newer."""
    control = Database(directory / CONTROL, platform, gates.gate(CONTROL_GATE), stall_seconds)
    bulk = Database(directory / BULK, platform, gates.gate(BULK_GATE), stall_seconds)
    try:
        identity = control.identity(store_id)
        bulk.identity(store_id)
    except BaseException:
        control.close()
        bulk.close()
        raise
    return Databases(control, bulk, identity)
