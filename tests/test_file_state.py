"""The small state of the file store: the ports in SQLite, group commit, parked payloads, limits and processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.file_state import (
    LIMITS,
    STORE_ID,
    StateStore,
    billing,
    populated,
    state_stores,
)

from penstock.clock import SystemClock, VirtualClock
from penstock.errors import (
    Fenced,
    StoreError,
    StoreFull,
    TopicDeleted,
    UnknownSubscription,
    WriterStalled,
)
from penstock.ports import Store
from penstock.rows import Commit, Manifest, Scheduled, TopicInfo
from penstock.stores.file.gate import CONTROL_GATE, shared_gates
from penstock.stores.file.platform import Platform, connect_sqlite
from penstock.stores.file.state import commits, connections, tallies
from penstock.stores.file.state.rebuild import examine
from penstock.stores.file.state.schema import BULK, CONTROL, SEALED_TABLES, create_databases
from penstock.stores.memory import MemoryStore
from penstock.testing.conformance.builders import (
    a_cursor,
    a_parked,
    a_shard,
    acquired,
    an_event,
    commit,
    fill,
    park,
    subscribe,
)
from penstock.testing.conformance.cursors import CursorsConformance
from penstock.testing.conformance.entrances import ScheduleConformance
from penstock.testing.conformance.leases import LeasesConformance
from penstock.testing.conformance.lifetime import LifetimeConformance
from penstock.testing.conformance.manifests import ManifestsConformance
from penstock.testing.conformance.opening import a_topic
from penstock.testing.conformance.parked import ParkedRowsConformance
from penstock.testing.conformance.threads import ThreadsConformance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def opening(directory: Path, clock: VirtualClock) -> Iterator[Callable[..., StateStore]]:
    with state_stores(directory, clock) as open_store:
        yield open_store


@pytest.fixture
def store(opening: Callable[..., StateStore]) -> StateStore:
    return opening()


@pytest.fixture
def topic(store: StateStore) -> TopicInfo:
    return a_topic(store)


class FileStateOpening:
    """Makes the conformance suite run on the small state."""

    @pytest.fixture(autouse=True)
    def _directories(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def open(self, clock: VirtualClock) -> Store:
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        create_databases(directory, STORE_ID, Platform(clock=clock))
        return StateStore(directory, MemoryStore(clock=clock), Platform(clock=clock))

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        assert isinstance(store, StateStore)
        store.memory._state.closed = False
        return StateStore(store.directory, store.memory, Platform(clock=clock))


class TestCursors(FileStateOpening, CursorsConformance):
    pass


class TestParkedRows(FileStateOpening, ParkedRowsConformance):
    pass


class TestLeases(FileStateOpening, LeasesConformance):
    pass


class TestSchedule(FileStateOpening, ScheduleConformance):
    pass


class TestManifests(FileStateOpening, ManifestsConformance):
    pass


class TestThreads(FileStateOpening, ThreadsConformance):
    pass


class TestLifetime(FileStateOpening, LifetimeConformance):
    pass


# --- group commit -----------------------------------------------------------------------------


class Traced:
    """A platform whose connections write down the statements that they run."""

    def __init__(self, clock: VirtualClock) -> None:
        self.statements: list[str] = []
        self.platform = Platform(clock=clock, connect=self.connect)

    def connect(self, path: Path) -> sqlite3.Connection:
        connection = connect_sqlite(path)
        if path.name == CONTROL:
            connection.set_trace_callback(self.statements.append)
        return connection

    def groups(self) -> int:
        return self.statements.count("BEGIN IMMEDIATE")


@contextmanager
def held_gate(store: StateStore) -> Iterator[None]:
    """Hold the turn to write `control.db`, as another process would."""
    gate = shared_gates(store.directory / "locks", store.platform).gate(CONTROL_GATE)
    with gate.turn("test", 5.0):
        yield


def in_threads(store: StateStore, *calls: Callable[[], object]) -> list[threading.Thread]:
    """Make these calls in threads, one after the other, and return when all have queued."""
    threads = []
    for number, call in enumerate(calls, 1):
        threads.append(threading.Thread(target=call))
        threads[-1].start()
        while len(store.databases.control._queue) < number:
            os.sched_yield()
    return threads


def test_calls_that_wait_for_the_turn_are_committed_together(
    opening: Callable[..., StateStore], clock: VirtualClock
) -> None:
    traced = Traced(clock)
    store = opening(traced.platform)
    topic = a_topic(store)
    subscribe(store, topic)
    before = traced.groups()
    answers: list[object] = []

    def step(slot: int) -> Callable[[], None]:
        return lambda: answers.append(commit(store, a_cursor(a_shard(topic, slot=slot), 0), settlement=b"%d" % slot))

    with held_gate(store):
        threads = in_threads(store, *(step(slot) for slot in range(6)))
    for thread in threads:
        thread.join()
    assert answers == [None] * 6
    assert traced.groups() - before == 1
    assert len(store.cursors.load(topic.log_id, "billing")) == 6
    assert len(store.cursors.settlements(10)) == 6


@pytest.mark.parametrize("first", range(4))
def test_a_call_that_fails_in_a_group_leaves_nothing_and_the_others_are_written(
    store: StateStore, topic: TopicInfo, first: int
) -> None:
    subscribe(store, topic)
    errors: list[BaseException] = []

    def failing() -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM subscriptions")
            raise RuntimeError("planted")

        try:
            store.databases.control.write(work)
        except RuntimeError as error:
            errors.append(error)

    def wrong() -> None:
        def work(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM subscriptions")
            connection.execute("INSERT INTO no_such_table VALUES (1)")

        try:
            store.databases.control.write(work)
        except StoreError as error:
            errors.append(error)

    with held_gate(store):
        calls = [lambda: acquired(store, "before"), failing, wrong, lambda: acquired(store, "after")]
        threads = in_threads(store, *calls[first:], *calls[:first])  # the first one has no savepoint
    for thread in threads:
        thread.join()
    assert sorted(type(error).__name__ for error in errors) == ["RuntimeError", "StoreError"]
    assert store.leases.holder("before")
    assert store.leases.holder("after")
    assert len(store.cursors.subscriptions()) == 1


def test_a_stalled_writer_is_told_to_everybody_who_waits_and_nothing_is_written(
    opening: Callable[..., StateStore],
) -> None:
    store = opening(stall_seconds=0.05)
    told: list[BaseException] = []

    def acquire() -> None:
        try:
            store.leases.acquire("lease", "a", 10)
        except WriterStalled as error:
            told.append(error)

    with held_gate(store):
        threads = in_threads(store, acquire, acquire)
        for thread in threads:
            thread.join()
    assert len(told) == 2
    assert told[0] is not told[1]
    assert store.leases.holder("lease") is None
    assert acquired(store).clean


def test_the_lead_is_handed_over_when_a_group_has_taken_its_time(
    opening: Callable[..., StateStore], clock: VirtualClock
) -> None:
    traced = Traced(clock)
    store = opening(traced.platform)
    before = traced.groups()

    def slow(connection: sqlite3.Connection) -> None:
        del connection
        clock.advance(1)

    with held_gate(store):
        threads = in_threads(store, *(lambda: store.databases.control.write(slow) for _ in range(3)))
    for thread in threads:
        thread.join()
    assert traced.groups() - before == 3


# --- parked payloads --------------------------------------------------------------------------


def payload_count(store: StateStore) -> int:
    found: int = store.databases.bulk.read(lambda bulk: bulk.execute("SELECT count(*) FROM payloads").fetchone()[0])
    return found


def test_a_crash_between_the_two_commits_leaves_no_row_and_its_payload_is_swept(
    opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opening()
    topic = a_topic(store)
    subscribe(store, topic)
    park(store, a_parked(a_shard(topic), 1))

    def killed(*_: object) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patch:
        patch.setattr(store.databases.control, "write", killed)
        with pytest.raises(SystemExit):
            park(store, a_parked(a_shard(topic), 2))
    assert payload_count(store) == 2
    again = opening()
    assert [row.offset for row in again.parked.page(billing(topic))] == [1]
    assert again.payloads.sweep() == 1
    assert payload_count(store) == 1
    assert [row.offset for row in store.parked.page(billing(topic))] == [1]


def test_a_payload_that_was_swept_before_its_row_was_written_is_written_again(
    opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opening(), opening()
    topic = a_topic(store)
    subscribe(store, topic)
    write = store.databases.control.write
    swept: list[int] = []

    def sweep_first(work: Callable[[sqlite3.Connection], Any]) -> Any:
        if not swept:
            swept.append(other.payloads.sweep())
        return write(work)

    monkeypatch.setattr(store.databases.control, "write", sweep_first)
    row = a_parked(a_shard(topic), 2)
    park(store, row)
    assert swept == [1]
    assert other.parked.page(billing(topic)) == [row]


def test_a_payload_that_is_doomed_but_not_removed_yet_is_not_referred_to(
    opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opening(), opening()
    topic = a_topic(store)
    subscribe(store, topic)
    write = store.databases.control.write

    def doomed_first(work: Callable[[sqlite3.Connection], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(other.payloads, "remove_doomed", lambda: 0)
            other.payloads.sweep()
        monkeypatch.undo()
        return write(work)

    monkeypatch.setattr(store.databases.control, "write", doomed_first)
    row = a_parked(a_shard(topic), 2)
    park(store, row)
    assert other.payloads.sweep() == 1
    assert store.parked.page(billing(topic)) == [row]


def test_a_row_with_the_same_event_is_replaced_without_writing_the_event_again(
    store: StateStore, topic: TopicInfo
) -> None:
    subscribe(store, topic)
    shard = a_shard(topic)
    park(store, a_parked(shard, 1, state="waiting"))
    version = store.databases.bulk.read(lambda bulk: bulk.execute("SELECT version FROM payloads").fetchall())
    park(store, a_parked(shard, 1, state="dead"))
    assert store.databases.bulk.read(lambda bulk: bulk.execute("SELECT version FROM payloads").fetchall()) == version
    changed = a_parked(shard, 1, event=an_event(b"other"))
    park(store, changed)
    assert store.payloads.remove_doomed() == 1
    assert store.parked.page(billing(topic)) == [changed]


def test_a_row_whose_event_is_replaced_meanwhile_gets_its_own_event(
    opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = opening(), opening()
    topic = a_topic(store)
    subscribe(store, topic)
    row = a_parked(a_shard(topic), 1)
    park(store, row)
    write = store.databases.control.write

    def replaced_first(work: Callable[[sqlite3.Connection], Any]) -> Any:
        monkeypatch.undo()
        park(other, a_parked(a_shard(topic), 1, event=an_event(b"other")))
        other.payloads.sweep()
        return write(work)

    monkeypatch.setattr(store.databases.control, "write", replaced_first)
    park(store, row)
    assert other.parked.page(billing(topic)) == [row]


def test_a_reader_between_a_replacement_and_its_sweep_gets_the_row_as_it_is(
    store: StateStore, topic: TopicInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe(store, topic)
    shard = a_shard(topic)
    park(store, a_parked(shard, 1))
    new = a_parked(shard, 1, event=an_event(b"new"))
    load = store.payloads.load

    def replaced_first(places: Any) -> Any:
        monkeypatch.undo()
        park(store, new)
        store.payloads.sweep()
        return load(places)

    monkeypatch.setattr(store.payloads, "load", replaced_first)
    assert store.parked.page(billing(topic)) == [new]


def test_payloads_of_what_is_refused_purged_or_deleted_do_not_stay(store: StateStore, topic: TopicInfo) -> None:
    subscribe(store, topic)
    subscribe(store, topic, "audit")
    shard, audit = a_shard(topic), a_shard(topic, name="audit")
    park(store, a_parked(shard, 1), a_parked(shard, 2), a_parked(audit, 1))
    gone = a_shard(topic, name="gone")
    row = a_parked(gone, 1)
    assert type(commit(store, parked=(row, a_parked(shard, 1, event=an_event(b"refused"))))) is UnknownSubscription
    assert store.parked.purge(billing(topic)) == 2
    store.cursors.delete_subscription(topic.log_id, "audit")
    store.payloads.remove_doomed()
    assert payload_count(store) == 0
    assert store.databases.bulk.read(lambda bulk: tallies.read_tally(bulk, SEALED_TABLES[BULK][0])).rows == 0


def test_texts_of_errors_may_hold_anything(store: StateStore, topic: TopicInfo) -> None:
    subscribe(store, topic)
    row = a_parked(a_shard(topic), 1, error_message="file \udcff\x00 not found")
    park(store, row)
    assert store.parked.page(billing(topic)) == [row]


# --- limits -----------------------------------------------------------------------------------


def test_rows_beyond_the_limit_are_refused_and_those_there_can_still_be_replaced(
    opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("leases", "manifests", "cursors", "schedule"):
        monkeypatch.setattr(f"penstock.stores.file.state.{module}.OTHER_ROWS_MAX", 2)
    store = opening(limits=replace(LIMITS, parked_rows_max=2, scheduled_rows_max=2))
    store.cursors._limits = commits.Limits(parked=2, settlements=2, cursors=2)
    topic = a_topic(store)

    def committed(**stated: Any) -> None:
        [refused] = store.cursors.commit([Commit(**stated)])
        if refused is not None:
            raise refused

    def schedule(number: int) -> None:
        row = Scheduled(id=str(number), log_id=topic.log_id, partition=0, due_at=0, event=an_event())
        store.schedule.add([row])

    writes: list[Callable[[int], object]] = [
        lambda number: subscribe(store, topic, ["billing", "audit", "lake"][number]),
        lambda number: committed(parked=(a_parked(a_shard(topic), number),)),
        lambda number: committed(cursors=(a_cursor(a_shard(topic, slot=number), 0),)),
        lambda number: acquired(store, str(number)),
        lambda number: store.manifests.prepare(Manifest(sink="lake", query="q", batch=number, body=b"")),
        schedule,
    ]
    for write in writes:
        for number in (0, 1, 1):
            write(number)
        with pytest.raises(StoreFull):
            write(2)
        write(0)
    committed(settlement=b"0")
    committed(settlement=b"1")
    with pytest.raises(StoreFull):
        committed(settlement=b"2", cursors=(a_cursor(a_shard(topic), 0),))
    store.cursors.forget_settlements(1)
    committed(settlement=b"2")
    for number in range(5):  # what is given back makes room
        store.leases.release(acquired(store, "0" if number == 0 else f"new-{number}"))
    # Each commit of a call counts those before it, and what is removed makes room.
    store.parked.purge(billing(topic))
    rows = [Commit(parked=(a_parked(a_shard(topic), offset),)) for offset in range(3)]
    assert [type(answer) for answer in store.cursors.commit(rows)] == [type(None), type(None), StoreFull]
    both = (a_parked(a_shard(topic), 0, state="done"), a_parked(a_shard(topic), 7))
    with pytest.raises(StoreFull):
        committed(parked=both)
    assert store.parked.count(billing(topic))["done"] == 0
    assert examine(store.directory, STORE_ID, Platform()) == []


# --- leases of others -------------------------------------------------------------------------


def test_a_fence_that_was_good_is_refused_once_another_process_has_its_lease(
    opening: Callable[..., StateStore],
) -> None:
    one, two = opening(member=1), opening(member=2)
    topic = a_topic(one)
    subscribe(one, topic)
    lease, other = acquired(one, "shard", "a"), acquired(one, "other", "a")
    step = Commit(cursors=(a_cursor(a_shard(topic), 0),), fences=(lease.fence, other.fence))
    for _ in range(2):  # the second time it is known
        assert one.cursors.commit([step]) == [None]
    one.leases.release(lease, clean=False)
    assert one.cursors.commit([step]) == [None]  # nobody else has had it since
    second = acquired(two, "shard", "b")
    assert [type(answer) for answer in one.cursors.commit([step])] == [Fenced]
    step = msgspec.structs.replace(step, fences=(second.fence, other.fence))
    assert one.cursors.commit([step]) == [None]
    two.leases.release(second)  # and leaves nothing behind
    assert [type(answer) for answer in one.cursors.commit([step])] == [Fenced]
    assert one.cursors.commit([Commit(fences=(other.fence,))]) == [None]


def test_the_lease_of_a_dead_process_is_free_at_once_and_not_clean(opening: Callable[..., StateStore]) -> None:
    dead: set[int] = set()
    first, second = (opening(member=member, alive=lambda member: member not in dead) for member in (1, 2))
    lease = acquired(first, owner="a", seconds=1000)
    assert second.leases.holder("lease") == lease
    assert second.leases.acquire("lease", "b", 10) is None
    dead.add(1)
    assert first.leases.holder("lease") == lease  # a process knows of itself that it lives
    assert second.leases.holder("lease") is None
    assert not acquired(second, owner="b").clean
    assert first.leases.renew([lease], 10) == []


def test_a_lease_of_another_boot_has_expired(opening: Callable[..., StateStore], clock: VirtualClock) -> None:
    lease = acquired(opening(), owner="a", seconds=10**9)
    booted = opening(Platform(clock=clock, boot_id=bytes(16)))
    assert booted.leases.holder("lease") is None
    new = acquired(booted, owner="b")
    assert (new.clean, new.epoch > lease.epoch) == (False, True)


# --- what the log asks ------------------------------------------------------------------------


def test_the_log_is_synced_once_per_partition_up_to_the_highest_cursor(store: StateStore, topic: TopicInfo) -> None:
    fill(store, topic.partitions[0], 9)
    subscribe(store, topic)
    steps = [
        Commit(cursors=(a_cursor(a_shard(topic, slot=slot), offset),)) for slot, offset in ((0, 3), (1, 8), (2, 5))
    ]
    assert store.cursors.commit(steps) == [None] * 3
    assert store.view.synced == [(topic.partitions[0], 8)]


def test_the_witness_of_a_partition_is_the_furthest_cursor_or_parked_row(store: StateStore, topic: TopicInfo) -> None:
    zero, one = topic.partitions
    fill(store, zero, 9)
    assert store.witnesses.witness(zero) == 0
    subscribe(store, topic)
    subscribe(store, topic, "audit")
    commit(store, a_cursor(a_shard(topic), 3), a_cursor(a_shard(topic, slot=1), 5))
    assert (store.witnesses.witness(zero), store.witnesses.witness(one)) == (5, 0)
    park(store, a_parked(a_shard(topic, name="audit"), 7), a_parked(a_shard(topic, partition=1), 40))
    assert (store.witnesses.witness(zero), store.witnesses.witness(one)) == (8, 41)


def test_the_slowest_protected_subscription_is_named(store: StateStore, topic: TopicInfo) -> None:
    zero, one = topic.partitions
    fill(store, zero, 9)
    assert store.witnesses.protection(zero, 2) is None
    for name, protect in (("audit", True), ("billing", True), ("lake", False)):
        subscribe(store, topic, name, protect=protect)
        commit(store, a_cursor(a_shard(topic, name=name), 5 if name != "lake" else 1))
    commit(store, a_cursor(a_shard(topic, slot=1), 4))
    assert store.witnesses.protection(zero, 2) == ("billing", 4)
    assert store.witnesses.protection(one, 2) == ("audit", 2)


def kept_log_ids(store: StateStore) -> set[str]:
    """Return the logs that anything is kept for."""
    tables = ("subscriptions", "cursors", "parked", "schedule", "sequences")
    statement = " UNION ".join(f"SELECT log_id FROM {table}" for table in tables)
    return {log_id for (log_id,) in store.databases.control.read(lambda found: found.execute(statement).fetchall())}


def test_what_belongs_to_a_log_is_forgotten_with_it(store: StateStore) -> None:
    topic = populated(store)
    other = a_topic(store, "payments")
    subscribe(store, other)
    assert kept_log_ids(store) == {topic.log_id, other.log_id}
    store.log.delete_topic(topic.log_id)
    assert kept_log_ids(store) == {other.log_id}
    assert payload_count(store) == 0
    assert store.schedule.page() == []
    assert examine(store.directory, STORE_ID, Platform()) == []


def test_what_is_written_while_its_topic_is_deleted_does_not_stay(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.databases.control.write

    def deleted_first(work: Callable[[sqlite3.Connection], Any]) -> Any:
        monkeypatch.undo()
        [living] = store.log.topics()
        store.log.delete_topic(living.log_id)
        return write(work)

    def schedule(topic: TopicInfo) -> None:
        store.schedule.add([Scheduled(id="1", log_id=topic.log_id, partition=0, due_at=0, event=an_event())])

    calls: list[Callable[[TopicInfo], object]] = [lambda topic: subscribe(store, topic), schedule]
    for call in calls:
        topic = a_topic(store)
        monkeypatch.setattr(store.databases.control, "write", deleted_first)
        with pytest.raises(TopicDeleted):
            call(topic)
        assert kept_log_ids(store) == set()
    topic = a_topic(store)
    subscribe(store, topic)
    monkeypatch.setattr(store.databases.control, "write", deleted_first)
    assert type(commit(store, a_cursor(a_shard(topic), 0))) is TopicDeleted


# --- several processes ------------------------------------------------------------------------


def test_two_openings_see_each_others_writes_at_once(opening: Callable[..., StateStore]) -> None:
    one, two = opening(), opening()
    topic = a_topic(one)
    fill(one, topic.partitions[0], 20)
    subscribe(one, topic)
    shard = a_shard(topic)
    for step in range(10):
        here, there = (one, two) if step % 2 else (two, one)
        assert commit(here, a_cursor(shard, step), settlement=b"%d" % step) is None
        assert [cursor.next_offset for cursor in there.cursors.load(topic.log_id, "billing")] == [step]
        # Nobody relies on what he remembers of a cursor that another has moved.
        if step:
            assert commit(there, a_cursor(shard, step - 1)) is not None
    assert [row.number for row in two.cursors.settlements(20)] == list(range(1, 11))


def test_a_reading_connection_cannot_write(store: StateStore) -> None:
    with pytest.raises(StoreError, match="readonly"):
        store.databases.control.read(lambda connection: connection.execute("DELETE FROM leases"))
    acquired(store)


CHILD = """
import sys
from pathlib import Path
from penstock.stores.file.state.database import open_databases
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.state.leases import FileLeases
from penstock.stores.file.platform import Platform

