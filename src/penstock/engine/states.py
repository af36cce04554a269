"""What may become of an event in a subscription, as one table.

The guide draws the same table (`docs/guide/delivery.md`), and a test compares the two. `Shard` goes through no
transition that is not in it: the tests run every one, and the model refuses any other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class State(StrEnum):
    """Where an event is."""

    AHEAD = "ahead"
    """In the log, not read yet."""
    READY = "ready"
    """Read; waits for its lane, for credit or for a consumer."""
    HELD = "held"
    """Handed over."""
    DELAYED = "delayed"
    """Failed, and tried again soon; in memory."""
    PARKED = "parked"
    """Kept aside in the store, where the cursor may pass it."""
    SETTLED = "settled"
    """Over; how, is its outcome."""


class Outcome(StrEnum):
    """How an event left the cursor's way. All but `PARKED` are final."""

    ACKED = "acked"
    DEAD = "dead"
    """A dead letter: kept aside until somebody replays or purges it."""
    EXPIRED = "expired"
    DISCARDED = "discarded"
    """Given up by a policy that the user chose."""
    SKIPPED = "skipped"
    """Passed over by a seek."""
    GAP = "gap"
    """The log declares that there is nothing."""
    PARKED = "parked"
    """Not settled, but durably kept aside: settled later, by another record."""


TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    (State.AHEAD, "read"): State.READY,
    (State.AHEAD, "lane is parked"): State.PARKED,
    (State.AHEAD, "gap"): State.SETTLED,
    (State.AHEAD, "had all its attempts before"): State.SETTLED,
    (State.READY, "handed over"): State.HELD,
    (State.READY, "expired"): State.SETTLED,
    (State.READY, "late ack"): State.SETTLED,
    (State.READY, "lane is parked"): State.PARKED,
    (State.READY, "window is full of blocked lanes"): State.PARKED,
    (State.HELD, "ack"): State.SETTLED,
    (State.HELD, "given back"): State.READY,
    (State.HELD, "given back, lane is parked"): State.PARKED,
    (State.HELD, "failed, short delay"): State.DELAYED,
    (State.HELD, "failed, long delay"): State.PARKED,
    (State.HELD, "rejected, or retries exhausted"): State.SETTLED,
    (State.HELD, "retries exhausted, halt"): State.READY,
    (State.DELAYED, "delay is over"): State.READY,
    (State.DELAYED, "late ack"): State.SETTLED,
    (State.DELAYED, "lane is parked"): State.PARKED,
    (State.DELAYED, "window is full of blocked lanes"): State.PARKED,
    (State.PARKED, "due, and first of its lane"): State.READY,
    (State.PARKED, "late ack"): State.SETTLED,
    (State.PARKED, "had all its attempts before"): State.SETTLED,
    (State.PARKED, "given up by somebody else"): State.SETTLED,
    (State.SETTLED, "replayed dead letter"): State.PARKED,
}
"""From a state, by what happens, to a state. An event that was parked is handed over from its own copy; it goes through
`READY` and `HELD` like any other, and returns to `PARKED` whatever its delay."""
