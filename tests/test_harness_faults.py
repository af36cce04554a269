"""What goes wrong in the harness: on demand, by death, and by a seed; and that the same seed is the same run."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from typing import Any

import pytest
from tests.harness_bus import Order, a_bus, orders, raw

from penstock import Bus, Retry, Topic
from penstock.errors import PenstockError, PublishUnknown, UsageError
from penstock.testing import World, harness
from penstock.testing.worlds.faults import CRASHES, Fault, Kind, Script
from penstock.testing.worlds.world import world_of


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are told to the log, which is not what is tested here."""
    caplog.set_level(logging.CRITICAL, "penstock")


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


async def test_a_handler_that_ends_in_its_thread_while_its_process_dies_is_given_no_fault() -> None:
    bus = a_bus()
    begun, gate, hold = threading.Event(), threading.Event(), asyncio.Event()

    @bus.subscriber(raw, "threads")
    def slow(data: bytes) -> None:
        begun.set()
        gate.wait(30)

    @bus.subscriber(raw, "witness")
    async def see_death(data: bytes) -> None:
        try:
            await hold.wait()
        finally:
            gate.set()  # not before the process is dying

    fault = at(Kind.CRASH_AFTER, 0, subscription="threads")
    async with asyncio.timeout(20), world_of(bus, Script([fault]), 0) as world:
        await bus.publish(raw, b"1")
        await world.advance(0)
        await asyncio.to_thread(begun.wait, 30)
        await world.crash()
        hold.set()
        await world.drain()
        assert world.settled(slow) == [b"1"]
        assert [call.outcome for call in world.deliveries(slow)] == ["returned", "returned"]
        assert world.faults == []


async def test_the_dead_publish_nothing() -> None:
    bus = a_bus()
    hold = asyncio.Event()
    refused: list[str] = []

    @bus.subscriber(raw, "clinging")
    async def cling(data: bytes) -> None:
        try:
            await hold.wait()
        except asyncio.CancelledError:
            try:
                await bus.publish(orders, Order(1))
            except PenstockError as error:
                refused.append(type(error).__name__)
            raise

    async with harness(bus) as world:
        await bus.publish(raw, b"1")
        await world.advance(0)
        await world.crash()
        hold.set()
        await world.drain()
        assert refused == ["StoreClosed"]
        assert world.published(orders) == []
        assert world.settled(cling) == [b"1"]


async def test_when_something_is_tried_again_after_a_failure_is_of_the_seed() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    async def read(data: bytes) -> None: ...

    times = []
    for _ in range(2):
        async with harness(bus) as world:
            await bus.publish(raw, b"1", delay=10)
            world.fail("publish", 3)
            await world.drain()
            times.append([each.at for each in world.deliveries(read)])
    assert times[0] == times[1]
    assert times[0][0] > 11


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


async def test_the_same_seed_puts_delayed_events_without_a_key_where_they_were() -> None:
    spread = Topic("spread", bytes, partitions=7)
    bus = Bus("file:/nowhere/at/all", topics=[spread])

    @bus.subscriber(spread, "reading")
    async def read(data: bytes) -> None:
        await asyncio.sleep(0)

    async def positions(seed: int) -> list[object]:
        async with harness(bus, chaos=seed) as world:
            at = world.now + timedelta(hours=1)
            for number in range(6):
                # Some of one moment are of several lives, and are ordered all the same.
                await bus.publish(spread, b"%d" % number, at=at)
                if number % 2:
                    await world.crash()
            await world.drain()
            places = {call.value: call.position for call in world.deliveries(read)}
            assert len({place.partition for place in places.values()}) == 6, "they go round"
            return [places, world.faults, world.settled(read), world.now]

    runs = [await positions(3) for _ in range(4)]
    assert runs == [runs[0]] * 4


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


@pytest.mark.parametrize(
    ("kind", "more", "handled"),
    [
        (Kind.CRASH_AFTER, {}, 2),
        (Kind.CRASH_INSIDE, {"step": 1}, 1),  # nothing can end a thread in its middle
        (Kind.SLOW, {"seconds": 5.0}, 1),
    ],
)
async def test_a_process_dies_around_a_handler_in_a_thread_too(kind: Kind, more: dict[str, Any], handled: int) -> None:
    bus = a_bus()

    @bus.subscriber(raw, "reading")
    def read(data: bytes) -> None:
        """Do nothing, in a thread."""

    fault = at(kind, 1, subscription="reading", **more)
    async with world_of(bus, Script([fault]), 0) as world:
        for number in range(3):
            await bus.publish(raw, b"%d" % number)
        await world.drain()
        assert world.faults == ([] if kind is Kind.CRASH_INSIDE else [fault])
        assert [each.position.offset for each in world.deliveries(read)].count(1) == handled
        assert world.settled(read) == [b"0", b"1", b"2"]


async def test_a_handler_that_is_late_is_not_begun_in_its_thread_by_the_dead() -> None:
    bus = a_bus()
    called: list[bytes] = []

    @bus.subscriber(raw, "late")
    def late(data: bytes) -> None:
        called.append(data)

    async with world_of(bus, Script([at(Kind.SLOW, 0, subscription="late", seconds=5.0)]), 0) as world:
        await bus.publish(raw, b"0")
        await world.advance(1)
        await world.crash()
        await world.drain()
        assert (called, world.settled(late)) == ([b"0"], [b"0"]), "only in the next life"


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
