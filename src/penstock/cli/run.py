"""`penstock run`: the subscribers of an application, in this process or in several.

It ends on SIGTERM or Ctrl-C: nothing more is begun, what was not begun goes back without a counted attempt, and every
handler that runs may end. A second signal cancels them. The exit code is 0 if all of them ended by themselves, and 1 if
some did not, or if a subscriber could go on no more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.application import Target, find_bus
from penstock.cli.output import say
from penstock.cli.session import Session
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bus.bus import Bus

WORKERS_MAX = 64
"""So many is a subscription by key divided among at most."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

LogLevel = Literal["debug", "info", "warning", "error"]


def run(
    context: typer.Context,
    target: Target,
    *,
    workers: Annotated[
        int, typer.Option(min=1, max=WORKERS_MAX, metavar="N", help="In so many processes; one that dies is replaced.")
    ] = 1,
    reload: Annotated[bool, typer.Option("--reload", help="Begin anew when a .py file changes.")] = False,
    log_level: Annotated[LogLevel | None, typer.Option(help="What is logged; info unless told.")] = None,
    worker: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Run the subscribers of an application until SIGTERM or Ctrl-C.

    Handlers that run by then may end, and what was not begun goes back. A second signal cancels handlers at once.
    """
    from penstock.bus.subscribers import announcement

    session = context.ensure_object(Session)
    if reload and workers > 1:
        raise UsageError("--reload is for development, with one process: leave --workers out")
    if reload or workers > 1:
        code = _supervised(session, target, workers, log_level, reload=reload)
    else:
        bus = _runnable(target, session)
        log_to_stderr(log_level)
        if worker <= 1:
            for line in announcement(bus.url, bus.subscribers, bus.projections):
                say(line)
        code = _run_here(bus, is_worker=worker > 0)
    if code:
        raise typer.Exit(code)


def _runnable(target: str, session: Session) -> Bus:
    bus = find_bus(target, session)
    if not bus.subscribers and not any(projection.embedded for projection in bus.projections):
        raise UsageError(
            f"{target} has nothing to run: declare handlers with @bus.subscriber(topic, name), and import their "
            f"modules where the bus is"
        )
    for subscriber in bus.subscribers:
        subscriber.check()
    return bus


def log_to_stderr(level: LogLevel | None) -> None:
    """Log, unless the application has said where to: then only a level that was asked for is set."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=(level or "info").upper(), format=LOG_FORMAT, stream=sys.stderr)
    if level is not None:
        logging.getLogger("penstock").setLevel(level.upper())


def _run_here(bus: Bus, *, is_worker: bool) -> int:
    from penstock.bus.loop import run_to_end

    async def running() -> bool:
        until = asyncio.Event()
        if is_worker:
            _watch_supervisor(until)
        return await bus.run(until=until)

    return 0 if run_to_end(running()) else 1


def _watch_supervisor(until: asyncio.Event) -> None:
    """Set the event when stdin ends: the supervisor wants an end, or is no more.

    Unlike a signal this can be said twice, by whoever else ends all processes of a service at once, and means the same.
    """
    loop = asyncio.get_running_loop()
    stdin = sys.stdin.fileno()

    def look() -> None:
        if not os.read(stdin, 1):
            loop.remove_reader(stdin)
            until.set()

    loop.add_reader(stdin, look)


def _supervised(session: Session, target: str, workers: int, level: LogLevel | None, *, reload: bool) -> int:
    from penstock.cli.supervising import reloaded, supervised

    command = [sys.executable, "-m", "penstock"]
    if session.url is not None:
        command += ["--url", session.url]
    if session.config is not None:
        command += ["--config", str(session.config)]
    if session.debug:
        command.append("--debug")
    command += ["run", target]
    if level is not None:
        command += ["--log-level", level]
    if reload:
        log_to_stderr(level)
        return asyncio.run(reloaded([*command, "--worker", "1"]))
    # Once here, so that what is wrong is told once, before any process starts.
    bus = _runnable(target, session)
    if bus.url.startswith("memory:"):
        raise UsageError(
            "a memory: store cannot be shared: each of the workers would have its own; use file:./directory"
        )
    log_to_stderr(level)
    return asyncio.run(supervised(lambda number: [*command, "--worker", str(number)], workers))
