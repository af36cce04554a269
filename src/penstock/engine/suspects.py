"""Suspects: what may have killed the process that had the shard before.

A shard that was not given back leaves events behind that were in somebody's hands. One of them may be what ended the
process, and would end the next one, too, and so for ever. So they are handed over apart from everything else, and
that it is tried is written *before* each is handed over:

* first in groups. Each event of a group is marked, by attempts of 0 (a parked row, by the due time `MARKED`);
* should the process die again, the marked ones are what was in its hands then. They come one at a time, and alone,
  each with one more attempt written first. So the one that kills runs out of attempts, and nobody else is blamed.

One more death than with single events from the beginning, and a sixty-fourth of the commits.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.aside import FETCH_MAX
from penstock.engine.page import Some
from penstock.engine.work import Choice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.engine.aside import Waiting
    from penstock.engine.messages import Ask, Row, Step
    from penstock.engine.page import Page
    from penstock.engine.share import Slots
    from penstock.engine.work import Work

GROUP: Final = 64
MARKED: Final = 1
"""The due time of a parked row that was handed over in a group of suspects."""
ANY_BYTES: Final = 1 << 62


class Suspects:
    """What is left to be tried, and which of it may be handed over now."""

    def __init__(self, work: Work, until: int) -> None:
        self._work = work
        self.until = until
        """Unsettled events below this offset are suspects …"""
        self._rows = set(work.aside.due_by(work.now.wall_us))
        """… and these rows that wait aside."""
        self._granted: set[int] = set()
        self._asked: dict[int, int] = {}
        self._asked_rows: dict[int, Row] = {}

    def choose(self, ask: Ask) -> Choice:
        """Return what may be handed over now: it is written that it is tried."""
        granted = self._granted
        if not granted:
            return Choice([], [])
        slots = self._work.share.offered(ask.slots)
        rows = self._rows_in_turn(granted, slots, singly=ask.singly)[: ask.events_max]
        left = ask.events_max - len(rows)
        somes = []
        chosen = self._work.lanes.choose(GROUP, ask.bytes_max, singly=ask.singly, slots=slots, until=self.until)
        for page, rows_in_turn in self._in_turn(chosen):
            mine = rows_in_turn[:left]
            left -= len(mine)
            if mine:
                somes.append(Some(page, np.array(mine, np.int64)))
        granted.difference_update(waiting.row.offset for waiting in rows)
        for some in somes:
            granted.difference_update((some.indexes + some.page.start).tolist())
        return Choice(rows, somes)

    def ask(self, ask: Ask, *, all_read: bool) -> bool:
        """Mark the next group, and wait until that is written; False if all are through."""
        work, singly = self._work, ask.singly
        if self._asked or self._asked_rows or work.in_flight:
            return True
        if self._granted and ask.slots is not None and self._are_for_others(self._granted, singly=singly):
            return True
        # Whatever is granted now has gone in another way: it expired, or its lane waits for one that failed.
        self._granted.clear()
        slots = work.share.offered(ask.slots)
        if rows := self._rows_in_turn(self._rows, slots, singly=singly):
            self._mark_rows(rows[:GROUP])
            return True
        somes = work.lanes.choose(GROUP, ANY_BYTES, singly=singly, slots=slots, until=self.until)
        if somes:
            self._mark((somes[0].indexes + somes[0].page.start).tolist())
            return True
        if ask.slots is not None and self._are_for_others(None, singly=singly):
            return True
        return not all_read or work.retries_soon or work.aside.fetches(self._rows)

    def _are_for_others(self, granted: set[int] | None, *, singly: bool) -> bool:
        """Tell whether another consumer has suspects to try: those that are granted, or any."""
        slots = self._work.share.offered(None)
        if self._rows_in_turn(self._rows if granted is None else granted, slots, singly=singly):
            return True
        somes = self._work.lanes.choose(GROUP, ANY_BYTES, singly=singly, slots=slots, until=self.until)
        return bool(somes) if granted is None else any(rows for _, rows in self._in_turn(somes))

    def _rows_in_turn(self, wanted: set[int], slots: Slots | None, *, singly: bool) -> list[Waiting]:
        """Return rows that are wanted and can be handed over, none after another of its lane that is not wanted."""
        found: list[Waiting] = []
        passed: set[int] = set()
        for waiting in self._work.aside.choose(FETCH_MAX, ANY_BYTES, self._work.lanes, singly=singly, slots=slots):
            row = waiting.row
            if row.offset not in wanted:
                passed.add(row.lane)
            elif row.replay or row.lane not in passed:
                found.append(waiting)
        return found

    def _in_turn(self, somes: list[Some]) -> Iterator[tuple[Page, list[int]]]:
        """Yield the rows that are granted, and not after others of their lane that are not, in whichever page."""
        passed: set[int] = set()
        for some in somes:
            page, rows = some.page, some.indexes
            found: list[int] = []
            for row, lane in zip(rows.tolist(), self._work.lanes.of(page, rows).tolist(), strict=True):
                if page.start + row not in self._granted:
                    passed.add(lane)
                elif lane not in passed:
                    found.append(row)
            yield page, found

    def _mark(self, offsets: list[int]) -> None:
        work = self._work
        attempts = work.progress.attempts
        if offsets[0] in attempts:
            work.count_ahead(offsets[0])
            self._asked = {offsets[0]: attempts[offsets[0]]}
        else:
            self._asked = dict.fromkeys(takewhile(lambda offset: offset not in attempts, offsets), 0)
            attempts.update(self._asked)
            work.progress.touch()

    def _mark_rows(self, rows: list[Waiting]) -> None:
        if rows[0].row.due_at == MARKED:
            rows = rows[:1]
            self._work.count_row_ahead(rows[0])
        else:
            rows = list(takewhile(lambda waiting: waiting.row.due_at != MARKED, rows))
        for waiting in rows:
            waiting.row = waiting.row._replace(due_at=MARKED)
            self._work.write_row(waiting, "waiting")
        self._asked_rows = {waiting.row.offset: waiting.row for waiting in rows}

    def written(self, step: Step) -> None:
        """Look whether the group that waits is in what was written; then it may be handed over."""
        work = self._work
        if self._asked:
            # What has gone meanwhile, by its expiry, needs no mark any more.
            marks = {offset: mark for offset, mark in self._asked.items() if offset in work.progress.attempts}
            if marks.items() <= step.attempts.items():
                self._granted, self._asked = set(marks), {}
        if self._asked_rows:
            rows = {offset: row for offset, row in self._asked_rows.items() if work.aside.get(offset) is not None}
            if rows.items() <= {park.row.offset: park.row for park in step.parks}.items():
                self._granted, self._asked_rows = set(rows), {}
