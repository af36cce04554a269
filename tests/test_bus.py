from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
import xxhash

from penstock import Batch, Bus, Event, Gap, Position, Prepared, Range, Receipt, Topic, event, upcaster
from penstock.batch import KIND_EVENTS_MIN, StoredEvent
from penstock.clock import VirtualClock
from penstock.errors import (
    BeyondEnd,
    BusClosed,
    DecodeError,
    FutureVersion,
    GapFound,
    InvalidEvent,
    InvalidName,
    PartialPublish,
    PublishUnknown,
    StoreClosed,
    StoreFull,
    StoreUnavailable,
    TooLarge,
    TopicDeleted,
    TopicMismatch,
    Trimmed,
    UnknownTopic,
    UsageError,
)
from penstock.rows import Appended, Partition, TopicSettings
from penstock.settings import Limits, MemorySettings, Settings
from penstock.stores.memory import MemoryStore


@event("order.placed", version=2)
@dataclass(frozen=True)
class OrderPlaced:
    order_id: str
    customer: str
    total: Decimal


@upcaster("order.placed", from_version=1)
def with_total(old: dict[str, Any]) -> dict[str, Any]:
    return {**old, "total": "0"}


@event("order.paid", codec="msgpack")
class OrderPaid(msgspec.Struct, frozen=True):
    order_id: str


def order(number: int, customer: str = "ada") -> OrderPlaced:
    return OrderPlaced(f"o-{number}", customer, Decimal(number))


orders = Topic("orders", OrderPlaced, key=lambda placed: placed.customer, partitions=4)
both = Topic[OrderPlaced | OrderPaid]("both", (OrderPlaced, OrderPaid))
raw = Topic("raw", bytes)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(clock: VirtualClock) -> MemoryStore:
    return MemoryStore(clock=clock)


@pytest.fixture
async def bus(store: MemoryStore, clock: VirtualClock) -> AsyncIterator[Bus]:
    async with Bus("memory:", topics=[orders, both, raw], store=store, clock=clock) as opened:
        yield opened


async def all_of(bus: Bus, topic: Topic[Any], **options: Any) -> list[Any]:
    return [topic.decode(found) async for found in bus.read(topic, **options)]


# --- publishing and reading ------------------------------------------------------------------


async def test_what_was_published_is_read_with_its_position(bus: Bus) -> None:
    receipt = await bus.publish(orders, order(1))
    (found,) = [found async for found in bus.read(orders)]
    assert orders.decode(found) == order(1)
    assert found.position == receipt.position
    assert (found.type, found.key, found.source) == ("order.placed", b"ada", "penstock:orders")
    assert (found.content_type, found.headers) == ("application/json", {"dataversion": b"2"})
    assert found.id is not None


async def test_equal_keys_keep_their_order_and_partition(bus: Bus) -> None:
    values = [order(number, customer=f"c{number % 10}") for number in range(200)]
    receipt = await bus.publish_batch(orders, values[:150])
    for value in values[150:]:
        await bus.publish(orders, value)
    assert len(receipt) == 150
    for value, position in zip(values, receipt.positions, strict=False):
        assert position.partition == xxhash.xxh64_intdigest(value.customer.encode(), 0) % 4
    read = await all_of(bus, orders)
    assert len(read) == 200
    for number in range(10):
        mine = [value for value in values if value.customer == f"c{number}"]
        assert [value for value in read if value.customer == f"c{number}"] == mine


async def test_positions_of_a_batch_are_in_the_order_given(bus: Bus) -> None:
    values = [order(number, customer=f"c{number}") for number in range(50)]
    receipt = await bus.publish_batch(orders, values)
    by_position = {found.position: orders.decode(found) async for found in bus.read(orders)}
    assert [by_position[position] for position in receipt.positions] == values


async def test_events_without_a_key_go_round_the_partitions(store: MemoryStore) -> None:
    topic = Topic("spread", bytes, partitions=3)
    async with Bus("memory:", topics=[topic], store=store) as bus:
        used = [(await bus.publish(topic, b"x")).position.partition for _ in range(6)]
        together = await bus.publish_batch(topic, [b"x"] * 10)
    assert used == [0, 1, 2, 0, 1, 2]
    assert len(together.offsets) == 1


