"""How much is measured: large enough to tell something, small enough for the whole area to take minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The size of everything."""

    handled_events: int = 300_000
    """That handlers take, round by round: so many that opening and closing four buses is not what is measured."""
    keys: int = 5_000
    batch_events: int = 5_000
    """Of the log that they take them from."""
    once_events: int = 15_000
    """Each of which is a transaction of its own, and synced."""
    handler_rounds: int = 9
    """What handlers do wavers: syncs by a third from one second to the next, and when four buses have their parts."""
    sent_events: int = 150_000
    peer_events: int = 60_000
    rounds: int = 5
    """At most: each takes seconds."""
