"""Faults: what may go wrong in a world, and plans that decide where.

A fault is a plain value that names its place: the event, and the subscription if it concerns one. A plan is asked once
for each place, when it is first come to, and its answer depends on the place alone: not on what was asked before, so
that a run with fewer faults still has the others where they were. A seed makes such a plan (`Chaos`), and so does a
list of faults (`Script`), which is how a run is repeated with less and less of them.

None of them breaks a promise. Processes die, and what was in their hands comes again; commits fail, and are repeated or
in doubt; notifications get lost; a handler takes long, so that others with other keys overtake it. No attempt of an
event's policy is used up by any.
"""

from __future__ import annotations

import random
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Point(StrEnum):
    """Where a plan is asked."""

    BEGIN = "begin"
    """A handler is about to be called with an event, for the first time …"""
    END = "end"
    """… and has returned, for the first time."""
    COMMIT = "commit"
    """Progress that settles an event is about to be written, for the first time."""
    READ = "read"
    """A log is read from this event on, for the first time."""
    HINT = "hint"
    """A notification says that the log has grown up to this event."""


class Kind(StrEnum):
    """What goes wrong."""

    SLOW = "slow"
    """The handler takes `seconds` longer, of the virtual clock: events with other keys overtake it."""
    CRASH_INSIDE = "crash inside"
    """The process dies while the handler waits, for the `step`-th time."""
    CRASH_AFTER = "crash after"
    """The process dies when the handler has returned, before that is written."""
    TWICE = "twice"
    """The handler is called again with the same event, as after a crash, but without one."""
    CUT = "cut off and repeated"
    """The handler ends where it waits, for the `step`-th time, and is called again: as after a crash inside of it."""
    COMMIT_REFUSED = "commit refused"
    """The store does not take the progress, and is asked again later."""
    COMMIT_UNANSWERED = "commit unanswered"
    """The store takes it, but no answer comes: what was handed over is in doubt, and what is not settled comes
    again."""
    READ_FAILED = "read failed"
    HINT_LOST = "notification lost"


CRASHES: Final = frozenset({Kind.CRASH_INSIDE, Kind.CRASH_AFTER})
REPEATS: Final = CRASHES | {Kind.TWICE, Kind.CUT, Kind.COMMIT_UNANSWERED}
"""Those after which an event may be handled again."""


class Spot(NamedTuple):
    """A place that a plan is asked about."""

    point: Point
    topic: str
    partition: int
    offset: int
    subscription: str = ""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong, and where."""

    kind: Kind
    topic: str
    partition: int
    offset: int
    subscription: str = ""
    step: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        what = f"{self.kind.value} at {self.topic}/{self.partition}@{self.offset}"
        steps = f", where it waits for the {self.step}. time" if self.step else ""
        return f"{what} of {self.subscription!r}{steps}" if self.subscription else what


def fault_at(kind: Kind, spot: Spot, *, step: int = 0, seconds: float = 0.0) -> Fault:
    """Return a fault at a place."""
    return Fault(
        kind=kind,
        topic=spot.topic,
        partition=spot.partition,
        offset=spot.offset,
        subscription=spot.subscription,
        step=step,
        seconds=seconds,
    )


POINT_OF: Final = {
    Kind.SLOW: Point.BEGIN,
    Kind.CRASH_INSIDE: Point.BEGIN,
    Kind.CRASH_AFTER: Point.END,
    Kind.TWICE: Point.END,
    Kind.CUT: Point.BEGIN,
    Kind.COMMIT_REFUSED: Point.COMMIT,
    Kind.COMMIT_UNANSWERED: Point.COMMIT,
    Kind.READ_FAILED: Point.READ,
    Kind.HINT_LOST: Point.HINT,
}


class Plan(Protocol):
    """Decides what goes wrong."""

    def at(self, spot: Spot) -> Fault | None:
        """Return what goes wrong at this place; the same at every call."""


class Calm:
    """The plan of a world in which nothing goes wrong by itself."""

    def at(self, _spot: Spot) -> Fault | None:
        """See `Plan`."""
        return None


class Script:
    """The plan of exactly these faults."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = {
            Spot(POINT_OF[fault.kind], fault.topic, fault.partition, fault.offset, fault.subscription): fault
            for fault in faults
        }

    def at(self, spot: Spot) -> Fault | None:
        """See `Plan`."""
        return self._faults.get(spot)


class Chaos:
    """The plan of a seed. Tests have few events, so that much goes wrong with each of them."""

    SHARES: Final[dict[Point, list[tuple[Kind, float]]]] = {
        Point.BEGIN: [(Kind.SLOW, 0.3), (Kind.CRASH_INSIDE, 0.15)],
        Point.END: [(Kind.CRASH_AFTER, 0.3)],
        Point.COMMIT: [(Kind.COMMIT_REFUSED, 0.15), (Kind.COMMIT_UNANSWERED, 0.15)],
        Point.READ: [(Kind.READ_FAILED, 0.15)],
        Point.HINT: [(Kind.HINT_LOST, 0.3)],
    }
    STEPS_MAX: Final = 4
    SECONDS_MAX: Final = 3.0

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def at(self, spot: Spot) -> Fault | None:
        """See `Plan`."""
        # A text as seed is hashed by `random` itself, in the same way in every process.
        chance = random.Random(f"{self.seed}/{'/'.join(map(str, spot))}")  # noqa: S311 - a seed decides
        drawn = chance.random()
        for kind, share in self.SHARES[spot.point]:
            drawn -= share
            if drawn < 0:
                step = chance.randint(1, self.STEPS_MAX) if kind is Kind.CRASH_INSIDE else 0
                seconds = round(chance.uniform(0.0, self.SECONDS_MAX), 3) if kind is Kind.SLOW else 0.0
                return fault_at(kind, spot, step=step, seconds=seconds)
        return None


class Faults:
    """What goes wrong in one world: asks its plan, once for each place, and remembers what has happened."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._asked: set[Spot] = set()
        self.is_allowed: Callable[[Fault], bool] = lambda _fault: True
        """Whether a fault may happen at this moment; one that may not never happens."""
        self.happened: list[Fault] = []

    def at(self, spot: Spot) -> Fault | None:
        """Return what is to go wrong here, if it was never asked before."""
        if spot in self._asked:
            return None
        self._asked.add(spot)
        fault = self._plan.at(spot)
        return fault if fault is not None and self.is_allowed(fault) else None

    def note(self, fault: Fault) -> None:
        """Remember that it has happened."""
        self.happened.append(fault)
