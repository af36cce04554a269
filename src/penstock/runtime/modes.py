"""Modes: how a subscription gets another mode when nobody consumes it.

Where a subscription is does not depend on its mode: there is one cursor for each partition. What waits aside has a slot
and a lane, and claims are kept beside the cursor; these are made anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.batch import Batch, Place
from penstock.errors import SubscriptionMismatch, UsageError
from penstock.rows import Commit, ParkedFilter
from penstock.runtime.blocks import lanes_of
from penstock.runtime.sharing import consumers_of
from penstock.runtime.subscriptions import CLAIMED, MODES, SHARED, SLOT, find

if TYPE_CHECKING:
    from penstock.ports import Store
    from penstock.rows import Parked, Subscription, TopicInfo

ROWS_AT_A_TIME: Final = 1_000
FIRST_BERTH: Final = 1


def change_mode(store: Store, topic: TopicInfo, name: str, mode: str) -> Subscription:
    """Let a subscription that nobody consumes have another mode; it stays where it is, with all that waits aside.

    Should this be cut off, it is to be repeated: some of what waits aside might be nobody's until then. A consumer that
    begins in this moment ends when it sees the other mode; what it has in hand then may come again.
    """
    if mode not in MODES:
        raise UsageError(f"a subscription's mode is one of {', '.join(MODES)}, not {mode!r}")
    found = find(store, topic, name)
    if found.external:
        raise SubscriptionMismatch(f"subscription {name!r} is driven from outside: it has no mode here")
    consumers = [lease.owner for lease in consumers_of(store, topic, name)]
    if consumers:
        raise SubscriptionMismatch(
            f"subscription {name!r} of topic {topic.name!r} is consumed by {', '.join(consumers)} in mode "
            f"{found.mode!r}: end them first, then change its mode"
        )
    for cursor in store.cursors.load(topic.log_id, name):
        _commit(store, Commit(cursors=(msgspec.structs.replace(cursor, claims={}, stop=None),)))
    wanted = ParkedFilter(log_id=topic.log_id, subscription=name)
    after = None
    while rows := store.parked.page(wanted, after=after, limit=ROWS_AT_A_TIME):
        _commit(store, Commit(parked=tuple(_in_mode(mode, row) for row in rows)))
        after = (rows[-1].shard.partition, rows[-1].offset)
    changed = msgspec.structs.replace(found, mode=mode)
    store.cursors.put_subscription(changed, existing=True)
    return changed


def _commit(store: Store, commit: Commit) -> None:
    [answer] = store.cursors.commit([commit])
    if answer is not None:
        raise answer


def _in_mode(mode: str, row: Parked) -> Parked:
    """Return a row with the slot and the lane that it has in a mode."""
    if mode == CLAIMED:
        return msgspec.structs.replace(row, shard=row.shard._replace(slot=FIRST_BERTH), lane=row.offset)
    partition = row.shard.partition
    place = Place(topic="", partition=partition, appended_at=0, source="", content_type="")
    batch = Batch.from_events([row.event]).at(row.offset, place, ())
    slot = int(batch.slots()[0]) if mode in SHARED else SLOT
    return msgspec.structs.replace(row, shard=row.shard._replace(slot=slot), lane=int(lanes_of([batch], partition)[0]))
