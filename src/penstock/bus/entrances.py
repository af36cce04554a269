"""Entrances: the loops that a bus runs while it is open, and the outbox that one of them empties."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.bus.directory import TopicDirectory
from penstock.errors import UsageError
from penstock.producers import process_producer
from penstock.runtime.cleaner import Cleaner
from penstock.runtime.finisher import Finisher
from penstock.runtime.mover import Mover
from penstock.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from penstock.bus.local import Local
    from penstock.bus.topic import Topic
    from penstock.clock import Clock
    from penstock.outbox import SqliteOutbox


class Entrances:
    """What moves delayed and staged events into the log, and what looks after the store. Making one does no I/O."""

    def __init__(
        self,
        declared: Mapping[str, Topic[Any]],
        clock: Clock,
        outbox_path: str | os.PathLike[str] | None,
        *,
        chance: Callable[[], float] = random.random,
        follows: bool = False,
    ) -> None:
        self._declared = declared
        self._clock = clock
        self._outbox_path = outbox_path
        self._chance = chance
        self._follows = follows and outbox_path is not None
        """Whether the outbox is not the named file but the first one that is staged into."""
        self._backend: Local | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: SqliteOutbox | None = None
        self._scheduler: Scheduler | None = None
        self._finisher: Finisher | None = None
        self._cleaner: Cleaner | None = None
        self._mover: Mover | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._adding = 0
        self._added = asyncio.Event()
        self._added.set()
        self.dead_letter_days = 30.0

    @property
    def outbox(self) -> SqliteOutbox:
        """The outbox of this bus, which may be staged into before the bus opens."""
        if self._outbox_path is None:
            raise UsageError("this bus has no outbox: name the application's SQLite file, Bus(url, outbox='app.db')")
        if self._outbox is None:
            from penstock.outbox import SqliteOutbox

            self._outbox = SqliteOutbox(self._outbox_path)
        return self._outbox

    def configure(self, outbox_path: str | os.PathLike[str]) -> None:
        """Use another outbox; before anything was staged."""
        if self._outbox is not None:
            raise UsageError(f"events were staged in {self._outbox_path} already: say where the outbox is before")
        self._outbox_path = outbox_path

    def outbox_of(self, connection: sqlite3.Connection) -> SqliteOutbox:
        """Return the outbox to stage into with this connection."""
        if self._follows:
            from penstock.outbox import file_of

            self._outbox_path, self._follows = file_of(connection), False
            if self._backend is not None:
                assert self._loop is not None
                # Whoever stages may do so in a thread.
                self._loop.call_soon_threadsafe(self._start_mover, self._backend)
        return self.outbox

    @property
    def followed(self) -> str | os.PathLike[str] | None:
        """The file of the outbox; None as long as it is not known."""
        return None if self._follows else self._outbox_path

    def staged(self) -> int:
        """Return how many staged events wait to be moved."""
        return 0 if self.followed is None else self.outbox.pending()

    def start(self, backend: Local) -> None:
        """Start the loops over an open backend."""
        self._backend, self._loop = backend, asyncio.get_running_loop()
        owner = process_producer(self._clock.time_us()).hex()
        self._scheduler = Scheduler(backend, owner=owner, clock=self._clock, jitter=self._chance)
        self._scheduler.start()
        self._finisher = Finisher(backend, clock=self._clock, jitter=self._chance)
        self._finisher.start()
        self._cleaner = Cleaner(
            backend, owner=owner, clock=self._clock, jitter=self._chance, keep_days=self.dead_letter_days
        )
        self._cleaner.start()
        if self._outbox_path is not None and not self._follows:
            self._start_mover(backend)

    def _start_mover(self, backend: Local) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-outbox")

        async def opened() -> Local:
            return backend

        self._mover = Mover(
            self.outbox,
            backend,
            # Its own directory: the bus's one asks whether the bus is open, which ends before the mover does.
            TopicDirectory(self._declared, opened),
            owner=process_producer(self._clock.time_us()).hex(),
            clock=self._clock,
            jitter=self._chance,
            executor=self._thread,
        )
        self._mover.start()

    async def pending(self) -> int | None:
        """Return how many events of the outbox are not in the log yet; None without an outbox."""
        if self._thread is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.outbox.pending)

    @contextmanager
    def scheduling(self) -> Iterator[None]:
        """Add a row to the schedule in this block: `stop` waits for its end, and the scheduler looks at it then."""
        self._adding += 1
        self._added.clear()
        try:
            yield
        finally:
            self._adding -= 1
            if not self._adding:
                self._added.set()
            if self._scheduler is not None:
                self._scheduler.start()
                self._scheduler.wake()

    async def stop(self) -> None:
        """Let what is under way end, and give the leases back."""
        await self._added.wait()
        loops = [loop for loop in (self._scheduler, self._finisher, self._cleaner, self._mover) if loop is not None]
        await asyncio.gather(*(loop.stop() for loop in loops))
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.outbox.close)
            self._thread.shutdown(wait=False)
