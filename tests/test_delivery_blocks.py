"""What a read brings: events of keys that are looked for come by themselves, and what is left stays whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.batch import Batch, Place
from penstock.columns import SLOTS, slot_of_key
from penstock.engine.division import Division
from penstock.engine.messages import About, Chunk, Wanted
from penstock.engine.page import GONE, Page, Some
from penstock.engine.share import slots_of
from penstock.offsets import Gap, Range
from penstock.rows import Partition
from penstock.runtime import blocks
from penstock.runtime.blocks import SPLITS_MAX, lanes_of, read_items

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PARTITION = Partition("log", 3)


class Log:
    """A log of these keys, in blocks of this size."""

    def __init__(self, keys: Sequence[str | None], block: int) -> None:
        payloads = [b"%d" % number for number in range(len(keys))]
        place = Place("t", PARTITION.number, 1, "s", "c")
        self.batches = [
            Batch.build(payloads[start : start + block], key=keys[start : start + block]).at(start, place, ())
            for start in range(0, len(keys), block)
        ]

    def read(self, _partition: Partition, _start: int, **_limits: Any) -> Iterator[Batch]:
        yield from self.batches


def wanted_of(*keys: bytes) -> Wanted:
    lanes = [int(lanes_of([Batch.build([b""], key=[key])], 0)[0]) for key in keys]
    return Wanted(np.array(lanes, np.int64), keys)


def read(log: Any, **options: Any) -> list[Chunk]:
    return [item for item in read_items(log, PARTITION, 0, 1_000, 1 << 20, **options) if isinstance(item, Chunk)]


def test_events_of_keys_that_are_looked_for_are_chunks_by_themselves() -> None:
    keys = [f"key-{number % 30:06}" for number in range(90)]
    log = Log(keys, 25)
    wanted = wanted_of(b"key-000003", b"key-000029")
    chunks = read(log, wanted=wanted, laned=True)
    offsets = [3, 29, 33, 59, 63, 89]
    assert [(each.span.start, each.span.stop) for each in chunks if len(each.span) == 1] == [
        (o, o + 1) for o in offsets
    ]
    assert [each.span.start for each in chunks[1:]] == [each.span.stop for each in chunks[:-1]]
    assert (chunks[0].span.start, chunks[-1].span.stop) == (0, 90)
    for chunk in chunks:
        assert chunk.found is not None
        assert chunk.found.wanted is wanted
        assert chunk.found.rows.tolist() == ([0] if len(chunk.span) == 1 else [])
        assert set(chunk.found.lanes.tolist()) <= set(wanted.lanes.tolist())
        [*events] = chunk.source.events(slice(0, len(chunk.span)))
        assert [event.offset for event in events] == list(range(chunk.span.start, chunk.span.stop))
        assert [event.data for event in events] == [b"%d" % event.offset for event in events]


def test_many_that_are_looked_for_do_not_become_many_chunks() -> None:
    log = Log(["same"] * (SPLITS_MAX + 1) + ["other"], 4)
    [chunk] = read(log, wanted=wanted_of(b"same"), laned=True)
    assert chunk.found is not None
    assert chunk.found.rows.tolist() == list(range(SPLITS_MAX + 1))


def test_lanes_are_found_where_their_keys_are_not_known() -> None:
    keys = [f"k{number % 7}" for number in range(40)]
    wanted = Wanted(wanted_of(b"k5").lanes, None)
    [chunk] = read(Log(keys, 11), wanted=wanted, laned=True)
    assert chunk.found is not None
    assert chunk.found.rows.tolist() == [row for row, key in enumerate(keys) if key == "k5"]


def test_a_few_events_are_not_divided() -> None:
    [chunk] = read(Log(["a", "b", "c"], 2), slotted=True, division=Division([slots_of(range(SLOTS))]))
    assert chunk.divided is None


@pytest.mark.parametrize("block", [1, 7, 100])
def test_whose_an_event_is_is_told_of_one_as_of_all(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "DIVIDED_MIN", 60)
    keys = [None if number % 5 == 0 else f"customer-{number}" for number in range(60)]
    own = slots_of(range(0, SLOTS, 3))
    [chunk] = read(Log(keys, block), slotted=True, division=Division([own]))
    slots = chunk.slots(PARTITION.number % SLOTS)
    for row, key in enumerate(keys):
        encoded = None if key is None else key.encode()
        assert chunk.about is not None
        assert chunk.about(row) == About(encoded, slot_of_key(encoded, PARTITION.number))
        assert slots[row] == slot_of_key(encoded, PARTITION.number)
    assert chunk.divided is not None
    mine = np.asarray(chunk.divided.rows[0])
    assert mine.tolist() == [row for row in range(60) if own[slots[row]]]
    assert [event.data for event in chunk.source.events(mine)] == [b"%d" % row for row in mine]


@pytest.mark.parametrize("block", [1, 7, 100])
@pytest.mark.parametrize("own_max", [1, 5, 20, 59])
def test_a_read_ends_before_there_are_more_of_its_own_than_asked_for(
    block: int, own_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "DIVIDED_MIN", 1)
    keys = [None if number % 5 == 0 else f"customer-{number}" for number in range(100)]
    own = slots_of(range(0, SLOTS, 2))
    log = Log(keys, block)
    everything = read(log, slotted=True, division=Division([own]))[0].slots(PARTITION.number % SLOTS)
    mine = np.flatnonzero(own[everything]).tolist()
    stop = mine[own_max] if own_max < len(mine) else 100
    stop = stop if stop == 100 else stop // block * block or stop  # with a block, if one has ended by then
    [chunk] = read(log, slotted=True, division=Division([own]), own_max=own_max)
    assert (chunk.span.start, chunk.span.stop) == (0, stop)
    assert chunk.divided is not None
    handed = np.asarray(chunk.divided.rows[0]).tolist()
    assert handed == [row for row in mine if row < stop]
    assert len(handed) <= own_max
    assert [event.key for event in chunk.source.events(slice(0, stop))] == [
        None if key is None else key.encode() for key in keys[:stop]
    ]


@pytest.mark.parametrize(("slot", "count"), [(PARTITION.number, 10), (PARTITION.number + 1, 50)])
def test_a_read_of_events_without_keys_is_limited_to_those_of_their_slot(slot: int, count: int) -> None:
    chunks = read(Log([None] * 50, 10), slotted=True, division=Division([slots_of([slot])]), own_max=12)
    assert sum(len(chunk.span) for chunk in chunks) == count


def test_a_read_that_is_limited_ends_with_what_is_before_the_first_too_many_behind_a_hole() -> None:
    log = Log([None] * 50, 10)
    batches = [*log.batches[:2], Gap(20, 30, "lost"), *log.batches[3:]]
    log.read = lambda *_, **__: iter(batches)  # type: ignore[method-assign,assignment]
    found = read_items(log, PARTITION, 0, 1_000, 1 << 20, slotted=True, division=Division([slots_of([3])]), own_max=20)  # type: ignore[arg-type]
    assert [item.range if isinstance(item, Gap) else item.span for item in found] == [Range(0, 20), Range(20, 30)]


@pytest.mark.parametrize("block", [1, 7, 100])
def test_a_key_that_is_looked_for_does_not_change_whose_the_others_are(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "DIVIDED_MIN", 1)
    keys = [f"customer-{number % 90}" for number in range(100)]
    own = slots_of(range(0, SLOTS, 2))
    chunks = read(Log(keys, block), slotted=True, laned=True, division=Division([own]), wanted=wanted_of(b"customer-5"))
    assert len(chunks) == 5
    for chunk in chunks:
        slots = [slot_of_key(keys[offset].encode(), PARTITION.number) for offset in chunk.span]
        assert chunk.slots(PARTITION.number).tolist() == slots
        assert chunk.divided is not None
        assert np.asarray(chunk.divided.rows[0]).tolist() == [row for row, slot in enumerate(slots) if own[slot]]


@pytest.mark.parametrize(("own_max", "stop"), [(5, 5), (10, 10), (14, 10), (29, 20), (30, 30), (90, 30)])
def test_a_read_that_ends_before_there_are_too_many_ends_with_a_block_if_it_can(own_max: int, stop: int) -> None:
    log = Log([f"key-{number}" for number in range(30)], 10)
    everything = Division([slots_of(range(SLOTS))])
    chunks = read(log, slotted=True, division=everything, own_max=own_max)
    assert chunks[0].span.start == 0
    assert chunks[-1].span.stop == stop


def test_a_page_that_is_narrowed_keeps_no_block() -> None:
    log = Log([f"key-{number}" for number in range(1_000)], 1_000)
    [batch] = log.batches
    alone = sys.getrefcount(batch)
    [chunk] = read(log)
    page = Page(chunk, 0, 0)
    page.move(Some(page, np.arange(1, 1_000)), GONE)
    assert sys.getrefcount(batch) > alone
    page.narrow()
    assert sys.getrefcount(batch) == alone, "what is gone is in memory still"
    assert page.about(0) == About(b"key-0", slot_of_key(b"key-0", PARTITION.number))
    [event] = chunk.source.events(slice(0, 1))
    assert event.data == b"0"
