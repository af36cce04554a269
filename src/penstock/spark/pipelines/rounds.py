"""Rounds: how a pipeline runs, once or for ever, and how it is told to end.

The first SIGTERM or SIGINT lets the round under way end. A second one interrupts it, which loses nothing either: only
what that round has done so far is done again.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

PAUSE_SECONDS: Final = 5.0
"""How long a continuous pipeline waits after a round that found nothing to do."""


class Round(Protocol):
    """What one round has done."""

    @property
    def idle(self) -> bool:
        """Whether there was nothing to do."""


R = TypeVar("R", bound=Round)


class Ending:
    """Whether a pipeline shall end."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        """Whether it shall."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Let the round under way be the last."""
        self._asked.set()

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until an end is asked for; say whether it was."""
        return self._asked.wait(seconds)


@contextmanager
def caught() -> Iterator[Ending]:
    """Catch SIGTERM and SIGINT within a block, if this is the main thread."""
    ending = Ending()

    def ask(number: int, _frame: FrameType | None) -> None:
        if ending.asked:
            raise KeyboardInterrupt(signal.Signals(number).name)
        ending.ask()

    catching = [signal.SIGTERM, signal.SIGINT] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, ask) for number in catching}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def rounds(
    make: Callable[[], R],
    *,
    continuous: bool = False,
    ending: Ending | None = None,
    pause_seconds: float = PAUSE_SECONDS,
) -> Iterator[R]:
    """Make one round, or one after the other until an end is asked for; yields what each has done.

    What a round raises ends them, also continuous ones: whoever keeps the process running starts it anew.
    """
    ending = ending or Ending()
    while True:
        done = make()
        yield done
        if not continuous or ending.asked or (done.idle and ending.wait(pause_seconds)):
            return
