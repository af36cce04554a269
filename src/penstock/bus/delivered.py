"""Delivered: what was handed over, event by event or as a batch, and how to say what became of it.

It is its consumer's until that is said: `ack`, `nack` or `reject`. When another consumer took the shard over meanwhile,
or the subscription was moved, saying it raises `StaleDelivery`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np
import pyarrow as pa

from penstock.clock import seconds
from penstock.engine.messages import Ack, Done, Extend, Failure, GiveBack, Nack, Started
from penstock.engine.states import Outcome
from penstock.errors import StaleDelivery, UsageError
from penstock.failures import bounded, trace_of
from penstock.inbox import Once
from penstock.offsets import Position, Range

if TYPE_CHECKING:
    from penstock.batch import Batch, StoredEvent
    from penstock.bus.topic import Topic
    from penstock.engine.messages import Input, Offsets, Piece
    from penstock.engine.shard import Shard as Engine
    from penstock.runtime.seat import Seat

T = TypeVar("T")


class _Hand:
    """What was handed over at once, and how to say what became of it."""

    __slots__ = ("_engine", "_number", "_said", "_seat")

    def __init__(self, seat: Seat, engine: Engine, number: int) -> None:
        self._seat = seat
        self._engine = engine
        self._number = number
        self._said = False
        """Whether anything was said of it: done, failed or rejected."""

    @property
    def stale(self) -> bool:
        """Whether the shard was lost, or loaded anew, since."""
        return self._seat.engine is not self._engine

    def _tell(self, told: Input) -> None:
        if self.stale:
            seat = self._seat
            raise StaleDelivery(str(seat), seat.lost_because or "this consumer is closed")
        self._seat.tell(told)

    def _say(self, told: Ack | Done | Nack) -> None:
        self._said = True
        self._tell(told)

    def _start(self) -> None:
        if self._engine.policy.timeout_seconds is not None and not self.stale:
            self._seat.tell(Started(self._number))

    async def extend(self, by: float | timedelta) -> None:
        """Have so much more time, from now on, before it counts as failed; for policies with a `timeout`."""
        self._tell(Extend(self._number, seconds(by, "the extension")))

    def _ack(self, offsets: Offsets) -> None:
        self._say(Ack(offsets))

    def _nack(
        self,
        offsets: Offsets,
        delay: float | timedelta | None,
        reason: str | BaseException | Failure,
        *,
        retry: bool = True,
        counted: bool = True,
    ) -> None:
        after = None if delay is None else seconds(delay, "the delay")
        self._say(Nack(self._number, offsets, _failure(reason), after, retry, counted))

    def _give_back(self, offsets: Offsets) -> None:
        if not self.stale:
            self._seat.tell(GiveBack(self._number, offsets))


def _failure(reason: str | BaseException | Failure) -> Failure:
    if isinstance(reason, Failure):
        return reason
    if isinstance(reason, BaseException):
        return Failure(type(reason).__name__, bounded(reason), trace_of(reason))
    return Failure("", bounded(reason))


class Delivery(_Hand, Generic[T]):
    """One event, handed over."""

    __slots__ = ("_by_hand", "_done", "_keeper", "_lane", "_topic", "attempt", "event", "replay")

    def __init__(  # noqa: PLR0917 - names would cost as much as the rest
        self,
        seat: Seat,
        engine: Engine,
        number: int,
        topic: Topic[T],
        event: StoredEvent,
        attempt: int,
        replay: int,
    ) -> None:
        # What `_Hand` does, at half the price: there is one of these for each event.
        self._seat = seat
        self._engine = engine
        self._number = number
        self._said = False
        self._topic = topic
        self._lane: bytes | int | None = None
        """What its order is kept by, for whoever keeps it: its key, or its partition; None where there is no order."""
        self._done = False
        """Whether it was said to be done."""
        self._by_hand = False
        """Whether only what is said of it counts, and not that its handler has returned."""
        self._keeper: Callable[[float], None] | None = None
        """Who keeps its time, if the engine does not: called with so many seconds more."""
        self.event = event
        """The event as it is stored."""
        self.attempt = attempt
        """Which attempt this is, counted from 1."""
        self.replay = replay
        """How many times it was brought back from the dead letters; 0 for an ordinary delivery."""

    def __repr__(self) -> str:
        return f"<Delivery {self.position}, attempt {self.attempt}>"

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        return self.event.position

    @property
    def subscription(self) -> str:
        """The name of the subscription that it is delivered to."""
        return self._seat.shard.subscription

    @property
    def value(self) -> T:
        """The event as its class; `DecodeError` if its bytes do not fit, `FutureVersion` if it is too new."""
        return self._topic.decode(self.event)

    @property
    def headers(self) -> dict[str, bytes]:
        """The event's headers."""
        return self.event.headers

    @property
    def identity(self) -> tuple[str, str, str]:
        """Whose event it is, as `topic/subscription`, its source and its id: the same whenever and however it comes."""
        return (self._seat.scope, *self.event.identity)

    @property
    def _digest(self) -> bytes:
        """128 bits of its identity: as good as that to recognise it by, and short."""
        return self.event.digest(self._seat.scope)

    def once(self, connection: Any, *, scope: str | None = None) -> Once:
        """Mark it as handled in a transaction of yours: `with delivery.once(connection) as first: …`, or `async with`.

        `first` is False if it was marked before, and then the block must do nothing. The mark is committed with what
        the block writes through this connection, or undone with it; see `penstock.inbox`. `scope` says in whose name it
        is marked, instead of the subscription's: for a handler with several such blocks, or for subscriptions that
        share one effect.
        """
        return Once(connection, self._seat.scope if scope is None else scope, *self.event.identity)

    @property
    def _offsets(self) -> Range:
        return Range(self.event.offset, self.event.offset + 1)

    async def extend(self, by: float | timedelta) -> None:
        """Have so much more time, from now on, before it counts as failed; for policies with a `timeout`."""
        if self._keeper is None:
            await super().extend(by)
        else:
            self._keeper(seconds(by, "the extension"))

    async def ack(self) -> None:
        """Say that it is done."""
        self._ack(self._offsets)
        self._done = True

    def _fail(
        self,
        reason: BaseException | Failure,
        *,
        delay: float | None = None,
        retry: bool = True,
        counted: bool = True,
    ) -> None:
        """Say that it failed; the same as `nack` and `reject`, for whoever is not in a coroutine."""
        self._nack(self._offsets, delay, reason, retry=retry, counted=counted)

    @property
    def _succeeded(self) -> bool:
        """Whether it is done, if its handler has just returned."""
        return self._done if self._said else not self._by_hand

    @property
    def _is_last(self) -> bool:
        """Whether there is no further attempt if this one fails."""
        return self.attempt > self._engine.policy.max_retries

    @property
    def _paused(self) -> bool:
        """Whether the subscription is paused by now."""
        return self._engine.policy.paused

    def _discard(self) -> None:
        """Say that nobody wants it: it is settled, and counted as discarded."""
        self._say(Ack(self._offsets, Outcome.DISCARDED))
        self._done = True

    def _return(self) -> None:
        """Let others have it, or the next one who asks, as if nobody had begun it: no attempt is counted."""
        self._give_back(self._offsets)

    async def nack(
        self,
        *,
        delay: float | timedelta | None = None,
        reason: str | BaseException = "",
        counted: bool = True,
    ) -> None:
        """Say that it failed: it is tried again after `delay`, or the policy's backoff, as often as the policy says.

        An attempt that is not `counted` was not the event's fault, and does not bring it closer to its end.
        """
        self._nack(self._offsets, delay, reason, counted=counted)

    async def reject(self, reason: str | BaseException = "") -> None:
        """Say that no attempt can succeed: it becomes a dead letter at once."""
        self._nack(self._offsets, None, reason, retry=False)


