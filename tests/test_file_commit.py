"""Group commit of the log: many publishers, one write, one sync, one block; and each gets its own answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.file_children import ScriptedDisk, open_at, the_partition

from penstock.batch import Batch
from penstock.errors import ProducerConflict
from penstock.offsets import Range
from penstock.producers import Run
from penstock.rows import Appended, Partition
from penstock.stores.file.commit import OWN_BLOCK_BYTES
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import PLENTY, Part, a_part, a_run, append, payloads

PUBLISHERS = 7


class HeldDisk(ScriptedDisk):
    """A disk whose next sync of a segment waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def hold(self) -> None:
        def wait(_: Path) -> None:
            self.on_sync = lambda _: None
            self.reached.set()
            assert self.go.wait(60)

        self.on_sync = wait


@pytest.fixture
def disk() -> HeldDisk:
    return HeldDisk()


@pytest.fixture
def store(root: Path, disk: HeldDisk) -> Iterator[FileStore]:
    store = open_at(root, disk)
    yield store
    store.close()


@pytest.fixture
def partition(store: FileStore) -> Partition:
    return the_partition(store)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(PUBLISHERS + 1) as pool:
        yield pool


def gathered(
    pool: ThreadPoolExecutor, store: FileStore, disk: HeldDisk, partition: Partition, parts: list[Part]
) -> tuple[list[Future[list[Appended]]], Callable[[], None]]:
    """Hold one append in its sync until all of `parts` wait behind it; return their futures, and what lets go."""
    disk.hold()
    first = pool.submit(append, store, partition, a_part(b"first", producer=b"f" * 16))
    assert disk.reached.wait(60)
    waiting = store.log.handle(partition).writer._queue._waiting
    futures = []
    for part in parts:  # one after the other, so that their order is known
        futures.append(pool.submit(append, store, partition, part))
        while len(waiting) < len(futures):
            threading.Event().wait(0.001)

    def let_go() -> None:
        disk.synced.clear()
        disk.go.set()
        assert first.result() == [Appended(Range(0, 1))]

    return futures, let_go


def blocks_of(store: FileStore, partition: Partition) -> list[Batch]:
    return [item for item in store.log.read(partition, 0, bytes_max=PLENTY) if isinstance(item, Batch)]


def test_small_appends_that_gather_become_one_block_with_one_sync(
    pool: ThreadPoolExecutor, store: FileStore, disk: HeldDisk, partition: Partition
) -> None:
    parts = [a_part(b"a%d" % number, b"b", producer=bytes([number]) * 16) for number in range(PUBLISHERS)]
    futures, let_go = gathered(pool, store, disk, partition, parts)
    let_go()
    answers = [future.result() for future in futures]
    assert answers == [[Appended(Range(start, start + 2))] for start in range(1, 1 + 2 * PUBLISHERS, 2)]
    assert len(disk.synced) == 1
    [_, merged] = blocks_of(store, partition)
    assert merged.runs == tuple(part.run for part in parts)
    assert payloads(store, partition)[1:] == [event.data for part in parts for event in part.batch]


def test_columns_that_only_some_have_are_empty_for_the_others(
    pool: ThreadPoolExecutor, store: FileStore, disk: HeldDisk, partition: Partition
) -> None:
    batches = [Batch.build([b"0"]), Batch.build([b"1"], key=["k"]), Batch.build([b"2"], subject=["s"])]
    parts = [Part(batch, a_run(batch, bytes([number]) * 16)) for number, batch in enumerate(batches)]
    futures, let_go = gathered(pool, store, disk, partition, parts)
    let_go()
    for future in futures:
        future.result()
    [_, merged] = blocks_of(store, partition)
    assert [(event.key, event.subject) for event in merged] == [(None, None), (b"k", None), (None, "s")]
    # The content is what its publisher sent, so that a repeat is still recognised.
    for part, offset in zip(parts, (1, 2, 3), strict=True):
        assert append(store, partition, part) == [Appended(Range(offset, offset + 1), duplicate=True)]


def test_a_large_append_is_a_block_of_its_own_and_shares_the_sync(
    pool: ThreadPoolExecutor, store: FileStore, disk: HeldDisk, partition: Partition
) -> None:
    large = a_part(b"x" * OWN_BLOCK_BYTES, producer=b"l" * 16)
    parts = [a_part(b"1", producer=b"1" * 16), large, a_part(b"2", producer=b"2" * 16)]
    futures, let_go = gathered(pool, store, disk, partition, parts)
    let_go()
    assert [future.result() for future in futures] == [[Appended(Range(start, start + 1))] for start in (1, 2, 3)]
    assert len(disk.synced) == 1
    assert [len(block) for block in blocks_of(store, partition)] == [1, 1, 1, 1]
    assert payloads(store, partition) == [b"first", b"1", b"x" * OWN_BLOCK_BYTES, b"2"]


def test_a_repeat_and_a_conflict_in_a_group_are_answered_and_the_others_are_stored(
    pool: ThreadPoolExecutor, store: FileStore, disk: HeldDisk, partition: Partition
) -> None:
    one, other = a_part(b"one"), a_part(b"other")
    parts = [one, one, other, a_part(b"two", first=1)]
    futures, let_go = gathered(pool, store, disk, partition, parts)
    let_go()
    stored, repeated, conflicting, next_one = (future.result()[0] for future in futures)
    assert (stored, repeated) == (Appended(Range(1, 2)), Appended(Range(1, 2), duplicate=True))
    assert isinstance(conflicting.refused, ProducerConflict)
    assert next_one == Appended(Range(2, 3))
    assert payloads(store, partition) == [b"first", b"one", b"two"]


def test_when_the_sync_of_a_group_fails_nobody_is_told_ok(
    pool: ThreadPoolExecutor, store: FileStore, disk: HeldDisk, partition: Partition
) -> None:
    parts = [a_part(b"%d" % number, producer=bytes([number]) * 16) for number in range(PUBLISHERS)]
    futures, let_go = gathered(pool, store, disk, partition, parts)

    def fail(_: Path) -> None:
        disk.on_sync = lambda _: None
        raise OSError("the sync failed")

    disk.on_sync = fail
    let_go()
    for future in futures:
        assert isinstance(future.exception(), OSError)
    assert store.log.bounds(partition) == Range(0, 1)
    # Each may be repeated, and is stored once, whether it was there or not.
    again = [append(store, partition, part)[0] for part in parts]
    assert sorted(answer.offsets.start for answer in again if answer.offsets) == list(range(1, 1 + PUBLISHERS))
    assert sorted(payloads(store, partition)[1:]) == [b"%d" % number for number in range(PUBLISHERS)]


def test_no_runs_are_no_append(store: FileStore, partition: Partition) -> None:
    runs: list[Run] = []
    assert store.log.append(partition, Batch.build([]), runs) == []
    assert store.log.bounds(partition) == Range(0, 0)
