"""The tables of `control.db` and `bulk.db`, their identity, and how both files are made.

`control.db` holds what is small and changes often; `bulk.db` the payloads of parked events. Both say which store they
belong to. Every row but those of `doomed` and `mends` is sealed (see `sealing`): these two say nothing that anybody
believes without looking.

* `identity`: one row; the store's id, which file this is, the lasting producer of the schedule, and whether the file
  was ever rebuilt;
* `tallies`: for each table how many rows there are, and the last number that was given out. A limit is checked
  without counting, numbers never come again, and rows that vanished are missed. The last number of `subscriptions` is
  the revision (see `Cursors.revision`);
* `subscriptions`, with the number of their cursors; `cursors`; `parked`, which point to a payload in `bulk.db`;
* `settlements`: records, several to a row, with dense numbers;
* `leases`; `schedule` and the next `sequences` of each partition; `manifests` and who owns their `sinks`;
* `doomed`: payloads that nobody refers to and that will be removed from `bulk.db`;
* `mends`: written only to overwrite what a failed sync may have left behind.
"""

from __future__ import annotations

import sqlite3
import uuid
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import NewerFormat, StateMissing, StoreError, StoreFull
from penstock.stores.file.state.sealing import REPAIR, Table

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.stores.file.platform import Platform

SCHEMA_VERSION = 1
CONTROL, BULK = "control.db", "bulk.db"
SIDE_FILES = ("-wal", "-shm")

IDENTITY = """
CREATE TABLE identity (
    one INTEGER PRIMARY KEY, store_id TEXT, file TEXT, producer BLOB, rebuilt INTEGER, crc INTEGER
) STRICT
"""
TALLIES = "CREATE TABLE tallies (name TEXT PRIMARY KEY, rows INTEGER, last INTEGER, crc INTEGER) STRICT"
MENDS = "CREATE TABLE mends (one INTEGER PRIMARY KEY, number INTEGER) STRICT"

CONTROL_TABLES = (
    IDENTITY,
    TALLIES,
    MENDS,
    """
CREATE TABLE subscriptions (
    log_id TEXT, name TEXT, mode TEXT, policy BLOB, protect INTEGER, external INTEGER, created_at INTEGER,
    cursors INTEGER, crc INTEGER,
    PRIMARY KEY (log_id, name)
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE cursors (
    log_id TEXT, subscription TEXT, slot INTEGER, partition INTEGER, next_offset INTEGER, generation INTEGER,
    body BLOB, crc INTEGER,
    PRIMARY KEY (log_id, subscription, slot, partition)
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE parked (
    log_id TEXT, subscription TEXT, partition INTEGER, offset INTEGER, slot INTEGER, state TEXT, lane INTEGER,
    due_at INTEGER, attempts INTEGER, replay INTEGER, error_type TEXT, error_message BLOB, parked_at INTEGER,
    last_retry_at INTEGER, job TEXT, version INTEGER, digest BLOB, crc INTEGER,
    PRIMARY KEY (log_id, subscription, partition, offset)
) STRICT, WITHOUT ROWID
""",
    """
CREATE INDEX parked_due ON parked (log_id, subscription, due_at, partition, offset) WHERE state = 'waiting'
""",
    """
CREATE TABLE doomed (
    log_id TEXT, subscription TEXT, partition INTEGER, offset INTEGER, version INTEGER,
    PRIMARY KEY (log_id, subscription, partition, offset, version)
) STRICT, WITHOUT ROWID
""",
    "CREATE TABLE settlements (first INTEGER PRIMARY KEY, count INTEGER, records BLOB, crc INTEGER) STRICT",
    """
CREATE TABLE leases (
    name TEXT PRIMARY KEY, owner TEXT, epoch INTEGER, expires_at REAL, boot_id BLOB, member INTEGER, clean INTEGER,
    crc INTEGER
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE schedule (
    id TEXT PRIMARY KEY, log_id TEXT, partition INTEGER, due_at INTEGER, producer BLOB, sequence INTEGER, event BLOB,
    crc INTEGER
) STRICT
""",
    "CREATE INDEX schedule_due ON schedule (due_at, id)",
    """
CREATE TABLE sequences (
    log_id TEXT, partition INTEGER, next INTEGER, crc INTEGER,
    PRIMARY KEY (log_id, partition)
) STRICT, WITHOUT ROWID
""",
    "CREATE TABLE sinks (sink TEXT PRIMARY KEY, query TEXT, crc INTEGER) STRICT, WITHOUT ROWID",
    """
CREATE TABLE manifests (
    number INTEGER PRIMARY KEY, sink TEXT, query TEXT, batch INTEGER, body BLOB, done INTEGER, crc INTEGER
) STRICT
""",
    "CREATE UNIQUE INDEX manifests_batch ON manifests (sink, query, batch)",
    "CREATE INDEX manifests_unfinished ON manifests (number) WHERE done = 0",
)
BULK_TABLES = (
    IDENTITY,
    TALLIES,
    MENDS,
    """
CREATE TABLE payloads (
    log_id TEXT, subscription TEXT, partition INTEGER, offset INTEGER, version INTEGER, event BLOB, crc INTEGER,
    PRIMARY KEY (log_id, subscription, partition, offset, version)
) STRICT
""",
)
STATEMENTS = {CONTROL: CONTROL_TABLES, BULK: BULK_TABLES}

