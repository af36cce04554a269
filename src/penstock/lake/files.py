"""Files of a lake: written from a log or from other files, and read by offset range.

**Written** under a name that nobody looks for, synced, and then given their own, hidden one: what has the name of a
lake's file is whole. A file has row groups of some megabytes; as offsets are dense, which row group has an offset
follows from their lengths, and a read of a few events unpacks one of them. Pages have checksums, so that damage is
found where it is.

**What is read is checked** like bytes from anywhere: the types, every length and text, and that each offset is there.
"""

from __future__ import annotations

import os
import secrets
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import columns as cols
from penstock.batch import Batch, Place
from penstock.errors import IntegrityError, InvalidBatch
from penstock.joining import Joined, before, groups
from penstock.lake.content import FILE_SCHEMA, Content
from penstock.lake.entries import DAY_US, LakeFile, LakeGap
from penstock.offsets import Gap, Range
from penstock.rows import Partition
from penstock.versions import sync_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from penstock.lake.plan import Aim, Piece
    from penstock.ports import Log

R = TypeVar("R")

READ_BYTES: Final = 32 << 20
READ_EVENTS: Final = 100_000
"""How much is asked of the log at a time."""

GROUP_BYTES: Final = 16 << 20
GROUP_ROWS: Final = 100_000
"""A row group is written as soon as it has so many bytes of events, or so many of them."""

WRITING: Final = ".writing"
"""How the name of a file ends that is not whole yet."""

_ALIKE: Final = ["partition", "source", "type", "subject", "appended_at", "key", "content_type"]
"""Columns whose values repeat, so that a dictionary of them pays."""

_SOUGHT: Final = ["offset", "type", "subject", "time", "appended_at", "key"]
"""Columns of which the least and the greatest value are kept for each row group, for whoever filters by them."""


class Written(NamedTuple):
    """What a task has written."""

    files: list[LakeFile]
    gaps: list[LakeGap]
    damage: str = ""
    """What of the log, or of a file, cannot be read, and why; empty if nothing."""


class Topical(NamedTuple):
    """What all files of a partition have in common."""

    topic: str
    log_id: str
    partition: int
    source: str
    content_type: str

    def schema(self) -> pa.Schema:
        """Return the schema of a file, which says what the topic's defaults were."""
        said = {"log": self.log_id, "source": self.source, "content_type": self.content_type}
        return FILE_SCHEMA.with_metadata({f"penstock.{name}": value for name, value in said.items()})


# --- writing ------------------------------------------------------------------------------------


class FileWriter:
    """One file on its way."""

    def __init__(self, directory: Path, whose: Topical, start: int) -> None:
        self._directory = directory
        self._whose = whose
        self._start = self._stop = start
        self._token = secrets.token_hex(8)
        self._path = directory / f"{self._token}{WRITING}"
        self._content = Content()
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = self._held_rows = 0
        self._first_us, self._last_us = np.iinfo(np.int64).max, np.iinfo(np.int64).min
        self.event_bytes = 0
        os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._writer = pq.ParquetWriter(
            str(self._path),
            whose.schema(),
            compression="zstd",
            use_dictionary=_ALIKE,
            column_encoding={"offset": "DELTA_BINARY_PACKED"},
            write_statistics=_SOUGHT,
            write_page_checksum=True,
        )

    def give_up(self) -> None:
        """Remove it, if it has not its name yet."""
        self._writer.close()
        self._path.unlink(missing_ok=True)

    def add(self, rows: pa.RecordBatch, event_bytes: int) -> None:
        """Add the rows that follow, all of one day."""
        if self._held_bytes + event_bytes > 2 * GROUP_BYTES:
            self._flush()
        times = cols.times(rows.column("appended_at"), 0)
        self._first_us = min(self._first_us, int(times.min()))
        self._last_us = max(self._last_us, int(times.max()))
        self._content.update(rows)
        self._held.append(rows)
        self._stop += rows.num_rows
        self._held_rows += rows.num_rows
        self._held_bytes += event_bytes
        self.event_bytes += event_bytes
        if self._held_bytes >= GROUP_BYTES or self._held_rows >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.Table.from_batches(self._held), row_group_size=self._held_rows)
            self._held, self._held_bytes, self._held_rows = [], 0, 0

    def finish(self) -> LakeFile:
        """Make the file whole and lasting, and give it its name."""
        self._flush()
        self._writer.close()
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        whose = self._whose
        file = LakeFile(
            topic=whose.topic,
            log_id=whose.log_id,
            partition=whose.partition,
            start=self._start,
            stop=self._stop,
            token=self._token,
            size=size,
            event_bytes=self.event_bytes,
            first_us=int(self._first_us),
            last_us=int(self._last_us),
            digest=self._content.digest(),
        )
        self._path.rename(self._directory / file.hidden_name)
        return file


