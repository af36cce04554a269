"""Very many subscriptions of one process that have nothing to do: what they cost to begin, to keep and to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.cli.bench.delivery.jobs import Idle
from penstock.cli.bench.delivery.sizes import Sizes
from penstock.cli.bench.harness import Figure, Timing
from penstock.cli.bench.log.children import children


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure many subscriptions; a single round of it tells, as it is an average of thousands."""
    job = Idle(
        directory=str(directory / "store"),
        subscriptions=sizes.subscriptions,
        topics=sizes.topics,
        passes=sizes.passes,
        seconds=sizes.idle_seconds,
    )
    with children([job], area="delivery") as [child]:
        told: dict[str, Any] = child.hear()
        child.end()
    yield Figure.of("monitor.start", told["start"], "s", goal="value <= 10 s")
    yield Figure.of("monitor.memory", told["memory"] / sizes.subscriptions / 1e3, "kB", goal="value <= 20 kB")
    yield Figure.of("monitor.idle", told["busy"] * 100, "%", goal="value <= 1 %")
    yield Timing(told["passes"]).microseconds("monitor.pass", goal="value <= 200 µs")
