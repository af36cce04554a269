"""A process that consumes as the script says, and ends: by itself when everything is settled, or where it is killed.

What it is given is told before anything is done with it, through a socket, so that the campaign knows it however this
process ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock import Bus
from penstock.bus.deliveries import Retry
from penstock.errors import StaleCursor, StaleDelivery
from penstock.rows import ParkedFilter
from penstock.settings import DeliverySettings, FileSettings, Settings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.testing.campaigns.deliveries.script import (
    LONG_SECONDS,
    SHORT_SECONDS,
    SUBSCRIPTION,
    TIMEOUT_SECONDS,
    TOPIC,
    Act,
    Did,
    FastClock,
    Fault,
    Scene,
    act_of,
    verdict,
)
from penstock.testing.campaigns.deliveries.steps import Steps

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from penstock.batch import StoredEvent
    from penstock.bus.consumer import Consumer
    from penstock.bus.delivered import DeliveredBatch, Delivery
    from penstock.rows import Shard, TopicInfo, Waiting

LOOK_SECONDS: Final = 0.004
END_SECONDS: Final = 15.0
"""Of the wall: whoever is not done by then never will be."""
TEXT_MAX: Final = 1000


class Given(NamedTuple):
    """A handler was given these events, in this order."""

    partition: int
    epoch: int
    generation: int
    events: list[tuple[int, bytes, bytes, int, int]]
    """Offset, payload, key, attempt, and how often it was brought back."""


class Said(NamedTuple):
    """A handler says this of an event."""

    partition: int
    offset: int
    replay: int
    did: Did


class Stale(NamedTuple):
    """And was told that the event is somebody else's by now."""

    partition: int
    offset: int


class Logged(NamedTuple):
    """Something was logged."""

    level: int
    text: str


class Stuck(NamedTuple):
    """It does not go on."""

    why: str


class Ended(NamedTuple):
    """All is done, and the process ends by itself."""


class _Telling(logging.Handler):
    def __init__(self, told: Teller) -> None:
        super().__init__(logging.WARNING)
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.tell(Logged(record.levelno, record.getMessage()[:TEXT_MAX]))


