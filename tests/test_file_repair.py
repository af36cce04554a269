"""Damage is found, told apart and located; a repair declares what is lost, and everything else stays."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.clock import VirtualClock
from penstock.errors import Corruption, IntegrityError, PenstockError, StateMissing
from penstock.offsets import Gap, Range
from penstock.rows import TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.block import FRONT_BYTES
from penstock.stores.file.platform import Platform
from penstock.stores.file.repair import apply, plan
from penstock.stores.file.segment import SegmentFile, SegmentName, segment_names
from penstock.stores.file.store import FileStore
from penstock.stores.file.verify import Report, verify
from penstock.testing.conformance.builders import PLENTY, a_cursor, a_part, a_shard, append, commit, fill, subscribe

EVENTS = 40
SETTINGS = FileSettings(segment_bytes=6_000, allocate_bytes=8_192)


def opened(root: Path, *, boot: bytes = b"b" * 16) -> FileStore:
    return FileStore(root, settings=SETTINGS, platform=Platform(boot_id=boot))


class Kept:
    """A store with events in several segments, closed, ready to be damaged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with closing(opened(root)) as store:
            self.topic = store.log.create_topic("orders", TopicSettings())
            self.partition = self.topic.partitions[0]
            fill(store, self.partition, EVENTS)
        self.directory = root / "topics" / self.topic.log_id / "0"
        self.names = segment_names(Platform().disk, self.directory)
        assert len(self.names) > 3

    def path(self, name: SegmentName) -> Path:
        return self.directory / str(name)

    def block(self, name: SegmentName, index: int) -> tuple[int, int, int, int]:
        """Return position, end position and offsets of a data block."""
        file = SegmentFile(Platform().disk, self.path(name), name)
        header = [header for header, _ in file.headers(file.first.end_position, self._length(file)) if header.span][
            index
        ]
        return header.position, header.end_position, header.offset, header.end_offset

    def _length(self, file: SegmentFile) -> int:
        data = self.path(file.name).read_bytes().rstrip(b"\0")
        return -(-len(data) // 64) * 64

    def change(self, name: SegmentName, byte: int, data: bytes | None = None) -> None:
        with self.path(name).open("r+b") as file:
            file.seek(byte)
            changed = data or bytes([file.read(1)[0] ^ 0x10])
            file.seek(byte)
            file.write(changed)

    def verify(self) -> Report:
        return verify(self.root, Platform(boot_id=b"b" * 16))

    def repair(self) -> list[str]:
        platform = Platform(boot_id=b"b" * 16)
        return apply(self.root, platform, plan(self.root, platform))

    def content(self, store: FileStore) -> list[tuple[int, bytes] | Gap]:
        items: list[tuple[int, bytes] | Gap] = []
        offset, end = 0, store.log.bounds(self.partition).stop
        while offset < end:
            for item in store.log.read(self.partition, offset, bytes_max=PLENTY):
                items += [item] if isinstance(item, Gap) else [(event.offset, event.data) for event in item]
                offset = item.range.stop
        return items


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "data")


EXPECTED = [(number, b"%d" % number) for number in range(EVENTS)]


def test_a_sound_store_verifies_and_everything_is_counted(kept: Kept) -> None:
    report = kept.verify()
    assert report.ok
    [partition] = report.topics[0].partitions
    assert (partition.first, partition.end, partition.events, partition.gaps) == (0, EVENTS, EVENTS, 0)
    assert partition.segments == len(kept.names)
    assert plan(kept.root, Platform()) == []


def lost(start: int, stop: int) -> list[tuple[int, bytes]]:
    return [pair for pair in EXPECTED if not start <= pair[0] < stop]


def check_repaired(kept: Kept, start: int, stop: int) -> None:
    """Check that exactly these offsets became a gap, that all others are as they were, and that the log goes on."""
    damaged = [Path(damage.file) for damage in kept.verify().damages if damage.kind != "missing"]
    assert kept.repair() != []
    assert kept.verify().ok
    assert kept.repair() == []
    quarantine = Platform().disk.names(kept.root / "quarantine")
    assert all(any(path.name in name for name in quarantine) for path in damaged)
    with closing(opened(kept.root)) as store:
        items = kept.content(store)
        gaps = [item for item in items if isinstance(item, Gap)]
        assert [(gap.start, gap.stop) for gap in gaps] == ([(start, stop)] if start < stop else [])
        assert [item for item in items if not isinstance(item, Gap)] == lost(start, stop)
        [answer] = append(store, kept.partition, a_part(b"next"))
        assert answer.offsets == Range(EVENTS, EVENTS + 1)
    with closing(opened(kept.root, boot=b"c" * 16)) as store:
        assert store.log.bounds(kept.partition) == Range(0, EVENTS + 1)
        assert kept.content(store)[-1] == (EVENTS, b"next")


