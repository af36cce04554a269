"""What offsets, ranges and sets of them promise, each against a plain Python set of integers."""

from __future__ import annotations

import builtins
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.errors import IntegrityError, PenstockError, UsageError, WindowFull
from penstock.offsets import MANY_RANGES, OFFSET_END, Bitmap, Gap, Position, Range, RangeSet

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPACE = 40
offsets = st.integers(0, SPACE)
ranges = st.tuples(offsets, offsets).map(lambda bounds: Range(min(bounds), max(bounds)))
range_sets = st.lists(ranges, max_size=8).map(RangeSet)
anywhere = st.integers(0, OFFSET_END)
wide_sets = st.lists(st.tuples(anywhere, anywhere).map(lambda bounds: Range(min(bounds), max(bounds))), max_size=6).map(
    RangeSet
)


def members(spans: RangeSet) -> set[int]:
    return {offset for span in spans for offset in span}


def int64(values: Any) -> NDArray[np.int64]:
    return np.array(list(values), np.int64)


def assert_canonical(spans: RangeSet) -> None:
    """Nothing that two equal sets could hold differently: sorted, filled, never touching."""
    edge = -1
    for span in spans:
        assert edge < span.start < span.stop
        assert type(span.start) is type(span.stop) is int
        edge = span.stop


# --- Position ----------------------------------------------------------------------------------------


def test_a_position_is_written_as_topic_partition_offset() -> None:
    assert str(Position("orders", 0, 17)) == "orders/0@17"
    assert Position.parse("orders/0@17") == Position("orders", 0, 17)
    assert sorted([Position("a", 1, 0), Position("a", 0, 9)])[0].partition == 0


@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True), st.integers(0, 999), st.integers(0, 1 << 62))
def test_every_position_survives_being_written_and_read(topic: str, partition: int, offset: int) -> None:
    position = Position(topic, partition, offset)
    assert Position.parse(str(position)) == position


@pytest.mark.parametrize("text", ["", "orders", "orders/0", "orders@17", "/0@17", "orders/@17", "orders/0@"])
def test_a_position_that_lacks_a_part_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="orders/0@17"):
        Position.parse(text)


@pytest.mark.parametrize("number", ["-1", "+1", "01", "1_0", " 1", "1\n", "x", "1@2", "1/2", "\N{FULLWIDTH DIGIT ONE}"])
def test_a_position_is_read_only_as_it_is_written(number: str) -> None:
    for text in (f"orders/{number}@17", f"orders/0@{number}"):
        with pytest.raises(UsageError, match="is not a position"):
            Position.parse(text)


def test_a_position_beyond_every_offset_is_refused() -> None:
    assert Position.parse(f"orders/0@{OFFSET_END - 1}").offset == OFFSET_END - 1
    for digits in (str(OFFSET_END), "9" * 5_000):
        with pytest.raises(UsageError, match="is not a position"):
            Position.parse(f"orders/0@{digits}")


@given(st.text())
def test_any_text_is_a_position_or_a_usage_error(text: str) -> None:
    try:
        position = Position.parse(text)
    except UsageError:
        return
    assert str(position) == text


# --- Range and Gap -----------------------------------------------------------------------------------


def test_a_range_holds_its_start_and_not_its_stop() -> None:
    span = Range(3, 7)
    assert list(span) == [3, 4, 5, 6]
    assert [offset in span for offset in (2, 3, 6, 7)] == [False, True, True, False]
    assert (len(span), bool(span), str(span)) == (4, True, "[3, 7)")
    assert not Range(3, 3)
    assert len(Range(0, OFFSET_END)) == OFFSET_END


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (7, 3), (0, OFFSET_END + 1)])
def test_a_range_of_impossible_bounds_is_refused_with_the_numbers(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\)"):
        Range(start, stop)


@given(ranges, ranges)
def test_ranges_intersect_as_their_offsets_do(one: Range, other: Range) -> None:
    shared = set(one) & set(other)
    assert set(one.intersection(other)) == shared
    assert one.overlaps(other) == other.overlaps(one) == bool(shared)


