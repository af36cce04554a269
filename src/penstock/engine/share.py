"""Share: which events of a partition are this owner's, where a subscription has several owners.

Every event has a slot, which is decided by its key, and every slot has one owner at a time. What is of other slots is
passed over: others settle it. Of an owner's own slots some may be *leaving*: nothing more of them is handed over, and
once nothing of them is in hand or unwritten they go to another owner.

A hole in the log has no key. It is settled and declared by the owner of the slot of events without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Slots = NDArray[np.bool_]
    """For each slot, whether it is meant."""

SLOTS: Final = 64
ONE_IN_MAX: Final = 4
"""Whoever owns but few slots reads no more than so many times as much at once for it."""


def slots_of(numbers: Iterable[int]) -> Slots:
    """Return these slots as a mask."""
    mask = np.zeros(SLOTS, np.bool_)
    mask[list(numbers)] = True
    return mask


class Share:
    """The slots of one owner; all of them if `mine` is None, and then nothing is passed over.

    Where events are claimed by anybody slots do not matter, and what is set aside is the berth's.
    """

    def __init__(self, partition: int, mine: Slots | None = None, *, berth: int = 0) -> None:
        self.berth = berth
        self.keyless = partition % SLOTS
        """The slot of events without a key: partitions have different ones, so that these are spread, too."""
        self.slotted = mine is not None
        """Whether slots decide whose an event is."""
        self.mine = np.ones(SLOTS, np.bool_) if mine is None else mine.copy()
        self.leaving = np.zeros(SLOTS, np.bool_)
        self._measure()

    def _measure(self) -> None:
        self.whole = bool(self.mine.all())
        """Whether everything is this owner's."""
        self.one_in = min(SLOTS // max(int(np.count_nonzero(self.mine)), 1), ONE_IN_MAX)
        """Of about so many events of the log one is this owner's."""
        self.departing = bool(self.leaving.any())
        """Whether some are leaving."""
        # What is others' is passed over when it comes, so that only what leaves has to be told from the rest.
        self._offered = self.mine & ~self.leaving if self.departing else None

    @property
    def has_holes(self) -> bool:
        """Whether holes in the log are this owner's."""
        return bool(self.mine[self.keyless])

    def offered(self, asked: Slots | None) -> Slots | None:
        """Return which slots may be handed over to whoever asks for these; None for all."""
        if self._offered is None:
            return asked
        return self._offered if asked is None else self._offered & asked

    def leave(self, slots: Slots) -> None:
        """Hand over nothing more of these of its own."""
        self.leaving = slots & self.mine
        self._measure()

    def drop(self, slots: Slots) -> None:
        """Own these no more."""
        self.mine &= ~slots
        self.leaving &= ~slots
        self._measure()
