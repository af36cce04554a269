"""Several owners of one partition: each has the events of its slots, they share a cursor, and slots change hands."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.engine_world import WALL_US, Source, offsets_of

from penstock import columns
from penstock.engine.division import Division
from penstock.engine.messages import (
    Ack,
    Ask,
    Chunk,
    ConsumerLeft,
    CursorSeen,
    Declare,
    Deliver,
    Done,
    Fetch,
    Fetched,
    FetchedRow,
    HeadMoved,
    Leaving,
    Left,
    Nack,
    NotWritten,
    Now,
    PolicyChanged,
    Read,
    ReadDone,
    Row,
    Tick,
    Written,
)
from penstock.engine.policy import Policy
from penstock.engine.shard import Shard
from penstock.engine.share import SLOTS, Share, slots_of
from penstock.engine.states import Outcome
from penstock.offsets import Bitmap, Gap, Range, RangeSet
from penstock.rows import Cursor, Settling
from penstock.rows import Shard as ShardName
from penstock.settling import settle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.engine.messages import Input, Step
    from penstock.engine.share import Slots

PARTITION = 3
CONSUMERS = 2
NAME = ShardName("log", "s", 0, PARTITION)


def slot_of(lane: int | None) -> int:
    return PARTITION if lane is None else lane % SLOTS


class World:
    """A log, and what is durable of a subscription: one cursor, rows, and the outcomes that were recorded."""

    def __init__(self, *lanes: int | None, policy: Policy | None = None) -> None:
        self.log: list[int | None] = list(lanes)
        self.lost: list[Gap] = []
        self.policy = policy or Policy(checkpoint_events=1)
        self.cursor = Cursor(shard=NAME, next_offset=0)
        self.rows: dict[int, Row] = {}
        self.sources: dict[int, Any] = {}
        self.outcomes: dict[int, list[Outcome]] = {}
        self.monotonic = 100.0
        self.wall_us = WALL_US
        self.declared: list[Gap] = []

    @property
    def now(self) -> Now:
        return Now(self.monotonic, self.wall_us)

    def owner(self, slots: Iterable[int] = range(SLOTS), *, clean: bool = True) -> Owner:
        mine = slots_of(slots)
        return Owner(self, mine, clean=clean)

    def settled(self, offset: int) -> bool:
        return offset in Bitmap.from_bytes(self.cursor.next_offset, self.cursor.settled)

    def read(self, read: Read, mine: Slots | None = None, division: Division | None = None) -> tuple[Chunk | Gap, ...]:
        for gap in self.lost:
            if read.start in gap.range:
                return (Gap(read.start, gap.stop, gap.reason),)
        stops = [gap.start for gap in self.lost if gap.start > read.start]
        stop = min([len(self.log), read.start + read.events_max, *stops])
        if mine is not None:
            own = [offset for offset in range(read.start, stop) if mine[slot_of(self.log[offset])]]
            stop = stop if len(own) <= read.own_max else own[read.own_max]
        if stop <= read.start:
            return ()
        lanes = self.log[read.start : stop]
        numbers = np.array([PARTITION if lane is None else lane for lane in lanes], np.int64)
        slots = np.array([slot_of(lane) for lane in lanes], np.int64)
        keyless = all(lane is None for lane in lanes)
        return (
            Chunk(
                Range(read.start, stop),
                nbytes=10 * len(lanes),
                sizes=lambda: np.full(len(lanes), 10, np.int64),
                lanes=None if keyless else lambda: numbers,
                slots=None if keyless else lambda: slots,
                expiries=None,
                appended_at=np.full(len(lanes), WALL_US, np.int64),
                source=Source(read.start, range(len(lanes))),
                divided=None if division is None else division.divide(read.start, slots),
            ),
        )

    def write(self, step: Step) -> None:
        """Write a step as a store does."""
        newly = reduce(or_, step.outcomes.values(), RangeSet())
        settling = Settling(
            shard=NAME,
            generation=0,
            settled=newly,
            attempts=step.changed_attempts,
            record=(lambda *_: b"recorded") if newly else None,
        )
        self.cursor, _ = settle(self.cursor, settling)
        for outcome, spans in sorted(step.outcomes.items(), key=lambda each: each[0] is not Outcome.PARKED):
            for offset in (offset for span in spans for offset in span):
                before = self.outcomes.setdefault(offset, [])
                assert not before or before[-1] is Outcome.PARKED, f"{offset} was {before}, and is {outcome} now"
                before.append(outcome)
        for park in step.parks:
            if park.state == "waiting":
                self.rows[park.row.offset] = park.row
            else:
                self.rows.pop(park.row.offset, None)

    def final(self) -> dict[int, Outcome]:
        return {offset: outcomes[-1] for offset, outcomes in sorted(self.outcomes.items())}


@dataclass(eq=False)
class Owner:
    """One engine with its slots; answers are given at once, and written when the test says."""

    world: World
    mine: Slots
    clean: bool = True
    reads: list[Read] = field(default_factory=list)
    asked: list[Read] = field(default_factory=list)
    """All reads that there were."""
    fetches: list[Fetch] = field(default_factory=list)
    delivered: list[Deliver] = field(default_factory=list)
    singly: bool = False
    division: Division | None = None
    """By what its reads are divided, for those who ask."""

    def __post_init__(self) -> None:
        world = self.world
        cursor = world.cursor
        self.shard = Shard(
            next_offset=cursor.next_offset,
            settled=cursor.settled,
            attempts=cursor.attempts,
            number=cursor.number,
            partition=PARTITION,
            policy=world.policy,
            rows=[row for row in world.rows.values() if self.mine[row.slot]],
            clean=self.clean,
            head=len(world.log),
            now=world.now,
            slots=self.mine,
        )
        self.tell(HeadMoved(len(world.log)))

    def tell(self, told: Input) -> None:
        for output in self.shard.handle(told, self.world.now):
            match output:
                case Read():
                    self.reads.append(output)
                case Fetch():
                    self.fetches.append(output)
                case Deliver():
                    self.delivered.append(output)
                case Declare():
                    self.world.declared.append(output.gap)
        while self.reads:
            read = self.reads.pop()
            self.asked.append(read)
            self.tell(ReadDone(read.start, self.world.read(read, self.mine, self.division)))
        while self.fetches:
            offsets = self.fetches.pop().offsets
            rows = [offset for offset in offsets if offset in self.world.rows]
            found = tuple(FetchedRow(offset, 10, None, Source(offset, [0])) for offset in rows)
            self.tell(Fetched(offsets, found))

    def ask(self, events: int = 1_000, *, consumer: int = 0, slots: Slots | None = None) -> list[int]:
        count = len(self.delivered)
        self.tell(Ask(events, 1 << 30, self.singly, consumer, slots))
        return [offset for handed in self.delivered[count:] for offset in offsets_of(handed)]

    def ack(self, *offsets: int) -> None:
        self.tell(Ack(np.array(sorted(offsets), np.int64)))

    def nack(self, *offsets: int, delay: float | None = None) -> None:
        self.tell(Nack(self.delivered[-1].hand, np.array(offsets, np.int64), delay_seconds=delay))

    def write(self) -> None:
        step = self.shard.take_step()
        if step is not None:
            self.world.write(step)
            self.tell(Written(step))
            self.tell(CursorSeen(self.world.cursor.next_offset))

    def drain(self) -> list[int]:
        found = []
        while offsets := self.ask():
            found += offsets
            self.ack(*offsets)
            self.write()
        self.write()
        return found


# --- one after the other ----------------------------------------------------------------------


@pytest.mark.parametrize("singly", [True, False])
def test_every_owner_has_the_events_of_its_slots_in_order(singly: bool) -> None:
    world = World(1, 2, 1, 3, None, 2, 1)
    one, two = world.owner([1, PARTITION]), world.owner([2])
    one.singly = two.singly = singly
    assert one.drain() == ([0, 3, 2, 4, 6] if singly else [0, 2, 3, 4, 6])
    assert world.cursor.next_offset == 1
    assert two.drain() == [1, 5]
    assert world.cursor == Cursor(shard=NAME, next_offset=7, number=world.cursor.number)
    assert world.final() == dict.fromkeys(range(7), Outcome.ACKED)


def test_an_owner_that_comes_later_begins_where_all_of_its_slots_are_settled() -> None:
    world = World(1, 2, 1, 2)
    assert world.owner([1]).drain() == [0, 2]
    late = world.owner([1, 2])
    assert late.drain() == [1, 3]


def test_events_are_asked_for_by_slots_and_by_consumers() -> None:
    world = World(1, 2, 1, 2, 3)
    owner = world.owner()
    assert owner.ask(consumer=1, slots=slots_of([1])) == [0, 2]
    assert owner.ask(consumer=2, slots=slots_of([2, 3])) == [1, 3, 4]
    assert owner.ask(consumer=1, slots=slots_of([1])) == []
    owner.tell(ConsumerLeft(1))
    # What the other one holds is its own still; what was given back goes to whoever has the slot.
    assert owner.ask(consumer=2, slots=slots_of(range(SLOTS))) == [0, 2]
    owner.tell(ConsumerLeft(None))
    assert owner.ask(consumer=3) == [0, 1, 2, 3, 4]


def test_a_lane_that_goes_to_another_consumer_waits_for_what_the_first_one_holds() -> None:
    world = World(1, 1)
    owner = world.owner()
    assert owner.ask(1, consumer=1) == [0]
    assert owner.ask(consumer=2) == []
    owner.ack(0)
    assert owner.ask(consumer=2) == [1]


@pytest.mark.parametrize("singly", [True, False])
def test_a_slot_that_leaves_is_handed_over_no_more_and_goes_with_what_is_unsettled(singly: bool) -> None:
    world = World(1, 2, 1, 2, 1)
    owner = world.owner()
    owner.singly = singly
    assert owner.ask(1) == [0]
    owner.tell(Leaving(slots_of([1])))
    assert owner.ask() == ([1] if singly else [1, 3])
    assert np.flatnonzero(owner.shard.busy_slots).tolist() == [1, 2]
    with pytest.raises(AssertionError, match="are not done here"):
        owner.tell(Left(slots_of([1])))
    owner.ack(0)
    assert np.flatnonzero(owner.shard.busy_slots).tolist() == [1, 2]
    owner.write()
    assert np.flatnonzero(owner.shard.busy_slots).tolist() == [2]
    owner.tell(Left(slots_of([1])))
    next_one = world.owner([1])
    assert next_one.drain() == [2, 4]
    owner.ack(1, 3)
    owner.drain()
    assert world.cursor.next_offset == 5
    assert world.final() == dict.fromkeys(range(5), Outcome.ACKED)


def test_a_slot_that_leaves_and_stays_after_all_goes_on() -> None:
    world = World(1, 2)
    owner = world.owner()
    owner.tell(Leaving(slots_of([1])))
    assert owner.ask() == [1]
    owner.tell(Leaving(slots_of([])))
    assert owner.ask() == [0]


def test_parked_rows_go_with_their_slot() -> None:
    world = World(1, 2, 1)
    owner = world.owner()
    assert owner.ask(1) == [0]
    owner.nack(0, delay=60)
    owner.write()
    assert sorted((row.offset, row.slot) for row in world.rows.values()) == [(0, 1), (2, 1)]
    owner.tell(Left(slots_of([1])))
    assert owner.shard.parked == 0
    assert owner.drain() == [1]
    next_one = world.owner([1])
    world.monotonic += 61
    world.wall_us += 61_000_000
    owner.tell(Tick())
    next_one.tell(Tick())
    assert owner.drain() == []
    assert next_one.drain() == [0, 2]
    assert world.final() == dict.fromkeys(range(3), Outcome.ACKED)


def test_attempts_at_others_events_stay_as_they_are() -> None:
    world = World(1, 2, 1)
    one, two = world.owner([1]), world.owner([2])
    one.ask(1)
    two.ask(1)
    one.nack(0, delay=1)
    two.nack(1, delay=1)
    one.write()
    two.write()
    assert world.cursor.attempts == {0: 1, 1: 1}
    # Whoever loads all of them changes its own only.
    third = world.owner([1])
    third.ask(1)
    third.nack(0, delay=1)
    third.write()
    assert world.cursor.attempts == {0: 2, 1: 1}


def test_a_hole_is_settled_and_declared_by_the_owner_of_events_without_a_key() -> None:
    world = World(1, 2, None, 1, 2)
    world.lost = [Gap(1, 3, "lost")]
    assert world.owner([1, 2]).drain() == [0, 3, 4]
    assert world.declared == []
    assert world.owner([PARTITION]).drain() == []
    assert world.declared == [Gap(1, 3, "lost")]
    assert world.cursor.next_offset == 5
    assert world.final()[1] is world.final()[2] is Outcome.GAP


def test_nobody_reads_further_ahead_of_the_shared_cursor_than_a_cursor_can_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Bitmap, "LIMIT", 50)
    world = World(2, *[1] * 200)
    one, two = world.owner([1]), world.owner([2])
    assert one.drain() == list(range(1, 50))
    assert two.drain() == [0]
    one.tell(CursorSeen(world.cursor.next_offset))
    assert one.drain()[0] == 50


@pytest.mark.parametrize(("slots", "times"), [(SLOTS, 1), (SLOTS // 2, 2), (SLOTS // 4, 4), (1, 4)])
def test_whoever_owns_few_slots_reads_more_at_once_for_as_many_of_its_own(slots: int, times: int) -> None:
    policy = Policy(window_events=100, read_events=40, read_bytes=1_000, window_bytes=3_000)
    world = World(*[number % SLOTS for number in range(500)], policy=policy)
    [read, *_] = world.owner(range(slots)).asked
    assert read == (0, 40 * times, min(1_000 * times, 3_000), 40)


def test_no_more_of_its_own_are_in_memory_than_the_window_allows() -> None:
    world = World(*[1] * 500, policy=Policy(window_events=100, read_events=40))
    owner = world.owner([1])
    assert [(read.start, read.own_max) for read in owner.asked] == [(0, 40), (40, 40)]
    assert owner.shard.in_memory == 80
    assert owner.drain() == list(range(500))


def test_a_consumer_that_does_not_ask_does_not_hold_up_others_for_long() -> None:
    world = World(*[1, 2] * 20, policy=Policy(window_events=8, read_events=8))
    owner = world.owner()
    taken: list[int] = []
    for _ in range(40):
        offsets = owner.ask(consumer=1, slots=slots_of([2]))
        taken += offsets
        if offsets:
            owner.ack(*offsets)
        owner.write()
        world.monotonic += 0.3
        world.wall_us += 300_000
        owner.tell(Tick())
    assert taken == list(range(1, 40, 2))
    assert owner.drain() == list(range(0, 40, 2))


@pytest.mark.parametrize("slots", [SLOTS, 2])
def test_as_many_are_suspects_as_several_consumers_of_an_owner_may_have_had_in_hand(slots: int) -> None:
    policy = Policy(window_events=10, read_events=10)
    world = World(*[number % 2 for number in range(100)], policy=policy)
    before = world.owner(range(slots))
    before.tell(PolicyChanged(policy.together))
    in_hand = [offset for _ in range(20) for offset in before.ask()]
    assert len(in_hand) == 20
    owner = world.owner(range(slots), clean=False)
    alone: list[int] = []
    for _ in range(100):
        offsets = owner.ask()
        owner.write()
        if not owner.shard.suspecting:
            break
        alone += offsets
        owner.ack(*offsets)
        owner.write()
    assert set(in_hand) <= set(alone)


def test_suspects_of_every_consumer_are_tried_before_anything_else() -> None:
    world = World(1, 2, 1, 2)
    world.owner().ask()
    owner = world.owner(clean=False)
    seen: list[int] = []
    for _ in range(20):
        for consumer, slots in ((1, slots_of([1])), (2, slots_of([2]))):
            offsets = owner.ask(consumer=consumer, slots=slots)
            seen += offsets
            owner.write()
            if offsets:
                owner.ack(*offsets)
            owner.write()
        if len(seen) == 2:
            assert owner.shard.suspecting
    assert sorted(seen) == [0, 1, 2, 3]
    assert not owner.shard.suspecting
    assert world.cursor.next_offset == 4


def test_a_share_knows_its_slots() -> None:
    assert SLOTS == columns.SLOTS
    share = Share(PARTITION + SLOTS, slots_of([1, 2, PARTITION]))
    assert (share.slotted, share.whole, share.has_holes, share.keyless) == (True, False, True, PARTITION)
    share.drop(slots_of([PARTITION]))
    assert not share.has_holes
    asked = slots_of([1, 2])
    assert share.offered(asked) is asked, "what is others' never comes so far"
    share.leave(slots_of([1]))
    offered = share.offered(asked)
    assert offered is not None
    assert np.flatnonzero(offered).tolist() == [2]
    everything = Share(0)
    assert (everything.slotted, everything.whole, everything.offered(None)) == (False, True, None)


# --- at random --------------------------------------------------------------------------------


class Model(World):
    """Owners that come, go and die, and handlers that ack, fail and give back; order is checked at every step."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.lanes: list[int | None] = [None, *range(100, 100 + chance.choice([3, 12]))]
        policy = Policy(
            window_events=chance.choice([3, 10, 100]),
            read_events=chance.choice([2, 10, 100]),
            max_retries=chance.choice([1, 5]),
            backoff_seconds=chance.choice([0.5, 6.0]),
            checkpoint_events=chance.choice([1, 5]),
            parked_max=chance.choice([0, 5, 1_000]),
        )
        super().__init__(policy=policy)
        self.singly = chance.random() < 0.5
        self.divided = chance.random() < 0.5
        self.owners: list[Owner] = []
        self.held: dict[Owner, dict[int, tuple[int, int]]] = {}
        """By offset, the hand and the consumer."""
        self.leaving: dict[Owner, Slots] = {}
        self.marks: dict[Owner, int] = {}
        self.acquire(range(SLOTS), clean=True)

    def acquire(self, slots: Iterable[int], *, clean: bool) -> None:
        owner = self.owner(slots, clean=clean)
        owner.singly = self.singly
        if self.divided:
            masks = [slots_of(range(consumer, SLOTS, CONSUMERS)) & owner.mine for consumer in range(CONSUMERS)]
            owner.division = Division(masks)
        self.owners.append(owner)
        self.held[owner] = {}

    def step(self) -> None:
        chance = self.chance
        owner = chance.choice(self.owners)
        match chance.choice(
            ["publish", "ask", "ask", "ack", "ack", "done", "nack", "write", "write", "time", "move", "leave"]
        ):  # fmt: skip
            case "publish":
                self.log += [chance.choice(self.lanes) for _ in range(chance.choice([1, 3, 20]))]
                for each in self.owners:
                    each.tell(HeadMoved(len(self.log)))
            case "ask":
                self.ask(owner)
            case "ack":
                self.settle(owner, [Ack(np.array([offset], np.int64)) for offset in self.some(owner)])
            case "done" if owner.delivered:
                self.be_done(owner, chance.choice(owner.delivered[-4:]))
            case "nack":
                delay = chance.choice([None, 0.0, 20.0])
                self.settle(
                    owner,
                    [
                        Nack(self.held[owner][offset][0], np.array([offset], np.int64), delay_seconds=delay)
                        for offset in self.some(owner)
                    ],
                )
            case "write":
                self.written(owner)
            case "time":
                self.pass_time(chance.choice([0.1, 2.0, 30.0]))
            case "move":
                self.move(owner)
            case "leave" if chance.random() < 0.2:
                self.die(owner)
            case "leave":
                self.leave(owner, chance.randrange(CONSUMERS))

    def be_done(self, owner: Owner, handed: Deliver) -> None:
        offsets = np.array(sorted(offsets_of(handed)), np.int64)
        owner.tell(Done(handed.hand, (offsets,)))
        for offset in offsets.tolist():
            self.held[owner].pop(offset, None)

    def leave(self, owner: Owner, consumer: int) -> None:
        owner.tell(ConsumerLeft(consumer))
        self.held[owner] = {offset: hand for offset, hand in self.held[owner].items() if hand[1] != consumer}

    def pass_time(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall_us += round(seconds * 1_000_000)
        for owner in self.owners:
            owner.tell(Tick())

    def some(self, owner: Owner) -> list[int]:
        held = sorted(self.held[owner])
        return self.chance.sample(held, self.chance.randint(0, len(held)))

    def ask(self, owner: Owner) -> None:
        consumer = self.chance.randrange(CONSUMERS)
        slots = slots_of(range(consumer, SLOTS, CONSUMERS))
        if owner.division is not None:
            slots = owner.division.masks[consumer]
        count = len(owner.delivered)
        offsets = owner.ask(self.chance.choice([1, 5, 100]), consumer=consumer, slots=slots)
        handed = owner.delivered[count:]
        for at, offset in enumerate(offsets):
            slot = slot_of(self.log[offset])
            assert slots[slot]
            assert owner.shard.share.mine[slot]
            assert not owner.shard.share.leaving[slot]
            assert [other for other in self.owners if other.shard.share.mine[slot]] == [owner]
            assert not any(offset in held for held in self.held.values())
            self.check_order(owner, offset, offsets[:at])
            self.held[owner][offset] = (handed[0].hand + (at if self.singly else 0), consumer)

    def check_order(self, owner: Owner, offset: int, together: list[int]) -> None:
        aside = owner.shard._work.aside
        for earlier in range(offset):
            if self.log[earlier] == self.log[offset] and not (earlier in together and not self.singly):
                assert earlier not in self.held[owner], f"{offset} while {earlier} is in hand"
                assert earlier in owner.shard.progress.bitmap, f"{offset} overtakes {earlier}"
                assert aside.get(earlier) is None, f"{offset} overtakes {earlier}, which waits aside"

    def settle(self, owner: Owner, inputs: list[Ack] | list[Nack]) -> None:
        for told in inputs:
            assert isinstance(told.offsets, np.ndarray)
            owner.tell(told)
            self.held[owner].pop(int(told.offsets[0]))

    def written(self, owner: Owner) -> None:
        step = owner.shard.take_step()
        if step is None:
            return
        if self.chance.random() < 0.1:
            owner.tell(NotWritten(step))
            return
        self.write(step)
        owner.tell(Written(step))
        owner.tell(CursorSeen(self.cursor.next_offset))

    def move(self, owner: Owner) -> None:
        if owner not in self.leaving:
            mine = np.flatnonzero(owner.shard.share.mine).tolist()
            self.leaving[owner] = slots_of(self.chance.sample(mine, self.chance.randint(0, len(mine))))
            owner.tell(Leaving(self.leaving[owner]))
            self.marks[owner] = owner.shard.progress.mark()
            return
        self.let_go(owner)

    def let_go(self, owner: Owner) -> None:
        slots = self.leaving[owner]
        # What was settled before they were to leave is written by now, and what was since is known by its slots.
        if (owner.shard.busy_slots & slots).any() or not owner.shard.progress.passed(self.marks[owner]):
            return
        del self.leaving[owner]
        owner.tell(Left(slots))
        if slots.any():
            self.acquire(np.flatnonzero(slots).tolist(), clean=not owner.shard.suspecting)
        if not owner.shard.share.mine.any():
            self.owners.remove(owner)
            del self.held[owner]

    def die(self, owner: Owner) -> None:
        self.owners.remove(owner)
        del self.held[owner]
        self.leaving.pop(owner, None)
        self.acquire(np.flatnonzero(owner.shard.share.mine).tolist(), clean=False)

    def finish(self) -> None:
        for _ in range(1_000):
            for owner in list(self.owners):
                if owner in self.leaving:
                    owner.tell(Leaving(slots_of([])))
                    del self.leaving[owner]
                for consumer in range(2):
                    self.ask(owner) if consumer else owner.tell(Tick())
                self.settle(owner, [Ack(np.array([offset], np.int64)) for offset in sorted(self.held[owner])])
                self.written(owner)
            self.pass_time(1.0)
            if self.cursor.next_offset == len(self.log) and not self.rows:
                return
        raise AssertionError(f"no rest: {self.cursor} of {len(self.log)}, {len(self.rows)} wait")


@pytest.mark.parametrize("seed", [*range(60), 1231])
def test_any_history_settles_every_event_once_in_order_whoever_has_its_slot(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engine.page.RUN_MIN", [1, 2, 512][seed % 3])
    model = Model(seed)
    for _ in range(400):
        model.step()
    model.finish()
    assert sorted(model.outcomes) == list(range(len(model.log)))
    assert all(outcomes[-1] in {Outcome.ACKED, Outcome.DEAD} for outcomes in model.outcomes.values())
