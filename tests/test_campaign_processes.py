"""Killing and stopping writers: the campaign finds nothing, and it does find bugs that are planted in the writers."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.deduplication import ProducerTable
from penstock.errors import WriterStalled
from penstock.stores.file import gate
from penstock.stores.file.state import commits
from penstock.testing.campaigns import campaign, processes
from penstock.testing.campaigns.campaign import Report, TooManyFindings
from penstock.testing.campaigns.processes import writer as processes_writer
from penstock.testing.campaigns.zygote import Crashed, Zygote

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def test_writers_that_are_killed_and_stopped_break_no_promise() -> None:
    report = Report(processes.CAMPAIGN.small)
    processes.CAMPAIGN.run(report, 1)
    assert report.findings == []
    assert report.done == processes.CAMPAIGN.small
    for what in (
        "processes killed",
        "processes stopped in their turn",
        "processes stopped somewhere",
        "events acknowledged",
        "events read",
        "checks of the journal",
    ):
        assert report.tried[what], what


# --- planted bugs, in the writers' processes --------------------------------------------------

PLANT = pytest.MonkeyPatch().setattr
"""For as long as the process lives."""


def forget_repeats() -> None:
    def answer(_self: ProducerTable, _run: Any, _now_us: int) -> None: ...

    PLANT(ProducerTable, "answer", answer)


def write_without_the_turn() -> None:
    wait = gate.Gate._await

    def await_or_not(self: gate.Gate, task: gate._Task, what: object, patience: gate._Patience) -> None:
        try:
            wait(self, task, what, patience)
        except WriterStalled:
            task.do(None)

    PLANT(gate.Gate, "_await", await_or_not)


def blame_nobody() -> None:
    check = gate._Patience.check

    def check_without_pid(self: gate._Patience, what: object) -> None:
        try:
            check(self, what)
        except WriterStalled as error:
            error.pid = None
            raise

    PLANT(gate._Patience, "check", check_without_pid)


def accept_stale_epochs() -> None:
    PLANT(commits, "check_fence", lambda _connection, _fence: None)


def raise_at_work() -> None:
    def look(_self: Any, _chance: Any) -> None:
        raise KeyError("planted")

    PLANT(processes_writer.Writer, "look", look)


def hang_at_work() -> None:
    def look(_self: Any, _chance: Any) -> None:
        threading.Event().wait()

    PLANT(processes_writer.Writer, "look", look)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        # Which of its consequences comes first is a matter of chance where processes race.
        (forget_repeats, ""),
        (write_without_the_turn, ""),
        (blame_nobody, "is stopped in the turn of"),
        (accept_stale_epochs, ""),
        (raise_at_work, "KeyError: 'planted'"),
        (hang_at_work, "has said nothing for"),
    ],
)
def test_a_bug_in_the_writers_is_found(monkeypatch: pytest.MonkeyPatch, bug: Any, found: str) -> None:
    monkeypatch.setattr(campaign, "FINDINGS_MAX", 1)
    monkeypatch.setattr(processes, "CHECK_ROUNDS", 2)
    # Nobody is merely slow for so long, so that the bug shows where it is looked for.
    monkeypatch.setattr(processes, "IMPATIENT_SECONDS", 1.0)
    if bug is hang_at_work:
        monkeypatch.setattr(processes, "ANSWER_SECONDS", 2.0)
    report = Report(30)
    with pytest.raises(TooManyFindings):
        processes.run(report, 1, plant=f"{__name__}:{bug.__name__}")
    [finding] = report.findings
    assert found in finding.what
    assert "seed 1" in finding.replay


# --- the zygote -------------------------------------------------------------------------------


def wait_for_ever(connection: Connection[Any, Any]) -> None:
    connection.send("waiting")
    threading.Event().wait()


def divide(_connection: Connection[Any, Any], *, by: int) -> None:
    assert 1 // by


def test_no_process_outlives_its_zygote() -> None:
    with Zygote(__name__) as zygote:
        children = [zygote.start(wait_for_ever) for _ in range(3)]
        for child in children:
            assert child.hear() == "waiting"
        children[0].kill()
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


def test_a_program_that_raises_says_so_and_one_that_returns_ends_with_zero() -> None:
    with Zygote(__name__) as zygote:
        failing, working = zygote.start(divide, by=0), zygote.start(divide, by=1)
        [last] = failing.hear_rest()
        assert isinstance(last, Crashed)
        assert "ZeroDivisionError" in last.trace
        assert failing.reap() == 1
        assert list(working.hear_rest()) == []
        assert working.reap() == 0
