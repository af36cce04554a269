"""Handlers that are declared with a bus: what they are given, what they say, and how they end."""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import threading
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from tests.deliveries import World, raw
from tests.shop import Paid, Placed, orders, placed

import penstock
from penstock import Bus, Delivery, Event, Reject, Retry, RetryLater, Topic
from penstock.bus import handling
from penstock.bus.middleware.dedupe import Dedupe
from penstock.bus.subscribers import ConsumeOptions
from penstock.errors import (
    InvalidName,
    SubscriptionBusy,
    TopicDeleted,
    UnknownSubscription,
    UnknownTopic,
    UsageError,
)
from penstock.settings import DeliverySettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock.bus.middleware import Proceed


class Base:
    """What both are to somebody."""


def orders_of(*texts: str) -> list[Placed]:
    """Return `a1` as the first order of customer a, and so on."""
    return [Placed(text[0], int(text[1:])) for text in texts]


class Seen:
    """What a handler was given, and what it did about it."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.attempts: list[int] = []
        self.running = 0
        self.most = 0

    async def take(self, value: Any, delivery: Delivery[Any]) -> None:
        self.values.append(value)
        self.attempts.append(delivery.attempt)


async def began(world: World, bus: Bus) -> Bus:
    """Let a bus run its subscribers; the world closes it."""
    await world.done(bus.__aenter__())
    return bus


async def caught_up(bus: Bus, name: str) -> None:
    """Return when a subscription of a bus on the system's clock has settled everything."""
    while (await bus.lag(placed, name))[0].lag:  # noqa: ASYNC110 - progress is the store's, and tells nobody
        await asyncio.sleep(0)


# --- what a handler may look like -------------------------------------------------------------


class Called:
    async def __call__(self, order: Placed) -> None:
        """Take an order."""

    async def method(self, order: Placed, delivery: Delivery[Placed]) -> None:
        """Take an order, and its delivery."""


async def takes_delivery(delivery: Delivery[Placed]) -> None:
    """Take the delivery alone."""


def blocking(order: Placed, *, times: int = 1) -> None:
    """Run in a thread."""


@pytest.mark.parametrize(
    "function",
    [
        Called(),
        Called().method,
        takes_delivery,
        blocking,
        functools.partial(blocking, times=2),
        lambda order: None,
        lambda order, delivery: None,
    ],
)
def test_anything_that_takes_an_event_is_a_handler(function: Callable[..., Any]) -> None:
    bus = Bus("memory:", topics=[placed])
    assert bus.subscriber(placed, "s")(function) is function


async def endless(order: Placed) -> Any:
    yield order


async def of_nothing() -> None:
    """Take nothing."""


async def of_three(order: Placed, delivery: Delivery[Placed], more: int) -> None:
    """Take too much."""


async def of_any(*orders: Placed) -> None:
    """Take whatever comes."""


async def with_secret(order: Placed, *, secret: str) -> None:
    """Take what nobody gives."""


async def of_strangers(order: Base) -> None:
    """Take what the topic does not have."""


