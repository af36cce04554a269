"""`memory:`, a whole store in memory: the reference for all others, and what users' tests run on.

It keeps every contract of `penstock.ports` except durability, and it is short, which shows that the ports
are narrow. It is bounded: `StoreFull` is raised before anything is written. Each opening is a new, empty
store. One lock guards everything; heads are read without it.
"""

from __future__ import annotations

from penstock.clock import Clock, SystemClock
from penstock.ports import Capabilities
from penstock.rows import Told, check_told
from penstock.settings import MemorySettings
from penstock.stores.memory.cursors import MemoryCursors, MemoryLeases, MemoryParkedRows
from penstock.stores.memory.entrances import MemoryManifests, MemoryNotifier, MemoryOutbox, MemorySchedule
from penstock.stores.memory.log import MemoryLog
from penstock.stores.memory.state import State

__all__ = ["MemoryStore"]


class MemoryStore:
    """The `Store` behind `memory:`."""

    def __init__(self, *, clock: Clock | None = None, limits: MemorySettings | None = None) -> None:
        self._state = State(clock or SystemClock(), limits or MemorySettings())
        self.url = "memory:"
        self.capabilities = Capabilities(durable=False, shared=False, blocking=False)
        self.notifier = MemoryNotifier(self._state)
        self.log = MemoryLog(self._state, self.notifier)
        self.cursors = MemoryCursors(self._state)
        self.parked = MemoryParkedRows(self._state)
        self.leases = MemoryLeases(self._state)
        self.schedule = MemorySchedule(self._state)
        self.outbox = MemoryOutbox(self._state)
        self.manifests = MemoryManifests(self._state)
        self._told: dict[str, Told] = {}

    def tell(self, who: str, document: bytes) -> None:
        """See `Telling`."""
        with self._state:
            check_told(document, len(self._told.keys() - {who}))
            self._told.pop(who, None)
            if document:
                self._told[who] = Told(who, self._state.clock.time_us(), document)

    def told(self) -> list[Told]:
        """See `Telling`."""
        with self._state:
            return sorted(self._told.values())

    def close(self) -> None:
        """Refuse every further call; what was stored goes with the last reference."""
        self._state.closed = True
        self._told.clear()
