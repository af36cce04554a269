"""One read path: what is left out is read again, then declared; nothing is passed over in silence."""

from __future__ import annotations

from tests.engine_world import World, keyed, plain

from penstock.engine.messages import HeadMoved, LogTrimmed, ReadDone, ReadFailed
from penstock.engine.policy import Policy
from penstock.engine.states import Outcome
from penstock.offsets import Bitmap, Gap


def _by_hand(count: int, start: int = 0, policy: Policy | None = None) -> World:
    world = World(plain(count), auto=False, start=start, policy=policy)
    world.tell(HeadMoved(count))
    return world


def test_reading_begins_at_the_cursor_and_asks_for_what_there_is_room_for() -> None:
    world = _by_hand(200, start=100, policy=Policy(read_events=50, read_bytes=1_000))
    assert world.reads == [(100, 50, 1_000, 50)]
    world.tell(HeadMoved(200))
    assert len(world.reads) == 1, "one read at a time"


def test_a_hole_is_read_again_twice_and_then_declared() -> None:
    world = _by_hand(110, start=100)
    for gaps in (1, 2):
        read = world.reads.pop()
        items = (world.chunk_of(100, 102), world.chunk_of(105, 110))[read.start > 100 :]
        world.tell(ReadDone(read.start, items))
        assert world.shard.gaps == gaps
        assert world.shard.read_position == 102
        assert world.declared == []
    world.tell(ReadDone(world.reads.pop().start, (world.chunk_of(105, 110),)))
    assert world.shard.gaps == 3
    assert [str(gap) for gap in world.declared] == ["gap [102, 105): the log returned nothing for these offsets"]
    assert world.drain() == [100, 101, 105, 106, 107, 108, 109]
    world.write()
    assert [offset for offset in world.outcomes if world.outcomes[offset] is Outcome.GAP] == [102, 103, 104]


def test_a_hole_that_heals_is_delivered() -> None:
    world = _by_hand(110, start=100)
    world.tell(ReadDone(world.reads.pop().start, (world.chunk_of(100, 102), world.chunk_of(105, 110))))
    world.answer_read()
    assert world.declared == []
    assert world.drain() == list(range(100, 110))


def test_each_hole_is_read_again_on_its_own() -> None:
    world = _by_hand(10)
    holey = (world.chunk_of(1, 2), world.chunk_of(3, 10))
    for _ in range(3):
        world.tell(ReadDone(world.reads.pop().start, holey))
    assert world.declared == [Gap(0, 1, "the log returned nothing for these offsets")]
    assert world.shard.read_position == 2
    world.answer_read()
    assert world.ask() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_declared_gap_is_settled_handed_on_and_counted() -> None:
    world = World()
    world.lost.append(Gap(2, 5, "damaged bytes"))
    world.publish(*plain(7))
    assert world.declared == [Gap(2, 5, "damaged bytes")]
    assert world.shard.gaps == 1
    assert world.drain() == [0, 1, 5, 6]
    assert world.shard.next_offset == 7
    assert [offset for offset, outcome in world.outcomes.items() if outcome is Outcome.GAP] == [2, 3, 4]


def test_a_policy_that_halts_stops_at_a_gap_until_somebody_resumes() -> None:
    world = World(policy=Policy(exhausted="halt"))
    world.lost.append(Gap(2, 5, "damaged bytes"))
    world.publish(*plain(7))
    assert world.declared == []
    halted = world.shard.halted
    assert halted is not None
    assert (halted.offset, halted.failure.kind) == (2, "Gap")
    assert world.shard.next_offset == 0
    world.change(resumes=1)
    assert world.declared == [Gap(2, 5, "damaged bytes")]
    assert world.drain() == [0, 1, 5, 6]
    assert world.shard.next_offset == 7


def test_of_a_gap_only_what_is_ahead_is_declared() -> None:
    world = _by_hand(10, start=3)
    world.tell(ReadDone(world.reads.pop().start, (Gap(0, 5, "damaged"), world.chunk_of(5, 10))))
    assert world.declared == [Gap(3, 5, "damaged")]
    assert world.ask() == [5, 6, 7, 8, 9]


