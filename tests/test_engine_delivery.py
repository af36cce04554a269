"""Handing over, acks, failures and time: what a consumer can rely on while nothing is kept aside."""

from __future__ import annotations

import numpy as np
import pytest
from tests.engine_world import WALL_US, World, keyed, offsets_of, plain

from penstock.engine.messages import Ack, Extend, HeadMoved, Nack
from penstock.engine.policy import Policy
from penstock.engine.states import Outcome, State
from penstock.offsets import Range

# --- windows and credit -----------------------------------------------------------------------


def test_no_more_is_read_than_the_window_holds_in_events() -> None:
    world = World(plain(100), policy=Policy(window_events=10, read_events=4))
    world.tell(HeadMoved(100))
    assert world.shard.read_position == 8  # 2 more would not be worth a read
    assert world.shard.in_memory == 8
    assert not world.shard.wants
    world.ask(4)
    world.ack(0, 1)
    assert world.shard.in_memory == 10
    assert world.shard.read_position == 12


def test_no_more_is_read_than_the_window_holds_in_bytes() -> None:
    world = World(plain(100, nbytes=10), policy=Policy(window_bytes=100, read_bytes=40))
    world.tell(HeadMoved(100))
    assert world.shard.in_memory == 8


def test_no_more_is_handed_over_than_there_is_credit_for_in_events_or_bytes() -> None:
    world = World()
    world.publish(*keyed(*range(10), nbytes=10))
    assert world.ask(3) == [0, 1, 2]
    assert world.ask(5, bytes_max=25) == [3, 4]
    assert world.ask(5, bytes_max=25, singly=True) == [5, 6]


@pytest.mark.parametrize("singly", [True, False])
def test_one_event_is_handed_over_however_large_it_is_and_nothing_overtakes_it(singly: bool) -> None:
    world = World()
    world.publish(*keyed(7, nbytes=10), *keyed(8, nbytes=1_000), *keyed(9, nbytes=10))
    assert world.ask(bytes_max=50, singly=singly) == [0]
    assert world.ask(bytes_max=50, singly=singly) == [1]
    assert world.ask(bytes_max=50, singly=singly) == [2]


def test_a_log_that_is_read_event_by_event_does_not_become_a_thousand_pages() -> None:
    world = World(chunk=1, policy=Policy(read_events=1))
    world.publish(*keyed(*range(200)))
    assert world.shard.in_memory == 200
    assert len(list(world.shard._work.pages)) == 1
    assert world.ask(singly=True) == list(range(200))
    world.ack(*range(0, 200, 2))
    world.leave()
    world.publish(*plain(1), *keyed(300, expiry=WALL_US))
    assert world.drain() == [*range(1, 200, 2), 200]
    assert world.shard.next_offset == 202
    assert world.outcomes[201] is Outcome.EXPIRED


def test_chunks_with_and_without_keys_are_of_different_lanes_though_they_are_one_page() -> None:
    world = World(chunk=1)
    world.publish(*keyed(None, 7))
    assert len(list(world.shard._work.pages)) == 1
    assert world.ask(1) == [0]
    assert world.ask() == [1]


def test_the_head_may_move_back_in_a_notification_that_came_late() -> None:
    world = World()
    world.publish(*plain(5))
    world.tell(HeadMoved(2))
    assert world.shard.head == 5


# --- acks -------------------------------------------------------------------------------------


def test_acks_in_the_order_3_1_2_move_the_cursor_to_none_1_and_3() -> None:
    world = World(start=1)
    world.publish(*plain(4))
    assert world.ask() == [1, 2, 3]
    cursors = []
    for offset in (3, 1, 2):
        world.ack(offset)
        cursors.append(world.shard.next_offset - 1)
    assert cursors == [0, 1, 3]


@pytest.mark.parametrize(
    "offsets",
    [
        Range(2, 5),
        np.array([2, 3, 4]),
        np.array([4, 2, 3]),
        np.array([2, 2, 3, 4, 4]),
        np.array([-5, 2, 3, 4, 99]),
    ],
    ids=["range", "array", "any order", "repeated", "with strangers"],
)
@pytest.mark.parametrize("singly", [True, False])
def test_an_ack_of_many_settles_exactly_those(offsets: Range | np.ndarray, singly: bool) -> None:
    world = World()
    world.publish(*keyed(*range(7)))
    world.ask(6, singly=singly)
    world.tell(Ack(offsets))
    assert [offset for offset in range(7) if world.state(offset) is State.SETTLED] == [2, 3, 4]
    assert world.shard.in_flight == 3
    assert world.shard.next_offset == 0
    world.ack(0, 1)
    assert world.shard.next_offset == 5
    assert list(world.outcomes) == [0, 1, 2, 3, 4]


