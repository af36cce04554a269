"""Verifying a store: every byte of every segment, and every row of the small state. Nothing is changed.

It may run while the store is in use: of an active segment only what a believed tail calls durable is looked at. Each
damage is one of four kinds, with file, byte and offsets:

* `torn`: a write that was cut off, which the next opening removes; nobody was told that it is stored;
* `corrupt`: bytes that were on the medium have changed, or were cut off;
* `missing`: a segment that must be there is not;
* `foreign`: a file that belongs to another log.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.batch import Batch
from penstock.errors import InvalidBatch, StateMissing
from penstock.stores.file.block import Blank, Broken, Header, Kind, body_of
from penstock.stores.file.recovery import is_believed, testified_end
from penstock.stores.file.scan import CORRUPT, FOREIGN, MISSING, Damage, walk
from penstock.stores.file.segment import SegmentFile, SegmentName, segment_names
from penstock.stores.file.state.rebuild import examine
from penstock.stores.file.store import read_marker
from penstock.stores.file.tail import State, Tail, Tails
from penstock.stores.file.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import pyarrow as pa

    from penstock.stores.file.files import PartitionFiles
    from penstock.stores.file.platform import Platform


class PartitionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a partition holds, and what is wrong with it."""

    number: int
    first: int
    end: int
    segments: int
    blocks: int
    events: int
    gaps: int
    """Offsets that are declared lost."""
    bytes: int
    damages: list[Damage]
    leftovers: list[str]
    """Files that nothing refers to any more."""


class TopicReport(msgspec.Struct, frozen=True, kw_only=True):
    """The partitions of a topic."""

    name: str
    log_id: str
    partitions: list[PartitionReport]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was found."""

    store: str
    topics: list[TopicReport]
    state: list[str]
    """What is wrong with the small state, in words."""
    leftovers: list[str]

    @property
    def damages(self) -> list[Damage]:
        """All damage of all partitions."""
        return [damage for topic in self.topics for partition in topic.partitions for damage in partition.damages]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damages and not self.state


def verify(
    root: Path,
    platform: Platform,
    topics: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Look at everything, or at the named topics alone; `progress` is told the bytes seen and the bytes in all."""
    marker = read_marker(root, platform)
    tails = Tails(root / "tails", platform.disk)
    directory = Topics(platform, root, tails)
    entries = [entry for entry in directory.entries() if topics is None or entry.topic.name in topics]
    every = [
        directory.files(entry.topic.log_id, number)
        for entry in entries
        for number in range(entry.topic.settings.partitions)
    ]
    counter = _Counter(sum(sum(files.sizes().values()) for files in every), progress)
    reports = {str(files): _verify_in_use(files, tails, counter.add) for files in every}
    found = [
        TopicReport(
            name=entry.topic.name,
            log_id=entry.topic.log_id,
            partitions=[reports[f"{entry.topic.name}/{number}"] for number in range(entry.topic.settings.partitions)],
        )
        for entry in entries
    ]
    return Report(
        store=str(root),
        topics=found,
        state=_state(root, marker.store_id, platform) if topics is None else [],
        leftovers=[file for topic in found for partition in topic.partitions for file in partition.leftovers],
    )


def _state(root: Path, store_id: str, platform: Platform) -> list[str]:
    try:
        return examine(root, store_id, platform)
    except StateMissing as error:
        return [str(error)]


def _verify_in_use(files: PartitionFiles, tails: Tails, seen: Callable[[int], None]) -> PartitionReport:
    """Verify a partition that others may be trimming meanwhile: what retention has removed is not missing."""
    while True:
        first = files.read_first()
        with suppress(FileNotFoundError):
            report = verify_partition(files, tails.read(files.slot), seen)
            if not report.damages or files.read_first() == first:
                return report
        if files.read_first() == first:
            return verify_partition(files, tails.read(files.slot), seen)


class _Counter:
    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._total = total
        self._progress = progress
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        self._progress(min(self._done, self._total), self._total)


# --- one partition ------------------------------------------------------------------------------


class Opened(NamedTuple):
    """The segments of a partition as far as they can be opened."""

    files: list[SegmentFile]
    damages: list[Damage]
    leftovers: list[str]


