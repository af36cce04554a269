"""What the file store tells of its medium, as metrics: how long syncs take, how much room is left, what is ill."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.metrics import Reading
from penstock.stores.file.log import FAULTS

if TYPE_CHECKING:
    from penstock.rows import StoreState
    from penstock.stores.file.log import FileLog


def measure(state: StoreState, log: FileLog) -> list[Reading]:
    """Return the readings of a store that does like this."""
    ill = Counter({kind.name.lower(): 0 for kind in FAULTS})
    ill.update(fault.kind for fault in state.faults)
    return [
        Reading("disk_free_bytes", state.free_bytes),
        Reading("disk_size_bytes", state.total_bytes),
        Reading("fsync_duration_seconds", log.sync_times.read()),
        *(Reading("store_damaged_partitions", count, (kind,)) for kind, count in sorted(ill.items())),
    ]