def test_an_ack_may_come_twice_and_for_what_was_never_handed_over() -> None:
    world = World()
    world.publish(*plain(3))
    world.ask(1)
    world.ack(0, 0, 1, 99)
    assert world.shard.next_offset == 1
    assert world.drain() == [1, 2]


def test_a_range_of_acks_settles_nothing_that_was_not_handed_over() -> None:
    world = World()
    world.publish(*keyed(*range(6)))
    world.ask(4)
    world.give_back(1)
    world.tell(Ack(Range(0, 6)))
    assert list(world.outcomes) == [0, 2, 3]
    assert world.drain() == [1, 4, 5]


def test_an_ack_after_a_timeout_settles_wherever_the_event_is_by_now() -> None:
    world = World(policy=Policy(timeout_seconds=5, jitter=0))
    world.publish(*keyed(7, 8, 9))
    world.ask(singly=True)
    for offset in range(3):
        world.start(world.hand_of(offset))
    world.wait(5)
    assert world.states() == [State.DELAYED] * 3
    world.ack(0)
    world.wait(1)
    assert world.states() == [State.SETTLED, State.READY, State.READY]
    world.ack(1)
    assert world.ask() == [2]
    world.ack(2)
    assert world.outcomes == dict.fromkeys(range(3), Outcome.ACKED)
    assert world.drain() == []


def test_an_ack_of_the_first_try_counts_while_the_second_is_under_way() -> None:
    world = World()
    world.publish(*plain(1))
    world.ask()
    world.nack(0, delay=0)
    assert world.ask() == [0]
    world.ack(0)
    world.nack(0)
    assert world.outcomes == {0: Outcome.ACKED}


def test_highest_first_on_an_idle_topic_then_a_failure_is_delivered_again_without_a_publish() -> None:
    world = World()
    world.publish(*keyed(7, 8, 9))
    world.ask(singly=True)
    world.ack(2)
    world.nack(0, hand=world.hand_of(0), delay=0.2)
    assert world.wait_for_timer()
    assert world.ask() == [0]


# --- failures ---------------------------------------------------------------------------------


def test_a_stale_failure_is_ignored() -> None:
    world = World()
    world.publish(*plain(1))
    world.ask()
    first = world.hand
    world.give_back(0)
    world.ask()
    world.nack(0, hand=first)
    assert world.state(0) is State.HELD
    assert world.shard.progress.attempts == {}
    world.give_back(0, hand=first)
    assert world.state(0) is State.HELD


def test_a_failure_comes_back_after_its_delay_or_the_backoff() -> None:
    world = World(policy=Policy(jitter=0))
    world.publish(*keyed(7, 8))
    world.ask(singly=True)
    world.nack(0, hand=world.hand_of(0), delay=3)
    world.nack(1, hand=world.hand_of(1))
    assert world.shard.next_timer() == pytest.approx(world.monotonic + 1)
    world.wait(1)
    assert world.ask() == [1]
    world.nack(1)
    world.wait(1.9)
    assert world.ask() == []
    world.wait(0.2)
    assert world.ask() == [0, 1]
    assert world.delivered[-1].attempts == {0: 2, 1: 3}


def test_attempts_are_in_the_step_and_survive_a_restart() -> None:
    world = World(policy=Policy(jitter=0))
    world.publish(*keyed(7, 8))
    world.ask(singly=True)
    world.nack(0, hand=world.hand_of(0))
    assert world.store.attempts == {0: 1}
    world.leave()
    world.restart(clean=True)
    assert world.ask() == [0, 1]
    assert world.delivered[-1].attempts == {0: 2}
    world.ack(0)
    assert world.store.attempts == {}


