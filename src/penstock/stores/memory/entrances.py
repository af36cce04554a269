"""The ports through which events come in and hints go out: `Schedule`, `Outbox`, `Manifests`, `Notifier`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import UsageError
from penstock.producers import lasting_producer
from penstock.rows import MANIFESTS_KEPT, Fence, Manifest, Partition, Scheduled, Staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.stores.memory.state import State

logger = logging.getLogger(__name__)

ManifestKey = tuple[str, str, int]
"""The sink, the query and the batch."""


class MemorySchedule:
    """The `Schedule` port."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows = state.scheduled
        self._producer = lasting_producer()
        self._next_sequence: dict[Partition, int] = {}

    def _ordered(self) -> list[Scheduled]:
        return sorted(self._rows.values(), key=lambda row: (row.due_at, row.id))

    def add(self, rows: Sequence[Scheduled]) -> None:
        with self._state:
            # Reversed, so that of several rows with one id the first is kept.
            new = {row.id: row for row in reversed(rows) if row.id not in self._rows}
            self._state.check_rows(len(self._rows), len(new), "scheduled")
            for row in new.values():
                self._state.partition(Partition(row.log_id, row.partition))
            self._rows.update(new)

    def cancel(self, id: str) -> bool:
        with self._state:
            row = self._rows.get(id)
            if row is None or row.sequence is not None:
                return False
            del self._rows[id]
            return True

    def page(self, *, after: tuple[int, str] | None = None, limit: int = 100) -> list[Scheduled]:
        with self._state:
            return [row for row in self._ordered() if after is None or (row.due_at, row.id) > after][:limit]

    def next_due(self) -> int | None:
        with self._state:
            return min((row.due_at for row in self._rows.values()), default=None)

    def pending(self) -> int:
        with self._state:
            return len(self._rows)

    def claim(self, now: int, limit: int, fence: Fence) -> list[Scheduled]:
        with self._state:
            self._state.check_fence(fence)
            claimed = []
            for row in [row for row in self._ordered() if row.due_at <= now][:limit]:
                if row.sequence is None:
                    partition = Partition(row.log_id, row.partition)
                    sequence = self._next_sequence.get(partition, 0)
                    self._next_sequence[partition] = sequence + 1
                    row = msgspec.structs.replace(row, producer=self._producer, sequence=sequence)  # noqa: PLW2901
                    self._rows[row.id] = row
                claimed.append(row)
            return claimed

    def done(self, ids: Sequence[str], fence: Fence) -> None:
        with self._state:
            self._state.check_fence(fence)
            for id_ in ids:
                if id_ in self._rows and self._rows[id_].sequence is not None:
                    del self._rows[id_]


class MemoryTransaction:
    """Stands for the caller's own transaction: what is staged in it exists once it is committed."""

    def __init__(self) -> None:
        self.rows: list[Staged] = []


