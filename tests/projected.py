"""What the tests of projections share: a topic, projections of it, and what a loop over all events makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
from tests.spark_topics import info_of

import penstock
from penstock import Bus, Projection, Topic
from penstock.bus.states import States
from penstock.stores import open_store


@penstock.event("tests.projected.sold")
class Sold(msgspec.Struct, frozen=True):
    customer: str
    cents: int


@penstock.event("tests.projected.left")
class Left(msgspec.Struct, frozen=True):
    customer: str


@dataclass
class Account:
    cents: int = 0
    first: float = 0.0
    last: str = ""


sales: Topic[Sold | Left] = Topic("sales", (Sold, Left), key=lambda event: event.customer, partitions=3)


def accounted(account: Account | None, event: Sold | Left) -> Account | None:
    """Remember the order of what happened, so that a change of it shows; one who leaves is forgotten."""
    if isinstance(event, Left):
        return None
    if account is None:
        # An int in a field of floats, which is a float when it is read again.
        return Account(event.cents, event.cents, f"{event.cents},")
    return Account(account.cents + event.cents, account.first, f"{account.last[-40:]}{event.cents},")


def accounts_of(bus: Bus, **options: Any) -> Projection[Account]:
    """Declare the projection `accounts`."""
    return bus.projection(sales, "accounts", **options)(accounted)


def some_events(count: int, *, customers: int = 7, first: int = 0) -> list[Sold | Left]:
    """Return events of several customers, some of whom leave, and come back."""
    return [
        Left(f"customer-{number % customers}") if number % 23 == 5 else Sold(f"customer-{number % customers}", number)
        for number in range(first, first + count)
    ]


def by_a_loop(events: Iterable[Sold | Left]) -> dict[str, Account]:
    """Return the accounts after all events."""
    accounts: dict[str, Account | None] = {}
    for event in events:
        accounts[event.customer] = accounted(accounts.get(event.customer), event)
    return {key: account for key, account in accounts.items() if account is not None}


def publish(url: str, events: list[Sold | Left]) -> None:
    """Publish events, without running anything."""

    async def run() -> None:
        bus = Bus(url, topics=[sales])
        await bus.open()
        await bus.publish_batch(sales, events)
        await bus.close()

    asyncio.run(run())


def heads(url: str) -> dict[int, int]:
    """Return the end of each partition."""
    with closing(open_store(url)) as store:
        return {each.number: store.log.bounds(each).stop for each in info_of(store, sales.name).partitions}


async def caught_up(projection: Projection[Any], ends: dict[int, int]) -> None:
    """Wait until a projection that runs is at these ends."""
    await until(lambda: projection.positions() == ends)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another thread brings about."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - nobody sets an event
            await asyncio.sleep(0.01)


def run_embedded(url: str, **options: Any) -> dict[str, Account]:
    """Run the projection where the bus runs until it has everything; return what it has come to."""

    async def run() -> dict[str, Account]:
        bus = Bus(url, topics=[sales])
        accounts = accounts_of(bus, **options)
        async with bus:
            await caught_up(accounts, heads(url))
        return dict(accounts.items())

    return asyncio.run(run())


def states_of(states: States, name: str = "accounts", version: int = 1) -> dict[str, bytes]:
    """Return the states as they are kept."""
    return dict(states.items(name, version))
