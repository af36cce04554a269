"""Claims: what of a partition is this owner's where events go to whoever asks, and how much to claim at a time.

An event is claimed when somebody has asked for one and got none. Consumers that are quick would wait for a claim most
of the time, so that for them as many are claimed ahead as they need for a moment; for slow ones none is, since what is
claimed and not handed over is kept from others who might be free.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from penstock.engine.messages import Wish
from penstock.offsets import Range

if TYPE_CHECKING:
    from collections.abc import Iterable

QUICK_SECONDS: Final = 0.05
"""What was claimed and is used up within this time was too little …"""
SLOW_SECONDS: Final = 0.2
"""… and what lasts longer than this was too much."""
AHEAD_MAX: Final = 480_000
"""So many are claimed at a time, at most. A round number, as are those that logs are mostly written and read by: what a
claim divides is read twice."""


class Claims:
    """The claims of one shard, the log that they are of, and what is known of its other owners' claims."""

    def __init__(self, ranges: Iterable[Range], *, frontier: int, head: int) -> None:
        self._unread = deque(ranges)
        self.frontier = frontier
        """The first offset that nobody has claimed, as far as it is known."""
        self.head = head
        """Where the log ends."""
        self._ahead = 0
        """How many are to be claimed before anybody asks."""
        self._claimed_at: float | None = None
        self._claimed = 0
        """When something was claimed last, and how much."""
        self.under_way = False
        """Whether a wish is on its way."""
        self._freed = False
        """Others have given something back."""
        self._dry = False
        """The last wish was not fulfilled, though the log is longer: there is nothing to claim before it has grown."""

    @property
    def free(self) -> bool:
        """Whether more could be claimed now."""
        return (self._freed or (self.frontier < self.head and not self._dry)) and not self.under_way

    @property
    def unread(self) -> int:
        """How many events are claimed and not read."""
        return sum(map(len, self._unread))

    @property
    def next_run(self) -> Range | None:
        """What to read next."""
        return self._unread[0] if self._unread else None

    def read_to(self, position: int) -> None:
        """Note that everything before this position was read."""
        unread = self._unread
        while unread and unread[0].stop <= position:
            unread.popleft()
        if unread and unread[0].start < position:
            unread[0] = Range(position, unread[0].stop)

    def moved(self, head: int) -> None:
        """Note where the log ends."""
        self.head = max(self.head, head)
        self._dry = False

    def freed(self) -> None:
        """Note that others have given something back."""
        self._freed = True

    def wish(self, events: int, above: int, now: float) -> Wish | None:
        """Return what to claim for somebody who got nothing."""
        return self._wish(max(events, self._adapted(now)), above) if self.free else None

    def wish_ahead(self, ready: int, above: int, now: float) -> Wish | None:
        """Return what to claim while so many are still ready to be handed over."""
        if not self._ahead or not self.free or 2 * (ready + self.unread) > self._ahead:
            return None
        return self._wish(max(self._adapted(now), 1), above)

    def _adapted(self, now: float) -> int:
        """Return how much to claim at a time: what lasts neither shortly nor long."""
        if self._claimed_at is not None:
            lasted = now - self._claimed_at
            if lasted < QUICK_SECONDS:
                self._ahead = min(4 * max(self._ahead, self._claimed), AHEAD_MAX)
            elif lasted > SLOW_SECONDS:
                self._ahead //= 2
        return self._ahead

    def _wish(self, events: int, above: int) -> Wish:
        self.under_way = True
        return Wish(min(events, AHEAD_MAX), self.head, above)

    def wished(self) -> None:
        """Note that no wish is on its way any more."""
        self.under_way = False

    def take(self, ranges: Iterable[Range], frontier: int, now: float) -> None:
        """Note what a wish has brought."""
        before = self.unread
        self._unread.extend(ranges)
        claimed = self.unread - before
        self.frontier = max(self.frontier, frontier)
        self._dry = not claimed
        self._freed &= claimed > 0
        if claimed:
            self._claimed_at, self._claimed = now, claimed

    def shed(self) -> list[Range]:
        """Have nothing any more that was not read; returns it."""
        shed = list(self._unread)
        self._unread.clear()
        self._ahead = 0
        return shed
