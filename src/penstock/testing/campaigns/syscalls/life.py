"""A short life of a store, in which everything happens once.

`live` runs where system calls fail. It tells each step before it begins, and then its outcome: `ok`; `failed`, a
`PenstockError`, which promises that nothing was written; `unknown`, an `OSError`; `wrong`, any other error, which no
caller should ever see. A step that did not end well is tried once more.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.batch import Batch
from penstock.errors import PenstockError, TopicDeleted, UsageError
from penstock.rows import Partition, Scheduled, Shard, Subscription, TopicInfo, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.testing.conformance.builders import PLENTY, a_cursor, a_parked, a_part, an_event, append, commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.testing.campaigns.nursery import Child

T = TypeVar("T")

ATTEMPTS: Final = 2
SUBSCRIPTION: Final = "billing"
NEXT_BOOT: Final = b"the boot after.."
STALL_SECONDS: Final = 1.0


def open_at(root: Path, platform: Platform | None = None) -> FileStore:
    """Open a store of small segments, which writes no markers by itself."""
    settings = FileSettings(
        segment_bytes=3500,
        allocate_bytes=1024,
        marker_seconds=3600.0,
        stall_seconds=STALL_SECONDS,
        runtime_directory=str(root.parent),
    )
    return FileStore(root, settings=settings, platform=platform)


def payload_of(log_id: str, sequence: int) -> bytes:
    """Return the payload of a sequence: some are short, some fill a good part of a segment."""
    return b"%s:%d:" % (log_id.encode(), sequence) + bytes([sequence % 251]) * (700 if sequence % 4 == 3 else 40)


def payloads_of(log_id: str, first: int, count: int) -> list[bytes]:
    """Return the payloads of consecutive sequences."""
    return [payload_of(log_id, sequence) for sequence in range(first, first + count)]


def send(store: FileStore, log_id: str, first: int, count: int) -> int:
    """Append some sequences in one call, and return their first offset."""
    [answer] = append(store, Partition(log_id, 0), a_part(*payloads_of(log_id, first, count), first=first))
    assert answer.offsets is not None, answer
    return answer.offsets.start


def stored_in(store: FileStore, log_id: str) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the payloads of each batch of a log with its first offset."""
    partition = Partition(log_id, 0)
    bounds = store.log.bounds(partition)
    start = bounds.start
    while start < bounds.stop:
        for item in store.log.read(partition, start, bytes_max=PLENTY):
            assert isinstance(item, Batch), f"nothing was lost, but offsets are declared so: {item}"
            assert item.start == start, f"reading from offset {start} began at {item.start}"
            yield item.start, [event.data for event in item]
            start = item.range.stop


# --- living -------------------------------------------------------------------------------------


class Life:
    """A program that uses a store, and goes on whatever happens."""

    def __init__(self, root: Path, tell: Callable[[Any], None], before_step: Callable[[int], None]) -> None:
        self._root = root
        self._tell = tell
        self._before_step = before_step
        self._steps = 0
        self._store: FileStore

    def run(self) -> None:
        """Live."""
        if self._open():
            self._first_half()
            self._attempt("close", self._store.close)
        if self._open():
            for topic in self._attempt("look", self._store.log.topics, describe=lambda _: None) or []:
                self._publish(topic.log_id, 20, 3)
                self._read(topic.log_id)
            self._attempt("close", self._store.close)

    def _first_half(self) -> None:
        orders = self._create("orders")
        if orders is not None:
            self._use(orders)
        doomed = self._create("doomed")
        if doomed is not None:
            self._publish(doomed.log_id, 0, 2)
            self._attempt("delete", lambda: self._delete(doomed.log_id), log=doomed.log_id)
        anew = self._create("doomed")
        if anew is not None:
            self._publish(anew.log_id, 0, 2)

    def _park(self, shard: Shard, offset: int) -> None:
        if self._store.log.bounds(Partition(shard.log_id, shard.partition)).stop <= offset:
            raise UsageError("a row of an event that is not there would testify to a longer log")
        _raise(commit(self._store, parked=(a_parked(shard, offset),)))

    def _use(self, topic: TopicInfo) -> None:
        log, store = topic.log_id, self._store
        subscription = Subscription(log_id=log, name=SUBSCRIPTION, mode="key_shared")
        self._attempt("subscribe", lambda: store.cursors.put_subscription(subscription), log=log)
        for first, count in ((0, 1), (1, 3), (4, 4)):
            self._publish(log, first, count)
        self._commit(log, 3)
        shard = Shard(log, SUBSCRIPTION, 0, 0)
        self._attempt("park", lambda: self._park(shard, 1), log=log, offset=1)
        row = Scheduled(id="later", log_id=log, partition=0, due_at=0, event=an_event())
        self._attempt("schedule", lambda: store.schedule.add([row]), log=log)
        for first, count in ((8, 1), (9, 6), (15, 1)):
            self._publish(log, first, count)
        self._read(log)
        self._commit(log, 9)
        self._attempt("trim", lambda: store.log.trim(Partition(log, 0), 8), log=log, before=8)
        self._attempt("claim", self._claim, log=log)
        self._read(log)

    def _open(self) -> bool:
        def open_store() -> bool:
            self._store = open_at(self._root)
            return True

        return bool(self._attempt("open", open_store))

    def _create(self, name: str) -> TopicInfo | None:
        return self._attempt(
            "create",
            lambda: self._store.log.create_topic(name, TopicSettings()),
            describe=lambda topic: topic.log_id,
            name=name,
        )

    def _delete(self, log: str) -> None:
        try:
            self._store.log.delete_topic(log)
        except TopicDeleted:
            return  # by the attempt before

    def _publish(self, log: str, first: int, count: int) -> None:
        self._attempt("publish", lambda: send(self._store, log, first, count), log=log, first=first, count=count)

    def _commit(self, log: str, position: int) -> None:
        cursor = a_cursor(Shard(log, SUBSCRIPTION, 0, 0), position)
        self._attempt("commit", lambda: _raise(commit(self._store, cursor)), log=log, position=position)

    def _claim(self) -> None:
        lease = self._store.leases.acquire("scheduler", "me", 600)
        assert lease is not None, "nobody else wants the lease"
        rows = self._store.schedule.claim(1, 10, lease.fence)
        self._store.schedule.done([row.id for row in rows], lease.fence)

    def _read(self, log: str) -> None:
        self._attempt(
            "read",
            lambda: list(stored_in(self._store, log)),
            describe=lambda found: [[start, [data.hex() for data in payloads]] for start, payloads in found],
            log=log,
        )

    def _attempt(
        self, what: str, work: Callable[[], T], *, describe: Callable[[T], Any] = lambda it: it, **facts: Any
    ) -> T | None:
        self._before_step(self._steps)
        self._steps += 1
        for _ in range(ATTEMPTS):
            self._tell([what, facts])
            try:
                answer = work()
            except PenstockError as error:
                self._tell(["failed", f"{type(error).__name__}: {error}"])
            except OSError as error:
                self._tell(["unknown", f"{type(error).__name__}: {error}"])
            except Exception:  # noqa: BLE001 - the judge reports it
                self._tell(["wrong", traceback.format_exc()])
            else:
                self._tell(["ok", describe(answer)])
                return answer
        return None


def _raise(refused: PenstockError | None) -> None:
    if refused is not None:
        raise refused


def live(child: Child, *, root: str, pauses: Sequence[int]) -> None:
    """Live in a directory, and pause before the steps of these numbers."""

    def before_step(step: int) -> None:
        if step in pauses:
            child.pause()

    Life(Path(root), child.tell, before_step).run()
