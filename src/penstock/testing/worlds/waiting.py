"""Waiting: what is left to do in a world, in words and in numbers.

A subscription is done when its cursor has passed everything and nothing of it waits aside. What was scheduled and what
was staged has to enter its topic first. All of it is read from the store, so that nothing counts as done before it is
durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.rows import ParkedFilter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.bus.bus import Parts
    from penstock.bus.handlers import Subscriber
    from penstock.runtime.seat import Seat
    from penstock.testing.worlds.lives import Retries
    from penstock.testing.worlds.medium import Medium
    from penstock.testing.worlds.watching import Watching


class Left(NamedTuple):
    """What a subscription has not done."""

    subscriber: Subscriber
    lag: int
    """So many events its cursor has not passed …"""
    parked: int
    """… and so many wait aside."""
    paused: bool


class Waiting:
    """Looks at a world for what is left."""

    def __init__(self, medium: Medium, watching: Watching, retries: Retries) -> None:
        self._medium = medium
        self._watching = watching
        self._retries = retries

    def left(self) -> list[Left]:
        """Return the subscriptions of the bus's own handlers that are not done."""
        store = self._medium.store
        found = []
        for subscriber in self._watching.subscribers.values():
            info = self._medium.topic(subscriber.topic.name)
            subscription = None if info is None else store.cursors.subscription(info.log_id, subscriber.name)
            if info is None or subscription is None:
                continue
            heads = {partition.number: store.log.bounds(partition).stop for partition in info.partitions}
            cursors = store.cursors.load(info.log_id, subscriber.name)
            lag = sum(max(heads[cursor.shard.partition] - cursor.next_offset, 0) for cursor in cursors)
            wanted = ParkedFilter(log_id=info.log_id, subscription=subscriber.name)
            parked = store.parked.count(wanted)["waiting"]
            if lag or parked:
                found.append(Left(subscriber, lag, parked, bool(subscription.policy.get("paused"))))
        return found

    def scheduled(self) -> int:
        """Return how many delayed publishes wait; at most a thousand are counted."""
        return len(self._medium.store.schedule.page(limit=1_000))

    def next_due(self, parts: Parts, now: float, now_us: int) -> float | None:
        """Return in how many seconds something is due by itself: a delayed publish, a retry, an event of a rate."""
        times = []
        if (due_at := self._medium.store.schedule.next_due()) is not None:
            times.append((due_at - now_us) / 1_000_000)
        dispatcher = parts.deliveries.running
        if dispatcher is not None and (timer := dispatcher.monitor.next_timer()) is not None:
            times.append(timer - now)
        return max(min(times), 0.0) if times else None

    def is_still(self, parts: Parts) -> bool:
        """Say whether nothing can happen but what has a time of its own.

        Everything was read and what became of it is written; whatever is not settled is in hand, or waits to be tried
        again. It holds for a bus that delivers nothing, too.
        """
        dispatcher = parts.deliveries.running
        if dispatcher is None:
            return True
        if dispatcher.waiting or any(crew.restless for crew in dispatcher.crews.values()):
            return False
        return all(self._is_still(seat) for member in dispatcher.members for seat in member.seats)

    def _is_still(self, seat: Seat) -> bool:
        engine = seat.engine
        if engine is None or seat.trouble or engine.progress.dirty or engine.progress.writing:
            return False
        return engine.read_position >= self._medium.store.log.bounds(seat.partition).stop

    def only_outdated(self, left: Iterable[Left]) -> bool:
        """Say whether nothing is left but lanes that wait for an upgrade."""
        outdated = {subscription for subscription, _ in self._watching.outdated}
        return bool(outdated) and not self.scheduled() and all(each.subscriber.name in outdated for each in left)

    def told(self, parts: Parts, left: Iterable[Left]) -> str:
        """Say what is left, and why."""
        said = [self._told(each, parts) for each in left]
        said += [
            f"handler {run.name} runs, at {run.delivery.position}, attempt {run.delivery.attempt}"
            for run in self._watching.busy
        ]
        if scheduled := self.scheduled():
            said.append(f"delayed publishes that wait for their time: {scheduled:,}")
        if staged := parts.entrances.staged():
            said.append(f"staged events that were not moved: {staged:,}")
        if self._retries.waiting:
            said.append(f"publishers that wait to send again what failed: {self._retries.waiting:,}")
        return "; ".join(said) or "nothing that is known is left"

    def _told(self, left: Left, parts: Parts) -> str:
        said = []
        if left.lag:
            said.append(f"not settled: {left.lag:,}")
        if left.parked:
            said.append(f"aside for another attempt, or behind one: {left.parked:,}")
        if left.paused:
            said.append("it is paused")
        runner = parts.subscribers.runner
        for handling in runner.handlings if runner is not None else []:
            if handling.subscriber is left.subscriber:
                said += [
                    f"partition {partition}, {what}: {why}"
                    for partition, trouble in handling.consumer.trouble.items()
                    for what, why in trouble.items()
                ]
        for (subscription, position), run in self._watching.outdated.items():
            if subscription == left.subscriber.name and position.topic == left.subscriber.topic.name:
                said.append(f"{position} waits for an upgrade: {run.error}")
        return f"{left.subscriber}: {', '.join(said)}"
