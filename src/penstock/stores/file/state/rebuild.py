"""Looking for damage in `control.db` and `bulk.db`, and making them anew from what is sound.

Nothing is deleted: a file that is replaced moves to `quarantine/`. What is lost is counted, and parked rows that lost
their event are named.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import StateMissing
from penstock.stores.file.state.commits import INSERT_SETTLEMENTS, read_parked
from penstock.stores.file.state.database import SQLITE_ERRORS
from penstock.stores.file.state.parked import DELETE_PARKED, ParkedKey, place_of
from penstock.stores.file.state.payloads import SELECT_PAYLOAD
from penstock.stores.file.state.schema import (
    BULK,
    CONTROL,
    LEASES,
    MANIFESTS,
    PARKED,
    PAYLOADS,
    SEALED_TABLES,
    SEQUENCES,
    SETTLEMENTS,
    SIDE_FILES,
    STATEMENTS,
    SUBSCRIPTIONS,
    TALLY_ROWS,
    beside,
    configure,
    create_database,
    read_identity,
)
from penstock.stores.file.state.tallies import Tally, change_rows, read_tally, write_tally
from penstock.stores.file.state.witnesses import REPLACE_SUBSCRIPTION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.stores.file.platform import Platform
    from penstock.stores.file.state.sealing import Row, Table

QUARANTINE = "quarantine"
DAMAGE_SHOWN_MAX = 100
LOST_SHOWN_MAX = 10_000

BEGIN_READING = "BEGIN"
BEGIN_WRITING = "BEGIN IMMEDIATE"
COMMIT = "COMMIT"
INTEGRITY_CHECK = f"PRAGMA integrity_check({DAMAGE_SHOWN_MAX})"
NAMES = [table.name for tables in SEALED_TABLES.values() for table in tables]
# The names are those of our own tables.
COUNTS = {name: f"SELECT count(*) FROM {name}" for name in NAMES}  # noqa: S608
SCANS = {name: f"SELECT * FROM {name}" for name in NAMES}  # noqa: S608
# Damage ends a scan, so there is one from either end.
SCANS_BACKWARDS = {
    "subscriptions": "SELECT * FROM subscriptions ORDER BY log_id DESC, name DESC",
    "cursors": "SELECT * FROM cursors ORDER BY log_id DESC, subscription DESC, slot DESC, partition DESC",
    "parked": "SELECT * FROM parked ORDER BY log_id DESC, subscription DESC, partition DESC, offset DESC",
    "settlements": "SELECT * FROM settlements ORDER BY first DESC",
    "leases": "SELECT * FROM leases ORDER BY name DESC",
    "schedule": "SELECT * FROM schedule ORDER BY rowid DESC",
    "sequences": "SELECT * FROM sequences ORDER BY log_id DESC, partition DESC",
    "sinks": "SELECT * FROM sinks ORDER BY sink DESC",
    "manifests": "SELECT * FROM manifests ORDER BY number DESC",
    "payloads": "SELECT * FROM payloads ORDER BY rowid DESC",
}
# What the second scan finds again is there already.
INSERTS = {
    "subscriptions": "INSERT OR IGNORE INTO subscriptions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "cursors": "INSERT OR IGNORE INTO cursors VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "parked": "INSERT OR IGNORE INTO parked VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "leases": "INSERT OR IGNORE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "schedule": "INSERT OR IGNORE INTO schedule VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    "sinks": "INSERT OR IGNORE INTO sinks VALUES (?, ?, ?)",
    "manifests": "INSERT OR IGNORE INTO manifests VALUES (?, ?, ?, ?, ?, ?, ?)",
    "payloads": "INSERT OR IGNORE INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)",
}
SCAN_TALLIES = "SELECT name, rows, last, crc FROM tallies"
COUNT_CURSORS = "SELECT log_id, subscription, count(*) FROM cursors GROUP BY log_id, subscription"
COUNT_RECORDS = "SELECT coalesce(sum(count), 0) FROM settlements"
COUNT_FIRST_RECORDS = "SELECT coalesce((SELECT count FROM settlements ORDER BY first LIMIT 1), 0)"
LAST_EPOCH = "SELECT coalesce(max(epoch), 0) FROM leases"
LAST_MANIFEST = "SELECT coalesce(max(number), 0) FROM manifests"
LAST_RECORD = "SELECT coalesce(max(first + count - 1), 0) FROM settlements"


class Salvage(NamedTuple):
    """What became of the rows of a table."""

    kept: int
    lost: int | None
    """None if nobody knows how many there were."""


class Rebuilt(NamedTuple):
    """What a rebuild did; empty if there was nothing to do."""

    tables: dict[str, Salvage]
    """By file and table, such as `control.db/cursors`, of the files that were made anew."""
    quarantined: list[Path]
    parked_lost: list[ParkedKey]
    """Parked rows that were removed because their event is lost, at most `LOST_SHOWN_MAX`: the log may have it."""


# --- looking ----------------------------------------------------------------------------------


def examine(directory: Path, store_id: str, platform: Platform) -> list[str]:
    """Return the damage of both files, each with what and where; empty if they are sound. Others may be writing."""
    found = [damage for file in STATEMENTS for damage in _damage_of(directory / file, file, store_id, platform)]
    if not found:
        with (
            closing(_open(directory / CONTROL, platform)) as control,
            closing(_open(directory / BULK, platform)) as bulk,
        ):
            found = [
                f"{CONTROL}, table parked, row {key}: its event is missing in table payloads of {BULK}"
                for key in _without_event(control, bulk)
            ]
    return found[:DAMAGE_SHOWN_MAX]


def _damage_of(path: Path, file: str, store_id: str, platform: Platform) -> list[str]:
    if not platform.disk.exists(path):
        return [f"{path} is missing"]
    try:
        with closing(_open(path, platform)) as connection:
            connection.execute(BEGIN_READING)  # one snapshot: what others write meanwhile does not matter
            read_identity(connection, file, store_id)
            found = [text for (text,) in connection.execute(INTEGRITY_CHECK).fetchall() if text != "ok"]
            damage = [f"{file}: {text}" for text in found]
            for table in SEALED_TABLES[file]:
                damage += _damaged_rows(connection, table)
            return damage or list(_wrong_counts(connection, file))
    except StateMissing as error:
        return [str(error)]
    except SQLITE_ERRORS as error:
        return [f"{path} cannot be read: {error}"]


def _damaged_rows(connection: sqlite3.Connection, table: Table) -> Iterator[str]:
    for row in connection.execute(SCANS[table.name]):
        if not table.fits(row):
            yield f"{table.file}, table {table.name}, row {table.key_of(row)}: its checksum does not fit"


def _wrong_counts(connection: sqlite3.Connection, file: str) -> Iterator[str]:
    """Return what is missing although all that is there is sound."""
    for table in SEALED_TABLES[file]:
        expected = read_tally(connection, table).rows
        [count] = connection.execute(COUNTS[table.name] if table is not SETTLEMENTS else COUNT_RECORDS).fetchone()
        # Of settlements, the first row may hold some that are forgotten already.
        spare = connection.execute(COUNT_FIRST_RECORDS).fetchone()[0] - 1 if table is SETTLEMENTS else 0
        if not expected <= count <= expected + max(spare, 0):
            yield f"{file}, table {table.name}: it has {count:,} rows and should have {expected:,}"
    if file == CONTROL:
        held = {row[:2]: row[2] for row in connection.execute(COUNT_CURSORS)}
        for row in connection.execute(SCANS[SUBSCRIPTIONS.name]):
            if held.get(row[:2], 0) != row[7]:
                yield f"{file}, table cursors, rows {row[:2]}: there are {held.get(row[:2], 0)} and should be {row[7]}"


def _without_event(control: sqlite3.Connection, bulk: sqlite3.Connection) -> Iterator[ParkedKey]:
    """Return the parked rows whose event is not in `bulk.db`."""
    for row in control.execute(SCANS[PARKED.name]).fetchall():
        # One that was replaced or removed meanwhile has lost its event by right.
        if not _has_event(bulk, row) and (now := read_parked(control, row[:4])) and place_of(now) == place_of(row):
            yield row[:4]


def _has_event(bulk: sqlite3.Connection, row: Row) -> bool:
    payload = bulk.execute(SELECT_PAYLOAD, place_of(row)).fetchone()
    return payload is not None and PAYLOADS.fits(payload)


# --- rebuilding -------------------------------------------------------------------------------


def rebuild(directory: Path, store_id: str, platform: Platform) -> Rebuilt:
    """Make each damaged or missing file anew from the sound rows of the old one, which goes to `quarantine/`.

    Nobody else may have the store open. Afterwards `examine` finds nothing. Epochs go on above all that were ever given
    out, the schedule gets a new producer, and settlement records get new numbers, so that nothing that is lost can be
    mistaken for something new.
    """
    done = Rebuilt({}, [], [])
    for file in STATEMENTS:
        path = directory / file
        _finish_interrupted(path, file, store_id, platform)
        if _damage_of(path, file, store_id, platform):
            _rebuild_file(path, file, store_id, platform, done)
    _drop_rows_without_event(directory, platform, done)
    return done


def _rebuild_file(path: Path, file: str, store_id: str, platform: Platform, done: Rebuilt) -> None:
    new = _new_path(path)
    with closing(create_database(new, file, store_id, platform, rebuilt=True)) as connection:
        connection.execute(BEGIN_WRITING)
        old = _open_if_possible(path, platform)
        tallies = _sound_tallies(old, file)
        for table in SEALED_TABLES[file]:
            if table is SEQUENCES:
                continue  # they belong to the producer that the old file had
            if table is SETTLEMENTS:
                _copy_settlements(old, connection, tallies.get(table.name))
            else:
                _copy(old, connection, table)
        if old is not None:
            old.close()
        if file == CONTROL:
            _count_cursors(connection)
        for table in SEALED_TABLES[file]:
            before = tallies.get(table.name)
            tally = _tally(connection, table, before, platform)
            write_tally(connection, table, tally)
            if table is not SEQUENCES:
                lost = None if before is None else max(before.rows - tally.rows, 0)
                done.tables[f"{file}/{table.name}"] = Salvage(tally.rows, lost)
        connection.execute(COMMIT)
    platform.disk.sync_directory(path.parent)
    _move_aside(path, platform, done.quarantined)
    platform.disk.rename(new, path)
    platform.disk.sync_directory(path.parent)


def _open_if_possible(path: Path, platform: Platform) -> sqlite3.Connection | None:
    if not platform.disk.exists(path):
        return None
    try:
        connection = _open(path, platform)
    except SQLITE_ERRORS:
        return None
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    return connection


def _sound_tallies(old: sqlite3.Connection | None, file: str) -> dict[str, Tally]:
    rows = _sound_rows(old, TALLY_ROWS[file], SCAN_TALLIES)
    return {name: Tally(count, last) for name, count, last, _ in rows}


def _sound_rows(old: sqlite3.Connection | None, table: Table, *scans: str) -> Iterator[Row]:
    """Return the sound rows, as far as they can be read; the next scan follows only if damage has ended one."""
    if old is None:
        return
    for scan in scans:
        try:
            for row in old.execute(scan):
                if table.fits(row):
                    yield row
        except SQLITE_ERRORS:
            continue
        return


def _copy(old: sqlite3.Connection | None, new: sqlite3.Connection, table: Table) -> None:
    rows = _sound_rows(old, table, SCANS[table.name], SCANS_BACKWARDS[table.name])
    new.executemany(INSERTS[table.name], rows)


def _copy_settlements(old: sqlite3.Connection | None, new: sqlite3.Connection, tally: Tally | None) -> None:
    """Copy the records that were not forgotten, and number them anew: dense, and above all numbers given out."""
    scans = (SCANS[SETTLEMENTS.name], SCANS_BACKWARDS[SETTLEMENTS.name])
    chunks = {row[0]: row for row in _sound_rows(old, SETTLEMENTS, *scans)}
    forgotten, last = (0, 0) if tally is None else (tally.last - tally.rows, tally.last)
    last = max([last, *(first + count - 1 for first, count, _, _ in chunks.values())])
    for first, _, stored, _ in sorted(chunks.values()):
        records = msgspec.msgpack.decode(stored, type=list[bytes])[max(forgotten + 1 - first, 0) :]
        if records:
            new.execute(INSERT_SETTLEMENTS, SETTLEMENTS.seal((last + 1, len(records), msgspec.msgpack.encode(records))))
            last += len(records)


def _count_cursors(new: sqlite3.Connection) -> None:
    """Let each subscription say how many cursors it has now."""
    held = {row[:2]: row[2] for row in new.execute(COUNT_CURSORS)}
    for row in new.execute(SCANS[SUBSCRIPTIONS.name]).fetchall():
        new.execute(REPLACE_SUBSCRIPTION, SUBSCRIPTIONS.seal((*row[:7], held.get(row[:2], 0))))


def _tally(new: sqlite3.Connection, table: Table, before: Tally | None, platform: Platform) -> Tally:
    [rows] = new.execute(COUNT_RECORDS if table is SETTLEMENTS else COUNTS[table.name]).fetchone()
    last = 0 if before is None else before.last
    if table is LEASES:
        # To give out an epoch takes longer than a microsecond, so none can be above this.
        last = max(last, platform.clock.time_us(), *new.execute(LAST_EPOCH).fetchone())
    elif table is SUBSCRIPTIONS:
        # The revision: another one than ever before, and it takes longer than a microsecond to change, too.
        last = max(last + 1, platform.clock.time_us())
    elif table is MANIFESTS:
        last = max(last, *new.execute(LAST_MANIFEST).fetchone())
    elif table is SETTLEMENTS:
        last = max(last, *new.execute(LAST_RECORD).fetchone())
    return Tally(rows, last)


def _drop_rows_without_event(directory: Path, platform: Platform, done: Rebuilt) -> None:
    """Remove parked rows whose event is not in `bulk.db`, and say which."""
    with closing(_open(directory / CONTROL, platform)) as control, closing(_open(directory / BULK, platform)) as bulk:
        lost = list(_without_event(control, bulk))
        control.execute(BEGIN_WRITING)
        control.executemany(DELETE_PARKED, lost)
        change_rows(control, PARKED, -len(lost))
        control.execute(COMMIT)
    done.parked_lost.extend(lost[:LOST_SHOWN_MAX])


# --- files ------------------------------------------------------------------------------------


def _finish_interrupted(path: Path, file: str, store_id: str, platform: Platform) -> None:
    """Put the file in its place that an earlier rebuild had made when it was cut off."""
    new = _new_path(path)
    if not platform.disk.exists(path) and platform.disk.exists(new) and not _damage_of(new, file, store_id, platform):
        _move_aside(path, platform, [])
        platform.disk.rename(new, path)
        platform.disk.sync_directory(path.parent)


def _move_aside(path: Path, platform: Platform, moved: list[Path]) -> None:
    quarantine = path.parent / QUARANTINE
    platform.disk.make_directory(quarantine)
    stamp = platform.clock.time_us()
    # The file itself comes first: without its WAL it would look sound and be older than it is.
    for side in ("", *SIDE_FILES):
        if platform.disk.exists(beside(path, side)):
            platform.disk.rename(beside(path, side), quarantine / f"{stamp}-{path.name}{side}")
            moved.append(quarantine / f"{stamp}-{path.name}{side}")
    platform.disk.sync_directory(quarantine)


def _new_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _open(path: Path, platform: Platform) -> sqlite3.Connection:
    connection = platform.connect(path)
    try:
        configure(connection)
    except SQLITE_ERRORS:
        connection.close()
        raise
    return connection
