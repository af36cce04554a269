"""Shard: the state machine of one part of a subscription. See the package's docstring.

What it promises, whatever it is told and in whichever order:

* Nothing is handed over while an earlier event of its lane is held, delayed or parked; in one hand there may be
  several.
* The cursor passes nothing that is not settled, or parked in the same step.
* An event that was handed over is settled by one ack, late or not, and never handed over after it.
* What is read and not settled stays within the window, what waits aside within its limit.
* Every answer to an input is complete: nothing waits for a further input but time, the log or the consumer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from penstock.engine.claims import Claims
from penstock.engine.messages import (
    Ack,
    Ask,
    Claimed,
    ConsumerLeft,
    CursorSeen,
    Declare,
    Done,
    Extend,
    Failure,
    Fetch,
    Fetched,
    FetchFailed,
    Freed,
    GiveBack,
    Halted,
    HeadMoved,
    Leaving,
    Left,
    LogTrimmed,
    Nack,
    NotWritten,
    PolicyChanged,
    ReadDone,
    ReadFailed,
    RowsSeen,
    Shed,
    Started,
    Tick,
    Want,
    Written,
)
from penstock.engine.page import DELAYED, READY
from penstock.engine.progress import Progress
from penstock.engine.rate import Rate
from penstock.engine.reading import Reading
from penstock.engine.share import Share
from penstock.engine.states import Outcome
from penstock.engine.suspects import Suspects
from penstock.engine.work import Work
from penstock.offsets import OFFSET_END, Bitmap, Gap, Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from penstock.engine.held import Held
    from penstock.engine.messages import Chunk, Deliver, Input, Now, Offsets, Output, Row, Step, Wanted, Wish
    from penstock.engine.policy import Policy
    from penstock.engine.share import Slots

STUCK_SECONDS: Final = 1.0
"""A window that is full of blocked lanes for so long is relieved by parking what is blocked."""
OVERFLOW_ROWS: Final = 1_000
UNWRITTEN_ROWS_MAX: Final = 2_000
UNWRITTEN_EVENTS_MAX: Final = 1 << 19
"""With more than this unwritten nothing further is handed over, until the store takes it."""


class Shard:
    """One shard, from the cursor that was loaded on. `clean`: whoever had it before left nothing in flight.

    With `slots` it has only events of these slots, and shares the cursor with the owners of the others. With a `berth`
    it has what that one has claimed, claims more, and nothing waits for anything else: there is no order.
    """

    def __init__(
        self,
        *,
        next_offset: int,
        settled: bytes = b"",
        attempts: Mapping[int, int] | None = None,
        generation: int = 0,
        number: int = 0,
        partition: int = 0,
        policy: Policy,
        rows: Iterable[Row] = (),
        clean: bool,
        head: int,
        now: Now,
        rate: Rate | None = None,
        slots: Slots | None = None,
        berth: int = 0,
        claimed: RangeSet | None = None,
    ) -> None:
        self.progress = Progress(
            next_offset=next_offset, settled=settled, attempts=attempts or {}, generation=generation, number=number,
            shared=slots is not None or berth > 0,
        )  # fmt: skip
        self._claims: Claims | None = None
        """Of a berth; `next_offset` is then the first that nobody has claimed."""
        if berth:
            claimed = claimed or RangeSet()
            self._claims = Claims(claimed, frontier=next_offset, head=head)
            self._begin_with(claimed)
            head = max(claimed.end, self.progress.next_offset)
        self.last_dispatched = -1
        """The highest offset that was handed over; -1 if none was."""
        self.share = Share(partition, slots, berth=berth)
        self._work = Work(
            self.progress, lane=partition, share=self.share, rows=rows, policy=policy, now=now, clean=clean
        )
        self._reading = Reading(self.progress.next_offset, head)
        self._shared_offset = self.progress.next_offset
        """Where the cursor is that is shared with other owners, as far as it is known."""
        # A consumer's shards share one.
        self._rate = rate or Rate(policy.rate_per_second, now.monotonic)
        self._fetch_at = 0.0
        self._told_halted: Halted | None = None
        self._hole: Halted | None = None
        """The gap that it stands still at, where the policy is to stop."""
        self._hole_end = 0
        self._admitted = 0
        """Gaps below this offset were told, and somebody has said to go on."""
        self._stuck_since: float | None = None
        self._stuck_slots: Slots | None = None
        """Of whom it was that asked, and got nothing."""
        self.unanswered = False
        """Whether somebody asked and got nothing, and an ack might change that; until he is told to ask again."""
        self._dirty_since: float | None = None
        self._urgent = False
        self._out: list[Output] = []
        self._suspects = None if clean else Suspects(self._work, self._suspected_until())
        self._suspects_left = self._in_flight_max

    def _begin_with(self, claimed: RangeSet) -> None:
        """Have exactly these offsets open, of which nobody knows more."""
        for first in claimed:
            self.progress.bitmap.seek(first.start)
            for foreign in claimed.missing(Range(first.start, claimed.end)):
                self.progress.pass_over(foreign)
            break

    @property
    def _in_flight_max(self) -> int:
        """How many were in flight, at most, when its last owner ended."""
        # An owner of slots may have had several consumers. What was settled and not yet written lies before what was in
        # hand.
        policy = self.policy.together if self.share.slotted else self.policy
        return policy.window_events + policy.checkpoint_events - 1

    def _suspected_until(self) -> int:
        """Return where suspects end: as many unsettled events as a window holds were in flight, at most."""
        left = self._in_flight_max
        begin = self.next_offset
        reach = max(min(self._reading.head, begin + Bitmap.LIMIT), begin)
        if not self.share.whole:
            return reach  # how many of these are its own is seen when they are read
        for span in self.progress.bitmap.unset_in(Range(begin, reach)):
            if len(span) >= left:
                return span.start + left
            left -= len(span)
        return reach

    # --- what others may ask ------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy that is in force."""
        return self._work.policy

    @property
    def head(self) -> int:
        """Where the log ends, as far as it is known."""
        return self._reading.head if self._claims is None else self._claims.head

    @property
    def read_position(self) -> int:
        """The next offset to read, or to claim."""
        return self._reading.position if self._claims is None else self._claims.frontier

    @property
    def next_offset(self) -> int:
        """The first offset that is neither settled nor parked."""
        return self.progress.next_offset

    @property
    def gaps(self) -> int:
        """How many reads left something out, or found a hole."""
        return self._reading.gaps

    @property
    def in_flight(self) -> int:
        """How many events are handed over."""
        return self._work.in_flight

    def held(self) -> list[Held]:
        """Return what is handed over, by slot where that matters, and since about when."""
        return self._work.held()

    @property
    def at_rest(self) -> bool:
        """Whether it can be loaded anew without a difference: nothing is in hand, delayed, suspected or unwritten."""
        work = self._work
        quiet = not work.in_flight and not work.pages.delayed and self._suspects is None
        return quiet and not self.progress.dirty and not self.progress.writing

    @property
    def empty(self) -> bool:
        """Whether nothing is open: what it claims next may lie anywhere."""
        return self.progress.next_offset == self._reading.head

    @property
    def spent(self) -> bool:
        """Whether it has nothing at all: whoever has its berth can do without."""
        return self.at_rest and self.empty and not self.parked

    @property
    def _above(self) -> int:
        """Where it may claim: behind whatever is open."""
        return 0 if self.empty else self._reading.head

    @property
    def ahead(self) -> int:
        """How many events are claimed, and not handed over."""
        return 0 if self._claims is None else self._work.pages.ready + self._claims.unread

    @property
    def claimable(self) -> bool:
        """Whether a `Want` would lead to a claim."""
        return self.starving and not self.standing and self._claims is not None and self._claims.free

    @property
    def bringing(self) -> bool:
        """Whether something is on its way that somebody was in need of: a claim, or a read."""
        return self._reading.under_way or (self._claims is not None and self._claims.under_way)

    @property
    def claiming(self) -> bool:
        """Whether a claim of it is to be written: somebody may be in need of it soon."""
        return self._claims is not None and self._claims.under_way

    @property
    def starving(self) -> bool:
        """Whether it has nothing to hand over, or to read, unless it claims something."""
        return self._claims is not None and not self.ahead and self._suspects is None

    @property
    def in_memory(self) -> int:
        """How many events are read and not settled."""
        work = self._work
        return work.pages.open + work.aside.held + work.aside.ready

    @property
    def parked(self) -> int:
        """How many events wait aside."""
        return len(self._work.aside)

    @property
    def busy_slots(self) -> Slots:
        """Which slots cannot leave: something of them is handed over, or was settled and is not written."""
        return self._work.busy_slots()

    @property
    def halted(self) -> Halted | None:
        """Where it stands still, and why."""
        return next(iter(self._work.halts.values()), self._hole)

    @property
    def suspecting(self) -> bool:
        """Whether it goes through what an unclean end has left behind."""
        return self._suspects is not None

    @property
    def standing(self) -> bool:
        """Whether nothing may be handed over now: paused, halted, or too much is unwritten."""
        progress = self.progress
        return (
            self._work.policy.paused
            or bool(self._work.halts)
            or self._hole is not None
            or progress.unwritten > UNWRITTEN_EVENTS_MAX
            or len(progress.parks) > UNWRITTEN_ROWS_MAX
        )

    @property
    def overfull(self) -> bool:
        """Whether so much is unwritten that nothing may be handed over soon."""
        return self.progress.unwritten > UNWRITTEN_EVENTS_MAX * 3 // 4

    @property
    def wants(self) -> bool:
        """Whether it would read if there were more to read."""
        reading = self._reading
        if self._claims is not None:
            return not self.standing
        waits = reading.under_way or reading.retry_at > self._work.now.monotonic or self.standing
        return not waits and self._room()[0] > 0

    def has_for(self, slots: Slots | None) -> bool:
        """Whether an `Ask` for these slots makes any difference: it is answered, or will be when others are done."""
        return self._suspects is not None or self._work.has_for(slots)

    @property
    def blocked_lanes(self) -> dict[int, int]:
        """Lanes that are parked, and the offset that each stands at."""
        return dict(self._work.aside.first)

    @property
    def wanted(self) -> Wanted | None:
        """The lanes that are parked, if there is an order and they are few: whoever reads may look for their events."""
        return self._work.aside.wanted if self._claims is None else None

    def next_timer(self) -> float | None:
        """Return when it wants a `Tick`, on the monotonic clock."""
        work, now = self._work, self._work.now.monotonic
        times = [work.delays.first(), work.deadlines.first()]
        if self._stuck_since is not None:
            times.append(self._stuck_since + STUCK_SECONDS)
        if self._reading.retry_at > now:
            times.append(self._reading.retry_at)
        if self._fetch_at > now:
            times.append(self._fetch_at)
        elif len(work.aside) and not self.standing and (due_at := work.aside.next_due()) is not None:
            times.append(now + max(due_at - work.now.wall_us, 0) / 1_000_000)
        # Suspects that are through are let go of with the next event that may be handed over.
        if work.pages.ready or work.aside.ready or self._suspects is not None or self.claimable:
            free_at = self._rate.free_at()
            times.append(free_at if free_at is not None and free_at > now else None)
        return min((at for at in times if at is not None), default=None)

    def write_at(self) -> float | None:
        """Return when its progress is to be written, on the monotonic clock; None if there is nothing to write now."""
        progress, policy = self.progress, self.policy
        if not progress.dirty or progress.writing:
            return None
        if self._urgent or progress.parks or progress.unwritten >= policy.checkpoint_events:
            return 0.0
        return 0.0 if self._dirty_since is None else self._dirty_since + policy.checkpoint_seconds

    def take_step(self) -> Step | None:
        """Return what is to be written now; it is told as `Written` or `NotWritten` before the next one is taken."""
        step = self.progress.take()
        if step is not None:
            self._urgent, self._dirty_since = False, None
        return step

    # --- the machine --------------------------------------------------------------------------

    def handle(self, told: Input, now: Now) -> list[Output]:
        """Take an input, and return what is to be done."""
        work = self._work
        work.now = now
        if work.timed:
            self._run_timers(now.monotonic)
        self._HANDLERS[type(told)](self, told)
        if self._stuck_since is not None:
            self._relieve()
        work.tidy()
        if work.halts or self._hole is not None or self._told_halted is not None:
            self._tell_halted()
        self._pump()
        if self._dirty_since is None and self.progress.dirty:
            self._dirty_since = now.monotonic
        out, self._out = self._out, []
        return out

    def _run_timers(self, now: float) -> None:
        work = self._work
        for offset in work.delays.pop_due(now):
            at = work.pages.at(offset)
            if at is not None and at[0].state[at[1]] == DELAYED:
                work.pages.move_one(*at, READY)
        for hand in work.deadlines.pop_due(now):
            work.time_out(hand)

    def _tell_halted(self) -> None:
        self._work.forget_ended_halts()
        halted = self.halted
        if halted is not None and halted != self._told_halted:
            self._out.append(halted)
        self._told_halted = halted

    def _pump(self) -> None:
        """Ask for what can be used: events of the log, and rows that are due."""
        if self.standing:
            return
        work, reading = self._work, self._reading
        if reading.position < self.progress.least_next_offset and not reading.under_way:
            reading.passed(self.progress.next_offset)  # what was settled ahead, before it was loaded, is not read again
            self._note_read()
        if reading.due and reading.retry_at <= work.now.monotonic:
            events, nbytes, own = self._room()
            if self._claims is not None:
                events = min(events, self._run_of(self._claims))
            if events > 0:
                self._out.append(reading.ask(events, nbytes, own))
        if len(work.aside) and self._fetch_at <= work.now.monotonic:
            # Without an order there is nothing that a row might have to wait for.
            wanted = work.aside.to_fetch(work.now.wall_us, OFFSET_END if self._claims else reading.position)
            if wanted:
                self._out.append(Fetch(wanted))

    def _run_of(self, claims: Claims) -> int:
        """Go to the next offsets that are claimed, and return how many follow each other there."""
        run = claims.next_run
        if run is None:
            self._reading.passed(self._reading.head)
            return 0
        self._reading.passed(run.start)
        return len(run)

    def _room(self) -> tuple[int, int, int]:
        """Return how many events and bytes to read, and how many of its own events; 0 unless it is worth a read."""
        policy, pages, one_in = self._work.policy, self._work.pages, self.share.one_in
        # Without a least amount every ack would bring a read of one event.
        own = min(policy.window_events - pages.open, policy.read_events)
        if own < min(policy.read_events, (policy.window_events + 1) // 2):
            return 0, 0, 0
        # Where most events are others', a read brings as many of its own for all that: reads cost more than events.
        nbytes = min(policy.window_bytes - pages.open_bytes, policy.read_bytes * one_in)
        if nbytes < min(policy.read_bytes, (policy.window_bytes + 1) // 2):
            return 0, 0, 0
        events = own * one_in
        if self._reach(self.progress.least_next_offset) < events:
            events = min(events, self._reach(self.progress.next_offset))
        return max(events, 0), nbytes, own

    def _reach(self, begin: int) -> int:
        """Return how far may be read ahead of a cursor that is here."""
        begin = min(begin, self._shared_offset) if self.share.slotted else begin
        return begin + Bitmap.LIMIT - self._reading.position

    def _relieve(self) -> None:
        """Park what is blocked, if it has filled the window for long, so that other lanes go on."""
        work = self._work
        if self._stuck_since is None or not self._is_full():
            self._stuck_since = None
        elif work.now.monotonic >= self._stuck_since + STUCK_SECONDS:
            self._stuck_since = None
            for some in work.lanes.blocked(min(OVERFLOW_ROWS, work.room_aside), self._stuck_slots):
                work.set_aside(some)

    def _is_full(self) -> bool:
        """Tell whether there is more to read, and no room for it."""
        reading = self._reading
        return reading.position < reading.head and not reading.under_way and self._room()[0] == 0

    # --- reading ------------------------------------------------------------------------------

    def _on_head(self, told: HeadMoved) -> None:
        if self._claims is None:
            self._reading.moved(told.head)
        else:
            self._claims.moved(told.head)
            self._reading.moved(self._reading.head)  # what could not be read is worth another look

    def _on_read(self, told: ReadDone) -> None:
        for item in self._reading.done(told):
            if not isinstance(item, Gap):
                self._reading.passed(item.span.stop)
                self._take(item)
            elif not self._lose(item):
                break
        self._note_read()

    def _note_read(self) -> None:
        if self._claims is not None:
            self._claims.read_to(self._reading.position)

    def _take(self, chunk: Chunk) -> None:
        before = self._work.pages.open
        self._work.take(chunk)
        if self._suspects is not None and not self.share.whole and chunk.span.stop <= self._suspects.until:
            # As many of its own as a window holds were in flight, at most.
            self._suspects_left -= self._work.pages.open - before
            if self._suspects_left <= 0:
                self._suspects.until = chunk.span.stop

    def _on_read_failed(self, told: ReadFailed) -> None:
        self._reading.failed(told.retry_at)

    def _on_trimmed(self, told: LogTrimmed) -> None:
        gap = self._reading.trimmed(told.first)
        if gap is not None:
            self._lose(gap)
            self._note_read()

    def _lose(self, gap: Gap) -> bool:
        """Settle offsets that hold nothing, and say so.

        False if they reach too far ahead of the cursor for now, or if somebody has to say first that it may go on.
        """
        progress = self.progress
        if self._claims is not None and gap.stop > self._reading.head:
            if gap.start >= self._reading.head:
                return True
            gap = Gap(gap.start, self._reading.head, gap.reason)  # the rest is for whoever claims it
        if not self.share.has_holes:
            return self._pass_hole(gap)
        if self.policy.exhausted == "halt" and gap.stop > self._admitted:
            if self._hole is None:
                self._hole, self._hole_end = Halted(gap.start, Failure("Gap", str(gap))), gap.stop
            return False
        at = gap.start
        while at < gap.stop and progress.bitmap.room(at):
            stop = min(gap.stop, progress.next_offset + Bitmap.LIMIT)
            for lost in progress.bitmap.unset_in(Range(at, stop)):
                progress.settle(Outcome.GAP, lost)
            if self.share.departing:
                progress.slots_touched.add(self.share.keyless)
            at = stop
        if at > gap.start:
            self._out.append(Declare(Gap(gap.start, at, gap.reason)))
            self._reading.passed(at)
        return at == gap.stop

    def _pass_hole(self, gap: Gap) -> bool:
        """Go on behind a hole that another owner settles, as far as may be for now."""
        stop = min(gap.stop, self.progress.next_offset + Bitmap.LIMIT)
        if stop > gap.start:
            self.progress.pass_over(Range(gap.start, stop))
            self._reading.passed(stop)
        return stop >= gap.stop

    # --- handing over -------------------------------------------------------------------------

    def _on_ask(self, told: Ask) -> None:
        work = self._work
        work.expire()
        before, self.unanswered = self.unanswered, True
        if self.standing:
            return
        allowed = self._rate.allowed(work.now.monotonic)
        if allowed < told.events_max:
            told = told._replace(events_max=allowed)
        if told.events_max <= 0:
            return
        if self._suspects is not None and not self._hand_over_suspects(told, self._suspects):
            return
        handed = work.hand_over(work.choose(told), singly=told.singly, consumer=told.consumer)
        if self._claims is not None:
            self._claim(self._claims.wish_ahead(work.pages.ready, self._above, work.now.monotonic))
        elif handed is not None or not self.has_for(told.slots):
            self.unanswered = before
        if handed is not None:
            self._tell_handed(handed)
        elif self._stuck_since is None and (work.pages.ready or work.pages.delayed) and self._is_full():
            self._stuck_since, self._stuck_slots = work.now.monotonic, told.slots

    def _tell_handed(self, handed: Deliver) -> None:
        self._rate.take(handed.events)
        last = handed.pieces[-1].offsets
        highest = last.stop - 1 if isinstance(last, Range) else int(last[-1])
        self.last_dispatched = max(self.last_dispatched, highest)
        self._stuck_since = None
        self._out.append(handed)

    def _hand_over_suspects(self, told: Ask, suspects: Suspects) -> bool:
        """Hand over what may be of the suspects; True if they are all through."""
        handed = self._work.hand_over(suspects.choose(told), singly=told.singly, consumer=told.consumer)
        if handed is not None:
            self._tell_handed(handed)
            return False
        self._work.tidy()
        self._pump()
        reading = self._reading
        all_read = reading.position >= min(suspects.until, reading.head) or self._is_full()
        all_read &= self._fetch_at <= self._work.now.monotonic
        if suspects.ask(told, all_read=all_read):
            self._urgent = True
            return False
        self._suspects = None
        return True

    # --- what the consumer says ---------------------------------------------------------------

    def _on_ack(self, told: Ack) -> None:
        self._work.ack(_ascending(told.offsets), told.outcome)

    def _on_done(self, told: Done) -> None:
        if not self._work.settle_all_of(told.hand):
            for offsets in told.offsets:
                self._work.ack(_ascending(offsets))

    def _on_nack(self, told: Nack) -> None:
        self._work.nack(replace(told, offsets=_ascending(told.offsets)))

    def _on_give_back(self, told: GiveBack) -> None:
        self._work.give_back(told.hand, _ascending(told.offsets))

    def _on_consumer_left(self, told: ConsumerLeft) -> None:
        self._work.give_all_back(told.consumer)

    def _on_leaving(self, told: Leaving) -> None:
        self.share.leave(told.slots)

    def _on_left(self, told: Left) -> None:
        assert not (self._work.busy_slots() & told.slots).any(), "slots go to another owner, and are not done here"
        self._work.drop(told.slots)

    def _on_cursor(self, told: CursorSeen) -> None:
        self._shared_offset = max(self._shared_offset, told.next_offset)

    # --- claims -------------------------------------------------------------------------------

    def _claim(self, wish: Wish | None) -> None:
        if wish is not None:
            self.progress.claim(wish)
            self._urgent = True

    def _on_want(self, told: Want) -> None:
        if self._claims is not None and self.claimable:
            now = self._work.now.monotonic
            # What may not be handed over yet is for others, if their share of the rate allows it.
            events = min(told.events, self._rate.allowed(now))
            if events > 0:
                self._claim(self._claims.wish(events, self._above, now))

    def _on_claimed(self, told: Claimed) -> None:
        reading, progress = self._reading, self.progress
        assert self._claims is not None
        self._claims.take(told.ranges, told.frontier, self._work.now.monotonic)
        for claimed in told.ranges:
            if self.empty:
                progress.bitmap.seek(claimed.start)
                reading.restart(claimed.start)
            else:
                assert claimed.start >= reading.head, "what is claimed lies before something that is open"
                progress.pass_over(Range(reading.head, claimed.start))
            reading.moved(claimed.stop)

    def _on_freed(self, _told: Freed) -> None:
        if self._claims is not None:
            self._claims.freed()

    def _on_shed(self, _told: Shed) -> None:
        if self._claims is not None and self._suspects is None:
            self._work.shed()
            for unread in self._claims.shed():
                for left in self.progress.bitmap.unset_in(unread):
                    self.progress.free(left)

    def _on_started(self, told: Started) -> None:
        seconds = self.policy.timeout_seconds
        if seconds is not None:
            self._work.start(told.hand, seconds)

    def _on_extend(self, told: Extend) -> None:
        self._work.deadlines.extend(told.hand, self._work.now.monotonic + told.seconds)

    def _on_tick(self, _told: Tick) -> None:
        """Timers have run already."""

    # --- what the store and others say --------------------------------------------------------

    def _on_fetched(self, told: Fetched) -> None:
        self._work.fetched(told)

    def _on_fetch_failed(self, told: FetchFailed) -> None:
        self._work.aside.not_fetched(told.asked)
        self._fetch_at = told.retry_at

    def _on_rows(self, told: RowsSeen) -> None:
        self._work.aside.bring_back(told.rows)

    def _on_policy(self, told: PolicyChanged) -> None:
        work = self._work
        before, work.policy = work.policy, told.policy
        self._rate.change(told.policy.rate_per_second, work.now.monotonic)
        if told.policy.timeout_seconds is None:
            work.deadlines.clear()
        if told.policy.resumes > before.resumes:
            work.resume()
        if self._hole is not None and (told.policy.resumes > before.resumes or told.policy.exhausted != "halt"):
            # It is read again, and passed then: up to the head, as more of it may be missing by then.
            self._admitted, self._hole = max(self.head, self._hole_end), None

    def _on_written(self, told: Written) -> None:
        self.progress.written(told.step)
        if told.step.wish is not None and self._claims is not None:
            self._claims.wished()
        self._work.aside.written(told.step.parks)
        if self._suspects is not None:
            self._suspects.written(told.step)

    def _on_not_written(self, told: NotWritten) -> None:
        self.progress.not_written(told.step)
        self._urgent = True
        if told.step.wish is not None and self._claims is not None:
            self._claims.wished()

    _HANDLERS: ClassVar[dict[type, Callable[[Shard, Any], None]]] = {
        HeadMoved: _on_head,
        ReadDone: _on_read,
        ReadFailed: _on_read_failed,
        LogTrimmed: _on_trimmed,
        Ask: _on_ask,
        Ack: _on_ack,
        Done: _on_done,
        Nack: _on_nack,
        GiveBack: _on_give_back,
        ConsumerLeft: _on_consumer_left,
        Leaving: _on_leaving,
        Left: _on_left,
        CursorSeen: _on_cursor,
        Want: _on_want,
        Claimed: _on_claimed,
        Freed: _on_freed,
        Shed: _on_shed,
        Started: _on_started,
        Extend: _on_extend,
        Tick: _on_tick,
        Fetched: _on_fetched,
        FetchFailed: _on_fetch_failed,
        RowsSeen: _on_rows,
        PolicyChanged: _on_policy,
        Written: _on_written,
        NotWritten: _on_not_written,
    }


def _ascending(offsets: Offsets) -> Offsets:
    """Return offsets in order, each once."""
    if isinstance(offsets, Range) or len(offsets) < 2 or bool((offsets[1:] > offsets[:-1]).all()):
        return offsets
    return np.unique(offsets)
