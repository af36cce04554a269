"""A tail record that cannot be read in a machine that runs: what readers see, and who mends it."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from penstock.errors import StoreFull, TopicDeleted, WritingStopped
from penstock.offsets import Range
from penstock.rows import TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.recovery import AGAIN_SECONDS
from penstock.stores.file.store import FileStore
from penstock.stores.file.tail import RECORD_BYTES, State
from penstock.testing.conformance.builders import (
    a_cursor,
    a_part,
    a_shard,
    append,
    commit,
    fill,
    payloads,
    subscribe,
)
from penstock.testing.machine import ROOT, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.rows import Partition, TopicInfo

SMALL = FileSettings(segment_bytes=3_000, allocate_bytes=1_024, marker_seconds=3_600.0)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(7)
    yield machine
    machine.turn_off()


def opened(machine: Machine) -> FileStore:
    return FileStore(ROOT, settings=SMALL, platform=machine.platform)


@pytest.fixture
def store(machine: Machine) -> FileStore:
    return opened(machine)


@pytest.fixture
def topic(store: FileStore) -> TopicInfo:
    return store.log.create_topic("orders", TopicSettings())


@pytest.fixture
def partition(topic: TopicInfo) -> Partition:
    return topic.partitions[0]


def tear(machine: Machine) -> bytes:
    """Let the second half of the first record be another's, and return what is there now."""
    content = machine.disk.file(ROOT / "tails").content
    content[RECORD_BYTES // 2 : RECORD_BYTES] = bytes(reversed(content[RECORD_BYTES // 2 : RECORD_BYTES]))
    return record(machine)


def record(machine: Machine) -> bytes:
    return bytes(machine.disk.file(ROOT / "tails").content[:RECORD_BYTES])


def fail_to_copy(machine: Machine, code: int, operation: str = "write", file: str = "unnamed.seg") -> None:
    """Let every attempt to make a segment fail from now on."""

    def refuse(described: str) -> None:
        if described.startswith(f"{operation} ") and described.endswith(file):
            raise OSError(code, os.strerror(code))

    machine.on_step = refuse


def heal_at_last(machine: Machine) -> None:
    machine.on_step = lambda _: None


def seen(store: FileStore, partition: Partition) -> tuple[Range, list[bytes], int, int]:
    """Return what readers see of the log, in all the ways in which they look."""
    [head] = store.log.heads([partition]).read().tolist()
    return store.log.bounds(partition), payloads(store, partition), head, store.log.find_time(partition, 1 << 60)


def whole(count: int, first: int = 0) -> tuple[Range, list[bytes], int, int]:
    return Range(first, count), [b"%d" % number for number in range(first, count)], count, count


# --- the log could not be copied --------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "failing"),
    [
        (errno.ENOSPC, ("write", "unnamed.seg")),
        (errno.EIO, ("write", "unnamed.seg")),
        (errno.EIO, ("sync", ".seg")),
        (errno.EIO, ("sync directory", "0")),
    ],
)
def test_readers_see_no_less_than_before_while_a_log_cannot_be_copied(
    machine: Machine, store: FileStore, partition: Partition, code: int, failing: tuple[str, str]
) -> None:
    fill(store, partition, 20)
    before = seen(store, partition)
    assert before == whole(20)
    torn = tear(machine)
    fail_to_copy(machine, code, *failing)
    for _ in range(3):
        assert seen(store, partition) == before
        machine.clock.advance(AGAIN_SECONDS)
    assert record(machine) == torn  # nothing that is less was told to others


def test_a_process_that_reads_alone_sees_all_that_is_proven_and_heals_the_log_when_it_can(
    machine: Machine, store: FileStore, topic: TopicInfo, partition: Partition
) -> None:
    fill(store, partition, 20)
    tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    # What proves that an event is durable is the next one, or a cursor that has passed it.
    reader = opened(machine)
    assert seen(reader, partition) == whole(19)
    subscribe(store, topic)
    assert commit(store, a_cursor(a_shard(topic), 20)) is None
    reader = opened(machine)
    assert seen(reader, partition) == whole(20)
    with pytest.raises(StoreFull):
        append(reader, partition, a_part(b"x"))
    heal_at_last(machine)
    again = opened(machine)
    assert seen(again, partition) == whole(20)
    assert again.log.tail(again.log.handle(partition)).state == State.OPEN


