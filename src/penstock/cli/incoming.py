"""Where `penstock publish` gets events from: arguments, a file, or lines as they arrive."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from penstock.cli.read import PARTITION_ATTRIBUTE, POSITION_ATTRIBUTES, TOPIC_ATTRIBUTE
from penstock.errors import InvalidEvent, TooLarge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.events import Event
    from penstock.settings import Limits

READ_BYTES = 1 << 20
ARRAY_BYTES_MAX = 64 << 20
"""A JSON array is read as a whole; more events than fit come one a line."""


_UNREADABLE = (ValueError, RecursionError)
"""What a parser of JSON raises; an error of msgspec is a `ValueError`, too."""


class Envelope(NamedTuple):
    """What the options say of every event."""

    key: str | None
    type: str | None
    subject: str | None
    content_type: str | None
    headers: dict[str, str]


class Item(NamedTuple):
    """An event to publish, and where it stood: `line 17`, or `event 3` of an array."""

    where: str
    event: Event


def from_arguments(data: list[str], file: Path | None, envelope: Envelope, limits: Limits) -> Iterator[Item]:
    """Yield an event for each argument, or one of all the bytes of a file."""
    if file is None:
        for number, text in enumerate(data, 1):
            yield Item(f"argument {number}", event_of(os.fsencode(text), envelope))
        return
    with opened(file) as stream:
        content = stream.read(limits.event_bytes_max + 1)
    if len(content) > limits.event_bytes_max:
        raise TooLarge(
            str(file), len(content), limits.event_bytes_max, "it is at least so large (limits.event_bytes_max)"
        )
    yield Item(str(file), event_of(content, envelope))


def event_of(data: bytes, envelope: Envelope) -> Event:
    """Return the event of some data with what the options say."""
    from penstock.events import Event

    return Event.of(
        data,
        type=envelope.type,
        key=envelope.key,
        subject=envelope.subject,
        content_type=envelope.content_type,
        headers=envelope.headers,
    )


def from_json(lines: Lines, envelope: Envelope) -> Iterator[Item]:
    """Yield an event for each line of JSON, its bytes as they stand."""
    import msgspec

    for number, line in lines:
        try:
            msgspec.json.decode(line)
        except _UNREADABLE:
            raise InvalidEvent(f"line {number} is not JSON") from None
        yield Item(f"line {number}", event_of(line, envelope))


def from_cloudevents(lines: Lines) -> Iterator[Item]:
    """Yield the CloudEvents that stand one a line, or all in one array."""
    import msgspec

    for number, line in lines:
        if number != lines.first or not line.startswith(b"["):
            yield cloudevent(f"line {number}", line)
            continue
        try:
            array = msgspec.json.decode(lines.everything(line), type=list[msgspec.Raw])
        except _UNREADABLE:
            raise InvalidEvent("what begins as an array is not one") from None
        for index, document in enumerate(array):
            yield cloudevent(f"event {index} of the array", bytes(document))
        return


def cloudevent(where: str, document: bytes) -> Item:
    """Return the event of one CloudEvent in JSON; what it says of its position is left out."""
    from penstock import cloudevents

    try:
        return Item(where, cloudevents.from_structured(_without_position(document)))
    except InvalidEvent as error:
        raise InvalidEvent(f"{where}: {error}") from None


def _without_position(document: bytes) -> bytes:
    """Take out where an event stood that `penstock read --json` has printed: it gets a new position now."""
    import msgspec

    if TOPIC_ATTRIBUTE.encode() not in document and b'"gap"' not in document:
        return document
    try:
        members = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    except _UNREADABLE:
        return document  # whoever parses it says what is wrong
    if members.keys() == {"gap"}:
        raise InvalidEvent("this is a gap that a log has declared, and no event")
    if not {TOPIC_ATTRIBUTE, PARTITION_ATTRIBUTE} <= members.keys():
        return document
    return msgspec.json.encode({name: raw for name, raw in members.items() if name not in POSITION_ATTRIBUTES})


@contextmanager
def opened(file: Path | None) -> Iterator[BinaryIO]:
    """Open a file, or stdin for none and for `-`."""
    if file is None or str(file) == "-":
        yield sys.stdin.buffer
    else:
        with file.open("rb") as stream:
            yield stream


class Lines:
    """The lines of a stream as they arrive, with their numbers; empty ones are left out.

    Between two of them `arrived` tells whether the next one is here already.
    """

    def __init__(self, stream: BinaryIO, limits: Limits, update: Callable[[int, int | None], None]) -> None:
        self._read: Callable[[int], bytes] = getattr(stream, "read1", stream.read)
        # Base64 and escapes make a line longer than its event, but never that much.
        self._line_bytes_max = 8 * limits.event_bytes_max
        self._update = update
        self._total = _size(stream)
        self._bytes = 0
        self._rest = b""
        self._number = 0
        self._waiting: list[bytes] = []
        self._is_whole = False
        self.first = 0

    def arrived(self) -> bool:
        """Say whether another line is here already, so that nobody has to wait for it."""
        return self._is_whole or bool(self._waiting)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while self._waiting or self._fill():
            self._number += 1
            line = self._waiting.pop().strip()
            if line:
                self.first = self.first or self._number
                yield self._number, line

    def _fill(self) -> bool:
        """Wait for at least one more line; False at the end."""
        while data := self._read(READ_BYTES):
            self._bytes += len(data)
            self._update(self._bytes, self._total)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._waiting = lines[::-1]
            if lines:
                return True
            if len(self._rest) > self._line_bytes_max:
                raise InvalidEvent(f"line {self._number + 1} is longer than {self._line_bytes_max:,} bytes")
        self._waiting, self._rest = [self._rest] if self._rest else [], b""
        return bool(self._waiting)

    def everything(self, line: bytes) -> bytes:
        """Return the line and all that follows."""
        document = b"\n".join([line, *self._waiting[::-1], self._rest])
        self._waiting, self._rest, self._is_whole = [], b"", True
        while len(document) <= ARRAY_BYTES_MAX and (data := self._read(READ_BYTES)):
            document += data
        if len(document) > ARRAY_BYTES_MAX:
            raise TooLarge("the array", len(document), ARRAY_BYTES_MAX, "write one event a line")
        return document


def _size(stream: BinaryIO) -> int | None:
    """Return the length of a file; None for a pipe or a terminal."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