def test_ranges_are_values() -> None:
    assert sorted([Range(5, 6), Range(1, 9), Range(1, 2)]) == [Range(1, 2), Range(1, 9), Range(5, 6)]
    assert len({Range(1, 2), Range(1, 2)}) == 1
    assert pickle.loads(pickle.dumps(Range(1, 2))) == Range(1, 2)
    with pytest.raises(AttributeError):
        Range(1, 2).start = 0  # type: ignore[misc]


def test_a_gap_says_what_is_missing_and_why() -> None:
    gap = Gap(3, 7, "torn tail")
    assert (gap.range, len(gap), str(gap)) == (Range(3, 7), 4, "gap [3, 7): torn tail")


def test_a_gap_is_never_empty() -> None:
    with pytest.raises(ValueError, match=r"\[3, 3\) holds none"):
        Gap(3, 3, "nothing")


# --- RangeSet ----------------------------------------------------------------------------------------


class RangeSetAgainstSet(RuleBasedStateMachine):
    """Any sequence of changes leaves a range set with the offsets that a plain set would have."""

    def __init__(self) -> None:
        super().__init__()
        self.spans = RangeSet()
        self.model: set[int] = set()

    @rule(span=ranges)
    def add(self, span: Range) -> None:
        self.spans.add(span)
        self.model |= set(span)

    @rule(span=ranges)
    def discard(self, span: Range) -> None:
        self.spans.discard(span)
        self.model -= set(span)

    @rule(other=range_sets)
    def combine(self, other: RangeSet) -> None:
        before = RangeSet(self.spans)
        for combined, expected in [
            (self.spans | other, self.model | members(other)),
            (self.spans & other, self.model & members(other)),
            (self.spans - other, self.model - members(other)),
            (other - self.spans, members(other) - self.model),
        ]:
            assert_canonical(combined)
            assert members(combined) == expected
        assert self.spans == before

    @rule(within=ranges)
    def missing(self, within: Range) -> None:
        missing = self.spans.missing(within)
        assert_canonical(missing)
        assert members(missing) == set(within) - self.model

    @invariant()
    def agrees(self) -> None:
        assert_canonical(self.spans)
        assert members(self.spans) == self.model
        assert len(self.spans) == len(self.model)
        assert bool(self.spans) == bool(self.model)
        assert self.spans.range_count == len(list(self.spans))
        assert {offset for offset in range(-2, SPACE + 2) if offset in self.spans} == self.model
        assert self.spans.to_offsets().tolist() == sorted(self.model)
        for start in range(SPACE + 2):
            assert self.spans.first_missing(start) == next(
                offset for offset in range(start, SPACE + 2) if offset not in self.model
            )


TestRangeSetAgainstSet = RangeSetAgainstSet.TestCase


@given(st.lists(ranges))
def test_a_range_set_does_not_depend_on_the_order_of_its_ranges(spans: list[Range]) -> None:
    whole = RangeSet(spans)
    assert_canonical(whole)
    assert members(whole) == {offset for span in spans for offset in span}
    assert whole == RangeSet(reversed(spans))


@given(st.lists(offsets))
def test_a_range_set_of_offsets_does_not_depend_on_order_or_repeats(values: list[int]) -> None:
    spans = RangeSet.from_offsets(int64(values))
    assert_canonical(spans)
    assert members(spans) == set(values)
    assert spans == RangeSet.from_offsets(iter(values)) == RangeSet.from_offsets(spans.to_offsets())


@pytest.mark.parametrize("values", [[-1, 3], [3, OFFSET_END]])
def test_offsets_out_of_bounds_are_refused(values: list[int]) -> None:
    with pytest.raises(ValueError, match="start <= stop"):
        RangeSet.from_offsets(int64(values))


def test_offsets_that_are_not_whole_numbers_are_refused() -> None:
    with pytest.raises(TypeError):
        RangeSet.from_offsets(np.array([1.5]))


def test_touching_ranges_become_one() -> None:
    spans = RangeSet([Range(0, 3), Range(3, 5)])
    spans.add(Range(5, 6))
    assert list(spans) == [Range(0, 6)]


def test_a_copied_range_set_changes_alone() -> None:
    spans = RangeSet([Range(0, 3)])
    copy = RangeSet(spans)
    copy.add(Range(5, 6))
    assert spans == RangeSet([Range(0, 3)])


def test_a_range_set_is_not_hashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(RangeSet())


