"""Connections of an application to its own database, through whichever DB-API driver, blocking or not.

What is to be done with a connection is said once, as a generator of steps: it yields what to execute and is sent how
many rows that has changed, or is thrown what was raised. `Driver.run` takes the steps with a connection that blocks,
`Driver.run_async` with one whose calls are awaited.

A driver is known by what it has: its module says `paramstyle` and has `Error`; its connections have `cursor()`,
`commit()` and `rollback()`, or, if these are coroutines, `execute()`. They say whether a transaction is open by
`in_transaction`, as sqlite3 and aiosqlite do, or by `info.transaction_status`, as psycopg does. Anything else is
refused with an error that says this.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from functools import cache
from inspect import iscoroutinefunction
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

R = TypeVar("R")


class Execute(NamedTuple):
    """Execute a statement; the answer is how many rows it has changed."""

    statement: str
    values: Mapping[str, Any] = {}


class Call(NamedTuple):
    """Call a method of the connection: `commit` or `rollback`."""

    method: str


Steps: TypeAlias = Generator[Execute | Call, int, R]

_BEGIN = Execute("BEGIN")
_COMMIT = Execute("COMMIT")
_ROLLBACK = Execute("ROLLBACK")

_PLACEHOLDERS = {
    "qmark": "?",
    "numeric": ":{number}",
    "named": ":{name}",
    "format": "%s",
    "pyformat": "%({name})s",
}
_BY_NAME = ("named", "pyformat")


@cache
def _rendered(statement: str, style: str) -> tuple[str, tuple[str, ...]]:
    """Return a statement in the style of a driver, and the names of its parameters in their order."""
    names = tuple(name for _, name, _, _ in Formatter().parse(statement) if name)
    placeholder = _PLACEHOLDERS[style]
    filled = {name: placeholder.format(name=name, number=number) for number, name in enumerate(names, 1)}
    return statement.format(**filled), names


class Kind(NamedTuple):
    """What all connections of a class have in common."""

    error: type[Exception]
    waits: bool
    """Whether calls block, and are not awaited."""
    style: str
    sqlite: bool
    """Whether it is a database of SQLite."""
    plain: bool
    """Whether its cursors are those of the module sqlite3, about which nothing has to be found out."""


_kinds: dict[type, Kind] = {}
"""Of the classes that were met so far: to look at one takes longer than to insert a row."""


def kind_of(connection: Any) -> Kind:
    """Return what is known of a connection's class; `UsageError` if it is not a connection."""
    return _kinds.get(type(connection)) or _examined(connection)


