"""Nothing is lost between the log and a consumer, whatever becomes of notifications, reads and the log itself."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.deliveries import Hook, World, acked, kept, raw

from penstock.batch import Batch
from penstock.clock import us_to_datetime
from penstock.engine.policy import HEARTBEATS
from penstock.errors import StoreError
from penstock.offsets import Gap, Range

HEARTBEAT = HEARTBEATS["normal"]


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# --- notifications ----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    "step",
    ["cursors.put_subscription", "leases.acquire", "cursors.load", "parked.waiting", "log.bounds", "notifier.listen"],
)
async def test_publish_during_subscription_creation_is_delivered(world: World, step: str, moment: str) -> None:
    bus = world.bus()
    await bus.scheduled()  # which opens it; the topic is empty, so that nothing but this event brings a read
    # The first time that the bounds are asked for is to find where the subscription begins.
    at_call = 2 if step == "log.bounds" else 1
    calls = 0

    def racing(function: Hook, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call and moment == "before":
            world.append(b"0")
        result = function(*args, **options)
        if calls == at_call and moment == "after":
            world.append(b"0")
        return result

    world.store.hooks[step] = racing
    # Neither a heartbeat nor a later event helps: what is looked at when a shard is taken must do.
    async with world.running(bus.consume(raw, "s", mode="exclusive", heartbeat="off")) as running:
        await world.until(lambda: running.data == [b"0"], within=0.1)
        assert calls >= at_call
        races = world.dispatcher(bus).monitor.counts.subscription_creation_races_detected_total
        assert races == (step == "notifier.listen" or (step, moment) == ("log.bounds", "after"))


async def test_thousand_coalesced_notifications_deliver_all_in_order(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive", heartbeat="off")) as running:
        await world.publish(bus, b"0")
        await world.until(lambda: running.taken)
        counts = world.dispatcher(bus).monitor.counts
        taken = counts.notifier_notifications_total
        # The event loop does not run between them: a thousand hints are one.
        for number in range(1, 1001):
            world.append(b"%d" % number)
        await world.until(lambda: len(running.taken) == 1001, within=0.1)
        assert running.data == numbers(1001)
        assert counts.notifier_notifications_total == taken + 1
        assert counts.dispatcher_heartbeat_polls_total == 0


@pytest.mark.parametrize("death", ["cancelled", "failed"])
async def test_dead_notifier_is_restarted_and_nothing_is_lost(world: World, death: str) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.publish(bus, b"0")
        await world.until(lambda: running.taken)
        monitor = world.dispatcher(bus).monitor
        assert monitor._notifier is not None
        if death == "cancelled":
            monitor._notifier.cancel()
        else:
            monitor._reader = None
            world.store.fail("log.heads", StoreError("the ends cannot be read"), times=1)
        await world.publish(bus, b"1")
        await world.until(lambda: len(running.taken) == 2, within=HEARTBEAT)
        assert monitor.counts.notifier_task_deaths_total == 1
        # It is there again: what comes now waits for no heartbeat.
        polls = monitor.counts.dispatcher_heartbeat_polls_total
        await world.publish(bus, *numbers(10, 2))
        await world.until(lambda: len(running.taken) == 12, within=0.0)
        assert running.data == numbers(12)
        assert monitor.counts.dispatcher_heartbeat_polls_total == polls


async def test_random_notification_drops(world: World) -> None:
    chance = random.Random(5)
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        world.store.hears = lambda: chance.random() < 0.4
        published = []
        for number in range(100):
            published.append(world.clock.monotonic())
            await world.publish(bus, b"%d" % number)
            await world.run(chance.choice([0.0, 0.01, 0.2, 0.7]))
        await world.until(lambda: len(running.taken) == 100, within=HEARTBEAT)
        assert running.data == numbers(100)
        late = [taken.at - at for taken, at in zip(running.taken, published, strict=True)]
        assert max(late) <= HEARTBEAT
        counts = world.dispatcher(bus).monitor.counts
        assert counts.subscription_fallback_polls_total > 10
        assert counts.notifier_notifications_total > 10


@pytest.mark.parametrize("heartbeat", [*HEARTBEATS, 3.0])
async def test_without_any_notification_an_event_waits_for_one_heartbeat_of_its_subscription(
    world: World, heartbeat: str | float
) -> None:
    seconds = HEARTBEATS[heartbeat] if isinstance(heartbeat, str) else heartbeat
    bus = world.bus()
    world.store.hears = lambda: False
    async with world.running(bus.consume(raw, "s", mode="exclusive", heartbeat=heartbeat)) as running:
        for number in range(3):
            await world.run(seconds * 0.3)
            at = world.clock.monotonic()
            await world.publish(bus, b"%d" % number)
            await world.settle()
            assert len(running.taken) == number
            await world.run(seconds)
            assert running.data == numbers(number + 1)
            assert running.taken[-1].at <= at + seconds


async def test_a_thousand_subscriptions_of_a_process_are_one_look(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")):
        others = [bus.consume(raw, f"s{number}", mode="exclusive") for number in range(20)]
        for consumer in others:
            await consumer.__aenter__()
        counts = world.dispatcher(bus).monitor.counts
        await world.run(1.0)
        before = counts.passes
        await world.run(10.0)
        assert counts.passes - before == 10 / HEARTBEAT


# --- reads ------------------------------------------------------------------------------------


async def test_read_that_returns_nothing_is_retried_at_the_heartbeat(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.run(0.1)
        empty: list[float] = []

        def nothing(function: Hook, *args: Any, **options: Any) -> Any:
            if len(empty) < 2:
                empty.append(world.clock.monotonic())
                return []
            return function(*args, **options)

        world.store.hooks["log.read"] = nothing
        await world.publish(bus, b"0")
        await world.run(HEARTBEAT / 2)
        assert running.taken == []
        assert len(empty) == 1, "it was not repeated before the heartbeat"
        await world.until(lambda: running.taken, within=2 * HEARTBEAT)
        assert running.taken[0].at - empty[-1] <= HEARTBEAT
        assert running.data == numbers(1)


async def test_a_read_that_fails_is_repeated_until_it_succeeds_and_health_says_why(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        world.store.fail("log.read", OSError(5, "input/output error"), times=4)
        await world.publish(bus, b"0", b"1")
        await world.until(lambda: world.store.calls["log.read"] == 2, within=1)
        assert "input/output error" in running.consumer.trouble[0]["read"]
        await world.until(lambda: len(running.taken) == 2, within=10)
        assert running.data == numbers(2)
        assert running.consumer.trouble == {}


def leaving_out(lost: Range, *, times: int | None) -> Hook:
    """Return a log's `read` that leaves offsets out, so many times or for ever."""
    left = times

    def read(function: Hook, partition: Any, start: int, **options: Any) -> Any:
        nonlocal left
        items = function(partition, start, **options)
        if left == 0 or partition.number or not any(item.range.overlaps(lost) for item in items):
            return items
        left = None if left is None else left - 1
        found = []
        for item in items:
            found += [item.slice(Range(0, lost.start)), item.slice(Range(lost.stop, 1 << 40))]
        return [item for item in found if len(item)]

    return read