def test_a_range_set_equals_only_range_sets() -> None:
    assert RangeSet() != set()
    assert RangeSet([Range(0, 3)]) != RangeSet([Range(0, 4)])


def test_a_range_set_survives_pickling() -> None:
    spans = RangeSet([Range(0, 3), Range(7, 9)])
    assert pickle.loads(pickle.dumps(spans)) == spans


def test_a_range_set_shows_its_first_ranges() -> None:
    assert repr(RangeSet([Range(0, 3), Range(7, 9)])) == "RangeSet([0, 3), [7, 9))"
    assert repr(RangeSet.from_offsets(range(0, 2_020, 2))).endswith("[14, 15), … 1,002 more)")


def test_the_largest_set_costs_no_more_than_the_smallest() -> None:
    everything = RangeSet([Range(0, OFFSET_END)])
    assert len(everything) == OFFSET_END
    everything.discard(Range(5, 6))
    assert everything.missing(Range(0, OFFSET_END)) == RangeSet([Range(5, 6)])
    assert len(everything.to_bytes()) < 20


# --- RangeSet as bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "written"),
    [
        ([], ""),
        ([Range(3, 7)], "0303"),
        ([Range(0, 1), Range(300, 302)], "0000aa0201"),
        ([Range(OFFSET_END - 1, OFFSET_END)], "feffffffffffffff7f00"),
        ([Range(0, OFFSET_END)], "00feffffffffffffff7f"),
    ],
)
def test_range_set_bytes_are_as_specified(spans: list[Range], written: str) -> None:
    assert RangeSet(spans).to_bytes() == bytes.fromhex(written)
    assert RangeSet.from_bytes(bytes.fromhex(written)) == RangeSet(spans)


def leb128(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


@given(
    st.lists(
        st.tuples(*[st.integers(0, 50).map(lambda bits: 2**bits - 1) | st.integers(0, 2**50)] * 2),
        min_size=MANY_RANGES - 1,
        max_size=MANY_RANGES + 60,
    )
)
def test_many_ranges_are_written_as_few_are(steps: list[tuple[int, int]]) -> None:
    spans, floor = RangeSet(), 0
    for beyond, longer in steps:
        start = floor + beyond
        spans.add(Range(start, start + longer + 1))
        floor = start + longer + 2
    assert spans.to_bytes() == b"".join(leb128(beyond) + leb128(longer) for beyond, longer in steps)
    assert RangeSet.from_bytes(spans.to_bytes()) == spans


@given(range_sets | wide_sets)
def test_every_range_set_survives_being_written_and_read(spans: RangeSet) -> None:
    again = RangeSet.from_bytes(spans.to_bytes())
    assert_canonical(again)
    assert again == spans


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("03", "no length"),
        ("0380", "inside a number"),
        ("038300", "needless zero at byte 2"),
        ("0080808080808080808001", "more than nine bytes"),
        ("ffffffffffffffff7f00", r"before 2\*\*63"),
        ("00" + "ff" * 8 + "7f", r"before 2\*\*63"),
        ("00feffffffffffffff7f0000", r"before 2\*\*63"),
    ],
)
def test_bytes_that_are_no_range_set_are_refused(written: str, problem: str) -> None:
    with pytest.raises(IntegrityError, match=problem):
        RangeSet.from_bytes(bytes.fromhex(written))


@given(st.binary(max_size=40) | st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]), max_size=24).map(bytes))
def test_any_bytes_are_the_one_form_of_a_range_set_or_an_integrity_error(data: bytes) -> None:
    try:
        spans = RangeSet.from_bytes(data)
    except IntegrityError:
        return
    assert_canonical(spans)
    assert spans.to_bytes() == data


@given(range_sets | wide_sets, st.data())
def test_changed_range_set_bytes_are_another_set_or_an_integrity_error(spans: RangeSet, data: st.DataObject) -> None:
    written = spans.to_bytes()
    changed = mutate(written, data)
    try:
        again = RangeSet.from_bytes(changed)
    except IntegrityError:
        return
    assert (again == spans) == (changed == written)


def mutate(written: bytes, data: st.DataObject) -> bytes:
    """Cut, insert or change bytes somewhere."""
    start = data.draw(st.integers(0, len(written)), label="start")
    stop = data.draw(st.integers(start, min(start + 3, len(written))), label="stop")
    return written[:start] + data.draw(st.binary(max_size=3), label="inserted") + written[stop:]


