"""The writers that Spark calls: one for a batch, one for a stream. They are a sink, in the sense of `runtime.sinks`.

Each task stages what it is given, and reports where. The driver then delivers the parts that count, once: parts of
tasks that failed, or ran twice, are not among them. A stream is known by the option `sinkName` and the id of its query,
which its checkpoint keeps; a batch write is a job by itself.

Within a partition of the topic, events are in the order of the DataFrame's partitions, and of the rows in them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.clock import SystemClock
from penstock.errors import InvalidEvent, UsageError
from penstock.runtime import sinks
from penstock.runtime.staging import Sink, StagedPart, Stager, open_staging
from penstock.spark.connection import Connection, connect, patiently
from penstock.spark.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.settings import Settings
    from penstock.spark.options import WriteOptions

_QUERY: Final = "sql.streaming.queryId"


@dataclass
class TaskReport(WriterCommitMessage):
    """What one task has staged, and for which query."""

    query: str
    parts: Sequence[StagedPart]


class _Writing:
    """What both writers have in common; it travels to the tasks."""

    def __init__(self, options: WriteOptions, settings: Settings) -> None:
        self._options = options
        self._settings = settings
        with connect(options.url, settings) as (store, connection):
            patiently(Topics(store, [options.topic]).found)  # so that a wrong name is told before anything runs
            self._connection: Connection = connection

    def stage(self, sink: Sink, batches: Iterator[pa.RecordBatch]) -> TaskReport:
        """Stage rows, in a task."""
        context = TaskContext.get()
        assert context is not None
        with self._connection.open() as store:
            (topic,) = Topics(store, [self._options.topic]).found()
            stager = Stager(
                store.log,
                open_staging(store.log, sink, topic),
                topic,
                limits=self._settings.limits,
                clock=SystemClock(),
                turn=context.partitionId(),
            )
            for number, batch in zip(count(), batches, strict=False):
                try:
                    stager.add(*_events(batch))
                except UsageError as error:
                    raise InvalidEvent(f"rows of task {context.partitionId()}, batch {number}: {error}") from None
            return TaskReport(sink.query, stager.finish())

    def deliver(
        self, sink: Sink, batch: int, messages: Sequence[WriterCommitMessage | None], *, adopt: bool = False
    ) -> None:
        """Deliver what tasks have staged, in the driver."""
        parts = [part for report in messages if isinstance(report, TaskReport) for part in report.parts]
        with connect(self._options.url, self._settings) as (store, _):

            def attempt() -> None:
                (topic,) = Topics(store, [self._options.topic]).found()
                sinks.commit(store, sink, batch, topic, parts, clock=SystemClock(), adopt=adopt)

            patiently(attempt)

    def discard(self, sink: Sink) -> None:
        """Remove what a job has staged."""
        with connect(self._options.url, self._settings) as (store, _):
            sinks.discard(store, sink)


def _events(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray[tuple[int], np.dtype[np.int32]] | None]:
    """Return the event's columns of the rows, and their partitions if they say them."""
    if "partition" not in rows.schema.names:
        return rows, None
    partitions = rows.column("partition")
    if partitions.null_count:
        raise InvalidEvent("column 'partition': a row has no value; leave the column out to let keys decide")
    return rows.drop_columns(["partition"]), partitions.to_numpy(zero_copy_only=False).astype(np.int32)


class PenstockWriter(DataSourceArrowWriter):
    """Writes a DataFrame to a topic, whole or not at all."""

    def __init__(self, options: WriteOptions, settings: Settings) -> None:
        self._writing = _Writing(options, settings)
        job = uuid.uuid4().hex
        self._sink = Sink(f"batch-{job}", job, once=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage, in a task."""
        return self._writing.stage(self._sink, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Deliver what all tasks have staged."""
        self._writing.deliver(self._sink, 0, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Remove what was staged."""
        self._writing.discard(self._sink)


class PenstockStreamWriter(DataSourceStreamArrowWriter):
    """Delivers the batches of a query to a topic, each of them once."""

    def __init__(self, options: WriteOptions, settings: Settings) -> None:
        self._options = options
        self._writing = _Writing(options, settings)

    def _sink(self, query: str) -> Sink:
        assert self._options.sink is not None  # the options were checked for it
        return Sink(self._options.sink, query)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage, in a task."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(_QUERY)
        if query is None:
            raise UsageError("this task does not belong to a streaming query: Spark did not say which one")
        return self._writing.stage(self._sink(query), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Deliver a batch; may be repeated."""
        queries = {report.query for report in messages if isinstance(report, TaskReport)}
        for query in queries:  # one, or none if the batch had no tasks
            self._writing.deliver(self._sink(query), batchId, messages, adopt=self._options.adopt)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave what was staged to the next batch, which trims it."""
