"""A simulated process: a store of its own, tasks of its own, and a death of its own."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.errors import StoreError, WriterStalled
from penstock.stores.file import members
from penstock.stores.file.keeper import Keeper
from penstock.stores.file.store import FileStore
from penstock.testing.machine import ROOT
from penstock.testing.simulator.disk import ProcessDisk
from penstock.testing.simulator.locks import ProcessLocks
from penstock.testing.simulator.loop import OWNER, Killed, Owner
from penstock.testing.simulator.network import ProcessSockets
from penstock.testing.simulator.witness import tell_call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from penstock.settings import FileSettings
    from penstock.stores.file.platform import Disk
    from penstock.testing.machine import Machine
    from penstock.testing.simulator.world import World

R = TypeVar("R")

HINTS_THREAD = "penstock-hints"
_TEMPORARY = re.compile(r"\.[0-9a-f]{6,}(?= |$)")
"""The end of a name that an object's address makes unique, and no seed decides."""


class ProcessDied(Exception):
    """Raised in the test when a process dies from which it awaits something."""


class Process(Owner):
    """One process, made by `World.start`; it is a `Host` of the runtime.

    Its tasks are those that `run` begins, and whatever these begin. A call of the store takes virtual time before and
    after its effect, and the effect itself is atomic: it happens in one step of the loop.
    """

    def __init__(self, world: World, number: int) -> None:
        super().__init__(f"p{number}")
        self.number = number
        self.world = world
        self.chance = random.Random(f"{world.seed}/{self.name}")
        self.locks: dict[Path, ProcessLocks] = {}
        self._machine = world.machine
        self._network = world.network
        self._table = world.locks
        self._store: FileStore | None = None
        self._settings = world.settings
        self._keeping: asyncio.Task[None] | None = None
        self._dies_in: int | None = None
        self._awaited_by_test: set[asyncio.Future[Any]] = set()
        self.platform = replace(
            self._machine.platform,
            disk=cast("Disk", ProcessDisk(self._machine.disk, self._network, self)),
            random=self.chance.randbytes,
            spawn=self._spawn,
            record_locks=self._record_locks,
            sockets=ProcessSockets(self._network, self),
        )

    def __repr__(self) -> str:
        return f"<Process {self.name}{' frozen' if self.frozen else ''}{' dead' if self.dead else ''}>"

    def note(self, text: str) -> None:
        """Write a line into the world's trace."""
        self.world.note(f"{self.name}: {text}")

    # --- the store ------------------------------------------------------------------------------

    @property
    def store(self) -> FileStore:
        """The open store."""
        assert self._store is not None
        return self._store

    @property
    def machine(self) -> Machine:
        """The machine in the boot in which this process lives."""
        return self._machine

    def open(self, settings: FileSettings | None = None) -> None:
        """Open the store, or open it anew; in one step, as the process itself. It may die in it."""
        # What says which members are this process's own belongs to the real process, which is several here. Without
        # it, the locks tell who is alive, of all alike.
        own: set[tuple[str, int]] = vars(members)["_own"]
        before = set(own)

        def work() -> None:
            try:
                self._settings = settings or self._settings
                self._store = FileStore(ROOT, settings=self._settings, platform=self.platform)
            finally:
                own.intersection_update(before)

        try:
            self.context.copy().run(work)
        except Killed:
            return
        self.note("has opened the store")

    def close(self) -> None:
        """Close the store, in one step, as the process itself; its tasks go on."""
        if self._keeping is not None:
            self._keeping.cancel()
        try:
            self.context.copy().run(self.store.close)
        except Killed:
            return
        self.note("has closed the store")

    def _record_locks(self, path: Path) -> ProcessLocks:
        if path not in self.locks:
            self.locks[path] = ProcessLocks(self._table, path, self)
        return self.locks[path]

    def _spawn(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Play a thread that the store wants: the keeper is a task, and hints are handed over by the network."""
        keeper = getattr(work, "__self__", None)
        if isinstance(keeper, Keeper):
            self._keeping = self.run(self._keep(keeper))
        elif name != HINTS_THREAD:
            raise AssertionError(f"{self.name} wants a thread {name}: something waits, and calls are atomic here")
        return _PlayedThread(name=name)

    async def _keep(self, keeper: Keeper) -> None:
        while True:
            await asyncio.sleep(self._settings.marker_seconds)
            await self._begin(keeper.step, keeper.step, (), faulty=False)

    def receive(self, datagram: bytes) -> None:
        """Take a datagram, as the receiving thread would."""
        self.store.notifier.take(datagram)

    # --- calls ----------------------------------------------------------------------------------

    async def call(self, function: Callable[..., R], *args: Any, **options: Any) -> R:
        """Make a call as `Workers` do: it takes a while, and is made also if nobody waits for it any more.

        The plan may let it fail. If this process dies, a task of its own waits for ever; the test gets `ProcessDied`.
        """
        return await self._begin(partial(function, *args, **options), function, args)

    def offload(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Make a call that was meant for an executor, in the same way."""
        return self._begin(function, function, ())

    def _begin(
        self, work: Callable[[], R], function: Callable[..., Any], args: tuple[Any, ...], *, faulty: bool = True
    ) -> asyncio.Future[R]:
        future: asyncio.Future[R] = self.world.loop.create_future()
        if OWNER.get() is not self:
            if self.dead:
                raise ProcessDied(f"{self.name} is dead")
            self._awaited_by_test.add(future)
            future.add_done_callback(self._awaited_by_test.discard)
        perform = partial(self._perform, future, work, function, args, faulty=faulty)
        self.world.loop.call_later(self._latency(), perform, context=self.context.copy())
        return future

    def _latency(self) -> float:
        plan, chance = self.world.plan, self.chance
        most = plan.slow_seconds if plan.slow and chance.random() < plan.slow else plan.call_seconds
        return most * chance.random()

    def _perform(
        self,
        future: asyncio.Future[R],
        work: Callable[[], R],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        faulty: bool,
    ) -> None:
        error, late = self._fault() if faulty else (None, False)
        answer: Any = None
        told = ""
        if error is None or late:
            try:
                answer = work()
            except Killed:
                return
            except Exception as raised:  # noqa: BLE001 - it is raised where the call is awaited
                answer = error = raised
            tell_call(self.world.journal, self._store, function, args, answer)
        if error is not None:
            told = f" ends with {type(error).__name__}{', after its effect' if late and answer is not error else ''}"
        if faulty or told:
            self.note(f"{_name(function)}{told}")
        settle = partial(_resolve, future, answer) if error is None else partial(_fail, future, error)
        self.world.loop.call_later(self._latency(), settle)
        if faulty and self.world.plan.frozen and self.chance.random() < self.world.plan.frozen:
            self.freeze(self.chance.choice([self.chance.random(), 1.0]) * self.world.plan.frozen_seconds)

    def _fault(self) -> tuple[Exception | None, bool]:
        """Return what the plan lets go wrong with a call, and whether that comes after its effect."""
        plan, drawn = self.world.plan, self.chance.random()
        if plan.killed and self.chance.random() < plan.killed:
            self.die_in(self.chance.randrange(plan.killed_within))
        for rate, make, late in (
            (plan.fails_before, _input_output_error, False),
            (plan.fails_after, _input_output_error, True),
            (plan.refused, _refusal, False),
            (plan.stalled, _stall, False),
        ):
            if drawn < rate:
                return make(), late
            drawn -= rate
        return None, False

    # --- life and death -------------------------------------------------------------------------

    def run(self, coroutine: Coroutine[Any, Any, R], *, name: str | None = None) -> asyncio.Task[R]:
        """Begin a task of this process; what it raises ends the world's run."""
        task = self.world.loop.create_task(coroutine, name=name, context=self.context.copy())
        task.add_done_callback(self._examine, context=self.world.context.copy())
        return task

    def _examine(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, Killed):
            error.add_note(f"in {task.get_name()} of {self.name}, at {self.world.loop.time():.6f} s")
            self.world.loop.troubles.append(error)

    def kill(self) -> None:
        """Die at once: nothing of it ever runs again, its locks are free, its store is left as it is.

        If it does so itself, this raises `Killed`, through everything that is under way.
        """
        if not self.dead:
            self.note("is killed")
            self.die()
            self.world.journal.restarted()
        if OWNER.get() is self:
            raise Killed(self.name)

    def die_in(self, operations: int) -> None:
        """Die before one of the next operations that change the medium: 0 is the very next one."""
        self._dies_in = operations

    def spare(self) -> None:
        """Do not die where `die_in` has said."""
        self._dies_in = None

    def freeze(self, seconds: float | None = None) -> None:
        """Stand still, for so long or until `thaw`, and keep everything: locks, leases, what was sent to it."""
        if not self.dead and not self.frozen:
            self.note("is frozen")
            self.frozen = True
            if seconds is not None:
                self.world.loop.call_later(seconds, self.thaw, context=self.world.context.copy())

    def thaw(self) -> None:
        """Go on; everything that would have happened meanwhile happens now."""
        if self.frozen:
            self.note("goes on")
            self.frozen = False
            self.world.loop.release(self)

    def die(self) -> None:
        """Be dead, without a word: part of `kill`, and of what kills everybody."""
        self.dead, self.frozen = True, False
        self.held.clear()
        self._table.forget(self)
        for future in [*self._awaited_by_test]:
            if not future.done():
                future.set_exception(ProcessDied(f"{self.name} has died"))

    def step(self, operation: str) -> None:
        """Die here if it is time to; called right before each operation that changes the medium."""
        if self.dead:
            raise Killed(self.name)
        if self._dies_in is not None:
            self._dies_in -= 1
            if self._dies_in < 0:
                self.about_to(operation)
                self.kill()

    def about_to(self, operation: str) -> None:
        """Write into the trace what it would have done next."""
        self.note(f"is about to {_TEMPORARY.sub('', operation)}")


class _PlayedThread(threading.Thread):
    """A thread that never begins."""

    def join(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _resolve(future: asyncio.Future[R], answer: R) -> None:
    if not future.done():
        future.set_result(answer)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _input_output_error() -> Exception:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def _refusal() -> Exception:
    return StoreError("the plan refuses this; nothing was written")


def _stall() -> Exception:
    return WriterStalled("what the plan stalls", None, 5.0)
