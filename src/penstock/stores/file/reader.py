"""Reading a partition: from an offset or a time to batches, through whichever segments hold them.

Nothing here takes a lock or waits for a writer. A caller says up to which offset the log may be read (the tail record
knows), and everything below that is immutable; so the result of a range never changes. Reading is by `pread` into
memory of its own, never by mapping a file: a file that is cut under a mapping kills the process.

Damaged bytes raise `Corruption` exactly where they are. Everything before them is returned first, and everything behind
them can be read by asking for it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from penstock.batch import Batch, Place
from penstock.errors import Corruption, InvalidBatch
from penstock.offsets import Gap, Range
from penstock.stores.file.block import (
    FRONT_BYTES,
    Blank,
    Broken,
    Header,
    Kind,
    body_of,
    check_content,
    decode_runs,
    parse_header,
)
from penstock.stores.file.scan import CORRUPT, FOREIGN, MISSING, Damage, later_blocks
from penstock.stores.file.segment import SegmentFile, SegmentName, segment_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.rows import TopicInfo
    from penstock.stores.file.platform import Disk
    from penstock.stores.file.tail import Tail

CHUNK_BYTES_MIN: Final = 64 << 10
CHUNK_BYTES_MAX: Final = 4 << 20
OPEN_SEGMENTS_MAX: Final = 32
HINTS_MAX: Final = 256


class PartitionReader:
    """The segments of one partition, as readers see them. Safe for several threads."""

    def __init__(self, disk: Disk, directory: Path, topic: TopicInfo, number: int) -> None:
        self._disk = disk
        self._directory = directory
        self._whose = (topic.log_id, number)
        self.where = f"{topic.name}/{number}"
        self._place = Place(
            topic=topic.name,
            partition=number,
            appended_at=0,
            source=topic.settings.source or f"penstock:{topic.name}",
            content_type=topic.settings.content_type,
        )
        self._lock = threading.Lock()
        self._names: list[SegmentName] = []
        self._seen: tuple[int, ...] = ()
        self._files: OrderedDict[SegmentName, SegmentFile] = OrderedDict()
        # Where the next read will probably begin: offset → (segment, position).
        self._hints: OrderedDict[int, tuple[SegmentName, int]] = OrderedDict()

    # --- segments -------------------------------------------------------------------------------

    def refresh(self, tail: Tail) -> None:
        """Look at the directory anew if the tail tells of another segment, or of a repair."""
        seen = (tail.epoch, tail.segment_base, tail.segment_epoch, tail.first, tail.inode)
        if seen != self._seen:
            with self._lock:
                self._list(tail)
                self._seen = seen

    def forget(self) -> None:
        """Give up everything that is open or remembered."""
        with self._lock:
            self._names, self._seen = [], ()
            self._files.clear()
            self._hints.clear()

    def _list(self, tail: Tail) -> None:
        # One beyond the active segment is being made. Of two with one base the higher epoch has superseded the other.
        active = SegmentName(tail.segment_base, tail.segment_epoch)
        found = segment_names(self._disk, self._directory)
        latest = {name.base: name for name in found if name <= active or not tail.inode}
        self._names = sorted(latest.values())
        for gone in self._files.keys() - set(self._names):
            del self._files[gone]
        self._hints.clear()

    def file(self, name: SegmentName) -> SegmentFile:
        """Return an open segment."""
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                return file
        path = self._directory / str(name)
        try:
            file = SegmentFile(self._disk, path, name)
        except (Blank, Broken) as error:
            raise Damage(CORRUPT, str(path), 0, 0, name.base, None, str(error) or "the file is empty").error() from None
        if (file.facts.topic.log_id, file.facts.partition) != self._whose:
            detail = f"it belongs to {file.facts.topic.name}/{file.facts.partition}, log {file.facts.topic.log_id}"
            raise Damage(FOREIGN, str(path), 0, 0, name.base, None, detail).error()
        file.load_index(path.with_suffix(".idx"))
        with self._lock:
            self._files[name] = file
            if len(self._files) > OPEN_SEGMENTS_MAX:
                self._files.popitem(last=False)
        return file

    def _segment_of(self, offset: int) -> tuple[SegmentName, int | None]:
        """Return the segment that holds an offset, and where the next one begins."""
        names = self._names
        found = bisect_right(names, offset, key=lambda name: name.base) - 1
        if found < 0:
            stop = names[0].base if names else None
            raise Damage(MISSING, str(self._directory), 0, 0, offset, stop, "the segment is not there").error()
        return names[found], names[found + 1].base if found + 1 < len(names) else None

    # --- events ---------------------------------------------------------------------------------

    def read(self, start: int, end: int, bytes_max: int, events_max: int | None) -> list[Batch | Gap]:
        """Return what is in the log from `start` on, below `end`, as `Log.read` promises."""
        found: list[Batch | Gap] = []
        budget = _Budget(bytes_max, end - start if events_max is None else events_max)
        while start < end and not budget.is_spent():
            name, following = self._segment_of(start)
            stop = end if following is None else min(end, following)
            try:
                for item in self._read_segment(name, start, stop, budget):
                    found.append(item)
                    start = item.range.stop
            except _DamageFound as damaged:
                if found:
                    return found  # whoever reads on from here is told
                raise damaged.damage.error() from None
        return found

    def _read_segment(self, name: SegmentName, start: int, stop: int, budget: _Budget) -> Iterator[Batch | Gap]:
        try:
            file = self.file(name)
        except Corruption as error:
            raise _DamageFound(Damage(error.kind, error.file, 0, 0, start, stop, error.detail)) from None
        position = self._locate(file, start, stop)
        while start < stop and not budget.is_spent():
            events = min(budget.events_left, stop - start)
            wanted = CHUNK_BYTES_MIN + min(max(budget.bytes_left, 0), events * file.event_bytes, CHUNK_BYTES_MAX)
            for header, content in self._blocks(file, position, start, stop, wanted):
                position = header.end_position
                if header.end_offset <= start:
                    continue  # a marker, or before what is wanted
                item = self._item(file, header, content)
                # What comes next is probably alike; without this a limit of events would read far too much.
                file.event_bytes = (header.end_position - header.position) // max(header.span, 1) + 1
                part = budget.fitting(item, Range(max(start, header.offset), min(stop, header.end_offset)))
                if part is None:
                    return
                start = part.range.stop
                self._remember(start, name, header.position if start < header.end_offset else position)
                yield part
                if budget.is_spent() or start >= stop:
                    return

    def _blocks(
        self, file: SegmentFile, position: int, start: int, stop: int, wanted: int
    ) -> Iterator[tuple[Header, pa.Buffer]]:
        """Yield the whole blocks of one chunk; at least one."""
        buffer = pa.allocate_buffer(wanted)
        length = self._disk.read_into(file.descriptor, buffer, position)
        here, end, reached = position, position + length, start
        while True:
            at = here - position
            front = buffer.slice(at, min(FRONT_BYTES, length - at)).to_pybytes()
            try:
                header = parse_header(front, file.segment, here)
                if header.content_position + header.content_length <= end:
                    content = buffer.slice(at + FRONT_BYTES, header.content_length)
                    if header.end_offset > start:
                        check_content(header, content)
                elif here > position:
                    return
                else:
                    content = file.read_content(header)
            except (Blank, Broken) as error:
                damage = self._damage(file, here, reached, stop, error)
                if damage.stop == reached < stop:  # a marker, or what is before; nothing that is wanted stood there
                    yield from self._blocks(file, damage.end_byte, reached, stop, wanted)
                    return
                raise _DamageFound(damage) from None
            if header.offset > reached:
                raise _DamageFound(_jump(file, header, reached))
            yield header, content
            here, reached = header.end_position, max(reached, header.end_offset)
            if here + FRONT_BYTES > end:
                return

    def _item(self, file: SegmentFile, header: Header, content: pa.Buffer) -> Batch | Gap:
        if header.kind == Kind.DATA:
            runs = decode_runs(content.slice(0, header.runs_length).to_pybytes(), header.run_count)
            place = self._place._replace(appended_at=header.last_time)
            try:
                body = body_of(header, content)
                batch = Batch.from_bytes(body, header.mask, start=header.offset, place=place, runs=runs)
            except (Broken, InvalidBatch) as error:
                raise _DamageFound(_block_damage(file, header, str(error))) from None
            if len(batch) != header.span:
                raise _DamageFound(_block_damage(file, header, "the number of events is another"))
            return batch
        return Gap(header.offset, header.end_offset, content.to_pybytes().decode("utf-8", "replace"))

    def _damage(self, file: SegmentFile, position: int, start: int, stop: int, why: Exception) -> Damage:
        following = next(later_blocks(file, position, file.size(), 0), None)
        detail = str(why) or "there are zeros where a block should be"
        return Damage(
            kind=CORRUPT,
            file=str(file.path),
            byte=position,
            end_byte=following.position if following else file.size(),
            start=start,
            stop=max(start, min(following.offset, stop)) if following else stop,
            detail=detail,
        )

    # --- finding --------------------------------------------------------------------------------

    def _remember(self, offset: int, name: SegmentName, position: int) -> None:
        with self._lock:
            self._hints[offset] = (name, position)
            if len(self._hints) > HINTS_MAX:
                self._hints.popitem(last=False)

    def _locate(self, file: SegmentFile, offset: int, stop: int) -> int:
        """Return the position of a block at or shortly before an offset."""
        hint = self._hints.get(offset)
        if hint is not None and hint[0] == file.name:
            return hint[1]
        self._extend_index(file, offset, stop)
        position = file.index.find_offset(offset)
        if position is None:
            position = file.first.end_position
        # Within 64 KiB of it; walk over the headers to the block itself, across damage that is before it.
        while True:
            try:
                for header, _ in file.headers(position, file.index.position):
                    if header.end_offset > offset:
                        return header.position
                    position = header.end_position
            except (Blank, Broken):
                following = next(later_blocks(file, position, file.size(), 0), None)
                if following is not None and following.offset <= offset:
                    position = following.position
                    continue
            return position  # if there is damage, whoever reads here finds out what is wrong

    def _extend_index(self, file: SegmentFile, offset: int, stop: int) -> None:
        """Walk over the headers until the index covers an offset; one that covers a sealed segment is kept."""
        index = file.index
        with index.lock:
            if not index.position:
                index.begin(file.first, file.facts.max_time)
            if index.end > offset:
                return
            while index.end <= offset < stop:
                try:
                    for header, _ in file.headers(index.position, file.size()):
                        index.add(header)
                        if index.end > offset:
                            break
                    else:
                        return
                except (Blank, Broken):
                    following = next(later_blocks(file, index.position, file.size(), 0), None)
                    if following is None:
                        return
                    index.add(following, damaged=True)
            if file.name != self._names[-1] and index.end == stop and not index.is_damaged:
                file.save_index(file.path.with_suffix(".idx"))

    def find_time(self, time_us: int, first: int, end: int) -> int:
        """Return the first offset whose running maximum of append times reaches a time, or `end`."""
        names = self._names
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if self.file(names[middle]).facts.max_time < time_us:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return first
        name = names[low - 1]
        stop = names[low].base if low < len(names) else end
        file = self.file(name)
        self._extend_index(file, stop - 1, stop)
        position = file.index.find_time(time_us)
        if position is not None:
            try:
                for header, _ in file.headers(position, file.index.position):
                    if header.kind == Kind.DATA and header.last_time >= time_us:
                        return max(first, min(header.offset, end))
                    position = header.end_position
            except (Blank, Broken) as error:
                damage = self._damage(file, position, name.base, stop, error)
                raise damage.error() from None
        return max(first, min(stop, end))


class _DamageFound(Exception):
    def __init__(self, damage: Damage) -> None:
        super().__init__(damage)
        self.damage = damage


def _jump(file: SegmentFile, header: Header, expected: int) -> Damage:
    detail = f"a block of offset {header.offset} stands where offset {expected} should be"
    return Damage(CORRUPT, str(file.path), header.position, header.position, expected, header.offset, detail)


def _block_damage(file: SegmentFile, header: Header, detail: str) -> Damage:
    return Damage(
        CORRUPT, str(file.path), header.position, header.end_position, header.offset, header.end_offset, detail
    )


class _Budget:
    """How much a read may still return; the first event always fits.

    What events take is counted only when it matters: their buffers take more, and are quickly asked.
    """

    def __init__(self, bytes_max: int, events_max: int) -> None:
        self._bytes_left = bytes_max
        self.events_left = events_max
        self._uncounted: list[Batch] = []
        self._uncounted_at_most = 0
        self._spent = False
        self._begun = False

    @property
    def bytes_left(self) -> int:
        """At least so many bytes are left."""
        return self._bytes_left - self._uncounted_at_most

    def is_spent(self) -> bool:
        """Say whether nothing more fits."""
        return self._spent

    def fitting(self, item: Batch | Gap, wanted: Range) -> Batch | Gap | None:
        """Return as much of an item as fits, or None."""
        least = 0 if self._begun else 1
        if isinstance(item, Gap):
            self._begun = True
            return Gap(wanted.start, wanted.stop, item.reason)
        part = item.slice(wanted)
        count = len(part)
        if count > self.events_left:
            count = max(self.events_left, least)
            part = part.slice(Range(part.start, part.start + count))
        at_most = part.columns.get_total_buffer_size()
        if at_most < self.bytes_left:
            self._uncounted.append(part)
            self._uncounted_at_most += at_most
        else:
            self._count_all()
            total = part.total_size
            if total > self._bytes_left:
                fits = int(np.searchsorted(np.cumsum(part.sizes), self._bytes_left, side="right"))
                count = max(min(fits, count), least)
                part = part.slice(Range(part.start, part.start + count))
                self._spent = True
            self._bytes_left -= total
        self.events_left -= count
        self._spent = self._spent or self.bytes_left <= 0 or self.events_left <= 0
        self._begun = True
        return part if count else None

    def _count_all(self) -> None:
        self._bytes_left -= sum(part.total_size for part in self._uncounted)
        self._uncounted, self._uncounted_at_most = [], 0
