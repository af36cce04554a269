"""The bus for code that is not asynchronous: Django, Flask, notebooks, scripts, workers.

Written by `tools/sync_facade.py`: change the classes that it is made from, and run that.

`bus.sync()` gives a `SyncBus`. It has the methods of `Bus`, and they return when those have ended. What it hands out is
of the same kind: consumers to iterate over with `for`, deliveries to `ack`, a prepared publish to `send`. There is no
second implementation: an event loop runs in a thread of its own, and `penstock.bus.portal` says what holds for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, Unpack, overload

from penstock.bus.bus import Bus
from penstock.bus.consumer import BATCH_BYTES_MAX, BATCH_EVENTS_MAX, Consumer
from penstock.bus.dead_letters import DEAD, DeadLetters
from penstock.bus.delivered import DeliveredBatch, Delivery
from penstock.bus.portal import Facade
from penstock.bus.publisher import Prepared

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime, timedelta
    from os import PathLike
    from types import TracebackType

    import numpy as np
    import pyarrow as pa

    from penstock.batch import Batch, StoredEvent
    from penstock.bus.delayed import ScheduledReceipt
    from penstock.bus.deliveries import Checkpoint, Retry
    from penstock.bus.health import Health
    from penstock.bus.letters import DeadGroup, DeadLetter, DeadStats, Replayed, Where
    from penstock.bus.publisher import Receipt
    from penstock.bus.topic import EventFields, Key, Topic
    from penstock.engine.lag import LagInfo
    from penstock.engine.policy import Exhausted
    from penstock.events import Event
    from penstock.inbox import Once
    from penstock.metrics import Metric
    from penstock.offsets import Gap, Position, Range
    from penstock.rows import ParkedState, Subscription
    from penstock.runtime.subscriptions import Start
    from penstock.settings import Settings

T = TypeVar("T")


class SyncPrepared(Facade[Prepared]):
    """A publish that may be sent, and sent again, without making a duplicate."""

    __slots__ = ()

    @property
    def topic(self) -> str:
        """Its topic."""
        return self._wrapped.topic

    def __len__(self) -> int:
        return len(self._wrapped)

    def send(self, *, timeout: float | timedelta | None = None) -> Receipt:
        """Append what is not stored yet and return the receipt of all; may be repeated at any time.

        After `timeout` (seconds, or a `timedelta`) the outcome is unknown: `PublishUnknown`, which carries this
        object. If the calling task is cancelled it is unknown, too; keep this object, and send it again.
        """
        return self._portal.call(self._wrapped.send(timeout=timeout))


class SyncDelivery(Facade[Delivery[T]], Generic[T]):
    """One event, handed over."""

    __slots__ = ()

    @property
    def stale(self) -> bool:
        """Whether the shard was lost, or loaded anew, since."""
        return self._wrapped.stale

    @property
    def event(self) -> StoredEvent:
        """The event as it is stored."""
        return self._wrapped.event

    @property
    def attempt(self) -> int:
        """Which attempt this is, counted from 1."""
        return self._wrapped.attempt

    @property
    def replay(self) -> int:
        """How many times it was brought back from the dead letters; 0 for an ordinary delivery."""
        return self._wrapped.replay

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        return self._wrapped.position

    @property
    def subscription(self) -> str:
        """The name of the subscription that it is delivered to."""
        return self._wrapped.subscription

    @property
    def value(self) -> T:
        """The event as its class; `DecodeError` if its bytes do not fit, `FutureVersion` if it is too new."""
        return self._wrapped.value

    @property
    def headers(self) -> dict[str, bytes]:
        """The event's headers."""
        return self._wrapped.headers

    @property
    def identity(self) -> tuple[str, str, str]:
        """Whose event it is, as `topic/subscription`, its source and its id: the same whenever and however it comes."""
        return self._wrapped.identity

    def once(self, connection: Any, *, scope: str | None = None) -> Once:
        """Mark it as handled in a transaction of yours: `with delivery.once(connection) as first: …`, or `async with`.

        `first` is False if it was marked before, and then the block must do nothing. The mark is committed with what
        the block writes through this connection, or undone with it; see `penstock.inbox`. `scope` says in whose name it
        is marked, instead of the subscription's: for a handler with several such blocks, or for subscriptions that
        share one effect.
        """
        return self._wrapped.once(connection, scope=scope)

    def extend(self, by: float | timedelta) -> None:
        """Have so much more time, from now on, before it counts as failed; for policies with a `timeout`."""
        self._portal.call(self._wrapped.extend(by))

    def ack(self) -> None:
        """Say that it is done."""
        self._portal.call(self._wrapped.ack())

    def nack(
        self, *, delay: float | timedelta | None = None, reason: str | BaseException = "", counted: bool = True
    ) -> None:
        """Say that it failed: it is tried again after `delay`, or the policy's backoff, as often as the policy says.

        An attempt that is not `counted` was not the event's fault, and does not bring it closer to its end.
        """
        self._portal.call(self._wrapped.nack(delay=delay, reason=reason, counted=counted))

    def reject(self, reason: str | BaseException = "") -> None:
        """Say that no attempt can succeed: it becomes a dead letter at once."""
        self._portal.call(self._wrapped.reject(reason))


