"""What was asked of a store, what it answered, and what was seen of it: the witness of a test.

A journal is kept outside of what can break: in the memory of the process that runs the test, never in the store.
`penstock.testing.checker` compares what it holds with what Penstock promises.

* **An event is named by its payload.** Within a log, payloads of different events differ; the same payload published
  again to the same partition is a retry of the same event.
* **Payloads are not kept**, only their 64-bit hashes: an event takes 16 bytes, and ten million fit. Two of ten million
  share a hash with a probability of 3 in a million.
* **What is told in one order happened in that order.** A publish is told when its outcome is known, a delivery when the
  handler begins, a settlement when it is durable. Events of one key are published one after the other: who publishes
  a key from two places at once gives no keys.
* Any thread may tell at any time.

Every fact is a row of four integers: its number in the order of telling, where it starts, where it stops, and a code.
"""

from __future__ import annotations

import enum
from array import array
from collections import defaultdict
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

Payloads: TypeAlias = "Sequence[bytes] | pa.Array"
Keys: TypeAlias = "Sequence[bytes | None] | pa.Array"
Integers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]


class Outcome(enum.IntEnum):
    """What a caller knows of something it asked for."""

    OK = 0
    FAILED = 1
    """It did not happen and never will."""
    UNKNOWN = 2
    """It happened, or not, or will: no answer came, or one that leaves it open."""


class Fact(enum.Enum):
    """What a row tells; the comments say what it holds besides its number."""

    PUBLISHED = enum.auto()  # offsets (of OK ones), and the outcome
    STORED = enum.auto()  # offsets
    DELIVERED = enum.auto()  # offsets
    GAP = enum.auto()  # offsets, and whether the store declared it
    TRIMMED = enum.auto()  # from 0 up to the first offset that was to stay
    BOUNDS = enum.auto()  # offsets
    COMMITTED = enum.auto()  # the position twice, and the outcome
    CURSOR = enum.auto()  # the position, and the end of the log
    SETTLED = enum.auto()  # offsets, and how: an index of `STATES`
    DAMAGED = enum.auto()  # offsets
    REPORTED = enum.auto()  # offsets


STATES = ("acked", "dead", "expired", "discarded", "parked", "pending")
"""What an event can be to a subscription. The first four are settlements."""
SETTLEMENTS = STATES[:4]

GRANTED = -1
"""The code of a grant among the rows of a lease; the others have the outcome of a write."""

KEY_NOT_TOLD = 0
NO_KEY = 1
"""Two numbers that are not the hash of a key."""


class Place(NamedTuple):
    """One partition of one log."""

    log: str
    partition: int

    def __str__(self) -> str:
        return f"log {self.log}, partition {self.partition}"


Subject: TypeAlias = tuple[Fact, Place, str]
"""What a table of rows is about; the last is a subscription, or empty."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Facts of one kind about one subject, in the order in which they were told."""

    number: Integers
    start: Integers
    stop: Integers
    code: Integers

    def where(self, chosen: npt.NDArray[np.bool_]) -> Rows:
        """Return those that were chosen."""
        return Rows(self.number[chosen], self.start[chosen], self.stop[chosen], self.code[chosen])


@dataclass(frozen=True, slots=True)
class Events:
    """Columns of events, one row for each, in the order in which they were told."""

    number: Integers
    offset: Integers
    """Means something where the store gave or showed one."""
    code: npt.NDArray[np.int8]
    id: Ids
    key: Ids


def event_id(payload: bytes) -> int:
    """Return the number by which a journal and a violation name the event with this payload."""
    return xxh3_64_intdigest(payload)


def ids_of(payloads: Payloads) -> Ids:
    """Return the `event_id` of each payload."""
    return np.fromiter(map(xxh3_64_intdigest, _listed(payloads)), np.uint64, len(payloads))


def _keys_of(keys: Keys | None) -> Ids | None:
    if keys is None:
        return None
    hashes = (NO_KEY if key is None else max(xxh3_64_intdigest(key), NO_KEY + 1) for key in _listed(keys))
    return np.fromiter(hashes, np.uint64, len(keys))


def _listed(values: Any) -> Any:
    # The items of an Arrow array are objects of its own.
    return values.to_pylist() if hasattr(values, "to_pylist") else values


class _Table:
    """Rows, and the events that belong to them; grows cheaply, by one row or by a million events."""

    __slots__ = ("ids", "keys", "rows")

    def __init__(self) -> None:
        self.rows = array("q")
        self.ids = array("Q")
        self.keys = array("Q")

    def read(self) -> Rows:
        rows = np.array(self.rows, np.int64).reshape(-1, 4)
        return Rows(*np.ascontiguousarray(rows.T))


