"""The inbox: the mark of a handled event, in the very transaction in which its handler writes. So effects happen once.

`delivery.once(connection)` is what a handler uses; this module is what it promises:

* **Both or neither.** The mark is a row in the database that the handler writes to, inserted with its own connection,
  in its own transaction. Whatever kills the process, there is the effect and the mark, or there is neither.
* **Whose transaction it is.** If the connection is in one, the block is a part of it (a savepoint), and the caller
  commits. If not, the block begins one, and commits it at its end. If the block raises,
  everything in it is undone, the mark included, and nothing else.
* **Two at the same time.** The second waits for the first, as the database makes it wait, and then sees its mark; or is
  the first itself, if the other was rolled back.
* **A connection is in one block at a time.** Otherwise an effect that is acknowledged could be undone with the failure
  of another. A block of another task waits (`async with`), or is refused (`with`). A block within a block is a part
  of it, also in a task that was started there; such tasks take turns, and the outer block ends after theirs.
* **Identity** is that of CloudEvents, source and id, within a scope: an event that was published twice with the same id
  is handled once. The scope is the subscription, unless another one is given.

Every database will do that knows `INSERT … ON CONFLICT DO NOTHING`, such as SQLite and PostgreSQL, and every driver
that `penstock.connections` knows how to use. What the database itself refuses is raised as it is, as from the handler's
own statements.

The table is made when it is first missing. `SCHEMA` and `SQLITE_SCHEMA` have the statements, for those who make their
tables by migrations; in SQLite either will do.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from abc import ABC, abstractmethod
from contextvars import ContextVar
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from penstock.clock import Clock, SystemClock, seconds
from penstock.connections import Driver, Execute, Steps, kind_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from types import TracebackType

R = TypeVar("R")

SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS penstock_inbox (scope TEXT NOT NULL, source TEXT NOT NULL, id TEXT NOT NULL,"
    " marked_at BIGINT NOT NULL, PRIMARY KEY (scope, source, id))",
    "CREATE INDEX IF NOT EXISTS penstock_inbox_marked_at ON penstock_inbox (marked_at)",
)
"""What makes the table. `marked_at` is in microseconds since 1970 UTC."""

SQLITE_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS penstock_inbox (scope TEXT NOT NULL, source TEXT NOT NULL, id TEXT NOT NULL,"
    " marked_at INTEGER NOT NULL, PRIMARY KEY (scope, source, id)) WITHOUT ROWID",
)
"""What makes it in SQLite: a table that is one tree, so that a mark is one page in its commit, and not two or three."""

TEXT_BYTES_MAX = 512
"""Of a scope, a source or an id, as it stands in the table; an index of PostgreSQL takes no row above 2,704 bytes."""
_FITTING_LENGTH: Final = TEXT_BYTES_MAX // 4
"""A text of so many characters fits for sure: none takes more than four bytes."""

FORGOTTEN_MAX = 10_000
"""So many marks are removed by one call, unless it says otherwise: others wait for the table no longer than that."""

_MARK = (
    "INSERT INTO penstock_inbox (scope, source, id, marked_at) VALUES ({scope}, {source}, {id}, {marked_at})"
    " ON CONFLICT (scope, source, id) DO NOTHING"
)
_PLAIN_MARK = _MARK.format(scope="?", source="?", id="?", marked_at="?")
_MARK_AT_THE_END = _MARK.replace("{marked_at}", "(SELECT MAX(marked_at) + 1 FROM penstock_inbox)")
"""Where another mark has this very time, in tables of SQLite whose key that was once: two processes, or a clock that
was set back."""
_FORGET = (
    "DELETE FROM penstock_inbox WHERE (scope, source, id) IN (SELECT scope, source, id FROM penstock_inbox"
    " WHERE marked_at < {before} LIMIT {most})"
)
_FORGET_IN_ORDER = _FORGET.replace("LIMIT", "ORDER BY marked_at LIMIT")
"""So that PostgreSQL takes the index, which it may not if any of them will do."""
_FIND = (
    "CREATE TEMP TABLE penstock_forgotten AS SELECT scope, source, id FROM penstock_inbox"
    " WHERE marked_at < {before} LIMIT {most}"
)
_FORGET_FOUND = (
    "DELETE FROM penstock_inbox WHERE (scope, source, id) IN (SELECT scope, source, id FROM temp.penstock_forgotten)"
    " AND marked_at < {before}"
)
_LEAVE_FOUND = Execute("DROP TABLE IF EXISTS temp.penstock_forgotten")
_CLOCK: Final = SystemClock()
_SAVEPOINT = "penstock_once"


class _Savepoint(NamedTuple):
    """What makes a savepoint, what ends it, and what undoes all since it was made, inner savepoints included."""

    save: Execute
    release: Execute
    go_back: Execute


@cache
def _savepoint(depth: int) -> _Savepoint:
    """Return that of a block with so many others of its connection around it, each of which has a name of its own."""
    name = f"{_SAVEPOINT}_{depth}" if depth else _SAVEPOINT
    statements = (f"SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}", f"ROLLBACK TO SAVEPOINT {name}")
    return _Savepoint(*map(Execute, statements))


_SAVE, _RELEASE, _ = _savepoint(0)


# --- blocks -----------------------------------------------------------------------------------


class _Block(ABC, Generic[R]):
    """A block that is a transaction, or a part of one; both a context manager and an asynchronous one."""

    __slots__ = ("_connection", "_entered", "_kind", "begun", "cut", "depth", "ended", "open", "outer", "stack", "task")

    outer: _Block[Any] | None
    """The block that is around this one, of whatever connection; once it is entered."""
    task: asyncio.Task[Any] | None
    """Whose it is, if there is another block of its connection around it."""

    def __init__(self, connection: Any) -> None:
        self._kind = kind_of(connection)
        self._connection = connection
        self.begun = False
        """Whether the transaction is this block's own."""
        self.open = False
        """Whether others may enter within it now."""
        self.stack: list[_Block[Any]] | None = None
        """The blocks that its connection is in now, the innermost last; None while there was never another one."""
        self.depth = 0
        """How many blocks of its connection were around it when it was entered."""
        self.cut = False
        """Whether one that was around it has ended before it, and has undone both."""
        self._entered = False
        self.ended: asyncio.Event | None = None

    @abstractmethod
    def _work(self) -> Steps[R]:
        """Do what the block is for, after its transaction has begun; what is returned is what `as` gives."""

    # --- blocking, and not --------------------------------------------------------------------

    def __enter__(self) -> R:
        if not self._kind.waits:
            raise UsageError(f"{self._class} is asynchronous: write `async with`")
        self._check_new()
        if self._occupy() is not None:
            raise self._occupied()
        try:
            return self._driver.run(self._entering())
        except BaseException:
            self._vacate()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._driver.run(self._leaving(error))
        finally:
            self._vacate()

    async def __aenter__(self) -> R:
        if self._kind.waits:
            raise UsageError(f"{self._class} blocks: write `with`, and do not await anything within")
        self._check_new()
        if (other := self._occupy()) is not None:
            await self._take_turn(other)
        try:
            return await self._driver.run_async(self._entering())
        except BaseException:
            self._vacate()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            cancel = None if self.stack is None else await self._await_inner(self.stack, error)
            await self._driver.run_async(self._leaving(cancel or error))
            if cancel is not None:
                raise cancel
        finally:
            self._vacate()

    @property
    def _driver(self) -> Driver:
        return Driver(self._connection)

    @property
    def _class(self) -> str:
        cls = type(self._connection)
        return f"{cls.__module__}.{cls.__qualname__}"

    def _check_new(self) -> None:
        if self._entered:
            raise UsageError("this block was entered before: call `once` again for another one")
        self._entered = True

    # --- one block at a time ------------------------------------------------------------------

    def _occupy(self, turn: _Block[Any] | None = None) -> _Block[Any] | None:
        """Take the connection, unless it is in a block that this task is not in: then return that one.

        `turn` is a block within which it may enter even if that waits for its end.
        """
        present = _present.setdefault(id(self._connection), self)
        around = _around.get()
        if present is not self and (other := self._join(present, around, turn)) is not None:
            return other
        self.open = True
        self.outer = around
        _around.set(self)
        return None

    def _join(self, outermost: _Block[Any], around: _Block[Any] | None, turn: _Block[Any] | None) -> _Block[Any] | None:
        """Become the innermost block of the connection, if this task is in the one that is it now; else return that."""
        with _joining:
            stack = outermost.stack
            present = stack[-1] if stack else outermost
            while around is not None and around is not present:
                around = around.outer
            if around is None or not (present.open or present is turn):
                return present
            if present.cut:
                raise _ended_around()
            if stack is None:
                stack = outermost.stack = [outermost]
            self.task = None if self._kind.waits else asyncio.current_task()
            self.depth = present.depth + 1
            self.stack = stack
            stack.append(self)
        return None

    def _occupied(self) -> UsageError:
        return UsageError(
            f"this {self._class} is in the block of another handler, or of another task of this one, and what is done "
            f"with it here would be committed or undone with that: give each of those that run at a time a connection "
            f"of its own"
        )

    def _vacate(self) -> None:
        self.open = False
        if _around.get() is self:
            outer = self.outer
            while outer is not None and not outer.open:  # it has ended before those that it was around
                outer = outer.outer
            _around.set(outer)
        if self.stack is None:
            del _present[id(self._connection)]
        else:
            self._part(self.stack)
        if self.ended is not None:
            self.ended.set()

    def _part(self, stack: list[_Block[Any]]) -> None:
        key = id(self._connection)
        with _joining:
            stack.remove(self)
            if _present.get(key) is not self:
                return
            if stack:  # those that it has cut off have the connection until they end
                _present[key] = stack[0]
            else:
                del _present[key]

    async def _take_turn(self, other: _Block[Any] | None) -> None:
        """Take the connection as soon as it is in no block that this task is not in; `other` is the first of those."""
        blocks = () if other is None else other.stack or ()
        turn = _around.get()
        while turn is not None and not (turn.open and turn in blocks):
            turn = turn.outer
        while other is not None:
            await self._end_of(other)
            other = self._occupy(turn)

    async def _await_inner(
        self, stack: list[_Block[Any]], failure: BaseException | None
    ) -> asyncio.CancelledError | None:
        """Wait until the blocks of other tasks within this one have ended, those that already wait for it included.

        If it is cancelled, so are they. Returns the cancel, if it came meanwhile.
        """
        self.open = False  # or those who come again and again would keep it from its end
        cancel = None
        cancelled = isinstance(failure, asyncio.CancelledError)
        while True:
            try:
                await asyncio.sleep(0)  # whoever was told that it is its turn now enters
                inner = stack[-1]
                if inner is self or inner.task is asyncio.current_task():
                    return cancel
                if cancelled and inner.open and inner.task is not None:
                    inner.task.cancel()
                await self._end_of(inner)
            except asyncio.CancelledError as error:
                cancel, cancelled = error, True

    async def _end_of(self, other: _Block[Any]) -> None:
        if other.ended is None:
            other.ended = asyncio.Event()
        await other.ended.wait()

    # --- the transaction ----------------------------------------------------------------------

    def _entering(self) -> Steps[R]:
        driver = self._driver
        self.begun = not driver.in_transaction
        save = self._savepoint.save
        try:
            if self.begun:
                yield from driver.begin(save)
            else:
                yield save
            return (yield from self._work())
        except BaseException as error:
            yield from self._undo(error)
            raise

    def _leaving(self, failure: BaseException | None) -> Steps[None]:
        driver = self._driver
        self.open = False
        if failure is not None:
            yield from self._undo(failure)
            return
        if self.cut or self._inner:
            refusal = _ended_around()
            yield from self._undo(refusal)
            raise refusal
        if not driver.in_transaction:
            raise _ended_within()
        release = self._savepoint.release
        try:
            if self.begun:
                yield from driver.commit(release)
            else:
                yield release
        except BaseException as error:  # noqa: BLE001 - it is raised there
            yield from self._refused(error)

    def _refused(self, error: BaseException) -> Steps[None]:
        """Undo what could not be committed, and raise why."""
        yield from self._undo(error)
        if self._driver.names(error, _SAVEPOINT):
            raise _ended_within() from error
        raise error

    def _undo(self, failure: BaseException) -> Steps[None]:
        """Undo what the block did; if that fails, too, the first failure is still the one that is raised."""
        driver = self._driver
        for inner in self._inner:
            inner.cut = True
            inner.begun = inner.begun or self.begun  # what is still written there is nobody else's either
        try:
            if not driver.in_transaction:
                return  # some errors make a database roll back by itself
            if self.begun:
                yield from driver.roll_back()
            elif not self.cut:  # or its savepoint is gone
                yield self._savepoint.go_back
                yield self._savepoint.release
        except driver.error as error:
            failure.add_note(f"the block could not be rolled back ({type(error).__name__}): close the connection")

    @property
    def _savepoint(self) -> _Savepoint:
        return _savepoint(self.depth)

    @property
    def _inner(self) -> list[_Block[Any]]:
        """The blocks within this one that have not ended yet."""
        return [] if self.stack is None else self.stack[self.stack.index(self) + 1 :]


