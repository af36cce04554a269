"""`project`: a projection over a topic's whole history, and then over what comes, into a versioned table of Parquet.

A step takes the table as it is, and its position with it; reads so many events from there on; folds them, bucket by
bucket; and puts the next version of the table, which has the new files and the new position. A round is as many steps
as it takes to reach what the log held at its beginning.

* **Every event once.** A step that is killed anywhere has put its version or it has not. If not, the files that it has
  written are nobody's, and the next one does the same from the same position.
* **Two at once**: of two that put the same version one succeeds. The other throws its files away, and goes on there.
* **Memory is bounded**: a task has its part of a step's events, and the states of one bucket at a time.
* **The same result as in an application** (`penstock.bus.projecting`): both fold with `penstock.bus.folding`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock import errors
from penstock.batch import Batch
from penstock.bus.projections import Projection
from penstock.codecs import PerClass
from penstock.errors import DataLost, PenstockError, UsageError, did_you_mean
from penstock.events import VERSION_HEADER
from penstock.offsets import Range
from penstock.rows import Partition
from penstock.spark import positions as at
from penstock.spark.connection import absolute, connect, patiently
from penstock.spark.frames import options_of
from penstock.spark.pipelines.folding import KEYED_DDL, WRITTEN_DDL, Kind, Work, failure_of
from penstock.spark.pipelines.tables import BUCKETS, BUCKETS_MAX, KEY, STATE, BucketFile, Held, Manifest, Table
from penstock.spark.shipping import FoldShipment
from penstock.spark.topics import Topics
from penstock.spark.types import Layout, column_of, fields_of, layout_of
from penstock.versions import local_directory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.bus.bus import Bus
    from penstock.ports import Store
    from penstock.spark.pipelines.rounds import Ending

STEP_ROWS: Final = 4_000_000
STEP_BYTES: Final = 1 << 30
"""A step takes so many events at most, and of large ones so many as have about so many bytes."""
TASKS_PER_CORE: Final = 2
SAMPLE_BYTES: Final = 1 << 20
VALUE: Final = "value"
"""The column of a state without fields."""


@dataclass(frozen=True)
class Projected:
    """What a round has done."""

    projection: str
    directory: str
    """Where the table is; its files are in `latest` below."""
    number: int
    """The table's version, from 0 on; -1 if there is none yet."""
    events: int
    """How many were folded in this round."""
    keys: int
    """How many states the table has."""
    positions: dict[int, int]
    """The next offset of each partition."""
    steps: int
    lost: int
    """How many steps were for nothing, because somebody else was quicker."""
    behind: int
    """How many events are in the log by now and not in the table."""

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""
        return self.steps == 0


