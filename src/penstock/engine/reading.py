"""Reading: where the log is read next, and whether what came back is what was expected.

Offsets are dense, so the next one is always known. What a read leaves out is read again, and declared as a gap only
when it is left out once more; nothing is passed over in silence, and nothing twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.engine.messages import Read
from penstock.offsets import Gap

if TYPE_CHECKING:
    from penstock.engine.messages import Chunk, ReadDone

REREADS: Final = 2
"""How often a read that leaves something out is repeated before the hole is declared."""


class Reading:
    """The reading of a log by one shard: one read at a time."""

    def __init__(self, position: int, head: int) -> None:
        self.position = position
        """The next offset to read."""
        self.head = head
        self.retry_at = 0.0
        """After a read that failed: not before this time."""
        self.under_way = False
        self.gaps = 0
        """How many reads left something out, or found a hole."""
        self._empty = False
        self._abandoned = False
        """Whether the read that is under way was asked for before a new beginning."""
        self._hole = (-1, 0)

    @property
    def due(self) -> bool:
        """Whether there is something to read, and nothing is known to stand against it but time."""
        return self.position < self.head and not self.under_way and not self._empty

    def ask(self, events_max: int, bytes_max: int, own_max: int) -> Read:
        """Begin to read."""
        self.under_way = True
        return Read(self.position, events_max, bytes_max, own_max)

    def moved(self, head: int) -> None:
        """Note where the log ends; a read that found nothing is worth repeating."""
        self.head = max(self.head, head)
        self._empty = False

    def failed(self, retry_at: float) -> None:
        """Note that a read failed."""
        self.under_way = self._abandoned = False
        self.retry_at = retry_at

    def done(self, told: ReadDone) -> list[Chunk | Gap]:
        """Return what a read brought from the position on, with every hole in it as a gap. Each is to be `passed`."""
        self.under_way = False
        abandoned, self._abandoned = self._abandoned, False
        if abandoned or told.start != self.position:
            return []  # the log was trimmed meanwhile, or what was asked for is others' by now
        found: list[Chunk | Gap] = []
        at = self.position
        for item in told.items:
            span = item.range if isinstance(item, Gap) else item.span
            if span.stop <= at:
                continue
            if span.start > at:
                self.gaps += 1
                if not self._is_lost(at):
                    return found
                found.append(Gap(at, span.start, "the log returned nothing for these offsets"))
            if isinstance(item, Gap):
                self.gaps += 1
                item = Gap(max(at, span.start), span.stop, item.reason)  # noqa: PLW2901 - the part of it that is ahead
            elif span.start < at:
                continue  # it cannot be cut, and is read again from where it must begin
            found.append(item)
            at = span.stop
        # A read that brought nothing new would be repeated for ever; the next heartbeat is soon enough.
        self._empty = not found
        return found

    def _is_lost(self, at: int) -> bool:
        where, times = self._hole
        self._hole = (at, times + 1 if where == at else 1)
        return self._hole[1] > REREADS

    def trimmed(self, first: int) -> Gap | None:
        """Note that the log begins here by now; returns what can never be read."""
        self.under_way = self._abandoned = False
        if first <= self.position:
            return None
        self.gaps += 1
        return Gap(self.position, first, "trimmed before they were delivered")

    def restart(self, position: int) -> None:
        """Begin anew, anywhere, with nothing to read; what is being read is not wanted any more."""
        self._abandoned = self.under_way
        self.position = self.head = position
        self._empty = False

    def passed(self, stop: int) -> None:
        """Go on from here."""
        self.position = stop
        self.head = max(self.head, stop)
