"""What a publisher says: the envelope `Event`, and the classes that `@event` declares.

What this promises:

* `@event(name)` returns its class untouched, with no attribute added, and registers it beside it. One
  name means one class; a class defined again at the same place, as by running a notebook cell twice
  or reloading a module, replaces the earlier one.
* An old event reaches the current class through every upcaster between, or raises `UpcasterMissing`;
  one written by a newer program raises `FutureVersion`. Neither is ever guessed at.
* `check_event` accepts exactly what the log can store and CloudEvents can say, and names the field
  of anything else.

Each field of `Event` has one type, the one that is stored, so that reading code needs no cases. The
convenience of text where bytes are stored is in `Event.of`, which encodes it as UTF-8.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Self, TypeVar

import msgspec

from penstock.codecs import Codec, codec_for, codec_named, forget_classes
from penstock.errors import (
    CodecError,
    DecodeError,
    EncodeError,
    FutureVersion,
    InvalidEvent,
    InvalidName,
    UpcasterMissing,
    UsageError,
)

T = TypeVar("T")
Upcaster = Callable[[dict[str, Any]], dict[str, Any]]
U = TypeVar("U", bound=Upcaster)

VERSION_HEADER = "dataversion"
"""The header that carries the version of an event's class; without it, the version is 1."""


# --- names and text --------------------------------------------------------------------------

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_INTERNAL_NAME = re.compile(f"_?{_NAME.pattern}")


def check_name(what: str, name: str, *, internal: bool = False) -> None:
    """Raise `InvalidName` unless `name` follows the naming rule; `internal` also allows a leading `_`."""
    given: object = name
    pattern = _INTERNAL_NAME if internal else _NAME
    if not isinstance(given, str) or not pattern.fullmatch(given) or ".." in given:
        raise InvalidName(what, name)


# What CloudEvents disallows in strings: controls, lone surrogates and Unicode's noncharacters.
_NONCHARACTERS = "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
_DISALLOWED = re.compile(f"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef{_NONCHARACTERS}]")


def is_plain_text(text: str) -> bool:
    """Say whether every character of `text` is one that CloudEvents allows in a string."""
    return _DISALLOWED.search(text) is None


