"""What is archived next: all that is missing and nothing else, in pieces of a good size; and what is merged."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.lake.entries import DAY_US, LakeFile
from penstock.lake.plan import Aim, Backlog, Piece, lost, merges, missing, pieces
from penstock.offsets import Range, RangeSet

AIM = Aim(file_bytes=1_000, file_bytes_min=100, age_seconds=60, merged_files_min=3)
NOW_US = 10 * DAY_US


def ranges(most: int = 300) -> st.SearchStrategy[RangeSet]:
    return st.lists(st.tuples(st.integers(0, most), st.integers(0, 40)), max_size=6).map(
        lambda found: RangeSet(Range(start, start + length) for start, length in found)
    )


def backlog(span: Range, *, end: int | None = None, event_bytes: float = 10.0, age_seconds: float = 0) -> Backlog:
    since = NOW_US - int(age_seconds * 1e6)
    return Backlog("orders", "log", 0, (span,), span.stop if end is None else end, event_bytes, since)


def planned(found: list[Backlog], *, tasks: int = 1, everything: bool = True) -> list[Piece]:
    return pieces(found, AIM, tasks=tasks, everything=everything, now_us=NOW_US)


@given(archived=ranges(), start=st.integers(0, 200), length=st.integers(0, 200))
def test_what_is_planned_is_what_the_log_has_less_what_the_lake_has(
    archived: RangeSet, start: int, length: int
) -> None:
    bounds = Range(start, start + length)
    found = missing(archived, bounds)
    planned_pieces = planned([Backlog("orders", "log", 0, found, bounds.stop, 10.0, 0)], tasks=3)
    offsets = [offset for piece in planned_pieces for offset in range(piece.start, piece.stop)]
    assert sorted(offsets) == [offset for offset in bounds if offset not in archived]


@given(archived=ranges(), start=st.integers(0, 400))
def test_what_neither_has_behind_the_beginning_of_the_lake_is_lost(archived: RangeSet, start: int) -> None:
    found = RangeSet(lost(archived, Range(start, start + 10)))
    beginning = next(iter(archived)).start if archived else start
    expected = [offset for offset in range(beginning, start) if offset not in archived]
    assert found.to_offsets().tolist() == expected


@given(
    lengths=st.lists(st.integers(1, 2_000), min_size=1, max_size=5),
    event_bytes=st.floats(1, 500),
    tasks=st.integers(1, 16),
)
def test_pieces_are_as_large_as_files_should_be(lengths: list[int], event_bytes: float, tasks: int) -> None:
    found = [
        Backlog("orders", "log", number, (Range(0, length),), length, event_bytes, 0)
        for number, length in enumerate(lengths)
    ]
    for piece in planned(found, tasks=tasks):
        size = (piece.stop - piece.start) * event_bytes
        assert size <= 1.5 * AIM.file_bytes + event_bytes
        assert size >= min(0.6 * AIM.file_bytes_min, lengths[piece.partition] * event_bytes) - event_bytes


def test_little_is_divided_among_tasks_but_not_into_files_that_are_not_worth_it() -> None:
    assert len(planned([backlog(Range(0, 60))], tasks=4)) == 4  # 600 bytes: 150 each
    assert len(planned([backlog(Range(0, 25))], tasks=4)) == 2  # 250 bytes: 4 would be less than 100 each


def test_the_beginnings_of_all_partitions_come_first() -> None:
    found = [Backlog("orders", "log", number, (Range(0, 500),), 500, 10.0, 0) for number in range(3)]
    assert [piece.partition for piece in planned(found)[:6]] == [0, 1, 2, 0, 1, 2]
    for number in range(3):
        mine = [piece for piece in planned(found) if piece.partition == number]
        assert all(one.stop == other.start for one, other in pairwise(mine))


def test_without_need_it_waits_until_a_file_is_worth_it_or_an_event_is_old() -> None:
    small, large = Range(100, 109), Range(100, 110)
    assert planned([backlog(small)], everything=False) == []
    assert len(planned([backlog(large)], everything=False)) == 1
    assert len(planned([backlog(small, age_seconds=60)], everything=False)) == 1
    assert planned([backlog(small, age_seconds=59)], everything=False) == []
    assert len(planned([backlog(small, end=500)], everything=False)) == 1, "it cannot grow any more"


# --- merging ------------------------------------------------------------------------------------


def file(start: int, stop: int, size: int, *, partition: int = 0, day: int = 0) -> LakeFile:
    moment = day * DAY_US
    return LakeFile("orders", "log", partition, start, stop, "t", 1, size, moment, moment + 5, b"")


def chain(*sizes: int, **stated: int) -> list[LakeFile]:
    return [file(number, number + 1, size, **stated) for number, size in enumerate(sizes)]


def test_many_small_neighbours_are_merged_and_few_are_not() -> None:
    assert merges(chain(50, 50, 50), AIM) == [chain(50, 50, 50)]
    assert merges(chain(50, 50), AIM) == []
    assert merges(chain(500, 500, 500), AIM) == [], "they are large enough"


def test_only_what_follows_each_other_on_one_day_is_merged() -> None:
    one, two, three = chain(50, 50, 50)
    assert merges([one, three, two], AIM) == [[one, two, three]]
    assert merges([one, two, three._replace(start=3, stop=4)], AIM) == []
    assert merges([one, two, three._replace(first_us=DAY_US, last_us=DAY_US)], AIM) == []
    assert merges([one, two, three._replace(partition=1)], AIM) == []


@given(sizes=st.lists(st.integers(0, 700), max_size=30), days=st.lists(st.integers(0, 1), min_size=30, max_size=30))
def test_a_merge_never_makes_too_large_a_file_nor_rewrites_a_large_one_for_a_little(
    sizes: list[int], days: list[int]
) -> None:
    files = [
        file(number, number + 1, size, day=day) for number, (size, day) in enumerate(zip(sizes, days, strict=False))
    ]
    groups = merges(files, AIM)
    chosen = [each for group in groups for each in group]
    assert len(chosen) == len(set(chosen))
    for group in groups:
        total = sum(each.event_bytes for each in group)
        assert len(group) >= AIM.merged_files_min
        assert total <= AIM.file_bytes
        assert 2 * max(each.event_bytes for each in group) <= total
        assert all(one.stop == other.start and one.date == other.date for one, other in pairwise(group))
