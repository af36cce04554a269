"""Every error that Penstock raises, in one tree.

::

    * PenstockError
      - UsageError                 the call is wrong; fix the program; nothing was written
        + InvalidName              a topic, subscription or other name breaks the naming rule
        + InvalidEvent             a value cannot become an event of this topic
        + TooLarge                 an event, a batch or its headers exceed a limit
        + UnknownTopic             no topic of that name; the nearest one is suggested
        + TopicMismatch            a topic exists, but not as declared
        + SubscriptionMismatch     a subscription exists, but not in this way
        + BusClosed                the bus was used after it was closed
      - SparkUnavailable           Spark cannot run here; says what to install
      - MetricsUnavailable         metrics cannot be exported here; says what to install or do
      - SettingsError              a setting has a wrong name, type or value
      - CodecError
        + EncodeError              a value cannot be turned into bytes
        + DecodeError              bytes cannot be turned into a value
        + FutureVersion            the event was written by a newer version of its class
        + UpcasterMissing          an old event has no way up to the current version
      - PublishError
        + PublishUnknown           the events may or may not be stored; resend `prepared`
        + PartialPublish           some partitions of a batch succeeded, others did not
        + PublishHalted            an event before it was not stored, so it was not sent
        + BufferFull               a publisher has no room for an event: wait for some
      - ProjectionFailed           a projection's function cannot go on; says at which event, and why
      - NotDrained                 a test's world still has something to do; says what
      - WindowFull                 an offset is too far ahead of the first unsettled one
      - StoreError
        + StoreUnavailable         no store for this URL: unknown scheme or missing extra
        + StoreFull                the store's limit is reached; nothing was written
        + StoreClosed              the store was used after it was closed
        + TopicDeleted             this handle's topic was deleted, perhaps created anew
        + UnknownSubscription      no such subscription, or not any more
        + OffsetOutOfRange
          . Trimmed                the offset is below what retention kept
          . BeyondEnd              the offset is above the end: the log was truncated
        + DataLost                 a query would pass events that it can never read
        + GapFound                 reading event by event met a declared hole
        + ProducerRefused
          . ProducerConflict       the sequence is taken by other content
          . ProducerExpired        the producer was idle too long to tell a repeat from news
          . ProducerFenced         a newer epoch of the same producer is active
        + LeaseError
          . LeaseLost              the lease expired or was taken over
          . Fenced                 a write carried a stale fencing epoch and was refused
          . StaleDelivery          an event is settled by whom it is not held any more
        + SubscriptionBusy         another consumer has an exclusive subscription
        + TrimRefused              a protected subscription has not passed these events
        + StaleCursor              a cursor would move backwards within its generation
        + SinkConflict             a sink belongs to another query, or is past this batch
        + WriterStalled            another process holds the turn to write and does not move
        + WritingStopped           a sync failed, and so did what mends that
        + NewerFormat              the bytes were written by a newer version: upgrade
      - IntegrityError             stored or received bytes are not what they claim to be
        + InvalidBatch             bytes do not hold a valid batch of events
        + Corruption               stored bytes are damaged or missing; says where
        + StateMissing             cursors or parked rows are gone and cannot be derived

Three words have a fixed meaning in messages. *Refused*: surely not written. *Unknown*: it may
be written; a retry through the same prepared publish never makes a duplicate. *Damaged*: bytes on
a disk or a wire differ from what was written.

Every error survives pickling, because Spark carries errors between processes.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class PenstockError(Exception):
    """Raised when Penstock cannot do what it was asked; the root of the tree above."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the class with `args`, which breaks for constructors that compose
        # their message from facts.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[PenstockError], args: tuple[Any, ...], state: dict[str, Any]) -> PenstockError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error


# --- the call is wrong -----------------------------------------------------------------------


class UsageError(PenstockError):
    """Raised when a call cannot be right whatever the state of the store. Nothing was written."""


class InvalidName(UsageError):
    """Raised when a name breaks the rule `[a-z0-9][a-z0-9._-]{0,127}` without `..`."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(
            f"{what} name {name!r} is not allowed: use 1 to 128 of a-z, 0-9, '.', '_' and '-', "
            f"beginning with a letter or digit, without '..'"
        )
        self.name = name


class InvalidEvent(UsageError):
    """Raised when a value cannot become an event of this topic; the message says which and why."""


class TooLarge(UsageError):
    """Raised when an event, a batch or its headers exceed a limit. Nothing was written."""

    def __init__(self, what: str, size: int, limit: int, advice: str, *, unit: str = "bytes") -> None:
        super().__init__(f"{what} has {size:,} {unit}, the limit is {limit:,}: {advice}")
        self.size = size
        self.limit = limit


class UnknownTopic(UsageError):
    """Raised when no topic of that name exists. Declare it: `Bus(url, topics=[…])`."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        super().__init__(
            f"there is no topic {name!r}{did_you_mean(name, names)}; "
            f"declare it with Bus(…, topics=[Topic({name!r}, …)]) and it is created on open"
        )
        self.name = name


