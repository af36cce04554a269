"""How consumers, buses and handlers end: never half, whoever loses patience meanwhile, and whatever handlers do."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.deliveries import World, acked, kept, wide
from tests.shop import Placed, placed

from penstock import Bus, Delivery, Reject, Retry, Topic
from penstock.bus import handling
from penstock.errors import StoreUnavailable, UsageError
from penstock.settings import DeliverySettings, Settings
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from penstock.stores.file.store import FileStore

Mode = Literal["failover", "key_shared", "shared"]

DRAIN_SECONDS = 3.0


async def cut_off(work: Awaitable[Any], turns: int) -> None:
    """Begin with something, and cancel it after so many turns of the event loop."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


# --- consumers and buses ----------------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 5, 7, 10, 15])
@pytest.mark.parametrize("mode", ["failover", "key_shared", "shared"])
@pytest.mark.parametrize("what", ["consumer", "bus"])
async def test_a_close_that_is_cut_off_keeps_nothing_from_others(
    world: World, what: str, mode: Mode, turns: int
) -> None:
    one, other = world.bus(), world.bus()
    async with world.running(one.consume(wide, "s", mode=mode), kept) as first:
        for number in range(20):
            await world.publish(other, b"%d" % number, topic=wide, key=b"k%d" % number)
        await world.until(lambda: first.taken)
        await cut_off(one.close() if what == "bus" else first.consumer.close(), turns)
        async with world.running(other.consume(wide, "s", mode=mode), acked) as second:
            await world.until(lambda: len(set(second.data)) == 20, within=5)


@pytest.mark.parametrize("turns", [1, 2, 4, 6, 9, 13, 20, 30])
@pytest.mark.parametrize("mode", ["failover", "key_shared", "shared"])
async def test_a_consumer_whose_joining_is_cut_off_keeps_nothing_from_others(
    world: World, mode: Mode, turns: int
) -> None:
    one, other = world.bus(), world.bus()
    for number in range(20):
        await world.publish(other, b"%d" % number, topic=wide, key=b"k%d" % number)
    async with world.running(one.consume(wide, "t")):  # so that this process goes on
        consumer = one.consume(wide, "s", mode=mode)
        await cut_off(consumer.__aenter__(), turns)
        if consumer._member is not None:
            await world.done(consumer.close())  # it was quicker than that
        async with world.running(other.consume(wide, "s", mode=mode), acked) as running:
            await world.until(lambda: len(set(running.data)) == 20, within=5)


async def test_whoever_closes_again_waits_for_what_was_cut_off(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(wide, "s")):
        await world.settle()
        answered = world.hold(bus, "release_some")
        await cut_off(bus.close(), 50)
        again = asyncio.ensure_future(bus.close())
        await world.settle()
        assert not again.done()
        answered.set()
        await world.done(again)
    assert world.store.whole.leases.held("") == []


async def test_a_consumer_that_cannot_join_leaves_nothing_behind(world: World) -> None:
    bus = world.bus()
    async with world.running(bus.consume(wide, "s")):
        await world.settle()
        dispatcher = world.dispatcher(bus)
        before = len(dispatcher.members)
        world.store.fail("leases.acquire", StoreUnavailable("not now"))
        for _ in range(5):
            with pytest.raises(StoreUnavailable):
                await world.done(bus.consume(wide, "t").__aenter__())
        assert len(dispatcher.members) == before


