"""The `Leases` port in `control.db`.

Epochs are numbers of one counter for all leases, so that none ever comes again, whatever becomes of a lease's row.
A lease that is released has no row, as one that nobody had before; but if the release was not clean it stays, as a row
without an owner that says so. In a file that was rebuilt all stay: there, what has no row is not known to be clean.

Times are those of the machine's boot clock; a row of another boot has expired. So has, at once, the lease of a process
that is dead, as its member byte tells.

A lease under another has no time. Its `expires_at` is the epoch of the one above, negative, which no time is; and its
`owner` is a JSON array of the owner and the name of the one above. So the row is never written while the lease above is
renewed, and the one above need not know what is under it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from penstock.errors import Fenced, LeaseLost, UsageError
from penstock.rows import Fence, Lease
from penstock.stores.file.state.schema import LEASES
from penstock.stores.file.state.tallies import (
    OTHER_ROWS_MAX,
    Completeness,
    Tally,
    check_room,
    read_tally,
    write_tally,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.stores.file.platform import Platform
    from penstock.stores.file.state.database import Databases
    from penstock.stores.file.state.logview import LogView

SELECT_LEASE = "SELECT name, owner, epoch, expires_at, boot_id, member, clean, crc FROM leases WHERE name = ?"
SELECT_LEASES = """
SELECT name, owner, epoch, expires_at, boot_id, member, clean, crc FROM leases
WHERE name >= ? AND name < ? ORDER BY name
"""
SELECT_THESE = """
SELECT name, owner, epoch, expires_at, boot_id, member, clean, crc FROM leases WHERE name IN ({})
"""
COUNT_CURRENT = """
WITH asked (name, epoch) AS (VALUES {})
SELECT count(*) FROM asked CROSS JOIN leases ON leases.name = asked.name WHERE leases.epoch = asked.epoch
"""
DELETE_LEASE = "DELETE FROM leases WHERE name = ?"
REPLACE_LEASE = "REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

TOGETHER: Final = 64
"""So many rows are asked for at once: of what a row costs, most is the statement."""

NOBODY = ""
"""The owner of a lease that was released."""


T = TypeVar("T")


class LeaseRow(NamedTuple):
    """A lease as it is stored."""

    name: str
    owner: str
    """Or the pair of it and the lease above."""
    epoch: int
    expires_at: float
    boot_id: bytes
    member: int
    clean: int

    @property
    def above(self) -> Fence | None:
        """The lease that it is under."""
        return Fence(self._pair[1], int(-self.expires_at)) if self.expires_at < 0 else None

    def is_of(self, owner: str) -> bool:
        """Say whether this owner acquired it last."""
        return owner == (self._pair[0] if self.expires_at < 0 else self.owner)

    def lease(self, above: LeaseRow | None = None) -> Lease:
        """Return the lease as the port shows it."""
        if above is None:
            return Lease(self.name, self.owner, self.epoch, self.expires_at, bool(self.clean))
        fence = Fence(above.name, above.epoch)
        return Lease(self.name, self._pair[0], self.epoch, above.expires_at, bool(self.clean), fence)

    @property
    def _pair(self) -> tuple[str, str]:
        owner, above = json.loads(self.owner)
        return owner, above


def read_lease(connection: sqlite3.Connection, name: str) -> LeaseRow | None:
    """Return a lease's row."""
    row = connection.execute(SELECT_LEASE, (name,)).fetchone()
    return None if row is None else LeaseRow(*LEASES.checked(row))


def read_leases(connection: sqlite3.Connection, names: Iterable[str]) -> dict[str, LeaseRow]:
    """Return the rows of those of these leases that have one."""
    found: dict[str, LeaseRow] = {}
    for some in _groups(list(dict.fromkeys(names))):
        rows = connection.execute(SELECT_THESE.format(", ".join("?" * len(some))), some).fetchall()
        found.update((row[0], LeaseRow(*LEASES.checked(row))) for row in rows)
    return found


def check_fence(connection: sqlite3.Connection, fence: Fence) -> None:
    """Refuse a write for a lease that has a newer epoch, or none; asked in the transaction of that write."""
    row = read_lease(connection, fence.lease)
    if row is None or row.epoch != fence.epoch:
        raise Fenced(f"epoch {fence.epoch} of lease {fence.lease!r} is stale: nothing was written")


