"""Pool: all consumers of one `shared` subscription in this process, which take whatever comes next.

There is no order, and nobody waits for anybody. A process has a *berth* in each partition: a number with a lease, in
whose name it claims ranges of the log when a consumer asks and there is nothing for it (`penstock.settling`). What it
has claimed and not settled is in the cursor. So when a process ends, however it ends, its berths are free, and whoever
comes first takes them over with all that is open there: events, and those that were set aside.

What a berth left behind may have killed its process, and is tried with care (`engine.suspects`); meanwhile new events
are claimed by another berth. A berth that has nothing any more is given back.

A process that is alone claims much at a time. When others come it gives back what it has not begun, and so does one
whose consumers do not ask for a while; what is given back is claimed before anything else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from penstock.engine.claims import AHEAD_MAX
from penstock.engine.messages import Ask, Freed, Shed, Want
from penstock.rows import ParkedFilter, Shard
from penstock.runtime.crew import Crew, Place
from penstock.runtime.member import PREFETCH
from penstock.runtime.seat import Seat
from penstock.runtime.subscriptions import SLOT, shards_prefix
from penstock.settling import NOBODY, claims_of, frontier, unsettled

if TYPE_CHECKING:
    from penstock.engine.messages import Deliver
    from penstock.engine.shard import Shard as Engine
    from penstock.rows import Cursor, Lease, Subscription, TopicInfo, Waiting
    from penstock.runtime.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

BERTHS: Final = 256
"""So many a partition has; one is used by each process, and one more for each that has died."""
LOOK_SECONDS: Final = 0.5
"""A process that has nothing to do looks so often whether others have given something back."""
QUICK_SECONDS: Final = 0.01
SLOW_SECONDS: Final = 0.05
"""A consumer that is done with what it has sooner is given more at a time, one that is done later less."""


class View(NamedTuple):
    """What the store says of a subscription."""

    consumers: list[Lease]
    taken: dict[Shard, Lease]
    """Berths that somebody has."""
    left: list[Shard]
    """Berths that nobody has, and that have something."""
    freed: set[int]
    """Partitions of which something was given back."""


class BerthSeat(Seat):
    """A berth of one partition, and what it has claimed."""

    __slots__ = ()

    @property
    def shares_cursor(self) -> bool:
        """Whether others write the same cursor."""
        return True

    @property
    def cursor_shard(self) -> Shard:
        """The shard whose cursor it writes."""
        return self.shard._replace(slot=SLOT)

    @property
    def berth(self) -> int:
        """Which berth it has."""
        return self.shard.slot

    def _make_engine(self, cursor: Cursor, rows: list[Waiting], head: int, *, clean: bool, **of_its_own: Any) -> Engine:
        claimed = unsettled(cursor, self.berth)
        mine = msgspec.structs.replace(
            cursor,
            next_offset=frontier(cursor),
            settled=b"",
            attempts={offset: made for offset, made in cursor.attempts.items() if offset in claimed},
        )
        return super()._make_engine(mine, rows, head, clean=clean, berth=self.berth, claimed=claimed, **of_its_own)


class Pool(Crew):
    """The consumers of a `shared` subscription in this process, and the berths that it has."""

    def __init__(self, dispatcher: Dispatcher, topic: TopicInfo, subscription: Subscription) -> None:
        super().__init__(dispatcher, topic, subscription)
        self.prefetch = 1  # until it is seen how quick the consumers are
        self._hungry = False
        """Whether the last one who asked got nothing."""
        self._look_at = 0.0

    @property
    def _accompanied(self) -> bool:
        """Whether there are consumers elsewhere, too."""
        return len(self._consumers) > len(self.places)

    # --- handing over -------------------------------------------------------------------------

    def take_for(self, place: Place, events_max: int, bytes_max: int, *, singly: bool) -> tuple[Seat, Deliver] | None:
        """Return the next events; if there are none, some are claimed."""
        now = self.clock.monotonic()
        if place.handed_at is not None:
            self._pace(place, now - place.handed_at)
        found = self._take(Ask(events_max, bytes_max, singly, place.number), self.seats)
        self._hungry = found is None
        place.handed_at = None if found is None else now
        if found is None and not self.presence.lapsed:
            self._claim(events_max)
        return found

    def _pace(self, place: Place, lasted: float) -> None:
        """Let a consumer have no more single events at a time than it is done with in a moment."""
        if lasted < QUICK_SECONDS:
            place.prefetch = min(2 * place.prefetch, PREFETCH)
        elif lasted > SLOW_SECONDS:
            place.prefetch = max(place.prefetch // 4, 1)

    def _claim(self, events: int) -> None:
        """Let one of the seats claim for somebody who got nothing; they take turns.

        Not if there comes something for each consumer anyway: whoever waits asks again whenever anything happens.
        """
        count = len(self.seats)
        if sum(seat.engine is not None and seat.engine.bringing for seat in self.seats) >= len(self.places):
            return
        for at in range(count):
            seat = self.seats[(self._turn + at) % count]
            if seat.engine is not None and seat.engine.claimable:
                self._turn = (self._turn + at + 1) % count
                seat.tell(Want(events if self._accompanied else AHEAD_MAX))
                return

    def _part(self) -> float:
        return len(self.places) / max(len(self._consumers), len(self.places), 1)

    def tend(self) -> None:
        """Give back what nobody here has time for."""
        super().tend()
        if self._accompanied and all(place.busy for place in self.places.values()):
            self._shed()

    def _shed(self) -> None:
        for seat in self.seats:
            if seat.engine is not None and seat.engine.ahead:
                seat.tell(Shed())

    # --- balancing ----------------------------------------------------------------------------

    @property
    def restless(self) -> bool:
        """Whether there is a reason to balance it; one may be that others have given something back."""
        if super().restless or self._superfluous():
            return True
        return self._hungry and self._accompanied and self.clock.monotonic() >= self._look_at

    def see(self, subscription: Subscription) -> None:
        """Take the subscription as the watch has just read it; somebody may have brought back dead letters."""
        super().see(subscription)
        self._news = True

    async def _balance(self) -> None:
        """Load what was lost, take over what others have left behind, and have a berth for new events."""
        self._look_at = self.clock.monotonic() + LOOK_SECONDS
        if self._content and not await self._dispatcher.host.call(self._look_for_freed):
            self._fits = True
            return
        for seat in [seat for seat in self.seats if seat.engine is None]:
            await self._have(seat)
        for seat in self._superfluous():
            await seat.leave()
            self._forget_seats({seat})
        view = await self._looked(self._look)
        self._meet(view.consumers)
        disowned = await self._compare(view)
        mine = {seat.shard for seat in self.seats}
        for shard in view.left:
            if shard not in mine:
                await self._have(BerthSeat(self._dispatcher, self, self.topic, shard))
        for partition in self.topic.partitions:
            number = partition.number
            if not self._claiming(number) or (number in view.freed and not self._claiming(number, anywhere=True)):
                await self._begin(number, view)
            for seat in self._claiming(number, anywhere=True) if number in view.freed else ():
                seat.tell(Freed())
        self._fits = all(self._claiming(partition.number) for partition in self.topic.partitions)
        if disowned:
            self._news = True  # it is for whoever comes first, and nobody else may be there
        self.spread()
        self.wake()

    @property
    def _content(self) -> bool:
        """Whether there is nothing to do, unless others have given something back."""
        claims = all(self._claiming(partition.number) for partition in self.topic.partitions)
        return claims and not self._news and not self._superfluous() and all(seat.engine for seat in self.seats)

    def _look_for_freed(self) -> bool:
        cursors = self._dispatcher.host.store.cursors.load(self.topic.log_id, self.subscription.name)
        return any(claims_of(cursor, NOBODY) for cursor in cursors)

    def _look(self) -> View:
        store, log_id, name = self._dispatcher.host.store, self.topic.log_id, self.subscription.name
        prefix = shards_prefix(log_id, name)
        # Before what they have: whoever is gone here has nothing there, and that one ends later is news. The other way
        # round nobody would take what one has left behind who ended in between, and was known to be gone.
        consumers = store.leases.held(self.members)
        # Before the cursors: what is released after this look is found by the next one.
        taken = {}
        for lease in store.leases.held(prefix):
            slot, partition = lease.name.removeprefix(prefix).split("/")
            taken[Shard(log_id, name, int(slot), int(partition))] = lease
        wanted = ParkedFilter(log_id=log_id, subscription=name, states=frozenset({"waiting"}))
        filled = {row.shard for row in store.parked.waiting(wanted)}
        freed = set()
        for cursor in store.cursors.load(log_id, name):
            filled |= {cursor.shard._replace(slot=berth) for berth in cursor.claims if unsettled(cursor, berth)}
            if claims_of(cursor, NOBODY):
                freed.add(cursor.shard.partition)
        left = sorted(shard for shard in filled if shard not in taken and shard.slot != NOBODY)
        return View(consumers, taken, left, freed)

    def _meet(self, consumers: list[Lease]) -> None:
        """Note who is there; whoever was alone has claimed much, and shares it with those who come."""
        alone = not self._accompanied
        self._know_consumers(consumers)
        if alone and self._accompanied:
            self._shed()

    async def _compare(self, view: View) -> int:
        """Lose seats whose berth another has, and give back what the leases say is here and is not; so many were."""
        for seat in list(self.seats):
            lease = view.taken.get(seat.shard)
            if seat.lease is not None and (lease is None or lease.epoch != seat.lease.epoch):
                self._lose_seat(seat, "its berth has another owner")
                self._forget_seats({seat})
        mine = {seat.shard for seat in self.seats}
        strange = [lease for shard, lease in view.taken.items() if lease.owner == self.owner and shard not in mine]
        for lease in strange:  # an answer was lost
            await self._dispatcher.presence.give_back(lease, clean=False)
        return len(strange)

    def _claiming(self, partition: int, *, anywhere: bool = False) -> list[Seat]:
        """Return the seats that claim new events, or even any: those that others have given back lie before these."""
        seats = [seat for seat in self.seats if seat.shard.partition == partition]
        fit = [seat for seat in seats if seat.engine is not None and not seat.engine.suspecting]
        return [seat for seat in fit if seat.engine is not None and seat.engine.empty] if anywhere else fit

    async def _begin(self, partition: int, view: View) -> None:
        """Have a berth of which nobody has anything."""
        berths = [Shard(self.topic.log_id, self.subscription.name, number, partition) for number in range(1, BERTHS)]
        mine = {seat.shard for seat in self.seats}
        for shard in berths:
            if shard in view.taken or shard in view.left or shard in mine:
                continue
            if await self._have(BerthSeat(self._dispatcher, self, self.topic, shard)):
                return

    async def _have(self, seat: Seat) -> bool:
        """Load a seat; False if somebody else has it, and then it is none of ours."""
        if seat not in self.seats:
            self.seats = [*self.seats, seat]
        if not await seat.take():
            self._forget_seats({seat})
            return False
        self._dispatcher.monitor.race(seat)
        return True

    def _superfluous(self) -> list[Seat]:
        """Return seats that have nothing, of partitions that have others which claim."""
        found: defaultdict[int, list[Seat]] = defaultdict(list)
        for seat in self.seats:
            if seat.engine is not None and not seat.engine.suspecting:
                found[seat.shard.partition].append(seat)
        return [
            seat for seats in found.values() for seat in seats[:-1] if seat.engine is not None and seat.engine.spent
        ]

    # --- going --------------------------------------------------------------------------------

    async def _give_all_back(self) -> None:
        await asyncio.gather(*(seat.leave() for seat in self.seats))

    def _lose_all(self, why: str) -> None:
        for seat in self.seats:
            self._lose_seat(seat, why)
        self._forget_seats(set(self.seats))
