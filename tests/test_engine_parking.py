"""What is kept aside: long retries, the lanes behind them, full windows, and dead letters that were brought back."""

from __future__ import annotations

import pytest
from tests.engine_world import WALL_US, World, keyed, plain

from penstock.engine.aside import Aside
from penstock.engine.messages import Fetched, FetchFailed, HeadMoved, Park, Row, RowsSeen
from penstock.engine.policy import Policy
from penstock.engine.states import Outcome, State


def test_a_long_retry_parks_the_event_and_its_followers_in_one_step() -> None:
    world = World()
    world.publish(*keyed(7, 8, 7, 7))
    world.ask(1)
    world.auto = False
    world.nack(0, delay=60)
    step = world.shard.take_step()
    assert step is not None
    assert [(park.row.offset, park.state) for park in step.parks] == [(0, "waiting"), (2, "waiting"), (3, "waiting")]
    assert [park.row.attempts for park in step.parks] == [1, 0, 0]
    assert list(step.outcomes[Outcome.PARKED].to_offsets()) == [0, 2, 3]
    assert step.next_offset == 1
    assert world.shard.blocked_lanes == {7: 0}


@pytest.mark.parametrize("singly", [True, False])
def test_rows_come_back_in_order_before_later_events_of_their_lane(singly: bool) -> None:
    world = World()
    world.publish(*keyed(7, 7, 8))
    world.ask(1)
    world.nack(0, delay=60)
    assert world.drain() == [2]
    world.publish(*keyed(7, 9))
    assert world.drain(singly=singly) == [4]
    assert world.shard.next_offset == 5
    assert world.shard.parked == 3
    world.wait(59)
    assert world.ask() == []
    assert world.wait_for_timer()
    assert world.drain(singly=singly) == [0, 1, 3]
    assert 3 not in world.delivered[-1].attempts
    assert world.shard.parked == 0
    assert {state for _, state in world.store.rows.values()} == {"done"}
    world.publish(*keyed(7))
    assert world.drain() == [5]


def test_a_row_that_fails_again_waits_again_and_its_lane_with_it() -> None:
    world = World(policy=Policy(max_retries=2))
    world.publish(*keyed(7, 7))
    world.ask(1)
    world.nack(0, delay=60)
    world.wait(60)
    assert world.ask(1) == [0]
    world.nack(0, delay=1)
    assert world.state(0) is State.PARKED
    assert world.store.rows[0][0].attempts == 2
    assert world.ask() == []
    world.wait(1)
    assert world.ask() == [0, 1]
    assert world.delivered[-1].attempts == {0: 3}
    world.nack(0)
    assert world.outcomes == {0: Outcome.DEAD}
    world.ack(1)
    assert world.outcomes == {0: Outcome.DEAD, 1: Outcome.ACKED}


@pytest.mark.parametrize(("exhausted", "outcome"), [("dead", Outcome.DEAD), ("discard", Outcome.DISCARDED)])
def test_a_row_ends_as_the_policy_says(exhausted: str, outcome: Outcome) -> None:
    world = World(policy=Policy(max_retries=1, exhausted=exhausted))  # type: ignore[arg-type]
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.wait(60)
    world.ask()
    world.nack(0)
    assert world.outcomes == {0: outcome}
    assert world.shard.parked == 0


def test_a_row_can_halt_and_be_resumed() -> None:
    world = World(policy=Policy(max_retries=1, exhausted="halt"))
    world.publish(*keyed(7, 8))
    world.ask(1)
    world.nack(0, delay=60)
    world.wait(60)
    assert world.ask(1) == [0]
    world.nack(0)
    assert world.is_halted()
    assert world.ask() == []
    world.restart(clean=True)
    assert world.is_halted()
    world.change(resumes=1)
    assert world.store.rows[0][0].attempts == 0
    assert world.drain() == [0, 1]


def test_a_parked_event_has_its_order_also_if_it_was_brought_back_from_the_dead_before_a_seek() -> None:
    world = World()
    world.publish(*keyed(7, 7))
    # What a seek leaves behind: the cursor is before an event of which a dead letter waits to be delivered once more.
    world.store.rows[0] = (Row(0, 7, world.wall_us + 3600 * 1_000_000, 0, 1), "waiting")
    world.restart(clean=True)
    assert world.ask(1) == [0]
    world.nack(0, delay=60)
    assert world.ask() == []
    world.wait(60)
    assert world.drain() == [0, 1]


