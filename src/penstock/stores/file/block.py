"""Blocks: what a segment file consists of. `penstock.stores.file` specifies the bytes; here they are made and read.

A block is believed only if all of this holds: its prefix and header carry the right CRC, seeded with the segment's
salt; it stands at the byte position that it names; it is of this log, this partition and this segment. So bytes of
another file, of an earlier life of the same file, and payloads that look like blocks are never taken for one. The
content (runs and body) is covered by a CRC of its own, which the header holds: that one needs no salt, and can be
computed before anybody knows where the block will stand.

`parse_header` says why bytes are no block: `Blank` for zeros, `NewerFormat` for a later one, `Broken` for all else.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import google_crc32c
import pyarrow as pa

from penstock.errors import NewerFormat
from penstock.producers import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC: Final = b"PENSTOCK"
VERSION: Final = 1
ALIGNMENT: Final = 64

_PREFIX: Final = struct.Struct("<8sHHIIIQQQ12xI")
_HEADER: Final = struct.Struct("<16sIIQQQQqqQQIIQI16xI")
_FRONT: Final = struct.Struct(_PREFIX.format + _HEADER.format.removeprefix("<"))
_RUN: Final = struct.Struct("<16sQQIIQ")
PREFIX_BYTES: Final = _PREFIX.size
HEADER_BYTES: Final = _HEADER.size
FRONT_BYTES: Final = PREFIX_BYTES + HEADER_BYTES
RUN_BYTES: Final = _RUN.size
_SIGNED: Final = struct.Struct("<I")

FLAG_ZSTD: Final = 1
"""The body is compressed with Zstandard."""
RUNS_MAX: Final = 1 << 20
BODY_BYTES_MAX: Final = (64 << 20) + (1 << 20)
"""Arrow's own envelope included."""
CONTENT_BYTES_MAX: Final = BODY_BYTES_MAX + RUNS_MAX * RUN_BYTES
"""No block holds more than this after its header; more was merely claimed."""


class Kind(IntEnum):
    """What a block is."""

    SEGMENT = 1
    DATA = 2
    MARKER = 3
    GAP = 4


_KINDS: Final = {int(kind): kind for kind in Kind}


class Segment(NamedTuple):
    """What every block of a segment must agree with."""

    log_id: bytes
    partition: int
    base: int
    """The offset at which the segment begins; with the epoch in its name it is the segment's identity."""
    seed: int
    """Of the CRCs: the CRC of the segment's salt."""


class Header(NamedTuple):
    """A block's prefix and header, without what is the same in all blocks of a segment."""

    kind: Kind
    position: int
    number: int
    """Counted without a gap through all segments of a partition, SEGMENT blocks included."""
    epoch: int
    offset: int
    """Of its first event; of a block without events, the next one's."""
    span: int
    """How many offsets it occupies."""
    first_time: int
    last_time: int
    durable_number: int
    """All blocks below this number were on the medium when this one was written …"""
    durable_offset: int
    """… and so all offsets below this one."""
    mask: int
    run_count: int
    runs_length: int
    body_length: int
    content_crc: int
    raw_length: int = 0
    """Of the body before it was compressed; as long as the body if it was not."""
    flags: int = 0

    @property
    def end_offset(self) -> int:
        """The offset after its last."""
        return self.offset + self.span

    @property
    def content_position(self) -> int:
        """Where the runs begin, in the file."""
        return self.position + FRONT_BYTES

    @property
    def content_length(self) -> int:
        """The bytes of runs and body."""
        return self.runs_length + self.body_length

    @property
    def end_position(self) -> int:
        """Where the next block begins."""
        return self.position + block_length(self.runs_length, self.body_length)


class Blank(Exception):
    """There are only zeros here: nothing was written."""


class Broken(Exception):
    """These bytes are no block of this segment."""