@pytest.mark.parametrize("where", ["prefix", "header", "content"])
def test_a_flipped_bit_in_a_sealed_segment_is_located_and_becomes_a_gap(kept: Kept, where: str) -> None:
    name = kept.names[1]
    position, end, start, stop = kept.block(name, 1)
    byte = {"prefix": position + 20, "header": position + 100, "content": end - 70}[where]
    kept.change(name, byte)
    [damage] = kept.verify().damages
    assert (damage.kind, damage.file) == ("corrupt", str(kept.path(name)))
    assert (damage.byte, damage.start, damage.stop) == (position, start, stop)
    with closing(opened(kept.root)) as store:
        with pytest.raises(Corruption) as caught:
            store.log.read(kept.partition, start, bytes_max=PLENTY)
        assert (caught.value.file, caught.value.byte) == (str(kept.path(name)), position)
        assert (caught.value.start, caught.value.stop) == (start, stop)
        # What is before it and what is behind it can be read.
        before = store.log.read(kept.partition, start - 1, bytes_max=PLENTY)
        assert [item.range for item in before] == [Range(start - 1, start)]
        behind = store.log.read(kept.partition, stop, bytes_max=PLENTY)
        assert behind[0].range.start == stop
    check_repaired(kept, start, stop)


def test_a_zeroed_page_in_a_sealed_segment_is_located_and_becomes_a_gap(kept: Kept) -> None:
    name = kept.names[1]
    position, end, start, stop = kept.block(name, 1)
    kept.change(name, position, bytes(end - position))
    [damage] = kept.verify().damages
    assert (damage.kind, damage.byte, damage.start, damage.stop) == ("corrupt", position, start, stop)
    check_repaired(kept, start, stop)


def test_a_truncated_sealed_segment_is_found_and_what_it_lost_becomes_a_gap(kept: Kept) -> None:
    name, following = kept.names[1], kept.names[2]
    position, _, start, _ = kept.block(name, 1)
    with kept.path(name).open("r+b") as file:
        file.truncate(position + 100)
    [damage] = kept.verify().damages
    assert (damage.kind, damage.byte, damage.start, damage.stop) == ("corrupt", position, start, following.base)
    check_repaired(kept, start, following.base)


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_segment_is_named_and_becomes_a_gap(kept: Kept, index: int) -> None:
    name, following = kept.names[index], kept.names[index + 1]
    kept.path(name).unlink()
    [damage] = kept.verify().damages
    assert (damage.kind, damage.start, damage.stop) == ("missing", name.base, following.base)
    assert Path(damage.file).name == str(name)
    with closing(opened(kept.root)) as store, pytest.raises(Corruption) as caught:
        store.log.read(kept.partition, name.base, bytes_max=PLENTY)
    assert (caught.value.start, caught.value.stop) == (name.base, following.base)
    check_repaired(kept, name.base, following.base)


def test_an_unreadable_first_block_loses_its_segment_and_no_other(kept: Kept) -> None:
    name, following = kept.names[1], kept.names[2]
    kept.change(name, FRONT_BYTES + 10)
    [damage] = kept.verify().damages
    assert (damage.kind, damage.byte, damage.start, damage.stop) == ("corrupt", 0, name.base, following.base)
    check_repaired(kept, name.base, following.base)


def test_a_segment_of_another_log_is_foreign(kept: Kept, tmp_path: Path) -> None:
    other = Kept(tmp_path / "other")
    name, following = kept.names[1], kept.names[2]
    shutil.copy(other.path(name), kept.path(name))
    damages = kept.verify().damages
    assert [damage.kind for damage in damages if damage.file == str(kept.path(name))] == ["foreign"]
    assert other.topic.log_id in damages[0].detail
    check_repaired(kept, name.base, following.base)


def test_a_flipped_bit_in_the_active_segment_stops_writing_until_a_repair(
    kept: Kept, caplog: pytest.LogCaptureFixture
) -> None:
    name = kept.names[-1]
    position, _, start, stop = kept.block(name, 0)
    kept.change(name, position + FRONT_BYTES + 3)
    with caplog.at_level(logging.ERROR), closing(opened(kept.root, boot=b"c" * 16)) as store:
        with pytest.raises(Corruption) as caught:
            append(store, kept.partition, a_part(b"no"))
        assert (caught.value.byte, caught.value.start, caught.value.stop) == (position, start, stop)
        with pytest.raises(Corruption):
            store.log.read(kept.partition, start, bytes_max=PLENTY)
        assert store.log.read(kept.partition, start - 1, bytes_max=PLENTY) != []
        assert store.log.bounds(kept.partition) == Range(0, EVENTS)
    assert "read-only" in caplog.text
    check_repaired(kept, start, stop)