def test_a_row_that_was_due_before_the_wall_clock_was_set_back_is_due_again() -> None:
    world = World()
    world.publish(*keyed(7, 8))
    world.ask()
    world.nack(0, delay=60)
    world.nack(1, delay=61)
    world.auto = False
    world.wait(60)
    [fetch] = world.fetches
    assert fetch.offsets == (0,)
    world.wait(2)  # the other one is due, and waits for the fetch that is under way
    world.wall_us -= 100_000_000
    world.answer_fetch()
    world.auto = True
    assert world.drain() == [0]
    assert world.wait_for_timer()
    assert world.drain() == [1]


def test_events_without_a_key_are_never_parked() -> None:
    world = World(policy=Policy(window_events=4))
    world.publish(*keyed(None, 7, None, None, None, 8))
    world.ask(1)
    world.nack(0, delay=60)
    assert world.drain() == [1]
    world.ask()
    world.wait(2)
    assert world.store.rows == {}
    world.wait(57)
    assert world.ask() == []
    world.wait(2)
    assert world.drain() == [0, 2, 3, 4, 5]


def test_nothing_is_fetched_before_it_is_written() -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask()
    world.auto = False
    world.nack(0, delay=60)
    world.give_back(1)  # follows, and is due at once
    world.wait(60)
    assert world.fetches == []
    world.fail_to_write()
    assert world.fetches == []
    world.write()
    assert world.fetches[0].offsets == (0, 1)


def test_nobody_need_ask_for_what_waits_aside_before_it_is_in_memory() -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask(1)
    world.nack(0, delay=60)
    assert world.shard.parked == 2
    assert not world.shard.has_for(None)
    world.auto = False
    world.wait(60)
    assert not world.shard.has_for(None), "it is fetched, and that it came is news"
    world.answer_fetch()
    assert world.shard.has_for(None)
    assert world.ask(1) == [0]
    world.ask(1)
    assert world.shard.unanswered, "its follower is in memory, and may be handed over when it is done"


def test_what_follows_a_row_is_not_fetched_with_it_before_it_is_written() -> None:
    world = World()
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.auto = False
    world.publish(*keyed(7))
    world.answer_read()
    world.wait(60)
    assert world.fetches[0].offsets == (0,)
    world.auto = True
    world.answer()
    assert world.drain() == [0, 1]


def test_a_row_that_has_changed_since_it_was_written_waits_for_the_next_time() -> None:
    aside = Aside([])
    before = Row(5, 7, 0, 1, 0)
    aside.park(before._replace(attempts=2))
    aside.written([Park(before, "waiting", None, -1)])
    assert aside.to_fetch(WALL_US, 100) == ()
    aside.written([Park(before._replace(attempts=2), "waiting", None, -1)])
    assert aside.to_fetch(WALL_US, 100) == (5,)


def test_a_follower_that_fails_shortly_is_parked_behind_its_lane() -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask()
    world.nack(0, delay=60)
    world.nack(1, delay=1)
    assert world.shard.parked == 2
    assert world.shard.next_offset == 2
    world.wait(60)
    assert world.drain() == [0, 1]


def test_a_delayed_follower_is_parked_until_its_own_time() -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask()
    world.nack(1, delay=4)
    world.nack(0, delay=6)
    assert [row.due_at - world.wall_us for row in world.store.waiting] == [6_000_000, 4_000_000]


def test_a_stale_failure_of_a_row_is_ignored() -> None:
    world = World()
    world.publish(*keyed(7))
    world.ask()
    first = world.hand
    world.nack(0, delay=60)
    world.wait(60)
    world.ask()
    world.nack(0, hand=first)
    world.give_back(0, hand=first)
    assert world.state(0) is State.HELD


def test_a_row_waits_for_what_is_before_it_in_memory() -> None:
    world = World(policy=Policy(window_events=2))
    world.publish(*keyed(7, 7, 8))
    assert world.ask(1) == [0]
    assert world.ask() == []
    world.wait(1)  # the window is full of lane 7: its second event is parked, and due at once
    assert world.shard.parked == 1
    assert world.drain() == [2]
    world.give_back(0, hand=world.delivered[0].hand)
    assert world.ask(1) == [0]
    assert world.ask() == []
    world.ack(0)
    assert world.drain() == [1]


def test_a_row_is_not_handed_over_while_a_hand_holds_a_later_one_of_its_lane() -> None:
    world = World()
    world.publish(*keyed(7, 7, 7))
    world.ask(2)
    world.nack(0, delay=60)
    world.wait(60)
    assert world.state(0) is State.READY
    assert world.ask(singly=True) == []
    world.ack(1)
    assert world.ask() == [0, 2]


def test_after_a_restart_a_row_waits_until_what_is_before_it_is_read() -> None:
    world = World(policy=Policy(window_events=2))
    world.publish(*keyed(7, 7, 7))
    world.ask(1)
    assert world.ask() == []
    world.wait(1)
    assert world.shard.parked == 2
    world.auto = False
    world.restart(clean=True)
    assert world.fetches == []
    assert world.ask() == []
    world.auto = True
    world.answer()
    assert world.drain() == [0, 1, 2]


