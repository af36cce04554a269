"""The scheduler under crashes, competitors and trouble, on a virtual clock; and in processes that are killed."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.growth import growth

from penstock import Bus, Event, Topic
from penstock.bus.local import Local
from penstock.clock import VirtualClock
from penstock.errors import (
    Fenced,
    StoreClosed,
    StoreFull,
)
from penstock.rows import Scheduled
from penstock.runtime.scheduler import Scheduler
from penstock.settings import Settings
from penstock.stores import open_store
from penstock.stores.memory import MemoryStore

raw = Topic("raw", bytes)
keyed = Topic("keyed", bytes, partitions=4)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
async def bus(store: MemoryStore, clock: VirtualClock) -> AsyncIterator[Bus]:
    async with a_bus(store, clock) as opened:
        yield opened


def a_bus(store: MemoryStore, clock: VirtualClock, **options: Any) -> Bus:
    return Bus("memory:", topics=[raw, keyed], store=store, clock=clock, **options)


def a_scheduler(store: MemoryStore, clock: VirtualClock, owner: str = "test") -> Scheduler:
    """Return a scheduler that is not running yet, over a store that stays open."""
    host = Local("memory:", settings=Settings(), clock=clock, store=store)
    host._store = store  # open, without a thread
    return Scheduler(host, owner=owner, clock=clock, jitter=lambda: 0.0)


async def published(bus: Bus, topic: Topic[bytes] = raw) -> list[bytes]:
    return [event.data async for event in bus.read(topic)]


def once(function: Callable[..., Any], error: BaseException, *, after: bool = False) -> Callable[..., Any]:
    """Return the function, failing at its first call: before it does anything, or after it has done it."""
    calls = 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return function(*args, **options)
        if after:
            function(*args, **options)
        raise error

    return failing


# --- crashes and competitors -----------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["schedule.claim", "log.append", "schedule.done"])
async def test_a_crash_at_any_step_publishes_exactly_once(
    store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    async with a_bus(store, clock) as bus:
        for number in range(20):
            await bus.publish(keyed, b"%d" % number, key=f"k{number % 5}", delay=10)
    clock.advance(10)
    port, name = step.split(".")
    function = getattr(getattr(store, port), name)
    # As a crash, it ends the task at once, with nothing caught and nothing given back.
    monkeypatch.setattr(getattr(store, port), name, once(function, asyncio.CancelledError(), after=after))
    crashed = a_scheduler(store, clock, "crashed")
    crashed.start()
    await clock.advance_async(0)
    assert crashed._task is not None
    assert crashed._task.cancelled()
    async with a_bus(store, clock) as bus:
        await clock.advance_async(15)  # the dead one's lease expires first
        found = await published(bus, keyed)
        assert sorted(map(int, found)) == list(range(20))
        assert await bus.scheduled() == []


async def test_two_schedulers_on_one_store_publish_each_event_once(store: MemoryStore, clock: VirtualClock) -> None:
    async with a_bus(store, clock) as one, a_bus(store, clock) as two:
        for number in range(100):
            await (one, two)[number % 2].publish(raw, b"%d" % number, delay=number * 0.3)
        await clock.advance_async(60)
        assert sorted(map(int, await published(one))) == list(range(100))


async def test_another_bus_takes_over_when_the_first_one_closes(store: MemoryStore, clock: VirtualClock) -> None:
    async with a_bus(store, clock) as one, a_bus(store, clock) as two:
        await one.publish(raw, b"first", delay=0)
        await two.publish(raw, b"second", delay=1)
        await clock.advance_async(0.5)
        await one.close()
        assert store.leases.holder("schedule") is None
        await clock.advance_async(0.6)
        assert await published(two) == [b"first", b"second"]


async def test_a_scheduler_that_is_fenced_steps_down_and_its_successor_goes_on(
    store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_bus(store, clock) as bus:
        await bus.publish(raw, b"x", delay=1)
        append = store.log.append

        def overtaken(*args: Any) -> Any:
            # While it appends, its lease expires and another takes it.
            monkeypatch.setattr(store.log, "append", append)
            held = store.leases.holder("schedule")
            assert held is not None
            store.leases.release(held)
            assert store.leases.acquire("schedule", "another", 2)
            return append(*args)

        monkeypatch.setattr(store.log, "append", overtaken)
        await clock.advance_async(1)
        assert await published(bus) == [b"x"]
        assert len(await bus.scheduled()) == 1  # it could not say `done`
        await clock.advance_async(2.6)  # the other lets its lease expire, without having done anything
        assert await published(bus) == [b"x"]
        assert await bus.scheduled() == []


async def test_a_lease_is_kept_while_there_is_work_and_costs_nothing_without(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any], *args: Any) -> Any:
        calls.append(name)
        return function(*args)

    for name in ("acquire", "renew"):
        monkeypatch.setattr(store.leases, name, partial(counted, name, getattr(store.leases, name)))
    await clock.advance_async(60)
    assert calls == []
    for second in range(30):
        await bus.publish(raw, b"x", delay=second)
    await clock.advance_async(30)
    assert len(await published(bus)) == 30
    assert calls.count("acquire") == 1
    assert 5 <= calls.count("renew") <= 10


# --- trouble ---------------------------------------------------------------------------------


async def test_a_failing_store_is_tried_again_and_again_and_said_once(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim, attempts = store.schedule.claim, []

    def failing(*args: Any) -> Any:
        attempts.append(clock.monotonic())
        raise StoreFull("no space") if len(attempts) < 30 else OSError("broken")

    await bus.publish(raw, b"x", delay=1)
    with caplog.at_level(logging.INFO, "penstock.runtime"):
        monkeypatch.setattr(store.schedule, "claim", failing)
        await clock.advance_async(1_500)
        monkeypatch.setattr(store.schedule, "claim", claim)
        await clock.advance_async(31)
    assert await published(bus) == [b"x"]
    waits = [later - earlier for earlier, later in pairwise(attempts)]
    assert all(0.5 <= wait <= 30 for wait in waits)
    assert waits[0] <= 1
    assert all(wait >= 15 for wait in waits[5:])
    shown = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in shown] == ["WARNING", "WARNING", "INFO"]
    assert ["no space" in shown[0][1], "broken" in shown[1][1], "goes on" in shown[2][1]] == [True] * 3


async def test_a_partition_that_cannot_be_written_does_not_hold_up_the_others(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = store.log.append

    def failing(partition: Any, batch: Any, runs: Any) -> Any:
        if partition.number == 2:
            raise OSError("broken")
        return append(partition, batch, runs)

    for number in range(40):
        await bus.publish(keyed, b"%d" % number, key=f"k{number}", delay=1)
    with monkeypatch.context() as patch:
        patch.setattr(store.log, "append", failing)
        await clock.advance_async(1)
        assert len(await published(bus, keyed)) == 40 - len(await bus.scheduled()) > 0
    await clock.advance_async(30)
    assert sorted(map(int, await published(bus, keyed))) == list(range(40))


async def test_what_was_scheduled_for_a_deleted_topic_is_dropped(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    claim = store.schedule.claim

    def deleted_meanwhile(*args: Any) -> Any:
        rows = claim(*args)
        monkeypatch.setattr(store.schedule, "claim", claim)
        store.log.delete_topic(rows[0].log_id)
        return rows

    await bus.publish(keyed, b"gone", delay=1)
    await bus.publish(raw, b"there", delay=1.1)
    monkeypatch.setattr(store.schedule, "claim", deleted_meanwhile)
    await clock.advance_async(1.1)
    assert await published(bus) == [b"there"]
    assert await bus.scheduled() == []
    assert caplog.records == []


async def test_what_the_log_refuses_stays_scheduled_and_holds_up_nothing(
    bus: Bus, store: MemoryStore, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await bus.publish(raw, b"first", delay=1)
    await clock.advance_async(1)
    # As after restoring an older copy of the schedule: its next sequence is taken.
    store.schedule._next_sequence.clear()
    await bus.publish(raw, b"refused", delay=1)
    await bus.publish(raw, b"second", delay=1)
    await clock.advance_async(5)
    assert await published(bus) == [b"first", b"second"]
    [left] = store.schedule.page()
    assert left.event.data == b"refused"
    [record] = caplog.records
    assert left.id in record.getMessage()
    assert "refused" not in record.getMessage()


async def test_a_page_full_of_what_the_log_refuses_holds_up_nothing(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.scheduler.PAGE_ROWS", 3)
    for number in range(3):
        await bus.publish(raw, b"%d" % number, delay=1)
    await clock.advance_async(1)
    store.schedule._next_sequence.clear()
    for _ in range(3):
        await bus.publish(raw, b"refused", delay=1)
    await bus.publish(raw, b"3", delay=2)
    await clock.advance_async(5)
    assert await published(bus) == [b"0", b"1", b"2", b"3"]
    assert len(await bus.scheduled()) == 3


async def test_an_event_that_no_store_takes_holds_up_nothing(bus: Bus, store: MemoryStore, clock: VirtualClock) -> None:
    for number in range(3):
        await bus.publish(raw, b"%d" % number, delay=1)
    bad = store.schedule.page()[1]
    store._state.scheduled[bad.id] = msgspec.structs.replace(bad, event=Event(data=b"x", type=5))  # type: ignore[arg-type]
    await clock.advance_async(1)
    assert await published(bus) == [b"0", b"2"]


# --- opening and closing ---------------------------------------------------------------------


async def test_a_bus_that_was_never_opened_looks_at_nothing(store: MemoryStore, clock: VirtualClock) -> None:
    a_bus(store, clock)
    await clock.advance_async(0)
    assert clock._sleepers == []


async def test_an_idle_scheduler_looks_twice_a_second(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    next_due = store.schedule.next_due

    def counted() -> int | None:
        nonlocal looks
        looks += 1
        return next_due()

    await clock.advance_async(0)
    monkeypatch.setattr(store.schedule, "next_due", counted)
    await clock.advance_async(100)
    assert looks == 200


async def test_a_row_of_another_process_is_found_without_being_told(
    bus: Bus, store: MemoryStore, clock: VirtualClock
) -> None:
    await clock.advance_async(1)
    info = {info.name: info for info in store.log.topics()}["raw"]
    due_at = clock.time_us()
    store.schedule.add([Scheduled(id="a", log_id=info.log_id, partition=0, due_at=due_at, event=Event(data=b"x"))])
    await clock.advance_async(0.5)
    assert await published(bus) == [b"x"]


async def test_closing_lets_the_page_under_way_end(
    store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    call: Callable[..., Awaitable[Any]] = Local.call

    async def slow(self: Local, function: Any, *args: Any, **options: Any) -> Any:
        result = await call(self, function, *args, **options)
        if getattr(function, "__name__", "") == "claim":
            entered.set()
            await go_on.wait()
        return result

    monkeypatch.setattr(Local, "call", slow)
    bus = a_bus(store, clock)
    await bus.publish(raw, b"x", delay=0)
    await entered.wait()
    closing = asyncio.create_task(bus.close())
    await clock.advance_async(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert store.schedule.page() == []
    assert store.leases.holder("schedule") is None
    assert clock._sleepers == []


async def test_closing_lets_a_delayed_publish_under_way_end(
    store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    add: Callable[..., Awaitable[Any]] = Local.schedule_add

    async def slow(*args: Any) -> Any:
        entered.set()
        await go_on.wait()
        return await add(*args)

    monkeypatch.setattr(Local, "schedule_add", slow)
    bus = a_bus(store, clock)
    publishing = asyncio.create_task(bus.publish(raw, b"x", delay=10))
    await entered.wait()
    closing = asyncio.create_task(bus.close())
    await clock.advance_async(0)
    assert not closing.done()
    go_on.set()
    await closing
    assert [row.id for row in store.schedule.page()] == [(await publishing).id]


async def test_a_store_that_is_closed_underneath_ends_the_scheduler_in_silence(
    store: MemoryStore, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    bus = a_bus(store, clock)
    await bus.publish(raw, b"x", delay=5)
    store.close()
    await clock.advance_async(10)
    assert clock._sleepers == []
    with pytest.raises(StoreClosed):
        await bus.publish(raw, b"x")
    await bus.close()
    assert caplog.records == []


def test_a_bus_that_outlives_its_event_loop_goes_on_with_the_next(store: MemoryStore, clock: VirtualClock) -> None:
    bus = a_bus(store, clock)

    async def later() -> None:
        await bus.publish(raw, b"x", delay=0)
        await clock.advance_async(0)

    asyncio.run(later())
    asyncio.run(later())
    assert asyncio.run(published(bus)) == [b"x", b"x"]
    asyncio.run(bus.close())


async def test_fenced_is_no_failure(store: MemoryStore, clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = a_scheduler(store, clock)

    async def fenced() -> float:
        raise Fenced("stale")

    scheduler._round = fenced  # type: ignore[method-assign]
    scheduler.start()
    await clock.advance_async(5)
    await scheduler.stop()
    await scheduler.stop()
    assert caplog.records == []


# --- processes that are killed ---------------------------------------------------------------

CHILD = """
    import asyncio, os, signal, sys
    from penstock import Bus, Topic

    url, port, step, moment = sys.argv[1:]
    raw = Topic("raw", bytes)

    def dying(function):
        def call(*args, **options):
            if moment == "after":
                function(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        return call

    async def main():
        bus = Bus(url, topics=[raw])
        await bus.publish(raw, b"opened")
        target = type(getattr(bus._backend.store, port))
        setattr(target, step, dying(getattr(target, step)))
        for number in range(3):
            await bus.publish(raw, b"%d" % number, delay=0.2 + number / 1000)
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["schedule.add", "schedule.claim", "log.append", "schedule.done"])
async def test_a_process_killed_at_any_step_and_a_restart_publish_each_event_once(
    tmp_path: Path, step: str, moment: str
) -> None:
    url = f"file:{tmp_path / 'store'}"
    child = [sys.executable, "-c", textwrap.dedent(CHILD), url, *step.split("."), moment]
    killed = await asyncio.to_thread(subprocess.run, child, capture_output=True, check=False, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    stored = {"schedule.add-before": 0, "schedule.add-after": 1}.get(f"{step}-{moment}", 3)
    async with Bus(url, topics=[raw]) as bus:
        with growth(bus) as grown:
            while len(found := await published(bus)) <= stored:
                await grown()
    # Closing lets the round end that has published the last of them.
    assert found == [b"opened", b"0", b"1", b"2"][: stored + 1]
    with closing(open_store(url)) as store:
        assert store.schedule.page() == []


async def test_schedulers_of_several_processes_publish_each_event_once(tmp_path: Path) -> None:
    program = """
        import asyncio, sys
        from penstock import Bus, Topic

        url, name = sys.argv[1:]
        raw = Topic("raw", bytes)

        async def main():
            async with Bus(url, topics=[raw]) as bus:
                for number in range(40):
                    await bus.publish(raw, f"{name}{number}".encode(), delay=number / 40)
                # Another process may publish the last of them, and hints between processes may be lost.
                while await bus.scheduled():
                    await asyncio.sleep(0.05)

        asyncio.run(main())
    """
    url = f"file:{tmp_path / 'store'}"
    async with Bus(url, topics=[raw]):
        pass
    children = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(program), url, name)
        for name in ("a", "b")
    ]
    assert [await child.wait() for child in children] == [0, 0]
    async with Bus(url, topics=[raw]) as bus:
        found = await published(bus)
    assert sorted(found) == sorted(b"%c%d" % (name, number) for name in b"ab" for number in range(40))
