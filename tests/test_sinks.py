"""The sink protocol without Spark: killed at every step, repeated, raced, adopted, and swept."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import Bus
from penstock.batch import Batch
from penstock.clock import Clock, SystemClock, VirtualClock
from penstock.errors import InvalidEvent, SinkConflict, TooLarge, TopicDeleted, Trimmed
from penstock.rows import Partition, TopicInfo, TopicSettings
from penstock.runtime import sinks, staging
from penstock.runtime.staging import Sink, StagedPart, Stager, open_staging
from penstock.settings import Limits
from penstock.stores import open_store
from penstock.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.ports import Store

SINK = Sink("copies", "query-1")
PARTITIONS = 3
TASKS = 2
CLOCK = SystemClock()


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, root: Path) -> Iterator[Store]:
    opened: Store = MemoryStore() if request.param == "memory" else open_store(f"file:{root}")
    yield opened
    opened.close()


def a_topic(store: Store, name: str = "output") -> TopicInfo:
    return store.log.create_topic(name, TopicSettings(partitions=PARTITIONS))


def rows_of(batch: int, task: int, count: int = 10) -> pa.RecordBatch:
    """Return what one task of a batch writes; an event says which batch, task and row it is."""
    numbers = range(count)
    return pa.record_batch(
        {
            "key": pa.array([f"key-{number % 7}".encode() for number in numbers]),
            "data": pa.array([f"{batch}/{task}/{number}".encode() for number in numbers]),
        }
    )


def stage(
    store: Store, sink: Sink, topic: TopicInfo, batch: int, *, count: int = 10, clock: Clock = CLOCK
) -> list[StagedPart]:
    """Stage a whole batch, as its tasks do."""
    parts: list[StagedPart] = []
    for task in range(TASKS):
        stager = Stager(store.log, open_staging(store.log, sink, topic), topic, limits=Limits(), clock=clock)
        stager.add(rows_of(batch, task, count))
        parts += stager.finish()
    return parts


def deliver(store: Store, sink: Sink, batch: int, *, adopt: bool = False, clock: Clock = CLOCK) -> None:
    """Do what a query does for one batch."""
    topic = a_topic(store)
    parts = stage(store, sink, topic, batch, clock=clock)
    sinks.commit(store, sink, batch, topic, parts, clock=clock, adopt=adopt)


def stored(store: Store, name: str = "output") -> dict[int, list[str]]:
    """Return the events of each partition in their order."""
    topic = next(topic for topic in store.log.topics() if topic.name == name)
    found: dict[int, list[str]] = {}
    for partition in topic.partitions:
        bounds = store.log.bounds(partition)
        found[partition.number] = []
        start = bounds.start
        while start < bounds.stop:
            for batch in store.log.read(partition, start, bytes_max=1 << 20):
                assert isinstance(batch, Batch)
                found[partition.number] += [event.data.decode() for event in batch]
                start = batch.range.stop
    return found


def expected(batches: Sequence[int]) -> dict[int, list[str]]:
    """Return what the topic must hold: every batch once, in order, tasks and rows in theirs."""
    found: dict[int, list[str]] = {partition: [] for partition in range(PARTITIONS)}
    for batch in batches:
        for task in range(TASKS):
            rows = rows_of(batch, task)
            lanes = Batch.from_arrow(rows).partitions(PARTITIONS, keyless=0)
            for lane, data in zip(lanes, rows.column("data").to_pylist(), strict=True):
                found[int(lane)].append(data.decode())
    return found


# --- one after the other ------------------------------------------------------------------------


def test_batches_arrive_in_order_and_nothing_stays_behind(store: Store) -> None:
    for batch in range(3):
        deliver(store, SINK, batch)
    assert stored(store) == expected([0, 1, 2])
    assert store.manifests.unfinished() == []
    staged = next(topic for topic in store.log.topics() if topic.name == SINK.staging_name)
    assert [len(store.log.bounds(lane)) for lane in staged.partitions] == [0] * len(staged.partitions)


def test_a_repeated_batch_is_not_delivered_again(store: Store) -> None:
    for batch in (0, 0, 1, 0, 1, 1):
        deliver(store, SINK, batch)
    assert stored(store) == expected([0, 1])


def test_ids_are_unique_over_all_partitions(store: Store) -> None:
    for batch in range(2):
        deliver(store, SINK, batch)
    ids = [
        event.id
        for partition in a_topic(store).partitions
        for batch in store.log.read(partition, 0, bytes_max=1 << 20)
        if isinstance(batch, Batch)
        for event in batch
    ]
    assert len(set(ids)) == len(ids) == 2 * TASKS * 10


def test_an_empty_batch_is_delivered_and_remembered(store: Store) -> None:
    topic = a_topic(store)
    sinks.commit(store, SINK, 0, topic, [], clock=CLOCK)
    deliver(store, SINK, 1)
    assert stored(store) == expected([1])


def test_a_repeated_batch_of_another_size_is_told(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    deliver(store, SINK, 0)
    topic = a_topic(store)
    sinks.commit(store, SINK, 0, topic, stage(store, SINK, topic, 0, count=3), clock=CLOCK)
    assert stored(store) == expected([0])
    assert "this attempt has 6 events, the first one had 20" in caplog.text


def test_what_is_staged_for_nothing_is_trimmed_with_the_next_batch(store: Store) -> None:
    topic = a_topic(store)
    deliver(store, SINK, 0)
    orphans = stage(store, SINK, topic, 1)
    deliver(store, SINK, 1)
    for part in orphans:
        with pytest.raises(Trimmed):
            store.log.read(Partition(part.log_id, part.lane), part.start, bytes_max=1)
    assert stored(store) == expected([0, 1])


# --- another query ------------------------------------------------------------------------------


def test_another_query_is_refused_until_it_adopts_the_sink(store: Store) -> None:
    deliver(store, SINK, 0)
    other = Sink(SINK.name, "query-2")
    with pytest.raises(SinkConflict, match="belongs to query query-1"):
        deliver(store, other, 0)
    assert stored(store) == expected([0])
    deliver(store, other, 0, adopt=True)
    with pytest.raises(SinkConflict):
        deliver(store, SINK, 1)
    assert stored(store) == expected([0, 0])


def test_a_query_that_adopts_its_sink_back_goes_on(store: Store) -> None:
    other = Sink(SINK.name, "query-2")
    deliver(store, SINK, 0)
    deliver(store, other, 0, adopt=True)
    deliver(store, SINK, 1, adopt=True)
    assert stored(store) == expected([0, 0, 1])


def test_what_the_former_query_has_prepared_is_delivered_before_the_next_ones_batch() -> None:
    dead = Dying(store := MemoryStore(), 0)
    a_topic(store)
    died_at = "manifests.prepare"
    dead.stop_after(died_at)
    with pytest.raises(Killed):
        deliver(dead.store, SINK, 0)
    deliver(store, Sink(SINK.name, "query-2"), 7, adopt=True)
    assert stored(store) == expected([0, 7])


# --- killed at every step -----------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here; nothing catches it."""


