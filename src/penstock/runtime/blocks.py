"""Blocks: what a read brought, as the engine sees it (columns of lanes, sizes, expiries) and as a consumer gets it.

The engine is given one chunk for all batches of a read that follow each other, so that a log of small blocks costs as
little to decide about as one of large ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from penstock.batch import NEVER, Batch, Place, StoredEvent
from penstock.columns import PARTITION_SEED, SLOTS, hashes_of, places_of, slot_of_key
from penstock.engine.messages import About, Chunk, FetchedRow, Found
from penstock.engine.page import find_lanes
from penstock.offsets import Gap, Range
from penstock.runtime.hashed import SLOTS_OF_BLOCKS

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
EXPECTED_ONE_IN: Final = 8
"""Unless one of so many at most is looked at, all are converted, which is faster than to choose."""
SPLITS_MAX: Final = 8
"""A read is not divided into more chunks than are around so many events."""

_NONE: Final = np.zeros(0, np.int64)


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
        batch = self._batches[bisect_right(self._list, offset) - 1]
        return batch if len(batch) == 1 else batch.slice(Range(offset, offset + 1))

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
        each = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        found: list[StoredEvent] = []
        at = 0
        while at < len(each):
            # Batch by batch, and not by numpy, which would let go of the interpreter, and wait to have it again.
            place = bisect_right(self._list, self._start + each[at]) - 1
            batch = self._batches[place]
            first = self._start - batch.start
            end = len(each)
            if place + 1 < len(self._list):
                end = bisect_left(each, self._list[place + 1] - self._start, at)
            found += [StoredEvent(batch, first + row) for row in each[at:end]]
            at = end
        return found

    def event(self, row: int) -> Event:
        """Return one event, as it is kept aside."""
        [event] = self.events(slice(row, row + 1))
        return event.to_event()


def _copied(one: Batch) -> Batch:
    """Return a batch of one event with memory of its own: a slice keeps its whole block alive."""
    # To join columns copies them, even a single one; `take` says the same in twice the time.
    columns = [pa.concat_arrays([column]) for column in one.columns.columns]
    alone = pa.RecordBatch.from_arrays(columns, schema=one.columns.schema)
    return Batch(alone, start=one.start, place=one.place, runs=one.runs)


def read_items(
    log: Log,
    partition: Partition,
    start: int,
    events_max: int,
    bytes_max: int,
    *,
    own_max: int | None = None,
    slotted: bool = False,
    laned: bool = False,
    division: Division | None = None,
    wanted: Wanted | None = None,
) -> tuple[Chunk | Gap, ...]:
    """Read, and return chunks and gaps in their order; called in a thread.

    If slots (and then sizes, unless it is divided) or lanes are going to be asked for, they are found out here, where
    others go on meanwhile; and so is whose each event is, and which are of the lanes that are wanted. It ends before
    there would be more than `own_max` events of the slots that are divided.
    """
    divide = partial(_chunks, partition=partition, laned=laned, division=division, wanted=wanted)
    left = events_max if own_max is None or division is None else own_max
    items: list[Chunk | Gap] = []
    for run in _runs(log.read(partition, start, bytes_max=bytes_max, events_max=events_max)):
        if isinstance(run, Gap):
            items.append(run)
            continue
        keyless = partition.number % SLOTS
        slots = SLOTS_OF_BLOCKS.of(partition, run) if slotted and _keyed(run) else None
        if division is not None and left < events_max:
            own = _own(run, slots, division, keyless)
            if len(own) > left:
                if stop := int(own[left]):
                    begin = run[0].start
                    # At the end of a block, if there is one: what is read of it in two parts is hashed by everybody.
                    ends = [batch.range.stop - begin for batch in run]
                    stop = max((end for end in ends if end <= stop), default=stop)
                    items += divide(_cut(run, begin, begin + stop), None if slots is None else slots[:stop])
                break
            left -= len(own)
            _expect(run, own)
        items += divide(run, slots)
    return tuple(items)


def _runs(items: Iterable[Batch | Gap]) -> Iterator[list[Batch] | Gap]:
    """Yield gaps, and together what follows each other without one."""
    batches: list[Batch] = []
    for item in items:
        if batches and (isinstance(item, Gap) or item.start != batches[-1].range.stop):
            yield batches
            batches = []
        if isinstance(item, Gap):
            yield item
        elif len(item):
            batches.append(item)
    if batches:
        yield batches


def _own(
    batches: Sequence[Batch], slots: npt.NDArray[np.int64] | None, division: Division, keyless: int
) -> npt.NDArray[np.int64]:
    """Return the rows of those that are anybody's here."""
    if slots is not None:
        return np.flatnonzero(division.own.take(slots))
    return np.arange(sum(map(len, batches)) if division.own[keyless] else 0)


