"""Judging: from what a store says of a shard, and what its records say, to a verdict on every offset.

The cursor of a shard has passed everything from where the subscription began. Whatever of that no record settles is a
hole, and the question is only what it means.

* **What a seek does.** A seek to an offset takes back whatever was settled from there on: it is to be delivered again.
  So what a record of an earlier generation says counts below the lowest place that was sought since.
* **What a missing record may have said.** It may have settled anything from where the chain broke off up to where it
  goes on, and as far ahead as a cursor can remember: `window` offsets. A hole in there is `unproven`, any other is
  `lost`. If a seek may be among what is missing, that is everything before it, too.
* **What was parked** is no hole while it waits. If it neither waits nor has an end, it is lost, unless any record is
  missing: an event that was parked may end long after the cursor has passed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.audit import spans
from penstock.audit.evidence import DEAD, FINAL, PARKED, SINCE, TWICE, Evidence, joined, last_life
from penstock.audit.records import CODES, OUTCOMES
from penstock.audit.spans import EMPTY, Spans
from penstock.offsets import OFFSET_END

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.audit.evidence import Link, Part
    from penstock.audit.facts import ShardFacts

BREAKS_NAMED: Final = 20
OUTCOMES_FIRST: Final = ("acked", "expired", "discarded", "gap", "skipped", "other", "dead")
"""How an offset is counted that ended in several ways: a dead letter that was brought back ended as it did then."""


@dataclass(slots=True)
class Chain:
    """How the records of a shard follow each other."""

    start: int
    """Where the subscription began, as far as anybody knows."""
    doubtful: list[tuple[int, int]] = field(default_factory=list)
    """What a missing record may have settled."""
    targets: list[tuple[int, int]] = field(default_factory=list)
    """Seeks: which generation began, and below which offset it left everything as it was."""
    breaks: list[str] = field(default_factory=list)
    broken: int = 0

    def breaks_off(self, start: int, stop: int, why: str) -> None:
        """Note that something is missing, and what it may have settled."""
        self.doubtful.append((start, stop))
        self.broken += 1
        if len(self.breaks) < BREAKS_NAMED:
            self.breaks.append(why)

    def may_have_begun(self, shard: ShardFacts, *places: int) -> None:
        """Note that a seek is missing: it may have led to the beginning of the log."""
        self.start = min(self.start, shard.first, *places)


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on every offset of a shard, from `start` to the end of its log, in sets that do not overlap."""

    start: int
    outcomes: dict[str, Spans]
    """What is proven, by how it ended."""
    parked: Spans
    pending: Spans
    unproven: Spans
    lost: Spans
    twice: Spans
    """Settled more than once in a generation; these offsets are among the others as well."""
    breaks: list[str]
    evidence: Evidence


def _no_gaps(_: Spans) -> Spans:
    return EMPTY


def judge(shard: ShardFacts, parts: Iterable[Part], gaps: Callable[[Spans], Spans] = _no_gaps) -> Judged:
    """Judge a shard. `gaps` says which of the offsets that seem to be lost are no events at all."""
    evidence = joined(last_life(parts))
    chain = chain_of(shard, evidence.links)
    start = min(max(chain.start, shard.since), shard.end)
    passed = spans.span(start, shard.next_offset)
    ends = {code: _holding(evidence, chain, code, start) for code in FINAL}
    settled = spans.union(list(ends.values()))
    holes = spans.difference(spans.difference(passed, settled), shard.waiting)
    put_aside = spans.intersection(_holding(evidence, chain, PARKED, start), holes)
    ended_since = spans.intersection(put_aside, spans.union([each for _, each in evidence.of(SINCE)]))
    put_aside = spans.difference(put_aside, ended_since)
    holes = spans.difference(holes, spans.union([ended_since, put_aside]))
    doubtful = spans.melted(*np.array(chain.doubtful, np.int64).reshape(-1, 2).T)
    unproven = spans.intersection(holes, doubtful)
    lost = spans.difference(holes, doubtful)
    if chain.broken or not shard.steady:
        unproven = spans.union([unproven, put_aside])
    else:
        lost = spans.union([lost, put_aside])
    no_events = gaps(lost) if lost else EMPTY
    lost = spans.difference(lost, no_events)
    ends[CODES["gap"]] = spans.union([ends[CODES["gap"]], no_events])
    settled = spans.union([settled, no_events])
    ahead = spans.span(max(start, shard.next_offset), shard.end)
    waiting = spans.difference(shard.waiting.within(start, shard.end), settled)
    return Judged(
        start=start,
        outcomes=_apart({name: ends[CODES[name]].within(start, shard.end) for name in OUTCOMES_FIRST}),
        parked=spans.union([waiting, ended_since]),
        pending=spans.difference(spans.difference(ahead, settled), waiting),
        unproven=unproven,
        lost=lost,
        twice=_settled_twice(evidence).within(start, shard.end),
        breaks=chain.breaks,
        evidence=evidence,
    )


