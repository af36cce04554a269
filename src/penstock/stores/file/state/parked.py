"""The `ParkedRows` port: rows in `control.db`, their events in `bulk.db`."""

from __future__ import annotations

import json
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from msgspec import structs

from penstock.rows import Parked, ParkedFilter, ParkedState, Shard, Waiting
from penstock.stores.file.state.payloads import Place
from penstock.stores.file.state.schema import PARKED
from penstock.stores.file.state.tallies import change_rows, raise_revision

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    from penstock.events import Event
    from penstock.stores.file.state.database import Database
    from penstock.stores.file.state.logview import LogView
    from penstock.stores.file.state.payloads import Payloads
    from penstock.stores.file.state.sealing import Row

COLUMNS = """
parked.log_id, parked.subscription, parked.partition, parked.offset, slot, state, lane, due_at, attempts, replay,
error_type, error_message, parked_at, last_retry_at, job, version, digest, crc
"""
# What a field is None for does not matter.
MATCHING = """
    AND (:states IS NULL OR state IN (SELECT value FROM json_each(:states)))
    AND (:slots IS NULL OR slot IN (SELECT value FROM json_each(:slots)))
    AND (:partition IS NULL OR parked.partition = :partition)
    AND (:lane IS NULL OR lane = :lane)
    AND (:error_type IS NULL OR error_type = :error_type)
    AND (:parked_from IS NULL OR parked_at >= :parked_from)
    AND (:parked_until IS NULL OR parked_at < :parked_until)
    AND (:job IS NULL OR job = :job)
"""
OF_SUBSCRIPTION = f"""
WHERE log_id = :log_id AND subscription = :subscription
    AND (:offsets IS NULL OR offset IN (SELECT value FROM json_each(:offsets))) {MATCHING}
"""  # noqa: S608 - here and below, what is put together is ours
FROM_ALL = f"SELECT {COLUMNS} FROM parked {OF_SUBSCRIPTION}"  # noqa: S608
FROM_WAITING = f"SELECT {COLUMNS} FROM parked INDEXED BY parked_due {OF_SUBSCRIPTION}"  # noqa: S608
# Each offset is looked up in each partition that has rows, so that the others cost nothing, however many there are.
FROM_OFFSETS = f"""
WITH RECURSIVE places (place) AS (
    SELECT coalesce(:partition, (
        SELECT min(partition) FROM parked WHERE log_id = :log_id AND subscription = :subscription))
    UNION ALL
    SELECT (
        SELECT min(partition) FROM parked
        WHERE log_id = :log_id AND subscription = :subscription AND partition > place)
    FROM places WHERE place IS NOT NULL AND :partition IS NULL
)
SELECT {COLUMNS} FROM places CROSS JOIN json_each(:offsets) AS wanted CROSS JOIN parked
WHERE parked.log_id = :log_id AND parked.subscription = :subscription AND parked.partition = place
    AND parked.offset = wanted.value {MATCHING}
"""  # noqa: S608
# Offsets that follow each other, of one partition, are one stretch of the table.
FROM_RANGE = f"""
SELECT {COLUMNS} FROM parked
WHERE log_id = :log_id AND subscription = :subscription AND parked.partition = :partition
    AND parked.offset BETWEEN :first AND :last {MATCHING}
"""  # noqa: S608
PAGE = """ AND (parked.partition, parked.offset) > (:after_partition, :after_offset)
ORDER BY parked.partition, parked.offset LIMIT :limit"""
DUE = """ AND state = 'waiting' AND due_at <= :now
ORDER BY due_at, parked.partition, parked.offset LIMIT :limit"""
SELECT_PAGE, SELECT_PAGE_OF_OFFSETS, SELECT_PAGE_OF_RANGE = FROM_ALL + PAGE, FROM_OFFSETS + PAGE, FROM_RANGE + PAGE
SELECT_DUE, SELECT_DUE_OF_OFFSETS = FROM_ALL + DUE, FROM_OFFSETS + DUE
SELECT_WAITING = FROM_WAITING + " AND state = 'waiting' LIMIT :limit"
UPDATE_PARKED = """
UPDATE parked SET state = ?, due_at = ?, attempts = ?, replay = ?, job = ?, crc = ?
WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ?
"""
_of_update = itemgetter(5, 7, 8, 9, 14, 17, 0, 1, 2, 3)
# Without what the index of rows that wait is made of: it would be written anew for every row.
UPDATE_JOB = """
UPDATE parked SET job = ?, crc = ? WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ?
"""
_of_job_update = itemgetter(14, 17, 0, 1, 2, 3)
DELETE_PARKED = "DELETE FROM parked WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ?"

ROWS_AT_A_TIME = 5_000
EVENTS_AT_A_TIME = 500
OFFSETS_SINGLY_MAX = 1_000
"""Up to so many offsets are looked up one by one; for more, all rows of the subscription are looked at."""

# Where a row's values are.
_STATE, _DUE_AT, _ATTEMPTS, _REPLAY, _JOB = 5, 7, 8, 9, 14

_DEAD: frozenset[ParkedState] = frozenset({"dead"})
_WAITING: frozenset[ParkedState] = frozenset({"waiting"})

