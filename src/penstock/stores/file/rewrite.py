"""Blocks on their way into another segment: contents stay as they are, and what is missing becomes a GAP.

Offsets never change. Numbers are kept where they can be; behind a gap they may have a hole, because a gap stands for a
number of blocks that nobody knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.stores.file.block import Header, Kind, Segment, aligned, content_crc, encode_front

if TYPE_CHECKING:
    import pyarrow as pa


class Blocks:
    """A series of blocks that begins at an offset, with a block number and in an epoch."""

    def __init__(self, *, offset: int, number: int, epoch: int) -> None:
        self._epoch = epoch
        self._first_number = number
        self._blocks: list[tuple[Header, bytes]] = []
        self.offset = offset
        """The offset after the last one."""
        self.number = number
        """The number after the last one."""

    def add(self, header: Header, content: pa.Buffer) -> None:
        """Take a block along."""
        # Dense, even if a marker before it is lost; a gap alone stands for a number of blocks that nobody knows.
        behind_gap = bool(self._blocks) and self._blocks[-1][0].kind == Kind.GAP
        number = max(header.number, self.number) if behind_gap else self.number
        self._append(header._replace(number=number, epoch=self._epoch), content.to_pybytes())

    def declare_lost(self, stop: int, reason: str, now: int) -> None:
        """Occupy everything up to an offset, if anything is missing."""
        if stop <= self.offset:
            return
        body = reason.encode()
        header = Header(
            kind=Kind.GAP,
            position=0,
            number=self.number,
            epoch=self._epoch,
            offset=self.offset,
            span=stop - self.offset,
            first_time=now,
            last_time=now,
            durable_number=0,
            durable_offset=0,
            mask=0,
            run_count=0,
            runs_length=0,
            body_length=len(body),
            content_crc=content_crc(b"", body),
        )
        self._append(header, body)

    def _append(self, header: Header, content: bytes) -> None:
        self._blocks.append((header, content))
        self.offset, self.number = header.end_offset, header.number + 1

    def encode(self, segment: Segment, position: int) -> list[bytes]:
        """Return the blocks as they stand in a segment, from a position on."""
        encoded = []
        for header, content in self._blocks:
            # Everything before this segment is durable, and nothing in it before it is synced as a whole.
            moved = header._replace(position=position, durable_number=self._first_number, durable_offset=segment.base)
            data = encode_front(segment, moved) + content
            encoded.append(data.ljust(aligned(len(data)), b"\0"))
            position += len(encoded[-1])
        return encoded
