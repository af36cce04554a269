"""Projections where the bus runs: every event is folded once, in its order, whatever happens; a failure has a place."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.projected import (
    Account,
    Left,
    Sold,
    accounted,
    accounts_of,
    by_a_loop,
    caught_up,
    heads,
    publish,
    run_embedded,
    sales,
    some_events,
    states_of,
    until,
)

from penstock import Bus, Topic
from penstock.bus.folding import Fold, StateForm
from penstock.bus.states import Place, States, Writer
from penstock.errors import DataLost, InvalidName, ProjectionFailed, UsageError
from penstock.offsets import Position
from penstock.testing import harness


def fold_of(function: Any, key: Any = None) -> Fold:
    form = StateForm.of(get_type_hints(function)["state"], "the test")
    return Fold("tested", "sales", function, key, form)


def where(number: int) -> Position:
    return Position("sales", 0, number)


# --- declaring --------------------------------------------------------------------------------


async def waits(state: int | None, event: Sold | Left) -> int | None:
    return state


def takes_one(state: int | None) -> int | None:
    return state


def takes_others(state: int | None, event: Account) -> int | None:
    return state


def takes_some(state: int | None, event: Sold) -> int | None:
    return (state or 0) + event.cents


class Plain:
    """No dataclass, and nothing else that could be written."""


def has_plain_state(state: Plain | None, event: Sold | Left) -> Plain | None:
    return state


def has_no_state(state: None, event: Sold | Left) -> None:
    return state


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (waits, "without `async`"),
        (takes_one, "takes 1 parameters"),
        (takes_others, "takes Account, and topic 'sales' has Sold, Left"),
        (takes_some, "takes no Left, which topic 'sales' has, too"),
        (has_plain_state, "Plain is not a dataclass"),
        (has_no_state, "no state but None"),
        (7, "is a function of a state and an event"),
    ],
)
def test_a_function_that_is_no_projection_is_refused_where_it_is_declared(function: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Bus("memory:", topics=[sales]).projection(sales, "accounts")(function)


@pytest.mark.parametrize("options", [{"version": 0}, {"version": True}, {"key": "customer"}])
def test_options_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="it must be"):
        accounts_of(Bus("memory:", topics=[sales]), **options)


@pytest.mark.parametrize("name", ["", "Sales", "../sales", "sales.v2", "x" * 101])
def test_a_name_that_could_be_mistaken_is_refused(name: str) -> None:
    with pytest.raises((InvalidName, UsageError)):
        Bus("memory:", topics=[sales]).projection(sales, name)(accounted)


def test_a_name_is_declared_once() -> None:
    bus = Bus("memory:", topics=[sales])
    accounts_of(bus)
    with pytest.raises(UsageError, match="declared twice"):
        accounts_of(bus)


def test_a_projection_is_still_the_function() -> None:
    accounts = accounts_of(Bus("memory:", topics=[sales]))
    assert accounts(None, Sold("ada", 3)) == Account(3, 3, "3,")
    assert accounts(Account(3), Left("ada")) is None
    assert accounts.__wrapped__ is accounted  # type: ignore[attr-defined] # as functools leaves it


# --- folding ----------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.builds(Sold, st.sampled_from("abc"), st.integers(-(2**40), 2**40)), st.builds(Left, st.sampled_from("abc"))
    ),
    max_size=30,
)


@given(EVENTS, st.lists(st.integers(0, 30)))
def test_where_events_are_divided_makes_no_difference(events: list[Sold | Left], cuts: list[int]) -> None:
    accounts = accounts_of(Bus("memory:", topics=[sales])).fold

    def folded(cuts: list[int]) -> dict[str, bytes]:
        states: dict[str, bytes] = {}
        edges = sorted({0, len(events), *(cut % (len(events) + 1) for cut in cuts)})
        for start, stop in pairwise(edges):
            some = events[start:stop]
            for key, change in accounts.fold(states, [event.customer for event in some], some, where).items():
                if change.encoded is None:
                    del states[key]
                else:
                    states[key] = change.encoded
        return states

    assert folded(cuts) == folded([])
    assert {key: accounts.state.decode(state) for key, state in folded(cuts).items()} == by_a_loop(events)


def test_a_state_that_did_not_change_is_not_written_again() -> None:
    def same(state: int | None, event: Sold) -> int | None:
        return 7

    assert fold_of(same).fold({"a": b"7"}, ["a"], [Sold("a", 1)], where) == {}


@pytest.mark.parametrize(
    ("annotation", "state"),
    [
        (int, 2**62),
        (float, 0.1),
        (str, "né"),
        (dict[str, int], {"b": 1, "a": 2}),
        (list[int], [1, 2]),
        (Decimal, Decimal("1.10")),
        (Account, Account(1, 2.5, "x")),
        (Account | int, 3),
        (Any, {"anything": [1, None]}),
    ],
)
def test_states_of_every_kind_come_back_as_they_were(annotation: Any, state: Any) -> None:
    form = StateForm.of(annotation | None, "the test") if annotation is not Any else StateForm.of(Any, "the test")
    assert form.decode(form.encode(state)) == state


def raises(state: int | None, event: Sold) -> int | None:
    if event.cents == 2:
        raise KeyError("nobody")
    return event.cents


def returns_nonsense(state: int | None, event: Sold) -> Any:
    return "two" if event.cents == 2 else event.cents


@dataclass
class Wrong:
    cents: int


def returns_a_wrong_field(state: Wrong | None, event: Sold) -> Wrong | None:
    return Wrong("two" if event.cents == 2 else event.cents)  # type: ignore[arg-type] # that is what is tried


def returns_nothing_json_has(state: float | None, event: Sold) -> float | None:
    return float("nan") if event.cents == 2 else event.cents


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (raises, "its function: KeyError 'nobody'"),
        (returns_nonsense, "its function: it returned str, not int or None"),
        (returns_a_wrong_field, "its state: Wrong cannot be read from json"),
        (returns_nothing_json_has, "its state: float cannot be written as json"),
    ],
)
def test_a_function_that_fails_is_told_with_the_position_of_its_event(function: Any, says: str) -> None:
    events = [Sold(customer, cents) for customer, cents in [("a", 1), ("b", 3), ("a", 2), ("b", 4)]]
    with pytest.raises(ProjectionFailed) as caught:
        fold_of(function).fold({}, [event.customer for event in events], events, where)
    assert caught.value.position == "sales/0@2"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "the event has none"),
        (b"\xff", "it is no UTF-8"),
        (7, "it is int, and must be str or bytes"),
        ("\ud800", "surrogates not allowed"),
        ("x" * 2_000, "1 to 1,024 bytes"),
        ("", "1 to 1,024 bytes"),
    ],
)
def test_a_key_that_is_none_is_told_with_its_position(key: Any, says: str) -> None:
    with pytest.raises(ProjectionFailed, match=says) as caught:
        fold_of(raises, lambda event: "fine" if event == 0 else key).keys([0, 1], (), where)
    assert caught.value.position == "sales/0@1"
    if not isinstance(key, int | str):
        with pytest.raises(ProjectionFailed, match=says):
            fold_of(raises).keys((), [b"fine", key], where)


# --- states and positions -----------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def states(request: pytest.FixtureRequest, tmp_path: Path) -> States:
    return States(tmp_path / "states.db" if request.param == "file" else None)


PLACE = Place("accounts", 1, "sales", "log-1")


def add(writer: Writer, position: int | None, following: int, cents: int) -> int | None:
    fold = accounts_of(Bus("memory:", topics=[sales])).fold
    return writer.write(
        0, position, following, ["ada"], lambda before: fold.fold(before, ["ada"], [Sold("ada", cents)], where)
    )


def test_whoever_is_not_where_the_states_are_writes_nothing(states: States) -> None:
    first, zombie = Writer(states, PLACE), Writer(states, PLACE)
    assert add(first, None, 1, 10) == 1
    assert add(zombie, None, 1, 10) == 1  # is told where they are
    assert add(first, 1, 2, 5) == 2
    assert add(zombie, 1, 2, 5) == 2
    assert states_of(states) == {"ada": b'{"cents":15,"first":10.0,"last":"10,5,"}'}


def test_states_and_position_are_written_together_or_not_at_all(states: States) -> None:
    writer = Writer(states, PLACE)
    add(writer, None, 1, 10)

    class Broken(Exception):
        pass

    def broken(_before: object) -> Any:
        raise Broken

    with pytest.raises(Broken):
        writer.write(0, 1, 2, ["ada"], broken)
    assert writer.position(0) == 1
    assert add(writer, 1, 2, 5) == 2  # and nothing is locked


def test_a_topic_that_was_made_anew_is_not_taken_for_the_old_one(states: States) -> None:
    add(Writer(states, PLACE), None, 1, 10)
    with pytest.raises(DataLost, match="version=2"):
        Writer(states, PLACE._replace(log_id="log-2")).position(0)
    with pytest.raises(UsageError, match="version=2"):
        Writer(states, PLACE._replace(topic="others")).position(0)
    assert Writer(states, PLACE._replace(version=2)).position(0) is None


def test_states_can_be_asked_for_in_sql(tmp_path: Path) -> None:
    states = States(tmp_path / "states.db")
    add(Writer(states, PLACE), None, 1, 10)
    rows = sqlite3.connect(tmp_path / "states.db").execute(
        "select key, state ->> '$.cents' from projection_accounts where key = 'ada'"
    )
    assert rows.fetchall() == [("ada", 10)]
    assert (tmp_path / "states.db").stat().st_mode & 0o777 == 0o600


# --- running ------------------------------------------------------------------------------------


def test_a_projection_folds_what_there_is_and_goes_on_where_it_was(root: Path) -> None:
    url, events = f"file:{root}", some_events(500)
    publish(url, events)
    assert run_embedded(url) == by_a_loop(events)
    more = some_events(300, first=500)
    publish(url, more)
    assert run_embedded(url) == by_a_loop([*events, *more])


async def test_a_store_in_memory_keeps_states_in_memory() -> None:
    bus = Bus("memory:", topics=[sales])
    accounts = accounts_of(bus)
    assert accounts.get("customer-1") is None
    async with bus:
        await bus.publish_batch(sales, some_events(100))
        await until(lambda: sum(accounts.positions().values()) == 100)
        assert dict(accounts.items()) == by_a_loop(some_events(100))
        assert accounts.get("customer-1") == by_a_loop(some_events(100))["customer-1"]
        assert accounts.get("nobody") is None


def test_states_may_be_in_the_application_s_own_file(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.db"
    with sqlite3.connect(mine) as connection:
        connection.execute("create table customers (name text)")
    publish(f"file:{root}", some_events(10))

    async def run() -> None:
        bus = Bus(f"file:{root}", topics=[sales], projections=mine)
        accounts = accounts_of(bus)
        async with bus:
            await caught_up(accounts, heads(f"file:{root}"))

    asyncio.run(run())
    assert not (root / "projections.db").exists()
    connection = sqlite3.connect(mine)
    assert connection.execute("pragma journal_mode").fetchone() == ("delete",)  # as its owner has it
    assert connection.execute("select count(*) from projection_accounts").fetchone() == (
        len(by_a_loop(some_events(10))),
    )


def test_states_that_were_removed_are_made_again_from_the_log(root: Path) -> None:
    url, events = f"file:{root}", some_events(200)
    publish(url, events)
    assert run_embedded(url) == by_a_loop(events)
    for file in root.glob("projections.db*"):
        file.unlink()
    assert run_embedded(url) == by_a_loop(events)  # though the subscription has acknowledged everything


def test_another_version_begins_anew_beside_the_first(root: Path) -> None:
    url, events = f"file:{root}", some_events(50)
    publish(url, events)
    first = run_embedded(url)
    assert run_embedded(url, version=2) == first
    states = States(root / "projections.db")
    assert [(each.name, each.version) for each in states.listed()] == [("accounts", 1), ("accounts", 2)]
    assert states_of(states) == states_of(states, version=2)


def test_what_expires_before_it_is_delivered_has_happened_all_the_same(root: Path) -> None:
    short = Topic("short", Sold, key=lambda sold: sold.customer, ttl=1e-6)

    async def run() -> None:
        bus = Bus(f"file:{root}", topics=[short])

        @bus.projection(short, "sum")
        def total(state: int | None, sold: Sold) -> int | None:
            return (state or 0) + sold.cents

        await bus.open()
        await bus.publish_batch(short, [Sold("ada", 1), Sold("ada", 2)])
        async with bus:
            await until(lambda: total.positions() == {0: 2})
        assert total.get("ada") == 3

    asyncio.run(run())


def test_events_of_other_classes_are_left_out_if_that_is_meant(root: Path) -> None:
    url, events = f"file:{root}", some_events(100)
    publish(url, events)

    async def run() -> dict[str, int]:
        bus = Bus(url, topics=[sales])
        turnover = bus.projection(sales, "turnover", key=lambda _: "all", ignore_others=True)(takes_some)
        async with bus:
            await caught_up(turnover, heads(url))
        return dict(turnover.items())

    assert asyncio.run(run()) == {"all": sum(event.cents for event in events if isinstance(event, Sold))}


def test_a_projection_that_cannot_go_on_ends_the_bus_and_a_mended_one_misses_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, events = f"file:{root}", some_events(300)
    publish(url, events)

    def broken(state: Account | None, event: Sold | Left) -> Account | None:
        if isinstance(event, Sold) and event.cents == 150:
            raise ValueError("it is the 150th")
        return accounted(state, event)

    async def run() -> None:
        bus = Bus(url, topics=[sales])
        bus.projection(sales, "accounts")(broken)
        await bus.run()

    with caplog.at_level(logging.ERROR), pytest.raises(ProjectionFailed, match="its function: ValueError") as caught:
        asyncio.run(run())
    assert "can go on no more" in caplog.text
    position = Position.parse(caught.value.position)
    assert position.topic == "sales"
    assert run_embedded(url) == by_a_loop(events)


def test_one_that_is_for_spark_alone_does_not_run_here() -> None:
    bus = Bus("memory:", topics=[sales])
    accounts_of(bus, embedded=False)
    with pytest.raises(UsageError, match="nothing to run"):
        asyncio.run(bus.run())


@pytest.mark.parametrize("chaos", [None, 3, 11])
async def test_in_a_world_of_a_test_states_are_in_memory_and_outlive_its_crashes(root: Path, chaos: int | None) -> None:
    bus = Bus(f"file:{root}", topics=[sales])
    accounts = accounts_of(bus)
    events = some_events(60)
    async with harness(bus, chaos=chaos) as world:
        for start in range(0, 60, 20):
            for event in events[start : start + 20]:
                await bus.publish(sales, event)
            await world.crash()
        await world.drain()
        await world.advance(5)
        assert dict(accounts.items()) == by_a_loop(events)
    assert not os.path.exists(root)  # noqa: PTH110, ASYNC240 - nothing runs beside


KILLED = """
    import asyncio, os, signal, sys
    from penstock import Bus
    from penstock.bus import projecting
    from tests.projected import accounts_of, sales

    kept, left = projecting.Projecting._acknowledge, int(sys.argv[2])

    async def acknowledge(self, batch):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)  # after the commit, before the subscription knows
        await kept(self, batch)

    async def look(self):
        pass  # what is brought is all there is, so that it is known how often is written

    projecting.Projecting._acknowledge = acknowledge
    projecting.Projecting._look = look
    projecting.BATCH_EVENTS = 20
    bus = Bus(sys.argv[1], topics=[sales])
    accounts_of(bus)
    asyncio.run(bus.run())
