"""Looking after a subscription, from any process: how far it is behind, holding it, moving it, changing its policy.

It prints::

    paused, and behind: 3, at 0
    resumed: 1, 2, 3; behind: 0
    moved from 3 to 1
    again: 2, 3
"""

from __future__ import annotations

import asyncio

from penstock import Bus, LagInfo, Topic

jobs = Topic("jobs", bytes)
bus = Bus("memory:", topics=[jobs])
seen: asyncio.Queue[str] = asyncio.Queue()


@bus.subscriber(jobs, "work")
async def work(job: bytes) -> None:
    seen.put_nowait(job.decode())


async def caught_up() -> LagInfo:
    while True:
        [lag] = await bus.lag(jobs, "work")
        if not lag.has_lag:
            return lag
        await asyncio.sleep(0.01)


async def main() -> None:
    await bus.open()
    async with bus.consume(jobs, "work"):
        pass  # the subscription is there from now on
    await bus.pause(jobs, "work")
    await bus.publish_batch(jobs, [b"1", b"2", b"3"])

    async with bus:
        [lag] = await bus.lag(jobs, "work")
        print(f"paused, and behind: {lag.lag}, at {lag.next_offset}")

        await bus.resume(jobs, "work")
        came = [await seen.get() for _ in range(3)]
        print(f"resumed: {', '.join(came)}; behind: {(await caught_up()).lag}")

        [(before, after)] = (await bus.seek(jobs, "work", 1)).values()
        print("moved from", before, "to", after)
        print("again:", ", ".join([await seen.get() for _ in range(2)]))
        changed = await bus.change(jobs, "work", rate=100, heartbeat="high_priority")
        assert changed.name == "work"


if __name__ == "__main__":
    asyncio.run(main())
