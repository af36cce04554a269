"""A life of delivery in a simulated world: several processes publish, and consume one subscription.

Everything that delivers is the production code: engine, runtime and file store. What is simulated is the machine below it
and the handlers above it, which ack, ack late and twice, fail for a while or for ever, hang, disconnect, and, in some lives,
kill their process. Processes are killed, frozen and started anew, and the power is lost.

When all faults have ended, everything must come to rest: every event is settled, and was settled once. The journal is kept
outside of the world, and told of every step right where it happens, so that no answer that got lost confuses it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from penstock import columns
from penstock.batch import Batch
from penstock.bus.consumer import Consumer
from penstock.bus.topic import Topic
from penstock.engine.policy import Policy
from penstock.errors import PenstockError, StoreError, WritingStopped
from penstock.producers import Run
from penstock.rows import ParkedFilter, TopicSettings
from penstock.runtime import subscriptions
from penstock.runtime.dispatcher import Dispatcher
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.runtime.ledger import decode_record
from penstock.testing.campaigns.simulated.witness import WitnessedCursors
from penstock.testing.checker import check
from penstock.testing.journal import Outcome
from penstock.testing.simulator import CALM, Killed, ProcessDied

if TYPE_CHECKING:
    from penstock.bus.consumer import Delivery
    from penstock.rows import Partition, TopicInfo
    from penstock.runtime.ledger import Record
    from penstock.runtime.member import Member
    from penstock.testing.simulator import Plan, Process, World

SUBSCRIPTION: Final = "billing"
SECONDS: Final = 12.0
REST_SECONDS: Final = 400.0
PROCESSES: Final = 3
PUBLISHES: Final = 10
LEASE_SECONDS: Final = 4.0
RETRIES: Final = 2
DISTURBANCES: Final = ("kill", "kill", "kill within", "freeze", "freeze", "power", "power within", "nothing")


class Life:
    """One life; `run` returns what is wrong after it."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self._plan = plan
        chance = world.chance
        self.mode = chance.choice(["exclusive", "failover", "failover"])
        self.policy = Policy(
            max_retries=RETRIES,
            backoff_seconds=chance.choice([0.2, 1.0, 6.0]),
            backoff_seconds_max=8.0,
            timeout_seconds=chance.choice([None, 2.0]),
            window_events=chance.choice([4, 20, 100]),
            read_events=chance.choice([3, 10, 50]),
            checkpoint_events=chance.choice([1, 1, 10]),
            checkpoint_seconds=chance.choice([0.0, 0.5]),
            heartbeat_seconds=0.5,
        )
        self._keys = [None] if chance.random() < 0.2 else [b"a", b"b", b"c", b"d", None][: chance.choice([2, 4, 5])]
        self._batches = chance.random() < 0.4
        self._killers = chance.random() < 0.3
        self._resting = False
        self._number = 0
        self._sequence = 0
        self._unsent: list[tuple[Partition, Batch, Run]] = []
        self._keys_of: dict[Partition, dict[int, bytes | None]] = defaultdict(dict)
        self._done: dict[Partition, set[int]] = defaultdict(set)
        self._begun: dict[tuple[Partition, int], int] = {}
        self._overtakes: list[tuple[Partition, int, int, int]] = []
        """What was begun before an earlier event of its lane was done by any hand, and which, and when."""
        self.problems: list[str] = []
        self.topic: TopicInfo
        self.deliveries = 0

    # --- the story ----------------------------------------------------------------------------

    async def run(self) -> list[str]:
        """Live it, let everything come to rest, and return what is wrong."""
        first = self.world.start()
        settings = TopicSettings(partitions=self.world.chance.choice([1, 1, 2]))
        self.topic = await first.call(first.store.log.create_topic, "orders", settings)
        await first.call(
            subscriptions.ensure, first.store, self.topic, SUBSCRIPTION, mode=self.mode,
            changes=self.policy.stored(), start="earliest", protect=None, now_us=self.world.clock.time_us(),
        )  # fmt: skip
        self._begin(first)
        self.world.plan = self._plan
        nemesis = self.world.context.run(self.world.loop.create_task, self._disturb())
        await asyncio.sleep(SECONDS)
        nemesis.cancel()
        await self.world.calm()
        self._resting = True
        self._restart()
        try:
            if not await self._comes_to_rest():
                self.problems.append(
                    f"{REST_SECONDS} s after all faults ended, there is no rest: {await self._state()}"
                )
            await self._examine()
        except (PenstockError, OSError) as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        return self.problems

    def _restart(self) -> None:
        while len(self.world.living) < PROCESSES:
            dies_in = None if self.world.plan is CALM or self.world.chance.random() < 0.9 else 15
            try:
                process = self.world.start(dies_in=dies_in)
            except (OSError, StoreError):
                return
            if not process.dead:
                process.spare()
                self._begin(process)

    def _begin(self, process: Process) -> None:
        process.store.cursors = WitnessedCursors(process.store.cursors, self.world.journal, SUBSCRIPTION)  # type: ignore[assignment]
        process.run(self._publish(process))
        process.run(self._consume(process))

    async def _disturb(self) -> None:
        chance = self.world.chance
        while True:
            self._restart()
            await asyncio.sleep(chance.random() * 5)
            if not self.world.living:
                continue
            victim = chance.choice(self.world.living)
            match chance.choice(DISTURBANCES):
                case "kill":
                    victim.kill()
                case "kill within":
                    victim.die_in(chance.randrange(20))
                case "freeze":
                    victim.freeze(chance.choice([1.0, 3 * LEASE_SECONDS]))
                case "power":
                    self.world.power_loss()
                case "power within":
                    self.world.power_loss_in(chance.randrange(20))

    # --- publishing ---------------------------------------------------------------------------

    async def _publish(self, process: Process) -> None:
        chance = process.chance
        for _ in range(PUBLISHES):
            if self._resting:
                break
            await asyncio.sleep(chance.random() * 1.5)
            self._unsent.append(self._publication(chance.choice(self.topic.partitions), chance))
            await self._send(process)
        while self._resting and self._unsent:
            await self._send(process)
            await asyncio.sleep(0.1)

    def _publication(self, partition: Partition, chance: Any) -> tuple[Partition, Batch, Run]:
        payloads, keys = [], []
        for _ in range(chance.choice([1, 1, 2, 5])):
            self._number += 1
            kind = chance.choice(
                [*("good",) * 12, "flaky", "flaky", "slow", "bad", *(["killer"] if self._killers else [])]
            )
            payloads.append(b"%s %d/%d" % (kind.encode(), self.world.seed, self._number))
            keys.append(chance.choice(self._keys))
        batch = Batch.build(payloads, key=keys if any(keys) else None)
        run = Run(b"\1" * 6 + b"\x40" + bytes(9), 0, self._sequence, len(batch), columns.digest(batch.columns))
        self._sequence += len(batch)
        return partition, batch, run

    async def _send(self, process: Process) -> None:
        """Send what was not acknowledged yet, in order, each again and again until its outcome is known."""
        while self._unsent:
            partition, batch, run = self._unsent[0]
            payloads = batch.columns.column("data").to_pylist()
            try:
                [answer] = await process.call(process.store.log.append, partition, batch, [run])
                if answer.refused is not None:
                    raise answer.refused
            except WritingStopped:
                process.kill()
                return
            except (OSError, StoreError):
                self.world.journal.published(*partition, payloads, Outcome.UNKNOWN)
                return
            if self._unsent and self._unsent[0][2] is run:
                del self._unsent[0]
            offset = answer.offsets.start if answer.offsets is not None else None
            if offset is not None:
                self.world.journal.published(*partition, payloads, Outcome.OK, offset=offset)

    # --- consuming ----------------------------------------------------------------------------

    async def _consume(self, process: Process) -> None:
        """Consume for as long as the process lives, with a new consumer whenever the last one came to an end."""
        dispatcher = Dispatcher(
            process,
            owner=f"owner-{process.number}",
            clock=self.world.clock,
            jitter=process.chance.random,
            lease_seconds=LEASE_SECONDS,
        )
        topic = Topic("orders", bytes, partitions=len(self.topic.partitions))
        number = 0
        while True:
            number += 1
            owner = f"{process.name}-{number}"

            async def join(owner: str = owner) -> Member:
                found = await process.call(process.store.cursors.subscription, self.topic.log_id, SUBSCRIPTION)
                if found is None:
                    raise StoreError("the subscription is gone")
                return await dispatcher.join(self.topic, found, owner, lambda *_: None)

            async def find() -> Topic[Any]:
                return topic

            consumer: Consumer[bytes] = Consumer(find, join, dispatcher.leave, SUBSCRIPTION)
            try:
                async with consumer:
                    if self._batches:
                        await self._handle_batches(process, consumer)
                    else:
                        await self._handle_singly(process, consumer)
            except (PenstockError, OSError) as error:
                process.note(f"consumer {owner} ends: {type(error).__name__}")
            await asyncio.sleep(process.chance.random())

    async def _handle_singly(self, process: Process, consumer: Consumer[bytes]) -> None:
        hands: set[asyncio.Task[None]] = set()
        try:
            async for delivery in consumer:
                self._told(
                    process, delivery.position.partition, delivery.event.offset, delivery.event, delivery.attempt
                )
                task = asyncio.get_running_loop().create_task(self._handle(process, delivery))
                hands.add(task)
                task.add_done_callback(hands.discard)
                if not self._resting and process.chance.random() < 0.02:
                    process.note("disconnects")
                    return
        finally:
            for task in hands:
                task.cancel()

    async def _handle(self, process: Process, delivery: Delivery[bytes]) -> None:
        with suppress(PenstockError):
            partition = self.topic.partitions[delivery.position.partition]
            verdict = await self._work(process, delivery.event.data, delivery.attempt)
            match verdict:
                case "ack":
                    await delivery.ack()
                    self._done[partition].add(delivery.event.offset)
                    if process.chance.random() < 0.1:
                        await delivery.ack()
                case "reject":
                    await delivery.reject("no good")
                    self._done[partition].add(delivery.event.offset)
                case _:
                    delay = process.chance.choice([None, None, 0.1, 7.0])
                    await delivery.nack(delay=delay, reason="not now")
                    if delivery.attempt > RETRIES:
                        self._done[partition].add(delivery.event.offset)

    async def _work(self, process: Process, payload: bytes, attempt: int) -> str:
        """Do what a handler does with such an event."""
        chance = process.chance
        kind = payload.split()[0]
        if kind == b"killer":
            process.note(f"is killed by {payload!r}, attempt {attempt}")
            process.kill()
        if kind == b"slow":
            await asyncio.sleep(chance.choice([0.5, 3.0, 9.0]) if not self._resting else 0.1)
        elif chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.2)
        if kind == b"bad":
            return chance.choice(["nack", "nack", "reject"])
        if kind == b"flaky" and attempt == 1:
            return "nack"
        return "ack"

    async def _handle_batches(self, process: Process, consumer: Consumer[bytes]) -> None:
        chance = process.chance
        async for batch in consumer.batches(max_events=chance.choice([2, 10, 100])):
            partition = self.topic.partitions[batch.partition]
            done: list[int] = []
            failed: list[int] = []
            blocked: set[bytes | None] = set()
            for event in batch:
                attempt = batch.attempts.get(event.offset, 1)
                if event.key in blocked:
                    failed.append(event.offset)
                    continue
                self._told(process, batch.partition, event.offset, event, attempt)
                verdict = await self._work(process, event.data, attempt)
                if verdict == "ack":
                    done.append(event.offset)
                    self._done[partition].add(event.offset)
                elif verdict == "reject":
                    await batch.reject([event.offset], "no good")
                    self._done[partition].add(event.offset)
                else:
                    # What is behind it in its lane is not begun, and given back with it.
                    failed.append(event.offset)
                    if attempt > RETRIES:
                        self._done[partition].add(event.offset)
                    blocked.add(event.key)
            chance.shuffle(done)
            if done:
                await batch.ack(done)
            for offset in failed:
                await batch.nack([offset], delay=chance.choice([None, 0.1, 7.0]))
                if batch.attempts.get(offset, 1) > RETRIES:
                    self._done[partition].add(offset)

    def _told(self, process: Process, number: int, offset: int, event: Any, attempt: int) -> None:
        """Tell the journal what a handler is given, and look at the order of its lane."""
        partition = self.topic.partitions[number]
        self.deliveries += 1
        self.world.journal.delivered(SUBSCRIPTION, *partition, offset, [event.data], keys=[event.key])
        self.world.journal.progressed(self.world.loop.time())
        process.note(f"is given {number}@{offset} {event.data!r}, attempt {attempt}")
        known = self._keys_of[partition]
        known[offset] = event.key
        self._begun[partition, offset] = self.deliveries
        early = [
            other
            for other, key in known.items()
            if key == event.key and other < offset and other not in self._done[partition]
        ]
        self._overtakes += [(partition, offset, other, self.deliveries) for other in early]

    # --- rest ---------------------------------------------------------------------------------

    async def _comes_to_rest(self) -> bool:
        ends = self.world.loop.time() + REST_SECONDS
        while self.world.loop.time() < ends:
            await asyncio.sleep(2.0)
            self._restart()
            with suppress(ProcessDied, PenstockError, OSError):
                if not self._unsent and not await self._left():
                    return True
        return False

    async def _left(self) -> list[str]:
        """Return what is not settled."""
        process = next(process for process in self.world.living if not process.frozen)
        store = process.store

        def look() -> list[str]:
            found = []
            for cursor in store.cursors.load(self.topic.log_id, SUBSCRIPTION):
                head = store.log.bounds(self.topic.partitions[cursor.shard.partition]).stop
                if cursor.next_offset < head:
                    found.append(f"{cursor.shard.partition}: at {cursor.next_offset} of {head}")
            counts = store.parked.count(ParkedFilter(log_id=self.topic.log_id, subscription=SUBSCRIPTION))
            if counts["waiting"]:
                found.append(f"{counts['waiting']} wait aside")
            return found

        return await process.call(look)

    async def _state(self) -> str:
        try:
            return "; ".join(await self._left()) or f"{len(self._unsent)} unsent"
        except (ProcessDied, PenstockError, OSError) as error:
            return repr(error)

    async def _examine(self) -> None:
        """Look at everything there is, and compare it with what was promised."""
        for process in self.world.living:
            process.die()
        await self.world.look()
        process = self.world.start()
        records = await process.call(_records, process.store)
        self._check_chains(records)
        journal = self.world.journal
        for record in records:
            if record.log_id == self.topic.log_id:
                for outcome in ("acked", "dead", "expired", "discarded"):
                    for span in record.offsets(outcome):
                        journal.settled(SUBSCRIPTION, record.log_id, record.partition, span.start, span.stop, outcome)
        self._check_overtakes(records)
        await process.call(self._tell_states, process.store)
        self.problems += [str(violation) for violation in check(journal, soon_seconds=60.0)]

    def _check_overtakes(self, records: list[Record]) -> None:
        """Look at what was begun early: that is right only behind an event that was dead by then.

        Nobody's hand has done it: its last attempt was its process's end, or took too long.
        """
        dead = {(record.partition, offset) for record in records for span in record.offsets("dead") for offset in span}
        for partition, offset, early, at in self._overtakes:
            if (partition.number, early) not in dead or self._begun[partition, early] > at:
                self.problems.append(f"{partition.number}@{offset} was begun before {early} of its lane was done")

    def _tell_states(self, store: Any) -> None:
        wanted = ParkedFilter(log_id=self.topic.log_id, subscription=SUBSCRIPTION, states=frozenset({"waiting"}))
        for row in store.parked.waiting(wanted):
            self.world.journal.parked(SUBSCRIPTION, row.shard.log_id, row.shard.partition, row.offset, row.offset + 1)
        for cursor in store.cursors.load(self.topic.log_id, SUBSCRIPTION):
            partition = self.topic.partitions[cursor.shard.partition]
            end = store.log.bounds(partition).stop
            self.world.journal.cursor(SUBSCRIPTION, partition.log_id, partition.number, cursor.next_offset, end)

    def _check_chains(self, records: list[Record]) -> None:
        """Look whether the records of each shard follow each other without a hole."""
        by_shard: defaultdict[int, list[Record]] = defaultdict(list)
        for record in records:
            by_shard[record.partition].append(record)
        for partition, mine in by_shard.items():
            position, number = 0, 0
            for record in mine:
                if (record.number, record.begin) != (number + 1, position):
                    self.problems.append(
                        f"the records of partition {partition} are no chain: {record.number} from {record.begin} comes "
                        f"after {number}, which ended at {position}"
                    )
                    return
                position, number = record.next_offset, record.number


def _records(store: Any) -> list[Record]:
    """Return all records, those that were moved to the ledger and those that were not yet."""
    found = []
    for topic in store.log.topics():
        if topic.name == LEDGER:
            [partition] = topic.partitions
            bounds = store.log.bounds(partition)
            position = bounds.start
            while position < bounds.stop:
                for item in store.log.read(partition, position, bytes_max=1 << 24):
                    found += [decode_record(event.data) for event in item]
                    position = item.range.stop
    moved = {(record.partition, record.number) for record in found}
    rest = [decode_record(record) for _, record in store.cursors.settlements(1 << 20)]
    # A mover that was cut off has appended some that the store still has.
    return found + [record for record in rest if (record.partition, record.number) not in moved]
