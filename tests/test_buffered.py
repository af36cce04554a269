"""The buffered publisher: order, outcomes, bounds, and that nobody's error is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from tests.deliveries import World, raw, wide

from penstock import BufferedPublisher, Bus, Event, PendingReceipt, Position, Receipt, StoredEvent, Topic, event
from penstock.bus import buffered
from penstock.errors import (
    BufferFull,
    BusClosed,
    EncodeError,
    InvalidEvent,
    PenstockError,
    PublishHalted,
    PublishUnknown,
    StoreFull,
    TooLarge,
    TopicDeleted,
    UnknownTopic,
    UsageError,
)
from penstock.settings import Limits, Settings


@event("buffered.placed", version=3)
@dataclass
class Placed:
    customer: str
    lines: list[int]


@event("buffered.paid", codec="msgpack")
class Paid(msgspec.Struct):
    customer: str


placed = Topic("placed", Placed, key=lambda value: value.customer)
expiring = Topic("expiring", Placed, key=lambda value: value.customer, ttl=60)
both = Topic[Placed | Paid]("both", (Placed, Paid), key=lambda value: value.customer)
NO_ANSWER = OSError("no answer")


def stored_now(world: World, topic: Topic[Any] = raw) -> list[tuple[int, bytes]]:
    """Return partition and payload of all that is in the log, without any step of the event loop."""
    found = []
    for partition in world.info(topic).partitions:
        log = world.store.whole.log
        bounds = log.bounds(partition)
        at = bounds.start
        while at < bounds.stop:
            for batch in log.read(partition, at, bytes_max=1 << 30):
                found += [(partition.number, each.data) for each in batch]  # type: ignore[union-attr]
                at = batch.range.stop
    return found


def payloads_now(world: World, topic: Topic[Any] = raw) -> list[bytes]:
    return [data for _, data in stored_now(world, topic)]


def appends(world: World) -> int:
    return world.store.calls["log.append"]


def numbers(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def opened(bus: Bus, topic: Topic[Any] = raw, **options: Any) -> BufferedPublisher[Any]:
    return await bus.publisher(topic, **options).__aenter__()


async def drained(publisher: BufferedPublisher[Any]) -> None:
    """See all failures of a publisher that nobody has seen."""
    while publisher._failures:
        with pytest.raises(PenstockError):
            await publisher.flush()


async def error_of(pending: PendingReceipt) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
        await pending
    return caught.value


# --- what is sent is stored ------------------------------------------------------------------


async def test_what_is_sent_is_stored_in_its_order_and_every_receipt_names_its_own_event(world: World) -> None:
    bus = world.bus()
    async with bus.publisher(raw) as publisher:
        pending = [publisher.send(value) for value in numbers(500)]
        assert not pending[0].done()
        before = appends(world)
        await publisher.flush()
        assert appends(world) == before + 1
    assert payloads_now(world) == numbers(500)
    for number, each in enumerate(pending):
        assert each.done()
        receipt = await each
        assert (receipt.position, receipt.duplicate, len(receipt)) == (Position("raw", 0, number), False, 1)
        assert isinstance(receipt, Receipt)
        assert await each == receipt


async def test_events_wait_for_company_as_long_as_they_may_linger_and_no_longer(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0.5)
    before = appends(world)
    first = publisher.send(b"0")
    await world.run(0.4)
    second = publisher.send(b"1")
    await world.settle()
    assert appends(world) == before
    await world.run(0.1)
    assert appends(world) == before + 1
    assert [(await each).position.offset for each in (first, second)] == [0, 1]


async def test_without_lingering_what_is_sent_in_one_turn_leaves_together(world: World) -> None:
    publisher = await opened(world.bus(), linger=0)
    before = appends(world)
    pending = [publisher.send(value) for value in numbers(7)]
    await pending[-1]
    assert appends(world) == before + 1


@pytest.mark.parametrize("options", [{"max_events": 4}, {"max_bytes": 4}])
async def test_a_full_shipment_leaves_at_once_and_has_no_more_than_it_may(world: World, options: Any) -> None:
    publisher = await opened(world.bus(), linger=60, **options)
    before = appends(world)
    pending = [publisher.send(value) for value in numbers(9)]
    await world.settle()
    assert appends(world) == before + 2
    assert [each.done() for each in pending] == [True] * 8 + [False]


async def test_an_event_larger_than_a_shipment_goes_alone(world: World) -> None:
    publisher = await opened(world.bus(), max_bytes=10)
    for value in (b"a", b"b" * 100, b"c"):
        publisher.send(value)
    before = appends(world)
    await publisher.flush()
    assert appends(world) == before + 3
    assert payloads_now(world) == [b"a", b"b" * 100, b"c"]


async def test_a_value_may_be_changed_after_it_was_sent(world: World) -> None:
    publisher = await opened(world.bus(placed), placed)
    value = Placed("ada", [1])
    publisher.send(value)
    value.lines.append(2)
    await publisher.flush()
    assert [placed.decode(found) async for found in world._buses[0].read(placed)] == [Placed("ada", [1])]


def said(found: StoredEvent) -> tuple[Any, ...]:
    """Return all that an event says but for its derived id."""
    own_id = found.id if found.id == "my-id" else None
    stated = (found.data, found.type, found.key, found.subject, found.time, found.expires_at)
    return (own_id, *stated, found.content_type, found.headers, found.source)


@pytest.mark.parametrize("topic", [placed, expiring, both], ids=lambda topic: topic.name)
async def test_an_event_is_stored_as_if_it_had_been_published(world: World, topic: Topic[Any]) -> None:
    bus = world.bus(topic)
    moment = datetime(2026, 5, 1, tzinfo=UTC)
    events: list[tuple[Any, dict[str, Any]]] = [
        (Placed("ada", [1, 2]), {}),
        (Placed("ada", []), {"key": "other"}),
        (Placed("ada", []), {"key": b"\xff", "headers": {"a": "b", "c": b"\x00"}}),
        (Placed("ada", []), {"id": "my-id", "source": "/s", "subject": "it", "time": moment, "ttl": 5}),
        (Event(data=b"{}", type="buffered.placed", headers={"x": b"y"}), {}),
        (Event(data=b"{}", type="buffered.placed"), {"key": "k", "ttl": timedelta(days=1)}),
        (Placed("grace", [3]), {"key": None}),
    ]
    if topic is both:
        events.insert(3, (Paid("ada"), {}))
    async with bus.publisher(topic) as publisher:
        for value, fields in events:
            publisher.send(value, **fields)
    for value, fields in events:
        await bus.publish(topic, value, **fields)
    found = [said(each) async for each in bus.read(topic)]
    assert found[: len(events)] == found[len(events) :]


async def test_a_wrong_event_is_refused_by_send_and_harms_no_other(world: World) -> None:
    settings = Settings(limits=Limits(event_bytes_max=100, headers_max=1, batch_bytes_max=1_000))
    bus = Bus("memory:", topics=[raw, placed], store=world.store, clock=world.clock, settings=settings)
    async with bus, bus.publisher(raw, max_bytes=1_000) as publisher:
        publisher.send(b"before")
        wrong: list[tuple[Any, dict[str, Any], type[Exception]]] = [
            ("text", {}, InvalidEvent),
            (b"x" * 101, {}, TooLarge),
            (b"x", {"key": "k" * 100}, TooLarge),
            (b"x", {"headers": {"a": "1", "b": "2"}}, TooLarge),
            (b"x", {"key": 5}, InvalidEvent),
            (b"x", {"header": {}}, UsageError),
            (b"x", {"key": "\ud800"}, InvalidEvent),
            (Event(data="text"), {}, InvalidEvent),  # type: ignore[arg-type]
        ]
        for value, fields, error in wrong:
            with pytest.raises(error):
                publisher.send(value, **fields)
            with pytest.raises(error):
                await publisher.put(value, **fields)
        publisher.send(b"after")
        assert publisher._room._events == 2
    async with Bus("memory:", topics=[placed], store=world.store, clock=world.clock) as other:
        async with other.publisher(placed) as typed:
            with pytest.raises(EncodeError):
                typed.send(Placed("ada", [object()]))  # type: ignore[list-item]
        assert [found.data async for found in other.read("raw")] == [b"before", b"after"]


async def test_keys_go_to_their_partitions_and_keep_their_order_there(world: World) -> None:
    async with world.bus().publisher(wide, max_events=10) as publisher:
        for number in range(300):
            await publisher.put(b"%d/%d" % (number % 7, number), key=f"k{number % 7}")
    found = stored_now(world, wide)
    assert len({partition for partition, _ in found}) > 1
    for key in range(7):
        mine = [(partition, data) for partition, data in found if data.startswith(b"%d/" % key)]
        partition = xxhash.xxh64_intdigest(b"k%d" % key, 0) % 4
        assert mine == [(partition, b"%d/%d" % (key, number)) for number in range(key, 300, 7)]


async def test_events_without_a_key_stay_together_and_go_round(world: World) -> None:
    async with world.bus().publisher(wide, max_events=3) as publisher:
        for value in numbers(12):
            publisher.send(value)
    assert stored_now(world, wide) == [(number // 3, b"%d" % number) for number in range(12)]


async def test_events_without_a_key_that_do_not_fit_go_to_the_next_partition_together(world: World) -> None:
    async with world.bus().publisher(wide, max_bytes=10) as publisher:
        for number in range(4):
            publisher.send(b"%04d" % number)
    assert stored_now(world, wide) == [(number // 2, b"%04d" % number) for number in range(4)]


async def test_a_partition_that_hangs_holds_up_no_other(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, wide, linger=0)
    release = world.hold(bus, "append")
    keys = {xxhash.xxh64_intdigest(b"%d" % number, 0) % 4: b"%d" % number for number in range(50)}
    slow = publisher.send(b"slow", key=keys[0])
    await world.settle()
    behind = publisher.send(b"behind", key=keys[0])
    await publisher.send(b"quick", key=keys[1])
    assert not slow.done()
    assert not behind.done()
    release.set()
    assert [(await each).position.offset for each in (slow, behind)] == [0, 1]


async def test_a_topic_may_be_given_by_name(world: World) -> None:
    bus = world.bus()
    publisher: BufferedPublisher[bytes] = bus.publisher("raw")
    await publisher.put(b"x")
    await publisher.close()
    assert payloads_now(world) == [b"x"]
    unknown: BufferedPublisher[bytes] = bus.publisher("rwa")
    with pytest.raises(UnknownTopic, match="raw"):
        await unknown.put(b"x")


# --- unknown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True])
async def test_what_is_unknown_is_sent_again_first_and_stored_once(world: World, after: bool) -> None:
    publisher = await opened(world.bus(), linger=0, max_events=5)
    world.store.fail("log.append", NO_ANSWER, times=3, after=after)
    pending = [publisher.send(value) for value in numbers(23)]
    await world.done(publisher.flush())
    assert payloads_now(world) == numbers(23)
    receipts = [await each for each in pending]
    assert [receipt.position.offset for receipt in receipts] == list(range(23))
    assert [receipt.duplicate for receipt in receipts] == [after] * 5 + [False] * 18


@pytest.mark.parametrize("after", [False, True])
async def test_what_stays_unknown_is_told_and_nothing_behind_it_was_sent(world: World, after: bool) -> None:
    publisher = await opened(world.bus(), linger=0, max_events=5, retry_for=10)
    world.store.fail("log.append", NO_ANSWER, after=after)
    pending = [publisher.send(value) for value in numbers(12)]
    await world.until(pending[0].done)
    behind = publisher.send(b"12")  # it does not know yet
    world.store.heal()
    await world.run(1)
    assert payloads_now(world) == (numbers(5) if after else [])
    unknown = await error_of(pending[2])
    assert isinstance(unknown, PublishUnknown)
    assert unknown.count == 5
    for each in (*pending[5:], behind):
        halted = await error_of(each)
        assert isinstance(halted, PublishHalted)
        assert isinstance(halted.__cause__, PublishUnknown)
    await drained(publisher)
    # Somebody was told, so what is sent now goes on, and what was told can be sent as it was.
    await world.done(publisher.send(b"news"))
    receipt = await unknown.prepared.send()
    assert (len(receipt), receipt.duplicate) == (5, after)
    expected = [*numbers(5), b"news"] if after else [b"news", *numbers(5)]
    assert payloads_now(world) == expected


async def test_sending_what_flush_reports_again_restores_everything_in_its_order(world: World) -> None:
    publisher = await opened(world.bus(), linger=0, max_events=5, retry_for=0)
    world.store.fail("log.append", NO_ANSWER, times=1, after=True)
    for value in numbers(23):
        publisher.send(value)
    told: list[type[Exception]] = []
    while True:
        try:
            await publisher.flush()
            break
        except (PublishUnknown, PublishHalted) as error:
            told.append(type(error))
            await error.prepared.send()
    assert told == [PublishUnknown, *[PublishHalted] * 4]
    assert payloads_now(world) == numbers(23)


async def test_a_refusal_after_an_unknown_attempt_leaves_it_unknown(world: World) -> None:
    publisher = await opened(world.bus(), linger=0, retry_for=1)
    errors = [NO_ANSWER, StoreFull("full")]

    def failing(append: Any, *args: Any) -> Any:
        append(*args)
        raise errors.pop(0) if len(errors) > 1 else errors[0]

    world.store.hooks["log.append"] = failing
    pending = publisher.send(b"x")
    await world.until(pending.done)
    error = await error_of(pending)
    assert isinstance(error, PublishUnknown)
    world.store.heal()
    assert (await error.prepared.send()).duplicate
    assert payloads_now(world) == [b"x"]


async def test_everybody_is_told_if_the_task_that_sends_is_stopped(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0, max_events=2)
    release = world.hold(bus, "append")
    pending = [publisher.send(value) for value in numbers(5)]
    await world.settle()
    (lane,) = publisher._lanes
    assert lane.task is not None
    lane.task.cancel()
    errors = [await error_of(each) for each in pending]
    assert [type(error) for error in errors] == [PublishUnknown] * 2 + [PublishHalted] * 3
    release.set()
    for error in (errors[0], errors[2], errors[4]):
        await error.prepared.send()  # type: ignore[attr-defined]
    assert payloads_now(world) == numbers(5)
    await publisher.send(b"on")
    await publisher.close()


# --- refused ---------------------------------------------------------------------------------


async def test_a_refusal_reaches_every_event_of_its_shipment_and_stops_what_is_behind(world: World) -> None:
    publisher = await opened(world.bus(), linger=0, max_events=3)
    await publisher.send(b"first")
    world.store.fail("log.append", StoreFull("full"), times=1)
    pending = [publisher.send(value) for value in numbers(7)]
    errors = [await error_of(each) for each in pending]
    assert [type(error) for error in errors] == [StoreFull] * 3 + [PublishHalted] * 4
    assert len(set(map(id, errors))) == 7
    assert payloads_now(world) == [b"first"]
    await publisher.flush()  # all of it was seen
    await publisher.send(b"on")
    assert payloads_now(world) == [b"first", b"on"]


async def test_another_partition_goes_on(world: World) -> None:
    publisher = await opened(world.bus(), wide, linger=0)
    keys = {xxhash.xxh64_intdigest(b"%d" % number, 0) % 4: b"%d" % number for number in range(50)}
    world.store.fail("log.append", StoreFull("full"), times=1)
    refused = publisher.send(b"refused", key=keys[0])
    await world.until(refused.done)
    await publisher.send(b"fine", key=keys[1])
    assert isinstance(await error_of(publisher.send(b"behind", key=keys[0])), PublishHalted)
    assert isinstance(await error_of(refused), StoreFull)
    await publisher.send(b"on", key=keys[0])


async def test_a_deleted_topic_is_told_and_then_created_anew(world: World) -> None:
    publisher = await opened(world.bus(), linger=0)
    await publisher.send(b"x")
    world.store.whole.log.delete_topic(world.info().log_id)
    assert isinstance(await error_of(publisher.send(b"y")), TopicDeleted)
    assert (await publisher.send(b"z")).position.offset == 0


# --- nobody's error is lost ------------------------------------------------------------------


async def refused_shipments(world: World, publisher: BufferedPublisher[Any], count: int) -> list[PendingReceipt]:
    """Let one event be refused and the others be halted behind it, each in a shipment of its own."""
    world.store.fail("log.append", StoreFull("full"), times=1)
    pending = []
    for value in numbers(count):
        pending.append(publisher.send(value))
        publisher._close_gathering(publisher._lanes[0])
    await world.until(pending[-1].done)
    return pending


@pytest.mark.parametrize("way", ["flush", "room", "put", "close"])
async def test_a_failure_that_nobody_awaits_is_raised_once(world: World, way: str) -> None:
    publisher = await opened(world.bus(), linger=0)
    await refused_shipments(world, publisher, 1)
    call: Any = (lambda: publisher.put(b"x")) if way == "put" else getattr(publisher, way)
    with pytest.raises(StoreFull):
        await call()
    await world.done(call())
    await publisher.close()
    assert payloads_now(world) == ([b"x"] if way == "put" else [])


async def test_several_failures_are_raised_one_at_a_time_in_their_order(world: World) -> None:
    publisher = await opened(world.bus(), linger=0)
    await refused_shipments(world, publisher, 3)
    with pytest.raises(StoreFull):
        await publisher.close()
    for _ in range(2):
        with pytest.raises(PublishHalted):
            await publisher.close()
    await publisher.close()


async def test_a_failure_that_was_awaited_is_not_raised_again(world: World) -> None:
    publisher = await opened(world.bus(), linger=0)
    world.store.fail("log.append", StoreFull("full"), times=1)
    awaiting = [asyncio.ensure_future(error_of(publisher.send(value))) for value in numbers(3)]
    await asyncio.sleep(0)
    await publisher.flush()
    assert [type(await task) for task in awaiting] == [StoreFull] * 3
    assert (publisher._kept, len(publisher._failures)) == (0, 0)
    await publisher.close()


async def test_an_event_that_nobody_awaits_is_reported_though_others_of_its_shipment_were_seen(world: World) -> None:
    publisher = await opened(world.bus(), linger=0)
    world.store.fail("log.append", StoreFull("full"), times=1)
    seen, _unseen = publisher.send(b"seen"), publisher.send(b"unseen")
    assert isinstance(await error_of(seen), StoreFull)
    with pytest.raises(StoreFull):
        await publisher.flush()
    await publisher.close()


async def test_who_is_cancelled_while_it_waits_has_seen_nothing_and_the_event_is_sent(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0)
    release = world.hold(bus, "append")
    waiting = asyncio.ensure_future(publisher.send(b"x"))
    await world.settle()
    waiting.cancel()
    await asyncio.wait([waiting])
    release.set()
    await publisher.flush()
    assert payloads_now(world) == [b"x"]


async def test_the_failure_of_an_event_whose_sender_was_cancelled_is_reported(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0)
    thawed = world.freeze(bus)
    waiting = asyncio.ensure_future(publisher.send(b"x"))
    await world.settle()
    waiting.cancel()
    await asyncio.wait([waiting])
    world.store.fail("log.append", StoreFull("full"), times=1)
    thawed.set()
    with pytest.raises(StoreFull):
        await publisher.flush()
    await publisher.close()


async def test_the_error_of_the_block_is_raised_and_tells_what_was_not_stored(world: World) -> None:
    with pytest.raises(ZeroDivisionError) as caught:  # noqa: PT012 - it is the block that is tried
        async with world.bus().publisher(raw, linger=0) as publisher:
            await refused_shipments(world, publisher, 3)
            raise ZeroDivisionError
    assert caught.value.__notes__ == ["Not everything was stored: full; and 2 more shipments"]
    await publisher.close()


async def test_what_nobody_ever_asks_for_is_told_by_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0)
    await refused_shipments(world, publisher, 1)
    world.store.heal()  # which has the error, too
    bus._buffered.clear()  # as when the bus is forgotten
    del publisher
    with caplog.at_level(logging.ERROR, "penstock.bus.shipments"):
        gc.collect()
    assert "1 events for 'raw' were not stored, and nobody asked: full" in caplog.text


# --- bounds ----------------------------------------------------------------------------------


async def test_beyond_its_room_send_raises_and_takes_nothing(world: World) -> None:
    publisher = await opened(world.bus(), linger=0, in_flight_bytes=1_000)
    for _ in range(4):
        publisher.send(b"x")
    with pytest.raises(BufferFull, match=r"holds 804 bytes of 1,000.*room\(\)"):
        publisher.send(b"x")
    await publisher.room()
    publisher.send(b"y")
    await publisher.flush()
    assert payloads_now(world) == [b"x"] * 4 + [b"y"]


async def test_put_and_room_wait_in_the_order_of_asking(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0, in_flight_bytes=500)
    release = world.hold(bus, "append")
    putting = [asyncio.ensure_future(publisher.put(value)) for value in numbers(8)]
    await world.settle()
    assert [task.done() for task in putting] == [True] * 2 + [False] * 6
    roomy = asyncio.ensure_future(publisher.room())
    putting[3].cancel()
    await world.settle()
    assert not roomy.done()
    release.set()
    await world.done(asyncio.wait(putting))
    await roomy
    await publisher.close()
    assert payloads_now(world) == [value for value in numbers(8) if value != b"3"]
    assert publisher._room.bytes == 0


@pytest.mark.parametrize("way", ["put", "room and send"])
async def test_a_loop_that_never_waits_holds_no_more_than_it_may(world: World, way: str) -> None:
    limit = (1 << 20) + 50_000  # `room` leaves as much as the largest event takes
    publisher = await opened(world.bus(), linger=0, in_flight_bytes=limit, max_events=50)
    highest = 0
    for value in numbers(400):
        if way == "put":
            await publisher.put(b"x" * 20_000 + value)
        else:
            await publisher.room()
            publisher.send(b"x" * 20_000 + value)
        highest = max(highest, publisher._room.bytes)
    await world.done(publisher.close())
    assert 40_000 < highest <= limit
    assert [data[20_000:] for data in payloads_now(world)] == numbers(400)


async def test_an_event_larger_than_the_room_goes_when_nothing_else_is_on_its_way(world: World) -> None:
    publisher = await opened(world.bus(), linger=0, in_flight_bytes=100)
    await publisher.put(b"a" * 1_000)
    await publisher.put(b"b" * 1_000)
    await publisher.close()
    assert len(payloads_now(world)) == 2


async def test_failures_that_nobody_sees_are_bounded_too(world: World) -> None:
    publisher = await opened(world.bus(), linger=0, in_flight_bytes=1_000)
    world.store.fail("log.append", StoreFull("full"))
    sent = 0
    with pytest.raises(StoreFull):  # noqa: PT012 - one of many calls raises
        for _ in range(100):
            publisher.send(b"x")
            sent += 1
            await world.settle()
    assert sent < 10
    assert publisher._kept <= 1_000
    world.store.heal()
    await drained(publisher)


@pytest.mark.parametrize("way", ["put", "room"])
async def test_who_waits_for_room_does_not_wait_for_what_lingers(world: World, way: str) -> None:
    publisher = await opened(world.bus(), linger=60, in_flight_bytes=300)
    publisher.send(b"x")
    waiting = asyncio.ensure_future(publisher.put(b"y") if way == "put" else publisher.room())
    await world.settle()
    assert waiting.done()
    await publisher.close()


async def test_somebody_who_waits_for_room_is_told_of_a_failure(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0, in_flight_bytes=300)
    publisher.send(b"x")
    putting = asyncio.ensure_future(publisher.put(b"y"))
    world.store.fail("log.append", StoreFull("full"), times=1)
    await world.settle()
    with pytest.raises(StoreFull):
        await putting
    assert publisher._room.bytes == 0
    await publisher.close()


@pytest.mark.parametrize(
    "options",
    [
        {"linger": -1}, {"linger": 61}, {"linger": True}, {"max_events": 0}, {"max_events": 10_001}, {"max_bytes": 0},
        {"max_bytes": 1 << 40}, {"in_flight_bytes": 0}, {"in_flight_bytes": 1.5}, {"retry_for": -1},
    ],
)  # fmt: skip
async def test_wrong_options_are_refused(world: World, options: Any) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        world.bus().publisher(raw, **options)


async def test_a_shipment_is_no_larger_than_a_batch_may_be(world: World) -> None:
    with pytest.raises(UsageError, match=r"at most 8,388,608 \(limits\.batch_bytes_max\)"):
        await opened(world.bus(), max_bytes=9 << 20)


# --- opening and closing ---------------------------------------------------------------------


async def test_a_publisher_that_is_not_open_or_closed_says_so(world: World) -> None:
    bus = world.bus()
    publisher = bus.publisher(raw)
    with pytest.raises(UsageError, match="not open yet"):
        publisher.send(b"x")
    await publisher.flush()
    await publisher.put(b"x")
    assert "open" in repr(publisher)
    await publisher.close()
    await publisher.close()
    with pytest.raises(BusClosed, match="this publisher is closed"):
        publisher.send(b"x")
    for call in (publisher.put(b"x"), publisher.room(), publisher.__aenter__()):
        with pytest.raises(BusClosed, match="this publisher is closed"):
            await call
    never = bus.publisher(raw)
    await never.close()
    with pytest.raises(BusClosed):
        await never.put(b"x")


async def test_a_bus_that_closes_stores_what_its_publishers_have(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=60)
    other = await opened(bus, wide, linger=60)
    pending = publisher.send(b"x")
    other.send(b"y")
    await bus.close()
    assert (await pending).position.offset == 0
    assert payloads_now(world) + payloads_now(world, wide) == [b"x", b"y"]
    with pytest.raises(BusClosed, match="this publisher is closed"):
        publisher.send(b"z")
    with pytest.raises(BusClosed, match="this bus is closed"):
        await bus.publisher(raw).put(b"z")


async def test_a_bus_that_closes_raises_what_nobody_has_seen_when_it_is_closed(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0)
    await refused_shipments(world, publisher, 1)
    with pytest.raises(StoreFull):
        await bus.close()
    await bus.close()
    with pytest.raises(BusClosed):
        await bus.publish(raw, b"x")


async def test_closing_lets_those_go_who_wait_for_room(world: World) -> None:
    bus = world.bus()
    publisher = await opened(bus, linger=0, in_flight_bytes=300)
    release = world.hold(bus, "append")
    publisher.send(b"x")
    putting = asyncio.ensure_future(publisher.put(b"y"))
    await world.settle()
    closing = asyncio.ensure_future(publisher.close())
    release.set()
    await closing
    with pytest.raises(BusClosed):
        await putting
    assert payloads_now(world) == [b"x"]


async def test_in_another_thread_it_refuses(world: World) -> None:
    publisher = await opened(world.bus())
    caught: list[BaseException] = []

    def use() -> None:
        try:
            publisher.send(b"x")
        except UsageError as error:
            caught.append(error)
        try:
            asyncio.run(publisher.flush())
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert len(caught) == 2
    assert all("belongs to another event loop" in str(error) for error in caught)


async def test_in_a_child_of_a_fork_it_refuses_and_the_parent_goes_on(world: World) -> None:
    publisher = await opened(world.bus(), linger=0)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # it ends by itself, whatever happens
        said = b"taken"
        with suppress(BaseException):
            try:
                publisher.send(b"child")
            except UsageError as error:
                said = str(error).encode()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = await asyncio.to_thread(pipe.read)
    await asyncio.to_thread(os.waitpid, pid, 0)
    assert b"belongs to another event loop" in answer
    await publisher.send(b"parent")
    assert payloads_now(world) == [b"parent"]


# --- a process is killed ---------------------------------------------------------------------


CHILD = """
import asyncio, json, sys
from penstock import Bus, Topic

