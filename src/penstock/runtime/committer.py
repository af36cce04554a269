"""Committer: the progress of all shards of a process, written in groups.

While one group is being written, whatever settles gathers for the next; so a shard that settles a million events a
second costs as many commits as the medium has time for, and one that settles one event waits for one. Cursor, parked
rows and record of a shard are one commit, under the fence of its lease.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engine.messages import NO_FAILURE, Claimed, CursorSeen, NotWritten, Written
from penstock.errors import (
    Fenced,
    PenstockError,
    StaleCursor,
    StaleDelivery,
    StoreClosed,
    StoreError,
    TopicDeleted,
    UnknownSubscription,
)
from penstock.offsets import RangeSet
from penstock.rows import Claim, Commit, Cursor, Parked, ParkedFilter, Settling
from penstock.runtime.blocks import ParkedBlocks
from penstock.runtime.entrances import Host, Loop
from penstock.runtime.ledger import record_of
from penstock.settling import claims_of, frontier, unsettled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.clock import Clock
    from penstock.engine.messages import Input, Park, Step
    from penstock.engine.shard import Shard as Engine
    from penstock.offsets import Range
    from penstock.rows import ParkedState
    from penstock.runtime.seat import Seat

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 3600.0
RETRY_SECONDS: Final = 0.1
RETRY_SECONDS_MAX: Final = 5.0
PACE_TIMES: Final = 8
PACE_SECONDS: Final = 0.02
"""After a commit settlements gather for so many times as long as it took, and no longer than this: commits that follow
each other closely would take the processor from the consumers, and the disk from their own commits. Nobody waits for
one but a `flush`, or a shard that can hand over nothing more before it is written; these do not wait."""
PURGE_ROWS: Final = 500
"""When so many parked rows are done, they are removed."""


class Entry:
    """A step of a seat on its way to the store."""

    __slots__ = ("claimed", "cursor", "engine", "fences", "seat", "step")

    def __init__(self, seat: Seat, engine: Engine, step: Step) -> None:
        self.seat = seat
        self.engine = engine
        self.step = step
        # Now: a seat that is lost and taken again meanwhile has another one, under which this step must not be written.
        self.fences = seat.fences
        self.cursor: Cursor | None = None
        """What has come of it, where others write the same cursor …"""
        self.claimed: tuple[Range, ...] = ()
        """… and what was claimed by it."""

    def record(self, now_us: int, before: Cursor, after: Cursor) -> bytes:
        """Return the record of a step that was added to a shared cursor; called in the store's transaction."""
        self.cursor = after
        if self.step.wish is not None:
            berth = self.seat.berth
            # What it gives back it may be given again.
            self.claimed = tuple(unsettled(after, berth) - (claims_of(before, berth) - self.step.freed))
        step = replace(self.step, number=after.number, begin=before.next_offset, next_offset=after.next_offset)
        return record_of(self.seat.cursor_shard, step, now_us) if self.seat.recorded else b""

    @property
    def news(self) -> list[Input]:
        """What its engine is to be told of the cursor."""
        if self.cursor is None:
            return []
        seen: list[Input] = [CursorSeen(self.cursor.next_offset)]
        return seen if self.step.wish is None else [*seen, Claimed(self.claimed, frontier(self.cursor))]


