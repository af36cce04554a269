"""Single calls that are stored together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from penstock.cli.bench.bus.orders import ORDERS, a_bus, an_order
from penstock.cli.bench.bus.sizes import Sizes
from penstock.cli.bench.harness import Figure, compare

ROOM_EVERY = 500
"""A loop that sends asks for room after so many events."""


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure the buffered publisher."""
    orders = [an_order(number, sizes.keys) for number in range(sizes.sent_events)]
    bus = a_bus(directory / "sent")

    async def send_all() -> None:
        async with bus.publisher(ORDERS) as publisher:
            for number, order in enumerate(orders):
                publisher.send(order)
                if number % ROOM_EVERY == 0:
                    await publisher.room()

    with asyncio.Runner() as runner:
        timing = compare(lambda: runner.run(send_all()), None, min(rounds, sizes.rounds))
        runner.run(bus.close())
    yield timing.events_per_second("publisher.linger", len(orders), goal="value >= 150000 events/s")
