"""What is read and written to: topics that were filled as applications fill them, in batches and through a bus."""

from __future__ import annotations

import asyncio
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

from penstock.batch import Batch
from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.cli.bench.batch import EVENTS, KEYS, PAYLOADS, TYPES
from penstock.cli.bench.spark.sizes import Sizes
from penstock.rows import Durability, TopicSettings
from penstock.settings import Settings
from penstock.stores import open_store

PUBLISHES_AT_ONCE = 8

_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
TIMES = [_BEGAN + timedelta(milliseconds=number) for number in range(EVENTS)]


class BenchTopic(NamedTuple):
    """The one topic of a store."""

    url: str
    name: str = "bench"

    @property
    def options(self) -> dict[str, str]:
        """What `format("penstock")` must be told of it."""
        return {"url": self.url, "topic": self.name}

    def rows(self) -> int:
        """Return how many events it has."""
        with closing(open_store(self.url, settings=Settings())) as store:
            (topic,) = (known for known in store.log.topics() if known.name == self.name)
            return sum(len(store.log.bounds(partition)) for partition in topic.partitions)


def create(directory: Path, sizes: Sizes, *, durability: Durability = "sync") -> BenchTopic:
    """Create a topic in a new store."""
    made = BenchTopic(f"file:{directory}")
    with closing(open_store(made.url, settings=Settings())) as store:
        store.log.create_topic(made.name, TopicSettings(partitions=sizes.partitions, durability=durability))
    return made


def fill(directory: Path, sizes: Sizes, rows: int) -> BenchTopic:
    """Create a topic, and publish so many events to it, or a few more to fill the last batch.

    They have a payload of 100 bytes, a key, a type and a time.
    """
    # Nobody relies on these events, and how they were synced makes no difference to who reads them.
    made = create(directory, sizes, durability="os")
    asyncio.run(_publish(made, sizes, rows))
    return made


async def _publish(made: BenchTopic, sizes: Sizes, rows: int) -> None:
    topic = Topic(made.name, bytes, partitions=sizes.partitions, durability="os")
    batches = cycle(_batches(sizes.batch_events))
    left = -(-rows // sizes.batch_events)
    async with Bus(made.url, topics=[topic], settings=Settings()) as bus:
        while left:
            together = min(left, PUBLISHES_AT_ONCE)
            await asyncio.gather(*(bus.publish_batch(topic, next(batches)) for _ in range(together)))
            left -= together


def _batches(events: int) -> list[Batch]:
    parts = [slice(start, start + events) for start in range(0, EVENTS - events + 1, events)]
    return [Batch.build(PAYLOADS[part], key=KEYS[part], type=TYPES[part], time=TIMES[part]) for part in parts]
