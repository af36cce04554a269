"""Shipments: events that a buffered publisher stores together, and those who want to know what became of them.

A shipment gathers, leaves, and ends: it is stored, or it failed. An event of it has no future of its own, because that
would cost more than the event. It has a `PendingReceipt`, which knows its shipment and its place there, and does
nothing until somebody awaits it.

A failure is seen by whoever awaits one of its events, and of an event that nobody awaits it is unseen. The publisher
reports what is unseen; if nobody asks the publisher either, the log tells of it when the shipment is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.bus.gathering import Gathering
from penstock.bus.grouping import own_copy
from penstock.bus.publisher import Receipt

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.bus.publisher import Prepared, Publisher
    from penstock.offsets import Range

logger = logging.getLogger(__name__)


class PendingReceipt(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One event on its way: `await` it for its `Receipt`, or for the error that it ended with.

    It may be awaited at any time, by any number of tasks, and again. Who stops waiting changes nothing for the event.
    """

    _shipment: Shipment
    _index: int

    def done(self) -> bool:
        """Say whether it has ended, so that awaiting it does not wait."""
        return self._shipment.ended

    def __await__(self) -> Generator[Any, None, Receipt]:
        if not self._shipment.ended:
            yield from self._shipment.awaited(self._index).__await__()
        return self._shipment.receipt(self._index)

    def __repr__(self) -> str:
        return f"<PendingReceipt for {self._shipment.topic!r}, {'done' if self.done() else 'on its way'}>"


class Halt:
    """Why a partition does not go on: something was not stored, and nobody was told of it yet."""

    __slots__ = ("_on_told", "error", "told")

    def __init__(self, error: Exception, on_told: Callable[[], None]) -> None:
        self.error = error
        self.told = False
        self._on_told = on_told

    def tell(self) -> None:
        """Note that somebody was told."""
        if not self.told:
            self.told = True
            self._on_told()


class Shipment(Gathering):
    """Events of one partition that are stored together, or not at all."""

    __slots__ = (
        "_awaited",
        "_done",
        "_duplicate",
        "_halt",
        "_offsets",
        "_on_seen",
        "_reported",
        "behind",
        "cost",
        "count",
        "ended",
        "error",
        "opened_at",
        "partition",
        "prepared",
        "size",
        "topic",
    )

    def __init__(self, topic: str, partition: int, opened_at: float, on_seen: Callable[[Shipment], None]) -> None:
        super().__init__()
        self.topic = topic
        self.partition = partition
        self.opened_at = opened_at
        """When its first event came, on the monotonic clock."""
        self.behind: Halt | None = None
        """What was not stored before it, when nobody knew that yet: it must not be sent."""
        self.size = 0
        """The bytes of its events."""
        self.cost = 0
        """What it takes of the publisher's room."""
        self.count = 0
        """How many events it has, once it is prepared."""
        self.prepared: Prepared | None = None
        """What sends it, from when it leaves until it ends."""
        self.ended = False
        self.error: Exception | None = None
        """What it failed with."""
        self._reported = False
        self._offsets: dict[int, Range | None] = {}
        self._duplicate = False
        self._halt: Halt | None = None
        self._on_seen = on_seen
        self._awaited: set[int] = set()
        self._done: asyncio.Event | None = None

    def __del__(self) -> None:
        if self.error is not None and self.unseen:
            logger.error("%d events for %r were not stored, and nobody asked: %s", self.unseen, self.topic, self.error)

    def prepare(self, publisher: Publisher) -> Prepared:
        """Return what sends it, now that nothing more is added; the same at every call."""
        if self.prepared is None:
            self.count = len(self)
            self.prepared = publisher.prepare_part(self.topic, self.partition, self.to_batch())
            self.clear()  # the columns have it all
        return self.prepared

    # --- its end --------------------------------------------------------------------------------

    def stored(self, receipt: Receipt) -> None:
        """End it: all of it is stored."""
        self._offsets, self._duplicate = receipt.offsets, receipt.duplicate
        self._end()

    def failed(self, error: Exception, halt: Halt) -> None:
        """End it: it failed, and whoever is told of that is told of the halt."""
        self.error, self._halt = error, halt
        self._end()

    def _end(self) -> None:
        self.prepared = None  # an error that has to do with it carries it
        self.ended = True
        if self._done is not None:
            self._done.set()

    # --- those who want to know -----------------------------------------------------------------

    async def end(self) -> None:
        """Return when it has ended."""
        if not self.ended:
            if self._done is None:
                self._done = asyncio.Event()
            await self._done.wait()

    async def awaited(self, index: int) -> None:
        """Return when it has ended; meanwhile it counts that somebody will see what becomes of this event."""
        self._awaited.add(index)
        try:
            await self.end()
        except asyncio.CancelledError:
            self._awaited.discard(index)
            raise

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of an event, or raise what it ended with, which is seen by that."""
        if self.error is None:
            return Receipt(self.topic, self._duplicate, self._offsets, index)
        self._awaited.add(index)
        self._seen()
        raise own_copy(self.error)

    @property
    def unseen(self) -> int:
        """Of how many events nobody has seen the failure, nor will, since nobody awaits them."""
        return 0 if self._reported else self.count - len(self._awaited)

    def report(self) -> Exception:
        """Return its error, to be raised; by that it is seen for all of its events."""
        assert self.error is not None
        self._reported = True
        self._seen()
        return own_copy(self.error)

    def _seen(self) -> None:
        assert self._halt is not None
        self._halt.tell()
        if not self.unseen:
            self._on_seen(self)
