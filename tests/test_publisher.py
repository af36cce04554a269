from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any

import pytest
import xxhash

from penstock import Batch, Bus, Event, Position, Prepared, Range, Receipt, Topic
from penstock.bus import grouping
from penstock.bus.grouping import Room
from penstock.bus.publisher import _size
from penstock.clock import VirtualClock
from penstock.errors import InvalidEvent, PublishUnknown, StoreFull, TooLarge, TopicDeleted, UsageError
from penstock.producers import Run
from penstock.rows import Appended, Partition
from penstock.settings import Limits, Settings
from penstock.stores.memory import MemoryStore

raw = Topic("raw", bytes)
keyed = Topic("keyed", bytes, key=lambda value: value.split(b"/")[0], partitions=4)


class Appends:
    """Stands before a bus's store: counts appends, holds them back, and lets them fail before or after they did."""

    def __init__(self, bus: Bus) -> None:
        assert bus._backend is not None
        self._real = bus._backend.append
        self.sizes: list[int] = []
        self.faults: list[str | Exception] = []
        self.started = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        bus._backend.append = self._append  # type: ignore[method-assign]

    async def _append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        self.sizes.append(len(batch))
        fault = self.faults.pop(0) if self.faults else ""
        self.started.set()
        await self.gate.wait()
        if fault == "before" or isinstance(fault, Exception):
            raise fault if isinstance(fault, Exception) else OSError("no answer")
        answers = await self._real(partition, batch, runs)
        if fault == "after":
            raise OSError("no answer")
        return answers

    def hold(self) -> None:
        self.gate.clear()
        self.started.clear()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
async def bus(store: MemoryStore, clock: VirtualClock) -> AsyncIterator[Bus]:
    async with Bus("memory:", topics=[raw, keyed], store=store, clock=clock) as opened:
        yield opened


@pytest.fixture
async def appends(bus: Bus) -> AsyncIterator[Appends]:
    appends = Appends(bus)
    yield appends
    appends.gate.set()  # so that the bus can close, whatever the test found


async def stored(bus: Bus, topic: Topic[bytes] = raw) -> dict[Position, bytes]:
    return {found.position: found.data async for found in bus.read(topic)}


