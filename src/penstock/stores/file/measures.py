"""What the file store tells of its medium: how long syncs take, how much room is left, which partitions are ill.

Looking costs one small read for each partition, and takes no lock.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.metrics import Reading
from penstock.stores.file.tail import State

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.stores.file.log import FileLog
    from penstock.stores.file.platform import Platform

ILL: Final = {State.DAMAGED: "damaged", State.POISONED: "poisoned"}


def measure(marker: Path, platform: Platform, log: FileLog) -> list[Reading]:
    """Return the readings of a store; `marker` is any file of it."""
    descriptor = platform.disk.open(marker, write=False)
    try:
        free, size = platform.disk.free(descriptor)
    finally:
        platform.disk.close(descriptor)
    ill: Counter[str] = Counter(dict.fromkeys(ILL.values(), 0))
    for entry in log.topic_directory.entries():
        for number in range(entry.topic.settings.partitions):
            tail = log.tails.read(entry.slot + number)
            if tail is not None and tail.state in ILL:
                ill[ILL[tail.state]] += 1
    return [
        Reading("disk_free_bytes", free),
        Reading("disk_size_bytes", size),
        Reading("fsync_duration_seconds", log.sync_times.read()),
        *(Reading("store_damaged_partitions", count, (reason,)) for reason, count in ill.items()),
    ]
