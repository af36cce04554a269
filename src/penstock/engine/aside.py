"""Events that wait aside: rows of the store that the cursor has passed, and the order that their lanes still owe them.

A row is handed over when its time has come and nothing of its lane is before it, aside or in memory. A dead letter
that was brought back is exempt from that order, and keeps nobody waiting. Nothing is fetched before it is written.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.messages import Wanted
from penstock.engine.page import FEW, HELD, PARKED, READY, VERY_FEW
from penstock.engine.timers import Timers
from penstock.offsets import Range

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from penstock.engine.lanes import Lanes, Unordered
    from penstock.engine.messages import FetchedRow, Offsets, Park, Row
    from penstock.engine.share import Slots

FETCHING: Final = 5
"""Asked for. The other states of a row are those of an event in memory."""

FETCH_MAX: Final = 100
"""So many rows are fetched at a time, and kept in memory."""
FOLLOWERS_MAX: Final = 50
"""With fewer than so many in memory, those behind the first of a lane are fetched with it; a slow lane leaves room."""
LOOK_MAX: Final = 1_000
"""So many of those that are due are looked at, at a time."""


@dataclass(slots=True)
class Waiting:
    """A row, and where it is."""

    row: Row
    written: bool
    """Whether the store has it like this."""
    state: int = PARKED
    hand: int = 0
    """Which hand had it last; 0 if none, or if it was given back."""
    fetched: FetchedRow | None = None
    acked: bool = False
    """Done, by whoever had it before it was parked: it is fetched only to be written as done."""


class Aside:
    """The waiting rows of a shard."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[int, Waiting] = {}
        self._lanes: defaultdict[int, list[int]] = defaultdict(list)
        self.first: dict[int, int] = {}
        """The lowest offset of each lane that is parked."""
        self._keys: dict[int, Any] = {}
        """The key of each of these lanes; None if it is not known, or if two keys have the same lane."""
        self._wanted: Wanted | None = None
        self._due = Timers()
        self._ripe: dict[int, None] = {}
        """Due, first of their lanes, and not fetched yet; and those that are fetched only to be written as done."""
        self._replays: dict[int, int] = {}
        self._in_hand: set[int] = set()
        self._had: set[int] = set()
        """Handed over, be it now or before they were parked: an ack of them is valid."""
        self._in_memory: set[int] = set()
        self._asked: set[int] = set()
        for row in rows:
            self._put(Waiting(row, written=True))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def held(self) -> int:
        """How many are handed over."""
        return len(self._in_hand)

    @property
    def ready(self) -> int:
        """How many are in memory, to be handed over."""
        return len(self._in_memory)

    @property
    def wanted(self) -> Wanted | None:
        """The lanes that are parked, and perhaps some that were; None if there are none, or more than a few.

        It is the same object until there is one more, or a key that was known is not any more.
        """
        count = len(self.first)
        if not 0 < count <= FEW:
            return None
        if self._wanted is None or len(self._wanted.lanes) > FEW:
            keys = tuple(self._keys.values())
            known = count <= VERY_FEW and None not in keys
            self._wanted = Wanted(np.fromiter(self.first, np.int64, count), keys if known else None)
        return self._wanted

    def fetches(self, offsets: set[int]) -> bool:
        """Tell whether one of these is asked for."""
        return not self._asked.isdisjoint(offsets)

    def get(self, offset: int) -> Waiting | None:
        """Return the row of an offset."""
        return self._rows.get(offset)

    # --- coming and going ---------------------------------------------------------------------

    def park(self, row: Row, hand: int = 0, key: Any = None) -> None:
        """Let a row wait from now on, or wait again, once it is written; `key` is that of its event, if it is known."""
        self._put(Waiting(row, written=False, hand=hand), key)

    def bring_back(self, rows: Iterable[Row]) -> None:
        """Take what somebody else has brought back from the dead, of all rows that wait; what was seen is known."""
        seen = {row.offset: row for row in rows if row.replay}
        known = self._replays
        self._replays = {offset: at for offset, at in known.items() if offset in seen or offset in self._rows}
        for offset, row in seen.items():
            if row.replay > known.get(offset, 0):
                self._put(Waiting(row, written=True))

    def written(self, parks: Iterable[Park]) -> None:
        """Note that rows are in the store; those that have changed meanwhile are not."""
        for park in parks:
            waiting = self._rows.get(park.row.offset)
            if waiting is not None and not waiting.written and waiting.row == park.row:
                waiting.written = True
                self._wait(waiting)

    def _put(self, waiting: Waiting, key: Any = None) -> None:
        row = waiting.row
        before = self._rows.get(row.offset)
        self._forget(row.offset)
        if row.replay:
            self._replays[row.offset] = row.replay
        elif before is None or before.row.replay:
            # After a seek an event may be parked that was brought back from the dead as well: now it has its order.
            insort(self._lanes[row.lane], row.offset)
            self._note_key(row.lane, key)
            self.first[row.lane] = self._lanes[row.lane][0]
        self._rows[row.offset] = waiting
        if waiting.hand:
            self._had.add(row.offset)
        self._wait(waiting)

    def remove(self, offset: int) -> None:
        """Forget a row: it is settled."""
        self._forget(offset)
        row = self._rows.pop(offset).row
        if row.replay:
            return
        lane = self._lanes[row.lane]
        del lane[bisect_left(lane, offset)]
        if lane:
            self.first[row.lane] = lane[0]
            self._wait(self._rows[lane[0]])
        else:
            del self._lanes[row.lane], self.first[row.lane], self._keys[row.lane]

    def _note_key(self, lane: int, key: Any) -> None:
        if lane not in self.first:
            self._keys[lane], self._wanted = key, None
        elif self._keys[lane] is not None and self._keys[lane] != key:
            self._keys[lane], self._wanted = None, None

    def _wait(self, waiting: Waiting) -> None:
        """Have a row fetched when it is due, if it is its turn."""
        row = waiting.row
        if waiting.state != PARKED or not waiting.written:
            return
        if waiting.acked:
            self._ripe[row.offset] = None
        elif row.replay or self.first[row.lane] == row.offset:
            self._due.set(row.offset, row.due_at)

    def _forget(self, offset: int) -> None:
        self._had.discard(offset)
        self._in_hand.discard(offset)
        self._in_memory.discard(offset)
        self._ripe.pop(offset, None)
        self._due.drop(offset)

    # --- fetching -----------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """Return when the next row is due, in microseconds; those that are due already do not count."""
        return self._due.first()

    def due_by(self, wall_us: int) -> Iterator[int]:
        """Return the rows that may have been handed over by this time: the first ones of each lane, as far as due."""
        for lane in self._lanes.values():
            for offset in islice(lane, FETCH_MAX):
                if self._rows[offset].row.due_at > wall_us:
                    break
                yield offset
        for offset, waiting in self._rows.items():
            if waiting.row.replay and waiting.row.due_at <= wall_us:
                yield offset

    def to_fetch(self, wall_us: int, read_position: int) -> tuple[int, ...]:
        """Return rows to fetch: those whose time has come, and what follows them in their lanes.

        What is beyond the read position waits: something of its lane may be before it that was not read yet.
        """
        self._ripe.update(dict.fromkeys(self._due.pop_due(wall_us)))
        room = FETCH_MAX - len(self._in_memory) - len(self._in_hand)
        if not self._ripe or room <= 0 or self._asked:
            return ()
        room_behind = min(FOLLOWERS_MAX - len(self._in_memory), room)
        wanted: dict[int, None] = {}
        for offset in list(islice(self._ripe, LOOK_MAX)):
            if len(wanted) >= room:
                break
            # Whoever cannot be fetched yet stands at the back, so that the others are looked at.
            del self._ripe[offset]
            self._ripe[offset] = None
            waiting = self._rows[offset]
            if waiting.row.due_at > wall_us and not waiting.acked:
                # It was due, and is not any more: the wall clock was set back.
                del self._ripe[offset]
                self._due.set(offset, waiting.row.due_at)
            elif waiting.acked or waiting.row.replay:
                wanted[offset] = None
            else:
                most = max(room_behind - len(wanted), 1)
                wanted.update(islice(self._in_turn(waiting.row.lane, wall_us, read_position), most))
        for offset in wanted:
            self._ripe.pop(offset, None)
            self._due.drop(offset)
            self._rows[offset].state = FETCHING
        self._asked.update(wanted)
        return tuple(wanted)

    def _in_turn(self, lane: int, wall_us: int, read_position: int) -> Iterator[tuple[int, None]]:
        """Return the first rows of a lane that can be fetched, and handed over one after the other."""
        for offset in self._lanes[lane]:
            waiting = self._rows[offset]
            fit = waiting.state == PARKED and waiting.written and offset < read_position
            if not fit or waiting.row.due_at > wall_us:
                return
            yield offset, None

    def take_fetched(self, asked: Iterable[int], rows: Iterable[FetchedRow]) -> tuple[list[Waiting], list[Waiting]]:
        """Take what was fetched; return the rows that are in memory now, and those that the store has no more."""
        found = {row.offset: row for row in rows}
        came, gone = [], []
        for offset in asked:
            self._asked.discard(offset)
            waiting = self._rows.get(offset)
            if waiting is None or waiting.state != FETCHING:
                continue
            if offset in found:
                waiting.state, waiting.fetched = READY, found[offset]
                self._in_memory.add(offset)
                came.append(waiting)
            else:
                gone.append(waiting)
        return came, gone

    def not_fetched(self, asked: Iterable[int]) -> None:
        """Let rows wait on that could not be fetched now."""
        for offset in asked:
            self._asked.discard(offset)
            waiting = self._rows.get(offset)
            if waiting is not None and waiting.state == FETCHING:
                waiting.state = PARKED
                self._wait(waiting)

    def ack_late(self, waiting: Waiting) -> None:
        """Note that a row is done by whoever had it before it was parked; it is fetched, to be written so."""
        waiting.acked = True
        self._wait(waiting)

    # --- handing over -------------------------------------------------------------------------

    def expired(self, wall_us: int) -> list[Waiting]:
        """Return what is in memory, not handed over, and expired."""
        found = []
        for offset in sorted(self._in_memory):
            fetched = self._rows[offset].fetched
            if fetched is not None and fetched.expiry is not None and fetched.expiry <= wall_us:
                found.append(self._rows[offset])
        return found

    def choose(
        self, events_max: int, bytes_max: int, lanes: Lanes | Unordered, *, singly: bool, slots: Slots | None = None
    ) -> list[Waiting]:
        """Return what can be handed over, in order; several of a lane together unless asked for singly."""
        if not self._in_memory or events_max <= 0:
            return []
        offsets = sorted(self._in_memory)
        if slots is not None:
            offsets = [offset for offset in offsets if slots[self._rows[offset].row.slot]]
        bars = lanes.bars(self._rows[offset].row.lane for offset in offsets)
        chosen: list[Waiting] = []
        ahead: defaultdict[int, int] = defaultdict(int)
        for offset in offsets:
            waiting = self._rows[offset]
            if not waiting.row.replay and not self._is_next(waiting.row, bars, ahead, singly=singly):
                continue
            assert waiting.fetched is not None
            bytes_max -= waiting.fetched.nbytes
            if len(chosen) >= events_max or (chosen and bytes_max < 0):
                break
            chosen.append(waiting)
        return chosen

    def _is_next(self, row: Row, bars: Mapping[int, int], ahead: defaultdict[int, int], *, singly: bool) -> bool:
        place = ahead[row.lane]
        if (singly and place) or row.offset > bars.get(row.lane, row.offset):
            return False
        lane = self._lanes[row.lane]
        if place >= len(lane) or lane[place] != row.offset:
            return False
        ahead[row.lane] += 1
        return True

    def hand_over(self, waiting: Waiting, hand: int) -> None:
        """Note that a row is in somebody's hands."""
        waiting.state, waiting.hand = HELD, hand
        self._in_memory.discard(waiting.row.offset)
        self._in_hand.add(waiting.row.offset)
        self._had.add(waiting.row.offset)

    def take_back(self, waiting: Waiting) -> None:
        """Note that it is not any more."""
        waiting.state = READY
        self._in_hand.discard(waiting.row.offset)
        self._in_memory.add(waiting.row.offset)

    def never_had(self, waiting: Waiting) -> None:
        """Let it be as if nobody had ever had it: an ack of it would be a mistake."""
        waiting.hand = 0
        self._had.discard(waiting.row.offset)

    def of_slots(self, slots: Slots) -> list[Waiting]:
        """Return the rows of these slots."""
        return [waiting for waiting in self._rows.values() if slots[waiting.row.slot]]

    def in_hand(self, hand: int | None = None) -> list[Waiting]:
        """Return the rows that a hand holds, or all that are held."""
        found = [self._rows[offset] for offset in sorted(self._in_hand)]
        return found if hand is None else [waiting for waiting in found if waiting.hand == hand]

    def had(self, offsets: Offsets) -> list[Waiting]:
        """Return those of these rows, which are ascending, that were handed over."""
        if not self._had or not len(offsets):
            return []
        had = sorted(self._had)
        if isinstance(offsets, Range):
            return [self._rows[offset] for offset in had if offset in offsets]
        # As a rule these are few, and the others many.
        places = np.minimum(np.searchsorted(offsets, had), len(offsets) - 1)
        return [self._rows[offset] for offset, at in zip(had, offsets[places].tolist(), strict=True) if offset == at]
