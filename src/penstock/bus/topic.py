"""Topic: the name of a stream of events, with the classes that may be in it and the key that orders them.

A topic is declared in code and created when a bus opens. Declaring does no I/O, and the same declaration may
serve any number of buses. It is the one place where values become events and events become values, so that
publishers, subscribers and Spark agree about both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, get_args

import msgspec

from penstock.batch import Batch, Kind, StoredEvent
from penstock.clock import seconds, us_to_datetime
from penstock.columns import check_text
from penstock.errors import DecodeError, InvalidEvent, UsageError, did_you_mean
from penstock.events import (
    VERSION_HEADER,
    Event,
    EventType,
    check_event,
    check_name,
    event_type_of,
    utf8,
    version_of,
)
from penstock.rows import Compression, Durability, Retention, TopicSettings

T = TypeVar("T")

PARTITIONS_MAX = 1024
WAYS_MAX = 64
"""So many ways to decode are kept at a time."""
RAW_CONTENT_TYPE = "application/octet-stream"

Key = str | bytes | None


class EventFields(TypedDict, total=False):
    """What a publisher may set for one event, besides its value."""

    key: Key
    """Instead of the topic's key."""
    headers: Mapping[str, str | bytes]
    """Added to those that the event has."""
    id: str
    """Instead of one derived from producer and sequence; nothing is deduplicated by it."""
    source: str
    subject: str
    time: datetime
    """When it happened; aware. The log keeps the time of appending by itself."""
    ttl: float | timedelta
    """Seconds (or a `timedelta`) after which it is not worth delivering, instead of the topic's."""


class Form(NamedTuple):
    """What all events of one class have in common."""

    encode: Callable[[Any], bytes]
    type: str | None
    content_type: str | None
    headers: dict[str, bytes]

    def to_event(self, data: bytes, key: bytes | None = None) -> Event:
        """Return an event of this form."""
        return Event(
            data=data,
            type=self.type,
            key=key,
            content_type=self.content_type,
            headers=dict(self.headers) if self.headers else {},
        )


