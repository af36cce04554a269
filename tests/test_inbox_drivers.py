"""`once` through real drivers: psycopg on a real PostgreSQL, and aiosqlite. What stand-ins of `databases` cannot tell.

Who waits for whom, what a database does when a connection dies, and what it says while it refuses, is its own doing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from contextlib import asynccontextmanager, closing, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiosqlite
import psycopg
import pytest
from psycopg.rows import dict_row

from penstock import Bus, Delivery, Retry, Topic
from penstock.clock import VirtualClock
from penstock.errors import UsageError
from penstock.inbox import SCHEMA, TEXT_BYTES_MAX, Once, forget, forget_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

SRC = Path(__file__).parent.parent / "src"
_schemas = count()


def once(connection: Any, id: str = "e-1", **options: Any) -> Once:
    return Once(connection, **{"scope": "orders/billing", "source": "penstock:orders", "id": id} | options)


# --- PostgreSQL -------------------------------------------------------------------------------


class Postgres:
    """A schema of a server, as if it were a database."""

    def __init__(self, server: str) -> None:
        name = f"s{next(_schemas)}"
        self.dsn = f"{server}&options=-c%20search_path%3D{name}"
        self._look = psycopg.connect(self.dsn, autocommit=True)
        self._look.execute(f"CREATE SCHEMA {name}")
        self._look.execute("CREATE TABLE effects (number SERIAL, what TEXT NOT NULL)")

    def close(self) -> None:
        self._look.close()

    def ask(self, statement: str, *values: Any) -> list[Any]:
        return self._look.execute(statement, values).fetchall()

    @property
    def effects(self) -> list[str]:
        return [what for (what,) in self.ask("SELECT what FROM effects ORDER BY number")]

    @property
    def marks(self) -> list[str]:
        [there] = self.ask("SELECT to_regclass('penstock_inbox') IS NOT NULL")
        return [id for (id,) in self.ask("SELECT id FROM penstock_inbox ORDER BY id")] if there[0] else []

    def wait_until_one_waits(self, connection: Any) -> None:
        """Return when a connection waits for the lock of another one."""
        pid = connection.info.backend_pid
        while self.ask("SELECT wait_event_type FROM pg_stat_activity WHERE pid = %s", pid) != [("Lock",)]:
            pass


@pytest.fixture
def postgres(postgres_server: str) -> Iterator[Postgres]:
    with closing(Postgres(postgres_server)) as found:
        yield found


BLOCKING: dict[str, dict[str, Any]] = {
    "psycopg": {},
    "psycopg, autocommit": {"autocommit": True},
    "psycopg, rows as dictionaries": {"row_factory": dict_row},
}


@pytest.fixture(params=BLOCKING)
def connection(request: pytest.FixtureRequest, postgres: Postgres) -> Iterator[Any]:
    with closing(psycopg.connect(postgres.dsn, **BLOCKING[request.param])) as made:
        yield made


def effect(connection: Any, what: str) -> None:
    connection.execute("INSERT INTO effects (what) VALUES (%s)", (what,))


def is_idle(connection: Any) -> bool:
    return bool(connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE)


def test_the_first_is_first_and_no_repeat_is(connection: Any, postgres: Postgres) -> None:
    firsts = []
    for _ in range(3):
        with once(connection) as first:
            firsts.append(first)
            if first:
                effect(connection, "billed")
        assert is_idle(connection)
        assert (postgres.effects, postgres.marks) == (["billed"], ["e-1"])
    assert firsts == [True, False, False]


def test_a_block_that_raises_leaves_neither_effect_nor_mark(connection: Any, postgres: Postgres) -> None:
    def handle() -> None:
        with once(connection):
            effect(connection, "half of it")
            raise ZeroDivisionError

    for _ in range(2):  # the first time the table is missing, and is not left behind either
        with pytest.raises(ZeroDivisionError):
            handle()
        assert is_idle(connection)
        assert (postgres.effects, postgres.marks) == ([], [])
    with once(connection) as first:
        assert first


def test_a_statement_that_fails_undoes_the_block_even_if_nobody_lets_it_raise(
    connection: Any, postgres: Postgres
) -> None:
    def handle() -> None:
        with once(connection):
            effect(connection, "billed")
            with suppress(psycopg.Error):
                connection.execute("INSERT INTO nothing VALUES (1)")

    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        handle()
    assert is_idle(connection)
    assert (postgres.effects, postgres.marks) == ([], [])


@pytest.mark.parametrize("commits", [True, False])
def test_in_the_callers_transaction_it_is_the_caller_who_decides(
    connection: Any, postgres: Postgres, commits: bool
) -> None:
    with suppress(ZeroDivisionError), connection.transaction():
        effect(connection, "before")
        with once(connection) as first:
            assert first
            effect(connection, "billed")
        with suppress(ZeroDivisionError), once(connection, "e-2"):
            effect(connection, "undone")
            raise ZeroDivisionError
        assert postgres.marks == []
        if not commits:
            raise ZeroDivisionError
    assert (postgres.effects, postgres.marks) == ((["before", "billed"], ["e-1"]) if commits else ([], []))


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
def test_a_block_that_ends_the_transaction_itself_is_told_so(connection: Any, how: str) -> None:
    with pytest.raises(UsageError, match="ended within the block"), once(connection):
        connection.execute(how)
    assert is_idle(connection)


@pytest.mark.parametrize("fails", [False, True], ids=["commits", "rolls back"])
def test_of_two_at_the_same_time_the_second_waits_and_is_first_only_if_the_other_failed(
    postgres: Postgres, fails: bool
) -> None:
    with closing(psycopg.connect(postgres.dsn)) as one, closing(psycopg.connect(postgres.dsn)) as two:
        with once(one, "another"):  # so that the table is there
            pass
        seen = []

        def handle() -> None:
            with once(two) as first:
                seen.append(first)
                if first:
                    effect(two, "by two")

        second = threading.Thread(target=handle)
        with suppress(ZeroDivisionError), once(one) as first:
            assert first
            effect(one, "by one")
            second.start()
            postgres.wait_until_one_waits(two)
            if fails:
                raise ZeroDivisionError
        second.join()
    assert seen == [fails]
    assert postgres.effects == (["by two"] if fails else ["by one"])


def test_of_many_who_find_the_table_missing_one_is_first_and_nobody_is_refused(postgres: Postgres) -> None:
    seen = []
    barrier = threading.Barrier(8)

    def handle() -> None:
        with closing(psycopg.connect(postgres.dsn)) as connection:
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
    assert postgres.effects == ["billed"]


def test_where_transactions_see_a_snapshot_the_second_is_refused_and_comes_again(postgres: Postgres) -> None:
    """As everywhere in such transactions: the error is the handler's, and another attempt sees the mark."""
    with closing(psycopg.connect(postgres.dsn)) as one, closing(psycopg.connect(postgres.dsn)) as two:
        two.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with once(one, "another"):
            pass
        raised: list[BaseException] = []

        def handle() -> None:
            try:
                with once(two):
                    effect(two, "twice")
            except psycopg.Error as error:
                raised.append(error)

        second = threading.Thread(target=handle)
        with once(one):
            effect(one, "billed")
            second.start()
            postgres.wait_until_one_waits(two)
        second.join()
        assert [type(error) for error in raised] == [psycopg.errors.SerializationFailure]
        assert is_idle(two)
        with once(two) as first:
            assert not first
    assert postgres.effects == ["billed"]


