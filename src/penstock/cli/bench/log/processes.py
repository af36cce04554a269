"""Several processes that publish to one partition, against one of them alone; all take turns.

All are started once. The rounds of one alone and of all together alternate, so that whatever slows the machine down
slows both; between them this process syncs the same bytes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

from penstock.batch import Batch
from penstock.cli.bench.batch import PAYLOADS
from penstock.cli.bench.harness import Figure, percentile, sample
from penstock.cli.bench.log.bare import BareFile
from penstock.cli.bench.log.children import Child, children
from penstock.cli.bench.log.events import stored_bytes
from penstock.cli.bench.log.jobs import Publish
from penstock.cli.bench.log.sizes import Sizes

BARE_SYNCS = 100
"""Of each round."""
START_SECONDS = 0.5
"""By then all have read when to start, and have learnt what was written meanwhile."""


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure several processes."""
    contest = _Contest(directory / "batches", sizes, sizes.process_batch_events, rounds)
    yield contest.total("processes.batches", goal="ratio >= 1.0")
    turns = [len(waits) for waits in contest.waits]
    fairness = min(turns) / max(turns)
    yield Figure.of("processes.batches.fairness", fairness, "least/most", goal="value >= 0.5 least/most")
    contest = _Contest(directory / "single", sizes, 1, rounds)
    yield contest.total("processes.single", goal="ratio >= 0.9")
    wait = percentile([wait for waits in contest.waits for wait in waits], 99)
    syncs = wait / percentile(contest.bare, 50)
    yield Figure.of("processes.single.p99", syncs, "syncs", goal="value <= 20 syncs")


class _Contest:
    """The rounds of one process and of all."""

    def __init__(self, directory: Path, sizes: Sizes, events: int, rounds: int) -> None:
        self._events = events
        self._seconds = sizes.process_seconds
        self._alone: list[int] = []
        self._together: list[int] = []
        self.waits: list[list[float]] = [[] for _ in range(sizes.processes)]
        """How long each publish of each process took, when all were publishing."""
        self.bare: list[float] = []
        """How long bare syncs of a single event's bytes took."""
        directory.mkdir()
        parts = stored_bytes(Batch.build(PAYLOADS[:1]))
        jobs = [Publish(directory=str(directory / "store"), events=events)] * sizes.processes
        with closing(BareFile(directory / "bare")) as bare, children(jobs) as started:
            for child in started:
                child.hear()
            for _ in range(max(min(rounds, sizes.process_rounds), 1)):
                self.bare += sample([lambda: bare.write(parts)], BARE_SYNCS)[0]
                self._alone.append(sum(map(len, self._round(started[:1]))))
                waits = self._round(started)
                self._together.append(sum(map(len, waits)))
                for all_waits, these in zip(self.waits, waits, strict=True):
                    all_waits.extend(these)
            for child in started:
                child.end()

    def _round(self, publishing: Sequence[Child]) -> list[list[float]]:
        start = time.monotonic() + START_SECONDS
        for child in publishing:
            child.tell([start, start + self._seconds])
        return [child.hear() for child in publishing]

    def total(self, name: str, *, goal: str) -> Figure:
        """Return the figure of all together, against one alone."""
        per_turn = self._events / self._seconds
        together, alone = median(self._together) * per_turn, median(self._alone) * per_turn
        return Figure.of(name, together, "events/s", goal=goal, ceiling=alone, ratio=together / alone)
