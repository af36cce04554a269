"""`verify`: whether a lake is whole, and whether it is what the log says, event for event.

Every file is read, and its content compared with the digest in the manifest; where the log still has the same offsets,
its digest is compared with the log's, too. Only if the two differ are events compared one by one, to say which. Ranges
may not overlap, and what is between two of them must still be in the log, which is where the next archiver finds it.
Nothing is changed, and all of it may be in use meanwhile.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import pyarrow as pa

from penstock.errors import DataLost, IntegrityError, TopicDeleted, Trimmed
from penstock.joining import before, groups
from penstock.lake.content import CONTENT, Content
from penstock.lake.entries import LakeFile
from penstock.lake.files import READ_BYTES, READ_EVENTS, FileReader
from penstock.offsets import Gap, Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.lake.entries import Entry, Manifest
    from penstock.lake.lake import Lake
    from penstock.lake.reading import Readable
    from penstock.rows import Partition

MISSING, DAMAGED, DIFFERENT, OVERLAP, HOLE = "missing", "damaged", "different", "overlap", "hole"
"""What may be wrong: a file is gone, or not what was written; the log says otherwise; two files have the same offsets;
offsets are in neither."""

DIFFERENCES_SHOWN: Final = 10


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong."""

    kind: str
    topic: str
    partition: int
    start: int
    stop: int
    file: str
    """Its path below the lake's directory, if it is about one."""
    detail: str


class LogReport(msgspec.Struct, kw_only=True):
    """What was found of one partition of one log."""

    topic: str
    log_id: str
    partition: int
    start: int
    end: int
    files: int = 0
    events: int = 0
    gaps: int = 0
    compared: int = 0
    """Events that the log has, too, and that were compared with it."""
    waiting: int = 0
    """Offsets between files that the log still has: they are archived next."""
    problems: list[Problem] = msgspec.field(default_factory=list)


