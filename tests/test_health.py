"""Health is progress while there is a backlog: who is said to be stalled, since when, and why."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.deliveries import World, acked, kept, raw, wide

from penstock import Bus, Health, Retry, SubscriptionHealth, Topic
from penstock.clock import us_to_datetime
from penstock.errors import FutureVersion, UnknownTopic, UsageError
from penstock.rows import Cursor, Shard, Subscription
from penstock.runtime import subscriptions
from penstock.settings import DeliverySettings, Settings
from penstock.stores import open_store
from penstock.stores.file.filesystem import space_is_short
from penstock.stores.file.store import FileStore
from penstock.stores.file.tail import State

MODES = ["exclusive", "failover", "key_shared", "shared"]
AFTER = 60.0
"""What `stalled_after` is unless it is said."""


async def look(bus: Bus, name: str = "s", **options: Any) -> SubscriptionHealth:
    """Return how one subscription does."""
    health = await bus.health(**options)
    (found,) = [each for each in health.subscriptions if each.name == name]
    return found


async def fail(delivery: Any) -> None:
    """Handle a delivery: it fails, and comes back after so long that it waits aside."""
    await delivery.nack(delay=40, reason=ValueError("the secret of the payload"))


def broken_at(*keys: bytes, **options: Any) -> Callable[[Any], Any]:
    """Return a handler that fails at these keys, and settles all others."""

    async def handle(delivery: Any) -> None:
        if delivery.event.key in keys:
            await delivery.nack(**{"delay": 40, "reason": ValueError("no"), **options})
        else:
            await delivery.ack()

    return handle


# --- nothing to do --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_subscription_with_nothing_to_do_is_healthy_consumed_or_not(world: World, mode: Any) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode=mode)):
        await world.publish(bus, b"1")
        await world.run(1)
        await world.run(3 * AFTER)
        found = await look(bus)
        assert (found.state, found.reasons, found.lag, found.oldest_seconds) == ("ok", (), 0, 0.0)
        assert len(found.consumers) == 1
    found = await look(bus)
    assert (found.state, found.reasons, found.consumers) == ("ok", (), ())
    assert (await bus.health()).ok


async def test_a_quiet_subscription_is_not_stalled_by_the_first_event_that_comes(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), kept):
        await world.run(10 * AFTER)
        await world.publish(bus, b"1")
        await world.run(AFTER - 1)
        assert (await look(bus)).state == "ok"
        await world.run(1)
        assert (await look(bus)).stalled


async def test_health_is_told_without_a_consumer_and_changes_nothing(world: World) -> None:
    bus = world.bus()
    await bus.health()
    await world.publish(bus, b"1")
    subscriptions.ensure(
        world.store.whole, world.info(), "s", mode=None, changes={}, start="earliest", protect=None, now_us=1
    )
    world.store.calls.clear()
    assert (await look(bus)).lag == 1
    assert not {"cursors.commit", "cursors.put_subscription", "leases.acquire", "log.append"} & {*world.store.calls}
    assert bus._deliveries._dispatcher is None


# --- no progress ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_backlog_without_progress_is_stalled_after_so_long_and_any_progress_clears_it(
    world: World, mode: Any
) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode=mode, consumer_id="me"), kept) as running:
        await world.publish(bus, b"1", b"2")
        await world.run(AFTER - 1)
        found = await look(bus)
        assert (found.state, found.in_flight > 0, found.oldest_seconds) == ("ok", True, AFTER - 1)
        await world.run(1)
        found = await look(bus)
        assert found.state == "stalled"
        assert found.reasons[0].startswith("raw/0 stands at offset 0 for 1.0 min: ")
        assert {"exclusive": "consumer me has", "failover": "consumer me has", "shared": "has claimed it"}.get(
            mode, "has its slot, "
        ) in found.reasons[0]
        assert [each.name for each in (await bus.health()).stalled] == ["s"]
        await running.deliveries[0].ack()
        await world.settle()
        assert (await look(bus)).state == "ok"


async def test_how_long_is_a_setting_and_an_argument(world: World) -> None:
    bus = world.bus()
    patient = Bus(
        "memory:",
        topics=[raw],
        store=world.store,
        clock=world.clock,
        settings=Settings(delivery=DeliverySettings(stalled_seconds=500.0)),
    )
    async with patient, world.running(bus.consume(raw, "s"), kept):
        await world.publish(bus, b"1")
        await world.run(100)
        assert (await look(bus)).stalled
        assert not (await look(bus, stalled_after=timedelta(seconds=101))).stalled
        assert not (await look(patient)).stalled
        assert (await patient.health(stalled_after=99)).stalled_after_seconds == 99
        with pytest.raises(UsageError, match="stalled_after"):
            await bus.health(stalled_after=-1)


async def test_one_partition_that_stands_is_not_hidden_by_the_others(world: World) -> None:
    bus = world.bus()

    async def handle(delivery: Any) -> None:
        if delivery.position.partition != 2:
            await delivery.ack()

    async with world.running(bus.consume(wide, "s", mode="exclusive"), handle):
        for _ in range(8):
            for partition in range(4):
                await world.publish(bus, b"x", topic=wide, key=_key_of(partition))
            await world.run(AFTER / 4)
        found = await look(bus)
        assert found.stalled
        assert [reason.split(" for ")[0] for reason in found.reasons] == ["wide/2 stands at offset 0"]


def _key_of(partition: int) -> bytes:
    """Return a key of a partition of the topic `wide`."""
    from penstock.batch import Batch
    from penstock.events import Event

    keys = [str(number).encode() for number in range(100)]
    places = Batch.from_events([Event(key=key) for key in keys]).partitions(4, 0)
    return next(key for key, place in zip(keys, places, strict=True) if place == partition)


async def test_attempts_that_are_written_are_no_progress_for_whoever_looks_again(world: World) -> None:
    bus = world.bus()

    async def again(delivery: Any) -> None:
        await delivery.nack(delay=3)  # so short that it waits in memory, and its attempts are in the cursor

    async with world.running(bus.consume(raw, "s", retry=Retry(max_retries=1_000)), again):
        await world.publish(bus, b"1")
        await look(bus)
        written = world.cursor("s").updated_at
        await world.run(2 * AFTER)
        assert world.cursor("s").updated_at > written
        found = await look(bus)
        assert found.stalled
        assert f"; it has failed {world.cursor('s').attempts[0]} times, and is tried again" in found.reasons[0]


async def test_what_is_slow_by_its_own_policy_is_not_stalled(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", timeout=3 * AFTER), kept):
        await world.publish(bus, b"1")
        await world.run(2 * AFTER)
        assert not (await look(bus)).stalled
    async with world.running(bus.consume(raw, "rare", rate=0.002)) as running:
        await world.publish(bus, b"2", b"3")
        await world.run(2 * AFTER)
        assert len(running.taken) < 3
        assert not (await look(bus, "rare")).stalled


async def test_an_event_that_waits_aside_and_is_due_is_a_backlog_too(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), fail) as running:
        await world.publish(bus, b"1", key=b"k")
        await world.run(1)
        running.handle = kept
        await world.run(39 + AFTER - 1)
        found = await look(bus)
        assert (found.lag, found.waiting, found.state) == (0, 1, "degraded")
        await world.run(2)
        found = await look(bus)
        assert found.stalled
        assert found.reasons[0] == "raw/0: 1 event waits aside, and nothing was settled for 1.0 min"


async def test_what_holds_a_cursor_back_while_others_go_on_is_named_at_the_second_look(world: World) -> None:
    bus = world.bus()

    async def handle(delivery: Any) -> None:
        if delivery.position.offset:
            await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="shared", window=1000), handle):
        for number in range(15):
            await world.publish(bus, str(number).encode())
            await world.run(AFTER / 10)
            if number == 0:
                assert (await look(bus)).state == "ok"
        found = await look(bus)
        assert found.state == "degraded"
        assert found.reasons[0].startswith("raw/0@0 is not settled for 1.4 min, while later ones are: process/")


# --- nobody consumes ------------------------------------------------------------------------------


async def test_one_that_was_never_consumed_is_idle_and_never_stalled(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"1")
    subscriptions.ensure(
        world.store.whole, world.info(), "s", mode=None, changes={}, start="earliest", protect=None, now_us=1
    )
    await world.run(10 * AFTER)
    found = await look(bus)
    assert (found.state, found.reasons) == ("degraded", ("idle: nobody consumes it, and nobody has yet",))
    assert (found.last_progress_at, found.consumers) == (None, ())
    assert found.oldest_seconds == 10 * AFTER


@pytest.mark.parametrize("mode", MODES)
async def test_one_that_was_consumed_is_stalled_when_nobody_comes_back(world: World, mode: Any) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode=mode)):
        await world.publish(bus, b"1")
        await world.run(1)
    await world.publish(bus, b"2")
    await world.run(AFTER - 1)
    found = await look(bus)
    assert (found.state, found.reasons) == ("degraded", ("nobody consumes it",))
    await world.run(1)
    found = await look(bus)
    assert found.stalled
    assert found.reasons[-1] == "nobody consumes it"
    async with world.running(bus.consume(raw, "s", mode=mode)):
        await world.run(1)
        assert (await look(bus)).state == "ok"


async def test_one_that_is_paused_waits_and_is_never_stalled(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s")):
        await world.publish(bus, b"1")
        await world.run(1)
        await bus.pause(raw, "s")
        await world.run(1)
        assert (await look(bus)).state == "ok"  # there is nothing to do
        await world.publish(bus, b"2")
        await world.run(10 * AFTER)
        found = await look(bus)
        assert (found.state, found.paused) == ("degraded", True)
        assert found.reasons == ("it is paused: `penstock resume raw s` lets it go on",)


async def test_a_query_that_keeps_its_own_progress_is_shown_and_not_judged(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"1", b"2")
    log_id = world.info().log_id
    world.store.whole.cursors.put_subscription(
        Subscription(log_id=log_id, name="query", mode="spark", external=True),
        [Cursor(shard=Shard(log_id, "query", 0, 0), next_offset=1)],
    )
    moved_at = us_to_datetime(world.clock.time_us())
    await world.run(10 * AFTER)
    found = await look(bus, "query")
    assert (found.state, found.reasons, found.external, found.lag) == ("ok", (), True, 1)
    assert (found.last_progress_at, found.oldest_seconds) == (moved_at, 10 * AFTER)


# --- consumers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["key_shared", "shared"])
async def test_consumers_are_counted_over_all_processes_and_a_dead_one_disappears(world: World, mode: Any) -> None:
    first, second = world.bus(), world.bus()
    async with (
        world.running(first.consume(raw, "s", mode=mode, consumer_id="a")),
        world.running(first.consume(raw, "s", mode=mode, consumer_id="b")),
        world.running(second.consume(raw, "s", mode=mode, consumer_id="c")) as dying,
    ):
        await world.run(3)
        found = await look(first)
        assert [(each.owner, each.here) for each in found.consumers] == [("a", True), ("b", True), ("c", False)]
        assert len({each.process for each in found.consumers}) == 2
        assert found.consumers[2].process == world.dispatcher(second).presence.name
        assert [each.here for each in (await look(second)).consumers] == [False, False, True]
        assert not any(each.here for each in (await look(world.bus())).consumers)
        await world.kill(second, dying)
        await world.run(11)  # a lease
        found = await look(first)
        assert [each.owner for each in found.consumers] == ["a", "b"]
        assert found.state == "ok"
        dying.looked_at()


async def test_the_consumer_of_a_whole_partition_is_one_however_many_it_has(world: World) -> None:
    bus, other = world.bus(), world.bus()
    async with (
        world.running(bus.consume(wide, "s", mode="failover", consumer_id="one")),
        world.running(other.consume(wide, "s", mode="failover", consumer_id="standby")),
    ):
        found = await look(bus)
        assert [(each.owner, each.here) for each in found.consumers] == [("one", True)]


async def test_what_is_in_hand_is_told_by_the_process_that_has_it(world: World) -> None:
    bus, other = world.bus(), world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept):
        for key in (b"a", b"b", b"c"):
            await world.publish(bus, b"1", key=key)
        await world.run(1)
        assert ((await look(bus)).in_flight, (await look(other)).in_flight) == (3, 0)


async def test_slots_that_nobody_has_are_named(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", consumer_id="me")):
        await world.publish(bus, b"1")
        await world.run(1)
        for slot in range(5):
            lease = world.store.whole.leases.holder(f"slot/{world.info().log_id}/s/{slot}")
            assert lease is not None
            world.store.whole.leases.release(lease)
        found = await look(world.bus())
        assert found.reasons == ("5 slots have no owner at the moment: whoever is there takes them within a second",)


# --- halted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_one_that_has_halted_is_stalled_at_once_and_says_where_and_why(world: World, mode: Any) -> None:
    bus, other = world.bus(), world.bus()

    async def handle(delivery: Any) -> None:
        if delivery.event.data == b"bad":
            await delivery.nack(reason=KeyError("secret"))
        else:
            await delivery.ack()

    halting = bus.consume(raw, "s", mode=mode, retry=Retry(max_retries=1, delay=0.1), exhausted="halt")
    async with world.running(halting, handle) as running:
        await world.publish(bus, b"good", b"bad")
        await world.run(2)
        found = await look(bus)
        assert found.stalled
        assert [(each.partition, each.offset, each.error) for each in found.halted] == [(0, 1, "KeyError")]
        assert found.reasons[0] == (
            "it has halted at raw/0@1: every attempt failed (KeyError); `penstock resume raw s` lets it try again"
        )
        # Another process sees it by the attempts; only the one that made them knows why.
        seen = await look(other)
        assert [(each.partition, each.offset, each.error) for each in seen.halted] == [(0, 1, "")]
        assert (seen.state, seen.reasons[0].split(";")[0]) == (
            "stalled",
            "it has halted at raw/0@1: every attempt failed",
        )
        running.handle = acked
        await bus.resume(raw, "s")
        await world.run(2)
        for each in (bus, other):
            found = await look(each)
            assert (found.state, found.halted) == ("ok", ())


async def test_one_that_has_halted_at_an_event_that_waited_aside_is_named_as_well(world: World) -> None:
    bus, other = world.bus(), world.bus()
    async with world.running(bus.consume(raw, "s", retry=Retry(max_retries=1), exhausted="halt"), fail):
        await world.publish(bus, b"bad", key=b"k")
        await world.run(45)
        for each, error in ((bus, "ValueError"), (other, "")):
            found = await look(each)
            assert [(at.offset, at.error) for at in found.halted] == [(0, error)]
            assert found.stalled


async def test_one_that_has_halted_at_a_hole_says_so_to_everybody(world: World) -> None:
    bus, other = world.bus(), world.bus()
    consume: Any = {"mode": "exclusive", "exhausted": "halt"}
    async with world.running(bus.consume(raw, "s", **consume)):
        await world.publish(bus, b"first")
        await world.run(1)
    for _ in range(30):  # so that a store that removes whole files has one to remove
        await world.publish(bus, bytes(400))
    assert world.store.whole.log.trim(world.info().partitions[0], 25, force=True) > 1
    assert (await look(bus)).halted == ()  # nobody has met it
    async with world.running(bus.consume(raw, "s", **consume)):
        await world.run(1)
        for each in (bus, other):
            found = await look(each)
            assert [(at.partition, at.offset, at.error) for at in found.halted] == [(0, 1, "Gap")]
            assert found.reasons[0].startswith("it has halted at raw/0@1: a hole in the log; ")
            assert found.stalled
        await bus.resume(raw, "s")
        await world.run(1)
        assert ((await look(bus)).state, (await look(other)).state) == ("ok", "ok")


# --- what waits aside -----------------------------------------------------------------------------


async def test_a_blocked_key_is_named_with_its_error_and_when_it_is_due_and_degrades(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), broken_at(b"k")):
        due_at = us_to_datetime(world.clock.time_us() + 40_000_000)
        await world.publish(bus, b"0", key=b"k")
        await world.run(1)
        await world.publish(bus, b"1", b"2", key=b"k")
        await world.publish(bus, b"3", key=b"other")
        await world.run(2)
        found = await look(bus)
        assert (found.state, found.reasons) == ("degraded", ("1 key waits for another attempt",))
        assert (found.lag, found.waiting, found.blocked_lanes, found.upgrades) == (0, 3, 1, 0)
        [lane] = found.lanes
        assert (lane.partition, lane.offset, lane.events, lane.attempts) == (0, 0, 3, 1)
        assert (lane.error, lane.upgrade) == ("ValueError", False)
        assert lane.key_hash is not None
        assert int(lane.key_hash, 16) == world.rows("s", "waiting")[0].lane % (1 << 64)
        assert lane.due_at is not None
        assert timedelta(0) <= lane.due_at - due_at <= timedelta(seconds=1)
        assert "secret" not in repr(await bus.health())


async def test_a_key_that_waits_for_an_upgrade_is_named_so_wherever_it_stands(world: World) -> None:
    bus = world.bus()

    async def handle(delivery: Any) -> None:
        too_new = FutureVersion("order.placed", 3, 2)
        await delivery.nack(delay=40, reason=too_new if delivery.event.key == b"9" else ValueError("no"))

    async with world.running(bus.consume(raw, "s"), handle):
        for number in range(10):
            await world.publish(bus, b"x", key=str(number).encode())
        await world.run(2)
        found = await look(bus)
        assert (found.blocked_lanes, found.upgrades, found.state) == (10, 1, "degraded")
        assert found.reasons == (
            "upgrade: 1 key waits for a program that knows a newer version of the event",
            "9 keys wait for another attempt",
        )
        assert [lane.offset for lane in found.lanes] == [0, 1, 2, 3, 4, 9]
        assert [lane.offset for lane in found.lanes if lane.upgrade] == [9]


async def test_in_shared_mode_events_wait_by_themselves_and_block_no_key(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="shared"), fail):
        await world.publish(bus, b"0", b"1", key=b"k")
        await world.run(2)
        found = await look(bus)
        assert found.reasons == ("2 events wait for another attempt",)
        assert [(lane.offset, lane.key_hash, lane.events) for lane in found.lanes] == [(0, None, 1), (1, None, 1)]


async def test_a_dead_letter_that_was_brought_back_waits_and_blocks_nobody(world: World) -> None:
    bus = world.bus()

    async def handle(delivery: Any) -> None:
        if delivery.replay:
            await delivery.nack(delay=40)
        else:
            await delivery.reject("no")

    async with world.running(bus.consume(raw, "s"), handle):
        await world.publish(bus, b"1", key=b"k")
        await world.run(2)
        assert world.replay("s") == 1
        await world.run(2)
        found = await look(bus)
        assert (found.waiting, found.blocked_lanes, found.state, found.reasons) == (1, 0, "ok", ())


async def test_dead_letters_are_counted_and_judge_nothing(world: World) -> None:
    bus = world.bus()

    async def handle(delivery: Any) -> None:
        await delivery.reject("no")

    async with world.running(bus.consume(raw, "s"), handle):
        await world.publish(bus, b"1", b"2")
        await world.run(2)
        found = await look(bus)
        assert (found.state, found.dead, found.waiting, found.blocked_lanes) == ("ok", 2, 0, 0)


async def test_no_more_may_wait_aside_is_named_with_the_first_key_and_is_stalled_only_if_nothing_moves(
    world: World,
) -> None:
    bus = world.bus()
    await world.publish(bus, b"0")
    async with world.running(bus.consume(raw, "s", window=10, retry=Retry(max_retries=50)), broken_at(b"k", delay=300)):
        subscriptions.change(world.store.whole, world.info(), "s", {"parked_max": 3})
        await world.run(1)
        for number in range(30):
            await world.publish(bus, str(number).encode(), key=b"k")
            await world.run(0.1)
        await world.run(5)
        found = await look(bus)
        assert (found.waiting, found.state) == (3, "degraded")
        assert found.reasons[0] == (
            "raw/0: 3 events wait aside, and no more may (parked_max): the first key that is blocked is that of offset "
            "1, and nothing behind it goes on"
        )
        await world.run(AFTER)
        found = await look(bus)
        assert found.stalled
        assert found.reasons[0].startswith("raw/0 stands at offset 4 for ")
        assert "(parked_max)" in found.reasons[1]


# --- figures --------------------------------------------------------------------------------------


async def test_the_age_is_that_of_the_first_event_that_is_not_settled_exactly(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s", mode="exclusive", retry=Retry(max_retries=9)), kept) as running:
        await world.publish(bus, b"0", key=b"a")
        await world.run(12.5)
        await world.publish(bus, b"1", key=b"b")
        await world.run(2.5)
        assert (await look(bus)).oldest_seconds == 15.0
        await running.deliveries[0].ack()
        await world.run(1)
        assert (await look(bus)).oldest_seconds == 3.5
        # The cursor passes it, and it still waits.
        await running.deliveries[1].nack(delay=100)
        await world.run(1)
        found = await look(bus)
        assert (found.lag, found.waiting, found.oldest_seconds) == (0, 1, 4.5)
        await world.run(200)
        await running.deliveries[-1].ack()
        await world.run(1)
        assert (await look(bus)).oldest_seconds == 0.0


async def test_the_age_of_an_event_that_the_log_has_no_more_is_since_it_was_set_aside(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), broken_at(b"k")):
        await world.publish(bus, b"0", key=b"k")
        await world.run(1)
        for _ in range(30):  # so that a store that removes whole files has one to remove
            await world.publish(bus, bytes(400), key=b"other")
            await world.run(1)
        partition = world.info().partitions[0]
        assert world.store.whole.log.trim(partition, 30, force=True) > 0
        parked_at = world.rows("s", "waiting")[0].parked_at
        assert (await look(bus)).oldest_seconds == (world.clock.time_us() - parked_at) / 1_000_000 > 29


async def test_when_it_last_made_progress_is_told(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s")) as running:
        await world.publish(bus, b"1")
        await world.until(lambda: running.taken)
        await world.settle()
        moved_at = us_to_datetime(world.cursor("s").updated_at)
        await world.run(500)
        assert (await look(bus)).last_progress_at == moved_at


async def test_a_bus_that_is_asked_again_tells_the_trend(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), kept) as running:
        await world.publish(bus, b"1")
        await world.run(1)
        found = await look(bus)
        assert (found.lag_per_second, found.settled_per_second) == (None, None)
        await world.publish(bus, *[b"x"] * 20)
        await world.run(10)
        found = await look(bus)
        assert (found.lag_per_second, found.settled_per_second) == (2.0, 0.0)
        running.handle = acked
        for delivery in running.deliveries:
            await delivery.ack()
        await world.run(10)
        found = await look(bus)
        assert (found.lag_per_second, found.settled_per_second) == (-2.1, 2.1)
        # Another bus has its own memory, and moving it is no work that was done.
        await bus.seek(raw, "s", 0)
        await world.run(10)
        assert (await look(bus)).settled_per_second is None
        assert (await look(world.bus())).lag_per_second is None


async def test_only_what_is_there_is_remembered(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s")), world.running(bus.consume(wide, "t")):
        await world.publish(bus, b"1")
        await bus.health()
        await bus.health(raw)
        assert len(bus._deliveries._history._seen) == 2
    await bus.delete_subscription(raw, "s")
    await bus.health(raw)
    assert [name for _, name in bus._deliveries._history._seen] == ["t"]


async def test_health_of_one_topic_is_that_of_its_subscriptions(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), kept), world.running(bus.consume(wide, "t")):
        await world.publish(bus, b"1")
        await world.run(2 * AFTER)
        assert [(each.topic, each.name) for each in (await bus.health()).subscriptions] == [("raw", "s"), ("wide", "t")]
        assert ((await bus.health(raw)).state, (await bus.health("wide")).state) == ("stalled", "ok")
        with pytest.raises(UnknownTopic):
            await bus.health("ra")


async def test_what_goes_wrong_within_this_process_is_told(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s")):
        await world.publish(bus, b"1")
        await world.run(1)
        world.store.fail("log.read", OSError("the disk is gone"))
        await world.publish(bus, b"2")
        await world.run(3)
        world.store.heal()
        found = await look(bus)
        assert "raw/0: a read fails here: OSError: the disk is gone" in found.reasons
        assert found.state == "degraded"
        await world.run(10)
        assert (await look(bus)).state == "ok"


# --- the store ------------------------------------------------------------------------------------


async def test_what_waits_to_enter_is_told_and_only_what_is_overdue_degrades(world: World) -> None:
    bus = world.bus()
    await bus.publish(raw, b"later", delay=100)
    await bus.publish(raw, b"much later", delay=10_000)
    store = (await bus.health()).store
    assert (store.scheduled, store.scheduled_overdue_seconds, store.state) == (2, 0.0, "ok")
    await bus._entrances.stop()  # as if no bus were open
    await world.run(100 + AFTER)
    health = await bus.health()
    assert (health.store.scheduled, health.store.scheduled_overdue_seconds) == (2, AFTER)
    assert health.state == health.store.state == "degraded"
    assert health.store.reasons == (
        "delayed publishes should have been made 1.0 min ago: no open bus of this store makes them",
    )


async def test_what_is_staged_in_the_outbox_is_told(tmp_path: Path) -> None:
    topic = Topic("orders", bytes)
    bus = Bus("memory:", topics=[topic], outbox=tmp_path / "app.db")
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        async with bus:
            assert (await bus.health()).store.staged == 0
            mover: Any = bus._entrances._mover
            await mover.stop()
            bus.stage(connection, topic, b"1")
            connection.commit()
            assert (await bus.health()).store.staged == 1
    async with Bus("file:" + str(tmp_path / "data"), topics=[topic]) as plain:
        assert (await plain.health()).store.staged is None


async def test_a_file_store_tells_its_space_and_who_else_has_it_open(root: Path) -> None:
    async with Bus(f"file:{root}", topics=[raw]) as bus:
        alone = (await bus.health()).store
        assert (alone.kind, alone.url, alone.members) == ("file", f"file:{root}", ())
        assert alone.free_bytes is not None
        assert alone.total_bytes is not None
        assert 0 < alone.free_bytes <= alone.total_bytes
        with closing(open_store(f"file:{root}")):
            (other,) = (await bus.health()).store.members
            assert (other.process, other.program) == (os.getpid(), Path(sys.argv[0]).name)
            assert other.opened_at.year >= 2026
        assert (await bus.health()).store.members == ()
        # What a process that was killed leaves behind is no member.
        told = {"process": 1, "program": "gone", "opened_at": 1}
        (root / "members" / "12345.json").write_bytes(msgspec.json.encode(told))
        assert (await bus.health()).store.members == ()


async def test_a_memory_store_tells_what_it_can() -> None:
    async with Bus("memory:", topics=[raw]) as bus:
        store = (await bus.health()).store
        assert (store.kind, store.free_bytes, store.members, store.faults, store.staged) == ("memory", None, (), (), 0)


@pytest.mark.parametrize(("state", "words"), [(State.POISONED, "a sync has failed"), (State.DAMAGED, "is damaged")])
async def test_a_partition_that_cannot_be_written_is_named(root: Path, state: State, words: str) -> None:
    with closing(FileStore(root)) as store:
        async with Bus(store=store, topics=[wide]) as bus:
            await bus.publish(wide, b"1")
            assert (await bus.health()).store.faults == ()
            info = next(info for info in store.log.topics() if info.name == "wide")
            handle = store.log.handle(info.partitions[3])
            before = store.log.tail(handle)
            store.log.tails.write(handle.files.slot, before, state=state)
            health = await bus.health()
            store.log.tails.write(handle.files.slot, before)
            [fault] = health.store.faults
            assert (fault.topic, fault.partition, words in fault.fault) == ("wide", 3, True)
            assert health.state == "degraded"
            assert health.store.reasons[0].startswith("wide/3: ")
            # What a tail of an earlier boot says is not believed.
            store.log.tails.write(handle.files.slot, before, state=state, boot_id=bytes(16))
            assert (await bus.health()).store.faults == ()
            store.log.tails.write(handle.files.slot, before)


@pytest.mark.parametrize(
    ("free", "total", "short"),
    [(1 << 30, 1 << 40, False), ((1 << 30) - 1, 1 << 40, True), (200, 2_000, False), (199, 2_000, True)],
)
def test_space_is_short_below_a_gibibyte_or_a_tenth(free: int, total: int, short: bool) -> None:
    assert space_is_short(free, total) is short


async def test_little_space_degrades(root: Path) -> None:
    with closing(FileStore(root)) as store:
        async with Bus(store=store, topics=[raw]) as bus:
            told = msgspec.structs.replace(store.inspect(), free_bytes=50 << 20, space_is_short=True)
            store.inspect = lambda: told  # type: ignore[method-assign]
            health = await bus.health()
            assert (health.state, health.store.reasons) == (
                "degraded",
                ("only 50 MiB are free where the store is: make room, or set a retention",),
            )


async def test_damage_is_told_and_everything_else_is_still_known(root: Path) -> None:
    async with Bus(f"file:{root}", topics=[raw, wide]) as bus:
        await bus.publish(raw, b"a needle that is found")
        await bus.publish(wide, b"fine")
        async with bus.consume(raw, "s", mode="exclusive"), bus.consume(wide, "t", mode="exclusive"):
            pass
    flip_a_byte(root, b"a needle")
    async with Bus(f"file:{root}", topics=[raw, wide]) as bus:
        health = await bus.health()
        broken, fine = health.subscriptions
        assert (broken.name, broken.state, len(health.store.damage)) == ("s", "degraded", 1)
        assert broken.reasons[0] == health.store.damage[0]
        assert (fine.name, fine.lag, fine.reasons) == ("t", 1, ("idle: nobody consumes it, and nobody has yet",))


def flip_a_byte(root: Path, of: bytes) -> None:
    """Damage the segment that holds these bytes."""
    for path in root.glob("topics/*/*/*.seg"):
        data = bytearray(path.read_bytes())
        if of in data:
            data[data.index(of)] ^= 1
            path.write_bytes(data)


# --- values ---------------------------------------------------------------------------------------


async def test_it_is_made_of_frozen_values_that_become_json(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), fail):
        await world.publish(bus, b"1", key=b"k")
        await world.run(1)
        health = await bus.health()
    assert msgspec.json.decode(msgspec.json.encode(health), type=Health) == health
    with pytest.raises(AttributeError):
        health.state = "ok"  # type: ignore[misc]
