"""Tally: what the consumers of a process have done with the events of one subscription, in numbers.

It outlives consumers, seats and engines, and is added to once for a group of events: when they are handed over, and
when a step that settles them is on the medium. What is settled and never written is not counted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from penstock.engine.progress import LATENCIES
from penstock.engine.states import Outcome
from penstock.metrics import Histogram, Reading, folded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from penstock.engine.messages import Step
    from penstock.runtime.dispatcher import Dispatcher

TALLIES_MAX: Final = 10_000
"""So many subscriptions are remembered; beyond that, those that nobody consumes are forgotten, the oldest first."""
REASONS_MAX: Final = 20
"""So many kinds of failures of a subscription are told apart …"""
OTHER_REASONS: Final = "other"
"""… and this is what all others are called."""


class Tally:
    """The counts of one subscription."""

    __slots__ = (
        "delivered",
        "failures",
        "gaps",
        "latencies",
        "outcomes",
        "processing",
        "retried",
        "subscription",
        "topic",
    )

    def __init__(self, topic: str, subscription: str) -> None:
        self.topic = topic
        self.subscription = subscription
        self.delivered = 0
        """Handed over, each time."""
        self.outcomes: Counter[Outcome] = Counter(dict.fromkeys(Outcome, 0))
        self.retried = 0
        self.latencies = [0] * LATENCIES
        """Acked events by power of two of the microseconds since their append."""
        self.gaps = 0
        """Of engines that are no more."""
        self.processing: Histogram | None = None
        """How long handlers took, if somebody measures it …"""
        self.failures: Counter[str] = Counter()
        """… and how many of them raised, by kind."""

    def wrote(self, step: Step) -> None:
        """Count a step that is on the medium."""
        for outcome, offsets in step.outcomes.items():
            self.outcomes[outcome] += len(offsets)
        self.retried += step.retried
        if step.latencies:
            self.latencies = [before + more for before, more in zip(self.latencies, step.latencies, strict=True)]

    def processed(self, seconds: float, failure: BaseException | None = None) -> None:
        """Count one run of a handler, and what it raised."""
        if self.processing is None:
            self.processing = Histogram()
        self.processing.observe(seconds)
        if failure is not None:
            kind = type(failure).__name__
            known = kind in self.failures or len(self.failures) < REASONS_MAX
            self.failures[kind if known else OTHER_REASONS] += 1

    def readings(self) -> Iterator[Reading]:
        """Yield what was counted."""
        labels = (self.topic, self.subscription)
        yield Reading("messages_delivered_total", self.delivered, labels)
        for outcome, count in self.outcomes.items():
            yield Reading("deliveries_total", count, (*labels, outcome.value))
        yield Reading("messages_expired_total", self.outcomes[Outcome.EXPIRED], labels)
        yield Reading("messages_retried_total", self.retried, labels)
        yield Reading("publish_to_ack_seconds", folded(self.latencies), labels)
        if self.processing is not None:
            yield Reading("process_seconds", self.processing.read(), labels)
        for kind, count in self.failures.items():
            yield Reading("process_failures_total", count, (*labels, kind))


class Tallies:
    """The tallies of a process, by topic and subscription."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Tally] = {}

    def __iter__(self) -> Iterator[Tally]:
        return iter(self._known.values())

    def of(self, topic: str, subscription: str, in_use: Callable[[], Collection[Tally]]) -> Tally:
        """Return the tally of a subscription, the same at every call; `in_use` says which must not be forgotten."""
        found = self._known.get((topic, subscription))
        if found is None:
            if len(self._known) >= TALLIES_MAX:
                used = in_use()
                idle = next((key for key, tally in self._known.items() if tally not in used), None)
                if idle is not None:
                    del self._known[idle]
            found = self._known[topic, subscription] = Tally(topic, subscription)
        return found


MONITORED: Final = (
    "dispatcher_heartbeat_polls_total",
    "dispatcher_notifier_polls_total",
    "subscription_lag_detected_total",
    "subscription_fallback_polls_total",
    "subscription_creation_races_detected_total",
    "notifier_task_deaths_total",
    "notifier_notifications_total",
)
"""The counts of the lag monitor that are metrics."""


def delivery_readings(dispatcher: Dispatcher) -> Iterator[Reading]:
    """Yield what a process delivers, and has delivered; called in its event loop."""
    for name in MONITORED:
        yield Reading(name, getattr(dispatcher.monitor.counts, name))
    in_hand: Counter[Tally] = Counter()
    gaps: Counter[Tally] = Counter()
    last: dict[tuple[str, str, str], int] = {}
    for member in dispatcher.members:
        tally = member.tally
        for seat in member.seats:
            if seat.engine is None:
                continue
            in_hand[tally] += seat.engine.in_flight
            gaps[tally] += seat.engine.gaps
            shard = (tally.topic, tally.subscription, str(seat.shard.partition))
            if seat.engine.last_dispatched >= 0:
                last[shard] = max(last.get(shard, -1), seat.engine.last_dispatched)
    for tally in dispatcher.tallies:
        labels = (tally.topic, tally.subscription)
        yield from tally.readings()
        yield Reading("pending_acks", in_hand[tally], labels)
        yield Reading("subscription_offset_gaps_total", tally.gaps + gaps[tally], labels)
    for shard, offset in last.items():
        yield Reading("subscription_last_dispatched_offset", offset, shard)
