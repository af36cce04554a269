"""Topics as directories: which there are, making them, and removing them.

::

    topics/<log id>/topic.json         name, settings, the slot of its first partition in the tails
    topics/<log id>/deleted.json       the same file, renamed: the topic is gone, and what is left will be
    topics/<log id>/<partition>/       its segments

Directories are named by log id, never by a topic's name. A topic exists from the moment when `topic.json` is durable,
and no longer from the moment when it is renamed; everything else is prepared before and tidied up after, and whoever
opens the store next finishes what a crash has left. A lost `topic.json` is written anew from a segment, which says all
of it, too.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.deduplication import ProducerTable
from penstock.errors import StoreFull, TopicDeleted, UsageError
from penstock.rows import TopicInfo
from penstock.stores.file.block import Blank, Broken
from penstock.stores.file.files import PartitionFiles, replace_file
from penstock.stores.file.recovery import empty_tail
from penstock.stores.file.segment import SegmentFile, SegmentName, segment_names
from penstock.stores.file.tail import Tails, encode_tail

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.rows import TopicSettings
    from penstock.stores.file.platform import Platform

logger = logging.getLogger(__name__)

SLOTS_MAX: Final = 1 << 20
_TOPIC: Final = "topic.json"
_DELETED: Final = "deleted.json"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What `topic.json` says."""

    topic: TopicInfo
    slot: int
    """Of partition 0; the others follow."""


_read_entry = msgspec.json.Decoder(Entry).decode  # built here: two threads must not build one type's at once


