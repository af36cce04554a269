"""Member: one consumer of a subscription in this process, with a seat for each shard that it has or waits for.

* `exclusive`: all shards or none. A second consumer is refused, unless it is the same one again: a consumer that names
  itself takes over from its own ghost.
* `failover`: any number of consumers; those that come later wait, and each shard goes to one of them when its owner
  ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.engine.messages import Ask, PolicyChanged
from penstock.engine.policy import Policy
from penstock.engine.rate import Rate
from penstock.errors import StaleDelivery, SubscriptionBusy, SubscriptionMismatch
from penstock.runtime.closing import Closing
from penstock.runtime.seat import Seat
from penstock.runtime.subscriptions import shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.clock import Clock
    from penstock.engine.messages import Deliver
    from penstock.offsets import Gap
    from penstock.rows import Lease, Subscription, TopicInfo
    from penstock.runtime.dispatcher import Dispatcher

logger = logging.getLogger(__name__)

EXCLUSIVE: Final = "exclusive"
PREFETCH: Final = 64
"""So many single events are handed to a consumer at a time, which begins them one after the other."""
BREATH_SECONDS: Final = 0.01
"""So long a consumer may keep the event loop to itself, if its own code does not let go of it either."""


def _nothing() -> None:
    """Do nothing."""


class AtWork(NamedTuple):
    """A handler that runs."""

    handler: str
    seat: Seat
    offset: int
    key: bytes | None
    began: float
    how: str
    """What is known of it besides; empty if it merely runs."""


class Departing(NamedTuple):
    """Slots that are to go to another owner, and cannot yet."""

    slots: tuple[int, ...]
    since: float
    in_hand: bool
    trouble: str
    """Why what was settled is not written, if that is known."""


class Waiter:
    """A consumer that waits until there may be something for it, and lets others run if it need not wait."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._awake = asyncio.Event()
        self._waited_at = 0.0
        self.prefetch = PREFETCH
        self.departure = Closing()
        self.give_back: Callable[[], None] = _nothing
        """Gives back what was handed over and not begun; set by whoever takes single events."""
        self.handlers: Callable[[], Iterable[AtWork]] = tuple
        """Tells which handlers run for it; set by whoever runs some."""

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._awake.set()

    def settle_down(self) -> None:
        """Forget earlier calls of `wake`: what they told is about to be looked at."""
        self._awake.clear()

    async def wait(self) -> None:
        """Return when something may have changed."""
        await self._awake.wait()
        self._waited_at = self.clock.monotonic()

    @property
    def breathless(self) -> bool:
        """Whether this consumer has not waited for a while: with a full window it need not, and others wait for it."""
        return self.clock.monotonic() - self._waited_at >= BREATH_SECONDS

    async def breathe(self) -> None:
        """Let others run."""
        await asyncio.sleep(0)
        self._waited_at = self.clock.monotonic()


