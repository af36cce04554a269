"""`archive` on Spark: the same lake as without, a driver that is killed, a source that reads lake and log as one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.spark_topics import fill, info_of, read, rich, rows_of, stored
from tests.test_lake_processes import check

import penstock.spark
from penstock.cli.app import run
from penstock.cli.pipelines import archive as command
from penstock.errors import StoreUnavailable, UsageError
from penstock.lake.lake import Lake
from penstock.lake.plan import Aim
from penstock.spark.pipelines import archive as pipeline
from penstock.spark.pipelines.archive import Archived
from penstock.spark.pipelines.rounds import Ending
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

DRIVERS = Path(__file__).parent / "spark_drivers.py"


@pytest.fixture
def url(root: Path) -> str:
    url = f"file:{root}"
    fill(url, "orders", rich(300), at_a_time=60)
    return url


def trim(url: str, before: int | None = None) -> None:
    with closing(open_store(url)) as store:
        for partition in info_of(store, "orders").partitions:
            store.log.trim(partition, store.log.bounds(partition).stop if before is None else before)


def streamed(spark: SparkSession, url: str, checkpoint: Path, **options: str) -> list[dict[str, Any]]:
    """Return the rows of a stream that reads all there is, a few at a time."""
    frame = spark.readStream.format("penstock").options(url=url, topic="orders", maxRowsPerTrigger="90", **options)
    query = (
        frame.load()
        .writeStream.format("memory")
        .queryName("archived")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    try:
        return rows_of(spark.table("archived"))
    finally:
        spark.sql("drop view archived")


@pytest.mark.spark
def test_what_is_archived_and_trimmed_is_read_as_one_with_the_log(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    lake, truth = tmp_path / "lake", stored(url, "orders")
    assert penstock.spark.archive(spark, url, "ord*", lake, file_bytes=3_000).events == 300
    assert penstock.spark.archive(spark, url, "orders", lake) == Archived()
    plain = spark.read.parquet(str(lake)).select("topic", "partition", "offset", "data").orderBy("partition", "offset")
    assert [(row[0], row[1], row[2], bytes(row[3])) for row in plain.collect()] == [
        (row["topic"], row["partition"], row["offset"], row["data"]) for row in truth
    ]
    trim(url)
    fill(url, "orders", rich(60), at_a_time=60)
    truth = sorted(truth + stored(url, "orders"), key=lambda row: (row["partition"], row["offset"]))
    assert rows_of(read(spark, url, "orders", archive=str(lake), minPartitions="5")) == truth
    assert streamed(spark, url, tmp_path / "checkpoint", archive=str(lake)) == truth
    moment = min(row["appended_at"] for row in truth).isoformat()
    assert len(rows_of(read(spark, url, "orders", archive=str(lake), fromTime=moment))) == 360


@pytest.mark.spark
def test_what_is_in_neither_is_lost_or_passed_over_as_the_option_says(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    from pyspark.errors import PySparkException

    lake = tmp_path / "lake"
    with closing(open_store(url)) as store:
        place = Lake(lake)
        made = pipeline.Archiver(store, place, ["orders"], pipeline.here(store, place, Aim()))
        made.everything()
        [first] = [file for file in place.manifest().files if file.partition == 0]
        place._versions.put(place.version + 1, _without(place, first))
    trim(url)
    first_offsets = {"orders": {str(number): 0 for number in range(3)}}
    options = {"archive": str(lake), "startingOffsets": json.dumps(first_offsets)}
    with pytest.raises(PySparkException, match="were trimmed"):
        read(spark, url, "orders", **options).collect()
    found = rows_of(read(spark, url, "orders", **options, failOnDataLoss="false"))
    assert {row["partition"] for row in found} == {1, 2}
    assert len(found) == 300 - len(first.range)


def _without(lake: Lake, file: Any) -> bytes:
    from penstock.lake.entries import encode

    return encode(lake.manifest().changed([], [file]))


@pytest.mark.spark
def test_a_killed_driver_leaves_nothing_that_the_next_one_loses_or_doubles(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    lake, truth = tmp_path / "lake", stored(url, "orders")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    arguments = json.dumps({"url": url, "lake": str(lake), "killed_before": 2})
    killed = subprocess.run(
        [sys.executable, DRIVERS, "archive", arguments], env=inherited, capture_output=True, timeout=110, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Lake(lake).version == 1
    left_behind = list(Lake(lake).hidden.iterdir())
    assert left_behind, "it had written files, and was about to name them"
    done = penstock.spark.archive(spark, url, "orders", lake, file_bytes=2_000)
    assert 0 < done.events < 300
    check(url, lake, truth)


def test_a_task_that_finds_another_lake_or_none_refuses(url: str, tmp_path: Path) -> None:
    Lake(tmp_path / "other").create()
    connection: Any = SimpleNamespace(open=lambda: closing(open_store(url)))
    for directory in (tmp_path / "other", tmp_path / "none"):
        task = pipeline._Task((), connection, directory, "the driver's", Aim())
        with pytest.raises(StoreUnavailable, match="is not the driver's lake"):
            list(task.run(iter(())))
    assert not (tmp_path / "none").exists()


@pytest.mark.spark
def test_the_bench_reports_its_figure_and_leaves_no_lake_behind(spark: SparkSession, root: Path) -> None:
    from penstock.cli.bench.pipelines import archive
    from penstock.cli.bench.pipelines.sizes import Sizes

    sizes = Sizes(warm_ups=0, archive_rows=500, archive_partitions=1, archive_batch_events=100)
    [figure] = archive.figures(spark, root, sizes, rounds=1)
    assert (figure.name, figure.unit, figure.goal) == ("archive", "events/s", "ratio >= 0.6")
    assert sorted(path.name for path in root.iterdir()) == ["rows.arrow", "store"]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.spark
def test_the_command_archives_and_prints_one_document(url: str, tmp_path: Path) -> None:
    lake, truth = tmp_path / "lake", stored(url, "orders")
    argv = ["--url", url, "pipeline", "archive", "ord*", "--lake", str(lake), "--master", "local[2]", "--json"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "penstock", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["events"] == 300
    assert "300 events in" in done.stderr
    check(url, lake, truth)


class Rounds:
    """An archiver that has something to do in every other round, and is told to end in the fourth."""

    def __init__(self) -> None:
        self.ending = Ending()
        self.made = 0

    def round(self) -> Archived:
        self.made += 1
        if self.made == 4:
            self.ending.ask()
        return Archived(events=self.made, worked=True) if self.made % 2 else Archived()

    @contextmanager
    def running(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(spark=None, settings=None, ending=self.ending)

    @contextmanager
    def archiver(self, *_: Any, **__: Any) -> Iterator[Rounds]:
        yield self


def test_a_continuous_run_prints_a_line_for_each_round_that_did_something(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    rounds = Rounds()
    monkeypatch.setattr(command, "running", rounds.running)
    monkeypatch.setattr(pipeline, "archiver", rounds.archiver)
    monkeypatch.setattr(rounds.ending, "wait", lambda _seconds: rounds.ending.asked)
    argv = ["--url", url, "pipeline", "archive", "orders", "--lake", str(tmp_path), "--continuous", "--json"]
    assert run(argv) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert [json.loads(line)["events"] for line in lines] == [1, 3]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["ordres", "--lake", "lake"], "there is no topic 'ordres'; did you mean 'orders'?"),
        (["orders", "--lake", "s3://bucket"], "needs a directory of this machine"),
        (["orders"], "Missing option '--lake'"),
    ],
)
def test_what_is_wrong_is_told_before_spark_starts(
    url: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--url", url, "pipeline", "archive", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Spark starts" not in error


def test_a_file_of_no_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one byte at least"):
        pipeline.archive(None, "file:./x", "orders", tmp_path, file_bytes=0)  # type: ignore[arg-type]
