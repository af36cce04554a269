"""Facts: what a store says now of subscriptions, their cursors, and what waits aside.

**The order of looking** is what keeps a bus at work from looking like a loss:

1. the cursor of each shard, which knows the number of its last record;
2. the rows that wait aside, and the cursor once more: should a seek have come between, both are looked at again;
3. the records that the store has not moved to the ledger yet;
4. how far the ledger goes.

A record is written with its cursor, in one transaction, moved to the ledger, and then forgotten by the store. So every
record that the cursor of (1) knows is found by (3), or was in the ledger before (4). What was parked at (1) either
still waits at (2), or a record says what has become of it, and that is found by (3) or (4) as well. In any other order
something may move from where nobody has looked yet to where somebody has looked already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.audit import spans
from penstock.audit.records import ShardKey
from penstock.batch import Batch
from penstock.errors import IntegrityError, TopicDeleted, Trimmed, UnknownSubscription, UsageError, did_you_mean
from penstock.offsets import Bitmap, Range
from penstock.rows import ParkedFilter, Partition
from penstock.runtime.ledger import PAGE, TOPIC
from penstock.runtime.subscriptions import SLOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.audit.spans import Spans
    from penstock.ports import Log, Store
    from penstock.rows import Cursor, Parked, ParkedState, Subscription, TopicInfo, Waiting

UNMOVED_MAX: Final = 1_000_000
"""So many records that were not moved are looked at; a store keeps no more."""
LOOKS: Final = 5
"""How often a shard is looked at again that is moved by a seek at the same moment."""
DEAD_SHOWN: Final = 10
"""So many dead letters of a subscription are named."""
READ_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What a store says of one partition of a subscription."""

    topic: str
    log_id: str
    subscription: str
    partition: int
    next_offset: int
    generation: int
    number: int
    first: int
    """Where the log begins now …"""
    end: int
    """… and ends."""
    since: int = 0
    """Nothing before this offset is asked about."""
    waiting: Spans = spans.EMPTY
    steady: bool = True
    """Whether no seek came between while it was looked at."""
    external: bool = False
    window: int = Bitmap.LIMIT
    """How far ahead of the cursor a record may settle."""

    @property
    def key(self) -> ShardKey:
        """What its records say of themselves."""
        return (self.log_id, self.subscription, self.partition)


@dataclass(frozen=True, slots=True)
class SubscriptionFacts:
    """What a store says of a subscription."""

    topic: str
    subscription: Subscription
    shards: list[ShardFacts]
    rows: dict[ParkedState, int]
    dead: list[Parked]
    """The last of its dead letters."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store says."""

    subscriptions: list[SubscriptionFacts]
    unmoved: list[bytes]
    """Records that are not in the ledger yet, up to where it was looked at."""
    ledger: Range
    """The offsets of the ledger that belong to this look."""

    @property
    def shards(self) -> list[ShardFacts]:
        """All shards that have a chain of records."""
        return [shard for each in self.subscriptions for shard in each.shards if not shard.external]


def look(
    store: Store, topics: Sequence[str] = (), *, subscription: str | None = None, since_us: int | None = None
) -> Facts:
    """Look at subscriptions, all or those that are named; `UsageError` if there is none."""
    ledger = next((topic for topic in store.log.topics() if topic.name == TOPIC), None)
    moved_before = 0 if ledger is None else store.log.bounds(ledger.partitions[0]).stop
    seen = [
        _look_at(store, topic, each, since_us)
        for topic in topics_of(store, topics)
        for each in store.cursors.subscriptions(topic.log_id)
        if subscription in {None, each.name}
    ]
    found = [each for each in seen if each is not None]
    if subscription is not None and not found:
        raise no_subscription(subscription)
    unmoved = [record for _, record in store.cursors.settlements(UNMOVED_MAX)]
    # It may have been made since, by the first record that was moved.
    ledger = next((topic for topic in store.log.topics() if topic.name == TOPIC), None)
    if ledger is None:
        return Facts(found, unmoved, Range(0, 0))
    bounds = store.log.bounds(ledger.partitions[0])
    # What is moved is forgotten page by page: of those that were moved before this look, one page may be left.
    moved = _records(store.log, ledger.partitions[0], Range(max(moved_before - PAGE, bounds.start), bounds.stop))
    return Facts(found, [record for record in unmoved if record not in moved], bounds)


def no_subscription(name: str) -> UsageError:
    """Return what is wrong with a name that no subscription has."""
    return UsageError(f"no subscription is named {name!r}; `penstock subscriptions` lists those of a topic")


def topics_of(store: Store, names: Sequence[str]) -> list[TopicInfo]:
    """Return the topics of these names, or all but internal ones, which have no ledger; `UsageError` for another."""
    known = {topic.name: topic for topic in store.log.topics() if not topic.name.startswith("_")}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no topic {name!r}{did_you_mean(name, known)}; `penstock topics` lists them")
    return [known[name] for name in dict.fromkeys(names)] if names else list(known.values())


