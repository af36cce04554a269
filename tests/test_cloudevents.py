"""What CloudEvents promises: the event comes back exactly, other SDKs agree, bad input has one error."""

from __future__ import annotations

import base64
import contextlib
import json
import string
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event, to_structured_event
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.cloudevents import (
    BATCH_CONTENT_TYPE,
    CONTENT_TYPE,
    from_structured,
    from_structured_batch,
    to_structured,
    to_structured_batch,
)
from penstock.codecs import is_json, media_type
from penstock.errors import InvalidEvent
from penstock.events import Event, check_event, is_plain_text

NOW = datetime(2026, 5, 4, 3, 2, 1, 123456, tzinfo=UTC)
MINIMAL = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order.placed"}


def say(**fields: Any) -> Event:
    return Event.of(**{"id": "1", "source": "/shop", "type": "order.placed"} | fields)


def written(event: Event, **options: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(to_structured(event, **options))
    return document


def read(**members: Any) -> Event:
    return from_structured(json.dumps(MINIMAL | members).encode())


# --- what events there are -------------------------------------------------------------------

plain_text = st.text(min_size=1).filter(is_plain_text)
moments = st.datetimes(
    timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=45)), timezone(-timedelta(hours=12))]),
    min_value=datetime(2, 1, 1),  # noqa: DTZ001 - hypothesis adds the zone
    max_value=datetime(9998, 1, 1),  # noqa: DTZ001
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_payloads = st.builds(
    lambda value, indent, around, ascii_only: (
        around + json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode() + around
    ),
    json_values,
    st.sampled_from([None, 0, 2]),
    st.sampled_from([b"", b"", b" ", b"\n", b"\r\n\t"]),
    st.booleans(),
)
payloads = st.binary() | json_payloads | st.text().map(str.encode)
content_types = (
    st.none()
    | plain_text
    | st.sampled_from(
        [
            "application/json",
            "APPLICATION/JSON; charset=utf-8",
            "application/vnd.shop+json",
            "text/json",
            "text/plain",
            "text/plain; charset=iso-8859-1",
            "text/csv",
            "application/octet-stream",
        ]
    )
)
attribute_names = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=22)
known_names = st.sampled_from(
    [
        "id",
        "data",
        "data_base64",
        "specversion",
        "time",
        "datacontenttype",
        "dataschema",
        "partitionkey",
        "expirytime",
        "sequence",
        "recordedtime",
        "penstockextra",
        "traceparent",
        "X-Any",
    ]
)
header_values = st.binary() | st.text().map(str.encode) | st.just(b"urn:x")
events = st.builds(
    Event,
    id=plain_text,
    source=plain_text,
    type=plain_text,
    subject=st.none() | plain_text,
    time=st.none() | moments,
    expires_at=st.none() | moments,
    key=st.none() | st.binary() | st.text().map(str.encode),
    content_type=content_types,
    headers=st.dictionaries(attribute_names | known_names | plain_text, header_values, max_size=4),
    data=payloads,
)


# --- there and back --------------------------------------------------------------------------


@given(events)
def test_an_event_comes_back_exactly(event: Event) -> None:
    document = to_structured(event)
    assert from_structured(document) == event
    assert json.loads(document)["specversion"] == "1.0"


@given(st.lists(events, max_size=4))
def test_a_batch_of_events_comes_back_exactly(batch: list[Event]) -> None:
    assert from_structured_batch(to_structured_batch(batch)) == batch


@given(events)
def test_every_attribute_that_is_written_is_one_that_cloudevents_allows(event: Event) -> None:
    for name, value in written(event, sequence=1).items():
        if name not in {"data", "data_base64"}:
            assert set(name) <= set(string.ascii_lowercase + string.digits)
            assert 1 <= len(name) <= 20
            assert isinstance(value, str)
            assert is_plain_text(value)


@given(events, st.integers(0, 2**63 - 1), moments)
def test_offset_and_append_time_are_added_without_changing_the_event(
    event: Event, sequence: int, recorded_at: datetime
) -> None:
    back = from_structured(to_structured(event, sequence=sequence, recorded_at=recorded_at))
    added = {name: value for name, value in back.headers.items() if name not in event.headers}
    assert set(added) <= {"sequence", "recordedtime"}
    assert msgspec.structs.replace(back, headers=event.headers) == event
    assert dict(back.headers) == dict(event.headers) | added


