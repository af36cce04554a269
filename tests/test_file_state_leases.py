"""Leases in `control.db`: those under others, who still lives, and what it costs to have many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.file_state import STORE_ID, StateStore, damage, state_stores

from penstock.clock import VirtualClock
from penstock.errors import Fenced, LeaseLost, StateMissing, UsageError
from penstock.rows import Commit
from penstock.stores.file.platform import Platform, connect_sqlite
from penstock.stores.file.state.leases import TOGETHER
from penstock.stores.file.state.rebuild import Salvage, examine, rebuild
from penstock.stores.file.state.schema import CONTROL
from penstock.testing.conformance.builders import a_cursor, a_shard, acquired, commit, subscribe
from penstock.testing.conformance.opening import a_topic

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator
    from pathlib import Path


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


# --- under others -----------------------------------------------------------------------------


def test_other_processes_see_a_lease_under_another_and_follow_the_one_above(
    opening: Callable[..., StateStore], clock: VirtualClock
) -> None:
    one, two = opening(member=1), opening(member=2)
    above = acquired(one, "process/1", "p")
    below = acquired(one, "shard", "a", under=above)
    for _ in range(3):
        clock.advance(9)
        [renewed] = one.leases.renew([above], 10)
        assert two.leases.acquire("shard", "b", 10) is None
        assert two.leases.holder("shard") == below._replace(expires_at=renewed.expires_at)
    one.leases.release(above)
    assert two.leases.holder("shard") is None
    assert not acquired(two, "shard", "b").clean


def test_what_is_under_the_lease_of_a_dead_process_is_free_at_once_and_not_clean(
    opening: Callable[..., StateStore],
) -> None:
    dead: set[int] = set()
    one, two, three = (opening(member=member, alive=lambda number: number not in dead) for member in (1, 2, 3))
    above = acquired(one, "process/1", "p", 1_000)
    # The second is one that acts under the lease of another process.
    leases = [acquired(one, "shard/1", "a", under=above), acquired(two, "shard/2", "b", under=above)]
    assert [three.leases.holder(lease.name) for lease in leases] == leases
    dead.add(2)
    assert [three.leases.holder(lease.name) for lease in leases] == [leases[0], None]
    dead.add(1)
    assert [three.leases.holder(lease.name) for lease in leases] == [None, None]
    with pytest.raises(LeaseLost):
        three.leases.acquire("shard/3", "c", 10, under=above)
    assert [acquired(three, lease.name, "c").clean for lease in leases] == [False, False]


def test_what_is_under_a_lease_of_another_boot_is_free(opening: Callable[..., StateStore], clock: VirtualClock) -> None:
    before = opening()
    above = acquired(before, "process/1", "p", 10**9)
    below = acquired(before, "shard", "a", under=above)
    booted = opening(Platform(clock=clock, boot_id=bytes(16)))
    assert booted.leases.holder("shard") is None
    taken = acquired(booted, "shard", "b")
    assert (taken.clean, taken.epoch > below.epoch) == (False, True)


def test_a_renewal_writes_the_lease_above_alone(store: StateStore) -> None:
    above = acquired(store, "process/1", "p")
    below = [acquired(store, f"shard/{number}", "a", under=above) for number in range(3)]

    def rows() -> dict[str, tuple[object, ...]]:
        found = store.databases.control.read(lambda control: control.execute("SELECT * FROM leases").fetchall())
        return {row[0]: row[1:] for row in found}

    before = rows()
    assert len(store.leases.renew([above, *below], 1_000)) == 4
    assert {name for name, row in rows().items() if row != before[name]} == {"process/1"}


def test_the_fence_of_a_lease_holds_until_somebody_has_it_whatever_became_of_the_one_above(
    opening: Callable[..., StateStore],
) -> None:
    store = opening()
    topic = a_topic(store)
    subscribe(store, topic)
    above = acquired(store, "process/1", "p")
    below = acquired(store, "shard", "a", under=above)
    store.leases.release(above)
    assert commit(store, a_cursor(a_shard(topic), 0), fences=(below.fence,)) is None
    acquired(store, "shard", "b")
    assert type(commit(store, a_cursor(a_shard(topic), 0), fences=(below.fence,))) is Fenced


def test_what_a_text_cannot_hold_is_refused_for_leases_under_others_too(store: StateStore) -> None:
    above = acquired(store, "process/1", "p")
    with pytest.raises(UsageError, match="surrogate"):
        store.leases.acquire("shard", "a\udcff", 10, under=above)
    assert store.leases.holder("shard") is None


def test_a_lease_that_expired_before_it_began_is_held_by_nobody(store: StateStore, clock: VirtualClock) -> None:
    assert store.leases.acquire("lease", "a", -clock.monotonic() - 100) is not None
    assert store.leases.holder("lease") is None
    assert acquired(store, owner="b").owner == "b"


def test_leases_under_others_are_kept_by_a_rebuild(opening: Callable[..., StateStore], directory: Path) -> None:
    store = opening()
    above = acquired(store, "process/1", "p", 1_000)
    below = acquired(store, "shard", "a", under=above)
    acquired(store, "lost")
    assert examine(directory, STORE_ID, Platform()) == []
    store.databases.close()
    damage(directory, CONTROL, "UPDATE leases SET member = 9 WHERE name = 'lost'")
    rebuilt = rebuild(directory, STORE_ID, Platform())
    assert rebuilt.tables["control.db/leases"] == Salvage(2, 1)
    assert examine(directory, STORE_ID, Platform()) == []
    again = opening()
    assert again.leases.holder("shard") == below
    assert again.leases.acquire("shard", "b", 10) is None
    again.leases.release(above)
    assert acquired(again, "shard", "b").epoch > below.epoch


# --- many -------------------------------------------------------------------------------------


def counting(clock: VirtualClock) -> tuple[Platform, list[str]]:
    """Return a platform, and the statements that its connections run to count rows."""
    counts: list[str] = []

    def trace(statement: str) -> None:
        if "count(*)" in statement:
            counts.append(statement)

    def connect(path: Path) -> sqlite3.Connection:
        connection = connect_sqlite(path)
        connection.set_trace_callback(trace)
        return connection

    return Platform(clock=clock, connect=connect), counts


def test_rows_are_counted_once_for_all_that_is_new_until_somebody_else_writes(
    opening: Callable[..., StateStore], clock: VirtualClock
) -> None:
    platform, counts = counting(clock)
    store, other = opening(platform), opening()
    topic = a_topic(store)
    for number in range(20):
        acquired(store, f"lease {number}")
        subscribe(store, topic, f"subscription {number}")
    assert len(counts) == 2
    acquired(other, "from elsewhere")
    for number in range(20):
        acquired(store, f"another {number}")
        subscribe(store, topic, f"another {number}")
    assert len(counts) == 4


@pytest.mark.parametrize("table", ["leases", "subscriptions"])
def test_a_row_that_vanishes_between_two_that_are_new_is_missed(store: StateStore, directory: Path, table: str) -> None:
    topic = a_topic(store)
    acquired(store)
    subscribe(store, topic)
    damage(directory, CONTROL, f"DELETE FROM {table}")
    calls: dict[str, Callable[[], object]] = {
        "leases": lambda: acquired(store),
        "subscriptions": lambda: subscribe(store, topic),
    }
    with pytest.raises(StateMissing, match=table):
        calls[table]()


def test_many_leases_are_taken_checked_and_released_at_once(opening: Callable[..., StateStore]) -> None:
    one, two = opening(member=1), opening(member=2)
    topic = a_topic(one)
    subscribe(one, topic)
    above, others = acquired(one, "process/1", "p"), acquired(two, "process/2", "q")
    names = [f"slot/{number:03}" for number in range(2 * TOGETHER + 2)]
    taken = two.leases.acquire_some(names[:3], "b", 3, under=others)
    assert [lease.name for lease in taken] == names[:3]
    leases = one.leases.acquire_some(names, "a", len(names), under=above)
    assert [lease.name for lease in leases] == names[3:], "what others have is not free"
    fences = tuple(lease.fence for lease in leases)
    step = Commit(cursors=(a_cursor(a_shard(topic), 0),), fences=fences)
    assert one.cursors.commit([step]) == [None]
    for stale in (fences[0]._replace(epoch=fences[0].epoch - 1), fences[-1]._replace(lease="never taken")):
        [answer] = two.cursors.commit([Commit(cursors=step.cursors, fences=(*fences, stale))])
        assert isinstance(answer, Fenced)
        assert repr(stale.lease) in str(answer)
    gone = [*leases[::2], taken[0]]
    assert one.leases.release_some([*gone, *gone]) == gone, "each once"
    assert [lease.name for lease in two.leases.held("slot/")] == [taken[1].name, taken[2].name] + [
        lease.name for lease in leases[1::2]
    ]


def test_a_lease_whose_epoch_is_damaged_holds_nothing_up_in_silence(
    opening: Callable[..., StateStore], directory: Path
) -> None:
    store = opening()
    topic = a_topic(store)
    subscribe(store, topic)
    fences = tuple(acquired(store, name).fence for name in ("one", "two"))
    damage(directory, CONTROL, "UPDATE leases SET epoch = epoch + 7 WHERE name = 'two'")
    with pytest.raises(StateMissing, match="two"):
        store.cursors.commit([Commit(cursors=(a_cursor(a_shard(topic), 0),), fences=fences)])