class _Port:
    def __init__(self, real: Any, name: str, step: Callable[[str, Callable[[], Any]], Any]) -> None:
        self._real = real
        self._name = name
        self._step = step

    def __getattr__(self, method: str) -> Any:
        real = getattr(self._real, method)
        return lambda *args, **options: self._step(f"{self._name}.{method}", lambda: real(*args, **options))


class Stepped:
    """A store whose every call is a step that somebody else decides about."""

    def __init__(self, real: Store, step: Callable[[str, Callable[[], Any]], Any]) -> None:
        self.log = _Port(real.log, "log", step)
        self.manifests = _Port(real.manifests, "manifests", step)


class Dying:
    """A process that is killed around one of its calls to the store: even numbers before it, odd ones after it."""

    def __init__(self, real: Store, moment: int) -> None:
        self.store: Any = Stepped(real, self._step)
        self._moment = moment
        self._passed = 0
        self._last_call = ""

    def stop_after(self, call: str) -> None:
        """Be killed after this call instead."""
        self._moment, self._last_call = -1, call

    def _step(self, name: str, call: Callable[[], Any]) -> Any:
        if self._passed == self._moment:
            raise Killed
        result = call()
        if self._passed + 1 == self._moment or name == self._last_call:
            raise Killed
        self._passed += 2
        return result


