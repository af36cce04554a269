"""`Log.trim` and `Log.delete_topic`: what is removed, what refuses it, and what a stale handle is told.

A store may remove fewer events than asked for, such as whole files only. Open it with files as small as they
can be, so that these tests have something to look at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.clock import VirtualClock
from penstock.errors import BeyondEnd, TopicDeleted, Trimmed, TrimRefused
from penstock.offsets import Range
from penstock.ports import Store
from penstock.rows import Appended, Commit, ParkedFilter, Partition, Scheduled, Subscription, TopicInfo
from penstock.testing.conformance.builders import (
    PLENTY,
    a_cursor,
    a_parked,
    a_part,
    a_shard,
    an_event,
    append,
    commit,
    errors_of,
    fill,
    pages,
    park,
    payloads,
    subscribe,
)
from penstock.testing.conformance.opening import StoreOpening, a_topic

if TYPE_CHECKING:
    from collections.abc import Callable


def trimmed(store: Store, partition: Partition, before: int, *, force: bool = False) -> int:
    """Trim, check the answer, and return the new beginning; skip if this store removes nothing so small."""
    old = store.log.bounds(partition)
    first = store.log.trim(partition, before, force=force)
    assert old.start <= first <= before
    assert store.log.bounds(partition) == Range(first, old.stop)
    if first == old.start:
        pytest.skip(f"trim: capability to remove {before} small appends; this store removes larger parts")
    return first


def assert_refused(store: Store, partition: Partition, before: int) -> None:
    """Check that trimming is refused, and that nothing was removed."""
    bounds = store.log.bounds(partition)
    with pytest.raises(TrimRefused):
        store.log.trim(partition, before)
    assert store.log.bounds(partition) == bounds


def uses(store: Store, partition: Partition, subscription: Subscription) -> dict[str, Callable[[], object]]:
    """Return every call that a handle of a topic allows."""
    log_id = partition.log_id
    scheduled = Scheduled(id="1", log_id=log_id, partition=0, due_at=0, event=an_event())
    return {
        "append": lambda: append(store, partition, a_part(b"one")),
        "read": lambda: store.log.read(partition, 0, bytes_max=PLENTY),
        "bounds": lambda: store.log.bounds(partition),
        "heads": lambda: store.log.heads([partition]),
        "find_time": lambda: store.log.find_time(partition, 0),
        "trim": lambda: store.log.trim(partition, 0),
        "delete_topic": lambda: store.log.delete_topic(log_id),
        "put_subscription": lambda: store.cursors.put_subscription(subscription),
        "load": lambda: store.cursors.load(log_id, subscription.name),
        "schedule": lambda: store.schedule.add([scheduled]),
    }


class RetentionConformance(StoreOpening):
    """What the `Log` port promises about events and topics that go."""

    # --- trimming ------------------------------------------------------------------------------

    def test_trimmed_events_are_gone_and_a_reader_is_told_so(self, store: Store, partition: Partition) -> None:
        fill(store, partition, 10)
        first = trimmed(store, partition, 6)
        for offset in range(first):
            with pytest.raises(Trimmed) as caught:
                store.log.read(partition, offset, bytes_max=PLENTY)
            assert (caught.value.offset, caught.value.first, caught.value.end) == (offset, first, 10)
        assert payloads(store, partition) == [b"%d" % number for number in range(first, 10)]

    def test_trimming_in_the_middle_of_an_append_keeps_the_offsets_of_the_rest(
        self, store: Store, partition: Partition
    ) -> None:
        append(store, partition, a_part(b"0", b"1", b"2", b"3"))
        fill(store, partition, 2)
        first = store.log.trim(partition, 2)
        assert store.log.bounds(partition) == Range(first, 6)
        read = [
            (event.offset, event.data) for page in pages(store, partition, first) for batch in page for event in batch
        ]
        expected = list(enumerate([b"0", b"1", b"2", b"3", b"0", b"1"]))
        assert read == expected[first:]

    def test_a_log_trimmed_to_its_end_goes_on_at_its_end(self, store: Store, partition: Partition) -> None:
        fill(store, partition, 4)
        trimmed(store, partition, 4)
        assert store.log.read(partition, 4, bytes_max=PLENTY) == []
        assert append(store, partition, a_part(b"next")) == [Appended(Range(4, 5))]
        assert payloads(store, partition)[-1] == b"next"

    def test_trimming_never_moves_the_beginning_back(self, store: Store, partition: Partition) -> None:
        fill(store, partition, 6)
        first = trimmed(store, partition, 5)
        for before in (0, first):
            assert store.log.trim(partition, before) == first
        assert store.log.bounds(partition) == Range(first, 6)

    def test_trimming_beyond_the_end_is_refused(self, store: Store, partition: Partition) -> None:
        fill(store, partition, 3)
        for force in (False, True):
            with pytest.raises(BeyondEnd) as caught:
                store.log.trim(partition, 4, force=force)
            assert (caught.value.offset, caught.value.first, caught.value.end) == (4, 0, 3)
        assert store.log.bounds(partition) == Range(0, 3)

    def test_a_time_before_the_beginning_is_found_at_the_beginning(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        fill(store, partition, 4)
        clock.advance(10)
        fill(store, partition, 4)
        first = trimmed(store, partition, 6)
        assert store.log.find_time(partition, 0) == first
        assert store.log.find_time(partition, clock.time_us()) == max(first, 4)
        assert store.log.find_time(partition, clock.time_us() + 1) == 8

    def test_a_repeat_of_a_trimmed_run_is_still_recognised(self, store: Store, partition: Partition) -> None:
        part = a_part(b"one")
        append(store, partition, part)
        fill(store, partition, 3)
        trimmed(store, partition, 4)
        assert append(store, partition, part) == [Appended(Range(0, 1), duplicate=True)]
        assert store.log.bounds(partition).stop == 4

    # --- what protects from trimming -----------------------------------------------------------

    def test_what_a_protected_subscription_has_not_passed_is_not_trimmed(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        for before in (1, 10):  # it has not even begun
            assert_refused(store, partition, before)
        commit(store, a_cursor(a_shard(topic), 5))
        assert_refused(store, partition, 6)
        assert store.log.trim(partition, 5) <= 5

    def test_the_slowest_shard_and_the_slowest_subscription_protect(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        subscribe(store, topic, "audit")
        commit(store, a_cursor(a_shard(topic, slot=0), 8), a_cursor(a_shard(topic, slot=1), 4))
        commit(store, a_cursor(a_shard(topic, name="audit"), 6))
        assert_refused(store, partition, 5)
        commit(store, a_cursor(a_shard(topic, slot=1), 9))
        assert_refused(store, partition, 7)
        assert store.log.trim(partition, 6) <= 6

    def test_the_first_cursors_of_a_subscription_protect_before_any_progress(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        shards = [a_shard(topic, slot=slot) for slot in range(64)]
        subscription = Subscription(log_id=topic.log_id, name="billing", mode="key_shared")
        store.cursors.put_subscription(subscription, [a_cursor(shard, 2) for shard in shards])
        commit(store, *(a_cursor(shard, 9) for shard in shards[1:]))
        assert_refused(store, partition, 3)
        commit(store, a_cursor(shards[0], 5))
        assert_refused(store, partition, 6)

    def test_progress_in_one_partition_does_not_free_another(self, store: Store, topic: TopicInfo) -> None:
        zero, one = topic.partitions
        fill(store, zero, 3)
        fill(store, one, 3)
        subscribe(store, topic)
        commit(store, a_cursor(a_shard(topic, partition=0), 3))
        assert_refused(store, one, 1)
        assert store.log.trim(zero, 3) <= 3

    def test_force_trims_what_is_protected(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 4)
        subscribe(store, topic)
        assert 0 < trimmed(store, partition, 4, force=True) <= 4

    def test_a_subscription_that_does_not_protect_refuses_nothing(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 4)
        subscribe(store, topic, protect=False)
        assert store.log.trim(partition, 4) <= 4
        subscribe(store, a_topic(store, "payments"), protect=True)
        assert store.log.trim(partition, 4) <= 4

    def test_a_subscription_protects_no_longer_when_it_is_deleted_or_says_so(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 4)
        subscribe(store, topic)
        subscribe(store, topic, "audit")
        assert_refused(store, partition, 2)
        store.cursors.delete_subscription(topic.log_id, "billing")
        assert_refused(store, partition, 2)
        subscribe(store, topic, "audit", protect=False)
        assert store.log.trim(partition, 2) <= 2

    # --- deletion ------------------------------------------------------------------------------

    def test_a_handle_of_a_deleted_topic_is_told_so_everywhere(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscription = subscribe(store, topic)
        store.log.delete_topic(topic.log_id)
        a_topic(store)  # of the same name, which must not matter
        every = uses(store, partition, subscription)
        assert errors_of(every) == dict.fromkeys(every, TopicDeleted)

    def test_a_commit_for_a_deleted_topic_is_refused_and_others_go_on(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        other = a_topic(store, "payments")
        for where in (topic, other):
            fill(store, where.partitions[0], 3)
            subscribe(store, where)
        store.log.delete_topic(topic.log_id)
        gone, alive = a_shard(topic), a_shard(other)
        answers = store.cursors.commit(
            [
                Commit(cursors=(a_cursor(gone, 1),), settlement=b"gone"),
                Commit(parked=(a_parked(gone, 1),), settlement=b"gone"),
                Commit(cursors=(a_cursor(alive, 1),), settlement=b"alive"),
            ]
        )
        assert [type(answer) for answer in answers] == [TopicDeleted] * 2 + [type(None)]
        assert [row.record for row in store.cursors.settlements(10)] == [b"alive"]
        assert [cursor.next_offset for cursor in store.cursors.load(other.log_id, "billing")] == [1]

    def test_a_topic_created_anew_is_another_log_and_begins_empty_at_0(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        part = a_part(b"old")
        append(store, partition, part)
        subscribe(store, topic)
        commit(store, a_cursor(a_shard(topic), 1))
        store.log.delete_topic(topic.log_id)
        new = a_topic(store, topic.name)
        assert new.log_id != topic.log_id
        assert store.log.bounds(new.partitions[0]) == Range(0, 0)
        assert store.cursors.subscriptions() == []
        assert store.cursors.load(new.log_id, "billing") == []
        # The old log's producers are not the new one's either: the same run is news here.
        assert append(store, new.partitions[0], part) == [Appended(Range(0, 1))]

    def test_deleting_a_topic_removes_its_subscriptions_and_parked_rows_and_no_others(
        self, store: Store, topic: TopicInfo
    ) -> None:
        other = a_topic(store, "payments")
        for where in (topic, other):
            fill(store, where.partitions[0], 1)
            subscribe(store, where)
            park(store, a_parked(a_shard(where), 0))
        store.log.delete_topic(topic.log_id)
        assert store.log.topics() == [other]
        assert [subscription.log_id for subscription in store.cursors.subscriptions()] == [other.log_id]
        assert len(store.parked.page(ParkedFilter(log_id=other.log_id, subscription="billing"))) == 1
        gone = ParkedFilter(log_id=topic.log_id, subscription="billing")
        assert store.parked.page(gone) == store.parked.due(gone, 1 << 60) == []
        assert store.parked.count(gone) == {"waiting": 0, "dead": 0, "done": 0}
        assert store.parked.stamp(gone, "job") == store.parked.replay(gone, 0) == store.parked.purge(gone) == 0
        assert payloads(store, other.partitions[0]) == [b"0"]

    def test_deleting_a_topic_removes_what_is_scheduled_for_it_and_nothing_else(
        self, store: Store, topic: TopicInfo
    ) -> None:
        other = a_topic(store, "payments")
        rows = [
            Scheduled(id=where.name, log_id=where.log_id, partition=0, due_at=5, event=an_event())
            for where in (topic, other)
        ]
        store.schedule.add(rows)
        store.log.delete_topic(topic.log_id)
        assert store.schedule.page() == rows[1:]

    def test_the_head_of_a_deleted_partition_is_minus_1(self, store: Store, topic: TopicInfo) -> None:
        other = a_topic(store, "payments").partitions[0]
        fill(store, other, 2)
        heads = store.log.heads([topic.partitions[1], other])
        store.log.delete_topic(topic.log_id)
        a_topic(store)
        assert heads.read().tolist() == [-1, 2]
