"""Policy: what a user may choose about a subscription, and change while it runs.

It is stored with the subscription as a plain JSON object, of which what is not said has its default; so a later version
can add to it. Every field says its unit. Wrong values are refused with a `UsageError` that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal, get_args

from penstock.errors import UsageError, did_you_mean

Exhausted = Literal["dead", "halt", "discard"]

HEARTBEATS: Final = {"high_priority": 0.1, "normal": 0.5, "low_priority": 1.0, "debug": 0.05}
"""Profiles of how often a subscription looks by itself for what no notification told, in seconds."""

SHORT_DELAY_SECONDS: Final = 5.0
"""A retry that comes later than this is parked, so that it does not hold the cursor back."""

TOGETHER_TIMES: Final = 2
"""Several consumers of a process, among whom its slots are divided, have so many times the window of one."""

_SECONDS_MAX: Final = 10 * 365 * 24 * 3600.0
_JITTER_MIX: Final = 0x9E3779B97F4A7C15
_BITS: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy of a subscription."""

    max_retries: int = 3
    """How often a failed event is tried again; 0 for never."""
    backoff_seconds: float = 1.0
    """Before the first retry; doubled for each further one."""
    backoff_seconds_max: float = 60.0
    jitter: float = 0.1
    """Each delay is shortened by up to this share, so that events that failed together do not come back together."""
    exhausted: Exhausted = "dead"
    """After the last retry: `dead` keeps it as a dead letter, `halt` stops the shard, `discard` counts and drops it."""
    timeout_seconds: float | None = None
    """A handler's own time, from its start; past it the event counts as failed. None for any time."""
    heartbeat_seconds: float | None = 0.5
    """How often to look for what no notification told; None for never: notifications alone."""
    window_events: int = 10_000
    """How many events may be in memory, read and not settled."""
    window_bytes: int = 16 << 20
    read_events: int = 5_000
    """How many events one read asks for, at most; of its own, where an owner of few slots reads others' events, too."""
    read_bytes: int = 1 << 20
    rate_per_second: float | None = None
    """How many events are handed over in a second, at most; None for any number."""
    checkpoint_events: int = 1
    """Progress is written when so many events were settled since the last time …"""
    checkpoint_seconds: float = 0.0
    """… or so long after the first of them. With 1 and 0 every settlement is written at once, in groups."""
    parked_max: int = 100_000
    """So many events may wait aside. Beyond it a blocked lane blocks the window, and health names it."""
    paused: bool = False
    resumes: int = 0
    """How often it was resumed: each one gives what had halted it a new set of attempts."""

    def __post_init__(self) -> None:
        for name, low, high in _BOUNDS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            number = isinstance(value, int if name in _WHOLE else int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise UsageError(f"{name} of a subscription's policy is {value!r}; it is {_described(name, low, high)}")
        if self.exhausted not in get_args(Exhausted):
            known = did_you_mean(str(self.exhausted), get_args(Exhausted))
            raise UsageError(f"exhausted of a subscription's policy cannot be {self.exhausted!r}{known}")
        if not isinstance(self.paused, bool):
            raise UsageError(f"paused is true or false, not {self.paused!r}")
        if self.backoff_seconds_max < self.backoff_seconds:
            least, most = self.backoff_seconds, self.backoff_seconds_max
            raise UsageError(f"backoff_seconds_max, {most:g}, is less than backoff_seconds, {least:g}")

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Policy:
        """Read what is stored; what this version does not know is left alone, for one that does."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in known})

    def stored(self) -> dict[str, Any]:
        """Return what differs from the defaults, as plain JSON."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value != getattr(_DEFAULT, name)}

    def changed(self, changes: Mapping[str, Any]) -> Policy:
        """Return the policy with some fields changed; an unknown name is an error that names the nearest."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise UsageError(f"a policy has no field {name!r}{did_you_mean(name, known)}")
        return replace(self, **changes)

    @property
    def together(self) -> Policy:
        """The same for several consumers of a process: they have a larger window, and read as much more at once.

        What a read or a hand costs is nearly the same for many events as for few, and a hand has but a part of a read.
        """
        larger = {name: getattr(self, name) * TOGETHER_TIMES for name in _OF_WINDOW}
        limits = {name: high for name, _, high in _BOUNDS}
        return replace(self, **{name: min(value, int(limits[name])) for name, value in larger.items()})

    def verdict(
        self, attempts: int, offset: int, *, delay: float | None, retry: bool, counted: bool = True
    ) -> float | Exhausted:
        """Return after how many seconds an event is tried again that failed so many times, or what is done instead."""
        if not retry:
            return "dead"
        if counted and attempts > self.max_retries:
            return self.exhausted
        return self.backoff(max(attempts, 1), offset) if delay is None else min(max(float(delay), 0.0), _SECONDS_MAX)

    def backoff(self, attempts: int, salt: int) -> float:
        """Return how long to wait after so many failed attempts; `salt` makes the jitter differ between events."""
        # The power is bounded, too: of a thousand attempts no float could hold it.
        longest: float = min(self.backoff_seconds * 2.0 ** min(attempts - 1, 60), self.backoff_seconds_max)
        mixed = ((salt * 31 + attempts) * _JITTER_MIX & _BITS) >> 11
        return longest * (1.0 - self.jitter * mixed / (1 << 53))


_BOUNDS: Final = (
    ("max_retries", 0, 1_000_000),
    ("backoff_seconds", 0.0, _SECONDS_MAX),
    ("backoff_seconds_max", 0.0, _SECONDS_MAX),
    ("jitter", 0.0, 1.0),
    ("timeout_seconds", 0.001, _SECONDS_MAX),
    ("heartbeat_seconds", 0.01, 3600.0),
    ("window_events", 1, 1 << 19),
    ("window_bytes", 1, 1 << 32),
    ("read_events", 1, 1 << 19),
    ("read_bytes", 1, 1 << 30),
    ("rate_per_second", 1e-6, 1e9),
    ("checkpoint_events", 1, 1 << 19),
    ("checkpoint_seconds", 0.0, 3600.0),
    ("parked_max", 0, 10_000_000),
    ("resumes", 0, 1 << 53),
)
_OF_WINDOW: Final = ("window_events", "window_bytes", "read_events", "read_bytes")
_OPTIONAL: Final = {"timeout_seconds", "heartbeat_seconds", "rate_per_second"}
_WHOLE: Final = {
    "max_retries", "window_events", "window_bytes", "read_events", "read_bytes", "checkpoint_events", "parked_max",
    "resumes",
}  # fmt: skip


def _described(name: str, low: float, high: float) -> str:
    kind = "a whole number" if name in _WHOLE else "a number"
    return f"{kind} from {low:,} to {high:,}{', or None' if name in _OPTIONAL else ''}"


_DEFAULT: Final = Policy()


def heartbeat_seconds(value: str | float | None) -> float | None:
    """Return the seconds of a heartbeat given as a profile's name, as seconds, or as `off`."""
    if value is None or value == "off":
        return None
    if isinstance(value, str):
        if value not in HEARTBEATS:
            names = [*HEARTBEATS, "off"]
            raise UsageError(f"there is no heartbeat {value!r}{did_you_mean(value, names)}; or give seconds")
        return HEARTBEATS[value]
    return float(value)
