"""Watching: what the handlers of a world are given, and what they do with it.

It is the outermost middleware, so that what it sees is what delivery sees. It is also where a plan's faults befall a
handler: it is late, it is called twice, or its process dies around it or in the middle of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import FutureVersion, PenstockError, UsageError
from penstock.testing.worlds.faults import Kind, Point, Spot

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from penstock.bus.delivered import Delivery
    from penstock.bus.handlers import Handler, Subscriber
    from penstock.bus.middleware import Proceed
    from penstock.clock import Clock
    from penstock.offsets import Position
    from penstock.testing.worlds.faults import Fault, Faults

TIMEOUT_SHARE: Final = 0.2
"""A handler that is made slow has the rest of its time for itself."""


class Handled(NamedTuple):
    """One call of a handler."""

    value: Any
    """The event as its class; None if its bytes do not fit."""
    position: Position
    attempt: int
    replay: int
    at: float
    """When it began, in seconds of the virtual clock since the world began."""
    outcome: str
    """`running`, `returned`, `failed`, or `cut off` by the end of its process or by its timeout."""
    error: BaseException | None

    def __repr__(self) -> str:
        return f"<Handled {self.position}, attempt {self.attempt}: {self.outcome}>"


@dataclass(eq=False, slots=True)
class Run:
    """A call of a handler, while it runs and afterwards."""

    subscriber: Subscriber
    handler: Handler | None
    delivery: Delivery[Any]
    at: float
    number: int
    """In the order of all that happens."""
    outcome: str = "running"
    error: BaseException | None = None
    pausing: bool = False
    """Whether it is being late, on the virtual clock, or waits for its process to die."""
    times: int = 1
    """How often its handler is called: again, if a fault says so, without a delivery of its own."""

    @property
    def name(self) -> str:
        """The handler's name."""
        return self.handler.name if self.handler is not None else "none"

    @property
    def where(self) -> tuple[str, Position]:
        """The subscription and the event."""
        return self.subscriber.name, self.delivery.position

    def handled(self) -> Handled:
        """Return it as a test looks at it."""
        delivery = self.delivery
        try:
            value = delivery.value
        except PenstockError:
            value = None
        return Handled(value, delivery.position, delivery.attempt, delivery.replay, self.at, self.outcome, self.error)