def test_a_marker_that_is_damaged_loses_no_event(kept: Kept) -> None:
    name = kept.names[-1]
    data = kept.path(name).read_bytes().rstrip(b"\0")
    marker = -(-len(data) // 64) * 64 - FRONT_BYTES
    kept.change(name, marker + 70)
    [damage] = kept.verify().damages
    assert damage.start == damage.stop or damage.stop is None
    check_repaired(kept, EVENTS, EVENTS)


def test_a_leftover_of_a_superseded_segment_is_no_damage(kept: Kept) -> None:
    name = kept.names[-1]
    shutil.copy(kept.path(name), kept.directory / str(SegmentName(kept.names[1].base, 0)).replace(".seg", ".bak"))
    assert kept.verify().ok


def test_lost_cursors_are_reported_and_never_invented(tmp_path: Path) -> None:
    root = tmp_path / "data"
    with closing(opened(root)) as store:
        topic = store.log.create_topic("orders", TopicSettings())
        fill(store, topic.partitions[0], 3)
        subscribe(store, topic)
        commit(store, a_cursor(a_shard(topic), 2))
    for name in ("control.db", "control.db-wal", "control.db-shm"):
        (root / name).unlink(missing_ok=True)
    with pytest.raises(StateMissing, match="repair"):
        opened(root)
    platform = Platform(boot_id=b"b" * 16)
    report = verify(root, platform)
    assert not report.ok
    assert "control.db" in report.state[0]
    actions = plan(root, platform)
    assert any(action.loses for action in actions)
    apply(root, platform, actions)
    assert verify(root, platform).ok
    with closing(opened(root)) as store:
        assert store.cursors.subscriptions() == []
        assert store.log.bounds(topic.partitions[0]) == Range(0, 3)


@pytest.mark.parametrize("index", [0, 1])
def test_times_are_found_across_a_segment_that_was_declared_lost(tmp_path: Path, index: int) -> None:
    root, clock = tmp_path / "data", VirtualClock()
    times = []
    with closing(FileStore(root, settings=SETTINGS, platform=Platform(clock=clock))) as store:
        partition = store.log.create_topic("orders", TopicSettings()).partitions[0]
        for number in range(EVENTS):
            clock.advance(1)
            times.append(clock.time_us())
            append(store, partition, a_part(b"%d" % number, first=number))
    directory = root / "topics" / partition.log_id / "0"
    gone, following = segment_names(Platform().disk, directory)[index : index + 2]
    (directory / str(gone)).unlink()
    platform = Platform(clock=clock)
    apply(root, platform, plan(root, platform))
    with closing(FileStore(root, settings=SETTINGS, platform=platform)) as store:
        for offset, time_us in enumerate(times):
            found = store.log.find_time(partition, time_us)
            if gone.base <= offset < following.base:  # nothing of it is there; what comes next must not be missed
                assert found <= following.base
            else:
                assert found == offset


def test_an_unreadable_first_block_of_the_active_segment_loses_what_it_held(kept: Kept) -> None:
    name = kept.names[-1]
    kept.change(name, FRONT_BYTES + 10)
    with closing(opened(kept.root)) as store, pytest.raises(Corruption):
        append(store, kept.partition, a_part(b"no"))
    assert [damage.start for damage in kept.verify().damages] == [name.base]
    check_repaired(kept, name.base, EVENTS)


def test_a_damaged_topic_file_is_written_anew_from_a_segment(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    path = kept.directory.parent / "topic.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), closing(opened(kept.root)) as store:
            assert store.log.topics() == [kept.topic]
            assert kept.content(store) == EXPECTED
    assert "cannot be read" not in caplog.text  # only once, since it is whole again
    assert path.read_bytes() == whole


def test_a_lost_topic_file_is_written_anew_from_a_segment(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    (kept.directory.parent / "topic.json").unlink()
    with caplog.at_level(logging.WARNING), closing(opened(kept.root)) as store:
        assert store.log.topics() == [kept.topic]
        assert kept.content(store) == EXPECTED
    assert "topic.json" in caplog.text


@pytest.mark.parametrize("damage", ["lost", "empty", "garbage"])
def test_a_lost_or_damaged_marker_file_is_written_anew_by_a_repair(kept: Kept, damage: str) -> None:
    path = kept.root / "penstock.json"
    whole = path.read_bytes()
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else b"{]")
    with pytest.raises(PenstockError, match=r"`penstock repair` writes it anew"):
        opened(kept.root)
    assert "penstock.json was written anew" in kept.repair()
    assert path.read_bytes() == whole
    with closing(opened(kept.root)) as store:
        assert kept.content(store) == EXPECTED


def test_an_identity_that_is_damaged_itself_does_not_tell_which_store_it_is(kept: Kept) -> None:
    (kept.root / "penstock.json").unlink()
    with closing(sqlite3.connect(kept.root / "control.db")) as connection, connection:
        connection.execute("UPDATE identity SET store_id = 'another'")
    with pytest.raises(IntegrityError, match="says which store this is"):
        kept.repair()
    assert not (kept.root / "penstock.json").exists()