@pytest.mark.parametrize("lane", [None, 7])
def test_exhausted_retries_make_a_dead_letter_and_the_rest_goes_on(lane: int | None) -> None:
    world = World(policy=Policy(max_retries=2, backoff_seconds=1))
    world.publish(*keyed(lane, lane))
    for attempt in (1, 2, 3):
        assert world.ask(1) == [0]
        assert world.delivered[-1].attempts.get(0, 1) == attempt
        world.nack(0)
        world.wait(5)
    assert world.outcomes == {0: Outcome.DEAD}
    row, state = world.store.rows[0]
    assert (row.attempts, state) == (3, "dead")
    assert world.store.parks[-1].failure.kind == "Oops"
    assert world.drain() == [1]


def test_exhausted_retries_can_discard() -> None:
    world = World(policy=Policy(max_retries=0, exhausted="discard"))
    world.publish(*plain(2))
    world.ask(1)
    world.nack(0)
    assert world.outcomes == {0: Outcome.DISCARDED}
    assert world.store.rows == {}
    assert world.drain() == [1]


def test_exhausted_retries_can_halt_until_somebody_resumes() -> None:
    world = World(policy=Policy(max_retries=0, exhausted="halt"))
    world.publish(*keyed(7, 8, 9))
    world.ask(2, singly=True)
    world.nack(0, hand=world.hand_of(0))
    assert [halted.offset for halted in world.halts] == [0]
    assert world.shard.halted == world.halts[0]
    assert world.shard.standing
    assert world.ask() == []
    world.ack(1)  # what is under way may end
    world.change(max_retries=5)
    assert world.is_halted()
    world.change(resumes=1)
    assert not world.is_halted()
    assert world.ask() == [0, 2]
    assert world.delivered[-1].attempts == {}


def test_two_that_exhaust_their_retries_are_both_given_new_ones_by_one_resume() -> None:
    world = World(policy=Policy(max_retries=0, exhausted="halt"))
    world.publish(*keyed(7, 8))
    world.ask()
    world.nack(0, 1)
    assert [halted.offset for halted in world.halts] == [0]
    world.change(resumes=1)
    assert world.ask() == [0, 1]
    assert world.delivered[-1].attempts == {}


def test_a_halt_ends_when_its_event_is_acked_after_all() -> None:
    world = World(policy=Policy(max_retries=0, exhausted="halt"))
    world.publish(*plain(2))
    world.ask(1)
    world.nack(0)
    assert world.is_halted()
    world.ack(0)
    assert not world.is_halted()
    assert world.drain() == [1]


def test_a_halted_shard_halts_again_after_a_restart() -> None:
    world = World(policy=Policy(max_retries=0, exhausted="halt"))
    world.publish(*plain(2))
    world.ask(1)
    world.nack(0)
    world.restart(clean=True)
    assert world.is_halted()
    world.change(resumes=1)
    assert world.drain() == [0, 1]


@pytest.mark.parametrize("exhausted", ["dead", "halt", "discard"])
def test_a_rejected_event_is_a_dead_letter_whatever_the_policy(exhausted: str) -> None:
    world = World(policy=Policy(exhausted=exhausted))  # type: ignore[arg-type]
    world.publish(*plain(1))
    world.ask()
    world.nack(0, retry=False)
    assert world.outcomes == {0: Outcome.DEAD}
    assert not world.is_halted()


# --- lanes ------------------------------------------------------------------------------------


def test_singly_one_of_a_lane_is_handed_over_at_a_time() -> None:
    world = World()
    world.publish(*keyed(7, 7, 8, 7, 8, 9))
    assert world.ask(singly=True) == [0, 2, 5]
    assert world.ask(singly=True) == []
    world.ack(2)
    assert world.ask(singly=True) == [4]
    world.ack(0)
    assert world.ask(singly=True) == [1]


def test_a_batch_holds_several_of_a_lane_in_order_and_the_next_one_none_of_them() -> None:
    world = World()
    world.publish(*keyed(7, 7, 8))
    assert world.ask(2) == [0, 1]
    world.publish(*keyed(7, 9))
    assert world.ask() == [2, 4]
    world.ack(0)
    assert world.ask() == []
    world.ack(1)
    assert world.ask() == [3]


