"""The manifest of a lake: which files and gaps it has. Plain values, and their bytes; no I/O.

The bytes are rewritten with every version, so they are columns, compressed: about 50 bytes for a file. A file's path is
not among them, since it follows from the rest; so a damaged manifest can lead nobody out of the lake.
"""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import pyarrow as pa

from penstock.errors import IntegrityError, InvalidName, NewerFormat
from penstock.events import check_name
from penstock.offsets import Range, RangeSet
from penstock.rows import Partition

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT: Final = 1
HIDDEN: Final = ".hidden"
"""How names of files end that globs shall not find; `**/*.parquet` looks below `_lake`, too."""

_MAGIC: Final = b"PENSTOCKLAKE"
_RAW_BYTES_MAX: Final = 1 << 30
DAY_US: Final = 86_400_000_000
"""A day, in microseconds."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ID: Final = re.compile(r"[0-9A-Za-z_]{1,64}")
NAME: Final = re.compile(r"[0-9A-Za-z_]{1,64}-\d+-\d{20}-\d{20}-[0-9A-Za-z_]{1,64}\.parquet")
"""What files of a lake are called; any other name is somebody else's file."""


class LakeFile(NamedTuple):
    """One file of a lake."""

    topic: str
    log_id: str
    partition: int
    start: int
    stop: int
    token: str
    size: int
    """Of the file, in bytes."""
    event_bytes: int
    """Of its events, as the log counts them."""
    first_us: int
    """The earliest time at which one of its events was appended, in microseconds."""
    last_us: int
    """The latest."""
    digest: bytes
    """Of its content: see `penstock.lake.content`."""

    @property
    def place(self) -> Partition:
        """The partition that its events are of."""
        return Partition(self.log_id, self.partition)

    @property
    def range(self) -> Range:
        """The offsets of its events."""
        return Range(self.start, self.stop)

    @property
    def date(self) -> str:
        """The day on which its events were appended, in UTC."""
        return day_of(self.first_us)

    @property
    def name(self) -> str:
        """What it is called. Offsets have twenty digits, so that names sort as events do."""
        return f"{self.log_id}-{self.partition}-{self.start:020d}-{self.stop:020d}-{self.token}.parquet"

    @property
    def hidden_name(self) -> str:
        """What it is called where nobody shall find it, with whatever pattern."""
        return f"{self.name}{HIDDEN}"

    @property
    def path(self) -> str:
        """Where it is, below the lake's directory, once everybody may see it."""
        return f"topic={self.topic}/date={self.date}/{self.name}"


class LakeGap(NamedTuple):
    """Offsets that hold no event, neither in the lake nor in the log, and why."""

    topic: str
    log_id: str
    partition: int
    start: int
    stop: int
    reason: str

    @property
    def place(self) -> Partition:
        """The partition that it is in."""
        return Partition(self.log_id, self.partition)

    @property
    def range(self) -> Range:
        """The offsets that are missing."""
        return Range(self.start, self.stop)


Entry = LakeFile | LakeGap


