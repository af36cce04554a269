"""The life of a store: what it is, what closing it means, and what is there when it is opened again."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.clock import VirtualClock
from penstock.errors import (
    Fenced,
    ProducerConflict,
    ProducerFenced,
    SinkConflict,
    StoreClosed,
    TopicDeleted,
)
from penstock.offsets import Range
from penstock.ports import Store
from penstock.rows import (
    Appended,
    Commit,
    Manifest,
    ParkedFilter,
    Partition,
    Scheduled,
    Staged,
    TopicInfo,
    TopicSettings,
)
from penstock.testing.conformance.builders import (
    PLENTY,
    a_cursor,
    a_parked,
    a_part,
    a_shard,
    acquired,
    an_event,
    append,
    commit,
    error_of,
    errors_of,
    fill,
    pages,
    park,
    subscribe,
)
from penstock.testing.conformance.entrances import outbox_of
from penstock.testing.conformance.opening import StoreOpening, a_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def calls(store: Store, topic: TopicInfo) -> dict[str, Callable[[], object]]:
    """Return a call of every method of every port.

    Left out are `Notifier.notify`, which never raises, and `Outbox.stage`, which is the caller's transaction.
    """
    subscription = subscribe(store, topic)
    fill(store, topic.partitions[0], 1)
    [partition, _], lease = topic.partitions, acquired(store)
    heads, rows, fence = store.log.heads([partition]), a_filter(topic), lease.fence
    scheduled = Scheduled(id="1", log_id=topic.log_id, partition=0, due_at=0, event=an_event())
    log, cursors, parked, leases = store.log, store.cursors, store.parked, store.leases
    schedule, manifests, outbox, notifier = store.schedule, store.manifests, store.outbox, store.notifier
    every: dict[str, Callable[[], object]] = {
        "Log.create_topic": lambda: log.create_topic("new", TopicSettings()),
        "Log.topics": log.topics,
        "Log.append": lambda: append(store, partition, a_part(b"one")),
        "Log.read": lambda: log.read(partition, 0, bytes_max=PLENTY),
        "Log.heads": lambda: log.heads([partition]),
        "Heads.read": heads.read,
        "Log.bounds": lambda: log.bounds(partition),
        "Log.find_time": lambda: log.find_time(partition, 0),
        "Log.trim": lambda: log.trim(partition, 0),
        "Cursors.put_subscription": lambda: cursors.put_subscription(subscription),
        "Cursors.subscriptions": cursors.subscriptions,
        "Cursors.subscription": lambda: cursors.subscription(topic.log_id, "billing"),
        "Cursors.revision": cursors.revision,
        "Cursors.load": lambda: cursors.load(topic.log_id, "billing"),
        "Cursors.commit": lambda: cursors.commit([Commit()]),
        "Cursors.settlements": lambda: cursors.settlements(1),
        "Cursors.forget_settlements": lambda: cursors.forget_settlements(0),
        "ParkedRows.page": lambda: parked.page(rows),
        "ParkedRows.places": lambda: parked.places(rows),
        "ParkedRows.count": lambda: parked.count(rows),
        "ParkedRows.due": lambda: parked.due(rows, 0),
        "ParkedRows.waiting": lambda: parked.waiting(rows),
        "ParkedRows.stamp": lambda: parked.stamp(rows, "job"),
        "ParkedRows.replay": lambda: parked.replay(rows, 0),
        "ParkedRows.purge": lambda: parked.purge(rows),
        "Leases.acquire": lambda: leases.acquire("another", "a", 10),
        "Leases.acquire_some": lambda: leases.acquire_some(["some"], "a", 1, under=lease),
        "Leases.release_some": lambda: leases.release_some([lease]),
        "Leases.held": lambda: leases.held(""),
        "Leases.revision": leases.revision,
        "Leases.renew": lambda: leases.renew([lease], 10),
        "Leases.holder": lambda: leases.holder("lease"),
        "Schedule.add": lambda: schedule.add([scheduled]),
        "Schedule.cancel": lambda: schedule.cancel("never added"),
        "Schedule.page": schedule.page,
        "Schedule.next_due": schedule.next_due,
        "Schedule.pending": schedule.pending,
        "Schedule.claim": lambda: schedule.claim(0, 1, fence),
        "Schedule.done": lambda: schedule.done(["1"], fence),
        "Manifests.prepare": lambda: manifests.prepare(Manifest(sink="s", query="q", batch=0, body=b"")),
        "Manifests.finish": lambda: manifests.finish("s", "q", 0),
        "Manifests.unfinished": manifests.unfinished,
        "Manifests.last": lambda: manifests.last("s"),
        "Manifests.forget": lambda: manifests.forget("s"),
        "Leases.release": lambda: leases.release(lease),
        "Cursors.delete_subscription": lambda: cursors.delete_subscription(topic.log_id, "billing"),
        "Log.delete_topic": lambda: log.delete_topic(topic.log_id),
    }
    if outbox is not None:
        every["Outbox.claim"] = lambda: outbox.claim(1, fence)
        every["Outbox.done"] = lambda: outbox.done([], fence)
        every["Outbox.pending"] = outbox.pending
    if notifier is not None:
        every["Notifier.listen"] = lambda: notifier.listen(lambda _: None)
    return every


def a_filter(topic: TopicInfo) -> ParkedFilter:
    """Return a filter that means all rows of the subscription `billing`."""
    return ParkedFilter(log_id=topic.log_id, subscription="billing")


class LifetimeConformance(StoreOpening):
    """What a store promises as a whole."""

    def test_a_store_has_every_port_and_says_what_it_can(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert store.url
        assert isinstance(store.capabilities.durable, bool)

    # --- closing -------------------------------------------------------------------------------

    def test_every_call_after_closing_says_that_the_store_is_closed(self, store: Store, topic: TopicInfo) -> None:
        every = calls(store, topic)
        store.close()
        assert errors_of(every) == dict.fromkeys(every, StoreClosed)

    def test_closing_twice_is_allowed(self, store: Store, topic: TopicInfo) -> None:
        fill(store, topic.partitions[0], 1)
        store.close()
        store.close()

    # --- opening again -------------------------------------------------------------------------

    @contextmanager
    def opened_again(self, store: Store, clock: VirtualClock) -> Iterator[Store]:
        """Close a durable store and open it again, or skip."""
        if not store.capabilities.durable:
            pytest.skip("opening again: capability `durable`, which this store does not declare")
        store.close()
        again = self.reopen(store, clock)
        try:
            yield again
        finally:
            again.close()

    def test_topics_and_events_are_kept(
        self, store: Store, topic: TopicInfo, partition: Partition, clock: VirtualClock
    ) -> None:
        fill(store, partition, 5)
        clock.advance(10)
        later = clock.time_us()
        append(store, partition, a_part(b"a", b"b"))
        topics, rows = store.log.topics(), stored_rows(store, partition)
        with self.opened_again(store, clock) as again:
            assert again.log.topics() == topics
            assert a_topic(again) == topic
            assert stored_rows(again, partition) == rows
            assert again.log.heads(topic.partitions).read().tolist() == [7, 0]
            assert again.log.find_time(partition, later) == 5
            assert append(again, partition, a_part(b"c", first=2)) == [Appended(Range(7, 8))]

    def test_producers_are_kept(self, store: Store, partition: Partition, clock: VirtualClock) -> None:
        part = a_part(b"0", b"1", epoch=2)
        append(store, partition, part)
        with self.opened_again(store, clock) as again:
            repeated, conflicting, fenced, news = append(
                again,
                partition,
                part,
                a_part(b"other", b"content", epoch=2),
                a_part(b"2", first=2, epoch=1),
                a_part(b"2", first=2, epoch=2),
            )
            assert repeated == Appended(Range(0, 2), duplicate=True)
            assert (type(conflicting.refused), type(fenced.refused)) == (ProducerConflict, ProducerFenced)
            assert news == Appended(Range(2, 3))

    def test_what_was_removed_stays_removed(
        self, store: Store, topic: TopicInfo, partition: Partition, clock: VirtualClock
    ) -> None:
        gone = a_topic(store, "gone")
        fill(store, partition, 5)
        first = store.log.trim(partition, 4)
        store.log.delete_topic(gone.log_id)
        with self.opened_again(store, clock) as again:
            assert again.log.bounds(partition) == Range(first, 5)
            assert again.log.topics() == [topic]
            assert error_of(lambda: again.log.bounds(gone.partitions[0])) is TopicDeleted

    def test_subscriptions_and_their_progress_are_kept(
        self, store: Store, topic: TopicInfo, partition: Partition, clock: VirtualClock
    ) -> None:
        fill(store, partition, 5)
        subscribe(store, topic, policy={"max_retries": 5})
        shard = a_shard(topic)
        for step in (1, 2):
            commit(store, a_cursor(shard, step, settled=b"\2", attempts={3: 1}), settlement=b"to %d" % step)
        park(store, a_parked(shard, 0))
        store.cursors.forget_settlements(store.cursors.settlements(1)[0].number)

        def everything(of: Store) -> list[object]:
            cursors = of.cursors
            return [cursors.subscriptions(), cursors.load(topic.log_id, "billing"), cursors.settlements(9)]

        before = everything(store)
        with self.opened_again(store, clock) as again:
            assert everything(again) == before
            assert again.parked.page(a_filter(topic)) == [a_parked(shard, 0)]
            [last] = again.cursors.settlements(9)
            commit(again, a_cursor(shard, 3), settlement=b"to 3")
            assert again.cursors.settlements(9)[1].number > last.number

    def test_epochs_go_on_and_stale_fences_stay_stale(
        self, store: Store, topic: TopicInfo, clock: VirtualClock
    ) -> None:
        subscribe(store, topic)
        released, old = acquired(store, "released"), acquired(store)
        store.leases.release(released)
        clock.advance(11)
        current = acquired(store, owner="b")
        with self.opened_again(store, clock) as again:
            assert type(commit(again, a_cursor(a_shard(topic), 0), fences=(old.fence,))) is Fenced
            clock.advance(11)
            assert acquired(again, owner="c").epoch > current.epoch
            assert acquired(again, "released").epoch > released.epoch

    def test_scheduled_rows_and_their_claims_are_kept(
        self, store: Store, topic: TopicInfo, clock: VirtualClock
    ) -> None:
        def row(name: str) -> Scheduled:
            return Scheduled(id=name, log_id=topic.log_id, partition=0, due_at=5, event=an_event())

        lease = acquired(store)
        store.schedule.add([row("a"), row("b")])
        claimed = store.schedule.claim(5, 2, lease.fence)
        store.schedule.done(["a"], lease.fence)
        left = [found for found in claimed if found.id == "b"]
        with self.opened_again(store, clock) as again:
            fence = acquired(again).fence
            assert again.schedule.page() == left
            assert again.schedule.claim(5, 2, fence) == left
            again.schedule.add([row("c")])
            used = {(found.producer, found.sequence) for found in claimed}
            [new] = [found for found in again.schedule.claim(5, 2, fence) if found.id == "c"]
            assert (new.producer, new.sequence) not in used

    def test_the_outbox_is_kept(self, store: Store, clock: VirtualClock) -> None:
        outbox = outbox_of(store)
        for count in (2, 1):
            with self.transaction(store) as transaction:
                outbox.stage(transaction, [Staged(topic="orders", event=an_event())] * count)
        lease, producer = acquired(store), outbox.producer
        first, second, third = outbox.claim(9, lease.fence)
        outbox.done([first.sequence, third.sequence], lease.fence)
        with self.opened_again(store, clock) as again:
            assert again.outbox is not None
            assert again.outbox.producer == producer
            fence = acquired(again).fence
            assert again.outbox.claim(9, fence) == [second]
            again.outbox.done([second.sequence], fence)
            with self.transaction(again) as transaction:
                again.outbox.stage(transaction, [Staged(topic="orders", event=an_event())])
            [fourth] = again.outbox.claim(9, fence)
            assert fourth.sequence > third.sequence

    def test_manifests_are_kept(self, store: Store, clock: VirtualClock) -> None:
        first, second = (Manifest(sink="lake", query="q", batch=batch, body=b"%d" % batch) for batch in (0, 1))
        store.manifests.prepare(first)
        store.manifests.prepare(second)
        store.manifests.finish("lake", "q", 0)
        with self.opened_again(store, clock) as again:
            assert again.manifests.unfinished() == [second]
            assert again.manifests.last("lake") == second
            other = msgspec.structs.replace(first, body=b"another attempt")
            assert again.manifests.prepare(other) == msgspec.structs.replace(first, done=True)
            with pytest.raises(SinkConflict):
                again.manifests.prepare(Manifest(sink="lake", query="r", batch=0, body=b""))


def stored_rows(store: Store, partition: Partition) -> list[object]:
    """Return all that is known of every event."""
    return [row for page in pages(store, partition, 0) for batch in page for row in batch.to_arrow().to_pylist()]
