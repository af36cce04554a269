from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Event, Topic
from penstock.clock import VirtualClock
from penstock.errors import (
    Fenced,
    InvalidEvent,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreUnavailable,
    UsageError,
)
from penstock.outbox import SqliteOutbox
from penstock.ports import Store
from penstock.rows import Fence, Staged
from penstock.stores.memory import MemoryStore
from penstock.testing.conformance.builders import acquired
from penstock.testing.conformance.entrances import OutboxConformance

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

raw = Topic("raw", bytes)
keyed = Topic("keyed", bytes, partitions=4)

FENCE = Fence("outbox", 1)


def connected(path: Path, **options: Any) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, **options))


# --- the port --------------------------------------------------------------------------------


class OutboxStore(MemoryStore):
    """A memory store whose outbox is a file of the application."""

    outbox: SqliteOutbox  # type: ignore[assignment]

    def __init__(self, clock: VirtualClock, path: Path) -> None:
        super().__init__(clock=clock)
        self.outbox = SqliteOutbox(path)
        self.outbox.pending()  # opens it; later the tests hold transactions

    def close(self) -> None:
        super().close()
        self.outbox.close()


class TestSqliteOutbox(OutboxConformance):
    journal = "delete"

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "app.db"
        with connected(self.path) as connection:
            connection.execute(f"PRAGMA journal_mode = {self.journal}")
            connection.execute("CREATE TABLE business (id INTEGER PRIMARY KEY)")

    def open(self, clock: VirtualClock) -> Store:
        return OutboxStore(clock, self.path)

    @contextmanager
    def in_transaction(self) -> Iterator[sqlite3.Connection]:
        with connected(self.path) as connection, connection:
            connection.execute("INSERT INTO business VALUES (NULL)")
            yield connection

    def transaction(self, store: Store) -> AbstractContextManager[Any]:
        return self.in_transaction()

    def test_a_stale_mover_is_fenced(self, store: Store) -> None:
        # The file cannot know of an epoch that was never used on it; from then on the lower one is refused.
        assert isinstance(store, OutboxStore)
        self.stage(store, b"one")
        stale = acquired(store).fence
        [row] = store.outbox.claim(10, stale)
        fresh = acquired(store).fence
        assert store.outbox.claim(10, fresh) == [row]
        for refused in (
            lambda: store.outbox.claim(10, stale),
            lambda: store.outbox.claimed(stale),
            lambda: store.outbox.done([row.sequence], stale),
            lambda: store.outbox.set_aside({row.sequence: "why"}, stale),
        ):
            with pytest.raises(Fenced):
                refused()
        assert store.outbox.claim(10, fresh) == [row]


class TestSqliteOutboxInWalMode(TestSqliteOutbox):
    journal = "wal"


# --- staging ---------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.fixture
def outbox(path: Path) -> Iterator[SqliteOutbox]:
    with closing(SqliteOutbox(path)) as opened:
        yield opened


def staged(*payloads: bytes, topic: str = "raw", **fields: Any) -> list[Staged]:
    return [Staged(topic=topic, event=Event(data=payload, **fields)) for payload in payloads]


def payloads_of(outbox: SqliteOutbox) -> list[bytes]:
    return [row.event.data for row in outbox.claim(1_000, Fence("outbox", 1_000))]


def test_making_an_outbox_touches_no_file(path: Path) -> None:
    SqliteOutbox(path)
    assert not path.exists()


def test_staging_needs_no_table_and_commits_nothing(path: Path, outbox: SqliteOutbox) -> None:
    with connected(path) as connection, connected(path) as other:
        connection.execute("CREATE TABLE business (name TEXT)")
        connection.execute("INSERT INTO business VALUES ('ada')")
        outbox.stage(connection, staged(b"x"))
        assert connection.in_transaction
        assert other.execute("SELECT COUNT(*) FROM business").fetchone() == (0,)
        connection.rollback()
        assert connection.execute("SELECT COUNT(*) FROM business").fetchone() == (0,)
        assert connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'penstock%'").fetchall() == []
        outbox.stage(connection, staged(b"y"))  # the first statement of its transaction
        assert connection.in_transaction
        connection.commit()
    assert payloads_of(outbox) == [b"y"]


