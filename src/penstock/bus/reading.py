"""Reading: what a topic holds now, partition by partition, without a subscription."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

from penstock.clock import datetime_to_us
from penstock.errors import UsageError
from penstock.rows import Partition

if TYPE_CHECKING:
    from penstock.batch import Batch
    from penstock.offsets import Gap
    from penstock.ports import Backend
    from penstock.rows import TopicInfo

READ_BYTES: Final = 1 << 20
READ_EVENTS: Final = 5_000


async def read_topic(
    backend: Backend, info: TopicInfo, partition: int | None, start: int | datetime | None, stop: int | None
) -> AsyncIterator[Batch | Gap]:
    """Yield what is stored from `start`, an offset or a time, to `stop`; of one partition or of all."""
    name, count = info.name, info.settings.partitions
    if partition is not None and not 0 <= partition < count:
        raise UsageError(f"topic {name!r} has the partitions 0 to {count - 1}, not {partition}")
    if partition is None and count > 1 and (isinstance(start, int) or stop is not None):
        raise UsageError(f"topic {name!r} has {count} partitions: say which `partition` the offset is of")
    for index in range(count) if partition is None else [partition]:
        async for item in _read_partition(backend, Partition(info.log_id, index), start, stop):
            yield item


async def _read_partition(
    backend: Backend, partition: Partition, start: int | datetime | None, stop: int | None
) -> AsyncIterator[Batch | Gap]:
    bounds = await backend.bounds(partition)
    if isinstance(start, datetime):
        offset = await backend.find_time(partition, datetime_to_us(start))
    else:
        offset = bounds.start if start is None else start
    end = bounds.stop if stop is None else min(stop, bounds.stop)
    while True:
        wanted = min(end - offset, READ_EVENTS)
        if wanted <= 0 and offset <= bounds.stop:
            return
        # Beyond the end the store is still asked: it says what is wrong with the offset.
        items = await backend.read(partition, offset, bytes_max=READ_BYTES, events_max=max(wanted, 1))
        for item in items:
            yield item
            offset = item.range.stop
