"""Work: what is open, and what becomes of each event: handed over, settled, failed, given back, set aside.

Whether an event is in memory or waits aside, the same becomes of it: attempts are counted, and what follows from a
failure is the policy's verdict. What is different is where that is kept: an event in memory holds the cursor back, a
parked one is a row of the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.engine.aside import Aside
from penstock.engine.deadlines import Deadlines
from penstock.engine.held import Beginnings, held_of
from penstock.engine.lanes import Lanes, Unordered
from penstock.engine.messages import NO_FAILURE, Deliver, Failure, Halted, Nack, Park, Piece, Row
from penstock.engine.page import DELAYED, GONE, HELD, READY, Page, Some
from penstock.engine.pages import Pages
from penstock.engine.policy import SHORT_DELAY_SECONDS
from penstock.engine.share import SLOTS
from penstock.engine.states import Outcome
from penstock.engine.timers import Timers
from penstock.offsets import Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from penstock.engine.aside import Waiting
    from penstock.engine.held import Held
    from penstock.engine.messages import Ask, Chunk, Fetched, Now, Offsets
    from penstock.engine.page import Rows
    from penstock.engine.policy import Exhausted, Policy
    from penstock.engine.progress import Progress
    from penstock.engine.share import Share, Slots

TIMED_OUT: Final = "HandlerTimeout"
KILLED: Final = Failure("ProcessDied", "the process that handled it ended without a word, each time it was tried")
WORN_OUT: Final = Failure("RetriesExhausted", "every attempt at it has failed, before it was loaded anew")
HAND_BITS: Final = 40
"""Above them a hand's number has that of its consumer."""
HAND_MASK: Final = (1 << HAND_BITS) - 1
DUE: Final = 0
"""The due time of a parked event that waits for nothing but its lane."""


class Choice(NamedTuple):
    """What can be handed over: rows that waited aside, and events in memory."""

    rows: list[Waiting]
    somes: list[Some]


