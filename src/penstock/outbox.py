"""SqliteOutbox: publishing inside a transaction of the application's own SQLite file.

What this promises:

* **Neither or both.** `stage` inserts with the caller's connection, in the caller's transaction, and never commits. The
  event exists if and when that transaction commits.
* **Nothing leaves that could still be undone.** A caller's commit may rest in memory (WAL with `synchronous=NORMAL`
  syncs nothing at a commit). A claim therefore always writes, and commits with `synchronous=FULL`, which syncs whatever
  was committed before it, and only then returns rows. A power cut cannot take away the transaction of an event that
  was published.
* **A sequence never comes again.** It is the row's id, `AUTOINCREMENT`, so a drained table does not begin anew. SQLite
  has one writer at a time, so ids are in the order of the commits.
* **A row is removed only when it is in the log**, or kept aside with the reason if it never can be: `failed`.

Three tables hold this: `penstock_outbox` (what waits), `penstock_outbox_failed` (what was set aside; apart from the
first, so that the oldest rows and their number are found without passing it) and `penstock_outbox_identity` (one row:
the lasting producer, the highest epoch of the mover's lease, the number of claims and the highest sequence claimed).

An epoch is stale here once a higher one was used on this file. A mover that lost its lease a moment ago may still claim
until its successor did so first; that is harmless, because the log recognises what it repeats.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.errors import (
    Fenced,
    IntegrityError,
    InvalidEvent,
    PenstockError,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    UsageError,
)
from penstock.events import Event, check_event
from penstock.producers import lasting_producer
from penstock.rows import Fence, Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

BUSY_SECONDS = 5.0
"""How long a call waits for another connection's transaction."""

ROWS_MAX = 1_000_000
"""How many rows may wait, and how many may be set aside."""

ROW_BYTES_MAX = 64 << 20
"""What one encoded event may take; the bus has refused most of that already, by its own limits."""

CLAIM_BYTES_MAX = 8 << 20
"""A claim ends with the row that reaches this, so that large events do not fill the memory by the hundred."""

REASON_CHARACTERS_MAX = 500

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS penstock_outbox"
    " (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, event BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS penstock_outbox_failed"
    " (id INTEGER PRIMARY KEY, topic TEXT NOT NULL, reason TEXT NOT NULL, event BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS penstock_outbox_identity"
    " (one INTEGER PRIMARY KEY CHECK (one = 1), producer BLOB NOT NULL,"
    " epoch INTEGER NOT NULL, claims INTEGER NOT NULL, claimed INTEGER NOT NULL)",
)

_decoder = msgspec.msgpack.Decoder(Event)


class FailedRow(NamedTuple):
    """A row that cannot enter the log as it is; it stays until it is retried or discarded."""

    sequence: int
    topic: str
    reason: str
    event: Event | None
    """None if its bytes do not hold an event."""


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