class Committer(Loop):
    """The loop that writes progress."""

    def __init__(self, host: Host, *, clock: Clock, jitter: Callable[[], float], wrote: Callable[[], None]) -> None:
        super().__init__("the committer of progress", clock, jitter)
        self._host = host
        self._wrote = wrote
        self._dirty: dict[Seat, None] = {}
        self._hurried: set[Seat] = set()
        self._waiting: list[tuple[Seat, Engine, int, asyncio.Future[None]]] = []
        self._retry_seconds = RETRY_SECONDS
        self._not_before = 0.0
        self._next_at = 0.0
        self._held_back: dict[Seat, tuple[float, float]] = {}
        """Seats whose progress the store refuses at the moment: until when they wait, and how long that was."""
        self.commits = 0

    def mark(self, seat: Seat) -> None:
        """Look at a seat: it may have something to write."""
        if seat not in self._dirty:
            self._dirty[seat] = None
            self.wake()
        elif self._pause is not None and seat not in self._held_back:
            # It waits for its checkpoint, and may have settled enough for one by now.
            now = self._clock.monotonic()
            at = None if seat.engine is None else seat.engine.write_at()
            if at is not None and at <= now >= self._not_before:
                self.wake()

    async def flush(self, seats: Sequence[Seat]) -> None:
        """Return when everything that these seats have settled by now is written; `StaleDelivery` if one is lost."""
        futures = []
        for seat in seats:
            if seat.engine is not None and (seat.engine.progress.dirty or seat.engine.progress.writing):
                future = asyncio.get_running_loop().create_future()
                futures.append(future)
                self._waiting.append((seat, seat.engine, seat.engine.progress.mark(), future))
                self._hurried.add(seat)
                self._dirty[seat] = None
        if futures:
            self.wake()
            await asyncio.gather(*futures)

    async def _round(self) -> float:
        now = self._clock.monotonic()
        if now < self._not_before:
            return self._not_before - now
        if now < self._next_at and not self._hurried and not any(seat.waits_for_commit for seat in self._dirty):
            return self._next_at - now
        entries: list[Entry] = []
        next_at = IDLE_SECONDS
        for seat in list(self._dirty):
            engine = seat.engine
            at = None if engine is None else engine.write_at()
            if engine is None or at is None:
                del self._dirty[seat]
                self._hurried.discard(seat)
                self._held_back.pop(seat, None)
            elif (until := self._held_back.get(seat, (0.0, 0.0))[0]) > now:
                next_at = min(next_at, until - now)
            elif at > now and seat not in self._hurried:
                next_at = min(next_at, at - now)
            elif (step := engine.take_step()) is not None:
                entries.append(Entry(seat, engine, step))
        if not entries:
            self._answer_flushes()
            return next_at
        await self._write(entries)
        self._answer_flushes()
        ended = self._clock.monotonic()
        self._next_at = ended + min(PACE_TIMES * (ended - now), PACE_SECONDS)
        return 0.0

    async def _write(self, entries: list[Entry]) -> None:
        try:
            answers = await self._host.call(self._commit, entries)
        except PenstockError as error:
            for entry in entries:
                self._told(entry, NotWritten(entry.step))
            if isinstance(error, StoreClosed):
                raise
            self._back_off(f"{type(error).__name__}: {error}")
            return
        except Exception as error:  # noqa: BLE001 - nobody can tell whether it was written
            logger.warning("a commit ended without an answer, and its shards are loaded anew: %r", error)
            # They would commit anew at once, and a medium that fails for long would be asked without a pause.
            self._wait_longer()
            for entry in entries:
                if entry.seat.engine is entry.engine:
                    entry.seat.lose("a commit of it ended without an answer")
            return
        self.commits += len(entries)
        self._retry_seconds = RETRY_SECONDS
        for entry, answer in zip(entries, answers, strict=True):
            if answer is None:
                entry.seat.member.tally.wrote(entry.step)
            if entry.seat.engine is entry.engine:
                self._answered(entry, answer)
        self._wrote()
        await self._purge(entries)

    def _answered(self, entry: Entry, answer: StoreError | None) -> None:
        """Tell a seat what became of its step."""
        seat = entry.seat
        match answer:
            case None:
                seat.trouble.pop("commit", None)
                self._held_back.pop(seat, None)
                for told in (Written(entry.step), *entry.news):
                    self._told(entry, told)
            case Fenced():
                seat.lose(f"another consumer has it: {answer}")
            case StaleCursor():
                seat.lose(f"it was moved: {answer}")
            case UnknownSubscription() | TopicDeleted():
                seat.member.end(answer.of(seat.topic.name))
            case _:
                self._hold_back(seat, f"{type(answer).__name__}: {answer}")
                self._told(entry, NotWritten(entry.step))

    def _told(self, entry: Entry, told: Input) -> None:
        if entry.seat.engine is entry.engine:
            entry.seat.tell(told)

    def _hold_back(self, seat: Seat, trouble: str) -> None:
        """Let a seat wait whose progress the store refuses; the others go on."""
        if seat.trouble.get("commit") != trouble:
            logger.warning("%s: progress was not written, and will be tried again: %s", seat, trouble)
        seat.trouble["commit"] = trouble
        seconds = min(max(self._held_back.get(seat, (0.0, 0.0))[1] * 2, RETRY_SECONDS), RETRY_SECONDS_MAX)
        self._held_back[seat] = (self._clock.monotonic() + seconds, seconds)

    def _back_off(self, trouble: str) -> None:
        logger.warning("progress was not written, and will be tried again: %s", trouble)
        self._wait_longer()

    def _wait_longer(self) -> None:
        self._not_before = self._clock.monotonic() + self._retry_seconds
        self._retry_seconds = min(self._retry_seconds * 2, RETRY_SECONDS_MAX)

    def _answer_flushes(self) -> None:
        left = []
        for seat, engine, mark, future in self._waiting:
            if future.done():
                continue
            if seat.engine is not engine:
                future.set_exception(StaleDelivery(str(seat), seat.lost_because))
            elif engine.progress.passed(mark):
                future.set_result(None)
            else:
                left.append((seat, engine, mark, future))
        self._waiting = left

    # --- in a thread --------------------------------------------------------------------------

    def _commit(self, entries: list[Entry]) -> list[StoreError | None]:
        now_us = self._clock.time_us()
        commits = [self._commit_of(entry, now_us) for entry in entries]
        return self._host.store.cursors.commit(commits)

    def _commit_of(self, entry: Entry, now_us: int) -> Commit:
        seat, step = entry.seat, entry.step
        parked = tuple(_parked(seat, park, now_us) for park in step.parks)
        if seat.shares_cursor:
            settling = Settling(
                shard=seat.cursor_shard,
                generation=step.generation,
                settled=reduce(or_, step.outcomes.values(), RangeSet()),
                attempts=step.changed_attempts,
                berth=seat.berth,
                freed=step.freed,
                claim=None if step.wish is None else Claim(*step.wish),
                record=partial(entry.record, now_us),
            )
            return Commit(settling=settling, parked=parked, fences=entry.fences)
        cursor = Cursor(
            shard=seat.shard,
            next_offset=step.next_offset,
            settled=step.settled,
            attempts=step.attempts,
            generation=step.generation,
            number=step.number,
        )
        return Commit(
            cursors=(cursor,),
            parked=parked,
            settlement=record_of(seat.shard, step, now_us) if seat.recorded else b"",
            fences=entry.fences,
        )

    async def _purge(self, entries: list[Entry]) -> None:
        """Remove rows that are done; those of dead letters that were brought back stay, for people to see."""
        for entry in entries:
            done = entry.seat.done_rows
            done.update(park.row.offset for park in entry.step.parks if park.state == "done" and not park.row.replay)
            if len(done) >= PURGE_ROWS:
                await self.purge(entry.seat)

    async def purge(self, seat: Seat) -> None:
        """Remove the rows of a seat that are done."""
        if not seat.done_rows:
            return
        shard, offsets = seat.shard, frozenset(seat.done_rows)
        wanted = ParkedFilter(
            log_id=shard.log_id,
            subscription=shard.subscription,
            states=frozenset({"done"}),
            partition=shard.partition,
            offsets=offsets,
        )
        try:
            await self._host.call(self._host.store.parked.purge, wanted)
            seat.done_rows.difference_update(offsets)
        except StoreClosed:
            pass
        except Exception as error:  # noqa: BLE001 - they harm nobody; whoever gives a shard back must get on
            logger.info("%s: rows that are done were not removed: %s", seat, error)

    def _fenced(self) -> None:
        """Each seat has a lease of its own."""

    async def _ended(self) -> None:
        for seat, *_, future in self._waiting:
            if not future.done():
                future.set_exception(StaleDelivery(str(seat), "its store is closed"))