def values(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def publish_all(bus: Bus, count: int, topic: Topic[bytes] = raw) -> list[Receipt | BaseException]:
    return await asyncio.gather(*(bus.publish(topic, value) for value in values(count)), return_exceptions=True)


def prepared_of(outcomes: Sequence[object]) -> list[Prepared]:
    found = []
    for outcome in outcomes:
        assert isinstance(outcome, PublishUnknown)
        assert outcome.count == 1
        found.append(outcome.prepared)
    return found


def tasks_of(*publishes: Coroutine[Any, Any, Receipt]) -> list[asyncio.Task[Receipt]]:
    return [asyncio.create_task(publish) for publish in publishes]


async def turns(count: int = 5) -> None:
    """Let all tasks run until they wait."""
    for _ in range(count):
        await asyncio.sleep(0)


# --- groups ----------------------------------------------------------------------------------


async def test_concurrent_publishes_are_one_append_and_each_receipt_names_its_own_event(
    bus: Bus, appends: Appends
) -> None:
    receipts = await publish_all(bus, 100)
    assert appends.sizes == [100]
    found = await stored(bus)
    for value, receipt in zip(values(100), receipts, strict=True):
        assert isinstance(receipt, Receipt)
        assert found[receipt.position] == value
        assert (len(receipt), receipt.duplicate) == (1, False)
        offset = receipt.position.offset
        assert receipt.offsets == {0: Range(offset, offset + 1)}


async def test_what_comes_during_an_append_gathers_and_leaves_when_it_ends(bus: Bus, appends: Appends) -> None:
    appends.hold()
    first = tasks_of(bus.publish(raw, b"first"))
    await appends.started.wait()
    later = tasks_of(*(bus.publish(raw, value) for value in values(7)))
    await turns()
    assert appends.sizes == [1]
    appends.gate.set()
    receipts = await asyncio.gather(*first, *later)
    assert appends.sizes == [1, 7]
    assert [receipt.position.offset for receipt in receipts] == list(range(8))


async def test_a_task_that_awaits_each_publish_finds_them_in_order(bus: Bus, appends: Appends) -> None:
    async def publish(task: int) -> None:
        for number in range(20):
            await bus.publish(keyed, b"%d/%d" % (task, number))

    await asyncio.gather(*map(publish, range(25)))
    assert max(appends.sizes) > 1
    found = list((await stored(bus, keyed)).values())
    for task in range(25):
        mine = [value for value in found if value.startswith(b"%d/" % task)]
        assert mine == [b"%d/%d" % (task, number) for number in range(20)]


async def test_singles_and_batches_of_many_keys_go_each_to_the_partition_of_its_key(bus: Bus) -> None:
    singles = [b"%d/s" % number for number in range(200)]
    batch = [b"%d/b" % number for number in range(200)]
    *receipts, together = await asyncio.gather(
        *(bus.publish(keyed, value) for value in singles), bus.publish_batch(keyed, batch)
    )
    positions = [receipt.position for receipt in receipts] + together.positions
    found = await stored(bus, keyed)
    assert len(found) == 400
    for value, position in zip(singles + batch, positions, strict=True):
        assert position.partition == xxhash.xxh64_intdigest(value.split(b"/")[0], 0) % 4
        assert found[position] == value


async def test_events_with_different_fields_share_a_group(bus: Bus, appends: Appends) -> None:
    moment = datetime(2026, 1, 2, tzinfo=UTC)
    await asyncio.gather(
        bus.publish(raw, b"plain"),
        bus.publish(raw, b"full", key="k", headers={"a": "b"}, id="1", source="/s", subject="it", time=moment, ttl=60),
        bus.publish(raw, Event(data=b"whole", type="kind")),
    )
    assert appends.sizes == [3]
    plain, full, whole = [found async for found in bus.read(raw)]
    assert (plain.key, plain.headers, plain.time, plain.subject) == (None, {}, None, None)
    assert (full.key, full.headers, full.time, full.subject) == (b"k", {"a": b"b"}, moment, "it")
    assert (full.id, full.source, whole.type) == ("1", "/s", "kind")
    assert plain.id != whole.id


async def test_a_group_has_a_limit_in_events_and_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "GROUP_EVENTS_MAX", 4)
    settings = Settings(limits=Limits(event_bytes_max=100, batch_bytes_max=250))
    async with Bus("memory:", topics=[raw], settings=settings) as bus:
        appends = Appends(bus)
        await publish_all(bus, 10)
        assert appends.sizes == [4, 4, 2]
        appends.sizes.clear()
        receipts = await asyncio.gather(*(bus.publish(raw, bytes([65 + number]) * 100) for number in range(5)))
        assert appends.sizes == [2, 2, 1]
        found = await stored(bus)
        assert [found[receipt.position][0] for receipt in receipts] == [65, 66, 67, 68, 69]


async def test_a_forgotten_producer_goes_on_under_a_new_name_with_its_whole_group(
    bus: Bus, clock: VirtualClock
) -> None:
    await publish_all(bus, 3)
    clock.advance(timedelta(days=8))
    receipts = await publish_all(bus, 3)
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    assert list((await stored(bus)).values()) == values(3) * 2


# --- unknown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_group_cut_off_is_resent_as_a_whole_and_stored_once(bus: Bus, appends: Appends, when: str) -> None:
    appends.faults = [when]
    members = prepared_of(await publish_all(bus, 10))
    await bus.publish(raw, b"between")
    random.Random(7).shuffle(members)
    receipts = await asyncio.gather(*(member.send() for member in members))
    assert appends.sizes == [10, 1, 10]
    assert {receipt.duplicate for receipt in receipts} == {when == "after"}
    found = await stored(bus)
    assert sorted(found.values()) == sorted([*values(10), b"between"])
    again = [await member.send() for member in members]
    assert [receipt.position for receipt in again] == [receipt.position for receipt in receipts]
    assert all(receipt.duplicate for receipt in again)
    assert len(await stored(bus)) == 11


async def test_each_member_of_a_resent_group_has_its_own_position(bus: Bus, appends: Appends) -> None:
    appends.faults = ["before"]
    members = prepared_of(await publish_all(bus, 5))
    third = await members[3].send()  # it takes the others along, whose outcome was unknown, too
    found = await stored(bus)
    assert found[third.position] == b"3"
    assert sorted(found.values()) == values(5)
    for value, member in zip(values(5), members, strict=True):
        assert found[(await member.send()).position] == value
    assert appends.sizes == [5, 5]


async def test_a_refusal_after_an_unknown_attempt_does_not_dissolve_the_group(bus: Bus, appends: Appends) -> None:
    appends.faults = ["after", StoreFull("full")]
    members = prepared_of(await publish_all(bus, 3))
    with pytest.raises(StoreFull):
        await members[0].send()
    receipts = [await member.send() for member in members]
    assert [receipt.position.offset for receipt in receipts] == [0, 1, 2]
    assert len(await stored(bus)) == 3


