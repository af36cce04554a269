"""The manifest: the same after its bytes, never two entries for an offset, and no word of it leads out of the lake."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import IntegrityError, NewerFormat
from penstock.lake import entries
from penstock.lake.entries import Entry, LakeFile, LakeGap, Manifest, decode, encode
from penstock.offsets import OFFSET_END
from penstock.rows import Partition

NAMES = st.from_regex(r"_?[a-z0-9][a-z0-9_-]{0,20}", fullmatch=True)
IDS = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
OFFSETS = st.lists(st.integers(0, OFFSET_END), min_size=2, max_size=2, unique=True).map(sorted)
TIMES = st.lists(st.integers(0, 250_000_000_000_000_000), min_size=2, max_size=2).map(sorted)


@st.composite
def files(draw: st.DrawFn) -> LakeFile:
    start, stop = draw(OFFSETS)
    first, last = draw(TIMES)
    size, event_bytes = draw(st.integers(0, 1 << 40)), draw(st.integers(0, 1 << 40))
    token, digest = draw(st.from_regex(r"[0-9a-f]{16}", fullmatch=True)), draw(st.binary(min_size=16, max_size=16))
    number = draw(st.integers(0, 1_000))
    return LakeFile(draw(NAMES), draw(IDS), number, start, stop, token, size, event_bytes, first, last, digest)


@st.composite
def gaps(draw: st.DrawFn) -> LakeGap:
    start, stop = draw(OFFSETS)
    return LakeGap(draw(NAMES), draw(IDS), draw(st.integers(0, 1_000)), start, stop, draw(st.text(max_size=30)))


A_FILE = LakeFile("orders", "a" * 32, 1, 5, 9, "cafe", 100, 90, 1_767_225_600_000_000, 1_767_225_600_000_007, b"d" * 16)


@given(st.lists(files(), max_size=5), st.lists(gaps(), max_size=3))
def test_a_manifest_is_the_same_after_its_bytes(some: list[LakeFile], holes: list[LakeGap]) -> None:
    manifest = Manifest("id", some, holes)
    assert decode(encode(manifest)) == manifest


def test_a_file_is_found_by_topic_and_day_and_its_name_says_what_it_has() -> None:
    start, stop = "00000000000000000005", "00000000000000000009"
    assert A_FILE.path == f"topic=orders/date=2026-01-01/{'a' * 32}-1-{start}-{stop}-cafe.parquet"


@pytest.mark.parametrize(
    ("field", "value"),
    [("topic", "../../etc"), ("topic", "a/b"), ("log_id", "../x"), ("token", "a/../../b"), ("topic", "..")],
)
def test_no_word_of_a_manifest_leads_out_of_the_lake(field: str, value: str) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(IntegrityError):
        decode(encode(Manifest("id", [A_FILE._replace(**changes)])))


@given(files())
def test_every_path_stays_below_the_lake(file: LakeFile) -> None:
    path = PurePosixPath(file.path)
    assert len(path.parts) == 3
    assert ".." not in path.parts


@pytest.mark.parametrize("cut", [0, 5, 20, 40])
def test_damaged_bytes_are_an_integrity_error(cut: int) -> None:
    data = encode(Manifest("id", [A_FILE]))
    for broken in (data[:cut], data[:cut] + b"\xff" + data[cut + 1 :][:-3]):
        with pytest.raises((IntegrityError, NewerFormat)):
            decode(broken)


def test_a_newer_format_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "FORMAT", 2)
    data = encode(Manifest("id"))
    monkeypatch.undo()
    with pytest.raises(NewerFormat, match="upgrade"):
        decode(data)


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.booleans()), max_size=12)


def entry(start: int, length: int, *, is_gap: bool) -> Entry:
    if is_gap:
        return LakeGap("orders", "a" * 32, 0, start, start + length, "lost")
    return A_FILE._replace(partition=0, start=start, stop=start + length, token=f"{start}x{length}")


@given(SPANS, SPANS)
def test_whatever_is_offered_no_offset_gets_two_entries(
    before: list[tuple[int, int, bool]], after: list[tuple[int, int, bool]]
) -> None:
    manifest = Manifest("id")
    for offered in (before, after):
        wanted = [entry(start, length, is_gap=is_gap) for start, length, is_gap in offered]
        manifest = manifest.changed(manifest.fitting(wanted))
    kept = manifest.entries(Partition("a" * 32, 0))
    offsets = [offset for each in kept for offset in each.range]
    assert len(offsets) == len(set(offsets))
    assert sorted(offsets) == manifest.archived(Partition("a" * 32, 0)).to_offsets().tolist()


def test_a_hundred_thousand_files_make_a_manifest_of_some_megabytes() -> None:
    many = [
        A_FILE._replace(start=number * 1_000, stop=number * 1_000 + 1_000, token=f"{number:016x}", digest=bytes(16))
        for number in range(100_000)
    ]
    assert len(encode(Manifest("id", many))) < 5_000_000
