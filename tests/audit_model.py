"""For the tests of audits: histories of a shard as stores write them, faults planted in them, and a naive auditor.

A `History` keeps, offset by offset, which record has settled it since it was last to be delivered: so it knows what an
audit must find when something is planted. The naive auditor explodes everything into offsets, and goes through records
one by one. It shares no code with `penstock.audit`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.audit import spans
from penstock.audit.evidence import decode_part, encode_part, parts_of
from penstock.audit.facts import ShardFacts
from penstock.audit.judging import Judged, judge
from penstock.audit.records import columns_of
from penstock.offsets import Range, RangeSet
from penstock.runtime.ledger import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

WINDOW = 8
LOG, NAME = "log", "billing"
KEY = (LOG, NAME, 0)
FINAL = {"acked", "dead", "expired", "discarded", "skipped", "gap"}

encode = msgspec.msgpack.Encoder().encode


def some(offsets: Iterable[int]) -> bytes:
    return RangeSet(Range(offset, offset + 1) for offset in offsets).to_bytes()


def offsets_of(body: bytes) -> set[int]:
    return set(RangeSet.from_bytes(body).to_offsets().tolist())


@dataclass
class History:
    """A shard, as its consumers and seeks leave it."""

    start: int = 0
    end: int = 0
    log_id: str = LOG
    next_offset: int = 0
    generation: int = 0
    number: int = 0
    records: list[Record] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)
    """Settled or parked ahead of the cursor."""
    settled_by: dict[int, set[int]] = field(default_factory=dict)
    """By offset: the numbers of the records that have settled it, since it was last to be delivered."""

    def __post_init__(self) -> None:
        self.next_offset = self.start

    def unsettled(self) -> list[int]:
        stop = min(self.end, self.next_offset + WINDOW)
        return [offset for offset in range(self.next_offset, stop) if offset not in self.ahead]

    def step(self, outcomes: dict[str, Sequence[int]]) -> None:
        """Settle, park, and let what waits aside end: one record."""
        outcomes = {name: offsets for name, offsets in outcomes.items() if offsets}
        if not outcomes:
            return
        begin = self.next_offset
        self.number += 1
        for outcome, offsets in outcomes.items():
            for offset in offsets:
                if offset >= self.next_offset:
                    self.ahead.add(offset)
                self.waiting.discard(offset)
                self.dead.discard(offset)
                if outcome == "parked":
                    self.waiting.add(offset)
                else:
                    self.settled_by.setdefault(offset, set()).add(self.number)
                if outcome == "dead":
                    self.dead.add(offset)
        while self.next_offset in self.ahead:
            self.ahead.discard(self.next_offset)
            self.next_offset += 1
        self._record(begin, {name: some(offsets) for name, offsets in outcomes.items()})

    def seek(self, to: int) -> None:
        """Move the cursor, as `runtime.subscriptions.seek` does."""
        begin = self.next_offset
        skipped = [offset for offset in range(begin, to) if offset not in self.ahead]
        skipped += [offset for offset in self.waiting if offset < to and offset not in skipped]
        self.generation += 1
        self.next_offset, self.ahead = to, set()
        self.waiting = set()
        self.start = min(self.start, to)
        for offset in [known for known in self.settled_by if known >= to]:
            del self.settled_by[offset]
        if skipped:
            self.number += 1
            for offset in skipped:
                self.settled_by.setdefault(offset, set()).add(self.number)
            self._record(begin, {"skipped": some(skipped)})

    def _record(self, begin: int, outcomes: dict[str, bytes]) -> None:
        self.records.append(
            Record(
                log_id=self.log_id,
                subscription=NAME,
                slot=0,
                partition=0,
                generation=self.generation,
                number=self.number,
                begin=begin,
                next_offset=self.next_offset,
                outcomes=outcomes,
                latencies=[0, 0, 1],
                retried=0,
                at=self.number * 1_000_000_000,
            )
        )

    def facts(self, **changes: Any) -> ShardFacts:
        facts = {
            "topic": "orders",
            "log_id": self.log_id,
            "subscription": NAME,
            "partition": 0,
            "next_offset": self.next_offset,
            "generation": self.generation,
            "number": self.number,
            "first": 0,
            "end": self.end,
            "waiting": spans.of_offsets(self.waiting),
            "window": WINDOW,
        }
        return ShardFacts(**{**facts, **changes})


def without(record: Record, offset: int) -> Record:
    """Return a record that does not say how an offset ended; one that says nothing is still a record."""
    outcomes = {
        name: some(offsets_of(body) - {offset}) if name in FINAL else body for name, body in record.outcomes.items()
    }
    return msgspec.structs.replace(record, outcomes=outcomes)


def judged(facts: ShardFacts, records: Sequence[Record], *, cuts: Iterable[int] = ()) -> Judged:
    """Judge by the real code; the ledger is divided at `cuts`, and its parts travel."""
    edges = sorted({0, len(records), *(cut % (len(records) + 1) for cut in cuts)})
    parts = []
    for first, last in pairwise(edges):
        columns = columns_of(
            [encode(record) for record in records[first:last]], np.arange(first, last, dtype=np.int64), {KEY: 0}
        )
        parts += parts_of(columns, np.array([facts.number]))
    return judge(facts, [decode_part(encode_part(part)) for part in parts])


def exploded(found: spans.Spans) -> set[int]:
    return {offset for start, stop in found.first(10_000) for offset in range(start, stop)}


# --- the naive auditor ----------------------------------------------------------------------------


def naive(facts: ShardFacts, records: Sequence[Record]) -> dict[str, set[int]]:
    """Say of each offset what it is, one record and one offset at a time."""
    life: list[Record] = []
    for record in records:
        if life and record.number <= life[-1].number:
            life = []
        life.append(record)
    known = [record for record in life if record.number <= facts.number]
    since = {x for record in life if record.number > facts.number for x in _ends(record)}
    doubtful, start, broken = _doubts(facts, known)
    settled, parked, twice = _replayed(facts, known)
    waiting = exploded(facts.waiting)
    found: dict[str, set[int]] = {name: set() for name in ("proven", "parked", "pending", "unproven", "lost")}
    for x in range(start, facts.end):
        if x in settled:
            kind = "proven"
        elif x in waiting or (x < facts.next_offset and x in parked and x in since):
            kind = "parked"
        elif x >= facts.next_offset:
            kind = "pending"
        else:
            kind = "unproven" if x in doubtful or (x in parked and broken) else "lost"
        found[kind].add(x)
    return {**found, "twice": {x for x in twice if start <= x < facts.end}}


def _replayed(facts: ShardFacts, known: Sequence[Record]) -> tuple[set[int], set[int], set[int]]:
    """Go through records one by one; return what is settled at the end, what was parked, and what was settled twice."""
    settled: set[int] = set()
    parked: set[int] = set()
    twice: set[int] = set()
    died: set[int] = set()
    once: set[tuple[int, int]] = set()
    before: Record | None = None
    for record in known:
        if before is not None and record.number == before.number + 1 and record.generation != before.generation:
            to = _target(before, record)
            settled, parked = ({x for x in each if to is None or x < to} for each in (settled, parked))
        parked |= offsets_of(record.outcomes.get("parked", b""))
        died |= offsets_of(record.outcomes.get("dead", b""))
        settled |= _ends(record)
        for name in FINAL - {"dead"}:
            said = {(record.generation, x) for x in offsets_of(record.outcomes.get(name, b""))}
            twice |= {x for _, x in said & once}
            once |= said
        before = record
    if (
        before is not None
        and before.number == facts.number
        and before.generation != facts.generation
        and facts.next_offset <= before.next_offset
    ):
        settled, parked = ({x for x in each if x < facts.next_offset} for each in (settled, parked))
    return settled, parked, twice - died


def _ends(record: Record) -> set[int]:
    return {x for name, body in record.outcomes.items() if name != "parked" for x in offsets_of(body)}


def _skips(record: Record) -> bool:
    return set(record.outcomes) <= {"skipped"}


def _target(before: Record, after: Record) -> int | None:
    """Return where a seek between two records led; None if that cannot have been."""
    if after.begin > before.next_offset:
        return None
    to = after.next_offset if _skips(after) else after.begin
    return min(to, after.begin) if after.begin < before.next_offset else to


def _doubts(facts: ShardFacts, known: Sequence[Record]) -> tuple[set[int], int, bool]:
    """Return what a missing record may have settled, where the subscription began, and whether any is missing."""
    everything = range(facts.end + 1)
    if not known:
        start = min(facts.first, facts.next_offset) if facts.number else facts.next_offset
        return set(everything) if facts.number else set(), start, bool(facts.number)
    doubtful: set[int] = set()
    first = known[0]
    start = first.begin
    if first.number > 1:
        start = min(start, facts.first)
        doubtful |= set(range(first.begin + WINDOW))
    if _skips(first) and first.generation:
        start = min(start, first.next_offset)
    cursor = msgspec.structs.replace(
        known[-1],
        number=facts.number + 1,
        generation=facts.generation,
        begin=facts.next_offset,
        outcomes={"acked": b""},
    )
    broken = first.number > 1
    for before, after in zip(known, [*known[1:], cursor], strict=True):
        low, high = sorted((before.next_offset, after.begin))
        if after.number != before.number + 1:
            if after.generation != before.generation:
                low = 0
                start = min(start, facts.first, after.begin, after.begin if after is cursor else after.next_offset)
            if _skips(after):
                high = max(high, after.next_offset)
            broken = True
            doubtful |= set(range(low, high + WINDOW))
        elif after.generation == before.generation or after.begin > before.next_offset:
            if low != high:
                broken = True
                doubtful |= set(range(low, high + WINDOW))
        else:
            to = _target(before, after)
            assert to is not None
            start = min(start, to)
    return doubtful, start, broken
