"""The world that a test holds: an application's own bus, a store in memory, a clock that moves when it is told to.

The engine is the real one, and so are its loops: only time and the store are the test's. Nothing happens by itself but
what can happen now; `drain` and `advance` let time pass, as much as there is to do and not a moment more, so that a
retry in an hour takes no longer than one in a second. What a handler itself waits for is waited for in real time.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from penstock.clock import VirtualClock, seconds, us_to_datetime
from penstock.errors import NotDrained, PenstockError, UsageError
from penstock.offsets import Position
from penstock.rows import ParkedFilter, Partition
from penstock.testing.worlds.faults import CRASHES, Calm, Chaos, Faults, Kind
from penstock.testing.worlds.lives import Life, Retries
from penstock.testing.worlds.medium import Medium
from penstock.testing.worlds.waiting import Waiting
from penstock.testing.worlds.watching import Watching

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine

    from penstock.batch import StoredEvent
    from penstock.bus.bus import Bus
    from penstock.bus.topic import Topic
    from penstock.testing.checker import Violation
    from penstock.testing.worlds.faults import Fault, Plan
    from penstock.testing.worlds.medium import Call
    from penstock.testing.worlds.waiting import Left
    from penstock.testing.worlds.watching import Handled

R = TypeVar("R")

DRAIN_SECONDS: Final = 30.0
TURNS: Final = 25
"""Of the event loop; whoever has done nothing within them waits for time, or for something outside."""
REAL_SECONDS: Final = 0.001
"""How often it is looked whether a handler has ended that waits for something outside."""
GRAIN_SECONDS: Final = 1e-6
"""Of the virtual clock."""
QUIET_SECONDS: Final = 60.0
"""Of virtual time: what has not gone on by then waits for something that never comes. Every loop looks more often."""
END_SECONDS: Final = 2.0
"""How long handlers may take, in real time, when a world ends."""
CRASHES_MAX: Final = 30
"""So many deaths a seed may cause in a world; each takes some milliseconds."""
LEASE_SECONDS: Final = 1e9
"""Time jumps here, and nobody is to be thought dead for that."""
DEAD_MAX: Final = 10_000


class DeadEvent(NamedTuple):
    """An event that no attempt was successful with."""

    value: Any
    """The event as its class, or its bytes where they do not fit or the topic is not declared."""
    error: str
    """The class of what its handler raised, and the message."""
    subscription: str
    position: Position
    attempts: int

    def __repr__(self) -> str:
        return f"<DeadEvent {self.position} of {self.subscription!r}: {self.error}>"


class World:
    """What is around a bus in a test; made by `harness`."""

    def __init__(
        self, bus: Bus, plan: Plan, chance: random.Random, *, without: Collection[tuple[str, str]] = ()
    ) -> None:
        self.bus = bus
        """The bus that is tried."""
        self._clock = VirtualClock()
        self._chance = chance
        self._without = without
        self._faults = Faults(plan)
        self._faults.is_allowed = self._may_happen
        settings = bus.settings
        self._settings = replace(settings, delivery=replace(settings.delivery, lease_seconds=LEASE_SECONDS))
        numbers = count()
        self._medium = Medium(self._clock, settings.memory, self._faults, numbers)
        self._watching = Watching(self._clock, self._faults, numbers, self._want_to_die)
        self._retries = Retries(self._clock, self._be_quiet)
        self._waiting = Waiting(self._medium, self._watching, self._retries)
        self._dying: asyncio.Future[None] | None = None
        self._is_crashing = False
        self._crashes = 0
        self._life = self._new_life(None)

    def __repr__(self) -> str:
        return f"<World of {self.bus!r} at {self.now:%H:%M:%S}, {len(self.faults)} faults>"

    # --- looking ------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The time in this world, in UTC."""
        return us_to_datetime(self._clock.time_us())

    @property
    def faults(self) -> list[Fault]:
        """What has gone wrong by the seed of this world, in order."""
        return list(self._faults.happened)

    def settled(self, handler: Callable[..., Any]) -> list[Any]:
        """Return the events that a handler has handled and that are durably acked, in that order, each once."""
        found = []
        for subscriber, each in self._watching.of(handler):
            topic = subscriber.topic
            kinds = {topic.types[cls].name for cls in each.classes}
            for row in self._medium.settled:
                if row.outcome != "acked" or row.subscription != subscriber.name:
                    continue
                event = self._medium.event(Partition(row.log_id, row.partition), row.offset)
                if event is None or event.position.topic != topic.name or (kinds and event.type not in kinds):
                    continue
                order = self._watching.ended.get((subscriber.name, event.position), 0)
                found.append((row.number, order, topic.decode(event)))
        return [value for _, _, value in sorted(found, key=lambda each: each[:2])]

    def attempts(self, handler: Callable[..., Any]) -> int:
        """Return how often a handler was called: for every attempt, and again for what came again."""
        return len(self._watching.runs_of(handler))

    def deliveries(self, handler: Callable[..., Any]) -> list[Handled]:
        """Return the calls of a handler in the order in which they began, and what became of each."""
        return [run.handled() for run in self._watching.runs_of(handler)]

    def handled(self) -> list[tuple[tuple[str, Position, str], int]]:
        """Return how often each event was handled, by subscription, position and handler."""
        return sorted(self._watching.counts().items())

    @property
    def dead(self) -> list[DeadEvent]:
        """The dead letters of all subscriptions, by topic, subscription and position; ten thousand at most of each."""
        store = self._medium.store
        found = []
        for info in store.log.topics():
            for subscription in store.cursors.subscriptions(info.log_id):
                wanted = ParkedFilter(log_id=info.log_id, subscription=subscription.name, states=frozenset({"dead"}))
                found += [
                    DeadEvent(
                        self._value(info.name, row.event),
                        f"{row.error_type}: {row.error_message}".strip(": "),
                        subscription.name,
                        Position(info.name, row.shard.partition, row.offset),
                        row.attempts,
                    )
                    for row in store.parked.page(wanted, limit=DEAD_MAX)
                ]
        return found

    def published(self, topic: Topic[Any] | str) -> list[Any]:
        """Return all events of a topic in the order in which they were stored; those of handlers, too."""
        name = topic if isinstance(topic, str) else topic.name
        if self._medium.topic(name) is None:
            raise UsageError(f"there is no topic {name!r} in this world: declare it with the bus")
        return [self._value(name, event) for event in self.stored() if event.position.topic == name]

    def stored(self) -> list[StoredEvent]:
        """Return all events of all topics as they are stored, in the order in which they were."""
        found = [
            self._medium.event(partition, offset)
            for partition, offsets in self._medium.appended
            if not self._medium.name_of(partition.log_id).startswith("_")
            for offset in offsets
        ]
        return [event for event in found if event is not None]

    def _value(self, topic: str, event: Any) -> Any:
        declared = self._life.parts.topics.get(topic)
        try:
            return event.data if declared is None else declared.decode(event)
        except PenstockError:
            return event.data

    def violations(self) -> list[Violation]:
        """Return which promises did not hold in this world: none, unless Penstock itself is wrong."""
        from penstock.testing.worlds.judging import violations

        return violations(self._medium, self._watching)

    # --- time ---------------------------------------------------------------------------------

    async def advance(self, by: float | timedelta) -> None:
        """Let so much time pass, and everything happen that is due meanwhile.

        Handlers that wait for something outside are not waited for; `drain` does that.
        """
        goal = self._clock.monotonic() + seconds(by, "the advance of a world")
        with self._retries.driven():
            await self._settle()
            while (rest := goal - self._clock.monotonic()) >= GRAIN_SECONDS:
                idle = self._only_time_matters(staged=bool(self._life.parts.entrances.staged()))
                self._clock.advance(min(self._next_due() or rest if idle else self._next_sleeper(), rest))
                await self._settle()

    async def drain(self, *, timeout: float | timedelta = DRAIN_SECONDS) -> None:  # noqa: ASYNC109 - of real time
        """Let everything happen that there is to do: retries, delays and what comes of them; return when all is done.

        `NotDrained` if it is not after `timeout`, in real time, or if what is left waits for something that never comes
        by itself: it says what that is.
        """
        with self._retries.driven():
            await self._drain(seconds(timeout, "timeout"))

    async def _drain(self, limit: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        progress, quiet_since = -1, self._clock.monotonic()
        while True:
            await self._settle()
            left, staged = self._waiting.left(), self._life.parts.entrances.staged()
            running, again = self._watching.running, self._retries.waiting
            if not (left or staged or running or again or self._waiting.scheduled()):
                return
            if loop.time() > end:
                raise self._not_drained(f"within {limit:g} s", left)
            if self._watching.busy or staged:
                await asyncio.sleep(REAL_SECONDS)
                # Time passes by no handler but one that may wait for a publisher, which waits for it.
                if self._watching.busy and not self._retries.waiting:
                    continue
            if self._medium.progress + self._watching.events != progress:
                progress, quiet_since = self._medium.progress + self._watching.events, self._clock.monotonic()
            self._pass_time(left, quiet=self._clock.monotonic() - quiet_since, staged=bool(staged))

    def _pass_time(self, left: list[Left], *, quiet: float, staged: bool) -> None:
        """Let time pass until something may happen; raises if nothing ever will."""
        jumps = self._only_time_matters(staged=staged)
        if jumps and self._waiting.only_outdated(left):
            raise self._not_drained("", left)
        due = self._next_due()
        if due is not None and (jumps or quiet > QUIET_SECONDS):
            self._clock.advance(due)
        elif quiet > QUIET_SECONDS:
            raise self._not_drained("", left)
        else:
            self._clock.advance(self._next_sleeper())

    def _only_time_matters(self, *, staged: bool) -> bool:
        active = staged or self._watching.running or self._retries.waiting
        return not active and self._waiting.is_still(self._life.parts)

    def _next_due(self) -> float | None:
        """Return in how many seconds something is due by itself; what is due now already waits for whoever looks."""
        due = self._waiting.next_due(self._life.parts, self._clock.monotonic(), self._clock.time_us())
        return due if due is None or due >= GRAIN_SECONDS else self._next_sleeper()

    def _next_sleeper(self) -> float:
        """Return in how many seconds one of the loops looks again."""
        return max(self._clock.next_due() or 0.0, GRAIN_SECONDS)

    def _not_drained(self, when: str, left: list[Left]) -> NotDrained:
        return NotDrained(when, self._waiting.told(self._life.parts, left))

    async def _settle(self) -> None:
        """Let everything happen that can happen now, deaths included."""
        await self._be_quiet()
        while self._dying is not None:
            await self.crash()
            await self._be_quiet()
        runner = self._life.parts.subscribers.runner
        for handling in runner.at_work if runner is not None else []:
            if handling.failed.done() and not handling.failed.cancelled():
                handling.failed.result()

    async def _be_quiet(self) -> None:
        """Let all tasks run until each of them waits for time, or for something outside.

        Turns are counted, and not the time: what happens must not depend on how busy the machine is.
        """
        before = -1
        while before != (before := self._medium.calls + self._watching.events):
            for _ in range(TURNS):
                await asyncio.sleep(0)

    # --- what goes wrong ----------------------------------------------------------------------

    def fail(self, call: Call, times: int = 1, *, written: bool = False) -> None:
        """Let the next calls of the store fail: `publish`, `read`, `commit`, or `schedule` (a delayed publish).

        They fail as a disk does: nobody can tell whether they have written. `written` says whether they have.
        """
        self._medium.fail(call, times, written=written)

    def lose_notifications(self, times: int | None = None) -> None:
        """Let the next notifications get lost, or all of them until `heal`: heartbeats find what they would tell."""
        self._medium.lose_notifications(times)

    def heal(self) -> None:
        """Let nothing fail any more that `fail` and `lose_notifications` have ordered."""
        self._medium.heal()

    async def crash(self) -> None:
        """Let the process die, and begin anew on the same store: what was in flight comes again.

        Nothing is flushed or given back. `async def` handlers end where they wait; one in a thread, which nothing can
        stop, ends before the next life begins. Consumers of `bus.consume` end, too. Nobody else is to use the bus
        meanwhile.
        """
        life, self._dying = self._life, None
        self._crashes += 1
        self._is_crashing = True
        try:
            await self._through(life.die())
        finally:
            self._is_crashing = False
        self._watching.running.clear()
        self._life = self._new_life(life.outbox)
        await self._through(self._life.begin())

    def _want_to_die(self) -> asyncio.Future[None]:
        """Let the process die as soon as the test waits for this world; returns what never comes."""
        if self._dying is None:
            self._dying = asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().create_future()

    def _may_happen(self, fault: Fault) -> bool:
        if self._is_crashing:
            return False  # the dying are waited for: one that died once more would never end
        if fault.kind is Kind.COMMIT_UNANSWERED:
            # What is in hand comes again at once. A handler that runs then would have company.
            return not self._watching.running
        return fault.kind not in CRASHES or (self._crashes < CRASHES_MAX and not self._is_suspecting())

    def _is_suspecting(self) -> bool:
        """Say whether events are tried that may have killed the last process: one more death would be their fault."""
        dispatcher = self._life.parts.deliveries.running
        return dispatcher is not None and any(seat.suspecting for member in dispatcher.members for seat in member.seats)

    # --- beginning and ending -----------------------------------------------------------------

    def _new_life(self, outbox: Any) -> Life:
        return Life(
            self.bus,
            self._medium,
            self._clock,
            self._retries,
            settings=self._settings,
            chance=self._chance.random,
            watching=self._watching,
            outbox=outbox,
            without=self._without,
        )

    async def _through(self, work: Coroutine[Any, Any, R]) -> R:
        """Let time pass until something has ended, and return its result."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        end = loop.time() + DRAIN_SECONDS
        with self._retries.driven():
            while not task.done():
                await self._be_quiet()
                if not task.done():
                    if loop.time() > end:
                        task.cancel()
                        raise self._not_drained(f"within {DRAIN_SECONDS:g} s", [])
                    self._clock.advance(self._next_sleeper())
                    if self._life.outbox is not None or self._watching.in_threads:
                        await asyncio.sleep(REAL_SECONDS)
        return await task

    async def begin(self) -> None:
        """Open the bus, and run its subscribers."""
        await self._through(self._life.begin())

    async def end(self, *, drain: bool) -> None:
        """Close the bus; with `drain` handlers that run may end."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (END_SECONDS if drain else 0.0)
        while self._watching.busy:
            await asyncio.sleep(REAL_SECONDS)
            if loop.time() > until:
                break
        await self._through(self._life.end(drain=drain))
        self._medium.store.close()


@asynccontextmanager
async def world_of(
    bus: Bus, plan: Plan, seed: int, *, without: Collection[tuple[str, str]] = ()
) -> AsyncIterator[World]:
    """Let a bus be in a world of its own within a block, where things go wrong as a plan says.

    Subscriptions that it is to be `without`, by topic and name, are not run.
    """
    world = World(bus, plan, random.Random(seed), without=without)  # noqa: S311 - the same seed is the same world
    await world.begin()
    try:
        yield world
    except BaseException:
        await world.end(drain=False)
        raise
    await world.end(drain=True)


@asynccontextmanager
async def harness(bus: Bus, *, chaos: int | None = None) -> AsyncIterator[World]:
    """Let an application's bus run in a world of its own within a block: for its tests.

    Whatever its URL is, it is on a new store in memory and on a virtual clock, with its own topics, handlers and
    middleware. Publish with it as ever, `await world.drain()`, and look at what has happened. Afterwards the bus is as
    it was before; it must not be open.

    With `chaos` things go wrong, as this seed decides: processes die around handlers and within them, commits fail,
    notifications get lost, handlers are late. Everything is still handled, and whatever is not must be a bug; so is an
    effect that a handler has twice. The same seed is the same run, as far as handlers always do the same.
    """
    async with world_of(bus, Calm() if chaos is None else Chaos(chaos), chaos or 0) as world:
        yield world
