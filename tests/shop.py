"""Events and topics that tests of subscribers share, also with processes of their own."""

from __future__ import annotations

from dataclasses import dataclass

import penstock
from penstock import Topic


@penstock.event("tests.placed")
@dataclass(frozen=True)
class Placed:
    customer: str
    number: int = 0


@penstock.event("tests.paid")
@dataclass(frozen=True)
class Paid:
    customer: str


orders = Topic[Placed | Paid]("orders", (Placed, Paid), key=lambda order: order.customer)
placed = Topic("placed", Placed, key=lambda order: order.customer)
