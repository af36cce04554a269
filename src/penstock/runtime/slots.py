"""Slots: how many are whose due, and those that a process has acquired together, with a seat for each partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.division import Division
from penstock.engine.messages import Leaving, Left
from penstock.engine.share import SLOTS, slots_of
from penstock.runtime.member import Departing
from penstock.runtime.seat import Seat
from penstock.runtime.subscriptions import shard_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.engine.share import Slots
    from penstock.rows import Fence, Lease
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.team import Team


# --- who is due how much ----------------------------------------------------------------------


def dues(consumers: Sequence[str]) -> dict[str, int]:
    """Return how many slots are each consumer's due: as many as any other's, or one more for the first by name."""
    count = len(consumers)
    return {
        name: SLOTS // count + (place < SLOTS % count) for place, name in enumerate(sorted(consumers))
    }  # fmt: skip


def spread(slots: Iterable[int], consumers: Sequence[int], before: Mapping[int, int]) -> dict[int, int]:
    """Return whose each slot is, evenly and with as few moves as can be from how it was."""
    found: dict[int, int] = {}
    wanted = sorted(slots)
    if not consumers:
        return found
    room = {consumer: len(wanted) // len(consumers) for consumer in consumers}
    spare = len(wanted) % len(consumers)
    left = []
    for slot in wanted:
        consumer = before.get(slot)
        if consumer in room and room[consumer] > 0:
            found[slot], room[consumer] = consumer, room[consumer] - 1
        else:
            left.append(slot)
    for slot in list(left):  # those who had one more before keep it, as far as there are such
        consumer = before.get(slot)
        if spare and consumer in room and room[consumer] == 0:
            found[slot], room[consumer], spare = consumer, -1, spare - 1
            left.remove(slot)
    for consumer in consumers:
        while left and room[consumer] > 0:
            found[left.pop(0)], room[consumer] = consumer, room[consumer] - 1
        if left and spare and room[consumer] == 0:
            found[left.pop(0)], spare = consumer, spare - 1
    return found


# --- slots that were acquired together --------------------------------------------------------


class SlotSeat(Seat):
    """A partition of a holding."""

    __slots__ = ("holding", "left_clean")

    def __init__(self, dispatcher: Dispatcher, team: Team, partition: int, holding: Holding) -> None:
        super().__init__(dispatcher, team, team.topic, shard_of(team.topic, team.subscription.name, partition))
        self.holding = holding
        self.left_clean = True

    @property
    def fences(self) -> tuple[Fence, ...]:
        """What its writes carry: the leases of all of its slots."""
        return self.holding.fences

    @property
    def shares_cursor(self) -> bool:
        """Whether others write the same cursor."""
        return True

    @property
    def slots(self) -> Slots | None:
        """Which slots it has."""
        return slots_of(self.holding.leases)

    @property
    def parted(self) -> bool:
        """Whether its events go to several owners: other processes, or consumers of this one."""
        return len(self.holding.leases) < SLOTS or self.holding.team.divided

    @property
    def division(self) -> Division | None:
        """Which of its events are for which consumer of this process, and which for none."""
        return self.holding.team.division or self.holding.division

    async def _acquire(self) -> Lease | None:
        return self.holding.lease

    async def _give_back(self, lease: Lease, *, clean: bool) -> None:
        """Note how it was left: the leases are the holding's, and go when all of its seats have left."""
        self.left_clean = clean


class Holding:
    """Slots that were acquired together, with a seat for each partition."""

    def __init__(self, dispatcher: Dispatcher, team: Team, leases: Mapping[int, Lease]) -> None:
        self.team = team
        self.leases = dict(leases)
        self.fences = tuple(lease.fence for lease in leases.values())
        self.leaving: dict[int, float] = {}
        """Slots that are to go to another owner, and since when."""
        self.clean = all(lease.clean for lease in leases.values())
        self.seats = [SlotSeat(dispatcher, team, partition.number, self) for partition in team.topic.partitions]
        self.departure: asyncio.Task[None] | None = None
        self.resting = False
        """Nothing is handed over for the moment."""
        self._division: Division | None = None

    @property
    def lease(self) -> Lease | None:
        """Its first lease, for all of them; what one of them left in flight is in the shares of all."""
        first = next(iter(self.leases.values()), None)
        return None if first is None else first._replace(clean=self.clean)

    @property
    def division(self) -> Division | None:
        """Which events are of its slots, if not all are."""
        if len(self.leases) == SLOTS:
            return None
        mine = slots_of(self.leases)
        if self._division is None or not np.array_equal(self._division.own, mine):
            self._division = Division([mine])
        return self._division

    @property
    def staying(self) -> list[int]:
        """The slots that it keeps."""
        return [slot for slot in self.leases if slot not in self.leaving]

    def leave(self, slots: Iterable[int]) -> None:
        """Let these slots leave, and no others."""
        now = self.team.clock.monotonic()
        self.leaving = {slot: self.leaving.get(slot, now) for slot in slots}
        for seat in self.seats:
            seat.tell(Leaving(slots_of(self.leaving)))

    def left(self, slots: Iterable[int]) -> list[Lease]:
        """Have these slots no more; returns their leases."""
        gone = list(slots)
        for seat in self.seats:
            seat.tell(Left(slots_of(gone)))
        for slot in gone:
            self.leaving.pop(slot, None)
        left = [self.leases.pop(slot) for slot in gone]
        self.fences = tuple(lease.fence for lease in self.leases.values())
        return left

    def busy(self, slots: Iterable[int]) -> set[int]:
        """Return which of these slots cannot leave: something of them is handed over, or not written."""
        busy = np.zeros(SLOTS, np.bool_)
        for seat in self.seats:
            if seat.engine is not None:
                busy |= seat.engine.busy_slots
        return {slot for slot in slots if busy[slot]}

    def departing(self) -> Departing | None:
        """Return what is to leave and cannot yet, and what it waits for."""
        busy = self.busy(self.leaving)
        if not busy:
            return None
        held = {each.slot for seat in self.seats if seat.engine is not None for each in seat.engine.held()}
        trouble = next((seat.trouble["commit"] for seat in self.seats if "commit" in seat.trouble), "")
        since = min(self.leaving[slot] for slot in busy)
        return Departing(tuple(sorted(busy)), since, not busy.isdisjoint(held), trouble)

    @property
    def may_join(self) -> bool:
        """Whether it may become one with others."""
        engines = [seat.engine for seat in self.seats]
        return not self.leaving and all(engine is not None and not engine.suspecting for engine in engines)

    @property
    def at_rest(self) -> bool:
        """Whether it can be loaded anew without a difference."""
        return all(seat.engine is not None and seat.engine.at_rest for seat in self.seats)
