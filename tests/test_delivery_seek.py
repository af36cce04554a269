"""A seek whose look and commit have the owner's own commit between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.batch import Batch
from penstock.columns import digest
from penstock.errors import StaleCursor
from penstock.events import Event
from penstock.producers import Run, lasting_producer
from penstock.rows import Commit, Cursor, Parked, ParkedFilter, Shard, TopicInfo, TopicSettings
from penstock.runtime import subscriptions
from penstock.runtime.ledger import decode_record
from penstock.stores.file.store import FileStore
from penstock.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MemoryStore | FileStore]:
    opened = MemoryStore() if request.param == "memory" else FileStore(tmp_path / "data")
    yield opened
    opened.close()


def a_topic(store: MemoryStore | FileStore) -> TopicInfo:
    topic = store.log.create_topic("orders", TopicSettings())
    batch = Batch.build([b"%d" % number for number in range(10)])
    store.log.append(topic.partitions[0], batch, [Run(lasting_producer(), 0, 0, 10, digest(batch.columns))])
    subscriptions.ensure(store, topic, "s", mode="failover", changes={}, start="earliest", protect=None, now_us=1)
    return topic


def between(
    store: MemoryStore | FileStore, monkeypatch: pytest.MonkeyPatch, work: Callable[[], None], times: int = 1
) -> None:
    """Do something after each of the next looks at the rows that wait."""
    page = store.parked.page
    left = [work] * times

    def look(*args: Any, **options: Any) -> list[Parked]:
        rows = page(*args, **options)
        if left:
            left.pop()()
        return rows

    monkeypatch.setattr(store.parked, "page", look)


def test_a_seek_has_seen_what_the_owner_has_parked(
    store: MemoryStore | FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = a_topic(store)
    shard = Shard(topic.log_id, "s", 0, 0)
    row = Parked(shard=shard, offset=2, state="waiting", lane=1, event=Event(data=b"2"), due_at=1, attempts=1)

    def park() -> None:
        cursor = Cursor(shard=shard, next_offset=4, number=1)
        assert store.cursors.commit([Commit(cursors=(cursor,), parked=(row,), settlement=b"parked")]) == [None]

    between(store, monkeypatch, park)
    assert subscriptions.seek(store, topic, "s", 6, now_us=2) == {0: (4, 6)}
    [cursor] = store.cursors.load(topic.log_id, "s")
    assert (cursor.next_offset, cursor.generation, cursor.number) == (6, 1, 2)
    assert store.parked.waiting(ParkedFilter(log_id=topic.log_id, subscription="s")) == []
    first, second = store.cursors.settlements(10)
    assert first.record == b"parked"
    record = decode_record(second.record)
    assert (record.number, record.begin, record.next_offset) == (2, 4, 6)
    assert record.offsets("skipped").to_offsets().tolist() == [2, 4, 5]


def test_a_seek_does_not_undo_another_one(store: MemoryStore | FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = a_topic(store)
    shard = Shard(topic.log_id, "s", 0, 0)

    def move() -> None:
        assert store.cursors.commit([Commit(cursors=(Cursor(shard=shard, next_offset=9, generation=1),))]) == [None]

    between(store, monkeypatch, move)
    with pytest.raises(StaleCursor):
        subscriptions.seek(store, topic, "s", 3, now_us=2)
    [cursor] = store.cursors.load(topic.log_id, "s")
    assert (cursor.next_offset, cursor.generation) == (9, 1)


def test_a_seek_gives_up_on_an_owner_who_always_comes_first(
    store: MemoryStore | FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = a_topic(store)
    monkeypatch.setattr(subscriptions, "SEEK_TRIES", 3)
    numbers = iter(range(1, 10))

    def settle() -> None:
        number = next(numbers)
        cursor = Cursor(shard=Shard(topic.log_id, "s", 0, 0), next_offset=number, number=number)
        assert store.cursors.commit([Commit(cursors=(cursor,), settlement=b"acked")]) == [None]

    between(store, monkeypatch, settle, times=3)
    with pytest.raises(StaleCursor):
        subscriptions.seek(store, topic, "s", 0, now_us=2)
    assert subscriptions.seek(store, topic, "s", 0, now_us=2) == {0: (3, 0)}
