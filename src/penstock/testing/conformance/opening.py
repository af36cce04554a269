"""How a test gets its store: three methods for the store's author, four fixtures for the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from penstock.clock import VirtualClock
from penstock.ports import Store
from penstock.rows import Partition, TopicInfo, TopicSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager


class StoreOpening:
    """What every class of the suite derives from, and a store's author overrides."""

    def open(self, clock: VirtualClock) -> Store:
        """Open a new, empty store that takes all its time from this clock."""
        raise NotImplementedError(f"{type(self).__name__} must say how to open a new, empty store: def open(…)")

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        """Open anew what `store`, which is closed, was; only asked of durable stores."""
        raise NotImplementedError(f"{type(self).__name__}: a durable store is opened again: def reopen(…)")

    def transaction(self, store: Store) -> AbstractContextManager[Any]:
        """Begin a transaction for the outbox; only asked of stores that have one.

        It commits at the end of the block, and rolls back if the block ends with an exception.
        """
        raise NotImplementedError(f"{type(self).__name__}: a store with an outbox needs def transaction(…)")

    @pytest.fixture
    def clock(self) -> VirtualClock:
        """Return the only clock of the test and its store."""
        return VirtualClock()

    @pytest.fixture
    def store(self, clock: VirtualClock) -> Iterator[Store]:
        """Open a store, and close it at the end."""
        store = self.open(clock)
        yield store
        store.close()

    @pytest.fixture
    def topic(self, store: Store) -> TopicInfo:
        """Create a topic of two partitions."""
        return a_topic(store)

    @pytest.fixture
    def partition(self, topic: TopicInfo) -> Partition:
        """Return the topic's first partition."""
        return topic.partitions[0]


def a_topic(store: Store, name: str = "orders") -> TopicInfo:
    """Create the topic that most tests use."""
    return store.log.create_topic(name, TopicSettings(partitions=2))
