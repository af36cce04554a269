"""The format is what the package's docstring says, byte for byte; and what an earlier version wrote can be read."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.stores.file
from penstock import columns
from penstock.batch import Batch
from penstock.errors import NewerFormat
from penstock.producers import Run
from penstock.rows import ParkedFilter
from penstock.stores.file.block import (
    FRONT_BYTES,
    Blank,
    Broken,
    Kind,
    Segment,
    body_of,
    check_content,
    decode_runs,
    encode_front,
    parse_header,
    seed_of,
)
from penstock.stores.file.commit import encode_content, encode_data_block
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.stores.file.tail import State, Tail, decode_tail, encode_tail
from penstock.stores.file.verify import verify
from penstock.testing.conformance.builders import a_part, append, payloads

SEGMENT = Segment(b"\x11" * 16, 2, 100, seed_of(bytes(range(16))))
FIXTURE = Path(__file__).parent / "fixtures" / "format-1"


def the_example() -> bytes:
    """Return the bytes of the worked example in the docstring."""
    assert penstock.stores.file.__doc__ is not None
    lines = re.findall(r"^    [0-9a-f]{4}  ((?:[0-9a-f]{2} ?){16})$", penstock.stores.file.__doc__, re.MULTILINE)
    return bytes.fromhex("".join(lines))


def test_the_worked_example_is_a_block_as_it_is_described() -> None:
    data = the_example()
    header = parse_header(data, SEGMENT, 576)
    assert (header.kind, header.number, header.epoch, header.offset, header.span) == (Kind.DATA, 42, 3, 105, 1)
    assert header.end_position == 576 + len(data)
    content = pa.py_buffer(data[FRONT_BYTES:])
    check_content(header, content)
    [run] = decode_runs(data[FRONT_BYTES:], header.run_count)
    assert (run.producer, run.epoch, run.first_sequence, run.length) == (b"\x22" * 16, 0, 7, 1)
    batch = Batch.from_bytes(body_of(header, content.slice(0, header.content_length)), header.mask)
    assert [event.data for event in batch] == [b"hi"]
    assert run.digest == columns.digest(batch.columns)


def test_the_worked_example_is_what_is_written() -> None:
    batch = Batch.build([b"hi"])
    run = Run(b"\x22" * 16, 0, 7, 1, columns.digest(batch.columns))
    tail = a_tail()._replace(
        epoch=3, segment_base=100, position=576, number=42, durable_number=42, end=105, durable_end=105
    )
    parts = encode_data_block(SEGMENT, tail, encode_content(batch.columns, [run]), 1_767_225_600_000_000)
    assert b"".join(bytes(part) for part in parts) == the_example()


def a_tail() -> Tail:
    return Tail(State.OPEN, False, b"b" * 16, b"l" * 16, 1, 1, 0, 9, 576, 576, 1, 1, 0, 0, 0, 0, 0)


@given(st.integers(0, FRONT_BYTES * 8 - 1))
def test_a_flipped_bit_of_prefix_or_header_is_never_believed(bit: int) -> None:
    data = bytearray(the_example())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises((Broken, NewerFormat)):
        parse_header(bytes(data), SEGMENT, 576)


@given(st.integers(0, (448 - FRONT_BYTES) * 8 - 1))
def test_a_flipped_bit_of_the_content_is_never_believed(bit: int) -> None:
    data = bytearray(the_example())
    header = parse_header(bytes(data), SEGMENT, 576)
    data[FRONT_BYTES + bit // 8] ^= 1 << bit % 8
    content = bytes(data[FRONT_BYTES:])
    if bit // 8 < header.content_length:
        with pytest.raises(Broken):
            check_content(header, content)
    else:  # the filling behind a block, which `verify` looks at
        check_content(header, content)


@pytest.mark.parametrize(
    ("segment", "position"),
    [
        (SEGMENT._replace(seed=seed_of(b"another salt")), 576),
        (SEGMENT, 640),
        (SEGMENT._replace(log_id=b"\x12" * 16), 576),
        (SEGMENT._replace(partition=3), 576),
        (SEGMENT._replace(base=101), 576),
    ],
)
def test_a_block_is_believed_only_in_its_own_segment_at_its_own_place(segment: Segment, position: int) -> None:
    with pytest.raises(Broken):
        parse_header(the_example(), segment, position)


def test_zeros_are_blank_and_not_broken() -> None:
    with pytest.raises(Blank):
        parse_header(bytes(FRONT_BYTES), SEGMENT, 576)


def test_a_block_of_an_unknown_kind_is_of_a_newer_version() -> None:
    header = parse_header(the_example(), SEGMENT, 576)
    data = encode_front(SEGMENT, header._replace(kind=9))  # type: ignore[arg-type] # as a later version might
    with pytest.raises(NewerFormat):
        parse_header(data, SEGMENT, 576)


def test_a_compressed_body_is_unpacked_only_to_the_length_that_is_allowed() -> None:
    batch = Batch.build([b"x" * 10_000] * 10)
    content = encode_content(batch.columns, [Run(b"p" * 16, 0, 0, 10, 0)], compress=True)
    assert content.body.size < content.raw_length
    header = parse_header(the_example(), SEGMENT, 576)._replace(
        flags=content.flags, raw_length=content.raw_length, runs_length=0, mask=content.mask
    )
    assert Batch.from_bytes(body_of(header, content.body), content.mask).columns == batch.columns
    with pytest.raises(Broken, match="unpack"):
        body_of(header._replace(raw_length=1 << 40), content.body)
    with pytest.raises(Broken, match="unpack"):
        body_of(header._replace(raw_length=content.raw_length + 1), content.body)


@given(st.integers(0, 127 * 8 + 7))
def test_a_flipped_bit_of_a_tail_is_never_believed(bit: int) -> None:
    data = bytearray(encode_tail(a_tail()))
    assert decode_tail(bytes(data)) == a_tail()
    data[bit // 8] ^= 1 << bit % 8
    assert decode_tail(bytes(data)) is None


def test_a_directory_that_the_first_version_wrote_is_read(tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(FIXTURE, root)
    platform = Platform()
    report = verify(root, platform)
    assert report.ok, (report.damages, report.state)
    with closing(FileStore(root, platform=platform)) as store:
        topics = {info.name: info for info in store.log.topics()}
        assert sorted(topics) == ["compressed", "orders", "relaxed"]
        orders = topics["orders"].partitions[0]
        assert payloads(store, orders) == [b"%d" % number for number in range(30)]
        assert payloads(store, topics["compressed"].partitions[0]) == [b"z" * 5_000] * 40
        assert payloads(store, topics["relaxed"].partitions[0]) == [b"relaxed"]
        # What it knew of producers, subscriptions and the schedule is known still.
        assert append(store, orders, a_part(b"0", b"1", b"2"))[0].duplicate
        [cursor] = store.cursors.load(topics["orders"].log_id, "billing")
        assert cursor.next_offset == 7
        parked = store.parked.page(ParkedFilter(log_id=topics["orders"].log_id, subscription="billing"))
        assert [row.offset for row in parked] == [3]
        assert [row.id for row in store.schedule.page()] == ["later"]
