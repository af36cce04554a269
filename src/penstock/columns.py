"""The Arrow columns that events are made of: their schema, building them, their sizes and hashes.

Everything here works on whole columns. An event has ten columns, always in the order of `SCHEMA`; a
column that no event of a batch uses is left out, and a bit mask says which ones are there. The bytes
of a batch are one Arrow IPC record batch message without a schema: mask and message together are
complete, and a thousand small batches do not carry a thousand schemas. `penstock.parsing` reads them back.

**The digest** names the content of a run of events whatever batch they stand in: it covers only columns
with a value, so that merging publishers into one batch, which adds empty columns, does not change it.

**Lanes.** A key's partition is `xxh64(key, seed=0) mod partitions`, its slot `xxh64(key, seed=1) mod 64`.
Two seeds, because with one hash a consumer of few slots would see few partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import InvalidBatch, InvalidEvent, TooLarge, did_you_mean
from penstock.hashing import SHORT_MAX, xxh64_alike, xxh64_short

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")

SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("type", pa.string()),
        ("subject", pa.string()),
        ("time", TIMESTAMP),
        ("expires_at", TIMESTAMP),
        ("key", pa.binary()),
        ("content_type", pa.string()),
        ("headers", pa.map_(pa.string(), pa.binary())),
        ("data", pa.binary()),
    ]
)
"""The columns of an event in a log. The order and the bit of each in the mask are fixed for ever."""

NAMES: Final = tuple(SCHEMA.names)
BODY_BYTES_MAX: Final = 64 << 20
"""No batch has more bytes than this, on disk or on the wire."""

SLOTS: Final = 64
PARTITION_SEED: Final = 0
SLOT_SEED: Final = 1
EVEN_MAX: Final = 1 << 16
"""Of so many keys it is remembered where they would be if they had the same length: a quarter of a megabyte each."""
WORD: Final = 8
"""So many bytes of keys of one length are compared at once …"""
COMPARED_MAX: Final = 16
"""… and so few keys one by one."""
ONE_BY_ONE_MAX: Final = 1_000
"""So many keys are hashed one by one: below it, a call of the library for each costs less than numpy's for all."""

_BIT: Final = {name: 1 << position for position, name in enumerate(NAMES)}
_NO_TIME: Final = np.iinfo(np.int64).min
_TIME_MIN: Final = -62_135_596_800_000_000  # what `datetime` can say: 0001-01-01 …
_TIME_MAX: Final = 253_402_300_799_999_999  # … to the last microsecond of 9999
_schemas: dict[int, pa.Schema] = {}
_REPEATED_ROWS: Final = 16_384
_REPEATED_KEPT: Final = 64
_repetitions: dict[tuple[pa.DataType, str | None], pa.Array] = {}


# --- building --------------------------------------------------------------------------------


