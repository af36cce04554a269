"""Supervising: processes that run an application, kept running until they are told to end.

* A worker that ends by itself is started again, after 1 s, then 2 s, up to 30 s as long as it does not last. One that
  says that it is called wrongly is not: everything ends with its code.
* The first SIGTERM or SIGINT lets every worker drain. A second one makes them cancel their handlers, and kills whoever
  is there after that.
* A worker is told to drain by the end of its stdin. If the supervisor is killed that ends, too, so no worker outlives
  it for longer than its handlers take. It is in a process group of its own: Ctrl-C reaches the supervisor alone.
* To reload is to let the only worker drain when a file has changed, and to start another one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.bus.signals import caught
from penstock.cli.output import say
from penstock.clock import SystemClock
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.bus.signals import Ending
    from penstock.clock import Clock

BACKOFF_SECONDS: Final = 1.0
BACKOFF_SECONDS_MAX: Final = 30.0
STEADY_SECONDS: Final = 60.0
"""A worker that has lasted so long begins with the shortest pause again."""
KILL_SECONDS: Final = 10.0
"""How long a worker may take to cancel its handlers before it is killed."""
LOOK_SECONDS: Final = 0.5
FILES_MAX: Final = 20_000

USAGE: Final = 2


async def supervised(command: Callable[[int], Sequence[str]], count: int) -> int:
    """Keep so many workers running until a signal; returns the exit code. `command` is that of a worker, from 1."""
    with caught() as ending:
        supervisor = Supervisor(ending, SystemClock())
        codes = await asyncio.gather(*(supervisor.keep(number, command(number)) for number in range(1, count + 1)))
    wrong = USAGE if USAGE in codes else 1
    return wrong if any(codes) else 0


class Supervisor:
    """Starts workers, one for each number, until an end is asked for."""

    def __init__(self, ending: Ending, clock: Clock) -> None:
        self._ending = ending
        self._clock = clock

    async def keep(self, number: int, command: Sequence[str]) -> int:
        """Keep one worker running; returns the exit code of the last one."""
        pause = BACKOFF_SECONDS
        while True:
            process = await started(command)
            say(f"worker {number} is process {process.pid}")
            began = self._clock.monotonic()
            code = await ended(process, self._ending)
            if self._ending.asked.is_set():
                return code
            if code == USAGE:
                self._ending.ask()  # no attempt can succeed, and the other workers have the same arguments
                return code
            if self._clock.monotonic() - began >= STEADY_SECONDS:
                pause = BACKOFF_SECONDS
            say(f"worker {number}, process {process.pid}, {how(code)}; another one is started in {pause:g} s")
            await first_of(self._ending.asked.wait(), self._clock.pause(pause))
            if self._ending.asked.is_set():
                return code
            pause = min(pause * 2, BACKOFF_SECONDS_MAX)


async def reloaded(command: Sequence[str]) -> int:
    """Run one worker, and another one after each change of a file, until a signal; returns the exit code."""
    clock = SystemClock()
    with caught() as ending:
        while True:
            changes = Changes(Path.cwd(), clock)
            process = await started(command)
            code, changed = await _until_changed(process, changes, ending)
            if ending.asked.is_set():
                return code
            if not changed:
                say(f"process {process.pid} {how(code)}; it is started again when a file has changed")
                await first_of(ending.asked.wait(), changes.wait())
                if ending.asked.is_set():
                    return code
            say("files have changed: starting anew")


async def _until_changed(process: Process, changes: Changes, ending: Ending) -> tuple[int, bool]:
    """Wait until a worker has ended, because a file has changed, or an end was asked for, or by itself."""
    running = asyncio.ensure_future(ended(process, ending))
    changing = asyncio.ensure_future(changes.wait())
    try:
        await asyncio.wait([running, changing], return_when=asyncio.FIRST_COMPLETED)
        if changing.done() and not running.done():
            changing.result()
            say("files have changed: draining")
            _drain(process)
        return await running, changing.done()
    finally:
        changing.cancel()


# --- one worker -------------------------------------------------------------------------------


async def started(command: Sequence[str]) -> Process:
    """Start a worker."""
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, process_group=0)


async def ended(process: Process, ending: Ending) -> int:
    """Return a worker's exit code once it has ended, by itself or because that was asked for."""
    running = asyncio.ensure_future(process.wait())
    await first_of(_shielded(running), ending.asked.wait())
    if not running.done():
        _drain(process)
        await first_of(_shielded(running), ending.hurry.wait())
    if not running.done():
        process.send_signal(signal.SIGTERM)  # it drains already, so for it this is the second wish
        await first_of(_shielded(running), asyncio.sleep(KILL_SECONDS))
    if not running.done():
        say(f"process {process.pid} does not end: it is killed")
        process.kill()
    code = await running
    _drain(process)
    return code


def _drain(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.close()


async def _shielded(future: asyncio.Future[int]) -> None:
    await asyncio.shield(future)


async def first_of(*waits: Any) -> None:
    """Return when one of these is done, and wait for the others no longer."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def how(code: int) -> str:
    """Return how a process has ended."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with {code}"


# --- files ------------------------------------------------------------------------------------


class Changes:
    """The .py files below a directory, as they were when this was made."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._before = self._look()

    async def wait(self) -> None:
        """Return when a file is another one than before, or is new, or is gone."""
        while await asyncio.to_thread(self._look) == self._before:
            await self._clock.pause(LOOK_SECONDS)

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for path in _sources(self._directory):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # an editor replaces it at this moment
            found[str(path)] = (status.st_mtime_ns, status.st_size)
            if len(found) > FILES_MAX:
                raise UsageError(
                    f"there are more than {FILES_MAX:,} .py files below {self._directory}: --reload belongs where the "
                    f"application is"
                )
        return found


def _sources(directory: Path) -> Iterator[Path]:
    for root, directories, files in os.walk(directory):
        # What is hidden is no source of this application, and neither is what is installed in an environment.
        directories[:] = [
            name for name in directories if name[0] != "." and not (Path(root) / name / "pyvenv.cfg").exists()
        ]
        yield from (Path(root) / name for name in files if name.endswith(".py"))
