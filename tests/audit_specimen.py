"""An audit with everything in it that a report may show, made of the very parts that audits are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.audit import spans
from penstock.audit.evidence import parts_of
from penstock.audit.facts import ShardFacts, SubscriptionFacts
from penstock.audit.judging import judge
from penstock.audit.records import columns_of
from penstock.audit.results import (
    Audit,
    DeadNamed,
    ShardResult,
    result_of,
    sentence_of,
    shown,
    subscription_result,
    total,
    verdict_of,
)
from penstock.offsets import Range, RangeSet
from penstock.rows import Subscription
from penstock.runtime.ledger import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

BEGAN_US = 1_767_225_600_000_000
HOUR_US = 3_600_000_000
SIZE = 400
"""So many offsets has a record."""

encode = msgspec.msgpack.Encoder().encode


def records(log_id: str, name: str, partition: int, count: int, holes: Iterable[int]) -> list[Record]:
    """Return a chain of so many records; `holes` are offsets that none of them settles."""
    found = []
    missing = set(holes)
    for number in range(count):
        begin, end = number * SIZE, (number + 1) * SIZE
        settled = RangeSet([Range(begin, end)])
        outcomes: dict[str, RangeSet] = {}
        for hole in missing & set(range(begin, end)):
            settled.discard(Range(hole, hole + 1))
        for outcome, each in (("dead", Range(begin + 7, begin + 8)), ("expired", Range(begin + 30, begin + 50))):
            if number % 5 == 3:
                settled.discard(each)
                outcomes[outcome] = RangeSet([each])
        histogram = [0] * 9 + [5, 40, 160, 120, 40, 10, 4 + number % 3, 1] + [0] * (number % 7) + [1]
        outcomes["acked"] = settled
        found.append(
            Record(
                log_id=log_id,
                subscription=name,
                slot=0,
                partition=partition,
                generation=0,
                number=number + 1,
                begin=begin,
                next_offset=end,
                outcomes={outcome: offsets.to_bytes() for outcome, offsets in outcomes.items()},
                latencies=histogram,
                retried=number % 4,
                at=BEGAN_US + number * HOUR_US // 2,
            )
        )
    return found


def shard_result(
    index: int,
    log_id: str,
    name: str,
    partition: int,
    *,
    count: int,
    pending: int = 0,
    holes: Iterable[int] = (),
    missing: Iterable[int] = (),
    waiting: Iterable[int] = (),
) -> tuple[ShardFacts, ShardResult]:
    """Judge a chain; records at `missing` places are not in the ledger."""
    facts = ShardFacts(
        topic="orders",
        log_id=log_id,
        subscription=name,
        partition=partition,
        next_offset=count * SIZE,
        generation=0,
        number=count,
        first=0,
        end=count * SIZE + pending,
        waiting=spans.of_offsets(waiting),
    )
    chain = records(log_id, name, partition, count, {*holes, *waiting})
    kept = [encode(record) for place, record in enumerate(chain) if place not in set(missing)]
    columns = columns_of(kept, np.arange(len(kept), dtype=np.int64), {facts.key: index})
    found = judge(facts, parts_of(columns, np.full(index + 1, count)))
    return facts, result_of(index, facts, found)


def specimen(*, topic: str = "orders", names: tuple[str, ...] = ("billing", "search", "mail", "lake")) -> Audit:
    """Return an audit in which one subscription has lost events, one is unproven, one is well, and one is external."""
    broken, doubtful, well, lake = names
    given = [
        (broken, [shard_result(0, "a", broken, 0, count=60, holes=[9_000, 9_001, 9_002, 20_111], pending=600)]),
        (doubtful, [shard_result(0, "a", doubtful, 0, count=40, missing=[11, 12], waiting=[300, 15_000])]),
        (well, [shard_result(0, "a", well, part, count=50 - part, pending=2_000 * part) for part in range(3)]),
    ]
    found = []
    for name, shards in given:
        facts = SubscriptionFacts(
            topic,
            Subscription(log_id="a", name=name, mode="key_shared"),
            [each for each, _ in shards],
            {"waiting": 2, "dead": 8, "done": 0},
            [],
        )
        result = subscription_result(facts, [each for _, each in shards])
        letters = [
            DeadNamed(partition=0, offset=offset, attempts=4, error_type="KeyError") for offset in (1_207, 3_207)
        ]
        found.append(msgspec.structs.replace(result, dead=letters))
    outside = ShardFacts(
        topic=topic,
        log_id="a",
        subscription=lake,
        partition=0,
        next_offset=18_000,
        generation=0,
        number=0,
        first=0,
        end=24_600,
        external=True,
    )
    external = SubscriptionFacts(
        topic,
        Subscription(log_id="a", name=lake, mode="external", external=True),
        [outside],
        {"waiting": 0, "dead": 0, "done": 0},
        [],
    )
    found.append(subscription_result(external, []))
    counts = total(each.counts for each in found if each.verdict != "external")
    return Audit(
        url="file:/srv/events",
        at=shown(BEGAN_US + 31 * HOUR_US),
        since=None,
        verdict=verdict_of(counts),
        sentence=sentence_of(found, counts),
        counts=counts,
        records=246,
        unreadable=0,
        seconds=3.2,
        subscriptions=found,
    )