@pytest.mark.parametrize("singly", [True, False])
def test_a_failing_event_keeps_its_lane_in_order_and_blocks_no_other(singly: bool) -> None:
    world = World(policy=Policy(backoff_seconds=1, backoff_seconds_max=1))
    world.publish(*keyed(7, 8, 7, 8, 7))
    came = []
    for _ in range(10):
        for offset in world.ask(1, singly=singly):
            came.append(offset)
            if offset == 0 and came.count(0) < 3:
                world.nack(0, hand=world.hand_of(0))
            else:
                world.ack(offset)
        if not world.shard.in_flight and len(came) in {3, 4}:
            world.wait(1)
    assert came == [0, 1, 3, 0, 0, 2, 4]


@pytest.mark.parametrize("singly", [True, False])
def test_an_event_does_not_wait_for_a_later_one_of_its_lane_that_is_delayed(singly: bool) -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask()
    world.nack(1, delay=4)
    world.nack(0, delay=0)
    assert world.ask(singly=singly) == [0]


def test_switching_between_batches_and_single_events_keeps_lanes_in_order() -> None:
    world = World()
    world.publish(*keyed(7, 7, 7, 8, 8))
    assert world.ask(2) == [0, 1]
    assert world.ask(singly=True) == [3]
    world.ack(1)
    assert world.ask(singly=True) == []
    world.ack(0)
    assert world.ask(singly=True) == [2]
    assert world.ask() == []
    world.ack(3)
    assert world.ask() == [4]


@pytest.mark.parametrize("singly", [True, False])
def test_an_event_waits_while_a_batch_holds_a_later_one_of_its_lane(singly: bool) -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask()
    world.give_back(0)
    assert world.ask(singly=singly) == []
    world.ack(1)
    assert world.ask(singly=singly) == [0]


def test_events_without_a_key_are_one_lane_beside_those_with_keys() -> None:
    world = World()
    world.publish(*keyed(None, 7, None, 7))
    assert world.ask(singly=True) == [0, 1]
    world.ack(0)
    assert world.ask(singly=True) == [2]


def test_a_hot_key_in_front_does_not_hide_the_others() -> None:
    world = World()
    world.publish(*keyed(*[7] * 500, *range(100, 150)))
    assert world.ask(singly=True) == [0, *range(500, 550)]
    world.ack(0)
    assert world.ask(singly=True) == [1]


# --- giving back ------------------------------------------------------------------------------


def test_what_is_given_back_is_not_counted_and_comes_again_in_order() -> None:
    world = World()
    world.publish(*keyed(7, 8, 7))
    world.ask()
    world.give_back(0, 2)
    assert world.ask() == [0, 2]
    assert world.delivered[-1].attempts == {}
    world.ack(1)
    assert list(world.outcomes) == [1]


def test_an_ack_of_what_was_given_back_is_a_mistake_and_ignored() -> None:
    world = World()
    world.publish(*plain(1))
    world.ask()
    world.give_back(0)
    world.ack(0)
    assert world.drain() == [0]


def test_a_consumer_that_left_gives_everything_back_uncounted() -> None:
    world = World(policy=Policy(timeout_seconds=1))
    world.publish(*keyed(7, 8, 9))
    world.ask(singly=True)
    world.start()
    world.ack(1)
    world.leave()
    assert world.shard.in_flight == 0
    world.wait(10)
    assert world.ask() == [0, 2]
    assert world.delivered[-1].attempts == {}


# --- time -------------------------------------------------------------------------------------


def test_a_timeout_runs_from_the_start_of_a_handler_and_not_before() -> None:
    world = World(policy=Policy(timeout_seconds=5, jitter=0))
    world.publish(*keyed(7, 8))
    world.ask(singly=True)
    world.wait(60)
    assert world.shard.in_flight == 2
    world.start(world.hand_of(0))
    assert world.shard.next_timer() == pytest.approx(world.monotonic + 5)
    world.wait(5)
    assert world.states() == [State.DELAYED, State.HELD]
    world.wait(1)
    world.ask()
    assert world.delivered[-1].attempts == {0: 2}


def test_a_timeout_can_be_extended() -> None:
    world = World(policy=Policy(timeout_seconds=5))
    world.publish(*plain(1))
    world.ask()
    world.start()
    world.wait(4)
    world.tell(Extend(world.hand, 10))
    world.wait(9)
    assert world.state(0) is State.HELD
    world.wait(1)
    assert world.state(0) is State.DELAYED


def test_the_time_of_a_batch_is_for_what_it_still_holds() -> None:
    world = World(policy=Policy(timeout_seconds=5))
    world.publish(*keyed(7, 8, 9))
    world.ask()
    world.start()
    world.ack(0)
    world.nack(1, delay=60)
    world.wait(5)
    assert world.states() == [State.SETTLED, State.PARKED, State.DELAYED]