async def test_an_attempt_may_end_unknown_again_and_again(bus: Bus, appends: Appends) -> None:
    appends.faults = ["before", "after", "before"]
    members = prepared_of(await publish_all(bus, 3))
    for _ in range(2):
        with pytest.raises(PublishUnknown) as caught:
            await members[1].send()
        assert caught.value.prepared is members[1]
    assert (await members[1].send()).position.offset == 1
    assert len(await stored(bus)) == 3


# --- refused ---------------------------------------------------------------------------------


async def test_a_refused_group_dissolves_and_a_resend_stores_that_member_alone(bus: Bus, appends: Appends) -> None:
    members = [bus.prepare(raw, value) for value in values(4)]
    appends.faults = [StoreFull("full")]
    outcomes = await asyncio.gather(*(member.send() for member in members), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreFull] * 4
    assert len(set(map(id, outcomes))) == 4
    assert (await members[2].send()).position.offset == 0
    assert list((await stored(bus)).values()) == [b"2"]
    await members[0].send()
    assert (await members[2].send()).duplicate
    assert list((await stored(bus)).values()) == [b"2", b"0"]


async def test_an_event_beyond_a_limit_is_refused_alone(store: MemoryStore) -> None:
    settings = Settings(limits=Limits(event_bytes_max=100, headers_max=1, headers_bytes_max=50))
    async with Bus("memory:", topics=[raw], store=store, settings=settings) as bus:
        outcomes = await asyncio.gather(
            bus.publish(raw, b"a"),
            bus.publish(raw, b"x" * 101),
            bus.publish(raw, b"x", headers={"a": "", "b": ""}),
            bus.publish(raw, b"x", headers={"a": "x" * 50}),
            bus.publish(raw, "text"),  # type: ignore[misc]
            bus.publish(raw, b"b"),
            return_exceptions=True,
        )
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [Receipt, TooLarge, TooLarge, TooLarge, InvalidEvent, Receipt]
        too_large = outcomes[1]
        assert isinstance(too_large, TooLarge)
        assert (too_large.size, too_large.limit) == (101, 100)
        assert list((await stored(bus)).values()) == [b"a", b"b"]


async def test_an_event_larger_than_a_batch_may_be_is_refused(store: MemoryStore) -> None:
    settings = Settings(limits=Limits(event_bytes_max=100, batch_bytes_max=50))
    async with Bus("memory:", topics=[raw], store=store, settings=settings) as bus:
        with pytest.raises(TooLarge, match="for partition 0, has 60 bytes, the limit is 50"):
            await bus.publish(raw, b"x" * 60)


async def test_a_deleted_topic_is_told_to_the_whole_group_and_then_created_anew(store: MemoryStore, bus: Bus) -> None:
    await publish_all(bus, 2)
    (info,) = [info for info in store.log.topics() if info.name == "raw"]
    store.log.delete_topic(info.log_id)
    assert [type(outcome) for outcome in await publish_all(bus, 3)] == [TopicDeleted] * 3
    receipts = await publish_all(bus, 3)
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    assert list(await stored(bus)) == [Position("raw", 0, offset) for offset in range(3)]
    assert len(bus._publisher._lanes) == len(bus._publisher._producers) == 1


async def test_a_group_that_cannot_be_built_leaves_nobody_waiting(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> Batch:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Batch, "from_events", broken)
        prepared = prepared_of(await publish_all(bus, 3))
    assert [(await member.send()).position.offset for member in prepared] == [0, 1, 2]


# --- stopping to wait ------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [False, True])
async def test_a_cancelled_publish_harms_nobody(bus: Bus, appends: Appends, under_way: bool) -> None:
    appends.hold()
    tasks = tasks_of(*(bus.publish(raw, value) for value in values(5)))
    if under_way:
        await appends.started.wait()
    else:
        await asyncio.sleep(0)
        assert appends.sizes == []
    tasks[2].cancel()
    await turns()
    assert tasks[2].cancelled()
    appends.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Receipt, Receipt, asyncio.CancelledError, Receipt, Receipt]
    found = await stored(bus)
    for value, outcome in zip(values(5), outcomes, strict=True):
        assert isinstance(outcome, asyncio.CancelledError) or found[outcome.position] == value  # type: ignore[union-attr]


