"""Manifests in `control.db`: what is forgotten is counted, damage is told from it, and other sinks cost nothing."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.file_state import STORE_ID, StateStore, damage, state_stores

from penstock.clock import VirtualClock
from penstock.errors import PenstockError, SinkConflict, StateMissing, StoreFull
from penstock.stores.file.platform import Platform, connect_sqlite
from penstock.stores.file.state.rebuild import examine, rebuild
from penstock.stores.file.state.schema import CONTROL, MANIFESTS, SINKS
from penstock.stores.file.state.tallies import read_tally
from penstock.stores.memory import MemoryStore
from penstock.testing.conformance.manifests import a_manifest, done, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.ports import Store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def opening(directory: Path) -> Iterator[Callable[..., StateStore]]:
    with state_stores(directory, VirtualClock()) as open_store:
        yield open_store


@pytest.fixture
def store(opening: Callable[..., StateStore]) -> StateStore:
    return opening()


def keep(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both stores keep so many manifests that are done."""
    for module in ("file.state.manifests", "memory.entrances"):
        monkeypatch.setattr(f"penstock.stores.{module}.MANIFESTS_KEPT", count)


def counted(store: StateStore) -> tuple[int, int]:
    """Return how many manifests and sinks there are, by their tallies, which fit what is there."""
    assert examine(store.directory, STORE_ID, Platform()) == []
    control = store.databases.control
    manifests, sinks = (control.read(lambda found: read_tally(found, table).rows) for table in (MANIFESTS, SINKS))  # noqa: B023 - run here
    return manifests, sinks


# --- what is forgotten --------------------------------------------------------------------------


