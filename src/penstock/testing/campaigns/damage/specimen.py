"""The store that is damaged: small, and with something of everything in it.

Three partitions are filled alike, so that their segments have the same names: two of one topic and one of another. The
first of them has lost its beginning to retention, and so consists of one sealed segment and the active one. Blocks hold
runs of several producers, some are compressed, some are markers, and the payload of one event is a whole block. The
store is closed cleanly, so that the last block has its witness.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.clock import VirtualClock
from penstock.rows import Manifest, Scheduled, TopicInfo, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.block import FRONT_BYTES, Header, Kind
from penstock.stores.file.platform import Platform, SystemDisk, connect_sqlite
from penstock.stores.file.scan import walk
from penstock.stores.file.segment import SegmentFile, SegmentName, segment_names
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import (
    OTHER_PRODUCER,
    PRODUCER,
    a_cursor,
    a_parked,
    a_part,
    a_shard,
    acquired,
    an_event,
    append,
    commit,
    park,
    subscribe,
)
from penstock.testing.machine.plain import HastyDisk

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from penstock.rows import Partition
    from penstock.stores.file.tail import Tail

BOOT: Final = b"the first boot.."
NEXT_BOOT: Final = b"the next boot..."
SEGMENT_BYTES: Final = 8_800
STEPS: Final = 34
REOPENED_AT: Final = (4, 12, 21, 27, 30)
"""A marker stands before the appends of these steps; once it is the last block of a segment."""
TOPIC, OTHER_TOPIC = "orders", "others"
SUBSCRIPTION: Final = "billing"
LEASE: Final = "lease"


class Block(NamedTuple):
    """A block of a segment, as it was before any damage."""

    kind: Kind
    position: int
    content_stop: int
    """Behind its content, where its filling begins."""
    end_position: int
    start: int
    stop: int
    """Its offsets."""


class Layout(NamedTuple):
    """A segment, as it was before any damage."""

    name: SegmentName
    blocks: tuple[Block, ...]
    """The first is the segment's own."""
    next_base: int | None
    """Where the next segment begins; None for the active one."""

    @property
    def end_position(self) -> int:
        """Where the next block would go."""
        return self.blocks[-1].end_position


@dataclass
class Log:
    """A partition of the specimen: its files, and what is in them."""

    topic: TopicInfo
    number: int
    slot: int
    directory: Path
    payloads: dict[int, bytes] = field(default_factory=dict)
    """What was appended, by offset."""
    earlier: dict[str, list[bytes]] = field(default_factory=dict)
    """What each file was after each step."""
    first: int = 0
    files: dict[Path, bytes] = field(default_factory=dict)
    inodes: dict[Path, int] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)
    tail: Tail | None = None

    @property
    def partition(self) -> Partition:
        """What the store calls it."""
        return self.topic.partitions[self.number]

    @property
    def end(self) -> int:
        """The offset after the last event."""
        return len(self.payloads)

    def path(self, layout: Layout) -> Path:
        """Return the path of a segment."""
        return self.directory / str(layout.name)

    def remember(self) -> None:
        """Note what its files are now."""
        for path in self.directory.glob("*.seg"):
            self.earlier.setdefault(path.name, []).append(path.read_bytes())

    def read(self, tail: Tail | None) -> None:
        """Read its files, once the store is closed."""
        self.tail = tail
        for path in sorted(self.directory.iterdir()):
            self.files[path] = path.read_bytes()
            self.inodes[path] = path.stat().st_ino
        names = segment_names(SystemDisk(), self.directory)
        for index, name in enumerate(names):
            following = names[index + 1].base if index + 1 < len(names) else None
            self.layouts.append(_layout_of(self.directory / str(name), name, following))
        self.first = names[0].base


def _layout_of(path: Path, name: SegmentName, next_base: int | None) -> Layout:
    file = SegmentFile(SystemDisk(), path, name)
    stop = walk(file).position
    headers = [file.first, *(header for header, _ in file.headers(file.first.end_position, stop))]
    return Layout(name, tuple(_block_of(header) for header in headers), next_base)


def _block_of(header: Header) -> Block:
    stop = header.content_position + header.content_length
    return Block(header.kind, header.position, stop, header.end_position, header.offset, header.end_offset)