async def test_several_classes_share_a_topic_and_come_back_as_themselves(bus: Bus) -> None:
    values: list[OrderPlaced | OrderPaid] = [order(1), OrderPaid("o-1"), order(2)]
    await bus.publish_batch(both, values)
    await bus.publish(both, OrderPaid("o-2"))
    assert await all_of(bus, both) == [*values, OrderPaid("o-2")]
    kinds = [found.content_type async for found in bus.read(both)]
    assert kinds == ["application/json", "application/vnd.msgpack", "application/json", "application/vnd.msgpack"]


@pytest.mark.parametrize("count", [1, KIND_EVENTS_MIN])
async def test_an_old_version_is_brought_up_and_a_future_one_is_refused(bus: Bus, count: int) -> None:
    async def stored(headers: dict[str, bytes]) -> list[StoredEvent]:
        event = Event(type="order.placed", data=b'{"order_id":"o-0","customer":"ada"}', key=b"ada", headers=headers)
        receipt = await bus.publish_batch(orders, Batch.from_events([event] * count))
        first = receipt.positions[0]
        return [found async for found in bus.read(orders, partition=first.partition, start=first.offset)]

    for old in await stored({}):
        assert orders.decode(old) == OrderPlaced("o-0", "ada", Decimal(0))
    for new in await stored({"dataversion": b"3"}):
        with pytest.raises(FutureVersion, match="upgrade"):
            orders.decode(new)
        assert new.data == b'{"order_id":"o-0","customer":"ada"}'
    for wrong in await stored({"dataversion": b"two"}):
        with pytest.raises(DecodeError, match="'dataversion' is not a version number"):
            orders.decode(wrong)


async def test_every_field_of_an_event_can_be_set_and_is_read_back(bus: Bus, clock: VirtualClock) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    await bus.publish(
        raw, b"x", key="k", headers={"a": "b", "c": b"\xff"}, id="1", source="/s", subject="it", time=moment, ttl=60
    )
    (found,) = [found async for found in bus.read(raw)]
    assert found.to_event() == Event(
        data=b"x",
        type="penstock.untyped",
        key=b"k",
        id="1",
        source="/s",
        subject="it",
        time=moment,
        expires_at=found.expires_at,
        content_type="application/octet-stream",
        headers={"a": b"b", "c": b"\xff"},
    )
    assert found.appended_at is not None
    assert found.expires_at == found.appended_at + timedelta(seconds=60)


async def test_the_ttl_of_an_event_beats_the_topics(store: MemoryStore, clock: VirtualClock) -> None:
    topic = Topic("short", bytes, ttl=timedelta(minutes=1))
    async with Bus("memory:", topics=[topic], store=store, clock=clock) as bus:
        await bus.publish(topic, b"1")
        await bus.publish(topic, b"2", ttl=5)
        await bus.publish_batch(topic, [b"3"])
        stated = datetime.fromtimestamp(clock.time_us() / 1e6 + 7, UTC)
        await bus.publish_batch(topic, [Event(data=b"4", expires_at=stated)])
        lives = [
            found.expires_at - found.appended_at
            async for found in bus.read(topic)
            if found.expires_at and found.appended_at
        ]
    assert lives == [timedelta(seconds=60), timedelta(seconds=5), timedelta(seconds=60), timedelta(seconds=7)]


async def test_columns_are_published_as_they_are(bus: Bus) -> None:
    batch = Batch.from_arrow(pa.table({"data": [b"1", b"2"], "key": ["a", "b"]}))
    assert (await bus.publish_batch(raw, batch)).positions == [Position("raw", 0, 0), Position("raw", 0, 1)]
    assert await all_of(bus, raw) == [b"1", b"2"]


async def test_a_part_of_what_was_read_can_be_published_elsewhere(store: MemoryStore) -> None:
    copy = Topic("copy", bytes, partitions=3)
    async with Bus("memory:", topics=[raw, copy], store=store) as bus:
        await bus.publish_batch(raw, [b"%d" % number for number in range(10)], keys=[f"k{n}" for n in range(10)])
        async for batch in bus.read_batches(raw):
            assert isinstance(batch, Batch)
            await bus.publish_batch(copy, batch.select([1, 3, 4, 8]))
        assert sorted(await all_of(bus, copy)) == [b"1", b"3", b"4", b"8"]


