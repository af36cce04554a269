"""Delayed publishes, as a bus offers them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from penstock import Bus, Topic
from penstock.bus.delayed import ScheduledReceipt
from penstock.bus.local import Local
from penstock.clock import VirtualClock, us_to_datetime
from penstock.errors import (
    ProducerExpired,
    PublishUnknown,
    StoreFull,
    TooLarge,
    TopicDeleted,
    UnknownTopic,
    UsageError,
)
from penstock.rows import Scheduled
from penstock.settings import Limits, MemorySettings, Settings
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


async def jump(clock: VirtualClock, by: float | timedelta) -> None:
    """Move the clock at once, however far, and let everybody who wakes finish."""
    await clock.advance_async(0)
    clock.advance(by)
    await clock.advance_async(0)


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


# --- in time, and once -----------------------------------------------------------------------


@pytest.mark.parametrize("delay", [1.0, 0.000001, 59.999, timedelta(hours=1), timedelta(days=1), timedelta(days=30)])
async def test_a_delayed_event_appears_at_its_time_and_not_before(
    bus: Bus, clock: VirtualClock, delay: float | timedelta
) -> None:
    microsecond = timedelta(microseconds=1)
    length = delay if isinstance(delay, timedelta) else timedelta(seconds=delay)
    now = us_to_datetime(clock.time_us())
    receipt = await bus.publish(raw, b"later", delay=delay)
    assert (receipt.topic, receipt.due_at) == ("raw", now + length)
    await jump(clock, length - microsecond)
    assert await published(bus) == []
    await jump(clock, microsecond)
    assert await published(bus) == [b"later"]
    await jump(clock, timedelta(days=60))
    assert await published(bus) == [b"later"]
    [event] = [event async for event in bus.read(raw)]
    assert event.appended_at == receipt.due_at


async def test_a_delayed_event_survives_restarts_and_appears_once(store: MemoryStore, clock: VirtualClock) -> None:
    async with a_bus(store, clock) as bus:
        await bus.publish(raw, b"later", delay=timedelta(days=30))
    for _ in range(3):
        async with a_bus(store, clock) as bus:
            await jump(clock, timedelta(days=9))
            assert await published(bus) == []
    await jump(clock, timedelta(days=9))  # it falls due while no bus is open
    for _ in range(2):
        async with a_bus(store, clock) as bus:
            await clock.advance_async(1)
            assert await published(bus) == [b"later"]


async def test_other_events_are_not_held_up_by_delayed_ones(bus: Bus, clock: VirtualClock) -> None:
    await bus.publish(raw, b"in a month", delay=timedelta(days=30))
    await bus.publish(raw, b"now")
    await bus.publish(raw, b"in a second", delay=1)
    assert await published(bus) == [b"now"]
    await clock.advance_async(1)
    assert await published(bus) == [b"now", b"in a second"]


async def test_events_appear_in_the_order_of_their_times(bus: Bus, clock: VirtualClock) -> None:
    for delay in (3, 1, 2, 5, 4):
        await bus.publish(raw, b"%d" % delay, delay=delay)
    await clock.advance_async(10)
    assert await published(bus) == [b"1", b"2", b"3", b"4", b"5"]


async def test_an_event_does_not_come_along_with_one_that_is_due_earlier(bus: Bus, clock: VirtualClock) -> None:
    await bus.publish(raw, b"second", delay=1.000001)
    await bus.publish(raw, b"first", delay=1)
    await jump(clock, 1)
    assert await published(bus) == [b"first"]
    await jump(clock, 0.000001)
    assert await published(bus) == [b"first", b"second"]


async def test_a_time_in_the_past_is_published_as_soon_as_the_scheduler_looks(bus: Bus, clock: VirtualClock) -> None:
    await bus.publish(raw, b"long ago", at=datetime(1999, 1, 1, tzinfo=UTC))
    await bus.publish(raw, b"now", delay=0)
    await clock.advance_async(0)  # woken by the publish, without any time passing
    assert sorted(await published(bus)) == [b"long ago", b"now"]


async def test_a_moment_is_meant_in_its_own_time_zone(bus: Bus, clock: VirtualClock) -> None:
    at = us_to_datetime(clock.time_us() + 5_000_000).astimezone(timezone(timedelta(hours=5)))
    receipt = await bus.publish(raw, b"later", at=at)
    assert (receipt.due_at, receipt.due_at.tzinfo) == (at, UTC)
    await clock.advance_async(4.9)
    assert await published(bus) == []
    await clock.advance_async(0.1)
    assert await published(bus) == [b"later"]


async def test_a_delayed_event_is_the_event_that_was_published(bus: Bus, clock: VirtualClock) -> None:
    time = datetime(2020, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    fields: dict[str, Any] = {"key": "ada", "headers": {"a": "b"}, "subject": "s", "time": time, "id": "mine"}
    direct = await bus.publish(keyed, b"x", **fields)
    await bus.publish(keyed, b"x", delay=5, **fields)
    await clock.advance_async(5)
    first, second = [event async for event in bus.read(keyed)]
    assert first.to_event() == second.to_event()
    assert first.position.partition == second.position.partition == direct.position.partition


async def test_the_time_to_live_begins_when_the_event_is_due(bus: Bus, clock: VirtualClock) -> None:
    now = us_to_datetime(clock.time_us())
    await bus.publish(raw, b"x", delay=100, ttl=10)
    await jump(clock, 100)
    [event] = [event async for event in bus.read(raw)]
    assert event.expires_at == now + timedelta(seconds=110)


async def test_many_more_than_a_page_are_published_once_each(bus: Bus, clock: VirtualClock) -> None:
    for number in range(1_203):
        await bus.publish(keyed, b"%d" % number, key=f"k{number % 7}", delay=1)
    await clock.advance_async(1)
    assert sorted(map(int, await published(bus, keyed))) == list(range(1_203))


async def test_large_ones_are_appended_in_several_steps(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    append = store.log.append

    def watched(partition: Any, batch: Any, runs: Any) -> Any:
        sizes.append(int(batch.sizes.sum()))
        return append(partition, batch, runs)

    monkeypatch.setattr(store.log, "append", watched)
    for _ in range(20):
        await bus.publish(raw, b"x" * 1_000_000, delay=1)
    await clock.advance_async(1)
    assert len(await published(bus)) == 20
    assert len(sizes) == 3
    assert max(sizes) <= 8 << 20


# --- cancelling and listing ------------------------------------------------------------------


async def test_what_is_cancelled_never_appears(bus: Bus, clock: VirtualClock) -> None:
    receipt = await bus.publish(raw, b"never", delay=10)
    kept = await bus.publish(raw, b"kept", delay=10)
    assert await bus.cancel_scheduled(receipt.id)
    assert not await bus.cancel_scheduled(receipt.id)
    assert not await bus.cancel_scheduled("unknown")
    await clock.advance_async(20)
    assert await published(bus) == [b"kept"]
    assert not await bus.cancel_scheduled(kept.id)


async def test_scheduled_events_are_listed_by_their_time_page_by_page(bus: Bus) -> None:
    receipts = [await bus.publish(topic, b"x", delay=delay) for topic, delay in ((raw, 30), (keyed, 10), (raw, 20))]
    expected = [receipts[1], receipts[2], receipts[0]]
    assert await bus.scheduled() == expected
    assert await bus.scheduled(limit=2) == expected[:2]
    assert await bus.scheduled(after=expected[1]) == expected[2:]
    for wrong in (0, 1_001):
        with pytest.raises(UsageError, match="must be 1 to 1,000"):
            await bus.scheduled(limit=wrong)


async def test_two_delayed_events_of_one_id_are_two(bus: Bus, clock: VirtualClock) -> None:
    for topic in (raw, raw, keyed):
        await bus.publish(topic, b"x", id="the same", delay=1)
    await clock.advance_async(1)
    assert (len(await published(bus)), len(await published(bus, keyed))) == (2, 1)


# --- what is refused -------------------------------------------------------------------------


async def test_what_cannot_be_right_is_refused_and_nothing_is_scheduled(bus: Bus, clock: VirtualClock) -> None:
    at = us_to_datetime(clock.time_us())
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (UsageError, {"delay": 1, "at": at}),
        (UsageError, {"delay": -1}),
        (UsageError, {"delay": float("nan")}),
        (UsageError, {"delay": "soon"}),
        (UsageError, {"at": at.replace(tzinfo=None)}),
        (UsageError, {"at": 5}),
        (UsageError, {"delay": timedelta(days=3654)}),
        (UsageError, {"at": at + timedelta(days=3654)}),
        (UsageError, {"at": datetime.max.replace(tzinfo=UTC)}),
        (UsageError, {"delay": 1, "kye": "x"}),
        (TooLarge, {"delay": 1, "headers": {"a": "x" * 20_000}}),
    ]
    for kind, options in wrong:
        with pytest.raises(kind):
            await bus.publish(raw, b"x", **options)
    with pytest.raises(TooLarge):
        await bus.publish(raw, b"x" * ((1 << 20) + 1), delay=1)
    with pytest.raises(UnknownTopic):
        await bus.publish("rwa", b"x", delay=1)
    assert await bus.scheduled() == []
    await bus.publish(raw, b"x", delay=timedelta(days=3653))


async def test_a_topic_made_anew_is_found_after_one_error(bus: Bus, store: MemoryStore, clock: VirtualClock) -> None:
    await bus.publish(raw, b"old", delay=1)
    [info] = [info for info in store.log.topics() if info.name == "raw"]
    store.log.delete_topic(info.log_id)
    store.log.create_topic("raw", raw.settings)
    with pytest.raises(TopicDeleted):
        await bus.publish(raw, b"for the old one", delay=1)
    await bus.publish(raw, b"new", delay=1)
    await clock.advance_async(1)
    assert await published(bus) == [b"new"]


async def test_a_schedule_that_is_full_says_so(clock: VirtualClock) -> None:
    store = MemoryStore(clock=clock, limits=MemorySettings(rows_max=6))
    async with a_bus(store, clock) as bus:
        for _ in range(6):
            await bus.publish(raw, b"x", delay=1000)
        with pytest.raises(StoreFull):
            await bus.publish(raw, b"x", delay=1000)


async def test_limits_are_those_of_the_settings(store: MemoryStore, clock: VirtualClock) -> None:
    async with a_bus(store, clock, settings=Settings(limits=Limits(event_bytes_max=10))) as bus:
        await bus.publish(raw, b"x" * 10, delay=1)
        with pytest.raises(TooLarge):
            await bus.publish(raw, b"x" * 11, delay=1)


# --- unknown outcomes ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
async def test_an_unknown_outcome_can_be_sent_again_until_it_is_due(
    bus: Bus, store: MemoryStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(store.schedule, "add", once(store.schedule.add, OSError("cut off"), after=after))
    with pytest.raises(PublishUnknown) as caught:
        await bus.publish(raw, b"x", delay=10)
    receipt = await caught.value.prepared.send()
    assert isinstance(receipt, ScheduledReceipt)
    assert await bus.scheduled() == [receipt]
    await clock.advance_async(10)
    assert await published(bus) == [b"x"]
    with pytest.raises(ProducerExpired, match="nobody can tell"):
        await caught.value.prepared.send()
    await clock.advance_async(1)
    assert await published(bus) == [b"x"]


async def test_a_store_that_does_not_answer_in_time_leaves_the_outcome_unknown(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(_: object, rows: Sequence[Scheduled]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Local, "schedule_add", hangs)
    with pytest.raises(PublishUnknown, match="no answer within"):
        await bus.publish(raw, b"x", delay=10, timeout=0)
