"""A world around one `Shard`, in memory: a log, a store, a clock, and a consumer that says what it is told to say.

Everything that the engine asks for is answered by this world, at once or when the test wants it. Whatever is written is
checked as the audit would: records chain, and the cursor passes nothing without an outcome. Every change of an event's
state is looked up in `TRANSITIONS`, and remembered in `SEEN`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.engine.messages import (
    About,
    Ack,
    Ask,
    Chunk,
    ConsumerLeft,
    Declare,
    Deliver,
    Failure,
    Fetch,
    Fetched,
    FetchedRow,
    GiveBack,
    Halted,
    HeadMoved,
    Nack,
    NotWritten,
    Now,
    PolicyChanged,
    Read,
    ReadDone,
    Row,
    RowsSeen,
    Started,
    Tick,
    Written,
)
from penstock.engine.page import DELAYED, GONE, HELD, PARKED, READY, find_lanes
from penstock.engine.policy import Policy
from penstock.engine.shard import Shard
from penstock.engine.states import TRANSITIONS, Outcome, State
from penstock.offsets import Bitmap, Gap, Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.engine.messages import Input, Output, Park, Step
    from penstock.engine.page import Page

WALL_US = 1_700_000_000_000_000
PARTITION = 3
"""Its number is the lane of events without a key."""

SEEN: set[tuple[State, str]] = set()
"""The transitions that some event went through, in whichever test."""

_AHEAD, _SETTLED = 100, 101
_STATES = {
    PARKED: State.PARKED,
    READY: State.READY,
    HELD: State.HELD,
    DELAYED: State.DELAYED,
    _AHEAD: State.AHEAD,
    _SETTLED: State.SETTLED,
}


class Source:
    """Where payloads are: knows which offsets it still has."""

    def __init__(self, start: int, rows: Iterable[int]) -> None:
        self.start = start
        self.rows = frozenset(rows)

    def narrowed(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Source:
        wanted = frozenset(rows.tolist())
        assert wanted <= self.rows, "rows are asked for that were given up"
        return Source(self.start, wanted)

    def about(self, row: int) -> About:
        """Of a lane that nobody knows any more: what was told before it was narrowed holds."""
        assert row in self.rows, "a row is asked for that was given up"
        return About(None, 0)


def states_of(page: Page) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The state of each event of a page, which stays as it is: in parts, if it is."""
    if page.parts is None:
        return page.state
    found = np.full(page.size, READY, np.uint8)
    for rows, state in zip(page.parts.divided.rows, page.parts.states, strict=True):
        found[rows] = state
    return found


@dataclass
class Event:
    """An event of the log; without a lane it has no key."""

    lane: int | None = None
    nbytes: int = 10
    expiry: int | None = None


