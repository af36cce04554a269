"""What a campaign is, and what it tells.

A campaign tries to break a promise, many times, each time in another way that a seed decides. It is the same code in
the test suite, where it runs in small, and in `make campaign`, where it runs whole. It ends by itself, touches nothing
outside of a temporary directory of its own, and ends only processes that it started.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

FINDINGS_MAX = 100
"""A campaign that has found so much ends: more of the same teaches nothing."""


class Finding(NamedTuple):
    """A promise that did not hold."""

    what: str
    """What was promised, and what was seen; several lines if that helps."""
    replay: str
    """What shows it again, such as `seed 7, crash before operation 123, torn at 512`."""


class TooManyFindings(Exception):
    """Ends a campaign early."""


@dataclass
class Report:
    """What a campaign tells while it runs."""

    rounds: int
    """How many rounds it was asked for."""
    on_round: Callable[[Report], None] = lambda _: None
    """Called after each round, to show it."""
    done: int = 0
    tried: Counter[str] = field(default_factory=Counter)
    """How often it did what, in words for people: `crash states`, `events acknowledged`, `EIO from fdatasync`."""
    findings: list[Finding] = field(default_factory=list)

    def count(self, what: str, times: int = 1) -> None:
        """Note that something was tried, or came of it."""
        self.tried[what] += times

    def found(self, what: str, replay: str) -> None:
        """Note a promise that did not hold."""
        self.findings.append(Finding(what, replay))
        if len(self.findings) >= FINDINGS_MAX:
            raise TooManyFindings(f"{FINDINGS_MAX} findings: the rest is not tried")

    def finish_round(self, rounds: int = 1) -> None:
        """Note that a round is done."""
        self.done += rounds
        self.on_round(self)


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """One way of trying to break a promise."""

    name: str
    """Such as `c2`."""
    title: str
    """What happens to the log, in a few words."""
    unit: str
    """What a round is."""
    small: int
    """Rounds in the test suite: a few seconds."""
    full: int
    """Rounds in `make campaign`: some minutes."""
    run: Callable[[Report, int], None]
    """Runs `report.rounds` rounds from a seed, and tells the report. The same seed does the same, as far as the system
    lets it."""
    obstacle: Callable[[], str | None] = lambda: None
    """Says why it cannot run on this machine, if so: `root is needed to mount a file system`."""