class SqliteOutbox:
    """The `Outbox` port on the application's SQLite file. Making one does no I/O; safe to use from any thread.

    `connect` opens a connection of its own in autocommit mode (`isolation_level=None`) that any thread may use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        connect: Callable[[Path], sqlite3.Connection] = _connect,
        rows_max: int = ROWS_MAX,
    ) -> None:
        self.path = Path(path)
        self._connect = connect
        self._rows_max = rows_max
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._producer = b""
        self._closed = False

    def __repr__(self) -> str:
        return f"<SqliteOutbox {str(self.path)!r}>"

    @property
    def producer(self) -> bytes:
        """See `Outbox`. The same for the life of the file, unless `renew_identity` is called."""
        with self._opened():
            return self._producer

    def close(self) -> None:
        """Close the outbox's own connection; may be repeated. Staging needs none and goes on."""
        with self._lock:
            connection, self._connection, self._closed = self._connection, None, True
            if connection is not None:
                connection.close()

    # --- in the caller's transaction ---------------------------------------------------------

    def stage(self, transaction: Any, rows: Sequence[Staged]) -> None:
        """See `Outbox`; `transaction` is a `sqlite3.Connection` to this outbox's file.

        What SQLite itself refuses (a locked file, a full disk) is raised as it is, as from the caller's own statements.
        """
        encoded = [(row.topic, _encoded(row.event)) for row in rows]
        cursor = _cursor_of(transaction)
        self._check_file(cursor)
        _begin(transaction)
        cursor.execute("SAVEPOINT penstock_stage")
        try:
            self._insert(cursor, encoded)
        except BaseException:
            # After some errors SQLite has rolled back the whole transaction by itself.
            if transaction.in_transaction:
                cursor.execute("ROLLBACK TO penstock_stage")
                cursor.execute("RELEASE penstock_stage")
            raise
        cursor.execute("RELEASE penstock_stage")

    def _insert(self, cursor: sqlite3.Cursor, encoded: Sequence[tuple[str, bytes]]) -> None:
        if cursor.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = 'penstock_outbox'").fetchone() == (0,):
            for statement in _SCHEMA:
                cursor.execute(statement)
        # Each end of the table is found at once (not so both by one SELECT), and between them few rows are missing.
        [last] = cursor.execute("SELECT MAX(id) FROM penstock_outbox").fetchone()
        [first] = cursor.execute("SELECT MIN(id) FROM penstock_outbox").fetchone()
        waiting = 0 if last is None else last - first + 1
        if waiting + len(encoded) > self._rows_max:
            raise StoreFull(
                f"outbox {self.path}: {waiting:,} rows wait and {len(encoded):,} more exceed {self._rows_max:,}; "
                f"nothing was staged. Is a bus open with outbox={str(self.path)!r}, and its store writable?"
            )
        cursor.executemany("INSERT INTO penstock_outbox (topic, event) VALUES (?, ?)", encoded)

    def _check_file(self, cursor: sqlite3.Cursor) -> None:
        file = _main_file(cursor)
        # A file that is only attached does not count: a transaction over two files is two in WAL mode.
        if not file or not self.path.exists() or not self.path.samefile(file):
            raise UsageError(
                f"this connection is to {file or 'a database in memory'}, but the outbox is {self.path}: nothing would "
                f"move what is staged there; connect to the file that the bus was given as `outbox`"
            )

    # --- for the mover -----------------------------------------------------------------------

    def waiting(self) -> bool:
        """Say whether there may be something to claim; cheap enough to be asked all the time."""
        with self._opened() as connection:
            [found] = connection.execute("SELECT EXISTS (SELECT 1 FROM penstock_outbox)").fetchone()
            return bool(found)

    def claimed(self, fence: Fence) -> int:
        """Return the highest sequence that was ever claimed: no row above it can have been in a log.

        From now on nobody of a lower epoch claims any more, so it stays true for this one.
        """
        with self._writing(fence) as connection:
            [claimed] = connection.execute("SELECT claimed FROM penstock_outbox_identity").fetchone()
            return int(claimed)

    def claim(self, limit: int, fence: Fence) -> list[Staged]:
        """See `Outbox`. Fewer than `limit` are returned if they are large."""
        rows, unreadable, size = [], {}, 0
        with self._writing(fence) as connection:
            statement = "SELECT id, topic, event FROM penstock_outbox ORDER BY id LIMIT ?"
            for sequence, topic, event in connection.execute(statement, (limit,)):
                try:
                    rows.append(Staged(topic=topic, event=_decoded(event), sequence=sequence))
                except PenstockError as error:
                    unreadable[sequence] = str(error)
                size += len(event)
                if size >= CLAIM_BYTES_MAX:
                    break
            self._set_aside(connection, unreadable)
            last = max((row.sequence for row in rows), default=0)
            # The counter makes this a change in any case: a commit that changes nothing syncs nothing, see above.
            connection.execute(
                "UPDATE penstock_outbox_identity SET claims = claims + 1, claimed = MAX(claimed, ?)", (last,)
            )
        return rows

    def done(self, sequences: Sequence[int], fence: Fence) -> None:
        """See `Outbox`."""
        with self._writing(fence) as connection:
            connection.executemany("DELETE FROM penstock_outbox WHERE id = ?", [(number,) for number in sequences])

    def set_aside(self, reasons: Mapping[int, str], fence: Fence) -> None:
        """Keep rows apart that cannot enter the log, so that the others move on; `Fenced` as for `done`."""
        with self._writing(fence) as connection:
            self._set_aside(connection, reasons)

    def _set_aside(self, connection: sqlite3.Connection, reasons: Mapping[int, str]) -> None:
        if not reasons:
            return
        [held] = connection.execute("SELECT COUNT(*) FROM penstock_outbox_failed").fetchone()
        if held + len(reasons) > self._rows_max:
            raise StoreFull(
                f"outbox {self.path}: {held:,} rows are set aside already, and nothing moves before they are retried "
                f"or discarded: see SqliteOutbox({str(self.path)!r}).failed()"
            )
        for sequence, reason in reasons.items():
            logger.error("outbox %s: row %d was set aside: %s", self.path, sequence, reason)
            connection.execute(
                "INSERT INTO penstock_outbox_failed (id, topic, reason, event)"
                " SELECT id, topic, ?, event FROM penstock_outbox WHERE id = ?",
                (reason[:REASON_CHARACTERS_MAX], sequence),
            )
            connection.execute("DELETE FROM penstock_outbox WHERE id = ?", (sequence,))

    # --- for people --------------------------------------------------------------------------

    def pending(self) -> int:
        """See `Outbox`. What was set aside is not counted."""
        with self._opened() as connection:
            [count] = connection.execute("SELECT COUNT(*) FROM penstock_outbox").fetchone()
            return int(count)

    def failed(self, *, after: int = 0, limit: int = 100) -> list[FailedRow]:
        """Return the rows that were set aside, by sequence, beginning after the given one."""
        with self._opened() as connection:
            statement = "SELECT id, topic, reason, event FROM penstock_outbox_failed WHERE id > ? ORDER BY id LIMIT ?"
            found = connection.execute(statement, (after, limit)).fetchall()
        return [FailedRow(sequence, topic, reason, _event_or_none(event)) for sequence, topic, reason, event in found]

    def retry(self, sequences: Sequence[int]) -> int:
        """Let rows that were set aside wait again, behind all others and with new sequences; return how many.

        Almost every reason says that the row surely is not in the log. Where nobody could tell (`ProducerExpired`, or a
        file that was restored), look first whether its event is there.
        """
        moved = 0
        with self._writing() as connection:
            for sequence in sequences:
                moved += connection.execute(
                    "INSERT INTO penstock_outbox (topic, event)"
                    " SELECT topic, event FROM penstock_outbox_failed WHERE id = ?",
                    (sequence,),
                ).rowcount
                connection.execute("DELETE FROM penstock_outbox_failed WHERE id = ?", (sequence,))
        return moved

    def discard(self, sequences: Sequence[int]) -> int:
        """Remove rows that were set aside, for good; return how many."""
        with self._writing() as connection:
            numbers = [(sequence,) for sequence in sequences]
            return connection.executemany("DELETE FROM penstock_outbox_failed WHERE id = ?", numbers).rowcount

    def renew_identity(self) -> None:
        """Begin anew as another producer, after this file was restored from an older copy.

        Its sequences were used before for rows that the copy does not have, so the log would take new rows for
        repeats. Call it while no bus is open with this outbox.
        """
        with self._writing() as connection:
            self._producer = lasting_producer()
            connection.execute("UPDATE penstock_outbox_identity SET producer = ?", (self._producer,))

    # --- the connection ----------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Use the outbox's own connection in this block; what SQLite raises becomes one of our errors."""
        with self._lock:
            if self._closed:
                raise StoreClosed(f"outbox {self.path} is closed: make a new one")
            try:
                if self._connection is None:
                    self._connection = self._open()
                yield self._connection
            except sqlite3.Error as error:
                raise self._explained(error) from error

    def _open(self) -> sqlite3.Connection:
        connection = self._connect(self.path)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA fullfsync = ON")  # what a sync is on macOS; nothing elsewhere
            # Written only if it is new, so that a transaction of somebody else does not stand in the way.
            self._producer = _identity(connection) or self._create(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _create(self, connection: sqlite3.Connection) -> bytes:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _SCHEMA:
            connection.execute(statement)
        connection.execute(
            "INSERT OR IGNORE INTO penstock_outbox_identity (one, producer, epoch, claims, claimed)"
            " VALUES (1, ?, 0, 0, 0)",
            (lasting_producer(),),
        )
        producer = _identity(connection)
        connection.execute("COMMIT")
        assert producer is not None
        return producer

    @contextmanager
    def _writing(self, fence: Fence | None = None) -> Iterator[sqlite3.Connection]:
        """Make this block one transaction, refused if the fence is stale."""
        with self._opened() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                if fence is not None:
                    self._check_fence(connection, fence)
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def _check_fence(self, connection: sqlite3.Connection, fence: Fence) -> None:
        statement = "SELECT producer, epoch FROM penstock_outbox_identity"
        self._producer, epoch = connection.execute(statement).fetchone()
        if fence.epoch < epoch:
            raise Fenced(f"outbox {self.path}: epoch {fence.epoch} of lease {fence.lease!r} is stale, {epoch} was used")
        if fence.epoch > epoch:
            connection.execute("UPDATE penstock_outbox_identity SET epoch = ?", (fence.epoch,))

    def _explained(self, error: sqlite3.Error) -> PenstockError:
        # The low byte is the kind of error; an extended code says more, which the message has.
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return StoreError(
                    f"outbox {self.path} was locked for {BUSY_SECONDS:g} s: some connection keeps a transaction open; "
                    f"commit it, or close that connection. Nothing was lost, and the mover tries again"
                )
            case sqlite3.SQLITE_NOTADB:
                return StoreUnavailable(f"outbox {self.path} is no SQLite database: name the application's own file")
            case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
                return StoreUnavailable(
                    f"outbox {self.path} cannot be opened for writing ({error}): look whether its directory "
                    f"exists and may be written by this process"
                )
            case sqlite3.SQLITE_FULL:
                return StoreFull(f"outbox {self.path}: the disk is full; nothing was written")
            case sqlite3.SQLITE_CORRUPT:
                return IntegrityError(f"outbox {self.path} is damaged ({error}): restore the file, or repair it")
        return StoreError(f"outbox {self.path}: {error}")


def create_tables(transaction: Any) -> None:
    """Create what staging needs in the caller's transaction; `stage` and the mover do the same where it is missing."""
    cursor = _cursor_of(transaction)
    for statement in _SCHEMA:
        cursor.execute(statement)


def drop_tables(transaction: Any) -> int:
    """Drop the tables in the caller's transaction. If rows wait, or were set aside, return how many, and drop none."""
    cursor = _cursor_of(transaction)
    held = 0
    for table in ("penstock_outbox", "penstock_outbox_failed"):
        [count] = cursor.execute(f"SELECT COUNT(*) FROM {table}").fetchone()  # noqa: S608 - one of two names
        held += count
    if not held:
        for table in ("penstock_outbox", "penstock_outbox_failed", "penstock_outbox_identity"):
            cursor.execute(f"DROP TABLE {table}")
    return held


def _identity(connection: sqlite3.Connection) -> bytes | None:
    """Return the producer that this file has, or None if it has none yet."""
    tables = "SELECT COUNT(*) FROM sqlite_master WHERE type = 'table' AND name GLOB 'penstock_outbox*'"
    if connection.execute(tables).fetchone() != (len(_SCHEMA),):
        return None
    found = connection.execute("SELECT producer FROM penstock_outbox_identity").fetchone()
    return None if found is None else bytes(found[0])


def file_of(connection: sqlite3.Connection) -> Path:
    """Return the file that a connection is to; `UsageError` for a database in memory, which nobody else can read."""
    file = _main_file(_cursor_of(connection))
    if not file:
        raise UsageError("this connection is to a database in memory: nothing could move what is staged there")
    return Path(file)


def _main_file(cursor: sqlite3.Cursor) -> str:
    files = {os.fsdecode(name): file for _, name, file in cursor.execute("PRAGMA database_list")}
    return os.fsdecode(files["main"] or b"")


def _cursor_of(transaction: Any) -> sqlite3.Cursor:
    if not isinstance(transaction, sqlite3.Connection):
        raise UsageError(f"an event is staged with a sqlite3.Connection, not with {type(transaction).__name__}")
    cursor = transaction.cursor()
    cursor.row_factory = None  # the caller's own may return anything
    return cursor


def _begin(connection: sqlite3.Connection) -> None:
    """Open a transaction as `sqlite3` itself does before an INSERT, if the connection is one that does so."""
    if connection.in_transaction:
        return
    # Python 3.12 has the attribute; True means autocommit, False was in a transaction already.
    autocommit = getattr(connection, "autocommit", None) is True
    if autocommit or connection.isolation_level is None:
        raise UsageError(
            "this connection commits each statement by itself, so there is no transaction to stage in: "
            'connection.execute("BEGIN") first, and commit after the last statement that belongs to it'
        )
    connection.execute(f"BEGIN {connection.isolation_level}")


def _encoded(event: Event) -> bytes:
    check_event(event)
    encoded = msgspec.msgpack.encode(event)
    if len(encoded) > ROW_BYTES_MAX:
        raise TooLarge("a staged event", len(encoded), ROW_BYTES_MAX, "store large things elsewhere")
    return encoded


def _decoded(data: bytes) -> Event:
    try:
        event = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise InvalidEvent(f"its {len(data):,} bytes do not hold an event: {error}") from None
    check_event(event)
    return event


def _event_or_none(data: bytes) -> Event | None:
    try:
        return _decoded(data)
    except PenstockError:
        return None