async def test_a_topic_can_be_named(bus: Bus) -> None:
    await bus.publish("orders", order(1))
    assert await all_of(bus, orders) == [order(1)]


async def test_a_topic_of_another_bus_is_known_by_name(store: MemoryStore, bus: Bus) -> None:
    async with Bus("memory:", store=store) as other:
        await other.publish("raw", b"x")
        await other.publish_batch("raw", [b"y"], keys=["k"])
    assert await all_of(bus, raw) == [b"x", b"y"]


async def test_reading_begins_and_ends_where_it_is_told(bus: Bus, clock: VirtualClock) -> None:
    for number in range(3):
        await bus.publish_batch(raw, [f"{number}{index}".encode() for index in range(3)])
        clock.advance(10)
    assert await all_of(bus, raw, start=4) == [b"11", b"12", b"20", b"21", b"22"]
    assert await all_of(bus, raw, start=4, stop=6) == [b"11", b"12"]
    assert await all_of(bus, raw, start=9) == []
    later = datetime(2026, 1, 1, 0, 0, 15, tzinfo=UTC)
    assert await all_of(bus, raw, start=later) == [b"20", b"21", b"22"]


async def test_reading_ends_at_what_was_there_when_it_began(bus: Bus) -> None:
    await bus.publish_batch(raw, [b"1", b"2"])
    seen = []
    async for found in bus.read(raw):
        seen.append(found.data)
        await bus.publish(raw, b"more")
    assert seen == [b"1", b"2"]


async def test_many_batches_are_read_in_portions_without_a_gap(bus: Bus) -> None:
    for _ in range(5):
        await bus.publish_batch(raw, [b"x" * 100] * 4_000)
    sizes, expected = [], 0
    async for batch in bus.read_batches(raw):
        assert isinstance(batch, Batch)
        assert batch.start == expected
        expected = batch.range.stop
        sizes.append(len(batch))
    assert expected == 20_000
    assert max(sizes) <= 5_000


# --- outcomes --------------------------------------------------------------------------------


async def test_a_prepared_publish_is_stored_once_however_often_it_is_sent(bus: Bus) -> None:
    prepared = bus.prepare(orders, order(1))
    first, second = await prepared.send(), await prepared.send()
    assert first.position == second.position
    assert (first.duplicate, second.duplicate) == (False, True)
    many = bus.prepare_batch(orders, [order(number, f"c{number}") for number in range(20)])
    assert (await many.send()).positions == (await many.send()).positions
    assert len(await all_of(bus, orders)) == 21


async def test_prepared_publishes_may_be_sent_in_any_order_or_never(bus: Bus) -> None:
    never, late, early = (bus.prepare(raw, text) for text in (b"never", b"late", b"early"))
    await early.send()
    await late.send()
    assert len(never) == 1
    assert await all_of(bus, raw) == [b"early", b"late"]