class Topic(Generic[T]):
    """A stream of events of one class, of several, or of `bytes`.

    For several classes, name them for the type checker too: `Topic[Placed | Paid]("orders", (Placed, Paid))`.

    * `key`: which order an event belongs to; events with equal keys are delivered in their order. Without
      one, order is kept per partition.
    * `partitions`: how many parts of it can be read independently. Fixed when the topic is created.
    * `ttl`: seconds (or a `timedelta`) after which an event is not worth delivering; None for ever.
    * `source`: the CloudEvents source of its events; `penstock:<name>` unless given.
    * `durability`: `sync`, an acknowledged event is on the medium; or `os`, it is with the operating system, and a
      power cut may lose the last ones. Fixed when the topic is created.
    * `compression`: `zstd` makes stores that have files compress what is published from then on.
    * `retention`: how much of it is kept, as a `Retention`; None keeps everything.
    """

    def __init__(
        self,
        name: str,
        events: type[T] | tuple[type[T], ...],
        *,
        key: Callable[[T], Key] | None = None,
        partitions: int = 1,
        ttl: float | timedelta | None = None,
        source: str = "",
        durability: Durability = "sync",
        compression: Compression = "none",
        retention: Retention | None = None,
    ) -> None:
        """Declare a topic; nothing is created before a bus opens."""
        check_name("topic", name)
        if type(partitions) is not int or not 1 <= partitions <= PARTITIONS_MAX:
            raise UsageError(f"topic {name!r}: partitions is {partitions!r}, it must be 1 to {PARTITIONS_MAX}")
        if key is not None and not callable(key):
            raise UsageError(f"topic {name!r}: key is {key!r}; it must be a function of the event")
        self.name = name
        self.key = key
        self.ttl_seconds = None if ttl is None else seconds(ttl, f"ttl of topic {name!r}")
        classes = _classes(name, events)
        self.types: dict[type, EventType[Any]] = {}
        if classes != (bytes,):
            self.types = {cls: event_type_of(cls) for cls in classes}
        self._by_name = {event_type.name: event_type for event_type in self.types.values()}
        self._ways: dict[Kind, Callable[[bytes], T]] = {}
        """What decodes events of each kind that was met."""
        content_types = {event_type.content_type for event_type in self.types.values()}
        self.settings = TopicSettings(
            partitions=partitions,
            content_type=content_types.pop() if len(content_types) == 1 else RAW_CONTENT_TYPE,
            source=source,
            durability=_one_of(Durability, durability, f"topic {name!r}: durability"),
            compression=_one_of(Compression, compression, f"topic {name!r}: compression"),
            retention=retention or Retention(),
        )
        self._forms = {
            event_type.cls: Form(event_type.encode, event_type.name, self._content_type(event_type), event_type.headers)
            for event_type in self.types.values()
        } or {bytes: Form(bytes, None, None, {})}

    def __repr__(self) -> str:
        events = ", ".join(sorted(self._by_name)) or "bytes"
        return f"<Topic {self.name!r} of {events}, {self.settings.partitions} partitions>"

    # --- values to events --------------------------------------------------------------------

    @property
    def forms(self) -> Iterable[Form]:
        """The form of each class."""
        return self._forms.values()

    def to_event(self, value: T | Event, now_us: int, fields: EventFields | None = None) -> Event:
        """Return a value as an event; `fields` are what the publisher sets for this one."""
        if isinstance(value, Event):
            event = value
        else:
            form, data, key = self.row(value)
            event = form.to_event(data, key)
            if not fields and self.ttl_seconds is None and _is_sound(event):
                return event
        changes = _checked(fields or {})
        ttl = changes.pop("ttl", None)
        if ttl is None and event.expires_at is None:
            ttl = self.ttl_seconds
        if ttl is not None:
            changes["expires_at"] = _later(now_us, seconds(ttl, "ttl"))
        if "key" in changes:
            changes["key"] = utf8("key", changes["key"])
        if "headers" in changes:
            given = {name: utf8(f"header {name!r}", text) for name, text in changes["headers"].items()}
            changes["headers"] = {**event.headers, **given}
        if changes:
            event = msgspec.structs.replace(event, **changes)
        check_event(event)
        self._check_types([event.type])
        if isinstance(value, Event) and event.headers is value.headers:
            # They may be any mapping, and their owner may change them before they are columns.
            event = msgspec.structs.replace(event, headers=dict(event.headers))
        return event

    def row(self, value: T) -> tuple[Form, bytes, bytes | None]:
        """Return what an event is made of: its form, its bytes and its key, as codec and key function gave them."""
        form = self._forms.get(type(value))
        if form is None:
            raise self._wrong_class(type(value))
        key = None if self.key is None else self.key(value)
        return form, form.encode(value), utf8("key", key) if isinstance(key, str) else key

    def to_batch(self, values: Sequence[T | Event], now_us: int, keys: Sequence[Key] | None = None) -> Batch:
        """Return many values as one batch, built column by column; `keys` instead of the topic's key."""
        classes = set(map(type, values))
        if Event in classes:
            if keys is not None:
                raise UsageError("`keys` goes with plain values; an Event carries its own key")
            return Batch.from_events(self.to_event(value, now_us) for value in values)
        self._check_classes(classes)
        if keys is None and self.key is not None:
            keys = [self.key(value) for value in values]  # type: ignore[arg-type] # no Event is among them
        columns: dict[str, Any] = {"data": values, "key": keys}
        if self.types:
            kinds = [self.types[type(value)] for value in values]
            columns["data"] = [kind.encode(value) for kind, value in zip(kinds, values, strict=True)]
            # One class in the batch is the rule, and then a column is one value repeated.
            only = kinds[0] if len(classes) == 1 else None
            columns["type"] = only.name if only else [kind.name for kind in kinds]
            columns["content_type"] = self._content_type(only) if only else [self._content_type(kind) for kind in kinds]
            if any(self.types[cls].version > 1 for cls in classes):
                columns["headers"] = [kind.headers for kind in kinds]
        if self.ttl_seconds is not None:
            columns["expires_at"] = [_later(now_us, self.ttl_seconds)] * len(values)
        return Batch.build(**columns)

    def _content_type(self, event_type: EventType[Any]) -> str | None:
        """Return what to store with an event: nothing where the topic says it for all."""
        return None if event_type.content_type == self.settings.content_type else event_type.content_type

    def _check_classes(self, classes: Iterable[type]) -> None:
        for cls in classes:
            if cls not in self._forms:
                raise self._wrong_class(cls)

    def _wrong_class(self, cls: type) -> InvalidEvent:
        wanted = ", ".join(known.__name__ for known in self._forms)
        return InvalidEvent(f"topic {self.name!r} takes {wanted}, not {cls.__name__}")

    def check_batch(self, batch: Batch) -> None:
        """Refuse event types that are not declared here, and texts that no event may have."""
        check_text(batch.columns)
        self._check_types(batch.columns.column("type").unique().to_pylist() if batch.has("type") else [None])

    def _check_types(self, names: Iterable[str | None]) -> None:
        for name in names if self._by_name else ():
            if name not in self._by_name:
                near = did_you_mean(name or "", self._by_name)
                raise InvalidEvent(f"topic {self.name!r} declares no event type {name!r}{near}")

    # --- events to values --------------------------------------------------------------------

    def decode(self, event: Event | StoredEvent) -> T:
        """Return the value of an event of this topic, brought up to the present version of its class."""
        if not self.types:
            return event.data  # type: ignore[return-value] # a topic without classes is a Topic[bytes]
        if isinstance(event, StoredEvent):
            kind, data = event.alike
            if kind is not None:
                way = self._ways.get(kind)
                return self._found_way(kind)(data) if way is None else way(data)
        data, type_name, headers, content_type = (
            (event.data, event.type, event.headers, event.content_type) if isinstance(event, Event) else event.payload
        )
        version = version_of(headers) if headers else 1
        value: T = self._event_type(type_name).decode(data, version, content_type or self.settings.content_type)
        return value

    def _event_type(self, name: str | None) -> EventType[Any]:
        event_type = self._by_name.get(name or "")
        if event_type is None:
            near = did_you_mean(name or "", self._by_name)
            raise DecodeError(f"topic {self.name!r} declares no event type {name!r}{near}")
        return event_type

    def _found_way(self, kind: Kind) -> Callable[[bytes], T]:
        """Return what decodes all events of a kind."""
        event_type = self._event_type(kind.type)
        version = 1 if kind.version is None else version_of({VERSION_HEADER: kind.version})
        if len(self._ways) >= WAYS_MAX:
            self._ways.clear()
        way = self._ways[kind] = event_type.way(version, kind.content_type or self.settings.content_type)
        return way


