"""The events of this area, the log that holds them, and a subscriber that takes them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from penstock.bus.bus import Bus
from penstock.bus.delivered import Delivery
from penstock.bus.middleware import Middleware
from penstock.bus.topic import Topic
from penstock.collecting import uncollected
from penstock.events import event
from penstock.settings import Settings

_names = count()


@event("penstock.bench.order")
class Order(msgspec.Struct, frozen=True):
    """What is published and handled: an ordinary small event."""

    order_id: str
    customer: str
    total: int


ORDERS: Topic[Order] = Topic("orders", Order, key=lambda order: order.customer)


def an_order(number: int, keys: int) -> Order:
    """Return one of many, of so many customers."""
    return Order(f"order-{number}", f"customer-{number % keys}", number)


def a_bus(directory: Path, *, middleware: Sequence[Middleware] = ()) -> Bus:
    """Return a bus over the store of a directory."""
    return Bus(f"file:{directory}", topics=[ORDERS], settings=Settings(), middleware=middleware)


async def filled(directory: Path, events: int, keys: int, batch_events: int) -> None:
    """Store so many orders."""
    async with a_bus(directory) as bus:
        for start in range(0, events, batch_events):
            orders = [an_order(number, keys) for number in range(start, min(start + batch_events, events))]
            await bus.publish_batch(ORDERS, orders)


Work = Callable[[Order, Delivery[Order]], None]


@asynccontextmanager
async def handling(
    directory: Path, number: int, options: dict[str, Any], middleware: Sequence[Middleware], handle: Any
) -> AsyncIterator[list[Bus]]:
    """Run a new subscription with so many consumers, each with a bus of its own."""
    name = f"s{next(_names)}"
    buses = [a_bus(directory, middleware=middleware) for _ in range(number)]
    for bus in buses:
        bus.subscriber(ORDERS, name, **options)(handle)
    for bus in buses:
        await bus.__aenter__()
    try:
        yield buses
    finally:
        for bus in buses:
            await bus.close()


async def handled(
    directory: Path,
    events: int,
    *,
    consumers: int = 1,
    work: Work | None = None,
    middleware: Sequence[Middleware] = (),
    **options: Any,
) -> float:
    """Let a new subscription handle everything; return how long that took, to the last cursor on the medium."""
    left = events
    done = asyncio.Event()

    async def handle(order: Order, delivery: Delivery[Order]) -> None:
        nonlocal left
        if work is not None:
            work(order, delivery)
        left -= 1
        if not left:
            done.set()

    with uncollected():
        began = time.perf_counter()
        async with handling(directory, consumers, options, middleware, handle):
            await done.wait()  # and leaving the block writes all progress
        return time.perf_counter() - began


def in_turn(rounds: int, contestants: dict[str, Callable[[], Awaitable[float]]]) -> dict[str, list[float]]:
    """Let each run in turn, so many rounds; return how long each took, round by round."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    with asyncio.Runner() as runner:
        for number in range(rounds + 1):
            for name, run in contestants.items():
                seconds = runner.run(_awaited(run))
                if number:  # the first one warms up
                    took[name].append(seconds)
    return took


async def _awaited(run: Callable[[], Awaitable[float]]) -> float:
    return await run()
