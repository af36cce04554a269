"""Retention, and what a subscriber is told that came too late: a gap is declared, never passed over in silence.

It prints::

    600 events, of which 300 are removed
    orders/0: gap [0, 300), the log begins after it
    reading begins at 300
    the first event that is left is number 300
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from penstock import Bus, Gap, Retention, Topic, open_store

# What is older than a month may go, and all beyond a gigabyte, but for what a protected subscription has not passed.
orders = Topic("orders", bytes, retention=Retention(age_seconds=timedelta(days=30).total_seconds(), bytes_max=1 << 30))
gaps: list[tuple[int, Gap]] = []
first: asyncio.Queue[int] = asyncio.Queue()


def note(partition: int, gap: Gap) -> None:
    gaps.append((partition, gap))


async def main() -> None:
    store = open_store("memory:")
    bus = Bus(topics=[orders], store=store)

    @bus.subscriber(orders, "reports", protect=False, on_gap=note)  # retention does not wait for it
    async def report(number: bytes) -> None:
        first.put_nowait(int(number))

    await bus.open()
    async with bus.consume(orders, "reports", protect=False):
        pass  # the subscription is there, at the beginning, and away
    await bus.publish_batch(orders, [b"%d" % number for number in range(600)])

    [info] = [info for info in store.log.topics() if info.name == "orders"]
    beginning = store.log.trim(info.partitions[0], 300)  # what retention does by itself; `penstock trim` by hand
    print("600 events, of which", beginning, "are removed")

    async with bus:
        number = await first.get()
    [(partition, gap)] = gaps
    print(f"orders/{partition}: gap {gap.range}, the log begins after it")
    print("reading begins at", gap.stop)
    print("the first event that is left is number", number)
    store.close()


if __name__ == "__main__":
    asyncio.run(main())
