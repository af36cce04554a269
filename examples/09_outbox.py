"""The outbox: an event and what it tells of are one transaction in your own SQLite file. Neither, or both.

It prints::

    ada's order is committed, and then published
    alan's order is rolled back, and never was
    events: ['ada', 'grace']
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path

from penstock import Bus, Topic

orders = Topic("orders", bytes)


def place(bus: Bus, database: sqlite3.Connection, customer: str, *, in_stock: bool = True) -> None:
    with database:  # commits at its end, or rolls back
        database.execute("INSERT INTO orders VALUES (?)", (customer,))
        bus.stage(database, orders, customer.encode(), key=customer)
        if not in_stock:
            raise LookupError("sold out")


async def main(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE orders (customer TEXT NOT NULL)")
    bus = Bus("memory:", topics=[orders], outbox=path)
    seen: asyncio.Queue[str] = asyncio.Queue()

    @bus.subscriber(orders, "shipping")
    async def ship(customer: bytes) -> None:
        seen.put_nowait(customer.decode())

    async with bus:  # while it is open, what was committed is published
        place(bus, database, "ada")
        first = await seen.get()
        print(f"{first}'s order is committed, and then published")
        try:
            place(bus, database, "alan", in_stock=False)
        except LookupError:
            print("alan's order is rolled back, and never was")
        place(bus, database, "grace")
        print("events:", [first, await seen.get()])
    assert [row[0] for row in database.execute("SELECT customer FROM orders")] == ["ada", "grace"]
    database.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory) / "shop.db"))