class Topics:
    """The directory of all topics. Changes are made under the store's gate for topics."""

    def __init__(self, platform: Platform, root: Path, tails: Tails) -> None:
        self._platform = platform
        self._disk = platform.disk
        self._directory = root / "topics"
        self._quarantine = root / "quarantine"
        self._tails = tails
        self._entries: dict[str, Entry] = {}

    # --- looking --------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        """Return all topics by name, as they are now."""
        found = {}
        for log_id in self._disk.names(self._directory):
            entry = self._read(log_id, _TOPIC)
            if entry is not None:
                found[log_id] = entry
        self._entries = found
        return sorted(found.values(), key=lambda entry: entry.topic.name)

    def entry(self, log_id: str) -> Entry:
        """Return a topic that exists; `TopicDeleted` if it does not."""
        entry = self._entries.get(log_id)
        if entry is None or not self._disk.exists(self._directory / log_id / _TOPIC):
            entry = self._read(log_id, _TOPIC)
            if entry is None:
                self._entries.pop(log_id, None)
                raise TopicDeleted(log_id)
            self._entries[log_id] = entry
        return entry

    def files(self, log_id: str, number: int) -> PartitionFiles:
        """Return the files of a partition that exists; `UsageError` if the topic has no such partition."""
        entry = self.entry(log_id)
        if not 0 <= number < entry.topic.settings.partitions:
            raise UsageError(f"log {log_id} has no partition {number}")
        return self._files(entry, number)

    def _files(self, entry: Entry, number: int) -> PartitionFiles:
        return PartitionFiles(
            self._platform,
            self._directory / entry.topic.log_id / str(number),
            quarantine=self._quarantine,
            topic=entry.topic,
            number=number,
            slot=entry.slot + number,
        )

    def _read(self, log_id: str, name: str) -> Entry | None:
        try:
            descriptor = self._disk.open(self._directory / log_id / name, write=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            data = self._disk.read(descriptor, self._disk.size(descriptor), 0)
        finally:
            self._disk.close(descriptor)
        try:
            return _read_entry(data)
        except ValueError as error:  # what msgspec raises, and text that is no UTF-8
            logger.warning("%s/%s cannot be read: %s; a segment says the same", log_id, name, error)
            return self._rebuild(log_id)

    # --- making ---------------------------------------------------------------------------------

    def create(self, name: str, settings: TopicSettings) -> TopicInfo:
        """Make a topic, or return the one of this name, with its retention as it is said now."""
        if settings.partitions < 1:
            raise UsageError(f"topic {name!r} needs at least one partition, not {settings.partitions}")
        for entry in self.entries():
            if entry.topic.name == name:
                return self._agreed(entry, settings)
        info = TopicInfo(
            name=name,
            log_id=self._platform.random(16).hex(),
            settings=settings,
            created_at=self._platform.clock.time_us(),
        )
        entry = Entry(topic=info, slot=self._free_slots(settings.partitions))
        self._prepare(entry)
        self._write(entry)
        return info

    def _agreed(self, entry: Entry, settings: TopicSettings) -> TopicInfo:
        info = entry.topic
        if info.settings.fixed != settings.fixed:
            raise info.mismatch(settings)
        if info.settings != settings:
            info = msgspec.structs.replace(info, settings=settings)
            self._write(Entry(topic=info, slot=entry.slot))
        return info

    def _used_slots(self) -> list[tuple[int, int]]:
        """Return the slots of all topics, in ascending order."""
        used = []
        for log_id in self._disk.names(self._directory):
            entry = self._read(log_id, _TOPIC) or self._read(log_id, _DELETED)
            if entry is not None:
                used.append((entry.slot, entry.slot + entry.topic.settings.partitions))
        return sorted(used)

    def _free_slots(self, count: int) -> int:
        """Return the first of so many free slots in a row."""
        slot = 0
        for start, stop in self._used_slots():
            if slot + count <= start:
                break
            slot = max(slot, stop)
        if slot + count > SLOTS_MAX:
            raise StoreFull(f"a store has at most {SLOTS_MAX:,} partitions: delete topics that nobody needs")
        return slot

    def _prepare(self, entry: Entry) -> None:
        """Make what a topic needs before it exists: its tails, and a segment that can say what the topic is."""
        self._disk.make_directory(self._directory / entry.topic.log_id)
        # Before anybody can find the topic: whoever does may acknowledge events, and this process be killed meanwhile.
        self._disk.sync_directory(self._directory)
        first = self._files(entry, 0)
        tail = empty_tail(first)
        segment = first.create_segment(
            SegmentName(0, 0), number=0, max_time=0, producers=ProducerTable(), predecessor=None
        )
        begun = tail._replace(
            inode=segment.inode, position=segment.size(), durable_position=segment.size(), number=1, durable_number=1
        )
        rest = encode_tail(tail) * (entry.topic.settings.partitions - 1)
        self._tails.write_raw(entry.slot, encode_tail(begun) + rest)

    def _write(self, entry: Entry) -> None:
        directory = self._directory / entry.topic.log_id
        replace_file(self._platform, directory / _TOPIC, msgspec.json.encode(entry))
        self._entries[entry.topic.log_id] = entry

    # --- removing -------------------------------------------------------------------------------

    def delete(self, log_id: str) -> list[PartitionFiles]:
        """End a topic, durably; returns its partitions, whose tails are to be marked, and `remove` is to follow."""
        entry = self.entry(log_id)
        directory = self._directory / log_id
        self._disk.rename(directory / _TOPIC, directory / _DELETED)
        self._disk.sync_directory(directory)
        self._entries.pop(log_id, None)
        return [self._files(entry, number) for number in range(entry.topic.settings.partitions)]

    def remove(self, log_id: str) -> None:
        """Remove what is left of a topic that was ended."""
        directory = self._directory / log_id
        for name in self._disk.names(directory):
            if name.isdigit():
                for file in self._disk.names(directory / name):
                    self._disk.remove(directory / name / file)
                self._disk.remove_directory(directory / name)
        # The last file to go says which slots are not free yet, and that the topic was ended: a segment that came back
        # after it is gone would bring back the topic.
        self._disk.sync_directory(directory)
        for name in self._disk.names(directory):
            self._disk.remove(directory / name)
        self._disk.remove_directory(directory)
        self._disk.sync_directory(self._directory)

    # --- after a crash --------------------------------------------------------------------------

    def tidy(self, finish: Callable[[str, list[PartitionFiles]], None]) -> None:
        """Finish what a crash has left: topics half deleted, and ones whose `topic.json` is lost."""
        for log_id in self._disk.names(self._directory):
            if self._disk.exists(self._directory / log_id / _TOPIC):
                # What was damaged is read from a segment; write that, or it would be so for ever.
                if (entry := self._read(log_id, _TOPIC)) is not None and not self._is_whole(entry):
                    self._write(entry)
                continue
            deleted = self._read(log_id, _DELETED)
            if deleted is not None:
                partitions = range(deleted.topic.settings.partitions)
                finish(log_id, [self._files(deleted, number) for number in partitions])
            elif (entry := self._rebuild(log_id)) is not None:
                logger.warning("topic %r: its topic.json was lost and is written anew", entry.topic.name)
                self._write(self._with_own_slots(entry))

    def _with_own_slots(self, entry: Entry) -> Entry:
        """Return a topic with slots that are nobody else's: those of one that was never finished were given away."""
        count = entry.topic.settings.partitions
        if any(start < entry.slot + count and entry.slot < stop for start, stop in self._used_slots()):
            return Entry(topic=entry.topic, slot=self._free_slots(count))
        return entry

    def _is_whole(self, entry: Entry) -> bool:
        descriptor = self._disk.open(self._directory / entry.topic.log_id / _TOPIC, write=False)
        try:
            return self._disk.read(descriptor, self._disk.size(descriptor), 0) == msgspec.json.encode(entry)
        finally:
            self._disk.close(descriptor)

    def _rebuild(self, log_id: str) -> Entry | None:
        """Return what any segment says of the topic; None if none says anything, or the name is another's now."""
        directory = self._directory / log_id
        for number in filter(str.isdigit, self._disk.names(directory)):
            for name in segment_names(self._disk, directory / number):
                try:
                    facts = SegmentFile(self._disk, directory / number / str(name), name).facts
                except (Blank, Broken):
                    continue
                taken = {entry.topic.name for entry in self._entries.values() if entry.topic.log_id != log_id}
                if facts.topic.log_id == log_id and facts.topic.name not in taken:
                    return Entry(topic=facts.topic, slot=facts.slot - facts.partition)
        return None