def _records(log: Log, partition: Partition, within: Range) -> frozenset[bytes]:
    found: set[bytes] = set()
    start = within.start
    while start < within.stop:
        try:
            items = log.read(partition, start, bytes_max=READ_BYTES, events_max=within.stop - start)
        except Trimmed as trimmed:
            start = trimmed.first  # retention is at work, too
            continue
        for item in items:
            if isinstance(item, Batch):
                found.update(item.to_arrow(["data"]).column(0).to_pylist())
            start = item.range.stop
    return frozenset(found)


def _look_at(
    store: Store, topic: TopicInfo, subscription: Subscription, since_us: int | None
) -> SubscriptionFacts | None:
    """Look at one; None if it is deleted meanwhile."""
    log_id, name = subscription.log_id, subscription.name
    try:
        before, waiting, after = _steadily(store, log_id, name)
        shards = []
        for number, cursor in sorted(before.items()):
            mine = spans.of_offsets(row.offset for row in waiting if row.shard.partition == number)
            steady = _unmoved(cursor, after.get(number))
            shard = _shard(store, topic, subscription, cursor, since_us)
            shards.append(replace(shard, waiting=mine, steady=steady))
        rows = store.parked.count(ParkedFilter(log_id=log_id, subscription=name))
        dead = store.parked.page(_rows_of(log_id, name, "dead"), limit=DEAD_SHOWN) if rows["dead"] else []
    except (TopicDeleted, UnknownSubscription):
        return None
    return SubscriptionFacts(topic.name, subscription, shards, rows, dead)


def _steadily(store: Store, log_id: str, name: str) -> tuple[dict[int, Cursor], list[Waiting], dict[int, Cursor]]:
    """Return the cursors, what waits, and the cursors once more; again, if somebody has moved one between."""
    looks = 0
    while True:
        looks += 1
        before = _cursors(store, log_id, name)
        waiting = store.parked.waiting(_rows_of(log_id, name))
        after = _cursors(store, log_id, name)
        if looks == LOOKS or all(_unmoved(cursor, after.get(number)) for number, cursor in before.items()):
            return before, waiting, after


def _cursors(store: Store, log_id: str, name: str) -> dict[int, Cursor]:
    return {cursor.shard.partition: cursor for cursor in store.cursors.load(log_id, name) if cursor.shard.slot == SLOT}


def _unmoved(before: Cursor, after: Cursor | None) -> bool:
    """Say whether a cursor was not moved by a seek, nor its subscription created anew."""
    return after is not None and after.generation == before.generation and after.number >= before.number


def _rows_of(log_id: str, name: str, state: ParkedState = "waiting") -> ParkedFilter:
    return ParkedFilter(log_id=log_id, subscription=name, states=frozenset({state}))


def _shard(
    store: Store, topic: TopicInfo, subscription: Subscription, cursor: Cursor, since_us: int | None
) -> ShardFacts:
    partition = topic.partitions[cursor.shard.partition]
    bounds = store.log.bounds(partition)
    return ShardFacts(
        topic=topic.name,
        log_id=topic.log_id,
        subscription=subscription.name,
        partition=partition.number,
        next_offset=cursor.next_offset,
        generation=cursor.generation,
        number=cursor.number,
        first=bounds.start,
        end=bounds.stop,
        since=0 if since_us is None else store.log.find_time(partition, since_us),
        external=subscription.external,
    )


# --- holes of the log itself --------------------------------------------------------------------

LOOKED_THROUGH: Final = 1_000_000
"""So many offsets that seem to be lost are looked up in the log; behind them they are believed to be events."""


def declared_gaps(log: Log, shard: ShardFacts, among: Spans) -> Spans:
    """Return which of these offsets the log itself declares to be a gap: nobody can have settled an event there."""
    partition = Partition(shard.log_id, shard.partition)
    gaps, left = [], LOOKED_THROUGH
    for start, stop in among.first(LOOKED_THROUGH):
        at = max(start, shard.first)
        while at < min(stop, shard.end) and left > 0:
            try:
                items = log.read(partition, at, bytes_max=READ_BYTES, events_max=min(stop - at, left))
            except Trimmed as trimmed:
                at = trimmed.first
                continue
            except TopicDeleted:
                return among  # nobody can lose what nobody has any more
            except IntegrityError:
                break  # whether there was an event, `penstock verify` finds out; an audit has to end
            gaps += [item.range for item in items if not isinstance(item, Batch)]
            if not items:
                break
            left -= items[-1].range.stop - at
            at = items[-1].range.stop
    return spans.intersection(among, spans.of(gaps))


def cursors_of(shards: Sequence[ShardFacts]) -> spans.Numbers:
    """Return the number of the last record that each cursor knows."""
    return np.array([shard.number for shard in shards], np.int64)
