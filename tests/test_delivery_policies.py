"""What a user may choose of a subscription, and change while it runs: rate, window, retry, pause, expiry, heartbeat."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Literal

import pytest
from tests.deliveries import World, acked, kept, raw

from penstock import Topic
from penstock.bus.deliveries import Checkpoint, Retry
from penstock.errors import UsageError

HEARTBEAT = 0.5
SEEN = 0.5
"""Changes by others are seen within this time, twice the interval of looking."""


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def lanes(world: World, bus: Any, count: int, **fields: Any) -> None:
    for number in range(count):
        await world.publish(bus, b"%d" % number, key=f"k{number}", **fields)


async def failing(delivery: Any) -> None:
    await delivery.nack(reason="no")


# --- rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["single", "batches", "no notifications"])
async def test_a_dispatch_limit_of_ten_a_second_delivers_a_hundred_at_that_rate(world: World, shape: str) -> None:
    bus = world.bus()
    await lanes(world, bus, 100)
    if shape == "no notifications":
        world.store.hears = lambda: False
    consumer = bus.consume(raw, "s", mode="exclusive", rate=10)
    times: list[float] = []
    if shape == "batches":

        async def consume() -> None:
            async for batch in consumer.batches():
                times.extend([world.clock.monotonic()] * len(batch))
                await batch.ack()

        begun = world.clock.monotonic()
        await world.done(_first_of(consume(), lambda: len(times) == 100, world), within=20)
        await world.done(consumer.close())
    else:
        begun = world.clock.monotonic()
        async with world.running(consumer) as running:
            await world.until(lambda: len(running.taken) == 100, within=20)
            times = [taken.at for taken in running.taken]
            assert running.data == numbers(100)
    assert 9.8 <= times[-1] - begun <= 10.1
    for at in range(10):
        assert sum(at <= each - begun < at + 1 for each in times) <= 11
    assert world.outcomes("s") == {"acked": list(range(100))}


async def _first_of(work: Any, condition: Any, world: World) -> None:
    task = asyncio.ensure_future(work)
    while not condition():
        await world.clock.pause(0.01)
        if task.done():
            task.result()
    task.cancel()
    await asyncio.wait([task])


async def test_a_rate_is_changed_and_taken_away_while_it_runs(world: World) -> None:
    bus = world.bus()
    await lanes(world, bus, 300)
    async with world.running(bus.consume(raw, "s", mode="exclusive", rate=1)) as running:
        await world.run(5)
        slow = len(running.taken)
        assert 4 <= slow <= 7
        await bus.change(raw, "s", rate=20)
        await world.run(SEEN)
        before = len(running.taken)
        await world.run(5)
        assert 95 <= len(running.taken) - before <= 105
        await world.bus().change(raw, "s", rate=0)  # by another process
        await world.until(lambda: len(running.taken) == 300, within=SEEN)


# --- live changes -----------------------------------------------------------------------------


async def test_a_changed_retry_policy_takes_effect_on_a_live_subscription(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    retry = Retry(max_retries=100, delay=4, max_delay=4, jitter=0)
    async with world.running(bus.consume(raw, "s", mode="exclusive", retry=retry), failing) as running:
        await world.run(9)
        assert len(running.taken) == 3
        await world.bus().change(raw, "s", retry=Retry(max_retries=3, delay=0.5, max_delay=0.5, jitter=0))
        await world.until(lambda: len(running.taken) == 4, within=4)  # the delay that was begun goes on
        await world.until(lambda: world.rows("s", "dead"), within=0.1)
        assert world.rows("s")[0].attempts == 4
        await world.publish(bus, b"1")
        begun = world.clock.monotonic()
        await world.until(lambda: len(world.rows("s", "dead")) == 2, within=5)
        assert world.clock.monotonic() - begun <= 1.7


async def test_a_changed_window_takes_effect_on_a_live_subscription(world: World) -> None:
    bus = world.bus()
    await lanes(world, bus, 40)
    async with world.running(bus.consume(raw, "s", mode="exclusive", window=5), kept) as running:
        await world.run(0.3)
        assert len(running.taken) == 5
        await world.bus().change(raw, "s", window=20)
        await world.run(SEEN + HEARTBEAT)
        assert len(running.taken) == 20
        await bus.change(raw, "s", window=1)
        await world.run(SEEN)
        for delivery in running.deliveries:
            await delivery.ack()
        await world.run(SEEN)
        assert len(running.taken) == 21


async def test_a_changed_heartbeat_takes_effect_on_a_live_subscription(world: World) -> None:
    bus = world.bus()
    world.store.hears = lambda: False
    async with world.running(bus.consume(raw, "s", mode="exclusive", heartbeat="off")) as running:
        await world.publish(bus, b"0")
        await world.run(30)
        assert running.taken == []
        await world.bus().change(raw, "s", heartbeat="debug")
        await world.until(lambda: running.taken, within=SEEN + 0.05)
        at = world.clock.monotonic()
        await world.publish(bus, b"1")
        await world.until(lambda: len(running.taken) == 2, within=0.05, step=0.01)
        assert running.taken[-1].at <= at + 0.05
        await bus.change(raw, "s", heartbeat=20)
        await world.run(SEEN)
        await world.publish(bus, b"2")
        await world.run(0.1)
        assert len(running.taken) == 2
        await world.until(lambda: len(running.taken) == 3, within=20)


async def test_a_changed_timeout_and_checkpoint_take_effect_on_a_live_subscription(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive", timeout=1000), kept) as running:
        await bus.change(raw, "s", timeout=2, checkpoint=Checkpoint(size=100, delay=timedelta(seconds=9)))
        await world.run(SEEN)
        await world.publish(bus, b"0")
        await world.run(4)
        assert running.attempts == [1, 2]
        before = world.store.calls["cursors.commit"]
        await running.deliveries[-1].ack()
        await world.run(3)
        assert world.store.calls["cursors.commit"] == before
        await world.run(6.1)
        assert world.cursor("s").next_offset == 1


async def test_a_policy_outlives_its_consumers_and_what_is_not_said_stays(world: World) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive", window=7, retry=Retry(max_retries=9), rate=5):
        pass
    async with bus.consume(raw, "s", mode="exclusive", rate=0):
        [subscription] = await bus.subscriptions(raw)
        assert subscription.policy["window_events"] == 7
        assert subscription.policy["max_retries"] == 9
        assert subscription.policy["rate_per_second"] is None


async def test_wrong_policies_are_refused_where_they_are_given(world: World) -> None:
    bus = world.bus()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"window": 0}, "window_events"),
        ({"window": 2.5}, "window_events"),
        ({"rate": -1}, "rate_per_second"),
        ({"heartbeat": "nromal"}, "normal"),
        ({"heartbeat": 0.001}, "heartbeat_seconds"),
        ({"exhausted": "ded"}, "dead"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"retry": Retry(max_retries=-1)}, "max_retries"),
        ({"retry": Retry(delay=10, max_delay=1)}, "backoff_seconds_max"),
        ({"retry": Retry(jitter=2)}, "jitter"),
        ({"checkpoint": "sometimes"}, "checkpoint"),
        ({"checkpoint": Checkpoint(0, 1)}, "checkpoint_events"),
    ]
    for options, said in wrong:
        with pytest.raises(UsageError, match=said):
            await bus.consume(raw, "s", mode="exclusive", **options).__aenter__()
    assert await bus.subscriptions(raw) == []
    async with bus.consume(raw, "s", mode="exclusive"):
        for options, said in wrong:
            with pytest.raises(UsageError, match=said):
                await bus.change(raw, "s", **options)


# --- pause ------------------------------------------------------------------------------------


async def test_pause_returns_unbegun_events_and_resume_goes_on_without_a_loss(world: World) -> None:
    bus = world.bus()
    await lanes(world, bus, 50)

    async def slow(delivery: Any) -> None:
        await world.clock.pause(0.1)
        await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="exclusive"), slow) as running:
        await world.run(1)
        await world.bus().pause(raw, "s")
        await world.run(1)
        paused_at = len(running.taken)
        assert paused_at < 20
        [member] = world.dispatcher(bus).members
        assert member.seats[0].engine is not None
        assert member.seats[0].engine.in_flight == 0  # what was fetched ahead is given back, and nothing is in hand
        await world.publish(bus, b"50")
        await world.run(10)
        assert len(running.taken) == paused_at
        await bus.resume(raw, "s")
        await world.until(lambda: len(running.taken) == 51)
        assert running.attempts == [1] * 51
        assert sorted(running.offsets) == list(range(51))


async def test_many_paused_and_resumed_subscriptions_lose_nothing_and_keep_their_positions(world: World) -> None:
    bus = world.bus()
    found: dict[str, list[int]] = {}
    names = [f"s{number}" for number in range(40)]
    consumers = []

    async def consume(name: str, consumer: Any) -> None:
        async for batch in consumer.batches():
            found.setdefault(name, []).extend(batch.offsets.tolist())
            await batch.ack()

    tasks = []
    for name in names:
        consumers.append(bus.consume(raw, name, mode="exclusive", heartbeat="low_priority"))
        await consumers[-1].__aenter__()
        tasks.append(asyncio.ensure_future(consume(name, consumers[-1])))
    await bus.publish_batch(raw, numbers(10))
    await world.until(lambda: all(len(found.get(name, [])) == 10 for name in names))
    for name in names[::2]:
        await bus.pause(raw, name)
    await world.run(SEEN)
    await bus.publish_batch(raw, numbers(10, 10))
    await world.run(3)
    assert [len(found[name]) for name in names] == [10, 20] * 20
    for name in names[::2]:
        await bus.resume(raw, name)
    await world.until(lambda: all(len(found[name]) == 20 for name in names), within=3)
    assert all(found[name] == list(range(20)) for name in names)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_subscription_that_is_created_paused_elsewhere_begins_when_resumed(world: World) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive"):
        await bus.pause(raw, "s")
    await world.publish(bus, b"0")
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.run(5)
        assert running.taken == []
        await bus.resume(raw, "s")
        await world.until(lambda: running.data == [b"0"], within=SEEN)


# --- expiry -----------------------------------------------------------------------------------


async def test_an_expired_event_is_never_delivered_and_its_settlement_says_so(world: World) -> None:
    fleeting = Topic("fleeting", bytes, ttl=10)
    bus = world.bus(fleeting)
    await bus.publish(fleeting, b"topic")
    await bus.publish(fleeting, b"own", ttl=30)
    await bus.publish(fleeting, b"short", ttl=timedelta(seconds=1))
    await world.run(10)
    async with world.running(bus.consume(fleeting, "s", mode="exclusive"), acked) as running:
        await world.until(lambda: world.cursor("s", topic=fleeting).next_offset == 3)
        assert running.data == [b"own"]
        # Beside it one that is in hand when its time is over: it is the handler's.
        running.handle = kept
        await bus.publish(fleeting, b"held", ttl=1)
        await world.until(lambda: len(running.taken) == 2)
        await world.run(5)
        await running.deliveries[-1].ack()
        await running.consumer.flush()
    assert world.outcomes("s", topic=fleeting) == {"acked": [1, 3], "expired": [0, 2]}


async def test_an_event_that_expires_while_it_waits_for_a_retry_is_not_delivered_again(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"short", key="a", ttl=2)
    await world.publish(bus, b"long", key="b", ttl=30)
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 2)
        await running.deliveries[0].nack(delay=4)
        await running.deliveries[1].nack(delay=60)  # in the store
        await world.run(100)
        assert len(running.taken) == 2
        await running.consumer.flush()
        assert world.cursor("s").next_offset == 2
        assert world.rows("s", "waiting", "dead") == []
    assert world.outcomes("s") == {"parked": [1], "expired": [0, 1]}


@pytest.mark.parametrize("mode", ["exclusive", "key_shared", "shared"])
async def test_a_consumer_of_the_process_that_pauses_gets_nothing_more_from_that_moment_on(
    world: World, mode: Literal["exclusive", "key_shared", "shared"]
) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode=mode)) as running:
        await world.publish(bus, b"0")
        await world.until(lambda: running.taken)
        await world.run(1)
        await world.done(bus.pause(raw, "s"))
        await world.publish(bus, b"1")
        await world.run(5)
        assert running.data == [b"0"]
        await world.done(bus.resume(raw, "s"))
        await world.settle()
        assert running.data == [b"0", b"1"]