class MemoryOutbox:
    """The `Outbox` port; `with outbox.transaction() as transaction:` commits at its end, or rolls back."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._rows: deque[Staged] = deque()
        self._next_sequence = 0
        self._producer = lasting_producer()

    @property
    def producer(self) -> bytes:
        return self._producer

    @contextmanager
    def transaction(self) -> Iterator[MemoryTransaction]:
        """Begin a transaction that commits when the block ends without an error."""
        transaction = MemoryTransaction()
        yield transaction
        with self._state:
            self._state.check_rows(len(self._rows), len(transaction.rows), "staged")
            for row in transaction.rows:
                self._rows.append(msgspec.structs.replace(row, sequence=self._next_sequence))
                self._next_sequence += 1

    def stage(self, transaction: Any, rows: Sequence[Staged]) -> None:
        if not isinstance(transaction, MemoryTransaction):
            raise UsageError("the memory store stages into `store.outbox.transaction()`")
        with self._state:
            transaction.rows.extend(rows)

    def claim(self, limit: int, fence: Fence) -> list[Staged]:
        with self._state:
            self._state.check_fence(fence)
            return [self._rows[index] for index in range(min(limit, len(self._rows)))]

    def done(self, sequences: Sequence[int], fence: Fence) -> None:
        with self._state:
            self._state.check_fence(fence)
            moved = set(sequences)
            self._rows = deque(row for row in self._rows if row.sequence not in moved)

    def pending(self) -> int:
        with self._state:
            return len(self._rows)


class MemoryManifests:
    """The `Manifests` port."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._owners: dict[str, str] = {}
        # Both in the order of preparation.
        self._rows: dict[ManifestKey, Manifest] = {}
        self._keys: dict[str, list[ManifestKey]] = {}

    def prepare(self, manifest: Manifest, *, adopt: bool = False) -> Manifest:
        with self._state:
            owner = self._owners.get(manifest.sink)
            if owner is not None and owner != manifest.query and not adopt:
                raise manifest.not_owner(owner)
            key = (manifest.sink, manifest.query, manifest.batch)
            if key not in self._rows:
                self._add(key, manifest)
            self._owners[manifest.sink] = manifest.query
            return self._rows[key]

    def _add(self, key: ManifestKey, manifest: Manifest) -> None:
        """Store it and forget what is old, or raise with nothing changed."""
        keys = self._keys.get(manifest.sink, [])
        highest = max((batch for _, query, batch in keys if query == manifest.query), default=manifest.batch)
        if manifest.batch < highest:
            raise manifest.too_old(highest)
        done = [kept for kept in keys if self._rows[kept].done] + [key] * manifest.done
        forgotten = set(done[:-MANIFESTS_KEPT])
        self._state.check_rows(len(self._rows) - len(forgotten), 1, "manifest")
        self._rows[key] = manifest
        self._keys[manifest.sink] = [kept for kept in (*keys, key) if kept not in forgotten]
        for old in forgotten:
            del self._rows[old]

    def finish(self, sink: str, query: str, batch: int) -> None:
        with self._state:
            manifest = self._rows.get((sink, query, batch))
            if manifest is None:
                raise UsageError(f"sink {sink!r}, query {query}, batch {batch} was never prepared, or is forgotten")
            self._rows[sink, query, batch] = msgspec.structs.replace(manifest, done=True)

    def unfinished(self) -> list[Manifest]:
        with self._state:
            return [manifest for manifest in self._rows.values() if not manifest.done]

    def last(self, sink: str) -> Manifest | None:
        with self._state:
            query = self._owners.get(sink)
            mine = [self._rows[key] for key in self._keys.get(sink, []) if key[1] == query]
            return max(mine, key=lambda row: row.batch, default=None)

    def forget(self, sink: str) -> None:
        with self._state:
            keys = self._keys.get(sink, [])
            unfinished = [key for key in keys if not self._rows[key].done]
            if unfinished:
                _, query, batch = unfinished[0]
                raise UsageError(f"sink {sink!r}, query {query}, batch {batch} is not done: nothing was forgotten")
            for key in keys:
                del self._rows[key]
            self._keys.pop(sink, None)
            self._owners.pop(sink, None)


class MemoryNotifier:
    """The `Notifier` port; callbacks run in the thread that appended."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._lock = threading.Lock()
        # Replaced as a whole, so that `notify` needs no lock; keyed by registration, not by callback.
        self._callbacks: dict[object, Callable[[Partition], None]] = {}

    def notify(self, partition: Partition) -> None:
        for callback in self._callbacks.values():
            try:
                callback(partition)
            except Exception:
                # A listener's fault must not reach the publisher; heartbeats find what it missed.
                logger.exception("a notification's listener failed")

    def listen(self, callback: Callable[[Partition], None]) -> Callable[[], None]:
        self._state.check_open()
        registration = object()
        with self._lock:
            self._callbacks = {**self._callbacks, registration: callback}

        def stop() -> None:
            with self._lock:
                self._callbacks = {key: kept for key, kept in self._callbacks.items() if key is not registration}

        return stop
