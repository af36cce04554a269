"""Handling: one subscriber at work: its consumer, and the workers that call its handlers.

A worker takes an event and runs its handler to the end; as many do so at a time as the subscriber's concurrency says.
Events of one lane run one after the other (`penstock.bus.intake`). There is no task per event, and acks gather until
the event loop runs, or until there is nothing to do without telling them: a handler that never waits costs little more
than its call.

What a handler raises decides what becomes of its event (`penstock.bus.verdicts`). One that runs for longer than the
subscription's `timeout` is cancelled, and the event fails; one that cannot be cancelled, as no thread can be, keeps its
lane, and the log says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from penstock.bus.delivered import Acks
from penstock.bus.intake import Intake
from penstock.bus.verdicts import Reject, RetryLater
from penstock.bus.workers import Workers
from penstock.engine.messages import Failure
from penstock.engine.work import TIMED_OUT
from penstock.errors import DecodeError, FutureVersion, StaleDelivery, UsageError
from penstock.failures import bounded
from penstock.runtime.member import BREATH_SECONDS, AtWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from penstock.bus.consumer import Consumer
    from penstock.bus.delivered import Delivery
    from penstock.bus.handlers import Handler, Subscriber
    from penstock.bus.middleware import Middleware
    from penstock.clock import Clock

logger = logging.getLogger(__name__)

UPGRADE_SECONDS: Final = 60.0
"""How often an event of a future version is tried again: until then its lane waits for an upgrade."""
SLOW_SECONDS: Final = 60.0
"""A handler that runs for longer is named in the log."""
STUBBORN_SECONDS: Final = 5.0
"""One that was cancelled, and runs on for so long, is named again."""
TURN_SECONDS: Final = 0.001
"""A turn of the event loop that is shorter is one that nobody else needed …"""
LONG_BREATH_SECONDS: Final = 2 * BREATH_SECONDS
"""… and then the next one may be later: acks are told in each, and whoever writes progress looks around, which is half
a millisecond."""
CANCELLED: Final = "was cancelled, and runs on"
UNSTOPPABLE: Final = "has had its time, and a thread cannot be stopped"


class Undecodable(Exception):
    """Raised to middleware when an event's bytes do not fit its class: it becomes a dead letter."""

    def __init__(self, error: DecodeError) -> None:
        super().__init__(str(error))
        self.error = error


