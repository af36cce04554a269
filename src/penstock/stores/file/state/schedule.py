"""The `Schedule` port in `control.db`.

What is claimed gets the lasting producer of this store, and the next sequence of its partition: dense, so that a log
can always tell a repeat from news.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.errors import TopicDeleted
from penstock.rows import Fence, Partition, Scheduled
from penstock.stores.file.state.leases import check_fence
from penstock.stores.file.state.payloads import decode_event, encode_event
from penstock.stores.file.state.schema import SCHEDULE, SEQUENCES
from penstock.stores.file.state.tallies import OTHER_ROWS_MAX, change_rows, check_room, read_tally

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from penstock.stores.file.state.database import Databases
    from penstock.stores.file.state.logview import LogView
    from penstock.stores.file.state.sealing import Row

INSERT_SCHEDULED = "INSERT INTO schedule VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
SELECT_SCHEDULED = """
SELECT id, log_id, partition, due_at, producer, sequence, event, crc FROM schedule WHERE id = ?
"""
SELECT_PAGE = """
SELECT id, log_id, partition, due_at, producer, sequence, event, crc FROM schedule
WHERE (due_at, id) > (?, ?) ORDER BY due_at, id LIMIT ?
"""
SELECT_FIRST = """
SELECT id, log_id, partition, due_at, producer, sequence, event, crc FROM schedule ORDER BY due_at, id LIMIT ?
"""
SELECT_DUE = """
SELECT id, log_id, partition, due_at, producer, sequence, event, crc FROM schedule
WHERE due_at <= ? ORDER BY due_at, id LIMIT ?
"""
UPDATE_CLAIMED = "UPDATE schedule SET producer = ?, sequence = ?, crc = ? WHERE id = ?"
_of_claimed = itemgetter(4, 5, 7, 0)
DELETE_UNCLAIMED = "DELETE FROM schedule WHERE id = ? AND sequence IS NULL"
DELETE_CLAIMED = "DELETE FROM schedule WHERE id = ? AND sequence IS NOT NULL"
SELECT_SEQUENCE = "SELECT log_id, partition, next, crc FROM sequences WHERE log_id = ? AND partition = ?"
SELECT_SEQUENCES = "SELECT log_id, partition, next, crc FROM sequences"
REPLACE_SEQUENCE = "REPLACE INTO sequences VALUES (?, ?, ?, ?)"

ROWS_AT_A_TIME = 200


class FileSchedule:
    """The `Schedule` port."""

    def __init__(self, databases: Databases, log: LogView, *, scheduled_rows_max: int) -> None:
        self._control = databases.control
        self._producer = databases.identity.producer
        self._log = log
        self._rows_max = scheduled_rows_max

    def add(self, rows: Sequence[Scheduled]) -> None:
        self._log.check_open()
        for partition in {Partition(row.log_id, row.partition) for row in rows}:
            self._log.check_partition(partition)
        # Reversed, so that of several rows with one id the first is kept.
        wanted = {row.id: _stored(row) for row in reversed(rows)}

        def work(connection: sqlite3.Connection) -> list[str]:
            new = [
                row for id_, row in wanted.items() if connection.execute(SELECT_SCHEDULED, (id_,)).fetchone() is None
            ]
            check_room(read_tally(connection, SCHEDULE), len(new), self._rows_max, "file.scheduled_rows_max")
            connection.executemany(INSERT_SCHEDULED, new)
            change_rows(connection, SCHEDULE, len(new))
            return [row[0] for row in new]

        added = self._control.write(work)
        try:
            for log_id in {row.log_id for row in rows}:
                self._log.check_topic(log_id)
        except TopicDeleted:
            # Deleted meanwhile, and perhaps forgotten before this was written: all or nothing.
            self._control.write(lambda connection: _remove(connection, DELETE_UNCLAIMED, added))
            raise

    def cancel(self, id: str) -> bool:
        self._log.check_open()
        return self._control.write(lambda connection: _remove(connection, DELETE_UNCLAIMED, [id])) > 0

    def page(self, *, after: tuple[int, str] | None = None, limit: int = 100) -> list[Scheduled]:
        self._log.check_open()
        found: list[Scheduled] = []
        while len(found) < limit:
            count = min(limit - len(found), ROWS_AT_A_TIME)
            rows = self._control.read(lambda connection: _page(connection, after, count))  # noqa: B023 - run here
            found += [_scheduled(values) for values in rows]
            if len(rows) < count:
                break
            after = (found[-1].due_at, found[-1].id)
        return found

    def next_due(self) -> int | None:
        self._log.check_open()
        rows = self._control.read(lambda connection: _page(connection, None, 1))
        return rows[0][3] if rows else None

    def pending(self) -> int:
        self._log.check_open()
        return self._control.read(lambda connection: read_tally(connection, SCHEDULE)).rows

    def claim(self, now: int, limit: int, fence: Fence) -> list[Scheduled]:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> list[Row]:
            check_fence(connection, fence)
            rows = SCHEDULE.checked_all(connection.execute(SELECT_DUE, (now, max(limit, 0))).fetchall())
            following: dict[tuple[str, int], int] = {}
            claimed = []
            for values in rows:
                if values[5] is None:
                    key = values[1:3]
                    sequence = following[key] if key in following else _next_sequence(connection, *key)
                    following[key] = sequence + 1
                    values = (*values[:4], self._producer, sequence, values[6])  # noqa: PLW2901
                    connection.execute(UPDATE_CLAIMED, _of_claimed(SCHEDULE.seal(values)))
                claimed.append(values)
            connection.executemany(REPLACE_SEQUENCE, [SEQUENCES.seal((*key, end)) for key, end in following.items()])
            return claimed

        return [_scheduled(values) for values in self._control.write(work)]

    def done(self, ids: Sequence[str], fence: Fence) -> None:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> None:
            check_fence(connection, fence)
            _remove(connection, DELETE_CLAIMED, ids)

        self._control.write(work)


def _page(connection: sqlite3.Connection, after: tuple[int, str] | None, limit: int) -> list[Row]:
    if after is None:
        return SCHEDULE.checked_all(connection.execute(SELECT_FIRST, (limit,)).fetchall())
    return SCHEDULE.checked_all(connection.execute(SELECT_PAGE, (*after, limit)).fetchall())


def _remove(connection: sqlite3.Connection, statement: str, ids: Sequence[str]) -> int:
    removed = connection.executemany(statement, [(id_,) for id_ in ids]).rowcount if ids else 0
    change_rows(connection, SCHEDULE, -removed)
    return removed


def _next_sequence(connection: sqlite3.Connection, log_id: str, partition: int) -> int:
    row = connection.execute(SELECT_SEQUENCE, (log_id, partition)).fetchone()
    if row is not None:
        following: int = SEQUENCES.checked(row)[2]
        return following
    # The first of its partition, unless its row is damaged: then a sequence would be given out twice.
    rows = SEQUENCES.checked_all(connection.execute(SELECT_SEQUENCES).fetchall())
    tally = read_tally(connection, SEQUENCES)
    if len(rows) != tally.rows:
        raise SEQUENCES.damaged(f"it has {len(rows):,} rows and should have {tally.rows:,}")
    check_room(tally, 1, OTHER_ROWS_MAX, "the limit of partitions with a schedule")
    connection.execute(REPLACE_SEQUENCE, SEQUENCES.seal((log_id, partition, 0)))
    change_rows(connection, SEQUENCES, 1)
    return 0


def _stored(row: Scheduled) -> Row:
    return SCHEDULE.seal(
        (row.id, row.log_id, row.partition, row.due_at, row.producer, row.sequence, encode_event(row.event))
    )


def _scheduled(values: Row) -> Scheduled:
    id_, log_id, partition, due_at, producer, sequence, event = values
    return Scheduled(
        id=id_,
        log_id=log_id,
        partition=partition,
        due_at=due_at,
        event=decode_event(event),
        producer=producer,
        sequence=sequence,
    )