@pytest.mark.parametrize("level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_staging_opens_the_kind_of_transaction_that_the_connection_opens(path: Path, level: Any) -> None:
    outbox = SqliteOutbox(path)
    with connected(path, isolation_level=level) as connection:
        outbox.stage(connection, staged(b"x"))
        connection.rollback()
        outbox.stage(connection, staged(b"y"))
        connection.commit()
    assert payloads_of(outbox) == [b"y"]
    outbox.close()


def test_a_connection_that_commits_by_itself_must_begin_first(path: Path, outbox: SqliteOutbox) -> None:
    with connected(path, isolation_level=None) as connection:
        with pytest.raises(UsageError, match="BEGIN"):
            outbox.stage(connection, staged(b"x"))
        connection.execute("BEGIN")
        outbox.stage(connection, staged(b"x"))
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        outbox.stage(connection, staged(b"y"))
        connection.execute("COMMIT")
    assert payloads_of(outbox) == [b"y"]


def test_the_autocommit_of_later_pythons_is_understood(path: Path, outbox: SqliteOutbox) -> None:
    class Later(sqlite3.Connection):
        autocommit: Any = True

    with closing(Later(path)) as connection:
        with pytest.raises(UsageError, match="BEGIN"):
            outbox.stage(connection, staged(b"x"))
        connection.autocommit = False  # such a connection is always in a transaction
        connection.execute("BEGIN")
        outbox.stage(connection, staged(b"x"))
        connection.commit()
    assert payloads_of(outbox) == [b"x"]


def test_what_the_caller_has_made_of_its_connection_does_not_matter(path: Path, outbox: SqliteOutbox) -> None:
    with connected(path) as connection:
        connection.row_factory = lambda cursor, row: {"row": row}
        connection.text_factory = bytes
        outbox.stage(connection, staged(b"x"))
        connection.commit()
        assert connection.execute("SELECT 1").fetchone() == {"row": (1,)}
    assert payloads_of(outbox) == [b"x"]


def test_an_event_comes_back_exactly(path: Path, outbox: SqliteOutbox) -> None:
    events = [
        Event(),
        Event(
            data=bytes(range(256)),
            type="order.placed",
            key=b"\xff\x00",
            id="ïd",
            source="penstock:x",
            subject="s",
            time=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=-7))),
            expires_at=datetime.max.replace(tzinfo=UTC),
            content_type="application/json",
            headers={"a": b"\xff", "ü": b""},
        ),
        Event(data=b"x", time=datetime(1, 1, 1, tzinfo=UTC), expires_at=datetime(1969, 12, 31, 23, 59, 59, 1, UTC)),
    ]
    with connected(path) as connection:
        outbox.stage(connection, [Staged(topic="raw", event=event) for event in events])
        connection.commit()
    claimed = [row.event for row in outbox.claim(10, FENCE)]
    assert claimed == events
    assert claimed[1].time is not None
    assert claimed[1].time.tzinfo is UTC or claimed[1].time.utcoffset() == timedelta(0)


def test_what_cannot_be_staged_is_refused_before_anything_is_written(path: Path, outbox: SqliteOutbox) -> None:
    outbox.pending()
    with connected(path) as connection:
        with pytest.raises(InvalidEvent):
            outbox.stage(connection, staged(b"x", type=""))
        with pytest.raises(UsageError, match=r"sqlite3\.Connection"):
            outbox.stage(connection.cursor(), staged(b"x"))
        assert not connection.in_transaction


def test_a_connection_to_another_file_is_refused(path: Path, tmp_path: Path, outbox: SqliteOutbox) -> None:
    for other in (":memory:", "", str(tmp_path / "other.db")):
        with closing(sqlite3.connect(other)) as connection:
            with pytest.raises(UsageError, match=r"but the outbox is .*app\.db"):
                outbox.stage(connection, staged(b"x"))
            outbox.pending()
            connection.execute("ATTACH ? AS app", (str(path),))
            with pytest.raises(UsageError, match="but the outbox is"):
                outbox.stage(connection, staged(b"x"))
    (tmp_path / "link.db").symlink_to(path)
    with connected(tmp_path / "link.db") as connection:
        outbox.stage(connection, staged(b"x"))
        connection.commit()
    assert outbox.pending() == 1


