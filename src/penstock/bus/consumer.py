"""Consumer: what an application iterates over, event by event or in batches.

* Whatever is handed over is this consumer's until it says what became of it: `ack`, `nack` or `reject`. Leaving the
  block, or `close()`, gives the rest back, and no attempt is counted.
* Order: the next event of a key comes when the one before it is settled. In a batch there may be several of a key, in
  their order; none of them is handed over again before the batch has settled it. Events without a key have the order of
  their partition, so the next one, or the next batch, comes when all before are settled.
* `ack` returns at once: what is settled is written soon, in groups, by the subscription's checkpoint policy. `flush()`
  returns when it is on the medium. What was not written when a process dies is delivered again.
* When another consumer took a shard over, or the subscription was moved, settling what came from it raises
  `StaleDelivery`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from penstock.bus.delivered import DeliveredBatch, Delivery
from penstock.errors import BusClosed, UsageError
from penstock.runtime.member import PREFETCH

if TYPE_CHECKING:
    from types import TracebackType

    from penstock.bus.topic import Topic
    from penstock.engine.messages import Deliver
    from penstock.runtime.crew import Place
    from penstock.runtime.member import AtWork, Member
    from penstock.runtime.seat import Seat

T = TypeVar("T")

SINGLE_BYTES_MAX = 8 << 20
MANY = 256
"""So many events are handed over at a time to whoever keeps the order of their lanes himself."""
BATCH_EVENTS_MAX = 5_000
BATCH_BYTES_MAX = 8 << 20


class Consumer(Generic[T]):
    """A consumer of a subscription; `async with` it, then iterate over it or over its `batches()`."""

    def __init__(
        self,
        topic: Callable[[], Awaitable[Topic[Any]]],
        join: Callable[[], Awaitable[Member | Place]],
        leave: Callable[[Member | Place], Awaitable[None]],
        name: str,
    ) -> None:
        self.name = name
        """The subscription's name."""
        self._find_topic = topic
        self._join = join
        self._leave = leave
        self._member: Member | Place | None = None
        self._topic: Topic[T] | None = None
        self._queue: deque[Delivery[T]] = deque()
        self._joining = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Consumer of {self.name!r}, {'closed' if self._closed else 'open' if self._member else 'new'}>"

    async def __aenter__(self) -> Self:
        await self._joined()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _joined(self) -> Member | Place:
        async with self._joining:  # once, however many tasks begin to iterate
            if self._closed:
                raise BusClosed(f"this consumer of {self.name!r} is closed; make another one: bus.consume(…)")
            if self._member is None:
                self._topic = await self._find_topic()
                self._member = await self._join()
                self._member.give_back = self._give_back
            return self._member

    def _tell_handlers(self, handlers: Callable[[], Iterable[AtWork]]) -> None:
        """Let it be known which handlers run on what is handed over."""
        assert self._member is not None, "it has joined"
        self._member.handlers = handlers

    async def close(self) -> None:
        """Give back what was not settled, write what was, and leave; may be repeated."""
        self._closed = True
        self._queue.clear()
        async with self._joining:  # whoever joins at this moment has to leave, too
            if self._member is not None:
                await self._leave(self._member)

    # --- looking ------------------------------------------------------------------------------

    @property
    def active(self) -> list[int]:
        """The partitions that this consumer has events of now; a standby of a `failover` subscription has none."""
        seats = [] if self._member is None else self._member.seats
        return sorted({seat.shard.partition for seat in seats if seat.engine is not None})

    @property
    def trouble(self) -> dict[int, dict[str, str]]:
        """What goes wrong at the moment, by partition: `read`, `fetch`, `commit`, `halted` or `parked`, and why."""
        found = {}
        for seat in self._member.seats if self._member is not None else []:
            trouble = dict(seat.trouble)
            if seat.engine is not None and seat.engine.halted is not None:
                halted = seat.engine.halted
                trouble["halted"] = f"at offset {halted.offset}: {halted.failure.kind} {halted.failure.message}".strip()
            if seat.engine is not None and seat.engine.parked >= max(seat.engine.policy.parked_max, 1):
                lanes = seat.engine.blocked_lanes
                first = min(lanes.values(), default=seat.engine.next_offset)
                trouble["parked"] = (
                    f"{seat.engine.parked:,} events wait aside, the limit; {len(lanes):,} lanes, from {first}"
                )
            if trouble:
                found[seat.shard.partition] = trouble
        return found

    async def flush(self) -> None:
        """Return when everything that was settled is on the medium; `StaleDelivery` if some of it never will be."""
        member = await self._joined()
        await member.flush()

    # --- events -------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Delivery[T]]:
        return self._deliveries()

    async def _deliveries(self) -> AsyncIterator[Delivery[T]]:
        member = await self._joined()  # whoever begins with a closed one is told
        while await self._prefetched():
            delivery = self._taken(member.clock.monotonic())
            if delivery is not None:
                delivery._start()
                yield delivery

    @property
    def _waiting(self) -> bool:
        """Whether something was prefetched that nobody has taken."""
        return bool(self._queue)

    def _taken(self, now: float) -> Delivery[T] | None:
        """Return the next of those that were prefetched, if there is one that is not somebody else's by now."""
        queue, member = self._queue, self._member
        while queue:
            delivery = queue.popleft()
            if delivery._seat.engine is delivery._engine and member is not None:
                presence = member.presence
                if now < presence.until or not presence.lapsed_at(now):
                    return delivery
        return None

    async def _prefetched(self, *, singly: bool = True) -> bool:
        """Wait until events are there to be taken; False when this consumer was closed, or its bus.

        Singly, the next one of a lane is there only when the one before is settled. Otherwise several of a lane may be
        there, in their order, and whoever takes them begins none before all earlier ones of its lane are done.
        """
        member = self._member or await self._joined()
        while not (self._closed or member.closed):
            if member.ended is not None:
                raise member.ended
            if self._queue and self._queue[0]._engine.policy.paused:
                self._give_back()
            if self._queue:
                return True
            if member.breathless:
                await member.breathe()
                continue  # it may be closed by now
            member.settle_down()
            # One whose handlers are slow shares with others, and asks for few at a time.
            count = member.prefetch if singly or member.prefetch < PREFETCH else MANY
            taken = member.take(count, SINGLE_BYTES_MAX, singly=singly)
            if taken is None:
                await member.wait()
            else:
                self._queue.extend(self._singles(*taken) if singly else self._many(*taken))
        return False

    def _give_back(self, lane: bytes | int | None = None) -> None:
        """Let others have what was prefetched and not taken, of one lane or all; no attempt is counted."""
        kept = [delivery for delivery in self._queue if lane is not None and delivery._lane != lane]
        for delivery in self._queue if len(kept) < len(self._queue) else ():
            if lane is None or delivery._lane == lane:
                delivery._return()
        self._queue = deque(kept)

    def _singles(self, seat: Seat, handed: Deliver) -> Iterator[Delivery[T]]:
        """Yield deliveries with a hand each."""
        for number, delivery in enumerate(self._delivered(seat, handed), handed.hand):
            delivery._number = number
            yield delivery

    def _many(self, seat: Seat, handed: Deliver) -> list[Delivery[T]]:
        """Return deliveries of one hand, each with its lane."""
        found = self._delivered(seat, handed)
        if not seat.berth:
            partition = seat.shard.partition
            for delivery in found:
                key = delivery.event.key
                delivery._lane = partition if key is None else key
        return found

    def _delivered(self, seat: Seat, handed: Deliver) -> list[Delivery[T]]:
        engine, topic, number = seat.engine, self._topic, handed.hand
        attempts, replays = handed.attempts, handed.replays
        assert engine is not None
        assert topic is not None
        events = (event for piece in handed.pieces for event in piece.source.events(piece.rows))
        if not (attempts or replays):
            return [Delivery(seat, engine, number, topic, event, 1, 0) for event in events]
        return [
            Delivery(seat, engine, number, topic, event, attempts.get(event.offset, 1), replays.get(event.offset, 0))
            for event in events
        ]

    # --- batches ------------------------------------------------------------------------------

    async def batches(
        self, *, max_events: int = BATCH_EVENTS_MAX, max_bytes: int = BATCH_BYTES_MAX
    ) -> AsyncIterator[DeliveredBatch]:
        """Yield events as batches of at most so many events and, unless a single one is larger, bytes."""
        if max_events < 1 or max_bytes < 1:
            raise UsageError(f"a batch has at least one event and one byte, not {max_events} and {max_bytes}")
        member = await self._joined()
        self._give_back()
        while not (self._closed or member.closed):
            if member.ended is not None:
                raise member.ended
            if member.breathless:
                await member.breathe()
                continue  # it may be closed by now
            member.settle_down()
            taken = member.take(max_events, max_bytes, singly=False)
            if taken is None:
                await member.wait()
                continue
            batch = self._batch(*taken)
            batch._start()
            yield batch

    def _batch(self, seat: Seat, handed: Deliver) -> DeliveredBatch:
        engine = seat.engine
        assert engine is not None
        return DeliveredBatch(
            seat, engine, handed.hand, handed.pieces, attempts=handed.attempts, replays=handed.replays
        )