class Flaky(MemoryStore):
    """Appends, and fails after or before it did, as told."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self.faults: list[str] = []
        real = self.log.append

        def append(partition: Partition, batch: Batch, runs: Sequence[Any]) -> list[Appended]:
            fault = self.faults.pop(0) if self.faults else ""
            if fault == "before":
                raise OSError("no answer")
            if fault == "full":
                raise StoreFull("full")
            answers = real(partition, batch, runs)
            if fault == "after":
                raise OSError("no answer")
            return answers

        self.log.append = append  # type: ignore[method-assign]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_an_unknown_outcome_is_resent_without_a_duplicate(when: str, clock: VirtualClock) -> None:
    store = Flaky(clock)
    async with Bus("memory:", topics=[raw], store=store, clock=clock) as bus:
        store.faults = [when]
        with pytest.raises(PublishUnknown, match="may or may not be stored") as caught:
            await bus.publish(raw, b"x")
        await bus.publish(raw, b"y")
        receipt = await caught.value.prepared.send()
        assert receipt.duplicate == (when == "after")
        assert sorted(await all_of(bus, raw)) == [b"x", b"y"]


async def test_a_refusal_of_the_store_is_raised_as_it_is(clock: VirtualClock) -> None:
    store = Flaky(clock)
    async with Bus("memory:", topics=[raw], store=store, clock=clock) as bus:
        store.faults = ["full"]
        with pytest.raises(StoreFull):
            await bus.publish(raw, b"x")
        assert await all_of(bus, raw) == []
        await bus.publish(raw, b"y")
        assert await all_of(bus, raw) == [b"y"]


async def test_a_mixed_outcome_names_each_part_and_can_be_completed(clock: VirtualClock) -> None:
    store = Flaky(clock)
    async with Bus("memory:", topics=[orders], store=store, clock=clock) as bus:
        values = [order(number, f"c{number}") for number in range(40)]
        store.faults = ["", "after", "full", "before"]
        with pytest.raises(PartialPublish) as caught:
            await bus.publish_batch(orders, values)
        assert len(caught.value.receipts) == 1
        assert {type(error) for error in caught.value.errors.values()} == {OSError, StoreFull}
        receipt = await caught.value.prepared.send()
        assert len(set(receipt.positions)) == 40
        read = await all_of(bus, orders)
        assert sorted(value.order_id for value in read) == sorted(value.order_id for value in values)


class Stuck(MemoryStore):
    """Is asked through threads, and does not append before it is let go."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self.capabilities = msgspec.structs.replace(self.capabilities, blocking=True)
        self.started, self.go = threading.Event(), threading.Event()
        self.threads: list[int] = []
        real = self.log.append

        def append(partition: Partition, batch: Batch, runs: Sequence[Any]) -> list[Appended]:
            self.threads.append(threading.get_ident())
            self.started.set()
            self.go.wait()
            return real(partition, batch, runs)

        self.log.append = append  # type: ignore[method-assign]


@pytest.fixture
def stuck(clock: VirtualClock) -> Iterator[Stuck]:
    store = Stuck(clock)
    yield store
    store.go.set()


async def test_a_publish_that_times_out_is_unknown(stuck: Stuck) -> None:
    bus = Bus("memory:", topics=[raw], store=stuck)
    with pytest.raises(PublishUnknown, match=r"no answer within 0\.01 s") as caught:
        await bus.publish(raw, b"x", timeout=timedelta(milliseconds=10))
    stuck.go.set()
    assert isinstance(caught.value.prepared, Prepared)
    await caught.value.prepared.send()
    assert await all_of(bus, raw) == [b"x"]
    await bus.close()


async def test_a_blocking_store_does_not_block_the_event_loop(stuck: Stuck) -> None:
    bus = Bus("memory:", topics=[raw], store=stuck)
    publishing = asyncio.create_task(bus.publish(raw, b"x"))
    # Were the append made by the event loop itself, this line would never be reached.
    await asyncio.to_thread(stuck.started.wait)
    stuck.go.set()
    await publishing
    await bus.close()
    assert threading.get_ident() not in stuck.threads


async def test_closing_lets_publishes_under_way_end(stuck: Stuck) -> None:
    bus = Bus("memory:", topics=[raw], store=stuck)
    publishing = asyncio.create_task(bus.publish(raw, b"x"))
    await asyncio.to_thread(stuck.started.wait)
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0)
    assert not closing.done()
    stuck.go.set()
    await closing
    assert isinstance(await publishing, Receipt)


async def test_a_producer_that_was_forgotten_goes_on_under_a_new_name(bus: Bus, clock: VirtualClock) -> None:
    await bus.publish(raw, b"1")
    clock.advance(timedelta(days=8))
    await bus.publish(raw, b"2")
    ids = [found.id async for found in bus.read(raw)]
    assert len({identity and identity.split("-")[0] for identity in ids}) == 2
    assert await all_of(bus, raw) == [b"1", b"2"]


async def test_an_empty_batch_stores_nothing(bus: Bus) -> None:
    receipt = await bus.publish_batch(orders, [])
    assert (len(receipt), receipt.positions, receipt.duplicate) == (0, [], False)