def test_a_log_that_could_not_be_copied_is_tried_again_by_who_reads_and_not_at_every_read(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 5)
    torn = tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    assert seen(store, partition) == whole(5)
    attempts = len(machine.operations)
    for _ in range(10):
        assert seen(store, partition) == whole(5)
    assert len(machine.operations) == attempts
    heal_at_last(machine)
    assert record(machine) == torn
    machine.clock.advance(AGAIN_SECONDS)
    assert store.log.read(partition, 5, bytes_max=1_000) == []
    assert record(machine) != torn
    assert seen(opened(machine), partition) == whole(5)
    [answer] = append(store, partition, a_part(b"5"))
    assert answer.offsets == Range(5, 6)


def test_a_disk_that_fails_stops_writing_and_not_reading_and_whoever_opens_the_store_anew_heals_it(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 5)
    tear(machine)
    fail_to_copy(machine, errno.EIO)
    assert seen(store, partition) == whole(5)
    heal_at_last(machine)
    machine.clock.advance(AGAIN_SECONDS)
    with pytest.raises(WritingStopped):
        append(store, partition, a_part(b"5"))
    assert seen(store, partition) == whole(5)
    assert seen(opened(machine), partition) == whole(5)
    assert seen(store, partition) == whole(5)


def test_a_segment_without_events_ends_where_it_begins_for_who_cannot_copy_it(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 5)
    assert store.log.trim(partition, 5) == 5
    tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    assert seen(opened(machine), partition) == whole(5, 5)


def test_a_process_that_writes_no_more_believes_nothing_of_a_tail_that_is_another_by_now(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 5)
    tear(machine)
    fail_to_copy(machine, errno.EIO)
    assert seen(store, partition) == whole(5)
    heal_at_last(machine)
    other = opened(machine)
    append(other, partition, a_part(b"5"))
    tear(machine)
    with pytest.raises(WritingStopped):
        store.log.bounds(partition)
    assert seen(other, partition) == whole(6)
    assert seen(store, partition) == whole(6)


def test_what_another_process_healed_is_seen_at_once(machine: Machine, store: FileStore, partition: Partition) -> None:
    fill(store, partition, 5)
    tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    assert seen(store, partition) == whole(5)
    heal_at_last(machine)
    other = opened(machine)
    append(other, partition, a_part(b"5"))
    assert seen(store, partition) == whole(6)
    # And torn once more, what was known of the first time is not believed.
    tear(machine)
    assert seen(store, partition) == whole(6)


def test_a_topic_that_is_deleted_while_its_log_cannot_be_copied_is_gone(
    machine: Machine, store: FileStore, topic: TopicInfo, partition: Partition
) -> None:
    fill(store, partition, 5)
    heads = store.log.heads([partition])
    tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    assert seen(store, partition) == whole(5)
    opened(machine).log.delete_topic(topic.log_id)
    machine.clock.advance(AGAIN_SECONDS)
    calls: list[Callable[[], object]] = [
        lambda: store.log.bounds(partition),
        lambda: store.log.read(partition, 0, bytes_max=1_000),
    ]
    for call in calls:
        with pytest.raises(TopicDeleted):
            call()
    assert heads.read().tolist() == [-1]


def test_a_topic_whose_deletion_did_not_reach_the_tail_is_gone_all_the_same(
    machine: Machine, store: FileStore, topic: TopicInfo, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, partition, 5)
    tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    assert seen(store, partition) == whole(5)
    other = opened(machine)
    monkeypatch.setattr(other.log, "_finish_deletion", lambda *_: None)
    other.log.delete_topic(topic.log_id)
    machine.clock.advance(AGAIN_SECONDS)
    with pytest.raises(TopicDeleted):
        store.log.bounds(partition)


class Killed(BaseException):
    """What a test raises where a process is killed."""


