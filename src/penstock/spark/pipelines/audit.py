"""The pipeline `audit`: what the ledger proves of every event of every subscription.

The driver looks at the store (`penstock.audit.facts`, where the order of looking is explained). Tasks read the ledger,
each a part of it, and reduce records to what they say together; what is left is brought together by shard, and judged
in tasks as well. What returns to the driver are verdicts, and is small however long the ledger is.

It changes nothing, so that it may be stopped at any moment, and any number may run at once.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.audit.evidence import decode_part, encode_part, parts_of
from penstock.audit.facts import cursors_of, declared_gaps, look
from penstock.audit.judging import judge
from penstock.audit.records import columns_of
from penstock.audit.results import (
    Audit,
    ShardResult,
    decode_result,
    encode_result,
    result_of,
    sentence_of,
    shown,
    subscription_result,
    total,
    verdict_of,
)
from penstock.bus.topic import Topic
from penstock.clock import SystemClock, datetime_to_us
from penstock.errors import UsageError
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.settings import redact_url, resolve
from penstock.spark.connection import absolute, connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from typing import Any

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from penstock.audit.evidence import Part
    from penstock.audit.facts import Facts, ShardFacts
    from penstock.bus.bus import Bus
    from penstock.ports import Store
    from penstock.settings import Settings
    from penstock.spark.connection import Connection

RECORDS_AT_ONCE: Final = 200_000
"""So many records are reduced together: more need more memory, fewer cost more time, the more so with many shards."""
BYTES_AT_ONCE: Final = 32 << 20
"""Or so many bytes of them: a record may name half a million ranges, and each takes eight times what it has there."""

_PARTS: Final = "shard int, part binary"
_RESULTS: Final = "shard int, result binary, records long, unreadable long"


def audit(
    spark: SparkSession,
    bus: Bus | str,
    topics: str | Topic[Any] | Sequence[str | Topic[Any]] = (),
    *,
    subscription: str | None = None,
    since: datetime | None = None,
    settings: Settings | None = None,
) -> Audit:
    """Find out what became of every event, for all subscriptions of these topics, or of all topics.

    `bus` is the bus or the URL of its store. With `subscription`, only those of this name. With `since`, only events
    that were appended then or later.
    """
    if since is not None and since.utcoffset() is None:
        raise UsageError(f"since={since!r} has no time zone: use an aware datetime")
    given = [topics] if isinstance(topics, str | Topic) else topics
    names = [each if isinstance(each, str) else each.name for each in given]
    url = absolute(bus if isinstance(bus, str) else bus.url)
    clock = SystemClock()
    begun, at = clock.monotonic(), clock.time_us()
    since_us = None if since is None else datetime_to_us(since)
    with connect(url, settings or resolve().settings) as (store, connection):
        facts = look(store, names, subscription=subscription, since_us=since_us)
        results, records, unreadable = examine(spark, store, connection, facts, since_us or 0)
    left = iter(results)
    found = [
        subscription_result(each, [next(left) for shard in each.shards if not shard.external])
        for each in facts.subscriptions
    ]
    counts = total(each.counts for each in found if each.verdict != "external")
    return Audit(
        url=redact_url(url),
        at=shown(at),
        since=None if since_us is None else shown(since_us),
        verdict=verdict_of(counts),
        sentence=sentence_of(found, counts),
        counts=counts,
        records=records,
        unreadable=unreadable,
        seconds=round(clock.monotonic() - begun, 3),
        subscriptions=found,
    )


def examine(
    spark: SparkSession, store: Store, connection: Connection, facts: Facts, since_us: int
) -> tuple[list[ShardResult], int, int]:
    """Read the ledger and judge every shard, by what was looked at before.

    Returns what is found out about each shard, how many records there were, and how many could not be read.
    """
    shards = facts.shards
    known = {shard.key: index for index, shard in enumerate(shards)}
    positions = np.arange(len(facts.unmoved), dtype=np.int64) + facts.ledger.stop
    columns = columns_of(facts.unmoved, positions, known)
    unmoved: dict[int, list[Part]] = {}
    for part in parts_of(columns, cursors_of(shards), since_us=since_us):
        unmoved.setdefault(part.shard, []).append(part)
    records, unreadable = len(facts.unmoved), columns.unreadable
    found: dict[int, ShardResult] = {}
    if facts.ledger and shards:
        reduced = _ledger(spark, connection.url, facts).mapInArrow(
            partial(reduce_records, known=known, cursors=cursors_of(shards), since_us=since_us), _PARTS
        )
        judged = reduced.repartition("shard").mapInArrow(
            partial(_judge_parts, connection=connection, shards=shards, unmoved=unmoved), _RESULTS
        )
        for row in judged.toArrow().to_pylist():
            records, unreadable = records + row["records"], unreadable + row["unreadable"]
            if row["result"] is not None:
                found[row["shard"]] = decode_result(row["result"])
    for index, shard in enumerate(shards):
        if index not in found:  # nothing of it is in the ledger
            found[index] = _judged(store, index, shard, unmoved.get(index, []))
    return [found[index] for index in range(len(shards))], records, unreadable


def _ledger(spark: SparkSession, url: str, facts: Facts) -> DataFrame:
    options = {
        "url": url,
        "topic": LEDGER,
        "startingOffsets": json.dumps({LEDGER: {"0": facts.ledger.start}}),
        "endingOffsets": json.dumps({LEDGER: {"0": facts.ledger.stop}}),
        # What retention removes meanwhile is missing at the beginning of chains, and that is found out.
        "failOnDataLoss": "false",
    }
    return spark.read.format("penstock").options(**options).load().select("offset", "data")


# --- in tasks -----------------------------------------------------------------------------------


def reduce_records(
    batches: Iterator[pa.RecordBatch], *, known: dict[Any, int], cursors: Any, since_us: int
) -> Iterator[pa.RecordBatch]:
    """Reduce the records of a part of the ledger, columns `offset` and `data`, to what they say together.

    The last row has no shard: it says how many records there were, and how many could not be read.
    """
    import pyarrow as pa

    records = unreadable = 0
    for data, positions in _gathered(batches):
        columns = columns_of(data, positions, known)
        parts = parts_of(columns, cursors, since_us=since_us)
        records, unreadable = records + len(data), unreadable + columns.unreadable
        yield _rows(pa, [(part.shard, encode_part(part)) for part in parts])
    yield _rows(pa, [(-1, b"%d %d" % (records, unreadable))])


def _gathered(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[list[bytes], Any]]:
    """Yield records with their places in the ledger, as many as are reduced together."""
    data: list[bytes] = []
    offsets: list[Any] = []
    held = 0
    for batch in batches:
        held += batch.nbytes
        data += batch.column("data").to_pylist()
        offsets.append(batch.column("offset").to_numpy(zero_copy_only=False))
        if len(data) >= RECORDS_AT_ONCE or held >= BYTES_AT_ONCE:
            yield data, np.concatenate(offsets)
            data, offsets, held = [], [], 0
    if data:
        yield data, np.concatenate(offsets)


def _rows(pa: Any, rows: list[tuple[int, bytes]]) -> Any:
    return pa.RecordBatch.from_arrays(
        [pa.array([shard for shard, _ in rows], pa.int32()), pa.array([part for _, part in rows], pa.binary())],
        names=["shard", "part"],
    )


def _judge_parts(
    batches: Iterator[pa.RecordBatch],
    *,
    connection: Connection,
    shards: Sequence[ShardFacts],
    unmoved: dict[int, list[Part]],
) -> Iterator[pa.RecordBatch]:
    """Judge the shards whose parts came here."""
    import pyarrow as pa

    parts: dict[int, list[Part]] = {}
    records = unreadable = 0
    for batch in batches:
        for shard, part in zip(batch.column("shard").to_pylist(), batch.column("part").to_pylist(), strict=True):
            if shard < 0:
                more, bad = map(int, part.split())
                records, unreadable = records + more, unreadable + bad
            else:
                parts.setdefault(shard, []).append(decode_part(part))
    rows: list[dict[str, Any]] = [{"shard": -1, "result": None, "records": records, "unreadable": unreadable}]
    if parts:
        with connection.open() as store:
            for shard, mine in parts.items():
                result = _judged(store, shard, shards[shard], [*mine, *unmoved.get(shard, [])])
                rows.append({"shard": shard, "result": encode_result(result), "records": 0, "unreadable": 0})
    schema = pa.schema(
        [("shard", pa.int32()), ("result", pa.binary()), ("records", pa.int64()), ("unreadable", pa.int64())]
    )
    yield pa.RecordBatch.from_pylist(rows, schema)


def _judged(store: Store, index: int, shard: ShardFacts, parts: list[Part]) -> ShardResult:
    return result_of(index, shard, judge(shard, parts, partial(declared_gaps, store.log, shard)))
