"""What passes through the ports: the rows that stores keep, and the answers they give.

All of them are plain values: immutable, comparable, made of numbers, texts, bytes and events; but for a `Settling`,
which also says how its record is made. A store may keep them in whatever form it likes, as long as they
come back equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.errors import ProducerRefused, SinkConflict, TopicMismatch, UsageError
from penstock.events import Event
from penstock.offsets import Range, RangeSet

Durability = Literal["sync", "os"]
Compression = Literal["none", "zstd"]

# --- topics and the log -----------------------------------------------------------------------


class Partition(NamedTuple):
    """One partition of one log."""

    log_id: str
    number: int

    def __str__(self) -> str:
        return f"{self.log_id}/{self.number}"


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a log is kept; by default everything. It may change at any time.

    Nothing that a protected subscription has not passed is removed, but for the hard cap. Stores remove whole files,
    so that they keep somewhat more than is asked for, never less.
    """

    age_seconds: float | None = None
    """Events that were appended longer ago may go."""
    bytes_max: int | None = None
    """Of each partition: the oldest events may go when it is larger."""
    hard_bytes_max: int | None = None
    """Of each partition: beyond it the oldest events go, protected or not; an alert is logged first."""


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a topic when it is created; all but compression and retention is fixed for ever."""

    partitions: int = 1
    """How many; a key's partition must never change, so this cannot either."""
    content_type: str = "application/octet-stream"
    """What an event is that does not say it; saves a column for topics of one codec."""
    source: str = ""
    """The CloudEvents source of an event that does not say it; empty means `penstock:<topic>`."""
    durability: Durability = "sync"
    """`sync`: an acknowledged event is on the medium. `os`: it is with the operating system, and a power cut may lose
    the last ones; readers see them at once."""
    compression: Compression = "none"
    """Of what is stored from now on; what is there already stays as it is."""
    retention: Retention = Retention()

    @property
    def fixed(self) -> TopicSettings:
        """The settings without what may change."""
        return msgspec.structs.replace(self, compression="none", retention=Retention())


class TopicInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A topic as a store knows it."""

    name: str
    log_id: str
    settings: TopicSettings
    created_at: int

    @property
    def partitions(self) -> list[Partition]:
        """Its partitions, in order."""
        return [Partition(self.log_id, number) for number in range(self.settings.partitions)]

    def mismatch(self, wanted: TopicSettings) -> TopicMismatch:
        """Return why it is not the topic that somebody wants."""
        ours, theirs = (msgspec.structs.asdict(settings.fixed) for settings in (self.settings, wanted))
        differing = [f"{name} {ours[name]!r}, not {theirs[name]!r}" for name in ours if ours[name] != theirs[name]]
        return TopicMismatch(
            f"topic {self.name!r} exists with {' and '.join(differing)}: declare it as it is, or choose another name"
        )


class Appended(NamedTuple):
    """What became of one run of an append."""

    offsets: Range | None
    """Where its events are; None for a repeat whose place is not remembered any more, or if refused."""
    duplicate: bool = False
    """These events were stored by an earlier call; nothing was written now."""
    refused: ProducerRefused | None = None
    """Why nothing was written, and never was by this call."""


# --- subscriptions ----------------------------------------------------------------------------


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """A named reader of a topic."""

    log_id: str
    name: str
    mode: str
    policy: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """What may be changed while it runs; a plain JSON object."""
    protect: bool = True
    """Whether retention waits for it."""
    external: bool = False
    """Whether its progress is kept elsewhere (a Spark checkpoint) and only shown here."""
    created_at: int = 0


class Shard(NamedTuple):
    """A part of a subscription that has one owner at a time: a partition, or a slot or berth of one.

    There is one cursor for each partition, that of slot 0.
    """

    log_id: str
    subscription: str
    slot: int
    partition: int


class Fence(NamedTuple):
    """The right to write for a lease; refused once the lease has a higher epoch."""

    lease: str
    epoch: int


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The durable progress of a shard: everything below `next_offset` is settled or parked."""

    shard: Shard
    next_offset: int
    settled: bytes = b""
    """Offsets settled ahead of `next_offset`, as `Bitmap.to_bytes()`."""
    attempts: Mapping[int, int] = msgspec.field(default_factory=dict)
    """Attempts made so far, for unsettled offsets that had one."""
    generation: int = 0
    """Raised by a seek; within one generation `next_offset` only grows."""
    number: int = 0
    """Of the last settlement record of this shard; chains them."""
    claims: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    """What was claimed by whom, in mode `shared`: by berth, as `RangeSet.to_bytes()`; 0 has what was given back."""
    stop: int | None = None
    """Where claims end: nobody has anything from here on. None if nothing was ever claimed."""
    updated_at: int = 0
    """When it was committed; the store says."""