async def test_a_cancelled_publish_that_was_prepared_can_be_sent_again(bus: Bus, appends: Appends) -> None:
    prepared = bus.prepare(raw, b"once")
    appends.hold()
    sending, other = tasks_of(prepared.send(), bus.publish(raw, b"other"))
    await appends.started.wait()
    sending.cancel()
    again = asyncio.create_task(prepared.send())  # joins the attempt that is under way
    await turns()
    appends.gate.set()
    assert (await again).position.offset == 0
    assert (await other).position.offset == 1
    assert (await prepared.send()).duplicate
    assert appends.sizes == [2]


async def test_a_publish_that_times_out_is_unknown_and_the_others_go_on(bus: Bus, appends: Appends) -> None:
    appends.hold()
    hasty, patient = tasks_of(bus.publish(raw, b"hasty", timeout=0.001), bus.publish(raw, b"patient", timeout=60))
    with pytest.raises(PublishUnknown, match=r"no answer within 0\.001 s") as caught:
        await hasty
    assert not patient.done()
    appends.gate.set()
    assert (await patient).position.offset == 1
    receipt = await caught.value.prepared.send(timeout=60)
    assert (receipt.position.offset, receipt.duplicate) == (0, True)
    assert len(await stored(bus)) == 2


async def test_one_publish_sent_by_two_tasks_at_once_is_stored_once(bus: Bus, appends: Appends) -> None:
    prepared = bus.prepare(raw, b"once")
    appends.hold()
    first, second = tasks_of(prepared.send(), prepared.send())
    await appends.started.wait()
    first.cancel()
    appends.gate.set()
    assert (await second).position.offset == 0
    assert len(await stored(bus)) == 1


async def test_everybody_is_told_if_the_task_that_sends_is_stopped(bus: Bus, appends: Appends) -> None:
    for started in (False, True):
        appends.hold()
        publishing = tasks_of(*(bus.publish(raw, value) for value in values(3)))
        if started:
            await appends.started.wait()
            publishing += tasks_of(bus.publish(raw, b"gathers"))
        await asyncio.sleep(0)
        (lane,) = bus._publisher._lanes.values()
        assert lane._task is not None
        lane._task.cancel()
        outcomes = await asyncio.gather(*publishing, return_exceptions=True)
        appends.gate.set()
        positions = [(await prepared.send()).position for prepared in prepared_of(outcomes)]
        assert len(set(positions)) == len(publishing)
    assert sorted((await stored(bus)).values()) == sorted([*values(3), *values(3), b"gathers"])


# --- bounds and closing ----------------------------------------------------------------------


@pytest.fixture
def narrow(bus: Bus) -> Room:
    room = bus._publisher.room = Room(events_max=2, bytes_max=1_000)
    return room


async def test_beyond_the_bound_a_publish_waits_and_then_goes_in_order(
    bus: Bus, appends: Appends, narrow: Room
) -> None:
    appends.hold()
    tasks = tasks_of(*(bus.publish(raw, value) for value in values(7)))
    await turns()
    assert appends.sizes == [2]
    appends.gate.set()
    receipts = await asyncio.gather(*tasks)
    assert appends.sizes == [2, 2, 2, 1]
    assert [receipt.position.offset for receipt in receipts] == list(range(7))


async def test_the_bound_counts_bytes_and_one_large_event_always_fits(bus: Bus, appends: Appends, narrow: Room) -> None:
    appends.hold()
    tasks = tasks_of(bus.publish(raw, b"x" * 600), bus.publish(raw, b"y" * 600), bus.publish(raw, b"z" * 5_000))
    await turns()
    assert appends.sizes == [1]
    appends.gate.set()
    receipts = await asyncio.gather(*tasks)
    assert [receipt.position.offset for receipt in receipts] == [0, 1, 2]


async def test_who_leaves_the_line_lets_the_next_one_in(bus: Bus, appends: Appends, narrow: Room) -> None:
    appends.hold()
    tasks = tasks_of(*(bus.publish(raw, value) for value in values(6)))
    await turns()
    tasks[2].cancel()
    await turns()
    appends.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(Receipt) == 5
    assert list((await stored(bus)).values()) == [b"0", b"1", b"3", b"4", b"5"]
    assert (narrow._events, narrow._bytes) == (0, 0)


async def test_room_that_was_given_to_a_task_being_cancelled_is_passed_on() -> None:
    room = Room(events_max=1)
    assert room.take(1)
    first, second = asyncio.create_task(room.wait(1)), asyncio.create_task(room.wait(1))
    await asyncio.sleep(0)
    room.leave(1, 1)
    first.cancel()
    await second
    assert first.cancelled()
    room.leave(1, 1)
    await room.emptied()


