"""Reading: a lake by offset range, and lake and log as one.

What is in both is read from the log. What is below the log's beginning comes from the lake. What is in neither is a
`Gap`, never passed over in silence. The result of a range never changes, wherever it comes from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from penstock.errors import IntegrityError, Trimmed
from penstock.lake.entries import LakeFile
from penstock.lake.files import FileReader
from penstock.offsets import Gap, Range

if TYPE_CHECKING:
    from penstock.batch import Batch
    from penstock.lake.lake import Lake
    from penstock.rows import Partition

NEITHER: Final = "neither in the log nor in the archive"

KEPT_GROUPS: Final = 2
"""So many row groups stay unpacked: whoever reads on needs the same one again."""

LOOKS_MAX: Final = 3
"""A file that is not there has been merged with others meanwhile; so often the manifest is looked at anew."""


class Readable(Protocol):
    """What of a log is needed to read it; `penstock.ports.Log` says what each method promises."""

    def bounds(self, partition: Partition) -> Range:
        """Return the offsets that can be read now."""

    def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        """Read from an offset on."""

    def find_time(self, partition: Partition, time_us: int) -> int:
        """Return where to begin reading so as to miss nothing appended at or after this time."""


class LakeReader:
    """Reads events of a lake. Not thread-safe."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._groups: OrderedDict[tuple[str, int], list[Batch]] = OrderedDict()

    def beginning(self, partition: Partition) -> int | None:
        """Return the first offset that the lake answers for; None if it knows nothing of this partition."""
        return self._lake.manifest().beginning(partition)

    def read(
        self, partition: Partition, start: int, stop: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        """Read from `start` on, as a log does, but nothing from `stop` on; empty only if there is nothing between."""
        if start >= stop:
            return []
        lost = ""
        for _ in range(LOOKS_MAX):
            entry = self._entry(partition, start, stop)
            if isinstance(entry, Gap):
                return [entry]
            try:
                batches = self._group(entry, start)
            except FileNotFoundError as error:
                lost = str(error)
            else:
                return _fitting(batches, Range(start, stop), bytes_max, events_max)
        raise IntegrityError(f"the lake has lost a file: {lost}")

    def _entry(self, partition: Partition, start: int, stop: int) -> LakeFile | Gap:
        """Return the file that has an offset, or the gap from there on."""
        entries = self._lake.manifest().entries(partition)
        following = bisect_right(entries, start, key=lambda entry: entry.start)
        found = entries[following - 1] if following else None
        if found is not None and start < found.stop:
            return found if isinstance(found, LakeFile) else Gap(start, min(found.stop, stop), found.reason)
        end = entries[following].start if following < len(entries) else stop
        return Gap(start, min(end, stop), NEITHER)

    def _group(self, file: LakeFile, offset: int) -> list[Batch]:
        for (name, _), batches in self._groups.items():
            if name == file.name and batches[0].start <= offset < batches[-1].range.stop:
                return batches
        with FileReader(file, self._lake.path(file)) as reader:
            number = reader.group_of(offset)
            batches = self._groups[file.name, number] = reader.batches(number)
        while len(self._groups) > KEPT_GROUPS:
            self._groups.popitem(last=False)
        return batches

    def find_time(self, partition: Partition, time_us: int) -> int | None:
        """Return the offset of the first event appended at this time or later; None if the lake has none."""
        for entry in self._lake.manifest().entries(partition):
            if isinstance(entry, LakeFile) and entry.last_us >= time_us:
                with FileReader(entry, self._lake.path(entry)) as reader:
                    return entry.start + int((reader.append_times() >= time_us).argmax())
        return None


def _fitting(batches: list[Batch], wanted: Range, bytes_max: int, events_max: int | None) -> list[Batch | Gap]:
    """Return as much of these as fits, one event at least."""
    found: list[Batch | Gap] = []
    events_left = len(wanted) if events_max is None else min(events_max, len(wanted))
    bytes_left = bytes_max
    for batch in batches:
        part = batch.slice(wanted)
        if not len(part):
            continue
        sizes = np.cumsum(part.sizes)
        count = min(int(np.searchsorted(sizes, bytes_left, side="right")), events_left, len(part))
        count = max(count, 0 if found else 1)
        if count:
            found.append(part.slice(Range(part.start, part.start + count)))
        if count < len(part):
            break
        bytes_left -= int(sizes[-1])
        events_left -= count
    return found


class ArchivedLog:
    """A log and its archive as one log, for reading. Not thread-safe."""

    def __init__(self, log: Readable, lake: Lake) -> None:
        self._log = log
        self._lake = LakeReader(lake)

    def bounds(self, partition: Partition) -> Range:
        """Return the offsets that can be read now, gaps included: the lake's beginning to the log's end."""
        held = self._log.bounds(partition)
        beginning = self._lake.beginning(partition)
        return held if beginning is None else Range(min(beginning, held.start), held.stop)

    def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        """Read from an offset on; below the log's beginning from the lake, where what is missing is a gap."""
        try:
            return self._log.read(partition, start, bytes_max=bytes_max, events_max=events_max)
        except Trimmed as error:
            first = error.first
        return self._lake.read(partition, start, first, bytes_max=bytes_max, events_max=events_max)

    def find_time(self, partition: Partition, time_us: int) -> int:
        """Return where to begin reading so as to miss nothing appended at or after this time."""
        held = self._log.bounds(partition)
        archived = self._lake.find_time(partition, time_us)
        if archived is not None and archived < held.start:
            return archived
        return self._log.find_time(partition, time_us)
