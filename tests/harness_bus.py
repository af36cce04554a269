"""A bus for tests of the harness: what an application would have, on a store that cannot be opened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock import Bus, Topic, event


@event("harness.order")
@dataclass(frozen=True)
class Order:
    number: int
    customer: str = "ann"


orders = Topic("orders", Order, key=lambda order: order.customer, partitions=2)
raw = Topic("raw", bytes)


def a_bus(**options: Any) -> Bus:
    """Return a bus of both topics; whoever opens its own store fails."""
    return Bus("file:/nowhere/at/all", topics=[orders, raw], **options)