class Journal:
    """Tells nothing by itself: `check` of `penstock.testing.checker` reads it, once nobody writes to it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._count = 0
        self._tables: defaultdict[Subject, _Table] = defaultdict(_Table)
        self._leases: defaultdict[str, _Table] = defaultdict(_Table)
        self._deleted: dict[str, int] = {}
        self._restarts: list[int] = []
        self._faults_ended: list[float] = []
        self._progressed: list[float] = []

    # --- publishing ------------------------------------------------------------------------------

    def published(
        self,
        log: str,
        partition: int,
        payloads: Payloads,
        outcome: Outcome,
        *,
        offset: int | None = None,
        keys: Keys | None = None,
    ) -> None:
        """Tell the outcome of one publish; `offset` is that of its first event, if the outcome is OK.

        For an event that is published several times the best news count: OK before UNKNOWN before FAILED.
        """
        self.published_ids(log, partition, ids_of(payloads), outcome, offset=offset, keys=_keys_of(keys))

    def published_ids(
        self,
        log: str,
        partition: int,
        ids: Ids,
        outcome: Outcome,
        *,
        offset: int | None = None,
        keys: Ids | None = None,
    ) -> None:
        """Like `published`, of events that already have a number each; so do their keys, from 2 on."""
        if outcome == Outcome.OK and offset is None:
            raise ValueError("a publish that is OK has an offset")
        first = offset if outcome == Outcome.OK and offset is not None else 0
        self._tell_events((Fact.PUBLISHED, Place(log, partition), ""), first, ids, keys, outcome)

    # --- what the store says ---------------------------------------------------------------------

    def stored(self, log: str, partition: int, offset: int, payloads: Payloads, keys: Keys | None = None) -> None:
        """Tell what a reader got, from this offset on; at any time, and again."""
        self.stored_ids(log, partition, offset, ids_of(payloads), _keys_of(keys))

    def stored_ids(self, log: str, partition: int, offset: int, ids: Ids, keys: Ids | None = None) -> None:
        """Like `stored`, of events that already have a number each."""
        self._tell_events((Fact.STORED, Place(log, partition), ""), offset, ids, keys)

    def gap(self, log: str, partition: int, start: int, stop: int, declared: bool = True) -> None:  # noqa: FBT001, FBT002 - an argument like the others
        """Tell that a reader got nothing for these offsets: the store declared a gap, or left them out in silence."""
        self._tell((Fact.GAP, Place(log, partition), ""), start, stop, int(declared))

    def trimmed(self, log: str, partition: int, start: int) -> None:
        """Tell that the store was asked to forget what is below `start`."""
        self._tell((Fact.TRIMMED, Place(log, partition), ""), 0, start)

    def deleted(self, log: str) -> None:
        """Tell that the log was deleted. One that gets its name later is another one, and has another name here."""
        with self._lock:
            self._deleted.setdefault(log, self._next())

    def bounds(self, log: str, partition: int, start: int, stop: int) -> None:
        """Tell what the store says can be read now: all of it must be told by `stored` or `gap`, before or after."""
        self._tell((Fact.BOUNDS, Place(log, partition), ""), start, stop)

    def restarted(self) -> None:
        """Tell that the store is looked at anew, after a crash or at any other moment.

        What `stored`, `gap`, `bounds`, `parked` and `pending` told before this still must not be contradicted, but it
        shows no longer what is there: that has to be told again.
        """
        with self._lock:
            self._restarts.append(self._next())

    # --- cursors, deliveries, settlements --------------------------------------------------------

    def committed(self, subscription: str, log: str, partition: int, position: int, outcome: Outcome) -> None:
        """Tell the outcome of a cursor's commit."""
        self._tell((Fact.COMMITTED, Place(log, partition), subscription), position, position, outcome)

    def cursor(self, subscription: str, log: str, partition: int, position: int, end: int) -> None:
        """Tell where the store says that the cursor is, and where the durable log ended then."""
        with self._lock:  # not `_tell`: that a cursor is beyond the end is for the checker to say
            self._add(self._tables[Fact.CURSOR, Place(log, partition), subscription], position, end)

    def delivered(  # noqa: PLR0917 - what a delivery is
        self, subscription: str, log: str, partition: int, offset: int, payloads: Payloads, keys: Keys | None = None
    ) -> None:
        """Tell what a handler is given, from this offset on; with keys where their order is promised."""
        self.delivered_ids(subscription, log, partition, offset, ids_of(payloads), _keys_of(keys))

    def delivered_ids(  # noqa: PLR0917 - the same
        self, subscription: str, log: str, partition: int, offset: int, ids: Ids, keys: Ids | None = None
    ) -> None:
        """Like `delivered`, of events that already have a number each."""
        self._tell_events((Fact.DELIVERED, Place(log, partition), subscription), offset, ids, keys)

    def settled(  # noqa: PLR0917 - what a settlement is
        self, subscription: str, log: str, partition: int, start: int, stop: int, how: str
    ) -> None:
        """Tell a durable settlement: `how` is one of `SETTLEMENTS`."""
        if how not in SETTLEMENTS:
            raise ValueError(f"an event is settled as one of {', '.join(SETTLEMENTS)}, not {how!r}")
        self._tell((Fact.SETTLED, Place(log, partition), subscription), start, stop, STATES.index(how))

    def parked(self, subscription: str, log: str, partition: int, start: int, stop: int) -> None:
        """Tell that the store says that these wait apart for another attempt."""
        self._tell((Fact.SETTLED, Place(log, partition), subscription), start, stop, STATES.index("parked"))

    def pending(self, subscription: str, log: str, partition: int, start: int, stop: int) -> None:
        """Tell that the store says that these are still to be delivered, or being so."""
        self._tell((Fact.SETTLED, Place(log, partition), subscription), start, stop, STATES.index("pending"))

    # --- damage, leases, life --------------------------------------------------------------------

    def damaged(self, log: str, partition: int, start: int, stop: int) -> None:
        """Tell that the test damaged these offsets: all of them that the damage makes unreadable."""
        self._tell((Fact.DAMAGED, Place(log, partition), ""), start, stop)

    def reported(self, log: str, partition: int, start: int, stop: int) -> None:
        """Tell that the store reported damage of these offsets."""
        self._tell((Fact.REPORTED, Place(log, partition), ""), start, stop)

    def granted(self, lease: str, epoch: int) -> None:
        """Tell that somebody got the lease, with this epoch."""
        with self._lock:
            self._add(self._leases[lease], epoch, epoch, GRANTED)

    def wrote(self, lease: str, epoch: int, outcome: Outcome) -> None:
        """Tell the outcome of a write under the lease with this epoch."""
        with self._lock:
            self._add(self._leases[lease], epoch, epoch, outcome)

    def faults_ended(self, at: float) -> None:
        """Tell that from this second on nothing was disturbed any more, until the next call."""
        with self._lock:
            self._faults_ended.append(at)

    def progressed(self, at: float) -> None:
        """Tell that in this second, of the same clock, something was published, delivered or settled."""
        with self._lock:
            self._progressed.append(at)

    # --- reading it ------------------------------------------------------------------------------

    def places(self) -> dict[Place, list[str]]:
        """Return every partition of which anything was told, and the subscriptions of which anything was told there."""
        found: defaultdict[Place, set[str]] = defaultdict(set)
        with self._lock:
            for _, place, subscription in self._tables:
                found[place].add(subscription)
        return {place: sorted(names - {""}) for place, names in sorted(found.items())}

    def rows(self, fact: Fact, place: Place, subscription: str = "") -> Rows:
        """Return the facts of this kind."""
        with self._lock:
            return self._tables.get((fact, place, subscription), _Table()).read()

    def events(self, fact: Fact, place: Place, subscription: str = "") -> Events:
        """Return the events of the facts of this kind."""
        with self._lock:
            table = self._tables.get((fact, place, subscription), _Table())
            rows, ids, keys = table.read(), np.array(table.ids, np.uint64), np.array(table.keys, np.uint64)
        lengths = rows.stop - rows.start
        before = np.cumsum(lengths) - lengths
        offsets = np.repeat(rows.start - before, lengths) + np.arange(len(ids))
        return Events(
            np.repeat(rows.number, lengths), offsets, np.repeat(rows.code.astype(np.int8), lengths), ids, keys
        )

    def leases(self) -> dict[str, Rows]:
        """Return the grants and writes of every lease."""
        with self._lock:
            return {name: table.read() for name, table in sorted(self._leases.items())}

    def deletion(self, log: str) -> int | None:
        """Return the number of the fact that the log was deleted."""
        with self._lock:
            return self._deleted.get(log)

    def restarts(self) -> Integers:
        """Return the numbers of the restarts."""
        with self._lock:
            return np.array(self._restarts, np.int64)

    def times(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return when faults ended, and when there was progress, each in ascending order."""
        with self._lock:
            return np.sort(np.array(self._faults_ended, float)), np.sort(np.array(self._progressed, float))

    # --- writing it ------------------------------------------------------------------------------

    def _tell(self, subject: Subject, start: int, stop: int, code: int = 0) -> None:
        if not 0 <= start <= stop:
            raise ValueError(f"[{start}, {stop}) is not a range of offsets")
        with self._lock:
            self._add(self._tables[subject], start, stop, code)

    def _tell_events(self, subject: Subject, offset: int, ids: Ids, keys: Ids | None, code: int = 0) -> None:
        if offset < 0:
            raise ValueError(f"{offset} is not an offset")
        if keys is None:
            keys = np.full(len(ids), KEY_NOT_TOLD, np.uint64)
        elif len(keys) != len(ids):
            raise ValueError(f"{len(ids):,} events have {len(keys):,} keys")
        raw_ids, raw_keys = ids.astype(np.uint64).tobytes(), keys.astype(np.uint64).tobytes()
        with self._lock:
            table = self._tables[subject]
            self._add(table, offset, offset + len(ids), code)
            table.ids.frombytes(raw_ids)
            table.keys.frombytes(raw_keys)

    def _add(self, table: _Table, start: int, stop: int, code: int = 0) -> None:
        table.rows.extend((self._next(), start, stop, code))

    def _next(self) -> int:
        self._count += 1
        return self._count
