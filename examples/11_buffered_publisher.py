"""Sending much without waiting for each: plain calls, stored many at a time, and no failure is lost.

It prints::

    10,001 events are stored
    the last one of user-7 is at clicks/1@2900
    user-7 sent 101, in their order
"""

from __future__ import annotations

import asyncio
import tempfile

from penstock import BufferedPublisher, Bus, PendingReceipt, Topic

clicks = Topic("clicks", bytes, partitions=4)


async def main(url: str) -> None:
    async with Bus(url, topics=[clicks]) as bus:
        publisher: BufferedPublisher[bytes]
        async with bus.publisher(clicks) as publisher:
            for number in range(10_000):
                await publisher.put(b"%d" % number, key=f"user-{number % 100}")  # waits only if too much is on its way
            last: PendingReceipt = publisher.send(b"10000", key="user-7")
            await publisher.flush()  # everything so far is on the disk
            place = (await last).position

        events = [event async for event in bus.read(clicks)]
        print(f"{len(events):,} events are stored")
        print("the last one of user-7 is at", place)
        mine = [int(event.data) for event in events if event.key == b"user-7"]
        assert mine == sorted(mine)
        print(f"user-7 sent {len(mine)}, in their order")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(f"file:{directory}"))
