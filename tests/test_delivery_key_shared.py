"""`key_shared`: several consumers at a time, each with its part of the keys, in one process and in several."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.deliveries import Running, World, acked, kept, raw, wide

from penstock import Checkpoint
from penstock.engine.messages import Ack
from penstock.errors import StaleDelivery
from penstock.runtime.committer import Entry
from penstock.runtime.dispatcher import STANDBY_SECONDS
from penstock.runtime.slots import Holding, dues, spread

if TYPE_CHECKING:
    from penstock import Bus

SEEN = 1.0
"""Whatever others do is seen within this time."""


async def publish(world: World, bus: Bus, count: int, *, keys: int = 40, first: int = 0, topic: Any = raw) -> None:
    for number in range(first, first + count):
        await world.publish(bus, b"%d" % number, key=f"key-{number % keys}", topic=topic)


def by_key(*runnings: Running, keys: int = 40) -> dict[int, list[int]]:
    """Return the numbers of each key, in the order in which they were handed over to anybody."""
    taken = sorted(
        ((each.at, place, each.data) for running in runnings for place, each in enumerate(running.taken)),
        key=lambda each: each[:2],
    )
    found: defaultdict[int, list[int]] = defaultdict(list)
    for _, _, data in taken:
        found[int(data) % keys].append(int(data))
    return dict(found)


def assert_in_order(*runnings: Running, keys: int = 40) -> None:
    for numbers in by_key(*runnings, keys=keys).values():
        first = list(dict.fromkeys(numbers))
        assert first == sorted(first)


# --- who is due what --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 100])
def test_slots_are_due_evenly(count: int) -> None:
    due = dues([f"c{number:03}" for number in range(count)])
    assert sum(due.values()) == 64
    assert max(due.values()) - min(due.values()) <= 1


def test_a_consumer_that_comes_or_goes_moves_as_few_slots_as_can_be() -> None:
    whose = spread(range(64), [1], {})
    assert set(whose.values()) == {1}
    for consumers in ([1, 2], [1, 2, 3], [1, 3], [1, 3, 4, 5], [1, 3, 4, 5, 6], [4]):
        after = spread(range(64), consumers, whose)
        had, has = Counter(whose.values()), Counter(after.values())
        assert sum(has.values()) == 64
        assert max(has[consumer] for consumer in consumers) - min(has[consumer] for consumer in consumers) <= 1
        # Nobody loses a slot to get another one.
        stayed = sum(after[slot] == whose[slot] for slot in after)
        assert stayed == sum(min(had[consumer], has[consumer]) for consumer in consumers)
        whose = after


# --- in one process ---------------------------------------------------------------------------


async def test_one_consumer_has_everything(world: World) -> None:
    bus = world.bus()
    await publish(world, bus, 50)
    async with world.running(bus.consume(raw, "s")) as running:
        await world.until(lambda: world.cursor("s").next_offset == 50, within=SEEN)
        assert sorted(running.offsets) == list(range(50))
        assert_in_order(running)
    assert world.outcomes("s") == {"acked": list(range(50))}
    assert world.store.whole.leases.held("slot/") == []
    assert world.store.whole.leases.held("member/") == []


async def test_several_consumers_share_the_keys_and_each_key_stays_with_one(world: World) -> None:
    bus = world.bus()
    runnings = []
    async with (
        world.running(bus.consume(raw, "s")) as one,
        world.running(bus.consume(raw, "s")) as two,
        world.running(bus.consume(raw, "s")) as three,
    ):
        runnings = [one, two, three]
        await publish(world, bus, 120)
        await world.until(lambda: world.cursor("s").next_offset == 120, within=SEEN)
        keys = [{int(data) % 40 for data in running.data} for running in runnings]
        assert all(keys)
        assert sum(map(len, keys)) == 40
        assert_in_order(*runnings)
    assert world.outcomes("s") == {"acked": list(range(120))}


async def test_two_consumers_of_a_process_have_twice_the_window_of_one_until_one_leaves(world: World) -> None:
    bus = world.bus()

    def window(running: Running) -> int:
        [seat] = running.consumer._member.crew.seats  # type: ignore[union-attr]
        assert seat.engine is not None
        return seat.engine.policy.window_events

    async with world.running(bus.consume(raw, "s", window=10)) as stays:
        assert window(stays) == 10
        async with world.running(bus.consume(raw, "s")):
            assert window(stays) == 20
        assert window(stays) == 10


async def test_what_a_consumer_holds_goes_to_the_others_when_it_leaves(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s")) as stays:
        async with world.running(bus.consume(raw, "s"), kept) as leaves:
            await publish(world, bus, 60)
            await world.until(lambda: leaves.taken and len(stays.taken) + len(leaves.taken) >= 42, within=SEEN)
            held = set(leaves.offsets)
        await world.until(lambda: world.cursor("s").next_offset == 60, within=SEEN)
        assert held <= set(stays.offsets)
        assert_in_order(stays)
        assert {taken.attempt for taken in stays.taken} == {1}


async def test_an_ack_wakes_whoever_waits_for_the_same_keys_by_now(world: World) -> None:
    bus = world.bus()
    # Nothing is written meanwhile, which would wake everybody.
    consume = partial(bus.consume, raw, "s", checkpoint=Checkpoint(size=1_000, delay=3600))
    async with world.running(consume(), kept) as had:
        await publish(world, bus, 40)
        await world.until(lambda: len(had.taken) == 40, within=SEEN)
        async with world.running(consume()) as has:
            await publish(world, bus, 40, first=40)
            await world.settle()
            assert not has.taken, "the first event of each key is in hand"
            for delivery in had.deliveries[:40]:
                await delivery.ack()
            await world.settle()
            assert has.taken, "half of the keys are this consumer's now"
            assert min(has.offsets) >= 40


async def test_events_of_all_partitions_are_shared(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(wide, "s")) as one, world.running(bus.consume(wide, "s")) as two:
        await publish(world, bus, 100, topic=wide)
        await world.until(lambda: len(one.taken) + len(two.taken) == 100, within=SEEN)
        assert {taken.partition for taken in one.taken} == {taken.partition for taken in two.taken} == {0, 1, 2, 3}
        assert_in_order(one, two)


# --- in several processes ---------------------------------------------------------------------


async def test_a_process_that_comes_has_its_part_and_nothing_is_handed_over_twice(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(first.consume(raw, "s")) as one:
        await publish(world, first, 40)
        await world.until(lambda: len(one.taken) == 40, within=SEEN)
        async with world.running(second.consume(raw, "s")) as two:
            await world.until(lambda: len(world.store.whole.leases.held("slot/")) == 64, within=SEEN)
            await world.run(SEEN)
            await publish(world, first, 80, first=40)
            await world.until(lambda: world.cursor("s").next_offset == 120, within=SEEN)
            assert len(one.taken) + len(two.taken) == 120
            assert 20 <= len(two.taken) <= 60
            assert_in_order(one, two)
        # It gives its part back, and the first one has everything again.
        await publish(world, first, 40, first=120)
        await world.until(lambda: world.cursor("s").next_offset == 160, within=SEEN)
    assert world.outcomes("s") == {"acked": list(range(160))}


async def test_a_slot_moves_when_nothing_of_it_is_in_hand_any_more(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(first.consume(raw, "s"), kept) as one:
        await publish(world, first, 40)
        await world.until(lambda: len(one.taken) == 40, within=SEEN)
        async with world.running(second.consume(raw, "s")) as two:
            await publish(world, first, 40, first=40)
            await world.run(3)
            # All slots of these keys are in hand: what comes behind waits, for whoever will have them.
            assert {int(data) % 40 for data in two.data} & {int(data) % 40 for data in one.data} == set()
            for delivery in one.deliveries[:40]:
                await delivery.ack()
            one.handle = acked
            await world.until(lambda: world.cursor("s").next_offset == 80, within=5)
            assert two.taken
            assert len(one.taken) + len(two.taken) == 80
            assert_in_order(one, two)
    assert world.outcomes("s") == {"acked": list(range(80))}


async def test_a_lease_is_released_when_no_step_that_carries_it_is_on_its_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = world.bus(), world.bus()
    backend: Any = first._make_backend()
    call, slow, held = backend.call, asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def calling(called: Any, *args: Any, **options: Any) -> Any:
        if called.__name__ == "release_some" and args[0][0].name.startswith("slot/"):
            order.append("release")
        if called.__name__ == "_commit" and held.is_set():
            await slow.wait()
            order.append("commit")
        return await call(called, *args, **options)

    backend.call = calling
    left = Holding.left

    def leaves(self: Holding, slots: Any) -> Any:
        # In this very moment something of a slot that stays is settled, and its step begins with the old fences.
        if not held.is_set():
            held.set()
            staying = [each for each in one.deliveries if not each.stale and int(each.event.data) in mine]
            one.consumer._member.crew.seats[0].tell(Ack(np.array([staying[0].position.offset])))  # type: ignore[union-attr]
            engine: Any = self.seats[0].engine
            entry = Entry(self.seats[0], engine, engine.take_step())
            writing.append(asyncio.ensure_future(dispatcher.committer._write([entry])))
        return left(self, slots)

    writing: list[Any] = []
    async with world.running(first.consume(raw, "s"), kept) as one:
        await publish(world, first, 40)
        await world.until(lambda: len(one.taken) == 40, within=SEEN)
        dispatcher = world.dispatcher(first)
        mine = {int(data) for data in one.data}
        monkeypatch.setattr(Holding, "left", leaves)
        async with world.running(second.consume(raw, "s"), kept):
            await world.until(held.is_set, within=3)
            await world.run(0.2)
            assert order == []
            slow.set()
            await world.done(writing[0])
            dispatcher.committer.wake()
            await world.until(lambda: "release" in order, within=3)
            assert order[0] == "commit"


async def test_a_look_that_a_busy_event_loop_made_long_does_not_put_off_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), kept):
        watch = world.dispatcher(bus).watch
        look = watch._look_at_crews

        async def look_slowly() -> None:
            await look()
            world.clock.advance(2)  # as long as it took until the event loop came back to it

        monkeypatch.setattr(watch, "_look_at_crews", look_slowly)
        assert await watch._round() == STANDBY_SECONDS, "slots that are free would wait for that"


async def test_the_slots_of_a_killed_process_are_taken_over(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(first.consume(raw, "s"), kept) as one, world.running(second.consume(raw, "s")) as two:
        await world.run(SEEN)
        await publish(world, second, 80)
        await world.until(lambda: len(two.taken) + len(one.taken) >= 60, within=SEEN)
        lost = set(one.offsets)
        assert lost
        await world.kill(first, one)
        await world.until(lambda: world.cursor("s").next_offset == 80, within=15)
        assert lost <= set(two.offsets)
        assert_in_order(two)
    assert world.outcomes("s") == {"acked": list(range(80))}


async def test_a_process_that_wakes_up_late_is_told_that_its_slots_are_others(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(first.consume(raw, "s"), kept) as one, world.running(second.consume(raw, "s")) as two:
        await world.run(SEEN)
        await publish(world, second, 40)
        await world.until(lambda: len(two.taken) + len(one.taken) >= 30, within=SEEN)
        frozen = list(one.deliveries)
        thawed = world.freeze(first)
        await world.until(lambda: world.cursor("s").next_offset == 40, within=30)
        one.handle = acked

        async def settle() -> None:
            await frozen[0].ack()
            await one.consumer.flush()

        settling = asyncio.ensure_future(settle())
        await world.settle()
        thawed.set()
        with pytest.raises(StaleDelivery):
            await world.done(settling)
        await publish(world, second, 40, first=40)
        await world.until(lambda: world.cursor("s").next_offset == 80, within=15)
        assert_in_order(two)
    assert world.outcomes("s") == {"acked": list(range(80))}


# --- failures ---------------------------------------------------------------------------------


async def test_a_blocked_key_stalls_only_itself(world: World) -> None:
    bus = world.bus()

    async def failing(delivery: Any) -> None:
        bad = int(delivery.event.data) % 40 == 7
        await (delivery.nack(delay=20) if bad and delivery.attempt == 1 else delivery.ack())

    async with world.running(bus.consume(raw, "s"), failing) as one, world.running(bus.consume(raw, "s"), failing):
        await publish(world, bus, 120)
        await world.until(lambda: world.cursor("s").next_offset == 120, within=SEEN)
        assert sorted(row.offset for row in world.rows("s", "waiting")) == [7, 47, 87]
        assert len({row.shard.slot for row in world.rows("s", "waiting")}) == 1
        await world.until(lambda: not world.rows("s", "waiting"), within=70)
        assert one.consumer.trouble == {}
    assert world.outcomes("s")["acked"] == list(range(120))


async def test_a_parked_key_goes_with_its_slot(world: World) -> None:
    first, second = world.bus(), world.bus()

    async def failing(delivery: Any) -> None:
        await (delivery.nack(delay=20) if delivery.attempt == 1 else delivery.ack())

    async with world.running(first.consume(raw, "s"), failing):
        await publish(world, first, 40)
        await world.until(lambda: len(world.rows("s", "waiting")) == 40, within=SEEN)
        async with world.running(second.consume(raw, "s"), failing) as two:
            await world.run(SEEN)
            await world.until(lambda: not world.rows("s", "waiting"), within=40)
            assert 10 <= len(two.taken) <= 30
            assert {taken.attempt for taken in two.taken} == {2}


async def test_a_seek_is_seen_by_all(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(first.consume(raw, "s")) as one, world.running(second.consume(raw, "s")) as two:
        await world.run(SEEN)
        await publish(world, first, 40)
        await world.until(lambda: world.cursor("s").next_offset == 40, within=SEEN)
        await first.seek(raw, "s", 0)
        await world.until(lambda: len(one.taken) + len(two.taken) == 80, within=5)
        await world.until(lambda: world.cursor("s").next_offset == 40, within=SEEN)
        assert world.cursor("s").generation == 1
