"""A test of handlers: the program's own bus, on a store in memory and a clock that jumps; nothing is mocked.

It prints::

    handled: ada
    dead: bob, Reject: never heard of him
    with everything that may go wrong: ada, at least once
"""

from __future__ import annotations

import asyncio

from penstock import Bus, Delivery, Reject, Retry, Topic
from penstock.testing import harness

names = Topic("names", bytes, key=lambda name: name)
bus = Bus("file:./never-touched", topics=[names])


@bus.subscriber(names, "greeting", retry=Retry(max_retries=5, delay=3600))
async def greet(name: bytes, delivery: Delivery[bytes]) -> None:
    if name == b"bob":
        raise Reject("never heard of him")
    if delivery.attempt == 1:
        raise ConnectionError("in an hour, please")


async def main() -> None:
    async with harness(bus) as world:
        await bus.publish_batch(names, [b"ada", b"bob"])
        await world.drain()  # an hour passes at once
        print("handled:", *(name.decode() for name in world.settled(greet)))
        [dead] = world.dead
        print(f"dead: {dead.value.decode()}, {dead.error}")

    async with harness(bus, chaos=7) as world:
        await bus.publish(names, b"ada")
        await world.drain()
        assert world.settled(greet) == [b"ada"]
        assert world.attempts(greet) >= 2
        print("with everything that may go wrong: ada, at least once")


if __name__ == "__main__":
    asyncio.run(main())