def test_every_field_has_its_attribute() -> None:
    event = say(
        subject="s",
        time=NOW.astimezone(timezone(timedelta(hours=2))),
        expires_at=NOW.replace(microsecond=0),
        key="ada",
        content_type="application/json",
        headers={"traceparent": "00-1", "dataversion": "2", "dataschema": "https://example.org/s"},
        data='{"a":1}',
    )
    assert written(event, sequence=42, recorded_at=NOW) == MINIMAL | {
        "subject": "s",
        "time": "2026-05-04T03:02:01.123456Z",
        "expirytime": "2026-05-04T03:02:01Z",
        "partitionkey": "ada",
        "datacontenttype": "application/json",
        "traceparent": "00-1",
        "dataversion": "2",
        "dataschema": "https://example.org/s",
        "sequence": "00000000000000000042",
        "recordedtime": "2026-05-04T03:02:01.123456Z",
        "data": {"a": 1},
    }


def test_sequences_sort_as_text_as_they_do_as_numbers() -> None:
    numbers = [0, 9, 10, 10**18, 2**63 - 1]
    texts = [written(say(), sequence=number)["sequence"] for number in numbers]
    assert texts == sorted(texts)


def test_only_what_cannot_be_an_attribute_goes_into_the_extra_one() -> None:
    headers: dict[str, str | bytes] = {
        "plain": "é",
        "binary": b"\xff",
        "control": "a\nb",
        "Upper": "x",
        "x" * 21: "x",
        "id": "x",
        "dataschema": "no uri",
    }
    document = written(say(key=b"\xfe", headers=headers))
    extra = json.loads(base64.b64decode(document.pop("penstockextra")))
    assert document == MINIMAL | {"plain": "é"}
    assert set(extra) == {"headers", "key"}
    assert set(extra["headers"]) == set(headers) - {"plain"}


def test_an_empty_key_is_no_partitionkey_and_survives() -> None:
    assert "partitionkey" not in written(say(key=b""))
    assert from_structured(to_structured(say(key=b""))).key == b""


def test_an_ordinary_event_has_no_extra_attribute() -> None:
    assert "penstockextra" not in written(say(key="ada", headers={"a": "b"}))


def test_a_header_of_the_events_own_named_sequence_survives_the_logs() -> None:
    event = say(headers={"sequence": "7", "recordedtime": "mine"})
    assert written(event)["sequence"] == "7"
    document = to_structured(event, sequence=1, recorded_at=NOW)
    assert json.loads(document)["sequence"] == "00000000000000000001"
    assert from_structured(document) == event


# --- payloads --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content_type", "data", "member"),
    [
        ("application/json", b'{"a":[1,2]}', {"data": {"a": [1, 2]}}),
        ("application/x+json; v=1", b"5", {"data": 5}),
        ("application/json", b"null", {"data": None}),
        ("application/json", b'{ "a" :\n1.50 }', {"data": {"a": 1.5}}),
        ("application/json", b'{"a":1}\n', "base64"),
        ("application/json", b'{"a":1', "base64"),
        ("application/json", b'1],"id":[2', "base64"),
        ("application/json", b'"\xff"', "base64"),
        ("application/json", b"\xef\xbb\xbf{}", "base64"),
        ("application/json", b"[" * 61 + b"]" * 61, "base64"),
        ("application/json", b"[" * 100_000 + b"]" * 100_000, "base64"),
        ("text/plain", "naïve\x00\n".encode(), {"data": "naïve\x00\n"}),
        ("text/plain; charset=UTF-8", b"a", {"data": "a"}),
        ("text/plain; charset=latin-1", b"a", "base64"),
        ("text/plain", b"\xff", "base64"),
        ("application/xml", b"<a/>", "base64"),
        (None, b'{"a":1}', "base64"),
        (None, b"", {}),
        ("application/json", b"", {}),
    ],
)
def test_a_payload_is_embedded_only_where_it_stays_byte_for_byte(
    content_type: str | None, data: bytes, member: Any
) -> None:
    event = say(content_type=content_type, data=data)
    document = written(event)
    expected = {"data_base64": base64.b64encode(data).decode()} if member == "base64" else member
    assert {
        name: value for name, value in document.items() if name.startswith("data") and name != "datacontenttype"
    } == (expected)
    assert from_structured(to_structured(event)) == event


