"""How the progress of several owners becomes one cursor, compared with sets of offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StaleCursor, StoreFull
from penstock.offsets import Bitmap, Range, RangeSet
from penstock.rows import Cursor, Settling, Shard
from penstock.settling import settle

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
