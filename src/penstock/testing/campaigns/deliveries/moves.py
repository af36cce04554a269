"""The steps that only consumers make who share a subscription: coming, having slots or claims, and letting them go.

Of what several owners write to one cursor, the record is made in the store's own transaction; it is told there, so
that the campaign knows it however the process ends, and once more when the commit is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import msgspec

from penstock.rows import ParkedFilter
from penstock.runtime.subscriptions import slots_prefix
from penstock.settling import unsettled
from penstock.testing.campaigns.deliveries.steps import Steps, name_of_attempts, name_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.errors import StoreError
    from penstock.rows import Commit, Cursor, Lease, Settling
    from penstock.stores.file.store import FileStore
    from penstock.testing.campaigns.deliveries.script import Fault

COMMITS: Final = {
    "commit: marks suspects": "takes over, key_shared",
    "commit: gives claims back": "another one comes, shared",
    "commit: claims": "comes to another one, shared",
    "commit: a failed attempt": "another one comes, key_shared",
    "commit: progress": "another one comes, key_shared",
}
"""Of a commit that does several of these, the first counts; those of other names are tried by chance."""
STEPS: Final = COMMITS | {
    "lease of a consumer": "comes to another one, key_shared",
    "lease of slots": "comes to another one, key_shared",
    "release of slots": "another one comes, key_shared",
    "release of a consumer": "comes to another one, key_shared",
    "lease of a berth": "comes to another one, shared",
    "release of a berth": "another one comes, shared",
    "lease of the process": "comes to another one, shared",
}
"""Every step that sharing consists of, and a scene of two processes in which the one that is ended makes it.

What else becomes of events is in `steps.STEPS`; beside others it happens where chance will have it."""
TAKING_OVER: Final = {
    "lease of slots": "takes over, key_shared",
    "commit: progress": "takes over, key_shared",
    "lease of a berth": "takes over, shared",
    "release of a berth": "takes over, shared",
    "commit: marks suspects": "takes over, shared",
}
"""Steps that a process makes, too, when it takes over from one that was killed, and a scene of that."""


# --- what is told -----------------------------------------------------------------------------


class TookSome(NamedTuple):
    """Leases were acquired."""

    leases: tuple[tuple[str, int], ...]
    """Each with its epoch."""


class Made(NamedTuple):
    """A record was made, in the transaction of its commit; it may or may not come to be written."""

    record: bytes
    berth: int


class Answered(NamedTuple):
    """A commit was answered."""

    record: bytes
    error: str
    """The name of the refusal's class; empty if it was written."""


class Claims(NamedTuple):
    """What the cursor of a partition says of claims."""

    partition: int
    next_offset: int
    unsettled: dict[int, list[tuple[int, int]]]
    """Of each berth, as ranges."""


def lease_of(log_id: str, name: str, slot: int) -> str:
    """Return the name of the lease of a slot."""
    return f"{slots_prefix(log_id, name)}{slot}"


def claims_in(cursor: Cursor) -> Claims:
    """Return what a cursor says of claims."""
    open_ = {berth: [(span.start, span.stop) for span in unsettled(cursor, berth)] for berth in cursor.claims}
    return Claims(cursor.shard.partition, cursor.next_offset, open_)


# --- in the process ---------------------------------------------------------------------------


class SharedSteps(Steps):
    """Takes the place of what changes a store, in a process that shares a subscription."""

    NAMED: ClassVar = Steps.NAMED | {"leases.acquire_some"}

    def __init__(self, store: FileStore, tell: Callable[[object], None], fault: Fault | None) -> None:
        super().__init__(store, tell, fault)
        self._acquire_some = store.leases.acquire_some
        self._held: dict[str, int] = {}
        """The epochs of the leases that this process was given."""

    def _whose(self, name: str) -> str:
        kinds = {"member": "a consumer", "slot": "slots", "shard": "a berth"}
        return kinds.get(name.partition("/")[0]) or super()._whose(name)

    def _took(self, lease: Lease | None) -> Iterable[TookSome]:  # type: ignore[override] # it is told otherwise
        return self._took_some([] if lease is None else [lease])

    def _took_some(self, leases: Sequence[Lease]) -> Iterable[TookSome]:
        self._held.update({lease.name: lease.epoch for lease in leases})
        if leases:
            yield TookSome(tuple((lease.name, lease.epoch) for lease in leases))

    def acquire_some(self, names: Sequence[str], owner: str, most: int, *, under: Lease) -> list[Lease]:
        """See `Leases`."""
        with self._turn:
            return self._step(
                "lease of slots", lambda: self._acquire_some(names, owner, most, under=under), self._took_some
            )

    def epoch_of(self, lease: str) -> int:
        """Return the epoch that this process was last given of a lease."""
        return self._held.get(lease, 0)

    # --- commits ------------------------------------------------------------------------------

    def commit(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        """See `Cursors`."""
        with self._turn:
            names = set().union(*(self._names_of(commit) for commit in commits))
            step = next((name for name in COMMITS if name in names), sorted(names)[0])
            made: dict[int, bytes] = {}
            heard = [self._listened(index, commit, made) for index, commit in enumerate(commits)]
            return self._step(
                step,
                lambda: self._commit(heard),
                lambda answers: self._answered(commits, made, answers),
            )

    def _listened(self, index: int, commit: Commit, made: dict[int, bytes]) -> Commit:
        """Return the commit, which tells its record as soon as it is made."""
        settling = commit.settling
        if settling is None or settling.record is None:
            return commit
        make, berth = settling.record, settling.berth

        def record(before: Cursor, after: Cursor) -> bytes:
            made[index] = data = make(before, after)
            if data:
                self._tell(Made(data, berth))
            return data

        return msgspec.structs.replace(commit, settling=msgspec.structs.replace(settling, record=record))

    def _answered(
        self, commits: Sequence[Commit], made: dict[int, bytes], answers: Sequence[StoreError | None]
    ) -> Iterable[object]:
        for index, (commit, answer) in enumerate(zip(commits, answers, strict=True)):
            record = made.get(index, b"")
            if record or answer is not None:
                yield Answered(record, "" if answer is None else type(answer).__name__)
            if commit.settling is not None and commit.settling.berth:
                yield claims_in(self._cursor_of(commit.settling))

    def _cursor_of(self, settling: Settling) -> Cursor:
        shard = settling.shard
        return next(each for each in self._cursors.load(shard.log_id, shard.subscription) if each.shard == shard)

    def _names_of(self, commit: Commit) -> set[str]:
        settling = commit.settling
        if settling is None:
            return {"a commit of a cursor, which has no name"}
        found = {"commit: progress"}
        if settling.freed:
            found.add("commit: gives claims back")
        if settling.claim is not None:
            found.add("commit: claims")
        before = self._cursor_of(settling)
        changed = {offset: made or 0 for offset, made in settling.attempts.items() if made is not None}
        found |= name_of_attempts(msgspec.structs.replace(before, attempts=changed), before, self.failed)
        if commit.parked:
            shard = commit.parked[0].shard
            wanted = ParkedFilter(
                log_id=shard.log_id,
                subscription=shard.subscription,
                partition=shard.partition,
                offsets=frozenset(row.offset for row in commit.parked),
            )
            rows = {row.offset: row for row in self._parked.page(wanted, limit=len(commit.parked))}
            found |= name_of_rows([(row, rows.get(row.offset)) for row in commit.parked])
        return found
