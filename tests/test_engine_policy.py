"""A policy refuses what makes no sense, and says so; rates, delays and heartbeats follow from it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_world import World, keyed, plain

from penstock.engine.policy import HEARTBEATS, Policy, heartbeat_seconds
from penstock.engine.rate import Rate
from penstock.errors import UsageError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_retries": -1}, "max_retries of a subscription's policy is -1; it is a whole number from 0 to 1,000,000"),
        ({"max_retries": 1.5}, "max_retries of a subscription's policy is 1.5; it is a whole number"),
        ({"max_retries": True}, "max_retries of a subscription's policy is True"),
        ({"window_events": 0}, "window_events of a subscription's policy is 0; it is a whole number from 1"),
        ({"jitter": 2}, "jitter of a subscription's policy is 2; it is a number from 0.0 to 1.0"),
        ({"timeout_seconds": 0}, "timeout_seconds of a subscription's policy is 0; .*, or None"),
        ({"rate_per_second": float("nan")}, "rate_per_second of a subscription's policy is nan"),
        ({"backoff_seconds": "1"}, "backoff_seconds of a subscription's policy is '1'; it is a number"),
        (
            {"exhausted": "dade"},
            "exhausted of a subscription's policy cannot be 'dade'; known: 'dead', 'discard', 'halt'",
        ),
        ({"paused": 1}, "paused is true or false, not 1"),
        ({"backoff_seconds": 9, "backoff_seconds_max": 3}, "backoff_seconds_max, 3, is less than backoff_seconds, 9"),
    ],
)
def test_a_wrong_value_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")):
        Policy(**fields)


def test_a_change_of_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"a policy has no field 'max_retrys'; did you mean 'max_retries'\?"):
        Policy().changed({"max_retrys": 1})


def test_a_stored_policy_holds_what_differs_and_comes_back_equal() -> None:
    assert Policy().stored() == {}
    policy = Policy(max_retries=5, timeout_seconds=30.0, paused=True)
    assert policy.stored() == {"max_retries": 5, "timeout_seconds": 30.0, "paused": True}
    assert Policy.of(policy.stored()) == policy


def test_a_field_of_a_later_version_is_left_alone() -> None:
    assert Policy.of({"max_retries": 1, "of_the_future": 3}) == Policy(max_retries=1)


def test_backoff_doubles_up_to_its_limit_and_jitter_only_shortens_it() -> None:
    policy = Policy(jitter=0.0)
    assert [policy.backoff(attempts, 1) for attempts in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert policy.backoff(100_000, 1) == 60
    jittered = [Policy(jitter=0.5).backoff(3, offset) for offset in range(1_000)]
    assert 2.0 <= min(jittered) < 2.1
    assert 3.9 < max(jittered) <= 4.0
    assert jittered == [Policy(jitter=0.5).backoff(3, offset) for offset in range(1_000)]


def test_heartbeats_have_names_or_seconds_or_are_off() -> None:
    assert [heartbeat_seconds(name) for name in HEARTBEATS] == [0.1, 0.5, 1.0, 0.05]
    assert heartbeat_seconds("off") is None
    assert heartbeat_seconds(None) is None
    assert heartbeat_seconds(2) == 2.0
    with pytest.raises(UsageError, match=r"there is no heartbeat 'norml'; did you mean 'normal'\?; or give seconds"):
        heartbeat_seconds("norml")


# --- rates ------------------------------------------------------------------------------------


def test_ten_a_second_gives_a_hundred_events_in_ten_seconds_and_consumes_nothing() -> None:
    world = World(policy=Policy(rate_per_second=10))
    world.publish(*plain(100))
    came: list[tuple[float, int]] = []
    begin = world.monotonic
    while len(came) < 100:
        for offset in world.ask():
            came.append((world.monotonic - begin, offset))
            world.ack(offset)
        assert world.shard.in_memory == 100 - len(came)
        assert world.wait_for_timer() or len(came) == 100
    assert [offset for _, offset in came] == list(range(100))
    assert 9.8 <= came[-1][0] <= 10.1
    for at, (seconds, _) in enumerate(came):
        assert seconds == pytest.approx(at / 10, abs=0.01)


def test_after_a_silence_a_tenth_of_a_second_may_come_at_once() -> None:
    world = World(policy=Policy(rate_per_second=100))
    world.publish(*keyed(*range(100)))
    world.wait(60)
    assert len(world.ask()) == 10
    assert len(world.ask()) == 0


def test_a_rate_changes_on_the_fly() -> None:
    world = World(policy=Policy(rate_per_second=1))
    world.publish(*keyed(*range(100)))
    assert len(world.ask()) == 1
    world.change(rate_per_second=None)
    assert len(world.ask()) == 99
    assert Rate(None, 0.0).free_at() is None


def test_a_parked_event_waits_for_the_rate_too() -> None:
    world = World(policy=Policy(rate_per_second=1))
    world.publish(*keyed(7, 8))
    assert world.ask() == [0]
    world.nack(0, delay=60)
    world.wait(60)
    assert world.ask() == [0]
    assert world.ask() == []
    assert world.wait_for_timer()
    assert world.ask() == [1]


def test_several_consumers_have_a_larger_window_and_read_as_much_more_within_the_limits() -> None:
    policy = Policy(window_events=100, window_bytes=1_000, read_events=50, read_bytes=200, max_retries=7)
    larger = Policy(window_events=200, window_bytes=2_000, read_events=100, read_bytes=400, max_retries=7)
    assert policy.together == larger
    largest = Policy(window_events=1 << 19, window_bytes=1 << 32, read_events=1 << 19, read_bytes=1 << 30)
    assert largest.together == largest
