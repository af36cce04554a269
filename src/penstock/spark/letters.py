"""Dead letters as a DataFrame: one row for each, with the event, why it failed, and the fingerprint of the cause.

What it promises:

* **A letter that is dead from the beginning of a query to its end is in it once.** One that dies or comes back
  meanwhile may be in it or not. Nothing is locked, and nothing is changed.
* **Every evaluation looks anew**: the DataFrame says which letters are meant, not which ones there were.
* Tasks read pages of a bounded size, each task a stretch of the offsets of one partition of one subscription.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.bus.letters import fingerprint_of
from penstock.bus.topic import Topic
from penstock.errors import TopicDeleted, UnknownTopic, UsageError, did_you_mean
from penstock.rows import Parked, ParkedFilter, Partition
from penstock.settings import Settings, resolve
from penstock.spark.connection import Connection, absolute, connect, patiently

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from penstock.bus.bus import Bus
    from penstock.ports import ParkedRows, Store
    from penstock.rows import TopicInfo

PAGE_ROWS: Final = 200
"""So many letters, with their events, are read at a time: each may be as large as an event may be."""
BATCH_ROWS: Final = 2_000
BATCH_BYTES: Final = 8 << 20
"""A batch for Spark ends with the page that reaches either."""
TASKS_PER_CORE: Final = 2
"""Stretches of offsets have more or fewer letters; the smaller they are, the more evenly the cores are used."""
STRETCH_MIN: Final = 1_000
"""A stretch of offsets is not divided into smaller ones: a task costs something by itself."""

SCHEMA: Final = (
    "topic string, subscription string, partition int, offset bigint, key binary, type string, id string, "
    "time timestamp, data binary, headers map<string, binary>, attempts int, replay int, error_type string, "
    "error_message string, fingerprint string, parked_at timestamp, last_retry_at timestamp, job string"
)
"""The columns, as Spark writes them. `last_retry_at` and what an event does not say may be null."""


class Stretch(NamedTuple):
    """What one task reads: offsets of one partition of one subscription."""

    topic: str
    log_id: str
    subscription: str
    partition: int
    start: int
    stop: int | None
    """None for whatever comes behind."""


def dead_letters(
    spark: SparkSession, bus: Bus | str, topic: Topic[Any] | str, subscription: str | None = None
) -> DataFrame:
    """Return the dead letters of a subscription, or of all subscriptions of a topic.

    `bus` is a bus or the URL of its store. ::

        letters = dead_letters(spark, bus, orders, "billing")
        letters.groupBy("fingerprint", "error_type").count().show()

    :raises UnknownTopic: there is no such topic; `UsageError` if it has no such subscription.
    """
    url, settings = reached(bus)
    with connect(url, settings) as (store, connection):
        info = topic_of(store, topic)
        names = subscriptions_of(store, info, subscription)
        tasks = TASKS_PER_CORE * spark.sparkContext.defaultParallelism
        stretches = patiently(lambda: planned(store, info, names, tasks))
    # Each task finds its stretch by its number, so that nothing but numbers passes through Spark.
    count = len(stretches)
    numbers = spark.range(0, count, 1, max(count, 1))
    return numbers.mapInArrow(partial(_read, connection, stretches), SCHEMA)


# --- what is asked for ----------------------------------------------------------------------------


def reached(bus: Bus | str) -> tuple[str, Settings]:
    """Return the URL of a store, as tasks may use it, and the settings it is opened with."""
    if isinstance(bus, str):
        return absolute(bus), resolve({"url": bus}).settings
    return absolute(bus.url), bus.settings


def topic_of(store: Store, topic: Topic[Any] | str) -> TopicInfo:
    """Return a topic that is there."""
    name = topic if isinstance(topic, str) else topic.name
    known = {info.name: info for info in store.log.topics()}
    if name not in known:
        raise UnknownTopic(name, [other for other in known if not other.startswith("_")])
    return known[name]


def subscriptions_of(store: Store, topic: TopicInfo, name: str | None) -> list[str]:
    """Return the subscription that is named, or all of a topic."""
    names = [subscription.name for subscription in store.cursors.subscriptions(topic.log_id)]
    if name is None:
        return names
    if name not in names:
        raise UsageError(f"topic {topic.name!r} has no subscription {name!r}{did_you_mean(name, names)}")
    return [name]


def planned(store: Store, topic: TopicInfo, names: Sequence[str], tasks: int) -> list[Stretch]:
    """Return what each task reads: all partitions, in about so many stretches, and none where no letter is."""
    firsts = []
    for name in names:
        for partition in topic.partitions:
            wanted = _dead(topic.log_id, name, partition.number)
            firsts += [(name, partition, offset) for _, offset in store.parked.places(wanted, limit=1)]
    pieces = -(-tasks // len(firsts)) if firsts else 0
    found = []
    for name, partition, first in firsts:
        edges = _edges(first, _end(store, partition), pieces)
        for start, stop in zip(edges, [*edges[1:], None], strict=True):
            found.append(Stretch(topic.name, topic.log_id, name, partition.number, start, stop))
    return found


def _edges(first: int, end: int, pieces: int) -> list[int]:
    """Return where each of several stretches of about the same length begins."""
    length = max(-(-(end - first) // pieces), STRETCH_MIN)
    return list(range(first, max(end, first + 1), length))


def _end(store: Store, partition: Partition) -> int:
    with suppress(TopicDeleted):
        return store.log.bounds(partition).stop
    return 0


def _dead(log_id: str, subscription: str, partition: int) -> ParkedFilter:
    return ParkedFilter(log_id=log_id, subscription=subscription, partition=partition, states=frozenset({"dead"}))


# --- in tasks -------------------------------------------------------------------------------------


def _read(
    connection: Connection, stretches: Sequence[Stretch], numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    mine = [stretches[number] for batch in numbers for number in batch.column(0).to_pylist()]
    if mine:
        with connection.open() as store:
            for stretch in mine:
                yield from letters_in(store.parked, stretch)


def letters_in(parked: ParkedRows, stretch: Stretch) -> Iterator[pa.RecordBatch]:
    """Yield the letters of a stretch, in the order of their offsets."""
    held: list[Parked] = []
    size = 0
    for rows in _pages(parked, stretch):
        held += rows
        size += sum(len(row.event.data) for row in rows)
        if len(held) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield columns_of(stretch.topic, held)
            held, size = [], 0
    if held:
        yield columns_of(stretch.topic, held)


def _pages(parked: ParkedRows, stretch: Stretch) -> Iterator[list[Parked]]:
    wanted = _dead(stretch.log_id, stretch.subscription, stretch.partition)
    after = (stretch.partition, stretch.start - 1)
    while rows := parked.page(wanted, after=after, limit=PAGE_ROWS):
        if stretch.stop is not None and rows[-1].offset >= stretch.stop:
            yield [row for row in rows if row.offset < stretch.stop]
            return
        yield rows
        after = (stretch.partition, rows[-1].offset)


def columns_of(topic: str, rows: Sequence[Parked]) -> pa.RecordBatch:
    """Return letters as columns."""
    import pyarrow as pa

    from penstock.columns import TIMESTAMP

    events = [row.event for row in rows]
    text, blob, number, long = pa.string(), pa.binary(), pa.int32(), pa.int64()
    columns = {
        "topic": pa.array([topic] * len(rows), text),
        "subscription": pa.array([row.shard.subscription for row in rows], text),
        "partition": pa.array([row.shard.partition for row in rows], number),
        "offset": pa.array([row.offset for row in rows], long),
        "key": pa.array([event.key for event in events], blob),
        "type": pa.array([event.type for event in events], text),
        "id": pa.array([event.id for event in events], text),
        "time": pa.array([event.time for event in events], TIMESTAMP),
        "data": pa.array([event.data for event in events], blob),
        "headers": pa.array([list(event.headers.items()) for event in events], pa.map_(text, blob)),
        "attempts": pa.array([row.attempts for row in rows], number),
        "replay": pa.array([row.replay for row in rows], number),
        "error_type": pa.array([_shown(row.error_type) for row in rows], text),
        "error_message": pa.array([_shown(row.error_message) for row in rows], text),
        "fingerprint": pa.array([fingerprint_of(row) for row in rows], text),
        "parked_at": pa.array([row.parked_at for row in rows], long).cast(TIMESTAMP),
        "last_retry_at": pa.array([row.last_retry_at or None for row in rows], long).cast(TIMESTAMP),
        "job": pa.array([row.job for row in rows], text),
    }
    return pa.RecordBatch.from_pydict(columns)


def _shown(text: str) -> str:
    """Return the text of an error as UTF-8 can say it: it may quote the undecodable name of a file."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
