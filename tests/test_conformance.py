"""The conformance suite on `memory:`, and tests of the suite itself: it must catch every bug planted here.

Each planted bug replaces one method of a memory store by a broken one, and names the tests of the suite that
must fail for it. The broken method is given the store and the right method before its own arguments.
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_left
from collections import Counter
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import pytest

from penstock import deduplication, ports
from penstock.clock import VirtualClock
from penstock.errors import (
    OffsetOutOfRange,
    PenstockError,
    ProducerExpired,
    SinkConflict,
    StoreClosed,
    StoreFull,
    TopicMismatch,
)
from penstock.offsets import Range, RangeSet
from penstock.ports import Capabilities, Store
from penstock.producers import PRODUCER_IDLE_SECONDS
from penstock.rows import (
    MANIFESTS_KEPT,
    TOLD_BYTES_MAX,
    Appended,
    Commit,
    Manifest,
    ParkedFilter,
    Partition,
    Scheduled,
    Staged,
)
from penstock.settings import MemorySettings
from penstock.stores.memory import MemoryStore
from penstock.stores.memory.log import PartitionLog
from penstock.testing.conformance import StoreConformance
from penstock.testing.conformance.builders import (
    a_parked,
    a_part,
    a_shard,
    acquired,
    an_event,
    append,
    subscribe,
)
from penstock.testing.conformance.lifetime import LifetimeConformance, calls
from penstock.testing.conformance.opening import a_topic
from penstock.testing.conformance.threads import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


class TestMemoryStore(StoreConformance):
    def open(self, clock: VirtualClock) -> Store:
        return MemoryStore(clock=clock)

    def transaction(self, store: Store) -> AbstractContextManager[Any]:
        assert isinstance(store, MemoryStore)
        return store.outbox.transaction()


class KeptStore(MemoryStore):
    """A memory store that can be opened again, so that what is asked of durable stores can be tested."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock=clock)
        self.capabilities = Capabilities(durable=True, shared=False, blocking=False)


