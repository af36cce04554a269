"""The log of the file store on disks that are full or fail, and in processes that end at any moment."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.file_children import Child, Once, ScriptedDisk, open_at, payload_of, send, the_partition
from tests.file_logs import NEXT_BOOT, after_boot, expected, filled

from penstock import Bus, Topic
from penstock.errors import (
    PenstockError,
    PublishUnknown,
    StoreError,
    StoreFull,
    WritingStopped,
)
from penstock.offsets import Gap, Range
from penstock.rows import Partition, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.stores.file.tail import State, Tail
from penstock.testing.conformance.builders import (
    PLENTY,
    Part,
    a_part,
    append,
    error_of,
    payloads,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _typeshed import ReadableBuffer

    Start = Callable[..., Child]


@pytest.fixture
def disk() -> ScriptedDisk:
    return ScriptedDisk()


@pytest.fixture
def store(root: Path, disk: ScriptedDisk) -> Iterator[FileStore]:
    store = open_at(root, disk, segment_bytes=20_000, allocate_bytes=4096)
    the_partition(store)
    yield store
    store.close()


def tail_of(store: FileStore) -> Tail:
    return store.log.tail(store.log.handle(the_partition(store)))


# --- the disk is full -------------------------------------------------------------------------


def full_in_allocate(disk: ScriptedDisk) -> Callable[[], None]:
    disk.on_allocate = Once(errno.ENOSPC, times=1 << 30)

    def free() -> None:
        disk.on_allocate = lambda _: None

    return free


def full_in_write(disk: ScriptedDisk) -> Callable[[], None]:
    def refuse(_: Path) -> int:
        raise OSError(errno.ENOSPC, "no space")

    disk.on_write = refuse

    def free() -> None:
        disk.on_write = lambda _: None

    return free


def full_after_a_part(disk: ScriptedDisk) -> Callable[[], None]:
    disk.on_write = lambda _: 300

    def free() -> None:
        disk.on_write = lambda _: None

    return free


FULL_DISKS = [full_in_allocate, full_in_write, full_after_a_part]


@pytest.mark.parametrize("fill", FULL_DISKS)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_full_disk_refuses_a_publish_as_a_whole_and_takes_it_when_space_returns(
    root: Path,
    store: FileStore,
    disk: ScriptedDisk,
    fill: Callable[[ScriptedDisk], Callable[[], None]],
    restarted: bool,
) -> None:
    partition = the_partition(store)
    assert send(store, partition, 1, 0, 5).offsets == Range(0, 5)
    free = fill(disk)
    for _ in range(2):
        with pytest.raises(StoreFull, match="Nothing was changed"):
            append(store, partition, a_part(b"x" * 9000, producer=bytes(16)))
        assert store.log.bounds(partition) == Range(0, 5)
        assert payloads(store, partition) == expected(5)
    free()
    if restarted:
        store.close()
        store = after_boot(root)
        assert payloads(store, partition) == expected(5)
    [answer] = append(store, partition, a_part(b"x" * 9000, producer=bytes(16)))
    assert (answer.offsets, answer.duplicate) == (Range(5, 6), False)
    assert payloads(store, partition) == [*expected(5), b"x" * 9000]
    store.close()
    store = after_boot(root)
    assert payloads(store, partition) == [*expected(5), b"x" * 9000]
    store.close()


@pytest.mark.parametrize("fill", FULL_DISKS)
def test_a_disk_that_is_full_when_a_segment_ends_refuses_too_and_goes_on(
    root: Path, store: FileStore, disk: ScriptedDisk, fill: Callable[[ScriptedDisk], Callable[[], None]]
) -> None:
    partition = the_partition(store)
    [answer] = append(store, partition, a_part(b"x" * 15_000, producer=bytes(16)))
    assert answer.offsets == Range(0, 1)
    free = fill(disk)
    for _ in range(2):
        with pytest.raises(StoreError, match="Nothing was changed"):
            append(store, partition, a_part(b"y" * 9000, producer=bytes(16), first=1))
        assert payloads(store, partition) == [b"x" * 15_000]
        assert store.log.find_time(partition, 0) == 0
        assert store.log.find_time(partition, 1 << 60) == 1
    free()
    # A small one still fits into the old segment, and no trace of the next one hides it.
    assert send(store, partition, 1, 0, 1).offsets == Range(1, 2)
    assert payloads(store, partition) == [b"x" * 15_000, payload_of(1, 0)]
    [answer] = append(store, partition, a_part(b"y" * 9000, producer=bytes(16), first=1))
    assert (answer.offsets, answer.duplicate) == (Range(2, 3), False)
    for _ in range(2):
        assert payloads(store, partition) == [b"x" * 15_000, payload_of(1, 0), b"y" * 9000]
        store.close()
        store = after_boot(root)
    store.close()


def large(sequence: int) -> Part:
    return a_part(b"%d" % sequence * 50_000, producer=bytes(16), first=sequence)


@pytest.mark.root
def test_a_real_full_disk_refuses_and_goes_on_when_there_is_space(root: Path) -> None:
    root.mkdir(0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "penstock-test", str(root)], check=True)
    try:
        ballast = root.parent / "data" / "ballast"
        store = open_at(root / "store", segment_bytes=1 << 20, allocate_bytes=256 << 10)
        ballast.write_bytes(bytes(3 << 20))
        partition = the_partition(store)
        stored = 0
        while error_of(partial(append, store, partition, large(stored))) is None:
            stored += 1
        assert stored > 10
        with pytest.raises(StoreFull, match="the disk is full"):
            append(store, partition, large(stored))
        wanted = [b"%d" % number * 50_000 for number in range(stored)]
        assert payloads(store, partition) == wanted
        # Removing what nobody needs any more works on a full disk, and makes room.
        first = store.log.trim(partition, 20)
        assert first > 0
        assert payloads(store, partition) == wanted[first:]
        [answer] = append(store, partition, large(stored))
        assert (answer.offsets, answer.duplicate) == (Range(stored, stored + 1), False)
        stored += 1
        ballast.unlink()
        [answer] = append(store, partition, large(stored))
        assert (answer.offsets, answer.duplicate) == (Range(stored, stored + 1), False)
        store.close()
        store = open_at(root / "store")
        assert len(payloads(store, partition)) == stored + 1 - first
        store.close()
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


# --- a sync fails -----------------------------------------------------------------------------


def test_after_a_failed_sync_the_outcome_is_unknown_and_a_repeat_makes_it_known(
    root: Path, store: FileStore, disk: ScriptedDisk
) -> None:
    partition = the_partition(store)
    send(store, partition, 1, 0, 5)
    poisoned = tail_of(store)
    disk.on_sync = Once(errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as raised:
        send(store, partition, 1, 5, 3)
    assert not isinstance(raised.value, PenstockError)
    assert tail_of(store).state == State.POISONED
    assert payloads(store, partition) == expected(5)
    del disk.synced[:]
    answers = [send(store, partition, 1, 5, 3) for _ in range(2)]
    assert [answer.offsets for answer in answers] == [Range(5, 8)] * 2
    assert answers[1].duplicate
    assert payloads(store, partition) == expected(8)
    # The segment ends where it was durable, and its pages were never synced again.
    healed = tail_of(store)
    assert healed.segment_base == 5
    assert poisoned.inode not in disk.synced
    assert healed.inode in disk.synced
    [old, _] = sorted((root / "topics" / partition.log_id / "0").glob("*.seg"))
    assert old.stat().st_size == poisoned.durable_position
    send(store, partition, 1, 8, 3)
    store.close()
    store = after_boot(root)
    assert payloads(store, partition) == expected(11)
    assert send(store, partition, 1, 5, 3).duplicate
    store.close()


def test_a_failed_sync_of_the_first_events_of_a_segment_loses_and_doubles_nothing(
    root: Path, store: FileStore, disk: ScriptedDisk
) -> None:
    partition = the_partition(store)
    disk.on_sync = Once(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        send(store, partition, 1, 0, 3)
    assert payloads(store, partition) == []
    assert send(store, partition, 1, 0, 3).offsets == Range(0, 3)
    assert send(store, partition, 1, 3, 3).offsets == Range(3, 6)
    assert payloads(store, partition) == expected(6)
    assert len(list((root / "topics" / partition.log_id / "0").glob("*.seg"))) == 1
    store.close()
    store = after_boot(root)
    assert payloads(store, partition) == expected(6)
    store.close()


def test_another_process_heals_after_a_failed_sync_and_never_syncs_those_pages(
    root: Path, store: FileStore, disk: ScriptedDisk, start: Start
) -> None:
    partition = the_partition(store)
    child = start("obey", root=str(root))
    assert child.hear() == "ready"
    send(store, partition, 1, 0, 5)
    assert child.ask("send", 2, 0, 1)["start"] == 5
    poisoned = tail_of(store)
    disk.on_sync = Once(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        send(store, partition, 1, 5, 3)
    before = len(child.ask("synced"))
    disk.synced.clear()
    # What nobody knows to be durable is not shown, not even as an answer to a repeat, before it is.
    assert child.ask("heads") == [6]
    assert child.ask("send", 1, 5, 3) == {"start": 6, "stop": 9, "duplicate": True, "refused": None}
    assert child.ask("send", 2, 1, 1)["start"] == 9
    assert send(store, partition, 1, 5, 3).offsets == Range(6, 9)
    assert send(store, partition, 1, 8, 1).offsets == Range(10, 11)
    assert poisoned.inode not in child.ask("synced")[before:]
    assert poisoned.inode not in disk.synced
    assert payloads(store, partition)[5:] == [
        payload_of(2, 0), *expected(8)[5:], payload_of(2, 1), payload_of(1, 8)
    ]  # fmt: skip


def test_a_sync_that_fails_for_ever_stops_writing_and_not_reading_until_the_store_is_opened_anew(
    root: Path, store: FileStore, disk: ScriptedDisk
) -> None:
    partition = the_partition(store)
    send(store, partition, 1, 0, 5)
    disk.on_sync = Once(errno.EIO, times=1 << 30)
    with pytest.raises(OSError, match="Input/output error") as raised:
        send(store, partition, 1, 5, 3)
    assert not isinstance(raised.value, PenstockError)
    for _ in range(3):
        with pytest.raises(WritingStopped, match="look at the disk"):
            send(store, partition, 1, 8, 1)
        assert payloads(store, partition) == expected(5)
    disk.on_sync = lambda _: None
    with pytest.raises(WritingStopped):  # a disk that seems to work again is not trusted without anybody looking
        send(store, partition, 1, 8, 1)
    store.close()
    store = open_at(root)
    assert send(store, partition, 1, 5, 3).offsets == Range(5, 8)
    assert send(store, partition, 1, 8, 1).offsets == Range(8, 9)
    assert payloads(store, partition) == expected(9)
    store.close()
    store = after_boot(root)
    assert payloads(store, partition) == expected(9)
    store.close()


def test_a_write_that_can_not_be_cut_off_is_unknown_and_is_never_doubled(
    root: Path, store: FileStore, disk: ScriptedDisk
) -> None:
    partition = the_partition(store)
    send(store, partition, 1, 0, 5)
    disk.on_write = lambda _: 700
    disk.on_truncate = Once(errno.EIO)
    with pytest.raises(OSError) as raised:  # noqa: PT011 - which one it is does not matter
        send(store, partition, 1, 5, 3)
    assert not isinstance(raised.value, PenstockError)
    disk.on_write = lambda _: None
    assert send(store, partition, 1, 5, 3).offsets == Range(5, 8)
    assert payloads(store, partition) == expected(8)
    store.close()
    store = after_boot(root)
    assert payloads(store, partition) == expected(8)
    store.close()


async def test_through_the_bus_a_failed_sync_is_an_unknown_publish_that_can_be_sent_again(
    store: FileStore, disk: ScriptedDisk
) -> None:
    topic: Topic[bytes] = Topic("payments", bytes)
    async with Bus(store=store, topics=[topic]) as bus:
        await bus.publish(topic, b"first")
        disk.on_sync = Once(errno.EIO)
        with pytest.raises(PublishUnknown) as raised:
            await bus.publish(topic, b"second")
        receipt = await raised.value.prepared.send()
        assert receipt.position.offset == 1
        assert (await bus.publish(topic, b"third")).position.offset == 2
        assert [event.data async for event in bus.read(topic)] == [b"first", b"second", b"third"]


# --- the process ends before any single operation ---------------------------------------------


class Died(BaseException):
    """What a test raises where a process is killed: nothing after it happens."""


class MortalDisk(ScriptedDisk):
    """A disk under a process that dies right before one operation that changes something."""

    def __init__(self, steps: int) -> None:
        super().__init__(syncs=False)
        self.steps = steps

    def _step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise Died

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        if create:
            self._step()
        return super().open(path, create=create, exclusive=exclusive, write=write)

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        self._step()
        return super().write(descriptor, data, position)

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        self._step()
        return super().write_many(descriptor, buffers, position)

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        self._step()
        super().allocate(descriptor, position, count)

    def truncate(self, descriptor: int, length: int) -> None:
        self._step()
        super().truncate(descriptor, length)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


LIFE = [(0, 1), (1, 2), (3, 30), (33, 1), (34, 4), (38, 30), (68, 1)]
"""First sequence and count of each publish of a life; the long ones need the next segment, the short ones fit again."""


def live(store: FileStore, partition: Partition, acked: dict[int, bytes]) -> int:
    """Publish, note what was acknowledged, and trim; returns where the log begins."""
    first = 0
    for sequence, count in LIFE:
        answer = send(store, partition, 1, sequence, count)
        assert answer.offsets is not None
        acked.update({offset: payload_of(1, offset) for offset in answer.offsets})
        if sequence == 34:
            first = store.log.trim(partition, 10)
            store.log.mark_idle(0.0)
    return first


def opened_after_death(root: Path, *, booted: bool) -> FileStore:
    platform = Platform(disk=ScriptedDisk(syncs=False), boot_id=NEXT_BOOT) if booted else Platform(disk=ScriptedDisk())
    return FileStore(root, settings=SMALL, platform=platform)


SMALL = FileSettings(segment_bytes=3500, allocate_bytes=1024, marker_seconds=3600.0)


@pytest.mark.parametrize("booted", [False, True])
def test_a_process_that_dies_before_any_single_operation_loses_nothing_that_was_acknowledged(
    root: Path, booted: bool
) -> None:
    partition = filled(root, 0)
    deaths, finished = 0, False
    while not finished:
        copy = root.parent / f"copy-{deaths}"
        shutil.copytree(root, copy)
        disk = MortalDisk(1 << 30)
        store = FileStore(copy, settings=SMALL, platform=Platform(disk=disk))
        assert payloads(store, partition) == []
        acked: dict[int, bytes] = {}
        disk.steps = deaths
        try:
            first, finished = live(store, partition, acked), True
            assert first > 0
        except Died:
            deaths += 1
        store.log._handles.clear()
        disk.steps = 1 << 30  # what follows only tidies up this process
        store.close()
        survive(copy, partition, acked, booted=booted)
        shutil.rmtree(copy)
    assert deaths > 50


def survive(root: Path, partition: Partition, acked: dict[int, bytes], *, booted: bool) -> None:
    """Open what a dead process has left, and go on."""
    store = opened_after_death(root, booted=booted)
    bounds = store.log.bounds(partition)
    stored = dict(enumerate(payloads(store, partition), bounds.start))
    assert {offset: data for offset, data in acked.items() if offset >= bounds.start}.items() <= stored.items()
    assert bounds.start <= 10
    assert stored == {offset: payload_of(1, offset) for offset in bounds}
    assert store.log.find_time(partition, 1 << 60) == bounds.stop
    # Something new that is small, and then everything again, as by a publisher who knows nothing.
    answer = send(store, partition, 2, 0, 1)
    assert answer.offsets is not None
    assert answer.offsets.start >= bounds.stop
    stored[answer.offsets.start] = payload_of(2, 0)
    for sequence, count in LIFE:
        answer = send(store, partition, 1, sequence, count)
        assert answer.offsets is not None
        stored.update({offset: payload_of(1, sequence + index) for index, offset in enumerate(answer.offsets)})
        # Of what was under way at the death nobody knew; healing may have brought it to light.
        if sequence != bounds.stop:
            assert answer.duplicate == (sequence < bounds.stop)
    for _ in range(2):
        bounds = store.log.bounds(partition)
        assert bounds.stop == 70
        assert payloads(store, partition) == [stored[offset] for offset in bounds]
        store.close()
        store = after_boot(root)
    store.close()


def test_a_copy_whose_tail_is_ahead_of_its_segments_declares_what_is_missing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    partition = filled(root, 10)
    copy = root.parent / "copy"
    shutil.copytree(root, copy)
    store = open_at(root)
    send(store, partition, 1, 10, 4)
    store.close()
    shutil.copy(root / "tails", copy / "tails")
    store = open_at(copy)
    assert store.log.bounds(partition) == Range(0, 14)
    assert "DATA LOSS" in caplog.text
    [gap] = store.log.read(partition, 10, bytes_max=PLENTY)
    assert isinstance(gap, Gap)
    assert gap.range == Range(10, 14)
    assert send(store, partition, 1, 14, 1).offsets == Range(14, 15)
    store.close()


# --- smaller things ---------------------------------------------------------------------------


def test_what_an_os_topic_has_appended_is_on_the_medium_when_the_store_is_closed(root: Path) -> None:
    for number in range(2):
        store = open_at(root)
        partition = store.log.create_topic("fast", TopicSettings(durability="os")).partitions[0]
        send(store, partition, 1, number, 1)
        tail = store.log.tail(store.log.handle(partition))
        assert (tail.end, tail.is_synced) == (number + 1, False)
        assert len(payloads(store, partition)) == number + 1
        store.close()
        store = open_at(root)
        tail = store.log.tail(store.log.handle(partition))
        assert (tail.state, tail.durable_end, tail.witnessed) == (State.CLEAN, number + 1, True)
        store.close()


def test_a_reader_finds_times_after_another_has_trimmed_the_log(root: Path) -> None:
    partition = filled(root, 40, segment_bytes=2000)
    reader, trimmer = open_at(root), open_at(root)
    assert len(reader.log.read(partition, 39, bytes_max=PLENTY)) == 1
    first = trimmer.log.trim(partition, 35)
    assert first > 20
    assert reader.log.find_time(partition, 0) == first
    assert reader.log.find_time(partition, 1 << 60) == 40
    reader.close()
    trimmer.close()


# --- what cannot be told ------------------------------------------------------------------------


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_missing(
    root: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = the_partition(store)
    [answer] = append(store, partition, a_part(b"x" * 15_000, producer=bytes(16)))
    assert answer.offsets == Range(0, 1)
    look = os.stat

    def refuse(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".seg"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(StoreError, match="the next segment could not be made"):
        append(store, partition, a_part(b"y" * 9000, producer=bytes(16), first=1))
    monkeypatch.undo()
    # No trace of the next segment hides what still goes to this one.
    assert send(store, partition, 1, 0, 1).offsets == Range(1, 2)
    assert payloads(store, partition) == [b"x" * 15_000, payload_of(1, 0)]


def test_what_was_cut_off_after_a_short_write_does_not_come_back_with_a_power_loss(
    store: FileStore, disk: ScriptedDisk
) -> None:
    partition = the_partition(store)
    send(store, partition, 1, 0, 1)
    cut = tail_of(store)
    disk.synced.clear()
    disk.on_write = lambda _: 300
    with pytest.raises(StoreFull):
        send(store, partition, 1, 1, 3)
    assert disk.synced == [cut.inode]