# --- wrong use gets a clear error ------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("text", "topic 'orders' takes OrderPlaced, not str"),
        (b"bytes", "not bytes"),
        (OrderPaid("o"), "not OrderPaid"),
        (Event(type="order.payed", data=b""), "declares no event type 'order.payed'"),
        (Event(data=b""), "declares no event type None"),
        (Event(type="order.placed", data="text"), "data: expected bytes, got str"),  # type: ignore[arg-type]
    ],
)
async def test_a_value_of_the_wrong_type_is_refused_by_name(bus: Bus, value: Any, words: str) -> None:
    with pytest.raises(InvalidEvent, match=words):
        await bus.publish(orders, value)
    with pytest.raises(InvalidEvent, match=words):
        await bus.publish_batch(orders, [value])
    assert await all_of(bus, orders) == []


async def test_columns_that_do_not_fit_the_topic_are_refused(bus: Bus) -> None:
    for batch, words in (
        (Batch.build([b"{}"], type="order.payed"), r"declares no event type 'order\.payed'"),
        (Batch.build([b"{}"]), "declares no event type None"),
        (Batch.build([b"{}"], type="order.placed", subject="a\nb"), "control character"),
    ):
        with pytest.raises(InvalidEvent, match=words):
            await bus.publish_batch(orders, batch)
    with pytest.raises(UsageError, match="a Batch has a key column of its own"):
        await bus.publish_batch(raw, Batch.build([b"x"]), keys=["k"])
    with pytest.raises(UsageError, match="an Event carries its own key"):
        await bus.publish_batch(raw, [Event(data=b"x")], keys=["k"])


async def test_headers_are_added_to_those_that_the_event_has(bus: Bus) -> None:
    await bus.publish(orders, order(1), headers={"a": "b"})
    (found,) = [found async for found in bus.read(orders)]
    assert found.headers == {"dataversion": b"2", "a": b"b"}
    assert orders.decode(found) == order(1)


async def test_a_batch_must_be_a_sequence(bus: Bus) -> None:
    for wrong in (b"bytes", "text", {"a": 1}, 5, iter([b"x"])):
        with pytest.raises(InvalidEvent, match="takes a sequence of values or a Batch"):
            await bus.publish_batch(raw, wrong)  # type: ignore[arg-type, misc]


async def test_a_key_of_the_wrong_type_is_refused(store: MemoryStore) -> None:
    topic = Topic("keyed", bytes, key=len)  # type: ignore[arg-type]
    async with Bus("memory:", topics=[topic], store=store) as bus:
        with pytest.raises(InvalidEvent, match="key"):
            await bus.publish(topic, b"x")
        with pytest.raises(InvalidEvent, match="key"):
            await bus.publish_batch(topic, [b"x"])
        with pytest.raises(InvalidEvent, match="2 values for 1 events"):
            await bus.publish_batch(topic, [b"x"], keys=["a", "b"])


async def test_an_unknown_topic_is_answered_with_the_nearest(bus: Bus) -> None:
    with pytest.raises(UnknownTopic, match="there is no topic 'order'; did you mean 'orders'"):
        await bus.publish("order", b"x")
    with pytest.raises(UnknownTopic, match="did you mean 'orders'"):
        bus.prepare("ordesr", b"x")
    undeclared = Topic("order", bytes)
    with pytest.raises(UnknownTopic, match="declare it"):
        await bus.publish(undeclared, b"x")
    with pytest.raises(UnknownTopic):
        _ = [found async for found in bus.read("nothing")]


async def test_an_unknown_field_is_answered_with_the_nearest(bus: Bus) -> None:
    with pytest.raises(UsageError, match="no field 'header'; did you mean 'headers'"):
        await bus.publish(raw, b"x", header={"a": "b"})  # type: ignore[call-overload]


async def test_sizes_beyond_the_limits_are_refused_with_the_numbers(store: MemoryStore) -> None:
    limits = Limits(event_bytes_max=100, batch_bytes_max=250, headers_max=2, headers_bytes_max=20)
    async with Bus("memory:", topics=[raw], store=store, settings=Settings(limits=limits)) as bus:
        with pytest.raises(TooLarge, match="event 0 of this publish has 101 bytes, the limit is 100"):
            await bus.publish(raw, b"x" * 101)
        with pytest.raises(TooLarge, match="event 1 of this publish has 101 bytes"):
            await bus.publish_batch(raw, [b"x", b"x" * 101])
        with pytest.raises(TooLarge, match="for partition 0, has 300 bytes, the limit is 250"):
            await bus.publish_batch(raw, [b"x" * 100] * 3)
        with pytest.raises(TooLarge, match="3 headers, the limit is 2"):
            await bus.publish(raw, b"x", headers={"a": "", "b": "", "c": ""})
        with pytest.raises(TooLarge, match="21 bytes of headers, the limit is 20"):
            await bus.publish(raw, b"x", headers={"a": "x" * 20})
        assert await all_of(bus, raw) == []
        await bus.publish(raw, b"x" * 90, headers={"a": "x" * 9})


