"""What all ports of one memory store share: its rows, its limits and its one lock."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import Fenced, StoreClosed, StoreFull, TopicDeleted, UsageError

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.rows import Cursor, Fence, Lease, Parked, Partition, Scheduled, Shard, Subscription, TopicInfo
    from penstock.settings import MemorySettings
    from penstock.stores.memory.log import PartitionLog


class State:
    """The rows of a store. `with state:` holds its lock, and raises `StoreClosed` once it is closed."""

    def __init__(self, clock: Clock, limits: MemorySettings) -> None:
        self.clock = clock
        self.limits = limits
        self.closed = False
        self.bytes = 0
        self.topics: dict[str, TopicInfo] = {}
        self.partitions: dict[Partition, PartitionLog] = {}
        self.heads = np.zeros(0, np.int64)
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.cursors: dict[Shard, Cursor] = {}
        self.parked: dict[tuple[str, str, int, int], Parked] = {}
        self.leases: dict[str, Lease] = {}
        self.scheduled: dict[str, Scheduled] = {}
        self.revision = 0
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            self.check_open()
        except StoreClosed:
            self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check_open(self) -> None:
        """Raise `StoreClosed` once the store is closed."""
        if self.closed:
            raise StoreClosed("this store is closed: open it anew with open_store('memory:')")

    def partition(self, partition: Partition) -> PartitionLog:
        """Return a partition, or say what is gone."""
        found = self.partitions.get(partition)
        if found is None:
            if partition.log_id in self.topics:
                raise UsageError(f"log {partition.log_id} has no partition {partition.number}")
            raise TopicDeleted(partition.log_id)
        return found

    def check_fence(self, fence: Fence | None) -> None:
        """Refuse a write for a lease that has a newer epoch, or none."""
        if fence is None:
            return
        current = self.leases.get(fence.lease)
        if current is None or current.epoch != fence.epoch:
            raise Fenced(f"epoch {fence.epoch} of lease {fence.lease!r} is stale: nothing was written")

    def check_rows(self, held: int, added: int, what: str) -> None:
        """Refuse rows beyond the limit."""
        if added and held + added > self.limits.rows_max:
            raise StoreFull(
                f"{held:,} {what} rows and {added:,} more exceed memory.rows_max = {self.limits.rows_max:,}"
            )

    def forget_subscription(self, log_id: str, name: str) -> None:
        """Remove a subscription with its cursors and parked rows."""
        self.revision += 1
        del self.subscriptions[log_id, name]
        for shard in [shard for shard in self.cursors if shard[:2] == (log_id, name)]:
            del self.cursors[shard]
        for key in [key for key in self.parked if key[:2] == (log_id, name)]:
            del self.parked[key]