async def test_a_publish_that_waits_for_room_can_time_out_and_be_sent_later(
    bus: Bus, appends: Appends, narrow: Room
) -> None:
    appends.hold()
    tasks = tasks_of(*(bus.publish(raw, value) for value in values(2)))
    await appends.started.wait()
    with pytest.raises(PublishUnknown, match="no answer within") as caught:
        await bus.publish(raw, b"late", timeout=0.001)
    appends.gate.set()
    await asyncio.gather(*tasks)
    assert (await caught.value.prepared.send()).position.offset == 2
    assert len(await stored(bus)) == 3


async def test_one_publish_sent_twice_while_there_is_no_room_is_stored_once(
    bus: Bus, appends: Appends, narrow: Room
) -> None:
    appends.hold()
    tasks = tasks_of(*(bus.publish(raw, value) for value in values(2)))
    await appends.started.wait()
    prepared = bus.prepare(raw, b"once")
    tasks += tasks_of(prepared.send(), prepared.send())
    await turns()
    appends.gate.set()
    receipts = await asyncio.gather(*tasks)
    assert receipts[2].position == receipts[3].position
    assert (narrow._events, narrow._bytes) == (0, 0)
    assert len(await stored(bus)) == 3


async def test_closing_lets_everything_end_that_was_published_before(store: MemoryStore) -> None:
    bus = Bus("memory:", topics=[raw], store=store)
    await bus.publish(raw, b"opens")
    bus._publisher.room = Room(events_max=3)
    appends = Appends(bus)
    bus._publisher._lanes.clear()
    appends.hold()
    publishing = tasks_of(*(bus.publish(raw, value) for value in values(2)))
    await appends.started.wait()
    publishing += tasks_of(*(bus.publish(raw, value) for value in values(5)))  # one gathers, four wait for room
    await turns()
    closing = asyncio.create_task(bus.close())
    await turns()
    assert not closing.done()
    appends.gate.set()
    await closing
    receipts = await asyncio.gather(*publishing)
    assert sorted(receipt.position.offset for receipt in receipts) == list(range(1, 8))


async def test_closing_waits_for_an_append_whose_callers_are_gone(bus: Bus, appends: Appends) -> None:
    appends.hold()
    (publishing,) = tasks_of(bus.publish(raw, b"x"))
    await appends.started.wait()
    publishing.cancel()
    await turns()
    closing = asyncio.create_task(bus.close())
    await turns()
    assert not closing.done()
    appends.gate.set()
    await closing


# --- what is checked and kept ----------------------------------------------------------------


async def test_what_becomes_of_the_headers_after_preparing_does_not_matter(bus: Bus) -> None:
    headers = {"a": b"1"}
    prepared = bus.prepare(raw, Event(data=b"x", headers=headers))
    headers["a"] = 5  # type: ignore[assignment]
    await prepared.send()
    await bus.publish(raw, Event(data=b"y", headers=MappingProxyType({"b": b"2"})))
    assert [found.headers async for found in bus.read(raw)] == [{"a": b"1"}, {"b": b"2"}]


@pytest.mark.parametrize(
    "event",
    [
        Event(),
        Event(data=b"12345", key=b"k"),
        Event(data=b"1", type="müller", id="i", source="/s", subject="ß", content_type="text/plain"),
        Event(data=b"1", time=datetime(2026, 1, 1, tzinfo=UTC), expires_at=datetime(2027, 1, 1, tzinfo=UTC)),
        Event(data=b"1", headers={"ä": b"123", "b": b""}),
    ],
)
def test_the_size_of_an_event_is_what_its_columns_say(event: Event) -> None:
    assert _size(event) == Batch.from_events([event]).sizes[0]


async def test_receipts_of_the_same_publish_are_equal_and_say_where_it_is(bus: Bus, appends: Appends) -> None:
    appends.hold()
    prepared = bus.prepare(raw, b"once")
    first, second = tasks_of(prepared.send(), prepared.send())
    await turns()
    appends.gate.set()
    assert await first == await second != await prepared.send()
    assert repr(await first) == "Receipt(topic='raw', offsets={0: Range(start=0, stop=1)}, duplicate=False)"
    assert await first == await first
    with pytest.raises(TypeError):
        hash(await first)


async def test_a_repeat_so_old_that_only_the_fact_is_known_has_no_position(bus: Bus) -> None:
    async def append(partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        return [Appended(None, duplicate=True)]

    assert bus._backend is not None
    bus._backend.append = append  # type: ignore[method-assign]
    receipt = await bus.publish(raw, b"x")
    assert (receipt.offsets, receipt.duplicate, len(receipt)) == ({0: None}, True, 1)
    with pytest.raises(UsageError, match="so long ago"):
        _ = receipt.position
