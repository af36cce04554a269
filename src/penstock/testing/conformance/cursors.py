"""`Cursors`: subscriptions, progress that never moves back by mistake, and the records beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.clock import VirtualClock
from penstock.errors import BeyondEnd, Fenced, StaleCursor, UnknownSubscription, UsageError
from penstock.offsets import Bitmap
from penstock.ports import Store
from penstock.rows import Commit, Cursor, ParkedFilter, Partition, Shard, Subscription, TopicInfo
from penstock.testing.conformance.builders import (
    a_cursor,
    a_parked,
    a_shard,
    acquired,
    commit,
    fill,
    park,
    subscribe,
)
from penstock.testing.conformance.opening import StoreOpening, a_topic

if TYPE_CHECKING:
    from collections.abc import Callable


def loaded(store: Store, topic: TopicInfo, name: str = "billing") -> list[Cursor]:
    """Return the cursors of a subscription, without the time that the store may have added."""
    found = store.cursors.load(topic.log_id, name)
    return [msgspec.structs.replace(cursor, updated_at=0) for cursor in found]


def a_step(shard: Shard, to: int) -> Commit:
    """Return a commit that moves the cursor and parks and records something."""
    return Commit(cursors=(a_cursor(shard, to),), parked=(a_parked(shard, to),), settlement=b"to %d" % to)


def assert_refused(store: Store, topic: TopicInfo, cursor: Cursor, kind: type[Exception]) -> None:
    """Check that a cursor is refused for this reason, and that nothing changed."""
    before = loaded(store, topic)
    assert type(commit(store, cursor)) is kind
    assert loaded(store, topic) == before


class CursorsConformance(StoreOpening):
    """The `Cursors` port."""

    # --- subscriptions -------------------------------------------------------------------------

    def test_a_subscription_is_found_as_it_was_put(self, store: Store, topic: TopicInfo) -> None:
        subscription = Subscription(
            log_id=topic.log_id,
            name="billing",
            mode="failover",
            policy={"retry": {"max": 3, "delays": [1, 2.5, None]}, "text": "grüße", "on": True},
            protect=False,
            external=True,
            created_at=17,
        )
        store.cursors.put_subscription(subscription)
        assert store.cursors.subscriptions(topic.log_id) == [subscription]

    def test_subscriptions_are_listed_by_log_and_name(self, store: Store, topic: TopicInfo) -> None:
        other = a_topic(store, "payments")
        for where, name in ((other, "b"), (topic, "c"), (topic, "a"), (other, "a")):
            subscribe(store, where, name)
        listed = [(found.log_id, found.name) for found in store.cursors.subscriptions()]
        assert listed == sorted(listed)
        assert len(listed) == 4
        assert [found.name for found in store.cursors.subscriptions(topic.log_id)] == ["a", "c"]

    def test_putting_a_subscription_again_replaces_what_it_says_and_keeps_its_progress(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscribe(store, topic)
        cursor = a_cursor(a_shard(topic), 2)
        commit(store, cursor)
        park(store, a_parked(a_shard(topic), 1))
        changed = subscribe(store, topic, policy={"max_retries": 5})
        assert store.cursors.subscriptions() == [changed]
        assert loaded(store, topic) == [cursor]
        assert len(store.parked.page(ParkedFilter(log_id=topic.log_id, subscription="billing"))) == 1

    def test_a_subscription_is_created_with_its_first_cursors_and_later_ones_do_not_replace_them(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        first = [a_cursor(a_shard(topic, slot=slot), 1) for slot in range(2)]
        subscription = Subscription(log_id=topic.log_id, name="billing", mode="key_shared")
        store.cursors.put_subscription(subscription, first)
        assert loaded(store, topic) == first
        late = [a_cursor(a_shard(topic, slot=slot), 3) for slot in range(3)]
        store.cursors.put_subscription(subscription, late)
        assert loaded(store, topic) == [*first, late[2]]

    def test_a_subscription_with_a_wrong_cursor_is_not_created(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscription = Subscription(log_id=topic.log_id, name="billing", mode="key_shared")
        right = a_cursor(a_shard(topic), 1)
        for wrong, kind in (
            (a_cursor(a_shard(topic, slot=1), 4), BeyondEnd),
            (a_cursor(a_shard(topic, name="audit"), 1), UsageError),
            (a_cursor(a_shard(topic, partition=2), 0), UsageError),
        ):
            with pytest.raises(kind):
                store.cursors.put_subscription(subscription, [right, wrong])
            assert store.cursors.subscriptions() == []
            assert loaded(store, topic) == []

    def test_a_deleted_subscription_takes_its_cursors_and_parked_rows_along_and_no_others(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        for name in ("audit", "billing"):
            subscribe(store, topic, name)
            commit(store, a_cursor(a_shard(topic, name=name), 2))
            park(store, a_parked(a_shard(topic, name=name), 1))
        assert store.cursors.delete_subscription(topic.log_id, "billing")
        assert not store.cursors.delete_subscription(topic.log_id, "billing")
        subscribe(store, topic, "billing")  # anew, and from the beginning
        for name, left in (("audit", 1), ("billing", 0)):
            assert len(loaded(store, topic, name)) == left
            assert len(store.parked.page(ParkedFilter(log_id=topic.log_id, subscription=name))) == left

    def test_deleting_a_subscription_that_was_never_there_says_so(self, store: Store, topic: TopicInfo) -> None:
        assert not store.cursors.delete_subscription(topic.log_id, "billing")

    def test_one_subscription_is_found_by_log_and_name(self, store: Store, topic: TopicInfo) -> None:
        other = a_topic(store, "payments")
        put = [subscribe(store, where, name, policy={"of": name}) for where in (topic, other) for name in ("a", "b")]
        assert [store.cursors.subscription(found.log_id, found.name) for found in put] == put
        changed = subscribe(store, topic, "a", policy={"max_retries": 5})
        assert store.cursors.subscription(topic.log_id, "a") == changed
        store.cursors.delete_subscription(other.log_id, "b")
        assert store.cursors.subscription(other.log_id, "b") is None
        assert store.cursors.subscription(topic.log_id, "never there") is None
        store.log.delete_topic(topic.log_id)
        assert store.cursors.subscription(topic.log_id, "a") is None

    # --- the revision --------------------------------------------------------------------------

    def test_the_revision_changes_when_subscriptions_do(self, store: Store, topic: TopicInfo) -> None:
        gone = a_topic(store, "gone")
        seen = [store.cursors.revision()]
        changes: list[Callable[[], object]] = [
            lambda: subscribe(store, topic),
            lambda: subscribe(store, topic, policy={"max_retries": 5}),
            lambda: subscribe(store, gone),
            lambda: store.cursors.delete_subscription(topic.log_id, "billing"),
            lambda: store.log.delete_topic(gone.log_id),
        ]
        for change in changes:
            change()
            seen.append(store.cursors.revision())
        assert len(set(seen)) == len(seen)

    def test_the_revision_changes_with_a_raised_generation_and_not_with_ordinary_commits(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard, other = a_shard(topic), a_shard(topic, slot=1)
        seen = [store.cursors.revision()]

        def assert_same() -> None:
            assert store.cursors.revision() == seen[-1]

        def assert_changed() -> None:
            seen.append(store.cursors.revision())
            assert seen[-1] not in seen[:-1]

        commit(store, a_cursor(shard, 3), parked=(a_parked(shard, 1), a_parked(shard, 2, state="waiting")))
        commit(store, a_cursor(shard, 4), a_cursor(other, 2), settlement=b"record")
        commit(store, a_cursor(shard, 4), parked=(a_parked(shard, 2, state="done"),))
        assert_same()
        commit(store, a_cursor(shard, 1, generation=1))
        assert_changed()
        commit(store, a_cursor(shard, 5, generation=1))
        assert type(commit(store, a_cursor(shard, 2), a_cursor(other, 2, generation=9))) is StaleCursor
        assert_same()
        # Together with others that raise nothing, and of a shard that nobody has begun.
        raising = [Commit(cursors=(a_cursor(shard, 0, generation=3),)), a_step(other, 4)]
        assert store.cursors.commit(raising) == [None, None]
        assert_changed()
        commit(store, a_cursor(a_shard(topic, slot=2), 0, generation=1))
        assert_changed()

    def test_the_revision_changes_when_parked_rows_are_changed_by_others_than_commits(
        self, store: Store, topic: TopicInfo
    ) -> None:
        subscribe(store, topic)
        park(store, *(a_parked(a_shard(topic), offset) for offset in range(3)))
        rows = ParkedFilter(log_id=topic.log_id, subscription="billing")
        seen = [store.cursors.revision()]
        calls: list[Callable[[ParkedFilter], int]] = [
            lambda wanted: store.parked.stamp(wanted, "job"),
            lambda wanted: store.parked.replay(wanted, 0, limit=1),
            store.parked.purge,
        ]
        for call in calls:
            assert call(msgspec.structs.replace(rows, lane=99)) == 0
            assert store.cursors.revision() == seen[-1]  # nothing was changed
            assert call(rows) > 0
            seen.append(store.cursors.revision())
        assert len(set(seen)) == len(seen)

    # --- cursors -------------------------------------------------------------------------------

    def test_what_is_loaded_is_what_was_committed(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 100)
        subscribe(store, topic)
        assert loaded(store, topic) == []
        bitmap = Bitmap(7)
        for offset in (9, 12, 70):
            bitmap.set(offset)
        cursor = a_cursor(
            a_shard(topic, slot=63),
            7,
            settled=bitmap.to_bytes(),
            attempts={7: 1, 11: 3},
            generation=2,
            number=41,
            stop=90,
        )
        assert commit(store, cursor) is None
        assert loaded(store, topic) == [cursor]
        plain = a_cursor(cursor.shard, 71, generation=2, number=42)
        assert commit(store, plain) is None
        assert loaded(store, topic) == [plain]

    def test_cursors_are_loaded_by_slot_and_partition(self, store: Store, topic: TopicInfo) -> None:
        subscribe(store, topic)
        subscribe(store, topic, "audit")
        places = [(10, 0), (2, 1), (10, 1), (2, 0)]
        commit(store, *(a_cursor(a_shard(topic, slot=slot, partition=part), 0) for slot, part in places))
        commit(store, a_cursor(a_shard(topic, name="audit"), 0))
        assert [cursor.shard[2:] for cursor in loaded(store, topic)] == [(2, 0), (2, 1), (10, 0), (10, 1)]
        assert [cursor.shard.subscription for cursor in loaded(store, topic, "audit")] == ["audit"]

    def test_a_cursor_never_moves_back_within_its_generation(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert commit(store, a_cursor(shard, 5, generation=1)) is None
        assert_refused(store, topic, a_cursor(shard, 4, generation=1), StaleCursor)
        assert_refused(store, topic, a_cursor(shard, 9, generation=0), StaleCursor)
        for offset in (5, 6):
            assert commit(store, a_cursor(shard, offset, generation=1, settled=b"\2")) is None
        assert loaded(store, topic) == [a_cursor(shard, 6, generation=1, settled=b"\2")]

    def test_a_seek_to_a_higher_generation_may_go_back(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        commit(store, a_cursor(a_shard(topic), 8))
        sought = a_cursor(a_shard(topic), 2, generation=1)
        assert commit(store, sought) is None
        assert loaded(store, topic) == [sought]
        assert_refused(store, topic, a_cursor(a_shard(topic), 9), StaleCursor)

    def test_a_seek_must_have_seen_the_last_record(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert commit(store, a_cursor(shard, 8, number=4)) is None
        assert_refused(store, topic, a_cursor(shard, 2, generation=1, number=3), StaleCursor)
        late = Commit(cursors=(a_cursor(shard, 2, generation=1, number=4),), settlement=b"skipped")
        [refusal] = store.cursors.commit([late])
        assert type(refusal) is StaleCursor
        assert store.cursors.settlements(1) == []
        # Within one call, too: the owner's step comes first.
        seen = Commit(cursors=(a_cursor(shard, 2, generation=1, number=5),), settlement=b"skipped")
        answers = store.cursors.commit([Commit(cursors=(a_cursor(shard, 9, number=5),)), seen])
        assert [type(answer) for answer in answers] == [type(None), StaleCursor]
        assert commit(store, a_cursor(shard, 2, generation=1, number=5)) is None
        assert commit(store, a_cursor(shard, 0, generation=2, number=6)) is None

    def test_a_cursor_past_the_end_of_the_log_is_refused(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscribe(store, topic)
        assert commit(store, a_cursor(a_shard(topic), 3)) is None
        assert_refused(store, topic, a_cursor(a_shard(topic), 4), BeyondEnd)
        assert_refused(store, topic, a_cursor(a_shard(topic, partition=1), 1), BeyondEnd)

    def test_a_commit_for_a_deleted_subscription_is_refused(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscribe(store, topic)
        commit(store, a_cursor(a_shard(topic), 1))
        store.cursors.delete_subscription(topic.log_id, "billing")
        shard = a_shard(topic)
        assert_refused(store, topic, a_cursor(shard, 2), UnknownSubscription)
        assert type(commit(store, parked=(a_parked(shard, 0),))) is UnknownSubscription
        assert store.cursors.subscriptions() == []

    def test_a_commit_for_a_partition_that_the_topic_does_not_have_is_a_usage_error(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscribe(store, topic)
        right = Commit(cursors=(a_cursor(a_shard(topic), 1),), settlement=b"right")
        wrong = Commit(cursors=(a_cursor(a_shard(topic, partition=2), 0),))
        with pytest.raises(UsageError):
            store.cursors.commit([right, wrong])
        # The call ended with an error, so nothing of it was written.
        assert loaded(store, topic) == []
        assert store.cursors.settlements(10) == []

    # --- commits as a whole --------------------------------------------------------------------

    def test_a_refused_commit_leaves_nothing_behind_and_the_others_are_written(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        zero, one, two = (a_shard(topic, slot=slot) for slot in range(3))
        commit(store, a_cursor(zero, 5), a_cursor(one, 5), a_cursor(two, 5))
        answers = store.cursors.commit(
            [
                a_step(zero, 6),
                # Its first cursor, its row and its record are right: only the second cursor moves back.
                Commit(
                    cursors=(a_cursor(one, 7), a_cursor(two, 4)),
                    parked=(a_parked(one, 8),),
                    settlement=b"refused",
                ),
                a_step(two, 9),
            ]
        )
        assert [type(answer) for answer in answers] == [type(None), StaleCursor, type(None)]
        assert loaded(store, topic) == [a_cursor(zero, 6), a_cursor(one, 5), a_cursor(two, 9)]
        rows = store.parked.page(ParkedFilter(log_id=topic.log_id, subscription="billing"))
        assert [row.offset for row in rows] == [6, 9]
        assert [found.record for found in store.cursors.settlements(10)] == [b"to 6", b"to 9"]

    def test_each_commit_of_a_call_sees_the_ones_before_it(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard = a_shard(topic)
        answers = store.cursors.commit([a_step(shard, to) for to in (3, 2, 5)])
        assert [type(answer) for answer in answers] == [type(None), StaleCursor, type(None)]
        assert loaded(store, topic) == [a_cursor(shard, 5)]

    # --- fences --------------------------------------------------------------------------------

    def test_a_commit_with_a_stale_fence_is_refused(
        self, store: Store, topic: TopicInfo, partition: Partition, clock: VirtualClock
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard = a_shard(topic)
        old = acquired(store, owner="a", seconds=10)
        assert commit(store, a_cursor(shard, 1), fences=(old.fence,)) is None
        clock.advance(11)
        new = acquired(store, owner="b")
        refused = commit(
            store, a_cursor(shard, 2), parked=(a_parked(shard, 2),), settlement=b"stale", fences=(old.fence,)
        )
        assert type(refused) is Fenced
        assert loaded(store, topic) == [a_cursor(shard, 1)]
        assert store.parked.page(ParkedFilter(log_id=topic.log_id, subscription="billing")) == []
        assert store.cursors.settlements(10) == []
        assert commit(store, a_cursor(shard, 3), fences=(new.fence,)) is None

    def test_a_fence_holds_until_somebody_else_has_the_lease(
        self, store: Store, topic: TopicInfo, partition: Partition, clock: VirtualClock
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        lease = acquired(store, seconds=10)
        acquired(store, "another shard", "b")
        clock.advance(3600)  # expired, but nobody could have acted meanwhile
        assert commit(store, a_cursor(a_shard(topic), 1), fences=(lease.fence,)) is None

    def test_a_lease_that_its_owner_acquired_again_fences_the_earlier_time(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        old = acquired(store)
        new = acquired(store)
        assert type(commit(store, a_cursor(a_shard(topic), 1), fences=(old.fence,))) is Fenced
        assert commit(store, a_cursor(a_shard(topic), 1), fences=(new.fence,)) is None

    # --- settlements ---------------------------------------------------------------------------

    def test_settlements_come_in_the_order_of_their_commits(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard = a_shard(topic)
        store.cursors.commit([a_step(shard, to) for to in (1, 2)])
        assert commit(store, a_cursor(shard, 3)) is None  # without a record
        store.cursors.commit([a_step(shard, to) for to in (4, 5)])
        found = store.cursors.settlements(10)
        assert [row.record for row in found] == [b"to 1", b"to 2", b"to 4", b"to 5"]
        numbers = [row.number for row in found]
        assert numbers == sorted(set(numbers))
        assert store.cursors.settlements(3) == found[:3]

    def test_forgotten_settlements_do_not_come_again_and_their_numbers_neither(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 10)
        subscribe(store, topic)
        shard = a_shard(topic)
        store.cursors.commit([a_step(shard, to) for to in (1, 2, 3)])
        first, second, third = store.cursors.settlements(10)
        store.cursors.forget_settlements(second.number)
        assert store.cursors.settlements(10) == [third]
        store.cursors.forget_settlements(third.number)
        store.cursors.forget_settlements(third.number)
        assert store.cursors.settlements(10) == []
        store.cursors.commit([a_step(shard, 4)])
        [fourth] = store.cursors.settlements(10)
        assert fourth.number > third.number > first.number
