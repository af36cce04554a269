"""Results: what an audit says, as plain values that become JSON as they are.

Counts are exact. Lists have an end: of what is lost, unproven or settled twice the first ranges are named, and
`ranges_left_out` says how many are not. Latencies come from histograms whose bounds are powers of two microseconds, so
that each figure is an upper bound: at least so many events took no longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec
import numpy as np

from penstock.audit import spans
from penstock.audit.evidence import HOUR_US, RETRIED
from penstock.audit.records import OUTCOMES
from penstock.clock import us_to_datetime
from penstock.engine.progress import LATENCIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.audit.facts import ShardFacts, SubscriptionFacts
    from penstock.audit.judging import Judged
    from penstock.audit.spans import Numbers, Spans

Verdict = Literal["proven", "unproven", "lost", "external"]

RANGES_NAMED: Final = 1_000
"""So many ranges of each kind are named, in each partition."""
BINS: Final = 120
"""A partition's offsets are shown in so many steps at most."""
HOURS_MAX: Final = 24 * 31
SLOWEST_NAMED: Final = 5
SHARES: Final = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many events are in which state. Those proven, parked, pending, unproven and lost are all there are."""

    proven: int = 0
    """A record says how they ended: in one of the seven ways that follow."""
    acked: int = 0
    dead: int = 0
    expired: int = 0
    discarded: int = 0
    skipped: int = 0
    gap: int = 0
    other: int = 0
    """Settled in a way that only a later version knows."""
    parked: int = 0
    pending: int = 0
    unproven: int = 0
    lost: int = 0
    duplicates: int = 0
    """Settled more than once without a seek or a replay between; counted among the others as well."""
    retried: int = 0
    """Settled after they had failed before, as records count it."""

    @property
    def events(self) -> int:
        """How many there are."""
        return self.proven + self.parked + self.pending + self.unproven + self.lost

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long events took from their append to their ack; in microseconds, each an upper bound."""

    events: int
    p50_us: int | None
    p95_us: int | None
    p99_us: int | None
    max_us: int | None
    histogram: list[int]
    """How many took less than 1, 2, 4, … microseconds, and not less than the one before."""

    @classmethod
    def of(cls, histogram: Numbers) -> Latency:
        """Sum up a histogram."""
        within = np.cumsum(histogram)
        events = int(within[-1]) if len(within) else 0
        bounds = {
            f"{name}_us": 1 << int(np.searchsorted(within, max(share * events, 1))) if events else None
            for name, share in SHARES.items()
        }
        return cls(events=events, histogram=np.trim_zeros(histogram, "b").tolist(), **bounds)


class Hour(msgspec.Struct, frozen=True, kw_only=True):
    """What was settled within an hour, by the time of its record; what was settled again counts again."""

    begins: str
    settled: dict[str, int]
    retried: int
    latency: Latency


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """Events of which at least one took long; which one, its record does not say."""

    partition: int
    start: int
    stop: int
    within_us: int
    at: str


