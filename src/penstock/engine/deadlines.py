"""Deadlines: how long a hand may take, from when its handler begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


class Deadlines:
    """The deadlines of hands that hold something; whoever holds nothing any more has none."""

    def __init__(self) -> None:
        self._timers = Timers()
        self._holds: dict[int, int] = {}

    @property
    def counting(self) -> bool:
        """Whether it is to be told what hands let go of."""
        return bool(self._holds)

    def expect(self, hands: range, each: int) -> None:
        """Note that these hands hold so many events each, and may begin."""
        self._holds.update(dict.fromkeys(hands, each))

    def start(self, hand: int, at: float, count: Callable[[], int]) -> None:
        """Let the time of a hand end at `at`; `count` tells how many it holds, if that is not known."""
        if hand not in self._holds:
            holds = count()
            if not holds:
                return
            self._holds[hand] = holds
        self._timers.set(hand, at)

    def extend(self, hand: int, at: float) -> None:
        """Let the time of a hand that has begun end at `at`."""
        if hand in self._timers:
            self._timers.set(hand, at)

    def let_go(self, hands: NDArray[np.int64]) -> None:
        """Note that each of these hands holds one event less; a hand may be in it several times."""
        first = int(hands[0]) if len(hands) else 0
        if (hands == first).all():
            self.let_go_of(first, len(hands))
            return
        for hand, count in zip(*(column.tolist() for column in np.unique(hands, return_counts=True)), strict=True):
            self.let_go_of(hand, count)

    def let_go_of(self, hand: int, count: int = 1) -> None:
        """Note that a hand holds fewer events."""
        left = self._holds.get(hand, 0) - count
        if left > 0:
            self._holds[hand] = left
        elif self._holds.pop(hand, None) is not None:
            self._timers.drop(hand)

    def clear(self) -> None:
        """Forget all."""
        self._timers.clear()
        self._holds.clear()

    def first(self) -> float | None:
        """Return when the next one ends."""
        return self._timers.first()

    def pop_due(self, now: float) -> list[int]:
        """Take the hands whose time is over."""
        return self._timers.pop_due(now)
