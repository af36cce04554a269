"""Connections: a handler gets usable ones from Django, and leaves none behind that is broken or too old.

Django does this around every request. Its connections belong to threads, so it is done in the thread that a handler's
queries run in: that of a `def` handler itself, and for an `async def` one the thread that Django's own asynchronous
methods use. A middleware of the bus would be in neither.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import close_old_connections

if TYPE_CHECKING:
    from penstock.bus.bus import Bus
    from penstock.bus.handlers import Handler


def look_after_connections(bus: Bus) -> None:
    """Let all handlers of a bus close old connections, before and after each event."""
    for subscriber in bus.subscribers:
        subscriber.handlers[:] = [_closing(handler) for handler in subscriber.handlers]


def _closing(handler: Handler) -> Handler:
    function = handler.function

    @wraps(function)
    def in_thread(*arguments: Any) -> Any:
        close_old_connections()
        try:
            return function(*arguments)
        finally:
            close_old_connections()

    @wraps(function)
    async def in_loop(*arguments: Any) -> Any:
        await sync_to_async(close_old_connections)()
        try:
            return await function(*arguments)
        finally:
            await sync_to_async(close_old_connections)()

    return replace(handler, function=in_loop if handler.in_loop else in_thread)
