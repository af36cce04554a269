"""Slots of blocks: the same whoever asks, found out once where a block is read again, and never too many in memory."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from penstock.batch import Batch, Place
from penstock.columns import hashes_of, slot_of_key
from penstock.producers import Run
from penstock.rows import Partition
from penstock.runtime import hashed
from penstock.runtime.hashed import EVENTS_MIN, HOPE, RUNS_MAX, SLOTS_OF_BLOCKS, Remembered

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTITION = Partition("log", 3)
COUNT = EVENTS_MIN


def a_block(number: int, count: int = COUNT, runs: int = 1, *, digest: int = 0) -> Batch:
    """Return one whose keys tell it from all others."""
    keys = [None if row % 10 == 0 else f"key-{digest}-{number * count + row}" for row in range(count)]
    start, length = number * count, count // runs
    made = tuple(Run(b"p" * 16, 0, start + run * length, length, digest) for run in range(runs))
    return Batch.build([b""] * count, key=keys).at(start, Place("t", PARTITION.number, 1, "s", "c"), made)


def expected(batches: Sequence[Batch]) -> list[int]:
    return [slot_of_key(key, PARTITION.number) for batch in batches for key in batch.keys.to_pylist()]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many events were hashed, call by call."""
    counts: list[int] = []

    def counted(columns: Sequence[Any], seed: int) -> Any:
        counts.append(sum(map(len, columns)))
        return hashes_of(columns, seed)

    monkeypatch.setattr(hashed, "hashes_of", counted)
    return counts


def test_what_is_read_again_is_hashed_no_more(calls: list[int]) -> None:
    remembered = Remembered()
    blocks = [a_block(number) for number in range(6)]
    assert remembered.of(PARTITION, blocks[:1]).tolist() == expected(blocks[:1])
    # The second reader shows that there are several; from now on the first to come does it for the others.
    assert remembered.of(PARTITION, blocks[:1]).tolist() == expected(blocks[:1])
    assert remembered.of(PARTITION, blocks[1:3]).tolist() == expected(blocks[1:3])
    assert calls == [COUNT, COUNT, 2 * COUNT]
    for again in (blocks[:1], blocks[:3], blocks[2:3]):
        assert remembered.of(PARTITION, again).tolist() == expected(again)
    assert calls == [COUNT, COUNT, 2 * COUNT]
    assert remembered.of(PARTITION, blocks[1:5]).tolist() == expected(blocks[1:5])
    assert calls[3:] == [2 * COUNT], "only what is new"


def test_blocks_that_are_read_once_are_not_kept(calls: list[int]) -> None:
    remembered = Remembered()
    for number in range(2 * HOPE):
        remembered.of(PARTITION, [a_block(number)])
    assert len(calls) == 2 * HOPE
    assert not any(slots is not None for slots in remembered._seen.values())
    remembered.of(PARTITION, [a_block(2 * HOPE - 1)])
    for number in range(2 * HOPE, 5 * HOPE):
        remembered.of(PARTITION, [a_block(number)])
    assert sum(slots is not None for slots in remembered._seen.values()) <= HOPE, "nobody came again for long"


def test_a_block_at_the_same_place_with_other_events_is_another_one() -> None:
    remembered = Remembered()
    one, other = a_block(0), a_block(0, digest=1)
    for _ in range(3):
        for block in (one, other):
            assert remembered.of(PARTITION, [block]).tolist() == expected([block])
            elsewhere = remembered.of(Partition("log", 4), [block])
            assert elsewhere[0] == 4, "without a key it is the slot of its partition"


@pytest.mark.parametrize("block", [a_block(0, EVENTS_MIN - 1), a_block(0, runs=RUNS_MAX + 1)])
def test_small_blocks_and_those_of_many_publishers_are_hashed_each_time(block: Batch, calls: list[int]) -> None:
    remembered = Remembered()
    for _ in range(3):
        assert remembered.of(PARTITION, [block]).tolist() == expected([block])
    assert len(calls) == 3


def test_no_more_is_kept_than_may_be(calls: list[int]) -> None:
    remembered = Remembered(blocks_max=4, events_max=3 * COUNT)
    blocks = [a_block(number) for number in range(10)]
    for block in blocks:
        for _ in range(3):
            assert remembered.of(PARTITION, [block]).tolist() == expected([block])
        kept = [slots for slots in remembered._seen.values() if slots is not None]
        assert len(remembered._seen) <= 4
        assert sum(map(len, kept)) == remembered._events <= 3 * COUNT
        assert all(slots.base is None or slots.base.nbytes == slots.nbytes for slots in kept), "more than it is"
    huge = a_block(0, 4 * COUNT)
    for _ in range(3):
        assert remembered.of(PARTITION, [huge]).tolist() == expected([huge])
    assert calls[-3:] == [4 * COUNT] * 3


def test_what_is_remembered_is_nobody_elses() -> None:
    remembered = Remembered()
    block = a_block(0)
    for _ in range(4):
        slots = remembered.of(PARTITION, [block])
        assert slots.tolist() == expected([block])
        slots[:] = 1


def test_a_child_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    with SLOTS_OF_BLOCKS._lock:  # as if a thread were at it
        child = os.fork()
        if not child:
            signal.alarm(30)
            os._exit(int(SLOTS_OF_BLOCKS.of(PARTITION, [a_block(0)]).tolist() != expected([a_block(0)])))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
