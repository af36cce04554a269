"""What the loops at the entrances share: claim rows under a lease, append each as its claim says, then let it go.

A row that was claimed has a producer and a sequence of its own, written down before it is appended. Whatever happens
between claim and `done` (a crash, a lost lease, an append that ended as unknown), the row is claimed again and the log
recognises it. So the loops need no memory, and any number of processes may run them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from penstock import columns as cols
from penstock.batch import Batch
from penstock.errors import Fenced, LeaseError, StoreClosed, UsageError, WritingStopped
from penstock.offsets import Range
from penstock.producers import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.clock import Clock
    from penstock.events import Event
    from penstock.ports import Log, Store
    from penstock.rows import Appended, Fence, Lease, Partition

logger = logging.getLogger(__name__)

R = TypeVar("R")

PAGE_ROWS = 500
"""How many rows are claimed at a time."""

APPEND_BYTES_MAX = 8 << 20
"""About how much one append carries."""

LEASE_SECONDS = 10.0

FENCED_SECONDS = 0.05
"""How soon to ask for the lease again after being fenced."""

BACKOFF_SECONDS = 1.0
BACKOFF_SECONDS_MAX = 30.0

EVENT_OVERHEAD_BYTES = 256
"""What an event may take beside its payload and headers, about."""


class Host(Protocol):
    """A store, and how to call it without blocking the event loop."""

    @property
    def store(self) -> Store:
        """The open store."""

    async def call(self, function: Callable[..., R], *args: Any, **options: Any) -> R:
        """Call a method of the store, in a thread if it may wait for I/O."""


# --- appending --------------------------------------------------------------------------------


class Move(NamedTuple):
    """A claimed event, and where it goes."""

    partition: Partition
    event: Event
    producer: bytes
    sequence: int


def partition_of(event: Event, partitions: int, keyless: int) -> int:
    """Return the partition of an event: its key's, or `keyless` modulo their number."""
    if event.key is None:
        return keyless % partitions
    return cols.partition_of_key(event.key, partitions)


async def append(host: Host, moves: Sequence[Move]) -> list[Appended | Exception]:
    """Append every event as a run of its own, many to an append; return what became of each, in their order.

    Within a partition they are appended in their order, and none behind one that may still be repeated. A `UsageError`
    is about its own event alone.
    """
    by_partition: defaultdict[Partition, list[int]] = defaultdict(list)
    for index, move in enumerate(moves):
        by_partition[move.partition].append(index)
    parts = [[moves[index] for index in indexes] for indexes in by_partition.values()]
    answers = await asyncio.gather(*(_append_part(host, part) for part in parts))
    by_index: dict[int, Appended | Exception] = {}
    for indexes, part_answers in zip(by_partition.values(), answers, strict=True):
        by_index.update(zip(indexes, part_answers, strict=True))
    return [by_index[index] for index in range(len(moves))]


async def _append_part(host: Host, moves: Sequence[Move]) -> list[Appended | Exception]:
    answers: list[Appended | Exception] = []
    for chunk in _chunks(moves):
        try:
            answers += await host.call(_append_chunk, host.store.log, chunk)
        except UsageError as error:
            # One of them is to blame, and it must not hold up the others.
            singly = [await _append_part(host, [move]) for move in chunk] if len(chunk) > 1 else [[error]]
            answers += [answer for single in singly for answer in single]
        except Exception as error:  # noqa: BLE001 - the caller tells what each error means for its rows
            return answers + [error] * (len(moves) - len(answers))
    return answers


def _chunks(moves: Sequence[Move]) -> Iterator[list[Move]]:
    chunk: list[Move] = []
    size = 0
    for move in moves:
        size += _size(move.event)
        if chunk and size > APPEND_BYTES_MAX:
            yield chunk
            chunk, size = [], _size(move.event)
        chunk.append(move)
    if chunk:
        yield chunk


def _size(event: Event) -> int:
    headers = sum(len(name) + len(value) for name, value in event.headers.items())
    return len(event.data) + len(event.key or b"") + headers + EVENT_OVERHEAD_BYTES


def _append_chunk(log: Log, moves: Sequence[Move]) -> list[Appended]:
    batch = Batch.from_events(move.event for move in moves)
    runs = [
        Run(move.producer, 0, move.sequence, 1, cols.digest(batch.slice(Range(index, index + 1)).columns))
        for index, move in enumerate(moves)
    ]
    return log.append(moves[0].partition, batch, runs)


# --- the right to move ------------------------------------------------------------------------