class TopicMismatch(UsageError):
    """Raised when a topic exists with other properties than declared, such as its partitions."""


class SubscriptionMismatch(UsageError):
    """Raised when a subscription exists in another mode than asked for. Nothing was changed."""


class BusClosed(UsageError):
    """Raised when a bus is used after it was closed. Make a new one: `Bus(url, topics=[…])`."""


class SparkUnavailable(PenstockError):
    """Raised when Spark cannot run here; the message says what to install."""


class MetricsUnavailable(PenstockError):
    """Raised when metrics cannot be exported here; the message says what to install, or what to do."""


class SettingsError(PenstockError):
    """Raised when a setting has a wrong name, type or value; says where it came from."""


# --- values and bytes ------------------------------------------------------------------------


class CodecError(PenstockError):
    """Raised when a value and its bytes cannot be turned into each other."""


class EncodeError(CodecError):
    """Raised when a value cannot be encoded. Nothing was written."""


class DecodeError(CodecError):
    """Raised when an event's bytes do not fit its class. The raw bytes stay readable as `data`."""


class FutureVersion(CodecError):
    """Raised when an event carries a later version than this process knows: upgrade it."""

    def __init__(self, event_type: str, version: int, known: int) -> None:
        super().__init__(
            f"{event_type!r} version {version} was written by a newer program; "
            f"this one knows up to version {known}: upgrade it"
        )
        self.event_type = event_type
        self.version = version
        self.known = known


class UpcasterMissing(CodecError):
    """Raised when an old event has no complete chain of upcasters to the current version."""

    def __init__(self, event_type: str, version: int, current: int) -> None:
        super().__init__(
            f"{event_type!r} version {version} cannot become version {current}: "
            f"register @upcaster({event_type!r}, from_version={version})"
        )
        self.event_type = event_type
        self.version = version
        self.current = current


# --- delivering ---------------------------------------------------------------------------------


class ProjectionFailed(PenstockError):
    """Raised when a projection cannot go on: its function raised, or returned what is no state, or an event has no key.

    Nothing of the event was written, and no later one of its partition is folded. Mend the function, or let it return
    the state as it was for such an event, and start again.
    """

    def __init__(self, projection: str, position: str, reason: str) -> None:
        super().__init__(f"projection {projection!r} cannot go on at {position}: {reason}")
        self.projection = projection
        self.position = position
        self.reason = reason


class NotDrained(PenstockError):
    """Raised when a world of a test (`penstock.testing.harness`) has something left that does not happen by itself.

    The message names it: a handler that hangs, a subscription that has halted, a lane that waits for an upgrade.
    """

    def __init__(self, when: str, left: str) -> None:
        super().__init__(f"the bus is not drained{' ' + when if when else ', and never will be'}: {left}")
        self.left = left


class WindowFull(PenstockError):
    """Raised when an offset is too far beyond a bitmap's start. Nothing was set; settle earlier ones."""

    def __init__(self, offset: int, start: int, limit: int) -> None:
        super().__init__(
            f"offset {offset} is {offset - start:,} beyond the window's start, {start}, and the window "
            f"holds {limit:,}: settle or park earlier events first"
        )
        self.offset = offset
        self.start = start
        self.limit = limit


# --- publishing ------------------------------------------------------------------------------


class PublishError(PenstockError):
    """Raised when a publish did not end with everything stored."""


class PublishUnknown(PublishError):
    """Raised when a publish was cut off: the events may or may not be stored.

    `await error.prepared.send()` may be repeated until it returns; it never makes a duplicate.
    """

    def __init__(self, topic: str, count: int, prepared: Any, cause: str) -> None:
        super().__init__(
            f"{count:,} events for {topic!r} may or may not be stored ({cause}); "
            f"repeat `await error.prepared.send()`: it never makes a duplicate"
        )
        self.topic = topic
        self.count = count
        self.prepared = prepared


class PartialPublish(PublishError):
    """Raised when a batch over several partitions ended differently in some of them.

    `receipts` and `errors` are keyed by partition. Resending `prepared` completes the failed ones and
    repeats the others without a duplicate.
    """

    def __init__(
        self, topic: str, receipts: Mapping[int, Any], errors: Mapping[int, BaseException], prepared: Any
    ) -> None:
        failed = "; ".join(f"partition {index}: {error}" for index, error in sorted(errors.items()))
        super().__init__(
            f"{topic!r}: {len(receipts)} partitions stored, {len(errors)} not ({failed}); "
            f"`await error.prepared.send()` completes the batch without a duplicate"
        )
        self.topic = topic
        self.receipts = dict(receipts)
        self.errors = dict(errors)
        self.prepared = prepared


