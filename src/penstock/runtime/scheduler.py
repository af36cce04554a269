"""The scheduler: delayed publishes enter the log when they are due, once, whichever process is running then.

Every open bus runs one, and the lease `schedule` lets one of them work at a time. Between two looks it sleeps until the
next row is due, but never for long, because another process may add an earlier one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, TopicDeleted, UsageError
from penstock.rows import Partition
from penstock.runtime.entrances import PAGE_ROWS, Host, Loop, Move, Tenure, append

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.clock import Clock
    from penstock.rows import Scheduled

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How long the scheduler sleeps at most."""


class Scheduler(Loop):
    """The loop over the store's `Schedule`."""

    def __init__(self, host: Host, *, owner: str, clock: Clock, jitter: Callable[[], float]) -> None:
        super().__init__("the scheduler of delayed publishes", clock, jitter)
        self._host = host
        self._tenure = Tenure(host, "schedule", owner, clock)
        self._refused: set[str] = set()
        """Rows that the log will not take. They stay in the schedule, where they can be seen."""

    async def _round(self) -> float:
        schedule = self._host.store.schedule
        due_at = await self._host.call(schedule.next_due)
        now = self._clock.time_us()
        if due_at is None or due_at > now:
            return LOOK_SECONDS if due_at is None else min(LOOK_SECONDS, (due_at - now) / 1_000_000)
        fence = await self._tenure.fence()
        if fence is None:
            return LOOK_SECONDS
        claimed = await self._host.call(schedule.claim, now, PAGE_ROWS + len(self._refused), fence)
        rows = [row for row in claimed if row.id not in self._refused]
        if not rows:
            return LOOK_SECONDS
        finished, trouble = await self._append(rows)
        if finished:
            await self._host.call(schedule.done, finished, fence)
        if trouble is not None:
            raise trouble
        return 0.0

    async def _append(self, rows: list[Scheduled]) -> tuple[list[str], Exception | None]:
        """Append claimed rows; return those that are finished, and what to try again for."""
        moves = [Move(Partition(row.log_id, row.partition), row.event, row.producer, row.sequence or 0) for row in rows]
        finished: list[str] = []
        trouble: Exception | None = None
        for row, answer in zip(rows, await append(self._host, moves), strict=True):
            refusal = answer if isinstance(answer, Exception) else answer.refused
            if refusal is None or isinstance(refusal, TopicDeleted):
                finished.append(row.id)  # a deleted topic takes what was scheduled for it along
            elif isinstance(answer, Exception) and not isinstance(answer, UsageError):
                trouble = answer
            else:
                self._refuse(row, refusal)
        return finished, trouble

    def _refuse(self, row: Scheduled, refusal: Exception) -> None:
        assert isinstance(refusal, PenstockError)
        logger.error("delayed publish %s cannot enter log %s and stays scheduled: %s", row.id, row.log_id, refusal)
        self._refused.add(row.id)

    def _fenced(self) -> None:
        self._tenure.lost()

    async def _ended(self) -> None:
        await self._tenure.release()
