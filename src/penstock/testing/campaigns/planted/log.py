"""Bugs to plant in the log of the file store: what is synced when, in which order, and what is believed."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import google_crc32c

from penstock.deduplication import ProducerTable
from penstock.stores.file import block, files, gate, platform, recovery, scan, verify
from penstock.stores.file.block import FRONT_BYTES, MAGIC, PREFIX_BYTES, Header, Kind
from penstock.stores.file.files import PartitionFiles
from penstock.stores.file.log import Handle
from penstock.stores.file.segment import Index, SegmentName
from penstock.stores.file.tail import State, Tail
from penstock.stores.file.topics import Topics
from penstock.stores.file.writer import PartitionWriter
from penstock.testing.campaigns.planted.tools import (
    changed,
    changed_everywhere,
    forgotten,
    nothing,
    on_another_disk,
    original,
    with_another_disk,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.stores.file.platform import Platform
    from penstock.stores.file.recovery import Recovered
    from penstock.stores.file.segment import SegmentFile
    from penstock.stores.file.topics import Entry


# --- syncs ----------------------------------------------------------------------------------------


def _durable(after: Tail) -> dict[str, Any]:
    return {
        "state": State.OPEN,
        "durable_position": after.position,
        "durable_number": after.number,
        "durable_end": after.end,
    }


def ack_before_sync() -> AbstractContextManager[None]:
    """Say that a write is durable without a sync."""

    def sync_to(self: PartitionWriter, _file: SegmentFile, after: Tail) -> None:
        self._tail = self._tails.write(self._files.slot, after, **_durable(after))

    return changed(PartitionWriter, sync_to=sync_to)


def retried_sync() -> AbstractContextManager[None]:
    """Sync the same file once more after a sync that failed, and believe that."""
    right = PartitionWriter.sync_to

    def sync_to(self: PartitionWriter, file: SegmentFile, after: Tail) -> None:
        sync = self._files.disk.sync

        def persistently(descriptor: int) -> None:
            try:
                sync(descriptor)
            except OSError:
                sync(descriptor)

        with on_another_disk(self._files, sync=persistently):
            right(self, file, after)

    return changed(PartitionWriter, sync_to=sync_to)


def poisoned_pages_synced_again() -> AbstractContextManager[None]:
    """Go on from a tail that tells of a failed sync as if a second sync could mend it."""

    def heal(self: PartitionWriter, tail: Tail) -> Tail:
        file = self._files.open(SegmentName(tail.segment_base, tail.segment_epoch))
        self._files.disk.sync(file.descriptor)
        return self._tails.write(self._files.slot, tail, **_durable(tail))

    return changed(PartitionWriter, _heal=heal)


def unsynced_recovery() -> AbstractContextManager[None]:
    """Believe what recovery has read, which may be in memory alone."""
    right = recovery.recover

    def recover(files: PartitionFiles, old: Tail | None, witness: int) -> Recovered:
        with on_another_disk(files, sync=nothing, sync_directory=nothing):
            return right(files, old, witness)

    return changed_everywhere(right, recover)


def short_write_believed() -> AbstractContextManager[None]:
    """Do not look at how many bytes went out."""
    right = original(PartitionWriter, "_write")

    def write(self: PartitionWriter, file: SegmentFile, parts: Sequence[Any], *tails: Tail, syncs: bool) -> None:
        write_many = self._files.disk.write_many

        def all_of_it(descriptor: int, buffers: Sequence[Any], position: int) -> int:
            write_many(descriptor, buffers, position)
            return sum(memoryview(buffer).nbytes for buffer in buffers)

        with on_another_disk(self._files, write_many=all_of_it):
            right(self, file, parts, *tails, syncs=syncs)

    return changed(PartitionWriter, _write=write)


# --- names ----------------------------------------------------------------------------------------


def unsynced_segment_name() -> AbstractContextManager[None]:
    """Make a segment without a sync of its directory."""
    right = PartitionFiles.create_segment

    def create_segment(self: PartitionFiles, name: SegmentName, **facts: Any) -> SegmentFile:
        sync_directory = self.disk.sync_directory

        def of_others(path: Path) -> None:
            if path != self.directory:
                sync_directory(path)

        with on_another_disk(self, sync_directory=of_others):
            right(self, name, **facts)
        return self.open(name)

    return changed(PartitionFiles, create_segment=create_segment)


def unsynced_rename() -> AbstractContextManager[None]:
    """Replace `topic.json` and `first` without a sync of their directory."""
    right = files.replace_file

    def replace_file(platform: Platform, path: Path, data: bytes) -> None:
        hasty = with_another_disk(platform, sync_directory=nothing)
        right(hasty if path.name in {"topic.json", "first"} else platform, path, data)

    return changed_everywhere(right, replace_file)


def name_before_content() -> AbstractContextManager[None]:
    """Give a segment its name, then sync its bytes."""
    right = PartitionFiles.create_segment

    def create_segment(self: PartitionFiles, name: SegmentName, **facts: Any) -> SegmentFile:
        disk = self.disk

        def rename_first(old: Path, new: Path) -> None:
            disk.rename(old, new)
            descriptor = disk.open(new)
            disk.sync(descriptor)
            disk.close(descriptor)

        with on_another_disk(self, sync=nothing, rename=rename_first):
            right(self, name, **facts)
        return self.open(name)

    return changed(PartitionFiles, create_segment=create_segment)


def resurrected_topic() -> AbstractContextManager[None]:
    """Remove what says that a topic is deleted before its segments are durably gone."""
    right = Topics.remove

    def remove(self: Topics, log_id: str) -> None:
        disk = self._disk
        self._disk = with_another_disk(self._platform, sync_directory=nothing).disk
        try:
            right(self, log_id)
        finally:
            self._disk = disk
        disk.sync_directory(self._directory)

    return changed(Topics, remove=remove)


def topic_found_too_early() -> AbstractContextManager[None]:
    """Let a topic be found before the name of its directory is durable."""
    right = original(Topics, "_prepare")

    def prepare(self: Topics, entry: Entry) -> None:
        disk = self._disk
        self._disk = with_another_disk(self._platform, sync_directory=nothing).disk
        try:
            right(self, entry)
        finally:
            self._disk = disk

    return changed(Topics, _prepare=prepare)


def directory_of_a_killed_process() -> AbstractContextManager[None]:
    """Sync the name of a directory only where it is made, not where it is found."""

    def ensure_directory(self: PartitionFiles) -> None:
        if not self.disk.exists(self.directory):
            self.disk.make_directory(self.directory)
            self.disk.sync_directory(self.directory.parent)

    return changed(PartitionFiles, _ensure_directory=ensure_directory)


def trim_before_the_start() -> AbstractContextManager[None]:
    """Remove segments before the new beginning of the log is durable."""
    right = PartitionFiles.write_first

    def write_first(self: PartitionFiles, first: int) -> None:
        self.remove_below(first)
        right(self, first)

    return changed(PartitionFiles, write_first=write_first)


def old_segment_removed_first() -> AbstractContextManager[None]:
    """While healing, remove the old segment before the tail tells of the new one."""

    def heal(self: PartitionWriter, tail: Tail) -> Tail:
        healed = recovery.heal(self._files, tail)
        recovery.forget_unproven(self._files, tail, healed)
        self._file = None
        return self._tails.write(self._files.slot, healed)

    return changed(PartitionWriter, _heal=heal)


# --- recovery -------------------------------------------------------------------------------------


def tail_of_another_boot_believed() -> AbstractContextManager[None]:
    """Believe a tail that was written before the machine was started anew."""

    def is_believed(tail: Tail | None, files: PartitionFiles) -> bool:
        return tail is not None and tail.log_id == files.log_id

    return changed_everywhere(recovery.is_believed, is_believed)


def epoch_not_raised() -> AbstractContextManager[None]:
    """Go on in the epoch of the writer before."""
    right = recovery.recover

    def recover(files: PartitionFiles, old: Tail | None, witness: int) -> Recovered:
        recovered = right(files, old, witness)
        return recovered._replace(tail=recovered.tail._replace(epoch=max(recovered.tail.epoch - 1, 0)))

    return changed_everywhere(right, recover)


def torn_tail_not_cut() -> AbstractContextManager[None]:
    """Leave the rest of a write that was cut off behind the end of the log."""
    return changed(recovery, _cut_torn=nothing)


def cut_without_quarantine() -> AbstractContextManager[None]:
    """Cut a torn tail off without keeping it for anybody to look at."""

    def quarantine(self: PartitionFiles, file: SegmentFile, _position: int, _stop: int) -> Path:
        return self.quarantine_directory / str(file.name)

    return changed(PartitionFiles, quarantine=quarantine)


def corruption_taken_for_torn() -> AbstractContextManager[None]:
    """Take every damage for a write that was cut off."""
    right = original(scan, "_damage")

    def damage(file: SegmentFile, expected: Any, limit: int, *, proven: bool, why: Exception) -> Any:
        found = right(file, expected, limit, proven=proven, why=why)
        return found._replace(damage=found.damage._replace(kind=scan.TORN, stop=None), next=None)

    return changed(scan, _damage=damage)


def payload_taken_for_a_block() -> AbstractContextManager[None]:
    """Look ahead for blocks by their magic alone, without salt, position or CRC."""

    def block_at(file: SegmentFile, position: int) -> Header | None:
        data = file.disk.read(file.descriptor, FRONT_BYTES, position)
        if len(data) < FRONT_BYTES or not data.startswith(MAGIC):
            return None
        (
            _, _, kind, _, runs_length, _, body_length, _, number, _, _, _, flags, epoch, _, offset, span, first_time,
            last_time, durable_number, durable_offset, mask, run_count, raw_length, crc, _,
        ) = original(block, "_FRONT").unpack_from(data)  # fmt: skip
        return Header(
            Kind(kind), position, number, epoch, offset, span, first_time, last_time, durable_number, durable_offset,
            mask, run_count, runs_length, body_length, crc, raw_length, flags,
        )  # fmt: skip

    return changed(scan, _block_at=block_at)


def sealed_length_not_checked() -> AbstractContextManager[None]:
    """Do not compare a sealed segment with the length that its successor knows."""
    return changed(verify, _sealed_length=nothing)


def crc_without_the_lengths() -> AbstractContextManager[None]:
    """Let the CRC of a prefix not cover the lengths, neither in writing nor in reading."""

    class Crc:
        value = staticmethod(google_crc32c.value)

        @staticmethod
        def extend(seed: int, data: Any) -> int:
            covered = bytes(data)
            if len(covered) == PREFIX_BYTES - 4:
                covered = covered[:16] + bytes(16) + covered[32:]
            return int(google_crc32c.extend(seed, covered))

    return changed(block, google_crc32c=Crc)


# --- reading, and knowing what others wrote -------------------------------------------------------


def index_believed() -> AbstractContextManager[None]:
    """Take the index of a segment for granted, whatever its CRC says."""
    right = original(Index, "from_bytes").__func__

    def from_bytes(cls: type[Index], data: bytes) -> Index | None:
        crc = int(google_crc32c.value(data[16:])).to_bytes(8, "little")
        index: Index | None = right(cls, data[:8] + crc + data[16:])
        return index

    return changed(Index, from_bytes=classmethod(from_bytes))


def reads_past_the_durable_end() -> AbstractContextManager[None]:
    """Show events whose sync is under way."""
    return changed(Handle, readable_end=lambda _self, tail: tail.end)


def producers_lost_at_the_roll() -> AbstractContextManager[None]:
    """Begin a segment with an empty table of producers."""
    right = PartitionFiles.create_segment

    def create_segment(self: PartitionFiles, name: SegmentName, **facts: Any) -> SegmentFile:
        return right(self, name, **facts | {"producers": ProducerTable()})

    return changed(PartitionFiles, create_segment=create_segment)


def producers_not_caught_up() -> AbstractContextManager[None]:
    """Do not learn which sequences other writers have stored."""

    def catch_up_to(self: PartitionWriter, _file: SegmentFile, position: int) -> None:
        self._caught_up = position

    return changed(PartitionWriter, _catch_up_to=catch_up_to)


def deleted_topic_written() -> AbstractContextManager[None]:
    """Do not look in a turn whether the topic is still there."""
    right = original(PartitionWriter, "_take_over")

    def take_over(self: PartitionWriter) -> None:
        with on_another_disk(self._files, exists=lambda _path: True):
            right(self)

    return changed(PartitionWriter, _take_over=take_over)


# --- turns ----------------------------------------------------------------------------------------


@contextmanager
def turn_kept_through_fork() -> Iterator[None]:
    """Let a child use the gates that it inherited, as they were at the moment of the fork."""
    with forgotten(gate.abandon_after_fork), forgotten(original(platform, "_forget_locks_after_fork")):
        yield


def turn_not_given_back() -> AbstractContextManager[None]:
    """Keep a turn that was waited for when the work in it has ended."""
    return changed(gate.Gate, _unlocked=lambda _: None)


def lock_outlives_its_owner() -> AbstractContextManager[None]:
    """Lock with what a forked child inherits, as `flock` does: the lock lives on in the child."""

    def ask(self: platform.SystemRecordLocks, command: int, kind: int, byte: int) -> None:
        fcntl.fcntl(self._descriptor, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))

    def try_lock(self: platform.SystemRecordLocks, byte: int) -> bool:
        try:
            ask(self, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        return True

    def lock(self: platform.SystemRecordLocks, byte: int) -> None:
        ask(self, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, byte)

    def unlock(self: platform.SystemRecordLocks, byte: int) -> None:
        ask(self, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    return changed(platform.SystemRecordLocks, try_lock=try_lock, lock=lock, unlock=unlock)
