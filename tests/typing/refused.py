"""Mistakes that the type checker must find: `mypy --strict` warns of an ignore that is not needed. Never run."""

from __future__ import annotations

from dataclasses import dataclass

import penstock
from penstock import Bus, Topic


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
