"""A publish that is cut off is *unknown*, never "failed". Sent again through the same object, it is stored once.

It prints::

    cut off: may be stored, or not
    stored at payments/0@0
    sent again: payments/0@0, duplicate True
    events: 1
"""

from __future__ import annotations

import asyncio

from penstock import Bus, Prepared, Topic
from penstock.errors import PublishUnknown

payments = Topic("payments", bytes)


async def main() -> None:
    async with Bus("memory:", topics=[payments]) as bus:
        prepared: Prepared = bus.prepare(payments, b"10 EUR to ada")
        try:
            await prepared.send(timeout=0)  # no store is so fast
        except PublishUnknown:
            print("cut off: may be stored, or not")
        receipt = await prepared.send()
        print("stored at", receipt.position)
        again = await prepared.send()
        print(f"sent again: {again.position}, duplicate {again.duplicate}")
        print("events:", len([event async for event in bus.read(payments)]))


if __name__ == "__main__":
    asyncio.run(main())
