"""Much: how much memory it takes to write and to read it, and whether the last events cost more than the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.cli.bench.harness import Figure, Timing, Work, sample
from penstock.cli.bench.log.children import children
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.log.jobs import Job, Move
from penstock.cli.bench.log.reading import read_all
from penstock.cli.bench.log.sizes import Sizes
from penstock.cli.output import say
from penstock.ports import Store
from penstock.rows import Partition


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure much."""
    store = directory / "store"
    yield _memory(store, sizes)
    with a_store(store) as opened:
        yield _growth(opened, sizes, rounds)


def _memory(directory: Path, sizes: Sizes) -> Figure:
    write = Move(directory=str(directory), batch_events=sizes.batch_events, bytes=sizes.volume_bytes)
    read = Move(directory=str(directory), batch_events=sizes.batch_events, bytes=0)
    written, got = _done(write), _done(read)
    say(f"memory: {sizes.volume_bytes / 1e9:g} GB, {got['events']:,} events, were written and read")
    return Figure.of("memory", max(written["memory"], got["memory"]) / 1e6, "MB", goal="value <= 250 MB")


def _done(job: Job) -> dict[str, int]:
    with children([job]) as [child]:
        told: dict[str, int] = child.hear()
        child.end()
    return told


def _growth(store: Store, sizes: Sizes, rounds: int) -> Figure:
    """Append to, and read, the end of a long log and the beginning of new ones, in turn; the worse of both counts."""
    appender = Appender(store, keyed_batch(sizes.batch_events))
    (large,) = a_topic(store).partitions
    while store.log.bounds(large).stop < sizes.growth_large:
        appender.append(large)
    beginnings = _Beginnings(store, appender, sizes)
    contestants: list[Work] = [lambda: appender.append(large), beginnings.append]
    seconds = sample(contestants, sizes.growth_samples, before=beginnings.prepare)
    goal = "ratio >= 0.8"
    appending = Timing(*seconds).nanoseconds_per_event("growth", sizes.batch_events, goal=goal)

    small, events = beginnings.filled(), sizes.growth_small
    stop = store.log.bounds(large).stop
    contestants = [
        lambda: read_all(store, large, stop - events, stop),
        lambda: read_all(store, small, 0, events),
    ]
    sample(contestants, 1)
    seconds = sample(contestants, rounds)
    reading = Timing(*seconds).nanoseconds_per_event("growth", events, goal=goal)
    return min(appending, reading, key=lambda figure: figure.ratio or 0.0)


class _Beginnings:
    """The beginnings of logs: one is appended to until it has so many events, then the next."""

    def __init__(self, store: Store, appender: Appender, sizes: Sizes) -> None:
        self._store = store
        self._appender = appender
        self._appends = -(-sizes.growth_small // sizes.batch_events)
        self._logs: list[Partition] = []
        self._left = 0

    def prepare(self) -> None:
        """See that there is a log to append to, whose file is made."""
        if not self._left:
            (partition,) = a_topic(self._store, name=f"beginning-{len(self._logs)}").partitions
            self._logs.append(partition)
            self._left = self._appends
            self.append()

    def append(self) -> None:
        """Append a batch."""
        self._left -= 1
        self._appender.append(self._logs[-1])

    def filled(self) -> Partition:
        """Fill the last log, and return it."""
        while self._left:
            self.append()
        return self._logs[-1]
