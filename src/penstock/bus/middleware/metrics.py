"""Metrics of handlers: how long each run took, and what it raised, by subscription.

It adds to the metrics of the bus whose delivery it sees, as `penstock_process_seconds` and
`penstock_process_failures_total`. So it need not be told of a bus, and may be the middleware of several. ::

    bus = Bus("file:./events", middleware=[measured])

What is inside of it is measured: put it first for all of a handler's middleware, last for the handler alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.bus.delivered import Delivery
    from penstock.bus.middleware import Proceed


async def measured(delivery: Delivery[Any], proceed: Proceed) -> None:
    """Run what is inside, and count how long it took and how it ended; one that is cancelled counts as failed."""
    member = delivery._seat.member  # noqa: SLF001 - whose delivery it is, only it knows
    clock, tally = member.clock, member.tally
    began = clock.monotonic()
    try:
        await proceed()
    except BaseException as error:
        tally.processed(clock.monotonic() - began, error)
        raise
    tally.processed(clock.monotonic() - began)
