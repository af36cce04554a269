"""Subscriptions and cursors as rows, and what the log asks of them: how far anybody has got, and who still needs what.

A subscription's row says how many cursors it has. One that vanished is therefore missed, and never read as a shard
that nobody has begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.errors import UsageError
from penstock.rows import Cursor, Shard, Subscription
from penstock.stores.file.state.schema import CURSORS, PARKED, SCHEDULE, SEQUENCES, SUBSCRIPTIONS
from penstock.stores.file.state.tallies import Completeness, change_rows, raise_revision, read_tally

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator

    from penstock.rows import Partition
    from penstock.stores.file.state.database import Database
    from penstock.stores.file.state.payloads import Payloads
    from penstock.stores.file.state.sealing import Row

SELECT_SUBSCRIPTION = """
SELECT log_id, name, mode, policy, protect, external, created_at, cursors, crc FROM subscriptions
WHERE log_id = ? AND name = ?
"""
SELECT_SUBSCRIPTIONS = """
SELECT log_id, name, mode, policy, protect, external, created_at, cursors, crc FROM subscriptions
ORDER BY log_id, name
"""
REPLACE_SUBSCRIPTION = "REPLACE INTO subscriptions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_SUBSCRIPTION = "DELETE FROM subscriptions WHERE log_id = ? AND name = ?"
SELECT_CURSOR = """
SELECT log_id, subscription, slot, partition, next_offset, generation, body, crc FROM cursors
WHERE log_id = ? AND subscription = ? AND slot = ? AND partition = ?
"""
SELECT_CURSORS = """
SELECT log_id, subscription, slot, partition, next_offset, generation, body, crc FROM cursors
WHERE log_id = ? AND subscription = ? ORDER BY slot, partition
"""
REPLACE_CURSOR = "REPLACE INTO cursors VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
DELETE_CURSORS = "DELETE FROM cursors WHERE log_id = ? AND subscription = ?"
SELECT_LAST_PARKED = """
SELECT log_id, subscription, partition, offset, slot, state, lane, due_at, attempts, replay, error_type,
    error_message, parked_at, last_retry_at, job, version, digest, crc FROM parked
WHERE log_id = ? AND subscription = ? AND partition = ? ORDER BY offset DESC LIMIT 1
"""
DOOM_PARKED = """
INSERT OR IGNORE INTO doomed SELECT log_id, subscription, partition, offset, version FROM parked
WHERE log_id = ? AND subscription = ?
"""
DELETE_PARKED = "DELETE FROM parked WHERE log_id = ? AND subscription = ?"
SELECT_PAIRS = """
SELECT log_id, name FROM subscriptions WHERE log_id = ? UNION SELECT log_id, subscription FROM cursors
WHERE log_id = ? UNION SELECT log_id, subscription FROM parked WHERE log_id = ?
"""
DELETE_SCHEDULED = "DELETE FROM schedule WHERE log_id = ?"
DELETE_SEQUENCES = "DELETE FROM sequences WHERE log_id = ?"

REMEMBERED_MAX = 200_000
"""The positions of so many cursors are remembered by a process."""

_encode = msgspec.msgpack.Encoder().encode


class _Body(msgspec.Struct, array_like=True):
    """What the row of a cursor has beside its columns; what is last may be missing."""

    settled: bytes
    attempts: dict[int, int]
    number: int
    stop: int | None
    updated_at: int
    claims: dict[int, bytes] = {}


_decode_body = msgspec.msgpack.Decoder(_Body).decode


# --- rows -------------------------------------------------------------------------------------


def cursor_row(cursor: Cursor, updated_at: int) -> Row:
    """Return a cursor as it is stored."""
    attempts = cursor.attempts if type(cursor.attempts) is dict else dict(cursor.attempts)
    body: tuple[object, ...] = (cursor.settled, attempts, cursor.number, cursor.stop, updated_at)
    if cursor.claims:
        body = (*body, dict(cursor.claims))
    return CURSORS.seal((*cursor.shard, cursor.next_offset, cursor.generation, _encode(body)))


def cursor_of(values: Row) -> Cursor:
    """Return the cursor that a checked row holds."""
    body = _decode_body(values[6])
    return Cursor(
        shard=Shard(*values[:4]),
        next_offset=values[4],
        settled=body.settled,
        attempts=body.attempts,
        generation=values[5],
        number=body.number,
        claims=body.claims,
        stop=body.stop,
        updated_at=body.updated_at,
    )


def subscription_row(subscription: Subscription, cursors: int) -> Row:
    """Return a subscription as it is stored, with the number of its cursors."""
    try:
        policy = msgspec.json.encode(subscription.policy)
    except (TypeError, UnicodeEncodeError) as error:
        raise UsageError(f"the policy of subscription {subscription.name!r} is no plain JSON: {error}") from None
    return SUBSCRIPTIONS.seal(
        (
            subscription.log_id,
            subscription.name,
            subscription.mode,
            policy,
            int(subscription.protect),
            int(subscription.external),
            subscription.created_at,
            cursors,
        )
    )


def subscription_of(values: Row) -> Subscription:
    """Return the subscription that a checked row holds."""
    log_id, name, mode, policy, protect, external, created_at, _ = values
    return Subscription(
        log_id=log_id,
        name=name,
        mode=mode,
        policy=msgspec.json.decode(policy),
        protect=bool(protect),
        external=bool(external),
        created_at=created_at,
    )


def read_subscription(connection: sqlite3.Connection, log_id: str, name: str) -> Row | None:
    """Return the checked row of a subscription; its last value is the number of its cursors."""
    row = connection.execute(SELECT_SUBSCRIPTION, (log_id, name)).fetchone()
    return None if row is None else SUBSCRIPTIONS.checked(row)


def read_subscriptions(connection: sqlite3.Connection) -> list[Row]:
    """Return the checked rows of all subscriptions, none of which is missing."""
    rows = SUBSCRIPTIONS.checked_all(connection.execute(SELECT_SUBSCRIPTIONS).fetchall())
    if len(rows) != (expected := read_tally(connection, SUBSCRIPTIONS).rows):
        raise SUBSCRIPTIONS.damaged(f"it has {len(rows):,} rows and should have {expected:,}")
    return rows


def read_cursors(connection: sqlite3.Connection, log_id: str, name: str) -> list[Row]:
    """Return the checked rows of a subscription's cursors, none of which is missing."""
    return list(each_cursor(connection, log_id, name))


