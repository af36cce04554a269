"""The order of keys, whatever fails, waits, leaves or takes over; and nobody who waits holds up others."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest
from tests.deliveries import Running, World, acked, kept, raw, wide

from penstock import Bus
from penstock.batch import Batch
from penstock.bus.deliveries import Retry
from penstock.errors import StaleDelivery
from penstock.testing.checker import check
from penstock.testing.journal import Journal, Outcome

HEARTBEAT = 0.5


def by_key(running: Running) -> dict[bytes, list[bytes]]:
    """Return the payloads of each key, in the order of their first deliveries."""
    found: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for delivery in running.deliveries:
        assert delivery.event.key is not None
        if delivery.event.data not in found[delivery.event.key]:
            found[delivery.event.key].append(delivery.event.data)
    return found


async def publish_keys(world: World, bus: Bus, keys: str, each: int) -> None:
    for number in range(each):
        for key in keys:
            await world.publish(bus, f"{key}{number}".encode(), key=key)


# --- keys -------------------------------------------------------------------------------------


async def test_the_next_event_of_a_key_waits_until_the_one_before_is_settled(world: World) -> None:
    bus = world.bus()
    await publish_keys(world, bus, "ab", 3)
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.run(1)
        assert running.data == [b"a0", b"b0"]
        await running.deliveries[1].ack()
        await world.settle()
        assert running.data == [b"a0", b"b0", b"b1"]
        await running.deliveries[0].nack(delay=3)
        await running.deliveries[2].ack()
        await world.run(2.9)
        assert running.data == [b"a0", b"b0", b"b1", b"b2"]
        running.handle = acked
        await running.deliveries[3].ack()
        await world.run(0.2)
        assert running.data == [b"a0", b"b0", b"b1", b"b2", b"a0", b"a1", b"a2"]


async def test_events_without_a_key_keep_the_order_of_their_partition(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, *[b"%d" % number for number in range(5)])

    async def flaky(delivery: Any) -> None:
        await (delivery.nack() if delivery.attempt <= 2 else delivery.ack())

    async with world.running(bus.consume(raw, "s", mode="exclusive"), flaky) as running:
        await world.until(lambda: len(running.taken) == 15)
        assert running.offsets == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


async def test_a_batch_holds_several_of_a_key_in_order_and_none_comes_again_before_it_is_settled(world: World) -> None:
    bus = world.bus()
    await publish_keys(world, bus, "abc", 4)
    async with bus.consume(raw, "s", mode="exclusive") as consumer:
        batches = consumer.batches(max_events=5)
        first = await world.done(anext(batches))
        assert [event.data for event in first] == [b"a0", b"b0", b"c0", b"a1", b"b1"]
        await first.ack([0, 1])
        second = asyncio.ensure_future(anext(batches))
        await world.run(1)
        assert not second.done() or b"a" not in {event.key for event in await second}
        await first.ack(up_to=4)
        seen = [event.data for event in await world.done(second)]
        assert seen == sorted(seen, key=lambda data: data[1:]) or len(seen) == 1
        with pytest.raises(Exception, match="is not in this batch"):
            await first.ack([11])


@pytest.mark.parametrize("said", [[0, 1, 3], [3, 0, 1], [0, 3, 1, 3, 0]])
async def test_events_of_a_batch_are_acked_in_whatever_order_they_are_named_and_however_often(
    world: World, said: list[int]
) -> None:
    bus = world.bus()
    await publish_keys(world, bus, "abcde", 1)
    async with bus.consume(raw, "s", mode="exclusive") as consumer:
        first = await world.done(anext(consumer.batches()))
        assert first.offsets.tolist() == [0, 1, 2, 3, 4]
        await first.ack(said)
        await consumer.flush()
        assert world.cursor("s").next_offset == 2
        await first.ack([2])
        await consumer.flush()
        assert world.cursor("s").next_offset == 4


@pytest.mark.parametrize("retries", [1, 5])
async def test_a_failing_event_stalls_its_own_key_only(world: World, retries: int) -> None:
    bus = world.bus()
    await publish_keys(world, bus, "abcd", 20)

    async def poisoned(delivery: Any) -> None:
        await (delivery.nack() if delivery.event.data == b"b3" else delivery.ack())

    retry = Retry(max_retries=retries, delay=2, max_delay=100, jitter=0)
    async with world.running(bus.consume(raw, "s", mode="exclusive", retry=retry), poisoned) as running:
        await world.until(lambda: sum(data[:1] != b"b" for data in running.data) == 60, within=0.1)
        assert by_key(running)[b"b"] == [b"b0", b"b1", b"b2", b"b3"]
        await world.until(lambda: len(running.taken) == 80 + retries, within=200)
        for key, seen in by_key(running).items():
            assert seen == [key + b"%d" % number for number in range(20)]
        await running.consumer.flush()
        assert [row.event.data for row in world.rows("s", "dead")] == [b"b3"]
        assert world.cursor("s").next_offset == 80


async def test_a_lane_blocked_for_minutes_lets_others_flow_and_its_followers_wait_aside_in_order(world: World) -> None:
    bus = world.bus()

    async def publish(first: int) -> None:
        for number in range(first, first + 100):
            key = "bad" if number % 10 == 0 else f"k{number % 50}"
            await world.publish(bus, b"%d" % number, key=key)

    async def blocked(delivery: Any) -> None:
        if delivery.event.key == b"bad" and delivery.attempt == 1 and delivery.position.offset == 0:
            await delivery.nack(delay=240)
        else:
            await delivery.ack()

    consumer = bus.consume(raw, "s", mode="exclusive", window=20)
    async with world.running(consumer, blocked) as running:
        for first in range(0, 300, 100):
            await publish(first)
            await world.run(10)
            await running.consumer.flush()
            # The window holds 20, and the cursor is not held back by what waits.
            assert world.cursor("s").next_offset == first + 100
            assert len(world.rows("s", "waiting")) == (first + 100) // 10
        assert sum(delivery.event.key != b"bad" for delivery in running.deliveries) == 270
        before = len(running.taken)
        assert before == 271
        await world.until(lambda: len(running.taken) == 271 + 30, within=240, step=5)
        assert running.offsets[before:] == list(range(0, 300, 10))
        await running.consumer.flush()
        assert world.rows("s", "waiting", "dead") == []
    outcomes = world.outcomes("s")
    assert outcomes["acked"] == list(range(300))
    assert outcomes["parked"] == list(range(0, 300, 10))


async def test_a_window_full_of_one_blocked_key_is_relieved(world: World) -> None:
    bus = world.bus()
    for number in range(100):
        await world.publish(bus, b"hot%d" % number, key="hot")
    await world.publish(bus, b"cold", key="cold")

    async def stuck(delivery: Any) -> None:
        if delivery.event.key != b"hot":
            await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="exclusive", window=10), stuck) as running:
        await world.until(lambda: b"cold" in running.data, within=30)
        assert running.data == [b"hot0", b"cold"]
        running.handle = acked
        await running.deliveries[0].ack()
        await world.until(lambda: len(running.taken) == 101, within=30)
        assert by_key(running)[b"hot"] == [b"hot%d" % number for number in range(100)]


async def test_one_stuck_subscription_affects_neither_publishing_nor_its_peers(world: World) -> None:
    bus = world.bus()
    async with (
        world.running(bus.consume(raw, "stuck", mode="exclusive", window=3), kept) as stuck,
        world.running(bus.consume(raw, "peer", mode="exclusive")) as peer,
    ):
        for number in range(60):
            await world.publish(bus, b"%d" % number, key=f"k{number}")
        await world.until(lambda: len(peer.taken) == 60, within=HEARTBEAT)
        assert len(stuck.taken) <= 3
        await peer.consumer.flush()
        assert [lag.lag for lag in await bus.lag(raw)] == [0, 60]


# --- several consumers ------------------------------------------------------------------------


async def test_failover_standby_goes_on_from_the_last_settled_offset(world: World) -> None:
    one, two = world.bus(), world.bus()
    await publish_keys(world, one, "abc", 10)

    async def some(delivery: Any) -> None:
        if delivery.position.offset < 12:
            await delivery.ack()

    async with (
        world.running(one.consume(raw, "s", mode="failover"), some) as active,
        world.running(two.consume(raw, "s", mode="failover")) as standby,
    ):
        await world.until(lambda: len(active.taken) == 15)
        await active.consumer.flush()
        await world.run(20)
        assert (active.consumer.active, standby.consumer.active) == ([0], [])
        assert standby.taken == []
        await world.kill(one, active)
        await world.until(lambda: len(standby.taken) == 18, within=11)  # a lease, and the look after it
        assert standby.offsets == sorted(standby.offsets) == list(range(12, 30))
        assert standby.consumer.active == [0]
    assert world.outcomes("s") == {"acked": list(range(30))}


async def test_failover_by_leaving_is_at_once_and_clean(world: World) -> None:
    one, two = world.bus(), world.bus()
    for number in range(40):
        await world.publish(one, b"%d" % number, topic=wide, key=f"k{number}")
    async with world.running(two.consume(wide, "s", mode="failover"), kept) as first:
        await world.until(lambda: first.taken)
        async with world.running(one.consume(wide, "s", mode="failover")) as second:
            await world.run(3)
            assert second.consumer.active == []
            await world.done(first.consumer.close())
            await world.until(lambda: len(second.taken) == 40, within=0.5)
            assert second.consumer.active == [0, 1, 2, 3]
            assert second.attempts == [1] * 40


async def test_a_consumer_that_was_silent_for_longer_than_its_lease_is_replaced_and_told_so(world: World) -> None:
    one, two = world.bus(), world.bus()
    await publish_keys(world, one, "abc", 10)
    async with (
        world.running(one.consume(raw, "s", mode="failover"), kept) as frozen,
        world.running(two.consume(raw, "s", mode="failover"), kept) as standby,
    ):
        await world.until(lambda: len(frozen.taken) == 3)
        loops = world.dispatcher(one)
        tasks = [loops.presence._task, loops.watch._task]
        for task in tasks:
            assert task is not None
            task.cancel()
        await world.run(10.3)
        assert standby.offsets == [0, 1, 2]
        assert standby.attempts == [1, 1, 1]  # nobody has said that they failed
        # It wakes up, and does not know yet.
        await frozen.deliveries[0].ack()
        with pytest.raises(StaleDelivery):
            await world.done(frozen.consumer.flush())
        assert world.cursor("s").next_offset == 0
        with pytest.raises(StaleDelivery):
            await frozen.deliveries[1].nack()
        loops.presence.start()
        loops.watch.start()
        had = len(frozen.taken)
        standby.handle = acked
        for delivery in standby.deliveries:
            await delivery.ack()
        await world.until(lambda: len(standby.taken) == 30)
        await world.run(10)
        assert len(frozen.taken) == had
        await world.done(standby.consumer.close())
        await world.publish(one, b"a10", key="a")
        await world.until(lambda: frozen.data[had:] == [b"a10"])  # it stands by again
    assert world.outcomes("s") == {"acked": list(range(30))}


async def test_a_consumer_that_was_silent_and_alone_takes_its_shard_anew(world: World) -> None:
    bus = world.bus()
    await publish_keys(world, bus, "abc", 2)
    async with world.running(bus.consume(raw, "s", mode="failover"), kept) as running:
        await world.until(lambda: len(running.taken) == 3)
        before = world.lease_of("s")
        presence = world.dispatcher(bus).presence
        assert presence._task is not None
        presence._task.cancel()
        await world.run(15)
        assert world.lease_of("s") is None
        running.handle = acked
        presence.start()
        await world.until(lambda: world.cursor("s").next_offset == 6)
        after = world.lease_of("s")
        assert after is not None
        assert after.epoch > before.epoch
        with pytest.raises(StaleDelivery, match="silent"):
            await running.deliveries[0].ack()
    assert world.outcomes("s") == {"acked": list(range(6))}


# --- churn ------------------------------------------------------------------------------------


class Crowd:
    """Consumers of one subscription that come, leave and die by chance; what they see is told to a journal."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self.chance = random.Random(seed)
        self.journal = Journal()
        self.log = world.info(wide).log_id
        self.members: list[tuple[Bus, Running]] = []

    async def _handle(self, delivery: Any) -> None:
        place, event, chance = delivery.position, delivery.event, self.chance
        self.journal.delivered("s", self.log, place.partition, place.offset, [event.data], [event.key])
        if chance.random() < 0.1:
            await self._world.clock.pause(chance.random())
        with suppress(StaleDelivery):  # another one has it
            if chance.random() < 0.05 and delivery.attempt < 3:
                await delivery.nack(delay=chance.choice([0, 0.5, 7]))
            else:
                await delivery.ack()

    def join(self) -> None:
        bus = self._world.bus(lease_seconds=2.0)
        consumer = bus.consume(wide, "s", mode="failover", retry=Retry(max_retries=1000), window=50)
        self.members.append((bus, Running(self._world.clock, consumer, self._handle)))

    async def part(self, *, kindly: bool) -> None:
        bus, running = self.members.pop(self.chance.randrange(len(self.members)))
        await (self._world.done(bus.close()) if kindly else self._world.kill(bus, running))
        running.task.cancel()

    async def change(self) -> None:
        match self.chance.random():
            case low if low < 0.05 and len(self.members) < 4:
                self.join()
            case low if low < 0.08 and len(self.members) > 1:
                await self.part(kindly=True)
            case low if low < 0.12 and len(self.members) > 1:
                await self.part(kindly=False)

    def is_over(self) -> bool:
        log, partitions = self._world.store.whole.log, self._world.info(wide).partitions
        ends = [log.bounds(partition).stop for partition in partitions]
        at = [self._world.cursor("s", partition.number, wide).next_offset for partition in partitions]
        return at == ends and not self._world.rows("s", "waiting", topic=wide)

    def look(self) -> None:
        """Tell the journal what there is at the end, once it is seen that all of it was acked."""
        for partition in self._world.info(wide).partitions:
            number, bounds = partition.number, self._world.store.whole.log.bounds(partition)
            self.journal.bounds(self.log, number, bounds.start, bounds.stop)
            for item in self._world.store.whole.log.read(partition, 0, bytes_max=1 << 30):
                assert isinstance(item, Batch)
                self.journal.stored(self.log, number, item.start, [event.data for event in item])
            outcomes = self._world.outcomes("s", number, wide)
            assert outcomes["acked"] == list(bounds)
            assert set(outcomes) <= {"acked", "parked"}
            self.journal.settled("s", self.log, number, bounds.start, bounds.stop, "acked")

    async def end(self) -> None:
        for _, running in self.members:
            if running.task.done():
                running.task.result()
            running.task.cancel()
            await asyncio.wait([running.task])


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_consumer_churn_under_load(world: World, seed: int) -> None:
    publisher = world.bus()
    await publisher.scheduled()  # which opens it
    crowd = Crowd(world, seed)
    crowd.join()
    for number in range(150):
        payload, key = b"%d" % number, f"k{number % 13}"
        receipt = await publisher.publish(wide, payload, key=key)
        [(place, offsets)] = receipt.offsets.items()
        assert offsets is not None
        crowd.journal.published(crowd.log, place, [payload], Outcome.OK, offset=offsets.start, keys=[key.encode()])
        await world.run(crowd.chance.choice([0, 0, 0.01, 0.3]))
        await crowd.change()
    crowd.join()
    await world.until(crowd.is_over, within=120)
    crowd.look()
    assert check(crowd.journal) == []
    await crowd.end()