def test_a_range_set_reads_hostile_bytes_in_linear_time() -> None:
    # A number without end would grow with each byte if its length were not checked.
    with pytest.raises(IntegrityError):
        RangeSet.from_bytes(b"\xff" * (16 << 20))


# --- Bitmap ------------------------------------------------------------------------------------------


class BitmapAgainstSet(RuleBasedStateMachine):
    """Any sequence of settlements leaves a bitmap that agrees with a plain set of settled offsets.

    The bitmap begins with few cells, so that it is copied and shrinks often.
    """

    LIMIT = 45

    class SmallBitmap(Bitmap):
        _CELLS_MIN = 4

    @initialize(start=offsets)
    def begin(self, start: int) -> None:
        self.bitmap: Bitmap = self.SmallBitmap(start, limit=self.LIMIT)
        self.start = start
        self.settled: set[int] = set()

    def settle(self, values: set[int]) -> bool:
        """Change the model as the bitmap should change, or say that it should refuse."""
        ahead = {value for value in values if value >= self.start}
        if any(value >= self.start + self.LIMIT for value in ahead):
            return False
        self.settled |= ahead
        return True

    @rule(distance=st.integers(-5, LIMIT + 1))
    def set(self, distance: int) -> None:
        offset = max(self.start + distance, 0)
        assert self.bitmap.room(offset) == (offset < self.start + self.LIMIT)
        if self.settle({offset}):
            self.bitmap.set(offset)
        else:
            with pytest.raises(WindowFull):
                self.bitmap.set(offset)

    @rule(distance=st.integers(-5, LIMIT), length=st.integers(0, 12))
    def set_range(self, distance: int, length: int) -> None:
        start = max(self.start + distance, 0)
        span = Range(start, start + length)
        if self.settle(set_of(span)):
            self.bitmap.set_range(span)
        else:
            with pytest.raises(WindowFull):
                self.bitmap.set_range(span)

    @rule(distances=st.lists(st.integers(-5, LIMIT), max_size=20))
    def set_many(self, distances: list[int]) -> None:
        values = [max(self.start + distance, 0) for distance in distances]
        if self.settle(set_of(values)):
            self.bitmap.set_many(int64(values))
        else:
            with pytest.raises(WindowFull):
                self.bitmap.set_many(int64(values))

    @rule(distances=st.sets(st.integers(0, LIMIT), max_size=20))
    def set_new(self, distances: builtins.set[int]) -> None:
        values = sorted({self.start + distance for distance in distances} - self.settled)
        if self.settle(set_of(values)):
            self.bitmap.set_new(int64(values))
        else:
            with pytest.raises(WindowFull):
                self.bitmap.set_new(int64(values))

    @rule()
    def advance(self) -> None:
        while self.start in self.settled:
            self.settled.remove(self.start)
            self.start += 1
        assert self.bitmap.advance() == self.start

    @rule(start=offsets)
    def seek(self, start: int) -> None:
        self.bitmap.seek(start)
        self.start = start
        self.settled = set_of(())

    @rule()
    def write_and_read(self) -> None:
        written = self.bitmap.to_bytes()
        assert not written.endswith(b"\0")
        self.bitmap = self.SmallBitmap.from_bytes(self.start, written, limit=self.LIMIT)
        assert self.bitmap.to_bytes() == written

    @rule(distance=st.integers(-10, LIMIT + 10), length=st.integers(0, 80))
    def unset(self, distance: int, length: int) -> None:
        start = max(self.start + distance, 0)
        unset = self.bitmap.unset_in(Range(start, start + length))
        settled = self.bitmap.settled_in(Range(start, start + length)).tolist()
        assert settled == [offset in self.bitmap for offset in range(start, start + length)]
        assert_canonical(unset)
        assert members(unset) == {
            offset for offset in range(start, start + length) if offset >= self.start and offset not in self.settled
        }

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "bitmap"):
            return
        assert self.bitmap.start == self.start
        assert self.bitmap.count == len(self.settled)
        around = range(self.start - 3, self.start + self.LIMIT + 5)
        assert [offset in self.bitmap for offset in around] == [
            offset < self.start or offset in self.settled for offset in around
        ]
        # Memory is bounded by the limit, whatever happens.
        assert self.bitmap._cells.size <= 2 * 64


