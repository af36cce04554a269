"""Middleware: what happens around every handler of a bus, or of one subscriber.

It prints::

    tenant acme: welcome is sent
    tenant acme: goodbye is sent
    1 duplicate was not sent
    mails/0@0 ok, mails/0@1 ok, mails/0@2 ok
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import Any

from penstock import Bus, Delivery, Topic
from penstock.bus.middleware import Proceed
from penstock.bus.middleware.dedupe import Dedupe

mails = Topic("mails", bytes)
tenant: ContextVar[str] = ContextVar("tenant")
ends: asyncio.Queue[str] = asyncio.Queue()


async def audited(delivery: Delivery[Any], proceed: Proceed) -> None:
    try:
        await proceed()
    except Exception:
        ends.put_nowait(f"{delivery.position} failed")
        raise  # whatever is outside of it, and in the end the bus, decides by it
    ends.put_nowait(f"{delivery.position} ok")


async def of_tenant(delivery: Delivery[Any], proceed: Proceed) -> None:
    tenant.set(delivery.headers["tenant"].decode())
    await proceed()


dedupe = Dedupe()
bus = Bus("memory:", topics=[mails], middleware=[audited, of_tenant])  # the first one is the outermost


@bus.subscriber(mails, "sending", middleware=[dedupe])
def send(text: bytes) -> None:  # a thread of its own; the context comes along
    print(f"tenant {tenant.get()}: {text.decode()} is sent")


async def main() -> None:
    async with bus:
        for text in (b"welcome", b"welcome", b"goodbye"):
            await bus.publish(mails, text, id=text.decode(), headers={"tenant": "acme"})
        told = [await ends.get() for _ in range(3)]
    print(dedupe.duplicates, "duplicate was not sent")
    print(", ".join(told))


if __name__ == "__main__":
    asyncio.run(main())
