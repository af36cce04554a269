"""What `decode` makes of payloads is what a bus makes of them, whichever way Spark takes."""

from __future__ import annotations

import random
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
import msgspec
import pydantic
import pytest

import penstock
from penstock import Event, Topic
from penstock.codecs import register_codec
from penstock.errors import CodecError, InvalidEvent, UsageError

pytest.importorskip("pyspark")

from penstock.spark.decoding import decode

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, Row, SparkSession

pytestmark = pytest.mark.spark

ENVELOPE = "offset long, type string, content_type string, headers map<string,binary>, data binary"


@penstock.event("flat")
class Flat(msgspec.Struct, rename={"order_id": "orderId"}):
    order_id: str
    n: int
    price: float
    ok: bool
    note: str | None = "none"
    size: int | None = None


@penstock.event("strict")
class Strict(msgspec.Struct, forbid_unknown_fields=True):
    a: int
    b: str = "b"


@penstock.event("plain")
@dataclass(frozen=True)
class Plain:
    a: int
    x: float = 0.0
    z: bool | None = None


@penstock.event("checked")
class Checked(msgspec.Struct):
    a: int

    def __post_init__(self) -> None:
        if self.a < 0:
            raise ValueError("negative")


@penstock.event("limited")
class Limited(msgspec.Struct):
    a: Annotated[int, msgspec.Meta(ge=1)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Circle(msgspec.Struct, tag="circle"):
    r: float


class Square(msgspec.Struct, tag="square"):
    side: float


@dataclass
class Item:
    sku: str
    count: int = 1
    tags: list[str] = field(default_factory=list)


class Node(msgspec.Struct):
    name: str
    children: list[Node] = []


@penstock.event("rich")
class Rich(msgspec.Struct, kw_only=True):
    id: uuid.UUID
    type: Colour
    level: Level
    kind: Literal["a", "b"]
    total: Decimal
    at: datetime
    day: date
    hour: time
    span: timedelta
    raw: bytes
    items: list[Item]
    first: Item | None = None
    pair: tuple[int, int] = (0, 0)
    names: set[str] = set()
    counts: dict[str, int] = {}
    by_day: dict[date, Item] = {}
    shape: Circle | Square | None = None
    anything: Any = None
    tree: Node | None = None
    unsent: int | msgspec.UnsetType = msgspec.UNSET


@penstock.event("attrs")
@attrs.define
class Attrs:
    a: int
    b: list[int] = attrs.field(factory=list)


class Address(pydantic.BaseModel):
    street: str


@penstock.event("pydantic")
class Model(pydantic.BaseModel):
    order: int = pydantic.Field(alias="orderNumber", ge=1)
    address: Address
    home: pydantic.AnyUrl | None = None


@penstock.event("versioned", version=3)
@dataclass
class Versioned:
    total: Decimal
    currency: str


@penstock.upcaster("versioned", from_version=2)
def totals_were_cents(old: dict[str, Any]) -> dict[str, Any]:
    return {"total": str(Decimal(old["cents"]) / 100), "currency": "EUR"}


@penstock.event("packed", codec="msgpack")
class Packed(msgspec.Struct):
    a: int
    b: str = "b"


def events(spark: SparkSession, rows: list[Event]) -> DataFrame:
    plain = [(at, row.type, row.content_type, dict(row.headers), row.data) for at, row in enumerate(rows)]
    return spark.createDataFrame(plain, ENVELOPE)


def payloads(spark: SparkSession, rows: list[bytes]) -> DataFrame:
    return spark.createDataFrame(list(enumerate(rows)), "offset long, data binary")


def in_order(df: DataFrame) -> list[Row]:
    return sorted(df.collect(), key=lambda row: row["_event"]["offset"])


def refused(topic: Topic[Any], event: Event) -> Any:
    """Return the value of an event, or None if the topic refuses it."""
    try:
        return topic.decode(event)
    except CodecError:
        return None


# --- payloads that are refused, and those that only look like it -----------------------------------

GOOD = {
    Flat: b'{"orderId":"o-1","n":7,"price":9.5,"ok":true,"note":"caf\xc3\xa9","size":3}',
    Strict: b'{"a":1,"b":"x"}',
    Plain: b'{"a":1,"x":2.5,"z":false}',
    Checked: b'{"a":-1}',
    Limited: b'{"a":0}',
}
# Each replaces a value of the payloads above, or is added to them.
VALUES = rb"""
null true false tru True None 0 -0 1 -1 01 1. .5 +1 1.0 -0.0 1e2 1E+2 1.0E10 1e400 -1e400 1e-400 0.1 5e-324 1_0 0x1F
0.30000000000000004 1.7976931348623157E308 123456789012345678901234567890.5 9007199254740993 9223372036854775807
-9223372036854775808 9223372036854775808 -9223372036854775809 18446744073709551616 NaN Infinity -Infinity nan "NaN"
"Infinity" "-Infinity" "INF" "+INF" "" "5" "1.0" "true" "null" 'x' "a\nb" "\u0041" "\u0000" "\ud83d\ude00" "\ud800"
"\udc00x" "\x" "\/" "/" "\" "a "2024-01-01" [] [1] {} {"a":1} 1/**/
""".split()
VALUES += [b"", b"//1\n2", b"\xff", b"\xa0", b"1" * 400, b"0." + b"1" * 1200, b'"' + b"x" * 70_000 + b'"']
VALUES += [b"[" * depth + b"]" * depth for depth in (900, 1500)]
ODD_TEXTS = b"a\x00b \x01 \x7f \xff \xed\xa0\x80 \xc0\x80 \xef\xbf\xbd \xef\xbb\xbf \xe2\x80\xa8 \xf0\x9f\x98\x80"
VALUES += [b'"' + text + b'"' for text in ODD_TEXTS.split(b" ")]


def hostile(good: bytes) -> list[bytes]:
    """Return a payload with every value of it replaced, with more added around it, and broken by chance."""
    made = [good, good + good, good[:-1], good[1:], good.decode().encode("utf-16"), b" \n\t\r" + good + b" \n"]
    made += [b'"x"', b"", b" ", b"null", b"[]", b"{}", b"1"]
    made += [good + tail for tail in (b",", b"x", b"{}", b"null", b"\x00", b"//", b"]", b"}", b"\xff", b"\xc2\xa0")]
    made += [head + good for head in (b"\xef\xbb\xbf", b"\x0b", b"[", b"1 ", b"\x00")]
    fields = msgspec.json.decode(good)
    texts = {name: msgspec.json.encode(value) for name, value in fields.items()}

    def written(members: list[tuple[bytes, bytes]]) -> bytes:
        return b"{" + b",".join(b'"' + name + b'":' + value for name, value in members) + b"}"

    members = [(name.encode(), text) for name, text in texts.items()]
    made += [written(members[::-1]), good.replace(b'":', b'" : '), good.replace(b",", b",\n"), good.replace(b'"', b"'")]
    for at, (name, text) in enumerate(members):
        before, after = members[:at], members[at + 1 :]
        made += [written(before + after), written([*members, (name, text)])]
        made += [written([*before, (key, text), *after]) for key in (name.upper(), b"\\u0061", b"\xff")]
        made += [written([*before, (name, value), *after]) for value in VALUES]
        made += [written([(name, value), *members]) for value in VALUES]
    unknown = (b"other", b"", b"_corrupt_record", b"\xff")
    made += [written([*members, (key, value)]) for value in VALUES for key in unknown]
    chance = random.Random(5)
    for _ in range(400):
        broken = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(broken))
            broken[at : at + chance.randint(0, 2)] = chance.choice([b"", b'"', b"\\", b"0", b"-", b",", b"}", b"\x80"])
        made.append(bytes(broken))
    return made


