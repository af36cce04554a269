"""Alerts fire for the faults that they are for, and for nothing else; dashboard and runbooks fit what is exported.

The fault runs let a real bus meet a fault on a virtual clock, take its metrics once a minute, as Prometheus would, and
give those very series to `promtool`, which says which alerts fire.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families
from tests.deliveries import World, acked, kept, raw
from tests.test_delivery_notifications import leaving_out
from typer.main import get_command

from penstock import Bus
from penstock.cli.app import app
from penstock.errors import PublishUnknown
from penstock.exporter import to_text
from penstock.metrics import CATALOGUE, PREFIX
from penstock.offsets import Range
from penstock.outbox import SqliteOutbox

if TYPE_CHECKING:
    from tests.deliveries import Running

    from penstock.bus.delivered import Delivery

ROOT = Path(__file__).parent.parent
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules.yml"
GRAFANA = ROOT / "deploy" / "grafana"
RUNBOOKS = ROOT / "docs" / "guide" / "runbooks"
SUFFIXES = {"counter": [""], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
WITHOUT_SUM = {"penstock_publish_to_ack_seconds_count", "penstock_publish_to_ack_seconds_sum"}
EXPORTED = {PREFIX + family.name + suffix for family in CATALOGUE for suffix in SUFFIXES[family.kind]} - WITHOUT_SUM
NAME = re.compile(r"(?<![:\w])penstock_[a-z_]+")
MINUTE = 60.0
IN_MEMORY = pytest.mark.parametrize("world", ["memory"], indirect=True)
"""What is exported of both stores is tested elsewhere; the alerts are the same."""


def promtool(*arguments: str | Path, cwd: Path = PROMETHEUS) -> str:
    """Run promtool, and return what it says; a test without it is skipped by name."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool: it is in the package `prometheus`")
    done = subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]
    return found


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((GRAFANA / "penstock.json").read_text())
    return board


def panel_queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


# --- the rules --------------------------------------------------------------------------------


def test_the_rules_and_the_example_are_valid() -> None:
    promtool("check", "rules", "rules.yml")
    promtool("check", "config", "prometheus.yml")


def test_the_unit_tests_of_the_rules_pass() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")


def test_every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = [case for test in yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text())["tests"]
             for case in test.get("alert_rule_test", ())]  # fmt: skip
    for name in alerts():
        fires = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == name}
        assert fires == {True, False}, name


def test_every_rule_asks_for_what_is_exported_or_recorded_before_it_in_its_group() -> None:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        recorded: set[str] = set()
        for rule in group["rules"]:
            named, derived = set(NAME.findall(rule["expr"])), set(re.findall(r"\w+:\w+:\w+", rule["expr"]))
            assert named or derived
            assert named <= EXPORTED, rule
            # Groups are evaluated in any order: one would now and then see what the other has said a minute ago.
            assert derived <= recorded, rule
            recorded.add(rule.get("record", ""))


def test_every_alert_says_what_where_how_bad_and_what_to_do() -> None:
    assert len(alerts()) >= 9
    for name, rule in alerts().items():
        assert name.startswith("Penstock")
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
        page = ROOT / rule["annotations"]["runbook_url"]
        assert page.parent == RUNBOOKS
        assert page.stem == re.sub(r"(?<!^)([A-Z])", r"-\1", name.removeprefix("Penstock")).lower()


# --- the runbooks -----------------------------------------------------------------------------


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    pages = {path.name: path.read_text() for path in RUNBOOKS.glob("*.md") if path.name != "index.md"}
    assert set(pages) == {Path(rule["annotations"]["runbook_url"]).name for rule in alerts().values()}
    guide = (ROOT / "docs" / "guide" / "metrics.md").read_text()
    for name, rule in alerts().items():
        page = pages[Path(rule["annotations"]["runbook_url"]).name]
        assert page.startswith(f"# {name}\n")
        headings = re.findall(r"^## (.*)$", page, re.MULTILINE)
        assert headings == ["What it means", "Look", "Mend", "When it is harmless"]
        assert f"Severity: {rule['labels']['severity']}." in page
        assert f"[{name}](runbooks/{Path(rule['annotations']['runbook_url']).name})" in guide


