"""Sharing: who consumes a subscription now, what each process has of it, and whose a certain event is.

Plain functions over a store, for health and for the command line. Nothing here is kept: it is what the leases, the
cursors and the rows that wait say at this moment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.engine.share import SLOTS
from penstock.rows import Shard
from penstock.runtime.slots import dues
from penstock.runtime.subscriptions import (
    CLAIMED,
    SHARED,
    members_prefix,
    shard_lease,
    shard_of,
    shards_prefix,
    slots_prefix,
)
from penstock.settling import NOBODY as FREE
from penstock.settling import claims_of, unsettled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.ports import Store
    from penstock.rows import Cursor, Lease, Subscription, TopicInfo, Waiting

NOBODY: Final = ""
"""Has what is free, on its way from one owner to the next."""


class SlotPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has of a subscription whose slots are spread."""

    process: str | None
    """None for what nobody has."""
    consumers: tuple[str, ...]
    slots: tuple[int, ...]
    due: int
    """How many slots it should have."""
    epochs: tuple[int, int] | None
    """The lowest and the highest of its leases."""
    parked: int
    """How many of its events wait aside."""


class ClaimPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a process has of a subscription whose events are claimed."""

    process: str | None
    consumers: tuple[str, ...]
    berths: tuple[str, ...]
    """As `berth/partition`."""
    claimed: int
    """How many events it has claimed, and not settled."""
    epochs: tuple[int, int] | None
    parked: int


Part = SlotPart | ClaimPart


def process_of(lease: Lease) -> str:
    """Return the name of the process that a lease belongs to."""
    return lease.under.lease if lease.under else lease.owner


def consumers_of(store: Store, topic: TopicInfo, name: str) -> list[Lease]:
    """Return who consumes a subscription now, in whichever mode: the lease of each owner, by owner."""
    held, log_id = store.leases.held, topic.log_id
    whole = [lease for each in topic.partitions if (lease := whole_holder(store, topic, name, each.number))]
    named = held(members_prefix(log_id, name)) + whole
    # A process may have something of it for a moment longer than a consumer.
    left = [] if named else held(slots_prefix(log_id, name)) + held(shards_prefix(log_id, name))
    by_owner = {lease.owner: lease for lease in named or left}
    return [by_owner[owner] for owner in sorted(by_owner)]


def whole_holder(store: Store, topic: TopicInfo, name: str, partition: int) -> Lease | None:
    """Return the lease of the consumer that has a whole partition now."""
    return store.leases.holder(shard_lease(shard_of(topic, name, partition)))


# --- parts ------------------------------------------------------------------------------------


def parts_of(
    store: Store,
    topic: TopicInfo,
    subscription: Subscription,
    cursors: Iterable[Cursor],
    waiting: Iterable[Waiting],
) -> list[Part]:
    """Return what each process has of a subscription that is shared, by process; what nobody has comes first."""
    if subscription.mode not in SHARED:
        return []
    name = subscription.name
    leases: defaultdict[str, list[Lease]] = defaultdict(list)
    for lease in store.leases.held(members_prefix(topic.log_id, name)):
        leases[process_of(lease)].append(lease)
    parked = Counter(row.shard for row in waiting)
    if subscription.mode == CLAIMED:
        return _claim_parts(store, topic, name, cursors=cursors, consumers=leases, parked=parked)
    return _slot_parts(store, topic, name, leases, parked)


def _owners(leases: Mapping[str, Sequence[Lease]], process: str) -> tuple[str, ...]:
    return tuple(sorted(lease.owner for lease in leases.get(process, ())))


def _slot_parts(
    store: Store, topic: TopicInfo, name: str, consumers: Mapping[str, Sequence[Lease]], parked: Counter[Shard]
) -> list[Part]:
    prefix = slots_prefix(topic.log_id, name)
    slots, epochs = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    free = set(range(SLOTS))
    for lease in store.leases.held(prefix):
        slot = int(lease.name.removeprefix(prefix))
        slots[process_of(lease)].append(slot)
        epochs[process_of(lease)].append(lease.epoch)
        free.discard(slot)
    if free:
        slots[NOBODY] = sorted(free)
    aside = Counter[int]()
    for shard, count in parked.items():
        aside[shard.slot] += count
    everyone = [lease.name for leases in consumers.values() for lease in leases]
    due = dues(everyone) if everyone else {}
    return [
        SlotPart(
            process=process or None,
            consumers=_owners(consumers, process),
            slots=tuple(sorted(slots[process])),
            due=sum(due[lease.name] for lease in consumers.get(process, ())),
            epochs=(min(epochs[process]), max(epochs[process])) if epochs[process] else None,
            parked=sum(aside[slot] for slot in slots[process]),
        )
        for process in sorted({*slots, *consumers})
    ]


def _claim_parts(
    store: Store,
    topic: TopicInfo,
    name: str,
    *,
    cursors: Iterable[Cursor],
    consumers: Mapping[str, Sequence[Lease]],
    parked: Counter[Shard],
) -> list[Part]:
    prefix = shards_prefix(topic.log_id, name)
    berths = {
        Shard(topic.log_id, name, *map(int, lease.name.removeprefix(prefix).split("/"))): lease
        for lease in store.leases.held(prefix)
    }
    claimed = Counter[Shard]()
    for cursor in cursors:
        for berth in cursor.claims:
            claimed[cursor.shard._replace(slot=berth)] = len(unsettled(cursor, berth))
    had: defaultdict[str, list[Shard]] = defaultdict(list, {process: [] for process in consumers})
    for shard in sorted({*berths, *(shard for shard, count in (claimed + parked).items() if count)}):
        had[process_of(berths[shard]) if shard in berths else NOBODY].append(shard)
    found: list[Part] = []
    for process, shards in sorted(had.items()):
        epochs = [berths[shard].epoch for shard in shards if shard in berths]
        found.append(
            ClaimPart(
                process=process or None,
                consumers=_owners(consumers, process),
                berths=tuple(f"{shard.slot}/{shard.partition}" for shard in shards if shard.slot != FREE),
                claimed=sum(claimed[shard] for shard in shards),
                epochs=(min(epochs), max(epochs)) if epochs else None,
                parked=sum(parked[shard] for shard in shards),
            )
        )
    return found


# --- whose an event is ------------------------------------------------------------------------


def whose(store: Store, topic: TopicInfo, subscription: Subscription, cursor: Cursor, slot: int | None) -> str:
    """Return in words who has the event at a cursor, which is of this slot if it could be read."""
    name, partition = subscription.name, cursor.shard.partition
    if subscription.mode == CLAIMED:
        for berth in cursor.claims:
            if berth != FREE and cursor.next_offset in claims_of(cursor, berth):
                lease = store.leases.holder(shard_lease(cursor.shard._replace(slot=berth)))
                claimed = f"berth {berth}/{partition} has claimed it"
                return f"{claimed}, which nobody has" if lease is None else f"{process_of(lease)} has claimed it"
        return "nobody has claimed it"
    if subscription.mode not in SHARED:
        lease = whole_holder(store, topic, name, partition)
        return "nobody has its partition" if lease is None else f"consumer {lease.owner} has its partition"
    if slot is None:
        return "whose it is cannot be told"
    lease = store.leases.holder(f"{slots_prefix(topic.log_id, name)}{slot}")
    return f"nobody has its slot, {slot}" if lease is None else f"{process_of(lease)} has its slot, {slot}"
