"""Audits: what is planted is found, exactly, and nothing else is ever called lost."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audit_model import FINAL, History, exploded, judged, naive, offsets_of, some, without

from penstock.audit import spans
from penstock.errors import IntegrityError
from penstock.offsets import OFFSET_END, Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.audit.judging import Judged
    from penstock.runtime.ledger import Record

# --- arithmetic -----------------------------------------------------------------------------------

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: Range(pair[0], sum(pair))), max_size=8
)


def offsets(found: Sequence[Range]) -> set[int]:
    return {offset for each in found for offset in each}


@given(ranges, ranges)
def test_sets_of_ranges_are_sets_of_offsets(one: list[Range], other: list[Range]) -> None:
    ours, theirs = spans.of(one), spans.of(other)
    assert exploded(spans.union([ours, theirs])) == offsets(one) | offsets(other)
    assert exploded(spans.intersection(ours, theirs)) == offsets(one) & offsets(other)
    assert exploded(spans.difference(ours, theirs)) == offsets(one) - offsets(other)
    assert exploded(ours.within(10, 30)) == offsets(one) & set(range(10, 30))
    assert ours.count == len(offsets(one))
    assert not one or bool((ours.starts[1:] > ours.stops[:-1]).all()), "they neither overlap nor touch"
    edges = np.array([0, 7, 7, 40, 80])
    counted = spans.counts_between(ours, edges).tolist()
    assert counted == [len(offsets(one) & set(range(*pair))) for pair in ((0, 7), (7, 7), (7, 40), (40, 80))]


@given(ranges)
def test_what_is_covered_twice_is_in_two_ranges(found: list[Range]) -> None:
    starts, stops = (np.array([getattr(each, name) for each in found], np.int64) for name in ("start", "stop"))
    every = [offset for each in found for offset in each]
    assert exploded(spans.covered_twice(starts, stops)) == {offset for offset in every if every.count(offset) > 1}


@given(st.lists(st.tuples(st.integers(0, 5), ranges), max_size=6), st.sampled_from([0, OFFSET_END - 100]))
def test_groups_do_not_touch_each_other_however_large_offsets_are(
    groups: list[tuple[int, list[Range]]], by: int
) -> None:
    rows = [(group, each.start + by, each.stop + by) for group, found in groups for each in found]
    # A range far away lets the line of all groups be too long for 64 bits.
    rows += [(6, 0, 1), (6, OFFSET_END - 1, OFFSET_END)]
    table = np.array(rows, np.int64)
    found = spans.by_group(table[:, 0], table[:, 1], table[:, 2], spans.melted)
    for group in range(6):
        mine = found[0] == group
        expected = {offset + by for known, each in groups if known == group for offset in offsets(each)}
        assert exploded(spans.Spans(found[1][mine], found[2][mine])) == expected


sets = st.lists(st.tuples(st.integers(0, 1 << 60), st.integers(1, 1 << 40)), max_size=5).map(
    lambda pairs: RangeSet(Range(start, start + length) for start, length in pairs)
)


@given(st.lists(sets, max_size=6))
def test_many_sets_are_decoded_at_once_as_each_by_itself(found: list[RangeSet]) -> None:
    owner, starts, stops = spans.decoded([each.to_bytes() for each in found])
    rows = [(index, each.start, each.stop) for index, known in enumerate(found) for each in known]
    assert list(zip(owner.tolist(), starts.tolist(), stops.tolist(), strict=True)) == rows


@given(st.binary(max_size=24))
def test_bytes_that_are_no_set_are_refused_as_range_sets_refuse_them(data: bytes) -> None:
    try:
        expected = list(iter(RangeSet.from_bytes(data)))  # the length of a set is that of its offsets
    except IntegrityError:
        with pytest.raises(IntegrityError):
            spans.decoded([b"\x03\x03", data])
        return
    _, starts, stops = spans.decoded([data])
    assert [Range(*pair) for pair in zip(starts.tolist(), stops.tolist(), strict=True)] == expected


# --- histories ------------------------------------------------------------------------------------

OUTCOMES = ("acked", "acked", "acked", "expired", "discarded", "gap", "dead", "parked")


@st.composite
def histories(draw: st.DrawFn, *, seeks: bool = True) -> History:
    """A shard that lives a while."""
    history = History(start=draw(st.integers(0, 3)))
    history.end = history.start
    for _ in range(draw(st.integers(0, 9))):
        history.end += draw(st.integers(0, 6))
        act = draw(st.sampled_from(["settle"] * 5 + ["aside"] * 2 + ["replay"] + ["seek"] * seeks))
        if act == "seek":
            history.seek(draw(st.integers(0, history.end)))
            continue
        outcomes: dict[str, list[int]] = {}
        if act == "settle":
            for offset in history.unsettled():
                if draw(st.booleans()):
                    outcomes.setdefault(draw(st.sampled_from(OUTCOMES)), []).append(offset)
        # What waits aside, and what was dead and is brought back, ends in a record as well.
        for offset in sorted(history.waiting if act == "aside" else history.dead if act == "replay" else ()):
            if draw(st.booleans()):
                outcomes.setdefault(draw(st.sampled_from(["acked", "dead", "expired"])), []).append(offset)
        history.step({name: sorted(found) for name, found in outcomes.items()})
    return history


def proven(found: Judged) -> set[int]:
    return {offset for each in found.outcomes.values() for offset in exploded(each)}


def verdicts(found: Judged) -> dict[str, set[int]]:
    names = ("parked", "pending", "unproven", "lost", "twice")
    return {"proven": proven(found), **{name: exploded(getattr(found, name)) for name in names}}


cuts = st.lists(st.integers(0, 40), max_size=4)


@given(histories(), cuts)
def test_of_a_shard_that_lost_nothing_everything_below_its_cursor_is_proven(history: History, cut: list[int]) -> None:
    found = judged(history.facts(), history.records, cuts=cut)
    assert not found.lost
    assert not found.unproven
    assert not found.twice
    assert not found.breaks
    assert exploded(found.parked) == history.waiting
    below = set(range(history.start, history.next_offset)) if history.records else set()
    assert proven(found) >= below - history.waiting
    assert proven(found) == set(history.settled_by) - history.waiting
    assert exploded(found.pending) == set(range(history.next_offset, history.end)) - proven(found) - history.waiting


@given(histories(), st.data(), cuts)
def test_what_is_planted_is_found(history: History, data: st.DataObject, cut: list[int]) -> None:
    said = [(index, x) for index, record in enumerate(history.records) for x in sorted(_settles(record))]
    dropped = set(data.draw(st.lists(st.sampled_from(said), max_size=4))) if said else set()
    deleted = set(data.draw(st.lists(st.integers(0, 20), max_size=2))) & set(range(len(history.records)))
    records = list(history.records)
    for index, offset in dropped:
        records[index] = without(records[index], offset)
    found = judged(history.facts(), [record for index, record in enumerate(records) if index not in deleted], cuts=cut)
    for offset, numbers in history.settled_by.items():
        # Its records, by place; their numbers count from 1.
        left = {number - 1 for number in numbers} - deleted - {index for index, x in dropped if x == offset}
        is_missing = any(number - 1 in deleted for number in numbers)
        if left:
            assert offset in proven(found)
        elif offset < history.next_offset and not is_missing and not deleted:
            assert offset in exploded(found.lost)
        elif is_missing and offset not in {x for _, x in dropped}:
            assert offset not in exploded(found.lost)
    assert exploded(found.lost) <= {x for _, x in dropped}, "nothing is called lost that was not planted"
    assert deleted or not found.unproven


def _settles(record: Record) -> set[int]:
    return {x for name, body in record.outcomes.items() if name in FINAL for x in offsets_of(body)}


@given(histories(seeks=False), st.data())
def test_settled_twice_is_found_unless_it_is_a_dead_letter_that_was_brought_back(
    history: History, data: st.DataObject
) -> None:
    final = [
        (index, x)
        for index, record in enumerate(history.records)
        for name, body in record.outcomes.items()
        if name in FINAL - {"dead"}
        for x in sorted(offsets_of(body))
    ]
    again = data.draw(st.lists(st.sampled_from(final), max_size=3)) if final else []
    records = list(history.records)
    planted = set()
    for index, offset in again:
        place = data.draw(st.integers(index, len(records) - 1))
        name = data.draw(st.sampled_from(["acked", "dead"]))
        before = records[place].outcomes.get(name, b"")
        if offset in offsets_of(before):
            continue
        outcomes = {**records[place].outcomes, name: some(offsets_of(before) | {offset})}
        records[place] = msgspec.structs.replace(records[place], outcomes=outcomes)
        planted |= {offset} if name == "acked" else set()
    found = judged(history.facts(), records, cuts=[1, 2])
    died = {x for record in records for x in offsets_of(record.outcomes.get("dead", b""))}
    assert exploded(found.twice) == planted - died
    assert not found.lost


def mangled(draw: Callable[[Any], Any], history: History) -> list[Record]:
    """Return a ledger in which anything may have happened to records."""
    found = (_mangled(draw, record) for record in history.records)
    return [record for record in found if record is not None]


def _mangled(draw: Callable[[Any], Any], record: Record) -> Record | None:
    match draw(st.sampled_from(["keep"] * 6 + ["delete", "drop", "begin", "end", "double", "generation"])):
        case "delete":
            return None
        case "drop" if said := sorted(_settles(record)):
            return without(record, draw(st.sampled_from(said)))
        case "begin" | "end" as edge:
            field = {"begin": "begin", "end": "next_offset"}[edge]
            return msgspec.structs.replace(record, **{field: draw(st.integers(0, 30))})
        case "double":
            body = some(offsets_of(record.outcomes.get("acked", b"")) | {draw(st.integers(0, 20))})
            return msgspec.structs.replace(record, outcomes={**record.outcomes, "acked": body})
        case "generation":
            return msgspec.structs.replace(record, generation=record.generation + draw(st.integers(0, 2)))
    return record


@given(histories(), histories(), st.data(), cuts)
def test_the_arithmetic_of_ranges_says_what_a_naive_auditor_says(
    earlier: History, history: History, data: st.DataObject, cut: list[int]
) -> None:
    lives = mangled(data.draw, earlier) if data.draw(st.booleans()) else []
    records = lives + mangled(data.draw, history)
    behind = data.draw(st.integers(0, 2))
    facts = history.facts(
        number=max(history.number - behind, 0),
        first=data.draw(st.integers(0, 3)),
        next_offset=min(max(history.next_offset - data.draw(st.integers(-3, 3)), 0), history.end),
        waiting=spans.of_offsets(data.draw(st.sets(st.integers(0, 20), max_size=3)) | history.waiting),
    )
    # A generation may have become higher than the one after it, which no store writes: nobody is asked about that.
    numbers = [(record.number, record.generation) for record in records]
    if any(number <= facts.number and generation > facts.generation for number, generation in numbers) or any(
        one[0] < two[0] and one[1] > two[1] for one, two in pairwise(numbers)
    ):
        return
    assert verdicts(judged(facts, records, cuts=cut)) == naive(facts, records)
