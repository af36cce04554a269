"""Several processes with the production store, leases, scheduler and mover, in a world that a seed decides over."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import Executor
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import columns
from penstock.batch import Batch
from penstock.errors import Fenced, PenstockError, StoreError, UnknownTopic, WritingStopped
from penstock.events import Event
from penstock.producers import Run
from penstock.rows import Partition, Scheduled, Staged, TopicInfo, TopicSettings
from penstock.runtime.mover import Mover
from penstock.runtime.scheduler import Scheduler
from penstock.stores.file import gate, members
from penstock.testing.campaigns.planted import log as planted_log
from penstock.testing.campaigns.planted import state as planted_state
from penstock.testing.campaigns.virtual.life import APPLICATION, MachineOutbox
from penstock.testing.checker import check
from penstock.testing.journal import Outcome
from penstock.testing.machine import SURVIVALS, Survival
from penstock.testing.simulator import CALM, Deadlock, EndlessRun, Killed, Plan, Process, ProcessDied, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

DROPPED = Survival("dropped", "dropped")


# --- a life -------------------------------------------------------------------------------------


class Topics:
    """What the mover asks for topics."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def info(self, name: str) -> TopicInfo:
        topics = {topic.name: topic for topic in await self._process.call(self._process.store.log.topics)}
        if name not in topics:
            raise UnknownTopic(name, topics)
        return topics[name]

    def forgotten_if_deleted(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


class Life:
    """Processes that publish, schedule and stage, while they are killed, frozen, and the power is lost."""

    processes = 3
    seconds = 16.0
    disturbances: tuple[str, ...] = ("kill", "kill within", "freeze", "freeze", "power", "power within", "nothing")

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self._plan = plan
        self._open: dict[bytes, Partition] = {}
        """Publishes whose outcome nobody knows yet."""
        self._entering: dict[bytes, Outcome] = {}
        self._number = 0
        self._resting = False
        self.partitions: list[Partition] = []

    async def run(self) -> list[str]:
        """Live it, let everything come to rest, and return what is wrong."""
        first = self.world.start()
        topic = await first.call(first.store.log.create_topic, "orders", TopicSettings(partitions=2))
        self.partitions = topic.partitions
        self._begin(first)
        self.world.plan = self._plan
        nemesis = self.world.context.run(self.world.loop.create_task, self._disturb())
        await asyncio.sleep(self.seconds)
        nemesis.cancel()
        await self.world.calm()
        self._restart()
        try:
            return [*await self._come_to_rest(), *await self._examine()]
        except (PenstockError, OSError) as error:  # of a store that cannot be opened or read, in all peace
            return [f"{type(error).__name__}: {error}"]

    def _restart(self) -> None:
        while len(self.world.living) < self.processes:
            dies_in = None if self.world.plan is CALM or self.world.chance.random() < 0.8 else 15
            try:
                process = self.world.start(dies_in=dies_in)
            except (OSError, StoreError):
                return
            if not process.dead:
                process.spare()
                self._begin(process)

    async def _disturb(self) -> None:
        chance = self.world.chance
        while True:
            self._restart()
            await asyncio.sleep(chance.random() * 4)
            if not self.world.living:
                continue
            victim = chance.choice(self.world.living)
            match chance.choice(self.disturbances):
                case "kill":
                    victim.kill()
                case "kill within":
                    victim.die_in(chance.randrange(20))
                case "freeze":
                    victim.freeze(chance.choice([1.0, 12.0]))
                case "power":
                    self.world.power_loss()
                case "power within":
                    self.world.power_loss_in(chance.randrange(20))

    async def _come_to_rest(self) -> list[str]:
        """Wait until everything that was to enter the log has done so; returns what does not."""
        await asyncio.sleep(4.0)  # long enough for each to publish again
        self._resting = True
        waiting = 1
        for _ in range(60):
            await asyncio.sleep(1.0)
            self._restart()
            process = self.world.living[0]
            with closing(MachineOutbox(process.machine)) as outbox, suppress(ProcessDied):
                waiting = outbox.pending() + len(await process.call(process.store.schedule.page))
            if not waiting:
                return []
        return [f"{waiting} events wait for ever to enter the log"]

    async def _examine(self) -> list[str]:
        for process in self.world.living:
            process.kill()
        for payload, partition in self._open.items():
            self.world.journal.published(*partition, [payload], Outcome.UNKNOWN)
        for payload in self._entering:
            for partition in self.partitions:
                self.world.journal.published(*partition, [payload], Outcome.UNKNOWN)
        problems = []
        for look in ("at rest", "after a power loss"):
            if look != "at rest":
                self.world.power_loss(DROPPED)
            counts = Counter(await self.world.look())
            for payload, outcome in self._entering.items():
                least, most = {Outcome.OK: (1, 1), Outcome.FAILED: (0, 0), Outcome.UNKNOWN: (0, 1)}[outcome]
                if not least <= counts[payload] <= most:
                    problems.append(f"{payload[:20]!r} is {counts[payload]} times in the log, {look}")
        return problems + [
            f"{violation.invariant}, {violation.where}: {violation.what}"
            for violation in check(self.world.journal, soon_seconds=15.0)
        ]

    # --- what a process does --------------------------------------------------------------------

    def _begin(self, process: Process) -> None:
        process.run(self._publish(process))
        process.run(self._enter(process))

    def _payload(self, process: Process) -> bytes:
        self._number += 1
        return b"%s/%d " % (process.name.encode(), self._number) + bytes(process.chance.choice([0, 40, 600]))

    async def _publish(self, process: Process) -> None:
        producer = process.chance.randbytes(6) + b"\x40" + process.chance.randbytes(9)
        sequence = 0
        while True:
            await asyncio.sleep(process.chance.random() * 3)
            partition = process.chance.choice(self.partitions)
            payload = self._payload(process)
            await self._send(process, partition, payload, producer, sequence)
            sequence += 1

    async def _send(
        self, process: Process, partition: Partition, payload: bytes, producer: bytes, sequence: int
    ) -> None:
        batch = Batch.build([payload])
        run = Run(producer, 0, sequence, 1, columns.digest(batch.columns))
        self._open[payload] = partition
        unknown = False
        for _ in range(6):
            try:
                [answer] = await process.call(process.store.log.append, partition, batch, [run])
            except WritingStopped:
                process.kill()  # the store must be opened anew, it says: by the next one
            except PenstockError:
                # What an earlier attempt has done, this one does not know.
                if not unknown:
                    self._told(partition, payload, Outcome.FAILED)
                return
            except OSError:
                unknown = True
                await asyncio.sleep(process.chance.random())
            else:
                assert answer.refused is None
                assert answer.offsets is not None
                self._told(partition, payload, Outcome.OK, answer.offsets.start)
                self.world.journal.progressed(self.world.loop.time())
                return

    def _told(self, partition: Partition, payload: bytes, outcome: Outcome, offset: int | None = None) -> None:
        del self._open[payload]
        self.world.journal.published(*partition, [payload], outcome, offset=offset)

    async def _enter(self, process: Process) -> None:
        jitter = process.chance.random
        clock = self.world.clock
        outbox = MachineOutbox(process.machine)
        Scheduler(process, owner=process.name, clock=clock, jitter=jitter).start()
        Mover(
            outbox, process, Topics(process), owner=process.name, clock=clock, jitter=jitter, executor=Executor()
        ).start()
        while True:
            await asyncio.sleep(process.chance.random() * 4)
            if self._resting:
                return
            payload = self._payload(process)
            self._entering[payload] = Outcome.UNKNOWN
            add = process.chance.choice([self._schedule, self._stage])
            try:
                await process.call(partial(add, process, outbox, payload))
            except PenstockError:
                self._entering[payload] = Outcome.FAILED
            except OSError:
                pass
            else:
                self._entering[payload] = Outcome.OK

    def _schedule(self, process: Process, _outbox: MachineOutbox, payload: bytes) -> None:
        partition = process.chance.choice(self.partitions)
        row = Scheduled(
            id=f"{process.name}-{self._number}",
            log_id=partition.log_id,
            partition=partition.number,
            due_at=process.platform.clock.time_us() + process.chance.randrange(3_000_000),
            event=Event(type="scheduled", data=payload),
        )
        process.store.schedule.add([row])

    def _stage(self, process: Process, outbox: MachineOutbox, payload: bytes) -> None:
        with closing(process.machine.databases.connect_application(APPLICATION)) as connection:
            outbox.stage(connection, [Staged(topic="orders", event=Event(type="staged", data=payload))])
            connection.commit()


class FrozenLife(Life):
    """Processes that stand still for longer than a lease, now and then, and nothing else."""

    seconds = 60.0
    disturbances = ("nothing",)


def live(seed: int, kind: type[Life] = Life, plan: Plan | None = None) -> tuple[list[str], World]:
    with World(seed, steps_max=200_000) as world:
        return world.run(kind(world, plan or Plan.drawn(seed)).run()), world


def hunt(
    bug: Callable[[], AbstractContextManager[None]], seeds: int, kind: type[Life] = Life, plan: Plan | None = None
) -> list[str]:
    """Return what the first world finds in which a bug is seen."""
    with bug():
        for seed in range(seeds):
            problems, _ = live(seed, kind, plan)
            if problems:
                return problems
    return []


# --- what the proof is ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_or_doubled_whatever_happens(seed: int) -> None:
    problems, world = live(seed)
    assert problems == [], "\n".join([*world.trace, *problems])


@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_written_for_a_lease_that_was_lost_in_sleep(seed: int) -> None:
    problems, world = live(seed, FrozenLife, Plan(frozen=0.05))
    assert problems == [], "\n".join([*world.trace, *problems])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_tells_the_same_story_twice(seed: int) -> None:
    first, second = live(seed)[1], live(seed)[1]
    assert first.trace == second.trace
    assert first.loop.steps == second.loop.steps
    assert live(seed + 1)[1].trace != first.trace


def test_a_seed_tells_the_same_story_in_another_process() -> None:
    told = []
    for hashing in ("1", "2"):  # sets of texts have another order there
        environment = {**os.environ, "PYTHONHASHSEED": hashing, "PYTHONPATH": os.pathsep.join(sys.path)}
        program = [sys.executable, str(Path(__file__)), "3"]
        told.append(subprocess.run(program, env=environment, check=True, capture_output=True, text=True).stdout)
    assert told[0] == told[1]
    assert told[0].splitlines() == live(3)[1].trace


def test_a_bug_in_the_log_is_found() -> None:
    assert hunt(planted_log.ack_before_sync, 5)


def test_a_bug_in_the_leases_is_found() -> None:
    problems = hunt(planted_state.stale_fence_accepted, 20, FrozenLife, Plan(frozen=0.05))
    assert problems
    assert "I10" in problems[0]


def test_a_bug_in_the_scheduler_is_found() -> None:
    assert hunt(planted_state.scheduled_row_done_first, 10)


# --- the loop -------------------------------------------------------------------------------------


def test_time_passes_only_in_the_clocks() -> None:
    async def story() -> None:
        clock, loop = world.clock, asyncio.get_running_loop()
        began = clock.time_us()
        await clock.pause(3600)
        await asyncio.sleep(0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await loop.create_future()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_future(), 1.5)
        assert loop.time() == clock.monotonic() == 3604.0
        assert clock.time_us() - began == 3_604_000_000
        clock.jump_wall(-60)
        assert clock.time_us() - began == 3_544_000_000
        await clock.pause(1e-12)
        assert clock.monotonic() == 3604.000001

    with World(1) as world:
        world.run(story())


def test_a_wait_for_what_a_rounding_leaves_comes_to_an_end() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        for step in range(1, 200):
            deadline = loop.time() + step / 7 + 1e-7
            while (left := deadline - loop.time()) > 0:  # noqa: ASYNC110 - what clocks are waited for with
                await asyncio.sleep(left)

    with World(1, steps_max=5_000) as world:
        world.run(story())


def orders(seeds: range, story: Callable[[list[str]], Callable[[], object]]) -> set[tuple[str, ...]]:
    """Return the orders in which a story of each seed notes what it does."""
    found = set()
    for seed in seeds:
        noted: list[str] = []

        async def begin(noted: list[str] = noted) -> None:
            story(noted)()
            await asyncio.sleep(1)

        with World(seed) as world:
            world.run(begin())
        found.add(tuple(noted))
    return found


def test_ready_tasks_run_in_any_order_and_other_callbacks_in_theirs() -> None:
    def story(noted: list[str]) -> Callable[[], None]:
        async def task(name: str) -> None:
            noted.append(name)

        def begin() -> None:
            loop = asyncio.get_running_loop()
            for name in "ab":
                tasks.append(loop.create_task(task(name)))
                loop.call_soon(noted.append, name.upper())

        return begin

    tasks: list[object] = []
    found = orders(range(100), story)
    assert {tuple(name for name in order if name.islower()) for order in found} == {("a", "b"), ("b", "a")}
    assert {tuple(name for name in order if name.isupper()) for order in found} == {("A", "B")}
    assert len(found) == 12  # a and b anywhere around A and B


def test_callbacks_of_a_future_keep_their_place_around_who_waits_for_it() -> None:
    def story(noted: list[str]) -> Callable[[], None]:
        async def waiting(future: asyncio.Future[None], name: str) -> None:
            await future
            noted.append(name)

        def begin() -> None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            future.add_done_callback(lambda _: noted.append("before"))
            tasks.append(loop.create_task(waiting(future, "task")))
            loop.call_later(0.1, future.add_done_callback, lambda _: noted.append("after"))
            loop.call_later(0.2, future.set_result, None)

        return begin

    tasks: list[object] = []
    assert orders(range(20), story) == {("before", "task", "after")}


def test_who_yields_lets_everybody_else_run() -> None:
    def story(noted: list[str]) -> Callable[[], None]:
        async def parent() -> None:
            tasks.append(asyncio.get_running_loop().create_task(child()))
            await asyncio.sleep(0)
            noted.append("parent")

        async def child() -> None:
            noted.append("child")

        return lambda: tasks.append(asyncio.get_running_loop().create_task(parent()))

    tasks: list[object] = []
    assert orders(range(20), story) == {("child", "parent")}


def test_a_deadlock_says_who_waits() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def story() -> None:
        process = world.start()
        process.run(stuck(), name="the one")
        process.freeze()
        process.close()
        await asyncio.get_running_loop().create_future()

    with World(1) as world, pytest.raises(Deadlock) as caught:
        world.run(story())
    assert "the test: task 1" in str(caught.value)
    assert "p1 (frozen): the one" in str(caught.value)
    assert "stuck, at test_simulator_world.py" in str(caught.value)


def test_a_run_without_an_end_is_ended() -> None:
    async def story() -> None:
        while True:  # noqa: ASYNC110 - this is the mistake
            await asyncio.sleep(0)

    with World(1, steps_max=100) as world, pytest.raises(EndlessRun, match="100 callbacks"):
        world.run(story())


def test_what_goes_wrong_in_a_task_of_a_process_is_told() -> None:
    async def broken() -> None:
        raise ValueError("a mistake")

    async def story() -> None:
        world.start().run(broken())
        await asyncio.sleep(1)

    with World(1) as world, pytest.raises(ValueError, match="a mistake"):
        world.run(story())


# --- processes ------------------------------------------------------------------------------------


def test_who_is_killed_does_nothing_more_and_its_lease_is_free() -> None:
    async def working(process: Process) -> None:
        try:
            while True:
                await process.call(process.store.log.topics)
        finally:
            ended.append(process.name)

    async def story() -> None:
        first, second = world.start(), world.start()
        first.run(working(first))
        held = first.store.leases.acquire("lease", "first", 10.0)
        assert held is not None
        assert second.store.leases.acquire("lease", "second", 10.0) is None
        await asyncio.sleep(1)
        first.kill()
        taken = second.store.leases.acquire("lease", "second", 10.0)
        assert taken is not None
        assert taken.epoch > held.epoch
        assert not taken.clean
        length = len(world.trace)
        await asyncio.sleep(0.5)
        assert len(world.trace) == length
        with pytest.raises(ProcessDied):
            await first.call(first.store.log.topics)

    ended: list[str] = []
    with World(1) as world:
        world.run(story())
        assert ended == []


def test_who_is_frozen_keeps_its_lease_until_that_expires() -> None:
    async def working(process: Process) -> None:
        while True:
            await asyncio.sleep(0.1)
            moments.append(world.loop.time())

    async def story() -> None:
        first, second = world.start(), world.start()
        first.run(working(first))
        held = first.store.leases.acquire("lease", "first", 10.0)
        assert held is not None
        await asyncio.sleep(1)
        first.freeze(20.0)
        await asyncio.sleep(5)
        assert second.store.leases.acquire("lease", "second", 10.0) is None
        await asyncio.sleep(5)
        assert second.store.leases.acquire("lease", "second", 10.0) is not None
        await asyncio.sleep(12)
        assert first.store.leases.renew([held], 10.0) == []

    moments: list[float] = []
    with World(1) as world:
        world.run(story())
    assert moments[0] < 1.0
    assert moments[-1] >= 21.0
    assert not any(1.0 < moment < 21.0 for moment in moments)


def test_a_process_dies_in_the_middle_of_a_call() -> None:
    async def story() -> None:
        first, second = world.start(), world.start()
        topic = await first.call(first.store.log.create_topic, "orders", TopicSettings())
        batch = Batch.build([b"event"])
        for operation in range(3):  # before the write, before the sync, before the tail
            producer = bytes([operation + 1]) * 6 + b"\x40" + bytes(9)
            run = Run(producer, 0, 0, 1, columns.digest(batch.columns))
            first.die_in(operation)
            with pytest.raises(ProcessDied):
                await first.call(first.store.log.append, topic.partitions[0], batch, [run])
            assert first.dead
            [answer] = await second.call(second.store.log.append, topic.partitions[0], batch, [run])
            assert answer.offsets is not None
            first = world.start()
        assert second.store.log.bounds(topic.partitions[0]).stop == 3

    with World(1) as world:
        world.run(story())


@pytest.mark.parametrize("operation", range(60))
def test_a_store_that_was_being_made_when_its_process_died_can_be_opened(operation: int) -> None:
    async def story() -> None:
        world.start(dies_in=operation)
        if operation % 2:
            world.power_loss(world.chance.choice(SURVIVALS))
        assert not world.start().dead

    with World(operation) as world:
        world.run(story())


def test_a_power_loss_takes_every_process_and_what_was_not_synced() -> None:
    async def story() -> None:
        first, second = world.start(), world.start()
        topic = await first.call(first.store.log.create_topic, "orders", TopicSettings())
        settings = TopicSettings(durability="os")
        hasty = await first.call(first.store.log.create_topic, "hasty", settings)
        batch = Batch.build([b"event"])
        run = Run(b"\x01" * 6 + b"\x40" + bytes(9), 0, 0, 1, columns.digest(batch.columns))
        for partition in (topic.partitions[0], hasty.partitions[0]):
            await first.call(first.store.log.append, partition, batch, [run])
        before = world.clock
        world.power_loss(DROPPED)
        assert first.dead
        assert second.dead
        assert world.clock is not before
        assert world.clock.monotonic() == 0.0
        assert world.clock.time_us() == before.time_us()
        third = world.start()
        assert third.store.log.bounds(topic.partitions[0]).stop == 1
        assert third.store.log.bounds(hasty.partitions[0]).stop == 0

    with World(1) as world:
        world.run(story())
    assert len(world.journal.restarts()) == 1


def test_the_power_is_lost_in_the_middle_of_a_call() -> None:
    async def story() -> None:
        first = world.start()
        world.power_loss_in(2)
        with pytest.raises(ProcessDied):
            await first.call(first.store.log.create_topic, "orders", TopicSettings())
        second = world.start()
        assert second.platform.boot_id != first.platform.boot_id
        assert second.store.log.topics() == []

    with World(1) as world:
        world.run(story())


def test_who_kills_itself_goes_no_further() -> None:
    async def suicidal(process: Process) -> None:
        try:
            process.kill()
        except Killed:
            assert process.dead
            raise
        raise AssertionError

    async def story() -> None:
        process = world.start()
        process.run(suicidal(process))
        await asyncio.sleep(1)
        assert process.dead

    with World(1) as world:
        world.run(story())


def test_a_call_is_made_also_if_nobody_waits_for_it() -> None:
    async def story() -> None:
        process = world.start()
        calling = process.run(process.call(process.store.log.create_topic, "orders", TopicSettings()))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.sleep(1)
        assert calling.cancelled()
        assert [topic.name for topic in process.store.log.topics()] == ["orders"]

    with World(1) as world:
        world.run(story())


def test_calls_that_are_meant_for_a_thread_are_made_by_the_process() -> None:
    async def working(process: Process) -> None:
        names = await asyncio.to_thread(lambda: [topic.name for topic in process.store.log.topics()])
        assert names == []

    async def story() -> None:
        process = world.start()
        await process.run(working(process))

    with World(1) as world:
        world.run(story())


def test_a_plan_lets_calls_fail_before_and_after_their_effect() -> None:
    async def story(plan: Plan, error: type[Exception], names: list[str]) -> None:
        process = world.start()
        world.plan = plan
        with pytest.raises(error):
            await process.call(process.store.log.create_topic, "orders", TopicSettings())
        await world.calm()
        assert [topic.name for topic in process.store.log.topics()] == names

    for plan, error, names in (
        (Plan(fails_before=1.0), OSError, []),
        (Plan(fails_after=1.0), OSError, ["orders"]),
        (Plan(refused=1.0), StoreError, []),
        (Plan(stalled=1.0), StoreError, []),
    ):
        with World(1) as world:
            world.run(story(plan, error, names))


def test_a_write_for_a_lease_is_told_as_it_was() -> None:
    async def story() -> None:
        first, second = world.start(), world.start()
        lease = await first.call(first.store.leases.acquire, "schedule", "first", 1.0)
        assert lease is not None
        await first.call(first.store.schedule.claim, 0, 10, lease.fence)
        await asyncio.sleep(2)
        await second.call(second.store.leases.acquire, "schedule", "second", 1.0)
        with pytest.raises(Fenced):
            await first.call(first.store.schedule.claim, 0, 10, lease.fence)

    with World(1) as world:
        world.run(story())
    rows = world.journal.leases()["schedule"]
    assert rows.code.tolist() == [-1, Outcome.OK, -1, Outcome.FAILED]
    assert check(world.journal) == []


def test_a_world_leaves_nothing_behind() -> None:
    before = len(gate._shared), len(members._own)
    live(1)
    assert (len(gate._shared), len(members._own)) == before


# --- hints ----------------------------------------------------------------------------------------


def hints(plan: Plan, seed: int = 1) -> tuple[list[str], World]:
    """Let one process append ten times, and return who was told; another listener was killed before."""
    told: list[str] = []

    def hear(name: str, _partition: Partition) -> None:
        told.append(name)

    async def story() -> None:
        writer, listener, dead, frozen = (world.start() for _ in range(4))
        topic = writer.store.log.create_topic("orders", TopicSettings())
        for process in (listener, dead, frozen):
            process.store.notifier.listen(partial(hear, process.name))
        dead.kill()
        frozen.freeze()
        world.plan = plan
        for number in range(10):
            batch = Batch.build([b"%d" % number])
            run = Run(b"\x01" * 6 + b"\x40" + bytes(9), 0, number, 1, columns.digest(batch.columns))
            await writer.call(writer.store.log.append, topic.partitions[0], batch, [run])
            await asyncio.sleep(1)
        assert "p4" not in told
        frozen.thaw()
        await asyncio.sleep(10)
        directory = Path(writer.store.notifier._own).parent
        assert len(world.network.names(directory)) == 2  # that of the dead one was removed
        listener.close()
        assert len(world.network.names(directory)) == 1

    with World(seed) as world:
        world.run(story())
    return told, world


def test_hints_wake_the_other_processes() -> None:
    told, _ = hints(CALM)
    assert Counter(told) == {"p2": 10, "p4": 10}


def test_hints_may_be_lost_doubled_and_late() -> None:
    assert hints(Plan(lost=1.0))[0] == []
    assert Counter(hints(Plan(doubled=1.0))[0]) == {"p2": 20, "p4": 10}  # of a frozen one the queue is full then
    assert Counter(hints(Plan(late=1.0))[0]) == {"p2": 10, "p4": 10}


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in live(int(sys.argv[1]))[1].trace))
