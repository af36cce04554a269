"""Blocks of an application's own connection: each a transaction, or a part of one, and one at a time.

`penstock.inbox` promises what they do. A block begins a transaction if its connection is in none, and is a savepoint
of it otherwise. Tasks that are started in a block are in it: each that opens one of its own on the same connection
waits for its turn, and the outer block ends after theirs.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextvars import ContextVar, Token
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from penstock.connections import Driver, Execute, Steps, kind_of
from penstock.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

R = TypeVar("R")

_SAVEPOINT = "penstock_once"


class Savepoint(NamedTuple):
    """What makes a savepoint, what ends it, and what undoes all since it was made, inner savepoints included."""

    save: Execute
    release: Execute
    go_back: Execute


@cache
def savepoint(depth: int) -> Savepoint:
    """Return that of a block with so many others of its connection around it, each of which has a name of its own."""
    name = f"{_SAVEPOINT}_{depth}" if depth else _SAVEPOINT
    statements = (f"SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}", f"ROLLBACK TO SAVEPOINT {name}")
    return Savepoint(*map(Execute, statements))


class Block(ABC, Generic[R]):
    """A block that is a transaction, or a part of one; both a context manager and an asynchronous one."""

    __slots__ = (
        "_connection",
        "_entered",
        "_entry",
        "_kind",
        "begun",
        "cut",
        "depth",
        "ended",
        "open",
        "outer",
        "stack",
        "task",
    )

    _entry: Token[Block[Any] | None]
    outer: Block[Any] | None
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
        self.stack: list[Block[Any]] | None = None
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

    def _occupy(self, turn: Block[Any] | None = None) -> Block[Any] | None:
        """Take the connection, unless it is in a block that this task is not in: then return that one.

        `turn` is a block within which it may enter even if that waits for its end.
        """
        present = _present.setdefault(id(self._connection), self)
        around = _around.get()
        if present is not self and (other := self._join(present, around, turn)) is not None:
            return other
        self.open = True
        self.outer = around
        self._entry = _around.set(self)
        return None

    def _join(self, outermost: Block[Any], around: Block[Any] | None, turn: Block[Any] | None) -> Block[Any] | None:
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
            try:
                _around.reset(self._entry)  # so that the context is what it was
            except ValueError:  # it was entered in another context
                _around.set(self.outer)
            if outer is not self.outer:
                _around.set(outer)
        if self.stack is None:
            del _present[id(self._connection)]
        else:
            self._part(self.stack)
        if self.ended is not None:
            self.ended.set()

    def _part(self, stack: list[Block[Any]]) -> None:
        key = id(self._connection)
        with _joining:
            stack.remove(self)
            if _present.get(key) is not self:
                return
            if stack:  # those that it has cut off have the connection until they end
                _present[key] = stack[0]
            else:
                del _present[key]

    async def _take_turn(self, other: Block[Any] | None) -> None:
        """Take the connection as soon as it is in no block that this task is not in; `other` is the first of those."""
        blocks = () if other is None else other.stack or ()
        turn = _around.get()
        while turn is not None and not (turn.open and turn in blocks):
            turn = turn.outer
        while other is not None:
            await self._end_of(other)
            other = self._occupy(turn)

    async def _await_inner(
        self, stack: list[Block[Any]], failure: BaseException | None
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

    async def _end_of(self, other: Block[Any]) -> None:
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
    def _savepoint(self) -> Savepoint:
        return savepoint(self.depth)

    @property
    def _inner(self) -> list[Block[Any]]:
        """The blocks within this one that have not ended yet."""
        return [] if self.stack is None else self.stack[self.stack.index(self) + 1 :]


_present: dict[int, Block[Any]] = {}
"""The outermost block of each connection that is in one, by the connection's id: it lives as long as its block."""

_joining = threading.Lock()
"""Held while a block enters within another one, or ends there: threads may do so at the same time."""

_around: ContextVar[Block[Any] | None] = ContextVar("penstock_inbox_around", default=None)
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
