"""Local: the backend that runs over a store in this process.

The store is synchronous. If its calls may wait for I/O they are made in threads, so that the event loop never
waits; otherwise they are made at once, which costs less than handing them over.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.bus.workers import Workers
from penstock.errors import StoreClosed
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.batch import Batch
    from penstock.clock import Clock
    from penstock.offsets import Gap, Range
    from penstock.ports import Store
    from penstock.producers import Run
    from penstock.rows import Appended, Partition, Scheduled, TopicInfo, TopicSettings
    from penstock.settings import Settings

R = TypeVar("R")

THREADS_MAX = 16
"""Enough that a partition whose writer hangs does not hold up the others."""


class Local:
    """A `Backend` over a store; it opens the store of `url`, or takes one that is open and not its own."""

    def __init__(self, url: str, *, settings: Settings, clock: Clock | None = None, store: Store | None = None) -> None:
        self._url = url
        self._settings = settings
        self._clock = clock
        self._given = store
        self._store: Store | None = None
        self._workers: Workers | None = None

    @property
    def store(self) -> Store:
        """The open store."""
        if self._store is None:
            raise StoreClosed(f"the store {self._url!r} is not open")
        return self._store

    async def open(self) -> None:
        self._store = self._given
        if self._store is None:
            self._store = await self._opened()
        if self._store.capabilities.blocking:
            self._workers = Workers(THREADS_MAX, "penstock-store")

    async def _opened(self) -> Store:
        """Open the store; if this is cut off meanwhile, close it as soon as it is open."""
        opening = asyncio.ensure_future(
            asyncio.to_thread(open_store, self._url, clock=self._clock, settings=self._settings)
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_again)
            raise

    async def close(self) -> None:
        store, self._store = self._store, None
        try:
            if store is not None and store is not self._given:
                await asyncio.to_thread(store.close)
        finally:
            if self._workers is not None:
                self._workers.stop()

    async def call(self, function: Callable[..., R], *args: Any, **options: Any) -> R:
        """Call a method of the store, in a thread if it may wait for I/O."""
        if self._workers is None:
            return function(*args, **options)
        return await self._workers.call(function, *args, **options)

    async def create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        return await self.call(self.store.log.create_topic, name, settings)

    async def topics(self) -> list[TopicInfo]:
        return await self.call(self.store.log.topics)

    async def append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        return await self.call(self.store.log.append, partition, batch, runs)

    async def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        return await self.call(self.store.log.read, partition, start, bytes_max=bytes_max, events_max=events_max)

    async def bounds(self, partition: Partition) -> Range:
        return await self.call(self.store.log.bounds, partition)

    async def find_time(self, partition: Partition, time_us: int) -> int:
        return await self.call(self.store.log.find_time, partition, time_us)

    async def schedule_add(self, rows: Sequence[Scheduled]) -> None:
        await self.call(self.store.schedule.add, rows)

    async def schedule_cancel(self, id: str) -> bool:
        return await self.call(self.store.schedule.cancel, id)

    async def schedule_page(self, *, after: tuple[int, str] | None = None, limit: int = 100) -> list[Scheduled]:
        return await self.call(self.store.schedule.page, after=after, limit=limit)


def _close_again(opening: asyncio.Future[Store]) -> None:
    """Close a store that was opened and that nobody waits for any more."""
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="penstock-closing").start()
