"""`archive`: topics into a Parquet lake, by Spark, without a checkpoint.

What is to be done is what the logs have less what the lake's manifest names; `penstock.lake.plan` cuts it into pieces.
Tasks write each piece into files, and the driver puts the next version of the manifest. Nothing else is remembered, so:

* **A driver that is killed anywhere** leaves files that no manifest names, or files that are named and not moved yet.
  The next one writes what is missing, and tidies up.
* **Two at once** write some events twice; the manifest takes one of the files, and the other is removed later.
* **What is archived may be trimmed, and nothing else**: an external subscription of each topic, `archive`, stands where
  the lake has everything below. It is moved after the manifest was put, never before, and protects the topic from the
  first round on.
* **What was trimmed nevertheless**, by force or by a hard cap, ends the pipeline with `DataLost`; or, if that is asked
  for, is declared in the lake as a gap.

The driver's part needs no Spark: `Archiver` is told how pieces are written, `here` writes them in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.clock import Clock, SystemClock
from penstock.errors import DataLost, IntegrityError, StaleCursor, StoreUnavailable, TopicDeleted, Trimmed, UsageError
from penstock.events import check_name
from penstock.lake import plan
from penstock.lake.entries import Entry, LakeFile, LakeGap, Manifest
from penstock.lake.files import Written, merge_files, write_piece
from penstock.lake.lake import Lake
from penstock.lake.plan import Aim, Backlog, Piece
from penstock.offsets import Range
from penstock.rows import Partition
from penstock.settings import resolve
from penstock.spark.connection import Connection, connect, patiently
from penstock.spark.frames import Topics as TopicsGiven
from penstock.spark.frames import names_of, url_of
from penstock.spark.positions import At, Seen
from penstock.spark.topics import Follower, Topics

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from penstock.bus.bus import Bus
    from penstock.ports import Store
    from penstock.settings import Settings
    from penstock.spark.pipelines.rounds import Ending

SUBSCRIPTION: Final = "archive"
"""The subscription of each topic that shows how far it is archived, and protects the rest."""

PIECES_PER_TASK: Final = 4
"""So many pieces for each task that runs at a time are written before the manifest's next version."""

SAMPLE_BYTES: Final = 256 << 10
"""So much of a backlog is looked at to tell how large its events are."""

TIDY_SECONDS: Final = 3600.0
"""So often what was left behind is looked for, besides at the start."""

TOLD_TIMES_MAX: Final = 10
_RESULT: Final = "written binary"


class Merge(NamedTuple):
    """Files to become one."""

    files: tuple[LakeFile, ...]


Job = Piece | Merge
Execute = Callable[[Sequence[Job]], Iterable[Written]]
"""Does jobs, wherever; returns what each has written."""


