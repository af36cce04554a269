"""A subscriber: a function that is called with every event, at least once, in the order of its key.

Here it runs twice, as a program does that is started again: it goes on where it was.

It prints::

    billed o-1 of ada
    started again
    billed o-2 of ada
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass

import penstock
from penstock import Bus, Topic


@penstock.event("order.placed")
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    customer: str


orders = Topic("orders", OrderPlaced, key=lambda order: order.customer)


async def run(url: str, order: OrderPlaced) -> None:
    bus = Bus(url, topics=[orders])
    billed = asyncio.Event()

    @bus.subscriber(orders, "billing")
    async def bill(order: OrderPlaced) -> None:
        print("billed", order.order_id, "of", order.customer)
        billed.set()

    async with bus:  # runs the subscribers; at its end they are drained
        await bus.publish(orders, order)
        await billed.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(f"file:{directory}", OrderPlaced("o-1", "ada")))
        print("started again")
        asyncio.run(run(f"file:{directory}", OrderPlaced("o-2", "ada")))
