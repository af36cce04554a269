"""`shared`: several consumers at a time, each of which takes whatever comes next, in one process and in several."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.deliveries import Running, World, acked, kept, raw, wide

from penstock.engine import claims
from penstock.errors import StaleDelivery, StoreUnavailable, SubscriptionMismatch
from penstock.offsets import Range
from penstock.rows import Cursor, ParkedFilter
from penstock.runtime import modes, sharing, subscriptions
from penstock.settling import claims_of, unsettled

if TYPE_CHECKING:
    from penstock import Bus
    from penstock.bus.consumer import Consumer

SEEN = 1.0
"""Whatever others do is seen within this time."""


def consume(bus: Bus, topic: Any = raw, **options: Any) -> Consumer[bytes]:
    return bus.consume(topic, "s", mode="shared", **options)


async def publish(world: World, bus: Bus, count: int, *, first: int = 0, topic: Any = raw) -> None:
    for number in range(first, first + count):
        await world.publish(bus, b"%d" % number, topic=topic, key=f"key-{number % 20}")


def numbers(*runnings: Running) -> list[int]:
    """Return all that was handed over to anybody."""
    return sorted(int(data) for running in runnings for data in running.data)


def takes(world: World, seconds: float) -> Any:
    """Return a handler that takes so long."""

    async def handle(delivery: Any) -> None:
        await world.clock.pause(seconds)
        await delivery.ack()

    return handle


def unsettled_of(cursor: Cursor) -> dict[int, int]:
    """Return how many offsets each berth has claimed, and nobody has settled."""
    return {berth: len(unsettled(cursor, berth)) for berth in cursor.claims}


# --- in one process ---------------------------------------------------------------------------


async def test_one_consumer_has_everything(world: World) -> None:
    bus = world.bus()
    await publish(world, bus, 50)
    async with world.running(consume(bus)) as running:
        await world.until(lambda: world.cursor("s").next_offset == 50, within=SEEN)
        assert numbers(running) == list(range(50))
    assert world.outcomes("s") == {"acked": list(range(50))}
    assert world.store.whole.leases.held("shard/") == world.store.whole.leases.held("member/") == []
    assert unsettled_of(world.cursor("s")) == {}


async def test_an_event_goes_to_whoever_is_free(world: World) -> None:
    bus = world.bus()
    slow = asyncio.Event()

    async def waiting(delivery: Any) -> None:
        await slow.wait()
        await delivery.ack()

    async with world.running(consume(bus), waiting) as busy, world.running(consume(bus)) as free:
        await publish(world, bus, 100)
        await world.until(lambda: len(busy.taken) + len(free.taken) == 100, within=3)
        assert len(busy.taken) == 1
        slow.set()
        await world.until(lambda: world.cursor("s").next_offset == 100, within=SEEN)
    assert world.outcomes("s") == {"acked": list(range(100))}


async def test_what_a_consumer_holds_goes_to_the_others_when_it_leaves(world: World) -> None:
    bus = world.bus()
    async with world.running(consume(bus), takes(world, 0.01)) as stays:
        async with world.running(consume(bus), kept) as leaves:
            await publish(world, bus, 60)
            await world.until(lambda: len(stays.taken) + len(leaves.taken) >= 60, within=3)
            assert leaves.taken
        await world.until(lambda: world.cursor("s").next_offset == 60, within=SEEN)
        assert set(leaves.offsets) <= set(stays.offsets)
        assert {taken.attempt for taken in stays.taken} == {1}
    assert world.outcomes("s") == {"acked": list(range(60))}


async def test_a_consumer_that_is_busy_keeps_nothing_that_it_has_not_begun(world: World) -> None:
    bus = world.bus()
    stuck = asyncio.Event()

    async def sometimes(delivery: Any) -> None:
        if delivery.event.data == b"100":
            await stuck.wait()
        await delivery.ack()

    async with world.running(consume(bus), sometimes) as one:
        # It is quick, and is given many at a time by now.
        await publish(world, bus, 200)
        await world.until(lambda: b"100" in one.data, within=SEEN)
        async with world.running(consume(bus), sometimes) as two:
            await world.until(lambda: len(one.taken) + len(two.taken) == 200, within=4)
            assert one.data[-1] == b"100"
            stuck.set()
            await world.until(lambda: world.cursor("s").next_offset == 200, within=SEEN)
    assert world.outcomes("s") == {"acked": list(range(200))}


async def test_events_of_all_partitions_are_shared(world: World) -> None:
    bus = world.bus()
    handle = takes(world, 0.01)
    async with world.running(consume(bus, wide), handle) as one, world.running(consume(bus, wide), handle) as two:
        await publish(world, bus, 100, topic=wide)
        await world.until(lambda: len(one.taken) + len(two.taken) == 100, within=5)
        assert one.taken
        assert two.taken
        assert len({taken.partition for taken in (*one.taken, *two.taken)}) > 2
        assert numbers(one, two) == list(range(100))


async def test_an_ask_claims_of_one_partition_only(world: World) -> None:
    first, second = world.bus(), world.bus()
    stuck = asyncio.Event()

    async def waits(delivery: Any) -> None:
        await stuck.wait()
        await delivery.ack()

    async with world.running(consume(first, wide), waits) as one, world.running(consume(second, wide), waits) as two:
        await world.run(SEEN)
        await publish(world, first, 40, topic=wide)
        await world.until(lambda: one.taken and two.taken, within=SEEN)
        cursors = [world.cursor("s", number, wide) for number in range(4)]
        assert sum(sum(unsettled_of(cursor).values()) for cursor in cursors) == 2
        stuck.set()
        await world.until(lambda: len(one.taken) + len(two.taken) == 40, within=SEEN)


async def test_batches_are_shared(world: World) -> None:
    bus = world.bus()
    await publish(world, bus, 300)
    async with consume(bus) as one, consume(bus) as two:
        got: Counter[str] = Counter()

        async def take(name: str, consumer: Consumer[bytes]) -> None:
            async for batch in consumer.batches(max_events=20):
                got[name] += len(batch)
                await world.clock.pause(0.01)
                await batch.ack()

        tasks = [asyncio.ensure_future(take(name, each)) for name, each in (("one", one), ("two", two))]
        await world.until(lambda: world.cursor("s").next_offset == 300, within=5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(got.values()) == 300
    assert min(got.values()) >= 100
    assert world.outcomes("s") == {"acked": list(range(300))}


# --- in several processes ---------------------------------------------------------------------


async def test_a_process_that_comes_has_its_part_of_what_another_had_claimed(world: World) -> None:
    first, second = world.bus(), world.bus()
    await publish(world, first, 100)
    async with world.running(consume(first), takes(world, 0.1)) as one:
        await world.until(lambda: len(one.taken) >= 5, within=2)
        # It was alone, and has claimed everything.
        assert claims_of(world.cursor("s"), 1).end == 100
        async with world.running(consume(second), takes(world, 0.1)) as two:
            await world.until(lambda: world.cursor("s").next_offset == 100, within=15)
            assert len(one.taken) + len(two.taken) == 100
            assert len(two.taken) >= 25
    assert world.outcomes("s") == {"acked": list(range(100))}


async def test_nobody_waits_for_a_process_that_is_stuck(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(consume(first), kept) as stuck, world.running(consume(second)) as two:

        async def for_ever(_delivery: Any) -> None:
            await asyncio.Event().wait()

        stuck.handle = for_ever
        await world.run(SEEN)
        await publish(world, second, 100)
        await world.until(lambda: len(two.taken) == 99, within=5)
        await publish(world, second, 100, first=100)
        await world.until(lambda: len(two.taken) == 199, within=3)
        assert len(stuck.taken) == 1
        assert sorted(unsettled_of(world.cursor("s")).values())[-1] == 1


async def test_what_a_killed_process_had_goes_to_another(world: World) -> None:
    first, second = world.bus(), world.bus()
    second_slow = takes(world, 0.01)
    async with world.running(consume(first), kept) as one, world.running(consume(second), second_slow) as two:
        await world.run(SEEN)
        await publish(world, second, 80)
        await world.until(lambda: one.taken and len(one.taken) + len(two.taken) >= 80, within=5)
        lost = set(one.offsets)
        await world.kill(first, one)
        await world.until(lambda: world.cursor("s").next_offset == 80, within=15)
        assert lost <= set(two.offsets)
    assert world.outcomes("s") == {"acked": list(range(80))}
    assert unsettled_of(world.cursor("s")) == {}


async def test_what_a_process_had_that_ends_while_another_looks_goes_to_that_one(world: World) -> None:
    first, second = world.bus(), world.bus()
    leases = world.store.whole.leases
    async with world.running(consume(first), kept) as one:
        await world.run(SEEN)
        [process] = leases.held("process/")
        async with world.running(consume(second), takes(world, 0.01)) as two:
            await world.run(SEEN)
            await publish(world, second, 80)
            await world.until(lambda: one.taken and len(one.taken) + len(two.taken) >= 80, within=5)
            lost = set(one.offsets)
            await world.kill(first, one)
            [crew] = world.dispatcher(second).crews.values()

            def ends_after_the_first(held: Any, prefix: str) -> Any:
                found = held(prefix)
                if prefix != "member/" and leases.holder(process.name) is not None:
                    leases.release(process, clean=False)
                return found

            world.store.hooks["leases.held"] = ends_after_the_first
            crew._news = True
            await world.until(lambda: world.cursor("s").next_offset == 80, within=5)
            assert leases.holder(process.name) is None
            assert lost <= set(two.offsets)
    assert world.outcomes("s") == {"acked": list(range(80))}


async def test_who_could_not_look_at_what_was_left_behind_looks_again(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(consume(first), kept) as one, world.running(consume(second), takes(world, 0.01)) as two:
        await world.run(SEEN)
        await publish(world, second, 80)
        await world.until(lambda: one.taken and len(one.taken) + len(two.taken) >= 80, within=5)
        await world.kill(first, one)
        world.store.fail("parked.waiting", StoreUnavailable("it is busy"), times=1)
        await world.until(lambda: world.cursor("s").next_offset == 80, within=15)
        assert set(one.offsets) <= set(two.offsets)


async def test_the_end_of_another_that_is_heard_of_while_one_looks_is_news(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(consume(first)), world.running(consume(second)):
        await world.run(SEEN)
        [crew] = world.dispatcher(second).crews.values()
        before = list(crew._consumers)
        assert (len(before), crew.restless) == (2, False)

        def heard_of_meanwhile(held: Any, prefix: str) -> Any:
            found = held(prefix)
            crew.hear(before[:1])
            return found

        world.store.hooks["leases.held"] = heard_of_meanwhile
        crew._news = True
        await world.done(crew.balance())
        world.store.heal()
        assert crew.restless


async def test_what_the_only_process_left_behind_is_found_by_the_next_one(world: World) -> None:
    first, second = world.bus(), world.bus()
    await publish(world, first, 30)
    async with world.running(consume(first), kept) as one:
        await world.until(lambda: one.taken, within=SEEN)
    assert sum(unsettled_of(world.cursor("s")).values()) == 30
    async with world.running(consume(second)) as two:
        await world.until(lambda: world.cursor("s").next_offset == 30, within=SEEN)
        assert numbers(two) == list(range(30))
        assert set(two.attempts) == {1}


async def test_a_process_that_wakes_up_late_is_told_that_its_events_are_others(world: World) -> None:
    first, second = world.bus(), world.bus()
    second_slow = takes(world, 0.01)
    async with world.running(consume(first), kept) as one, world.running(consume(second), second_slow) as two:
        await world.run(SEEN)
        await publish(world, second, 40)
        await world.until(lambda: one.taken and len(two.taken) + len(one.taken) >= 40, within=5)
        frozen = list(one.deliveries)
        thawed = world.freeze(first)
        await world.until(lambda: world.cursor("s").next_offset == 40, within=30)
        one.handle = acked

        async def settle() -> None:
            await frozen[0].ack()
            await one.consumer.flush()

        settling = asyncio.ensure_future(settle())
        await world.settle()
        thawed.set()
        with pytest.raises(StaleDelivery):
            await world.done(settling)
        await publish(world, second, 40, first=40)
        await world.until(lambda: world.cursor("s").next_offset == 80, within=15)
    assert world.outcomes("s") == {"acked": list(range(80))}


async def test_a_berth_that_has_nothing_any_more_is_given_back(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(consume(second), takes(world, 0.01)) as two:
        async with world.running(consume(first), kept) as one:
            await world.run(SEEN)
            await publish(world, second, 20)
            await world.until(lambda: one.taken, within=3)
            await world.kill(first, one)
        await world.until(lambda: world.cursor("s").next_offset == 20, within=15)
        await world.until(lambda: len(world.store.whole.leases.held("shard/")) == 1, within=3)
        assert two.taken


# --- failures ---------------------------------------------------------------------------------


async def test_a_failing_event_keeps_nobody_waiting_and_is_tried_again(world: World) -> None:
    bus = world.bus()

    async def failing(delivery: Any) -> None:
        bad = int(delivery.event.data) % 10 == 7
        await (delivery.nack(delay=20) if bad and delivery.attempt == 1 else delivery.ack())

    async with world.running(consume(bus), failing) as one, world.running(consume(bus), failing) as two:
        await publish(world, bus, 100)
        await world.until(lambda: world.cursor("s").next_offset == 100, within=3)
        # Those of the same key are not behind it.
        assert [row.offset for row in world.rows("s", "waiting")] == list(range(7, 100, 10))
        await world.until(lambda: not world.rows("s", "waiting"), within=30)
        assert len(one.taken) + len(two.taken) == 110
    assert world.outcomes("s")["acked"] == list(range(100))


async def test_what_waits_aside_goes_to_another_process_with_its_berth(world: World) -> None:
    first, second = world.bus(), world.bus()

    async def failing(delivery: Any) -> None:
        await (delivery.nack(delay=20) if delivery.attempt == 1 else delivery.ack())

    async with world.running(consume(second), failing) as two:
        async with world.running(consume(first), failing) as one:
            await world.run(SEEN)
            await publish(world, first, 40)
            await world.until(lambda: len(world.rows("s", "waiting")) == 40, within=10)
            assert one.taken
        await world.until(lambda: not world.rows("s", "waiting"), within=40)
        assert Counter(two.attempts)[2] == 40
    assert world.outcomes("s")["acked"] == list(range(40))


async def test_a_dead_letter_that_is_brought_back_is_delivered_once(world: World) -> None:
    first, second = world.bus(), world.bus()

    async def rejecting(delivery: Any) -> None:
        await (delivery.ack() if delivery.replay else delivery.reject())

    async with world.running(consume(first), rejecting) as one:
        await publish(world, first, 1)
        await world.until(lambda: world.rows("s", "dead"), within=SEEN)
    async with world.running(consume(second), rejecting) as two, world.running(consume(first), rejecting) as three:
        await world.run(SEEN)
        wanted = ParkedFilter(log_id=world.info(raw).log_id, subscription="s")
        assert world.store.whole.parked.replay(wanted, world.clock.time_us()) == 1
        await world.until(lambda: two.taken or three.taken, within=3)
        await world.run(5)
        assert [taken.replay for taken in (*one.taken, *two.taken, *three.taken)] == [0, 1]


async def test_a_dead_letter_of_a_process_that_is_gone_is_brought_back(world: World) -> None:
    first, second = world.bus(), world.bus()

    async def rejecting(delivery: Any) -> None:
        await (delivery.ack() if delivery.replay else delivery.reject())

    async with world.running(consume(first), rejecting) as one, world.running(consume(second), kept) as two:
        await publish(world, first, 1)
        await world.until(lambda: world.rows("s", "dead"), within=SEEN)
        assert two.taken == []
        await world.done(one.consumer.close())
        await world.run(SEEN)
        [row] = world.rows("s", "dead")
        holder = world.store.whole.leases.holder(subscriptions.shard_lease(row.shard))
        assert holder is None
        two.handle = rejecting
        assert world.replay("s") == 1
        await world.until(lambda: two.taken, within=2)
        assert [taken.replay for taken in two.taken] == [1]
        await world.until(lambda: not world.rows("s", "waiting"), within=SEEN)


async def test_an_event_that_kills_its_process_ends_as_a_dead_letter(world: World) -> None:
    await publish(world, world.bus(), 40)
    survivor = world.bus()
    for _ in range(6):
        bus = world.bus()

        async def killed(delivery: Any) -> None:
            await (asyncio.Event().wait() if delivery.event.data == b"17" else delivery.ack())

        async with world.running(consume(bus), killed) as running:
            await world.until(
                lambda running=running: b"17" in running.data or world.cursor("s").next_offset == 40,  # type: ignore[misc]
                within=30,
            )
            if world.cursor("s").next_offset == 40:
                break
            await world.kill(bus, running)
    async with world.running(consume(survivor)):
        await world.until(lambda: world.cursor("s").next_offset == 40, within=30)
    assert [row.offset for row in world.rows("s", "dead")] == [17]
    assert world.outcomes("s") == {"acked": [n for n in range(40) if n != 17], "dead": [17]}


# --- what others change -----------------------------------------------------------------------


async def test_a_seek_is_seen_by_all(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(consume(first)) as one, world.running(consume(second)) as two:
        await world.run(SEEN)
        await publish(world, first, 40)
        await world.until(lambda: world.cursor("s").next_offset == 40, within=3)
        await first.seek(raw, "s", 0)
        await world.until(lambda: len(one.taken) + len(two.taken) == 80, within=10)
        await world.until(lambda: world.cursor("s").next_offset == 40, within=3)
        assert world.cursor("s").generation == 1


async def test_the_rate_is_divided_among_the_processes(world: World) -> None:
    first, second = world.bus(), world.bus()
    async with world.running(consume(first, rate=20)) as one, world.running(consume(second)) as two:
        await world.run(2 * SEEN)
        await publish(world, first, 100)
        began = world.clock.monotonic()
        await world.until(lambda: len(one.taken) + len(two.taken) == 100, within=20)
        assert 4 <= world.clock.monotonic() - began <= 7


async def test_a_hole_in_the_log_is_declared_once_and_passed(world: World) -> None:
    bus = world.bus()
    gaps: list[tuple[int, int]] = []
    await publish(world, bus, 60)
    async with world.running(consume(bus, protect=False)) as running:
        await world.until(lambda: len(running.taken) == 60, within=SEEN)
    partition = world.info(raw).partitions[0]
    await publish(world, bus, 200, first=60)  # enough for a store of small files to have some that can go
    world.store.whole.log.trim(partition, world.store.whole.log.bounds(partition).stop - 5, force=True)
    first = world.store.whole.log.bounds(partition).start
    assert first > 60
    heard = consume(bus, on_gap=lambda _partition, gap: gaps.append((gap.start, gap.stop)))
    async with world.running(heard) as running:
        end = world.store.whole.log.bounds(partition).stop
        await world.until(lambda: world.cursor("s").next_offset == end, within=10)
        assert numbers(running) == list(range(first, end))
    assert (gaps[0][0], gaps[-1][1]) == (60, first)
    assert all(before[1] == after[0] for before, after in pairwise(gaps))


# --- other modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "failover", "key_shared", "shared"])
@pytest.mark.parametrize("before", ["exclusive", "key_shared", "shared"])
async def test_a_mode_is_changed_while_nobody_consumes_and_nothing_is_lost_or_doubled(
    world: World, before: Any, mode: Any
) -> None:
    bus = world.bus()

    async def some(delivery: Any) -> None:
        number = int(delivery.event.data)
        if number % 3 == 0:
            await delivery.nack(delay=30)
        elif number % 3 == 1:
            await delivery.ack()

    await publish(world, bus, 30)
    async with world.running(bus.consume(raw, "s", mode=before), some) as one:
        await world.until(lambda: one.taken, within=SEEN)
        await world.run(SEEN)
        with pytest.raises(SubscriptionMismatch, match="end them first"):
            modes.change_mode(world.store.whole, world.info(raw), "s", mode)
    assert sharing.consumers_of(world.store.whole, world.info(raw), "s") == []
    settled = set(world.outcomes("s").get("acked", ()))
    parked = {row.offset for row in world.rows("s", "waiting")}
    assert settled
    assert parked
    changed = modes.change_mode(world.store.whole, world.info(raw), "s", mode)
    assert (changed.mode, world.cursor("s").claims) == (mode, {})
    other = "failover" if mode != "failover" else "shared"
    with pytest.raises(SubscriptionMismatch, match="--mode"):
        subscriptions.ensure(
            world.store.whole, world.info(raw), "s", mode=other, changes={}, start="latest", protect=None, now_us=0
        )
    async with world.running(bus.consume(raw, "s", mode=mode)) as two:
        await world.until(lambda: world.cursor("s").next_offset == 30 and not world.rows("s", "waiting"), within=60)
        assert sorted(two.offsets) == sorted(set(range(30)) - settled)
    assert world.outcomes("s")["acked"] == list(range(30))


async def test_a_consumer_that_runs_ends_when_it_sees_another_mode(world: World) -> None:
    bus = world.bus()
    async with world.running(consume(bus)) as running:
        await world.run(SEEN)
        store, info = world.store.whole, world.info(raw)
        found = store.cursors.subscription(info.log_id, "s")
        assert found is not None
        store.cursors.put_subscription(msgspec.structs.replace(found, mode="exclusive"))
        await world.until(running.task.done, within=SEEN)
        with pytest.raises(SubscriptionMismatch, match="has mode 'exclusive' now"):
            running.task.result()
        running.looked_at()


def test_as_much_is_claimed_at_a_time_as_lasts_for_a_moment() -> None:
    made = claims.Claims((), frontier=0, head=1_000_000)
    sizes = []
    now = 0.0
    for lasted in (0.01, 0.01, 0.1, *(1.0,) * 10):
        wish = made.wish(10, 0, now)
        assert wish is not None
        sizes.append(wish.most)
        made.wished()
        made.take([Range(made.frontier, made.frontier + wish.most)], made.frontier + wish.most, now)
        made.read_to(made.frontier)
        now += lasted
    assert sizes == [10, 40, 160, 160, 80, 40, 20, 10, 10, 10, 10, 10, 10]
    assert made.wish_ahead(0, 0, now) is None


async def test_what_could_not_be_given_back_at_first_is_found_by_those_who_have_seen_its_consumer_go(
    world: World,
) -> None:
    one, other = world.bus(), world.bus()
    await world.publish(other, b"0")
    async with world.running(one.consume(raw, "t")), world.running(one.consume(raw, "s", mode="shared"), kept) as held:
        await world.until(lambda: held.taken)
        async with world.running(other.consume(raw, "s", mode="shared")) as running:
            await world.run(1)
            world.store.fail("leases.release_some", StoreUnavailable("not now"), times=1)
            await world.done(held.consumer.close())
            await world.until(lambda: running.data == [b"0"], within=5)