set_of = set  # the machine above names a rule `set`, as the bitmap does
TestBitmapAgainstSet = BitmapAgainstSet.TestCase


def test_bitmap_advance_stops_at_the_first_unsettled_offset() -> None:
    bitmap = Bitmap(10)
    bitmap.set_range(Range(10, 15))
    bitmap.set(16)
    assert bitmap.advance() == 15
    assert (bitmap.start, bitmap.count) == (15, 1)
    assert bitmap.advance() == 15
    bitmap.set(15)
    assert bitmap.advance() == 17


def test_bitmap_advance_passes_a_settled_run_of_any_length() -> None:
    for length in range(2_100):
        bitmap = Bitmap(5)
        bitmap.set_range(Range(5, 5 + length))
        assert bitmap.advance() == 5 + length


def test_bitmap_ignores_what_was_settled_before() -> None:
    bitmap = Bitmap(10)
    bitmap.set(9)
    bitmap.set_range(Range(0, 10))
    bitmap.set_many(int64([3, 9]))
    bitmap.set_many(int64([]))
    assert (bitmap.start, bitmap.count) == (10, 0)
    assert 9 in bitmap
    assert 10 not in bitmap


def test_bitmap_counts_a_repeated_settlement_once() -> None:
    bitmap = Bitmap()
    for _ in range(2):
        bitmap.set(5)
        bitmap.set_range(Range(4, 7))
        bitmap.set_many(int64([5, 6, 8, 8]))
    assert bitmap.count == 4


def test_bitmap_refuses_what_lies_beyond_its_limit_and_changes_nothing() -> None:
    bitmap = Bitmap(100, limit=50)
    assert bitmap.room(149)
    assert not bitmap.room(150)
    with pytest.raises(WindowFull, match="offset 150 is 50 beyond the window's start, 100") as refused:
        bitmap.set(150)
    assert (refused.value.offset, refused.value.start, refused.value.limit) == (150, 100, 50)
    with pytest.raises(WindowFull):
        bitmap.set_range(Range(100, 151))
    with pytest.raises(WindowFull):
        bitmap.set_many(int64([100, 150]))
    assert bitmap.count == 0
    bitmap.set(149)
    bitmap.set(100)
    assert bitmap.advance() == 101
    bitmap.set(150)
    assert bitmap.count == 2


def test_a_full_window_is_a_penstock_error_that_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(WindowFull(150, 100, 50)))
    assert isinstance(error, WindowFull)
    assert str(error) == str(WindowFull(150, 100, 50))
    assert (error.offset, error.start, error.limit) == (150, 100, 50)
    assert issubclass(WindowFull, PenstockError)


def test_bitmap_settles_a_whole_window_in_random_order() -> None:
    order = np.random.default_rng(7).permutation(Bitmap.LIMIT) + 1_000
    by_one, at_once = Bitmap(1_000), Bitmap(1_000)
    for offset in order[:100_000].tolist():
        by_one.set(offset)
    at_once.set_many(order[:100_000])
    assert by_one.to_bytes() == at_once.to_bytes()
    assert by_one.advance() == at_once.advance()
    at_once.set_many(order)
    assert at_once.advance() == 1_000 + Bitmap.LIMIT
    assert at_once.count == 0


def test_bitmap_gives_memory_back_when_everything_is_settled() -> None:
    bitmap = Bitmap()
    empty = bitmap._cells.nbytes
    bitmap.set_range(Range(0, Bitmap.LIMIT))
    assert empty < bitmap._cells.nbytes <= 2 * Bitmap.LIMIT
    bitmap.advance()
    assert bitmap._cells.nbytes == empty


def test_bitmap_gives_memory_back_when_its_window_becomes_narrow() -> None:
    bitmap = Bitmap()
    bitmap.set_range(Range(0, Bitmap.LIMIT - 2))
    bitmap.set(Bitmap.LIMIT - 1)
    wide = bitmap._cells.nbytes
    while (start := bitmap.advance()) < 4 * Bitmap.LIMIT:
        # One settled offset is always left behind an unsettled one, so that the bitmap is never empty.
        bitmap.set_range(Range(start, start + 1_000))
        bitmap.set(start + 1_001)
    assert bitmap.count == 1
    assert bitmap._cells.nbytes <= wide / 256


