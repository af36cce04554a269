"""Bus: what an application holds.

Making a bus does no I/O: it can be a module's global. It opens with `async with bus:`, or by itself at its
first use; opening creates the topics that were declared. Leaving the block, or `close()`, first lets every
publish under way end. A closed bus stays closed and says so. ::

    orders = Topic("orders", OrderPlaced, key=lambda order: order.customer)
    bus = Bus("memory:", topics=[orders])
    async with bus:
        receipt = await bus.publish(orders, order)
        async for event in bus.read(orders):
            order = orders.decode(event)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import datetime, timedelta
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeVar, Unpack, overload

from penstock.batch import Batch, StoredEvent
from penstock.bus.buffered import IN_FLIGHT_BYTES, SHIPMENT_BYTES, BufferedPublisher, closed_publishers
from penstock.bus.dead_letters import DeadLetters
from penstock.bus.delayed import Delayed, ScheduledReceipt, delayed_id, due_us
from penstock.bus.deliveries import Checkpoint, Deliveries, Retry, policy_changes
from penstock.bus.directory import TopicDirectory
from penstock.bus.entrances import Entrances
from penstock.bus.grouping import GROUP_EVENTS_MAX
from penstock.bus.local import Local
from penstock.bus.measuring import Measurements
from penstock.bus.projections import Projection
from penstock.bus.publisher import Prepared, Publisher, Receipt
from penstock.bus.reading import read_topic, with_archive
from penstock.bus.signals import caught
from penstock.bus.states import PROJECTIONS_FILE, States
from penstock.bus.subscribers import ConsumeOptions, Subscribers
from penstock.bus.topic import EventFields, Key, Topic
from penstock.clock import Clock, SystemClock, datetime_to_us, us_to_datetime
from penstock.errors import BusClosed, GapFound, InvalidEvent, UnknownTopic, UsageError
from penstock.events import Event
from penstock.offsets import Gap
from penstock.rows import Scheduled, Staged
from penstock.runtime.closing import Closing
from penstock.runtime.entrances import partition_of
from penstock.settings import Settings, redact_url, resolve
from penstock.stores import path_of

if TYPE_CHECKING:
    import os
    import sqlite3
    from types import TracebackType

    from penstock.bus.consumer import Consumer
    from penstock.bus.handlers import Subscriber
    from penstock.bus.health import Health
    from penstock.bus.middleware import Middleware
    from penstock.bus.projecting import Projecting
    from penstock.bus.sync import SyncBus
    from penstock.engine.lag import LagInfo
    from penstock.engine.policy import Exhausted
    from penstock.metrics import Metric
    from penstock.ports import Backend, Store
    from penstock.rows import Subscription, TopicInfo
    from penstock.runtime.subscriptions import Start

T = TypeVar("T")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])

SCHEDULED_PAGE_MAX = 1_000
RETRIES_MAX = 1_000_000
"""Of what a projection is brought: its events are never given up, as the position of its states decides."""


class Parts(NamedTuple):
    """What a test may look at of a bus that is elsewhere."""

    topics: Mapping[str, Topic[Any]]
    deliveries: Deliveries
    subscribers: Subscribers
    entrances: Entrances


class Bus:
    """Publishes events, and reads them back.

    * `url`: the store; None takes `PENSTOCK_URL`, then `penstock.toml`, then `file:./penstock-data`.
    * `topics`: created on opening if they do not exist.
    * `outbox`: the application's own SQLite file. What `stage` puts there is published while this bus is open.
    * `projections`: the SQLite file of its projections; unless given, `projections.db` in the directory of a `file:`
      store, and in memory for a store in memory.
    * `middleware`: around every handler, the first one outermost; see `penstock.bus.middleware`.
    * `settings`: instead of reading the environment and `penstock.toml`.
    * `clock`, `store`: for tests. A store that is given stays open when the bus closes.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        topics: Iterable[Topic[Any]] = (),
        outbox: str | os.PathLike[str] | None = None,
        projections: str | os.PathLike[str] | None = None,
        middleware: Iterable[Middleware] = (),
        settings: Settings | None = None,
        clock: Clock | None = None,
        store: Store | None = None,
    ) -> None:
        self._given_url = url
        self._given_settings = settings
        self._outbox_path = outbox
        self._projections_path = projections
        self._middleware = tuple(middleware)
        self._declared: dict[str, Topic[Any]] = {}
        for topic in topics:
            if self._declared.setdefault(topic.name, topic) is not topic:
                raise UsageError(f"topic {topic.name!r} is declared twice; declare it once, with all its classes")
        self._begin(clock or SystemClock(), store, self._middleware)

    def _begin(
        self,
        clock: Clock,
        store: Store | None,
        middleware: tuple[Middleware, ...],
        *,
        chance: Callable[[], float] = random.random,
        follows: bool = False,
        states: States | None = None,
    ) -> None:
        """Be a new bus, of what was declared. One that `follows` has as its outbox what is staged into."""
        self._clock = clock
        self._store = store
        self._directory = TopicDirectory(self._declared, self._opened)
        self._entrances = Entrances(self._declared, clock, self._outbox_path, chance=chance, follows=follows)
        self._deliveries = Deliveries(self._directory, clock, self._opened, chance=chance)
        self._subscribers = Subscribers(self._declare, self._consumer_of, self._projecting_of, clock, middleware)
        self._states_: States | None = states
        self._dead_letters = DeadLetters(self._directory, clock, self._opened)
        self._measurements = Measurements(clock, self._deliveries, self._entrances)
        self._delayed_number = count()
        self._opening = asyncio.Lock()
        self._closing = Closing()
        self._loop: asyncio.AbstractEventLoop | None = None
        """That in which it was used last; another one may use it when that has ended."""
        self._backend: Backend | None = None
        self._publisher_: Publisher | None = None
        self._buffered: set[BufferedPublisher[Any]] = set()
        self._state = "new"

    def __repr__(self) -> str:
        url = self._given_url if self._given_url is not None else "from settings"
        return f"<Bus {redact_url(url)!r}, {self._state}, topics {sorted(self._declared)}>"

    @property
    def url(self) -> str:
        """The store's URL, with its secret if it has one: what another process opens to reach the same events."""
        if self._store is not None:
            return self._store.url
        if self._given_url is not None:
            return self._given_url
        return self.settings.url

    @property
    def settings(self) -> Settings:
        """The settings that it was given, or else those in force where it runs."""
        return self._given_settings or resolve({"url": self._given_url}).settings

    def configure(
        self,
        *,
        url: str | None = None,
        settings: Settings | None = None,
        outbox: str | os.PathLike[str] | None = None,
        projections: str | os.PathLike[str] | None = None,
    ) -> None:
        """Decide anew what was decided when it was made, for whoever deploys it; before it is used."""
        if self._state != "new" or self._backend is not None:
            raise UsageError(f"{self!r} is in use: configure it before it opens, and before anything is published")
        if url is not None:
            self._given_url, self._store = url, None
        self._given_settings = settings or self._given_settings
        if outbox is not None:
            self._entrances.configure(outbox)
            self._outbox_path = outbox
        self._projections_path = projections or self._projections_path
        self._states_ = None

    # --- opening and closing -----------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._opened()
        try:
            await self._subscribers.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the bus without running its subscribers, for a process that only publishes; may be repeated."""
        await self._opened()

    async def close(self) -> None:
        """Let handlers and every publish under way end, then close; may be repeated.

        If the caller is cancelled meanwhile it goes on by itself. Publishers that are open are closed first. A failure
        of theirs that nobody has seen is raised at the end.
        """
        self._subscribers.check_not_within()
        await self._closing.by(self._close)

    async def _close(self) -> None:
        await self._subscribers.stop()
        async with self._opening:
            unseen = await closed_publishers(self._buffered)
            was, self._state = self._state, "closed"
            self._directory.forget()
            self._measurements.close()
            if was == "open":
                assert self._backend is not None
                async with AsyncExitStack() as steps:  # from the last to the first, whichever of them fails
                    steps.push_async_callback(self._backend.close)
                    steps.push_async_callback(self._publisher.drained)
                    steps.push_async_callback(self._entrances.stop)
                    steps.push_async_callback(self._deliveries.stop)
        if unseen is not None:
            raise unseen

    def sync(self) -> SyncBus:
        """Return this bus for code that is not asynchronous: the same methods, which wait, for any number of threads.

        It opens with `with`, or at its first use, in an event loop and a thread of its own. If this bus is open then,
        its own event loop is used: so a handler in a thread may publish.
        """
        from penstock.bus.portal import Portal
        from penstock.bus.sync import SyncBus, SyncPrepared

        return SyncBus(Portal(self._begin_in_portal, self.close, SyncPrepared), self)

    def _begin_in_portal(self) -> asyncio.AbstractEventLoop | None:
        self._check_not_closed()
        if self._state == "open":
            if self._loop is not None and self._loop.is_running():
                return self._loop
            raise UsageError("this bus was left open in an event loop that has ended: make another one for `sync()`")
        self._make_backend()  # now, since several threads may ask for it later
        return None

    async def _opened(self) -> Backend:
        self._check_loop()
        if self._state != "open":
            async with self._opening:
                self._check_not_closed()
                if self._state == "new":
                    await self._open()
        assert self._backend is not None
        return self._backend

    async def _open(self) -> None:
        backend = self._make_backend()
        await backend.open()
        try:
            await self._directory.create_declared(backend)
        except BaseException:
            await backend.close()
            raise
        if isinstance(backend, Local):
            self._entrances.start(backend)
            self._measurements.open(backend, self._publisher)
        self._state = "open"

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._loop is not None and self._loop.is_running():
                raise UsageError(
                    "this bus is open already, in another event loop: use bus.sync() in a thread, whose calls go "
                    "there, or make a bus of its own for this loop"
                )
            self._loop = loop

    def _check_not_closed(self) -> None:
        if self._state == "closed":
            raise BusClosed("this bus is closed; make a new one: Bus(url, topics=[…])")

    def _make_backend(self) -> Backend:
        if self._backend is None:
            settings = self.settings
            url = settings.url if self._given_url is None else self._given_url
            self._backend = Local(url, settings=settings, clock=self._clock, store=self._store)
            self._deliveries.lease_seconds = settings.delivery.lease_seconds
            self._subscribers.drain_seconds = settings.delivery.drain_seconds
            self._entrances.dead_letter_days = settings.delivery.dead_letter_days
            self._deliveries.stalled_seconds = settings.delivery.stalled_seconds
            self._publisher_ = Publisher(self._backend, self._directory, settings.limits, self._clock)
        return self._backend

    @property
    def _publisher(self) -> Publisher:
        self._make_backend()
        assert self._publisher_ is not None
        return self._publisher_

    @contextmanager
    def elsewhere(
        self,
        store: Store,
        *,
        clock: Clock,
        settings: Settings,
        chance: Callable[[], float] = random.random,
        middleware: Iterable[Middleware] = (),
        outbox: str | os.PathLike[str] | None = None,
        states: States | None = None,
    ) -> Iterator[Parts]:
        """Be, within a block, a new bus over another store and clock: for tests; see `penstock.testing.harness`.

        Topics and handlers are those that were declared, and `middleware` is outside of the bus's own. If the bus has
        an outbox, it is this one here, or the file that is staged into first: nothing of another one is touched.
        Projections are in `states`, or in memory.
        Whoever opens the bus within the block closes it there. Afterwards it is what it was, unopened or closed.
        """
        if self._state == "open":
            raise UsageError("this bus is open, and cannot be elsewhere: close it before, or do not open it")
        before, subscribers, projections = (
            dict(self.__dict__),
            self._subscribers.declared,
            self._subscribers.projections,
        )
        self._given_settings = settings
        self._declared = dict(self._declared)
        self._outbox_path = outbox or self._outbox_path
        self._begin(
            clock, store, (*middleware, *self._middleware), chance=chance, follows=outbox is None,
            states=states or States(None),
        )  # fmt: skip
        self._subscribers.declared = dict(subscribers)
        self._subscribers.projections = dict(projections)
        try:
            yield Parts(self._declared, self._deliveries, self._subscribers, self._entrances)
        finally:
            self.__dict__.clear()
            self.__dict__.update(before)

    # --- running -----------------------------------------------------------------------------

    async def run(self, *, until: asyncio.Event | None = None) -> bool:
        """Run the subscribers until SIGTERM or SIGINT, or until an event is set; then let every handler end, and close.

        What was not begun goes back, and no attempt is counted. A second signal ends handlers at once. If one of the
        subscribers can go on no more, since its topic was deleted for example, all end, and its error is raised.

        Returns whether all handlers that were begun have ended by themselves; otherwise some had to be cancelled, and
        their events went back, too.
        """
        if not self._subscribers.declared and not self._subscribers.embedded:
            raise UsageError("this bus has nothing to run: declare handlers with @bus.subscriber(topic, name)")
        with caught() as ending:
            async with self:
                await self._subscribers.run_until(ending, until)
        return not self._subscribers.cancelled

    @property
    def subscribers(self) -> list[Subscriber]:
        """The subscribers that were declared, in their order."""
        return list(self._subscribers.declared.values())

    @property
    def projections(self) -> list[Projection[Any]]:
        """The projections that were declared, in their order."""
        return list(self._subscribers.projections.values())

    @asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Run the subscribers while a web application runs: `FastAPI(lifespan=bus.lifespan)`, or Starlette's."""
        async with self:
            yield

    def subscriber(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        concurrency: int | None = None,
        ack: Literal["auto", "manual"] | None = None,
        ignore_others: bool | None = None,
        middleware: Iterable[Middleware] | None = None,
        **options: Unpack[ConsumeOptions],
    ) -> Callable[[F], F]:
        """Declare a handler of the subscription `name`; its function is returned as it is.

        * The handler's first parameter is the event, of the class that it is annotated with; a second one is its
          `Delivery`. `async def` runs in the event loop, `def` in threads. Returning is done; raising is failed, and
          tried again as `retry` says; `Reject` makes a dead letter at once; `RetryLater` decides when.
        * Several handlers of one subscription each take the classes they are annotated with. A class of the topic
          without a handler is an error at the start, unless `ignore_others` lets its events be dropped.
        * `concurrency`: so many handlers run at a time, 16 unless said; events of one key one after the other.
        * `ack`: `manual` leaves it to the handler to say `await delivery.ack()`, perhaps after it has returned.
        * `middleware`: around its handlers, inside of the bus's.
        * All other options are those of `consume`. Handlers of one subscription say them once.
        """
        return self._subscribers.declare(
            topic, name, options,
            concurrency=concurrency, ack=ack, ignore_others=ignore_others,
            middleware=middleware,
        )  # fmt: skip

    def projection(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        key: Callable[[T], str | bytes] | None = None,
        version: int = 1,
        ignore_others: bool = False,
        embedded: bool = True,
    ) -> Callable[[Callable[[Any, Any], S | None]], Projection[S]]:
        """Declare a projection: a pure function of a state and an event, which returns the next state of a key.

        * The first parameter is the state, None if the key has none yet; the second one is the event, of the class that
          it is annotated with. Returning None ends the key. Both annotations count: the state's says how it is kept.
        * `key`: of which state an event is a part; unless given, the key of the event itself. Events of one partition
          are folded in their order. If a state has events of several partitions, the order among these is not fixed.
        * `version`: raise it when the function changes what states mean. The projection then begins anew, beside the
          one before, which stays as it is.
        * `ignore_others`: leave out events of the topic's other classes, which is an error otherwise.
        * `embedded`: False for one that is run by `penstock pipeline project` alone, and not where the bus runs.
        """
        declared = self._declare(topic)

        def take(function: Callable[[Any, Any], S | None]) -> Projection[S]:
            made = Projection(
                function, declared, name, lambda: self._states,
                key=key, version=version, ignore_others=ignore_others, embedded=embedded,
            )  # fmt: skip
            self._subscribers.add(made)
            return made

        return take

    @property
    def _states(self) -> States:
        """The file of this bus's projections."""
        if self._states_ is None:
            url = self.url
            if self._projections_path is not None:
                self._states_ = States(Path(self._projections_path), own=False)
            elif url.startswith("file:"):
                self._states_ = States(path_of(url) / PROJECTIONS_FILE)
            elif url.startswith("memory:"):
                self._states_ = States(None)
            else:
                raise UsageError("this bus has no file for its projections: Bus(…, projections='projections.db')")
        return self._states_

    def _projecting_of(self, projection: Projection[Any]) -> Projecting:
        consumer = self.consume(
            projection.topic, projection.subscription, mode="failover", retry=Retry(max_retries=RETRIES_MAX)
        )
        from penstock.bus.projecting import Projecting

        return Projecting(projection, consumer, self._states, self._reached, self._clock)

    async def _reached(self, topic: str) -> tuple[Backend, TopicInfo]:
        return await self._opened(), await self._directory.info(topic)

    def _declare(self, topic: Topic[T] | str) -> Topic[Any]:
        """Return the topic that is meant; one that was not declared with the bus is from now on."""
        if isinstance(topic, str):
            return self._declared_topic(topic)
        self._check_not_closed()
        known = self._declared.get(topic.name)
        if known is None and self._state == "new":
            known = self._declared[topic.name] = topic
        if known is not topic:
            raise UsageError(f"topic {topic.name!r} is declared twice; declare it once, with all its classes")
        return topic

    def _consumer_of(self, subscriber: Subscriber) -> Consumer[Any]:
        return self.consume(subscriber.topic, subscriber.name, **subscriber.options)

    # --- publishing --------------------------------------------------------------------------

    @overload
    async def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        delay: None = None,
        at: None = None,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - it decides the outcome
        **fields: Unpack[EventFields],
    ) -> Receipt: ...

    @overload
    async def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        delay: float | timedelta,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - it decides the outcome
        **fields: Unpack[EventFields],
    ) -> ScheduledReceipt: ...

    @overload
    async def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        at: datetime,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - it decides the outcome
        **fields: Unpack[EventFields],
    ) -> ScheduledReceipt: ...

    async def publish(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        *,
        delay: float | timedelta | None = None,
        at: datetime | None = None,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - it decides the outcome
        **fields: Unpack[EventFields],
    ) -> Receipt | ScheduledReceipt:
        """Store one event and return its receipt.

        `value` is one of the topic's classes, `bytes`, or a whole `Event`; `fields` set what it says besides.
        After `timeout` the outcome is unknown: `PublishUnknown`.

        With `delay` (seconds, or a `timedelta`) or `at` the event is stored now and enters the topic then, or as
        soon as a bus is open after that; its `ttl` begins then, too. A `ScheduledReceipt` is returned.
        """
        if delay is not None or at is not None:
            delayed = await self._delayed(topic, value, fields, delay, at)
            with self._directory.forgotten_if_deleted(delayed.topic):
                return await delayed.send(timeout=timeout)
        if not self._directory.fits(topic):
            topic = await self._directory.topic(topic)
        assert not isinstance(topic, str)
        self._check_loop()
        return await self._prepared(topic, value, fields).send(timeout=timeout)

    async def publish_batch(
        self,
        topic: Topic[T] | str,
        values: Sequence[T | Event] | Batch,
        *,
        keys: Sequence[Key] | None = None,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - it decides the outcome
    ) -> Receipt:
        """Store many events: one append per partition, each of them whole or not at all.

        `values` is a sequence as for `publish`, or a `Batch` for those who have columns. `keys` instead of
        the topic's key. A mixed outcome raises `PartialPublish`.
        """
        topic = await self._directory.topic(topic)
        self._check_loop()
        prepared = self._prepared_batch(topic, values, keys)
        return await prepared.send(timeout=timeout)

    def publisher(
        self,
        topic: Topic[T] | str,
        *,
        linger: float | timedelta = 0.005,
        max_events: int = GROUP_EVENTS_MAX,
        max_bytes: int = SHIPMENT_BYTES,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        retry_for: float | timedelta = 30.0,
    ) -> BufferedPublisher[T]:
        """Return a publisher that gathers events and stores many at a time: for those who send much.

        * `linger`: an event waits so long for company, and leaves sooner when there are `max_events` or `max_bytes`
          of its partition.
        * `in_flight_bytes`: so much may be on its way, each event counted with 200 bytes more than it has.
        * `retry_for`: so long are events sent again whose outcome is unknown, before their senders are told.
        """

        async def find() -> tuple[Topic[Any], Publisher]:
            found = await self._directory.topic(topic)
            await self._opened()
            return found, self._publisher

        return BufferedPublisher(
            find, self._buffered, self._clock, linger=linger, max_events=max_events, max_bytes=max_bytes,
            in_flight_bytes=in_flight_bytes, retry_for=retry_for,
        )  # fmt: skip

    def prepare(self, topic: Topic[T] | str, value: T | Event, **fields: Unpack[EventFields]) -> Prepared:
        """Encode and check an event now, and send it later, as often as needed: it is stored once.

        Does no I/O, so the topic must be declared with this bus.
        """
        return self._prepared(self._declared_topic(topic), value, fields)

    def prepare_batch(
        self, topic: Topic[T] | str, values: Sequence[T | Event] | Batch, *, keys: Sequence[Key] | None = None
    ) -> Prepared:
        """Encode and check many events now, and send them later, as often as needed: they are stored once."""
        return self._prepared_batch(self._declared_topic(topic), values, keys)

    def _declared_topic(self, topic: Topic[T] | str) -> Topic[Any]:
        self._check_not_closed()
        name = topic if isinstance(topic, str) else topic.name
        declared = self._declared.get(name)
        if declared is None:
            raise UnknownTopic(name, self._declared)
        return declared

    def _prepared(self, topic: Topic[T], value: T | Event, fields: EventFields) -> Prepared:
        event = topic.to_event(value, self._clock.time_us(), fields)
        publisher = self._publisher_ or self._publisher
        return publisher.prepare_event(topic.name, topic.settings.partitions, event)

    def _prepared_batch(
        self, topic: Topic[T], values: Sequence[T | Event] | Batch, keys: Sequence[Key] | None
    ) -> Prepared:
        if isinstance(values, Batch):
            if keys is not None:
                raise UsageError("`keys` goes with plain values; a Batch has a key column of its own")
            topic.check_batch(values)
            batch = values
        elif isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
            raise InvalidEvent(f"publish_batch takes a sequence of values or a Batch, not {type(values).__name__}")
        else:
            batch = topic.to_batch(values, self._clock.time_us(), keys)
        return self._publisher.prepare(topic.name, topic.settings.partitions, batch)

    async def _delayed(
        self,
        topic: Topic[T] | str,
        value: T | Event,
        fields: EventFields,
        delay: float | timedelta | None,
        at: datetime | None,
    ) -> Delayed:
        now_us = self._clock.time_us()
        due_at = due_us(delay, at, now_us)
        topic = await self._directory.topic(topic)
        event = topic.to_event(value, max(due_at, now_us), fields)
        self._check_limits(topic, event)
        info = await self._directory.info(topic.name)
        id_ = delayed_id(now_us, next(self._delayed_number))
        row = Scheduled(
            id=id_,
            log_id=info.log_id,
            partition=partition_of(event, info.settings.partitions, keyless=int(id_, 16)),
            due_at=due_at,
            event=event,
        )
        return Delayed(topic.name, row, await self._opened(), self._clock, self._entrances.scheduling)

    def _check_limits(self, topic: Topic[Any], event: Event) -> None:
        """Refuse an event that a publish would refuse."""
        self._publisher.prepare_event(topic.name, topic.settings.partitions, event)

    async def cancel_scheduled(self, id: str) -> bool:
        """Cancel a delayed publish by its receipt's id; False if it is published, or being published, or unknown."""
        backend = await self._opened()
        return await backend.schedule_cancel(id)

    async def scheduled(self, *, after: ScheduledReceipt | None = None, limit: int = 100) -> list[ScheduledReceipt]:
        """Return delayed publishes by when they are due, at most `limit`, beginning after the given one."""
        if not 1 <= limit <= SCHEDULED_PAGE_MAX:
            raise UsageError(f"limit is {limit}, it must be 1 to {SCHEDULED_PAGE_MAX:,}: page with `after`")
        backend = await self._opened()
        start = None if after is None else (datetime_to_us(after.due_at), after.id)
        rows = await backend.schedule_page(after=start, limit=limit)
        names = {info.log_id: info.name for info in await backend.topics()}
        # A topic that was deleted between the two calls took its rows along.
        return [
            ScheduledReceipt(row.id, names[row.log_id], us_to_datetime(row.due_at))
            for row in rows
            if row.log_id in names
        ]

    def stage(
        self,
        connection: sqlite3.Connection,
        topic: Topic[T] | str,
        value: T | Event,
        **fields: Unpack[EventFields],
    ) -> None:
        """Publish inside the transaction of your own connection: the event appears if and when you commit it.

        The connection is to the file that this bus was given as `outbox`. The bus itself need not be open; some bus
        with the same outbox must be, sooner or later. A topic that is not declared with this bus is given by name.
        """
        self._check_not_closed()
        outbox = self._entrances.outbox_of(connection)
        declared: Topic[Any]
        if isinstance(topic, str) and topic not in self._declared:
            declared = Topic(topic, bytes)
        else:
            declared = self._declared_topic(topic)
        event = declared.to_event(value, self._clock.time_us(), fields)
        self._check_limits(declared, event)
        outbox.stage(connection, [Staged(topic=declared.name, event=event)])

    # --- subscriptions -----------------------------------------------------------------------

    def consume(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        mode: Literal["key_shared", "shared", "exclusive", "failover"] | None = None,
        start: Start = "earliest",
        retry: Retry | None = None,
        exhausted: Exhausted | None = None,
        timeout: float | timedelta | None = None,
        window: int | None = None,
        window_bytes: int | None = None,
        heartbeat: str | float | timedelta | None = None,
        rate: float | None = None,
        checkpoint: Checkpoint | Literal["each"] | None = None,
        protect: bool | None = None,
        consumer_id: str | None = None,
        on_gap: Callable[[int, Gap], None] | None = None,
    ) -> Consumer[T]:
        """Return a consumer of the subscription `name`, which is created when it is first used.

        * `mode`: `key_shared`, any number of consumers at a time, each with the events of its part of the keys;
          `exclusive`, one consumer, and a second one is refused; `failover`, where it stands by; or `shared`, any
          number of consumers, each of which takes whatever comes next. All but the last keep the order of every key.
          If none is given it is that of the subscription, and `key_shared` for a new one.
        * `start`: where a new subscription begins: `earliest`, `latest`, a time, an offset, or offsets by partition.
        * `retry`, `exhausted` (`dead`, `halt` or `discard`), `timeout` (of a handler; 0 takes it away), `window`
          (events in memory), `window_bytes`, `heartbeat` (a profile's name, seconds, or `off`), `rate` (events a
          second, of all partitions together; 0 takes it away), `checkpoint`: the subscription's policy. It is stored;
          what is not given stays as it is.
        * `protect`: whether retention waits for this subscription; it does unless told not to.
        * `consumer_id`: who this is. The same one again takes over from its own ghost.
        * `on_gap`: called with partition and `Gap` when events are lost; the log tells of it in any case.
        """
        changes = policy_changes(
            retry=retry, exhausted=exhausted, timeout=timeout, window_events=window, window_bytes=window_bytes,
            heartbeat=heartbeat, rate=rate, checkpoint=checkpoint,
        )  # fmt: skip
        return self._deliveries.consumer(
            topic,
            name,
            mode=mode,
            start=start,
            protect=protect,
            consumer_id=consumer_id,
            on_gap=on_gap,
            changes=changes,
        )

    async def subscriptions(self, topic: Topic[T] | str) -> list[Subscription]:
        """Return the subscriptions of a topic, by name."""
        return await self._deliveries.subscriptions(topic)

    async def lag(self, topic: Topic[T] | str | None = None, name: str | None = None) -> list[LagInfo]:
        """Return how far subscriptions are behind, partition by partition: all, those of a topic, or one."""
        return await self._deliveries.lag(topic, name)

    async def health(
        self, topic: Topic[T] | str | None = None, *, stalled_after: float | timedelta | None = None
    ) -> Health:
        """Return whether events make progress where there are any, of all topics or of one, and how the store does.

        A subscription is stalled that makes no progress for `stalled_after`, or the setting `delivery.stalled_seconds`.
        Asked again, this bus also tells how quickly lags grow, and which cursors were written but not moved.
        """
        await self._opened()
        return await self._deliveries.health(topic, stalled_after, await self._entrances.pending())

    async def seek(
        self, topic: Topic[T] | str, name: str, to: Start, *, partition: int | None = None
    ) -> dict[int, tuple[int, int]]:
        """Move a subscription, whoever runs it; returns for each partition where it was and where it is.

        What it passes over counts as skipped, what it goes back to is delivered again.
        """
        return await self._deliveries.seek(topic, name, to, partition)

    async def change(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        retry: Retry | None = None,
        exhausted: Exhausted | None = None,
        timeout: float | timedelta | None = None,  # noqa: ASYNC109 - it is the handlers'
        window: int | None = None,
        window_bytes: int | None = None,
        heartbeat: str | float | timedelta | None = None,
        rate: float | None = None,
        checkpoint: Checkpoint | Literal["each"] | None = None,
    ) -> Subscription:
        """Change the policy of a subscription while it runs, whoever runs it; see `consume`."""
        changes = policy_changes(
            retry=retry, exhausted=exhausted, timeout=timeout, window_events=window, window_bytes=window_bytes,
            heartbeat=heartbeat, rate=rate, checkpoint=checkpoint,
        )  # fmt: skip
        return await self._deliveries.change(topic, name, changes)

    async def pause(self, topic: Topic[T] | str, name: str) -> None:
        """Let a subscription hand nothing over until it is resumed; what is in hand goes on.

        Other processes see it within half a second.
        """
        await self._deliveries.change(topic, name, {"paused": True})

    async def resume(self, topic: Topic[T] | str, name: str) -> None:
        """Let a subscription that was paused go on; one that has halted tries anew."""
        await self._deliveries.resume(topic, name)

    @property
    def dead_letters(self) -> DeadLetters:
        """What subscriptions gave up on: list, group, replay, purge."""
        return self._dead_letters

    async def delete_subscription(self, topic: Topic[T] | str, name: str) -> bool:
        """Delete a subscription with its progress and its dead letters; False if there is none."""
        return await self._deliveries.delete(topic, name)

    # --- measuring ---------------------------------------------------------------------------

    async def metrics(self) -> list[Metric]:
        """Return everything that is counted and measured, as plain values; see the guide for their names.

        Counts are of this bus. What the store tells, such as lags, is of all subscriptions, and a few seconds old.
        """
        await self._opened()
        return await self._measurements.gather()

    def latest_metrics(self) -> list[Metric]:
        """Return the same without `await`, in whichever thread; for exporters.

        Called in the bus's own event loop, what the store tells is as it was at the call before. A bus that is not
        open tells its version alone.
        """
        return self._measurements.latest()

    # --- reading -----------------------------------------------------------------------------

    async def read(
        self,
        topic: Topic[T] | str,
        *,
        partition: int | None = None,
        start: int | datetime | None = None,
        stop: int | None = None,
        archive: str | PathLike[str] | None = None,
    ) -> AsyncIterator[StoredEvent]:
        """Yield the events that are stored now, partition by partition, in order; without a subscription.

        `start` is an offset (of the one `partition`) or the time of appending; `stop` an offset, exclusive.
        `archive` is the directory of a lake: what the log does not hold any more is read from there.
        Raises `GapFound` at a declared hole.
        """
        async for item in self.read_batches(topic, partition=partition, start=start, stop=stop, archive=archive):
            if isinstance(item, Gap):
                raise GapFound(topic if isinstance(topic, str) else topic.name, item)
            for event in item:
                yield event

    async def read_batches(
        self,
        topic: Topic[T] | str,
        *,
        partition: int | None = None,
        start: int | datetime | None = None,
        stop: int | None = None,
        archive: str | PathLike[str] | None = None,
    ) -> AsyncIterator[Batch | Gap]:
        """Yield the same as `read`, as columns; holes come as `Gap`."""
        name = topic if isinstance(topic, str) else topic.name
        with self._directory.forgotten_if_deleted(name):
            info = await self._directory.info(name)
            backend = with_archive(await self._opened(), archive)
            async for item in read_topic(backend, info, partition, start, stop):
                yield item
