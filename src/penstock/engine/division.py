"""Division: events by whose slots they are, where several consumers of a process ask, each for slots of its own.

Whoever reads a chunk divides it, where others go on meanwhile; whoever asks then has its rows at once. A part that is
handed over and settled as a whole has one state and one hand, and nothing is noted for each of its events. Where there
is but one who asks, a page is one part. Once somebody looks at single events of a page its parts are dissolved into
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.engine.share import SLOTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.engine.messages import Offsets
    from penstock.engine.page import Rows
    from penstock.engine.share import Slots
    from penstock.offsets import Range


FEW: Final = 4
"""The rows of so few parts are found one after the other, faster than by sorting all."""


class Division:
    """Which slots belong together: those of each who asks, and no slot is in two."""

    __slots__ = ("_numbers", "_part_of", "masks", "own")

    def __init__(self, masks: Sequence[Slots]) -> None:
        self.masks = tuple(masks)
        self._numbers = {id(mask): number for number, mask in enumerate(self.masks)}
        self._part_of = np.full(SLOTS, len(self.masks), np.uint8)
        for number, mask in enumerate(self.masks):
            self._part_of[mask] = number
        self.own = self._part_of < len(self.masks)
        """All of these slots; what is of none of them is the last part."""

    def number(self, slots: Slots | None) -> int | None:
        """Return which part these slots are, if they are the very mask of one."""
        return self._numbers.get(id(slots))

    def divide(self, start: int, slots: NDArray[np.int64]) -> Divided:
        """Return the parts of a chunk that starts at this offset, given the slot of each event."""
        part_of, count = self._part_of.take(slots), len(self.masks)
        if count <= FEW:
            rows = [np.flatnonzero(part_of == number) for number in range(count)]
            rows.append(np.flatnonzero(part_of == count) if sum(map(len, rows)) < len(slots) else rows[0][:0])
        else:
            order = part_of.argsort(kind="stable")  # by part, and in each as they were
            edges = np.searchsorted(part_of.take(order), np.arange(1, count + 1))
            return Divided(self, np.split(order, edges), np.split(order + start, edges))
        return Divided(self, rows, [mine + start for mine in rows])


class Divided(NamedTuple):
    """The rows of a chunk by parts, and their offsets."""

    division: Division | None
    """None if it is one part."""
    rows: Sequence[Rows]
    offsets: Sequence[Offsets]


def undivided(span: Range) -> Divided:
    """Return a chunk as one part."""
    return Divided(None, (slice(0, len(span)),), (span,))


class Parts:
    """What became of the parts of a page, each of which is in one state."""

    __slots__ = ("divided", "hands", "states")

    def __init__(self, divided: Divided, state: int) -> None:
        self.divided = divided
        self.states = [state] * len(divided.rows)
        self.hands = [0] * len(divided.rows)

    def number(self, slots: Slots | None) -> int | None:
        """Return which part the events of these slots are, if they are one."""
        division = self.divided.division
        if division is None:
            return 0 if slots is None else None
        return division.number(slots)
