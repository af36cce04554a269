"""Reading: the heads of many partitions, and a log from its beginning to its end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from penstock.batch import Batch
from penstock.bus.reading import READ_BYTES, READ_EVENTS
from penstock.cli.bench.batch import PAYLOADS
from penstock.cli.bench.harness import Figure, Timing, compare, sample
from penstock.cli.bench.log.bare import drop_from_memory, read_files
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.log.sizes import Sizes
from penstock.ports import Store
from penstock.rows import Partition


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure reading."""
    with a_store(directory / "heads") as store:
        yield from _heads(store, sizes, rounds)
    with a_store(directory / "read") as store:
        (partition,) = a_topic(store).partitions
        appender = Appender(store, keyed_batch(sizes.batch_events))
        for _ in range(sizes.read_batches):
            appender.append(partition)
        segments = list((directory / "read").rglob("*.seg"))
        yield _warm(store, partition, segments, rounds)
        yield _cold(store, partition, segments, rounds)


def _heads(store: Store, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Ask for all heads when one of them has moved, and for one again and again."""
    partitions = a_topic(store, partitions=sizes.partitions, durability="os").partitions
    heads = store.log.heads(partitions)
    appender = Appender(store, Batch.build(PAYLOADS[:1]))
    # A few of them, all over the topic, since the first append to a partition makes its file.
    moving = cycle(partitions[:: max(len(partitions) // 20, 1)])
    [seconds] = sample([heads.read], sizes.head_reads, before=lambda: appender.append(next(moving)))
    yield Timing(seconds).microseconds("heads.all", goal="value <= 100 µs")
    timing = compare(store.log.heads(partitions[:1]).read, None, rounds)
    yield timing.microseconds("heads.one", goal="value <= 2 µs")


def read_all(store: Store, partition: Partition, start: int = 0, stop: int | None = None) -> int:
    """Read a log to validated columns, as much at a time as a bus does; return where it ended."""
    while stop is None or start < stop:
        items = store.log.read(partition, start, bytes_max=READ_BYTES, events_max=READ_EVENTS)
        if not items:
            break
        start = items[-1].range.stop
    return start


def _warm(store: Store, partition: Partition, segments: list[Path], rounds: int) -> Figure:
    events = read_all(store, partition)
    timing = compare(lambda: read_all(store, partition), lambda: read_files(segments), rounds)
    return timing.events_per_second("read.warm", events, goal="value >= 8000000 events/s")


def _cold(store: Store, partition: Partition, segments: list[Path], rounds: int) -> Figure:
    events = read_all(store, partition)
    contestants = [lambda: read_all(store, partition), lambda: read_files(segments)]
    seconds = sample(contestants, rounds, before=lambda: drop_from_memory(segments))
    return Timing(*seconds).events_per_second("read.cold", events, goal="ratio >= 0.5")
