"""What the codecs promise: equal values back, one kind of error, no payload in its text."""

from __future__ import annotations

import ast
import enum
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs import codec_for, codec_named, reader_of, register_codec
from penstock.errors import DecodeError, EncodeError, UsageError

JSON, MSGPACK, RAW = codec_named("json"), codec_named("msgpack"), codec_named("raw")
BOTH = pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=["json", "msgpack"])

SECRET = "4111-1111-1111-1111"


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class DataLine:
    sku: str
    price: Decimal


class StructLine(msgspec.Struct, frozen=True):
    sku: str
    price: Decimal


@attrs.frozen
class AttrsLine:
    sku: str
    price: Decimal


class ModelLine(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, frozen=True)

    sku: str
    price: Decimal
    at: datetime


@dataclass(frozen=True)
class DataOrder:
    id: UUID
    at: datetime
    day: date
    wait: timedelta
    colour: Colour
    blob: bytes
    lines: list[DataLine]
    structs: tuple[StructLine, ...]
    attrs: AttrsLine | None
    models: dict[str, ModelLine]
    counts: dict[int, float]
    tags: frozenset[str] = frozenset()
    note: str | None = None


class StructOrder(msgspec.Struct, frozen=True, rename="camel"):
    order_id: UUID
    lines: list[DataLine]
    model: ModelLine


@attrs.define
class AttrsOrder:
    order_id: UUID
    lines: list[AttrsLine]
    model: ModelLine
    total: Decimal = Decimal(0)


class ModelOrder(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    order_id: UUID = pydantic.Field(alias="orderId")
    at: datetime
    colour: Colour
    lines: list[ModelLine]
    plain: DataLine

    @pydantic.computed_field  # type: ignore[prop-decorator] # pydantic's documented spelling
    @property
    def size(self) -> int:
        return len(self.lines)


@pydantic.dataclasses.dataclass(frozen=True)
class PydanticDataOrder:
    order_id: UUID
    url: pydantic.HttpUrl
    lines: list[ModelLine]
    name: str = pydantic.Field(default="", alias="theName")


NOW = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)
ID = UUID("12345678-1234-5678-1234-567812345678")
MODEL_LINE = ModelLine(sku="a", price=Decimal("1.10"), at=NOW)

VALUES: dict[str, Any] = {
    "dataclass": DataOrder(
        id=ID,
        at=NOW,
        day=date(2026, 1, 2),
        wait=timedelta(seconds=1.5),
        colour=Colour.BLUE,
        blob=b"\x00\xff",
        lines=[DataLine("a", Decimal("0.10"))],
        structs=(StructLine("b", Decimal("1E+3")),),
        attrs=AttrsLine("c", Decimal(-1)),
        models={"x": MODEL_LINE},
        counts={1: 0.5, 20: 1e300},
        tags=frozenset({"q", "r"}),
    ),
    "struct": StructOrder(ID, [DataLine("a", Decimal(1))], MODEL_LINE),
    "attrs": AttrsOrder(ID, [AttrsLine("a", Decimal(1))], MODEL_LINE, Decimal("12.50")),
    "pydantic": ModelOrder(orderId=ID, at=NOW, colour=Colour.RED, lines=[MODEL_LINE], plain=DataLine("d", Decimal(2))),
    "strict pydantic": MODEL_LINE,
    "pydantic dataclass": PydanticDataOrder(
        order_id=ID, url=pydantic.HttpUrl("https://example.org/"), lines=[MODEL_LINE], theName="n"
    ),
}
EVERY_KIND = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())


# --- round trips -----------------------------------------------------------------------------


@BOTH
@EVERY_KIND
def test_a_value_of_every_kind_decodes_to_an_equal_value(codec: Any, value: Any) -> None:
    cls = type(value)
    codec.check(cls)
    decoded = codec.decode(codec.encode(value), cls)
    assert decoded == value
    assert type(decoded) is cls


@BOTH
@EVERY_KIND
def test_builtins_convert_to_the_value_they_stand_for(codec: Any, value: Any) -> None:
    fields = codec.decode_builtins(codec.encode(value))
    assert isinstance(fields, dict)
    assert codec.convert(fields, type(value)) == value


