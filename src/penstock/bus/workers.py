"""Workers: threads that make blocking calls for an event loop.

`loop.run_in_executor` does the same, by way of a second kind of future with locks of its own; that costs more than a
small append to a file. Here a call is put into a queue, and its result comes back as one callback of the loop.

A call whose task is cancelled is still made, or goes on: nobody can tell whether it has begun.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    _Call = tuple[Callable[[], Callable[[], None]], asyncio.AbstractEventLoop]
    _Calls = SimpleQueue[_Call | None]

R = TypeVar("R")


class Workers:
    """At most so many threads, started when they are needed; they end with `stop`, after what was asked for before.

    Of those that are idle the one that was busy last is asked: what it needs is still near the processor, and the
    memory that it has given back is the next that it takes. Reads that went around all threads took a tenth longer.
    """

    def __init__(self, most: int, name: str) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Calls] = []
        """The queues of threads that have nothing to do, the last of them at the end."""
        self._waiting: deque[_Call] = deque()
        """What no thread is free for."""
        self._most = most
        self._name = name
        self._started = 0
        self._stopped = False

    def stop(self) -> None:
        """Let the threads end; does not wait for them."""
        with self._lock:
            self._stopped = True
            idle, self._idle = self._idle, []
        for calls in idle:
            calls.put(None)

    def call(self, function: Callable[..., R], *args: Any, **options: Any) -> asyncio.Future[R]:
        """Make a call in one of the threads; the future has its result, in the event loop that asked."""
        loop = asyncio.get_running_loop()
        if self._stopped:
            raise RuntimeError("these threads were told to end")
        future: asyncio.Future[R] = loop.create_future()
        call: _Call = partial(_answered, future, partial(function, *args, **options)), loop
        with self._lock:
            if self._idle:
                self._idle.pop().put(call)
                return future
            if self._started == self._most:
                self._waiting.append(call)
                return future
            self._started += 1
            name = f"{self._name}-{self._started}"
        calls: _Calls = SimpleQueue()
        calls.put(call)
        try:
            threading.Thread(target=self._work, args=(calls,), name=name, daemon=True).start()
        except RuntimeError:  # the machine has no more threads, or the interpreter ends
            with self._lock:
                self._started -= 1
            raise
        return future

    def _work(self, calls: _Calls) -> None:
        call = calls.get()
        while call is not None:
            make, loop = call
            settle = make()
            call = self._next(calls)
            # Whoever is told may ask for the next thing at once, and finds this thread idle.
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(settle)
            del make, settle, loop  # or else the result lives until the next one
            if call is None:
                call = calls.get()

    def _next(self, calls: _Calls) -> _Call | None:
        """Return what waits for a thread; None if it comes by this queue, or the end does."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._stopped:
                calls.put(None)
            else:
                self._idle.append(calls)
        return None


def _answered(future: asyncio.Future[R], function: Callable[[], R]) -> Callable[[], None]:
    """Make a call, and return what tells its result."""
    try:
        return partial(_set_result, future, function())
    except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
        return partial(_set_exception, future, error)


def _set_result(future: asyncio.Future[R], result: R) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if isinstance(error, StopIteration | GeneratorExit):
        # Where it is awaited these would say something about the coroutine there, and no future takes the first.
        raised, error = error, RuntimeError(f"the call raised {type(error).__name__}")
        error.__cause__ = raised
    if not future.done():
        future.set_exception(error)
