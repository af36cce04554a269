"""The ports through which events come in: `Schedule`, `Outbox`."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest

from penstock.batch import Batch
from penstock.errors import Fenced, TopicDeleted
from penstock.ports import Outbox, Store
from penstock.rows import Appended, Partition, Scheduled, Staged, TopicInfo
from penstock.testing.conformance.builders import (
    Part,
    a_run,
    acquired,
    an_event,
    append,
)
from penstock.testing.conformance.opening import StoreOpening, a_topic

if TYPE_CHECKING:
    from penstock.clock import VirtualClock
    from penstock.events import Event


def moved(store: Store, partition: Partition, event: Event, producer: bytes, sequence: int) -> Appended:
    """Append one claimed event as its claim says."""
    batch = Batch.from_events([event])
    [answer] = append(store, partition, Part(batch, a_run(batch, producer, sequence)))
    return answer


def a_row(topic: TopicInfo, name: str, due_at: int, partition: int = 0) -> Scheduled:
    """Return an event that is due at this time, as it is added."""
    event = an_event(name.encode())
    return Scheduled(id=name, log_id=topic.log_id, partition=partition, due_at=due_at, event=event)


class ScheduleConformance(StoreOpening):
    """The `Schedule` port."""

    def test_scheduled_rows_are_paged_by_due_time_and_id(self, store: Store, topic: TopicInfo) -> None:
        rows = [a_row(topic, name, due_at) for name, due_at in (("d", 5), ("a", 10), ("c", 10), ("b", 200))]
        store.schedule.add(list(reversed(rows)))
        assert store.schedule.page() == rows
        assert store.schedule.page(limit=2) == rows[:2]
        assert store.schedule.page(after=(10, "a"), limit=1) == rows[2:3]
        assert store.schedule.page(after=(10, "b")) == rows[2:]
        assert store.schedule.page(after=(200, "b")) == []

    def test_an_id_that_is_there_already_is_left_as_it_is(self, store: Store, topic: TopicInfo) -> None:
        first = a_row(topic, "a", 5)
        store.schedule.add([first, a_row(topic, "a", 6)])
        store.schedule.add([a_row(topic, "a", 7), a_row(topic, "b", 8)])
        assert store.schedule.page() == [first, a_row(topic, "b", 8)]

    def test_rows_are_added_all_or_none(self, store: Store, topic: TopicInfo) -> None:
        gone = a_topic(store, "gone")
        store.log.delete_topic(gone.log_id)
        with pytest.raises(TopicDeleted):
            store.schedule.add([a_row(topic, "a", 5), a_row(gone, "b", 5)])
        assert store.schedule.page() == []

    def test_only_a_row_that_was_not_claimed_can_be_cancelled(self, store: Store, topic: TopicInfo) -> None:
        store.schedule.add([a_row(topic, "claimed", 5), a_row(topic, "waiting", 50)])
        store.schedule.claim(5, 10, acquired(store).fence)
        assert not store.schedule.cancel("claimed")
        assert not store.schedule.cancel("never added")
        assert store.schedule.cancel("waiting")
        assert not store.schedule.cancel("waiting")
        assert [row.id for row in store.schedule.page()] == ["claimed"]

    def test_the_next_due_time_is_the_first_rows_claimed_or_not(self, store: Store, topic: TopicInfo) -> None:
        assert store.schedule.next_due() is None
        store.schedule.add([a_row(topic, "a", 50), a_row(topic, "b", 5)])
        fence = acquired(store).fence
        store.schedule.claim(5, 10, fence)
        assert store.schedule.next_due() == 5
        store.schedule.done(["b"], fence)
        assert store.schedule.next_due() == 50

    def test_every_row_counts_as_pending_until_it_is_done_cancelled_or_deleted_with_its_topic(
        self, store: Store, topic: TopicInfo
    ) -> None:
        other = a_topic(store, "other")
        store.schedule.add([a_row(topic, "a", 5), a_row(topic, "a", 6), a_row(topic, "b", 50), a_row(topic, "c", 60)])
        store.schedule.add([a_row(other, "d", 70)])
        fence = acquired(store).fence
        store.schedule.claim(5, 10, fence)
        assert store.schedule.pending() == 4
        store.schedule.done(["a"], fence)
        assert store.schedule.cancel("b")
        assert store.schedule.pending() == 2
        store.log.delete_topic(other.log_id)
        assert store.schedule.pending() == 1

    def test_nothing_is_claimed_before_its_time(self, store: Store, topic: TopicInfo) -> None:
        store.schedule.add([a_row(topic, "a", 10), a_row(topic, "b", 11), a_row(topic, "c", 9)])
        fence = acquired(store).fence
        assert store.schedule.claim(8, 10, fence) == []
        assert [row.id for row in store.schedule.claim(10, 10, fence)] == ["c", "a"]
        assert [row.id for row in store.schedule.claim(11, 2, fence)] == ["c", "a"]
        assert [row.id for row in store.schedule.claim(11, 10, fence)] == ["c", "a", "b"]

    def test_a_claim_is_the_same_at_every_call_whoever_makes_it(self, store: Store, topic: TopicInfo) -> None:
        rows = [a_row(topic, name, 5) for name in ("a", "b", "c")]
        store.schedule.add(rows)
        claimed = store.schedule.claim(5, 10, acquired(store).fence)
        stripped = [msgspec.structs.replace(row, producer=b"", sequence=None) for row in claimed]
        assert sorted(stripped, key=lambda row: row.id) == rows
        assert len({(row.producer, row.sequence) for row in claimed}) == 3
        assert all(row.producer and row.sequence is not None for row in claimed)
        assert store.schedule.claim(500, 10, acquired(store).fence) == claimed

    def test_what_is_done_is_gone_and_its_sequence_does_not_come_again(self, store: Store, topic: TopicInfo) -> None:
        fence = acquired(store).fence
        used = set()
        for name in ("a", "b", "c"):
            store.schedule.add([a_row(topic, name, 5)])
            [claimed] = store.schedule.claim(5, 10, fence)
            assert claimed.id == name
            used.add((claimed.producer, claimed.sequence))
            store.schedule.done([name, "never added"], fence)
            assert store.schedule.page() == []
        assert len(used) == 3

    def test_done_removes_nothing_that_was_not_claimed(self, store: Store, topic: TopicInfo) -> None:
        store.schedule.add([a_row(topic, "a", 5)])
        store.schedule.done(["a"], acquired(store).fence)
        assert [row.id for row in store.schedule.page()] == ["a"]

    def test_what_is_claimed_can_be_appended_and_a_repeat_is_recognised(self, store: Store, topic: TopicInfo) -> None:
        names = ("a", "b", "c", "d")
        store.schedule.add([a_row(topic, name, 5, index % 2) for index, name in enumerate(names)])
        for duplicate in (False, True):  # the second time as after a crash before `done`
            for row in store.schedule.claim(5, 10, acquired(store).fence):
                assert row.sequence is not None
                partition = topic.partitions[row.partition]
                answer = moved(store, partition, row.event, row.producer, row.sequence)
                assert (answer.refused, answer.duplicate) == (None, duplicate)
        assert [store.log.bounds(partition).stop for partition in topic.partitions] == [2, 2]

    def test_a_schedule_that_was_silent_for_months_is_still_recognised(
        self, store: Store, topic: TopicInfo, clock: VirtualClock
    ) -> None:
        store.schedule.add([a_row(topic, "a", 5)])
        for duplicate in (False, True):
            [row] = store.schedule.claim(5, 10, acquired(store).fence)
            assert row.sequence is not None
            answer = moved(store, topic.partitions[0], row.event, row.producer, row.sequence)
            assert (answer.refused, answer.duplicate) == (None, duplicate)
            clock.advance(timedelta(days=100))

    def test_a_stale_scheduler_is_fenced(self, store: Store, topic: TopicInfo) -> None:
        store.schedule.add([a_row(topic, "a", 5), a_row(topic, "b", 5)])
        stale = acquired(store).fence
        claimed = store.schedule.claim(5, 1, stale)
        fresh = acquired(store).fence
        with pytest.raises(Fenced):
            store.schedule.claim(5, 10, stale)
        with pytest.raises(Fenced):
            store.schedule.done([claimed[0].id], stale)
        assert len(store.schedule.claim(5, 10, fresh)) == 2


def outbox_of(store: Store) -> Outbox:
    """Return the store's outbox, or skip."""
    if store.outbox is None:
        pytest.skip("outbox: capability of stores that share the caller's transactions")
    return store.outbox