class Teller:
    """Tells the campaign; safe for several threads."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def tell(self, message: object) -> None:
        """Send a message."""
        with self._lock:
            self._connection.send(self._sent(message))

    def _sent(self, message: object) -> object:
        return message


def open_file_store(root: str, clock: FastClock) -> FileStore:
    """Open the store of a round."""
    settings = FileSettings(
        segment_bytes=1 << 20,
        allocate_bytes=64 << 10,
        # The keeper does nothing in so short a time: what it might hold a turn for is not looked at here.
        marker_seconds=600.0,
        retain_seconds=1e9,
        runtime_directory=str(Path(root).parent),
    )
    return FileStore(Path(root), settings=settings, platform=Platform(clock=clock))


def consume(
    connection: Connection[Any, Any], *, root: str, since_us: int, scene: Scene, fault: Fault | None, leaves: bool
) -> None:
    """Consume until everything is settled; or, if it `leaves`, until the scene says so."""
    told = Teller(connection)
    logger = logging.getLogger("penstock")
    logger.addHandler(_Telling(told))
    logger.propagate = False
    clock = FastClock(since_us)
    store = open_file_store(root, clock)
    steps = Steps(store, told.tell, fault)
    steps.wrap()
    worker = Worker(store, clock, steps, told, scene, leaves_at=scene.leaves_at if leaves else 0)
    asyncio.run(worker.run())
    store.close()
    told.tell(Ended())


class Worker:
    """The consumer of a process."""

    def __init__(
        self, store: FileStore, clock: FastClock, steps: Steps, told: Teller, scene: Scene, *, leaves_at: int
    ) -> None:
        self._store = store
        self._clock = clock
        self._steps = steps
        self._told = told
        self._scene = scene
        self._leaves_at = leaves_at
        self._given = 0
        self._bus = Bus(
            store=store,
            clock=clock,
            settings=Settings(delivery=DeliverySettings(lease_seconds=scene.lease_seconds)),
        )

    async def run(self) -> None:
        """Consume, and leave."""
        scene = self._scene
        async with self._bus as bus:
            consumer: Consumer[bytes] = bus.consume(
                TOPIC,
                SUBSCRIPTION,
                mode=scene.mode,  # type: ignore[arg-type]
                retry=Retry(scene.max_retries, SHORT_SECONDS, jitter=0.0),
                timeout=scene.timeout,
                window=scene.window,
                heartbeat=1.0,
                consumer_id="the same one" if scene.named else None,
            )
            async with consumer:
                driving = asyncio.create_task(self._drive(consumer))
                taken_over = False
                try:
                    await (self._take_batches(consumer) if scene.batch else self._take(consumer))
                except StaleDelivery:
                    taken_over = True
                if self._has_left or taken_over:
                    driving.cancel()
                await asyncio.wait([driving])

    # --- handing over -------------------------------------------------------------------------

    async def _take(self, consumer: Consumer[bytes]) -> None:
        async for delivery in consumer:
            self._tell_given(delivery, [(delivery.event, delivery.attempt, delivery.replay)])
            if self._has_left:
                return
            await self._handle(delivery)

    async def _take_batches(self, consumer: Consumer[bytes]) -> None:
        async for batch in consumer.batches(max_events=self._scene.batch):
            attempts, replays = batch.attempts, batch.replays
            events = [(event, attempts.get(event.offset, 1), replays.get(event.offset, 0)) for event in batch]
            self._tell_given(batch, events)
            if self._has_left:
                return
            await self._handle_batch(batch, events)

    def _tell_given(self, hand: Delivery[bytes] | DeliveredBatch, events: list[tuple[StoredEvent, int, int]]) -> None:
        partition = events[0][0].position.partition
        self._told.tell(
            Given(
                partition,
                self._steps.epoch(partition),
                _generation(hand),
                [(event.offset, event.data, event.key or b"", attempt, replay) for event, attempt, replay in events],
            )
        )
        self._steps.reach_handler()
        self._given += 1

    @property
    def _has_left(self) -> bool:
        return self._leaves_at > 0 and self._given >= self._leaves_at

    async def _handle(self, delivery: Delivery[bytes]) -> None:
        did = verdict(
            act_of(delivery.event.data), delivery.attempt, again=bool(delivery.replay or _generation(delivery))
        )
        partition, offset = delivery.position.partition, delivery.position.offset
        self._say(partition, offset, delivery.replay, did)
        try:
            match did:
                case Did.ACKED:
                    await delivery.ack()
                case Did.REJECTED:
                    await delivery.reject("no attempt can succeed")
                case Did.FAILED:
                    await delivery.nack(delay=SHORT_SECONDS, reason="fails")
                case Did.PARKED:
                    await delivery.nack(delay=LONG_SECONDS, reason="fails for long")
                case Did.TIMED_OUT:
                    await self._clock.pause(2 * TIMEOUT_SECONDS)
                case Did.KILLED:
                    os.kill(os.getpid(), signal.SIGKILL)
        except StaleDelivery:
            self._told.tell(Stale(partition, offset))

    async def _handle_batch(self, batch: DeliveredBatch, events: list[tuple[StoredEvent, int, int]]) -> None:
        for event, attempt, replay in events:
            did = verdict(act_of(event.data), attempt, again=bool(replay or _generation(batch)))
            self._say(batch.partition, event.offset, replay, did)
            try:
                match did:
                    case Did.ACKED:
                        await batch.ack([event.offset])
                    case Did.REJECTED:
                        await batch.reject([event.offset], "no attempt can succeed")
                    case Did.FAILED | Did.PARKED:
                        delay = SHORT_SECONDS if did is Did.FAILED else LONG_SECONDS
                        await batch.nack([event.offset], delay=delay, reason="fails")
                    case _:
                        raise ValueError(f"no batch has an event that {did}")
            except StaleDelivery:
                self._told.tell(Stale(batch.partition, event.offset))

    def _say(self, partition: int, offset: int, replay: int, did: Did) -> None:
        if did in {Did.FAILED, Did.PARKED}:
            self._steps.failed.said.add((partition, offset))
        elif did is Did.TIMED_OUT:
            self._steps.failed.late.add((partition, offset))
        self._told.tell(Said(partition, offset, replay, did))

    # --- what else is done --------------------------------------------------------------------

    async def _drive(self, consumer: Consumer[bytes]) -> None:
        """Do what the scene wants beside consuming, and end when all is done."""
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._drive_to_the_end()
        except TimeoutError:
            self._told.tell(Stuck(f"it is not done after {END_SECONDS} s: {await self._bus.lag()} {consumer.trouble}"))
        except Exception as error:  # noqa: BLE001 - the campaign judges it
            self._told.tell(Stuck(repr(error)))
        await consumer.close()

    async def _drive_to_the_end(self) -> None:
        scene = self._scene
        [topic] = [topic for topic in self._store.log.topics() if topic.name == TOPIC]
        if scene.seeks_to is not None and (scene.seeks_at or scene.seeks_parked):
            while not (self._is_done(topic) or self._seeks_now(topic)):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
            await self._seek(topic, scene.seeks_to)
        await self._done(topic)
        if scene.replays:
            await self._revive(topic)
            await self._done(topic)
        if scene.seeks_to is not None:
            await self._seek(topic, scene.seeks_to)
            await self._done(topic)
        if scene.changes:
            await self._bus.change(TOPIC, SUBSCRIPTION, window=scene.window + 1)
        while self._store.cursors.settlements(1):  # noqa: ASYNC110 - the same
            await asyncio.sleep(LOOK_SECONDS)

    async def _done(self, topic: TopicInfo) -> None:
        while not self._is_done(topic):  # noqa: ASYNC110 - the same
            await asyncio.sleep(LOOK_SECONDS)

    def _is_done(self, topic: TopicInfo) -> bool:
        """Tell whether everything is settled, by what the store has."""
        for cursor in self._store.cursors.load(topic.log_id, SUBSCRIPTION):
            partition = topic.partitions[cursor.shard.partition]
            if cursor.next_offset < self._store.log.bounds(partition).stop:
                return False
        return not self._waiting(topic)

    def _waiting(self, topic: TopicInfo) -> list[Waiting]:
        return self._store.parked.waiting(ParkedFilter(log_id=topic.log_id, subscription=SUBSCRIPTION))

    def _seeks_now(self, topic: TopicInfo) -> bool:
        return bool(self._waiting(topic)) if self._scene.seeks_parked else self._given >= self._scene.seeks_at

    async def _seek(self, topic: TopicInfo, to: int) -> None:
        """Move the subscription, once in its life."""
        for cursor in self._store.cursors.load(topic.log_id, SUBSCRIPTION):
            shard: Shard = cursor.shard
            if cursor.generation == 0:
                end = self._store.log.bounds(topic.partitions[shard.partition]).stop
                with suppress(StaleCursor):  # another process has moved it meanwhile
                    await self._bus.seek(TOPIC, SUBSCRIPTION, min(to, end), partition=shard.partition)

    async def _revive(self, topic: TopicInfo) -> None:
        """Bring dead letters back, each once in its life."""
        wanted = ParkedFilter(log_id=topic.log_id, subscription=SUBSCRIPTION, states=frozenset({"dead"}))
        dead = self._store.parked.page(wanted, limit=1_000)
        for partition in topic.partitions:
            offsets = frozenset(
                row.offset
                for row in dead
                if row.shard.partition == partition.number and not row.replay and act_of(row.event.data) is Act.REJECT
            )
            if offsets:
                some = ParkedFilter(
                    log_id=topic.log_id, subscription=SUBSCRIPTION, partition=partition.number, offsets=offsets
                )
                await asyncio.to_thread(self._store.parked.replay, some, self._clock.time_us())


def _generation(hand: Delivery[bytes] | DeliveredBatch) -> int:
    return hand._engine.progress.generation  # noqa: SLF001 - nothing else says it
