"""`penstock top`: topics and subscriptions at work, as a view in a terminal that is drawn anew again and again.

Rates are measured between two looks, so that one frame takes one interval. Without a terminal one frame is printed as
plain columns, and that is all. `q` ends the view, `p` lets it stand still and go on; the terminal is as it was before,
however it ends.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.arguments import duration
from penstock.cli.output import Column, cards, print_table, say, shown_age, shown_size, shown_text, shown_time
from penstock.cli.session import Session, find_topic
from penstock.cli.topics import bytes_on_disk
from penstock.errors import TopicDeleted, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, RenderableType

    from penstock.bus.examination import History
    from penstock.bus.health import Health
    from penstock.ports import Store
    from penstock.rows import TopicInfo
    from penstock.settings import Settings

INTERVAL_SECONDS = 1.0
INTERVAL_SECONDS_MIN = 0.05
WIDE_COLUMNS = 110
"""From here on there is room for how the lag changes, and for the first reason."""
NAME_COLUMNS = 14
"""A name may be cut, with a mark of it; where it had less room than this each row is a card. A number is never cut."""
WHY_COLUMNS = 24
"""So much of the first reason is seen at least."""
STYLES: dict[str, str] = {"ok": "green", "degraded": "yellow", "stalled": "bold red"}


def top(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only this topic.")] = None,
    *,
    interval: Annotated[
        float | None, typer.Option(parser=duration, metavar="SECONDS", help="How often to look; every second.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
) -> None:
    """Show topics and subscriptions at work, drawn anew again and again.

    The keys: q ends it, p lets it stand still, and go on.
    """
    seconds = INTERVAL_SECONDS if interval is None else interval
    if seconds < INTERVAL_SECONDS_MIN:
        raise UsageError(f"--interval is at least {INTERVAL_SECONDS_MIN:g} seconds, not {seconds:g}")
    with context.ensure_object(Session).open_store() as (store, settings):
        view = _View(store, settings, None if topic is None else find_topic(store, topic))
        view.look()
        if once or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
            threading.Event().wait(seconds)  # Ctrl-C interrupts it
            _print(view.look())
        else:
            _watch(view, seconds)


# --- looking --------------------------------------------------------------------------------------


class TopicFrame(NamedTuple):
    """A topic in one frame."""

    name: str
    partitions: int
    head: int
    """The sum of the ends of its partitions: how many events it ever had."""
    bytes: int | None
    per_second: float | None


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown at one moment."""

    topics: Sequence[TopicFrame]
    health: Health


class _View:
    """Looks at a store, and remembers the look before."""

    def __init__(self, store: Store, settings: Settings, topic: TopicInfo | None) -> None:
        from penstock.bus.examination import History
        from penstock.clock import SystemClock

        self._store = store
        self._settings = settings
        self._topic = topic
        self._clock = SystemClock()
        self._history: History = History()
        self._heads: dict[str, int] = {}
        self._looked_at = 0.0

    def look(self) -> Frame:
        from penstock.bus.examination import examine

        now, before = self._clock.monotonic(), self._looked_at
        topics = list(self._topics(now - before if self._heads else None))
        self._looked_at = now
        health = examine(
            self._store,
            self._topic,
            now_us=self._clock.time_us(),
            stalled_after=self._settings.delivery.stalled_seconds,
            history=self._history,
        )
        return Frame(topics, health)

    def _topics(self, elapsed: float | None) -> Iterator[TopicFrame]:
        heads: dict[str, int] = {}
        for info in self._store.log.topics() if self._topic is None else [self._topic]:
            if self._topic is None and info.name.startswith("_"):
                continue
            try:
                head = sum(self._store.log.bounds(partition).stop for partition in info.partitions)
            except TopicDeleted:
                if self._topic is not None:
                    raise
                continue  # since they were listed
            heads[info.log_id] = head
            known = self._heads.get(info.log_id)
            rate = None if known is None or not elapsed else (head - known) / elapsed
            size = bytes_on_disk(info, self._settings.url)
            yield TopicFrame(info.name, len(info.partitions), head, size, rate)
        self._heads = heads


# --- what is shown --------------------------------------------------------------------------------

TOPIC_HEADERS = ("topic", "partitions", "events/s", "head", "size")
HEADERS = ("subscription", "mode", "cons", "acks/s", "lag", "oldest", "dead", "parked", "state")
WIDE_HEADERS = (*HEADERS, "lag/s", "why")
NUMBERS = {*TOPIC_HEADERS[1:], *HEADERS[2:-1], "lag/s"}


def _topic_rows(frame: Frame) -> list[tuple[str, ...]]:
    busiest = sorted(frame.topics, key=lambda each: (-(each.per_second or 0.0), each.name))
    return [
        (
            each.name,
            str(each.partitions),
            shown_rate(each.per_second),
            shown_count(each.head),
            "-" if each.bytes is None else shown_size(each.bytes),
        )
        for each in busiest
    ]


def _subscription_rows(frame: Frame) -> list[tuple[str, ...]]:
    """Return a row for each subscription, with everything that a wide window has; the largest lag first."""
    behind = sorted(frame.health.subscriptions, key=lambda each: (-each.lag, each.topic, each.name))
    return [
        (
            f"{each.topic}/{each.name}",
            each.mode,
            str(len(each.consumers)),
            shown_rate(each.settled_per_second),
            shown_count(each.lag),
            shown_age(each.oldest_seconds),
            shown_count(each.dead),
            shown_count(each.waiting),
            each.state,
            shown_rate(each.lag_per_second, signed=True),
            shown_text(each.reasons[0]) if each.reasons else "",
        )
        for each in behind
    ]