class PublishHalted(PublishError):
    """Raised when buffered events were not sent, because others before them, of the same partition, were not stored.

    Surely nothing of them was stored. The error of those before is the cause. `await error.prepared.send()` sends
    them, after those before them if order matters.
    """

    def __init__(self, topic: str, partition: int, count: int, prepared: Any) -> None:
        super().__init__(
            f"{count:,} events for partition {partition} of {topic!r} were not sent, because others before them were "
            f"not stored; `await error.prepared.send()` sends them"
        )
        self.topic = topic
        self.partition = partition
        self.count = count
        self.prepared = prepared


class BufferFull(PublishError):
    """Raised when a buffered publisher holds as much as it may. The event was not taken; wait for room, or `put` it."""

    def __init__(self, topic: str, size: int, held: int, limit: int) -> None:
        super().__init__(
            f"the publisher of {topic!r} holds {held:,} bytes of {limit:,}, and there is no room for {size:,} more: "
            f"`await publisher.room()` before sending, or `await publisher.put(value)` (in_flight_bytes)"
        )
        self.topic = topic
        self.size = size
        self.held = held
        self.limit = limit


# --- stores ----------------------------------------------------------------------------------


class StoreError(PenstockError):
    """Raised when a store refuses or cannot do something. Nothing was written unless it says so."""


class StoreUnavailable(StoreError):
    """Raised when no store can be opened for a URL; the message says what to install or to write."""


class StoreFull(StoreError):
    """Raised when a store's limit is reached. Nothing was written; space frees by trimming."""


class StoreClosed(StoreError):
    """Raised when a store is used after `close()`."""


class TopicDeleted(StoreError):
    """Raised when a handle outlives its topic. Open the topic anew; the old offsets mean nothing there."""

    def __init__(self, log_id: str, *, topic: str | None = None) -> None:
        super().__init__(
            f"{_log(log_id, topic)} was deleted; if a topic of its name exists again, that is another log: open it anew"
        )
        self.log_id = log_id

    def of(self, topic: str) -> TopicDeleted:
        """Return this error, told by somebody who knows the topic's name."""
        return TopicDeleted(self.log_id, topic=topic)


class UnknownSubscription(StoreError):
    """Raised when a subscription does not exist, or was deleted meanwhile. Nothing was written."""

    def __init__(self, log_id: str, name: str, *, topic: str | None = None) -> None:
        super().__init__(
            f"{_log(log_id, topic)} has no subscription {name!r}; if it had one, it was deleted meanwhile, "
            f"perhaps with its topic"
        )
        self.log_id = log_id
        self.name = name

    def of(self, topic: str) -> UnknownSubscription:
        """Return this error, told by somebody who knows the topic's name."""
        return UnknownSubscription(self.log_id, self.name, topic=topic)


def _log(log_id: str, topic: str | None) -> str:
    return f"log {log_id}" if topic is None else f"topic {topic!r} (log {log_id})"


