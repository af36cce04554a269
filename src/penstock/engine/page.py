"""A page: events in memory, as columns of states beside the columns of their chunks.

It is a chunk with a state and a hand for each of its events; or several small chunks that follow each other, so that a
log which is read event by event does not become a thousand pages. As long as all that is known of a large one is what
became of its parts, it has no columns.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.engine.division import Parts, undivided
from penstock.engine.messages import About, Found
from penstock.offsets import OFFSET_END, Range

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.engine.messages import Chunk, Offsets, Wanted
    from penstock.engine.share import Slots

PARKED: Final = 0
READY: Final = 1
HELD: Final = 2
DELAYED: Final = 3
GONE: Final = 4
"""Settled, or parked: the page knows nothing more of it."""

JOINED_EVENTS_MAX: Final = 1_024
JOINED_BYTES_MAX: Final = 1 << 18
"""Chunks are joined to a page of at most this size: small, because it keeps all of them in memory until it goes."""

RUN_MIN: Final = 512
"""Rows of at least so many that follow each other, on the average, are better handled as slices."""

QUIET: Final = 500
"""Of so many numpy does not let go of the interpreter, to wait until it has it again: what is looked for among many is
looked for in so many at a time, if few are wanted."""

FEW: Final = 64
"""numpy finds so few lanes faster than Python does …"""
VERY_FEW: Final = 4
"""… and so few are looked for one by one."""

Rows: TypeAlias = "slice | NDArray[np.int64]"


def among(lanes: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which lanes are among a few."""
    if len(wanted) > VERY_FEW:
        return np.isin(lanes, wanted)
    found = np.zeros(len(lanes), np.bool_)
    for lane in wanted.tolist():
        found |= lanes == lane
    return found


def find_lanes(lanes: NDArray[np.int64], wanted: Wanted) -> Found:
    """Return which of these lanes are wanted."""
    rows = np.flatnonzero(among(lanes, wanted.lanes))
    return Found(wanted, rows, lanes[rows])


def _indexes(rows: Rows) -> NDArray[np.int64]:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


