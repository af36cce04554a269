"""The file store with several real processes: killed, frozen, forked, all at once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from tests.file_children import TOPIC, Child, contended, describe, open_at, payload_of, send, the_partition

from penstock.batch import Batch
from penstock.errors import TopicDeleted, WriterStalled
from penstock.rows import Partition, TopicSettings
from penstock.testing.conformance.builders import PLENTY, a_shard, acquired, payloads, subscribe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.stores.file.store import FileStore

    Start = Callable[..., Child]

PROCESSES = 8
PATIENT = {"stall_seconds": 60.0}


@pytest.fixture
def store(root: Path) -> Iterator[FileStore]:
    store = open_at(root)
    the_partition(store)
    yield store
    store.close()


def ready(*children: Child) -> None:
    for child in children:
        assert child.hear() == "ready"


def go(*children: Child) -> None:
    for child in children:
        child.tell("go")


# --- a process is killed ----------------------------------------------------------------------


def test_what_was_acknowledged_outlives_a_kill_at_any_moment(root: Path, start: Start) -> None:
    chance = random.Random(3)
    acked: dict[int, bytes] = {}
    sequence = 0
    for _ in range(3):
        child = start(
            "publish", root=str(root), number=1, first=sequence, until=1 << 40, segment_bytes=6000, marker_seconds=0.01
        )
        ready(child)
        go(child)
        answers = [child.hear() for _ in range(chance.randrange(1, 60))]
        child.kill()
        answers += child.hear_all()
        acked |= {offset + index: payload_of(1, first + index) for first, offset in answers for index in range(3)}
        store = open_at(root)
        partition = the_partition(store)
        stored = payloads(store, partition)
        assert {offset: stored[offset] for offset in acked} == acked
        # At most what was under way when it died is there besides, perhaps only once the log is healed.
        last_first, last_offset = answers[-1]
        assert len(stored) - (last_offset + 3) in {0, 3}
        again = send(store, partition, 1, last_first, 3)
        assert again.offsets is not None
        assert (again.offsets.start, again.duplicate) == (last_offset, True)
        unknown = send(store, partition, 1, last_first + 3, 3)
        assert unknown.duplicate or len(stored) == last_offset + 3
        assert unknown.offsets is not None
        assert unknown.offsets.start == last_offset + 3
        sequence = last_first + 6
        store.close()
    store = open_at(root)
    assert payloads(store, the_partition(store)) == [payload_of(1, number) for number in range(sequence)]
    store.close()


def test_when_a_process_is_killed_in_its_turn_the_others_go_on_at_once(
    root: Path, start: Start, store: FileStore
) -> None:
    partition = the_partition(store)
    assert describe(send(store, partition, 9, 0, 2))["start"] == 0
    holder, waiter = (start("obey", root=str(root), **PATIENT) for _ in range(2))
    ready(holder, waiter)
    assert holder.ask("hold", 1, 0, 3) == "in turn"
    waiter.tell("send", 2, 0, 3)
    holder.kill()
    # It would take a minute to lose patience.
    answer = waiter.hear()
    assert not answer["duplicate"]
    # What the dead one was about to publish is stored, or not; if it is, a repeat is recognised.
    assert answer["start"] in {2, 5}
    again = describe(send(store, partition, 1, 0, 3))
    assert again["duplicate"] == (answer["start"] == 5)
    expected = [payload_of(9, 0), payload_of(9, 1)]
    for number in (1, 2) if again["duplicate"] else (2, 1):
        expected += [payload_of(number, sequence) for sequence in range(3)]
    assert payloads(store, partition) == expected


@pytest.mark.parametrize("ending", ["killed", "resumed"])
def test_when_a_process_is_frozen_in_its_turn_the_others_are_told_who_and_nothing_is_written(
    root: Path, start: Start, store: FileStore, ending: str
) -> None:
    partition = the_partition(store)
    holder = start("obey", root=str(root))
    impatient = start("obey", root=str(root), stall_seconds=0.5)
    ready(holder, impatient)
    assert holder.ask("hold", 1, 0, 3) == "in turn"
    holder.signal(signal.SIGSTOP)
    for _ in range(2):
        refused = impatient.ask("send", 2, 0, 3)
        assert (refused["error"], refused["pid"]) == ("WriterStalled", holder.pid)
    # Reading never waits for a writer.
    assert payloads(store, partition) == []
    if ending == "killed":
        holder.kill()
        first = impatient.ask("send", 2, 0, 3)
        assert not first["duplicate"]
        assert first["start"] in {0, 3}
    else:
        holder.signal(signal.SIGCONT)
        first = holder.ask("go on")
        assert (first["start"], first["duplicate"]) == (0, False)
        second = impatient.ask("send", 2, 0, 3)
        assert (second["start"], second["duplicate"]) == (3, False)
        assert holder.ask("send", 1, 0, 3) == {**first, "duplicate": True}
    stored = payloads(store, partition)
    mine = [payload_of(2, sequence) for sequence in range(3)]
    theirs = [payload_of(1, sequence) for sequence in range(3)]
    assert stored in ([theirs + mine] if ending == "resumed" else [theirs + mine, mine])


def test_a_turn_of_another_opening_in_the_same_process_is_waited_for_and_then_given_up(root: Path) -> None:
    one, other = open_at(root, stall_seconds=0.2), open_at(root, stall_seconds=0.2)
    partition = the_partition(one)
    with one.log.handle(partition).writer.turn(), pytest.raises(WriterStalled):
        send(other, partition, 1, 0, 1)
    assert not send(other, partition, 1, 0, 1).duplicate
    one.close()
    other.close()


# --- many at once -----------------------------------------------------------------------------


def test_eight_processes_publish_to_one_topic_and_nothing_is_lost_and_turns_are_fair(
    root: Path, start: Start, store: FileStore
) -> None:
    until = 6_400
    children = [
        start("publish", root=str(root), number=number, per_append=4, until=until, segment_bytes=40_000)
        for number in range(1, PROCESSES + 1)
    ]
    ready(*children)
    go(*children)
    answers = {number: child.hear_all() for number, child in enumerate(children, 1)}
    assert [child.end() for child in children] == [0] * PROCESSES
    acked = {
        offset + index: payload_of(number, first + index)
        for number, some in answers.items()
        for first, offset in some
        for index in range(4)
    }
    assert len(acked) == 4 * sum(map(len, answers.values()))
    assert dict(enumerate(payloads(store, the_partition(store)))) == acked
    # Not from the beginning, where some may not have come yet, to the moment when the first of them stops.
    turns = Counter(number for number, some in answers.items() for _, offset in some if until // 4 <= offset < until)
    assert len(turns) == PROCESSES
    assert min(turns.values()) / max(turns.values()) >= 0.3


def test_a_reader_that_follows_while_segments_roll_sees_every_offset_once(
    root: Path, start: Start, store: FileStore
) -> None:
    until = 600
    child = start("publish", root=str(root), number=1, until=until, segment_bytes=1200, allocate_bytes=512)
    ready(child)
    partition = the_partition(store)
    heads = store.log.heads([partition])
    go(child)
    found: list[bytes] = []
    segments = set()
    while len(found) < until:
        [head] = heads.read().tolist()
        for item in store.log.read(partition, len(found), bytes_max=2000):
            assert isinstance(item, Batch)
            assert item.start == len(found)
            found += [event.data for event in item]
        assert len(found) >= head or store.log.read(partition, len(found), bytes_max=1)
        segments.add(store.log.tail(store.log.handle(partition)).segment_base)
    assert found == [payload_of(1, number) for number in range(until)]
    assert len(segments) > 5
    assert child.end() == 0


def test_eight_processes_agree_on_every_run_lease_manifest_and_cursor(
    root: Path, start: Start, store: FileStore
) -> None:
    rounds = 8
    partition = the_partition(store)
    [topic] = store.log.topics()
    subscribe(store, topic)
    others = range(2, PROCESSES + 1)
    children = [
        start("contend", root=str(root), number=number, rounds=rounds, segment_bytes=4000, **PATIENT)
        for number in others
    ]
    ready(*children)
    go(*children)
    results: list[dict[str, Any]] = [contended(store, 1, rounds)]
    results += [child.hear() for child in children]
    assert [child.end() for child in children] == [0] * len(children)

    for step in range(rounds):
        answers = [result["shared"][step] for result in results]
        assert len({(answer["start"], answer["stop"]) for answer in answers}) == 1
        assert [answer["duplicate"] for answer in answers].count(False) == 1
        assert len({result["manifests"][step] for result in results}) == 1
    assert not any(answer["duplicate"] for result in results for answer in result["own"])
    stored = payloads(store, partition)
    assert len(stored) == rounds * (3 + 2 * PROCESSES)
    wanted = [payload_of(0, number) for number in range(rounds * 3)]
    wanted += [payload_of(number, step) for number in range(1, PROCESSES + 1) for step in range(rounds * 2)]
    assert sorted(stored) == sorted(wanted)
    leases = [tuple(lease) for result in results for lease in result["leases"]]
    assert sorted(name for name, _ in leases) == sorted(f"lease-{step}" for step in range(rounds))
    assert len({epoch for _, epoch in leases}) == rounds
    assert [result["refused"] for result in results] == [0] * PROCESSES
    cursors = {cursor.shard: cursor.next_offset for cursor in store.cursors.load(topic.log_id, "billing")}
    assert cursors == {a_shard(topic, slot=number): results[number - 1]["own"][-1]["stop"] for number in range(1, 9)}


# --- repeats ----------------------------------------------------------------------------------


def test_a_repeat_gets_its_first_offsets_after_a_restart_a_roll_and_from_another_process(
    root: Path, start: Start
) -> None:
    store = open_at(root, segment_bytes=1500)
    partition = the_partition(store)
    first = [send(store, partition, number, 0, 4) for number in (1, 2)]
    assert [answer.duplicate for answer in first] == [False, False]
    for sequence in range(40):
        send(store, partition, 3, sequence, 1)
    tail = store.log.tail(store.log.handle(partition))
    assert tail.segment_base > 8
    store.close()
    store = open_at(root, segment_bytes=1500)
    assert send(store, partition, 1, 0, 4) == first[0]._replace(duplicate=True)
    child = start("obey", root=str(root), segment_bytes=1500)
    ready(child)
    assert child.ask("send", 2, 0, 4) == {**describe(first[1]), "duplicate": True}
    # What a process has not seen because another one wrote it is caught up with, too.
    new = child.ask("send", 4, 0, 2)
    assert not new["duplicate"]
    assert describe(send(store, partition, 4, 0, 2)) == {**new, "duplicate": True}
    assert len(payloads(store, partition)) == 8 + 40 + 2
    store.close()


# --- forks ------------------------------------------------------------------------------------


def test_a_forked_child_is_told_to_open_its_own_and_nothing_of_its_parent_is_given_up(root: Path, start: Start) -> None:
    parent = start("fork", root=str(root))
    inherited = parent.hear()["inherited"]
    assert inherited["error"] == "StoreClosed"
    assert "before a fork" in inherited["text"]
    assert parent.hear()["child"]["start"] == 1
    assert parent.hear() == {"status": 0}
    assert parent.hear()["parent"]["start"] == 2
    # The second child came while a thread of its parent was in its turn.
    stalled = parent.hear()
    assert (stalled["child"]["error"], stalled["child"]["pid"]) == ("WriterStalled", stalled["parent_pid"])
    assert stalled["parent_pid"] == parent.pid
    assert parent.hear() == {"status": 0}
    assert parent.hear() == "still in turn"
    store = open_at(root, stall_seconds=0.3)
    partition = the_partition(store)
    with pytest.raises(WriterStalled) as raised:
        send(store, partition, 3, 0, 1)
    assert raised.value.pid == parent.pid
    # Nor has a child that closed what it inherited taken its parent out of the list of members.
    assert any(f'"process":{parent.pid},' in path.read_text() for path in (root / "members").iterdir())
    lease = store.leases.holder("lease")
    assert lease is not None
    assert lease.owner == "parent"
    parent.tell("go on")
    assert parent.hear()["held"]["start"] == 3
    assert parent.hear()["parent"]["start"] == 4
    assert parent.end() == 0
    assert payloads(store, partition) == [payload_of(number, sequence) for number, sequence in FORK_ORDER]
    store.close()


FORK_ORDER = [(1, 0), (2, 0), (1, 1), (1, 2), (1, 3)]


# --- a topic is deleted -----------------------------------------------------------------------


def test_whoever_has_a_deleted_topic_open_is_told_even_if_its_place_is_taken(root: Path, start: Start) -> None:
    store = open_at(root)
    partition = the_partition(store)
    child = start("obey", root=str(root))
    ready(child)
    assert child.ask("send", 1, 0, 3)["start"] == 0
    assert child.ask("heads") == [3]
    slot = store.log.topic_directory.entry(partition.log_id).slot
    store.log.delete_topic(partition.log_id)
    renewed = the_partition(store)
    assert renewed != partition
    assert store.log.topic_directory.entry(renewed.log_id).slot == slot
    for _ in range(2):
        assert child.ask("send", 1, 3, 3)["error"] == "TopicDeleted"
        assert child.ask("read", 0)["error"] == "TopicDeleted"
        assert child.ask("heads") == [-1]
        # Nothing went into the topic that has taken its place, however much that one grows.
        first = len(payloads(store, renewed))
        assert send(store, renewed, 2, first, 2).offsets is not None
        assert payloads(store, renewed) == [payload_of(2, sequence) for sequence in range(first + 2)]
    assert child.ask("renew_topic") == renewed.log_id
    assert child.ask("send", 1, 3, 3) == {"start": 4, "stop": 7, "duplicate": False, "refused": None}
    store.close()


def test_a_deletion_waits_for_the_turn_and_one_that_was_given_up_is_finished_at_the_next_opening(
    root: Path, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_at(root, stall_seconds=0.3)
    partition = the_partition(store)
    child = start("obey", root=str(root))
    ready(child)
    assert child.ask("hold", 1, 0, 3) == "in turn"
    store.log.delete_topic(partition.log_id)
    assert "what is left of it stays for now" in caplog.text
    # What is acknowledged now is acknowledged by the topic that still was when its turn began.
    assert child.ask("go on")["start"] == 0
    assert child.ask("send", 1, 3, 1)["error"] == "TopicDeleted"
    assert store.log.topics() == []
    with pytest.raises(TopicDeleted):
        send(store, partition, 1, 3, 1)
    store.close()
    assert (root / "topics" / partition.log_id).exists()
    store = open_at(root)
    assert not (root / "topics" / partition.log_id).exists()
    for use in (
        lambda: store.log.read(partition, 0, bytes_max=PLENTY),
        lambda: store.log.heads([partition]),
        lambda: send(store, partition, 1, 3, 1),
    ):
        with pytest.raises(TopicDeleted):
            use()
    assert child.ask("read", 0)["error"] == "TopicDeleted"
    assert child.ask("heads") == [-1]
    store.close()


def test_the_slots_of_a_deleted_topic_are_reused_without_its_past(root: Path) -> None:
    store = open_at(root)
    old = store.log.create_topic("old", TopicSettings(partitions=3))
    kept = store.log.create_topic("kept", TopicSettings())
    for partition in (*old.partitions, *kept.partitions):
        send(store, partition, 1, 0, 5)
    heads = store.log.heads([*old.partitions, *kept.partitions])
    store.log.delete_topic(old.log_id)
    new = store.log.create_topic("new", TopicSettings(partitions=2))
    entries = {entry.topic.name: entry.slot for entry in store.log.topic_directory.entries()}
    assert entries["new"] < entries["kept"]
    assert heads.read().tolist() == [-1, -1, -1, 5]
    for partition in new.partitions:
        assert payloads(store, partition) == []
        # The same producer and sequence are news here.
        assert describe(send(store, partition, 1, 0, 5))["duplicate"] is False
    assert heads.read().tolist() == [-1, -1, -1, 5]
    assert payloads(store, Partition(kept.log_id, 0)) == [payload_of(1, sequence) for sequence in range(5)]
    store.close()


# --- members ----------------------------------------------------------------------------------


def test_the_lease_of_a_killed_process_is_free_at_once_and_its_member_file_is_swept(
    root: Path, start: Start, store: FileStore
) -> None:
    child = start("obey", root=str(root))
    ready(child)
    assert child.ask("acquire", "mover", 3600) is True
    assert store.leases.acquire("mover", "me", 10) is None
    assert len(list((root / "members").iterdir())) == 2
    child.signal(signal.SIGSTOP)
    assert store.leases.acquire("mover", "me", 10) is None  # a frozen one may wake up
    child.kill()
    lease = acquired(store, "mover", "me")
    assert not lease.clean
    another = open_at(root)
    told = [path.read_text() for path in (root / "members").iterdir()]
    assert len(told) == 2
    assert all(f'"process":{os.getpid()}' in text for text in told)
    another.close()
    assert len(list((root / "members").iterdir())) == 1
    assert TOPIC in {topic.name for topic in store.log.topics()}
