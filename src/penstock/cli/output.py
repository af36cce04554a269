"""What commands print: data on stdout, as JSON or as a table; talk and progress on stderr.

On a terminal a table is fitted to the window, and nothing of it is cut. Anything else gets plain columns: one line a
row however long, and no escape sequence, so that `grep` and `awk` see all of it. What comes from events is printed with
its control characters escaped, so that no payload can speak to a terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
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

WIDTH_KEPT = 28
"""A column of no more cells than this is not folded, however narrow the window: names, times, causes of errors."""

FACT_KEPT = 16
"""The same where there are two columns, which tell a fact a line. A word that is longer is left to the terminal there,
which wraps it: it can be copied, and a card would be harder to read.
"""

GAP = 2
"""So many spaces are between columns, and before the further lines of a card."""

SHORT = {
    "attempts": "tries",
    "consumers": "cons.",
    "durability": "durab.",
    "partition": "part.",
    "partitions": "parts",
    "subscription": "subscr.",
    "unsettled": "unsett.",
}
"""What headers are called in a window where the whole word would push out others; most have 80 columns."""


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
    from rich.text import Text

    header, rows = laid_out(columns, shutil.get_terminal_size().columns)
    # Left to itself, rich takes `[…]` and `:…:` in a value for markup, and NO_COLOR leaves its bold type on.
    console = Console(color_system=None if os.environ.get("NO_COLOR") else "auto", highlight=False)
    for line in header:
        console.print(Text(line, style="bold"), soft_wrap=True)
    for lines in rows:
        for line in lines:
            print(line)


# --- fitted to a window -----------------------------------------------------------------------


def laid_out(columns: Sequence[Column], window: int) -> tuple[list[str], list[list[str]]]:
    """Return the lines of the header, and those of each row, in a window of so many cells; nothing is cut.

    What does not fit side by side is moved closer together, has shorter headers, and is then folded if it is long.
    Where no table fits even so, each row is a card.
    """
    shorter = [_short(column) for column in columns]
    for gap, each in ((GAP, columns), (1, columns), (1, shorter)):
        widths = [_width(column) for column in each]
        if sum(widths) + gap * (len(each) - 1) <= window:
            return _side_by_side(each, widths, gap)
    folded = _folded(shorter, window - len(shorter) + 1)
    if folded is not None:
        return _side_by_side(shorter, folded, 1)
    if not columns[0].cells:
        return [(" " * GAP).join(column.header for column in columns)], []
    return [], cards(columns, window)


def cards(columns: Sequence[Column], window: int) -> list[list[str]]:
    """Return each row as lines of `name: value`, with a value at the same place in every row.

    One that is longer than the window is a line of its own, which the terminal wraps.
    """
    from rich.cells import cell_len

    rows: list[list[str]] = [[""] for _ in columns[0].cells]
    used = 0
    for position, column in enumerate(columns):
        width = max(map(cell_len, column.cells), default=0)
        field = cell_len(column.header) + 2 + width
        before = GAP if position else 0
        is_next_line = position > 0 and used + before + field > window
        used = before + field + (0 if is_next_line else used)
        for lines, cell in zip(rows, column.cells, strict=True):
            if is_next_line:
                lines.append("")
            lines[-1] += f"{' ' * before}{column.header}: {_padded(cell, width, to_right=column.to_right)}"
    return [[line.rstrip() for line in lines] for lines in rows]


def fitted(text: str, window: int) -> str:
    """Return one line of text cut to so many cells; its last is a mark if it was."""
    from rich.cells import cell_len, set_cell_size

    # Who has written much more than can be seen is not measured to his end. There are characters that take no cell.
    beginning = text[: 8 * window]
    if len(beginning) == len(text) and cell_len(text) <= window:
        return text
    return f"{set_cell_size(beginning, window - 1)}…"


def _short(column: Column) -> Column:
    return column._replace(header=SHORT.get(column.header, column.header))


def _width(column: Column) -> int:
    """Return how many cells the longest text takes; not every character takes one."""
    from rich.cells import cell_len

    return max(map(cell_len, [column.header, *column.cells]))


def _folded(columns: Sequence[Column], room: int) -> list[int] | None:
    """Take from the widest what is missing; None if names, numbers and what is short have no room even so."""
    widths = [_width(column) for column in columns]
    kept = FACT_KEPT if _are_facts(columns) else WIDTH_KEPT
    least = [
        width if position == 0 or column.to_right else min(width, kept)
        for position, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    if sum(least) > room:
        return None
    folded = [max(small, min(width, room)) for small, width in zip(least, widths, strict=True)]
    while sum(folded) > room:
        _, widest = max(
            (width, at) for at, (width, small) in enumerate(zip(folded, least, strict=True)) if width > small
        )
        folded[widest] -= 1
    return folded


def _are_facts(columns: Sequence[Column]) -> bool:
    """Say whether each row is a name and a value."""
    return len(columns) == 2


def _side_by_side(columns: Sequence[Column], widths: Sequence[int], gap: int) -> tuple[list[str], list[list[str]]]:
    lines = partial(_lines, breaks=not _are_facts(columns))
    header, *rows = [
        [
            (" " * gap)
            .join(
                _padded(part, width, to_right=column.to_right)
                for part, column, width in zip(parts, columns, widths, strict=True)
            )
            .rstrip()
            for parts in zip_longest(*map(lines, texts, widths), fillvalue="")
        ]
        for texts in zip(*([column.header, *column.cells] for column in columns), strict=True)
    ]
    return header, rows


def _lines(text: str, width: int, *, breaks: bool) -> list[str]:
    """Fold text between its words; `breaks` folds a word, too, that is longer than a line."""
    from rich.cells import cell_len, chop_cells

    if cell_len(text) <= width:
        return [text]
    first, *words = ((chop_cells(word, width) if breaks else [word]) or [""] for word in text.split(" "))
    lines = [*first]
    for begun, *more in words:
        if cell_len(lines[-1]) + 1 + cell_len(begun) <= width:
            lines[-1] += f" {begun}"
        else:
            lines.append(begun)
        lines += more
    return lines


def _padded(text: str, width: int, *, to_right: bool) -> str:
    from rich.cells import cell_len

    space = " " * (width - cell_len(text))
    return space + text if to_right else text + space


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