def fits(value: Any) -> bool:
    numbers = [getattr(value, name) for name in type(value).__annotations__]
    return all(not isinstance(number, int) or -(2**63) <= number < 2**63 for number in numbers)


@pytest.mark.parametrize("cls", GOOD)
def test_exactly_the_rows_that_the_codec_refuses_are_corrupt(cls: type, spark: SparkSession) -> None:
    rows = list(dict.fromkeys(hostile(GOOD[cls])))
    topic: Topic[Any] = Topic("t", cls)
    name = next(iter(topic.types.values())).name
    expected = [refused(topic, Event(type=name, data=row)) for row in rows]
    accepted = sum(value is not None for value in expected)
    assert 2 < accepted < len(rows) - 2, "both kinds must be there"
    decoded = decode(payloads(spark, rows), cls)
    fields = list(cls.__annotations__)
    for payload, value, row in zip(rows, expected, in_order(decoded), strict=True):
        is_good = value is not None and fits(value)
        values = [getattr(value, name) if is_good else None for name in fields]
        assert row["_corrupt"] == (None if is_good else payload), payload[:100]
        # As text, because -0.0 equals 0.0 and True equals 1.
        assert repr([row[name] for name in fields]) == repr(values), payload[:100]


# --- columns ---------------------------------------------------------------------------------


