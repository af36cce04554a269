"""Closing: an orderly end that is never left half done.

Whoever waits for it may be cancelled, by a timeout, say: then it goes on by itself. Whoever asks again meanwhile waits
for the same one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

logger = logging.getLogger(__name__)


class Closing:
    """How something comes to its end, once at a time."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def by(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Return when it is closed; calls `close` unless that is under way already."""
        task = self._task
        if task is None or task.done():
            task = self._task = asyncio.get_running_loop().create_task(close())
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(_told)
            raise


def _told(task: asyncio.Task[None]) -> None:
    """Say why it failed, where nobody waits to be told."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("what was closing failed: %s: %s", type(error).__name__, error)
