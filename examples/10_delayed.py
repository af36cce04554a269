"""Delayed publishes: stored now, and in the topic when their time has come; until then they can be cancelled.

It prints::

    waiting: 2
    the one of next year is cancelled: True
    in a moment
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from penstock import Bus, ScheduledReceipt, Topic

reminders = Topic("reminders", bytes)
bus = Bus("memory:", topics=[reminders])
came: asyncio.Queue[str] = asyncio.Queue()


@bus.subscriber(reminders, "bell")
async def ring(text: bytes) -> None:
    came.put_nowait(text.decode())


async def main() -> None:
    async with bus:
        began = datetime.now(UTC)
        soon: ScheduledReceipt = await bus.publish(reminders, b"in a moment", delay=timedelta(seconds=1))
        late = await bus.publish(reminders, b"next year", at=began + timedelta(days=365))
        print("waiting:", len(await bus.scheduled()))
        print("the one of next year is cancelled:", await bus.cancel_scheduled(late.id))
        print(await came.get())
        assert datetime.now(UTC) >= soon.due_at >= began + timedelta(seconds=1)
        assert await bus.scheduled() == []


if __name__ == "__main__":
    asyncio.run(main())
