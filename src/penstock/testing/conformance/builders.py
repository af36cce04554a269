"""Small builders, so that a test shows what it is about and nothing else."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import pyarrow as pa

from penstock import columns
from penstock.batch import Batch
from penstock.errors import PenstockError
from penstock.events import Event
from penstock.ports import Store
from penstock.producers import Run
from penstock.rows import Appended, Commit, Cursor, Lease, Parked, Partition, Shard, Subscription, TopicInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.errors import StoreError
    from penstock.offsets import Gap

PRODUCER = bytes(range(16))
OTHER_PRODUCER = bytes(range(16, 32))
"""Two lasting producers; those of processes are made by the clock of a test."""

PLENTY = 1 << 26
"""A limit in bytes that no test reaches."""


# --- events ----------------------------------------------------------------------------------


def an_event(data: bytes = b"data", **stated: Any) -> Event:
    """Return an event that states everything an event can state."""
    everything: dict[str, Any] = {
        "type": "order.placed",
        "key": b"customer-1\xff",
        "id": "id-1",
        "source": "penstock:tests",
        "subject": "order 1",
        "time": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "expires_at": datetime(2027, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
        "content_type": "application/json",
        "headers": {"traceparent": b"00-ab-cd-01", "empty": b""},
    }
    return Event(data=data, **everything | stated)


class Part(NamedTuple):
    """Events of one producer, as one run of an append."""

    batch: Batch
    run: Run


def a_run(batch: Batch, producer: bytes = PRODUCER, first: int = 0, *, epoch: int = 0) -> Run:
    """Return the run that says that these events are the producer's, from sequence `first` on."""
    return Run(producer, epoch, first, len(batch), columns.digest(batch.columns))


def a_part(*payloads: bytes, producer: bytes = PRODUCER, first: int = 0, epoch: int = 0) -> Part:
    """Return events with these payloads, and their run."""
    batch = Batch.build(payloads)
    return Part(batch, a_run(batch, producer, first, epoch=epoch))


def append(store: Store, partition: Partition, *parts: Part) -> list[Appended]:
    """Append all parts in one call."""
    table = pa.Table.from_batches([part.batch.columns for part in parts])
    return store.log.append(partition, Batch.from_arrow(table), [part.run for part in parts])


def fill(store: Store, partition: Partition, count: int) -> None:
    """Append so many events, each by a call of its own: `b"0"`, `b"1"` and so on."""
    producer = uuid4().bytes
    for number in range(count):
        [answer] = append(store, partition, a_part(b"%d" % number, producer=producer, first=number))
        assert answer.offsets is not None, answer


# --- reading ---------------------------------------------------------------------------------


def pages(
    store: Store, partition: Partition, start: int, *, bytes_max: int = PLENTY, events_max: int | None = None
) -> Iterator[list[Batch]]:
    """Read page after page up to the end, checking that each begins where the one before ended."""
    while found := store.log.read(partition, start, bytes_max=bytes_max, events_max=events_max):
        page = [only_events(item) for item in found]
        for batch in page:
            assert batch.start == start
            assert len(batch) > 0
            start = batch.range.stop
        yield page


def only_events(item: Batch | Gap) -> Batch:
    """Return what was read if it is events; nothing is lost in these tests, so a gap is a failure."""
    assert isinstance(item, Batch), item
    return item


def payloads(store: Store, partition: Partition) -> list[bytes]:
    """Return the payloads of all events that can be read, in order."""
    first = store.log.bounds(partition).start
    return [event.data for page in pages(store, partition, first) for batch in page for event in batch]


# --- subscriptions ---------------------------------------------------------------------------


def subscribe(store: Store, topic: TopicInfo, name: str = "billing", **stated: Any) -> Subscription:
    """Create a subscription of the topic."""
    subscription = Subscription(log_id=topic.log_id, name=name, mode="key_shared", **stated)
    store.cursors.put_subscription(subscription)
    return subscription


def a_shard(topic: TopicInfo, *, name: str = "billing", slot: int = 0, partition: int = 0) -> Shard:
    """Return a shard of the subscription that `subscribe` makes."""
    return Shard(topic.log_id, name, slot, partition)


def a_cursor(shard: Shard, next_offset: int, **stated: Any) -> Cursor:
    """Return a cursor of this shard."""
    return Cursor(shard=shard, next_offset=next_offset, **stated)


def a_parked(shard: Shard, offset: int, **stated: Any) -> Parked:
    """Return a dead letter of this shard, unless another state is given."""
    row: dict[str, Any] = {"state": "dead", "lane": 7, "event": an_event()} | stated
    return Parked(shard=shard, offset=offset, **row)


def commit(store: Store, *cursors: Cursor, **stated: Any) -> StoreError | None:
    """Make one commit of these cursors, and return its answer."""
    [answer] = store.cursors.commit([Commit(cursors=cursors, **stated)])
    return answer


def park(store: Store, *rows: Parked) -> None:
    """Park these rows."""
    assert commit(store, parked=rows) is None


def acquired(
    store: Store, name: str = "lease", owner: str = "a", seconds: float = 10, *, under: Lease | None = None
) -> Lease:
    """Acquire a lease that is free, or this owner's already: then with a higher epoch."""
    lease = store.leases.acquire(name, owner, seconds, under=under)
    assert lease is not None
    assert (lease.name, lease.owner) == (name, owner)
    return lease


# --- answers ---------------------------------------------------------------------------------


def errors_of(calls: Mapping[str, Callable[[], object]]) -> dict[str, type[PenstockError] | None]:
    """Make each call, and return the kind of error that it ended with."""
    return {name: error_of(call) for name, call in calls.items()}


def error_of(call: Callable[[], object]) -> type[PenstockError] | None:
    """Make a call, and return the kind of error that it ended with."""
    try:
        call()
    except PenstockError as error:
        return type(error)
    return None
