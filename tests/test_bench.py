"""The promises of `penstock bench`: one form, honest goals, fair rounds. No test here asserts a time."""

from __future__ import annotations

import gc
import importlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import bench, main
from penstock.cli.bench import harness
from penstock.cli.bench.harness import Figure, Goal, Timing, compare
from penstock.cli.bench.machine import Machine

FIGURES = {
    "batch.build": "ratio >= 0.7",
    "batch.validate": "value <= 40 ns/event",
    "batch.lanes": "value <= 120 ns/event",
    "memory.publish_batch": "value >= 1500000 events/s",
}


@pytest.fixture(autouse=True)
def tiny_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> bench.Report:
    """Two areas that need no measuring."""
    figures = [
        Figure.of("good.one", 12.345678, "ns/event", goal="ratio >= 0.5", ceiling=10.0, ratio=0.81),
        Figure.of("short.one", 1_234_567.8, "events/s", goal="value >= 2000000 events/s"),
    ]
    report = bench.Report("batch", Machine(2, 8 << 30, "A CPU", "Linux 6"), {"penstock": "1"}, figures)
    monkeypatch.setattr(bench, "measure", lambda area, rounds: report)
    return report


# --- goals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reached", "missed"),
    [("value <= 40 ns", 40.0, 40.01), ("value >= 1500000 events/s", 1_500_000.0, 1_499_999.0)],
)
def test_a_goal_for_the_value_decides_in_the_direction_that_its_text_says(
    text: str, reached: float, missed: float
) -> None:
    unit = text.rsplit(maxsplit=1)[-1]
    assert Goal.parse(text).holds(value=reached, unit=unit, ratio=None) is True
    assert Goal.parse(text).holds(value=missed, unit=unit, ratio=None) is False


@pytest.mark.parametrize(("text", "reached", "missed"), [("ratio >= 0.7", 0.7, 0.69), ("ratio <= 1.5", 1.5, 1.6)])
def test_a_goal_for_the_ratio_looks_at_the_ratio_alone(text: str, reached: float, missed: float) -> None:
    assert Goal.parse(text).holds(value=0.0, unit="ns", ratio=reached) is True
    assert Goal.parse(text).holds(value=1.0, unit="ns", ratio=missed) is False


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "ratio > 0.7",
        "ratio = 0.7",
        "0.7 <= ratio",
        "ratio >= 0.7 ns",
        "value >= 7",
        "value <= -3 ns",
        "value <= 40 ns or so",
        "speed >= 3 m/s",
    ],
)
def test_a_text_that_decides_nothing_is_no_goal(text: str) -> None:
    with pytest.raises(ValueError, match="is not a goal"):
        Goal.parse(text)


def test_a_goal_in_another_unit_is_an_error_and_not_an_answer() -> None:
    with pytest.raises(ValueError, match="a goal in ms says nothing about a value in ns"):
        Figure.of("x", 1.0, "ns", goal="value <= 40 ms")


def test_a_goal_for_a_ratio_that_was_not_measured_is_an_error_and_not_an_answer() -> None:
    with pytest.raises(ValueError, match="needs a ceiling"):
        Figure.of("x", 1.0, "ns", goal="ratio >= 0.7")


# --- figures ---------------------------------------------------------------------------------


def test_a_figure_that_falls_short_says_so() -> None:
    timing = Timing(subject=0.004, ceiling=0.002)
    short = timing.nanoseconds_per_event("x", 1_000, goal="ratio >= 0.7")
    assert short == Figure("x", 4_000.0, "ns/event", 2_000.0, 0.5, "ratio >= 0.7", holds=False)


def test_a_higher_ratio_is_better_for_times_and_for_rates_alike() -> None:
    timing = Timing(subject=0.004, ceiling=0.002)
    rate = timing.events_per_second("x", 1_000, goal="ratio >= 0.5")
    assert rate == Figure("x", 250_000.0, "events/s", 500_000.0, 0.5, "ratio >= 0.5", holds=True)


def test_a_figure_without_a_ceiling_has_no_ratio() -> None:
    for measured in (
        Timing(0.004).nanoseconds_per_event("x", 1_000, goal="value <= 5000 ns/event"),
        Timing(0.004).events_per_second("x", 1_000, goal="value >= 5 events/s"),
    ):
        assert (measured.ceiling, measured.ratio, measured.holds) == (None, None, True)


def test_a_goal_is_judged_by_the_digits_that_are_reported() -> None:
    figure = Figure.of("x", 40.001, "ns", goal="value <= 40 ns")
    assert (figure.value, figure.holds) == (40.0, True)


# --- timing ----------------------------------------------------------------------------------