def small_pages(path: Path) -> sqlite3.Connection:
    """Open a database whose pages are as small as SQLite has them, if it is new: fewer bytes that say nothing."""
    connection = connect_sqlite(path)
    connection.execute("PRAGMA page_size = 512")
    return connection


def a_platform(chance: random.Random, boot_id: bytes = BOOT) -> Platform:
    """Return the machine's own files, with a clock and chance that are the same every time."""
    return Platform(
        disk=HastyDisk(), clock=VirtualClock(), random=chance.randbytes, boot_id=boot_id, connect=small_pages
    )


def open_store(root: Path, platform: Platform) -> FileStore:
    """Open the specimen, or a copy of it."""
    settings = FileSettings(
        segment_bytes=SEGMENT_BYTES,
        allocate_bytes=2_048,
        marker_seconds=3600.0,
        retain_seconds=3600.0,
        runtime_directory=str(root.parent),
    )
    return FileStore(root, settings=settings, platform=platform)


class Specimen:
    """The store, in a directory of its own, and all that is known of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        platform = a_platform(random.Random(0))
        store = open_store(root, platform)
        topics = [store.log.create_topic(TOPIC, _settings(2, 0)), store.log.create_topic(OTHER_TOPIC, _settings(1, 0))]
        self.topic = topics[0]
        self.logs = [
            Log(topic, number, slot + number, root / "topics" / topic.log_id / str(number))
            for topic, slot in zip(topics, (0, 2), strict=True)
            for number in range(topic.settings.partitions)
        ]
        for step in range(STEPS):
            if step in REOPENED_AT:
                store.close()
                store = open_store(root, platform)
            for topic in topics:
                store.log.create_topic(topic.name, _settings(topic.settings.partitions, step))
            for log in self.logs:
                self._append(store, log, step)
        _put_state(store, self.topic)
        for log in self.logs:
            bases = [name.base for name in segment_names(SystemDisk(), log.directory)]
            for base in bases[1:]:
                store.log.read(log.partition, base - 1, bytes_max=1)  # which writes the index of that segment
            if log is self.logs[0]:
                store.log.trim(log.partition, bases[-2], force=True)
        tails = store.log.tails
        store.close()
        for log in self.logs:
            log.read(tails.read(log.slot))

    def _append(self, store: FileStore, log: Log, step: int) -> None:
        payloads = [b"%d:%d:" % (log.slot, step) + b"abcd" * (40 + 37 * step % 90)]
        if step % 5 == 2:
            # What looks like a block and is none: the last one that was written, in full.
            image = log.earlier[max(log.earlier)][-1]
            payloads.append(image[image.rindex(b"PENSTOCK") :][: 3 * FRONT_BYTES])
        first = len(log.payloads)
        parts = [a_part(*payloads, producer=PRODUCER, first=first)]
        if step % 3 == 0:
            payloads.append(b"another's")
            parts.append(a_part(payloads[-1], producer=OTHER_PRODUCER, first=first))
        append(store, log.partition, *parts)
        log.payloads.update(enumerate(payloads, first))
        log.remember()


def _settings(partitions: int, step: int) -> TopicSettings:
    return TopicSettings(partitions=partitions, compression="zstd" if step % 4 == 1 else "none")


def _put_state(store: FileStore, topic: TopicInfo) -> None:
    """Put a row into every table."""
    subscribe(store, topic, policy={"max": 3})
    shard = a_shard(topic)
    commit(store, a_cursor(shard, 2, settled=b"\2", attempts={3: 1}), settlement=b"to 2")
    commit(store, a_cursor(a_shard(topic, slot=1), 1), settlement=b"to 1")
    park(store, *(a_parked(shard, offset, error_type="ValueError", error_message="text") for offset in (0, 1)))
    park(store, a_parked(shard, 3, state="waiting", due_at=5))
    lease = acquired(store, LEASE, seconds=1e9)
    rows = [Scheduled(id=name, log_id=topic.log_id, partition=0, due_at=5, event=an_event()) for name in "abc"]
    store.schedule.add(rows)
    store.schedule.claim(5, 1, lease.fence)
    for batch in range(2):
        store.manifests.prepare(Manifest(sink="lake", query="q", batch=batch, body=b"body %d" % batch))
    store.manifests.finish("lake", "q", 0)