async def of_bytes(order: bytes) -> None:
    """Take plain bytes."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (endless, "handler endless yields"),
        (of_nothing, "takes 0 parameters"),
        (of_three, "takes 3 parameters"),
        (of_any, r"takes \*orders"),
        (with_secret, "'secret' that nobody gives"),
        (of_strangers, "takes Base, and topic 'placed' has Placed"),
        (of_bytes, "takes bytes, and topic 'placed' has Placed"),
        ("name", "is a function, not 'name'"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_when_it_is_declared(function: Any, message: str) -> None:
    bus = Bus("memory:", topics=[placed])
    with pytest.raises(UsageError, match=message):
        bus.subscriber(placed, "s")(function)


def test_a_handler_of_plain_bytes_takes_bytes() -> None:
    bus = Bus("memory:", topics=[raw])
    bus.subscriber(raw, "s")(of_bytes)
    with pytest.raises(UsageError, match="takes Base, and topic 'raw' has plain bytes"):
        bus.subscriber(raw, "t")(of_strangers)
    with pytest.raises(UsageError, match="two handlers of bytes"):
        bus.subscriber(raw, "s")(of_bytes)


def test_annotations_that_cannot_be_read_are_named() -> None:
    class Local:
        """Known to nobody else."""

    async def of_local(order: Local) -> None:
        """Take something local."""

    with pytest.raises(UsageError, match=r"annotations of handler .*of_local cannot be read"):
        Bus("memory:", topics=[placed]).subscriber(placed, "s")(of_local)


def test_a_subscriber_is_declared_once_for_each_class_and_its_options_are_said_once() -> None:
    bus = Bus("memory:", topics=[orders])

    @bus.subscriber(orders, "s", concurrency=4, timeout=30)
    async def first(order: Placed) -> None:
        """Take placed ones."""

    with pytest.raises(UsageError, match=r"two handlers of Placed: .*first and .*again"):

        @bus.subscriber(orders, "s")
        async def again(order: Placed) -> None:
            """Take them, too."""

    with pytest.raises(UsageError, match="has concurrency=4 already, not 8"):

        @bus.subscriber(orders, "s", concurrency=8)
        async def second(order: Paid) -> None:
            """Take paid ones."""

    with pytest.raises(UsageError, match="has timeout=30 already, not 60"):
        bus.subscriber(orders, "s", timeout=60)(lambda order: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"concurrency": True}, "concurrency is True"),
        ({"ack": "never"}, "ack is 'auto' or 'manual', not 'never'"),
        ({"retries": 3}, "there is no option 'retries'; did you mean 'retry'?"),
    ],
)
def test_wrong_options_of_a_subscriber_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Bus("memory:", topics=[raw]).subscriber(raw, "s", **options)(of_bytes)


def test_a_retry_that_is_only_a_number_is_told_what_it_is() -> None:
    with pytest.raises(UsageError, match=r"retry is a Retry, such as Retry\(max_retries=3\), not 3"):
        Bus("memory:", topics=[raw]).consume(raw, "s", retry=3)  # type: ignore[arg-type]


def test_names_of_subscriptions_and_topics_are_checked_when_they_are_declared() -> None:
    bus = Bus("memory:", topics=[raw])
    with pytest.raises(InvalidName):
        bus.subscriber(raw, "No Name")(of_bytes)
    with pytest.raises(UnknownTopic, match="did you mean 'raw'"):
        bus.subscriber("row", "s")
    with pytest.raises(UsageError, match="declared twice"):
        bus.subscriber(Topic("raw", bytes), "s")


def test_a_subscriber_has_every_option_that_a_consumer_has() -> None:
    options = inspect.signature(Bus.consume).parameters.values()
    theirs = {each.name: each.annotation for each in options if each.kind is each.KEYWORD_ONLY}
    ours = {name: hint.__forward_arg__ for name, hint in ConsumeOptions.__annotations__.items()}
    assert ours == theirs


async def test_a_topic_that_is_subscribed_to_is_declared() -> None:
    bus = Bus("memory:")
    came = asyncio.Event()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed) -> None:
        came.set()

    async with bus:
        await bus.publish("placed", Placed("a"))
        await asyncio.wait_for(came.wait(), 10)


async def test_a_class_without_a_handler_is_an_error_at_the_start() -> None:
    bus = Bus("memory:", topics=[orders])

    @bus.subscriber(orders, "s")
    async def handle(order: Placed) -> None:
        """Take placed ones."""

    with pytest.raises(UsageError, match="has no handler of Paid: add one, or say ignore_others=True"):
        await bus.__aenter__()
    with pytest.raises(penstock.errors.BusClosed):
        await bus.publish(orders, Paid("a"))


async def test_handlers_come_before_the_bus_runs_and_a_bus_without_any_has_nothing_to_run() -> None:
    bus = Bus("memory:", topics=[raw])
    with pytest.raises(UsageError, match="nothing to run"):
        await bus.run()
    bus.subscriber(raw, "s")(of_bytes)
    async with bus:
        with pytest.raises(UsageError, match="comes too late"):
            bus.subscriber(raw, "t")(of_bytes)


async def test_a_bus_that_is_only_opened_runs_no_handler(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    bus.subscriber(placed, "s")(seen.take)
    await bus.open()
    await bus.publish_batch(placed, orders_of("a1", "b1"))
    await world.run(5)
    assert seen.values == []


# --- what it says -----------------------------------------------------------------------------


async def test_returning_is_done_in_the_loop_and_in_threads() -> None:
    bus = Bus("memory:", topics=[placed])
    values: list[Placed] = []
    threads: set[threading.Thread] = set()
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @bus.subscriber(placed, "loop")
    async def in_loop(order: Placed) -> None:
        values.append(order)

    @bus.subscriber(placed, "threads", concurrency=3)
    def in_threads(order: Placed) -> None:
        threads.add(threading.current_thread())
        if order.number == 9:
            loop.call_soon_threadsafe(done.set)

    async with bus:
        await bus.publish_batch(placed, [Placed("a", number) for number in range(10)])
        await asyncio.wait_for(done.wait(), 10)
        await caught_up(bus, "loop")
        await caught_up(bus, "threads")
    assert [order.number for order in values] == list(range(10))
    assert threading.main_thread() not in threads
    assert 1 <= len(threads) <= 3


async def test_raising_is_tried_again_and_ends_as_a_dead_letter(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s", retry=Retry(max_retries=2, delay=1, jitter=0))
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        if order.number == 1:
            raise ValueError("not this one")

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b1", "b2"))
    await world.until(lambda: len(seen.values) == 8)
    await world.run(1)
    by_customer = {name: [order.number for order in seen.values if order.customer == name] for name in "ab"}
    assert by_customer == {"a": [1, 1, 1, 2], "b": [1, 1, 1, 2]}
    assert sorted(seen.attempts) == [1, 1, 1, 1, 2, 2, 3, 3]
    dead = world.rows("s", "dead", topic=placed)
    assert [(row.offset, row.error_type, row.error_message, row.attempts) for row in dead] == [
        (0, "ValueError", "not this one", 3),
        (2, "ValueError", "not this one", 3),
    ]


async def test_reject_is_a_dead_letter_at_once_and_what_is_behind_it_goes_on(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        if order.number == 1:
            raise Reject("never")

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "a3"))
    await world.until(lambda: len(seen.values) == 3, within=1)
    await world.run(1)
    [row] = world.rows("s", "dead", topic=placed)
    assert (row.offset, row.error_type, row.error_message, row.attempts) == (0, "Reject", "never", 1)
    assert world.outcomes("s", topic=placed) == {"dead": [0], "acked": [1, 2]}


async def test_retry_later_decides_when_and_is_counted_unless_told_otherwise(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    times: list[float] = []

    @bus.subscriber(placed, "s", retry=Retry(max_retries=1, delay=1, jitter=0))
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        times.append(world.clock.monotonic())
        if len(times) <= 4:
            raise RetryLater(20, "closed on sundays", counted=False)
        raise RetryLater(3)

    await began(world, bus)
    await bus.publish(placed, Placed("a", 1))
    await world.until(lambda: world.rows("s", "dead", topic=placed), within=200)
    assert seen.attempts == [1, 1, 1, 1, 1, 2]
    waits = [round(after - before) for before, after in pairwise(times)]
    assert waits == [20, 20, 20, 20, 3]
    [row] = world.rows("s", "dead", topic=placed)
    assert (row.error_type, row.error_message, row.attempts) == ("RetryLater", "to be tried again in 3 s", 2)


async def test_each_class_goes_to_its_handler_and_those_that_nobody_wants_are_dropped(world: World) -> None:
    bus = world.bus(orders)
    first, second, third = Seen(), Seen(), Seen()

    @bus.subscriber(orders, "both")
    async def handle_placed(order: Placed, delivery: Delivery[Placed]) -> None:
        await first.take(order, delivery)

    @bus.subscriber(orders, "both")
    async def handle_paid(order: Paid, delivery: Delivery[Paid]) -> None:
        await second.take(order, delivery)

    @bus.subscriber(orders, "paid", ignore_others=True)
    async def handle_only_paid(order: Paid, delivery: Delivery[Paid]) -> None:
        await third.take(order, delivery)

    @bus.subscriber(orders, "all")
    async def handle_all(order: Placed | Paid) -> None:
        """Take all."""

    await began(world, bus)
    values: list[Placed | Paid] = [Placed("a", 1), Paid("a"), Placed("b", 2)]
    await bus.publish_batch(orders, values)
    await world.run(2)
    assert first.values == [Placed("a", 1), Placed("b", 2)]
    assert second.values == third.values == [Paid("a")]
    assert world.outcomes("both", topic=orders) == world.outcomes("all", topic=orders) == {"acked": [0, 1, 2]}
    assert world.outcomes("paid", topic=orders) == {"acked": [1], "discarded": [0, 2]}


async def test_an_undecodable_event_is_a_dead_letter_with_its_raw_bytes(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    bus.subscriber(placed, "s")(seen.take)
    await began(world, bus)
    broken = Event.of(b"\xff not json", type="tests.placed", key="a")
    await bus.publish(placed, broken)
    await bus.publish(placed, Placed("a", 2))
    await world.until(lambda: seen.values, within=1)
    await world.run(1)
    [row] = world.rows("s", "dead", topic=placed)
    assert (row.offset, row.error_type, row.event.data) == (0, "DecodeError", b"\xff not json")
    assert seen.values == [Placed("a", 2)]


async def test_a_future_version_holds_its_lane_until_somebody_upgrades(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    bus.subscriber(placed, "s", retry=Retry(max_retries=0))(seen.take)
    await began(world, bus)
    newer = Event.of(b'{"customer":"a","number":1}', type="tests.placed", key="a", headers={"dataversion": b"7"})
    await bus.publish(placed, newer)
    await bus.publish_batch(placed, orders_of("a2", "b1"))
    await world.run(600)
    assert seen.values == [Placed("b", 1)]
    waiting = world.rows("s", "waiting", topic=placed)
    assert [(row.offset, row.error_type, row.attempts) for row in waiting] == [(0, "FutureVersion", 0), (1, "", 0)]
    assert world.rows("s", "dead", topic=placed) == []


async def test_what_is_said_by_hand_is_not_said_again(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s", retry=Retry(max_retries=1, delay=1, jitter=0))
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        if order.number == 1:
            await delivery.nack(reason="by hand")
        elif order.number == 2:
            await delivery.reject("by hand")
        else:
            await delivery.ack()
            raise ValueError("after the ack")

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "b2", "c3"))
    await world.run(5)
    assert sorted(order.number for order in seen.values) == [1, 1, 2, 3]
    assert world.outcomes("s", topic=placed) == {"dead": [0, 1], "acked": [2]}


async def test_manual_acks_come_when_the_handler_wants_and_hold_the_lane_until_then(world: World) -> None:
    bus = world.bus(placed)
    deliveries: list[Delivery[Placed]] = []

    @bus.subscriber(placed, "s", ack="manual")
    async def handle(delivery: Delivery[Placed]) -> None:
        deliveries.append(delivery)
        if delivery.value.number == 9:
            raise Reject("not by hand")

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b1", "c9"))
    await world.run(30)
    assert [delivery.value for delivery in deliveries] == orders_of("a1", "b1", "c9")
    await deliveries[0].ack()
    await world.run(1)
    assert [delivery.value for delivery in deliveries[3:]] == orders_of("a2")
    assert world.outcomes("s", topic=placed) == {"acked": [0], "dead": [3]}


@pytest.mark.parametrize("result", [False, "done", 7])
async def test_what_a_handler_returns_says_nothing_and_the_log_says_so_once(
    world: World, result: object, caplog: pytest.LogCaptureFixture
) -> None:
    bus = world.bus(placed)

    @bus.subscriber(placed, "s")
    async def handle(order: Placed) -> object:
        return result

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b1"))
    await world.run(2)
    assert world.outcomes("s", topic=placed) == {"acked": [0, 1, 2]}
    told = [record.getMessage() for record in caplog.records if "which says nothing" in record.getMessage()]
    assert len(told) == 1
    assert type(result).__name__ in told[0]


async def test_a_handler_that_forgot_to_be_async_fails_clearly() -> None:
    bus = Bus("memory:", topics=[placed])

    async def work(order: Placed) -> None:
        """Never run."""

    @bus.subscriber(placed, "s", retry=Retry(max_retries=0))
    def handle(order: Placed) -> Any:
        return work(order)

    async with bus:
        await bus.publish(placed, Placed("a", 1))
        await caught_up(bus, "s")
        local: Any = bus._backend
        info = next(info for info in local.store.log.topics() if info.name == "placed")
        [row] = local.store.parked.page(penstock.rows.ParkedFilter(log_id=info.log_id, subscription="s"))
    assert (row.state, row.error_type) == ("dead", "UsageError")
    assert "declare it with `async def`" in row.error_message


class Strange(BaseException):
    """Neither an exception nor an exit."""


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, Strange, TimeoutError])
async def test_whatever_a_handler_raises_ends_the_attempt_and_nothing_else(
    world: World, error: type[BaseException]
) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s", retry=Retry(max_retries=1, delay=1, jitter=0))
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        if order.number == 1:
            raise error

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b2"))
    await world.run(10)
    assert world.outcomes("s", topic=placed) == {"dead": [0], "acked": [1, 2]}
    assert [row.error_type for row in world.rows("s", "dead", topic=placed)] == [error.__name__]


# --- order and concurrency --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "failover", "key_shared", "shared"])
@pytest.mark.parametrize("seed", range(2))
async def test_events_of_a_key_run_one_after_the_other_in_their_order_whatever_handlers_do(
    world: World, seed: int, mode: Any
) -> None:
    chance = random.Random(seed)
    bus = world.bus(placed)
    ends: dict[str, list[int]] = defaultdict(list)
    begun: dict[str, list[int]] = defaultdict(list)
    running: set[str] = set()
    wrong: list[Placed] = []
    together = 0

    @bus.subscriber(placed, "s", mode=mode, concurrency=5, retry=Retry(max_retries=30, delay=0.5), timeout=5)
    async def handle(order: Placed) -> None:
        nonlocal together
        if mode != "shared" and (order.customer in running or order.number != len(ends[order.customer])):
            wrong.append(order)
        running.add(order.customer)
        together = max(together, len(running))
        begun[order.customer].append(order.number)
        try:
            if chance.random() < 0.7:
                await world.clock.pause(chance.choice([0.0, 0.01, 0.3]))
            if chance.random() < 0.02:
                await world.clock.pause(60)
            if chance.random() < 0.2:
                raise ValueError("tried again")
        finally:
            running.discard(order.customer)
        ends[order.customer].append(order.number)

    await began(world, bus)
    count = dict.fromkeys("abcdefg", 30)
    values = [Placed(name, number) for number in range(30) for name in count]
    for at in range(0, len(values), 35):
        await bus.publish_batch(placed, values[at : at + 35])
        await world.run(chance.choice([0.0, 0.2]))
    await world.until(lambda: all(len(ends[name]) == each for name, each in count.items()), within=2_000, step=1)
    assert wrong == [], "these ran beside, or before, earlier ones of their key"
    if mode != "shared":
        assert all(numbers == list(range(30)) for numbers in ends.values())
    else:
        assert all(sorted(numbers) == list(range(30)) for numbers in ends.values())
    assert 1 < together <= 5
    assert sum(map(len, begun.values())) > len(values)


async def test_a_hot_key_leaves_room_for_the_others(world: World) -> None:
    bus = world.bus(placed)
    gate = asyncio.Event()
    seen: list[Placed] = []

    @bus.subscriber(placed, "s", concurrency=2)
    async def handle(order: Placed) -> None:
        seen.append(order)
        if order.customer == "a":
            await gate.wait()

    await began(world, bus)
    await bus.publish_batch(placed, [Placed("a", number) for number in range(200)])
    await bus.publish_batch(placed, orders_of("b1", "c1", "b2"))
    await world.run(1)
    assert seen == [Placed("a", 0), *orders_of("b1", "c1", "b2")]
    gate.set()
    await world.run(1)
    assert len(seen) == 203


async def test_no_more_handlers_run_at_a_time_than_the_concurrency_says(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    gate = asyncio.Event()

    @bus.subscriber(placed, "s", concurrency=3)
    async def handle(order: Placed) -> None:
        seen.running += 1
        seen.most = max(seen.most, seen.running)
        await gate.wait()
        seen.running -= 1

    await began(world, bus)
    await bus.publish_batch(placed, orders_of(*(f"{name}1" for name in "abcdefghij")))
    await world.run(1)
    assert (seen.running, seen.most) == (3, 3)
    gate.set()
    await world.run(1)
    assert (seen.running, seen.most) == (0, 3)


async def test_a_paused_subscription_begins_nothing_more_also_of_a_lane_that_is_under_way(world: World) -> None:
    bus = world.bus(placed)
    seen: list[int] = []

    @bus.subscriber(placed, "s")
    async def handle(order: Placed) -> None:
        seen.append(order.number)
        if order.number == 3:
            await bus.pause(placed, "s")
            await world.clock.pause(5)

    await began(world, bus)
    await bus.publish_batch(placed, [Placed("a", number) for number in range(20)])
    await world.run(30)
    assert seen == [0, 1, 2, 3]
    await bus.resume(placed, "s")
    await world.run(1)
    assert seen == list(range(20))


async def test_handlers_that_never_wait_let_others_have_the_event_loop(world: World) -> None:
    bus = world.bus(placed)
    turns, seen, took = 0, list[int](), handling.LONG_BREATH_SECONDS / 5

    @bus.subscriber(placed, "s")
    async def handle(order: Placed) -> None:
        seen.append(turns)
        world.clock.advance(took)  # as if it had computed for so long

    async def somebody_else() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    await began(world, bus)
    other = asyncio.ensure_future(somebody_else())
    await bus.publish_batch(placed, [Placed("a", number) for number in range(100)])
    await world.until(lambda: len(seen) == 100)
    other.cancel()
    longest = max(seen.count(turn) for turn in seen)
    assert 1 < longest <= 8, "so many ran, and nobody else did"


async def test_what_never_waits_is_not_passed_around_among_all_workers(world: World) -> None:
    bus = world.bus(placed)
    tasks = list[Any]()

    @bus.subscriber(placed, "s", concurrency=16)
    async def handle(order: Placed) -> None:
        tasks.append(asyncio.current_task())
        world.clock.advance(handling.LONG_BREATH_SECONDS)  # so that each is followed by a turn of the loop

    await bus.publish_batch(placed, [Placed(str(number), number) for number in range(100)])
    await began(world, bus)
    await world.until(lambda: len(tasks) == 100)
    assert len(set(tasks)) <= 2, "the one that asked, and the one that goes on meanwhile"


@pytest.mark.parametrize("acks", [False, True])
async def test_a_handler_that_cancels_its_own_task_has_failed_and_others_go_on(world: World, acks: bool) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s", concurrency=1, retry=Retry(max_retries=1, delay=1, jitter=0), ack="manual")
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        if order.number != 2 or acks:
            await delivery.ack()
        if order.number == 2:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "a3", "b4"))
    await world.run(30)
    outcomes = world.outcomes("s", topic=placed)
    assert outcomes["acked"] == ([0, 1, 2, 3] if acks else [0, 2, 3])
    rows = world.rows("s", "dead", topic=placed)
    assert [(row.offset, row.error_type) for row in rows] == ([] if acks else [(1, "CancelledError")])
    numbers = [order.number for order in seen.values if order.customer == "a"]
    assert numbers == ([1, 2, 3] if acks else [1, 2, 2, 3])


async def test_a_handler_that_cancels_its_own_task_and_returns_holds_nothing_of_its_lane(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed) -> None:
        seen.values.append(order)
        if order.number == 1:
            await world.clock.pause(1)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()

    await began(world, bus)
    await bus.publish_batch(placed, orders_of(*(f"a{number}" for number in range(100))))
    await world.run(30)
    assert world.outcomes("s", topic=placed) == {"acked": list(range(100))}
    assert [order.number for order in seen.values] == list(range(100))


async def test_whoever_cancels_all_tasks_does_not_stop_a_subscriber(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)

    await began(world, bus)
    for task in asyncio.all_tasks():
        if "subscriber" in task.get_name():
            task.cancel()
    await bus.publish_batch(placed, orders_of("a1", "b2"))
    await world.run(5)
    assert world.outcomes("s", topic=placed) == {"acked": [0, 1]}


# --- time -------------------------------------------------------------------------------------


async def test_a_handler_that_takes_too_long_is_cancelled_and_its_event_tried_again(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    cancelled: list[float] = []

    @bus.subscriber(placed, "s", timeout=10, retry=Retry(max_retries=1, delay=1, jitter=0))
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        start = world.clock.monotonic()
        try:
            if order.number == 1:
                await world.clock.pause(60)
        except asyncio.CancelledError:
            cancelled.append(round(world.clock.monotonic() - start, 1))
            raise

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b2"))
    await world.run(30)
    assert cancelled == [10, 10]
    assert seen.attempts == [1, 1, 2, 1]
    [row] = world.rows("s", "dead", topic=placed)
    assert (row.offset, row.error_type, row.error_message) == (
        0,
        "HandlerTimeout",
        "its handler was cancelled after 10 s",
    )
    assert world.outcomes("s", topic=placed)["acked"] == [1, 2]


async def test_a_short_time_ends_when_it_is_over_whenever_its_handler_began(world: World) -> None:
    bus = world.bus(placed)
    took: list[float] = []

    @bus.subscriber(placed, "s", timeout=0.2, retry=Retry(max_retries=0))
    async def handle(order: Placed) -> None:
        start = world.clock.monotonic()
        try:
            await world.clock.pause(60)
        finally:
            took.append(world.clock.monotonic() - start)

    await began(world, bus)
    for number in range(5):
        await world.run(0.37)
        await bus.publish(placed, Placed("a", number))
        await world.run(1)
    assert len(took) == 5
    assert all(0.199 < each < 0.22 for each in took), took


async def test_extend_gives_a_handler_more_time(world: World) -> None:
    bus = world.bus(placed)
    ends: list[float] = []

    @bus.subscriber(placed, "s", timeout=10)
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        start = world.clock.monotonic()
        for _ in range(5):
            await world.clock.pause(8)
            await delivery.extend(10)
        ends.append(world.clock.monotonic() - start)

    await began(world, bus)
    await bus.publish(placed, Placed("a", 1))
    await world.run(60)
    assert ends == [40]
    assert world.outcomes("s", topic=placed) == {"acked": [0]}


async def test_a_handler_that_does_not_let_itself_be_cancelled_keeps_its_lane_and_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s", timeout=2)
    async def stubborn(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        end = world.clock.monotonic() + 30
        while order.number == 1 and world.clock.monotonic() < end:
            try:
                await world.clock.pause(end - world.clock.monotonic())
            except asyncio.CancelledError:
                continue

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b1"))
    await world.run(20)
    assert seen.values == orders_of("a1", "b1")
    assert any("stubborn was cancelled, and runs on" in record.getMessage() for record in caplog.records)
    await world.run(40)
    assert seen.values[2:] == orders_of("a2")
    assert world.outcomes("s", topic=placed) == {"acked": [0, 1, 2]}, "what it has done in the end is done"


async def test_a_thread_that_takes_too_long_keeps_its_lane_and_is_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bus = world.bus(placed)
    release, started = threading.Event(), threading.Event()
    seen: list[Placed] = []

    @bus.subscriber(placed, "s", timeout=2)
    def blocked(order: Placed) -> None:
        seen.append(order)
        if order.number == 1:
            started.set()
            assert release.wait(30)

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2"))
    await world.settle()
    await asyncio.to_thread(started.wait, 30)
    await world.run(20)
    assert seen == orders_of("a1")
    assert any(
        "blocked has had its time, and a thread cannot be stopped" in each.getMessage() for each in caplog.records
    )
    release.set()
    while world.outcomes("s", topic=placed) != {"acked": [0, 1]}:
        await world.run(0.1)
    assert seen == orders_of("a1", "a2")


async def test_a_long_handler_within_its_timeout_is_not_run_twice_though_others_wait(world: World) -> None:
    begun: list[tuple[str, int]] = []

    def another(name: str) -> Bus:
        bus = world.bus(placed, lease_seconds=5)

        @bus.subscriber(placed, "s", mode="failover", timeout=300)
        async def handle(order: Placed) -> None:
            begun.append((name, order.number))
            await world.clock.pause(200)

        return bus

    first = await began(world, another("first"))
    await began(world, another("second"))
    await first.publish(placed, Placed("a", 1))
    await world.run(260)
    assert begun == [("first", 1)]
    assert world.outcomes("s", topic=placed) == {"acked": [0]}


async def test_slow_handlers_without_a_timeout_are_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    bus = world.bus(placed)

    @bus.subscriber(placed, "s")
    async def slow(order: Placed) -> None:
        await world.clock.pause(handling.SLOW_SECONDS + 10)

    await began(world, bus)
    await bus.publish(placed, Placed("a", 1))
    await world.run(handling.SLOW_SECONDS + 20)
    [told] = [record.getMessage() for record in caplog.records if "is slow" in record.getMessage()]
    assert "slow is slow: at placed/0@0 for 6" in told


# --- ending -----------------------------------------------------------------------------------


async def test_draining_lets_handlers_end_and_gives_the_rest_back_uncounted(world: World) -> None:
    bus, seen = world.bus(placed), Seen()
    gate = asyncio.Event()
    ended: list[Placed] = []

    @bus.subscriber(placed, "s", concurrency=2)
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        await gate.wait()
        ended.append(order)

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "b1", "a2", "c1", "d1"))
    await world.run(1)
    closing = asyncio.ensure_future(bus.close())
    await world.run(5)
    assert not closing.done()
    gate.set()
    await world.done(closing)
    assert ended == seen.values == orders_of("a1", "b1")
    assert world.outcomes("s", topic=placed) == {"acked": [0, 1]}
    successor, again = world.bus(placed), Seen()
    successor.subscriber(placed, "s")(again.take)
    await began(world, successor)
    await world.run(1)
    assert again.values == orders_of("a2", "c1", "d1")
    assert again.attempts == [1, 1, 1]


async def test_handlers_that_do_not_end_in_time_are_cancelled_and_their_events_go_back_uncounted(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        await world.clock.pause(10_000)

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2", "b1"))
    await world.run(1)
    start = world.clock.monotonic()
    await world.done(bus.close(), within=100)
    assert 30 <= world.clock.monotonic() - start < 35
    successor, again = world.bus(placed), Seen()
    successor.subscriber(placed, "s")(again.take)
    await began(world, successor)
    await world.run(1)
    assert sorted(again.values, key=str) == orders_of("a1", "a2", "b1")
    assert again.attempts == [1, 1, 1]


async def test_leaving_the_block_with_an_error_drains_as_well() -> None:
    bus = Bus("memory:", topics=[placed], settings=Settings(delivery=DeliverySettings(drain_seconds=10)))
    started, ended = asyncio.Event(), asyncio.Event()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed) -> None:
        started.set()
        await asyncio.sleep(0)
        ended.set()

    async def fail() -> None:
        async with bus:
            await bus.publish(placed, Placed("a", 1))
            await asyncio.wait_for(started.wait(), 10)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    assert ended.is_set()


async def test_a_subscriber_that_cannot_join_ends_the_others_and_says_why(world: World) -> None:
    first = world.bus(placed)
    first.subscriber(placed, "s", mode="exclusive")(Seen().take)
    await began(world, first)
    second = world.bus(placed)
    second.subscriber(placed, "t")(Seen().take)
    second.subscriber(placed, "s", mode="exclusive")(Seen().take)
    with pytest.raises(SubscriptionBusy):
        await world.done(second.__aenter__())
    third, seen = world.bus(placed), Seen()
    third.subscriber(placed, "t", mode="key_shared")(seen.take)
    await began(world, third)
    await third.publish(placed, Placed("a", 1))
    await world.run(1)
    assert seen.values == [Placed("a", 1)], "what the second one had joined it has left"


async def test_run_ends_with_the_error_of_a_subscriber_that_can_go_on_no_more(world: World) -> None:
    bus = world.bus(placed)
    bus.subscriber(placed, "s")(Seen().take)
    running = asyncio.ensure_future(bus.run())
    await world.run(1)
    world.store.whole.log.delete_topic(world.info(placed).log_id)
    await world.until(running.done)
    with pytest.raises((TopicDeleted, UnknownSubscription), match=f"topic '{placed.name}'"):
        running.result()


async def test_a_subscriber_that_can_go_on_no_more_says_so_once_and_the_others_go_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    bus, seen = world.bus(placed, raw), Seen()
    bus.subscriber(placed, "s")(Seen().take)
    bus.subscriber(raw, "t")(seen.take)
    await began(world, bus)
    world.store.whole.log.delete_topic(world.info(placed).log_id)
    await world.run(30)
    await bus.publish(raw, b"x")
    await world.run(5)
    assert seen.values == [b"x"]
    told = [each for each in caplog.records if "can go on no more" in each.getMessage()]
    assert len(told) == 1
    runner = bus._subscribers.runner
    assert runner is not None
    assert [len(handling.workers) for handling in runner.handlings] == [0, 2]


async def test_what_a_lost_shard_has_begun_is_handled_by_its_new_owner_and_nobody_minds(world: World) -> None:
    bus, seen = world.bus(placed, lease_seconds=5), Seen()

    @bus.subscriber(placed, "s")
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        await world.clock.pause(60)

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "a2"))
    await world.run(1)
    thawed = world.freeze(bus)
    successor, again = world.bus(placed, lease_seconds=5), Seen()
    successor.subscriber(placed, "s")(again.take)
    await began(world, successor)
    await world.until(lambda: len(again.values) == 2)
    thawed.set()
    await world.run(120)
    assert again.values == orders_of("a1", "a2")
    assert seen.values == orders_of("a1")
    assert world.outcomes("s", topic=placed) == {"acked": [0, 1]}


# --- middleware -------------------------------------------------------------------------------


async def test_middleware_is_around_handlers_the_bus_s_outermost(world: World) -> None:
    told: list[str] = []

    def saying(name: str) -> Any:
        async def middleware(delivery: Delivery[Any], proceed: Proceed) -> None:
            told.append(f"{name} before {delivery.subscription} {delivery.position.offset}")
            await proceed()
            told.append(f"{name} after")

        return middleware

    bus = Bus("memory:", topics=[placed], middleware=[saying("one"), saying("two")])

    @bus.subscriber(placed, "s", middleware=[saying("three")])
    async def handle(order: Placed) -> None:
        told.append("handler")

    async with bus:
        await bus.publish(placed, Placed("a", 1))
        await caught_up(bus, "s")
    before = [f"{name} before s 0" for name in ("one", "two", "three")]
    assert told == [*before, "handler", "three after", "two after", "one after"]


async def test_what_middleware_raises_or_swallows_is_the_verdict(world: World) -> None:
    bus, seen = world.bus(placed), Seen()

    async def strange(delivery: Delivery[Placed], proceed: Proceed) -> None:
        match delivery.event.key:
            case b"a":
                raise Reject("not here")
            case b"b":
                return
            case b"c":
                try:
                    await proceed()
                except ValueError:
                    return
            case _:
                await proceed()

    @bus.subscriber(placed, "s", middleware=[strange], retry=Retry(max_retries=0))
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        await seen.take(order, delivery)
        raise ValueError("always")

    await began(world, bus)
    await bus.publish_batch(placed, orders_of("a1", "b1", "c1", "d1"))
    await world.run(2)
    assert seen.values == orders_of("c1", "d1")
    assert world.outcomes("s", topic=placed) == {"dead": [0, 3], "acked": [1, 2]}


async def test_middleware_outlives_its_bus_and_goes_on_with_the_next(tmp_path: Path) -> None:
    handled: list[Placed] = []
    with Dedupe(tmp_path / "marks.db") as dedupe:
        for _ in range(2):
            bus = Bus("memory:", topics=[placed], middleware=[dedupe])

            @bus.subscriber(placed, "s")
            async def handle(order: Placed) -> None:
                handled.append(order)

            async with bus:
                await bus.publish(placed, Placed("a", 1), id="the same")
                await caught_up(bus, "s")
    assert handled == [Placed("a", 1)]
    assert dedupe.duplicates == 1


async def test_middleware_sees_that_an_event_cannot_be_decoded(world: World) -> None:
    bus = world.bus(placed)
    errors: list[BaseException] = []

    async def watching(delivery: Delivery[Any], proceed: Proceed) -> None:
        try:
            await proceed()
        except Exception as error:
            errors.append(error)
            raise

    bus.subscriber(placed, "s", middleware=[watching])(Seen().take)
    await began(world, bus)
    await bus.publish(placed, Event.of(b"{", type="tests.placed"))
    await world.run(2)
    assert [type(error).__name__ for error in errors] == ["Undecodable"]
    assert world.outcomes("s", topic=placed) == {"dead": [0]}
