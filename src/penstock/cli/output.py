"""What commands print: data on stdout, as JSON or as a table; talk and progress on stderr.

On a terminal a table is fitted to the window. Anything else gets plain columns: one line a row however long,
and no escape sequence, so that `grep` and `awk` see all of it. What comes from events is printed with its control
characters escaped, so that no payload can speak to a terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from datetime import datetime

    from rich.progress import Progress, TaskID

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
"""The option of every command that prints data."""

JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON document a line instead.")]
"""The option of every command that prints a stream."""

Yes = Annotated[bool, typer.Option("--yes", help="Do it; without this it is only shown.")]
"""The option of every command that destroys something."""

PROGRESS_AFTER_SECONDS = 0.5
"""What takes no longer needs no bar."""

BINARY_SHOWN = 16
"""So many bytes are shown of what is no text."""

WIDTH_KEPT = 12
"""A column of no more characters than this is not folded, however narrow the window."""


def print_json(document: object) -> None:
    """Print one JSON document; in ASCII, so that no locale can fail to encode it."""
    print(json.dumps(document, indent=2))


def print_json_line(document: bytes) -> None:
    """Print one line of a stream: JSON in UTF-8, whatever the locale. A command prints such lines, or text.

    Lines are buffered: whoever prints them flushes stdout when nothing more is at hand.
    """
    # A line break inside of JSON is nothing but space, since in a string it is escaped.
    sys.stdout.buffer.write(document.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n")


def say(message: str) -> None:
    """Tell the person at the terminal something that is not data."""
    print(message, file=sys.stderr)


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Collection[str] = ()) -> None:
    """Print rows below their headers; the columns named in `numbers` are aligned to the right."""
    columns = [Column(header, cells, to_right=header in numbers) for header, *cells in zip(headers, *rows, strict=True)]
    (_draw if sys.stdout.isatty() else _print_plain)(columns)


class Column(NamedTuple):
    """One column of a table."""

    header: str
    cells: list[str]
    to_right: bool

    @property
    def width(self) -> int:
        """Of its longest text."""
        return max(map(len, [self.header, *self.cells]))

    def padded(self) -> Iterator[str]:
        """Yield the header and the cells, all of one length."""
        for text in [self.header, *self.cells]:
            yield text.rjust(self.width) if self.to_right else text.ljust(self.width)


def _print_plain(columns: list[Column]) -> None:
    for line in zip(*(column.padded() for column in columns), strict=True):
        print("  ".join(line).rstrip())


def _draw(columns: list[Column]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(
            column.header,
            justify="right" if column.to_right else "left",
            # In a narrow window names and what is short stay whole; the rest is folded, and nothing is cut.
            no_wrap=position == 0 or column.width <= WIDTH_KEPT,
            overflow="fold",
        )
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    # Left to itself, rich takes `[…]` and `:…:` in a value for markup, and NO_COLOR leaves its bold type on.
    console = Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(table)


# --- values as people read them ---------------------------------------------------------------


def shown_text(text: str) -> str:
    """Return text on one line, with everything escaped that is not printed as it stands."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def shown_bytes(data: bytes) -> str:
    """Return a payload or a key as text if it is UTF-8, and else its length and beginning."""
    try:
        return shown_text(data.decode())
    except UnicodeDecodeError:
        more = "…" if len(data) > BINARY_SHOWN else ""
        return f"<{len(data):,} bytes: {data[:BINARY_SHOWN].hex()}{more}>"


def shown_size(count: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def shown_age(seconds: float) -> str:
    """Return how long ago something was, in the largest unit that it fills."""
    for unit, scale in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds else "-"


def shown_time(moment: datetime) -> str:
    """Return a time in UTC, to the microsecond."""
    from datetime import UTC

    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def shown_time_us(time_us: int) -> str:
    """Return microseconds since 1970 as a time in UTC."""
    from penstock.clock import us_to_datetime

    return shown_time(us_to_datetime(time_us))


# --- long work --------------------------------------------------------------------------------


@contextmanager
def progress(what: str, *, counted: bool = False) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar for work that takes long, if stderr is a terminal; gives a function of bytes done and in all.

    `counted`: of things done and in all, instead of bytes.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    bar = _Bar(what, counted=counted)
    try:
        yield bar.update
    finally:
        bar.stop()


class _Bar:
    def __init__(self, what: str, *, counted: bool) -> None:
        from penstock.clock import SystemClock

        self._what = what
        self._counted = counted
        self._clock = SystemClock()
        self._begun = self._clock.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None

    def update(self, done: int, total: int | None) -> None:
        if self._shown is None and self._clock.monotonic() - self._begun >= PROGRESS_AFTER_SECONDS:
            self._shown = self._start()
        if self._shown is not None:
            bar, task = self._shown
            bar.update(task, completed=done, total=total)

    def _start(self) -> tuple[Progress, TaskID]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True, color_system=None if os.environ.get("NO_COLOR") else "auto")
        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn() if self._counted else DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        bar.start()
        return bar, bar.add_task(self._what, total=None)

    def stop(self) -> None:
        if self._shown is not None:
            self._shown[0].stop()