def rich(**changes: Any) -> bytes:
    fields = msgspec.json.decode(b"""{
        "id": "00000000-0000-0000-0000-000000000007", "type": "blue", "level": 2, "kind": "b", "total": "9.50",
        "at": "2024-05-06T09:08:09.123456+02:00", "day": "2024-02-29", "hour": "01:02:03", "span": "P1DT0.000005S",
        "raw": "AP8=", "items": [{"sku": "s", "count": 2, "tags": ["x"]}, {"sku": "t"}]
    }""")
    return msgspec.json.encode(fields | changes)


def test_every_annotation_has_its_column(spark: SparkSession) -> None:
    tree = {"name": "root", "children": [{"name": "leaf"}]}
    more = {"by_day": {"2024-01-01": {"sku": "d"}}, "shape": {"type": "circle", "r": 1.5}, "anything": {"k": [1, None]}}
    full = rich(first={"sku": "f"}, pair=[3, 4], names=["b", "a", "c"], counts={"x": 1}, tree=tree, **more)
    df = decode(payloads(spark, [full, rich()]), Rich)
    item = "struct<sku:string,count:bigint,tags:array<string>>"
    expected = f"""
        id:string,type:string,level:bigint,kind:string,total:decimal(38,18),at:timestamp,day:date,hour:string,
        span:interval day to second,raw:binary,items:array<{item}>,first:{item},pair:array<bigint>,names:array<string>,
        counts:map<string,bigint>,by_day:map<date,{item}>,shape:string,anything:string,
        tree:struct<name:string,children:array<string>>,unsent:bigint,_corrupt:binary,_event:struct<offset:bigint>
    """
    types = [f"{one.name}:{one.dataType.simpleString()}" for one in df.schema.fields]
    assert ",".join(types) == "".join(line.strip() for line in expected.splitlines())
    texts = df.selectExpr(
        "_event", "string(at) at", "string(span) span", "string(map_keys(by_day)) days", "to_json(struct(*)) whole"
    )
    first, second = in_order(texts)
    assert first["at"] == "2024-05-06 07:08:09.123456"
    assert first["span"] == "INTERVAL '1 00:00:00.000005' DAY TO SECOND"
    found = msgspec.json.decode(first["whole"])
    leaf = {"sku": "t", "count": 1, "tags": []}
    assert found["items"] == [{"sku": "s", "count": 2, "tags": ["x"]}, leaf]
    assert (found["first"], *found["by_day"].values()) == (leaf | {"sku": "f"}, leaf | {"sku": "d"})
    assert first["days"] == "[2024-01-01]"
    assert (found["id"], found["type"], found["level"], found["kind"]) == (str(uuid.UUID(int=7)), "blue", 2, "b")
    assert (found["total"], found["day"], found["hour"], found["raw"]) == (9.5, "2024-02-29", "01:02:03", "AP8=")
    assert (found["pair"], found["names"], found["counts"]) == ([3, 4], ["a", "b", "c"], {"x": 1})
    assert (found["shape"], found["anything"]) == ('{"type":"circle","r":1.5}', '{"k":[1,null]}')
    assert found["tree"] == {"name": "root", "children": ['{"name":"leaf","children":[]}']}
    assert not {"unsent", "_corrupt"} & set(found)
    bare = msgspec.json.decode(second["whole"])
    assert (bare["pair"], bare["names"], bare["counts"]) == ([0, 0], [], {})
    assert not {"first", "shape", "anything", "tree"} & set(bare)


