"""Bugs to plant in delivery: what is read, in which order it is handed over, and what is written of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.engine.aside import Aside
from penstock.engine.lanes import Lanes, Queues
from penstock.engine.messages import Ask, NotWritten, Written
from penstock.engine.page import DELAYED, GONE, HELD, READY, Some
from penstock.engine.progress import Progress
from penstock.engine.reading import Reading
from penstock.engine.shard import Shard
from penstock.engine.states import Outcome
from penstock.engine.suspects import Suspects
from penstock.engine.work import Work
from penstock.errors import StoreClosed
from penstock.producers import lasting_producer
from penstock.runtime import ledger, monitor
from penstock.runtime.committer import Committer
from penstock.runtime.ledger import Ledger
from penstock.runtime.member import Member
from penstock.runtime.presence import Presence
from penstock.runtime.seat import Seat
from penstock.testing.campaigns.planted.tools import changed, nothing, original

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.engine.messages import Failure, Park, Step
    from penstock.engine.page import Page
    from penstock.engine.policy import Exhausted
    from penstock.rows import Commit, Cursor, Lease, Settlement
    from penstock.runtime.committer import Entry


# --- reading --------------------------------------------------------------------------------------


def resumes_one_too_far() -> AbstractContextManager[None]:
    """Begin behind the first unsettled event when a shard is taken over."""
    right = original(Seat, "_cursor")

    def cursor(self: Seat) -> Cursor:
        found: Cursor = right(self)
        if found.settled or found.next_offset >= self._host.store.log.bounds(self.partition).stop:
            return found
        return msgspec.structs.replace(found, next_offset=found.next_offset + 1)

    return changed(Seat, _cursor=cursor)


def notifications_alone() -> AbstractContextManager[None]:
    """Look for new events only when a notification has come."""

    def pulse(*columns: Any) -> Any:
        timers, now = columns[-2:]
        return np.flatnonzero(timers <= now)

    return changed(monitor, pulse=pulse)


def failed_read_ends_reading() -> AbstractContextManager[None]:
    """Wait for a read that has failed as if it were still under way."""

    def failed(self: Reading, retry_at: float) -> None:
        self.retry_at = retry_at

    return changed(Reading, failed=failed)


def empty_read_believed() -> AbstractContextManager[None]:
    """Never repeat a read that has brought nothing, however far the log is."""

    def moved(self: Reading, head: int) -> None:
        self.head = max(self.head, head)

    return changed(Reading, moved=moved)


def gap_declared_at_once() -> AbstractContextManager[None]:
    """Declare a gap when a read leaves something out for the first time."""
    return changed(Reading, _is_lost=lambda _self, _at: True)


# --- order ----------------------------------------------------------------------------------------


def delayed_event_overtaken() -> AbstractContextManager[None]:
    """Hand a lane's events over while an earlier one waits for its next attempt."""
    return changed(Lanes, _first_delayed=lambda _self: {})


def parked_event_overtaken() -> AbstractContextManager[None]:
    """Hand a lane's events over while an earlier one is parked."""
    right = original(Lanes, "__init__")

    def init(self: Lanes, pages: Any, _aside: Any, **options: Any) -> None:
        right(self, pages, Aside(()), **options)

    return changed(Lanes, __init__=init)


def requeued_at_the_back() -> AbstractContextManager[None]:
    """Put an event that failed behind the others of its lane."""
    right = original(Queues, "moved")

    def moved(self: Queues, page: Page, row: int, before: int, to: int) -> None:
        queue = self._queues.get(int(page.lanes[row]))
        if before == HELD and to in {READY, DELAYED} and queue is not None:
            queue.rotate(-1)
        right(self, page, row, before, to)

    return changed(Queues, moved=moved)


def poisoned_lane_dropped() -> AbstractContextManager[None]:
    """Let the followers of a dead letter go with it."""
    right = original(Work, "_end")

    def end(self: Work, page: Page, row: int, how: Exhausted, failure: Failure) -> None:
        right(self, page, row, how, failure)
        for other in page.in_state(READY).tolist():
            if other > row and page.lanes[other] == page.lanes[row]:
                self._settle_one(page, other, Outcome.ACKED)

    return changed(Work, _end=end)


# --- acks and failures ----------------------------------------------------------------------------


def leaving_is_acking() -> AbstractContextManager[None]:
    """Settle what a consumer has in its hands when it leaves."""

    def give_all_back(self: Work, _consumer: int | None = None) -> None:
        for some in self.pages.all_held():
            self._settle(some, Outcome.ACKED)
        self.deadlines.clear()

    return changed(Work, give_all_back=give_all_back)


