"""How much the bench of the pipelines does; tests make it small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """So much of everything."""

    rounds_max: int = 3
    """Each round takes many seconds."""
    redrive_letters: int = 100_000
    redrive_partitions: int = 4
    warm_ups: int = 1
    """Rounds before those that count: Java compiles, and the processes of Python start."""
    archive_rows: int = 3_000_000
    archive_partitions: int = 4
    archive_batch_events: int = 1_000
    """Of what is published together: each partition gets about a quarter of it as a block."""
    audit_records: int = 10_000_000
    """Settlement records whose sets of offsets do not join for long."""
    audit_ranges: int = 100_000
    audit_events: int = 100_000_000
    """So many events are settled by so many records of one range each."""
    audit_shards: int = 16
    project_rows: int = 4_000_000
    project_keys: int = 200_000
    project_partitions: int = 4
    project_batch: int = 10_000
    project_step_rows: int = 4_000_000
