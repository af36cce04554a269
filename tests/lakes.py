"""Lakes for tests: a store in memory with a clock that moves, archivers without Spark, and deaths at any step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import uuid4

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
from tests.spark_topics import rich

from penstock.batch import Batch
from penstock.clock import VirtualClock
from penstock.lake.lake import Lake
from penstock.lake.plan import Aim
from penstock.lake.reading import ArchivedLog
from penstock.lake.verify import verify
from penstock.offsets import Gap, Range
from penstock.rows import Partition, TopicInfo, TopicSettings
from penstock.spark.pipelines.archive import Archiver, here
from penstock.stores.memory import MemoryStore
from penstock.testing.conformance.builders import a_run

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.lake.entries import LakeFile
    from penstock.lake.reading import Readable

Row = dict[str, Any]

DAY_SECONDS = 86_400
SMALL = Aim(file_bytes=4_000, file_bytes_min=1_000, age_seconds=60, merged_files_min=3)
"""Files of a few dozen events."""


class Killed(BaseException):
    """What a process feels when it is killed: nothing in it may catch this."""


@contextmanager
def killed_at(step: int) -> Iterator[list[str]]:
    """Let the process die when it has made so many changes of the disk; gives those that were made.

    From then on it changes nothing any more, whatever its code would like to tidy up.
    """
    made: list[str] = []

    def dying(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            if len(made) >= step:
                raise Killed(name)
            made.append(name)
            return real(*args, **options)

        return change

    names = ("link", "fsync", "rename", "unlink", "mkdir", "open")
    with ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(os, name, dying(name, getattr(os, name))))
        yield made


class World:
    """A topic of two partitions in memory, what was ever published to it, and a lake."""

    def __init__(self, directory: Path) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStore(clock=self.clock)
        self.directory = directory
        self.truth: dict[Partition, list[Row]] = {}
        self.topic = self.create("orders")

    def create(self, name: str) -> TopicInfo:
        topic = self.store.log.create_topic(name, TopicSettings(partitions=2, content_type="text/plain"))
        self.truth.update({partition: [] for partition in topic.partitions})
        return topic

    def publish(self, count: int, topic: TopicInfo | None = None) -> None:
        """Append so many events to each partition, a few at a time."""
        for partition in (topic or self.topic).partitions:
            events = rich(count)
            for start in range(0, count, 7):
                batch = Batch.from_events(events[start : start + 7])
                self.store.log.append(partition, batch, [a_run(batch, uuid4().bytes)])
                self.clock.advance(0.001)
            self.truth[partition] += rows(self.store.log, partition, start=len(self.truth[partition]))

    def lake(self, **options: Any) -> Lake:
        return Lake(self.directory, **options)

    def archiver(self, *topics: str, lake: Lake | None = None, **options: Any) -> Archiver:
        """Return an archiver as another process would have it."""
        where = lake or self.lake()
        aim = options.pop("aim", SMALL)
        execute = options.pop("execute", None) or here(self.store, where, aim)
        return Archiver(self.store, where, topics or ("orders",), execute, aim=aim, clock=self.clock, **options)

    def trim(self, *, force: bool = False, before: int | None = None) -> None:
        """Remove what retention may have: everything below the cursor of the archive."""
        for cursor in self.store.cursors.load(self.topic.log_id, "archive"):
            partition = Partition(self.topic.log_id, cursor.shard.partition)
            self.store.log.trim(partition, cursor.next_offset if before is None else before, force=force)

    def floors(self, name: str = "archive") -> list[int]:
        return [cursor.next_offset for cursor in self.store.cursors.load(self.topic.log_id, name)]

    def check(self) -> None:
        """The lake has everything that was ever published, once, however one looks at it."""
        lake = self.lake()
        assert verify(lake, self.store.log).problems == []
        manifest = lake.manifest()
        known = {topic.log_id for topic in self.store.log.topics()}
        for partition, expected in self.truth.items():
            if partition.log_id not in {log for logs in manifest.topics().values() for log in logs}:
                continue
            assert manifest.end(partition) == len(expected)
            if partition.log_id in known:
                assert rows(ArchivedLog(self.store.log, lake), partition) == expected
        logs = {file.log_id for file in manifest.files}
        assert seen(self.directory) == sorted(
            (row["topic"], row["partition"], row["offset"], row["data"])
            for partition, expected in self.truth.items()
            if partition.log_id in logs
            for row in expected
        )


def rows(log: Readable, partition: Partition, *, start: int | None = None, at_a_time: int = 50) -> list[Row]:
    """Return everything that can be read of a partition; gaps are rows with a reason."""
    bounds = log.bounds(partition)
    found: list[Row] = []
    start = bounds.start if start is None else start
    while start < bounds.stop:
        for item in log.read(partition, start, bytes_max=1 << 20, events_max=at_a_time):
            if isinstance(item, Gap):
                found.append({"gap": item.range, "reason": item.reason})
            else:
                found += item.to_arrow().to_pylist()
            start = item.range.stop
    return found


def seen(directory: Path) -> list[tuple[str, int, int, bytes]]:
    """Return which events somebody finds who only looks for Parquet files, by listing or by a pattern."""
    dataset = pyarrow.dataset.dataset(directory, partitioning="hive", format="parquet")
    assert sorted(dataset.files) == sorted(map(str, directory.glob("**/*.parquet")))
    table = dataset.to_table(columns=["topic", "partition", "offset", "data"]) if dataset.files else None
    return sorted(tuple(row.values()) for row in table.to_pylist()) if table is not None else []


def rewrite(world: World, file: LakeFile, offset: int, data: bytes) -> None:
    """Replace the payload of one event in a file."""
    path = world.directory / file.path
    table = pq.read_table(path, partitioning=None)
    values = table.column("data").to_pylist()
    values[offset - file.start] = data
    column = table.schema.get_field_index("data")
    pq.write_table(table.set_column(column, table.schema.field(column), pa.array(values, pa.binary())), path)


class Holed:
    """A log of which some offsets were lost."""

    def __init__(self, log: Readable, hole: Range) -> None:
        self._log = log
        self._hole = hole

    def bounds(self, partition: Partition) -> Range:
        return self._log.bounds(partition)

    def find_time(self, partition: Partition, time_us: int) -> int:
        return self._log.find_time(partition, time_us)

    def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        found: list[Batch | Gap] = []
        if start in self._hole:
            # As a store does it: a gap does not count as an event.
            found.append(Gap(start, self._hole.stop, "lost by a test"))
            start = self._hole.stop
        for item in self._log.read(partition, start, bytes_max=bytes_max, events_max=events_max):
            if item.range.overlaps(self._hole):
                assert isinstance(item, Batch)
                if item.start < self._hole.start:
                    found.append(item.slice(Range(item.start, self._hole.start)))
                break
            found.append(item)
        return found
