"""Delivery is at least once; an effect in a database happens once. Its mark is in the same transaction.

Two things go wrong here: the publisher repeats itself, and a handler fails after it has written.

It prints::

    called 4 times
    booked: [('p-1', 950), ('p-2', 120)]
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path

import penstock
from penstock import Bus, Delivery, Retry, Topic


@penstock.event("payment")
@dataclass(frozen=True)
class Payment:
    payment_id: str
    cents: int


payments = Topic("payments", Payment)


async def main(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE booked (payment TEXT NOT NULL, cents INTEGER NOT NULL)")
    bus = Bus("memory:", topics=[payments])
    calls = 0
    last = asyncio.Event()

    @bus.subscriber(payments, "bookkeeping", retry=Retry(delay=0.01))
    async def book(payment: Payment, delivery: Delivery[Payment]) -> None:
        nonlocal calls
        calls += 1
        with delivery.once(database) as first:  # a transaction: the mark and what is written, or neither
            if first:
                database.execute("INSERT INTO booked VALUES (?, ?)", (payment.payment_id, payment.cents))
        if delivery.attempt == 1 and payment.payment_id == "p-1" and first:
            raise ConnectionError("it fails after the effect, so that the event comes again")
        if payment.payment_id == "p-2":
            last.set()

    async with bus:
        for _ in range(2):  # the same id and source: one event, however often it is published
            await bus.publish(payments, Payment("p-1", 950), id="p-1", source="shop")
        await bus.publish(payments, Payment("p-2", 120), id="p-2", source="shop")
        await last.wait()
    print("called", calls, "times")
    print("booked:", database.execute("SELECT * FROM booked ORDER BY payment").fetchall())
    database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "books.db"))
