"""Publishers of `bus.publisher` in the harness: nobody waits for one in vain, and an outage takes its time."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

import pytest
from tests.harness_bus import Order, a_bus, orders, raw

from penstock import Retry
from penstock.errors import BusClosed, NotDrained, PublishUnknown
from penstock.testing import World, harness

FOR_EVER = 1_000_000
TEST_SECONDS = 20
"""Of real time: what hangs fails by then."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Faults are told to the log, which is not what is tested here."""
    caplog.set_level(logging.CRITICAL, "penstock")


async def test_what_was_sent_is_stored_while_a_test_awaits_its_receipt_and_no_time_passes_for_that() -> None:
    bus = a_bus()
    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world, bus.publisher(raw, linger=60) as publisher:
        before = world.now
        receipt = await publisher.send(b"1")
        assert receipt.position.offset == 0
        assert (world.published(raw), world.now) == ([b"1"], before)


@pytest.mark.parametrize("how", ["drain", "advance"])
async def test_what_a_publisher_has_taken_is_something_left_to_do(how: str) -> None:
    bus = a_bus()
    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world:
        world.fail("publish", 2)
        await bus.publisher(raw).put(b"1")
        await (world.drain() if how == "drain" else world.advance(10))
        assert world.published(raw) == [b"1"]


@pytest.mark.parametrize("failures", [1, 3])
async def test_a_publish_that_fails_is_sent_again_while_a_test_only_waits_for_it(failures: int) -> None:
    bus = a_bus()
    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world:
        world.fail("publish", failures)
        async with bus.publisher(raw) as publisher:
            publisher.send(b"1")
        assert world.published(raw) == [b"1"]
        world.fail("publish", failures)
        async with bus.publisher(raw) as publisher:
            await publisher.send(b"2")
            assert world.published(raw) == [b"1", b"2"]


async def test_a_publisher_sends_again_at_its_times_and_not_before() -> None:
    bus = a_bus()
    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world:
        world.fail("publish", 2)
        await bus.publisher(raw).put(b"1")
        await world.advance(0.149)  # it is tried after 0.05 s, and 0.1 s later
        assert world.published(raw) == []
        await world.advance(0.002)
        assert world.published(raw) == [b"1"]


async def test_an_outage_is_over_when_it_is_healed_and_a_publisher_gives_up_if_it_is_not() -> None:
    bus = a_bus()
    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world, bus.publisher(orders, retry_for=30) as publisher:
        world.fail("publish", FOR_EVER)
        sent = [publisher.send(Order(number, f"customer {number}")) for number in range(6)]
        began = world.now
        await world.advance(20)
        assert (world.published(orders), world.now) == ([], began + timedelta(seconds=20))
        world.heal()
        assert sorted([(await each).position.partition for each in sent])[::5] == [0, 1]
        world.fail("publish", FOR_EVER)
        began = world.now
        with pytest.raises(PublishUnknown):
            await publisher.send(Order(7))
        assert timedelta(seconds=28) < world.now - began <= timedelta(seconds=30)


async def test_a_handler_waits_for_its_publisher_and_an_outage_may_cost_it_its_time() -> None:
    bus = a_bus()

    @bus.subscriber(raw, "forwarding", timeout=10, retry=Retry(max_retries=0))
    async def forward(data: bytes) -> None:
        async with bus.publisher(orders) as publisher:
            await publisher.send(Order(int(data)))

    async def handled(data: bytes, failures: int) -> str:
        started = world.attempts(forward)
        await bus.publish(raw, data)
        world.fail("publish", failures)
        await world.drain()
        world.heal()
        [call] = world.deliveries(forward)[started:]
        return call.outcome

    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world:
        assert await handled(b"1", 3) == "returned"
        assert world.published(orders) == [Order(1)]
        assert await handled(b"2", FOR_EVER) == "cut off"
        assert [dead.value for dead in world.dead] == [b"2"]


async def test_what_cannot_be_drained_names_publishers_that_wait() -> None:
    bus = a_bus()
    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world:
        world.fail("publish", FOR_EVER)
        publisher = bus.publisher(raw, retry_for=timedelta(days=1000))
        await publisher.put(b"1")
        with pytest.raises(NotDrained, match="publishers that wait to send again what failed: 1"):
            await world.drain(timeout=0.1)
        world.heal()


async def test_a_crash_takes_along_what_a_publisher_has_not_stored_and_says_nothing_of_it() -> None:
    bus = a_bus()

    async def die(world: World, failures: int) -> None:
        publisher = bus.publisher(raw)
        world.fail("publish", failures)
        await publisher.put(b"1")
        await world.advance(0)
        await world.crash()
        world.heal()
        await world.drain()
        assert world.published(raw) == []
        with pytest.raises(BusClosed):
            await publisher.put(b"2")

    async with asyncio.timeout(TEST_SECONDS), harness(bus) as world:
        for failures in (1, FOR_EVER):
            await die(world, failures)
        async with bus.publisher(raw) as another:
            await another.send(b"3")
        assert world.published(raw) == [b"3"]