def test_what_was_trimmed_is_declared_and_reading_goes_on_behind_it() -> None:
    world = _by_hand(10)
    world.reads.clear()
    world.tell(LogTrimmed(4))
    assert [str(gap) for gap in world.declared] == ["gap [0, 4): trimmed before they were delivered"]
    assert world.reads[0].start == 4
    world.answer_read()
    assert world.drain() == [4, 5, 6, 7, 8, 9]
    assert world.shard.next_offset == 10


def test_a_trim_below_what_was_read_takes_nothing() -> None:
    world = _by_hand(10)
    world.answer_read()
    world.tell(LogTrimmed(4))
    assert world.declared == []
    assert world.drain() == list(range(10))


def test_a_trim_of_more_than_the_cursor_can_reach_is_settled_bit_by_bit() -> None:
    world = _by_hand(1)
    world.reads.clear()
    end = 3 * Bitmap.LIMIT + 5
    world.tell(HeadMoved(end + 1))
    world.shard.handle(LogTrimmed(end), world.now)
    assert world.shard.next_offset == end
    assert world.shard.read_position == end


def test_a_trim_beyond_what_an_open_event_allows_waits_for_it() -> None:
    world = _by_hand(2)
    world.answer_read()
    world.ask(1)
    end = 2 * Bitmap.LIMIT
    world.shard.handle(HeadMoved(end + 1), world.now)
    outputs = world.shard.handle(LogTrimmed(end), world.now)
    assert len(outputs) == 1, "nothing is read that could not be settled"
    assert world.shard.read_position == Bitmap.LIMIT
    assert world.shard.next_offset == 0


def test_an_empty_read_is_repeated_when_the_head_is_told_again_and_not_before() -> None:
    world = _by_hand(5)
    world.tell(ReadDone(world.reads.pop().start, ()))
    assert world.reads == []
    world.wait(10)
    assert world.reads == []
    assert world.shard.wants
    world.tell(HeadMoved(5))
    world.answer_read()
    assert world.drain() == [0, 1, 2, 3, 4]


def test_a_read_that_failed_is_repeated_at_its_time() -> None:
    world = _by_hand(5)
    world.tell(ReadFailed(world.reads.pop().start, world.monotonic + 2))
    world.tell(HeadMoved(6))
    assert world.reads == []
    assert not world.shard.wants
    assert world.shard.next_timer() == world.monotonic + 2
    world.wait(2)
    assert world.reads[0].start == 0


def test_an_answer_to_an_older_read_is_ignored() -> None:
    world = _by_hand(10)
    world.reads.clear()
    stale = ReadDone(0, (world.chunk_of(0, 5),))
    world.tell(LogTrimmed(4))
    world.reads.clear()
    world.tell(stale)
    assert world.shard.read_position == 4


def test_a_chunk_that_begins_too_early_is_never_taken_twice() -> None:
    world = _by_hand(10)
    world.tell(ReadDone(world.reads.pop().start, (world.chunk_of(0, 5), world.chunk_of(3, 8))))
    assert world.shard.read_position == 5
    world.tell(ReadDone(world.reads.pop().start, (world.chunk_of(3, 8),)))
    assert world.shard.read_position == 5
    assert world.reads == [], "it would come back for ever"


def test_what_was_settled_ahead_is_not_handed_over_after_a_restart() -> None:
    world = World()
    world.publish(*keyed(*range(10)))
    world.ask()
    world.ack(1, 3, 4, 9)
    world.leave()
    world.restart(clean=True)
    assert world.drain() == [0, 2, 5, 6, 7, 8]
    assert world.shard.next_offset == 10


def test_what_was_settled_ahead_is_not_read_again_when_the_cursor_has_passed_it() -> None:
    world = World(policy=Policy(read_events=1, window_events=2))
    world.publish(*keyed(7, 8))
    world.ask()
    world.ack(1)
    world.leave()
    world.auto = False
    world.restart(clean=True)
    world.answer_read()
    world.reads.clear()
    world.ask()
    world.ack(0)
    assert world.shard.next_offset == 2
    world.tell(ReadDone(1, (world.chunk_of(1, 2),)))
    assert world.ask() == []
    world.write()


def test_a_log_that_is_shorter_than_the_cursor_is_waited_for() -> None:
    world = World(start=5)
    assert world.shard.next_offset == 5
    assert world.shard.next_timer() is None
    world.publish(*plain(6))
    assert world.drain() == [5]
