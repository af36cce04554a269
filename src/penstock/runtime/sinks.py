"""Sinks: batches that reach a topic exactly once, whoever repeats them and whoever dies.

A query delivers its batches one after the other, and repeats one when it does not know whether it was delivered. Four
steps make of that exactly one delivery:

1. Tasks **stage** their events (`penstock.runtime.staging`).
2. One process **prepares**: it writes down which staged parts are the batch, in which order, and which sequences of
   which producers they get. The first manifest of a batch wins; whoever comes later, a repeated attempt or a driver
   that is thought to be dead, completes the first one and gives up its own parts.
3. The parts are **appended** as the manifest says. The topic recognises what it has already, so this may be repeated,
   and done by several processes at once.
4. The manifest is **finished**, and what was staged is trimmed.

Killed before 2, nothing has happened, and the parts are orphans. Killed after 2, the batch is going to be delivered:
`complete` needs the store alone. The query does it when it comes back, and every open bus does it if nobody else has
(`penstock.runtime.finisher`).

Manifests of a sink are completed in the order of their preparation, so batches are in order within each partition. The
sequences of a batch begin where those of the batch before it end; producers are new whenever a sink changes hands.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import columns as cols
from penstock.batch import Batch
from penstock.errors import (
    GapFound,
    IntegrityError,
    StoreError,
    TopicDeleted,
    Trimmed,
    UsageError,
)
from penstock.offsets import Gap
from penstock.producers import Run, lasting_producer, process_producer
from penstock.rows import Manifest, Partition
from penstock.runtime.staging import PART_BYTES, PREFIX, Sink, StagedPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from penstock.clock import Clock
    from penstock.ports import Store
    from penstock.rows import TopicInfo

logger = logging.getLogger(__name__)

ORPHANED_SECONDS: Final = 24 * 3600.0
"""A staging log that nothing was appended to for so long, and that no manifest needs, is deleted."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    """The events of a sink in one partition, one batch after the other."""

    producer: bytes
    first_sequence: int
    """Of this batch's first event; the parts give the others, in their order."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a manifest: all that it takes to deliver a batch."""

    topic: str
    log_id: str
    parts: list[StagedPart]
    """Those of one partition are in the order in which they are appended."""
    lines: dict[int, Line]
    """By partition; also of those that this batch has nothing for."""
    once: bool = False

    @property
    def staging(self) -> str | None:
        """The id of the staging log; a batch without events needs none."""
        return self.parts[0].log_id if self.parts else None

    def next_lines(self) -> dict[int, Line]:
        """Return where the batch after this one begins."""
        counts = Counter[int]()
        for part in self.parts:
            counts[part.partition] += part.stop - part.start
        return {
            number: Line(line.producer, line.first_sequence + counts[number]) for number, line in self.lines.items()
        }


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Plan).decode  # built here: two threads must not build one type's at once


# --- a batch ------------------------------------------------------------------------------------


def commit(
    store: Store,
    sink: Sink,
    batch: int,
    topic: TopicInfo,
    staged: Sequence[StagedPart],
    *,
    clock: Clock,
    adopt: bool = False,
) -> None:
    """Deliver a batch that is staged. When this returns it is in the topic, once, however often it is called.

    `SinkConflict` if the sink belongs to another query, unless adopted, or if this batch is older than what the sink
    remembers. Any other error leaves it open whether the batch was prepared: call again, with parts staged anew.
    """
    complete_all(store, sink.name)
    try:
        plan = _plan(store, sink, topic, staged, clock)
    except (Trimmed, TopicDeleted):
        # Another driver of the same query was quicker with this batch, and has trimmed what lost.
        last = store.manifests.last(sink.name)
        if last is None or last.query != sink.query or last.batch < batch:
            raise
        complete_all(store, sink.name)
        return
    manifest = Manifest(sink=sink.name, query=sink.query, batch=batch, body=_encode(plan))
    first = store.manifests.prepare(manifest, adopt=adopt)
    if first.body != manifest.body:
        _compare(first, plan)
    if not first.done:
        complete_all(store, sink.name)


