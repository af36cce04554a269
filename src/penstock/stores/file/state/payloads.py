"""The events of parked rows, in `bulk.db`, and how they are removed without ever being missed.

The traceback of a row's error is kept with its event: it is large, and looked at when the event is.

A payload is written under a new version and committed before the row in `control.db` that refers to it. A payload
that replaces another therefore never overwrites what somebody still refers to. What nobody refers to is removed in
three steps: it is written down as *doomed* in a transaction of `control.db` that sees that no row refers to it, then
deleted from `bulk.db`, then struck off the list. A commit looks, in its own transaction of `control.db`, that its new
payloads are there and not doomed; if not, it writes them again. Both decisions are made under the turn of
`control.db`, so whichever comes first is seen by the other, however long a process was frozen in between.
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.errors import UsageError
from penstock.events import Event
from penstock.stores.file.state.schema import PARKED, PAYLOADS
from penstock.stores.file.state.tallies import change_rows, read_tally

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping, Sequence

    from penstock.stores.file.platform import Platform
    from penstock.stores.file.state.database import Database
    from penstock.stores.file.state.sealing import Row

INSERT_PAYLOAD = "INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)"
SELECT_PAYLOAD = """
SELECT log_id, subscription, partition, offset, version, event, crc FROM payloads
WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ? AND version = ?
"""
# All that are wanted of a subscription, by one statement: half the cost of one for each.
SELECT_PAYLOADS = """
SELECT payloads.log_id, payloads.subscription, payloads.partition, payloads.offset, payloads.version, event, crc
FROM json_each(:places) AS wanted CROSS JOIN payloads
WHERE log_id = :log_id AND subscription = :subscription AND partition = json_extract(wanted.value, '$[0]')
    AND offset = json_extract(wanted.value, '$[1]') AND version = json_extract(wanted.value, '$[2]')
