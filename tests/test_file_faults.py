"""The log of the file store on disks that are full, fail, lose and change bytes."""

from __future__ import annotations

import errno
import hashlib
import logging
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest
from tests.file_children import Child, Once, ScriptedDisk, open_at, payload_of, send, the_partition

from penstock import Bus, Topic
from penstock.batch import Batch
from penstock.errors import (
    Corruption,
    NewerFormat,
    PenstockError,
    PublishUnknown,
    StoreError,
    StoreFull,
    WritingStopped,
)
from penstock.offsets import Gap, Range
from penstock.rows import Partition, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.block import FRONT_BYTES, PREFIX_BYTES, Header, Kind
from penstock.stores.file.platform import Platform, SystemDisk
from penstock.stores.file.scan import walk
from penstock.stores.file.segment import SegmentFile, SegmentName
from penstock.stores.file.store import FileStore
from penstock.stores.file.tail import State, Tail
from penstock.testing.conformance.builders import (
    PLENTY,
    Part,
    a_cursor,
    a_part,
    a_shard,
    append,
    commit,
    error_of,
    payloads,
    subscribe,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from _typeshed import ReadableBuffer

    Start = Callable[..., Child]

NEXT_BOOT = b"the next boot ..."[:16]


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


def after_boot(root: Path, **settings: Any) -> FileStore:
    """Open the store as after a restart of the machine, when nobody knows how its logs end."""
    options: dict[str, Any] = {"marker_seconds": 3600.0, "runtime_directory": str(root.parent)} | settings
    return FileStore(root, settings=FileSettings(**options), platform=Platform(boot_id=NEXT_BOOT))


def expected(count: int, number: int = 1) -> list[bytes]:
    return [payload_of(number, sequence) for sequence in range(count)]


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


# --- nobody knows how the log ends ------------------------------------------------------------


def segments_of(root: Path, partition: Partition) -> list[Path]:
    return sorted((root / "topics" / partition.log_id / str(partition.number)).glob("*.seg"))


def opened(path: Path) -> SegmentFile:
    name = SegmentName.parse(path.name)
    assert name is not None
    return SegmentFile(SystemDisk(), path, name)


def data_blocks(path: Path) -> list[Header]:
    file = opened(path)
    headers = file.headers(file.first.end_position, walk(file).position)
    return [header for header, _ in headers if header.kind == Kind.DATA]


def change(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def filled(root: Path, events: int = 12, **settings: Any) -> Partition:
    """Make a store with so many events, one to a block, that was closed well."""
    store = open_at(root, **settings)
    partition = the_partition(store)
    for sequence in range(events):
        send(store, partition, 1, sequence, 1)
    store.close()
    return partition


def forget_tails(root: Path) -> FileStore:
    (root / "tails").unlink()
    return open_at(root, segment_bytes=3000)


@pytest.mark.parametrize("reopen", [forget_tails, after_boot])
@pytest.mark.parametrize("clean", [True, False])
def test_a_log_is_the_same_when_its_end_has_to_be_found_again(
    root: Path, reopen: Callable[[Path], FileStore], clean: bool
) -> None:
    partition = filled(root, 30, segment_bytes=3000)
    if not clean:
        store = open_at(root, segment_bytes=3000)
        send(store, partition, 1, 30, 1)
        store.log._handles.clear()  # what a killed process leaves: no marker, no word in the tail
        store.close()
    count = 30 if clean else 31
    for _ in range(2):
        store = reopen(root)
        assert payloads(store, partition) == expected(count)
        assert store.log.bounds(partition) == Range(0, count)
        assert send(store, partition, 1, 3, 1) == (Range(3, 4), True, None)
        assert send(store, partition, 1, count, 1).offsets == Range(count, count + 1)
        count += 1
        store.close()


@pytest.mark.parametrize("garbage", ["noise", "half a block", "a whole block of elsewhere"])
def test_a_torn_end_is_put_in_quarantine_and_cut_and_told(
    root: Path, caplog: pytest.LogCaptureFixture, garbage: str
) -> None:
    partition = filled(root)
    [path] = segments_of(root, partition)
    end = walk(opened(path)).position
    block = data_blocks(path)[3]
    whole = path.read_bytes()[block.position : block.end_position]
    written = {
        "noise": hashlib.shake_128(b"noise").digest(777),
        "half a block": whole[: len(whole) // 2],
        "a whole block of elsewhere": whole,
    }
    change(path, end, written[garbage])
    with caplog.at_level(logging.WARNING, "penstock"):
        store = after_boot(root)
        assert payloads(store, partition) == expected(12)
    assert "the last write was cut off" in caplog.text
    assert path.stat().st_size == end
    [kept] = (root / "quarantine").iterdir()
    assert kept.read_bytes() == written[garbage].rstrip(b"\0")
    assert str(kept) in caplog.text
    assert send(store, partition, 1, 12, 1).offsets == Range(12, 13)
    store.close()
    store = after_boot(root)
    assert payloads(store, partition) == expected(13)
    store.close()


def test_the_last_block_is_torn_if_it_has_no_witness_and_corrupt_if_it_has(root: Path) -> None:
    partition = filled(root)
    [path] = segments_of(root, partition)
    last = data_blocks(path)[-1]
    marker = path.read_bytes()[last.end_position : last.end_position + FRONT_BYTES]
    flip(path, last.content_position + 20)
    store = after_boot(root)
    with pytest.raises(Corruption) as raised:
        send(store, partition, 1, 12, 1)
    assert (raised.value.kind, raised.value.start) == ("corrupt", 11)
    store.close()
    change(path, last.end_position, bytes(len(marker)))
    (root / "tails").unlink()
    store = open_at(root)
    assert payloads(store, partition) == expected(11)
    assert send(store, partition, 1, 11, 1).offsets == Range(11, 12)
    store.close()


# --- bytes have changed -----------------------------------------------------------------------


def read_around(store: FileStore, partition: Partition, count: int) -> Corruption:
    """Read all that can be read, and see that it is all but what the error names."""
    found, start = {}, 0
    told: list[tuple[int, Corruption]] = []
    while start < count:
        try:
            for item in store.log.read(partition, start, bytes_max=PLENTY):
                assert isinstance(item, Batch)
                found.update({item.start + index: event.data for index, event in enumerate(item)})
                start = item.range.stop
        except Corruption as corruption:
            told.append((start, corruption))
            start = corruption.stop or count
    [(asked, damage)] = told
    assert damage.start == asked
    assert damage.stop is not None
    lost = range(damage.start, damage.stop)
    assert found == {offset: data for offset, data in enumerate(expected(count)) if offset not in lost}
    return damage


@pytest.mark.parametrize("where", ["prefix", "header", "content"])
@pytest.mark.parametrize("booted", [True, False])
def test_a_flipped_bit_is_located_and_everything_around_it_stays_readable(
    root: Path, where: str, booted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    partition = filled(root)
    [path] = segments_of(root, partition)
    block = data_blocks(path)[5]
    flip(path, block.position + {"prefix": 20, "header": PREFIX_BYTES + 40, "content": FRONT_BYTES + 70}[where])
    before = path.read_bytes()
    store = after_boot(root) if booted else open_at(root)
    damage = read_around(store, partition, 12)
    assert (damage.start, damage.stop, damage.byte) == (5, 6, block.position)
    assert damage.file == str(path)
    # Without a restart only the headers are looked at before writing, and nothing hides the damage from readers.
    if booted or where != "content":
        for _ in range(2):
            with pytest.raises(Corruption) as raised:
                send(store, partition, 1, 12, 1)
            assert (raised.value.start, raised.value.stop) == (5, 6)
        assert "read-only until it is repaired" in caplog.text
        assert path.read_bytes() == before
        other = after_boot(root) if booted else open_at(root)
        with pytest.raises(Corruption):
            send(other, partition, 1, 12, 1)
        read_around(other, partition, 12)
        other.close()
    store.close()


@pytest.mark.parametrize("aligned", ["a page", "a block"])
def test_a_zeroed_page_is_located_and_is_not_the_end(root: Path, aligned: str) -> None:
    partition = filled(root, 60)
    [path] = segments_of(root, partition)
    blocks = data_blocks(path)
    page = blocks[20].position if aligned == "a block" else blocks[20].position // 4096 * 4096 + 4096
    change(path, page, bytes(4096))
    hit = [header.offset for header in blocks if header.position < page + 4096 and header.end_position > page]
    store = after_boot(root)
    with pytest.raises(Corruption):
        send(store, partition, 1, 60, 1)
    damage = read_around(store, partition, 60)
    assert (damage.start, damage.stop) == (hit[0], hit[-1] + 1)
    store.close()


@pytest.mark.parametrize("loss", ["cut", "missing", "emptied"])
@pytest.mark.parametrize("booted", [True, False])
def test_a_sealed_segment_that_is_cut_or_missing_is_located_and_the_rest_is_readable(
    root: Path, loss: str, booted: bool
) -> None:
    partition = filled(root, 40, segment_bytes=3000)
    paths = segments_of(root, partition)
    assert len(paths) > 4
    victim, name = paths[2], SegmentName.parse(paths[2].name)
    following = SegmentName.parse(paths[3].name)
    assert name is not None
    assert following is not None
    start = name.base
    if loss == "cut":
        block = data_blocks(victim)[2]
        with victim.open("r+b") as file:
            file.truncate(block.position + 100)
        start = block.offset
    elif loss == "emptied":
        with victim.open("r+b") as file:
            file.truncate(0)
    else:
        victim.unlink()
    store = after_boot(root) if booted else open_at(root)
    damage = read_around(store, partition, 40)
    assert (damage.start, damage.stop) == (start, following.base)
    assert send(store, partition, 1, 40, 1).offsets == Range(40, 41)
    store.close()


def test_an_index_that_is_deleted_or_damaged_is_not_missed(root: Path) -> None:
    partition = filled(root, 40, segment_bytes=3000)
    store = open_at(root)
    assert payloads(store, partition) == expected(40)
    reader = store.log.handle(partition).reader
    indexes = []
    for path in segments_of(root, partition):
        name = SegmentName.parse(path.name)
        assert name is not None
        store.log.find_time(partition, 1 << 60)
        reader.file(name).save_index(path.with_suffix(".idx"))
        indexes.append(path.with_suffix(".idx"))
    store.close()
    for spoil in (lambda _: None, lambda path: flip(path, 57), Path.unlink):  # 57: in the position of the first entry
        for path in indexes:
            spoil(path)
        store = open_at(root)
        assert payloads(store, partition) == expected(40)
        for start in range(40):
            [first, *_] = store.log.read(partition, start, bytes_max=1)
            assert first.range.start == start
        store.close()


# --- a newer version --------------------------------------------------------------------------


@pytest.mark.parametrize("booted", [True, False])
@pytest.mark.parametrize("which", ["segment", "middle", "last"])
def test_a_block_of_a_newer_format_is_refused_and_nothing_is_changed(root: Path, booted: bool, which: str) -> None:
    partition = filled(root)
    [path] = segments_of(root, partition)
    file = opened(path)
    header = {"segment": file.first, "middle": data_blocks(path)[5], "last": data_blocks(path)[-1]}[which]
    front = bytearray(path.read_bytes()[header.position : header.position + FRONT_BYTES])
    front[8:10] = (2).to_bytes(2, "little")
    crc = google_crc32c.extend(file.segment.seed if header.position else 0, bytes(front[: PREFIX_BYTES - 4]))
    front[PREFIX_BYTES - 4 : PREFIX_BYTES] = crc.to_bytes(4, "little")
    crc = google_crc32c.extend(crc, bytes(front[PREFIX_BYTES:-4]))
    front[-4:] = crc.to_bytes(4, "little")
    change(path, header.position, bytes(front))
    before = path.read_bytes()
    store = after_boot(root) if booted else open_at(root)
    for _ in range(2):
        with pytest.raises(NewerFormat, match="upgrade"):
            send(store, partition, 1, 12, 1)
        with pytest.raises(NewerFormat, match="upgrade"):
            payloads(store, partition)
    store.close()
    assert path.read_bytes() == before
    assert segments_of(root, partition) == [path]
    assert not (root / "quarantine").exists()


# --- the log is shorter than what testifies to it ---------------------------------------------


def test_offsets_that_a_cursor_has_passed_are_declared_lost_and_never_given_again(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_at(root)
    partition = the_partition(store)
    [topic] = store.log.topics()
    subscribe(store, topic)
    for sequence in range(12):
        send(store, partition, 1, sequence, 1)
    assert commit(store, a_cursor(a_shard(topic), 10)) is None
    store.close()
    [path] = segments_of(root, partition)
    with path.open("r+b") as file:
        file.truncate(data_blocks(path)[6].position)
    (root / "tails").unlink()
    with caplog.at_level(logging.ERROR, "penstock"):
        store = open_at(root)
        assert store.log.bounds(partition) == Range(0, 10)
    assert "DATA LOSS" in caplog.text
    [batch, gap] = [
        item
        for start in (0, 6)
        for item in store.log.read(partition, start, bytes_max=PLENTY, events_max=6 if start == 0 else None)
        if isinstance(item, Gap) or start == 0
    ][-2:]
    assert isinstance(batch, Batch)
    assert isinstance(gap, Gap)
    assert (gap.start, gap.stop) == (6, 10)
    assert send(store, partition, 2, 0, 1).offsets == Range(10, 11)
    [cursor] = store.cursors.load(topic.log_id, "billing")
    assert cursor.next_offset == 10
    # What was lost and not acknowledged to anybody else may be published again.
    assert send(store, partition, 1, 11, 1).offsets == Range(11, 12)
    store.close()
    store = after_boot(root)
    found = store.log.read(partition, 0, bytes_max=PLENTY)
    assert [item.range for item in found if isinstance(item, Gap)] == [Range(6, 10)]
    assert sum(len(item) for item in found if isinstance(item, Batch)) == 6 + 2
    store.close()


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
