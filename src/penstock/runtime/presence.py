"""Presence: that this process is alive, as one lease, under which it holds all others.

Renewed every third of its time, whatever the number of shards. A process that is killed is seen to be dead at once, by
stores that can see it; one that is frozen, when its lease is over. When it wakes up it finds that it is not present any
more, and begins anew: every shard that it had is taken again, if nobody else has it by then.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import LeaseError, LeaseLost, PenstockError, StoreClosed
from penstock.runtime.entrances import Host, Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.clock import Clock
    from penstock.rows import Lease

logger = logging.getLogger(__name__)

R = TypeVar("R")


class Presence(Loop):
    """The loop that renews the lease of this process."""

    def __init__(
        self,
        host: Host,
        *,
        owner: str,
        lease_seconds: float,
        clock: Clock,
        jitter: Callable[[], float],
        lost: Callable[[], None],
    ) -> None:
        super().__init__("the presence of this process", clock, jitter)
        self._host = host
        self._owner = owner
        self._seconds = lease_seconds
        self._lost = lost
        self._lease: Lease | None = None
        self.until = -inf
        """Until when it is present for sure, by its own clock; after that `lapsed_at` is to be asked."""
        self._appearing = asyncio.Lock()
        self._held: set[int] = set()
        """The epochs of leases that were acquired here, and not given back."""
        self._asking: dict[asyncio.Future[Any], list[tuple[str, str]]] = {}
        """What the store was asked for and has not answered: leases, each with who would be its owner."""
        self._orphans: dict[tuple[str, str], object] = {}
        """Those that the store may say are ours though nobody here has them; another object whenever one becomes so."""
        self.losses = 0

    async def acquire(self, name: str, owner: str) -> Lease | None:
        """Acquire a lease under that of this process; None if another owner has it."""
        leases = self._host.store.leases
        for _ in range(3):
            above = self._lease or await self._appear()
            try:
                lease = await self._asked([name], owner, leases.acquire, name, owner, self._seconds, under=above)
            except LeaseLost:
                if self._lease is not None and self._lease.epoch == above.epoch:
                    self._vanished("its lease is over")
            else:
                if lease is None:
                    return None
                if not self.lapsed and self._lease is not None and self._lease.epoch == above.epoch:
                    self._held.add(lease.epoch)
                    return lease
                # It ended with the one above it, before anybody heard of it.
        raise LeaseLost(f"the lease of this process, {self._owner}, cannot be kept: the machine is too busy")

    async def acquire_some(self, names: Sequence[str], owner: str, most: int) -> list[Lease]:
        """Acquire those of these leases that nobody holds, at most so many, under that of this process."""
        leases = self._host.store.leases
        above = self._lease or await self._appear()
        try:
            some = await self._asked(names, owner, leases.acquire_some, names, owner, most, under=above)
        except LeaseLost:
            if self._lease is not None and self._lease.epoch == above.epoch:
                self._vanished("its lease is over")
            return []
        if self.lapsed or self._lease is None or self._lease.epoch != above.epoch:
            return []  # they ended with the one above them, before anybody heard of them
        self._held.update(lease.epoch for lease in some)
        return some

    async def _asked(
        self, names: Sequence[str], owner: str, acquire: Callable[..., R], *arguments: Any, **options: Any
    ) -> R:
        """Ask the store for leases; those of which nobody hears whether they were acquired are released later."""
        wanted = [(name, owner) for name in names]
        asking = asyncio.ensure_future(self._host.call(acquire, *arguments, **options))
        self._asking[asking] = wanted
        try:
            return await asyncio.shield(asking)
        except PenstockError:
            raise
        except BaseException:
            # Released when it has ended: what is still to be acquired nobody would find.
            asking.add_done_callback(lambda _: self._orphans.update((each, object()) for each in wanted))
            raise
        finally:
            asking.add_done_callback(self._asking.pop)

    @property
    def name(self) -> str:
        """The name of the lease of this process."""
        return f"process/{self._owner}"

    async def give_back(self, *leases: Lease, clean: bool) -> None:
        """Release leases, in one step; those that cannot be released now are released later."""
        if not leases:
            return
        self._held.difference_update(lease.epoch for lease in leases)
        try:
            # Whatever is not released by it is somebody else's already.
            await self._host.call(self._host.store.leases.release_some, leases, clean=clean)
        except StoreClosed:
            pass  # it ends with this process
        except Exception as error:  # noqa: BLE001 - closing goes on
            logger.info("lease %r could not be released, and will be later: %s", leases[0].name, error)
            self.abandon(leases)
        except BaseException:
            self.abandon(leases)  # this was cut off
            raise

    async def sign_off(self, lease: Lease) -> None:
        """Release a lease by which others know that somebody is here; behind all that is to be released later.

        When it is gone they look for what that one has left, once: so that must be free by then.
        """
        if self._orphans:
            self.abandon([lease])
            self.wake()
        else:
            await self.give_back(lease, clean=True)

    def abandon(self, leases: Iterable[Lease]) -> None:
        """Have leases released later, which nobody here can wait for."""
        for lease in leases:
            self._held.discard(lease.epoch)
            self._orphans[lease.name, lease.owner] = object()

    async def _release_orphans(self) -> None:
        leases = self._host.store.leases
        for orphan, occasion in list(self._orphans.items()):
            name, owner = orphan
            holder = await self._host.call(leases.holder, name)
            if any(orphan in wanted for wanted in self._asking.values()):
                break  # it may have been acquired again, and the answer is on its way; those behind it wait as well
            if holder is not None and holder.owner == owner and holder.epoch not in self._held:
                with suppress(LeaseError):
                    await self._host.call(leases.release, holder, clean=False)
            if self._orphans.get(orphan) is occasion:
                del self._orphans[orphan]

    async def _appear(self) -> Lease:
        """Acquire this process's own lease, once for all who ask meanwhile: each acquisition ends the one before."""
        async with self._appearing:
            if self._lease is not None:
                return self._lease
            name = self.name
            began = self._clock.monotonic()
            lease = await self._host.call(self._host.store.leases.acquire, name, self._owner, self._seconds)
            if lease is None:
                raise LeaseLost(f"lease {name!r} is held by another process, which has the same name")
            self._lease, self.until = lease, began + self._seconds
            return lease

    @property
    def lapsed(self) -> bool:
        """Whether this process was silent for longer than its lease, and others may have its shards.

        Asked before anything is handed over: a process that was frozen knows by its own clock, before it asks anybody.
        """
        return self.lapsed_at(self._clock.monotonic())

    def lapsed_at(self, now: float) -> bool:
        """Tell the same, for whoever has just looked at the clock."""
        if self._lease is not None and now >= self.until:
            self._vanished("it was silent for longer than its lease")
        return self._lease is None

    def _vanished(self, why: str) -> None:
        if self._lease is not None:
            logger.warning("this process, %s, was not present: %s; its shards are taken anew", self._owner, why)
            self._lease, self.until = None, -inf
            self.losses += 1
            self._lost()

    async def _round(self) -> float:
        lease = self._lease
        if lease is not None:
            began = self._clock.monotonic()
            renewed = await self._host.call(self._host.store.leases.renew, [lease], self._seconds)
            if self._lease is lease:
                if renewed:
                    self._lease, self.until = renewed[0], began + self._seconds
                else:
                    self._vanished("it was silent for longer than its lease")
        await self._release_orphans()
        return self._seconds / 3

    def _failed(self, error: Exception) -> float:
        super()._failed(error)
        return self._seconds / 10  # in time for another attempt

    def _fenced(self) -> None:
        """Renewing is not fenced."""

    async def _ended(self) -> None:
        lease, self._lease, self.until = self._lease, None, -inf
        if lease is not None:
            try:
                await self._host.call(self._host.store.leases.release, lease)
            except LeaseError:
                pass  # it is over already
            except Exception as error:  # noqa: BLE001 - closing goes on; it expires by itself
                logger.info("lease %r could not be released, and will expire: %s", lease.name, error)