def _classes(topic: str, events: object) -> tuple[type, ...]:
    """Return the classes that a topic was declared with."""
    classes = events if isinstance(events, tuple) else (events,)
    if not classes:
        raise UsageError(f"topic {topic!r}: name the classes of its events, or `bytes`")
    for each in classes:
        if not isinstance(each, type):
            raise UsageError(f"topic {topic!r}: {each!r} is not a class; of several classes it takes a tuple, (A, B)")
    return classes


def _checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that were given, None meaning not given; an unknown name is an error."""
    for name in fields:
        if name not in EventFields.__annotations__:
            raise UsageError(f"an event has no field {name!r}{did_you_mean(name, EventFields.__annotations__)}")
    return {name: value for name, value in fields.items() if value is not None}


def _is_sound(encoded: Event) -> bool:
    """Say quickly that `check_event` would find nothing: only what a codec or a key function returned is in doubt."""
    key = encoded.key
    return type(encoded.data) is bytes and (key is None or type(key) is bytes) and encoded.content_type is None


def _one_of(allowed: Any, value: T, what: str) -> T:
    if value not in get_args(allowed):
        raise UsageError(f"{what} is {value!r}, it must be one of {', '.join(map(repr, get_args(allowed)))}")
    return value


def _later(now_us: int, delay_seconds: float) -> datetime:
    return us_to_datetime(now_us + round(delay_seconds * 1e6))
