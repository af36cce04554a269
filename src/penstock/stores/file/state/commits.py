"""One call of `Cursors.commit` inside its transaction: what is refused, and what is written.

Commits are looked at one after the other, each as if the ones before it were written, but only what is left at the end
is: a cursor that moved a hundred times in one call costs one row. Settlement records are packed, many to a row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import (
    BeyondEnd,
    Fenced,
    StaleCursor,
    StoreError,
    StoreFull,
    TopicDeleted,
    UnknownSubscription,
)
from penstock.rows import Cursor, Shard
from penstock.settling import settle
from penstock.stores.file.state.leases import are_current, check_fence
from penstock.stores.file.state.parked import ParkedKey, parked_values
from penstock.stores.file.state.payloads import Place
from penstock.stores.file.state.schema import CURSORS, LEASES, PARKED, SETTLEMENTS, SUBSCRIPTIONS
from penstock.stores.file.state.tallies import OTHER_ROWS_MAX, Tally, raise_revision, read_tallies, write_tally
from penstock.stores.file.state.witnesses import (
    NO_CURSOR,
    REPLACE_CURSOR,
    REPLACE_SUBSCRIPTION,
    SELECT_CURSOR,
    cursor_of,
    cursor_row,
    each_cursor,
    position_of,
    read_subscription,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.offsets import Range
    from penstock.rows import Commit, Fence, Settling
    from penstock.stores.file.state.sealing import Row

SELECT_PARKED = """
SELECT log_id, subscription, partition, offset, slot, state, lane, due_at, attempts, replay, error_type,
    error_message, parked_at, last_retry_at, job, version, digest, crc FROM parked
WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ?
"""
REPLACE_PARKED = "REPLACE INTO parked VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
INSERT_SETTLEMENTS = "INSERT INTO settlements VALUES (?, ?, ?, ?)"

TALLIES = (CURSORS, PARKED, SETTLEMENTS, LEASES)

SETTLEMENTS_PER_ROW = 1_000
SETTLEMENT_BYTES_PER_ROW = 256 << 10
SINGLY_MAX = 16
"""Up to so many cursors of a subscription are read one by one, more of them all at once."""

_encode = msgspec.msgpack.Encoder().encode


class Limits(NamedTuple):
    """How many rows there may be."""

    parked: int
    settlements: int = OTHER_ROWS_MAX
    cursors: int = OTHER_ROWS_MAX


def shards_of(commit: Commit) -> Iterator[Shard]:
    """Return the shards that a commit is about."""
    for cursor in commit.cursors:
        yield cursor.shard
    if commit.settling is not None:
        yield commit.settling.shard
    for row in commit.parked:
        yield row.shard


def read_parked(connection: sqlite3.Connection, key: ParkedKey) -> Row | None:
    """Return the checked row of a parked event."""
    row = connection.execute(SELECT_PARKED, key).fetchone()
    return None if row is None else PARKED.checked(row)


class KnownFences:
    """Fences that were seen to be current; as long as no lease is acquired or released, they are.

    Used inside of transactions alone, and thus by one thread. An owner of many slots has as many fences.
    """

    def __init__(self) -> None:
        self._revision = -1
        self._current: set[Fence] = set()

    def seen(self, revision: int) -> set[Fence]:
        """Return those that are known to be current with the leases of now; whoever finds another one adds it."""
        if revision != self._revision:
            self._revision, self._current = revision, set()
        return self._current


class Step:
    """The commits of one call, in one transaction."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        known: dict[Shard, int],
        bounds: Mapping[tuple[str, int], Range | TopicDeleted],
        limits: Limits,
        fences: KnownFences,
    ) -> None:
        self._connection = connection
        self._known = known
        self._bounds = bounds
        self._limits = limits
        self._subscriptions: dict[tuple[str, str], Row | None] = {}
        # Where the log ends for a subscription and partition that are there.
        self._ends: dict[tuple[str, str, int], int] = {}
        # What is left at the end.
        self._cursors: dict[Shard, Cursor] = {}
        self._positions: dict[Shard, int] = {}
        self._parked: dict[ParkedKey, Row] = {}
        self._parked_before: dict[ParkedKey, Row | None] = {}
        self._records: list[bytes] = []
        self._cursors_added = 0
        self._parked_added = 0
        self._generation_raised = False
        self._cursor_rows, self._parked_rows, self._settlements, leases = read_tallies(connection, TALLIES)
        self._current = fences.seen(leases.last)

    def run(
        self, commits: Sequence[Commit], references: Sequence[Sequence[tuple[int, bytes]]], now: int
    ) -> list[StoreError | None]:
        """Write what can be written and answer each commit; `references` are the payloads of its parked rows."""
        self._load_positions(commits)
        answers: list[StoreError | None] = []
        for commit, refers in zip(commits, references, strict=True):
            refusal = self._refusal(commit)
            if refusal is None:
                try:
                    self._take(commit, refers)
                except (StaleCursor, StoreFull) as stale:
                    refusal = stale
            answers.append(refusal)
        self._write_cursors(now)
        if self._generation_raised:
            raise_revision(self._connection)
        self._write_parked()
        self._write_settlements()
        return answers

    def remember(self) -> None:
        """Let the next call know where the cursors are now; the last thing that a transaction does."""
        self._known.update(self._positions)

    def replaced(self) -> list[Place]:
        """Return the payloads that rows of this step referred to and do not any more."""
        return [
            Place(*key, before[15])
            for key, before in self._parked_before.items()
            if before is not None and key in self._parked and before[15] != self._parked[key][15]
        ]

    def referred(self) -> set[Place]:
        """Return the payloads that the written rows refer to."""
        return {Place(*key, values[15]) for key, values in self._parked.items()}

    # --- refusing ------------------------------------------------------------------------------

    def _refusal(self, commit: Commit) -> StoreError | None:
        if (stale := self._stale(commit.fences)) is not None:
            return Fenced(f"epoch {stale.epoch} of lease {stale.lease!r} is stale: nothing was written")
        for cursor in commit.cursors:
            if (refusal := self._cursor_refusal(cursor, recorded=bool(commit.settlement))) is not None:
                return refusal
        if commit.parked or commit.settling is not None:
            for shard in shards_of(commit):
                if (refusal := self._shard_refusal(shard)) is not None:
                    return refusal
        if commit.settling is not None and (refusal := self._settling_refusal(commit.settling)) is not None:
            return refusal
        return self._room_refusal(commit)

    def _settling_refusal(self, settling: Settling) -> StoreError | None:
        shard, end = settling.shard, settling.settled.end
        held = self._bounds[shard.log_id, shard.partition]
        assert not isinstance(held, TopicDeleted)
        return BeyondEnd.at(shard, end, held.start, held.stop) if end > held.stop else None

    def _cursor_refusal(self, cursor: Cursor, *, recorded: bool) -> StoreError | None:
        shard = cursor.shard
        end = self._ends.get((shard[0], shard[1], shard[3]))
        if end is None:
            if (refusal := self._shard_refusal(shard)) is not None:
                return refusal
            end = self._ends[shard[0], shard[1], shard[3]]
        if cursor.next_offset > end:
            held = self._bounds[shard.log_id, shard.partition]
            return BeyondEnd.at(shard, cursor.next_offset, held.start, end)  # type: ignore[union-attr]
        position = self._position(shard)
        if position_of(cursor.generation, cursor.next_offset) < position:
            generation, offset = divmod(position, 1 << 64)
            return StaleCursor(f"{shard} is at offset {offset} of generation {generation} already")
        raised = position != NO_CURSOR and cursor.generation > position >> 64
        # Whoever moves it has no lease, and must have seen all that its owner has written.
        if raised and cursor.number < (number := self._number(shard)) + recorded:
            return StaleCursor(f"{shard} is at record {number} already, and was moved without a look at it")
        return None

    def _number(self, shard: Shard) -> int:
        """Return the number of the last record of a shard."""
        return self._cursor(shard).number

    def _cursor(self, shard: Shard) -> Cursor:
        """Return the cursor of a shard; one that has none is at the beginning."""
        cursor = self._cursors.get(shard)
        if cursor is None:
            values = self._read_cursor(shard)
            cursor = Cursor(shard=shard, next_offset=0) if values is None else cursor_of(values)
        return cursor

    def _read_cursor(self, shard: Shard) -> Row | None:
        """Return the checked row of a cursor, and know from now on where it is."""
        row = self._connection.execute(SELECT_CURSOR, shard).fetchone()
        values = None if row is None else CURSORS.checked(row)
        self._known[shard] = NO_CURSOR if values is None else position_of(values[5], values[4])
        return values

    def _stale(self, fences: Sequence[Fence]) -> Fence | None:
        """Return the first of these that is not current, if there is one."""
        if self._current.issuperset(fences):  # as a rule, at once: a process may have 64 of them
            return None
        if are_current(self._connection, fences):
            self._current.update(fences)
            return None
        for fence in fences:
            try:
                check_fence(self._connection, fence)
            except Fenced:
                return fence
            self._current.add(fence)
        return None

    def _shard_refusal(self, shard: Shard) -> StoreError | None:
        log_id, name, _, partition = shard
        held = self._bounds[log_id, partition]
        if isinstance(held, TopicDeleted):
            return TopicDeleted(log_id)
        if self._subscription(log_id, name) is None:
            return UnknownSubscription(log_id, name)
        self._ends[log_id, name, partition] = held.stop
        return None

    def _subscription(self, log_id: str, name: str) -> Row | None:
        key = (log_id, name)
        if key not in self._subscriptions:
            self._subscriptions[key] = read_subscription(self._connection, log_id, name)
        return self._subscriptions[key]

    def _room_refusal(self, commit: Commit) -> StoreFull | None:
        records = bool(commit.settlement) + (commit.settling is not None and commit.settling.record is not None)
        if records and len(self._records) + records > self._limits.settlements - self._settlements.rows:
            return self._full("settlement records", self._limits.settlements)
        new_cursors = len(commit.cursors) + (commit.settling is not None)
        if self._cursors_added + new_cursors > self._limits.cursors - self._cursor_rows.rows:
            written = {row.shard for row in (*commit.cursors, commit.settling) if row is not None}
            new_cursors = sum(self._position(shard) == NO_CURSOR for shard in written)
            if new_cursors and self._cursors_added + new_cursors > self._limits.cursors - self._cursor_rows.rows:
                return self._full("cursors", self._limits.cursors)
        if commit.parked:
            new = sum(self._parked_now(key) is None for key in {row.key for row in commit.parked})
            if new and self._parked_added + new > self._limits.parked - self._parked_rows.rows:
                return self._full("parked rows (file.parked_rows_max)", self._limits.parked)
        return None

    def _full(self, what: str, limit: int) -> StoreFull:
        return StoreFull(f"there would be more than {limit:,} {what}, which is the limit; nothing was written")

    # --- taking --------------------------------------------------------------------------------

    def _take(self, commit: Commit, references: Sequence[tuple[int, bytes]]) -> None:
        cursors = commit.cursors if commit.settling is None else (*commit.cursors, self._settle(commit.settling))
        for cursor in cursors:
            shard = cursor.shard
            position = self._position(shard)
            if position == NO_CURSOR:
                self._cursors_added += 1
                position = 0
            if cursor.generation > position >> 64:
                self._generation_raised = True
            self._cursors[shard] = cursor
            self._positions[shard] = position_of(cursor.generation, cursor.next_offset)
        for row, (version, digest) in zip(commit.parked, references, strict=True):
            self._parked_added += self._parked_now(row.key) is None
            self._parked[row.key] = parked_values(row, version, digest)
        if commit.settlement:
            self._records.append(commit.settlement)

    def _settle(self, settling: Settling) -> Cursor:
        """Return the cursor with what one of its owners has settled; nothing is taken of a commit that this refuses."""
        after, record = settle(self._cursor(settling.shard), settling)
        if record:
            self._records.append(record)
        return after

    def _parked_now(self, key: ParkedKey) -> Row | None:
        if key in self._parked:
            return self._parked[key]
        if key not in self._parked_before:
            self._parked_before[key] = read_parked(self._connection, key)
        return self._parked_before[key]

    def _position(self, shard: Shard) -> int:
        if shard in self._positions:
            return self._positions[shard]
        if shard not in self._known:
            self._read_cursor(shard)
        return self._known[shard]

    def _load_positions(self, commits: Sequence[Commit]) -> None:
        """Read the cursors of a subscription at once if many of them are needed."""
        if len(commits) <= SINGLY_MAX:
            return
        wanted: defaultdict[tuple[str, str], set[Shard]] = defaultdict(set)
        for commit in commits:
            for cursor in commit.cursors:
                if cursor.shard not in self._known:
                    wanted[cursor.shard[:2]].add(cursor.shard)
        for (log_id, name), shards in wanted.items():
            subscription = self._subscription(log_id, name)
            if len(shards) <= SINGLY_MAX or subscription is None or subscription[-1] > 4 * len(shards):
                continue
            self._known.update(dict.fromkeys(shards, NO_CURSOR))
            for values in each_cursor(self._connection, log_id, name):
                self._known[Shard._make(values[:4])] = position_of(values[5], values[4])

    # --- writing -------------------------------------------------------------------------------

    def _write_cursors(self, now: int) -> None:
        if not self._cursors:
            return
        self._connection.executemany(REPLACE_CURSOR, [cursor_row(cursor, now) for cursor in self._cursors.values()])
        added = Counter(shard[:2] for shard in self._cursors if self._known[shard] == NO_CURSOR)
        for key, count in added.items():
            *values, cursors = self._subscriptions[key]  # type: ignore[misc] # those that have none were refused
            self._connection.execute(REPLACE_SUBSCRIPTION, SUBSCRIPTIONS.seal((*values, cursors + count)))
        if self._cursors_added:
            rows = self._cursor_rows.rows + self._cursors_added
            write_tally(self._connection, CURSORS, self._cursor_rows._replace(rows=rows))

    def _write_parked(self) -> None:
        if self._parked:
            self._connection.executemany(REPLACE_PARKED, [PARKED.seal(values) for values in self._parked.values()])
        if self._parked_added:
            rows = self._parked_rows.rows + self._parked_added
            write_tally(self._connection, PARKED, self._parked_rows._replace(rows=rows))

    def _write_settlements(self) -> None:
        if not self._records:
            return
        rows, last = self._settlements
        chunks = []
        for chunk in _chunks(self._records):
            chunks.append(SETTLEMENTS.seal((last + 1, len(chunk), _encode(chunk))))
            last += len(chunk)
        self._connection.executemany(INSERT_SETTLEMENTS, chunks)
        write_tally(self._connection, SETTLEMENTS, Tally(rows + len(self._records), last))


def _chunks(records: Sequence[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for record in records:
        if chunk and (len(chunk) >= SETTLEMENTS_PER_ROW or size + len(record) > SETTLEMENT_BYTES_PER_ROW):
            yield chunk
            chunk, size = [], 0
        chunk.append(record)
        size += len(record)
    yield chunk
