"""Workers: threads that make blocking calls for an event loop.

`loop.run_in_executor` does the same, by way of a second kind of future with locks of its own; that costs more than a
small append to a file. Here a call is put into a queue, and its result comes back as one callback of the loop.

A call whose task is cancelled is still made, or goes on: nobody can tell whether it has begun.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")


class Workers:
    """At most so many threads, started when they are needed; they end with `stop`, after what was asked for before."""

    def __init__(self, most: int, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._most = most
        self._name = name
        self._started = 0

    def stop(self) -> None:
        """Let the threads end; does not wait for them."""
        for _ in range(self._started):
            self._calls.put(None)

    def call(self, function: Callable[..., R], *args: Any, **options: Any) -> asyncio.Future[R]:
        """Make a call in one of the threads; the future has its result, in the event loop that asked."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._calls.put(partial(_call, loop, future, partial(function, *args, **options)))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._started}", daemon=True).start()
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # or else its result lives until the next one
            self._idle.release()


def _call(loop: asyncio.AbstractEventLoop, future: asyncio.Future[R], function: Callable[[], R]) -> None:
    try:
        settle = partial(_set_result, future, function())
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        settle = partial(_set_exception, future, error)
    with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
        loop.call_soon_threadsafe(settle)


def _set_result(future: asyncio.Future[R], result: R) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
