"""Mistakes that the type checker must find: `mypy --strict` warns of an ignore that is not needed. Never run."""

from __future__ import annotations

from dataclasses import dataclass

import penstock
from penstock import Bus, RetryLater, Topic


@penstock.event("order.placed")
@dataclass(frozen=True)
class OrderPlaced:
    customer: str


orders = Topic("orders", OrderPlaced)
wrong_key = Topic("orders", OrderPlaced, key=lambda order: order.nothing)  # type: ignore[attr-defined]
number_key = Topic("orders", OrderPlaced, key=lambda order: 5)  # type: ignore[arg-type, return-value]
no_events: Topic[bytes] = Topic("orders")  # type: ignore[call-arg]


async def main(bus: Bus) -> None:
    await bus.publish(orders, b"bytes")  # type: ignore[misc]
    await bus.publish(orders, OrderPlaced("ada"), header={})  # type: ignore[call-overload]
    await bus.publish(orders, OrderPlaced("ada"), headers={"a": 1})  # type: ignore[dict-item]
    await bus.publish_batch(orders, b"bytes")  # type: ignore[misc]
    receipt = await bus.publish(orders, OrderPlaced("ada"))
    receipt.duplicate = True  # type: ignore[misc]


async def buffered(bus: Bus) -> None:
    publisher = bus.publisher(orders)
    publisher.send(b"bytes")  # type: ignore[arg-type]
    publisher.send(OrderPlaced("ada"), header={})  # type: ignore[call-arg]
    await publisher.put("text")  # type: ignore[arg-type]
    await publisher.put(OrderPlaced("ada"), key=5)  # type: ignore[arg-type]


def synchronous(bus: Bus) -> None:
    with bus.sync() as sync_bus:
        sync_bus.publish(orders, b"bytes")  # type: ignore[misc]
        sync_bus.publish_batch(orders, b"bytes")  # type: ignore[misc]
        sync_bus.consume(orders, "billing", mode="wrong")  # type: ignore[arg-type]
        for delivery in sync_bus.consume(orders, "billing"):
            delivery.attempt = 5  # type: ignore[misc]


def subscribed(bus: Bus) -> None:
    bus.subscriber(orders, "billing", mode="wrong")  # type: ignore[arg-type]
    bus.subscriber(orders, "billing", ack="never")  # type: ignore[arg-type]
    bus.subscriber(orders, "billing", concurency=4)  # type: ignore[call-arg]
    bus.subscriber(orders, "billing", retry=3)  # type: ignore[arg-type]
    bus.subscriber(orders, "billing", middleware=[print])  # type: ignore[list-item]
    bus.subscriber(orders)  # type: ignore[call-arg]

    @bus.subscriber(orders, "billing")
    async def bill(order: OrderPlaced) -> None:
        await bus.publish(orders, order.customer)  # type: ignore[misc]

    bill(5)  # type: ignore[arg-type, unused-coroutine]
    RetryLater("soon")  # type: ignore[arg-type]