@dataclass
class Store:
    """What is durable: the cursor, the rows, and what the records say."""

    next_offset: int = 0
    settled: bytes = b""
    attempts: dict[int, int] = field(default_factory=dict)
    number: int = 0
    rows: dict[int, tuple[Row, str]] = field(default_factory=dict)
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    parks: list[Park] = field(default_factory=list)
    """All that were ever written."""

    @property
    def waiting(self) -> list[Row]:
        return [row for row, state in self.rows.values() if state == "waiting"]

    def final(self, offset: int) -> Outcome | None:
        outcomes = [outcome for outcome in self.outcomes.get(offset, []) if outcome is not Outcome.PARKED]
        return outcomes[-1] if outcomes else None

    def write(self, step: Step) -> None:
        """Write a step as one, and check that it is a link of the chain."""
        assert step.begin == self.next_offset
        assert step.next_offset >= self.next_offset
        newly = [(outcome, offset) for outcome, spans in step.outcomes.items() for span in spans for offset in span]
        assert step.number == self.number + bool(newly)
        # Parked first: what is parked and ends in the same step has both outcomes.
        for outcome, offset in sorted(newly, key=lambda each: each[0] is not Outcome.PARKED):
            before = self.outcomes.setdefault(offset, [])
            if before and before[-1] is not Outcome.PARKED:
                assert self.rows[offset][0].replay, f"{offset} ended as {before} and then as {outcome}"
            elif before:
                assert outcome is not Outcome.PARKED, f"{offset} was parked twice"
            before.append(outcome)
        self.next_offset, self.settled, self.number = step.next_offset, step.settled, step.number
        self.attempts = dict(step.attempts)
        for park in step.parks:
            assert park.index == -1 or park.index in park.source.rows
            self.rows[park.row.offset] = (park.row, park.state)
            self.parks.append(park)
        self._check()

    def _check(self) -> None:
        bitmap = Bitmap.from_bytes(self.next_offset, self.settled)
        reach = self.next_offset + 8 * len(self.settled) + 8
        passed = {offset for offset in range(reach) if offset in bitmap}
        assert passed == set(self.outcomes), "the cursor passes what has an outcome, and nothing else"
        waiting = {row.offset for row in self.waiting if not row.replay}
        parked = {offset for offset, outcomes in self.outcomes.items() if outcomes == [Outcome.PARKED]}
        assert waiting == parked, "rows wait for what is parked, and for nothing else"
        dead = {offset for offset, (row, state) in self.rows.items() if state == "dead"}
        assert dead == {offset for offset in self.outcomes if self.final(offset) is Outcome.DEAD and offset in dead}
        assert not passed & set(self.attempts)

    def replay(self, offset: int, wall_us: int) -> None:
        """Bring a dead letter back, as a person would."""
        row, state = self.rows[offset]
        assert state == "dead"
        self.rows[offset] = (row._replace(due_at=wall_us, attempts=0, replay=row.replay + 1), "waiting")