def test_every_command_of_a_runbook_exists_with_its_options() -> None:
    found = 0
    for path in RUNBOOKS.glob("*.md"):
        for line in re.findall(r"(?:^\$ |`)(penstock [a-z][^`\n]*)", path.read_text(), re.MULTILINE):
            command: Any = get_command(app)
            words = shlex.split(line)[1:]
            while words and hasattr(command, "commands"):
                assert words[0] in command.commands, f"{path.name}: {line}"
                command = command.commands[words.pop(0)]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, f"{path.name}: {line}"
            found += 1
    assert found > 20


def test_every_metric_that_the_documents_name_is_exported() -> None:
    for path in [
        *RUNBOOKS.glob("*.md"),
        ROOT / "docs" / "guide" / "rollout.md",
        ROOT / "docs" / "guide" / "metrics.md",
    ]:
        whole = {PREFIX + family.name for family in CATALOGUE}
        assert set(NAME.findall(path.read_text())) <= EXPORTED | whole, path.name


# --- the dashboard ----------------------------------------------------------------------------


def test_the_dashboard_asks_for_what_is_exported_and_shows_all_of_it() -> None:
    named = {name for query in panel_queries() for name in NAME.findall(query)}
    assert named <= EXPORTED
    shown = {
        name
        for family in CATALOGUE
        for name in [PREFIX + family.name]
        if any(name in query for query in panel_queries())
    }
    told_otherwise = {
        "penstock_subscription_last_dispatched_offset"
    }  # a number that means something beside the log alone
    assert {PREFIX + family.name for family in CATALOGUE} - shown == told_otherwise


def test_the_dashboard_is_provisioned_with_a_fixed_uid_and_any_data_source() -> None:
    board = dashboard()
    assert board["uid"] == "penstock"
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in board["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    rows = [panel["title"] for panel in board["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Lag and age", "Deliveries by outcome", "Latency", "Dead letters", "Notifier health",
                    "Store and syncs", "Outbox"]  # fmt: skip
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for path in (GRAFANA / "provisioning").rglob("*.yml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


def test_panels_do_not_cover_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_query_of_the_dashboard_can_be_asked(tmp_path: Path) -> None:
    asked = [query.replace("$__rate_interval", "1m") for query in panel_queries()]
    asked += [dashboard()["annotations"]["list"][0]["expr"]]
    group = {
        "name": "panels",
        "rules": [{"record": f"panel:{number}", "expr": expr} for number, expr in enumerate(asked)],
    }
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [group]}))
    assert f"{len(asked)} rules found" in promtool("check", "rules", "panels.yml", cwd=tmp_path)


# --- fault runs -------------------------------------------------------------------------------


class Prometheus:
    """What takes the metrics of a bus once a minute, and is asked for alerts at the end."""

    def __init__(self, world: World, directory: Path) -> None:
        self._world = world
        self._directory = directory
        self._begun = world.clock.time_us() / 1_000_000
        self._series: dict[str, list[str]] = {}
        self.minutes = 0
        self._wanted = {name for rule in rules() for name in NAME.findall(rule["expr"])}

    async def scrape(self, bus: Bus) -> None:
        """Take what the bus exports now; a minute passes before the next time."""
        text = to_text(await bus.metrics())
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in self._wanted:
                    # The first minute is 0 to promtool.
                    value = sample.value - self._begun * sample.name.endswith("_timestamp_seconds")
                    labels = {**sample.labels, "job": "shop", "instance": "a"}
                    shown = ", ".join(f"{name}={json.dumps(text)}" for name, text in sorted(labels.items()))
                    values = self._series.setdefault(f"{sample.name}{{{shown}}}", [])
                    values += ["_"] * (self.minutes - len(values))
                    values.append(repr(value))
        self.minutes += 1

    async def watch(self, bus: Bus, minutes: int) -> None:
        """Let minutes pass, and look at the end of each."""
        for _ in range(minutes):
            await self._world.run(MINUTE)
            await self.scrape(bus)

    def check(self, firing: dict[int, set[str]]) -> None:
        """Check that at these minutes exactly these alerts fire."""
        tests = [
            {
                "eval_time": f"{minute}m",
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
            }
            for minute, names in firing.items()
        ]
        assert max(firing) < self.minutes
        series = [
            {"series": name, "values": " ".join(values + ["_"] * (self.minutes - len(values)))}
            for name, values in self._series.items()
        ]
        document = {
            "rule_files": [str(RULES)],
            "evaluation_interval": "1m",
            "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}],
        }
        path = self._directory / "run.yml"
        path.write_text(json.dumps(document))
        promtool("test", "rules", path.name, cwd=self._directory)


