"""Audits of real stores with real Spark: after a kill, while consumers run, and with faults planted in the ledger."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.delivery_children import NAME, Consuming, settings_of, topic
from tests.spark_topics import fill, info_of, plain

from penstock import Bus
from penstock.batch import Batch
from penstock.cli.app import run
from penstock.cli.bench.pipelines import audit as bench
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.cli.pipelines import audit as command
from penstock.cli.pipelines.running import Running
from penstock.errors import UsageError
from penstock.offsets import RangeSet
from penstock.rows import Cursor, Settlement, Shard, Subscription
from penstock.runtime.ledger import SETTINGS, TOPIC, Record, _append, decode_record, producer_of
from penstock.spark import audit
from penstock.spark.pipelines.rounds import Ending
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from penstock.audit.results import Audit
    from penstock.cli.session import Session

pytestmark = pytest.mark.spark

EVENTS = 60
encode = msgspec.msgpack.Encoder().encode


def rewrite(root: Path, change: Callable[[list[Record]], list[Record]]) -> None:
    """Write the ledger anew, changed: a new log under its name, and nothing that waits to be moved."""
    with closing(open_store(f"file:{root}")) as store:
        old = info_of(store, TOPIC)
        found: list[Record] = []
        bounds = store.log.bounds(old.partitions[0])
        at = bounds.start
        while at < bounds.stop:
            for item in store.log.read(old.partitions[0], at, bytes_max=1 << 20):
                assert isinstance(item, Batch)
                found += [decode_record(event.data) for event in item]
                at = item.range.stop
        unmoved = store.cursors.settlements(1_000_000)
        found += [decode_record(record) for _, record in unmoved]
        if unmoved:
            store.cursors.forget_settlements(unmoved[-1].number)
        store.log.delete_topic(old.log_id)
        new = store.log.create_topic(TOPIC, SETTINGS)
        records = [Settlement(number, encode(record)) for number, record in enumerate(change(found), 1)]
        _append(store.log, new.partitions[0], records, producer_of(new.log_id))


def chosen(records: list[Record]) -> tuple[int, Record]:
    """Return a record in the middle of the longest chain, and where it is."""
    longest = max((0, 1), key=lambda number: sum(record.partition == number for record in records))
    mine = [index for index, record in enumerate(records) if record.partition == longest]
    return mine[len(mine) // 2], records[mine[len(mine) // 2]]


def settled(record: Record) -> set[int]:
    return {offset for name in record.outcomes for span in record.offsets(name) for offset in span}


def ranges(found: Audit, kind: str) -> dict[int, set[int]]:
    [each] = found.subscriptions
    pairs = {partition.partition: getattr(partition, kind) for partition in each.partitions}
    return {number: {x for pair in mine for x in range(*pair)} for number, mine in pairs.items() if mine}


@pytest.fixture
def consuming() -> Iterator[list[Consuming]]:
    started: list[Consuming] = []
    yield started
    for each in started:
        each.dispose()


async def test_a_kill_never_looks_like_a_loss_and_what_is_planted_is_found(
    spark: SparkSession, root: Path, consuming: list[Consuming]
) -> None:
    url = f"file:{root}"
    async with Bus(settings=settings_of(root, 60.0), topics=[topic]) as bus:
        for number in range(EVENTS):
            await bus.publish(topic, b"%d" % number, key=f"k{number % 7}")
    consuming.append(Consuming(root, mode="key_shared"))
    await consuming[0].hears("settled", 15)
    consuming[0].signal(signal.SIGKILL)
    await consuming[0].killed()

    # Another one has events in hand while somebody looks.
    consuming.append(Consuming(root, mode="key_shared", hold=True))
    await consuming[1].hears("delivered")
    found = audit(spark, url)
    assert found.verdict == "proven"
    assert 15 <= found.counts.acked < EVENTS
    assert found.counts.proven + found.counts.pending + found.counts.parked == EVENTS
    consuming[1].tell("go")
    # What the first has settled and could not tell any more, nobody else is given.
    async with Bus(settings=settings_of(root, 60.0), topics=[topic]) as bus:
        while any(lag.lag for lag in await bus.lag(topic, NAME)):
            assert not consuming[1].facts("ended")
            await asyncio.sleep(0.05)
    assert await consuming[1].end() == 0

    found = audit(spark, url, topic, subscription=NAME)
    [each] = found.subscriptions
    assert (found.verdict, found.counts.acked, found.counts.duplicates) == ("proven", EVENTS, 0)
    assert sum(hour.settled["acked"] for hour in each.hours) == each.latency.events == EVENTS
    assert found.sentence == f"Nothing is lost: what became of {EVENTS} events in 1 subscription is proven."
    assert audit(spark, url, since=datetime.now(UTC)).counts.events == 0

    kept: list[Record] = []

    def dropped(records: list[Record]) -> list[Record]:
        kept.extend(records)
        index, record = chosen(records)
        without = {name: RangeSet().to_bytes() for name in record.outcomes}
        return [*records[:index], msgspec.structs.replace(record, outcomes=without), *records[index + 1 :]]

    rewrite(root, dropped)
    index, record = chosen(kept)
    found = audit(spark, url)
    assert ranges(found, "lost") == {record.partition: settled(record)}
    assert ranges(found, "unproven") == {}
    assert found.sentence == (
        f"{len(settled(record))} events are lost, in jobs/s."
        if len(settled(record)) > 1
        else "1 event is lost, in jobs/s."
    )

    rewrite(root, lambda _: [*kept[:index], *kept[index + 1 :]])
    found = audit(spark, url)
    assert found.verdict == "unproven"
    assert ranges(found, "unproven") == {record.partition: settled(record)}
    assert found.lost == 0
    [broken] = [partition for partition in found.subscriptions[0].partitions if partition.breaks]
    assert f"records {record.number} to {record.number} are missing" in broken.breaks[0]


# --- the command ----------------------------------------------------------------------------------


def a_loss(root: Path) -> None:
    """Make a store in which an event of `orders` is lost for `billing`, and one query reads from outside."""
    url = f"file:{root}"
    fill(url, "orders", plain(8), partitions=1)
    with closing(open_store(url)) as store:
        info = info_of(store, "orders")
        shard = Shard(info.log_id, "billing", 0, 0)
        store.cursors.put_subscription(
            Subscription(log_id=info.log_id, name="billing", mode="exclusive"),
            [Cursor(shard=shard, next_offset=4, number=1)],
        )
        store.cursors.put_subscription(
            Subscription(log_id=info.log_id, name="lake", mode="spark", external=True),
            [Cursor(shard=Shard(info.log_id, "lake", 0, 0), next_offset=3)],
        )
        record = Record(
            log_id=info.log_id,
            subscription="billing",
            slot=0,
            partition=0,
            generation=0,
            number=1,
            begin=0,
            next_offset=4,
            outcomes={"acked": b"\x00\x01", "dead": b"\x03\x00"},
            latencies=[0, 0, 3],
            retried=1,
            at=1_767_225_600_000_000,
        )
        ledger = store.log.create_topic(TOPIC, SETTINGS)
        # The second is no record at all; and one that ends too early.
        rows = [Settlement(1, encode(record)), Settlement(2, b"nonsense"), Settlement(3, encode(record)[:-3])]
        _append(store.log, ledger.partitions[0], rows, producer_of(ledger.log_id))


def test_the_command_prints_one_document_writes_a_page_and_exits_with_3(root: Path, tmp_path: Path) -> None:
    a_loss(root)
    page = tmp_path / "report.html"
    program = [sys.executable, "-W", "error", "-m", "penstock", "--url", f"file:{root}", "pipeline", "audit", "--json"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK_"))}
    done = subprocess.run(
        [*program, "--html", str(page), "--master", "local[1]"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=inherited,
    )
    assert done.returncode == 3, done.stderr
    document = msgspec.json.decode(done.stdout)
    assert (document["verdict"], document["records"], document["unreadable"]) == ("lost", 3, 2)
    [billing, lake] = document["subscriptions"]
    assert billing["partitions"][0]["lost"] == [[2, 3]]
    assert {name: count for name, count in billing["counts"].items() if count} == {
        "proven": 3,
        "acked": 2,
        "dead": 1,
        "pending": 4,
        "lost": 1,
        "retried": 1,
    }
    assert billing["latency"]["max_us"] == 4
    assert lake["verdict"] == "external"
    assert lake["counts"]["pending"] == 5
    assert "1 event is lost, in orders/billing." in page.read_text()
    assert list(tmp_path.iterdir()) == [page]


def test_on_the_terminal_it_is_tables_and_a_sentence(
    spark: SparkSession, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_loss(root)
    command._print(audit(spark, f"file:{root}"), as_json=False, line=False)
    shown = capsys.readouterr()
    assert "penstock read orders --partition 0 --from 2 --limit 1" in shown.out
    assert "orders/0 [2, 3)" in shown.out
    assert "≤ 4 µs" in shown.out
    assert "2 records of the ledger could not be read" in shown.err


class Twice(Ending):
    """Lets a continuous pipeline make two rounds."""

    waits = 0

    def wait(self, seconds: float) -> bool:
        assert seconds > 0
        self.waits += 1
        return self.waits == 2


def test_a_continuous_audit_prints_a_line_when_something_has_changed(
    spark: SparkSession, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_loss(root)
    ending = Twice()

    @contextmanager
    def running(session: Session, _master: str, _name: str) -> Iterator[Running]:
        yield Running(spark, session.resolve().settings, ending)

    monkeypatch.setattr(command, "running", running)
    assert run(["--url", f"file:{root}", "pipeline", "audit", "orders", "--continuous", "--json"]) == 3
    [line] = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line)["verdict"] == "lost"
    assert ending.waits == 2


def test_wrong_arguments_are_found_before_spark_starts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_loss(root)
    url = f"file:{root}"
    for arguments, said in (
        (["order"], "there is no topic 'order'; did you mean 'orders'?"),
        (["--subscription", "bill"], "no subscription is named 'bill'"),
        (["--html", "/nowhere/at/all.html"], "there is no directory /nowhere/at"),
        (["--since", "yesterday"], "is no time"),
    ):
        assert run(["--url", url, "pipeline", "audit", *arguments]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert "Spark starts" not in shown.err
    with pytest.raises(UsageError, match="no time zone"):
        audit(None, url, since=datetime(2026, 1, 1))  # type: ignore[arg-type]  # noqa: DTZ001 - that is what is wrong


# --- the bench ------------------------------------------------------------------------------------


def test_the_bench_measures_what_the_goals_are_about(spark: SparkSession, tmp_path: Path) -> None:
    sizes = Sizes(audit_records=2_000, audit_ranges=100, audit_events=100_000)
    found: list[Any] = list(bench.figures(spark, tmp_path, sizes, 1))
    assert {figure.name: figure.goal for figure in found} == {
        "audit.fragmented": "value <= 60 s",
        "audit.ranges": "value <= 15 s",
    }
