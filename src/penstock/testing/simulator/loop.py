"""An event loop on virtual time: no sockets, no threads, no wall clock; what runs next is decided by a seed.

**Time** is an integer of microseconds that moves only when nothing is ready: then it jumps to the next timer. So a
second costs nothing, and `loop.time()`, `asyncio.sleep`, `asyncio.timeout` and the `LoopClock` of the store agree.

**Order.** Callbacks run in passes, as asyncio's own loop runs them: everything that is ready now, then everything that
became ready meanwhile. So nobody starves. Within a pass the *steps of tasks* are shuffled, as Trio does it on purpose:
which of two ready tasks goes on first is promised to nobody, and in production it depends on which thread ended first.
What asyncio promises, or its own code rests on, is kept:

* callbacks that are not a task's step (of `call_soon`, of timers, done callbacks) keep their order among themselves;
* of one future, a task that waits for it and its other callbacks keep the order in which they were added;
* a task that yields (`asyncio.sleep(0)`) goes on behind everything that was ready before.

**Owners.** A callback belongs to the simulated process in whose context it was made, as the variable `OWNER` says. What
belongs to a dead one is dropped; to a frozen one, held back. What belongs to nobody is the test's, and always runs.

A loop on which nothing can happen any more raises `Deadlock`; one that does not come to an end, `EndlessRun`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import warnings
from contextvars import Context, ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.clock import VirtualClock, seconds

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from concurrent.futures import Executor
    from datetime import timedelta

R = TypeVar("R")

STEPS_MAX = 2_000_000
BURIALS_MAX = 20
"""So often a coroutine may go on waiting when it is told to end."""
MICROSECONDS = 1_000_000


class Deadlock(Exception):
    """Raised when nothing is ready, nothing is scheduled, and what was to be run is not done."""


class EndlessRun(Exception):
    """Raised when so many callbacks have run that this cannot be meant."""


class Killed(BaseException):
    """Raised where a simulated process dies in the middle of a call: nothing of it may go on."""


class Owner:
    """Whoever a callback can belong to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.frozen = False
        self.held: list[_Step | _Timer] = []
        """What could have run while it was frozen, in order."""
        self.context = Context()
        self.context.run(OWNER.set, self)

    def offload(self, function: Callable[[], R]) -> asyncio.Future[R]:
        """Make a call as a thread of this owner would; what becomes of it is told in the future."""
        raise NotImplementedError


OWNER: ContextVar[Owner | None] = ContextVar("OWNER", default=None)


class _Step(asyncio.Handle):
    """A callback that is ready."""

    __slots__ = ("future", "owner", "task", "yields")

    def __init__(
        self, callback: Callable[..., object], args: Sequence[Any], loop: VirtualLoop, context: Context | None
    ) -> None:
        context = copy_context() if context is None else context  # an empty one is false
        super().__init__(callback, args, loop, context)
        self.owner = context.get(OWNER)
        self.task = _task_of(callback)
        self.future = args[0] if args and isinstance(args[0], asyncio.Future) else None
        self.yields = self.task is not None and self.task is asyncio.current_task(loop)

    def run(self) -> None:
        """Call it; what it raises goes to the loop."""
        self._run()


class _Timer(asyncio.TimerHandle):
    """A callback that is due later."""

    __slots__ = ("future", "owner")

    task = None
    yields = False

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        context = copy_context() if context is None else context  # an empty one is false
        super().__init__(when, callback, args, loop, context)
        self.owner = context.get(OWNER)
        self.future = args[0] if args and isinstance(args[0], asyncio.Future) else None

    def run(self) -> None:
        """Call it; what it raises goes to the loop."""
        self._run()


