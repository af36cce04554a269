"""The promises of `penstock bench`: one form, honest goals, fair rounds. No test here asserts a time."""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cli import bench, main
from penstock.cli.bench import harness, log
from penstock.cli.bench.harness import Figure, Goal, Timing, compare, percentile, sample
from penstock.cli.bench.log.bare import BareFile
from penstock.cli.bench.log.children import Child, children
from penstock.cli.bench.log.jobs import Move, Publish, high_water_bytes
from penstock.cli.bench.log.sizes import Sizes
from penstock.cli.bench.machine import Machine
from penstock.cli.bench.spark import growth, queries
from penstock.cli.bench.spark.sizes import Sizes as SparkSizes
from penstock.cli.bench.spark.topics import fill
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIGURES = {
    "batch.build": "ratio >= 0.7",
    "batch.validate": "value <= 40 ns/event",
    "batch.lanes": "value <= 120 ns/event",
    "memory.publish_batch": "value >= 1500000 events/s",
}
LOG_FIGURES = {
    "append.ready_batches": "ratio >= 0.7",
    "publish_batch": "ratio >= 0.3",
    "publish.tasks": "value >= 100000 events/s",
    "publish.single": "value <= 250 µs",
    "heads.all": "value <= 100 µs",
    "heads.one": "value <= 2 µs",
    "read.warm": "value >= 8000000 events/s",
    "read.cold": "ratio >= 0.5",
    "cursor.commit.one": "ratio >= 0.333",
    "cursor.commit.group": "value <= 100 ms",
    "open.after_kill": "ratio >= 0.667",
    "processes.batches": "ratio >= 1.0",
    "processes.batches.fairness": "value >= 0.5 least/most",
    "processes.single": "ratio >= 0.9",
    "processes.single.p99": "value <= 20 syncs",
    "memory": "value <= 250 MB",
    "growth": "ratio >= 0.8",
}
SPARK_FIGURES = {
    "read.stream": "ratio >= 0.6",
    "read.batch": "ratio >= 0.6",
    "write.stream": "ratio >= 0.5",
    "growth": "ratio >= 0.833",
}
TINY = Sizes(
    batch_events=20,
    publishes=1,
    tasks=3,
    publishes_per_task=2,
    singles=3,
    partitions=5,
    head_reads=3,
    read_batches=4,
    segments_many=4,
    segment_bytes=16 << 10,
    openings=1,
    cursors=10,
    slots=4,
    commits=2,
    processes=2,
    process_batch_events=5,
    process_seconds=0.1,
    process_rounds=1,
    volume_bytes=100_000,
    growth_small=100,
    growth_large=1_000,
    growth_samples=6,
)


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
    timing = Timing([0.004], [0.002])
    short = timing.nanoseconds_per_event("x", 1_000, goal="ratio >= 0.7")
    assert short == Figure("x", 4_000.0, "ns/event", 2_000.0, 0.5, "ratio >= 0.7", holds=False)


def test_a_higher_ratio_is_better_for_times_and_for_rates_alike() -> None:
    timing = Timing([0.004], [0.002])
    rate = timing.events_per_second("x", 1_000, goal="ratio >= 0.5")
    assert rate == Figure("x", 250_000.0, "events/s", 500_000.0, 0.5, "ratio >= 0.5", holds=True)


