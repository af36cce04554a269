"""The finisher: what a sink has prepared is delivered, even if the process that prepared it never comes back.

Every open bus runs one. A manifest that it sees twice, some seconds apart, is nobody's any more, or of somebody very
slow: it is completed, which is harmless should the other one do the same. Now and then it also deletes the staging logs
that were left behind. While there is nothing to do it writes nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.runtime import sinks
from penstock.runtime.entrances import Host, Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
"""How long a prepared manifest is left to whoever prepared it, at least."""

SWEEP_SECONDS: Final = 3600.0


class Finisher(Loop):
    """The loop over the store's `Manifests`."""

    def __init__(self, host: Host, *, clock: Clock, jitter: Callable[[], float]) -> None:
        super().__init__("the finisher of sinks", clock, jitter)
        self._host = host
        self._seen: set[tuple[str, str, int]] = set()
        self._swept_at: float | None = None

    async def _round(self) -> float:
        store = self._host.store
        for manifest in await self._host.call(store.manifests.unfinished):
            identity = (manifest.sink, manifest.query, manifest.batch)
            if identity in self._seen:
                await self._host.call(sinks.complete, store, manifest)
                logger.info("sink %r, query %s, batch %d was prepared by another, and is delivered", *identity)
            self._seen.add(identity)
        self._seen &= {(row.sink, row.query, row.batch) for row in await self._host.call(store.manifests.unfinished)}
        now = self._clock.monotonic()
        if self._swept_at is None or now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            for name in await self._host.call(sinks.sweep, store, clock=self._clock):
                logger.info("staging log %r was left behind, and is deleted", name)
        return LOOK_SECONDS

    def _fenced(self) -> None:
        """Nothing is held."""

    async def _ended(self) -> None:
        """Nothing is held."""
