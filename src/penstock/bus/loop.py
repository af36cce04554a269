"""Loop: the event loop of a program that runs a bus: that of uvloop where it is installed, else that of asyncio."""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

R = TypeVar("R")


def run_to_end(main: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in a new event loop, as `asyncio.run` does, and return what it returns."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