class TestKeptStore(LifetimeConformance):
    def open(self, clock: VirtualClock) -> Store:
        return KeptStore(clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        assert isinstance(store, KeptStore)
        store._state.closed = False
        return store

    transaction = TestMemoryStore.transaction


# --- the limits of `memory:`, which the ports leave to each store -----------------------------


def test_a_full_store_refuses_events_and_has_room_again_when_others_go() -> None:
    store = MemoryStore(clock=VirtualClock(), limits=MemorySettings(bytes_max=10_000))
    topic = a_topic(store)
    partition, other = topic.partitions
    first, second = a_part(bytes(5_000)), a_part(bytes(5_000), first=1)
    with pytest.raises(StoreFull):
        append(store, partition, first, second)
    assert store.log.bounds(partition) == Range(0, 0)
    append(store, partition, first)
    with pytest.raises(StoreFull):
        append(store, other, first)
    assert append(store, partition, first) == [Appended(Range(0, 1), duplicate=True)]
    store.log.trim(partition, 1)
    assert append(store, other, first) == [Appended(Range(0, 1))]
    store.log.delete_topic(topic.log_id)
    assert append(store, a_topic(store).partitions[0], first) == [Appended(Range(0, 1))]


def test_a_full_store_refuses_rows_and_still_replaces_them() -> None:
    store = MemoryStore(clock=VirtualClock(), limits=MemorySettings(rows_max=2))
    topic = a_topic(store)

    def commit(**stated: Any) -> None:
        [refused] = store.cursors.commit([Commit(**stated)])
        if refused is not None:
            raise refused

    def schedule(number: int) -> None:
        row = Scheduled(id=str(number), log_id=topic.log_id, partition=0, due_at=0, event=an_event())
        store.schedule.add([row])

    writes: list[Callable[[int], object]] = [
        lambda number: subscribe(store, topic, ["billing", "audit", "lake"][number]),
        lambda number: commit(parked=(a_parked(a_shard(topic), number),)),
        lambda number: acquired(store, str(number)),
        lambda number: store.manifests.prepare(Manifest(sink="lake", query="q", batch=number, body=b"")),
        schedule,
    ]
    for write in writes:
        for number in (0, 1, 1):
            write(number)
        with pytest.raises(StoreFull):
            write(2)
    assert len(store.parked.page(ParkedFilter(log_id=topic.log_id, subscription="billing"))) == 2
    assert len(store.schedule.page()) == 2
    for number in range(5):  # what is given back makes room
        store.leases.release(acquired(store, "0" if number == 0 else f"new-{number}"))


def test_a_full_store_refuses_topics_records_and_staged_rows() -> None:
    store = MemoryStore(clock=VirtualClock(), limits=MemorySettings(rows_max=2))
    topic = a_topic(store)  # of two partitions
    with pytest.raises(StoreFull):
        a_topic(store, "more")
    assert store.log.topics() == [topic]
    answers = store.cursors.commit([Commit(settlement=b"%d" % number) for number in range(3)])
    assert [type(answer) for answer in answers] == [type(None), type(None), StoreFull]
    with pytest.raises(StoreFull), store.outbox.transaction() as transaction:
        store.outbox.stage(transaction, [Staged(topic="orders", event=an_event())] * 3)
    assert store.outbox.pending() == 0


# --- tests of the suite ----------------------------------------------------------------------


class Bug(NamedTuple):
    name: str
    method: str
    broken: Callable[..., Any]
    caught_by: str


BUGS: list[Bug] = []


def planted(method: str, *caught_by: str) -> Callable[[Callable[..., Any]], None]:
    """Plant the function in place of a method, such as `log.append`; each of these tests must catch it."""

    def plant(broken: Callable[..., Any]) -> None:
        BUGS.extend(Bug(broken.__name__, method, broken, test) for test in caught_by)

    return plant


class Suite(TestKeptStore, StoreConformance):
    """The suite on a store with a bug or without one, to be run by hand."""

    def __init__(self, bug: Bug | None) -> None:
        self._bug = bug

    def open(self, clock: VirtualClock) -> Store:
        store = KeptStore(clock)
        if self._bug is not None:
            path, _, method = self._bug.method.rpartition(".")
            port = attrgetter(path)(store) if path else store
            setattr(port, method, partial(self._bug.broken, store, getattr(port, method)))
        return store

    def fails(self, name: str) -> bool:
        clock = VirtualClock()
        store = self.open(clock)
        test = getattr(self, name)
        wanted = inspect.signature(test).parameters
        given: dict[str, Any] = {"clock": clock, "store": store}
        if {"topic", "partition"} & set(wanted):
            given["topic"] = a_topic(store)
            given["partition"] = given["topic"].partitions[0]
        try:
            test(**{parameter: given[parameter] for parameter in wanted})
        except (AssertionError, pytest.fail.Exception, PenstockError):
            return True
        except ValueError as error:  # `[one] = …` asserts, too
            return "to unpack" in str(error)
        except pytest.skip.Exception:
            return False
        return False


def test_every_method_of_every_port_is_called_on_a_closed_store() -> None:
    exempt = {"Notifier.notify", "Outbox.stage", "Outbox.producer"}
    kinds: list[type] = [
        *(ports.Log, ports.Heads, ports.Cursors, ports.ParkedRows, ports.Leases),
        *(ports.Schedule, ports.Outbox, ports.Manifests, ports.Notifier),
    ]
    every = {f"{kind.__name__}.{name}" for kind in kinds for name in vars(kind) if not name.startswith("_")}
    store = MemoryStore(clock=VirtualClock())
    assert set(calls(store, a_topic(store))) == every - exempt


def test_what_the_suite_is_not_told_it_asks_for() -> None:
    suite, clock = StoreConformance(), VirtualClock()
    for needed in (
        lambda: suite.open(clock),
        lambda: suite.reopen(MemoryStore(), clock),
        lambda: suite.transaction(MemoryStore()),
    ):
        with pytest.raises(NotImplementedError, match="StoreConformance"):
            needed()


# --- planted in the log ----------------------------------------------------------------------


def log_of(store: MemoryStore, partition: Partition) -> PartitionLog:
    return store._state.partitions[partition]


def total_bytes(found: list[Any]) -> int:
    return sum(int(batch.sizes.sum()) for batch in found)


@planted("log.create_topic", "test_another_retention_or_compression_is_no_mismatch_and_the_topics_from_then_on")
def a_changed_retention_is_not_kept(store: MemoryStore, right: Any, name: str, settings: Any) -> Any:
    found = [info for info in store.log.topics() if info.name == name]
    return right(name, msgspec.structs.replace(settings, retention=found[0].settings.retention) if found else settings)


@planted("log.create_topic", "test_a_topic_that_exists_with_other_settings_is_a_mismatch")
def other_settings_are_ignored(store: MemoryStore, right: Any, name: str, settings: Any) -> Any:
    try:
        return right(name, settings)
    except TopicMismatch:
        return next(info for info in store.log.topics() if info.name == name)


@planted("log.trim", "test_a_log_trimmed_to_its_end_goes_on_at_its_end")
def offsets_are_used_again(store: MemoryStore, right: Any, partition: Partition, *args: Any, **how: Any) -> Any:
    first = right(partition, *args, **how)
    log = log_of(store, partition)
    if not log.blocks:
        log.first = log.end = 0
    return first


@planted("log.append", "test_a_repeat_is_answered_with_its_first_offsets_and_not_stored")
def a_duplicate_is_stored_twice(store: MemoryStore, right: Any, partition: Partition, *args: Any) -> Any:
    log_of(store, partition).producers._producers.clear()
    return right(partition, *args)


@planted(
    "log.append",
    "test_a_repeat_is_answered_with_its_first_offsets_and_not_stored",
    "test_a_run_sent_by_many_threads_is_stored_once",
)
def a_duplicate_is_answered_without_its_first_offsets(_: MemoryStore, right: Any, *args: Any) -> Any:
    return [Appended(None, duplicate=True) if answer.duplicate else answer for answer in right(*args)]


@planted("log.append", "test_a_repeat_within_one_append_is_answered_with_its_first_offsets")
def a_duplicate_within_one_append_is_stored(_: MemoryStore, right: Any, where: Any, batch: Any, runs: Any) -> Any:
    news: list[Any] = []
    for number, run in enumerate(runs):
        news.append(run._replace(producer=bytes([number]) * 16) if run in news else run)
    return right(where, batch, news)


@planted("log.append", "test_a_sequence_taken_by_other_content_is_refused")
def a_conflict_is_accepted(_: MemoryStore, right: Any, partition: Partition, batch: Any, runs: Any) -> Any:
    return right(partition, batch, [run._replace(digest=0) for run in runs])


@planted("log.append", "test_the_other_runs_of_an_append_are_stored_when_one_is_refused")
def one_refused_run_refuses_all(store: MemoryStore, right: Any, where: Partition, batch: Any, runs: Any) -> Any:
    clock = store._state.clock
    answers = [log_of(store, where).producers.answer(run, clock.time_us()) for run in runs]
    if any(answer and answer.refused for answer in answers):
        return [answer or Appended(None) for answer in answers]
    return right(where, batch, runs)


@planted(
    "log.append",
    "test_a_producer_that_was_silent_for_longer_is_refused",
    "test_a_producer_that_was_born_long_ago_and_is_not_known_is_refused",
)
def forgotten_producers_are_taken_for_new(store: MemoryStore, right: Any, where: Partition, *args: Any) -> Any:
    table, now = log_of(store, where).producers, store._state.clock.time_us()
    table._advance(now)
    for run in args[1]:
        table._producers.setdefault(run.producer, deduplication._Producer()).used_at = now
    return right(where, *args)


@planted("log.append", "test_a_new_producer_may_begin_at_any_sequence")
def a_producer_must_begin_at_0(store: MemoryStore, right: Any, where: Partition, batch: Any, runs: Any) -> Any:
    known = log_of(store, where).producers._producers
    if any(run.first_sequence and run.producer not in known for run in runs):
        return [Appended(None, refused=ProducerExpired("unknown")) for _ in runs]
    return right(where, batch, runs)


@planted(
    "log.append",
    "test_a_lasting_producer_is_never_forgotten",
    "test_an_outbox_that_was_silent_for_months_is_still_recognised",
    "test_a_schedule_that_was_silent_for_months_is_still_recognised",
)
def lasting_producers_are_forgotten(store: MemoryStore, right: Any, where: Partition, *args: Any) -> Any:
    producers, now = log_of(store, where).producers._producers, store._state.clock.time_us()
    for name in [name for name, known in producers.items() if now - known.used_at > PRODUCER_IDLE_SECONDS * 1e6]:
        del producers[name]
    return right(where, *args)


@planted("log.delete_topic", "test_deleting_a_topic_removes_what_is_scheduled_for_it_and_nothing_else")
def scheduled_rows_outlive_their_topic(store: MemoryStore, right: Any, log_id: str) -> None:
    rows = dict(store._state.scheduled)
    right(log_id)
    store._state.scheduled.update(rows)


@planted(
    "cursors.put_subscription",
    "test_a_subscription_is_created_with_its_first_cursors_and_later_ones_do_not_replace_them",
    "test_the_first_cursors_of_a_subscription_protect_before_any_progress",
)
def first_cursors_are_not_kept(_: MemoryStore, right: Any, subscription: Any, _cursors: Any = ()) -> None:
    right(subscription)


@planted("log.append", "test_a_producer_that_was_silent_for_longer_is_refused")
def producers_are_never_forgotten(store: MemoryStore, right: Any, partition: Partition, *args: Any) -> Any:
    for producer in log_of(store, partition).producers._producers.values():
        producer.used_at = store._state.clock.time_us()
    return right(partition, *args)


@planted("log.append", "test_a_lower_epoch_is_fenced")
def a_lower_epoch_is_accepted(_: MemoryStore, right: Any, partition: Partition, batch: Any, runs: Any) -> Any:
    return right(partition, batch, [run._replace(epoch=0) for run in runs])


@planted(
    "log.append",
    "test_the_last_64_runs_of_a_producer_are_remembered_with_their_offsets_and_older_ones_as_stored",
    "test_a_run_that_overlaps_a_long_past_one_in_part_is_refused",
)
def older_runs_are_stored_again(store: MemoryStore, right: Any, partition: Partition, *args: Any) -> Any:
    for producer in log_of(store, partition).producers._producers.values():
        firsts = [run.first_sequence for run, _ in producer.recent]
        producer.stored = RangeSet(Range(first, first + 1) for first in firsts)
    return right(partition, *args)


@planted("log.read", "test_a_read_begins_exactly_where_asked_and_leaves_nothing_out")
def a_read_skips_the_first_event(store: MemoryStore, right: Any, where: Partition, start: int, **limits: Any) -> Any:
    return right(where, min(start + 1, log_of(store, where).end) if start == 0 else start, **limits)


@planted("log.read", "test_a_read_keeps_within_its_bytes_and_goes_on_from_there")
def a_read_leaves_a_hole(store: MemoryStore, right: Any, where: Partition, start: int, **limits: Any) -> Any:
    found = right(where, start, **limits)
    left = limits["bytes_max"] - total_bytes(found)
    later = [block for block in log_of(store, where).blocks if found and block.start > found[-1].range.stop]
    return found + [block for block in later if total_bytes([block]) <= left][:1]


@planted("log.read", "test_a_read_returns_one_event_even_if_it_is_larger_than_the_limit")
def a_read_of_a_large_event_returns_nothing(_: MemoryStore, right: Any, *args: Any, **limits: Any) -> Any:
    found = right(*args, **limits)
    return found if total_bytes(found) <= limits["bytes_max"] else []


@planted(
    "log.read",
    "test_a_read_beyond_the_end_says_where_the_end_is",
    "test_trimmed_events_are_gone_and_a_reader_is_told_so",
)
def a_reader_is_moved_in_silence(_: MemoryStore, right: Any, where: Partition, start: int, **limits: Any) -> Any:
    try:
        return right(where, start, **limits)
    except OffsetOutOfRange as error:
        return right(where, min(max(start, error.first), error.end), **limits)


@planted("log._store", "test_the_events_of_one_append_share_their_time")
def each_run_has_its_own_time(store: MemoryStore, right: Any, log: Any, place: Any, *args: Any) -> Any:
    return right(log, place._replace(appended_at=store._state.clock.time_us()), *args)


@planted("log.heads", "test_heads_are_in_the_order_asked_for_and_follow_every_append")
def heads_are_read_once(_: MemoryStore, right: Any, partitions: Any) -> Any:
    heads = right(partitions)
    heads.read = partial(np.copy, heads.read())
    return heads


@planted("log.find_time", "test_nothing_is_missed_by_time_after_the_wall_clock_was_set_back")
def times_are_taken_to_be_sorted(store: MemoryStore, _: Any, partition: Partition, time_us: int) -> int:
    log = log_of(store, partition)
    found = bisect_left([block.place.appended_at for block in log.blocks if block.place], time_us)
    return [*log.starts, log.end][found]


@planted(
    "log.trim",
    "test_what_a_protected_subscription_has_not_passed_is_not_trimmed",
    "test_the_slowest_shard_and_the_slowest_subscription_protect",
    "test_progress_in_one_partition_does_not_free_another",
)
def events_are_trimmed_past_a_protected_cursor(_: MemoryStore, right: Any, *args: Any, **__: Any) -> Any:
    return right(*args, force=True)


@planted("log.append", "test_a_handle_of_a_deleted_topic_is_told_so_everywhere")
def a_deleted_topic_is_still_writable(store: MemoryStore, right: Any, where: Partition, *args: Any) -> Any:
    log_ids = [info.log_id for info in store.log.topics()]
    return right(where if where.log_id in log_ids else Partition(log_ids[0], where.number), *args)


TOGETHER = threading.Barrier(THREADS)


@planted("log.append", "test_appends_of_many_threads_are_dense_and_nothing_is_lost")
def offsets_are_taken_before_the_turn(store: MemoryStore, right: Any, where: Partition, *args: Any) -> Any:
    end = log_of(store, where).end
    TOGETHER.wait()
    [answer] = right(where, *args)
    return [Appended(Range(end, end + len(answer.offsets)))]


# --- planted in subscriptions ----------------------------------------------------------------


@planted("cursors.commit", "test_a_cursor_never_moves_back_within_its_generation")
def a_cursor_may_move_back(store: MemoryStore, right: Any, commits: Any) -> Any:
    store._state.cursors.clear()
    return right(commits)


@planted(
    "_state.check_fence",
    "test_a_commit_with_a_stale_fence_is_refused",
    "test_a_stale_scheduler_is_fenced",
    "test_a_stale_mover_is_fenced",
)
def a_stale_fence_is_accepted(*_: Any) -> None:
    pass


@planted(
    "cursors.commit",
    "test_a_refused_commit_leaves_nothing_behind_and_the_others_are_written",
    "test_a_commit_with_a_stale_fence_is_refused",
)
def a_refused_commit_is_half_written(store: MemoryStore, right: Any, commits: Any) -> Any:
    store._state.parked.update((row.key, row) for commit in commits for row in commit.parked)
    return right(commits)


@planted("cursors.commit", "test_a_refused_commit_leaves_nothing_behind_and_the_others_are_written")
def commits_after_a_refused_one_are_dropped(_: MemoryStore, right: Any, commits: Any) -> Any:
    answers: list[Any] = []
    for commit in commits:
        answers += [None] if any(answers) else right([commit])
    return answers


@planted("cursors.load", "test_what_is_loaded_is_what_was_committed")
def offsets_settled_ahead_are_forgotten(_: MemoryStore, right: Any, *args: Any) -> Any:
    return [msgspec.structs.replace(cursor, settled=b"") for cursor in right(*args)]


@planted(
    "_state.forget_subscription",
    "test_a_deleted_subscription_takes_its_cursors_and_parked_rows_along_and_no_others",
    "test_deleting_a_topic_removes_its_subscriptions_and_parked_rows_and_no_others",
)
def cursors_outlive_their_subscription(store: MemoryStore, _: Any, log_id: str, name: str) -> None:
    del store._state.subscriptions[log_id, name]


@planted("cursors.subscription", "test_one_subscription_is_found_by_log_and_name")
def a_subscription_is_known_by_its_name(store: MemoryStore, _: Any, __: str, name: str) -> Any:
    return next((found for found in store.cursors.subscriptions() if found.name == name), None)


@planted(
    "cursors.revision",
    "test_the_revision_changes_when_subscriptions_do",
    "test_the_revision_changes_with_a_raised_generation_and_not_with_ordinary_commits",
    "test_the_revision_changes_when_parked_rows_are_changed_by_others_than_commits",
)
def the_revision_counts_subscriptions(store: MemoryStore, _: Any) -> int:
    return len(store._state.subscriptions)


@planted("cursors.commit", "test_the_revision_changes_with_a_raised_generation_and_not_with_ordinary_commits")
def every_commit_changes_the_revision(store: MemoryStore, right: Any, commits: Any) -> Any:
    store._state.revision += 1
    return right(commits)


@planted("cursors.commit", "test_the_revision_changes_with_a_raised_generation_and_not_with_ordinary_commits")
def a_first_cursor_raises_no_generation(store: MemoryStore, right: Any, commits: Any) -> Any:
    before, known = store._state.revision, set(store._state.cursors)
    answers = right(commits)
    if all(cursor.shard not in known for commit in commits for cursor in commit.cursors):
        store._state.revision = before
    return answers


@planted("parked.stamp", "test_the_revision_changes_when_parked_rows_are_changed_by_others_than_commits")
def a_stamp_that_changed_nothing_changes_the_revision(store: MemoryStore, right: Any, *args: Any) -> Any:
    store._state.revision += 1
    return right(*args)


@planted("log.delete_topic", "test_the_revision_changes_when_subscriptions_do")
def a_deleted_topic_leaves_the_revision(store: MemoryStore, right: Any, log_id: str) -> None:
    before = store._state.revision
    right(log_id)
    store._state.revision = before


@planted("cursors.forget_settlements", "test_forgotten_settlements_do_not_come_again_and_their_numbers_neither")
def the_numbers_of_settlements_restart(store: MemoryStore, right: Any, up_to: int) -> None:
    right(up_to)
    store.cursors._last_settlement = len(store.cursors._settlements)


@planted("cursors.commit", "test_a_row_replaces_the_one_of_the_same_event_whichever_shard_held_it")
def a_parked_row_is_known_by_its_shard(store: MemoryStore, right: Any, commits: Any) -> Any:
    rows: dict[Any, Any] = store._state.parked
    before = {(*key[:4], row.shard.slot): row for key, row in rows.items()}
    answers = right(commits)
    rows.update(before)
    return answers


@planted("parked.page", "test_every_field_of_a_filter_counts")
def a_filter_forgets_about_slots(_: MemoryStore, right: Any, wanted: ParkedFilter, **how: Any) -> Any:
    return right(msgspec.structs.replace(wanted, slots=None), **how)


@planted("parked.page", "test_every_field_of_a_filter_counts", "test_every_call_keeps_to_the_offsets_of_a_filter")
def a_filter_forgets_about_offsets(_: MemoryStore, right: Any, wanted: ParkedFilter, **how: Any) -> Any:
    return right(msgspec.structs.replace(wanted, offsets=None), **how)


@planted("parked.purge", "test_every_call_keeps_to_the_offsets_of_a_filter")
def a_purge_forgets_about_offsets(_: MemoryStore, right: Any, wanted: ParkedFilter) -> Any:
    return right(msgspec.structs.replace(wanted, offsets=None))


@planted("parked.waiting", "test_waiting_rows_come_without_their_events_by_position_due_or_not")
def waiting_rows_come_by_time(_: MemoryStore, right: Any, wanted: ParkedFilter) -> Any:
    return sorted(right(wanted), key=lambda row: row.due_at)


@planted("parked.waiting", "test_waiting_rows_come_without_their_events_by_position_due_or_not")
def rows_wait_whatever_states_are_meant(_: MemoryStore, right: Any, wanted: ParkedFilter) -> Any:
    return right(msgspec.structs.replace(wanted, states=None))


@planted("parked.due", "test_waiting_rows_come_when_due_by_time_and_then_position")
def due_rows_come_by_position(_: MemoryStore, right: Any, *args: Any, **how: Any) -> Any:
    return sorted(right(*args, **how), key=lambda row: row.key)


@planted("parked.replay", "test_a_replay_turns_dead_rows_into_waiting_ones_and_no_others")
def a_replay_is_not_counted(store: MemoryStore, right: Any, *args: Any, **how: Any) -> Any:
    count = right(*args, **how)
    for key, row in store._state.parked.items():
        store._state.parked[key] = msgspec.structs.replace(row, replay=0)
    return count


@planted("parked.replay", "test_a_job_brings_a_row_back_once_though_it_dies_again")
def a_replayed_row_keeps_its_job(store: MemoryStore, right: Any, wanted: ParkedFilter, now: int, **how: Any) -> Any:
    jobs = {key: row.job for key, row in store._state.parked.items()}
    replayed = right(wanted, now, **how)
    for key, row in store._state.parked.items():
        store._state.parked[key] = msgspec.structs.replace(row, job=jobs[key])
    return replayed


@planted(
    "parked.page",
    "test_a_row_comes_back_as_it_was_parked",
    "test_a_traceback_is_kept_replaced_and_taken_away_with_its_row",
)
def tracebacks_are_forgotten(store: MemoryStore, right: Any, *args: Any, **how: Any) -> Any:
    return [msgspec.structs.replace(row, error_trace="") for row in right(*args, **how)]


@planted("parked.purge", "test_a_purge_removes_dead_and_done_rows_and_never_waiting_ones")
def a_purge_removes_waiting_rows(store: MemoryStore, _: Any, wanted: ParkedFilter) -> int:
    gone = [key for key, row in store._state.parked.items() if wanted.matches(row)]
    return len([store._state.parked.pop(key) for key in gone])


@planted("log.trim", "test_a_row_outlives_its_event_in_the_log")
def parked_rows_go_with_their_events(store: MemoryStore, right: Any, *args: Any, **how: Any) -> Any:
    store._state.parked.clear()
    return right(*args, **how)


# --- planted in leases and entrances ---------------------------------------------------------


@planted("leases.release", "test_epochs_never_come_again")
def an_epoch_comes_again_after_a_release(store: MemoryStore, right: Any, lease: Any, **options: Any) -> None:
    right(lease, **options)
    store.leases._revision = 0


@planted("leases.acquire", "test_no_two_acquisitions_have_the_same_epoch_whatever_their_leases")
def epochs_are_counted_lease_by_lease(
    store: MemoryStore, right: Any, name: str, *arguments: Any, **options: Any
) -> Any:
    acquired = right(name, *arguments, **options)
    counts = vars(store).setdefault("counts", Counter())
    counts[name] += 1
    store._state.leases[name] = lease = acquired._replace(epoch=counts[name])
    return lease


@planted("_state.clock.monotonic", "test_a_jump_of_the_wall_clock_expires_nothing_and_prolongs_nothing")
def leases_expire_by_the_wall_clock(store: MemoryStore, _: Any) -> float:
    return store._state.clock.time_us() / 1_000_000


@planted("leases.renew", "test_renewing_returns_only_what_is_still_held")
def an_expired_lease_can_be_renewed(_: MemoryStore, __: Any, leases: Any, ___: Any) -> Any:
    return leases


@planted("leases.acquire", "test_a_lease_that_was_not_released_is_not_clean")
def every_lease_is_clean(_: MemoryStore, right: Any, *args: Any, **how: Any) -> Any:
    lease = right(*args, **how)
    return lease and lease._replace(clean=True)


@planted("leases.acquire", "test_a_lease_above_that_is_not_held_with_its_epoch_any_more_frees_those_under_it")
def what_is_free_because_of_the_lease_above_is_clean(store: MemoryStore, right: Any, *args: Any, **how: Any) -> Any:
    last = store._state.leases.get(args[0])
    lease = right(*args, **how)
    return lease._replace(clean=True) if lease and last and last.under else lease


@planted(
    "leases._held",
    "test_a_lease_above_that_is_not_held_with_its_epoch_any_more_frees_those_under_it",
    "test_renewing_a_lease_under_another_changes_nothing",
)
def a_lease_above_keeps_what_is_under_it_with_any_epoch(store: MemoryStore, right: Any, name: str) -> Any:
    lease = store._state.leases.get(name)
    return right(name) if lease is None or lease.under is None else right(lease.under.lease) and lease


@planted("leases.release", "test_a_lease_above_that_is_not_held_with_its_epoch_any_more_frees_those_under_it")
def what_is_under_a_released_lease_stays(store: MemoryStore, right: Any, lease: Any, **how: Any) -> None:
    if lease.under is None:
        later = store._state.clock.monotonic() + 10
        for name, row in store._state.leases.items():
            if row.under == lease.fence:
                store._state.leases[name] = row._replace(under=None, expires_at=later)
    right(lease, **how)


@planted("leases.acquire", "test_a_lease_under_another_is_held_for_as_long_as_that_one")
def a_lease_under_another_has_a_time_of_its_own(_: MemoryStore, right: Any, *args: Any, under: Any = None) -> Any:
    return right(*args) if under is None else right(args[0], args[1], 10)._replace(under=under.fence)


@planted(
    "leases.renew",
    "test_a_lease_under_another_is_held_for_as_long_as_that_one",
    "test_renewing_a_lease_under_another_changes_nothing",
)
def a_lease_under_another_can_be_renewed_for_ever(_: MemoryStore, right: Any, leases: Any, seconds: Any) -> Any:
    return [*right([lease for lease in leases if not lease.under], seconds), *(row for row in leases if row.under)]


@planted("leases.acquire", "test_a_lease_above_that_is_not_held_with_its_epoch_any_more_frees_those_under_it")
def a_lease_can_be_under_one_that_is_lost(store: MemoryStore, right: Any, *args: Any, under: Any = None) -> Any:
    lost = under is not None and store.leases.holder(under.name) is None
    return right(*args) if lost else right(*args, under=under)


@planted("leases.acquire", "test_a_lease_can_be_under_those_alone_that_expire_by_themselves")
def leases_can_be_under_each_other(_: MemoryStore, right: Any, *args: Any, under: Any = None) -> Any:
    return right(*args) if under and (under.under or under.name == args[0]) else right(*args, under=under)


@planted("leases.acquire", "test_a_lease_under_another_is_released_by_itself")
def leases_under_the_same_one_are_the_same_owners(store: MemoryStore, right: Any, *args: Any, under: Any = None) -> Any:
    last = store._state.leases.get(args[0])
    if under is not None and last is not None and last.under == under.fence:
        return right(args[0], last.owner or args[1], *args[2:], under=under)
    return right(*args, under=under)


@planted(
    "schedule.claim",
    "test_a_claim_is_the_same_at_every_call_whoever_makes_it",
    "test_what_is_claimed_can_be_appended_and_a_repeat_is_recognised",
)
def every_claim_gives_a_new_sequence(store: MemoryStore, right: Any, *args: Any) -> Any:
    for key, row in store.schedule._rows.items():
        store.schedule._rows[key] = msgspec.structs.replace(row, sequence=None)
    return right(*args)


@planted("schedule.add", "test_an_id_that_is_there_already_is_left_as_it_is")
def a_scheduled_row_is_replaced(store: MemoryStore, _: Any, rows: Any) -> None:
    store.schedule._rows.update((row.id, row) for row in rows)


@planted("outbox.stage", "test_rows_of_a_transaction_that_rolls_back_never_exist")
def staged_rows_do_not_wait_for_the_commit(store: MemoryStore, _: Any, __: Any, rows: Any) -> None:
    store.outbox._rows.extend(rows)


@planted("outbox.done", "test_sequences_never_restart_after_the_outbox_was_drained")
def the_outbox_restarts_when_it_is_drained(store: MemoryStore, right: Any, *args: Any) -> None:
    right(*args)
    store.outbox._next_sequence = store.outbox.pending()


@planted(
    "manifests.prepare",
    "test_the_first_manifest_of_a_batch_wins",
    "test_a_finished_manifest_stays_the_first_one",
)
def the_last_manifest_wins(store: MemoryStore, right: Any, manifest: Manifest, **how: Any) -> Any:
    right(manifest, **how)
    store.manifests._rows[manifest.sink, manifest.query, manifest.batch] = manifest
    return manifest


@planted("manifests.prepare", "test_a_sink_belongs_to_its_first_query_until_another_adopts_it")
def a_sink_belongs_to_everybody(_: MemoryStore, right: Any, manifest: Manifest, **__: Any) -> Any:
    return right(manifest, adopt=True)


@planted("manifests.prepare", "test_a_query_that_adopts_its_sink_back_is_judged_by_what_is_remembered_of_it")
def a_query_that_is_refused_adopts_all_the_same(store: MemoryStore, right: Any, manifest: Manifest, **how: Any) -> Any:
    try:
        return right(manifest, **how)
    except SinkConflict:
        if how:
            store.manifests._owners[manifest.sink] = manifest.query
        raise


@planted(
    "manifests.prepare",
    "test_of_what_is_done_the_newest_by_preparation_are_remembered",
    "test_what_is_not_done_is_remembered_however_old",
    "test_sinks_do_not_push_out_what_is_remembered_of_others",
)
def manifests_are_remembered_for_ever(store: MemoryStore, right: Any, manifest: Manifest, **how: Any) -> Any:
    rows = dict(store.manifests._rows)
    answer = right(manifest, **how)
    store.manifests._rows.update(rows)
    return answer


@planted("manifests.finish", "test_of_what_is_done_the_newest_by_preparation_are_remembered")
def what_was_finished_first_is_forgotten_first(store: MemoryStore, right: Any, *key: Any) -> None:
    right(*key)
    keys = store.manifests._keys[key[0]]
    keys.append(keys.pop(keys.index(key)))


@planted("manifests.prepare", "test_what_is_not_done_is_remembered_however_old")
def only_the_newest_are_remembered_done_or_not(store: MemoryStore, right: Any, manifest: Manifest, **how: Any) -> Any:
    answer = right(manifest, **how)
    keys = store.manifests._keys[manifest.sink]
    while len(keys) > MANIFESTS_KEPT:
        del store.manifests._rows[keys.pop(0)]
    return answer


@planted("manifests.prepare", "test_sinks_do_not_push_out_what_is_remembered_of_others")
def all_sinks_share_what_is_remembered(store: MemoryStore, right: Any, manifest: Manifest, **how: Any) -> Any:
    answer = right(manifest, **how)
    rows = store.manifests._rows
    for key in [key for key in rows if rows[key].done][:-MANIFESTS_KEPT]:
        del rows[key]
        store.manifests._keys[key[0]].remove(key)
    return answer


@planted(
    "manifests.prepare",
    "test_a_batch_below_the_highest_that_is_not_remembered_is_refused",
    "test_of_what_is_done_the_newest_by_preparation_are_remembered",
)
def what_is_not_remembered_is_taken_for_new(store: MemoryStore, right: Any, manifest: Manifest, **how: Any) -> Any:
    key = (manifest.sink, manifest.query, manifest.batch)
    if store.manifests._owners.get(manifest.sink) != manifest.query or key in store.manifests._rows:
        return right(manifest, **how)
    store.manifests._keys[manifest.sink].append(key)
    return store.manifests._rows.setdefault(key, manifest)


@planted("manifests.forget", "test_a_sink_with_an_unfinished_manifest_is_not_forgotten")
def a_sink_is_forgotten_with_what_is_unfinished(store: MemoryStore, right: Any, sink: str) -> None:
    for key in store.manifests._keys.get(sink, []):
        store.manifests.finish(*key)
    right(sink)


@planted("manifests.forget", "test_a_sink_that_is_forgotten_is_free_for_any_query_and_batch")
def a_forgotten_sink_keeps_its_owner(store: MemoryStore, right: Any, sink: str) -> None:
    owner = store.manifests._owners.get(sink)
    right(sink)
    if owner is not None:
        store.manifests._owners[sink] = owner


@planted("log.append", "test_a_hint_comes_after_the_append_is_readable")
def a_hint_comes_before_the_append(store: MemoryStore, right: Any, partition: Partition, *args: Any) -> Any:
    store.notifier.notify(partition)
    return right(partition, *args)


@planted("notifier.listen", "test_a_listener_that_stopped_is_called_no_more_and_others_are")
def a_listener_cannot_be_stopped(_: MemoryStore, right: Any, callback: Any) -> Any:
    right(callback)
    return lambda: None


@planted("notifier.notify", "test_a_listener_that_fails_harms_neither_the_publisher_nor_other_listeners")
def a_listeners_error_reaches_the_publisher(store: MemoryStore, _: Any, partition: Partition) -> None:
    try:
        for callback in store.notifier._callbacks.values():
            callback(partition)
    except ZeroDivisionError as error:
        raise PenstockError("a listener failed") from error


# --- planted in what is told -----------------------------------------------------------------


@planted("tell", "test_what_was_told_last_is_heard_with_its_time")
def what_was_told_first_stays(store: MemoryStore, right: Any, who: str, document: bytes) -> None:
    if not document or who not in store._told:
        right(who, document)


@planted("tell", "test_whoever_has_nothing_to_tell_is_not_heard")
def nothing_is_told_as_something(store: MemoryStore, right: Any, who: str, document: bytes) -> None:
    right(who, document or b"nothing")


@planted("tell", "test_too_much_is_refused_and_changes_nothing")
def what_is_too_much_is_cut_off(store: MemoryStore, right: Any, who: str, document: bytes) -> None:
    right(who, document[:TOLD_BYTES_MAX])


@planted("told", "test_a_closed_store_tells_nothing")
def a_closed_store_still_tells(store: MemoryStore, right: Any) -> Any:
    return [] if store._state.closed else right()


# --- planted in the store's life -------------------------------------------------------------


@planted("_state.check_open", "test_every_call_after_closing_says_that_the_store_is_closed")
def a_closed_store_still_answers(*_: Any) -> None:
    pass


@planted("close", "test_closing_twice_is_allowed")
def closing_twice_is_an_error(store: MemoryStore, right: Any) -> None:
    if store._state.closed:
        raise StoreClosed("twice")
    right()


@planted(
    "close",
    "test_topics_and_events_are_kept",
    "test_producers_are_kept",
    "test_what_was_removed_stays_removed",
)
def partitions_are_lost_at_the_end(store: MemoryStore, right: Any) -> None:
    for partition, log in store._state.partitions.items():
        store._state.partitions[partition] = PartitionLog(log.slot)
    right()


@planted(
    "close",
    "test_subscriptions_and_their_progress_are_kept",
    "test_epochs_go_on_and_stale_fences_stay_stale",
    "test_scheduled_rows_and_their_claims_are_kept",
    "test_the_outbox_is_kept",
    "test_manifests_are_kept",
)
def rows_are_lost_at_the_end(store: MemoryStore, right: Any) -> None:
    tables: list[Any] = [store._state.cursors, store._state.parked, store._state.leases]
    for rows in (*tables, store.schedule._rows, store.outbox._rows, store.manifests._rows):
        rows.clear()
    store.leases._revision = 0
    right()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.name}-{bug.caught_by}")
def test_the_suite_catches_a_planted_bug(bug: Bug) -> None:
    assert not Suite(None).fails(bug.caught_by)
    assert Suite(bug).fails(bug.caught_by)