@BOTH
def test_nested_classes_come_back_as_their_classes(codec: Any) -> None:
    order = codec.decode(codec.encode(VALUES["dataclass"]), DataOrder)
    assert isinstance(order.structs[0], StructLine)
    assert isinstance(order.attrs, AttrsLine)
    assert isinstance(order.models["x"], ModelLine)


@given(
    st.builds(
        AttrsOrder,
        order_id=st.uuids(),
        lines=st.lists(st.builds(AttrsLine, sku=st.text(), price=st.decimals(allow_nan=False)), max_size=3),
        model=st.builds(
            ModelLine,
            sku=st.text(),
            price=st.decimals(allow_nan=False, allow_infinity=False),
            at=st.datetimes(timezones=st.just(UTC)),
        ),
        total=st.decimals(allow_nan=False),
    )
)
def test_any_value_survives_both_codecs(order: AttrsOrder) -> None:
    for codec in (JSON, MSGPACK):
        assert codec.decode(codec.encode(order), AttrsOrder) == order


def test_a_pydantic_model_is_written_by_its_aliases_and_without_computed_fields() -> None:
    fields = JSON.decode_builtins(JSON.encode(VALUES["pydantic"]))
    assert isinstance(fields, dict)
    assert set(fields) == {"orderId", "at", "colour", "lines", "plain"}


@pytest.mark.parametrize("cls", [DataLine, StructLine, AttrsLine])
def test_json_numbers_are_read_to_the_last_digit(cls: Any) -> None:
    data = b'{"sku":"a","price":1.2345678901234567890123456789}'
    assert JSON.decode(data, cls).price == Decimal("1.2345678901234567890123456789")


def test_raw_hands_bytes_and_classes_of_bytes_through() -> None:
    class Image(bytes):
        __slots__ = ()

    RAW.check(Image)
    assert RAW.encode(Image(b"\x89PNG")) == b"\x89PNG"
    assert type(RAW.encode(Image(b"\x89PNG"))) is bytes
    assert RAW.decode(b"\x89PNG", bytes) == b"\x89PNG"
    assert type(RAW.decode(b"\x89PNG", Image)) is Image


def test_raw_refuses_what_is_not_bytes_and_has_nothing_to_upcast() -> None:
    with pytest.raises(EncodeError, match="str is not bytes"):
        RAW.encode("text")
    with pytest.raises(EncodeError, match="DataLine is not bytes"):
        RAW.check(DataLine)
    with pytest.raises(DecodeError, match="DataLine"):
        RAW.decode(b"", DataLine)
    with pytest.raises(DecodeError, match="no fields"):
        RAW.decode_builtins(b"")
    with pytest.raises(DecodeError, match="DataLine"):
        RAW.convert({}, DataLine)


# --- reproducible ----------------------------------------------------------------------------


@dataclass
class Bags:
    words: dict[str, int] = field(default_factory=dict)
    tags: set[str] = field(default_factory=set)


@BOTH
def test_equal_values_give_equal_bytes_whatever_the_order_of_insertion(codec: Any) -> None:
    one = Bags({"a": 1, "b": 2}, {"x", "y", "z"})
    two = Bags({"b": 2, "a": 1}, {"z", "y", "x"})
    assert codec.encode(one) == codec.encode(two)


