"""What other processes do for this area, each a job of its own; see `bench.log.jobs`."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from penstock.bus.bus import Bus
from penstock.bus.consumer import Consumer
from penstock.bus.topic import Topic
from penstock.cli.bench.log.events import TOPIC, a_store
from penstock.cli.bench.log.jobs import tell
from penstock.ports import Store
from penstock.settings import Settings

READY = "ready"
PARTITIONS = 4
WIDE = Topic(TOPIC, bytes, partitions=PARTITIONS)


class Handle(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Share a subscription until nobody listens any more, with a handler that takes some time of the processor."""

    directory: str
    name: str
    microseconds: float = 0.0
    tells: bool = False
    """Whether it tells of every event its key, and when it came."""

    def run(self) -> None:
        """Do it."""
        with a_store(Path(self.directory)) as store:
            asyncio.run(self._run(store))

    async def _run(self, store: Store) -> None:
        async with (
            Bus(topics=[WIDE], settings=Settings(), store=store) as bus,
            bus.consume(WIDE, self.name) as consumer,
        ):
            tell(READY)
            working = asyncio.ensure_future(self._work(consumer))
            ending = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
            await asyncio.wait([working, ending], return_when="FIRST_COMPLETED")
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self, consumer: Consumer[bytes]) -> None:
        async for delivery in consumer:
            began = time.perf_counter()
            if self.tells:
                tell([(delivery.event.key or b"").decode(), began])
            while (time.perf_counter() - began) * 1e6 < self.microseconds:
                pass
            await delivery.ack()


Job = Handle
