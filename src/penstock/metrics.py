"""Metrics: what is measured, under which names, as plain values; and what counts.

Nothing here belongs to a process as a whole, since several buses may live in one. Whatever has something to tell
returns *readings*; a bus gathers them when somebody asks (`Bus.metrics`), and between two questions there are only
numbers that are added to. What is not in `CATALOGUE` cannot be read, so that the table in the guide, the exporter, the
alert rules and the dashboard speak of the same names. Labels are names that people gave, and words of ours; never the
id of an event, of a process or of a key.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

PREFIX: Final = "penstock_"
PORT: Final = 9464
"""Where they are served, unless somebody says otherwise; exporters of OpenTelemetry have the same."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

LABELS: Final = ("topic", "partition", "subscription", "reason", "outcome", "policy", "version")
"""Every label there is; `version` is that of `build_info` alone."""

EXPONENT_MIN: Final = 6
EXPONENT_MAX: Final = 30
BOUNDS: Final = tuple(2**exponent / 1_000_000 for exponent in range(EXPONENT_MIN, EXPONENT_MAX + 1))
"""The upper bounds of all histograms, in seconds: powers of two from 64 microseconds to 18 minutes."""


class Buckets(NamedTuple):
    """What a histogram has counted."""

    counts: tuple[int, ...]
    """How many were at most as long as each of `BOUNDS`, and at last how many there are: each counts all before it."""
    sum: float | None
    """Of all that was measured; None where only buckets are counted."""


class Sample(NamedTuple):
    """One value of a metric."""

    labels: tuple[str, ...]
    """The values of the metric's labels, in their order."""
    value: float | Buckets


class Metric(NamedTuple):
    """A metric with all that is known of it at the moment."""

    name: str
    """With the prefix."""
    kind: Kind
    help: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]


class Family(NamedTuple):
    """What is said of a metric once and for all."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_SUBSCRIPTION: Final = ("topic", "subscription")
_SHARD: Final = ("topic", "subscription", "partition")

CATALOGUE: Final = (
    Family("build_info", "gauge", ("version",), "The version of Penstock; always 1."),
    # Publishing, by this bus.
    Family(
        "messages_published_total", "counter", ("topic",),
        "Events that this bus has stored; repeats are not counted.",
    ),
    Family("published_bytes_total", "counter", ("topic",), "Bytes of these events, headers and keys included."),
    Family(
        "publish_duration_seconds", "histogram", ("topic",),
        "How long an append took, from its sending to its answer.",
    ),
    Family(
        "publish_failures_total", "counter", ("topic", "reason"),
        "Events whose append failed: refused, surely not stored; or unknown.",
    ),
    # What a look at the store tells, whoever runs what.
    Family(
        "store_up", "gauge", (),
        "Whether the last look at the store succeeded; if not, what it would tell is missing.",
    ),
    Family("log_end_offset", "gauge", ("topic", "partition"), "The offset that the next event will get."),
    Family("subscription_lag_messages", "gauge", _SHARD, "Events at or after the cursor, to the end of the log."),
    Family(
        "subscription_oldest_unacked_age_seconds", "gauge", _SHARD,
        "How long ago the event at the cursor was appended; 0 if there is none.",
    ),
    Family("subscription_last_progress_timestamp_seconds", "gauge", _SHARD, "When the cursor was last written."),
    Family("dead_letters", "gauge", _SUBSCRIPTION, "Dead letters that were neither replayed nor purged."),
    Family(
        "parked_messages", "gauge", _SUBSCRIPTION,
        "Events that wait aside for another attempt, or behind one that does.",
    ),
    Family("metrics_shards_left_out", "gauge", (), "Partitions of subscriptions that a look had no time for."),
    Family("outbox_pending", "gauge", (), "Events in the outbox that are committed and not yet in the log."),
    Family("disk_free_bytes", "gauge", (), "Free bytes of the file system that the store is on."),
    Family("disk_size_bytes", "gauge", (), "All bytes of that file system."),
    Family(
        "store_damaged_partitions", "gauge", ("reason",),
        "Partitions where something is wrong: damaged, nothing is written; poisoned, a sync failed; "
        "unreadable, the event at a cursor cannot be read.",
    ),
    Family("fsync_duration_seconds", "histogram", (), "How long a sync of a log took, which publishers wait for."),
    # Delivery, by the consumers of this bus.
    Family("messages_delivered_total", "counter", _SUBSCRIPTION, "Events handed over to consumers, each time."),
    Family(
        "deliveries_total", "counter", (*_SUBSCRIPTION, "outcome"),
        "Events by how they left the cursor's way, once that is written; all but `parked` are final.",
    ),
    Family("messages_expired_total", "counter", _SUBSCRIPTION, "Events that expired before they were delivered."),
    Family("messages_retried_total", "counter", _SUBSCRIPTION, "Settled events that had failed before."),
    Family(
        "publish_to_ack_seconds", "histogram", _SUBSCRIPTION,
        "How long events took from their append to their ack.",
    ),
    Family("pending_acks", "gauge", _SUBSCRIPTION, "Events that are handed over and not settled."),
    Family("subscription_last_dispatched_offset", "gauge", _SHARD, "The highest offset that was handed over."),
    Family(
        "subscription_offset_gaps_total", "counter", _SUBSCRIPTION,
        "Reads that left something out, and gaps that were declared.",
    ),
    Family("process_seconds", "histogram", _SUBSCRIPTION, "How long handlers took; measured by the middleware."),
    Family(
        "process_failures_total", "counter", (*_SUBSCRIPTION, "reason"),
        "Handlers that raised, by the name of the error's class; measured by the middleware.",
    ),
    # Waking up.
    Family("dispatcher_notifier_polls_total", "counter", (), "Partitions of subscriptions woken by a notification."),
    Family("dispatcher_heartbeat_polls_total", "counter", (), "Partitions of subscriptions woken by a heartbeat."),
    Family("subscription_lag_detected_total", "counter", (), "Heartbeats that found a partition behind."),
    Family(
        "subscription_fallback_polls_total", "counter", (),
        "Of these, where no notification had come: it was missed.",
    ),
    Family(
        "subscription_creation_races_detected_total", "counter", (),
        "Partitions to which something was appended while they were being taken.",
    ),
    Family("notifier_notifications_total", "counter", (), "Notifications that came."),
    Family("notifier_task_deaths_total", "counter", (), "How often the task that takes notifications died."),
)  # fmt: skip
"""Every metric, in the order in which they are told."""

FAMILIES: Final = {family.name: family for family in CATALOGUE}


class Reading(NamedTuple):
    """A value, and what it is of."""

    name: str
    """One of the catalogue's, without the prefix."""
    value: float | Buckets
    labels: tuple[str, ...] = ()


