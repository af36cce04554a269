"""A process that shares a subscription with others, as the script says; and ends as any other does.

Whatever it tells bears a time, on a clock that all processes of a machine share: so what several of them tell can be
put in one order. The first of them waits in the middle of its work until it is told to go on, so that it is certain
that the second comes while there is something to share.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.columns import slot_of_key
from penstock.runtime.subscriptions import shard_lease
from penstock.testing.campaigns.deliveries.consumer import Ended, Teller, Worker, _Telling, open_file_store
from penstock.testing.campaigns.deliveries.moves import SharedSteps, lease_of
from penstock.testing.campaigns.deliveries.script import FastClock, Fault, Scene

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from penstock.batch import StoredEvent
    from penstock.bus.delivered import DeliveredBatch, Delivery
    from penstock.stores.file.store import FileStore

WAITS_AT = 2
"""At which delivery the first process waits."""


class Stamped(NamedTuple):
    """A message, and when it was told, in nanoseconds."""

    at: int
    message: object


class Handed(NamedTuple):
    """A handler was given this event."""

    partition: int
    offset: int
    payload: bytes
    attempt: int
    lease: str
    """Whose owner it is given to: that of its slot, or of a berth."""
    epoch: int


class Waits(NamedTuple):
    """It waits until it is told to go on."""


class Armed(NamedTuple):
    """It has heard that somebody is about to be killed."""


class _StampingTeller(Teller):
    def _sent(self, message: object) -> object:
        return Stamped(time.monotonic_ns(), message)


def share(
    connection: Connection[Any, Any], *, root: str, since_us: int, scene: Scene, fault: Fault | None, waits: bool
) -> None:
    """Consume until everything is settled; in the middle, if it `waits`, until it is told to go on."""
    told = _StampingTeller(connection)
    logger = logging.getLogger("penstock")
    logger.addHandler(_Telling(told))
    logger.propagate = False
    clock = FastClock(since_us)
    store = open_file_store(root, clock)
    steps = SharedSteps(store, told.tell, fault)
    steps.armed = waits or not scene.kills_first
    steps.wrap()
    asyncio.run(Sharer(store, clock, steps, told, scene, waits=waits).run_with(connection))
    store.close()
    told.tell(Ended())


class Sharer(Worker):
    """The consumer of such a process."""

    _steps: SharedSteps

    def __init__(
        self, store: FileStore, clock: FastClock, steps: SharedSteps, told: Teller, scene: Scene, *, waits: bool
    ) -> None:
        super().__init__(store, clock, steps, told, scene, leaves_at=0)
        self._waits = waits
        self._go = asyncio.Event()

    async def run_with(self, connection: Connection[Any, Any]) -> None:
        """Consume, and listen to what the campaign says."""
        loop = asyncio.get_running_loop()

        def listen() -> None:
            while True:
                try:
                    word = connection.recv()
                except (EOFError, OSError):
                    return
                if word == "go":
                    with suppress(RuntimeError):  # it has ended meanwhile
                        loop.call_soon_threadsafe(self._go.set)
                else:
                    self._steps.armed = True
                    self._told.tell(Armed())

        threading.Thread(target=listen, daemon=True).start()
        await self.run()

    def _tell_given(self, hand: Delivery[bytes] | DeliveredBatch, events: list[tuple[StoredEvent, int, int]]) -> None:
        seat = hand._seat  # noqa: SLF001 - nothing else says whose it is
        [(event, attempt, _)] = events
        partition = event.position.partition
        lease = shard_lease(seat.shard)
        if not seat.berth:
            lease = lease_of(seat.shard.log_id, seat.shard.subscription, slot_of_key(event.key, partition))
        epoch = self._steps.epoch_of(lease)
        self._told.tell(Handed(partition, event.offset, event.data, attempt, lease, epoch))
        self._steps.reach_handler()
        self._given += 1

    async def _handle(self, delivery: Delivery[bytes]) -> None:
        if self._waits and self._given == WAITS_AT:
            self._told.tell(Waits())
            await self._go.wait()
        await super()._handle(delivery)
