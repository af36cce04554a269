"""Portal: an event loop in a thread of its own, and calls into it from threads that have none, or another one.

It is how code that is not asynchronous uses a bus: there is one implementation, and `penstock.bus.sync` waits for it.

* The thread begins with the first call. So a portal that was made before a fork works in every child, each with a loop
  of its own. In a child of a process that has used it already, it says so.
* If the bus is open already, in an event loop that runs, there is no other thread, and calls go to that loop: so
  handlers in threads use the bus that runs them. It is closed by whoever has opened it.
* Any thread may call, several at once, and also one in which an event loop runs, which then waits as the thread does.
* Who is interrupted while it waits (`KeyboardInterrupt`) cancels its call, and nobody else's.
* `stop` lets the last call end, and then the thread. The interpreter does that, too, when it exits.
* A call sees the context variables of its caller.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from weakref import WeakSet

from penstock.errors import BusClosed, PublishError, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

logger = logging.getLogger(__name__)

R = TypeVar("R")
W = TypeVar("W")

EXIT_SECONDS: Final = 30.0
"""So long may closing take when the interpreter exits."""


class Portal:
    """A thread with an event loop, which begins with the first call and ends with `stop`."""

    def __init__(
        self,
        begin: Callable[[], asyncio.AbstractEventLoop | None],
        end: Callable[[], Coroutine[Any, Any, None]],
        resend: Callable[[Portal, Any], object],
    ) -> None:
        self._begin = begin  # once, before anything else; returns the loop that there is already
        self._end = end  # once, in the loop, after everything else
        self._resend = resend  # what the `prepared` of an error becomes for those who do not await
        self._lock = threading.Lock()
        self._begun = False
        self._stopped = False
        self._pid: int | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._borrowed = False
        """Whether the loop is another's."""
        self._stopping = asyncio.Event()

    # --- calling ---------------------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the loop and return its result."""
        done: Future[R] = Future()  # before anything else, so that an interrupt at any moment can cancel it
        try:
            self._submit(coroutine, done)
            return done.result()
        except CancelledError:
            raise BusClosed("this bus was closed while something waited for it") from None
        except PublishError as error:
            prepared = getattr(error, "prepared", None)
            if prepared is not None and not isinstance(prepared, Facade):
                error.prepared = self._resend(self, prepared)  # type: ignore[attr-defined] # not all of them have one
            raise
        except BaseException:
            done.cancel()  # does nothing if the error is the call's own
            raise

    def run(self, function: Callable[[], R]) -> R:
        """Call a function that does not wait, in the loop's thread, where nothing else happens meanwhile."""

        async def called() -> R:
            return function()

        return self.call(called())

    def here(self, function: Callable[[], R]) -> R:
        """Call a function in this thread, because it uses what belongs to this thread."""
        self._check_process()
        with self._lock:
            self._check_open()
        return function()

    def close(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that closes something, unless everything is closed already."""
        if self._stopped:
            coroutine.close()
        else:
            self.call(coroutine)

    def iterate(self, items: AsyncIterator[R], at_once: int = 1) -> Iterator[R]:
        """Yield what an asynchronous iterator gives; so many items at once come from one thread to the other."""
        try:
            more = True
            while more:
                some, more, error = self.call(_next(items, at_once))
                yield from some
                if error is not None:
                    raise error
        finally:
            # Not waited for: a generator may be collected anywhere, also in the loop's own thread.
            with suppress(UsageError):  # it is closed, or of another process
                self._submit(_close(items), Future(), waits=False)

    def _submit(self, coroutine: Coroutine[Any, Any, R], done: Future[R], *, waits: bool = True) -> None:
        """Let the loop run a coroutine, unless it was cancelled before that."""
        try:
            self._check_process()
            # Under the lock, so that what is submitted before `stop` is there when the loop ends, and is told.
            with self._lock:
                self._check_open()
                if waits:
                    self._check_thread()
                if self._loop is None:
                    self._start()
                assert self._loop is not None
                try:
                    self._loop.call_soon_threadsafe(_run, coroutine, done)
                except RuntimeError:
                    raise BusClosed("the event loop has ended in which this bus was open") from None
        except Exception:
            coroutine.close()
            raise

    def _check_open(self) -> None:
        if self._stopped:
            raise BusClosed("this bus is closed; make a new one: Bus(url, topics=[…]).sync()")
        if not self._begun:
            self._loop = self._begin()
            self._begun = True
            if self._loop is not None:
                self._borrowed, self._pid = True, os.getpid()

    def _check_thread(self) -> None:
        within = asyncio._get_running_loop()  # noqa: SLF001 - the public one raises where there is none
        if threading.current_thread() is self._thread or (within is not None and within is self._loop):
            raise UsageError("this is the thread of the bus's own event loop, which cannot wait for itself")

    def _check_process(self) -> None:
        if self._pid not in {None, os.getpid()}:
            raise UsageError(
                f"this bus was opened by process {self._pid}, before a fork: make another one in this process, "
                f"or use it for the first time after the fork"
            )

    # --- the thread ------------------------------------------------------------------------------

    def _start(self) -> None:
        _close_at_exit()
        self._pid = os.getpid()
        ready: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="penstock-sync", daemon=True)
        self._thread.start()
        self._loop = ready.result()
        _running.add(self)

    def _serve(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        async def serve() -> None:
            ready.set_result(asyncio.get_running_loop())
            await self._stopping.wait()

        try:
            with asyncio.Runner() as runner:  # which cancels what is left, so that nobody waits for ever
                runner.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    def stop(self, *, seconds: float | None = None) -> None:
        """Let the last call end, and then the thread; may be repeated, by any thread, and then waits for the same."""
        if self._pid not in {None, os.getpid()}:
            return  # there is nothing of it in this process
        self._check_thread()
        with self._lock:
            first, self._stopped = not self._stopped, True
            loop, thread = None if self._borrowed else self._loop, self._thread
            last: Future[None] = Future()
            if first and loop is not None:
                loop.call_soon_threadsafe(_run, self._end(), last)
        try:
            if first and loop is not None:
                last.result(seconds)
        finally:
            if loop is not None and thread is not None:
                if first:
                    loop.call_soon_threadsafe(self._stopping.set)
                thread.join(seconds)


def _run(coroutine: Coroutine[Any, Any, R], done: Future[R]) -> None:
    """Run a coroutine for whoever waits in another thread; in the loop."""
    if done.cancelled():
        coroutine.close()
        return
    loop = asyncio.get_running_loop()
    task = loop.create_task(coroutine)

    def ended(task: asyncio.Task[R]) -> None:
        if task.cancelled():
            done.cancel()
        elif done.set_running_or_notify_cancel():  # from here on nobody can cancel it
            error = task.exception()
            done.set_result(task.result()) if error is None else done.set_exception(error)
        else:
            task.exception()  # nobody waits for it any more

    def cancel(done: Future[R]) -> None:
        if done.cancelled():
            with suppress(RuntimeError):  # the loop has ended, and the task before it
                loop.call_soon_threadsafe(task.cancel)

    task.add_done_callback(ended)
    done.add_done_callback(cancel)


async def _next(items: AsyncIterator[R], at_once: int) -> tuple[list[R], bool, Exception | None]:
    """Return the next items, whether there may be more, and what went wrong after these."""
    some: list[R] = []
    try:
        async for item in items:
            some.append(item)
            if len(some) == at_once:
                return some, True, None
    except Exception as error:  # noqa: BLE001 - it is raised when those before it were given
        return some, False, error
    return some, False, None


async def _close(items: AsyncIterator[Any]) -> None:
    with suppress(RuntimeError):  # its last call is being cancelled, which closes it as well
        await items.aclose()  # type: ignore[attr-defined] # all of ours are generators


class Facade(Generic[W]):
    """Something asynchronous, for those who do not await: see `penstock.bus.sync`."""

    __slots__ = ("_portal", "_wrapped")

    def __init__(self, portal: Portal, wrapped: W) -> None:
        self._portal = portal
        self._wrapped = wrapped

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"


# --- when the interpreter exits ------------------------------------------------------------------

_running: WeakSet[Portal] = WeakSet()
_registered = threading.Event()


def _close_at_exit() -> None:
    """See to it that whatever is open then is closed when the interpreter exits."""
    if not _registered.is_set():
        _registered.set()
        # When executors end their threads, and before that, since closing needs threads; `atexit` comes too late.
        getattr(threading, "_register_atexit", atexit.register)(_close_all)


def _close_all() -> None:
    for portal in list(_running):
        try:
            portal.stop(seconds=EXIT_SECONDS)
        except Exception as error:  # noqa: BLE001 - nobody could catch it, and the next one must be closed, too
            logger.error("a bus could not be closed when the interpreter exited: %r", error)  # noqa: TRY400 - enough