class World:
    """One shard and everything around it. With `auto`, reads, fetches and writes are answered at once."""

    def __init__(
        self,
        events: Sequence[Event] = (),
        *,
        policy: Policy | None = None,
        auto: bool = True,
        chunk: int = 1 << 30,
        start: int = 0,
        clean: bool = True,
    ) -> None:
        self.log: list[Event] = list(events)
        self.lost: list[Gap] = []
        self.chunk = chunk
        self.auto = auto
        self._answering = False
        self.policy = policy or Policy()
        self.store = Store(next_offset=start)
        self.monotonic = 100.0
        self.wall_us = WALL_US
        self.reads: list[Read] = []
        self.fetches: list[Fetch] = []
        self.delivered: list[Deliver] = []
        self.declared: list[Gap] = []
        self.halts: list[Halted] = []
        if start:
            self.store.outcomes = {offset: [Outcome.SKIPPED] for offset in range(start)}
        self.shard = self.load(clean=clean)

    # --- time and lives -----------------------------------------------------------------------

    @property
    def now(self) -> Now:
        return Now(self.monotonic, self.wall_us)

    def load(self, *, clean: bool) -> Shard:
        """Begin a life, from what is written."""
        store = self.store
        self.reads.clear()
        self.fetches.clear()
        return Shard(
            next_offset=store.next_offset,
            settled=store.settled,
            attempts=store.attempts,
            number=store.number,
            partition=PARTITION,
            policy=self.policy,
            rows=store.waiting,
            clean=clean,
            head=len(self.log),
            now=self.now,
        )

    def restart(self, *, clean: bool = False) -> None:
        """End this life, be it with a word or without, and begin another one."""
        self.shard = self.load(clean=clean)
        self.tell(HeadMoved(len(self.log)))

    def wait(self, seconds: float) -> list[Output]:
        """Let time pass."""
        self.monotonic += seconds
        self.wall_us += round(seconds * 1_000_000)
        return self.tell(Tick())

    def wait_for_timer(self) -> bool:
        """Let time pass until the shard wants to be told; False if it never does."""
        timer = self.shard.next_timer()
        if timer is None:
            return False
        # A microsecond more: the wall clock has no finer steps.
        self.wait(max(timer - self.monotonic, 0.0) + 1e-6)
        return True

    # --- telling ------------------------------------------------------------------------------

    def tell(self, told: Input) -> list[Output]:
        """Tell the shard something, and do what it answers."""
        timer = self.shard.next_timer()
        if timer is not None and timer <= self.monotonic and not isinstance(told, Tick):
            self.tell(Tick())  # so that what time does is not mixed with what the input does
        before = self._codes()
        worth_asking = self.shard.has_for(None)
        outputs = self.shard.handle(told, self.now)
        if not worth_asking:
            assert not any(isinstance(output, Deliver) for output in outputs), "nobody would have asked"
        self._note_transitions(before, told)
        for output in outputs:
            match output:
                case Read():
                    assert not self.reads, "one read at a time"
                    self.reads.append(output)
                case Fetch():
                    assert not self.fetches, "one fetch at a time"
                    self.fetches.append(output)
                case Deliver():
                    self.delivered.append(output)
                case Declare():
                    self.declared.append(output.gap)
                case Halted():
                    self.halts.append(output)
        if self.auto and not self._answering:
            self._answering = True
            self.answer()
            self._answering = False
        return outputs

    def answer(self) -> None:
        """Answer what was asked for, and write what is to be written, until nothing is left."""
        while self.reads or self.fetches or self._is_to_write():
            if self.reads:
                self.answer_read()
            elif self.fetches:
                self.answer_fetch()
            else:
                self.write()

    def _is_to_write(self) -> bool:
        at = self.shard.write_at()
        return at is not None and at <= self.monotonic

    def answer_read(self) -> None:
        read = self.reads.pop()
        self.tell(ReadDone(read.start, self.read(read)))

    def answer_fetch(self) -> None:
        offsets = self.fetches.pop().offsets
        found = []
        for offset in offsets:
            row, state = self.store.rows.get(offset, (None, ""))
            if row is not None and state == "waiting":
                event = self.log[offset]
                found.append(FetchedRow(offset, event.nbytes, event.expiry, Source(offset, [0])))
        self.tell(Fetched(offsets, tuple(found)))

    def write(self) -> Step | None:
        """Write what there is, now."""
        step = self.shard.take_step()
        if step is not None:
            self.store.write(step)
            self.tell(Written(step))
        return step

    def fail_to_write(self) -> None:
        step = self.shard.take_step()
        if step is not None:
            self.tell(NotWritten(step))

    # --- the log ------------------------------------------------------------------------------

    def publish(self, *events: Event) -> None:
        self.log += events
        self.tell(HeadMoved(len(self.log)))

    def read(self, read: Read) -> tuple[Chunk | Gap, ...]:
        """Read as a log does: at most so many events and bytes, but one event at least."""
        items: list[Chunk | Gap] = []
        at, events, nbytes = read.start, read.events_max, read.bytes_max
        while at < len(self.log) and events > 0:
            gap = next((gap for gap in self.lost if at in gap.range), None)
            if gap is not None:
                items.append(gap)
                at = gap.stop
                continue
            most = min(len(self.log), at + events, at + self.chunk, *(g.start for g in self.lost if g.start > at))
            stop = at
            while stop < most and (nbytes >= self.log[stop].nbytes or (stop == at and not items)):
                nbytes -= self.log[stop].nbytes
                stop += 1
            if stop == at:
                break
            items.append(self.chunk_of(at, stop))
            events -= stop - at
            at = stop
        return tuple(items)

    def chunk_of(self, start: int, stop: int) -> Chunk:
        events = self.log[start:stop]
        sizes = np.array([event.nbytes for event in events], np.int64)
        lanes = np.array([PARTITION if event.lane is None else event.lane for event in events], np.int64)
        expiries = np.array([event.expiry or (1 << 62) for event in events], np.int64)
        return Chunk(
            Range(start, stop),
            nbytes=int(sizes.sum()),
            sizes=lambda: sizes,
            lanes=None if all(event.lane is None for event in events) else lambda: lanes,
            expiries=None if all(event.expiry is None for event in events) else expiries,
            appended_at=np.full(len(events), WALL_US, np.int64),
            source=Source(start, range(stop - start)),
            found=None if self.shard.wanted is None else find_lanes(lanes, self.shard.wanted),
            about=lambda row: About(lanes[row], 0),
        )

    # --- the consumer -------------------------------------------------------------------------

    def ask(self, events_max: int = 1_000, *, bytes_max: int = 1 << 30, singly: bool = False) -> list[int]:
        """Ask for events; returns their offsets."""
        count = len(self.delivered)
        self.tell(Ask(events_max, bytes_max, singly))
        return [offset for handed in self.delivered[count:] for offset in offsets_of(handed)]

    @property
    def hand(self) -> int:
        """The hand of what was delivered last, the first one if there are several."""
        return self.delivered[-1].hand

    def hand_of(self, offset: int, *, singly: bool = True) -> int:
        """The hand that was given an offset last."""
        for handed in reversed(self.delivered):
            offsets = offsets_of(handed)
            if offset in offsets:
                return handed.hand + (offsets.index(offset) if singly else 0)
        raise AssertionError(f"{offset} was never delivered")

    def ack(self, *offsets: int) -> None:
        for offset in offsets:
            self.tell(Ack(Range(offset, offset + 1)))

    def nack(
        self,
        *offsets: int,
        hand: int | None = None,
        delay: float | None = None,
        retry: bool = True,
        failure: Failure = Failure("Oops", "it failed"),  # noqa: B008 - immutable
    ) -> None:
        array = np.array(offsets, np.int64)
        self.tell(Nack(self.hand if hand is None else hand, array, failure, delay, retry))

    def give_back(self, *offsets: int, hand: int | None = None) -> None:
        self.tell(GiveBack(self.hand if hand is None else hand, np.array(offsets, np.int64)))

    def leave(self) -> None:
        self.tell(ConsumerLeft())

    def start(self, hand: int | None = None) -> None:
        self.tell(Started(self.hand if hand is None else hand))

    def change(self, **changes: Any) -> None:
        self.policy = self.policy.changed(changes)
        self.tell(PolicyChanged(self.policy))

    def replay(self, offset: int) -> None:
        self.store.replay(offset, self.wall_us)
        self.see_rows()

    def see_rows(self) -> None:
        self.tell(RowsSeen(tuple(row for row in self.store.waiting if row.replay)))

    def drain(self, *, singly: bool = False) -> list[int]:
        """Take and ack everything, for as long as something comes; returns the offsets in the order they came."""
        found = []
        while offsets := self.ask(singly=singly):
            found += offsets
            self.tell(Ack(np.array(sorted(offsets), np.int64)))
        return found

    @property
    def outcomes(self) -> dict[int, Outcome]:
        """How each event ended that did."""
        found = [(offset, self.store.final(offset)) for offset in sorted(self.store.outcomes)]
        return {offset: outcome for offset, outcome in found if outcome not in {None, Outcome.SKIPPED}}

    def is_halted(self) -> bool:
        return self.shard.halted is not None

    # --- states -------------------------------------------------------------------------------

    def state(self, offset: int) -> State:
        """Where an event is, as the shard has it."""
        return _STATES[int(self._codes()[offset])]

    def states(self) -> list[State]:
        return [_STATES[code] for code in self._codes().tolist()]

    def _codes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The states of all events, each as a number."""
        shard, size = self.shard, len(self.log)
        codes = np.full(size, _SETTLED, np.uint8)
        for span in shard.progress.bitmap.unset_in(Range(min(shard.read_position, size), size)):
            codes[span.start : span.stop] = _AHEAD
        for page in shard._work.pages:
            states = states_of(page)
            open_ = states != GONE
            codes[page.start : page.stop][open_] = states[open_]
        for offset, waiting in shard._work.aside._rows.items():
            codes[offset] = waiting.state if waiting.state in _STATES else PARKED
        return codes

    def _note_transitions(self, codes: np.ndarray[Any, np.dtype[np.uint8]], told: Input) -> None:
        moved = np.flatnonzero(codes != self._codes()).tolist()
        if moved:
            before, after = [_STATES[code] for code in codes.tolist()], self.states()
            for offset in moved:
                was, now = before[offset], after[offset]
                why = self._why(offset, was, now, told, before, after)
                assert TRANSITIONS.get((was, why)) is now, f"{offset}: {was} by {why} ({told}) to {now}"
                SEEN.add((was, why))

    def _why(  # noqa: PLR0911, PLR0912, PLR0917 - one line for each transition
        self, offset: int, was: State, now: State, told: Input, before: list[State], after: list[State]
    ) -> str:
        match was, now:
            case State.AHEAD, State.READY:
                return "read"
            case State.AHEAD, State.SETTLED:
                return "gap" if any(offset in span for span in self._gaps()) else "had all its attempts before"
            case State.AHEAD, State.PARKED:
                return "lane is parked"
            case State.READY, State.HELD:
                return "handed over"
            case State.READY, State.SETTLED:
                return "expired" if isinstance(told, Ask) else "late ack"
            case ((State.READY | State.DELAYED), State.PARKED):
                lane = self.log[offset].lane
                earlier = [at for at in range(offset) if self.log[at].lane == lane and after[at] is State.PARKED]
                failed = any(before[at] in {State.HELD, State.PARKED} for at in earlier)
                return "lane is parked" if failed else "window is full of blocked lanes"
            case State.HELD, State.SETTLED:
                return "ack" if isinstance(told, Ack) else "rejected, or retries exhausted"
            case State.HELD, State.READY:
                given = isinstance(told, GiveBack | ConsumerLeft)
                return "given back" if given else "retries exhausted, halt"
            case State.HELD, State.DELAYED:
                return "failed, short delay"
            case State.HELD, State.PARKED:
                given = isinstance(told, GiveBack | ConsumerLeft)
                return "given back, lane is parked" if given else "failed, long delay"
            case State.DELAYED, State.READY:
                return "delay is over"
            case State.DELAYED, State.SETTLED:
                return "late ack"
            case State.PARKED, State.READY:
                return "due, and first of its lane"
            case State.PARKED, State.SETTLED:
                if isinstance(told, Fetched) and offset not in {row.offset for row in told.rows}:
                    return "given up by somebody else"
                park = self.shard.progress.parks.get(offset)
                acked = any(offset in span for span in self.shard.progress._outcomes[Outcome.ACKED])
                return "late ack" if park is not None and acked else "had all its attempts before"
            case State.SETTLED, State.PARKED:
                return "replayed dead letter" if isinstance(told, RowsSeen) else "?"
        return "?"

    def _gaps(self) -> Iterable[Range]:
        return self.shard.progress._outcomes[Outcome.GAP]


def offsets_of(handed: Deliver) -> list[int]:
    """The offsets of a delivery, in its order; checks that its sources still have them."""
    found: list[int] = []
    for piece in handed.pieces:
        rows = range(piece.rows.start, piece.rows.stop) if isinstance(piece.rows, slice) else piece.rows.tolist()
        offsets = list(piece.offsets) if isinstance(piece.offsets, Range) else piece.offsets.tolist()
        assert [piece.start + row for row in rows] == offsets
        assert piece.source.start == piece.start
        assert set(rows) <= piece.source.rows
        found += offsets
    return found


def plain(count: int, **fields: Any) -> list[Event]:
    """Events without a key."""
    return [Event(**fields) for _ in range(count)]


def keyed(*lanes: int | None, **fields: Any) -> list[Event]:
    """Events of these lanes."""
    return [Event(lane, **fields) for lane in lanes]
