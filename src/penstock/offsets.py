"""Offsets and sets of them: `Position`, `Range`, `Gap`, `RangeSet`, `Bitmap`.

An offset is a dense number, 0, 1, 2, …, that names one event of one partition for ever. Ranges of
offsets are half-open throughout, so that neighbours share a bound and nothing needs a `+ 1`.

What this module promises:

* Everything here is plain computation: no I/O, no time, no threads. Nothing is thread-safe.
* Equal sets have equal bytes. Bytes that `to_bytes` would not have written raise `IntegrityError`, and
  no memory is taken on the word of a number that was not checked first.
* A `RangeSet` takes memory by the range, however many offsets are in it; a `Bitmap` by the offset, up to
  its limit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from penstock.errors import IntegrityError, UsageError, WindowFull

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

# Every bound fits a signed 64-bit integer, the type of offset columns on disk and in Spark.
OFFSET_END = (1 << 63) - 1


class Position(NamedTuple):
    """Where one event is. Written `orders/0@17`: topic, partition, offset."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str(position)` wrote."""
        topic, _, place = text.partition("/")
        partition, _, offset = place.partition("@")
        try:
            position = cls(topic, int(partition), int(offset))
        except ValueError:
            position = cls("", 0, 0)
        # Comparing with the written form refuses what int() forgives: "+1", " 1", "01", "1_0", "１".
        sound = position.topic and position.partition >= 0 and 0 <= position.offset < OFFSET_END
        if not sound or str(position) != text:
            raise UsageError(f"{text!r} is not a position such as 'orders/0@17': topic/partition@offset")
        return position


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The offsets from `start` up to, but not including, `stop`; empty when the two are equal."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= OFFSET_END:
            raise ValueError(f"[{self.start}, {self.stop}) does not hold 0 <= start <= stop < 2**63")

    def __len__(self) -> int:
        return self.stop - self.start

    def __bool__(self) -> bool:
        return self.start < self.stop

    def __contains__(self, offset: int) -> bool:
        return self.start <= offset < self.stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    def overlaps(self, other: Range) -> bool:
        """Tell whether some offset is in both."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def intersection(self, other: Range) -> Range:
        """Return the offsets in both; an empty range when there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True, slots=True)
