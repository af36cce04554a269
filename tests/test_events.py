"""What events promise: an untouched class, one meaning per name, a way up for every old version."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import pydantic
import pydantic.dataclasses
import pytest

from penstock.errors import (
    DecodeError,
    EncodeError,
    FutureVersion,
    InvalidEvent,
    InvalidName,
    UpcasterMissing,
    UsageError,
)
from penstock.events import (
    VERSION_HEADER,
    Event,
    EventType,
    Registry,
    check_event,
    check_name,
    event,
    event_type_named,
    event_type_of,
    upcaster,
    version_of,
)

NOW = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)


@pytest.fixture
def registry() -> Registry:
    return Registry()


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "0", "order.placed", "a-b_c.d", "x" * 128, "a."])
def test_a_name_of_letters_digits_dots_dashes_and_underscores_is_allowed(name: str) -> None:
    check_name("topic", name)
    check_name("topic", name, internal=True)


@pytest.mark.parametrize(
    "name",
    ["", ".a", "-a", "A", "a..b", "a/b", "a b", "a\n", "é", "x" * 129, "__a", "_", "\u0663", None, 5, b"a"],
)
def test_any_other_name_is_refused(name: Any) -> None:
    for internal in (False, True):
        with pytest.raises(InvalidName, match="topic name"):
            check_name("topic", name, internal=internal)


def test_only_internal_names_begin_with_an_underscore() -> None:
    check_name("topic", "_deliveries", internal=True)
    with pytest.raises(InvalidName):
        check_name("topic", "_deliveries")


# --- the envelope ----------------------------------------------------------------------------


def test_an_event_states_nothing_by_default() -> None:
    silent = Event()
    check_event(silent)
    assert silent.data == b""
    assert silent.headers == {}
    stated = [getattr(silent, name) for name in silent.__struct_fields__ if name not in {"data", "headers"}]
    assert stated == [None] * 8


def test_text_for_data_key_and_headers_is_stored_as_utf8() -> None:
    given = Event.of("naïve", key="ada", headers={"a": "é", "b": b"\xff"}, id="1", type="t", content_type="text/plain")
    assert given == Event(
        data="naïve".encode(),
        key=b"ada",
        headers={"a": b"\xc3\xa9", "b": b"\xff"},
        id="1",
        type="t",
        content_type="text/plain",
    )


def test_text_that_utf8_cannot_express_is_refused_by_name() -> None:
    broken = "\ud800"
    with pytest.raises(InvalidEvent, match=r"^data: .* lone surrogate"):
        Event.of(broken)
    with pytest.raises(InvalidEvent, match=r"^key: .* lone surrogate"):
        Event.of(key=broken)
    with pytest.raises(InvalidEvent, match=r"^header 'a': .* lone surrogate"):
        Event.of(headers={"a": broken})


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Event().id = "1"  # type: ignore[misc]


def test_two_events_share_no_headers() -> None:
    assert Event().headers is not Event().headers


def test_an_event_survives_pickling_and_copying() -> None:
    given = Event.of("x", key="k", headers={"a": "b"}, time=NOW)
    assert pickle.loads(pickle.dumps(given)) == copy.deepcopy(given) == given
    assert pickle.loads(pickle.dumps(Event())) == Event()


def test_the_repr_of_an_event_shows_neither_its_payload_nor_its_headers_values() -> None:
    shown = repr(Event.of("secret", key="ada", id="1", headers={"token": "secret"}))
    assert shown == "Event(data='<6 bytes>', key=b'ada', id='1', headers=['token'])"


class Strange(str):
    __slots__ = ()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"data": "text"}, r"data: expected bytes, got str; Event.of\(\) encodes text"),
    ({"data": None}, "data: expected bytes, got NoneType"),
    ({"data": bytearray(b"x")}, "data: expected bytes"),
    ({"key": "ada"}, r"key: expected bytes, got str; Event.of\(\)"),
    ({"headers": None}, "headers: expected Mapping"),
    ({"headers": [("a", b"b")]}, "headers: expected Mapping"),
    ({"headers": {"a": "b"}}, "header 'a': expected bytes"),
    ({"headers": {b"a": b"b"}}, "header name: expected str"),
    ({"headers": {"": b"b"}}, "header name: must not be empty"),
    ({"headers": {"a\nb": b""}}, "header name: holds a control character"),
    ({"time": "2026-01-01"}, "time: expected datetime"),
    ({"time": datetime(2026, 1, 1)}, "time: a time zone is missing"),  # noqa: DTZ001 - the very mistake
    ({"expires_at": datetime(2026, 1, 1)}, "expires_at: a time zone is missing"),  # noqa: DTZ001
    (
        {"expires_at": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))},
        "expires_at: .*years 1 to 9999",
    ),
    ({"time": datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))}, "time: .*years 1 to 9999"),
]
for _name in ("id", "source", "type", "subject", "content_type"):
    WRONG += [
        ({_name: 5}, f"^{_name}: expected str, got int"),
        ({_name: ""}, f"^{_name}: must not be empty"),
        *[
            ({_name: f"a{mark}b"}, f"^{_name}: holds a control")
            for mark in "\x00\n\x7f\x9f\ud800\ufdd0\uffff\U0010ffff"
        ],
    ]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_an_event_that_cannot_be_stored_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidEvent, match=message):
        check_event(Event(**fields))


def test_only_an_event_is_an_event() -> None:
    with pytest.raises(InvalidEvent, match="event: expected Event, got dict"):
        check_event({"data": b""})  # type: ignore[arg-type]


def test_unusual_but_sound_events_are_accepted() -> None:
    check_event(
        Event(
            key=b"",
            id=Strange("1"),
            type="com.Example.Ünïcode 🎉",
            time=datetime.max.replace(tzinfo=UTC),
            expires_at=datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))),
            headers={"X-Any Name": b"\x00"},
        )
    )


# --- declaring classes -----------------------------------------------------------------------


def _dataclass() -> type[Any]:
    @dataclass(frozen=True, slots=True)
    class Placed:
        order_id: str
        total: Decimal

    return Placed


def _struct() -> type[Any]:
    class Placed(msgspec.Struct, frozen=True):
        order_id: str
        total: Decimal

    return Placed


def _attrs() -> type[Any]:
    @attrs.frozen
    class Placed:
        order_id: str
        total: Decimal

    return Placed


def _pydantic() -> type[Any]:
    class Placed(pydantic.BaseModel):
        order_id: str
        total: Decimal

    return Placed


def _pydantic_dataclass() -> type[Any]:
    @pydantic.dataclasses.dataclass
    class Placed:
        order_id: str
        total: Decimal

    return Placed


KINDS = pytest.mark.parametrize("make", [_dataclass, _struct, _attrs, _pydantic, _pydantic_dataclass])


@KINDS
def test_the_class_is_returned_untouched(registry: Registry, make: Callable[[], type[Any]]) -> None:
    cls = make()
    before = dict(vars(cls))
    assert registry.event("order.placed", version=3)(cls) is cls
    assert dict(vars(cls)) == before


@KINDS
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_every_kind_of_class_can_be_an_event(registry: Registry, make: Callable[[], type[Any]], codec: str) -> None:
    cls = registry.event("order.placed", codec=codec)(make())
    found = registry.type_of(cls)
    value = cls(order_id="1", total=Decimal("1.50"))
    assert found.decode(found.encode(value), 1) == value
    assert (found.name, found.version, found.cls) == ("order.placed", 1, cls)
    assert found.content_type == {"json": "application/json", "msgpack": "application/vnd.msgpack"}[codec]
    assert registry.type_named("order.placed") is found


def test_programs_share_one_registry() -> None:
    @event("test-event.shared", version=2)
    @dataclass
    class Shared:
        number: int

    @upcaster("test-event.shared", from_version=1)
    def rename(fields: dict[str, Any]) -> dict[str, Any]:
        return {"number": fields["n"]}

    assert event_type_named("test-event.shared") is event_type_of(Shared)
    assert event_type_of(Shared).decode(b'{"n":5}', 1) == Shared(5)


def test_registries_know_nothing_of_each_other(registry: Registry) -> None:
    registry.event("order.placed")(_dataclass())
    assert Registry().type_named("order.placed") is None


def test_a_class_without_the_decorator_is_not_an_event(registry: Registry) -> None:
    with pytest.raises(InvalidEvent, match=r"class .*Placed is not an event: decorate it with @penstock.event"):
        registry.type_of(_dataclass())


def test_a_subclass_of_an_event_is_not_one(registry: Registry) -> None:
    @registry.event("base")
    @dataclass
    class Base:
        a: int

    @dataclass
    class Derived(Base):
        b: int

    with pytest.raises(InvalidEvent, match="Derived is not an event"):
        registry.type_of(Derived)
    with pytest.raises(EncodeError, match=r"Derived is not .*Base, event 'base'"):
        registry.type_of(Base).encode(Derived(1, 2))


@pytest.mark.parametrize("name", ["Order", "", "_internal", "a..b"])
def test_an_event_type_follows_the_naming_rule(registry: Registry, name: str) -> None:
    with pytest.raises(InvalidName, match="event type name"):
        registry.event(name)
    with pytest.raises(InvalidName, match="event type name"):
        registry.upcaster(name, from_version=1)


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None])
def test_a_version_is_an_int_from_one_on(registry: Registry, version: Any) -> None:
    with pytest.raises(UsageError, match="version must be an int from 1 on"):
        registry.event("a", version=version)
    with pytest.raises(UsageError, match="from_version must be an int from 1 on"):
        registry.upcaster("a", from_version=version)


def test_an_unknown_codec_is_refused_where_it_is_written(registry: Registry) -> None:
    with pytest.raises(UsageError, match="did you mean 'msgpack'"):
        registry.event("a", codec="msgpak")


def test_one_name_for_two_classes_is_refused_naming_both(registry: Registry) -> None:
    registry.event("order.placed")(_dataclass())
    with pytest.raises(UsageError, match=r"'order.placed' is registered twice, as .*_dataclass.*_struct"):
        registry.event("order.placed")(_struct())


def test_two_names_for_one_class_are_refused(registry: Registry) -> None:
    cls = registry.event("one")(_dataclass())
    with pytest.raises(UsageError, match="already event 'one', not also 'two'"):
        registry.event("two")(cls)


# --- defined again, or in the wrong order ----------------------------------------------------


def test_a_cell_run_again_replaces_the_class(registry: Registry) -> None:
    old = registry.event("order.placed")(_dataclass())
    registry.type_of(old)
    new = registry.event("order.placed", version=2)(_dataclass())
    assert registry.type_of(new).version == 2
    found = registry.type_named("order.placed")
    assert found is not None
    assert found.cls is new


def test_a_value_older_than_its_class_is_refused_with_the_reason(registry: Registry) -> None:
    old = registry.event("order.placed")(_dataclass())
    registry.event("order.placed")(_dataclass())
    with pytest.raises(InvalidEvent, match="which was defined again"):
        registry.type_of(old)


@KINDS
def test_a_replaced_class_is_not_kept_alive(registry: Registry, make: Callable[[], type[Any]]) -> None:
    old = registry.event("order.placed")(make())
    found = registry.type_of(old)
    found.decode(found.encode(old(order_id="1", total=Decimal(1))), 1)
    watch = weakref.ref(old)
    registry.event("order.placed")(make())
    del old, found
    gc.collect()
    assert watch() is None


def test_the_decorator_below_one_that_makes_a_new_class_is_explained(registry: Registry) -> None:
    @dataclass(slots=True)
    @registry.event("sliced")
    class Sliced:
        a: int

    @attrs.define
    @registry.event("defined")
    class Defined:
        a: int

    for cls in (Sliced, Defined):
        with pytest.raises(InvalidEvent, match="@event is below a decorator that makes a new class"):
            registry.type_of(cls)


def test_the_decorator_below_one_that_keeps_the_class_works(registry: Registry) -> None:
    @dataclass
    @registry.event("kept")
    class Kept:
        a: int

    assert registry.type_of(Kept).decode(b'{"a":1}', 1) == Kept(1)


def test_a_class_of_no_supported_kind_is_refused_at_first_use(registry: Registry) -> None:
    @registry.event("plain")
    class Plain:
        a: int

    for look_up in (lambda: registry.type_of(Plain), lambda: registry.type_named("plain")):
        with pytest.raises(InvalidEvent, match=r"'plain': .*Plain is not a dataclass.*@event goes above"):
            look_up()


def test_a_class_of_bytes_is_carried_raw(registry: Registry) -> None:
    @registry.event("image", codec="raw")
    class Image(bytes):
        __slots__ = ()

    found = registry.type_of(Image)
    assert found.content_type == "application/octet-stream"
    assert found.encode(Image(b"\xff")) == b"\xff"
    for content_type in (None, "application/octet-stream", "image/png", "application/json"):
        assert type(found.decode(b"\xff", 1, content_type)) is Image


def test_threads_may_register_and_look_up_at_once(registry: Registry) -> None:
    classes = [registry.event(f"first-{index}")(_dataclass()) for index in range(20)]
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait()
            for index in range(200):
                registry.event(f"of-{number}-{index}")(_struct())
                assert registry.type_named(f"of-{number}-{index}") is not None
                assert registry.type_of(classes[index % 20]).cls is classes[index % 20]
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# --- versions --------------------------------------------------------------------------------


@pytest.fixture
def order(registry: Registry) -> EventType[Any]:
    """Version 3 of an order, with the whole way up to it."""

    @registry.event("order.placed", version=3)
    @dataclass
    class Order:
        order_id: str
        total: Decimal
        currency: str

    @registry.upcaster(Order, from_version=2)
    def add_currency(fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"currency": "EUR"}

    @registry.upcaster("order.placed", from_version=1)
    def rename_id(fields: dict[str, Any]) -> dict[str, Any]:
        fields["order_id"] = fields.pop("id")
        return fields

    return registry.type_of(Order)


def test_an_old_event_takes_every_step_up_to_the_current_version(order: EventType[Any]) -> None:
    current = order.cls("7", Decimal("1.50"), "EUR")
    assert order.decode(b'{"id":"7","total":"1.50"}', 1) == current
    assert order.decode(b'{"order_id":"7","total":"1.50"}', 2) == current
    assert order.decode(order.encode(current), 3) == current


@KINDS
@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_every_kind_of_class_can_be_upcast(registry: Registry, make: Callable[[], type[Any]], codec: str) -> None:
    cls = registry.event("order.placed", version=2, codec=codec)(make())

    @registry.upcaster(cls, from_version=1)
    def add_total(fields: dict[str, Any]) -> dict[str, Any]:
        return fields | {"total": Decimal("2.50")}

    found = registry.type_of(cls)
    assert found.decode(found.codec.encode({"order_id": "1"}), 1) == cls(order_id="1", total=Decimal("2.50"))


def test_an_event_of_a_newer_program_is_never_guessed_at(order: EventType[Any]) -> None:
    with pytest.raises(FutureVersion) as raised:
        order.decode(order.encode(order.cls("7", Decimal(1), "EUR")), 4)
    assert (raised.value.version, raised.value.known) == (4, 3)


def test_a_missing_step_is_named_before_any_other_runs(registry: Registry) -> None:
    cls = registry.event("order.placed", version=4)(_dataclass())
    ran = []

    @registry.upcaster(cls, from_version=1)
    def note(fields: dict[str, Any]) -> dict[str, Any]:
        ran.append(fields)
        return fields

    with pytest.raises(UpcasterMissing, match="from_version=2"):
        registry.type_of(cls).decode(b"{}", 1)
    assert ran == []


def test_a_failing_upcaster_is_a_decode_error_that_names_it(registry: Registry) -> None:
    cls = registry.event("order.placed", version=2)(_dataclass())

    @registry.upcaster(cls, from_version=1)
    def stumble(fields: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("secret")

    with pytest.raises(DecodeError, match=r"stumble of 'order.placed' from version 1 raised KeyError") as raised:
        registry.type_of(cls).decode(b"{}", 1)
    assert "secret" not in str(raised.value)


def test_an_upcaster_that_returns_no_dict_is_a_decode_error(registry: Registry) -> None:
    cls = registry.event("order.placed", version=2)(_dataclass())

    @registry.upcaster(cls, from_version=1)
    def forget(fields: dict[str, Any]) -> dict[str, Any]:
        return None  # type: ignore[return-value]

    with pytest.raises(DecodeError, match=r"forget .* returned NoneType, not a dict"):
        registry.type_of(cls).decode(b"{}", 1)


def test_an_old_payload_that_is_no_object_is_a_decode_error(order: EventType[Any]) -> None:
    with pytest.raises(DecodeError, match="needs an object, and the payload holds list"):
        order.decode(b"[]", 1)


def test_what_does_not_fit_after_upcasting_is_a_decode_error(order: EventType[Any]) -> None:
    with pytest.raises(DecodeError, match=r"Order cannot be read from json: .*`\$.total`"):
        order.decode(b'{"order_id":"7","total":[]}', 2)


def test_an_upcaster_defined_again_replaces_and_another_one_is_refused(registry: Registry) -> None:
    cls = registry.event("order.placed", version=2)(_dataclass())

    def define(total: str) -> None:
        @registry.upcaster(cls, from_version=1)
        def add_total(fields: dict[str, Any]) -> dict[str, Any]:
            return fields | {"total": total}

    define("1")
    define("2")
    assert registry.type_of(cls).decode(b'{"order_id":"1"}', 1).total == 2

    def other(fields: dict[str, Any]) -> dict[str, Any]:
        return fields

    with pytest.raises(UsageError, match=r"'order.placed' from version 1 is registered twice, .*add_total.*other"):
        registry.upcaster(cls, from_version=1)(other)


def test_upcasters_outlive_a_class_that_is_replaced(registry: Registry) -> None:
    registry.upcaster("order.placed", from_version=1)(lambda fields: fields | {"total": "1"})
    registry.event("order.placed", version=2)(_dataclass())
    new = registry.event("order.placed", version=2)(_dataclass())
    assert registry.type_of(new).decode(b'{"order_id":"1"}', 1) == new("1", Decimal(1))


def test_raw_bytes_have_no_older_version_to_upcast(registry: Registry) -> None:
    @registry.event("image", version=2, codec="raw")
    class Image(bytes):
        __slots__ = ()

    registry.upcaster(Image, from_version=1)(lambda fields: fields)
    with pytest.raises(DecodeError, match="raw bytes have no fields"):
        registry.type_of(Image).decode(b"", 1)


def test_a_type_that_changed_its_codec_still_reads_what_it_wrote_before(registry: Registry) -> None:
    cls = registry.event("order.placed", codec="msgpack")(_dataclass())
    found = registry.type_of(cls)
    assert found.decode(b'{"order_id":"1","total":"2"}', 1, "application/json; charset=utf-8") == cls("1", 2)
    with pytest.raises(DecodeError, match="no codec reads content type 'image/png'"):
        found.decode(b"", 1, "image/png")


def test_the_version_travels_in_a_header_unless_it_is_one(order: EventType[Any], registry: Registry) -> None:
    assert order.headers == {VERSION_HEADER: b"3"}
    assert version_of(order.headers) == 3
    first = registry.type_of(registry.event("first")(_dataclass()))
    assert first.headers == {}
    assert version_of(first.headers) == 1


@pytest.mark.parametrize("stated", [b"", b"0", b"-1", b"01", b"1.0", b" 1", b"1\n", b"1_0", b"x", b"9" * 10, b"\xff"])
def test_a_version_that_is_no_number_is_a_decode_error(stated: bytes) -> None:
    with pytest.raises(DecodeError, match="'dataversion' is not a version number"):
        version_of({VERSION_HEADER: stated})