# --- parked events ----------------------------------------------------------------------------


ParkedState = Literal["waiting", "dead", "done"]


class Parked(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a subscription kept aside, with a copy of its own that outlives the log's."""

    shard: Shard
    offset: int
    state: ParkedState
    lane: int
    """The hash of its key as a signed number of 64 bits, or its partition's number if it has none.

    In mode `shared`, where every event is a lane of its own, its offset.
    """
    event: Event
    due_at: int = 0
    """When a waiting one is to be delivered, in microseconds."""
    attempts: int = 0
    replay: int = 0
    """How many times it was brought back from the dead."""
    error_type: str = ""
    error_message: str = ""
    error_trace: str = ""
    """The traceback of the error, if it has one."""
    parked_at: int = 0
    last_retry_at: int = 0
    job: str = ""
    """The redrive job that has marked it."""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Its identity: log, subscription, partition and offset, whichever shard holds it now."""
        return (self.shard.log_id, self.shard.subscription, self.shard.partition, self.offset)


class Waiting(NamedTuple):
    """A parked event that waits, without the event itself."""

    shard: Shard
    offset: int
    lane: int
    due_at: int
    attempts: int
    replay: int


class Claim(NamedTuple):
    """A wish for offsets that nobody has yet, in mode `shared`."""

    most: int
    """At most so many of them."""
    end: int
    """Nothing from here on: the log may be no longer."""
    above: int = 0
    """Nothing before this: of what others have given back, only that which is behind it."""


class Settling(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several owners of a shard has settled: added to the cursor, wherever the others have moved it."""

    shard: Shard
    generation: int
    """Of the cursor that it was decided by."""
    settled: RangeSet = msgspec.field(default_factory=RangeSet)
    """What is settled or parked by this step; any of it may have been before."""
    attempts: Mapping[int, int | None] = msgspec.field(default_factory=dict)
    """Attempts at unsettled offsets, as far as this owner has changed them; None for none any more."""
    berth: int = 0
    """Which one the owner has, in mode `shared`."""
    freed: RangeSet = msgspec.field(default_factory=RangeSet)
    """What it had claimed, has not settled, and does not have any more: anybody may claim it."""
    claim: Claim | None = None
    """What it wishes to have; what it got is among the claims of its berth afterwards."""
    record: Callable[[Cursor, Cursor], bytes] | None = None
    """Returns the settlement record, from the cursor before and after; empty for none.

    Called by the store in its transaction, and again if that is repeated.
    """


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a shard, written as a whole or not at all."""

    cursors: tuple[Cursor, ...] = ()
    settling: Settling | None = None
    """Instead of a cursor, where several owners share one."""
    parked: tuple[Parked, ...] = ()
    """Rows added, or replacing the ones of the same identity: a retry, a death, a resolution."""
    settlement: bytes = b""
    """The settlement record of this step; empty for none."""
    fences: tuple[Fence, ...] = ()
    """The leases that this step acts for; none only where nobody else can act (external cursors)."""


class Settlement(NamedTuple):
    """A settlement record on its way to the ledger."""

    number: int
    record: bytes


class ParkedFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which parked rows are meant; what is None does not matter."""

    log_id: str
    subscription: str
    states: frozenset[ParkedState] | None = None
    slots: frozenset[int] | None = None
    partition: int | None = None
    lane: int | None = None
    error_type: str | None = None
    parked_from: int | None = None
    parked_until: int | None = None
    """Exclusive, like every end."""
    job: str | None = None
    offsets: frozenset[int] | None = None
    """In whichever partition, unless that is given, too."""

    def matches(self, row: Parked) -> bool:
        """Say whether the row is meant."""
        return (
            (row.shard.log_id, row.shard.subscription) == (self.log_id, self.subscription)
            and (self.states is None or row.state in self.states)
            and (self.slots is None or row.shard.slot in self.slots)
            and (self.partition is None or row.shard.partition == self.partition)
            and (self.lane is None or row.lane == self.lane)
            and (self.error_type is None or row.error_type == self.error_type)
            and (self.parked_from is None or row.parked_at >= self.parked_from)
            and (self.parked_until is None or row.parked_at < self.parked_until)
            and (self.job is None or row.job == self.job)
            and (self.offsets is None or row.offset in self.offsets)
        )


# --- leases -----------------------------------------------------------------------------------


class Lease(NamedTuple):
    """The temporary right of one owner to a name."""

    name: str
    owner: str
    epoch: int
    expires_at: float
    """On the store's monotonic clock; of one under another, when that one expired as it was at the call."""
    clean: bool
    """Whether the owner before released it by itself, so that nothing was left in flight."""
    under: Fence | None = None
    """The lease above it, for as long as which is held with this epoch it is held, too; None for a time of its own."""

    @property
    def fence(self) -> Fence:
        """What writes under this lease carry."""
        return Fence(self.name, self.epoch)


# --- entrances and sinks ----------------------------------------------------------------------


class Scheduled(msgspec.Struct, frozen=True, kw_only=True):
    """An event that waits for its time before it enters the log."""

    id: str
    log_id: str
    partition: int
    due_at: int
    event: Event
    producer: bytes = b""
    sequence: int | None = None
    """Assigned durably by the claim, before the append."""


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """An event that waits for its transaction, or for the mover."""

    topic: str
    event: Event
    sequence: int = 0
    """Of the outbox: it only grows, and never restarts."""


# --- the store itself -------------------------------------------------------------------------


class StoreMember(NamedTuple):
    """A process that has a store open."""

    process: int
    """The number that the system gave it."""
    program: str
    opened_at: int


class PartitionFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong with the log of a partition."""

    topic: str
    partition: int
    kind: str
    """In a word: `poisoned` by a sync that failed, or `damaged`."""
    fault: str
    """In a sentence, with what to do."""


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """How a store does."""

    free_bytes: int
    """Of the medium, for this user."""
    total_bytes: int
    space_is_short: bool
    """Whether so little is free that writing may end soon."""
    members: tuple[StoreMember, ...] = ()
    """All others that have it open now."""
    faults: tuple[PartitionFault, ...] = ()


TOLD_BYTES_MAX = 1 << 16
"""So much one may tell others at a time …"""
TELLERS_MAX = 16
"""… and so many may tell something through one opening of a store."""


def check_told(document: bytes, others: int) -> None:
    """Refuse a document that is too large, or one of too many; `others` tell something already."""
    if len(document) > TOLD_BYTES_MAX:
        raise UsageError(f"{len(document):,} bytes are too many to tell: {TOLD_BYTES_MAX:,} at most")
    if document and others >= TELLERS_MAX:
        raise UsageError(f"{others} tell something through this opening of the store already, and no more may")


class Told(NamedTuple):
    """What somebody tells who has a store open."""

    who: str
    at: int
    """When it was told, in microseconds since 1970 UTC."""
    document: bytes


MANIFESTS_KEPT = 100
"""So many manifests that are done are remembered of each sink; those that are not done, always."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one batch of a query into a sink consists of."""

    sink: str
    query: str
    batch: int
    body: bytes
    done: bool = False

    def not_owner(self, owner: str) -> SinkConflict:
        """Return why it is refused while the sink belongs to another query."""
        return SinkConflict(
            f"sink {self.sink!r} belongs to query {owner}, not {self.query}: choose another sink name, or adopt it"
        )

    def too_old(self, highest: int) -> SinkConflict:
        """Return why it is refused if it is not remembered and the query has had this batch."""
        return SinkConflict(
            f"sink {self.sink!r} has had batch {highest} of query {self.query} and does not remember its batch "
            f"{self.batch}, which may have been done: this checkpoint is older than what the sink has. Nothing was "
            f"written; begin with a new checkpoint and adopt the sink"
        )
