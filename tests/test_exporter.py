"""What Prometheus reads is what the bus tells, and nobody else reads it by accident."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock import Bus, Topic
from penstock.bus import measuring
from penstock.cli import main
from penstock.errors import MetricsUnavailable, UsageError
from penstock.exporter import REQUESTS_MAX, PrometheusCollector, serve_metrics, to_text
from penstock.metrics import BOUNDS, CATALOGUE, PREFIX, Buckets, Metric, Reading, gathered

orders = Topic("orders", bytes, partitions=2)


class Fixed:
    """A source that always tells the same."""

    def __init__(self, *readings: Reading) -> None:
        self._readings = readings

    def latest_metrics(self) -> list[Metric]:
        return gathered(self._readings)


def one_of_each() -> Fixed:
    """Return a source that tells something of every metric."""
    buckets = Buckets(tuple(range(1, len(BOUNDS) + 2)), 7.5)
    return Fixed(
        *(
            Reading(
                family.name, buckets if family.kind == "histogram" else 3, tuple(f"a {name}" for name in family.labels)
            )
            for family in CATALOGUE
        )
    )


def get(url: str, **headers: str) -> tuple[int, str, str]:
    """Return status, content type and text of a page."""
    try:
        with urlopen(Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


async def used() -> Bus:
    """Return an open bus that has published and delivered."""
    bus = Bus("memory:", topics=[orders])
    await bus.publish_batch(orders, [b"x"] * 20, keys=[str(number) for number in range(20)])
    async with bus.consume(orders, "billing") as consumer:
        left = 20
        async for batch in consumer.batches():
            await batch.ack()
            left -= len(batch)
            if not left:
                break
        await consumer.flush()
    return bus


# --- the text ---------------------------------------------------------------------------------


def test_every_metric_is_exported_and_parses_as_what_it_is() -> None:
    families = {
        family.name: family for family in text_string_to_metric_families(to_text(one_of_each().latest_metrics()))
    }
    assert set(families) == {(PREFIX + each.name).removesuffix("_total") for each in CATALOGUE}
    for each in CATALOGUE:
        family = families[(PREFIX + each.name).removesuffix("_total")]
        assert (family.type, family.documentation) == (each.kind, each.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(each.labels)
            assert all(value == f"a {name}" for name, value in sample.labels.items() if name != "le")


def test_a_histogram_has_cumulative_buckets_and_a_count_and_a_sum_where_there_is_one() -> None:
    counts = tuple(range(1, len(BOUNDS) + 2))
    source = Fixed(
        Reading("fsync_duration_seconds", Buckets(counts, 1.5)),
        Reading("publish_to_ack_seconds", Buckets(counts, None), ("orders", "billing")),
    )
    text = to_text(source.latest_metrics())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    syncs = families["penstock_fsync_duration_seconds"].samples
    assert [sample.value for sample in syncs if sample.name.endswith("_bucket")] == list(counts)
    assert [float(sample.labels["le"]) for sample in syncs if sample.name.endswith("_bucket")] == [
        *BOUNDS,
        float("inf"),
    ]
    assert {sample.name: sample.value for sample in syncs if "le" not in sample.labels} == {
        "penstock_fsync_duration_seconds_count": counts[-1],
        "penstock_fsync_duration_seconds_sum": 1.5,
    }
    # By OpenMetrics a count goes with a sum; the last bucket is the same.
    assert "penstock_publish_to_ack_seconds_bucket" in text
    assert "penstock_publish_to_ack_seconds_count" not in text
    assert "penstock_publish_to_ack_seconds_sum" not in text


async def test_what_a_bus_tells_parses_and_says_the_same() -> None:
    bus = await used()
    told = await bus.metrics()
    parsed = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(to_text(told))
        for sample in family.samples
    }
    plain = {
        (metric.name, *sorted(zip(metric.labels, sample.labels, strict=True))): sample.value
        for metric in told
        for sample in metric.samples
        if not isinstance(sample.value, Buckets)
    }
    assert plain
    assert plain.items() <= parsed.items()
    assert plain["penstock_messages_published_total", ("topic", "orders")] == 20
    await bus.close()


async def test_a_registry_takes_the_collector_before_the_bus_is_open_and_after_it_is_closed() -> None:
    bus = Bus("memory:", topics=[orders])
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(bus))
    assert b"penstock_store_up" not in generate_latest(registry)
    async with bus:
        text = await asyncio.to_thread(generate_latest, registry)
        assert b"penstock_store_up 1.0" in text
    assert b"penstock_build_info" in generate_latest(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(PrometheusCollector(Bus("memory:")))


# --- serving ----------------------------------------------------------------------------------


async def test_metrics_are_served_on_this_machine() -> None:
    bus = await used()
    with serve_metrics(bus, port=0) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        status, kind, text = await asyncio.to_thread(get, server.url)
        assert (status, kind.split(";")[0]) == (200, "text/plain")
        assert 'penstock_messages_published_total{topic="orders"} 20.0' in text
        _, kind, text = await asyncio.to_thread(get, server.url, Accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        parse: Any = openmetrics.text_string_to_metric_families
        assert {family.name for family in parse(text)} > {"penstock_deliveries"}
    await bus.close()
    with pytest.raises(OSError, match=r"refused|reset"):
        urlopen(server.url, timeout=5)  # noqa: ASYNC210 - nobody answers


def test_any_other_page_is_not_found_and_nothing_can_be_changed() -> None:
    with serve_metrics(one_of_each(), port=0) as server:
        root = server.url.removesuffix("/metrics")
        assert get(f"{root}/")[0] == 200
        assert get(f"{root}/etc/passwd")[0] == 404
        with pytest.raises(HTTPError, match="405") as refused:
            urlopen(Request(server.url, data=b"x"), timeout=20)
        refused.value.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", "localhost.example.org", ""])
def test_an_address_that_others_reach_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match=r"without TLS and authentication.*insecure=True"):
        serve_metrics(one_of_each(), host=host, port=0)


def test_an_address_that_others_reach_is_served_if_somebody_insists() -> None:
    with serve_metrics(one_of_each(), host="0.0.0.0", port=0, insecure=True) as server:
        assert get(f"http://127.0.0.1:{server.port}/metrics")[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost"])
def test_every_name_of_this_machine_is_served(host: str) -> None:
    with serve_metrics(one_of_each(), host=host, port=0) as server:
        assert get(server.url)[0] == 200


def test_a_port_that_is_taken_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MetricsUnavailable, match=f"port {port}: .*in use"):
            serve_metrics(one_of_each(), port=port)
    with pytest.raises(UsageError, match="a port is 0 to 65535"):
        serve_metrics(one_of_each(), port=65_536)


def test_no_more_than_so_many_are_answered_at_a_time() -> None:
    too_many = threading.Barrier(REQUESTS_MAX + 1)
    met: list[bool] = []

    class Slow(Fixed):
        def latest_metrics(self) -> list[Metric]:
            try:
                too_many.wait(1.0)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)  # one was missing, as it waits for its turn
            return super().latest_metrics()

    with serve_metrics(Slow(Reading("store_up", 1)), port=0) as server:
        clients = [threading.Thread(target=get, args=(server.url,)) for _ in range(REQUESTS_MAX + 1)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    assert met == [False] * (REQUESTS_MAX + 1)


def test_a_client_that_says_nothing_holds_up_nobody() -> None:
    with serve_metrics(one_of_each(), port=0) as server, socket.create_connection(("127.0.0.1", server.port)):
        assert get(server.url)[0] == 200


async def test_a_scrape_fails_while_the_event_loop_is_blocked_and_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measuring, "ANSWER_SECONDS", 0.2)
    async with Bus("memory:", topics=[orders]) as bus:
        await bus.metrics()
        with serve_metrics(bus, port=0) as server:
            answers: list[tuple[int, str, str]] = []
            thread = threading.Thread(target=lambda: answers.append(get(server.url)))
            thread.start()
            thread.join()  # which is what blocks it
            [(status, _, text)] = answers
            assert status == 503
            assert "cannot be read now" in text
            assert "the event loop of the bus did not answer within 0.2 s" in caplog.text
            assert (await asyncio.to_thread(get, server.url))[0] == 200


# --- without the extra ------------------------------------------------------------------------


def test_without_the_extra_an_error_names_it() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
from penstock import Bus
from penstock.errors import MetricsUnavailable
from penstock.exporter import PrometheusCollector, serve_metrics, to_text
for call in (PrometheusCollector, serve_metrics, lambda bus: to_text([])):
    try:
        call(Bus("memory:"))
    except MetricsUnavailable as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == ["prometheus-client is not installed: pip install 'penstock[metrics]'"] * 3


# --- the command ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def store(capsys: pytest.CaptureFixture[str]) -> None:
    """A store with a topic of three events, and a subscription that nobody runs."""
    assert main(["publish", "orders", "--create", "a", "b", "c"]) == 0
    assert main(["subscriptions", "create", "orders", "billing"]) == 0
    capsys.readouterr()


@pytest.mark.usefixtures("store")
def test_the_command_prints_what_the_store_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--once"]) == 0
    printed = capsys.readouterr()
    lag = 'penstock_subscription_lag_messages{partition="0",subscription="billing",topic="orders"} 3.0'
    assert lag in printed.out.splitlines()
    assert "penstock_disk_free_bytes" in printed.out
    assert printed.err == ""
    assert list(text_string_to_metric_families(printed.out))


@pytest.mark.usefixtures("store")
def test_the_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--once", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["metrics"]}
    assert found["penstock_subscription_lag_messages"]["samples"] == [
        {"labels": {"topic": "orders", "subscription": "billing", "partition": "0"}, "value": 3}
    ]
    assert found["penstock_fsync_duration_seconds"]["samples"][0]["value"]["bounds"] == list(BOUNDS)


@pytest.mark.usefixtures("store")
def test_looking_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", "orders", "later", "--delay", "1"]) == 0
    assert main(["metrics", "--once"]) == 0
    assert main(["schedule", "ls", "--json"]) == 0
    capsys.readouterr()
    assert main(["metrics", "--once", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["metrics"]}
    assert found["penstock_log_end_offset"]["samples"][0]["value"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--once"], 1, "there is no store in penstock-data"),
        (["--json"], 2, "--json goes with --once"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["metrics", *arguments]) == code
    printed = capsys.readouterr()
    assert (printed.out, said in printed.err) == ("", True)


@pytest.mark.usefixtures("store")
def test_the_command_refuses_an_address_that_others_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--insecure" in capsys.readouterr().err


@pytest.mark.usefixtures("store")
def test_a_store_that_cannot_be_looked_at_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.stores.file.log import FileLog

    def broken(_log: FileLog) -> Any:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(FileLog, "topics", broken)
    assert main(["metrics", "--once"]) == 1
    printed = capsys.readouterr()
    assert "penstock_store_up 0.0" in printed.out
    assert "the store cannot be looked at" in printed.err


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_serves_until_it_is_told_to_end(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "penstock", "metrics", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as served:
        assert served.stderr is not None
        assert served.stdout is not None
        try:
            said = served.stderr.readline()
            url = said.removeprefix("serving ").split(";")[0]
            assert 'penstock_dead_letters{subscription="billing",topic="orders"} 0.0' in get(url)[2]
            served.send_signal(number)
            assert served.wait(timeout=30) == code
            assert served.stdout.read() == ""
        finally:
            served.kill()
