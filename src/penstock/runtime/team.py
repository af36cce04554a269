"""Team: all consumers of one `key_shared` subscription in this process, and the slots that it has of it.

The 64 slots of a subscription are spread evenly over its consumers, wherever they run, without anybody who decides.
Each consumer has a lease that says that it is there, and each slot one that says whose it is; whoever looks at all of
them can say how many slots are whose due. A process with more than its due lets go of some, and a process with less
takes some that are free. So a consumer that comes or goes moves as many slots as are its due, and no others.

Slots that are acquired together are a *holding*, with a seat for each partition. They leave one by one, each as soon as
nothing of it is in hand and everything of it is written. What a holding shares with others is the cursor of each
partition, to which every owner adds what it has settled (`penstock.settling`).

Within the process slots are given to consumers in memory, and go from one to another at once: a lane is in one hand
at a time, whoever's that is, so that its order is kept.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.engine.division import Division
from penstock.engine.messages import Ask, Leaving
from penstock.engine.share import SLOTS, slots_of
from penstock.errors import PenstockError, StaleDelivery, StoreClosed
from penstock.runtime.crew import Crew, Place
from penstock.runtime.slots import Holding, dues, spread
from penstock.runtime.subscriptions import slots_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.engine.messages import Deliver
    from penstock.engine.share import Slots
    from penstock.rows import Lease, Subscription, TopicInfo
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.member import Departing
    from penstock.runtime.seat import Seat

logger = logging.getLogger(__name__)

LEAVING_SECONDS: Final = 0.01
"""How often it is looked whether a slot that leaves is in hand still."""
STUCK_SECONDS: Final = 5.0
"""A slot that cannot leave for so long is named in the log."""
REST_SECONDS: Final = 0.2
"""So long holdings rest at most, so that they can be joined …"""
JOIN_SECONDS: Final = 2.0
JOIN_SECONDS_MAX: Final = 60.0
"""… and so long they are left alone after that, if they did not come to rest."""


class View(NamedTuple):
    """What the leases of a subscription say."""

    consumers: list[Lease]
    slots: dict[int, Lease]


class Team(Crew):
    """The consumers of a `key_shared` subscription in this process, and what they have of it."""

    def __init__(self, dispatcher: Dispatcher, topic: TopicInfo, subscription: Subscription) -> None:
        super().__init__(dispatcher, topic, subscription)
        self._slots = slots_prefix(topic.log_id, subscription.name)
        self.holdings: list[Holding] = []
        self._whose: dict[int, int] = {}
        """Which consumer has each slot …"""
        self._of_place: dict[int, Slots] = {}
        """… and which slots each consumer has, if it has any."""
        self.division: Division | None = None
        """The same for whoever reads, if there are several consumers."""
        self._going: set[int] = set()
        """The epochs of leases that are being given back."""
        self._join_at = 0.0
        self._join_seconds = JOIN_SECONDS

    def _left(self, _place: Place) -> None:
        self._assign()

    async def _give_all_back(self) -> None:
        for holding in self.holdings:
            if holding.departure is not None:
                holding.departure.cancel()
                with suppress(asyncio.CancelledError):
                    await holding.departure
        await asyncio.gather(*(self._give_up(holding) for holding in self.holdings))
        self.holdings = []

    async def _give_up(self, holding: Holding) -> None:
        clean = False
        try:
            await asyncio.gather(*(seat.leave() for seat in holding.seats))
            clean = all(seat.left_clean for seat in holding.seats)
        finally:
            await self._dispatcher.presence.give_back(*holding.leases.values(), clean=clean)

    @property
    def divided(self) -> bool:
        """Whether there are several consumers in this process, each of which names its slots."""
        return len(self.places) > 1

    def take_for(self, place: Place, events_max: int, bytes_max: int, *, singly: bool) -> tuple[Seat, Deliver] | None:
        """Return the next events of the slots of the consumer that asks."""
        slots = self._of_place.get(place.number)
        if slots is None:
            return None
        ask = Ask(events_max, bytes_max, singly, place.number, slots if self.divided else None)
        return self._take(ask, [seat for holding in self.holdings if not holding.resting for seat in holding.seats])

    def _part(self) -> float:
        return sum(len(holding.leases) for holding in self.holdings) / SLOTS

    def leaving(self) -> Iterable[Departing]:
        """Return which slots are to go to other processes, and cannot yet."""
        return [found for holding in self.holdings if (found := holding.departing()) is not None]

    # --- balancing ----------------------------------------------------------------------------

    async def _balance(self) -> None:
        """Let go of what is too much, and take what is missing and free."""
        view = await self._looked(self._look)
        self._know_consumers(view.consumers)
        self._drop_lost(view)
        await self._disown(view)
        await self._load_seats()
        await self._fit(view)
        await self._join_holdings()
        self._assign()

    def _look(self) -> View:
        leases = self._dispatcher.host.store.leases
        consumers = leases.held(self.members)  # before what they have: whoever is gone here has nothing there
        slots = {int(lease.name.removeprefix(self._slots)): lease for lease in leases.held(self._slots)}
        return View(consumers, slots)

    def _drop_lost(self, view: View) -> None:
        """Give up holdings of which somebody else has a slot."""
        for holding in list(self.holdings):
            for slot, lease in holding.leases.items():
                found = view.slots.get(slot)
                if found is None or found.epoch != lease.epoch:
                    self._lose(holding, f"slot {slot} has another owner")
                    break

    async def _disown(self, view: View) -> None:
        """Give back what the leases say is here and is not: an answer was lost, or a holding was given up."""
        known = {lease.epoch for holding in self.holdings for lease in holding.leases.values()} | self._going
        for slot, lease in list(view.slots.items()):
            if lease.owner == self.owner and lease.epoch not in known:
                await self._dispatcher.presence.give_back(lease, clean=False)
                del view.slots[slot]

    def _lose_all(self, why: str) -> None:
        for holding in list(self.holdings):
            self._lose(holding, why)

    def _lose(self, holding: Holding, why: str) -> None:
        self._fits = False
        if holding.departure is not None:
            holding.departure.cancel()
        for seat in holding.seats:
            self._lose_seat(seat, why)
        self._forget(holding)

    def _forget(self, holding: Holding) -> None:
        self.holdings.remove(holding)
        self._forget_seats(set(holding.seats))

    async def _load_seats(self) -> None:
        """Load what is empty, at first or because the subscription was moved."""
        for holding in list(self.holdings):
            for seat in holding.seats:
                if seat.engine is None and await seat.take():
                    if holding.leaving:
                        seat.tell(Leaving(slots_of(holding.leaving)))
                    self._dispatcher.monitor.race(seat)
            holding.clean = True  # whatever was left in flight is known to its engines from now on

    async def _fit(self, view: View) -> None:
        presence = self._dispatcher.presence
        due = dues([lease.name for lease in view.consumers])
        mine = sum(due[lease.name] for lease in view.consumers if lease.under and lease.under.lease == presence.name)
        if self._staying > mine:
            self._let_go(self._staying - mine)
        elif self._staying < mine:
            missing = mine - self._staying - self._keep(mine - self._staying)
            free = [slot for slot in range(SLOTS) if slot not in view.slots]
            if missing and free:
                await self._acquire(free, missing)
        loaded = all(seat.engine is not None for seat in self.seats)
        self._fits = self._staying == mine and loaded and len(self.holdings) <= 1

    @property
    def _staying(self) -> int:
        return sum(len(holding.staying) for holding in self.holdings)

    def _let_go(self, count: int) -> None:
        """Let so many slots leave; of the smallest holdings first, so that few are left."""
        for holding in sorted(self.holdings, key=lambda each: len(each.leases)):
            some = holding.staying[-count:] if count else []
            if some:
                count -= len(some)
                holding.leave([*holding.leaving, *some])
                self._depart(holding)

    def _keep(self, count: int) -> int:
        """Let slots stay that were to leave; returns how many."""
        kept = 0
        for holding in self.holdings:
            some = list(holding.leaving)[: count - kept]
            if some:
                kept += len(some)
                holding.leave([slot for slot in holding.leaving if slot not in some])
        return kept

    async def _acquire(self, free: Sequence[int], most: int) -> None:
        names = {f"{self._slots}{slot}": slot for slot in free}
        leases = await self._dispatcher.presence.acquire_some(list(names), self.owner, most)
        # Suspects are tried one at a time: what was given back cleanly does not wait for them.
        for clean in (True, False):
            some = {names[lease.name]: lease for lease in leases if lease.clean is clean}
            if some:
                holding = Holding(self._dispatcher, self, some)
                self.holdings.append(holding)
                self.seats = [*self.seats, *holding.seats]
        if leases:
            logger.debug("%s: %d slots more", self, len(leases))
            await self._load_seats()

    async def _join_holdings(self) -> None:
        """Let holdings be one: each reads the whole log for its slots.

        For that they rest for a moment. Those that do not come to rest in time, since a handler takes long, stay as
        they are for a while.
        """
        now = self.clock.monotonic()
        candidates = [holding for holding in self.holdings if holding.may_join]
        if len(candidates) < 2 or now < self._join_at:
            return
        for holding in candidates:
            holding.resting = True
        try:
            while not all(holding.at_rest for holding in candidates) and self.clock.monotonic() < now + REST_SECONDS:
                await self.clock.pause(LEAVING_SECONDS)
            rested = [holding for holding in candidates if holding in self.holdings and holding.at_rest]
            if len(rested) < 2:
                self._join_at = self.clock.monotonic() + self._join_seconds
                self._join_seconds = min(self._join_seconds * 2, JOIN_SECONDS_MAX)
                return
            self._join_seconds = JOIN_SECONDS
            joined = Holding(
                self._dispatcher, self, {slot: lease for holding in rested for slot, lease in holding.leases.items()}
            )
            joined.clean = True
            for holding in rested:
                for seat in holding.seats:
                    await seat.leave()
                self._forget(holding)
            self.holdings.append(joined)
            self.seats = [*self.seats, *joined.seats]
            await self._load_seats()
        finally:
            for holding in candidates:
                holding.resting = False
            self.wake()

    def _assign(self) -> None:
        """Give the slots to the consumers."""
        slots = [slot for holding in self.holdings for slot in holding.staying]
        self._whose = spread(slots, list(self.places), self._whose)
        slots_of_place = {place: self._slots_of(place) for place in self.places}
        self._of_place = {place: mask for place, mask in slots_of_place.items() if mask.any()}
        self.division = Division(list(self._of_place.values())) if self.divided else None
        self.spread()
        self.wake()

    def _slots_of(self, place: int) -> Slots:
        return slots_of(slot for slot, number in self._whose.items() if number == place)

    # --- slots that leave ---------------------------------------------------------------------

    def _depart(self, holding: Holding) -> None:
        if holding.departure is None or holding.departure.done():
            holding.departure = asyncio.get_running_loop().create_task(self._departs(holding))

    async def _departs(self, holding: Holding) -> None:
        """Let slots go one by one, each when nothing of it is in hand and everything of it is written."""
        began = self.clock.monotonic()
        try:
            while holding.leaving and holding in self.holdings:
                free = [slot for slot in holding.leaving if slot not in holding.busy(holding.leaving)]
                if free:
                    await self._release(holding, free)
                elif self.clock.monotonic() - began > STUCK_SECONDS:
                    began = self.clock.monotonic()
                    stuck = sorted(holding.leaving)
                    logger.warning("%s: slots %s cannot go yet: their handlers take long", self, stuck)
                if holding.leaving:
                    await self.clock.pause(LEAVING_SECONDS)
        except StoreClosed:
            pass
        except (PenstockError, OSError) as error:
            logger.info("%s: slots could not go, and will: %s", self, error)
        self._dispatcher.watch.wake()

    async def _release(self, holding: Holding, slots: Sequence[int]) -> None:
        with suppress(StaleDelivery):  # a seat that was lost has nothing to write
            await self._dispatcher.committer.flush(holding.seats)
        if holding not in self.holdings:
            return
        still = holding.busy(slots)
        gone = [slot for slot in slots if slot in holding.leaving and slot not in still]
        clean = not any(seat.suspecting for seat in holding.seats)
        leases = holding.left(gone)
        going = {lease.epoch for lease in leases}
        self._going |= going
        try:
            if not holding.leases:
                self._forget(holding)
                for seat in holding.seats:
                    await seat.leave()
            else:
                # A step of other slots that was taken before may be on its way, and carries these leases, too.
                with suppress(StaleDelivery):
                    await self._dispatcher.committer.flush(holding.seats)
        finally:
            try:
                await self._dispatcher.presence.give_back(*leases, clean=clean)
            finally:
                self._going -= going
