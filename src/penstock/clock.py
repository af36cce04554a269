"""Time, given as an argument: `SystemClock` for programs, `VirtualClock` for tests and the simulator.

What this module promises:

* Wall time is an integer, microseconds since 1970 in UTC. It is for people and for events; it may jump.
* Monotonic time is in seconds from an arbitrary point and never goes back. It counts the time that the
  machine was suspended, because a lease must expire while its holder sleeps. It means nothing on another
  machine or after a reboot.
* On a `VirtualClock` time moves only when told to, so that the same test takes the same steps every time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import insort
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST_SECONDS = timedelta.max.total_seconds()

# CLOCK_BOOTTIME is Linux's name for it. The CLOCK_MONOTONIC of macOS counts suspended time, too, unlike
# `time.monotonic()` there, which is what remains for other systems.
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


class Clock(Protocol):
    """What tells the time and waits. Safe to use from any thread."""

    def time_us(self) -> int:
        """Return the wall clock, in microseconds since 1970 in UTC."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary point, suspended time included. Never goes back."""

    def sleep(self, seconds: float) -> None:
        """Block this thread. Zero or less returns at once.

        A sleep may end late but not early. Ask `monotonic` afterwards how late it is.
        """

    async def pause(self, seconds: float) -> None:
        """Let other tasks of the event loop run until the time has passed, and at least once."""


class SystemClock:
    """The machine's clock."""

    def time_us(self) -> int:
        """See `Clock`."""
        return time.time_ns() // 1_000

    def monotonic(self) -> float:
        """See `Clock`."""
        return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)

    def sleep(self, seconds: float) -> None:
        """See `Clock`. The kernel does not count suspended time here, so a suspended sleep ends late."""
        time.sleep(max(seconds, 0.0))

    async def pause(self, seconds: float) -> None:
        """See `Clock`, and `sleep` about suspended time."""
        await asyncio.sleep(seconds)


class VirtualClock:
    """A clock that moves only by `advance`, in whole microseconds.

    Sleepers wake one at a time, in the order of when they are due, then of when they went to sleep, and
    the clock stands at that moment when they do. What the clock cannot know is when a sleeper that
    it woke has done its work, perhaps to sleep again before the clock's goal. So that it is woken in its
    turn, say how to wait for it:

    * tasks: `await clock.advance_async(10)` runs the event loop between one sleeper and the next;
    * threads: `clock.advance(10, settle=…)` calls `settle` between one sleeper and the next. With two
      threads that do nothing but loop over `sleep`, that is `lambda: clock.wait_for_sleepers(2)`.

    A plain `advance` wakes those who sleep already and leaves the rest to the scheduler.
    """

    def __init__(self, start_us: int = 1_767_225_600_000_000) -> None:  # 2026-01-01
        self._wall_us = start_us
        self._elapsed_us = 0
        # (due, number, wake), sorted. The number makes equal dues a queue and is never equal itself.
        self._sleepers: list[tuple[int, int, Callable[[], object]]] = []
        self._number = 0
        self._changed = threading.Condition()

    def time_us(self) -> int:
        """See `Clock`."""
        with self._changed:
            return self._wall_us + self._elapsed_us

    def monotonic(self) -> float:
        """Return the seconds by which the clock was advanced so far."""
        return self._elapsed_us / 1_000_000

    def sleep(self, seconds: float) -> None:
        """See `Clock`. Only another thread's `advance` ends it."""
        if seconds > 0:
            woken = threading.Event()
            with self._asleep(seconds, woken.set):
                woken.wait()

    async def pause(self, seconds: float) -> None:
        """See `Clock`."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        # The clock may be advanced by a thread that is not the loop's.
        with self._asleep(seconds, lambda: loop.call_soon_threadsafe(_resolve, woken)):
            await woken

    @contextmanager
    def _asleep(self, seconds: float, wake: Callable[[], object]) -> Iterator[None]:
        with self._changed:
            # A positive wait shorter than the clock's grain must still let time pass, or else a loop that
            # waits for the remainder of a rounding error would never end.
            due_us = self._elapsed_us + max(round(seconds * 1_000_000), 1)
            self._number += 1
            sleeper = (due_us, self._number, wake)
            insort(self._sleepers, sleeper)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                # It is still there if the sleep was cancelled.
                if sleeper in self._sleepers:
                    self._sleepers.remove(sleeper)

    def wait_for_sleepers(self, count: int) -> None:
        """Block, in real time, until at least `count` threads and tasks sleep on this clock."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._sleepers) >= count)

    def next_due(self) -> float | None:
        """Return in how many seconds the first sleeper wakes; None if nobody sleeps."""
        with self._changed:
            return (self._sleepers[0][0] - self._elapsed_us) / 1_000_000 if self._sleepers else None

    def advance(self, by: float | timedelta, *, settle: Callable[[], object] | None = None) -> None:
        """Move time on, waking who is due on the way and calling `settle` after each."""
        goal_us = self._goal(by)
        while self._wake_next(goal_us):
            if settle is not None:
                settle()

    async def advance_async(self, by: float | timedelta, *, turns: int = 50) -> None:
        """Move time on, waking who is due on the way and giving the event loop `turns` after each.

        A turn lets every task that can run go on to its next `await`. Take more turns if a woken task's
        work passes through longer chains of tasks before it sleeps again.
        """
        goal_us = self._goal(by)
        # Tasks that were created just before get to sleep first.
        await _yield(turns)
        while self._wake_next(goal_us):
            await _yield(turns)

    def _goal(self, by: float | timedelta) -> int:
        return self._elapsed_us + round(seconds(by, "the advance of a clock") * 1_000_000)

    def _wake_next(self, goal_us: int) -> bool:
        with self._changed:
            wake = None
            if self._sleepers and self._sleepers[0][0] <= goal_us:
                goal_us, _, wake = self._sleepers.pop(0)
            # The larger of the two, in case that `settle` or another thread has advanced the clock further.
            self._elapsed_us = max(self._elapsed_us, goal_us)
        if wake is not None:
            wake()
        return wake is not None

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward, or back if negative. Nobody wakes: sleeps are monotonic."""
        with self._changed:
            self._wall_us += round(seconds * 1_000_000)


def _resolve(woken: asyncio.Future[None]) -> None:
    # A cancelled sleeper's future is done already.
    if not woken.done():
        woken.set_result(None)


async def _yield(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


def datetime_to_us(moment: datetime) -> int:
    """Turn an aware datetime into microseconds since 1970 in UTC, exactly."""
    if moment.utcoffset() is None:
        raise UsageError(f"{moment!r} has no time zone: add tzinfo=UTC, or the zone that it is meant in")
    return (moment - _EPOCH) // _MICROSECOND


def us_to_datetime(time_us: int) -> datetime:
    """Turn microseconds since 1970 into a datetime in UTC, exactly."""
    try:
        return _EPOCH + time_us * _MICROSECOND
    except OverflowError:
        raise UsageError(f"{time_us} µs since 1970 is outside the years 1 to 9999 of a datetime") from None


def seconds(value: float | timedelta, what: str) -> float:
    """Turn a duration of the public API into seconds; `what` names it if it is none."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    # A bool is an int to Python, but `timeout=True` is a mistake.
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise UsageError(f"{what} is a number of seconds or a timedelta, not {value!r}")
    # Neither NaN nor infinity lies between two numbers.
    if not 0 <= number <= _LONGEST_SECONDS:
        raise UsageError(f"{what} is from 0 seconds up to timedelta.max, which {value!r} is not")
    return float(number)
