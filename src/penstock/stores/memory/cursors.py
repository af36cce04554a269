"""The ports of subscriptions and of who may act for them: `Cursors`, `ParkedRows`, `Leases`."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BeyondEnd, LeaseLost, StaleCursor, StoreError, TopicDeleted, UnknownSubscription, UsageError
from penstock.rows import (
    Commit,
    Cursor,
    Lease,
    Parked,
    ParkedFilter,
    ParkedState,
    Partition,
    Settlement,
    Settling,
    Shard,
    Subscription,
    Waiting,
)
from penstock.settling import settle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.stores.memory.state import State


class MemoryCursors:
    """The `Cursors` port."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._settlements: deque[Settlement] = deque()
        self._last_settlement = 0

    def put_subscription(
        self, subscription: Subscription, cursors: Sequence[Cursor] = (), *, existing: bool = False
    ) -> None:
        key = (subscription.log_id, subscription.name)
        if any(cursor.shard[:2] != key for cursor in cursors):
            raise UsageError(f"a cursor is not of the subscription {subscription.name!r} that it was given with")
        with self._state:
            if subscription.log_id not in self._state.topics:
                raise TopicDeleted(subscription.log_id)
            if existing and key not in self._state.subscriptions:
                raise UnknownSubscription(*key)
            new = [cursor for cursor in cursors if cursor.shard not in self._state.cursors]
            for cursor in new:
                self._check_cursor(cursor)
            self._state.check_rows(
                len(self._state.subscriptions), int(key not in self._state.subscriptions), "subscription"
            )
            self._state.revision += 1
            self._state.subscriptions[key] = subscription
            self._put(new)

    def delete_subscription(self, log_id: str, name: str) -> bool:
        with self._state:
            if (log_id, name) not in self._state.subscriptions:
                return False
            self._state.forget_subscription(log_id, name)
            return True

    def subscriptions(self, log_id: str | None = None) -> list[Subscription]:
        with self._state:
            keys = sorted(key for key in self._state.subscriptions if log_id in {None, key[0]})
            return [self._state.subscriptions[key] for key in keys]

    def subscription(self, log_id: str, name: str) -> Subscription | None:
        with self._state:
            return self._state.subscriptions.get((log_id, name))

    def revision(self) -> int:
        with self._state:
            return self._state.revision

    def load(self, log_id: str, subscription: str) -> list[Cursor]:
        with self._state:
            if log_id not in self._state.topics:
                raise TopicDeleted(log_id)
            shards = sorted(shard for shard in self._state.cursors if shard[:2] == (log_id, subscription))
            return [self._state.cursors[shard] for shard in shards]

    def commit(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        with self._state:
            for shard in (shard for commit in commits for shard in _shards(commit)):
                # A wrong call raises, so it must be found before anything is written; the rest is answered.
                with suppress(TopicDeleted):
                    self._state.partition(Partition(shard.log_id, shard.partition))
            return [self._commit(commit) for commit in commits]

    def _commit(self, commit: Commit) -> StoreError | None:
        try:
            self._check(commit)
            if commit.settling is not None:
                self._settle(commit.settling)
        except StoreError as error:
            return error
        for cursor in commit.cursors:
            old = self._state.cursors.get(cursor.shard)
            self._state.revision += cursor.generation > (old.generation if old else 0)
        self._put(commit.cursors)
        for row in commit.parked:
            self._state.parked[row.key] = row
        if commit.settlement:
            self._record(commit.settlement)
        return None

    def _settle(self, settling: Settling) -> None:
        """Add to a cursor what one of its owners has settled."""
        shard = settling.shard
        log = self._state.partition(Partition(shard.log_id, shard.partition))
        if settling.settled.end > log.end:
            raise BeyondEnd.at(shard, settling.settled.end, log.first, log.end)
        before = self._state.cursors.get(shard) or Cursor(shard=shard, next_offset=0)
        after, record = settle(before, settling)
        self._put([after])
        if record:
            self._record(record)

    def _record(self, record: bytes) -> None:
        self._last_settlement += 1
        self._settlements.append(Settlement(self._last_settlement, record))

    def _check(self, commit: Commit) -> None:
        state = self._state
        for fence in commit.fences:
            state.check_fence(fence)
        for shard in _shards(commit):
            if shard.log_id not in state.topics:
                raise TopicDeleted(shard.log_id)
            if shard[:2] not in state.subscriptions:
                raise UnknownSubscription(*shard[:2])
        for cursor in commit.cursors:
            self._check_cursor(cursor, recorded=bool(commit.settlement))
        new_rows = {row.key for row in commit.parked} - state.parked.keys()
        state.check_rows(len(state.parked), len(new_rows), "parked")
        records = bool(commit.settlement) + (commit.settling is not None and commit.settling.record is not None)
        state.check_rows(len(self._settlements), records, "settlement")

    def _check_cursor(self, cursor: Cursor, *, recorded: bool = False) -> None:
        log = self._state.partition(Partition(cursor.shard.log_id, cursor.shard.partition))
        if cursor.next_offset > log.end:
            raise BeyondEnd.at(cursor.shard, cursor.next_offset, log.first, log.end)
        old = self._state.cursors.get(cursor.shard)
        if old and (cursor.generation, cursor.next_offset) < (old.generation, old.next_offset):
            raise StaleCursor(f"{cursor.shard} is at offset {old.next_offset} of generation {old.generation} already")
        if old and cursor.generation > old.generation and cursor.number < old.number + recorded:
            raise StaleCursor(f"{cursor.shard} is at record {old.number} already, and was moved without a look at it")

    def _put(self, cursors: Sequence[Cursor]) -> None:
        now = self._state.clock.time_us()
        for cursor in cursors:
            self._state.cursors[cursor.shard] = msgspec.structs.replace(cursor, updated_at=now)

    def settlements(self, limit: int) -> list[Settlement]:
        with self._state:
            return [self._settlements[index] for index in range(min(limit, len(self._settlements)))]

    def forget_settlements(self, up_to: int) -> None:
        with self._state:
            while self._settlements and self._settlements[0].number <= up_to:
                self._settlements.popleft()


def _shards(commit: Commit) -> list[Shard]:
    """Return the shards that a commit is about."""
    return [
        *(cursor.shard for cursor in commit.cursors),
        *([] if commit.settling is None else [commit.settling.shard]),
        *(row.shard for row in commit.parked),
    ]


class MemoryParkedRows:
    """The `ParkedRows` port."""

    def __init__(self, state: State) -> None:
        self._state = state

    def _matching(self, wanted: ParkedFilter) -> list[Parked]:
        rows = [row for row in self._state.parked.values() if wanted.matches(row)]
        return sorted(rows, key=lambda row: row.key)

    def page(
        self,
        filter: ParkedFilter,
        *,
        after: tuple[int, int] | None = None,
        limit: int = 100,
    ) -> list[Parked]:
        with self._state:
            rows = self._matching(filter)
            return [row for row in rows if after is None or row.key[2:] > after][:limit]

    def places(
        self, filter: ParkedFilter, *, after: tuple[int, int] | None = None, limit: int = 100
    ) -> list[tuple[int, int]]:
        return [row.key[2:] for row in self.page(filter, after=after, limit=limit)]

    def count(self, filter: ParkedFilter) -> dict[ParkedState, int]:
        with self._state:
            counts: dict[ParkedState, int] = {"waiting": 0, "dead": 0, "done": 0}
            for row in self._matching(filter):
                counts[row.state] += 1
            return counts

    def due(self, filter: ParkedFilter, now: int, *, limit: int = 100) -> list[Parked]:
        with self._state:
            rows = [row for row in self._matching(filter) if row.state == "waiting" and row.due_at <= now]
            return sorted(rows, key=lambda row: (row.due_at, row.key))[:limit]

    def waiting(self, filter: ParkedFilter) -> list[Waiting]:
        with self._state:
            rows = [row for row in self._matching(filter) if row.state == "waiting"]
            return [Waiting(row.shard, row.offset, row.lane, row.due_at, row.attempts, row.replay) for row in rows]

    def stamp(self, filter: ParkedFilter, job: str) -> int:
        with self._state:
            rows = self._matching(filter)
            self._state.revision += bool(rows)
            self._state.parked.update((row.key, msgspec.structs.replace(row, job=job)) for row in rows)
            return len(rows)

    def replay(self, filter: ParkedFilter, now: int, *, limit: int | None = None) -> int:
        with self._state:
            rows = [row for row in self._matching(filter) if row.state == "dead"][:limit]
            self._state.revision += bool(rows)
            for row in rows:
                self._state.parked[row.key] = msgspec.structs.replace(
                    row, state="waiting", due_at=now, attempts=0, replay=row.replay + 1, job=""
                )
            return len(rows)

    def purge(self, filter: ParkedFilter) -> int:
        with self._state:
            rows = [row for row in self._matching(filter) if row.state != "waiting"]
            self._state.revision += bool(rows)
            for row in rows:
                del self._state.parked[row.key]
            return len(rows)


class MemoryLeases:
    """The `Leases` port. A lease that was released stays, without an owner, only if that was not clean."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._revision = 0
        """Raised by every acquisition and release; what it is then is the epoch of what was acquired."""

    def _held(self, name: str) -> Lease | None:
        lease = self._state.leases.get(name)
        if lease is None or not lease.owner:
            return None
        if lease.under is not None:
            above = self._held(lease.under.lease)
            held = above is not None and above.epoch == lease.under.epoch
            return lease._replace(expires_at=above.expires_at) if above and held else None
        return lease if lease.expires_at > self._state.clock.monotonic() else None

    def acquire(self, name: str, owner: str, seconds: float, *, under: Lease | None = None) -> Lease | None:
        with self._state:
            expires_at = self._state.clock.monotonic() + seconds
            if under is not None:
                expires_at = self._above(name, under).expires_at
            held = self._held(name)
            if held is not None and held.owner != owner:
                return None
            last = self._state.leases.get(name)
            self._state.check_rows(len(self._state.leases), int(last is None), "lease")
            self._revision += 1
            lease = Lease(
                name,
                owner,
                epoch=self._revision,
                expires_at=expires_at,
                clean=last is None,
                under=under and under.fence,
            )
            self._state.leases[name] = lease
            return lease

    def acquire_some(self, names: Sequence[str], owner: str, most: int, *, under: Lease) -> list[Lease]:
        with self._state:
            for name in names or [""]:
                self._above(name, under)
            free = [name for name in dict.fromkeys(names) if self._held(name) is None][:most]
            return [lease for name in free if (lease := self.acquire(name, owner, 0.0, under=under)) is not None]

    def _above(self, name: str, under: Lease) -> Lease:
        if under.name == name or under.under is not None:
            raise UsageError(f"lease {name!r} cannot be under {under.name!r}: take another that expires by itself")
        above = self._held(under.name)
        if above is None or above.epoch != under.epoch:
            raise LeaseLost(f"lease {under.name!r} is not held with epoch {under.epoch} any more")
        return above

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        with self._state:
            renewed = []
            for lease in leases:
                held = self._held(lease.name)
                if held is None or held.epoch != lease.epoch:
                    continue
                if held.under is None:
                    held = held._replace(expires_at=self._state.clock.monotonic() + seconds)
                    self._state.leases[lease.name] = held
                renewed.append(held)
            return renewed

    def release(self, lease: Lease, *, clean: bool = True) -> None:
        with self._state:
            last = self._state.leases.get(lease.name)
            if last is None or last.epoch != lease.epoch or not last.owner:
                raise LeaseLost(f"lease {lease.name!r} is not held with epoch {lease.epoch} any more")
            if clean:
                del self._state.leases[lease.name]
            else:
                self._state.leases[lease.name] = last._replace(owner="", expires_at=0.0, clean=False, under=None)
            self._revision += 1

    def release_some(self, leases: Sequence[Lease], *, clean: bool = True) -> list[Lease]:
        released = []
        with self._state:
            for lease in leases:
                with suppress(LeaseLost):
                    self.release(lease, clean=clean)
                    released.append(lease)
        return released

    def revision(self) -> int:
        with self._state:
            return self._revision

    def holder(self, name: str) -> Lease | None:
        with self._state:
            return self._held(name)

    def held(self, prefix: str) -> list[Lease]:
        with self._state:
            names = sorted(name for name in self._state.leases if name.startswith(prefix))
            return [lease for name in names if (lease := self._held(name)) is not None]
