"""Pieces: how single values are written in the report. Everything that enters the page passes through here."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.audit.results import Verdict

SIGNS: Final[dict[Verdict, str]] = {"proven": "✓", "unproven": "?", "lost": "✗", "external": "↗"}
"""A verdict without colour."""

_UNITS: Final = (("d", 86_400e6), ("h", 3_600e6), ("min", 60e6), ("s", 1e6), ("ms", 1e3))


def text(value: object) -> str:
    """Return any value as text that means nothing to a browser."""
    return escape(str(value), quote=True)


def number(value: int) -> str:
    """Return a number as people read it."""
    return f"{value:,}"


def share(part: int, whole: int) -> str:
    """Return a part in per cent; never 100 % or 0 % of what is not all or nothing."""
    if not whole or part in {0, whole}:
        return "100 %" if part else "0 %"
    percent = 100 * part / whole
    return "< 0.1 %" if percent < 0.1 else "> 99.9 %" if percent > 99.9 else f"{percent:.1f} %"


def took(time_us: int | None) -> str:
    """Return a duration in a unit that people read."""
    if time_us is None:
        return "-"
    for unit, scale in _UNITS:
        if time_us >= scale:
            return f"{time_us / scale:.3g} {unit}"
    return f"{time_us} µs"


def at_most(time_us: int | None) -> str:
    """Return a duration that is an upper bound."""
    return took(time_us) if time_us is None else f"≤ {took(time_us)}"


def offsets(start: int, stop: int) -> str:
    """Return a range of offsets: one by its number, more from the first to the last."""
    return number(start) if stop == start + 1 else f"{number(start)} to {number(stop - 1)}"


def when(time: str) -> str:
    """Return a time in UTC without what a computer needs."""
    return time.replace("T", " ").removesuffix("Z")


def element(name: str, *content: str, **attributes: object) -> str:
    """Return an element; its content is markup already, its attributes are not."""
    given = "".join(f' {key.strip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(content)}</{name}>"


def command(*words: object) -> str:
    """Return a command to copy; on a narrow screen it is broken between words only."""
    return element("code", " ".join(element("span", text(word)) for word in words))


def counted(count: int, what: str) -> str:
    """Return how many there are of something."""
    return f"{number(count)} {what}{'' if count == 1 else 's'}"


def badge(verdict: Verdict) -> str:
    """Return a verdict as a sign and a word."""
    return element("span", f"{SIGNS[verdict]} {text(verdict)}", class_=f"badge {verdict}")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> str:
    """Return a table; cells are markup already. On a narrow screen each row becomes a card, so cells carry labels."""
    kinds = {header: "n" if header in numbers else "t" for header in headers}
    head = "".join(element("th", text(header), class_=kinds[header], scope="col") for header in headers)
    body = "".join(
        element(
            "tr",
            *(
                element("td", cell, class_=kinds[header], data_label=header)
                for header, cell in zip(headers, row, strict=True)
            ),
        )
        for row in rows
    )
    return element("table", element("thead", element("tr", head)), element("tbody", body))
