"""Drivers for tests that stand for drivers which are not installed here; underneath each of them is sqlite3.

`driver(style)` makes a module like psycopg's: parameters in one of the styles of the DB-API, transactions that begin
with the first statement unless `autocommit` is set, `info.transaction_status`, and a transaction in which a statement
has failed takes nothing any more but its rollback, as in PostgreSQL. It has a `Connection`, and an `AsyncConnection`
whose calls are awaited and made in threads. `Aiosqlite` is a connection like aiosqlite's.

They show how a connection is used, not how PostgreSQL behaves: that two wait for each other is SQLite's doing here.
`test_inbox_drivers` has the real ones.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

IDLE, IN_TRANSACTION, IN_ERROR = 0, 2, 3

TRANSLATIONS: dict[str, Callable[[str], str]] = {
    "qmark": lambda statement: statement,
    "numeric": lambda statement: re.sub(r":\d", "?", statement),
    "named": lambda statement: statement,
    "format": lambda statement: statement.replace("%s", "?"),
    "pyformat": lambda statement: re.sub(r"%\((\w+)\)s", r":\1", statement),
}
FOREIGN = {"qmark": r"[%:]", "numeric": r"[%?]", "named": r"[%?]", "format": r"[:?]", "pyformat": r"[:?]"}


class Error(Exception):
    """What all drivers made here raise."""


class _Cursor:
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._cursor = connection.below.cursor()

    def execute(self, statement: str, parameters: Any = ()) -> None:
        connection = self._connection
        assert not re.search(FOREIGN[connection.style], statement), f"not {connection.style}: {statement}"
        if connection.failed and not statement.startswith("ROLLBACK"):
            raise Error("the transaction is aborted, statements are ignored until it is rolled back")
        if connection.autocommit and not connection.below.in_transaction and "SAVEPOINT" in statement:
            raise Error(f"{statement.rpartition(' ')[0]} can only be used in transaction blocks")
        if not connection.autocommit and not connection.below.in_transaction:
            connection.below.execute("BEGIN")
        connection.statements.append(statement)
        try:
            self._cursor.execute(TRANSLATIONS[connection.style](statement), parameters)
        except sqlite3.Error as error:
            connection.failed = connection.below.in_transaction
            raise Error(str(error)) from error
        connection.failed = False

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    def fetchall(self) -> list[Any]:
        return self._cursor.fetchall()

    def close(self) -> None:
        self._cursor.close()


class _Connection:
    style = "qmark"

    def __init__(self, path: Path, *, autocommit: bool = False) -> None:
        self.below = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self.autocommit = autocommit
        self.failed = False
        self.statements: list[str] = []

    @property
    def info(self) -> SimpleNamespace:
        status = IN_ERROR if self.failed else IN_TRANSACTION if self.below.in_transaction else IDLE
        return SimpleNamespace(transaction_status=status)

    def cursor(self) -> _Cursor:
        return _Cursor(self)

    def execute(self, statement: str) -> list[Any]:
        """Execute a statement of the test's own, and return what it finds."""
        cursor = self.cursor()
        cursor.execute(statement)
        return cursor.fetchall()

    def commit(self) -> None:
        if not self.autocommit and self.below.in_transaction:
            self.below.execute("ROLLBACK" if self.failed else "COMMIT")
        self.failed = False

    def rollback(self) -> None:
        if not self.autocommit and self.below.in_transaction:
            self.below.execute("ROLLBACK")
        self.failed = False

    def close(self) -> None:
        self.below.close()


class _AsyncCursor:
    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)

    async def close(self) -> None:
        self._cursor.close()


class _AsyncConnection:
    style = "qmark"

    def __init__(self, path: Path, *, autocommit: bool = False) -> None:
        self.below = type("Below", (_Connection,), {"style": self.style})(path, autocommit=autocommit)
        self.autocommit = autocommit

    @property
    def info(self) -> SimpleNamespace:
        found: SimpleNamespace = self.below.info
        return found

    async def execute(self, statement: str, parameters: Any = ()) -> _AsyncCursor:
        cursor = self.below.cursor()
        await asyncio.to_thread(cursor.execute, statement, parameters)
        return _AsyncCursor(cursor)

    async def commit(self) -> None:
        await asyncio.to_thread(self.below.commit)

    async def rollback(self) -> None:
        await asyncio.to_thread(self.below.rollback)

    def close(self) -> None:
        self.below.close()


class _Aiosqlite:
    def __init__(self, path: Path) -> None:
        self.below = sqlite3.connect(path, check_same_thread=False)

    @property
    def in_transaction(self) -> bool:
        return self.below.in_transaction

    async def execute(self, statement: str, parameters: Any = ()) -> _AsyncCursor:
        try:
            return _AsyncCursor(await asyncio.to_thread(self.below.execute, statement, parameters))
        except sqlite3.Error as error:
            raise Error(str(error)) from error

    async def commit(self) -> None:
        await asyncio.to_thread(self.below.commit)

    async def rollback(self) -> None:
        await asyncio.to_thread(self.below.rollback)

    def close(self) -> None:
        self.below.close()


def driver(style: str) -> Any:
    """Return a module of a driver with this style of parameters."""
    name = f"tests_driver_{style}"
    module: Any = ModuleType(name)
    module.paramstyle = style
    module.Error = Error
    module.Connection = type("Connection", (_Connection,), {"style": style, "__module__": name})
    module.AsyncConnection = type("AsyncConnection", (_AsyncConnection,), {"style": style, "__module__": name})
    module.Aiosqlite = type("Aiosqlite", (_Aiosqlite,), {"__module__": name})
    sys.modules[name] = module
    return module


Aiosqlite = driver("qmark").Aiosqlite
"""A connection like aiosqlite's: that of sqlite3, each call of which is awaited and made in a thread."""