# --- limits -----------------------------------------------------------------------------------


def test_a_window_full_of_blocked_lanes_is_relieved_after_a_second() -> None:
    world = World(policy=Policy(window_events=10, read_events=5))
    world.publish(*keyed(*[7] * 12, 8))
    assert world.ask(1, singly=True) == [0]
    assert world.ask(singly=True) == []
    world.wait(0.9)
    assert world.store.rows == {}
    assert world.wait_for_timer()
    assert sorted(world.store.rows) == list(range(1, 12))
    assert world.ask(singly=True) == [12]
    world.ack(0, 12)
    assert world.drain(singly=True) == list(range(1, 12))


def test_a_window_that_moves_is_not_relieved() -> None:
    world = World(policy=Policy(window_events=4))
    world.publish(*keyed(*[7] * 50))
    for offset in range(20):
        assert world.ask(singly=True) == [offset]
        assert world.ask(singly=True) == []
        world.wait(0.7)
        world.ack(offset)
    assert world.store.rows == {}


def test_no_more_is_parked_than_the_limit_says() -> None:
    world = World(policy=Policy(parked_max=2, window_events=20))
    world.publish(*keyed(*[7] * 5, 8))
    world.ask(1)
    world.nack(0, delay=60)
    assert world.shard.parked == 2
    assert world.states()[:5] == [State.PARKED] * 2 + [State.READY] * 3
    assert world.drain() == [5]
    world.publish(*keyed(7, 9))
    assert world.drain() == [7]
    world.wait(60)
    assert world.drain() == [0, 1, 2, 3, 4, 6]


def test_with_no_room_aside_a_long_retry_waits_in_memory() -> None:
    world = World(policy=Policy(parked_max=0))
    world.publish(*keyed(7, 8))
    world.ask(1)
    world.nack(0, delay=60)
    assert world.state(0) is State.DELAYED
    assert world.drain() == [1]
    assert world.shard.next_offset == 0
    world.wait(60)
    assert world.drain() == [0]


def test_rows_are_fetched_a_few_at_a_time_and_a_slow_lane_leaves_room_for_others() -> None:
    world = World()
    world.publish(*keyed(*[7] * 250, *range(1_000, 1_030)))
    world.ask(1)
    world.nack(0, delay=60)
    world.ask()
    world.nack(*range(250, 280), delay=70)
    world.wait(60)
    assert world.shard.in_memory == 50
    assert world.ask(singly=True) == [0]  # and takes its time
    world.wait(10)
    assert world.ask(singly=True) == list(range(250, 280))
    world.ack(0, *range(250, 280))
    assert world.drain(singly=True) == list(range(1, 250))


def test_a_fetch_that_fails_is_repeated_at_its_time() -> None:
    world = World()
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.auto = False
    world.wait(60)
    world.tell(FetchFailed(world.fetches.pop().offsets, world.monotonic + 3))
    assert world.fetches == []
    assert world.shard.next_timer() == pytest.approx(world.monotonic + 3)
    world.wait(3)
    assert world.fetches[0].offsets == (0,)


def test_a_row_that_the_store_has_no_more_is_discarded_and_its_lane_goes_on() -> None:
    world = World()
    world.publish(*keyed(7, 7))
    world.ask(1)
    world.nack(0, delay=60)
    world.auto = False
    world.wait(60)
    asked = world.fetches.pop().offsets
    world.tell(Fetched(asked, ()))
    step = world.shard.take_step()
    assert step is not None
    assert list(step.outcomes[Outcome.DISCARDED].to_offsets()) == [0, 1]
    assert world.shard.parked == 0


# --- late acks, expiry, giving back -----------------------------------------------------------


@pytest.mark.parametrize("written", [True, False])
def test_a_late_ack_settles_what_is_parked_by_now_and_it_never_comes_again(written: bool) -> None:
    world = World(policy=Policy(timeout_seconds=5, backoff_seconds=10, jitter=0))
    world.publish(*keyed(7, 7))
    world.ask(1)
    world.start()
    world.auto = written
    world.wait(5)
    assert world.states() == [State.PARKED, State.PARKED]
    world.ack(1)  # it was never handed over
    world.ack(0)
    world.auto = True
    world.wait(0)
    assert world.outcomes == {0: Outcome.ACKED}
    world.wait(10)
    assert world.drain() == [1]


def test_a_late_ack_of_a_row_that_is_in_memory_again_settles_it() -> None:
    world = World()
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.wait(60)
    assert world.state(0) is State.READY
    world.ack(0)
    assert world.outcomes == {0: Outcome.ACKED}
    assert world.ask() == []


