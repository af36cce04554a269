"""The readers that Spark calls: one for a batch, one for a stream.

A reader decides in the driver, and reads in tasks, in other processes: so it is pickled, and holds nothing that is open
while it travels. All decisions are in `positions`, all I/O is in `topics` (driver) and `reading` (tasks).

Spark tells a stream how far it has got by `commit`, but not after the last batch of an `availableNow` run: so a query's
cursor is also moved to each start that Spark asks to go on from.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.errors import UsageError
from penstock.spark import positions as at
from penstock.spark.connection import Connection, connect, patiently
from penstock.spark.options import Moment
from penstock.spark.reading import Reading
from penstock.spark.topics import Follower, Topics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.lake.reading import Readable
    from penstock.ports import Store
    from penstock.settings import Settings
    from penstock.spark.options import Marks, ReadOptions

TASK_ROWS_MIN: Final = 20_000
"""A span is not divided into smaller ones, unless the option `minPartitions` says so."""


class SpanPartition(InputPartition):
    """What one task reads, and how it reaches the store."""

    def __init__(self, span: at.Span, connection: Connection, archive: str | None) -> None:
        super().__init__(None)
        self.span = span
        self.connection = connection
        self.archive = archive

    def __repr__(self) -> str:
        return f"{self.span}"


def _reading(options: ReadOptions, columns: Sequence[str]) -> Reading:
    return Reading(
        columns=tuple(columns),
        types=options.types,
        keys=tuple(key.encode() for key in options.keys),
        from_us=options.from_us,
        to_us=options.to_us,
        fail_on_data_loss=options.fail_on_data_loss,
    )


def _read(reading: Reading, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    # For an empty batch Spark makes up a partition of its own.
    if isinstance(partition, SpanPartition):
        with partition.connection.open() as store:
            yield from reading.batches(_log(store, partition.archive), partition.span)


def _log(store: Store, archive: str | None) -> Readable:
    """Return the log of a store, together with its archive if there is one."""
    if archive is None:
        return store.log
    from penstock.lake.lake import Lake
    from penstock.lake.reading import ArchivedLog

    return ArchivedLog(store.log, Lake(archive))


def _partitions(spans: list[at.Span], options: ReadOptions, connection: Connection) -> list[InputPartition]:
    if options.min_partitions is None:
        # As many as this machine runs at a time; a reader is not told how many the cluster does.
        pieces = at.divide(spans, os.cpu_count() or 1, smallest=TASK_ROWS_MIN)
    else:
        pieces = at.divide(spans, options.min_partitions)
    return [SpanPartition(span, connection, options.archive) for span in pieces]


def _start(topics: Topics, seen: dict[str, at.Seen], options: ReadOptions) -> at.Positions:
    """Return where to begin: at the given offsets, but not before `fromTime`."""
    start = _resolve(topics, seen, options.starting)
    if options.from_us is None:
        return start
    return _combined(max, start, _resolve(topics, seen, Moment(options.from_us)))


def _resolve(topics: Topics, seen: dict[str, at.Seen], marks: Marks) -> at.Positions:
    return at.resolve(marks, seen, partial(topics.find_time, seen))


def _combined(choose: Any, one: at.Positions, other: at.Positions) -> at.Positions:
    return {
        topic: known._replace(offsets=tuple(map(choose, known.offsets, other[topic].offsets)))
        for topic, known in one.items()
    }


# --- a batch --------------------------------------------------------------------------------------


class PenstockReader(DataSourceReader):
    """Reads what is there between two positions."""

    def __init__(self, options: ReadOptions, settings: Settings, columns: Sequence[str]) -> None:
        self._options = options
        self._settings = settings
        self._reading = _reading(options, columns)

    def partitions(self) -> list[InputPartition]:
        """Decide what each task reads."""
        with connect(self._options.url, self._settings) as (store, connection):
            topics = Topics(store, self._options.topics, _log(store, self._options.archive))
            return patiently(partial(self._plan, topics, connection))

    def _plan(self, topics: Topics, connection: Connection) -> list[InputPartition]:
        options = self._options
        seen = topics.seen()
        if not seen:
            raise UsageError(f"no topic matches {', '.join(options.topics)!r}: `penstock topics` lists what there is")
        start, end = _start(topics, seen, options), _resolve(topics, seen, options.ending)
        if options.to_us is not None:
            end = _combined(min, end, _resolve(topics, seen, Moment(options.to_us)))
        for what in (*at.losses(start, seen), *at.losses(end, seen)):
            self._reading.lost(what)
        start, end = (at.within(position, seen) for position in (start, end))
        at.check_order(start, end)
        return _partitions(at.spans_between(start, end), options, connection)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read, in a task."""
        return _read(self._reading, partition)