def moments_of(work: Callable[[Any], None], real: Store) -> int:
    """Return how many moments there are to be killed at in this work."""
    counted = Dying(real, -1)
    work(counted.store)
    return counted._passed


def test_killed_at_any_step_the_batch_arrives_once() -> None:
    def work(store: Any) -> None:
        deliver(store, SINK, 1)

    def begun() -> MemoryStore:
        store = MemoryStore()
        deliver(store, SINK, 0)
        return store

    moments = moments_of(work, begun())
    assert moments > 40
    for moment in range(moments):
        store = begun()
        with pytest.raises(Killed):
            work(Dying(store, moment).store)
        # Killed again at any later step by chance, then it comes through.
        chance = random.Random(moment)
        try:
            work(Dying(store, chance.randrange(2 * moments)).store)
        except Killed:
            work(store)
        deliver(store, SINK, 2)
        assert stored(store) == expected([0, 1, 2]), moment
        assert store.manifests.unfinished() == []


def test_killed_after_it_was_prepared_anybody_completes_it() -> None:
    prepared = 0
    for moment in range(moments_of(lambda store: deliver(store, SINK, 0), MemoryStore())):
        store = MemoryStore()
        a_topic(store)
        with pytest.raises(Killed):
            deliver(Dying(store, moment).store, SINK, 0)
        was_prepared = bool(store.manifests.unfinished()) or store.manifests.last(SINK.name) is not None
        prepared += was_prepared
        sinks.complete_all(store)
        assert stored(store) == expected([0] if was_prepared else []), moment
    assert prepared > 10


def test_a_job_killed_at_any_step_leaves_nothing_behind_in_the_end() -> None:
    job = Sink("batch-1f", "1f", once=True)
    clock = VirtualClock()
    for moment in range(moments_of(lambda store: deliver(store, job, 0), MemoryStore())):
        store = MemoryStore(clock=clock)
        a_topic(store)
        with pytest.raises(Killed):
            deliver(Dying(store, moment).store, job, 0, clock=clock)
        sinks.complete_all(store)
        whole = stored(store)
        assert whole in (expected([0]), expected([])), moment
        clock.advance(sinks.ORPHANED_SECONDS + 1)
        sinks.sweep(store, clock=clock)
        assert [topic.name for topic in store.log.topics()] == ["output"], moment
        assert store.manifests.last(job.name) is None, moment


# --- several at once ----------------------------------------------------------------------------