class OffsetOutOfRange(StoreError):
    """Raised when an offset is not in the log. `first` and `end` are the bounds that are."""

    def __init__(self, message: str, offset: int, first: int, end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.first = first
        self.end = end


class Trimmed(OffsetOutOfRange):
    """Raised when an offset is below the first one that retention kept."""

    @classmethod
    def at(cls, where: object, offset: int, first: int, end: int) -> Self:
        """Build the error for `offset` of a log that now begins at `first`."""
        return cls(f"{where}: offset {offset} was trimmed; the log holds [{first}, {end})", offset, first, end)


class BeyondEnd(OffsetOutOfRange):
    """Raised when an offset is above the log's end: this log was truncated, or it is another log."""

    @classmethod
    def at(cls, where: object, offset: int, first: int, end: int) -> Self:
        """Build the error for `offset` of a log that ends before it."""
        return cls(
            f"{where}: offset {offset} is beyond the end; the log holds [{first}, {end}): "
            f"it was truncated, or this position belongs to another log",
            offset,
            first,
            end,
        )


class DataLost(StoreError):
    """Raised when a query would pass events that it can never read: they were trimmed, or their topic was deleted."""


class GapFound(StoreError):
    """Raised when reading event by event meets a hole that the log declares, as `gap`.

    What is missing is lost; nothing else is. `bus.read_batches` hands gaps over instead of raising.
    """

    def __init__(self, where: object, gap: Any) -> None:
        super().__init__(f"{where}: {gap}; read on from offset {gap.stop}")
        self.gap = gap


class ProducerRefused(StoreError):
    """Raised when a producer's run cannot be accepted. It was surely not written by this call."""


class ProducerConflict(ProducerRefused):
    """Raised when a sequence is already taken by other content, or a run overlaps one in part."""


class ProducerExpired(ProducerRefused):
    """Raised when a producer may have been forgotten, so that a repeat cannot be told from news."""


class ProducerFenced(ProducerRefused):
    """Raised when a run carries a lower epoch than its producer's current one."""


class LeaseError(StoreError):
    """Raised when somebody acts for a lease that is not theirs any more."""


class LeaseLost(LeaseError):
    """Raised when a lease expired or was taken over: stop what it covered, then acquire it anew."""


class Fenced(LeaseError):
    """Raised when a write carries a stale fencing epoch. Nothing was written."""


class StaleDelivery(LeaseError):
    """Raised when an event is settled by a consumer that does not hold it any more: its shard was lost, or moved.

    Nothing was settled. Whoever has the shard now is given the event again, or was already.
    """

    def __init__(self, shard: str, why: str) -> None:
        super().__init__(f"{shard} is not held any more: {why}; its events are delivered to whoever has it now")
        self.shard = shard


class SubscriptionBusy(StoreError):
    """Raised when an exclusive subscription has a consumer already.

    Wait for its end, choose `failover` for a consumer that stands by, or give the same `consumer_id` to take over.
    """

    def __init__(self, topic: str, name: str, owner: str) -> None:
        super().__init__(
            f"subscription {name!r} of topic {topic!r} is exclusive, and consumer {owner!r} has it: wait for its end, "
            f"use mode 'failover' to stand by, or give the same consumer_id to take over"
        )
        self.topic = topic
        self.name = name
        self.owner = owner


class TrimRefused(StoreError):
    """Raised when trimming would remove what a protected subscription has not passed. Nothing was removed."""


class StaleCursor(StoreError):
    """Raised when a cursor would move backwards within its generation. Nothing was written."""


class SinkConflict(StoreError):
    """Raised when a sink belongs to another query, or has forgotten a batch: nothing of it was written."""


class WriterStalled(StoreError):
    """Raised when another process holds the turn to write and does not move: it is frozen, or its disk is.

    Nothing was written. Writing goes on by itself when that process goes on or ends.
    """

    def __init__(self, what: str, pid: int | None, waited_seconds: float) -> None:
        holder = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"{what}: {holder} holds the turn to write and has not moved for {waited_seconds:.3g} s; nothing was "
            f"written. If it is stopped or hangs, resume or kill it; writing goes on by itself then"
        )
        self.pid = pid


class WritingStopped(StoreError):
    """Raised when a sync failed and what should have mended that failed, too. Nothing was written.

    What is acknowledged can still be read. Look at the disk, then open the store anew.
    """


class NewerFormat(StoreError):
    """Raised when bytes were written by a newer version of Penstock: upgrade. Nothing was changed or cut."""


class IntegrityError(PenstockError):
    """Raised when stored or received bytes are not what they claim to be. The CLI exits with 3."""


class InvalidBatch(IntegrityError):
    """Raised when bytes do not hold a valid batch of events; nothing of them was used."""


class Corruption(IntegrityError):
    """Raised when stored bytes are damaged, missing or foreign; the rest stays readable.

    `kind` is one of `torn`, `corrupt`, `missing`, `foreign`; `file` and `byte` say where, and `start` and `stop`
    which offsets it concerns. `penstock verify` lists all damage, `penstock repair` replaces it by a declared gap.
    """

    def __init__(self, kind: str, file: str, *, byte: int, start: int, stop: int | None, detail: str) -> None:
        until = "the end" if stop is None else str(stop)
        super().__init__(
            f"{kind}: {file} at byte {byte}, offsets {start} to {until}: {detail}; "
            f"`penstock verify` shows all damage, `penstock repair` declares what is lost"
        )
        self.kind = kind
        self.file = file
        self.byte = byte
        self.start = start
        self.stop = stop
        self.detail = detail


class StateMissing(IntegrityError):
    """Raised when progress that cannot be derived (cursors, parked rows) is gone or damaged.

    Nothing is invented in its place: restore the file, or say with `penstock repair` that it is lost.
    """


# --- suggestions -----------------------------------------------------------------------------


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, the known ones if few, or nothing."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]!r}?"
    if 0 < len(names) <= 8:
        return f"; known: {', '.join(map(repr, names))}"
    return ""