@pytest.mark.parametrize("times", [1, 2, None])
async def test_offset_gap_is_reread_or_declared(world: World, times: int | None) -> None:
    bus = world.bus()
    await bus.publish_batch(raw, numbers(8))
    world.store.hooks["log.read"] = leaving_out(Range(2, 5), times=times)
    declared: list[tuple[int, Gap]] = []
    consumer = bus.consume(raw, "s", mode="exclusive", on_gap=lambda *gap: declared.append(gap))
    async with world.running(consumer) as running:
        lost = [2, 3, 4] if times is None else []
        wanted = [offset for offset in range(8) if offset not in lost]
        await world.until(lambda: len(running.taken) == len(wanted), within=HEARTBEAT)
        assert running.offsets == wanted
        [seat] = world.dispatcher(bus).monitor._of_partition[world.info().partitions[0]]
        assert seat.engine is not None
        assert seat.engine.gaps == (3 if times is None else times)
        assert [(partition, gap.range) for partition, gap in declared] == ([(0, Range(2, 5))] if lost else [])
        await running.consumer.flush()
        assert world.cursor("s").next_offset == 8
        assert world.outcomes("s") == {"acked": wanted} | ({"gap": lost} if lost else {})


async def test_a_hole_that_the_log_declares_is_told_and_passed(world: World) -> None:
    bus = world.bus()
    await bus.publish_batch(raw, numbers(6))

    def read(function: Hook, partition: Any, start: int, **options: Any) -> Any:
        items: list[Batch | Gap] = [item.slice(Range(start, 2)) for item in function(partition, 0, **options)]
        items = [item for item in items if isinstance(item, Batch) and len(item)]
        if start < 4:
            items.append(Gap(max(start, 2), 4, "the disk lost them"))
        return items + [item.slice(Range(max(start, 4), 99)) for item in function(partition, max(start, 4), **options)]

    world.store.hooks["log.read"] = read
    declared: list[Gap] = []
    consumer = bus.consume(raw, "s", mode="exclusive", on_gap=lambda _, gap: declared.append(gap))
    async with world.running(consumer) as running:
        await world.until(lambda: running.offsets == [0, 1, 4, 5], within=HEARTBEAT)
        assert declared == [Gap(2, 4, "the disk lost them")]
        await running.consumer.flush()
        assert world.outcomes("s") == {"acked": [0, 1, 4, 5], "gap": [2, 3]}


