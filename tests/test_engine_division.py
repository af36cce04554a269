"""Parts of a page: what is handed over and settled as a whole costs nothing for each of its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_world import WALL_US, Source

from penstock.engine.aside import Aside
from penstock.engine.division import FEW, Division, undivided
from penstock.engine.messages import (
    Ack,
    Ask,
    Chunk,
    ConsumerLeft,
    Deliver,
    Done,
    HeadMoved,
    Nack,
    Now,
    ReadDone,
    Row,
    Written,
)
from penstock.engine.page import FEW as FEW_LANES
from penstock.engine.page import HELD, READY, VERY_FEW, Page, Some
from penstock.engine.policy import Policy
from penstock.engine.progress import Progress
from penstock.engine.shard import UNWRITTEN_EVENTS_MAX, Shard
from penstock.engine.share import SLOTS, slots_of
from penstock.engine.states import Outcome
from penstock.offsets import Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.engine.messages import Input, Output, Step

SIZE = 1_000
NOW = Now(1.0, WALL_US)


def a_division(consumers: int, slots: Iterable[int] = range(SLOTS)) -> Division:
    mine = slots_of(slots)
    return Division([slots_of(range(number, SLOTS, consumers)) & mine for number in range(consumers)])


def slots_for(count: int = SIZE) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(7).integers(0, SLOTS, count)


def a_chunk(start: int = 0, count: int = SIZE, division: Division | None = None, nbytes: int = 10 * SIZE + 7) -> Chunk:
    slots = slots_for(count)
    return Chunk(
        Range(start, start + count),
        nbytes=nbytes,
        sizes=lambda: np.full(count, 10, np.int64),
        lanes=lambda: np.arange(start, start + count),
        slots=lambda: slots,
        expiries=None,
        appended_at=np.full(count, WALL_US, np.int64),
        source=Source(start, range(count)),
        divided=None if division is None else division.divide(start, slots),
    )


# --- dividing ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, SLOTS - 1), max_size=300), st.integers(1, 2 * FEW), st.integers(0, SLOTS), st.data())
def test_every_event_is_in_the_part_of_its_slot_in_order(
    slots: list[int], consumers: int, owned: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, 1_000_000))
    division = a_division(consumers, range(owned))
    divided = division.divide(start, np.array(slots, np.int64))
    parts: list[list[int]] = [np.asarray(rows).tolist() for rows in divided.rows]
    for part, mask in zip(parts, division.masks, strict=False):
        assert part == [row for row, slot in enumerate(slots) if mask[slot]]
    assert parts[-1] == [row for row, slot in enumerate(slots) if slot >= owned], "what is nobody's"
    assert [list(offsets) for offsets in divided.offsets] == [[start + row for row in part] for part in parts]
    assert np.flatnonzero(division.own).tolist() == list(range(owned))


def test_a_part_is_known_by_the_very_mask_that_it_was_made_for() -> None:
    division = a_division(4)
    assert [division.number(mask) for mask in division.masks] == [0, 1, 2, 3]
    assert division.number(division.masks[0].copy()) is None
    assert division.number(None) is None


# --- pages ------------------------------------------------------------------------------------


def in_parts(page: Page) -> bool:
    """Whether nothing was noted for each event so far."""
    return page.parts is not None


def test_who_looks_at_single_events_sees_what_became_of_their_parts() -> None:
    division = a_division(4)
    page = Page(a_chunk(division=division), 0, 0)
    first, second = page.ready_of(division.masks[0]), page.ready_of(division.masks[1])
    page.give(first, 17, singly=False)
    page.move(first, HELD)
    assert in_parts(page)
    assert page.held_of(division.masks[0]).rows is first.rows
    assert not page.held_of(division.masks[1]).size
    assert (page.ready, page.held) == (SIZE - first.size, first.size)
    assert set(page.hand[first.rows].tolist()) == {17}
    assert not in_parts(page)
    assert set(page.state[first.rows].tolist()) == {HELD}
    assert set(page.state[second.rows].tolist()) == {READY}
    assert page.ready_of(division.masks[1]).indexes.tolist() == second.indexes.tolist(), "the same, found otherwise"
    assert page.held_of(division.masks[0]).indexes.tolist() == first.indexes.tolist()


def test_a_page_that_nobody_divides_is_one_part() -> None:
    page = Page(a_chunk(), 0, 0)
    whole = page.ready_of(None)
    assert (whole.rows, whole.part, whole.offsets) == (slice(0, SIZE), 0, Range(0, SIZE))
    page.move(whole, HELD)
    assert in_parts(page)
    assert not page.ready_of(None).size
    assert undivided(Range(5, 9)).offsets == (Range(5, 9),)


@pytest.mark.parametrize("least", [None, 1, 60, 2_000])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_ready_is_found_whatever_was_handed_over_and_given_back(seed: int, least: int | None) -> None:
    chance = np.random.default_rng(seed)
    page = Page(a_chunk(), 0, 0)
    slots = slots_of(range(0, SLOTS, 3))
    for _ in range(60):
        if chance.random() < 0.3:
            low, high = sorted(chance.integers(0, SIZE + 1, 2).tolist())
            page.move(Some(page, slice(low, high)), READY)  # given back
        elif chance.random() < 0.5:
            page.move_one(int(chance.integers(SIZE)), READY)
        else:
            some = page.ready_of(None, least)
            rows = some.rows
            page.move(some if chance.random() < 0.5 else Some(page, some.indexes[:: chance.integers(1, 4)]), HELD)
            assert isinstance(rows, slice) or (rows[1:] > rows[:-1]).all()
        ready = np.flatnonzero(page.state == READY)
        page.ready, page.held = len(ready), SIZE - len(ready)
        for asked, expected in ((None, ready), (slots, ready[slots[page.slots[ready]]])):
            found = page.ready_of(asked, least).indexes.tolist()
            assert found == expected.tolist()[: len(found)], "from the first on"
            assert len(found) >= min(len(expected), len(expected) if least is None else least)


# --- a shard ----------------------------------------------------------------------------------


class Told:
    """A shard with one page, and a few words for what it is told."""

    def __init__(self, division: Division, **policy: Any) -> None:
        self.shard = Shard(
            next_offset=0, policy=Policy(**policy), clean=True, head=SIZE, now=NOW, slots=slots_of(range(SLOTS))
        )
        self.division = division
        self.tell(HeadMoved(SIZE))
        self.tell(ReadDone(0, (a_chunk(division=division),)))

    def tell(self, told: Input) -> list[Output]:
        return self.shard.handle(told, NOW)

    def take(self, consumer: int) -> Deliver:
        [handed] = self.tell(Ask(SIZE, 1 << 30, False, consumer + 1, self.division.masks[consumer]))
        assert isinstance(handed, Deliver)
        return handed

    def step(self) -> Step:
        step = self.shard.take_step()
        assert step is not None
        return step

    @property
    def page(self) -> Page:
        return next(iter(self.shard._work.pages))


def offsets_of(handed: Deliver) -> np.ndarray[Any, np.dtype[np.int64]]:
    [piece] = handed.pieces
    assert isinstance(piece.offsets, np.ndarray)
    return piece.offsets


def done(handed: Deliver) -> Done:
    return Done(handed.hand, (offsets_of(handed),))


def test_parts_that_all_are_done_are_settled_as_one_range() -> None:
    told = Told(a_division(4))
    for consumer in range(4):
        handed = told.take(consumer)
        assert in_parts(told.page)
        told.tell(done(handed))
    step = told.step()
    assert dict(step.outcomes) == {Outcome.ACKED: RangeSet([Range(0, SIZE)])}
    assert told.shard.next_offset == SIZE
    assert told.shard._work.pages.open_bytes == 0


def test_a_step_in_between_has_the_parts_that_are_done_and_the_next_one_the_rest() -> None:
    told = Told(a_division(4))
    handed = [told.take(consumer) for consumer in range(4)]
    told.tell(done(handed[1]))
    assert told.shard.progress.unwritten == handed[1].events
    first = told.step()
    assert first.outcomes[Outcome.ACKED] == RangeSet.from_offsets(offsets_of(handed[1]))
    told.tell(Written(first))
    for each in (handed[0], handed[2], handed[3]):
        told.tell(done(each))
    assert told.shard.progress.unwritten == SIZE - handed[1].events
    rest = told.step()
    assert len(rest.outcomes[Outcome.ACKED]) == SIZE - handed[1].events
    assert first.outcomes[Outcome.ACKED] | rest.outcomes[Outcome.ACKED] == RangeSet([Range(0, SIZE)])


def test_what_was_said_of_some_events_of_a_hand_holds_when_the_rest_is_done() -> None:
    told = Told(a_division(4), max_retries=3)
    handed = told.take(0)
    offsets = offsets_of(handed)
    told.tell(Nack(handed.hand, offsets[:2], delay_seconds=1.0))
    told.tell(Ack(offsets[2:5]))
    told.tell(Done(handed.hand, (offsets,)))  # a late ack of what failed is one, too
    assert told.step().outcomes[Outcome.ACKED] == RangeSet.from_offsets(offsets)
    told.tell(done(handed))
    assert told.shard.progress.unwritten == 0, "once more makes no difference"


def test_what_was_given_back_is_not_done_by_whoever_had_it() -> None:
    told = Told(a_division(4))
    handed = told.take(0)
    told.tell(ConsumerLeft(1))
    told.tell(done(handed))
    assert told.shard.progress.unwritten == 0
    assert sorted(offsets_of(told.take(0)).tolist()) == offsets_of(handed).tolist()


def test_an_ask_that_finds_nothing_wants_to_know_of_acks_only_if_one_may_help() -> None:
    told = Told(a_division(4))
    handed = told.take(0)
    assert not told.shard.has_for(told.division.masks[0]), "all of it is in hand"
    told.tell(Ask(SIZE, 1 << 30, False, 1, told.division.masks[0]))
    assert not told.shard.unanswered
    moved = slots_of(range(SLOTS))  # another consumer has these slots, too, by now
    for consumer in (1, 2, 3):
        told.take(consumer)
    told.tell(ReadDone(SIZE, ()))
    told.tell(Ask(SIZE, 1 << 30, False, 9, moved))
    assert not told.shard.unanswered, "nothing is left that could become free"
    told.tell(Nack(handed.hand, offsets_of(handed)[:1], delay_seconds=1.0))
    told.tell(Ask(SIZE, 1 << 30, False, 9, moved))
    assert told.shard.unanswered


def test_a_shard_hurries_to_write_before_it_has_to_stand_still() -> None:
    told = Told(a_division(1))
    hurries = []
    for unwritten in (UNWRITTEN_EVENTS_MAX // 2, UNWRITTEN_EVENTS_MAX):
        told.shard.progress.unwritten = unwritten
        hurries.append((told.shard.overfull, told.shard.standing))
    assert hurries == [(False, False), (True, False)]


# --- progress ---------------------------------------------------------------------------------


def test_parts_of_several_ranges_are_gathered_apart() -> None:
    progress = Progress(next_offset=0, settled=b"", attempts={}, generation=0, number=0, shared=True)
    even, odd = np.arange(0, 10, 2), np.arange(1, 10, 2)
    progress.settle_part(0, 10, even)
    progress.settle_part(10, 20, odd + 10)
    progress.settle_part(10, 20, even + 10)
    assert progress.unwritten == 15
    step = progress.take()
    assert step is not None
    assert step.outcomes[Outcome.ACKED] == RangeSet([Range(10, 20)]) | RangeSet.from_offsets(even)
    assert progress.next_offset == 1
    progress.written(step)
    progress.settle_part(0, 10, odd)
    assert progress.next_offset == 20


# --- lanes that are looked for ----------------------------------------------------------------


def row(offset: int, lane: int) -> Row:
    return Row(offset, lane, 0, 0, 0)


def wanted_keys(aside: Aside) -> tuple[Any, ...] | None:
    wanted = aside.wanted
    assert wanted is not None
    return wanted.keys


def test_keys_of_parked_lanes_are_known_as_long_as_no_two_can_be_mistaken() -> None:
    aside = Aside([])
    assert aside.wanted is None
    aside.park(row(1, 7), key=b"seven")
    wanted = aside.wanted
    assert wanted_keys(aside) == (b"seven",)
    aside.park(row(2, 7), key=b"seven")
    assert aside.wanted is wanted, "nothing new to look for"
    aside.park(row(3, 8), key=b"eight")
    assert wanted_keys(aside) == (b"seven", b"eight")
    aside.park(row(4, 7), key=b"another key of this lane")
    assert wanted_keys(aside) is None
    for offset in (1, 2, 4):
        aside.remove(offset)
    aside.park(row(5, 9), key=b"nine")
    assert wanted_keys(aside) == (b"eight", b"nine"), "a lane that is through is forgotten"


@pytest.mark.parametrize(
    ("lanes", "known", "looked_for"), [(VERY_FEW, True, True), (FEW_LANES, False, True), (FEW_LANES + 1, False, False)]
)
def test_only_a_few_lanes_are_looked_for(lanes: int, *, known: bool, looked_for: bool) -> None:
    aside = Aside([])
    for number in range(lanes):
        aside.park(row(number, 100 + number), key=b"%d" % number)
    wanted = aside.wanted
    assert (wanted is not None) is looked_for
    assert (wanted is not None and wanted.keys is not None) is known


def test_the_key_of_a_row_that_was_loaded_is_not_known() -> None:
    aside = Aside([row(1, 7)])
    assert wanted_keys(aside) is None
    aside.park(row(2, 7), key=b"seven")
    assert wanted_keys(aside) is None, "the row that was loaded may be of another key"