ParkedKey = tuple[str, str, int, int]


def parked_values(row: Parked, version: int, digest: bytes) -> Row:
    """Return a parked row's values, which refer to its payload by version."""
    log_id, subscription, slot, partition = row.shard
    return (
        log_id,
        subscription,
        partition,
        row.offset,
        slot,
        row.state,
        row.lane,
        row.due_at,
        row.attempts,
        row.replay,
        row.error_type,
        # The text of an error may hold anything, such as the undecodable name of a file.
        row.error_message.encode("utf-8", "surrogatepass"),
        row.parked_at,
        row.last_retry_at,
        row.job,
        version,
        digest,
    )


def place_of(values: Row) -> Place:
    """Return where the payload of a row is."""
    return Place._make((*values[:4], values[15]))


class FileParkedRows:
    """The `ParkedRows` port."""

    def __init__(self, control: Database, payloads: Payloads, log: LogView) -> None:
        self._control = control
        self._payloads = payloads
        self._log = log

    # --- looking -------------------------------------------------------------------------------

    def page(
        self,
        filter: ParkedFilter,
        *,
        after: tuple[int, int] | None = None,
        limit: int = 100,
    ) -> list[Parked]:
        self._log.check_open()
        found: list[Parked] = []
        while len(found) < limit:
            count = min(limit - len(found), EVENTS_AT_A_TIME)
            rows = self._with_events(lambda connection: _page(connection, filter, after, count))  # noqa: B023 - run here
            found += rows
            if len(rows) < count:
                break
            after = (rows[-1].shard.partition, rows[-1].offset)
        return found

    def places(
        self, filter: ParkedFilter, *, after: tuple[int, int] | None = None, limit: int = 100
    ) -> list[tuple[int, int]]:
        self._log.check_open()
        found: list[tuple[int, int]] = []
        while len(found) < limit:
            count = min(limit - len(found), ROWS_AT_A_TIME)
            rows = self._control.read(lambda connection: _page(connection, filter, after, count))  # noqa: B023 - run here
            found += [values[2:4] for values in rows]
            if len(rows) < count:
                break
            after = found[-1]
        return found

    def count(self, filter: ParkedFilter) -> dict[ParkedState, int]:
        self._log.check_open()
        counts: dict[ParkedState, int] = {"waiting": 0, "dead": 0, "done": 0}
        for rows in self._read_pages(filter):
            for values in rows:
                counts[values[_STATE]] += 1
        return counts

    def due(self, filter: ParkedFilter, now: int, *, limit: int = 100) -> list[Parked]:
        self._log.check_open()
        wanted = _parameters(filter) | {"now": now, "limit": max(limit, 0)}
        statement = SELECT_DUE_OF_OFFSETS if _few_offsets(filter) else SELECT_DUE
        return self._with_events(
            lambda connection: PARKED.checked_all(connection.execute(statement, wanted).fetchall())
        )

    def waiting(self, filter: ParkedFilter) -> list[Waiting]:
        self._log.check_open()
        filter = _in_states(filter, _WAITING)
        if not _few_offsets(filter):
            # Most often few rows wait and many are dead, so that the index of those that wait is the short way. If
            # they are many, they are read by their place, which does not change while others write.
            wanted = _parameters(filter) | {"limit": ROWS_AT_A_TIME}
            rows = self._control.read(lambda connection: connection.execute(SELECT_WAITING, wanted).fetchall())
            if len(rows) < ROWS_AT_A_TIME:
                return sorted(
                    map(_waiting, PARKED.checked_all(rows)), key=lambda row: (row.shard.partition, row.offset)
                )
        return [_waiting(values) for page in self._read_pages(filter) for values in page]

    def _read_pages(self, filter: ParkedFilter) -> Iterator[list[Row]]:
        """Go through all rows that are meant, each part from a snapshot of its own: a long answer is no long reader."""
        after: tuple[int, int] | None = None
        while True:
            rows = self._control.read(lambda connection: _page(connection, filter, after, ROWS_AT_A_TIME))  # noqa: B023
            yield rows
            if len(rows) < ROWS_AT_A_TIME:
                return
            after = rows[-1][2:4]

    def _with_events(self, select: Callable[[sqlite3.Connection], list[Row]]) -> list[Parked]:
        """Return the selected rows with their events."""
        missed: set[Place] = set()
        while True:
            rows = self._control.read(select)
            places = [place_of(values) for values in rows]
            kept = self._payloads.load(places)
            missing = set(places) - kept.keys()
            if not missing:
                return [_parked(values, *kept[place]) for values, place in zip(rows, places, strict=True)]
            # Replaced or removed since the row was read: then the row is another by now, or gone.
            if lost := missing & missed:
                raise PARKED.damaged(f"row {min(lost)[:4]}: its event is missing in table payloads of bulk.db")
            missed = missing

    # --- changing ------------------------------------------------------------------------------

    def stamp(self, filter: ParkedFilter, job: str) -> int:
        return self._change(
            filter, None, lambda values: (*values[:_JOB], job, *values[_JOB + 1 :]), UPDATE_JOB, _of_job_update
        )

    def replay(self, filter: ParkedFilter, now: int, *, limit: int | None = None) -> int:
        def revived(values: Row) -> Row:
            return (
                *values[:_STATE],
                "waiting",
                values[6],
                now,
                0,
                values[_REPLAY] + 1,
                *values[_REPLAY + 1 : _JOB],
                "",
                *values[_JOB + 1 :],
            )

        return self._change(_in_states(filter, _DEAD), limit, revived, UPDATE_PARKED, _of_update)

    def _change(
        self,
        filter: ParkedFilter,
        limit: int | None,
        change: Callable[[Row], Row],
        statement: str,
        values_of: Callable[[Row], Row],
    ) -> int:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> int:
            changed = 0
            for rows in _pages(connection, filter, limit):
                new = [values_of(PARKED.seal(change(values))) for values in rows]
                connection.executemany(statement, new)
                changed += len(new)
            if changed:
                raise_revision(connection)
            return changed

        return self._control.write(work)

    def purge(self, filter: ParkedFilter) -> int:
        self._log.check_open()

        def work(connection: sqlite3.Connection) -> int:
            purged = 0
            for rows in _pages(connection, filter):
                gone = [values for values in rows if values[_STATE] != "waiting"]
                connection.executemany(DELETE_PARKED, [PARKED.key_of(values) for values in gone])
                self._payloads.doom(connection, [place_of(values) for values in gone])
                purged += len(gone)
            change_rows(connection, PARKED, -purged)
            if purged:
                raise_revision(connection)
            return purged

        purged = self._control.write(work)
        self._payloads.remove_many_doomed()
        return purged


