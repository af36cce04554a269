"""Reading: what a topic holds now, partition by partition, without a subscription; and with its archive if asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

from penstock.clock import datetime_to_us
from penstock.errors import Trimmed, UsageError
from penstock.joining import before
from penstock.offsets import Range
from penstock.rows import Partition

if TYPE_CHECKING:
    from penstock.batch import Batch
    from penstock.lake.reading import LakeReader
    from penstock.offsets import Gap
    from penstock.ports import Backend
    from penstock.rows import TopicInfo

READ_BYTES: Final = 1 << 20
READ_EVENTS: Final = 5_000


class Archived:
    """A backend and a lake as one, for reading: what is below a log's beginning comes from the lake.

    What `penstock.lake.reading.ArchivedLog` is for a store, this is for an event loop; files are read in threads.
    """

    def __init__(self, backend: Backend, lake: LakeReader) -> None:
        self._backend = backend
        self._lake = lake

    async def bounds(self, partition: Partition) -> Range:
        """Return the offsets that can be read now, gaps included."""
        held = await self._backend.bounds(partition)
        beginning = await asyncio.to_thread(self._lake.beginning, partition)
        return held if beginning is None else Range(min(beginning, held.start), held.stop)

    async def find_time(self, partition: Partition, time_us: int) -> int:
        """Return where to begin reading so as to miss nothing appended at or after this time."""
        held = await self._backend.bounds(partition)
        archived = await asyncio.to_thread(self._lake.find_time, partition, time_us)
        if archived is not None and archived < held.start:
            return archived
        return await self._backend.find_time(partition, time_us)

    async def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        """Read from an offset on."""
        try:
            return await self._backend.read(partition, start, bytes_max=bytes_max, events_max=events_max)
        except Trimmed as error:
            first = error.first
        read = partial(self._lake.read, partition, start, first, bytes_max=bytes_max, events_max=events_max)
        return await asyncio.to_thread(read)


def with_archive(backend: Backend, where: str | PathLike[str] | None) -> Backend | Archived:
    """Return what to read from, for someone who names the directory of a lake, or none."""
    if where is None:
        return backend
    from penstock.lake.lake import Lake
    from penstock.lake.reading import LakeReader

    return Archived(backend, LakeReader(Lake(fspath(where))))


async def read_topic(
    backend: Backend | Archived, info: TopicInfo, partition: int | None, start: int | datetime | None, stop: int | None
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
    backend: Backend | Archived, partition: Partition, start: int | datetime | None, stop: int | None
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
        for item in before(items, end) if wanted > 0 else items:
            yield item
            offset = item.range.stop