async def main():
    topic = Topic("raw", bytes, partitions=2)
    async with Bus("file:" + sys.argv[1], topics=[topic]) as bus:
        async with bus.publisher(topic, linger=0.001, max_events=50) as publisher:
            number = 0
            waiting = []
            while True:
                waiting.append((number, await publisher.put(b"%d" % number, key=b"%d" % (number % 10))))
                number += 1
                if number % 20 == 0:
                    await asyncio.sleep(0)
                    ended = [each for each in waiting if each[1].done()]
                    waiting = [each for each in waiting if not each[1].done()]
                    told = []
                    for which, pending in ended:
                        position = (await pending).position
                        told.append([which, position.partition, position.offset])
                    if told:
                        print(json.dumps(told), flush=True)

asyncio.run(main())
"""


def acknowledged_until_killed(root: Path) -> dict[int, tuple[int, int]]:
    """Return where each event is that a process knew to be stored when it was killed."""
    acknowledged: dict[int, tuple[int, int]] = {}
    with subprocess.Popen([sys.executable, "-c", CHILD, str(root)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.endswith("\n"):  # a killed process may have been in the middle of one
                for number, partition, offset in json.loads(line):
                    acknowledged[number] = (partition, offset)
            if len(acknowledged) > 5_000:
                child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    return acknowledged


async def test_what_was_acknowledged_outlives_a_kill_and_stands_in_its_order(root: Path) -> None:
    acknowledged = await asyncio.to_thread(acknowledged_until_killed, root)
    async with Bus(f"file:{root}", topics=[]) as bus:
        found = [(each.position, int(each.data)) async for each in bus.read("raw")]
    by_place = {(position.partition, position.offset): number for position, number in found}
    for number, place in acknowledged.items():
        assert by_place[place] == number
    for key in range(10):
        mine = [number for _, number in found if number % 10 == key]
        assert mine == list(range(key, key + 10 * len(mine), 10))  # all of it, from the first on, and once
    assert len(found) >= len(acknowledged) > 5_000


def test_the_costs_of_an_event_are_counted() -> None:
    """An event takes memory besides its bytes; the bound would mean nothing if that were left out."""
    pending = PendingReceipt(None, 0)  # type: ignore[arg-type]
    assert sys.getsizeof(pending) + 2 * sys.getsizeof(b"") + 4 * 8 <= buffered.EVENT_COST