class Gap:
    """A hole in a log: offsets that hold no event and never will, and why. Never empty, never silent."""

    start: int
    stop: int
    reason: str

    def __post_init__(self) -> None:
        if not self.range:
            raise ValueError(f"a gap holds at least one offset, {self.range} holds none")

    @property
    def range(self) -> Range:
        """The offsets that are missing."""
        return Range(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"gap {self.range}: {self.reason}"


DENSE: Final = 16
"""Offsets are dense if at least one of so many between the first and the last is among them."""


MANY_RANGES: Final = 64
"""Of so many ranges it is faster to write all numbers at once than one after the other."""


class RangeSet:
    """A mutable set of offsets, kept as sorted ranges that neither overlap nor touch.

    `len` counts offsets, iteration yields each `Range`, and `RangeSet(other)` copies. It changes, so it
    is not hashable.

    The bounds live in two parallel lists of Python integers. Sets hold few ranges and are asked and
    changed one range at a time, and bisecting a list takes less time than numpy needs to be called.
    Two lists rather than one of pairs, because changes bisect by `stop` on one side and by `start` on
    the other.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        filled = [span for span in ranges if span]
        self._starts, self._stops = _melt([span.start for span in filled], [span.stop for span in filled])

    @classmethod
    def from_offsets(cls, offsets: NDArray[np.int64] | Iterable[int]) -> Self:
        """Build the set of these offsets, given in any order, repeated or not."""
        given = _int64(offsets)
        if not given.size:
            return cls()
        # One Range checks the bounds of them all.
        hull = Range(int(given.min()), int(given.max()) + 1)
        if len(hull) <= DENSE * given.size:
            # Marked in their order, and found by their edges: faster than to sort them.
            cells = np.zeros(len(hull) + 2, np.bool_)
            cells[given - (hull.start - 1)] = True
            edges = (np.flatnonzero(cells[1:] != cells[:-1]) + hull.start).tolist()
            starts, stops = edges[::2], edges[1::2]
        else:
            ordered = np.sort(given)
            breaks = np.flatnonzero(np.diff(ordered) > 1)
            starts = [hull.start, *ordered[breaks + 1].tolist()]
            stops = [*(ordered[breaks] + 1).tolist(), hull.stop]
        result = cls()
        result._starts, result._stops = starts, stops
        return result

    @classmethod
    def _of(cls, starts: list[int], stops: list[int]) -> Self:
        """Take bounds that are in order and never touch, but leave out pairs that enclose nothing."""
        result = cls()
        pairs = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
        result._starts = [start for start, _ in pairs]
        result._stops = [stop for _, stop in pairs]
        return result

    @property
    def range_count(self) -> int:
        """How many ranges the offsets form."""
        return len(self._starts)

    @property
    def end(self) -> int:
        """One beyond the highest offset; 0 if there is none."""
        return self._stops[-1] if self._stops else 0

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Range]:
        return map(Range, self._starts, self._stops)

    def __contains__(self, offset: int) -> bool:
        return self.first_missing(offset) != offset

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # typeshed declares every object hashable

    def __repr__(self) -> str:
        shown = [f"[{start}, {stop})" for start, stop in zip(self._starts[:8], self._stops, strict=False)]
        more = [f"… {self.range_count - 8:,} more"] if self.range_count > 8 else []
        return f"RangeSet({', '.join(shown + more)})"

    def first_missing(self, start: int) -> int:
        """Return the first offset at or after `start` that is not in the set."""
        index = bisect_right(self._starts, start) - 1
        # Ranges never touch, so the stop of one is never in the next.
        return self._stops[index] if index >= 0 and start < self._stops[index] else start

    def missing(self, within: Range) -> RangeSet:
        """Return the offsets of `within` that are not in the set."""
        low = bisect_right(self._stops, within.start)
        high = bisect_left(self._starts, within.stop)
        # What is missing lies between one range's stop and the next one's start.
        starts = [within.start, *self._stops[low:high]]
        return RangeSet._of(starts, [*self._starts[low:high], within.stop])

    def add(self, span: Range) -> None:
        """Put every offset of `span` in."""
        if not span:
            return
        if self._stops and self._stops[-1] == span.start:  # the usual case: it goes on where the last one ended
            self._stops[-1] = span.stop
            return
        # The ranges in [low, high) overlap or touch the new one and become one with it.
        low = bisect_left(self._stops, span.start)
        high = bisect_right(self._starts, span.stop)
        start, stop = span.start, span.stop
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def discard(self, span: Range) -> None:
        """Take every offset of `span` out."""
        if not span:
            return
        low = bisect_right(self._stops, span.start)
        high = bisect_left(self._starts, span.stop)
        if low == high:
            return
        # Of the ranges that overlap, the first may stick out to the left and the last to the right.
        edges = (self._starts[low], span.start), (span.stop, self._stops[high - 1])
        kept = [(start, stop) for start, stop in edges if start < stop]
        self._starts[low:high] = [start for start, _ in kept]
        self._stops[low:high] = [stop for _, stop in kept]

    def __or__(self, other: RangeSet) -> RangeSet:
        if not self or not other:
            result = RangeSet()
            result._starts, result._stops = self._starts + other._starts, self._stops + other._stops
            return result
        return RangeSet._of(*_melt(self._starts + other._starts, self._stops + other._stops))

    def __and__(self, other: RangeSet) -> RangeSet:
        # By the counting of `_melt`: an offset with k stops at or below it is in both exactly if k + 2
        # starts are, too. Counted from 0, that is from start k + 1 up to stop k.
        starts = sorted(self._starts + other._starts)
        stops = sorted(self._stops + other._stops)
        return RangeSet._of(starts[1:], stops[:-1])

    def __sub__(self, other: RangeSet) -> RangeSet:
        return self & other.missing(Range(0, OFFSET_END))

    def to_offsets(self) -> NDArray[np.int64]:
        """Return every offset, ascending. Takes 8 bytes an offset: look at `len` first."""
        starts = np.array(self._starts, np.int64)
        lengths = np.array(self._stops, np.int64) - starts
        before = np.cumsum(lengths) - lengths
        offsets: NDArray[np.int64] = np.repeat(starts - before, lengths) + np.arange(len(self))
        return offsets

    def to_bytes(self) -> bytes:
        """Return the set as bytes: two numbers for each range, in order, and nothing else.

        The first number is how far the range starts beyond the least start it could have: 0, then one
        beyond the stop before, since ranges never touch. The second is its length less one. Numbers are
        unsigned LEB128: seven bits a byte, lowest first, the high bit set on all bytes but the last, at
        most nine bytes, none of them needless. {[3, 7)} is `03 03`, {[0, 1), [300, 302)} is
        `00 00 aa 02 01`, the empty set has no bytes.
        """
        if len(self._starts) >= MANY_RANGES:
            starts, stops = np.array(self._starts, np.uint64), np.array(self._stops, np.uint64)
            numbers = np.empty(2 * len(starts), np.uint64)
            numbers[0::2] = starts - np.concatenate(([np.uint64(0)], stops[:-1] + np.uint64(1)))
            numbers[1::2] = stops - starts - np.uint64(1)
            return _written(numbers)
        out = bytearray()
        floor = 0
        for start, stop in zip(self._starts, self._stops, strict=True):
            _write_number(out, start - floor)
            _write_number(out, stop - start - 1)
            floor = stop + 1
        return bytes(out)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote. The bytes may come from anywhere; a few can name 2**63 offsets."""
        numbers = _read_numbers(data)
        if len(numbers) % 2:
            raise IntegrityError(f"a range set of {len(data):,} bytes ends with a range of no length")
        starts, stops = [], []
        floor = 0
        for beyond, length in zip(numbers[::2], numbers[1::2], strict=True):
            start = floor + beyond
            stop = start + length + 1
            if stop > OFFSET_END:
                raise IntegrityError(f"a range set holds [{start}, {stop}), but offsets end before 2**63")
            starts.append(start)
            stops.append(stop)
            floor = stop + 1
        return cls._of(starts, stops)


def _melt(starts: list[int], stops: list[int]) -> tuple[list[int], list[int]]:
    """Sort the bounds of filled ranges and join those that overlap or touch.

    Starts and stops may be sorted apart from each other: an offset is covered where more starts than stops
    lie at or below it, whichever belong together. So a joined range begins at a start exactly if as many
    stops lie below it as starts come before it.
    """
    starts, stops = sorted(starts), sorted(stops)
    breaks = [at for at in range(1, len(starts)) if stops[at - 1] < starts[at]]
    return starts[:1] + [starts[at] for at in breaks], [stops[at - 1] for at in breaks] + stops[-1:]


def _write_number(out: bytearray, number: int) -> None:
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)


