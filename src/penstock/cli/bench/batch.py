"""Area `batch`: events into Arrow columns, bytes into checked columns, keys into lanes, and into a bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa

from penstock.batch import Batch
from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.cli.bench.harness import Figure, compare
from penstock.columns import schema_of
from penstock.settings import Settings
from penstock.stores import open_store

EVENTS = 5_000
PAYLOAD_BYTES = 100
PARTITIONS = 16
PUBLISHES = 8
"""So many batches to a call of the event loop, whose own start is then lost in the noise."""

_random = np.random.default_rng(seed=1)
PAYLOADS = [_random.bytes(PAYLOAD_BYTES) for _ in range(EVENTS)]
KEYS = [f"customer-{number % 1_000:06}" for number in range(EVENTS)]
TYPES = [f"order.{('placed', 'paid', 'packed', 'shipped')[number % 4]}" for number in range(EVENTS)]


def figures(rounds: int) -> Iterator[Figure]:
    """Measure the area."""
    yield _build(rounds)
    yield _validate(rounds)
    yield _lanes(rounds)
    yield _publish(rounds)


def _build(rounds: int) -> Figure:
    def bare_arrow() -> None:
        pa.array(PAYLOADS, pa.binary())
        pa.array(KEYS, pa.binary())
        pa.array(TYPES, pa.string())

    timing = compare(lambda: Batch.build(PAYLOADS, key=KEYS, type=TYPES), bare_arrow, rounds)
    return timing.nanoseconds_per_event("batch.build", EVENTS, goal="ratio >= 0.7")


def _validate(rounds: int) -> Figure:
    began = datetime(2025, 1, 1, tzinfo=UTC)
    batch = Batch.build(
        PAYLOADS,
        id=[f"order-{number:09}" for number in range(EVENTS)],
        type=TYPES,
        subject=[f"orders/{number}" for number in range(EVENTS)],
        time=[began + timedelta(milliseconds=number) for number in range(EVENTS)],
        key=KEYS,
        headers=[{"traceparent": b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}] * EVENTS,
    )
    data, mask = batch.to_bytes().to_pybytes(), batch.mask
    schema = schema_of(mask)
    timing = compare(
        lambda: Batch.from_bytes(data, mask),
        lambda: pa.ipc.read_record_batch(pa.py_buffer(data), schema),
        rounds,
    )
    return timing.nanoseconds_per_event("batch.validate", EVENTS, goal="value <= 40 ns/event")


def _lanes(rounds: int) -> Figure:
    columns = Batch.build(PAYLOADS, key=KEYS).columns
    # A new batch for every call, since a batch remembers its hashes.
    timing = compare(lambda: Batch(columns).partitions(PARTITIONS, keyless=0), None, rounds)
    return timing.nanoseconds_per_event("batch.lanes", EVENTS, goal="value <= 120 ns/event")


def _publish(rounds: int) -> Figure:
    topic = Topic("bench", bytes)
    with closing(open_store("memory:")) as store, asyncio.Runner() as runner:
        bus = Bus(topics=[topic], settings=Settings(url="memory:"), store=store)

        async def publish() -> None:
            for _ in range(PUBLISHES):
                await bus.publish_batch(topic, PAYLOADS, keys=KEYS)

        def trim() -> None:
            for info in store.log.topics():
                for partition in info.partitions:
                    store.log.trim(partition, store.log.bounds(partition).stop)

        timing = compare(lambda: runner.run(publish()), None, rounds, between=trim)
        runner.run(bus.close())
    return timing.events_per_second("memory.publish_batch", EVENTS * PUBLISHES, goal="value >= 1500000 events/s")