def test_an_outbox_that_is_full_says_so_and_keeps_the_transaction(path: Path) -> None:
    with closing(SqliteOutbox(path, rows_max=3)) as outbox, connected(path) as connection:
        connection.execute("CREATE TABLE business (name TEXT)")
        outbox.stage(connection, staged(b"0", b"1"))
        connection.execute("INSERT INTO business VALUES ('ada')")
        with pytest.raises(StoreFull, match="2 rows wait and 2 more exceed 3"):
            outbox.stage(connection, staged(b"2", b"3"))
        connection.commit()
        assert connection.execute("SELECT COUNT(*) FROM business").fetchone() == (1,)
        assert payloads_of(outbox) == [b"0", b"1"]
        outbox.done([1, 2], Fence("outbox", 1_000))
        outbox.stage(connection, staged(b"2", b"3", b"4"))
        connection.commit()
        assert outbox.pending() == 3


def test_rows_are_staged_all_or_none(path: Path, outbox: SqliteOutbox) -> None:
    outbox.pending()
    with connected(path) as connection:
        connection.execute(
            "CREATE TRIGGER full BEFORE INSERT ON penstock_outbox WHEN new.topic = 'bad'"
            " BEGIN SELECT RAISE(ABORT, 'no'); END"
        )
        outbox.stage(connection, staged(b"kept"))
        with pytest.raises(sqlite3.IntegrityError):
            outbox.stage(connection, [*staged(b"x", b"y"), *staged(b"z", topic="bad")])
        connection.commit()
    assert payloads_of(outbox) == [b"kept"]


# --- claiming --------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_every_claim_is_a_synced_change_of_the_file(path: Path, journal: str) -> None:
    # In WAL mode a caller's commit with synchronous=NORMAL is not synced; the next synced commit behind it syncs both.
    connections = []

    def connect(file: Path) -> sqlite3.Connection:
        connections.append(sqlite3.connect(file, isolation_level=None, check_same_thread=False))
        return connections[-1]

    with connected(path) as caller:
        assert caller.execute(f"PRAGMA journal_mode = {journal}").fetchone() == (journal,)
        caller.execute("PRAGMA synchronous = NORMAL")
        with closing(SqliteOutbox(path, connect=connect)) as outbox:
            outbox.stage(caller, staged(b"x"))
            caller.commit()
            versions = set()
            for _ in range(5):
                assert len(outbox.claim(10, FENCE)) == 1
                versions.add(caller.execute("PRAGMA data_version").fetchone())
            assert len(versions) == 5
            assert connections[0].execute("PRAGMA synchronous").fetchone() == (2,)
            assert len(connections) == 1


def test_a_claim_of_large_rows_ends_early(path: Path, outbox: SqliteOutbox) -> None:
    with connected(path) as connection:
        outbox.stage(connection, staged(*[b"x" * 1_000_000] * 20))
        connection.commit()
    first = outbox.claim(500, FENCE)
    assert len(first) == 9
    assert outbox.claim(500, FENCE) == first
    outbox.done([row.sequence for row in first], FENCE)
    assert [row.sequence for row in outbox.claim(500, FENCE)] == list(range(10, 19))


def test_the_identity_lasts_as_long_as_the_file(path: Path, tmp_path: Path) -> None:
    def producer(file: Path) -> bytes:
        with closing(SqliteOutbox(file)) as outbox:
            return outbox.producer

    assert producer(path) == producer(path)
    assert producer(path) != producer(tmp_path / "other.db")
    before = producer(path)
    with closing(SqliteOutbox(path)) as outbox:
        outbox.renew_identity()
        assert outbox.producer != before
        assert producer(path) == outbox.producer


