"""C6 in small, and that it sees what it is there to see."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa
import pytest

from penstock.errors import Corruption
from penstock.stores.file import recovery, rewrite, scan, segment, verify
from penstock.stores.file.block import Header, Kind
from penstock.stores.file.reader import PartitionReader
from penstock.stores.file.state.database import Database
from penstock.stores.file.state.sealing import Row, Table
from penstock.testing.campaigns import damage
from penstock.testing.campaigns.campaign import Report, TooManyFindings
from penstock.testing.campaigns.damage import CAMPAIGN, silence
from penstock.testing.campaigns.damage.cases import cut, flipped
from penstock.testing.campaigns.damage.oracle import ALLOCATED, FIRST_FILLING, LAST_MARKER


def test_all_damage_is_told_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = tempfile.mkdtemp

    def remember(**options: Any) -> str:
        made.append(Path(make(**options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", remember)
    report = Report(CAMPAIGN.small)
    CAMPAIGN.run(report, 0)
    assert not report.findings, report.findings[0]
    assert report.done == CAMPAIGN.small
    assert report.tried["a bit flipped"] > 2_000
    assert report.tried["damage repaired"] == CAMPAIGN.small
    assert {ALLOCATED, FIRST_FILLING, LAST_MARKER} <= report.tried.keys()
    assert len(made) == 1
    assert not made[0].exists()


# --- what is broken on purpose must be found --------------------------------------------------


class FirstFinding(Report):
    """Ends the campaign at the first finding."""

    def found(self, what: str, replay: str) -> None:
        raise TooManyFindings(what)


def ignore_content_crc(patch: pytest.MonkeyPatch) -> None:
    """Content is believed as it is."""
    patch.setattr(segment, "check_content", lambda _header, _content: None)


def ignore_header_crc(patch: pytest.MonkeyPatch) -> None:
    """Any CRC is the right one."""

    class Yes(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

        def __ne__(self, other: object) -> bool:
            return False

    patch.setattr(google_crc32c, "extend", lambda _seed, _data: Yes(0))


def stop_at_the_first_damage(patch: pytest.MonkeyPatch) -> None:
    """What is behind damage is given up."""
    patch.setattr(scan, "later_blocks", lambda *_: iter(()))


def call_everything_torn(patch: pytest.MonkeyPatch) -> None:
    """Acknowledged events are taken for a write that was cut off."""
    patch.setattr(scan, "CORRUPT", scan.TORN)


def ignore_the_filling(patch: pytest.MonkeyPatch) -> None:
    """Bytes behind a block may be anything."""
    patch.setattr(scan, "is_blank_from", lambda *_: True)


def trust_any_segment(patch: pytest.MonkeyPatch) -> None:
    """Segments of other logs are taken for one's own."""
    original = verify.open_segments

    def opened(files: Any, first: int, tail: Any) -> Any:
        found = original(files, first, tail)
        found.damages[:] = [damage for damage in found.damages if damage.kind != scan.FOREIGN]
        return found

    patch.setattr(verify, "open_segments", opened)


def skip_what_cannot_be_read(patch: pytest.MonkeyPatch) -> None:
    """A reader goes on behind damage as if nothing had been there."""
    read = PartitionReader.read

    def read_on(self: PartitionReader, start: int, *rest: Any) -> list[Any]:
        try:
            return read(self, start, *rest)
        except Corruption as error:
            return read(self, error.stop or start, *rest)

    patch.setattr(PartitionReader, "read", read_on)


def forget_the_witness(patch: pytest.MonkeyPatch) -> None:
    """Offsets that were given once are given again."""
    patch.setattr(recovery, "_declare_lost", lambda _files, _file, tail, _witness: tail)


def repair_without_a_gap(patch: pytest.MonkeyPatch) -> None:
    """What is lost is not declared, and what follows moves up."""
    patch.setattr(rewrite.Blocks, "declare_lost", lambda *_: None)


def lose_intact_blocks(patch: pytest.MonkeyPatch) -> None:
    """A repair drops markers, and every fifth block."""
    original = rewrite.Blocks.add

    def add(self: rewrite.Blocks, header: Header, content: pa.Buffer) -> None:
        if header.kind == Kind.DATA and header.number % 5:
            original(self, header, content)

    patch.setattr(rewrite.Blocks, "add", add)


def believe_any_row(patch: pytest.MonkeyPatch) -> None:
    """The checksums of rows are not looked at."""

    def checked(self: Table, row: Row) -> Row:
        return row[:-1]

    patch.setattr(Table, "checked", checked)


def let_errors_of_sqlite_pass(patch: pytest.MonkeyPatch) -> None:
    """Whoever reads gets an error that is not Penstock's."""

    def read(self: Database, work: Any) -> Any:
        connection: sqlite3.Connection = self._connections.lend_reader()
        try:
            return work(connection)
        finally:
            self._connections.take_back(connection, reading=True, discard=True)

    patch.setattr(Database, "read", read)


@pytest.fixture(scope="module")
def shares() -> Iterator[damage._Shares]:
    """All damages, of a store that was made before anything is broken."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    yield damage._Shares(directory, FirstFinding(1), 0, random.Random(0))
    shutil.rmtree(directory)


def try_some(shares: damage._Shares, chance: random.Random) -> None:
    """Try a little of everything, thoroughly."""
    for place in chance.sample(shares._bits, 30):
        shares._look(flipped(shares._log, *place))
    for place in chance.sample(shares._lengths, 20):
        shares._look(cut(shares._log, *place))
    for case in chance.sample(shares._whole, 30):
        shares._laboratory.examine(case)
    for _ in range(3):
        shares._repair(shares._drawn())
    for name, data in shares._databases.files.items():
        for bit in chance.sample(range(8 * len(data)), 100):
            shares._databases.flip(name, bit, in_files=False)


def test_a_store_that_works_passes_what_finds_the_broken_ones(
    shares: damage._Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "THOROUGHLY", 1.0)
    with silence():
        try_some(shares, random.Random(1))


@pytest.mark.parametrize(
    "breakage",
    [
        ignore_content_crc,
        ignore_header_crc,
        stop_at_the_first_damage,
        call_everything_torn,
        ignore_the_filling,
        trust_any_segment,
        skip_what_cannot_be_read,
        forget_the_witness,
        repair_without_a_gap,
        lose_intact_blocks,
        believe_any_row,
        let_errors_of_sqlite_pass,
    ],
)
def test_a_store_that_does_not_tell_is_found(
    shares: damage._Shares, breakage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "THOROUGHLY", 1.0)
    breakage(monkeypatch)
    with silence(), pytest.raises(TooManyFindings):
        try_some(shares, random.Random(1))