def column(name: str, values: Any, count: int) -> pa.Array:
    """Return `values` as the column `name`: a list, an Arrow array, or one `str` or `bytes` for all."""
    wanted = SCHEMA.field(name).type
    try:
        if isinstance(values, pa.ChunkedArray):
            values = values.combine_chunks()
        if isinstance(values, pa.Array):
            array = values if values.type == wanted else _cast(values, wanted)
        elif isinstance(values, str | bytes):
            array = pa.repeat(pa.scalar(values, wanted), count)
        else:
            array = pa.array(values, wanted)
    except (pa.ArrowException, UnicodeEncodeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidEvent(f"column {name!r} cannot be made of these values: {error}") from None
    if not isinstance(array, pa.Array):  # Arrow answers in chunks beyond 2 GiB
        raise TooLarge(
            f"column {name!r}", sum(chunk.nbytes for chunk in array.chunks), BODY_BYTES_MAX, "split the batch"
        )
    if len(array) != count:
        raise InvalidEvent(f"column {name!r} has {len(array):,} values for {count:,} events")
    return array


def _cast(array: pa.Array, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # Arrow would also turn numbers into texts, which is no column of events but somebody's mistake.
    if _kind(array.type) not in {_kind(wanted), "null"}:
        raise TypeError(f"they are {array.type}, not {wanted}")
    return array.cast(wanted)


def _kind(arrow_type: pa.DataType) -> str:
    name = str(arrow_type)
    if pa.types.is_timestamp(arrow_type):
        return "time" if arrow_type.tz else "a time without a zone"
    if pa.types.is_map(arrow_type):
        return "map"
    return "text" if "binary" in name or "string" in name else name


def repeated(kind: pa.DataType, value: Any, count: int) -> pa.Array:
    """Return a column of one value; the usual ones are made once, and sliced."""
    if count > _REPEATED_ROWS or not (value is None or isinstance(value, str)):
        return pa.repeat(pa.scalar(value, kind), count)
    found = _repetitions.get((kind, value))
    if found is None:
        if len(_repetitions) >= _REPEATED_KEPT:
            _repetitions.clear()
        found = _repetitions[kind, value] = pa.repeat(pa.scalar(value, kind), _REPEATED_ROWS)
    return found.slice(0, count)


def assemble(columns: dict[str, pa.Array]) -> pa.RecordBatch:
    """Put columns into canonical order and leave out those without a value."""
    names = [
        name for name in NAMES if name in columns and (name == "data" or columns[name].null_count < len(columns[name]))
    ]
    batch = pa.RecordBatch.from_arrays([columns[name] for name in names], schema=schema_of(mask_of(names)))
    # What its buffers hold in all is quickly known, and only too much if they are not shared with others.
    if batch.get_total_buffer_size() > BODY_BYTES_MAX and batch.nbytes > BODY_BYTES_MAX:
        raise TooLarge("a batch", batch.nbytes, BODY_BYTES_MAX, "split it")
    return batch


def concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the events of several batches as one; a column that some of them lack has no values there."""
    if len(batches) == 1:
        return batches[0]
    present = {name for batch in batches for name in batch.schema.names}
    names = [name for name in NAMES if name in present]
    arrays = [
        pa.concat_arrays(
            [
                batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, SCHEMA.field(name).type)
                for batch in batches
            ]
        )
        for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema_of(mask_of(names)))


def adopt(batch: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """Take events from any Arrow data whose columns carry our names, casting where nothing is lost."""
    unknown = [name for name in batch.column_names if name not in _BIT]
    if unknown:
        raise InvalidEvent(f"there is no event column {unknown[0]!r}{did_you_mean(unknown[0], NAMES)}")
    if len(set(batch.column_names)) < batch.num_columns:
        raise InvalidEvent("an event column is there twice")
    if "data" not in batch.column_names:
        raise InvalidEvent("the column 'data' is missing")
    columns = assemble({name: column(name, batch.column(name), batch.num_rows) for name in batch.column_names})
    try:
        columns.validate(full=True)
        check_rules(columns)
    except (pa.ArrowException, InvalidBatch) as error:
        raise InvalidEvent(f"these columns are not events: {error}") from None
    check_text(columns)
    return columns


def check_text(batch: pa.RecordBatch) -> None:
    """Refuse empty texts and control characters, which CloudEvents does not allow in attributes."""
    for name, array in _texts(batch).items():
        raw = bytes_of(array)
        # In UTF-8 a byte below 0x80 is a character of its own, and U+0080 to U+009F are 0xC2 and one more.
        control = (raw < 0x20) | (raw == 0x7F)
        control[1:] |= (raw[:-1] == 0xC2) & (raw[1:] < 0xA0)
        empty = (_lengths_of(array) == 0) & array.is_valid().to_numpy(zero_copy_only=False)
        if control.any() or empty.any():
            raise InvalidEvent(f"column {name!r}: a text is empty or has a control character in it")


def _texts(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the text columns, and the names of headers."""
    texts = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.type == pa.string():
            texts[name] = array
        elif name == "headers":
            entries = offsets_of(array)
            texts[name] = array.keys[int(entries[0]) : int(entries[-1])]
    return texts


def bytes_of(array: pa.Array) -> npt.NDArray[np.uint8]:
    """Return all bytes of a string or binary column, one event after the other, as a view."""
    offsets, data = offsets_of(array), array.buffers()[2]
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]


def check_rules(batch: pa.RecordBatch) -> None:
    """Check what Arrow does not know: an event has data, a header has a value, a time can be said."""
    names = batch.schema.names
    if batch.column("data").null_count:
        raise InvalidBatch("an event has no data (null); an empty payload is b''")
    if "headers" in names and batch.column("headers").items.null_count:
        raise InvalidBatch("a header has no value (null)")
    for name in ("time", "expires_at"):
        if name in names:
            values = times(batch.column(name), 0)
            if values.min(initial=0) < _TIME_MIN or values.max(initial=0) > _TIME_MAX:
                raise InvalidBatch(f"a value of {name!r} is outside of the years 1 to 9999")


def mask_of(names: list[str] | tuple[str, ...]) -> int:
    """Return the bit mask of these columns."""
    return sum(_BIT[name] for name in names)


def schema_of(mask: int) -> pa.Schema:
    """Return the schema of a batch with these columns."""
    schema = _schemas.get(mask)
    if schema is None:
        schema = _schemas[mask] = pa.schema([SCHEMA.field(name) for name in NAMES if mask & _BIT[name]])
    return schema


def serialize(batch: pa.RecordBatch) -> pa.Buffer:
    """Return the batch as one Arrow IPC message; `mask_of` its names must be kept beside it."""
    return batch.serialize()


# --- sizes and hashes ------------------------------------------------------------------------


def offsets_of(array: pa.Array) -> npt.NDArray[np.int32]:
    """Return the `len + 1` Arrow offsets of a string, binary or map column, as a view."""
    if len(array) == 0:
        return np.zeros(1, np.int32)
    # Counted, since a valid buffer may end with a few bytes more than its last number.
    return np.frombuffer(array.buffers()[1], np.int32, count=len(array) + 1, offset=4 * array.offset)


def _lengths_of(array: pa.Array) -> npt.NDArray[np.int32]:
    offsets = offsets_of(array)
    return offsets[1:] - offsets[:-1]  # `np.diff` says the same five times slower for a few events


def sizes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return each event's size in bytes: the text and bytes of all its columns, 8 for a time."""
    total = np.zeros(batch.num_rows, np.int64)
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.type == TIMESTAMP:
            total += 8
        elif name == "headers":
            total += header_sizes(array)
        else:
            total += _lengths_of(array)
    return total


def total_size(batch: pa.RecordBatch) -> int:
    """Return the sum of `sizes`, without looking at every event."""
    total = 0
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.type == TIMESTAMP:
            total += 8 * len(array)
        elif name == "headers":
            total += int(header_sizes(array).sum())
        else:
            offsets = offsets_of(array)
            total += int(offsets[-1]) - int(offsets[0])
    return total


def header_counts(array: pa.MapArray) -> npt.NDArray[np.int64]:
    """Return how many headers each event has."""
    return _lengths_of(array).astype(np.int64)


def header_sizes(array: pa.MapArray) -> npt.NDArray[np.int64]:
    """Return the bytes of each event's header names and values."""
    entries = offsets_of(array)
    # `keys` and `items` ignore the slice of their parent, so the parent's offsets index them as they are.
    running = np.zeros(len(array.keys) + 1, np.int64)
    np.cumsum(_lengths_of(array.keys) + _lengths_of(array.items), out=running[1:])
    return running[entries[1:]] - running[entries[:-1]]


def times(array: pa.Array, absent: int) -> npt.NDArray[np.int64]:
    """Return a timestamp column as microseconds, `absent` where there is none."""
    if len(array) == 0:
        return np.zeros(0, np.int64)
    values = np.frombuffer(array.buffers()[1], np.int64, count=len(array), offset=8 * array.offset)
    if array.null_count == 0:
        return values
    present = array.is_valid().to_numpy(zero_copy_only=False)
    return np.where(present, values, absent)


def partition_of_key(key: bytes, partitions: int) -> int:
    """Return the partition of one key."""
    return xxhash.xxh64_intdigest(key, PARTITION_SEED) % partitions


def slot_of_key(key: bytes | None, partition: int) -> int:
    """Return the slot of one key, or of events of a partition that have none."""
    return partition % SLOTS if key is None else xxhash.xxh64_intdigest(key, SLOT_SEED) % SLOTS


def key_hashes(batch: pa.RecordBatch, seed: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
    """Return `xxh64(key, seed)` of each event, and which events have a key (None: all have one)."""
    return hashes_of([keys_of(batch)], seed)


def keys_of(batch: pa.RecordBatch) -> pa.Array:
    """Return the key of each event, null for those without one."""
    return batch.column("key") if "key" in batch.schema.names else pa.nulls(batch.num_rows, pa.binary())


def hashes_of(columns: Sequence[pa.Array], seed: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_] | None]:
    """Return `xxh64(key, seed)` of the keys of all columns, and which of them are there (None: all are)."""
    # All together: most of what each of the many short steps of hashing costs is the step.
    keys = columns[0] if len(columns) == 1 else pa.concat_arrays(columns)
    present = keys.is_valid().to_numpy(zero_copy_only=False) if keys.null_count else None
    return _hashed(keys if present is None else keys.fill_null(b""), seed), present


def _hashed(keys: pa.Array, seed: int) -> npt.NDArray[np.uint64]:
    if len(keys) > ONE_BY_ONE_MAX:
        if 0 < (length := _length_of_all(keys)) <= SHORT_MAX:
            return xxh64_alike(bytes_of(keys), len(keys), length, seed)
        offsets = offsets_of(keys)
        lengths = offsets[1:] - offsets[:-1]
        if int(lengths.max()) <= SHORT_MAX:
            starts = offsets[:-1].astype(np.int64) - int(offsets[0])
            return xxh64_short(bytes_of(keys), starts, lengths.astype(np.int64), seed)
    return np.fromiter(map(xxhash.xxh64_intdigest, keys.to_pylist(), repeat(seed)), np.uint64, len(keys))


def _length_of_all(keys: pa.Array) -> int:
    """Return the length of each of these, if they have the same; or else, 0."""
    offsets = offsets_of(keys)
    first, count = int(offsets[0]), len(keys)
    length, rest = divmod(int(offsets[-1]) - first, count)
    if rest or not length:
        return 0
    if count > EVEN_MAX:
        return length if bool((offsets[1:] - offsets[:-1] == length).all()) else 0
    # By bytes, and not by numpy, which would let go of the interpreter, and wait to have it again.
    return length if offsets.tobytes() == _even_offsets(first, length, count) else 0


@lru_cache(maxsize=16)
def _even_offsets(start: int, length: int, count: int) -> bytes:
    return np.arange(start, start + length * count + 1, length, dtype=np.int32).tobytes()


def only_header(headers: pa.Array, name: str) -> pa.Array | None:
    """Return the values of the header of this name, if every event has it and no other one."""
    offsets = headers.offsets.to_numpy()
    if headers.null_count or (np.diff(offsets) != 1).any():
        return None
    start, count = int(offsets[0]), len(headers)
    names = headers.keys.slice(start, count)
    return headers.items.slice(start, count) if names[0].as_py() == name and all_alike(names) else None


def all_alike(values: pa.Array) -> bool:
    """Say whether all of these texts, or bytes, are the same; there is at least one."""
    first = values[0].as_py()
    if values.null_count or first is None:
        return bool(values.null_count == len(values))
    value, data = first.encode() if isinstance(first, str) else first, bytes_of(values).tobytes()
    return not data if not value else _length_of_all(values) == len(value) and data == value * len(values)


def places_of(keys: pa.Array, key: bytes) -> npt.NDArray[np.int64]:
    """Return at which places a key is."""
    if keys.null_count:
        found = pc.indices_nonzero(pc.equal(keys, pa.scalar(key, keys.type))).to_numpy()
        return np.asarray(found, np.int64)
    # Their lengths first, and then their last bytes, by which keys differ as a rule: a fraction of the time.
    length, of_all = len(key), _length_of_all(keys) if len(keys) else 0
    if of_all and of_all != length:
        return np.zeros(0, np.int64)
    offsets, data = offsets_of(keys), bytes_of(keys)
    if of_all >= WORD:
        words = np.ndarray(len(keys), "<u8", data, length - WORD, (length,)).astype(np.uint64)
        places = np.flatnonzero(words == np.uint64(int.from_bytes(key[-WORD:], "little")))
    else:
        places = np.flatnonzero(offsets[1:] - offsets[:-1] == length)
    if not len(places):
        return places
    ends = offsets[1:] - offsets[0]
    for back in range(1, min(length, WORD) + 1):
        if len(places) <= COMPARED_MAX:
            break
        places = places[data[ends[places] - back] == key[-back]]
    same = [data[end - length : end].tobytes() == key for end in ends[places].tolist()]
    return places[np.array(same, np.bool_)]


def digest(batch: pa.RecordBatch) -> int:
    """Return the 64-bit digest of the content of these events, whatever other columns a batch has.

    For every column with a value, in the order of the schema: its bit, then per event a little-endian
    int32 length (-1 for no value), then all bytes; a time is an int64 (its minimum for no value); headers
    are their counts, then names and values as two such columns.
    """
    state = xxhash.xxh64(seed=0)
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.null_count == len(array):
            continue
        state.update(_BIT[name].to_bytes(2, "little"))
        if array.type == TIMESTAMP:
            state.update(times(array, _NO_TIME).tobytes())
        elif name == "headers":
            entries = offsets_of(array)
            state.update(lengths_or_absent(array).tobytes())
            inner = slice(int(entries[0]), int(entries[-1]))
            _update_binary(state, array.keys[inner])
            _update_binary(state, array.items[inner])
        else:
            _update_binary(state, array)
    return state.intdigest()


def _update_binary(state: Any, array: pa.Array) -> None:
    state.update(lengths_or_absent(array).tobytes())
    state.update(bytes_of(array).data)


def lengths_or_absent(array: pa.Array) -> npt.NDArray[np.int32]:
    """Return the length of each value of a string, binary or map column; -1 where there is none."""
    lengths = _lengths_of(array)
    if array.null_count:
        lengths[~array.is_valid().to_numpy(zero_copy_only=False)] = -1
    return lengths
