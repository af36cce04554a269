"""Writing a partition: appends in groups, the roll to the next segment, markers, trimming.

**A turn** begins with the tail that the writer before has left. What others have appended since this process's last
turn is caught up from the headers, so that every writer knows the producers of all. If that writer died during a sync,
or its sync failed, the log is healed first; if nobody knows how the log ends, it is recovered.

**An append**, in this order: allocate space (a full disk is found here, before anything is accepted), write the blocks
with one call, note in the tail that a sync begins, sync, note what is durable, give the turn back, answer. Offsets are
given at the moment of the write. What goes wrong before the sync is cut off again and surely not stored; a sync that
fails poisons the segment, and those who wait get an error that is not a `PenstockError`: unknown.
"""

from __future__ import annotations

import errno
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from penstock.deduplication import ProducerTable
from penstock.errors import Corruption, NewerFormat, StoreError, TopicDeleted, WritingStopped
from penstock.offsets import Range
from penstock.rows import Appended
from penstock.stores.file.block import FRONT_BYTES, Blank, Broken
from penstock.stores.file.commit import Content, Group, Queue, Request, encode_data_block, encode_marker
from penstock.stores.file.files import refused
from penstock.stores.file.recovery import (
    Doubt,
    active_file,
    empty_tail,
    forget_unproven,
    heal,
    is_believed,
    is_of_a_copy,
    producers_up_to,
    recover,
    recover_in_doubt,
    remember,
)
from penstock.stores.file.segment import Predecessor, SegmentFile, SegmentName
from penstock.stores.file.tail import State, Tail, Tails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import pyarrow as pa

    from penstock.batch import Batch
    from penstock.metrics import Histogram
    from penstock.producers import Run
    from penstock.settings import FileSettings
    from penstock.stores.file.files import PartitionFiles
    from penstock.stores.file.gate import Gate
    from penstock.stores.file.scan import Damage

logger = logging.getLogger(__name__)

SEGMENT_BYTES_MAX: Final = (1 << 32) - (256 << 20)
"""Positions are 32 bits wide in the tail, and a block may go over the end of its segment."""


