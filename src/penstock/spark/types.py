"""The columns that the fields of an event class become.

A `Column` says what type a field has in Arrow and in Spark, and how its Python value becomes one that Arrow takes. It
refers to no class of the user's, so it travels to Spark's workers as it is.

===========================================  ==================================================
annotation                                   column
===========================================  ==================================================
`str`, `bool`, `int`, `float`, `bytes`       `string`, `boolean`, `bigint`, `double`, `binary`
`datetime`                                   `timestamp`; one without a zone is taken as UTC
`date`, `timedelta`                          `date`, `interval day to second`
`time`, `UUID`                               `string`, in their ISO form
`Decimal`                                    `decimal(38,18)`
an `Enum`, a `Literal`                       that of its values, if they are all of one type
`X | None`                                   that of `X`
`list`, `tuple[X, …]`, `set`, `frozenset`    `array`; a set in the order of its members
`dict[K, X]`                                 `map`, if `K` is a scalar
a class with fields                          `struct`
anything else                                `string`: the value as JSON
===========================================  ==================================================

Anything else is a union of several types, `Any`, a class within itself, a tuple of different types, a type of
pydantic's own. Spark reads such a text with `from_json` or `parse_json`, so a class is never refused for one field.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, Final

import msgspec
import pyarrow as pa
from msgspec import inspect
from pyspark.sql import types as spark

from penstock.codecs import codec_named
from penstock.errors import EncodeError

_Convert = Callable[[Any], object]
_CLASSES_REMEMBERED_MAX = 16


@dataclass(frozen=True, slots=True)
class Column:
    """What one field becomes. `convert` is never given `None`; without it, Arrow takes the value as it is."""

    arrow: pa.DataType
    spark: spark.DataType
    convert: _Convert | None = None
    scalar: type | None = None
    """The class of the values that Arrow is given, where it is one: Arrow would make an `int` of 1.5."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of a class, by the names of its fields."""

    columns: dict[str, Column]

    @property
    def arrow(self) -> pa.StructType:
        """The struct of all columns, as Arrow calls it."""
        return pa.struct([(name, column.arrow) for name, column in self.columns.items()])

    @property
    def spark(self) -> spark.StructType:
        """The struct of all columns, as Spark calls it."""
        return spark.StructType([spark.StructField(name, column.spark) for name, column in self.columns.items()])


_TEXT: Final = Column(pa.string(), spark.StringType(), scalar=str)
_LONG: Final = Column(pa.int64(), spark.LongType(), scalar=int)
_BOOLEAN: Final = Column(pa.bool_(), spark.BooleanType(), scalar=bool)
_DOUBLE: Final = Column(pa.float64(), spark.DoubleType(), scalar=float)
_BINARY: Final = Column(pa.binary(), spark.BinaryType(), scalar=bytes)

# By the names of msgspec's nodes. What a buffer shows may change under Arrow's hands, so it is copied first.
_SCALARS: Final[dict[type, Column]] = {
    inspect.StrType: _TEXT,
    inspect.IntType: _LONG,
    inspect.BoolType: _BOOLEAN,
    inspect.FloatType: _DOUBLE,
    inspect.BytesType: _BINARY,
    inspect.ByteArrayType: Column(pa.binary(), spark.BinaryType(), bytes, bytes),
    inspect.MemoryViewType: Column(pa.binary(), spark.BinaryType(), bytes, bytes),
    inspect.DateTimeType: Column(pa.timestamp("us", "UTC"), spark.TimestampType(), scalar=datetime),
    inspect.DateType: Column(pa.date32(), spark.DateType(), scalar=date),
    inspect.TimeDeltaType: Column(pa.duration("us"), spark.DayTimeIntervalType(), scalar=timedelta),
    inspect.TimeType: Column(pa.string(), spark.StringType(), str, str),
    inspect.UUIDType: Column(pa.string(), spark.StringType(), str, str),
    inspect.DecimalType: Column(pa.decimal128(38, 18), spark.DecimalType(38, 18), scalar=Decimal),
}
_OF_VALUES: Final[dict[type, Column]] = {str: _TEXT, int: _LONG, bool: _BOOLEAN, float: _DOUBLE, bytes: _BINARY}


def layout_of(cls: type) -> Layout:
    """Return the columns of an event class; call it where no other thread makes msgspec look at the class."""
    return Layout({name: _column(kind, (cls,)) for name, kind in fields_of(cls) or ()})


def column_of(annotation: object) -> Column:
    """Return the column of values that are so annotated; the same holds for calling it."""
    return _column(_type_info(annotation), ())


def fields_of(cls: type) -> list[tuple[str, inspect.Type]] | None:
    """Return the fields of a class that has some, with what msgspec knows of their types; None for any other."""
    if (declared := getattr(cls, "__pydantic_fields__", None)) is not None:
        return [(name, _type_info(field.annotation)) for name, field in declared.items()]
    shape = _type_info(cls)
    if isinstance(shape, inspect.StructType | inspect.DataclassType):
        return [(field.name, field.type) for field in shape.fields]
    return None


def _type_info(annotation: object) -> inspect.Type:
    try:
        return inspect.type_info(annotation)
    except Exception:  # noqa: BLE001 - pydantic reads annotations that mean nothing to msgspec; a base class need not stand alone
        return inspect.AnyType()


def _column(kind: inspect.Type, within: tuple[type, ...]) -> Column:
    """Return the column of one type; `within` are the classes around it, as a struct cannot hold itself."""
    if scalar := _SCALARS.get(type(kind)):
        return scalar
    make = _MAKERS.get(type(kind))
    return _JSON if make is None else make(kind, within)


