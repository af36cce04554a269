"""Subscribers: what a bus knows of the handlers and projections that were declared with it, and whether they run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from penstock.bus.handlers import Subscriber, handler_of
from penstock.bus.topic import Topic
from penstock.errors import UsageError, did_you_mean
from penstock.settings import redact_url

if TYPE_CHECKING:
    from datetime import timedelta

    from penstock.bus.consumer import Consumer
    from penstock.bus.deliveries import Checkpoint, Retry
    from penstock.bus.middleware import Middleware
    from penstock.bus.projecting import Projecting
    from penstock.bus.projections import Projection
    from penstock.bus.runner import Runner
    from penstock.bus.signals import Ending
    from penstock.clock import Clock
    from penstock.engine.policy import Exhausted
    from penstock.offsets import Gap
    from penstock.runtime.subscriptions import Start

F = TypeVar("F", bound=Callable[..., Any])


class ConsumeOptions(TypedDict, total=False):
    """What `Bus.consume` and `Bus.subscriber` have in common."""

    mode: Literal["key_shared", "shared", "exclusive", "failover"] | None
    start: Start
    retry: Retry | None
    exhausted: Exhausted | None
    timeout: float | timedelta | None
    window: int | None
    window_bytes: int | None
    heartbeat: str | float | timedelta | None
    rate: float | None
    checkpoint: Checkpoint | Literal["each"] | None
    protect: bool | None
    consumer_id: str | None
    on_gap: Callable[[int, Gap], None] | None


class Subscribers:
    """The subscribers of a bus, by topic and name."""

    def __init__(
        self,
        topic_of: Callable[[Topic[Any] | str], Topic[Any]],
        consumer_of: Callable[[Subscriber], Consumer[Any]],
        projecting_of: Callable[[Projection[Any]], Projecting],
        clock: Clock,
        middleware: tuple[Middleware, ...],
    ) -> None:
        self._topic_of = topic_of
        self._consumer_of = consumer_of
        self._projecting_of = projecting_of
        self._clock = clock
        self._middleware = middleware
        self.declared: dict[tuple[str, str], Subscriber] = {}
        self.projections: dict[str, Projection[Any]] = {}
        self.runner: Runner | None = None
        """What runs them; None while nothing does."""
        self.drain_seconds = 30.0
        self.cancelled = 0
        """How many handlers had to be cancelled, since they did not end in time."""
        self._turning = asyncio.Lock()
        self._ending: Ending | None = None

    def declare(
        self,
        topic: Topic[Any] | str,
        name: str,
        options: ConsumeOptions,
        *,
        concurrency: int | None,
        ack: Literal["auto", "manual"] | None,
        ignore_others: bool | None,
        middleware: Iterable[Middleware] | None,
    ) -> Callable[[F], F]:
        """Return a decorator that takes a handler."""
        if self.runner is not None:
            raise UsageError(f"subscriber {name!r} comes too late: the bus runs; declare handlers before")
        for option in options:
            if option not in ConsumeOptions.__annotations__:
                near = did_you_mean(option, ConsumeOptions.__annotations__)
                raise UsageError(f"subscriber {name!r}: there is no option {option!r}{near}")
        if ack not in (None, "auto", "manual"):
            raise UsageError(f"subscriber {name!r}: ack is 'auto' or 'manual', not {ack!r}")
        if not isinstance(topic, Topic | str):
            raise UsageError(f"subscriber {name!r}: its topic is a Topic, or the name of one, not {topic!r}")
        if not isinstance(middleware, Iterable | None):
            raise UsageError(f"subscriber {name!r}: middleware is a list, middleware=[…], not {middleware!r}")
        declared = self._topic_of(topic)
        own: dict[str, Any] = {
            "concurrency": concurrency,
            "manual": None if ack is None else ack == "manual",
            "ignore_others": ignore_others,
            "middleware": None if middleware is None else tuple(middleware),
        }

        def take(function: F) -> F:
            handler = handler_of(function, declared)
            subscriber = self.declared.get((declared.name, name))
            if subscriber is None:
                subscriber = Subscriber(
                    declared, name, dict(options), **{each: value for each, value in own.items() if value is not None}
                )
                self._consumer_of(subscriber)  # which does nothing before it is used, but refuses wrong options
            else:
                _check_same(subscriber, options, own)
            subscriber.add(handler)
            self.declared[declared.name, name] = subscriber
            return function

        return take

    def add(self, projection: Projection[Any]) -> None:
        """Take a projection."""
        if self.runner is not None:
            raise UsageError(f"{projection} comes too late: the bus runs; declare it before")
        if projection.name in self.projections:
            raise UsageError(f"projection {projection.name!r} is declared twice: give one of them another name")
        self.projections[projection.name] = projection

    @property
    def embedded(self) -> list[Projection[Any]]:
        """The projections that run where the bus runs."""
        return [projection for projection in self.projections.values() if projection.embedded]

    async def start(self) -> None:
        """Run them, if there are any."""
        from penstock.bus.runner import Runner

        async with self._turning:  # once, however many tasks open the bus
            if self.runner is None and (self.declared or self.embedded):
                runner = Runner(
                    list(self.declared.values()), self._consumer_of, clock=self._clock, middleware=self._middleware,
                    projectings=[self._projecting_of(projection) for projection in self.embedded],
                )  # fmt: skip
                await runner.start()
                self.runner = runner

    async def run_until(self, ending: Ending, until: asyncio.Event | None = None) -> None:
        """Return when an end is asked for, or the event is set; raise what ends one of them by itself."""
        assert self.runner is not None
        self._ending = ending
        ending.at_once.append(self.runner.begin_nothing)
        if ending.asked.is_set():
            self.runner.begin_nothing()
        loop = asyncio.get_running_loop()
        asked = loop.create_task(ending.asked.wait())
        failed = loop.create_task(self.runner.failed())
        wanted = loop.create_task((until or ending.asked).wait())
        try:
            await asyncio.wait([asked, failed, wanted], return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                await failed
        finally:
            for each in (asked, failed, wanted):
                each.cancel()
        if not ending.asked.is_set():
            ending.ask()  # from now on a signal is the second wish

    def check_not_within(self) -> None:
        """Refuse to be stopped by a handler, which would wait for itself."""
        current = asyncio.current_task()
        for handling in self.runner.handlings if self.runner is not None else ():
            if any(worker.task is current for worker in handling.workers):
                raise UsageError(
                    f"a handler of {handling} cannot close the bus that runs it: closing waits for the handler; let it "
                    f"set the event that `bus.run(until=event)` waits for"
                )

    async def stop(self) -> None:
        """Drain them, and end; may be repeated."""
        async with self._turning:
            runner, self.runner = self.runner, None
            if runner is not None:
                await runner.stop(self.drain_seconds, None if self._ending is None else self._ending.hurry)
                self.cancelled += runner.cancelled


def announcement(url: str, subscribers: Sequence[Subscriber], projections: Sequence[Projection[Any]] = ()) -> list[str]:
    """Return what a process says before it runs subscribers and projections, line by line."""
    count = len(subscribers)
    lines = [f"process {os.getpid()} runs {count} subscriber{'s' * (count != 1)} of {redact_url(url)}:"]
    for each in subscribers:
        mode = each.options.get("mode")
        handlers = ", ".join(handler.name for handler in each.handlers)
        how = f" ({mode})" if mode else ""
        lines.append(f"  {each.topic.name} → {each.name}{how}, {each.concurrency} at a time: {handlers}")
    lines += [f"  {each.topic.name} → {each.subscription}" for each in projections if each.embedded]
    return lines


def _check_same(subscriber: Subscriber, options: ConsumeOptions, own: dict[str, Any]) -> None:
    """Refuse options that differ from those of an earlier handler of the same subscription."""
    for name, value in {**options, **own}.items():
        before = subscriber.options.get(name) if name in options else getattr(subscriber, name)
        if value is not None and value != before:
            raise UsageError(
                f"{subscriber} has {name}={before!r} already, not {value!r}: its first handler says it for all"
            )
