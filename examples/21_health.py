"""Health: whether events make progress where there are any, and why not, in words.

It prints::

    fine: ok
    degraded: subscription 'work' waits for somebody who consumes it
"""

from __future__ import annotations

import asyncio

from penstock import Bus, Health, SubscriptionHealth, Topic

jobs = Topic("jobs", bytes)


async def main() -> None:
    bus = Bus("memory:", topics=[jobs])
    await bus.open()
    health: Health = await bus.health()
    print("fine:", health.state)

    async with bus.consume(jobs, "work"):
        pass  # the subscription is there from now on, and nobody consumes it
    await bus.publish(jobs, b"job")
    work: SubscriptionHealth
    [work] = (await bus.health(jobs)).subscriptions
    assert work.lag == 1
    assert "idle: nobody consumes it, and nobody has yet" in work.reasons[0]
    print(f"{work.state}: subscription {work.name!r} waits for somebody who consumes it")
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main())
