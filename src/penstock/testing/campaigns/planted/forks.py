"""Hunts for planted bugs with forks: whose turn it is when a process forks, ends while its child lives on, or fails.

Each returns what is wrong, in words, or None; and each finds nothing in code that is right.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import warnings
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import WriterStalled
from penstock.stores.file.gate import Gate, shared_gates
from penstock.stores.file.platform import Platform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STALL_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 20.0
DONE: Final = b"+"


@contextmanager
def _lock_file() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    try:
        yield directory / "locks"
    finally:
        shutil.rmtree(directory)


def _gate(path: Path) -> Gate:
    return shared_gates(path, Platform()).gate(9)


@contextmanager
def _forked(work: Callable[[Callable[[], object]], None]) -> Iterator[int]:
    """Run work in a child, which is gone after this block; what it calls when it is done can be heard from the pipe."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 dislikes forks, which are the point here
        child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(lambda: os.write(writing, DONE))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield reading
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _is_done(reading: int) -> bool:
    ready, _, _ = select.select([reading], [], [], PATIENCE_SECONDS)
    return bool(ready) and os.read(reading, 1) == DONE


def a_child_forked_in_a_turn() -> str | None:
    """Fork in the middle of a turn; when that has ended, the child must get a turn of its own."""
    with _lock_file() as path, ExitStack() as children:

        def take_a_turn(done: Callable[[], object]) -> None:
            with _gate(path).turn("the child's", STALL_SECONDS):
                done()

        with _gate(path).turn("the parent's", STALL_SECONDS):
            reading = children.enter_context(_forked(take_a_turn))
        return None if _is_done(reading) else "a child that was forked in a turn never gets one"


def a_turn_outlived_by_a_child() -> str | None:
    """End a process in its turn whose child lives on; others must get the turn."""
    living, ending = os.pipe()

    def end_in_a_turn(done: Callable[[], object]) -> None:
        with _gate(path).turn("the dead one's", STALL_SECONDS):
            if os.fork() == 0:
                os.close(ending)
                os.read(living, 1)  # until the one who asks has closed the other end
            else:
                done()
            os._exit(0)

    try:
        with _lock_file() as path, _forked(end_in_a_turn) as reading:
            assert _is_done(reading)
            with _gate(path).turn("mine", STALL_SECONDS):
                return None
    except WriterStalled as error:
        return f"a process ended in its turn, and nobody gets it: {error}"
    finally:
        os.close(ending)
        os.close(living)


def a_turn_whose_work_failed() -> str | None:
    """Let work fail in a turn that had to be waited for; whoever had it before must get it again."""
    waiting, going = os.pipe()

    def take_two_turns(done: Callable[[], object]) -> None:
        with _gate(path).turn("the child's first", STALL_SECONDS):
            done()
            os.read(waiting, 1)
        os.read(waiting, 1)
        with _gate(path).turn("the child's second", STALL_SECONDS):
            done()

    def go_on() -> None:
        os.write(going, DONE)

    def fail() -> None:
        go_on()
        raise InterruptedError

    try:
        with _lock_file() as path, _forked(take_two_turns) as reading:
            assert _is_done(reading)
            with suppress(InterruptedError):
                _gate(path).run(fail, "mine", PATIENCE_SECONDS, prepare=go_on)
            return None if _is_done(reading) else "work has failed in a turn, and nobody else gets it any more"
    finally:
        os.close(going)
        os.close(waiting)