def test_equal_values_give_equal_bytes_in_every_process() -> None:
    program = (
        "from penstock.codecs import codec_named\n"
        "print(codec_named('json').encode({'tags': {f'tag-{n}' for n in range(50)}}))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


@BOTH
def test_what_cannot_be_sorted_is_written_all_the_same(codec: Any) -> None:
    assert codec.decode(codec.encode({2: "b", 1: "a"}), dict[int, str]) == {1: "a", 2: "b"}
    assert codec.decode(codec.encode({Colour.RED, Colour.BLUE}), set[Colour]) == set(Colour)


# --- refused when written --------------------------------------------------------------------


@dataclass
class Reading:
    celsius: float
    note: str | None = None
    more: list[Any] = field(default_factory=list)


class Readings(msgspec.Struct):
    by_name: dict[str, list[Reading] | None]
    parent: Readings | None = None


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_json_refuses_a_number_that_it_could_only_write_as_null(number: float) -> None:
    for value in (
        Reading(number),
        Reading(1.0, more=[{"deep": (number,)}]),
        Readings({"a": [Reading(number)]}),
        ModelReading(celsius=number),
        Thermometer(ModelReading(celsius=number)),
        {"any": number},
    ):
        with pytest.raises(EncodeError, match="written as json: Out of range float"):
            JSON.encode(value)


def test_json_writes_none_and_the_word_null() -> None:
    for value in (Reading(1.0, None), Reading(1.0, "null")):
        assert JSON.decode(JSON.encode(value), Reading) == value


class ModelReading(pydantic.BaseModel):
    celsius: float


class Thermometer(msgspec.Struct):
    model: ModelReading


def test_msgpack_keeps_nan() -> None:
    model = ModelReading(celsius=math.nan)
    for value in (Reading(math.nan), model, Thermometer(model)):
        back: Any = MSGPACK.decode(MSGPACK.encode(value), type(value))
        assert math.isnan(getattr(back, "model", back).celsius)


@BOTH
def test_an_unsupported_value_is_an_encode_error_that_names_both_classes(codec: Any) -> None:
    with pytest.raises(EncodeError, match=r"Reading cannot be written as \w+: .*complex"):
        codec.encode(Reading(1.0, more=[1j]))


@BOTH
def test_a_string_with_a_lone_surrogate_is_an_encode_error(codec: Any) -> None:
    with pytest.raises(EncodeError, match="Reading"):
        codec.encode(Reading(1.0, "\ud800"))


def test_an_integer_that_msgpack_cannot_hold_is_an_encode_error() -> None:
    with pytest.raises(EncodeError, match="Reading"):
        MSGPACK.encode(Reading(1.0, more=[2**70]))


@BOTH
def test_a_value_that_contains_itself_is_an_encode_error(codec: Any) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(EncodeError, match="nested too deeply"):
        codec.encode(Reading(1.0, more=endless))


@BOTH
def test_a_pydantic_model_with_a_wrong_value_is_refused_without_quoting_it(codec: Any) -> None:
    wrong = ModelLine.model_construct(sku="a", price=SECRET, at=NOW)
    with pytest.raises(EncodeError, match="ModelLine") as raised:
        codec.encode(wrong)
    assert SECRET not in str(raised.value)


@BOTH
def test_a_class_of_no_supported_kind_is_refused_with_a_hint_about_decorator_order(codec: Any) -> None:
    class Plain:
        order_id: str

    with pytest.raises(EncodeError, match=r"Plain is not a dataclass.*@event goes above @dataclass"):
        codec.check(Plain)


@BOTH
def test_a_class_that_could_never_be_read_is_refused_by_the_check(codec: Any) -> None:
    @dataclass
    class Ambiguous:
        line: DataLine | AttrsLine

    with pytest.raises(EncodeError, match="Ambiguous has no form"):
        codec.check(Ambiguous)


# --- refused when read -----------------------------------------------------------------------


@BOTH
def test_a_decode_error_names_the_class_and_the_path(codec: Any) -> None:
    data = codec.encode({"orderId": str(ID), "lines": [{"sku": 5, "price": "1"}], "model": {}})
    with pytest.raises(DecodeError, match=r"StructOrder cannot be read from \w+: .*`\$\.lines\[0\]\.sku`"):
        codec.decode(data, StructOrder)


@BOTH
def test_bytes_that_are_not_of_the_format_are_decode_errors(codec: Any) -> None:
    for data in (b"", b"\xc1", b"{", b"nonsense", b'{"sku":"\xff"}', b"\x81\xa3sku\xa1\xff", b"\x81\x80\xc0"):
        for cls in (DataLine, StructLine, AttrsLine, ModelLine):
            with pytest.raises(DecodeError, match=cls.__qualname__):
                codec.decode(data, cls)


class Tree(msgspec.Struct):
    child: Tree | None = None


class ModelTree(pydantic.BaseModel):
    child: ModelTree | None = None


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (JSON, b"[" * 100_000),
        (JSON, b'{"child":' * 100_000),
        (JSON, b'{"child":' * 100_000 + b"null" + b"}" * 100_000),
        (MSGPACK, b"\x91" * 100_000),
        (MSGPACK, b"\x81\xa5child" * 100_000 + b"\xc0"),
        (MSGPACK, b"\xdd\xff\xff\xff\xff"),
    ],
)
def test_hostile_nesting_and_lengths_are_decode_errors(codec: Any, data: bytes) -> None:
    for cls in (Tree, ModelTree):
        with pytest.raises(DecodeError, match=cls.__qualname__):
            codec.decode(data, cls)
    with pytest.raises(DecodeError, match=r"nested too deeply|truncated"):
        codec.decode_builtins(data)