def _written(numbers: NDArray[np.uint64]) -> bytes:
    """Return what `_write_number` writes of these one after the other."""
    lengths = np.ones(len(numbers), np.int64)
    for bits in range(7, int(numbers.max()).bit_length(), 7):
        lengths += numbers >= np.uint64(1 << bits)
    firsts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    for at in range(int(lengths.max())):
        has = np.flatnonzero(lengths > at)
        septets = (numbers[has] >> np.uint64(7 * at)) & np.uint64(0x7F)
        out[firsts[has] + at] = septets | (lengths[has] > at + 1).astype(np.uint64) << np.uint64(7)
    return out.tobytes()


def _read_numbers(data: bytes) -> list[int]:
    numbers = []
    number = shift = 0
    for at, byte in enumerate(data):
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte <= 0x7F:
            if byte == 0 and shift > 7:
                raise IntegrityError(f"a range set has a needless zero at byte {at:,}")
            numbers.append(number)
            number = shift = 0
        elif shift == 63:
            raise IntegrityError(f"a range set has a number of more than nine bytes up to byte {at:,}")
    if shift:
        raise IntegrityError(f"a range set of {len(data):,} bytes ends inside a number")
    return numbers


def _int64(offsets: NDArray[np.int64] | Iterable[int]) -> NDArray[np.int64]:
    if isinstance(offsets, np.ndarray):
        # A safe cast refuses floats and unsigned 64-bit numbers, which might change their value.
        return offsets.astype(np.int64, casting="safe", copy=False)
    return np.fromiter(offsets, np.int64)


