"""Grouping: events that are published one by one share their appends.

An append costs about the same for one event as for a thousand. So events on their way to the same partition go
together: a `Group` is one batch, one run and one append. A `Lane` sends its groups one after another:

* Nothing waits for company. What finds the lane idle leaves at the end of this turn of the event loop, with all
  that was published in it. What comes while an append is under way gathers, and leaves as soon as that ends.
* A group is stored as a whole or not at all, and each of its events knows its place in it. A run is never split,
  so a group whose outcome is unknown stays together: whoever sends an event of it again sends all of it, with
  the same run, and all of it is stored once. It may do so, since the outcome of the others is unknown, too.
* A group of which surely nothing was written, in any attempt, dissolves: the others were told so, and sending
  one of its events again sends that one alone.
* Everybody who waits is told how it ended, also if the task that sends is cancelled. Who stops waiting changes
  nothing for the others.

The `Room` bounds what all lanes hold together.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.batch import Batch
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.events import Event
    from penstock.offsets import Range
    from penstock.producers import Run
    from penstock.rows import Appended

GROUP_EVENTS_MAX: Final = 10_000
GROUP_BYTES_MAX: Final = 8 << 20
"""Larger groups would save nothing more, and building one would hold up the event loop."""

ROOM_EVENTS: Final = 100_000
ROOM_BYTES: Final = 64 << 20


@dataclass(slots=True)
class Part:
    """Events that are appended to one partition together."""

    partition: int
    batch: Batch
    nbytes: int
    """The sum of its events' sizes."""
    run: Run | None = None
    """Given with the first attempt, and the same in all later ones."""


class Group:
    """Events that share one append, and those who wait for it."""

    __slots__ = (
        "answer",
        "dissolved",
        "events",
        "offsets",
        "part",
        "partition",
        "pending",
        "size",
        "uncertain",
        "waiting",
    )

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.events: list[Event] = []
        self.size = 0
        self.waiting: list[asyncio.Future[Appended]] = []
        self.pending = True
        """Whether it gathers, waits for its turn or is under way; otherwise it ended, until it is sent again."""
        self.part: Part | None = None
        """Built with the first attempt."""
        self.uncertain = False
        """Whether an attempt ended unknown."""
        self.answer: Appended | None = None
        self.offsets: dict[int, Range | None] = {}
        """Where it is stored, once that is known: the partition, and all its offsets there."""
        self.dissolved = False

    def to_part(self) -> Part:
        """Return all of it as one part, the same at every call."""
        if self.part is None:
            self.part = Part(self.partition, Batch.from_events(self.events), self.size)
        return self.part

    def end(self, outcome: Appended | Exception) -> None:
        """Tell everybody who waits how the attempt ended."""
        self.pending = False
        waiting, self.waiting = self.waiting, []
        if not isinstance(outcome, Exception):
            self.answer, self.offsets = outcome, {self.partition: outcome.offsets}
            self.part, self.events = None, []  # what was sent is not needed any more
            for future in waiting:
                if not future.done():
                    future.set_result(outcome)
            return
        if not isinstance(outcome, PenstockError):
            self.uncertain = True
        self.dissolved = not self.uncertain
        for future in waiting:
            if not future.done():
                future.set_exception(own_copy(outcome) if isinstance(outcome, PenstockError) else outcome)
                future.exception()  # if its task is cancelled just now, nobody will ask, and that is no fault


def own_copy(error: Exception) -> Exception:
    """Return a copy of an error, for one of several tasks that raise it: each adds its own trace and notes."""
    own = copy.copy(error).with_traceback(error.__traceback__)
    own.__cause__ = error.__cause__
    return own