class Driver:
    """A connection, and how its driver wants it to be used; `UsageError` if it is not one."""

    __slots__ = ("_plain", "_style", "connection", "error", "sqlite")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.error, _, self._style, self.sqlite, self._plain = kind_of(connection)

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open, an aborted one included."""
        if self.sqlite:
            return bool(self.connection.in_transaction)
        return int(self.connection.info.transaction_status) != 0

    @property
    def _commits_by_itself(self) -> bool:
        # Some drivers ignore `commit()` and `rollback()` while they leave transactions to the caller's statements.
        return self.sqlite or bool(getattr(self.connection, "autocommit", False))

    def begin(self, savepoint: Execute) -> Steps[None]:
        """Begin a transaction, and a savepoint that is all of it.

        To SQLite a savepoint outside of a transaction is one: it begins with it, and is committed when it is released.
        """
        if not self.sqlite and self._commits_by_itself:
            yield _BEGIN
        yield savepoint

    def commit(self, release: Execute) -> Steps[None]:
        """Commit what `begin` has begun."""
        yield release
        if not self.sqlite:
            yield _COMMIT if self._commits_by_itself else Call("commit")

    def roll_back(self) -> Steps[None]:
        """Undo all that was done since `begin`."""
        yield _ROLLBACK if self._commits_by_itself else Call("rollback")

    def names(self, error: BaseException, what: str) -> bool:
        """Say whether the database refused a statement because of something that it calls by this name."""
        return isinstance(error, self.error) and what in str(error)

    def run(self, steps: Steps[R]) -> R:
        """Take the steps, each of which blocks."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._take(step)
                except BaseException as error:  # noqa: BLE001 - whatever it is, the steps decide what follows
                    step = steps.throw(self.explained(error))
                else:
                    step = steps.send(answer)
        except StopIteration as done:
            result: R = done.value
            return result

    async def run_async(self, steps: Steps[R]) -> R:
        """Take the steps, each of which is awaited."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = await (self._taken(step) if self.sqlite else self._take_async(step))
                except BaseException as error:  # noqa: BLE001 - the same
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as done:
            result: R = done.value
            return result

    async def _taken(self, step: Execute | Call) -> int:
        """Take a step to its end; a cancel waits for that.

        A thread makes the calls of SQLite, also one that nobody waits for any more. What it did would not be undone:
        whether a transaction is open, and whose that is, can be told only when it has ended. The drivers of servers
        end a call that is cancelled before they let go of it.
        """
        taking = asyncio.ensure_future(self._take_async(step))
        cancel: asyncio.CancelledError | None = None
        while not taking.done():
            try:
                await asyncio.wait([taking])
            except asyncio.CancelledError as error:
                cancel = error
        if cancel is not None:
            raise cancel from taking.exception()
        return taking.result()

    def _take(self, step: Execute | Call) -> int:
        if isinstance(step, Call):
            getattr(self.connection, step.method)()
            return 0
        if self._plain:  # then the connection makes the cursor, and closes it, quicker
            return int(self.connection.execute(*self._arguments(step)).rowcount)
        cursor = self.connection.cursor()
        try:
            cursor.execute(*self._arguments(step))
            return int(cursor.rowcount)
        finally:
            cursor.close()

    async def _take_async(self, step: Execute | Call) -> int:
        if isinstance(step, Call):
            await getattr(self.connection, step.method)()
            return 0
        cursor = await self.connection.execute(*self._arguments(step))
        changed = int(cursor.rowcount)
        await cursor.close()
        return changed

    def _arguments(self, step: Execute) -> tuple[Any, ...]:
        if not step.values:
            return (step.statement,)
        statement, names = _rendered(step.statement, self._style)
        if self._style in _BY_NAME:
            return (statement, dict(step.values))
        return (statement, tuple(step.values[name] for name in names))

    def explained(self, error: BaseException) -> BaseException:
        """Return what is raised instead of an error of the driver's that says too little."""
        if self.names(error, "created in a thread"):
            return UsageError(
                f"this connection was made in another thread, and SQLite refuses it here: connect in the handler, or "
                f"with check_same_thread=False if no two threads use it at a time ({error})"
            )
        return error


def _examined(connection: Any) -> Kind:
    cls = type(connection)
    module = _module_of(cls)
    if module is None or not _is_connection(connection):
        raise _not_a_connection(connection)
    kind = _kinds[cls] = Kind(
        error=module.Error,
        waits=not iscoroutinefunction(connection.commit),
        style=module.paramstyle,
        sqlite=hasattr(cls, "in_transaction"),
        plain=module.__name__ == "sqlite3" and cls.cursor is module.Connection.cursor,
    )
    return kind


def _module_of(cls: type) -> Any:
    """Return the module of a connection's driver, which says how parameters are written; None if there is none."""
    for base in cls.__mro__:
        name = base.__module__
        while name:
            module = sys.modules.get(name)
            if getattr(module, "paramstyle", None) in _PLACEHOLDERS and hasattr(module, "Error"):
                return module
            name = name.rpartition(".")[0]
    return None


def _is_connection(value: Any) -> bool:
    # Of the class, since asking a connection itself may be refused while it is closed.
    cls = type(value)
    if not (hasattr(cls, "commit") and hasattr(cls, "rollback")):
        return False
    if not hasattr(cls, "execute" if iscoroutinefunction(cls.commit) else "cursor"):
        return False
    return hasattr(cls, "in_transaction") or hasattr(getattr(value, "info", None), "transaction_status")


def _not_a_connection(value: Any) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "fetchone") and hasattr(value, "execute"):
        return UsageError(f"once takes a connection, and {kind} is a cursor: give the connection that it is of")
    return UsageError(
        f"once takes a DB-API connection, such as one of sqlite3 or psycopg, not {kind}. Its module must have "
        f"`paramstyle` and `Error`; it must have cursor(), commit() and rollback(), or coroutines execute(), commit() "
        f"and rollback(); it must say whether a transaction is open, by `in_transaction` or `info.transaction_status`; "
        f"and its database must know INSERT … ON CONFLICT DO NOTHING. A wrapper (of Django, of SQLAlchemy) has such a "
        f"connection of its driver: give that one"
    )