def are_current(connection: sqlite3.Connection, fences: Iterable[Fence]) -> bool:
    """Say whether none of these is stale, at the price of one; if one is, `check_fence` tells which.

    Their rows are compared where they are, and not checked by their sums: one that is damaged has not, of all epochs,
    the one that is asked for.
    """
    for some in _groups(list(set(fences))):
        counting = COUNT_CURRENT.format(", ".join(["(?, ?)"] * len(some)))
        [count] = connection.execute(counting, [each for fence in some for each in fence]).fetchone()
        if count < len(some):
            return False
    return True


def _groups(some: Sequence[T]) -> Iterator[Sequence[T]]:
    return (some[start : start + TOGETHER] for start in range(0, len(some), TOGETHER))


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
        # A lease without a row is a new one, unless its row has vanished: its owner may have left something in flight.
        self._completeness = Completeness(databases.control, LEASES)
        # In a file that lost rows, nobody knows how the last owner of a lease without a row has ended.
        self._unknown_is_clean = not databases.identity.rebuilt
        self._log = log
        self._clock = platform.clock
        self._boot_id = platform.boot_id
        self._member = member
        self._is_alive = is_alive

    def acquire(self, name: str, owner: str, seconds: float, *, under: Lease | None = None) -> Lease | None:
        self._log.check_open()
        if not owner:
            raise UsageError(f"lease {name!r} cannot be held by nobody: give its owner a name")
        if under is not None and (under.name == name or under.under is not None):
            raise UsageError(f"lease {name!r} cannot be under {under.name!r}: take another that expires by itself")

        def work(connection: sqlite3.Connection) -> Lease | None:
            above = None if under is None else self._required(connection, under)
            last = read_lease(connection, name)
            if last is not None and not last.is_of(owner) and self._held(connection, last):
                return None
            [row] = self._take(connection, {name: last}, owner, seconds, above)
            return row.lease(above)

        return self._control.write(work)

    def acquire_some(self, names: Sequence[str], owner: str, most: int, *, under: Lease) -> list[Lease]:
        self._log.check_open()
        if not owner or under.under is not None or under.name in names:
            raise UsageError(f"leases need an owner, and can be under {under.name!r} only if it expires by itself")

        def work(connection: sqlite3.Connection) -> list[Lease]:
            above = self._required(connection, under)
            free: dict[str, LeaseRow | None] = {}
            lasts = read_leases(connection, names)
            aboves = self._aboves(connection, lasts.values())
            for name in dict.fromkeys(names):
                if len(free) >= most:
                    break
                last = lasts.get(name)
                if last is None or self._held(connection, last, aboves) is None:
                    free[name] = last
            return [row.lease(above) for row in self._take(connection, free, owner, 0.0, above)]

        return self._control.write(work)

    def _required(self, connection: sqlite3.Connection, under: Lease) -> LeaseRow:
        above = self._above(connection, under.fence)
        if above is None:
            raise LeaseLost(f"lease {under.name!r} is not held with epoch {under.epoch} any more")
        return above

    def _take(
        self,
        connection: sqlite3.Connection,
        lasts: Mapping[str, LeaseRow | None],
        owner: str,
        seconds: float,
        above: LeaseRow | None,
    ) -> list[LeaseRow]:
        """Write leases for a new owner, each with an epoch above all before; of each, the row that there is."""
        tally = read_tally(connection, LEASES)
        added = sum(last is None for last in lasts.values())
        if added:
            self._completeness.check(connection, tally)
            check_room(tally, added, OTHER_ROWS_MAX, "the limit of leases")
        rows = []
        for epoch, (name, last) in enumerate(lasts.items(), tally.last + 1):
            clean = self._unknown_is_clean if last is None else last.owner == NOBODY and bool(last.clean)
            row = self._row(name, owner, epoch, seconds, clean=clean)
            if above is not None:
                pair = json.dumps([owner, above.name], ensure_ascii=False)
                row = row._replace(owner=pair, expires_at=-float(above.epoch))
            rows.append(row)
        if rows:
            _write(connection, rows)
            write_tally(connection, LEASES, Tally(tally.rows + added, rows[-1].epoch))
        return rows

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> list[Lease]:
            renewed: list[Lease] = []
            for lease in leases:
                row = read_lease(connection, lease.name)
                held = self._held(connection, row) if row is not None and row.epoch == lease.epoch else None
                if row is not None and held is not None and held.under is None:
                    row = self._row(row.name, row.owner, row.epoch, seconds, clean=bool(row.clean))
                    _write(connection, [row])
                    held = row.lease()
                if held is not None:
                    renewed.append(held)
            return renewed

        return self._control.write(work)

    def release(self, lease: Lease, *, clean: bool = True) -> None:
        if not self._give_back([lease], clean=clean):
            raise LeaseLost(f"lease {lease.name!r} is not held with epoch {lease.epoch} any more")

    def release_some(self, leases: Sequence[Lease], *, clean: bool = True) -> list[Lease]:
        return self._give_back(leases, clean=clean)

    def _give_back(self, leases: Sequence[Lease], *, clean: bool) -> list[Lease]:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> list[Lease]:
            released: list[Lease] = []
            rows: list[LeaseRow] = []
            lasts = read_leases(connection, [lease.name for lease in leases])
            for lease in dict.fromkeys(leases):
                row = lasts.get(lease.name)
                if row is not None and row.epoch == lease.epoch and row.owner != NOBODY:
                    released.append(lease)
                    rows.append(row._replace(owner=NOBODY, expires_at=0.0, clean=int(clean)))
            if rows:
                tally = read_tally(connection, LEASES)
                if clean and self._unknown_is_clean:
                    connection.executemany(DELETE_LEASE, [(row.name,) for row in rows])
                    tally = tally._replace(rows=tally.rows - len(rows))
                else:
                    _write(connection, rows)
                # A number that no acquisition gets: so the last one given out says whether anything has changed.
                write_tally(connection, LEASES, tally._replace(last=tally.last + 1))
            return released

        return self._control.write(work)

    def revision(self) -> int:
        self._log.check_open()
        return self._control.read(lambda connection: read_tally(connection, LEASES).last)

    def holder(self, name: str) -> Lease | None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> Lease | None:
            row = read_lease(connection, name)
            return None if row is None else self._held(connection, row)

        return self._control.read(work)

    def held(self, prefix: str) -> list[Lease]:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> list[Lease]:
            rows = connection.execute(SELECT_LEASES, (prefix, f"{prefix}\U0010ffff")).fetchall()
            found = [LeaseRow(*LEASES.checked(row)) for row in rows]
            aboves = self._aboves(connection, found)
            return [lease for row in found if (lease := self._held(connection, row, aboves)) is not None]

        return self._control.read(work)

    def _row(self, name: str, owner: str, epoch: int, seconds: float, *, clean: bool) -> LeaseRow:
        expires_at = max(self._clock.monotonic() + seconds, 0.0)  # what is negative is no time
        return LeaseRow(name, owner, epoch, expires_at, self._boot_id, self._member, int(clean))

    def _held(
        self, connection: sqlite3.Connection, row: LeaseRow, known: Mapping[Fence, LeaseRow | None] | None = None
    ) -> Lease | None:
        """Return the lease if somebody holds it; of those above, some may be known already."""
        if not self._is_owned(row):
            return None
        if (fence := row.above) is not None:
            above = self._above(connection, fence) if known is None else known[fence]
            return None if above is None else row.lease(above)
        return row.lease() if row.expires_at > self._clock.monotonic() else None

    def _above(self, connection: sqlite3.Connection, fence: Fence) -> LeaseRow | None:
        """Return the row of a lease that others are under, if it is held with this epoch."""
        return self._if_held(read_lease(connection, fence.lease), fence)

    def _aboves(self, connection: sqlite3.Connection, rows: Iterable[LeaseRow]) -> dict[Fence, LeaseRow | None]:
        """Return the rows that these are under, where they are held; many are under one."""
        fences = {fence for row in rows if row.owner != NOBODY and (fence := row.above) is not None}
        found = read_leases(connection, [fence.lease for fence in fences])
        return {fence: self._if_held(found.get(fence.lease), fence) for fence in fences}

    def _if_held(self, row: LeaseRow | None, fence: Fence) -> LeaseRow | None:
        if row is None or row.epoch != fence.epoch or not self._is_owned(row):
            return None
        return row if row.expires_at > self._clock.monotonic() else None

    def _is_owned(self, row: LeaseRow) -> bool:
        """Say whether it has an owner who lives, whatever the time."""
        return (
            row.owner != NOBODY
            and row.boot_id == self._boot_id
            and (row.member == self._member or self._is_alive(row.member))
        )


def _write(connection: sqlite3.Connection, rows: Sequence[LeaseRow]) -> None:
    connection.executemany(REPLACE_LEASE, [LEASES.seal(row) for row in rows])
