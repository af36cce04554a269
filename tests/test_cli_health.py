"""The promises of `penstock health` and `penstock top`: how they end, what programs read, what a terminal shows."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.test_cli_store import Run, flip_a_byte, start
from tests.test_cli_subscriptions import external, halfway, nothing_from_outside, published, run, topic

from penstock.bus.health import Health
from penstock.cli.top import shown_count, shown_rate
from penstock.events import Event
from penstock.rows import Commit, Cursor, Parked, Shard

__all__ = ["nothing_from_outside", "run"]  # fixtures: pytest finds them here

FIELDS = {
    "": {"at", "state", "stalled_after_seconds", "subscriptions", "store"},
    "subscription": {
        "topic", "name", "mode", "external", "state", "reasons", "lag", "unsettled", "oldest_seconds", "lag_per_second",
        "settled_per_second", "last_progress_at", "consumers", "in_flight", "paused", "halted", "waiting", "dead",
        "blocked_lanes", "upgrades", "lanes",
    },
    "store": {
        "url", "kind", "state", "reasons", "free_bytes", "total_bytes", "members", "faults", "damage", "scheduled",
        "scheduled_overdue_seconds", "staged",
    },
    "lane": {"partition", "key_hash", "offset", "events", "attempts", "error", "due_at"},
    "consumer": {"owner", "process", "here"},
    "member": {"process", "program", "opened_at"},
}  # fmt: skip


def consumed_once(run: Run) -> None:
    """Make the subscription `billing` of three events, of which a consumer has settled one and gone."""
    published(run, *"abc")
    assert run("consume", "orders", "billing", "--max", "1").code == 0
    # Less than three heartbeats is never too long.
    assert run("subscriptions", "set", "orders", "billing", "--heartbeat", "off").code == 0


def health_of(run: Run, *argv: str) -> dict[str, Any]:
    """Return what `penstock health` says of the only subscription."""
    (found,) = json.loads(run("health", "--json", *argv).out)["subscriptions"]
    return dict(found)


# --- health ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["health", "health orders", "top", "top --once", "top orders"])
def test_a_store_or_topic_that_does_not_exist_is_an_error_and_is_not_made(
    command: str, run: Run, tmp_path: Path
) -> None:
    done = run(*command.split())
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: there is no store in penstock-data")
    assert list(tmp_path.iterdir()) == []
    published(run, "a")
    done = run(command.split(maxsplit=1)[0], "order")
    assert (done.code, done.out) == (2, "")
    assert "did you mean 'orders'?" in done.err


def test_it_exits_with_0_while_all_is_well_or_only_waits(run: Run) -> None:
    published(run, "a")
    done = run("health")
    assert (done.code, done.out.splitlines()[0], done.err) == (0, "ok", "")
    consumed_once(run)
    done = run("health")
    assert (done.code, done.out.splitlines()[0]) == (0, "degraded")
    assert "orders billing: nobody consumes it" in done.out


def test_it_exits_with_1_when_something_is_stalled_and_says_what_and_why(run: Run) -> None:
    consumed_once(run)
    done = run("health", "--stalled-after", "0")
    assert (done.code, done.out.splitlines()[0], done.err) == (1, "stalled", "")
    assert re.search(r"^orders +billing +stalled +key_shared +2 ", done.out, re.MULTILINE)
    assert re.search(
        r"^orders billing: orders/0 stands at offset 1 for [0-9.]+ s: nobody has its slot, ", done.out, re.M
    )
    assert run("health", "--stalled-after", "1h").code == 0
    assert run("health", "--stalled-after", "soon").code == 2


def test_how_long_without_an_option_is_a_setting(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    consumed_once(run)
    assert run("health").code == 0
    monkeypatch.setenv("PENSTOCK_DELIVERY__STALLED_SECONDS", "0")
    assert run("health").code == 1


def test_a_topic_that_is_named_is_judged_alone(run: Run) -> None:
    consumed_once(run)
    assert run("publish", "visits", "--create", "x").code == 0
    assert run("health", "--stalled-after", "0").code == 1
    done = run("health", "visits", "--stalled-after", "0", "--json")
    assert (done.code, json.loads(done.out)["subscriptions"]) == (0, [])


def test_it_exits_with_3_when_something_could_not_be_read_and_tells_the_rest(run: Run) -> None:
    published(run, "a needle")
    assert run("subscriptions", "create", "orders", "billing").code == 0
    flip_a_byte(b"a needle")
    done = run("health")
    assert done.code == 3
    assert "orders  billing" in done.out
    assert "corrupt" in done.out.lower() or "damaged" in done.out.lower()


def test_json_is_one_document_with_every_field_and_becomes_health_again(run: Run) -> None:
    halfway(run)
    done = run("health", "--json")
    document = json.loads(done.out)
    assert document.keys() == FIELDS[""]
    assert document["store"].keys() == FIELDS["store"]
    (found,) = document["subscriptions"]
    assert found.keys() == FIELDS["subscription"]
    (lane,) = found["lanes"]
    assert lane.keys() == FIELDS["lane"]
    assert isinstance(msgspec.json.decode(done.out, type=Health).at, datetime)
    assert {"lag": 6, "unsettled": 5, "waiting": 1, "dead": 1, "blocked_lanes": 1}.items() <= found.items()
    assert (lane["offset"], lane["error"], lane["due_at"]) == (2, "", None)


def test_a_query_of_spark_is_shown_and_not_judged(run: Run) -> None:
    external(run)
    done = run("health", "--stalled-after", "0")
    assert done.code == 0
    assert re.search(r"^orders +query +ok +spark +1 ", done.out, re.MULTILINE)


def test_a_key_that_waits_for_an_upgrade_is_named_so_and_no_payload_is_shown(run: Run) -> None:
    published(run, "a secret")
    assert run("subscriptions", "create", "orders", "billing", "--mode", "exclusive").code == 0
    with topic() as (store, info):
        shard = Shard(info.log_id, "billing", 0, 0)
        row = Parked(
            shard=shard,
            offset=0,
            state="waiting",
            lane=-2,
            event=Event(data=b"a secret"),
            due_at=4_000_000_000_000_000,
            attempts=2,
            error_type="FutureVersion",
            error_message="a secret",
        )
        assert store.cursors.commit([Commit(cursors=(Cursor(shard=shard, next_offset=1),), parked=(row,))]) == [None]
    done = run("health")
    assert done.code == 0
    assert "orders billing: upgrade: 1 key waits for a program that knows a newer version of the event" in done.out
    assert (
        "orders billing: key fffffffffffffffe waits at orders/0@0 for 2096-10-02T07:06:40.000000Z, with 1 in all; "
        "failed 2 times: an upgrade"
    ) in done.out
    assert "secret" not in done.out + run("health", "--json").out


def test_a_consumer_in_another_process_is_counted_and_a_killed_one_disappears_at_once(run: Run) -> None:
    published(run, "a")
    with start("consume", "orders", "billing", "--id", "worker-7") as consumer:
        assert consumer.stdout is not None
        assert consumer.stdout.readline()
        document = json.loads(run("health", "--json").out)
        (found,) = document["subscriptions"]
        (owner,) = found["consumers"]
        assert owner.keys() == FIELDS["consumer"]
        assert (owner["owner"], owner["here"]) == ("worker-7", False)
        (member,) = document["store"]["members"]
        assert member.keys() == FIELDS["member"]
        assert member["process"] == consumer.pid
        assert f"({consumer.pid})" in run("health").out
        consumer.kill()
        consumer.wait()
        document = json.loads(run("health", "--json").out)
        assert (document["subscriptions"][0]["consumers"], document["store"]["members"]) == ([], [])


# --- one frame ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [["--once"], []])
def test_without_a_terminal_one_frame_is_printed_with_rates(options: list[str], run: Run) -> None:
    consumed_once(run)
    assert run("publish", "visits", "--create", "x").code == 0
    assert run("subscriptions", "create", "visits", "lake").code == 0
    done = run("top", "--interval", "0.05", *options)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    shown = [line.split() for line in done.out.splitlines()]
    assert ["orders", "1", "0.0", "3", "4.0", "MiB"] in shown
    # The largest lag first.
    names = [line[0] for line in shown if line and "/" in line[0] and line[0] != "T"]
    assert names == ["orders/billing", "visits/lake"]
    assert ["orders/billing", "key_shared", "0", "0.0", "2"] in [line[:5] for line in shown]


def test_one_topic_is_shown_if_it_is_named_and_what_penstock_keeps_is_not_shown(run: Run) -> None:
    consumed_once(run)
    assert run("publish", "visits", "--create", "x").code == 0
    out = run("top", "--once", "--interval", "0.05").out
    assert "visits" in out
    assert "_deliveries" not in out
    assert "visits" not in run("top", "orders", "--once", "--interval", "0.05").out


@pytest.mark.parametrize("interval", ["0", "0.01", "now"])
def test_an_interval_that_would_keep_the_machine_busy_is_refused(interval: str, run: Run) -> None:
    published(run, "a")
    assert run("top", "--interval", interval).code == 2


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (9_999, "9,999"), (10_000, "10.0k"), (999_999, "1000k"), (12_345_678, "12.3M"), (5e12, "5000G")],
)
def test_a_count_has_few_characters(count: float, shown: str) -> None:
    assert shown_count(count) == shown
    assert len(shown) <= 5


def test_a_rate_that_is_not_known_is_a_dash() -> None:
    assert [shown_rate(rate) for rate in (None, 0.0, 3.14, 250.0)] == ["-", "0.0", "3.1", "250"]
    assert [shown_rate(rate, signed=True) for rate in (2.0, -2.0, 0.0)] == ["+2.0", "-2.0", "0.0"]


# --- in a terminal --------------------------------------------------------------------------------

CURSOR_HOME, ALTERNATE, LEFT = "\x1b[H", "\x1b[?1049h", "\x1b[?1049l"


OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal that of its session, so that Ctrl-C reaches it, and becomes the command."""


