"""Two things that meet at the wrong moment: an answer that is late, and what happened meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.deliveries import Hook, World, kept, raw

from penstock import Bus
from penstock.runtime import subscriptions

SEEN = 0.5
"""Changes by others are seen within this time, twice the interval of looking."""


async def test_a_policy_changed_while_a_consumer_joins_is_not_undone_by_what_the_consumer_had_read_before(
    world: World,
) -> None:
    bus, other = world.bus(), world.bus()
    await world.publish(other, b"0", b"1")
    async with other.consume(raw, "s", mode="failover"):
        pass
    loaded = world.hold(bus, "_load")
    async with world.running(bus.consume(raw, "s", mode="failover")) as running:
        await other.pause(raw, "s")
        await world.run(4 * SEEN)
        loaded.set()
        await world.run(10)
        assert running.taken == []
        await other.resume(raw, "s")
        await world.until(lambda: running.offsets == [0, 1], within=SEEN)


@pytest.mark.parametrize(("function", "name"), [("acquire", "shard/"), ("_load", "")], ids=["acquired", "loaded"])
async def test_a_lease_that_was_over_before_its_shard_was_had_is_not_held(
    world: World, function: str, name: str
) -> None:
    slow, other = world.bus(), world.bus()
    await world.publish(other, b"0")
    answered = world.hold(slow, function, name=name)
    async with world.running(slow.consume(raw, "s", mode="failover"), kept) as late:
        world.store.fail("leases.renew", OSError(5, "input/output error"))
        await world.run(15)
        world.store.heal()
        async with world.running(other.consume(raw, "s", mode="failover"), kept) as active:
            await world.until(lambda: active.offsets == [0], within=SEEN)
            # Whatever else it acquires lets the slow process be present again.
            async with world.running(slow.consume(raw, "t", mode="failover")) as present:
                await world.until(lambda: present.offsets == [0], within=SEEN)
                answered.set()
                await world.run(5)
                assert late.taken == []
            await world.kill(other, active)
            await world.until(lambda: late.offsets == [0], within=15)


async def cut_off_while_joining(world: World, bus: Bus) -> asyncio.Event:
    """Let consumer x be cancelled while the answer is under way that it has the lease; returns what lets it arrive."""
    answered = world.hold(bus, "acquire", name="shard/")
    joining = asyncio.ensure_future(bus.consume(raw, "s", mode="failover", consumer_id="x").__aenter__())
    await world.settle()
    joining.cancel()
    await asyncio.wait([joining])
    return answered


@pytest.mark.parametrize("late", [0, 5])
async def test_a_lease_of_which_nobody_heard_that_it_was_acquired_is_released(world: World, late: float) -> None:
    bus, other = world.bus(), world.bus()
    await world.publish(other, b"0")
    answered = await cut_off_while_joining(world, bus)
    await world.run(late)
    answered.set()
    async with world.running(other.consume(raw, "s", mode="failover")) as running:
        await world.until(lambda: running.offsets == [0], within=5)


async def test_a_lease_that_is_acquired_again_is_not_released_because_nobody_heard_of_the_first_time(
    world: World,
) -> None:
    bus, other = world.bus(), world.bus()
    await world.publish(other, b"0")
    first = await cut_off_while_joining(world, bus)
    again = world.hold(bus, "acquire", name="shard/")
    async with world.running(bus.consume(raw, "s", mode="failover", consumer_id="x"), kept) as late:
        await world.settle()
        first.set()
        await world.run(5)
        again.set()
        async with world.running(other.consume(raw, "s", mode="failover"), kept) as waiting:
            await world.run(5)
            assert (late.offsets, waiting.offsets) == ([0], [])


async def test_a_row_that_is_gone_because_of_a_seek_does_not_let_what_follows_it_begin(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1", b"2", key="k")
    handed: list[int] = []

    async def later_twice(delivery: Any) -> None:
        handed.append(delivery.position.offset)
        await (delivery.nack(delay=10) if handed in ([0], [0, 0]) else delivery.ack())

    def moved_before(find: Hook, *args: Any, **options: Any) -> Any:
        # In the very moment before the row is fetched: its owner cannot have seen it yet.
        del world.store.hooks["parked.page"]
        subscriptions.seek(world.store.whole, world.info(), "s", 0, now_us=world.clock.time_us())
        return find(*args, **options)

    async with world.running(bus.consume(raw, "s", mode="failover"), later_twice):
        # With the first row those behind it have come into memory, where they wait for it.
        await world.until(lambda: handed == [0, 0], within=12)
        world.store.hooks["parked.page"] = moved_before
        await world.until(lambda: len(handed) == 5, within=15)
        assert handed == [0, 0, 0, 1, 2]
    assert (world.cursor("s").next_offset, world.cursor("s").generation) == (3, 1)
