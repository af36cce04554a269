"""The `Leases` port in `control.db`.

Epochs are numbers of one counter for all leases, so that none ever comes again, whatever becomes of a lease's row.
A released lease stays as a row without an owner, which says whether the release was clean.

Times are those of the machine's boot clock; a row of another boot has expired. So has, at once, the lease of a process
that is dead, as its member byte tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import Fenced, LeaseLost, UsageError
from penstock.rows import Lease
from penstock.stores.file.state.schema import LEASES
from penstock.stores.file.state.tallies import OTHER_ROWS_MAX, Tally, check_room, read_tally, write_tally

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from penstock.rows import Fence
    from penstock.stores.file.platform import Platform
    from penstock.stores.file.state.database import Databases
    from penstock.stores.file.state.logview import LogView

SELECT_LEASE = "SELECT name, owner, epoch, expires_at, boot_id, member, clean, crc FROM leases WHERE name = ?"
REPLACE_LEASE = "REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
COUNT_LEASES = "SELECT count(*) FROM leases"

NOBODY = ""
"""The owner of a lease that was released."""


class LeaseRow(NamedTuple):
    """A lease as it is stored."""

    name: str
    owner: str
    epoch: int
    expires_at: float
    boot_id: bytes
    member: int
    clean: int

    @property
    def lease(self) -> Lease:
        """The lease as the port shows it."""
        return Lease(self.name, self.owner, self.epoch, self.expires_at, bool(self.clean))


def read_lease(connection: sqlite3.Connection, name: str) -> LeaseRow | None:
    """Return a lease's row."""
    row = connection.execute(SELECT_LEASE, (name,)).fetchone()
    return None if row is None else LeaseRow(*LEASES.checked(row))


def check_fence(connection: sqlite3.Connection, fence: Fence) -> None:
    """Refuse a write for a lease that has a newer epoch, or none; asked in the transaction of that write."""
    row = read_lease(connection, fence.lease)
    if row is None or row.epoch != fence.epoch:
        raise Fenced(f"epoch {fence.epoch} of lease {fence.lease!r} is stale: nothing was written")


class FileLeases:
    """The `Leases` port."""

    def __init__(
        self,
        databases: Databases,
        log: LogView,
        platform: Platform,
        *,
        member: int,
        is_alive: Callable[[int], bool],
    ) -> None:
        self._control = databases.control
        # In a file that lost rows, nobody knows how the last owner of a lease without a row has ended.
        self._unknown_is_clean = not databases.identity.rebuilt
        self._log = log
        self._clock = platform.clock
        self._boot_id = platform.boot_id
        self._member = member
        self._is_alive = is_alive

    def acquire(self, name: str, owner: str, seconds: float) -> Lease | None:
        self._log.check_open()
        if not owner:
            raise UsageError(f"lease {name!r} cannot be held by nobody: give its owner a name")

        def work(connection: sqlite3.Connection) -> Lease | None:
            last = read_lease(connection, name)
            if last is not None and self._is_held(last) and last.owner != owner:
                return None
            tally = read_tally(connection, LEASES)
            if last is None:
                _check_none_vanished(connection, tally)
                check_room(tally, 1, OTHER_ROWS_MAX, "the limit of leases")
                clean = self._unknown_is_clean
            else:
                clean = last.owner == NOBODY and bool(last.clean)
            row = self._row(name, owner, tally.last + 1, seconds, clean=clean)
            _write(connection, [row])
            write_tally(connection, LEASES, Tally(tally.rows + (last is None), row.epoch))
            return row.lease

        return self._control.write(work)

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> list[Lease]:
            renewed = []
            for lease in leases:
                row = read_lease(connection, lease.name)
                if row is not None and row.epoch == lease.epoch and self._is_held(row):
                    renewed.append(self._row(row.name, row.owner, row.epoch, seconds, clean=bool(row.clean)))
            _write(connection, renewed)
            return [row.lease for row in renewed]

        return self._control.write(work)

    def release(self, lease: Lease, *, clean: bool = True) -> None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> None:
            row = read_lease(connection, lease.name)
            if row is None or row.epoch != lease.epoch or row.owner == NOBODY:
                raise LeaseLost(f"lease {lease.name!r} is not held with epoch {lease.epoch} any more")
            _write(connection, [row._replace(owner=NOBODY, expires_at=0.0, clean=int(clean))])

        self._control.write(work)

    def holder(self, name: str) -> Lease | None:
        self._log.check_open()
        row = self._control.read(lambda connection: read_lease(connection, name))
        return row.lease if row is not None and self._is_held(row) else None

    def _row(self, name: str, owner: str, epoch: int, seconds: float, *, clean: bool) -> LeaseRow:
        expires_at = self._clock.monotonic() + seconds
        return LeaseRow(name, owner, epoch, expires_at, self._boot_id, self._member, int(clean))

    def _is_held(self, row: LeaseRow) -> bool:
        return (
            row.owner != NOBODY
            and row.boot_id == self._boot_id
            and row.expires_at > self._clock.monotonic()
            and (row.member == self._member or self._is_alive(row.member))
        )


def _write(connection: sqlite3.Connection, rows: Sequence[LeaseRow]) -> None:
    connection.executemany(REPLACE_LEASE, [LEASES.seal(row) for row in rows])


def _check_none_vanished(connection: sqlite3.Connection, tally: Tally) -> None:
    """Make sure that a lease without a row never had one: its last owner may have left something in flight."""
    [count] = connection.execute(COUNT_LEASES).fetchone()
    if count != tally.rows:
        raise LEASES.damaged(f"it has {count:,} rows and should have {tally.rows:,}")
