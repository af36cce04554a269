"""Staging: where the events of a sink's batch wait, durable, until it is decided that they belong to it.

Tasks of a distributed job write at the same time, some of them twice, and some for nothing. So they do not append to
the topic. They append to a log of their own, an internal topic of the same store that one query of one sink has, and
report which ranges of it they have filled. `penstock.runtime.sinks` makes a batch of the ranges that count.

Being a log like any other, it needs nothing new of a store: staged events are durable, checked and bounded in memory,
and what nobody needs any more goes with `trim`.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from penstock import columns as cols
from penstock.batch import Batch
from penstock.errors import InvalidEvent
from penstock.limits import EventLimits
from penstock.producers import Run, process_producer
from penstock.rows import Partition, TopicSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from penstock.clock import Clock
    from penstock.ports import Log
    from penstock.rows import TopicInfo
    from penstock.settings import Limits

PREFIX: Final = "_sink."
"""How the names of staging logs begin."""

LANES_MAX: Final = 4
"""A staging log has no more partitions: they keep tasks from waiting for each other, and no order."""

PART_BYTES: Final = 8 << 20
"""About how much one part holds; it is appended to the topic as it was staged, as one run."""

HELD_BYTES_MAX: Final = 48 << 20
"""What one task holds in memory, whatever the number of partitions."""


class Sink(NamedTuple):
    """A name under which one query at a time delivers its batches."""

    name: str
    query: str
    once: bool = False
    """It has this one batch only, and is forgotten when that is done: a job, no stream."""

    @property
    def staging_name(self) -> str:
        """The name of its staging log: another query never shares it."""
        if self.once:
            return f"{PREFIX}{self.name}"
        return f"{PREFIX}{self.name[:80]}.{xxhash.xxh64_hexdigest(f'{self.name} {self.query}'.encode())}"


class StagedPart(NamedTuple):
    """One part: consecutive events in a staging log that are to be appended together."""

    log_id: str
    lane: int
    start: int
    stop: int
    partition: int
    """Where they are to go."""
    size: int
    """Their bytes, as `Batch.sizes` counts them."""
    digest: int


def open_staging(log: Log, sink: Sink, topic: TopicInfo) -> TopicInfo:
    """Return the staging log of a sink that delivers to this topic, making it if it is not there."""
    return log.create_topic(sink.staging_name, TopicSettings(partitions=min(topic.settings.partitions, LANES_MAX)))


class _ThisProcess:
    """This process as a producer. Each one costs a log a little for a week, so tasks of one process share it."""

    RENEW_US: Final = 24 * 3600 * 1_000_000
    """A log would refuse one that it has never seen and that is much older."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._whose = (0, 0)
        self._producer = b""
        self._sequences: dict[Partition, int] = {}

    def run(self, lane: Partition, batch: Batch, now_us: int) -> Run:
        """Return the next run of this process in a lane."""
        with self._lock:
            whose = (os.getpid(), now_us // self.RENEW_US)
            if self._whose != whose:
                self._whose, self._producer, self._sequences = whose, process_producer(now_us), {}
            first = self._sequences.get(lane, 0)
            self._sequences[lane] = first + len(batch)
            return Run(self._producer, 0, first, len(batch), cols.digest(batch.columns))


_this_process = _ThisProcess()


class Stager:
    """Stages what one task writes: takes columns, checks them, divides them, and returns the parts."""

    def __init__(
        self, log: Log, staging: TopicInfo, topic: TopicInfo, *, limits: Limits, clock: Clock, turn: int = 0
    ) -> None:
        """`turn` is where events without a key begin to go round the partitions."""
        self._log = log
        self._staging = staging
        self._partitions = topic.settings.partitions
        self._topic = topic.name
        self._limits = EventLimits(limits)
        self._clock = clock
        self._turn = turn
        self._held: defaultdict[int, list[Batch]] = defaultdict(list)
        self._held_bytes: defaultdict[int, int] = defaultdict(int)
        self._parts: list[StagedPart] = []

    def add(self, events: pa.RecordBatch, partitions: npt.NDArray[np.int32] | None = None) -> None:
        """Take events, as `Batch.from_arrow` does; `partitions` says where they go, instead of their keys."""
        for start, piece in _pieces(events):
            batch = Batch.from_arrow(piece)
            self._limits.check(batch)
            if partitions is None:
                lanes = batch.partitions(self._partitions, keyless=self._turn % self._partitions)
                self._turn += 1
            else:
                lanes = partitions[start : start + len(batch)]
                self._check(lanes)
            for partition, part in batch.divide(lanes):
                self._hold(partition, part)

    def _check(self, partitions: npt.NDArray[np.int32]) -> None:
        wrong = partitions[(partitions < 0) | (partitions >= self._partitions)]
        if len(wrong):
            raise InvalidEvent(
                f"column 'partition': topic {self._topic!r} has no partition {wrong[0]}; "
                f"it has 0 to {self._partitions - 1}"
            )

    def _hold(self, partition: int, batch: Batch) -> None:
        self._held[partition].append(batch)
        self._held_bytes[partition] += batch.total_size
        if self._held_bytes[partition] >= PART_BYTES:
            self._append(partition)
        elif sum(self._held_bytes.values()) > HELD_BYTES_MAX:
            self._append(max(self._held_bytes, key=self._held_bytes.__getitem__))

    def _append(self, partition: int) -> None:
        held, size = self._held.pop(partition), self._held_bytes.pop(partition)
        batch = Batch(cols.concatenate([part.columns for part in held]))
        lane = self._staging.partitions[partition % self._staging.settings.partitions]
        run = _this_process.run(lane, batch, self._clock.time_us())
        (answer,) = self._log.append(lane, batch, [run])
        if answer.refused is not None:
            raise answer.refused
        assert answer.offsets is not None
        there = answer.offsets
        part = StagedPart(*lane, there.start, there.stop, partition, size, run.digest)
        self._parts.append(part)

    def finish(self) -> Sequence[StagedPart]:
        """Stage what is still held, and return all parts; within a partition they are in the order of their events."""
        for partition in sorted(self._held):
            self._append(partition)
        return self._parts


def _pieces(events: pa.RecordBatch, start: int = 0) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Divide rows until each piece is small enough to be one batch; with the number of its first row."""
    if not events.num_rows:
        return
    if events.nbytes <= PART_BYTES or events.num_rows == 1:
        yield start, events
        return
    half = events.num_rows // 2
    yield from _pieces(events.slice(0, half), start)
    yield from _pieces(events.slice(half), start + half)