_present: dict[int, _Block[Any]] = {}
"""The outermost block of each connection that is in one, by the connection's id: it lives as long as its block."""

_joining = threading.Lock()
"""Held while a block enters within another one, or ends there: threads may do so at the same time."""

_around: ContextVar[_Block[Any] | None] = ContextVar("penstock_inbox_around", default=None)
"""The innermost block that this task or thread is in. Each knows the one around it; tasks that are started in a block
are in it, too."""


def _ended_within() -> UsageError:
    return UsageError(
        "the transaction of a `once` block was ended within the block, by a commit or a rollback there (a `with "
        "connection:` is one), or by the database after an error: what followed does not belong to the mark. Leave it "
        "to the block, or to whoever has begun the transaction"
    )


def _ended_around() -> UsageError:
    return UsageError(
        "a `once` block has ended before another one within it, on the same connection, and both were undone: end the "
        "inner one first, and let the outer one wait for tasks and threads that were started in it"
    )


class Once(_Block[bool]):
    """The block of a handler: `with` or `async with` it, and do something only if what it gives is True.

    `scope` says in whose name the event is marked. Made by `delivery.once(connection)`.

    There is one for each event, and between two commits the processor has forgotten all code and data that it needs. So
    the usual case, a connection of sqlite3 that is in no transaction, has a short way: what the steps do, without them.
    """

    __slots__ = ("_clock", "_execute", "_id", "_scope", "_source")

    def __init__(self, connection: Any, scope: str, source: str, id: str, *, clock: Clock = _CLOCK) -> None:
        super().__init__(connection)
        given: object = scope  # the annotation is what is to be checked
        if not isinstance(given, str) or not given or "\0" in given:
            raise UsageError(f"the scope of a mark is a text, not empty and without NUL, and not {scope!r}")
        if len(scope) + len(source) + len(id) > _FITTING_LENGTH:
            scope, source, id = _fitting(scope), _fitting(source), _fitting(id)
        self._scope = scope
        self._source = source
        self._id = id
        self._clock = clock
        self._execute: Callable[..., sqlite3.Cursor] | None = None
        """What executes statements on the short way, if this block has taken it."""

    def __enter__(self) -> bool:
        connection = self._connection
        if not self._kind.plain or self._entered or connection.in_transaction:
            return super().__enter__()
        self._entered = True
        if self._occupy() is not None:
            raise self._occupied()
        try:
            try:
                execute = connection.cursor().execute
                execute(_SAVE.statement)
                marked = execute(_PLAIN_MARK, (self._scope, self._source, self._id, self._clock.time_us())).rowcount
            except BaseException as error:
                # Whatever it is: a transaction that was left open would be taken for the caller's by the next block.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                driver = self._driver
                if driver.names(error, "penstock_inbox"):  # the table is missing, or another mark has this time
                    return driver.run(self._entering())
                if (explained := driver.explained(error)) is not error:
                    raise explained from error
                raise
        except BaseException:
            self._vacate()
            raise
        self.begun = True
        self._execute = execute
        return bool(marked)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._execute is None or error is not None or self.stack is not None:
            super().__exit__(kind, error, trace)
            return
        try:
            self._execute(_RELEASE.statement)
        except BaseException as refusal:  # noqa: BLE001 - the steps decide what follows
            self._driver.run(self._refused(refusal))
        finally:
            self._vacate()

    def _work(self) -> Steps[bool]:
        try:
            inserted = yield from self._insert()
        except self._driver.error as error:
            if not self._driver.names(error, "penstock_inbox"):
                raise
            refusal = yield from self._make_table()
            try:
                inserted = yield from self._insert()
            except self._driver.error as still:
                raise refusal or still from None
        if inserted not in (0, 1):
            raise UsageError(f"{self._class} does not say how many rows were inserted: rowcount is {inserted}")
        return inserted == 1

    def _insert(self) -> Steps[int]:
        mark = {"scope": self._scope, "source": self._source, "id": self._id}
        try:
            return (yield Execute(_MARK, {**mark, "marked_at": self._clock.time_us()}))
        except self._driver.error as error:
            if not self._driver.names(error, "penstock_inbox.marked_at"):
                raise
        return (yield Execute(_MARK_AT_THE_END, mark))

    def _make_table(self) -> Steps[Exception | None]:
        """Make the table; returns why that was refused, if it was."""
        yield self._savepoint.go_back
        try:
            for statement in SQLITE_SCHEMA if self._driver.sqlite else SCHEMA:
                yield Execute(statement)
        except self._driver.error as error:
            # In PostgreSQL whoever makes it at the same time, a moment later, is refused; but then it is there.
            yield self._savepoint.go_back
            return error
        return None


