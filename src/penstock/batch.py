"""Batch: many events as one Arrow record batch with their offsets; the unit of all I/O.

A block on disk, a frame on the wire and a batch in Spark are the same columns. A batch is immutable and
shares its memory: a slice by offsets copies nothing, and a *selection* (what a consumer is given of a
batch) is the same columns with a list of rows. Python touches events one by one only when somebody
iterates, and then only the columns that are looked at are converted.

A batch that was read has a `Place`: topic, partition and when it was appended. It answers for what the
log leaves out because it can be derived: an event's id is `<producer>-<sequence>`, its source and content
type are the topic's, where the publisher gave none. A batch that was not appended yet has no place, and
its offsets count from 0.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_128_digest

from penstock import columns as cols
from penstock.clock import us_to_datetime
from penstock.errors import InvalidEvent, UsageError, did_you_mean
from penstock.events import VERSION_HEADER, Event
from penstock.offsets import Position, Range
from penstock.parsing import parse
from penstock.producers import Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

UNTYPED: Final = "penstock.untyped"
"""The `type` of an event whose publisher gave none."""

STORED_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        *(cols.SCHEMA.field(name) for name in ("id", "source", "type", "subject", "time")),
        ("appended_at", cols.TIMESTAMP),
        *(cols.SCHEMA.field(name) for name in ("expires_at", "key", "content_type", "headers", "data")),
    ]
)
"""What `Batch.to_arrow()` returns, whichever columns the batch itself has."""

KIND_EVENTS_MIN: Final = 16
"""Of fewer events it is not looked at whether all are alike."""

_UNKNOWN: Final[Any] = object()

NEVER: Final = np.iinfo(np.int64).max
"""The expiry of an event that does not expire."""


class Place(NamedTuple):
    """Where a batch stands, and what its topic says for events that do not say it themselves."""

    topic: str
    partition: int
    appended_at: int
    """When the block was appended, in microseconds since 1970 UTC."""
    source: str
    content_type: str


class Kind(NamedTuple):
    """What decoding needs to know of an event besides its payload."""

    type: str
    content_type: str | None
    version: bytes | None
    """What its header says; None without one."""


class Batch:
    """Events of one partition with consecutive offsets, or a selection of them."""

    __slots__ = (
        "_digests",
        "_expected",
        "_hashes",
        "_identities",
        "_kind",
        "_lists",
        "columns",
        "place",
        "rows",
        "runs",
        "start",
    )

    def __init__(
        self,
        columns: pa.RecordBatch,
        *,
        start: int = 0,
        place: Place | None = None,
        runs: tuple[Run, ...] = (),
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Wrap columns that are known to be valid; use the class methods for any others."""
        self.columns = columns
        self.start = start
        self.place = place
        self.runs = runs
        self.rows = rows
        self._hashes: dict[int, tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]] = {}
        self._lists: dict[str, list[Any] | dict[int, Any] | None] = {}
        self._identities: list[tuple[str, str]] | None = None
        self._digests: dict[str, list[bytes]] = {}
        self._expected: npt.NDArray[np.int64] | None = None
        self._kind: Kind | Literal[False] | None = None

    # --- making one --------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        data: Sequence[bytes] | pa.Array,
        *,
        key: Any = None,
        type: Any = None,
        id: Any = None,
        source: Any = None,
        subject: Any = None,
        time: Any = None,
        expires_at: Any = None,
        content_type: Any = None,
        headers: Any = None,
    ) -> Self:
        """Build a batch from columns: sequences of Python values, Arrow arrays, or one value for all.

        Text is stored as UTF-8. Raises `InvalidEvent`, naming the column, for values that do not fit.
        """
        count = len(data)
        payload = cols.column("data", data, count)
        if payload.null_count:
            raise InvalidEvent("an event has no data (None); an empty payload is b''")
        given = {
            "id": id,
            "source": source,
            "type": type,
            "subject": subject,
            "time": time,
            "expires_at": expires_at,
            "key": key,
            "content_type": content_type,
            "headers": headers,
        }
        arrays = {name: cols.column(name, values, count) for name, values in given.items() if values is not None}
        return cls(cols.assemble({**arrays, "data": payload}))

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Self:
        """Build a batch from envelopes, in their order."""
        listed = list(events)
        count = len(listed)
        arrays: dict[str, pa.Array] = {}
        for name in cols.NAMES:
            values: list[Any] = list(map(attrgetter(name), listed))
            if name == "headers":
                values = [headers or None for headers in values]
            # Most columns are absent, which the first event does not prove, but counting quickly does.
            if name == "data" or (count and (values[0] is not None or values.count(None) < count)):
                arrays[name] = cols.column(name, values, count)
        return cls(cols.assemble(arrays))

    @classmethod
    def from_arrow(cls, data: pa.RecordBatch | pa.Table) -> Self:
        """Take events from Arrow data whose columns carry the event's names; checks all of it."""
        return cls(cols.adopt(data))

    @classmethod
    def from_bytes(
        cls,
        data: bytes | memoryview | pa.Buffer,
        mask: int,
        *,
        start: int = 0,
        place: Place | None = None,
        runs: tuple[Run, ...] = (),
    ) -> Self:
        """Parse untrusted bytes without copying them; `InvalidBatch` if anything about them is wrong."""
        return cls(parse(data, mask), start=start, place=place, runs=runs)

    def to_bytes(self) -> pa.Buffer:
        """Return the columns as bytes for `from_bytes`; keep `mask` beside them."""
        return cols.serialize(self._selected())

    @property
    def mask(self) -> int:
        """Which columns are there, as `from_bytes` needs it."""
        return cols.mask_of(self.columns.schema.names)

    def compact(self) -> Self:
        """Return the selected events alone, without a place: as new events for another log."""
        if self.rows is None:
            return type(self)(self.columns)
        chosen = self._selected()
        return type(self)(cols.assemble(dict(zip(chosen.schema.names, chosen.columns, strict=True))))

    def at(self, start: int, place: Place, runs: tuple[Run, ...]) -> Self:
        """Return the same events as they stand in a log."""
        return type(self)(self.columns, start=start, place=place, runs=runs, rows=self.rows)

    # --- offsets -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.columns.num_rows if self.rows is None else len(self.rows)

    def __repr__(self) -> str:
        where = f"{self.place.topic}/{self.place.partition}" if self.place else "unplaced"
        chosen = "" if self.rows is None else f", {len(self)} selected"
        return f"<Batch {where} {self.range}{chosen}, {self.columns.nbytes:,} bytes>"

    @property
    def range(self) -> Range:
        """The offsets that the columns cover, selected or not."""
        return Range(self.start, self.start + self.columns.num_rows)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The offset of each event, selected ones only."""
        if self.rows is None:
            return np.arange(self.start, self.start + self.columns.num_rows, dtype=np.int64)
        return self.rows + self.start

    def slice(self, wanted: Range) -> Self:
        """Return the events whose offsets are in `wanted`, copying nothing."""
        part = self.range.intersection(wanted)
        if part == self.range:
            return self
        skip = part.start - self.start if part else 0
        rows = self.rows
        if rows is not None:
            rows = rows[(rows >= skip) & (rows < skip + len(part))] - skip
        return type(self)(
            self.columns.slice(skip, len(part)),
            start=self.start + skip,
            place=self.place,
            runs=_slice_runs(self.runs, skip, len(part)),
            rows=rows,
        )

    def select(self, offsets: npt.NDArray[np.int64] | Sequence[int]) -> Self:
        """Return the same columns with only the events at these offsets; order and repeats do not matter."""
        rows = np.asarray(offsets, np.int64) - self.start
        if not (rows[1:] > rows[:-1]).all():  # as a rule they are in order, which costs less to see than to bring about
            rows = np.unique(rows)
        if len(rows) and (rows[0] < 0 or rows[-1] >= self.columns.num_rows):
            outside = rows[0] if rows[0] < 0 else rows[-1]
            raise UsageError(f"offset {outside + self.start} is not in this batch, which covers {self.range}")
        if self.rows is not None:
            rows = np.intersect1d(rows, self.rows, assume_unique=True)
        return type(self)(self.columns, start=self.start, place=self.place, runs=self.runs, rows=rows)

    def has(self, name: str) -> bool:
        """Say whether any event has a value in this column."""
        return name in self.columns.schema.names

    # --- columns -----------------------------------------------------------------------------

    def _selected(self) -> pa.RecordBatch:
        return self.columns if self.rows is None else self.columns.take(pa.array(self.rows))

    def to_arrow(self, names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Return all columns of `STORED_SCHEMA`, or the named ones, with what can be derived filled in."""
        wanted = STORED_SCHEMA.names if names is None else names
        columns = self._selected()
        return pa.RecordBatch.from_arrays(
            [self._stored_column(name, columns) for name in wanted],
            schema=pa.schema([STORED_SCHEMA.field(name) for name in wanted]),
        )

    def _stored_column(self, name: str, columns: pa.RecordBatch) -> pa.Array:
        if name not in STORED_SCHEMA.names:
            raise UsageError(f"there is no column {name!r}{did_you_mean(name, STORED_SCHEMA.names)}")
        if name == "offset":
            return pa.array(self.offsets)
        wanted = STORED_SCHEMA.field(name).type
        stored = columns.column(name) if name in columns.schema.names else None
        if stored is not None and stored.null_count == 0:
            return stored
        if name == "id":
            derived = self._derived_ids()
            return derived if stored is None else pc.coalesce(stored, derived)
        default = self._default(name)
        if stored is not None:
            return stored if default is None else stored.fill_null(pa.scalar(default, wanted))
        return cols.repeated(wanted, default, len(self))

    def _default(self, name: str) -> Any:
        """Return what a missing value of this column means."""
        if name == "type":
            return UNTYPED
        if self.place is None:
            return None
        return self.place._asdict().get(name)

    def _derived_ids(self) -> pa.Array:
        if not self.runs:
            return pa.nulls(len(self), pa.string())
        # A block that merged many publishers has as many runs as events, so runs are taken as columns, too.
        lengths = np.array([run.length for run in self.runs])
        run_of = self._of_rows(np.repeat(np.arange(len(lengths)), lengths))
        begins = np.array([run.first_sequence for run in self.runs]) - (np.cumsum(lengths) - lengths)
        sequences = begins[run_of] + self._of_rows(np.arange(lengths.sum()))
        producers = pa.array([run.producer.hex() for run in self.runs]).take(pa.array(run_of))
        return pc.binary_join_element_wise(producers, pa.array(sequences).cast(pa.string()), "-")

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """The bytes of each event, selected ones only."""
        return self._of_rows(cols.sizes(self.columns))

    @property
    def total_size(self) -> int:
        """The sum of `sizes`."""
        return cols.total_size(self.columns) if self.rows is None else int(self.sizes.sum())

    @property
    def expiries(self) -> npt.NDArray[np.int64]:
        """When each event expires, in microseconds since 1970 UTC; `NEVER` for those that do not."""
        if not self.has("expires_at"):
            return np.full(len(self), NEVER, np.int64)
        return self._of_rows(cols.times(self.columns.column("expires_at"), NEVER))

    def _of_rows(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if self.rows is None else values[self.rows]

    # --- lanes -------------------------------------------------------------------------------

    @property
    def keys(self) -> pa.Array:
        """The key of each event, null for those without one."""
        return cols.keys_of(self._selected())

    def key_hashes(self, seed: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
        """Return the hash of each event's key, and which events have one (None: all). Computed once."""
        found = self._hashes.get(seed)
        if found is None:
            found = self._hashes[seed] = cols.key_hashes(self.columns, seed)
        hashes, present = found
        return self._of_rows(hashes), None if present is None else self._of_rows(present)

    def partitions(self, count: int, keyless: int) -> npt.NDArray[np.int32]:
        """Return the partition of each event out of `count`; events without a key go to `keyless`."""
        if count == 1:
            return np.zeros(len(self), np.int32)
        return self._lanes(cols.PARTITION_SEED, count, keyless)

    def divide(self, lanes: npt.NDArray[np.int32]) -> list[tuple[int, Self]]:
        """Return each lane that is used and its events as a batch of their own, in their order, without a place."""
        counts = np.bincount(lanes)
        used = np.flatnonzero(counts).tolist()
        if len(used) == 1:
            return [(used[0], self)]
        # Taken once for all lanes, and sliced: each `take` costs more than its rows.
        ordered = self._selected().take(pa.array(np.argsort(lanes, kind="stable")))
        found, start = [], 0
        for lane in used:
            part = ordered.slice(start, int(counts[lane]))
            start += int(counts[lane])
            found.append((lane, type(self)(cols.assemble(dict(zip(part.schema.names, part.columns, strict=True))))))
        return found

    def slots(self) -> npt.NDArray[np.int32]:
        """Return the `key_shared` slot of each event; without a key it is the partition modulo 64."""
        return self._lanes(cols.SLOT_SEED, cols.SLOTS, (self.place.partition if self.place else 0) % cols.SLOTS)

    def _lanes(self, seed: int, modulus: int, keyless: int) -> npt.NDArray[np.int32]:
        hashes, present = self.key_hashes(seed)
        # What is a power of two is masked, which is much faster.
        power = modulus & (modulus - 1) == 0
        lanes = (hashes & np.uint64(modulus - 1) if power else hashes % np.uint64(modulus)).astype(np.int32)
        if present is not None:
            lanes[~present] = keyless
        return lanes

    # --- one by one --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[StoredEvent]:
        rows = range(self.columns.num_rows) if self.rows is None else self.rows.tolist()
        for row in rows:
            yield StoredEvent(self, row)

    @property
    def kind(self) -> Kind | None:
        """The kind of its events, if all have the same, and no headers but that of their version.

        What decodes one of them decodes all; None if they differ, and for so few that finding out is not worth it.
        """
        if self._kind is None:
            self._kind = self._common_kind() or False
        return self._kind or None

    def _common_kind(self) -> Kind | None:
        if self.columns.num_rows < KIND_EVENTS_MIN:
            return None
        stated: list[Any] = []
        for name in ("headers", "type", "content_type"):
            column = self.columns.column(name) if name in self.columns.schema.names else None
            if column is not None and name == "headers" and column.null_count < len(column):
                column = cols.only_header(column, VERSION_HEADER)
                if column is None:
                    return None
            if column is None or column.null_count == len(column):
                stated.append(None)
            elif not cols.all_alike(column):
                return None
            else:
                stated.append(column[0].as_py())
        version, type, content_type = stated
        return Kind(type or UNTYPED, content_type or (self.place.content_type if self.place else None), version)

    def expect(self, rows: npt.NDArray[np.int64]) -> None:
        """Know that single cells will be asked for of these rows only, as a rule: others need not be converted."""
        self._expected = rows

    def value(self, name: str, row: int) -> Any:
        """Return one cell as Python sees it; the column is converted once, when first asked for."""
        # Threads may ask at the same time: each goes on with what it found or made, whatever is there by now.
        values = self._lists.get(name, _UNKNOWN)
        if values is _UNKNOWN:
            values = self._lists[name] = self._listed(name)
        if values is None:
            return None
        try:
            return values[row]
        except KeyError:  # it was not expected
            self._expected = None
            values = self._lists[name] = self._all_listed(name)
            return None if values is None else values[row]

    def _listed(self, name: str) -> list[Any] | dict[int, Any] | None:
        expected = self._expected
        if expected is None or name == "id" or name not in self.columns.schema.names:
            return self._all_listed(name)
        some = _plain(self.columns.column(name)).take(pa.array(expected))
        return dict(zip(expected.tolist(), some.to_pylist(), strict=True))

    def _all_listed(self, name: str) -> list[Any] | None:
        stored = _plain(self.columns.column(name)).to_pylist() if name in self.columns.schema.names else None
        if name == "id" and self.runs:
            derived = [id_ for run in self.runs for id_ in run.derived_ids()]
            return derived if stored is None else [a or b for a, b in zip(stored, derived, strict=True)]
        return stored

    def identify(self) -> list[tuple[str, str]]:
        """Return source and id of each event, which are found out together, at the price of one."""
        ids = self._all_listed("id") or [None] * self.columns.num_rows
        if None in ids:  # without a run, as events are that nobody has appended, or that were taken out of their log
            ids = [id_ or str(StoredEvent(self, row).position) for row, id_ in enumerate(ids)]
        default = (self.place.source if self.place else None) or ""
        sources = self._all_listed("source") or [None] * self.columns.num_rows
        self._identities = [(source or default, id_) for source, id_ in zip(sources, ids, strict=True)]
        return self._identities

    def digests(self, scope: str) -> list[bytes]:
        """Return 128 bits of what each event is known by within a scope; see `StoredEvent.digest`."""
        names = self.columns.schema.names
        if self.runs and "id" not in names and "source" not in names:
            # As most are: without a text for each.
            found = []
            source = (self.place.source if self.place else None) or ""
            for run in self.runs:
                begin = f"{scope}\0{source}\0{run.id_prefix}".encode()
                found += [xxh3_128_digest(begin + b"%d" % number) for number in run.sequences]
        else:
            found = [xxh3_128_digest("\0".join((scope, *identity)).encode()) for identity in self.identify()]
        self._digests[scope] = found
        return found


def _plain(array: pa.Array) -> pa.Array:
    # Arrow builds a time zone object per timestamp (5 µs each); integers cost nothing.
    return array.cast(pa.int64()) if array.type == cols.TIMESTAMP else array


class StoredEvent:
    """One event of a batch, as a view: holding it holds its batch; `to_event()` makes a copy of its own."""

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: Batch, row: int) -> None:
        self._batch = batch
        self._row = row

    def __repr__(self) -> str:
        # Payloads never appear in logs, and a repr ends there.
        return f"<StoredEvent {self.position} {self.type!r} id={self.id!r}, {len(self.data):,} bytes>"

    @property
    def offset(self) -> int:
        """Its offset, for ever."""
        return self._batch.start + self._row

    @property
    def position(self) -> Position:
        """Topic, partition and offset."""
        place = self._batch.place
        return Position(place.topic if place else "", place.partition if place else 0, self.offset)

    @property
    def appended_at(self) -> datetime | None:
        """When it was appended to the log."""
        place = self._batch.place
        return _datetime(place.appended_at) if place else None

    @property
    def data(self) -> bytes:
        """The payload, as its codec wrote it."""
        data: bytes = self._batch.value("data", self._row)
        return data

    @property
    def id(self) -> str | None:
        """The publisher's id, or the one derived from producer and sequence."""
        identity: str | None = self._batch.value("id", self._row)
        return identity

    @property
    def type(self) -> str:
        """The event type's name."""
        return self._batch.value("type", self._row) or UNTYPED

    @property
    def source(self) -> str | None:
        """The publisher's source, or the topic's."""
        place = self._batch.place
        return self._batch.value("source", self._row) or (place.source if place else None)

    @property
    def content_type(self) -> str | None:
        """The publisher's content type, or the topic's."""
        place = self._batch.place
        return self._batch.value("content_type", self._row) or (place.content_type if place else None)

    @property
    def key(self) -> bytes | None:
        """The key, whose order is kept."""
        key: bytes | None = self._batch.value("key", self._row)
        return key

    @property
    def subject(self) -> str | None:
        """What the event is about, within its source."""
        subject: str | None = self._batch.value("subject", self._row)
        return subject

    @property
    def time(self) -> datetime | None:
        """When it happened, if the publisher said so."""
        return _datetime(self._batch.value("time", self._row))

    @property
    def expires_at(self) -> datetime | None:
        """When it stops being worth delivering."""
        return _datetime(self._batch.value("expires_at", self._row))

    @property
    def headers(self) -> dict[str, bytes]:
        """The headers, as a new dictionary."""
        stated = self._batch.value("headers", self._row)
        return dict(stated) if stated else {}

    @property
    def payload(self) -> tuple[bytes, str, dict[str, bytes] | None, str | None]:
        """Data, type, headers if there are any, and content type: what decoding needs, at the price of one of them."""
        value, row, place = self._batch.value, self._row, self._batch.place
        headers = value("headers", row)
        content_type = value("content_type", row) or (place.content_type if place else None)
        return value("data", row), value("type", row) or UNTYPED, dict(headers) if headers else None, content_type

    @property
    def identity(self) -> tuple[str, str]:
        """Source and id, as CloudEvents tells events apart; one without an id has its position."""
        batch = self._batch
        # Taken from where it is kept, for one call less with each event.
        identities = batch._identities or batch.identify()  # noqa: SLF001 - the view of a batch
        return identities[self._row]

    def digest(self, scope: str) -> bytes:
        """Return 128 bits of its identity within a scope, by which it can be told from any other.

        No secret is needed: whoever could make two identities alike could as well publish under the same one.
        """
        batch = self._batch
        digests = batch._digests.get(scope) or batch.digests(scope)  # noqa: SLF001 - the view of a batch
        return digests[self._row]

    @property
    def alike(self) -> tuple[Kind | None, bytes]:
        """The kind that it shares with all events of its batch, if it does, and the payload."""
        batch = self._batch
        # What was found out once is taken from where it is kept, for two calls less with each event.
        kind = batch._kind or batch.kind  # noqa: SLF001 - the view of a batch
        try:
            return kind, batch._lists["data"][self._row]  # type: ignore[index] # noqa: SLF001 - every event has data
        except KeyError:
            return kind, batch.value("data", self._row)

    def to_event(self) -> Event:
        """Return the envelope with everything resolved, independent of the batch."""
        return Event(
            data=self.data,
            type=self.type,
            key=self.key,
            id=self.id,
            source=self.source,
            subject=self.subject,
            time=self.time,
            expires_at=self.expires_at,
            content_type=self.content_type,
            headers=self.headers,
        )


def _datetime(microseconds: int | None) -> datetime | None:
    return None if microseconds is None else us_to_datetime(microseconds)


def _slice_runs(runs: tuple[Run, ...], skip: int, count: int) -> tuple[Run, ...]:
    """Return the runs of `count` events after the first `skip`; a cut run keeps its digest of the whole."""
    kept = []
    for run in runs:
        first, last = max(skip, 0), min(skip + count, run.length)
        if first < last:
            kept.append(run._replace(first_sequence=run.first_sequence + first, length=last - first))
        skip -= run.length
    return tuple(kept)
