"""Publishing: events are divided among partitions, become runs of a producer, and are appended.

A publish ends in one of three ways, and says which:

* a `Receipt`: every event is stored, durably as far as the store is;
* a `PenstockError` other than the next two: surely nothing was stored;
* `PublishUnknown`: cut off in the middle. `prepared.send()` may be repeated, by the same program, without
  ever making a duplicate, because the events keep their producer and sequences.

A batch is appended by itself, one part per partition, and the parts may end differently; that is
`PartialPublish`, with the end of each. Single events for the same partition share their appends
(`penstock.bus.grouping`), and may be stored with others; yet each has an end of its own.

Sequences are given out when a publish is first sent, not when it is prepared, so that one that is never sent
leaves nothing behind. If the store has forgotten the producer (it was silent for a week), a first attempt
goes on under a new one; a repeated attempt cannot, since nobody could tell whether the first was stored.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from penstock import columns as cols
from penstock.batch import Batch
from penstock.bus.grouping import Group, Lane, Part, Room
from penstock.bus.measuring import Published
from penstock.clock import Clock, seconds
from penstock.errors import (
    PartialPublish,
    PenstockError,
    ProducerExpired,
    PublishUnknown,
    TooLarge,
    TopicDeleted,
    UsageError,
)
from penstock.events import Event
from penstock.limits import EventLimits
from penstock.offsets import Position, Range
from penstock.ports import Backend
from penstock.producers import Run, process_producer
from penstock.rows import Appended, Partition, TopicInfo

if TYPE_CHECKING:
    from penstock.bus.directory import TopicDirectory
    from penstock.settings import Limits


class Receipt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Proof that events are stored, and where."""

    topic: str
    duplicate: bool
    """Whether all of it was stored by an earlier attempt already."""
    _appended: dict[int, Range | None]
    """Where the appends that stored these events, and perhaps others with them, put theirs."""
    _which: int | npt.NDArray[np.int32]
    """The place of the one event in its append; or the partition of each, if nothing else was appended."""

    @property
    def offsets(self) -> dict[int, Range | None]:
        """Per partition, the offsets that these events got, in the order they were given.

        None for a repeat so old that only the fact is known.
        """
        if not isinstance(self._which, int):
            return self._appended
        ((partition, group),) = self._appended.items()
        first = None if group is None else group.start + self._which
        return {partition: None if first is None else Range(first, first + 1)}

    def __len__(self) -> int:
        return 1 if isinstance(self._which, int) else len(self._which)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Receipt):
            return NotImplemented
        return (self.topic, self.offsets, self.duplicate) == (other.topic, other.offsets, other.duplicate)

    __hash__ = None  # type: ignore[assignment] # offsets are a dictionary

    def __repr__(self) -> str:
        return f"Receipt(topic={self.topic!r}, offsets={self.offsets!r}, duplicate={self.duplicate!r})"

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
        partition_of = list(following) if isinstance(self._which, int) else self._which.tolist()
        return [Position(self.topic, index, next(following[index])) for index in partition_of]


class Prepared(ABC):
    """A publish that may be sent, and sent again, without making a duplicate."""

    __slots__ = ("_publisher", "topic")

    topic: str
    _publisher: Publisher

    @abstractmethod
    def __len__(self) -> int: ...

    def __repr__(self) -> str:
        return f"<Prepared {len(self):,} events for {self.topic!r}>"

    @abstractmethod
    async def send(self, *, timeout: float | timedelta | None = None) -> Receipt:  # noqa: ASYNC109 - see below
        """Append what is not stored yet and return the receipt of all; may be repeated at any time.

        After `timeout` (seconds, or a `timedelta`) the outcome is unknown: `PublishUnknown`, which carries this
        object. If the calling task is cancelled it is unknown, too; keep this object, and send it again.
        """

    async def _send_within(self, timeout: float | timedelta) -> Receipt:  # noqa: ASYNC109 - see `send`
        limit = seconds(timeout, "timeout")
        try:
            async with asyncio.timeout(limit):
                return await self.send()
        except TimeoutError:
            raise PublishUnknown(self.topic, len(self), self, f"no answer within {limit} s") from None


