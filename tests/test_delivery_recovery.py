"""A store that fails for a while, in whichever call: delivery goes on by itself, and nothing is lost or told twice."""

from __future__ import annotations

from typing import Any

import pytest
from tests.deliveries import Hook, World, acked, kept, raw

from penstock import Bus
from penstock.bus.deliveries import Retry
from penstock.errors import StaleDelivery, StoreError, StoreFull

SEEN = 0.5
"""Changes by others are seen within this time, twice the interval of looking."""


async def lanes(world: World, bus: Bus, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        await world.publish(bus, b"%d" % number, key=f"k{number}")


REFUSED = StoreError("not now")
BROKEN = OSError(5, "input/output error")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("log.read", BROKEN),
        ("log.heads", BROKEN),
        ("log.append", BROKEN),
        ("cursors.commit", BROKEN),
        ("cursors.commit", REFUSED),
        ("cursors.revision", REFUSED),
        ("cursors.settlements", REFUSED),
        ("leases.renew", BROKEN),
        ("leases.renew", REFUSED),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_any_call_that_fails_for_a_while_delays_and_loses_nothing(
    world: World, call: str, error: Exception
) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="failover"), acked) as running:
        await lanes(world, bus, 5)
        await world.until(lambda: len(running.taken) == 5)
        world.dispatcher(bus).monitor._reader = None  # it is asked for anew
        world.store.fail(call, error)
        for number in range(5, 10):
            world.append(b"%d" % number)
        await world.run(12)
        world.store.heal()
        await world.until(lambda: world.cursor("s").next_offset == 10, within=12)
        assert sorted(set(running.offsets)) == list(range(10))
        assert {attempt for attempt in running.attempts if attempt > 1} <= {2}
        await world.until(lambda: world.store.whole.cursors.settlements(1) == [], within=40, step=2)
    assert world.outcomes("s") == {"acked": list(range(10))}


async def test_after_trouble_with_the_ends_of_logs_heartbeats_are_back_within_a_second(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.run(1)
        world.dispatcher(bus).monitor._reader = None
        world.store.fail("log.heads", OSError(5, "input/output error"))
        world.append(b"0")
        await world.run(50)
        world.store.heal()
        await world.until(lambda: running.data == [b"0"], within=1.5)


async def test_after_trouble_with_leases_a_standby_takes_over_within_seconds(world: World) -> None:
    one, two = world.bus(), world.bus()
    await lanes(world, one, 3)
    async with (
        world.running(one.consume(raw, "s", mode="failover"), kept) as active,
        world.running(two.consume(raw, "s", mode="failover")) as standby,
    ):
        await world.until(lambda: len(active.taken) == 3)
        world.store.fail("leases.holder", OSError(5, "input/output error"))
        await world.run(50)
        await world.kill(one, active)
        await world.run(20)
        assert standby.taken == []
        world.store.heal()
        await world.until(lambda: len(standby.taken) == 3, within=5)


async def test_a_parked_row_that_cannot_be_fetched_is_fetched_later(world: World) -> None:
    bus = world.bus()
    await lanes(world, bus, 2)
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 2)
        await running.deliveries[0].nack(delay=10)
        await running.deliveries[1].ack()
        await running.consumer.flush()
        world.store.fail("parked.page", OSError(5, "input/output error"), times=3)
        running.handle = acked
        await world.run(10.05)
        assert "input/output error" in running.consumer.trouble[0]["fetch"]
        await world.until(lambda: len(running.taken) == 3, within=5)
        assert running.taken[-1][1:4] == (0, b"0", 2)
        assert running.consumer.trouble == {}
        await running.consumer.flush()
    assert world.outcomes("s") == {"parked": [0], "acked": [0, 1]}


async def test_a_ledger_without_room_keeps_its_records_and_holds_up_nothing(world: World) -> None:
    bus = world.bus()

    def refusing(function: Hook, partition: Any, *args: Any) -> Any:
        if partition.log_id != world.info().log_id:
            raise StoreFull("no room for the ledger")
        return function(partition, *args)

    world.store.hooks["log.append"] = refusing
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await lanes(world, bus, 20)
        await world.until(lambda: len(running.taken) == 20, within=SEEN)
        await world.run(20)
        assert world.store.whole.cursors.settlements(1) != []
        world.store.heal()
        await world.until(lambda: world.store.whole.cursors.settlements(1) == [], within=60, step=2)
    assert world.outcomes("s") == {"acked": list(range(20))}


