"""The mark of a handled event is in the transaction of what its handler writes, whatever connection that has."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import Context, copy_context
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.databases import Aiosqlite, Error, driver

from penstock.clock import SystemClock, VirtualClock
from penstock.errors import UsageError
from penstock.inbox import SCHEMA, SQLITE_SCHEMA, TEXT_BYTES_MAX, Once, forget, forget_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SRC = Path(__file__).parent.parent / "src"

has_autocommit = pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has `autocommit` since Python 3.12")


BY_TIME = (
    "CREATE TABLE IF NOT EXISTS penstock_inbox (scope TEXT NOT NULL, source TEXT NOT NULL, id TEXT NOT NULL,"
    " marked_at INTEGER PRIMARY KEY, UNIQUE (scope, source, id))",
)
"""What made the table in SQLite before: such tables are used as they are."""
SCHEMAS = {"portable": SCHEMA, "of SQLite": SQLITE_SCHEMA, "by time": BY_TIME}


def make_table(path: Path, schema: tuple[str, ...]) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for statement in schema:
            connection.execute(statement)


def once(connection: Any, id: str = "e-1", **options: Any) -> Once:
    return Once(connection, **{"scope": "orders/billing", "source": "penstock:orders", "id": id} | options)


def found(path: Path, table: str) -> list[Any]:
    """Return what another connection sees of a table."""
    with closing(sqlite3.connect(path)) as connection:
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        return connection.execute(f"SELECT * FROM {table}").fetchall() if tables != (0,) else []


def marks(path: Path) -> list[str]:
    return sorted(row[2] for row in found(path, "penstock_inbox"))


def effects(path: Path) -> list[str]:
    return [text for (text,) in found(path, "effects")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        connection.execute("CREATE TABLE effects (what TEXT NOT NULL)")
        connection.execute("PRAGMA journal_mode = WAL")  # so that one who reads is not in the way of one who writes
    return tmp_path / "app.db"


# --- connections of every kind ----------------------------------------------------------------

BLOCKING: dict[str, Callable[[Path], Any]] = {
    "sqlite3": sqlite3.connect,
    "sqlite3, IMMEDIATE": lambda path: sqlite3.connect(path, isolation_level="IMMEDIATE"),
    "sqlite3, isolation_level=None": lambda path: sqlite3.connect(path, isolation_level=None),
    **{style: driver(style).Connection for style in ("qmark", "numeric", "named", "format", "pyformat")},
    "format, autocommit": lambda path: driver("format").Connection(path, autocommit=True),
}
AWAITED: dict[str, Callable[[Path], Any]] = {
    "like aiosqlite": Aiosqlite,
    "like psycopg": driver("pyformat").AsyncConnection,
    "like psycopg, autocommit": lambda path: driver("pyformat").AsyncConnection(path, autocommit=True),
}


def _newer(path: Path) -> Any:
    # Through a dictionary, because the type checker looks at it as Python 3.11 does.
    options: dict[str, Any] = {"autocommit": True}
    return sqlite3.connect(path, **options)


@pytest.fixture(params=[*BLOCKING, pytest.param("sqlite3, autocommit=True", marks=has_autocommit)])
def connection(request: pytest.FixtureRequest, path: Path) -> Iterator[Any]:
    made = BLOCKING.get(request.param, _newer)(path)
    yield made
    made.close()


@pytest.fixture(params=AWAITED)
def awaited(request: pytest.FixtureRequest, path: Path) -> Iterator[Any]:
    made = AWAITED[request.param](path)
    yield made
    made.close()


def effect(connection: Any, what: str) -> None:
    connection.execute(f"INSERT INTO effects VALUES ('{what}')")


def fail(connection: Any, **options: Any) -> None:
    """Do something in a block, and raise."""
    with once(connection, **options) as first:
        assert first
        effect(connection, "half of it")
        raise ZeroDivisionError


def is_idle(connection: Any) -> bool:
    if hasattr(connection, "info"):
        return bool(connection.info.transaction_status == 0)
    return not connection.in_transaction


def begin(connection: Any) -> None:
    """Begin a transaction as whoever has such a connection does."""
    if isinstance(connection, sqlite3.Connection) or connection.autocommit:
        connection.execute("BEGIN")


def end(connection: Any, how: str) -> None:
    connection.execute(how)


def test_the_first_is_first_and_no_repeat_is(connection: Any, path: Path) -> None:
    firsts = []
    for _ in range(3):
        with once(connection) as first:
            firsts.append(first)
            if first:
                effect(connection, "billed")
        assert is_idle(connection)
        assert effects(path) == ["billed"]
        assert marks(path) == ["e-1"]
    assert firsts == [True, False, False]


def test_other_events_and_other_scopes_and_sources_are_marked_by_themselves(connection: Any) -> None:
    firsts = []
    for options in ({}, {"id": "e-2"}, {"scope": "orders/mails"}, {"source": "penstock:payments"}):
        with once(connection, **options) as first:
            firsts.append(first)
    assert firsts == [True] * 4


def test_a_block_that_raises_leaves_neither_effect_nor_mark(connection: Any, path: Path) -> None:
    for _ in range(2):  # the second time the table is there
        with pytest.raises(ZeroDivisionError):
            fail(connection)
        assert is_idle(connection)
        assert (effects(path), marks(path)) == ([], [])
        with once(connection, "another"):
            pass
        with closing(sqlite3.connect(path)) as other, other:
            other.execute("DELETE FROM penstock_inbox")


def test_a_statement_that_fails_in_a_block_leaves_nothing_even_if_nobody_lets_it_raise(path: Path) -> None:
    def handle(connection: Any) -> None:
        with once(connection):
            effect(connection, "billed")
            with suppress(Error):
                connection.execute("INSERT INTO nothing VALUES (1)")

    with closing(driver("format").Connection(path)) as connection:
        with pytest.raises(Error, match="aborted"):
            handle(connection)
        assert is_idle(connection)
    assert (effects(path), marks(path)) == ([], [])


def test_in_the_callers_transaction_it_is_the_caller_who_commits(connection: Any, path: Path) -> None:
    begin(connection)
    effect(connection, "before")
    with once(connection) as first:
        assert first
        effect(connection, "billed")
    assert not is_idle(connection)
    assert (effects(path), marks(path)) == ([], [])
    end(connection, "COMMIT")
    assert (effects(path), marks(path)) == (["before", "billed"], ["e-1"])


def test_what_the_caller_rolls_back_leaves_no_mark(connection: Any, path: Path) -> None:
    begin(connection)
    effect(connection, "before")
    with once(connection):
        effect(connection, "billed")
    end(connection, "ROLLBACK")
    assert (effects(path), marks(path)) == ([], [])
    with once(connection) as first:
        assert first


def test_a_block_that_raises_in_the_callers_transaction_undoes_itself_alone(connection: Any, path: Path) -> None:
    begin(connection)
    effect(connection, "before")
    with suppress(ZeroDivisionError):
        fail(connection)
    effect(connection, "after")
    end(connection, "COMMIT")
    assert (effects(path), marks(path)) == (["before", "after"], [])


def test_a_block_in_a_block_is_a_part_of_it(connection: Any, path: Path) -> None:
    with once(connection):
        effect(connection, "billed")
        with once(connection, scope="mails") as first:
            assert first
            effect(connection, "mailed")
        with suppress(ZeroDivisionError):
            fail(connection, scope="printing")
        assert marks(path) == []
    assert effects(path) == ["billed", "mailed"]
    assert sorted(row[0] for row in found(path, "penstock_inbox")) == ["mails", "orders/billing"]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_table_may_be_made_by_migrations_and_twice(connection: Any, path: Path, schema: str) -> None:
    make_table(path, SCHEMAS[schema] * 2)
    for expected in (True, False):
        with once(connection) as first:
            assert first is expected
    assert marks(path) == ["e-1"]


def mark_at_one_moment(connection: Any) -> None:
    clock = VirtualClock()
    for number in range(50):
        for expected in (True, False):
            with once(connection, f"e-{number}", clock=clock) as first:
                assert first is expected


def test_marks_of_the_same_moment_are_different_marks(connection: Any, path: Path) -> None:
    mark_at_one_moment(connection)
    assert len(marks(path)) == 50


def test_marks_of_the_same_moment_are_different_marks_in_a_table_that_is_kept_by_time(path: Path) -> None:
    make_table(path, BY_TIME)
    with closing(sqlite3.connect(path)) as connection:
        mark_at_one_moment(connection)
    assert len(marks(path)) == 50


def test_the_guide_has_the_statements_of_the_table() -> None:
    page = (SRC.parent / "docs" / "guide" / "once.md").read_text()
    blocks = re.findall(r"^```sql\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shown = [
        [re.sub(r"\s+", " ", statement).replace("( ", "(").replace(" )", ")").strip() for statement in block.split(";")]
        for block in blocks
    ]
    assert shown == [[*SQLITE_SCHEMA, ""], [*SCHEMA, ""]]


@has_autocommit
def test_a_connection_that_is_always_in_a_transaction_is_committed_by_the_caller(path: Path) -> None:
    options: dict[str, Any] = {"autocommit": False}
    with closing(sqlite3.connect(path, **options)) as connection:
        with once(connection):
            effect(connection, "billed")
        assert (effects(path), marks(path)) == ([], [])
        connection.commit()
        assert (effects(path), marks(path)) == (["billed"], ["e-1"])
        with once(connection) as first:
            assert not first


# --- asynchronous connections -----------------------------------------------------------------


async def effect_async(connection: Any, what: str) -> None:
    await connection.execute(f"INSERT INTO effects VALUES ('{what}')")


async def test_an_asynchronous_connection_marks_once(awaited: Any, path: Path) -> None:
    firsts = []
    for _ in range(2):
        async with once(awaited) as first:
            firsts.append(first)
            if first:
                await effect_async(awaited, "billed")
        assert is_idle(awaited)
    assert firsts == [True, False]
    assert (effects(path), marks(path)) == (["billed"], ["e-1"])


async def test_an_asynchronous_block_that_raises_or_is_cancelled_leaves_neither(awaited: Any, path: Path) -> None:
    async def fail() -> None:
        async with once(awaited):
            await effect_async(awaited, "billed")
            raise ZeroDivisionError

    async def hang(inside: asyncio.Event) -> None:
        async with once(awaited):
            await effect_async(awaited, "billed")
            inside.set()
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert is_idle(awaited)
    inside = asyncio.Event()
    task = asyncio.create_task(hang(inside))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_idle(awaited)
    assert (effects(path), marks(path)) == ([], [])


async def test_an_asynchronous_block_in_the_callers_transaction(awaited: Any, path: Path) -> None:
    await awaited.execute("BEGIN") if getattr(awaited, "autocommit", True) else None
    await effect_async(awaited, "before")
    async with once(awaited):
        await effect_async(awaited, "billed")
    assert marks(path) == []
    if getattr(awaited, "autocommit", False):
        await awaited.execute("COMMIT")
    else:
        await awaited.commit()
    assert (effects(path), marks(path)) == (["before", "billed"], ["e-1"])


async def test_handlers_that_share_an_asynchronous_connection_take_turns(awaited: Any, path: Path) -> None:
    entered, go = asyncio.Event(), asyncio.Event()

    async def failing() -> None:
        async with once(awaited, "fails"):
            await effect_async(awaited, "never")
            entered.set()
            await go.wait()
            raise ZeroDivisionError

    async def succeeding(id: str) -> None:
        async with once(awaited, id):
            await effect_async(awaited, id)

    first = asyncio.create_task(failing())
    await entered.wait()
    others = [asyncio.create_task(succeeding(id)) for id in ("a", "b")]
    for _ in range(20):
        await asyncio.sleep(0)
    go.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    # Had they joined the transaction of the first, their effects would be gone with it.
    assert sorted(effects(path)) == ["a", "b"]
    assert marks(path) == ["a", "b"]


async def test_a_task_that_is_started_in_a_block_is_in_it(awaited: Any, path: Path) -> None:
    async def mail() -> None:
        async with once(awaited, scope="mails"):
            await effect_async(awaited, "mailed")

    async with once(awaited):
        await asyncio.create_task(mail())
    assert effects(path) == ["mailed"]


# --- tasks of one block -----------------------------------------------------------------------


async def part(connection: Any, name: str, *, fails: bool = False, turns: int = 3) -> None:
    async with once(connection, name):
        for _ in range(turns):
            await asyncio.sleep(0)
        await effect_async(connection, name)
        if fails:
            raise ZeroDivisionError


async def test_tasks_of_a_block_take_turns_and_one_that_fails_undoes_itself_alone(awaited: Any, path: Path) -> None:
    async with once(awaited):
        parts = [part(awaited, f"part-{i}", fails=i == 1, turns=3 * i) for i in range(4)]
        ended = await asyncio.gather(*parts, return_exceptions=True)
    assert [type(error) for error in ended] == [type(None), ZeroDivisionError, type(None), type(None)]
    assert sorted(effects(path)) == ["part-0", "part-2", "part-3"]
    assert marks(path) == ["e-1", "part-0", "part-2", "part-3"]
    assert is_idle(awaited)


async def test_blocks_of_tasks_three_deep_are_each_undone_with_those_within(awaited: Any, path: Path) -> None:
    async def tree(name: str, depth: int) -> None:
        async with once(awaited, name):
            await effect_async(awaited, name)
            if depth:
                await asyncio.gather(*(tree(name + i, depth - 1) for i in "xyz"), return_exceptions=True)
            if name.endswith("y"):
                raise ZeroDivisionError

    await tree("t", 3)
    kept = [name for name in marks(path) if "y" not in name]
    assert len(kept) == 1 + 2 + 4 + 8
    assert marks(path) == sorted(effects(path)) == kept
    assert is_idle(awaited)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_block_ends_after_those_that_its_tasks_have_begun_or_wait_for(
    awaited: Any, path: Path, fails: bool
) -> None:
    parts: list[asyncio.Task[None]] = []

    async def handle() -> None:
        async with once(awaited):
            parts.extend(asyncio.create_task(part(awaited, name, turns=20)) for name in "abc")
            for _ in range(3):
                await asyncio.sleep(0)
            await effect_async(awaited, "whole")
            if fails:
                raise ZeroDivisionError

    with suppress(ZeroDivisionError):
        await handle()
    assert all(task.done() for task in parts)
    await asyncio.gather(*parts)
    assert sorted(effects(path)) == ([] if fails else ["a", "b", "c", "whole"])
    assert marks(path) == ([] if fails else ["a", "b", "c", "e-1"])
    assert is_idle(awaited)


async def test_a_task_that_begins_one_block_after_the_other_does_not_keep_the_outer_one_from_its_end(
    awaited: Any, path: Path
) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        for number in range(10_000):
            await part(awaited, f"w-{number}")
            if ended.is_set():
                return

    async with asyncio.timeout(30):
        async with once(awaited):
            task = asyncio.create_task(work())
            for _ in range(3):
                await asyncio.sleep(0)
        ended.set()
        await task
    assert sorted(marks(path)) == ["e-1", *sorted(effects(path))]


async def test_a_block_that_is_cancelled_cancels_those_within_it(awaited: Any, path: Path) -> None:
    parts: list[asyncio.Task[None]] = []
    inside = asyncio.Event()

    async def hang(name: str) -> None:
        async with once(awaited, name):
            await effect_async(awaited, name)
            inside.set()
            await asyncio.Event().wait()

    async def handle(how: str) -> None:
        async with once(awaited):
            parts[:] = [asyncio.create_task(hang(name)) for name in "ab"]
            if how == "in it":
                await asyncio.Event().wait()
            await inside.wait()

    for how in ("in it", "at its end"):
        inside.clear()
        task = asyncio.create_task(handle(how))
        await inside.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(30):
            ended = await asyncio.gather(task, *parts, return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
        assert is_idle(awaited)
        assert (effects(path), marks(path)) == ([], [])


async def test_a_task_that_is_cancelled_while_it_waits_for_its_turn_is_in_nobodys_way(awaited: Any, path: Path) -> None:
    async with once(awaited):
        tasks = [asyncio.create_task(part(awaited, name, turns=20)) for name in "abc"]
        for _ in range(5):
            await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [task.cancelled() for task in tasks] == [False, True, False]
    assert marks(path) == ["a", "c", "e-1"]
    assert sorted(effects(path)) == ["a", "c"]


async def test_a_block_within_the_block_of_a_task_is_not_anothers_turn(awaited: Any, path: Path) -> None:
    """The task that opened the outer block waits, too, while one of its tasks is in an inner one."""
    inside, go = asyncio.Event(), asyncio.Event()

    async def other() -> None:
        async with once(awaited, "other"):
            inside.set()
            await go.wait()
            await part(awaited, "within")
            await effect_async(awaited, "other")
            raise ZeroDivisionError

    async with once(awaited):
        task = asyncio.create_task(other())
        await inside.wait()
        go.set()
        await part(awaited, "own")
        with suppress(ZeroDivisionError):
            await task
    assert (effects(path), marks(path)) == (["own"], ["e-1", "own"])


async def test_a_blocking_connection_is_refused_to_two_tasks_of_a_block_at_a_time(connection: Any, path: Path) -> None:
    async def blocking_part(name: str) -> None:
        with once(connection, name):
            await asyncio.sleep(0)
            effect(connection, name)

    with once(connection):
        ended = await asyncio.gather(*map(blocking_part, "abc"), return_exceptions=True)
        await blocking_part("d")
    assert ended[0] is None
    assert [type(error) for error in ended[1:]] == [UsageError] * 2
    assert "of another task of this one" in str(ended[1])
    assert (effects(path), marks(path)) == (["a", "d"], ["a", "d", "e-1"])


@pytest.mark.parametrize("caller", [False, True], ids=["its own transaction", "the caller's"])
def test_a_block_that_ends_before_one_within_it_undoes_both_and_both_say_so(
    connection: Any, path: Path, caller: bool
) -> None:
    if caller:
        begin(connection)
        effect(connection, "before")
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(once(connection, "outer"))
    effect(connection, "outer")
    inner.enter_context(once(connection, "inner"))
    effect(connection, "inner")
    with pytest.raises(UsageError, match="ended before another one within it"):
        outer.close()
    with pytest.raises(UsageError, match="a connection of its own"), copied(once(connection, "another")):
        pass
    with pytest.raises(UsageError, match="ended before another one within it"), once(connection, "deeper"):
        pass
    with pytest.raises(UsageError, match="ended before another one within it"):
        inner.close()
    if caller:
        assert not is_idle(connection)
        end(connection, "COMMIT")
    assert is_idle(connection)
    with once(connection, "after") as first:
        assert first
    assert (effects(path), marks(path)) == (["before"] if caller else [], ["after"])


@contextmanager
def copied(block: Once) -> Iterator[None]:
    """Enter a block as one who is in no other block does."""
    context = Context()
    context.run(block.__enter__)
    try:
        yield
    finally:
        context.run(block.__exit__, None, None, None)


async def test_an_asynchronous_block_does_not_wait_for_one_of_its_own_task(awaited: Any, path: Path) -> None:
    async def values() -> AsyncIterator[int]:
        async with once(awaited, "inner"):
            await effect_async(awaited, "inner")
            yield 1

    generator = values()

    async def handle() -> None:
        async with once(awaited):
            await effect_async(awaited, "outer")
            await anext(generator)

    async with asyncio.timeout(30):
        with pytest.raises(UsageError, match="ended before another one within it"):
            await handle()
        await effect_async(awaited, "stray")
        with pytest.raises(UsageError, match="ended before another one within it"):
            await anext(generator)
    assert is_idle(awaited)
    async with once(awaited, "after"):
        pass
    assert marks(path) == ["after"]
    assert [what for what in effects(path) if what != "stray"] == []


# --- two at the same time ---------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "rolls back"])
def test_of_two_at_the_same_time_the_second_waits_and_is_first_only_if_the_other_failed(
    path: Path, fails: bool
) -> None:
    inside, waits, seen = threading.Event(), threading.Event(), []

    def handle_first() -> None:
        with closing(sqlite3.connect(path)) as connection, suppress(ZeroDivisionError), once(connection) as first:
            seen.append(("one", first))
            effect(connection, "by one")
            inside.set()
            assert waits.wait(30)
            if fails:
                raise ZeroDivisionError

    def handle_second() -> None:
        assert inside.wait(30)
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            connection.set_trace_callback(lambda _statement: waits.set())  # it is told before SQLite waits
            with once(connection) as first:
                seen.append(("two", first))
                if first:
                    effect(connection, "by two")

    threads = [threading.Thread(target=handle) for handle in (handle_first, handle_second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [("one", True), ("two", fails)]
    assert effects(path) == (["by two"] if fails else ["by one"])


def test_of_many_threads_one_is_first(path: Path) -> None:
    seen = []
    barrier = threading.Barrier(8)

    def handle() -> None:
        with closing(sqlite3.connect(path, timeout=60)) as connection:
            barrier.wait()
            with once(connection) as first:
                seen.append(first)
                if first:
                    effect(connection, "billed")

    threads = [threading.Thread(target=handle) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [False] * 7 + [True]
    assert effects(path) == ["billed"]


async def test_asynchronous_connections_wait_for_each_other(path: Path) -> None:
    connections = [Aiosqlite(path) for _ in range(4)]
    seen = []

    async def handle(connection: Any) -> None:
        async with once(connection) as first:
            seen.append(first)
            await asyncio.sleep(0)

    await asyncio.gather(*map(handle, connections))
    for connection in connections:
        connection.close()
    assert sorted(seen) == [False, False, False, True]


def test_whoever_makes_the_table_at_the_same_time_goes_on(path: Path) -> None:
    """As in PostgreSQL, where both find it missing, and the later one's CREATE is refused."""
    with closing(driver("format").Connection(path)) as connection, closing(sqlite3.connect(path)) as other:
        below = connection.below

        def refuse(action: int, _one: Any, _two: Any, _three: Any, _four: Any) -> int:
            return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_CREATE_TABLE else sqlite3.SQLITE_OK

        class Racing(type(connection)):  # type: ignore[misc] # a class made for the test
            raced = False

            def cursor(self) -> Any:
                cursor = super().cursor()
                if self.statements[-1:] == ["ROLLBACK TO SAVEPOINT penstock_once"] and not self.raced:
                    self.raced = True
                    below.execute("ROLLBACK")
                    for statement in SCHEMA:
                        other.execute(statement)
                    below.execute("BEGIN")
                    below.execute("SAVEPOINT penstock_once")
                    below.set_authorizer(refuse)
                return cursor

        connection.__class__ = Racing
        with once(connection) as first:
            assert first
        assert connection.raced
        assert connection.statements.count("ROLLBACK TO SAVEPOINT penstock_once") == 2
        below.set_authorizer(None)
    assert marks(path) == ["e-1"]


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["app.db", Path("app.db"), None, object(), sqlite3, 5, sqlite3.connect])
def test_what_is_no_connection_is_refused_with_what_it_must_have(value: Any) -> None:
    with pytest.raises(UsageError, match=r"DB-API connection.*paramstyle.*in_transaction.*transaction_status"):
        once(value)


