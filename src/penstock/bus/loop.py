"""Loop: the event loop of a program that runs a bus: that of uvloop where it is installed, else that of asyncio."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

R = TypeVar("R")


LEAVE_SECONDS: Final = 1.0
"""How long tasks have to end that are cancelled when the main one has ended."""


def run_to_end(main: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in a new event loop, as `asyncio.run` does, and return what it returns.

    But `asyncio.run` waits for ever for a task that does not let itself be cancelled, as handlers may; here it is left
    behind.
    """
    runner = asyncio.Runner(loop_factory=_factory())
    stubborn: set[asyncio.Task[Any]] = set()
    try:
        return runner.run(_without_others(main, stubborn))
    finally:
        if not stubborn:
            runner.close()


async def _without_others(main: Coroutine[Any, Any, R], stubborn: set[asyncio.Task[Any]]) -> R:
    """Await something, and then let all other tasks end; those that do not are added to the stubborn ones."""
    try:
        return await main
    finally:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            _, left = await asyncio.wait(others, timeout=LEAVE_SECONDS)
            stubborn |= left


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