class Work:
    """The open events of a shard. `now` and `policy` are set by whoever tells it what happened."""

    def __init__(
        self, progress: Progress, *, lane: int, share: Share, rows: Iterable[Row], policy: Policy, now: Now, clean: bool
    ) -> None:
        self.progress = progress
        self.policy = policy
        self.now = now
        self.share = share
        self.pages = Pages(lane, share.keyless)
        self.aside = Aside(rows)
        self.lanes: Lanes | Unordered = Lanes(self.pages, self.aside, slotted=share.slotted)
        if share.berth:
            self.lanes = Unordered(self.pages)
        self.deadlines = Deadlines()
        self.delays = Timers()
        self.halts: dict[int, Halted] = {}
        """Events of which every attempt failed, where the policy is to stop at them."""
        self._hand = 0
        self._whole: dict[int, list[Some]] = {}
        """What hands were given that still hold all of it."""
        self._beginnings = Beginnings()
        self._precounted: set[int] = set()
        """Events of which the attempt that is being made is counted already."""
        self._inherited = dict(progress.attempts)
        self._worn_out = WORN_OUT if clean else KILLED
        self._lanes_changed = False

    @property
    def in_flight(self) -> int:
        """How many events are handed over."""
        return self.pages.held + self.aside.held

    @property
    def timed(self) -> bool:
        """Whether time may change something: a delay, or a deadline."""
        return len(self.delays) > 0 or self.deadlines.counting

    @property
    def retries_soon(self) -> bool:
        """Whether an event in memory is tried again within a short delay."""
        first = self.delays.first() if self.pages.delayed else None
        return first is not None and first <= self.now.monotonic + SHORT_DELAY_SECONDS

    @property
    def room_aside(self) -> int:
        """How many more may be parked."""
        return max(self.policy.parked_max - len(self.aside), 0)

    # --- coming -------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Take events that were read; what is others' or settled is passed over, what is behind a parked one parked."""
        some = self.pages.add(chunk)
        known = chunk.span.start < self.progress.known_until
        if not self.share.whole:
            some = self._pass_foreign(some)
        if known:
            self._pass_settled(some)
        if self.aside.first:
            self.set_aside(self.lanes.behind_parked(some))
        if self._inherited:
            self._end_worn_out(chunk.span)

    def _pass_foreign(self, some: Some) -> Some:
        """Pass over what is of others' slots; returns what is left, or all if that is known by its parts."""
        page, mine = some.page, self.share.mine
        foreign = page.foreign(mine)
        if foreign is not None:
            self._give_up(foreign)
            return some
        rows = some.indexes
        own = mine[page.slots[rows]]
        if not own.all():
            self._give_up(Some(page, rows[~own]))
        return Some(page, rows[own])

    def _give_up(self, some: Some) -> None:
        """Let events in memory that nobody holds be others'."""
        self.pages.move(some, GONE)
        self.progress.pass_read(some.offsets)
        if self.progress.attempts:
            known = self.progress.attempts.keys() & frozenset((some.indexes + some.page.start).tolist())
            self.progress.forget(known)
            for offset in known:
                self._inherited.pop(offset, None)

    def _pass_settled(self, some: Some) -> None:
        page, rows = some.page, some.indexes
        rows = rows[page.state[rows] != GONE]
        if not len(rows):
            return
        begin, end = page.start + int(rows[0]), page.start + int(rows[-1]) + 1
        settled = self.progress.bitmap.settled_in(Range(begin, end))[rows - rows[0]]
        if settled.any():
            self.pages.move(Some(page, rows[settled]), GONE)

    def _end_worn_out(self, span: Range) -> None:
        """End what has had all of its attempts before it was loaded: it may have killed its process each time."""
        for offset in [offset for offset in self._inherited if offset in span]:
            at = self.pages.at(offset)
            if self._inherited.pop(offset) > self.policy.max_retries and at is not None and at[0].state[at[1]] == READY:
                self._end(*at, self.policy.exhausted, self._worn_out)

    def fetched(self, told: Fetched) -> None:
        """Take rows that were fetched; what the store has no more was given up by somebody."""
        came, gone = self.aside.take_fetched(told.asked, told.rows)
        for waiting in came:
            if waiting.acked:
                self.resolve(waiting, Outcome.ACKED)
            elif waiting.row.attempts > self.policy.max_retries:
                self._end_row(waiting, self.policy.exhausted, self._worn_out)
        for waiting in gone:
            if self.share.departing:
                self.progress.slots_touched.add(waiting.row.slot)
            if not waiting.row.replay:
                self.progress.resolve(Outcome.DISCARDED, waiting.row.offset, retried=waiting.row.attempts > 0)
            self._remove(waiting)

    def expire(self) -> None:
        """Settle what is ready, and expired."""
        for some in self.pages.expired(self.now.wall_us):
            self._settle(some, Outcome.EXPIRED)
        for waiting in self.aside.expired(self.now.wall_us):
            self.resolve(waiting, Outcome.EXPIRED)

    # --- handing over -------------------------------------------------------------------------

    def choose(self, ask: Ask, until: int | None = None) -> Choice:
        """Return what can be handed over now, within the limits; of the log, nothing from `until` on."""
        slots = self.share.offered(ask.slots)
        rows = self.aside.choose(ask.events_max, ask.bytes_max, self.lanes, singly=ask.singly, slots=slots)
        nbytes = sum(waiting.fetched.nbytes for waiting in rows if waiting.fetched is not None)
        somes = self.lanes.choose(
            ask.events_max - len(rows), ask.bytes_max - nbytes, singly=ask.singly, slots=slots, until=until,
            first=not rows,
        )  # fmt: skip
        return Choice(rows, somes)

    def has_for(self, slots: Slots | None) -> bool:
        """Whether there is anything that could be handed over of these slots, now or when others are done.

        What waits aside counts once it is in memory: it is news when it comes there.
        """
        if self.aside.ready or self.pages.delayed:
            return True
        return any(page.ready and page.has_ready(slots) for page in self.pages)

    def hand_over(self, choice: Choice, *, singly: bool, consumer: int = 0) -> Deliver | None:
        """Let what was chosen be held, by one hand of a consumer or by one each."""
        rows, somes = choice
        if not rows and not somes:
            return None
        first = (consumer << HAND_BITS) + self._hand + 1
        self._beginnings.note(self._hand + 1, self.now.monotonic)
        count = len(rows) + sum(some.size for some in somes)
        attempts: dict[int, int] = {}
        replays: dict[int, int] = {}
        pieces = []
        hand = first
        for waiting in rows:
            row = waiting.row
            self.aside.hand_over(waiting, hand)
            assert waiting.fetched is not None
            pieces.append(Piece(waiting.fetched.source, Range(row.offset, row.offset + 1), slice(0, 1), row.offset))
            self._note_attempt(row.offset, row.attempts, attempts)
            if row.replay:
                replays[row.offset] = row.replay
            hand += singly
        for some in somes:
            page = some.page
            page.give(some, hand, singly=singly)
            hand += some.size if singly else 0
            self.pages.move(some, HELD)
            pieces += [
                Piece(stretch.chunk.source, stretch.offsets, stretch.rows, stretch.chunk.span.start)
                for stretch in page.in_chunks(some)
            ]
            if self.progress.attempts:
                self._note_attempts(some, range(first, first + count), attempts)
        hands = range(first, hand if singly else first + 1)
        self._hand += len(hands)
        if not (singly or rows):
            self._whole[first] = somes
        if self.policy.timeout_seconds is not None:
            self.deadlines.expect(hands, 1 if singly else count)
        return Deliver(first, count, tuple(pieces), attempts, replays)

    def _note_attempts(self, some: Some, hands: range, attempts: dict[int, int]) -> None:
        made = self.progress.attempts
        if some.size <= len(made):
            known = [offset for offset in (some.indexes + some.page.start).tolist() if offset in made]
        else:
            rows = {offset: offset - some.page.start for offset in made if some.page.start <= offset < some.page.stop}
            now_held = (some.page.hand >= hands.start) & (some.page.hand < hands.stop)
            known = [offset for offset, row in rows.items() if now_held[row]]
        for offset in known:
            self._note_attempt(offset, made[offset], attempts)

    def _note_attempt(self, offset: int, made: int, attempts: dict[int, int]) -> None:
        attempt = made + (offset not in self._precounted)
        if attempt > 1:
            attempts[offset] = attempt

    def start(self, hand: int, seconds: float) -> None:
        """Let the time of a hand run from now on."""
        self.deadlines.start(hand, self.now.monotonic + seconds, lambda: self._holds(hand))

    def _holds(self, hand: int) -> int:
        return sum(some.size for some in self.pages.held_by(hand)) + len(self.aside.in_hand(hand))

    # --- acks ---------------------------------------------------------------------------------

    def settle_all_of(self, hand: int) -> bool:
        """Settle all that a hand was given, if it is known to hold all of it."""
        whole = self._whole.pop(hand, None)
        for some in whole or ():
            self._settle(some, Outcome.ACKED)
        return whole is not None

    def ack(self, offsets: Offsets, outcome: Outcome = Outcome.ACKED) -> None:
        """Settle what was handed over in this life, whoever has it now; everything else is left as it is."""
        self._whole.clear()  # whose these are is not known
        if len(offsets) == 1:
            self._ack_one(offsets.start if isinstance(offsets, Range) else int(offsets[0]), outcome)
            return
        for some in self.pages.find(offsets):
            page, rows = some.page, some.rows
            if page.held == page.size == some.size:
                valid = some  # the usual case: all of it was handed over, and all of it is done
            else:
                open_ = (page.state[rows] != GONE) & (page.hand[rows] > 0)
                valid = some if open_.all() else Some(page, some.indexes[open_])
            if valid.size:
                self._settle(valid, outcome)
        for waiting in self.aside.had(offsets):
            self._ack_row(waiting, outcome)

    def _ack_one(self, offset: int, outcome: Outcome) -> None:
        at = self.pages.at(offset)
        if at is not None:
            page, row = at
            if page.state[row] != GONE and page.hand[row] > 0:
                self._settle_one(page, row, outcome)
                return
        waiting = self.aside.get(offset)
        if waiting is not None and waiting.hand:
            self._ack_row(waiting, outcome)

    def _ack_row(self, waiting: Waiting, outcome: Outcome) -> None:
        if waiting.fetched is None:
            self.aside.ack_late(waiting)
        else:
            self.resolve(waiting, outcome)

    # --- failures -----------------------------------------------------------------------------

    def nack(self, told: Nack) -> None:
        """Let fail what this hand holds; what it holds no more is left as it is."""
        self._whole.pop(told.hand, None)
        for some in self.pages.find(told.offsets):
            page, rows = some.page, some.rows
            mine = (page.state[rows] == HELD) & (page.hand[rows] == told.hand)
            self._fail(Some(page, some.indexes[mine]), told)
        for waiting in self.aside.had(told.offsets):
            if waiting.hand == told.hand and waiting.state == HELD:
                self._fail_row(waiting, told)

    def time_out(self, hand: int) -> None:
        """Let fail what a hand holds: its time is over."""
        self._whole.pop(hand, None)
        failure = Failure(TIMED_OUT, f"its handler took longer than {self.policy.timeout_seconds} s")
        for some in self.pages.held_by(hand):
            self._fail(some, Nack(hand, some.offsets, failure))
        for waiting in self.aside.in_hand(hand):
            self._fail_row(waiting, Nack(hand, Range(waiting.row.offset, waiting.row.offset + 1), failure))

    def _fail(self, some: Some, told: Nack) -> None:
        page, aside, failure = some.page, self.aside, told.failure
        parked: dict[int, int] = {}
        room = self.room_aside
        self._touch(page, some.rows)
        for row in some.indexes.tolist():
            offset = page.start + row
            attempts = self._count(offset) if told.counted else self._uncount(offset)
            verdict = self._verdict(attempts, offset, told)
            if isinstance(verdict, str):
                self._end(page, row, verdict, failure)
                continue
            lane = self.lanes.of_one(page, row)
            long = verdict > SHORT_DELAY_SECONDS or aside.first.get(lane, offset) < offset
            if long and self.lanes.may_park(page, lane) and len(parked) < room:
                parked[row] = self._due_after(verdict)
            else:
                self._let_go(Some(page, slice(row, row + 1)))
                self.pages.move_one(page, row, DELAYED)
                self.delays.set(offset, self.now.monotonic + verdict)
        if parked:
            self._park(page, parked, failure)
            self._lanes_changed = True

    def _count(self, offset: int) -> int:
        """Count the attempt that failed, unless it was counted when it began; returns how many there were."""
        made = self.progress.attempts.get(offset, 0) + (offset not in self._precounted)
        self._precounted.discard(offset)
        self.progress.attempts[offset] = made
        self.progress.touch()
        return made

    def _uncount(self, offset: int) -> int:
        """Let the attempt not have been made, if it was counted when it began; returns how many there were."""
        if offset in self._precounted:
            self._precounted.discard(offset)
            self.progress.attempts[offset] -= 1
            self.progress.touch()
        return self.progress.attempts.get(offset, 0)

    def _verdict(self, attempts: int, offset: int, told: Nack) -> float | Exhausted:
        return self.policy.verdict(attempts, offset, delay=told.delay_seconds, retry=told.retry, counted=told.counted)

    def _due_after(self, seconds: float) -> int:
        return self.now.wall_us + round(seconds * 1_000_000)

    def _end(self, page: Page, row: int, how: Exhausted, failure: Failure) -> None:
        """Do what is done with an event that is not tried again."""
        match how:
            case "halt":
                if page.state[row] == HELD:
                    self._let_go(Some(page, slice(row, row + 1)))
                    self.pages.move_one(page, row, READY)
                self.halts.setdefault(page.start + row, Halted(page.start + row, failure))
            case "discard":
                self._settle_one(page, row, Outcome.DISCARDED)
            case "dead":
                self._write(page, {row: self.now.wall_us}, "dead", failure)
                self._settle_one(page, row, Outcome.DEAD)

    def _fail_row(self, waiting: Waiting, told: Nack) -> None:
        row, failure = waiting.row, told.failure
        precounted = row.offset in self._precounted
        attempts = row.attempts + (not precounted) if told.counted else row.attempts - precounted
        self._precounted.discard(row.offset)
        self.deadlines.let_go_of(waiting.hand)
        self.aside.take_back(waiting)
        waiting.row = row._replace(attempts=attempts)
        verdict = self._verdict(attempts, row.offset, told)
        if isinstance(verdict, str):
            self._end_row(waiting, verdict, failure)
            return
        waiting.row = waiting.row._replace(due_at=self._due_after(verdict))
        self.write_row(waiting, "waiting", failure)
        self.aside.park(waiting.row, waiting.hand)

    def _end_row(self, waiting: Waiting, how: Exhausted, failure: Failure) -> None:
        match how:
            case "halt":
                self.write_row(waiting, "waiting", failure)
                self.halts.setdefault(waiting.row.offset, Halted(waiting.row.offset, failure))
            case "discard":
                self.resolve(waiting, Outcome.DISCARDED, failure)
            case "dead":
                self.resolve(waiting, Outcome.DEAD, failure)

    # --- giving back --------------------------------------------------------------------------

    def give_back(self, hand: int, offsets: Offsets) -> None:
        """Take back what this hand has not begun."""
        self._whole.pop(hand, None)
        for some in self.pages.find(offsets):
            page = some.page
            mine = (page.state[some.rows] == HELD) & (page.hand[some.rows] == hand)
            self._give_back(Some(page, some.indexes[mine]))
        for waiting in self.aside.had(offsets):
            if waiting.hand == hand and waiting.state == HELD:
                self._give_back_row(waiting)

    def give_all_back(self, consumer: int | None = None) -> None:
        """Take back whatever is handed over, to one consumer or to all."""
        self._whole.clear()
        for some in self.pages.all_held():
            page, rows = some.page, some.indexes
            mine = some if consumer is None else Some(page, rows[page.hand[rows] >> HAND_BITS == consumer])
            self._give_back(mine)
        for waiting in self.aside.in_hand():
            if consumer is None or waiting.hand >> HAND_BITS == consumer:
                self._give_back_row(waiting)
        if consumer is None:
            self.deadlines.clear()

    # --- slots that go to others --------------------------------------------------------------

    def _touch(self, page: Page, rows: Rows) -> None:
        """Note of which slots something is to be written, while some are leaving."""
        if self.share.departing:
            self.progress.slots_touched.update(np.unique(page.slots[rows]).tolist())

    def busy_slots(self) -> Slots:
        """Return the slots that cannot leave: something of them is handed over, or was settled and is not written."""
        busy = np.zeros(SLOTS, np.bool_)
        busy[list(self.progress.slots_unwritten)] = True
        for some in self.pages.all_held():
            busy[some.page.slots[some.rows]] = True
        for waiting in self.aside.in_hand():
            busy[waiting.row.slot] = True
        return busy

    def held(self) -> list[Held]:
        """Return what is handed over, by slot where that matters."""
        somes, rows = self.pages.all_held(), self.aside.in_hand()
        hands = [some.page.hand[some.rows] for some in somes] + [np.array([each.hand for each in rows], np.int64)]
        slots = None
        if self.share.slotted:
            of_rows = np.array([each.row.slot for each in rows], np.int64)
            slots = np.concatenate([some.page.slots[some.rows] for some in somes] + [of_rows])
        return held_of(np.concatenate(hands) & HAND_MASK, slots, self._beginnings)

    def drop(self, slots: Slots) -> None:
        """Let whatever is open of these slots be others'; nothing of them is handed over."""
        self.share.drop(slots)
        for page in self.pages:
            rows = page.in_state(READY, DELAYED)
            rows = rows[slots[page.slots[rows]]]
            for offset in (rows + page.start).tolist() if page.delayed else ():
                self.delays.drop(offset)
            if len(rows):
                self._give_up(Some(page, rows))
        for waiting in self.aside.of_slots(slots):
            self._remove(waiting)
        for offset in [offset for offset in self.halts if self._is_gone(offset)]:
            del self.halts[offset]

    def shed(self) -> None:
        """Let others have what is ready and was never tried."""
        tried = np.fromiter(self.progress.attempts, np.int64)
        for page in self.pages:
            rows = page.in_state(READY)
            if len(tried):
                rows = rows[~np.isin(rows + page.start, tried)]
            if len(rows):
                self.pages.move(Some(page, rows), GONE)
                self.progress.free(rows + page.start)

    def _give_back(self, some: Some) -> None:
        if not some.size:
            return
        self._let_go(some)
        if self._precounted:
            self._touch(some.page, some.rows)
            for offset in self._precounted.intersection((some.indexes + some.page.start).tolist()):
                self._uncount(offset)
        # As if nobody had ever had it: an ack of it would be a mistake.
        some.page.hand[some.rows] = 0
        self.pages.move(some, READY)
        self._lanes_changed = True

    def _give_back_row(self, waiting: Waiting) -> None:
        offset = waiting.row.offset
        self.deadlines.let_go_of(waiting.hand)
        if offset in self._precounted:
            self._precounted.discard(offset)
            waiting.row = waiting.row._replace(attempts=waiting.row.attempts - 1)
            self.write_row(waiting, "waiting")
        self.aside.take_back(waiting)
        self.aside.never_had(waiting)

    # --- settling -----------------------------------------------------------------------------

    def _let_go(self, some: Some) -> None:
        if self.deadlines.counting:
            hands = some.page.hand[some.rows]
            self.deadlines.let_go(hands[some.page.state[some.rows] == HELD])

    def _settle(self, some: Some, outcome: Outcome) -> None:
        page = some.page
        self._let_go(some)
        self._touch(page, some.rows)
        if self._precounted:
            self._precounted.difference_update((some.indexes + page.start).tolist())
        offsets = some.offsets
        if some.part is None or isinstance(offsets, Range) or outcome is not Outcome.ACKED:
            self.progress.settle(outcome, offsets)
        else:
            self.progress.settle_part(page.start, page.stop, offsets)
        if outcome is Outcome.ACKED and not self.progress.note_latency_of_all(
            some.size, page.appended_between, self.now.wall_us
        ):
            self.progress.note_latency(page.appended_at[some.rows], self.now.wall_us)
        self.pages.move(some, GONE)

    def _settle_one(self, page: Page, row: int, outcome: Outcome) -> None:
        offset = page.start + row
        if self.deadlines.counting and page.state[row] == HELD:
            self.deadlines.let_go_of(int(page.hand[row]))
        self._precounted.discard(offset)
        self._touch(page, slice(row, row + 1))
        self.progress.settle_one(outcome, offset)
        if outcome is Outcome.ACKED:
            self.progress.note_latency_of_one(int(page.appended_at[row]), self.now.wall_us)
        self.pages.move_one(page, row, GONE)

    def resolve(self, waiting: Waiting, outcome: Outcome, failure: Failure = NO_FAILURE) -> None:
        """End a row that waited aside: it is dead, or done."""
        row = waiting.row
        self.write_row(waiting, "dead" if outcome is Outcome.DEAD else "done", failure)
        self.progress.resolve(outcome, row.offset, retried=row.attempts > 0)
        self._precounted.discard(row.offset)
        if self.deadlines.counting and waiting.state == HELD:
            self.deadlines.let_go_of(waiting.hand)
        self._remove(waiting)

    def _remove(self, waiting: Waiting) -> None:
        self.aside.remove(waiting.row.offset)
        if not waiting.row.replay:
            self.lanes.freed(waiting.row.lane)

    def write_row(self, waiting: Waiting, state: str, failure: Failure = NO_FAILURE) -> None:
        """Write a row that was fetched, as it is now."""
        assert waiting.fetched is not None
        if self.share.departing:
            self.progress.slots_touched.add(waiting.row.slot)
        self.progress.park(Park(waiting.row, state, waiting.fetched.source, -1, failure))

    # --- setting aside ------------------------------------------------------------------------

    def set_aside(self, some: Some) -> None:
        """Park events that wait behind others, as many as may be; those that are delayed, until then."""
        parked = {}
        for row in some.indexes[: self.room_aside].tolist():
            delayed_until = self.delays.at(some.page.start + row) if some.page.state[row] == DELAYED else None
            parked[row] = DUE if delayed_until is None else self._due_after(delayed_until - self.now.monotonic)
        if parked:
            self._park(some.page, parked, NO_FAILURE)

    def tidy(self) -> None:
        """Park what waits behind a lane that has just been parked, and let go of pages that are done."""
        if self._lanes_changed:
            self._lanes_changed = False
            if self.aside.first:
                for some in self.lanes.all_behind_parked():
                    self.set_aside(some)
        self.pages.sweep(self.policy.window_bytes)

    def _park(self, page: Page, due_at: Mapping[int, int], failure: Failure) -> None:
        for row, key in self._write(page, due_at, "waiting", failure):
            self.aside.park(row, int(page.hand[row.offset - page.start]), key)
        if len(due_at) == 1:
            [index] = due_at
            self._settle_one(page, index, Outcome.PARKED)
        else:
            self._settle(Some(page, np.fromiter(due_at, np.int64, len(due_at))), Outcome.PARKED)

    def _write(self, page: Page, due_at: Mapping[int, int], state: str, failure: Failure) -> list[tuple[Row, Any]]:
        """Write events in memory as rows aside; returns these, and the key of each."""
        sources = self.pages.source_of(Some(page, np.fromiter(due_at, np.int64, len(due_at))))
        written = []
        for index, due in due_at.items():
            offset = page.start + index
            key, slot = page.about(index)
            slot = slot if self.share.slotted else self.share.berth
            row = Row(offset, self.lanes.of_one(page, index), due, self.progress.attempts.get(offset, 0), 0, slot)
            self.progress.park(Park(row, state, *sources[index], failure))
            written.append((row, key))
        return written

    # --- marks of suspects --------------------------------------------------------------------

    def count_ahead(self, offset: int) -> None:
        """Count an attempt at an event in memory before it is made."""
        self.progress.attempts[offset] += 1
        self._precounted.add(offset)
        self.progress.touch()

    def count_row_ahead(self, waiting: Waiting) -> None:
        """Count an attempt at a parked row before it is made."""
        waiting.row = waiting.row._replace(attempts=waiting.row.attempts + 1)
        self._precounted.add(waiting.row.offset)

    # --- going on after a halt ----------------------------------------------------------------

    def resume(self) -> None:
        """Give what had halted it a new set of attempts."""
        for offset in self.halts:
            waiting = self.aside.get(offset)
            if waiting is not None and waiting.fetched is not None:
                waiting.row = waiting.row._replace(attempts=0)
                self.write_row(waiting, "waiting")
            elif self.progress.attempts.pop(offset, None) is not None:
                self.progress.touch()
        self.halts.clear()

    def forget_ended_halts(self) -> None:
        """Let nothing halt at what is settled by now: a late ack, or an expiry."""
        for offset in list(self.halts):
            if self._is_gone(offset):
                del self.halts[offset]

    def _is_gone(self, offset: int) -> bool:
        return self.pages.state_of(offset) == GONE and self.aside.get(offset) is None
