"""Projections on Spark: the same states as where the bus runs, whatever is killed, and however many run at once."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.projected import (
    Account,
    Left,
    Sold,
    accounted,
    accounts_of,
    by_a_loop,
    heads,
    publish,
    run_embedded,
    sales,
    some_events,
    states_of,
)

from penstock import Bus, Topic
from penstock.bus.states import States
from penstock.clock import VirtualClock
from penstock.errors import DataLost, IntegrityError, ProjectionFailed, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.spark.pipelines.folding import Work
    from penstock.spark.pipelines.project import Projected
    from penstock.spark.pipelines.tables import Table

pytestmark = pytest.mark.spark

BUCKETS = 3
PATIENCE_SECONDS = 200.0
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # as for the shared session


# --- tasks, without Spark -------------------------------------------------------------------------


def work_of(projection: Any, directory: Path, files: dict[int, str]) -> Work:
    from penstock.spark.pipelines.folding import Work
    from penstock.spark.pipelines.project import _layout, usual_kind
    from penstock.spark.shipping import FoldShipment

    layout, fields = _layout(projection)
    topic = projection.topic
    return Work(
        shipment=FoldShipment.of(projection.fold, topic.types.values()),
        content_type=topic.settings.content_type,
        usual=usual_kind(projection),
        buckets=BUCKETS,
        directory=str(directory),
        files=files,
        layout=layout,
        fields=fields,
    )


def rows_of(topic: Topic[Any], events: list[tuple[int, int, Any]]) -> pa.RecordBatch:
    """Return events, given with partition and offset, as tasks get them from Spark."""
    from penstock.spark.pipelines.folding import SHUFFLED, Kind

    rows = []
    for partition, offset, value in events:
        form, data, key = topic.row(value)
        kind = Kind(form.type or "", topic.settings.content_type)
        text = None if form.type == "tests.projected.sold" else msgspec.json.encode(kind).decode()
        rows.append({"partition": partition, "offset": offset, "key": key, "note": text, "data": data})
    return pa.RecordBatch.from_pylist(rows, schema=SHUFFLED)


def stepped(work: Work, batches: list[pa.RecordBatch]) -> dict[int, str]:
    """Do what a step does, in one task; return the files afterwards."""
    files = dict(work.files)
    if work.shipment.open().fold.key is not None:
        batches = [batch.drop_columns(["bucket"]) for batch in work.key(iter(batches))]
    for batch in work.fold(iter(batches)):
        for row in batch.to_pylist():
            assert row["problem"] is None, row
            files.pop(row["bucket"], None)
            if row["file"] is not None:
                files[row["bucket"]] = row["file"]
    return files


def kept(directory: Path, files: dict[int, str]) -> dict[str, bytes]:
    """Return the states in files, which are there once each."""
    tables = [pq.read_table(directory / name, columns=["key", "_state"]) for name in files.values()]
    pairs = [(row["key"], row["_state"].encode()) for table in tables for row in table.to_pylist()]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


HISTORIES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(
            st.builds(Sold, st.sampled_from("abcdef"), st.integers(-(2**40), 2**40)),
            st.builds(Left, st.sampled_from("abcdef")),
        ),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(HISTORIES, st.lists(st.integers(0, 40), max_size=4), st.randoms(use_true_random=False), st.booleans())
def test_steps_of_any_size_fold_to_what_a_loop_does(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, Any]], cuts: list[int], random: Any, own: bool
) -> None:
    directory = tmp_path_factory.mktemp("data")
    key = None if own else (lambda event: event.customer)
    accounts = accounts_of(Bus("memory:", topics=[sales]), key=key)
    # Each customer is of one partition, as their keys are; within it the order is that of offsets.
    placed: list[tuple[int, int, Any]] = []
    ends = [0, 0, 0]
    for _, event in history:
        partition = ord(event.customer) % 3
        placed.append((partition, ends[partition], event))
        ends[partition] += 1
    files: dict[int, str] = {}
    edges = sorted({0, len(placed), *(cut % (len(placed) + 1) for cut in cuts)})
    for start, stop in pairwise(edges):
        some = placed[start:stop]
        random.shuffle(some)  # a shuffle brings them in any order, and in pieces
        middle = len(some) // 2
        files = stepped(
            work_of(accounts, directory, files), [rows_of(sales, part) for part in (some[:middle], some[middle:])]
        )
    states = kept(directory, files)
    decode = accounts.fold.state.decode
    assert {key: decode(state) for key, state in states.items()} == by_a_loop([event for _, event in history])


def test_a_table_has_the_fields_of_its_states_as_columns(tmp_path: Path) -> None:
    accounts = accounts_of(Bus("memory:", topics=[sales]))
    files = stepped(work_of(accounts, tmp_path, {}), [rows_of(sales, [(0, 0, Sold("ada", 5)), (0, 1, Sold("ada", 2))])])
    (name,) = files.values()
    table = pq.read_table(tmp_path / name)
    assert table.to_pylist() == [
        {"key": "ada", "cents": 7, "first": 5.0, "last": "5,2,", "_state": '{"cents":7,"first":5.0,"last":"5,2,"}'}
    ]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_state_without_fields_is_the_column_value(tmp_path: Path) -> None:
    bus = Bus("memory:", topics=[sales])

    @bus.projection(sales, "counts")
    def counts(state: dict[str, int] | None, event: Sold | Left) -> dict[str, int] | None:
        state = dict(state or {})
        state[type(event).__name__] = state.get(type(event).__name__, 0) + 1
        return state

    (name,) = stepped(work_of(counts, tmp_path, {}), [rows_of(sales, [(0, 0, Sold("ada", 5))])]).values()
    assert pq.read_table(tmp_path / name).to_pylist() == [
        {"key": "ada", "value": [("Sold", 1)], "_state": '{"Sold":1}'}
    ]


@dataclass
class Wider(Account):
    visits: int = 9


def test_a_class_that_has_a_field_more_makes_the_columns_of_all_rows_anew(tmp_path: Path) -> None:
    def wider(account: Wider | None, event: Sold | Left) -> Wider | None:
        return Wider(1, 1.0, "", 1)

    before = accounts_of(Bus("memory:", topics=[sales]))
    events = [(0, number, Sold(f"customer-{number}", number)) for number in range(20)]
    files = stepped(work_of(before, tmp_path, {}), [rows_of(sales, events)])
    after = Bus("memory:", topics=[sales]).projection(sales, "accounts")(wider)
    some = [(0, 20 + number, Sold(f"customer-{number}", 0)) for number in range(20) if number % 2]
    files = stepped(work_of(after, tmp_path, files), [rows_of(sales, some)])
    rows = [row for name in files.values() for row in pq.read_table(tmp_path / name).to_pylist()]
    assert {row["key"]: row["visits"] for row in rows} == {
        f"customer-{number}": 1 if number % 2 else 9 for number in range(20)
    }


def test_a_bucket_in_which_nothing_has_changed_keeps_its_file(tmp_path: Path) -> None:
    bus = Bus("memory:", topics=[sales])

    @bus.projection(sales, "seen")
    def seen(state: bool | None, event: Sold | Left) -> bool | None:
        return True

    first = stepped(work_of(seen, tmp_path, {}), [rows_of(sales, [(0, 0, Sold("ada", 1))])])
    assert stepped(work_of(seen, tmp_path, first), [rows_of(sales, [(0, 1, Sold("ada", 2))])]) == first


@dataclass
class Keyed:
    key: str


def test_a_field_named_like_a_column_of_every_table_is_refused() -> None:
    def keyed(state: Keyed | None, event: Sold | Left) -> Keyed | None:
        return state

    made = Bus("memory:", topics=[sales]).projection(sales, "keyed")(keyed)
    with pytest.raises(UsageError, match="a field 'key'"):
        work_of(made, Path(), {})


# --- the table, without Spark -----------------------------------------------------------------------


def write_file(table: Table, name: str, keys: list[str]) -> None:
    table.prepare()
    pq.write_table(pa.table({"key": keys, "_state": ["1"] * len(keys)}), table.data / name)


def manifest_of(files: dict[int, str], **changes: Any) -> Any:
    from penstock.spark.pipelines.tables import BucketFile, Manifest

    named = {bucket: BucketFile(name, 1) for bucket, name in files.items()}
    stated: dict[str, Any] = {"projection": "p", "version": 1, "topic": "t", "log_id": "l", "offsets": (1,)}
    return Manifest(**{**stated, "buckets": BUCKETS, "files": named, **changes})


def shown(table: Table) -> set[str]:
    return {path.name for path in table.latest_link.iterdir()}


def test_of_two_versions_of_a_number_one_is_put_and_latest_is_what_holds(tmp_path: Path) -> None:
    from penstock.spark.pipelines.tables import Table

    table = Table(tmp_path / "p")
    write_file(table, "a", ["x"])
    write_file(table, "b", ["x"])
    assert table.put(0, manifest_of({0: "a"}))
    assert not table.put(0, manifest_of({0: "b"}))
    assert shown(table) == {"a"}
    assert table.put(1, manifest_of({0: "b"}))
    assert shown(table) == {"b"}


def test_whoever_was_killed_before_latest_was_moved_is_made_up_for(tmp_path: Path) -> None:
    from penstock.spark.pipelines.tables import Table

    table = Table(tmp_path / "p")
    write_file(table, "a", ["x"])
    table.put(0, manifest_of({0: "a"}))
    write_file(table, "b", ["x"])
    table._versions.put(1, msgspec.json.encode(manifest_of({0: "b"})))
    assert shown(table) == {"a"}
    table.show()
    assert shown(table) == {"b"}


def test_files_go_with_the_last_version_that_names_them_and_orphans_with_time(tmp_path: Path) -> None:
    from penstock.spark.pipelines.tables import ORPHAN_SECONDS, Table
    from penstock.versions import KEPT

    clock = VirtualClock()
    table = Table(tmp_path / "p", clock=clock)
    write_file(table, "orphan", ["x"])
    os.utime(table.data / "orphan", (clock.time_us() / 1e6, clock.time_us() / 1e6))
    for number in range(KEPT + 3):
        write_file(table, f"file-{number}", ["x"])
        os.utime(table.data / f"file-{number}", (clock.time_us() / 1e6 + 1e6,) * 2)
        assert table.put(number, manifest_of({0: f"file-{number}"}))
    names = {path.name for path in table.data.iterdir()}
    assert names == {"orphan", *(f"file-{number}" for number in range(2, KEPT + 3))}
    assert len(list((table.directory / "snapshots").iterdir())) == KEPT + 1
    clock.advance(ORPHAN_SECONDS + 1)
    write_file(table, "last", ["x"])
    table.put(KEPT + 3, manifest_of({0: "last"}))
    assert "orphan" not in {path.name for path in table.data.iterdir()}


def test_something_else_in_the_place_of_a_table_is_told(tmp_path: Path) -> None:
    from penstock.spark.pipelines.tables import Table

    table = Table(tmp_path / "p")
    with pytest.raises(UsageError, match="no table"):
        table.get("x")
    table._versions.put(0, b'{"lake": 1}')
    with pytest.raises(IntegrityError, match="no table of a projection"):
        table.latest()


def test_the_bucket_of_a_key_is_the_same_one_by_one_all_at_once_and_in_spark(spark: SparkSession) -> None:
    from penstock.spark.pipelines.tables import bucket_of, buckets_of

    keys = [f"key-{number}" * (number % 7 + 1) for number in range(500)]
    by_spark = spark.createDataFrame([(key.encode(),) for key in keys], "key binary").selectExpr(
        "pmod(xxhash64(key), 63)"
    )
    assert buckets_of(pa.array(keys), 63).tolist() == [bucket_of(key, 63) for key in keys]
    assert [row[0] for row in by_spark.collect()] == [bucket_of(key, 63) for key in keys]


# --- with Spark -------------------------------------------------------------------------------------


def folded(spark: SparkSession, url: str, into: Path, **options: Any) -> Projected:
    from penstock.spark import project

    version = options.pop("version", 1)
    bus = Bus(url, topics=[sales])
    return project(spark, bus, accounts_of(bus, version=version), into, buckets=BUCKETS, **options)


def table_states(into: Path) -> dict[str, bytes]:
    from penstock.spark.pipelines.tables import Table

    pairs = list(Table(into / "accounts").items())
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def embedded_states(root: Path) -> dict[str, bytes]:
    run_embedded(f"file:{root}")
    return states_of(States(root / "projections.db"))


@pytest.fixture
def interposed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let something happen when the next version of a table is about to be put."""
    from penstock.spark.pipelines.tables import Table

    put = Table.put

    def interpose(work: Callable[[], object]) -> None:
        waiting = [work]

        def first(self: Table, number: int, manifest: Any) -> bool:
            if waiting:
                waiting.pop()()
            return put(self, number, manifest)

        monkeypatch.setattr(Table, "put", first)

    return interpose


