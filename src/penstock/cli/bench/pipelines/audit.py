"""How long an audit takes, from the first look at the ledger to the last verdict.

The ledger is a real one: records as consumers write them, in the log of a file store, read by `format("penstock")` and
decoded. What is made up are the cursors: a log of a hundred million events, only to have a cursor behind them, would
take longer to write than everything else here, and an audit does not read it.

* `audit.fragmented`: in each shard two owners settle every other offset, and one of them is as far behind the other as
  a cursor allows. So nearly no two ranges join until the end.
* `audit.ranges`: few records of large ranges.
"""

from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from penstock import columns as cols
from penstock.audit.facts import Facts, ShardFacts, SubscriptionFacts
from penstock.batch import Batch
from penstock.cli.bench.harness import Figure, sample
from penstock.cli.output import say
from penstock.errors import PenstockError
from penstock.offsets import Bitmap, Range, RangeSet
from penstock.producers import Run, lasting_producer
from penstock.rows import Retention, Subscription
from penstock.runtime.ledger import EVENT_TYPE, SETTINGS, TOPIC, Record
from penstock.settings import Settings
from penstock.spark.connection import connect
from penstock.spark.pipelines.audit import examine
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from penstock.cli.bench.pipelines.sizes import Sizes

LOG: Final = "0123456789abcdef0123456789abcdef"
NAME: Final = "billing"
BEGAN_US: Final = 1_767_225_600_000_000
AT_ONCE: Final = 20_000
"""So many records are appended together."""
BLOCK: Final = Bitmap.LIMIT // 4
"""So many records of each owner; together they span what a cursor can remember."""

_encode = msgspec.msgpack.Encoder().encode


def figures(spark: SparkSession, directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure both kinds of ledger."""
    shards = min(sizes.audit_shards, sizes.audit_records)
    each = 2 * (sizes.audit_records // shards // 2)
    fragmented = _make(directory / "fragmented", shards, each, _fragmented(each))
    yield _measured(spark, "audit.fragmented", fragmented, 2 * shards * each, rounds, goal="value <= 60 s")
    each, size = sizes.audit_ranges // shards, sizes.audit_events // sizes.audit_ranges
    ranges = _make(directory / "ranges", shards, each, _ranges(each, size))
    yield _measured(spark, "audit.ranges", ranges, shards * each * size, rounds, goal="value <= 15 s")


# --- ledgers --------------------------------------------------------------------------------------

Step = tuple[int, int, bytes]
"""Where a record begins and ends, and what it settles."""


def _fragmented(count: int) -> Iterator[Step]:
    """Yield an even number of records: the even offsets of a block, two at a time, and then the odd ones."""
    base, left = 0, count
    while left:
        half = min(BLOCK, left // 2)
        at = base
        for step in range(half):
            begin, at = at, base + 1
            yield begin, at, _two(base + 4 * step)
        for step in range(half):
            begin, at = at, base + 4 * step + (5 if step < half - 1 else 4)
            yield begin, at, _two(base + 4 * step + 1)
        left -= 2 * half
        base += 4 * half


def _two(start: int) -> bytes:
    return RangeSet([Range(start, start + 1), Range(start + 2, start + 3)]).to_bytes()


def _ranges(count: int, size: int) -> Iterator[Step]:
    for step in range(count):
        span = Range(step * size, (step + 1) * size)
        yield span.start, span.stop, RangeSet([span]).to_bytes()


def _make(directory: Path, shards: int, each: int, steps: Iterator[Step]) -> tuple[str, Facts]:
    """Write a ledger in which all shards have the same chain, and return what a look at its store would say."""
    say(f"a ledger of {shards * each:,} records is written …")
    directory.parent.mkdir(parents=True, exist_ok=True)
    url = f"file:{directory}"
    settings = msgspec.structs.replace(SETTINGS, retention=Retention(), durability="os")
    producer, sequence, end = lasting_producer(), 0, 0
    with closing(open_store(url, settings=Settings())) as store:
        partition = store.log.create_topic(TOPIC, settings).partitions[0]
        rows: list[bytes] = []
        for number, (begin, stop, settled) in enumerate(steps, 1):
            end = stop
            rows += [_record(shard, number, begin, stop, settled) for shard in range(shards)]
            if len(rows) >= AT_ONCE or number == each:
                batch = Batch.build(rows, type=EVENT_TYPE)
                store.log.append(partition, batch, [Run(producer, 0, sequence, len(rows), cols.digest(batch.columns))])
                sequence, rows = sequence + len(rows), []
        bounds = store.log.bounds(partition)
    known = [
        ShardFacts(
            topic="orders",
            log_id=LOG,
            subscription=NAME,
            partition=shard,
            next_offset=end,
            generation=0,
            number=each,
            first=0,
            end=end,
        )
        for shard in range(shards)
    ]
    subscription = Subscription(log_id=LOG, name=NAME, mode="key_shared")
    return url, Facts([SubscriptionFacts("orders", subscription, known, {}, [])], [], bounds)


def _record(shard: int, number: int, begin: int, end: int, settled: bytes) -> bytes:
    return _encode(
        Record(
            log_id=LOG,
            subscription=NAME,
            slot=0,
            partition=shard,
            generation=0,
            number=number,
            begin=begin,
            next_offset=end,
            outcomes={"acked": settled},
            latencies=_HISTOGRAM,
            retried=0,
            at=BEGAN_US + number * 10_000,
        )
    )


_HISTOGRAM: Final = np.bincount([13], weights=[2]).astype(int).tolist()


# --- measuring ------------------------------------------------------------------------------------


def _measured(
    spark: SparkSession, name: str, ledger: tuple[str, Facts], events: int, rounds: int, *, goal: str
) -> Figure:
    url, facts = ledger

    def work() -> None:
        with connect(url, Settings()) as (store, connection):
            results, _, _ = examine(spark, store, connection, facts, 0)
        proven = sum(result.partition.counts.proven for result in results)
        lost = sum(result.partition.counts.lost + result.partition.counts.unproven for result in results)
        if proven != events or lost:
            raise PenstockError(
                f"{name}: {proven:,} of {events:,} events are proven, and all are: the time tells nothing"
            )

    [seconds] = sample([work], rounds)
    return Figure.of(name, median(seconds), "s", goal=goal)
