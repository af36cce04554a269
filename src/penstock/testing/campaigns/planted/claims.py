"""Bugs in how events are claimed by whoever asks: berths, what they have, and what they give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.engine.page import GONE, HELD, READY, Some
from penstock.engine.reading import Reading
from penstock.engine.work import Work
from penstock.runtime.pool import BerthSeat, Pool, View
from penstock.runtime.seat import Seat
from penstock.settling import claims_of, settle, unsettled
from penstock.testing.campaigns.planted.tools import changed, changed_everywhere, original

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.rows import Cursor, ParkedFilter, Settling


# --- what is in the cursor ------------------------------------------------------------------------


def claimed_twice() -> AbstractContextManager[None]:
    """Forget where claims end, so that the next one begins where the cursor is."""

    def wrong(cursor: Cursor, settling: Settling) -> tuple[Cursor, bytes]:
        after, record = settle(cursor, settling)
        return msgspec.structs.replace(after, stop=None), record

    return changed_everywhere(settle, wrong)


def given_back_to_nobody() -> AbstractContextManager[None]:
    """Forget what is given back."""

    def wrong(cursor: Cursor, settling: Settling) -> tuple[Cursor, bytes]:
        after, record = settle(cursor, settling)
        return msgspec.structs.replace(after, claims={b: c for b, c in after.claims.items() if b}), record

    return changed_everywhere(settle, wrong)


def settled_is_still_claimed() -> AbstractContextManager[None]:
    """Take what a berth has claimed for what is open of it."""
    return changed_everywhere(unsettled, claims_of)


# --- berths ---------------------------------------------------------------------------------------


def berth_of_a_dead_process_taken_for_clean() -> AbstractContextManager[None]:
    """Suspect nothing that a berth was left with."""
    right = original(BerthSeat, "_make_engine")

    def make_engine(self: BerthSeat, *args: Any, clean: bool) -> Any:
        return right(self, *args, clean=True)

    return changed(BerthSeat, _make_engine=make_engine)


def berths_are_left_behind() -> AbstractContextManager[None]:
    """Take over no berth of those who are gone."""
    right = original(Pool, "_look")

    def look(self: Pool) -> View:
        found: View = right(self)
        return found._replace(left=[])

    return changed(Pool, _look=look)


def rows_of_all_berths_loaded() -> AbstractContextManager[None]:
    """Load what waits aside for other berths, too."""
    right = original(Seat, "_filter")

    def wanted(self: Seat, offsets: frozenset[int] | None = None) -> ParkedFilter:
        found: ParkedFilter = right(self, offsets)
        return msgspec.structs.replace(found, slots=None)

    return changed(Seat, _filter=wanted)


def lost_answer_keeps_its_berth() -> AbstractContextManager[None]:
    """Keep a berth for ever whose lease was acquired without an answer, or was given up."""

    async def compare(_self: Pool, _view: View) -> int:
        return 0

    return changed(Pool, _compare=compare)


# --- giving back ----------------------------------------------------------------------------------


def given_back_while_in_hand() -> AbstractContextManager[None]:
    """Give back what handlers are at work on, too."""

    def shed(self: Work) -> None:
        for page in self.pages:
            rows = page.in_state(READY, HELD)
            if len(rows):
                self.pages.move(Some(page, rows), GONE)
                self.progress.free(rows + page.start)

    return changed(Work, shed=shed)


def read_before_it_was_given_back() -> AbstractContextManager[None]:
    """Take what was being read for what is claimed, though it was given back meanwhile."""
    right = original(Reading, "restart")

    def restart(self: Reading, position: int) -> None:
        right(self, position)
        self._abandoned = False

    return changed(Reading, restart=restart)


def attempts_are_given_back_as_none() -> AbstractContextManager[None]:
    """Forget how often something was tried that is given back."""

    def shed(self: Work) -> None:
        for page in self.pages:
            rows = page.in_state(READY)
            if len(rows):
                offsets = rows + page.start
                self.pages.move(Some(page, rows), GONE)
                self.progress.free(offsets)
                self.progress._forget_attempts(offsets)  # noqa: SLF001 - it is planted there

    return changed(Work, shed=shed)