# --- a stream -------------------------------------------------------------------------------------


class PenstockStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what comes, position by position."""

    def __init__(self, options: ReadOptions, settings: Settings, columns: Sequence[str]) -> None:
        self._options = options
        self._settings = settings
        self._reading = _reading(options, columns)
        self._forget()

    def _forget(self) -> None:
        self._open: tuple[Topics, Connection, Follower | None] | None = None
        self._closing = ExitStack()
        self._target: at.Positions | None = None
        self._told: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_options", "_settings", "_reading")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _connected(self) -> tuple[Topics, Connection, Follower | None]:
        if self._open is None:
            options = self._options
            store, connection = self._closing.enter_context(connect(options.url, self._settings))
            follower = None if options.subscription is None else Follower(store, options.subscription)
            self._open = Topics(store, options.topics, _log(store, options.archive)), connection, follower
        return self._open

    # --- positions ------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return where a query without a checkpoint begins."""
        return patiently(self._initial)

    def _initial(self) -> dict[str, Any]:
        topics, _, follower = self._connected()
        seen = topics.seen()
        start = _start(topics, seen, self._options)
        for what in at.losses(start, seen):
            self._lost(what)
        start = at.within(start, seen)
        if follower is not None:
            follower.tell(start)
        return at.encode(start)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return how much a batch may have, unless a trigger asks for everything."""
        if self._options.max_rows is not None:
            return ReadMaxRows(self._options.max_rows)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next batch goes."""
        return patiently(partial(self._latest, at.decode(start), limit))

    def _latest(self, start: at.Positions, limit: ReadLimit) -> dict[str, Any]:
        topics, _, follower = self._connected()
        if follower is not None:
            follower.tell(start)
        seen = topics.seen()
        for what in at.losses(start, seen):
            self._lost(what)
        if self._target is not None:
            seen = at.at_most(seen, self._target)
        everything = isinstance(limit, ReadAllAvailable)
        return at.encode(
            at.advance(
                start,
                seen,
                rows_max=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
                bytes_max=None if everything else self._options.max_bytes,
                measure=topics.measure,
            )
        )

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Note how far the logs go now: this run goes no further."""
        self._target = patiently(self._ends)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return how far the logs go, for the query's progress."""
        return at.encode(patiently(self._ends))

    def _ends(self) -> at.Positions:
        topics, *_ = self._connected()
        return _resolve(topics, topics.seen(), "latest")

    def commit(self, end: dict[str, Any]) -> None:
        """Note that everything before this is done."""
        _, _, follower = self._connected()
        if follower is not None:
            patiently(partial(follower.tell, at.decode(end)))

    def _lost(self, what: str) -> None:
        if what not in self._told:  # at every trigger it is still so
            self._reading.lost(what)
            self._told.add(what)

    # --- events ---------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Decide what each task reads; the same events for the same positions, at every attempt."""
        spans = at.spans_between(at.decode(start), at.decode(end))
        if not spans:
            return []
        _, connection, _ = self._connected()
        return _partitions(spans, self._options, connection)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read, in a task."""
        return _read(self._reading, partition)

    def stop(self) -> None:
        """Close the store."""
        self._closing.close()
        self._forget()
