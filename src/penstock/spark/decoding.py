"""`decode`: the payloads of events as typed columns.

What this promises:

* A row is read as a bus reads the event: by its type, its content type and its version, through the class's upcasters.
  What the bus refuses with an error is a row whose payload is in `_corrupt`; no other row is, except one that holds a
  value which its column cannot hold, such as an `int` of more than 64 bits. Nothing is rounded, cut or made null.
* There are only expressions and no actions: it serves batches and streams, and each row is decoded once.
* The class reaches Spark's workers also from where they cannot import it: a notebook, a script, a test.

An Arrow UDF calls `EventType.decode` for each row, for JSON as for all else. Spark's own JSON parser is more lenient
than ours in some places and stricter in others; page 19 of the decisions says what making it exact would cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import repeat
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as spark
from pyspark.sql.pandas.functions import arrow_udf

from penstock.codecs import PerClass, codec_named
from penstock.errors import CodecError, DecodeError, UsageError
from penstock.events import VERSION_HEADER, EventType, event_type_of, version_of
from penstock.spark.shipping import Shipment
from penstock.spark.types import Column, Layout, array_of, layout_of

CORRUPT = "_corrupt"
EVENT = "_event"


def decode(df: DataFrame, cls: type, codec: str | None = None) -> DataFrame:
    """Return `df` with a column for each field of `cls`, and beside them `_corrupt` and `_event`.

    `df` holds events as the source `penstock` yields them; of their columns only `data` is needed. `_corrupt` is the
    payload of a row that `cls` cannot be made of, whose fields are all null. `_event` has the other columns of `df`.
    `codec` names the one to read every row by, whatever its content type is said to be.
    """
    event_type = _event_type(cls, codec)
    layout = PerClass(layout_of)[cls]
    _check_names(df, cls, layout)
    envelope = _Envelope(df, by_content_type=codec is None)
    found = "__penstock_found"
    df = df.select("*", _reader(event_type, layout)(envelope.asked).alias(found))
    value = f.col(found)
    corrupt = f.when(value.isNull(), f.coalesce(f.col("data"), f.lit(b"")))
    columns = [value.getField(name).alias(name) for name in layout.columns]
    return df.select(*columns, corrupt.alias(CORRUPT), *envelope.shown)


def _event_type(cls: type, codec: str | None) -> EventType[Any]:
    event_type: EventType[Any] = event_type_of(cls)
    if codec is not None:
        chosen = codec_named(codec)
        try:
            chosen.check(cls)
        except CodecError as error:
            raise UsageError(f"codec {codec!r} cannot read event {event_type.name!r}: {error}") from error
        event_type = dataclasses.replace(event_type, codec=chosen)
    if issubclass(cls, bytes):
        raise UsageError(f"{cls.__qualname__} has no fields to make columns of: its value is the column `data` itself")
    return event_type


def _check_names(df: DataFrame, cls: type, layout: Layout) -> None:
    if "data" not in df.columns:
        raise UsageError(f"the DataFrame has no column `data` to decode, only {', '.join(df.columns) or 'none at all'}")
    if not isinstance(df.schema["data"].dataType, spark.BinaryType):
        raise UsageError(f"column `data` is {df.schema['data'].dataType.simpleString()}; it must be binary")
    if not layout.columns:
        raise UsageError(f"{cls.__qualname__} has no fields to make columns of")
    cased = str(df.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"
    seen = {CORRUPT: "the payload of a corrupt row", EVENT: "the event's other columns"}
    for name in layout.columns:
        folded = name if cased else name.lower()
        if folded in seen:
            raise UsageError(
                f"field {name!r} of {cls.__qualname__} would have the column of {seen[folded]}: decode a class that "
                f"names it otherwise" + ("" if cased else ", or set spark.sql.caseSensitive if only the case differs")
            )
        seen[folded] = f"field {name!r}"


class _Envelope:
    """What the columns of a DataFrame say of its events besides their payload."""

    def __init__(self, df: DataFrame, *, by_content_type: bool) -> None:
        self._stated = {"data": f.coalesce(f.col("data"), f.lit(b""))}
        if "type" in df.columns:
            self._stated["type"] = f.coalesce(f.col("type"), f.lit(""))
        if by_content_type and "content_type" in df.columns:
            self._stated["content_type"] = f.nullif(f.col("content_type"), f.lit(""))
        if "headers" in df.columns:
            self._stated["version"] = f.try_element_at(f.col("headers"), f.lit(VERSION_HEADER))
        others = [f.col(_quoted(name)) for name in df.columns if name != "data"]
        self.shown = [f.struct(*others).alias(EVENT)] if others else []

    @property
    def asked(self) -> Expression:
        """What the codec must be told to read a row."""
        return f.struct(*(stated.alias(name) for name, stated in self._stated.items()))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


# --- by the codec ----------------------------------------------------------------------------


def _reader(event_type: EventType[Any], layout: Layout) -> Callable[[Expression], Expression]:
    shipment = PerClass(lambda _: Shipment.of(event_type))[event_type.cls]

    def read(rows: pa.Array) -> pa.Array:
        return read_rows(shipment, layout, rows)

    # Spark would decode a row anew for every filter on what was decoded, were it free to.
    reader: Any = arrow_udf
    return reader(read, layout.spark).asNondeterministic()  # type: ignore[no-any-return]


def read_rows(shipment: Shipment, layout: Layout, rows: pa.Array) -> pa.Array:
    """Return the values of rows as structs, null where there is none; runs in Spark's workers."""
    if rows.null_count == len(rows):
        return pa.nulls(len(rows), layout.arrow)
    event_type = shipment.open()
    payloads = rows.field("data").to_pylist()
    names = [field.name for field in rows.type]
    stated = [rows.field(name).to_pylist() if name in names else None for name in ("type", "content_type", "version")]
    ways: dict[tuple[Any, ...], Callable[[bytes], Any] | None] = {}
    kinds = zip(*(repeat(None) if column is None else column for column in stated), strict=False)
    fields = _fields_getter(layout)
    found: list[tuple[Any, ...] | None] = []
    for is_asked, payload, kind in zip(rows.is_valid().to_pylist(), payloads, kinds, strict=False):
        if kind not in ways:
            ways[kind] = _way(event_type, *kind)
        way = ways[kind]
        try:
            found.append(fields(way(payload)) if is_asked and way is not None else None)
        except (CodecError, AttributeError):  # A field that the class leaves unset has no value for its column.
            found.append(None)
    return _columns(layout, found)


