"""Turns: who may write, among the threads of all processes that share a store.

**Fair.** A gate is two record locks, Q and W: take Q, take W, release Q, write, release W. Whoever has W comes last to
Q again, so that eight busy processes get nearly equal numbers of turns, where one lock alone would let the quickest
starve the rest.

**A dead holder harms nobody**: its locks vanish with it. **A frozen one** stalls its gate; whoever waits for longer
than `stall_seconds` without seeing anything move gets `WriterStalled` with its process number. Nobody ever writes
without the turn.

**Threads** of one process exclude each other by a mutex in front of the locks, which are the process's as a whole.
There is one set of gates per lock file and process, however often a store is opened, because closing any descriptor
of a file drops all locks on it. **After a fork** the child begins with none: the parent's locks are not its own.

A turn that cannot be had at once is waited for in a thread of its own, as a wait in the kernel has no time limit. If
its time is over, that thread goes on waiting, and takes what it gets for whoever wants the turn then, or gives it back.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import WriterStalled
from penstock.stores.file.platform import RecordLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.stores.file.platform import Platform

TOPICS_GATE = 0
"""Creating and deleting topics."""
CONTROL_GATE = 1
"""Writing to `control.db`."""
BULK_GATE = 2
"""Writing to `bulk.db`."""
PARTITIONS_GATE = 8
"""The gate of slot 0 of the tails; the others follow."""
MEMBERS_BYTE = 1 << 40
"""The lock byte of member 0: far above those of all gates."""

IDLE_SECONDS = 1.0
"""So long a thread that has waited for a turn stays, in case that it is needed again."""
LOOKS_PER_STALL = 5
"""A waiter looks so often within its time whether anything has moved."""


class Gate:
    """One fair gate; make it through `Gates`."""

    def __init__(self, locks: RecordLocks, number: int, spawn: Callable[[str, Callable[[], None]], object]) -> None:
        self._locks = locks
        self._queue_byte, self._write_byte = 2 * number, 2 * number + 1
        self._spawn = spawn
        self._mutex = threading.Lock()
        self._changed = threading.Condition()
        # Of the thread that waits in the kernel, guarded by `_changed`.
        self._waiting = False
        self._granted = False
        self._wanted = False
        self._idle = False
        self._failure: OSError | None = None
        self._task: _Task | None = None

    @contextmanager
    def turn(
        self, what: object, stall_seconds: float, *, progress: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Hold the turn in this block; `WriterStalled` if the holder does not move, nothing having been done.

        `progress` returns something that changes whenever the holder of the turn gets on.
        """
        self._acquire(what, stall_seconds, progress)
        try:
            yield
        finally:
            self._release()

    def run(
        self,
        work: Callable[[], None],
        what: object,
        stall_seconds: float,
        *,
        progress: Callable[[], object] = lambda: None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        """Do some work in a turn; see `turn`. If the turn must be waited for, the thread that gets it does the work.

        So a turn that many processes wait for does not stand still while one thread wakes another. `prepare` is called
        before waiting, while no other thread of this process can have the turn.
        """
        patience = _Patience(stall_seconds, lambda: (self.holder(), progress()))
        while not self._mutex.acquire(timeout=patience.look_seconds):
            patience.check(what)
        try:
            if self._try_to_get():
                try:
                    work()
                finally:
                    self._locks.unlock(self._write_byte)
                return
            prepare()
            with self._changed:
                task = self._task = _Task(work)
                self._begin_to_wait()
            self._await(task, what, patience)
        finally:
            self._mutex.release()

    def _await(self, task: _Task, what: object, patience: _Patience) -> None:
        try:
            while not task.done.acquire(timeout=patience.look_seconds):
                if not task.begun:
                    patience.check(what)
        except BaseException:
            with self._changed:
                if not task.begun:
                    self._task = None
                    raise
            task.wait()  # it is being done, and the turn must not be given on before it ends
            raise
        if task.error is not None:
            raise task.error

    def _try_to_get(self) -> bool:
        """Take the turn if it is free, and nobody queues for it. The mutex is held."""
        # A thread may be waiting for somebody who has lost patience. The locks are the process's, so that trying them
        # would succeed if that thread has them; they would be gone when it gives them back.
        with self._changed:
            if self._waiting or not self._locks.try_lock(self._queue_byte):
                return False
            try:
                return self._locks.try_lock(self._write_byte)
            finally:
                self._locks.unlock(self._queue_byte)

    def holder(self) -> int | None:
        """Return the other process that has the turn now, if any."""
        return self._locks.holder(self._write_byte)

    def _release(self) -> None:
        try:
            self._locks.unlock(self._write_byte)
        finally:
            self._mutex.release()

    def _acquire(self, what: object, stall_seconds: float, progress: Callable[[], object]) -> None:
        patience = _Patience(stall_seconds, lambda: (self.holder(), progress()))
        while not self._mutex.acquire(timeout=patience.look_seconds):
            patience.check(what)
        try:
            self._acquire_from_others(what, patience)
        except BaseException:
            self._mutex.release()
            raise

    def _acquire_from_others(self, what: object, patience: _Patience) -> None:
        if self._try_to_get():
            return
        with self._changed:
            self._begin_to_wait()
            self._wanted = True
            try:
                while not self._granted:
                    if not self._changed.wait(patience.look_seconds) and not self._granted:
                        patience.check(what)
                    if self._failure is not None:
                        raise self._failure  # noqa: TRY301 - what follows is for every error
            except BaseException:
                if self._granted:  # in the moment of an interrupt
                    self._locks.unlock(self._write_byte)
                raise
            finally:
                self._wanted = self._granted = False

    def _begin_to_wait(self) -> None:
        """Let a thread wait in the kernel: one that does already, or did so last, or a new one. `_changed` is held."""
        if self._waiting:
            return
        if self._idle:
            self._idle = False
            self._changed.notify_all()
        else:
            self._spawn("penstock-turn", self._serve)
        self._waiting, self._failure = True, None

    def _serve(self) -> None:
        """Wait in the kernel whenever somebody wants the turn; end after a while without anything to do."""
        while True:
            failure = self._wait_in_kernel()
            with self._changed:
                self._waiting = False
                task, self._task = self._task, None
                if task is not None:
                    task.begun = True
                else:
                    self._failure = failure
                    self._granted = failure is None and self._wanted
                    if failure is None and not self._wanted:  # everybody has lost patience meanwhile
                        self._locks.unlock(self._write_byte)
                    self._changed.notify_all()
            if task is not None:
                # Whoever wants it done holds the mutex, so that nobody else of this process comes between.
                task.do(failure)
                if failure is None:
                    unlocking = self._unlocked()  # whatever became of the work
                    task.error = task.error or unlocking
            with self._changed:
                if task is not None:
                    task.done.release()
                if self._rest():
                    return

    def _rest(self) -> bool:
        """Wait until a turn has to be waited for again; True if there was none. `_changed` is held."""
        if self._waiting or self._idle:  # somebody was quicker, and has started another thread: one must be enough
            return True
        self._idle = True
        self._changed.wait_for(lambda: not self._idle, IDLE_SECONDS)
        was_idle, self._idle = self._idle, False
        return was_idle

    def _unlocked(self) -> OSError | None:
        try:
            self._locks.unlock(self._write_byte)
        except OSError as error:  # this thread must go on to answer
            return error
        return None

    def _wait_in_kernel(self) -> OSError | None:
        try:
            self._locks.lock(self._queue_byte)
            self._locks.lock(self._write_byte)
            self._locks.unlock(self._queue_byte)
        except OSError as error:  # such as a system that has no locks left
            return error
        return None


class _Task:
    """Work that is done by the thread that has got the turn for it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.begun = False
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self) -> None:
        """Return when it is done, whatever comes in between."""
        while True:
            try:
                self.done.acquire()
            except BaseException:  # noqa: BLE001, S112 - a second interrupt; the first is raised when this returns
                continue
            return

    def do(self, failure: OSError | None) -> None:
        """Do it, or say why it cannot be done."""
        self.error = failure
        if failure is None:
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 - it is raised by the thread that wants it done
                self.error = error


class _Patience:
    """Ends when nothing has moved for too long."""

    def __init__(self, stall_seconds: float, look: Callable[[], tuple[int | None, object]]) -> None:
        self._stall_seconds = stall_seconds
        self._look = look
        self._seen: tuple[int | None, object] | None = None
        self._looks = 0
        self.look_seconds = stall_seconds / LOOKS_PER_STALL

    def check(self, what: object) -> None:
        """Count a look in vain; `WriterStalled` after too many without a change."""
        seen = self._look()
        self._looks = self._looks + 1 if seen == self._seen else 1
        self._seen = seen
        if self._looks > LOOKS_PER_STALL:
            raise WriterStalled(str(what), seen[0], self._stall_seconds)


class Gates:
    """All gates of one lock file in this process, and the bytes that tell which members are alive."""

    def __init__(self, locks: RecordLocks, platform: Platform) -> None:
        self._platform = platform
        self._locks = locks
        self._mutex = threading.Lock()
        self._gates: dict[int, Gate] = {}

    def gate(self, number: int) -> Gate:
        """Return the gate of this number, the same one for everybody in this process."""
        with self._mutex:
            if number not in self._gates:
                self._gates[number] = Gate(self._locks, number, self._platform.spawn)
            return self._gates[number]

    def enter(self, member: int) -> None:
        """Hold the member's byte until this process ends or `leave`s."""
        self._locks.try_lock(MEMBERS_BYTE + member)

    def leave(self, member: int) -> None:
        """Give the member's byte back."""
        self._locks.unlock(MEMBERS_BYTE + member)

    def is_alive(self, member: int) -> bool:
        """Say whether another process holds this member's byte; of its own ones a process knows."""
        return self._locks.holder(MEMBERS_BYTE + member) is not None


_shared: dict[RecordLocks, Gates] = {}
_shared_mutex = threading.Lock()
_abandoned: list[object] = []


def shared_gates(path: Path, platform: Platform) -> Gates:
    """Return this process's gates for a lock file; made once, and kept for as long as the file has a name."""
    locks = platform.record_locks(path)
    with _shared_mutex:
        if locks not in _shared:
            _shared[locks] = Gates(locks, platform)
        return _shared[locks]


def abandon_after_fork() -> None:
    """Forget everything that this child inherited, without closing it: it is the parent's."""
    global _shared_mutex  # noqa: PLW0603 - the parent's may be held by a thread that the child does not have
    _abandoned.append(dict(_shared))
    _shared.clear()
    _shared_mutex = threading.Lock()


os.register_at_fork(after_in_child=abandon_after_fork)
