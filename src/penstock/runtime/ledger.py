"""The ledger: a record of every settlement, in the topic `_deliveries`.

A record is written in the transaction that moves the cursor, so there is no moment in which one is true without the
other. From there this loop moves records to the topic, like an outbox: appended with the record's number as sequence,
then forgotten. Killed anywhere, it repeats itself and the log recognises the repeat.

Records of a shard chain twice: by `number`, which is dense, and by `begin` and `next_offset`. Whoever audits them knows
from that whether any is missing. Internal topics have no ledger.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from penstock import columns as cols
from penstock.batch import Batch
from penstock.errors import ProducerConflict, StoreFull, TopicDeleted
from penstock.offsets import RangeSet
from penstock.producers import Run, lasting_producer
from penstock.rows import Retention, TopicSettings
from penstock.runtime.entrances import Host, Loop, Tenure

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock
    from penstock.engine.messages import Step
    from penstock.ports import Log
    from penstock.rows import Partition, Settlement, Shard, TopicInfo

logger = logging.getLogger(__name__)

TOPIC: Final = "_deliveries"
SETTINGS: Final = TopicSettings(
    content_type="application/vnd.msgpack",
    source="penstock:ledger",
    retention=Retention(age_seconds=30 * 24 * 3600.0, bytes_max=1 << 30),
)
EVENT_TYPE: Final = "penstock.delivery"
PAGE: Final = 5_000
BUSY_SECONDS: Final = 0.5
"""How long records gather before they are moved together."""
IDLE_SECONDS: Final = 5.0
"""How long the mover sleeps unless a commit wakes it; another process may have left records behind."""


class Record(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one step of a shard has settled."""

    log_id: str
    subscription: str
    slot: int
    partition: int
    generation: int
    number: int
    begin: int
    """Where the cursor was …"""
    next_offset: int
    """… and where it is."""
    outcomes: dict[str, bytes]
    """The offsets that were newly settled or parked, by outcome, as `RangeSet.to_bytes()`; also ahead of the cursor."""
    latencies: list[int]
    """How many were acked within 1, 2, 4, … microseconds of their append; zeros at the end are left out."""
    retried: int
    """How many of them had failed before."""
    at: int
    """When, in microseconds since 1970 UTC."""

    def offsets(self, outcome: str) -> RangeSet:
        """Return the offsets with this outcome."""
        return RangeSet.from_bytes(self.outcomes.get(outcome, b""))


_encode = msgspec.msgpack.Encoder().encode
decode_record = msgspec.msgpack.Decoder(Record).decode


def record_of(shard: Shard, step: Step, now_us: int) -> bytes:
    """Return the record of a step; empty if it settles nothing."""
    outcomes = {str(outcome): offsets.to_bytes() for outcome, offsets in step.outcomes.items() if offsets}
    if not outcomes:
        return b""
    latencies = list(step.latencies)
    while latencies and not latencies[-1]:
        latencies.pop()
    return _encode(
        Record(
            log_id=shard.log_id,
            subscription=shard.subscription,
            slot=shard.slot,
            partition=shard.partition,
            generation=step.generation,
            number=step.number,
            begin=step.begin,
            next_offset=step.next_offset,
            outcomes=outcomes,
            latencies=latencies,
            retried=step.retried,
            at=now_us,
        )
    )


class Ledger(Loop):
    """The loop that moves settlement records to their topic."""

    def __init__(self, host: Host, *, owner: str, clock: Clock, jitter: Callable[[], float]) -> None:
        super().__init__("the ledger of deliveries", clock, jitter)
        self._host = host
        self._tenure = Tenure(host, "ledger", owner, clock)
        self._topic: TopicInfo | None = None
        self._producer: bytes | None = None
        self.moved = 0

    async def _round(self) -> float:
        store = self._host.store
        records = await self._host.call(store.cursors.settlements, PAGE)
        if not records:
            return IDLE_SECONDS
        fence = await self._tenure.fence()
        if fence is None:
            return IDLE_SECONDS / 10
        if self._topic is None:
            self._topic = await self._host.call(store.log.create_topic, TOPIC, SETTINGS)
        partition = self._topic.partitions[0]
        producer = self._producer or producer_of(self._topic.log_id)
        try:
            await self._host.call(_append, store.log, partition, records, producer)
        except ProducerConflict as conflict:
            # The state was rebuilt since, and its numbers have begun anew: these records are others.
            logger.warning("the ledger goes on under a new producer: %s", conflict)
            self._producer = lasting_producer()
            return 0.0
        except TopicDeleted:
            self._topic = None  # the next round makes it anew
            raise
        except StoreFull as full:
            logger.warning("the ledger has no room; records wait: %s", full)
            raise
        await self._host.call(store.cursors.forget_settlements, records[-1].number)
        self.moved += len(records)
        return 0.0 if len(records) == PAGE else BUSY_SECONDS

    def _fenced(self) -> None:
        self._tenure.lost()

    async def _ended(self) -> None:
        await self._tenure.release()


def producer_of(log_id: str) -> bytes:
    """Return the lasting producer of a store's ledger: the same in every process, without being stored."""
    digest = hashlib.blake2b(f"ledger/{log_id}".encode(), digest_size=16).digest()
    return uuid.UUID(bytes=digest, version=4).bytes


def _append(log: Log, partition: Partition, records: Sequence[Settlement], producer: bytes) -> None:
    batch = Batch.build([record for _, record in records], type=EVENT_TYPE)
    # One run each: the numbers of a repeated page may begin elsewhere, and a run is recognised as a whole.
    runs = [
        Run(producer, 0, number, 1, cols.digest(batch.columns.slice(index, 1)))
        for index, (number, _) in enumerate(records)
    ]
    for answer in log.append(partition, batch, runs):
        if answer.refused is not None:
            raise answer.refused
