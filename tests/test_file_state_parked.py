"""Parked rows in `control.db`: many of them, those that wait, those of a few offsets; and the revision."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.file_state import STORE_ID, StateStore, billing, damage, state_stores

from penstock.clock import VirtualClock
from penstock.events import Event
from penstock.stores.file.platform import Platform
from penstock.stores.file.state import parked, payloads
from penstock.stores.file.state.rebuild import examine, rebuild
from penstock.stores.file.state.schema import CONTROL
from penstock.testing.conformance.builders import a_cursor, a_parked, a_shard, an_event, commit, park, subscribe
from penstock.testing.conformance.opening import a_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.rows import TopicInfo


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
    topic = a_topic(store)
    subscribe(store, topic)
    return topic


@pytest.mark.parametrize("page", [1, 2, 3, 7, 100])
def test_all_waiting_rows_come_however_many_there_are(
    store: StateStore, topic: TopicInfo, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(parked, "ROWS_AT_A_TIME", page)
    order = [(0, offset) for offset in range(7)] + [(1, offset) for offset in range(4)]
    rows = [a_parked(a_shard(topic, partition=part), offset, state="waiting") for part, offset in order]
    dead = [a_parked(a_shard(topic), offset) for offset in range(100, 105)]
    park(store, *reversed(rows), *dead)
    found = store.parked.waiting(billing(topic))
    assert [(row.shard.partition, row.offset) for row in found] == order
    assert store.parked.count(billing(topic)) == {"waiting": 11, "dead": 5, "done": 0}
    assert store.parked.waiting(billing(topic, states=frozenset({"dead"}))) == []
    every = order[:7] + [(0, row.offset) for row in dead] + order[7:]
    assert store.parked.places(billing(topic), limit=1_000) == every
    assert store.parked.places(billing(topic), after=every[1], limit=9) == every[2:11]


@pytest.mark.parametrize("singly", [0, 3, 1_000])
def test_a_few_offsets_and_many_are_the_same_rows(
    store: StateStore, topic: TopicInfo, monkeypatch: pytest.MonkeyPatch, singly: int
) -> None:
    monkeypatch.setattr(parked, "OFFSETS_SINGLY_MAX", singly)
    for state in ("dead", "waiting"):
        park(store, *(a_parked(a_shard(topic, partition=part), n, state=state) for part in (0, 1) for n in range(20)))
        for offsets in (frozenset({7}), frozenset(range(5, 9)), frozenset({3, 99})):
            for partition in (None, 0, 1, 2):
                wanted = billing(topic, offsets=offsets, partition=partition)
                every = [row for row in store.parked.page(billing(topic)) if wanted.matches(row)]
                assert store.parked.page(wanted) == every
                assert store.parked.due(wanted, 0) == (every if state == "waiting" else [])
                assert len(store.parked.waiting(wanted)) == (len(every) if state == "waiting" else 0)
                assert sum(store.parked.count(wanted).values()) == len(every)


@pytest.mark.parametrize("statement", [parked.SELECT_PAGE_OF_OFFSETS, parked.SELECT_DUE_OF_OFFSETS])
def test_a_few_offsets_are_looked_up_and_not_searched_for(store: StateStore, topic: TopicInfo, statement: str) -> None:
    given: dict[str, Any] = {"after_partition": -1, "after_offset": -1, "limit": 1, "now": 0}
    given |= parked._parameters(billing(topic, offsets=frozenset({1})))
    plan = store.databases.control.read(
        lambda control: [row[3] for row in control.execute(f"EXPLAIN QUERY PLAN {statement}", given).fetchall()]
    )
    found = [step for step in plan if "parked" in step]
    assert found[-1].endswith("PRIMARY KEY (log_id=? AND subscription=? AND partition=? AND offset=?)")
    assert all(step.startswith("SEARCH") for step in found)


def test_the_events_of_a_page_are_looked_up_and_not_searched_for(store: StateStore) -> None:
    given = {"log_id": "", "subscription": "", "places": "[[0, 1, 2]]"}
    plan = store.databases.bulk.read(
        lambda bulk: bulk.execute(f"EXPLAIN QUERY PLAN {payloads.SELECT_PAYLOADS}", given).fetchall()
    )
    key = "(log_id=? AND subscription=? AND partition=? AND offset=? AND version=?)"
    assert plan[-1][3] == f"SEARCH payloads USING INDEX sqlite_autoindex_payloads_1 {key}"


def test_waiting_rows_are_found_by_their_index_and_not_among_the_dead(store: StateStore, topic: TopicInfo) -> None:
    given = parked._parameters(billing(topic)) | {"limit": 1}
    plan = store.databases.control.read(
        lambda control: control.execute(f"EXPLAIN QUERY PLAN {parked.SELECT_WAITING}", given).fetchall()
    )
    assert plan[0][3] == "SEARCH parked USING INDEX parked_due (log_id=? AND subscription=?)"


# --- tracebacks -------------------------------------------------------------------------------


def test_an_event_without_a_traceback_is_stored_as_it_always_was_and_one_with_it_can_be_read_without() -> None:
    event = an_event(b"\x00\xff", time=datetime(2026, 1, 1, tzinfo=UTC), headers={"tenant": b"acme"})
    stored = msgspec.msgpack.encode(event)
    assert payloads.a_payload(event).event == stored
    assert payloads._kept(stored) == (event, "")
    traced = payloads.a_payload(event, "a traceback").event
    assert payloads._kept(traced) == (event, "a traceback")
    assert msgspec.msgpack.decode(traced, type=Event) == event  # as versions do that know of none


def test_a_traceback_is_replaced_without_leaving_the_old_one_behind(
    store: StateStore, topic: TopicInfo, directory: Path
) -> None:
    for trace in ("one", "two", "two", ""):
        park(store, a_parked(a_shard(topic), 1, error_trace=trace))
    store.payloads.sweep()
    count = store.databases.bulk.read(lambda bulk: bulk.execute("SELECT count(*) FROM payloads").fetchone())
    assert count == (1,)
    assert examine(directory, STORE_ID, Platform()) == []


# --- the revision -----------------------------------------------------------------------------


def test_the_revision_is_seen_by_other_processes_and_leaves_the_tallies_right(
    opening: Callable[..., StateStore], directory: Path
) -> None:
    one, two = opening(), opening()
    topic = a_topic(one)
    seen = [two.cursors.revision()]
    calls: list[Callable[[], object]] = [
        lambda: subscribe(one, topic),
        lambda: commit(one, a_cursor(a_shard(topic), 0, generation=1)),
        lambda: park(one, a_parked(a_shard(topic), 1)),
        lambda: one.parked.replay(billing(topic), 0),
        lambda: one.cursors.delete_subscription(topic.log_id, "billing"),
    ]
    for call in calls:
        call()
        seen.append(two.cursors.revision())
        assert one.cursors.revision() == seen[-1]
        assert examine(directory, STORE_ID, Platform()) == []
    assert len(set(seen)) == len(seen) - 1
    assert seen[2] == seen[3]  # what was parked by a commit


@pytest.mark.parametrize(
    "lost", ["UPDATE cursors SET next_offset = 9", "DELETE FROM tallies WHERE name = 'subscriptions'"]
)
def test_the_revision_is_another_one_after_a_rebuild(
    opening: Callable[..., StateStore], directory: Path, clock: VirtualClock, lost: str
) -> None:
    store = opening()
    topic = a_topic(store)
    subscribe(store, topic)
    commit(store, a_cursor(a_shard(topic), 0))
    before = store.cursors.revision()
    store.databases.close()
    damage(directory, CONTROL, lost)
    rebuild(directory, STORE_ID, Platform(clock=clock))
    assert examine(directory, STORE_ID, Platform()) == []
    again = opening()
    assert again.cursors.revision() > before
    assert again.cursors.subscription(topic.log_id, "billing") is not None