def _parked(seat: Seat, park: Park, now_us: int) -> Parked:
    row, state = park.row, _state(park.state)
    source = park.source
    if isinstance(source, ParkedBlocks):
        # It keeps when it was parked first, and why it failed unless it failed anew.
        before = source.row
        return msgspec.structs.replace(
            before,
            shard=seat.shard._replace(slot=row.slot),
            state=state,
            due_at=row.due_at,
            attempts=row.attempts,
            replay=row.replay,
            error_type=park.failure.kind or before.error_type,
            error_message=park.failure.message or before.error_message,
            error_trace=before.error_trace if park.failure == NO_FAILURE else park.failure.trace,
            last_retry_at=now_us if row.attempts > before.attempts else before.last_retry_at,
        )
    return Parked(
        shard=seat.shard._replace(slot=row.slot),
        offset=row.offset,
        state=state,
        lane=row.lane,
        event=source.event(park.index),
        due_at=row.due_at,
        attempts=row.attempts,
        replay=row.replay,
        error_type=park.failure.kind,
        error_message=park.failure.message,
        error_trace=park.failure.trace,
        parked_at=now_us,
        last_retry_at=now_us if row.attempts else 0,
    )


def _state(state: str) -> ParkedState:
    match state:
        case "waiting" | "dead" | "done":
            return state
        case _:
            raise ValueError(f"a parked row cannot be {state!r}")