def late_ack_ignored() -> AbstractContextManager[None]:
    """Take an ack only from whoever holds the event at this moment."""
    right = original(Work, "_ack_one")

    def ack_one(self: Work, offset: int, outcome: Outcome) -> None:
        at = self.pages.at(offset)
        if at is not None and at[0].state[at[1]] == HELD:
            right(self, offset, outcome)

    return changed(Work, _ack_one=ack_one)


def ack_of_a_stranger() -> AbstractContextManager[None]:
    """Take an ack of an event that was never handed over."""

    def ack_one(self: Work, offset: int, outcome: Outcome) -> None:
        at = self.pages.at(offset)
        if at is not None and at[0].state[at[1]] != GONE:
            self._settle_one(*at, outcome)

    return changed(Work, _ack_one=ack_one)


def rate_limited_thrown_away() -> AbstractContextManager[None]:
    """Drop the events that the rate does not let through."""
    right = original(Shard, "_on_ask")

    def on_ask(self: Shard, told: Ask) -> None:
        work = self._work
        if not self.standing and self._rate.allowed(work.now.monotonic) < 1:
            for some in work.choose(told).somes:
                work._settle(Some(some.page, some.indexes), Outcome.ACKED)  # noqa: SLF001 - what the bug is about
        right(self, told)

    return changed(Shard, _HANDLERS={**original(Shard, "_HANDLERS"), Ask: on_ask})


def timeouts_without_end() -> AbstractContextManager[None]:
    """Give a handler that is out of time as much time again."""

    def time_out(self: Work, hand: int) -> None:
        assert self.policy.timeout_seconds is not None
        self.start(hand, self.policy.timeout_seconds)

    return changed(Work, time_out=time_out)


def parked_rows_forgotten() -> AbstractContextManager[None]:
    """Never fetch what waits aside, though it is due."""

    def to_fetch(self: Aside, wall_us: int, _read_position: int) -> tuple[int, ...]:
        self._due.pop_due(wall_us)
        return ()

    return changed(Aside, to_fetch=to_fetch)


def replay_not_seen() -> AbstractContextManager[None]:
    """Do not look for dead letters that somebody has brought back."""
    return changed(Aside, bring_back=nothing)


def attempts_lost_aside() -> AbstractContextManager[None]:
    """Count the attempts at a parked event anew when it is fetched."""
    right = original(Aside, "take_fetched")

    def take_fetched(self: Aside, asked: Any, rows: Any) -> Any:
        came, gone = right(self, asked, rows)
        for waiting in came:
            waiting.row = waiting.row._replace(attempts=0)
        return came, gone

    return changed(Aside, take_fetched=take_fetched)


def dead_letter_not_kept() -> AbstractContextManager[None]:
    """Settle an event as dead without keeping it."""
    right = original(Progress, "park")

    def park(self: Progress, park: Park) -> None:
        if park.state == "dead":
            self.touch()
        else:
            right(self, park)

    return changed(Progress, park=park)


# --- what is written ------------------------------------------------------------------------------


def _with_other_steps(**wrong: Any) -> AbstractContextManager[None]:
    right = original(Progress, "take")

    def take(self: Progress) -> Step | None:
        step: Step | None = right(self)
        if step is not None:
            step = self._writing = replace(step, **{name: make(step) for name, make in wrong.items()})
        return step

    return changed(Progress, take=take)


def attempts_in_memory() -> AbstractContextManager[None]:
    """Write the cursor without its attempts."""
    return _with_other_steps(attempts=lambda _step: {})


def settled_ahead_forgotten() -> AbstractContextManager[None]:
    """Write the cursor without what is settled ahead of it."""
    return _with_other_steps(settled=lambda _step: b"")


def cursor_at_the_highest_ack() -> AbstractContextManager[None]:
    """Let the cursor be behind the highest event that was acked, whatever is open before it."""

    def highest(step: Step) -> int:
        return max([step.next_offset, *(span.stop for span in step.outcomes.get(Outcome.ACKED, ()))])

    return _with_other_steps(next_offset=highest, settled=lambda _step: b"")


def refused_step_forgotten() -> AbstractContextManager[None]:
    """Forget what a step was about that the store did not take."""

    def not_written(self: Progress, _step: Step) -> None:
        self._writing = None
        self.touch()

    return changed(Progress, not_written=not_written)


def refused_step_told_as_written() -> AbstractContextManager[None]:
    """Take a step that was refused for written."""
    right = original(Committer, "_told")

    def told(self: Committer, entry: Entry, _told: Written | NotWritten) -> None:
        right(self, entry, Written(entry.step))

    return changed(Committer, _told=told)