class Some(NamedTuple):
    """Some rows of a page, ascending."""

    page: Page
    rows: Rows
    part: int | None = None
    """Which part of the page they are, if they are exactly that."""

    @property
    def size(self) -> int:
        """How many."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)

    @property
    def offsets(self) -> Offsets:
        """Their offsets."""
        if self.part is not None and self.page.parts is not None:
            return self.page.parts.divided.offsets[self.part]
        rows, start = self.rows, self.page.start
        return Range(start + rows.start, start + rows.stop) if isinstance(rows, slice) else rows + start

    @property
    def indexes(self) -> NDArray[np.int64]:
        """The rows one by one."""
        return _indexes(self.rows)

    @property
    def nbytes(self) -> int:
        """How many bytes they are; of a page whose events nobody has measured, about how many."""
        if not self.page.measured:
            return self.page.nbytes * self.size // self.page.size
        return self.page.nbytes_of(self.rows)

    @property
    def nbytes_max(self) -> int:
        """How many bytes they are at the most."""
        return self.nbytes if self.part is None else self.page.nbytes

    def in_runs(self) -> list[Some]:
        """Return the same as a few long slices, if it is that: each costs much less than its rows one by one."""
        rows = self.rows
        if isinstance(rows, slice) or len(rows) < RUN_MIN or self.part is not None:
            return [self]
        ends = np.flatnonzero(rows[1:] != rows[:-1] + 1)
        if (len(ends) + 1) * RUN_MIN > len(rows):
            return [self]
        edges = [0, *(ends + 1).tolist(), len(rows)]
        return [Some(self.page, slice(int(rows[a]), int(rows[b - 1]) + 1)) for a, b in itertools.pairwise(edges)]


class Stretch(NamedTuple):
    """Some rows of one chunk, counted from its start, and their offsets."""

    chunk: Chunk
    rows: Rows
    offsets: Offsets

    @property
    def indexes(self) -> NDArray[np.int64]:
        """The rows one by one."""
        return _indexes(self.rows)


class Page:
    """Chunks that follow each other, and what became of their events."""

    __slots__ = (
        "_appended_at",
        "_expiries",
        "_found",
        "_hand",
        "_lanes",
        "_ready_from",
        "_sizes",
        "_slots",
        "_state",
        "chunks",
        "delayed",
        "expires_at",
        "gone_bytes",
        "held",
        "keyless",
        "lane",
        "narrowed",
        "nbytes",
        "open_bytes",
        "parts",
        "ready",
        "size",
        "slot",
        "start",
        "stop",
    )

    def __init__(self, chunk: Chunk, lane: int, slot: int) -> None:
        self.chunks = [chunk]
        self.lane, self.slot = lane, slot
        """The lane of events without a key, and their slot."""
        self.keyless = chunk.keyless
        self.start, self.stop = chunk.span.start, chunk.span.stop
        self.nbytes = self.open_bytes = chunk.nbytes
        self.size = self.ready = self.stop - self.start
        self.held = self.delayed = 0
        self.parts: Parts | None = None
        """What became of its parts, as long as that is all there is to know."""
        if chunk.divided is None and self.size < RUN_MIN:
            self._make_columns()
        else:
            self.parts = Parts(chunk.divided or undivided(chunk.span), READY)
        self.expires_at = OFFSET_END if chunk.expiries is None else int(chunk.expiries.min())
        """When the first of them expires."""
        self.narrowed = False
        self.gone_bytes = 0
        """Of events that are gone, and still in memory."""
        self._found = chunk.found
        self._lanes: NDArray[np.int64] | None = None
        self._slots: NDArray[np.int64] | None = None
        self._sizes: NDArray[np.int64] | None = None
        self._appended_at: NDArray[np.int64] | None = None
        self._expiries: NDArray[np.int64] | None = None

    @property
    def open(self) -> int:
        """How many are not gone."""
        return self.ready + self.held + self.delayed

    # --- the state of each event, or of each part ---------------------------------------------

    def _make_columns(self) -> None:
        self._state = np.full(self.size, READY, np.uint8)
        self._hand = np.zeros(self.size, np.int64)
        self._ready_from = 0  # what is before it is not ready

    @property
    def state(self) -> NDArray[np.uint8]:
        """The state of each event; from now on, that is what is known of it."""
        if self.parts is not None:
            self._dissolve(self.parts)
        return self._state

    @property
    def hand(self) -> NDArray[np.int64]:
        """Which hand had each event last; 0 if none, or if it was given back."""
        if self.parts is not None:
            self._dissolve(self.parts)
        return self._hand

    def _dissolve(self, parts: Parts) -> None:
        self._make_columns()
        for rows, state, hand in zip(parts.divided.rows, parts.states, parts.hands, strict=True):
            if state != READY:
                self._state[rows] = state
            if hand:
                self._hand[rows] = hand
        self.parts = None

    def part_of(self, slots: Slots | None) -> int | None:
        """Return which part of it the events of these slots are, or all of them, if they are one."""
        return None if self.parts is None else self.parts.number(slots)

    def ready_of(self, slots: Slots | None, least: int | None = None) -> Some:
        """Return what is ready of these slots, or of all; only the first of it, if no more than so many are wanted."""
        part = self.part_of(slots)
        if self.parts is not None and part is not None:
            return self._part(part) if self.parts.states[part] == READY else Some(self, slice(0, 0))
        state, size = self.state, self.size
        if slots is None and self.ready == size - self._ready_from:
            return Some(self, slice(self._ready_from, size))
        step = QUIET if least is not None and least <= QUIET else size
        found: list[NDArray[np.int64]] = []
        count = 0
        for at in range(self._ready_from, size, step):
            ready = state[at : at + step] == READY
            if slots is not None:
                # Of all at once: to choose from a choice costs more than from all.
                ready &= slots[self.slots[at : at + step]]
            rows = np.flatnonzero(ready)
            if slots is None and not found:
                self._ready_from = at + (int(rows[0]) if len(rows) else len(ready))
            if len(rows):
                found.append(rows + at)
                count += len(rows)
                if least is not None and count >= least:
                    break
        return Some(self, _joined(found) if found else slice(0, 0))

    def has_ready(self, slots: Slots | None) -> bool:
        """Whether something is ready of these slots, or of all; something is ready of it."""
        part = None if slots is None else self.part_of(slots)
        if self.parts is not None and part is not None:
            return self.parts.states[part] == READY and len(self.parts.divided.offsets[part]) > 0
        return slots is None or self.ready_of(slots, 1).size > 0

    def held_of(self, slots: Slots | None) -> Some:
        """Return what is held of these slots, or of all."""
        part = self.part_of(slots)
        if self.parts is not None and part is not None:
            return self._part(part) if self.parts.states[part] == HELD else Some(self, slice(0, 0))
        rows = self.in_state(HELD)
        return Some(self, rows if slots is None else rows[slots[self.slots[rows]]])

    def foreign(self, mine: Slots) -> Some | None:
        """Return what is not of these slots, if it is known by parts."""
        division = None if self.parts is None else self.parts.divided.division
        if division is None or not np.array_equal(division.own, mine):
            return None
        return self._part(len(division.masks))

    def _part(self, part: int) -> Some:
        assert self.parts is not None
        return Some(self, self.parts.divided.rows[part], part)

    # --- chunks and their columns -------------------------------------------------------------

    def fits(self, chunk: Chunk) -> bool:
        """Tell whether a chunk can be joined to this page."""
        return (
            chunk.span.start == self.stop
            and self.size + len(chunk.span) <= JOINED_EVENTS_MAX
            and self.nbytes + chunk.nbytes <= JOINED_BYTES_MAX
            and not self.narrowed
        )

    def join(self, chunk: Chunk) -> None:
        """Take a chunk that follows, and fits."""
        count = len(chunk.span)
        self.chunks.append(chunk)
        self.keyless &= chunk.keyless
        self.stop = chunk.span.stop
        self.nbytes += chunk.nbytes
        self.open_bytes += chunk.nbytes
        self._state = np.concatenate((self.state, np.full(count, READY, np.uint8)))
        self._hand = np.concatenate((self.hand, np.zeros(count, np.int64)))
        self.size += count
        self.ready += count
        if chunk.expiries is not None:
            self.expires_at = min(self.expires_at, int(chunk.expiries.min()))
        self._found = None
        # Columns that are in use grow; those that are not are made when they are.
        if self._lanes is not None:
            self._lanes = np.concatenate((self._lanes, chunk.lanes(self.lane)))
        if self._slots is not None:
            self._slots = np.concatenate((self._slots, chunk.slots(self.slot)))
        if self._sizes is not None:
            self._sizes = np.concatenate((self._sizes, chunk.sizes()))
        if self._appended_at is not None:
            self._appended_at = np.concatenate((self._appended_at, chunk.appended_at))
        if self._expiries is not None:
            self._expiries = np.concatenate((self._expiries, _expiries(chunk)))

    @property
    def lanes(self) -> NDArray[np.int64]:
        """The lane of each event."""
        if self._lanes is None:
            self._lanes = _joined([chunk.lanes(self.lane) for chunk in self.chunks])
        return self._lanes

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slot of each event."""
        if self._slots is None:
            self._slots = _joined([chunk.slots(self.slot) for chunk in self.chunks])
        return self._slots

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of each event."""
        if self._sizes is None:
            one = self.size == 1  # as those are that wait for a parked one
            self._sizes = np.array([self.nbytes]) if one else _joined([chunk.sizes() for chunk in self.chunks])
        return self._sizes

    @property
    def appended_at(self) -> NDArray[np.int64]:
        """When each event was appended."""
        if self._appended_at is None:
            self._appended_at = _joined([chunk.appended_at for chunk in self.chunks])
        return self._appended_at

    @property
    def appended_between(self) -> tuple[int, int]:
        """When the first of them was appended, and when the last."""
        if len(self.chunks) == 1:
            return self.chunks[0].appended_between
        firsts, lasts = zip(*(chunk.appended_between for chunk in self.chunks), strict=True)
        return min(firsts), max(lasts)

    @property
    def expiries(self) -> NDArray[np.int64]:
        """When each event expires."""
        if self._expiries is None:
            self._expiries = _joined([_expiries(chunk) for chunk in self.chunks])
        return self._expiries

    def find_lanes(self, wanted: Wanted) -> Found:
        """Return the rows of a few lanes; they are looked for once."""
        if self._found is None or self._found.wanted is not wanted:
            self._found = find_lanes(self.lanes, wanted)
        return self._found

    def lane_of(self, row: int) -> int:
        """Return the lane of one event, without finding out all others' if it was looked for."""
        if self._lanes is None and self._found is not None:
            at = int(np.searchsorted(self._found.rows, row))
            if at < len(self._found.rows) and self._found.rows[at] == row:
                return int(self._found.lanes[at])
        return int(self.lanes[row])

    def about(self, row: int) -> About:
        """Return what decides whose one event is."""
        chunk = self.chunks[bisect_right(self.chunks, self.start + row, key=_start) - 1]
        if chunk.about is None:
            return About(None, int(self.slots[row]))
        return chunk.about(self.start + row - chunk.span.start)

    @property
    def measured(self) -> bool:
        """Whether the size of each event is known, or quickly is; of large pages it takes the event loop too long."""
        return self._sizes is not None or self.size < RUN_MIN

    def nbytes_of(self, rows: Rows) -> int:
        """Return how many bytes these are."""
        if isinstance(rows, slice) and rows.stop - rows.start == self.size:
            return self.nbytes
        return int(self.sizes[rows].sum())

    def in_chunks(self, some: Some) -> Iterator[Stretch]:
        """Return these rows of it chunk by chunk."""
        if len(self.chunks) == 1:
            yield Stretch(self.chunks[0], some.rows, some.offsets)
            return
        indexes = some.indexes
        starts = np.array([chunk.span.start - self.start for chunk in self.chunks])
        chunk_of = np.searchsorted(starts, indexes, side="right") - 1
        for at in np.unique(chunk_of).tolist():
            mine = indexes[chunk_of == at]
            yield Stretch(self.chunks[at], mine - starts[at], mine + self.start)

    def narrow(self) -> int:
        """Give up the memory of what is gone; returns how many bytes more than was said are open."""
        self.narrowed = True
        self.gone_bytes = 0
        open_ = Some(self, self.in_state(READY, HELD, DELAYED))
        left = {stretch.chunk.span.start: stretch.indexes for stretch in self.in_chunks(open_)}
        # Columns that were not looked at so far would be made of the payloads, and keep all of them.
        for chunk in self.chunks:
            chunk.lanes(self.lane)
            chunk.slots(self.slot)
            chunk.sizes()
            chunk.narrow(left.get(chunk.span.start))
        said, self.open_bytes = self.open_bytes, int(self.sizes[open_.rows].sum())
        return self.open_bytes - said

    # --- states -------------------------------------------------------------------------------

    def in_state(self, *states: int) -> NDArray[np.int64]:
        """Return the rows that are in one of these states."""
        found = self.state == states[0]
        for state in states[1:]:
            found |= self.state == state
        return np.flatnonzero(found)

    def move(self, some: Some, to: int) -> None:
        """Let these rows of it, all of which are open, be in another state."""
        rows, part, count = some.rows, some.part, some.size
        if part is not None and self.parts is not None:
            states = self.parts.states
            held, delayed = count * (states[part] == HELD), count * (states[part] == DELAYED)
            states[part] = to
        else:
            before = self.state[rows]
            held = _count(before, HELD, self.held, self.size)
            delayed = _count(before, DELAYED, self.delayed, self.size)
            self.state[rows] = to
            self._note_ready(rows, to)
        self.held -= held
        self.delayed -= delayed
        self.ready -= count - held - delayed
        if to == READY:
            self.ready += count
        elif to == HELD:
            self.held += count
        elif to == DELAYED:
            self.delayed += count

    def move_one(self, row: int, to: int) -> int:
        """Let one event be in another state; returns in which one it was. Nothing is counted."""
        before = int(self.state[row])
        self.state[row] = to
        if to == READY:
            self._ready_from = min(self._ready_from, row)
        return before

    def _note_ready(self, rows: Rows, to: int) -> None:
        if isinstance(rows, slice):
            if to == READY:
                self._ready_from = min(self._ready_from, rows.start)
            elif rows.start <= self._ready_from < rows.stop:
                self._ready_from = rows.stop
        elif to == READY and len(rows):
            self._ready_from = min(self._ready_from, int(rows[0]))

    def give(self, some: Some, hand: int, *, singly: bool) -> None:
        """Let these rows of it be in a hand, or each in one of its own, of which this is the first."""
        if some.part is not None and self.parts is not None and not singly:
            self.parts.hands[some.part] = hand
        else:
            self.hand[some.rows] = np.arange(hand, hand + some.size) if singly else hand


def _count(states: NDArray[np.uint8], state: int, of_page: int, size: int) -> int:
    """Return how many of these are in a state, in which so many of the whole page are."""
    if of_page in {0, size}:
        return of_page and len(states)
    return int(np.count_nonzero(states == state))


def _start(chunk: Chunk) -> int:
    return chunk.span.start


def _expiries(chunk: Chunk) -> NDArray[np.int64]:
    return np.full(len(chunk.span), OFFSET_END, np.int64) if chunk.expiries is None else chunk.expiries


def _joined(columns: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