async def test_an_on_gap_that_fails_changes_nothing(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, *[b"x" * 600 for _ in range(20)])

    def failing(_partition: int, _gap: Any) -> None:
        raise RuntimeError("no")

    consumer = bus.consume(raw, "s", mode="exclusive", protect=False, window=2, on_gap=failing)
    async with world.running(consumer, kept) as running:
        await world.until(lambda: running.taken)
        first = world.store.whole.log.trim(world.info().partitions[0], 15)
        running.handle = acked
        await running.deliveries[0].ack()
        await world.until(lambda: running.offsets[-1] == 19, within=1)
        assert running.offsets[-1 - (19 - first) :] == list(range(first, 20))


# --- the same process, twice ------------------------------------------------------------------


async def test_a_standby_in_the_same_process_takes_over_when_the_first_one_leaves(world: World) -> None:
    bus = world.bus()
    await lanes(world, bus, 3)
    async with world.running(bus.consume(raw, "s", mode="failover"), kept) as first:
        await world.until(lambda: len(first.taken) == 3)
        async with world.running(bus.consume(raw, "s", mode="failover")) as second:
            await world.run(5)
            assert second.taken == []
            await world.done(first.consumer.close())
            await world.until(lambda: len(second.taken) == 3, within=SEEN)
    assert world.outcomes("s") == {"acked": [0, 1, 2]}


@pytest.mark.parametrize("mode", ["exclusive", "failover"])
async def test_the_same_consumer_id_twice_in_one_process_replaces_the_first(world: World, mode: Any) -> None:
    bus = world.bus()
    await lanes(world, bus, 3)
    async with world.running(bus.consume(raw, "s", mode=mode, consumer_id="me"), kept) as first:
        await world.until(lambda: len(first.taken) == 3)
        async with world.running(bus.consume(raw, "s", mode=mode, consumer_id="me")) as second:
            await world.until(lambda: world.cursor("s").next_offset == 3, within=2)

            async def settle() -> None:
                await first.deliveries[0].ack()
                await first.consumer.flush()

            with pytest.raises(StaleDelivery):
                await world.done(settle())
            await world.run(5)
            # They do not take it from each other for ever.
            assert len(second.taken) == 3
            if mode == "exclusive":
                assert isinstance(first.task.exception(), StaleDelivery)
                first.looked_at()
    assert world.outcomes("s") == {"acked": [0, 1, 2]}


# --- limits -----------------------------------------------------------------------------------


async def test_when_no_more_may_wait_aside_reading_stops_and_health_names_the_lane(world: World) -> None:
    bus = world.bus()
    for number in range(40):
        await world.publish(bus, b"%d" % number, key="bad" if number % 2 == 0 else f"k{number}")

    async def blocked(delivery: Any) -> None:
        if delivery.position.offset == 0 and delivery.attempt == 1:
            await delivery.nack(delay=40)
        else:
            await delivery.ack()

    async with bus.consume(raw, "s", mode="exclusive"):
        await bus._deliveries.change(raw, "s", {"parked_max": 5})
    async with world.running(bus.consume(raw, "s", mode="exclusive", window=8), blocked) as running:
        await world.run(30)
        assert len(world.rows("s", "waiting")) == 5
        assert world.cursor("s").next_offset < 40
        assert "5 events wait aside, the limit" in running.consumer.trouble[0]["parked"]
        await world.until(lambda: len(running.taken) == 41, within=120)
        await running.consumer.flush()
        assert [taken.offset for taken in running.taken if taken.offset % 2 == 0] == [0, *range(0, 40, 2)]
        assert running.consumer.trouble == {}
    assert world.outcomes("s")["acked"] == list(range(40))


