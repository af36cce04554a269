"""The files of one partition: making segments, sealing them, keeping what was cut, and where the log begins.

Everything here changes the disk, and is called under the partition's turn. The order of the steps is the point:

* a new segment is written and synced before it gets its name, which is synced before anything else relies on it: a
  file that bears a segment's name and does not begin as one is damaged, never just unfinished;
* where the log begins is made durable before any segment below it is removed;
* what is cut off is kept in quarantine first.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import google_crc32c

from penstock.errors import PenstockError, StoreError, StoreFull
from penstock.stores.file.block import Segment, seed_of
from penstock.stores.file.segment import (
    Facts,
    Predecessor,
    SegmentFile,
    SegmentName,
    encode_first_block,
    segment_names,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from penstock.deduplication import ProducerTable
    from penstock.rows import TopicInfo
    from penstock.stores.file.platform import Platform

logger = logging.getLogger(__name__)

SALT_BYTES: Final = 16
QUARANTINE_BYTES_MAX: Final = 64 << 20
_FIRST_NAME: Final = "first"
_NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_UNNAMED: Final = "unnamed.seg"
"""A segment that is being made; what a crash leaves of it is replaced by the next."""
_FIRST_MAGIC: Final = b"PFIRST01"


class PartitionFiles:
    """The directory of one partition."""

    def __init__(
        self, platform: Platform, directory: Path, *, quarantine: Path, topic: TopicInfo, number: int, slot: int
    ) -> None:
        self.platform = platform
        self.disk = platform.disk
        self.directory = directory
        self.quarantine_directory = quarantine
        self.topic = topic
        self.number = number
        self.slot = slot
        self.log_id = bytes.fromhex(topic.log_id)
        self.topic_path = directory.parent / "topic.json"

    def __str__(self) -> str:
        return f"{self.topic.name}/{self.number}"

    def names(self) -> list[SegmentName]:
        """Return the segments by base; of two with one base only the later."""
        return sorted({name.base: name for name in segment_names(self.disk, self.directory)}.values())

    def sizes(self) -> dict[SegmentName, int]:
        """Return the segments by base with the lengths of their files."""
        found = {}
        for name in self.names():
            with suppress(FileNotFoundError):  # retention may remove one meanwhile
                descriptor = self.disk.open(self.directory / str(name), write=False)
                found[name] = self.disk.size(descriptor)
                self.disk.close(descriptor)
        return found

    def open(self, name: SegmentName) -> SegmentFile:
        """Open a segment for reading and writing."""
        return SegmentFile(self.disk, self.directory / str(name), name, write=True)

    # --- segments -------------------------------------------------------------------------------

    def create_segment(
        self,
        name: SegmentName,
        *,
        number: int,
        max_time: int,
        producers: ProducerTable,
        predecessor: Predecessor | None,
        blocks: Callable[[Segment, int], Sequence[bytes]] = lambda _segment, _position: (),
    ) -> SegmentFile:
        """Make a segment; durable on return, its name included.

        `blocks` returns what follows the first block, as bytes that begin at the given position.
        """
        salt = self.platform.random(SALT_BYTES)
        facts = Facts(
            salt=salt.hex(),
            topic=self.topic,
            slot=self.slot,
            partition=self.number,
            max_time=max_time,
            predecessor=predecessor,
        )
        now = self.platform.clock.time_us()
        self._ensure_directory()
        unnamed = self.directory / _UNNAMED
        if self.disk.exists(unnamed):
            self.disk.remove(unnamed)
        descriptor = self.disk.open(unnamed, create=True, exclusive=True)
        try:
            first = encode_first_block(facts, name, number, now, producers)
            segment = Segment(self.log_id, self.number, name.base, seed_of(salt))
            position = 0
            for data in [first, *blocks(segment, len(first))]:
                if self.disk.write(descriptor, data, position) != len(data):
                    raise OSError(f"{unnamed} was written in part")
                position += len(data)
            self.disk.sync(descriptor)
        finally:
            self.disk.close(descriptor)
        self.disk.rename(unnamed, self.directory / str(name))
        self.disk.sync_directory(self.directory)
        return self.open(name)

    def _ensure_directory(self) -> None:
        if not self.disk.exists(self.directory):
            self.disk.make_directory(self.directory)
        # Also if it was there: whoever made it may have been killed before this.
        if not segment_names(self.disk, self.directory):
            self.disk.sync_directory(self.directory.parent)

    def seal(self, file: SegmentFile, length: int) -> None:
        """Cut off what was allocated ahead, and make that durable."""
        self.disk.truncate(file.descriptor, length)
        self.disk.sync(file.descriptor)

    def remove(self, names: Sequence[SegmentName]) -> None:
        """Remove segments with their indexes."""
        for name in names:
            for path in (self.directory / str(name), (self.directory / str(name)).with_suffix(".idx")):
                if self.disk.exists(path):
                    self.disk.remove(path)
        self.disk.sync_directory(self.directory)

    def remove_below(self, offset: int) -> None:
        """Remove the segments that begin below an offset, those that were superseded included."""
        self.remove([name for name in segment_names(self.disk, self.directory) if name.base < offset])

    # --- where the log begins -------------------------------------------------------------------

    def read_first(self) -> int:
        """Return the lowest offset that retention kept."""
        path = self.directory / _FIRST_NAME
        if not self.disk.exists(path):
            return 0
        descriptor = self.disk.open(path, write=False)
        try:
            data = self.disk.read(descriptor, 64, 0)
        finally:
            self.disk.close(descriptor)
        crc = int(google_crc32c.value(data[:16])).to_bytes(4, "little")
        if data[:8] == _FIRST_MAGIC and data[16:] == crc:
            return int.from_bytes(data[8:16], "little")
        names = self.names()
        logger.error("%s: the file %s is damaged; the first segment tells where the log begins", self, path)
        return names[0].base if names else 0

    def write_first(self, first: int) -> None:
        """Make the new beginning durable."""
        data = _FIRST_MAGIC + first.to_bytes(8, "little")
        data += int(google_crc32c.value(data)).to_bytes(4, "little")
        replace_file(self.platform, self.directory / _FIRST_NAME, data)

    # --- quarantine -----------------------------------------------------------------------------

    def quarantine(self, file: SegmentFile, position: int, stop: int) -> Path:
        """Copy a part of a segment to where somebody can look at it, before it is cut off."""
        data = self.disk.read(file.descriptor, min(stop - position, QUARANTINE_BYTES_MAX), position)
        path = self._quarantine_path(f"{file.name}-{position}")
        self.disk.make_directory(self.quarantine_directory)
        replace_file(self.platform, path, data.rstrip(b"\0"))
        return path

    def quarantine_file(self, path: Path) -> Path:
        """Move a whole file out of the way."""
        self.disk.make_directory(self.quarantine_directory)
        kept = self._quarantine_path(path.name)
        self.disk.rename(path, kept)
        self.disk.sync_directory(self.quarantine_directory)
        self.disk.sync_directory(path.parent)
        return kept

    def _quarantine_path(self, name: str) -> Path:
        mark = self.platform.random(4).hex()
        return self.quarantine_directory / f"{self.topic.log_id}-{self.number}-{name}-{mark}"


def replace_file(platform: Platform, path: Path, data: bytes) -> None:
    """Write a small file as a whole or not at all, durably."""
    disk = platform.disk
    temporary = path.with_name(f".{path.name}.{platform.random(6).hex()}")
    descriptor = disk.open(temporary, create=True, exclusive=True)
    try:
        if data and disk.write(descriptor, data, 0) != len(data):
            raise OSError(f"{temporary} was written in part")
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    disk.rename(temporary, path)
    disk.sync_directory(path.parent)


def refused(what: str, error: OSError) -> PenstockError:
    """Return what an error of the disk means for a call that has changed nothing."""
    if error.errno in _NO_SPACE:
        return StoreFull(f"{what}: the disk is full ({error}). Nothing was changed; it goes on when there is space")
    return StoreError(f"{what}: {error}. Nothing was changed")