def _fitting(text: str) -> str:
    """Return a text as it is marked: itself, or its digest if it is very long."""
    encoded = text.encode()
    return text if len(encoded) <= TEXT_BYTES_MAX else f"sha256:{hashlib.sha256(encoded).hexdigest()}"


# --- forgetting -------------------------------------------------------------------------------


class _Forgetting(_Block[int]):
    """A block at whose beginning old marks are removed; it gives how many.

    In SQLite they are not kept by time, and to find old ones is to read a good part of the table: a second for ten
    million marks. Nobody who writes should wait for that. So they are found before the transaction begins, and noted in
    a temporary table, which leaves it to remove these, as quick as if there were no others. Only in a transaction of
    the caller's both are one statement, since one that has read before it writes may be refused.
    """

    __slots__ = ("_found", "_values")

    def __init__(self, connection: Any, older_than: float | timedelta, most: int, clock: Clock | None) -> None:
        super().__init__(connection)
        if type(most) is not int or most < 1:
            raise UsageError(f"`most` is a number of marks, at least 1, and not {most!r}")
        age_us = round(seconds(older_than, "the age of marks to forget") * 1_000_000)
        self._values = {"before": (clock or _CLOCK).time_us() - age_us, "most": most}
        self._found = False
        """Whether those to be removed are noted."""

    def _entering(self) -> Steps[int]:
        driver = self._driver
        if driver.sqlite and not driver.in_transaction:
            try:
                yield _LEAVE_FOUND  # of a call that has failed
                yield Execute(_FIND, self._values)
                self._found = True
            except driver.error as error:
                if not driver.names(error, "penstock_inbox"):
                    raise
        return (yield from super()._entering())

    def _work(self) -> Steps[int]:
        driver = self._driver
        try:
            if self._found:
                removed = yield Execute(_FORGET_FOUND, self._values)
                yield _LEAVE_FOUND
            else:
                removed = yield Execute(_FORGET if driver.sqlite else _FORGET_IN_ORDER, self._values)
        except driver.error as error:
            if not driver.names(error, "penstock_inbox"):
                raise
            yield self._savepoint.go_back
            return 0  # there is no table, and so nothing to forget
        return removed


def forget(
    connection: Any, *, older_than: float | timedelta, most: int = FORGOTTEN_MAX, clock: Clock | None = None
) -> int:
    """Remove marks that are older, at most so many; return how many.

    An event whose mark is gone would have its effect again if it came again. The transaction is as in `Once`: the
    caller's if there is one, and else of its own.
    """
    with _Forgetting(connection, older_than, most, clock) as removed:
        return removed


async def forget_async(
    connection: Any, *, older_than: float | timedelta, most: int = FORGOTTEN_MAX, clock: Clock | None = None
) -> int:
    """Do what `forget` does, with an asynchronous connection."""
    async with _Forgetting(connection, older_than, most, clock) as removed:
        return removed
