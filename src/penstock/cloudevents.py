"""CloudEvents 1.0 as JSON: one event (`to_structured`, `from_structured`) or a batch of them.

What this promises:

* `from_structured(to_structured(event)) == event`, for every event that states its id, source and type.
* What is written here is read by any CloudEvents SDK, and what they write is read here.
* Nothing that a document says is dropped: an attribute without a field of its own becomes a header.
* Bytes that are no CloudEvent raise `InvalidEvent` naming the attribute, and nothing else.

How an event maps to attributes:

    id, source, type, subject, time     the same
    key                                 partitionkey
    expires_at                          expirytime
    content_type                        datacontenttype
    headers                             extension attributes of the same names, and `dataschema`
    data                                data or data_base64
    (offset and append time)            sequence, 20 digits so that it sorts as text, and recordedtime

Attributes are text under names of `[a-z0-9]`, and headers and keys are more than that. Whatever cannot
be an attribute (binary values, other names, names that mean something else here) travels in one more
attribute, `penstockextra`: base64 of JSON such as `{"headers": {"X-Trace": "AAE="}, "key": "/w=="}`, whose
values are base64 in turn. When it repeats an attribute, it is the one that counts.

Payloads survive byte for byte. JSON is embedded as it stands, and text as a string; if embedding could change
a payload, or if it is neither, it goes to `data_base64`.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from itertools import repeat
from typing import TYPE_CHECKING

import msgspec

from penstock.codecs import is_json, media_type
from penstock.errors import InvalidEvent
from penstock.events import Event, check_event, check_moment, is_plain_text

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTENT_TYPE = "application/cloudevents+json"
BATCH_CONTENT_TYPE = "application/cloudevents-batch+json"

_REQUIRED = ("id", "source", "type")
_CORE = {"specversion", *_REQUIRED, "subject", "time", "datacontenttype"}
_RESERVED = _CORE | {"partitionkey", "expirytime", "penstockextra", "data", "data_base64"}

# Readers must accept longer names; writers should not send them.
_NAME_WRITTEN = re.compile(r"[a-z0-9]{1,20}")
_NAME_READ = re.compile(r"[a-z0-9]+")
_ABSOLUTE_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")
_FOREIGN_CHARSET = re.compile(r";\s*charset\s*=\s*\"?(?!utf-8|us-ascii)", re.IGNORECASE)

# Parsers give up on deeper JSON: some at 64 levels, most by 1,000. One such payload must not make a
# whole document or batch unreadable.
_EMBEDDED_DEPTH_MAX = 60


class _Extra(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What `penstockextra` holds; msgspec writes bytes as base64."""

    headers: dict[str, bytes] = {}
    key: bytes | None = None


_read_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_array = msgspec.json.Decoder(list[msgspec.Raw]).decode
_read_text = msgspec.json.Decoder(str | None).decode
_read_scalar = msgspec.json.Decoder(str | bool | int | None).decode
_read_extra = msgspec.json.Decoder(_Extra).decode

_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


# --- writing ---------------------------------------------------------------------------------


def to_structured(
    event: Event,
    *,
    defaults: Event | None = None,
    sequence: int | None = None,
    recorded_at: datetime | None = None,
) -> bytes:
    """Return `event` as a JSON document of content type `application/cloudevents+json`.

    `defaults` states the id, source, type and content type of an event that does not. `sequence` is its
    offset in the log, `recorded_at` when it was appended. The document is on one line unless a JSON payload
    itself is not. Raises `InvalidEvent` when id, source or type is missing.
    """
    event = _resolve(event, defaults)
    if sequence is not None and sequence < 0:
        raise InvalidEvent("sequence: an offset is never negative")
    if recorded_at is not None:
        check_moment("recorded_at", recorded_at)
    stated = {
        "specversion": "1.0",
        "id": event.id,
        "source": event.source,
        "type": event.type,
        "subject": event.subject,
        "time": _utc(event.time),
        "datacontenttype": event.content_type,
        "expirytime": _utc(event.expires_at),
        "sequence": None if sequence is None else f"{sequence:020d}",
        "recordedtime": _utc(recorded_at),
    }
    document: dict[str, object] = {name: value for name, value in stated.items() if value is not None}
    extra = _Extra()
    if event.key is not None:
        if text := _as_text(event.key):
            document["partitionkey"] = text
        else:
            extra.key = event.key
    for name, value in event.headers.items():
        text = _as_text(value)
        if text is not None and name not in document and _can_be_attribute(name, text):
            document[name] = text
        else:
            extra.headers[name] = value
    if extra != _Extra():
        document["penstockextra"] = base64.b64encode(msgspec.json.encode(extra)).decode()
    if event.data:
        document |= _data_member(event.data, event.content_type)
    return msgspec.json.encode(document)


def to_structured_batch(
    events: Iterable[Event],
    *,
    defaults: Event | None = None,
    sequences: Iterable[int] | None = None,
    recorded_at: datetime | None = None,
) -> bytes:
    """Return `events` as a JSON array of content type `application/cloudevents-batch+json`.

    `sequences` are the events' offsets, one for each.
    """
    events = list(events)
    offsets: Iterable[int | None] = repeat(None, len(events)) if sequences is None else sequences
    documents = [
        to_structured(event, defaults=defaults, sequence=sequence, recorded_at=recorded_at)
        for event, sequence in zip(events, offsets, strict=True)
    ]
    return b"[%b]" % b",".join(documents)


def _resolve(event: Event, defaults: Event | None) -> Event:
    check_event(event)
    if defaults is not None:
        check_event(defaults)
        unstated = [name for name in (*_REQUIRED, "content_type") if getattr(event, name) is None]
        event = msgspec.structs.replace(event, **{name: getattr(defaults, name) for name in unstated})
    if missing := [name for name in _REQUIRED if getattr(event, name) is None]:
        raise InvalidEvent(f"a CloudEvent must state its {', '.join(missing)}")
    return event


