"""The log of the file store when its end must be found anew, and when bytes have changed or are lost."""

from __future__ import annotations

import errno
import hashlib
import logging
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from tests.file_children import Child, ScriptedDisk, open_at, send, the_partition
from tests.file_logs import NEXT_BOOT, after_boot, change, data_blocks, expected, filled, flip, opened, segments_of

from penstock.batch import Batch
from penstock.errors import (
    Corruption,
    NewerFormat,
)
from penstock.offsets import Gap, Range
from penstock.rows import Partition, TopicSettings
from penstock.stores.file import topics
from penstock.stores.file.block import FRONT_BYTES, PREFIX_BYTES
from penstock.stores.file.platform import Platform
from penstock.stores.file.scan import walk
from penstock.stores.file.segment import SegmentName
from penstock.stores.file.store import FileStore
from penstock.stores.file.verify import verify
from penstock.testing.conformance.builders import (
    PLENTY,
    a_cursor,
    a_shard,
    commit,
    payloads,
    subscribe,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., Child]

# --- nobody knows how the log ends ------------------------------------------------------------


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
    for path in segments_of(root, partition)[:-1]:
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


# --- what is before the first block that is known -------------------------------------------------


def test_events_in_a_damaged_first_block_are_reported_and_never_skipped(root: Path) -> None:
    partition = filled(root, 3)
    [path] = segments_of(root, partition)
    first = data_blocks(path)[0]
    change(path, first.position, bytes(64))
    with closing(open_at(root)) as store:
        with pytest.raises(Corruption, match="offsets 0 to 1"):
            store.log.read(partition, 0, bytes_max=PLENTY)
        [batch] = store.log.read(partition, 2, bytes_max=PLENTY)
        assert batch.range == Range(2, 3)


# --- what a crash leaves that is not damage -------------------------------------------------------


def test_a_tail_that_cannot_be_read_is_not_trusted_with_what_a_sync_may_have_failed_for(root: Path) -> None:
    partition = filled(root, 5)
    disk = ScriptedDisk()
    (root / "tails").write_bytes(b"\xff" * 128)
    with closing(open_at(root, disk)) as store:
        assert payloads(store, partition) == expected(5)
        # Everything is in another file now, whose pages nobody has marked as clean.
        [path] = segments_of(root, partition)
        assert path.name == "00000000000000000000-0000000002.seg"
        assert path.stat().st_ino in disk.synced
        assert send(store, partition, 1, 5, 1).offsets == Range(5, 6)
        assert send(store, partition, 1, 2, 1) == (Range(2, 3), True, None)


def test_a_segment_that_was_never_named_is_nothing(root: Path) -> None:
    partition = filled(root, 5)
    (segments_of(root, partition)[0].parent / "unnamed.seg").write_bytes(b"half of a block")
    assert verify(root, Platform()).ok
    with closing(after_boot(root)) as store:
        assert payloads(store, partition) == expected(5)
        assert send(store, partition, 1, 5, 1).offsets == Range(5, 6)


def test_a_last_segment_that_is_missing_is_told_by_the_tail_also_of_another_boot(root: Path) -> None:
    partition = filled(root, 30, segment_bytes=3000)
    *_, last = segments_of(root, partition)
    base = int(last.name.split("-")[0])
    last.unlink()
    report = verify(root, Platform(boot_id=NEXT_BOOT))
    assert [(damage.kind, damage.start, damage.stop) for damage in report.damages] == [("missing", base, 30)]


def test_topics_never_share_what_tells_how_their_logs_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with closing(open_at(root)) as store:
        monkeypatch.setattr(topics, "replace_file", refuse)
        with pytest.raises(OSError, match="no space"):
            store.log.create_topic("first", TopicSettings())
        monkeypatch.undo()
        store.log.create_topic("second", TopicSettings())
    with closing(open_at(root)) as store:
        slots = {entry.topic.name: entry.slot for entry in store.log.topic_directory.entries()}
        assert len(set(slots.values())) == len(slots) == 2
