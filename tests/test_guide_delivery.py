"""What the guide says of delivery is what the code does: its table of states, its examples, its defaults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.bus.consumer import BATCH_BYTES_MAX, BATCH_EVENTS_MAX
from penstock.bus.deliveries import Retry
from penstock.engine.policy import HEARTBEATS, SHORT_DELAY_SECONDS, Policy
from penstock.engine.shard import UNWRITTEN_EVENTS_MAX
from penstock.engine.states import TRANSITIONS, Outcome, State
from penstock.engine.suspects import GROUP
from penstock.offsets import Bitmap
from penstock.runtime.monitor import MonitorCounts
from penstock.settings import Settings

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
PAGE = (GUIDE / "delivery.md").read_text()
ROLLOUT = (GUIDE / "rollout.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def rows_below(header: str, page: str = PAGE) -> list[list[str]]:
    """Return the cells of the one table with this header."""
    (_, table) = page.split(f"{header}\n")
    rows = []
    for line in table.splitlines()[1:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def transitions_of_the_guide() -> list[tuple[str, str, str]]:
    return [(before, event, after) for before, event, after in rows_below("| from | what happens | to |")]


def run(code: str, directory: Path) -> str:
    (directory / "program.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the table of states ----------------------------------------------------------------------


def test_the_table_of_the_guide_is_the_table_of_the_engine() -> None:
    drawn = {(before, event): after for before, event, after in transitions_of_the_guide()}
    assert drawn == {(str(before), event): str(after) for (before, event), after in TRANSITIONS.items()}


def test_the_table_is_a_machine_every_state_of_which_is_reached_and_left() -> None:
    drawn = transitions_of_the_guide()
    assert len({(before, event) for before, event, _ in drawn}) == len(drawn)
    assert {before for before, _, _ in drawn} == set(map(str, State))
    assert {after for _, _, after in drawn} == set(map(str, State)) - {"ahead"}


def test_the_guide_explains_every_state_and_every_outcome() -> None:
    for state in State:
        assert f"*{state.capitalize()}*" in PAGE
    for outcome in Outcome:
        assert f"`{outcome}`" in PAGE or outcome is Outcome.PARKED


# --- programs ---------------------------------------------------------------------------------


def test_the_first_consumer_prints_what_the_guide_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert run(PROGRAMS[0], tmp_path) == shown


@pytest.mark.parametrize("number", range(1, len(PROGRAMS)))
def test_a_program_of_the_guide_runs_in_memory(number: int, tmp_path: Path) -> None:
    code = PROGRAMS[number]
    assert "memory:" in code or "MemoryStore" in code
    run(code, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


# --- numbers ----------------------------------------------------------------------------------


def test_the_heartbeats_of_the_guide_are_the_profiles() -> None:
    drawn = {name.strip('`"'): seconds for name, seconds in rows_below("| heartbeat | seconds |")}
    for name, seconds in HEARTBEATS.items():
        assert drawn.pop(name) == f"{seconds:g}"
    assert drawn.pop("off").startswith("never")
    assert list(drawn.values()) == ["0.01 to 3600"]


def test_the_defaults_of_the_guide_are_those_of_the_policy() -> None:
    defaults = {row[0]: row[1] for row in rows_below("| option | default | what it says |")}
    policy, retry = Policy(), Retry()
    assert (retry.max_retries, retry.delay, retry.max_delay, retry.jitter) == (
        policy.max_retries,
        policy.backoff_seconds,
        policy.backoff_seconds_max,
        policy.jitter,
    )
    wanted = f"{policy.max_retries}, {policy.backoff_seconds:g} s, {policy.backoff_seconds_max:g} s, {policy.jitter:g}"
    assert defaults["`retry=Retry(max_retries, delay, max_delay, jitter)`"] == wanted
    assert defaults["`exhausted`"] == f'`"{policy.exhausted}"`'
    assert defaults["`timeout`"] == "none"
    assert policy.timeout_seconds is None
    assert defaults["`window`, `window_bytes`"] == f"{policy.window_events:,}, {policy.window_bytes >> 20} MiB"
    assert defaults["`rate`"] == "none"
    assert policy.rate_per_second is None
    assert policy.heartbeat_seconds == HEARTBEATS[defaults["`heartbeat`"].strip('`"')]
    assert defaults["`checkpoint`"] == '`"each"`'
    assert (policy.checkpoint_events, policy.checkpoint_seconds) == (1, 0.0)


def test_the_limits_of_the_guide_are_those_of_the_code() -> None:
    flat = " ".join(PAGE.split())
    assert SHORT_DELAY_SECONDS == 5
    assert "in five seconds or less waits in memory" in flat
    assert f"groups of {GROUP}," in flat
    assert f"{Policy().parked_max:,} events of a partition wait aside" in flat
    assert f"at most {1 << 19:,} events" in flat
    assert f"at most {Bitmap.LIMIT:,} offsets behind" in flat
    assert f"at most {UNWRITTEN_EVENTS_MAX:,} settled events gather" in flat
    assert f"at most {BATCH_EVENTS_MAX:,} events and {BATCH_BYTES_MAX >> 20} MiB" in flat
    assert f"{Settings().delivery.lease_seconds:g} s ([`delivery.lease_seconds`]" in flat


def test_the_page_on_rolling_out_names_every_count() -> None:
    for name in MonitorCounts.__dataclass_fields__:
        if name != "passes":
            assert f"`penstock_{name}`" in ROLLOUT
