"""Writing, in one process: ready batches into the store, values into a bus, together and one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from penstock.batch import Batch
from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.cli.bench.batch import KEYS, PAYLOADS
from penstock.cli.bench.harness import Figure, compare, percentile
from penstock.cli.bench.log.bare import BareFile
from penstock.cli.bench.log.events import TOPIC, Appender, a_store, a_topic, keyed_batch, stored_bytes
from penstock.cli.bench.log.sizes import Sizes
from penstock.collecting import uncollected
from penstock.ports import Store
from penstock.settings import Settings


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure writing."""
    with closing(BareFile(directory / "bare")) as bare:
        with a_store(directory / "ready") as store:
            yield _ready_batches(store, bare, sizes, rounds)
        with a_store(directory / "bus") as store, asyncio.Runner() as runner:
            bus = Bus(topics=[_TOPIC], settings=Settings(), store=store)
            yield _publish_batch(bus, runner, bare, sizes, rounds)
            yield _publish_tasks(bus, runner, sizes, rounds)
            yield runner.run(_publish_single(bus, bare, sizes))
            runner.run(bus.close())


_TOPIC = Topic(TOPIC, bytes)


def _ready_batches(store: Store, bare: BareFile, sizes: Sizes, rounds: int) -> Figure:
    batch = keyed_batch(sizes.batch_events)
    appender, parts = Appender(store, batch), stored_bytes(batch)
    (partition,) = a_topic(store).partitions
    timing = compare(lambda: appender.append(partition), lambda: bare.write(parts), rounds)
    return timing.events_per_second("append.ready_batches", len(batch), goal="ratio >= 0.7")


def _publish_batch(bus: Bus, runner: asyncio.Runner, bare: BareFile, sizes: Sizes, rounds: int) -> Figure:
    values, keys = PAYLOADS[: sizes.batch_events], KEYS[: sizes.batch_events]
    parts = stored_bytes(keyed_batch(sizes.batch_events))

    async def publish() -> None:
        for _ in range(sizes.publishes):
            await bus.publish_batch(_TOPIC, values, keys=keys)

    def write_bare() -> None:
        for _ in range(sizes.publishes):
            bare.write(parts)

    timing = compare(lambda: runner.run(publish()), write_bare, rounds)
    return timing.events_per_second("publish_batch", len(values) * sizes.publishes, goal="ratio >= 0.3")


def _publish_tasks(bus: Bus, runner: asyncio.Runner, sizes: Sizes, rounds: int) -> Figure:
    async def publish(payload: bytes) -> None:
        for _ in range(sizes.publishes_per_task):
            await bus.publish(_TOPIC, payload)

    async def publish_all() -> None:
        await asyncio.gather(*(publish(PAYLOADS[number % len(PAYLOADS)]) for number in range(sizes.tasks)))

    timing = compare(lambda: runner.run(publish_all()), None, rounds)
    events = sizes.tasks * sizes.publishes_per_task
    return timing.events_per_second("publish.tasks", events, goal="value >= 100000 events/s")


async def _publish_single(bus: Bus, bare: BareFile, sizes: Sizes) -> Figure:
    """Say by how much the median publish takes longer than the median bare sync of the same bytes."""
    parts = stored_bytes(Batch.build(PAYLOADS[:1]))
    published: list[float] = []
    written: list[float] = []
    with uncollected():
        for number in range(sizes.singles):
            start = time.perf_counter()
            await bus.publish(_TOPIC, PAYLOADS[number % len(PAYLOADS)])
            middle = time.perf_counter()
            bare.write(parts)
            published.append(middle - start)
            written.append(time.perf_counter() - middle)
    added = percentile(published, 50) - percentile(written, 50)
    return Figure.of("publish.single", added * 1e6, "µs", goal="value <= 250 µs")
