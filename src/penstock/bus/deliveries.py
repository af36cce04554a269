"""Deliveries: subscriptions and their consumers, as a bus offers them. What delivers begins with the first consumer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.bus.consumer import Consumer
from penstock.bus.examination import History, examine, here_of
from penstock.bus.handlers import check_flag, check_function, waits, yields
from penstock.bus.local import Local
from penstock.clock import datetime_to_us, seconds
from penstock.engine.policy import Policy, heartbeat_seconds
from penstock.errors import UsageError
from penstock.producers import process_producer
from penstock.runtime import subscriptions
from penstock.runtime.dispatcher import Dispatcher

if TYPE_CHECKING:
    from penstock.bus.directory import TopicDirectory
    from penstock.bus.health import Health
    from penstock.bus.topic import Topic
    from penstock.clock import Clock
    from penstock.engine.lag import LagInfo
    from penstock.offsets import Gap
    from penstock.ports import Backend, Store
    from penstock.rows import Subscription, TopicInfo
    from penstock.runtime.crew import Place
    from penstock.runtime.member import Member
    from penstock.runtime.subscriptions import Start

T = TypeVar("T")
R = TypeVar("R")

OWNER_CHARACTERS_MAX = 200
READ_EVENTS = Policy().read_events
READ_BYTES = Policy().read_bytes
JOINING_MAX = 32
"""So many consumers begin at a time: enough to be written in groups, and nothing else waits behind thousands."""


class Retry(NamedTuple):
    """How a failed event is tried again."""

    max_retries: int = 3
    """So many times after the first attempt."""
    delay: float | timedelta = 1.0
    """Before the first retry; doubled for each further one."""
    max_delay: float | timedelta = 60.0
    """No delay is longer; unless it is given, not less than the first one."""
    jitter: float = 0.1
    """Each delay is shortened at random by up to this share."""


class Checkpoint(NamedTuple):
    """When progress is written: after so many settled events, or so long after the first of them."""

    size: int
    delay: float | timedelta


def policy_changes(**options: Any) -> dict[str, Any]:
    """Return what the options of `consume` and `change` say of a policy; what is None says nothing."""
    changes: dict[str, Any] = {}
    retry = options.pop("retry", None)
    if retry is not None:
        if not isinstance(retry, Retry):
            raise UsageError(f"retry is a Retry, such as Retry(max_retries=3), not {retry!r}")
        first, longest = seconds(retry.delay, "the delay of a retry"), seconds(retry.max_delay, "the longest delay")
        changes |= {
            "max_retries": retry.max_retries,
            "backoff_seconds": first,
            "backoff_seconds_max": max(first, longest) if retry.max_delay == Retry().max_delay else longest,
            "jitter": retry.jitter,
        }
    checkpoint = options.pop("checkpoint", None)
    if checkpoint == "each":
        changes |= {"checkpoint_events": 1, "checkpoint_seconds": 0.0}
    elif isinstance(checkpoint, Checkpoint):
        delay = seconds(checkpoint.delay, "the delay of a checkpoint")
        changes |= {"checkpoint_events": checkpoint.size, "checkpoint_seconds": delay}
    elif checkpoint is not None:
        raise UsageError(f"checkpoint is 'each' or a Checkpoint(size, delay), not {checkpoint!r}")
    heartbeat = options.pop("heartbeat", None)
    if isinstance(heartbeat, str):
        changes["heartbeat_seconds"] = heartbeat_seconds(heartbeat)
    elif heartbeat is not None:
        changes["heartbeat_seconds"] = seconds(heartbeat, "heartbeat, unless it is the name of a profile,")
    timeout = options.pop("timeout", None)
    if timeout is not None:
        # A policy is stored, so that leaving it out keeps what is stored; 0 takes it away.
        changes["timeout_seconds"] = seconds(timeout, "the timeout") or None
    rate = options.pop("rate", None)
    if rate is not None:
        changes["rate_per_second"] = None if rate == 0 and rate is not False else rate
    changes |= {name: value for name, value in options.items() if value is not None}
    Policy().changed(changes)  # refuses what is wrong, by its name, before anything is made of it
    # A window is read in halves, so that one is read while the other is worked on; never in very small parts.
    if "window_events" in changes:
        changes["read_events"] = max(READ_EVENTS, changes["window_events"] // 2)
    if "window_bytes" in changes:
        changes["read_bytes"] = max(READ_BYTES, changes["window_bytes"] // 16)
    return changes


def _check_start(start: object) -> None:
    """Raise `UsageError` unless something says where to begin; whether there is such a place only the store knows."""
    if isinstance(start, datetime):
        datetime_to_us(start)
    elif isinstance(start, Mapping):
        if not start or not all(type(number) is int for each in start.items() for number in each):
            raise UsageError(f"a start by partition has whole numbers, such as {{0: 1700}}, not {start!r}")
    elif type(start) is not int and (not isinstance(start, str) or start not in {"earliest", "latest"}):
        raise UsageError(
            f"a start is 'earliest', 'latest', an offset, a datetime or offsets by partition, not {start!r}"
        )


def _check_on_gap(on_gap: object) -> None:
    """Raise `UsageError` if nothing would run of what is called with a gap."""
    check_function(on_gap, "on_gap")
    if waits(on_gap) or yields(on_gap):
        raise UsageError("on_gap is called, and neither awaited nor iterated over: a plain `def` does what it says")


class Deliveries:
    """What a bus has of delivery. Making one does no I/O."""

    def __init__(
        self,
        directory: TopicDirectory,
        clock: Clock,
        opened: Callable[[], Awaitable[Backend]],
        *,
        ledger: bool = True,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._opened = opened
        self._ledger = ledger
        self._chance = chance
        self._dispatcher: Dispatcher | None = None
        self._joining = asyncio.Semaphore(JOINING_MAX)
        self._history = History()
        self.lease_seconds = 10.0
        self.stalled_seconds = 60.0

    async def _local(self) -> Local:
        backend = await self._opened()
        if not isinstance(backend, Local):
            raise UsageError("this backend does not deliver by itself")
        return backend

    @property
    def running(self) -> Dispatcher | None:
        """What delivers in this process, once there is a consumer."""
        return self._dispatcher

    async def stop(self) -> None:
        """Let every consumer leave, and end what delivers."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            await dispatcher.stop()

    async def dispatcher(self) -> Dispatcher:
        """Return what delivers in this process."""
        local = await self._local()
        if self._dispatcher is None:
            self._dispatcher = Dispatcher(
                local,
                owner=process_producer(self._clock.time_us()).hex(),
                clock=self._clock,
                jitter=self._chance,
                lease_seconds=self.lease_seconds,
                ledger=self._ledger,
            )
        return self._dispatcher

    # --- consuming ----------------------------------------------------------------------------

    def consumer(
        self,
        topic: Topic[T] | str,
        name: str,
        *,
        mode: str | None,
        start: Start,
        protect: bool | None,
        consumer_id: str | None,
        on_gap: Callable[[int, Gap], None] | None,
        changes: Mapping[str, Any],
    ) -> Consumer[T]:
        """Return a consumer, which begins when it is first used."""
        owner: Any = process_producer(self._clock.time_us()).hex() if consumer_id is None else consumer_id
        if not isinstance(owner, str) or not owner.isprintable() or not 1 <= len(owner) <= OWNER_CHARACTERS_MAX:
            raise UsageError(f"consumer_id is 1 to {OWNER_CHARACTERS_MAX} printable characters, not {consumer_id!r}")
        if mode is not None and mode not in subscriptions.MODES:
            raise UsageError(f"mode is one of {', '.join(subscriptions.MODES)}, not {mode!r}")
        if protect is not None:
            check_flag(protect, "protect")
        if on_gap is not None:
            _check_on_gap(on_gap)
        _check_start(start)

        async def find() -> Topic[Any]:
            async with self._joining:
                return await self._directory.topic(topic)

        async def join() -> Member | Place:
            async with self._joining:
                info, subscription = await self._ensured(topic, name, mode, changes, start=start, protect=protect)
                dispatcher = await self.dispatcher()
                return await dispatcher.join(info, subscription, owner, on_gap or _ignore)

        async def leave(member: Member | Place) -> None:
            if self._dispatcher is not None:
                await self._dispatcher.leave(member)

        return Consumer(find, join, leave, name)

    async def _ensured(
        self,
        topic: Topic[Any] | str,
        name: str,
        mode: str | None,
        changes: Mapping[str, Any],
        *,
        start: Start,
        protect: bool | None,
    ) -> tuple[TopicInfo, Subscription]:
        topic_name = topic if isinstance(topic, str) else topic.name
        info = await self._directory.info(topic_name)
        local = await self._local()
        own_changes = (await self.dispatcher()).own_changes
        async with own_changes.making():
            with self._directory.forgotten_if_deleted(topic_name):
                subscription, created = await local.call(
                    subscriptions.ensure,
                    local.store,
                    info,
                    name,
                    mode=mode,
                    changes=changes,
                    start=start,
                    protect=protect,
                    now_us=self._clock.time_us(),
                )
            own_changes.made += created
        return info, subscription

    # --- looking and changing -----------------------------------------------------------------

    async def _do(self, topic: Topic[Any] | str, work: Callable[[Store, TopicInfo], R]) -> R:
        name = topic if isinstance(topic, str) else topic.name
        info = await self._directory.info(name)
        local = await self._local()
        with self._directory.forgotten_if_deleted(name):
            return await local.call(work, local.store, info)

    async def subscriptions(self, topic: Topic[Any] | str) -> list[Subscription]:
        """Return the subscriptions of a topic."""
        return await self._do(topic, lambda store, info: store.cursors.subscriptions(info.log_id))

    async def lag(self, topic: Topic[Any] | str | None, name: str | None) -> list[LagInfo]:
        """Return how far subscriptions are behind."""
        local = await self._local()
        now_us = self._clock.time_us()
        if topic is not None:
            wanted = topic if isinstance(topic, str) else topic.name
            infos = [await self._directory.info(wanted)]
        else:
            infos = [info for info in await local.topics() if not info.name.startswith("_")]

        def work(store: Store) -> list[LagInfo]:
            return [
                each
                for info in infos
                for subscription in store.cursors.subscriptions(info.log_id)
                if name is None or subscription.name == name
                for each in subscriptions.lag(store, info, subscription, now_us)
            ]

        return await local.call(work, local.store)

    async def health(
        self, topic: Topic[Any] | str | None, stalled_after: float | timedelta | None, staged: int | None
    ) -> Health:
        """Return how subscriptions and the store do; `staged` is what waits in the outbox."""
        after = self.stalled_seconds if stalled_after is None else seconds(stalled_after, "stalled_after")
        local = await self._local()
        name = None if topic is None else topic if isinstance(topic, str) else topic.name
        info = None if name is None else await self._directory.info(name)
        here = here_of(self._dispatcher)
        now_us = self._clock.time_us()

        def work(store: Store) -> Health:
            return examine(
                store, info, now_us=now_us, stalled_after=after, history=self._history, here=here, staged=staged
            )

        with self._directory.forgotten_if_deleted(name or ""):
            return await local.call(work, local.store)

    async def seek(
        self, topic: Topic[Any] | str, name: str, to: Start, partition: int | None
    ) -> dict[int, tuple[int, int]]:
        """Move a subscription."""
        now_us = self._clock.time_us()
        return await self._do(
            topic, lambda store, info: subscriptions.seek(store, info, name, to, partition=partition, now_us=now_us)
        )

    async def change(self, topic: Topic[Any] | str, name: str, changes: Mapping[str, Any]) -> Subscription:
        """Change a subscription's policy."""
        return self._seen(await self._do(topic, lambda store, info: subscriptions.change(store, info, name, changes)))

    async def resume(self, topic: Topic[Any] | str, name: str) -> Subscription:
        """Let a subscription go on."""
        return self._seen(await self._do(topic, lambda store, info: subscriptions.resume(store, info, name)))

    def _seen(self, changed: Subscription) -> Subscription:
        """Let the consumers of this process go by it at once; those of others see it a moment later."""
        for member in list(self._dispatcher.members) if self._dispatcher is not None else ():
            if (member.topic.log_id, member.subscription.name) == (changed.log_id, changed.name):
                member.see(changed)
        return changed

    async def delete(self, topic: Topic[Any] | str, name: str) -> bool:
        """Delete a subscription with its progress and dead letters."""
        return await self._do(topic, lambda store, info: store.cursors.delete_subscription(info.log_id, name))


def _ignore(_partition: int, _gap: Gap) -> None:
    """Do nothing: the log has told of it already."""
