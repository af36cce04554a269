"""The main job, on the embedded default: publish, read, repeat an unknown publish, and check all of it.

Run it with `make demo`, or `python examples/demo.py [events]`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass

import penstock
from penstock import Batch, Bus, Topic


@penstock.event("order.placed")
@dataclass(frozen=True)
class OrderPlaced:
    """A customer ordered something."""

    order_id: str
    customer: str
    cents: int


orders = Topic("orders", OrderPlaced, key=lambda order: order.customer, partitions=4)


async def main(count: int) -> None:
    """Publish `count` orders and show that every one of them is there, once, in order per customer."""
    async with Bus("memory:", topics=[orders]) as bus:
        receipt = await bus.publish(orders, OrderPlaced("o-0", "customer-0", 950))
        say(f"one event published: it is {receipt.position}, for ever")

        values = [OrderPlaced(f"o-{n}", f"customer-{n % 1000}", n) for n in range(1, count)]
        began = time.perf_counter()
        for start in range(0, len(values), 5_000):
            await bus.publish_batch(orders, values[start : start + 5_000])
        took = time.perf_counter() - began
        say(f"{len(values):,} more in batches of 5,000: {len(values) / took:,.0f} events/s, encoding included")

        prepared = bus.prepare(orders, OrderPlaced(f"o-{count}", "customer-7", 1))
        first, again = await prepared.send(), await prepared.send()
        say(f"one sent twice is stored once: {first.position} == {again.position}, duplicate={again.duplicate}")

        began = time.perf_counter()
        seen, numbers = 0, Counter[str]()
        async for batch in bus.read_batches(orders):
            assert isinstance(batch, Batch)
            seen += len(batch)
            numbers.update(str(event.key) for event in batch)
        took = time.perf_counter() - began
        say(f"{seen:,} read back at {seen / took:,.0f} events/s, {len(numbers):,} customers")
        await check(bus, count)


async def check(bus: Bus, count: int) -> None:
    """Compare what is stored with what was published."""
    ids: list[str] = []
    last: dict[str, int] = {}
    async for event in bus.read(orders):
        order = orders.decode(event)
        number = int(order.order_id.removeprefix("o-"))
        assert last.get(order.customer, -1) < number, "out of order"
        last[order.customer] = number
        ids.append(order.order_id)
    assert sorted(ids) == sorted(f"o-{n}" for n in range(count + 1)), "lost or doubled"
    say(f"checked: all {len(ids):,} are there, each once, in order per customer")


def say(text: str) -> None:
    """Tell the person who watches."""
    print(f"  {text}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000))
