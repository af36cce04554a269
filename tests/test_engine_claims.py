"""Berths of one partition: each has what it has claimed, without an order, and what is left behind goes to the next."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.engine_world import offsets_of
from tests.test_engine_share import NAME, PARTITION
from tests.test_engine_share import Owner as SlotOwner
from tests.test_engine_share import World as SlotWorld

from penstock.engine.messages import (
    Ack,
    Claimed,
    ConsumerLeft,
    CursorSeen,
    Freed,
    GiveBack,
    HeadMoved,
    LogTrimmed,
    Nack,
    NotWritten,
    Read,
    ReadDone,
    Shed,
    Tick,
    Want,
    Written,
)
from penstock.engine.policy import Policy
from penstock.engine.shard import Shard
from penstock.engine.share import slots_of
from penstock.engine.states import Outcome
from penstock.offsets import Bitmap, Gap, Range, RangeSet
from penstock.rows import Claim, Settling
from penstock.settling import claims_of, frontier, settle, unsettled

if TYPE_CHECKING:
    from penstock.engine.messages import Input, Step


class World(SlotWorld):
    """A log without keys, and what is durable of a subscription whose events are claimed."""

    def __init__(self, events: int, policy: Policy | None = None) -> None:
        super().__init__(*[None] * events, policy=policy)

    def berth(self, number: int, *, clean: bool = True) -> Berth:
        return Berth(self, slots_of(()), clean=clean, number=number)

    def write_for(self, berth: int, step: Step) -> tuple[Range, ...]:
        """Write a step of a berth as a store does; returns what it has claimed."""
        before = self.cursor
        if step.wish is not None or step.freed:
            settling = Settling(
                shard=NAME, generation=0, berth=berth, freed=step.freed, claim=step.wish and Claim(*step.wish)
            )
            self.cursor, _ = settle(self.cursor, settling)
        claimed = unsettled(self.cursor, berth) - (claims_of(before, berth) - step.freed)
        self.write(step)
        return tuple(claimed)

    def pass_time(self, seconds: float, *berths: Berth) -> None:
        self.monotonic += seconds
        self.wall_us += round(seconds * 1_000_000)
        for berth in berths:
            berth.tell(Tick())


class Berth(SlotOwner):
    """One engine with its berth."""

    def __init__(self, world: World, mine: np.ndarray[tuple[int], np.dtype[np.bool_]], *, clean: bool, number: int):
        self.number = number
        self.slow = False
        """Whether reads are answered when the test says."""
        self.waiting: list[Read] = []
        super().__init__(world, mine, clean)

    def __post_init__(self) -> None:
        world, cursor = self.world, self.world.cursor
        claimed = unsettled(cursor, self.number)
        self.shard = Shard(
            next_offset=frontier(cursor),
            attempts={offset: made for offset, made in cursor.attempts.items() if offset in claimed},
            number=cursor.number,
            partition=PARTITION,
            policy=world.policy,
            rows=[row for row in world.rows.values() if row.slot == self.number],
            clean=self.clean,
            head=len(world.log),
            now=world.now,
            berth=self.number,
            claimed=claimed,
        )
        self.tell(HeadMoved(len(world.log)))

    def tell(self, told: Input) -> None:
        if self.slow:
            for output in self.shard.handle(told, self.world.now):
                if isinstance(output, Read):
                    self.waiting.append(output)
            return
        super().tell(told)

    def write(self) -> None:
        step = self.shard.take_step()
        if step is not None:
            assert isinstance(self.world, World)
            claimed = self.world.write_for(self.number, step)
            self.tell(Written(step))
            self.tell(CursorSeen(self.world.cursor.next_offset))
            if step.wish is not None:
                self.tell(Claimed(claimed, frontier(self.world.cursor)))

    def claim(self, events: int) -> None:
        """Claim for somebody who got nothing."""
        self.tell(Want(events))
        self.write()

    def take(self, events: int) -> list[int]:
        """Return events, claimed if need be."""
        found = self.ask(events)
        if not found:
            self.claim(events)
            found = self.ask(events)
        return found


# --- claiming ---------------------------------------------------------------------------------


def test_a_claim_is_in_a_hurry_until_it_is_written() -> None:
    berth = World(10).berth(1)
    claiming = [berth.shard.claiming]
    berth.tell(Want(5))
    claiming.append(berth.shard.claiming)
    berth.write()
    claiming.append(berth.shard.claiming)
    assert claiming == [False, True, False]
    assert berth.ask() == list(range(5))


def test_nobody_has_anything_before_somebody_asks() -> None:
    world = World(10)
    berth = world.berth(1)
    assert berth.ask() == []
    berth.write()
    assert (world.cursor.claims, world.cursor.stop) == ({}, None)
    berth.claim(3)
    assert claims_of(world.cursor, 1) == RangeSet([Range(0, 3)])
    assert berth.ask() == [0, 1, 2]


def test_what_one_has_claimed_no_other_gets() -> None:
    world = World(10)
    one, two = world.berth(1), world.berth(2)
    assert one.take(3) == [0, 1, 2]
    assert two.take(3) == [3, 4, 5]
    world.pass_time(1.0)
    assert one.take(2) == [6, 7]
    two.ack(3, 4, 5)
    one.ack(0, 1, 2)
    one.ack(6, 7)
    two.write()
    assert (world.cursor.next_offset, world.cursor.stop) == (0, 8)
    one.write()
    assert world.cursor.next_offset == 8
    assert world.cursor.claims == {}
    assert one.take(5) == [8, 9]


def test_there_is_no_order_and_nothing_waits_for_anything() -> None:
    world = World(6)
    berth = world.berth(1)
    assert berth.take(6) == list(range(6))
    berth.nack(0, delay=2)
    berth.nack(1, delay=60)
    berth.ack(4, 2)
    berth.tell(GiveBack(berth.delivered[-1].hand, np.array([3])))
    assert berth.ask() == [3]
    berth.ack(3, 5)
    berth.write()
    # What is tried again soon is kept, what later is set aside.
    assert (world.cursor.next_offset, sorted(world.rows)) == (0, [1])
    assert world.rows[1].slot == 1
    world.pass_time(3, berth)
    assert berth.ask() == [0]
    berth.ack(0)
    world.pass_time(60, berth)
    assert berth.ask() == [1]
    berth.ack(1)
    berth.write()
    assert world.cursor.next_offset == 6
    assert berth.shard.spent
    assert world.final() == dict.fromkeys(range(6), Outcome.ACKED)


def test_quick_consumers_claim_ahead_and_slow_ones_do_not() -> None:
    world = World(10_000)
    quick = world.berth(1)
    quick.ack(*quick.take(10))
    world.pass_time(0.01)
    quick.ack(*quick.take(10))
    assert len(unsettled(world.cursor, 1)) > 10
    assert quick.shard.ahead == 40 - 10
    slow = world.berth(2)
    for _ in range(10):
        slow.ack(*slow.take(1))
        world.pass_time(1.0)
        assert slow.shard.ahead == 0


def test_a_wish_that_is_not_written_is_made_anew() -> None:
    world = World(5)
    berth = world.berth(1)
    berth.tell(Want(5))
    step = berth.shard.take_step()
    assert step is not None
    assert step.wish is not None
    berth.tell(NotWritten(step))
    step = berth.shard.take_step()
    assert step is not None
    assert step.wish is None
    berth.tell(Written(step))
    assert berth.take(5) == list(range(5))


def test_a_claim_that_brings_nothing_is_not_repeated_before_the_log_grows() -> None:
    world = World(5)
    one, two = world.berth(1), world.berth(2)
    assert one.take(5) == list(range(5))
    before = two.shard.claimable  # it does not know of the other's claim yet
    two.claim(1)
    assert (before, two.shard.claimable) == (True, False)
    world.log.append(None)
    two.tell(HeadMoved(6))
    assert two.take(1) == [5]


def test_nobody_claims_further_ahead_than_a_cursor_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bitmap, "LIMIT", 50)
    world = World(200)
    one, two = world.berth(1), world.berth(2)
    assert one.take(1) == [0]
    assert two.take(100) == list(range(1, 50))
    two.ack(*range(1, 50))
    two.write()
    assert two.take(1) == []
    one.ack(0)
    one.write()
    two.tell(HeadMoved(200))
    assert two.take(100) == list(range(50, 100))


# --- going and coming -------------------------------------------------------------------------


def test_what_a_berth_has_left_is_its_next_owners() -> None:
    world = World(10)
    one = world.berth(1)
    assert one.take(6) == list(range(6))
    one.ack(1, 3)
    one.nack(2, delay=60)
    one.write()
    one.tell(ConsumerLeft())
    two = world.berth(2)
    assert two.take(2) == [6, 7]
    heir = world.berth(1)
    assert heir.ask() == [0, 4, 5]
    heir.ack(0, 4, 5)
    world.pass_time(61, heir)
    assert heir.ask() == [2]
    heir.ack(2)
    heir.write()
    two.ack(6, 7)
    two.write()
    assert world.cursor.next_offset == 8


def test_what_a_dead_process_had_is_tried_with_care() -> None:
    world = World(10)
    assert world.berth(1).take(6) == list(range(6))
    heir = world.berth(1, clean=False)
    assert heir.shard.suspecting
    assert not heir.shard.claimable
    assert heir.ask() == []
    heir.write()
    assert heir.ask() == list(range(6))
    heir.ack(*range(6))
    heir.write()
    assert heir.take(4) == [6, 7, 8, 9]


def test_what_is_given_back_is_claimed_before_anything_else() -> None:
    world = World(20)
    one, two = world.berth(1), world.berth(2)
    one.claim(10)
    assert one.ask(2) == [0, 1]
    one.tell(Shed())
    one.write()
    assert claims_of(world.cursor, 0) == RangeSet([Range(2, 10)])
    assert one.ask() == []
    two.tell(Freed())
    assert two.take(3) == [2, 3, 4]
    # The first one has something open, and claims behind it only.
    one.ack(0, 1)
    one.tell(Freed())
    assert one.take(100) == [5, 6, 7, 8, 9]
    assert two.take(2) == [10, 11]
    assert claims_of(world.cursor, 0) == RangeSet()


def test_what_was_tried_before_is_not_given_back() -> None:
    world = World(5)
    berth = world.berth(1)
    assert berth.take(5) == list(range(5))
    berth.nack(2, delay=0)
    berth.tell(GiveBack(berth.delivered[-1].hand, np.array([0, 1, 3, 4])))
    world.pass_time(0.1, berth)
    berth.tell(Shed())
    berth.write()
    assert claims_of(world.cursor, 0) == RangeSet([Range(0, 2), Range(3, 5)])
    assert berth.ask() == [2]
    assert berth.delivered[-1].attempts == {2: 2}


def test_what_was_asked_for_before_it_was_given_back_is_not_taken() -> None:
    world = World(8)
    berth = world.berth(1)
    berth.slow = True
    berth.claim(8)
    [read] = berth.waiting
    berth.tell(Shed())
    berth.write()
    berth.tell(Freed())
    world.pass_time(1.0)
    berth.claim(2)
    assert unsettled(world.cursor, 1) == RangeSet([Range(0, 2)])
    berth.slow = False
    berth.tell(ReadDone(read.start, world.read(read)))
    assert berth.ask() == [0, 1]
    assert world.berth(2).take(8) == []


def test_what_is_given_back_and_claimed_in_one_step_is_had() -> None:
    world = World(4)
    berth = world.berth(1)
    berth.claim(4)
    berth.tell(Shed())
    berth.tell(Freed())
    world.pass_time(1.0)
    berth.claim(3)
    assert berth.ask() == [0, 1, 2]


def test_a_hole_is_declared_as_far_as_it_is_claimed() -> None:
    world = World(12)
    world.lost = [Gap(2, 9, "lost")]
    one, two = world.berth(1), world.berth(2)
    assert one.take(5) == [0, 1]
    assert two.take(7) == [9, 10, 11]
    assert [(gap.start, gap.stop) for gap in world.declared] == [(2, 5), (5, 9)]
    one.tell(LogTrimmed(12))
    one.ack(0, 1)
    two.ack(9, 10, 11)
    one.write()
    two.write()
    assert world.cursor.next_offset == 12
    assert world.final() == {n: Outcome.GAP if 2 <= n < 9 else Outcome.ACKED for n in range(12)}


def test_what_was_settled_in_another_mode_is_not_claimed() -> None:
    world = World(10)
    settled = Settling(shard=NAME, generation=0, settled=RangeSet([Range(2, 4), Range(6, 7)]))
    world.cursor, _ = settle(world.cursor, settled)
    assert world.berth(1).take(10) == [0, 1, 4, 5, 7, 8, 9]


# --- whatever happens -------------------------------------------------------------------------


class Story:
    """Berths that come and go, of which each does whatever chance says."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        policy = Policy(window_events=chance.choice([4, 20, 100]), read_events=chance.choice([3, 10]), max_retries=50)
        self.world = World(chance.choice([5, 40, 150]), policy)
        self.berths: dict[int, Berth] = {}
        self.held: dict[int, int] = {}
        """Which berth has each offset in somebody's hand."""

    def step(self) -> None:
        chance, number = self.chance, self.chance.choice([1, 2, 3])
        berth = self.berths.get(number)
        if berth is None:
            self.berths[number] = self.world.berth(number, clean=chance.random() < 0.5)
            return
        acts = (self.ask, self.ask, self.ask, self.want, self.settle, self.settle, self.write, self.share, self.other)
        chance.choice(acts)(number, berth)

    def ask(self, number: int, berth: Berth) -> None:
        for offset in berth.ask(self.chance.choice([1, 3, 50])):
            assert offset not in self.held, f"{offset} is in two hands"
            assert not self.world.settled(offset) or offset in self.world.rows
            self.held[offset] = number

    def want(self, _number: int, berth: Berth) -> None:
        berth.tell(Want(self.chance.choice([1, 5, 30])))

    def settle(self, number: int, berth: Berth) -> None:
        mine = [offset for offset, owner in self.held.items() if owner == number]
        for offset in self.chance.sample(mine, min(len(mine), 3)):
            del self.held[offset]
            if self.chance.random() < 0.8:
                berth.tell(Ack(np.array([offset])))
                continue
            hand = next(each.hand for each in reversed(berth.delivered) if offset in offsets_of(each))
            berth.tell(Nack(hand, np.array([offset]), delay_seconds=self.chance.choice([0.1, 10.0])))

    def write(self, _number: int, berth: Berth) -> None:
        berth.write()

    def share(self, _number: int, berth: Berth) -> None:
        berth.tell(Shed() if self.chance.random() < 0.5 else Freed())

    def other(self, number: int, berth: Berth) -> None:
        if self.chance.random() < 0.2:  # it ends: nothing that was not written has happened
            self.held = {offset: owner for offset, owner in self.held.items() if owner != number}
            del self.berths[number]
        elif self.chance.random() < 0.5:
            self.world.pass_time(self.chance.choice([0.05, 2.0, 11.0]), *self.berths.values())
        elif len(self.world.log) < 200:
            self.world.log.append(None)
            berth.tell(HeadMoved(len(self.world.log)))

    def end(self) -> None:
        """Let everything be done that is left."""
        berths = [self.world.berth(number) for number in (1, 2, 3, 4)]
        for _ in range(400):
            for berth in berths:
                berth.tell(Freed())
                berth.ack(*berth.take(50))
                berth.write()
            self.world.pass_time(1.0, *berths)


@pytest.mark.parametrize("seed", range(60))
def test_every_event_is_settled_once_and_in_one_hand_at_a_time(seed: int) -> None:
    story = Story(seed)
    for _ in range(2_000):
        story.step()
    story.end()
    world = story.world
    assert world.final() == dict.fromkeys(range(len(world.log)), Outcome.ACKED)
    assert (world.cursor.next_offset, world.cursor.claims, world.rows) == (len(world.log), {}, {})
