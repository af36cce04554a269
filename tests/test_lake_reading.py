"""A lake holds what the log held, to the last byte; the two are read as one, and what is in neither is a gap."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lakes import SMALL, Holed, World, rows
from tests.spark_topics import fill, info_of, rich, stored

from penstock import Bus
from penstock.batch import STORED_SCHEMA, Batch
from penstock.cli.app import run
from penstock.errors import BeyondEnd, GapFound, IntegrityError, UsageError
from penstock.joining import Joined, before
from penstock.lake import files as lake_files
from penstock.lake.content import Content
from penstock.lake.files import FileReader
from penstock.lake.lake import Lake
from penstock.lake.reading import ArchivedLog, LakeReader
from penstock.offsets import Gap, Range
from penstock.spark.pipelines.archive import Archiver, here
from penstock.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.lake.entries import LakeFile


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "lake")


def content_of(table: pa.Table, sizes: list[int]) -> bytes:
    """Return the digest of rows that come in batches of these sizes."""
    content = Content()
    edges = [*np.cumsum([0, *sizes]).tolist(), table.num_rows]
    for start, stop in pairwise(sorted({min(edge, table.num_rows) for edge in edges})):
        content.update(table.slice(start, stop - start).combine_chunks().to_batches()[0])
    return content.digest()


# --- content --------------------------------------------------------------------------------------

EVENTS = Batch.from_events(rich(60)).to_arrow()
PLACES = {"topic", "partition", "offset"}
"""What the name of a file says."""


@given(st.lists(st.integers(1, 40), max_size=8))
def test_the_digest_does_not_depend_on_batches(sizes: list[int]) -> None:
    table = pa.Table.from_batches([EVENTS])
    assert content_of(table, sizes) == content_of(table, [])


@given(st.integers(0, 59), st.sampled_from([name for name in STORED_SCHEMA.names if name not in PLACES]))
def test_the_digest_depends_on_every_value(row: int, name: str) -> None:
    values = EVENTS.column(name).to_pylist()
    another = {"time": datetime(1999, 1, 1, tzinfo=UTC), "headers": {"x": b"y"}, "data": b"other", "key": b"other"}
    another |= dict.fromkeys(("appended_at", "expires_at"), another["time"])
    values[row] = another.get(name, "another")
    changed = EVENTS.set_column(
        EVENTS.schema.get_field_index(name), STORED_SCHEMA.field(name), pa.array(values, STORED_SCHEMA.field(name).type)
    )
    assert content_of(pa.Table.from_batches([changed]), []) != content_of(pa.Table.from_batches([EVENTS]), [])


def test_what_stands_where_there_is_no_value_means_nothing() -> None:
    offsets, validity = pa.py_buffer(np.array([0, 3, 5], np.int32)), pa.py_buffer(bytes([0b10]))
    garbage = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"xyzok"), validity)
    clean = pa.array([None, "ok"])
    digests = []
    for subjects in (garbage, clean):
        columns = [subjects if name == "subject" else EVENTS.column(name).slice(0, 2) for name in EVENTS.schema.names]
        digests.append(content_of(pa.Table.from_arrays(columns, schema=EVENTS.schema), []))
    assert digests[0] == digests[1]


# --- files ----------------------------------------------------------------------------------------


def archived(world: World, count: int = 60, **aim: int) -> list[LakeFile]:
    world.publish(count)
    world.archiver(aim=SMALL._replace(**aim)).everything()
    return list(world.lake().manifest().files)


@pytest.mark.spark  # which brings pandas
def test_pandas_reads_the_directory_as_it_stands(world: World) -> None:
    pandas: Any = import_module("pandas")
    archived(world)
    frame = pandas.read_parquet(world.directory).sort_values(["partition", "offset"])
    truth = [row for partition in world.topic.partitions for row in world.truth[partition]]
    for name in ("topic", "partition", "offset", "id", "type", "source", "content_type", "data", "key"):
        assert frame[name].tolist() == [row[name] for row in truth], name
    assert set(frame["date"]) == {"2026-01-01"}
    assert [None if headers is None else dict(headers) for headers in frame["headers"]] == [
        None if row["headers"] is None else dict(row["headers"]) for row in truth
    ]


def test_what_comes_back_is_the_very_same_batch(world: World) -> None:
    archived(world, file_bytes=1 << 20)
    reader = LakeReader(world.lake())
    for partition in world.topic.partitions:
        ours = before(reader.read(partition, 0, 60, bytes_max=1 << 20), 60)
        theirs = world.store.log.read(partition, 0, bytes_max=1 << 20)
        assert [batch.range for batch in ours] == [batch.range for batch in theirs]
        for mine, log in zip(ours, theirs, strict=True):
            assert isinstance(mine, Batch)
            assert isinstance(log, Batch)
            assert mine.place == log.place
            assert mine.to_arrow().equals(log.to_arrow())
            assert [event.to_event() for event in mine] == [event.to_event() for event in log]


def test_a_read_of_a_few_events_unpacks_one_row_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_files, "GROUP_ROWS", 10)
    monkeypatch.setattr(lake_files, "READ_EVENTS", 10)
    archived(world, file_bytes=1 << 20)
    unpacked: list[int] = []
    real = FileReader.rows

    def rows(self: FileReader, number: int) -> pa.RecordBatch:
        unpacked.append(number)
        return real(self, number)

    monkeypatch.setattr(FileReader, "rows", rows)
    reader, partition = LakeReader(world.lake()), world.topic.partitions[0]
    [found] = reader.read(partition, 33, 60, bytes_max=1 << 20, events_max=2)
    assert found.range == Range(33, 35)
    assert len(unpacked) == 1
    reader.read(partition, 35, 60, bytes_max=1 << 20, events_max=2)
    assert len(unpacked) == 1, "it was unpacked before"


def test_a_read_returns_one_event_at_least_and_no_more_bytes_than_asked_for(world: World) -> None:
    archived(world, file_bytes=1 << 20)
    reader, partition = LakeReader(world.lake()), world.topic.partitions[0]
    [one] = reader.read(partition, 0, 60, bytes_max=1)
    assert len(one) == 1
    some = reader.read(partition, 0, 60, bytes_max=500)
    total = sum(item.total_size for item in some if isinstance(item, Batch))
    assert 300 < total <= 500


def read_all(file: LakeFile, path: Path) -> bytes:
    with FileReader(file, path) as reader:
        return lake_files.content_of(reader.rows(number) for number in range(reader.row_groups))


def test_damage_is_an_integrity_error_that_names_the_file_or_does_not_touch_its_content(world: World) -> None:
    file = archived(world)[0]
    path = world.directory / file.path
    sound = path.read_bytes()
    found: list[str] = []
    for where in range(0, len(sound), 11):
        path.write_bytes(sound[:where] + bytes([sound[where] ^ 0x5A]) + sound[where + 1 :])
        try:
            assert read_all(file, path) == file.digest
        except IntegrityError as error:
            found.append(str(error))
    assert len(found) > 10
    assert all(file.name in error for error in found)


def test_a_file_of_other_events_is_refused(world: World) -> None:
    one, *_, other = archived(world)
    with pytest.raises(IntegrityError, match="another partition"):
        read_all(one, world.directory / other.path)


def test_a_file_that_is_gone_is_told_by_its_name(world: World) -> None:
    file = archived(world)[0]
    world.trim()
    (world.directory / file.path).unlink()
    with pytest.raises(IntegrityError, match=f"the lake has lost a file: .*{file.token}"):
        rows(ArchivedLog(world.store.log, world.lake()), world.topic.partitions[0])


def test_a_reader_of_an_old_version_finds_what_was_merged_since(world: World) -> None:
    for _ in range(4):
        archived(world, 3, merged_files_min=100)
    world.trim()
    lake = world.lake()
    reader = LakeReader(lake)
    known = lake.manifest()
    assert world.archiver().everything().merged
    for file in known.files:
        assert lake.path(file).parent == lake.hidden
        with FileReader(file, lake.path(file)) as opened:
            assert opened.rows(0).num_rows == len(file.range)
    assert reader.read(world.topic.partitions[0], 0, 12, bytes_max=1 << 20)


# --- as one ---------------------------------------------------------------------------------------


def test_a_log_hands_out_nothing_beyond_what_was_asked_for_behind_a_gap(world: World) -> None:
    world.publish(60)
    holed = Holed(world.store.log, Range(10, 20))
    found = holed.read(world.topic.partitions[0], 10, bytes_max=1 << 20, events_max=15)
    assert found[-1].range.stop > 25
    cut = before(found, 25)
    assert (cut[0].range, cut[-1].range.stop) == (Range(10, 20), 25)
    assert before([Gap(3, 9, "x")], 5) == [Gap(3, 5, "x")]


def test_what_is_in_neither_is_a_gap(world: World) -> None:
    world.publish(30)
    world.trim()
    for partition in world.topic.partitions:
        world.store.log.trim(partition, 10)
    world.archiver().everything()
    world.trim()
    log, partition = ArchivedLog(world.store.log, world.lake()), world.topic.partitions[0]
    assert log.bounds(partition) == Range(10, 30)
    assert log.read(partition, 0, bytes_max=1 << 20) == [Gap(0, 10, "neither in the log nor in the archive")]
    with pytest.raises(BeyondEnd):
        log.read(partition, 31, bytes_max=1)
    other = world.create("others")
    world.publish(5, other)
    world.store.log.trim(other.partitions[0], 5)
    assert log.read(other.partitions[0], 1, bytes_max=1) == [Gap(1, 5, "neither in the log nor in the archive")]


def test_a_time_is_found_in_whichever_has_it(world: World) -> None:
    for _ in range(4):
        world.publish(7)
        world.clock.advance(100)
    world.archiver().everything()
    partition = world.topic.partitions[0]
    times = [row["appended_at"] for row in world.truth[partition]]
    expected = [world.store.log.find_time(partition, _us(time)) for time in times]
    world.store.log.trim(partition, 14)
    log = ArchivedLog(world.store.log, world.lake())
    assert [log.find_time(partition, _us(time)) for time in times] == expected
    assert log.find_time(partition, _us(times[-1] + timedelta(days=1))) == 28
    assert log.find_time(partition, 0) == 0


def _us(time: datetime) -> int:
    return round(time.timestamp() * 1_000_000)


@pytest.fixture
def trimmed(root: Path, tmp_path: Path) -> tuple[str, str, list[dict[str, object]]]:
    """Return a store of which the first 40 events are in a lake only, the lake, and everything that was published."""
    url, directory = f"file:{root}", str(tmp_path / "lake")
    fill(url, "orders", rich(40), partitions=1)
    truth = stored(url, "orders")
    store = open_store(url)
    lake = Lake(directory)
    Archiver(store, lake, ["orders"], here(store, lake, SMALL), aim=SMALL).everything()
    [partition] = info_of(store, "orders").partitions
    assert store.log.trim(partition, 40) == 40
    store.close()
    fill(url, "orders", rich(20), partitions=1)
    return url, directory, truth + stored(url, "orders")


async def test_a_bus_reads_both_as_one(trimmed: tuple[str, str, list[dict[str, object]]]) -> None:
    url, directory, truth = trimmed
    bus = Bus(url)
    try:
        found = [
            row
            async for item in bus.read_batches("orders", archive=directory)
            if isinstance(item, Batch)
            for row in item.to_arrow().to_pylist()
        ]
        assert found == truth
        events = [event.offset async for event in bus.read("orders", start=35, stop=45, archive=directory)]
        assert events == list(range(35, 45))
        moment = truth[12]["appended_at"]
        assert isinstance(moment, datetime)
        assert [event.offset async for event in bus.read("orders", start=moment, archive=directory)] == list(range(60))
        with pytest.raises(UsageError, match="no lake"):
            [event async for event in bus.read("orders", archive=f"{directory}-other")]
    finally:
        await bus.close()


async def test_what_neither_has_is_a_gap_for_a_bus_too(
    trimmed: tuple[str, str, list[dict[str, object]]], tmp_path: Path
) -> None:
    url, _, _ = trimmed
    Lake(tmp_path / "empty").create()
    bus = Bus(url)
    try:
        with pytest.raises(GapFound, match=r"\[3, 40\): neither in the log nor in the archive"):
            [event async for event in bus.read("orders", start=3, archive=tmp_path / "empty")]
    finally:
        await bus.close()


def test_the_command_reads_both_as_one(
    trimmed: tuple[str, str, list[dict[str, object]]], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    url, directory, truth = trimmed
    assert run(["--url", url, "read", "orders", "--archive", directory, "--json"]) == 0
    lines = capsysbinary.readouterr().out.splitlines()
    assert [int(msgspec.json.decode(line)["sequence"]) for line in lines] == list(range(60))
    assert [msgspec.json.decode(line)["id"] for line in lines] == [row["id"] for row in truth]


def test_a_joined_group_has_the_times_of_its_blocks(world: World) -> None:
    world.publish(21)
    found = world.store.log.read(world.topic.partitions[0], 0, bytes_max=1 << 20)
    joined = Joined.of([item for item in found if isinstance(item, Batch)])
    assert joined.rows(STORED_SCHEMA.names).to_pylist() == world.truth[world.topic.partitions[0]]


def test_a_file_says_what_the_topic_was(world: World) -> None:
    file = archived(world)[0]
    said = pq.read_schema(world.directory / file.path).metadata
    assert said[b"penstock.log"].decode() == world.topic.log_id
    assert said[b"penstock.content_type"] == b"text/plain"
    assert (world.directory / file.path).stat().st_mode & 0o077 == 0
