"""Recovery: from the segments on the disk to a tail that can be believed.

It runs under the partition's turn, in one of two situations.

**Nobody knows how the log ends** (`recover`): the machine was started anew, the tails are gone, or the directory is a
copy. The active segment is walked over, block by block. A torn end is kept in quarantine, cut off and logged. Damage
that is proven makes the partition read-only until a `repair`; nothing is cut. Whatever testifies that the log was
longer (a cursor, a parked row, an old tail) makes a GAP: new offsets go above it, as cursors have passed those below.

**A sync has failed, or its process died during it** (`heal`): the kernel marks the pages of a failed sync as clean, and
a second sync of them succeeds without writing anything. So those pages are never synced again: the segment ends where
it was durable, the valid blocks behind that are copied into a new file, and that one is synced.

**The tail cannot be read** though the machine runs: it may have told of a failed sync, so all of the active segment is
copied. Nothing is written to the tail before that is done: whatever it said would be less than what others have read.
If it cannot be done, this process reads what is proven to be durable (`Doubt`), and tries it again from time to time.
"""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, TypeGuard

from penstock.errors import WritingStopped
from penstock.offsets import Range
from penstock.stores.file.block import (
    Blank,
    Broken,
    Header,
    Kind,
)
from penstock.stores.file.files import refused
from penstock.stores.file.rewrite import Blocks
from penstock.stores.file.scan import CORRUPT, FOREIGN, MISSING, TORN, Damage, Walked, headers_across, walk
from penstock.stores.file.segment import Predecessor, SegmentFile, SegmentName, segment_names
from penstock.stores.file.tail import State, Tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.deduplication import ProducerTable
    from penstock.producers import Run
    from penstock.stores.file.files import PartitionFiles

logger = logging.getLogger(__name__)

_LACKING: Final = {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE}
"""What says nothing about the disk, and passes."""
AGAIN_SECONDS: Final = 1.0
"""When a log could not be copied, its readers try it again after so long."""
LOST: Final = "lost: the log was shorter than what testifies to it"


class Recovered(NamedTuple):
    """How a partition's log ends."""

    tail: Tail
    damages: tuple[Damage, ...] = ()
    """What must be repaired before anything is written."""
    proven: int = 0
    """Up to where it is durable for sure, as its blocks tell, and those who have read it."""


class Doubt(NamedTuple):
    """How a log ends for the readers of this process, while its tail cannot be read and it could not be copied."""

    record: bytes
    """The tail as it was found; as soon as it is another one, this is void."""
    tail: Tail
    again_at: float = 0.0
    """When to try it again, on the monotonic clock."""

    def holds(self, record: bytes, now: float) -> bool:
        """Say whether this is all that is known now."""
        return self.record == record and now < self.again_at

    def tried(self, now: float) -> Doubt:
        """Return the same after it was tried again in vain."""
        return self._replace(again_at=now + AGAIN_SECONDS)

    def tail_for(self, proven: int) -> Tail:
        """Return the tail, for somebody who knows that the log was durable up to an offset."""
        return self.tail._replace(durable_end=max(self.tail.durable_end, min(proven, self.tail.end)))


def empty_tail(files: PartitionFiles, *, first: int = 0, epoch: int = 0) -> Tail:
    """Return the tail of a partition that has no segment yet."""
    return Tail(
        state=State.OPEN,
        witnessed=True,
        boot_id=files.platform.boot_id,
        log_id=files.log_id,
        epoch=epoch,
        segment_epoch=0,
        segment_base=0,
        inode=0,
        position=0,
        durable_position=0,
        number=0,
        durable_number=0,
        end=first,
        durable_end=first,
        first=first,
        max_time=0,
        turns=0,
    )


def is_believed(tail: Tail | None, files: PartitionFiles) -> TypeGuard[Tail]:
    """Say whether a tail is of this boot, and of this log."""
    return tail is not None and tail.boot_id == files.platform.boot_id and tail.log_id == files.log_id


def active_file(tail: Tail, files: PartitionFiles) -> SegmentFile | None:
    """Open the active segment; None if it is not the very file that the tail speaks of."""
    try:
        file = files.open(SegmentName(tail.segment_base, tail.segment_epoch))
    except (FileNotFoundError, Blank, Broken):
        return None
    return file if file.inode == tail.inode else None


def is_of_a_copy(tail: Tail, files: PartitionFiles) -> bool:
    """Say whether a tail speaks of another directory, which this one is a copy of."""
    return bool(tail.inode) and tail.state != State.DELETED and active_file(tail, files) is None


def testified_end(tail: Tail) -> int:
    """Return the offset that the log has reached, as a tail tells, be it believed or not."""
    # Of a damaged log, the end is what was testified when the damage was found.
    return tail.end if tail.state == State.DAMAGED else tail.durable_end


# --- nobody knows how the log ends --------------------------------------------------------------


def recover(files: PartitionFiles, old: Tail | None, witness: int) -> Recovered:
    """Find out how the log ends; `old` is a tail that is not believed, `witness` an offset that the log has reached."""
    return _recover(files, old, witness, doubts=False)


