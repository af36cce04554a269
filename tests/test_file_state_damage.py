"""The small state of the file store when the disk fails or its files are damaged, and how they are made anew."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.file_state import (
    STORE_ID,
    StateStore,
    billing,
    damage,
    populated,
    state_stores,
    use_everything,
)

from penstock.clock import VirtualClock
from penstock.errors import (
    NewerFormat,
    PenstockError,
    StateMissing,
    StoreError,
    StoreFull,
    WritingStopped,
)
from penstock.rows import TopicInfo
from penstock.stores.file.platform import Platform, connect_sqlite
from penstock.stores.file.state.leases import SELECT_LEASE
from penstock.stores.file.state.rebuild import Salvage, examine, rebuild
from penstock.stores.file.state.schema import BULK, CONTROL, SEALED_TABLES, STATEMENTS, create_databases
from penstock.testing.conformance.builders import (
    a_cursor,
    a_parked,
    a_shard,
    acquired,
    commit,
    fill,
    park,
    subscribe,
)
from penstock.testing.conformance.opening import a_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def opening(directory: Path, clock: VirtualClock) -> Iterator[Callable[..., StateStore]]:
    with state_stores(directory, clock) as open_store:
        yield open_store


@pytest.fixture
def store(opening: Callable[..., StateStore]) -> StateStore:
    return opening()


@pytest.fixture
def topic(store: StateStore) -> TopicInfo:
    return a_topic(store)


# --- faults of the disk -----------------------------------------------------------------------


class FaultyConnection(sqlite3.Connection):
    """Raises the planted errors, one at each COMMIT or at the statement named."""

    planted: list[tuple[str, int]] = []  # noqa: RUF012 - shared by all connections of one test

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if self.planted and statement == self.planted[0][0]:
            code = self.planted.pop(0)[1]
            error = sqlite3.OperationalError("planted")
            error.sqlite_errorcode = code
            raise error
        return super().execute(statement, *arguments)


def connect_faulty(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False, factory=FaultyConnection)


@pytest.fixture
def faulty(opening: Callable[..., StateStore], clock: VirtualClock) -> Iterator[StateStore]:
    yield opening(Platform(clock=clock, connect=connect_faulty))
    FaultyConnection.planted.clear()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, StoreFull),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreError),
        (sqlite3.SQLITE_BUSY, StoreError),
        (sqlite3.SQLITE_CORRUPT, StateMissing),
    ],
)
def test_what_could_not_be_committed_is_not_there_and_writing_goes_on(
    faulty: StateStore, code: int, kind: type[PenstockError]
) -> None:
    topic = a_topic(faulty)
    subscribe(faulty, topic)
    assert commit(faulty, a_cursor(a_shard(topic), 0)) is None
    fill(faulty, topic.partitions[0], 5)
    FaultyConnection.planted = [("COMMIT", code)]
    with pytest.raises(kind) as raised:
        commit(faulty, a_cursor(a_shard(topic), 4), settlement=b"lost")
    assert type(raised.value) is kind
    assert not FaultyConnection.planted
    # Also what this process remembers of positions must not be what was refused.
    assert commit(faulty, a_cursor(a_shard(topic), 2)) is None
    assert [cursor.next_offset for cursor in faulty.cursors.load(topic.log_id, "billing")] == [2]
    assert faulty.cursors.settlements(10) == []


def test_a_sync_that_fails_and_cannot_be_mended_stops_writing_and_not_reading(faulty: StateStore) -> None:
    kept = acquired(faulty, "kept")
    FaultyConnection.planted = [("COMMIT", sqlite3.SQLITE_IOERR_FSYNC), ("COMMIT", sqlite3.SQLITE_IOERR_FSYNC)]
    for _ in range(2):
        with pytest.raises(WritingStopped):
            faulty.leases.acquire("lease", "a", 10)
    assert faulty.leases.holder("kept") == kept
    assert faulty.leases.holder("lease") is None


def test_a_transaction_that_the_disk_ended_fails_as_a_whole(faulty: StateStore) -> None:
    FaultyConnection.planted = [(SELECT_LEASE, sqlite3.SQLITE_FULL)]
    with pytest.raises(StoreFull):
        faulty.leases.acquire("lease", "a", 10)
    assert acquired(faulty)


# --- damage -----------------------------------------------------------------------------------


# Most tables have one row here; of the others, which.
ONE_ROW = {
    "leases": " WHERE name = 'lease'",
    "schedule": " WHERE id = 'a'",
    "tallies": " WHERE name IN ('subscriptions', 'payloads')",
}
# A row whose key is damaged is not found where it was; it is, where all rows are looked at.
FOUND_BY_LOOKING = {("parked", "log_id"), ("parked", "subscription"), ("leases", "name")}
FLIPPED = {"INTEGER": "{0} + 1", "TEXT": "{0} || 'x'", "BLOB": "CAST({0} || 'x' AS BLOB)", "REAL": "{0} + 1"}


def columns_of_everything() -> list[tuple[str, str, str, str]]:
    """Return file, table, name and type of every column whose rows are sealed."""
    found = []
    for file, statements in STATEMENTS.items():
        with closing(sqlite3.connect(":memory:")) as connection:
            for statement in statements:
                connection.execute(statement)
            for table in [*(table.name for table in SEALED_TABLES[file]), "identity", "tallies"]:
                for _, column, kind, *_ in connection.execute(f"PRAGMA table_info({table})"):
                    found.append((file, table, column, kind))
    return found


@pytest.mark.parametrize("place", columns_of_everything(), ids=lambda place: "-".join(place[:3]))
def test_a_changed_value_is_never_believed(
    opening: Callable[..., StateStore], directory: Path, place: tuple[str, str, str, str]
) -> None:
    file, table, column, kind = place
    store = opening()
    topic = populated(store)
    use_everything(store, topic)  # it is the damage that fails, and nothing else
    store.databases.close()
    flipped = FLIPPED[kind].format(f"coalesce({column}, 0)")
    damage(directory, file, f"UPDATE {table} SET {column} = {flipped}{ONE_ROW.get(table, '')}")
    assert examine(directory, STORE_ID, Platform()) != []
    if (table, column) in FOUND_BY_LOOKING:
        return
    with pytest.raises(StateMissing) as raised:
        use_everything(opening(), topic)
    assert file in str(raised.value)
    assert "penstock repair" in str(raised.value)
    assert table in str(raised.value)


def test_a_cursor_that_vanished_is_missed_and_never_read_as_a_beginning(
    store: StateStore, topic: TopicInfo, directory: Path
) -> None:
    subscribe(store, topic)
    commit(store, *(a_cursor(a_shard(topic, slot=slot), 0) for slot in range(2)))
    damage(directory, CONTROL, "DELETE FROM cursors WHERE slot = 1")
    for call in (
        lambda: store.cursors.load(topic.log_id, "billing"),
        lambda: store.witnesses.protection(topic.partitions[0], 0),
        lambda: store.witnesses.witness(topic.partitions[0]),
    ):
        with pytest.raises(StateMissing, match="cursors"):
            call()


def test_a_settlement_record_that_vanished_is_missed(store: StateStore, topic: TopicInfo, directory: Path) -> None:
    subscribe(store, topic)
    for number in range(3):
        commit(store, settlement=b"%d" % number)
    damage(directory, CONTROL, "DELETE FROM settlements WHERE first = 2")
    assert len(store.cursors.settlements(1)) == 1
    with pytest.raises(StateMissing, match="settlements"):
        store.cursors.settlements(2)


@pytest.mark.parametrize("table", ["sequences", "sinks", "subscriptions", "leases"])
def test_a_row_that_vanished_is_missed_before_anything_is_begun_anew(
    store: StateStore, directory: Path, table: str
) -> None:
    topic = populated(store)
    damage(directory, CONTROL, f"DELETE FROM {table}")
    calls: dict[str, Callable[[], object]] = {
        "sequences": lambda: store.schedule.claim(5, 10, acquired(store, "scheduler").fence),
        "sinks": lambda: store.manifests.last("lake"),
        "subscriptions": lambda: store.witnesses.protection(topic.partitions[0], 0),
        "leases": lambda: acquired(store),
    }
    with pytest.raises(StateMissing, match=table):
        calls[table]()


@pytest.mark.parametrize("file", [CONTROL, BULK])
def test_a_file_that_is_missing_foreign_or_no_database_is_said_at_opening(
    opening: Callable[..., StateStore], directory: Path, tmp_path: Path, file: str
) -> None:
    path = directory / file
    kept = path.read_bytes()

    def assert_missing(match: str) -> None:
        with pytest.raises(StateMissing, match=match) as raised:
            opening()
        assert "penstock repair" in str(raised.value)

    path.unlink()
    assert_missing("is missing")
    assert not path.exists()  # and nothing was made in its place
    for garbage in (b"", b"garbage" * 1000, kept[:4096], kept[:100] + bytes(len(kept) - 100)):
        path.write_bytes(garbage)
        assert_missing(file)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    create_databases(elsewhere, "f0" * 16, Platform())
    shutil.copy(elsewhere / file, path)
    assert_missing("f0f0")
    shutil.copy(elsewhere / (BULK if file == CONTROL else CONTROL), path)
    assert_missing("tables")
    path.write_bytes(kept)
    opening()


def test_a_newer_format_is_refused_and_left_alone(opening: Callable[..., StateStore], directory: Path) -> None:
    with closing(connect_sqlite(directory / CONTROL)) as connection:
        connection.execute("PRAGMA user_version = 2")
    before = (directory / CONTROL).read_bytes()
    with pytest.raises(NewerFormat, match="upgrade"):
        opening()
    with pytest.raises(NewerFormat):
        rebuild(directory, STORE_ID, Platform())
    assert (directory / CONTROL).read_bytes() == before


# --- rebuilding -------------------------------------------------------------------------------


def test_a_rebuild_keeps_what_is_sound_and_says_what_is_lost(
    opening: Callable[..., StateStore], directory: Path, clock: VirtualClock
) -> None:
    store = opening()
    topic = populated(store)
    commit(store, *(a_cursor(a_shard(topic, slot=slot), 1) for slot in (1, 2)), settlement=b"second")
    commit(store, settlement=b"third")
    store.cursors.forget_settlements(1)
    old = acquired(store, "old")
    claimed = store.schedule.claim(5, 1, acquired(store).fence)
    store.databases.close()
    damage(directory, CONTROL, "UPDATE cursors SET next_offset = 9 WHERE slot = 1")
    damage(directory, CONTROL, "DELETE FROM leases WHERE name = 'old'")
    damage(directory, CONTROL, "UPDATE settlements SET count = 3 WHERE first = 2")
    clock.advance(1)
    rebuilt = rebuild(directory, STORE_ID, Platform(clock=clock))
    assert rebuilt.tables["control.db/cursors"] == Salvage(2, 1)
    assert rebuilt.tables["control.db/leases"] == Salvage(1, 1)
    assert rebuilt.tables["control.db/settlements"] == Salvage(1, 1)
    assert rebuilt.tables["control.db/parked"] == Salvage(1, 0)
    assert not any(name.startswith(BULK) for name in rebuilt.tables)
    assert [path.parent.name for path in rebuilt.quarantined][:1] == ["quarantine"]
    assert all(path.exists() for path in rebuilt.quarantined)
    assert examine(directory, STORE_ID, Platform()) == []

    again = opening()
    assert [cursor.shard.slot for cursor in again.cursors.load(topic.log_id, "billing")] == [0, 2]
    assert len(again.cursors.subscriptions()) == 1
    assert len(again.parked.page(billing(topic))) == 1
    assert [row.record for row in again.cursors.settlements(10)] == [b"third"]
    assert again.cursors.settlements(10)[0].number > 3
    # A fence of a lost lease stays stale for ever, and nobody knows how its owner ended.
    assert commit(again, fences=(old.fence,)) is not None
    new = acquired(again, "old", "b")
    assert new.epoch > old.epoch
    assert new.epoch > clock.time_us() - 10**6
    assert not new.clean
    # What was claimed keeps its sequence; what is claimed now is another producer's.
    rows = again.schedule.claim(5, 10, acquired(again, "scheduler").fence)
    assert [row for row in rows if row.id == claimed[0].id] == claimed
    assert len({row.producer for row in rows}) == 2
    assert rebuild(directory, STORE_ID, Platform()) == ({}, [], [])


@pytest.mark.parametrize("missing", [True, False])
def test_parked_rows_that_lost_their_event_are_named_and_gone_after_a_rebuild(
    opening: Callable[..., StateStore], directory: Path, missing: bool
) -> None:
    store = opening()
    topic = populated(store)
    park(store, a_parked(a_shard(topic), 3))
    store.databases.close()
    if missing:
        (directory / BULK).unlink()
    else:
        damage(directory, BULK, "UPDATE payloads SET event = x'00' WHERE offset = 1")
    rebuilt = rebuild(directory, STORE_ID, Platform())
    lost = [1, 3] if missing else [1]
    assert rebuilt.parked_lost == [(topic.log_id, "billing", 0, offset) for offset in lost]
    assert rebuilt.tables["bulk.db/payloads"] == (Salvage(0, None) if missing else Salvage(1, 1))
    assert examine(directory, STORE_ID, Platform()) == []
    again = opening()
    assert [row.offset for row in again.parked.page(billing(topic))] == [
        offset for offset in (1, 3) if offset not in lost
    ]
    assert again.payloads.sweep() == 0


def test_pages_that_cannot_be_read_cost_only_what_is_on_them(
    opening: Callable[..., StateStore], directory: Path
) -> None:
    store = opening()
    topic = a_topic(store)
    subscribe(store, topic)
    commit(store, *(a_cursor(a_shard(topic, slot=slot), 0, settled=bytes(400)) for slot in range(500)))
    store.databases.close()
    content = bytearray((directory / CONTROL).read_bytes())
    pages = range(0, len(content), 4096)
    leaves = [at for at in pages if content[at] == 0x0A and content.count(b"billing", at, at + 4096) > 2]
    middle = leaves[len(leaves) // 2]
    content[middle : middle + 4096] = b"\xff" * 4096
    (directory / CONTROL).write_bytes(content)
    assert examine(directory, STORE_ID, Platform()) != []
    rebuilt = rebuild(directory, STORE_ID, Platform())
    kept, lost = rebuilt.tables["control.db/cursors"]
    assert lost is not None
    assert kept + lost == 500
    assert 0 < lost < 50
    assert len(opening().cursors.load(topic.log_id, "billing")) == kept


def test_a_rebuild_that_was_cut_off_is_finished(
    opening: Callable[..., StateStore], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opening()
    topic = populated(store)
    store.databases.close()
    damage(directory, CONTROL, "UPDATE leases SET epoch = 7")
    platform = Platform()
    rename = platform.disk.rename

    def cut_off(old: Path, new: Path) -> None:
        if new.name == CONTROL:
            raise OSError("planted")
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(platform.disk, "rename", cut_off)
        with pytest.raises(OSError, match="planted"):
            rebuild(directory, STORE_ID, platform)
    with pytest.raises(StateMissing):
        opening()
    rebuild(directory, STORE_ID, platform)
    assert len(opening().cursors.load(topic.log_id, "billing")) == 1


def test_a_connection_that_could_not_be_opened_for_writing_is_not_kept(
    opening: Callable[..., StateStore], clock: VirtualClock
) -> None:
    refusing = False

    def connect(path: Path) -> sqlite3.Connection:
        # What SQLite does by itself while no file can be opened for writing.
        mode = "ro" if refusing else "rw"
        return sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False)

    store = opening(Platform(clock=clock, connect=connect))
    topic = a_topic(store)
    refusing = True
    with pytest.raises(StoreError, match="readonly database; nothing was written"):
        subscribe(store, topic)
    refusing = False
    subscribe(store, topic)
    assert len(store.cursors.subscriptions()) == 1
