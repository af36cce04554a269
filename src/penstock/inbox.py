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

import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.blocks import Block, savepoint
from penstock.clock import Clock, SystemClock, seconds
from penstock.connections import Execute, Steps
from penstock.errors import UsageError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from types import TracebackType

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
_SAVE, _RELEASE, _ = savepoint(0)


# --- marking ----------------------------------------------------------------------------------


class Once(Block[bool]):
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


class _Forgetting(Block[int]):
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
