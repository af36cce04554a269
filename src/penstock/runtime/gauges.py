"""Gauges: what a look at a store tells of its topics and subscriptions, whoever consumes them, and if nobody does.

A look asks for every cursor, so it is not taken for every question: at least five seconds pass between two, and more if
one takes long. A look that fails is told as `store_up` 0, and what it would have said is missing: an old
value that looks like a new one would be a lie.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from penstock.errors import StoreClosed, TopicDeleted
from penstock.metrics import Reading, gathered
from penstock.ports import Measured
from penstock.runtime import subscriptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.clock import Clock
    from penstock.engine.lag import LagInfo
    from penstock.errors import IntegrityError
    from penstock.metrics import Metric
    from penstock.ports import Store
    from penstock.rows import Subscription, TopicInfo

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 5.0
"""At most so often a store is looked at …"""
LOOK_SHARE: Final = 10
"""… and no more of the time than a tenth."""
SHARDS_MAX: Final = 10_000
"""So many partitions of subscriptions are looked at; what is left out is counted."""


class Looks:
    """The last look at a store, and when to take another. Safe for several threads: one looks, the others wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_at = float("-inf")
        self._trouble = ""
        self.seen: list[Reading] = []

    @property
    def due(self) -> bool:
        """Whether the last one is too old."""
        return self._clock.monotonic() >= self._next_at

    def take(self, store: Store) -> list[Reading]:
        """Look if it is time to, and return what was seen last. `StoreClosed` if the store is closed."""
        with self._lock:
            if self.due:
                began = self._clock.monotonic()
                self.seen = self._look(store)
                ended = self._clock.monotonic()
                # From its beginning: whoever asks every five seconds gets a new one each time.
                self._next_at = max(began + LOOK_SECONDS, ended + (LOOK_SHARE - 1) * (ended - began))
            return self.seen

    def _look(self, store: Store) -> list[Reading]:
        try:
            seen = [Reading("store_up", 1), *_Look(store, self._clock.time_us()).readings()]
        except StoreClosed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and all else is measured
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                logger.warning("the store could not be looked at for metrics: %s", trouble)
            self._trouble = trouble
            return [Reading("store_up", 0)]
        self._trouble = ""
        return seen


@cache  # it is read from a file
def build_reading() -> Reading:
    """Return which version this is."""
    return Reading("build_info", 1, (version("penstock"),))


class _Look:
    """One look at a store."""

    def __init__(self, store: Store, now_us: int) -> None:
        self._store = store
        self._now_us = now_us
        self._damages = 0
        self._shards = 0
        self._left_out = 0

    def readings(self) -> Iterator[Reading]:
        store = self._store
        for topic in store.log.topics():
            if not topic.name.startswith("_"):
                with suppress(TopicDeleted):  # in this moment
                    yield from self._of_topic(topic)
        yield Reading("metrics_shards_left_out", self._left_out)
        if isinstance(store, Measured):
            yield from store.readings()
            yield Reading("store_damaged_partitions", self._damages, ("unreadable",))

    def _of_topic(self, topic: TopicInfo) -> Iterator[Reading]:
        heads = self._store.log.heads(topic.partitions).read().tolist()
        for number, head in enumerate(heads):
            if head >= 0:
                yield Reading("log_end_offset", head, (topic.name, str(number)))
        for subscription in self._store.cursors.subscriptions(topic.log_id):
            if self._shards + len(heads) > SHARDS_MAX:
                self._left_out += len(heads)
                continue
            self._shards += len(heads)
            yield from self._of_subscription(topic, subscription)

    def _of_subscription(self, topic: TopicInfo, subscription: Subscription) -> Iterator[Reading]:
        damages: list[IntegrityError] = []
        lags = subscriptions.lag(self._store, topic, subscription, self._now_us, damaged=damages.append)
        self._damages += len(damages)
        written = {
            cursor.shard.partition: cursor.updated_at
            for cursor in self._store.cursors.load(topic.log_id, subscription.name)
        }
        for each in lags:
            yield from _of_shard(each, written.get(each.partition, 0) or subscription.created_at)
        labels = (topic.name, subscription.name)
        yield Reading("dead_letters", sum(each.dead for each in lags), labels)
        yield Reading("parked_messages", sum(each.parked for each in lags), labels)


def _of_shard(lag: LagInfo, written_us: int) -> Iterator[Reading]:
    shard = (lag.topic, lag.subscription, str(lag.partition))
    yield Reading("subscription_lag_messages", lag.lag, shard)
    yield Reading("subscription_oldest_unacked_age_seconds", lag.oldest_seconds, shard)
    if written_us:
        yield Reading("subscription_last_progress_timestamp_seconds", written_us / 1_000_000, shard)


class StoreMetrics:
    """The metrics of a store that nobody in this process publishes to or consumes; a `penstock.metrics.Source`."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._looks = Looks(clock)

    def latest_metrics(self) -> list[Metric]:
        """Return what the store tells, as it was at most a few seconds ago."""
        return gathered([build_reading(), *self._looks.take(self._store)])
