"""The promises of tables in a terminal: in a window of any width nothing is cut, and nothing is left out."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from tests.test_cli_health import on_a_terminal
from tests.test_cli_subscriptions import nothing_from_outside

from penstock.cli.output import FACT_KEPT, WIDTH_KEPT, Column, cards, fitted, laid_out
from penstock.events import Event
from penstock.rows import Commit, Parked, Shard
from penstock.stores import open_store

__all__ = ["nothing_from_outside"]  # a fixture: pytest finds it here

EVENTS = 123_456
NAMES = {"long": ("visitors-from-the-web", "analytics-pipeline"), "short": ("orders", "billing")}
T0 = 1_790_000_000_000_000
COUNT = f"{EVENTS:,}"
COMMANDS = {
    "topics": ("TOPIC", COUNT, f"0…{EVENTS}", "sync", "everything"),
    "topics show TOPIC": ("TOPIC", COUNT, "0", str(EVENTS)),
    "subscriptions": ("TOPIC", "NAME", "key_shared", COUNT, "2", "yes"),
    "subscriptions show TOPIC NAME": ("TOPIC", "NAME", str(EVENTS)),
    "lag": ("TOPIC", "NAME", "0", str(EVENTS), "2", "here"),
    "health": ("TOPIC", "NAME", "key_shared", COUNT, "2"),
    "top --once --interval 0.05": ("TOPIC", "TOPIC/NAME", "key_shared", "123k", "2"),
    "dlq ls TOPIC NAME": ("TOPIC/0@7", "TOPIC/0@8", "ValueError", "ada", "2026-09-21T14:13:20.000007Z", "customer"),
    "dlq groups TOPIC NAME": ("2", "ValueError", "2026-09-21T14:13:20.000008Z", "TOPIC/0@8", "customer"),
    "dlq stats": ("TOPIC", "NAME", "2", "0", "2026-09-21T14:13:20.000007Z"),
    "dlq show TOPIC NAME 7": ("TOPIC/0@7", "NAME", "ValueError", "4", "customer"),
    "schedule ls": ("TOPIC", "0", "visit.ended", "ada"),
}
"""What each shows, whole, whatever the width."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make stores with a subscription that is far behind, and has dead letters."""
    made = {}
    for which, (name, subscription) in NAMES.items():
        made[which] = f"file:{tmp_path_factory.mktemp(which)}/store"
        lines = "\n".join(map(str, range(EVENTS)))
        penstock = [sys.executable, "-m", "penstock", "--url", made[which]]
        for command, stdin in (
            (["publish", name, "--create", "--ndjson"], lines),
            (["subscriptions", "create", name, subscription], ""),
            (["publish", name, "later", "--delay", "7d", "--type", "visit.ended", "--key", "ada"], ""),
        ):
            subprocess.run([*penstock, *command], input=stdin, text=True, check=True, capture_output=True)
        with closing(open_store(made[which])) as store:
            (info,) = [each for each in store.log.topics() if each.name == name]
            rows = [
                Parked(
                    shard=Shard(info.log_id, subscription, 0, 0),
                    offset=offset,
                    state="dead",
                    lane=0,
                    event=Event(key=b"ada", type="visit.ended"),
                    attempts=4,
                    error_type="ValueError",
                    error_message="this is not what was agreed upon with the customer",
                    parked_at=T0 + offset,
                )
                for offset in (7, 8)
            ]
            assert store.cursors.commit([Commit(parked=tuple(rows))]) == [None]
    return made


