"""Consumers as a bus has them, over a store that is open already; with the ledger, or without.

A bus always has one, so that this puts together the parts of a bus that deliver, instead of a bus.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from penstock.bus.deliveries import Deliveries
from penstock.bus.directory import TopicDirectory
from penstock.bus.local import Local
from penstock.bus.topic import Topic
from penstock.cli.bench.log.events import TOPIC
from penstock.clock import SystemClock
from penstock.errors import PenstockError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.bus.consumer import Consumer
    from penstock.ports import Store
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.subscriptions import Start


BATCH_EVENTS = 20_000


class Consumers:
    """What makes consumers in this process."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries

    async def dispatcher(self) -> Dispatcher:
        """Return what delivers."""
        return await self._deliveries.dispatcher()

    def consumer(
        self,
        name: str,
        *,
        topic: str = TOPIC,
        mode: str = "exclusive",
        start: Start = "earliest",
        changes: Mapping[str, Any] | None = None,
    ) -> Consumer[Any]:
        """Return a consumer of a subscription."""
        return self._deliveries.consumer(
            topic,
            name,
            mode=mode,
            start=start,
            protect=None,
            consumer_id=None,
            on_gap=None,
            changes=changes or {},
        )


@asynccontextmanager
async def consumers(store: Store, topics: list[str] | None = None, *, ledger: bool = True) -> AsyncIterator[Consumers]:
    """Deliver from a store while this block lasts."""
    clock = SystemClock()
    local = Local(store.url, settings=Settings(), clock=clock, store=store)

    async def opened() -> Local:
        return local

    await local.open()
    directory = TopicDirectory({name: Topic(name, bytes) for name in topics or [TOPIC]}, opened)
    await directory.create_declared(local)
    deliveries = Deliveries(directory, clock, opened, ledger=ledger)
    try:
        yield Consumers(deliveries)
    finally:
        await deliveries.stop()
        await local.close()


async def take_all(consumer: Consumer[Any], events: int) -> None:
    """Take so many events in batches, ack each batch, and wait until all of that is on the medium."""
    left = events
    async for batch in consumer.batches(max_events=BATCH_EVENTS):
        left -= len(batch)
        await batch.ack()
        if left <= 0:
            break
    await consumer.flush()
    if left:
        raise PenstockError(f"{-left:,} events more came than there are")
