"""An event that kills its process ends as a dead letter, and nobody else is blamed."""

from __future__ import annotations

import pytest
from tests.engine_world import WALL_US, World, keyed, plain

from penstock.engine.policy import Policy
from penstock.engine.states import Outcome, State
from penstock.engine.suspects import GROUP, MARKED


def _left_behind(count: int = 100, *, held: int = 100, policy: Policy | None = None) -> World:
    """Return a world whose first life had some in its hands when it ended without a word."""
    world = World(policy=policy)
    world.publish(*keyed(*range(1_000, 1_000 + count)))
    world.ask(held)
    world.restart(clean=False)
    return world


def test_suspects_come_in_groups_that_are_marked_before() -> None:
    world = _left_behind()
    assert world.shard.suspecting
    world.auto = False
    assert world.ask() == []
    assert world.shard.write_at() == 0.0
    assert world.ask() == [], "it is not written yet"
    world.write()
    assert world.store.attempts == dict.fromkeys(range(GROUP), 0)
    assert world.ask() == list(range(GROUP))
    assert world.delivered[-1].attempts == {}
    assert world.ask() == [], "nothing else until they are through"
    world.auto = True
    world.ack(*range(GROUP))
    assert world.ask() == []
    assert world.ask() == list(range(GROUP, 100))


def test_when_all_are_through_everything_flows_again() -> None:
    world = _left_behind(200, held=10, policy=Policy(window_events=100))
    came = []
    while world.shard.suspecting:
        came.append(world.ask())
        world.ack(*came[-1])
    suspects = [offset for offsets in came[:-1] for offset in offsets]
    assert suspects == list(range(100)), "as many as were in a window"
    assert came[-1] == list(range(100, 200))
    assert world.delivered[-1].attempts == {}
    assert world.shard.next_offset == 200


def test_a_group_that_could_not_be_marked_is_not_handed_over() -> None:
    world = _left_behind()
    world.auto = False
    world.ask()
    world.fail_to_write()
    assert world.ask() == []
    world.write()
    assert len(world.ask()) == GROUP


def test_nothing_is_suspected_after_a_clean_end() -> None:
    world = World()
    world.publish(*plain(3))
    world.ask()
    world.leave()
    world.restart(clean=True)
    assert not world.shard.suspecting
    assert world.ask() == [0, 1, 2]
    assert world.delivered[-1].attempts == {}


def test_marked_ones_come_alone_with_the_attempt_written_first() -> None:
    world = _left_behind(10)
    world.ask()
    assert world.ask() == list(range(10))
    world.restart(clean=False)  # it died again, with these ten in hand
    world.auto = False
    assert world.ask() == []
    world.write()
    assert world.store.attempts == {0: 1} | dict.fromkeys(range(1, 10), 0)
    assert world.ask() == [0]
    assert world.delivered[-1].attempts == {}
    assert world.ask() == []
    world.ack(0)
    assert world.ask() == []
    world.write()
    assert world.ask() == [1]


def test_one_that_is_alone_and_given_back_is_not_counted() -> None:
    world = _left_behind(2)
    world.ask()
    world.ask()
    world.restart(clean=False)
    world.ask()
    assert world.ask() == [0]
    world.give_back(0)
    assert world.store.attempts == {0: 0, 1: 0}


def test_one_that_is_alone_and_fails_is_counted_once() -> None:
    world = _left_behind(2, policy=Policy(jitter=0))
    world.ask()
    world.ask()
    world.restart(clean=False)
    world.ask()
    assert world.ask() == [0]
    world.nack(0)
    assert world.store.attempts[0] == 1
    world.ask()
    assert world.ask() == [1]


@pytest.mark.parametrize("singly", [True, False])
@pytest.mark.parametrize(
    ("exhausted", "outcome"), [("dead", Outcome.DEAD), ("discard", Outcome.DISCARDED), ("halt", None)]
)
def test_an_event_that_kills_its_process_runs_out_of_attempts_and_the_rest_flows(
    exhausted: str, outcome: Outcome | None, singly: bool
) -> None:
    killer, lives = 77, 1
    world = World(policy=Policy(max_retries=2, exhausted=exhausted))  # type: ignore[arg-type]
    world.publish(*keyed(*[1_000 + number % 90 for number in range(300)]))
    for _ in range(1_000):
        offsets = world.ask(singly=singly)
        if killer in offsets:
            lives += 1
            world.restart(clean=False)
        elif world.shard.halted:
            assert exhausted == "halt"
            assert world.shard.halted.offset == killer
            killer = -1
            world.change(resumes=1)
        else:
            world.ack(*offsets)
            if world.shard.next_offset == 300 and not world.shard.parked:
                break
    assert lives == 1 + 1 + 1 + 3  # as one of many, in a group, and alone with each of its attempts
    expected = dict.fromkeys(range(300), Outcome.ACKED)
    assert world.outcomes == (expected if outcome is None else expected | {77: outcome})
    assert [park.row.offset for park in world.store.parks] == ([77] if outcome is Outcome.DEAD else [])
    assert all(park.failure.kind == "ProcessDied" for park in world.store.parks)


