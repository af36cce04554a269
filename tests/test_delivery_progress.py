"""Where a subscription is: cursors, lag, checkpoints, restarts, seeks, and the ledger that proves it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.deliveries import World, acked, kept, raw, wide

from penstock import Bus
from penstock.bus.deliveries import Checkpoint, Retry
from penstock.clock import us_to_datetime
from penstock.errors import StaleDelivery, SubscriptionMismatch, UnknownSubscription, UsageError
from penstock.rows import Cursor, Shard, Subscription

HEARTBEAT = 0.5


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def publish_lanes(world: World, bus: Bus, count: int) -> None:
    """Publish events each of which is a lane of its own."""
    for number in range(count):
        await world.publish(bus, b"%d" % number, key=f"k{number}")


async def one_lag(bus: Bus, name: str = "s") -> tuple[int, int, int]:
    [lag] = await bus.lag(raw, name)
    return lag.next_offset, lag.head, lag.lag


# --- lag and cursors --------------------------------------------------------------------------


async def test_lag_is_exact_from_the_empty_log_on(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        assert await one_lag(bus) == (0, 0, 0)
        await world.publish(bus, b"0", key="a")
        assert await one_lag(bus) == (0, 1, 1)  # nothing acked is not "0 acked"
        await world.until(lambda: len(running.taken) == 1)
        await running.deliveries[0].ack()
        await running.consumer.flush()
        assert await one_lag(bus) == (1, 1, 0)
        for number in range(1, 5):
            await world.publish(bus, b"%d" % number, key=f"k{number}")
        assert await one_lag(bus) == (1, 5, 4)
        await world.until(lambda: len(running.taken) == 5)
        for delivery in running.deliveries[1:]:
            await delivery.ack()
        await running.consumer.flush()
        assert await one_lag(bus) == (5, 5, 0)
        assert not (await bus.lag(raw, "s"))[0].has_lag


async def test_lag_counts_what_is_settled_ahead_parked_and_dead_and_the_age_of_the_oldest(world: World) -> None:
    bus = world.bus()
    for number in range(6):
        await world.publish(bus, b"%d" % number, key=f"k{number}")
        await world.run(2.0)
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 6)
        deliveries = running.deliveries
        await deliveries[0].nack(delay=1000)
        await deliveries[1].reject("never")
        await deliveries[3].ack()
        await running.consumer.flush()
        [lag] = await bus.lag(raw, "s")
        # Offset 0 waits aside and 1 is dead: neither holds the cursor back.
        assert (lag.next_offset, lag.head, lag.lag, lag.unsettled) == (2, 6, 4, 3)
        assert (lag.parked, lag.dead) == (1, 1)
        assert lag.oldest_seconds == 8.0
        assert not lag.external


async def test_acks_in_any_order_move_the_cursor_to_the_first_unsettled(world: World) -> None:
    bus = world.bus()
    await publish_lanes(world, bus, 4)
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 4)
        await running.deliveries[0].ack()
        cursors = []
        for index in (3, 1, 2):
            await running.deliveries[index].ack()
            await running.deliveries[index].ack()  # again: it changes nothing
            await running.consumer.flush()
            cursors.append(world.cursor("s").next_offset)
        assert cursors == [1, 2, 4]
    assert world.outcomes("s") == {"acked": [0, 1, 2, 3]}
    assert [record.next_offset for record in world.records("s")][-3:] == [1, 2, 4]


async def test_lag_shows_subscriptions_that_are_driven_from_outside(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, *numbers(10))
    info = world.info()
    world.store.whole.cursors.put_subscription(
        Subscription(log_id=info.log_id, name="query", mode="external", external=True),
        [Cursor(shard=Shard(info.log_id, "query", 0, 0), next_offset=4)],
    )
    async with bus.consume(raw, "s", mode="exclusive"):
        found = {lag.subscription: (lag.lag, lag.external) for lag in await bus.lag()}
        assert found == {"query": (6, True), "s": (10, False)}
        for refused in (bus.seek(raw, "query", "latest"), bus.pause(raw, "query")):
            with pytest.raises(SubscriptionMismatch):
                await refused


# --- restarts ---------------------------------------------------------------------------------


async def test_restart_before_the_first_ack_and_when_idle_resumes_at_the_right_place(world: World) -> None:
    first = world.bus()
    await world.publish(first, b"before")
    async with world.running(first.consume(raw, "s", mode="exclusive", start="latest"), kept) as running:
        await world.publish(first, b"0")
        await world.until(lambda: running.taken)
        await world.done(first.close())
    second = world.bus()
    async with world.running(second.consume(raw, "s", mode="exclusive", start="latest")) as running:
        await world.until(lambda: running.taken)
        assert running.data == [b"0"]
        await world.run(5)
        await world.done(second.close())
    third = world.bus()
    await world.publish(third, b"1")  # while nobody consumes
    async with world.running(third.consume(raw, "s", mode="exclusive", start="latest")) as running:
        await world.until(lambda: running.taken)
        assert running.data == [b"1"]
    assert world.outcomes("s") == {"acked": [1, 2]}


@pytest.mark.parametrize("ending", ["size", "delay", "flush", "shutdown"])
async def test_batched_checkpoints_are_written_by_size_by_delay_and_at_shutdown(world: World, ending: str) -> None:
    bus = world.bus()
    checkpoint = Checkpoint(size=10, delay=30)
    async with world.running(bus.consume(raw, "s", mode="exclusive", checkpoint=checkpoint)) as running:
        await world.publish(bus, *numbers(9))
        await world.until(lambda: len(running.taken) == 9)
        await world.run(29)
        assert world.cursor("s").next_offset == 0
        match ending:
            case "size":
                await world.publish(bus, b"9")
                await world.settle()
            case "delay":
                await world.run(1)
            case "flush":
                await running.consumer.flush()
            case "shutdown":
                await world.done(bus.close())
        assert world.cursor("s").next_offset == (10 if ending == "size" else 9)
    assert len(world.records("s")) == 1


async def test_each_settlement_is_written_at_once_unless_told_otherwise(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        for number in range(5):
            await world.publish(bus, b"%d" % number)
            await world.until(lambda: len(running.taken) == number + 1, within=0)  # noqa: B023 - used at once
            assert world.cursor("s").next_offset == number + 1


# --- where it begins --------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["earliest", "latest", "offset", "time", "by partition"])
async def test_a_new_subscription_begins_where_it_is_told(world: World, start: str) -> None:
    bus = world.bus()
    await world.publish(bus, *numbers(3))
    await world.run(10)
    moment = us_to_datetime(world.clock.time_us())
    await world.publish(bus, *numbers(3, 3))
    starts: dict[str, Any] = {"offset": 2, "time": moment, "by partition": {0: 5}}
    wanted = {"earliest": 0, "latest": 6, "offset": 2, "time": 3, "by partition": 5}[start]
    async with world.running(bus.consume(raw, "s", mode="exclusive", start=starts.get(start, start))) as running:
        await world.publish(bus, b"6")
        await world.until(lambda: len(running.taken) == 7 - wanted)
        assert running.data == numbers(7 - wanted, wanted)
    # It matters to a new one alone.
    async with world.running(bus.consume(raw, "s", mode="exclusive", start="earliest")) as running:
        await world.run(2)
        assert running.taken == []


async def test_wrong_starts_are_refused_and_nothing_is_created(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    wrong: list[tuple[Any, Any, str]] = [
        (raw, 5, "holds offsets"),
        (raw, "newest", "a start is"),
        (raw, {3: 0}, "partitions 0 to 0, not 3"),
        (wide, 0, "say which one"),
        (raw, datetime(2026, 1, 1), "no time zone"),  # noqa: DTZ001 - that is what is wrong
        (raw, True, "a start is"),
    ]
    for topic, start, said in wrong:
        with pytest.raises(UsageError, match=said):
            await bus.consume(topic, "s", mode="exclusive", start=start).__aenter__()
    assert await bus.subscriptions(raw) == await bus.subscriptions(wide) == []


async def test_a_start_for_some_partitions_leaves_no_partition_without_a_cursor(world: World) -> None:
    bus = world.bus()
    for number in range(40):
        await world.publish(bus, b"%d" % number, topic=wide, key=f"k{number}")
    async with world.running(bus.consume(wide, "s", mode="exclusive", start={1: 1})) as running:
        await world.until(lambda: len(running.taken) == 39, within=1)
        await running.consumer.flush()
        assert [lag.lag for lag in await bus.lag(wide, "s")] == [0, 0, 0, 0]
        assert (1, 0) not in {(taken.partition, taken.offset) for taken in running.taken}


# --- seeks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own bus", "another bus"])
@pytest.mark.parametrize("to", ["forward", "back", "time", "earliest"])
async def test_seek_while_a_consumer_runs_makes_what_is_in_hand_stale_and_goes_on_there(
    world: World, to: str, elsewhere: bool
) -> None:
    bus = world.bus()
    await world.publish(bus, *numbers(10))
    await world.run(10)
    moment = us_to_datetime(world.clock.time_us())
    await world.publish(bus, *numbers(10, 10))
    target: Any = {"forward": 15, "back": 2, "time": moment, "earliest": "earliest"}[to]
    place = {"forward": 15, "back": 2, "time": 10, "earliest": 0}[to]

    async def some(delivery: Any) -> None:
        if delivery.position.offset < 5:
            await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="exclusive"), some) as running:
        await world.until(lambda: len(running.taken) == 6)
        await running.consumer.flush()
        moved = await (world.bus() if elsewhere else bus).seek(raw, "s", target)
        assert moved == {0: (5, place)}
        running.handle = acked
        await world.until(lambda: running.offsets[-1] == 19, within=2)
        assert running.offsets[6:] == list(range(place, 20))
        with pytest.raises(StaleDelivery, match="moved"):
            await running.deliveries[5].ack()
        await running.consumer.flush()
        cursor = world.cursor("s")
        assert (cursor.next_offset, cursor.generation) == (20, 1)
    skipped = [offset for record in world.records("s") for span in record.offsets("skipped") for offset in span]
    assert skipped == list(range(5, place))


async def test_seek_passes_over_parked_rows_and_dead_letters_stay(world: World) -> None:
    bus = world.bus()
    await publish_lanes(world, bus, 6)
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 6)
        await running.deliveries[0].nack(delay=100)
        await running.deliveries[1].reject("no")
        await running.deliveries[2].ack()
        await running.deliveries[5].nack(delay=100)
        await running.consumer.flush()
        assert await bus.seek(raw, "s", 4) == {0: (3, 4)}
        running.handle = acked
        await world.until(lambda: world.cursor("s").next_offset == 6, within=2)
        assert running.offsets[6:] == [4, 5]
        await world.run(200)
        assert running.offsets[6:] == [4, 5]
        assert [row.offset for row in world.rows("s", "waiting")] == []
        assert [row.offset for row in world.rows("s", "dead")] == [1]
        # Back again: what is there is delivered, the dead letter too, for it is an event like the others.
        await bus.seek(raw, "s", "earliest")
        await world.until(lambda: world.cursor("s").next_offset == 6 and world.cursor("s").generation == 2)
        assert running.offsets[8:] == list(range(6))


async def test_seek_of_one_partition_leaves_the_others(world: World) -> None:
    bus = world.bus()
    for number in range(40):
        await world.publish(bus, b"%d" % number, topic=wide, key=f"k{number}")
    async with world.running(bus.consume(wide, "s", mode="exclusive")) as running:
        await world.until(lambda: len(running.taken) == 40)
        await running.consumer.flush()
        at = world.cursor("s", 2, wide).next_offset
        assert at > 0
        assert await bus.seek(wide, "s", "earliest", partition=2) == {2: (at, 0)}
        await world.until(lambda: len(running.taken) == 40 + at, within=2)
        assert {taken.partition for taken in running.taken[40:]} == {2}
        with pytest.raises(UsageError, match="partitions 0 to 3, not 4"):
            await bus.seek(wide, "s", "earliest", partition=4)
        with pytest.raises(UnknownSubscription):
            await bus.seek(wide, "nobody", "earliest")


# --- the ledger -------------------------------------------------------------------------------


async def test_the_ledger_holds_every_outcome_exactly_and_chains_also_after_kills(world: World) -> None:
    bus = world.bus()
    for number in range(60):
        fields: dict[str, Any] = {"ttl": 5} if number % 20 == 7 else {}
        await world.publish(bus, b"%d" % number, key=f"k{number}", **fields)
    await world.run(6)
    fate: dict[int, str] = {}

    async def mixed(delivery: Any) -> None:
        offset = delivery.position.offset
        if offset % 10 == 3:
            fate[offset] = "dead"
            await delivery.reject("no")
        elif offset % 10 == 4 and delivery.attempt == 1:
            await delivery.nack(delay=20)
        else:
            fate[offset] = "acked"
            await delivery.ack()

    for life in range(3):
        consumer = bus.consume(raw, "s", mode="exclusive", consumer_id="one", retry=Retry(max_retries=5))
        async with world.running(consumer, mixed) as running:
            await world.until(lambda: len(running.taken) >= 15 or world.cursor("s").next_offset == 60, within=5)
            if life < 2:
                await world.kill(bus, running)
                bus = world.bus()
                continue
            await world.until(lambda: world.cursor("s").next_offset == 60)
            await world.until(lambda: not world.rows("s", "waiting"))
            await running.consumer.flush()
            await world.run(11)  # a killed mover's lease is over, and its records are moved
            assert world.store.whole.cursors.settlements(1) == []
    outcomes = world.outcomes("s")
    expired = [7, 27, 47]
    assert outcomes["expired"] == expired
    assert outcomes["dead"] == [offset for offset in range(60) if offset % 10 == 3]
    assert outcomes["acked"] == [o for o in range(60) if o % 10 != 3 and o not in expired]
    assert set(outcomes["parked"]) <= {offset for offset in range(60) if offset % 10 == 4}
    latencies = sum(sum(record.latencies) for record in world.records("s"))
    assert 0 < latencies <= len(outcomes["acked"])
    # Internal topics have no ledger, and lag does not show them.
    assert {lag.topic for lag in await bus.lag()} == {"raw"}


async def test_the_ledger_is_moved_once_by_two_processes(world: World) -> None:
    one, two = world.bus(), world.bus()
    await publish_lanes(world, one, 30)
    async with (
        world.running(one.consume(raw, "a", mode="exclusive")) as first,
        world.running(two.consume(raw, "b", mode="exclusive")) as second,
    ):
        await world.until(lambda: len(first.taken) == len(second.taken) == 30)
        await world.run(20)
        assert world.store.whole.cursors.settlements(1) == []
    assert world.outcomes("a") == world.outcomes("b") == {"acked": list(range(30))}


async def test_a_ledger_whose_topic_was_deleted_goes_on_in_a_new_one(world: World) -> None:
    bus, store = world.bus(), world.store.whole

    def moved() -> set[str]:
        """Return the ledgers that hold something, if nothing waits."""
        found = [info for info in store.log.topics() if info.name == "_deliveries"]
        waiting = store.cursors.settlements(1)
        return {info.log_id for info in found if store.log.bounds(info.partitions[0]).stop and not waiting}

    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await publish_lanes(world, bus, 5)
        await world.until(lambda: len(running.taken) == 5 and bool(moved()), within=10)
        [ledger] = moved()
        store.log.delete_topic(ledger)
        await publish_lanes(world, bus, 5)
        await world.until(lambda: len(running.taken) == 10 and bool(moved()), within=30)
        assert ledger not in moved()


async def test_delayed_publish_reaches_a_consumer_at_its_time_also_across_restarts(world: World) -> None:
    bus = world.bus()
    await bus.publish(raw, b"month", delay=timedelta(days=30))
    await bus.publish(raw, b"second", delay=1)
    await world.publish(bus, b"now")
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: running.data == [b"now"], within=0.5)
        await world.until(lambda: running.data == [b"now", b"second"], within=2)
        assert running.taken[1].at >= 1
        await running.consumer.flush()
        assert await one_lag(bus) == (2, 2, 0)  # what is not due pins nothing
        await world.done(bus.close())
    world.clock.advance(timedelta(days=29))
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.run(60)
        assert running.taken == []
        world.clock.advance(timedelta(days=1))
        await world.until(lambda: running.data == [b"month"], within=5)
        await world.run(60)
        assert len(running.taken) == 1
