"""The harness: an application's own bus in a world where time, the store and every fault are the test's."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Bus, Delivery, Event, Reject, Retry, RetryLater, Topic, event
from penstock.errors import NotDrained, PublishUnknown, UsageError
from penstock.testing import World, harness
from penstock.testing.worlds.faults import CRASHES, Fault, Kind, Script
from penstock.testing.worlds.world import world_of

if TYPE_CHECKING:
    from pathlib import Path


@event("harness.order")
@dataclass(frozen=True)
class Order:
    number: int
    customer: str = "ann"


orders = Topic("orders", Order, key=lambda order: order.customer, partitions=2)
raw = Topic("raw", bytes)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are told to the log, which is not what is tested here."""
    caplog.set_level(logging.CRITICAL, "penstock")


def is_there(path: Path) -> bool:
    return path.exists()


def a_bus(**options: Any) -> Bus:
    return Bus("file:/nowhere/at/all", topics=[orders, raw], **options)


# --- whose bus it is --------------------------------------------------------------------------


async def test_a_bus_runs_on_memory_whatever_its_url_is_and_is_as_before_afterwards(root: Path) -> None:
    bus = Bus(f"file:{root}", topics=[raw])
    real = asyncio.Event()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None:
        if data == b"real":
            real.set()

    for data in (b"first", b"second"):
        async with harness(bus) as world:
            assert bus.url == "memory:"
            await bus.publish(raw, data)
            await world.drain()
            assert world.settled(read) == [data]
        assert not is_there(root)
        assert bus.url == f"file:{root}"
    async with bus:
        await bus.publish(raw, b"real")
        await real.wait()
    assert is_there(root)


async def test_a_closed_bus_can_be_tried_and_is_closed_again_afterwards() -> None:
    bus = Bus("memory:", topics=[raw])
    await bus.close()
    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        assert world.published(raw) == [b"1"]
    assert "closed" in repr(bus)


async def test_an_open_bus_is_refused_and_goes_on() -> None:
    async with Bus("memory:", topics=[raw]) as bus:
        with pytest.raises(UsageError, match="is open"):
            async with harness(bus):
                pass
        await bus.publish(raw, b"1")


async def test_a_bus_that_cannot_start_says_why_and_is_as_before() -> None:
    bus = a_bus()

    @bus.subscriber(orders, "billing", retry=Retry(delay=100))
    async def bill(order: Order) -> None: ...

    with pytest.raises(UsageError, match="backoff_seconds_max"):
        async with harness(bus):
            pass
    assert "new" in repr(bus)


async def test_no_task_is_left_behind_also_if_the_test_fails_while_a_handler_hangs() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "hanging")
    async def hang(data: bytes) -> None:
        await asyncio.Event().wait()

    before = asyncio.all_tasks()

    async def fail() -> None:
        async with harness(bus) as world:
            await bus.publish(raw, b"1")
            await world.advance(1)
            assert world.attempts(hang) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with harness(bus, chaos=1):
        await bus.publish(raw, b"1")
    assert asyncio.all_tasks() == before
    assert "new" in repr(bus)


async def test_a_function_that_is_no_handler_is_a_usage_error_that_names_those_there_are() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        with pytest.raises(UsageError, match=r"print is no handler of this bus; it has .*read"):
            world.settled(print)
        with pytest.raises(UsageError, match="no topic 'row'"):
            world.published("row")


# --- time -------------------------------------------------------------------------------------


async def test_retries_wait_on_the_virtual_clock_and_only_what_is_acked_is_settled() -> None:
    bus = a_bus()

    @bus.subscriber(orders, "billing", retry=Retry(max_retries=3, delay=50, max_delay=1000, jitter=0))
    async def bill(order: Order, delivery: Delivery[Order]) -> None:
        if order.number == 1 and delivery.attempt < 3:
            raise ValueError("not yet")

    async with harness(bus) as world:
        began = world.now
        for number in range(3):
            await bus.publish(orders, Order(number, f"customer {number}"))
        await world.drain()
        assert sorted(order.number for order in world.settled(bill)) == [0, 1, 2]
        assert world.settled(bill)[-1] == Order(1, "customer 1")
        assert world.now - began == timedelta(seconds=50 + 100)
        assert world.attempts(bill) == 5
        tries = [each for each in world.deliveries(bill) if each.value.number == 1]
        assert [(each.attempt, each.at, each.outcome) for each in tries] == [
            (1, 0.0, "failed"),
            (2, 50.0, "failed"),
            (3, 150.0, "returned"),
        ]
        assert str(tries[0].error) == "not yet"
        assert world.violations() == []