class Terminal:
    """`penstock top` in a terminal of its own."""

    def __init__(self, ours: int, theirs: int, process: subprocess.Popen[bytes]) -> None:
        self._ours = ours
        self.theirs = theirs
        self.process = process
        self.shown = ""

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, condition: Callable[[str], Any]) -> str:
        """Read until what was shown since the last call fulfils a condition, and return it."""
        while not condition(self.shown):
            assert self.process.poll() is None, f"it has ended: {self.shown!r}"
            if select.select([self._ours], [], [], 0.1)[0]:
                self._read()
        shown, self.shown = self.shown, ""
        return shown

    def frame(self) -> str:
        """Return a whole frame that began after this call, without escape sequences."""
        self.shown = ""
        *_, frame, _ = self.until(lambda shown: shown.count(CURSOR_HOME) >= 3).split(CURSOR_HOME)
        return plain(frame)

    def _read(self) -> None:
        self.shown += os.read(self._ours, 1 << 16).decode()

    def ended(self) -> tuple[int, str]:
        """Return how it ended, and all that it has shown until then."""
        while self.process.poll() is None or select.select([self._ours], [], [], 0)[0]:
            if select.select([self._ours], [], [], 0.05)[0]:
                self._read()
        return self.process.returncode, self.shown


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")


