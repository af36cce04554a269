"""Topics for the tests of Spark: filled, and read back without Spark."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock import Bus, Topic
from penstock.batch import STORED_SCHEMA, Batch
from penstock.events import Event
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from penstock.ports import Store
    from penstock.rows import TopicInfo

Row = dict[str, Any]


def fill(url: str, name: str, events: Sequence[Event | bytes], *, partitions: int = 3, at_a_time: int = 100) -> None:
    """Publish events to a topic, making it if it is not there."""
    topic = Topic(name, bytes, partitions=partitions)

    async def run() -> None:
        async with Bus(url, topics=[topic]) as bus:
            for start in range(0, len(events), at_a_time):
                part = [
                    event if isinstance(event, Event) else Event(data=event) for event in events[start:][:at_a_time]
                ]
                await bus.publish_batch(topic, Batch.from_events(part))

    asyncio.run(run())


def plain(count: int, *, first: int = 0, keys: int = 7) -> list[Event]:
    """Return events that say which ones they are, with a key."""
    return [Event(data=b"%06d" % number, key=b"key-%d" % (number % keys)) for number in range(first, first + count)]


def rich(count: int) -> list[Event]:
    """Return events of which some have everything, and some nothing but data."""
    events = []
    for number in range(count):
        event = Event(data=b"\xff%d\x00" % number)
        if number % 3:
            event = Event(
                data=b"%d" % number,
                key=b"\x00key-%d" % (number % 5),
                type="order.placed" if number % 2 else "order.paid",
                id=f"id-{number}",
                source="https://example.com/größe",
                subject="subject",
                time=datetime(2026, 1, 2, 3, 4, 5, number, tzinfo=UTC),
                expires_at=datetime(9000, 1, 1, tzinfo=UTC),
                content_type="application/json",
                headers={"traceparent": b"00-ab", "empty": b""} if number % 4 else {},
            )
        events.append(event)
    return events


def stored(url: str, name: str) -> list[Row]:
    """Return the rows of a topic as the log says, by partition and offset."""
    with closing(open_store(url)) as store:
        return [row for batch in _batches(store, info_of(store, name)) for row in batch.to_arrow().to_pylist()]


def data_of(url: str, name: str) -> list[bytes]:
    """Return the payloads of a topic, by partition and offset."""
    return [row["data"] for row in stored(url, name)]


def info_of(store: Store, name: str) -> TopicInfo:
    return next(topic for topic in store.log.topics() if topic.name == name)


def _batches(store: Store, topic: TopicInfo) -> Iterable[Batch]:
    for partition in topic.partitions:
        bounds = store.log.bounds(partition)
        start = bounds.start
        while start < bounds.stop:
            for batch in store.log.read(partition, start, bytes_max=1 << 22):
                assert isinstance(batch, Batch)
                yield batch
                start = batch.range.stop


def rows_of(frame: DataFrame) -> list[Row]:
    """Return the rows of a DataFrame as `stored` does."""
    table = frame.toArrow()
    rows: list[Row] = table.to_pylist()
    for row in rows:
        for name, value in row.items():
            if isinstance(value, bytearray):
                row[name] = bytes(value)
    names = [
        name for name in ("topic", "partition", "offset") if name in STORED_SCHEMA.names and name in table.column_names
    ]
    return sorted(rows, key=lambda row: tuple(row[name] for name in names))


def read(spark: SparkSession, url: str, topic: str, **options: Any) -> DataFrame:
    """Read a topic by `format("penstock")`, options as texts."""
    return spark.read.format("penstock").options(url=url, topic=topic, **options).load()
