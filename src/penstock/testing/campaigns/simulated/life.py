"""A life of delivery in a simulated world: several processes publish, and consume one subscription.

Everything that delivers is the production code: engine, runtime and file store. What is simulated is the machine below
it and the handlers above it. Processes are killed, frozen and started anew, the power is lost, clocks are set, and in
some lives somebody pauses, changes or moves the subscription, or brings its dead letters back.

When all faults have ended, everything must come to rest: every event is settled, and was settled once. The journal is
kept outside of the world, and told of every step right where it happens, so that no answer that got lost confuses it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError, StoreError
from penstock.rows import ParkedFilter, TopicSettings
from penstock.runtime import subscriptions
from penstock.testing.campaigns.simulated.audit import Audit
from penstock.testing.campaigns.simulated.hands import Hands
from penstock.testing.campaigns.simulated.manner import LEASE_SECONDS
from penstock.testing.campaigns.simulated.witness import SUBSCRIPTION, WitnessedCursors
from penstock.testing.checker import check
from penstock.testing.simulator import CALM, ProcessDied

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.rows import TopicInfo
    from penstock.testing.campaigns.simulated.manner import Manner
    from penstock.testing.simulator import Plan, Process, World

SOON_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.5


class Life:
    """One life; `run` returns what is wrong after it."""

    def __init__(self, world: World, plan: Plan, manner: Manner) -> None:
        self.world = world
        self.manner = manner
        self._plan = plan
        self._wall_drift = 0.0
        self._acts: list[asyncio.Task[None]] = []
        self.topic: TopicInfo
        self.audit: Audit
        self._hands: Hands

    # --- the story ----------------------------------------------------------------------------

    async def run(self) -> list[str]:
        """Live it, let everything come to rest, and return what is wrong."""
        manner, world = self.manner, self.world
        first = world.start()
        settings = TopicSettings(partitions=manner.partitions)
        self.topic = await first.call(first.store.log.create_topic, "orders", settings)
        await first.call(
            subscriptions.ensure, first.store, self.topic, SUBSCRIPTION, mode=manner.mode,
            changes=manner.policy.stored(), start="earliest", protect=None, now_us=world.clock.time_us(),
        )  # fmt: skip
        self.audit = Audit(world, self.topic, ordered=self.manner.mode != "shared")
        self._hands = Hands(world, manner, self.topic, self.audit)
        self._begin(first)
        world.plan = self._plan
        nemesis = world.context.run(world.loop.create_task, self._disturb())
        meddler = world.context.run(world.loop.create_task, self._meddle())
        await asyncio.sleep(manner.seconds)
        nemesis.cancel()
        meddler.cancel()
        await world.calm()
        world.plan = replace(CALM, lost=float(manner.deaf))
        world.clock.jump_wall(-self._wall_drift)
        self._hands.resting = True
        self._restart()
        problems = self.audit.problems
        try:
            if not await self._comes_to_rest():
                problems.append(f"{manner.patience} s after all faults ended, there is no rest: {await self._state()}")
            await self._examine()
        except (PenstockError, OSError) as error:
            problems.append(f"{type(error).__name__}: {error}")
        return problems

    def _restart(self) -> None:
        while len(self.world.living) < self.manner.processes:
            dies_in = None if self._hands.resting or self.world.chance.random() < 0.9 else 15
            try:
                process = self.world.start(dies_in=dies_in)
            except (OSError, StoreError):
                return
            if not process.dead:
                process.spare()
                self._begin(process)

    def _begin(self, process: Process) -> None:
        process.store.cursors = WitnessedCursors(process.store.cursors, self.audit.witness)  # type: ignore[assignment]
        self._hands.begin(process)

    # --- disturbances -------------------------------------------------------------------------

    async def _disturb(self) -> None:
        chance = self.world.chance
        while True:
            self._restart()
            await asyncio.sleep(chance.random() * 2.5)
            if not self.world.living:
                continue
            victim = chance.choice(self.world.living)
            match chance.choice(self.manner.disturbances):
                case "kill":
                    victim.kill()
                case "kill within":
                    victim.die_in(chance.randrange(20))
                case "freeze":
                    victim.freeze(chance.choice([0.5, 2 * LEASE_SECONDS]))
                case "power":
                    self.world.power_loss()
                case "power within":
                    self.world.power_loss_in(chance.randrange(20))
                case "clock":
                    self._set_clock(chance.choice([-3.0, -0.5, 0.5, 3.0]))

    def _set_clock(self, seconds: float) -> None:
        self.world.note(f"the wall clock is set by {seconds} s")
        self.world.clock.jump_wall(seconds)
        self._wall_drift += seconds

    # --- what somebody does to the subscription -----------------------------------------------

    async def _meddle(self) -> None:
        chance = self.world.chance
        while self.manner.acts:
            await asyncio.sleep(chance.random() * 2.5)
            processes = [process for process in self.world.living if not process.frozen]
            if processes:
                # A task of its own: an answer may never come.
                act = self._act(chance.choice(self.manner.acts), chance.choice(processes))
                self._acts.append(self.world.context.run(self.world.loop.create_task, act))

    async def _act(self, act: str, process: Process) -> None:
        self.world.note(f"somebody wants to {act}")
        chance, store = self.world.chance, process.store
        work: Callable[[], Any]
        match act:
            case "pause":
                work = self._pause(process, paused=chance.random() < 0.5)
            case "change":
                changes = {
                    "window_events": chance.choice([4, 30]),
                    "backoff_seconds": chance.choice([0.1, 2.0]),
                    "timeout_seconds": self.manner.policy.timeout_seconds and chance.choice([0.5, 2.0]),
                    "checkpoint_events": chance.choice([1, 10]),
                    "heartbeat_seconds": chance.choice([0.4, 1.0]),
                    "rate_per_second": chance.choice([None, 15.0]),
                }

                def work() -> Any:
                    return subscriptions.change(store, self.topic, SUBSCRIPTION, changes)

            case "seek":
                share, now_us = chance.random(), self.world.clock.time_us()
                number = chance.randrange(len(self.topic.partitions))

                def work() -> Any:
                    to = int(store.log.bounds(self.topic.partitions[number]).stop * share)
                    return subscriptions.seek(store, self.topic, SUBSCRIPTION, to, partition=number, now_us=now_us)

            case _:
                wanted, now_us = self._rows(), self.world.clock.time_us()

                def work() -> Any:
                    return store.parked.replay(wanted, now_us)

        with suppress(ProcessDied, PenstockError, OSError):
            answer = await process.call(work)
            self.world.note(f"somebody did {act}: {answer if act in {'replay', 'seek'} else ''}")

    def _pause(self, process: Process, *, paused: bool) -> Callable[[], Any]:
        store = process.store
        if paused:
            return lambda: subscriptions.change(store, self.topic, SUBSCRIPTION, {"paused": True})
        return lambda: subscriptions.resume(store, self.topic, SUBSCRIPTION)

    def _rows(self) -> ParkedFilter:
        return ParkedFilter(log_id=self.topic.log_id, subscription=SUBSCRIPTION)

    # --- rest ---------------------------------------------------------------------------------

    async def _comes_to_rest(self) -> bool:
        ends = self.world.loop.time() + self.manner.patience
        pausing = "pause" in self.manner.acts
        while self.world.loop.time() < ends:
            await asyncio.sleep(LOOK_SECONDS)
            self._restart()
            with suppress(ProcessDied, PenstockError, OSError):
                if pausing:
                    process = self._somebody()
                    await process.call(self._pause(process, paused=False))
                    # One that is still under way may pause it once more.
                    pausing = not all(act.done() for act in self._acts)
                if self._hands.unsent:
                    await self._hands.send(self._somebody())
                elif not await self._left():
                    self.world.journal.progressed(self.world.loop.time())
                    return True
        return False

    def _somebody(self) -> Process:
        return next(process for process in self.world.living if not process.frozen)

    async def _left(self) -> list[str]:
        """Return what is not settled."""
        process = self._somebody()
        store = process.store

        def look() -> list[str]:
            found = []
            for cursor in store.cursors.load(self.topic.log_id, SUBSCRIPTION):
                head = store.log.bounds(self.topic.partitions[cursor.shard.partition]).stop
                if cursor.next_offset < head:
                    found.append(f"{cursor.shard.partition}: at {cursor.next_offset} of {head}")
            counts = store.parked.count(self._rows())
            if counts["waiting"]:
                found.append(f"{counts['waiting']} wait aside")
            return found

        return await process.call(look)

    async def _state(self) -> str:
        try:
            return "; ".join(await self._left()) or f"{len(self._hands.unsent)} unsent"
        except (ProcessDied, PenstockError, OSError) as error:
            return repr(error)

    async def _examine(self) -> None:
        """Look at everything there is, and compare it with what was promised."""
        for process in self.world.living:
            process.die()
        await self.world.look()
        process = self.world.start()
        await process.call(self.audit.examine, process.store)
        self.audit.problems += [str(violation) for violation in check(self.world.journal, soon_seconds=SOON_SECONDS)]
