"""The `Log` port in memory: per partition its blocks and its producers."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.batch import Batch, Place
from penstock.deduplication import ProducerTable
from penstock.errors import (
    BeyondEnd,
    StoreFull,
    TopicDeleted,
    Trimmed,
    TrimRefused,
    UsageError,
)
from penstock.offsets import Gap, Range
from penstock.producers import Run
from penstock.rows import Appended, Partition, TopicInfo, TopicSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.stores.memory.entrances import MemoryNotifier
    from penstock.stores.memory.state import State

BLOCK_OVERHEAD_BYTES = 1024
"""What an appended batch costs beside its columns, about: Arrow's and Python's objects."""


class PartitionLog:
    """One partition's blocks and producers."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.first = 0
        self.end = 0
        self.blocks: list[Batch] = []
        self.starts: list[int] = []
        self.times: list[int] = []  # the running maximum of the append times, so that it can be searched
        self.producers = ProducerTable()

    def append(self, block: Batch, run: Run, appended_at: int) -> None:
        self.blocks.append(block)
        self.starts.append(block.start)
        self.times.append(max(appended_at, self.times[-1] if self.times else 0))
        self.end = block.range.stop
        self.producers.remember(run, block.range, appended_at)


class MemoryHeads:
    """The `Heads` of some partitions: one indexing of one array, without a lock."""

    def __init__(self, state: State, slots: npt.NDArray[np.int64]) -> None:
        self._state = state
        self._slots = slots

    def read(self) -> npt.NDArray[np.int64]:
        self._state.check_open()
        heads: npt.NDArray[np.int64] = self._state.heads[self._slots]
        return heads


