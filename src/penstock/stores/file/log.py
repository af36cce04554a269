"""The `Log` port over segment files.

A handle per partition joins its reader, which takes no lock, and its writer, which takes turns with all others. What
can be read ends where the tail record says: at what is durable, or, in a topic of durability `os`, at what was
appended. The tail is read anew with every call, so that nothing here can be stale.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.errors import BeyondEnd, PenstockError, TopicDeleted, Trimmed, TrimRefused, UsageError
from penstock.metrics import Histogram
from penstock.offsets import Range
from penstock.rows import Partition, PartitionFault, Retention
from penstock.stores.file.gate import PARTITIONS_GATE, TOPICS_GATE
from penstock.stores.file.reader import PartitionReader
from penstock.stores.file.recovery import is_believed
from penstock.stores.file.retention import Drift, passed_by_retention
from penstock.stores.file.tail import RECORD_BYTES, State, Tail, Tails, decode_tail
from penstock.stores.file.topics import Topics
from penstock.stores.file.writer import PartitionWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from penstock.batch import Batch
    from penstock.offsets import Gap
    from penstock.ports import Notifier
    from penstock.producers import Run
    from penstock.rows import Appended, TopicInfo, TopicSettings
    from penstock.settings import FileSettings
    from penstock.stores.file.files import PartitionFiles
    from penstock.stores.file.gate import Gates
    from penstock.stores.file.platform import Platform

logger = logging.getLogger(__name__)

R = TypeVar("R")

READ_ATTEMPTS: Final = 10
"""A segment that retention removes during a read is looked for anew; so often in a row is damage."""


FAULTS: Final = {
    State.POISONED: "a sync has failed: the next append copies what was not proven to be on the disk, or is refused",
    State.DAMAGED: "its newest segment is damaged: nothing is written before `penstock repair`",
}
"""What is wrong with a partition whose tail is in one of these states."""


class Progress(Protocol):
    """What the log asks of the subscriptions: who still needs what, and what was reached."""

    def witness(self, partition: Partition) -> int:
        """Return an end that the partition must have reached."""

    def protection(self, partition: Partition, first: int) -> tuple[str, int] | None:
        """Return the protected subscription that has passed least, and how far."""

    def forget_log(self, log_id: str) -> None:
        """Remove everything that is kept for a log."""


class Handle:
    """One partition as this process has it open."""

    def __init__(self, files: PartitionFiles, writer: PartitionWriter) -> None:
        self.files = files
        self.writer = writer
        self.reader = PartitionReader(files.disk, files.directory, files.topic, files.number)
        self.reads_appended = files.topic.settings.durability == "os"
        self.written_at: float | None = None
        """When this process last appended, if the last block has no witness yet; on the boot clock."""
        self.proven = 0
        """Up to where the log was durable when somebody looked: it will never be less."""
        self.unknown = False
        """Whether its head was asked for, and nobody knows it: the keeper sees to it."""

    def readable_end(self, tail: Tail) -> int:
        """Return the offset up to which the log may be read."""
        return tail.end if self.reads_appended and tail.state != State.DAMAGED else tail.durable_end


class FileLog:
    """The `Log` port."""

    def __init__(
        self,
        root: Path,
        *,
        platform: Platform,
        settings: FileSettings,
        gates: Gates,
        progress: Progress,
        notifier: Notifier,
        check_open: Callable[[], None],
    ) -> None:
        self._platform = platform
        self._settings = settings
        self._gates = gates
        self._progress = progress
        self._notifier = notifier
        self.check_open = check_open
        self.tails = Tails(root / "tails", platform.disk)
        self.topic_directory = Topics(platform, root, self.tails)
        self.sync_times = Histogram()
        """Of the syncs that publishers wait for."""
        self._drift = Drift(platform.clock)
        self._lock = threading.Lock()
        self._handles: dict[Partition, Handle] = {}

    def close(self) -> None:
        """Give the last blocks their witnesses, and close the files."""
        for handle in list(self._handles.values()):
            if handle.written_at is not None:
                self._mark(handle, clean=True)
            handle.reader.forget()
        self._handles.clear()

    # --- topics ---------------------------------------------------------------------------------

    def create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        self.check_open()
        with self._topics_turn():
            info = self.topic_directory.create(name, settings)
        # A handle knows the retention as it was.
        with self._lock:
            for partition in info.partitions:
                handle = self._handles.get(partition)
                if handle is not None:
                    handle.files.topic = info
        return info

    def delete_topic(self, log_id: str) -> None:
        self.check_open()
        with self._topics_turn():
            partitions = self.topic_directory.delete(log_id)
        self._finish_deletion(log_id, partitions)

    def _finish_deletion(self, log_id: str, partitions: list[PartitionFiles]) -> None:
        try:
            for files in partitions:
                self._writer(files).delete()
                with self._lock:
                    self._handles.pop(Partition(log_id, files.number), None)
            self._progress.forget_log(log_id)
            with self._topics_turn():
                self.topic_directory.remove(log_id)
        except (PenstockError, OSError) as error:
            # The topic is gone all the same. What is left is removed when the store is next opened.
            logger.warning("log %s was deleted, and what is left of it stays for now: %s", log_id, error)

    def topics(self) -> list[TopicInfo]:
        self.check_open()
        return [entry.topic for entry in self.topic_directory.entries()]

    def tidy(self) -> None:
        """Finish what a crash has left behind."""
        left: list[tuple[str, list[PartitionFiles]]] = []
        with self._topics_turn():
            self.topic_directory.entries()
            self.topic_directory.tidy(lambda log_id, partitions: left.append((log_id, partitions)))
        for log_id, partitions in left:
            self._finish_deletion(log_id, partitions)

    def _topics_turn(self) -> AbstractContextManager[None]:
        return self._gates.gate(TOPICS_GATE).turn("the list of topics", self._settings.stall_seconds)

    def check_topic(self, log_id: str) -> None:
        """Raise `TopicDeleted` if there is no such log."""
        self.topic_directory.entry(log_id)

    def check_partition(self, partition: Partition) -> None:
        """Raise `TopicDeleted` if there is no such log, `UsageError` if it has no such partition."""
        self.topic_directory.files(*partition)

    # --- handles --------------------------------------------------------------------------------

    def handle(self, partition: Partition) -> Handle:
        """Return the partition, open; it is recovered first if nobody knows how it ends."""
        handle = self._handles.get(partition)
        if handle is not None:
            return handle
        files = self.topic_directory.files(*partition)
        handle = Handle(files, self._writer(files))
        handle.writer.ensure_recovered(check_inode=True)
        with self._lock:
            return self._handles.setdefault(partition, handle)

    def handles(self) -> list[Handle]:
        """Return all partitions that are open."""
        return list(self._handles.values())

    def _writer(self, files: PartitionFiles) -> PartitionWriter:
        partition = Partition(files.topic.log_id, files.number)
        return PartitionWriter(
            files,
            self._gates.gate(PARTITIONS_GATE + files.slot),
            self.tails,
            self._settings,
            lambda: self._progress.witness(partition),
            sync_times=self.sync_times,
        )

    def tail(self, handle: Handle) -> Tail:
        """Return the tail as it is now; `TopicDeleted` if the log is gone."""
        files = handle.files
        tail = self.tails.read(files.slot)
        if tail is None or not is_believed(tail, files):
            if tail is not None and tail.log_id != files.log_id:
                self.topic_directory.entry(files.topic.log_id)
            tail = handle.writer.ensure_recovered(proven=handle.proven)
        if tail.state == State.DELETED:
            self._handles.pop(Partition(files.topic.log_id, files.number), None)
            raise TopicDeleted(files.topic.log_id, topic=files.topic.name)
        handle.proven = max(handle.proven, tail.durable_end)
        return tail

    def head(self, handle: Handle, tail: Tail | None) -> int | None:
        """Return the readable end that a tail tells of, -1 if the log is gone; None if nobody knows it now.

        Nothing is recovered here, as that would write and wait; the keeper does it soon, or whoever reads.
        """
        files = handle.files
        if tail is None:
            tail = self.tails.read(files.slot)  # it was caught half written
        if tail is not None and tail.log_id != files.log_id:
            try:
                self.topic_directory.entry(files.topic.log_id)
            except TopicDeleted:
                return -1
        if not is_believed(tail, files):
            handle.unknown = True
            return None
        if tail.state == State.DELETED:
            self._handles.pop(Partition(files.topic.log_id, files.number), None)
            return -1
        handle.proven = max(handle.proven, tail.durable_end)
        return handle.readable_end(tail)

    def recover_unknown(self) -> None:
        """Recover the partitions whose heads nobody knew when they were asked for."""
        for handle in self.handles():
            if handle.unknown:
                try:
                    self.tail(handle)
                    handle.unknown = not is_believed(self.tails.read(handle.files.slot), handle.files)
                except TopicDeleted:
                    handle.unknown = False
                except (PenstockError, OSError) as error:  # which must not keep the others from being looked at
                    logger.warning("%s: its end will be looked for again: %s", handle.files, error)

    def faults(self) -> list[PartitionFault]:
        """Return the partitions that the tails say are not well; nothing is read or recovered for it."""
        found = []
        for entry in self.topic_directory.entries():
            topic = entry.topic
            for partition in topic.partitions:
                tail = self.tails.read(entry.slot + partition.number)
                # One of an earlier boot, or of a log that had the slot before, says nothing of this one.
                if tail is None or (tail.boot_id, tail.log_id) != (self._platform.boot_id, bytes.fromhex(topic.log_id)):
                    continue
                if tail.state in FAULTS:
                    found.append(
                        PartitionFault(
                            topic=topic.name,
                            partition=partition.number,
                            kind=tail.state.name.lower(),
                            fault=FAULTS[tail.state],
                        )
                    )
        return found

    # --- events ---------------------------------------------------------------------------------

    def append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        self.check_open()
        covered = sum(run.length for run in runs)
        if covered != len(batch) or batch.rows is not None or any(run.length < 1 for run in runs):
            raise UsageError(f"the runs cover {covered} of {len(batch)} events; they must cover each once")
        handle = self.handle(partition)
        if not runs:
            return []
        answers = handle.writer.append(batch, runs)
        handle.written_at = self._platform.clock.monotonic()
        self._notifier.notify(partition)
        return answers

    def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        self.check_open()

        def work(reader: PartitionReader, tail: Tail, end: int) -> list[Batch | Gap]:
            if start < tail.first:
                raise Trimmed.at(reader.where, start, tail.first, end)
            if start > end:
                raise BeyondEnd.at(reader.where, start, tail.first, end)
            return reader.read(start, end, bytes_max, events_max)

        return self._reading(self.handle(partition), work)

    def _reading(self, handle: Handle, work: Callable[[PartitionReader, Tail, int], R]) -> R:
        """Read with the tail and the readable end as they are now."""
        for attempt in range(READ_ATTEMPTS):
            tail = self.tail(handle)
            handle.reader.refresh(tail)
            try:
                return work(handle.reader, tail, handle.readable_end(tail))
            except FileNotFoundError:
                # Removed since the directory was looked at.
                if attempt == READ_ATTEMPTS - 1:
                    raise
                handle.reader.forget()
        raise AssertionError("unreachable")

    def bounds(self, partition: Partition) -> Range:
        self.check_open()
        handle = self.handle(partition)
        tail = self.tail(handle)
        return Range(tail.first, handle.readable_end(tail))

    def bounds_synced(self, partition: Partition, up_to: int) -> Range:
        """Return the bounds, the log being on the medium at least up to an offset, or up to its end."""
        handle = self.handle(partition)
        tail = self.tail(handle)
        if tail.durable_end < min(up_to, tail.end):
            handle.writer.ensure_durable(min(up_to, tail.end))
        return self.bounds(partition)

    def find_time(self, partition: Partition, time_us: int) -> int:
        self.check_open()
        return self._reading(
            self.handle(partition), lambda reader, tail, end: reader.find_time(time_us, tail.first, end)
        )

    def heads(self, partitions: Sequence[Partition]) -> FileHeads:
        self.check_open()
        handles = [self.handle(partition) for partition in partitions]
        return FileHeads(self, handles, [handle.readable_end(self.tail(handle)) for handle in handles])

    # --- removing -------------------------------------------------------------------------------

    def trim(self, partition: Partition, before: int, *, force: bool = False) -> int:
        self.check_open()
        handle = self.handle(partition)
        tail = self.tail(handle)
        end = handle.readable_end(tail)
        if before > end:
            raise BeyondEnd.at(handle.files, before, tail.first, end)
        if not force:
            protection = self._progress.protection(partition, tail.first)
            if protection is not None and protection[1] < before:
                name, passed = protection
                raise TrimRefused(
                    f"{handle.files}: subscription {name!r} has only passed offset {passed}, not {before}"
                )
        return handle.writer.trim(before) if before > tail.first else tail.first

    def retain(self) -> None:
        """Remove what the retention of each topic lets go."""
        for entry in self.topic_directory.entries():
            if entry.topic.settings.retention == Retention():
                continue
            for partition in entry.topic.partitions:
                try:
                    self._retain_partition(self.handle(partition), partition, entry.topic)
                except (PenstockError, OSError) as error:  # which must not keep the others from being looked at
                    logger.warning("%s/%d: retention will try again: %s", entry.topic.name, partition.number, error)

    def _retain_partition(self, handle: Handle, partition: Partition, topic: TopicInfo) -> None:
        tail = self.tail(handle)
        if tail.state == State.DAMAGED:
            return
        handle.reader.refresh(tail)
        protection = self._progress.protection(partition, tail.first)
        before = passed_by_retention(
            handle,
            tail,
            topic.settings.retention,
            protected=tail.end if protection is None else protection[1],
            now_us=self._drift.trusted_now(),
        )
        if before > tail.first:
            first = handle.writer.trim(before)
            logger.info("%s: retention removed offsets %d to %d", handle.files, tail.first, first)

    # --- witnesses ------------------------------------------------------------------------------

    def mark_idle(self, silence_seconds: float) -> None:
        """Give the last block of every partition that went silent a witness."""
        now = self._platform.clock.monotonic()
        for handle in self.handles():
            if handle.written_at is not None and now - handle.written_at >= silence_seconds:
                self._mark(handle)

    def _mark(self, handle: Handle, *, clean: bool = False) -> None:
        handle.written_at = None
        try:
            handle.writer.mark(clean=clean)
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and the next append will meet what is wrong
            logger.warning("%s: the last block got no witness: %s", handle.files, error)


class FileHeads:
    """The `Heads` of some partitions: one read for all, and nothing to decode while nothing has changed.

    What nobody knows without recovering the log stays as it was last known: here nothing is written or waited for.
    """

    def __init__(self, log: FileLog, handles: Sequence[Handle], heads: Sequence[int]) -> None:
        self._log = log
        self._tails = log.tails
        self._handles = list(handles)
        slots = [handle.files.slot for handle in handles]
        self._first = min(slots, default=0)
        self._count = max(slots, default=-1) - self._first + 1
        self._rows = np.array(slots, np.int64) - self._first
        self._read_raw = self._tails.raw_reader(self._first, self._count)
        self._raw = b""
        self._words = np.zeros(0, np.uint64)
        self._check_open = log.check_open
        # Replaced and never changed, so that it is handed out as it is.
        self._heads = np.array(heads, np.int64)

    def read(self) -> npt.NDArray[np.int64]:
        self._check_open()
        raw = self._read_raw()
        if raw != self._raw:
            self._decode(raw)
        return self._heads

    def _decode(self, raw: bytes) -> None:
        words = np.frombuffer(raw.ljust(self._count * RECORD_BYTES, b"\0"), np.uint64)
        changed = np.ones(self._count, np.bool_)
        if len(self._words) == len(words):
            changed[:] = False
            changed[np.flatnonzero(words != self._words) // (RECORD_BYTES // 8)] = True
        heads = self._heads.copy()
        # Of thousands of partitions only a few have grown since the last look.
        for index in np.flatnonzero(changed[self._rows]).tolist():
            start = int(self._rows[index]) * RECORD_BYTES
            head = self._log.head(self._handles[index], decode_tail(raw[start : start + RECORD_BYTES]))
            if head is not None:
                heads[index] = head
        heads.flags.writeable = False
        self._heads, self._words, self._raw = heads, words, raw
