"""Segments: the files of a partition, one after the other; and how to find something in them.

A segment is named `<base offset>-<epoch>.seg`. Its first block is of kind SEGMENT and says everything that is needed
to understand the file alone: whose it is, the topic's name and settings, what came before it, and which sequences of
which producers are stored before it. It is synced, and its name in the directory, before any event goes in.

The **index** of a segment has an entry per 64 KiB: an offset, its byte position, and the latest append time before it.
It is kept in memory, written beside a segment when that is sealed, and disposable: whatever is missing is found anew
by walking over the headers.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import google_crc32c
import msgspec
import numpy as np
import pyarrow as pa

from penstock.deduplication import ProducerTable
from penstock.errors import NewerFormat
from penstock.rows import TopicInfo
from penstock.stores.file.block import (
    FRONT_BYTES,
    Broken,
    Header,
    Kind,
    Segment,
    aligned,
    check_content,
    content_crc,
    decode_runs,
    encode_front,
    parse_header,
    parse_prefix,
    seed_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.producers import Run
    from penstock.stores.file.platform import Disk

INDEX_BYTES: Final = 64 << 10
SCAN_BYTES: Final = 256 << 10
HEADERS_BYTES: Final = 16 << 10
"""Read at once when only headers are wanted: many small blocks, or of a large one not much more than its header."""
_INDEX_MAGIC: Final = b"PIDX0001"
_NAME = re.compile(r"(\d{20})-(\d{10})\.seg")


class SegmentName(NamedTuple):
    """What a segment is called: where it begins, and in which epoch of writers it was made."""

    base: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.base:020}-{self.epoch:010}.seg"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a file's name; None if it is no segment's."""
        found = _NAME.fullmatch(name)
        return cls(int(found[1]), int(found[2])) if found else None


class Predecessor(msgspec.Struct, frozen=True):
    """The sealed segment before this one."""

    base: int
    epoch: int
    length: int
    end_offset: int
    end_number: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment says of itself; the body of its first block begins with this, as JSON."""

    salt: str
    topic: TopicInfo
    slot: int
    """Of the partition in the tails."""
    partition: int
    max_time: int
    """The latest append time before this segment."""
    predecessor: Predecessor | None = None


_read_facts = msgspec.json.Decoder(Facts).decode  # built here: two threads must not build one type's at once


def segment_names(disk: Disk, directory: Path) -> list[SegmentName]:
    """Return the segments in a partition's directory, by base and epoch."""
    return sorted(name for text in disk.names(directory) if (name := SegmentName.parse(text)))


# --- the first block --------------------------------------------------------------------------


def encode_first_block(facts: Facts, name: SegmentName, number: int, now: int, producers: ProducerTable) -> bytes:
    """Return the SEGMENT block of a new file."""
    told = msgspec.json.encode(facts)
    body = len(told).to_bytes(4, "little") + told + producers.to_bytes()
    segment = Segment(bytes.fromhex(facts.topic.log_id), facts.partition, name.base, 0)
    header = Header(
        kind=Kind.SEGMENT,
        position=0,
        number=number,
        epoch=name.epoch,
        offset=name.base,
        span=0,
        first_time=now,
        last_time=now,
        durable_number=number,
        durable_offset=name.base,
        mask=0,
        run_count=0,
        runs_length=0,
        body_length=len(body),
        content_crc=content_crc(b"", body),
    )
    return encode_front(segment, header) + body.ljust(aligned(len(body)), b"\0")