async def test_a_bus_whose_opening_is_cut_off_leaves_no_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, opened, closed = threading.Event(), threading.Event(), threading.Event()
    real = open_store

    def slow(*arguments: Any, **options: Any) -> Any:
        opening.set()
        assert opened.wait(30)
        store: FileStore = real(*arguments, **options)  # type: ignore[assignment]
        close = store.close

        def closing() -> None:
            close()
            closed.set()

        monkeypatch.setattr(store, "close", closing)
        return store

    monkeypatch.setattr("penstock.bus.local.open_store", slow)
    bus = Bus(f"file:{tmp_path}", topics=[wide])
    task = asyncio.create_task(bus.open())
    await asyncio.to_thread(opening.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    opened.set()
    assert await asyncio.to_thread(closed.wait, 30)
    await bus.close()


async def test_a_publisher_whose_close_is_cut_off_is_waited_for_by_its_bus(world: World) -> None:
    bus = world.bus()
    await world.done(bus.open())
    answered = world.hold(bus, "append")
    async with asyncio.timeout(None):
        publisher = bus.publisher(wide, max_events=2)
        await world.done(publisher.__aenter__())
        sent = [publisher.send(b"%d" % number, key=b"k") for number in range(10)]
        await cut_off(publisher.close(), 20)
        closing = asyncio.ensure_future(bus.close())
        await world.settle()
        assert not closing.done()
        answered.set()
        await world.done(closing)
    assert len({(await receipt).position for receipt in sent}) == 10


# --- subscribers ------------------------------------------------------------------------------


def bus_of(world: World) -> Bus:
    """Return a bus that drains for a short while."""
    bus = world.bus(placed)
    bus._subscribers.drain_seconds = DRAIN_SECONDS
    return bus


async def began(world: World, bus: Bus, *orders: Placed) -> None:
    """Let a bus run its subscribers, and give them something to do."""
    await world.done(bus.__aenter__())
    bus._subscribers.drain_seconds = DRAIN_SECONDS
    await bus.publish_batch(placed, list(orders))
    await world.settle()


async def test_tasks_that_open_a_bus_at_once_run_its_subscribers_once(world: World) -> None:
    bus = bus_of(world)
    running: list[int] = []
    most: list[int] = []

    @bus.subscriber(placed, "s", concurrency=1)
    async def handle(order: Placed) -> None:
        running.append(order.number)
        most.append(len(running))
        await world.clock.pause(1)
        running.remove(order.number)

    await asyncio.gather(*(world.done(bus.__aenter__()) for _ in range(3)))
    await bus.publish_batch(placed, [Placed(name, 1) for name in "abcdef"])
    await world.run(10)
    assert most == [1] * 6


async def test_a_handler_that_does_not_let_itself_be_cancelled_is_left_behind_and_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bus, let_go = bus_of(world), asyncio.Event()

    @bus.subscriber(placed, "s")
    async def stubborn(order: Placed) -> None:
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()

    await began(world, bus, Placed("a", 1))
    await world.done(bus.close(), within=DRAIN_SECONDS + handling.STUBBORN_SECONDS + 2)
    assert "stubborn was cancelled, and runs on; it is left behind, since this process ends" in caplog.text
    assert world.outcomes("s", topic=placed) == {}
    let_go.set()
    await world.settle()
    assert world.outcomes("s", topic=placed) == {}, "what it had is somebody else's by then"


async def test_an_error_made_of_the_cancellation_is_not_counted_when_the_process_ends(world: World) -> None:
    bus = bus_of(world)

    @bus.subscriber(placed, "s", retry=Retry(max_retries=0))
    async def interrupted(order: Placed) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if order.number == 2:
                raise Reject("no use") from None
            raise ConnectionError("the call was interrupted") from None

    await began(world, bus, Placed("a", 1), Placed("b", 2))
    await world.done(bus.close(), within=DRAIN_SECONDS + 2)
    rows = world.rows("s", "dead", topic=placed)
    assert [(row.offset, row.error_type) for row in rows] == [(1, "Reject")]
    assert world.outcomes("s", topic=placed).get("acked") is None


async def test_an_error_made_of_a_timeout_is_that_timeout(world: World) -> None:
    bus = bus_of(world)

    @bus.subscriber(placed, "s", timeout=1, retry=Retry(max_retries=0))
    async def interrupted(order: Placed) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("the call was interrupted") from None

    await began(world, bus, Placed("a", 1))
    await world.run(3)
    assert [row.error_type for row in world.rows("s", "dead", topic=placed)] == ["HandlerTimeout"]


async def test_a_handler_that_closes_its_own_bus_is_told_that_it_would_wait_for_itself(world: World) -> None:
    bus = bus_of(world)
    told: list[BaseException] = []

    @bus.subscriber(placed, "s")
    async def ends(order: Placed) -> None:
        try:
            await bus.close()
        except UsageError as error:
            told.append(error)

    await began(world, bus, Placed("a", 1))
    await world.run(1)
    assert [str(error).partition(":")[0] for error in told] == [
        "a handler of subscriber 's' of topic 'placed' cannot close the bus that runs it"
    ]
    assert world.outcomes("s", topic=placed) == {"acked": [0]}


async def test_a_bus_is_refused_to_another_event_loop_while_its_own_runs(tmp_path: Path) -> None:
    topic = Topic("t", bytes)
    async with Bus(f"file:{tmp_path}", topics=[topic]) as bus:
        await bus.publish(topic, b"0")

        def elsewhere(work: Callable[[], Awaitable[Any]]) -> BaseException | None:
            async def tried() -> None:
                await work()

            with pytest.raises(UsageError, match="in another event loop"):
                asyncio.run(tried())
            return None

        for work in (
            lambda: bus.publish(topic, b"1"),
            lambda: bus.publish_batch(topic, [b"1"]),
            lambda: bus.lag(topic),
            bus.open,
        ):
            await asyncio.to_thread(elsewhere, work)
        assert [event.data async for event in bus.read(topic)] == [b"0"]


def test_a_bus_that_is_open_goes_on_in_the_next_event_loop_when_its_own_has_ended() -> None:
    topic = Topic("t", bytes)
    bus = Bus("memory:", topics=[topic], settings=Settings(delivery=DeliverySettings()))

    async def read() -> list[bytes]:
        return [event.data async for event in bus.read(topic)]

    asyncio.run(bus.publish(topic, b"0"))
    asyncio.run(bus.publish(topic, b"1"))
    assert asyncio.run(read()) == [b"0", b"1"]
    asyncio.run(bus.close())


# --- one event and the next -------------------------------------------------------------------

request: ContextVar[int] = ContextVar("request", default=0)


class Incomparable:
    """What does not let itself be compared, as columns of numbers do not."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("which of them?")

    __hash__ = None  # type: ignore[assignment] # what has no equality has no hash


anything: ContextVar[Any] = ContextVar("anything", default=None)


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("in_loop", [True, False])
async def test_what_a_handler_sets_in_its_context_is_for_its_event_alone(
    world: World, in_loop: bool, concurrency: int
) -> None:
    bus, seen = bus_of(world), list[Any]()

    def note(order: Placed) -> None:
        seen.append((order.number, request.get(), anything.get(), outer.get()))
        if order.number % 3:
            request.set(order.number)
            anything.set(Incomparable())

    async def handle(order: Placed) -> None:
        note(order)
        await asyncio.sleep(0)
        assert request.get() == (order.number if order.number % 3 else 0)

    outer: ContextVar[str] = ContextVar("outer")
    outer.set("the bus's")
    bus.subscriber(placed, "s", concurrency=concurrency)(handle if in_loop else note)
    orders = [Placed(name, number) for number in range(6) for name in "abc"]
    await began(world, bus, *orders)
    while len(seen) < len(orders):  # some of it is done by threads, which no clock of the world moves
        await world.run(0.1)
    await world.run(5)
    assert sorted(seen) == sorted((order.number, 0, None, "the bus's") for order in orders)
    assert world.outcomes("s", topic=placed) == {"acked": list(range(len(orders)))}


async def test_a_lane_waits_for_its_thread_although_middleware_has_given_up(world: World) -> None:
    began_at, let_go = list[int](), threading.Event()

    async def impatient(delivery: Delivery[Any], proceed: Callable[[], Awaitable[None]]) -> None:
        called = asyncio.ensure_future(proceed())
        try:
            await world.clock.pause(1)
            if not called.done():
                raise TimeoutError("too long")
        finally:
            called.cancel()

    bus = bus_of(world)

    @bus.subscriber(placed, "s", middleware=[impatient], retry=Retry(max_retries=1, delay=1, jitter=0))
    def handle(order: Placed) -> None:
        began_at.append(order.number)
        if order.number == 1:
            assert let_go.wait(30)

    await began(world, bus, Placed("a", 1), Placed("a", 2))
    while not began_at:
        await world.run(0.1)
    await world.run(20)
    assert began_at == [1], "neither the next attempt nor the next event of the lane"
    let_go.set()
    while len(began_at) < 3:
        await world.run(0.1)
    assert began_at == [1, 1, 2]
