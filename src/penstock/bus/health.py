"""Health: whether events make progress while there are any, subscription by subscription, and how the store does.

**Health is progress while there is a backlog.** A subscription with nothing to do is healthy, consumed or not.

* `ok`: nothing waits that should not.
* `degraded`: something waits, fails or is paused, and nobody need be called: everything else makes progress.
* `stalled`: events wait, and none of their partition was settled for longer than `stalled_after`; or it has halted.

What is longer than `stalled_after` is measured from the last progress, or from when the first event that waits was
appended, whichever is later; so a quiet subscription is not stalled by the first event that comes. Nor is one that is
slow by its own policy: the timeout of a handler, three heartbeats, the delay of a checkpoint and the rate count in its
favour. A subscription that nobody consumes is stalled only if it was consumed before: one that was made and never used
is `degraded`, and said to be idle. One that is paused is never stalled, and one whose progress is kept elsewhere (a
query of Spark) is not judged. Dead letters are counted and judge nothing: they are settled.

All of this is told by the store, so that any process sees the same of any other. What a process has in hand, and what
goes wrong within it, only it can tell. When a cursor moved is exact for a bus that looks repeatedly; for the first look
it is when the cursor was last written, which a retry does, too.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

import msgspec

from penstock.rows import PartitionFault

State = Literal["ok", "degraded", "stalled"]

LANES_SHOWN: Final = 5
"""Of lanes that are blocked, and as many again of those that wait for an upgrade."""

UPGRADE: Final = "FutureVersion"
"""The error of an event that a newer version of its class has written."""


class ConsumerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody who consumes a subscription now."""

    owner: str
    """Its `consumer_id`, or what was made up for it."""
    process: str
    here: bool
    """Whether it is a consumer of the bus that was asked."""


class HaltedAt(msgspec.Struct, frozen=True, kw_only=True):
    """Where a partition of a subscription stands still until it is resumed."""

    partition: int
    offset: int
    error: str
    """The type of the last error; `Gap` for a hole. Empty if only the process that has it knows."""


class BlockedLane(msgspec.Struct, frozen=True, kw_only=True):
    """A key of which nothing is delivered before its first event that waits aside."""

    partition: int
    key_hash: str | None
    """Sixteen hexadecimal digits; None for events without a key, and in mode `shared`, which has no order."""
    offset: int
    """Of the first one."""
    events: int
    """How many of this key wait aside."""
    attempts: int
    error: str
    """The type of the last error, never what it says."""
    due_at: datetime | None
    """When it is tried again; None if nothing but its turn is waited for."""

    @property
    def upgrade(self) -> bool:
        """Whether it waits for a program that knows a newer version of its class."""
        return self.error == UPGRADE


class SubscriptionHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How one subscription does."""

    topic: str
    name: str
    mode: str
    external: bool
    """Whether its progress is kept elsewhere; it is not judged then."""
    state: State
    reasons: tuple[str, ...]
    """Why it is not `ok`, and what else is worth a look, in words."""
    lag: int
    """How many events are at or after its cursors."""
    unsettled: int
    """How many of these are not settled."""
    oldest_seconds: float
    """How long ago the first event was appended that is not settled, also if it waits aside; 0 if there is none."""
    lag_per_second: float | None
    """How quickly the lag grew since the same bus was last asked; None at the first time."""
    settled_per_second: float | None
    """How many events were settled, or set aside, in a second since then; None if it was moved in between."""
    last_progress_at: datetime | None
    """When a cursor last moved; None if none ever did."""
    consumers: tuple[ConsumerHealth, ...]
    """Without those of mode `failover` that stand by: they have nothing yet."""
    in_flight: int
    """How many events are in hand here, in this process."""
    paused: bool
    halted: tuple[HaltedAt, ...]
    waiting: int
    """How many events wait aside for another attempt, or behind one that does."""
    dead: int
    """How many dead letters there are."""
    blocked_lanes: int
    """How many keys wait behind such an event."""
    upgrades: int
    """How many of these wait for an upgrade."""
    lanes: tuple[BlockedLane, ...]
    """The first few of them, and of those that wait for an upgrade."""

    @property
    def stalled(self) -> bool:
        """Whether events wait, and none of them moves."""
        return self.state == "stalled"


class MemberHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has the store open."""

    process: int
    """The number that the system gave it."""
    program: str
    opened_at: datetime


class StoreHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the store does. What it cannot tell is None, or empty."""

    url: str
    """Without secrets."""
    kind: str
    """The scheme of its URL."""
    state: State
    reasons: tuple[str, ...]
    free_bytes: int | None
    total_bytes: int | None
    members: tuple[MemberHealth, ...]
    """The processes that have it open, but for the one that looked."""
    faults: tuple[PartitionFault, ...]
    """Partitions that cannot be written as they are."""
    damage: tuple[str, ...]
    """What could not be read while health was looked at. `penstock verify` looks at everything."""
    scheduled: int
    """How many delayed publishes wait."""
    scheduled_overdue_seconds: float
    """For how long the first of them should have been published; 0 if none is overdue."""
    staged: int | None
    """How many events wait in the outbox of this bus, or of the store; None without one."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How everything does. The worst of its parts decides."""

    at: datetime
    state: State
    stalled_after_seconds: float
    subscriptions: tuple[SubscriptionHealth, ...]
    """By topic and name."""
    store: StoreHealth

    @property
    def ok(self) -> bool:
        """Whether nothing at all is to be told."""
        return self.state == "ok"

    @property
    def stalled(self) -> tuple[SubscriptionHealth, ...]:
        """The subscriptions that are stalled."""
        return tuple(each for each in self.subscriptions if each.stalled)


def worst(*states: State) -> State:
    """Return the worst of some states."""
    order: tuple[State, ...] = ("ok", "degraded", "stalled")
    return max(states, key=order.index, default="ok")
