"""Programs as users write them; `mypy --strict` must accept every line. Never run."""

from __future__ import annotations

import sqlite3
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

import penstock
from penstock import (
    Batch,
    BufferedPublisher,
    Bus,
    DeadGroup,
    DeadLetter,
    Delivery,
    Event,
    Gap,
    PendingReceipt,
    Position,
    Prepared,
    Receipt,
    Reject,
    Replayed,
    Retry,
    RetryLater,
    ScheduledReceipt,
    StoredEvent,
    SyncBus,
    SyncConsumer,
    SyncDeliveredBatch,
    SyncDelivery,
    SyncPrepared,
    Topic,
)


@penstock.event("order.placed", version=2)
@dataclass(frozen=True)
class OrderPlaced:
    customer: str


@penstock.event("order.paid")
@dataclass(frozen=True)
class OrderPaid:
    customer: str


@penstock.upcaster("order.placed", from_version=1)
def add_customer(old: dict[str, object]) -> dict[str, object]:
    return {**old, "customer": "nobody"}


assert_type(OrderPlaced("ada"), OrderPlaced)  # the decorator leaves the class alone
assert_type(add_customer({}), dict[str, object])  # and so does the other

orders = Topic("orders", OrderPlaced, key=lambda order: order.customer, partitions=4, ttl=timedelta(days=1))
both = Topic[OrderPlaced | OrderPaid]("both", (OrderPlaced, OrderPaid), key=lambda event: event.customer)
raw = Topic("raw", bytes)
assert_type(orders, Topic[OrderPlaced])
assert_type(both, Topic[OrderPlaced | OrderPaid])
assert_type(raw, Topic[bytes])


async def main() -> None:
    async with Bus("memory:", topics=[orders, both, raw]) as bus:
        assert_type(bus, Bus)
        receipt = await bus.publish(orders, OrderPlaced("ada"), key=b"k", headers={"a": "b", "c": b"d"}, ttl=60)
        assert_type(receipt, Receipt)
        assert_type(receipt.position, Position)
        await bus.publish(both, OrderPaid("ada"))
        await bus.publish(raw, b"x", timeout=1.5)
        await bus.publish(raw, Event(data=b"x"))
        await bus.publish("raw", b"x")
        await bus.publish_batch(orders, [OrderPlaced("ada")])
        await bus.publish_batch(raw, [b"x"], keys=["k", None, b"k"])
        await bus.publish_batch(raw, Batch.build([b"x"]))
        prepared = bus.prepare(orders, OrderPlaced("ada"))
        assert_type(prepared, Prepared)
        assert_type(await prepared.send(), Receipt)
        async for event in bus.read(orders, partition=0, start=5):
            assert_type(event, StoredEvent)
            assert_type(orders.decode(event), OrderPlaced)
        async for item in bus.read_batches(both):
            assert_type(item, Batch | Gap)
            if isinstance(item, Batch):
                for stored in item:
                    assert_type(both.decode(stored), OrderPlaced | OrderPaid)
        letters = await bus.dead_letters.ls(orders, "billing", error="KeyError", key=b"k", offsets=range(5), limit=5)
        assert_type(letters, list[DeadLetter])
        assert_type(await bus.dead_letters.groups("orders", "billing", partition=None), list[DeadGroup])
        assert_type(await bus.dead_letters.replay(orders, "billing", rate=5, fingerprint="00"), Replayed)
        async for delivery in bus.consume(orders, "billing"):
            with delivery.once(sqlite3.connect("app.db")) as first:
                assert_type(first, bool)
            async with delivery.once(object(), scope="mails") as first:
                assert_type(first, bool)


async def buffered(bus: Bus) -> None:
    async with bus.publisher(orders, linger=timedelta(milliseconds=1), max_events=100) as publisher:
        assert_type(publisher, BufferedPublisher[OrderPlaced])
        pending = publisher.send(OrderPlaced("ada"), key=b"k", headers={"a": "b"})
        assert_type(pending, PendingReceipt)
        assert_type(await pending, Receipt)
        assert_type(await publisher.put(Event(data=b"{}"), ttl=60), PendingReceipt)
        await publisher.flush()
    async with bus.publisher(both) as mixed:
        mixed.send(OrderPaid("ada"))
        mixed.send(OrderPlaced("ada"))
    named: BufferedPublisher[bytes] = bus.publisher("raw")
    await named.put(b"x")


def synchronous(bus: Bus) -> None:
    with bus.sync() as sync_bus:
        assert_type(sync_bus, SyncBus)
        assert_type(sync_bus.publish(orders, OrderPlaced("ada"), key="k", timeout=1.5), Receipt)
        assert_type(sync_bus.publish(orders, OrderPlaced("ada"), delay=60), ScheduledReceipt)
        assert_type(sync_bus.publish_batch(raw, [b"x"], keys=["k"]), Receipt)
        prepared = sync_bus.prepare(orders, OrderPlaced("ada"))
        assert_type(prepared, SyncPrepared)
        assert_type(prepared.send(), Receipt)
        for event in sync_bus.read(orders, partition=0):
            assert_type(event, StoredEvent)
        for item in sync_bus.read_batches(orders):
            assert_type(item, Batch | Gap)
        with sync_bus.consume(orders, "billing", mode="exclusive") as consumer:
            assert_type(consumer, SyncConsumer[OrderPlaced])
            for delivery in consumer:
                assert_type(delivery, SyncDelivery[OrderPlaced])
                assert_type(delivery.value, OrderPlaced)
                delivery.ack()
            for batch in consumer.batches(max_events=10):
                assert_type(batch, SyncDeliveredBatch)
                batch.ack(up_to=5)


async def subscribed(bus: Bus) -> None:
    @bus.subscriber(orders, "billing", mode="shared", retry=Retry(max_retries=5), timeout=timedelta(minutes=1))
    async def bill(order: OrderPlaced, delivery: Delivery[OrderPlaced]) -> None:
        assert_type(delivery.value, OrderPlaced)
        await delivery.extend(timedelta(seconds=5))
        raise RetryLater(timedelta(seconds=5), "not now", counted=False)

    async for delivery in bus.consume(orders, "billing"):
        # The decorator leaves the function alone.
        await assert_type(bill(delivery.value, delivery), Coroutine[Any, Any, None])

    @bus.subscriber("both", "shipping", concurrency=4, ack="manual", ignore_others=True, middleware=[])
    def ship(order: OrderPaid) -> None:
        raise Reject("never")

    assert_type(ship(OrderPaid("ada")), None)
    await bus.open()
    async with bus.lifespan():
        await bus.run()