class Source(Protocol):
    """What an exporter asks."""

    def latest_metrics(self) -> list[Metric]:
        """Return all metrics as they are now; may be called in any thread."""


def gathered(readings: Iterable[Reading]) -> list[Metric]:
    """Return readings as metrics, in the order of the catalogue; what nobody has read is not among them."""
    samples: dict[str, list[Sample]] = {}
    for reading in readings:
        samples.setdefault(reading.name, []).append(Sample(reading.labels, reading.value))
    unknown = samples.keys() - FAMILIES.keys()
    assert not unknown, f"not in the catalogue: {unknown}"
    return [
        Metric(PREFIX + family.name, family.kind, family.help, family.labels, tuple(samples[family.name]))
        for family in CATALOGUE
        if family.name in samples
    ]


# --- counting ---------------------------------------------------------------------------------


class Histogram:
    """Counts how long something took; for whatever happens once for many events. Safe for several threads."""

    __slots__ = ("_counts", "_lock", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Count one."""
        place = _place(int(seconds * 1_000_000).bit_length())
        with self._lock:
            self._counts[place] += 1
            self._sum += seconds

    def read(self) -> Buckets:
        """Return what was counted."""
        with self._lock:
            return Buckets(tuple(accumulate(self._counts)), self._sum)


def folded(by_power: Sequence[int]) -> Buckets:
    """Return counts by power of two of microseconds (0, then 1, 2 to 3, 4 to 7, and so on) as a histogram."""
    counts = [0] * (len(BOUNDS) + 1)
    for power, count in enumerate(by_power):
        counts[_place(power)] += count
    return Buckets(tuple(accumulate(counts)), None)


def _place(power: int) -> int:
    """Return the place of what has so many bits: it is less than that power of two."""
    return min(max(power - EXPONENT_MIN, 0), len(BOUNDS))