def test_a_reader_that_is_killed_while_it_heals_leaves_no_shorter_log(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 5)
    store.log.trim(partition, 3)
    expected = whole(5, store.log.bounds(partition).start)
    tear(machine)
    steps = 0
    finished = False
    while not finished:
        first = machine.after_kill()
        left = [steps]

        def kill(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        reader = opened(first)
        first.on_step = kill
        try:
            assert seen(reader, partition) == expected
            finished = True
        except Killed:
            steps += 1
        first.on_step = lambda _: None
        for full in (True, False):
            second = first.after_kill()
            if full:
                fail_to_copy(second, errno.ENOSPC)
            survivor = opened(second)
            bounds = survivor.log.bounds(partition)
            # With a full disk, of the last event nobody may know yet.
            assert bounds.stop >= expected[0].stop - full
            assert payloads(survivor, partition) == expected[1][: len(bounds)]
            second.turn_off()
        first.turn_off()
    assert steps > 5


# --- heads ------------------------------------------------------------------------------------


def test_heads_never_recover_a_log_and_answer_what_was_last_known(
    machine: Machine, store: FileStore, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, partition, 3)
    heads = store.log.heads([partition])
    other = opened(machine)
    [answer] = append(other, partition, a_part(b"3", b"4"))
    assert answer.offsets == Range(3, 5)
    torn = tear(machine)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it would take turns, and write")

    operations = len(machine.operations)
    with monkeypatch.context() as patch:
        patch.setattr(store.log.handle(partition).writer._gate, "turn", refuse)
        for _ in range(3):
            assert heads.read().tolist() == [3]
    assert (len(machine.operations), record(machine)) == (operations, torn)
    # Nobody reads, as nobody is told of anything new; so the keeper looks.
    store._keeper.step()
    assert heads.read().tolist() == [5]
    assert seen(store, partition) == whole(5)


def test_heads_of_a_log_without_a_record_are_found_by_the_keeper_or_by_who_reads(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 3)
    heads = store.log.heads([partition])
    finders: list[Callable[[], object]] = [store._keeper.step, lambda: store.log.bounds(partition)]
    for find in finders:
        machine.disk.file(ROOT / "tails").content[:RECORD_BYTES] = bytes(RECORD_BYTES)
        assert heads.read().tolist() == [3]
        assert record(machine) == bytes(RECORD_BYTES)
        find()
        assert record(machine) != bytes(RECORD_BYTES)
        assert heads.read().tolist() == [3]


def test_the_keeper_tries_again_until_the_log_is_healed(
    machine: Machine, store: FileStore, partition: Partition
) -> None:
    fill(store, partition, 3)
    heads = store.log.heads([partition])
    append(opened(machine), partition, a_part(b"3"))
    torn = tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    for _ in range(3):
        assert heads.read().tolist() == [3]
        store._keeper.step()
        machine.clock.advance(AGAIN_SECONDS)
    assert record(machine) == torn
    heal_at_last(machine)
    store._keeper.step()
    assert heads.read().tolist() == [4]


def test_what_heads_have_told_is_known_to_who_reads(machine: Machine, store: FileStore, partition: Partition) -> None:
    fill(store, partition, 3)
    reader = opened(machine)
    heads = reader.log.heads([partition])
    append(store, partition, a_part(b"3"))
    assert heads.read().tolist() == [4]
    tear(machine)
    fail_to_copy(machine, errno.ENOSPC)
    assert seen(reader, partition) == whole(4)


def test_a_record_that_was_caught_half_written_is_read_again(
    machine: Machine, store: FileStore, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, partition, 3)
    heads = store.log.heads([partition])
    before = record(machine)
    append(store, partition, a_part(b"3"))
    half = before[:100] + record(machine)[100:]
    assert half not in {before, record(machine)}
    with monkeypatch.context() as patch:
        patch.setattr(heads, "_read_raw", lambda: half)
        assert heads.read().tolist() == [4]
    assert heads.read().tolist() == [4]
    assert not store.log.handle(partition).unknown


def test_the_head_of_a_topic_whose_slot_is_anothers_by_now_is_gone(
    machine: Machine, store: FileStore, topic: TopicInfo, partition: Partition
) -> None:
    fill(store, partition, 3)
    heads = store.log.heads([partition])
    other = opened(machine)
    other.log.delete_topic(topic.log_id)
    new = other.log.create_topic("new", TopicSettings())
    assert other.log.handle(new.partitions[0]).files.slot == store.log.handles()[0].files.slot
    assert heads.read().tolist() == [-1]
