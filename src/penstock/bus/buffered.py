"""BufferedPublisher: `send` is a plain call, and what was sent is stored soon, many events at a time.

It is for those who publish much and do not want to wait for each event. ::

    async with bus.publisher(orders) as publisher:
        for order in source:
            await publisher.put(order)          # or `publisher.send(order)`, a plain call

What it promises:

* **What is wrong with an event is told at once**: `send` encodes and checks it, and raises.
* **Everybody can know.** `send` returns a `PendingReceipt`. Awaiting it gives the receipt, once the event is as durable
  as after `bus.publish`, or raises what it ended with: a refusal, and surely it is not stored, or `PublishUnknown`.
* **No error is lost.** What fails and nobody awaits is raised by `flush`, `put`, `room` or `close`, whichever comes
  first; once, and one shipment at a time.
* **Order.** Events of a partition are stored in the order in which they were sent, one shipment after another;
  shipments of several partitions are under way at the same time. One whose outcome is unknown is sent again, with the
  same sequences, so that it is stored once, and the next waits for that. If it stays unknown for `retry_for`, or is
  refused, it has failed, and all that was sent behind it fails, too: `PublishHalted`. The partition goes on when
  somebody was told. So what is stored of a partition is a beginning of what was sent, until somebody knows better.
* **Memory is bounded.** What is on its way takes at most `in_flight_bytes`, and what failed and nobody has seen as much
  again. Beyond, `put` and `room` wait, and `send` raises `BufferFull`, or the failure.

A publisher belongs to the event loop that opened it. In another thread, or in a child of a fork, it says so.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar, Unpack, runtime_checkable

from penstock.bus.grouping import GROUP_EVENTS_MAX, Room
from penstock.bus.shipments import Halt, PendingReceipt, Shipment
from penstock.clock import seconds
from penstock.columns import BODY_BYTES_MAX, partition_of_key
from penstock.errors import (
    BufferFull,
    BusClosed,
    PenstockError,
    PublishHalted,
    PublishUnknown,
    TopicDeleted,
    UsageError,
)
from penstock.events import Event, utf8

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from penstock.bus.publisher import Publisher, Receipt
    from penstock.bus.topic import EventFields, Form, Topic
    from penstock.clock import Clock

    _Row = tuple[Form | Event, bytes, bytes | None, int]

logger = logging.getLogger(__name__)

T = TypeVar("T")

EVENT_COST: Final = 200
"""What an event takes in memory besides its bytes, about."""
LINGER_SECONDS_MAX: Final = 60.0
SHIPMENT_BYTES: Final = 1 << 20
IN_FLIGHT_BYTES: Final = 32 << 20
RETRY_SECONDS: Final = 0.05
RETRY_SECONDS_MAX: Final = 1.0
"""Between two attempts at a shipment; doubled from the one to the other."""


@runtime_checkable
class StillClock(Protocol):
    """A clock of a test that stands still while a receipt is awaited: nothing waits for company there."""

    async def pause_to_retry(self, seconds: float) -> None:
        """Return when so much time has passed, which nobody else may let pass."""


class _Lane:
    """The shipments on their way to one partition."""

    __slots__ = ("gathering", "halt", "number", "pause", "ready", "sending", "task")

    def __init__(self, number: int) -> None:
        self.number = number
        self.gathering: Shipment | None = None
        self.ready: deque[Shipment] = deque()  # closed; they leave before the one that gathers
        self.sending: Shipment | None = None
        self.task: asyncio.Task[None] | None = None
        self.pause: asyncio.Task[None] | None = None
        self.halt: Halt | None = None

    @property
    def under_way(self) -> list[Shipment]:
        """All that do not gather any more and have not ended, in their order."""
        return [*self.ready] if self.sending is None else [self.sending, *self.ready]


class BufferedPublisher(Generic[T]):
    """Gathers events and stores them in shipments; `bus.publisher(topic)` makes one.

    It opens with `async with`, or at its first `room` or `put`. Leaving the block, or `close()`, stores everything.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[tuple[Topic[Any], Publisher]]],
        open_ones: set[BufferedPublisher[Any]],
        clock: Clock,
        *,
        linger: float | timedelta,
        max_events: int,
        max_bytes: int,
        in_flight_bytes: int,
        retry_for: float | timedelta,
    ) -> None:
        self._linger = seconds(linger, "linger")
        if self._linger > LINGER_SECONDS_MAX:
            raise UsageError(f"linger is at most {LINGER_SECONDS_MAX:g} s, not {linger!r}")
        for name, number, most in (
            ("max_events", max_events, GROUP_EVENTS_MAX),
            ("max_bytes", max_bytes, BODY_BYTES_MAX),
            ("in_flight_bytes", in_flight_bytes, sys.maxsize),
        ):
            if type(number) is not int or not 1 <= number <= most:
                raise UsageError(f"{name} is {number!r}, it must be 1 to {most:,}")
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._in_flight_bytes = in_flight_bytes
        self._retry_seconds = seconds(retry_for, "retry_for")
        self._find = find
        self._open_ones = open_ones
        self._clock = clock
        self._pause = clock.pause
        if isinstance(clock, StillClock):
            self._linger, self._pause = 0.0, clock.pause_to_retry
        self._room = Room(sys.maxsize, in_flight_bytes)
        self._failures: deque[Shipment] = deque()
        self._kept = 0  # what the failures take that somebody has still to see
        self._opening = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting: asyncio.AbstractEventLoop | None = None  # the same, until it is closed
        self._closed = False
        self._filled = False  # whether a shipment became full since the event loop had its last turn
        self._lanes: list[_Lane] = []
        self._keyless = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else "new" if self._loop is None else "open"
        return f"<BufferedPublisher, {state}, {self._room.bytes:,} bytes on their way>"

    # --- opening and closing ---------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except PenstockError as failure:
            if error is None:
                raise
            # What went wrong in the block is what is raised, and what was not stored is told with it.
            others = [shipment for shipment in self._failures if shipment.unseen]
            told = f"Not everything was stored: {failure}; and {len(others)} more shipments"
            for shipment in others:
                shipment.report()
            error.add_note(told)
            logger.warning("%s", told)

    async def _opened(self) -> None:
        async with self._opening:  # once, however many tasks begin
            if self._loop is None and not self._closed:
                await self._open()
        self._check_here()

    async def _open(self) -> None:
        topic, publisher = await self._find()
        if self._max_bytes > publisher.part_bytes_max:
            raise UsageError(
                f"max_bytes is {self._max_bytes:,}, it must be at most {publisher.part_bytes_max:,} "
                f"(limits.batch_bytes_max)"
            )
        self._topic = topic
        self._publisher = publisher
        self._ttl_us = None if topic.ttl_seconds is None else round(topic.ttl_seconds * 1e6)
        # What is the same in all events of a class is checked and counted once.
        expiry_bytes = 0 if self._ttl_us is None else 8
        self._form_bytes = {
            form.type: publisher.checked_size(form.to_event(b""), 0) + expiry_bytes for form in topic.forms
        }
        self._partitions = topic.settings.partitions
        self._lanes = [_Lane(number) for number in range(self._partitions)]
        self._loop = self._accepting = asyncio.get_running_loop()
        self._open_ones.add(self)

    async def close(self) -> None:
        """Take no more events, store everything, and raise the first failure that nobody has seen.

        May be repeated: it raises the next one every time, until there is none.
        """
        async with self._opening:
            self._closed, self._accepting = True, None
        if self._loop is not None:
            try:
                await self.flush()
            except asyncio.CancelledError:
                raise  # and the bus waits for what is under way, when it closes
            except BaseException:
                self._open_ones.discard(self)
                raise
            self._open_ones.discard(self)

    def _check_here(self) -> None:
        """Refuse to be used before opening, after closing, and elsewhere."""
        if self._closed:
            raise BusClosed("this publisher is closed; make another one: bus.publisher(…)")
        if self._loop is None:
            raise UsageError("this publisher is not open yet: async with bus.publisher(…) as publisher: …")
        self._check_loop()

    def _check_loop(self) -> None:
        if _running_loop() is not self._loop:
            raise UsageError(
                "this publisher belongs to another event loop: in another thread, or in a child of a fork, "
                "make a bus of its own and a publisher of that"
            )

    # --- sending ---------------------------------------------------------------------------------

    def send(self, value: T | Event, **fields: Unpack[EventFields]) -> PendingReceipt:
        """Take an event, which is stored soon; await what is returned to know that it is.

        `value` and `fields` are as for `bus.publish`. Never waits: if there is no room it raises `BufferFull`.
        """
        if self._accepting is None or self._accepting is not _running_loop():
            self._check_here()
        row = self._encoded(value, fields)
        if self._kept > self._in_flight_bytes:
            self._raise_unseen()
        cost = row[3] + EVENT_COST
        # Those in line have to wait for their turn, since they can; this one cannot.
        if not self._room.take(cost):
            if not self._room.fits(cost):
                raise BufferFull(self._topic.name, cost, self._room.bytes, self._in_flight_bytes)
            self._room.occupy(1, cost)
        return self._placed(*row)

    async def put(self, value: T | Event, **fields: Unpack[EventFields]) -> PendingReceipt:
        """Take an event as `send` does, as soon as there is room; raise a failure that nobody has seen instead."""
        await self._ready()
        row = self._encoded(value, fields)
        cost = row[3] + EVENT_COST
        if not self._room.take(cost):
            self._hurry()
            await self._room.wait(cost)
            try:
                self._check_here()
                self._raise_unseen()
            except PenstockError:
                self._room.leave(1, cost)
                raise
        return self._placed(*row)

    async def room(self) -> None:
        """Return when `send` has room for an event, however large; raise a failure that nobody has seen instead."""
        await self._ready()
        largest = self._publisher.certainly_allowed + EVENT_COST
        while not self._room.fits(largest):
            self._hurry()
            await self._room.wait(largest)
            self._room.leave(1, largest)
            await self._ready()

    async def flush(self) -> None:
        """Return when everything that was sent so far is stored; raise the first failure that nobody has seen.

        The next call raises the next one, if there are several.
        """
        if self._loop is None:
            return
        self._check_loop()
        self._hurry()
        for shipment in [shipment for lane in self._lanes for shipment in lane.under_way]:
            await shipment.end()
        self._raise_unseen()

    def _hurry(self) -> None:
        """Let everything leave as soon as it can, because somebody waits for that."""
        for lane in self._lanes:
            self._close_gathering(lane)

    async def _ready(self) -> None:
        """Be open, let the event loop have its turn now and then, and raise what nobody has seen."""
        if self._loop is None:
            await self._opened()
        if self._filled:
            # Whoever never waits would not let anything leave.
            self._filled = False
            await asyncio.sleep(0)
        self._check_here()
        if self._failures:
            self._raise_unseen()

    def _raise_unseen(self) -> None:
        for shipment in self._failures:
            if shipment.unseen:
                raise shipment.report()

    # --- gathering -------------------------------------------------------------------------------

    def _encoded(self, value: T | Event, fields: EventFields) -> _Row:
        """Return an event, checked: its form, or the whole of it if it says more than its value."""
        given = fields.get("key") if fields else None
        if len(fields) <= (given is not None) and not isinstance(value, Event):
            form, data, key = self._topic.row(value)
            if given is not None:
                key = utf8("key", given)
            # As `check_event` would see it; what is in doubt is looked at more closely below.
            if type(data) is bytes and (key is None or type(key) is bytes) and form.content_type is None:
                size = self._form_bytes[form.type] + len(data)
                if key is not None:
                    size += len(key)
                if size <= self._publisher.certainly_allowed:
                    return form, data, key, size
        event = self._topic.to_event(value, self._clock.time_us(), fields)
        return event, event.data, event.key, self._publisher.checked_size(event, self._partition_of(event.key))

    def _partition_of(self, key: bytes | None) -> int:
        # Events without a key go round the partitions, a shipment at a time, so that each stays together.
        if self._partitions == 1 or key is None:
            return self._keyless
        return partition_of_key(key, self._partitions)

    def _placed(self, says: Form | Event, data: bytes, key: bytes | None, size: int) -> PendingReceipt:
        """Let an event, for which room was taken, join the shipment that gathers."""
        lane = self._lanes[0 if self._partitions == 1 else self._partition_of(key)]
        shipment = lane.gathering
        if shipment is not None and shipment.size + size > self._max_bytes:
            self._close_gathering(lane)
            return self._placed(says, data, key, size)  # without a key, it goes to the next partition
        if shipment is None:
            shipment = self._opened_shipment(lane)
        index = len(shipment.data)
        if isinstance(says, Event):
            shipment.add_event(says)
        else:
            shipment.add(says, data, key)
            if self._ttl_us is not None:
                shipment.expire_last(self._clock.time_us() + self._ttl_us)
        shipment.size += size
        shipment.cost += size + EVENT_COST
        if index + 1 == self._max_events:
            self._close_gathering(lane)
        return PendingReceipt(shipment, index)

    def _opened_shipment(self, lane: _Lane) -> Shipment:
        shipment = Shipment(self._topic.name, lane.number, self._clock.monotonic(), self._forget)
        shipment.behind = lane.halt
        lane.gathering = shipment
        if lane.task is None:
            lane.task = asyncio.get_running_loop().create_task(self._send_all(lane))
            lane.task.add_done_callback(partial(self._stopped, lane))
        return shipment

    def _close_gathering(self, lane: _Lane) -> None:
        """Let what gathers leave as soon as it can."""
        if lane.gathering is not None:
            lane.ready.append(lane.gathering)
            lane.gathering = None
            self._filled = True
            if lane.number == self._keyless:
                self._keyless = (self._keyless + 1) % self._partitions
            if lane.pause is not None:
                lane.pause.cancel()

    # --- storing ---------------------------------------------------------------------------------

    async def _send_all(self, lane: _Lane) -> None:
        while await self._linger_over(lane):
            shipment = lane.sending = lane.ready.popleft()
            outcome = self._halted(shipment) if shipment.behind is not None else await self._attempts(shipment)
            lane.sending = None
            if isinstance(outcome, Exception):
                self._failed(lane, shipment, outcome)
            else:
                self._room.leave(shipment.count, shipment.cost)
                shipment.stored(outcome)
        lane.task = None

    async def _linger_over(self, lane: _Lane) -> bool:
        """Wait until a shipment of the lane may leave; False if there is none."""
        if not lane.ready and lane.gathering is not None:
            left = lane.gathering.opened_at + self._linger - self._clock.monotonic()
            if left > 0:
                lane.pause = asyncio.ensure_future(self._clock.pause(left))
                try:
                    # Closing what gathers ends the pause early, by cancelling it, and this does not raise for that.
                    await asyncio.wait([lane.pause])
                finally:
                    lane.pause.cancel()
                    lane.pause = None
            if not lane.ready:
                self._close_gathering(lane)
        return bool(lane.ready)

    async def _attempts(self, shipment: Shipment) -> Receipt | Exception:
        """Send a shipment, again and again while its outcome is unknown; return what became of it."""
        try:
            prepared = shipment.prepare(self._publisher)
        except Exception as error:  # noqa: BLE001 - it is raised where the events are awaited
            return error
        give_up_at = self._clock.monotonic() + self._retry_seconds
        delay = RETRY_SECONDS
        unknown: PublishUnknown | None = None
        while True:
            try:
                return await prepared.send()
            except PublishUnknown as error:
                if unknown is None:
                    logger.warning("they are sent again, and nothing overtakes them: %s", error)
                unknown = error
            except PenstockError as error:
                # This attempt has surely stored nothing; an earlier one may have, unless its log is gone.
                if unknown is None or isinstance(error, TopicDeleted):
                    return error
                if isinstance(error, UsageError):  # which no other attempt can mend
                    return unknown
            if self._clock.monotonic() + delay > give_up_at:
                return unknown
            await self._pause(delay)
            delay = min(2 * delay, RETRY_SECONDS_MAX)

    def _halted(self, shipment: Shipment) -> Exception:
        try:
            prepared = shipment.prepare(self._publisher)
        except Exception as error:  # noqa: BLE001 - as in `_attempts`
            return error
        halted = PublishHalted(shipment.topic, shipment.partition, shipment.count, prepared)
        assert shipment.behind is not None
        halted.__cause__ = shipment.behind.error
        return halted

    def _failed(self, lane: _Lane, shipment: Shipment, error: Exception) -> None:
        """End a shipment that is not stored; whatever is behind it must not be stored either."""
        halt = shipment.behind
        if halt is None:
            halt = lane.halt = Halt(error, partial(self._go_on, lane))
            self._close_gathering(lane)
            for later in lane.ready:
                later.behind = halt
        self._room.leave(shipment.count, shipment.cost)
        self._failures.append(shipment)
        self._kept += shipment.cost
        shipment.failed(error, halt)

    def _go_on(self, lane: _Lane) -> None:
        """Somebody was told: what is sent from now on may be stored."""
        self._close_gathering(lane)
        lane.halt = None

    def _forget(self, shipment: Shipment) -> None:
        """Somebody has seen, or will see, the failure of every event of it."""
        if shipment in self._failures:
            self._failures.remove(shipment)
            self._kept -= shipment.cost

    def _stopped(self, lane: _Lane, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting if the task did not end by itself, as when the event loop is stopping."""
        if lane.task is not task:
            return
        stopped = RuntimeError("the task that sends was stopped")
        stopped.__cause__ = None if task.cancelled() else task.exception()
        halt = lane.halt = lane.halt or Halt(stopped, partial(self._go_on, lane))
        self._close_gathering(lane)
        left = lane.under_way
        lane.task = lane.sending = None
        lane.ready.clear()
        for shipment in left:
            attempted = shipment.prepared is not None
            shipment.behind = shipment.behind or halt
            error = self._halted(shipment)
            if attempted:
                error = PublishUnknown(shipment.topic, shipment.count, shipment.prepared, repr(stopped))
                error.__cause__ = stopped
            self._failed(lane, shipment, error)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def closed_publishers(publishers: set[BufferedPublisher[Any]]) -> PenstockError | None:
    """Close all of them, also those that are opened meanwhile; return the first failure that nobody has seen."""
    first: PenstockError | None = None
    while publishers:
        try:
            await next(iter(publishers)).close()
        except PenstockError as error:
            first = first or error
    return first