class _Cutting:
    """The files of a piece, one after the other: another one for each day, behind each gap, and when one is full."""

    def __init__(self, directory: Path, piece: Piece, aim: Aim) -> None:
        self._directory = directory
        self._piece = piece
        self._full_bytes = aim.file_bytes * 3 // 2
        """A little more than the aim is no reason for a small file behind a large one."""
        self._writer: FileWriter | None = None
        self._day: int | None = None
        self.written = Written([], [])

    def add(self, joined: Joined) -> None:
        """Add the events that follow."""
        days = joined.appended // DAY_US
        edges = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
        rows = joined.rows(FILE_SCHEMA.names)
        for first, last in pairwise(edges):
            part = joined.batch.slice(Range(joined.batch.start + first, joined.batch.start + last))
            if self._writer is not None and (days[first] != self._day or self._writer.event_bytes >= self._full_bytes):
                self.finish()
            if self._writer is None:
                self._writer = FileWriter(self._directory, self._topical(part), part.start)
                self._day = int(days[first])
            self._writer.add(rows.slice(first, last - first), part.total_size)

    def _topical(self, part: Batch) -> Topical:
        assert part.place is not None  # what is read has one
        piece = self._piece
        return Topical(piece.topic, piece.log_id, piece.partition, part.place.source, part.place.content_type)

    def leave_out(self, gap: Gap) -> None:
        """Note a gap."""
        self.finish()
        piece = self._piece
        self.written.gaps.append(LakeGap(piece.topic, piece.log_id, piece.partition, gap.start, gap.stop, gap.reason))

    def finish(self) -> None:
        """End the file that is open."""
        if self._writer is not None:
            self.written.files.append(self._writer.finish())
            self._writer = None

    def give_up(self) -> None:
        """Remove the file that is open; those that are whole are somebody else's to remove."""
        if self._writer is not None:
            self._writer.give_up()


def write_piece(log: Log, directory: Path, piece: Piece, aim: Aim) -> Written:
    """Write a piece of a log into files, as few as can be."""
    cutting = _Cutting(directory, piece, aim)
    try:
        for item in _read(log, piece):
            if isinstance(item, Gap):
                cutting.leave_out(item)
            else:
                cutting.add(item)
        cutting.finish()
    finally:
        cutting.give_up()
    sync_directory(directory)
    return cutting.written


def _read(log: Log, piece: Piece) -> Iterator[Joined | Gap]:
    partition = Partition(piece.log_id, piece.partition)
    start = piece.start
    while start < piece.stop:
        wanted = min(piece.stop - start, READ_EVENTS)
        found = before(log.read(partition, start, bytes_max=READ_BYTES, events_max=wanted), piece.stop)
        if not found:
            raise IntegrityError(
                f"topic {piece.topic!r}, partition {piece.partition}: the log ends at offset {start}, and was to be "
                f"archived up to {piece.stop}"
            )
        yield from groups(found, READ_EVENTS)
        start = found[-1].range.stop


def merge_files(paths: Sequence[tuple[LakeFile, Path]], directory: Path) -> Written:
    """Write the events of files that follow each other into one; `IntegrityError` if one is not what it was."""
    first = paths[0][0]
    with FileReader(*paths[0]) as reader:
        whose = reader.topical
    writer = FileWriter(directory, whose, first.start)
    try:
        for file, path in paths:
            _append(file, path, writer)
        merged = writer.finish()
    finally:
        writer.give_up()
    sync_directory(directory)
    return Written([merged], [])


def _append(file: LakeFile, path: Path, writer: FileWriter) -> None:
    content = Content()
    with FileReader(file, path) as reader:
        left = file.event_bytes
        for number in range(reader.row_groups):
            rows = reader.rows(number)
            content.update(rows)
            # What its events have in all is known; how that divides among row groups does not matter.
            size = left if number == reader.row_groups - 1 else file.event_bytes * rows.num_rows // len(file.range)
            writer.add(rows, size)
            left -= size
    if content.digest() != file.digest:
        raise IntegrityError(f"{path} is damaged: its content is not what was archived")


