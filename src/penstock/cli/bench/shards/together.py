"""Consumers of one process: four that share a log against one that has it, a joining one, and a poisoned key."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.batch import Batch
from penstock.bus.bus import Bus
from penstock.bus.deliveries import policy_changes
from penstock.bus.topic import Topic
from penstock.cli.bench.batch import PAYLOADS
from penstock.cli.bench.delivery.consumers import BATCH_EVENTS, consumers
from penstock.cli.bench.delivery.consuming import WINDOW_BYTES, WINDOW_EVENTS
from penstock.cli.bench.harness import Figure, Timing
from penstock.cli.bench.log.events import TOPIC, Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.shards.sizes import Sizes
from penstock.collecting import uncollected
from penstock.errors import PenstockError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.bus.consumer import Consumer
    from penstock.ports import Store

CONSUMERS = 4
_names = count()


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure consumers of one process."""
    with a_store(directory / "shared") as store, asyncio.Runner() as runner:
        (partition,) = a_topic(store).partitions
        appender = Appender(store, keyed_batch(sizes.batch_events))
        for _ in range(sizes.read_batches):
            appender.append(partition)
        events = store.log.bounds(partition).stop
        alone: list[float] = []
        together: dict[str, list[float]] = {"key_shared": [], "shared": []}
        runner.run(drained(store, events, "exclusive", 1))  # to warm up
        for _ in range(rounds):
            alone.append(runner.run(drained(store, events, "exclusive", 1)))
            for mode, took in together.items():
                took.append(runner.run(drained(store, events, mode, CONSUMERS)))
        for mode, goal in (("key_shared", "ratio >= 0.6"), ("shared", "ratio >= 0.8")):
            yield Timing(together[mode], alone).events_per_second(f"{mode}.four", events, goal=goal)
        joins = [runner.run(_join(store, sizes.events_per_second)) for _ in range(rounds)]
        yield Timing(joins).milliseconds("rebalance", goal="value <= 100 ms")
    with a_store(directory / "poisoned") as store, asyncio.Runner() as runner:
        yield _backlog(store, runner, sizes, min(rounds, sizes.behind_rounds))


async def drained(store: Store, events: int, mode: str, number: int) -> float:
    """Let so many consumers of a new subscription take everything in batches; return how long that took."""
    name, changes = f"s{next(_names)}", policy_changes(window_events=WINDOW_EVENTS, window_bytes=WINDOW_BYTES)
    left = events
    done = asyncio.Event()

    async def work(consumer: Consumer[Any]) -> None:
        nonlocal left
        async for batch in consumer.batches(max_events=BATCH_EVENTS):
            left -= len(batch)
            await batch.ack()
            if left <= 0:
                done.set()

    async with consumers(store) as made, AsyncExitStack() as stack:
        everyone = [made.consumer(name, mode=mode, changes=changes) for _ in range(number)]
        for consumer in everyone:
            await stack.enter_async_context(consumer)
        with uncollected():
            began = time.perf_counter()
            tasks = [asyncio.ensure_future(work(consumer)) for consumer in everyone]
            ending = asyncio.ensure_future(done.wait())
            await asyncio.wait([ending, *tasks], return_when="FIRST_COMPLETED")
            for consumer in everyone:
                await consumer.flush()
            took = time.perf_counter() - began
        for task in (*tasks, ending):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if left:
        raise PenstockError(f"{left:,} events are left of {events:,}")
    return took


async def _join(store: Store, per_second: int) -> float:
    """Return how long it takes until a consumer that joins another one under load is given its first event."""
    topic, name = Topic(TOPIC, bytes), f"s{next(_names)}"
    order: defaultdict[bytes | None, list[int]] = defaultdict(list)
    ending = asyncio.Event()

    async def work(consumer: Consumer[Any], first: asyncio.Future[float]) -> None:
        async for delivery in consumer:
            if not first.done():
                first.set_result(time.perf_counter())
            order[delivery.event.key].append(delivery.position.offset)
            await delivery.ack()

    async with Bus(topics=[topic], settings=Settings(), store=store) as bus:

        async def publish() -> None:
            for number in count():
                if ending.is_set():
                    return
                await bus.publish(topic, PAYLOADS[0], key=f"customer-{number % 500}")
                await asyncio.sleep(1 / per_second)

        publishing = asyncio.ensure_future(publish())
        loop = asyncio.get_running_loop()
        async with bus.consume(topic, name, start="latest") as one:
            working: asyncio.Future[float] = loop.create_future()
            first: asyncio.Future[float] = loop.create_future()
            tasks = [asyncio.ensure_future(work(one, working))]
            await working
            began = time.perf_counter()
            async with bus.consume(topic, name) as two:
                tasks.append(asyncio.ensure_future(work(two, first)))
                took = await first - began
                await asyncio.sleep(0.2)
                ending.set()
                await publishing
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    if any(offsets != sorted(set(offsets)) for offsets in order.values()):
        raise PenstockError("events of a key came out of order, or twice")
    return took


def _backlog(store: Store, runner: asyncio.Runner, sizes: Sizes, rounds: int) -> Figure:
    (partition,) = a_topic(store).partitions
    kinds = max(sizes.keys // sizes.batch_events, 1)
    appenders = [
        Appender(
            store,
            Batch.build(
                PAYLOADS[: sizes.batch_events],
                key=[f"key-{kind * sizes.batch_events + number}" for number in range(sizes.batch_events)],
            ),
        )
        for kind in range(kinds)
    ]
    for number in range(sizes.behind_batches):
        appenders[number % kinds].append(partition)
    events = store.log.bounds(partition).stop
    clean: list[float] = []
    poisoned: list[float] = []
    for _ in range(max(rounds, 1)):
        clean.append(runner.run(_behind(store, events, poisoned=False)))
        poisoned.append(runner.run(_behind(store, events, poisoned=True)))
    return Timing(poisoned, clean).events_per_second("backlog", events, goal="ratio >= 0.8")


async def _behind(store: Store, events: int, *, poisoned: bool) -> float:
    """Let one consumer drain it; with a poisoned key, whose first event fails, all that is behind it waits aside."""
    name, changes = f"s{next(_names)}", policy_changes(window_events=WINDOW_EVENTS, window_bytes=WINDOW_BYTES)
    async with consumers(store) as made, made.consumer(name, mode="key_shared", changes=changes) as consumer:
        with uncollected():
            began = time.perf_counter()
            async for batch in consumer.batches(max_events=BATCH_EVENTS):
                offsets = batch.offsets
                if poisoned and offsets[0] == 0:  # the key of the very first event is the poisoned one
                    await batch.nack([0], delay=3600)
                    await batch.ack(offsets[1:].tolist())
                else:
                    await batch.ack()
                if offsets[-1] >= events - 1:
                    break
            await consumer.flush()
            return time.perf_counter() - began