def test_deep_json_never_makes_a_batch_unreadable() -> None:
    deep = [say(content_type="application/json", data=b"[" * depth + b"]" * depth) for depth in (1, 60, 300, 900)]
    assert from_structured_batch(to_structured_batch(deep)) == deep


def test_a_payload_cannot_escape_into_the_document() -> None:
    event = say(content_type="application/json", data=b'1,"id":"forged"')
    assert from_structured(to_structured(event)).id == "1"


# --- what must be stated ---------------------------------------------------------------------


def test_what_is_missing_is_named() -> None:
    with pytest.raises(InvalidEvent, match="must state its id, source, type"):
        to_structured(Event())
    with pytest.raises(InvalidEvent, match="must state its source"):
        to_structured(Event(id="1", type="t"))


def test_defaults_state_what_an_event_does_not_and_nothing_else() -> None:
    defaults = Event(id="d", source="/d", type="d", content_type="text/plain", subject="d", key=b"d", data=b"d")
    assert written(Event(id="1", data=b"x"), defaults=defaults) == {
        "specversion": "1.0",
        "id": "1",
        "source": "/d",
        "type": "d",
        "datacontenttype": "text/plain",
        "data": "x",
    }


def test_an_event_that_is_not_sound_is_never_written() -> None:
    with pytest.raises(InvalidEvent, match=r"^subject: holds a control"):
        to_structured(say(subject="a\nb"))
    with pytest.raises(InvalidEvent, match=r"^source: must not be empty"):
        to_structured(Event(id="1", type="t"), defaults=Event(source=""))
    with pytest.raises(InvalidEvent, match=r"^recorded_at: a time zone"):
        to_structured(say(), recorded_at=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidEvent, match=r"^sequence: .* never negative"):
        to_structured(say(), sequence=-1)


def test_a_batch_carries_the_offset_of_each_event() -> None:
    document = json.loads(to_structured_batch([say(), say(id="2")], sequences=[7, 9], recorded_at=NOW))
    assert [(item["id"], int(item["sequence"])) for item in document] == [("1", 7), ("2", 9)]
    assert to_structured_batch([]) == b"[]"


# --- reading what others write ---------------------------------------------------------------


def test_extensions_of_others_become_headers() -> None:
    event = read(
        traceparent="00-é",
        flag=True,
        off=False,
        count=-5,
        big=2**40,
        averyveryverylongattribute="x",
        gone=None,
    )
    assert event.headers == {
        "traceparent": "00-é".encode(),
        "flag": b"true",
        "off": b"false",
        "count": b"-5",
        "big": b"1099511627776",
        "averyveryverylongattribute": b"x",
    }
    assert from_structured(to_structured(event)) == event


def test_data_without_a_content_type_is_json() -> None:
    event = read(data={"a": 1})
    assert (event.content_type, event.data) == ("application/json", b'{"a": 1}')


def test_binary_data_without_a_content_type_stays_without() -> None:
    event = read(data_base64="AP8=")
    assert (event.content_type, event.data) == (None, b"\x00\xff")


def test_data_of_another_content_type_is_its_text() -> None:
    assert read(datacontenttype="text/xml", data="<a>é</a>").data == "<a>é</a>".encode()
    assert read(datacontenttype="application/xml", data="<a/>").data == b"<a/>"
    assert read(datacontenttype="text/plain", data={"a": 1}).data == b'{"a": 1}'


def test_null_means_absent_for_every_attribute() -> None:
    assert read(subject=None, time=None, datacontenttype=None, partitionkey=None, data_base64=None) == say()


