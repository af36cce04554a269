"""The commands put together, and how every one of them ends.

A command is a function in a file of its own, and one line below. It prints data to stdout and talk to
stderr, and raises what goes wrong; all endings are decided here:

    0    fine
    1    failed: any other `PenstockError`, a file that cannot be used, an error nobody expected
    2    usage: wrong arguments, `UsageError`, and settings that are wrong: `SettingsError`
    3    an integrity problem: `IntegrityError`
    130  interrupted from the keyboard
    141  whoever read the output went away, as in `penstock … | head`

An error is one line, `error: …`, on stderr, with control characters escaped: it may quote what others have written.
A traceback is shown with `--debug` only.

Without a stdout, as after `>&-`, no command does anything that would have to be printed.
"""

from __future__ import annotations

import io
import os
import sys
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.main import get_command

from penstock.cli import (
    bench,
    chaos,
    completion,
    config,
    consume,
    debug,
    dlq,
    doctor,
    dump,
    health,
    lag,
    lake,
    metrics,
    pause,
    pipelines,
    projections,
    publish,
    read,
    repair,
    schedule,
    seek,
    spark,
    subscriptions,
    top,
    topics,
    trim,
    verify,
    version,
)
from penstock.cli.application import shown_lines, shown_trace
from penstock.cli.output import say, shown_text
from penstock.cli.run import run as run_application
from penstock.cli.session import Session
from penstock.errors import IntegrityError, PenstockError, SettingsError, SparkUnavailable, UsageError
from penstock.settings import redact_url

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "penstock"
STDERR = 2
READER_GONE = 141  # 128 + SIGPIPE, as shells count it
MESSAGE_MAX = 500
NO_STDOUT = "stdout is closed: there is nowhere to print to; >/dev/null takes what nobody wants"
NO_STDIN = "stdin is closed: there is nothing to read from"

# Help is plain text: rich would frame it even in a pipe, and its import doubles the time of every start.
app = typer.Typer(
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(topics.app, name="topics")
app.command()(publish.publish)
app.command()(read.read)
app.command()(trim.trim)
app.add_typer(subscriptions.app, name="subscriptions")
app.command(cls=lag.Watching)(lag.lag)
app.command()(metrics.metrics)
app.command()(health.health)
app.command()(top.top)
app.command()(seek.seek)
app.command()(pause.pause)
app.command()(pause.resume)
app.command()(consume.consume)
app.add_typer(dlq.app, name="dlq")
app.command(name="run")(run_application)
app.command()(debug.debug)
app.add_typer(schedule.app, name="schedule")
app.command()(verify.verify)
app.command()(repair.repair)
app.command()(dump.dump)
app.command()(doctor.doctor)
app.command()(chaos.chaos)
app.add_typer(spark.app, name="spark")
app.add_typer(pipelines.app, name="pipeline")
app.add_typer(lake.app, name="lake")
app.add_typer(projections.app, name="projection")
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.command()(version.version)
app.command(help=completion.HELP)(completion.completion)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {version_of('penstock')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            # Short, like every help of an option: shells show it while they complete, and take one line.
            help="The store. One with a password: in a file, named by PENSTOCK_URL_FILE.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The settings file, instead of ./penstock.toml.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Penstock, a reliable event bus."""
    session = context.ensure_object(Session)
    session.url, session.config, session.debug = url, config, debug
    if sys.stdout is None:
        # A service prints nothing, and some are started like that; what its handlers print goes nowhere, as it did.
        if context.invoked_subcommand != "run":
            raise PenstockError(NO_STDOUT)
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    if url is not None and redact_url(url) != url:
        say("warning: other users can see the password in --url: name a file in PENSTOCK_URL_FILE instead")
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv`, or in this process's arguments, and return its exit code."""
    _stand_in_for_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path may hold bytes that are no text; showing them escaped is better than failing.
        sys.stdout.reconfigure(errors="backslashreplace")
    session = Session()
    code = _run_to_its_end(argv, session)
    if sys.stdout is None:  # and yet it went well: help was asked for, or the version
        return code or _report(PenstockError(NO_STDOUT), session)
    try:
        # Now, because at the interpreter's end it is too late to report what goes wrong.
        sys.stdout.flush()
    except OSError as error:
        code = code or (READER_GONE if isinstance(error, BrokenPipeError) else _report(error, session))
        # Else Python would try again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _stand_in_for_closed_streams() -> None:
    """Let nothing else get the place of a standard stream that the caller has closed: no data, no talk, and no file."""
    # Else the next file that is opened gets its number, and what a child or a C library writes there ends in a store.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = _ClosedStdin()
    if sys.stderr is None:  # `print` would take stdout for it
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process


class _ClosedStdin(io.TextIOWrapper):
    """Stands in for a stdin that is closed: it is no terminal, and whoever is about to read from it is told."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())

    @property
    def buffer(self) -> NoReturn:
        raise OSError(NO_STDIN)


def _run_to_its_end(argv: Sequence[str] | None, session: Session) -> int:
    try:
        _command().main(argv, prog_name=PROGRAM, obj=session)
    except SystemExit as end:
        # Both typer and rich make a failure of it when the reader went away.
        if isinstance(end.__context__, BrokenPipeError):
            return READER_GONE
        _explain(end.__context__)
        return int(end.code or 0)
    except Exception as error:  # noqa: BLE001 - whatever it is, a person gets one line and a code
        return _report(error, session)
    return 0


def _explain(refusal: BaseException | None) -> None:
    """Say where an option belongs that a command does not know, if it is one of all commands."""
    option = getattr(refusal, "option_name", None)
    if any(option in parameter.opts for parameter in _command().params):
        say(f"{option} goes before the command: {PROGRAM} {option} … COMMAND")


@cache  # typer looks at the signature of every command, which takes longer than most commands
def _command() -> Any:
    command = get_command(app)
    # Asking for these two is what makes typer answer shells at all; `penstock completion` replaces them.
    unwanted = {"install_completion", "show_completion"}
    command.params = [parameter for parameter in command.params if parameter.name not in unwanted]
    return command


def _report(error: Exception, session: Session) -> int:
    if session.debug:
        say(shown_trace(error, error.__traceback__).removesuffix("\n"))
    if isinstance(error, PenstockError | OSError):
        # What to install takes several lines to say.
        shown = shown_lines if isinstance(error, SparkUnavailable) else shown_text
        # What is added to an error as a note is part of what it says, such as where an application got it.
        say(shown(", ".join([f"error: {error}", *getattr(error, "__notes__", ())])))
    else:
        # What others say may be long, run over many lines, and quote a URL with its password.
        message = redact_url(" ".join(str(error).split())[:MESSAGE_MAX])
        what = shown_text(f"{type(error).__name__}: {message}")
        say(f"error: unexpected {what} (`{PROGRAM} --debug` shows the traceback)")
    return exit_code(error)


def exit_code(error: Exception) -> int:
    """Return the code to exit with when a command raised this."""
    match error:
        case UsageError() | SettingsError():
            return 2
        case IntegrityError():
            return 3
        case _:
            return 1
