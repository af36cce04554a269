"""The options of `format("penstock")`: what may be given, what it means, and what is wrong with it.

An option that does not exist is an error with the nearest name, since Spark itself passes anything on: a misspelt
`startingOffset` would otherwise read everything in silence. Names do not mind case, as Spark's own do not.

A list is written `orders,payments`, or as JSON if an entry has a comma in it: `["a,b", "c"]`. A time is ISO 8601
with a zone: `2026-01-31T12:00:00Z`. Positions are `earliest`, `latest`, a time (the first event appended then or
later), or JSON by topic and partition, each with an offset or one of the three::

    {"orders": {"0": 1200, "1": "earliest"}, "payments": "latest"}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypeVar

from penstock.clock import datetime_to_us
from penstock.errors import InvalidName, UsageError, did_you_mean
from penstock.events import check_name
from penstock.settings import Setting

T = TypeVar("T")

Edge = Literal["earliest", "latest"]


@dataclass(frozen=True)
class Moment:
    """A time as a position: the first event that was appended then or later."""

    time_us: int


Mark = Edge | Moment | int
"""One position in one partition."""

Marks = Mark | Mapping[str, Mark | Mapping[int, Mark]]
"""A position in every partition: the same for all, or by topic, or by topic and partition."""

_SIZE: Final = Setting(default=1, doc="", unit="bytes", minimum=1, redact=None)
_IGNORED: Final = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""What Spark's own writers and readers take from the same options."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What is to be read."""

    url: str
    topics: tuple[str, ...]
    """Names, or patterns with `*`, `?` and `[…]`."""
    starting: Marks = "earliest"
    ending: Marks = "latest"
    max_rows: int | None = None
    max_bytes: int | None = None
    min_partitions: int | None = None
    fail_on_data_loss: bool = True
    subscription: str | None = None
    types: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    from_us: int | None = None
    to_us: int | None = None
    archive: str | None = None
    """The directory of a lake, where what is below the beginning of a log is read."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Where to write."""

    url: str
    topic: str
    sink: str | None = None
    adopt: bool = False


# --- one value --------------------------------------------------------------------------------


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text.strip()


def _list(text: str) -> tuple[str, ...]:
    if text.lstrip().startswith("["):
        values = json.loads(text)
        if not all(isinstance(value, str) for value in values):
            raise ValueError
    else:
        values = [value.strip() for value in text.split(",")]
    if not values or not all(values):
        raise ValueError
    return tuple(dict.fromkeys(values))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _bytes(text: str) -> int:
    return int(_SIZE.check(_SIZE.parse(text)))


def _truth(text: str) -> bool:
    return {"true": True, "false": False}[text.strip().lower()]


def _time(text: str) -> int:
    moment = datetime.fromisoformat(text.strip())
    if moment.utcoffset() is None:
        raise ValueError
    return datetime_to_us(moment)


def _name(text: str) -> str:
    check_name("sink or subscription", text.strip())
    return text.strip()


def _marks(text: str) -> Marks:
    if not text.lstrip().startswith("{"):
        return _mark(text.strip())
    return {topic: _topic_marks(value) for topic, value in json.loads(text).items()}


def _topic_marks(value: Any) -> Mark | Mapping[int, Mark]:
    if not isinstance(value, dict):
        return _mark(value)
    # What a query's checkpoint says of a topic can be pasted here; it names the log as well.
    return {int(partition): _mark(mark) for partition, mark in value.items() if partition not in {"log", "from"}}


def _mark(value: Any) -> Mark:
    match value:
        case "earliest" | "latest":
            return value  # type: ignore[no-any-return] # narrowed by the pattern, which mypy does not see through Any
        case str():
            return Moment(_time(value))
        case int() if value >= 0 and not isinstance(value, bool):
            return value
    raise ValueError


