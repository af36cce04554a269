"""Killing and freezing consumers that share a subscription; and bugs in them that must be found by it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from penstock import settling
from penstock.rows import Commit
from penstock.runtime.committer import Committer
from penstock.settling import settle
from penstock.testing.campaigns import deliveries
from penstock.testing.campaigns.deliveries import moves, sharer
from penstock.testing.campaigns.deliveries.script import AFTER, BEFORE, SIDES, TOGETHER, Fault
from penstock.testing.campaigns.deliveries.together import play_together
from penstock.testing.campaigns.planted import claims, shards
from penstock.testing.campaigns.planted.tools import changed_everywhere
from penstock.testing.campaigns.zygote import Zygote

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(*deliveries.MODULES, __name__) as started:
        yield started


# --- every step, by name ----------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("step", moves.STEPS)
def test_a_consumer_is_killed_beside_another_one(zygote: Zygote, step: str, side: str) -> None:
    played, found = play_together(zygote, TOGETHER[moves.STEPS[step]], Fault(step, side))
    assert found == []
    assert [(ends.step, ends.fault.side) for ends in played.reached] == [(step, side)]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("step", moves.TAKING_OVER)
def test_a_consumer_is_killed_while_it_takes_over_from_a_killed_one(zygote: Zygote, step: str, side: str) -> None:
    played, found = play_together(zygote, TOGETHER[moves.TAKING_OVER[step]], Fault(step, side))
    assert found == []
    assert [(ends.step, ends.fault.side) for ends in played.reached] == [(step, side)]


@pytest.mark.parametrize(
    ("step", "side"),
    [
        ("commit: progress", BEFORE),
        ("commit: claims", BEFORE),
        ("commit: gives claims back", BEFORE),
        ("lease of slots", AFTER),
        ("release of slots", BEFORE),
        ("lease of a berth", AFTER),
    ],
)
def test_a_consumer_is_frozen_beside_another_one_which_takes_over(zygote: Zygote, step: str, side: str) -> None:
    scene = TOGETHER[moves.STEPS[step]].freezing()
    played, found = play_together(zygote, scene, Fault(step, side, freeze=True))
    assert found == []
    assert [(ends.step, ends.fault.side) for ends in played.reached] == [(step, side)]
    if step in {"commit: progress", "commit: gives claims back"}:  # a claim of a berth that nobody wanted is its own
        refusals = [what for what in played.accounts.counts if what.startswith("refused")]
        assert refusals, "it was woken in front of a commit, which must be refused"


@pytest.mark.parametrize("name", [name for name in TOGETHER if name.startswith("a bit of everything")])
def test_everything_ends_as_its_payload_says_whoever_was_given_it(zygote: Zygote, name: str) -> None:
    played, found = play_together(zygote, TOGETHER[name], Fault(comes=15))
    assert found == []
    assert played.accounts.counts["events handed over"]


@pytest.mark.parametrize("mode", ["key_shared", "shared"])
def test_an_event_that_kills_its_process_each_time_ends_as_a_dead_letter(zygote: Zygote, mode: str) -> None:
    counts: list[str] = []
    _, found = play_together(zygote, TOGETHER[f"an event that kills, {mode}"], count=counts.append)
    assert found == []
    assert counts.count("processes killed by an event") >= 3


def test_a_step_of_a_scene_is_made_by_the_process_that_is_to_be_ended(zygote: Zygote) -> None:
    for name in dict.fromkeys(moves.STEPS.values()):
        played, found = play_together(zygote, TOGETHER[name])
        assert found == [], name
        assert {step for step, scene in moves.STEPS.items() if scene == name} <= set(played.steps), name
        assert not [step for step in played.steps if "no name" in step]


# --- planted bugs -----------------------------------------------------------------------------

PLANT = pytest.MonkeyPatch().setattr
"""For as long as the process lives."""
PLAYS_MAX = 8
"""Processes are scheduled by the system: which of them is first may be another one each time."""

Program = Callable[..., None]


def planted(plant: Callable[[], None]) -> Program:
    """Return a program that shares a subscription with a bug in it."""

    @functools.wraps(plant)
    def program(connection: Connection[Any, Any], **arguments: Any) -> None:
        plant()
        sharer.share(connection, **arguments)

    return program


_PLANTED: list[AbstractContextManager[None]] = []


def everywhere(bug: Callable[[], AbstractContextManager[None]]) -> None:
    """Put a bug in that another campaign plants for a while, for as long as the process lives."""
    _PLANTED.append(bug())
    _PLANTED[-1].__enter__()


@planted
def commit_without_the_fence_of_its_slots() -> None:
    commit_of = Committer._commit_of

    def unfenced(self: Committer, *arguments: Any) -> Commit:
        return msgspec.structs.replace(commit_of(self, *arguments), fences=())

    PLANT(Committer, "_commit_of", unfenced)


@planted
def let_a_slot_go_while_in_hand() -> None:
    everywhere(shards.slot_goes_while_in_hand)


@planted
def hand_over_the_slots_of_others() -> None:
    everywhere(shards.slots_of_others_taken)


@planted
def return_a_claim_and_keep_it() -> None:
    def wrong(cursor: Any, step: Any) -> Any:
        after, record = settle(cursor, step)
        kept = settling.claims_of(after, step.berth) | (settling.claims_of(cursor, step.berth) & step.freed)
        bodies = {berth: body for berth, body in after.claims.items() if berth != step.berth}
        return msgspec.structs.replace(after, claims=bodies | {step.berth: kept.to_bytes()}), record

    everywhere(lambda: changed_everywhere(settle, wrong))


@planted
def give_back_what_is_in_hand() -> None:
    everywhere(claims.given_back_while_in_hand)


@pytest.mark.parametrize(
    ("bug", "scene", "fault", "found"),
    [
        (
            commit_without_the_fence_of_its_slots,
            "another one comes, key_shared",
            Fault("commit: progress", freeze=True),
            "I10",
        ),
        (let_a_slot_go_while_in_hand, "another one comes, key_shared", None, "in the hands of"),
        (hand_over_the_slots_of_others, "another one comes, key_shared", None, "I10"),
        (return_a_claim_and_keep_it, "another one comes, shared", None, "have the same"),
        (give_back_what_is_in_hand, "another one comes, shared", None, "in the hands of"),
    ],
)
def test_a_bug_in_how_they_share_is_found(
    zygote: Zygote, bug: Program, scene: str, fault: Fault | None, found: str
) -> None:
    chosen = TOGETHER[scene].freezing() if fault is not None and fault.freeze else TOGETHER[scene]
    findings: list[str] = []
    for _ in range(PLAYS_MAX):
        _, findings = play_together(zygote, chosen, fault, program=bug)
        if any(found in finding for finding in findings):
            return
    raise AssertionError(findings)
