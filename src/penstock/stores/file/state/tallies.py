"""Counters in the same transaction as what they count: rows of a table, and the last number given out for it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import StoreFull
from penstock.stores.file.state.schema import TALLY_ROWS

if TYPE_CHECKING:
    import sqlite3

    from penstock.stores.file.state.sealing import Table

SELECT_TALLY = "SELECT name, rows, last, crc FROM tallies WHERE name = ?"
UPDATE_TALLY = "UPDATE tallies SET rows = ?, last = ?, crc = ? WHERE name = ?"
_of_tally = itemgetter(1, 2, 3, 0)

OTHER_ROWS_MAX = 1_000_000
"""The limit of tables that have no setting of their own."""


class Tally(NamedTuple):
    """How many rows a table has, and the last number that was given out for it."""

    rows: int
    last: int


def read_tally(connection: sqlite3.Connection, table: Table) -> Tally:
    """Return a table's tally."""
    sealed = TALLY_ROWS[table.file]
    row = connection.execute(SELECT_TALLY, (table.name,)).fetchone()
    if row is None:
        raise sealed.damaged(f"row ({table.name!r},) is missing")
    _, rows, last = sealed.checked(row)
    return Tally(rows, last)


def write_tally(connection: sqlite3.Connection, table: Table, tally: Tally) -> None:
    """Replace a table's tally."""
    connection.execute(UPDATE_TALLY, _of_tally(TALLY_ROWS[table.file].seal((table.name, *tally))))


def change_rows(connection: sqlite3.Connection, table: Table, added: int) -> None:
    """Count rows that were added, or removed if negative."""
    if added:
        tally = read_tally(connection, table)
        write_tally(connection, table, tally._replace(rows=tally.rows + added))


def check_room(tally: Tally, added: int, limit: int, what: str) -> None:
    """Refuse rows beyond the limit; `what` names it."""
    if added > 0 and tally.rows + added > limit:
        raise StoreFull(f"{tally.rows:,} rows and {added:,} more exceed {what} = {limit:,}; nothing was written")