class SyncDeliveredBatch(Facade[DeliveredBatch]):
    """Many events of one partition, handed over together."""

    __slots__ = ()

    @property
    def stale(self) -> bool:
        """Whether the shard was lost, or loaded anew, since."""
        return self._wrapped.stale

    def extend(self, by: float | timedelta) -> None:
        """Have so much more time, from now on, before it counts as failed; for policies with a `timeout`."""
        self._portal.call(self._wrapped.extend(by))

    @property
    def attempts(self) -> Mapping[int, int]:
        """Which attempt this is, by offset, for those that it is not the first of."""
        return self._wrapped.attempts

    @property
    def replays(self) -> Mapping[int, int]:
        """How often each was brought back from the dead letters, for those that were."""
        return self._wrapped.replays

    @property
    def batches(self) -> list[Batch]:
        """The events as columns, in their order; each is a block of the log, or a selection of one."""
        return self._wrapped.batches

    def __len__(self) -> int:
        return len(self._wrapped)

    def __iter__(self) -> Iterator[StoredEvent]:
        return iter(self._wrapped)

    @property
    def partition(self) -> int:
        """The partition that all of them are of."""
        return self._wrapped.partition

    @property
    def offsets(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The offset of each event, ascending unless some were kept aside before."""
        return self._wrapped.offsets

    def to_arrow(self) -> pa.RecordBatch:
        """Return all events as one Arrow record batch, with the columns of `Batch.to_arrow`."""
        return self._wrapped.to_arrow()

    @overload
    def ack(self) -> None: ...

    @overload
    def ack(self, offsets: Range | Iterable[int]) -> None: ...

    @overload
    def ack(self, *, up_to: int) -> None: ...

    def ack(self, offsets: Range | Iterable[int] | None = None, *, up_to: int | None = None) -> None:
        """Say that all of it is done; or these offsets of it; or those up to and including one."""
        wrapped: Any = self._wrapped
        self._portal.call(wrapped.ack(offsets, up_to=up_to))

    def nack(
        self,
        offsets: Range | Iterable[int] | None = None,
        *,
        delay: float | timedelta | None = None,
        reason: str | BaseException = "",
    ) -> None:
        """Say that all of it failed, or these offsets of it."""
        self._portal.call(self._wrapped.nack(offsets, delay=delay, reason=reason))

    def reject(self, offsets: Range | Iterable[int], reason: str | BaseException = "") -> None:
        """Say that no attempt at these can succeed: they become dead letters at once."""
        self._portal.call(self._wrapped.reject(offsets, reason))


class SyncConsumer(Facade[Consumer[T]], Generic[T]):
    """A consumer of a subscription; `with` it, then iterate over it or over its `batches()`."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The subscription's name."""
        return self._wrapped.name

    def __enter__(self) -> Self:
        self._portal.call(self._wrapped.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back what was not settled, write what was, and leave; may be repeated."""
        self._portal.close(self._wrapped.close())

    @property
    def active(self) -> list[int]:
        """The partitions that this consumer has events of now; a standby of a `failover` subscription has none."""
        return self._portal.run(lambda: self._wrapped.active)

    @property
    def trouble(self) -> dict[int, dict[str, str]]:
        """What goes wrong at the moment, by partition: `read`, `fetch`, `commit`, `halted` or `parked`, and why."""
        return self._portal.run(lambda: self._wrapped.trouble)

    def flush(self) -> None:
        """Return when everything that was settled is on the medium; `StaleDelivery` if some of it never will be."""
        self._portal.call(self._wrapped.flush())

    def __iter__(self) -> Iterator[SyncDelivery[T]]:
        for item in self._portal.iterate(self._wrapped.__aiter__()):
            yield SyncDelivery(self._portal, item)

    def batches(
        self, *, max_events: int = BATCH_EVENTS_MAX, max_bytes: int = BATCH_BYTES_MAX
    ) -> Iterator[SyncDeliveredBatch]:
        """Yield events as batches of at most so many events and, unless a single one is larger, bytes."""
        for item in self._portal.iterate(self._wrapped.batches(max_events=max_events, max_bytes=max_bytes)):
            yield SyncDeliveredBatch(self._portal, item)


class SyncDeadLetters(Facade[DeadLetters]):
    """The dead letters of all subscriptions."""

    __slots__ = ()

    def ls(
        self,
        topic: Topic[Any] | str,
        name: str,
        *,
        states: Iterable[ParkedState] = DEAD,
        after: Position | None = None,
        limit: int = 100,
        **where: Unpack[Where],
    ) -> list[DeadLetter]:
        """Return dead letters by position, at most `limit`, beginning after the given one.

        `states` may also have `waiting`, for its next attempt, and `done`, after a replay.
        """
        return self._portal.call(self._wrapped.ls(topic, name, states=states, after=after, limit=limit, **where))

    def show(self, topic: Topic[Any] | str, name: str, offset: int, *, partition: int | None = None) -> DeadLetter:
        """Return one parked event, in whichever state, and when it was appended if the log still has it.

        `UsageError` if the subscription has none there. `partition` need not be given if the topic has one.
        """
        return self._portal.call(self._wrapped.show(topic, name, offset, partition=partition))

    def count(
        self, topic: Topic[Any] | str, name: str, *, states: Iterable[ParkedState] = DEAD, **where: Unpack[Where]
    ) -> int:
        """Return how many there are."""
        return self._portal.call(self._wrapped.count(topic, name, states=states, **where))

    def groups(self, topic: Topic[Any] | str, name: str, **where: Unpack[Where]) -> list[DeadGroup]:
        """Return the causes of dead letters, the most frequent first.

        At most 1,000 are told apart; all that is left then is the last group, without a fingerprint.
        """
        return self._portal.call(self._wrapped.groups(topic, name, **where))

    def stats(self, topic: Topic[Any] | str | None = None, name: str | None = None) -> list[DeadStats]:
        """Return the parked events of each subscription, counted: of all topics, of one, or of one subscription."""
        return self._portal.call(self._wrapped.stats(topic, name))

    def replay(
        self,
        topic: Topic[Any] | str,
        name: str,
        *,
        rate: float | None = None,
        dry_run: bool = False,
        job: str | None = None,
        **where: Unpack[Where],
    ) -> Replayed:
        """Bring dead letters back: they are delivered again, to this subscription alone.

        * `rate`: events a second at most; without it, all at once.
        * `dry_run`: only mark them, and say how many. `replay(…, job=result.job)` then brings back exactly these.
        * `job`: instead of a filter, what was marked before and is not back yet: by a dry run, or by a replay that was
          cut off. A letter is marked by the last replay that was asked for it.
        """
        return self._portal.call(self._wrapped.replay(topic, name, rate=rate, dry_run=dry_run, job=job, **where))

    def purge(self, topic: Topic[Any] | str, name: str, **where: Unpack[Where]) -> int:
        """Remove dead letters, and those that are done after a replay; return how many. It cannot be undone."""
        return self._portal.call(self._wrapped.purge(topic, name, **where))


class SyncBus(Facade[Bus]):
    """A bus whose methods wait for their end; `with bus.sync() as sync_bus`, or use it, and `close()` it."""

    __slots__ = ()

    @property
    def url(self) -> str:
        """The store's URL, with its secret if it has one: what another process opens to reach the same events."""
        return self._wrapped.url

    @property
    def settings(self) -> Settings:
        """The settings that it was given, or else those in force where it runs."""
        return self._wrapped.settings

    def __enter__(self) -> Self:
        self._portal.call(self._wrapped.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let handlers and every publish under way end, then close; may be repeated.

        If the caller is cancelled meanwhile it goes on by itself. Publishers that are open are closed first. A failure
        of theirs that nobody has seen is raised at the end.
        """
        self._portal.stop()

    @overload
    def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        delay: None = None,
        at: None = None,
        timeout: float | timedelta | None = None,
        **fields: Unpack[EventFields],
    ) -> Receipt: ...

    @overload
    def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        delay: float | timedelta,
        timeout: float | timedelta | None = None,
        **fields: Unpack[EventFields],
    ) -> ScheduledReceipt: ...

    @overload
    def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        at: datetime,
        timeout: float | timedelta | None = None,
        **fields: Unpack[EventFields],
    ) -> ScheduledReceipt: ...

    def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        timeout: float | timedelta | None = None,
        **fields: Unpack[EventFields],
    ) -> Receipt | ScheduledReceipt:
        """Store one event and return its receipt.

        `value` is one of the topic's classes, `bytes`, or a whole `Event`; `fields` set what it says besides.
        After `timeout` the outcome is unknown: `PublishUnknown`.

        With `delay` (seconds, or a `timedelta`) or `at` the event is stored now and enters the topic then, or as
        soon as a bus is open after that; its `ttl` begins then, too. A `ScheduledReceipt` is returned.
        """
        wrapped: Any = self._wrapped
        answer: Receipt | ScheduledReceipt = self._portal.call(
            wrapped.publish(topic, value, delay=delay, at=at, timeout=timeout, **fields)
        )
        return answer

    def publish_batch(
        self,
        topic: Topic[T] | str,
        values: Sequence[T | Event] | Batch,
        *,
        keys: Sequence[Key] | None = None,
        timeout: float | timedelta | None = None,
    ) -> Receipt:
        """Store many events: one append per partition, each of them whole or not at all.

        `values` is a sequence as for `publish`, or a `Batch` for those who have columns. `keys` instead of
        the topic's key. A mixed outcome raises `PartialPublish`.
        """
        return self._portal.call(self._wrapped.publish_batch(topic, values, keys=keys, timeout=timeout))

    def prepare(self, topic: Topic[T] | str, value: T | Event, **fields: Unpack[EventFields]) -> SyncPrepared:
        """Encode and check an event now, and send it later, as often as needed: it is stored once.

        Does no I/O, so the topic must be declared with this bus.
        """
        return SyncPrepared(self._portal, self._portal.run(lambda: self._wrapped.prepare(topic, value, **fields)))

    def prepare_batch(
        self, topic: Topic[T] | str, values: Sequence[T | Event] | Batch, *, keys: Sequence[Key] | None = None
    ) -> SyncPrepared:
        """Encode and check many events now, and send them later, as often as needed: they are stored once."""
        return SyncPrepared(
            self._portal, self._portal.run(lambda: self._wrapped.prepare_batch(topic, values, keys=keys))
        )

    def cancel_scheduled(self, id: str) -> bool:
        """Cancel a delayed publish by its receipt's id; False if it is published, or being published, or unknown."""
        return self._portal.call(self._wrapped.cancel_scheduled(id))

    def scheduled(self, *, after: ScheduledReceipt | None = None, limit: int = 100) -> list[ScheduledReceipt]:
        """Return delayed publishes by when they are due, at most `limit`, beginning after the given one."""
        return self._portal.call(self._wrapped.scheduled(after=after, limit=limit))

    def stage(
        self, connection: sqlite3.Connection, topic: Topic[T] | str, value: T | Event, **fields: Unpack[EventFields]
    ) -> None:
        """Publish inside the transaction of your own connection: the event appears if and when you commit it.

        The connection is to the file that this bus was given as `outbox`. The bus itself need not be open; some bus
        with the same outbox must be, sooner or later. A topic that is not declared with this bus is given by name.
        """
        self._portal.here(lambda: self._wrapped.stage(connection, topic, value, **fields))

    def consume(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        mode: Literal["key_shared", "shared", "exclusive", "failover"] | None = None,
        start: Start = "earliest",
        retry: Retry | None = None,
        exhausted: Exhausted | None = None,
        timeout: float | timedelta | None = None,
        window: int | None = None,
        window_bytes: int | None = None,
        heartbeat: str | float | timedelta | None = None,
        rate: float | None = None,
        checkpoint: Checkpoint | Literal["each"] | None = None,
        protect: bool | None = None,
        consumer_id: str | None = None,
        on_gap: Callable[[int, Gap], None] | None = None,
    ) -> SyncConsumer[T]:
        """Return a consumer of the subscription `name`, which is created when it is first used.

        * `mode`: `key_shared`, any number of consumers at a time, each with the events of its part of the keys;
          `exclusive`, one consumer, and a second one is refused; `failover`, where it stands by; or `shared`, any
          number of consumers, each of which takes whatever comes next. All but the last keep the order of every key.
          If none is given it is that of the subscription, and `key_shared` for a new one.
        * `start`: where a new subscription begins: `earliest`, `latest`, a time, an offset, or offsets by partition.
        * `retry`, `exhausted` (`dead`, `halt` or `discard`), `timeout` (of a handler; 0 takes it away), `window`
          (events in memory), `window_bytes`, `heartbeat` (a profile's name, seconds, or `off`), `rate` (events a
          second, of all partitions together; 0 takes it away), `checkpoint`: the subscription's policy. It is stored;
          what is not given stays as it is.
        * `protect`: whether retention waits for this subscription; it does unless told not to.
        * `consumer_id`: who this is. The same one again takes over from its own ghost.
        * `on_gap`: called with partition and `Gap` when events are lost; the log tells of it in any case.
        """
        return SyncConsumer(
            self._portal,
            self._portal.run(
                lambda: self._wrapped.consume(
                    topic,
                    name,
                    mode=mode,
                    start=start,
                    retry=retry,
                    exhausted=exhausted,
                    timeout=timeout,
                    window=window,
                    window_bytes=window_bytes,
                    heartbeat=heartbeat,
                    rate=rate,
                    checkpoint=checkpoint,
                    protect=protect,
                    consumer_id=consumer_id,
                    on_gap=on_gap,
                )
            ),
        )

    def subscriptions(self, topic: Topic[T] | str) -> list[Subscription]:
        """Return the subscriptions of a topic, by name."""
        return self._portal.call(self._wrapped.subscriptions(topic))

    def lag(self, topic: Topic[T] | str | None = None, name: str | None = None) -> list[LagInfo]:
        """Return how far subscriptions are behind, partition by partition: all, those of a topic, or one."""
        return self._portal.call(self._wrapped.lag(topic, name))

    def health(self, topic: Topic[T] | str | None = None, *, stalled_after: float | timedelta | None = None) -> Health:
        """Return whether events make progress where there are any, of all topics or of one, and how the store does.

        A subscription is stalled that makes no progress for `stalled_after`, or the setting `delivery.stalled_seconds`.
        Asked again, this bus also tells how quickly lags grow, and which cursors were written but not moved.
        """
        return self._portal.call(self._wrapped.health(topic, stalled_after=stalled_after))

    def seek(
        self, topic: Topic[T] | str, name: str, to: Start, *, partition: int | None = None
    ) -> dict[int, tuple[int, int]]:
        """Move a subscription, whoever runs it; returns for each partition where it was and where it is.

        What it passes over counts as skipped, what it goes back to is delivered again.
        """
        return self._portal.call(self._wrapped.seek(topic, name, to, partition=partition))

    def change(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        retry: Retry | None = None,
        exhausted: Exhausted | None = None,
        timeout: float | timedelta | None = None,
        window: int | None = None,
        window_bytes: int | None = None,
        heartbeat: str | float | timedelta | None = None,
        rate: float | None = None,
        checkpoint: Checkpoint | Literal["each"] | None = None,
    ) -> Subscription:
        """Change the policy of a subscription while it runs, whoever runs it; see `consume`."""
        return self._portal.call(
            self._wrapped.change(
                topic,
                name,
                retry=retry,
                exhausted=exhausted,
                timeout=timeout,
                window=window,
                window_bytes=window_bytes,
                heartbeat=heartbeat,
                rate=rate,
                checkpoint=checkpoint,
            )
        )

    def pause(self, topic: Topic[T] | str, name: str) -> None:
        """Let a subscription hand nothing over until it is resumed; what is in hand goes on.

        Other processes see it within half a second.
        """
        self._portal.call(self._wrapped.pause(topic, name))

    def resume(self, topic: Topic[T] | str, name: str) -> None:
        """Let a subscription that was paused go on; one that has halted tries anew."""
        self._portal.call(self._wrapped.resume(topic, name))

    @property
    def dead_letters(self) -> SyncDeadLetters:
        """What subscriptions gave up on: list, group, replay, purge."""
        return SyncDeadLetters(self._portal, self._wrapped.dead_letters)

    def delete_subscription(self, topic: Topic[T] | str, name: str) -> bool:
        """Delete a subscription with its progress and its dead letters; False if there is none."""
        return self._portal.call(self._wrapped.delete_subscription(topic, name))

    def metrics(self) -> list[Metric]:
        """Return everything that is counted and measured, as plain values; see the guide for their names.

        Counts are of this bus. What the store tells, such as lags, is of all subscriptions, and a few seconds old.
        """
        return self._portal.call(self._wrapped.metrics())

    def read(
        self,
        topic: Topic[T] | str,
        *,
        partition: int | None = None,
        start: int | datetime | None = None,
        stop: int | None = None,
        archive: str | PathLike[str] | None = None,
    ) -> Iterator[StoredEvent]:
        """Yield the events that are stored now, partition by partition, in order; without a subscription.

        `start` is an offset (of the one `partition`) or the time of appending; `stop` an offset, exclusive.
        `archive` is the directory of a lake: what the log does not hold any more is read from there.
        Raises `GapFound` at a declared hole.
        """
        return self._portal.iterate(
            self._wrapped.read(topic, partition=partition, start=start, stop=stop, archive=archive), at_once=500
        )

    def read_batches(
        self,
        topic: Topic[T] | str,
        *,
        partition: int | None = None,
        start: int | datetime | None = None,
        stop: int | None = None,
        archive: str | PathLike[str] | None = None,
    ) -> Iterator[Batch | Gap]:
        """Yield the same as `read`, as columns; holes come as `Gap`."""
        return self._portal.iterate(
            self._wrapped.read_batches(topic, partition=partition, start=start, stop=stop, archive=archive)
        )
