"""What is to be written: steps that chain, and memory that stays bounded when nobody takes them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_world import WALL_US, Source, World, keyed, offsets_of, plain

from penstock.engine import pages
from penstock.engine.lanes import Lanes
from penstock.engine.messages import Ack, Ask, Chunk, HeadMoved, NotWritten, ReadDone, Step, Written
from penstock.engine.page import GONE, Some
from penstock.engine.policy import Policy
from penstock.engine.progress import LATENCIES, Progress
from penstock.engine.shard import UNWRITTEN_EVENTS_MAX, UNWRITTEN_ROWS_MAX
from penstock.engine.states import Outcome
from penstock.offsets import Bitmap, Range


def _settled(step: Step) -> dict[Outcome, list[int]]:
    return {outcome: spans.to_offsets().tolist() for outcome, spans in step.outcomes.items() if spans}


def test_a_step_holds_exactly_what_was_settled_also_ahead_of_the_cursor() -> None:
    world = World(auto=False)
    world.publish(*keyed(*range(6)))
    world.answer_read()
    world.ask()
    world.ack(0, 1, 4)
    world.nack(3, retry=False)
    step = world.shard.take_step()
    assert step is not None
    assert (step.number, step.begin, step.next_offset) == (1, 0, 2)
    assert _settled(step) == {Outcome.ACKED: [0, 1, 4], Outcome.DEAD: [3]}
    bitmap = Bitmap.from_bytes(step.next_offset, step.settled)
    assert [offset for offset in range(7) if offset in bitmap] == [0, 1, 3, 4]


def test_steps_are_taken_one_at_a_time_and_chain() -> None:
    world = World(auto=False)
    world.publish(*plain(6))
    world.answer_read()
    world.ask()
    assert world.shard.take_step() is None
    assert world.shard.write_at() is None
    world.ack(0)
    first = world.shard.take_step()
    world.ack(1)
    assert world.shard.take_step() is None, "one is under way"
    assert world.shard.write_at() is None
    assert first is not None
    world.tell(Written(first))
    assert world.shard.write_at() == 0.0
    second = world.shard.take_step()
    assert second is not None
    assert (second.number, second.begin, second.next_offset) == (2, 1, 2)
    assert _settled(second) == {Outcome.ACKED: [1]}


def test_what_was_not_written_becomes_part_of_the_next_step() -> None:
    world = World(auto=False, policy=Policy(max_retries=0))
    world.publish(*keyed(7, 8, 9, 7))
    world.answer_read()
    world.ask()
    world.ack(0)
    world.nack(1)
    step = world.shard.take_step()
    assert step is not None
    world.ack(3)
    world.fail_to_write()  # nothing: a step is under way
    world.tell(NotWritten(step))
    assert world.shard.write_at() == 0.0
    merged = world.shard.take_step()
    assert merged is not None
    assert (merged.number, merged.begin, merged.next_offset) == (1, 0, 2)
    assert _settled(merged) == {Outcome.ACKED: [0, 3], Outcome.DEAD: [1]}
    assert [park.row.offset for park in merged.parks] == [1]
    assert sum(merged.latencies) == 2
    world.store.write(merged)
    world.tell(Written(merged))
    assert world.shard.write_at() is None


def test_what_was_not_written_does_not_replace_what_came_after_it() -> None:
    world = World(policy=Policy(max_retries=1, exhausted="halt"))
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.wait(60)
    world.ask()
    world.auto = False
    world.nack(0)
    step = world.shard.take_step()
    assert step is not None
    assert step.parks[0].row.attempts == 2
    world.change(resumes=1)
    world.tell(NotWritten(step))
    world.write()
    assert world.store.rows[0][0].attempts == 0


def test_a_later_row_of_an_offset_replaces_the_one_that_was_not_written() -> None:
    world = World(policy=Policy(max_retries=5))
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.wait(60)
    world.ask()
    world.auto = False
    world.nack(0, delay=60)
    world.fail_to_write()
    world.ack(0)  # late
    world.write()
    assert world.store.rows[0][0].attempts == 2
    world.answer()
    assert world.outcomes == {0: Outcome.ACKED}


def test_a_step_that_only_counts_attempts_has_no_record() -> None:
    world = World(policy=Policy(jitter=0))
    world.publish(*plain(1))
    world.ask()
    world.nack(0)
    assert world.store.attempts == {0: 1}
    assert world.store.number == 0
    world.wait(1)
    world.drain()
    assert world.store.number == 1


def test_what_is_others_is_passed_whether_it_was_settled_before_or_not() -> None:
    settled = Bitmap(10)
    settled.set(13)
    progress = Progress(next_offset=10, settled=settled.to_bytes(), attempts={}, generation=0, number=0)
    assert progress.known_until == 14
    progress.pass_read(np.array([11, 13]))
    progress.pass_read(np.array([14, 17]))
    assert (progress.next_offset, progress.dirty) == (10, False)
    progress.settle(Outcome.ACKED, np.array([10, 12, 15]))
    assert progress.next_offset == 16
    progress.pass_read(np.array([18]))
    progress.settle(Outcome.ACKED, Range(16, 17))
    assert progress.next_offset == 19
    step = progress.take()
    assert step is not None
    assert (step.next_offset, step.settled) == (19, b"")
    assert _settled(step) == {Outcome.ACKED: [10, 12, 15, 16]}


def test_progress_is_written_by_count_or_after_a_time() -> None:
    world = World(auto=False, policy=Policy(checkpoint_events=3, checkpoint_seconds=2))
    world.publish(*plain(5))
    world.answer_read()
    world.ask()
    world.ack(0)
    assert world.shard.write_at() == world.monotonic + 2
    world.ack(1)
    assert world.shard.write_at() == world.monotonic + 2
    world.ack(2)
    assert world.shard.write_at() == 0.0


def test_retried_ones_and_latencies_are_counted() -> None:
    world = World(policy=Policy(jitter=0, checkpoint_events=100, checkpoint_seconds=100))
    world.publish(*plain(4))
    world.ask()
    world.nack(0, delay=1)
    world.wait(1)
    world.ask()
    world.tell(Ack(Range(0, 4)))
    step = world.shard.take_step()
    assert step is not None
    assert step.retried == 1
    assert step.latencies[(world.wall_us - WALL_US).bit_length()] == sum(step.latencies) == 4


def test_an_event_that_was_parked_and_failed_before_counts_as_retried_once() -> None:
    world = World()
    world.publish(*keyed(7))
    world.ask()
    world.auto = False
    world.nack(0, delay=60)
    step = world.shard.take_step()
    assert step is not None
    assert step.retried == 0
    world.store.write(step)
    world.tell(Written(step))
    world.wait(60)
    world.answer_fetch()
    world.ask()
    world.ack(0)
    step = world.shard.take_step()
    assert step is not None
    assert step.retried == 1


def test_latencies_are_those_of_every_single_event_whatever_was_appended_together() -> None:
    chance = np.random.default_rng(7)
    took = np.repeat(chance.integers(-5, 1 << 41, 60), chance.integers(1, 9, 60))
    progress = Progress(next_offset=0, settled=b"", attempts={}, generation=0, number=0)
    progress.note_latency(WALL_US - took, WALL_US)
    progress.note_latency(took[:0], WALL_US)
    progress.settle(Outcome.ACKED, Range(0, len(took)))
    step = progress.take()
    assert step is not None
    wanted = [0] * LATENCIES
    for each in took.tolist():
        wanted[min(max(each, 0).bit_length(), LATENCIES - 1)] += 1
    assert list(step.latencies) == wanted


def test_what_was_appended_at_about_one_time_is_counted_together_and_nothing_else_is() -> None:
    progress = Progress(next_offset=0, settled=b"", attempts={}, generation=0, number=0)
    assert progress.note_latency_of_all(7, (WALL_US - 1_000, WALL_US - 600), WALL_US)
    assert not progress.note_latency_of_all(7, (WALL_US - 1_100, WALL_US - 600), WALL_US)
    progress.settle(Outcome.ACKED, Range(0, 7))
    step = progress.take()
    assert step is not None
    assert {took: count for took, count in enumerate(step.latencies) if count} == {10: 7}


# --- memory -----------------------------------------------------------------------------------


def test_a_batch_with_few_events_missing_is_handed_over_as_long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.page.RUN_MIN", 4)
    world = World()
    world.publish(*keyed(*range(100, 112)))
    assert world.ask() == list(range(12))
    world.nack(4, delay=60)
    world.leave()  # all but one are ready again
    assert world.ask() == [0, 1, 2, 3, *range(5, 12)]
    assert [piece.offsets for piece in world.delivered[-1].pieces] == [Range(0, 4), Range(5, 12)]
    monkeypatch.setattr("penstock.engine.page.RUN_MIN", 6)
    world.leave()
    assert world.ask() == [0, 1, 2, 3, *range(5, 12)]
    assert [type(piece.offsets) for piece in world.delivered[-1].pieces] == [np.ndarray]
    world.leave()
    assert sorted(world.drain()) == [0, 1, 2, 3, *range(5, 12)]


def test_a_page_that_few_events_keep_alive_is_narrowed_to_them_if_it_keeps_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.engine.pages.GONE_WINDOWS", 900 / Policy().window_bytes)
    world = World()
    world.publish(*keyed(*range(100)))
    world.ask()
    world.tell(Ack(Range(0, 90)))
    [page] = world.shard._work.pages
    assert len(page.chunks[0].source.rows) == 100
    world.tell(Ack(Range(90, 91)))
    assert page.chunks[0].source.rows == frozenset(range(91, 100))
    assert world.shard._work.pages.gone_bytes == 0
    world.leave()
    assert world.ask() == list(range(91, 100))
    assert offsets_of(world.delivered[-1]) == list(range(91, 100))
    world.tell(Ack(Range(91, 100)))
    assert list(world.shard._work.pages) == []


def test_what_is_open_of_a_large_page_is_estimated_until_it_is_narrowed() -> None:
    sizes = np.ones(1_000, np.int64)
    sizes[-1] = 9_001
    asked: list[str] = []

    def measured() -> NDArray[np.int64]:
        asked.append("sizes")
        return sizes

    chunk = Chunk(
        Range(0, 1_000),
        nbytes=10_000,
        sizes=measured,
        lanes=None,
        expiries=None,
        appended_at=sizes,
        source=Source(0, range(1_000)),
    )
    kept = pages.Pages(0)
    kept.add(chunk)
    [page] = kept
    for start in range(0, 900, 100):
        kept.move(Some(page, np.arange(start, start + 100)), GONE)
    assert (kept.open_bytes, kept.gone_bytes) == (1_000, 9_000)
    assert asked == [], "to measure each event takes long, in the event loop"
    kept.sweep(8_999)
    assert page.narrowed
    assert (kept.open_bytes, kept.gone_bytes) == (9_100, 0)
    kept.move(Some(page, np.arange(900, 1_000)), GONE)
    assert (kept.open_bytes, kept.gone_bytes) == (0, 0)


def test_small_pages_that_few_events_keep_alive_are_narrowed_when_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.engine.page.JOINED_EVENTS_MAX", 10)
    monkeypatch.setattr("penstock.engine.pages.GONE_WINDOWS", 500 / Policy().window_bytes)
    world = World(chunk=10)
    world.publish(*keyed(*range(100)))
    world.ask()
    for start in range(0, 100, 10):
        world.tell(Ack(Range(start, start + 9)))
        assert world.shard._work.pages.gone_bytes <= 500
    narrowed = [page.start for page in world.shard._work.pages if page.narrowed]
    assert narrowed == [0, 10, 20, 30, 40]  # the oldest ones
    world.tell(Ack(Range(0, 100)))
    assert world.shard._work.pages.gone_bytes == 0
    assert list(world.shard._work.pages) == []


def test_a_joined_page_that_few_events_keep_alive_lets_go_of_the_other_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.pages.GONE_WINDOWS", 0.0)
    world = World(chunk=1)
    world.publish(*keyed(*range(64)))
    world.ask()
    world.tell(Ack(np.array([each for each in range(64) if each not in {5, 60}])))
    [page] = world.shard._work.pages
    assert [chunk.span.start for chunk in page.chunks if chunk.source is not None] == [5, 60]
    world.leave()
    assert world.drain() == [5, 60]


def test_what_is_written_keeps_no_more_memory_than_its_own() -> None:
    world = World(auto=False)
    world.publish(*keyed(*range(100)))
    world.answer_read()
    world.ask()
    world.nack(50, retry=False)
    step = world.shard.take_step()
    assert step is not None
    assert step.parks[0].source.rows == {50}
    assert step.parks[0].index == 50


def test_a_slow_lane_does_not_keep_what_was_parked_behind_it_in_its_queue() -> None:
    world = World(policy=Policy(window_events=200))
    world.publish(*keyed(*[7] * 1_800, 8))
    assert world.ask(singly=True) == [0]
    world.ask(singly=True)
    world.wait(1)
    assert world.ask(singly=True) == [1_800]
    assert world.ask(singly=True) == []
    world.publish(*keyed(8))
    assert world.ask(singly=True) == []
    lanes = world.shard._work.lanes
    assert isinstance(lanes, Lanes)
    queues = lanes._queues
    assert queues is not None
    assert {lane: len(queue) for lane, queue in queues._queues.items()} == {7: 1, 8: 2}
    world.ack(0, 1_800)
    assert world.ask(singly=True) == [1, 1_801]


def test_memory_is_bounded_when_nothing_is_ever_written() -> None:
    world = World(plain(10), auto=False, policy=Policy(window_events=1_000, read_events=1_000))
    count = UNWRITTEN_EVENTS_MAX + 10_000
    world.shard.handle(HeadMoved(count), world.now)
    world.reads.clear()
    shard, now = world.shard, world.now
    at = 0
    while not shard.standing:
        ones = np.ones(1_000, np.int64)
        chunk = Chunk(
            Range(at, at + 1_000),
            nbytes=1_000,
            sizes=ones.copy,
            lanes=None,
            expiries=None,
            appended_at=ones,
            source=None,
        )
        shard.handle(ReadDone(at, (chunk,)), now)
        assert shard.handle(Ask(1_000, 1 << 30), now)
        shard.handle(Ack(Range(at, at + 1_000)), now)
        at += 1_000
    assert at <= count
    assert shard.handle(Ask(1_000, 1 << 30), now) == []
    step = shard.take_step()
    assert step is not None
    shard.handle(Written(step), now)
    assert not shard.standing


def test_rows_that_are_not_written_are_bounded_too() -> None:
    world = World(auto=False, policy=Policy(window_events=10_000, max_retries=0))
    world.publish(*keyed(*range(3_000)))
    world.answer_read()
    rejected = 0
    while offsets := world.ask(500):
        world.nack(*offsets)
        rejected += len(offsets)
    assert UNWRITTEN_ROWS_MAX < rejected <= UNWRITTEN_ROWS_MAX + 500
    world.write()
    assert len(world.ask(500)) == 500


@pytest.mark.parametrize("clean", [True, False])
def test_a_restart_repeats_at_most_what_was_in_flight_or_unwritten(clean: bool) -> None:
    world = World(auto=False)
    world.publish(*keyed(*range(10)))
    world.answer_read()
    world.ask(6)
    world.ack(0, 2)
    world.write()
    world.ack(1)
    world.restart(clean=clean)
    world.auto = True
    world.answer()
    came = world.drain() + world.drain()
    assert came == [1, 3, 4, 5, 6, 7, 8, 9]