class Report(msgspec.Struct, kw_only=True):
    """What was found."""

    directory: str
    version: int
    partitions: list[LogReport]

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong."""
        return [problem for partition in self.partitions for problem in partition.problems]


def verify(
    lake: Lake,
    log: Readable | None,
    topics: Collection[str] | None = None,
    progress: Callable[[int, int | None], None] = lambda _done, _total: None,
) -> Report:
    """Look at all of a lake, or at some topics; without a log at the lake alone."""
    manifest, version = lake.manifest(), lake.version
    wanted = [file for file in manifest.files if topics is None or file.topic in topics]
    total, done = sum(file.size for file in wanted), 0
    report = Report(directory=str(lake.directory), version=version, partitions=[])
    for partition, entries in sorted(manifest.by_partition.items(), key=lambda each: (each[1][0].topic, each[0])):
        if topics is not None and entries[0].topic not in topics:
            continue
        found = LogReport(
            topic=entries[0].topic,
            log_id=partition.log_id,
            partition=partition.number,
            start=entries[0].start,
            end=entries[-1].stop,
        )
        report.partitions.append(found)
        bounds = _bounds(log, partition)
        _check_ranges(manifest, partition, entries, bounds, found)
        for entry in entries:
            if isinstance(entry, LakeFile):
                _check_file(lake, log, entry, bounds, found)
                done += entry.size
                progress(done, total)
            else:
                found.gaps += len(entry.range)
    return report


def _bounds(log: Readable | None, partition: Partition) -> Range:
    """Return what the log has of a partition; nothing if it is gone."""
    if log is None:
        return Range(0, 0)
    try:
        return log.bounds(partition)
    except TopicDeleted:
        return Range(0, 0)


# --- ranges -------------------------------------------------------------------------------------


def _check_ranges(
    manifest: Manifest, partition: Partition, entries: list[Entry], bounds: Range, found: LogReport
) -> None:
    reached = entries[0].stop
    for _, entry in pairwise(entries):
        if entry.start < reached:
            stop = min(reached, entry.stop)
            found.problems.append(_problem(OVERLAP, entry, Range(entry.start, stop), "two entries have these offsets"))
        reached = max(reached, entry.stop)
    in_log = RangeSet([bounds])
    for hole in manifest.archived(partition).missing(Range(found.start, reached)):
        gone = in_log.missing(hole)
        found.waiting += len(hole) - len(gone)
        for span in gone:
            detail = "in no file, and not in the log either"
            found.problems.append(_problem(HOLE, entries[0], span, detail, named=False))


def _problem(kind: str, entry: Entry, span: Range, detail: str, *, named: bool = True) -> Problem:
    return Problem(
        kind=kind,
        topic=entry.topic,
        partition=entry.partition,
        start=span.start,
        stop=span.stop,
        file=entry.path if named and isinstance(entry, LakeFile) else "",
        detail=detail,
    )


# --- content ------------------------------------------------------------------------------------


def _check_file(lake: Lake, log: Readable | None, file: LakeFile, bounds: Range, found: LogReport) -> None:
    found.files += 1
    found.events += len(file.range)
    common = file.range.intersection(bounds)
    whole, part = Content(), Content()
    try:
        with FileReader(file, lake.path(file)) as reader:
            for rows in _rows_of(reader):
                whole.update(rows)
                if common and common != file.range:
                    part.update(_cut(rows, common))
    except FileNotFoundError as error:
        found.problems.append(_problem(MISSING, file, file.range, str(error)))
        return
    except IntegrityError as error:
        found.problems.append(_problem(DAMAGED, file, file.range, str(error)))
        return
    if whole.digest() != file.digest:
        found.problems.append(_problem(DAMAGED, file, file.range, "its content is not what was archived"))
    if log is None or not common:
        return
    try:
        content = Content()
        for rows in _log_rows(log, file, common):
            content.update(rows)
        mine = whole if common == file.range else part
        if content.digest() != mine.digest():
            found.problems += _differences(lake, log, file, common)
        found.compared += len(common)
    except (Trimmed, TopicDeleted):
        return  # at this very moment
    except DataLost as error:
        found.problems.append(_problem(DIFFERENT, file, common, str(error)))


def _rows_of(reader: FileReader) -> Iterator[pa.RecordBatch]:
    return (reader.rows(number) for number in range(reader.row_groups))


def _cut(rows: pa.RecordBatch, wanted: Range) -> pa.RecordBatch:
    """Return the rows whose offsets are wanted; they are dense."""
    if not rows.num_rows:
        return rows
    start = rows.column("offset")[0].as_py()
    part = Range(start, start + rows.num_rows).intersection(wanted)
    return rows.slice(part.start - start if part else 0, len(part))


def _log_rows(log: Readable, file: LakeFile, wanted: Range) -> Iterator[pa.RecordBatch]:
    start = wanted.start
    while start < wanted.stop:
        count = min(wanted.stop - start, READ_EVENTS)
        found = before(log.read(file.place, start, bytes_max=READ_BYTES, events_max=count), wanted.stop)
        for item in groups(found, READ_EVENTS):
            if isinstance(item, Gap):
                raise DataLost(f"the log has lost the offsets {item.range}, which are archived: {item.reason}")
            yield item.rows(("partition", "offset", *CONTENT))
        start = found[-1].range.stop


def _differences(lake: Lake, log: Readable, file: LakeFile, common: Range) -> list[Problem]:
    """Return which events differ, as ranges."""
    different = RangeSet()
    with FileReader(file, lake.path(file)) as reader:
        for number in range(reader.row_groups):
            ours = _cut(reader.rows(number), common)
            if not ours.num_rows:
                continue
            start = ours.column("offset")[0].as_py()
            theirs = pa.Table.from_batches(_log_rows(log, file, Range(start, start + ours.num_rows)))
            for offset in _differing(ours, theirs.combine_chunks().to_batches()[0]):
                different.add(Range(start + offset, start + offset + 1))
    spans = list(different)
    if not spans:
        return [_problem(DIFFERENT, file, common, "it was different a moment ago")]
    found = [_problem(DIFFERENT, file, span, "the log has other events here") for span in spans[:DIFFERENCES_SHOWN]]
    if len(spans) > DIFFERENCES_SHOWN:
        rest = Range(spans[DIFFERENCES_SHOWN].start, spans[-1].stop)
        found.append(_problem(DIFFERENT, file, rest, f"{len(spans) - DIFFERENCES_SHOWN:,} more ranges differ here"))
    return found


def _differing(ours: pa.RecordBatch, theirs: pa.RecordBatch) -> Iterator[int]:
    # One by one, but only in a row group that is known to differ.
    for row in range(ours.num_rows):
        if any(not ours.column(name).slice(row, 1).equals(theirs.column(name).slice(row, 1)) for name in CONTENT):
            yield row
