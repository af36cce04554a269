"""The harness: an application's own bus in a world where time, the store and every fault are the test's."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from tests.harness_bus import Order, a_bus, orders, raw

from penstock import Bus, Checkpoint, Delivery, Event, Reject, Retry, RetryLater
from penstock.errors import NotDrained, UsageError
from penstock.testing import harness

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are told to the log, which is not what is tested here."""
    caplog.set_level(logging.CRITICAL, "penstock")


def is_there(path: Path) -> bool:
    return path.exists()


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

    @bus.subscriber(orders, "billing", start=5)
    async def bill(order: Order) -> None: ...

    with pytest.raises(UsageError, match="has 2 partitions"):
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


async def test_what_became_durable_together_is_settled_in_the_order_in_which_handlers_ended() -> None:
    bus = a_bus()
    second = asyncio.Event()

    @bus.subscriber(raw, "together", checkpoint=Checkpoint(size=2, delay=1000))
    async def handle(data: bytes) -> None:
        if data == b"1":
            await second.wait()
        second.set()

    async with harness(bus) as world:
        await bus.publish(raw, b"1", key="ann")
        await bus.publish(raw, b"2", key="bob")
        await world.drain()
        assert world.settled(handle) == [b"2", b"1"]


async def test_a_delivery_can_be_kept_for_as_long_as_time_passes() -> None:
    bus = a_bus()
    kept: list[Delivery[bytes]] = []

    @bus.subscriber(raw, "keeping", ack="manual")
    async def keep(data: bytes, delivery: Delivery[bytes]) -> None:
        kept.append(delivery)

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        await world.advance(timedelta(days=1000))
        assert len(kept) == 1
        await kept[0].ack()
        await world.drain()
        assert world.settled(keep) == [b"1"]


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
        with pytest.raises(NotDrained, match=r"never will be: .*orders/\d@0 waits for an upgrade"):
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