def test_times_of_any_zone_and_precision_become_utc_microseconds() -> None:
    for text in (
        "2026-05-04T03:02:01.123456Z",
        "2026-05-04T05:02:01.1234561+02:00",
        "2026-05-04t03:02:01.123456z",
    ):
        event = read(time=text, expirytime=text)
        assert event.time == event.expires_at == NOW
        assert event.time is not None
        assert event.time.tzinfo == UTC


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"specversion": None}, "specversion"),
    ({"specversion": "0.3"}, "specversion"),
    ({"specversion": 1.0}, "specversion"),
    ({"id": None}, "id: is required"),
    ({"id": ""}, "id: must not be empty"),
    ({"id": 5}, "id: must be a string"),
    ({"id": "a\u0000b"}, "id: holds a control"),
    ({"source": None}, "source: is required"),
    ({"source": ""}, "source: must not be empty"),
    ({"type": None}, "type: is required"),
    ({"type": ""}, "type: must not be empty"),
    ({"subject": ""}, "subject: must not be empty"),
    ({"subject": ["x"]}, "subject: must be a string"),
    ({"datacontenttype": ""}, "content_type: must not be empty"),
    ({"datacontenttype": 5}, "datacontenttype: must be a string"),
    ({"time": "yesterday"}, "time: is not a time"),
    ({"time": "2026-05-04T03:02:01"}, "time: a time zone is missing"),
    ({"time": "0001-01-01T00:00:00+10:00"}, "time: .*years"),
    ({"time": 5}, "time: must be a string"),
    ({"expirytime": "soon"}, "expirytime: is not a time"),
    ({"expirytime": 5}, "expirytime: is not a time"),
    ({"extension": 1.5}, "extension: must be a string, a boolean or an integer"),
    ({"extension": {}}, "extension: must be"),
    ({"Upper": "x"}, "attribute name 'Upper'"),
    ({"with_underscore": "x"}, "attribute name 'with_underscore'"),
    ({"": "x"}, "attribute name ''"),
    ({"data": 1, "data_base64": "AA=="}, "data: stands beside data_base64"),
    ({"data_base64": "?"}, "data_base64: is not base64"),
    ({"data_base64": "é"}, "data_base64: is not base64"),
    ({"data_base64": ["AA=="]}, "data_base64: must be"),
    ({"penstockextra": "?"}, "penstockextra"),
    ({"penstockextra": "e30"}, "penstockextra"),
    ({"penstockextra": base64.b64encode(b'{"new":1}').decode()}, "penstockextra"),
    ({"penstockextra": base64.b64encode(b'{"headers":{"":""}}').decode()}, "header name: must not be empty"),
]


@pytest.mark.parametrize(("members", "message"), BROKEN)
def test_a_document_that_breaks_a_rule_is_refused_naming_the_attribute(members: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidEvent, match=f"^{message}"):
        read(**members)


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff",
        b'{"id":"\xff"}',
        b'{"data":"\xff"}',
        b'{"data":' * 100_000,
        b"[" * 100_000,
        b"{}{}",
    ],
)
def test_bytes_that_are_no_json_object_are_refused(document: bytes) -> None:
    with pytest.raises(InvalidEvent, match="must be a JSON object"):
        from_structured(document)


def test_a_lone_surrogate_in_text_is_refused() -> None:
    with pytest.raises(InvalidEvent):
        read(datacontenttype="text/plain", data="\ud800 and more")


def test_a_bad_event_in_a_batch_is_named_by_its_place() -> None:
    with pytest.raises(InvalidEvent, match="event 1 of the batch: id: is required"):
        from_structured_batch(json.dumps([MINIMAL, MINIMAL | {"id": None}]).encode())
    for document in (b"{}", b"", b"[", b"[" * 100_000, b"\xff"):
        with pytest.raises(InvalidEvent, match="must be a JSON array"):
            from_structured_batch(document)


def test_what_is_refused_is_not_quoted() -> None:
    for members in (
        {"id": "", "data": "secret"},
        {"time": "secret"},
        {"penstockextra": "secret"},
        {"x": {"secret": 1}},
    ):
        with pytest.raises(InvalidEvent) as raised:
            read(**members)
        assert "secret" not in str(raised.value)
    with pytest.raises(InvalidEvent) as raised:
        read(**{"A" * 10_000: "x"})
    assert len(str(raised.value)) < 200


@given(st.binary(max_size=200) | st.text().map(str.encode))
@example(b'{"specversion":"1.0"}')
def test_no_bytes_raise_anything_but_invalid_event(document: bytes) -> None:
    for reader in (from_structured, from_structured_batch):
        with contextlib.suppress(InvalidEvent):
            reader(document)


