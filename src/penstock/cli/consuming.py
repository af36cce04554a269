"""What `penstock consume` does: hand over, print, settle.

*Printed* means that whoever reads stdout has it, or the pipe to him: an event is acknowledged after that and not
before. So a reader that goes away, a full disk or a signal lose nothing: what was not printed is given back.

Printing never holds up the event loop. A reader may take its time, as `less` does; the subscription stays this
consumer's meanwhile, and Ctrl-C works.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import select
import signal
import stat
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from penstock.cli.output import say, shown_text
from penstock.cli.read import _Printer
from penstock.errors import StaleDelivery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator

    from penstock.batch import Batch, StoredEvent
    from penstock.bus.consumer import Consumer
    from penstock.offsets import Gap
    from penstock.ports import Store
    from penstock.rows import TopicInfo
    from penstock.runtime.subscriptions import Start
    from penstock.settings import Settings

BATCH_EVENTS = 1_000
WRITE_BYTES = 4_096
"""What a pipe takes at once if it takes anything."""
SIGNALLED = 128  # plus the signal, as shells count it


class Wanted(NamedTuple):
    """What the options say."""

    mode: Literal["key_shared", "shared", "exclusive", "failover"] | None
    start: Start
    events_max: int | None
    batch: bool
    ack: bool
    wait: float | None
    as_json: bool
    consumer_id: str | None


def consumed(store: Store, settings: Settings, info: TopicInfo, name: str, wanted: Wanted) -> int:
    """Consume until the end that was asked for, or a signal; returns the exit code."""
    with _talking():
        return asyncio.run(_Consumption(store, info, name, wanted).run(settings))


class _Consumption:
    """One run of the command."""

    def __init__(self, store: Store, info: TopicInfo, name: str, wanted: Wanted) -> None:
        self._store = store
        self._info = info
        self._name = name
        self._wanted = wanted
        self._page = _Page(info, wanted.events_max, as_json=wanted.as_json)
        self._out = _Out()
        self._idle_since: float | None = None
        """None while an event is being printed."""
        self._gaps: set[asyncio.Task[None]] = set()

    async def run(self, settings: Settings) -> int:
        """Consume until the end; returns the exit code."""
        from penstock.bus.bus import Bus

        wanted = self._wanted
        with _ending() as ending, self._out.watched(ending):
            bus = Bus(settings.url, settings=settings, store=self._store)
            consumer: Consumer[bytes] = bus.consume(
                self._info.name,
                self._name,
                mode=wanted.mode,
                start=wanted.start,
                consumer_id=wanted.consumer_id,
                on_gap=self._gap,
            )
            async with bus, consumer:
                self._tell_state(consumer)
                self._idle_since = asyncio.get_running_loop().time()
                pump = asyncio.ensure_future(self._pump(consumer))
                try:
                    await self._ended(pump, ending)
                finally:
                    await _cancelled(pump, *self._gaps)
                return ending.result() if ending.done() else 0

    def _tell_state(self, consumer: Consumer[bytes]) -> None:
        from penstock.engine.policy import Policy
        from penstock.runtime.subscriptions import SHARED

        subscription = self._store.cursors.subscription(self._info.log_id, self._name)
        if subscription is not None and Policy.of(subscription.policy).paused:
            say(f"the subscription is paused: `penstock resume {self._info.name} {self._name}` lets it go on")
        others = [each.number for each in self._info.partitions if each.number not in consumer.active]
        if others and subscription is not None and subscription.mode in SHARED:
            say("the other consumers have all of it: this one gets its part as soon as they can let go of it")
        elif others:
            say(f"standing by: another consumer has {', '.join(f'{self._info.name}/{number}' for number in others)}")

    async def _ended(self, pump: asyncio.Future[None], ending: asyncio.Future[int]) -> None:
        """Return when all was printed that was asked for, or nothing came for long enough, or somebody wants an end."""
        waits: set[asyncio.Future[Any]] = {pump, ending}
        while not pump.done() and not ending.done():
            patience = self._patience()
            if patience is not None and patience <= 0:
                return
            await asyncio.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if pump.done():
            pump.result()
            await asyncio.gather(*self._gaps)

    def _patience(self) -> float | None:
        """Return how long to wait for an event from now on; None for ever."""
        wait, since = self._wanted.wait, self._idle_since
        if wait is None or since is None:
            return wait
        return since + wait - asyncio.get_running_loop().time()

    async def _pump(self, consumer: Consumer[bytes]) -> None:
        loop = asyncio.get_running_loop()
        whole = self._wanted.batch or not self._wanted.ack
        async for events, ack in self._batches(consumer) if whole else self._singles(consumer):
            self._idle_since = None
            await self._out.write(self._page.events(events))
            if self._wanted.ack:
                try:
                    await ack()
                except StaleDelivery as error:
                    say(f"what was just printed will come again: {error}")
            if self._page.left == 0:
                return
            self._idle_since = loop.time()
            await asyncio.sleep(0)  # or else, while more is at hand, a signal would not be heard

    @staticmethod
    async def _singles(consumer: Consumer[bytes]) -> AsyncIterator[_Handed]:
        async for delivery in consumer:
            yield [delivery.event], delivery.ack

    async def _batches(self, consumer: Consumer[bytes]) -> AsyncIterator[_Handed]:
        while True:
            left = self._page.left
            async for batch in consumer.batches(max_events=BATCH_EVENTS if left is None else min(left, BATCH_EVENTS)):
                yield batch, batch.ack
                break  # the next one may be of fewer events

    def _gap(self, partition: int, gap: Gap) -> None:
        line = self._page.gap(self._info, partition, gap)
        if line:
            task = asyncio.get_running_loop().create_task(self._out.write(line))
            self._gaps.add(task)


if TYPE_CHECKING:
    _Handed = tuple[Iterable[StoredEvent], Callable[[], Awaitable[None]]]


async def _cancelled(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# --- what ends it ---------------------------------------------------------------------------------


@contextmanager
def _ending() -> Iterator[asyncio.Future[int]]:
    """Give a future that a signal sets to the exit code; a second one ends the process as it would without us."""
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[int] = loop.create_future()
    signals = (signal.SIGINT, signal.SIGTERM)

    def asked(number: int) -> None:
        for each in signals:
            loop.remove_signal_handler(each)
        if not ending.done():
            ending.set_result(SIGNALLED + number)

    for each in signals:
        loop.add_signal_handler(each, asked, each)
    try:
        yield ending
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
        if ending.done() and not ending.cancelled():
            ending.exception()  # it was told, or something else was that is more


@contextmanager
def _talking() -> Iterator[None]:
    """Let warnings of the log be talk in the style of this command; a gap is told by the command itself."""
    logger, handler = logging.getLogger("penstock"), _Talk(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _Talk(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        """Say what is logged."""
        if record.funcName != "declare":
            say(f"{record.levelname.lower()}: {shown_text(record.getMessage())}")


# --- printing -------------------------------------------------------------------------------------


class _Page(_Printer):
    """Prints as `penstock read` does, into bytes."""

    def events(self, events: Iterable[StoredEvent]) -> bytes:
        """Return the lines of events."""
        with _captured() as lines:
            self.print_batch(cast("Batch", events))  # which it only iterates over
        return lines.getvalue()

    def gap(self, info: TopicInfo, partition: int, gap: Gap) -> bytes:
        """Tell of a gap on stderr, and return its line for programs, if such lines are wanted."""
        with _captured() as lines:
            self.print_gap(info.partitions[partition], gap)
        return lines.getvalue()


@contextmanager
def _captured() -> Iterator[io.BytesIO]:
    lines = io.BytesIO()
    text = io.TextIOWrapper(lines, sys.stdout.encoding, sys.stdout.errors, newline="\n", write_through=True)
    with redirect_stdout(text):
        yield lines
    text.detach()


class _Out:
    """Stdout, written so that waiting for whoever reads it holds up nobody else."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        try:
            self._fd = sys.stdout.fileno()
            mode = os.fstat(self._fd).st_mode
        except OSError:  # it is no file: a test looks at it
            self._fd = mode = 0
        self._is_pipe = stat.S_ISFIFO(mode)
        self._waits = self._is_pipe or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and os.isatty(self._fd))

    @contextmanager
    def watched(self, ending: asyncio.Future[int]) -> Iterator[None]:
        """Let a reader that goes away be an end, also while nothing is printed."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._fd)
            if not ending.done():
                ending.set_exception(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

        if not self._is_pipe:
            yield
            return
        # The writing end of a pipe becomes readable, in the sense of `poll`, when the other end is closed.
        loop.add_reader(self._fd, gone)
        try:
            yield
        finally:
            loop.remove_reader(self._fd)

    async def write(self, data: bytes) -> None:
        """Return when all of it is written; cancelling it leaves off only where the reader does not take more."""
        async with self._turn:
            if not self._waits:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
                return
            rest = memoryview(data)
            while rest:
                if not select.select([], [self._fd], [], 0)[1]:
                    await self._writable()
                rest = rest[os.write(self._fd, rest[:WRITE_BYTES]) :]

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_writer(self._fd, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_writer(self._fd)