def _holding(evidence: Evidence, chain: Chain, code: int, start: int) -> Spans:
    """Return what was settled so, and has not been taken back by a seek."""
    kept = []
    for generation, each in evidence.of(code):
        limit = min((to for later, to in chain.targets if later > generation), default=OFFSET_END)
        kept.append(each.within(start, limit))
    return spans.union(kept)


def _settled_twice(evidence: Evidence) -> Spans:
    """Return what was settled more than once in a generation; a dead letter may be brought back and end again."""
    twice, died = (spans.union([each for _, each in evidence.of(code)]) for code in (TWICE, DEAD))
    return spans.difference(twice, died)


def _apart(sets: dict[str, Spans]) -> dict[str, Spans]:
    """Return sets without what an earlier one has."""
    found: dict[str, Spans] = {}
    for name, each in sets.items():
        found[name] = spans.difference(each, spans.union(list(found.values())))
    return found


# --- the chain ----------------------------------------------------------------------------------


def chain_of(shard: ShardFacts, links: list[Link]) -> Chain:
    """Follow the records of a shard from the first to its cursor."""
    window = shard.window
    if not links:
        chain = Chain(start=min(shard.first, shard.next_offset) if shard.number else shard.next_offset)
        if shard.number:
            chain.breaks_off(0, OFFSET_END, f"records 1 to {shard.number:,} are missing")
        return chain
    first, _, generation, begin, first_end, _, skips = links[0]
    chain = Chain(start=begin)
    if first > 1:
        chain.may_have_begun(shard, begin)
        chain.breaks_off(0, _beyond(begin, window), f"records 1 to {first - 1:,} are missing")
    if skips and generation and first_end < begin:
        chain.targets.append((generation, first_end))
    for before, after in pairwise(links):
        _follow(chain, shard, before, after)
    _arrive(chain, shard, links[-1])
    chain.start = min([chain.start, *(to for _, to in chain.targets)])
    return chain


def _follow(chain: Chain, shard: ShardFacts, before: Link, after: Link) -> None:
    """Look how one link follows another."""
    window = shard.window
    _, last, old, _, _, was_at, _ = before
    first, _, new, begin, first_end, _, skips = after
    low, high = min(was_at, begin), max(was_at, begin)
    if (first, new, begin) == (last + 1, old, was_at):
        return
    if first != last + 1:
        why = f"records {last + 1:,} to {first - 1:,} are missing, between offsets {was_at:,} and {begin:,}"
        chain.breaks_off(low if new == old else 0, _beyond(max(high, first_end if skips else 0), window), why)
        if new != old:
            chain.may_have_begun(shard, begin, first_end)
    elif new == old or begin > was_at:
        # Without a record of its own a seek leads backwards: a way forward passes over something.
        why = f"record {first:,} begins at offset {begin:,}, and record {last:,} ended at {was_at:,}"
        chain.breaks_off(low, _beyond(high, window), why)
    else:
        # One that skips says where it led to. Before it, others without a record may have led back to its beginning.
        to = first_end if skips else begin
        chain.targets.append((new, min(to, begin) if begin < was_at else to))


def _arrive(chain: Chain, shard: ShardFacts, link: Link) -> None:
    """Look whether the last link leads to the cursor."""
    _, last, generation, _, _, was_at, _ = link
    low, high = min(was_at, shard.next_offset), max(was_at, shard.next_offset)
    if last != shard.number:
        why = f"records {last + 1:,} to {shard.number:,} are missing, from offset {was_at:,} on"
        chain.breaks_off(low if generation == shard.generation else 0, _beyond(high, shard.window), why)
        if generation != shard.generation:
            chain.may_have_begun(shard, shard.next_offset)
    elif generation != shard.generation and shard.next_offset <= was_at:
        chain.targets.append((shard.generation, shard.next_offset))
    elif shard.next_offset != was_at:
        why = f"the cursor is at offset {shard.next_offset:,}, and its last record, {last:,}, ended at {was_at:,}"
        chain.breaks_off(low, _beyond(high, shard.window), why)


def _beyond(offset: int, window: int) -> int:
    return min(offset + window, OFFSET_END)


assert set(OUTCOMES_FIRST) | {"parked"} == set(OUTCOMES), "every outcome is counted somewhere"
