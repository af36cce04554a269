"""A consumer that is far behind: whether it keeps its pace, how much memory that takes, and what the ledger costs.

A process of its own does it, so that its memory is that of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from penstock.cli.bench.delivery.jobs import CatchUp
from penstock.cli.bench.delivery.sizes import Sizes
from penstock.cli.bench.harness import Figure
from penstock.cli.bench.log.children import children
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure catching up."""
    with a_store(directory / "store") as store:
        (partition,) = a_topic(store).partitions
        appender = Appender(store, keyed_batch(sizes.batch_events))
        for _ in range(sizes.behind_batches):
            appender.append(partition)
        events = store.log.bounds(partition).stop
    few = min(sizes.read_batches * sizes.batch_events, events)
    job = CatchUp(
        directory=str(directory / "store"), events=events, few=few, rounds=max(min(rounds, sizes.behind_rounds), 1)
    )
    with children([job], area="delivery") as [child]:
        told: dict[str, Any] = child.hear()
        child.end()
    behind, near, unrecorded = (median(told[name]) for name in ("behind", "near", "unrecorded"))
    rate, ceiling = events / behind, few / near
    yield Figure.of("catch_up", rate, "events/s", goal="ratio >= 0.9", ceiling=ceiling, ratio=rate / ceiling)
    yield Figure.of("catch_up.memory", told["memory"] / 1e6, "MB", goal="value <= 300 MB")
    yield Figure.of("ledger.cost", (behind / unrecorded - 1) * 100, "%", goal="value <= 5 %")
