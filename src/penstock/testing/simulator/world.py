"""The world: one machine, several processes on it, and everything that may happen to them.

    async def story(world: World) -> None:
        first, second = world.start(), world.start()
        topic = await first.call(first.store.log.create_topic, "orders", TopicSettings())
        first.run(publish(first, topic))
        await asyncio.sleep(5)
        first.freeze()
        await asyncio.sleep(20)
        first.thaw()
        world.power_loss()

The story belongs to nobody, so it goes on whatever happens; what it does to the store directly, outside of a process,
is not disturbed either.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
from contextlib import contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.settings import FileSettings
from penstock.testing.campaigns.planted.tools import changed
from penstock.testing.campaigns.virtual.aftermath import silence
from penstock.testing.journal import Journal
from penstock.testing.machine import SURVIVALS, Machine, Survival
from penstock.testing.simulator.locks import LockTable, forget_gates
from penstock.testing.simulator.loop import OWNER, STEPS_MAX, Killed, LoopClock, VirtualLoop
from penstock.testing.simulator.network import Network
from penstock.testing.simulator.plan import CALM, Plan
from penstock.testing.simulator.process import Process
from penstock.testing.simulator.witness import tell_contents

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from types import TracebackType

T = TypeVar("T")

SMALL = FileSettings(segment_bytes=6_000, allocate_bytes=2_048, marker_seconds=1.0, retain_seconds=20.0)
"""Segments of some blocks, so that every life meets the end of one; a keeper that is not busy all the time."""


def _is_importing() -> bool:
    """Say whether a module is being imported: what that draws, it draws once in a real process, in whichever world."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != VirtualLoop.__module__:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage: what that ends, such as a generator that nobody reads on, ends at the same moment always."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class World:
    """One life of a machine; a context manager, since simulated processes leave much behind.

    `journal` is for the checker: restarts, and grants and writes of leases, are told by the world itself. `trace` is
    for people: it is the same for the same seed, plan and story.
    """

    def __init__(
        self, seed: int, *, plan: Plan = CALM, settings: FileSettings = SMALL, steps_max: int = STEPS_MAX
    ) -> None:
        self.seed = seed
        self.plan = plan
        self.settings = settings
        self.chance = random.Random(f"{seed}/world")
        """For the story."""
        self.loop = VirtualLoop(random.Random(f"{seed}/loop"), steps_max=steps_max)
        self.context = Context()
        """Of callbacks that belong to nobody."""
        self.journal = Journal()
        self.trace: list[str] = []
        self.processes: list[Process] = []
        """All that were ever started, the dead among them."""
        self._power = random.Random(f"{seed}/power")
        self._fails_in: int | None = None
        self._failed: Survival | None = None
        self._boot(Machine(seed, clock=LoopClock(self.loop)))

    def _boot(self, machine: Machine) -> None:
        self.machine = machine
        self.locks = LockTable()
        self.network = Network(self, random.Random(f"{self.seed}/network/{len(self.processes)}"))
        machine.on_step = self._on_step

    @property
    def clock(self) -> LoopClock:
        """The clock of this boot: another one after each power loss."""
        clock = self.machine.clock
        assert isinstance(clock, LoopClock)
        return clock

    @property
    def living(self) -> list[Process]:
        """The processes that are not dead, by when they were started."""
        return [process for process in self.processes if not process.dead]

    def note(self, text: str) -> None:
        """Write a line into the trace."""
        self.trace.append(f"{self.loop.now_us / 1_000_000:.6f} {text}")

    # --- running --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, story: Coroutine[Any, Any, T]) -> T:
        """Run a story to its end; raises what went wrong in it, or in a task of a living process."""
        try:
            with silence(), _without_collections(), self._seeded_chance():
                result = self.loop.run_until_complete(self.context.run(self.loop.create_task, story))
        except Exception as error:
            if self.loop.troubles:
                raise self.loop.troubles[0] from error
            raise
        if self.loop.troubles:
            raise self.loop.troubles[0]
        return result

    @contextmanager
    def _seeded_chance(self) -> Iterator[None]:
        """Let the seed decide also what `secrets` and `uuid` draw from the system, such as the ids of producers."""
        chance = random.Random(f"{self.seed}/system")
        real = os.urandom

        def urandom(size: int) -> bytes:
            if _is_importing():
                return real(size)
            owner = OWNER.get()
            return (owner.chance if isinstance(owner, Process) else chance).randbytes(size)

        with changed(os, urandom=urandom), changed(random, _urandom=urandom):
            yield

    def close(self) -> None:
        """End the world: nothing of it may run any more."""
        for process in self.living:
            process.die()
        with silence():
            self.loop.close()
        for process in self.processes:
            for locks in process.locks.values():
                forget_gates(locks)
            process.locks.clear()
        self.machine.turn_off()

    # --- processes ------------------------------------------------------------------------------

    def start(self, *, dies_in: int | None = None) -> Process:
        """Start a process, which opens the store at once; with `dies_in` it may die of that (see `Process.die_in`).

        If the store cannot be opened, the process is dead, and this raises why.
        """
        self._lose_power()
        process = Process(self, len(self.processes) + 1)
        self.processes.append(process)
        if dies_in is not None:
            process.die_in(dies_in)
        try:
            process.open()
        except BaseException as error:
            process.note(f"cannot open the store: {type(error).__name__}")
            process.die()
            raise
        return process

    async def look(self) -> list[bytes]:
        """Let a process of its own tell the journal everything that can be read now; returns the payloads."""
        process = self.start()
        try:
            return await process.call(tell_contents, self.journal, process.store)
        finally:
            process.close()
            process.die()

    # --- power ----------------------------------------------------------------------------------

    def power_loss(self, survival: Survival | None = None) -> None:
        """Let every process die, and what was not synced be lost; without `survival`, chance says how.

        If a process does so itself, this raises `Killed`, through everything that is under way.
        """
        self._fails_in = None
        self._failed = survival or self._power.choice(SURVIVALS)
        for process in self.living:
            process.die()
        self.note(f"the power is lost: {self._failed}")
        if OWNER.get() is not None:
            # In the middle of a call, perhaps. The machine boots when that is unwound, before anybody else comes.
            self.loop.call_soon(self._lose_power, context=self.context.copy())
            raise Killed("the power is lost")
        self._lose_power()

    def power_loss_in(self, operations: int) -> None:
        """Lose the power before one of the next operations that change the medium: 0 is the very next one."""
        self._fails_in = operations

    def _lose_power(self) -> None:
        survival, self._failed = self._failed, None
        if survival is None:
            return
        before = self.machine
        after = before.after_power_loss(survival, self._power, clock=LoopClock(self.loop, before.clock.time_us()))
        before.turn_off()
        self._boot(after)
        self.journal.restarted()

    def _on_step(self, operation: str) -> None:
        process = OWNER.get()
        if not isinstance(process, Process):
            return
        process.step(operation)
        if self._fails_in is not None:
            self._fails_in -= 1
            if self._fails_in < 0:
                process.about_to(operation)
                self.power_loss()

    # --- peace ----------------------------------------------------------------------------------

    async def calm(self) -> None:
        """End all faults: nothing goes wrong from now on, and nobody is frozen. Tells the journal."""
        self.plan = CALM
        self._fails_in = None
        for process in self.living:
            process.thaw()
            process.spare()
        await asyncio.sleep(0)
        self.journal.faults_ended(self.loop.time())
        self.note("all faults end")
