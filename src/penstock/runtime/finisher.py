"""The finisher: what a sink has prepared is delivered, even if the process that prepared it never comes back.

Every open bus runs one. A manifest that it sees twice, some seconds apart, is nobody's any more, or of somebody very
slow: it is completed, which is harmless should the other one do the same. One that cannot be completed is told of, and
holds up nobody but its own sink. Now and then the finisher also deletes the staging logs that were left behind. While
there is nothing to do it writes nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, StoreClosed
from penstock.runtime import sinks
from penstock.runtime.entrances import Host, Loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock
    from penstock.rows import Manifest

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 10.0
"""How long a prepared manifest is left to whoever prepared it, at least."""

SWEEP_SECONDS: Final = 3600.0

_Identity = tuple[str, str, int]
"""Sink, query and batch."""


class Finisher(Loop):
    """The loop over the store's `Manifests`."""

    def __init__(self, host: Host, *, clock: Clock, jitter: Callable[[], float]) -> None:
        super().__init__("the finisher of sinks", clock, jitter)
        self._host = host
        self._seen: dict[_Identity, str] = {}
        """What was prepared at the last look, and why it could not be delivered then."""
        self._swept_at: float | None = None

    async def _round(self) -> float:
        store = self._host.store
        waiting: dict[_Identity, str] = {}
        failed: set[str] = set()
        for manifest in await self._host.call(store.manifests.unfinished):
            identity = (manifest.sink, manifest.query, manifest.batch)
            if identity not in self._seen or manifest.sink in failed:
                waiting[identity] = ""
                continue
            trouble = await self._complete(manifest)
            if trouble:
                # What this sink has prepared after it must wait for it; other sinks need not.
                failed.add(manifest.sink)
                waiting[identity] = trouble
                if trouble != self._seen[identity]:
                    logger.warning("sink %r, query %s, batch %d is prepared, and stays so: %s", *identity, trouble)
            else:
                logger.info("sink %r, query %s, batch %d was prepared by another, and is delivered", *identity)
        self._seen = waiting
        now = self._clock.monotonic()
        if self._swept_at is None or now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            for name in await self._host.call(sinks.sweep, store, clock=self._clock):
                logger.info("staging log %r was left behind, and is deleted", name)
        return LOOK_SECONDS

    async def _complete(self, manifest: Manifest) -> str:
        """Deliver what a manifest says; return what keeps it from that, if anything does."""
        try:
            await self._host.call(sinks.complete, self._host.store, manifest)
        except StoreClosed:
            raise
        except (PenstockError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _fenced(self) -> None:
        """Nothing is held."""

    async def _ended(self) -> None:
        """Nothing is held."""