def seen(*argv: str, columns: int) -> list[str]:
    """Return the lines that a command writes to a terminal of this width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "penstock", *argv]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment) as process:
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.05)[0]:
                shown += os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)
    return shown.decode().replace("\r", "").splitlines()


def has(text: str, value: str) -> bool:
    """Say whether a value stands in a text by itself, and not as a part of a longer one."""
    return re.search(rf"(?<![^\s]){re.escape(value)}(?![^\s])", text) is not None


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_values_are_whole_and_every_column_is_seen(
    command: str, which: str, columns: int, stores: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", stores[which])
    topic, name = NAMES[which]
    argv = [{"TOPIC": topic, "NAME": name}.get(word, word) for word in command.split()]
    lines = seen(*argv, columns=columns)
    for value in COMMANDS[command]:
        whole = value.replace("TOPIC", topic).replace("NAME", name)
        assert any(has(line, whole) for line in lines), (whole, lines)
    if columns >= 80 and "show" not in command and command != "health":  # which end in sentences
        assert all(cell_len(line) <= columns for line in lines)


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("subscriptions", "topic name mode lag unsettled parked dead oldest state protect"),
        ("lag", "topic subscr. part. cursor head lag unsett. parked dead oldest kept"),
        ("dlq groups orders billing", "count: 2 error: ValueError cause: CAUSE"),
    ],
)
def test_common_tables_fit_into_80_columns(
    command: str, first: str, stores: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", stores["short"])
    header, *_ = seen(*command.split(), columns=80)
    assert re.sub(r"[0-9a-f]{12,}", "CAUSE", " ".join(header.split())) == first


# --- laying out -----------------------------------------------------------------------------------

TEXTS = st.text("ab 統é\u0301☃", max_size=60).map(str.strip)
TABLES = st.integers(1, 5).flatmap(
    lambda wide: st.tuples(
        st.lists(st.tuples(TEXTS.filter(bool), st.booleans()), min_size=wide, max_size=wide),
        st.lists(st.lists(TEXTS, min_size=wide, max_size=wide), max_size=4),
    )
)


def columns_of(headers: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> list[Column]:
    return [
        Column(header, [row[position] for row in rows], to_right=to_right)
        for position, (header, to_right) in enumerate(headers)
    ]


def letters(*texts: str) -> list[str]:
    """Return all that is printed but space, in no order: columns stand side by side."""
    return sorted("".join("".join(texts).split()))


@given(table=TABLES, window=st.integers(1, 140))
def test_no_letter_of_a_table_is_ever_lost(table: tuple[list[tuple[str, bool]], list[list[str]]], window: int) -> None:
    headers, rows = table
    header, shown = laid_out(columns_of(headers, rows), window)
    assert len(shown) == len(rows)
    names = [name for name, _ in headers]
    if header:
        assert letters(*header) == letters(*names)
        assert all(cell_len(line) <= window for lines in shown for line in lines) or len(headers) == 2
    for lines, row in zip(shown, rows, strict=True):
        if header:
            assert letters(*lines) == letters(*row)
        else:
            assert letters(*lines) == letters(*(f"{name}:" for name in names), *row)
            assert all(cell_len(line) <= window or len(line.lstrip().split(": ")) <= 2 for line in lines)


@given(table=TABLES, window=st.integers(1, 140))
def test_what_is_short_and_every_number_and_first_column_stays_on_one_line(
    table: tuple[list[tuple[str, bool]], list[list[str]]], window: int
) -> None:
    headers, rows = table
    _, shown = laid_out(columns_of(headers, rows), window)
    for lines, row in zip(shown, rows, strict=True):
        for position, (cell, (_, is_number)) in enumerate(zip(row, headers, strict=True)):
            if position == 0 or is_number or cell_len(cell) <= (FACT_KEPT if len(row) == 2 else WIDTH_KEPT):
                assert any(cell in line for line in lines)


def test_a_long_text_is_folded_between_its_words() -> None:
    columns = columns_of(
        [("what", False), ("value", False)], [["message", "the amount is not what was agreed upon with the customer"]]
    )
    header, rows = laid_out(columns, 40)
    assert header == ["what    value"]
    assert rows == [["message the amount is not what was", "        agreed upon with the customer"]]


def test_facts_are_folded_rather_than_made_cards() -> None:
    columns = columns_of(
        [("what", False), ("value", False)],
        [["retention waits for it", "yes, it does so at"], ["log", "0123456789abcdef" * 2]],
    )
    _, rows = laid_out(columns, 40)
    assert rows == [
        ["retention waits for it yes, it does so", f"{' ' * 23}at"],
        ["log                    " + "0123456789abcdef" * 2],
    ]


def test_values_of_cards_stand_below_each_other() -> None:
    columns = columns_of(
        [("topic", False), ("lag", True), ("state", False)], [["orders", "7", "ok"], ["a", "10,000", "-"]]
    )
    assert cards(columns, 30) == [
        ["topic: orders  lag:      7", "  state: ok"],
        ["topic: a       lag: 10,000", "  state: -"],
    ]


def test_a_table_without_rows_has_its_header_however_narrow_the_window() -> None:
    assert laid_out(columns_of([("topic", False), ("events", True)], []), 5) == (["topic  events"], [])


def test_a_text_without_an_end_is_cut_without_being_measured() -> None:
    assert fitted("統" * 10_000_000, 80) == "統" * 39 + " …"


# --- the view that is drawn again -----------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
@pytest.mark.parametrize("which", NAMES)
def test_the_view_cuts_no_number(
    which: str, columns: int, stores: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", stores[which])
    with on_a_terminal("--interval", "0.1", columns=columns) as terminal:
        lines = terminal.frame().splitlines()
    assert all(cell_len(line) <= columns for line in lines)
    for value in ("123k", "key_shared", "2", "1"):
        assert any(has(line, value) for line in lines[1:]), (value, lines)
