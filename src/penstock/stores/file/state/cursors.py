"""The `Cursors` port: subscriptions, their progress, and the settlement records beside it, in `control.db`.

Everything that may block elsewhere is done before the turn is taken: the log is synced up to every cursor, and the
events of parked rows are in `bulk.db`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.errors import BeyondEnd, StoreError, TopicDeleted, UnknownSubscription, UsageError
from penstock.offsets import Range
from penstock.rows import Commit, Cursor, Partition, Settlement, Shard, Subscription
from penstock.stores.file.state.commits import KnownFences, Limits, Step, read_parked, shards_of
from penstock.stores.file.state.payloads import Payload, Place, a_payload
from penstock.stores.file.state.schema import CURSORS, SETTLEMENTS, SUBSCRIPTIONS
from penstock.stores.file.state.tallies import (
    OTHER_ROWS_MAX,
    Tally,
    change_rows,
    check_room,
    read_tally,
    write_tally,
)
from penstock.stores.file.state.witnesses import (
    REPLACE_CURSOR,
    REPLACE_SUBSCRIPTION,
    cursor_of,
    cursor_row,
    read_cursors,
    read_subscription,
    read_subscriptions,
    subscription_of,
    subscription_row,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from penstock.clock import Clock
    from penstock.stores.file.state.database import Database
    from penstock.stores.file.state.logview import LogView
    from penstock.stores.file.state.parked import ParkedKey
    from penstock.stores.file.state.payloads import Payloads
    from penstock.stores.file.state.witnesses import Witnesses

SELECT_SETTLEMENTS = "SELECT first, count, records, crc FROM settlements ORDER BY first"
FORGET_SETTLEMENTS = "DELETE FROM settlements WHERE first + count - 1 <= ?"

PARKING_TRIES = 5
"""How often the events of parked rows are written again because others removed them in between."""

_decode_records = msgspec.msgpack.Decoder(list[bytes]).decode


class _ParkAgainError(Exception):
    """The payloads that parked rows were to refer to are not as they were."""


class FileCursors:
    """The `Cursors` port."""

    def __init__(
        self,
        control: Database,
        payloads: Payloads,
        witnesses: Witnesses,
        log: LogView,
        clock: Clock,
        *,
        parked_rows_max: int,
    ) -> None:
        self._control = control
        self._payloads = payloads
        self._witnesses = witnesses
        self._log = log
        self._clock = clock
        self._limits = Limits(parked=parked_rows_max)
        self._fences = KnownFences()

    # --- subscriptions -------------------------------------------------------------------------

    def put_subscription(
        self, subscription: Subscription, cursors: Sequence[Cursor] = (), *, existing: bool = False
    ) -> None:
        self._log.check_open()
        log_id, name = subscription.log_id, subscription.name
        if any(cursor.shard[:2] != (log_id, name) for cursor in cursors):
            raise UsageError(f"a cursor is not of the subscription {name!r} that it was given with")
        self._log.check_topic(log_id)
        bounds = self._bounds([Commit(cursors=tuple(cursors))])

        def work(connection: sqlite3.Connection) -> None:
            present = {Shard(*values[:4]) for values in read_cursors(connection, log_id, name)}
            new = {cursor.shard: cursor for cursor in cursors if cursor.shard not in present}
            for cursor in new.values():
                _check_end(cursor, bounds[log_id, cursor.shard.partition])
            tally = read_tally(connection, SUBSCRIPTIONS)
            added = int(read_subscription(connection, log_id, name) is None)
            if added:
                self._witnesses.subscriptions.check(connection, tally)
                if existing:
                    raise UnknownSubscription(log_id, name)
            check_room(tally, added, OTHER_ROWS_MAX, "the limit of subscriptions")
            check_room(read_tally(connection, CURSORS), len(new), self._limits.cursors, "the limit of cursors")
            self._witnesses.positions.drop(new)
            connection.execute(REPLACE_SUBSCRIPTION, subscription_row(subscription, len(present) + len(new)))
            now = self._clock.time_us()
            connection.executemany(REPLACE_CURSOR, [cursor_row(cursor, now) for cursor in new.values()])
            write_tally(connection, SUBSCRIPTIONS, Tally(tally.rows + added, tally.last + 1))
            change_rows(connection, CURSORS, len(new))

        self._control.write(work)
        try:
            self._log.check_topic(log_id)
        except TopicDeleted:
            # Deleted meanwhile, and perhaps forgotten before this was written.
            self._witnesses.forget_log(log_id)
            raise

    def delete_subscription(self, log_id: str, name: str) -> bool:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> bool:
            if read_subscription(connection, log_id, name) is None:
                return False
            self._witnesses.forget_subscription(connection, log_id, name)
            return True

        found = self._control.write(work)
        self._payloads.remove_doomed()
        return found

    def subscriptions(self, log_id: str | None = None) -> list[Subscription]:
        self._log.check_open()
        rows = self._control.read(read_subscriptions)
        return [subscription_of(values) for values in rows if log_id in {None, values[0]}]

    def subscription(self, log_id: str, name: str) -> Subscription | None:
        self._log.check_open()
        values = self._control.read(lambda connection: read_subscription(connection, log_id, name))
        return None if values is None else subscription_of(values)

    def revision(self) -> int:
        self._log.check_open()
        return self._control.read(lambda connection: read_tally(connection, SUBSCRIPTIONS).last)

    # --- progress ------------------------------------------------------------------------------

    def load(self, log_id: str, subscription: str) -> list[Cursor]:
        self._log.check_open()
        self._log.check_topic(log_id)
        rows = self._control.read(lambda connection: read_cursors(connection, log_id, subscription))
        return [cursor_of(values) for values in rows]

    def commit(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        self._log.check_open()
        bounds = self._bounds(commits)
        for attempt in range(PARKING_TRIES):
            parking = _Parking(commits, self._control, self._payloads, reuse=attempt == 0)

            def work(connection: sqlite3.Connection, parking: _Parking = parking) -> list[StoreError | None]:
                parking.check(connection)
                known = self._witnesses.positions.known(connection)
                step = Step(connection, known, bounds, self._limits, self._fences)
                answers = step.run(commits, parking.references, self._clock.time_us())
                parking.finish(connection, step)
                step.remember()
                return answers

            try:
                answers = self._control.write(work)
            except _ParkAgainError:
                continue
            self._payloads.remove_many_doomed()
            return [self._explained(answer) for answer in answers]
        raise StoreError(
            f"the events of parked rows were removed {PARKING_TRIES} times before their rows could be written, by "
            f"sweeps of other processes; nothing was written: try again"
        )

    def _bounds(self, commits: Sequence[Commit]) -> dict[tuple[str, int], Range | TopicDeleted]:
        """Return the bounds of every partition concerned, synced up to the cursors; or that its topic is gone.

        A partition that a topic does not have is a wrong call, found before anything is written.
        """
        ends: dict[tuple[str, int], int] = {}
        for commit in commits:
            for cursor in commit.cursors:
                key = (cursor.shard.log_id, cursor.shard.partition)
                offset = cursor.next_offset
                if offset < 0:
                    raise UsageError(f"{cursor.shard}: a cursor cannot be at offset {offset}")
                if offset >= ends.get(key, 0):
                    ends[key] = offset
            if commit.settling is not None:
                key = (commit.settling.shard.log_id, commit.settling.shard.partition)
                ends[key] = max(ends.get(key, 0), commit.settling.settled.end)
            if commit.parked:
                for shard in shards_of(commit):
                    ends.setdefault((shard.log_id, shard.partition), 0)
        return {key: self._bound(Partition(*key), end) for key, end in ends.items()}

    def _bound(self, partition: Partition, up_to: int) -> Range | TopicDeleted:
        try:
            self._log.check_partition(partition)
            return self._log.bounds_synced(partition, up_to)
        except TopicDeleted as deleted:
            return deleted

    def _explained(self, answer: StoreError | None) -> StoreError | None:
        """Return the answer; a subscription that is gone may be gone with its topic, deleted meanwhile."""
        if isinstance(answer, UnknownSubscription):
            try:
                self._log.check_topic(answer.log_id)
            except TopicDeleted as deleted:
                return deleted
        return answer

    # --- settlements ---------------------------------------------------------------------------

    def settlements(self, limit: int) -> list[Settlement]:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> list[Settlement]:
            rows, last = read_tally(connection, SETTLEMENTS)
            first = last - rows + 1
            wanted = min(limit, rows)
            found: list[Settlement] = []
            chunks = connection.execute(SELECT_SETTLEMENTS)
            while len(found) < wanted:
                row = chunks.fetchone()
                if row is None or row[0] > first + len(found):
                    raise SETTLEMENTS.damaged(f"row ({first + len(found)},): it is missing")
                start, _, records = SETTLEMENTS.checked(row)
                numbered = enumerate(_decode_records(records), start)
                found += [Settlement(number, record) for number, record in numbered if number >= first]
            chunks.close()
            return found[:wanted]

        return self._control.read(work)

    def forget_settlements(self, up_to: int) -> None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> None:
            rows, last = tally = read_tally(connection, SETTLEMENTS)
            forgotten = min(up_to, last)
            if forgotten > last - rows:
                connection.execute(FORGET_SETTLEMENTS, (forgotten,))
                write_tally(connection, SETTLEMENTS, tally._replace(rows=last - forgotten))

        self._control.write(work)


def _check_end(cursor: Cursor, held: Range | TopicDeleted) -> None:
    if isinstance(held, TopicDeleted):
        raise held
    if cursor.next_offset > held.stop:
        raise BeyondEnd.at(cursor.shard, cursor.next_offset, held.start, held.stop)


class _Parking:
    """The payloads of the parked rows of one call.

    A row that replaces one with the same event refers to what is there; anything else is written to `bulk.db` now.
    """

    def __init__(self, commits: Sequence[Commit], control: Database, payloads: Payloads, *, reuse: bool) -> None:
        self._payloads = payloads
        keys = {row.key for commit in commits for row in commit.parked}
        self._reused: dict[ParkedKey, tuple[int, bytes]] = {}
        if keys and reuse:
            self._reused = control.read(lambda connection: _versions(connection, keys))
        self._new: dict[Place, Payload] = {}
        versions = {(key, digest): version for key, (version, digest) in self._reused.items()}
        self.references: list[Sequence[tuple[int, bytes]]] = []
        for commit in commits:
            if not commit.parked:
                self.references.append(())
                continue
            refers = []
            for row in commit.parked:
                payload = a_payload(row.event, row.error_trace)
                version = versions.get((row.key, payload.digest))
                if version is None:
                    version = versions[row.key, payload.digest] = payloads.new_version()
                    self._new[Place(*row.key, version)] = payload
                refers.append((version, payload.digest))
            self.references.append(refers)
        if self._new:
            payloads.put(self._new)

    def check(self, connection: sqlite3.Connection) -> None:
        """Make sure, under the turn, that all payloads are where they were."""
        if self._reused and _versions(connection, self._reused) != self._reused:
            raise _ParkAgainError
        if self._new and not self._payloads.usable(connection, list(self._new)):
            raise _ParkAgainError

    def finish(self, connection: sqlite3.Connection, step: Step) -> None:
        """Doom what is not referred to any more, and what was written for commits that were refused."""
        unused = step.replaced() + list(self._new.keys() - step.referred())
        if unused:
            self._payloads.doom(connection, unused)


def _versions(connection: sqlite3.Connection, keys: Iterable[ParkedKey]) -> dict[ParkedKey, tuple[int, bytes]]:
    """Return version and digest of the payloads that these rows refer to, as far as there are rows."""
    found = {key: read_parked(connection, key) for key in keys}
    return {key: (values[15], values[16]) for key, values in found.items() if values is not None}
