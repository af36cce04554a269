"""`Log.append` and its producers: a sequence is stored at most once, and a repeat is told from news."""

from __future__ import annotations

from penstock.clock import VirtualClock
from penstock.errors import ProducerConflict, ProducerExpired, ProducerFenced, ProducerRefused
from penstock.offsets import Range
from penstock.ports import Store
from penstock.producers import (
    PRODUCER_HOLES_MAX,
    PRODUCER_IDLE_SECONDS,
    PRODUCER_RUNS_KEPT,
    lasting_producer,
    process_producer,
)
from penstock.rows import Appended, Partition, TopicInfo
from penstock.testing.conformance.builders import OTHER_PRODUCER, PRODUCER, Part, a_part, append, fill, payloads
from penstock.testing.conformance.opening import StoreOpening


def assert_refused(store: Store, partition: Partition, part: Part, kind: type[ProducerRefused]) -> None:
    """Check that a part is refused for this reason, and that nothing of it was written."""
    before = store.log.bounds(partition)
    [answer] = append(store, partition, part)
    assert type(answer.refused) is kind
    assert (answer.offsets, answer.duplicate) == (None, False)
    assert store.log.bounds(partition) == before


class ProducersConformance(StoreOpening):
    """What `Log.append` promises to a publisher that repeats itself."""

    # --- repeats -------------------------------------------------------------------------------

    def test_a_repeat_is_answered_with_its_first_offsets_and_not_stored(
        self, store: Store, partition: Partition
    ) -> None:
        part = a_part(b"one", b"two")
        assert append(store, partition, part) == [Appended(Range(0, 2))]
        append(store, partition, a_part(b"three", producer=OTHER_PRODUCER))
        for _ in range(2):
            assert append(store, partition, part) == [Appended(Range(0, 2), duplicate=True)]
        assert payloads(store, partition) == [b"one", b"two", b"three"]

    def test_a_repeat_within_one_append_is_answered_with_its_first_offsets(
        self, store: Store, partition: Partition
    ) -> None:
        part, other = a_part(b"one"), a_part(b"two", producer=OTHER_PRODUCER)
        assert append(store, partition, part, other, part, other) == [
            Appended(Range(0, 1)),
            Appended(Range(1, 2)),
            Appended(Range(0, 1), duplicate=True),
            Appended(Range(1, 2), duplicate=True),
        ]
        assert payloads(store, partition) == [b"one", b"two"]

    def test_a_repeat_beside_news_leaves_no_hole_in_the_offsets(self, store: Store, partition: Partition) -> None:
        old = a_part(b"old")
        append(store, partition, old)
        before, after = a_part(b"before", producer=OTHER_PRODUCER), a_part(b"after", first=1)
        assert append(store, partition, before, old, after) == [
            Appended(Range(1, 2)),
            Appended(Range(0, 1), duplicate=True),
            Appended(Range(2, 3)),
        ]
        assert payloads(store, partition) == [b"old", b"before", b"after"]

    def test_a_repeat_is_recognised_under_a_higher_epoch(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"one"))
        assert append(store, partition, a_part(b"one", epoch=1)) == [Appended(Range(0, 1), duplicate=True)]
        assert payloads(store, partition) == [b"one"]

    def test_the_last_64_runs_of_a_producer_are_remembered_with_their_offsets_and_older_ones_as_stored(
        self, store: Store, partition: Partition
    ) -> None:
        count = PRODUCER_RUNS_KEPT + 3
        parts = [a_part(b"%d" % number, first=number) for number in range(count)]
        append(store, partition, *parts)
        fill(store, partition, 1)
        remembered = [Appended(Range(number, number + 1), duplicate=True) for number in range(3, count)]
        assert append(store, partition, *parts) == [Appended(None, duplicate=True)] * 3 + remembered
        assert store.log.bounds(partition) == Range(0, count + 1)

    def test_producers_of_other_partitions_are_others(self, store: Store, topic: TopicInfo) -> None:
        for partition in topic.partitions:
            assert append(store, partition, a_part(b"one")) == [Appended(Range(0, 1))]

    # --- conflicts -----------------------------------------------------------------------------

    def test_a_sequence_taken_by_other_content_is_refused(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"one", b"two"))
        assert_refused(store, partition, a_part(b"one", b"2"), ProducerConflict)

    def test_a_run_that_overlaps_another_in_part_is_refused(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"0", b"1"), a_part(b"4", b"5", first=4))
        for overlapping in (
            a_part(b"0"),
            a_part(b"1", first=1),
            a_part(b"1", b"2", first=1),
            a_part(b"3", b"4", first=3),
            a_part(b"0", b"1", b"2"),
            a_part(b"0", b"1", b"2", b"3", b"4", b"5"),
        ):
            assert_refused(store, partition, overlapping, ProducerConflict)

    def test_a_run_that_overlaps_a_long_past_one_in_part_is_refused(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"0", b"1"))
        append(
            store,
            partition,
            *(a_part(b"%d" % number, first=number) for number in range(10, 10 + PRODUCER_RUNS_KEPT)),
        )
        assert_refused(store, partition, a_part(b"1", b"2", first=1), ProducerConflict)

    def test_the_other_runs_of_an_append_are_stored_when_one_is_refused(
        self, store: Store, partition: Partition
    ) -> None:
        append(store, partition, a_part(b"taken"))
        before = a_part(b"before", producer=OTHER_PRODUCER)
        wrong = a_part(b"other content")
        after = a_part(b"after", first=1)
        first, refused, last = append(store, partition, before, wrong, after)
        assert (first, last) == (Appended(Range(1, 2)), Appended(Range(2, 3)))
        assert refused.offsets is None
        assert not refused.duplicate
        assert isinstance(refused.refused, ProducerConflict)
        assert payloads(store, partition) == [b"taken", b"before", b"after"]

    def test_a_conflict_within_one_append_is_refused(self, store: Store, partition: Partition) -> None:
        stored, refused = append(store, partition, a_part(b"one"), a_part(b"another"))
        assert stored == Appended(Range(0, 1))
        assert isinstance(refused.refused, ProducerConflict)
        assert payloads(store, partition) == [b"one"]

    # --- sequences -----------------------------------------------------------------------------

    def test_a_new_producer_may_begin_at_any_sequence(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        for number, producer in enumerate((PRODUCER, process_producer(clock.time_us()))):
            later, earlier = (a_part(b"%d" % first, producer=producer, first=first) for first in (7, 2))
            assert append(store, partition, later) == [Appended(Range(2 * number, 2 * number + 1))]
            assert append(store, partition, earlier) == [Appended(Range(2 * number + 1, 2 * number + 2))]
            assert append(store, partition, later)[0].duplicate

    def test_a_hole_in_the_sequences_is_allowed_and_filled_at_most_once(
        self, store: Store, partition: Partition
    ) -> None:
        append(store, partition, a_part(b"0"), a_part(b"5", first=5))
        filling = a_part(b"2", b"3", first=2)
        assert append(store, partition, filling) == [Appended(Range(2, 4))]
        assert append(store, partition, filling) == [Appended(Range(2, 4), duplicate=True)]
        assert_refused(store, partition, a_part(b"3", b"4", first=3), ProducerConflict)
        assert append(store, partition, a_part(b"4", first=4)) == [Appended(Range(4, 5))]
        assert payloads(store, partition) == [b"0", b"5", b"2", b"3", b"4"]

    def test_with_too_many_holes_the_oldest_sequences_are_refused_and_the_newest_accepted(
        self, store: Store, partition: Partition
    ) -> None:
        excess = 10
        count = PRODUCER_HOLES_MAX + 1 + excess  # runs, with one hole less between them
        parts = [a_part(b"%d" % number, first=2 * number) for number in range(count)]
        assert not any(answer.refused for answer in append(store, partition, *parts))
        for part in parts[:excess]:
            assert_refused(store, partition, part, ProducerExpired)
        filling = a_part(b"last hole", first=2 * count - 3)
        assert append(store, partition, filling) == [Appended(Range(count, count + 1))]

    def test_a_lower_epoch_is_fenced(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"0", epoch=3))
        append(store, partition, a_part(b"1", first=1, epoch=5))
        assert_refused(store, partition, a_part(b"2", first=2, epoch=4), ProducerFenced)
        assert append(store, partition, a_part(b"2", first=2, epoch=5)) == [Appended(Range(2, 3))]

    # --- silence -------------------------------------------------------------------------------

    def test_a_producer_that_was_silent_for_7_days_is_remembered(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        producer = process_producer(clock.time_us())
        part = a_part(b"one", producer=producer)
        append(store, partition, part)
        clock.advance(PRODUCER_IDLE_SECONDS - 1)
        assert append(store, partition, part) == [Appended(Range(0, 1), duplicate=True)]
        assert append(store, partition, a_part(b"two", producer=producer, first=1)) == [Appended(Range(1, 2))]
        clock.advance(PRODUCER_IDLE_SECONDS - 1)
        assert append(store, partition, part) == [Appended(Range(0, 1), duplicate=True)]

    def test_a_producer_that_was_silent_for_longer_is_refused(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        producer = process_producer(clock.time_us())
        first, second, third = (a_part(b"%d" % number, producer=producer, first=number) for number in range(3))
        append(store, partition, first, second)
        clock.advance(PRODUCER_IDLE_SECONDS + 1)
        for part in (first, second, third):  # repeats or news: nobody can tell any more
            assert_refused(store, partition, part, ProducerExpired)

    def test_a_producer_that_was_born_long_ago_and_is_not_known_is_refused(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        producer = process_producer(clock.time_us())
        clock.advance(PRODUCER_IDLE_SECONDS + 1)
        assert_refused(store, partition, a_part(b"one", producer=producer), ProducerExpired)
        reborn = process_producer(clock.time_us())
        assert append(store, partition, a_part(b"one", producer=reborn)) == [Appended(Range(0, 1))]

    def test_a_lasting_producer_is_never_forgotten(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        lasting, mortal = lasting_producer(), process_producer(clock.time_us())
        part = a_part(b"one", producer=lasting)
        append(store, partition, part, a_part(b"two", producer=mortal))
        clock.advance(100 * PRODUCER_IDLE_SECONDS)
        fill(store, partition, 1)
        assert append(store, partition, part) == [Appended(Range(0, 1), duplicate=True)]
        assert append(store, partition, a_part(b"more", producer=lasting, first=1)) == [Appended(Range(3, 4))]