_EXPECTED: Final[Mapping[Callable[[str], Any], str]] = {
    _text: "some text",
    _list: "a list such as 'a,b', or JSON: '[\"a\", \"b\"]'",
    _positive: "a whole number, 1 or more",
    _bytes: "bytes, or a size such as '64 MiB'",
    _truth: "true or false",
    _time: "a time with its zone, such as 2026-01-31T12:00:00Z",
    _name: "a name",
    _marks: "'earliest', 'latest', a time with its zone such as 2026-01-31T12:00:00Z, or JSON such as "
    '{"orders": {"0": 1200, "1": "earliest"}}',
}


# --- all of them ------------------------------------------------------------------------------

_READ: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "url": ("url", _text),
    "topic": ("topics", _list),
    "startingOffsets": ("starting", _marks),
    "endingOffsets": ("ending", _marks),
    "maxRowsPerTrigger": ("max_rows", _positive),
    "maxBytesPerTrigger": ("max_bytes", _bytes),
    "minPartitions": ("min_partitions", _positive),
    "failOnDataLoss": ("fail_on_data_loss", _truth),
    "subscription": ("subscription", _name),
    "types": ("types", _list),
    "keys": ("keys", _list),
    "fromTime": ("from_us", _time),
    "toTime": ("to_us", _time),
    "archive": ("archive", _text),
}
_WRITE: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "url": ("url", _text),
    "topic": ("topic", _name),
    "sinkName": ("sink", _name),
    "adoptSink": ("adopt", _truth),
}


def read_options(given: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Return what these options say, or raise `UsageError` for the first that is wrong."""
    values = _parse(given, _READ, "read")
    if streaming and "ending" in values:
        raise UsageError("option 'endingOffsets' is for batch reads: a stream has no end; stop it, or use availableNow")
    for name in ("subscription", "maxRowsPerTrigger", "maxBytesPerTrigger"):
        if not streaming and _READ[name][0] in values:
            raise UsageError(f"option {name!r} is for streams: a batch read has no progress to keep or to divide")
    return ReadOptions(**values)


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Return what these options say, or raise `UsageError` for the first that is wrong."""
    values = _parse(given, _WRITE, "write")
    if streaming and "sink" not in values:
        raise UsageError(
            "option 'sinkName' is missing: a stream is delivered once because the store remembers, by this name, which "
            "batches it has; choose one that stays the same over restarts"
        )
    if not streaming and (wrong := [name for name in ("sinkName", "adoptSink") if _WRITE[name][0] in values]):
        raise UsageError(f"option {wrong[0]!r} is for streams: a batch write is one job, delivered whole or not at all")
    return WriteOptions(**values)


def _parse(
    given: Mapping[str, str], known: Mapping[str, tuple[str, Callable[[str], Any]]], doing: str
) -> dict[str, Any]:
    by_lower = {name.lower(): name for name in known}
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key.lower() in _IGNORED:
            continue
        if key.lower() == "path":
            raise UsageError(
                "a topic is no path: name it with option('topic', …), and call load() or save() without one"
            )
        name = by_lower.get(key.lower())
        if name is None:
            # Spark hands over lower case, which would make every name look far away.
            near = did_you_mean(key.lower(), by_lower)
            for lower, proper in by_lower.items():
                near = near.replace(repr(lower), repr(proper))
            raise UsageError(f"there is no option {key!r} to {doing}{near}")
        field, parse = known[name]
        values[field] = _value(name, text, parse)
    for required in ("url", "topic"):
        if known[required][0] not in values:
            raise UsageError(f"option {required!r} is missing: .option({required!r}, {_EXAMPLE[required]!r})")
    return values


_EXAMPLE: Final = {"url": "file:/var/lib/events", "topic": "orders"}


def _value(name: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except InvalidName as error:
        raise UsageError(f"option {name!r}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        shown = "…" if name == "url" else repr(text)
        raise UsageError(f"option {name!r} = {shown} is not allowed: give {_EXPECTED[parse]}") from None
