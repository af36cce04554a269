"""Hands: what the processes of a life do. They publish, and they consume.

Handlers ack, ack late and twice, fail for a while or for ever, hang, disconnect, and, in some lives, kill their
process.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock import columns
from penstock.batch import Batch
from penstock.bus.consumer import Consumer
from penstock.bus.topic import Topic
from penstock.errors import PenstockError, StoreError, SubscriptionBusy, WritingStopped
from penstock.producers import Run
from penstock.runtime.dispatcher import Dispatcher
from penstock.testing.campaigns.simulated.manner import LEASE_SECONDS, RETRIES
from penstock.testing.campaigns.simulated.witness import SUBSCRIPTION
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    from penstock.bus.delivered import Delivery
    from penstock.rows import Partition, TopicInfo
    from penstock.runtime.crew import Place
    from penstock.runtime.member import Member
    from penstock.testing.campaigns.simulated.audit import Audit
    from penstock.testing.campaigns.simulated.manner import Manner
    from penstock.testing.simulator import Process, World


class Hands:
    """What processes do, for as long as they live."""

    def __init__(self, world: World, manner: Manner, topic: TopicInfo, audit: Audit) -> None:
        self._world = world
        self._manner = manner
        self._topic = topic
        self._audit = audit
        self._number = 0
        self._sequence = 0
        self.unsent: list[tuple[Partition, Batch, Run]] = []
        """What was not acknowledged yet, in order."""
        self.resting = False
        """All faults have ended: nothing new begins, and what is left comes to its end."""

    def begin(self, process: Process) -> None:
        """Let a process do what it is for."""
        process.run(self._publish(process))
        dispatcher = Dispatcher(
            process,
            owner=f"owner-{process.number}",
            clock=self._world.clock,
            jitter=process.chance.random,
            lease_seconds=LEASE_SECONDS,
        )
        for number in range(self._manner.consumers):
            process.run(self._consume(process, dispatcher, number))

    # --- publishing ---------------------------------------------------------------------------

    async def _publish(self, process: Process) -> None:
        chance = process.chance
        for _ in range(self._manner.publishes):
            await asyncio.sleep(chance.random() * 1.2)
            if self.resting:
                break
            self.unsent.append(self._publication(chance.choice(self._topic.partitions), chance))
            await self.send(process)

    def _publication(self, partition: Partition, chance: Any) -> tuple[Partition, Batch, Run]:
        payloads, keys = [], []
        for _ in range(chance.choice([1, 1, 2, 5])):
            self._number += 1
            kind = chance.choice(self._manner.kinds)
            payloads.append(b"%s %d/%d" % (kind.encode(), self._world.seed, self._number))
            keys.append(chance.choice(self._manner.keys))
        batch = Batch.build(payloads, key=keys if any(keys) else None)
        run = Run(b"\1" * 6 + b"\x40" + bytes(9), 0, self._sequence, len(batch), columns.digest(batch.columns))
        self._sequence += len(batch)
        return partition, batch, run

    async def send(self, process: Process) -> None:
        """Send what was not acknowledged yet, in order, each again and again until its outcome is known."""
        journal = self._world.journal
        while self.unsent:
            partition, batch, run = self.unsent[0]
            payloads = batch.columns.column("data").to_pylist()
            try:
                [answer] = await process.call(process.store.log.append, partition, batch, [run])
                if answer.refused is not None:
                    raise answer.refused
            except WritingStopped:
                process.kill()
                return
            except (OSError, StoreError):
                journal.published(*partition, payloads, Outcome.UNKNOWN)
                return
            if self.unsent and self.unsent[0][2] is run:
                del self.unsent[0]
            offset = answer.offsets.start if answer.offsets is not None else None
            if offset is not None:
                journal.published(*partition, payloads, Outcome.OK, offset=offset)

    # --- consuming ----------------------------------------------------------------------------

    async def _consume(self, process: Process, dispatcher: Dispatcher, which: int) -> None:
        """Consume for as long as the process lives, with a new consumer whenever the last one came to an end."""
        topic = Topic("orders", bytes, partitions=len(self._topic.partitions))
        number = 0
        while True:
            number += 1
            owner = f"{process.name}-{number}" + ("" if which == 0 else f"-{which}")

            async def join(owner: str = owner) -> Member | Place:
                found = await process.call(process.store.cursors.subscription, self._topic.log_id, SUBSCRIPTION)
                if found is None:
                    raise StoreError("the subscription is gone")
                return await dispatcher.join(self._topic, found, owner, lambda *_: None)

            async def find() -> Topic[Any]:
                return topic

            consumer: Consumer[bytes] = Consumer(find, join, dispatcher.leave, SUBSCRIPTION)
            patience = 0.5
            try:
                async with consumer:
                    if self._manner.batches:
                        await self._handle_batches(process, consumer)
                    else:
                        await self._handle_singly(process, consumer)
            except (PenstockError, OSError) as error:
                process.note(f"consumer {owner} ends: {type(error).__name__}")
                patience = 2.0 if isinstance(error, SubscriptionBusy) else 0.5
            await asyncio.sleep(process.chance.random() * patience)

    async def _handle_singly(self, process: Process, consumer: Consumer[bytes]) -> None:
        hands: set[asyncio.Task[None]] = set()
        try:
            async for delivery in consumer:
                task = asyncio.get_running_loop().create_task(self._handle(process, delivery))
                # Told before the task begins: it is in hand from now on.
                number = delivery.position.partition
                self._audit.handed(process, number, delivery, delivery.event, delivery.attempt)
                self._audit.begun(number, delivery, delivery.event)
                hands.add(task)
                task.add_done_callback(hands.discard)
                if not self.resting and process.chance.random() < self._manner.tired:
                    process.note("disconnects")
                    return
        finally:
            for task in hands:
                task.cancel()

    async def _handle(self, process: Process, delivery: Delivery[bytes]) -> None:
        with suppress(PenstockError):
            verdict = await self._work(process, delivery.event.data, delivery.attempt)
            match verdict:
                case "ack":
                    await delivery.ack()
                    self._audit.acked(delivery, delivery.event.offset)
                    if process.chance.random() < 0.1:
                        await delivery.ack()
                case "reject":
                    await delivery.reject("no good")
                    self._audit.done(delivery, delivery.event.offset)
                case _:
                    await delivery.nack(delay=self._delay(process), reason="not now")
                    if delivery.attempt > RETRIES:
                        self._audit.done(delivery, delivery.event.offset)

    def _delay(self, process: Process) -> float | None:
        return process.chance.choice(self._manner.delays)

    async def _work(self, process: Process, payload: bytes, attempt: int) -> str:
        """Do what a handler does with such an event."""
        chance = process.chance
        kind = payload.split()[0]
        if kind == b"killer":
            process.note(f"is killed by {payload!r}, attempt {attempt}")
            process.kill()
        if kind == b"stuck" and attempt == 1:
            await asyncio.sleep(3600.0 if not self._manner.batches else 3.0)
        if kind == b"slow":
            await asyncio.sleep(chance.choice([0.5, 1.5, 4.0]) if not self.resting else 0.1)
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
            done: list[int] = []
            failed: list[int] = []
            blocked: set[bytes | None] = set()
            for event in batch:
                self._audit.handed(process, batch.partition, batch, event, batch.attempts.get(event.offset, 1))
            for event in batch:
                attempt = batch.attempts.get(event.offset, 1)
                if event.key in blocked:
                    failed.append(event.offset)
                    continue
                self._audit.begun(batch.partition, batch, event)
                verdict = await self._work(process, event.data, attempt)
                if verdict == "ack":
                    done.append(event.offset)
                    self._audit.done(batch, event.offset)
                elif verdict == "reject":
                    await batch.reject([event.offset], "no good")
                    self._audit.done(batch, event.offset)
                else:
                    # What is behind it in its lane is not begun, and given back with it.
                    failed.append(event.offset)
                    if attempt > RETRIES:
                        self._audit.done(batch, event.offset)
                    blocked.add(event.key)
            chance.shuffle(done)
            if done:
                await batch.ack(done)
                for offset in done:
                    self._audit.acked(batch, offset)
            for offset in failed:
                await batch.nack([offset], delay=self._delay(process))
                if batch.attempts.get(offset, 1) > RETRIES:
                    self._audit.done(batch, offset)
