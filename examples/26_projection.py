"""A projection: what orders come to, per customer, kept up to date as they are placed.

The function is pure, and can be called like any other. The same projection runs over all of history on Spark, with
`penstock pipeline project shop:bus --into ./tables`.

It prints::

    ada spent 40 in 2 orders
    bob spent 15 in 1 orders
    most: ada
    bob spent 75 in 2 orders
    most: bob
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import penstock
from penstock import Bus, Projection, Topic


@penstock.event("order.placed")
@dataclass(frozen=True)
class OrderPlaced:
    customer: str
    total: int


@dataclass(frozen=True)
class Revenue:
    spent: int = 0
    orders: int = 0


orders = Topic("orders", OrderPlaced, key=lambda order: order.customer, partitions=4)
bus = Bus("memory:", topics=[orders])


@bus.projection(orders, "revenue", key=lambda order: order.customer)
def revenue(state: Revenue | None, order: OrderPlaced) -> Revenue:
    state = state or Revenue()
    return Revenue(state.spent + order.total, state.orders + 1)


async def folded(projection: Projection[Revenue], events: int) -> None:
    """Wait until so many events are in it; an application would rather not."""
    while sum(projection.positions().values()) < events:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


async def main() -> None:
    assert revenue(Revenue(10, 1), OrderPlaced("ada", 5)) == Revenue(15, 2)  # it is still a function
    async with bus:
        await bus.publish_batch(orders, [OrderPlaced("ada", 10), OrderPlaced("bob", 15), OrderPlaced("ada", 30)])
        await folded(revenue, 3)
        for customer, state in revenue.items():
            print(f"{customer} spent {state.spent} in {state.orders} orders")
        print("most:", max(revenue.items(), key=lambda item: item[1].spent)[0])

        await bus.publish(orders, OrderPlaced("bob", 60))
        await folded(revenue, 4)
        bob = revenue.get("bob")
        assert bob is not None
        print(f"bob spent {bob.spent} in {bob.orders} orders")
        print("most:", max(revenue.items(), key=lambda item: item[1].spent)[0])


if __name__ == "__main__":
    asyncio.run(main())
