"""Publishing: a batch is divided among partitions, each part becomes a run of a producer and is appended.

A publish ends in one of three ways, and says which:

* a `Receipt`: every event is stored, durably as far as the store is;
* a `PenstockError` other than the next two: surely nothing was stored;
* `PublishUnknown`: cut off in the middle. `prepared.send()` may be repeated, by the same program, without
  ever making a duplicate, because the events keep their producer and sequences.

Over several partitions the parts may end differently; that is `PartialPublish`, with the end of each.

Sequences are given out when a publish is first sent, not when it is prepared, so that one that is never sent
leaves nothing behind. If the store has forgotten the producer (it was silent for a week), a first attempt
goes on under a new one; a repeated attempt cannot, since nobody could tell whether the first was stored.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from penstock import columns as cols
from penstock.batch import Batch
from penstock.clock import Clock, seconds
from penstock.errors import (
    PartialPublish,
    PenstockError,
    ProducerExpired,
    PublishUnknown,
    TooLarge,
    UsageError,
)
from penstock.offsets import Position, Range
from penstock.ports import Backend
from penstock.producers import Run, process_producer
from penstock.rows import Appended, Partition, TopicInfo

if TYPE_CHECKING:
    from penstock.bus.directory import TopicDirectory
    from penstock.settings import Limits


@dataclass(frozen=True, slots=True)
class Receipt:
    """Proof that events are stored, and where."""

    topic: str
    offsets: dict[int, Range | None]
    """Per partition, the offsets that these events got, in the order they were given; None for a repeat so
    old that only the fact is known."""
    duplicate: bool
    """Whether all of it was stored by an earlier attempt already."""
    _partition_of: npt.NDArray[np.int32] = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._partition_of)

    @property
    def position(self) -> Position:
        """Where the one event of this receipt is."""
        if len(self) != 1:
            raise UsageError(f"this receipt is for {len(self):,} events: ask for `positions`")
        return self.positions[0]

    @property
    def positions(self) -> list[Position]:
        """Where each event is, in the order they were given."""
        following = {}
        for partition, offsets in self.offsets.items():
            if offsets is None:
                raise UsageError(f"partition {partition} stored these events so long ago that it only knows the fact")
            following[partition] = iter(offsets)
        return [Position(self.topic, index, next(following[index])) for index in self._partition_of.tolist()]


@dataclass(slots=True)
class Part:
    """The events of a publish that go to one partition."""

    partition: int
    batch: Batch
    run: Run | None = None
    """Given with the first attempt, and the same in all later ones."""


class Prepared:
    """A publish that may be sent, and sent again, without making a duplicate."""

    def __init__(
        self, topic: str, parts: list[Part], partition_of: npt.NDArray[np.int32], publisher: Publisher
    ) -> None:
        self.topic = topic
        self._parts = parts
        self._partition_of = partition_of
        self._publisher = publisher

    def __len__(self) -> int:
        return len(self._partition_of)

    def __repr__(self) -> str:
        return f"<Prepared {len(self):,} events for {self.topic!r}>"

    async def send(self, *, timeout: float | timedelta | None = None) -> Receipt:  # noqa: ASYNC109 - see below
        """Append what is not stored yet and return the receipt of all; may be repeated at any time.

        After `timeout` (seconds, or a `timedelta`) the outcome is unknown: `PublishUnknown`, which carries this
        object. If the calling task is cancelled it is unknown, too; keep this object, and send it again.
        """
        limit = None if timeout is None else seconds(timeout, "timeout")
        try:
            async with asyncio.timeout(limit):
                if len(self._parts) == 1:  # the rule for single events, and no task is needed for it
                    outcomes = [await self._outcome(self._parts[0])]
                else:
                    outcomes = await asyncio.gather(*map(self._outcome, self._parts))
        except TimeoutError:
            raise PublishUnknown(self.topic, len(self), self, f"no answer within {limit} s") from None
        stored = {index: answer for index, answer in outcomes if isinstance(answer, Appended)}
        errors = {index: answer for index, answer in outcomes if not isinstance(answer, Appended)}
        if errors:
            self._raise({index: answer.offsets for index, answer in stored.items()}, errors)
        return Receipt(
            self.topic,
            {index: answer.offsets for index, answer in stored.items()},
            duplicate=bool(stored) and all(answer.duplicate for answer in stored.values()),
            _partition_of=self._partition_of,
        )

    async def _outcome(self, part: Part) -> tuple[int, Appended | Exception]:
        try:
            return part.partition, await self._publisher.send(self.topic, part)
        except Exception as error:  # noqa: BLE001 - every end is reported, by `_raise`
            return part.partition, error

    def _raise(self, stored: dict[int, Range | None], errors: dict[int, Exception]) -> NoReturn:
        if stored:
            raise PartialPublish(self.topic, stored, errors, self)
        for error in errors.values():
            # Whatever is not one of our own errors came from below, perhaps after the write.
            if not isinstance(error, PenstockError):
                raise PublishUnknown(self.topic, len(self), self, repr(error)) from error
        raise next(iter(errors.values()))


class _Producer:
    """A producer of this process for one partition, and the sequences given out."""

    def __init__(self, now_us: int) -> None:
        self.id = process_producer(now_us)
        self.next_sequence = 0

    def run(self, batch: Batch) -> Run:
        first = self.next_sequence
        self.next_sequence += len(batch)
        return Run(self.id, 0, first, len(batch), cols.digest(batch.columns))


class Publisher:
    """Prepares publishes and sends them."""

    def __init__(self, backend: Backend, topics: TopicDirectory, limits: Limits, clock: Clock) -> None:
        self._backend = backend
        self._topics = topics
        self._limits = limits
        self._clock = clock
        self._producers: dict[Partition, _Producer] = {}
        self._turn = count()
        self._sending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def prepare(self, topic: str, partitions: int, batch: Batch) -> Prepared:
        """Check the limits, and divide the events among the topic's partitions."""
        batch = batch.compact()
        sizes = batch.sizes
        self._check_events(batch, sizes)
        # Events without a key go round the partitions, a publish at a time, so that each stays together.
        partition_of = batch.partitions(partitions, keyless=next(self._turn) % partitions)
        partition_bytes = np.bincount(partition_of, sizes, partitions)
        if (largest := partition_bytes.max()) > self._limits.batch_bytes_max:
            raise TooLarge(
                f"this publish, for partition {partition_bytes.argmax()},",
                int(largest),
                self._limits.batch_bytes_max,
                "publish it in several batches (limits.batch_bytes_max)",
            )
        parts = [Part(index, part) for index, part in _divide(batch, partition_of)]
        return Prepared(topic, parts, partition_of, self)

    def _check_events(self, batch: Batch, sizes: npt.NDArray[np.int64]) -> None:
        limits = self._limits
        elsewhere = "store large things elsewhere and publish where they are (limits.event_bytes_max)"
        _check_each(sizes, limits.event_bytes_max, "bytes", elsewhere)
        if batch.has("headers"):
            headers = batch.columns.column("headers")
            _check_each(cols.header_counts(headers), limits.headers_max, "headers", "limits.headers_max")
            _check_each(
                cols.header_sizes(headers),
                limits.headers_bytes_max,
                "bytes of headers",
                "limits.headers_bytes_max",
            )

    async def send(self, topic: str, part: Part) -> Appended:
        """Append one part; a refusal is raised."""
        info = await self._topics.info(topic)
        self._sending += 1
        self._idle.clear()
        try:
            with self._topics.forgotten_if_deleted(topic):
                return await self._append(info, part)
        finally:
            self._sending -= 1
            if not self._sending:
                self._idle.set()

    async def drained(self) -> None:
        """Return when no append is under way."""
        await self._idle.wait()

    async def _append(self, info: TopicInfo, part: Part) -> Appended:
        partition = Partition(info.log_id, part.partition)
        first_attempt = part.run is None
        if part.run is None:
            part.run = self._producer(partition).run(part.batch)
        (answer,) = await self._backend.append(partition, part.batch, [part.run])
        if first_attempt and isinstance(answer.refused, ProducerExpired):
            del self._producers[partition]
            part.run = self._producer(partition).run(part.batch)
            (answer,) = await self._backend.append(partition, part.batch, [part.run])
        if answer.refused is not None:
            raise answer.refused
        return answer

    def _producer(self, partition: Partition) -> _Producer:
        if partition not in self._producers:
            self._producers[partition] = _Producer(self._clock.time_us())
        return self._producers[partition]


def _divide(batch: Batch, partition_of: npt.NDArray[np.int32]) -> list[tuple[int, Batch]]:
    used = np.flatnonzero(np.bincount(partition_of)).tolist()
    if len(used) == 1:
        return [(used[0], batch)]
    return [(index, batch.select(np.flatnonzero(partition_of == index)).compact()) for index in used]


def _check_each(found: npt.NDArray[np.int64], limit: int, unit: str, advice: str) -> None:
    if len(found) and found.max() > limit:
        worst = int(found.argmax())
        raise TooLarge(f"event {worst} of this publish", int(found[worst]), limit, advice, unit=unit)