def _expect(batches: Sequence[Batch], own: npt.NDArray[np.int64]) -> None:
    """Let batches know which of their events anybody here will look at, if these are few."""
    starts = [batch.start - batches[0].start for batch in batches]
    for batch, start, mine in zip(batches, starts, np.split(own, np.searchsorted(own, starts[1:])), strict=True):
        if EXPECTED_ONE_IN * len(mine) <= len(batch):
            batch.expect(mine - start)


def _chunks(
    batches: list[Batch], slots: npt.NDArray[np.int64] | None, *, wanted: Wanted | None, **how: Any
) -> Iterator[Chunk]:
    """Yield batches that follow each other as chunks: one, or several around the events of keys that are wanted.

    These are going to be parked, and whatever is left stays whole, which is handled much faster.
    """
    if wanted is None or wanted.keys is None:
        yield _chunk(batches, slots, wanted=wanted, **how)
        return
    lane_of = {
        batch.start + row: lane
        for key, lane in zip(wanted.keys, wanted.lanes.tolist(), strict=True)
        for batch in batches
        for row in places_of(batch.keys, key).tolist()
    }
    if not 0 < len(lane_of) <= SPLITS_MAX:
        yield _chunk(batches, slots, found=_found(wanted, batches[0].start, lane_of), **how)
        return
    first, stop = batches[0].start, batches[-1].range.stop

    def slots_of(start: int, stop: int) -> npt.NDArray[np.int64] | None:
        return None if slots is None else slots[start - first : stop - first]

    start = first
    for offset, lane in [*sorted(lane_of.items()), (stop, 0)]:
        if start < offset:
            between = _cut(batches, start, offset)
            yield _chunk(between, slots_of(start, offset), found=_found(wanted, start, {}), **how)
        if offset < stop:
            # A copy: it is kept until it is written, and must not keep its whole block.
            [one] = _cut(batches, offset, offset + 1)
            alone = slots_of(offset, offset + 1)
            alone = None if alone is None else alone.copy()
            yield _chunk([_copied(one)], alone, found=_found(wanted, offset, {offset: lane}), **how)
        start = offset + 1


def _found(wanted: Wanted, start: int, lane_of: Mapping[int, int]) -> Found:
    """Return which rows of a chunk that starts here are wanted, given the lane of each by its offset."""
    if not lane_of:
        return Found(wanted, _NONE, _NONE)
    offsets = sorted(lane_of)
    rows = np.array(offsets, np.int64) - start
    return Found(wanted, rows, np.array([lane_of[offset] for offset in offsets], np.int64))


def _cut(batches: list[Batch], start: int, stop: int) -> list[Batch]:
    span = Range(start, stop)
    return [batch.slice(span) for batch in batches if batch.range.overlaps(span)]


def _keyed(batches: Sequence[Batch]) -> bool:
    return any(batch.has("key") for batch in batches)


def _chunk(
    batches: list[Batch],
    slots: npt.NDArray[np.int64] | None,
    *,
    partition: Partition,
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
    keyed = _keyed(batches)
    divided = None
    if division is not None and slots is not None and len(slots) >= DIVIDED_MIN:
        divided = division.divide(start, slots)
    sizes = _sizes(batches) if slots is not None and divided is None else None
    lanes = lanes_of(batches, partition.number) if laned and keyed and found is None else None
    if lanes is not None and wanted is not None:
        found = find_lanes(lanes, wanted)
    source = Blocks(start, batches)
    appended = np.array([batch.place.appended_at if batch.place else 0 for batch in batches], np.int64)
    return Chunk(
        Range(start, stop),
        nbytes=sum(batch.total_size for batch in batches),
        sizes=partial(_sizes, batches) if sizes is None else lambda: sizes,
        lanes=(partial(lanes_of, batches, partition.number) if lanes is None else lambda: lanes) if keyed else None,
        slots=(partial(SLOTS_OF_BLOCKS.of, partition, batches) if slots is None else lambda: slots) if keyed else None,
        expiries=expiries,
        appended_at=np.repeat(appended, counts),
        source=source,
        divided=divided,
        found=found,
        about=source.about,
    )


def _sizes(batches: Sequence[Batch]) -> npt.NDArray[np.int64]:
    return np.concatenate([batch.sizes for batch in batches])


def lanes_of(batches: Sequence[Batch], keyless: int) -> npt.NDArray[np.int64]:
    """Return the lane of each event; `keyless` is that of events without a key."""
    hashes, present = hashes_of([batch.keys for batch in batches], PARTITION_SEED)
    lanes = hashes.view(np.int64)
    return lanes if present is None else np.where(present, lanes, keyless)


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
