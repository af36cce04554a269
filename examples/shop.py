"""The shop: an application as anybody would write it. Orders are placed, and three services take note of them.

* **billing** takes every order, in its customer's order, in one process at a time (`exclusive`);
* **mail** sends a confirmation, from as many processes as there are, in whichever order (`shared`); the mail server is
  not there at times;
* **inventory** reserves the goods, from as many processes as there are, each customer's orders in their order
  (`key_shared`, which is the default). One order asks for a thing that it has never heard of.

What a service has done it writes to a journal of its own before the event is acknowledged, so that somebody who knows
what was published can compare. `examples/demo.py` does that, and kills some of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import penstock
from penstock import Bus, Delivery, Retry, Topic, open_store

ITEMS = ("nut", "bolt", "gasket", "valve")
UNHEARD_OF = "perpetuum mobile"
PRICES = {"nut": 5, "bolt": 12, "gasket": 180, "valve": 2_450, UNHEARD_OF: 99_999_900}
"""What things cost, in cents."""
FIXED = "inventory-knows-it-now"
"""A file of this name beside the journals lets inventory know the unheard-of thing: somebody has repaired it."""


@penstock.event("order.placed")
class OrderPlaced(msgspec.Struct, frozen=True):
    """A customer has placed an order."""

    number: int
    customer: str
    item: str
    placed_at: float


orders: Topic[OrderPlaced] = Topic("orders", OrderPlaced, key=lambda order: order.customer, partitions=4)


def some_order(number: int, customers: int = 500) -> OrderPlaced:
    """Return an order, placed now."""
    return OrderPlaced(number, f"customer-{number % customers}", ITEMS[number % len(ITEMS)], time.time())


def revenues(url: str) -> Bus:
    """Return a bus with a projection of the orders: what each customer has spent, in cents."""
    bus = Bus(url, topics=[orders])

    @bus.projection(orders, "revenue")
    def revenue(spent: int | None, order: OrderPlaced) -> int:
        return (spent or 0) + PRICES[order.item]

    return bus


# --- a journal --------------------------------------------------------------------------------


class Journal:
    """Lines that survive the death of their process, whichever death it is."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *words: object) -> None:
        """Write a line as a whole."""
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())


def lines_of(directory: Path, kind: str) -> Iterator[list[str]]:
    """Return what all journals of a kind say, without a line that a death has cut off."""
    for path in sorted(directory.glob(f"{kind}-*.journal")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield line.split()


# --- the services -----------------------------------------------------------------------------


class MailServerAway(Exception):
    """Nobody answers at the mail server, for the moment."""


def service(name: str, url: str, directory: Path) -> Bus:
    """Return the bus of a service, with its handler; it has to be run."""
    bus = Bus(url, topics=[orders], store=Forgetful(open_store(url)))
    journal = Journal(directory / f"{name}-{os.getpid()}.journal")

    def note(order: OrderPlaced, delivery: Delivery[OrderPlaced]) -> None:
        took = time.time() - order.placed_at
        journal.write(order.number, delivery.attempt, delivery.replay, round(took * 1e6))

    if name == "billing":

        @bus.subscriber(orders, "billing", mode="exclusive")
        async def bill(order: OrderPlaced, delivery: Delivery[OrderPlaced]) -> None:
            note(order, delivery)

    elif name == "mail":

        @bus.subscriber(orders, "mail", mode="shared", retry=Retry(max_retries=10, delay=0.05))
        async def confirm(order: OrderPlaced, delivery: Delivery[OrderPlaced]) -> None:
            if (order.number + delivery.attempt) % 50 == 0:
                raise MailServerAway
            note(order, delivery)

    else:

        @bus.subscriber(orders, "inventory", retry=Retry(max_retries=2, delay=0.05))
        async def reserve(order: OrderPlaced, delivery: Delivery[OrderPlaced]) -> None:
            if order.item == UNHEARD_OF and not (directory / FIXED).exists():
                raise KeyError(order.item)
            note(order, delivery)

    return bus


class Forgetful:
    """A store whose every other notification gets lost, as notifications do; nothing rests on them."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.notifier = self
        self._heard = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def notify(self, partition: Any) -> None:
        """Tell others, as ever."""
        self._store.notifier.notify(partition)

    def listen(self, callback: Any) -> Any:
        """Hear every other hint."""

        def hear(partition: Any) -> None:
            self._heard += 1
            if self._heard % 2:
                callback(partition)

        return self._store.notifier.listen(hear)
