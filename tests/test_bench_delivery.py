"""The promises of `penstock bench delivery`: all its figures, in the form, and nothing lost while it measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.test_bench import check_form

from penstock.cli import main
from penstock.cli.bench import delivery, harness
from penstock.cli.bench.delivery import latency
from penstock.cli.bench.delivery.consumers import consumers, take_all
from penstock.cli.bench.delivery.sizes import Sizes
from penstock.cli.bench.harness import Figure
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.engine.policy import HEARTBEATS
from penstock.errors import PenstockError
from penstock.runtime.ledger import TOPIC as LEDGER

FIGURES = {
    "consume.batches": "ratio >= 0.4",
    "cursor.full_span": "value <= 5 ms",
    "latency.notified.p50": "value <= 6 syncs",
    "latency.notified.p99": "value <= 20 syncs",
    "latency.fallback": "value <= 1 %",
    "latency.dropped.p99": "value <= 150 ms",
    "monitor.start": "value <= 10 s",
    "monitor.memory": "value <= 20 kB",
    "monitor.idle": "value <= 1 %",
    "monitor.pass": "value <= 200 µs",
    "catch_up": "ratio >= 0.9",
    "catch_up.memory": "value <= 300 MB",
    "ledger.cost": "value <= 5 %",
}
TINY = Sizes(
    batch_events=50,
    read_batches=4,
    behind_batches=20,
    behind_rounds=1,
    span_events=1_000,
    span_commits=3,
    subscriptions=12,
    topics=3,
    passes=3,
    idle_seconds=0.2,
    tasks=4,
    events_per_second=200,
    load_seconds=0.2,
    load_rounds=1,
    bare_syncs=3,
    dropped_per_second=100,
    dropped_seconds=0.3,
)


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The area in a directory of its own, quickly."""
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(delivery, "SIZES", TINY)


def test_the_delivery_area_reports_all_its_figures_in_the_form_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "delivery", "--json", "--rounds", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    check_form(document, "delivery")
    assert {figure["name"]: figure["goal"] for figure in document["figures"]} == FIGURES
    with_ceiling = {figure["name"] for figure in document["figures"] if figure["ceiling"] is not None}
    assert with_ceiling == {"consume.batches", "catch_up"}
    assert list(tmp_path.iterdir()) == []


def test_the_delivery_area_removes_its_files_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
        assert directory.parent == tmp_path
        (directory / "file").touch()
        raise RuntimeError("stop")

    monkeypatch.setattr(delivery, "_PARTS", [type("Part", (), {"figures": staticmethod(fail)})])
    with pytest.raises(RuntimeError, match="stop"):
        list(delivery.figures(1))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_memory_is_measured_and_the_reader_is_warned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(delivery, "_PARTS", [])
    monkeypatch.setattr(delivery, "describe", lambda path: type("Info", (), {"persistent": False}))
    assert list(delivery.figures(1)) == []
    assert "a sync costs nothing" in capsys.readouterr().err


@pytest.mark.parametrize("ledger", [True, False])
def test_with_and_without_a_ledger_progress_is_the_same_and_only_the_records_are_not(
    tmp_path: Path, ledger: bool
) -> None:
    with a_store(tmp_path / "store") as store:
        (partition,) = a_topic(store).partitions
        Appender(store, keyed_batch(30)).append(partition)

        async def consume() -> None:
            async with consumers(store, ledger=ledger) as made, made.consumer("s") as consumer:
                await take_all(consumer, 30)

        asyncio.run(consume())
        [cursor] = store.cursors.load(partition.log_id, "s")
        assert cursor.next_offset == 30
        recorded = bool(store.cursors.settlements(1)) or any(topic.name == LEDGER for topic in store.log.topics())
        assert recorded is ledger


def test_events_that_do_not_come_are_an_error_and_not_a_low_latency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "PATIENCE_SECONDS", 0.2)
    # Neither notifications nor, for an hour, a heartbeat.
    monkeypatch.setitem(HEARTBEATS, "debug", 3600.0)
    monkeypatch.setattr("penstock.runtime.monitor.IDLE_SECONDS", 3600.0)
    with a_store(tmp_path / "store") as store:
        deaf = latency.without_notifications(store)
        with pytest.raises(PenstockError, match="10 of 10 events did not come"):
            asyncio.run(latency.under_load(deaf, tasks=2, per_second=200, seconds=0.05, heartbeat="debug"))


def test_a_log_that_has_more_events_than_it_should_is_an_error(tmp_path: Path) -> None:
    with a_store(tmp_path / "store") as store:
        (partition,) = a_topic(store).partitions
        Appender(store, keyed_batch(30)).append(partition)

        async def consume() -> None:
            async with consumers(store) as made, made.consumer("s") as consumer:
                await take_all(consumer, 20)

        with pytest.raises(PenstockError, match="10 events more came than there are"):
            asyncio.run(consume())