@given(events, st.lists(st.tuples(st.integers(0), st.integers(0, 255)), min_size=1, max_size=5), st.booleans())
def test_a_damaged_document_is_refused_or_read_as_a_sound_event(
    event: Event, damage: list[tuple[int, int]], cut: bool
) -> None:
    document = bytearray(to_structured(event, sequence=1))
    for at, byte in damage:
        document[at % len(document)] = byte
    if cut:
        del document[damage[0][0] % len(document) :]
    try:
        survivor = from_structured(bytes(document))
    except InvalidEvent:
        return
    check_event(survivor)
    assert from_structured(to_structured(survivor)) == survivor


json_members = st.dictionaries(
    st.sampled_from([*MINIMAL, "time", "data", "data_base64", "partitionkey", "penstockextra", "x"]),
    json_values,
)


@given(json_members)
def test_members_of_any_value_are_refused_or_read_as_a_sound_event(members: dict[str, Any]) -> None:
    try:
        survivor = from_structured(json.dumps(MINIMAL | members).encode())
    except InvalidEvent:
        return
    assert from_structured(to_structured(survivor)) == survivor


# --- the official package --------------------------------------------------------------------


@given(events)
def test_the_official_package_reads_what_is_written(event: Event) -> None:
    message = HTTPMessage({"content-type": CONTENT_TYPE}, to_structured(event, sequence=7))
    theirs = from_structured_event(message)
    assert (theirs.get_id(), theirs.get_source(), theirs.get_type()) == (event.id, event.source, event.type)
    assert theirs.get_specversion() == "1.0"
    assert theirs.get_subject() == event.subject
    assert theirs.get_datacontenttype() == event.content_type
    assert theirs.get_extension("sequence") == "00000000000000000007"
    if event.time is not None:
        assert theirs.get_time() == event.time
    if event.key and is_plain_text(event.key.decode(errors="surrogateescape")):
        assert theirs.get_extension("partitionkey") == event.key.decode()
    data = theirs.get_data()
    match data:
        case bytes():
            assert data == event.data
        case str() if not is_json(media_type(event.content_type or "")):
            assert data.encode() == event.data
        case None:
            assert event.data in {b"", b"null"}
        case _:
            assert data == json.loads(event.data)


attribute_values = st.text().filter(is_plain_text) | st.booleans() | st.integers(-(2**31), 2**31 - 1)
their_events = st.builds(
    CloudEvent,
    attributes=st.builds(
        lambda attributes, extensions: extensions | {n: v for n, v in attributes.items() if v is not None},
        st.fixed_dictionaries(
            {
                "id": plain_text,
                "source": plain_text,
                "type": plain_text,
                "specversion": st.just("1.0"),
                "time": moments,
                "subject": st.none() | plain_text,
                "datacontenttype": st.sampled_from([None, "application/json", "text/plain", "image/png"]),
                "dataschema": st.sampled_from([None, "https://example.org/schema"]),
            }
        ),
        st.dictionaries(attribute_names.map(lambda name: f"x{name}"), attribute_values, max_size=3),
    ),
    data=st.none() | st.binary() | st.dictionaries(st.text(), json_values, max_size=3) | st.text(),
)


@given(their_events)
def test_what_the_official_package_writes_is_read(theirs: CloudEvent) -> None:
    message = to_structured_event(theirs)
    assert message.headers["content-type"] == CONTENT_TYPE
    event = from_structured(message.body)
    assert (event.id, event.source, event.type) == (theirs.get_id(), theirs.get_source(), theirs.get_type())
    assert event.subject == theirs.get_subject()
    assert event.time == theirs.get_time()
    attributes = theirs.get_attributes()
    for name, value in event.headers.items():
        stated = attributes[name]
        assert value.decode() == (str(stated).lower() if isinstance(stated, bool) else str(stated))
    data, content_type = theirs.get_data(), theirs.get_datacontenttype()
    if isinstance(data, bytes):
        assert event.data == data
    elif data is None:
        assert event.data == b""
    elif content_type in {None, "application/json"}:
        assert json.loads(event.data) == data
    else:
        assert event.data == str(data).encode()


def test_the_official_package_reads_each_event_of_a_batch() -> None:
    batch = to_structured_batch([say(id=str(number), data=b"\xff") for number in range(3)])
    assert BATCH_CONTENT_TYPE == "application/cloudevents-batch+json"
    for number, item in enumerate(json.loads(batch)):
        theirs = JSONFormat().read(None, json.dumps(item))
        assert (theirs.get_id(), theirs.get_data()) == (str(number), b"\xff")