def unknown_step_repeated() -> AbstractContextManager[None]:
    """Take a step of which nobody knows whether it was written for one that was not."""

    async def write(self: Committer, entries: list[Entry]) -> None:
        try:
            answers = await self._host.call(self._commit, entries)
        except StoreClosed:
            raise
        except Exception:  # noqa: BLE001 - this is the bug
            for entry in entries:
                self._told(entry, NotWritten(entry.step))
            self._wait_longer()
            return
        for entry, answer in zip(entries, answers, strict=True):
            if entry.seat.engine is entry.engine:
                self._answered(entry, answer)
        self._wrote()

    return changed(Committer, _write=write)


def _with_other_commits(**wrong: Any) -> AbstractContextManager[None]:
    right = original(Committer, "_commit_of")

    def commit_of(self: Committer, entry: Entry, now_us: int) -> Commit:
        commit: Commit = right(self, entry, now_us)
        return msgspec.structs.replace(commit, **{name: make(commit) for name, make in wrong.items()})

    return changed(Committer, _commit_of=commit_of)


def parked_row_not_written() -> AbstractContextManager[None]:
    """Let the cursor pass an event that is to be tried later, without the row that keeps it."""

    def kept(commit: Commit) -> Any:
        return tuple(row for row in commit.parked if row.state != "waiting")

    return _with_other_commits(parked=kept)


def record_left_out() -> AbstractContextManager[None]:
    """Write a cursor without the record of what was settled, now and then."""

    def some(commit: Commit) -> bytes:
        return b"" if commit.cursors[0].number % 3 == 2 else commit.settlement

    return _with_other_commits(settlement=some)


def commit_without_a_fence() -> AbstractContextManager[None]:
    """Write progress without saying under which lease."""
    return _with_other_commits(fences=lambda _commit: ())


# --- who has a shard ------------------------------------------------------------------------------


def lapsed_lease_not_noticed() -> AbstractContextManager[None]:
    """Hand over after a long sleep without a look at the clock."""
    return changed(Presence, lapsed_at=lambda self, _now: self._lease is None)


def nobody_takes_over() -> AbstractContextManager[None]:
    """Leave a shard alone whose owner has lost it."""

    async def retake(_self: Member, _seat: Seat, _holder: Lease | None) -> None:
        """Do nothing."""

    return changed(Member, retake=retake)


def lease_kept_by_a_seat_that_was_lost() -> AbstractContextManager[None]:
    """Do not give the lease back of a shard that was moved while its progress was saved."""
    right = original(Seat, "lose")

    def lose(self: Seat, why: str) -> None:
        right(self, why)
        if self._changing.locked():
            self.lease = None

    return changed(Seat, lose=lose)


def policy_read_once() -> AbstractContextManager[None]:
    """Never look again at a policy that was read."""
    return changed(Member, see=nothing)


def nobody_is_suspected() -> AbstractContextManager[None]:
    """Take every shard as if whoever had it before had given it back."""
    right = Presence.acquire

    async def acquire(self: Presence, name: str, owner: str) -> Lease | None:
        lease = await right(self, name, owner)
        return None if lease is None else lease._replace(clean=True)

    return changed(Presence, acquire=acquire)


def suspect_tried_before_it_is_written() -> AbstractContextManager[None]:
    """Hand a suspect over, then write that it is tried."""
    right = Suspects.choose

    def choose(self: Suspects, ask: Ask) -> Any:
        if not self._granted:
            self.ask(ask, all_read=False)
            self._granted = {*self._asked, *self._asked_rows}
            self._asked, self._asked_rows = {}, {}
        return right(self, ask)

    return changed(Suspects, choose=choose)


# --- the ledger -----------------------------------------------------------------------------------


def record_forgotten_first() -> AbstractContextManager[None]:
    """Forget settlement records, then append them to the ledger."""

    async def make_round(self: Ledger) -> float:
        store, call = self._host.store, self._host.call
        records = await call(store.cursors.settlements, ledger.PAGE)
        if not records or await self._tenure.fence() is None:
            return ledger.BUSY_SECONDS
        topic = await call(store.log.create_topic, ledger.TOPIC, ledger.SETTINGS)
        await call(store.cursors.forget_settlements, records[-1].number)
        append = original(ledger, "_append")
        await call(append, store.log, topic.partitions[0], records, ledger.producer_of(topic.log_id))
        return ledger.BUSY_SECONDS

    return changed(Ledger, _round=make_round)


def record_appended_twice() -> AbstractContextManager[None]:
    """Append settlement records without a sequence by which a repeat is recognised."""
    right = original(ledger, "_append")

    def append(log: Any, partition: Any, records: list[Settlement], _producer: bytes) -> None:
        right(log, partition, records, lasting_producer())

    return changed(ledger, _append=append)
