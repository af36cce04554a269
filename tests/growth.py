"""Waiting for a log to grow: by its notifier, which tells the listeners of its own process every time."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.bus.local import Local

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from penstock import Bus
    from penstock.rows import Partition


@contextmanager
def growth(bus: Bus) -> Iterator[Callable[[], Awaitable[None]]]:
    """Return what waits until something was appended through this open bus since it was last called."""
    loop, grown = asyncio.get_running_loop(), asyncio.Event()
    assert isinstance(bus._backend, Local)
    notifier = bus._backend.store.notifier
    assert notifier is not None

    def tell(_: Partition) -> None:
        loop.call_soon_threadsafe(grown.set)

    stop = notifier.listen(tell)

    async def wait() -> None:
        await grown.wait()
        grown.clear()

    try:
        yield wait
    finally:
        stop()