class Archived(msgspec.Struct, kw_only=True):
    """What was archived, by a round or by several."""

    events: int = 0
    files: int = 0
    bytes: int = 0
    """Of these files."""
    merged: int = 0
    """Files that became part of larger ones."""
    gaps: int = 0
    """Offsets that the log has declared lost, or that were trimmed before they were archived."""
    repeated: int = 0
    """Files that were written for nothing, because another archiver was quicker."""
    removed: int = 0
    """Files that nothing named any more."""
    worked: bool = False

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return not self.worked

    def add(self, other: Archived) -> None:
        """Add what another round has done."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worked = bool(self.worked)

    def document(self) -> dict[str, int]:
        """Return it as JSON has it."""
        return {name: getattr(self, name) for name in self.__struct_fields__ if name != "worked"}


class Archiver:
    """Archives topics of an open store into a lake, round by round."""

    def __init__(
        self,
        store: Store,
        lake: Lake,
        topics: Sequence[str],
        execute: Execute,
        *,
        subscription: str = SUBSCRIPTION,
        aim: Aim = Aim(),  # noqa: B008 - a tuple, which cannot change
        tasks: int = 1,
        fail_on_data_loss: bool = True,
        clock: Clock | None = None,
    ) -> None:
        check_name("subscription", subscription)
        self._store = store
        self._lake = lake
        self._topics = Topics(store, topics)
        self._execute = execute
        self._aim = aim
        self._tasks = tasks
        self._fail_on_data_loss = fail_on_data_loss
        self._clock = clock or SystemClock()
        self._follower = Follower(store, subscription, {"lake": lake.create().lake_id})
        self._tidied: float | None = None

    def everything(
        self, told: Callable[[Archived, int], None] = lambda _done, _left: None, ending: Ending | None = None
    ) -> Archived:
        """Archive everything up to where the logs end now; `told` hears of each round, and how many events are left.

        If an end is asked for, the round under way is the last.
        """
        ends = {
            Partition(now.log_id, number): bounds.stop
            for now in self._seen().values()
            for number, bounds in enumerate(now.bounds)
        }
        total = Archived()
        while True:
            done = self.round(ends)
            total.add(done)
            if done.idle or (ending is not None and ending.asked):
                return total
            told(done, self._left(ends))

    def _left(self, ends: dict[Partition, int]) -> int:
        manifest = self._lake.manifest()
        return sum(max(end - (manifest.end(partition) or 0), 0) for partition, end in ends.items())

    def round(self, ends: dict[Partition, int] | None = None) -> Archived:
        """Archive what is worth a file now; or, up to given ends, whatever is there."""
        done = Archived()
        self._tidy(done)
        seen = self._seen()
        if ends is not None:
            seen = {topic: _up_to(now, ends) for topic, now in seen.items()}
        self._protect(seen)
        self._declare_lost(seen, done)
        manifest = self._lake.manifest()
        pieces = plan.pieces(
            self._backlogs(manifest, seen),
            self._aim,
            tasks=self._tasks,
            everything=ends is not None,
            now_us=self._clock.time_us(),
        )
        jobs: list[Job] = [*pieces[: self._tasks * PIECES_PER_TASK]]
        if not jobs:
            jobs = [*self._merges(manifest, seen)]
        if jobs:
            done.worked = True
            damages = self._do(jobs, done)
            self._protect(seen)
            if damages:
                raise IntegrityError(f"{damages[0]}. What was written beside it is archived")
        return done

    # --- what there is ----------------------------------------------------------------------------

    def _seen(self) -> dict[str, Seen]:
        return patiently(self._topics.seen)

    def _backlogs(self, manifest: Manifest, seen: dict[str, Seen]) -> Iterator[Backlog]:
        for topic, now in seen.items():
            for number, bounds in enumerate(now.bounds):
                partition = Partition(now.log_id, number)
                missing = plan.missing(manifest.archived(partition), bounds)
                if missing:
                    event_bytes, since = self._sample(partition, missing[-1])
                    yield Backlog(topic, now.log_id, number, missing, bounds.stop, event_bytes, since)

    def _sample(self, partition: Partition, span: Range) -> tuple[float, int]:
        """Return about how large an event is, and when the first of a range was appended."""
        try:
            found = self._store.log.read(partition, span.start, bytes_max=SAMPLE_BYTES, events_max=len(span))
        except (Trimmed, TopicDeleted, IntegrityError):
            found = []  # whoever reads all of it says what is wrong
        batches = [item for item in found if not hasattr(item, "reason")]
        events = sum(len(batch) for batch in batches)
        if not events:
            return 1.0, 0
        first = batches[0].place
        return max(sum(b.total_size for b in batches) / events, 1.0), first.appended_at if first else 0

    def _merges(self, manifest: Manifest, seen: dict[str, Seen]) -> list[Merge]:
        mine = {now.log_id for now in seen.values()}
        groups = plan.merges((file for file in manifest.files if file.log_id in mine), self._aim)
        return [Merge(tuple(group)) for group in groups[: self._tasks * PIECES_PER_TASK]]

    # --- what is done ---------------------------------------------------------------------------

    def _do(self, jobs: Sequence[Job], done: Archived) -> list[str]:
        """Do jobs, and put what they have written into the lake; return what could not be read."""
        damages = []
        entries: list[Entry] = []
        for job, written in zip(jobs, self._execute(jobs), strict=True):
            if written.damage:
                damages.append(written.damage)
            elif isinstance(job, Merge):
                committed = self._lake.commit(written.files, job.files)
                done.merged += len(job.files) if committed.added else 0
                done.repeated += len(committed.refused)
            else:
                entries += [*written.files, *written.gaps]
        if entries:
            committed = self._lake.commit(entries)
            _count(committed.added, done)
            done.repeated += sum(isinstance(entry, LakeFile) for entry in committed.refused)
        return damages

    def _declare_lost(self, seen: dict[str, Seen], done: Archived) -> None:
        manifest = self._lake.manifest()
        gaps = [
            LakeGap(topic, now.log_id, number, span.start, span.stop, "trimmed before it was archived")
            for topic, now in seen.items()
            for number, bounds in enumerate(now.bounds)
            for span in plan.lost(manifest.archived(Partition(now.log_id, number)), bounds)
        ]
        if gaps and self._fail_on_data_loss:
            gap = gaps[0]
            raise DataLost(
                f"topic {gap.topic!r}, partition {gap.partition}: offsets {gap.start} to {gap.stop - 1} were trimmed "
                f"before they were archived. To declare them as a gap and go on, allow data loss"
            )
        if gaps:
            _count(self._lake.commit(gaps).added, done)
            done.worked = True

    def _protect(self, seen: dict[str, Seen]) -> None:
        """Let retention have what the lake has, and nothing else."""
        for _ in range(TOLD_TIMES_MAX):
            manifest = self._lake.manifest()
            try:
                self._follower.tell({topic: _archived_up_to(manifest, now) for topic, now in seen.items()})
            except StaleCursor:
                continue  # another archiver has moved it meanwhile, by a newer manifest
            return

    def _tidy(self, done: Archived) -> None:
        now = self._clock.monotonic()
        if self._tidied is None or now - self._tidied >= TIDY_SECONDS:
            done.removed += self._lake.tidy().removed
            self._tidied = now


def _count(added: Iterable[Entry], done: Archived) -> None:
    for entry in added:
        if isinstance(entry, LakeFile):
            done.events += len(entry.range)
            done.files += 1
            done.bytes += entry.size
        else:
            done.gaps += len(entry.range)


def _up_to(now: Seen, ends: dict[Partition, int]) -> Seen:
    """Return a topic as it was, as if nothing had been appended since; one that is new is left as it is."""
    bounds = []
    for number, span in enumerate(now.bounds):
        end = ends.get(Partition(now.log_id, number), span.stop)
        bounds.append(Range(span.start, max(span.start, min(span.stop, end))))
    return now._replace(bounds=tuple(bounds))


def _archived_up_to(manifest: Manifest, now: Seen) -> At:
    """Return up to where the lake has each partition; where it has nothing, the beginning of the log."""
    offsets = []
    for number, bounds in enumerate(now.bounds):
        end = manifest.end(Partition(now.log_id, number))
        # An end beyond the log's is one of a log that was cut, and no place for a cursor.
        offsets.append(bounds.start if end is None else min(end, bounds.stop))
    return At(now.log_id, tuple(offsets))


# --- doing jobs -----------------------------------------------------------------------------------


def perform(store: Store, lake: Lake, job: Job, aim: Aim) -> Written:
    """Do one job, in this process."""
    try:
        if isinstance(job, Piece):
            return write_piece(store.log, lake.hidden, job, aim)
        return merge_files([(file, lake.path(file)) for file in job.files], lake.hidden)
    except (Trimmed, TopicDeleted, FileNotFoundError):
        return Written([], [])  # it is so since the plan was made, and the next plan knows
    except IntegrityError as error:
        return Written([], [], str(error))


def here(store: Store, lake: Lake, aim: Aim) -> Execute:
    """Return what does jobs in this process, one after the other."""
    return lambda jobs: (perform(store, lake, job, aim) for job in jobs)


class _Task(NamedTuple):
    """What every task of a Spark job is told."""

    jobs: tuple[Job, ...]
    connection: Connection
    directory: Path
    lake_id: str
    aim: Aim

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do the jobs whose numbers the batches have."""
        import pyarrow as pa

        with self.connection.open() as store:
            lake = Lake(self.directory)
            if not lake.exists() or lake.manifest().lake_id != self.lake_id:
                raise StoreUnavailable(
                    f"{self.directory} is not the driver's lake for this task: mount the same directory in both places"
                )
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    written = perform(store, lake, self.jobs[number], self.aim)
                    yield pa.RecordBatch.from_pydict({"written": pa.array([_encoder.encode(written)], pa.binary())})


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Written)