class PartitionWriter:
    """What this process writes to one partition. Safe for several threads; writers of other processes take turns."""

    def __init__(
        self,
        files: PartitionFiles,
        gate: Gate,
        tails: Tails,
        settings: FileSettings,
        witness: Callable[[], int],
        *,
        sync_times: Histogram,
    ) -> None:
        self._files = files
        self._sync_times = sync_times
        self._gate = gate
        self._tails = tails
        self._settings = settings
        self._witness = witness
        self._syncs = files.topic.settings.durability == "sync"
        self._queue = Queue(self._commit)
        # What this process knows, of the moment when it last had the turn; without a file, nothing.
        self._tail = empty_tail(files)
        self._file: SegmentFile | None = None
        self._allocated = 0
        self._producers = ProducerTable()
        self._caught_up = 0
        """Up to where in the active segment the producers are known."""
        self._known = False
        self._stopped: WritingStopped | None = None
        self._damages: tuple[Damage, ...] = ()
        self._doubt: Doubt | None = None

    # --- turns ----------------------------------------------------------------------------------

    def _turn(self) -> AbstractContextManager[None]:
        return self._gate.turn(self._files, self._settings.stall_seconds, progress=self._progress)

    def _progress(self) -> bytes:
        return self._tails.read_raw(self._files.slot, 1)

    @contextmanager
    def turn(self) -> Iterator[Tail]:
        """Hold the turn, with everything known that others have written."""
        with self._turn(), self._taken_over() as tail:
            yield tail

    @contextmanager
    def _taken_over(self) -> Iterator[Tail]:
        """Know everything that others have written; under the turn."""
        self._take_over()
        try:
            yield self._tail
        except BaseException:
            # What this turn has noted of producers may not be stored: all is learnt anew from the segment.
            self._known, self._file = False, None
            raise
        self._caught_up = self._tail.position

    def ensure_recovered(self, *, check_inode: bool = False, proven: int = 0) -> Tail:
        """Return a tail that is believed, recovering the log if there is none; or what is known while that fails.

        With `check_inode`, also look whether it speaks of this very directory and not of one that this is a copy of.
        `proven` is an offset up to which the log was durable already.
        """
        tail = self._tails.read(self._files.slot)
        if is_believed(tail, self._files) and not (check_inode and is_of_a_copy(tail, self._files)):
            return tail
        now = self._files.platform.clock.monotonic()
        if self._doubt is not None and self._doubt.holds(self._progress(), now):
            return self._doubt.tail_for(proven)
        try:
            with self._turn(), suppress(Corruption):  # it can still be read
                self._take_over()
        except (StoreError, OSError) as error:
            told = isinstance(error, TopicDeleted | NewerFormat)
            if told or self._doubt is None or self._doubt.record != self._progress():
                raise
            self._doubt = self._doubt.tried(now)
            return self._doubt.tail_for(proven)
        return self._tail

    def _take_over(self) -> None:
        """Learn what the writers before have left; raises if nothing may be written."""
        if self._stopped is not None:
            raise self._stopped
        # In every turn: a deletion that found the turn taken has not told the tail, and slots are given away again.
        if not self._files.disk.exists(self._files.topic_path):
            raise TopicDeleted(self._files.topic.log_id, topic=self._files.topic.name)
        if self._known and self._tails.is_still(self._files.slot, self._tail):
            return
        self._known = False
        tail = self._tails.read(self._files.slot)
        if tail is not None and tail.state == State.DELETED and tail.log_id == self._files.log_id:
            raise TopicDeleted(self._files.topic.log_id, topic=self._files.topic.name)
        if tail is None or not is_believed(tail, self._files):
            tail = self._recover(tail)
        try:
            if tail.state in {State.SYNCING, State.POISONED}:
                tail = self._heal(tail)
            self._adopt(tail)
        except (Blank, Broken):
            # The tail is believed, but a block before it is damaged: a walk over the segment tells which.
            self._adopt(self._recover(tail))

    def _adopt(self, tail: Tail) -> None:
        """Go on from this tail; raises if the log is damaged."""
        if tail.state == State.DAMAGED and not self._damages:
            tail = self._recover(tail)  # another process has found it
        if tail.state == State.DAMAGED:
            self._tail = tail
            raise self._damages[0].error()
        self._catch_up(tail)

    def _recover(self, old: Tail | None) -> Tail:
        record, witness, proven = self._progress(), self._witness(), self._tail.durable_end
        in_doubt = old is None and any(record)
        recovered = recover_in_doubt(self._files, witness) if in_doubt else recover(self._files, old, witness)
        self._damages, self._file, self._tail = recovered.damages, None, recovered.tail
        if self._tail.state == State.POISONED:
            # To be healed first: the end that it tells of is less than what was read before.
            end = min(max(recovered.proven, proven), self._tail.end)
            self._doubt = Doubt(record, self._tail._replace(durable_end=end))
        else:
            self._tail = self._tails.write(self._files.slot, self._tail)
        return self._tail

    def _heal(self, tail: Tail) -> Tail:
        try:
            healed = heal(self._files, tail)
        except WritingStopped as stopped:
            self._stopped = stopped
            raise
        self._file = None
        try:
            written = self._tails.write(self._files.slot, healed)
        except OSError:
            # Two records that were each written in part can make the old one whole again. Whoever goes on from that
            # one goes on in the old segment, and there must be no trace of what would supersede it.
            self._files.remove([SegmentName(healed.segment_base, healed.segment_epoch)])
            raise
        forget_unproven(self._files, tail, healed)
        return written

    def _catch_up(self, tail: Tail) -> None:
        """Make this process's knowledge that of the tail."""
        name = SegmentName(tail.segment_base, tail.segment_epoch)
        file = self._file
        if not tail.inode:
            self._file, self._producers = None, ProducerTable()
        elif file is not None and (file.name, file.inode) == (name, tail.inode) and self._caught_up <= tail.position:
            self._catch_up_to(file, tail.position)
            self._allocated = file.size()
        else:
            self._file = None
            file = active_file(tail, self._files)
            if file is None:  # this directory is a copy of the one that the tail speaks of
                self._adopt(self._recover(tail))
                return
            self._producers = producers_up_to(file, tail.position)
            self._file, self._allocated = file, file.size()
        self._tail, self._known, self._caught_up = tail, True, tail.position

    def _catch_up_to(self, file: SegmentFile, position: int) -> None:
        for header, runs in file.headers(self._caught_up, position):
            remember(self._producers, header, runs)
        self._caught_up = position

    def _catch_up_before_the_turn(self) -> None:
        """Learn what is durable already, so that a process that was idle for long holds up nobody in its turn."""
        tail = self._tails.read(self._files.slot)
        if tail is None or tail == self._tail or not is_believed(tail, self._files) or not tail.inode:
            return
        name = SegmentName(tail.segment_base, tail.segment_epoch)
        try:
            if self._file is None or (self._file.name, self._file.inode) != (name, tail.inode):
                self._known, self._file = False, None
                file = self._files.open(name)
                self._producers = producers_up_to(file, tail.durable_position)
                self._file, self._caught_up = file, tail.durable_position
            elif self._caught_up < tail.durable_position:
                self._known = False
                self._catch_up_to(self._file, tail.durable_position)
        except (OSError, Blank, Broken, NewerFormat):
            self._known, self._file = False, None  # whatever it is, the turn will meet it

    # --- appending ------------------------------------------------------------------------------

    def append(self, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        """See `Log.append`."""
        return self._queue.submit(Request(batch, runs, compress=self.compresses))

    def _commit(self, take: Callable[[], list[Request]]) -> None:
        def commit() -> None:
            with self._taken_over():
                requests = take()
                # Before anything is noted of these runs: a segment begins with what is stored, and they are not yet.
                self._begin_for(sum(request.content.length for request in requests))
                Group(self, requests).commit(self._files.platform.clock.time_us())

        self._gate.run(
            commit,
            self._files,
            self._settings.stall_seconds,
            progress=self._progress,
            prepare=self._catch_up_before_the_turn,
        )

    @property
    def compresses(self) -> bool:
        """Whether the topic's blocks are compressed, as far as this process knows."""
        return self._files.topic.settings.compression == "zstd"

    def answer(self, run: Run, now: int) -> Appended | None:
        """Return the answer to a run that must not be stored."""
        return self._producers.answer(run, now)

    def note(self, run: Run, offsets: Range, now: int) -> None:
        """Remember a run that is about to be stored."""
        self._producers.remember(run, offsets, now)

    @property
    def end(self) -> int:
        """The next offset, as this turn knows it."""
        return self._tail.end

    def write_blocks(self, contents: Sequence[Content], now: int) -> None:
        """Write blocks to the end of the log; durable on return, as far as the topic is. Under the turn."""
        file = self._allocate(sum(content.length for content in contents))
        before, after = self._tail, self._tail
        parts: list[bytes | pa.Buffer] = []
        for content in contents:
            parts += encode_data_block(file.segment, after, content, now)
            after = after._replace(
                position=after.position + content.length,
                number=after.number + 1,
                end=after.end + content.events,
                max_time=max(after.max_time, now),
                witnessed=False,
            )
        self._write(file, parts, before, after, syncs=self._syncs)

    def _write(
        self, file: SegmentFile, parts: Sequence[bytes | pa.Buffer], before: Tail, after: Tail, *, syncs: bool
    ) -> None:
        """Write at the end; then the tail tells of it, and after a sync that it is durable."""
        disk = self._files.disk
        try:
            written = disk.write_many(file.descriptor, parts, before.position)
        except OSError as error:
            self._cut(file, before, error)
        else:
            if written != after.position - before.position:
                self._cut(file, before, OSError(errno.ENOSPC, "the write was cut short"))
        if syncs:
            self.sync_to(file, after)
        else:
            self._tail = self._tails.write(self._files.slot, after._replace(state=State.OPEN))

    def sync_to(self, file: SegmentFile, after: Tail) -> None:
        """Sync what was written; the tail `after` is durable then."""
        slot = self._files.slot
        syncing = self._tails.write(slot, after, state=State.SYNCING)
        clock = self._files.platform.clock
        began = clock.monotonic()
        try:
            self._files.disk.sync(file.descriptor)
        except OSError:
            self._known = False
            self._tails.write(slot, syncing, state=State.POISONED)
            logger.exception("%s: a sync failed; what it should have made durable is unknown", self._files)
            raise
        self._sync_times.observe(clock.monotonic() - began)
        self._tail = self._tails.write(
            slot,
            syncing,
            state=State.OPEN,
            durable_position=after.position,
            durable_number=after.number,
            durable_end=after.end,
        )

    def _cut(self, file: SegmentFile, before: Tail, error: OSError) -> None:
        """Remove what was written in part, and say so; if that fails, nobody knows what is there."""
        try:
            self._files.disk.truncate(file.descriptor, before.position)
            # Or else a power loss could bring it back, and a write that lacks nothing but its filling is whole.
            self._files.disk.sync(file.descriptor)
        except OSError:
            self._known = False
            self._tails.write(self._files.slot, before._replace(state=State.POISONED))
            raise error from None
        raise refused(f"{self._files}: the events could not be written", error) from error

    # --- space ----------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        return min(self._settings.segment_bytes, SEGMENT_BYTES_MAX)

    def _begin_for(self, length: int) -> None:
        """Begin a segment if there is none, or so many bytes more are too much for the active one."""
        tail = self._tail
        try:
            if self._file is None:
                self._begin_segment(None)
            elif tail.position + length > self._limit and tail.end > tail.segment_base:
                self.roll()
        except OSError as error:
            raise refused(f"{self._files}: the next segment could not be made", error) from error

    def _allocate(self, length: int) -> SegmentFile:
        """Return the active segment, which surely takes so many bytes more."""
        assert self._file is not None
        try:
            needed = self._tail.position + length
            if needed > self._allocated:
                step = min(self._settings.allocate_bytes, max(self._limit - self._tail.position, 0))
                ahead = self._affordable(self._file, needed, max(needed, self._tail.position + step))
                self._files.disk.allocate(self._file.descriptor, self._allocated, ahead - self._allocated)
                self._allocated = ahead
        except OSError as error:
            raise refused(f"{self._files}: there is no room for {length:,} bytes", error) from error
        return self._file

    def _affordable(self, file: SegmentFile, needed: int, wished: int) -> int:
        """Return up to where to allocate, leaving a reserve: what nobody can say to have passed could never go."""
        free, total = self._files.disk.free(file.descriptor)
        reserve = min(self._settings.reserve_bytes, total // 20)
        for ahead in (wished, needed):
            if free - (ahead - self._allocated) >= reserve:
                return ahead
        raise OSError(errno.ENOSPC, f"of {total:,} bytes {free:,} are free, and {reserve:,} of them are a reserve")

    def roll(self) -> None:
        """Seal the active segment and begin the next one. Under the turn.

        Events may go on to the old one only if there is no trace of the next one. So the tail says `SYNCING` meanwhile:
        whoever finds that left behind makes another segment, which supersedes the one that was being made.
        """
        file, tail = self._file, self._tail
        assert file is not None
        if not tail.is_synced:
            self.sync_to(file, tail)
            tail = self._tail
        self._tail = self._tails.write(self._files.slot, tail._replace(state=State.SYNCING))
        try:
            self._files.seal(file, tail.position)
            self._allocated = tail.position
            self._begin_segment(Predecessor(file.name.base, file.name.epoch, tail.position, tail.end, tail.number))
        except OSError:
            self._files.remove([SegmentName(tail.end, tail.epoch)])
            self._tail = self._tails.write(self._files.slot, tail)
            raise

    def _begin_segment(self, predecessor: Predecessor | None) -> None:
        tail = self._tail
        name = SegmentName(tail.end, tail.epoch)
        file = self._files.create_segment(
            name, number=tail.number, max_time=tail.max_time, producers=self._producers, predecessor=predecessor
        )
        position = file.size()
        self._file, self._allocated = file, position
        self._tail = self._tails.write(
            self._files.slot,
            tail._replace(
                state=State.OPEN,
                segment_base=name.base,
                segment_epoch=name.epoch,
                inode=file.inode,
                position=position,
                durable_position=position,
                number=tail.number + 1,
                durable_number=tail.number + 1,
                durable_end=tail.end,
                witnessed=True,
            ),
        )

    # --- witnesses and syncs --------------------------------------------------------------------

    def mark(self, *, clean: bool = False) -> None:
        """Give the last block a witness, if this process wrote it; with `clean`, say that this writer is done."""
        if not self._known or self._file is None:
            return
        with self._turn():
            # Whoever has written since will see to it.
            if self._tails.read(self._files.slot) != self._tail or self._tail.state != State.OPEN:
                return
            if not self._tail.witnessed:
                self._write_marker()
            if clean and self._tail.is_synced:
                self._tail = self._tails.write(self._files.slot, self._tail._replace(state=State.CLEAN))

    def _write_marker(self) -> None:
        assert self._file is not None
        now = self._files.platform.clock.time_us()
        if not self._tail.is_synced:
            self.sync_to(self._file, self._tail)
        self._begin_for(FRONT_BYTES)
        if self._tail.witnessed:
            return  # it rolled, and the next segment's first block is the witness
        file, before = self._allocate(FRONT_BYTES), self._tail
        after = before._replace(position=before.position + FRONT_BYTES, number=before.number + 1, witnessed=True)
        self._write(file, [encode_marker(file.segment, before, now)], before, after, syncs=True)

    def ensure_durable(self, offset: int) -> None:
        """Sync the log at least up to an offset, if it is not."""
        tail = self.ensure_recovered()
        if tail.durable_end >= offset:
            return
        with self.turn() as tail:
            if tail.durable_end < offset <= tail.end and self._file is not None:
                self.sync_to(self._file, tail)

    # --- removing -------------------------------------------------------------------------------

    def trim(self, before: int) -> int:
        """Remove whole segments below an offset, which the caller may remove; returns the new beginning."""
        with self.turn() as tail:
            try:
                if before >= tail.end and self._file is not None and tail.end > tail.segment_base:
                    self.roll()
                bases = [name.base for name in self._files.names() if name.base <= self._tail.segment_base]
                first = max((base for base in bases if base <= before), default=0)
                if first <= self._tail.first:
                    return self._tail.first
                self._files.write_first(first)
            except OSError as error:
                if self._files.read_first() > self._tail.first:
                    raise  # it is written, but perhaps not on the medium: unknown
                raise refused(f"{self._files}: it could not be trimmed", error) from error
            self._tail = self._tails.write(self._files.slot, self._tail._replace(first=first))
            try:
                self._files.remove_below(first)
            except OSError as error:
                logger.warning("%s: what is below offset %d stays for now: %s", self._files, first, error)
            return first

    def delete(self) -> None:
        """Mark the log as deleted; whoever has it open finds out at the next turn or read."""
        with self._turn():
            tail = self._tails.read(self._files.slot)
            if tail is None or tail.log_id != self._files.log_id:
                tail = empty_tail(self._files)
            self._tails.write(
                self._files.slot, tail._replace(state=State.DELETED, boot_id=self._files.platform.boot_id)
            )
            self._known, self._file = False, None
