"""Judging: what happened in a world, told to a journal, and whether every promise held.

The journal and its checker are those that judge Penstock's own campaigns (`penstock.testing.checker`). An event is
named by its position here, so that equal payloads are no trouble.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from xxhash import xxh3_64_intdigest

from penstock.offsets import Range, RangeSet
from penstock.rows import ParkedFilter, Partition
from penstock.testing.checker import check
from penstock.testing.journal import NO_KEY, SETTLEMENTS, Journal, Outcome

if TYPE_CHECKING:
    from penstock.rows import Subscription, TopicInfo
    from penstock.testing.checker import Violation
    from penstock.testing.journal import Ids
    from penstock.testing.worlds.medium import Medium
    from penstock.testing.worlds.watching import Watching

UNORDERED = "shared"


def violations(medium: Medium, watching: Watching) -> list[Violation]:
    """Return every promise that did not hold."""
    return check(_Telling(medium, watching).journal)


def _id(partition: Partition, offset: int) -> int:
    return xxh3_64_intdigest(f"{partition}@{offset}".encode())


def _one(number: int) -> Ids:
    return np.array([number], np.uint64)


class _Telling:
    """Tells a journal all that was seen."""

    def __init__(self, medium: Medium, watching: Watching) -> None:
        self._medium = medium
        self._watching = watching
        self.journal = Journal()
        self._topics = {info.log_id: info for info in medium.store.log.topics() if not info.name.startswith("_")}
        self._log_ids = {info.name: info.log_id for info in self._topics.values()}
        self._told: dict[tuple[str, Partition], RangeSet] = {}
        self._tell_events()
        self._tell_deliveries()
        for info in self._topics.values():
            for subscription in medium.store.cursors.subscriptions(info.log_id):
                self._tell_rest(info, subscription)

    def _key(self, partition: Partition, offset: int) -> Ids:
        event = self._medium.event(partition, offset)
        key = None if event is None else event.key
        return _one(NO_KEY if key is None else max(xxh3_64_intdigest(key), NO_KEY + 1))

    def _tell_events(self) -> None:
        for partition, offsets in self._medium.appended:
            if partition.log_id not in self._topics:
                continue
            for offset in offsets:
                ids, keys = _one(_id(partition, offset)), self._key(partition, offset)
                self.journal.published_ids(*partition, ids, Outcome.OK, offset=offset, keys=keys)
        for info in self._topics.values():
            for partition in info.partitions:
                bounds = self._medium.store.log.bounds(partition)
                self.journal.bounds(*partition, bounds.start, bounds.stop)
                if bounds.start:
                    self.journal.trimmed(*partition, bounds.start)
                for offset in bounds:
                    ids, keys = _one(_id(partition, offset)), self._key(partition, offset)
                    self.journal.stored_ids(*partition, offset, ids, keys)

    def _tell_deliveries(self) -> None:
        """Tell deliveries and settlements as they followed each other."""
        seen: list[tuple[int, bool, int]] = [(run.number, True, at) for at, run in enumerate(self._watching.runs)]
        seen += [(row.number, False, at) for at, row in enumerate(self._medium.settled)]
        for _, is_delivery, at in sorted(seen):
            if is_delivery:
                self._tell_delivery(at)
            else:
                self._tell_settlement(at)

    def _tell_delivery(self, at: int) -> None:
        run = self._watching.runs[at]
        topic, number, offset = run.delivery.position
        log_id = self._log_ids.get(topic)
        if log_id is None or run.delivery.replay:
            return
        partition = Partition(log_id, number)
        subscription = self._medium.store.cursors.subscription(log_id, run.subscriber.name)
        ordered = subscription is not None and subscription.mode != UNORDERED
        keys = self._key(partition, offset) if ordered else None
        self.journal.delivered_ids(run.subscriber.name, *partition, offset, _one(_id(partition, offset)), keys)

    def _tell_settlement(self, at: int) -> None:
        row = self._medium.settled[at]
        partition = Partition(row.log_id, row.partition)
        told = self._told.setdefault((row.subscription, partition), RangeSet())
        if row.outcome not in SETTLEMENTS or row.offset in told:
            return  # one that was brought back from the dead is settled a second time
        told.add(Range(row.offset, row.offset + 1))
        if row.log_id in self._topics:
            self.journal.settled(row.subscription, *partition, row.offset, row.offset + 1, row.outcome)

    def _tell_rest(self, info: TopicInfo, subscription: Subscription) -> None:
        """Tell what is parked and what is to be delivered yet."""
        store, name = self._medium.store, subscription.name
        for partition in info.partitions:
            wanted = ParkedFilter(log_id=info.log_id, subscription=name, partition=partition.number)
            parked = RangeSet(Range(row.offset, row.offset + 1) for row in store.parked.waiting(wanted))
            settled = self._told.get((name, partition), RangeSet())
            for span in parked - settled:
                self.journal.parked(name, *partition, span.start, span.stop)
            cursors = [row for row in store.cursors.load(info.log_id, name) if row.shard.partition == partition.number]
            bounds = store.log.bounds(partition)
            first = min((cursor.next_offset for cursor in cursors), default=bounds.start)
            open_ = RangeSet([Range(first, max(bounds.stop, first))]) - settled - parked
            for span in open_:
                self.journal.pending(name, *partition, span.start, span.stop)
