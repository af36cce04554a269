"""What runs in the tasks of `project`: events to keys, and the events of a bucket into its file of states.

Two steps, with Spark's shuffle between them. The first finds the key of each event, and so its bucket; where that is
the event's own key, Spark does it by itself. The second has all events of some buckets. For one after the other it puts
them in the order of partition and offset, folds them into the states that they touch, and writes a new file. Payloads
are decoded and the function is called one by one, in Python; all else is done in columns.

The headers of events stay outside: to carry a map to Python and back costs Spark more than all the rest.

What goes wrong with an event travels on as a row, with its position, so that the driver tells it in one sentence; Spark
would repeat a task that raises, and show a page of Java for it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.bus.folding import KEY_BYTES_MAX, Changed, Fold
from penstock.codecs import reader_of
from penstock.collecting import uncollected
from penstock.errors import DecodeError, ProjectionFailed, did_you_mean
from penstock.events import VERSION_HEADER, version_of
from penstock.offsets import Position
from penstock.spark.pipelines.tables import KEY, STATE, buckets_of
from penstock.spark.shipping import Folding, FoldShipment
from penstock.spark.types import Layout, array_of

SHUFFLED: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("note", pa.string()),  # null for nearly all; else a `Kind`, as JSON, or a failure
        ("data", pa.binary()),
    ]
)
"""Events on their way to the task of their bucket; few columns, as each costs Spark a moment for every row."""
KEYED: Final = SHUFFLED.append(pa.field("bucket", pa.int32()))
KEYED_DDL: Final = "partition int, offset long, key binary, note string, data binary, bucket int"

WRITTEN: Final = pa.schema(
    [
        ("bucket", pa.int32()),
        ("file", pa.string()),
        ("rows", pa.int64()),
        ("events", pa.int64()),
        ("problem", pa.string()),
    ]
)
WRITTEN_DDL: Final = "bucket int, file string, rows long, events long, problem string"


class Kind(msgspec.Struct, frozen=True):
    """What an event states of itself that decides how it is decoded."""

    type: str = ""
    content_type: str | None = None
    version: bytes | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """All that tasks need to know."""

    shipment: FoldShipment
    content_type: str
    """Of events that state none."""
    usual: Kind
    buckets: int
    directory: str
    files: dict[int, str]
    """The present file of each bucket that has one."""
    layout: Layout
    fields: tuple[str, ...]
    """The fields of a state that are columns; none if the state itself is."""

    # --- the first step -------------------------------------------------------------------------

    def key(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield events with the key of their state, and its bucket; for a projection with a key of its own."""
        folding = self.shipment.open()
        with uncollected():
            for batch in batches:
                if not batch.num_rows:
                    continue
                try:
                    yield self._keyed(folding, batch)
                except ProjectionFailed as error:
                    yield pa.RecordBatch.from_pylist([{"key": b"", "note": _told(error), "bucket": 0}], schema=KEYED)
                    return

    def _keyed(self, folding: Folding, batch: pa.RecordBatch) -> pa.RecordBatch:
        partitions, offsets, _, notes, payloads = batch.columns
        where = self._where(partitions, offsets)
        values = self._decoded(folding, payloads.to_pylist(), notes, where)
        keys = pa.array(folding.fold.keys(values, (), where), pa.string()).cast(pa.binary())
        buckets = pa.array(buckets_of(keys, self.buckets))
        return pa.RecordBatch.from_arrays([partitions, offsets, keys, notes, payloads, buckets], schema=KEYED)

    # --- the second -----------------------------------------------------------------------------

    def fold(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Fold the events of some buckets, one bucket after the other, and yield what became of the file of each."""
        rows = pa.Table.from_batches([batch for batch in batches if batch.num_rows], schema=SHUFFLED)
        problems = rows.column("note").filter(pc.starts_with(rows.column("note"), "["))
        if len(problems):
            yield _row(bucket=0, events=0, problem=problems[0].as_py())
            return
        try:
            by_bucket = self._by_bucket(rows)
        except ProjectionFailed as error:
            yield _row(bucket=0, events=0, problem=_told(error))
            return
        with uncollected():
            for bucket, of_bucket in by_bucket:
                yield self._folded(bucket, of_bucket)

    def _by_bucket(self, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
        """Return buckets with their events, in the order of partition and offset; keys are texts from here on."""
        if not rows.num_rows:
            return iter(())
        # The offsets within what is large count in 64 bits, so that all of it can be one array.
        rows = rows.cast(_WIDE).combine_chunks()
        partitions, offsets = rows.column("partition").to_numpy(), rows.column("offset").to_numpy()
        keys = _texts(self.shipment.open().fold, rows.column("key").chunk(0), self._where(partitions, offsets))
        buckets = buckets_of(keys, self.buckets)
        rows = rows.set_column(rows.column_names.index("key"), "key", keys)
        order = np.lexsort((offsets, partitions, buckets))
        found, starts = np.unique(buckets[order], return_index=True)
        edges = [*starts.tolist(), rows.num_rows]
        # One after the other, as whoever asks for the next is done with the last.
        return (
            (bucket, rows.take(pa.array(order[start:stop])))
            for bucket, (start, stop) in zip(found.tolist(), pairwise(edges), strict=True)
        )

    def _folded(self, bucket: int, rows: pa.Table) -> pa.RecordBatch:
        held = pq.read_table(Path(self.directory) / self.files[bucket]) if bucket in self.files else None
        try:
            changed, last = self._changed(held, rows)
            file, count = self._written(bucket, held, changed, last)
        except ProjectionFailed as error:
            return _row(bucket=bucket, events=rows.num_rows, problem=_told(error))
        return _row(bucket=bucket, events=rows.num_rows, file=file, rows=count)

    def _changed(self, held: pa.Table | None, rows: pa.Table) -> tuple[dict[str, Changed], Callable[[str], Position]]:
        """Return the states that these events change, and a function that says which event changed one last."""
        folding = self.shipment.open()
        where = self._where(rows.column("partition"), rows.column("offset"))
        keys = rows.column("key").to_pylist()
        values = self._decoded(folding, rows.column("data").to_pylist(), rows.column("note"), where)
        before = {} if held is None else _before(held, keys)

        def last(key: str) -> Position:
            return where(len(keys) - 1 - keys[::-1].index(key))

        return folding.fold.fold(before, keys, values, where), last

    # --- files --------------------------------------------------------------------------------

    def _written(
        self, bucket: int, old: pa.Table | None, changed: dict[str, Changed], last: Callable[[str], Position]
    ) -> tuple[str | None, int]:
        """Write a bucket's file, unless nothing has changed; return its name, None if it is empty, and its rows."""
        if not changed:
            return (None, 0) if old is None else (self.files[bucket], old.num_rows)
        table = self._rows({key: each for key, each in changed.items() if each.encoded is not None}, last)
        if old is not None:
            gone = pc.is_in(old.column(KEY), value_set=pa.array(list(changed), pa.string()))
            kept = old.filter(pc.invert(gone))
            if not kept.schema.equals(table.schema):
                # The class of the state has changed: its columns are made anew from what it was.
                decode = self.shipment.open().fold.state.decode
                pairs = zip(kept.column(KEY).to_pylist(), kept.column(STATE).to_pylist(), strict=True)
                states = {key: Changed(text.encode(), decode(text.encode())) for key, text in pairs}
                kept = self._rows(states, last)
            table = pa.concat_tables([kept, table])
        if not table.num_rows:
            return None, 0
        return self._write(bucket, table.sort_by(KEY)), table.num_rows

    def _rows(self, states: dict[str, Changed], last: Callable[[str], Position]) -> pa.Table:
        encoded = [(each.encoded or b"").decode() for each in states.values()]
        arrays = [pa.array(states, pa.string())]
        for name, column in self.layout.columns.items():
            get = attrgetter(name) if self.fields else _itself
            values = [get(each.state) for each in states.values()]
            try:
                arrays.append(array_of(column, values))
            except Exception as error:  # noqa: BLE001 - whatever a value is, its column cannot hold it
                key = next(key for key, value in zip(states, values, strict=True) if not _fits(column, value))
                reason = f"its state: field {name!r} does not fit a column of {column.arrow}: {str(error)[:200]}"
                raise ProjectionFailed(self.shipment.name, str(last(key)), reason) from None
        names = [KEY, *self.layout.columns, STATE]
        return pa.table([*arrays, pa.array(encoded, pa.string())], names=names)

    def _write(self, bucket: int, table: pa.Table) -> str:
        name = f"{bucket:04d}-{uuid.uuid4().hex}.parquet"
        path = Path(self.directory) / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        return name

    # --- events -------------------------------------------------------------------------------

    def _where(self, partitions: Any, offsets: Any) -> Callable[[int], Position]:
        return lambda number: Position(self.shipment.topic, _number(partitions[number]), _number(offsets[number]))

    def _decoded(
        self, folding: Folding, payloads: list[bytes], notes: pa.Array, where: Callable[[int], Position]
    ) -> list[Any]:
        """Return the values of events, as a bus decodes them."""
        if not folding.types:
            return payloads
        if notes.null_count == len(notes):
            event_type = folding.types[self.usual.type]
            with suppress(Exception):  # one of them cannot be read: below it is found out which, and why
                return list(map(reader_of(event_type.codec, event_type.cls), payloads))
        values: list[Any] = []
        ways: dict[str | None, Callable[[bytes], Any]] = {}
        try:
            for payload, note in zip(payloads, notes.to_pylist(), strict=True):
                if note not in ways:
                    ways[note] = self._way(folding, self.usual if note is None else _READ_KIND.decode(note))
                values.append(ways[note](payload))
        except Exception as error:
            raise folding.fold.failure(where(len(values)), "the event", error) from error
        return values

    def _way(self, folding: Folding, kind: Kind) -> Callable[[bytes], Any]:
        event_type = folding.types.get(kind.type)
        if event_type is None:
            near = did_you_mean(kind.type, folding.types)
            raise DecodeError(f"topic {self.shipment.topic!r} declares no event type {kind.type!r}{near}")
        version = version_of({} if kind.version is None else {VERSION_HEADER: kind.version})
        return event_type.way(version, kind.content_type or self.content_type)


def _before(held: pa.Table, keys: Sequence[str]) -> dict[str, bytes]:
    """Return the states of these keys, as they are held."""
    touched = pc.is_in(held.column(KEY), value_set=pa.array(list(dict.fromkeys(keys)), pa.string()))
    found = held.select([KEY, STATE]).filter(touched)
    states = (state.encode() for state in found.column(STATE).to_pylist())
    return dict(zip(found.column(KEY).to_pylist(), states, strict=True))


_READ_KIND: Final = msgspec.json.Decoder(Kind)
_READ_PROBLEM: Final = msgspec.json.Decoder(tuple[str, str, str])


def _told(error: ProjectionFailed) -> str:
    return msgspec.json.encode([error.projection, error.position, error.reason]).decode()


def failure_of(problem: str) -> ProjectionFailed:
    """Return the error that a row stands for."""
    return ProjectionFailed(*_READ_PROBLEM.decode(problem))


def _texts(fold: Fold, keys: pa.Array, where: Callable[[int], Position]) -> pa.Array:
    """Return keys as texts, all at once if nothing is wrong with them."""
    if not keys.null_count:
        lengths = pc.min_max(pc.binary_length(keys)).as_py()
        if lengths["min"] > 0 and lengths["max"] <= KEY_BYTES_MAX:
            with suppress(pa.ArrowInvalid):
                return keys.cast(pa.large_string())
    # One by one, to find the one that is wrong: an event's own key, as no other comes so far.
    return pa.array(replace(fold, key=None).keys((), keys.to_pylist(), where), pa.large_string())


_WIDE: Final = pa.schema(
    [
        pa.field(
            field.name, {pa.binary(): pa.large_binary(), pa.string(): pa.large_string()}.get(field.type, field.type)
        )
        for field in SHUFFLED
    ]
)


def _row(**columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([columns], schema=WRITTEN)


def _itself(value: Any) -> Any:
    return value


def _number(value: Any) -> int:
    return int(value.as_py() if isinstance(value, pa.Scalar) else value)


def _fits(column: Any, value: Any) -> bool:
    try:
        array_of(column, [value])
    except Exception:  # noqa: BLE001 - as where this is called
        return False
    return True
