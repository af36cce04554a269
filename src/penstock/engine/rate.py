"""Rate: how many events may be handed over now. It delays, and never consumes what is not handed over."""

from __future__ import annotations

from typing import Final

BURST_SECONDS: Final = 0.1
"""So much of a second's worth may come at once, after a silence; but always one event."""
ANY: Final = 1 << 62


class Rate:
    """A bucket of tokens, one an event, filled at the rate."""

    def __init__(self, per_second: float | None, now: float) -> None:
        self._per_second = per_second
        self._tokens = 1.0
        self._at = now

    def change(self, per_second: float | None, now: float) -> None:
        """Go on at another rate, from now on."""
        self._fill(now)
        self._per_second = per_second
        self._tokens = min(self._tokens, self._most())

    def _most(self) -> float:
        return 1.0 if self._per_second is None else max(self._per_second * BURST_SECONDS, 1.0)

    def _fill(self, now: float) -> None:
        if self._per_second is not None:
            self._tokens = min(self._tokens + (now - self._at) * self._per_second, self._most())
        self._at = now

    def allowed(self, now: float) -> int:
        """Return how many events may be handed over now."""
        if self._per_second is None:
            return ANY
        self._fill(now)
        # What floats leave out must not cost a further wait of a microsecond.
        return int(self._tokens + 1e-6)

    def take(self, count: int) -> None:
        """Note that so many were handed over."""
        if self._per_second is not None:
            self._tokens = max(self._tokens - count, 0.0)

    def free_at(self) -> float | None:
        """Return when the next event may be handed over; None if any may."""
        if self._per_second is None:
            return None
        return self._at if self._tokens + 1e-6 >= 1.0 else self._at + (1.0 - self._tokens) / self._per_second