def aligned(length: int) -> int:
    """Round up to where something may begin."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def block_length(runs_length: int, body_length: int) -> int:
    """Return the length of a whole block, its padding included."""
    return FRONT_BYTES + runs_length + aligned(body_length)


def seed_of(salt: bytes) -> int:
    """Return what the CRCs of a segment with this salt begin with."""
    return int(google_crc32c.value(salt))


# --- runs -------------------------------------------------------------------------------------


def encode_runs(runs: Sequence[Run]) -> bytes:
    """Return runs as bytes, filled up to where the body begins."""
    encoded = b"".join(
        _RUN.pack(run.producer, run.epoch, run.first_sequence, run.length, 0, run.digest) for run in runs
    )
    return encoded.ljust(aligned(len(encoded)), b"\0")


def decode_runs(data: bytes | memoryview, count: int) -> tuple[Run, ...]:
    """Read what `encode_runs` wrote, the CRC having been checked."""
    return tuple(
        Run(producer, epoch, first, length, digest)
        for producer, epoch, first, length, _, digest in _RUN.iter_unpack(data[: count * RUN_BYTES])
    )


# --- headers ----------------------------------------------------------------------------------


def content_crc(runs: bytes, body: bytes | memoryview) -> int:
    """Return the CRC of a block's content."""
    return int(google_crc32c.extend(google_crc32c.value(runs), body))


def encode_front(segment: Segment, header: Header) -> bytes:
    """Return the prefix and the header as bytes."""
    # A segment's first block tells the salt; its own prefix and header can only be checked without.
    seed = 0 if header.kind == Kind.SEGMENT else segment.seed
    prefix = _PREFIX.pack(
        MAGIC,
        VERSION,
        header.kind,
        HEADER_BYTES,
        header.runs_length,
        0,
        header.body_length,
        header.position,
        header.number,
        0,
    )
    prefix = _signed(prefix, seed)
    rest = _HEADER.pack(
        segment.log_id,
        segment.partition,
        header.flags,
        header.epoch,
        segment.base,
        header.offset,
        header.span,
        header.first_time,
        header.last_time,
        header.durable_number,
        header.durable_offset,
        header.mask,
        header.run_count,
        header.raw_length or header.body_length,
        header.content_crc,
        0,
    )
    return prefix + _signed(rest, int.from_bytes(prefix[-4:], "little"))


def _signed(data: bytes, seed: int) -> bytes:
    return data[:-4] + _SIGNED.pack(google_crc32c.extend(seed, data[:-4]))


class Prefix(NamedTuple):
    """What the first 64 bytes of a block say, in every version for ever."""

    version: int
    kind: int
    header_length: int
    runs_length: int
    body_length: int
    position: int
    number: int


def parse_prefix(data: bytes | memoryview, seed: int, position: int) -> Prefix:
    """Read a prefix, or raise `Blank` or `Broken`."""
    if len(data) < PREFIX_BYTES:
        raise Broken("the file ends here")
    magic, version, kind, header_length, runs_length, _, body_length, claimed, number, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        if not any(data[:PREFIX_BYTES]):
            raise Blank
        raise Broken("no block begins here")
    # A segment's first block stands at 0 and is the only one whose CRC takes no seed.
    if google_crc32c.extend(seed if position else 0, bytes(data[: PREFIX_BYTES - 4])) != crc:
        raise Broken("the prefix does not match its CRC")
    if claimed != position:
        raise Broken(f"the block was written for byte {claimed}")
    return Prefix(version, kind, header_length, runs_length, body_length, claimed, number)


def parse_header(data: bytes, segment: Segment, position: int) -> Header:
    """Read the prefix and header at the beginning of `data`, or raise `Blank`, `Broken` or `NewerFormat`."""
    return _parse_sound(data, segment, position) or _parse_doubtful(data, segment, position)


