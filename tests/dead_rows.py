"""Dead letters for the tests of redriving: put into a store, and what became of them."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.events import Event
from penstock.rows import Commit, Parked, ParkedFilter, Shard, Subscription, TopicInfo, TopicSettings
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ports import Store

ROWS_AT_A_TIME = 2_000
T0 = 1_767_225_600_000_000  # 2026-01-01
TRACE = 'Traceback (most recent call last):\n  File "shop/bill.py", line 7, in charge\n    card.debit()\nDeclined\n'


class Kept(NamedTuple):
    """What a test wants to know of a row."""

    state: str
    replay: int
    job: str


def a_topic(store: Store, name: str = "orders", *, partitions: int = 2, subscriptions: Iterable[str] = ()) -> TopicInfo:
    """Make a topic with subscriptions."""
    topic = store.log.create_topic(name, TopicSettings(partitions=partitions))
    for subscription in subscriptions:
        store.cursors.put_subscription(Subscription(log_id=topic.log_id, name=subscription, mode="key_shared"))
    return topic


def a_letter(topic: TopicInfo, name: str, partition: int, offset: int, **said: Any) -> Parked:
    """Return a dead letter."""
    row: dict[str, Any] = {"state": "dead", "lane": 0, "event": Event(data=b"%d" % offset), "parked_at": T0 + offset}
    return Parked(shard=Shard(topic.log_id, name, 0, partition), offset=offset, **(row | said))


def put(store: Store, rows: Iterable[Parked]) -> None:
    """Park rows, many at a time."""
    every = list(rows)
    for start in range(0, len(every), ROWS_AT_A_TIME):
        part = tuple(every[start : start + ROWS_AT_A_TIME])
        assert store.cursors.commit([Commit(parked=part)]) == [None]


def kept(store: Store, topic: TopicInfo, name: str) -> dict[tuple[int, int], Kept]:
    """Return the rows of a subscription, by partition and offset."""
    rows = store.parked.page(ParkedFilter(log_id=topic.log_id, subscription=name), limit=1_000_000)
    return {(row.shard.partition, row.offset): Kept(row.state, row.replay, row.job) for row in rows}


def seeded(url: str, *, count: int, partitions: int = 2, name: str = "billing") -> TopicInfo:
    """Make a store with so many dead letters of one subscription of the topic `orders`."""
    with closing(open_store(url)) as store:
        topic = a_topic(store, partitions=partitions, subscriptions=[name])
        put(store, (a_letter(topic, name, number % partitions, number // partitions) for number in range(count)))
        return topic


def states(url: str, topic: TopicInfo, name: str = "billing") -> dict[str, int]:
    """Return how many rows are in each state."""
    with closing(open_store(url)) as store:
        counts = store.parked.count(ParkedFilter(log_id=topic.log_id, subscription=name))
        return {str(state): count for state, count in counts.items()}