def test_a_row_expires_when_its_turn_comes() -> None:
    world = World()
    world.publish(*keyed(7, expiry=WALL_US + 30_000_000), *keyed(7))
    world.ask(1)
    world.nack(0, delay=60)
    world.wait(60)
    assert world.ask() == [1]
    assert world.outcomes == {0: Outcome.EXPIRED}


def test_a_row_that_is_given_back_comes_again_uncounted() -> None:
    world = World()
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.wait(60)
    world.ask()
    world.give_back(0)
    world.ack(0)
    assert world.ask() == [0]
    assert world.delivered[-1].attempts == {0: 2}
    world.leave()
    assert world.ask() == [0]
    assert world.delivered[-1].attempts == {0: 2}


def test_a_handler_of_a_row_can_run_out_of_time() -> None:
    world = World(policy=Policy(timeout_seconds=5))
    world.publish(*keyed(7))
    world.ask()
    world.nack(0, delay=60)
    world.wait(60)
    world.ask()
    world.start()
    world.wait(5)
    assert world.state(0) is State.PARKED
    assert world.store.rows[0][0].attempts == 2


def test_rows_count_against_the_credit_in_events_and_bytes() -> None:
    world = World()
    world.publish(*keyed(7, 8, 9, 10, 11, nbytes=10))
    world.ask(3)
    world.nack(0, 1, 2, delay=60)
    world.wait(60)
    assert world.ask(2) == [0, 1]
    world.give_back(0, 1)
    assert world.ask(bytes_max=25) == [0, 1]
    assert world.ask(bytes_max=25) == [2, 3]


# --- replays ----------------------------------------------------------------------------------


def _with_dead_letter() -> World:
    world = World()
    world.publish(*keyed(7, 7, 8))
    world.ask(1)
    world.nack(0, retry=False)
    return world


def test_a_replayed_dead_letter_is_delivered_marked_whatever_its_lane_does() -> None:
    world = _with_dead_letter()
    assert world.ask() == [1, 2]
    cursor, number = world.shard.next_offset, world.store.number
    world.replay(0)
    assert world.ask(singly=True) == [0]
    assert world.delivered[-1].replays == {0: 1}
    assert world.delivered[-1].attempts == {}
    assert world.store.number == number
    world.ack(0)
    assert world.shard.next_offset == cursor
    assert world.store.outcomes[0] == [Outcome.DEAD, Outcome.ACKED]
    assert world.store.rows[0][1] == "done"


def test_a_replay_keeps_nobody_waiting() -> None:
    world = _with_dead_letter()
    world.replay(0)
    assert world.ask(1) == [0]
    assert world.ask() == [1, 2]
    world.nack(0, hand=world.delivered[-2].hand, delay=60)
    world.publish(*keyed(7))
    world.ack(1, 2)
    assert world.drain() == [3]


def test_a_replay_that_fails_is_retried_and_dead_again_and_can_be_replayed_again() -> None:
    world = _with_dead_letter()
    world.change(max_retries=1)
    for replay in (1, 2):
        world.replay(0)
        for attempt in (1, 2):
            assert world.ask(1) == [0]
            assert world.delivered[-1].replays == {0: replay}
            assert world.delivered[-1].attempts.get(0, 1) == attempt
            world.nack(0, delay=1)
            world.wait(1)
        assert world.store.rows[0][1] == "dead"


def test_a_replay_that_was_seen_before_is_not_taken_twice() -> None:
    world = _with_dead_letter()
    world.replay(0)
    stale = RowsSeen(tuple(world.store.waiting))
    assert world.ask(1) == [0]
    world.auto = False
    world.ack(0)
    world.tell(stale)
    assert world.shard.parked == 0
    world.write()
    world.tell(stale)
    assert world.shard.parked == 0
    world.see_rows()
    assert world.shard._work.aside._replays == {}


def test_replays_wait_for_a_consumer_like_anything_else() -> None:
    world = _with_dead_letter()
    world.change(paused=True)
    world.replay(0)
    assert world.ask() == []
    world.change(paused=False)
    world.tell(HeadMoved(3))
    assert world.ask(1) == [0]


def test_plain_events_flow_past_a_thousand_parked_lanes() -> None:
    world = World(policy=Policy(window_events=2_000))
    world.publish(*keyed(*range(1_000, 1_200)))
    world.ask()
    world.nack(*range(200), delay=60)
    world.publish(*keyed(*range(1_000, 1_200)), *plain(1), *keyed(5))
    assert world.drain() == [400, 401]
    assert world.shard.parked == 400
    world.wait(60)
    came = world.drain()
    assert sorted(came) == list(range(400))
