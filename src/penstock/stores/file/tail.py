"""The tails: 128 bytes per partition that say where its log ends, for all processes of this machine.

One file per store, a slot per partition, written by `pwrite` under the partition's turn and read by `pread` without
any lock: all heads of a store in one call. It is how readers know what is durable, and how writers know what the
writer before them left. A record that was caught half written does not match its CRC, and is read again.

The file is never synced and nothing durable rests on it. A record is believed only if it is of this boot, of this log
and of a segment file with this inode number; otherwise the partition is recovered from its segments, under its turn. A
record that is not believed is still a witness: what it says was durable must be in the log, or is lost.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import google_crc32c

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.stores.file.platform import Disk

RECORD_BYTES: Final = 128
READ_ATTEMPTS: Final = 100
"""A torn record is followed by a whole one within microseconds; so many in a row are damage."""

_MAGIC: Final = b"PTL1"
_RECORD: Final = struct.Struct("<4sBB2x16s16sIIQQIIQQQQQqII")
_CRC: Final = struct.Struct("<I")
assert _RECORD.size == RECORD_BYTES


class State(IntEnum):
    """What the last writer was doing."""

    OPEN = 1
    SYNCING = 2
    """It had begun a sync. If it is gone, nobody knows whether those pages reached the medium."""
    POISONED = 3
    """A sync has failed: those pages are marked clean, and no later sync will write them."""
    DELETED = 4
    CLEAN = 5
    """It closed, with a witness for its last block."""
    DAMAGED = 6
    """The active segment is damaged: what can be read is read, and nothing is written before a repair."""


class Tail(NamedTuple):
    """One record."""

    state: State
    witnessed: bool
    """Whether the last block is a MARKER, so that the last events have a witness behind them."""
    boot_id: bytes
    log_id: bytes
    epoch: int
    """Of writers: raised whenever a log is recovered."""
    segment_epoch: int
    segment_base: int
    """Of the active segment; epoch and base are its name. Without one, `inode` is 0."""
    inode: int
    position: int
    """Where the next block goes in the active segment."""
    durable_position: int
    number: int
    """Of the next block."""
    durable_number: int
    end: int
    """The offset of the next event."""
    durable_end: int
    first: int
    """The lowest offset that retention kept."""
    max_time: int
    """The latest append time so far."""
    turns: int
    """Counts writes of this record, so that others see that something moves."""

    @property
    def is_synced(self) -> bool:
        """Whether all that was appended is known to be on the medium."""
        return self.durable_number == self.number


def encode_tail(tail: Tail) -> bytes:
    """Return the record as bytes."""
    state, witnessed, *rest = tail
    data = _RECORD.pack(_MAGIC, state, witnessed, *rest, 0)
    return data[:-4] + _CRC.pack(google_crc32c.value(data[:-4]))


def decode_tail(data: bytes) -> Tail | None:
    """Read a record; None if it is none, or not whole."""
    if len(data) != RECORD_BYTES or data[:4] != _MAGIC:
        return None
    if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        return None
    _, state, witnessed, *rest, _ = _RECORD.unpack(data)
    return Tail(State(state), bool(witnessed), *rest)


class Tails:
    """The file of all records of a store."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._descriptor = -1
        self._descriptor = disk.open(path, create=True)

    def __del__(self) -> None:
        # With the last reference: a thread that still writes here must never find another file under this number.
        if self._descriptor >= 0:
            self._disk.close(self._descriptor)

    def read(self, slot: int) -> Tail | None:
        """Return the record in a slot; None if there is none that is whole."""
        for _ in range(READ_ATTEMPTS):
            data = self._disk.read(self._descriptor, RECORD_BYTES, slot * RECORD_BYTES)
            tail = decode_tail(data)
            if tail is not None:
                return tail
            if not any(data):
                return None
        return None

    def read_raw(self, slot: int, count: int) -> bytes:
        """Return the bytes of consecutive slots."""
        return self._disk.read(self._descriptor, count * RECORD_BYTES, slot * RECORD_BYTES)

    def raw_reader(self, slot: int, count: int) -> Callable[[], bytes]:
        """Return what does the same again and again, as quickly as it can be done; keep this object while using it."""
        return partial(self._disk.read, self._descriptor, count * RECORD_BYTES, slot * RECORD_BYTES)

    def is_still(self, slot: int, tail: Tail) -> bool:
        """Say whether a record is as it was, without reading what it says."""
        return self.read_raw(slot, 1) == encode_tail(tail)

    def write(self, slot: int, tail: Tail, **changes: Any) -> Tail:
        """Write a record with these changes, whose turn the caller holds; returns it as it was written."""
        tail = tail._replace(turns=(tail.turns + 1) & 0xFFFF_FFFF, **changes)
        if self._disk.write(self._descriptor, encode_tail(tail), slot * RECORD_BYTES) != RECORD_BYTES:
            raise OSError(f"the tail of slot {slot} was written in part")
        return tail

    def write_raw(self, slot: int, data: bytes) -> None:
        """Write the bytes of consecutive slots, as when a topic is created."""
        self._disk.write(self._descriptor, data, slot * RECORD_BYTES)
