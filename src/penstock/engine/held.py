"""Held: what is in hand of a shard, slot by slot, and since about when; for whoever looks from outside.

When a hand began is noted for many at a time: once a second at most, and for a bounded number of seconds. So it costs
nothing per event, and what is told of a hand is never too young.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTE_SECONDS: Final = 1.0
"""Hands that begin within so long of each other are said to have begun at the same time."""
NOTES_MAX: Final = 128
"""With more of them every other one is forgotten, and what began then is said to be older than it is."""


class Held(NamedTuple):
    """What is in hand of one slot."""

    slot: int | None
    """None where slots do not matter."""
    events: int
    since: float
    """When the oldest of them was handed over, on the clock of the engine."""


class Beginnings:
    """About when each hand began; hands are numbered in the order in which they begin."""

    def __init__(self) -> None:
        self._hands: list[int] = []
        self._times: list[float] = []

    def note(self, hand: int, now: float) -> None:
        """Note that this hand, and those that follow it, begin now."""
        if self._times and now - self._times[-1] < NOTE_SECONDS:
            return
        self._hands.append(hand)
        self._times.append(now)
        if len(self._hands) > NOTES_MAX:
            # The first one stays: as a rule it is what somebody looks for.
            del self._hands[1::2], self._times[1::2]

    def of(self, hand: int) -> float:
        """Return when a hand began that was noted."""
        return self._times[max(bisect_right(self._hands, hand) - 1, 0)]

    def forget_before(self, hand: int) -> None:
        """Forget what is only about hands before this one."""
        done = bisect_right(self._hands, hand) - 1
        if done > 0:
            del self._hands[:done], self._times[:done]


def held_of(hands: NDArray[np.int64], slots: NDArray[np.int64] | None, beginnings: Beginnings) -> list[Held]:
    """Return what is in hand, by slot: the hand of each event, and its slot if that matters."""
    if not len(hands):
        return []
    beginnings.forget_before(int(hands.min()))
    if slots is None:
        return [Held(None, len(hands), beginnings.of(int(hands.min())))]
    found = []
    for slot in np.unique(slots).tolist():
        mine = hands[slots == slot]
        found.append(Held(slot, len(mine), beginnings.of(int(mine.min()))))
    return found