def test_a_connection_that_dies_in_a_block_leaves_neither(postgres: Postgres) -> None:
    def handle(connection: Any) -> None:
        with once(connection):
            effect(connection, "billed")
            assert postgres.ask("SELECT pg_terminate_backend(%s, 10000)", connection.info.backend_pid) == [(True,)]
            effect(connection, "on a dead connection")

    with closing(psycopg.connect(postgres.dsn)) as connection, pytest.raises(psycopg.OperationalError):
        handle(connection)
    assert (postgres.effects, postgres.marks) == ([], [])
    with closing(psycopg.connect(postgres.dsn)) as connection, once(connection) as first:
        assert first


HANDLER = """
    import os, signal, sys
    import psycopg
    from penstock.inbox import Once

    with psycopg.connect(sys.argv[1]) as connection:
        with Once(connection, scope="orders/billing", source="penstock:orders", id="e-1") as first:
            if first:
                connection.execute("INSERT INTO effects (what) VALUES ('billed')")
            if sys.argv[2] == "in the block":
                os.kill(os.getpid(), signal.SIGKILL)
        print("first" if first else "again", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_both_or_neither(postgres: Postgres) -> None:
    def handle(dies: str) -> str:
        command = [sys.executable, "-c", textwrap.dedent(HANDLER), postgres.dsn, dies]
        environment = os.environ | {"PYTHONPATH": str(SRC)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout.strip()

    assert handle("in the block") == ""
    assert (postgres.effects, postgres.marks) == ([], [])
    assert handle("after its commit") == "first"
    assert (postgres.effects, postgres.marks) == (["billed"], ["e-1"])
    assert handle("after its commit") == "again"
    assert postgres.effects == ["billed"]


def test_texts_that_no_compression_makes_shorter_fit_into_the_index(connection: Any, postgres: Postgres) -> None:
    texts = [os.urandom(TEXT_BYTES_MAX // 2).hex() for _ in range(3)]
    longer = [text + "x" for text in texts]
    for scope, source, id in (texts, longer):
        for expected in (True, False):
            with once(connection, id, scope=scope, source=source) as first:
                assert first is expected
    assert len(postgres.marks) == 2


def test_old_marks_are_forgotten_so_many_at_a_time_and_no_others(connection: Any, postgres: Postgres) -> None:
    clock = VirtualClock()
    assert forget(connection, older_than=0) == 0, "there is no table"
    assert is_idle(connection)
    for number in range(5):
        with once(connection, f"e-{number}", clock=clock):
            pass
        clock.advance(60)
    minute = timedelta(minutes=1)
    assert [forget(connection, older_than=minute, most=3, clock=clock) for _ in range(2)] == [3, 1]
    assert is_idle(connection)
    assert postgres.marks == ["e-4"]


def test_the_statements_for_migrations_may_be_executed_twice(connection: Any, postgres: Postgres) -> None:
    with connection.transaction():
        for statement in SCHEMA * 2:
            connection.execute(statement)
    with once(connection) as first:
        assert first
    assert postgres.marks == ["e-1"]


# --- asynchronous connections -----------------------------------------------------------------


@pytest.mark.parametrize("autocommit", [False, True])
async def test_an_asynchronous_connection_marks_once(postgres: Postgres, autocommit: bool) -> None:
    async with await psycopg.AsyncConnection.connect(postgres.dsn, autocommit=autocommit) as connection:
        firsts = []
        for _ in range(2):
            async with once(connection) as first:
                firsts.append(first)
                if first:
                    await connection.execute("INSERT INTO effects (what) VALUES ('billed')")
            assert is_idle(connection)
        with suppress(ZeroDivisionError):
            async with once(connection, "e-2"):
                raise ZeroDivisionError
        assert is_idle(connection)
        assert firsts == [True, False]
        assert (postgres.effects, postgres.marks) == (["billed"], ["e-1"])
        assert await forget_async(connection, older_than=0) == 1
        assert postgres.marks == []


async def test_a_handler_that_is_cancelled_while_it_waits_for_another_leaves_nothing(postgres: Postgres) -> None:
    connect = psycopg.AsyncConnection.connect
    async with await connect(postgres.dsn) as one, await connect(postgres.dsn) as two:
        async with once(one, "another"):
            pass

        async def handle() -> None:
            async with once(two):
                await two.execute("INSERT INTO effects (what) VALUES ('by two')")

        async with once(one):
            task = asyncio.create_task(handle())
            await asyncio.to_thread(postgres.wait_until_one_waits, two)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert is_idle(two)
            await one.execute("INSERT INTO effects (what) VALUES ('by one')")
        async with once(two) as first:
            assert not first
    assert postgres.effects == ["by one"]


@asynccontextmanager
async def closed_after(connecting: Any) -> AsyncIterator[Any]:
    connection = await connecting
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def through_psycopg(postgres: Postgres, _directory: Path) -> AsyncIterator[Callable[[], Any]]:
    yield lambda: psycopg.AsyncConnection.connect(postgres.dsn)


@asynccontextmanager
async def through_aiosqlite(_postgres: Postgres, directory: Path) -> AsyncIterator[Callable[[], Any]]:
    async with aiosqlite.connect(directory / "app.db") as connection:
        await connection.execute("CREATE TABLE effects (what TEXT NOT NULL)")
    yield lambda: aiosqlite.connect(directory / "app.db", timeout=60)


@pytest.mark.parametrize("through", [through_psycopg, through_aiosqlite])
async def test_a_handler_that_fails_after_its_commit_has_one_effect(
    postgres: Postgres, tmp_path: Path, through: Any
) -> None:
    orders = Topic("orders", bytes, key=lambda order: order)
    bus = Bus(f"file:{tmp_path / 'store'}", topics=[orders])
    firsts: list[tuple[bytes, bool]] = []
    done: asyncio.Queue[bytes] = asyncio.Queue()

    async with through(postgres, tmp_path) as connect:

        @bus.subscriber(orders, "billing", retry=Retry(delay=0.001))
        async def bill(order: bytes, delivery: Delivery[bytes]) -> None:
            async with closed_after(connect()) as connection:
                async with delivery.once(connection) as first:
                    firsts.append((order, first))
                    if first:
                        await connection.execute(f"INSERT INTO effects (what) VALUES ('{order.decode()}')")
                if first:
                    raise ConnectionError("the answer got lost")
            done.put_nowait(order)

        async with bus:
            await bus.publish_batch(orders, [b"a", b"b", b"c"])
            assert sorted([await done.get() for _ in range(3)]) == [b"a", b"b", b"c"]
        assert sorted(firsts) == [(order, first) for order in (b"a", b"b", b"c") for first in (False, True)]
        async with closed_after(connect()) as connection:
            cursor = await connection.execute("SELECT what FROM effects ORDER BY what")
            assert [what for (what,) in await cursor.fetchall()] == ["a", "b", "c"]


async def test_aiosqlite_commits_both_or_neither(tmp_path: Path) -> None:
    async with aiosqlite.connect(tmp_path / "app.db") as connection:
        await connection.execute("CREATE TABLE effects (what TEXT NOT NULL)")
        with suppress(ZeroDivisionError):
            async with once(connection):
                await connection.execute("INSERT INTO effects VALUES ('undone')")
                raise ZeroDivisionError
        firsts = []
        for _ in range(2):
            async with once(connection) as first:
                firsts.append(first)
                if first:
                    await connection.execute("INSERT INTO effects VALUES ('billed')")
            assert not connection.in_transaction
        assert firsts == [True, False]
    async with aiosqlite.connect(tmp_path / "app.db") as other:
        cursor = await other.execute("SELECT what FROM effects")
        assert list(await cursor.fetchall()) == [("billed",)]


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("level", [None, ""])
async def test_a_block_of_aiosqlite_that_is_cancelled_at_any_moment_leaves_no_transaction(
    tmp_path: Path, level: str | None, turns: int
) -> None:
    async with aiosqlite.connect(tmp_path / "app.db", isolation_level=level) as connection:
        await connection.execute("CREATE TABLE effects (what TEXT NOT NULL)")
        await connection.commit()

        async def handle(what: str) -> None:
            async with once(connection, what) as first:
                if first:
                    await connection.execute("INSERT INTO effects VALUES (?)", (what,))

        await handle("before")
        cut = asyncio.create_task(handle("cut"))
        for _ in range(turns + 1):
            await asyncio.sleep(0)
        cut.cancel()
        await asyncio.wait([cut])
        assert not connection.in_transaction
        await handle("after")
        await handle("cut")
        with closing(sqlite3.connect(tmp_path / "app.db")) as another:
            effects = [what for (what,) in another.execute("SELECT what FROM effects")]
        assert sorted(effects) == ["after", "before", "cut"]


# --- tasks of one block -----------------------------------------------------------------------


@asynccontextmanager
async def ready(through: Any, postgres: Postgres, directory: Path) -> AsyncIterator[tuple[Any, Any]]:
    """Give a connection, and what asks another one for all effects, and for all marks."""
    async with through(postgres, directory) as connect:

        async def found() -> tuple[list[str], list[str]]:
            async with closed_after(connect()) as other:
                rows = []
                for statement in ("SELECT what FROM effects", "SELECT id FROM penstock_inbox"):
                    cursor = await other.execute(statement)
                    rows.append(sorted(text for (text,) in await cursor.fetchall()))
            return rows[0], rows[1]

        async with closed_after(connect()) as connection:
            async with once(connection, "the table is there"):
                pass
            assert await forget_async(connection, older_than=0) == 1
            yield connection, found


async def part(connection: Any, name: str, *, fails: bool = False, seconds: float = 0.0) -> None:
    async with once(connection, name) as first:
        assert first
        await asyncio.sleep(seconds)
        await connection.execute(f"INSERT INTO effects (what) VALUES ('{name}')")
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("through", [through_psycopg, through_aiosqlite])
async def test_tasks_of_a_block_take_turns_and_one_that_fails_undoes_itself_alone(
    postgres: Postgres, tmp_path: Path, through: Any
) -> None:
    async with ready(through, postgres, tmp_path) as (connection, found):
        async with once(connection):
            parts = [part(connection, f"part-{i}", fails=i == 1, seconds=0.01 * i) for i in range(4)]
            ended = await asyncio.gather(*parts, return_exceptions=True)
        assert [type(error) for error in ended] == [type(None), ZeroDivisionError, type(None), type(None)]
        kept = ["part-0", "part-2", "part-3"]
        assert await found() == (kept, ["e-1", *kept])


@pytest.mark.parametrize("through", [through_psycopg, through_aiosqlite])
async def test_blocks_of_tasks_three_deep_are_each_undone_with_those_within(
    postgres: Postgres, tmp_path: Path, through: Any
) -> None:
    async with ready(through, postgres, tmp_path) as (connection, found):

        async def tree(name: str, depth: int) -> None:
            async with once(connection, name):
                await connection.execute(f"INSERT INTO effects (what) VALUES ('{name}')")
                if depth:
                    await asyncio.gather(*(tree(name + i, depth - 1) for i in "xyz"), return_exceptions=True)
                if name.endswith("y"):
                    raise ZeroDivisionError

        await tree("t", 3)
        effects, marks = await found()
        assert effects == marks
        assert len(marks) == 1 + 2 + 4 + 8
        assert not any("y" in name for name in marks)


@pytest.mark.parametrize("through", [through_psycopg, through_aiosqlite])
async def test_tasks_that_a_block_left_behind_as_one_of_them_failed_are_undone_with_it(
    postgres: Postgres, tmp_path: Path, through: Any
) -> None:
    async with ready(through, postgres, tmp_path) as (connection, found):
        parts: list[asyncio.Task[None]] = []

        async def handle() -> None:
            async with once(connection):
                for i in range(4):
                    work = part(connection, f"part-{i}", fails=i == 1, seconds=0.01 * i)
                    parts.append(asyncio.create_task(work))
                await asyncio.gather(*parts)

        with pytest.raises(ZeroDivisionError):
            await handle()
        assert all(task.done() for task in parts)
        assert await found() == ([], [])
        async with once(connection) as first:
            assert first


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("through", [through_psycopg, through_aiosqlite])
async def test_a_block_whose_tasks_are_cancelled_at_any_moment_has_each_effect_with_its_mark(
    postgres: Postgres, tmp_path: Path, through: Any, turns: int
) -> None:
    async with ready(through, postgres, tmp_path) as (connection, found):

        async def handle() -> None:
            async with once(connection):
                await connection.execute("INSERT INTO effects (what) VALUES ('e-1')")
                tasks = [asyncio.create_task(part(connection, f"part-{i}")) for i in range(3)]
                for _ in range(turns * 3):
                    await asyncio.sleep(0)
                tasks[0].cancel()
                tasks[2].cancel()
                await asyncio.wait(tasks)

        with suppress(psycopg.Error):  # a statement that is cancelled may take the transaction with it
            await handle()
        effects, marks = await found()
        assert effects == marks
        async with once(connection, "after") as first:
            assert first