# --- the envelope ----------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event as its publisher states it; a field that is `None` was not stated.

    `content_type` is then the topic's, and `id` is derived from the producer and its sequence. Times are
    aware and precise to the microsecond.
    """

    data: bytes = b""
    type: str | None = None
    key: bytes | None = None
    id: str | None = None
    source: str | None = None
    subject: str | None = None
    time: datetime | None = None
    expires_at: datetime | None = None
    content_type: str | None = None
    headers: Mapping[str, bytes] = {}

    @classmethod
    def of(
        cls,
        data: str | bytes = b"",
        *,
        type: str | None = None,
        key: str | bytes | None = None,
        id: str | None = None,
        source: str | None = None,
        subject: str | None = None,
        time: datetime | None = None,
        expires_at: datetime | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str | bytes] | None = None,
    ) -> Self:
        """Return an event whose data, key and header values may be given as text, stored as UTF-8."""
        return cls(
            data=utf8("data", data),
            type=type,
            key=None if key is None else utf8("key", key),
            id=id,
            source=source,
            subject=subject,
            time=time,
            expires_at=expires_at,
            content_type=content_type,
            headers={name: utf8(f"header {name!r}", value) for name, value in (headers or {}).items()},
        )

    def __repr__(self) -> str:
        # Events end up in logs; their payload and the values of their headers never do.
        stated = {name: getattr(self, name) for name in self.__struct_fields__}
        stated |= {"data": f"<{len(self.data)} bytes>", "headers": list(self.headers)}
        shown = [f"{name}={value!r}" for name, value in stated.items() if value not in (None, [])]
        return f"Event({', '.join(shown)})"


def utf8(what: str, value: str | bytes) -> bytes:
    """Return text as it is stored; `what` names it if it cannot be."""
    try:
        return value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError:
        raise InvalidEvent(f"{what}: the text holds a lone surrogate, which UTF-8 cannot express") from None


def check_event(event: Event) -> None:
    """Raise `InvalidEvent`, naming the field, unless `event` can be stored as it is."""
    given: Any = event  # The annotations are what is to be checked here.
    if not isinstance(given, Event):
        raise _wrong_type("event", given, Event)
    if not isinstance(given.data, bytes):
        raise _wrong_type("data", given.data, bytes)
    if given.key is not None and not isinstance(given.key, bytes):
        raise _wrong_type("key", given.key, bytes)
    for name in ("type", "id", "source", "subject", "content_type"):
        if (text := getattr(given, name)) is not None:
            _check_text(name, text)
    for name in ("time", "expires_at"):
        if (moment := getattr(given, name)) is not None:
            check_moment(name, moment)
    if not isinstance(given.headers, Mapping):
        raise _wrong_type("headers", given.headers, Mapping)
    for name, value in given.headers.items():
        _check_text("header name", name)
        if not isinstance(value, bytes):
            raise _wrong_type(f"header {name!r}", value, bytes)


def check_moment(what: str, moment: object) -> None:
    """Raise `InvalidEvent` unless `moment` is an aware datetime whose UTC form exists."""
    if not isinstance(moment, datetime):
        raise _wrong_type(what, moment, datetime)
    if moment.utcoffset() is None:
        raise InvalidEvent(f"{what}: a time zone is missing; datetime.now(UTC) has one")
    try:
        moment.astimezone(UTC)
    except OverflowError:
        raise InvalidEvent(f"{what}: in UTC it lies outside the years 1 to 9999") from None


def _check_text(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise _wrong_type(what, text, str)
    if not text:
        raise InvalidEvent(f"{what}: must not be empty")
    if not is_plain_text(text):
        raise InvalidEvent(f"{what}: holds a control character or another that CloudEvents disallows")


def _wrong_type(what: str, value: object, expected: type) -> InvalidEvent:
    advice = "; Event.of() encodes text" if expected is bytes and isinstance(value, str) else ""
    return InvalidEvent(f"{what}: expected {expected.__name__}, got {type(value).__name__}{advice}")


# --- event types -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EventType(Generic[T]):
    """A class whose values are events: its name, its current version, and how it becomes bytes."""

    name: str
    version: int
    cls: type[T]
    codec: Codec
    upcasters: Mapping[int, Upcaster] = field(default_factory=dict, repr=False, compare=False)

    @property
    def content_type(self) -> str:
        """The content type of what `encode` returns."""
        return self.codec.content_type

    @property
    def headers(self) -> dict[str, bytes]:
        """What each event of this type carries besides its own headers: the version, unless it is 1."""
        return {} if self.version == 1 else {VERSION_HEADER: b"%d" % self.version}

    def encode(self, value: T) -> bytes:
        """Return the bytes of `value`, which must be of exactly this class: a subclass has more to say."""
        if type(value) is not self.cls:
            raise EncodeError(f"{type(value).__qualname__} is not {self.cls.__qualname__}, event {self.name!r}")
        return self.codec.encode(value)

    def decode(self, data: bytes, version: int, content_type: str | None = None) -> T:
        """Return the value that `data` of that version holds, upcast to the current version.

        `content_type` is what the event says of itself, for a log that is older than its type's codec.
        """
        codec = self.codec
        if content_type is not None and content_type != self.content_type:
            codec = self._codec_for(content_type)
        if version == self.version:
            return codec.decode(data, self.cls)
        if version > self.version:
            raise FutureVersion(self.name, version, self.version)
        for step in range(version, self.version):
            if step not in self.upcasters:
                raise UpcasterMissing(self.name, step, self.version)
        fields = codec.decode_builtins(data)
        for step in range(version, self.version):
            fields = self._upcast(fields, step)
        return codec.convert(fields, self.cls)

    def way(self, version: int, content_type: str | None = None) -> Callable[[bytes], T]:
        """Return what decodes payloads of one version and content type as `decode` does; to be used for many."""
        codec, cls = self.codec, self.cls
        if content_type is not None and content_type != self.content_type:
            codec = self._codec_for(content_type)
        if version != self.version:
            return lambda data: self.decode(data, version, content_type)
        decode = codec.decode
        return lambda data: decode(data, cls)

    def _codec_for(self, content_type: str) -> Codec:
        if issubclass(self.cls, bytes):
            return self.codec  # Its values are bytes, whatever those are said to be.
        codec = codec_for(content_type)
        if codec is None:
            raise DecodeError(f"event {self.name!r}: no codec reads content type {content_type[:80]!r}")
        return codec

    def _upcast(self, fields: object, version: int) -> dict[str, Any]:
        upcaster = self.upcasters[version]
        whose = f"upcaster {_place(upcaster)} of {self.name!r} from version {version}"
        if not isinstance(fields, dict):
            raise DecodeError(f"{whose} needs an object, and the payload holds {type(fields).__name__}")
        try:
            risen = upcaster(fields)
        except Exception as error:
            raise DecodeError(f"{whose} raised {type(error).__name__}") from error
        _check_risen(whose, risen)
        return risen


def _check_risen(whose: str, risen: object) -> None:
    if not isinstance(risen, dict):
        raise DecodeError(f"{whose} returned {type(risen).__name__}, not a dict")


def version_of(headers: Mapping[str, bytes]) -> int:
    """Return the version that an event's headers state; raise `DecodeError` if it is not one."""
    stated = headers.get(VERSION_HEADER)
    if stated is None:
        return 1
    if not re.fullmatch(rb"[1-9][0-9]{0,8}", stated):
        raise DecodeError(f"header {VERSION_HEADER!r} is not a version number")
    return int(stated)


