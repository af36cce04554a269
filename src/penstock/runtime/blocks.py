"""Blocks: what a read brought, as the engine sees it (columns of lanes, sizes, expiries) and as a consumer gets it.

The engine is given one chunk for all batches of a read that follow each other, so that a log of small blocks costs as
little to decide about as one of large ones.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.batch import NEVER, Batch, Place, StoredEvent
from penstock.columns import PARTITION_SEED
from penstock.engine.messages import Chunk, FetchedRow
from penstock.offsets import Gap, Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from penstock.events import Event
    from penstock.ports import Log
    from penstock.rows import Parked, Partition, TopicInfo


class Blocks:
    """Batches of one partition, by offset: the source of a chunk, and of a parked row."""

    __slots__ = ("_batches", "_start", "_starts")

    def __init__(self, start: int, batches: Sequence[Batch]) -> None:
        self._start = start
        self._batches = batches
        self._starts = np.array([batch.start for batch in batches], np.int64)

    def narrowed(self, rows: npt.NDArray[np.int64]) -> Blocks:
        """Return blocks of these rows alone, with memory of their own."""
        return Blocks(self._start, [self._single(offset) for offset in (rows + self._start).tolist()])

    def _single(self, offset: int) -> Batch:
        batch = self._batches[int(np.searchsorted(self._starts, offset, side="right")) - 1]
        one = batch.slice(Range(offset, offset + 1))
        # A slice keeps the whole block alive; what is taken is a copy.
        return Batch(one.columns.take([0]), start=offset, place=one.place, runs=one.runs)

    def batches(self, rows: slice | npt.NDArray[np.int64]) -> list[Batch]:
        """Return the events of these rows, as batches and selections of batches."""
        # Only those that hold some are looked at: a read of small blocks brings thousands, handed over one by one.
        if isinstance(rows, slice):
            span = Range(self._start + rows.start, self._start + rows.stop)
            first = max(int(np.searchsorted(self._starts, span.start, side="right")) - 1, 0)
            last = int(np.searchsorted(self._starts, span.stop))
            parts = [batch.slice(span) for batch in self._batches[first:last] if batch.range.overlaps(span)]
            return [part for part in parts if len(part)]
        offsets = rows + self._start
        if len(self._batches) == 1:
            [batch] = self._batches
            return [batch if len(rows) == len(batch) else batch.select(offsets)]
        if len(offsets) >= len(self._batches):
            places: Iterable[int] = range(len(self._batches))
        else:
            places = np.unique(np.searchsorted(self._starts, offsets, side="right") - 1).tolist()
        found = []
        for place in places:
            batch = self._batches[place]
            low, high = np.searchsorted(offsets, (batch.start, batch.range.stop)).tolist()
            if low < high:
                found.append(batch if high - low == len(batch) else batch.select(offsets[low:high]))
        return found

    def events(self, rows: slice | npt.NDArray[np.int64]) -> list[StoredEvent]:
        """Return the events of these rows one by one, as views of their blocks, whose columns are converted once."""
        indexes = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        offsets = indexes + self._start
        places = np.searchsorted(self._starts, offsets, side="right") - 1
        within = offsets - self._starts[places]
        batches = self._batches
        return [StoredEvent(batches[place], row) for place, row in zip(places.tolist(), within.tolist(), strict=True)]

    def event(self, row: int) -> Event:
        """Return one event, as it is kept aside."""
        [event] = self.events(slice(row, row + 1))
        return event.to_event()


def read_items(
    log: Log,
    partition: Partition,
    start: int,
    events_max: int,
    bytes_max: int,
    *,
    slotted: bool = False,
    laned: bool = False,
) -> tuple[Chunk | Gap, ...]:
    """Read, and return chunks and gaps in their order; called in a thread.

    If slots (and then sizes) or lanes are going to be asked for they are found out here, where others go on meanwhile.
    """
    chunk = partial(_chunk, partition=partition.number, slotted=slotted, laned=laned)
    items: list[Chunk | Gap] = []
    batches: list[Batch] = []
    for item in log.read(partition, start, bytes_max=bytes_max, events_max=events_max):
        if batches and (isinstance(item, Gap) or item.start != batches[-1].range.stop):
            items.append(chunk(batches))
            batches = []
        if isinstance(item, Gap):
            items.append(item)
        elif len(item):
            batches.append(item)
    if batches:
        items.append(chunk(batches))
    return tuple(items)


def _chunk(batches: list[Batch], *, partition: int, slotted: bool, laned: bool) -> Chunk:
    start, stop = batches[0].start, batches[-1].range.stop
    expiries = None
    if any(batch.has("expires_at") for batch in batches):
        expiries = np.concatenate([batch.expiries for batch in batches])
        if not (expiries != NEVER).any():
            expiries = None
    counts = [len(batch) for batch in batches]
    keyed = any(batch.has("key") for batch in batches)
    slots = _slots(batches) if slotted and keyed else None
    sizes = _sizes(batches) if slotted and keyed else None
    lanes = lanes_of(batches, partition) if laned and keyed else None
    appended = np.array([batch.place.appended_at if batch.place else 0 for batch in batches], np.int64)
    return Chunk(
        Range(start, stop),
        nbytes=sum(batch.total_size for batch in batches),
        sizes=partial(_sizes, batches) if sizes is None else lambda: sizes,
        lanes=(partial(lanes_of, batches, partition) if lanes is None else lambda: lanes) if keyed else None,
        slots=(partial(_slots, batches) if slots is None else lambda: slots) if keyed else None,
        expiries=expiries,
        appended_at=np.repeat(appended, counts),
        source=Blocks(start, batches),
    )


def _sizes(batches: Sequence[Batch]) -> npt.NDArray[np.int64]:
    return np.concatenate([batch.sizes for batch in batches])


def lanes_of(batches: Sequence[Batch], keyless: int) -> npt.NDArray[np.int64]:
    """Return the lane of each event; `keyless` is that of events without a key."""
    found = []
    for batch in batches:
        hashes, present = batch.key_hashes(PARTITION_SEED)
        lanes = hashes.view(np.int64)
        found.append(lanes if present is None else np.where(present, lanes, keyless))
    return np.concatenate(found)


def _slots(batches: Sequence[Batch]) -> npt.NDArray[np.int64]:
    return np.concatenate([batch.slots() for batch in batches]).astype(np.int64)


def fetched_row(row: Parked, topic: TopicInfo) -> FetchedRow:
    """Return a parked row as the engine sees it: its event as a batch of one, at its own offset."""
    place = Place(
        topic=topic.name,
        partition=row.shard.partition,
        appended_at=row.parked_at,
        source=topic.settings.source or f"penstock:{topic.name}",
        content_type=topic.settings.content_type,
    )
    batch = Batch.from_events([row.event]).at(row.offset, place, ())
    expiry = int(batch.expiries[0])
    return FetchedRow(row.offset, batch.total_size, None if expiry == NEVER else expiry, ParkedBlocks(row, batch))


class ParkedBlocks(Blocks):
    """The event of a parked row, and the row as it was fetched."""

    __slots__ = ("row",)

    def __init__(self, row: Parked, batch: Batch) -> None:
        super().__init__(batch.start, [batch])
        self.row = row