def verify_partition(
    files: PartitionFiles, tail: Tail | None, seen: Callable[[int], None] = lambda _count: None
) -> PartitionReport:
    """Look at all segments of one partition."""
    believed = tail is not None and is_believed(tail, files) and tail.state not in {State.DAMAGED, State.DELETED}
    first = files.read_first()
    opened = open_segments(files, first, tail if believed else None)
    content = _Content()
    damages, end = list(opened.damages), first
    for index, file in enumerate(opened.files):
        following = opened.files[index + 1] if index + 1 < len(opened.files) else None
        if file.name.base > end and not _is_explained(opened.damages, end, file.name.base):
            damages.append(_missing(files, end, file))
        elif file.name.base < first and following is not None and following.name.base <= first:
            continue
        proven = tail.durable_position if believed and tail and _is_active(file, tail) else None
        content.begin(file, damages)
        walked = walk(
            file,
            sealed_at=_sealed_length(file, following),
            stop_offset=following.name.base if _follows(file, following) and following else None,
            proven_to=proven if following is None else None,
            visit=content.visit,
        )
        damages += walked.damages
        end = max(end, walked.end, *(damage.stop or 0 for damage in walked.damages), 0)
        seen(file.size())
    # Of another boot, too, it testifies to what was durable.
    witness = testified_end(tail) if tail and tail.log_id == files.log_id and tail.state != State.DELETED else 0
    if end < witness and not _is_explained(damages, end, witness):
        damages.append(
            Damage(MISSING, str(files.directory), 0, 0, end, witness, "the tail tells of more than is there")
        )
    return PartitionReport(
        number=files.number,
        first=first,
        end=max(end, tail.durable_end if believed and tail else 0),
        segments=len(opened.files),
        blocks=content.blocks,
        events=content.events,
        gaps=content.gaps,
        bytes=sum(file.size() for file in opened.files),
        damages=sorted(damages, key=lambda damage: (damage.start, damage.byte)),
        leftovers=opened.leftovers,
    )


def open_segments(files: PartitionFiles, first: int, tail: Tail | None) -> Opened:
    """Open every segment that can be; of two with one base the later counts, and one behind the active does not."""
    found, sizes = Opened([], [], []), files.sizes()
    everything = segment_names(files.disk, files.directory)
    if tail is not None:
        last = SegmentName(tail.segment_base, tail.segment_epoch)
        everything = [name for name in everything if tail.inode and name <= last]
    names = sorted({name.base: name for name in everything}.values())
    found.leftovers.extend(str(files.directory / str(name)) for name in everything if name not in names)
    for index, name in enumerate(names):
        stop = names[index + 1].base if index + 1 < len(names) else None
        path = files.directory / str(name)
        try:
            file = SegmentFile(files.disk, path, name)
        except (Blank, Broken) as error:
            detail, size = str(error) or "the file is empty", sizes.get(name, 0)
            found.damages.append(Damage(CORRUPT, str(path), 0, size, name.base, stop, detail))
            continue
        facts = file.facts
        if (facts.topic.log_id, facts.partition) != (files.topic.log_id, files.number):
            detail = f"it belongs to {facts.topic.name}/{facts.partition}, log {facts.topic.log_id}"
            found.damages.append(Damage(FOREIGN, str(path), 0, file.size(), name.base, stop, detail))
            continue
        if stop is not None and stop <= first:
            found.leftovers.append(str(path))
            continue
        found.files.append(file)
    return found


def _is_explained(damages: list[Damage], start: int, stop: int) -> bool:
    """Say whether a file that is there but cannot be read accounts for these offsets."""
    return any(damage.start <= start and (damage.stop is None or damage.stop >= stop) for damage in damages)


def _is_active(file: SegmentFile, tail: Tail) -> bool:
    return (file.name.base, file.name.epoch, file.inode) == (tail.segment_base, tail.segment_epoch, tail.inode)


def _follows(file: SegmentFile, following: SegmentFile | None) -> bool:
    """Say whether the next file is the very next segment."""
    if following is None:
        return False
    before = following.facts.predecessor
    return before is None or before.base <= file.name.base


def _sealed_length(file: SegmentFile, following: SegmentFile | None) -> int | None:
    """Return how long a sealed segment must be, if its successor knows."""
    before = following.facts.predecessor if following else None
    if before is None or (before.base, before.epoch) != file.name:
        return None
    return before.length


def _missing(files: PartitionFiles, end: int, file: SegmentFile) -> Damage:
    before = file.facts.predecessor
    name = files.directory / str(SegmentName(before.base, before.epoch)) if before else files.directory
    return Damage(MISSING, str(name), 0, 0, end, file.name.base, "the segment before this one is not there")


class _Content:
    """Counts what blocks hold, and checks that events can be read from them."""

    def __init__(self) -> None:
        self.blocks = self.events = self.gaps = 0
        self._file: SegmentFile | None = None
        self._damages: list[Damage] = []

    def begin(self, file: SegmentFile, damages: list[Damage]) -> None:
        self._file, self._damages = file, damages
        self.blocks += 1

    def visit(self, header: Header, content: pa.Buffer) -> None:
        self.blocks += 1
        if header.kind == Kind.GAP:
            self.gaps += header.span
        elif header.kind == Kind.DATA:
            self.events += header.span
            self._check(header, content)

    def _check(self, header: Header, content: pa.Buffer) -> None:
        try:
            batch = Batch.from_bytes(body_of(header, content), header.mask)
            wrong = None if len(batch) == header.span else f"it holds {len(batch)} events and says {header.span}"
        except (Broken, InvalidBatch) as error:
            wrong = str(error)
        if wrong is not None:
            assert self._file is not None
            where = (header.position, header.end_position, header.offset, header.end_offset)
            self._damages.append(Damage(CORRUPT, str(self._file.path), *where, wrong))
