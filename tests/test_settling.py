"""How the progress of several owners becomes one cursor, compared with sets of offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StaleCursor, StoreFull
from penstock.offsets import Bitmap, Range, RangeSet
from penstock.rows import Claim, Cursor, Settling, Shard
from penstock.settling import FEW_RANGES, NOBODY, claims_of, frontier, settle, unsettled

SHARD = Shard("log", "s", 0, 0)
offsets = st.sets(st.integers(0, 300), max_size=80)


def passed(cursor: Cursor) -> set[int]:
    bitmap = Bitmap.from_bytes(cursor.next_offset, cursor.settled)
    return {offset for offset in range(400) if offset in bitmap}


@given(st.lists(st.tuples(offsets, st.dictionaries(st.integers(0, 300), st.none() | st.integers(0, 9))), max_size=6))
def test_steps_of_any_owners_in_any_order_are_a_union(steps: list[tuple[set[int], dict[int, int | None]]]) -> None:
    cursor = Cursor(shard=SHARD, next_offset=5, generation=2, number=7)
    everything, attempts = set(range(5)), dict[int, int | None]()
    for number, (settled, made) in enumerate(steps):
        step = Settling(
            shard=SHARD,
            generation=2,
            settled=RangeSet.from_offsets(settled),
            attempts=made,
            record=(lambda *_: b"x") if number % 2 else None,
        )
        cursor, record = settle(cursor, step)
        assert record == (b"x" if number % 2 else b"")
        everything |= settled
        attempts |= made
        assert passed(cursor) == everything
        assert cursor.next_offset == min(set(range(400)) - everything)
        expected = {offset: made for offset, made in attempts.items() if made is not None and offset not in everything}
        assert cursor.attempts == expected
        # What a cursor has forgotten once stays so: it was settled.
        attempts = dict(expected)
        assert settle(cursor, step)[0].next_offset == cursor.next_offset
    assert cursor.number == 7 + len(steps) // 2


def test_a_cursor_of_another_generation_is_not_added_to() -> None:
    cursor = Cursor(shard=SHARD, next_offset=5, generation=2)
    with pytest.raises(StaleCursor, match="generation 2, and not 1"):
        settle(cursor, Settling(shard=SHARD, generation=1))


@pytest.mark.parametrize("count", [1, 100])
def test_what_is_too_far_ahead_of_the_cursor_is_refused(count: int) -> None:
    cursor = Cursor(shard=SHARD, next_offset=5)
    far = RangeSet(Range(at, at + 1) for at in range(5 + Bitmap.LIMIT - 2 * count + 2, 6 + Bitmap.LIMIT, 2))
    assert far.range_count == count
    with pytest.raises(StoreFull, match="settle or park earlier events first"):
        settle(cursor, Settling(shard=SHARD, generation=0, settled=far))
    near = RangeSet(Range(span.start - 1, span.stop - 1) for span in far)
    assert settle(cursor, Settling(shard=SHARD, generation=0, settled=near))[0].next_offset == 5


# --- claims -----------------------------------------------------------------------------------

acts = st.one_of(
    st.tuples(st.just("claim"), st.integers(1, 3), st.integers(1, 60), st.integers(0, 300)),
    st.tuples(st.just("free"), st.integers(1, 3), st.integers(0, 60), st.integers(0, 60)),
    st.tuples(st.just("settle"), st.integers(1, 3), st.integers(0, 60), st.integers(0, 60)),
)


@given(st.lists(acts, max_size=40))
def test_every_offset_is_settled_or_somebodys_or_can_be_claimed_and_never_two_have_it(
    story: list[tuple[str, int, int, int]],
) -> None:
    cursor = Cursor(shard=SHARD, next_offset=5)
    for act, berth, one, other in story:
        before = unsettled(cursor, berth)
        mine = [offset for span in before for offset in span]
        some = RangeSet.from_offsets(mine[one : one + other])
        match act:
            case "claim":
                claim, edge = Claim(one, 280, other), frontier(cursor)
                cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=berth, claim=claim))
                new = unsettled(cursor, berth) - before
                assert len(new) <= one
                assert all(span.start >= min(other, edge) and span.stop <= 280 for span in new)
            case "free":
                cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=berth, freed=some))
                assert unsettled(cursor, berth) == before - some
            case _:
                cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=berth, settled=some))
                assert unsettled(cursor, berth) == before - some
        whose = [offset for each in range(4) for span in unsettled(cursor, each) for offset in span]
        assert len(whose) == len(set(whose))
        assert set(whose) | passed(cursor) == set(range(max(frontier(cursor), cursor.next_offset)))
        # What is done is not remembered for ever.
        assert all(claims_of(cursor, each).range_count <= FEW_RANGES + len(story) for each in cursor.claims)


def test_only_what_a_berth_has_is_given_back() -> None:
    cursor, _ = settle(
        Cursor(shard=SHARD, next_offset=0), Settling(shard=SHARD, generation=0, berth=1, claim=Claim(10, 100))
    )
    cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=2, freed=RangeSet([Range(2, 5)])))
    assert unsettled(cursor, 1) == RangeSet([Range(0, 10)])
    assert claims_of(cursor, NOBODY) == RangeSet()
    done = RangeSet([Range(3, 4)])
    freed = RangeSet([Range(2, 5)])
    cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=1, settled=done, freed=freed))
    assert claims_of(cursor, NOBODY) == RangeSet([Range(2, 3), Range(4, 5)])


def test_claims_of_what_is_settled_are_forgotten_when_there_are_many() -> None:
    cursor = Cursor(shard=SHARD, next_offset=0)
    cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=2, claim=Claim(1, 10_000)))
    for at in range(200):  # one and two take turns, and the first event is never settled
        for berth in (1, 2):
            claim = Claim(1, 10_000)
            cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, berth=berth, claim=claim))
        done = RangeSet([Range(1 + 2 * at, 3 + 2 * at)])
        cursor, _ = settle(cursor, Settling(shard=SHARD, generation=0, settled=done))
    assert cursor.next_offset == 0
    assert max(claims_of(cursor, berth).range_count for berth in (1, 2)) <= FEW_RANGES + 1
