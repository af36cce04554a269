"""A disk in memory that misbehaves: writes cut short, syncs that fail, lie or take long, and space that runs out.

A sync that fails does what Linux does: some of the pages reached the medium, all are marked clean, so that the next
sync of the same file succeeds and writes nothing of them. The bytes can still be read, until the power is lost.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from penstock.testing.machine.disk import VirtualDisk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from _typeshed import ReadableBuffer

SHORT, FULL, FAILING, LYING, SLOW = "a short write", "a full disk", "a failing sync", "a lying sync", "a slow sync"
SLOW_SECONDS = 30.0


class FaultyDisk(VirtualDisk):
    """A disk with faults, each with a probability of its own per operation.

    `counts` says how often each came; `wait` is called with the seconds that a slow sync takes.
    """

    def __init__(
        self, chance: random.Random, rates: Mapping[str, float], wait: Callable[[float], None] = lambda _: None
    ) -> None:
        super().__init__()
        self._chance = chance
        self.rates = dict(rates)
        self.wait = wait
        self.counts = dict.fromkeys(rates, 0)

    def _strikes(self, fault: str) -> bool:
        strikes = self._chance.random() < self.rates.get(fault, 0.0)
        if strikes:
            self.counts[fault] += 1
        return strikes

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        if self._strikes(FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._strikes(SHORT):
            data = b"".join(bytes(buffer) for buffer in buffers)
            count = self._chance.randrange(len(data)) if data else 0
            return super().write_many(descriptor, [data[:count]], position) if count else 0
        return super().write_many(descriptor, buffers, position)

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        if self._strikes(FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(descriptor, position, count)

    def sync(self, descriptor: int) -> None:
        if self._strikes(SLOW):
            self.wait(SLOW_SECONDS)
        if self._strikes(FAILING):
            self.sync_in_vain(descriptor, self._chance)
        if self._strikes(LYING):
            self.step(f"pretend to sync {self._called(self._file(descriptor))}")
        else:
            super().sync(descriptor)
