"""Cursors with several owners: what each of them settles is added to one progress, in whichever order they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import BeyondEnd, Fenced, StaleCursor, UnknownSubscription
from penstock.offsets import Bitmap, Range, RangeSet
from penstock.ports import Store
from penstock.rows import Claim, Commit, Cursor, Partition, Settling, Shard, TopicInfo
from penstock.settling import claims_of, unsettled
from penstock.testing.conformance.builders import a_cursor, a_parked, a_shard, acquired, commit, fill, subscribe
from penstock.testing.conformance.cursors import loaded
from penstock.testing.conformance.opening import StoreOpening

if TYPE_CHECKING:
    from penstock.errors import StoreError


def settle(store: Store, shard: Shard, *spans: tuple[int, int], **stated: Any) -> StoreError | None:
    """Make one commit of an owner that has settled these ranges, and return its answer."""
    beside = {name: stated.pop(name) for name in ("fences", "parked") if name in stated}
    settled = RangeSet(Range(*span) for span in spans)
    settling = Settling(shard=shard, settled=settled, **{"generation": 0, **stated})
    [answer] = store.cursors.commit([Commit(settling=settling, **beside)])
    return answer


def record(before: Cursor, after: Cursor) -> bytes:
    """Return a record that says what it was made from."""
    return b"%d: %d to %d" % (after.number, before.next_offset, after.next_offset)


def settled_of(cursor: Cursor, end: int) -> list[int]:
    """Return all offsets below an end that a cursor has passed, or settled ahead."""
    bitmap = Bitmap.from_bytes(cursor.next_offset, cursor.settled)
    return [offset for offset in range(end) if offset in bitmap]


class SettlingConformance(StoreOpening):
    """Commits of several owners."""

    def test_claims_are_made_by_commits_and_come_back_as_they_were(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 12)
        subscribe(store, topic)
        shard = a_shard(topic)
        seen: list[Cursor] = []

        def look(_before: Cursor, after: Cursor) -> bytes:
            seen.append(after)
            return b""

        assert settle(store, shard, berth=1, claim=Claim(5, 12), record=look) is None
        assert settle(store, shard, berth=2, claim=Claim(50, 12), record=look) is None
        [cursor] = loaded(store, topic)
        assert (cursor.claims, cursor.stop) == (seen[-1].claims, 12)
        assert [claims_of(cursor, berth) for berth in (1, 2)] == [RangeSet([Range(0, 5)]), RangeSet([Range(5, 12)])]
        freed = RangeSet([Range(6, 8)])
        assert settle(store, shard, (5, 6), (8, 12), berth=2, freed=freed) is None
        assert settle(store, shard, (0, 2), berth=1, claim=Claim(1, 12)) is None
        [cursor] = loaded(store, topic)
        assert [unsettled(cursor, berth) for berth in (0, 1, 2)] == [
            RangeSet([Range(7, 8)]),
            RangeSet([Range(2, 5), Range(6, 7)]),
            RangeSet(),
        ]
        assert cursor.next_offset == 2

    def test_claims_of_one_call_see_each_other_and_what_is_refused_claims_nothing(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 12)
        subscribe(store, topic)
        shard = a_shard(topic)
        lease = acquired(store, "berth")
        stale = lease.fence._replace(epoch=lease.epoch + 1)

        def claiming(berth: int, **stated: Any) -> Commit:
            return Commit(settling=Settling(shard=shard, generation=0, berth=berth, claim=Claim(4, 12)), **stated)

        answers = store.cursors.commit([claiming(1, fences=(lease.fence,)), claiming(2, fences=(stale,)), claiming(3)])
        assert [type(answer) for answer in answers] == [type(None), Fenced, type(None)]
        [cursor] = loaded(store, topic)
        assert {berth: claims_of(cursor, berth) for berth in cursor.claims} == {
            1: RangeSet([Range(0, 4)]),
            3: RangeSet([Range(4, 8)]),
        }

    def test_a_cursor_that_is_moved_has_no_claims(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 12)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert settle(store, shard, berth=1, claim=Claim(5, 12)) is None
        assert commit(store, a_cursor(shard, 3, generation=1)) is None
        [cursor] = loaded(store, topic)
        assert (cursor.claims, cursor.stop) == ({}, None)
        assert isinstance(settle(store, shard, berth=1, claim=Claim(5, 12)), StaleCursor)

    def test_what_several_owners_settle_becomes_one_cursor(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 12)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert settle(store, shard, (1, 2), (3, 5)) is None
        [cursor] = loaded(store, topic)
        assert (cursor.next_offset, settled_of(cursor, 12)) == (0, [1, 3, 4])
        assert settle(store, shard, (0, 1), (5, 6)) is None
        [cursor] = loaded(store, topic)
        assert (cursor.next_offset, settled_of(cursor, 12)) == (2, [0, 1, 3, 4, 5])
        assert settle(store, shard, (2, 3), (10, 12)) is None
        [cursor] = loaded(store, topic)
        assert (cursor.next_offset, settled_of(cursor, 12)) == (6, [*range(6), 10, 11])

    def test_commits_of_one_call_see_each_other(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 6)
        subscribe(store, topic)
        shard = a_shard(topic)
        steps = [RangeSet([Range(offset, offset + 1)]) for offset in (5, 0, 2, 1)]
        commits = [Commit(settling=Settling(shard=shard, generation=0, settled=each, record=record)) for each in steps]
        assert store.cursors.commit(commits) == [None] * 4
        [cursor] = loaded(store, topic)
        assert (cursor.next_offset, cursor.number, settled_of(cursor, 6)) == (3, 4, [0, 1, 2, 5])
        records = [each.record for each in store.cursors.settlements(10)]
        assert records == [b"1: 0 to 0", b"2: 0 to 1", b"3: 1 to 1", b"4: 1 to 3"]

    def test_a_step_that_is_written_twice_changes_nothing_the_second_time(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 6)
        subscribe(store, topic)
        shard = a_shard(topic)
        for _ in range(2):
            assert settle(store, shard, (0, 2), (4, 5), attempts={2: 1}) is None
            assert loaded(store, topic) == [a_cursor(shard, 2, settled=b"\x04", attempts={2: 1})]

    def test_many_ranges_are_settled_like_few(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 200)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert settle(store, shard, *[(offset, offset + 1) for offset in range(1, 200, 2)]) is None
        [cursor] = loaded(store, topic)
        assert (cursor.next_offset, settled_of(cursor, 200)) == (0, list(range(1, 200, 2)))
        assert settle(store, shard, *[(offset, offset + 1) for offset in range(0, 199, 2)]) is None
        assert loaded(store, topic) == [a_cursor(shard, 200)]

    def test_attempts_are_each_owners_own(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        fill(store, partition, 6)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert settle(store, shard, attempts={1: 1, 3: 2}) is None
        assert settle(store, shard, attempts={2: 1, 4: 0}) is None
        [cursor] = loaded(store, topic)
        assert cursor.attempts == {1: 1, 2: 1, 3: 2, 4: 0}
        assert settle(store, shard, (3, 4), attempts={2: None, 4: 1}) is None
        [cursor] = loaded(store, topic)
        assert cursor.attempts == {1: 1, 4: 1}

    def test_a_cursor_that_was_moved_is_not_added_to(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 6)
        subscribe(store, topic)
        shard = a_shard(topic)
        assert commit(store, a_cursor(shard, 2, generation=1)) is None
        for generation in (0, 2):
            refused = settle(store, shard, (2, 3), generation=generation, parked=(a_parked(shard, 2),), record=record)
            assert type(refused) is StaleCursor
            assert loaded(store, topic) == [a_cursor(shard, 2, generation=1)]
            assert store.cursors.settlements(1) == []
        assert settle(store, shard, (2, 3), generation=1) is None

    def test_what_cannot_be_settled_is_refused_as_a_whole(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscribe(store, topic)
        assert type(settle(store, a_shard(topic), (0, 1), (2, 4), record=record)) is BeyondEnd
        assert type(settle(store, a_shard(topic, name="other"), (0, 1), record=record)) is UnknownSubscription
        assert loaded(store, topic) == []
        assert store.cursors.settlements(1) == []

    def test_all_leases_that_a_step_acts_for_must_be_current(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 3)
        subscribe(store, topic)
        mine, lost = acquired(store, "slot/1"), acquired(store, "slot/2")
        assert settle(store, a_shard(topic), (0, 1), fences=(mine.fence, lost.fence)) is None
        acquired(store, "slot/2")
        assert type(settle(store, a_shard(topic), (1, 2), fences=(mine.fence, lost.fence))) is Fenced
        assert type(settle(store, a_shard(topic), (1, 2), fences=(lost.fence, mine.fence))) is Fenced
        assert loaded(store, topic) == [a_cursor(a_shard(topic), 1)]
        assert settle(store, a_shard(topic), (1, 2), fences=(mine.fence,)) is None