class Watching:
    """The middleware of a world, the same one in all lives."""

    def __init__(
        self,
        clock: Clock,
        faults: Faults,
        numbers: Iterator[int],
        die: Callable[[], asyncio.Future[None]],
    ) -> None:
        self._clock = clock
        self._numbers = numbers
        self._faults = faults
        self._die = die
        """Says that the process is to die, and returns what never comes."""
        self.subscribers: Mapping[tuple[str, str], Subscriber] = {}
        self.runs: list[Run] = []
        self.running: dict[Run, None] = {}
        self.events = 0
        """How often a handler began or ended."""
        self.ended: dict[tuple[str, Position], int] = {}
        """When each event was last handled, in the order of all."""
        self.outdated: dict[tuple[str, Position], Run] = {}
        """Events of a version that is not known here: their lanes wait for an upgrade."""

    # --- looking ------------------------------------------------------------------------------

    @property
    def busy(self) -> list[Run]:
        """Those that run by themselves, in real time."""
        return [run for run in self.running if not run.pausing]

    @property
    def in_threads(self) -> list[Run]:
        """Those that nothing can stop."""
        return [run for run in self.busy if run.handler is not None and not run.handler.in_loop]

    def of(self, function: Callable[..., Any]) -> list[tuple[Subscriber, Handler]]:
        """Return where a function is a handler; `UsageError` if it is none."""
        found = [
            (subscriber, handler)
            for subscriber in self.subscribers.values()
            for handler in subscriber.handlers
            if handler.function == function
        ]
        if not found:
            known = sorted(handler.name for each in self.subscribers.values() for handler in each.handlers)
            name = getattr(function, "__qualname__", repr(function))
            raise UsageError(f"{name} is no handler of this bus; it has {', '.join(known) or 'none'}")
        return found

    def runs_of(self, function: Callable[..., Any]) -> list[Run]:
        """Return the calls of a handler, in the order in which they began."""
        wanted = {(subscriber.topic.name, subscriber.name, handler) for subscriber, handler in self.of(function)}
        return [run for run in self.runs if (run.subscriber.topic.name, run.subscriber.name, run.handler) in wanted]

    def counts(self) -> Counter[tuple[str, Position, str]]:
        """Return how often each event was handled, by subscription, position and handler."""
        counts: Counter[tuple[str, Position, str]] = Counter()
        for run in self.runs:
            counts[*run.where, run.name] += run.times
        return counts

    # --- being called -------------------------------------------------------------------------

    async def __call__(self, delivery: Delivery[Any], proceed: Proceed, /) -> None:
        """See `Middleware`."""
        position = delivery.position
        subscriber = self.subscribers[position.topic, delivery.subscription]
        by_type = subscriber.by_type()
        handler = by_type.get(delivery.event.type or "" if subscriber.topic.types else "")
        run = Run(subscriber, handler, delivery, self._clock.monotonic(), next(self._numbers))
        self.runs.append(run)
        self.running[run] = None
        self.events += 1
        self.outdated.pop(run.where, None)
        try:
            await self._call(run, proceed)
            run.outcome = "returned"
        except asyncio.CancelledError:
            run.outcome = "cut off"
            raise
        except BaseException as error:
            run.outcome, run.error = "failed", error
            if isinstance(error, FutureVersion):
                self.outdated[run.where] = run
            raise
        finally:
            self.running.pop(run, None)
            self.events += 1
            self.ended[run.where] = self.events

    async def _call(self, run: Run, proceed: Proceed) -> None:
        fault = self._at(Point.BEGIN, run)
        # Only what waits in the event loop can be left in its middle; a thread runs to its end.
        in_loop = run.handler is not None and run.handler.in_loop
        match None if fault is None else fault.kind:
            case Kind.CRASH_INSIDE if in_loop:
                assert fault is not None
                await _Stepped(proceed(), fault.step, partial(self._die_at, run, fault))
            case Kind.CUT if in_loop:
                assert fault is not None
                await self._cut(run, proceed, fault)
            case Kind.SLOW:
                assert fault is not None
                await self._be_late(run, fault)
                await proceed()
            case _:
                await proceed()
        fault = self._at(Point.END, run)
        if fault is not None and fault.kind is Kind.CRASH_AFTER:
            await self._die_at(run, fault)
        elif fault is not None:
            await self._again(run, proceed, fault)

    async def _again(self, run: Run, proceed: Proceed, fault: Fault) -> None:
        self._faults.note(fault)
        run.times += 1
        await proceed()

    def _at(self, point: Point, run: Run) -> Fault | None:
        topic, partition, offset = run.delivery.position
        return self._faults.at(Spot(point, topic, partition, offset, run.subscriber.name))

    async def _be_late(self, run: Run, fault: Fault) -> None:
        self._faults.note(fault)
        limit = run.delivery._engine.policy.timeout_seconds  # noqa: SLF001 - so late that it is not too late
        run.pausing = True
        try:
            await self._clock.pause(fault.seconds if limit is None else min(fault.seconds, limit * TIMEOUT_SHARE))
        finally:
            run.pausing = False

    async def _cut(self, run: Run, proceed: Proceed, fault: Fault) -> None:
        """Let a handler end where it waits, and call it again."""
        cut = False

        def end() -> asyncio.Future[None]:
            nonlocal cut
            cut = True
            raise asyncio.CancelledError

        try:
            await _Stepped(proceed(), fault.step, end)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not cut or (task is not None and task.cancelling()):
                raise
        if cut:
            await self._again(run, proceed, fault)

    def _die_at(self, run: Run, fault: Fault) -> asyncio.Future[None]:
        self._faults.note(fault)
        run.pausing = True
        return self._die()


class _Stepped:
    """Awaits something up to the moment when it waits for the n-th time; then awaits something else instead."""

    def __init__(self, work: Any, step: int, instead: Callable[[], asyncio.Future[None]]) -> None:
        self._work = work
        self._step = step
        self._instead = instead

    def __await__(self) -> Generator[Any, Any, None]:
        work = self._work.__await__()
        steps, thrown = 0, None
        while True:
            try:
                waits_for = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration:
                return
            thrown = None
            steps += 1
            try:
                if steps == self._step:
                    yield from self._instead()
                else:
                    yield waits_for
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is meant for what is awaited
                thrown = error
