"""Cursors: one commit, against the least that SQLite can do; and very many at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

from penstock.batch import Batch
from penstock.cli.bench.batch import PAYLOADS
from penstock.cli.bench.harness import Figure, Timing, compare, sample
from penstock.cli.bench.log.events import Appender, a_store, a_topic
from penstock.cli.bench.log.sizes import Sizes
from penstock.ports import Store
from penstock.rows import Commit, Cursor, Fence, Shard, Subscription

SUBSCRIPTION = "bench"
RECORD = bytes(range(64))
"""As long as a settlement record of a step."""
LEASE_SECONDS = 3600.0
EVENTS = 1_000
"""Of each partition."""


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure cursors."""
    with a_store(directory / "store") as store, closing(_bare_database(directory / "bare.db")) as bare:
        shards = _shards(store, sizes)
        lease = store.leases.acquire("bench", "bench", LEASE_SECONDS)
        assert lease is not None, "nobody else is here"
        steps = _Steps(store, shards, lease.fence)
        offsets = count()

        def write_bare() -> None:
            bare.execute("BEGIN IMMEDIATE")
            bare.execute("REPLACE INTO cursors VALUES (?, ?, ?, ?, ?, ?)", (*shards[0], next(offsets), RECORD))
            bare.execute("COMMIT")

        timing = compare(steps.one, write_bare, rounds, between=steps.forget)
        yield timing.microseconds("cursor.commit.one", goal="ratio >= 0.333")
        [seconds] = sample([steps.every], sizes.commits, before=steps.prepare)
        yield Timing(seconds).milliseconds("cursor.commit.group", goal="value <= 100 ms")


def _bare_database(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(
        "CREATE TABLE cursors (log_id TEXT, subscription TEXT, slot INTEGER, partition INTEGER, next_offset INTEGER, "
        "record BLOB, PRIMARY KEY (log_id, subscription, slot, partition)) WITHOUT ROWID"
    )
    return database


def _shards(store: Store, sizes: Sizes) -> list[Shard]:
    """Return the shards of a subscription whose partitions all have a few events."""
    topic = a_topic(store, partitions=-(-sizes.cursors // sizes.slots))
    appender = Appender(store, Batch.build(PAYLOADS[:EVENTS]))
    for partition in topic.partitions:
        appender.append(partition)
    store.cursors.put_subscription(Subscription(log_id=topic.log_id, name=SUBSCRIPTION, mode="key_shared"))
    return [
        Shard(topic.log_id, SUBSCRIPTION, index % sizes.slots, index // sizes.slots) for index in range(sizes.cursors)
    ]


class _Steps:
    """Commits that each move on, with a settlement record and under a lease, as a consumer's do."""

    def __init__(self, store: Store, shards: list[Shard], fence: Fence) -> None:
        self._cursors = store.cursors
        self._shards = shards
        self._fence = fence
        self._numbers = count()
        self._ready: list[Commit] = []

    def _commits(self, shards: list[Shard]) -> list[Commit]:
        # At the end of the log they seek back to its beginning, which is the next generation.
        generation, offset = divmod(next(self._numbers), EVENTS)
        return [
            Commit(
                cursors=(Cursor(shard=shard, next_offset=offset, generation=generation),),
                settlement=RECORD,
                fences=(self._fence,),
            )
            for shard in shards
        ]

    def one(self) -> None:
        """Commit one cursor."""
        self._commit(self._commits(self._shards[:1]))

    def prepare(self) -> None:
        """Make ready what `every` commits."""
        self.forget()
        self._ready = self._commits(self._shards)

    def every(self) -> None:
        """Commit all cursors in one call."""
        self._commit(self._ready)

    def _commit(self, commits: list[Commit]) -> None:
        refused = [answer for answer in self._cursors.commit(commits) if answer is not None]
        if refused:
            raise refused[0]

    def forget(self) -> None:
        """Remove the settlement records, as the ledger does."""
        self._cursors.forget_settlements(1 << 62)
