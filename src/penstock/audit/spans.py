"""Spans: sets of offsets as two sorted arrays, the starts and the stops of ranges that neither overlap nor touch.

The same as `RangeSet`, for millions of ranges: every operation is a few sorts and sums over whole arrays. What each
costs depends on the number of ranges alone, never on how many offsets they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import IntegrityError
from penstock.offsets import OFFSET_END

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.offsets import Range

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A set of offsets. Made by the functions below; whoever makes one by hand keeps it sorted and apart."""

    starts: Numbers
    stops: Numbers

    @property
    def count(self) -> int:
        """How many offsets are in it."""
        return int((self.stops - self.starts).sum())

    def __bool__(self) -> bool:
        return bool(len(self.starts))

    def first(self, most: int) -> list[tuple[int, int]]:
        """Return so many of its ranges."""
        return list(zip(self.starts[:most].tolist(), self.stops[:most].tolist(), strict=True))

    def within(self, start: int, stop: int) -> Spans:
        """Return the part from one offset up to another."""
        starts, stops = np.maximum(self.starts, start), np.minimum(self.stops, stop)
        kept = starts < stops
        return Spans(starts[kept], stops[kept])


EMPTY = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def of(ranges: Iterable[Range]) -> Spans:
    """Return the offsets of some ranges."""
    pairs = np.array([(each.start, each.stop) for each in ranges], np.int64).reshape(-1, 2)
    return melted(pairs[:, 0], pairs[:, 1])


def of_offsets(offsets: Iterable[int]) -> Spans:
    """Return a set of single offsets."""
    starts = np.unique(np.fromiter(offsets, np.int64))
    return melted(starts, starts + 1)


def span(start: int, stop: int) -> Spans:
    """Return one range; empty if it would end before it begins."""
    if start >= stop:
        return EMPTY
    return Spans(np.array([start], np.int64), np.array([stop], np.int64))


def melted(starts: Numbers, stops: Numbers) -> Spans:
    """Return what any ranges cover together, in whatever order they come.

    Starts and stops may be sorted apart from each other: an offset is covered where more starts than stops lie at or
    below it, whichever belong together. So a range begins at a start below which all starts before it are stopped.
    """
    filled = starts < stops
    starts, stops = np.sort(starts[filled]), np.sort(stops[filled])
    if not len(starts):
        return EMPTY
    apart = stops[:-1] < starts[1:]
    return Spans(starts[np.append(True, apart)], stops[np.append(apart, True)])


def covered_twice(starts: Numbers, stops: Numbers) -> Spans:
    """Return what lies in two or more of these ranges.

    By the counting of `melted`: an offset with k stops at or below it lies in two ranges if k + 2 starts are, too.
    """
    filled = starts < stops
    starts, stops = np.sort(starts[filled])[1:], np.sort(stops[filled])[:-1]
    twice = starts < stops
    return melted(starts[twice], stops[twice])


def union(sets: Sequence[Spans]) -> Spans:
    """Return what is in any of these."""
    sets = [each for each in sets if each]
    if len(sets) < 2:
        return sets[0] if sets else EMPTY
    return melted(np.concatenate([each.starts for each in sets]), np.concatenate([each.stops for each in sets]))


def intersection(one: Spans, other: Spans) -> Spans:
    """Return what is in both."""
    if not one or not other:
        return EMPTY
    return covered_twice(np.concatenate([one.starts, other.starts]), np.concatenate([one.stops, other.stops]))


def difference(one: Spans, other: Spans) -> Spans:
    """Return what is in one and not in the other."""
    if not one or not other:
        return one
    return intersection(one, complement(other))


def complement(one: Spans) -> Spans:
    """Return every offset that is not in it."""
    starts = np.append(np.zeros(1, np.int64), one.stops)
    stops = np.append(one.starts, np.full(1, OFFSET_END, np.int64))
    filled = starts < stops
    return Spans(starts[filled], stops[filled])


def counts_between(one: Spans, edges: Numbers) -> Numbers:
    """Return how many offsets of a set lie between each edge and the next; edges rise."""
    below = np.append(np.zeros(1, np.int64), np.cumsum(one.stops - one.starts))
    # Whole ranges that begin below an edge, less what the last of them sticks out.
    index = np.searchsorted(one.starts, edges, side="left")
    over = np.zeros(len(edges), np.int64)
    some = index > 0
    over[some] = np.maximum(one.stops[index[some] - 1] - edges[some], 0)
    counted: Numbers = np.diff(below[index] - over)
    return counted