def project(
    spark: SparkSession,
    bus: Bus,
    projection: Projection[Any] | str,
    into: str | Path,
    *,
    rebuild: bool = False,
    buckets: int = BUCKETS,
    step_rows: int = STEP_ROWS,
    ending: Ending | None = None,
    told: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Projected:
    """Fold what is in a projection's topic and not in its table, which is `<into>/<name>`; return what was done.

    * `rebuild`: begin anew with an empty table, if the one that is there is of another version of the projection.
    * `buckets`: of a new table; each is a file. Keep a bucket's states below a few million.
    * `step_rows`: so many events are folded at a time, at most.
    * `told`: called after each step with the number of events done, and in all.
    * Other options are those of `format("penstock")`.
    """
    chosen = _chosen(bus, projection)
    if type(buckets) is not int or not 1 <= buckets <= BUCKETS_MAX:
        raise UsageError(f"buckets is {buckets!r}, it must be 1 to {BUCKETS_MAX:,}")
    if type(step_rows) is not int or step_rows < 1:
        raise UsageError(f"step_rows is {step_rows!r}, it must be 1 or more")
    table = Table(local_directory(into) / chosen.name)
    pipeline = _Pipeline(spark, bus, chosen, table, buckets=buckets, step_rows=step_rows, options=options)
    return pipeline.round(rebuild=rebuild, ending=ending, told=told)


def _chosen(bus: Bus, projection: Projection[Any] | str) -> Projection[Any]:
    if isinstance(projection, Projection):
        return projection
    known = {each.name: each for each in bus.projections}
    if projection not in known:
        raise UsageError(
            f"this bus has no projection {projection!r}{did_you_mean(projection, known)}: declare it with "
            f"@bus.projection(topic, {projection!r})"
        )
    return known[projection]


class _Pipeline:
    def __init__(
        self,
        spark: SparkSession,
        bus: Bus,
        projection: Projection[Any],
        table: Table,
        *,
        buckets: int,
        step_rows: int,
        options: dict[str, Any],
    ) -> None:
        self._spark = spark
        self._bus = bus
        self._projection = projection
        self._table = table
        self._buckets = buckets
        self._step_rows = step_rows
        self._options = options
        self._topic = projection.topic
        self._layout, self._fields = _layout(projection)
        self._shipment = FoldShipment.of(projection.fold, self._topic.types.values())

    # --- a round ------------------------------------------------------------------------------

    def round(self, *, rebuild: bool, ending: Ending | None, told: Callable[[int, int], None] | None) -> Projected:
        self._table.show()
        held, anew = self._held(rebuild=rebuild)
        with self._connected() as (store, seen):
            del store
        target, begun = seen, None
        events = steps = lost = 0
        while ending is None or not ending.asked:
            start = self._start(None if anew else held, seen)
            with self._connected() as (store, seen):
                self._check_losses(start, seen)
                # A round has an end, however quickly events come.
                limited = at.at_most(seen, {name: at.At(now.log_id, _stops(now)) for name, now in target.items()})
                end = self._end(store, start, limited)
            total = _distance(start, _ends(limited, start))
            begun = total if begun is None else begun
            if not total:
                break
            manifest = self._folded(start, end, None if anew else held)
            steps += 1
            number = 0 if held is None else held.number + 1
            if self._table.put(number, manifest):
                events += _distance(start, end)
                held, anew = Held(number, manifest), False
                if told is not None:
                    told(events, begun)
            else:
                lost += 1
                self._table.discard(self._new_files(manifest, held))
                held, anew = self._held(rebuild=False)
        return self._projected(held, seen, events=events, steps=steps, lost=lost)

    def _projected(
        self, held: Held | None, seen: dict[str, at.Seen], *, events: int, steps: int, lost: int
    ) -> Projected:
        start = self._start(held, seen)
        return Projected(
            projection=self._projection.name,
            directory=str(self._table.directory),
            number=-1 if held is None else held.number,
            events=events,
            keys=0 if held is None else held.manifest.keys,
            positions=dict(enumerate(start[self._topic.name].offsets)),
            steps=steps,
            lost=lost,
            behind=_distance(start, _ends(seen, start)),
        )

    def _held(self, *, rebuild: bool) -> tuple[Held | None, bool]:
        """Return the table as it is, and whether to begin anew all the same."""
        held = self._table.latest()
        if held is None:
            return None, False
        manifest, projection = held.manifest, self._projection
        if (manifest.projection, manifest.topic) != (projection.name, self._topic.name):
            raise UsageError(
                f"{self._table.directory} has projection {manifest.projection!r} of topic {manifest.topic!r}, and not "
                f"{projection.name!r} of {self._topic.name!r}: choose another directory"
            )
        if manifest.version == projection.version:
            return held, False
        if rebuild and manifest.version < projection.version:
            return held, True
        advice = (
            "it was made by a newer program"
            if manifest.version > projection.version
            else "begin anew with --rebuild (rebuild=True), or in another directory"
        )
        raise UsageError(
            f"{self._table.directory} has version {manifest.version} of projection {projection.name!r}, and this is "
            f"version {projection.version}: {advice}"
        )

    # --- positions ----------------------------------------------------------------------------

    def _connected(self) -> Any:
        return _connected(absolute(self._bus.url), self._bus, self._topic.name)

    def _start(self, held: Held | None, seen: dict[str, at.Seen]) -> at.Positions:
        now = seen[self._topic.name]
        if held is not None:
            return {self._topic.name: at.At(held.manifest.log_id, held.manifest.offsets)}
        # With an archive the history begins at its beginning, and else where the log does.
        begins = tuple(0 if "archive" in self._options else bounds.start for bounds in now.bounds)
        return {self._topic.name: at.At(now.log_id, begins)}

    def _check_losses(self, start: at.Positions, seen: dict[str, at.Seen]) -> None:
        lost = at.losses(start, seen)
        if not lost:
            return
        if seen[self._topic.name].log_id != start[self._topic.name].log_id:
            raise DataLost(f"{lost[0]}. Begin anew in another directory")
        if "archive" not in self._options and str(self._options.get("failOnDataLoss", True)).lower() != "false":
            raise DataLost(f"{lost[0]}. To go on without what is lost, set the option failOnDataLoss to false")

    def _end(self, store: Store, start: at.Positions, seen: dict[str, at.Seen]) -> at.Positions:
        rows = min(self._step_rows, self._rows_of_usual_size(store, start, seen))
        if "archive" in self._options:
            # What was trimmed is read from there, and counts.
            seen = {
                name: now._replace(bounds=tuple(Range(0, each.stop) for each in now.bounds))
                for name, now in seen.items()
            }
        end = at.advance(start, seen, rows_max=rows)
        return {name: known._replace(began=None) for name, known in end.items()}

    def _rows_of_usual_size(self, store: Store, start: at.Positions, seen: dict[str, at.Seen]) -> int:
        """Return how many events have about `STEP_BYTES`, by the size of the next few."""
        name = self._topic.name
        events = size = 0
        for partition, (offset, bounds) in enumerate(zip(start[name].offsets, seen[name].bounds, strict=True)):
            first = max(offset, bounds.start)
            if first < bounds.stop:
                found = store.log.read(Partition(seen[name].log_id, partition), first, bytes_max=SAMPLE_BYTES)
                batches = [item for item in found if isinstance(item, Batch)]
                events += sum(map(len, batches))
                size += sum(int(batch.sizes.sum()) for batch in batches)
        return max(STEP_BYTES * events // size, 1) if size else STEP_ROWS

    # --- a step -------------------------------------------------------------------------------

    def _folded(self, start: at.Positions, end: at.Positions, held: Held | None) -> Manifest:
        """Fold the events between two positions; return the table as it is with them."""
        self._table.prepare()
        before = None if held is None else held.manifest
        work = Work(
            shipment=self._shipment,
            content_type=self._topic.settings.content_type,
            usual=usual_kind(self._projection),
            buckets=self._buckets if before is None else before.buckets,
            directory=str(self._table.data),
            files={} if before is None else {bucket: file.name for bucket, file in before.files.items()},
            layout=self._layout,
            fields=self._fields,
        )
        rows = _plainly(lambda: self._frame(start, end, work).collect())
        files = {} if before is None else dict(before.files)
        problems = [row.problem for row in rows if row.problem is not None]
        if problems:
            written = {row.file for row in rows if row.file is not None}
            self._table.discard(written - {file.name for file in files.values()})
            raise failure_of(min(problems))
        for row in rows:
            files.pop(row.bucket, None)
            if row.file is not None:
                files[row.bucket] = BucketFile(row.file, row.rows)
        known = end[self._topic.name]
        return Manifest(
            projection=self._projection.name,
            version=self._projection.version,
            topic=self._topic.name,
            log_id=known.log_id,
            offsets=known.offsets,
            buckets=work.buckets,
            files=files,
            events=(0 if before is None else before.events) + sum(row.events for row in rows),
        )

    def _frame(self, start: at.Positions, end: at.Positions, work: Work) -> DataFrame:
        options = {
            **self._options,
            **({"types": sorted(self._projection.types)} if self._projection.types else {}),
            "startingOffsets": _numbered(start),
            "endingOffsets": _numbered(end),
        }
        events = events_of(self._spark, options_of(self._bus.url, self._topic.name, options), work.usual)
        if self._projection.fold.key is None:
            keyed = events.selectExpr("*", f"cast(pmod(xxhash64(key), {work.buckets}) as int) bucket")
        else:
            keyed = events.mapInArrow(work.key, KEYED_DDL)
        # Every task costs Spark a moment, so there are no more than keep all cores busy.
        tasks = min(work.buckets, TASKS_PER_CORE * self._spark.sparkContext.defaultParallelism)
        together = keyed.repartitionById(tasks, keyed.bucket % tasks).drop("bucket")
        return together.mapInArrow(work.fold, WRITTEN_DDL)

    @staticmethod
    def _new_files(manifest: Manifest, held: Held | None) -> set[str]:
        before = set() if held is None else {file.name for file in held.manifest.files.values()}
        return {file.name for file in manifest.files.values()} - before


def usual_kind(projection: Projection[Any]) -> Kind:
    """Return what nearly all events of a projection state of themselves: those of its first class, as it is now."""
    if not projection.classes:
        return Kind()
    event_type = projection.topic.types[projection.classes[0]]
    return Kind(event_type.name, event_type.content_type, event_type.headers.get(VERSION_HEADER))


def events_of(spark: SparkSession, options: dict[str, str], usual: Kind) -> DataFrame:
    """Return the events that options name: where they are, key, kind if it is not the usual one, and payload."""
    from pyspark.sql import functions as f

    from penstock.spark.source import SCHEMA

    read = ["partition", "offset", "key", "type", "content_type", "headers", "data"]
    schema = type(SCHEMA)([SCHEMA[name] for name in read])
    events = spark.read.format("penstock").schema(schema).options(**options).load()
    stated = {
        "type": f.col("type"),
        "content_type": f.col("content_type"),
        "version": f.try_element_at(f.col("headers"), f.lit(VERSION_HEADER)),
    }
    differs = [~column.eqNullSafe(f.lit(getattr(usual, name) or None)) for name, column in stated.items()]
    kind = f.when(reduce(or_, differs), f.to_json(f.struct(*(column.alias(name) for name, column in stated.items()))))
    return events.select("partition", "offset", "key", kind.alias("note"), "data")


def _layout(projection: Projection[Any]) -> tuple[Layout, tuple[str, ...]]:
    """Return the columns of a projection's states, and the fields that these are, if the state has any."""
    annotation = projection.fold.state.annotation
    fields = PerClass(fields_of)[annotation] if isinstance(annotation, type) else None
    if not fields:
        return Layout({VALUE: PerClass(column_of)[annotation]}), ()
    layout = PerClass(layout_of)[annotation]
    names = [name.lower() for name in layout.columns]
    for taken in (KEY, STATE):
        if taken in names:
            raise UsageError(
                f"{projection}: its state has a field {taken!r}, which is the name of a column of every table: name it "
                f"otherwise"
            )
    if len(set(names)) < len(names):
        raise UsageError(f"{projection}: its state has fields that differ in case alone, which no table can have")
    return layout, tuple(layout.columns)


# --- reaching the store ---------------------------------------------------------------------------


class _connected:  # noqa: N801 - a context manager, used like a function
    """Open the store, with what the topic holds now."""

    def __init__(self, url: str, bus: Bus, topic: str) -> None:
        self._connection = connect(url, bus.settings)
        self._topic = topic

    def __enter__(self) -> tuple[Store, dict[str, at.Seen]]:
        store, _ = self._connection.__enter__()
        return store, patiently(Topics(store, [self._topic]).seen)

    def __exit__(self, *error: Any) -> None:
        self._connection.__exit__(*error)


def _stops(now: at.Seen) -> tuple[int, ...]:
    return tuple(bounds.stop for bounds in now.bounds)


def _ends(seen: dict[str, at.Seen], start: at.Positions) -> at.Positions:
    """Return where the log ends, or where a table is that is beyond, because another projector was."""
    return {
        name: at.At(now.log_id, tuple(map(max, _stops(now), start[name].offsets)))
        for name, now in seen.items()
        if name in start
    }


def _distance(start: at.Positions, end: at.Positions) -> int:
    return sum(
        stop - begin
        for name, known in end.items()
        for begin, stop in zip(start[name].offsets, known.offsets, strict=True)
    )


def _numbered(positions: at.Positions) -> dict[str, dict[str, int]]:
    return {
        name: {str(partition): offset for partition, offset in enumerate(known.offsets)}
        for name, known in positions.items()
    }


_OURS: Final = re.compile(r"^(?:.*\b)?penstock\.errors\.(\w+): (.+)$", re.MULTILINE)


def _plainly(work: Callable[[], Any]) -> Any:
    """Do work of Spark's; raise an error of ours as it was raised in a task, without Spark's pages around it."""
    from pyspark.errors import PySparkException

    try:
        return work()
    except PySparkException as error:
        found = _OURS.findall(str(error))
        cls = getattr(errors, found[-1][0], PenstockError) if found else None
        if cls is None:
            raise
        raise _said(cls, found[-1][1]) from error


def _said(cls: type[PenstockError], message: str) -> PenstockError:
    made = cls.__new__(cls)
    made.args = (message,)
    return made