async def test_jitter_is_of_the_seed() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "billing", retry=Retry(max_retries=4, delay=10, max_delay=100, jitter=0.5))
    async def bill(data: bytes) -> None:
        raise ValueError

    times = []
    for _ in range(2):
        async with harness(bus) as world:
            await bus.publish(raw, b"1")
            await world.drain()
            times.append([each.at for each in world.deliveries(bill)])
    assert times[0] == times[1]


async def test_a_dead_letter_has_value_error_and_subscription_and_its_repr_has_no_payload() -> None:
    bus = a_bus()

    @bus.subscriber(orders, "billing")
    async def bill(order: Order) -> None:
        raise Reject("negative")

    async with harness(bus) as world:
        await bus.publish(orders, Order(7, "bob"))
        await world.drain()
        [dead] = world.dead
        assert (dead.value, dead.error, dead.subscription) == (Order(7, "bob"), "Reject: negative", "billing")
        assert "bob" not in repr(dead) + repr(world.deliveries(bill)) + repr(world)
        assert world.settled(bill) == []


async def test_a_delayed_publish_comes_when_it_is_due_and_not_before() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        await bus.publish(raw, b"in a year", delay=timedelta(days=365))
        await world.advance(timedelta(days=364.99))
        assert world.published(raw) == []
        await world.advance(timedelta(days=0.02))
        assert world.published(raw) == world.settled(read) == [b"in a year"]
        await bus.publish(raw, b"in two years", delay=timedelta(days=365))
        await world.drain()
        assert world.settled(read) == [b"in a year", b"in two years"]


async def test_what_handlers_publish_is_drained_too() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "down")
    async def down(data: bytes) -> None:
        if int(data):
            await bus.publish(raw, b"%d" % (int(data) - 1), delay=10)

    async with harness(bus) as world:
        await bus.publish(raw, b"3")
        await world.drain()
        assert world.published("raw") == [b"3", b"2", b"1", b"0"]


async def test_a_rate_and_a_long_heartbeat_are_waited_for() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "slowly", rate=0.005, heartbeat=3600)
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        for number in range(4):
            await bus.publish(raw, b"%d" % number)
        await world.drain()
        assert len(world.settled(read)) == 4


async def test_staged_events_are_moved_and_only_the_file_that_is_staged_into_is_touched(tmp_path: Path) -> None:
    bus = a_bus(outbox=tmp_path / "production.db")

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    for round_ in range(2):
        async with harness(bus) as world:
            connection = sqlite3.connect(tmp_path / "test.db")
            with connection:
                bus.stage(connection, raw, b"staged %d" % round_)
            await world.crash()  # what was staged does not depend on who moves it
            await world.drain()
            assert world.settled(read) == [b"staged %d" % round_]
            connection.close()
    assert not (tmp_path / "production.db").exists()
    async with harness(bus):
        with sqlite3.connect(":memory:") as memory, pytest.raises(UsageError, match="in memory"):
            bus.stage(memory, raw, b"never")
        memory.close()


async def test_a_bus_without_an_outbox_still_says_so(tmp_path: Path) -> None:
    bus = a_bus()
    async with harness(bus):
        connection = sqlite3.connect(tmp_path / "test.db")
        with pytest.raises(UsageError, match="has no outbox"):
            bus.stage(connection, raw, b"1")
        connection.close()


async def test_handlers_in_threads_and_ones_that_wait_outside_are_waited_for() -> None:
    bus = a_bus()
    gate = threading.Event()

    @bus.subscriber(raw, "threads")
    def in_thread(data: bytes) -> None:
        gate.wait(30)

    @bus.subscriber(raw, "outside")
    async def outside(data: bytes) -> None:
        await asyncio.to_thread(gate.wait, 30)

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        asyncio.get_running_loop().call_later(0.05, gate.set)
        await world.drain()
        assert world.settled(in_thread) == world.settled(outside) == [b"1"]


