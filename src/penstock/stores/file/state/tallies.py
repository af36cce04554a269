"""Counters in the same transaction as what they count: rows of a table, and the last number given out for it."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import StoreFull
from penstock.stores.file.state.schema import LEASES, SUBSCRIPTIONS, TALLY_ROWS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from penstock.stores.file.state.database import Database
    from penstock.stores.file.state.sealing import Table

SELECT_TALLY = "SELECT name, rows, last, crc FROM tallies WHERE name = ?"
SELECT_TALLIES = "SELECT name, rows, last, crc FROM tallies WHERE name IN ({})"
UPDATE_TALLY = "UPDATE tallies SET rows = ?, last = ?, crc = ? WHERE name = ?"
_of_tally = itemgetter(1, 2, 3, 0)
COUNTS = {LEASES: "SELECT count(*) FROM leases", SUBSCRIPTIONS: "SELECT count(*) FROM subscriptions"}

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


def read_tallies(connection: sqlite3.Connection, tables: Sequence[Table]) -> list[Tally]:
    """Return the tallies of several tables of one file, at the price of one."""
    sealed = TALLY_ROWS[tables[0].file]
    names = [table.name for table in tables]
    rows = connection.execute(SELECT_TALLIES.format(", ".join("?" * len(names))), names).fetchall()
    found = {name: Tally(rows, last) for name, rows, last in sealed.checked_all(rows)}
    if missing := next((name for name in names if name not in found), None):
        raise sealed.damaged(f"row ({missing!r},) is missing")
    return [found[name] for name in names]


def write_tally(connection: sqlite3.Connection, table: Table, tally: Tally) -> None:
    """Replace a table's tally."""
    connection.execute(UPDATE_TALLY, _of_tally(TALLY_ROWS[table.file].seal((table.name, *tally))))


def change_rows(connection: sqlite3.Connection, table: Table, added: int) -> None:
    """Count rows that were added, or removed if negative."""
    if added:
        tally = read_tally(connection, table)
        write_tally(connection, table, tally._replace(rows=tally.rows + added))


def raise_revision(connection: sqlite3.Connection) -> None:
    """Give `Cursors.revision` another value: it is the last number of the table of subscriptions."""
    tally = read_tally(connection, SUBSCRIPTIONS)
    write_tally(connection, SUBSCRIPTIONS, tally._replace(last=tally.last + 1))


def check_room(tally: Tally, added: int, limit: int, what: str) -> None:
    """Refuse rows beyond the limit; `what` names it."""
    if added > 0 and tally.rows + added > limit:
        raise StoreFull(f"{tally.rows:,} rows and {added:,} more exceed {what} = {limit:,}; nothing was written")


class Completeness:
    """Whether a table has all rows that it should have; asked inside of transactions that write, by one thread thus.

    To count takes longer the more rows there are. So it is done again only after anybody else wrote, or a write failed:
    in between nothing is added or removed without its tally.
    """

    def __init__(self, control: Database, table: Table) -> None:
        self._control = control
        self._table = table
        self._era: tuple[int, int] | None = None

    def check(self, connection: sqlite3.Connection, tally: Tally) -> None:
        """Make sure that a row that is not there never was; `StateMissing` if any has vanished."""
        era = self._control.era(connection)
        if era == self._era:
            return
        [count] = connection.execute(COUNTS[self._table]).fetchone()
        if count != tally.rows:
            raise self._table.damaged(f"it has {count:,} rows and should have {tally.rows:,}")
        self._era = era
