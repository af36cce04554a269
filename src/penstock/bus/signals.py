"""Signals: how a process that runs subscribers is told to end.

The first SIGTERM or SIGINT asks for an orderly end, a second one for a quick one. They are caught while the block
lasts, and only where Python lets a program catch signals, in the main thread: elsewhere somebody else decides.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


class Ending:
    """What signals have asked for so far."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        self.at_once: list[Callable[[], None]] = []
        """What is called when an end is asked for, before anybody who waits for it has a turn."""

    def ask(self, by: signal.Signals | None = None) -> None:
        """Ask for an end; a second time, for a quick one."""
        if self.asked.is_set():
            self.hurry.set()
        else:
            self.asked.set()
            for call in self.at_once:
                call()
            logger.info("%s: draining; a second one ends handlers at once", "asked to end" if by is None else by.name)


@contextmanager
def caught() -> Iterator[Ending]:
    """Catch SIGTERM and SIGINT within a block.

    What Python knows to have handled them does so again afterwards; what was installed from C it cannot bring back.
    """
    ending = Ending()
    loop = asyncio.get_running_loop()
    catching = [signal.SIGTERM, signal.SIGINT] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.getsignal(number) for number in catching}
    for number in catching:
        loop.add_signal_handler(number, ending.ask, number)
    try:
        yield ending
    finally:
        for number in catching:
            loop.remove_signal_handler(number)
            if (handler := before[number]) is not None:
                signal.signal(number, handler)
