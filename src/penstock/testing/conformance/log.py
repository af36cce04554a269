"""`Log`: topics, appending, reading, heads, and finding a time; see also `producers` and `retention`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock import columns
from penstock.batch import Batch, Place
from penstock.clock import VirtualClock
from penstock.errors import BeyondEnd, TopicMismatch, UsageError
from penstock.offsets import Range
from penstock.ports import Store
from penstock.rows import Appended, Partition, Retention, TopicInfo, TopicSettings
from penstock.testing.conformance.builders import (
    OTHER_PRODUCER,
    PLENTY,
    PRODUCER,
    a_part,
    a_run,
    append,
    errors_of,
    fill,
    only_events,
    pages,
    payloads,
)
from penstock.testing.conformance.opening import StoreOpening, a_topic

if TYPE_CHECKING:
    from collections.abc import Callable


class LogConformance(StoreOpening):
    """The `Log` port, without what producers and retention add to it."""

    # --- topics --------------------------------------------------------------------------------

    def test_a_partition_that_was_looked_at_while_it_was_empty_is_read_once_it_is_not(self, store: Store) -> None:
        topic = store.log.create_topic("looked", TopicSettings(partitions=3))
        for partition in topic.partitions:
            assert store.log.read(partition, 0, bytes_max=PLENTY) == []
            assert store.log.find_time(partition, 0) == 0
            fill(store, partition, 2)
            assert payloads(store, partition) == [b"0", b"1"]

    def test_a_topic_is_created_once_and_found_again(self, store: Store, clock: VirtualClock) -> None:
        settings = TopicSettings(partitions=3, content_type="application/json", source="shop")
        created_at = clock.time_us()
        created = store.log.create_topic("orders", settings)
        clock.advance(1)
        assert store.log.create_topic("orders", settings) == created
        assert store.log.topics() == [created]
        assert (created.name, created.settings, created.created_at) == ("orders", settings, created_at)

    def test_a_topic_that_exists_with_other_settings_is_a_mismatch(self, store: Store) -> None:
        topic = store.log.create_topic("orders", TopicSettings(partitions=2))
        for settings in (
            TopicSettings(partitions=3),
            TopicSettings(partitions=2, content_type="text/plain"),
            TopicSettings(partitions=2, source="elsewhere"),
            TopicSettings(partitions=2, durability="os"),
        ):
            with pytest.raises(TopicMismatch):
                store.log.create_topic("orders", settings)
        assert store.log.topics() == [topic]

    def test_another_retention_or_compression_is_no_mismatch_and_the_topics_from_then_on(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        fill(store, partition, 2)
        settings = TopicSettings(partitions=2, compression="zstd", retention=Retention(age_seconds=60.0, bytes_max=1))
        changed = store.log.create_topic(topic.name, settings)
        assert (changed.log_id, changed.created_at, changed.settings) == (topic.log_id, topic.created_at, settings)
        assert store.log.topics() == [changed]
        append(store, partition, a_part(b"z" * 10_000))
        assert payloads(store, partition) == [b"0", b"1", b"z" * 10_000]

    def test_topics_are_listed_by_name_internal_ones_included(self, store: Store) -> None:
        for name in ("payments", "_deliveries", "orders"):
            a_topic(store, name)
        assert [topic.name for topic in store.log.topics()] == ["_deliveries", "orders", "payments"]
        assert len({topic.log_id for topic in store.log.topics()}) == 3

    def test_a_partition_that_the_topic_does_not_have_is_a_usage_error(self, store: Store, topic: TopicInfo) -> None:
        absent = Partition(topic.log_id, 2)
        calls: dict[str, Callable[[], object]] = {
            "append": lambda: append(store, absent, a_part(b"one")),
            "read": lambda: store.log.read(absent, 0, bytes_max=PLENTY),
            "bounds": lambda: store.log.bounds(absent),
            "heads": lambda: store.log.heads([topic.partitions[0], absent]),
            "find_time": lambda: store.log.find_time(absent, 0),
            "trim": lambda: store.log.trim(absent, 0),
        }
        assert errors_of(calls) == dict.fromkeys(calls, UsageError)

    # --- appending -----------------------------------------------------------------------------

    def test_offsets_are_dense_from_0_and_ranges_half_open(self, store: Store, partition: Partition) -> None:
        assert store.log.bounds(partition) == Range(0, 0)
        first = append(store, partition, a_part(b"0", b"1", first=0))
        second = append(store, partition, a_part(b"2", first=2))
        third = append(store, partition, a_part(b"3", b"4", producer=OTHER_PRODUCER))
        assert [first, second, third] == [
            [Appended(Range(0, 2))],
            [Appended(Range(2, 3))],
            [Appended(Range(3, 5))],
        ]
        assert store.log.bounds(partition) == Range(0, 5)
        assert payloads(store, partition) == [b"0", b"1", b"2", b"3", b"4"]

    def test_the_runs_of_one_append_get_consecutive_offsets_in_their_order(
        self, store: Store, partition: Partition
    ) -> None:
        fill(store, partition, 1)
        answers = append(
            store,
            partition,
            a_part(b"a", b"b", producer=OTHER_PRODUCER),
            a_part(b"c", producer=PRODUCER),
            a_part(b"d", b"e", b"f", producer=OTHER_PRODUCER, first=2),
        )
        assert answers == [Appended(Range(1, 3)), Appended(Range(3, 4)), Appended(Range(4, 7))]
        assert payloads(store, partition) == [b"0", b"a", b"b", b"c", b"d", b"e", b"f"]

    def test_each_partition_counts_for_itself(self, store: Store, topic: TopicInfo) -> None:
        zero, one = topic.partitions
        other = a_topic(store, "payments").partitions[0]
        fill(store, zero, 3)
        assert append(store, one, a_part(b"one")) == [Appended(Range(0, 1))]
        assert append(store, other, a_part(b"other")) == [Appended(Range(0, 1))]
        assert [payloads(store, where) for where in (zero, one, other)] == [
            [b"0", b"1", b"2"],
            [b"one"],
            [b"other"],
        ]

    def test_runs_that_do_not_cover_the_batch_exactly_are_a_usage_error(
        self, store: Store, partition: Partition
    ) -> None:
        batch = Batch.build([b"one", b"two"])
        run = a_run(batch)
        for runs in ([], [run._replace(length=1)], [run._replace(length=3)], [run, run._replace(length=0)]):
            with pytest.raises(UsageError):
                store.log.append(partition, batch, runs)
        assert store.log.bounds(partition) == Range(0, 0)

    # --- reading -------------------------------------------------------------------------------

    def test_a_read_begins_exactly_where_asked_and_leaves_nothing_out(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"0", b"1", b"2"), a_part(b"3", producer=OTHER_PRODUCER))
        append(store, partition, a_part(b"4", b"5", first=3))
        for start in range(6):
            read = [
                (event.offset, event.data)
                for page in pages(store, partition, start)
                for batch in page
                for event in batch
            ]
            assert read == [(offset, b"%d" % offset) for offset in range(start, 6)]

    def test_a_read_takes_as_many_events_as_allowed(self, store: Store, partition: Partition) -> None:
        append(store, partition, a_part(b"0", b"1", b"2"))
        fill(store, partition, 4)
        for events_max in range(1, 9):
            found = store.log.read(partition, 1, bytes_max=PLENTY, events_max=events_max)
            assert sum(map(len, found)) == min(events_max, 6)

    def test_a_read_keeps_within_its_bytes_and_goes_on_from_there(self, store: Store, partition: Partition) -> None:
        append(store, partition, *(a_part(bytes(100), bytes(100), first=number) for number in range(0, 6, 2)))
        fill(store, partition, 3)
        for bytes_max in (100, 250, 599, PLENTY):
            sizes = [
                sum(int(batch.sizes.sum()) for batch in page)
                for page in pages(store, partition, 0, bytes_max=bytes_max)
            ]
            assert max(sizes) <= bytes_max
            assert sum(sizes) == 603

    def test_a_read_returns_one_event_even_if_it_is_larger_than_the_limit(
        self, store: Store, partition: Partition
    ) -> None:
        append(store, partition, a_part(bytes(1000), bytes(1000)))
        append(store, partition, a_part(bytes(1000), first=2))
        for start in range(3):
            [batch] = store.log.read(partition, start, bytes_max=1)
            assert only_events(batch).range == Range(start, start + 1)

    def test_a_read_at_the_end_is_empty(self, store: Store, partition: Partition) -> None:
        assert store.log.read(partition, 0, bytes_max=PLENTY) == []
        fill(store, partition, 3)
        assert store.log.read(partition, 3, bytes_max=PLENTY) == []

    def test_a_read_beyond_the_end_says_where_the_end_is(self, store: Store, partition: Partition) -> None:
        fill(store, partition, 3)
        with pytest.raises(BeyondEnd) as caught:
            store.log.read(partition, 4, bytes_max=PLENTY)
        assert (caught.value.offset, caught.value.first, caught.value.end) == (4, 0, 3)

    def test_the_result_of_a_range_never_changes(self, store: Store, partition: Partition, clock: VirtualClock) -> None:
        def rows() -> list[object]:
            found = store.log.read(partition, 1, bytes_max=PLENTY, events_max=3)
            return [row for batch in found for row in only_events(batch).to_arrow().to_pylist()]

        fill(store, partition, 4)
        before = rows()
        clock.advance(3600)
        fill(store, partition, 4)
        assert rows() == before

    # --- what an event consists of -------------------------------------------------------------

    def test_all_ten_columns_come_back_as_they_were(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        batch = Batch.build(
            [b"", b"\x00\xff", "grüße".encode()],
            id=["id-0", None, "id-2"],
            source=["shop", None, None],
            type=["order.placed", None, "order.paid"],
            subject=[None, "zweitens", ""],
            time=[datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), None, None],
            expires_at=[None, datetime(9999, 12, 31, tzinfo=UTC), None],
            key=[b"\x00key", None, b""],
            content_type=[None, "application/json", None],
            headers=[{"a": b"\x00", "b": b""}, None, {"c": b"\xff"}],
        )
        assert batch.columns.schema.names == list(columns.NAMES)
        run = a_run(batch)
        store.log.append(partition, batch, [run])
        place = Place("orders", 0, clock.time_us(), "penstock:orders", "application/octet-stream")
        for start in range(3):
            [read] = store.log.read(partition, start, bytes_max=PLENTY)
            stored = batch.at(0, place, (run,)).slice(Range(start, 3))
            assert only_events(read).to_arrow().to_pylist() == stored.to_arrow().to_pylist()

    def test_an_id_that_was_not_given_is_derived_from_producer_and_sequence(
        self, store: Store, partition: Partition
    ) -> None:
        append(store, partition, a_part(b"0", b"1"), a_part(b"2", producer=OTHER_PRODUCER))
        append(store, partition, a_part(b"3", b"4", first=7))
        found = [only_events(item) for item in store.log.read(partition, 1, bytes_max=PLENTY)]
        assert [event.id for batch in found for event in batch] == [
            f"{PRODUCER.hex()}-1",
            f"{OTHER_PRODUCER.hex()}-0",
            f"{PRODUCER.hex()}-7",
            f"{PRODUCER.hex()}-8",
        ]

    def test_source_and_content_type_that_were_not_given_are_the_topics(self, store: Store) -> None:
        plain = store.log.create_topic("plain", TopicSettings())
        stated = store.log.create_topic("stated", TopicSettings(source="shop", content_type="text/plain"))
        for topic, source, content_type in (
            (plain, "penstock:plain", "application/octet-stream"),
            (stated, "shop", "text/plain"),
        ):
            fill(store, topic.partitions[0], 1)
            [batch] = store.log.read(topic.partitions[0], 0, bytes_max=PLENTY)
            [event] = only_events(batch)
            assert (event.source, event.content_type) == (source, content_type)
            assert event.position == (topic.name, 0, 0)

    def test_the_events_of_one_append_share_their_time(self) -> None:
        store = self.open(TickingClock())
        try:
            [partition, _] = a_topic(store).partitions
            append(store, partition, a_part(b"0", b"1"), a_part(b"2", producer=OTHER_PRODUCER))
            found = [only_events(item) for item in store.log.read(partition, 0, bytes_max=PLENTY)]
            assert len({event.appended_at for batch in found for event in batch}) == 1
        finally:
            store.close()

    # --- heads ---------------------------------------------------------------------------------

    def test_heads_are_in_the_order_asked_for_and_follow_every_append(self, store: Store, topic: TopicInfo) -> None:
        zero, one = topic.partitions
        other = a_topic(store, "payments").partitions[1]
        heads = store.log.heads([other, one, zero])
        assert heads.read().tolist() == [0, 0, 0]
        fill(store, zero, 3)
        fill(store, other, 1)
        assert heads.read().tolist() == [1, 0, 3]
        assert heads.read().dtype == np.int64

    def test_heads_outlive_the_creation_and_deletion_of_other_topics(self, store: Store, partition: Partition) -> None:
        heads = store.log.heads([partition])
        other = a_topic(store, "payments")
        fill(store, partition, 2)
        fill(store, other.partitions[0], 5)
        store.log.delete_topic(other.log_id)
        fill(store, partition, 1)
        assert heads.read().tolist() == [3]

    def test_what_was_read_from_heads_does_not_change_afterwards(self, store: Store, partition: Partition) -> None:
        heads = store.log.heads([partition])
        before = heads.read()
        fill(store, partition, 1)
        assert before.tolist() == [0]

    # --- finding a time ------------------------------------------------------------------------

    def test_a_time_is_found_at_the_first_event_appended_at_or_after_it(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        assert store.log.find_time(partition, 0) == 0
        begin = clock.time_us()
        append(store, partition, a_part(b"0", b"1"))
        clock.advance(10)
        append(store, partition, a_part(b"2", first=2), a_part(b"3", producer=OTHER_PRODUCER))
        ten = begin + 10_000_000
        found = {time: store.log.find_time(partition, time) for time in (0, begin, begin + 1, ten - 1, ten, ten + 1)}
        assert found == {0: 0, begin: 0, begin + 1: 2, ten - 1: 2, ten: 2, ten + 1: 4}

    def test_nothing_is_missed_by_time_after_the_wall_clock_was_set_back(
        self, store: Store, partition: Partition, clock: VirtualClock
    ) -> None:
        late = clock.time_us()
        fill(store, partition, 2)
        clock.jump_wall(-60)
        early = clock.time_us()
        fill(store, partition, 2)
        clock.advance(120)
        after = clock.time_us()
        fill(store, partition, 2)
        assert early < late < after
        found = [store.log.find_time(partition, time) for time in (early, late, late + 1, after, after + 1)]
        # Offsets 2 and 3 carry the earlier time, and stand behind 0 and 1 all the same.
        assert found == [0, 0, 4, 4, 6]


class TickingClock(VirtualClock):
    """A clock on which no two looks see the same time, as on a machine."""

    def time_us(self) -> int:
        """Return the wall clock, one microsecond later each time."""
        self.jump_wall(1e-6)
        return super().time_us()
