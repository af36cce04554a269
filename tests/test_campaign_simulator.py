"""C1: lives of delivery in the deterministic simulator. Nothing is lost, doubled or out of order, whatever happens."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import weakref
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.planted import delivery as planted_delivery
from penstock.testing.campaigns.planted import log as planted_log
from penstock.testing.campaigns.planted.tools import changed
from penstock.testing.campaigns.runner import find
from penstock.testing.campaigns.simulated import CAMPAIGN, hint, live, replay
from penstock.testing.machine.faults import FAILING
from penstock.testing.simulator import CALM, Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

CHUNK = 25
WORKERS = 2


def lives(campaign: str, first: int) -> list[tuple[str, str]]:
    """Live some lives in a process of its own; returns what was found, and how to see it again."""
    report = Report(rounds=CHUNK)
    find(campaign).run(report, first)
    return [(finding.what, finding.replay) for finding in report.findings]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("campaign", ["c1", "c1s"])
def test_lives_in_which_everything_goes_wrong(campaign: str) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as workers:
        found = workers.map(partial(lives, campaign), range(0, find(campaign).small, CHUNK))
        findings = [finding for some in found for finding in some]
    for what, where in findings:
        sys.stdout.write(f"{where}\n{what}\n\n")
    assert findings == []


# --- replays --------------------------------------------------------------------------------------


def test_a_seed_tells_the_same_story_twice() -> None:
    (first, one, _), (second, other, _) = live(11), live(11)
    assert one.trace == other.trace
    assert one.loop.steps == other.loop.steps
    assert first == second
    assert live(12)[1].trace != one.trace


def test_a_seed_tells_the_same_story_in_another_process() -> None:
    told = []
    for hashing in ("1", "2"):  # sets of texts have another order there
        environment = {**os.environ, "PYTHONHASHSEED": hashing, "PYTHONPATH": os.pathsep.join(sys.path)}
        program = [sys.executable, str(Path(__file__)), "13"]
        told.append(subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout)
    assert told[0] == told[1]
    assert told[0].splitlines()[: len(live(13)[1].trace)] == live(13)[1].trace


def test_a_replay_prints_the_story_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    story = replay(3)
    assert capsys.readouterr().out == f"{story}\n"
    assert "all faults end" in story
    assert story.endswith("nothing is wrong")
    assert "replay(3)" in hint(3)


def test_lives_differ_in_what_they_try() -> None:
    manners = [live(seed)[2].manner for seed in range(8)]
    assert len({manner.mode for manner in manners}) == 2
    assert len({manner.batches for manner in manners}) == 2
    assert len({manner.policy for manner in manners}) == 8


def test_a_life_leaves_nothing_in_memory() -> None:
    world = live(1)[1]
    assert any(process.dead for process in world.processes)
    left = weakref.ref(world)
    del world
    gc.collect()
    assert left() is None


# --- findings -------------------------------------------------------------------------------------


def hunt(bug: Callable[[], AbstractContextManager[None]], plan: Plan, seeds: int = 10, **manner: object) -> str:
    """Return what the first life finds in which a bug is seen; without the bug it must find nothing."""
    for seed in range(seeds):
        with bug():
            problems, _, _ = live(seed, plan, patience=40.0, **manner)
        if problems:
            assert live(seed, plan, patience=40.0, **manner)[0] == []
            return "\n".join(problems)
    return ""


def test_a_bug_in_group_commit_is_found() -> None:
    assert "I1" in hunt(planted_log.ack_before_sync, CALM, disturbances=("power",))


def test_a_bug_in_what_follows_a_failed_sync_is_found() -> None:
    plan = Plan(disk={FAILING: 0.15})
    assert hunt(planted_log.poisoned_pages_synced_again, plan, disturbances=("power",))


def test_a_bug_in_turns_is_found() -> None:
    plan = Plan(fails_after=0.2)
    assert hunt(planted_log.producers_not_caught_up, plan, processes=3, disturbances=("nothing",))


def test_a_bug_in_delivery_is_reported_with_its_seed() -> None:
    report = Report(rounds=3)
    with planted_delivery.record_left_out():
        CAMPAIGN.run(report, 0)
    assert report.done == 3
    assert "are no chain" in report.findings[0].what
    assert report.findings[0].replay == hint(0)


def test_a_mistake_that_a_loop_would_outlive_is_told() -> None:
    from penstock.runtime.monitor import Monitor

    def look(_self: Monitor, _now: float) -> None:
        raise KeyError("a mistake")

    with changed(Monitor, look=look):
        problems, _, _ = live(0, CALM, patience=1.0, disturbances=("nothing",))
    assert problems[0] == "KeyError: 'a mistake'"


if __name__ == "__main__":
    replay(int(sys.argv[1]))
