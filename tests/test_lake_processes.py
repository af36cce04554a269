"""Archivers in processes of their own, several at once, killed at any moment: the lake is the log, event for event."""

from __future__ import annotations

import json
import random
import signal
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tests.lake_children import ArchivingChild
from tests.lakes import rows, seen
from tests.spark_topics import fill, info_of, rich, stored

from penstock.lake.lake import Lake
from penstock.lake.reading import ArchivedLog
from penstock.lake.verify import verify
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def start() -> Iterator[Callable[..., ArchivingChild]]:
    children: list[ArchivingChild] = []

    def start(**arguments: Any) -> ArchivingChild:
        children.append(ArchivingChild(**arguments))
        return children[-1]

    yield start
    for child in children:
        child.dispose()


def check(url: str, lake: Path, truth: list[dict[str, Any]]) -> None:
    """The lake has exactly what was published, by its manifest and by a glob, and read as one with a trimmed log."""
    with closing(open_store(url)) as store:
        assert verify(Lake(lake), store.log).problems == []
        partitions = info_of(store, "orders").partitions
        for partition in partitions:
            end = store.log.bounds(partition).stop
            assert store.log.trim(partition, end) == end, "everything is archived, so everything may go"
        log = ArchivedLog(store.log, Lake(lake))
        assert [row for partition in partitions for row in rows(log, partition, at_a_time=500)] == truth
    assert seen(lake) == sorted((row["topic"], row["partition"], row["offset"], row["data"]) for row in truth)


def test_three_at_once_archive_everything_once(
    root: Path, tmp_path: Path, start: Callable[..., ArchivingChild]
) -> None:
    url, lake = f"file:{root}", tmp_path / "lake"
    fill(url, "orders", rich(900), at_a_time=90)
    truth = stored(url, "orders")
    children = [start(url=url, lake=str(lake), file_bytes=size) for size in (2_000, 2_500, 3_000)]
    for child in children:
        child.begin()
    done = []
    for child in children:
        code, said = child.end()
        assert code == 0
        done.append(json.loads(said))
    assert sum(each["events"] for each in done) == 900
    check(url, lake, truth)


def test_killed_at_random_steps_beside_each_other_they_leave_a_lake_that_the_next_one_completes(
    root: Path, tmp_path: Path, start: Callable[..., ArchivingChild]
) -> None:
    url, lake = f"file:{root}", tmp_path / "lake"
    chance = random.Random(7)
    fill(url, "orders", rich(300), at_a_time=60)
    deaths = 0
    for size in (2_000, 3_000, 1_500):
        children = [
            start(url=url, lake=str(lake), file_bytes=size + extra, die_at=chance.randrange(60)) for extra in (0, 700)
        ]
        for child in children:
            child.begin()
        deaths += sum(child.end()[0] == -signal.SIGKILL for child in children)
        fill(url, "orders", rich(60), at_a_time=60)
    assert deaths > 2
    truth = stored(url, "orders")
    last = start(url=url, lake=str(lake), file_bytes=2_000)
    last.begin()
    assert last.end()[0] == 0
    check(url, lake, truth)
