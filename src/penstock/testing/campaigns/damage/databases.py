"""Damaged databases: no damaged row is ever believed.

Every read either gives exactly the rows that were written, or raises a `PenstockError`. Two things are weaker than
that, and counted by name:

* **a row that a read does not see**, because the page above it leads past it: what is read is true but not all, and
  `verify` tells that rows are missing;
* **an earlier commit**: SQLite takes a frame of the WAL that fails its checksum for the WAL's end, so that what was
  committed behind it is gone, as after a crash that lost it. What is read is the truth of an earlier moment, whole.

Flips in a database without a WAL are looked at in memory, by SQLite all the same; those in a WAL, and a share of the
others, in files.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.rows import Manifest, ParkedFilter, Partition
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.platform import Platform
from penstock.stores.file.state.cursors import FileCursors
from penstock.stores.file.state.database import open_databases
from penstock.stores.file.state.leases import FileLeases
from penstock.stores.file.state.manifests import FileManifests
from penstock.stores.file.state.parked import FileParkedRows
from penstock.stores.file.state.payloads import Payloads
from penstock.stores.file.state.rebuild import examine
from penstock.stores.file.state.schedule import FileSchedule
from penstock.stores.file.state.schema import BULK, CONTROL
from penstock.stores.file.state.witnesses import Witnesses
from penstock.stores.file.store import read_marker
from penstock.testing.campaigns.damage.specimen import BOOT, LEASE, SUBSCRIPTION, a_platform, open_store
from penstock.testing.conformance.builders import a_cursor, a_parked, a_shard, acquired, commit, park

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.offsets import Range
    from penstock.stores.file.state.database import Databases
    from penstock.testing.campaigns.campaign import Report
    from penstock.testing.campaigns.damage.specimen import Specimen

MISSED: Final = "a row that a read does not see, and verify tells of"
EARLIER: Final = "a flip in the WAL that leaves the truth of an earlier commit"
TESTIFIED: Final = "end that cursors and parked rows testify to"
FLIP: Final = "a bit of a database flipped"
JOURNAL_BYTES: Final = (18, 19)
"""Of a database: they say that it has a WAL, which one in memory cannot have."""
WALS: Final = (f"{CONTROL}-wal", f"{BULK}-wal")

Answers = dict[str, list[Any]]
"""What each read gave, one item per row."""


class _StillLog:
    """The `LogView` of a log that nobody changes."""

    def check_open(self) -> None:
        """See `LogView`."""

    def check_topic(self, log_id: str) -> None:
        """See `LogView`."""

    def check_partition(self, partition: Partition) -> None:
        """See `LogView`."""

    def bounds_synced(self, partition: Partition, up_to: int) -> Range:
        """See `LogView`."""
        raise AssertionError("nothing is written here")


class DatabaseLaboratory:
    """Looks at one flipped bit after the other."""

    def __init__(self, specimen: Specimen, directory: Path, report: Report, chance: random.Random) -> None:
        self._report = report
        self._directory = directory
        self._log_id = specimen.topic.log_id
        self._store_id = read_marker(specimen.root, Platform()).store_id
        directory.mkdir()
        in_files = a_platform(chance)
        self._in_files = in_files
        self._in_memory = Platform(clock=in_files.clock, boot_id=BOOT, connect=self._connect_in_memory)
        self._gates = shared_gates(directory / "locks", in_files)
        self.files = {name: (specimen.root / name).read_bytes() for name in (CONTROL, BULK)}
        self._now: dict[str, bytes] = {}
        self._true = self._read_files(self.files)
        self.moments = self._with_wal(specimen)
        self._truths = [self._read_files(files) for files in self.moments]

    def _with_wal(self, specimen: Specimen) -> list[dict[str, bytes]]:
        """Return both databases with their WALs after each of some commits."""
        copy = self._directory / "store"
        shutil.copytree(specimen.root, copy)
        moments: list[dict[str, bytes]] = []
        with closing(open_store(copy, self._in_files)) as store:
            shard = a_shard(specimen.topic)
            steps: list[Callable[[], object]] = [
                lambda: commit(store, a_cursor(shard, 4), settlement=b"to 4"),
                lambda: park(store, a_parked(shard, 4)),
                lambda: acquired(store, LEASE, seconds=1e9),
                lambda: store.schedule.cancel("c"),
                lambda: store.manifests.prepare(Manifest(sink="lake", query="q", batch=2, body=b"body 2")),
                lambda: commit(store, a_cursor(shard, 5), settlement=b"to 5"),
            ]
            for step in [lambda: None, *steps]:
                step()
                paths = [copy / name for name in (CONTROL, BULK, *WALS)]
                moments.append({path.name: path.read_bytes() for path in paths if path.exists()})
        shutil.rmtree(copy)
        return moments

    # --- flipping -------------------------------------------------------------------------------

    def flip(self, name: str, bit: int, *, in_files: bool) -> None:
        """Flip a bit of a database that has no WAL, and read everything."""
        where = f"{name}, bit {bit % 8} of byte {bit // 8}"
        damaged = self.files | {name: _flipped(self.files[name], bit)}
        if in_files or bit // 8 in JOURNAL_BYTES:
            answers = self._read_files(damaged)
        else:
            self._put(damaged)
            answers = self._read(self._in_memory)
        self._report.count(FLIP)
        self._judge(answers, where, lambda: damaged)

    def flip_in_wal(self, name: str, bit: int) -> None:
        """Flip a bit of a WAL, and read everything."""
        where = f"{name}, bit {bit % 8} of byte {bit // 8}"
        last = self.moments[-1]
        damaged = last | {name: _flipped(last[name], bit)}
        answers = self._read_files(damaged)
        self._report.count("a bit of a WAL flipped")
        if any(_agrees(answers, truth) for truth in self._truths[:-1]) and not _agrees(answers, self._truths[-1]):
            self._report.count(EARLIER)
            return
        self._judge(answers, where, lambda: damaged, self._truths[-1])

    def _judge(
        self, answers: Answers, where: str, files: Callable[[], Mapping[str, bytes]], truth: Answers | None = None
    ) -> None:
        truth = self._true if truth is None else truth
        missed = []
        for read, rows in answers.items():
            true = truth.get(read, [])
            if rows == true or _is_told(rows):
                continue
            if any(row not in true for row in rows) and not (read == TESTIFIED and rows[0] in _ends(truth)):
                self._report.found(f"reading the {read} gave {rows}, and true is {true}", where)
            else:
                missed.append(read)
        if missed:
            self._report.count(MISSED)
            self._write(files())
            if not examine(self._directory, self._store_id, self._in_files):
                self._report.found(f"rows are missed by reading the {missed}, and verify tells nothing of it", where)

    # --- reading --------------------------------------------------------------------------------

    def _read_files(self, files: Mapping[str, bytes]) -> Answers:
        self._write(files)
        return self._read(self._in_files)

    def _write(self, files: Mapping[str, bytes]) -> None:
        for path in self._directory.glob("*.db*"):
            path.unlink()
        for name, data in files.items():
            (self._directory / name).write_bytes(data)

    def _put(self, files: Mapping[str, bytes]) -> None:
        self._now = {name: data[:18] + b"\1\1" + data[20:] for name, data in files.items()}

    def _connect_in_memory(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.deserialize(self._now[path.name])
        return connection

    def _read(self, platform: Platform) -> Answers:
        """Make every read, each answer being the rows or the error that it ended with."""
        try:
            databases = open_databases(self._directory, self._store_id, platform, self._gates, stall_seconds=5.0)
        except Exception as error:  # noqa: BLE001 - which kinds are allowed is decided where answers are judged
            return {"opening": [error]}
        try:
            return {name: _answer(read) for name, read in self._reads(databases, platform).items()}
        finally:
            databases.close()

    def _reads(self, databases: Databases, platform: Platform) -> dict[str, Callable[[], list[Any]]]:
        control, view = databases.control, _StillLog()
        payloads = Payloads(control, databases.bulk, platform)
        witnesses = Witnesses(control, payloads)
        cursors = FileCursors(control, payloads, witnesses, view, platform.clock, parked_rows_max=1000)
        parked = FileParkedRows(control, payloads, view)
        leases = FileLeases(databases, view, platform, member=0, is_alive=lambda _: True)
        schedule = FileSchedule(databases, view, scheduled_rows_max=1000)
        manifests = FileManifests(control, view)
        wanted = ParkedFilter(log_id=self._log_id, subscription=SUBSCRIPTION)
        return {
            "subscriptions": cursors.subscriptions,
            "cursors": lambda: cursors.load(self._log_id, SUBSCRIPTION),
            "settlements": lambda: list(cursors.settlements(10)),
            "parked rows": lambda: parked.page(wanted),
            "parked rows that are due": lambda: parked.due(wanted, 10),
            "states of parked rows": lambda: [
                (state, row) for state, rows in parked.count(wanted).items() for row in range(rows)
            ],
            "lease": lambda: _as_rows(leases.holder(LEASE)),
            "schedule": schedule.page,
            "next due time": lambda: _as_rows(schedule.next_due()),
            "pending": lambda: [("row", row) for row in range(schedule.pending())],
            "last manifest": lambda: _as_rows(manifests.last("lake")),
            "unfinished manifests": manifests.unfinished,
            TESTIFIED: lambda: _as_rows(witnesses.witness(Partition(self._log_id, 0))),
            "protection": lambda: _as_rows(witnesses.protection(Partition(self._log_id, 0), 0)),
            "producer": lambda: [databases.identity.producer],
        }


def _flipped(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _as_rows(row: object | None) -> list[Any]:
    return [] if row is None else [row]


def _answer(read: Callable[[], list[Any]]) -> list[Any]:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - which kinds are allowed is decided where answers are judged
        return [error]


def _is_told(rows: list[Any]) -> bool:
    return len(rows) == 1 and isinstance(rows[0], PenstockError)


def _ends(truth: Answers) -> set[int]:
    """Return what is testified by any rows."""
    cursors = {cursor.next_offset for cursor in truth["cursors"]}
    return {0} | cursors | {row.offset + 1 for row in truth["parked rows"]}


def _agrees(answers: Answers, truth: Answers) -> bool:
    """Say whether all answers are those of one moment, or errors, and at least one is no error."""
    agreeing = [rows == truth.get(read) or _is_told(rows) for read, rows in answers.items()]
    return all(agreeing) and not all(map(_is_told, answers.values()))
