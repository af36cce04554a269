"""Measuring: the one place where the metrics of a bus come together, when somebody asks for them.

Publisher and consumers add to plain numbers, once for many events; nothing is pushed anywhere. Asking reads these
numbers in the bus's event loop, where nobody changes them meanwhile, and looks at the store if the last look is old.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.errors import MetricsUnavailable, PenstockError
from penstock.metrics import Histogram, Reading, gathered
from penstock.runtime.gauges import Looks, build_reading
from penstock.runtime.tally import delivery_readings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.bus.deliveries import Deliveries
    from penstock.bus.entrances import Entrances
    from penstock.bus.local import Local
    from penstock.bus.publisher import Publisher
    from penstock.clock import Clock
    from penstock.metrics import Metric

logger = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 5.0
"""How long another thread waits for the event loop; a scrape has ten seconds, as a rule."""


class Published:
    """What a bus has published to one topic; counted once for each append."""

    __slots__ = ("_bytes", "_events", "_failed", "_seconds")

    def __init__(self) -> None:
        self._events = 0
        self._bytes = 0
        self._seconds = Histogram()
        self._failed: Counter[str] = Counter(refused=0, unknown=0)

    def stored(self, events: int, nbytes: int, seconds: float, *, duplicate: bool) -> None:
        """Count an append that was answered; what was stored before is not counted again."""
        self._seconds.observe(seconds)
        if not duplicate:
            self._events += events
            self._bytes += nbytes

    def failed(self, events: int, error: BaseException) -> None:
        """Count an append that was not."""
        self._failed["refused" if isinstance(error, PenstockError) else "unknown"] += events

    def readings(self, topic: str) -> Iterator[Reading]:
        """Yield what was counted."""
        yield Reading("messages_published_total", self._events, (topic,))
        yield Reading("published_bytes_total", self._bytes, (topic,))
        yield Reading("publish_duration_seconds", self._seconds.read(), (topic,))
        for reason, count in self._failed.items():
            yield Reading("publish_failures_total", count, (topic, reason))


class Measurements:
    """The metrics of a bus. Making one does no I/O."""

    def __init__(self, clock: Clock, deliveries: Deliveries, entrances: Entrances) -> None:
        self._deliveries = deliveries
        self._entrances = entrances
        self._looks = Looks(clock)
        self._outbox: list[Reading] = []
        self._opened: tuple[asyncio.AbstractEventLoop, Local, Publisher] | None = None
        self._looking: asyncio.Task[None] | None = None

    def open(self, local: Local, publisher: Publisher) -> None:
        """Measure an open bus from now on; called in its event loop."""
        self._opened = (asyncio.get_running_loop(), local, publisher)

    def close(self) -> None:
        """Measure nothing more."""
        self._opened = None
        if self._looking is not None:
            self._looking.cancel()

    async def gather(self) -> list[Metric]:
        """Return all metrics, with a look at the store if the last one is old."""
        await self._look()
        return self._now()

    def latest(self) -> list[Metric]:
        """Return all metrics, in any thread; in that of the event loop, with the last look at the store."""
        if self._opened is None or not self._opened[0].is_running():
            return gathered([build_reading()])
        loop = self._opened[0]
        if _is_here(loop):
            if self._looks.due and (self._looking is None or self._looking.done()):
                self._looking = loop.create_task(self._look_ahead(), name="penstock metrics")
            return self._now()
        asked = asyncio.run_coroutine_threadsafe(self.gather(), loop)
        try:
            return asked.result(ANSWER_SECONDS)
        except TimeoutError:
            asked.cancel()
            raise MetricsUnavailable(
                f"the event loop of the bus did not answer within {ANSWER_SECONDS:g} s: something blocks it, or the "
                f"store does"
            ) from None

    async def _look(self) -> None:
        if self._opened is None or not self._looks.due:
            return
        _, local, _ = self._opened
        await local.call(self._looks.take, local.store)
        self._outbox = await self._look_at_outbox()

    async def _look_ahead(self) -> None:
        try:
            await self._look()
        except PenstockError as error:  # as a rule, the bus is being closed
            logger.debug("the store was not looked at for metrics: %s", error)

    async def _look_at_outbox(self) -> list[Reading]:
        try:
            pending = await self._entrances.pending()
        except PenstockError as error:  # the mover meets the same, and tells of it
            logger.debug("the outbox could not be looked at for metrics: %s", error)
            return []
        return [] if pending is None else [Reading("outbox_pending", pending)]

    def _now(self) -> list[Metric]:
        return gathered(self._readings())

    def _readings(self) -> Iterator[Reading]:
        yield build_reading()
        if self._opened is None:
            return
        for topic, published in self._opened[2].published.items():
            yield from published.readings(topic)
        yield from self._looks.seen
        yield from self._outbox
        if self._deliveries.running is not None:
            yield from delivery_readings(self._deliveries.running)


def _is_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