class Lane:
    """The groups on their way to one partition, sent by `append` one at a time."""

    def __init__(
        self, partition: int, append: Callable[[Part], Awaitable[Appended]], bytes_max: int, room: Room
    ) -> None:
        self._partition = partition
        self._append = append
        self._bytes_max = min(bytes_max, GROUP_BYTES_MAX)
        self._room = room
        self._gathering: Group | None = None
        self._ready: deque[Group] = deque()  # full, or sent again; all of them leave before the one that gathers
        self._sending: Group | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, event: Event, size: int) -> Group:
        """Let an event, for which room was taken, join the group that gathers, as its last; return that."""
        group = self._gathering
        if group is None:
            group = self._gathering = Group(self._partition)
        elif group.size + size > self._bytes_max or len(group.events) == GROUP_EVENTS_MAX:
            self._ready.append(group)
            group = self._gathering = Group(self._partition)
        group.events.append(event)
        group.size += size
        if self._task is None:
            self._start()
        return group

    def outcome(self, group: Group) -> asyncio.Future[Appended]:
        """Return what to wait for: the end of the attempt that is under way, or else of a new one."""
        future: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        group.waiting.append(future)
        if not group.pending:
            group.pending = True
            self._room.occupy(len(group.events), group.size)
            self._ready.append(group)
            if self._task is None:
                self._start()
        return future

    def _start(self) -> None:
        # A new task takes its first step after all that is ready to run now: they join.
        self._task = asyncio.get_running_loop().create_task(self._send_all())
        self._task.add_done_callback(self._stopped)

    async def _send_all(self) -> None:
        while group := self._next():
            self._sending = group
            self._end(group, await self._attempt(group))
        self._sending = self._task = None

    async def _attempt(self, group: Group) -> Appended | Exception:
        try:
            return await self._append(group.to_part())
        except Exception as error:  # noqa: BLE001 - the group knows what each kind means
            return error

    def _end(self, group: Group, outcome: Appended | Exception) -> None:
        self._room.leave(len(group.events), group.size)
        group.end(outcome)

    def _next(self) -> Group | None:
        if self._ready:
            return self._ready.popleft()
        group, self._gathering = self._gathering, None
        return group

    def _stopped(self, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting if the task did not end by itself, as when the event loop is stopping."""
        if self._task is not task:
            return
        left = [group for group in (self._sending, *self._ready, self._gathering) if group is not None]
        self._sending = self._gathering = self._task = None
        self._ready.clear()
        stopped = RuntimeError("the task that sends was stopped")
        stopped.__cause__ = None if task.cancelled() else task.exception()
        for group in left:
            self._end(group, stopped)


class Room:
    """How much may be on its way at once; who finds it full waits in line."""

    def __init__(self, events_max: int = ROOM_EVENTS, bytes_max: int = ROOM_BYTES) -> None:
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._events = 0
        self._bytes = 0
        self._line: deque[tuple[asyncio.Future[None], int]] = deque()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def bytes(self) -> int:
        """How much is taken."""
        return self._bytes

    def take(self, size: int) -> bool:
        """Take room for one event of that size; False if there is none now, or others wait for it."""
        events = self._events
        if not events:
            self._empty.clear()
        elif self._line or events >= self._events_max or self._bytes + size > self._bytes_max:
            return False
        self._events = events + 1
        self._bytes += size
        return True

    async def wait(self, size: int) -> None:
        """Take room for one event as soon as there is some, in the order of asking."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((future, size))
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():  # it was given room in the same moment
                self.leave(1, size)
            raise

    def occupy(self, events: int, size: int) -> None:
        """Count what is on its way, whether there is room or not."""
        if not self._events:
            self._empty.clear()
        self._events += events
        self._bytes += size

    def leave(self, events: int, size: int) -> None:
        """Give back what was taken, and pass it on to those in line."""
        self._events -= events
        self._bytes -= size
        while self._line and (self._line[0][0].done() or self.fits(self._line[0][1])):
            future, wanted = self._line.popleft()
            if not future.done():
                self.occupy(1, wanted)
                future.set_result(None)
        if not self._events:
            self._empty.set()

    def fits(self, size: int) -> bool:
        """Say whether there is room for an event; whatever its size, it fits into an empty room."""
        return self._events < self._events_max and (self._bytes + size <= self._bytes_max or not self._events)

    async def emptied(self) -> None:
        """Return when nothing is on its way."""
        await self._empty.wait()
