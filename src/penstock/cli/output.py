"""What commands print: data on stdout, as one JSON document or as a table; talk on stderr.

On a terminal a table is fitted to the window. Anything else gets plain columns: one line a row however long,
and no escape sequence, so that `grep` and `awk` see all of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
"""The option of every command that prints data."""

WIDTH_KEPT = 12
"""A column of no more characters than this is not folded, however narrow the window."""


def print_json(document: object) -> None:
    """Print one JSON document; in ASCII, so that no locale can fail to encode it."""
    print(json.dumps(document, indent=2))


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