def test_a_value_that_its_column_cannot_hold_is_kept_as_corrupt(spark: SparkSession) -> None:
    strange = [rich(total=text) for text in ("1e-19", str(10**20), "NaN")]
    strange += [rich(counts={"x": 2**63}), rich(items=[{"sku": "s", "count": -(2**63) - 1}])]
    assert all(Topic("t", Rich).decode(Event(type="rich", data=row)) for row in strange)
    rows = [*strange, rich(total="0." + "1" * 18)]
    found = in_order(decode(payloads(spark, rows), Rich))
    assert [row["_corrupt"] for row in found] == [*rows[:-1], None]
    assert [row["kind"] for row in found] == [None] * len(strange) + ["b"]


def test_attrs_and_pydantic_classes_have_columns(spark: SparkSession) -> None:
    found = in_order(decode(payloads(spark, [b'{"a":1,"b":[2]}', b'{"a":"1"}']), Attrs))
    assert [(row["a"], row["b"], row["_corrupt"]) for row in found] == [(1, [2], None), (None, None, b'{"a":"1"}')]
    good = b'{"orderNumber": 5, "address": {"street": "s"}, "home": "http://x.org/"}'
    bad = b'{"orderNumber": 0, "address": {"street": "s"}}'
    first, second = in_order(decode(payloads(spark, [good, bad]), Model))
    assert (first["order"], first["address"]["street"], first["home"]) == (5, "s", '"http://x.org/"')
    assert (second["order"], second["_corrupt"]) == (None, bad)


# --- envelopes -------------------------------------------------------------------------------


def test_type_content_type_and_version_decide_as_on_a_bus(spark: SparkSession) -> None:
    now = b'{"total":"1.5","currency":"EUR"}'
    old = b'{"cents":950}'
    packed = msgspec.msgpack.encode({"total": "2.5", "currency": "CHF"})

    kinds: list[tuple[bytes, str | None, str | None, bytes | None]] = [
        *((now, "versioned", said, b"3") for said in (None, "application/json", "Application/JSON; charset=utf-8")),
        (now, "versioned", "application/vnd.shop+json", b"3"),
        (packed, "versioned", "application/msgpack", b"3"),
        (old, "versioned", None, b"2"),
        (now, "versioned", "application/msgpack", b"3"),
        (now, "versioned", "text/plain", b"3"),
        (b'{"price":1}', "versioned", None, b"2"),
        *((old, "versioned", None, version) for version in (b"1", None, b"4", b"03")),
        *((now, name, None, b"3") for name in ("other", None)),
    ]
    rows = [
        Event(data=data, type=name, content_type=said, headers={"dataversion": version} if version else {})
        for data, name, said, version in kinds
    ]
    expected = [refused(Topic("t", Versioned), row) for row in rows]
    found = in_order(decode(events(spark, rows), Versioned))
    assert [row["_corrupt"] for row in found] == [
        row.data if value is None else None for row, value in zip(rows, expected, strict=True)
    ]
    assert [row["total"] for row in found] == [value and value.total for value in expected]
    assert [row["_corrupt"] is None for row in found] == [True] * 6 + [False] * 9


