"""What people write for durations, sizes, times and headers, turned into values; anything else is a usage error."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import typer

from penstock.errors import UsageError
from penstock.settings import Setting

if TYPE_CHECKING:
    from penstock.offsets import Position

_SECONDS_PER = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_DURATION = re.compile(rf"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[{''.join(_SECONDS_PER)}])?")
_SIZE = Setting(default=1, doc="", unit="bytes", minimum=1, redact=None)


def duration(text: str) -> float:
    """Return seconds for `90`, `1.5`, `15m`, `12h`, `7d` or `2w`."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found["number"]) * _SECONDS_PER[found["unit"] or "s"] if found else math.inf
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{text!r} is no duration: write seconds, or 15m, 12h, 7d, 2w")
    return seconds


def size(text: str) -> int:
    """Return bytes for `1048576` or `8 MiB`."""
    try:
        return int(_SIZE.check(_SIZE.parse(text)))
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is no size: write bytes, or '8 MiB' (B, KiB, MiB, GiB)") from None


def moment(text: str) -> datetime:
    """Return the time that ISO 8601 writes so; it must say its zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: write it as 2026-01-31T12:00:00Z") from None
    if found.utcoffset() is None:
        raise typer.BadParameter(f"{text!r} has no time zone: add Z for UTC, or an offset such as +02:00")
    return found


class Spot(NamedTuple):
    """Where an event is, as somebody named it: by its offset alone, or by its whole position."""

    offset: int
    position: Position | None

    def partition(self, topic: str, given: int | None) -> int | None:
        """Return which partition of the topic is meant, if that is said here or by another option."""
        if self.position is None:
            return given
        if self.position.topic != topic or given not in {None, self.position.partition}:
            where = topic if given is None else f"{topic}/{given}"
            raise UsageError(f"{self.position} is not in {where}, which is named as well")
        return self.position.partition


def spot(text: str) -> Spot:
    """Return the place of an event for `17`, or for `orders/0@17` as it is shown everywhere."""
    from penstock.offsets import OFFSET_END, Position  # numpy comes with it, which most commands do without

    if re.fullmatch(r"[0-9]+", text) and int(text) < OFFSET_END:
        return Spot(int(text), None)
    try:
        position = Position.parse(text)
    except UsageError:
        raise typer.BadParameter(f"{text!r} is neither an offset nor a position such as 'orders/0@17'") from None
    return Spot(position.offset, position)


def offset(text: str) -> int:
    """Return an offset: a whole number that one can have."""
    from penstock.offsets import OFFSET_END  # the same

    # By its length first: Python refuses to read a number of thousands of digits.
    if not re.fullmatch(r"[0-9]{1,30}", text) or int(text) >= OFFSET_END:
        raise typer.BadParameter(f"{text!r} is no offset: it is a whole number, at most {OFFSET_END - 1}")
    return int(text)


def header(text: str) -> tuple[str, str]:
    """Return the name and the value of `name=value`."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is no header: write name=value")
    return name, value