def recover_in_doubt(files: PartitionFiles, witness: int) -> Recovered:
    """Find out how a log ends that has had a failed sync, perhaps: nothing in its active segment counts as durable.

    The tail says so, and is to be healed. If the log is damaged, or there is no segment, it is as `recover` says.
    """
    return _recover(files, None, witness, doubts=True)


def _recover(files: PartitionFiles, old: Tail | None, witness: int, *, doubts: bool) -> Recovered:
    first = files.read_first()
    if old is not None and old.log_id == files.log_id:
        witness = max(witness, testified_end(old))
    epoch = max((name.epoch for name in files.names()), default=0)
    epoch = max(epoch, old.epoch if old is not None and old.log_id == files.log_id else 0) + 1
    file, damages = _active_segment(files, witness)
    if file is None:
        base = empty_tail(files, first=first, epoch=epoch)
        if not damages and witness > first:
            damages = (Damage(MISSING, str(files.directory), 0, 0, first, witness, "there is no segment at all"),)
        if damages:
            end = max(witness, first)
            return Recovered(base._replace(state=State.DAMAGED, end=end, durable_end=end), damages)
        return Recovered(base)
    claims = [witness, file.name.base, *(_claims_of_superseded(files, file.name) if doubts else ())]
    walked = walk(file, visit=lambda header, _: claims.append(header.durable_offset))
    # Damage that concerns no offset (a marker, the filling behind a block) is for `verify` to report.
    damages = tuple(damage for damage in walked.damages if damage.kind == CORRUPT and damage.start != damage.stop)
    for torn in (damage for damage in walked.damages if damage.kind == TORN):
        _cut_torn(files, file, torn)
    tail = _tail_of(files, file, walked, first=first, epoch=max(epoch, walked.epoch))
    if damages:
        for damage in damages:
            logger.error("%s is read-only until it is repaired: %s", files, damage.error())
        return Recovered(tail._replace(state=State.DAMAGED, end=max(tail.end, witness)), damages)
    if not doubts:
        # What can be read now may be in memory alone, the file's name included, if the one who wrote it was killed.
        files.disk.sync(file.descriptor)
        files.disk.sync_directory(files.directory)
    if tail.end < witness:
        tail = _declare_lost(files, file, tail, witness)
    return Recovered(_doubted(file, tail) if doubts else tail, proven=max(claims))


def _active_segment(files: PartitionFiles, witness: int) -> tuple[SegmentFile | None, tuple[Damage, ...]]:
    """Return the last segment, if it is one of this log that can be read."""
    names = files.names()
    if not names:
        return None, ()
    name = names[-1]
    path = files.directory / str(name)
    try:
        file = files.open(name)
    except (Blank, Broken) as error:
        # It got its name when its first block was on the medium: this is damage.
        detail = str(error) or "the file is empty"
        return None, (Damage(CORRUPT, str(path), 0, 0, name.base, max(witness, name.base), detail),)
    facts = file.facts
    if (facts.topic.log_id, facts.partition) != (files.topic.log_id, files.number):
        whose = f"it is of {facts.topic.name}/{facts.partition}, log {facts.topic.log_id}"
        return None, (Damage(FOREIGN, str(path), 0, 0, name.base, max(witness, name.base), whose),)
    return file, ()


def _claims_of_superseded(files: PartitionFiles, name: SegmentName) -> list[int]:
    """Return what blocks say was durable that were copied to this segment; the copies do not say it any more."""
    claims: list[int] = []
    for old in segment_names(files.disk, files.directory):
        if old.base == name.base and old.epoch < name.epoch:
            with suppress(Blank, Broken):
                walk(files.open(old), visit=lambda header, _: claims.append(header.durable_offset))
    return claims


def _cut_torn(files: PartitionFiles, file: SegmentFile, torn: Damage) -> None:
    size = file.size()
    kept = files.quarantine(file, torn.byte, size)
    files.disk.truncate(file.descriptor, torn.byte)
    files.disk.sync(file.descriptor)
    logger.warning(
        "%s: the last write was cut off (%s, byte %d, offset %d: %s). Nobody was told that it is stored. "
        "It was removed, and is kept as %s",
        files,
        file.name,
        torn.byte,
        torn.start,
        torn.detail,
        kept,
    )


def _tail_of(files: PartitionFiles, file: SegmentFile, walked: Walked, *, first: int, epoch: int) -> Tail:
    return Tail(
        state=State.OPEN,
        witnessed=walked.last.kind in {Kind.MARKER, Kind.SEGMENT},
        boot_id=files.platform.boot_id,
        log_id=files.log_id,
        epoch=epoch,
        segment_epoch=file.name.epoch,
        segment_base=file.name.base,
        inode=file.inode,
        position=walked.position,
        durable_position=walked.position,
        number=walked.number,
        durable_number=walked.number,
        end=walked.end,
        durable_end=walked.end,
        first=first,
        max_time=walked.max_time,
        turns=0,
    )


