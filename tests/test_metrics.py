"""What is measured is what happened: names, counts, and what a look at the store tells."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deliveries import Hook, World, kept, raw, wide

from penstock import Bus, Retry
from penstock.bus.middleware.metrics import measured
from penstock.clock import VirtualClock
from penstock.engine.progress import Progress
from penstock.engine.states import Outcome
from penstock.errors import BusClosed, PublishUnknown, StoreError, StoreFull
from penstock.metrics import (
    BOUNDS,
    CATALOGUE,
    FAMILIES,
    LABELS,
    PREFIX,
    Buckets,
    Histogram,
    Metric,
    Reading,
    folded,
    gathered,
)
from penstock.outbox import SqliteOutbox
from penstock.runtime import gauges
from penstock.runtime.tally import OTHER_REASONS, REASONS_MAX, Tallies, Tally
from penstock.stores.memory import MemoryStore

if TYPE_CHECKING:
    from penstock.bus.delivered import Delivery

PROMISED = {
    "subscription_lag_messages", "subscription_lag_detected_total", "dispatcher_heartbeat_polls_total",
    "dispatcher_notifier_polls_total", "subscription_offset_gaps_total", "subscription_last_dispatched_offset",
    "subscription_fallback_polls_total", "subscription_creation_races_detected_total",
    "notifier_task_deaths_total", "notifier_notifications_total", "messages_delivered_total",
    "messages_expired_total", "subscription_oldest_unacked_age_seconds",
    "subscription_last_progress_timestamp_seconds", "deliveries_total", "pending_acks", "publish_to_ack_seconds",
    "dead_letters", "outbox_pending", "fsync_duration_seconds", "build_info",
}  # fmt: skip

Values = dict[tuple[str, ...], Any]


def values_of(metrics: list[Metric], name: str) -> Values:
    """Return the values of a metric by its labels; nothing if it is not told."""
    found = [metric for metric in metrics if metric.name == PREFIX + name]
    return {sample.labels: sample.value for metric in found for sample in metric.samples}


async def read(bus: Bus, name: str) -> Values:
    return values_of(await bus.metrics(), name)


async def value(bus: Bus, name: str, *labels: str) -> Any:
    return (await read(bus, name))[labels]


# --- names ------------------------------------------------------------------------------------


def test_every_name_that_was_promised_is_there() -> None:
    assert FAMILIES.keys() >= PROMISED


def test_names_and_labels_follow_the_conventions() -> None:
    assert len(FAMILIES) == len(CATALOGUE)
    for family in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        assert family.kind != "histogram" or family.name.endswith("_seconds"), "durations are in seconds"
        assert not re.search(r"_(ms|milliseconds|microseconds|us|kb|mb|percent)(_|$)", family.name)
        assert set(family.labels) <= set(LABELS)
        assert "version" not in family.labels or family.name == "build_info"
        assert family.help.endswith(".")


def test_the_guide_lists_every_metric_as_it_is() -> None:
    page = (Path(__file__).parent.parent / "docs" / "guide" / "metrics.md").read_text()
    listed = re.findall(r"^\| `penstock_([a-z_]+)` \| (\w+) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    wanted = [
        (each.name, each.kind, ", ".join(f"`{label}`" for label in each.labels) or "-", each.help) for each in CATALOGUE
    ]
    assert listed == wanted


def test_what_is_not_in_the_catalogue_cannot_be_read() -> None:
    with pytest.raises(AssertionError, match="not in the catalogue"):
        gathered([Reading("of_my_own", 1)])


# --- histograms -------------------------------------------------------------------------------


def test_a_histogram_counts_each_up_to_its_bound_and_all_at_the_end() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0] / 2, 0.001, 0.003, BOUNDS[-1] * 2):
        histogram.observe(seconds)
    counts, total = histogram.read()
    assert len(counts) == len(BOUNDS) + 1
    assert counts[0] == 2
    assert counts[BOUNDS.index(0.001024)] == 3
    assert counts[BOUNDS.index(0.002048)] == 3
    assert counts[BOUNDS.index(0.004096)] == 4
    assert counts[-2:] == (4, 5)
    assert total == pytest.approx(0.004 + BOUNDS[0] / 2 + BOUNDS[-1] * 2)


@given(st.lists(st.integers(0, 1 << 42), max_size=50))
def test_what_the_engine_counts_becomes_the_same_histogram_as_if_each_was_observed(took_us: list[int]) -> None:
    progress = Progress(next_offset=0, settled=b"", attempts={}, generation=0, number=0)
    histogram = Histogram()
    for took in took_us:
        progress.note_latency_of_one(0, took)
        # The middle of a microsecond: no float is on the wrong side of a bound.
        histogram.observe((took + 0.5) / 1_000_000)
    assert folded(progress._latencies).counts == histogram.read().counts
    for bound, count in zip(BOUNDS, histogram.read().counts, strict=False):
        assert count == sum(took < bound * 1_000_000 for took in took_us)


# --- publishing -------------------------------------------------------------------------------


async def test_published_events_and_bytes_are_counted_by_topic(world: World) -> None:
    bus = world.bus()
    await bus.publish(raw, b"12345")
    single = await value(bus, "published_bytes_total", "raw")
    await bus.publish_batch(wide, [b"x"] * 10, keys=[str(number) for number in range(10)])
    assert await read(bus, "messages_published_total") == {("raw",): 1, ("wide",): 10}
    assert 5 <= single < 100
    # Of each event alone: a batch that is divided counts as much as its events do.
    assert await value(bus, "published_bytes_total", "wide") == 10 * (single - 5 + 1 + 1)
    assert (await value(bus, "publish_duration_seconds", "raw")).counts[-1] == 1


async def test_a_publish_that_was_stored_before_is_not_counted_again(world: World) -> None:
    bus = world.bus()
    prepared = bus.prepare_batch(raw, [b"1", b"2"])
    await prepared.send()
    assert (await prepared.send()).duplicate
    assert await value(bus, "messages_published_total", "raw") == 2


async def test_failed_publishes_are_told_apart_as_refused_and_unknown(world: World) -> None:
    bus = world.bus()
    await bus.publish(raw, b"0")
    world.store.fail("log.append", StoreFull("no room"), times=1)
    with pytest.raises(StoreFull):
        await bus.publish_batch(raw, [b"1", b"2"])
    world.store.fail("log.append", OSError(5, "input/output error"), times=1)
    with pytest.raises(PublishUnknown):
        await bus.publish(raw, b"3")
    assert await read(bus, "publish_failures_total") == {("raw", "refused"): 2, ("raw", "unknown"): 1}
    assert await value(bus, "messages_published_total", "raw") == 1


async def test_buses_of_one_process_count_for_themselves(world: World) -> None:
    one, other = world.bus(), world.bus()
    await one.publish(raw, b"0")
    await other.publish_batch(raw, [b"1", b"2"])
    assert await read(one, "messages_published_total") == {("raw",): 1}
    assert await read(other, "messages_published_total") == {("raw",): 2}


# --- deliveries -------------------------------------------------------------------------------


async def test_every_outcome_is_counted_once_it_is_written(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"acked", b"dead", b"parked")
    await bus.publish(raw, b"expired", ttl=0.001)
    await world.run(1.0)

    async def handle(delivery: Delivery[Any]) -> None:
        match delivery.event.data:
            case b"dead":
                await delivery.reject("no")
            case b"parked" if delivery.attempt == 1:
                await delivery.nack(delay=30)
            case _:
                await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="shared"), handle) as running:
        await world.until(lambda: len(running.taken) == 3)
        await world.done(running.consumer.flush())
        counted = await read(bus, "deliveries_total")
        assert {outcome: count for (_, _, outcome), count in counted.items() if count} == {
            "acked": 1, "dead": 1, "expired": 1, "parked": 1,
        }  # fmt: skip
        await world.until(lambda: len(running.taken) == 4)
        await world.done(running.consumer.flush())
        assert await value(bus, "deliveries_total", "raw", "s", "acked") == 2
        assert await value(bus, "messages_delivered_total", "raw", "s") == 4
        assert await value(bus, "messages_expired_total", "raw", "s") == 1
        assert await value(bus, "messages_retried_total", "raw", "s") == 2
        await world.run(gauges.LOOK_SECONDS)
        assert await value(bus, "dead_letters", "raw", "s") == 1
        assert await value(bus, "parked_messages", "raw", "s") == 0


@pytest.mark.parametrize("mode", ["exclusive", "failover", "key_shared", "shared"])
async def test_counts_are_the_same_in_every_mode(world: World, mode: Any) -> None:
    bus = world.bus()
    await bus.publish_batch(wide, [b"x"] * 40, keys=[str(number) for number in range(40)])
    async with (
        world.running(bus.consume(wide, "s", mode=mode)) as first,
        bus.consume(wide, "other", mode=mode) as idle,
    ):
        await world.until(lambda: len(first.taken) == 40)
        await world.done(first.consumer.flush())
        assert await value(bus, "deliveries_total", "wide", "s", "acked") == 40
        assert await value(bus, "messages_delivered_total", "wide", "s") == 40
        assert (await value(bus, "publish_to_ack_seconds", "wide", "s")).counts[-1] == 40
        assert await value(bus, "deliveries_total", "wide", "other", "acked") == 0
        assert idle.active == [0, 1, 2, 3]


@pytest.mark.parametrize("refusal", ["raised", "answered"])
async def test_what_was_not_written_is_not_counted(world: World, refusal: str) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1")
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 1)
        if refusal == "raised":
            world.store.fail("cursors.commit", StoreError("not now"))
        else:
            world.store.hooks["cursors.commit"] = lambda _commit, commits: [StoreFull("no room") for _ in commits]
        await running.deliveries[0].ack()
        await world.until(lambda: len(running.taken) == 2)
        await world.run(1.0)
        assert await value(bus, "deliveries_total", "raw", "s", "acked") == 0
        world.store.heal()
        await world.until(lambda: world.cursor("s").next_offset == 1)
        assert await value(bus, "deliveries_total", "raw", "s", "acked") == 1


async def test_counts_outlive_their_consumers(world: World) -> None:
    bus = world.bus()
    for number in range(3):
        await world.publish(bus, b"%d" % number)
        async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
            await world.until(lambda running=running: running.taken)  # type: ignore[misc]
    assert await value(bus, "deliveries_total", "raw", "s", "acked") == 3
    assert await value(bus, "messages_delivered_total", "raw", "s") == 3
    assert await value(bus, "pending_acks", "raw", "s") == 0


async def test_latency_is_from_append_to_ack(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    await world.run(3.0)
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: running.taken)
        await world.done(running.consumer.flush())
    counts, total = await value(bus, "publish_to_ack_seconds", "raw", "s")
    within = dict(zip(BOUNDS, counts, strict=False))
    assert (within[2.097152], within[4.194304]) == (0, 1)
    assert total is None


async def test_what_is_in_hand_and_what_was_handed_over_last_is_told(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, *[b"%d" % number for number in range(5)], key="k")
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: running.taken)
        assert await value(bus, "pending_acks", "raw", "s") == 1
        assert await value(bus, "subscription_last_dispatched_offset", "raw", "s", "0") == 0
        await running.deliveries[0].ack()
        await world.until(lambda: len(running.taken) == 2)
        assert await value(bus, "pending_acks", "raw", "s") == 1
        assert await value(bus, "subscription_last_dispatched_offset", "raw", "s", "0") == 1


async def test_gaps_are_counted_and_not_forgotten_with_their_consumer(world: World) -> None:
    from tests.test_delivery_notifications import leaving_out

    from penstock.offsets import Range

    bus = world.bus()
    await bus.publish_batch(raw, [b"x"] * 8)
    world.store.hooks["log.read"] = leaving_out(Range(2, 5), times=None)
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: len(running.taken) == 5)
        while_it_runs = await value(bus, "subscription_offset_gaps_total", "raw", "s")
        assert while_it_runs > 0
        await world.done(running.consumer.flush())
        assert await value(bus, "deliveries_total", "raw", "s", "gap") == 3
    assert await value(bus, "subscription_offset_gaps_total", "raw", "s") == while_it_runs


async def test_what_the_monitor_counts_is_told(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.publish(bus, b"0")
        await world.until(lambda: running.taken)
        assert await value(bus, "notifier_notifications_total") > 0
        assert await value(bus, "dispatcher_notifier_polls_total") > 0
        world.store.hears = lambda: False
        await world.publish(bus, b"1")
        await world.until(lambda: len(running.taken) == 2)
        assert await value(bus, "dispatcher_heartbeat_polls_total") == 1
        assert await value(bus, "subscription_lag_detected_total") == 1
        assert await value(bus, "subscription_fallback_polls_total") == 1
        monitor = world.dispatcher(bus).monitor
        assert monitor._notifier is not None
        monitor._notifier.cancel()
        await world.run(1.0)
        assert await value(bus, "notifier_task_deaths_total") == 1
        assert await value(bus, "subscription_creation_races_detected_total") == 0


# --- what the store tells ---------------------------------------------------------------------


async def test_subscriptions_that_nobody_runs_are_told(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1", b"2", topic=wide, key="k")
    begun = world.clock.time_us() / 1_000_000
    async with bus.consume(wide, "s", mode="exclusive"):
        pass
    await world.run(100.0)
    observer = world.bus()
    lags = await read(observer, "subscription_lag_messages")
    assert sorted(lags.values()) == [0, 0, 0, 3]
    assert set(lags) == {("wide", "s", str(number)) for number in range(4)}
    ages = await read(observer, "subscription_oldest_unacked_age_seconds")
    assert {labels: age for labels, age in ages.items() if age} == {
        labels: pytest.approx(100, abs=1) for labels, lag in lags.items() if lag
    }
    progress = await read(observer, "subscription_last_progress_timestamp_seconds")
    assert all(at == pytest.approx(begun, abs=1) for at in progress.values())
    assert await value(observer, "dead_letters", "wide", "s") == 0
    assert sum((await read(observer, "log_end_offset")).values()) == 3
    assert await read(observer, "messages_delivered_total") == {}


async def test_progress_is_when_a_cursor_was_written(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.run(50.0)
        await world.publish(bus, b"0")
        await world.until(lambda: running.taken)
        await world.done(running.consumer.flush())
        acked_at = world.clock.time_us() / 1_000_000
        await world.run(30.0)
        told = await value(bus, "subscription_last_progress_timestamp_seconds", "raw", "s", "0")
        assert told == pytest.approx(acked_at, abs=1)


async def test_internal_topics_are_not_told(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: running.taken)
        await world.run(10.0)  # the ledger has a topic by now
        assert any(info.name.startswith("_") for info in world.store.whole.log.topics())
        told = {labels[0] for name in FAMILIES if "topic" in FAMILIES[name].labels for labels in await read(bus, name)}
        assert told == {"raw", "wide"}


async def test_the_store_is_looked_at_every_five_seconds_at_most(world: World) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive"):
        await bus.metrics()
        looks = world.store.calls["parked.count"]
        await world.publish(bus, b"0")
        for _ in range(10):
            assert await value(bus, "subscription_lag_messages", "raw", "s", "0") == 0
        assert world.store.calls["parked.count"] == looks
        assert await value(bus, "messages_published_total", "raw") == 1, "what is counted here is never old"
        await world.run(gauges.LOOK_SECONDS)
        assert await value(bus, "subscription_lag_messages", "raw", "s", "0") == 1
        assert world.store.calls["parked.count"] == looks + 1


def test_a_look_that_takes_long_is_taken_seldom() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    slow: Any = store.log
    topics = slow.topics
    looked = []

    def slowly() -> Any:
        looked.append(clock.monotonic())
        clock.advance(4.0)
        return topics()

    slow.topics = slowly
    looks = gauges.Looks(clock)
    while clock.monotonic() < 200:
        looks.take(store)
        clock.advance(1.0)
    assert {later - earlier for earlier, later in pairwise(looked)} == {40.0}


async def test_a_store_that_cannot_be_looked_at_is_told_as_down_and_not_as_it_was(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bus = world.bus()
    async with bus.consume(raw, "s", mode="exclusive"):
        assert await value(bus, "store_up") == 1
        world.store.fail("log.topics", OSError(5, "input/output error"))
        for _ in range(3):
            await world.run(gauges.LOOK_SECONDS)
            assert await value(bus, "store_up") == 0
            assert await read(bus, "subscription_lag_messages") == {}
            assert await read(bus, "deliveries_total"), "what is counted here is told all the same"
        assert caplog.text.count("could not be looked at for metrics") == 1
        world.store.heal()
        await world.run(gauges.LOOK_SECONDS)
        assert await value(bus, "store_up") == 1
        assert await value(bus, "subscription_lag_messages", "raw", "s", "0") == 0


async def test_a_topic_that_is_deleted_during_a_look_is_left_out(world: World) -> None:
    bus = world.bus()
    async with bus.consume(wide, "s", mode="exclusive"):
        pass

    def deleting(function: Hook, *args: Any, **options: Any) -> Any:
        found = function(*args, **options)
        if any(info.name == "raw" for info in found):
            world.store.whole.log.delete_topic(world.info(raw).log_id)
        return found

    world.store.hooks["log.topics"] = deleting
    observer = gauges.Looks(world.clock)
    observer.take(world.store)
    told = {reading.labels[0] for reading in observer.seen if reading.name == "log_end_offset"}
    assert Reading("store_up", 1) in observer.seen
    assert told == {"wide"}


async def test_beyond_the_limit_partitions_are_left_out_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauges, "SHARDS_MAX", 9)
    bus = world.bus()
    for number in range(5):
        async with bus.consume(wide, f"s{number}", mode="exclusive"):
            pass
    assert len(await read(bus, "subscription_lag_messages")) == 8
    assert await value(bus, "metrics_shards_left_out") == 12


# --- the medium -------------------------------------------------------------------------------


async def test_syncs_and_room_are_told_by_a_store_with_a_disk(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1", b"2")
    if world.kind == "memory":
        told = {metric.name for metric in await bus.metrics()}
        assert not told & {
            "penstock_fsync_duration_seconds",
            "penstock_disk_free_bytes",
            "penstock_store_damaged_partitions",
        }
        return
    assert (await value(bus, "fsync_duration_seconds")).counts[-1] == 3
    free, size = await value(bus, "disk_free_bytes"), await value(bus, "disk_size_bytes")
    assert 0 < free <= size


async def test_a_sync_is_timed(root: Path) -> None:
    from penstock.stores.file.platform import Platform, SystemDisk
    from penstock.stores.file.store import FileStore

    clock = VirtualClock()

    class SlowDisk(SystemDisk):
        def sync(self, descriptor: int) -> None:
            clock.advance(0.003)

    store = FileStore(root, platform=Platform(disk=SlowDisk(), clock=clock))
    async with Bus("memory:", topics=[raw], store=store) as bus:
        await bus.publish(raw, b"0")
        counts, total = await value(bus, "fsync_duration_seconds")
    store.close()
    assert total == pytest.approx(0.003 * counts[-1])
    assert counts[BOUNDS.index(0.002048)] == 0
    assert counts[BOUNDS.index(0.004096)] == counts[-1] > 0


@pytest.mark.parametrize("world", ["file"], indirect=True)
async def test_a_sync_that_fails_is_told_until_it_is_healed(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    disk: Any = world.store.whole._platform.disk  # type: ignore[attr-defined]

    def failing(descriptor: int) -> None:
        del disk.sync
        raise OSError(5, "input/output error")

    disk.sync = failing
    with pytest.raises(PublishUnknown):
        await bus.publish(raw, b"1")
    assert await read(bus, "store_damaged_partitions") == {("damaged",): 0, ("poisoned",): 1, ("unreadable",): 0}
    await world.publish(bus, b"2")
    await world.run(gauges.LOOK_SECONDS)
    assert await value(bus, "store_damaged_partitions", "poisoned") == 0


# --- the outbox -------------------------------------------------------------------------------


async def test_what_waits_in_the_outbox_is_told(tmp_path: Path) -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    path = tmp_path / "app.db"
    # Another process has the right to move them, and does not.
    with closing(SqliteOutbox(path)) as outbox:
        assert store.leases.acquire(f"outbox:{outbox.producer.hex()}", "another", 1_000.0)
    async with Bus("memory:", topics=[raw], store=store, clock=clock, outbox=path) as bus:
        assert await value(bus, "outbox_pending") == 0
        connection = sqlite3.connect(path)
        for number in range(3):
            bus.stage(connection, raw, b"%d" % number)
        connection.commit()
        connection.close()
        clock.advance(gauges.LOOK_SECONDS)
        assert await value(bus, "outbox_pending") == 3


async def test_a_bus_without_an_outbox_tells_of_none(world: World) -> None:
    assert await read(world.bus(), "outbox_pending") == {}


# --- handlers ---------------------------------------------------------------------------------


async def test_the_middleware_measures_handlers_and_lets_their_errors_pass(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"fine", b"bad", key="k")
    raised: list[str] = []

    async def handle(delivery: Delivery[Any]) -> None:
        async def proceed() -> None:
            await world.clock.pause(0.3)
            if delivery.event.data == b"bad":
                raise KeyError(delivery.event.data)

        try:
            await measured(delivery, proceed)
        except KeyError:
            raised.append("KeyError")
        await delivery.ack()

    assert await read(bus, "process_seconds") == {}
    async with world.running(bus.consume(raw, "s", mode="exclusive"), handle) as running:
        await world.until(lambda: len(running.taken) == 2)
        await world.run(1.0)
    assert raised == ["KeyError"]
    counts, total = await value(bus, "process_seconds", "raw", "s")
    assert total == pytest.approx(0.6, abs=0.05)
    assert (counts[BOUNDS.index(0.262144)], counts[BOUNDS.index(0.524288)]) == (0, 2)
    assert await read(bus, "process_failures_total") == {("raw", "s", "KeyError"): 1}


async def test_a_handler_that_is_cancelled_counts_as_failed(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: running.taken)
        task = asyncio.ensure_future(measured(running.deliveries[0], asyncio.Event().wait))  # type: ignore[arg-type]
        await world.settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await read(bus, "process_failures_total") == {("raw", "s", "CancelledError"): 1}


def test_kinds_of_failures_are_bounded() -> None:
    tally = Tally("t", "s")
    for number in range(REASONS_MAX + 30):
        tally.processed(0.1, type(f"Error{number}", (Exception,), {})())
    tally.processed(0.1, type("Error3", (Exception,), {})())
    told = {
        reading.labels[2]: reading.value for reading in tally.readings() if reading.name == "process_failures_total"
    }
    assert len(told) == REASONS_MAX + 1
    assert told[OTHER_REASONS] == 30
    assert told["Error3"] == 2


def test_subscriptions_that_nobody_consumes_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.runtime.tally.TALLIES_MAX", 3)
    tallies = Tallies()
    used = tallies.of("t", "used", list)
    for number in range(5):
        tallies.of("t", f"s{number}", lambda: [used])
    assert [tally.subscription for tally in tallies] == ["used", "s3", "s4"]
    assert tallies.of("t", "used", list) is used


# --- asking -----------------------------------------------------------------------------------


async def test_asking_opens_a_bus_and_a_closed_one_says_so() -> None:
    bus = Bus("memory:", topics=[raw])
    assert [metric.name for metric in bus.latest_metrics()] == ["penstock_build_info"]
    assert await value(bus, "store_up") == 1
    await bus.close()
    assert [metric.name for metric in bus.latest_metrics()] == ["penstock_build_info"]
    with pytest.raises(BusClosed):
        await bus.metrics()


async def test_another_thread_gets_what_the_event_loop_would() -> None:
    async with Bus("memory:", topics=[raw]) as bus:
        await bus.publish(raw, b"0")
        told = await asyncio.to_thread(bus.latest_metrics)
        assert values_of(told, "messages_published_total") == {("raw",): 1}
        assert values_of(told, "log_end_offset") == {("raw", "0"): 1}


async def test_in_the_event_loop_of_the_bus_the_look_at_the_store_is_that_of_the_call_before(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    assert values_of(bus.latest_metrics(), "log_end_offset") == {}
    await world.settle()
    assert values_of(bus.latest_metrics(), "log_end_offset")[("raw", "0")] == 1
    assert values_of(bus.latest_metrics(), "messages_published_total") == {("raw",): 1}


async def test_values_are_immutable_and_later_counts_do_not_change_them(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    before = await bus.metrics()
    taken = values_of(before, "publish_duration_seconds")[("raw",)]
    assert isinstance(taken, Buckets)
    await world.publish(bus, b"1")
    assert values_of(before, "publish_duration_seconds")[("raw",)] == taken
    assert hash(before[0])


async def test_label_values_are_names_and_words_only(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"secret", key="customer-7", headers={"token": b"secret"}, id="event-7")
    consumer = bus.consume(raw, "s", mode="exclusive", retry=Retry(max_retries=0), consumer_id="process-7")

    async def handle(delivery: Delivery[Any]) -> None:
        await delivery.nack(reason=ValueError("secret"))

    async with world.running(consumer, handle) as running:
        await world.until(lambda: running.taken)
        await world.run(gauges.LOOK_SECONDS)
        words = {word for metric in await bus.metrics() for sample in metric.samples for word in sample.labels}
    outcomes = {outcome.value for outcome in Outcome}
    allowed = {"raw", "wide", "s", "0", "1", "2", "3", "refused", "unknown", "damaged", "poisoned", "unreadable"}
    assert {word for word in words - allowed - outcomes if not re.fullmatch(r"\d+\.\d+\.\d+.*", word)} == set()
