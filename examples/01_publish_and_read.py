"""Publish events, and read them back. When `publish` returns, the event is stored; its position is its own for ever.

It prints::

    orders/0@0 is stored
    3 more: orders/0@1 to orders/0@3
    orders/0@0 ada ordered o-0
    orders/0@1 grace ordered o-1
    orders/0@2 ada ordered o-2
    orders/0@3 grace ordered o-3
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import penstock
from penstock import Bus, Position, Receipt, StoredEvent, Topic


@penstock.event("order.placed")
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    customer: str


orders = Topic("orders", OrderPlaced, key=lambda order: order.customer)


async def main() -> None:
    async with Bus("memory:", topics=[orders]) as bus:
        receipt: Receipt = await bus.publish(orders, OrderPlaced("o-0", "ada"))
        print(receipt.position, "is stored")

        more = [OrderPlaced(f"o-{number}", "ada" if number % 2 == 0 else "grace") for number in range(1, 4)]
        receipt = await bus.publish_batch(orders, more)
        print(f"{len(receipt)} more: {receipt.positions[0]} to {receipt.positions[-1]}")

        event: StoredEvent
        async for event in bus.read(orders):
            order = orders.decode(event)
            print(event.position, order.customer, "ordered", order.order_id)

        [event] = [event async for event in bus.read(orders, start=3)]
        assert event.position == Position.parse("orders/0@3")


if __name__ == "__main__":
    asyncio.run(main())