def _can_be_attribute(name: str, text: str) -> bool:
    if name == "dataschema":
        return _ABSOLUTE_URI.fullmatch(text) is not None
    return name not in _RESERVED and _NAME_WRITTEN.fullmatch(name) is not None


def _as_text(value: bytes) -> str | None:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if is_plain_text(text) else None


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)


def _data_member(data: bytes, content_type: str | None) -> dict[str, object]:
    media = media_type(content_type or "")
    if is_json(media):
        if _embeds_exactly(data):
            return {"data": msgspec.Raw(data)}
    elif media.startswith("text/") and not _FOREIGN_CHARSET.search(content_type or ""):
        try:
            return {"data": data.decode()}
        except UnicodeDecodeError:
            pass  # Text of an encoding that its content type does not name: its bytes are all we know.
    return {"data_base64": base64.b64encode(data).decode()}


def _embeds_exactly(data: bytes) -> bool:
    """Say whether `data` is JSON that every reader can cut out of a document unchanged."""
    if data != data.strip(b" \t\r\n"):
        return False  # Whitespace around a value is the document's, and readers do not return it.
    try:
        level = [msgspec.json.decode(data)]
    except _UNREADABLE:
        return False
    for _ in range(_EMBEDDED_DEPTH_MAX):
        level = [child for node in level for child in _children(node)]
        if not level:
            return True
    return False


def _children(node: object) -> Iterable[object]:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


# --- reading ---------------------------------------------------------------------------------


def from_structured(document: bytes) -> Event:
    """Return the event in a JSON document of content type `application/cloudevents+json`.

    Extension attributes become headers: text as UTF-8, booleans and integers in CloudEvents' own text form.
    Times finer than a microsecond are rounded to it.
    """
    members = _members(document)
    data, encoded = members.pop("data", None), members.pop("data_base64", None)
    attributes = {name: text for name, raw in members.items() if (text := _attribute(name, raw)) is not None}
    if attributes.pop("specversion", None) != "1.0":
        raise InvalidEvent("specversion: must be '1.0'")
    if missing := [name for name in _REQUIRED if name not in attributes]:
        raise InvalidEvent(f"{missing[0]}: is required and missing")
    content_type = attributes.pop("datacontenttype", None)
    if data is not None and content_type is None:
        content_type = "application/json"
    key = attributes.pop("partitionkey", None)
    extra = _extra(attributes.pop("penstockextra", None))
    event = Event(
        id=attributes.pop("id"),
        source=attributes.pop("source"),
        type=attributes.pop("type"),
        subject=attributes.pop("subject", None),
        time=_moment("time", attributes.pop("time", None)),
        expires_at=_moment("expirytime", attributes.pop("expirytime", None)),
        content_type=content_type,
        key=key.encode() if extra.key is None and key is not None else extra.key,
        headers={name: text.encode() for name, text in attributes.items()} | extra.headers,
        data=_payload(data, encoded, content_type),
    )
    check_event(event)
    return event


def from_structured_batch(document: bytes) -> list[Event]:
    """Return the events in a JSON array of content type `application/cloudevents-batch+json`."""
    try:
        documents = _read_array(document)
    except _UNREADABLE:
        raise InvalidEvent("a batch of CloudEvents must be a JSON array") from None
    events = []
    for index, raw in enumerate(documents):
        try:
            events.append(from_structured(bytes(raw)))
        except InvalidEvent as error:
            raise InvalidEvent(f"event {index} of the batch: {error}") from None
    return events


def _members(document: bytes) -> dict[str, msgspec.Raw]:
    try:
        document.decode()  # msgspec does not look inside what it leaves raw.
        members = _read_object(document)
    except _UNREADABLE:
        raise InvalidEvent("a CloudEvent must be a JSON object in UTF-8") from None
    for name in members:
        if name != "data_base64" and not _NAME_READ.fullmatch(name):
            raise InvalidEvent(f"attribute name {name[:40]!r}: only a-z and 0-9 are allowed")
    return members


def _attribute(name: str, raw: msgspec.Raw) -> str | None:
    """Return an attribute in its text form; JSON's null means that it is absent."""
    try:
        value = _read_text(raw) if name in _CORE else _read_scalar(raw)
    except _UNREADABLE:
        kinds = "a string" if name in _CORE else "a string, a boolean or an integer"
        raise InvalidEvent(f"{name[:40]}: must be {kinds}") from None
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def _moment(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = msgspec.convert(text, datetime)
        check_moment(name, moment)
    except msgspec.ValidationError:
        raise InvalidEvent(f"{name}: is not a time as RFC 3339 writes it") from None
    return moment.astimezone(UTC)


def _extra(text: str | None) -> _Extra:
    if text is None:
        return _Extra()
    try:
        return _read_extra(base64.b64decode(text, validate=True))
    except _UNREADABLE:
        raise InvalidEvent("penstockextra: is not what Penstock writes there") from None


def _payload(data: msgspec.Raw | None, encoded: msgspec.Raw | None, content_type: str | None) -> bytes:
    if encoded is not None and (text := _attribute("data_base64", encoded)) is not None:
        if data is not None:
            raise InvalidEvent("data: stands beside data_base64, and only one of them may")
        try:
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise InvalidEvent("data_base64: is not base64") from None
    payload = b"" if data is None else bytes(data)
    if is_json(media_type(content_type or "")) or not payload.startswith(b'"'):
        # A JSON value under any content type stands for its own text, unless it is a string.
        return payload
    try:
        return msgspec.json.decode(payload, type=str).encode()
    except _UNREADABLE:
        raise InvalidEvent("data: is not a valid string") from None