class Tenure:
    """This process's hold of a lease: taken when there is work, prolonged while there is, and otherwise left to expire.

    So an idle loop writes nothing, and a process that dies leaves the work to others after one lease at most.
    """

    def __init__(self, host: Host, name: str, owner: str, clock: Clock) -> None:
        self.name = name
        self._host = host
        self._owner = owner
        self._clock = clock
        self._lease: Lease | None = None
        self._renew_at = 0.0

    async def fence(self) -> Fence | None:
        """Return what the next writes carry, or None while another process holds the lease."""
        now = self._clock.monotonic()
        if self._lease is not None and now < self._renew_at:
            return self._lease.fence
        leases = self._host.store.leases
        if self._lease is not None:
            renewed = await self._host.call(leases.renew, [self._lease], LEASE_SECONDS)
            self._lease = renewed[0] if renewed else None
        if self._lease is None:
            self._lease = await self._host.call(leases.acquire, self.name, self._owner, LEASE_SECONDS)
        self._renew_at = now + LEASE_SECONDS / 3
        return None if self._lease is None else self._lease.fence

    def lost(self) -> None:
        """Forget the lease: a write under it was refused."""
        self._lease = None

    async def release(self) -> None:
        """Give the lease back, if it is held: nothing is in flight."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        try:
            await self._host.call(self._host.store.leases.release, lease)
        except LeaseError:
            pass  # it has expired, which comes to the same
        except Exception as error:  # noqa: BLE001 - closing goes on; the lease expires by itself
            logger.info("lease %r could not be released, and will expire: %s", self.name, error)


# --- the loop ---------------------------------------------------------------------------------


class Loop(ABC):
    """A task that makes one round after another until it is stopped, and outlives whatever goes wrong in them.

    A round is never cut off in the middle by `stop`: it ends first, so that nothing is in flight when the lease is
    given back. A failing round is tried again after 1 s, 2 s, 4 s, … up to 30 s, each shortened at random by up to
    a half, so that processes do not come together; the log says so once, and once when it is over.
    """

    def __init__(self, what: str, clock: Clock, jitter: Callable[[], float]) -> None:
        self._what = what
        self._clock = clock
        self._jitter = jitter
        self._task: asyncio.Task[None] | None = None
        self._pause: asyncio.Future[None] | None = None
        self._awake = False
        self._stopping = False
        self._failures = 0
        self._trouble = ""

    @abstractmethod
    async def _round(self) -> float:
        """Do what can be done now, and return after how many seconds to look again."""

    @abstractmethod
    async def _ended(self) -> None:
        """Give up what the rounds have held."""

    @abstractmethod
    def _fenced(self) -> None:
        """Forget what a newer holder of the lease has taken over."""

    async def once(self) -> None:
        """Make one round by hand, and give up what it has held; what goes wrong is raised."""
        try:
            await self._round()
        finally:
            await self._ended()

    def start(self) -> None:
        """Begin, in the running event loop; one whose event loop has ended begins anew."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"penstock {self._what}")

    def wake(self) -> None:
        """Look at once: there may be something to do."""
        self._awake = True
        if self._pause is not None:
            self._pause.cancel()

    async def stop(self) -> None:
        """Let the round under way end, then the task; may be repeated."""
        self._stopping = True
        task = self._task
        # A task of an event loop that is gone has ended with it.
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            self.wake()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while not self._stopping:
            seconds = await self._attempt()
            if seconds is None:
                break
            await self._wait(seconds)
        await self._ended()

    async def _attempt(self) -> float | None:
        try:
            seconds = await self._round()
        except StoreClosed:
            return None
        except Fenced as error:
            # Another process has the lease now. Or these rows have seen the leases of a store that was made anew
            # since: then every acquisition is one epoch higher, until it is high enough.
            logger.debug("%s: %s", self._what, error)
            self._fenced()
            return FENCED_SECONDS
        except WritingStopped as error:
            await self._ended()  # other processes may still be able to write, and need the lease for it
            return self._failed(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next round may succeed
            return self._failed(error)
        if self._failures:
            logger.info("%s: goes on after %d failed attempts", self._what, self._failures)
        self._failures, self._trouble = 0, ""
        return seconds

    def _failed(self, error: Exception) -> float:
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self._trouble:
            logger.warning("%s: failed, and will be tried again: %s", self._what, trouble)
        self._trouble = trouble
        # The power is bounded, too: of a thousand failures in a row no float could hold it.
        longest: float = min(BACKOFF_SECONDS * 2 ** min(self._failures, 10), BACKOFF_SECONDS_MAX)
        self._failures += 1
        return longest * (1 - self._jitter() / 2)

    async def _wait(self, seconds: float) -> None:
        if not self._awake:
            self._pause = asyncio.ensure_future(self._clock.pause(seconds))
            try:
                # `wake` ends the pause early, by cancelling it, and this does not raise for that.
                await asyncio.wait([self._pause])
            finally:
                self._pause.cancel()
                self._pause = None
        self._awake = False
