"""Delayed publishes: an event that is stored now, and enters its topic's log when its time has come.

It waits in the store's schedule, so it survives every process. Its offset is given when it enters the log, like any
other's; before that nobody can read it. It can be cancelled until the scheduler has taken it up.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from penstock.clock import Clock, datetime_to_us, seconds, us_to_datetime
from penstock.errors import PenstockError, ProducerExpired, PublishUnknown, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.ports import Backend
    from penstock.rows import Scheduled

AHEAD_MAX = timedelta(days=3653)
"""How far ahead an event may be scheduled: ten years."""


@dataclass(frozen=True, slots=True)
class ScheduledReceipt:
    """Proof that a delayed publish is stored, and what to cancel it by."""

    id: str
    topic: str
    due_at: datetime
    """When it enters the log, in UTC."""


def due_us(delay: float | timedelta | None, at: datetime | None, now_us: int) -> int:
    """Return when an event is due that is published with these, in microseconds since 1970 UTC."""
    if at is None:
        due = now_us + round(seconds(0 if delay is None else delay, "delay") * 1_000_000)
    elif delay is not None:
        raise UsageError("give `delay` or `at`, not both")
    elif not isinstance(at, datetime):
        raise UsageError(f"`at` is a datetime with a time zone, not {type(at).__name__}")
    else:
        due = datetime_to_us(at)
    if due > now_us + AHEAD_MAX // timedelta(microseconds=1):
        raise UsageError(f"an event is scheduled at most {AHEAD_MAX.days:,} days ahead")
    return due


def delayed_id(now_us: int, number: int) -> str:
    """Return a new id: 32 hexadecimal digits, of when, the how manieth, and chance.

    The schedule is ordered by due time and id, so that what one bus schedules for the same moment keeps its order.
    """
    return f"{now_us:014x}{number & 0xFFFFFF:06x}{secrets.token_hex(6)}"


def number_in(id_: str) -> int:
    """Return the how manieth an id is: what is not chance in it, beside the time."""
    return int(id_[14:20], 16)


class Delayed:
    """A delayed publish, to be sent, and sent again if its outcome is unknown."""

    def __init__(
        self,
        topic: str,
        row: Scheduled,
        backend: Backend,
        clock: Clock,
        scheduling: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.topic = topic
        self._row = row
        self._backend = backend
        self._clock = clock
        self._scheduling = scheduling
        self._sent = False

    def __len__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return f"<Delayed publish {self._row.id} for {self.topic!r}>"

    async def send(self, *, timeout: float | timedelta | None = None) -> ScheduledReceipt:  # noqa: ASYNC109 - see Prepared
        """Store it in the schedule, under the same id every time, and return its receipt.

        It may be repeated until it is due. Later it may be in the log already, and its id forgotten: `ProducerExpired`.
        """
        if self._sent and self._clock.time_us() >= self._row.due_at:
            raise ProducerExpired(
                f"delayed publish {self._row.id} was sent before and is due: nobody can tell whether it is published "
                f"already; look for it in {self.topic!r}"
            )
        self._sent = True
        limit = None if timeout is None else seconds(timeout, "timeout")
        try:
            with self._scheduling():
                async with asyncio.timeout(limit):
                    await self._backend.schedule_add([self._row])
        except TimeoutError:
            raise PublishUnknown(self.topic, 1, self, f"no answer within {limit} s") from None
        except PenstockError:
            raise
        except Exception as error:
            raise PublishUnknown(self.topic, 1, self, repr(error)) from error
        return ScheduledReceipt(self._row.id, self.topic, us_to_datetime(self._row.due_at))