@pytest.fixture
def prometheus(world: World, tmp_path: Path) -> Prometheus:
    return Prometheus(world, tmp_path)


async def consumed(world: World, running: Running, *payloads: bytes) -> None:
    """Publish, and let it be consumed."""
    bus = world._buses[0]
    wanted = len(running.taken) + len(payloads)
    await world.publish(bus, *payloads)
    await world.until(lambda: len(running.taken) == wanted)


async def test_nothing_fires_while_all_is_well(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    failed: set[int] = set()

    async def handle(delivery: Delivery[Any]) -> None:
        if delivery.event.offset % 7 == 0 and delivery.event.offset not in failed:
            failed.add(delivery.event.offset)
            await delivery.nack(delay=8)  # such things happen, and are no fault
        else:
            await delivery.ack()

    for _ in range(3):  # consumers come and go
        async with world.running(bus.consume(raw, "s"), handle) as running:
            for minute in range(8):
                await world.publish(bus, *[b"x"] * 10)
                await bus.publish(raw, b"late", ttl=1 + minute)
                await prometheus.watch(bus, 1)
        assert len(running.taken) > 80
    await prometheus.watch(bus, 6)  # and everybody may sleep
    prometheus.check({minute: set() for minute in range(30)})


async def test_a_consumer_that_is_too_slow_is_told_and_nothing_else(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive", rate=0.5)):
        await prometheus.watch(bus, 1)
        await bus.publish_batch(raw, [b"x"] * 1_300)
        await prometheus.watch(bus, 14)
    prometheus.check({0: set(), 4: set(), 7: {"PenstockLagHigh"}, 14: set()})


@IN_MEMORY
async def test_a_backlog_that_nobody_works_on_is_told_and_later_that_it_is_old(
    world: World, prometheus: Prometheus
) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await consumed(world, running, b"0")
        await prometheus.watch(bus, 2)
    await world.publish(bus, b"1", b"2", b"3")
    await prometheus.watch(bus, 25)
    no_progress, old = "PenstockBacklogWithoutProgress", "PenstockStuckMessages"
    prometheus.check({1: set(), 8: set(), 14: {no_progress}, 26: {no_progress, old}})


@IN_MEMORY
async def test_one_event_that_is_stuck_is_told_though_all_others_go_on(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()

    async def handle(delivery: Delivery[Any]) -> None:
        await (kept if delivery.event.key == b"stuck" else acked)(delivery)

    async with world.running(bus.consume(raw, "s", mode="exclusive"), handle) as running:
        await bus.publish(raw, b"x", key="stuck")
        for _ in range(26):
            await bus.publish(raw, b"x", key="other")
            await prometheus.watch(bus, 1)
        assert len(running.taken) == 27
    prometheus.check({10: set(), 25: {"PenstockStuckMessages"}})


async def test_a_gap_is_told(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await prometheus.watch(bus, 2)
        world.store.hooks["log.read"] = leaving_out(Range(2, 5), times=None)
        await bus.publish_batch(raw, [b"x"] * 8)
        await prometheus.watch(bus, 20)
        assert running.offsets == [0, 1, 5, 6, 7]
    prometheus.check({1: set(), 3: {"PenstockOffsetGaps"}, 10: {"PenstockOffsetGaps"}, 21: set()})


@IN_MEMORY
async def test_a_notifier_that_dies_is_told(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await consumed(world, running, b"0")
        await prometheus.watch(bus, 2)
        notifier = world.dispatcher(bus).monitor._notifier
        assert notifier is not None
        notifier.cancel()
        await prometheus.watch(bus, 20)
        await consumed(world, running, b"1")
    prometheus.check({1: set(), 3: {"PenstockNotifierDied"}, 21: set()})


@IN_MEMORY
async def test_notifications_that_get_lost_are_told(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        for minute in range(24):
            world.store.hears = lambda lost=6 <= minute < 18: not lost  # type: ignore[misc]
            for _ in range(3):
                await world.publish(bus, b"x")
                await world.run(5.0)
            await prometheus.watch(bus, 1)
        assert len(running.taken) == 72
    prometheus.check({5: set(), 9: set(), 16: {"PenstockNotifierFailing"}, 23: set()})


@IN_MEMORY
async def test_dead_letters_are_told(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()

    async def handle(delivery: Delivery[Any]) -> None:
        await delivery.reject("never")

    async with world.running(bus.consume(raw, "s", mode="exclusive"), handle) as running:
        await consumed(world, running, *[b"x"] * 10)
        await prometheus.watch(bus, 8)
        await consumed(world, running, b"x")
        await prometheus.watch(bus, 8)
    prometheus.check({7: set(), 11: set(), 15: {"PenstockDeadLetters"}})


@IN_MEMORY
@pytest.mark.parametrize(
    ("waiting", "expected"), [(3, {"PenstockOutboxStuck"}), (1_100, {"PenstockOutboxLag", "PenstockOutboxStuck"})]
)
async def test_an_outbox_that_nobody_empties_is_told(
    world: World, prometheus: Prometheus, tmp_path: Path, waiting: int, expected: set[str]
) -> None:
    path = tmp_path / "app.db"
    with closing(SqliteOutbox(path)) as outbox:
        lease = world.store.leases.acquire(f"outbox:{outbox.producer.hex()}", "one that hangs", 86_400.0)
    async with Bus("memory:", topics=[raw], store=world.store, clock=world.clock, outbox=path) as bus:
        await prometheus.watch(bus, 2)
        with closing(sqlite3.connect(path)) as connection, connection:
            for _ in range(waiting):
                bus.stage(connection, raw, b"x")
        await prometheus.watch(bus, 20)
    assert lease is not None
    prometheus.check({1: set(), 5: set(), 20: expected})


@pytest.mark.parametrize("world", ["file"], indirect=True)
async def test_a_disk_that_is_nearly_full_is_told(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    await prometheus.watch(bus, 2)
    disk: Any = world.store.whole._platform.disk  # type: ignore[attr-defined]
    disk.free = lambda _descriptor: (9 << 30, 100 << 30)
    await prometheus.watch(bus, 8)
    prometheus.check({1: set(), 5: set(), 9: {"PenstockDiskNearlyFull"}})


@IN_MEMORY
async def test_a_store_that_cannot_be_looked_at_is_told(world: World, prometheus: Prometheus) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await consumed(world, running, b"0")
        await prometheus.watch(bus, 2)
        world.store.fail("log.topics", OSError(5, "input/output error"))
        await prometheus.watch(bus, 6)
        world.store.heal()
        await prometheus.watch(bus, 2)
    prometheus.check({1: set(), 3: set(), 6: {"PenstockStoreDown"}, 9: set()})


@pytest.mark.parametrize("world", ["file"], indirect=True)
async def test_a_partition_whose_sync_failed_is_told_until_the_next_writer_heals_it(
    world: World, prometheus: Prometheus
) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    await prometheus.watch(bus, 2)
    disk: Any = world.store.whole._platform.disk  # type: ignore[attr-defined]

    def failing(_descriptor: int) -> None:
        del disk.sync
        raise OSError(5, "input/output error")

    disk.sync = failing
    with pytest.raises(PublishUnknown):
        await bus.publish(raw, b"1")
    await prometheus.watch(bus, 5)
    await world.publish(bus, b"2")
    await prometheus.watch(bus, 2)
    prometheus.check({1: set(), 3: set(), 6: {"PenstockStoreDamaged"}, 8: set()})