class Acks:
    """Acks of single deliveries that gather until they are told, which costs much less than to tell each by itself."""

    def __init__(self) -> None:
        self._events: defaultdict[tuple[Seat, Engine], list[StoredEvent]] = defaultdict(list)

    def add(self, delivery: Delivery[Any]) -> None:
        """Take one."""
        delivery._said = delivery._done = True
        self._events[delivery._seat, delivery._engine].append(delivery.event)

    def tell(self) -> None:
        """Tell them; those of shards that were lost, or loaded anew, meanwhile are handled again."""
        if not self._events:
            return
        settled, self._events = self._events, defaultdict(list)
        for (seat, engine), events in settled.items():
            if seat.engine is engine:
                seat.tell(Ack(_gathered([event.offset for event in events])))


def _gathered(offsets: list[int]) -> Offsets:
    """Return offsets as the engine takes them: as a range if they are one, which costs it much less."""
    span = Range(offsets[0], offsets[0] + len(offsets))
    if offsets[-1] == span.stop - 1 and offsets == list(span):
        return span
    return np.array(offsets, np.int64)


class DeliveredBatch(_Hand):
    """Many events of one partition, handed over together."""

    __slots__ = ("_batches", "_pieces", "attempts", "replays")

    def __init__(
        self,
        seat: Seat,
        engine: Engine,
        number: int,
        pieces: Sequence[Piece],
        *,
        attempts: Mapping[int, int],
        replays: Mapping[int, int],
    ) -> None:
        super().__init__(seat, engine, number)
        self._pieces = pieces
        self._batches: list[Batch] | None = None
        self.attempts = attempts
        """Which attempt this is, by offset, for those that it is not the first of."""
        self.replays = replays
        """How often each was brought back from the dead letters, for those that were."""

    @property
    def batches(self) -> list[Batch]:
        """The events as columns, in their order; each is a block of the log, or a selection of one."""
        if self._batches is None:
            self._batches = [batch for piece in self._pieces for batch in piece.source.batches(piece.rows)]
        return self._batches

    def __len__(self) -> int:
        return sum(len(piece.offsets) for piece in self._pieces)

    def __iter__(self) -> Iterator[StoredEvent]:
        for batch in self.batches:
            yield from batch

    def __repr__(self) -> str:
        return f"<DeliveredBatch {self._seat.topic.name}/{self.partition}, {len(self):,} events>"

    @property
    def partition(self) -> int:
        """The partition that all of them are of."""
        return self._seat.shard.partition

    @property
    def offsets(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The offset of each event, ascending unless some were kept aside before."""
        return np.concatenate([batch.offsets for batch in self.batches])

    def to_arrow(self) -> pa.RecordBatch:
        """Return all events as one Arrow record batch, with the columns of `Batch.to_arrow`."""
        parts = [batch.to_arrow() for batch in self.batches]
        if len(parts) == 1:
            return parts[0]
        return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]

    @overload
    async def ack(self) -> None: ...

    @overload
    async def ack(self, offsets: Range | Iterable[int]) -> None: ...

    @overload
    async def ack(self, *, up_to: int) -> None: ...

    async def ack(self, offsets: Range | Iterable[int] | None = None, *, up_to: int | None = None) -> None:
        """Say that all of it is done; or these offsets of it; or those up to and including one."""
        if offsets is not None and up_to is not None:
            raise UsageError("ack takes `offsets` or `up_to`, not both")
        if offsets is None and up_to is None:
            self._say(Done(self._number, tuple(self._all())))
            return
        for chosen in self._chosen(offsets, up_to):
            self._ack(chosen)

    async def nack(
        self,
        offsets: Range | Iterable[int] | None = None,
        *,
        delay: float | timedelta | None = None,
        reason: str | BaseException = "",
    ) -> None:
        """Say that all of it failed, or these offsets of it."""
        for chosen in self._chosen(offsets, None):
            self._nack(chosen, delay, reason)

    async def reject(self, offsets: Range | Iterable[int], reason: str | BaseException = "") -> None:
        """Say that no attempt at these can succeed: they become dead letters at once."""
        for chosen in self._chosen(offsets, None):
            self._nack(chosen, None, reason, retry=False)

    def _chosen(self, offsets: Range | Iterable[int] | None, up_to: int | None) -> list[Offsets]:
        if offsets is None and up_to is None:
            return self._all()
        mine = self.offsets
        if up_to is not None:
            return [mine[mine <= up_to]]
        assert offsets is not None
        wanted = np.fromiter(offsets, np.int64)  # in any order, and some twice: the engine minds both
        strangers = wanted[~np.isin(wanted, mine)]
        if len(strangers):
            raise UsageError(f"offset {strangers[0]} is not in this batch, {self!r}")
        return [wanted]

    def _all(self) -> list[Offsets]:
        """Return all offsets of it; blocks that follow each other are settled together, which is much cheaper."""
        found: list[Offsets] = []
        for piece in self._pieces:
            mine = piece.offsets
            last = found[-1] if found else None
            if isinstance(mine, Range) and isinstance(last, Range) and last.stop == mine.start:
                found[-1] = Range(last.start, mine.stop)
            else:
                found.append(mine)
        arrays = [each for each in found if not isinstance(each, Range)]
        return [np.concatenate(arrays)] if len(arrays) == len(found) > 1 else found
