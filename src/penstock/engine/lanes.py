"""Lanes: in which order events may be handed over, and which of them stand in the way of others.

An event waits while another one of its lane is held, or an earlier one is delayed or parked. For batches that is
decided for whole pages at once. One by one, where a user's code looks at each event anyway, lanes are queues: so the
next event of a lane is found at once, however many others wait behind slow ones.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.page import DELAYED, FEW, GONE, HELD, READY, VERY_FEW, Page, Some, among
from penstock.engine.pages import Pages
from penstock.offsets import OFFSET_END

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.engine.aside import Aside
    from penstock.engine.messages import Wanted
    from penstock.engine.page import Rows
    from penstock.engine.share import Slots

STALE: Final = 1_024


def _members(lanes: NDArray[np.int64], of: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return which lanes are keys of a mapping."""
    if len(of) <= FEW:
        return among(lanes, np.fromiter(of, np.int64, len(of)))
    return np.fromiter((lane in of for lane in lanes.tolist()), np.bool_, len(lanes))


def _behind(page: Page, rows: Rows, lanes: NDArray[np.int64], first: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return which rows come after the first of their lane, of which `first` has the offset."""
    if len(lanes) <= VERY_FEW:
        indexes = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        offsets = (page.start + row for row in indexes)
        later = (first.get(lane, OFFSET_END) < at for at, lane in zip(offsets, lanes.tolist(), strict=True))
        return np.fromiter(later, np.bool_, len(lanes))
    behind = _members(lanes, first)
    for at in np.flatnonzero(behind).tolist():
        row = rows.start + at if isinstance(rows, slice) else int(rows[at])
        behind[at] = first[int(lanes[at])] < page.start + row
    return behind


class Lanes:
    """The order of what is in memory, and of what waits aside: of each lane, `aside` has the first offset parked."""

    def __init__(self, pages: Pages, aside: Aside, *, slotted: bool = False) -> None:
        self._pages = pages
        self._parked = aside
        self._aside = aside.first
        self._slotted = slotted
        """Whether what is chosen may be limited to some slots."""
        self._queues: Queues | None = None

    def of(self, page: Page, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lanes of these rows."""
        return page.lanes[rows]

    def of_one(self, page: Page, row: int) -> int:
        """Return the lane of one row."""
        return page.lane_of(row)

    def may_park(self, page: Page, lane: int) -> bool:
        """Tell whether an event of this lane may wait aside: one without a key is the whole partition."""
        return lane != page.lane

    def freed(self, lane: int) -> None:
        """Note that less of a lane is parked than was."""
        if self._queues is not None:
            self._queues.look_at(lane)

    # --- choosing -----------------------------------------------------------------------------

    def choose(
        self,
        events_max: int,
        bytes_max: int,
        *,
        singly: bool,
        slots: Slots | None = None,
        until: int | None = None,
        first: bool = True,
    ) -> list[Some]:
        """Return what can be handed over now, in order, only of these slots, and nothing from `until` on.

        There may be several events of a lane, unless they are asked for singly. If `first`, one event is chosen however
        large it is.
        """
        if not self._pages.ready or events_max <= 0:
            return []
        if singly:
            if self._queues is None or self._queues.stale:
                self._queues = Queues(self._pages, self._aside, slotted=self._slotted)
                self._pages.watcher = self._queues
            return self._queues.choose(events_max, bytes_max, slots=slots, until=until, first=first)
        self._queues = self._pages.watcher = None
        return _within(self._free(slots, until, events_max), events_max, bytes_max, first=first)

    def _free(self, slots: Slots | None, until: int | None, events_max: int) -> Iterator[Some]:
        """Yield what nothing stands in the way of, page by page."""
        barred = self._held_lanes(slots) if self._pages.held else None
        delayed = self._first_delayed() if self._pages.delayed else {}
        if barred is None and not delayed and not self._aside:
            yield from _ready(self._pages, slots, until, events_max)
            return
        for free in _ready(self._pages, slots, until, None):
            yield self._of_free_lanes(free, barred, delayed)

    def _of_free_lanes(self, some: Some, barred: NDArray[np.int64] | None, delayed: Mapping[int, int]) -> Some:
        page, rows = some.page, some.rows
        if page.keyless:
            indexes = some.indexes
            if barred is not None and (barred == page.lane).any():
                return Some(page, indexes[:0])
            for first in (delayed, self._aside):
                if page.lane in first:
                    indexes = indexes[indexes < first[page.lane] - page.start]
            return Some(page, indexes)
        if barred is None and not delayed and self._parked.wanted is not None:
            behind = self._behind_parked(page, self._parked.wanted)
            if not len(behind):
                return some
            free = np.ones(page.size, np.bool_)
            free[behind] = False
            return Some(page, some.indexes[free[rows]])
        lanes = page.lanes[rows]
        stuck = np.zeros(len(lanes), np.bool_) if barred is None else np.isin(lanes, barred)
        for first in (delayed, self._aside):
            if first and len(lanes):
                stuck |= _behind(page, rows, lanes, first)
        # A slice of a page, or a part of it, costs much less than the same rows one by one.
        return Some(page, some.indexes[~stuck]) if stuck.any() else some

    def _held_lanes(self, slots: Slots | None = None) -> NDArray[np.int64] | None:
        """Return the lanes that are in hand, if there are any; a lane is of one slot, so that others do not matter."""
        found = []
        for page in self._pages:
            if not page.held:
                continue
            held = page.held_of(slots)
            if held.size:
                found.append(np.array([page.lane], np.int64) if page.keyless else page.lanes[held.rows])
        if not found:
            return None
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _first_delayed(self) -> dict[int, int]:
        """Return the first delayed offset of each lane that has one."""
        found: dict[int, int] = {}
        for page in self._pages:
            if page.delayed:
                rows = page.in_state(DELAYED)
                for row, lane in zip(rows.tolist(), page.lanes[rows].tolist(), strict=True):
                    found.setdefault(lane, page.start + row)
        return found

    # --- standing in the way ------------------------------------------------------------------

    def bars(self, lanes: Iterable[int]) -> dict[int, int]:
        """Return from which offset on parked events of these lanes have to wait for what is in memory."""
        wanted = np.unique(np.fromiter(lanes, np.int64))
        found: dict[int, int] = {}
        for page in self._pages:
            if not page.open or (page.keyless and page.lane not in wanted):
                continue
            rows = page.in_state(READY, HELD, DELAYED)
            rows = rows[np.isin(page.lanes[rows], wanted)]
            lowest, at = np.unique(page.lanes[rows], return_index=True)
            for lane, offset in zip(lowest.tolist(), (rows[at] + page.start).tolist(), strict=True):
                found.setdefault(lane, offset)
            # A hand may hold several of a lane: nothing of it is handed over until it holds none.
            found.update(dict.fromkeys(page.lanes[rows[page.state[rows] == HELD]].tolist(), -1))
        return found

    def behind_parked(self, some: Some) -> Some:
        """Return those that wait behind a parked event of their lane."""
        page, rows, wanted = some.page, some.rows, self._parked.wanted
        if not some.size or page.keyless:
            return Some(page, np.zeros(0, np.int64))
        if wanted is not None:
            # Of the whole page: what is behind a parked event is to be parked, whenever it came.
            indexes = self._behind_parked(page, wanted)
        else:
            indexes = some.indexes[_behind(page, rows, page.lanes[rows], self._aside)]
        if not len(indexes):  # as a rule there are none, and then nobody has to look at states
            return Some(page, indexes)
        state = page.state[indexes]
        return Some(page, indexes[(state == READY) | (state == DELAYED)])

    def _behind_parked(self, page: Page, wanted: Wanted) -> NDArray[np.int64]:
        """Return the rows of a page that come after the first of their lane that is parked, whatever became of them."""
        _, rows, lanes = page.find_lanes(wanted)
        return rows[_behind(page, rows, lanes, self._aside)] if len(rows) else rows

    def all_behind_parked(self) -> list[Some]:
        """Return all that wait behind a parked event of their lane."""
        found = [self.behind_parked(Some(page, slice(0, page.size))) for page in self._pages if not page.keyless]
        return [some for some in found if some.size]

    def blocked(self, limit: int, slots: Slots | None = None) -> list[Some]:
        """Return delayed events, and ready ones that wait behind others: the first of them, none without a key.

        With `slots`, all of other slots, too: they wait for another consumer.
        """
        barred = self._held_lanes() if self._pages.held else None
        delayed = self._first_delayed()
        found = []
        for page in self._pages:
            if limit <= 0:
                break
            if page.keyless or not (page.ready or page.delayed):
                continue
            rows = page.in_state(READY, DELAYED)
            lanes = page.lanes[rows]
            stuck = page.state[rows] == DELAYED
            if barred is not None:
                stuck |= np.isin(lanes, barred)
            for first in (delayed, self._aside):
                if first:
                    stuck |= _behind(page, rows, lanes, first)
            if slots is not None:
                stuck |= ~slots[page.slots[rows]]
            stuck &= lanes != page.lane
            rows = rows[stuck][:limit]
            if len(rows):
                found.append(Some(page, rows))
                limit -= len(rows)
        return found


def _ready(pages: Pages, slots: Slots | None, until: int | None, events_max: int | None) -> Iterator[Some]:
    """Yield what is ready of these slots, page by page, and nothing from `until` on.

    Of a page it may be the first of it, if these are more than so many.
    """
    least = None if events_max is None else events_max + 1
    for page in pages:
        if until is not None and page.start >= until:
            return
        if page.ready:
            ready = page.ready_of(slots, least)
            if until is not None and until < page.stop:
                rows = ready.indexes
                ready = Some(page, rows[rows < until - page.start])
            yield ready


def _within(free: Iterable[Some], events_max: int, bytes_max: int, *, first: bool) -> list[Some]:
    """Return as much of this as may be handed over; the first event may be, however large it is."""
    chosen: list[Some] = []
    left = events_max
    for each in free:
        if not each.size:
            continue
        if chosen:
            bytes_max -= chosen[-1].nbytes_max  # not sooner: as a rule one page is enough, and nobody has to know
            if each.size > left <= events_max // 2:
                break  # rather less now: a page as a whole costs much less than two parts of it
        some = _limited(each, left, bytes_max, first=first and not chosen)
        if some.size:
            chosen.append(some)
        left -= some.size
        if some.size < each.size or left <= 0:
            break  # what comes next might be small enough, but it would overtake
    return [run for some in chosen for run in some.in_runs()]


def _limited(some: Some, events_max: int, bytes_max: int, *, first: bool) -> Some:
    page, rows = some.page, some.rows
    count = min(some.size, events_max)
    if page.nbytes > bytes_max and count:
        count = int(np.searchsorted(np.cumsum(page.sizes[rows][:count]), bytes_max, side="right"))
        count = max(count, 1) if first else count
    if count == some.size:
        return some
    if isinstance(rows, slice):
        return Some(page, slice(rows.start, rows.start + count))
    return Some(page, rows[:count])


class Unordered:
    """The same where there is no order: every event is a lane of its own, and stands in nobody's way."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages

    def of(self, page: Page, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lanes of these rows."""
        return rows + page.start

    def of_one(self, page: Page, row: int) -> int:
        """Return the lane of one row."""
        return page.start + row

    def may_park(self, _page: Page, _lane: int) -> bool:
        """Tell whether an event of this lane may wait aside."""
        return True

    def freed(self, lane: int) -> None:
        """Do nothing: nobody waits for it."""

    def choose(
        self,
        events_max: int,
        bytes_max: int,
        *,
        singly: bool,
        slots: Slots | None = None,
        until: int | None = None,
        first: bool = True,
    ) -> list[Some]:
        """Return what can be handed over now, and nothing from `until` on; see `Lanes.choose`."""
        ready = _ready(self._pages, None, until, events_max)
        return _within(ready, events_max, bytes_max, first=first) if events_max > 0 else []

    def bars(self, _lanes: Iterable[int]) -> dict[int, int]:
        """Return from which offset on parked events have to wait for what is in memory: from none."""
        return {}

    def behind_parked(self, some: Some) -> Some:
        """Return those that wait behind a parked event: none."""
        return Some(some.page, np.zeros(0, np.int64))

    def all_behind_parked(self) -> list[Some]:
        """Return the same of all."""
        return []

    def blocked(self, limit: int, _slots: Slots | None = None) -> list[Some]:
        """Return delayed events: nothing else waits."""
        found = []
        for page in self._pages:
            rows = page.in_state(DELAYED)[: max(limit, 0)] if page.delayed else ()
            if len(rows):
                found.append(Some(page, np.asarray(rows)))
                limit -= len(rows)
        return found


class Queues:
    """The open events of each lane, as a queue; and which of them may be first of theirs and ready.

    An offset becomes a *candidate* whenever something happens after which it might be handed over: it came and is the
    first of its lane, the one before it went, it was given back. Choosing looks at candidates only, lowest first, and
    drops those that must wait after all: whatever they wait for makes them candidates again.
    """

    def __init__(self, pages: Pages, aside: Mapping[int, int], *, slotted: bool = False) -> None:
        self._pages = pages
        self._aside = aside
        self._queues: dict[int, deque[int]] = {}
        self._held: dict[int, int] = {}
        self._slotted = slotted
        self._candidates: dict[int, list[int]] = {}
        """By slot, lowest first; all under 0 if slots do not matter."""
        self._slot_of: dict[int, int] = {}
        """Of lanes that have a queue, if slots matter."""
        self._chosen: set[int] = set()
        self._gone = 0
        """How many in the queues are gone; a first one never is."""
        for page in pages:
            self._take(page, page.in_state(READY, HELD, DELAYED))
            for lane in page.lanes[page.in_state(HELD)].tolist() if page.held else ():
                self._held[lane] = self._held.get(lane, 0) + 1

    @property
    def stale(self) -> bool:
        """Whether most of what is in the queues is gone: then they are made anew."""
        return self._gone > STALE + self._pages.open

    # --- what happens -------------------------------------------------------------------------

    def came(self, page: Page, first: int) -> None:
        """Take new events, from this row of a page on."""
        self._take(page, np.arange(first, page.size))

    def _take(self, page: Page, rows: NDArray[np.int64]) -> None:
        queues = self._queues
        if self._slotted:
            self._slot_of.update(zip(page.lanes[rows].tolist(), page.slots[rows].tolist(), strict=True))
        for offset, lane in zip((rows + page.start).tolist(), page.lanes[rows].tolist(), strict=True):
            queue = queues.get(lane)
            if queue is None:
                queues[lane] = deque((offset,))
                self._push(lane, offset)
            else:
                queue.append(offset)

    def _push(self, lane: int, offset: int) -> None:
        heapq.heappush(self._candidates.setdefault(self._slot_of.get(lane, 0), []), offset)

    def moved(self, page: Page, row: int, before: int, to: int) -> None:
        """Follow an event to another state."""
        lane, offset = int(page.lanes[row]), page.start + row
        if to == HELD:
            self._held[lane] = self._held.get(lane, 0) + 1
            self._chosen.discard(offset)
            return
        if before == HELD:
            self._let_go(lane)
        queue = self._queues.get(lane)
        if to == GONE and (queue is None or queue[0] != offset):
            self._gone += 1
        self.look_at(lane)

    def _let_go(self, lane: int) -> None:
        left = self._held[lane] - 1
        if left:
            self._held[lane] = left
        else:
            del self._held[lane]

    def look_at(self, lane: int) -> None:
        """Let the first event of a lane be a candidate."""
        queue = self._queues.get(lane)
        if queue is None:
            return
        state_of = self._pages.state_of
        if state_of(queue[0]) == GONE:
            queue.popleft()
            while queue and state_of(queue[0]) == GONE:
                queue.popleft()
                self._gone -= 1
            if not queue:
                del self._queues[lane]
                self._slot_of.pop(lane, None)
                return
        self._push(lane, queue[0])

    # --- choosing -----------------------------------------------------------------------------

    def choose(
        self, events_max: int, bytes_max: int, *, slots: Slots | None, until: int | None, first: bool
    ) -> list[Some]:
        """Return what can be handed over, one of a lane at most; see `Lanes.choose`."""
        for offset in self._chosen:  # by the last call, and not handed over after it
            at = self._pages.at(offset)
            if at is not None:
                self._push(int(at[0].lanes[at[1]]), offset)
        self._chosen.clear()
        rows: dict[Page, list[int]] = {}
        left = events_max
        heaps = self._candidates
        tops = [(heap[0], slot) for slot, heap in heaps.items() if heap and (slots is None or slots[slot])]
        heapq.heapify(tops)
        while tops and left:
            offset, slot = tops[0]
            if until is not None and offset >= until:
                break
            at = None if offset in self._chosen else self._free(offset)
            if at is not None:
                page, row = at
                bytes_max -= int(page.sizes[row])
                if bytes_max < 0 and not (first and left == events_max):
                    break
                left -= 1
                rows.setdefault(page, []).append(row)
                self._chosen.add(offset)
            heap = heaps[slot]
            heapq.heappop(heap)
            if heap:
                heapq.heapreplace(tops, (heap[0], slot))
            else:
                heapq.heappop(tops)
        return [Some(page, np.array(found, np.int64)) for page, found in rows.items()]

    def _free(self, offset: int) -> tuple[Page, int] | None:
        """Return where an event is, if it may be handed over."""
        at = self._pages.at(offset)
        if at is None or at[0].state[at[1]] != READY:
            return None
        lane = int(at[0].lanes[at[1]])
        if self._queues[lane][0] != offset or lane in self._held or self._aside.get(lane, offset) < offset:
            return None
        return at