def test_a_suspect_that_fails_holds_the_others_up_until_it_is_through() -> None:
    world = _left_behind(3, policy=Policy(jitter=0))
    world.ask()
    assert world.ask() == [0, 1, 2]
    world.nack(1, delay=2)
    world.ack(0, 2)
    world.publish(*keyed(5))
    assert world.ask() == []
    world.wait(2)
    world.ask()
    assert world.ask() == [1]
    world.ack(1)
    assert world.ask() == [3]


def test_a_suspect_that_is_tried_again_much_later_holds_nobody_up() -> None:
    world = World()
    world.publish(*keyed(None, None, 7))
    world.ask()
    world.restart(clean=False)
    world.ask()
    assert world.ask() == [0, 1, 2]
    world.nack(0, delay=3_600)
    world.ack(1, 2)
    world.publish(*keyed(8))
    assert world.ask() == [3]


def test_suspects_of_a_lane_keep_their_order() -> None:
    world = World()
    world.publish(*keyed(7, 7, 7))
    world.ask()
    world.restart(clean=False)
    world.ask()
    assert world.ask(1) == [0]
    world.give_back(0)
    world.ask()
    assert world.ask() == [0]
    world.ack(0)
    assert world.drain() == []
    assert world.drain() == [1]


def test_a_suspect_that_expires_before_it_is_marked_is_not_waited_for() -> None:
    world = World()
    world.publish(*keyed(7, 8, expiry=WALL_US + 1_000_000), *keyed(9))
    world.ask()
    world.restart(clean=False)
    world.auto = False
    world.ask(2)
    world.wait(1)
    assert world.ask() == []
    world.auto = True
    world.wait(0)
    assert world.ask() == [2]
    assert world.outcomes == {0: Outcome.EXPIRED, 1: Outcome.EXPIRED}


# --- rows that wait aside ---------------------------------------------------------------------


def _rows_left_behind(count: int) -> World:
    world = World(policy=Policy(max_retries=2))
    world.publish(*keyed(*range(1_000, 1_000 + count)))
    world.ask()
    world.nack(*range(count), delay=60)
    world.wait(60)
    assert len(world.ask()) == count
    world.restart(clean=False)
    return world


def test_parked_rows_are_suspects_too() -> None:
    world = _rows_left_behind(3)
    world.auto = False
    assert world.ask() == []
    assert world.ask() == []
    world.write()
    assert [row.due_at for row in world.store.waiting] == [MARKED] * 3
    assert world.ask() == [0, 1, 2]
    world.restart(clean=False)
    world.answer_fetch()
    world.ask()
    world.write()
    assert [row.attempts for row in world.store.waiting] == [2, 1, 1]
    assert world.ask() == [0]


def test_events_that_are_not_read_yet_are_waited_for() -> None:
    world = World()
    world.publish(*plain(3))
    world.ask()
    world.auto = False
    world.restart(clean=False)
    assert world.ask() == []
    assert world.shard.suspecting
    world.answer_read()
    assert world.ask() == []
    world.write()
    assert world.ask() == [0, 1, 2]


def test_parked_rows_that_are_being_fetched_are_waited_for() -> None:
    world = _rows_left_behind(1)
    world.auto = False
    world.restart(clean=False)
    assert world.ask() == []
    assert world.shard.suspecting
    world.answer_fetch()
    assert world.ask() == []
    world.write()
    assert world.ask() == [0]


def test_a_parked_row_that_kills_its_process_becomes_a_dead_letter() -> None:
    world = _rows_left_behind(5)
    lives = 0
    for _ in range(100):
        offsets = world.ask()
        if 3 in offsets:
            lives += 1
            world.restart(clean=False)
        else:
            world.ack(*offsets)
    assert world.outcomes == dict.fromkeys(range(5), Outcome.ACKED) | {3: Outcome.DEAD}
    assert [park.row.offset for park in world.store.parks if park.failure.kind == "ProcessDied"] == [3]
    assert lives == 1 + 2  # in a group, and alone with each attempt that it had left
    assert not world.shard.suspecting


def test_rows_that_are_not_due_are_not_waited_for() -> None:
    world = World()
    world.publish(*keyed(7, 8))
    world.ask()
    world.nack(0, delay=60)
    world.restart(clean=False)
    world.ask()
    assert world.ask() == [1]
    world.ack(1)
    world.publish(*keyed(9))
    assert world.ask() == [2]
    assert not world.shard.suspecting


def test_a_row_that_becomes_due_meanwhile_waits_until_suspects_are_through() -> None:
    world = World()
    world.publish(*keyed(7, 8))
    world.ask()
    world.nack(0, delay=60)
    world.restart(clean=False)
    world.ask()
    assert world.ask() == [1]
    world.wait(60)
    assert world.state(0) is State.READY
    assert world.ask() == []
    world.ack(1)
    assert world.ask() == [0]


def test_a_shard_with_nothing_unsettled_suspects_nothing_for_long() -> None:
    world = World()
    world.publish(*plain(3))
    world.drain()
    world.restart(clean=False)
    world.publish(*plain(1))
    assert world.ask() == [3]
    assert not world.shard.suspecting