class PreparedEvent(Prepared):
    """One event, which is sent in a group with others."""

    __slots__ = ("_event", "_group", "_index", "_partition", "_size")

    def __init__(self, topic: str, publisher: Publisher, event: Event, size: int, partition: int) -> None:
        self.topic = topic
        self._publisher = publisher
        self._event = event
        self._size = size
        self._partition = partition
        self._group: Group | None = None
        self._index = 0

    def __len__(self) -> int:
        return 1

    async def send(self, *, timeout: float | timedelta | None = None) -> Receipt:  # noqa: ASYNC109 - see `Prepared`
        """See `Prepared`."""
        if timeout is not None:
            return await self._send_within(timeout)
        publisher = self._publisher
        try:
            info = publisher.topics.known(self.topic) or await publisher.topics.info(self.topic)
            lane = publisher.lane(self.topic, info, self._partition)
            group = self._group
            if group is None or group.dissolved:
                if not publisher.room.take(self._size):
                    await publisher.room.wait(self._size)
                group = self._joined(lane)
            earlier = group.answer
            answer = await lane.outcome(group) if earlier is None else earlier
        except PenstockError:
            raise
        except Exception as error:
            # Whatever is not one of our own errors came from below, perhaps after the write.
            raise PublishUnknown(self.topic, 1, self, repr(error)) from error
        return Receipt(self.topic, answer.duplicate or earlier is not None, group.offsets, self._index)

    def _joined(self, lane: Lane) -> Group:
        """Return the group that this event is in, with the room that was taken for it."""
        group = self._group
        if group is not None and not group.dissolved:  # another task sent this while we waited for room
            self._publisher.room.leave(1, self._size)
        else:
            group = self._group = lane.add(self._event, self._size)
            self._index = len(group.events) - 1
        return group


