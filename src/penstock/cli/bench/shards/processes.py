"""Processes that share a subscription: what a second one brings, and how long it takes until it has all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from penstock.bus.bus import Bus
from penstock.cli.bench.batch import PAYLOADS
from penstock.cli.bench.harness import Figure, Timing
from penstock.cli.bench.log.children import Child, children
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.shards.jobs import PARTITIONS, WIDE, Handle
from penstock.cli.bench.shards.sizes import Sizes
from penstock.clock import SystemClock
from penstock.engine.share import SLOTS
from penstock.errors import PenstockError
from penstock.ports import Store
from penstock.rows import TopicInfo
from penstock.runtime import subscriptions
from penstock.settings import Settings

KEYS = 64
PATIENCE_SECONDS = 60.0
_names = count()


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure processes."""
    rounds = max(min(rounds, sizes.process_rounds), 1)
    with a_store(directory / "store") as store:
        topic = a_topic(store, partitions=PARTITIONS)
        appenders = [Appender(store, keyed_batch(1_000)) for _ in topic.partitions]
        for _ in range(max(sizes.handled_events // PARTITIONS // 1_000, 1)):
            for partition, appender in zip(topic.partitions, appenders, strict=True):
                appender.append(partition)
        events = sum(store.log.bounds(partition).stop for partition in topic.partitions)
        one: list[float] = []
        two: list[float] = []
        for _ in range(rounds):
            one.append(_handled(store, topic, 1, sizes.handler_microseconds))
            two.append(_handled(store, topic, 2, sizes.handler_microseconds))
        yield Timing(two, one).events_per_second("processes.two", events, goal="ratio >= 1.3")
        takeovers = [_takeover(store, topic) for _ in range(rounds)]
        yield Timing(takeovers).milliseconds("takeover", goal="value <= 1000 ms")


@contextmanager
def _sharing(store: Store, topic: TopicInfo, name: str, jobs: list[Handle]) -> Iterator[list[Child]]:
    """Let processes share a new subscription, evenly, before it begins."""
    with children(jobs, area="shards") as started:
        for child in started:
            child.hear()
        prefix = subscriptions.slots_prefix(topic.log_id, name)

        def even() -> bool:
            holders = [lease.owner for lease in store.leases.held(prefix)]
            counts = [holders.count(owner) for owner in set(holders)]
            return len(counts) == len(jobs) and min(counts) == SLOTS // len(jobs)

        _until(even, "the slots are not spread")
        yield started


def _until(condition: Callable[[], bool], trouble: str) -> None:
    end = time.perf_counter() + PATIENCE_SECONDS
    while not condition():
        if time.perf_counter() > end:
            raise PenstockError(trouble)
        time.sleep(0.002)


def _handled(store: Store, topic: TopicInfo, processes: int, microseconds: float) -> float:
    """Return how long so many processes take to handle everything."""
    name = f"s{next(_names)}"
    _create(store, topic, name, start="earliest", paused=True)
    jobs = [Handle(directory=_directory(store), name=name, microseconds=microseconds)] * processes
    heads = {partition.number: store.log.bounds(partition).stop for partition in topic.partitions}
    with _sharing(store, topic, name, jobs) as started:
        began = time.perf_counter()
        subscriptions.resume(store, topic, name)

        def is_done() -> bool:
            found = store.cursors.load(topic.log_id, name)
            return all(cursor.next_offset >= heads[cursor.shard.partition] for cursor in found)

        _until(is_done, "not everything was handled")
        took = time.perf_counter() - began
        for child in started:
            child.end()
    return took


def _takeover(store: Store, topic: TopicInfo) -> float:
    """Return how long it takes from the kill of a process until another one is given an event of its keys."""
    name = f"s{next(_names)}"
    _create(store, topic, name, start="latest", paused=False)
    jobs = [Handle(directory=_directory(store), name=name, tells=True)] * 2
    with _sharing(store, topic, name, jobs) as [victim, heir]:
        keys = [f"customer-{number}" for number in range(KEYS)]
        asyncio.run(_publish(store, keys))
        mine = victim.hear()[0]
        victim.process.kill()
        began = time.perf_counter()
        asyncio.run(_publish(store, [mine]))
        while True:
            key, at = heir.hear()
            if key == mine and at > began:
                heir.end()
                return float(at) - began


async def _publish(store: Store, keys: list[str]) -> None:
    async with Bus(topics=[WIDE], settings=Settings(), store=store) as bus:
        for key in keys:
            await bus.publish(WIDE, PAYLOADS[0], key=key)


def _create(store: Store, topic: TopicInfo, name: str, *, start: subscriptions.Start, paused: bool) -> None:
    subscriptions.ensure(
        store, topic, name, mode="key_shared", changes={"paused": paused}, start=start, protect=None,
        now_us=SystemClock().time_us(),
    )  # fmt: skip


def _directory(store: Store) -> str:
    return store.url.removeprefix("file:")