def _page(connection: sqlite3.Connection, wanted: ParkedFilter, after: tuple[int, int] | None, limit: int) -> list[Row]:
    partition, offset = (-1, -1) if after is None else after
    place = {"after_partition": partition, "after_offset": offset, "limit": limit}
    statement = SELECT_PAGE
    if wanted.offsets and wanted.partition is not None and _is_range(wanted.offsets):
        place |= {"first": min(wanted.offsets), "last": max(wanted.offsets)}
        statement = SELECT_PAGE_OF_RANGE
    elif _few_offsets(wanted):
        statement = SELECT_PAGE_OF_OFFSETS
    return PARKED.checked_all(connection.execute(statement, _parameters(wanted) | place).fetchall())


def _pages(connection: sqlite3.Connection, wanted: ParkedFilter, limit: int | None = None) -> Iterator[list[Row]]:
    """Go through all rows that are meant, or the first ones, a part at a time.

    A part may be changed while it is looked at. No more rows are read than the limit says: others wait meanwhile.
    """
    after: tuple[int, int] | None = None
    left = limit
    while left is None or left > 0:
        count = ROWS_AT_A_TIME if left is None else min(left, ROWS_AT_A_TIME)
        rows = _page(connection, wanted, after, count)
        if rows:
            yield rows
        if len(rows) < count:
            return
        after = rows[-1][2:4]
        left = None if left is None else left - count


def _in_states(wanted: ParkedFilter, states: frozenset[ParkedState]) -> ParkedFilter:
    """Return a filter that means the same rows, as far as they are in one of these states."""
    return structs.replace(wanted, states=states if wanted.states is None else states & wanted.states)


def _few_offsets(wanted: ParkedFilter) -> bool:
    return wanted.offsets is not None and len(wanted.offsets) <= OFFSETS_SINGLY_MAX


def _is_range(offsets: frozenset[int]) -> bool:
    return max(offsets) - min(offsets) + 1 == len(offsets)


def _parameters(wanted: ParkedFilter) -> dict[str, Any]:
    return {
        "log_id": wanted.log_id,
        "subscription": wanted.subscription,
        "states": None if wanted.states is None else json.dumps(sorted(wanted.states)),
        "slots": None if wanted.slots is None else json.dumps(sorted(wanted.slots)),
        "partition": wanted.partition,
        "lane": wanted.lane,
        "error_type": wanted.error_type,
        "parked_from": wanted.parked_from,
        "parked_until": wanted.parked_until,
        "job": wanted.job,
        "offsets": None if wanted.offsets is None else json.dumps(sorted(wanted.offsets)),
    }


def _waiting(values: Row) -> Waiting:
    log_id, subscription, partition, offset, slot, _, lane, due_at, attempts, replay, *_ = values
    return Waiting(Shard(log_id, subscription, slot, partition), offset, lane, due_at, attempts, replay)


def _parked(values: Row, event: Event, error_trace: str) -> Parked:
    log_id, subscription, partition, offset, slot, state, lane, due_at, attempts, replay, *rest = values
    error_type, error_message, parked_at, last_retry_at, job, _, _ = rest
    return Parked(
        shard=Shard(log_id, subscription, slot, partition),
        offset=offset,
        state=state,
        lane=lane,
        event=event,
        due_at=due_at,
        attempts=attempts,
        replay=replay,
        error_type=error_type,
        error_message=error_message.decode("utf-8", "surrogatepass"),
        error_trace=error_trace,
        parked_at=parked_at,
        last_retry_at=last_retry_at,
        job=job,
    )