class Worker:
    """One of those who call the handlers of a subscriber."""

    __slots__ = ("began", "deadline", "delivery", "handler", "overdue", "reported", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.delivery: Delivery[Any] | None = None
        """What it works on; None if it waits for something to do."""
        self.handler: Handler | None = None
        self.began = 0.0
        self.deadline: float | None = None
        self.overdue = False
        """Whether it was cancelled because its time was over."""
        self.reported = 0.0
        """When the log last said of it that something takes long; that may have been another event."""

    def silent_since(self) -> float:
        """Return since when the log has not said that what it works on takes long."""
        return max(self.began, self.reported)


class Handling:
    """A subscriber at work, from `start` to `stop`."""

    def __init__(
        self,
        subscriber: Subscriber,
        consumer: Consumer[Any],
        clock: Clock,
        middleware: tuple[Middleware, ...],
        *,
        expect: Callable[[float], None],
    ) -> None:
        self.subscriber = subscriber
        self.consumer = consumer
        self._clock = clock
        self._expect = expect
        """Is told when the time of a handler ends, for whoever looks at times."""
        self._middleware = (*middleware, *subscriber.middleware)
        self._handlers = subscriber.by_type()
        self._topic = subscriber.topic
        # Where there is but one, it is that of whatever can be decoded.
        self._only = None
        if len(self._handlers) == 1 and not subscriber.ignore_others:
            [self._only] = self._handlers.values()
        self._threads: Workers | None = None
        if not all(handler.in_loop for handler in subscriber.handlers):
            self._threads = Workers(subscriber.concurrency, f"penstock-{subscriber.name}")
        self._acks = Acks()
        self._intake = Intake(consumer)
        self.workers: set[Worker] = set()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._context = contextvars.copy_context()
        """What every handler begins with: that of whoever has opened the bus."""
        self._calls: dict[Delivery[Any], asyncio.Future[Any]] = {}
        """The calls in threads that are to be made or run."""
        self._asking = False
        self._tending = False
        self._stopping = False
        self._breath_at = 0.0
        self._breathless = False
        """Whether no worker begins anything until the event loop has had a turn."""
        self._surprised: set[Handler] = set()
        self._silent: set[Handler | None] = set()
        """Coroutine functions that have returned nothing, as they should: nobody has to look at what they return."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set if it can go on no more, with the reason."""

    def __str__(self) -> str:
        return str(self.subscriber)

    @property
    def busy(self) -> list[Worker]:
        """The workers that have a handler running."""
        return [worker for worker in self.workers if worker.delivery is not None]

    def _at_work(self) -> Iterable[AtWork]:
        """Yield the handlers that run, for whoever tells of them."""
        now = self._clock.monotonic()
        for worker in self.busy:
            delivery = worker.delivery
            assert delivery is not None
            name = worker.handler.name if worker.handler is not None else "none"
            how = CANCELLED if worker.overdue else UNSTOPPABLE if _has_had_its_time(worker, now) else ""
            yield AtWork(name, delivery._seat, delivery.event.offset, delivery.event.key, worker.began, how)

    # --- coming and going ---------------------------------------------------------------------

    async def start(self) -> None:
        """Join the subscription, and begin."""
        await self.consumer.__aenter__()
        self.consumer._tell_handlers(self._at_work)
        self._hire()

    def begin_nothing(self) -> None:
        """Begin nothing more, and give back what was not begun; may be repeated."""
        self._stopping = True
        self._intake.give_back()

    async def drain(self) -> None:
        """Begin nothing more, and return when every handler that runs has ended."""
        self.begin_nothing()
        tasks = [worker.task for worker in self.workers if worker.task is not None]
        for worker in self.workers:
            if worker.delivery is None and worker.task is not None:
                worker.task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """End what still runs, give it back, write what was settled, and leave; may be repeated."""
        self._stopping = True
        tasks = [worker.task for worker in self.workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await self._ended(tasks)
        self._acks.tell()
        await self.consumer.close()
        if self._threads is not None:
            self._threads.stop()
        if not self.failed.done():
            self.failed.cancel()

    async def _ended(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Return when all tasks have ended that were cancelled, or some do not let themselves be."""
        ended = asyncio.ensure_future(asyncio.wait(tasks))
        limit = asyncio.ensure_future(self._clock.pause(STUBBORN_SECONDS))
        try:
            await asyncio.wait([ended, limit], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
            limit.cancel()
        for worker in self.busy:
            self._report(worker, self._clock.monotonic(), f"{CANCELLED}; it is left behind, since this process ends")

    def _hire(self, first: Delivery[Any] | None = None) -> None:
        """Have another worker, which may have something to begin with."""
        worker = Worker()
        self.workers.add(worker)
        worker.task = asyncio.get_running_loop().create_task(
            self._work(worker, first), name=f"penstock {self}", context=self._context.copy()
        )
        worker.task.add_done_callback(partial(self._gone, worker))

    def _gone(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self.workers.discard(worker)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() and not self._stopping:
            self._hire()
        if error is not None and not self.failed.done():
            logger.error("%s can go on no more: %s", self, error)
            self.failed.set_exception(error)
            self.failed.exception()  # whoever waits for it is told; if nobody does, the log has been

    # --- taking -------------------------------------------------------------------------------

    async def _work(self, worker: Worker, delivery: Delivery[Any] | None) -> None:
        if delivery is not None and self._stopping:
            self._left(delivery)
            return
        while delivery is not None or not self._stopping:
            worker.began = self._clock.monotonic()
            if delivery is None:
                delivery = self._intake.take(worker.began)
            if delivery is None and not await self._wait():
                return
            while delivery is not None:
                if not self._tending:
                    self._tend_soon()
                await self._attempt(worker, delivery)
                delivery = self._intake.after(delivery)
                if not (self._stopping or _is_current(self._context)):
                    # What a handler has set is for its event alone.
                    self._hire(delivery)
                    return
                if delivery is not None:
                    worker.began = self._clock.monotonic()
                if worker.began >= self._breath_at and not self._breathless:
                    # Handlers that never wait would keep the event loop from everybody else.
                    self._breathless = True
                    asyncio.get_running_loop().call_soon(self._breathe, worker.began)
                if self._breathless:
                    await self._pause(delivery)

    async def _pause(self, following: Delivery[Any] | None) -> None:
        """Let the event loop have a turn; if this worker ends meanwhile, what it would do next goes back."""
        try:
            while self._breathless:  # noqa: ASYNC110 - the turn itself is what it waits for
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if following is not None:
                self._left(following)
            raise

    def _left(self, delivery: Delivery[Any]) -> None:
        """Let others have what was taken and is not begun."""
        delivery._return()
        self._intake.after(delivery)

    def _breathe(self, since: float) -> None:
        """Note that the event loop has had a turn, which began soon after this time."""
        self._breathless = False
        now = self._clock.monotonic()
        alone = now < since + TURN_SECONDS
        self._breath_at = now + (LONG_BREATH_SECONDS if alone else BREATH_SECONDS)

    async def _wait(self) -> bool:
        """Return when there may be something to take; False if there will never be."""
        if self._asking:
            idle = asyncio.get_running_loop().create_future()
            self._idle.append(idle)
            try:
                await idle
            finally:
                if idle in self._idle:
                    self._idle.remove(idle)
            return True
        self._asking = True
        more = False
        try:
            self._acks.tell()  # what they free may be the next to do
            more = await self.consumer._prefetched(singly=False)
        finally:
            self._asking = False
            if more:
                self._wake()  # whoever is woken asks, should this one have taken the last
        return more

    def _tend_soon(self) -> None:
        self._tending = True
        asyncio.get_running_loop().call_soon(self._tend)

    def _tend(self) -> None:
        """Tell what was done, and let another worker begin if there is something for it; called by the event loop."""
        self._tending = False
        self._acks.tell()
        # A worker that only breathes goes on by itself; more would take turns at what one does as quickly.
        if not (self._stopping or self._breathless) and (not self._asking or self.consumer._waiting):
            self._wake()

    def _wake(self) -> None:
        while self._idle:
            idle = self._idle.popleft()
            if not idle.done():
                idle.set_result(None)
                return
        if len(self.workers) < self.subscriber.concurrency and not self._stopping:
            self._hire()

    # --- one event ----------------------------------------------------------------------------

    async def _attempt(self, worker: Worker, delivery: Delivery[Any]) -> None:
        """Let an event be handled, and say what became of it."""
        handler = self._only or self._handler_of(delivery)
        if handler is None and self.subscriber.ignore_others:
            self._say(delivery._discard)
            return
        worker.handler, worker.delivery, worker.deadline = handler, delivery, None
        delivery._by_hand = self.subscriber.manual
        seconds = delivery._engine.policy.timeout_seconds
        if seconds is not None:
            self._limit(worker, delivery, seconds)
        try:
            if self._middleware:
                plainly = handler in self._silent and len(self._middleware) == 1
                proceed = partial(self._called if plainly else partial(self._around, 1), handler, delivery)
                await self._middleware[0](delivery, proceed)
            elif (result := await self._called(handler, delivery)) is not None:
                self._surprise(handler, result)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # whatever else a handler raises is its verdict
            await self._thread_of(delivery)
            if self._judge(worker, delivery, error):
                raise asyncio.CancelledError from error
        else:
            if not (delivery._said or delivery._by_hand):
                self._acks.add(delivery)
                if not self._tending:
                    self._tend_soon()
        finally:
            worker.delivery = None
            if worker.overdue and worker.task is not None:
                worker.overdue = False
                worker.task.uncancel()  # it was for the handler's time alone, and that is over

    def _handler_of(self, delivery: Delivery[Any]) -> Handler | None:
        return self._handlers.get(delivery.event.type or "" if self._topic.types else "")

    def _limit(self, worker: Worker, delivery: Delivery[Any], seconds: float) -> None:
        """Give a worker so much time for what it begins."""
        worker.deadline = worker.began + seconds
        delivery._keeper = partial(self._extend, worker)
        self._expect(worker.deadline)

    def _extend(self, worker: Worker, by: float) -> None:
        worker.deadline = self._clock.monotonic() + by

    async def _around(self, index: int, handler: Handler | None, delivery: Delivery[Any]) -> None:
        if index < len(self._middleware):
            await self._middleware[index](delivery, partial(self._around, index + 1, handler, delivery))
        elif (result := await self._called(handler, delivery)) is not None:
            self._surprise(handler, result)
        elif handler is not None and handler.in_loop:
            self._silent.add(handler)

    def _called(self, handler: Handler | None, delivery: Delivery[Any]) -> Awaitable[Any]:
        """Decode an event, and begin with its handler; returns what to wait for."""
        try:
            value = delivery._topic.decode(delivery.event)
        except FutureVersion:
            raise
        except DecodeError as error:
            raise Undecodable(error) from error
        assert handler is not None, "what can be decoded has a handler, or is ignored"
        if handler.in_loop:
            began: Awaitable[Any] = handler.begin(value, delivery)
            return began
        assert self._threads is not None
        context = contextvars.copy_context()
        call = self._threads.call(context.run, handler.function, *handler.arguments(value, delivery))
        self._calls[delivery] = call
        call.add_done_callback(lambda _: self._calls.pop(delivery))
        return asyncio.shield(call)

    async def _thread_of(self, delivery: Delivery[Any]) -> None:
        """Return when the thread has ended that handles this: nobody can stop it, and its lane waits for it.

        Some middleware gives up before; and while the process ends nobody waits.
        """
        call = self._calls.get(delivery)
        if call is not None and not (call.done() or self._stopping):
            await asyncio.wait([call])
            if not call.cancelled():
                call.exception()  # which nobody is interested in any more

    def _surprise(self, handler: Handler | None, result: Any) -> None:
        """Say once that what a handler returns does not matter."""
        assert handler is not None
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise UsageError(f"handler {handler.name} returned something to be awaited: declare it with `async def`")
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            raise UsageError(f"handler {handler.name} returned a generator, which never runs: a handler does not yield")
        if handler not in self._surprised:
            self._surprised.add(handler)
            logger.warning(
                "%s: handler %s returned a %s, which says nothing: return for done, raise for failed",
                self, handler.name, type(result).__name__,
            )  # fmt: skip

    # --- verdicts -----------------------------------------------------------------------------

    def _judge(self, worker: Worker, delivery: Delivery[Any], error: BaseException) -> bool:
        """Say what becomes of an event whose handler raised this; returns whether its worker must end."""
        # Of a handler that is cancelled another error may come, from a driver that was interrupted, say.
        ends = _is_cancelled(worker) and not worker.overdue
        verdict = isinstance(error, Reject | RetryLater)
        if ends and self._stopping and not verdict:
            delivery._return()  # it is this process that ends; the event has done nothing wrong
            return True
        self._say(partial(self._failed, delivery, self._timeout(worker) if worker.overdue and not verdict else error))
        if ends:
            # Its own code has cancelled this task, or somebody all tasks: another worker takes its place.
            self._intake.leave(delivery)
        return ends

    def _failed(self, delivery: Delivery[Any], error: BaseException | Failure) -> None:
        match error:
            case Failure():
                delivery._fail(error)
            case Undecodable():
                delivery._fail(error.error, retry=False)
            case Reject():
                delivery._fail(error, retry=False)
            case RetryLater():
                # Where it was raised says nothing, and to find out costs more than the rest.
                failure = Failure(type(error).__name__, bounded(error))
                delivery._fail(failure, delay=error.delay_seconds, counted=error.counted)
            case FutureVersion():
                logger.error("%s at %s: %s; its lane waits for an upgrade", self, delivery.position, error)
                delivery._fail(error, delay=UPGRADE_SECONDS, counted=False)
            case _:
                if not delivery._said:
                    delivery._fail(error)
                # One that is tried again is news to nobody but a developer; the last attempt is to everybody.
                logger.log(
                    logging.WARNING if delivery._is_last else logging.INFO,
                    "%s: handler %s failed at %s, attempt %d: %s",
                    self, self._name_at(delivery), delivery.position, delivery.attempt, type(error).__name__,
                    exc_info=error if logger.isEnabledFor(logging.DEBUG) else None,
                )  # fmt: skip

    def _name_at(self, delivery: Delivery[Any]) -> str:
        handler = self._handler_of(delivery)
        return handler.name if handler is not None else "none"

    def _say(self, verdict: Callable[[], None]) -> None:
        try:
            verdict()
        except StaleDelivery as stale:
            logger.info("%s: an event was handled for nothing: %s", self, stale)

    def _timeout(self, worker: Worker) -> Failure:
        took = self._clock.monotonic() - worker.began
        return Failure(TIMED_OUT, f"its handler was cancelled after {took:.3g} s")

    # --- time ---------------------------------------------------------------------------------

    def look_at_times(self, now: float) -> float | None:
        """Cancel what is overdue, name what is slow; returns when the next one is overdue."""
        first = None
        for worker in self.busy:
            handler, delivery = worker.handler, worker.delivery
            assert delivery is not None
            if worker.deadline is not None and not worker.overdue:
                if now >= worker.deadline:
                    self._end(worker, handler, delivery, now)
                elif first is None or worker.deadline < first:
                    first = worker.deadline
            elif worker.overdue and now - worker.silent_since() > STUBBORN_SECONDS:
                self._report(worker, now, f"{CANCELLED}; its lane waits")
            if worker.deadline is None and now - worker.silent_since() > SLOW_SECONDS:
                self._report(worker, now, "is slow")
        return first

    def _end(self, worker: Worker, handler: Handler | None, delivery: Delivery[Any], now: float) -> None:
        in_loop = handler is None or handler.in_loop
        if in_loop and worker.task is not None:
            worker.overdue = True
            worker.reported = now
            worker.task.cancel()
        elif now - worker.silent_since() > STUBBORN_SECONDS or worker.reported <= worker.began:
            self._report(worker, now, f"{UNSTOPPABLE}; its lane waits")

    def _report(self, worker: Worker, now: float, what: str) -> None:
        worker.reported = now
        assert worker.delivery is not None
        name = worker.handler.name if worker.handler is not None else "none"
        logger.warning(
            "%s: handler %s %s: at %s for %.3g s", self, name, what, worker.delivery.position, now - worker.began
        )


def _has_had_its_time(worker: Worker, now: float) -> bool:
    return worker.deadline is not None and now >= worker.deadline


def _is_current(context: contextvars.Context) -> bool:
    """Say whether the context variables are as they are in this context."""
    try:
        return contextvars.copy_context() == context
    except Exception:  # noqa: BLE001 - of values that do not let themselves be compared
        return False


def _is_cancelled(worker: Worker) -> bool:
    return worker.task is not None and worker.task.cancelling() > 0