class DeadNamed(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter, without its event and without what its error says."""

    partition: int
    offset: int
    attempts: int
    error_type: str


class PartitionAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One partition of a subscription."""

    partition: int
    verdict: Verdict
    first: int
    """Where the subscription began, or what was asked about; or the log, if nobody knows."""
    next_offset: int
    end: int
    counts: Counts
    lost: list[tuple[int, int]] = []
    """Ranges, the end excluded."""
    unproven: list[tuple[int, int]] = []
    duplicates: list[tuple[int, int]] = []
    ranges_left_out: int = 0
    breaks: list[str] = []
    """Where its chain of records is broken, in words."""
    timeline: dict[str, list[int]] = {}
    """From `first` to `end` in steps of one size: how many offsets of each are settled, parked and so on."""


class SubscriptionAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One subscription."""

    topic: str
    subscription: str
    mode: str
    verdict: Verdict
    counts: Counts
    latency: Latency
    hours: list[Hour]
    partitions: list[PartitionAudit]
    rows_waiting: int
    rows_dead: int
    slowest: list[Slow]
    dead: list[DeadNamed]


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit has found."""

    url: str
    at: str
    since: str | None
    verdict: Verdict
    sentence: str
    """The verdict in words."""
    counts: Counts
    records: int
    unreadable: int
    """Records that are no records; they count as missing."""
    seconds: float
    subscriptions: list[SubscriptionAudit]

    @property
    def lost(self) -> int:
        """How many events are lost."""
        return self.counts.lost

    @property
    def idle(self) -> bool:
        """That the next one has time."""
        return True

    def html(self) -> str:
        """Return a page that needs nothing else: no script, no font, no network."""
        from penstock.audit.report.page import page

        return page(self)


class ShardResult(msgspec.Struct, frozen=True, array_like=True):
    """What is found out about one shard, as it travels."""

    shard: int
    partition: PartitionAudit
    hours: list[tuple[int, list[int]]]
    slowest: list[tuple[int, int, int, int]]


encode_result = msgspec.msgpack.Encoder().encode
decode_result = msgspec.msgpack.Decoder(ShardResult).decode


# --- one shard ----------------------------------------------------------------------------------


def result_of(index: int, shard: ShardFacts, judged: Judged) -> ShardResult:
    """Sum up what was judged of a shard."""
    hours = sorted(judged.evidence.hours.items())[-HOURS_MAX:]
    named = {"lost": judged.lost, "unproven": judged.unproven, "duplicates": judged.twice}
    counts = Counts(
        proven=sum(each.count for each in judged.outcomes.values()),
        **{name: each.count for name, each in judged.outcomes.items()},
        parked=judged.parked.count,
        pending=judged.pending.count,
        unproven=judged.unproven.count,
        lost=judged.lost.count,
        duplicates=judged.twice.count,
        retried=sum(int(row[RETRIED]) for _, row in hours),
    )
    partition = PartitionAudit(
        partition=shard.partition,
        verdict=verdict_of(counts),
        first=judged.start,
        next_offset=shard.next_offset,
        end=shard.end,
        counts=counts,
        ranges_left_out=sum(max(len(each.starts) - RANGES_NAMED, 0) for each in named.values()),
        breaks=judged.breaks,
        timeline=_timeline(judged, shard.end),
        **{name: each.first(RANGES_NAMED) for name, each in named.items()},
    )
    return ShardResult(index, partition, [(hour, row.tolist()) for hour, row in hours], judged.evidence.slowest)


def _timeline(judged: Judged, end: int) -> dict[str, list[int]]:
    if judged.start >= end:
        return {}
    bins = min(BINS, end - judged.start)
    # By whole numbers: an offset is in one step, however large offsets are.
    edges = np.array([judged.start + (end - judged.start) * step // bins for step in range(bins + 1)], np.int64)
    kinds: dict[str, Spans] = {
        "settled": spans.union(list(judged.outcomes.values())),
        "parked": judged.parked,
        "pending": judged.pending,
        "unproven": judged.unproven,
        "lost": judged.lost,
    }
    return {name: spans.counts_between(each, edges).tolist() for name, each in kinds.items() if each}


def external_result(shard: ShardFacts) -> PartitionAudit:
    """Return what can be said of a shard whose progress is kept elsewhere: how much it has left."""
    start = min(max(shard.first, shard.since), shard.end)
    return PartitionAudit(
        partition=shard.partition,
        verdict="external",
        first=start,
        next_offset=shard.next_offset,
        end=shard.end,
        counts=Counts(pending=max(shard.end - max(shard.next_offset, start), 0)),
    )


def verdict_of(counts: Counts) -> Verdict:
    """Return the gravest that can be said."""
    return "lost" if counts.lost else "unproven" if counts.unproven else "proven"


# --- a subscription, and all of them ------------------------------------------------------------


def subscription_result(facts: SubscriptionFacts, results: Sequence[ShardResult]) -> SubscriptionAudit:
    """Put the shards of a subscription together."""
    partitions = [result.partition for result in results]
    if facts.subscription.external:
        partitions = [external_result(shard) for shard in facts.shards]
    counts = total(partition.counts for partition in partitions)
    by_hour: dict[int, Numbers] = {}
    for result in results:
        for hour, row in result.hours:
            by_hour[hour] = by_hour.get(hour, np.zeros(len(row), np.int64)) + np.array(row, np.int64)
    histogram = sum((row[RETRIED + 1 :] for row in by_hour.values()), np.zeros(LATENCIES, np.int64))
    slowest = sorted(
        (-bucket, start, stop, at, result.partition.partition)
        for result in results
        for bucket, start, stop, at in result.slowest
    )
    return SubscriptionAudit(
        topic=facts.topic,
        subscription=facts.subscription.name,
        mode=facts.subscription.mode,
        verdict="external" if facts.subscription.external else verdict_of(counts),
        counts=counts,
        latency=Latency.of(histogram),
        hours=[_hour(hour, row) for hour, row in sorted(by_hour.items())[-HOURS_MAX:]],
        partitions=sorted(partitions, key=lambda partition: partition.partition),
        rows_waiting=facts.rows["waiting"],
        rows_dead=facts.rows["dead"],
        slowest=[
            Slow(partition=partition, start=start, stop=stop, within_us=1 << -bucket, at=shown(at))
            for bucket, start, stop, at, partition in slowest[:SLOWEST_NAMED]
        ],
        dead=[
            DeadNamed(
                partition=row.shard.partition, offset=row.offset, attempts=row.attempts, error_type=row.error_type
            )
            for row in facts.dead
        ],
    )


def _hour(hour: int, row: Numbers) -> Hour:
    return Hour(
        begins=shown(hour * HOUR_US),
        settled={name: count for name, count in zip(OUTCOMES, row[:RETRIED].tolist(), strict=True) if count},
        retried=int(row[RETRIED]),
        latency=Latency.of(row[RETRIED + 1 :]),
    )


def total(counts: Iterable[Counts]) -> Counts:
    """Return the sum of counts."""
    return sum(counts, Counts())


def shown(time_us: int) -> str:
    """Return a time as people and programs read it, to the second."""
    return us_to_datetime(time_us).strftime("%Y-%m-%dT%H:%M:%SZ")


def sentence_of(subscriptions: Sequence[SubscriptionAudit], counts: Counts) -> str:
    """Return the verdict in words."""
    asked = [each for each in subscriptions if each.verdict != "external"]
    where = f"{len(asked):,} subscription{'' if len(asked) == 1 else 's'}"
    waits = [f"{count:,} {what}" for count, what in ((counts.pending, "pending"), (counts.parked, "parked")) if count]
    rest = f"; {' and '.join(waits)}" if waits else ""
    if counts.lost:
        worst = [f"{each.topic}/{each.subscription}" for each in asked if each.counts.lost]
        more = f" and {len(worst) - 3} more" if len(worst) > 3 else ""
        how_many = f"{counts.lost:,} events are" if counts.lost > 1 else "1 event is"
        return f"{how_many} lost, in {', '.join(worst[:3])}{more}."
    if counts.unproven:
        return (
            f"Nothing is known to be lost. What became of {counts.unproven:,} events nobody can prove, because records "
            f"are missing; {counts.proven:,} are proven{rest}."
        )
    if not asked:
        return "There is nothing to prove: no subscription has a ledger."
    return f"Nothing is lost: what became of {counts.proven:,} events in {where} is proven{rest}."