def test_a_row_is_read_by_what_its_envelope_says(spark: SparkSession) -> None:
    data = GOOD[Strict]
    packed = msgspec.msgpack.encode({"a": 1})
    rows = [
        Event(data=data, type="strict"),
        Event(data=data, type="strict", content_type="application/json"),
        Event(data=data, type="strict", content_type="application/msgpack"),
        Event(data=packed, type="strict", content_type="application/msgpack"),
        Event(data=data, type="strict", headers={"dataversion": b"1"}),
        Event(data=data, type="strict", headers={"dataversion": b"2"}),
        Event(data=data, type="flat"),
        Event(data=data),
    ]
    df = decode(events(spark, rows), Strict)
    expected = [refused(Topic("t", Strict), row) is not None for row in rows]
    assert [row["_corrupt"] is None for row in in_order(df)] == expected
    assert expected == [True, True, False, True, True, False, False, False]


def test_other_codecs_are_read_and_a_named_one_is_believed(spark: SparkSession) -> None:
    packed, text = msgspec.msgpack.encode({"a": 1}), b'{"a":2}'
    df = payloads(spark, [packed, text, packed + b"x"])
    assert [row["a"] for row in in_order(decode(df, Packed))] == [1, None, None]
    assert [row["a"] for row in in_order(decode(df, Packed, codec="json"))] == [None, 2, None]
    said = events(spark, [Event(data=text, type="packed", content_type="application/msgpack")])
    assert [row["a"] for row in in_order(decode(said, Packed, codec="json"))] == [2]


def test_the_envelope_is_kept_and_fields_may_have_its_names(spark: SparkSession) -> None:
    df = decode(events(spark, [Event(data=rich(), type="rich", headers={"h": b"v"})]), Rich)
    row = df.first()
    assert row is not None
    assert (row["type"], row["_event"]["type"], row["_event"]["headers"]) == ("blue", "rich", {"h": b"v"})
    assert "data" not in row["_event"]
    assert decode(spark.createDataFrame([(b"{}",)], "data binary"), Strict).columns == ["a", "b", "_corrupt"]


def test_no_data_at_all_is_corrupt(spark: SparkSession) -> None:
    for cls in (Strict, Limited):
        row = decode(spark.createDataFrame([(None,)], "data binary"), cls).first()
        assert row is not None
        assert (row["a"], row["_corrupt"]) == (None, b"")


# --- wrong calls -----------------------------------------------------------------------------


Reserved = penstock.event("reserved")(msgspec.defstruct("Reserved", [("_event", str)]))
Cased = penstock.event("cased")(msgspec.defstruct("Cased", [("name", str), ("Name", str)]))
Empty = penstock.event("empty")(msgspec.defstruct("Empty", []))


@penstock.event("blob", codec="raw")
class Blob(bytes):
    pass


class Undeclared(msgspec.Struct):
    a: int


