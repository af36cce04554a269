"""The hybrid lag monitor: one for all shards of a process.

**Fast path**: the store's notifier. A hint wakes exactly the shards of its partition, after the ends of all partitions
were looked at in one read. The task that takes hints is supervised: should it die, it is started again, and counted.

**Safety net**: heartbeats. Each shard is looked at once per heartbeat of its subscription: if the log is longer than
what it has read and it wants more, or one of its timers is due, it is woken. All shards are looked at together, in
columns. A heartbeat that comes late is not made up for. What a heartbeat finds that no hint had told is counted as a
missed notification.

So every durable event is offered within one heartbeat even if every hint is lost, and at once otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.engine.lag import pulse
from penstock.engine.messages import HeadMoved, Tick
from penstock.errors import TopicDeleted
from penstock.runtime.entrances import Host, Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.clock import Clock
    from penstock.engine.shard import Shard as Engine
    from penstock.ports import Heads
    from penstock.rows import Partition
    from penstock.runtime.seat import Seat

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 1.0
HEALTH_SECONDS: Final = 60.0
"""How often the log is told how hints do."""


@dataclass(slots=True)
class MonitorCounts:
    """What happened, since the process began; the names are those of the metrics."""

    dispatcher_heartbeat_polls_total: int = 0
    """Shards woken by a heartbeat."""
    dispatcher_notifier_polls_total: int = 0
    """Shards woken by a notification."""
    subscription_lag_detected_total: int = 0
    """Heartbeats that found a shard behind."""
    subscription_fallback_polls_total: int = 0
    """Of these, those where no notification had come since the last look: as far as one can tell, it was missed."""
    subscription_creation_races_detected_total: int = 0
    """Shards to whose log something was appended while they were being taken."""
    notifier_task_deaths_total: int = 0
    notifier_notifications_total: int = 0
    passes: int = 0


class Monitor(Loop):
    """The loop of heartbeats, and the supervisor of the notifier's task."""

    def __init__(self, host: Host, *, clock: Clock, jitter: Callable[[], float]) -> None:
        super().__init__("the lag monitor", clock, jitter)
        self._host = host
        self.counts = MonitorCounts()
        self._seats: list[Seat | None] = []
        self._free: list[int] = []
        self._grow(64)
        self._partitions: dict[Partition, int] = {}
        # Whatever is gone through here is ordered: who is woken first must not depend on addresses in memory.
        self._of_partition: dict[Partition, dict[Seat, None]] = {}
        self._reader: Heads | None = None
        self._changed: dict[Seat, None] = {}
        """Shards of which the columns are to be brought up to date."""
        self._next_look = math.inf
        self._hints: dict[Partition, None] = {}
        self._hinted = asyncio.Event()
        self._scheduled = False
        self._listening: Callable[[], None] | None = None
        self._notifier: asyncio.Task[None] | None = None
        self._health_at = 0.0

    def _grow(self, size: int) -> None:
        def longer(name: str, fill: float, kind: type) -> None:
            before = getattr(self, name, None)
            column: np.ndarray[Any, Any] = np.full(size, fill, kind)
            if before is not None:
                column[: len(before)] = before
            setattr(self, name, column)

        self._free += range(size - 1, len(self._seats) - 1, -1)
        self._seats += [None] * (size - len(self._seats))
        self._positions: np.ndarray[tuple[int], np.dtype[np.int64]]
        self._heads_of: np.ndarray[tuple[int], np.dtype[np.int64]]
        self._wanting: np.ndarray[tuple[int], np.dtype[np.bool_]]
        self._timers: np.ndarray[tuple[int], np.dtype[np.float64]]
        self._beats: np.ndarray[tuple[int], np.dtype[np.float64]]
        self._due: np.ndarray[tuple[int], np.dtype[np.float64]]
        longer("_positions", 0, np.int64)
        longer("_heads_of", 0, np.int64)
        longer("_wanting", 0, np.bool_)
        longer("_timers", math.inf, np.float64)
        longer("_beats", math.inf, np.float64)
        longer("_due", math.inf, np.float64)
        self._told_at = np.zeros(size, np.int64)

    # --- shards -------------------------------------------------------------------------------

    def add(self, seat: Seat) -> None:
        """Watch a shard from now on; what was appended while it was being loaded is found at once."""
        engine = seat.engine
        assert engine is not None
        if not self._free:
            self._grow(2 * len(self._seats))
        seat.index = self._free.pop()
        self._seats[seat.index] = seat
        if seat.partition not in self._partitions:
            self._partitions[seat.partition] = len(self._partitions)
            self._reader = None
        self._of_partition.setdefault(seat.partition, {})[seat] = None
        self._heads_of[seat.index] = self._partitions[seat.partition]
        self._told_at[seat.index] = engine.head
        self.update(seat, engine)
        self.beat(seat, engine.policy.heartbeat_seconds)
        self.start()
        self._supervise()

    def remove(self, seat: Seat) -> None:
        """Watch it no more."""
        index = seat.index
        if index < 0:
            return
        seat.index = -1
        self._changed.pop(seat, None)
        self._seats[index] = None
        self._wanting[index] = False
        self._heads_of[index] = 0  # its partition may have no place any more when the next look is taken
        self._timers[index] = self._due[index] = self._beats[index] = math.inf
        self._free.append(index)
        here = self._of_partition[seat.partition]
        here.pop(seat, None)
        if not here:
            # It keeps its place until places are given anew; they are few, and partitions come back.
            del self._of_partition[seat.partition]
            if not self._of_partition:
                self._partitions.clear()
                self._reader = None

    def changed(self, seat: Seat) -> None:
        """Note what a shard waits for, before the event loop waits again: a shard is told many things at a time."""
        if seat.index >= 0:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._note_changes)
            self._changed[seat] = None

    def _note_changes(self) -> None:
        changed, self._changed = self._changed, {}
        for seat in changed:
            if seat.engine is not None:
                self.update(seat, seat.engine)

    def update(self, seat: Seat, engine: Engine) -> None:
        """Note what a shard waits for, now."""
        index = seat.index
        if index < 0:
            return
        self._positions[index] = engine.read_position
        self._wanting[index] = engine.wants
        timer = engine.next_timer()
        self._timers[index] = math.inf if timer is None else timer
        if timer is not None and timer < self._next_look:
            self.wake()

    def beat(self, seat: Seat, seconds: float | None) -> None:
        """Look at a shard so often; None for never."""
        index = seat.index
        if index < 0:
            return
        if seconds is None:
            self._beats[index] = self._due[index] = math.inf
            return
        now = self._clock.monotonic()
        self._beats[index] = seconds
        # On a common grid: a thousand shards of one heartbeat are one look, not a thousand.
        self._due[index] = _next_beat(now, self._beats[[index]])[0]
        if self._due[index] < self._next_look:
            self.wake()

    def race(self, seat: Seat) -> None:
        """Look whether the log grew between loading a shard and watching it."""
        engine = seat.engine
        if engine is None:
            return
        for _, head in self._heads_of_some([seat.partition]):
            if head > engine.head:
                self.counts.subscription_creation_races_detected_total += 1
                seat.tell(HeadMoved(head))

    # --- heartbeats ---------------------------------------------------------------------------

    def heads(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return where all watched partitions end."""
        if self._reader is None:
            partitions = self._give_places()
            try:
                self._reader = self._host.store.log.heads(partitions)
            except TopicDeleted:
                return self._heads_one_by_one(partitions)
        return self._reader.read()

    def _give_places(self) -> list[Partition]:
        """Give each partition that is watched a place, and only those: a deleted one would be in the way for ever."""
        self._partitions = {partition: place for place, partition in enumerate(self._of_partition)}
        for partition, place in self._partitions.items():
            self._heads_of[[seat.index for seat in self._of_partition[partition]]] = place
        return list(self._partitions)

    def _heads_one_by_one(self, partitions: list[Partition]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the ends of those that are there, and -1 for topics that were deleted since."""
        found = np.full(len(partitions), -1, np.int64)
        for index, partition in enumerate(partitions):
            with suppress(TopicDeleted):
                found[index] = self._host.store.log.heads([partition]).read()[0]
        return found

    def _heads_of_some(self, partitions: Iterable[Partition]) -> list[tuple[Partition, int]]:
        """Return where some of the watched partitions end."""
        known = [partition for partition in partitions if partition in self._partitions]
        if self._reader is None:
            # The reader of all is made anew at the next heartbeat: once, however many partitions come meanwhile.
            return list(zip(known, self._heads_one_by_one(known).tolist(), strict=True))
        heads = self._reader.read()
        return [(partition, int(heads[self._partitions[partition]])) for partition in known]

    def next_timer(self) -> float | None:
        """Return when one of the shards is due by itself, on the monotonic clock; None if all wait for others."""
        self._note_changes()
        first = float(self._timers.min())
        return None if math.isinf(first) else first

    async def _round(self) -> float:
        now = self._clock.monotonic()
        self.look(now)
        self._supervise()
        if now >= self._health_at:
            self._tell_health(now)
        self._note_changes()
        self._next_look = min(float(self._due.min()), float(self._timers.min()))
        return max(min(self._next_look - self._clock.monotonic(), IDLE_SECONDS), 0.0)

    def look(self, now: float) -> None:
        """Look once at all shards whose heartbeat or timer is due."""
        self._note_changes()
        self.counts.passes += 1
        beating = self._due <= now
        if not self._partitions:
            return
        heads = self.heads()
        woken = pulse(heads, self._heads_of, self._positions, self._wanting & beating, self._timers, now)
        due = np.flatnonzero(beating)
        if len(due):
            beats = self._beats[due]
            self._due[due] = _next_beat(now, beats)
        for index in woken.tolist():
            seat = self._seats[index]
            if seat is None or seat.engine is None:
                continue
            head = int(heads[self._heads_of[index]])
            behind = beating[index] and head > self._positions[index] and self._wanting[index]
            if not behind:
                self._timers[index] = math.inf  # it says anew what it waits for
                seat.tell(Tick())
                continue
            counts = self.counts
            counts.dispatcher_heartbeat_polls_total += 1
            counts.subscription_lag_detected_total += 1
            if head > self._told_at[index]:
                counts.subscription_fallback_polls_total += 1
            self._told_at[index] = head
            seat.tell(HeadMoved(head))

    # --- notifications ------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Let somebody take hints; start him again if he died."""
        notifier = self._host.store.notifier
        if notifier is None or not self._of_partition:
            return
        if self._notifier is not None and self._notifier.done():
            self.counts.notifier_task_deaths_total += 1
            error = None if self._notifier.cancelled() else self._notifier.exception()
            logger.warning("the task that takes notifications died (%r), and is started again", error)
            self._notifier = None
        if self._notifier is None:
            if self._listening is not None:
                self._listening()
            loop = asyncio.get_running_loop()
            self._listening = notifier.listen(lambda partition: self._hint(loop, partition))
            self._notifier = loop.create_task(self._take_hints(), name="penstock notifications")

    def _hint(self, loop: asyncio.AbstractEventLoop, partition: Partition) -> None:
        """Take a hint, in any thread."""
        if partition not in self._of_partition:
            return
        self._hints[partition] = None
        if not self._scheduled:
            self._scheduled = True
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(self._hinted.set)

    async def _take_hints(self) -> None:
        while True:
            await self._hinted.wait()
            self._hinted.clear()
            self._scheduled = False
            hints, self._hints = self._hints, {}
            self.counts.notifier_notifications_total += len(hints)
            for partition, head in self._heads_of_some(hints):
                for seat in list(self._of_partition.get(partition, ())):
                    if seat.engine is not None and head > seat.engine.head:
                        self.counts.dispatcher_notifier_polls_total += 1
                        self._told_at[seat.index] = head
                        seat.tell(HeadMoved(head))

    def _tell_health(self, now: float) -> None:
        self._health_at = now + HEALTH_SECONDS
        counts = self.counts
        logger.debug(
            "notifications: %d taken, %d shards woken by them, %d by heartbeats (%d missed), %d deaths of the task",
            counts.notifier_notifications_total,
            counts.dispatcher_notifier_polls_total,
            counts.dispatcher_heartbeat_polls_total,
            counts.subscription_fallback_polls_total,
            counts.notifier_task_deaths_total,
        )

    def _failed(self, error: Exception) -> float:
        super()._failed(error)
        return IDLE_SECONDS  # a safety net that comes back after half a minute is none

    def _fenced(self) -> None:
        """Do nothing: looking is not fenced."""

    async def _ended(self) -> None:
        if self._listening is not None:
            self._listening()
            self._listening = None
        if self._notifier is not None:
            self._notifier.cancel()
            self._notifier = None


def _next_beat(
    now: float, beats: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return when the next beat of each is, and never now: at a beat, a quotient that is rounded names the same one."""
    due = (np.floor(now / beats) + 1) * beats
    return np.where(due > now, due, due + beats)