def _task_of(callback: Callable[..., object]) -> asyncio.Task[Any] | None:
    """Return the task that a callback is the next step of; None for any other, also for a task's own methods."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return None
    return None if hasattr(asyncio.Task, getattr(callback, "__name__", "a step")) else task


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `chance` decides, and `troubles` collects what asyncio would only log."""

    def __init__(self, chance: random.Random, *, steps_max: int = STEPS_MAX) -> None:
        super().__init__()
        self.set_debug(False)
        self._chance = chance
        self._steps_max = steps_max
        self.now_us = 0
        """Virtual time since the loop was made."""
        self.steps = 0
        """How many callbacks have run."""
        self.troubles: list[BaseException] = []
        self._number = itertools.count()
        self._upcoming: list[_Step | _Timer] = []
        self._timers: list[tuple[int, int, _Timer]] = []
        # All of them, and strongly: a task of a dead process that is collected would run its `finally` blocks.
        self._tasks: list[tuple[asyncio.Task[Any], Owner | None]] = []
        self._tasks_made = 0

    # --- time -----------------------------------------------------------------------------------

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self.now_us / MICROSECONDS

    def pass_time(self, by: float) -> None:
        """Let time pass while nobody runs: something that cannot be interrupted takes so long."""
        self.now_us += max(math.ceil(by * MICROSECONDS), 0)

    def _refuse_if_closed(self) -> None:
        if self.is_closed():
            raise RuntimeError("this world is over: its loop is closed")

    # --- scheduling -----------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]  # the types of the arguments are the caller's
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call it in the next pass."""
        self._refuse_if_closed()
        step = _Step(callback, args, self, context)
        self._upcoming.append(step)
        return step

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Call it in the next pass. Nothing waits for other threads here: there are none."""
        return self.call_soon(callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call it after so many virtual seconds; some time passes if there are any, however few."""
        when = max(self.time() + delay, (self.now_us + (delay > 0)) / MICROSECONDS)
        return self.call_at(when, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call it when `time()` has reached `when`, and never before."""
        self._refuse_if_closed()
        timer = _Timer(when, callback, args, self, context)
        due = math.ceil(when * MICROSECONDS)
        # A product is rounded. One that is due an instant too early would be waited for again, at the same instant.
        due += due / MICROSECONDS < when
        heapq.heappush(self._timers, (due, next(self._number), timer))
        return timer

    def release(self, owner: Owner) -> None:
        """Let run what was held back while the owner was frozen."""
        held, owner.held = owner.held, []
        self._upcoming += held

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., R], *args: Any
    ) -> asyncio.Future[R]:
        """Make the call as a thread of the current process would; there are no executors here."""
        owner = OWNER.get()
        if owner is None:
            raise RuntimeError("only a simulated process has threads: call it from a task of `process.run`")
        return owner.offload(partial(func, *args))

    # --- tasks ----------------------------------------------------------------------------------

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, R], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[R]:
        """Make a task whose name is the same in every run."""
        self._refuse_if_closed()
        self._tasks_made += 1
        name = f"task {self._tasks_made}" if name is None else name
        task = super().create_task(coro, name=name, context=context)
        if self._tasks_made % 1_000 == 0:
            self._tasks = [(old, owner) for old, owner in self._tasks if not old.done()]
        self._tasks.append((task, OWNER.get() if context is None else context.get(OWNER)))
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Collect what nobody has caught. That dead processes leave tasks behind is as it should be."""
        error = context.get("exception")
        if self.is_closed() or isinstance(error, Killed):
            return
        self.troubles.append(error or RuntimeError(f"asyncio says: {context.get('message')}"))

    def close(self) -> None:
        """Close the loop, and end what dead processes have left behind, which can do no harm any more."""
        if self.is_closed():
            return
        super().close()
        self._upcoming.clear()
        self._timers.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # coroutines that they made last, and could not begin
            # What they still begin belongs to this loop, which refuses it: not to a loop that outlives the world.
            asyncio._set_running_loop(self)  # noqa: SLF001 - meant for those who write loops
            try:
                for task, _ in list(self._tasks):
                    if not task.done():
                        _bury(task.get_coro())
            finally:
                asyncio._set_running_loop(None)  # noqa: SLF001 - the same
            self._tasks.clear()

    # --- running --------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """Run everything that is ready now; called by `run_forever`, again and again."""
        if not self._upcoming and not self._stopping:
            self._jump()
        while self._timers and self._timers[0][0] <= self.now_us:
            self._upcoming.append(heapq.heappop(self._timers)[2])
        current, self._upcoming = self._upcoming, []
        for step in self._shuffled(current):
            owner = step.owner
            if step.cancelled() or (owner is not None and owner.dead):
                continue
            if owner is not None and owner.frozen:
                owner.held.append(step)
                continue
            self.steps += 1
            if self.steps > self._steps_max:
                raise EndlessRun(f"{self._steps_max:,} callbacks have run, up to {self.time():.6f} s:\n{self._told()}")
            step.run()

    _stopping: bool

    def _jump(self) -> None:
        """Move time on to the next timer that anybody still waits for."""
        while self._timers:
            due, _, timer = self._timers[0]
            if timer.cancelled() or (timer.owner is not None and timer.owner.dead):
                heapq.heappop(self._timers)
                continue
            self.now_us = max(self.now_us, due)
            return
        raise Deadlock(f"at {self.time():.6f} s everybody waits, and nothing will ever happen:\n{self._told()}")

    def _shuffled(self, steps: list[_Step | _Timer]) -> list[_Step | _Timer]:
        """Return the steps of a pass in the order in which they run; see the top of this file."""
        if len(steps) < 2 or all(step.task is None for step in steps):
            return steps
        ranks = [self._chance.random() for _ in steps]
        others = [index for index, step in enumerate(steps) if step.task is None]
        for index, rank in zip(others, sorted(ranks[index] for index in others), strict=True):
            ranks[index] = rank
        for index, step in enumerate(steps):
            if step.task is not None and step.future is not None and others:
                same = [other for other in others if steps[other].future is step.future]
                low = max((ranks[other] for other in same if other < index), default=0.0)
                high = min((ranks[other] for other in same if other > index), default=1.0)
                ranks[index] = low + ranks[index] * (high - low)
            if step.yields:
                ranks[index] += 1.0
        return [steps[index] for index in sorted(range(len(steps)), key=ranks.__getitem__)]

    def _told(self) -> str:
        """Say which tasks of the living are not done, whose they are, and where they wait."""
        return "\n".join(self._told_tasks()) or "  there is no task"

    def _told_tasks(self) -> Iterator[str]:
        for task, owner in self._tasks:
            if not task.done() and (owner is None or not owner.dead):
                state = " (frozen)" if owner is not None and owner.frozen else ""
                frames = task.get_stack()
                where = [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" for frame in frames]
                name = "the test" if owner is None else owner.name
                yield f"  {name}{state}: {task.get_name()}, {_coroutine_name(task)}, at {' '.join(where) or 'its end'}"


def _coroutine_name(task: asyncio.Task[Any]) -> str:
    return str(getattr(task.get_coro(), "__qualname__", task.get_coro()))


def _bury(coroutine: Any) -> None:
    """End a coroutine that nobody will ever run, whatever it tries to do about it."""
    for _ in range(BURIALS_MAX):
        try:
            coroutine.close()
        except BaseException:  # noqa: BLE001, S112 - it waits once more, or fails, in a world that is over
            continue
        return


class LoopClock(VirtualClock):
    """The clock of one boot of a machine: its time is the loop's. Monotonic time begins at zero."""

    def __init__(self, loop: VirtualLoop, start_us: int | None = None) -> None:
        """Begin now; the wall clock shows `start_us`."""
        if start_us is None:
            super().__init__()
        else:
            super().__init__(start_us)
        self._loop = loop
        self._booted_us = loop.now_us

    def time_us(self) -> int:
        """See `Clock`."""
        return self._wall_us + self._loop.now_us - self._booted_us

    def monotonic(self) -> float:
        """See `Clock`."""
        return (self._loop.now_us - self._booted_us) / MICROSECONDS

    def sleep(self, seconds: float) -> None:
        """See `Clock`: a call that sleeps takes so long, and nothing else runs meanwhile."""
        self._loop.pass_time(seconds)

    async def pause(self, seconds: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(seconds)

    def advance(self, by: float | timedelta, *, settle: Callable[[], object] | None = None) -> None:
        """Let time pass while nobody runs; who is due meanwhile is late."""
        self._loop.pass_time(seconds(by, "the advance of a clock"))

    async def advance_async(self, by: float | timedelta, *, turns: int = 0) -> None:
        """Wait: the loop moves time on by itself."""
        await asyncio.sleep(seconds(by, "the advance of a clock"))