def test_bitmap_finds_the_unsettled_offsets_of_any_range() -> None:
    bitmap = Bitmap(10, limit=100)
    bitmap.set_range(Range(12, 15))
    assert bitmap.unset_in(Range(0, 20)) == RangeSet([Range(10, 12), Range(15, 20)])
    assert bitmap.unset_in(Range(0, 10)) == RangeSet()
    assert bitmap.unset_in(Range(13, OFFSET_END)) == RangeSet([Range(15, OFFSET_END)])
    assert bitmap.unset_in(Range(5_000, OFFSET_END)) == RangeSet([Range(5_000, OFFSET_END)])


@pytest.mark.parametrize("start", [-1, OFFSET_END + 1])
def test_bitmap_begins_at_an_offset(start: int) -> None:
    with pytest.raises(ValueError, match=str(start)):
        Bitmap(start)


def test_bitmap_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Bitmap(limit=0)


def test_bitmap_shows_where_it_is() -> None:
    assert repr(Bitmap(3, limit=9)) == "Bitmap(start=3, count=0, limit=9)"


# --- Bitmap as bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("settled", "written"), [([], ""), ([10], "01"), ([11, 17], "82"), ([10, 26], "010001")])
def test_bitmap_bytes_are_as_specified(settled: list[int], written: str) -> None:
    bitmap = Bitmap(10)
    bitmap.set_many(int64(settled))
    assert bitmap.to_bytes() == bytes.fromhex(written)
    again = Bitmap.from_bytes(10, bytes.fromhex(written))
    assert [offset for offset in range(10, 40) if offset in again] == settled
    assert again.count == len(settled)


@pytest.mark.parametrize("limit", [7, 8, 9])
def test_bitmap_bytes_reach_as_far_as_the_limit_and_no_further(limit: int) -> None:
    bitmap = Bitmap(limit=limit + 1)
    bitmap.set(limit - 1)
    assert limit - 1 in Bitmap.from_bytes(0, bitmap.to_bytes(), limit=limit)
    bitmap.set(limit)
    with pytest.raises(IntegrityError, match=f"spans {limit + 1} offsets, the limit is {limit}"):
        Bitmap.from_bytes(0, bitmap.to_bytes(), limit=limit)


def test_bitmap_bytes_that_are_far_too_long_are_refused_before_they_are_unpacked() -> None:
    with pytest.raises(IntegrityError, match="the limit is 1,048,576"):
        Bitmap.from_bytes(0, b"\xff" * ((Bitmap.LIMIT >> 3) + 1))


def test_bitmap_bytes_never_settle_more_than_there_are_offsets() -> None:
    assert OFFSET_END - 1 in Bitmap.from_bytes(OFFSET_END - 3, b"\x04")
    with pytest.raises(IntegrityError):
        Bitmap.from_bytes(OFFSET_END - 3, b"\x08")


def test_bitmap_bytes_with_a_needless_zero_are_refused() -> None:
    with pytest.raises(IntegrityError, match="needless zero"):
        Bitmap.from_bytes(0, b"\x01\x00")


@given(st.binary(max_size=12), st.integers(1, 80), offsets)
def test_any_bytes_are_the_one_form_of_a_bitmap_or_an_integrity_error(data: bytes, limit: int, start: int) -> None:
    try:
        bitmap = Bitmap.from_bytes(start, data, limit=limit)
    except IntegrityError:
        return
    assert bitmap.to_bytes() == data
    assert bitmap.count == int.from_bytes(data, "little").bit_count()


@given(st.lists(st.integers(0, 79)), st.data())
def test_changed_bitmap_bytes_are_another_bitmap_or_an_integrity_error(settled: list[int], data: st.DataObject) -> None:
    bitmap = Bitmap(limit=80)
    bitmap.set_many(int64(settled))
    changed = mutate(bitmap.to_bytes(), data)
    try:
        again = Bitmap.from_bytes(0, changed, limit=80)
    except IntegrityError:
        return
    assert again.to_bytes() == changed