def _parse_sound(data: bytes, segment: Segment, position: int) -> Header | None:
    """Read a header that is as it should be; None for any other, of which `_parse_doubtful` says what is wrong.

    In its turn a writer reads the headers of all that others wrote since its last, so this is worth being quick.
    """
    if len(data) < FRONT_BYTES:
        return None
    (
        magic, version, kind, header_length, runs_length, _, body_length, claimed, number, prefix_crc,
        log_id, partition, flags, epoch, base, offset, span, first_time, last_time, durable_number, durable_offset,
        mask, run_count, raw_length, crc, header_crc,
    ) = _FRONT.unpack_from(data)  # fmt: skip
    if (
        (magic, version, header_length, claimed) != (MAGIC, VERSION, HEADER_BYTES, position)
        or (log_id, partition, base) != segment[:3]
        or flags & ~FLAG_ZSTD
        or kind not in _KINDS
        or runs_length + body_length > CONTENT_BYTES_MAX
        or run_count * RUN_BYTES > runs_length
        or google_crc32c.extend(segment.seed if position else 0, data[: PREFIX_BYTES - 4]) != prefix_crc
        or google_crc32c.extend(prefix_crc, data[PREFIX_BYTES : FRONT_BYTES - 4]) != header_crc
    ):
        return None
    return Header(
        _KINDS[kind], position, number, epoch, offset, span, first_time, last_time, durable_number, durable_offset,
        mask, run_count, runs_length, body_length, crc, raw_length, flags,
    )  # fmt: skip


def _parse_doubtful(data: bytes, segment: Segment, position: int) -> Header:
    prefix = parse_prefix(data, segment.seed, position)
    if prefix.version > VERSION:
        raise NewerFormat(
            f"a block of format {prefix.version} stands at byte {position}; this version knows format {VERSION}: "
            f"upgrade Penstock. Nothing was changed"
        )
    if prefix.header_length != HEADER_BYTES or len(data) < FRONT_BYTES:
        raise Broken("the header is cut off")
    rest = bytes(data[PREFIX_BYTES:FRONT_BYTES])
    fields = _HEADER.unpack(rest)
    prefix_crc = int.from_bytes(data[PREFIX_BYTES - 4 : PREFIX_BYTES], "little")
    if google_crc32c.extend(prefix_crc, rest[:-4]) != fields[-1]:
        raise Broken("the header does not match its CRC")
    log_id, partition, flags, epoch, base, offset, span, first_time, last_time, *others = fields
    if (log_id, partition, base) != segment[:3]:
        raise Broken("the block is of another segment")
    if flags & ~FLAG_ZSTD or prefix.kind not in _KINDS:
        raise NewerFormat(f"the block at byte {position} uses a feature that this version does not know: upgrade")
    durable_number, durable_offset, mask, run_count, raw_length, crc, _ = others
    header = Header(
        kind=Kind(prefix.kind),
        position=position,
        number=prefix.number,
        epoch=epoch,
        offset=offset,
        span=span,
        first_time=first_time,
        last_time=last_time,
        durable_number=durable_number,
        durable_offset=durable_offset,
        mask=mask,
        run_count=run_count,
        runs_length=prefix.runs_length,
        body_length=prefix.body_length,
        content_crc=crc,
        raw_length=raw_length,
        flags=flags,
    )
    if header.content_length > CONTENT_BYTES_MAX or run_count * RUN_BYTES > header.runs_length:
        raise Broken("the lengths are impossible")
    return header


def body_of(header: Header, content: pa.Buffer) -> pa.Buffer:
    """Return the body of a block whose content was checked, unpacked if it is compressed."""
    body = content.slice(header.runs_length)
    if not header.flags & FLAG_ZSTD:
        return body
    # Before anything is unpacked: thirty kilobytes can become a gigabyte.
    if header.raw_length > BODY_BYTES_MAX:
        raise Broken(f"the body claims to unpack to {header.raw_length:,} bytes")
    try:
        return pa.decompress(body, header.raw_length, codec="zstd")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise Broken(f"the body cannot be unpacked: {error}") from None


def check_content(header: Header, content: bytes | memoryview) -> None:
    """Raise `Broken` unless these are the runs and the body of the block."""
    if len(content) < header.content_length:
        raise Broken("the block is cut off")
    if google_crc32c.value(content[: header.content_length]) != header.content_crc:
        raise Broken("the content does not match its CRC")
