"""`ParkedRows`: dead letters and waiting retries, looked at, brought back and removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.ports import Store
from penstock.rows import Parked, ParkedFilter, ParkedState, Partition, Shard, TopicInfo, Waiting
from penstock.testing.conformance.builders import a_parked, a_shard, an_event, fill, park, subscribe
from penstock.testing.conformance.opening import StoreOpening, a_topic

if TYPE_CHECKING:
    from collections.abc import Iterable


def billing(topic: TopicInfo, **wanted: Any) -> ParkedFilter:
    """Return a filter over the rows of the subscription `billing`."""
    return ParkedFilter(log_id=topic.log_id, subscription="billing", **wanted)


def places(rows: Iterable[Parked | Waiting]) -> list[tuple[int, int]]:
    """Return the partition and offset of each row."""
    return [(row.shard.partition, row.offset) for row in rows]


def filled(store: Store, topic: TopicInfo) -> Shard:
    """Fill both partitions, subscribe, and return a shard."""
    for partition in topic.partitions:
        fill(store, partition, 20)
    subscribe(store, topic)
    return a_shard(topic)


class ParkedRowsConformance(StoreOpening):
    """The `ParkedRows` port."""

    # --- rows ----------------------------------------------------------------------------------

    def test_a_row_comes_back_as_it_was_parked(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        rows = [
            Parked(
                shard=shard,
                offset=3,
                state="dead",
                lane=-(1 << 63),
                event=an_event(b"\x00\xff"),
                due_at=1,
                attempts=4,
                replay=2,
                error_type="builtins.ValueError",
                error_message="grüße\nfrom a handler",
                error_trace='Traceback:\n  File "grüße.py", line 1, in main\nValueError\n',
                parked_at=5,
                last_retry_at=6,
                job="job-1",
            ),
            Parked(shard=shard, offset=4, state="waiting", lane=0, event=an_event(headers={}, key=None, id=None)),
        ]
        park(store, *rows)
        assert store.parked.page(billing(topic)) == rows

    def test_a_traceback_is_kept_replaced_and_taken_away_with_its_row(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        states: list[ParkedState] = ["waiting", "dead"]
        for trace in ("first\n" * 1_000, "second, of a file called \udcff", "", "third"):
            for state in states:
                row = a_parked(shard, 3, state=state, event=an_event(b"the same"), error_trace=trace)
                park(store, row)
                assert store.parked.page(billing(topic)) == [row]
        assert store.parked.replay(billing(topic), now=5) == 1
        [waiting] = store.parked.due(billing(topic), 5)
        assert (waiting.event, waiting.error_trace) == (an_event(b"the same"), "third")

    def test_a_row_replaces_the_one_of_the_same_event_whichever_shard_held_it(
        self, store: Store, topic: TopicInfo
    ) -> None:
        shard = filled(store, topic)
        park(store, a_parked(shard, 3, state="waiting"), a_parked(shard, 4))
        replacing = a_parked(shard._replace(slot=9), 3, state="done", attempts=2, event=an_event(b"new"))
        park(store, replacing)
        assert store.parked.page(billing(topic)) == [replacing, a_parked(shard, 4)]

    def test_a_row_outlives_its_event_in_the_log(self, store: Store, topic: TopicInfo, partition: Partition) -> None:
        shard = filled(store, topic)
        row = a_parked(shard, 3)
        park(store, row)
        store.log.trim(partition, 20, force=True)
        assert store.parked.page(billing(topic)) == [row]

    def test_rows_of_other_subscriptions_and_logs_are_others(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        other = a_topic(store, "payments")
        subscribe(store, topic, "audit")
        subscribe(store, other)
        park(
            store,
            a_parked(shard, 0, lane=1),
            a_parked(shard._replace(subscription="audit"), 0, lane=2),
            a_parked(shard._replace(log_id=other.log_id), 0, lane=3),
        )
        audit = ParkedFilter(log_id=topic.log_id, subscription="audit")
        found = [store.parked.page(wanted) for wanted in (billing(topic), audit, billing(other))]
        assert [[row.lane for row in rows] for rows in found] == [[1], [2], [3]]
        assert store.parked.purge(audit) == 1
        assert len(store.parked.page(billing(topic))) == 1

    # --- looking -------------------------------------------------------------------------------

    def test_rows_are_paged_by_partition_and_offset(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        order = [(0, 2), (0, 10), (0, 11), (1, 0), (1, 9)]
        park(store, *(a_parked(shard._replace(partition=part), offset) for part, offset in reversed(order)))
        assert places(store.parked.page(billing(topic))) == order
        for limit in (1, 2, 5):
            paged: list[tuple[int, int]] = []
            while page := store.parked.page(billing(topic), after=paged[-1] if paged else None, limit=limit):
                assert len(page) <= limit
                assert store.parked.places(billing(topic), after=paged[-1] if paged else None, limit=limit) == places(
                    page
                )
                paged += places(page)
            assert paged == order
        # A row that is gone by now still says where to go on.
        assert places(store.parked.page(billing(topic), after=(0, 5), limit=2)) == [(0, 10), (0, 11)]

    def test_every_field_of_a_filter_counts(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        park(
            store,
            a_parked(shard, 1, state="waiting", parked_at=100, job="x"),
            a_parked(shard._replace(slot=5), 2, error_type="ValueError", parked_at=200),
            a_parked(shard._replace(partition=1), 3, lane=8, parked_at=300),
            a_parked(shard, 4, state="done", parked_at=400),
        )
        wanted: list[tuple[dict[str, Any], list[int]]] = [
            ({}, [1, 2, 4, 3]),
            ({"states": frozenset({"waiting", "done"})}, [1, 4]),
            ({"states": frozenset()}, []),
            ({"slots": frozenset({5, 6})}, [2]),
            ({"slots": frozenset({0})}, [1, 4, 3]),
            ({"partition": 0}, [1, 2, 4]),
            ({"partition": 1}, [3]),
            ({"lane": 8}, [3]),
            ({"error_type": "ValueError"}, [2]),
            ({"error_type": ""}, [1, 4, 3]),
            ({"parked_from": 200}, [2, 4, 3]),
            ({"parked_until": 200}, [1]),
            ({"parked_from": 200, "parked_until": 400}, [2, 3]),
            ({"job": "x"}, [1]),
            ({"job": ""}, [2, 4, 3]),
            ({"offsets": frozenset({2, 3, 77})}, [2, 3]),
            ({"offsets": frozenset(range(2, 5_000))}, [2, 4, 3]),
            ({"offsets": frozenset()}, []),
            ({"offsets": frozenset({1, 3, 4}), "partition": 0}, [1, 4]),
            ({"offsets": frozenset({1, 2}), "slots": frozenset({5})}, [2]),
            ({"states": frozenset({"dead"}), "partition": 1, "lane": 7}, []),
        ]
        for fields, offsets in wanted:
            assert [row.offset for row in store.parked.page(billing(topic, **fields))] == offsets, fields
            assert sum(store.parked.count(billing(topic, **fields)).values()) == len(offsets), fields

    def test_every_state_is_counted_also_those_without_rows(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        assert store.parked.count(billing(topic)) == {"waiting": 0, "dead": 0, "done": 0}
        park(store, a_parked(shard, 1), a_parked(shard, 2), a_parked(shard, 3, state="waiting"))
        assert store.parked.count(billing(topic)) == {"waiting": 1, "dead": 2, "done": 0}
        dead = billing(topic, states=frozenset({"dead"}))
        assert store.parked.count(dead) == {"waiting": 0, "dead": 2, "done": 0}

    def test_waiting_rows_come_when_due_by_time_and_then_position(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        one = shard._replace(partition=1)
        park(
            store,
            a_parked(shard, 1, state="waiting", due_at=300),
            a_parked(one, 2, state="waiting", due_at=200),
            a_parked(shard, 10, state="waiting", due_at=200),
            a_parked(shard, 9, state="waiting", due_at=200),
            a_parked(shard, 5, state="waiting", due_at=301),
            a_parked(shard, 6, state="dead", due_at=100),
            a_parked(shard, 7, state="done", due_at=100),
        )
        everything = [(0, 9), (0, 10), (1, 2), (0, 1)]
        assert store.parked.due(billing(topic), 199) == []
        assert places(store.parked.due(billing(topic), 300)) == everything
        assert places(store.parked.due(billing(topic), 300, limit=2)) == everything[:2]
        assert places(store.parked.due(billing(topic, partition=1), 300)) == [(1, 2)]

    def test_waiting_rows_come_without_their_events_by_position_due_or_not(
        self, store: Store, topic: TopicInfo
    ) -> None:
        shard = filled(store, topic)
        one = shard._replace(partition=1, slot=4)
        park(
            store,
            a_parked(one, 2, state="waiting", lane=-5, due_at=100, attempts=3, replay=1),
            a_parked(shard, 10, state="waiting", due_at=200),
            a_parked(shard, 9, state="waiting", due_at=900, lane=8),
            a_parked(shard, 6),
            a_parked(shard, 7, state="done"),
        )
        everything = [
            Waiting(shard, 9, lane=8, due_at=900, attempts=0, replay=0),
            Waiting(shard, 10, lane=7, due_at=200, attempts=0, replay=0),
            Waiting(one, 2, lane=-5, due_at=100, attempts=3, replay=1),
        ]
        assert store.parked.waiting(billing(topic)) == everything
        wanted: list[tuple[dict[str, Any], list[int]]] = [
            ({"slots": frozenset({4})}, [2]),
            ({"partition": 0}, [9, 10]),
            ({"lane": 8}, [9]),
            ({"offsets": frozenset({2, 6, 10})}, [10, 2]),
            ({"states": frozenset({"waiting", "dead"})}, [9, 10, 2]),
            ({"states": frozenset({"dead", "done"})}, []),
        ]
        for fields, offsets in wanted:
            assert [row.offset for row in store.parked.waiting(billing(topic, **fields))] == offsets, fields
        assert store.parked.replay(billing(topic), now=0) == 1
        assert [row.offset for row in store.parked.waiting(billing(topic))] == [6, 9, 10, 2]

    def test_every_call_keeps_to_the_offsets_of_a_filter(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        one = shard._replace(partition=1)
        park(store, *(a_parked(where, offset, due_at=9 - offset) for where in (shard, one) for offset in range(5)))
        some = billing(topic, offsets=frozenset({1, 3}))
        assert places(store.parked.page(some)) == [(0, 1), (0, 3), (1, 1), (1, 3)]
        assert places(store.parked.page(some, after=(0, 1), limit=2)) == [(0, 3), (1, 1)]
        assert store.parked.places(some, after=(0, 1), limit=2) == [(0, 3), (1, 1)]
        assert store.parked.count(some) == {"waiting": 0, "dead": 4, "done": 0}
        assert store.parked.replay(some, now=5, limit=3) == 3
        assert places(store.parked.due(some, 5)) == places(store.parked.waiting(some)) == [(0, 1), (0, 3), (1, 1)]
        assert store.parked.stamp(billing(topic, offsets=frozenset({3}), partition=1), "job") == 1
        assert places(store.parked.page(billing(topic, job="job"))) == [(1, 3)]
        assert store.parked.purge(some) == 1
        left = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (1, 2), (1, 4)]
        assert places(store.parked.page(billing(topic))) == left

    # --- changing ------------------------------------------------------------------------------

    def test_a_job_is_stamped_on_exactly_the_rows_meant(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        rows = [a_parked(shard, 1, job="earlier"), a_parked(shard, 2), a_parked(shard, 3, state="waiting")]
        park(store, *rows)
        assert store.parked.stamp(billing(topic, states=frozenset({"dead"})), "mine") == 2
        stamped = [msgspec.structs.replace(row, job="mine") for row in rows[:2]]
        assert store.parked.page(billing(topic)) == [*stamped, rows[2]]
        park(store, a_parked(shard, 4))  # after the preview: not part of the job
        assert store.parked.replay(billing(topic, job="mine"), now=50) == 2
        assert store.parked.count(billing(topic)) == {"waiting": 3, "dead": 1, "done": 0}

    def test_a_job_brings_a_row_back_once_though_it_dies_again(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        park(store, *(a_parked(shard, offset) for offset in range(3)))
        assert store.parked.stamp(billing(topic), "mine") == 3
        for left in (2, 1, 0):
            assert store.parked.replay(billing(topic, job="mine"), now=50, limit=1) == 1
            [revived] = store.parked.due(billing(topic), 50)
            assert (revived.offset, revived.job, revived.replay) == (2 - left, "", 1)
            park(store, msgspec.structs.replace(revived, state="dead"))
            assert store.parked.count(billing(topic, job="mine")) == {"waiting": 0, "dead": left, "done": 0}
        assert store.parked.replay(billing(topic, job="mine"), now=60) == 0

    def test_a_replay_turns_dead_rows_into_waiting_ones_and_no_others(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        dead = a_parked(shard, 1, attempts=4, replay=1, due_at=7, error_type="ValueError", parked_at=8)
        waiting = a_parked(shard, 2, state="waiting", attempts=3, due_at=900)
        done = a_parked(shard, 3, state="done")
        park(store, dead, waiting, done)
        assert store.parked.replay(billing(topic), now=500) == 1
        revived = msgspec.structs.replace(dead, state="waiting", due_at=500, attempts=0, replay=2)
        assert store.parked.page(billing(topic)) == [revived, waiting, done]
        assert store.parked.due(billing(topic), 500) == [revived]
        assert store.parked.replay(billing(topic), now=600) == 0

    def test_a_replay_keeps_to_its_limit(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        park(store, *(a_parked(shard, offset) for offset in range(5)))
        park(store, a_parked(shard, 1, state="waiting"))  # which does not count
        assert store.parked.replay(billing(topic), now=0, limit=0) == 0
        assert store.parked.replay(billing(topic), now=0, limit=3) == 3
        assert [row.offset for row in store.parked.waiting(billing(topic))] == [0, 1, 2, 3]
        assert store.parked.replay(billing(topic), now=0, limit=3) == 1
        assert store.parked.count(billing(topic)) == {"waiting": 5, "dead": 0, "done": 0}

    def test_a_purge_removes_dead_and_done_rows_and_never_waiting_ones(self, store: Store, topic: TopicInfo) -> None:
        shard = filled(store, topic)
        waiting = a_parked(shard, 1, state="waiting")
        park(store, waiting, a_parked(shard, 2), a_parked(shard, 3, state="done"), a_parked(shard, 4, lane=9))
        assert store.parked.purge(billing(topic, lane=9)) == 1
        assert store.parked.purge(billing(topic, states=frozenset({"waiting"}))) == 0
        assert store.parked.purge(billing(topic)) == 2
        assert store.parked.page(billing(topic)) == [waiting]