def test_a_cursor_is_refused_with_what_to_give(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, pytest.raises(UsageError, match="is a cursor: give the conn"):
        once(connection.cursor())


@pytest.mark.parametrize("lacking", ["paramstyle", "Error"])
def test_a_driver_whose_module_says_too_little_is_refused(
    path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = driver("format")
    monkeypatch.delattr(module, lacking)
    with closing(module.Connection(path)) as connection, pytest.raises(UsageError, match="`paramstyle` and `Error`"):
        once(connection)


def test_a_driver_that_does_not_count_rows_is_refused_and_nothing_is_written(path: Path) -> None:
    class Silent(sqlite3.Cursor):
        rowcount = -1  # as a driver may say

    class Connection(sqlite3.Connection):
        def cursor(self, *_args: Any, **_options: Any) -> Any:
            return super().cursor(Silent)

    with closing(sqlite3.connect(path, factory=Connection)) as connection:
        with pytest.raises(UsageError, match="does not say how many rows"), once(connection):
            pass
        assert is_idle(connection)
    assert marks(path) == []


@pytest.mark.parametrize("scope", ["", "a\0b", 5, b"x"])
def test_a_scope_is_a_text(path: Path, scope: Any) -> None:
    with closing(sqlite3.connect(path)) as connection, pytest.raises(UsageError, match="the scope of a mark"):
        once(connection, scope=scope)


async def test_with_and_async_with_go_with_their_connections(path: Path) -> None:
    with closing(Aiosqlite(path)) as awaited, pytest.raises(UsageError, match="write `async with`"), once(awaited):
        pass
    with closing(sqlite3.connect(path)) as blocking, pytest.raises(UsageError, match="write `with`"):
        async with once(blocking):
            pass


def test_a_block_is_entered_once(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        block = once(connection)
        with block:
            pass
        with pytest.raises(UsageError, match="entered before"), block:
            pass


def test_a_connection_of_another_thread_is_refused_with_what_to_do(path: Path) -> None:
    raised = []

    def handle(connection: sqlite3.Connection) -> None:
        try:
            with once(connection):
                pass
        except UsageError as error:
            raised.append(str(error))

    with closing(sqlite3.connect(path)) as connection:
        thread = threading.Thread(target=handle, args=(connection,))
        thread.start()
        thread.join()
        with once(connection) as first:  # nothing of it is left behind
            assert first
    [message] = raised
    assert "made in another thread" in message
    assert "check_same_thread=False" in message


async def test_a_blocking_connection_that_another_task_is_in_a_block_of_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        inside, go = asyncio.Event(), asyncio.Event()

        async def other() -> None:
            with once(connection, "other"):
                inside.set()
                await go.wait()

        task = asyncio.create_task(other())
        await inside.wait()
        with pytest.raises(UsageError, match="a connection of its own"), once(connection):
            pass
        go.set()
        await task
        with once(connection) as first:
            assert first


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_block_that_ends_the_transaction_itself_is_told_so(connection: Any, how: str, goes_on: bool) -> None:
    def handle() -> None:
        with once(connection):
            end(connection, how)
            if goes_on:  # a further transaction, which is not that of the mark
                begin(connection)
                effect(connection, "stray")

    with pytest.raises(UsageError, match="ended within the block"):
        handle()
    assert is_idle(connection)


def test_what_the_database_refuses_is_raised_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other, closing(sqlite3.connect(path, timeout=0)) as connection:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"), once(connection):
            pass
        other.rollback()
        with once(connection) as first:
            assert first


def test_the_handlers_error_is_raised_even_if_the_rollback_fails(path: Path) -> None:
    broken = False

    class Broken(sqlite3.Connection):
        def cursor(self, *args: Any, **options: Any) -> Any:
            if broken:
                raise sqlite3.OperationalError("the server closed the connection")
            return super().cursor(*args, **options)

    def handle() -> None:
        nonlocal broken
        with once(connection):
            broken = True
            raise ZeroDivisionError

    with closing(sqlite3.connect(path, factory=Broken)) as connection:
        with pytest.raises(ZeroDivisionError) as raised:
            handle()
        assert raised.value.__notes__ == ["the block could not be rolled back (OperationalError): close the connection"]
        connection.rollback()


# --- what handlers do to their connections ----------------------------------------------------


def test_a_row_factory_does_not_matter(path: Path) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a row was fetched")

    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = refuse
        connection.text_factory = refuse
        for expected in (True, False):
            with once(connection) as first:
                assert first is expected
        assert forget(connection, older_than=3600) == 0


def test_very_long_ids_are_told_apart_and_kept_short(connection: Any, path: Path) -> None:
    long = "x" * (TEXT_BYTES_MAX + 1)
    firsts = []
    for id in (long, long + "y", long, "é" * TEXT_BYTES_MAX):
        with once(connection, id) as first:
            firsts.append(first)
    assert firsts == [True, True, False, True]
    assert all(len(id) <= TEXT_BYTES_MAX for id in marks(path))


# --- forgetting -------------------------------------------------------------------------------


def test_where_there_is_no_table_there_is_nothing_to_forget(connection: Any) -> None:
    assert forget(connection, older_than=0) == 0
    assert is_idle(connection)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_old_marks_are_forgotten_so_many_at_a_time_and_no_others(connection: Any, path: Path, schema: str) -> None:
    make_table(path, SCHEMAS[schema])
    clock = VirtualClock()
    for number in range(5):
        with once(connection, f"e-{number}", clock=clock):
            pass
        clock.advance(60)
    assert forget(connection, older_than=timedelta(minutes=5), clock=clock) == 0
    assert forget(connection, older_than=timedelta(minutes=1), most=3, clock=clock) == 3
    assert marks(path) == ["e-3", "e-4"]
    assert forget(connection, older_than=timedelta(minutes=1), most=3, clock=clock) == 1
    assert marks(path) == ["e-4"]
    assert is_idle(connection)
    with once(connection, "e-0", clock=clock) as first:
        assert first


def test_forgetting_in_the_callers_transaction_is_the_callers(connection: Any, path: Path) -> None:
    with once(connection, clock=VirtualClock()):
        pass
    begin(connection)
    effect(connection, "before")
    assert forget(connection, older_than=0) == 1
    assert marks(path) == ["e-1"]
    end(connection, "ROLLBACK")
    assert marks(path) == ["e-1"]


def test_those_who_write_do_not_wait_while_old_marks_are_looked_for(path: Path) -> None:
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other,
    ):
        for number in range(200):
            with once(connection, f"e-{number}", clock=VirtualClock() if number == 199 else SystemClock()):
                pass
        looking, written = False, False

        def write() -> None:
            nonlocal written
            if looking and not written:
                written = True
                effect(other, "meanwhile")

        def look(statement: str) -> None:
            nonlocal looking
            looking = looking or "marked_at <" in statement

        connection.set_trace_callback(look)
        connection.set_progress_handler(write, 500)  # all rows are looked at for the old one, in more steps than that
        assert forget(connection, older_than=3600) == 1
        assert written
    assert effects(path) == ["meanwhile"]


def test_a_mark_that_was_made_anew_while_old_ones_were_looked_for_stays(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, closing(sqlite3.connect(path)) as other:
        with once(connection, clock=VirtualClock()):
            pass

        def mark_anew(statement: str) -> None:
            if statement.startswith("SAVEPOINT"):
                with other:
                    other.execute("DELETE FROM penstock_inbox")
                with once(other):
                    pass

        connection.set_trace_callback(mark_anew)
        assert forget(connection, older_than=3600) == 0
    assert marks(path) == ["e-1"]


def test_what_could_not_be_forgotten_is_the_next_time(path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=0)) as connection, closing(sqlite3.connect(path)) as other:
        for id in ("e-1", "e-2"):
            with once(connection, id, clock=VirtualClock()):
                pass
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            forget(connection, older_than=3600, most=1)
        other.rollback()
        assert [forget(connection, older_than=3600, most=1) for _ in range(3)] == [1, 1, 0]
        assert connection.execute("SELECT COUNT(*) FROM temp.sqlite_master").fetchone() == (0,)


async def test_marks_are_forgotten_with_an_asynchronous_connection(awaited: Any, path: Path) -> None:
    assert await forget_async(awaited, older_than=0) == 0
    async with once(awaited, clock=VirtualClock()):
        pass
    assert await forget_async(awaited, older_than=0) == 1
    assert marks(path) == []


@pytest.mark.parametrize("options", [{"older_than": -1}, {"older_than": "1 day"}, {"older_than": 1, "most": 0}])
def test_what_is_to_be_forgotten_is_said_rightly(path: Path, options: Any) -> None:
    with closing(sqlite3.connect(path)) as connection, pytest.raises(UsageError):
        forget(connection, **options)


# --- killed at every step ---------------------------------------------------------------------

HANDLER = """
    import os, signal, sqlite3, sys
    from penstock.inbox import Once

    path, last, joins = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "joins"
    connection = sqlite3.connect(path, isolation_level=None)
    steps = 0

    def step(statement):
        global steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)

    connection.set_trace_callback(step)
    if joins:
        connection.execute("BEGIN IMMEDIATE")
    with Once(connection, scope="orders/billing", source="penstock:orders", id="e-1") as first:
        if first:
            connection.execute("INSERT INTO effects VALUES ('one half')")
            connection.execute("INSERT INTO effects VALUES ('other half')")
    if joins:
        connection.execute("COMMIT")
    step("after the commit, before the ack")
    print(steps, "steps")
"""


@pytest.mark.parametrize("whose", ["begins", "joins"])
def test_killed_at_any_step_there_is_all_of_the_effect_with_the_mark_or_nothing(path: Path, whose: str) -> None:
    """A process is killed before each statement of its transaction, and after the last; then the event comes again."""

    def handle(last: int) -> int:
        command = [sys.executable, "-c", textwrap.dedent(HANDLER), str(path), str(last), whose]
        environment = os.environ | {"PYTHONPATH": str(SRC)}
        return subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL).returncode

    outcomes = []
    for last in count(1):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("DELETE FROM effects")
            connection.execute("DROP TABLE IF EXISTS penstock_inbox")
        code = handle(last)
        state = (effects(path), marks(path))
        assert state in (([], []), (["one half", "other half"], ["e-1"])), f"killed at step {last}"
        outcomes.append(bool(state[1]))
        assert handle(0) == 0
        assert (effects(path), marks(path)) == (["one half", "other half"], ["e-1"])
        if code == 0:
            break
        assert code == -signal.SIGKILL
    # Nothing before the commit is there, everything after it is; the last one was not killed at all.
    assert outcomes == [False] * (len(outcomes) - 2) + [True, True]
    assert len(outcomes) > 8


@pytest.mark.parametrize("table", [False, True], ids=["the table is missing", "the table is there"])
def test_an_interrupt_while_it_is_marked_leaves_no_transaction_behind(path: Path, table: bool) -> None:
    class Interrupted(VirtualClock):
        def time_us(self) -> int:
            raise KeyboardInterrupt

    with closing(sqlite3.connect(path)) as connection:
        if table:
            make_table(path, SQLITE_SCHEMA)
        with pytest.raises(KeyboardInterrupt), once(connection, clock=Interrupted()):
            pass
        assert not connection.in_transaction
        with once(connection) as first:
            assert first
    assert marks(path) == ["e-1"]


def test_blocks_that_end_in_another_order_than_they_began_leave_nothing_behind(tmp_path: Path) -> None:
    class Connection(sqlite3.Connection):
        """One that may be referred to weakly."""

    def use() -> list[weakref.ref[Connection]]:
        made = [sqlite3.connect(tmp_path / name, factory=Connection) for name in ("one.db", "two.db")]
        one, two = ExitStack(), ExitStack()
        assert one.enter_context(once(made[0]))
        assert two.enter_context(once(made[1]))
        one.close()
        with once(made[0], "e-2") as first:
            assert first
        two.close()
        for connection in made:
            with once(connection) as first:
                assert not first
            connection.close()
        return [weakref.ref(connection) for connection in made]

    assert [left() for left in use()] == [None, None]


def test_a_block_leaves_the_context_as_it_was() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        before = copy_context()
        for id in ("1", "2", "2"):
            with Once(connection, "s", "source", id), Once(connection, "t", "source", id):
                assert copy_context() != before
            assert copy_context() == before