def each_cursor(connection: sqlite3.Connection, log_id: str, name: str) -> Iterator[Row]:
    """Go through the checked rows of a subscription's cursors; ends with an error if one is missing."""
    count = 0
    for row in connection.execute(SELECT_CURSORS, (log_id, name)):
        yield CURSORS.checked(row)
        count += 1
    subscription = read_subscription(connection, log_id, name)
    if subscription is not None and count != subscription[-1]:
        raise CURSORS.damaged(f"rows ({log_id!r}, {name!r}, …): there are {count:,} and should be {subscription[-1]:,}")


# --- positions that are known -----------------------------------------------------------------


def position_of(generation: int, next_offset: int) -> int:
    """Return a cursor's position as one number: the higher, the further. Many numbers cost less than many pairs."""
    return generation << 64 | next_offset


NO_CURSOR = -1
"""The position of a shard that has no cursor."""


class Positions:
    """Where cursors are, as far as this process knows; used inside of transactions alone, and thus by one thread."""

    def __init__(self, control: Database) -> None:
        self._control = control
        self._era: tuple[int, int] | None = None
        self._known: dict[Shard, int] = {}

    def known(self, connection: sqlite3.Connection) -> dict[Shard, int]:
        """Return positions by shard, which the caller adds to.

        It is as of this transaction, since it is forgotten when anybody else wrote or a write failed.
        """
        era = self._control.era(connection)
        if era != self._era or len(self._known) > REMEMBERED_MAX:
            self._known = {}
            self._era = era
        return self._known

    def drop(self, shards: Iterable[Shard]) -> None:
        """Forget where these are."""
        for shard in shards:
            self._known.pop(shard, None)

    def forget(self) -> None:
        """Forget all."""
        self._known = {}
        self._era = None


# --- what the log asks ------------------------------------------------------------------------


class Witnesses:
    """What is known of a log outside of it."""

    def __init__(self, control: Database, payloads: Payloads) -> None:
        self._control = control
        self._payloads = payloads
        self.positions = Positions(control)
        self.subscriptions = Completeness(control, SUBSCRIPTIONS)

    def witness(self, partition: Partition) -> int:
        """Return the end that the partition must have had: no cursor and no parked row is beyond it; 0 if none."""

        def work(connection: sqlite3.Connection) -> int:
            ends = [0]
            for log_id, name in connection.execute(SELECT_PAIRS, [partition.log_id] * 3).fetchall():
                rows = read_cursors(connection, log_id, name)
                ends += [values[4] for values in rows if values[3] == partition.number]
                last = connection.execute(SELECT_LAST_PARKED, (log_id, name, partition.number)).fetchone()
                if last is not None:
                    ends.append(PARKED.checked(last)[3] + 1)
            return max(ends)

        return self._control.read(work)

    def protection(self, partition: Partition, first: int) -> tuple[str, int] | None:
        """Return the protected subscription that has passed least of the partition, and how far; None if none is.

        One without a cursor there has passed nothing but what is below `first`.
        """

        def work(connection: sqlite3.Connection) -> tuple[str, int] | None:
            passed: list[tuple[int, str]] = []
            for row in read_subscriptions(connection):
                subscription = subscription_of(row)
                if subscription.log_id != partition.log_id or not subscription.protect:
                    continue
                rows = read_cursors(connection, subscription.log_id, subscription.name)
                offsets = [values[4] for values in rows if values[3] == partition.number]
                passed.append((min(offsets, default=first), subscription.name))
            return min(passed)[::-1] if passed else None

        return self._control.read(work)

    def forget_log(self, log_id: str) -> None:
        """Remove everything that is kept for a log."""

        def work(connection: sqlite3.Connection) -> None:
            for _, name in connection.execute(SELECT_PAIRS, [log_id] * 3).fetchall():
                self.forget_subscription(connection, log_id, name)
            change_rows(connection, SCHEDULE, -connection.execute(DELETE_SCHEDULED, (log_id,)).rowcount)
            change_rows(connection, SEQUENCES, -connection.execute(DELETE_SEQUENCES, (log_id,)).rowcount)

        self._control.write(work)
        self._payloads.remove_doomed()

    def forget_subscription(self, connection: sqlite3.Connection, log_id: str, name: str) -> None:
        """Remove a subscription with its cursors and parked rows, in the caller's transaction."""
        self.positions.forget()
        raise_revision(connection)
        key = (log_id, name)
        connection.execute(DOOM_PARKED, key)
        for table, statement in (
            (SUBSCRIPTIONS, DELETE_SUBSCRIPTION),
            (CURSORS, DELETE_CURSORS),
            (PARKED, DELETE_PARKED),
        ):
            change_rows(connection, table, -connection.execute(statement, key).rowcount)