"""
SELECT_PAYLOAD_EXISTS = """
SELECT 1 FROM payloads WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ? AND version = ?
"""
SELECT_PAYLOAD_PLACES = """
SELECT log_id, subscription, partition, offset, version FROM payloads
WHERE (log_id, subscription, partition, offset, version) > (?, ?, ?, ?, ?)
ORDER BY log_id, subscription, partition, offset, version LIMIT ?
"""
DELETE_PAYLOAD = """
DELETE FROM payloads WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ? AND version = ?
"""
SELECT_REFERRED = """
SELECT 1 FROM parked WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ? AND version = ?
"""
INSERT_DOOMED = "INSERT OR IGNORE INTO doomed VALUES (?, ?, ?, ?, ?)"
SELECT_ANY_DOOMED = "SELECT 1 FROM doomed LIMIT 1"
SELECT_IS_DOOMED = """
SELECT 1 FROM doomed WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ? AND version = ?
"""
SELECT_DOOMED = "SELECT log_id, subscription, partition, offset, version FROM doomed LIMIT ?"
COUNT_DOOMED = "SELECT count(*) FROM doomed"
DELETE_DOOMED = """
DELETE FROM doomed WHERE log_id = ? AND subscription = ? AND partition = ? AND offset = ? AND version = ?
"""

SWEEP_ROWS = 1_000
"""So many payloads are looked at in one transaction."""
DIGEST_BYTES = 16

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


class Place(NamedTuple):
    """Where a payload is: the identity of its row, and a version."""

    log_id: str
    subscription: str
    partition: int
    offset: int
    version: int


_BEFORE_ALL = Place("", "", -1, -1, -1)


class Payload(NamedTuple):
    """An event as it is stored, and a digest that tells whether two are the same."""

    event: bytes
    digest: bytes


class Kept(NamedTuple):
    """What a payload holds."""

    event: Event
    error_trace: str


class _Traced(Event, frozen=True, kw_only=True):
    """An event with a traceback: one more entry in its map, which whoever reads the event alone passes over."""

    error_trace: bytes = b""


class _Trace(msgspec.Struct, frozen=True):
    """The traceback alone; without the entry there is none."""

    error_trace: bytes = b""


_trace_decoder = msgspec.msgpack.Decoder(_Trace)


def encode_event(event: Event) -> bytes:
    """Return an event as it is stored."""
    try:
        return _encoder.encode(event)
    except (TypeError, UnicodeEncodeError, OverflowError) as error:
        raise UsageError(f"an event cannot be stored: {error}") from None


def decode_event(stored: bytes) -> Event:
    """Return a stored event."""
    return _decoder.decode(stored)


def a_payload(event: Event, error_trace: str = "") -> Payload:
    """Return what is stored of an event, and of the traceback beside it."""
    if error_trace:
        # It names files, and their names may be undecodable.
        trace = error_trace.encode("utf-8", "surrogatepass")
        event = _Traced(**msgspec.structs.asdict(event), error_trace=trace)
    stored = encode_event(event)
    return Payload(stored, hashlib.blake2b(stored, digest_size=DIGEST_BYTES).digest())


def _kept(stored: bytes) -> Kept:
    trace = _trace_decoder.decode(stored).error_trace
    return Kept(decode_event(stored), trace.decode("utf-8", "surrogatepass"))


class Payloads:
    """The payloads of parked rows."""

    def __init__(self, control: Database, bulk: Database, platform: Platform) -> None:
        self._control = control
        self._bulk = bulk
        self._random = platform.random
        self._doomed_lately = 0

    def new_version(self) -> int:
        """Return a version that was never used: 63 bits of chance."""
        return int.from_bytes(self._random(8), "big") >> 1

    def put(self, payloads: Mapping[Place, Payload]) -> None:
        """Write payloads under new versions. Nobody sees them before a row refers to them."""
        rows = [PAYLOADS.seal((*place, payload.event)) for place, payload in payloads.items()]

        def work(connection: sqlite3.Connection) -> None:
            connection.executemany(INSERT_PAYLOAD, rows)
            change_rows(connection, PAYLOADS, len(rows))

        self._bulk.write(work)

    def load(self, places: Sequence[Place]) -> dict[Place, Kept]:
        """Return what is there; a payload that is missing is left out."""
        owners: dict[tuple[str, str], list[list[int]]] = {}
        for log_id, subscription, *place in places:
            owners.setdefault((log_id, subscription), []).append(place)

        def work(connection: sqlite3.Connection) -> list[Row]:
            found: list[Row] = []
            for (log_id, subscription), wanted in owners.items():
                given = {"log_id": log_id, "subscription": subscription, "places": json.dumps(wanted)}
                found += connection.execute(SELECT_PAYLOADS, given).fetchall()
            return PAYLOADS.checked_all(found)

        return {Place(*values[:5]): _kept(values[5]) for values in self._bulk.read(work)}

    def usable(self, connection: sqlite3.Connection, places: Sequence[Place]) -> bool:
        """Say whether rows may refer to these new payloads; asked in the transaction that makes them refer."""
        if connection.execute(SELECT_ANY_DOOMED).fetchone() and any(
            connection.execute(SELECT_IS_DOOMED, place).fetchone() for place in places
        ):
            return False
        return self._bulk.read(
            lambda bulk: all(bulk.execute(SELECT_PAYLOAD_EXISTS, place).fetchone() for place in places)
        )

    def doom(self, connection: sqlite3.Connection, places: Sequence[Place]) -> None:
        """Write down, in the caller's transaction, that these are to be removed: no row refers to them now."""
        connection.executemany(INSERT_DOOMED, places)
        self._doomed_lately += len(places)

    # --- sweeping ------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Remove what nobody refers to, also what a crash between two commits left; return how much."""
        if self._may_have_orphans():
            self._doom_orphans()
        return self.remove_doomed()

    def remove_many_doomed(self) -> None:
        """Remove what is doomed already if it has become much since the last time."""
        if self._doomed_lately >= SWEEP_ROWS:
            self.remove_doomed()

    def remove_doomed(self) -> int:
        """Remove what is doomed already."""
        self._doomed_lately = 0
        removed = 0
        while places := self._control.read(_doomed):
            removed += self._bulk.write(partial(_delete, places=places))
            self._control.write(partial(_strike_off, places=places))
        return removed

    def _may_have_orphans(self) -> bool:
        """Compare counts, which is quick: as many payloads as rows and doomed ones means that there are none."""
        stored = self._bulk.read(lambda connection: read_tally(connection, PAYLOADS).rows)
        known = self._control.read(
            lambda connection: read_tally(connection, PARKED).rows + int(connection.execute(COUNT_DOOMED).fetchone()[0])
        )
        return stored != known

    def _doom_orphans(self) -> None:
        after = _BEFORE_ALL
        while places := self._bulk.read(partial(_places, after=after)):
            if suspects := self._control.read(partial(_unreferred, places=places)):
                self._control.write(partial(_doom_unreferred, places=suspects))
            after = places[-1]


def _places(connection: sqlite3.Connection, after: Place) -> list[Place]:
    return [Place(*row) for row in connection.execute(SELECT_PAYLOAD_PLACES, (*after, SWEEP_ROWS)).fetchall()]


def _unreferred(connection: sqlite3.Connection, places: Sequence[Place]) -> list[Place]:
    return [place for place in places if not connection.execute(SELECT_REFERRED, place).fetchone()]


def _doom_unreferred(connection: sqlite3.Connection, places: Sequence[Place]) -> None:
    # Looked at again, and now under the turn: meanwhile a row may refer to it.
    connection.executemany(INSERT_DOOMED, _unreferred(connection, places))


def _doomed(connection: sqlite3.Connection) -> list[Place]:
    places = [Place(*row) for row in connection.execute(SELECT_DOOMED, (SWEEP_ROWS,)).fetchall()]
    for place in places:
        # The list carries no checksums, so it is not believed either.
        if connection.execute(SELECT_REFERRED, place).fetchone():
            raise PARKED.damaged(f"row {place[:4]}: its payload is in use, and on the list of those that are not")
    return places


def _strike_off(connection: sqlite3.Connection, places: Sequence[Place]) -> None:
    connection.executemany(DELETE_DOOMED, places)


def _delete(connection: sqlite3.Connection, places: Sequence[Place]) -> int:
    deleted = connection.executemany(DELETE_PAYLOAD, places).rowcount
    change_rows(connection, PAYLOADS, -deleted)
    return deleted