async def test_what_is_trimmed_under_a_subscription_that_is_not_protected_is_declared(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, *[b"x" * 500 for _ in range(40)])
    partition = world.info().partitions[0]
    declared: list[Gap] = []
    consumer = bus.consume(
        raw, "s", mode="exclusive", protect=False, window=4, on_gap=lambda _, gap: declared.append(gap)
    )
    async with world.running(consumer, kept) as running:
        await world.until(lambda: running.taken)
        first = world.store.whole.log.trim(partition, 30)
        assert first > 4
        await running.deliveries[0].ack()
        running.handle = acked
        await world.until(lambda: running.offsets[-1] == 39, within=HEARTBEAT)
        [gap] = declared
        assert gap.stop == first
        assert running.offsets == [*range(gap.start), *range(first, 40)]
        await running.consumer.flush()
        assert world.outcomes("s") == {"acked": running.offsets, "gap": list(gap.range)}


# --- far behind, far ahead --------------------------------------------------------------------


async def test_segment_roll_during_dispatch_leaves_no_gap(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive", window=7)) as running:
        for number in range(200):
            await world.publish(bus, b"%d-" % number + b"x" * (number % 300))
            if number % 3 == 0:
                await asyncio.sleep(0)
        await world.until(lambda: len(running.taken) == 200)
        assert running.offsets == list(range(200))
        assert [data.split(b"-")[0] for data in running.data] == numbers(200)
        await running.consumer.flush()
        assert world.outcomes("s") == {"acked": list(range(200))}
    if world.kind == "file":
        log: Any = world.store.whole.log
        assert log.tail(log.handle(world.info().partitions[0])).segment_base > 150


async def test_a_consumer_far_behind_the_live_end_catches_up_without_a_restart(world: World) -> None:
    bus = world.bus()
    stopped = asyncio.Event()

    async def slow(delivery: Any) -> None:
        await stopped.wait()
        await delivery.ack()

    consumer = bus.consume(raw, "s", mode="exclusive", window=50, start="latest")
    async with world.running(consumer, slow) as running:
        for first in range(0, 3000, 500):
            await bus.publish_batch(raw, numbers(500, first))
            await world.run(3.0)
        assert len(running.taken) == 1
        [lag] = await bus.lag(raw, "s")
        assert (lag.lag, lag.unsettled, lag.oldest_seconds) == (3000, 3000, 18.0)
        stopped.set()
        await world.until(lambda: len(running.taken) == 3000)
        assert running.data == numbers(3000)
        await running.consumer.flush()
        [lag] = await bus.lag(raw, "s")
        assert (lag.lag, lag.unsettled, lag.oldest_seconds) == (0, 0, 0.0)


async def test_burst_of_ten_thousand_for_a_new_subscription_with_a_slow_consumer(world: World) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive", window=1000, heartbeat=1.0) as consumer:
        publishing = asyncio.ensure_future(
            asyncio.gather(*(bus.publish_batch(raw, numbers(500, first)) for first in range(0, 10_000, 500)))
        )
        found: list[int] = []

        async def consume() -> None:
            async for batch in consumer.batches(max_events=64):
                found.extend(batch.offsets.tolist())
                await world.clock.pause(0.01)
                await batch.ack()

        consuming = asyncio.ensure_future(consume())
        await world.until(lambda: len(found) == 10_000, step=1.0)
        await publishing
        assert found == list(range(10_000))
        await world.run(0.1)
        await consumer.flush()
        assert world.cursor("s").next_offset == 10_000
        consuming.cancel()


async def test_sustained_load_leaves_no_gap_and_needs_no_heartbeat(world: World) -> None:
    bus = world.bus()
    latencies: list[float] = []
    found: list[int] = []
    async with bus.consume(raw, "s", mode="exclusive") as consumer:

        async def consume() -> None:
            async for batch in consumer.batches():
                now = us_to_datetime(world.clock.time_us())
                latencies.extend((now - event.appended_at).total_seconds() for event in batch if event.appended_at)
                found.extend(batch.offsets.tolist())
                await batch.ack()

        consuming = asyncio.ensure_future(consume())
        for first in range(0, 10_000, 100):  # ten thousand in a second
            await bus.publish_batch(raw, numbers(100, first))
            await world.run(0.01)
        await world.until(lambda: len(found) == 10_000, within=0)
        assert found == list(range(10_000))
        assert sorted(latencies)[9_900] <= 0.005
        counts = world.dispatcher(bus).monitor.counts
        assert counts.subscription_fallback_polls_total <= counts.dispatcher_notifier_polls_total / 100
        assert counts.dispatcher_notifier_polls_total > 50
        consuming.cancel()
        await asyncio.wait([consuming])


async def test_highest_acked_first_on_an_idle_topic_then_another_nacked_is_redelivered(world: World) -> None:
    bus = world.bus()
    for key in "abc":
        await world.publish(bus, key.encode(), key=key)
    # Notifications and heartbeats have nothing to tell, for nothing is published any more.
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 3)
        first, second, third = running.deliveries
        await third.ack()
        await world.run(5.0)
        await first.nack(delay=0.2)
        await world.run(0.2)
        assert running.offsets == [0, 1, 2, 0]
        assert running.attempts == [1, 1, 1, 2]
        await running.deliveries[-1].ack()
        await second.ack()
        await running.consumer.flush()
        assert world.cursor("s").next_offset == 3
