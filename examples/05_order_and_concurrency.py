"""Handlers run at the same time, and the events of one key one after the other. A slow key holds up nobody else.

It prints::

    ada waits, and meanwhile: alan 0, alan 1, alan 2, grace 0, grace 1, grace 2
    ada: [0, 1, 2]
    at most 3 at a time
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import penstock
from penstock import Bus, Topic


@penstock.event("step")
@dataclass(frozen=True)
class Step:
    customer: str
    number: int


steps = Topic("steps", Step, key=lambda step: step.customer)
bus = Bus("memory:", topics=[steps])
gate = asyncio.Event()
ended: asyncio.Queue[Step] = asyncio.Queue()
running = most = 0


@bus.subscriber(steps, "walk", concurrency=3)
async def walk(step: Step) -> None:
    global running, most  # noqa: PLW0603 - to count them is the point here
    running += 1
    most = max(most, running)
    if step.customer == "ada":
        await gate.wait()
    else:
        await asyncio.sleep(0.001)
    running -= 1
    ended.put_nowait(step)


async def main() -> None:
    async with bus:
        await bus.publish_batch(steps, [Step("ada", number) for number in range(3)])
        await bus.publish_batch(steps, [Step(name, number) for number in range(3) for name in ("grace", "alan")])

        meanwhile = [await ended.get() for _ in range(6)]
        print("ada waits, and meanwhile:", ", ".join(sorted(f"{step.customer} {step.number}" for step in meanwhile)))
        for name in ("grace", "alan"):
            assert [step.number for step in meanwhile if step.customer == name] == [0, 1, 2]

        gate.set()
        print("ada:", [(await ended.get()).number for _ in range(3)])
    assert 1 < most <= 3
    print("at most 3 at a time")


if __name__ == "__main__":
    asyncio.run(main())
