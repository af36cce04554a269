"""What is declared with a bus: what runs of it and where, and what is refused because it cannot work."""

from __future__ import annotations

import asyncio
import functools
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pytest
from tests.deliveries import raw
from tests.shop import Paid, Placed, orders, placed

from penstock import Bus, Delivery, Retry
from penstock.bus.handlers import code_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.bus.handlers import Handler


def declared(function: Any, topic: Any = raw, **options: Any) -> Handler:
    """Declare a handler with a bus of its own."""
    bus = Bus("memory:", topics=[topic])
    assert bus.subscriber(topic, "s", **options)(function) is function
    return bus.subscribers[0].handlers[0]


# --- what runs ----------------------------------------------------------------------------------

ran: list[str] = []


def note() -> None:
    """Note where this runs."""
    ran.append("loop" if threading.current_thread() is threading.main_thread() else "thread")


class InLoop:
    """The usual class decorator: what it decorates is its `func`."""

    def __init__(self, func: Any) -> None:
        self.func = func

    async def __call__(self, data: bytes) -> None:
        note()


class InThread:
    """The same, with a call that waits for nothing."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def __call__(self, data: bytes) -> None:
        note()


class InLoopAsMethod(InLoop):
    """One that can decorate methods, too, and looks like what it decorates."""

    def __init__(self, func: Any) -> None:
        super().__init__(func)
        functools.update_wrapper(self, func)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self, instance)


class InLoopWithMore:
    async def __call__(self, data: bytes, shelf: int) -> None:
        note()


async def in_loop(data: bytes) -> None:
    note()


def in_thread(data: bytes) -> None:
    note()


WHAT_RUNS = [
    (InLoop(in_thread), "loop"),
    (InThread(in_loop), "thread"),
    (InLoop("a text"), "loop"),
    (InLoopAsMethod(in_thread), "loop"),
    (functools.partial(InLoop(in_thread)), "loop"),
    (functools.partial(InThread(in_loop)), "thread"),
    (functools.partial(InLoopWithMore(), shelf=2), "loop"),
    (functools.partial(functools.partial(in_loop)), "loop"),
    (staticmethod(in_loop), "loop"),
    (staticmethod(in_thread), "thread"),
]


@pytest.mark.parametrize(("function", "where"), WHAT_RUNS)
async def test_what_is_called_decides_where_it_runs_and_not_what_it_wraps(function: Any, where: str) -> None:
    ran.clear()
    bus = Bus("memory:", topics=[raw])
    bus.subscriber(raw, "s", retry=Retry(max_retries=0))(function)
    async with bus:
        await bus.publish(raw, b"one")
        while (await bus.lag(raw, "s"))[0].lag:  # noqa: ASYNC110 - progress is the store's, and tells nobody
            await asyncio.sleep(0.001)
        assert ran == [where]
        assert await bus.dead_letters.ls(raw, "s") == []


def test_a_static_method_is_a_handler_where_it_is_defined() -> None:
    bus = Bus("memory:", topics=[raw])

    class Shelf:
        @bus.subscriber(raw, "s")
        @staticmethod
        async def put(data: bytes) -> None:
            """Put it there."""

    [handler] = bus.subscribers[0].handlers
    assert handler.function is Shelf.put
    assert handler.name.endswith("Shelf.put")
    assert handler.in_loop


def test_an_object_that_wraps_a_function_takes_the_classes_which_that_takes() -> None:
    async def of_paid(order: Paid) -> None:
        """Take paid ones."""

    class Timed:
        def __init__(self, timed: Any) -> None:
            functools.update_wrapper(self, timed)

        async def __call__(self, order: Any) -> None:
            """Take what the other takes."""

    for function in (Timed(of_paid), functools.partial(Timed(of_paid)), InLoopAsMethod(of_paid)):
        assert declared(function, orders).classes == (Paid,)


@pytest.mark.parametrize("function", [InLoop(in_thread), InThread(in_loop)])
def test_the_code_of_an_object_is_that_of_its_call(function: Any) -> None:
    assert code_of(function) is type(function).__call__.__code__
    assert code_of(functools.partial(function)) is type(function).__call__.__code__


async def test_the_delivery_may_come_first_if_it_is_annotated() -> None:
    bus = Bus("memory:", topics=[placed])
    came: asyncio.Queue[tuple[Any, Any]] = asyncio.Queue()

    @bus.subscriber(placed, "loop")
    async def of_both(delivery: Delivery[Placed], order: Placed) -> None:
        came.put_nowait((delivery.value, order))

    loop = asyncio.get_running_loop()

    @bus.subscriber(placed, "thread")
    def of_both_in_a_thread(delivery: Delivery[Placed], order: Any) -> None:
        loop.call_soon_threadsafe(came.put_nowait, (delivery.value, order))

    async with bus, asyncio.timeout(10):
        await bus.publish(placed, Placed("ada"))
        assert [await came.get(), await came.get()] == [(Placed("ada"), Placed("ada"))] * 2


async def of_whatever(data: Any, delivery: Any) -> None:
    """Say nothing about either."""


async def of_optional(data: bytes, delivery: Delivery[bytes] | None) -> None:
    """Be called without a delivery, too, by others."""


async def of_anything_after(delivery: Delivery[bytes], data: object) -> None:
    """Say nothing about the event."""


async def of_optional_alone(delivery: Delivery[bytes] | None) -> None:
    """Take the delivery, and from others nothing."""


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (of_whatever, (False, True)),
        (of_optional, (False, True)),
        (of_anything_after, (True, False)),
        (of_optional_alone, (True,)),
    ],
)
def test_annotations_say_which_parameter_is_the_delivery(function: Any, takes: tuple[bool, ...]) -> None:
    assert declared(function).takes == takes


# --- what is refused ----------------------------------------------------------------------------


class YieldsInLoop:
    async def __call__(self, data: bytes) -> Any:
        yield data


class Yields:
    def __call__(self, data: bytes) -> Iterator[bytes]:
        yield data


class Method:
    async def take(self, data: bytes) -> None:
        """Need an object."""

    async def take_all(self) -> None:
        """Need one, too."""


class Shaped(Protocol):
    customer: str


@runtime_checkable
class Checkable(Protocol):
    customer: str


async def of_another_second(data: bytes, database: int) -> None:
    """Want what nobody gives."""


async def of_swapped(delivery, data: bytes) -> None:  # type: ignore[no-untyped-def]
    """Say too little for another order."""


async def of_two_deliveries(one: Delivery[bytes], two: Delivery[bytes]) -> None:
    """Want it twice."""


async def of_shaped(order: Shaped) -> None:
    """Take what is shaped like an order."""


async def of_checkable(order: Checkable) -> None:
    """The same, with a protocol that is looked at when it runs."""


def annotated(text: str) -> Callable[..., Any]:
    """Return a handler with an annotation as it is written."""

    async def handle(data: Any) -> None:
        """Take something."""

    handle.__annotations__["data"] = text
    return handle


CANNOT_BE_HANDLERS = [
    (raw, YieldsInLoop(), "yields; a handler takes one event and returns"),
    (raw, Yields(), "yields; a handler takes one event and returns"),
    (raw, functools.partial(Yields()), "yields; a handler takes one event and returns"),
    (raw, Method, "is a function, not a class; an object of Method may be one"),
    (raw, classmethod(of_whatever), "cannot be a classmethod where it is defined: declare it when its class is there"),
    (raw, Method.take, "Method.take is a method without its object"),
    (raw, Method.take_all, "Method.take_all is a method without its object"),
    (raw, max, "does not say what it takes"),
    (raw, of_another_second, "takes int as its second parameter, 'database', which is the delivery: annotate it"),
    (raw, of_swapped, "takes bytes as its second parameter, 'data', which is the delivery: annotate it"),
    (raw, of_two_deliveries, "takes two deliveries; it takes the event, or the event and its delivery"),
    (placed, of_shaped, "takes Shaped, and topic 'placed' has Placed"),
    (placed, of_checkable, "takes Checkable, and topic 'placed' has Placed"),
    (raw, annotated("bytes |"), "annotations of handler .*handle cannot be read"),
    (raw, annotated("asyncio.Nothing"), "annotations of handler .*handle cannot be read: module 'asyncio' has no"),
    (raw, annotated("1 / 0"), "annotations of handler .*handle cannot be read: division by zero"),
]


@pytest.mark.parametrize(("topic", "function", "message"), CANNOT_BE_HANDLERS)
def test_a_function_that_cannot_be_a_handler_is_refused_when_it_is_declared(
    topic: Any, function: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        declared(function, topic)


@pytest.mark.parametrize("topic", [5, None, Placed])
def test_what_is_no_topic_is_named(topic: Any) -> None:
    with pytest.raises(UsageError, match=r"subscriber 's': its topic is a Topic, or the name of one, not "):
        Bus("memory:").subscriber(topic, "s")


class WaitingForGaps:
    async def __call__(self, partition: int, gap: Any) -> None:
        """Be awaited by nobody."""


async def wait_for_gaps(partition: int, gap: Any) -> None:
    """Be awaited by nobody."""


def yield_gaps(partition: int, gap: Any) -> Iterator[Any]:
    yield gap


WRONG_FOR_CONSUMERS = [
    ({"mode": "sideways"}, "mode is one of exclusive, .*, not 'sideways'"),
    ({"window": "5"}, "window_events .* is '5'; it is a whole number"),
    ({"window": 1.5}, "window_events .* is 1.5; it is a whole number"),
    ({"window_bytes": "x"}, "window_bytes .* is 'x'; it is a whole number"),
    ({"heartbeat": []}, r"heartbeat, unless it is the name of a profile, is a number of seconds or .*, not \[\]"),
    ({"heartbeat": True}, "heartbeat, unless it is the name of a profile, is a number of seconds or .*, not True"),
    ({"rate": "fast"}, "rate_per_second .* is 'fast'; it is a number"),
    ({"rate": ""}, "rate_per_second .* is ''; it is a number"),
    ({"rate": False}, "rate_per_second .* is False; it is a number"),
    ({"retry": Retry(max_retries=-1)}, "max_retries .* is -1; it is a whole number"),
    ({"exhausted": "never"}, "exhausted .* cannot be 'never'"),
    ({"start": {}}, "a start by partition has whole numbers, such as {0: 1700}, not {}"),
    ({"start": {"0": 1}}, "a start by partition has whole numbers, such as {0: 1700}, not {'0': 1}"),
    ({"start": {0: 1.5}}, "a start by partition has whole numbers, such as {0: 1700}, not {0: 1.5}"),
    ({"start": []}, r"a start is 'earliest', .* or offsets by partition, not \[\]"),
    ({"start": True}, "a start is 'earliest', .* or offsets by partition, not True"),
    ({"start": datetime(2026, 1, 1)}, "has no time zone"),  # noqa: DTZ001 - that is what is wrong
    ({"protect": "no"}, "protect is True or False, not 'no'"),
    ({"consumer_id": ""}, "consumer_id is 1 to 200 printable characters, not ''"),
    ({"consumer_id": 5}, "consumer_id is 1 to 200 printable characters, not 5"),
    ({"on_gap": 5}, "on_gap is a function, not 5"),
    ({"on_gap": wait_for_gaps}, "on_gap is called, and neither awaited nor iterated over"),
    ({"on_gap": WaitingForGaps()}, "on_gap is called, and neither awaited nor iterated over"),
    ({"on_gap": yield_gaps}, "on_gap is called, and neither awaited nor iterated over"),
]
WRONG_FOR_SUBSCRIBERS = [
    ({"ignore_others": "no"}, "subscriber 's' of topic 'raw': ignore_others is True or False, not 'no'"),
    ({"middleware": [5]}, "subscriber 's' of topic 'raw': each of its middleware is a function, not 5"),
    ({"middleware": [InLoop]}, "is a function, not a class; an object of InLoop may be one"),
    ({"ack": []}, r"ack is 'auto' or 'manual', not \[\]"),
]


@pytest.mark.parametrize(("options", "message"), [*WRONG_FOR_CONSUMERS, *WRONG_FOR_SUBSCRIBERS])
def test_wrong_options_are_refused_when_a_subscriber_is_declared(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(in_loop, **options)


@pytest.mark.parametrize(("options", "message"), WRONG_FOR_CONSUMERS)
def test_wrong_options_are_refused_when_a_consumer_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Bus("memory:", topics=[raw]).consume(raw, "s", **options)


def test_a_subscriber_that_is_refused_is_not_there() -> None:
    bus = Bus("memory:", topics=[raw])
    with pytest.raises(UsageError, match="on_gap"):
        bus.subscriber(raw, "s", on_gap=5)(in_loop)  # type: ignore[arg-type]
    assert bus.subscribers == []


def test_middleware_that_is_no_list_is_told_to_be_one() -> None:
    subscribers = Bus("memory:", topics=[raw])._subscribers
    middleware: Any = in_loop
    with pytest.raises(UsageError, match=r"subscriber 's': middleware is a list, middleware=\[…\], not <function"):
        subscribers.declare(raw, "s", {}, concurrency=None, ack=None, ignore_others=None, middleware=middleware)


def yields_in_thread(data: bytes) -> Iterator[bytes]:
    yield data


async def yields_in_loop(data: bytes) -> Any:
    yield data


def paid_alone(delivery: Delivery[Paid]) -> None:
    """Take deliveries of one class."""


def placed_alone(delivery: Delivery[Placed]) -> None:
    """Take those of the other."""


def paid_in_any(order: Paid, delivery: Delivery[Paid | Placed]) -> None:
    """Take one class, with a delivery of any."""


def paid_in_other(order: Paid, delivery: Delivery[Placed]) -> None:
    """Take what cannot be."""


def of_others(delivery: Delivery[datetime]) -> None:
    """Take what the topic has not."""


def test_what_a_delivery_is_of_says_what_its_handler_takes() -> None:
    bus = Bus("memory:", topics=[orders])
    for function in (paid_alone, placed_alone):
        bus.subscriber(orders, "s")(function)
    bus.subscriber(orders, "t", ignore_others=True)(paid_in_any)
    assert [[each.classes for each in found.handlers] for found in bus.subscribers] == [
        [(Paid,), (Placed,)],
        [(Paid,)],
    ]
    with pytest.raises(UsageError, match=r"takes Paid, and .*Delivery.*Placed.*, which are of different classes"):
        bus.subscriber(orders, "u")(paid_in_other)
    with pytest.raises(UsageError, match="takes datetime, and topic 'orders' has"):
        bus.subscriber(orders, "u")(of_others)


@pytest.mark.parametrize("function", [yields_in_thread, yields_in_loop])
@pytest.mark.parametrize("waiting", [True, False])
async def test_a_handler_that_returns_a_generator_has_failed(function: Any, waiting: bool) -> None:
    async def in_loop_around(data: bytes) -> Any:
        return function(data)

    def in_thread_around(data: bytes) -> Any:
        return function(data)

    bus = Bus("memory:", topics=[raw])
    bus.subscriber(raw, "s", retry=Retry(max_retries=0))(in_loop_around if waiting else in_thread_around)
    async with bus, asyncio.timeout(30):
        await bus.publish(raw, b"one")
        while not (letters := await bus.dead_letters.ls(raw, "s")):  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.001)
        assert letters[0].error_type == "UsageError"
        assert "returned a generator" in letters[0].error_message


def test_middleware_that_is_no_list_is_refused_by_the_decorator() -> None:
    with pytest.raises(UsageError, match="middleware is a list"):
        Bus("memory:", topics=[raw]).subscriber(raw, "s", middleware=note)  # type: ignore[arg-type]
