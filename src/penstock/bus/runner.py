"""Runner: all subscribers and projections of a bus at work in this process, and their orderly end.

Ending is *draining*: nothing more is begun, what was not begun goes back without a counted attempt, and every handler
that runs may end. Those that have not after a while are cancelled, and their events go back in the same way.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.bus.handling import Handling
from penstock.bus.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from penstock.bus.consumer import Consumer
    from penstock.bus.handlers import Handler, Subscriber
    from penstock.bus.middleware import Middleware
    from penstock.bus.projecting import Projecting
    from penstock.clock import Clock

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""How often it is looked whether handlers are slow, or do not end …"""
LOOK_SECONDS_MIN: Final = 0.01
"""… and how often at most, where some have a timeout: a handler is cancelled so late at most."""


class Runner:
    """Runs projections, and subscribers, each with a consumer that `consumer_of` makes for it."""

    def __init__(
        self,
        subscribers: Sequence[Subscriber],
        consumer_of: Callable[[Subscriber], Consumer[Any]],
        *,
        clock: Clock,
        middleware: tuple[Middleware, ...] = (),
        projectings: Sequence[Projecting] = (),
    ) -> None:
        for subscriber in subscribers:
            subscriber.check()
        self._clock = clock
        self.handlings = [
            Handling(subscriber, consumer_of(subscriber), clock, middleware, expect=self._expect)
            for subscriber in subscribers
        ]
        self.projectings = list(projectings)
        self._look_at = 0.0
        self._sooner = asyncio.Event()
        self.watchdog = Watchdog(self._handlers)
        self.cancelled = 0
        """How many handlers were ended before they had ended by themselves."""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def at_work(self) -> list[Handling | Projecting]:
        """All that can be drained, can fail, and ends."""
        return [*self.handlings, *self.projectings]

    def _handlers(self) -> list[Handler]:
        return [handler for handling in self.handlings for handler in handling.subscriber.handlers]

    async def start(self) -> None:
        """Join all subscriptions, and begin; if one cannot be joined none is."""
        try:
            for each in self.at_work:
                await each.start()
        except BaseException:
            await self.stop()
            raise
        self._keeper = asyncio.get_running_loop().create_task(self._keep_time(), name="penstock handlers' time")
        self.watchdog.start()

    async def _keep_time(self) -> None:
        """Look at the times of all handlers again and again: one timer, however many run."""
        while True:
            now = self._clock.monotonic()
            overdue = [at for handling in self.handlings if (at := handling.look_at_times(now)) is not None]
            self._look_at = min([now + LOOK_SECONDS, *overdue])
            await self._clock.pause(LOOK_SECONDS_MIN)
            await self._wait_until_look()

    async def _wait_until_look(self) -> None:
        """Wait for the next look, or until a handler begins whose time ends before."""
        left = self._look_at - self._clock.monotonic()
        if left <= 0:
            return
        self._sooner.clear()
        waits = [asyncio.ensure_future(self._clock.pause(left)), asyncio.ensure_future(self._sooner.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _expect(self, deadline: float) -> None:
        """Note that the time of a handler ends then."""
        if deadline < self._look_at:
            self._look_at = deadline
            self._sooner.set()

    async def failed(self) -> None:
        """Return never, but raise what ends one of the subscribers."""
        done, _ = await asyncio.wait([each.failed for each in self.at_work], return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            await future

    def begin_nothing(self) -> None:
        """Begin nothing more: what is not begun goes back at once, and those that run go on."""
        for handling in self.handlings:
            handling.begin_nothing()

    async def stop(self, drain_seconds: float = 0.0, hurry: asyncio.Event | None = None) -> None:
        """Drain for so long, or until somebody is in a hurry, then end what still runs; may be repeated."""
        if drain_seconds > 0:
            await self._drain(drain_seconds, hurry)
        self.watchdog.stop()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
            self._keeper = None
        self.cancelled += sum(len(handling.busy) for handling in self.handlings)
        await asyncio.gather(*(each.stop() for each in self.at_work))

    async def _drain(self, seconds: float, hurry: asyncio.Event | None) -> None:
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[Any]] = [loop.create_task(self._clock.pause(seconds))]
        if hurry is not None:
            waits.append(loop.create_task(hurry.wait()))
        draining = asyncio.gather(*(each.drain() for each in self.at_work))
        try:
            await asyncio.wait([draining, *waits], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not draining.done():
            draining.cancel()
            for handling in self.handlings:
                for worker in handling.busy:
                    logger.warning("%s: a handler is cancelled, since this process ends: %r", handling, worker.delivery)
        with suppress(asyncio.CancelledError):
            await draining