class Member(Waiter):
    """What a consumer is in the runtime."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        topic: TopicInfo,
        subscription: Subscription,
        owner: str,
        on_gap: Callable[[int, Gap], None],
    ) -> None:
        super().__init__(dispatcher.clock)
        self._dispatcher = dispatcher
        self.presence = dispatcher.presence
        """Says whether what was handed over is still its own, as far as this process can tell by itself."""
        self.topic = topic
        self.subscription = subscription
        self.owner = owner
        self._on_gap = on_gap
        self.seats = self._first_seats()
        self.policy = Policy.of(subscription.policy)
        self.rate = Rate(None, dispatcher.clock.monotonic())
        """Of all its shards together."""
        self.suspected: dict[Seat, None] = {}
        """Seats that try events alone, or have tried."""
        self._turn = 0
        self.ended: BaseException | None = None
        """Why it can go on no more."""
        self.closed = False
        self.gaps = 0
        self.tally = dispatcher.tally(topic.name, subscription.name)
        self.looks = 0
        """How often the watch has looked at the subscription for it."""

    def _first_seats(self) -> list[Seat]:
        return [
            Seat(self._dispatcher, self, self.topic, shard_of(self.topic, self.subscription.name, partition.number))
            for partition in self.topic.partitions
        ]

    # --- coming and going ---------------------------------------------------------------------

    async def join(self) -> None:
        """Take what is free; `SubscriptionBusy` if that is not all, and it must be."""
        for seat in self.seats:
            if not await seat.take() and self.subscription.mode == EXCLUSIVE:
                holder = await self._dispatcher.host.call(self._dispatcher.host.store.leases.holder, seat.lease_name)
                await self.leave()
                raise SubscriptionBusy(self.topic.name, self.subscription.name, holder.owner if holder else "another")

    async def leave(self) -> None:
        """Give everything back."""
        self.closed = True
        self._awake.set()
        await asyncio.gather(*(seat.leave() for seat in self.seats))

    @property
    def empty_seats(self) -> list[Seat]:
        """Seats of which somebody else may have the shard."""
        return [] if self.closed or self.ended is not None else [seat for seat in self.seats if seat.engine is None]

    def lost(self, _seat: Seat) -> None:
        """Note that a seat was lost; the dispatcher tries to have it again."""
        self.spread()
        self._dispatcher.waiting[self] = None
        self._awake.set()
        self._dispatcher.watch.wake()

    async def retake(self, seat: Seat, holder: Lease | None) -> None:
        """Have a shard that nobody else has; an exclusive consumer that was replaced, perhaps by its own name, ends."""
        if holder is None or (seat.lease is not None and holder.epoch == seat.lease.epoch):
            if await seat.take():
                logger.info("%s: consumer %s has it", seat, self.owner)
        elif self.subscription.mode == EXCLUSIVE:
            self.end(StaleDelivery(str(seat), f"consumer {holder.owner!r} has taken it over"))

    def end(self, error: BaseException) -> None:
        """Go on no more, and say why to whoever waits."""
        if self.ended is None:
            self.ended = error
            for seat in self.seats:
                seat.lose(str(error))
            self._awake.set()

    async def flush(self) -> None:
        """Return when everything that was settled is on the medium; `StaleDelivery`, once, if some of it never will."""
        try:
            await self._dispatcher.committer.flush(self.seats)
            for seat in self.seats:
                if seat.lost_unwritten:
                    raise StaleDelivery(str(seat), seat.lost_because)
        finally:
            for seat in self.seats:
                seat.lost_unwritten = False

    def at_work(self) -> Iterable[AtWork]:
        """Return the handlers that run on what is handed over here."""
        return self.handlers()

    def leaving(self) -> Iterable[Departing]:
        """Return what is to go to other owners, and cannot yet: nothing, where everything is given back at once."""
        return ()

    # --- handing over -------------------------------------------------------------------------

    def take(self, events_max: int, bytes_max: int, *, singly: bool) -> tuple[Seat, Deliver] | None:
        """Return the next events, of whichever shard has some; they take turns."""
        return self._take(Ask(events_max, bytes_max, singly), self.seats)

    def _take(self, ask: Ask, seats: Sequence[Seat]) -> tuple[Seat, Deliver] | None:
        if self.presence.lapsed:
            return None
        for seat in list(self.suspected):
            handed = self._take_alone(seat, ask)
            if handed is not None:
                return seat, handed
            if seat.tries_alone:
                return None
            self.suspected.pop(seat, None)
        count = len(seats)
        for at in range(count):
            seat = seats[(self._turn + at) % count]
            if seat.engine is None or not seat.engine.has_for(ask.slots):
                continue
            handed = seat.tell(ask)
            if handed is not None:
                self._turn = (self._turn + at + 1) % count
                return seat, handed
        return None

    def _take_alone(self, seat: Seat, ask: Ask) -> Deliver | None:
        """Return what a shard tries alone, if nothing of the others can be blamed on it: in hand, or not written."""
        others = (each.engine for each in self.seats if each is not seat and each.engine is not None)
        if any(engine.in_flight or engine.progress.dirty or engine.progress.writing for engine in others):
            return None
        return seat.tell(ask) if seat.tries_alone else None

    def declare(self, gap: Gap, seat: Seat) -> None:
        """Tell the consumer of a hole."""
        self.gaps += 1
        logger.warning("%s/%d, subscription %s: %s", self.topic.name, seat.shard.partition, self.subscription.name, gap)
        try:
            self._on_gap(seat.shard.partition, gap)
        except Exception:
            logger.exception("subscription %s: its on_gap failed", self.subscription.name)

    def see(self, subscription: Subscription) -> None:
        """Take the subscription as the watch has just read it, and go on with its policy if that is another one."""
        self.looks += 1
        if subscription.mode != self.subscription.mode:
            self.end(SubscriptionMismatch(f"subscription {subscription.name!r} has mode {subscription.mode!r} now"))
        elif self.know(subscription):
            self.spread()

    def know(self, subscription: Subscription) -> bool:
        """Note what the subscription is by now; True if it was another."""
        if subscription == self.subscription:
            return False
        self.subscription, self.policy = subscription, Policy.of(subscription.policy)
        return True

    def spread(self) -> None:
        """Let every shard have the policy, with its consumer's part of the rate: as large as its part of the shards."""
        policy, part = self.policy.together if self.divided else self.policy, self._part()
        if policy.rate_per_second is not None and part:
            policy = policy.changed({"rate_per_second": policy.rate_per_second * part})
        self.rate.change(policy.rate_per_second, self.clock.monotonic())
        for seat in self.seats:
            if seat.engine is not None and seat.engine.policy != policy:
                seat.tell(PolicyChanged(policy))
                self._dispatcher.monitor.beat(seat, policy.heartbeat_seconds)

    @property
    def divided(self) -> bool:
        """Whether what is read is divided among several consumers of this process."""
        return False

    def _part(self) -> float:
        """Return which part of the subscription is here."""
        return sum(seat.engine is not None for seat in self.seats) / len(self.seats)