# --- what outlives a restart ------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["closed", "killed"])
async def test_attempts_and_a_halt_outlive_the_process(world: World, ending: str) -> None:
    bus = world.bus()
    await lanes(world, bus, 3)

    async def failing(delivery: Any) -> None:
        await (delivery.nack(delay=0) if delivery.event.data == b"1" else delivery.ack())

    retry = Retry(max_retries=2)
    consumer = bus.consume(raw, "s", mode="exclusive", consumer_id="one", exhausted="halt", retry=retry)
    async with world.running(consumer, failing) as running:
        await world.until(lambda: running.consumer.trouble)
        assert [taken.attempt for taken in running.taken if taken.offset == 1] == [1, 2, 3]
        await running.consumer.flush()
        await (world.kill(bus, running) if ending == "killed" else world.done(bus.close()))
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive", consumer_id="one")) as running:
        await world.until(lambda: running.consumer.trouble, within=5)
        assert "halted" in running.consumer.trouble[0]
        assert 1 not in running.offsets
        await bus.resume(raw, "s")
        await world.until(lambda: world.cursor("s").next_offset == 3, within=5)
        assert running.taken[-1][1:4] == (1, b"1", 1)
    assert world.outcomes("s") == {"acked": [0, 1, 2]}


@pytest.mark.parametrize("ending", ["closed", "killed"])
async def test_attempts_that_were_made_are_counted_on_by_the_next_process(world: World, ending: str) -> None:
    bus = world.bus()
    await lanes(world, bus, 2)

    async def failing(delivery: Any) -> None:
        await (delivery.nack(delay=8) if delivery.event.data == b"0" else delivery.nack(delay=1))

    consumer = bus.consume(raw, "s", mode="exclusive", consumer_id="one", retry=Retry(max_retries=2))
    async with world.running(consumer, failing) as running:
        await world.until(lambda: len(running.taken) == 2)
        await running.consumer.flush()
        await (world.kill(bus, running) if ending == "killed" else world.done(bus.close()))
    consumer = world.bus().consume(raw, "s", mode="exclusive", consumer_id="one")
    async with world.running(consumer, failing) as running:
        await world.until(lambda: len(world.rows("s", "dead")) == 2, within=100)
        seen = {offset: [taken.attempt for taken in running.taken if taken.offset == offset] for offset in (0, 1)}
        assert seen == {0: [2, 3], 1: [2, 3]}
        assert [row.attempts for row in world.rows("s", "dead")] == [3, 3]


# --- batches ----------------------------------------------------------------------------------


async def test_a_part_of_a_batch_that_fails_comes_again_alone_and_in_order(world: World) -> None:
    bus = world.bus()
    for number in range(12):
        await world.publish(bus, b"%d" % number, key=f"k{number % 3}")
    async with bus.consume(raw, "s", mode="exclusive") as consumer:
        batches = consumer.batches()
        first = await world.done(anext(batches))
        assert first.offsets.tolist() == list(range(12))
        await first.reject([5], "unreadable")
        await first.nack([3, 6, 7], delay=1, reason="later")
        await first.ack(offset for offset in range(12) if offset not in {3, 5, 6, 7})
        await first.ack([0, 1])  # again
        second = await world.done(anext(batches))
        assert sorted(second.offsets.tolist()) == [3, 6, 7]
        assert {event.offset: event.data for event in second} == {3: b"3", 6: b"6", 7: b"7"}
        assert second.attempts == {3: 2, 6: 2, 7: 2}
        assert second.to_arrow().num_rows == 3
        await second.ack()
        await consumer.flush()
        assert world.cursor("s").next_offset == 12
    assert [row.offset for row in world.rows("s", "dead")] == [5]
    assert world.outcomes("s") == {"acked": [offset for offset in range(12) if offset != 5], "dead": [5]}


async def test_a_shard_is_given_back_also_if_its_done_rows_cannot_be_removed(world: World) -> None:
    bus = world.bus()
    await lanes(world, bus, 1)

    async def later(delivery: Any) -> None:
        await (delivery.nack(delay=6) if delivery.attempt == 1 else delivery.ack())

    world.store.fail("parked.purge", BROKEN)
    async with world.running(bus.consume(raw, "s", mode="failover"), later) as running:
        await world.until(lambda: running.attempts == [1, 2], within=10)
        await world.until(lambda: world.outcomes("s").get("acked") == [0])
    assert world.store.calls["parked.purge"] > 0
    assert world.lease_of("s") is None