@pytest.mark.parametrize(
    ("cls", "schema", "codec", "says"),
    [
        (Strict, "payload binary", None, "no column `data`"),
        (Strict, "data string", None, "is string; it must be binary"),
        (Reserved, "data binary", None, "'_event' of Reserved"),
        (Cased, "data binary", None, "'Name' of Cased"),
        (Empty, "data binary", None, "Empty has no fields"),
        (Blob, "data binary", None, "the column `data` itself"),
        (Strict, "data binary", "raw", "codec 'raw' cannot read event 'strict'"),
        (Strict, "data binary", "jsn", "no codec 'jsn'"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(
    cls: type, schema: str, codec: str | None, says: str, spark: SparkSession
) -> None:
    with pytest.raises(UsageError, match=says):
        decode(spark.createDataFrame([], schema), cls, codec)


def test_a_class_must_be_an_event_as_for_a_topic(spark: SparkSession) -> None:
    with pytest.raises(InvalidEvent, match="decorate it"):
        decode(spark.createDataFrame([], "data binary"), Undeclared)


# --- where Spark runs it ---------------------------------------------------------------------


class Backwards:
    """A codec of a program's own, which workers know only if it comes along."""

    name = "backwards"
    content_type = "application/x-backwards"

    def check(self, cls: type) -> None:
        pass

    def encode(self, value: object) -> bytes:
        return msgspec.json.encode(value)[::-1]

    def decode(self, data: bytes, cls: type[Any]) -> Any:
        return msgspec.json.decode(data[::-1], type=cls)

    def decode_builtins(self, data: bytes) -> object:
        return msgspec.json.decode(data[::-1])

    def convert(self, obj: object, cls: type[Any]) -> Any:
        return msgspec.convert(obj, cls)


def test_classes_codecs_and_upcasters_of_a_test_reach_the_workers(spark: SparkSession) -> None:
    register_codec(Backwards())
    data = msgspec.json.encode(Strict(4))[::-1]
    assert [row["a"] for row in in_order(decode(payloads(spark, [data]), Strict, "backwards"))] == [4]


def test_a_row_is_decoded_once_whatever_is_asked_of_it(spark: SparkSession) -> None:
    for cls in (Strict, Limited):
        df = decode(payloads(spark, [GOOD[Limited]]), cls).where("_corrupt is null and a > 0").select("a", "_event")
        plan = df._jdf.queryExecution().executedPlan().toString()
        assert plan.count("ArrowEvalPython") == 1, plan
        assert plan.count("from_json") <= 1, plan


def test_a_stream_is_decoded(spark: SparkSession, tmp_path: Path) -> None:
    payloads(spark, [b'{"a":1}', b"x", b'{"a":3,"b":"c"}']).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema("offset long, data binary").parquet(str(tmp_path / "in"))
    query = (
        decode(stream, Strict)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    query.awaitTermination()
    found = in_order(spark.read.parquet(str(tmp_path / "out")))
    assert [(row["a"], row["b"]) for row in found] == [(1, "b"), (None, None), (3, "c")]
    assert [row["_corrupt"] for row in found] == [None, b"x", None]


MAIN = """
from __future__ import annotations
from dataclasses import dataclass
from decimal import Decimal
import msgspec, penstock
from penstock.spark.decoding import decode
from penstock.spark.session import session

class Base(msgspec.Struct, kw_only=True, rename="camel"):
    line_no: int = 0
    def __post_init__(self):
        if self.line_no < 0:
            raise ValueError("negative")

class Line(Base, frozen=False):
    sku: str
    parent: Line | None = None
    def __post_init__(self):
        super().__post_init__()
        self.sku = self.sku.upper()

@penstock.event("order", version=2)
@dataclass
class Order:
    total: Decimal
    lines: list[Line]

@penstock.upcaster(Order, from_version=1)
def lines_are_new(old):
    return {**old, "lines": []}

spark = session("local[1]", app_name="main", config={"spark.driver.memory": "512m"})
new = {"dataversion": b"2"}
rows = [
    (0, new, b'{"total":"1.5","lines":[{"sku":"a","lineNo":3,"parent":{"sku":"b"}}]}'),
    (1, {}, b'{"total":2}'),
    (2, new, b'{"total":1,"lines":[{"sku":"a","lineNo":-1}]}'),
]
df = spark.createDataFrame(rows, "offset int, headers map<string,binary>, data binary")
for row in sorted(decode(df, Order).collect(), key=lambda row: row["_event"]["offset"]):
    lines = [(one["sku"], one["line_no"], one["parent"]) for one in row["lines"] or []]
    print(row["total"], lines, row["_corrupt"] and bytes(row["_corrupt"]))
"""


def test_classes_of_a_script_reach_the_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(MAIN)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        """1.500000000000000000 [('A', 3, '{"sku":"B","parent":null,"lineNo":0}')] None""",
        "2.000000000000000000 [] None",
        """None [] b'{"total":1,"lines":[{"sku":"a","lineNo":-1}]}'""",
    ]
