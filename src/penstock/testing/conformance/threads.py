"""Thread safety: every method may be called from any thread, and promises the same to all of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from penstock.offsets import Range, RangeSet
from penstock.ports import Store
from penstock.rows import Appended, Commit, Manifest, Partition, TopicInfo
from penstock.testing.conformance.builders import (
    PLENTY,
    a_cursor,
    a_part,
    a_shard,
    append,
    fill,
    only_events,
    payloads,
    subscribe,
)
from penstock.testing.conformance.opening import StoreOpening

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

THREADS = 8


def at_once(work: Callable[[int], T]) -> list[T]:
    """Call `work` with 0, 1, …, each in a thread of its own, all beginning together."""
    together = threading.Barrier(THREADS)

    def begin(number: int) -> T:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


class ThreadsConformance(StoreOpening):
    """What all ports promise to threads."""

    def test_appends_of_many_threads_are_dense_and_nothing_is_lost(self, store: Store, partition: Partition) -> None:
        appends, size = 25, 3

        def publish(number: int) -> list[tuple[Range, list[bytes]]]:
            stored = []
            for index in range(appends):
                data = [b"%d/%d/%d" % (number, index, place) for place in range(size)]
                part = a_part(*data, producer=bytes([number]) * 16, first=size * index)
                [answer] = append(store, partition, part)
                assert answer.offsets is not None, answer
                stored.append((answer.offsets, data))
            return stored

        answered = [pair for stored in at_once(publish) for pair in stored]
        everything = Range(0, THREADS * appends * size)
        assert sum(len(offsets) for offsets, _ in answered) == len(everything)
        assert RangeSet(offsets for offsets, _ in answered) == RangeSet([everything])
        assert store.log.bounds(partition) == everything
        read = payloads(store, partition)
        for offsets, data in answered:
            assert read[offsets.start : offsets.stop] == data

    def test_a_reader_never_sees_a_part_of_an_append(self, store: Store, partition: Partition) -> None:
        heads, appended = store.log.heads([partition]), threading.Event()
        ends: set[int] = set()

        def work(number: int) -> None:
            if number:  # the readers, for as long as there is something to see
                while not appended.is_set():
                    ends.add(int(heads.read()[0]))
                    ends.add(store.log.bounds(partition).stop)
                    found = store.log.read(partition, 0, bytes_max=PLENTY)
                    ends.add(sum(len(only_events(item)) for item in found))
                return
            try:
                for index in range(0, 40, 2):
                    first, second = a_part(b"a", b"b", first=index), a_part(b"c", producer=index.to_bytes(16))
                    append(store, partition, first, second)
            finally:
                appended.set()

        at_once(work)
        assert {end % 3 for end in ends} <= {0}
        assert store.log.bounds(partition).stop == 60

    def test_a_run_sent_by_many_threads_is_stored_once(self, store: Store, partition: Partition) -> None:
        fill(store, partition, 1)
        answers = at_once(lambda _: append(store, partition, a_part(b"one", b"two"))[0])
        assert sorted(answers, key=lambda answer: answer.duplicate) == [
            Appended(Range(1, 3)),
            *[Appended(Range(1, 3), duplicate=True)] * (THREADS - 1),
        ]
        assert store.log.bounds(partition) == Range(0, 3)

    def test_a_lease_wanted_by_many_threads_goes_to_one(self, store: Store) -> None:
        leases = at_once(lambda number: store.leases.acquire("shard", f"owner {number}", 10))
        [lease] = [lease for lease in leases if lease is not None]
        assert store.leases.holder("shard") == lease

    def test_a_manifest_prepared_by_many_threads_is_the_same_for_all(self, store: Store) -> None:
        prepared = at_once(
            lambda number: store.manifests.prepare(Manifest(sink="lake", query="q", batch=0, body=b"%d" % number))
        )
        assert len({manifest.body for manifest in prepared}) == 1

    def test_commits_of_many_threads_are_all_written(
        self, store: Store, topic: TopicInfo, partition: Partition
    ) -> None:
        steps = 20
        fill(store, partition, steps)
        subscribe(store, topic)

        def settle(slot: int) -> None:
            for step in range(1, steps + 1):
                cursor = a_cursor(a_shard(topic, slot=slot), step)
                record = b"%d/%d" % (slot, step)
                assert store.cursors.commit([Commit(cursors=(cursor,), settlement=record)]) == [None]

        at_once(settle)
        cursors = store.cursors.load(topic.log_id, "billing")
        assert [(cursor.shard.slot, cursor.next_offset) for cursor in cursors] == [
            (slot, steps) for slot in range(THREADS)
        ]
        found = store.cursors.settlements(PLENTY)
        assert len({row.number for row in found}) == len(found) == THREADS * steps
        for slot in range(THREADS):  # in the order of the commits, as far as there is one
            mine = [row.record for row in found if row.record.startswith(b"%d/" % slot)]
            assert mine == [b"%d/%d" % (slot, step) for step in range(1, steps + 1)]