async def test_consumers_of_one_s_own_work_as_ever() -> None:
    bus = a_bus()
    async with harness(bus):
        await bus.publish(raw, b"1")
        async with bus.consume(raw, "mine", mode="exclusive") as consumer:
            async for delivery in consumer:
                assert delivery.value == b"1"
                await delivery.ack()
                break
            await consumer.flush()
        [lag] = await bus.lag(raw, "mine")
        assert lag.lag == 0


async def test_a_handler_that_acks_by_itself_is_settled_when_it_has() -> None:
    bus = a_bus()
    kept: list[Delivery[bytes]] = []

    @bus.subscriber(raw, "manually", ack="manual")
    async def keep(data: bytes, delivery: Delivery[bytes]) -> None:
        kept.append(delivery)

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        with pytest.raises(NotDrained, match="not settled: 1"):
            await world.drain()
        await kept[0].ack()
        await world.drain()
        assert world.settled(keep) == [b"1"]


# --- what never comes by itself ---------------------------------------------------------------


async def test_a_handler_that_hangs_is_named_and_its_timeout_ends_it_when_time_passes() -> None:
    bus = a_bus()
    calm = asyncio.Event()

    @bus.subscriber(raw, "hanging", timeout=30, retry=Retry(max_retries=1))
    async def hang(data: bytes) -> None:
        await calm.wait()

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        with pytest.raises(NotDrained, match=r"within 0.05 s: .*handler .*hang runs, at raw/0@0, attempt 1"):
            await world.drain(timeout=0.05)
        await world.advance(30.5)
        assert [each.outcome for each in world.deliveries(hang)] == ["cut off"]
        calm.set()
        await world.drain()
        assert world.settled(hang) == [b"1"]


async def test_a_subscription_that_has_halted_is_named() -> None:
    bus = a_bus()
    broken = True

    @bus.subscriber(raw, "halting", exhausted="halt", retry=Retry(max_retries=1))
    async def halt(data: bytes) -> None:
        if broken:
            raise ValueError("broken")

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        with pytest.raises(NotDrained, match=r"never will be: subscriber 'halting' .*halted: at offset 0: ValueError"):
            await world.drain()
        broken = False
        await bus.resume(raw, "halting")
        await world.drain()
        assert world.settled(halt) == [b"1"]


async def test_a_paused_subscription_is_named() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "pausing")
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        await bus.pause(raw, "pausing")
        await world.advance(1)
        await bus.publish(raw, b"1")
        with pytest.raises(NotDrained, match="it is paused"):
            await world.drain()


async def test_a_lane_that_waits_for_an_upgrade_is_named() -> None:
    bus = a_bus()

    @bus.subscriber(orders, "billing")
    async def bill(order: Order) -> None: ...

    async with harness(bus) as world:
        newer = Event(type="harness.order", data=b"{}", key=b"ann", headers={"dataversion": b"2"})
        await bus.publish(orders, newer)
        await bus.publish(orders, Order(1, "ann"))
        await bus.publish(orders, Order(2, "bob"))
        with pytest.raises(NotDrained, match=r"orders/\d@0 waits for an upgrade"):
            await world.drain()
        assert [order.number for order in world.settled(bill)] == [2]


async def test_a_handler_that_puts_off_for_ever_ends_in_an_error() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "later")
    async def later(data: bytes) -> None:
        raise RetryLater(60, counted=False)

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        with pytest.raises(NotDrained, match=r"within 0.5 s: .*(aside|settled)"):
            await world.drain(timeout=0.5)


# --- faults on demand -------------------------------------------------------------------------


async def test_a_publish_that_fails_is_unknown_and_sending_it_again_makes_no_duplicate() -> None:
    bus = a_bus()
    async with harness(bus) as world:
        for written in (False, True):
            world.fail("publish", written=written)
            with pytest.raises(PublishUnknown) as unknown:
                await bus.publish(raw, b"written" if written else b"not written")
            receipt = await unknown.value.prepared.send()
            assert receipt.duplicate is written
        world.fail("schedule")
        with pytest.raises(PublishUnknown):
            await bus.publish(raw, b"later", delay=1)
        await world.drain()
        assert world.published(raw) == [b"not written", b"written"]


