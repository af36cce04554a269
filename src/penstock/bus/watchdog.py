"""Watchdog: notices when something blocks the event loop, and names it.

A handler that computes for long, or calls something that waits without `await`, stops everything else of its process:
heartbeats, leases, the other handlers. The loop cannot tell by itself, so that a thread looks whether it still ticks.
Once it has not for a second the log says where it stands, and in which handler; or, if the loop was kept waiting for at
least half of that second, that it was not its fault: on Linux the kernel tells for how long a thread was ready and got
no processor.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Final

from penstock.bus.handlers import code_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from penstock.bus.handlers import Handler

logger = logging.getLogger(__name__)

BLOCKED_SECONDS: Final = 1.0
TICKS: Final = 4
"""So often within that time it is looked, and the loop ticks."""
FRAMES_MAX: Final = 3


class Watchdog:
    """Watches the event loop that it is started in, until it is stopped."""

    def __init__(self, handlers: Callable[[], Iterable[Handler]], blocked_seconds: float = BLOCKED_SECONDS) -> None:
        self._handlers = handlers
        self._seconds = blocked_seconds
        self.blocked = 0
        """How often the loop was blocked."""
        self._ticked, self._starved = time.monotonic(), 0.0
        """When the loop ticked last, and for how long it had got no processor until then."""
        self._thread = 0
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch the running loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.get_native_id()
        self._tick(loop)
        threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="penstock-watchdog", daemon=True
        ).start()

    def stop(self) -> None:
        """Watch no more."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticked, self._starved = time.monotonic(), starved_seconds(self._thread)
        self._timer = loop.call_later(self._seconds / TICKS, self._tick, loop)

    def _watch(self, thread: int) -> None:
        told = excused = 0.0
        while not self._ended.wait(self._seconds / TICKS):
            ticked, starved = self._ticked, self._starved
            since = time.monotonic() - ticked
            if since < self._seconds or ticked == told:
                continue
            starved = starved_seconds(self._thread) - starved
            if since - starved >= self._seconds:
                told = ticked
                self.blocked += 1
                frame = sys._current_frames().get(thread)  # noqa: SLF001 - the only way to see another thread's stack
                logger.warning("the event loop has not run for %.3g s: %s", since, self._described(frame))
            elif starved >= self._seconds / 2 and ticked != excused:  # else the next look decides
                excused = ticked
                logger.warning(
                    "the event loop has not run for %.3g s: others had the processors for %.3g s of it", since, starved
                )

    def _described(self, frame: FrameType | None) -> str:
        """Say in which handler a stack is, and where it stands."""
        codes = {code: handler.name for handler in self._handlers() if (code := code_of(handler.function)) is not None}
        stack = list(traceback.walk_stack(frame)) if frame is not None else []
        name = next((codes[each.f_code] for each, _ in stack if each.f_code in codes), None)
        places = [f"{each.f_code.co_filename}:{line} in {each.f_code.co_name}" for each, line in stack[:FRAMES_MAX]]
        where = " < ".join(places) or "nobody knows where"
        if name is None:
            return f"it is blocked at {where}"
        return f"handler {name} blocks it at {where}; a `def` handler runs in a thread, and may block"


def starved_seconds(thread: int) -> float:
    """Return for how long a thread of this process was ready and got no processor; 0 where nobody knows."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:  # noqa: PTH123 - not a file of ours
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
