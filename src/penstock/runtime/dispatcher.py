"""Dispatcher: everything that delivers in one process, put together.

It begins with the first consumer and ends with the bus: the process's presence, the monitor, the committer, the ledger,
the watch over what others change, and the teller. A consumer is a `Member` of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, StoreClosed, UnknownSubscription
from penstock.runtime.committer import Committer
from penstock.runtime.crew import Crew, Place
from penstock.runtime.entrances import Host, Loop
from penstock.runtime.ledger import BUSY_SECONDS, Ledger
from penstock.runtime.member import Member
from penstock.runtime.monitor import Monitor
from penstock.runtime.pool import Pool
from penstock.runtime.presence import Presence
from penstock.runtime.subscriptions import CLAIMED, MEMBERS, SHARED, subscription_of
from penstock.runtime.tally import Tallies, Tally
from penstock.runtime.team import Team
from penstock.runtime.telling import Teller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from penstock.clock import Clock
    from penstock.offsets import Gap
    from penstock.rows import Subscription, TopicInfo
    from penstock.runtime.seat import Seat, Seen

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 10.0
LEASE_SECONDS_MIN: Final = 0.5
"""A shorter lease would be over before a busy machine could renew it."""
STANDBY_SECONDS: Final = 0.25
"""How often a consumer that waits looks whether the owner is still there."""
LOOK_SECONDS: Final = 0.02
"""A look at one subscription takes no longer than this by itself."""
PUT_OFF_MAX: Final = 20
"""So often in a row the look at changes is put off because changes are being made here."""
SEATS_AT_A_TIME: Final = 100
"""Of the seats that are looked at again."""
FAILED_SECONDS: Final = 1.0
SAVE_SECONDS: Final = 5.0
"""How long a shard that is given back waits for a store that does not take its progress."""


class Dispatcher:
    """The delivery of one process. `ledger=False` is for measuring what the ledger costs."""

    def __init__(
        self,
        host: Host,
        *,
        owner: str,
        clock: Clock,
        jitter: Callable[[], float],
        lease_seconds: float = LEASE_SECONDS,
        ledger: bool = True,
    ) -> None:
        self.host = host
        self.clock = clock
        self.monitor = Monitor(host, clock=clock, jitter=jitter)
        self.committer = Committer(host, clock=clock, jitter=jitter, wrote=self._wrote)
        self.ledger = Ledger(host, owner=owner, clock=clock, jitter=jitter)
        self.presence = Presence(
            host,
            owner=owner,
            lease_seconds=max(lease_seconds, LEASE_SECONDS_MIN),
            clock=clock,
            jitter=jitter,
            lost=self._not_present,
        )
        self.watch = Watch(self, jitter)
        self.teller = Teller(self, jitter)
        self.members: dict[Member, None] = {}
        self.crews: dict[tuple[str, str], Crew] = {}
        """By log and subscription: those whose consumers share what this process has of it."""
        self.crews_made = 0
        self.waiting: dict[Member, None] = {}
        """Those that may have an empty seat."""
        self.own_changes = OwnChanges()
        self.tallies = Tallies()
        self._ledger_at = 0.0
        self.with_ledger = ledger

    def _start(self) -> None:
        self.presence.start()
        self.committer.start()
        self.watch.start()
        self.teller.start()
        if self.with_ledger:
            self.ledger.start()

    async def stop(self) -> None:
        """Give every shard back, then end the loops."""
        await asyncio.gather(*(self.leave(member) for member in list(self.members)))
        for loop in (self.watch, self.teller, self.monitor, self.committer, self.ledger, self.presence):
            await loop.stop()

    async def join(
        self, topic: TopicInfo, subscription: Subscription, owner: str, on_gap: Callable[[int, Gap], None]
    ) -> Member | Place:
        """Let a consumer have what is free of a subscription, or its part."""
        self._start()
        if subscription.mode in SHARED:
            return await self._join_crew(topic, subscription, owner, on_gap)
        member = Member(self, topic, subscription, owner, on_gap)
        # Before it has anything: what is changed while it joins is seen by its seats, or by the watch.
        self.members[member] = None
        try:
            await member.join()
        except BaseException:
            await self.leave(member)
            raise
        if member.empty_seats:
            self.waiting[member] = None
        for seat in member.seats:
            self.monitor.race(seat)
        return member

    async def _join_crew(
        self, topic: TopicInfo, subscription: Subscription, owner: str, on_gap: Callable[[int, Gap], None]
    ) -> Place:
        key = (topic.log_id, subscription.name)
        crew = self.crews.get(key)
        if crew is None or crew.closed or crew.ended is not None:
            kind = Pool if subscription.mode == CLAIMED else Team
            crew = self.crews[key] = kind(self, topic, subscription)
            self.members[crew] = None
        return await crew.add(owner, on_gap)

    async def leave(self, member: Member | Place) -> None:
        """Let a consumer go, which goes on by itself if this is cut off; may be repeated."""
        await member.departure.by(partial(self._leave, member))

    async def _leave(self, member: Member | Place) -> None:
        if isinstance(member, Place):
            await member.crew.remove(member)
            if not member.crew.places:
                self._forget(member.crew)
            return
        self.waiting.pop(member, None)
        await member.leave()
        self.members.pop(member, None)
        if isinstance(member, Crew):
            self._forget(member)

    def _forget(self, crew: Crew) -> None:
        self.members.pop(crew, None)
        key = (crew.topic.log_id, crew.subscription.name)
        if self.crews.get(key) is crew:
            del self.crews[key]

    def tally(self, topic: str, subscription: str) -> Tally:
        """Return what counts the deliveries of a subscription in this process."""
        return self.tallies.of(topic, subscription, lambda: {member.tally for member in self.members})

    async def saved(self, seat: Seat) -> bool:
        """Write what a shard has settled; False if the store does not take it, or not in time."""
        saving = asyncio.ensure_future(self.committer.flush([seat]))
        limit = asyncio.ensure_future(self.clock.pause(SAVE_SECONDS))
        done, _ = await asyncio.wait([saving, limit], return_when=asyncio.FIRST_COMPLETED)
        limit.cancel()
        if saving not in done:
            saving.cancel()
            logger.warning("%s: its progress could not be written in time; the next one begins where it was", seat)
        return saving in done and saving.exception() is None

    def _wrote(self) -> None:
        now = self.clock.monotonic()
        if self.with_ledger and now >= self._ledger_at:
            self._ledger_at = now + BUSY_SECONDS
            self.ledger.wake()

    def _not_present(self) -> None:
        for member in self.members:
            for seat in member.seats:
                seat.lose("this process was silent for longer than its lease")


class OwnChanges:
    """How many changes of the store's revision were made here: these are no news.

    While one is being made nobody knows whether the revision counts it already.
    """

    def __init__(self) -> None:
        self.made = 0
        self._making = 0
        self._none_made = asyncio.Event()
        self._allowed = asyncio.Event()
        self._allowed.set()

    @asynccontextmanager
    async def making(self) -> AsyncIterator[None]:
        """Make a change in this block, which counts it."""
        await self._allowed.wait()
        self._making += 1
        self._none_made.clear()
        try:
            yield
        finally:
            self._making -= 1
            if not self._making:
                self._none_made.set()

    @property
    def state(self) -> tuple[int, int]:
        """How many were made, and how many are being made; as long as it is the same, nothing has happened."""
        return self.made, self._making

    @asynccontextmanager
    async def stopped(self) -> AsyncIterator[None]:
        """Let those end that are being made, and let none begin in this block."""
        self._allowed.clear()
        try:
            if self._making:
                await self._none_made.wait()
            yield
        finally:
            self._allowed.set()


class Watch(Loop):
    """The loop that sees what others do: owners that end, and subscriptions that are changed, moved or deleted."""

    def __init__(self, dispatcher: Dispatcher, jitter: Callable[[], float]) -> None:
        super().__init__("the watch over subscriptions", dispatcher.clock, jitter)
        self._dispatcher = dispatcher
        self._foreign: int | None = None
        self._leases_revision: int | None = None
        self._processes: set[str] = set()
        """Those that had consumers of anything that is shared, when this was last looked at."""
        self._put_off = 0

    async def _round(self) -> float:
        began = self._clock.monotonic()
        await self._look_at_changes()
        await self._look_at_crews()
        waiting = self._dispatcher.waiting
        for member in list(waiting):
            for seat in member.empty_seats:
                await self._try(member, seat)
            if not member.empty_seats:
                waiting.pop(member, None)
        # Where there is much to look at, looking leaves most of the time to the consumers. Where there is little, it
        # was the event loop that took long, and slots that are free must not wait for that.
        most = LOOK_SECONDS * len(self._dispatcher.members)
        return max(STANDBY_SECONDS, min(2 * (self._clock.monotonic() - began), most))

    async def _look_at_crews(self) -> None:
        """Balance those of which a consumer has come or gone anywhere, and those that have not what is their due."""
        crews = self._dispatcher.crews
        if not crews:
            return
        host = self._dispatcher.host
        revision, gone = await host.call(self._look_at_leases)
        if revision != self._leases_revision or gone:
            members = await host.call(host.store.leases.held, MEMBERS)
            self._processes = {lease.under.lease for lease in members if lease.under is not None}
            consumers: defaultdict[str, list[str]] = defaultdict(list)
            for lease in members:
                consumers[subscription_of(lease.name)].append(lease.name)
            for crew in crews.values():
                crew.hear(consumers[crew.members])
            self._leases_revision = revision
        for crew in list(crews.values()):
            crew.tend()
            if crew.restless:
                await self._balance(crew)

    def _look_at_leases(self) -> tuple[int, bool]:
        """Return the revision of all leases, and whether a process that shares something is gone: it changes none."""
        leases = self._dispatcher.host.store.leases
        return leases.revision(), any(leases.holder(name) is None for name in self._processes)

    async def _balance(self, crew: Crew) -> None:
        try:
            await crew.balance()
        except StoreClosed:
            raise
        except UnknownSubscription as gone:
            crew.end(gone)
        except PenstockError as error:
            logger.info("%s: could not be balanced, and will be again: %s", crew.subscription.name, error)

    async def _try(self, member: Member, seat: Seat) -> None:
        host = self._dispatcher.host
        try:
            await member.retake(seat, await host.call(host.store.leases.holder, seat.lease_name))
        except StoreClosed:
            raise
        except UnknownSubscription as gone:
            member.end(gone)
        except PenstockError as error:
            logger.info("%s: could not be taken, and will be tried again: %s", seat, error)

    async def _foreign_changes(self) -> int | None:
        """Return how many changes others have made; None if it cannot be told now, while consumers begin here."""
        host, own = self._dispatcher.host, self._dispatcher.own_changes
        made, making = own.state
        revision = await host.call(host.store.cursors.revision)
        if making or own.state != (made, making):
            if self._put_off < PUT_OFF_MAX:
                self._put_off += 1
                return None
            async with own.stopped():
                revision, made = await host.call(host.store.cursors.revision), own.made
        self._put_off = 0
        return revision - made

    async def _look_at_changes(self) -> None:
        host = self._dispatcher.host
        foreign = await self._foreign_changes()
        if foreign is None or foreign == self._foreign:
            return
        # Before the subscriptions are read: a consumer that begins meanwhile is not missing.
        members = list(self._dispatcher.members)
        known = {(each.log_id, each.name): each for each in await host.call(host.store.cursors.subscriptions)}
        for member in members:
            subscription = known.get((member.topic.log_id, member.subscription.name))
            if subscription is None:
                member.end(UnknownSubscription(member.topic.log_id, member.subscription.name, topic=member.topic.name))
                continue
            member.see(subscription)
        held = [(seat, seat.engine) for member in members for seat in member.seats if seat.engine is not None]
        for first in range(0, len(held), SEATS_AT_A_TIME):
            some = held[first : first + SEATS_AT_A_TIME]
            seen = await host.call(_look_again, [seat for seat, _ in some])
            for (seat, engine), each in zip(some, seen, strict=True):
                seat.refresh(engine, each)
        self._foreign = foreign

    def _failed(self, error: Exception) -> float:
        super()._failed(error)
        return FAILED_SECONDS  # whoever waits for a shard waits no longer than this after the trouble is over

    def _fenced(self) -> None:
        """Do nothing: looking is not fenced."""

    async def _ended(self) -> None:
        """Nothing is held."""


def _look_again(seats: Sequence[Seat]) -> list[Seen | PenstockError]:
    return [seat.look_again() for seat in seats]