def test_spark_and_the_bus_come_to_the_same_states(
    spark: SparkSession, root: Path, tmp_path: Path, interposed: Callable[[Callable[[], object]], None]
) -> None:
    url, into = f"file:{root}", tmp_path / "tables"
    publish(url, some_events(400))

    def another() -> None:
        """Be quicker than the one that is about to put its version."""
        done = folded(spark, url, into)
        assert (done.events, done.lost, done.behind) == (400, 0, 0)

    interposed(another)
    first = folded(spark, url, into)
    assert (first.events, first.lost, first.steps) == (0, 1, 1)
    assert table_states(into) == embedded_states(root)
    files = {path.name for path in (into / "accounts" / "data").iterdir()}
    assert files == shown_in(into)  # nothing is left of the one that came too late

    publish(url, some_events(300, first=400))
    more = folded(spark, url, into, step_rows=200)  # from what the table says, and nothing else
    assert (more.events, more.steps, more.positions) == (300, 2, heads(url))
    assert table_states(into) == embedded_states(root)
    assert folded(spark, url, into).idle

    pandas = importlib.import_module("pandas")  # which has no types here

    frame = pandas.read_parquet(into / "accounts" / "latest").set_index("key")
    assert frame["cents"].to_dict() == {key: each.cents for key, each in by_a_loop(some_events(700)).items()}

    with pytest.raises(UsageError, match="has version 1 of projection 'accounts', and this is version 2: begin anew"):
        folded(spark, url, into, version=2)
    again = folded(spark, url, into, version=2, rebuild=True)
    assert (again.events, again.number) == (700, more.number + 1)
    assert table_states(into) == embedded_states(root)
    with pytest.raises(UsageError, match="made by a newer program"):
        folded(spark, url, into, version=1, rebuild=True)


