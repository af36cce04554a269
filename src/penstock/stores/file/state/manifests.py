"""The `Manifests` port in `control.db`."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.errors import SinkConflict, UsageError
from penstock.rows import Manifest
from penstock.stores.file.state.schema import MANIFESTS, SINKS
from penstock.stores.file.state.tallies import OTHER_ROWS_MAX, Tally, change_rows, check_room, read_tally, write_tally

if TYPE_CHECKING:
    import sqlite3

    from penstock.stores.file.state.database import Database
    from penstock.stores.file.state.logview import LogView
    from penstock.stores.file.state.sealing import Row

SELECT_SINK = "SELECT sink, query, crc FROM sinks WHERE sink = ?"
SELECT_SINKS = "SELECT sink, query, crc FROM sinks"
REPLACE_SINK = "REPLACE INTO sinks VALUES (?, ?, ?)"
SELECT_MANIFEST = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE sink = ? AND query = ? AND batch = ?
"""
SELECT_LAST = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE sink = ? AND query = ?
ORDER BY batch DESC LIMIT 1
"""
# Rows are sealed, the index is not. Of the newest rows, these two find what the index should lead to without it.
SELECT_NEWEST = """
SELECT number, sink, query, batch, body, done, crc
FROM (SELECT * FROM manifests NOT INDEXED ORDER BY number DESC LIMIT 100)
WHERE sink = ? AND query = ? ORDER BY number DESC LIMIT 1
"""
SELECT_WITHOUT_INDEX = """
SELECT number, sink, query, batch, body, done, crc FROM manifests NOT INDEXED
WHERE sink = ? AND query = ? AND batch = ?
"""
SELECT_UNFINISHED = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE done = 0 AND number > ?
ORDER BY number LIMIT ?
"""
INSERT_MANIFEST = "INSERT INTO manifests VALUES (?, ?, ?, ?, ?, ?, ?)"
UPDATE_DONE = "UPDATE manifests SET done = ?, crc = ? WHERE number = ?"
_of_done = itemgetter(5, 6, 0)

ROWS_AT_A_TIME = 200


class FileManifests:
    """The `Manifests` port."""

    def __init__(self, control: Database, log: LogView) -> None:
        self._control = control
        self._log = log

    def prepare(self, manifest: Manifest, *, adopt: bool = False) -> Manifest:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> Row:
            owner = _owner(connection, manifest.sink)
            if owner not in {None, manifest.query} and not adopt:
                raise SinkConflict(
                    f"sink {manifest.sink!r} belongs to query {owner}, not {manifest.query}: "
                    f"choose another sink name, or adopt it"
                )
            if owner != manifest.query:
                connection.execute(REPLACE_SINK, SINKS.seal((manifest.sink, manifest.query)))
                change_rows(connection, SINKS, int(owner is None))
            first = _manifest_row(connection, manifest.sink, manifest.query, manifest.batch)
            return first or _add(connection, manifest)

        return _manifest(self._control.write(work))

    def finish(self, sink: str, query: str, batch: int) -> None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> None:
            values = _manifest_row(connection, sink, query, batch)
            if values is None:
                raise UsageError(f"sink {sink!r}, query {query}, batch {batch} was never prepared")
            if not values[5]:
                connection.execute(UPDATE_DONE, _of_done(MANIFESTS.seal((*values[:5], 1))))

        self._control.write(work)

    def unfinished(self) -> list[Manifest]:
        self._log.check_open()
        found: list[Row] = []
        while True:
            after = found[-1][0] if found else 0
            rows = self._control.read(lambda connection: _unfinished(connection, after))  # noqa: B023 - run here
            found += rows
            if len(rows) < ROWS_AT_A_TIME:
                return [_manifest(values) for values in found]

    def last(self, sink: str) -> Manifest | None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> Row | None:
            owner = _owner(connection, sink)
            if owner is None:
                return None
            row = connection.execute(SELECT_LAST, (sink, owner)).fetchone()
            values = None if row is None else MANIFESTS.checked(row)
            newest = _newest(connection, sink, owner)
            if newest is not None and (values is None or values[3] < newest[3]):
                raise MANIFESTS.damaged(f"its index does not lead to batch {newest[3]}")
            return values

        values = self._control.read(work)
        return None if values is None else _manifest(values)


def _owner(connection: sqlite3.Connection, sink: str) -> str | None:
    row = connection.execute(SELECT_SINK, (sink,)).fetchone()
    if row is not None:
        return str(SINKS.checked(row)[1])
    # Nobody's, unless its row is damaged: then another query could take it. There are few sinks.
    rows = SINKS.checked_all(connection.execute(SELECT_SINKS).fetchall())
    if len(rows) != (expected := read_tally(connection, SINKS).rows):
        raise SINKS.damaged(f"it has {len(rows):,} rows and should have {expected:,}")
    return None


def _manifest_row(connection: sqlite3.Connection, sink: str, query: str, batch: int) -> Row | None:
    row = connection.execute(SELECT_MANIFEST, (sink, query, batch)).fetchone()
    if row is not None:
        return MANIFESTS.checked(row)
    # A batch that is not the next one is likely to be there, unless the index leads past it.
    newest = _newest(connection, sink, query)
    if newest is not None and newest[3] >= batch:
        row = connection.execute(SELECT_WITHOUT_INDEX, (sink, query, batch)).fetchone()
        if row is not None:
            raise MANIFESTS.damaged(f"its index does not lead to batch {batch}")
    return None


def _newest(connection: sqlite3.Connection, sink: str, query: str) -> Row | None:
    row = connection.execute(SELECT_NEWEST, (sink, query)).fetchone()
    return None if row is None else MANIFESTS.checked(row)


def _unfinished(connection: sqlite3.Connection, after: int) -> list[Row]:
    return MANIFESTS.checked_all(connection.execute(SELECT_UNFINISHED, (after, ROWS_AT_A_TIME)).fetchall())


def _add(connection: sqlite3.Connection, manifest: Manifest) -> Row:
    tally = read_tally(connection, MANIFESTS)
    check_room(tally, 1, OTHER_ROWS_MAX, "the limit of manifests")
    number = tally.last + 1
    values = (number, manifest.sink, manifest.query, manifest.batch, manifest.body, int(manifest.done))
    connection.execute(INSERT_MANIFEST, MANIFESTS.seal(values))
    write_tally(connection, MANIFESTS, Tally(tally.rows + 1, number))
    return values


def _manifest(values: Row) -> Manifest:
    _, sink, query, batch, body, done = values
    return Manifest(sink=sink, query=query, batch=batch, body=body, done=bool(done))