async def test_a_full_store_says_so_and_stores_nothing() -> None:
    settings = Settings(memory=MemorySettings(bytes_max=10_000))
    async with Bus("memory:", topics=[raw], settings=settings) as bus:
        await bus.publish_batch(raw, [b"x" * 100] * 50)
        with pytest.raises(StoreFull, match=r"memory\.bytes_max = 10,000"):
            await bus.publish_batch(raw, [b"x" * 100] * 50)
        assert len(await all_of(bus, raw)) == 50


async def test_a_closed_bus_says_so() -> None:
    bus = Bus("memory:", topics=[raw])
    await bus.publish(raw, b"opens by itself")
    prepared = bus.prepare(raw, b"later")
    await bus.close()
    await bus.close()
    for attempt in (bus.publish(raw, b"x"), bus.publish_batch(raw, [b"x"]), prepared.send(), bus.__aenter__()):
        with pytest.raises(BusClosed, match="make a new one"):
            await attempt
    with pytest.raises(BusClosed):
        bus.prepare(raw, b"x")
    with pytest.raises(BusClosed):
        _ = [found async for found in bus.read(raw)]


async def test_making_a_bus_does_no_io() -> None:
    bus = Bus("nosuch://user:secret@host/", topics=[raw])
    assert "secret" not in repr(bus)
    with pytest.raises(StoreUnavailable, match="there is no store for 'nosuch'") as caught:
        await bus.publish(raw, b"x")
    assert "secret" not in str(caught.value)


async def test_a_bus_without_a_url_takes_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_URL", "memory:")
    async with Bus(topics=[raw]) as bus:
        await bus.publish(raw, b"x")
        assert await all_of(bus, raw) == [b"x"]


async def test_two_declarations_of_one_topic_are_refused() -> None:
    with pytest.raises(UsageError, match="'raw' is declared twice"):
        Bus("memory:", topics=[raw, Topic("raw", bytes)])


async def test_a_topic_that_exists_otherwise_is_a_mismatch(store: MemoryStore, bus: Bus) -> None:
    other = Bus("memory:", topics=[Topic("orders", OrderPlaced, partitions=8)], store=store)
    for _ in range(2):  # and a failed opening leaves the bus as it was
        with pytest.raises(TopicMismatch, match="exists with partitions 4, not 8"):
            await other.publish("orders", order(1))
    with pytest.raises(TopicMismatch, match="exists with partitions 1, not 2"):
        await bus.publish(Topic("raw", bytes, partitions=2), b"x")


async def test_a_store_that_was_opened_in_vain_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = MemoryStore()
    found.log.create_topic("raw", TopicSettings(partitions=9))
    monkeypatch.setattr("penstock.bus.local.open_store", lambda *_, **__: found)
    with pytest.raises(TopicMismatch):
        await Bus("memory:", topics=[raw]).publish(raw, b"x")
    with pytest.raises(StoreClosed):
        found.log.topics()


async def test_a_deleted_topic_is_told_once_and_then_created_anew(store: MemoryStore, bus: Bus) -> None:
    await bus.publish(raw, b"1")
    (info,) = [info for info in store.log.topics() if info.name == "raw"]
    store.log.delete_topic(info.log_id)
    with pytest.raises(TopicDeleted):
        await bus.publish(raw, b"2")
    assert (await bus.publish(raw, b"3")).position == Position("raw", 0, 0)


async def test_a_reader_of_a_deleted_topic_is_told_once_too(store: MemoryStore, bus: Bus) -> None:
    await bus.publish(raw, b"1")
    (info,) = [info for info in store.log.topics() if info.name == "raw"]
    store.log.delete_topic(info.log_id)
    with pytest.raises(TopicDeleted):
        await all_of(bus, raw)
    assert await all_of(bus, raw) == []


