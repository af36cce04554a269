"""C2 and C5 in small: crashes before every operation, and disks that misbehave."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.virtual import crashes, faults
from penstock.testing.campaigns.virtual.crashes import Crash, replay
from penstock.testing.campaigns.virtual.life import ACTS, Life
from penstock.testing.journal import Outcome
from penstock.testing.machine import SURVIVALS, Machine, Survival, VirtualDisk
from penstock.testing.machine.faults import FAILING, FULL, LYING, SHORT, SLOW

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = 5
STATES = 5_000
ROUNDS = crashes.CAMPAIGN.small
"""A round is at least one crash state: some crash again while they recover."""


@pytest.mark.parametrize("seed", range(PARTS))
def test_a_crash_at_any_operation_leaves_everything_that_was_acknowledged(seed: int) -> None:
    report = Report(rounds=ROUNDS // PARTS)
    crashes.run(report, seed * 1_000)
    assert report.findings == []
    assert report.tried["crash states"] >= STATES // PARTS
    assert all(report.tried[str(survival)] > 40 for survival in SURVIVALS)
    assert report.tried[crashes.KILL] > 40
    assert report.tried["scenes of repair"] > 0


def test_a_disk_that_misbehaves_breaks_no_promise() -> None:
    report = Report(rounds=faults.CAMPAIGN.small)
    faults.run(report, 0)
    assert report.findings == []
    assert all(report.tried[fault] > 20 for fault in (SHORT, FULL, FAILING, LYING, SLOW))


def lived(seed: int) -> tuple[list[str], list[tuple[str, Outcome]]]:
    machine = Machine(seed)
    life = Life(machine, seed)
    life.run()
    machine.turn_off()
    return machine.operations, [(act.what, act.outcome) for act in life.history]


def test_a_life_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert lived(7) == lived(7)
    assert lived(7) != lived(8)


def test_lives_do_everything_and_succeed() -> None:
    acts = [act for seed in range(6) for act in lived(seed)[1]]
    assert len(acts) > 6 * len(ACTS)
    assert {what.split()[0] for what, outcome in acts if outcome is Outcome.OK} == {
        "create", "publish", "trim", "delete", "schedule", "cancel", "stage", "run", "close", "open", "commit", "park",
        "settle", "acquire", "prepare", "finish", "mark", "retain",
    }  # fmt: skip
    assert {outcome for _, outcome in acts} == {Outcome.OK}


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(VirtualDisk, "sync", lambda self, descriptor: self.step(f"forget to sync {descriptor}"))
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("no_syncs")
def test_a_finding_can_be_replayed_and_shows_operations_survivors_and_what_is_wrong() -> None:
    report = Report(rounds=90)
    crashes.run(report, 1)
    assert report.findings
    finding = report.findings[-1]
    crash = _parsed(finding.replay)
    shown = replay(crash)
    assert shown == replay(crash)
    assert f"  {crash.operation - 1}: " in shown
    assert str(crash.how or crashes.KILL) in shown
    wrong = finding.what.split("\nafter\n")[0]
    assert wrong in shown


def test_what_a_crash_took_is_told_file_by_file() -> None:
    crash = Crash(1, "life", 60, Survival("dropped", "dropped"))
    shown = replay(crash)
    assert "data dropped by 512 bytes, names dropped" in shown
    assert "/store/tails" in shown
    assert shown.endswith("nothing is wrong")


def _parsed(text: str) -> Crash:
    """Read a crash as a person would paste it."""
    tree = ast.parse(text, mode="eval")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names <= {"Crash", "Survival"}
    crash = eval(compile(tree, "replay", "eval"), {"Crash": Crash, "Survival": Survival})
    assert isinstance(crash, Crash)
    return crash
