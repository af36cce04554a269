"""`Notifier`: a hint that a partition has grown, of stores that have one.

A hint may be lost, and may come in another thread. So each test goes on until a hint has come, and gives up
only after so many attempts that a working notifier cannot have lost them all.
"""

from __future__ import annotations

import threading

import pytest

from penstock.ports import Notifier, Store
from penstock.rows import Partition, TopicInfo
from penstock.testing.conformance.builders import PLENTY, a_part, append, fill, only_events
from penstock.testing.conformance.opening import StoreOpening

ATTEMPTS = 100
PATIENCE_SECONDS = 0.1


def notifier_of(store: Store) -> Notifier:
    """Return the store's notifier, or skip."""
    if store.notifier is None:
        pytest.skip("notifier: capability of stores that wake up their listeners")
    return store.notifier


def append_until(store: Store, partition: Partition, hinted: threading.Event) -> None:
    """Append event after event until the hint has come."""
    for _ in range(ATTEMPTS):
        fill(store, partition, 1)
        if hinted.wait(PATIENCE_SECONDS):
            return
    pytest.fail(f"none of {ATTEMPTS} appends was followed by a hint")


class NotifierConformance(StoreOpening):
    """The `Notifier` port."""

    def test_a_hint_comes_after_the_append_is_readable(self, store: Store, partition: Partition) -> None:
        seen: list[tuple[Partition, int]] = []
        hinted = threading.Event()

        def callback(where: Partition) -> None:
            found = store.log.read(where, 0, bytes_max=PLENTY)
            seen.append((where, sum(len(only_events(item)) for item in found)))
            hinted.set()

        stop = notifier_of(store).listen(callback)
        append_until(store, partition, hinted)
        stop()
        assert seen[0][0] == partition
        assert seen[0][1] > 0

    def test_a_hint_can_be_given_by_hand_and_says_which_partition(self, store: Store, topic: TopicInfo) -> None:
        notifier, seen, hinted = notifier_of(store), [], threading.Event()

        def callback(where: Partition) -> None:
            seen.append(where)
            hinted.set()

        stop = notifier.listen(callback)
        for _ in range(ATTEMPTS):
            notifier.notify(topic.partitions[1])
            if hinted.wait(PATIENCE_SECONDS):
                break
        stop()
        assert set(seen) == {topic.partitions[1]}

    def test_a_listener_that_stopped_is_called_no_more_and_others_are(self, store: Store, partition: Partition) -> None:
        notifier, called, hinted = notifier_of(store), threading.Event(), threading.Event()

        def callback(_: Partition) -> None:
            called.set()

        stop_first, stop_second = notifier.listen(callback), notifier.listen(callback)
        stop_other = notifier.listen(lambda _: hinted.set())
        stop_first()
        stop_first()  # once more changes nothing, not for the second registration either
        append_until(store, partition, called)
        stop_second()
        called.clear()
        hinted.clear()
        append_until(store, partition, hinted)
        assert not called.is_set()
        stop_other()

    def test_a_listener_that_fails_harms_neither_the_publisher_nor_other_listeners(
        self, store: Store, partition: Partition
    ) -> None:
        notifier, hinted = notifier_of(store), threading.Event()

        def failing(_: Partition) -> None:
            raise ZeroDivisionError("a listener's own fault")

        stops = [notifier.listen(failing), notifier.listen(lambda _: hinted.set()), notifier.listen(failing)]
        append_until(store, partition, hinted)
        notifier.notify(partition)
        [answer] = append(store, partition, a_part(b"one"))
        assert answer.refused is None
        for stop in stops:
            stop()