@pytest.mark.parametrize(("written", "handled"), [(False, 2), (True, 1)])
async def test_what_a_failed_commit_has_not_written_is_handled_again(written: bool, handled: int) -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        world.fail("commit", written=written)
        await bus.publish(raw, b"1")
        await world.drain()
        assert (world.settled(read), world.attempts(read)) == ([b"1"], handled)


async def test_reads_that_fail_are_repeated() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        world.fail("read", 3)
        await bus.publish(raw, b"1")
        await world.drain()
        assert (world.settled(read), world.attempts(read)) == ([b"1"], 1)
        with pytest.raises(UsageError, match="what can fail is 'publish'"):
            world.fail("write")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="0 failures"):
            world.fail("read", 0)


async def test_without_notifications_heartbeats_find_everything() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading", heartbeat=7)
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        world.lose_notifications()
        await bus.publish(raw, b"1")
        await world.advance(6.9)
        assert world.attempts(read) == 0
        await world.advance(0.2)
        assert world.settled(read) == [b"1"]
        world.heal()
        await bus.publish(raw, b"2")
        await world.advance(0)
        assert world.settled(read) == [b"1", b"2"]


async def test_after_a_crash_what_was_in_flight_comes_again_and_what_was_settled_does_not() -> None:
    bus = a_bus()
    hold = asyncio.Event()
    ended: list[str] = []

    @bus.subscriber(orders, "billing")
    async def bill(order: Order) -> None:
        if order.number == 2:
            try:
                await hold.wait()
            except asyncio.CancelledError:
                ended.append("cut off")
                raise

    async with harness(bus) as world:
        await bus.publish(orders, Order(1, "ann"))
        await world.drain()
        await bus.publish(orders, Order(2, "bob"))
        await world.advance(0)
        await world.crash()
        hold.set()
        await world.drain()
        assert ended == ["cut off"]
        assert world.settled(bill) == [Order(1, "ann"), Order(2, "bob")]
        handled = [(each.value.number, each.outcome) for each in world.deliveries(bill)]
        assert handled == [(1, "returned"), (2, "cut off"), (2, "returned")]
        assert world.violations() == []


async def test_a_crash_writes_nothing_and_a_handler_in_a_thread_ends_before_the_next_life() -> None:
    bus = a_bus()
    running: list[bytes] = []
    together = 0
    gate, begun = threading.Event(), threading.Event()

    @bus.subscriber(raw, "threads", checkpoint="each")
    def slow(data: bytes) -> None:
        nonlocal together
        running.append(data)
        together = max(together, len(running))
        begun.set()
        gate.wait(30)
        running.remove(data)

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        await world.advance(0)
        await asyncio.to_thread(begun.wait, 30)
        asyncio.get_running_loop().call_later(0.05, gate.set)
        await world.crash()
        await world.drain()
        assert together == 1
        assert world.settled(slow) == [b"1"]
        assert world.attempts(slow) == 2


async def test_attempts_and_dead_letters_outlive_a_crash() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "failing", retry=Retry(max_retries=1, delay=100, max_delay=100))
    async def fail(data: bytes) -> None:
        raise ValueError(data.decode())

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        await world.advance(1)
        await world.crash()
        await world.drain()
        assert [each.attempt for each in world.deliveries(fail)] == [1, 2]
        await world.crash()
        [dead] = world.dead
        assert (dead.value, dead.error, dead.attempts) == (b"1", "ValueError: 1", 2)


# --- chaos ------------------------------------------------------------------------------------

SEEDS = range(8)


def a_bus_of_all_modes(told: list[object]) -> Bus:
    bus = a_bus()

    def declare(name: str, mode: Any) -> None:
        @bus.subscriber(orders, name, mode=mode, retry=Retry(max_retries=0))
        async def handle(order: Order) -> None:
            told.append((name, order.number, "begins"))
            for _ in range(order.number % 4):
                await asyncio.sleep(0)
            if name == "key_shared" and order.number % 5 == 0:
                await bus.publish(raw, b"%d" % order.number)
            told.append((name, order.number, "ends"))

    for mode in ("key_shared", "exclusive", "failover", "shared"):
        declare(mode, mode)

    @bus.subscriber(raw, "second")
    async def second(data: bytes) -> None:
        told.append(("second", data))

    return bus


