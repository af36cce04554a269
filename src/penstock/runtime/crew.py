"""Crew: all consumers of one subscription in this process, where several consume it at a time.

Each consumer has a lease that says that it is there; whoever looks at these leases knows all consumers, wherever they
run. What a crew has of the subscription, and how it comes to have it, is said by `Team` (by slots) and `Pool` (by
claims); every crew is *balanced* when it begins, and whenever somebody comes, goes or is gone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, TypeVar

from penstock.engine.messages import ConsumerLeft
from penstock.errors import StaleDelivery
from penstock.runtime.member import Member, Waiter
from penstock.runtime.subscriptions import members_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.engine.messages import Deliver
    from penstock.offsets import Gap
    from penstock.rows import Lease, Subscription, TopicInfo
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.member import AtWork
    from penstock.runtime.seat import Seat


V = TypeVar("V")

BUSY_SECONDS: Final = 1.0
"""A consumer that has not asked for so long is busy with one event: what it has not begun is for the others."""


class Place(Waiter):
    """One consumer of a crew; what `Member` is to the consumer of another subscription."""

    def __init__(self, crew: Crew, number: int, owner: str, on_gap: Callable[[int, Gap], None]) -> None:
        super().__init__(crew.clock)
        self.crew = crew
        self.presence = crew.presence
        self.number = number
        self.owner = owner
        self.on_gap = on_gap
        self.lease: Lease | None = None
        self.closed = False
        self.asked_at = self.clock.monotonic()
        self.handed_at: float | None = None
        """When it was given what it has; None if it was given nothing."""
        self.prefetch = crew.prefetch

    @property
    def busy(self) -> bool:
        """Whether it has not asked for long."""
        return self.clock.monotonic() - self.asked_at > BUSY_SECONDS

    @property
    def seats(self) -> list[Seat]:
        """The seats that it may be given events of."""
        return self.crew.seats

    @property
    def ended(self) -> BaseException | None:
        """Why it can go on no more."""
        return self.crew.ended

    @property
    def gaps(self) -> int:
        """How many holes were declared."""
        return self.crew.gaps

    def take(self, events_max: int, bytes_max: int, *, singly: bool) -> tuple[Seat, Deliver] | None:
        """Return the next events that are for it."""
        self.asked_at = self.clock.monotonic()
        return self.crew.take_for(self, events_max, bytes_max, singly=singly)

    async def flush(self) -> None:
        """Return when everything that was settled is on the medium; `StaleDelivery`, once, if some of it never will."""
        await self.crew.flush()


class Crew(Member, ABC):
    """The consumers of a subscription in this process."""

    def __init__(self, dispatcher: Dispatcher, topic: TopicInfo, subscription: Subscription) -> None:
        # A name of its own: the leases of an earlier one, which is about to give them back, are not this one's.
        dispatcher.crews_made += 1
        owner = f"{dispatcher.presence.name}/{dispatcher.crews_made}"
        super().__init__(dispatcher, topic, subscription, owner, self._tell_gap)
        self.members = members_prefix(topic.log_id, subscription.name)
        self.places: dict[int, Place] = {}
        self._numbers = 0
        self._losses = dispatcher.presence.losses
        self._balancing = asyncio.Lock()
        self._consumers: list[str] = []
        """All consumers of the subscription, as they were when it was last balanced …"""
        self._news = True
        """… and whether they are others by now."""
        self._fits = False
        self._unwritten: StaleDelivery | None = None
        """What was settled and lost, until somebody is told."""

    def __str__(self) -> str:
        return f"subscription {self.subscription.name!r} of {self.topic.name}"

    def _first_seats(self) -> list[Seat]:
        return []

    # --- what a kind of crew does in its own way ----------------------------------------------

    @abstractmethod
    def take_for(self, place: Place, events_max: int, bytes_max: int, *, singly: bool) -> tuple[Seat, Deliver] | None:
        """Return the next events for the consumer that asks."""

    @abstractmethod
    async def _balance(self) -> None:
        """Have what is to be had; all consumers have their leases."""

    @abstractmethod
    async def _give_all_back(self) -> None:
        """Give back whatever it has; nobody balances it meanwhile."""

    @abstractmethod
    def _lose_all(self, why: str) -> None:
        """Have nothing any more."""

    def tend(self) -> None:
        """Look after what only time brings; called again and again."""
        for place in self.places.values():
            if place.busy:
                place.give_back()

    # --- coming and going ---------------------------------------------------------------------

    async def add(self, owner: str, on_gap: Callable[[int, Gap], None]) -> Place:
        """Let a consumer come."""
        self._numbers += 1
        place = Place(self, self._numbers, owner, on_gap)
        self.places[place.number] = place
        # Should this be cut off, what is the due of others, too, is not left half done: leaving waits for it.
        balancing = asyncio.ensure_future(self.balance())
        try:
            await asyncio.shield(balancing)
        except BaseException:
            await self._dispatcher.leave(place)
            raise
        return place

    async def remove(self, place: Place) -> None:
        """Let a consumer go: what it holds is given to the others, and the last one gives everything back."""
        place.closed = True
        place.wake()
        self.places.pop(place.number, None)
        for seat in self.seats:
            seat.tell(ConsumerLeft(place.number))
        lease, place.lease = place.lease, None
        try:
            if not self.places:
                await self.leave()
        finally:
            if lease is not None:
                await self._dispatcher.presence.sign_off(lease)
        if self.places:
            self._news = True
            self._left(place)
            self._dispatcher.watch.wake()

    def _left(self, place: Place) -> None:
        """Give what a consumer had to those that stay."""

    async def leave(self) -> None:
        """Give everything back."""
        self.closed = True
        for place in self.places.values():
            place.closed = True
        self.wake()
        async with self._balancing:
            await self._give_all_back()
            self.seats = []

    @property
    def empty_seats(self) -> list[Seat]:
        """None that wait for others: what is free is found by `balance`."""
        return []

    def lost(self, _seat: Seat) -> None:
        """Note that a seat was lost; the next balance loads it again, or gives it up."""
        self._fits = False
        self.spread()
        self.wake()
        self._dispatcher.watch.wake()

    def wake(self) -> None:
        """Let whoever waits look again."""
        for place in self.places.values():
            place.wake()

    def end(self, error: BaseException) -> None:
        """Go on no more, and say why to whoever waits."""
        super().end(error)
        self.wake()

    def _tell_gap(self, partition: int, gap: Gap) -> None:
        place = next(iter(self.places.values()), None)
        if place is not None:  # one of them is enough: it is one hole
            place.on_gap(partition, gap)

    async def flush(self) -> None:
        """Return when everything that was settled is on the medium; `StaleDelivery`, once, if some of it never will."""
        await super().flush()
        if self._unwritten is not None:
            error, self._unwritten = self._unwritten, None
            raise error

    def at_work(self) -> Iterable[AtWork]:
        """Return the handlers that run for any of its consumers."""
        return [work for place in self.places.values() for work in place.handlers()]

    # --- balancing ----------------------------------------------------------------------------

    def hear(self, consumers: list[str]) -> None:
        """Note which consumers there are, by the names of their leases."""
        self._news = self._news or sorted(consumers) != self._consumers

    @property
    def restless(self) -> bool:
        """Whether there is a reason to balance it: others are there, or it has not what is its due."""
        return self._news or not self._fits

    async def balance(self) -> None:
        """Have what is due, or free; and lose what was lost."""
        async with self._balancing:
            if self.closed or self.ended is not None:
                return
            self._fits = False  # until it is seen to
            presence = self._dispatcher.presence
            if presence.lapsed or presence.losses != self._losses:
                self._losses = presence.losses
                self._lose_all("this process was silent for longer than its lease")
                for place in self.places.values():
                    place.lease = None
            for place in list(self.places.values()):
                if place.lease is None:
                    lease = await presence.acquire(f"{self.members}{place.owner}", place.owner)
                    if lease is not None and place.closed:  # it has left meanwhile
                        await presence.sign_off(lease)
                    else:
                        place.lease = lease
            try:
                await self._balance()
            except BaseException:
                self._news = True  # what was there to be seen may not have been seen to
                raise

    async def _looked(self, look: Callable[[], V]) -> V:
        """Look at the store; what is heard meanwhile is news, whatever was seen."""
        self._news = False
        return await self._dispatcher.host.call(look)

    def _know_consumers(self, consumers: list[Lease]) -> None:
        self._consumers = sorted(lease.name for lease in consumers)

    def _lose_seat(self, seat: Seat, why: str) -> None:
        seat.lose(why)
        if seat.lost_unwritten:
            self._unwritten = StaleDelivery(str(seat), seat.lost_because)

    def _forget_seats(self, gone: set[Seat]) -> None:
        self.seats = [seat for seat in self.seats if seat not in gone]
        for seat in gone:
            self.suspected.pop(seat, None)