class PreparedBatch(Prepared):
    """Many events, divided into one part per partition."""

    __slots__ = ("_partition_of", "_parts")

    def __init__(
        self, topic: str, publisher: Publisher, parts: list[Part], partition_of: npt.NDArray[np.int32]
    ) -> None:
        self.topic = topic
        self._publisher = publisher
        self._parts = parts
        self._partition_of = partition_of

    def __len__(self) -> int:
        return len(self._partition_of)

    async def send(self, *, timeout: float | timedelta | None = None) -> Receipt:  # noqa: ASYNC109 - see `Prepared`
        """See `Prepared`."""
        if timeout is not None:
            return await self._send_within(timeout)
        if len(self._parts) == 1:  # no task is needed for it
            outcomes = [await self._outcome(self._parts[0])]
        else:
            outcomes = await asyncio.gather(*map(self._outcome, self._parts))
        stored = {index: answer for index, answer in outcomes if isinstance(answer, Appended)}
        errors = {index: answer for index, answer in outcomes if not isinstance(answer, Appended)}
        offsets = {index: answer.offsets for index, answer in stored.items()}
        if errors:
            self._raise(offsets, errors)
        duplicate = bool(stored) and all(answer.duplicate for answer in stored.values())
        return Receipt(self.topic, duplicate, offsets, self._partition_of)

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
        self.room = Room()
        """What single events take, and batches only enter, from being sent until their append has ended."""
        self._backend = backend
        self.topics = topics
        self._clock = clock
        self._limits = EventLimits(limits)
        self.part_bytes_max = limits.batch_bytes_max
        """What may go to a partition at once."""
        self.certainly_allowed = min(limits.event_bytes_max, limits.batch_bytes_max)
        """An event without headers that is no larger needs no other check."""
        self._producers: dict[Partition, _Producer] = {}
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._turn = count()
        self.published: dict[str, Published] = {}
        """What was counted, by topic."""

    # --- preparing ---------------------------------------------------------------------------

    def prepare(self, topic: str, partitions: int, batch: Batch) -> Prepared:
        """Check the limits, and divide the events among the topic's partitions."""
        batch = batch.compact()
        sizes = self._limits.check(batch)
        # Events without a key go round the partitions, a publish at a time, so that each stays together.
        partition_of = batch.partitions(partitions, keyless=next(self._turn) % partitions)
        partition_bytes = np.bincount(partition_of, sizes, partitions)
        self._check_part(int(partition_bytes.argmax()), int(partition_bytes.max()))
        parts = [Part(index, part, int(partition_bytes[index])) for index, part in batch.divide(partition_of)]
        return PreparedBatch(topic, self, parts, partition_of)

    def prepare_event(self, topic: str, partitions: int, event: Event) -> Prepared:
        """Do the same for one event, which becomes columns only together with others."""
        partition = 0
        if partitions > 1:
            partition = (
                next(self._turn) % partitions if event.key is None else cols.partition_of_key(event.key, partitions)
            )
        return PreparedEvent(topic, self, event, self.checked_size(event, partition), partition)

    def prepare_part(self, topic: str, partition: int, batch: Batch) -> Prepared:
        """Do the same for events of one partition whose limits were checked, one by one and together."""
        part = Part(partition, batch, batch.total_size)
        return PreparedBatch(topic, self, [part], np.full(len(batch), partition, np.int32))

    def checked_size(self, event: Event, partition: int) -> int:
        """Return the bytes of an event; raise `TooLarge` if it has too much of anything."""
        size = _size(event)
        if size > self.certainly_allowed or event.headers:
            self._limits.size.check(size)
            self._limits.headers.check(len(event.headers))
            self._limits.header_bytes.check(_header_bytes(event.headers))
            self._check_part(partition, size)
        return size

    def _check_part(self, partition: int, size: int) -> None:
        if size > self.part_bytes_max:
            raise TooLarge(
                f"this publish, for partition {partition},",
                size,
                self.part_bytes_max,
                "publish it in several batches (limits.batch_bytes_max)",
            )

    # --- sending -----------------------------------------------------------------------------

    def lane(self, topic: str, info: TopicInfo, number: int) -> Lane:
        """Return where single events for a partition of the topic gather."""
        lane = self._lanes.get((info.log_id, number))
        if lane is None:
            partition = Partition(info.log_id, number)
            lane = Lane(number, partial(self._append, topic, partition), self.part_bytes_max, self.room)
            self._lanes[partition] = lane
        return lane

    async def send(self, topic: str, part: Part) -> Appended:
        """Append one part by itself; a refusal is raised."""
        info = await self.topics.info(topic)
        self.room.occupy(1, 0)
        try:
            return await self._append(topic, Partition(info.log_id, part.partition), part)
        finally:
            self.room.leave(1, 0)

    async def drained(self) -> None:
        """Return when no append is under way, and nothing waits for one."""
        await self.room.emptied()

    async def _append(self, topic: str, partition: Partition, part: Part) -> Appended:
        counts = self.published.get(topic)
        if counts is None:
            counts = self.published[topic] = Published()
        began = self._clock.monotonic()
        try:
            answer = await self._append_once(topic, partition, part)
        except BaseException as error:
            counts.failed(len(part.batch), error)
            raise
        counts.stored(len(part.batch), part.nbytes, self._clock.monotonic() - began, duplicate=answer.duplicate)
        return answer

    async def _append_once(self, topic: str, partition: Partition, part: Part) -> Appended:
        first_attempt = part.run is None
        if part.run is None:
            part.run = self._producer(partition).run(part.batch)
        try:
            with self.topics.forgotten_if_deleted(topic):
                (answer,) = await self._backend.append(partition, part.batch, [part.run])
                if first_attempt and isinstance(answer.refused, ProducerExpired):
                    self._producers.pop(partition, None)
                    part.run = self._producer(partition).run(part.batch)
                    (answer,) = await self._backend.append(partition, part.batch, [part.run])
        except TopicDeleted:
            self._lanes.pop(partition, None)
            self._producers.pop(partition, None)
            raise
        if answer.refused is not None:
            raise answer.refused
        return answer

    def _producer(self, partition: Partition) -> _Producer:
        if partition not in self._producers:
            self._producers[partition] = _Producer(self._clock.time_us())
        return self._producers[partition]


def _size(event: Event) -> int:
    """Return the bytes of an event, as `Batch.sizes` counts them for one that stands alone."""
    size = len(event.data)
    if event.key is not None:
        size += len(event.key)
    for text in (event.type, event.content_type, event.id, event.source, event.subject):
        if text is not None:
            size += _text_bytes(text)
    if event.time is not None:
        size += 8
    if event.expires_at is not None:
        size += 8
    if event.headers:
        size += _header_bytes(event.headers)
    return size


def _header_bytes(headers: Mapping[str, bytes]) -> int:
    return sum(_text_bytes(name) + len(value) for name, value in headers.items())


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
