"""Every transition of the table is gone through, one scenario each; that no other one is, `World` checks everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.engine_world import SEEN, WALL_US, World, keyed, plain

from penstock.engine.messages import Fetched
from penstock.engine.policy import Policy
from penstock.engine.states import TRANSITIONS, State
from penstock.offsets import Gap

if TYPE_CHECKING:
    from collections.abc import Callable

SCENARIOS: dict[tuple[State, str], Callable[[], None]] = {}


def goes(state: State, why: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(scenario: Callable[[], None]) -> Callable[[], None]:
        SCENARIOS[state, why] = scenario
        return scenario

    return note


def world_of(*lanes: int | None, policy: Policy | None = None) -> World:
    world = World(policy=policy)
    world.publish(*keyed(*lanes))
    return world


@goes(State.AHEAD, "read")
def _read() -> None:
    world_of(7)


@goes(State.AHEAD, "gap")
def _gap() -> None:
    world = World()
    world.lost.append(Gap(0, 1, "damaged"))
    world.publish(*plain(2))


@goes(State.READY, "handed over")
@goes(State.HELD, "ack")
def _acked() -> None:
    world_of(7).drain()


@goes(State.HELD, "given back")
def _given_back() -> None:
    world = world_of(7)
    world.ask()
    world.give_back(0)


def _parked() -> World:
    """Return a world in which lane 7 is parked for a minute, at offset 0."""
    world = world_of(7, 8)
    world.ask(1)
    world.nack(0, delay=60)
    return world


@goes(State.HELD, "failed, long delay")
@goes(State.AHEAD, "lane is parked")
def _parked_behind() -> None:
    _parked().publish(*keyed(7))


@goes(State.READY, "lane is parked")
def _parked_followers() -> None:
    world = world_of(7, 7)
    world.ask(1)
    world.nack(0, delay=60)


@goes(State.DELAYED, "lane is parked")
def _parked_delayed_follower() -> None:
    world = world_of(7, 7)
    world.ask()
    world.nack(1, delay=1)
    world.nack(0, delay=60)


@goes(State.HELD, "given back, lane is parked")
def _parked_when_given_back() -> None:
    world = world_of(7, 7)
    world.ask()
    world.nack(0, delay=60)
    world.give_back(1)


@goes(State.PARKED, "due, and first of its lane")
def _comes_back() -> None:
    world = _parked()
    world.wait(60)


@goes(State.PARKED, "late ack")
def _parked_and_acked() -> None:
    _parked().ack(0)


@goes(State.PARKED, "given up by somebody else")
def _gone_from_the_store() -> None:
    world = _parked()
    world.auto = False
    world.wait(60)
    asked = world.fetches.pop().offsets
    world.tell(Fetched(asked, ()))


@goes(State.PARKED, "had all its attempts before")
def _parked_and_worn_out() -> None:
    world = _parked()
    world.change(max_retries=0)
    world.wait(60)


@goes(State.AHEAD, "had all its attempts before")
def _worn_out() -> None:
    world = world_of(None)
    world.ask()
    world.nack(0, delay=1)
    world.policy = Policy(max_retries=0)
    world.restart(clean=True)


@goes(State.HELD, "failed, short delay")
@goes(State.DELAYED, "delay is over")
def _delayed() -> None:
    world = world_of(7)
    world.ask()
    world.nack(0, delay=1)
    world.wait(1)


@goes(State.DELAYED, "late ack")
def _delayed_and_acked() -> None:
    world = world_of(7)
    world.ask()
    world.nack(0, delay=1)
    world.ack(0)


@goes(State.READY, "late ack")
def _ready_and_acked() -> None:
    world = world_of(7)
    world.ask()
    world.nack(0, delay=1)
    world.wait(1)
    world.ack(0)


@goes(State.HELD, "rejected, or retries exhausted")
@goes(State.SETTLED, "replayed dead letter")
def _dead() -> None:
    world = world_of(7)
    world.ask()
    world.nack(0, retry=False)
    world.replay(0)


@goes(State.HELD, "retries exhausted, halt")
def _halted() -> None:
    world = world_of(7, policy=Policy(max_retries=0, exhausted="halt"))
    world.ask()
    world.nack(0)


@goes(State.READY, "expired")
def _expired() -> None:
    world = World()
    world.publish(*plain(1, expiry=WALL_US + 1))
    world.wait(1)
    assert world.ask() == []


@goes(State.READY, "window is full of blocked lanes")
@goes(State.DELAYED, "window is full of blocked lanes")
def _relieved() -> None:
    world = world_of(7, 7, 7, policy=Policy(window_events=2))
    assert world.ask(1) == [0]
    world.nack(0, delay=3)
    assert world.ask() == []
    world.wait(1)


@pytest.mark.parametrize("transition", TRANSITIONS, ids=lambda each: f"{each[0]} {each[1]}")
def test_every_transition_is_gone_through(transition: tuple[State, str]) -> None:
    SEEN.clear()
    SCENARIOS[transition]()
    assert transition in SEEN


def test_no_scenario_is_about_a_transition_that_is_not_there() -> None:
    assert set(SCENARIOS) == set(TRANSITIONS)