def _annotated(kind: inspect.Metadata, within: tuple[type, ...]) -> Column:
    return _column(kind.type, within)


def _union(kind: inspect.UnionType, within: tuple[type, ...]) -> Column:
    stated = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
    return _column(stated[0], within) if len(stated) == 1 else _JSON


def _enum(kind: inspect.EnumType, _: tuple[type, ...]) -> Column:
    return _of_values((member.value for member in kind.cls), _value_of)


def _literal(kind: inspect.LiteralType, _: tuple[type, ...]) -> Column:
    return _of_values(kind.values, None)


def _of_values(values: Iterable[object], convert: _Convert | None) -> Column:
    types = {type(value) for value in values if value is not None}
    column = _OF_VALUES.get(types.pop()) if len(types) == 1 else None
    if column is None:
        return _JSON
    return Column(column.arrow, column.spark, convert, column.scalar)


def _array(kind: inspect.CollectionType, within: tuple[type, ...]) -> Column:
    item = _column(kind.item_type, within)
    ordered = isinstance(kind, inspect.SetType | inspect.FrozenSetType)
    convert = partial(_sorted_items if ordered else _items, item.convert)
    return Column(pa.list_(item.arrow), spark.ArrayType(item.spark), convert)


def _tuple(kind: inspect.TupleType, within: tuple[type, ...]) -> Column:
    alike = len({repr(one) for one in kind.item_types}) == 1
    return _array(inspect.ListType(kind.item_types[0]), within) if alike else _JSON


def _map(kind: inspect.DictType, within: tuple[type, ...]) -> Column:
    key, value = _column(kind.key_type, within), _column(kind.value_type, within)
    if key.scalar is None or isinstance(kind.key_type, inspect.UnionType):
        return _JSON  # Spark has no null among the keys of a map, and no struct.
    convert = partial(_entries, key.convert, value.convert)
    return Column(pa.map_(key.arrow, value.arrow), spark.MapType(key.spark, value.spark), convert)


def _struct(kind: inspect.StructType | inspect.DataclassType | inspect.CustomType, within: tuple[type, ...]) -> Column:
    cls = kind.cls
    fields = None if cls in within else fields_of(cls)
    if not fields:
        return _JSON  # Most places that Spark writes to refuse an empty struct.
    layout = Layout({name: _column(kind, (*within, cls)) for name, kind in fields})
    converts = [(name, column.convert) for name, column in layout.columns.items()]
    return Column(layout.arrow, layout.spark, partial(_members, converts))


def array_of(column: Column, values: Sequence[Any]) -> pa.Array:
    """Return values as a column; raise whatever Arrow raises, or `TypeError`, if it cannot hold one of them."""
    convert = column.convert
    if convert is not None:
        values = [None if value is None or value is msgspec.UNSET else convert(value) for value in values]
    if column.scalar is not None and not set(map(type, values)) <= {column.scalar, type(None)}:
        values = [_plain(column.scalar, value) for value in values]
    return pa.array(values, column.arrow)


def _plain(scalar: type, value: Any) -> Any:
    """Return a value that Arrow keeps as it is, such as a member of an `IntEnum`; raise if it would be changed."""
    if value is None or type(value) is scalar:
        return value
    if value is msgspec.UNSET:
        return None
    if scalar in {float, Decimal} and type(value) is int:
        return Decimal(value) if scalar is Decimal else value  # Many a default is written so.
    if not isinstance(value, scalar) or (isinstance(value, bool | datetime) and scalar in {int, date}):
        raise TypeError(f"{type(value).__qualname__} is not {scalar.__qualname__}")
    return value


# --- values as Arrow takes them --------------------------------------------------------------


def _value_of(member: Enum) -> object:
    return member.value


def _items(convert: _Convert | None, values: Sequence[object]) -> list[object]:
    if convert is None:
        return list(values)
    return [None if value is None else convert(value) for value in values]


def _sorted_items(convert: _Convert | None, values: set[Any]) -> list[object]:
    """Return the members of a set in one order in every process: a set of texts has another in each."""
    items = _items(convert, list(values))
    try:
        return sorted(items)  # type: ignore[type-var] # what cannot be compared is ordered below
    except TypeError:
        return sorted(items, key=repr)


def _entries(key: _Convert | None, value: _Convert | None, pairs: dict[Any, Any]) -> list[tuple[object, object]]:
    return list(zip(_items(key, list(pairs)), _items(value, list(pairs.values())), strict=True))


def _members(converts: list[tuple[str, _Convert | None]], value: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, convert in converts:
        member = getattr(value, name)
        if member is msgspec.UNSET:
            member = None
        found[name] = member if convert is None or member is None else convert(member)
    return found


def _as_json(value: object) -> str:
    try:
        return codec_named("json").encode(value).decode()
    except EncodeError:
        # A type of pydantic's own, such as an address of the web, has its form with pydantic.
        if (pydantic := sys.modules.get("pydantic_core")) is None:
            raise
        text: bytes = pydantic.to_json(value, inf_nan_mode="strings")
        return text.decode()


_JSON: Final = Column(pa.string(), spark.StringType(), _as_json)
_MAKERS: Final[dict[type, Callable[[Any, tuple[type, ...]], Column]]] = {
    inspect.Metadata: _annotated,
    inspect.UnionType: _union,
    inspect.EnumType: _enum,
    inspect.LiteralType: _literal,
    inspect.ListType: _array,
    inspect.VarTupleType: _array,
    inspect.SetType: _array,
    inspect.FrozenSetType: _array,
    inspect.TupleType: _tuple,
    inspect.DictType: _map,
    inspect.StructType: _struct,
    inspect.DataclassType: _struct,
    inspect.CustomType: _struct,
}
