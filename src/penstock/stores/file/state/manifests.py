"""The `Manifests` port in `control.db`.

Rows are sealed, the indexes that lead to them are not. So a batch that an index does not lead to is looked for without
it before it is refused as forgotten or taken for new, and a row that is about to be forgotten is read and checked
first: nothing that is not done is ever removed because an index has left it out.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.errors import UsageError
from penstock.rows import MANIFESTS_KEPT, Manifest
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
DELETE_SINK = "DELETE FROM sinks WHERE sink = ?"
SELECT_MANIFEST = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE sink = ? AND query = ? AND batch = ?
"""
SELECT_LAST = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE sink = ? AND query = ?
ORDER BY batch DESC LIMIT 1
"""
SELECT_NUMBER = "SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE number = ?"
# Of the newest rows, these two find what the index should lead to without it.
SELECT_NEWEST = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE number = (
    SELECT max(number) FROM (SELECT number, sink, query FROM manifests NOT INDEXED ORDER BY number DESC LIMIT 100)
    WHERE sink = ? AND query = ?
)
"""
SELECT_WITHOUT_INDEX = """
SELECT number, sink, query, batch, body, done, crc FROM manifests NOT INDEXED
WHERE sink = ? AND query = ? AND batch = ?
"""
SELECT_UNFINISHED = """
SELECT number, sink, query, batch, body, done, crc FROM manifests WHERE done = 0 AND number > ?
ORDER BY number LIMIT ?
"""
# What is done is told from the indexes alone: in a row it stands behind the body, which may be long.
SELECT_OLD = """
SELECT number FROM manifests AS found INDEXED BY manifests_batch WHERE sink = ? AND NOT EXISTS (
    SELECT 1 FROM manifests INDEXED BY manifests_unfinished WHERE done = 0 AND number = found.number
)
ORDER BY number DESC LIMIT -1 OFFSET ?
"""
SELECT_NUMBERS = "SELECT number FROM manifests NOT INDEXED WHERE sink = ?"
DELETE_NUMBER = "DELETE FROM manifests WHERE number = ?"
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
            if owner is not None and owner != manifest.query and not adopt:
                raise manifest.not_owner(owner)
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
                _check_missing(connection, sink, query, batch)
                raise UsageError(f"sink {sink!r}, query {query}, batch {batch} was never prepared, or is forgotten")
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
            return None if owner is None else _highest(connection, sink, owner)

        values = self._control.read(work)
        return None if values is None else _manifest(values)

    def forget(self, sink: str) -> None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> None:
            # Without the index, so that nothing stays behind; this is rare.
            numbers = [number for (number,) in connection.execute(SELECT_NUMBERS, (sink,)).fetchall()]
            for number in numbers:
                _, _, query, batch, _, done = _numbered_row(connection, sink, number)
                if not done:
                    raise UsageError(f"sink {sink!r}, query {query}, batch {batch} is not done: nothing was forgotten")
            _remove(connection, numbers)
            if _owner(connection, sink) is not None:
                connection.execute(DELETE_SINK, (sink,))
                change_rows(connection, SINKS, -1)

        self._control.write(work)


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
    return None if row is None else MANIFESTS.checked(row)


def _numbered_row(connection: sqlite3.Connection, sink: str, number: int) -> Row:
    row = connection.execute(SELECT_NUMBER, (number,)).fetchone()
    values = None if row is None else MANIFESTS.checked(row)
    if values is None or values[1] != sink:
        raise MANIFESTS.damaged(f"its index leads to row {number}, which is none of sink {sink!r}")
    return values


def _highest(connection: sqlite3.Connection, sink: str, query: str) -> Row | None:
    """Return the row of the query's highest batch, which is also its newest."""
    row = connection.execute(SELECT_LAST, (sink, query)).fetchone()
    values = None if row is None else MANIFESTS.checked(row)
    row = connection.execute(SELECT_NEWEST, (sink, query)).fetchone()
    newest = None if row is None else MANIFESTS.checked(row)
    if newest is not None and (values is None or values[3] < newest[3]):
        raise MANIFESTS.damaged(f"its index does not lead to batch {newest[3]}")
    return values


def _check_missing(connection: sqlite3.Connection, sink: str, query: str, batch: int) -> int | None:
    """Make sure that a batch which was not found is not there, and return the highest one of its query."""
    highest = _highest(connection, sink, query)
    if highest is None:
        return None
    # A batch that is not the next one is forgotten, unless the index leads past it.
    if batch <= highest[3] and connection.execute(SELECT_WITHOUT_INDEX, (sink, query, batch)).fetchone() is not None:
        raise MANIFESTS.damaged(f"its index does not lead to batch {batch}")
    return int(highest[3])


def _unfinished(connection: sqlite3.Connection, after: int) -> list[Row]:
    return MANIFESTS.checked_all(connection.execute(SELECT_UNFINISHED, (after, ROWS_AT_A_TIME)).fetchall())


def _add(connection: sqlite3.Connection, manifest: Manifest) -> Row:
    """Add a manifest that is not there, and forget what is old; whatever this raises undoes it."""
    highest = _check_missing(connection, manifest.sink, manifest.query, manifest.batch)
    if highest is not None and manifest.batch < highest:
        raise manifest.too_old(highest)
    tally = read_tally(connection, MANIFESTS)
    number = tally.last + 1
    values = (number, manifest.sink, manifest.query, manifest.batch, manifest.body, int(manifest.done))
    connection.execute(INSERT_MANIFEST, MANIFESTS.seal(values))
    write_tally(connection, MANIFESTS, Tally(tally.rows + 1, number))
    check_room(tally, 1 - _remove_old(connection, manifest.sink), OTHER_ROWS_MAX, "the limit of manifests")
    return values


def _remove_old(connection: sqlite3.Connection, sink: str) -> int:
    """Remove what is done and not among the newest of the sink, and return how many these were."""
    numbers = [number for (number,) in connection.execute(SELECT_OLD, (sink, MANIFESTS_KEPT)).fetchall()]
    for number in numbers:
        values = _numbered_row(connection, sink, number)
        if not values[5]:
            raise MANIFESTS.damaged(f"its index of what is unfinished does not lead to row {number}")
    _remove(connection, numbers)
    return len(numbers)


def _remove(connection: sqlite3.Connection, numbers: list[int]) -> None:
    connection.executemany(DELETE_NUMBER, [(number,) for number in numbers])
    change_rows(connection, MANIFESTS, -len(numbers))


def _manifest(values: Row) -> Manifest:
    _, sink, query, batch, body, done = values
    return Manifest(sink=sink, query=query, batch=batch, body=body, done=bool(done))