@BOTH
@given(data=st.binary(max_size=64))
def test_no_bytes_raise_anything_but_a_decode_error(codec: Any, data: bytes) -> None:
    for cls in (DataOrder, StructOrder, AttrsOrder, ModelOrder, PydanticDataOrder):
        try:
            codec.decode(data, cls)
        except DecodeError as error:
            assert cls.__qualname__ in str(error)  # noqa: PT017 - it may also not raise


# --- payloads stay out of messages -----------------------------------------------------------


@dataclass
class Careless:
    card: str

    def __post_init__(self) -> None:
        raise (ValueError if self.card == SECRET else LookupError)(f"bad card {self.card}")


@attrs.define
class Validated:
    card: str = attrs.field(validator=attrs.validators.max_len(3))


class Card(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    number: int = 0
    limits: dict[str, int] = {}

    @pydantic.field_validator("number")
    @classmethod
    def refuse(cls, number: int) -> int:
        raise ValueError(f"bad number {number}")


class Wallet(pydantic.BaseModel):
    cards: list[Card]
    owner: str = pydantic.Field(alias="theOwner")


@dataclass
class Purse:
    cards: list[Card]


PRIVATE: list[tuple[type, dict[str, Any], str]] = [
    (Careless, {"card": SECRET}, "the class raised ValueError"),
    (Careless, {"card": SECRET + "x"}, "the class raised LookupError"),
    (Validated, {"card": SECRET}, "the class raised ValueError"),
    (Card, {"number": SECRET}, "int_parsing at `$.number`"),
    (Card, {"number": 4111}, "value_error at `$.number`"),
    (Card, {"limits": {SECRET: "x"}}, "int_parsing at `$.limits[...]`"),
    (Card, {SECRET: 1}, "extra_forbidden at `$[...]`"),
    (Wallet, {"cards": [{"number": SECRET}], "theOwner": 1}, "int_parsing at `$.cards[0].number`"),
    (Wallet, {"cards": [], "theOwner": 5}, "string_type at `$.theOwner`"),
    (Purse, {"cards": [{"number": SECRET}]}, "int_parsing at `$.number` - at `$.cards[0]`"),
]


@BOTH
@pytest.mark.parametrize(("cls", "fields", "reason"), PRIVATE)
def test_a_message_says_where_and_what_kind_but_never_quotes(
    codec: Any, cls: type, fields: dict[str, Any], reason: str
) -> None:
    def convert() -> object:
        return codec.convert(fields, cls)

    def decode() -> object:
        return codec.decode(codec.encode(fields), cls)

    for read in (convert, decode):
        with pytest.raises(DecodeError) as raised:
            read()
        assert reason in str(raised.value)
        assert "4111" not in str(raised.value)
        assert raised.value.__suppress_context__, "a traceback would quote the payload"
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_a_reason_is_short_however_long_the_payload() -> None:
    with pytest.raises(DecodeError) as raised:
        JSON.decode(b'"%b"' % (b"x" * 100_000), Colour)
    assert len(str(raised.value)) < 300


# --- finding a codec -------------------------------------------------------------------------


def test_an_unknown_codec_is_an_error_that_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="no codec 'jason'; did you mean 'json'"):
        codec_named("jason")