class Open:
    def check_open(self): pass

directory, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
platform = Platform()
gates = shared_gates(directory / "locks", platform)
databases = open_databases(directory, "5e" * 16, platform, gates, stall_seconds=60)
leases = FileLeases(databases, Open(), platform, member=0, is_alive=lambda member: True)
print("ready", flush=True)
sys.stdin.readline()
for number in range(count):
    lease = leases.acquire(f"{name}/{number}", name, 1000)
    print(lease.name, lease.epoch, flush=True)
"""


def test_processes_write_at_the_same_time_and_a_killed_one_harms_nobody(directory: Path) -> None:
    create_databases(directory, STORE_ID, Platform())
    counts = {"a": 60, "b": 60, "c": 60, "killed": 10**6}
    children = {
        name: subprocess.Popen(
            [sys.executable, "-c", CHILD, str(directory), name, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, count in counts.items()
    }
    try:
        for child in children.values():
            assert child.stdout
            assert child.stdout.readline() == "ready\n"
        for child in children.values():
            assert child.stdin
            child.stdin.write("go\n")
            child.stdin.flush()
        victim = children["killed"]
        assert victim.stdout
        lines = [victim.stdout.readline() for _ in range(10)]
        victim.send_signal(signal.SIGKILL)
        for child in children.values():
            # Nobody knows whether the victim finished its last line.
            lines += [line for line in child.communicate(timeout=60)[0].splitlines(keepends=True) if line[-1] == "\n"]
        told = {line.split()[0]: int(line.split()[1]) for line in lines}
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
            child.communicate()
    assert [children[name].returncode for name in counts] == [0, 0, 0, -signal.SIGKILL]
    assert len(set(told.values())) == len(told) >= 190
    assert examine(directory, STORE_ID, Platform()) == []
    memory = MemoryStore(clock=SystemClock())
    store = StateStore(directory, memory, Platform())
    for name, epoch in told.items():
        lease = store.leases.holder(name)
        assert lease is not None
        assert lease.epoch == epoch
    store.close()


def test_a_forked_child_shares_no_connection_and_its_own_commits_outlive_the_parents_close(
    opening: Callable[..., StateStore], directory: Path
) -> None:
    store = opening()
    acquired(store, "parents")
    waiting, go = os.pipe()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        code = 1
        try:
            own = StateStore(directory, store.memory, Platform())
            acquired(own, "childs")
            os.write(tell, b"x")
            os.read(waiting, 1)
            acquired(own, "after the parent closed")
            code = 0
        finally:
            os._exit(code)
    os.read(ready, 1)
    acquired(store, "parents again")
    store.databases.close()
    os.write(go, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (waiting, go, ready, tell):
        os.close(descriptor)
    again = opening(Platform())
    found = [again.leases._control.read(lambda connection: connection.execute("SELECT name FROM leases").fetchall())]
    assert sorted(name for (name,) in found[0]) == ["after the parent closed", "childs", "parents", "parents again"]


def test_a_fork_waits_for_whoever_is_at_work_and_leaves_the_child_nothing(
    store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FORK_PATIENCE_SECONDS", 0.01)
    lending = store.databases.control._connections
    reader = lending.lend_reader()  # somebody who does not finish in time
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        kept = [connection for abandoned in connections._abandoned for connection in abandoned]  # type: ignore[attr-defined]
        os._exit(0 if kept == [reader] and lending._closed else 1)
    status = os.waitpid(child, 0)[1]
    lending.take_back(reader, reading=True)
    assert status == 0
    assert acquired(store)


def test_a_fork_lets_a_writer_of_one_file_look_into_the_other(store: StateStore) -> None:
    control, bulk = store.databases.control, store.databases.bulk
    begun = threading.Event()

    def work(connection: sqlite3.Connection) -> None:
        del connection
        begun.set()
        while not control._connections._forking:
            os.sched_yield()
        bulk.read(lambda connection: connection.execute("SELECT 1").fetchone())

    writer = threading.Thread(target=lambda: control.write(work))
    writer.start()
    begun.wait()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        os._exit(0 if not any(connections._abandoned) else 1)
    writer.join()
    assert os.waitpid(child, 0)[1] == 0