def test_what_is_forgotten_is_counted_exactly(
    store: StateStore, opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(3, monkeypatch)
    run(store, range(10))
    assert counted(store) == (4, 1)  # the last was done after the others were looked at
    store.manifests.prepare(a_manifest(10))
    assert counted(store) == (4, 1)
    run(store, [0], sink="attic")
    assert counted(store) == (5, 2)
    with pytest.raises(SinkConflict):
        store.manifests.prepare(a_manifest(2))
    assert counted(store) == (5, 2)
    store.manifests.forget("attic")
    store.manifests.forget("cellar")
    assert counted(store) == (4, 1)
    store.manifests.finish("lake", "q", 10)
    store.manifests.forget("lake")
    assert counted(opening()) == (0, 0)


def test_what_is_forgotten_makes_room_in_a_full_store(store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(1, monkeypatch)
    monkeypatch.setattr("penstock.stores.file.state.manifests.OTHER_ROWS_MAX", 2)
    run(store, range(5))
    store.manifests.prepare(a_manifest(5))
    with pytest.raises(StoreFull):
        store.manifests.prepare(a_manifest(6))
    with pytest.raises(StoreFull):
        store.manifests.prepare(a_manifest(0, query="r"), adopt=True)
    assert store.manifests.prepare(a_manifest(4)) == done(a_manifest(4))
    assert store.manifests.last("lake") == a_manifest(5)
    assert counted(store) == (2, 1)


def answered(store: Store, action: str, sink: str, query: str, batch: int, *, adopt: bool) -> object:
    """Return what a store answers, or which error it raises."""
    try:
        if action == "prepare":
            return store.manifests.prepare(a_manifest(batch, sink=sink, query=query), adopt=adopt)
        if action == "finish":
            store.manifests.finish(sink, query, batch)
        else:
            store.manifests.forget(sink)
    except PenstockError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("seed", range(4))
def test_the_file_remembers_what_the_memory_store_remembers(
    store: StateStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    keep(3, monkeypatch)
    chance, memory = random.Random(seed), MemoryStore(clock=VirtualClock())
    outcomes = set()
    for step in range(400):
        action = chance.choice(["prepare"] * 6 + ["finish"] * 6 + ["forget"])
        sink, query = chance.choice(["attic", "lake", "lake2"]), chance.choice("qr")
        batch = max(0, step // 8 - chance.choice([0, 0, 0, 1, 2, 5, 20]))
        adopt = chance.random() < 0.2
        if action == "finish" and (waiting := memory.manifests.unfinished()) and chance.random() < 0.9:
            chosen = chance.choice(waiting)
            sink, query, batch = chosen.sink, chosen.query, chosen.batch
        answer = answered(store, action, sink, query, batch, adopt=adopt)
        assert answer == answered(memory, action, sink, query, batch, adopt=adopt)
        outcomes.add((action, answer[0].__name__ if isinstance(answer, tuple) else "answered"))
        assert store.manifests.last(sink) == memory.manifests.last(sink)
        assert store.manifests.unfinished() == memory.manifests.unfinished()
    assert len(outcomes) == 6  # each of the three was answered, and refused
    assert counted(store) == (len(memory.manifests._rows), len(memory.manifests._owners))


# --- what it costs ------------------------------------------------------------------------------


class StepCounter:
    """Counts the steps of SQLite's machine, on all connections that it makes."""

    def __init__(self) -> None:
        self.steps = 0

    def connect(self, path: Path) -> sqlite3.Connection:
        connection = connect_sqlite(path)
        connection.set_progress_handler(self._step, 1)
        return connection

    def _step(self) -> int:
        self.steps += 1
        return 0


def test_what_a_prepare_does_depends_neither_on_other_sinks_nor_on_what_was_forgotten(
    opening: Callable[..., StateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(5, monkeypatch)
    counter = StepCounter()
    store = opening(Platform(connect=counter.connect))

    def cost(first: int) -> int:
        """Fill other sinks, half of it with what is not done, and return the steps of one prepare."""
        for batch in range(first, first + 60):
            store.manifests.prepare(a_manifest(batch, sink="attic"))
            run(store, [batch], sink="cellar")
        run(store, range(first, first + 60))
        before = counter.steps
        store.manifests.prepare(a_manifest(first + 60))
        spent = counter.steps - before
        store.manifests.finish("lake", "q", first + 60)
        return spent

    cost(0)
    few = cost(100)  # by now, more rows than those that are looked at without an index
    for first in range(200, 700, 100):
        cost(first)
    assert cost(700) <= few * 1.05


# --- damage -------------------------------------------------------------------------------------


def lead_past(directory: Path, row: str, index: str = "manifests_batch") -> None:
    """Take one row out of an index of manifests, and out of nothing else, as a flipped bit in its page does."""
    with closing(sqlite3.connect(directory / CONTROL, isolation_level=None)) as connection:
        [sql] = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (index,)).fetchone()
        connection.execute(f"DROP INDEX {index}")
        connection.execute(f"{sql} {'AND' if 'WHERE' in sql else 'WHERE'} NOT ({row})")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (sql, index))
        connection.execute("PRAGMA writable_schema = RESET")


@pytest.mark.parametrize("hidden", [1, 2])
def test_a_manifest_that_the_index_leads_past_is_missed_and_never_prepared_twice(
    directory: Path, store: StateStore, hidden: int
) -> None:
    manifests = [a_manifest(batch, b"%d" % batch) for batch in range(3)]
    for manifest in manifests:
        store.manifests.prepare(manifest)
    lead_past(directory, f"batch = {hidden}")
    for call in (
        lambda: store.manifests.prepare(manifests[hidden]),
        lambda: store.manifests.finish("lake", "q", hidden),
    ):
        with pytest.raises(StateMissing, match=f"its index does not lead to batch {hidden}"):
            call()
    if hidden == 2:
        with pytest.raises(StateMissing, match="its index does not lead to batch 2"):
            store.manifests.last("lake")
    else:
        assert store.manifests.last("lake") == manifests[2]
    assert store.manifests.prepare(manifests[0]) == manifests[0]


def test_a_batch_that_the_index_leads_past_is_told_from_one_that_is_forgotten(
    directory: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(3, monkeypatch)
    run(store, range(10))
    # So many that the sink's own rows are not among the newest.
    for batch in range(110):
        store.manifests.prepare(a_manifest(batch, sink="attic"))
    lead_past(directory, "sink = 'lake' AND batch = 8")
    with pytest.raises(StateMissing, match="its index does not lead to batch 8"):
        store.manifests.prepare(a_manifest(8))
    with pytest.raises(SinkConflict):
        store.manifests.prepare(a_manifest(2))
    assert store.manifests.prepare(a_manifest(10)) == a_manifest(10)


def test_what_is_not_done_is_not_forgotten_when_the_index_of_it_leads_past_it(
    directory: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(2, monkeypatch)
    old = a_manifest(0, b"old")
    store.manifests.prepare(old)
    lead_past(directory, "number = 1", "manifests_unfinished")
    run(store, [1, 2])
    for _ in range(2):
        with pytest.raises(StateMissing, match="what is unfinished does not lead to row 1"):
            store.manifests.prepare(a_manifest(3))
    assert store.manifests.last("lake") == done(a_manifest(2))
    store.databases.close()
    rebuild(directory, STORE_ID, Platform())
    rebuilt = StateStore(directory, store.memory, Platform())
    with closing(rebuilt):
        assert rebuilt.manifests.unfinished() == [old]
        assert rebuilt.manifests.prepare(a_manifest(3)) == a_manifest(3)
        assert counted(rebuilt) == (4, 1)


def test_a_sink_is_not_forgotten_while_the_index_leads_past_one_of_its_manifests(
    directory: Path, store: StateStore
) -> None:
    run(store, range(3))
    lead_past(directory, "batch = 1")
    with pytest.raises(StateMissing):
        store.manifests.forget("lake")
    assert store.manifests.last("lake") == done(a_manifest(2))
    assert store.manifests.prepare(a_manifest(0)) == done(a_manifest(0))


@pytest.mark.parametrize("flipped", ["done = 1", "body = x'00'"])
def test_a_manifest_that_is_damaged_is_not_forgotten(
    directory: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch, flipped: str
) -> None:
    keep(1, monkeypatch)
    store.manifests.prepare(a_manifest(0))
    if "body" in flipped:
        store.manifests.finish("lake", "q", 0)
    run(store, [1])
    damage(directory, CONTROL, f"UPDATE manifests SET {flipped} WHERE batch = 0")
    for call in (lambda: store.manifests.forget("lake"), lambda: store.manifests.prepare(a_manifest(2))):
        with pytest.raises(StateMissing, match="its checksum does not fit"):
            call()
    assert store.manifests.last("lake") == done(a_manifest(1))


def test_what_was_forgotten_stays_so_after_a_rebuild(
    directory: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(3, monkeypatch)
    run(store, range(10))
    store.databases.close()
    damage(directory, CONTROL, "UPDATE manifests SET body = x'00' WHERE batch = 7")
    assert rebuild(directory, STORE_ID, Platform()).tables["control.db/manifests"] == (3, 1)
    rebuilt = StateStore(directory, store.memory, Platform())
    with closing(rebuilt):
        assert rebuilt.manifests.prepare(a_manifest(8)) == done(a_manifest(8))
        for batch in (2, 7):
            with pytest.raises(SinkConflict):
                rebuilt.manifests.prepare(a_manifest(batch))
        fresh = msgspec.structs.replace(a_manifest(10), body=b"fresh")
        assert rebuilt.manifests.prepare(fresh) == fresh
        assert counted(rebuilt) == (4, 1)
