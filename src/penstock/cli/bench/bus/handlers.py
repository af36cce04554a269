"""Handlers of typed events: one consumer and four, and effects once in three ways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from penstock.cli.bench.bus.orders import filled, handled, median_of
from penstock.cli.bench.bus.sizes import Sizes
from penstock.cli.bench.harness import Figure, Timing


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure handlers."""
    store, events = directory / "store", sizes.handled_events
    asyncio.run(filled(store, events, sizes.keys, sizes.batch_events))
    took = median_of(
        min(rounds, sizes.rounds),
        {
            "async": partial(handled, store, events),
            "keyed": partial(handled, store, events, consumers=4, mode="key_shared"),
        },
    )
    alone = took["async"]
    yield Timing(alone).events_per_second("handlers.async", events, goal="value >= 100000 events/s")
    yield Timing(took["keyed"], alone).events_per_second("handlers.keyed", events, goal="ratio >= 0.6")
