"""Telling: what this process has in hand, for people who look from another one.

Leases and cursors say whose a shard is; what of it is in somebody's hands only its process knows. So each process
that consumes tells it through the store, where that can (`penstock.ports.Telling`): how many events are in hand, where
and since when, which handlers take long, by their names, and what waits to go to another process and cannot yet.

It is looked at once a second, beside the path of events. A look that found the same as the one before is told only
every few seconds, so that the age of what is heard says whether its process is still there to tell: one that is
stopped, or whose event loop is blocked, falls silent. Nothing rests on any of it, and nobody but people reads it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.columns import slot_of_key
from penstock.ports import Telling
from penstock.rows import TOLD_BYTES_MAX
from penstock.runtime.entrances import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.ports import Store
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.member import AtWork, Member
    from penstock.runtime.seat import Seat

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
CONFIRM_SECONDS: Final = 5.0
"""What stays the same is told again after so long."""
SILENT_SECONDS: Final = 2 * CONFIRM_SECONDS
"""A process that has told nothing for so long, and had something in hand, cannot tell."""
LONG_SECONDS: Final = 1.0
"""A handler that runs for so long is told by its name, and so are slots that wait for so long to leave."""
HANDLERS_TOLD: Final = 8
"""Of each subscription, those that run for the longest."""
SHARDS_TOLD: Final = 128
"""Of each subscription; all others are in the sum alone."""
SUBSCRIPTIONS_TOLD: Final = 200
"""Those with something in hand that is the oldest."""
SEATS_AT_A_TIME: Final = 64
"""So many are looked at before others have the event loop …"""
BUSY_SEATS_AT_A_TIME: Final = 4
"""… and so many of those that have something in hand: there each event is looked at, in columns."""
CLOCK_US: Final = 1_000_000
"""The clock on the wall may differ by so much from how it began before times are told anew."""


# --- what is told -----------------------------------------------------------------------------


class InHand(msgspec.Struct, frozen=True, kw_only=True):
    """What is in hand of one shard; where slots matter, of one slot of a partition."""

    partition: int
    slot: int | None
    """The slot, or the berth where events are claimed; None for a whole partition."""
    events: int
    since_us: int
    """When the oldest of them was handed over, in microseconds since 1970 UTC."""


class RunningHandler(msgspec.Struct, frozen=True, kw_only=True):
    """A handler that takes long."""

    handler: str
    partition: int
    offset: int
    slot: int | None
    since_us: int
    how: str
    """What is known of it besides; empty if it merely runs."""


class Staying(msgspec.Struct, frozen=True, kw_only=True):
    """Slots that are another process's due, and cannot leave yet."""

    slots: tuple[int, ...]
    since_us: int
    in_hand: bool
    """Whether events of them are in hand; else they are settled, and that is not written."""
    trouble: str
    """Why it is not written, if that is known."""


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does with one subscription."""

    log_id: str
    subscription: str
    in_flight: int
    shards: tuple[InHand, ...] = ()
    handlers: tuple[RunningHandler, ...] = ()
    """Those that run for the longest …"""
    handlers_long: int = 0
    """… of so many that take long."""
    staying: tuple[Staying, ...] = ()

    @property
    def since_us(self) -> int | None:
        """When the oldest was handed over."""
        return min((each.since_us for each in self.shards), default=None)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """What a process tells."""

    process: str
    """The name of its lease."""
    pid: int
    subscriptions: tuple[Doing, ...]
    left_out: int = 0
    """How many subscriptions more it has something of in hand."""


_decode = msgspec.json.Decoder(Document).decode
_encode = msgspec.json.Encoder().encode


def encoded(document: Document) -> bytes:
    """Return a document as bytes; of one that is too large as much as may be told."""
    data = _encode(document)
    while len(data) > TOLD_BYTES_MAX:
        kept = document.subscriptions[: len(document.subscriptions) // 2]
        left_out = document.left_out + len(document.subscriptions) - len(kept)
        document = msgspec.structs.replace(document, subscriptions=kept, left_out=left_out)
        data = _encode(document)
    return data


# --- hearing ----------------------------------------------------------------------------------


class Heard(NamedTuple):
    """What was heard of a process."""

    document: Document
    age_seconds: float
    """How long ago it was told."""
    present: bool
    """Whether it still has its lease; without it others may have what it had."""

    @property
    def silent(self) -> bool:
        """Whether it tells nothing any more though it lives."""
        return self.age_seconds > SILENT_SECONDS

    def of(self, log_id: str, name: str) -> Doing | None:
        """Return what it does with a subscription."""
        wanted = (each for each in self.document.subscriptions if (each.log_id, each.subscription) == (log_id, name))
        return next(wanted, None)


def hear(store: Store, now_us: int) -> list[Heard]:
    """Return what all living processes tell, by their names; nothing if the store cannot tell."""
    found = []
    for told in store.told() if isinstance(store, Telling) else ():
        try:
            document = _decode(told.document)
        except ValueError:
            continue  # of another version, or of somebody else
        present = store.leases.holder(document.process) is not None
        found.append(Heard(document, max(now_us - told.at, 0) / 1_000_000, present))
    return found


# --- telling ----------------------------------------------------------------------------------


class Teller(Loop):
    """The loop that tells what this process has in hand."""

    def __init__(self, dispatcher: Dispatcher, jitter: Callable[[], float]) -> None:
        super().__init__("telling what is in hand", dispatcher.clock, jitter)
        self._dispatcher = dispatcher
        self._told: tuple[Doing, ...] = ()
        self._told_at = 0.0
        self._wall_us = 0
        """What the clock on the wall said when the other one was at 0."""

    def start(self) -> None:
        """Begin, if the store can tell."""
        if isinstance(self._dispatcher.host.store, Telling):
            super().start()

    async def _round(self) -> float:
        now = self._clock.monotonic()
        self._set_wall(now)
        doing = await self._look()
        if doing != self._told or (doing and now - self._told_at >= CONFIRM_SECONDS):
            await self._tell(doing)
            self._told, self._told_at = doing, now
        return LOOK_SECONDS

    def _set_wall(self, now: float) -> None:
        """Keep the same relation of both clocks, so that the same moment is always told as the same."""
        wall_us = self._clock.time_us() - round(now * 1_000_000)
        if abs(wall_us - self._wall_us) > CLOCK_US:
            self._wall_us = wall_us

    def _us(self, moment: float) -> int:
        return self._wall_us + round(moment * 1_000_000)

    async def _tell(self, doing: tuple[Doing, ...]) -> None:
        host, process = self._dispatcher.host, self._dispatcher.presence.name
        assert isinstance(host.store, Telling)
        some = sorted(doing, key=lambda each: (each.since_us is None, each.since_us))[:SUBSCRIPTIONS_TOLD]
        left_out = len(doing) - len(some)
        document = Document(process=process, pid=os.getpid(), subscriptions=tuple(some), left_out=left_out)
        await host.call(host.store.tell, process, encoded(document) if doing else b"")

    def _failed(self, error: Exception) -> float:
        logger.debug("%s failed, and will be tried again: %s", self._what, error)
        return CONFIRM_SECONDS  # nothing rests on it, and what is heard has an age

    def _fenced(self) -> None:
        """Do nothing: telling is not fenced."""

    async def _ended(self) -> None:
        if self._told:
            self._told = ()
            try:
                await self._tell(())
            except Exception as error:  # noqa: BLE001 - closing goes on; it is gone with the store's opening, too
                logger.debug("%s could not be ended: %s", self._what, error)

    # --- looking ------------------------------------------------------------------------------

    async def _look(self) -> tuple[Doing, ...]:
        """Return what each subscription does here, those with nothing in hand left out."""
        by_subscription: defaultdict[tuple[str, str], list[Member]] = defaultdict(list)
        for member in self._dispatcher.members:
            by_subscription[member.topic.log_id, member.subscription.name].append(member)
        found, looked_at = [], 0
        for members in by_subscription.values():
            looked_at += sum(len(member.seats) for member in members)
            if looked_at >= SEATS_AT_A_TIME:
                looked_at = 0
                await asyncio.sleep(0)
            doing = await self._doing(members)
            if doing.in_flight or doing.staying:
                found.append(doing)
        return tuple(found)

    async def _doing(self, members: list[Member]) -> Doing:
        busy = [
            seat for member in members for seat in member.seats if seat.engine is not None and seat.engine.in_flight
        ]
        shards: list[InHand] = []
        for number, seat in enumerate(busy, 1):
            if len(shards) >= SHARDS_TOLD:
                break
            shards += self._in_hand(seat)
            if number % BUSY_SEATS_AT_A_TIME == 0:
                await asyncio.sleep(0)
        now = self._clock.monotonic()
        work = [each for member in members for each in member.at_work() if now - each.began >= LONG_SECONDS]
        return Doing(
            log_id=members[0].topic.log_id,
            subscription=members[0].subscription.name,
            in_flight=sum(seat.engine.in_flight for seat in busy if seat.engine is not None),
            shards=tuple(shards[:SHARDS_TOLD]),
            handlers=self._handlers(work),
            handlers_long=len(work),
            staying=tuple(each for member in members for each in self._staying(member, now)),
        )

    def _in_hand(self, seat: Seat) -> Iterable[InHand]:
        # It may have been lost while others had the event loop.
        for held in () if seat.engine is None else seat.engine.held():
            slot = seat.berth or held.slot
            yield InHand(partition=seat.shard.partition, slot=slot, events=held.events, since_us=self._us(held.since))

    def _handlers(self, work: list[AtWork]) -> tuple[RunningHandler, ...]:
        return tuple(
            RunningHandler(
                handler=each.handler,
                partition=each.seat.shard.partition,
                offset=each.offset,
                slot=_slot_of(each),
                since_us=self._us(each.began),
                how=each.how,
            )
            for each in sorted(work, key=lambda each: each.began)[:HANDLERS_TOLD]
        )

    def _staying(self, member: Member, now: float) -> Iterable[Staying]:
        for slots, since, in_hand, trouble in member.leaving():
            if now - since >= LONG_SECONDS:
                yield Staying(slots=slots, since_us=self._us(since), in_hand=in_hand, trouble=trouble)


def _slot_of(work: AtWork) -> int | None:
    """Return the slot, or the berth, of what a handler works on."""
    if work.seat.berth or work.seat.slots is None:
        return work.seat.berth or None
    return slot_of_key(work.key, work.seat.shard.partition)