def day_of(time_us: int) -> str:
    """Return the day of a time, in UTC, as it stands in paths."""
    return (_EPOCH + timedelta(days=time_us // DAY_US)).date().isoformat()


class Manifest:
    """What a lake holds: files and gaps that never overlap. It does not change; `changed` returns another."""

    def __init__(self, lake_id: str, files: Iterable[LakeFile] = (), gaps: Iterable[LakeGap] = ()) -> None:
        self.lake_id = lake_id
        self.files = tuple(sorted(files))
        self.gaps = tuple(sorted(gaps))
        self.all: list[Entry] = [*self.files, *self.gaps]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return (self.lake_id, self.files, self.gaps) == (other.lake_id, other.files, other.gaps)

    __hash__ = None  # type: ignore[assignment]  # it is compared, and nothing else

    @cached_property
    def by_partition(self) -> dict[Partition, list[Entry]]:
        """The entries of each partition, by their offsets."""
        found: dict[Partition, list[Entry]] = defaultdict(list)
        for entry in self.all:
            found[entry.place].append(entry)
        for entries in found.values():
            entries.sort(key=lambda entry: entry.start)
        return dict(found)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all files."""
        return frozenset(file.name for file in self.files)

    def entries(self, partition: Partition) -> list[Entry]:
        """Return the entries of a partition, by their offsets."""
        return self.by_partition.get(partition, [])

    def archived(self, partition: Partition) -> RangeSet:
        """Return the offsets of a partition that the lake answers for."""
        return RangeSet(entry.range for entry in self.entries(partition))

    def beginning(self, partition: Partition) -> int | None:
        """Return the first offset of a partition that the lake answers for; None if it knows nothing of it."""
        entries = self.entries(partition)
        return entries[0].start if entries else None

    def end(self, partition: Partition) -> int | None:
        """Return up to where the lake has everything from its beginning on."""
        beginning = self.beginning(partition)
        return None if beginning is None else self.archived(partition).first_missing(beginning)

    def topics(self) -> dict[str, list[str]]:
        """Return the logs of each topic, by name; more than one if it was deleted and created anew."""
        found: dict[str, list[str]] = {}
        for topic, log_id in sorted({(entry.topic, entry.log_id) for entry in self.all}):
            found.setdefault(topic, []).append(log_id)
        return found

    def changed(self, add: Iterable[Entry], remove: Iterable[LakeFile] = ()) -> Manifest:
        """Return the manifest with some entries more and some files less."""
        gone = frozenset(remove)
        added = tuple(add)
        return Manifest(
            self.lake_id,
            (*(file for file in self.files if file not in gone), *(e for e in added if isinstance(e, LakeFile))),
            (*self.gaps, *(e for e in added if isinstance(e, LakeGap))),
        )

    def fitting(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return those entries of which nothing is in the lake yet."""
        known: dict[Partition, RangeSet] = {}
        found = []
        for entry in sorted(entries, key=lambda entry: (entry.place, entry.start)):
            taken = known.setdefault(entry.place, self.archived(entry.place))
            if len(taken.missing(entry.range)) == len(entry.range):
                taken.add(entry.range)
                found.append(entry)
        return found


# --- bytes --------------------------------------------------------------------------------------


class _Files(msgspec.Struct, array_like=True):
    log: list[int]
    partition: list[int]
    start: list[int]
    length: list[int]
    token: list[str]
    size: list[int]
    event_bytes: list[int]
    first_us: list[int]
    span_us: list[int]
    digest: list[bytes]


class _Gaps(msgspec.Struct, array_like=True):
    log: list[int]
    partition: list[int]
    start: list[int]
    length: list[int]
    reason: list[str]


class _Body(msgspec.Struct):
    lake: str
    logs: list[tuple[str, str]]
    files: _Files
    gaps: _Gaps


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest: magic, format, raw length, and columns as msgpack in zstd."""
    logs = sorted({(entry.topic, entry.log_id) for entry in manifest.all})
    number = {log: index for index, log in enumerate(logs)}
    files = [
        (
            number[file.topic, file.log_id],
            file.partition,
            file.start,
            file.stop - file.start,
            file.token,
            file.size,
            file.event_bytes,
            file.first_us,
            file.last_us - file.first_us,
            file.digest,
        )
        for file in manifest.files
    ]
    gaps = [
        (number[gap.topic, gap.log_id], gap.partition, gap.start, gap.stop - gap.start, gap.reason)
        for gap in manifest.gaps
    ]
    body = _Body(
        manifest.lake_id,
        logs,
        _Files(*map(list, zip(*files, strict=True))) if files else _Files(*([] for _ in _Files.__struct_fields__)),
        _Gaps(*map(list, zip(*gaps, strict=True))) if gaps else _Gaps(*([] for _ in _Gaps.__struct_fields__)),
    )
    raw = _encoder.encode(body)
    packed = pa.Codec("zstd").compress(raw, asbytes=True)
    return b"".join((_MAGIC, FORMAT.to_bytes(2, "little"), len(raw).to_bytes(8, "little"), packed))


def decode(data: bytes) -> Manifest:
    """Read what `encode` wrote; `IntegrityError` for anything else, `NewerFormat` for what a later version wrote."""
    front = len(_MAGIC)
    if data[:front] != _MAGIC or len(data) < front + 10:
        raise IntegrityError("this is no manifest of a lake")
    written = int.from_bytes(data[front : front + 2], "little")
    if written != FORMAT:
        raise NewerFormat(
            f"the lake's manifest has format {written}, and this version reads {FORMAT}: upgrade Penstock"
        )
    length = int.from_bytes(data[front + 2 : front + 10], "little")
    if length > _RAW_BYTES_MAX:
        raise IntegrityError(f"a lake's manifest claims to have {length:,} bytes")
    try:
        raw = pa.Codec("zstd").decompress(data[front + 10 :], length, asbytes=True)
        return _manifest_of(_decoder.decode(raw))
    except (msgspec.MsgspecError, pa.ArrowException, OSError, ValueError, IndexError) as error:
        raise IntegrityError(f"the lake's manifest cannot be read: {error}") from None


def _manifest_of(body: _Body) -> Manifest:
    for topic, log_id in body.logs:
        _check_names(topic, log_id)
    files = [
        LakeFile(
            *_log(body, log), partition, start, start + length, token, size, event_bytes, first, first + span, digest
        )
        for log, partition, start, length, token, size, event_bytes, first, span, digest in zip(
            *(getattr(body.files, name) for name in _Files.__struct_fields__), strict=True
        )
    ]
    gaps = [
        LakeGap(*_log(body, log), partition, start, start + length, reason)
        for log, partition, start, length, reason in zip(
            *(getattr(body.gaps, name) for name in _Gaps.__struct_fields__), strict=True
        )
    ]
    for file in files:
        if not _ID.fullmatch(file.token) or not file.range:
            raise IntegrityError(f"the lake's manifest names {file.name!r}, which is no file of a lake")
    return Manifest(body.lake, files, gaps)


def _log(body: _Body, number: int) -> tuple[str, str]:
    if number < 0:
        raise IndexError("a log has a number below 0")
    return body.logs[number]


def _check_names(topic: str, log_id: str) -> None:
    try:
        check_name("topic", topic, internal=True)
    except InvalidName as error:
        raise IntegrityError(f"the lake's manifest: {error}") from None
    if not _ID.fullmatch(log_id):
        raise IntegrityError(f"the lake's manifest names a log {log_id!r}, which is no id")
