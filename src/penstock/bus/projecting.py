"""Projecting: one projection at work in this process, from the log into SQLite.

It is a subscription like any other, `projection.<name>`, in mode `failover`: each partition is folded in one process at
a time, its lag is seen where all lags are, and retention waits for it. But the cursor of a subscription is not what
decides which event comes next. The position in the file of states does, which was written with the states:

* Events are taken from the log, from that position on. What the subscription brings says that there is something, and
  is used as it comes where it is what comes next.
* So no event is folded twice, and none is left out: not after a crash between writing and acknowledging, not if the
  file of states is brought back from a copy or removed, and not for an event that expires before it is delivered. To
  what has happened, that it is too late for handlers makes no difference.

A function that fails ends its projection, with an error that names the event. Others go on.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.batch import Batch
from penstock.bus.states import Place, Writer
from penstock.bus.workers import Workers
from penstock.errors import DataLost, StaleDelivery, Trimmed
from penstock.offsets import Position
from penstock.rows import Partition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.batch import StoredEvent
    from penstock.bus.consumer import Consumer
    from penstock.bus.delivered import DeliveredBatch
    from penstock.bus.projections import Projection
    from penstock.bus.states import States
    from penstock.clock import Clock
    from penstock.offsets import Gap
    from penstock.ports import Backend
    from penstock.rows import TopicInfo

logger = logging.getLogger(__name__)

BATCH_EVENTS: Final = 5_000
BATCH_BYTES: Final = 8 << 20
"""So much is folded in one transaction at most."""
LOOK_SECONDS: Final = 1.0
"""How often it is looked for events that no subscription brings, because they have expired."""


class Projecting:
    """A projection at work, from `start` to `stop`."""

    def __init__(
        self,
        projection: Projection[Any],
        consumer: Consumer[Any],
        states: States,
        reached: Callable[[str], Awaitable[tuple[Backend, TopicInfo]]],
        clock: Clock,
    ) -> None:
        self.projection = projection
        self.consumer = consumer
        self._states = states
        self._reached = reached
        self._clock = clock
        # In memory nothing waits, and a test sees everything happen in one thread.
        self._threads = None if states.path is None else Workers(1, f"penstock-{projection.subscription}")
        self._tasks: list[asyncio.Task[None]] = []
        self._folding = asyncio.Lock()
        self._stopping = False
        self._writer: Writer | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set if it can go on no more, with the reason."""

    def __str__(self) -> str:
        return str(self.projection)

    # --- coming and going ---------------------------------------------------------------------

    async def start(self) -> None:
        """Join the subscription, and begin."""
        self._backend, info = await self._reached(self.projection.topic.name)
        self._log_id = info.log_id
        place = Place(self.projection.name, self.projection.version, info.name, info.log_id)
        self._writer = Writer(self._states, place)
        await self._call(self._writer.position, 0)  # a file that cannot be written to is told of now
        await self.consumer.__aenter__()
        loop = asyncio.get_running_loop()
        for work in (self._take(), self._look()):
            task = loop.create_task(work, name=f"penstock {self}")
            task.add_done_callback(self._gone)
            self._tasks.append(task)

    async def drain(self) -> None:
        """Begin nothing more, and return when what is being written is written."""
        self._stopping = True
        async with self._folding:
            for task in self._tasks:
                task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """End, give back what was not folded, and leave; may be repeated."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        writer, self._writer = self._writer, None
        if writer is not None:
            await self._call(writer.close)  # after whatever its thread still does
        await self.consumer.close()
        if self._threads is not None:
            self._threads.stop()
        if not self.failed.done():
            self.failed.cancel()

    def _gone(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            logger.error("%s can go on no more: %s", self, error)
            self.failed.set_exception(error)
            self.failed.exception()  # whoever waits for it is told; if nobody does, the log has been
            for other in self._tasks:
                other.cancel()

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self._threads is None else await self._threads.call(function, *args)

    # --- taking -------------------------------------------------------------------------------

    async def _take(self) -> None:
        async for batch in self.consumer.batches(max_events=BATCH_EVENTS, max_bytes=BATCH_BYTES):
            await self._advance(batch.partition, int(batch.offsets.max()) + 1, batch.batches)
            await self._acknowledge(batch)

    async def _acknowledge(self, batch: DeliveredBatch) -> None:
        try:
            await batch.ack()
        except StaleDelivery as stale:
            logger.info("%s: a batch was brought for nothing: %s", self, stale)

    async def _look(self) -> None:
        """Fold what no subscription brings; at the beginning, too, where the states are older than the cursor."""
        while True:
            for partition in self.consumer.active:
                bounds = await self._backend.bounds(Partition(self._log_id, partition))
                await self._advance(partition, bounds.stop)
            await self._clock.pause(LOOK_SECONDS)

    async def _advance(self, partition: int, stop: int, brought: Sequence[Batch] = ()) -> None:
        """Fold what there is before an offset and was not folded; `brought` is the end of it."""
        more = True
        while more and not self._stopping:
            try:
                async with self._folding:
                    more = await self._step(partition, stop, brought)
            except (OSError, sqlite3.OperationalError) as error:
                logger.warning("%s: partition %d waits, as something failed: %s", self, partition, error)
                await self._clock.pause(LOOK_SECONDS)

    async def _step(self, partition: int, stop: int, brought: Sequence[Batch]) -> bool:
        """Fold the next events, in one transaction; say whether there are more."""
        assert self._writer is not None
        position = await self._call(self._writer.position, partition)
        if position is not None and position >= stop:
            return False
        items = await self._next(partition, position, stop, brought)
        if not items:
            return False
        position = await self._call(self._write, partition, position, items)
        return position is None or position < stop

    async def _next(
        self, partition: int, position: int | None, stop: int, brought: Sequence[Batch]
    ) -> Sequence[Batch | Gap]:
        if brought and position == brought[0].range.start and _follow_each_other(brought):
            return brought
        place = Partition(self._log_id, partition)
        if position is None:
            # The first of all; what was trimmed before nobody can know any more.
            position = (await self._backend.bounds(place)).start
        count = max(min(stop - position, BATCH_EVENTS), 1)
        try:
            return await self._backend.read(place, position, bytes_max=BATCH_BYTES, events_max=count)
        except Trimmed as error:
            raise DataLost(
                f"{self}: partition {partition} was folded up to offset {position}, and the log begins at "
                f"{error.first} by now: raise the projection's version to begin anew with what there is"
            ) from error

    # --- folding ------------------------------------------------------------------------------

    def _write(self, partition: int, position: int | None, items: Sequence[Batch | Gap]) -> int | None:
        """Fold what was read, and write it; return where the projection is then. Runs in a thread."""
        assert self._writer is not None
        events: list[StoredEvent] = []
        for item in items:
            if isinstance(item, Batch):
                events.extend(item)
            else:
                logger.warning("%s: partition %d has lost offsets %s: %s", self, partition, item.range, item.reason)
        topic, fold = self.projection.topic, self.projection.fold
        if wanted := self.projection.types:
            events = [event for event in events if event.type in wanted]

        def where(number: int) -> Position:
            return Position(topic.name, partition, events[number].offset)

        values: list[Any] = []
        try:
            for event in events:
                values.append(topic.decode(event))  # noqa: PERF401 - so that it is known which one failed
        except Exception as error:
            raise fold.failure(where(len(values)), "the event", error) from error
        keys = fold.keys(values, [event.key for event in events], where)
        folded = partial(fold.fold, keys=keys, values=values, where=where)
        return self._writer.write(partition, position, items[-1].range.stop, keys, folded)


def _follow_each_other(batches: Sequence[Batch]) -> bool:
    """Say whether these are all events from the first to the last: none was selected, none is missing."""
    following = batches[0].range.start
    for batch in batches:
        if batch.range.start != following or len(batch) != batch.range.stop - batch.range.start:
            return False
        following = batch.range.stop
    return True
