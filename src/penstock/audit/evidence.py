"""Evidence: what the records of a shard say together.

A `Part` is what some consecutive records of a shard come to: how they follow each other, and which offsets they
settle. Parts are made anywhere, many shards at a time, and are small where records are: a chain without a hole is one
link, however long it is. `joined` puts the parts of one shard together.

* **Numbers that begin anew are another life.** A subscription that was deleted and created again under its name begins
  its chain at 1. The last life is the one that its cursor belongs to; what came before proves nothing of it.
* **Records beyond the cursor** that an audit has looked at were written since. They tell only what has become of events
  that were parked.
* **Settled twice** is an offset that two records of one generation settle, or one record in two ways. One that ever
  died does not count: a dead letter may be brought back at any time, and ends once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from penstock.audit import spans
from penstock.audit.records import CODES, OUTCOMES, Columns
from penstock.audit.spans import EMPTY, Spans
from penstock.engine.progress import LATENCIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.audit.spans import Numbers

PARKED: Final = CODES["parked"]
DEAD: Final = CODES["dead"]
FINAL: Final = tuple(code for code in range(len(OUTCOMES)) if code != PARKED)
ONCE: Final = tuple(code for code in FINAL if code != DEAD)
"""What may be said of an offset once in a generation, and no more."""

TWICE: Final = len(OUTCOMES)
"""What was settled twice; beside the outcomes, as if it were one."""
SINCE: Final = len(OUTCOMES) + 1
"""What was settled by records beyond the cursor."""
_CODES: Final = len(OUTCOMES) + 2
_KEYS_COUNTED: Final = 1 << 20

HOUR_US: Final = 3_600_000_000
RETRIED: Final = len(OUTCOMES)
"""The column of an hour that has how many had failed before; those of its histogram follow."""
HOUR_COLUMNS: Final = len(OUTCOMES) + 1 + LATENCIES
SLOWEST: Final = 3
"""So many of the slowest records of a shard are named."""

Link = tuple[int, int, int, int, int, int, int]
"""Records that follow each other without a hole: the first number and the last, their generation, where the first
begins, where the first ends, where the last ends, and whether the first only skips."""

Slow = tuple[int, int, int, int]
"""A slow record: its highest bucket, the first offset that it settles, where its last range ends, and when it was
written."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What some consecutive records of a shard say; as it travels."""

    shard: int
    position: int
    """Of its first record in the ledger."""
    first: int
    last: int
    """The numbers of its records rise, from the first to the last."""
    links: list[Link]
    sets: list[tuple[int, int, bytes, bytes]]
    """Generation, code, starts and stops."""
    hours: list[tuple[int, bytes]]
    slowest: list[Slow]


@dataclass(slots=True)
class Evidence:
    """What all records of the last life of a shard say."""

    links: list[Link] = field(default_factory=list)
    sets: dict[tuple[int, int], Spans] = field(default_factory=dict)
    """By generation and code."""
    hours: dict[int, Numbers] = field(default_factory=dict)
    slowest: list[Slow] = field(default_factory=list)

    def of(self, *codes: int) -> Iterator[tuple[int, Spans]]:
        """Yield what has one of these codes, with its generation."""
        return ((generation, each) for (generation, code), each in self.sets.items() if code in codes)


encode_part = msgspec.msgpack.Encoder().encode
decode_part = msgspec.msgpack.Decoder(Part).decode


# --- from records to parts --------------------------------------------------------------------


