"""Consumers as an application holds them: opening, iterating, closing, and being told what is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.deliveries import Hook, World, kept, raw, wide

from penstock import Topic
from penstock.errors import (
    BusClosed,
    InvalidName,
    StaleDelivery,
    SubscriptionBusy,
    SubscriptionMismatch,
    TooLarge,
    TopicDeleted,
    TrimRefused,
    UnknownSubscription,
    UnknownTopic,
    UsageError,
)
from penstock.rows import Retention

# --- wrong calls ------------------------------------------------------------------------------


async def test_an_unknown_topic_names_the_nearest_one(world: World) -> None:
    bus = world.bus()
    consumer: Any = bus.consume("rwa", "s", mode="exclusive")
    with pytest.raises(UnknownTopic, match="raw"):
        await consumer.__aenter__()
    for call in (bus.seek("rwa", "s", 0), bus.pause("rwa", "s"), bus.lag("rwa"), bus.subscriptions("rwa")):
        with pytest.raises(UnknownTopic, match="raw"):
            await call


async def test_an_unknown_subscription_is_told(world: World) -> None:
    bus = world.bus()
    for call in (bus.seek(raw, "s", 0), bus.pause(raw, "s"), bus.resume(raw, "s"), bus.change(raw, "s", window=5)):
        with pytest.raises(UnknownSubscription, match=r"^topic 'raw' \(log \w+\) has no subscription 's';"):
            await call
    assert await bus.delete_subscription(raw, "s") is False
    assert await bus.lag(raw, "s") == []


async def test_wrong_arguments_are_refused_and_nothing_is_created(world: World) -> None:
    bus = world.bus()
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"name": "No Such"}, InvalidName, "subscription"),
        ({"name": "_internal"}, InvalidName, "subscription"),
        ({"mode": "sharde"}, UsageError, "mode"),
        ({"consumer_id": "x" * 300}, UsageError, "consumer_id"),
        ({"consumer_id": "a\nb"}, UsageError, "consumer_id"),
    ]
    for options, error, said in wrong:
        with pytest.raises(error, match=said):
            await bus.consume(raw, **({"name": "s", "mode": "exclusive"} | options)).__aenter__()
    assert await bus.subscriptions(raw) == []
    async with bus.consume(raw, "s", mode="exclusive") as consumer:
        for sizes in ({"max_events": 0}, {"max_bytes": 0}):
            with pytest.raises(UsageError, match="at least one"):
                await anext(consumer.batches(**sizes))


async def test_another_mode_is_refused_and_says_which_it_is(world: World) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive"):
        pass
    with pytest.raises(SubscriptionMismatch, match="'exclusive', not 'failover'"):
        await bus.consume(raw, "s", mode="failover").__aenter__()


async def test_a_second_exclusive_consumer_is_refused_and_told_who_has_it(world: World) -> None:
    one, two = world.bus(), world.bus()
    async with one.consume(wide, "s", mode="exclusive", consumer_id="the-first") as first:
        for bus in (one, two):
            with pytest.raises(SubscriptionBusy, match="the-first"):
                await bus.consume(wide, "s", mode="exclusive").__aenter__()
        assert first.active == [0, 1, 2, 3]
    async with two.consume(wide, "s", mode="exclusive") as second:
        assert second.active == [0, 1, 2, 3]


async def test_the_same_consumer_id_takes_over_from_its_ghost_which_is_told(world: World) -> None:
    one, two = world.bus(), world.bus()
    await world.publish(one, b"0")
    async with world.running(one.consume(raw, "s", mode="exclusive", consumer_id="me"), kept) as ghost:
        await world.until(lambda: ghost.taken)
        async with world.running(two.consume(raw, "s", mode="exclusive", consumer_id="me")) as running:
            await world.until(lambda: running.taken)
            assert running.data == [b"0"]
            await running.consumer.flush()

            async def settle() -> None:
                await ghost.deliveries[0].ack()  # it may not know yet
                await ghost.consumer.flush()

            with pytest.raises(StaleDelivery):
                await world.done(settle())
            await world.until(ghost.task.done, within=2)
            assert isinstance(ghost.task.exception(), StaleDelivery)
            ghost.looked_at()
    assert world.outcomes("s") == {"acked": [0]}


# --- closing ----------------------------------------------------------------------------------


async def test_closing_twice_and_using_a_closed_consumer(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    never = bus.consume(raw, "s", mode="exclusive")
    await never.close()
    consumer = bus.consume(raw, "s", mode="exclusive")
    delivery = await world.done(anext(aiter(consumer)))
    await consumer.close()
    await consumer.close()
    for closed in (never, consumer):
        with pytest.raises(BusClosed, match="make another one"):
            await anext(aiter(closed))
        with pytest.raises(BusClosed):
            await closed.flush()
    with pytest.raises(StaleDelivery, match="closed"):
        await delivery.ack()
    await bus.close()
    with pytest.raises(BusClosed):
        await bus.consume(raw, "s", mode="exclusive").__aenter__()
    await consumer.close()


@pytest.mark.parametrize("what", ["consumer", "bus"])
@pytest.mark.parametrize("shape", ["single", "batches"])
async def test_iteration_ends_when_another_task_closes(world: World, what: str, shape: str) -> None:
    bus = world.bus()
    consumer = bus.consume(raw, "s", mode="exclusive")
    found: list[Any] = []

    async def iterate() -> None:
        async for item in consumer if shape == "single" else consumer.batches():
            found.append(item)  # noqa: PERF401 - one by one

    task = asyncio.ensure_future(iterate())
    await world.publish(bus, b"0")
    await world.until(lambda: found)
    await world.done((consumer if what == "consumer" else bus).close())
    await world.done(task, within=0.1)
    assert len(found) == 1


@pytest.mark.parametrize("turns", [1, 5, 10, 15, 20])
async def test_closing_while_joining_leaves_nothing_held(world: World, turns: int) -> None:
    bus = world.bus()
    consumer = bus.consume(raw, "s", mode="failover")
    joining = asyncio.ensure_future(anext(aiter(consumer)))
    for _ in range(turns):
        await asyncio.sleep(0)
    await world.done(consumer.close())
    joining.cancel()
    await asyncio.wait([joining])
    await world.run(1)
    assert world.store.whole.leases.holder(f"shard/{world.info().log_id}/s/0/0") is None


async def test_a_task_that_is_cancelled_while_it_waits_leaves_the_consumer_usable(world: World) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive") as consumer:
        waiting = asyncio.ensure_future(anext(aiter(consumer)))
        await world.run(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await world.publish(bus, b"0")
        delivery = await world.done(anext(aiter(consumer)))
        assert delivery.value == b"0"


async def test_two_tasks_over_one_consumer_share_its_events(world: World) -> None:
    bus = world.bus()
    for number in range(40):
        await world.publish(bus, b"%d" % number, key=f"k{number}")
    found: dict[str, list[int]] = {"one": [], "two": []}
    consumer = bus.consume(raw, "s", mode="exclusive")

    async def work(name: str) -> None:
        async for delivery in consumer:
            found[name].append(delivery.position.offset)
            await world.clock.pause(0.01)
            await delivery.ack()

    try:  # not `async with`: both tasks begin it
        tasks = [asyncio.ensure_future(work(name)) for name in found]
        await world.until(lambda: sum(map(len, found.values())) == 40)
        assert sorted(found["one"] + found["two"]) == list(range(40))
        assert min(map(len, found.values())) > 0
        await world.run(0.02)
        # Both wait now; whichever is woken has something to do.
        for number in range(40, 44):
            await world.publish(bus, b"%d" % number, key=f"k{number}")
        await world.until(lambda: sum(map(len, found.values())) == 44, within=0.5)
        assert len(world.dispatcher(bus).members) == 1
    finally:
        await world.done(consumer.close())
    await world.done(asyncio.gather(*tasks))


async def test_a_task_over_events_and_one_over_batches_share_them_and_none_is_lost(world: World) -> None:
    bus = world.bus()
    for number in range(60):
        await world.publish(bus, b"%d" % number, key=f"k{number % 7}")
    found: list[int] = []
    async with bus.consume(raw, "s", mode="exclusive") as consumer:

        async def singly() -> None:
            async for delivery in consumer:
                found.append(delivery.position.offset)
                await world.clock.pause(0.01)
                await delivery.ack()

        async def together() -> None:
            async for batch in consumer.batches(max_events=3):
                found.extend(batch.offsets.tolist())
                await world.clock.pause(0.01)
                await batch.ack()

        tasks = [asyncio.ensure_future(singly()), asyncio.ensure_future(together())]
        await world.until(lambda: len(found) >= 60)
        await world.run(1)
        assert sorted(found) == list(range(60))
    await world.done(asyncio.gather(*tasks))


# --- what is deleted --------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in hand"])
async def test_a_topic_deleted_under_a_consumer_is_told(world: World, busy: bool) -> None:
    bus = world.bus()
    if busy:
        await world.publish(bus, b"0")
    consumer = bus.consume(raw, "s", mode="exclusive")
    found: list[Any] = []

    async def iterate() -> None:
        async for delivery in consumer:
            found.append(delivery)  # noqa: PERF401 - one by one

    task = asyncio.ensure_future(iterate())
    await world.until(lambda: len(found) == busy)
    world.store.whole.log.delete_topic(world.info().log_id)
    await world.until(task.done, within=2)
    assert isinstance(task.exception(), TopicDeleted | UnknownSubscription)
    assert str(task.exception()).startswith("topic 'raw' (log ")
    if busy:
        with pytest.raises((TopicDeleted, StaleDelivery)):
            await found[0].ack()
    await world.done(consumer.close())


@pytest.mark.parametrize("call", ["log.read", "cursors.commit", "cursors.load"])
async def test_a_deleted_topic_is_named_whichever_call_finds_it_gone(world: World, call: str) -> None:
    def deleting(function: Hook, *args: Any, **options: Any) -> Any:
        del world.store.hooks[call]
        world.store.hooks["cursors.revision"] = lambda _function: 0  # so that the watch is not the first to see it
        world.store.whole.log.delete_topic(world.info().log_id)
        return function(*args, **options)

    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        world.store.hooks[call] = deleting
        await world.publish(bus, b"0")
        await world.run(1)
        if call in world.store.hooks:
            await world.bus().change(raw, "s", window=5)  # so that the shard is looked at again
        await world.until(running.task.done, within=5)
        assert isinstance(running.task.exception(), TopicDeleted)
        assert str(running.task.exception()).startswith("topic 'raw' (log ")
        running.looked_at()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["own bus", "another bus"])
async def test_a_subscription_deleted_under_a_consumer_is_told_and_a_new_one_begins_anew(
    world: World, elsewhere: bool
) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1")
    consumer = bus.consume(raw, "s", mode="exclusive")
    deliveries = aiter(consumer)
    first = await world.done(anext(deliveries))
    await first.ack()
    await consumer.flush()
    assert await (world.bus() if elsewhere else bus).delete_subscription(raw, "s") is True
    second = await world.done(anext(deliveries))  # it was handed over before anybody could know
    await world.run(1)
    with pytest.raises(StaleDelivery):
        await second.ack()
    with pytest.raises(UnknownSubscription, match="topic 'raw'"):
        await anext(deliveries)
    await world.done(consumer.close())
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: running.data == [b"0", b"1"])


async def test_a_consumer_of_a_deleted_subscription_leaves_others_alone(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "peer", mode="exclusive")) as peer:
        async with bus.consume(raw, "s", mode="exclusive"):
            await bus.delete_subscription(raw, "s")
            await world.run(1)
        await world.publish(bus, b"0")
        await world.until(lambda: peer.data == [b"0"], within=0.5)


async def test_a_deleted_topic_is_not_in_the_way_of_others(world: World) -> None:
    bus = world.bus()
    async with (
        world.running(bus.consume(raw, "gone", mode="exclusive")) as gone,
        world.running(bus.consume(wide, "peer", mode="exclusive")) as peer,
    ):
        world.store.whole.log.delete_topic(world.info().log_id)
        await world.until(gone.task.done, within=2)
        assert isinstance(gone.task.exception(), TopicDeleted | UnknownSubscription)
        gone.looked_at()
        # One more partition to watch: where all of them end is asked anew, and again in one call.
        other = Topic("other", bytes)
        async with world.running(world.bus(other).consume(other, "s", mode="exclusive")):
            pass
        async with world.running(bus.consume("other", "s", mode="exclusive")) as latecomer:
            await world.run(1)
            asked = world.store.calls["log.heads"]
            await world.run(5)
            assert world.store.calls["log.heads"] == asked
            world.append(b"late", topic=other)
            await world.publish(bus, b"0", topic=wide)
            await world.until(lambda: peer.data == [b"0"] and latecomer.data == [b"late"], within=0.6)


# --- events -----------------------------------------------------------------------------------


async def test_an_event_over_eight_kilobytes_is_delivered_and_one_over_the_limit_is_refused(world: World) -> None:
    bus = world.bus()
    large = bytes(range(256)) * 40
    async with world.running(bus.consume(raw, "s", mode="exclusive", window_bytes=4096)) as running:
        await world.publish(bus, large, b"small", bytes(1 << 19))
        with pytest.raises(TooLarge) as refused:
            await bus.publish(raw, bytes((1 << 20) + 1))
        assert refused.value.limit == 1 << 20
        await world.until(lambda: len(running.taken) == 3, within=2)
        assert [len(data) for data in running.data] == [len(large), 5, 1 << 19]
        assert running.data[0] == large


async def test_a_subscription_protects_what_it_has_not_passed_from_retention(world: World) -> None:
    keeping = Topic("keeping", bytes, retention=Retention(age_seconds=1))
    bus = world.bus(keeping)
    await world.publish(bus, *[b"x" * 900 for _ in range(30)], topic=keeping)
    async with world.running(bus.consume(keeping, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: running.taken)
        partition = world.info(keeping).partitions[0]
        with pytest.raises(TrimRefused, match="'s'"):
            world.store.whole.log.trim(partition, 20)
        assert world.store.whole.log.trim(partition, 0) == 0