def shown_count(count: float) -> str:
    """Return a number in few characters."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= 10 * scale:
            return f"{count / scale:.1f}{unit}" if abs(count) < 100 * scale else f"{count / scale:.0f}{unit}"
    return f"{count:,.0f}"


def shown_rate(rate: float | None, *, signed: bool = False) -> str:
    """Return a rate; a dash if it is not known yet."""
    if rate is None:
        return "-"
    sign = "+" if signed and rate > 0 else ""
    return sign + (f"{rate:.1f}" if abs(rate) < 100 else shown_count(rate))


def _print(frame: Frame) -> None:
    print(f"{shown_time(frame.health.at)}  {frame.health.state}\n")
    print_table(TOPIC_HEADERS, _topic_rows(frame), numbers=NUMBERS)
    print()
    wide = not sys.stdout.isatty() or shutil.get_terminal_size().columns >= WIDE_COLUMNS
    headers = WIDE_HEADERS if wide else HEADERS
    print_table(headers, [row[: len(headers)] for row in _subscription_rows(frame)], numbers=NUMBERS)
    for reason in frame.health.store.reasons:
        say(shown_text(reason))


# --- in a terminal --------------------------------------------------------------------------------


def _watch(view: _View, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(
        color_system=None if os.environ.get("NO_COLOR") else "auto", markup=False, emoji=False, highlight=False
    )
    paused = False
    frame = view.look()
    with keys() as wait, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_drawn(frame, console, paused=paused), refresh=True)
            match wait(None if paused else interval):
                case "q":
                    return
                case "p":
                    paused = not paused
                case _ if not paused:
                    frame = view.look()


@contextmanager
def keys() -> Iterator[_Wait]:
    """Let single keys be read in this block, without being shown; what the terminal was is brought back at its end."""
    if not sys.stdin.isatty():
        yield _Wait(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)  # Ctrl-C still interrupts
        yield _Wait(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Wait:
    """Waits for a key, for so long or for ever."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float | None) -> str:
        if self._descriptor is None:
            threading.Event().wait(seconds)
            return ""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._descriptor, 1)
        # A terminal that is gone has nothing more to say, and nobody looks at it.
        return pressed.decode("ascii", "replace").lower() if pressed else "q"


def _drawn(frame: Frame, console: Console, *, paused: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    width, height = console.size
    at = f"{frame.health.at:%H:%M:%S} UTC"
    title = Text.assemble(
        "penstock top  ",
        (frame.health.state, STYLES[frame.health.state]),
        f"  {at}  {'paused: p goes on' if paused else 'p: pause'}, q: quit",
        no_wrap=True,
        overflow="ellipsis",
    )
    topics, behind = _topic_rows(frame), _subscription_rows(frame)
    wide = width >= WIDE_COLUMNS
    # The title, two headers and two empty lines are always there; topics get a third of the rest if they need it.
    room = max(height - 5, 2)
    of_topics = min(len(topics), max(room // 3, room - len(behind) - 1, 1))
    headers = WIDE_HEADERS if wide else HEADERS
    rows = [row[: len(headers)] for row in behind]
    store = [Text(shown_text(reason), style=STYLES["degraded"], no_wrap=True) for reason in frame.health.store.reasons]
    return Group(
        title,
        *store,
        Text(),
        _table(TOPIC_HEADERS, topics, of_topics, width),
        Text(),
        _table(headers, rows, room - of_topics - len(store), width),
    )


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], most: int, width: int) -> RenderableType:
    """Return as many rows as there is room for; the last line says how many are left out."""
    from rich.table import Table
    from rich.text import Text

    columns = [Column(header, cells, header in NUMBERS) for header, *cells in zip(headers, *rows, strict=True)]
    # Left to itself, rich takes from numbers, too, what a name or a reason has too much.
    whole = sum(column.width + 1 for column in columns[1:] if column.header != "why")
    why = WHY_COLUMNS if "why" in headers else 0
    if width - whole - why < NAME_COLUMNS:
        return _cards(columns, most, width)
    name = min(max(columns[0].width, NAME_COLUMNS), width - whole - why)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(
            column.header,
            justify="right" if column.to_right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width={0: name}.get(position, width - whole - name - 1 if column.header == "why" else column.width),
        )
    shown = rows if len(rows) <= most else rows[: max(most - 1, 0)]
    for row in shown:
        cells = zip(headers, row, strict=True)
        table.add_row(*(Text(cell, style=STYLES.get(cell, "") if header == "state" else "") for header, cell in cells))
    if len(shown) < len(rows):
        table.add_row(_more(len(rows) - len(shown)), *[""] * (len(headers) - 1))
    return table


def _cards(columns: Sequence[Column], most: int, width: int) -> RenderableType:
    """Return rows as lines of `name: value`, as many as there is room for."""
    from rich.console import Group
    from rich.text import Text

    rows = cards(columns, width)
    size = len(rows[0]) if rows else 1
    shown = rows if len(rows) * size <= most else rows[: max((most - 1) // size, 0)]
    lines = [line for row in shown for line in row]
    if len(shown) < len(rows):
        lines.append(_more(len(rows) - len(shown)))
    return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


def _more(count: int) -> str:
    return f"and {count:,} more"
