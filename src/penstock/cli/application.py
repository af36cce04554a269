"""Application: finding the bus that a command is told of, as `module:name`.

* The current directory is searched first, as Python does for a program that is started there.
* `module` alone means the only bus in it. A name means a bus, or a function that returns one without being given
  anything.
* The bus decides which store it uses, unless `--url` or `--config` was given: then these do.
* Importing runs the application's own code. What goes wrong there is told in one line, with the place.
* What an application raises may quote payloads. Wherever it is printed its control characters are escaped.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import penstock
from penstock.cli.output import shown_text
from penstock.cli.session import check_url
from penstock.errors import PenstockError, UsageError, did_you_mean
from penstock.settings import redact_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType, TracebackType

    from penstock.bus.bus import Bus
    from penstock.cli.session import Session

MESSAGE_MAX = 300

PACKAGE = Path(penstock.__file__).parent
LIBRARY = Path(sysconfig.get_path("stdlib"))
INSTALLED = {"site-packages", "dist-packages"}
"""What is installed may be below the standard library, and may be the application."""

Target = Annotated[str, typer.Argument(metavar="MODULE:BUS", help="Where the bus is, such as shop.events:bus.")]
"""The argument of every command that runs an application's code."""


def find_bus(target: str, session: Session) -> Bus:
    """Return the bus that `module:name` means; `UsageError` says what there is instead."""
    name, colon, path = target.partition(":")
    if not name or (colon and not path):
        raise UsageError(f"{target!r} is no bus: write module:name, such as shop.events:bus")
    if name.endswith(".py") or "/" in name:
        meant = ".".join(Path(name.removesuffix(".py")).parts)
        raise UsageError(f"{name!r} is a file: name its module, such as {meant}:{path or 'bus'}")
    check_module(name)
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    # What is wrong with these is told before any code of the application's runs.
    settings = None if session.config is None else session.resolve().settings
    url = session.url if settings is None else settings.url
    if url is not None:
        check_url(url)
    module = _imported(name)
    bus = _named(module, path) if path else _only(module)
    if session.url is not None or session.config is not None:
        bus.configure(url=session.url, settings=settings)
    return bus


def check_module(name: str) -> None:
    """Raise `UsageError` if no module can have this name, as one that is relative to nothing."""
    if not all(name.split(".")):
        raise UsageError(f"{name!r} is no module: write its whole name, such as shop.events")


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failure(f"importing {name!r}", error) from error
        near = did_you_mean(error.name, [each.name for each in pkgutil.iter_modules([str(Path.cwd())])])
        raise UsageError(
            f"there is no module {error.name!r}{near}; it is searched in {Path.cwd()} and among what is installed"
        ) from None
    except PenstockError as error:
        _add_place(error)  # its text says what is wrong with the application
        raise
    except (Exception, SystemExit) as error:
        raise _failure(f"importing {name!r}", error) from error


def _only(module: ModuleType) -> Bus:
    found = _buses(module)
    if len({id(bus) for bus in found.values()}) == 1:
        return next(iter(found.values()))
    name = module.__name__
    if found:
        raise UsageError(f"module {name!r} has several buses: {', '.join(found)}; say which, as {name}:{min(found)}")
    raise UsageError(
        f"module {name!r} has no bus: write bus = Bus(…) there, or name a function that returns one, as {name}:make_bus"
    )


def _named(module: ModuleType, path: str) -> Bus:
    from penstock.bus.bus import Bus

    found: Any = module
    for step in path.split("."):
        if not hasattr(found, step):
            near = did_you_mean(step, _buses(module)) if found is module else ""
            raise UsageError(f"{module.__name__}:{path} is not there: {_described(found)} has no {step!r}{near}")
        found = getattr(found, step)
    if not isinstance(found, Bus) and callable(found):
        found = _made(f"{module.__name__}:{path}", found)
    if not isinstance(found, Bus):
        others = ", ".join(_buses(module)) or "none"
        raise UsageError(f"{module.__name__}:{path} is {_described(found)}, not a Bus; buses of that module: {others}")
    return found


def _made(name: str, make: Callable[..., Any]) -> Any:
    """Call what may return a bus; anything that it returns instead is described by who asked."""
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError):
        return make
    try:
        made = make()
    except PenstockError as error:
        _add_place(error)
        raise
    except (Exception, SystemExit) as error:
        raise _failure(f"calling {name}", error) from error
    if inspect.iscoroutine(made):
        made.close()
    return made


def _buses(module: ModuleType) -> dict[str, Bus]:
    from penstock.bus.bus import Bus

    return {name: value for name, value in sorted(vars(module).items()) if isinstance(value, Bus)}


def _described(value: Any) -> str:
    if inspect.ismodule(value):
        return f"module {value.__name__!r}"
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{'a class' if inspect.isclass(value) else 'a function'} {value.__name__!r}"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _failure(doing: str, error: BaseException) -> PenstockError:
    """Return what an application raised as one line: what, and where."""
    # Of a syntax error `str` would tell the name of the file once more, without its directory.
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    place = _place(error)
    return PenstockError(
        f"{doing} failed: {one_line(type(error).__name__, message)}{place and f', at {shown_text(place)}'} "
        f"(`penstock --debug …` shows the traceback)"
    )


def _add_place(error: PenstockError) -> None:
    """Note the line of the application at an error that it got from Penstock."""
    if place := _place(error):
        error.add_note(f"at {place}")


def _place(error: BaseException) -> str:
    """Return the line of the application where this was raised; empty if none of its code has run."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"  # nothing of that file is in the traceback: it has never run
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_application(each.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_application(filename: str) -> bool:
    """Whether this is neither Penstock nor Python itself, nor code that has no file."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(PACKAGE):
        return False
    return not path.is_relative_to(LIBRARY) or not INSTALLED.isdisjoint(path.parts)


# --- what an application raised, as a terminal may have it ------------------------------------


def one_line(kind: str, message: str) -> str:
    """Return the type of an error and its message, shortened: one line, without passwords of URLs."""
    return shown_text(f"{' '.join(kind.split())}: {redact_url(' '.join(message.split())[:MESSAGE_MAX])}")


def shown_lines(text: str) -> str:
    """Return text of several lines, with everything escaped that is not printed as it stands, but tabs."""
    return "".join(part if part in {"\n", "\t"} else shown_text(part) for part in re.split(r"([\n\t])", text))


def shown_trace(error: BaseException, trace: TracebackType | None) -> str:
    """Return an error with its traceback, ready to be printed."""
    return shown_lines("".join(traceback.format_exception(type(error), error, trace)))
