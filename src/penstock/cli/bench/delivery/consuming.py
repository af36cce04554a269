"""Consuming a log in batches, each acked as a whole, against reading it; and one commit of the largest cursor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np

from penstock.bus.deliveries import policy_changes
from penstock.cli.bench.delivery.consumers import consumers, take_all
from penstock.cli.bench.delivery.sizes import Sizes
from penstock.cli.bench.harness import Figure, Timing
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.log.reading import read_all
from penstock.collecting import uncollected
from penstock.errors import PenstockError
from penstock.offsets import Bitmap
from penstock.ports import Store
from penstock.rows import Commit, Cursor, Partition, Shard, Subscription

SPANNING = "spanning"
WINDOW_EVENTS = 40_000
WINDOW_BYTES = 64 << 20
"""Four times the defaults, as somebody chooses who has a backlog to get through: each batch has half of a window."""
_names = count()


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure consuming."""
    with a_store(directory / "store") as store, asyncio.Runner() as runner:
        (partition,) = a_topic(store).partitions
        appender = Appender(store, keyed_batch(sizes.batch_events))
        for _ in range(sizes.read_batches):
            appender.append(partition)
        yield _batches(store, partition, runner, rounds)
        while store.log.bounds(partition).stop < sizes.span_events:
            appender.append(partition)
        yield runner.run(_full_span(store, partition, sizes))


def _batches(store: Store, partition: Partition, runner: asyncio.Runner, rounds: int) -> Figure:
    events = read_all(store, partition)
    consumed: list[float] = []
    read: list[float] = []
    runner.run(consume(store, events))  # to warm up
    for _ in range(rounds):
        consumed.append(runner.run(consume(store, events)))
        with uncollected():
            began = time.perf_counter()
            read_all(store, partition)
            read.append(time.perf_counter() - began)
    timing = Timing(consumed, read)
    return timing.events_per_second("consume.batches", events, goal="ratio >= 0.4")


async def consume(store: Store, events: int, *, start: int = 0, ledger: bool = True) -> float:
    """Let a new subscription consume so many events; return how long that took, without its joining and leaving."""
    name, changes = f"s{next(_names)}", policy_changes(window_events=WINDOW_EVENTS, window_bytes=WINDOW_BYTES)
    async with consumers(store, ledger=ledger) as made, made.consumer(name, start=start, changes=changes) as consumer:
        with uncollected():
            began = time.perf_counter()
            await take_all(consumer, events)
            return time.perf_counter() - began


async def _full_span(store: Store, partition: Partition, sizes: Sizes) -> Figure:
    """Settle one more event, and wait until it is written, when every second one of the whole span is settled."""
    _settle_every_second(store, partition, sizes.span_events)
    seconds: list[float] = []
    async with consumers(store) as made, made.consumer(SPANNING) as consumer:
        async for batch in consumer.batches():
            # Not the first ones, on which the cursor stands.
            for offset in batch.offsets[-sizes.span_commits :].tolist():
                with uncollected():
                    began = time.perf_counter()
                    await batch.ack([offset])
                    await consumer.flush()
                    seconds.append(time.perf_counter() - began)
            break
    [cursor] = store.cursors.load(partition.log_id, SPANNING)
    if 8 * len(cursor.settled) < sizes.span_events - 8:
        raise PenstockError(f"the bitmap that was written has {len(cursor.settled):,} bytes, it should span all")
    return Timing(seconds).milliseconds("cursor.full_span", goal="value <= 5 ms")


def _settle_every_second(store: Store, partition: Partition, events: int) -> None:
    shard = Shard(partition.log_id, SPANNING, 0, partition.number)
    store.cursors.put_subscription(
        Subscription(log_id=partition.log_id, name=SPANNING, mode="exclusive"), [Cursor(shard=shard, next_offset=0)]
    )
    bitmap = Bitmap(0)
    bitmap.set_many(np.arange(1, events, 2))
    cursor = Cursor(shard=shard, next_offset=0, settled=bitmap.to_bytes())
    [refused] = store.cursors.commit([Commit(cursors=(cursor,))])
    if refused is not None:
        raise refused