class OutboxConformance(StoreOpening):
    """The `Outbox` port, of stores that have one."""

    def stage(self, store: Store, *payloads: bytes) -> None:
        """Stage events in one transaction and commit it."""
        with self.transaction(store) as transaction:
            rows = [Staged(topic="orders", event=an_event(payload)) for payload in payloads]
            outbox_of(store).stage(transaction, rows)

    def test_staged_rows_exist_once_their_transaction_commits(self, store: Store) -> None:
        outbox = outbox_of(store)
        with self.transaction(store) as transaction:
            outbox.stage(transaction, [Staged(topic="orders", event=an_event(b"one"))])
            outbox.stage(transaction, [Staged(topic="payments", event=an_event(b"two", key=None))])
            assert outbox.pending() == 0
        assert outbox.pending() == 2
        claimed = outbox.claim(10, acquired(store).fence)
        assert [(row.topic, row.event) for row in claimed] == [
            ("orders", an_event(b"one")),
            ("payments", an_event(b"two", key=None)),
        ]

    def test_rows_of_a_transaction_that_rolls_back_never_exist(self, store: Store) -> None:
        outbox = outbox_of(store)
        with suppress(ZeroDivisionError), self.transaction(store) as transaction:
            outbox.stage(transaction, [Staged(topic="orders", event=an_event(b"never"))])
            raise ZeroDivisionError
        assert outbox.pending() == 0
        self.stage(store, b"one")
        assert [row.event.data for row in outbox.claim(10, acquired(store).fence)] == [b"one"]

    def test_the_oldest_rows_are_claimed_by_sequence_and_the_same_until_done(self, store: Store) -> None:
        outbox = outbox_of(store)
        for payloads in ([b"0", b"1"], [b"2"], [b"3", b"4"]):
            self.stage(store, *payloads)
        fence = acquired(store).fence
        claimed = outbox.claim(10, fence)
        assert [row.event.data for row in claimed] == [b"0", b"1", b"2", b"3", b"4"]
        sequences = [row.sequence for row in claimed]
        assert sequences == sorted(set(sequences))
        assert outbox.claim(2, fence) == claimed[:2]
        fence = acquired(store).fence  # of the next mover, after a crash
        assert outbox.claim(10, fence) == claimed
        outbox.done(sequences[:3], fence)
        assert outbox.claim(10, fence) == claimed[3:]
        assert outbox.pending() == 2
        outbox.done(sequences, fence)
        assert (outbox.claim(10, fence), outbox.pending()) == ([], 0)

    def test_sequences_never_restart_after_the_outbox_was_drained(self, store: Store) -> None:
        outbox = outbox_of(store)
        fence, last = acquired(store).fence, -1
        for _ in range(3):
            self.stage(store, b"one", b"two")
            sequences = [row.sequence for row in outbox.claim(10, fence)]
            assert last < sequences[0] < sequences[1]
            last = sequences[1]
            outbox.done(sequences, fence)

    def test_a_stale_mover_is_fenced(self, store: Store) -> None:
        outbox = outbox_of(store)
        self.stage(store, b"one")
        stale = acquired(store).fence
        [row] = outbox.claim(10, stale)
        fresh = acquired(store).fence
        with pytest.raises(Fenced):
            outbox.claim(10, stale)
        with pytest.raises(Fenced):
            outbox.done([row.sequence], stale)
        assert outbox.claim(10, fresh) == [row]

    def test_what_the_outbox_gives_out_can_be_appended_and_a_repeat_is_recognised(
        self, store: Store, topic: TopicInfo
    ) -> None:
        outbox = outbox_of(store)
        self.stage(store, b"one", b"two", b"three")
        for duplicate in (False, True):
            # To whichever partitions: none of them sees all of the sequences.
            for number, row in enumerate(outbox.claim(10, acquired(store).fence)):
                partition = topic.partitions[number % 2]
                answer = moved(store, partition, row.event, outbox.producer, row.sequence)
                assert (answer.refused, answer.duplicate) == (None, duplicate)
        assert [store.log.bounds(partition).stop for partition in topic.partitions] == [2, 1]

    def test_an_outbox_that_was_silent_for_months_is_still_recognised(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        outbox = outbox_of(store)
        self.stage(store, b"one")
        for duplicate in (False, True):  # appended, and then a crash before `done`
            [row] = outbox.claim(10, acquired(store).fence)
            answer = moved(store, partition, row.event, outbox.producer, row.sequence)
            assert (answer.refused, answer.duplicate) == (None, duplicate)
            clock.advance(timedelta(days=100))