def _doubted(file: SegmentFile, tail: Tail) -> Tail:
    """Return the tail with nothing of its active segment proven to be durable, so that all of it is copied."""
    return tail._replace(
        state=State.POISONED,
        durable_position=file.first.end_position,
        durable_number=file.first.number + 1,
        durable_end=tail.segment_base,
    )


def _declare_lost(files: PartitionFiles, file: SegmentFile, tail: Tail, witness: int) -> Tail:
    """Occupy what is missing below a witness, so that nobody gets those offsets again."""
    logger.error(
        "%s: DATA LOSS. The log ends at offset %d, but %d was reached before (a cursor, a parked row or the tail "
        "testifies to it). The offsets between are declared lost; new events go above them",
        files,
        tail.end,
        witness,
    )
    lost = Blocks(offset=tail.end, number=tail.number, epoch=tail.epoch)
    lost.declare_lost(witness, LOST, files.platform.clock.time_us())
    [data] = lost.encode(file.segment, tail.position)
    if files.disk.write(file.descriptor, data, tail.position) != len(data):
        raise OSError(f"{file.path} was written in part")
    files.disk.sync(file.descriptor)
    position, number = tail.position + len(data), tail.number + 1
    return tail._replace(
        position=position,
        durable_position=position,
        number=number,
        durable_number=number,
        end=witness,
        durable_end=witness,
        witnessed=False,
    )


# --- a sync has failed --------------------------------------------------------------------------


def heal(files: PartitionFiles, tail: Tail) -> Tail:
    """Copy what is valid behind the durable part of the active segment into a new one; returns its tail.

    Once that is written, `forget_unproven` is to follow: until then the old segment is all that the tail speaks of.
    """
    if tail.state == State.POISONED:
        logger.error("%s: a sync has failed; what was not proven durable is copied to a new segment", files)
    else:
        logger.warning(
            "%s: a process died during a sync; what was not proven durable is copied to a new segment", files
        )
    try:
        return _copy_unproven(files, tail)
    except OSError as error:
        if error.errno in _LACKING:
            raise refused(f"{files}: what was not proven durable could not be copied yet", error) from error
        raise WritingStopped(
            f"{files}: a sync failed, and copying what was not proven durable failed, too ({error}). Nothing is "
            f"written before that works: look at the disk, then open the store anew"
        ) from error


def _copy_unproven(files: PartitionFiles, tail: Tail) -> Tail:
    old = files.open(SegmentName(tail.segment_base, tail.segment_epoch))
    name = SegmentName(tail.durable_end, tail.epoch + 1)
    superseded = name.base == old.name.base
    predecessor = Predecessor(
        old.name.base, old.name.epoch, tail.durable_position, tail.durable_end, tail.durable_number
    )
    copied = Blocks(offset=name.base, number=tail.durable_number + 1, epoch=name.epoch)
    try:
        for header, _ in old.headers(tail.durable_position, tail.position):
            copied.add(header, old.read_content(header))
    except (Blank, Broken) as error:
        logger.warning("%s: what was written behind offset %d is not whole: %s", files, copied.offset, error)
    file = files.create_segment(
        name,
        number=tail.durable_number,
        max_time=latest_time(old, tail.durable_position),
        producers=producers_up_to(old, tail.durable_position),
        predecessor=old.facts.predecessor if superseded else predecessor,
        blocks=copied.encode,
    )
    return tail._replace(
        state=State.OPEN,
        witnessed=False,
        epoch=name.epoch,
        segment_epoch=name.epoch,
        segment_base=name.base,
        inode=file.inode,
        position=file.size(),
        durable_position=file.size(),
        number=copied.number,
        durable_number=copied.number,
        end=copied.offset,
        durable_end=copied.offset,
    )


def forget_unproven(files: PartitionFiles, tail: Tail, healed: Tail) -> None:
    """End the segment of `tail` where it was durable, and remove what the healed one supersedes."""
    old = SegmentName(tail.segment_base, tail.segment_epoch)
    new = SegmentName(healed.segment_base, healed.segment_epoch)
    try:
        if old.base != new.base:
            file = files.open(old)
            files.disk.truncate(file.descriptor, tail.durable_position)
        # The old one, if nothing in it was durable; or one that a roll was making when it was cut off.
        same = [name for name in segment_names(files.disk, files.directory) if name.base == new.base]
        files.remove([name for name in same if name.epoch < new.epoch])
    except OSError as error:
        logger.warning("%s: %s could not be cut to its durable part: %s; readers stop there anyway", files, old, error)


def producers_up_to(file: SegmentFile, position: int) -> ProducerTable:
    """Return the producers as they were when a segment was written up to a position."""
    producers = file.producers()
    for header, runs in headers_across(file, position):
        remember(producers, header, runs)
    return producers


def latest_time(file: SegmentFile, position: int) -> int:
    """Return the latest append time in a segment up to a position, and before the segment."""
    times = [header.last_time for header, _ in headers_across(file, position) if header.span]
    return max([file.facts.max_time, *times])


def remember(producers: ProducerTable, header: Header, runs: Sequence[Run]) -> None:
    """Note the runs of a block."""
    start = header.offset
    for run in runs:
        producers.remember(run, Range(start, start + run.length), header.last_time)
        start += run.length