INSERT_IDENTITY = "INSERT INTO identity VALUES (?, ?, ?, ?, ?, ?)"
INSERT_TALLY = "INSERT INTO tallies VALUES (?, ?, ?, ?)"
INSERT_MEND = "INSERT INTO mends VALUES (1, 0)"
SELECT_IDENTITY = "SELECT one, store_id, file, producer, rebuilt, crc FROM identity"
SELECT_SCHEMA = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"
SET_VERSION = f"PRAGMA user_version = {SCHEMA_VERSION}"

SUBSCRIPTIONS = Table(CONTROL, "subscriptions", 2)
CURSORS = Table(CONTROL, "cursors", 4)
PARKED = Table(CONTROL, "parked", 4)
SETTLEMENTS = Table(CONTROL, "settlements", 1)
LEASES = Table(CONTROL, "leases", 1)
SCHEDULE = Table(CONTROL, "schedule", 1)
SEQUENCES = Table(CONTROL, "sequences", 2)
SINKS = Table(CONTROL, "sinks", 1)
MANIFESTS = Table(CONTROL, "manifests", 4)
PAYLOADS = Table(BULK, "payloads", 5)
SEALED_TABLES = {
    CONTROL: (SUBSCRIPTIONS, CURSORS, PARKED, SETTLEMENTS, LEASES, SCHEDULE, SEQUENCES, SINKS, MANIFESTS),
    BULK: (PAYLOADS,),
}
IDENTITIES = {file: Table(file, "identity", 1) for file in STATEMENTS}
TALLY_ROWS = {file: Table(file, "tallies", 1) for file in STATEMENTS}


class Identity(NamedTuple):
    """What a file says of itself."""

    store_id: str
    producer: bytes
    rebuilt: bool


def create_database(
    path: Path, file: str, store_id: str, platform: Platform, *, rebuilt: bool = False
) -> sqlite3.Connection:
    """Make the file with all tables, replacing what is left of an earlier attempt, and return a connection to it.

    It is complete, and on the medium, once the caller has closed the connection and synced the directory.
    """
    for side in ("", *SIDE_FILES):
        if platform.disk.exists(beside(path, side)):
            platform.disk.remove(beside(path, side))
    # SQLite would let everybody read it; the files beside it get the same mode.
    platform.disk.close(platform.disk.open(path, create=True, exclusive=True))
    producer = uuid.UUID(bytes=platform.random(16), version=4).bytes
    connection = platform.connect(path)
    try:
        configure(connection)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in STATEMENTS[file]:
            connection.execute(statement)
        connection.execute(INSERT_IDENTITY, IDENTITIES[file].seal((1, store_id, file, producer, int(rebuilt))))
        connection.execute(INSERT_MEND)
        for table in SEALED_TABLES[file]:
            connection.execute(INSERT_TALLY, TALLY_ROWS[file].seal((table.name, 0, 0)))
        connection.execute(SET_VERSION)
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def create_databases(directory: Path, store_id: str, platform: Platform) -> None:
    """Make both files, complete and on the medium; nobody else may do so at the same time."""
    for file in STATEMENTS:
        try:
            with closing(create_database(directory / file, file, store_id, platform)):
                pass  # closing the only connection moves everything from the WAL into the file
        except sqlite3.Error as error:
            raise not_made(directory / file, error) from error
    platform.disk.sync_directory(directory)


def not_made(path: Path, error: sqlite3.Error) -> StoreError:
    """Return what an error of SQLite means for a file that was to be made; the next opening makes it anew."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    kind = StoreFull if code & 0xFF == sqlite3.SQLITE_FULL else StoreError
    return kind(f"{path} could not be made: {error}; nothing was written, and the next opening tries it anew")


def configure(connection: sqlite3.Connection, *, reading: bool = False) -> None:
    """Set what SQLite does not keep in the file."""
    # Writers wait for each other at the gate. What remains to wait for is short: somebody recovers the WAL after a
    # crash, or is the last to close.
    connection.execute("PRAGMA busy_timeout = 5000")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")  # macOS: wait for the medium, not for the drive
    connection.execute("PRAGMA checkpoint_fullfsync = ON")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA journal_size_limit = 16777216")
    if reading:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA wal_autocheckpoint = 0")


def read_identity(connection: sqlite3.Connection, file: str, store_id: str) -> Identity:
    """Return what the file says of itself, if it is a sound one of this store."""
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise NewerFormat(
            f"{file} has format {version} and was written by a newer version of Penstock; "
            f"this one knows up to {SCHEMA_VERSION}: upgrade"
        )
    # `str`, because a damaged row may hold a blob.
    found = {normal(str(sql)) for (sql,) in connection.execute(SELECT_SCHEMA).fetchall()}
    if version < SCHEMA_VERSION or found != {normal(sql) for sql in STATEMENTS[file]}:
        raise StateMissing(f"{file} does not hold the tables that it must; {REPAIR}")
    rows = connection.execute(SELECT_IDENTITY).fetchall()
    if len(rows) != 1:
        raise IDENTITIES[file].damaged("its only row is missing")
    _, owner, name, producer, rebuilt = IDENTITIES[file].checked(rows[0])
    if (owner, name) != (store_id, file):
        raise StateMissing(f"{file} is {name} of store {owner}, not {file} of store {store_id}; {REPAIR}")
    return Identity(owner, producer, bool(rebuilt))


def normal(sql: str) -> str:
    """Return a statement without what does not matter in it."""
    return " ".join(sql.split())


def beside(path: Path, side: str) -> Path:
    """Return the path of a file that SQLite keeps beside a database."""
    return path.with_name(path.name + side)
