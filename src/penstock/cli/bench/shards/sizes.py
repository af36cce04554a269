"""How much is measured: large enough to tell something, small enough for the whole area to take minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The size of everything."""

    batch_events: int = 5_000
    read_batches: int = 400
    """Of the log that is consumed again and again."""
    behind_batches: int = 2_000
    """Of the log with a poisoned key: ten million events."""
    keys: int = 100_000
    """Of that log."""
    behind_rounds: int = 9
    """Each takes a second or two, of which a tenth is chance."""
    handled_events: int = 100_000
    """That processes handle one by one, with a handler that takes its time."""
    handler_microseconds: float = 20.0
    process_rounds: int = 3
    """Each starts processes."""
    events_per_second: int = 2_000
    """Published while a consumer joins, or is killed."""