def _plan(store: Store, sink: Sink, topic: TopicInfo, staged: Sequence[StagedPart], clock: Clock) -> Plan:
    _check_staged(store, sink, staged)
    before = store.manifests.last(sink.name)
    lines: dict[int, Line] = {}
    if before is not None and before.query == sink.query:
        earlier = _plan_of(before)
        lines = earlier.next_lines() if earlier.log_id == topic.log_id else {}
    for partition in {part.partition for part in staged} - lines.keys():
        lines[partition] = Line(process_producer(clock.time_us()) if sink.once else lasting_producer(), 0)
    return Plan(topic=topic.name, log_id=topic.log_id, parts=list(staged), lines=lines, once=sink.once)


def _check_staged(store: Store, sink: Sink, staged: Sequence[StagedPart]) -> None:
    """Raise unless everything is there: a manifest of what is gone could never be completed."""
    for (log_id, lane), parts in groupby(sorted(staged), key=lambda part: part[:2]):
        if log_id != staged[0].log_id:
            raise TopicDeleted(min(log_id, staged[0].log_id))
        bounds = store.log.bounds(Partition(log_id, lane))
        oldest = min(part.start for part in parts)
        if oldest < bounds.start:
            raise Trimmed.at(f"{sink.staging_name}/{lane}", oldest, bounds.start, bounds.stop)


def _compare(first: Manifest, plan: Plan) -> None:
    """Say so if a repeated batch is not what it was: the query then gives other rows for the same input."""
    was, is_now = (sum(part.stop - part.start for part in plan.parts) for plan in (_plan_of(first), plan))
    if was != is_now:
        logger.warning(
            "sink %r, query %s, batch %d: this attempt has %d events, the first one had %d, and the first one counts; "
            "is the query's result not determined by its input, or its checkpoint an old copy?",
            first.sink,
            first.query,
            first.batch,
            is_now,
            was,
        )


def _plan_of(manifest: Manifest) -> Plan:
    try:
        return _decode(manifest.body)
    except msgspec.DecodeError as error:
        raise IntegrityError(
            f"the manifest of sink {manifest.sink!r}, query {manifest.query}, batch {manifest.batch} cannot be read: "
            f"{error}"
        ) from None


# --- completing ---------------------------------------------------------------------------------


def complete_all(store: Store, sink: str | None = None) -> int:
    """Complete every prepared manifest, of one sink or of all, oldest first; return how many there were."""
    manifests = [manifest for manifest in store.manifests.unfinished() if sink in {None, manifest.sink}]
    for manifest in manifests:
        complete(store, manifest)
    return len(manifests)


def complete(store: Store, manifest: Manifest) -> None:
    """Append what a prepared manifest says, and finish it; may be repeated, and run in several processes at once."""
    plan = _plan_of(manifest)
    by_partition: defaultdict[int, list[StagedPart]] = defaultdict(list)
    for part in plan.parts:
        by_partition[part.partition].append(part)
    try:
        for parts in by_partition.values():
            _append_parts(store, plan, parts)
    except (Trimmed, TopicDeleted) as error:
        if not _is_open(store, manifest):
            return  # somebody else has completed it meanwhile, and trimmed what was staged
        if not (isinstance(error, TopicDeleted) and error.log_id == plan.log_id):
            raise
        logger.warning(
            "sink %r, query %s, batch %d: topic %r was deleted, and with it what was prepared for it",
            manifest.sink,
            manifest.query,
            manifest.batch,
            plan.topic,
        )
    _finish(store, manifest, plan)


def _is_open(store: Store, manifest: Manifest) -> bool:
    identity = attrgetter("sink", "query", "batch")
    return any(identity(other) == identity(manifest) for other in store.manifests.unfinished())


