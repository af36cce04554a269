"""How much is measured: enough that rows weigh more than what a query, of a stream above all, costs by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The size of everything."""

    rounds_max: int = 5
    """A round takes seconds, so that few of them tell as much as many short ones."""
    warm_ups: int = 1
    """Rounds before those that count: Java compiles, and the processes of Python start."""
    partitions: int = 4
    batch_events: int = 1_000
    """Of what is published together: each partition gets about a quarter of it as a block."""
    read_rows: int = 5_000_000
    write_rows: int = 3_000_000
    growth: int = 10
    """What is read has so many times the rows of the topic that it is compared with."""
    growth_none: int = 1_000
    """So few rows that reading them takes what a query takes by itself."""
