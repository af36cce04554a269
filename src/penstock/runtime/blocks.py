"""Blocks: what a read brought, as the engine sees it (columns of lanes, sizes, expiries) and as a consumer gets it.

The engine is given one chunk for all batches of a read that follow each other, so that a log of small blocks costs as
little to decide about as one of large ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.batch import NEVER, Batch, Place, StoredEvent
from penstock.columns import PARTITION_SEED, SLOT_SEED, SLOTS, hashes_of, places_of, slot_of_key
from penstock.engine.messages import About, Chunk, FetchedRow, Found
from penstock.engine.pages import find_lanes
from penstock.offsets import Gap, Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from penstock.engine.division import Division
    from penstock.engine.messages import Wanted
    from penstock.events import Event
    from penstock.ports import Log
    from penstock.rows import Parked, Partition, TopicInfo


DIVIDED_MIN: Final = 512
"""Of fewer events each is looked at by itself, which is faster than to divide them."""
SPLITS_MAX: Final = 8
"""A read is not divided into more chunks than are around so many events."""


class Blocks:
    """Batches of one partition, by offset: the source of a chunk, and of a parked row."""

    __slots__ = ("_batches", "_list", "_start", "_starts")

    def __init__(self, start: int, batches: Sequence[Batch]) -> None:
        self._start = start
        self._batches = batches
        self._list = [batch.start for batch in batches]
        self._starts = np.array(self._list, np.int64)

    def narrowed(self, rows: npt.NDArray[np.int64]) -> Blocks:
        """Return blocks of these rows alone, with memory of their own."""
        return Blocks(self._start, [self._single(offset) for offset in (rows + self._start).tolist()])

    def _single(self, offset: int) -> Batch:
        return _copied(self._slice(offset))

    def _slice(self, offset: int) -> Batch:
        return self._batches[bisect_right(self._list, offset) - 1].slice(Range(offset, offset + 1))

    def about(self, row: int) -> About:
        """Return the key of one event, and its slot."""
        one = self._slice(self._start + row)
        key = one.keys[0].as_py()
        return About(key, slot_of_key(key, one.place.partition if one.place else 0))

    def batches(self, rows: slice | npt.NDArray[np.int64]) -> list[Batch]:
        """Return the events of these rows, as batches and selections of batches."""
        # Only those that hold some are looked at: a read of small blocks brings thousands, handed over one by one.
        if isinstance(rows, slice):
            span = Range(self._start + rows.start, self._start + rows.stop)
            # Not by numpy, which would let go of the interpreter, and wait to have it again.
            first = max(bisect_right(self._list, span.start) - 1, 0)
            last = bisect_left(self._list, span.stop)
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
        if len(self._batches) == 1:
            [batch] = self._batches
            first = self._start - batch.start
            each = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
            return [StoredEvent(batch, first + row) for row in each]
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


def _copied(one: Batch) -> Batch:
    """Return a batch of one event with memory of its own: a slice keeps its whole block alive."""
    return Batch(one.columns.take([0]), start=one.start, place=one.place, runs=one.runs)


def read_items(
    log: Log,
    partition: Partition,
    start: int,
    events_max: int,
    bytes_max: int,
    *,
    slotted: bool = False,
    laned: bool = False,
    division: Division | None = None,
    wanted: Wanted | None = None,
) -> tuple[Chunk | Gap, ...]:
    """Read, and return chunks and gaps in their order; called in a thread.

    If slots (and then sizes, unless it is divided) or lanes are going to be asked for, they are found out here, where
    others go on meanwhile; and so is whose each event is, and which are of the lanes that are wanted.
    """
    divide = partial(
        _chunks, partition=partition.number, slotted=slotted, laned=laned, division=division, wanted=wanted
    )  # fmt: skip
    items: list[Chunk | Gap] = []
    batches: list[Batch] = []
    for item in log.read(partition, start, bytes_max=bytes_max, events_max=events_max):
        if batches and (isinstance(item, Gap) or item.start != batches[-1].range.stop):
            items += divide(batches)
            batches = []
        if isinstance(item, Gap):
            items.append(item)
        elif len(item):
            batches.append(item)
    if batches:
        items += divide(batches)
    return tuple(items)


def _chunks(batches: list[Batch], *, wanted: Wanted | None, **how: Any) -> Iterator[Chunk]:
    """Yield batches that follow each other as chunks: one, or several around the events of keys that are wanted.

    These are going to be parked, and whatever is left stays whole, which is handled much faster.
    """
    if wanted is None or wanted.keys is None:
        yield _chunk(batches, wanted=wanted, **how)
        return
    lane_of = {
        offset: lane
        for key, lane in zip(wanted.keys, wanted.lanes.tolist(), strict=True)
        for batch in batches
        for offset in (places_of(batch.keys, key) + batch.start).tolist()
    }
    if not 0 < len(lane_of) <= SPLITS_MAX:
        yield _chunk(batches, found=_found(wanted, batches[0].start, lane_of), **how)
        return
    start, stop = batches[0].start, batches[-1].range.stop
    for offset, lane in [*sorted(lane_of.items()), (stop, 0)]:
        if start < offset:
            yield _chunk(_cut(batches, start, offset), found=_found(wanted, start, {}), **how)
        if offset < stop:
            # A copy: it is kept until it is written, and must not keep its whole block.
            [one] = _cut(batches, offset, offset + 1)
            yield _chunk([_copied(one)], found=_found(wanted, offset, {offset: lane}), **how)
        start = offset + 1


def _found(wanted: Wanted, start: int, lane_of: Mapping[int, int]) -> Found:
    """Return which rows of a chunk that starts here are wanted, given the lane of each by its offset."""
    offsets = sorted(lane_of)
    rows = np.array(offsets, np.int64) - start
    return Found(wanted, rows, np.array([lane_of[offset] for offset in offsets], np.int64))


def _cut(batches: list[Batch], start: int, stop: int) -> list[Batch]:
    span = Range(start, stop)
    return [batch.slice(span) for batch in batches if batch.range.overlaps(span)]


def _chunk(
    batches: list[Batch],
    *,
    partition: int,
    slotted: bool,
    laned: bool,
    division: Division | None,
    wanted: Wanted | None = None,
    found: Found | None = None,
) -> Chunk:
    start, stop = batches[0].start, batches[-1].range.stop
    expiries = None
    if any(batch.has("expires_at") for batch in batches):
        expiries = np.concatenate([batch.expiries for batch in batches])
        if not (expiries != NEVER).any():
            expiries = None
    counts = [len(batch) for batch in batches]
    keyed = any(batch.has("key") for batch in batches)
    keyless = partition % SLOTS
    slots = _slots(batches, keyless) if slotted and keyed else None
    divided = None
    if division is not None and slots is not None and len(slots) >= DIVIDED_MIN:
        divided = division.divide(start, slots)
        _expect(batches, slots, division)
    sizes = _sizes(batches) if slotted and keyed and divided is None else None
    lanes = lanes_of(batches, partition) if laned and keyed and found is None else None
    if lanes is not None and wanted is not None:
        found = find_lanes(lanes, wanted)
    source = Blocks(start, batches)
    appended = np.array([batch.place.appended_at if batch.place else 0 for batch in batches], np.int64)
    return Chunk(
        Range(start, stop),
        nbytes=sum(batch.total_size for batch in batches),
        sizes=partial(_sizes, batches) if sizes is None else lambda: sizes,
        lanes=(partial(lanes_of, batches, partition) if lanes is None else lambda: lanes) if keyed else None,
        slots=(partial(_slots, batches, keyless) if slots is None else lambda: slots) if keyed else None,
        expiries=expiries,
        appended_at=np.repeat(appended, counts),
        source=source,
        divided=divided,
        found=found,
        about=source.about,
    )


def _expect(batches: Sequence[Batch], slots: npt.NDArray[np.int64], division: Division) -> None:
    """Let batches know which of their events anybody here will look at, if these are few."""
    if 2 * np.count_nonzero(division.own) > SLOTS:
        return
    own = division.own.take(slots)
    start = 0
    for batch in batches:
        batch.expect(np.flatnonzero(own[start : start + len(batch)]))
        start += len(batch)


def _sizes(batches: Sequence[Batch]) -> npt.NDArray[np.int64]:
    return np.concatenate([batch.sizes for batch in batches])


def lanes_of(batches: Sequence[Batch], keyless: int) -> npt.NDArray[np.int64]:
    """Return the lane of each event; `keyless` is that of events without a key."""
    hashes, present = hashes_of([batch.keys for batch in batches], PARTITION_SEED)
    lanes = hashes.view(np.int64)
    return lanes if present is None else np.where(present, lanes, keyless)


def _slots(batches: Sequence[Batch], keyless: int) -> npt.NDArray[np.int64]:
    """Return the slot of each event; `keyless` is that of events without a key."""
    hashes, present = hashes_of([batch.keys for batch in batches], SLOT_SEED)
    slots = (hashes & np.uint64(SLOTS - 1)).view(np.int64)
    return slots if present is None else np.where(present, slots, keyless)


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
