"""What a partition knows of its producers survives as bytes, and time never goes back for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.deduplication import ProducerTable
from penstock.errors import IntegrityError, ProducerExpired
from penstock.offsets import Range
from penstock.producers import PRODUCER_IDLE_SECONDS, Run, process_producer
from penstock.rows import Appended

NOW = 1_767_225_600_000_000
IDLE_US = round(PRODUCER_IDLE_SECONDS * 1e6)

runs = st.builds(
    Run,
    producer=st.sampled_from([b"a" * 16, b"b" * 16, process_producer(NOW)]),
    epoch=st.integers(0, 2),
    first_sequence=st.integers(0, 300),
    length=st.integers(1, 5),
    digest=st.integers(0, 3),
)


def played(table: ProducerTable, offered: list[Run]) -> list[tuple[object, ...]]:
    """Offer runs one after the other, storing news, and return what was answered."""
    answers: list[tuple[object, ...]] = []
    end = 0
    for run in offered:
        answer = table.answer(run, NOW)
        if answer is None:
            table.remember(run, Range(end, end + run.length), NOW)
            answer = Appended(Range(end, end + run.length))
            end += run.length
        answers.append((answer.offsets, answer.duplicate, type(answer.refused)))
    return answers


@given(st.lists(runs, max_size=60), st.lists(runs, max_size=20))
def test_a_table_that_went_through_bytes_answers_as_before(before: list[Run], after: list[Run]) -> None:
    table = ProducerTable()
    played(table, before)
    copy = ProducerTable.from_bytes(table.to_bytes())
    assert len(copy) == len(table)
    assert played(copy, after) == played(table, after)
    assert copy.to_bytes() == table.to_bytes()


@given(st.lists(runs, max_size=80))
def test_no_sequence_is_ever_stored_twice(offered: list[Run]) -> None:
    stored: set[tuple[bytes, int]] = set()
    for run, answer in zip(offered, played(ProducerTable(), offered), strict=True):
        if answer[0] is not None and not answer[1]:
            sequences = {(run.producer, sequence) for sequence in range(run.first_sequence, run.end_sequence)}
            assert not sequences & stored
            stored |= sequences


def test_a_wall_clock_that_jumped_ahead_and_back_makes_no_repeat_look_like_news() -> None:
    table = ProducerTable()
    early = Run(process_producer(NOW), 0, 0, 1, 7)
    table.remember(early, Range(0, 1), NOW)
    later = Run(process_producer(NOW + 2 * IDLE_US), 0, 0, 1, 7)
    table.remember(later, Range(1, 2), NOW + 2 * IDLE_US)  # and the first one is forgotten
    answer = table.answer(early, NOW + 1)
    assert answer is not None
    assert isinstance(answer.refused, ProducerExpired)
    again = ProducerTable.from_bytes(table.to_bytes()).answer(early, NOW + 1)
    assert again is not None
    assert isinstance(again.refused, ProducerExpired)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x92\x00", b"\x92\x00\x91\x91\x00", b"x" * 40])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        ProducerTable.from_bytes(data)
