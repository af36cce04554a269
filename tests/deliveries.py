"""A world for tests of delivery: a store that fails as it is told to, a clock that moves as it is told to, and buses.

Every bus of a world stands for a process of its own, and can be killed. With `memory:` and with `file:` all calls are
made in the event loop, so that nothing happens but what the test lets happen, and never in another order. Those of
`file:` let other tasks run before and after, as calls in threads do.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from penstock import Bus, Topic
from penstock.batch import Batch
from penstock.clock import VirtualClock
from penstock.offsets import RangeSet
from penstock.ports import Inspectable, Measured, Telling
from penstock.producers import lasting_producer
from penstock.rows import ParkedFilter, Shard, TopicInfo
from penstock.runtime.ledger import Record, decode_record
from penstock.settings import DeliverySettings, FileSettings, Settings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.stores.memory import MemoryStore
from penstock.testing.conformance.builders import a_part, append
from penstock.testing.machine import NoSockets
from penstock.testing.machine.plain import HastyDisk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from penstock.bus.consumer import Consumer
    from penstock.bus.delivered import Delivery
    from penstock.ports import Store
    from penstock.rows import Cursor, Parked, Partition
    from penstock.runtime.dispatcher import Dispatcher

Hook: TypeAlias = "Callable[..., Any]"

raw = Topic("raw", bytes)
wide = Topic("wide", bytes, partitions=4)


# --- a store that fails as it is told to ------------------------------------------------------


class Port:
    """One port of a store, each call of which goes through a hook if there is one."""

    def __init__(self, faulty: Faulty, name: str, port: Any) -> None:
        self._faulty = faulty
        self._name = name
        self._port = port

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._port, name)

        def call(*args: Any, **options: Any) -> Any:
            where = f"{self._name}.{name}"
            self._faulty.calls[where] += 1
            hook = self._faulty.hooks.get(where)
            return function(*args, **options) if hook is None else hook(function, *args, **options)

        call.__name__ = name
        return call


class Faulty:
    """A store, delegated to; `hooks["log.read"] = hook` lets `hook(function, …)` answer instead of the function."""

    def __init__(self, store: Store) -> None:
        self.hooks: dict[str, Hook] = {}
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.whole = store
        self.failed = False
        """Whether it was ever told to fail."""
        self.url = store.url
        # So all calls are made in the event loop, at once.
        self.capabilities = msgspec.structs.replace(store.capabilities, blocking=False)
        self.log: Any = Port(self, "log", store.log)
        self.cursors: Any = Port(self, "cursors", store.cursors)
        self.parked: Any = Port(self, "parked", store.parked)
        self.leases: Any = Port(self, "leases", store.leases)
        self.schedule: Any = Port(self, "schedule", store.schedule)
        self.manifests: Any = Port(self, "manifests", store.manifests)
        self.notifier: Any = Port(self, "notifier", store.notifier)
        self.hooks["notifier.listen"] = self._listen
        self.hears: Callable[[], bool] = lambda: True
        """Whether the next hint arrives."""
        self.outbox: Any = store.outbox
        if isinstance(store, Measured):
            self.readings = store.readings
        if isinstance(store, Inspectable):
            self.inspect = store.inspect
        if isinstance(store, Telling):
            self.tell, self.told = store.tell, store.told

    def _listen(self, listen: Hook, callback: Callable[[Partition], None]) -> Any:
        return listen(lambda partition: callback(partition) if self.hears() else None)

    def close(self) -> None:
        self.whole.close()

    def fail(self, call: str, error: BaseException, *, times: int | None = None, after: bool = False) -> None:
        """Let a call raise, so often or until `heal`: before it does anything, or after it has done it."""
        left = times
        self.failed = True

        def failing(function: Hook, *args: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                return function(*args, **options)
            left = None if left is None else left - 1
            if after:
                function(*args, **options)
            raise error

        self.hooks[call] = failing

    def heal(self) -> None:
        """Let nothing fail any more."""
        self.hooks = {"notifier.listen": self._listen}
        self.hears = lambda: True


class _NoThread(threading.Thread):
    """A thread that never begins: nothing here happens by itself."""

    def join(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""


def make_store(kind: str, clock: VirtualClock, directory: Path) -> Store:
    """Return an open store; one of files has segments so small that they roll all the time."""
    if kind == "memory":
        return MemoryStore(clock=clock)
    return FileStore(
        directory,
        settings=FileSettings(segment_bytes=4000, allocate_bytes=4096),
        platform=Platform(disk=HastyDisk(), clock=clock, spawn=lambda _name, _work: _NoThread(), sockets=NoSockets()),
    )


# --- consumers that run -----------------------------------------------------------------------


class Taken(NamedTuple):
    """A delivery as a test looks at it."""

    partition: int
    offset: int
    data: bytes
    attempt: int
    replay: int
    at: float
    """When it came, on the virtual clock."""


async def acked(delivery: Delivery[Any]) -> None:
    """Handle a delivery: it is done."""
    await delivery.ack()


async def kept(delivery: Delivery[Any]) -> None:
    """Handle a delivery: say nothing of it."""


class Running:
    """A consumer that runs in a task of its own, and remembers what it was given."""

    def __init__(
        self, clock: VirtualClock, consumer: Consumer[Any], handle: Callable[[Delivery[Any]], Awaitable[None]]
    ) -> None:
        self._clock = clock
        self.consumer = consumer
        self.handle = handle
        self.taken: list[Taken] = []
        self.deliveries: list[Delivery[Any]] = []
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        async for delivery in self.consumer:
            position = delivery.position
            self.taken.append(
                Taken(
                    position.partition,
                    position.offset,
                    delivery.event.data,
                    delivery.attempt,
                    delivery.replay,
                    self._clock.monotonic(),
                )
            )
            self.deliveries.append(delivery)
            await self.handle(delivery)

    def looked_at(self) -> None:
        """Let what it has raised not be the test's failure."""
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(0))

    @property
    def data(self) -> list[bytes]:
        """The payloads in the order in which they came."""
        return [taken.data for taken in self.taken]

    @property
    def offsets(self) -> list[int]:
        """The offsets in the order in which they came."""
        return [taken.offset for taken in self.taken]

    @property
    def attempts(self) -> list[int]:
        """Which attempt each delivery was."""
        return [taken.attempt for taken in self.taken]