def _fields_getter(layout: Layout) -> Callable[[Any], tuple[Any, ...]]:
    names = list(layout.columns)
    if len(names) > 1:
        return attrgetter(*names)
    only = attrgetter(names[0])
    return lambda value: (only(value),)


def _way(
    event_type: EventType[Any], name: str | None, content_type: str | None, version: bytes | None
) -> Callable[[bytes], Any] | None:
    """Return what reads payloads of one kind, as `Topic.decode` does; None if nothing does."""
    if name is not None and name != event_type.name:
        return None
    try:
        return event_type.way(version_of({} if version is None else {VERSION_HEADER: version}), content_type)
    except DecodeError:
        return None


def _columns(layout: Layout, rows: list[tuple[Any, ...] | None]) -> pa.Array:
    good = [row is not None for row in rows]
    nothing = (None,) * len(layout.columns)
    arrays = []
    for column, values in zip(
        layout.columns.values(), zip(*(row or nothing for row in rows), strict=True), strict=True
    ):
        try:
            arrays.append(array_of(column, values))
        except Exception:  # noqa: BLE001 - whatever a value is, its column cannot hold it
            fitting = [_fits(column, value) for value in values]
            good = [both and fits for both, fits in zip(good, fitting, strict=True)]
            arrays.append(
                array_of(column, [value if fits else None for value, fits in zip(values, fitting, strict=True)])
            )
    # The fields of a null struct are null for whoever looks through it, so nothing else is to be cleared.
    return pa.StructArray.from_arrays(arrays, fields=list(layout.arrow), mask=pa.array([not one for one in good]))


def _fits(column: Column, value: Any) -> bool:
    try:
        array_of(column, [value])
    except Exception:  # noqa: BLE001 - as where this is called
        return False
    return True
