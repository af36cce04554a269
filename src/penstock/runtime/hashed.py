"""Slots of blocks: the keys of a block are hashed once in a process, however many subscriptions read it.

Subscriptions of a topic read the same blocks at about the same time, and so do several buses over one store. To hash
keys takes longer than to read them; what was found out of the last blocks is remembered, by what they are: their place
in the log and the runs of the producers that published them, which no other block has. Where blocks are read but once,
which is seen soon, nothing is kept: memory that is used again at once is much faster than memory that is new.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.columns import SLOT_SEED, SLOTS, hashes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from penstock.batch import Batch
    from penstock.producers import Run
    from penstock.rows import Partition

    Slots = npt.NDArray[np.int64]
    Identity = tuple[Partition, int, int, tuple[Run, ...]]

KEPT_BLOCKS: Final = 1_024
"""So many blocks are remembered …"""
KEPT_EVENTS: Final = 1 << 22
"""… and no more events than this: 4 MiB of slots."""
EVENTS_MIN: Final = 512
"""Smaller blocks are not: to look for each takes as long as to hash them together …"""
RUNS_MAX: Final = 8
"""… and so it does for blocks of many publishers."""
HOPE: Final = 64
"""After one was read again, so many blocks of its partition are kept for whoever may come."""


class Remembered:
    """Slots of the blocks that were hashed last. For all threads."""

    def __init__(self, blocks_max: int = KEPT_BLOCKS, events_max: int = KEPT_EVENTS) -> None:
        self._blocks_max = blocks_max
        self._events_max = events_max
        self.begin()

    def begin(self) -> None:
        """Remember nothing; also after a fork, whatever a thread was at that is not in the child."""
        self._lock = threading.Lock()
        self._seen: OrderedDict[Identity, npt.NDArray[np.uint8] | None] = OrderedDict()
        """What was read last, and its slots where they were kept: a byte for each."""
        self._events = 0
        self._hope: dict[Partition, int] = {}
        """Of which partitions blocks are kept, and how many more."""

    def of(self, partition: Partition, batches: Sequence[Batch]) -> Slots:
        """Return the slot of each event of these batches."""
        identities = [_identity(partition, batch) for batch in batches]
        known = self._find(partition, identities)
        unknown = [batch for batch, slots in zip(batches, known, strict=True) if slots is None]
        if not unknown:
            return _joined([slots for slots in known if slots is not None])
        hashed = _hashed(unknown, partition.number % SLOTS)
        if len(unknown) == len(batches) and partition not in self._hope:
            return hashed
        ends = list(accumulate(map(len, unknown)))
        parts = iter([hashed[end - len(batch) : end] for batch, end in zip(unknown, ends, strict=True)])
        found = []
        for identity, slots in zip(identities, known, strict=True):
            found.append(next(parts) if slots is None else slots)
            if slots is None and identity is not None:
                self._keep(partition, identity, found[-1])
        return _joined(found)

    def _find(self, partition: Partition, identities: Sequence[Identity | None]) -> list[Slots | None]:
        with self._lock:
            for identity in identities:
                if identity is None:
                    continue
                if identity in self._seen:
                    self._hope[partition] = HOPE
                else:
                    self._seen[identity] = None
                    self._forget()
            found = [None if identity is None else self._seen.get(identity) for identity in identities]
        return [None if slots is None else slots.astype(np.int64) for slots in found]

    def _keep(self, partition: Partition, identity: Identity, slots: Slots) -> None:
        with self._lock:
            hope = self._hope.get(partition, 0) - 1
            if hope >= 0 and identity in self._seen and self._seen[identity] is None and len(slots) <= self._events_max:
                self._hope[partition] = hope
                self._seen[identity] = slots.astype(np.uint8)
                self._events += len(slots)
                self._forget()
            elif hope < 0:
                self._hope.pop(partition, None)

    def _forget(self) -> None:
        while len(self._seen) > self._blocks_max or self._events > self._events_max:
            _, oldest = self._seen.popitem(last=False)
            self._events -= 0 if oldest is None else len(oldest)


SLOTS_OF_BLOCKS: Final = Remembered()
"""Those of this process."""
os.register_at_fork(after_in_child=SLOTS_OF_BLOCKS.begin)


def _identity(partition: Partition, batch: Batch) -> Identity | None:
    if len(batch) < EVENTS_MIN or not 0 < len(batch.runs) <= RUNS_MAX:
        return None
    return partition, batch.start, len(batch), batch.runs


def _hashed(batches: Sequence[Batch], keyless: int) -> Slots:
    hashes, present = hashes_of([batch.keys for batch in batches], SLOT_SEED)
    slots = (hashes & np.uint64(SLOTS - 1)).view(np.int64)
    return slots if present is None else np.where(present, slots, keyless)


def _joined(slots: list[Slots]) -> Slots:
    return slots[0] if len(slots) == 1 else np.concatenate(slots)