class Registry:
    """The event types of a program, by name and by class. Safe to use from any thread.

    The functions below the class belong to the one that programs share; tests may make their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, EventType[Any]] = {}
        self._in_use: dict[type, EventType[Any]] = {}
        self._upcasters: dict[str, dict[int, Upcaster]] = {}

    def event(self, name: str, *, version: int = 1, codec: str = "json") -> Callable[[type[T]], type[T]]:
        """Declare the class below to be the event `name`; it is returned as it is.

        For dataclasses, msgspec Structs, attrs classes and pydantic models, above their own decorator.
        Raise `version` when the fields change, and add an `@upcaster` from the version before.
        """
        check_name("event type", name)
        _check_version("version", version)
        chosen = codec_named(codec)

        def register(cls: type[T]) -> type[T]:
            with self._lock:
                self._add(EventType(name, version, cls, chosen, self._upcasters.setdefault(name, {})))
            return cls

        return register

    def upcaster(self, of: str | type, *, from_version: int) -> Callable[[U], U]:
        """Declare the function below to turn the fields of `from_version` into those of the next version.

        It is given a dictionary of builtins, as decoded, and returns one; it may change what it is given.
        """
        name = of if isinstance(of, str) else self.type_of(of).name
        check_name("event type", name)
        _check_version("from_version", from_version)

        def register(function: U) -> U:
            with self._lock:
                known = self._upcasters.setdefault(name, {})
                _check_same_place(f"{name!r} from version {from_version}", known.get(from_version), function)
                known[from_version] = function
            return function

        return register

    def type_of(self, cls: type[T]) -> EventType[T]:
        """Return the event type of exactly this class; raise `InvalidEvent` if it has none."""
        return self._in_use.get(cls) or self._check(self._find(cls))

    def type_named(self, name: str) -> EventType[Any] | None:
        """Return the event type of that name, or `None` if this program declares none."""
        found = self._by_name.get(name)
        return found if found is None or found.cls in self._in_use else self._check(found)

    def _add(self, new: EventType[Any]) -> None:
        old = self._by_name.get(new.name)
        _check_same_place(f"event {new.name!r}", old and old.cls, new.cls)
        for other in self._by_name.values():
            if other.cls is new.cls and other.name != new.name:
                raise UsageError(f"{_place(new.cls)} is already event {other.name!r}, not also {new.name!r}")
        self._by_name[new.name] = new
        if old is not None:
            # Nothing here may keep a replaced class alive, with all that its module once held.
            self._in_use.pop(old.cls, None)
            forget_classes()

    def _find(self, cls: type[T]) -> EventType[T]:
        declared = list(self._by_name.values())
        for found in declared:
            if found.cls is cls:
                return found
        for found in declared:
            if _place(found.cls) == _place(cls):
                raise InvalidEvent(
                    f"class {cls.__qualname__} is not the one registered as event {found.name!r}: either "
                    f"@event is below a decorator that makes a new class, and belongs above it; or this "
                    f"value is older than its class, which was defined again since"
                )
        raise InvalidEvent(f"class {cls.__qualname__} is not an event: decorate it with @penstock.event(...)")

    def _check(self, found: EventType[T]) -> EventType[T]:
        """Check a class when it is first asked for: only then have all its decorators been applied."""
        try:
            found.codec.check(found.cls)
        except CodecError as error:
            raise InvalidEvent(f"event {found.name!r}: {error}") from error
        with self._lock:
            if self._by_name.get(found.name) is found:
                self._in_use[found.cls] = found
        return found


def _check_version(what: str, version: object) -> None:
    if type(version) is not int or version < 1:
        raise UsageError(f"{what} must be an int from 1 on, not {version!r}")


def _check_same_place(what: str, old: object, new: object) -> None:
    if old is not None and _place(old) != _place(new):
        raise UsageError(f"{what} is registered twice, as {_place(old)} and as {_place(new)}")


def _place(thing: Any) -> str:
    return f"{thing.__module__}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


_shared = Registry()
event = _shared.event
upcaster = _shared.upcaster
event_type_of = _shared.type_of
event_type_named = _shared.type_named
