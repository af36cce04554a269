"""Lives: a bus in a world as one process after another.

A life ends in order, as a bus is closed, or it dies. Death comes at one moment: from then on nothing of that process
reaches the store, and time does not matter to it; only then its tasks are ended, in the ordinary way, so that none is
left behind. What it held is free at once, as stores see that can see a process die.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.testing.worlds.medium import Process

if TYPE_CHECKING:
    import os
    from collections.abc import Awaitable, Callable, Collection, Iterator

    from penstock.bus.bus import Bus, Parts
    from penstock.clock import VirtualClock
    from penstock.settings import Settings
    from penstock.testing.worlds.medium import Medium
    from penstock.testing.worlds.watching import Watching


class Retries:
    """Publishers that wait to send something again, in all lives of a world.

    A test that awaits what they send lets no time pass. So it passes by itself until then, from one sleeper to the next
    whenever nothing else happens; but while a world drains, advances, crashes or ends, that is its own to do.
    """

    def __init__(self, clock: VirtualClock, be_quiet: Callable[[], Awaitable[None]]) -> None:
        self._clock = clock
        self._be_quiet = be_quiet
        self._drivers = 0
        self._stepping: asyncio.Task[None] | None = None
        self.waiting = 0
        """How many wait."""

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Let no time pass by itself within this block."""
        self._drivers += 1
        try:
            yield
        finally:
            self._drivers -= 1

    async def pause(self, seconds: float) -> None:
        """Return when so much time has passed."""
        self.waiting += 1
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._step())
        try:
            await self._clock.pause(seconds)
        finally:
            self.waiting -= 1
            if not self.waiting:
                self._stepping.cancel()
                self._stepping = None

    async def _step(self) -> None:
        """Let time pass whenever nothing else happens and nobody else does."""
        while True:
            await self._be_quiet()
            if not self._drivers:
                self._clock.advance(self._clock.next_due() or 0.0)


class LifeClock:
    """The clock of a world as one process has it; for the dead every wait is over at once."""

    def __init__(self, clock: VirtualClock, retries: Retries) -> None:
        self._clock = clock
        self._retries = retries
        self._beyond = 0.0
        self.dead = False

    def time_us(self) -> int:
        """See `Clock`."""
        return self._clock.time_us()

    def monotonic(self) -> float:
        """See `Clock`."""
        return self._clock.monotonic() + self._beyond

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        if not self.dead:
            self._clock.sleep(seconds)

    async def pause(self, seconds: float) -> None:
        """See `Clock`."""
        if self.dead:
            self._beyond += max(seconds, 0.0)
            await asyncio.sleep(0)
        else:
            await self._clock.pause(seconds)

    async def pause_to_retry(self, seconds: float) -> None:
        """See `penstock.bus.buffered.StillClock`."""
        await (self.pause(seconds) if self.dead else self._retries.pause(seconds))


class Life:
    """A bus in a world, from its beginning to its end or death."""

    def __init__(
        self,
        bus: Bus,
        medium: Medium,
        clock: VirtualClock,
        retries: Retries,
        *,
        settings: Settings,
        chance: Callable[[], float],
        watching: Watching,
        outbox: str | os.PathLike[str] | None,
        without: Collection[tuple[str, str]],
    ) -> None:
        self._bus = bus
        self._medium = medium
        self._process = Process(medium)
        self._clock = LifeClock(clock, retries)
        self._watching = watching
        self._stack = ExitStack()
        self.parts: Parts = self._stack.enter_context(
            bus.elsewhere(
                self._process,
                clock=self._clock,
                settings=settings,
                chance=chance,
                middleware=[watching],
                outbox=outbox,
                states=medium.states,
            )
        )
        bus._delayed_number = medium.delayed  # noqa: SLF001 - of this block alone, as all that a bus is elsewhere
        declared = self.parts.subscribers.declared
        for each in without:
            declared.pop(each, None)
        watching.subscribers = declared

    @property
    def outbox(self) -> str | os.PathLike[str] | None:
        """The file that events were staged into; None if there is none."""
        return self.parts.entrances.followed

    async def begin(self) -> None:
        """Open the bus, and run its subscribers."""
        try:
            await self._bus.__aenter__()
        except BaseException:
            self._stack.close()
            raise

    async def end(self, *, drain: bool = True) -> None:
        """Close the bus; with `drain`, handlers may end before."""
        if not drain:
            self.parts.subscribers.drain_seconds = 0.0
        try:
            await self._bus.close()
        finally:
            self._stack.close()

    async def die(self) -> None:
        """End at once, with nothing written and nothing given back."""
        self._process.dead = self._clock.dead = True
        self._medium.bury()
        runner = self.parts.subscribers.runner
        if runner is not None:
            # Those in threads are waited for: in the next life they would run beside themselves. One that has ended, or
            # has not begun, and only waits for what never comes, is not in its thread.
            in_threads = {run.delivery for run in self._watching.in_threads}
            runner.begin_nothing()
            for worker in (worker for handling in runner.handlings for worker in handling.busy):
                if worker.task is not None and worker.delivery not in in_threads:
                    worker.task.cancel()
            await asyncio.gather(*(each.drain() for each in runner.at_work))
        with suppress(PenstockError):  # what publishers could not store is lost, and nobody is there to be told
            await self.end(drain=False)
