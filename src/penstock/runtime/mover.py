"""The mover: what was staged in the application's own transactions enters the log, once.

A bus that was given an outbox runs it, and a lease named for the outbox lets one process work at a time. There is
nothing that could tell it of a commit, so it looks every 100 ms, which costs one lookup in the application's file.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.errors import UsageError
from penstock.ports import Outbox
from penstock.rows import Appended, Partition
from penstock.runtime.entrances import PAGE_ROWS, Host, Loop, Move, Tenure, append, partition_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor
    from contextlib import AbstractContextManager

    from penstock.clock import Clock
    from penstock.rows import Fence, Staged, TopicInfo

R = TypeVar("R")

LOOK_SECONDS = 0.1
"""How often the mover looks for committed rows."""

STANDBY_SECONDS = 0.5
"""How often it asks for the lease that another process holds, while rows wait."""


class MovableOutbox(Outbox, Protocol):
    """What the mover needs of an outbox beside the port."""

    def waiting(self) -> bool:
        """Say whether there may be something to claim; cheap."""

    def claimed(self, fence: Fence) -> int:
        """Return the highest sequence that was ever claimed, and let nobody of a lower epoch claim from now on."""

    def set_aside(self, reasons: Mapping[int, str], fence: Fence) -> None:
        """Keep rows apart that cannot enter the log, with the reason of each."""


class Topics(Protocol):
    """What knows which log a topic's name means."""

    async def info(self, name: str) -> TopicInfo:
        """Return the topic as the store has it; `UnknownTopic` if there is none."""

    def forgotten_if_deleted(self, name: str) -> AbstractContextManager[None]:
        """Use the topic in this block; `TopicDeleted` there makes its name be resolved anew."""


class Mover(Loop):
    """The loop over an outbox. Its calls block, so they are made by `executor`; None makes them at once."""

    def __init__(
        self,
        outbox: MovableOutbox,
        host: Host,
        topics: Topics,
        *,
        owner: str,
        clock: Clock,
        jitter: Callable[[], float],
        executor: Executor | None,
    ) -> None:
        super().__init__("the mover of the outbox", clock, jitter)
        self._outbox = outbox
        self._host = host
        self._topics = topics
        self._owner = owner
        self._executor = executor
        self._tenure: Tenure | None = None
        self._claimed = 0
        """The highest sequence that anybody has claimed; true while this lease lasts."""
        self._epoch = -1

    async def _call(self, function: Callable[..., R], *args: Any) -> R:
        if self._executor is None:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args))

    async def _round(self) -> float:
        if not await self._call(self._outbox.waiting):
            return LOOK_SECONDS
        if self._tenure is None:
            producer = await self._call(lambda: self._outbox.producer)
            self._tenure = Tenure(self._host, f"outbox:{producer.hex()}", self._owner, self._clock)
        fence = await self._tenure.fence()
        if fence is None:
            return STANDBY_SECONDS
        if fence.epoch != self._epoch:
            self._claimed, self._epoch = await self._call(self._outbox.claimed, fence), fence.epoch
        rows = await self._call(self._outbox.claim, PAGE_ROWS, fence)
        producer = await self._call(lambda: self._outbox.producer)
        repeated_to, self._claimed = self._claimed, max([self._claimed, *(row.sequence for row in rows)])
        moved, reasons, trouble = await self._append(rows, producer, repeated_to)
        if reasons:
            await self._call(self._outbox.set_aside, reasons, fence)
        if moved:
            await self._call(self._outbox.done, moved, fence)
        if trouble is not None:
            raise trouble
        return 0.0

    async def _append(
        self, rows: list[Staged], producer: bytes, repeated_to: int
    ) -> tuple[list[int], dict[int, str], Exception | None]:
        """Append claimed rows; return which are in the log, why others never will be, and what to try again for."""
        found = {name: await self._found(name) for name in dict.fromkeys(row.topic for row in rows)}
        moves: list[Move] = []
        outcomes: list[tuple[Staged, Appended | Exception]] = []
        for row in rows:
            info = found[row.topic]
            if isinstance(info, Exception):
                outcomes.append((row, info))
            else:
                # Without a key it must be the same partition at every attempt, too.
                number = partition_of(row.event, info.settings.partitions, keyless=row.sequence)
                moves.append(Move(Partition(info.log_id, number), row.event, producer, row.sequence))
        moving = [row for row in rows if not isinstance(found[row.topic], Exception)]
        outcomes += zip(moving, await append(self._host, moves), strict=True)
        return self._sorted(outcomes, repeated_to)

    async def _found(self, topic: str) -> TopicInfo | Exception:
        try:
            return await self._topics.info(topic)
        except Exception as error:  # noqa: BLE001 - it is the outcome of this topic's rows, and of no others
            return error

    def _sorted(
        self, outcomes: list[tuple[Staged, Appended | Exception]], repeated_to: int
    ) -> tuple[list[int], dict[int, str], Exception | None]:
        moved: list[int] = []
        reasons: dict[int, str] = {}
        trouble: Exception | None = None
        for row, outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, UsageError):
                trouble = outcome
                with suppress(type(outcome)), self._topics.forgotten_if_deleted(row.topic):
                    raise outcome
            elif (reason := _reason(outcome, repeated=row.sequence <= repeated_to)) is not None:
                reasons[row.sequence] = reason
            else:
                moved.append(row.sequence)
        return moved, reasons, trouble

    def _fenced(self) -> None:
        if self._tenure is not None:
            self._tenure.lost()

    async def _ended(self) -> None:
        if self._tenure is not None:
            await self._tenure.release()


def _reason(outcome: Appended | UsageError, *, repeated: bool) -> str | None:
    """Return why a row can never enter the log; None if it is there."""
    refusal = outcome if isinstance(outcome, UsageError) else outcome.refused
    if refusal is not None:
        return f"{type(refusal).__name__}: {refusal}"
    if isinstance(outcome, Appended) and outcome.duplicate and not repeated:
        # Nobody has claimed it before, so nobody can have appended it: that was another row of this number.
        return (
            "the log has another event of this outbox and sequence, so the file was restored from an older copy, or "
            "copied: see SqliteOutbox.renew_identity, then retry what the log lacks"
        )
    return None