def shown_in(into: Path) -> set[str]:
    return {path.name for path in (into / "accounts" / "latest").iterdir()}


def test_two_projectors_at_once_do_each_other_no_harm(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    url, into = f"file:{root}", tmp_path / "tables"
    publish(url, some_events(200))
    done: list[Projected] = []
    threads = [threading.Thread(target=lambda: done.append(folded(spark, url, into, step_rows=100))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.events for each in done) == 200
    assert table_states(into) == embedded_states(root)


def test_what_goes_wrong_in_a_task_is_told_in_a_sentence(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    from penstock.spark import project

    url, into = f"file:{root}", tmp_path / "tables"
    publish(url, some_events(50))

    def broken(state: Account | None, event: Sold | Left) -> Account | None:
        if isinstance(event, Sold) and event.cents == 30:
            raise ValueError("it is the 30th")
        return accounted(state, event)

    bus = Bus(url, topics=[sales])
    by_function = bus.projection(sales, "accounts")(broken)
    by_key = bus.projection(sales, "keyed", key=lambda event: 7)(accounted)  # type: ignore[arg-type, return-value]
    with pytest.raises(ProjectionFailed, match="its function: ValueError it is the 30th") as caught:
        project(spark, bus, by_function, into, buckets=BUCKETS)
    assert caught.value.position.startswith("sales/")
    with pytest.raises(ProjectionFailed, match="its key: it is int"):
        project(spark, bus, by_key, into, buckets=BUCKETS)
    assert list((into / "accounts" / "data").iterdir()) == []
    with pytest.raises(UsageError, match="no projection 'acounts'; did you mean 'accounts'"):
        project(spark, bus, "acounts", into)


def test_what_can_never_be_read_again_is_an_error_and_not_passed_over(root: Path, tmp_path: Path) -> None:
    from penstock.spark.pipelines.tables import Table

    url = f"file:{root}"
    publish(url, some_events(10))
    table = Table(tmp_path / "accounts")
    table.prepare()
    stated = {"projection": "accounts", "topic": "sales", "offsets": (0, 0, 99)}
    from penstock.spark.pipelines.project import _Pipeline

    bus = Bus(url, topics=[sales])
    no_spark: Any = None
    pipeline = _Pipeline(no_spark, bus, accounts_of(bus), table, buckets=1, step_rows=1, options={})
    with pipeline._connected() as (_, seen):
        log_id = seen["sales"].log_id
    table.put(0, manifest_of({}, **stated, log_id=log_id))
    with pytest.raises(DataLost, match="partition 2: the log ends at"):
        pipeline.round(rebuild=False, ending=None, told=None)
    table.put(1, manifest_of({}, **stated, log_id="another"))
    with pytest.raises(DataLost, match="deleted and created anew"):
        pipeline.round(rebuild=False, ending=None, told=None)


# --- the command, killed ------------------------------------------------------------------------------

SHOP = """
    import os, signal
    from dataclasses import dataclass
    import penstock
    from penstock import Bus, Topic
    from penstock.spark.pipelines import tables

    @penstock.event("shop.sold")
    @dataclass(frozen=True)
    class Sold:
        customer: str
        cents: int

    @dataclass(frozen=True)
    class Turnover:
        cents: int = 0
        orders: int = 0

    sold = Topic("sold", Sold, key=lambda event: str(event.cents), partitions=2)
    bus = Bus("file:./data", topics=[sold])

    @bus.projection(sold, "turnover", key=lambda event: event.customer)
    def turnover(state: Turnover | None, event: Sold) -> Turnover:
        state = state or Turnover()
        return Turnover(state.cents + event.cents, state.orders + 1)

    put, show = tables.Table.put, tables.Table.show

    def dying(self, number, manifest):
        if os.environ.get("DIES") == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        tables.Table.show = die if os.environ.get("DIES") == "after" else show
        return put(self, number, manifest)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    tables.Table.put = dying
"""


def command(directory: Path, *arguments: str, dies: str = "") -> subprocess.CompletedProcess[str]:
    """Run `penstock` in a session of its own, of which nothing is left afterwards."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    source = str(Path(__file__).parent.parent / "src")
    outputs = directory / "stdout", directory / "stderr"
    # Into files: Java outlives its driver by a moment, and would keep pipes open.
    with outputs[0].open("w") as stdout, outputs[1].open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=directory,
            env={**inherited, "PYTHONPATH": source, "DIES": dies, "JDK_JAVA_OPTIONS": QUICK_JAVA},
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    texts = [path.read_text() for path in outputs]
    return subprocess.CompletedProcess(arguments, process.returncode, *texts)


@pytest.mark.timeout(4 * PATIENCE_SECONDS)
def test_a_command_that_is_killed_before_and_after_it_puts_a_version_folds_every_event_once(root: Path) -> None:
    directory = root.parent
    (directory / "shop.py").write_text(dedent(SHOP))
    fill = (
        "import asyncio, shop\nasync def main():\n    await shop.bus.open()\n"
        "    await shop.bus.publish_batch(shop.sold, [shop.Sold(f'c{n % 5}', n) for n in range(100)])\n"
        "    await shop.bus.close()\nasyncio.run(main())\n"
    )
    source = str(Path(__file__).parent.parent / "src")
    subprocess.run(
        [sys.executable, "-c", fill], cwd=directory, env={**os.environ, "PYTHONPATH": source}, check=True, timeout=60
    )
    project = (
        "pipeline",
        "project",
        "shop:bus",
        "--into",
        "tables",
        "--master",
        "local[2]",
        "--buckets",
        "2",
        "--json",
    )
    assert command(directory, *project, dies="before").returncode == -signal.SIGKILL
    written = {path.name for path in (directory / "tables" / "turnover" / "data").iterdir()}
    assert written  # by tasks, and nobody's
    assert not (directory / "tables" / "turnover" / "versions").exists()
    assert command(directory, *project, dies="after").returncode == -signal.SIGKILL
    assert not (directory / "tables" / "turnover" / "latest").exists()
    done = command(directory, *project)
    assert done.returncode == 0, done.stderr
    (summary,) = msgspec.json.decode(done.stdout)
    assert (summary["events"], summary["keys"], summary["behind"]) == (0, 5, 0)  # the second one had done it
    shows = command(directory, "projection", "show", "turnover", "--key", "c3", "--from", "tables", "--json")
    state = msgspec.json.decode(shows.stdout)["state"]
    assert state == {"cents": sum(range(3, 100, 5)), "orders": 20}
    assert len(list((directory / "tables" / "turnover" / "latest").iterdir())) == 2


def test_a_command_that_cannot_be_meant_is_refused_before_spark_starts(root: Path) -> None:
    directory = root.parent
    (directory / "shop.py").write_text(dedent(SHOP))
    done = command(directory, "pipeline", "project", "shop:bus", "turnovers", "--into", "tables")
    assert (done.returncode, "did you mean 'turnover'" in done.stderr) == (2, True), done.stderr
    assert "Spark starts" not in done.stderr
    done = command(directory, "projection", "ls", "--from", ".")
    assert (done.returncode, "no table of a projection" in done.stderr) == (2, True)


def test_a_run_is_told_how_far_it_is_and_ends_between_steps(spark: SparkSession, root: Path, tmp_path: Path) -> None:
    from penstock.spark.pipelines.rounds import Ending

    url, ending = f"file:{root}", Ending()
    publish(url, some_events(90))
    told: list[tuple[int, int]] = []

    def tell(events: int, total: int) -> None:
        told.append((events, total))
        ending.ask()

    done = folded(spark, url, tmp_path, step_rows=30, told=tell, ending=ending)
    assert told == [(30, 90)]
    assert (done.events, done.behind) == (30, 60)


def test_the_bench_reports_what_it_promises(spark: SparkSession, root: Path) -> None:
    from penstock.cli.bench.pipelines.project import figures
    from penstock.cli.bench.pipelines.sizes import Sizes

    sizes = Sizes(warm_ups=0, project_rows=1_000, project_keys=50, project_partitions=2, project_batch=200)
    found = {figure.name: figure for figure in figures(spark, root, sizes, 1)}
    assert {name: figure.goal for name, figure in found.items()} == {
        "project": "value >= 200000 rows/s",
        "project.share": "ratio >= 0.4",
    }
    assert found["project.share"].ceiling is not None


def test_a_history_that_begins_in_an_archive_is_divided_into_steps_like_any_other() -> None:
    from penstock.offsets import Range
    from penstock.spark import positions as at
    from penstock.spark.pipelines.project import _Pipeline
    from penstock.spark.pipelines.tables import Table

    bus = Bus("memory:", topics=[sales])
    nothing: Any = None
    options = {"archive": "file:./lake"}
    pipeline = _Pipeline(nothing, bus, accounts_of(bus), Table(Path()), buckets=1, step_rows=30, options=options)
    seen = {"sales": at.Seen("log", (Range(100, 100), Range(100, 100), Range(100, 100)))}  # all of it was trimmed
    start = pipeline._start(None, seen)
    assert start["sales"].offsets == (0, 0, 0)
    assert pipeline._end(nothing, start, seen)["sales"].offsets == (10, 10, 10)