# --- reading ------------------------------------------------------------------------------------


class FileReader:
    """One file, open, as a context. Everything that is wrong with it is an `IntegrityError` that names it."""

    def __init__(self, file: LakeFile, path: Path) -> None:
        self._file = file
        self._path = path
        self._opened = self._checked(
            lambda: pq.ParquetFile(str(path), pre_buffer=False, memory_map=False, page_checksum_verification=True)
        )
        try:
            self._edges, self.topical = self._checked(self._inspect)
        except IntegrityError:
            self._opened.close()
            raise

    def _inspect(self) -> tuple[npt.NDArray[np.int64], Topical]:
        """Return where row groups begin and end, and what the file says of its topic."""
        file, metadata, schema = self._file, self._opened.metadata, self._opened.schema_arrow
        lengths = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        edges = np.cumsum([file.start, *lengths])
        if edges[-1] != file.stop:
            raise self._damaged(f"it has the events up to {edges[-1]}, not {file.stop}")
        if schema != FILE_SCHEMA:
            raise self._damaged("its columns are not those of events")
        said = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
        if said.get("penstock.log") != file.log_id:
            raise self._damaged("it is a file of another log")
        defaults = (said.get(f"penstock.{name}", "") for name in ("source", "content_type"))
        return edges, Topical(file.topic, file.log_id, file.partition, *defaults)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    @property
    def row_groups(self) -> int:
        """How many row groups it has."""
        return len(self._edges) - 1

    def group_of(self, offset: int) -> int:
        """Return which row group has an offset."""
        return int(np.searchsorted(self._edges, offset, side="right")) - 1

    def rows(self, number: int) -> pa.RecordBatch:
        """Return the rows of a row group."""
        table = self._checked(lambda: self._opened.read_row_group(number, use_threads=False))
        try:
            table.validate(full=True)
            rows = table.combine_chunks().to_batches()
        except pa.ArrowException as error:
            raise self._damaged(str(error)) from None
        start, stop = int(self._edges[number]), int(self._edges[number + 1])
        if len(rows) != 1 or not np.array_equal(rows[0].column("offset").to_numpy(), np.arange(start, stop)):
            raise self._damaged(f"its offsets {start} to {stop - 1} are not all there, in their order")
        if not (rows[0].column("partition").to_numpy() == self._file.partition).all():
            raise self._damaged(f"it has events of another partition than {self._file.partition}")
        batch: pa.RecordBatch = rows[0].replace_schema_metadata(None)
        return batch

    def append_times(self) -> npt.NDArray[np.int64]:
        """Return when each of its events was appended, in microseconds."""
        table = self._checked(lambda: self._opened.read(columns=["appended_at"], use_threads=False))
        return cols.times(table.column(0).combine_chunks(), 0)

    def batches(self, number: int) -> list[Batch]:
        """Return the events of a row group as a log hands them out: together what was appended at the same time."""
        rows = self.rows(number)
        times = cols.times(rows.column("appended_at"), 0)
        edges = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
        columns = rows.select(list(cols.NAMES))
        said, start = self.topical, int(self._edges[number])
        found = []
        try:
            cols.check_rules(columns)
            for first, last in pairwise(edges):
                part = columns.slice(first, last - first)
                place = Place(said.topic, said.partition, int(times[first]), said.source, said.content_type)
                found.append(Batch(_used(part), start=start + first, place=place))
        except InvalidBatch as error:
            raise self._damaged(str(error)) from None
        return found

    def _checked(self, read: Callable[[], R]) -> R:
        try:
            return read()
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:  # names that are no text are a `ValueError`
            raise self._damaged(str(error)) from None

    def _damaged(self, why: str) -> IntegrityError:
        return IntegrityError(f"{self._path} is damaged: {why}")


def _used(columns: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out columns without a value, as a log does."""
    names = [name for name in cols.NAMES if name == "data" or columns.column(name).null_count < columns.num_rows]
    return pa.RecordBatch.from_arrays(
        [columns.column(name) for name in names], schema=cols.schema_of(cols.mask_of(names))
    )


def content_of(rows: Iterable[pa.RecordBatch]) -> bytes:
    """Return the digest of rows."""
    content = Content()
    for each in rows:
        content.update(each)
    return content.digest()
