"""Handlers of typed events: one consumer and four, and effects once in two ways."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import count
from pathlib import Path

from penstock.bus.delivered import Delivery
from penstock.bus.middleware.dedupe import Dedupe
from penstock.cli.bench.bus.orders import Order, filled, handled, in_turn
from penstock.cli.bench.bus.sizes import Sizes
from penstock.cli.bench.harness import Figure, Timing

_files = count()


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure handlers."""
    store, events, rounds = directory / "store", sizes.handled_events, min(rounds, sizes.handler_rounds)
    asyncio.run(filled(store, events, sizes.keys, sizes.batch_events))
    took = in_turn(
        rounds,
        {
            "async": partial(handled, store, events),
            "keyed": partial(handled, store, events, consumers=4, mode="key_shared"),
            "dedupe": partial(_deduped, store, directory, events),
        },
    )
    alone = took["async"]
    yield Timing(alone).events_per_second("handlers.async", events, goal="value >= 100000 events/s")
    yield Timing(took["keyed"], alone).events_per_second("handlers.keyed", events, goal="ratio >= 0.6")
    yield Timing(took["dedupe"], alone).events_per_second("handlers.dedupe", events, goal="ratio >= 0.6")

    few, events = directory / "few", sizes.once_events
    asyncio.run(filled(few, events, sizes.keys, sizes.batch_events))
    took = in_turn(
        rounds, {"once": partial(_once, few, directory, events), "bare": partial(_committed, directory, events)}
    )
    yield Timing(took["once"], took["bare"]).events_per_second("handlers.once", events, goal="ratio >= 0.7")


async def _deduped(store: Path, directory: Path, events: int) -> float:
    with Dedupe(directory / f"marks-{next(_files)}.db") as dedupe:
        return await handled(store, events, middleware=[dedupe])


def _database(directory: Path) -> sqlite3.Connection:
    """Return an application's database, whose commits are on the medium."""
    connection = sqlite3.connect(directory / f"effects-{next(_files)}.db", isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute("create table orders (id text primary key, customer text, total integer)")
    return connection


def _insert(connection: sqlite3.Connection, number: int, order: Order) -> None:
    connection.execute(
        "insert into orders values (?, ?, ?)", (f"{order.order_id}-{number}", order.customer, order.total)
    )


async def _once(store: Path, directory: Path, events: int) -> float:
    with closing(_database(directory)) as connection:

        def work(order: Order, delivery: Delivery[Order]) -> None:
            with delivery.once(connection) as first:
                if first:
                    _insert(connection, 0, order)

        return await handled(store, events, work=work)


async def _committed(directory: Path, events: int) -> float:
    """Make the same transactions without anything else."""
    order = Order("order", "customer", 1)
    with closing(_database(directory)) as connection:
        began = time.perf_counter()
        for number in range(events):
            connection.execute("begin immediate")
            _insert(connection, number, order)
            connection.execute("commit")
        return time.perf_counter() - began