async def run_chaos(seed: int) -> tuple[World, list[object]]:
    told: list[object] = []
    bus = a_bus_of_all_modes(told)
    async with harness(bus, chaos=seed) as world:
        for number in range(12):
            await bus.publish(orders, Order(number, f"customer {number % 5}"))
        await world.drain()
    return world, told


@pytest.mark.parametrize("seed", SEEDS)
async def test_in_chaos_every_event_is_settled_once_in_order_and_no_attempt_is_used_up(seed: int) -> None:
    told: list[object] = []
    bus = a_bus_of_all_modes(told)
    async with harness(bus, chaos=seed) as world:
        for number in range(12):
            await bus.publish(orders, Order(number, f"customer {number % 5}"))
        await world.drain()
        assert world.faults
        assert world.dead == []
        assert world.violations() == []
        for subscriber in world._watching.subscribers.values():
            [handler] = subscriber.handlers
            settled = world.settled(handler.function)
            if subscriber.topic is orders:
                assert sorted(order.number for order in settled) == list(range(12))
            else:
                assert set(settled) == {b"0", b"5", b"10"}


async def test_the_same_seed_is_the_same_run_and_another_one_another() -> None:
    runs = [await run_chaos(seed) for seed in (3, 3, 4)]
    assert runs[0][0].faults == runs[1][0].faults != runs[2][0].faults
    assert runs[0][1] == runs[1][1] != runs[2][1]
    assert runs[0][0].now == runs[1][0].now


async def test_seeds_bring_every_kind_of_fault() -> None:
    seen = {fault.kind for seed in SEEDS for fault in (await run_chaos(seed))[0].faults}
    assert seen == set(Kind) - {Kind.TWICE, Kind.CUT}


async def test_chaos_shows_that_a_handler_is_not_idempotent() -> None:
    bus = a_bus()
    sums: dict[str, int] = {}

    @bus.subscriber(orders, "summing")
    async def add(order: Order) -> None:
        sums[order.customer] = sums.get(order.customer, 0) + order.number

    found = []
    for seed in range(20):
        sums.clear()
        async with harness(bus, chaos=seed) as world:
            await bus.publish(orders, Order(10))
            await world.drain()
            assert world.settled(add) == [Order(10)]
            if sums != {"ann": 10}:
                found.append(seed)
                assert world.attempts(add) > 1
                assert {fault.kind for fault in world.faults} & CRASHES
    assert found


def at(kind: Kind, number: int, **more: Any) -> Fault:
    return Fault(kind=kind, topic="raw", partition=0, offset=number, **more)


@pytest.mark.parametrize(
    ("kind", "more", "handled"),
    [
        (Kind.CRASH_INSIDE, {"step": 2}, 2),
        (Kind.CRASH_INSIDE, {"step": 9}, 1),
        (Kind.CRASH_AFTER, {}, 2),
        (Kind.SLOW, {"seconds": 5.0}, 1),
    ],
)
async def test_each_fault_happens_where_it_is_planned_and_is_remembered_if_it_did(
    kind: Kind, more: dict[str, Any], handled: int
) -> None:
    bus = a_bus()
    steps: list[int] = []

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None:
        for step in range(3):
            steps.append(step)
            await asyncio.sleep(0)

    fault = at(kind, 1, subscription="reading", **more)
    async with world_of(bus, Script([fault]), 0) as world:
        for number in range(3):
            await bus.publish(raw, b"%d" % number)
        await world.drain()
        happened = handled == 2 or kind is Kind.SLOW
        assert world.faults == ([fault] if happened else [])
        assert [each.position.offset for each in world.deliveries(read)].count(1) == handled
        assert world.settled(read) == [b"0", b"1", b"2"]
        if kind is Kind.CRASH_INSIDE and happened:
            assert steps == [0, 1, 2, 0, 1, 0, 1, 2, 0, 1, 2]


async def test_the_judge_tells_what_was_lost() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        await bus.publish(raw, b"2")
        await world.drain()
        assert world.violations() == []
        del world._medium.settled[0]
        assert {violation.invariant for violation in world.violations()} == {"I7"}
