"""Settlement records as columns: decoded, and their sets of offsets with them, many thousand at a time.

A record that cannot be read is left out and counted. Its place in the chain is then empty, so that it makes something
`unproven`, and nothing `lost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from penstock.audit import spans
from penstock.collecting import uncollected
from penstock.engine.states import Outcome
from penstock.errors import IntegrityError
from penstock.runtime.ledger import decode_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.audit.spans import Numbers

ShardKey = tuple[str, str, int]
"""Log, subscription and partition: one cursor, one chain of records."""

OUTCOMES: Final = (*(str(outcome) for outcome in Outcome), "other")
"""What a record may say of an offset, in a fixed order. `other` is what a later version may say: settled, somehow."""
CODES: Final = {name: code for code, name in enumerate(OUTCOMES)}
OTHER: Final = CODES["other"]

AT_ONCE: Final = 5_000
"""So many records are decoded at once: they fit into a processor's cache."""

_ARRAY_32: Final = b"\xdd"
"""How MessagePack begins an array whose length has 32 bits."""

_Row = tuple[str, str, int, int, int, int, int, int, dict[str, bytes], list[int], int, int]
"""The fields of a `Record`, in their order."""

_decode_rows = msgspec.msgpack.Decoder(list[_Row]).decode


@dataclass(frozen=True, slots=True)
class Columns:
    """Records of known shards, in the order of the ledger."""

    shard: Numbers
    position: Numbers
    generation: Numbers
    number: Numbers
    begin: Numbers
    next_offset: Numbers
    retried: Numbers
    at: Numbers
    skips_only: NDArray[np.bool_]
    """Whether a record says nothing but what was skipped: only a seek does that."""
    range_record: Numbers
    """For each range of offsets in any record: which record it is of …"""
    range_code: Numbers
    """… and what it says, as a place in `OUTCOMES`."""
    starts: Numbers
    stops: Numbers
    latency_record: Numbers
    """For each bucket of a histogram: which record, which bucket, how many."""
    latency_bucket: Numbers
    latency_count: Numbers
    buckets: Numbers
    """How many buckets the histogram of each record has: the last one is not empty."""
    unreadable: int = 0


def columns_of(data: Sequence[bytes], positions: Numbers, known: Mapping[ShardKey, int]) -> Columns:
    """Decode records, in the order of their positions; those of shards that are not known are left out."""
    with uncollected():
        few = [
            _few(data[first : first + AT_ONCE], positions[first : first + AT_ONCE], known)
            for first in range(0, max(len(data), 1), AT_ONCE)
        ]
    return _together(few)


def _together(found: Sequence[Columns]) -> Columns:
    """Return columns one after the other."""
    before = np.cumsum([0, *(len(each.shard) for each in found[:-1])])
    columns = {
        name: np.concatenate([getattr(each, name) for each in found])
        for name in Columns.__slots__
        if name != "unreadable"
    }
    for name in ("range_record", "latency_record"):
        columns[name] += np.repeat(before, [len(getattr(each, name)) for each in found])
    return Columns(**columns, unreadable=sum(each.unreadable for each in found))


def _few(data: Sequence[bytes], positions: Numbers, known: Mapping[ShardKey, int]) -> Columns:
    try:
        rows = _decode_rows(b"".join([_ARRAY_32, len(data).to_bytes(4, "big"), *data]))
        return _columns(rows, positions, known, 0)
    except (msgspec.DecodeError, IntegrityError, OverflowError, UnicodeDecodeError):
        pass
    readable = [(row, at) for row, at in zip(map(_row, data), positions.tolist(), strict=True) if row is not None]
    kept = np.array([at for _, at in readable], np.int64)
    return _columns([row for row, _ in readable], kept, known, len(data) - len(readable))


def _row(data: bytes) -> _Row | None:
    """Return one record if it can be read; it may have fields that only a later version knows."""
    try:
        row: _Row = msgspec.structs.astuple(decode_record(data))
        spans.decoded(list(row[8].values()))
        np.array([*row[2:8], *row[9], *row[10:]], np.int64)
    except (msgspec.DecodeError, IntegrityError, OverflowError, UnicodeDecodeError):
        return None
    return row


def _columns(rows: Sequence[_Row], positions: Numbers, known: Mapping[ShardKey, int], unreadable: int) -> Columns:
    fields = list(zip(*rows, strict=True)) or [()] * 12
    shards = list(map(known.get, zip(fields[0], fields[1], fields[3], strict=True)))
    if None in shards:
        kept = [index for index, shard in enumerate(shards) if shard is not None]
        return _columns([rows[index] for index in kept], positions[kept], known, unreadable)
    sets: Sequence[dict[str, bytes]] = fields[8]
    histograms: Sequence[list[int]] = fields[9]
    # Set by set, as they come: which record, which outcome.
    set_record = np.repeat(np.arange(len(rows)), np.fromiter(map(len, sets), np.int64, len(rows)))
    names = list(chain.from_iterable(sets))
    codes = np.array([OTHER if code is None else code for code in map(CODES.get, names)], np.int64)
    of_set, starts, stops = spans.decoded(list(chain.from_iterable(map(dict.values, sets))))
    others = np.bincount(set_record, weights=codes != CODES["skipped"], minlength=len(rows))
    buckets = np.fromiter(map(len, histograms), np.int64, len(rows))
    counts = np.fromiter(chain.from_iterable(histograms), np.int64, int(buckets.sum()))
    bucket = np.arange(len(counts)) - np.repeat(np.cumsum(buckets) - buckets, buckets)
    some = counts > 0
    numbers = {name: np.array(fields[at], np.int64) for name, at in _NUMBERS.items()}
    return Columns(
        shard=np.array(shards, np.int64),
        position=positions,
        skips_only=others == 0,
        range_record=set_record[of_set],
        range_code=codes[of_set],
        starts=starts,
        stops=stops,
        latency_record=np.repeat(np.arange(len(rows)), buckets)[some],
        latency_bucket=bucket[some],
        latency_count=counts[some],
        buckets=buckets,
        unreadable=unreadable,
        **numbers,
    )


_NUMBERS: Final = {"generation": 4, "number": 5, "begin": 6, "next_offset": 7, "retried": 10, "at": 11}