class MemoryLog:
    """The `Log` port."""

    def __init__(self, state: State, notifier: MemoryNotifier) -> None:
        self._state = state
        self._notifier = notifier

    def create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        with self._state:
            for info in self._state.topics.values():
                if info.name == name:
                    if info.settings.fixed != settings.fixed:
                        raise info.mismatch(settings)
                    self._state.topics[info.log_id] = msgspec.structs.replace(info, settings=settings)
                    return self._state.topics[info.log_id]
            if settings.partitions < 1:
                raise UsageError(f"topic {name!r} needs at least one partition, not {settings.partitions}")
            self._state.check_rows(len(self._state.partitions), settings.partitions, "partition")
            created_at = self._state.clock.time_us()
            info = TopicInfo(name=name, log_id=uuid4().hex, settings=settings, created_at=created_at)
            slot = len(self._state.heads)
            # A new array, never a grown one: readers of heads hold no lock.
            self._state.heads = np.append(self._state.heads, np.zeros(settings.partitions, np.int64))
            self._state.topics[info.log_id] = info
            for partition in info.partitions:
                self._state.partitions[partition] = PartitionLog(slot + partition.number)
            return info

    def delete_topic(self, log_id: str) -> None:
        with self._state:
            info = self._state.topics.pop(log_id, None)
            if info is None:
                raise TopicDeleted(log_id)
            for partition in info.partitions:
                gone = self._state.partitions.pop(partition)
                self._state.heads[gone.slot] = -1
                self._state.bytes -= sum(map(_cost, gone.blocks))
            for subscription in [key for key in self._state.subscriptions if key[0] == log_id]:
                self._state.forget_subscription(*subscription)
            for row in [row for row in self._state.scheduled.values() if row.log_id == log_id]:
                del self._state.scheduled[row.id]

    def topics(self) -> list[TopicInfo]:
        with self._state:
            return sorted(self._state.topics.values(), key=lambda info: info.name)

    def append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        covered = sum(run.length for run in runs)
        if covered != len(batch) or batch.rows is not None or any(run.length < 1 for run in runs):
            raise UsageError(f"the runs cover {covered} of {len(batch)} events; they must cover each once")
        with self._state:
            log = self._state.partition(partition)
            place = self._place(partition)
            parts = _split(batch, runs)
            # What is refused now counts, too: an earlier run of this call may make its producer known.
            answers = (log.producers.answer(run, place.appended_at) for run, _ in parts)
            cost = sum(_cost(part) for answer, (_, part) in zip(answers, parts, strict=True) if not _is_repeat(answer))
            if cost and self._state.bytes + cost > self._state.limits.bytes_max:
                raise StoreFull(f"memory.bytes_max = {self._state.limits.bytes_max:,} is reached: trim, or raise it")
            outcome = [
                log.producers.answer(run, place.appended_at) or self._store(log, place, run, part)
                for run, part in parts
            ]
            self._state.heads[log.slot] = log.end
        self._notifier.notify(partition)
        return outcome

    def _place(self, partition: Partition) -> Place:
        info = self._state.topics[partition.log_id]
        return Place(
            topic=info.name,
            partition=partition.number,
            appended_at=self._state.clock.time_us(),
            source=info.settings.source or f"penstock:{info.name}",
            content_type=info.settings.content_type,
        )

    def _store(self, log: PartitionLog, place: Place, run: Run, part: Batch) -> Appended:
        block = part.at(log.end, place, (run,))
        log.append(block, run, place.appended_at)
        self._state.bytes += _cost(block)
        return Appended(block.range)

    def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        with self._state:
            log = self._state.partition(partition)
            if start < log.first:
                raise Trimmed.at(partition, start, log.first, log.end)
            if start > log.end:
                raise BeyondEnd.at(partition, start, log.first, log.end)
            found: list[Batch | Gap] = []
            events_left = log.end if events_max is None else events_max
            bytes_left = bytes_max
            for block in log.blocks[max(0, bisect_right(log.starts, start) - 1) :]:
                part = block.slice(Range(start, max(start, log.end)))
                fitting = int(np.searchsorted(np.cumsum(part.sizes), bytes_left, side="right"))
                fitting = max(min(fitting, events_left, len(part)), 0 if found else 1)
                if not len(part) or not fitting:
                    break
                found.append(part.slice(Range(part.start, part.start + fitting)))
                if fitting < len(part):
                    break  # a smaller event of the next block might fit, but it would leave a hole
                events_left -= len(part)
                bytes_left -= int(part.sizes.sum())
            return found

    def heads(self, partitions: Sequence[Partition]) -> MemoryHeads:
        with self._state:
            slots = [self._state.partition(partition).slot for partition in partitions]
            return MemoryHeads(self._state, np.array(slots, np.int64))

    def bounds(self, partition: Partition) -> Range:
        with self._state:
            log = self._state.partition(partition)
            return Range(log.first, log.end)

    def find_time(self, partition: Partition, time_us: int) -> int:
        with self._state:
            log = self._state.partition(partition)
            index = bisect_right(log.times, time_us - 1)
            return max(log.first, log.starts[index]) if index < len(log.starts) else log.end

    def trim(self, partition: Partition, before: int, *, force: bool = False) -> int:
        with self._state:
            log = self._state.partition(partition)
            if before > log.end:
                raise BeyondEnd.at(partition, before, log.first, log.end)
            if not force:
                self._check_protected(partition, log.first, before)
            passed = len(log.blocks) if before == log.end else max(0, bisect_right(log.starts, before) - 1)
            self._state.bytes -= sum(map(_cost, log.blocks[:passed]))
            del log.blocks[:passed], log.starts[:passed], log.times[:passed]
            log.first = max(log.first, before)
            return log.first

    def _check_protected(self, partition: Partition, first: int, before: int) -> None:
        for (log_id, name), subscription in self._state.subscriptions.items():
            if log_id != partition.log_id or not subscription.protect:
                continue
            cursors = self._state.cursors.items()
            mine = [
                cursor.next_offset
                for shard, cursor in cursors
                if shard[:2] == (log_id, name) and shard.partition == partition.number
            ]
            if (passed := min(mine, default=first)) < before:
                raise TrimRefused(f"{partition}: subscription {name!r} has only passed offset {passed}, not {before}")


def _is_repeat(answer: Appended | None) -> bool:
    return answer is not None and answer.duplicate


def _split(batch: Batch, runs: Sequence[Run]) -> list[tuple[Run, Batch]]:
    parts, start = [], batch.start
    for run in runs:
        parts.append((run, batch.slice(Range(start, start + run.length))))
        start += run.length
    return parts


def _cost(batch: Batch) -> int:
    return int(batch.columns.nbytes) + BLOCK_OVERHEAD_BYTES
