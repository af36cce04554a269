"""Bugs to plant in the small state of the file store, and in the loops that let events enter a log."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from penstock.errors import BeyondEnd, StaleCursor
from penstock.runtime.mover import Mover
from penstock.runtime.scheduler import Scheduler
from penstock.stores.file.log import FileLog
from penstock.stores.file.state import leases
from penstock.stores.file.state.commits import Step
from penstock.stores.file.state.leases import FileLeases
from penstock.stores.file.state.schedule import FileSchedule
from penstock.stores.file.state.sealing import Table
from penstock.stores.file.state.tallies import read_tally
from penstock.stores.file.state.witnesses import Witnesses
from penstock.testing.campaigns.planted.tools import changed, changed_everywhere, nothing, original

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.errors import StoreError
    from penstock.rows import Cursor, Fence, Lease, Scheduled, Staged


# --- cursors, rows and leases ---------------------------------------------------------------------


def offset_reuse() -> AbstractContextManager[None]:
    """Do not ask the cursors how far the log has been, so that offsets are given out again."""
    return changed(Witnesses, witness=lambda _self, _partition: 0)


def _taken_in_spite_of(kind: type[StoreError]) -> AbstractContextManager[None]:
    right = original(Step, "_cursor_refusal")

    def cursor_refusal(self: Step, cursor: Cursor, *, recorded: bool) -> StoreError | None:
        refusal: StoreError | None = right(self, cursor, recorded=recorded)
        return None if isinstance(refusal, kind) else refusal

    return changed(Step, _cursor_refusal=cursor_refusal)


def cursor_beyond_the_end() -> AbstractContextManager[None]:
    """Take a cursor that is beyond the end of the log."""
    return _taken_in_spite_of(BeyondEnd)


def cursor_goes_back() -> AbstractContextManager[None]:
    """Take a cursor that is before the one that was committed."""
    return _taken_in_spite_of(StaleCursor)


def cursor_before_the_sync() -> AbstractContextManager[None]:
    """Commit a cursor over events that are appended, and not yet durable."""
    return changed(FileLog, bounds_synced=lambda self, partition, _up_to: self.bounds(partition))


def checksum_not_checked() -> AbstractContextManager[None]:
    """Believe every row of the databases."""
    return changed(Table, fits=lambda _self, _row: True)


def lease_epoch_reused() -> AbstractContextManager[None]:
    """Count the epochs of leases in memory, from 1 in every process."""
    right = FileLeases.acquire
    granted: WeakKeyDictionary[FileLeases, int] = WeakKeyDictionary()

    def acquire(self: FileLeases, name: str, owner: str, seconds: float, *, under: Lease | None = None) -> Lease | None:
        last = granted.get(self, 0)
        with changed(leases, read_tally=lambda *asked: read_tally(*asked)._replace(last=last)):
            lease = right(self, name, owner, seconds, under=under)
        if lease is not None:
            granted[self] = lease.epoch
        return lease

    return changed(FileLeases, acquire=acquire)


def stale_fence_accepted() -> AbstractContextManager[None]:
    """Write for a lease without a look at its epoch."""
    return changed_everywhere(leases.check_fence, nothing)


# --- entrances ------------------------------------------------------------------------------------


def outbox_row_deleted_first() -> AbstractContextManager[None]:
    """Delete the rows of an outbox, then append their events."""
    right = original(Mover, "_append")

    async def append(self: Mover, rows: list[Staged], *rest: Any) -> Any:
        assert self._tenure is not None
        fence = await self._tenure.fence()
        assert fence is not None
        self._outbox.done([row.sequence for row in rows], fence)
        return await right(self, rows, *rest)

    return changed(Mover, _append=append)


def scheduled_row_done_first() -> AbstractContextManager[None]:
    """Delete the rows of the schedule, then append their events."""
    right = original(Scheduler, "_append")

    async def append(self: Scheduler, rows: list[Scheduled]) -> Any:
        fence = await self._tenure.fence()
        assert fence is not None
        self._host.store.schedule.done([row.id for row in rows], fence)
        return await right(self, rows)

    return changed(Scheduler, _append=append)


def another_sequence_at_each_claim() -> AbstractContextManager[None]:
    """Give what is due a new sequence whenever it is claimed."""
    right = FileSchedule.claim
    sequences = itertools.count(1_000)

    def claim(self: FileSchedule, now: int, limit: int, fence: Fence) -> list[Scheduled]:
        return [msgspec.structs.replace(row, sequence=next(sequences)) for row in right(self, now, limit, fence)]

    return changed(FileSchedule, claim=claim)
