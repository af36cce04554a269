"""Effects: what a run of handlers has brought about, in a form that can be compared with another run's.

Three things are looked at: the state that the application itself shows, if it names a function for that; what was
published by handlers; and the dead letters. Ids, times and positions of what was published are left out: they are
others at every run. How often each event was handled is known, too, but is no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.testing.worlds.faults import Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

DIFFERENCES_MAX: Final = 10
SHOWN_MAX: Final = 120


class Place(msgspec.Struct, frozen=True, order=True):
    """An event, as one subscription has it."""

    subscription: str
    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"


class Tally(msgspec.Struct, frozen=True):
    """How often an event was handled, and by which handler."""

    place: Place
    handler: str
    count: int


class Effects(msgspec.Struct, frozen=True, kw_only=True):
    """What one run has brought about."""

    state: Any = None
    """What the application's own function returned, as plain values."""
    published: dict[str, int] = {}
    """By topic, type, key and a digest of the data: how many events."""
    dead: dict[str, int] = {}
    """By subscription, event and error: how many dead letters."""
    trouble: str = ""
    """Why the run did not come to an end."""
    handled: list[Tally] = []
    origins: dict[str, str] = {}
    """By position, where the events come from that were given."""
    faults: list[Fault] = []
    """What went wrong on the way."""

    def again(self, calm: Effects) -> list[Place]:
        """Return the events that were handled more often than in a calm run."""
        before = {tally.place: tally.count for tally in calm.handled}
        return [tally.place for tally in self.handled if tally.count > before.get(tally.place, 0)]


class Difference(msgspec.Struct, frozen=True):
    """One thing that two runs do not agree on."""

    where: str
    calm: str
    chaos: str

    def __str__(self) -> str:
        return f"{self.where}: {self.calm} without faults, {self.chaos} with them"


def differences(calm: Effects, chaos: Effects) -> list[Difference]:
    """Return what differs, the first few of it."""
    found: list[Difference] = []
    if chaos.trouble:
        found.append(Difference("the run", "ended", chaos.trouble))
    pairs = (
        ("state", calm.state, chaos.state),
        ("published", calm.published, chaos.published),
        ("dead letters", calm.dead, chaos.dead),
    )
    for name, one, other in pairs if not chaos.trouble else ():
        for each in _differing(name, one, other):
            if len(found) == DIFFERENCES_MAX:
                return found
            found.append(each)
    return found


def _differing(where: str, calm: Any, chaos: Any) -> Iterator[Difference]:
    if isinstance(calm, dict) and isinstance(chaos, dict):
        for key in sorted({*calm, *chaos}, key=str):
            yield from _differing(f"{where} {key}", calm.get(key), chaos.get(key))
    elif isinstance(calm, list) and isinstance(chaos, list) and len(calm) == len(chaos):
        for index, (one, other) in enumerate(zip(calm, chaos, strict=True)):
            yield from _differing(f"{where} {index}", one, other)
    elif calm != chaos:
        yield Difference(where, _shown(calm), _shown(chaos))


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def plain(value: Any) -> Any:
    """Return a value of an application as plain ones: lists, dictionaries with texts as keys, numbers and texts.

    Sets are sorted; what nobody knows how to take apart is compared by its `repr`.
    """
    try:
        simple = msgspec.to_builtins(value, enc_hook=repr, str_keys=True, order="deterministic")
        # Through JSON, so that what came from another process is equal to what did not.
        return msgspec.json.decode(msgspec.json.encode(simple, order="deterministic"))
    except (TypeError, ValueError, NotImplementedError):
        return repr(value)
