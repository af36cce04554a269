"""`format("penstock")`: topics as a source and a sink of Spark, for batches and for streams.

This is the class that Spark finds by itself, through the package `pyspark_penstock`. Making one must not fail, because
Spark would show another error in its place; so options are looked at when a reader or a writer is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock import columns as cols
from penstock.batch import STORED_SCHEMA
from penstock.errors import UsageError, did_you_mean
from penstock.settings import resolve
from penstock.spark.connection import absolute, absolute_lake
from penstock.spark.options import read_options, write_options

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from penstock.settings import Settings
    from penstock.spark.reader import PenstockReader, PenstockStreamReader
    from penstock.spark.writer import PenstockStreamWriter, PenstockWriter

_SPARK_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int32": IntegerType(),
    "int64": LongType(),
    "timestamp[us, tz=UTC]": TimestampType(),
    "binary": BinaryType(),
    "map<string, binary>": MapType(StringType(), BinaryType()),
}

SCHEMA = StructType([StructField(field.name, _SPARK_TYPES[str(field.type)]) for field in STORED_SCHEMA])
"""The columns of a DataFrame that is read."""

WRITABLE = ("partition", *cols.NAMES)
"""The columns that a DataFrame may have to be written; `data` it must have."""

_PLACES = ("topic", "offset", "appended_at")
"""Columns that are read, and decided by the log when they are written."""


class PenstockSource(DataSource):
    """Penstock topics in Spark."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        # Here, because this runs in the driver's directory, and everything else may not.
        self.options = {name: _absolute(name, value) for name, value in options.items()}

    @classmethod
    def name(cls) -> str:
        """Return what `format` is given."""
        return "penstock"

    def schema(self) -> StructType:
        """Return all columns of an event; a query may ask for fewer with `.schema(…)`."""
        return SCHEMA

    def reader(self, schema: StructType) -> PenstockReader:
        """Return what reads a batch."""
        from penstock.spark.reader import PenstockReader

        return PenstockReader(read_options(self.options, streaming=False), _settings(), _columns_read(schema))

    def streamReader(self, schema: StructType) -> PenstockStreamReader:  # noqa: N802 - Spark's name
        """Return what reads a stream."""
        from penstock.spark.reader import PenstockStreamReader

        return PenstockStreamReader(read_options(self.options, streaming=True), _settings(), _columns_read(schema))

    def writer(self, schema: StructType, overwrite: bool) -> PenstockWriter:  # noqa: FBT001 - Spark's signature
        """Return what writes a batch."""
        from penstock.spark.writer import PenstockWriter

        options = write_options(self.options, streaming=False)
        if overwrite:
            raise UsageError("a topic is never overwritten: use mode('append')")
        _check_columns_written(schema)
        return PenstockWriter(options, _settings())

    def streamWriter(self, schema: StructType, overwrite: bool) -> PenstockStreamWriter:  # noqa: N802, FBT001
        """Return what writes a stream; in mode `complete`, `overwrite`, every batch adds the whole result anew."""
        from penstock.spark.writer import PenstockStreamWriter

        options = write_options(self.options, streaming=True)
        _check_columns_written(schema)
        return PenstockStreamWriter(options, _settings())


def _absolute(name: str, value: str) -> str:
    if name.lower() == "url":
        return absolute(value)
    if name.lower() == "archive":
        return absolute_lake(value)
    return value


def _settings() -> Settings:
    # Of the driver's environment and directory; they travel to the tasks.
    return resolve().settings


def _columns_read(schema: StructType) -> list[str]:
    for field in schema.fields:
        if field.name not in SCHEMA.fieldNames():
            raise UsageError(f"events have no column {field.name!r}{did_you_mean(field.name, SCHEMA.fieldNames())}")
        wanted = SCHEMA[field.name].dataType
        if field.dataType != wanted:
            raise UsageError(
                f"column {field.name!r} is {wanted.simpleString()}, not {field.dataType.simpleString()}: read it as it "
                f"is, and cast it afterwards"
            )
    return schema.fieldNames()


def _check_columns_written(schema: StructType) -> None:
    names = schema.fieldNames()
    for field in schema.fields:
        if field.name in _PLACES:
            raise UsageError(
                f"column {field.name!r} is decided by the log, not by who writes: leave it out, "
                f"df.drop({', '.join(map(repr, [name for name in _PLACES if name in names]))})"
            )
        if field.name not in WRITABLE:
            raise UsageError(
                f"events have no column {field.name!r}{did_you_mean(field.name, WRITABLE)}; a DataFrame to write "
                f"has 'data', and if needed {', '.join(name for name in WRITABLE if name != 'data')}"
            )
        if not _fits(field):
            wanted = SCHEMA[field.name].dataType.simpleString()
            raise UsageError(f"column {field.name!r} must be {wanted}, not {field.dataType.simpleString()}: cast it")
    if "data" not in names:
        raise UsageError("the column 'data' is missing: it is the payload of the event, binary or string")


def _fits(field: Any) -> bool:
    given, wanted = field.dataType, SCHEMA[field.name].dataType
    if given == wanted:
        return True
    # A text is as good as its bytes, whatever collation it has.
    texts = (StringType, BinaryType)
    if isinstance(given, MapType) and isinstance(wanted, MapType):
        return isinstance(given.keyType, StringType) and isinstance(given.valueType, texts)
    if isinstance(given, IntegerType | LongType) and field.name == "partition":
        return True
    return (
        isinstance(given, texts)
        and isinstance(wanted, texts)
        and not (isinstance(given, BinaryType) and isinstance(wanted, StringType))
    )