@pytest.mark.parametrize(
    ("content_type", "codec"),
    [
        ("application/json", JSON),
        ("Application/JSON; charset=utf-8", JSON),
        ("text/json", JSON),
        ("application/vnd.shop.order+json;v=1", JSON),
        ("application/vnd.msgpack", MSGPACK),
        ("application/msgpack", MSGPACK),
        ("application/x-msgpack", MSGPACK),
        (" application/octet-stream ", RAW),
        ("text/plain", None),
        ("", None),
        ("json", None),
    ],
)
def test_a_codec_is_found_by_content_type_whatever_its_parameters_and_case(content_type: str, codec: object) -> None:
    assert codec_for(content_type) is codec


class Upper:
    """A codec of a user's own."""

    name = "upper"
    content_type = "text/x-upper"

    def check(self, cls: type) -> None:
        pass

    def encode(self, value: object) -> bytes:
        return str(value).upper().encode()

    def decode(self, data: bytes, cls: type[Any]) -> Any:
        return cls(data.decode())

    def decode_builtins(self, data: bytes) -> object:
        return data.decode()

    def convert(self, obj: object, cls: type[Any]) -> Any:
        return cls(obj)


def test_a_codec_of_ones_own_is_found_by_name_and_content_type_and_can_be_defined_again() -> None:
    register_codec(Upper(), "text/x-shout")
    again = Upper()
    register_codec(again, "text/x-shout")
    assert codec_named("upper") is again
    assert codec_for("text/x-upper") is codec_for("TEXT/X-Shout") is again


def test_a_codec_never_takes_the_name_or_content_type_of_another() -> None:
    class Other(Upper):
        name = "json"

    class Greedy(Upper):
        name = "greedy"
        content_type = "application/json"

    for codec in (Other(), Greedy()):
        with pytest.raises(UsageError, match="would replace 'json'"):
            register_codec(codec)
    assert codec_named("json") is codec_for("application/json") is JSON


# --- threads ---------------------------------------------------------------------------------

THREADS = """
import sys, threading
from msgspec import defstruct
from penstock.codecs import codec_named

sys.setswitchinterval(1e-6)
codec = codec_named(sys.argv[1])

def make(name, fields):
    return defstruct(name, fields, frozen=True)

parts = [make(f"Part{number}", [("number", "int", 0)]) for number in range(2_000)]
classes = [
    make(f"Whole{number}", [(f"field_{index}", part, part()) for index, part in enumerate(parts[number::200])])
    for number in range(200)
]
empty = codec.encode(classes[0]())
start = threading.Barrier(4)

def read():
    for cls in classes:
        start.wait()
        if sys.argv[2] == "decode":
            codec.decode(empty, cls)
        else:
            codec.convert({}, cls)

threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("alive")
"""


@pytest.mark.parametrize("how", ["decode", "convert"])
@BOTH
def test_threads_may_meet_a_class_for_the_first_time_together(codec: Any, how: str) -> None:
    done = subprocess.run([sys.executable, "-c", THREADS, codec.name, how], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_no_module_lets_threads_build_a_decoder() -> None:
    builtin = {"str", "bytes", "int", "list", "dict", "msgspec", "Raw"}
    for path in (Path(__file__).parents[1] / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode":
                kinds = [keyword.value for keyword in node.keywords if keyword.arg == "type"]
                named = {name.id for kind in kinds for name in ast.walk(kind) if isinstance(name, ast.Name)}
                assert named <= builtin, f"{path}:{node.lineno}: build the decoder of {named - builtin} at import"


def test_a_codec_is_called_by_place_whatever_it_names_its_parameters() -> None:
    class Reversed:
        name, content_type = "reversed", "application/x-reversed"

        def decode(self, payload: bytes, kind: type[Any]) -> Any:
            return kind(payload[::-1])

    assert reader_of(Reversed(), bytes)(b"abc") == b"cba"  # type: ignore[arg-type]
