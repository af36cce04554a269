"""Middleware: what happens around the handlers of a bus, or of one subscriber; one small module each.

A middleware is anything that can be called like `Middleware`, a plain `async def` included. The first one of the bus is
the outermost; those of a subscriber come after all of the bus; the handler is the innermost. ::

    async def timed(delivery: Delivery[Any], proceed: Proceed) -> None:
        began = time.perf_counter()
        await proceed()
        print(delivery.position, time.perf_counter() - began)

    bus = Bus("file:./events", middleware=[timed])

What it raises is what the handler raised, for whoever is outside of it: the event is tried again, or rejected. One that
returns without `proceed` lets the event count as handled. It belongs to whoever made it: a bus that ends does not close
it, and the next one may have it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from penstock.bus.delivered import Delivery

Proceed: TypeAlias = Callable[[], Awaitable[None]]
"""Runs whatever is inside, and returns when the handler has."""


class Middleware(Protocol):
    """What is called around a handler, in the event loop, once for each attempt at an event."""

    async def __call__(self, delivery: Delivery[Any], proceed: Proceed, /) -> None:
        """Do something, `await proceed()`, do something else."""