def _append_parts(store: Store, plan: Plan, parts: Sequence[StagedPart]) -> None:
    """Append all parts of one partition."""
    target = Partition(plan.log_id, parts[0].partition)
    producer, sequence = plan.lines[target.number].producer, plan.lines[target.number].first_sequence
    for group in _groups(parts):
        batches = [_read(store, part) for part in group]
        runs = []
        for part in group:
            runs.append(Run(producer, 0, sequence, part.stop - part.start, part.digest))
            sequence = runs[-1].end_sequence
        answers = store.log.append(target, Batch(cols.concatenate(batches)), runs)
        for answer in answers:
            if answer.refused is not None:
                raise answer.refused


def _groups(parts: Sequence[StagedPart]) -> Iterator[list[StagedPart]]:
    """Yield parts that are read and appended together, so that many small ones cost few appends."""
    group: list[StagedPart] = []
    size = 0
    for part in parts:
        if group and size + part.size > PART_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += part.size
    if group:
        yield group


def _read(store: Store, part: StagedPart) -> pa.RecordBatch:
    """Return the columns of a staged part."""
    lane = Partition(part.log_id, part.lane)
    found: list[pa.RecordBatch] = []
    start = part.start
    while start < part.stop:
        for batch in store.log.read(lane, start, bytes_max=part.size, events_max=part.stop - start):
            if isinstance(batch, Gap):
                raise GapFound(lane, batch)
            found.append(batch.columns)
            start = batch.range.stop
    return cols.concatenate(found)


def _finish(store: Store, manifest: Manifest, plan: Plan) -> None:
    try:
        store.manifests.finish(manifest.sink, manifest.query, manifest.batch)
    except UsageError:
        return  # somebody else was much quicker: it is done, and even forgotten
    try:
        if plan.once:
            store.manifests.forget(manifest.sink)
            if plan.staging is not None:
                store.log.delete_topic(plan.staging)
            return
        # All parts of later batches were staged after this one was prepared, so they are behind its parts.
        passed: defaultdict[Partition, int] = defaultdict(int)
        for part in plan.parts:
            lane = Partition(part.log_id, part.lane)
            passed[lane] = max(passed[lane], part.stop)
        for lane, before in passed.items():
            store.log.trim(lane, before)
    except (StoreError, UsageError) as error:
        logger.info("sink %r: what was staged for batch %d stays for now: %s", manifest.sink, manifest.batch, error)


def discard(store: Store, sink: Sink) -> None:
    """Remove what a job has staged and is not going to deliver; nothing happens to one that has prepared it."""
    assert sink.once
    if any(manifest.sink == sink.name for manifest in store.manifests.unfinished()):
        return
    for topic in store.log.topics():
        if topic.name == sink.staging_name:
            with suppress(TopicDeleted):
                store.log.delete_topic(topic.log_id)


# --- what is left behind ------------------------------------------------------------------------


def sweep(store: Store, *, clock: Clock, idle_seconds: float = ORPHANED_SECONDS) -> list[str]:
    """Delete staging logs that were left behind, and return their names.

    One that nothing was appended to for so long is nobody's, unless a manifest still needs it. Should its query be
    alive nevertheless, it is told that the log is gone, and stages the batch anew.
    """
    needed = {_plan_of(manifest).staging for manifest in store.manifests.unfinished()}
    before = clock.time_us() - int(idle_seconds * 1e6)
    swept = []
    for topic in store.log.topics():
        if not topic.name.startswith(PREFIX) or topic.log_id in needed or topic.created_at > before:
            continue
        if any(store.log.find_time(lane, before) < store.log.bounds(lane).stop for lane in topic.partitions):
            continue
        try:
            store.log.delete_topic(topic.log_id)
            # A job that died after its delivery, and before it was forgotten.
            store.manifests.forget(topic.name.removeprefix(PREFIX))
        except (TopicDeleted, UsageError):
            continue
        swept.append(topic.name)
    return swept