def parts_of(records: Columns, cursors: Numbers, *, since_us: int = 0) -> list[Part]:
    """Return what records come to, shard by shard.

    `cursors` has for each shard the number of the last record that its cursor knows. What was written before `since_us`
    is not counted by the hour.
    """
    if not len(records.shard):
        return []
    order = np.lexsort((records.position, records.shard))
    shard, number = records.shard[order], records.number[order]
    same_shard = np.append(False, shard[1:] == shard[:-1])
    part = np.cumsum(~same_shard | np.append(True, number[1:] <= number[:-1])) - 1
    part_of = np.empty_like(order)
    part_of[order] = part
    firsts = np.flatnonzero(np.diff(part, prepend=-1))
    lasts = np.append(firsts[1:], len(part)) - 1
    known = records.number <= cursors[records.shard]
    links = _links(records, order, part, known[order])
    sets = _sets(records, part_of, known)
    hours = _hours(records, part_of, known & (records.at >= since_us))
    slowest = _slowest(records, part_of, known & (records.at >= since_us))
    return [
        Part(
            shard=int(shard[first]),
            position=int(records.position[order[first]]),
            first=int(number[first]),
            last=int(number[last]),
            links=links.get(index, []),
            sets=sets.get(index, []),
            hours=hours.get(index, []),
            slowest=slowest.get(index, []),
        )
        for index, (first, last) in enumerate(zip(firsts.tolist(), lasts.tolist(), strict=True))
    ]


def _links(records: Columns, order: Numbers, part: Numbers, known: NDArray[np.bool_]) -> dict[int, list[Link]]:
    order, part = order[known], part[known]
    number, generation = records.number[order], records.generation[order]
    begin, end = records.begin[order], records.next_offset[order]
    follows = (
        (part[1:] == part[:-1])
        & (number[1:] == number[:-1] + 1)
        & (generation[1:] == generation[:-1])
        & (begin[1:] == end[:-1])
    )
    firsts = np.flatnonzero(~np.append(False, follows)) if len(order) else np.empty(0, np.int64)
    lasts = np.append(firsts[1:], len(order)) - 1 if len(order) else firsts
    skips = records.skips_only[order][firsts].astype(np.int64)
    fields = (number[firsts], number[lasts], generation[firsts], begin[firsts], end[firsts], end[lasts], skips)
    found: dict[int, list[Link]] = {}
    for index, *link in zip(part[firsts].tolist(), *(each.tolist() for each in fields), strict=True):
        found.setdefault(index, []).append(tuple(link))
    return found


def _sets(
    records: Columns, part_of: Numbers, known: NDArray[np.bool_]
) -> dict[int, list[tuple[int, int, bytes, bytes]]]:
    of_known = known[records.range_record]
    code = np.where(of_known, records.range_code, SINCE)
    wanted = of_known | (records.range_code != PARKED)
    generations, generation = np.unique(records.generation[records.range_record], return_inverse=True)
    # One number for part, generation and code, so that all of them are dealt with at once.
    key = (part_of[records.range_record] * len(generations) + generation) * _CODES
    keys, starts, stops = _melted(key[wanted] + code[wanted], records.starts[wanted], records.stops[wanted])
    once = np.isin(code, ONCE)
    twice = _melted(key[once] + TWICE, records.starts[once], records.stops[once], twice=True)
    keys, starts, stops = (np.concatenate(both) for both in zip((keys, starts, stops), twice, strict=True))
    found: dict[int, list[tuple[int, int, bytes, bytes]]] = {}
    edges = np.append(np.flatnonzero(np.diff(keys, prepend=-1)), len(keys)).tolist()
    for first, last in pairwise(edges):
        rest, code_here = divmod(int(keys[first]), _CODES)
        index, place = divmod(rest, len(generations))
        entry = (int(generations[place]), code_here, starts[first:last].tobytes(), stops[first:last].tobytes())
        found.setdefault(index, []).append(entry)
    return found


def _melted(keys: Numbers, starts: Numbers, stops: Numbers, *, twice: bool = False) -> tuple[Numbers, Numbers, Numbers]:
    if keys.max(initial=0) < _KEYS_COUNTED:  # to count them is quicker than to sort them
        is_there = np.bincount(keys, minlength=1) > 0
        known, group = np.flatnonzero(is_there), (np.cumsum(is_there) - 1)[keys]
    else:
        known, group = np.unique(keys, return_inverse=True)
    groups, starts, stops = spans.by_group(group, starts, stops, spans.covered_twice if twice else spans.melted)
    return known[groups], starts, stops


