"""Bugs in how consumers share a subscription: slots, their owners, and the cursor that these have together."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.engine.messages import Left
from penstock.engine.page import Some
from penstock.engine.progress import Progress
from penstock.engine.shard import Shard as Engine
from penstock.engine.states import Outcome
from penstock.engine.work import HAND_BITS, Work
from penstock.runtime.slots import Holding, SlotSeat
from penstock.runtime.team import Team
from penstock.settling import settle
from penstock.testing.campaigns.planted.tools import changed, changed_everywhere, original

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from penstock.engine.messages import Offsets
    from penstock.rows import Cursor, ParkedFilter, Settling


# --- consumers ------------------------------------------------------------------------------------


def removed_consumer_acked() -> AbstractContextManager[None]:
    """Take for done what a consumer held that has left."""
    right = original(Work, "give_all_back")

    def give_all_back(self: Work, consumer: int | None = None) -> None:
        for some in self.pages.all_held():
            page, rows = some.page, some.indexes
            mine = rows if consumer is None else rows[page.hand[rows] >> HAND_BITS == consumer]
            if len(mine):
                self._settle(Some(page, mine), Outcome.ACKED)
        right(self, consumer)

    return changed(Work, give_all_back=give_all_back)


# --- slots ----------------------------------------------------------------------------------------


def slot_goes_while_in_hand() -> AbstractContextManager[None]:
    """Let a slot go to another process while handlers are at work on its events."""
    return _careless(lambda _holding, _slots: set())


def slot_goes_before_its_commit() -> AbstractContextManager[None]:
    """Let a slot go to another process before what was settled of it is written."""

    def busy(self: Holding, slots: Iterable[int]) -> set[int]:
        held = np.zeros(64, np.bool_)
        for seat in self.seats:
            if seat.engine is not None:
                for some in seat.engine._work.pages.all_held():  # noqa: SLF001 - what it has in hand, and nothing else
                    held[some.page.slots[some.rows]] = True
        return {slot for slot in slots if held[slot]}

    return _careless(busy)


@contextmanager
def _careless(busy: Any) -> Iterator[None]:
    """Let slots go when this says that they are not busy, and without a commit before."""

    def on_left(self: Engine, told: Left) -> None:
        self._work.drop(told.slots)

    async def release(self: Team, holding: Holding, slots: Sequence[int]) -> None:
        leases = holding.left([slot for slot in slots if slot in holding.leaving])
        if not holding.leases:
            self._forget(holding)
            for seat in holding.seats:
                await seat.leave()
        await self._dispatcher.presence.give_back(*leases, clean=True)

    handlers = {**original(Engine, "_HANDLERS"), Left: on_left}
    with ExitStack() as stack:
        stack.enter_context(changed(Holding, busy=busy))
        stack.enter_context(changed(Engine, _HANDLERS=handlers))
        stack.enter_context(changed(Team, _release=release))
        yield


def slots_of_others_taken() -> AbstractContextManager[None]:
    """Hand over the events of all slots, whoever owns them."""
    right = original(Engine, "__init__")

    def init(self: Engine, **options: Any) -> None:
        right(self, **options)
        self.share.mine[:] = True
        self.share.leave(self.share.leaving)

    return changed(Engine, __init__=init)


def lost_answer_keeps_its_slots() -> AbstractContextManager[None]:
    """Forget the leases of slots whose acquisition was never answered."""

    async def disown(self: Team, view: Any) -> None:
        """Do nothing."""

    return changed(Team, _disown=disown)


def slots_of_a_dead_process_taken_for_clean() -> AbstractContextManager[None]:
    """Believe that a process that was killed has left nothing in hand."""
    right = original(Holding, "__init__")

    def init(self: Holding, *arguments: Any) -> None:
        right(self, *arguments)
        self.clean = True

    return changed(Holding, __init__=init)


def rows_of_all_slots_loaded() -> AbstractContextManager[None]:
    """Load the parked rows of all slots, whoever owns them."""
    right = original(SlotSeat.__mro__[1], "_filter")

    def every(self: SlotSeat, offsets: frozenset[int] | None = None) -> ParkedFilter:
        wanted: ParkedFilter = right(self, offsets)
        return msgspec.structs.replace(wanted, slots=None)

    return changed(SlotSeat.__mro__[1], _filter=every)


# --- the cursor -----------------------------------------------------------------------------------


def passed_over_is_settled() -> AbstractContextManager[None]:
    """Settle what is of others' slots, instead of passing over it."""

    def pass_over(self: Progress, offsets: Offsets) -> None:
        self.settle(Outcome.ACKED, offsets)

    return changed(Progress, pass_over=pass_over)


def progress_of_others_overwritten() -> AbstractContextManager[None]:
    """Write what one owner has settled ahead of the cursor in the place of what others have."""

    def wrong(cursor: Cursor, settling: Settling) -> tuple[Cursor, bytes]:
        return settle(msgspec.structs.replace(cursor, settled=b""), settling)

    return changed_everywhere(settle, wrong)


def attempts_of_others_overwritten() -> AbstractContextManager[None]:
    """Forget the attempts that other owners have written."""

    def wrong(cursor: Cursor, settling: Settling) -> tuple[Cursor, bytes]:
        return settle(msgspec.structs.replace(cursor, attempts={}), settling)

    return changed_everywhere(settle, wrong)


def settled_without_a_lease() -> AbstractContextManager[None]:
    """Write progress without saying for which slots."""
    return changed(SlotSeat, fences=property(lambda _self: ()))
