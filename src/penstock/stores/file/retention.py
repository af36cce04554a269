"""Retention: how much of a partition may go.

Whole segments go, the oldest first, and only sealed ones. By age or size they go as far as every protected subscription
has passed them. Beyond the hard cap they go whether anybody needs them or not, and an alert says so before.

Age is measured by the wall clock, which can be wrong. While it disagrees with the boot clock by more than an hour,
nothing goes by age, and an alarm is logged: a wrong date must not empty a log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.clock import Clock
    from penstock.rows import Retention
    from penstock.stores.file.log import Handle
    from penstock.stores.file.tail import Tail

logger = logging.getLogger(__name__)

DRIFT_SECONDS_MAX: Final = 3600.0


class Drift:
    """Compares the wall clock with the boot clock, from the moment when it was made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._difference = self._measure()

    def _measure(self) -> float:
        return self._clock.time_us() / 1e6 - self._clock.monotonic()

    def trusted_now(self) -> int | None:
        """Return the wall time in microseconds, or None while it cannot be trusted."""
        drift = self._measure() - self._difference
        if abs(drift) > DRIFT_SECONDS_MAX:
            logger.error(
                "the wall clock and the boot clock disagree by %.0f s since this store was opened: nothing is removed "
                "by age until they agree, or the store is opened anew",
                drift,
            )
            return None
        return self._clock.time_us()


def passed_by_retention(handle: Handle, tail: Tail, retention: Retention, *, protected: int, now_us: int | None) -> int:
    """Return the offset below which everything may go."""
    # One behind the active was made by a roll that came no further.
    segments = [(name, size) for name, size in handle.files.sizes().items() if name.base <= tail.segment_base]
    total = sum(size for _, size in segments)
    before = tail.first
    for index, (name, size) in enumerate(segments):
        if index + 1 < len(segments):
            end = segments[index + 1][0].base
            newest = handle.reader.file(segments[index + 1][0]).facts.max_time
        else:
            end, newest = tail.durable_end, tail.max_time
        too_much = retention.bytes_max is not None and total > retention.bytes_max and index + 1 < len(segments)
        too_old = retention.age_seconds is not None and _is_older(newest, retention.age_seconds, now_us)
        over_cap = retention.hard_bytes_max is not None and total > retention.hard_bytes_max
        if end <= name.base or end > tail.durable_end:
            break
        if end > protected and over_cap and index + 1 < len(segments):
            logger.error(
                "%s: %d bytes exceed the hard cap of %d; offsets %d to %d are removed although a subscription has only "
                "passed %d",
                handle.files,
                total,
                retention.hard_bytes_max,
                before,
                end,
                protected,
            )
        elif end > protected or not (too_much or too_old or over_cap):
            break
        before, total = end, total - size
    return before


def _is_older(newest_us: int, age_seconds: float, now_us: int | None) -> bool:
    return now_us is not None and now_us - newest_us > age_seconds * 1e6
