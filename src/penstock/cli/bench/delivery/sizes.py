"""How much is measured: large enough to tell something, small enough for the whole area to take minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The size of everything."""

    batch_events: int = 5_000
    read_batches: int = 200
    """Of the log that is consumed again and again."""
    behind_batches: int = 2_000
    """Of the log that a consumer is behind: ten million events."""
    behind_rounds: int = 5
    """Each takes seconds."""
    span_events: int = 1 << 20
    """What the bitmap of a cursor may span."""
    span_commits: int = 40
    subscriptions: int = 10_000
    topics: int = 100
    """Of these subscriptions."""
    passes: int = 200
    """Looks of the monitor at all of them."""
    idle_seconds: float = 10.0
    tasks: int = 100
    """That publish, each at its own pace."""
    events_per_second: int = 10_000
    """Of all tasks together."""
    load_seconds: float = 3.0
    """Of a round under that load."""
    load_rounds: int = 5
    bare_syncs: int = 100
    """Of each round."""
    dropped_per_second: int = 1_000
    """Events a second while every notification is dropped."""
    dropped_seconds: float = 5.0