class SegmentFile:
    """An open segment. Reading takes no lock; several threads may read at once."""

    def __init__(self, disk: Disk, path: Path, name: SegmentName, *, write: bool = False) -> None:
        """Open the file and read its first block; `Broken` or `Blank` if that is not whole."""
        self.disk = disk
        self.path = path
        self.name = name
        self.descriptor = -1
        self.descriptor = disk.open(path, write=write)
        self.index = Index()
        self.event_bytes = 1 << 10
        """About how long an event is in this file, as far as it was read."""
        self.inode = disk.inode(self.descriptor)
        self._read_first_block()

    def _read_first_block(self) -> None:
        front = self.disk.read(self.descriptor, FRONT_BYTES, 0)
        prefix = parse_prefix(front, 0, 0)
        if prefix.version == 1 and prefix.kind != Kind.SEGMENT:
            raise Broken("the file does not begin with a segment's block")
        claimed = Segment(front[64:80], int.from_bytes(front[80:84], "little"), self.name.base, 0)
        try:
            self.first = parse_header(front, claimed, 0)
        except NewerFormat as error:
            raise NewerFormat(f"{self.path}: {error}") from None
        body = self.disk.read(self.descriptor, self.first.body_length, FRONT_BYTES)
        check_content(self.first, body)
        told = int.from_bytes(body[:4], "little")
        try:
            self.facts = _read_facts(body[4 : 4 + told])
            salt = bytes.fromhex(self.facts.salt)
        except ValueError as error:  # what msgspec raises, text that is no UTF-8, and a salt that is no number
            raise Broken(f"the segment's facts cannot be read: {error}") from None
        self._producers = body[4 + told :]
        self.segment = claimed._replace(seed=seed_of(salt))
        if claimed.log_id.hex() != self.facts.topic.log_id or self.first.epoch != self.name.epoch:
            raise Broken("the segment was written under another name")

    def __del__(self) -> None:
        # With the last reference, because another thread may be reading when somebody else has done with it.
        if self.descriptor >= 0:
            self.disk.close(self.descriptor)

    def __repr__(self) -> str:
        return f"<SegmentFile {self.path}>"

    def producers(self) -> ProducerTable:
        """Return the producers as they were when the segment began."""
        return ProducerTable.from_bytes(self._producers)

    def size(self) -> int:
        """Return the length of the file."""
        return self.disk.size(self.descriptor)

    # --- walking --------------------------------------------------------------------------------

    def headers(self, position: int, stop: int) -> Iterator[tuple[Header, tuple[Run, ...]]]:
        """Yield the blocks from a position on, with their runs; contents are not looked at.

        Raises `Blank` or `Broken` where there is none, and `NewerFormat`.
        """
        data, begin = b"", position
        while position < stop:
            if position + FRONT_BYTES > begin + len(data):
                wanted = min(max(stop - position, FRONT_BYTES), HEADERS_BYTES)
                data, begin = self.disk.read(self.descriptor, wanted, position), position
            at = position - begin
            header = parse_header(data[at : at + FRONT_BYTES], self.segment, position)
            runs: tuple[Run, ...] = ()
            if header.run_count:
                content = data[at + FRONT_BYTES : at + FRONT_BYTES + header.runs_length]
                if len(content) < header.runs_length:
                    content = self.disk.read(self.descriptor, header.runs_length, header.content_position)
                if len(content) < header.runs_length:
                    raise Broken("the block is cut off")
                runs = decode_runs(content, header.run_count)
            yield header, runs
            position = header.end_position

    def read_content(self, header: Header) -> pa.Buffer:
        """Read the runs and the body of a block, and check them; `Broken` if they are damaged."""
        buffer = pa.allocate_buffer(max(header.content_length, 1))
        found = self.disk.read_into(self.descriptor, buffer, header.content_position)
        content = buffer.slice(0, min(found, header.content_length))
        check_content(header, content)
        return content

    # --- the index ------------------------------------------------------------------------------

    def save_index(self, path: Path) -> None:
        """Write the index beside the sealed segment, if that can be done; nothing depends on it."""
        temporary = path.with_suffix(f".{id(self):x}")
        with suppress(OSError):
            descriptor = self.disk.open(temporary, create=True)
            try:
                self.disk.write(descriptor, self.index.to_bytes(), 0)
            finally:
                self.disk.close(descriptor)
            self.disk.rename(temporary, path)

    def load_index(self, path: Path) -> None:
        """Take the index that was written beside the segment, if it is there and whole."""
        try:
            descriptor = self.disk.open(path, write=False)
        except OSError:
            return
        try:
            loaded = Index.from_bytes(self.disk.read(descriptor, self.disk.size(descriptor), 0))
        finally:
            self.disk.close(descriptor)
        if loaded is not None:
            self.index = loaded


class Index:
    """Where in a segment offsets and times are found."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.offsets: list[int] = []
        self.positions: list[int] = []
        self.times: list[int] = []
        """The latest append time before each entry."""
        self.position = 0
        """Up to where the segment was looked at."""
        self.end = 0
        """The offset after the last block that was looked at."""
        self.max_time = 0
        self.is_damaged = False

    def begin(self, first: Header, max_time: int) -> None:
        """Start behind the first block."""
        self.position, self.end, self.max_time = first.end_position, first.offset, max_time

    def add(self, header: Header, *, damaged: bool = False) -> None:
        """Take in the next block; one behind damage gets an entry of its own, so that it is found across it."""
        if damaged or not self.positions or header.position - self.positions[-1] >= INDEX_BYTES:
            self.times.append(self.max_time)
            self.offsets.append(header.offset)
            self.positions.append(header.position)
        self.is_damaged = self.is_damaged or damaged
        self.position, self.end = header.end_position, header.end_offset
        if header.kind == Kind.DATA:
            self.max_time = max(self.max_time, header.last_time)

    def find_offset(self, offset: int) -> int | None:
        """Return a position at or before the block of an offset; None if only the segment's beginning is before it."""
        found = bisect_right(self.offsets, offset) - 1
        return self.positions[found] if found >= 0 else None

    def find_time(self, time_us: int) -> int | None:
        """Return a position at or before the first block whose running maximum reaches a time."""
        found = bisect_left(self.times, time_us) - 1
        return self.positions[max(found, 0)] if self.positions else None

    def to_bytes(self) -> bytes:
        """Return the index as a file."""
        head = np.array([self.position, self.end, self.max_time, len(self.positions)], np.int64).tobytes()
        data = head + np.array([self.offsets, self.positions, self.times], np.int64).tobytes()
        return _INDEX_MAGIC + int(google_crc32c.value(data)).to_bytes(8, "little") + data

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Read what `to_bytes` wrote; None for anything else."""
        body = data[16:]
        if data[:8] != _INDEX_MAGIC or len(body) < 32 or len(body) % 8:
            return None
        if google_crc32c.value(body) != int.from_bytes(data[8:16], "little"):
            return None
        numbers = np.frombuffer(body, np.int64)
        index = cls()
        index.position, index.end, index.max_time, count = numbers[:4].tolist()
        if len(numbers) != 4 + 3 * count:
            return None
        index.offsets, index.positions, index.times = numbers[4:].reshape(3, count).tolist()
        return index


def is_blank_from(file: SegmentFile, position: int, stop: int) -> bool:
    """Say whether there are only zeros from a position on."""
    while position < stop:
        data = file.disk.read(file.descriptor, min(SCAN_BYTES, stop - position), position)
        if data.count(0) != len(data):
            return False
        if not data:
            return True
        position += len(data)
    return True
