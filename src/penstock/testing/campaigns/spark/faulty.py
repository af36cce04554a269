"""`format("penstock-faulty")`: the production sink, which says at each step where it is and waits there.

Nothing of the sink is replaced. Around it, the store that it opens is one that is watched: calls that are steps of a
delivery are told before or after they are made. The option `post` names the socket; `plant` names a function that puts
a bug into the process, as `module:function`, to see that the campaign finds it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.spark import connection
from penstock.spark.source import PenstockSource
from penstock.stores import open_store
from penstock.testing.campaigns.spark.steps import Point, come_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from penstock.spark.writer import PenstockStreamWriter

FORMAT: Final = "penstock-faulty"
_BATCH: Final = "streaming.sql.batchId"


class FaultySource(PenstockSource):
    """Penstock topics in Spark, watched while they are written."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        known = dict(options)
        self._post = known.pop("post")
        self._plant = known.pop("plant", "")
        super().__init__(known)

    @classmethod
    def name(cls) -> str:
        """Return what `format` is given."""
        return FORMAT

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802, FBT001 - Spark's signature
        """Return what writes a stream."""
        return FaultyWriter(super().streamWriter(schema, overwrite), self._post, self._plant)


class FaultyWriter(DataSourceStreamArrowWriter):
    """The writer of a stream, watched."""

    def __init__(self, writer: PenstockStreamWriter, post: str, plant: str) -> None:
        self._writer = writer
        self._post = post
        self._plant = plant

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Stage, in a task."""
        plant(self._plant)
        context = TaskContext.get()
        assert context is not None
        batch = int(context.getLocalProperty(_BATCH) or -1)
        steps = Steps(self._post, batch, task=context.partitionId(), attempt=context.attemptNumber())
        with _watching({"log.append": _Around(after=steps.staged)}):
            return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Deliver a batch."""
        plant(self._plant)
        steps = Steps(self._post, batchId)
        steps.come_to(Point.AFTER_STAGING)
        calls = {
            "manifests.prepare": _Around(after=lambda: steps.come_to(Point.AFTER_MANIFEST)),
            "log.append": _Around(before=steps.append_begins),
            "manifests.finish": _Around(before=lambda: steps.come_to(Point.BEFORE_DONE)),
            "log.trim": _Around(before=steps.trim_begins),
        }
        with _watching(calls):
            self._writer.commit(messages, batchId)
        steps.come_to(Point.AFTER_DONE)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Leave a batch."""
        self._writer.abort(messages, batchId)


class Steps:
    """How far one task, or one delivery, has come."""

    def __init__(self, post: str, batch: int, *, task: int = 0, attempt: int = 0) -> None:
        self._post = post
        self._batch = batch
        self._task = task
        self._attempt = attempt
        self._count = 0
        self._is_trimming = False

    def come_to(self, point: Point) -> None:
        """Say so, and wait."""
        come_to(self._post, point, self._batch, number=self._count, task=self._task, attempt=self._attempt)

    def staged(self) -> None:
        """Say that one more part is staged."""
        self._count += 1
        self.come_to(Point.IN_TASK)

    def append_begins(self) -> None:
        """Say that one more partition is going to be appended to; of the first one the manifest has told."""
        if self._count:
            self.come_to(Point.IN_APPEND)
        self._count += 1

    def trim_begins(self) -> None:
        """Say that what was staged is going to be removed."""
        if not self._is_trimming:
            self.come_to(Point.BEFORE_TRIM)
        self._is_trimming = True


# --- a store that is watched ----------------------------------------------------------------------


class _Around:
    """What is told before and after a call."""

    def __init__(self, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> None:
        self._before = before
        self._after = after

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self._before is not None:
                self._before()
            answer = call(*arguments, **named)
            if self._after is not None:
                self._after()
            return answer

        return wrapped


class _Watched:
    """Something whose calls are watched, and otherwise just what it is."""

    def __init__(self, thing: object, calls: dict[str, _Around], path: str = "") -> None:
        self._thing = thing
        self._calls = calls
        self._path = path

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._thing, name)
        path = f"{self._path}{name}"
        if path in self._calls:
            return self._calls[path].wrap(found)
        if any(call.startswith(f"{path}.") for call in self._calls):
            return _Watched(found, self._calls, f"{path}.")
        return found


def _watching(calls: dict[str, _Around]) -> Any:
    """Watch the stores that are opened in this block."""

    def open_watched(*arguments: Any, **named: Any) -> Any:
        return _Watched(open_store(*arguments, **named), calls)

    return mock.patch.object(connection, "open_store", open_watched)


_planted: set[str] = set()


def plant(name: str) -> None:
    """Put a bug into this process, once: workers are used again."""
    if name and name not in _planted:
        _planted.add(name)
        module, _, function = name.partition(":")
        getattr(importlib.import_module(module), function)()