class Race:
    """Several processes whose calls to the store come in an order that a seed decides."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._turn = threading.Condition()
        self._waiting: dict[int, bool] = {}
        self._running = 0
        self.errors: list[BaseException] = []

    def run(self, works: Sequence[Callable[[Any], None]], real: Store) -> None:
        threads = [threading.Thread(target=self._work, args=(index, work, real)) for index, work in enumerate(works)]
        self._running = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, index: int, work: Callable[[Any], None], real: Store) -> None:
        try:
            work(Stepped(real, lambda _, call: self._step(index, call)))
        except (SinkConflict, Trimmed, TopicDeleted) as error:
            self.errors.append(error)  # what a query may end with; it is started again
        finally:
            with self._turn:
                self._running -= 1
                self._choose()

    def _step(self, index: int, call: Callable[[], Any]) -> Any:
        with self._turn:
            self._waiting[index] = False
            self._choose()
            self._turn.wait_for(lambda: self._waiting[index])
            del self._waiting[index]
        return call()

    def _choose(self) -> None:
        """Let one go on once all are waiting."""
        if self._waiting and len(self._waiting) == self._running and not any(self._waiting.values()):
            self._waiting[self._chance.choice(sorted(self._waiting))] = True
            self._turn.notify_all()


@pytest.mark.parametrize("seed", range(150))
def test_drivers_that_run_the_same_query_at_once_deliver_every_batch_once(seed: int) -> None:
    store = MemoryStore()
    a_topic(store)

    def query(driven: Any) -> None:
        for batch in range(3):
            deliver(driven, SINK, batch)

    race = Race(seed)
    race.run([query, query, lambda driven: _ignore(sinks.complete_all(driven))], store)
    assert race.errors == []
    assert stored(store) == expected([0, 1, 2])
    assert store.manifests.unfinished() == []


@pytest.mark.parametrize("seed", range(100))
def test_while_a_sink_changes_hands_nothing_is_delivered_twice_or_in_part(seed: int) -> None:
    store = MemoryStore()
    a_topic(store)
    deliver(store, SINK, 0)

    def former(driven: Any) -> None:
        for batch in range(1, 4):
            deliver(driven, SINK, batch)

    def adopting(driven: Any) -> None:
        deliver(driven, Sink(SINK.name, "query-2"), 10, adopt=True)
        deliver(driven, Sink(SINK.name, "query-2"), 11)

    race = Race(seed)
    race.run([former, adopting], store)
    sinks.complete_all(store)
    of_former = 1 + len({row.partition("/")[0] for row in stored(store)[0]} & {"1", "2", "3"})
    found = stored(store)
    whole = expected([*range(of_former), 10, 11])
    assert {partition: sorted(rows) for partition, rows in found.items()} == {
        partition: sorted(rows) for partition, rows in whole.items()
    }
    for query in (["0", "1", "2", "3"], ["10", "11"]):
        for partition, rows in found.items():
            mine = [row for row in rows if row.partition("/")[0] in query]
            assert mine == [row for row in whole[partition] if row.partition("/")[0] in query]


def _ignore(_: object) -> None:
    pass


# --- staging ------------------------------------------------------------------------------------


def a_stager(store: Store, sink: Sink = SINK, **options: Any) -> Stager:
    topic = a_topic(store)
    options = {"limits": Limits(), "clock": CLOCK, **options}
    return Stager(store.log, open_staging(store.log, sink, topic), topic, **options)


def test_a_given_partition_wins_over_the_key_and_must_exist(store: Store) -> None:
    stager = a_stager(store)
    stager.add(rows_of(0, 0), np.full(10, 2, np.int32))
    assert {part.partition for part in stager.finish()} == {2}
    with pytest.raises(InvalidEvent, match="no partition 3; it has 0 to 2"):
        a_stager(store).add(rows_of(0, 0), np.full(10, 3, np.int32))


def test_events_without_a_key_go_round(store: Store) -> None:
    stager = a_stager(store, turn=1)
    for _ in range(3):
        stager.add(pa.record_batch({"data": [b"x"]}))
    assert sorted(part.partition for part in stager.finish()) == [0, 1, 2]


def test_an_event_beyond_the_limits_is_refused(store: Store) -> None:
    with pytest.raises(TooLarge, match=r"limits\.event_bytes_max"):
        a_stager(store, limits=Limits(event_bytes_max=100)).add(pa.record_batch({"data": [b"x" * 101]}))


def test_large_rows_are_staged_in_parts_of_bounded_size(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 10_000)
    stager = a_stager(store)
    rows = pa.record_batch({"key": [b"k"] * 500, "data": [b"%04d" % number + b"x" * 500 for number in range(500)]})
    stager.add(rows)
    parts = stager.finish()
    assert len(parts) > 10
    assert max(part.size for part in parts) < 30_000
    sinks.commit(store, SINK, 0, a_topic(store), parts, clock=CLOCK)
    (found,) = [values for values in stored(store).values() if values]
    assert [int(value[:4]) for value in found] == list(range(500))


def test_many_partitions_do_not_hold_much_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "HELD_BYTES_MAX", 5_000)
    stager = a_stager(MemoryStore())
    for batch in range(20):
        stager.add(rows_of(batch, 0, 100))
        assert sum(stager._held_bytes.values()) <= 5_000
    assert sum(part.stop - part.start for part in stager.finish()) == 2_000


def test_the_staging_logs_of_two_queries_have_names_of_their_own() -> None:
    names = {Sink(name, query).staging_name for name in ("a", "b" * 128) for query in ("x", "y")}
    assert len(names) == 4
    assert max(map(len, names)) <= 128


def test_parts_that_are_gone_are_refused_before_anything_is_written_down(store: Store) -> None:
    topic = a_topic(store)
    parts = stage(store, SINK, topic, 0)
    for lane in {(part.log_id, part.lane) for part in parts}:
        store.log.trim(Partition(*lane), store.log.bounds(Partition(*lane)).stop)
    with pytest.raises(Trimmed):
        sinks.commit(store, SINK, 0, topic, parts, clock=CLOCK)
    assert store.manifests.unfinished() == []
    deliver(store, SINK, 0)
    assert stored(store) == expected([0])


def test_a_topic_that_is_deleted_takes_what_was_prepared_for_it_along(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    dead = Dying(store, 0)
    dead.stop_after("manifests.prepare")
    with pytest.raises(Killed):
        deliver(dead.store, SINK, 0)
    store.log.delete_topic(a_topic(store).log_id)
    assert sinks.complete_all(store) == 1
    assert "topic 'output' was deleted" in caplog.text
    assert store.manifests.unfinished() == []
    deliver(store, SINK, 1)
    assert stored(store) == expected([1])


# --- what is left behind ------------------------------------------------------------------------


def test_a_staging_log_is_swept_when_nobody_has_used_it_for_long() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    topic = a_topic(store)
    stage(store, SINK, topic, 0, clock=clock)
    clock.advance(sinks.ORPHANED_SECONDS / 2)
    stage(store, Sink("other", "query"), topic, 0, clock=clock)
    assert sinks.sweep(store, clock=clock) == []
    clock.advance(sinks.ORPHANED_SECONDS / 2 + 1)
    assert sinks.sweep(store, clock=clock) == [SINK.staging_name]


def test_a_staging_log_that_a_manifest_needs_is_never_swept() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    dead = Dying(store, 0)
    dead.stop_after("manifests.prepare")
    with pytest.raises(Killed):
        deliver(dead.store, SINK, 0, clock=clock)
    clock.advance(10 * sinks.ORPHANED_SECONDS)
    assert sinks.sweep(store, clock=clock) == []
    sinks.complete_all(store)
    assert stored(store) == expected([0])
    assert sinks.sweep(store, clock=clock) == [SINK.staging_name]


async def test_an_open_bus_delivers_what_a_dead_process_has_prepared() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    dead = Dying(store, 0)
    dead.stop_after("manifests.prepare")
    with pytest.raises(Killed):
        deliver(dead.store, SINK, 0, clock=clock)
    async with Bus(store=store, clock=clock):
        await clock.advance_async(1)
        assert stored(store) == expected([])  # its own process may still be at it
        await clock.advance_async(30)
        assert stored(store) == expected([0])
    assert store.manifests.unfinished() == []


async def test_a_manifest_that_cannot_be_delivered_holds_up_no_other_sink(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    topic = a_topic(store)
    stuck, fine = Sink("stuck", "query"), Sink("fine", "query")
    for sink in (stuck, fine):
        dead = Dying(store, 0)
        dead.stop_after("manifests.prepare")
        with pytest.raises(Killed):
            deliver(dead.store, sink, 0, clock=clock)
    staged = next(known for known in store.log.topics() if known.name == stuck.staging_name)
    store.log.delete_topic(staged.log_id)
    async with Bus(store=store, clock=clock):
        await clock.advance_async(60)
    assert stored(store, topic.name) == expected([0])
    assert [manifest.sink for manifest in store.manifests.unfinished()] == ["stuck"]
    told = [record.message for record in caplog.records if "stays so" in record.message]
    assert len(told) == 1, "it is told once, not at every look"