def _hours(records: Columns, part_of: Numbers, wanted: NDArray[np.bool_]) -> dict[int, list[tuple[int, bytes]]]:
    """Count by the hour: offsets by outcome, those that had failed before, and how long they took."""
    hour = records.at // HOUR_US
    base = int(hour.min())
    key = part_of * (int(hour.max()) - base + 1) + hour - base
    keys, place = np.unique(key[wanted], return_inverse=True)
    row = np.full(len(key), -1)
    row[wanted] = place
    table = np.zeros((len(keys), HOUR_COLUMNS), np.int64)
    for record, column, count in (
        (records.range_record, records.range_code, records.stops - records.starts),
        (np.arange(len(key)), np.full(len(key), RETRIED), records.retried),
        (records.latency_record, records.latency_bucket.clip(max=LATENCIES - 1) + RETRIED + 1, records.latency_count),
    ):
        counted = wanted[record]
        np.add.at(table, (row[record[counted]], column[counted]), count[counted])
    found: dict[int, list[tuple[int, bytes]]] = {}
    for index, one in enumerate(keys.tolist()):
        part, beyond = divmod(one, int(hour.max()) - base + 1)
        found.setdefault(part, []).append((base + beyond, table[index].tobytes()))
    return found


def _slowest(records: Columns, part_of: Numbers, wanted: NDArray[np.bool_]) -> dict[int, list[Slow]]:
    """Name the records whose slowest event took longest."""
    slow = np.flatnonzero(wanted & (records.buckets > 0))
    order = slow[np.lexsort((-records.buckets[slow], part_of[slow]))]
    rank = np.arange(len(order)) - np.searchsorted(part_of[order], part_of[order], side="left")
    chosen = np.sort(order[rank < SLOWEST])
    is_chosen = np.zeros(len(records.shard), np.bool_)
    is_chosen[chosen] = True
    # Ranges come record by record, and rise within each.
    acked = np.flatnonzero((records.range_code == CODES["acked"]) & is_chosen[records.range_record])
    record = records.range_record[acked]
    firsts = acked[np.flatnonzero(np.diff(record, prepend=-1))]
    lasts = acked[np.flatnonzero(np.diff(record, append=-1))]
    found: dict[int, list[Slow]] = {}
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        index = int(records.range_record[first])
        bucket, at = int(records.buckets[index]) - 1, int(records.at[index])
        entry = (bucket, int(records.starts[first]), int(records.stops[last]), at)
        found.setdefault(int(part_of[index]), []).append(entry)
    return found


# --- from parts to evidence -------------------------------------------------------------------


def last_life(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that belong to the shard as it is now, in their order."""
    life: list[Part] = []
    for part in sorted(parts, key=lambda each: -each.position):
        if life and part.last >= life[-1].first:
            break
        life.append(part)
    return life[::-1]


def joined(parts: Sequence[Part]) -> Evidence:
    """Return what parts of one life say together."""
    evidence = Evidence()
    gathered: dict[tuple[int, int], list[Spans]] = {}
    settled: dict[int, list[Spans]] = {}
    for part in parts:
        evidence.links += part.links
        evidence.slowest += part.slowest
        for hour, row in part.hours:
            before = evidence.hours.get(hour)
            counts = np.frombuffer(row, np.int64)
            evidence.hours[hour] = counts if before is None else before + counts
        once: dict[int, list[Spans]] = {}
        for generation, code, starts, stops in part.sets:
            each = Spans(np.frombuffer(starts, np.int64), np.frombuffer(stops, np.int64))
            gathered.setdefault((generation, code), []).append(each)
            if code in ONCE:
                once.setdefault(generation, []).append(each)
        for generation, sets in once.items():
            settled.setdefault(generation, []).append(spans.union(sets))
    for generation, sets in settled.items():
        twice = _twice(sets)
        if twice:
            gathered.setdefault((generation, TWICE), []).append(twice)
    evidence.sets = {key: spans.union(sets) for key, sets in gathered.items()}
    evidence.slowest = sorted(evidence.slowest, reverse=True)[:SLOWEST]
    return evidence


def _twice(sets: Sequence[Spans]) -> Spans:
    if len(sets) < 2:
        return EMPTY
    starts, stops = (np.concatenate([getattr(each, name) for each in sets]) for name in ("starts", "stops"))
    return spans.covered_twice(starts, stops)