def test_a_figure_without_a_ceiling_has_no_ratio() -> None:
    for measured in (
        Timing([0.004]).nanoseconds_per_event("x", 1_000, goal="value <= 5000 ns/event"),
        Timing([0.004]).events_per_second("x", 1_000, goal="value >= 5 events/s"),
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
    assert timing.subject == pytest.approx([0.003] * 2)
    assert timing.ceiling == pytest.approx([0.025] * 2)


def test_the_median_counts_and_not_the_outlier() -> None:
    clock = FakeTime()
    subject = clock.work("subject", 50.0, 1.0, 90.0, 2.0)  # the first is the warm-up
    timing = compare(subject, None, rounds=3, clock=clock)
    assert timing == Timing([1.0, 90.0, 2.0])
    assert timing.milliseconds("x", goal="value <= 2 ms").value == 2_000.0


def test_a_ratio_is_of_neighbouring_rounds() -> None:
    slower_by_the_minute = Timing([2.0, 4.0, 20.0], [1.0, 2.0, 10.0])
    assert slower_by_the_minute.milliseconds("x", goal="ratio >= 0.5").ratio == 0.5
    slower_in_between = Timing([2.0, 3.0, 40.0], [1.0, 20.0, 2.0])
    figure = slower_in_between.milliseconds("x", goal="ratio >= 0.5")
    assert (figure.value, figure.ceiling, figure.ratio) == (3_000.0, 2_000.0, 0.5)
    with pytest.raises(ValueError, match="zip"):
        Timing([1.0, 2.0], [1.0]).milliseconds("x", goal="ratio >= 0.5")


def test_a_rate_a_time_and_a_ratio_of_the_same_timing_agree() -> None:
    timing = Timing([0.004], [0.002])
    assert timing.microseconds("x", goal="ratio >= 0.5") == Figure(
        "x", 4_000.0, "µs", 2_000.0, 0.5, "ratio >= 0.5", holds=True
    )
    assert timing.milliseconds("x", goal="value <= 3 ms") == Figure(
        "x", 4.0, "ms", 2.0, 0.5, "value <= 3 ms", holds=False
    )


def test_samples_alternate_and_each_is_one_call_that_was_prepared() -> None:
    clock = FakeTime()
    contestants = [clock.work("subject", 1.0, 2.0), clock.work("ceiling", 3.0)]
    seconds = sample(contestants, 2, before=clock.work("before", 100.0), clock=clock)
    assert clock.calls == ["before", "subject", "before", "ceiling"] * 2
    assert seconds == [[1.0, 2.0], [3.0, 3.0]]


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 100)] == [1.0, 1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0


def test_tidying_up_between_rounds_is_not_timed() -> None:
    clock = FakeTime()
    timing = compare(clock.work("subject", 1.0), None, rounds=2, between=clock.work("tidy", 100.0), clock=clock)
    assert clock.calls == ["subject", "tidy"] * 3
    assert timing.subject == [1.0, 1.0]


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


UNITS = {"ns/event", "events/s", "µs", "ms", "s", "kB", "MB", "least/most", "syncs", "%"}
DIFFERENCES = {
    ("log", "publish.single"),
    ("spark", "growth"),
    ("delivery", "latency.fallback"),
    ("delivery", "monitor.memory"),
    ("delivery", "ledger.cost"),
}
"""Figures that may come out as zero or below."""


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
        assert figure["value"] > 0 or (area, figure["name"]) in DIFFERENCES
        assert figure["unit"] in UNITS
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


@pytest.fixture
def tiny_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The area `log` in a directory of its own, quickly."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "SIZES", TINY)
    return tmp_path


def test_the_log_area_reports_all_its_figures_in_the_form_and_leaves_nothing_behind(
    tiny_log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "log", "--json", "--rounds", "1"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    check_form(document, "log")
    assert {figure["name"]: figure["goal"] for figure in document["figures"]} == LOG_FIGURES
    assert "memory: 0.0001 GB, 680 events, were written and read" in printed.err
    assert list(tiny_log.iterdir()) == []


def test_the_log_area_removes_its_files_when_it_fails(tiny_log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
        assert directory.parent == tiny_log
        (directory / "file").touch()
        raise RuntimeError("stop")

    monkeypatch.setattr(log, "_PARTS", [type("Part", (), {"figures": staticmethod(fail)})])
    with pytest.raises(RuntimeError, match="stop"):
        list(log.figures(1))
    assert list(tiny_log.iterdir()) == []


def test_a_directory_in_memory_is_measured_and_the_reader_is_warned(
    tiny_log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_PARTS", [])
    monkeypatch.setattr(log, "describe", lambda path: type("Info", (), {"persistent": False}))
    assert list(log.figures(1)) == []
    assert "a sync costs nothing" in capsys.readouterr().err


def test_a_bare_file_begins_anew_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.bench.log.bare.FILE_BYTES", 64 << 10)
    file = BareFile(tmp_path / "bare", room=30_000)
    for number in range(1, 6):
        file.write([bytes([number]) * 10_000, bytes([number]) * 20_000])
    file.close()
    content = (tmp_path / "bare").read_bytes()
    assert content == (b"\x05" * 30_000).ljust(64 << 10, b"\0")


# --- Spark -----------------------------------------------------------------------------------

BENCH_SPARK = """
import sys
from pathlib import Path
from penstock.cli import main
from penstock.cli.bench import spark
from penstock.spark import java

{change}
sys.exit(main(["bench", "spark", "--json", "--rounds", "1"]))
"""
"""It runs in a process of its own, as a process has one Java, whose stdout is what it was when Java started."""

TINY_SPARK = "spark.SIZES = spark.Sizes(warm_ups=0, partitions=1, batch_events=50, read_rows=2_000, write_rows=1_000)"


def bench_spark(directory: Path, change: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BENCH_SPARK.format(change=change)],
        cwd=directory,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.spark
def test_the_spark_area_reports_its_figures_prints_nothing_else_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = bench_spark(tmp_path, TINY_SPARK)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    check_form(document, "spark")
    assert {figure["name"]: figure["goal"] for figure in document["figures"]} == SPARK_FIGURES
    assert all(figure["ceiling"] is not None for figure in document["figures"])
    assert re.fullmatch(r"Spark \d+\.\d+\.\d+, rounds: 1\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
def test_without_java_the_spark_area_fails_at_once_and_says_what_is_missing(tmp_path: Path) -> None:
    nowhere = {name: str(tmp_path / "nowhere") for name in ("PATH", "HOME", "JAVA_HOME", "CONDA_PREFIX", "SDKMAN_DIR")}
    done = bench_spark(tmp_path, 'java.SYSTEM_HOMES = Path("nowhere")', **nowhere)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: Spark needs Java 17")
    assert list(tmp_path.iterdir()) == []


def test_without_pyspark_the_spark_area_fails_at_once_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert main(["bench", "spark", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "error: pyspark is not installed: pip install 'penstock[spark]'\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
def test_the_ceiling_of_reading_yields_the_same_rows_in_as_many_tasks_as_we_do(
    spark: SparkSession, tmp_path: Path
) -> None:
    from penstock.cli.bench.spark import reading
    from penstock.spark.reading import BATCH_ROWS

    topic = fill(tmp_path / "store", SparkSizes(partitions=2), 30_000)
    rows = reading.register_ceiling(spark, tmp_path, topic)
    ours = spark.read.format("penstock").options(**topic.options).load()
    ceiling = spark.read.format(reading.MEMORY).load()
    assert ceiling.schema == ours.schema
    assert ceiling.rdd.getNumPartitions() == ours.rdd.getNumPartitions() == 2
    yielded, read = ceiling.toArrow(), ours.toArrow()
    assert rows == len(yielded) == len(read) == 30_000
    assert yielded[:BATCH_ROWS].equals(read[:BATCH_ROWS])
    nulls = {name for name in read.column_names if read[name].null_count}
    assert nulls == {"subject", "expires_at", "headers"}
    assert set(map(len, read["data"].to_pylist())) == {100}


@pytest.mark.spark
def test_a_query_that_has_not_read_all_rows_is_an_error_and_not_a_fast_one(spark: SparkSession, tmp_path: Path) -> None:
    from penstock.cli.bench.spark import reading

    topic = fill(tmp_path / "store", SparkSizes(partitions=1, batch_events=10), 20)
    reading.register_ceiling(spark, tmp_path, topic)
    queries.read_stream(spark, tmp_path, reading.MEMORY, {}, rows=20)
    with pytest.raises(PenstockError, match="has read 20 rows, and there are 21"):
        queries.read_stream(spark, tmp_path, reading.MEMORY, {}, rows=21)


@pytest.mark.parametrize(
    ("large_seconds", "ratio", "holds"), [(11.0, 1.0, True), (13.0, 0.8333, True), (13.1, 0.8264, False)]
)
def test_growth_takes_off_what_a_query_costs_by_itself(large_seconds: float, ratio: float, holds: bool) -> None:
    measured = growth.figure((1_000, 1.0), (101_000, 2.0), (1_001_000, large_seconds))
    assert (measured.ceiling, measured.ratio, measured.holds) == (10_000.0, ratio, holds)


# --- other processes -------------------------------------------------------------------------


def test_other_processes_are_ended_by_the_end_of_the_block_whatever_happens(tmp_path: Path) -> None:
    job = Publish(directory=str(tmp_path / "store"), events=1)
    started: list[Child] = []

    def fail_meanwhile() -> None:
        with children([job, job]) as running:
            started.extend(running)
            assert running[0].hear() == "ready"
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_meanwhile()
    assert [child.process.returncode for child in started] == [-9, -9]


def test_a_process_that_ends_early_is_an_error_that_names_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").touch()
    job = Move(directory=str(tmp_path / "store"), batch_events=1, bytes=0)
    with children([job]) as [child], pytest.raises(PenstockError, match=f"process {child.process.pid} .* ended early"):
        child.hear()
    assert "store" in capfd.readouterr().err


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    job = Publish(directory=str(tmp_path / "store"), events=1)
    with children([job], seconds_max=0.0) as [child], pytest.raises(PenstockError, match="ended early"):
        child.hear()


def test_the_high_water_mark_is_that_of_this_process_and_not_of_the_one_that_started_it(tmp_path: Path) -> None:
    large = bytearray(300 << 20)
    here = high_water_bytes()
    assert here > len(large)
    job = Move(directory=str(tmp_path / "store"), batch_events=1, bytes=1)
    with children([job]) as [child]:
        told = child.hear()
        child.end()
    assert told["events"] == 1
    assert 0 < told["memory"] < here


def test_every_area_is_a_module_with_figures_and_a_command_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["bench", "--help"])
    shown = capsys.readouterr().out
    for area, about in bench.AREAS.items():
        assert callable(importlib.import_module(f"penstock.cli.bench.{area}").figures)
        assert re.search(rf"{area} +{re.escape(about)}", shown)


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