def on_spark(spark: SparkSession, connection: Connection, lake: Lake, aim: Aim) -> Execute:
    """Return what does jobs in tasks of Spark, one job a task."""

    def execute(jobs: Sequence[Job]) -> list[Written]:
        task = _Task(tuple(jobs), connection, lake.directory, lake.manifest().lake_id, aim)
        numbers = spark.range(0, len(jobs), 1, len(jobs))  # as many partitions as numbers: one each, in order
        return [_decoder.decode(bytes(row[0])) for row in numbers.mapInArrow(task.run, _RESULT).collect()]

    return execute


# --- from Python ----------------------------------------------------------------------------------


@contextmanager
def archiver(
    spark: SparkSession,
    url: str,
    topics: Sequence[str],
    lake: str | Path,
    *,
    settings: Settings | None = None,
    aim: Aim = Aim(),  # noqa: B008 - a tuple, which cannot change
    **options: Any,
) -> Iterator[Archiver]:
    """Give an archiver whose jobs run on Spark, and close its store at the end."""
    with ExitStack() as closing:
        store, connection = closing.enter_context(connect(url, settings or resolve().settings))
        where = Lake(lake)
        where.create()
        execute = on_spark(spark, connection, where, aim)
        tasks = spark.sparkContext.defaultParallelism or os.cpu_count() or 1
        yield Archiver(store, where, topics, execute, aim=aim, tasks=tasks, **options)


