"""Search: which handlers do something else when things go wrong, and the fewest faults that show it.

First every event of a subscription is handled twice, one subscription at a time; and again with the first time cut off
at each place where the handler waits. Then seeds decide what goes wrong, with those left out that are known by then.
What comes of it is compared with a calm run. Once two runs differ, faults are taken away as long as they still do
(delta debugging: halves, quarters, single ones), so that what remains names the handler and the event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

from penstock.errors import PenstockError, UsageError
from penstock.testing.worlds.effects import Difference, Place, differences
from penstock.testing.worlds.faults import REPEATS, Fault, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from penstock.testing.worlds.effects import Effects

RUNS_MAX: Final = 60
"""So many runs are spent at most on making one finding smaller."""
AGAIN_MAX: Final = 5
STEPS_MAX: Final = 8
"""At so many places where a handler waits it is cut off."""


Subject: TypeAlias = tuple[str, str]
"""A topic and a subscription of it."""


class Unstable(PenstockError):
    """Raised when two calm runs differ: then nothing can be said of others."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A handler that does something else when things go wrong."""

    handler: str
    topic: str
    subscription: str
    event: str
    """The position of the event that it is seen at, in the store of the run …"""
    origin: str
    """… and where that event comes from."""
    what: str
    seed: int
    faults: list[Fault]
    """The fewest that show it."""
    again: list[str]
    """The events that were handled more often than without faults; some of them if there are many."""
    differences: list[Difference]

    @property
    def needs_seed(self) -> bool:
        """Whether a seed has found it; others are found without any."""
        return not any(fault.kind in {Kind.TWICE, Kind.CUT} for fault in self.faults)


class Run(Protocol):
    """How a run is done."""

    def __call__(self, faults: list[Fault] | int, without: Collection[Subject], /) -> Effects:
        """Run with exactly these faults, or with those of a seed, without the handlers of some subscriptions."""


class Search:
    """Looks for handlers."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._without: list[Subject] = []
        """Those of which it is known: others would be hard to tell from them."""
        self.runs = 0
        self.calm = self._calm()
        for difference in differences(self.calm, self._again([])):
            raise Unstable(
                f"two runs without any fault differ, so that nothing can be said of others: {difference.where}; leave "
                f"times and random numbers out of it, and let --reset begin anew what is kept outside of the process"
            )
        if self.calm.state is None and not self.calm.published and not self.calm.dead:
            raise UsageError(
                "nothing can be compared: the handlers publish nothing; name a function that returns what they have "
                "done, --state module:function"
            )

    def _calm(self) -> Effects:
        calm = self._again([])
        if calm.trouble:
            raise Unstable(f"the handlers do not come to an end without any fault: {calm.trouble}")
        return calm

    def _again(self, faults: list[Fault] | int) -> Effects:
        self.runs += 1
        return self._run(faults, self._without)

    def findings(self, subjects: Iterable[Subject], seed: int, rounds: int) -> list[Finding]:
        """Return what is found of these subscriptions: at most one finding for each, the first."""
        left = list(subjects)
        found: list[Finding] = []

        def take(finding: Finding | None) -> None:
            subject = None if finding is None else (finding.topic, finding.subscription)
            if finding is not None and subject in left:
                found.append(finding)
                left.remove(subject)

        for subject in list(left):
            take(self._repeated(*subject, seed))
        for each in range(seed, seed + rounds):
            self._leave_out([(finding.topic, finding.subscription) for finding in found])
            if left:
                take(self._chaotic(each))
        return found

    def _leave_out(self, subjects: list[Subject]) -> None:
        if subjects != self._without:
            self._without = subjects
            self.calm = self._calm()

    def _repeated(self, topic: str, subscription: str, seed: int) -> Finding | None:
        """Handle every event of a subscription twice, the first time to its end or to one of the places it waits at."""
        places = [tally.place for tally in self.calm.handled]
        mine = [place for place in places if (place.topic, place.subscription) == (topic, subscription)]
        for step in range(STEPS_MAX + 1 if mine else 0):
            kind = Kind.CUT if step else Kind.TWICE
            faults = [
                Fault(
                    kind=kind,
                    topic=topic,
                    partition=place.partition,
                    offset=place.offset,
                    subscription=subscription,
                    step=step,
                )
                for place in mine
            ]
            effects = self._again(faults)
            if differences(self.calm, effects):
                return self._finding(faults, seed)
            if not effects.faults:
                break  # none of them waits so often
        return None

    def _chaotic(self, seed: int) -> Finding | None:
        """Let a seed decide what goes wrong."""
        effects = self._again(seed)
        return self._finding(effects.faults, seed) if differences(self.calm, effects) else None

    def _differs(self, faults: list[Fault]) -> bool:
        return bool(differences(self.calm, self._again(faults)))

    def _finding(self, faults: list[Fault], seed: int) -> Finding:
        fewest = shrunk(faults, self._differs, RUNS_MAX)
        effects = self._again(fewest)
        again = effects.again(self.calm)
        place = _blamed(fewest, again, self.calm)
        handlers = {tally.place: tally.handler for tally in (*effects.handled, *self.calm.handled)}
        return Finding(
            handler=handlers.get(place, ""),
            topic=place.topic,
            subscription=place.subscription,
            event=str(place),
            origin=self.calm.origins.get(str(place), "published by a handler"),
            what=_what(fewest, effects),
            seed=seed,
            faults=fewest,
            again=[f"{each} of {each.subscription!r}" for each in again[:AGAIN_MAX]],
            differences=differences(self.calm, effects),
        )


def _blamed(faults: Sequence[Fault], again: Sequence[Place], calm: Effects) -> Place:
    """Return the event that faults befell, as a subscription has it; of several, one that was handled again.

    What no calm run has was published because of a fault: whoever has handled that is the last to be blamed.
    """
    places = [Place(fault.subscription, fault.topic, fault.partition, fault.offset) for fault in faults]
    both = [place for place in places if place in again]
    subjects = {(place.topic, place.subscription) for place in places}
    beside = [place for place in again if (place.topic, place.subscription) in subjects]
    known = {tally.place for tally in calm.handled}
    repeated = [place for place in again if place in known]
    named = [place for place in places if place.subscription]
    return [*both, *beside, *repeated, *named, *again, *places][0]


def _what(faults: Sequence[Fault], effects: Effects) -> str:
    if effects.trouble:
        return "does not come to an end"
    if any(fault.kind in REPEATS for fault in faults):
        return "is not idempotent"
    return "depends on the order of events with different keys, or on time"


def shrunk(faults: list[Fault], shows: Callable[[list[Fault]], bool], runs_max: int) -> list[Fault]:
    """Return as few of these faults as still show it; at most so many runs are made for that."""
    parts, runs = 2, 0
    while len(faults) > 1 and runs < runs_max:
        size = -(-len(faults) // parts)
        pieces = [faults[at : at + size] for at in range(0, len(faults), size)]
        rests = [[fault for fault in faults if fault not in piece] for piece in pieces]
        # Each piece alone first: what is looked for is mostly one fault.
        for candidate in [*pieces, *(rests if len(pieces) > 2 else [])]:
            runs += 1
            if runs <= runs_max and shows(candidate):
                parts = 2 if candidate in pieces else max(parts - 1, 2)
                faults = candidate
                break
        else:
            if parts >= len(faults):
                break
            parts = min(2 * parts, len(faults))
    return faults
