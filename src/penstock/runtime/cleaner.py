"""The cleaner: dead letters that are older than the settings say are removed, and with them those that are done.

Every open bus runs one. It looks when the bus opens, and then once an hour; the lease `dead-letters` lets one of them
work at a time. What counts is when a letter failed last, so that one that was brought back and died again is new. What
waits for its next attempt is never removed. While nothing is too old, it writes nothing.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.rows import ParkedFilter
from penstock.runtime.entrances import Host, Loop, Tenure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.clock import Clock
    from penstock.rows import Parked, Subscription

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 3600.0
BUSY_SECONDS: Final = 60.0
"""How soon to look again while another process cleans, should it end before it is done."""
PAGE_ROWS: Final = 200
SECONDS_A_DAY: Final = 86_400


class Cleaner(Loop):
    """The loop over the parked rows of all subscriptions."""

    def __init__(self, host: Host, *, owner: str, clock: Clock, jitter: Callable[[], float], keep_days: float) -> None:
        super().__init__("the cleaner of dead letters", clock, jitter)
        self._host = host
        self._tenure = Tenure(host, "dead-letters", owner, clock)
        self._keep_days = keep_days
        """0 for ever."""

    async def _round(self) -> float:
        if not self._keep_days:
            return LOOK_SECONDS
        before = self._clock.time_us() - round(self._keep_days * SECONDS_A_DAY * 1e6)
        for subscription in await self._host.call(self._host.store.cursors.subscriptions):
            if not await self._clean(subscription, before):
                return BUSY_SECONDS
        return LOOK_SECONDS

    async def _clean(self, subscription: Subscription, before: int) -> bool:
        """Remove what failed last before this time; False if that is another process's work now."""
        parked = self._host.store.parked
        wanted = ParkedFilter(
            log_id=subscription.log_id,
            subscription=subscription.name,
            states=frozenset({"dead", "done"}),
            parked_from=1,  # of one that does not say when it was parked, nobody knows how old it is
            parked_until=before,
        )
        after: tuple[int, int] | None = None
        removed = 0
        while rows := await self._host.call(parked.page, wanted, after=after, limit=PAGE_ROWS):
            after = (rows[-1].shard.partition, rows[-1].offset)
            for old in _too_old(wanted, rows, before):
                if await self._tenure.fence() is None:
                    return False
                removed += await self._host.call(parked.purge, old)
        if removed:
            logger.info(
                "subscription %r of log %s: %d dead letters are older than %g days, and removed",
                subscription.name, subscription.log_id, removed, self._keep_days,
            )  # fmt: skip
        return True

    def _fenced(self) -> None:
        self._tenure.lost()

    async def _ended(self) -> None:
        await self._tenure.release()


def _too_old(wanted: ParkedFilter, rows: Sequence[Parked], before: int) -> Iterator[ParkedFilter]:
    """Yield which of these rows failed last before this time, partition by partition."""
    offsets: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows:
        if row.last_retry_at < before:
            offsets[row.shard.partition].add(row.offset)
    for partition, mine in sorted(offsets.items()):
        yield msgspec.structs.replace(wanted, partition=partition, offsets=frozenset(mine))
