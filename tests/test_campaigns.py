"""What runs campaigns: that it finds them, shows what came of them, and never calls a failure a success."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.testing.campaigns import runner
from penstock.testing.campaigns.campaign import FINDINGS_MAX, Campaign, Report
from penstock.testing.campaigns.planted import BUGS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guide" / "how-tested.md"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.testing.campaigns", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def a_campaign(run: object = None, obstacle: str | None = None) -> Campaign:
    def quiet(report: Report, _seed: int) -> None:
        report.count("things", 3)
        report.finish_round(report.rounds)

    return Campaign(
        name="c99",
        title="a title",
        unit="round",
        small=1,
        full=2,
        run=run or quiet,  # type: ignore[arg-type]
        obstacle=lambda: obstacle,
    )


@pytest.mark.parametrize("name", runner.MODULES)
def test_every_campaign_is_found_by_its_name_and_says_what_it_is(name: str) -> None:
    campaign = runner.find(name)
    assert campaign.name == name
    assert 0 < campaign.small <= campaign.full
    assert f"**{name}," in PAGE.read_text()


def test_a_run_tells_what_was_tried() -> None:
    result = runner.run(a_campaign(), 5, 1)
    assert (result.rounds, result.tried, result.findings, result.skipped) == (5, {"things": 3}, [], None)
    assert "nothing found in 5 rounds" in runner.outcome(result)


def test_what_cannot_run_here_is_skipped_by_name_and_is_no_success() -> None:
    result = runner.run(a_campaign(obstacle="root is needed"), 5, 1)
    assert result.rounds == 0
    assert runner.outcome(result) == "skipped, root is needed"
    assert "skipped" in runner.summary([result])


def test_a_campaign_that_breaks_has_a_finding() -> None:
    def broken(_report: Report, _seed: int) -> None:
        raise ZeroDivisionError

    result = runner.run(a_campaign(broken), 5, 7)
    [finding] = result.findings
    assert "ZeroDivisionError" in finding.what
    assert finding.replay == "seed 7"


def test_too_many_findings_end_a_campaign() -> None:
    def findings(report: Report, _seed: int) -> None:
        for number in range(10 * FINDINGS_MAX):
            report.found("something", f"number {number}")

    result = runner.run(a_campaign(findings), 5, 1)
    assert len(result.findings) == FINDINGS_MAX
    assert f"{FINDINGS_MAX} FOUND" in runner.outcome(result)


def test_full_runs_are_kept_in_a_record_and_shown_on_a_page(tmp_path: Path) -> None:
    def one(report: Report, _seed: int) -> None:
        report.count("things", 3)
        report.found("it broke", "seed 1")
        report.finish_round(report.rounds)

    record, page = tmp_path / "kept" / "record.json", tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    full = [replace(runner.run(a_campaign(one), 2, 1), name=name) for name in ("c2", "c5")]
    partial = replace(runner.run(a_campaign(), 1, 1), name="c5")
    skipped = replace(runner.run(a_campaign(obstacle="no disk"), 2, 1), name="c6")
    assert [result.full for result in (*full, partial, skipped)] == [True, True, False, False]
    runner.update_record(record, full)
    assert runner.update_record(record, [partial, skipped]) == full
    assert [kept["findings"] for kept in json.loads(record.read_text())] == [[["it broke", "seed 1"]]] * 2
    for _ in range(2):
        runner.write_page(page, full)
        text = page.read_text()
        assert text.count("| c2 | a title | 2 | round | 1 |") == text.count("- **c5**: things: 3.") == 1
        assert text.startswith("# How Penstock is tested")


def test_the_page_names_every_planted_bug_and_who_catches_it() -> None:
    text = PAGE.read_text()
    assert runner.planted_bugs().strip() in text, "`make campaign` writes it"
    assert len(BUGS) >= 30


def test_the_command_runs_what_is_asked_for_and_writes_it_down(tmp_path: Path) -> None:
    done = command("c2", "--rounds", "30", "--seed", "5", "--json", str(tmp_path / "out" / "results.json"))
    assert done.returncode == 0, done.stderr
    assert "campaigns c2, seed 5" in done.stdout
    assert "nothing found in 30 rounds" in done.stderr
    [campaign] = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (campaign["name"], campaign["rounds"], campaign["seed"], campaign["findings"]) == ("c2", 30, 5, [])
    assert campaign["tried"]["crash states"] >= 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["c99"], "there is no campaign 'c99', only c0, c1, c1s, c2"), (["c2", "--rounds", "0"], "must be at least 1")],
)
def test_the_command_refuses_what_there_is_not(arguments: list[str], said: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_command_lists_what_there_is() -> None:
    done = command("--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(runner.MODULES)