"""


def test_a_process_killed_between_writing_and_acknowledging_folds_nothing_twice(root: Path) -> None:
    url, events = f"file:{root}", some_events(300)
    publish(url, events)
    for times in (0, 2, 3):
        done = subprocess.run(
            [sys.executable, "-c", dedent(KILLED), url, str(times)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=60,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        written = States(root / "projections.db").listed()[0].positions
        assert 0 < sum(written.values()) < len(events)
    assert run_embedded(url) == by_a_loop(events)


# --- looking from the command line --------------------------------------------------------------


def test_states_are_shown_without_the_application(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.cli import main

    publish(f"file:{root}", some_events(50))
    accounts = run_embedded(f"file:{root}")
    url = ["--url", f"file:{root}", "projection"]
    assert main([*url, "ls", "--json"]) == 0
    (listed,) = msgspec.json.decode(capsys.readouterr().out)
    assert (listed["projection"], listed["keys"], sum(listed["positions"].values())) == ("accounts", 7, 50)
    assert main([*url, "show", "accounts", "--key", "customer-1", "--json"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert shown["state"] == msgspec.to_builtins(accounts["customer-1"])
    assert main([*url, "show", "accounts", "--limit", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("customer-0  {")
    assert main([*url, "show", "acounts", "--key", "x"]) == 2
    assert "did you mean 'accounts'" in capsys.readouterr().err
    assert main([*url, "show", "accounts", "--key", "nobody"]) == 1
    assert "no state for this key" in capsys.readouterr().err
