"""Retention on `file:`: by age and size, never past a protected cursor but for the hard cap, never by a wrong clock."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.clock import VirtualClock
from penstock.errors import StoreError, Trimmed
from penstock.offsets import Range
from penstock.rows import Partition, Retention, TopicInfo, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import PLENTY, a_cursor, a_part, a_shard, append, commit, fill, subscribe

DAY = 24 * 3600.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def store(tmp_path: Path, clock: VirtualClock) -> Iterator[FileStore]:
    store = FileStore(
        tmp_path / "data",
        settings=FileSettings(segment_bytes=3_000, allocate_bytes=1_000),
        platform=Platform(clock=clock),
    )
    yield store
    store.close()


def a_topic(store: FileStore, retention: Retention) -> TopicInfo:
    return store.log.create_topic("orders", TopicSettings(retention=retention))


def bounds(store: FileStore, topic: TopicInfo) -> Range:
    return store.log.bounds(topic.partitions[0])


def size(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in tmp_path.rglob("*.seg"))


def test_without_retention_everything_stays(store: FileStore, clock: VirtualClock) -> None:
    topic = a_topic(store, Retention())
    fill(store, topic.partitions[0], 20)
    clock.advance(1000 * DAY)
    store.log.retain()
    assert bounds(store, topic) == Range(0, 20)


def test_what_is_older_goes_and_what_is_not_stays(store: FileStore, clock: VirtualClock) -> None:
    topic = a_topic(store, Retention(age_seconds=DAY))
    fill(store, topic.partitions[0], 20)
    clock.advance(0.9 * DAY)
    fill(store, topic.partitions[0], 20)
    store.log.retain()
    assert bounds(store, topic) == Range(0, 40)
    clock.advance(0.2 * DAY)
    store.log.retain()
    first = bounds(store, topic).start
    assert 0 < first <= 20
    with pytest.raises(Trimmed):
        store.log.read(topic.partitions[0], 0, bytes_max=PLENTY)
    assert store.log.read(topic.partitions[0], first, bytes_max=PLENTY) != []
    # The last segment goes, too, once all of it is too old; offsets go on.
    clock.advance(2 * DAY)
    store.log.retain()
    assert bounds(store, topic) == Range(40, 40)
    assert append(store, topic.partitions[0], a_part(b"next"))[0].offsets == Range(40, 41)


def test_a_partition_is_kept_to_about_its_size(store: FileStore, tmp_path: Path) -> None:
    topic = a_topic(store, Retention(bytes_max=9_000))
    fill(store, topic.partitions[0], 100)
    before = size(tmp_path)
    store.log.retain()
    assert 6_000 < size(tmp_path) <= 9_000 < before
    assert bounds(store, topic).stop == 100


def test_what_a_protected_subscription_has_not_passed_stays(
    store: FileStore, clock: VirtualClock, tmp_path: Path
) -> None:
    topic = a_topic(store, Retention(age_seconds=DAY, bytes_max=4_000))
    fill(store, topic.partitions[0], 50)
    subscribe(store, topic)
    commit(store, a_cursor(a_shard(topic), 10))
    clock.advance(10 * DAY)
    store.log.retain()
    assert 0 < bounds(store, topic).start <= 10
    commit(store, a_cursor(a_shard(topic), 50))
    store.log.retain()
    assert bounds(store, topic) == Range(50, 50)


def test_the_hard_cap_removes_what_is_protected_and_says_so(
    store: FileStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = a_topic(store, Retention(hard_bytes_max=9_000))
    fill(store, topic.partitions[0], 100)
    subscribe(store, topic)
    with caplog.at_level(logging.ERROR):
        store.log.retain()
    assert size(tmp_path) <= 9_000
    assert bounds(store, topic).start > 0
    assert "hard cap" in caplog.text


@pytest.mark.parametrize("jump", [2 * 3600.0, -2 * 3600.0])
def test_nothing_goes_by_age_while_the_wall_clock_cannot_be_trusted(
    store: FileStore, clock: VirtualClock, caplog: pytest.LogCaptureFixture, jump: float
) -> None:
    topic = a_topic(store, Retention(age_seconds=3600.0))
    fill(store, topic.partitions[0], 20)
    clock.advance(2 * DAY)
    clock.jump_wall(jump)
    with caplog.at_level(logging.ERROR):
        store.log.retain()
    assert bounds(store, topic) == Range(0, 20)
    assert "disagree" in caplog.text
    clock.jump_wall(-jump)
    store.log.retain()
    assert bounds(store, topic).start > 0


def test_a_changed_retention_takes_effect_and_is_kept(store: FileStore, clock: VirtualClock) -> None:
    topic = a_topic(store, Retention())
    fill(store, topic.partitions[0], 20)
    clock.advance(2 * DAY)
    changed = a_topic(store, Retention(age_seconds=DAY))
    assert changed.log_id == topic.log_id
    assert store.log.topics() == [changed]
    store.log.retain()
    assert bounds(store, topic) == Range(20, 20)


def test_the_keeper_marks_silent_partitions_and_looks_at_retention(
    store: FileStore, clock: VirtualClock, tmp_path: Path
) -> None:
    topic = a_topic(store, Retention(age_seconds=DAY))
    partition: Partition = topic.partitions[0]
    fill(store, partition, 3)
    handle = store.log.handle(partition)
    assert not store.log.tail(handle).witnessed
    clock.advance(1)
    store._keeper.step()
    assert store.log.tail(handle).witnessed
    clock.advance(3 * DAY)
    store._keeper.step()
    assert bounds(store, topic) == Range(3, 3)


def test_a_partition_that_cannot_be_trimmed_keeps_no_other_from_it(
    store: FileStore, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = store.log.create_topic("orders", TopicSettings(partitions=2, retention=Retention(age_seconds=DAY)))
    for partition in topic.partitions:
        fill(store, partition, 5)
    clock.advance(2 * DAY)

    def refuse(_: int) -> int:
        raise StoreError("it cannot be trimmed")

    monkeypatch.setattr(store.log.handle(topic.partitions[0]).writer, "trim", refuse)
    with caplog.at_level(logging.WARNING):
        store.log.retain()
    assert [store.log.bounds(partition).start for partition in topic.partitions] == [0, 5]
    assert "it cannot be trimmed" in caplog.text
