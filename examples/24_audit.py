"""An audit: what became of every event, proven by the records that consumers leave. Needs Spark, and Java.

It prints::

    proven: Nothing is lost: what became of 6 events in 1 subscription is proven.
    acked 5, dead 1, pending 0, lost 0
    dead: KeyError, at shipments/0@3
    the page says so, too: True
"""

from __future__ import annotations

import asyncio
import tempfile

from penstock import Bus, Retry, Topic
from penstock.spark import audit, session

shipments = Topic("shipments", bytes)


async def deliver(url: str) -> None:
    bus = Bus(url, topics=[shipments])
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    @bus.subscriber(shipments, "customs", retry=Retry(max_retries=0))
    async def declare(data: bytes) -> None:
        seen.put_nowait(data)
        if data == b"perpetuum mobile":
            raise KeyError("tariff")

    async with bus:
        await bus.publish_batch(shipments, [b"tea", b"ink", b"salt", b"perpetuum mobile", b"wool", b"oak"])
        for _ in range(6):
            await seen.get()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        url = f"file:{directory}/events"
        asyncio.run(deliver(url))
        spark = session("local[1]")
        found = audit(spark, url, shipments)
        spark.stop()

    print(f"{found.verdict}: {found.sentence}")
    counts = found.counts
    print(f"acked {counts.acked}, dead {counts.dead}, pending {counts.pending}, lost {found.lost}")
    [customs] = found.subscriptions
    [letter] = customs.dead
    print(f"dead: {letter.error_type}, at {customs.topic}/{letter.partition}@{letter.offset}")
    page = found.html()  # write it to a file: it needs nothing else
    print("the page says so, too:", found.sentence in page)


if __name__ == "__main__":
    main()
