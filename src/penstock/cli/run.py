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
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.application import Target, find_bus, shown_lines
from penstock.cli.output import say, shown_text
from penstock.cli.session import Session
from penstock.errors import PenstockError, SettingsError, UsageError

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
    session = context.ensure_object(Session)
    if reload and workers > 1:
        raise UsageError("--reload is for development, with one process: leave --workers out")
    if reload or workers > 1:
        code = _supervised(session, target, workers, log_level, reload=reload)
    else:
        try:
            code = _run_one(session, target, log_level, worker)
        except SettingsError as error:
            if not worker:
                raise
            # A file that is mended later is no reason for all workers to end: the supervisor tries again.
            raise PenstockError(str(error)) from error
    if code:
        raise typer.Exit(code)


def _run_one(session: Session, target: str, level: LogLevel | None, worker: int) -> int:
    """Run the application in this process, which is a worker if it has a number; returns the exit code."""
    from penstock.bus.subscribers import announcement

    bus = _runnable(target, session)
    log_to_stderr(level)
    if worker <= 1:
        for line in announcement(bus.url, bus.subscribers, bus.projections):
            say(shown_text(line))
    return _run_here(bus, is_worker=worker > 0)


def _runnable(target: str, session: Session) -> Bus:
    bus = find_bus(target, session)
    if not bus.subscribers and not any(projection.embedded for projection in bus.projections):
        raise UsageError(
            f"{target} has nothing to run: declare handlers with @bus.subscriber(topic, name), and import their "
            f"modules where the bus is"
        )
    for subscriber in bus.subscribers:
        subscriber.check()
    _ = bus.settings  # `SettingsError` here, and not in one worker after the other
    return bus


def log_to_stderr(level: LogLevel | None) -> None:
    """Log, unless the application has said where to: then only a level that was asked for is set."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(LOG_FORMAT))
        logging.basicConfig(level=(level or "info").upper(), handlers=[handler])
    if level is not None:
        logging.getLogger("penstock").setLevel(level.upper())


class _Formatter(logging.Formatter):
    """Writes a record as one line, and its traceback below; what handlers raise can speak to no terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        # The traceback as another handler's formatter has made it is kept in the record, and is not escaped.
        record = copy(record)
        record.exc_text = None
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is not ours
        """Return the line itself."""
        return shown_text(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the same
        """Return the traceback."""
        return shown_lines(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - the same
        """Return where it was logged."""
        return shown_lines(super().formatStack(stack_info))


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