async def test_wrong_ranges_are_refused_with_what_is_there(store: MemoryStore, bus: Bus) -> None:
    await bus.publish_batch(raw, [b"x"] * 5)
    (info,) = [info for info in store.log.topics() if info.name == "raw"]
    store.log.trim(info.partitions[0], 2)
    for options, error, words in (
        ({"start": 1}, Trimmed, r"offset 1 was trimmed; the log holds \[2, 5\)"),
        ({"start": 6}, BeyondEnd, "beyond the end"),
        ({"partition": 1}, UsageError, "has the partitions 0 to 0, not 1"),
        ({"start": datetime(2026, 1, 1)}, UsageError, "time zone"),  # noqa: DTZ001
    ):
        with pytest.raises(error, match=words):
            await all_of(bus, raw, **options)
    with pytest.raises(UsageError, match="say which `partition`"):
        await all_of(bus, orders, start=1)


async def test_reading_event_by_event_stops_at_a_declared_gap(store: MemoryStore, bus: Bus) -> None:
    await bus.publish_batch(raw, [b"x"] * 4)
    real = store.log.read

    def read(partition: Partition, start: int, **options: Any) -> list[Batch | Gap]:
        items = real(partition, start, **options)
        first = items[0]
        assert isinstance(first, Batch)
        return [first.slice(Range(0, 1)), Gap(1, 3, "damaged"), first.slice(Range(3, 4))]

    store.log.read = read  # type: ignore[method-assign]
    items = [item async for item in bus.read_batches(raw)]
    assert [item.range for item in items] == [Range(0, 1), Range(1, 3), Range(3, 4)]
    with pytest.raises(GapFound, match="read on from offset 3") as caught:
        await all_of(bus, raw)
    assert caught.value.gap == Gap(1, 3, "damaged")


# --- topics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "Orders", "a/b", "a..b", "_internal", "x" * 129, ".a"])
def test_a_topic_name_must_follow_the_rule(name: str) -> None:
    with pytest.raises(InvalidName, match="is not allowed"):
        Topic(name, bytes)


@pytest.mark.parametrize("partitions", [0, -1, 1025, True, "4"])
def test_the_number_of_partitions_has_limits(partitions: Any) -> None:
    with pytest.raises(UsageError, match="it must be 1 to 1024"):
        Topic("t", bytes, partitions=partitions)


def test_a_topic_needs_classes_and_a_key_that_can_be_called() -> None:
    with pytest.raises(UsageError, match="name the classes"):
        Topic("t", ())
    with pytest.raises(UsageError, match="must be a function"):
        Topic("t", bytes, key="customer")  # type: ignore[arg-type]


@pytest.mark.parametrize("events", [OrderPlaced | OrderPaid, [OrderPlaced, OrderPaid], "OrderPlaced"])
def test_a_topic_of_something_else_than_classes_is_told_how_to_name_several(events: Any) -> None:
    with pytest.raises(
        UsageError, match=r"topic 't': .* is not a class; of several classes it takes a tuple, \(A, B\)"
    ):
        Topic("t", events)


def test_a_class_that_is_not_an_event_is_refused_with_what_to_do() -> None:
    class Plain:
        pass

    with pytest.raises(InvalidEvent, match=r"decorate it with @penstock\.event"):
        Topic("t", Plain)


def test_an_undeclared_type_cannot_be_decoded_and_the_nearest_is_named() -> None:
    with pytest.raises(DecodeError, match=r"no event type 'order\.place'; did you mean 'order\.placed'"):
        orders.decode(Event(type="order.place"))


def test_the_settings_of_a_topic_say_what_is_fixed() -> None:
    assert orders.settings == TopicSettings(partitions=4, content_type="application/json")
    assert raw.settings == TopicSettings()
    assert both.settings.content_type == "application/octet-stream"


def test_a_bus_says_the_url_that_another_process_would_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Bus("file:./events").url == "file:./events"
    assert Bus(store=MemoryStore()).url == "memory:"
    monkeypatch.setenv("PENSTOCK_URL", f"file:{tmp_path}")
    assert Bus().url == f"file:{tmp_path}"