class FakeTime:
    """A clock that only moves when work is done, and a record of who worked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> harness.Work:
        durations: Iterator[float] = iter(seconds)
        last = seconds[-1]

        def work() -> None:
            self.calls.append(name)
            self.now += next(durations, last)

        return work


def test_rounds_of_subject_and_ceiling_alternate() -> None:
    clock = FakeTime()
    compare(clock.work("subject", 1.0), clock.work("ceiling", 1.0), rounds=3, clock=clock)
    warm_up, rounds = clock.calls[:2], clock.calls[2:]
    assert warm_up == ["subject", "ceiling"]
    assert rounds == ["subject", "ceiling"] * 3


def test_a_round_repeats_the_work_until_it_lasts_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.020)
    clock = FakeTime()
    timing = compare(clock.work("subject", 0.003), clock.work("ceiling", 0.025), rounds=2, clock=clock)
    assert clock.calls == [*["subject"] * 15, "ceiling", *[*["subject"] * 8, "ceiling"] * 2]
    assert timing == pytest.approx((0.003, 0.025))


def test_the_median_counts_and_not_the_outlier() -> None:
    clock = FakeTime()
    subject = clock.work("subject", 50.0, 1.0, 90.0, 2.0)  # the first is the warm-up
    assert compare(subject, None, rounds=3, clock=clock) == Timing(2.0, None)


def test_tidying_up_between_rounds_is_not_timed() -> None:
    clock = FakeTime()
    timing = compare(clock.work("subject", 1.0), None, rounds=2, between=clock.work("tidy", 100.0), clock=clock)
    assert clock.calls == ["subject", "tidy"] * 3
    assert timing.subject == 1.0


def test_the_garbage_collector_is_off_while_time_is_taken_and_on_again_afterwards() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(gc.isenabled())

    compare(work, None, rounds=2, between=lambda: seen.append(gc.isenabled()))
    assert seen == [False, True] * 3

    def failing() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        compare(failing, None, rounds=1)
    assert gc.isenabled()


# --- the form --------------------------------------------------------------------------------


def check_form(document: Any, area: str) -> None:
    assert list(document) == ["area", "machine", "versions", "figures"]
    assert document["area"] == area
    machine = document["machine"]
    assert list(machine) == ["cores", "memory_bytes", "cpu_model", "os_release"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 1 << 20
    assert machine["cpu_model"]
    assert machine["os_release"]
    assert set(document["versions"]) == {"penstock", "python", "pyarrow", "numpy", "msgspec"}
    assert all(isinstance(version, str) and version for version in document["versions"].values())
    assert document["figures"]
    for figure in document["figures"]:
        assert list(figure) == ["name", "value", "unit", "ceiling", "ratio", "goal", "holds"]
        assert isinstance(figure["name"], str)
        assert isinstance(figure["value"], float)
        assert figure["value"] > 0
        assert figure["unit"] in {"ns/event", "events/s"}
        assert (figure["ceiling"] is None) == (figure["ratio"] is None)
        goal = Goal.parse(figure["goal"])
        numbers = {key: figure[key] for key in ("value", "unit", "ratio")}
        assert figure["holds"] is goal.holds(**numbers)


def test_the_batch_area_reports_its_four_figures_in_the_form_and_keeps_the_same_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = tmp_path / "not" / "there" / "yet"
    assert main(["bench", "batch", "--json", "--rounds", "1", "--keep", str(keep)]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    check_form(document, "batch")
    assert {figure["name"]: figure["goal"] for figure in document["figures"]} == FIGURES
    with_ceiling = {figure["name"] for figure in document["figures"] if figure["ceiling"] is not None}
    assert with_ceiling == {"batch.build", "batch.validate"}
    assert json.loads((keep / "batch.json").read_text()) == document
    assert printed.err == f"{keep / 'batch.json'} is written\n"
    for private in (socket.gethostname(), str(tmp_path), str(Path.home())):
        assert private not in printed.out


def test_every_area_is_a_module_with_figures_and_a_command_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["bench", "--help"])
    shown = capsys.readouterr().out
    for area, about in bench.AREAS.items():
        assert callable(importlib.import_module(f"penstock.cli.bench.{area}").figures)
        assert f"{area}  {about}" in shown


def test_all_measures_every_area_and_prints_one_document_with_all_of_them(
    canned: bench.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[tuple[str, int]] = []

    def measure(area: str, rounds: int) -> bench.Report:
        measured.append((area, rounds))
        return canned

    monkeypatch.setattr(bench, "measure", measure)
    assert main(["bench", "all", "--json", "--rounds", "7"]) == 0
    assert measured == [(area, 7) for area in bench.AREAS]
    documents = json.loads(capsys.readouterr().out)
    assert [document["area"] for document in documents] == ["batch"] * len(bench.AREAS)


# --- the command -----------------------------------------------------------------------------


@pytest.mark.usefixtures("canned")
def test_the_table_has_every_figure_and_a_figure_that_falls_short_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "batch"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        "batch: A CPU, 2 cores, 8.0 GiB, Linux 6",
        "penstock 1",
        "figure         value  unit      ceiling  ratio  goal                       holds",
        "good.one       12.35  ns/event       10   0.81  ratio >= 0.5               yes",
        "short.one  1,235,000  events/s        -      -  value >= 2000000 events/s  no",
    ]
    assert printed.err == ""


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_less_than_one_round_is_a_usage_error(rounds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "batch", "--rounds", rounds]) == 2
    assert capsys.readouterr().out == ""


def test_a_directory_that_cannot_be_written_is_found_out_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda area, rounds: pytest.fail("measured"))
    file = tmp_path / "file"
    file.touch()
    assert main(["bench", "batch", "--keep", str(file)]) == 2
    assert main(["bench", "batch", "--keep", str(file / "below")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: [Errno 20] Not a directory" in printed.err
