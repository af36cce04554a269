"""How much is measured: large enough to tell something, small enough for the whole area to take minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The size of everything."""

    batch_events: int = 5_000
    publishes: int = 4
    """Batches to a call of the event loop."""
    tasks: int = 1_000
    publishes_per_task: int = 20
    singles: int = 300
    """Publishes that are awaited one after another."""
    partitions: int = 1_000
    """Of the topic whose heads are read."""
    head_reads: int = 300
    read_batches: int = 200
    """Of the log that is read."""
    segments_many: int = 100
    segments_few: int = 2
    segment_bytes: int = 128 << 10
    """Of a store that is opened after a kill."""
    openings: int = 7
    cursors: int = 10_000
    slots: int = 64
    commits: int = 20
    """Of that many cursors at once."""
    processes: int = 8
    process_batch_events: int = 500
    process_seconds: float = 1.5
    process_rounds: int = 3
    volume_bytes: int = 2_000_000_000
    """What is written and read to see how much memory that takes; 10 GB show no more, and take five times as long."""
    growth_small: int = 100_000
    growth_large: int = 10_000_000
    growth_samples: int = 100