class Bitmap:
    """Which offsets are settled, at or after a moving `start`. All before `start` are.

    Settling is idempotent. `limit` bounds how far beyond `start` it may reach: `room` asks, and
    settling an offset beyond it raises `WindowFull` and changes nothing.

    In memory an offset takes a whole byte, not a bit: settling one is then a single store, and the first
    unsettled one is found at the speed of memory. `to_bytes` packs.
    """

    LIMIT = 1 << 20
    # A smaller array would save nothing that is worth a copy.
    _CELLS_MIN = 1 << 10

    __slots__ = ("_base", "_cells", "_count", "_end", "_limit", "_reach", "_start")

    def __init__(self, start: int = 0, *, limit: int = LIMIT) -> None:
        if limit < 1:
            raise ValueError(f"a bitmap's limit is at least 1, not {limit}")
        self._limit = limit
        self._start = self._end = Range(start, OFFSET_END).start
        self._count = 0
        self._rebase(self._no_cells())

    def seek(self, start: int) -> None:
        """Forget everything and begin at `start`, forwards or back."""
        # New cells let go of the interpreter, to wait until it is had again; and as a rule none of the old ones is set.
        unused = self._end == self._base and self._cells.size == self._CELLS_MIN
        self._start = self._end = Range(start, OFFSET_END).start
        self._count = 0
        self._rebase(self._cells if unused else self._no_cells())

    def _no_cells(self) -> NDArray[np.bool_]:
        return np.zeros(self._CELLS_MIN, np.bool_)

    def _rebase(self, cells: NDArray[np.bool_]) -> None:
        self._cells = cells
        self._base = self._start
        self._measure()

    def _measure(self) -> None:
        # One number answers both questions of a settlement: is there a cell, is it within the limit?
        # The last cell is never set, so that the search for the first unset one always finds one.
        self._reach = min(self._base + self._cells.size - 1, self._start + self._limit)

    @property
    def start(self) -> int:
        """Where the bitmap begins: after `advance`, the first offset that is not settled."""
        return self._start

    @property
    def count(self) -> int:
        """How many offsets at or after `start` are settled."""
        return self._count

    @property
    def end(self) -> int:
        """One beyond the highest offset that is settled; nothing is at or after it."""
        return self._end

    def __contains__(self, offset: int) -> bool:
        return offset < self._start or (offset < self._reach and bool(self._cells[offset - self._base]))

    def __repr__(self) -> str:
        return f"Bitmap(start={self._start}, count={self._count}, limit={self._limit})"

    def room(self, offset: int) -> bool:
        """Tell whether `offset` can be settled now."""
        return offset < self._start + self._limit

    def set(self, offset: int) -> None:
        """Settle one offset."""
        if offset < self._start:
            return
        if offset >= self._reach:
            self._extend(offset)
        index = offset - self._base
        if not self._cells[index]:
            self._cells[index] = True
            self._count += 1
            if offset >= self._end:
                self._end = offset + 1

    def set_range(self, span: Range) -> None:
        """Settle every offset of `span`."""
        start = max(span.start, self._start)
        if start >= span.stop:
            return
        if span.stop > self._reach:
            self._extend(span.stop - 1)
        cells = self._cells[start - self._base : span.stop - self._base]
        self._count += cells.size - int(np.count_nonzero(cells))
        cells[:] = True
        self._end = max(self._end, span.stop)

    def set_many(self, offsets: NDArray[np.int64]) -> None:
        """Settle these offsets, in any order, repeated or not."""
        ahead = _int64(offsets)
        ahead = ahead[ahead >= self._start]
        if not ahead.size:
            return
        low, high = int(ahead.min()), int(ahead.max())
        if high >= self._reach:
            self._extend(high)
        # Counting all cells between the extremes, before and after, costs less than finding repeats.
        cells = self._cells[low - self._base : high + 1 - self._base]
        self._count -= int(np.count_nonzero(cells))
        cells[ahead - low] = True
        self._count += int(np.count_nonzero(cells))
        self._end = max(self._end, high + 1)

    def set_new(self, offsets: NDArray[np.int64]) -> None:
        """Settle these offsets, each once and none of which is settled: the same as `set_many`, and faster."""
        if not len(offsets):
            return
        high = int(offsets.max())
        if high >= self._reach:
            self._extend(high)
        self._cells[offsets - self._base] = True
        self._count += len(offsets)
        self._end = max(self._end, high + 1)

    def _extend(self, offset: int) -> None:
        if not self.room(offset):
            raise WindowFull(offset, self._start, self._limit)
        # At least twice what is in use: as many offsets again are settled before the next copy, so that
        # copying costs a constant per offset, and a window that became narrow gives its memory back.
        size = 1 << (2 * (offset - self._start) + 1).bit_length()
        cells = np.zeros(max(size, self._CELLS_MIN), np.bool_)
        live = self._cells[self._start - self._base :]
        cells[: live.size] = live
        self._rebase(cells)

    def advance(self) -> int:
        """Move `start` to the first offset that is not settled, and return it. Costs what it passes."""
        index = self._start - self._base
        if not self._cells[index]:
            # The usual answer while a slow event holds the cursor back, without setting up a search.
            return self._start
        # argmin ends its search at the first False. For one event, the most frequent case, no search is set up: it
        # would let go of the interpreter, and wait to have it again.
        passed = 1 if not self._cells[index + 1] else int(self._cells[index:].argmin())
        self._start += passed
        self._count -= passed
        if self._count == 0 and self._cells.size > self._CELLS_MIN:
            self._rebase(self._no_cells())
        else:
            self._measure()
        return self._start

    def settled_in(self, span: Range) -> NDArray[np.bool_]:
        """Return for each offset of `span` whether it is settled."""
        found = np.zeros(len(span), np.bool_)
        start = min(max(span.start, self._start), span.stop)
        found[: start - span.start] = True
        edge = min(max(start, self._reach), span.stop)
        found[start - span.start : edge - span.start] = self._cells[start - self._base : edge - self._base]
        return found

    def unset_in(self, span: Range) -> RangeSet:
        """Return the offsets of `span` that are not settled."""
        start = max(span.start, self._start)
        if start >= span.stop:
            return RangeSet()
        # No offset from `edge` on is settled.
        edge = min(max(start, self._reach), span.stop)
        unset = np.flatnonzero(~self._cells[start - self._base : edge - self._base])
        result = RangeSet.from_offsets(unset + start)
        result.add(Range(edge, span.stop))
        return result

    def to_bytes(self) -> bytes:
        """Return the settled offsets at or after `start` as bytes that do not hold `start` itself.

        Bit i of byte j, the lowest bit being 0, is offset `start + 8 * j + i`. Zero bytes at the end are
        left out, so that nothing settled is no bytes.
        """
        live = self._cells[self._start - self._base :]
        return np.packbits(live, bitorder="little").tobytes().rstrip(b"\0")

    @classmethod
    def from_bytes(cls, start: int, data: bytes, *, limit: int = LIMIT) -> Self:
        """Read what `to_bytes` wrote for a bitmap at `start`. The bytes may come from anywhere."""
        bitmap = cls(start, limit=limit)
        if not data:
            return bitmap
        if data[-1] == 0:
            raise IntegrityError(f"a bitmap of {len(data):,} bytes ends with a needless zero")
        span = 8 * (len(data) - 1) + data[-1].bit_length()
        if span > min(limit, OFFSET_END - start):
            raise IntegrityError(f"a bitmap at {start} spans {span:,} offsets, the limit is {limit:,}")
        # One more cell than are set at most: the last one never is.
        cells = np.zeros(max(span + 1, cls._CELLS_MIN), np.bool_)
        cells[:span] = np.unpackbits(np.frombuffer(data, np.uint8), count=span, bitorder="little")
        bitmap._count = int(np.count_nonzero(cells))
        bitmap._end = start + span
        bitmap._rebase(cells)
        return bitmap
