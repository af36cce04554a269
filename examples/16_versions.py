"""Old events reach the present class through upcasters; one that is too new, or broken, does no harm.

It prints::

    o-1 costs 9.5
    o-2 costs 12
    dead: b'not json', DecodeError
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import penstock
from penstock import Bus, Event, Topic


@penstock.event("order.placed", version=2)
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    total: Decimal


@penstock.upcaster("order.placed", from_version=1)
def totals_were_cents(old: dict[str, Any]) -> dict[str, Any]:
    return {"order_id": old["order_id"], "total": str(Decimal(old["cents"]) / 100)}


orders = Topic("orders", OrderPlaced, key=lambda order: order.order_id)
bus = Bus("memory:", topics=[orders])
seen: asyncio.Queue[OrderPlaced] = asyncio.Queue()


@bus.subscriber(orders, "billing")
async def bill(order: OrderPlaced) -> None:
    seen.put_nowait(order)


async def main() -> None:
    async with bus:
        await bus.publish(orders, Event.of('{"order_id": "o-1", "cents": 950}', type="order.placed", key="o-1"))
        await bus.publish(orders, Event.of("not json", type="order.placed", key="o-1"))
        await bus.publish(orders, OrderPlaced("o-2", Decimal(12)), key="o-1")
        for _ in range(2):
            order = await seen.get()
            print(order.order_id, "costs", order.total)
        while not await bus.dead_letters.count(orders, "billing"):  # noqa: ASYNC110 - it is just being written
            await asyncio.sleep(0.01)
        [letter] = await bus.dead_letters.ls(orders, "billing")
        print(f"dead: {letter.event.data!r}, {letter.error_type}")


if __name__ == "__main__":
    asyncio.run(main())