@contextmanager
def on_a_terminal(*argv: str, columns: int = 80, lines: int = 24, **env: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, sys.executable, "-m", "penstock", "top", *argv],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color", **env},
        start_new_session=True,
    )
    try:
        yield Terminal(ours, theirs, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_the_view_is_drawn_again_and_q_ends_it_with_the_terminal_as_it_was(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1") as terminal:
        before = termios.tcgetattr(terminal.theirs)
        terminal.until(lambda shown: ALTERNATE in shown and "orders/billing" in shown)
        published(run, *"x" * 40)
        terminal.until(lambda shown: re.search(r"orders/billing .* 42 ", plain(shown)))
        assert termios.tcgetattr(terminal.theirs)[3] != before[3]  # a key is read without Enter
        terminal.press("q")
        code, shown = terminal.ended()
        assert code == 0
        assert LEFT in shown
        assert "\x1b[?25h" in shown  # the cursor is shown again
        assert termios.tcgetattr(terminal.theirs) == before


def test_rates_are_those_between_two_looks(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1", columns=160) as terminal:
        terminal.until(lambda shown: re.search(r"orders +1 +0\.0 +3 ", plain(shown)))
        published(run, *"x" * 40)
        terminal.until(lambda shown: re.search(r"orders +1 +[1-9][0-9.]+ +43 ", plain(shown)))
        terminal.until(lambda shown: re.search(r"orders +1 +0\.0 +43 ", plain(shown)))
        assert run("consume", "orders", "billing", "--max", "42").code == 0
        shown = terminal.until(lambda shown: re.search(r"orders/billing .* -[1-9][0-9.]* ", plain(shown)))
        assert re.search(r"orders/billing +key_shared +[01] +[1-9][0-9.]* ", plain(shown))  # acks/s
        terminal.until(lambda shown: re.search(r"orders/billing +key_shared +0 +0\.0 +0 +- ", plain(shown)))


def test_p_lets_it_stand_still_and_go_on(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1") as terminal:
        terminal.until(lambda shown: "p: pause" in shown)
        terminal.press("p")
        terminal.until(lambda shown: "paused: p goes on" in shown)
        published(run, *"x" * 40)
        # Any key lets it be drawn anew, with what it has.
        terminal.press("x" * 20)
        assert re.search(r"^orders/billing .* 2 ", terminal.frame(), re.MULTILINE)
        terminal.press("p")
        terminal.until(lambda shown: re.search(r"orders/billing .* 42 ", plain(shown)))


def test_ctrl_c_ends_it_quietly_with_the_terminal_as_it_was(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1") as terminal:
        before = termios.tcgetattr(terminal.theirs)
        terminal.until(lambda shown: "orders/billing" in shown)
        terminal.press("\x03")
        code, shown = terminal.ended()
        assert code == 130
        assert LEFT in shown
        assert "Traceback" not in shown
        assert termios.tcgetattr(terminal.theirs) == before


def test_a_signal_from_elsewhere_ends_it_as_ctrl_c_does(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "5") as terminal:
        terminal.until(lambda shown: "orders/billing" in shown)
        terminal.process.send_signal(signal.SIGINT)
        code, shown = terminal.ended()
        assert (code, LEFT in shown) == (130, True)


def test_a_narrow_window_has_every_column_and_no_line_is_too_long(run: Run) -> None:
    consumed_once(run)
    assert run("subscriptions", "create", "orders", "a-name-that-is-much-longer-than-there-is-room-for").code == 0
    with on_a_terminal("--interval", "0.1", columns=80) as terminal:
        lines = terminal.frame().splitlines()
        assert all(len(line) <= 80 for line in lines)
        (header,) = [line for line in lines if line.startswith("subscription")]
        assert header.split() == ["subscription", "mode", "cons", "acks/s", "lag", "oldest", "dead", "parked", "state"]
        assert any(line.startswith("orders/a-name-that-is") and "…" in line and "degraded" in line for line in lines)
        assert any(line.startswith("orders/billing") and line.rstrip().endswith("degraded") for line in lines)


def test_a_wide_window_says_why_as_well(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1", columns=160) as terminal:
        lines = terminal.frame().splitlines()
        assert all(len(line) <= 160 for line in lines)
        (line,) = [line for line in lines if line.startswith("orders/billing")]
        assert line.rstrip().endswith("nobody consumes it")


def test_what_does_not_fit_is_counted_and_the_largest_lag_stays(run: Run) -> None:
    consumed_once(run)
    for number in range(30):
        assert run("subscriptions", "create", "orders", f"s{number}", "--start", "latest").code == 0
    with on_a_terminal("--interval", "0.1", lines=15) as terminal:
        lines = [line.rstrip() for line in terminal.frame().splitlines()]
        assert len(lines) <= 15
        names = [line.split()[0] for line in lines if line.startswith("orders/")]
        assert names[0] == "orders/billing"
        assert f"and {31 - len(names)} more" in lines


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_honoured(no_color: str, coloured: bool, run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1", NO_COLOR=no_color) as terminal:
        shown = terminal.until(lambda shown: "orders/billing" in shown and shown.count(CURSOR_HOME) > 1)
        assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]m", shown)) is coloured


def test_a_terminal_that_can_do_nothing_gets_one_frame(run: Run) -> None:
    consumed_once(run)
    with on_a_terminal("--interval", "0.1", TERM="dumb") as terminal:
        code, shown = terminal.ended()
        assert code == 0, shown
        assert "orders/billing" in shown
        assert ALTERNATE not in shown