def test_what_a_batch_has_failed_it_holds_no_more() -> None:
    world = World(policy=Policy(timeout_seconds=50))
    world.publish(*keyed(7, 8))
    world.ask()
    world.start()
    world.nack(0, delay=1)
    world.ack(1)
    assert world.shard.next_timer() == world.monotonic + 1
    world.wait(1)
    assert world.shard.next_timer() is None


@pytest.mark.parametrize("singly", [True, False])
def test_a_hand_that_holds_nothing_has_no_deadline(singly: bool) -> None:
    world = World(policy=Policy(timeout_seconds=5))
    world.publish(*keyed(7, 8, 9))
    world.ask(singly=singly)
    for hand in range(world.hand, world.hand + (3 if singly else 1)):
        world.start(hand)
    assert world.shard.next_timer() is not None
    world.tell(Ack(Range(0, 3)))
    assert world.shard.next_timer() is None
    world.start()
    assert world.shard.next_timer() is None


def test_a_timeout_that_is_set_later_applies_to_handlers_that_begin_then() -> None:
    world = World()
    world.publish(*plain(1))
    world.ask()
    world.start()
    world.change(timeout_seconds=5)
    assert world.shard.next_timer() is None
    world.start()
    world.wait(5)
    assert world.state(0) is State.DELAYED
    world.change(timeout_seconds=None)


def test_an_expired_event_is_settled_and_not_handed_over() -> None:
    world = World()
    world.publish(*keyed(7, 8, expiry=WALL_US + 2_000_000), *keyed(7))
    assert world.ask(1) == [0]
    world.wait(2)
    assert world.ask() == []
    assert world.outcomes == {1: Outcome.EXPIRED}
    world.ack(0)  # what is in somebody's hands is theirs
    assert world.drain() == [2]
    assert world.outcomes == {0: Outcome.ACKED, 1: Outcome.EXPIRED, 2: Outcome.ACKED}


# --- changes on the fly -----------------------------------------------------------------------


def test_a_paused_shard_hands_over_and_reads_nothing_and_loses_nothing() -> None:
    world = World()
    world.publish(*plain(3))
    world.ask(1)
    world.change(paused=True)
    world.publish(*plain(2))
    assert world.ask() == []
    assert world.shard.standing
    assert not world.shard.wants
    assert world.shard.read_position == 3
    world.ack(0)
    world.change(paused=False)
    assert world.drain() == [1, 2, 3, 4]


def test_a_wider_window_and_another_retry_policy_take_effect_at_once() -> None:
    world = World(plain(100), policy=Policy(window_events=10))
    world.tell(HeadMoved(100))
    assert world.shard.in_memory == 10
    world.change(window_events=50)
    assert world.shard.in_memory >= 25
    world.change(max_retries=0)
    world.ask(1)
    world.nack(0)
    assert world.outcomes == {0: Outcome.DEAD}


def test_a_failure_of_many_is_decided_for_each() -> None:
    world = World(policy=Policy(max_retries=1, jitter=0))
    world.publish(*keyed(*range(50)))
    world.ask()
    world.tell(Nack(world.hand, Range(0, 50), delay_seconds=1.0))
    world.wait(1)
    assert world.ask() == list(range(50))
    assert set(world.delivered[-1].attempts.values()) == {2}
    world.tell(Nack(world.hand, np.arange(0, 50, 2)))
    assert set(world.outcomes) == set(range(0, 50, 2))
    assert world.shard.in_flight == 25


def test_the_highest_offset_that_was_handed_over_is_known() -> None:
    world = World()
    assert world.shard.last_dispatched == -1
    world.publish(*plain(5))
    world.ask(3)
    assert world.shard.last_dispatched == 2
    assert offsets_of(world.delivered[-1]) == [0, 1, 2]


def test_whatever_waits_for_a_lane_in_hand_does_not_hide_what_does_not() -> None:
    world = World()
    world.publish(*keyed(1, 1, 5, *[1] * 1_900, 2, 3))
    assert world.ask(1) == [0]
    assert world.ask(1) == [2]
    assert world.ask(2) == [1_903, 1_904], "behind more than are looked at together"