# --- many sets at once ------------------------------------------------------------------------

_COORDINATES: Final = 1 << 62


def by_group(
    groups: Numbers, starts: Numbers, stops: Numbers, operation: Callable[[Numbers, Numbers], Spans]
) -> tuple[Numbers, Numbers, Numbers]:
    """Do the same with the ranges of each group, as `melted` or `covered_twice` does it; they are numbered from 0.

    All groups are laid out side by side on one line, where they cannot touch, so that a thousand of them cost as much
    as one. If the line would be too long, some are done after the others.
    """
    if not len(starts):
        return EMPTY.starts, EMPTY.starts, EMPTY.stops
    base = int(starts.min())
    room = min(int(stops.max()) - base + 2, OFFSET_END)
    together = max(_COORDINATES // room, 1)
    found: list[tuple[Numbers, Numbers, Numbers]] = []
    for first in range(0, int(groups.max()) + 1, together):
        chosen = (groups >= first) & (groups < first + together)
        shift = (groups[chosen] - first) * room - base
        done = operation(starts[chosen] + shift, stops[chosen] + shift)
        group = done.starts // room
        back = base - group * room
        found.append((group + first, done.starts + back, done.stops + back))
    if len(found) == 1:
        return found[0]
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]  # three


# --- as bytes ---------------------------------------------------------------------------------


def decoded(sets: Sequence[bytes]) -> tuple[Numbers, Numbers, Numbers]:
    """Read many sets that `RangeSet.to_bytes` wrote: for every range which set it is of, its start and its stop.

    `IntegrityError` if any of them is not as `to_bytes` writes; whoever must know which one asks one by one.
    """
    lengths = np.fromiter(map(len, sets), np.int64, len(sets))
    data = np.frombuffer(b"".join(sets), np.uint8)
    if not len(data):
        return EMPTY.starts, EMPTY.starts, EMPTY.stops
    numbers, of_set = _numbers(data, lengths)
    per_set = np.bincount(of_set, minlength=len(sets))
    if (per_set % 2).any():
        raise IntegrityError("a range set ends with a range of no length")
    beyond, less_one = numbers[::2], numbers[1::2]
    owner = of_set[::2]
    # Every range moves the floor of the next by what it is beyond its own, its length, and one.
    firsts = np.flatnonzero(np.diff(owner, prepend=-1))
    totals = np.add.reduceat(beyond.astype(np.float64) + less_one + 2, firsts)
    if totals.max() > OFFSET_END:
        raise IntegrityError("a range set goes beyond the last offset there can be")
    moved = beyond + less_one + 2
    # The sum over all sets may pass 64 bits; what is subtracted has passed them as well.
    floors = np.cumsum(moved) - moved
    floors -= np.repeat(floors[firsts], np.diff(np.append(firsts, len(owner))))
    starts = floors + beyond
    return owner, starts, starts + less_one + 1


def _numbers(data: NDArray[np.uint8], lengths: Numbers) -> tuple[Numbers, Numbers]:
    """Return the numbers in LEB128, and of which set each is."""
    last = data < 0x80
    stops = np.flatnonzero(last) + 1
    ends = np.cumsum(lengths)
    filled = lengths > 0
    if not last[ends[filled] - 1].all():
        raise IntegrityError("a range set ends inside a number")
    starts = np.append(np.zeros(1, np.int64), stops[:-1])
    sizes = stops - starts
    of_set = np.repeat(np.arange(len(lengths)), np.diff(np.searchsorted(stops, ends, side="right"), prepend=0))
    if len(stops) == len(data):
        return data.astype(np.int64), of_set  # the usual case: all numbers are small
    if sizes.max() > 9:
        raise IntegrityError("a range set has a number of more than nine bytes")
    if ((data[stops - 1] == 0) & (sizes > 1)).any():
        raise IntegrityError("a range set has a needless zero")
    shifts = 7 * (np.arange(len(data)) - np.repeat(starts, sizes))
    return np.add.reduceat((data & 0x7F).astype(np.int64) << shifts, starts), of_set