def test_bytes_that_hold_no_event_are_set_aside(
    path: Path, outbox: SqliteOutbox, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(path) as connection:
        outbox.stage(connection, staged(b"0", b"1", b"2"))
        connection.execute("UPDATE penstock_outbox SET event = X'00ff' WHERE id = 2")
        connection.execute("UPDATE penstock_outbox SET event = ? WHERE id = 3", (b"\x81\xa4type\xa0",))
        connection.commit()
    assert payloads_of(outbox) == [b"0"]
    assert outbox.pending() == 1
    assert [(row.sequence, row.topic, row.event) for row in outbox.failed()] == [(2, "raw", None), (3, "raw", None)]
    assert len(caplog.records) == 2


def test_what_was_set_aside_can_be_looked_at_retried_and_discarded(path: Path, outbox: SqliteOutbox) -> None:
    with connected(path) as connection:
        outbox.stage(connection, staged(*[b"%d" % number for number in range(6)]))
        connection.commit()
    outbox.claim(10, FENCE)
    outbox.set_aside({2: "two", 3: "three", 5: "x" * 10_000, 99: "never there"}, FENCE)
    assert [(row.sequence, row.reason) for row in outbox.failed(limit=2)] == [(2, "two"), (3, "three")]
    [last] = outbox.failed(after=3)
    assert (last.sequence, len(last.reason), last.event) == (5, 500, Event(data=b"4"))
    assert [row.sequence for row in outbox.claim(10, FENCE)] == [1, 4, 6]
    assert outbox.retry([3, 5, 99]) == 2
    assert outbox.discard([2, 99]) == 1
    assert outbox.failed() == []
    assert [(row.sequence, row.event.data) for row in outbox.claim(10, FENCE)][3:] == [(7, b"2"), (8, b"4")]


def test_no_more_is_set_aside_than_may_be(path: Path) -> None:
    with closing(SqliteOutbox(path, rows_max=3)) as outbox, connected(path) as connection:
        outbox.stage(connection, staged(b"0", b"1"))
        connection.commit()
        outbox.set_aside({1: "why", 2: "why"}, FENCE)
        outbox.stage(connection, staged(b"2", b"3"))
        connection.commit()
        with pytest.raises(StoreFull, match=r"2 rows are set aside already.*failed\(\)"):
            outbox.set_aside({3: "why", 4: "why"}, FENCE)
        assert (outbox.pending(), len(outbox.failed())) == (2, 2)


# --- what can be wrong with the file ---------------------------------------------------------


def test_a_file_that_is_no_database_is_refused(path: Path, outbox: SqliteOutbox) -> None:
    path.write_bytes(b"this is no database, but long enough to be looked at" * 100)
    with pytest.raises(StoreUnavailable, match="no SQLite database"):
        outbox.pending()


def test_a_file_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="look whether its directory"):
        SqliteOutbox(tmp_path / "missing" / "app.db").pending()


def test_a_file_that_stays_locked_says_what_to_do(path: Path) -> None:
    def impatient(file: Path) -> sqlite3.Connection:
        return sqlite3.connect(file, timeout=0, isolation_level=None, check_same_thread=False)

    with closing(SqliteOutbox(path, connect=impatient)) as outbox, connected(path) as connection:
        outbox.pending()
        outbox.stage(connection, staged(b"x"))
        with pytest.raises(StoreError, match="commit it, or close that connection"):
            outbox.claim(10, FENCE)
        connection.commit()
        assert len(outbox.claim(10, FENCE)) == 1


def test_a_closed_outbox_says_so(path: Path, outbox: SqliteOutbox) -> None:
    outbox.pending()
    for _ in range(2):
        outbox.close()
    for call in (
        outbox.pending,
        outbox.waiting,
        outbox.failed,
        lambda: outbox.claim(1, FENCE),
        lambda: outbox.producer,
    ):
        with pytest.raises(StoreClosed):
            call()


# --- a process that is killed ---------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_caller_killed_around_its_commit_leaves_neither_or_both(path: Path, moment: str) -> None:
    program = """
        import os, signal, sqlite3, sys
        from penstock.events import Event
        from penstock.outbox import SqliteOutbox
        from penstock.rows import Staged

        path, moment = sys.argv[1:]
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE business (name TEXT)")
        connection.execute("INSERT INTO business VALUES ('ada')")
        SqliteOutbox(path).stage(connection, [Staged(topic="raw", event=Event(data=b"x"))])
        if moment == "after":
            connection.commit()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = [sys.executable, "-c", textwrap.dedent(program), os.fspath(path), moment]
    killed = subprocess.run(child, capture_output=True, check=False, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with closing(SqliteOutbox(path)) as outbox, connected(path) as connection:
        [business] = connection.execute("SELECT COUNT(*) FROM business").fetchone()
        assert (business, outbox.pending()) == ((1, 1) if moment == "after" else (0, 0))
