"""A topic of several classes: each event goes to the handler that is annotated with its class.

It prints::

    shipping: o-1 is placed
    shipping: o-1 is paid with 950 cents
    revenue: 950 cents
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import penstock
from penstock import Bus, Topic


@penstock.event("order.placed")
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str


@penstock.event("order.paid")
@dataclass(frozen=True)
class OrderPaid:
    order_id: str
    cents: int


orders = Topic[OrderPlaced | OrderPaid]("orders", (OrderPlaced, OrderPaid), key=lambda event: event.order_id)
bus = Bus("memory:", topics=[orders])
said: asyncio.Queue[str] = asyncio.Queue()


@bus.subscriber(orders, "shipping")
async def prepare(order: OrderPlaced) -> None:
    said.put_nowait(f"shipping: {order.order_id} is placed")


@bus.subscriber(orders, "shipping")  # the same subscription: its other class
async def ship(paid: OrderPaid) -> None:
    said.put_nowait(f"shipping: {paid.order_id} is paid with {paid.cents} cents")


@bus.subscriber(orders, "revenue", ignore_others=True)  # it wants no other class, and says so
async def book(paid: OrderPaid) -> None:
    said.put_nowait(f"revenue: {paid.cents} cents")


async def main() -> None:
    async with bus:
        await bus.publish(orders, OrderPlaced("o-1"))
        await bus.publish(orders, OrderPaid("o-1", 950))
        lines = [await said.get() for _ in range(3)]
    for line in sorted(lines, reverse=True):
        print(line)
    shipping = [line for line in lines if line.startswith("shipping")]
    assert shipping == sorted(shipping, reverse=True), "placed comes before paid: they have one key"


if __name__ == "__main__":
    asyncio.run(main())
