"""Charts: pictures of numbers as SVG. They stretch to any width, so that they hold no text: that stands around them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

from penstock.audit.report.pieces import element, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS: Final = ("settled", "parked", "pending", "unproven", "lost")
"""From the best to the worst."""

PATTERNS: Final = (
    '<svg class="defs" aria-hidden="true" focusable="false"><defs>'
    '<pattern id="p-unproven" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="unproven" width="6" height="6"/><rect class="stripe" width="2.5" height="6"/></pattern>'
    '<pattern id="p-lost" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<rect class="lost" width="5" height="5"/><path class="cross" d="M0 0L5 5M5 0L0 5"/></pattern>'
    '<pattern id="p-pending" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<rect class="pending" width="5" height="5"/><circle class="dot" cx="2.5" cy="2.5" r="0.9"/></pattern>'
    "</defs></svg>"
)
"""What tells kinds apart without colour."""

_WIDTH: Final = 600
_MARK_MIN: Final = 4.0
"""What is lost or unproven is at least so wide, however much there is besides."""


def bar(parts: Sequence[tuple[str, int]], label: str) -> str:
    """Return one bar, divided; no part that is not empty becomes too narrow to be seen."""
    whole = sum(count for _, count in parts)
    if not whole:
        return ""
    widths = [max(_WIDTH * count / whole, _MARK_MIN) if count else 0.0 for _, count in parts]
    scale = _WIDTH / sum(widths)
    drawn, left = [], 0.0
    for (kind, _), width in zip(parts, widths, strict=True):
        if width:
            drawn.append(_rect(kind, left, 0, width * scale, 22))
            left += width * scale
    return _picture(drawn, 22, label, "bar")


def timeline(steps: Mapping[str, Sequence[int]], label: str) -> str:
    """Return the offsets of a partition from the first to the last; below them, a mark wherever something is amiss."""
    bins = max((len(counts) for counts in steps.values()), default=0)
    if not bins:
        return ""
    columns = [tuple(steps[kind][at] if kind in steps else 0 for kind in KINDS) for at in range(bins)]
    step = _WIDTH / bins
    drawn: list[str] = []
    at = 0
    # Neighbours of one kind are one rectangle.
    for shares, run in groupby(columns, _shares):
        length = len(list(run))
        top = 0.0
        for kind, height in zip(KINDS, shares, strict=True):
            if height:
                drawn.append(_rect(kind, at * step, top, length * step, 22 * height))
                top += 22 * height
        worst = "lost" if shares[4] else "unproven" if shares[3] else ""
        if worst:
            width = max(length * step, 2 * _MARK_MIN)
            drawn.append(_rect(f"mark-{worst}", min(at * step, _WIDTH - width), 25, width, 7))
        at += length
    return _picture(drawn, 32, label, "timeline")


def _shares(counts: tuple[int, ...]) -> tuple[float, ...]:
    whole = sum(counts)
    return tuple(round(count / whole, 3) if whole else 0.0 for count in counts)


def curve(points: Sequence[float], label: str) -> str:
    """Return how a share grows from 0 to 1, step by step."""
    step = _WIDTH / max(len(points) - 1, 1)
    path = " ".join(f"{at * step:.1f},{100 - 96 * point:.1f}" for at, point in enumerate(points))
    grid = "".join(
        f'<line class="grid" x1="0" x2="{_WIDTH}" y1="{100 - 96 * level:.1f}" y2="{100 - 96 * level:.1f}"/>'
        for level in (0.5, 0.95, 0.99)
    )
    area = f'<polygon class="area" points="0,100 {path} {_WIDTH},100"/>'
    return _picture([grid, area, f'<polyline class="line" points="{path}"/>'], 100, label, "curve")


def lines(series: Mapping[str, Sequence[float | None]], label: str) -> str:
    """Return several values over time, each from 0 to 1; where one is missing, its line is."""
    drawn = []
    for name, values in series.items():
        step = _WIDTH / max(len(values) - 1, 1)
        runs = groupby(enumerate(values), lambda each: each[1] is None)
        for missing, run in runs:
            if not missing:
                found = [(at * step, 98 - 94 * (value or 0.0)) for at, value in run]
                if len(found) == 1:
                    found.append((found[0][0] + 2, found[0][1]))
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in found)
                drawn.append(f'<polyline class="line {text(name)}" points="{points}"/>')
    return _picture(drawn, 100, label, "curve")


def columns(values: Sequence[Sequence[tuple[str, float]]], label: str) -> str:
    """Return a column for each step of time, divided; all of them together are at most 1 high."""
    step = _WIDTH / max(len(values), 1)
    drawn = []
    for at, parts in enumerate(values):
        top = 60.0
        for kind, height in parts:
            top -= 60 * height
            if height:
                drawn.append(_rect(kind, at * step + 0.1 * step, top, max(0.8 * step, 0.5), 60 * height))
    return _picture(drawn, 60, label, "columns")


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{text(kind)}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"/>'


def _picture(drawn: Sequence[str], height: int, label: str, kind: str) -> str:
    return element(
        "svg",
        element("title", text(label)),
        *drawn,
        viewBox=f"0 0 {_WIDTH} {height}",
        preserveAspectRatio="none",
        role="img",
        class_=f"chart {kind}",
    )
