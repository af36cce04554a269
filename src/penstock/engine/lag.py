"""Lag: how far behind a subscription is, a function of two numbers; and one look at all shards of a process."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class LagInfo(NamedTuple):
    """How far a subscription is behind one partition."""

    topic: str
    subscription: str
    partition: int
    next_offset: int
    """The cursor: the first offset that is neither settled nor parked."""
    head: int
    """Where the log ends."""
    lag: int
    """How many events are at or after the cursor: `head - next_offset`."""
    unsettled: int
    """How many of these are not settled yet, ahead of the cursor."""
    parked: int = 0
    """How many wait aside for another attempt."""
    dead: int = 0
    """How many dead letters there are."""
    oldest_seconds: float = 0.0
    """How long ago the event at the cursor was appended; 0 if there is none."""
    external: bool = False
    """Whether its progress is kept elsewhere, such as in a checkpoint of Spark."""

    @property
    def has_lag(self) -> bool:
        """Whether anything is left."""
        return self.lag > 0


def lag_of(next_offset: int, head: int) -> int:
    """Return how many events are left; none if the log is (by a lost disk cache) shorter than the cursor."""
    return max(head - next_offset, 0)


def pulse(  # noqa: PLR0917 - six columns, each of another type
    heads: npt.NDArray[np.int64],
    head_of: npt.NDArray[np.int64],
    read_positions: npt.NDArray[np.int64],
    wanting: npt.NDArray[np.bool_],
    timers: npt.NDArray[np.float64],
    now: float,
) -> npt.NDArray[np.int64]:
    """Return the shards to wake: those with something to read that want it, and those whose timer is due.

    One call for all shards of a process. `heads` has the ends of partitions, `head_of` which of them is a shard's.
    """
    behind = (heads[head_of] > read_positions) & wanting
    behind |= timers <= now
    return np.flatnonzero(behind)