# --- the world --------------------------------------------------------------------------------


class World:
    """A store, a clock, and buses over them."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.clock = VirtualClock()
        self._directory = directory
        self.store = Faulty(make_store(kind, self.clock, directory))
        self._turns = 20 if kind == "memory" else 50
        self._buses: list[Bus] = []
        self._producer = lasting_producer()
        self._sequence = 0

    def bus(self, *topics: Topic[Any], lease_seconds: float = 10.0) -> Bus:
        """Return another process's bus; the world closes it."""
        settings = Settings(delivery=DeliverySettings(lease_seconds=lease_seconds))
        bus = Bus("memory:", topics=topics or (raw, wide), store=self.store, clock=self.clock, settings=settings)
        if self.kind == "file":
            # As with threads: others go on while a call is under way.
            backend: Any = bus._make_backend()
            call = backend.call

            async def interleaved(*args: Any, **options: Any) -> Any:
                await asyncio.sleep(0)
                try:
                    return await call(*args, **options)
                finally:
                    await asyncio.sleep(0)

            backend.call = interleaved
        self._buses.append(bus)
        return bus

    async def close(self) -> None:
        """End everything."""
        self.store.heal()
        for bus in self._buses:
            # Closing may wait, and it waits on this clock.
            closing = asyncio.ensure_future(bus.close())
            await self.until(closing.done)
            closing.result()
        self.store.close()

    # --- time -------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Let everything happen that can happen now."""
        await self.clock.advance_async(0, turns=2 * self._turns)

    async def run(self, seconds: float) -> None:
        """Let time pass."""
        await self.clock.advance_async(seconds, turns=self._turns)

    async def until(self, condition: Callable[[], Any], within: float = 60.0, step: float = 0.05) -> None:
        """Let time pass, as little as possible, until a condition holds."""
        end = self.clock.monotonic() + within
        await self.settle()
        while not condition():
            assert self.clock.monotonic() < end, f"it did not happen within {within} s"
            await self.run(step)

    async def done(self, work: Awaitable[Any], within: float = 60.0) -> Any:
        """Let time pass until something has ended, and return its result."""
        task = asyncio.ensure_future(work)
        await self.until(task.done, within)
        return task.result()

    def hold(self, bus: Bus, function: str, *, name: str = "") -> asyncio.Event:
        """Let the next call of a function be made, and answered when the event that is returned is set.

        With a `name`, the next call whose first argument it is the beginning of.
        """
        backend: Any = bus._make_backend()
        call = backend.call
        answered = asyncio.Event()
        held = False

        async def slow(called: Any, *args: Any, **options: Any) -> Any:
            nonlocal held
            answer = await call(called, *args, **options)
            if not held and called.__name__ == function and (not name or args[0].startswith(name)):
                held = True
                await answered.wait()
            return answer

        backend.call = slow
        return answered

    def freeze(self, bus: Bus) -> asyncio.Event:
        """Let no call of a bus reach the store, until the event that is returned is set."""
        backend: Any = bus._make_backend()
        call = backend.call
        thawed = asyncio.Event()

        async def frozen(*args: Any, **options: Any) -> Any:
            await thawed.wait()
            return await call(*args, **options)

        backend.call = frozen
        return thawed

    # --- publishing and consuming -----------------------------------------------------------------

    async def publish(self, bus: Bus, *payloads: bytes, topic: Topic[Any] = raw, **fields: Any) -> None:
        """Publish events, each by itself."""
        for payload in payloads:
            await bus.publish(topic, payload, **fields)

    def append(self, *payloads: bytes, topic: Topic[Any] = raw) -> None:
        """Append events without a bus, in the middle of whatever happens."""
        partition = self.info(topic).partitions[0]
        part = a_part(*payloads, producer=self._producer, first=self._sequence)
        self._sequence += len(payloads)
        append(self.store.whole, partition, part)

    @asynccontextmanager
    async def running(
        self, consumer: Consumer[Any], handle: Callable[[Delivery[Any]], Awaitable[None]] = acked
    ) -> AsyncIterator[Running]:
        """Let a consumer run, and close it at the end."""
        running = Running(self.clock, consumer, handle)
        await self.settle()
        try:
            yield running
            # What it raised is the test's failure, unless the test has looked at it.
            if running.task.done() and not running.task.cancelled():
                running.task.result()
        finally:
            closing = asyncio.ensure_future(consumer.close())
            await self.until(closing.done)
            running.task.cancel()
            await asyncio.wait([running.task])

    # --- looking ----------------------------------------------------------------------------------

    def info(self, topic: Topic[Any] = raw) -> TopicInfo:
        """Return what the store knows of a topic."""
        [info] = [info for info in self.store.whole.log.topics() if info.name == topic.name]
        return info

    def cursor(self, name: str, partition: int = 0, topic: Topic[Any] = raw) -> Cursor:
        """Return the cursor of a subscription as it is stored."""
        cursors = self.store.whole.cursors.load(self.info(topic).log_id, name)
        [cursor] = [cursor for cursor in cursors if cursor.shard.partition == partition]
        return cursor

    def rows(self, name: str, *states: Any, topic: Topic[Any] = raw) -> list[Parked]:
        """Return parked rows of a subscription, of these states or all."""
        wanted = ParkedFilter(
            log_id=self.info(topic).log_id, subscription=name, states=frozenset(states) if states else None
        )
        return self.store.whole.parked.page(wanted, limit=10_000)

    def replay(self, name: str, topic: Topic[Any] = raw) -> int:
        """Bring the dead letters of a subscription back."""
        wanted = ParkedFilter(log_id=self.info(topic).log_id, subscription=name)
        return self.store.whole.parked.replay(wanted, self.clock.time_us())

    def lease_of(self, name: str, partition: int = 0, topic: Topic[Any] = raw) -> Any:
        """Return who holds a shard."""
        return self.store.whole.leases.holder(f"shard/{self.info(topic).log_id}/{name}/0/{partition}")

    def dispatcher(self, bus: Bus) -> Dispatcher:
        """Return what delivers for a bus."""
        dispatcher = bus._deliveries._dispatcher
        assert dispatcher is not None
        return dispatcher

    # --- the end of a process ---------------------------------------------------------------------

    async def kill(self, bus: Bus, *runnings: Running) -> None:
        """End a bus as a killed process ends: nothing is given back, and nothing more is written."""
        dispatcher = self.dispatcher(bus)
        tasks = [running.task for running in runnings]
        tasks += [task for member in dispatcher.members for seat in member.seats for task in seat._tasks]
        loops = (dispatcher.watch, dispatcher.monitor, dispatcher.committer, dispatcher.ledger, dispatcher.presence)
        tasks += [loop._task for loop in (*loops, dispatcher.teller) if loop._task is not None]
        if dispatcher.monitor._notifier is not None:
            tasks.append(dispatcher.monitor._notifier)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        bus._deliveries._dispatcher = None
        await bus._entrances.stop()

    # --- the ledger -------------------------------------------------------------------------------

    def records(self, name: str, partition: int = 0, topic: Topic[Any] = raw) -> list[Record]:
        """Return the records of a shard, those that were moved and those that wait, once they are seen to chain."""
        shard = Shard(self.info(topic).log_id, name, 0, partition)
        return records_of(self.store.whole, shard)

    def outcomes(self, name: str, partition: int = 0, topic: Topic[Any] = raw) -> dict[str, list[int]]:
        """Return every offset by its outcome; an offset has one, but for those that were parked first."""
        found: dict[str, RangeSet] = {}
        for record in self.records(name, partition, topic):
            for outcome in record.outcomes:
                offsets = record.offsets(outcome)
                assert offsets, "an outcome of nothing"
                assert not (found.setdefault(outcome, RangeSet()) & offsets), f"{outcome} twice: {offsets}"
                found[outcome] |= offsets
        return {outcome: [offset for span in spans for offset in span] for outcome, spans in found.items()}


def records_of(store: Store, shard: Shard) -> list[Record]:
    """Return the records of a shard in their order, once they are seen to chain."""
    encoded: dict[bytes, None] = {}
    for info in store.log.topics():
        if info.name == "_deliveries":
            bounds = store.log.bounds(info.partitions[0])
            at = bounds.start
            while at < bounds.stop:
                for item in store.log.read(info.partitions[0], at, bytes_max=1 << 30):
                    assert isinstance(item, Batch)
                    encoded |= dict.fromkeys(event.data for event in item)
                    at = item.range.stop
    encoded |= dict.fromkeys(record for _, record in store.cursors.settlements(1 << 20))
    all_records = [decode_record(each) for each in encoded]
    records = [each for each in all_records if (each.log_id, each.subscription, each.slot, each.partition) == shard]
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    for before, after in pairwise(records):
        assert before.generation <= after.generation
        if before.generation == after.generation:
            assert before.next_offset == after.begin
    return records
