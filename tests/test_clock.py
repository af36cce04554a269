"""What clocks promise: virtual time is deterministic, durations and datetimes convert without loss."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import Clock, SystemClock, VirtualClock, datetime_to_us, seconds, us_to_datetime
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


class Threads:
    """Threads that are all joined at the end of a test, with what they did in one list."""

    def __init__(self) -> None:
        self.journal: list[Any] = []
        self._started: list[threading.Thread] = []

    def start(self, body: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        self._started.append(thread)
        return thread

    def join(self) -> None:
        for thread in self._started:
            thread.join()


@pytest.fixture
def threads() -> Threads:
    return Threads()


# --- the system's clock ------------------------------------------------------------------------------


def test_both_clocks_are_clocks() -> None:
    clocks: list[Clock] = [SystemClock(), VirtualClock()]
    assert all(clock.time_us() > 0 for clock in clocks)


def test_system_wall_time_is_in_microseconds_since_1970(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_767_225_600_000_001_999)
    assert SystemClock().time_us() == 1_767_225_600_000_001


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="CLOCK_BOOTTIME is Linux's")
def test_system_monotonic_time_counts_suspended_time() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = SystemClock().monotonic()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= now <= after


def test_system_monotonic_time_has_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.clock._BOOT_CLOCK", None)
    before = time.monotonic()
    assert before <= SystemClock().monotonic() <= time.monotonic()


async def test_the_system_is_asked_to_sleep_for_as_long_as_the_clock_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    async def asyncio_sleep(seconds: float) -> None:
        asked.append(seconds)

    monkeypatch.setattr(time, "sleep", asked.append)
    monkeypatch.setattr(asyncio, "sleep", asyncio_sleep)
    SystemClock().sleep(60)
    await SystemClock().pause(90)
    assert asked == [60, 90]


@pytest.mark.parametrize("clock", [SystemClock(), VirtualClock()])
async def test_a_sleep_that_is_already_over_returns_at_once(clock: Clock) -> None:
    clock.sleep(0)
    clock.sleep(-1)
    await clock.pause(0)
    await clock.pause(-1)


@pytest.mark.parametrize("clock", [SystemClock(), VirtualClock()])
@pytest.mark.parametrize("duration", [0, -1])
async def test_a_pause_lets_other_tasks_run_even_if_it_is_over(clock: Clock, duration: float) -> None:
    ran: list[str] = []
    asyncio.get_running_loop().call_soon(ran.append, "other")
    await clock.pause(duration)
    assert ran == ["other"]


# --- virtual time ------------------------------------------------------------------------------------


def test_virtual_time_moves_only_when_advanced() -> None:
    clock = VirtualClock(start_us=5_000_000)
    assert (clock.time_us(), clock.monotonic()) == (5_000_000, 0.0)
    clock.advance(1.5)
    clock.advance(timedelta(milliseconds=250))
    assert (clock.time_us(), clock.monotonic()) == (6_750_000, 1.75)


def test_virtual_time_does_not_drift_over_many_small_steps(clock: VirtualClock) -> None:
    for _ in range(10):
        clock.advance(0.1)
    assert clock.monotonic() == 1.0


@pytest.mark.parametrize("by", [-1, float("nan"), float("inf"), True])
def test_virtual_time_never_goes_back(clock: VirtualClock, by: float) -> None:
    with pytest.raises(UsageError, match="the advance of a clock"):
        clock.advance(by)
    assert clock.monotonic() == 0.0


def test_a_wall_clock_jump_leaves_monotonic_time_alone(clock: VirtualClock) -> None:
    wall = clock.time_us()
    clock.advance(10)
    clock.jump_wall(3_600)
    assert clock.time_us() == wall + 3_610_000_000
    clock.jump_wall(-7_200)
    assert clock.time_us() == wall - 3_590_000_000
    assert clock.monotonic() == 10.0


async def test_a_wall_clock_jump_wakes_nobody(clock: VirtualClock) -> None:
    sleeper = asyncio.create_task(clock.pause(5))
    await clock.advance_async(1)
    clock.jump_wall(3_600)
    await clock.advance_async(3)
    assert not sleeper.done()
    await clock.advance_async(1)
    assert sleeper.done()


def test_an_advance_that_overtakes_another_is_not_undone(clock: VirtualClock, threads: Threads) -> None:
    threads.start(lambda: clock.sleep(1))
    clock.wait_for_sleepers(1)
    clock.advance(2, settle=lambda: clock.advance(10))
    assert clock.monotonic() == 11.0
    threads.join()


# --- sleeping threads --------------------------------------------------------------------------------


def test_a_thread_sleeps_until_its_time_has_come(clock: VirtualClock, threads: Threads) -> None:
    thread = threads.start(lambda: clock.sleep(2))
    clock.wait_for_sleepers(1)
    clock.advance(1.999_999)
    # It is still among the sleepers, so this returns.
    clock.wait_for_sleepers(1)
    assert thread.is_alive()
    clock.advance(0.000_001)
    threads.join()


def test_threads_wake_in_the_order_of_their_time(clock: VirtualClock, threads: Threads) -> None:
    done = threading.Semaphore(0)

    def body(duration: float) -> None:
        clock.sleep(duration)
        threads.journal.append((duration, clock.monotonic()))
        done.release()

    for count, duration in enumerate([3, 1, 2], start=1):
        threads.start(partial(body, duration))
        clock.wait_for_sleepers(count)
    clock.advance(10, settle=done.acquire)
    threads.join()
    assert threads.journal == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert clock.monotonic() == 10.0


def test_a_thread_that_sleeps_again_wakes_in_its_turn(clock: VirtualClock, threads: Threads) -> None:
    def body(name: str, duration: float, times: int) -> None:
        for _ in range(times):
            clock.sleep(duration)
            threads.journal.append((name, clock.monotonic()))
        clock.sleep(1_000)

    threads.start(lambda: body("slow", 3, 2))
    clock.wait_for_sleepers(1)
    threads.start(lambda: body("fast", 2, 4))
    clock.wait_for_sleepers(2)
    clock.advance(9, settle=lambda: clock.wait_for_sleepers(2))
    # Both are due at 6, where the slow one comes first: it went to sleep at 3, the fast one at 4.
    assert threads.journal == [
        ("fast", 2.0),
        ("slow", 3.0),
        ("fast", 4.0),
        ("slow", 6.0),
        ("fast", 6.0),
        ("fast", 8.0),
    ]
    clock.advance(2_000)
    threads.join()


# --- sleeping tasks ----------------------------------------------------------------------------------


async def test_tasks_wake_in_the_order_of_their_time_and_see_that_time(clock: VirtualClock) -> None:
    journal: list[tuple[float, float]] = []

    async def sleeper(duration: float) -> None:
        await clock.pause(duration)
        journal.append((duration, clock.monotonic()))

    async with asyncio.TaskGroup() as group:
        for duration in (3, 1, 2):
            group.create_task(sleeper(duration))
        await clock.advance_async(10)
    assert journal == [(1, 1.0), (2, 2.0), (3, 3.0)]


async def test_tasks_due_together_wake_in_the_order_in_which_they_went_to_sleep(clock: VirtualClock) -> None:
    journal: list[int] = []

    async def sleeper(number: int) -> None:
        await clock.pause(1)
        journal.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(sleeper(number))
        await clock.advance_async(1)
    assert journal == list(range(20))


async def test_a_task_that_sleeps_again_wakes_in_its_turn(clock: VirtualClock) -> None:
    journal: list[tuple[str, float]] = []

    async def every(name: str, duration: float, times: int) -> None:
        for _ in range(times):
            await clock.pause(duration)
            journal.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as group:
        group.create_task(every("slow", 3, 2))
        group.create_task(every("fast", 2, 4))
        await clock.advance_async(9)
    assert journal == [
        ("fast", 2.0),
        ("slow", 3.0),
        ("fast", 4.0),
        ("slow", 6.0),
        ("fast", 6.0),
        ("fast", 8.0),
    ]


async def test_work_that_passes_through_several_tasks_ends_before_time_moves_on(clock: VirtualClock) -> None:
    stages: list[asyncio.Queue[float]] = [asyncio.Queue() for _ in range(10)]
    seen: list[tuple[float, float]] = []

    async def relay(source: asyncio.Queue[float], target: asyncio.Queue[float]) -> None:
        while True:
            await target.put(await source.get())

    async def timer() -> None:
        for _ in range(3):
            await clock.pause(1)
            await stages[0].put(clock.monotonic())

    async def last() -> None:
        while len(seen) < 3:
            published = await stages[-1].get()
            seen.append((published, clock.monotonic()))

    relays = [asyncio.create_task(relay(a, b)) for a, b in pairwise(stages)]
    async with asyncio.TaskGroup() as group:
        group.create_task(last())
        group.create_task(timer())
        await clock.advance_async(5)
    for task in relays:
        task.cancel()
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]


async def test_a_cancelled_sleeper_is_forgotten(clock: VirtualClock) -> None:
    cancelled = asyncio.create_task(clock.pause(1))
    other = asyncio.create_task(clock.pause(2))
    await clock.advance_async(0.5)
    cancelled.cancel()
    await clock.advance_async(0.25)
    assert cancelled.cancelled()
    assert len(clock._sleepers) == 1
    await clock.advance_async(1.25)
    assert other.done()
    assert not clock._sleepers


async def test_a_sleeper_cancelled_at_the_moment_it_is_woken_harms_nobody(clock: VirtualClock) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    sleeper = asyncio.create_task(clock.pause(1))
    await clock.advance_async(0)
    clock.advance(1)
    sleeper.cancel()
    await clock.advance_async(1)
    assert sleeper.cancelled()
    assert not errors


async def test_a_task_can_be_woken_from_another_thread(clock: VirtualClock, threads: Threads) -> None:
    def advance() -> None:
        clock.wait_for_sleepers(1)
        clock.advance(1)

    # Nothing else ever wakes the event loop: without the thread this would wait for ever.
    threads.start(advance)
    await clock.pause(1)
    assert clock.monotonic() == 1.0
    threads.join()


async def test_waiting_for_the_rest_of_a_rounding_error_ends(clock: VirtualClock) -> None:
    due = 0.1 + 0.2

    async def until_due() -> None:
        while clock.monotonic() < due:
            await clock.pause(due - clock.monotonic())

    waiter = asyncio.create_task(until_due())
    await clock.advance_async(0.3)
    assert clock.monotonic() < due
    await clock.advance_async(0.000_001)
    assert waiter.done()


@given(durations=st.lists(st.integers(min_value=1, max_value=20), max_size=12), steps=st.integers(1, 5))
def test_every_sleeper_wakes_exactly_on_time_however_the_time_is_divided(durations: list[int], steps: int) -> None:
    def play(step: float) -> list[tuple[int, float]]:
        clock = VirtualClock()
        journal: list[tuple[int, float]] = []

        async def sleeper(duration: int) -> None:
            await clock.pause(duration)
            journal.append((duration, clock.monotonic()))
            await clock.pause(duration)
            journal.append((duration, clock.monotonic()))

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for duration in durations:
                    group.create_task(sleeper(duration))
                while clock.monotonic() < 40:
                    await clock.advance_async(step, turns=5)

        asyncio.run(main())
        return journal

    journal = play(40)
    assert journal == sorted(journal, key=lambda entry: entry[1])
    assert sorted(journal) == sorted((d, float(n * d)) for d in durations for n in (1, 2))
    assert play(steps) == journal


# --- conversions -------------------------------------------------------------------------------------


@given(st.datetimes(timezones=st.just(UTC)))
def test_a_datetime_survives_the_way_through_microseconds(moment: datetime) -> None:
    assert us_to_datetime(datetime_to_us(moment)) == moment


def test_a_datetime_of_another_zone_means_the_same_moment() -> None:
    vienna = datetime(2026, 7, 1, 14, 0, tzinfo=timezone(timedelta(hours=2)))
    assert datetime_to_us(vienna) == datetime_to_us(datetime(2026, 7, 1, 12, 0, tzinfo=UTC))
    assert us_to_datetime(0) == datetime(1970, 1, 1, tzinfo=UTC)
    assert us_to_datetime(-1).tzinfo is UTC


def test_a_naive_datetime_is_refused_with_advice() -> None:
    with pytest.raises(UsageError, match="tzinfo=UTC"):
        datetime_to_us(datetime(2026, 7, 1))  # noqa: DTZ001


@pytest.mark.parametrize("time_us", [1 << 62, -(1 << 62), 1 << 100])
def test_microseconds_beyond_a_datetime_are_refused(time_us: int) -> None:
    with pytest.raises(UsageError, match="years 1 to 9999"):
        us_to_datetime(time_us)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 0.0), (3, 3.0), (0.25, 0.25), (timedelta(minutes=1, milliseconds=5), 60.005), (timedelta(0), 0.0)],
)
def test_a_duration_is_seconds_or_a_timedelta(value: float | timedelta, expected: float) -> None:
    result = seconds(value, "timeout")
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [-1, -0.001, float("nan"), float("inf"), True, False, timedelta(seconds=-1), "5", None, 10**400],
)
def test_a_wrong_duration_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^timeout is "):
        seconds(value, "timeout")


async def test_when_the_next_sleeper_wakes_is_known() -> None:
    clock = VirtualClock()
    assert clock.next_due() is None
    sleepers = [asyncio.ensure_future(clock.pause(seconds)) for seconds in (5.0, 2.0)]
    await clock.advance_async(0.5)
    assert clock.next_due() == 1.5
    await clock.advance_async(2)
    assert clock.next_due() == 2.5
    await clock.advance_async(3)
    await asyncio.gather(*sleepers)
    assert clock.next_due() is None