def archive(
    spark: SparkSession,
    bus: Bus | str,
    topics: TopicsGiven,
    lake: str | Path,
    *,
    subscription: str = SUBSCRIPTION,
    fail_on_data_loss: bool = True,
    file_bytes: int | None = None,
) -> Archived:
    """Archive everything that topics hold now into a lake, and return what was done.

    `bus` is a bus or the URL of its store; `topics` a `Topic`, a name, a pattern, or a list of them. It may be stopped
    at any moment and repeated at any time: what is in the lake is not archived again. What is archived may be trimmed
    by retention from then on, and nothing else.

    :param subscription: the external subscription of each topic that shows how far it is archived; one for each lake.
    :param fail_on_data_loss: whether events that were trimmed before they were archived are an error, `DataLost`, or
        declared in the lake as a gap.
    :param file_bytes: how many bytes of events a file should have, 128 MiB unless said.
    """
    aim = Aim()
    if file_bytes is not None:
        if file_bytes < 1:
            raise UsageError(f"file_bytes is {file_bytes}: a file has one byte at least")
        aim = aim._replace(file_bytes=file_bytes, file_bytes_min=min(aim.file_bytes_min, file_bytes))
    making = partial(archiver, spark, url_of(bus), names_of(topics), lake, aim=aim)
    with making(subscription=subscription, fail_on_data_loss=fail_on_data_loss) as made:
        return made.everything()
