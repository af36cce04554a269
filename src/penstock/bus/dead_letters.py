"""DeadLetters: events that a subscription gave up on, looked at, grouped by cause, brought back, removed.

A bus has one, as `bus.dead_letters`. It needs no consumer, and reaches every subscription of the store, whoever
consumes it and in whichever process. ::

    for group in await bus.dead_letters.groups(orders, "billing"):
        print(group.count, group.error_type, group.message)
    await bus.dead_letters.replay(orders, "billing", fingerprint=group.fingerprint, rate=50)

What it promises:

* **A filter means all that match**, not those of a page. What the store cannot tell by itself is looked at row by row,
  a page at a time, so that memory is bounded however many there are.
* **A replay brings back the letters that were marked for it, each once.** Marking comes first, and is on the medium:
  what dies afterwards is not part of it, and repeating it, also in another process, brings nothing back twice. Each
  goes to its own subscription alone, at its own position, marked with how often it was brought back; no cursor moves.
* **A purge never removes what waits** for its next attempt.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from penstock.batch import Batch
from penstock.bus.letters import (
    Chosen,
    DeadGroup,
    DeadLetter,
    DeadStats,
    Replayed,
    Where,
    a_letter,
    checked_partition,
    chosen,
    failed_at_us,
    fingerprint_of,
    only_partition,
)
from penstock.bus.local import Local
from penstock.clock import us_to_datetime
from penstock.errors import IntegrityError, OffsetOutOfRange, TopicDeleted, UsageError
from penstock.offsets import Position
from penstock.rows import Parked, ParkedFilter, ParkedState, Partition
from penstock.runtime import subscriptions

if TYPE_CHECKING:
    from datetime import datetime

    from penstock.bus.directory import TopicDirectory
    from penstock.bus.topic import Topic
    from penstock.clock import Clock
    from penstock.ports import Backend
    from penstock.rows import TopicInfo

PAGE_ROWS: Final = 200
"""So many rows, with their events, are in memory at a time."""
LIST_MAX: Final = 1_000
GROUPS_MAX: Final = 1_000
"""So many causes, and types of errors, are told apart; what is left is counted together."""
MESSAGE_CHARACTERS_MAX: Final = 500
"""So much of a message is a sample."""
ROWS_TOGETHER: Final = 1_000
"""So many are changed in one transaction."""
PACE_SECONDS: Final = 0.1
"""A replay at a rate brings back what is due in this time together, and at least one."""
RATE_MAX: Final = 1_000_000.0

DEAD: Final[tuple[ParkedState, ...]] = ("dead",)
ENDED: Final[tuple[ParkedState, ...]] = ("dead", "done")
_STATES: Final[tuple[ParkedState, ...]] = ("waiting", "dead", "done")


class DeadLetters:
    """The dead letters of all subscriptions. Making one does no I/O."""

    def __init__(self, directory: TopicDirectory, clock: Clock, opened: Callable[[], Awaitable[Backend]]) -> None:
        self._directory = directory
        self._clock = clock
        self._opened = opened

    # --- looking ------------------------------------------------------------------------------

    async def ls(
        self,
        topic: Topic[Any] | str,
        name: str,
        *,
        states: Iterable[ParkedState] = DEAD,
        after: Position | None = None,
        limit: int = 100,
        **where: Unpack[Where],
    ) -> list[DeadLetter]:
        """Return dead letters by position, at most `limit`, beginning after the given one.

        `states` may also have `waiting`, for its next attempt, and `done`, after a replay.
        """
        if not 1 <= limit <= LIST_MAX:
            raise UsageError(f"limit is {limit}, it must be 1 to {LIST_MAX:,}: page with `after`")
        info = await self._found(topic, name)
        wanted = chosen(info, name, _checked_states(states), where)
        start = None if after is None else (after.partition, after.offset)
        found: list[Parked] = []
        async for rows in self._pages(wanted, after=start, rows_at_a_time=limit if wanted.fits is None else None):
            found += rows
            if len(found) >= limit:
                break
        declared = await self._directory.topic(topic)
        return [a_letter(row, declared) for row in found[:limit]]

    async def show(
        self, topic: Topic[Any] | str, name: str, offset: int, *, partition: int | None = None
    ) -> DeadLetter:
        """Return one parked event, in whichever state, and when it was appended if the log still has it.

        `UsageError` if the subscription has none there. `partition` need not be given if the topic has one.
        """
        info = await self._found(topic, name)
        number = only_partition(info, checked_partition(info, partition))
        found = await self.ls(topic, name, states=_STATES, partition=number, offsets=[offset], limit=1)
        if not found:
            position = Position(info.name, number, offset)
            raise UsageError(f"subscription {name!r} has no dead letter at {position}: `ls` says which there are")
        return replace(found[0], appended_at=await self._appended_at(Partition(info.log_id, number), offset))

    async def count(
        self,
        topic: Topic[Any] | str,
        name: str,
        *,
        states: Iterable[ParkedState] = DEAD,
        **where: Unpack[Where],
    ) -> int:
        """Return how many there are."""
        info = await self._found(topic, name)
        wanted = chosen(info, name, _checked_states(states), where)
        if wanted.fits is None:
            return await self._count(wanted.rows)
        return sum([len(rows) async for rows in self._pages(wanted)])

    async def _count(self, rows: ParkedFilter) -> int:
        local = await self._local()
        return sum((await local.call(local.store.parked.count, rows)).values())

    async def groups(self, topic: Topic[Any] | str, name: str, **where: Unpack[Where]) -> list[DeadGroup]:
        """Return the causes of dead letters, the most frequent first.

        At most 1,000 are told apart; all that is left then is the last group, without a fingerprint.
        """
        info = await self._found(topic, name)
        found: dict[str, _Group] = {}
        async for rows in self._pages(chosen(info, name, DEAD, where)):
            for row in rows:
                cause = fingerprint_of(row)
                if cause not in found and len(found) >= GROUPS_MAX:
                    cause = ""
                if cause not in found:
                    found[cause] = _Group(row)
                found[cause].add(row)
        groups = [group.shown(cause, info.name) for cause, group in found.items()]
        return sorted(groups, key=lambda group: (not group.fingerprint, -group.count, group.first, group.fingerprint))

    async def stats(self, topic: Topic[Any] | str | None = None, name: str | None = None) -> list[DeadStats]:
        """Return the parked events of each subscription, counted: of all topics, of one, or of one subscription."""
        local = await self._local()
        if topic is None:
            if name is not None:
                raise UsageError(f"say of which topic the subscription {name!r} is")
            infos = [info for info in await local.topics() if not info.name.startswith("_")]
        else:
            wanted = topic if isinstance(topic, str) else topic.name
            infos = [await self._directory.info(wanted) if name is None else await self._found(topic, name)]
        found = []
        for info in infos:
            mine = await local.call(local.store.cursors.subscriptions, info.log_id)
            found += [await self._stats_of(info, each.name) for each in mine if name in {None, each.name}]
        return found

    async def _stats_of(self, info: TopicInfo, name: str) -> DeadStats:
        local = await self._local()
        counts = await local.call(local.store.parked.count, ParkedFilter(log_id=info.log_id, subscription=name))
        errors: Counter[str] = Counter()
        oldest, newest = None, None
        async for rows in self._pages(chosen(info, name, DEAD, {})):
            for row in rows:
                known = row.error_type in errors or len(errors) < GROUPS_MAX
                errors[row.error_type if known else "…"] += 1
                oldest = min(row.parked_at, row.parked_at if oldest is None else oldest)
                newest = max(failed_at_us(row), newest or 0)
        return DeadStats(
            topic=info.name,
            subscription=name,
            dead=counts["dead"],
            waiting=counts["waiting"],
            done=counts["done"],
            oldest=None if oldest is None else us_to_datetime(oldest),
            newest=None if newest is None else us_to_datetime(newest),
            errors=dict(errors.most_common()),
        )

    async def _appended_at(self, partition: Partition, offset: int) -> datetime | None:
        local = await self._local()
        try:
            found = await local.read(partition, offset, bytes_max=1, events_max=1)
        except (OffsetOutOfRange, IntegrityError, TopicDeleted):
            return None  # the letter outlives its event in the log
        first = found[0] if found else None
        return us_to_datetime(first.place.appended_at) if isinstance(first, Batch) and first.place else None

    # --- changing -----------------------------------------------------------------------------

    async def replay(
        self,
        topic: Topic[Any] | str,
        name: str,
        *,
        rate: float | None = None,
        dry_run: bool = False,
        job: str | None = None,
        **where: Unpack[Where],
    ) -> Replayed:
        """Bring dead letters back: they are delivered again, to this subscription alone.

        * `rate`: events a second at most; without it, all at once.
        * `dry_run`: only mark them, and say how many. `replay(…, job=result.job)` then brings back exactly these.
        * `job`: instead of a filter, what was marked before and is not back yet: by a dry run, or by a replay that was
          cut off. A letter is marked by the last replay that was asked for it.
        """
        check_rate(rate)
        info = await self._found(topic, name)
        if job is None:
            job = f"replay-{us_to_datetime(self._clock.time_us()):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}"
            matched = await self._mark(chosen(info, name, DEAD, where), job)
        else:
            if not job or any(value is not None for value in where.values()):
                raise UsageError("give a `job` or a filter, not both: a job names its letters already")
            matched = await self._count(_marked(info, name, DEAD, job))
        replayed = 0 if dry_run else await self._bring_back(_marked(info, name, DEAD, job), matched, rate)
        return Replayed(job, matched, replayed)

    async def purge(self, topic: Topic[Any] | str, name: str, **where: Unpack[Where]) -> int:
        """Remove dead letters, and those that are done after a replay; return how many. It cannot be undone."""
        info, local = await self._found(topic, name), await self._local()
        parts = self._parts(chosen(info, name, ENDED, where))
        return sum([await local.call(local.store.parked.purge, part) async for part in parts])

    async def _mark(self, wanted: Chosen, job: str) -> int:
        """Mark what is meant with a job; return how many."""
        local = await self._local()
        return sum([await local.call(local.store.parked.stamp, part, job) async for part in self._parts(wanted)])

    async def _parts(self, wanted: Chosen) -> AsyncIterator[ParkedFilter]:
        """Yield filters that together mean the same, each of few rows: a long transaction would hold up all others."""
        if wanted.fits is None and await self._count(wanted.rows) <= ROWS_TOGETHER:
            yield wanted.rows
            return
        async for rows in self._pages(wanted):
            for partition in sorted({row.shard.partition for row in rows}):
                offsets = frozenset(row.offset for row in rows if row.shard.partition == partition)
                yield msgspec.structs.replace(wanted.rows, partition=partition, offsets=offsets)

    async def _bring_back(self, marked: ParkedFilter, matched: int, rate: float | None) -> int:
        local = await self._local()
        together = ROWS_TOGETHER if rate is None else min(max(int(rate * PACE_SECONDS), 1), ROWS_TOGETHER)
        replayed = 0
        while replayed < matched:
            begun = self._clock.monotonic()
            limit = min(together, matched - replayed)
            count = await local.call(local.store.parked.replay, marked, self._clock.time_us(), limit=limit)
            replayed += count
            if count < limit:
                break
            if replayed < matched:
                # From its own beginning: after a delay the rate is what it was, and nothing is made up for.
                await self._clock.pause(0 if rate is None else begun + count / rate - self._clock.monotonic())
        return replayed

    # --- the store ----------------------------------------------------------------------------

    async def _local(self) -> Local:
        backend = await self._opened()
        if not isinstance(backend, Local):
            raise UsageError("this backend does not keep dead letters by itself")
        return backend

    async def _found(self, topic: Topic[Any] | str, name: str) -> TopicInfo:
        """Return the topic of a subscription that is there; `UnknownSubscription` if it is not."""
        info = await self._directory.info(topic if isinstance(topic, str) else topic.name)
        local = await self._local()
        await local.call(subscriptions.find, local.store, info, name)
        return info

    async def _pages(
        self, wanted: Chosen, *, after: tuple[int, int] | None = None, rows_at_a_time: int | None = None
    ) -> AsyncIterator[list[Parked]]:
        """Yield all rows that are meant, a page at a time."""
        local, limit = await self._local(), rows_at_a_time or PAGE_ROWS
        while True:
            rows = await local.call(local.store.parked.page, wanted.rows, after=after, limit=limit)
            yield wanted.of(rows)
            if len(rows) < limit:
                return
            after = (rows[-1].shard.partition, rows[-1].offset)
            await asyncio.sleep(0)  # a store in memory answers at once, and others have to go on


class _Group:
    """What is gathered of a cause; nothing of it grows."""

    def __init__(self, row: Parked) -> None:
        self._count = 0
        self._first_us = row.parked_at
        self._last_us = -1
        self._error_type = self._message = ""
        self._sample = (0, 0)

    def add(self, row: Parked) -> None:
        self._count += 1
        self._first_us = min(self._first_us, row.parked_at)
        if failed_at_us(row) >= self._last_us:
            self._last_us = failed_at_us(row)
            self._error_type, self._message = row.error_type, row.error_message[:MESSAGE_CHARACTERS_MAX]
            self._sample = (row.shard.partition, row.offset)

    def shown(self, cause: str, topic: str) -> DeadGroup:
        return DeadGroup(
            fingerprint=cause,
            error_type=self._error_type,
            count=self._count,
            first=us_to_datetime(self._first_us),
            last=us_to_datetime(self._last_us),
            message=self._message,
            sample=Position(topic, *self._sample),
        )


def check_rate(rate: float | None) -> None:
    """Raise `UsageError` if nothing can be brought back at this rate, in events a second."""
    if rate is not None and not 0 < rate <= RATE_MAX:
        raise UsageError(f"rate is {rate!r}, it must be above 0 and at most {RATE_MAX:,.0f} events a second")


def _marked(info: TopicInfo, name: str, states: Iterable[ParkedState], job: str) -> ParkedFilter:
    return ParkedFilter(log_id=info.log_id, subscription=name, states=frozenset(states), job=job)


def _checked_states(states: Iterable[ParkedState]) -> frozenset[ParkedState]:
    found = frozenset(states)
    if not found or not found <= set(_STATES):
        raise UsageError(f"`states` are some of {', '.join(_STATES)}, not {', '.join(sorted(found)) or 'none'}")
    return found
