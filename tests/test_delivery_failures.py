"""Handlers that fail or never return, consumers that leave or die, and a store that does not take progress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.deliveries import Hook, World, acked, kept, raw

from penstock import Bus, Topic
from penstock.bus.deliveries import Retry
from penstock.errors import StaleDelivery, StoreFull

HEARTBEAT = 0.5
KEYS = "abcde"


async def publish_keyed(world: World, bus: Bus, keys: str = KEYS, topic: Topic[bytes] = raw) -> None:
    for key in keys:
        await world.publish(bus, key.encode(), topic=topic, key=key)


# --- leaving before the ack -------------------------------------------------------------------


async def test_disconnect_before_ack_brings_the_same_event_each_time(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus)
    for _ in range(4):
        async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
            await world.until(lambda: len(running.taken) == 5, within=HEARTBEAT)
            assert running.data == [key.encode() for key in KEYS]
            assert running.attempts == [1] * 5
        assert world.cursor("s").next_offset == 0
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: len(running.taken) == 5, within=HEARTBEAT)
    assert world.outcomes("s") == {"acked": [0, 1, 2, 3, 4]}
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.run(5)
        assert running.taken == []


@pytest.mark.parametrize("ending", ["closed", "killed"])
async def test_disconnect_mid_dispatch_redelivers(world: World, ending: str) -> None:
    bus = world.bus()
    await bus.publish_batch(raw, [b"%d" % number for number in range(100)])

    async def half(delivery: Any) -> None:
        if delivery.position.offset < 50:
            await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="exclusive", consumer_id="one"), half) as running:
        await world.until(lambda: len(running.taken) == 51)
        await running.consumer.flush()
        await (world.kill(bus, running) if ending == "killed" else running.consumer.close())
        successor = world.bus()
        async with world.running(successor.consume(raw, "s", mode="exclusive", consumer_id="one")) as second:
            await world.until(lambda: len(second.taken) == 50)
            assert second.offsets == list(range(50, 100))
            # Nobody has said that it failed.
            assert second.attempts == [1] * 50
            await second.consumer.flush()
            assert world.cursor("s").next_offset == 100
            if ending == "closed":
                with pytest.raises(StaleDelivery):
                    await running.deliveries[-1].ack()
    assert world.outcomes("s") == {"acked": list(range(100))}


async def test_shutdown_gives_unstarted_events_back_without_an_attempt(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus, KEYS * 10)
    taken: list[bytes] = []
    consumer = bus.consume(raw, "s", mode="exclusive")
    async for delivery in consumer:
        taken.append(delivery.event.data)
        await delivery.ack()
        if len(taken) == 3:
            break  # the others of its batch of single events were not begun
    await world.done(bus.close())
    assert world.cursor("s").next_offset == 3
    assert world.cursor("s").attempts == {}
    async with world.running(world.bus().consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: len(running.taken) == 47)
        assert running.attempts == [1] * 47
        assert running.offsets == sorted(running.offsets)
    assert world.outcomes("s") == {"acked": list(range(50))}


async def test_killed_after_the_handler_and_before_the_checkpoint_redelivers(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1")
    world.store.hooks["cursors.commit"] = lambda function, commits: [StoreFull("not now") for _ in commits]
    async with world.running(bus.consume(raw, "s", mode="exclusive", consumer_id="one")) as running:
        await world.until(lambda: len(running.taken) == 2)
        await world.kill(bus, running)
    world.store.heal()
    async with world.running(world.bus().consume(raw, "s", mode="exclusive", consumer_id="one")) as running:
        await world.until(lambda: len(running.taken) == 2)
        assert running.data == [b"0", b"1"]
    assert world.outcomes("s") == {"acked": [0, 1]}


# --- failing ----------------------------------------------------------------------------------


async def test_nack_with_a_delay_redelivers_after_it_and_counts_the_attempt(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus, "ab")
    async with world.running(bus.consume(raw, "s", mode="exclusive"), kept) as running:
        await world.until(lambda: len(running.taken) == 2)
        await running.deliveries[0].nack(delay=3)
        await world.run(2.9)
        assert len(running.taken) == 2
        await world.run(0.1)
        assert (running.offsets, running.attempts) == ([0, 1, 0], [1, 1, 2])
        await running.deliveries[-1].nack(delay=40)  # so long that it waits in the store
        await running.consumer.flush()
        assert [row.state for row in world.rows("s")] == ["waiting"]
        await world.run(39.9)
        assert len(running.taken) == 3
        await world.run(0.1)
        assert (running.offsets, running.attempts) == ([0, 1, 0, 0], [1, 1, 2, 3])
        for delivery in running.deliveries[1:4:2]:
            await delivery.ack()
        await running.consumer.flush()
    assert world.outcomes("s") == {"parked": [0], "acked": [0, 1]}


async def test_backoff_is_exponential_with_jitter_and_bounded(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"x")

    async def fail(delivery: Any) -> None:
        await delivery.nack(reason=ValueError("no"))

    retry = Retry(max_retries=6, delay=1, max_delay=10, jitter=0.1)
    async with world.running(bus.consume(raw, "s", mode="exclusive", retry=retry), fail) as running:
        await world.until(lambda: len(running.taken) == 7, within=200)
        waits = [after.at - before.at for before, after in zip(running.taken, running.taken[1:], strict=False)]
        for wait, longest in zip(waits, [1, 2, 4, 8, 10, 10], strict=True):
            assert 0.9 * longest - 0.001 <= wait <= longest + 0.001
        await world.run(1)
        [row] = world.rows("s", "dead")
        assert (row.attempts, row.error_type, row.error_message, row.event.data) == (7, "ValueError", "no", b"x")


async def test_a_handler_that_passes_its_timeout_fails_and_its_late_ack_still_counts(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1")
    retry = Retry(max_retries=1, delay=1, jitter=0)
    consumer = bus.consume(raw, "s", mode="exclusive", timeout=2, retry=retry)
    async with world.running(consumer, kept) as running:
        await world.until(lambda: running.taken)
        await world.run(1.9)
        await running.deliveries[0].extend(5)
        await world.run(4.9)
        assert len(running.taken) == 1
        await world.run(1.2)  # the rest of its time, and the backoff
        assert (running.offsets, running.attempts) == ([0, 0], [1, 2])
        await running.deliveries[0].ack()  # late: it had been given to somebody again
        await world.settle()
        assert running.offsets == [0, 0, 1]
        await world.run(2)
        await world.run(1)
        assert running.offsets == [0, 0, 1, 1]
        await world.run(2)
        await running.consumer.flush()
        [row] = world.rows("s", "dead")
        assert (row.offset, row.error_type) == (1, "HandlerTimeout")
        await world.publish(bus, b"2")
        await world.until(lambda: len(running.taken) == 5)
        await world.run(2.5)
        await running.deliveries[-1].ack()  # late: it waits for its next attempt, which is not made then
        await world.run(5)
        assert running.offsets == [0, 0, 1, 1, 2]
    assert world.outcomes("s") == {"acked": [0, 2], "dead": [1]}


@pytest.mark.parametrize("failures", [1, 3])
async def test_an_event_that_fails_no_more_often_than_retries_is_delivered_without_a_dead_letter(
    world: World, failures: int
) -> None:
    bus = world.bus()
    await publish_keyed(world, bus)

    async def flaky(delivery: Any) -> None:
        if delivery.event.data == b"b" and delivery.attempt <= failures:
            await delivery.nack()
        else:
            await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="exclusive"), flaky) as running:
        await world.until(lambda: len(running.taken) == 5 + failures)
        assert [taken.attempt for taken in running.taken if taken.data == b"b"] == list(range(1, failures + 2))
        await running.consumer.flush()
    assert world.rows("s", "dead", "waiting") == []
    assert sum(record.retried for record in world.records("s")) == 1
    assert set(world.outcomes("s")) <= {"acked", "parked"}
    assert world.outcomes("s")["acked"] == [0, 1, 2, 3, 4]


async def always_failing(delivery: Any) -> None:
    if delivery.event.data == b"b":
        await delivery.nack(reason=RuntimeError("never"))
    else:
        await delivery.ack()


async def test_an_event_that_always_fails_is_one_dead_letter_with_provenance_and_the_next_flows(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus, "abcb")
    async with world.running(bus.consume(raw, "s", mode="exclusive"), always_failing) as running:
        await world.until(lambda: len(running.taken) == 2 + 4 + 4)
        await running.consumer.flush()
        first, second = world.rows("s", "dead")
        assert (first.offset, first.event.data, first.event.key, first.attempts) == (1, b"b", b"b", 4)
        assert (first.error_type, first.error_message, first.replay) == ("RuntimeError", "never", 0)
        assert first.parked_at <= first.last_retry_at <= world.clock.time_us()
        # The one behind it in its lane had its own attempts, after it.
        assert second.offset == 3
        assert [taken.offset for taken in running.taken if taken.data == b"b"] == [1] * 4 + [3] * 4
        assert world.cursor("s").next_offset == 4
    outcomes = world.outcomes("s")
    assert (outcomes["acked"], outcomes["dead"]) == ([0, 2], [1, 3])


async def test_exhausted_retries_discard_skips_and_counts(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus)
    consumer = bus.consume(raw, "s", mode="exclusive", exhausted="discard", retry=Retry(max_retries=1))
    async with world.running(consumer, always_failing) as running:
        await world.until(lambda: len(running.taken) == 6)
        await running.consumer.flush()
        assert world.cursor("s").next_offset == 5
    assert world.outcomes("s") == {"acked": [0, 2, 3, 4], "discarded": [1]}
    assert world.rows("s", "dead") == []


async def test_exhausted_retries_halt_stops_says_so_and_goes_on_when_resumed(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus)
    consumer = bus.consume(raw, "s", mode="exclusive", exhausted="halt", retry=Retry(max_retries=1), window=2)
    async with world.running(consumer, always_failing) as running:
        await world.until(lambda: running.consumer.trouble)
        assert running.consumer.trouble[0]["halted"] == "at offset 1: RuntimeError never"
        taken = len(running.taken)
        await publish_keyed(world, bus)
        await world.run(30)
        assert len(running.taken) == taken
        assert world.cursor("s").next_offset == 1
        running.handle = acked
        await bus.resume(raw, "s")
        await world.until(lambda: world.cursor("s").next_offset == 10)
        assert running.consumer.trouble == {}
        assert running.taken[taken][1:4] == (1, b"b", 1)
    assert world.outcomes("s") == {"acked": list(range(10))}


async def test_reject_is_a_dead_letter_at_once_whatever_the_policy(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus, "abc")

    async def rejecting(delivery: Any) -> None:
        await (delivery.reject("unreadable") if delivery.event.data == b"b" else delivery.ack())

    consumer = bus.consume(raw, "s", mode="exclusive", exhausted="halt")
    async with world.running(consumer, rejecting) as running:
        await world.until(lambda: world.cursor("s").next_offset == 3)
        assert running.attempts == [1, 1, 1]
        [row] = world.rows("s", "dead")
        assert (row.offset, row.attempts, row.error_message) == (1, 1, "unreadable")


# --- dead letters come back -------------------------------------------------------------------


async def test_a_replayed_dead_letter_comes_to_its_subscription_only_at_its_position_and_marked(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus, "abc")
    await world.publish(bus, *[b"x" * 500 for _ in range(40)])
    async with (
        world.running(bus.consume(raw, "s", mode="exclusive", retry=Retry(max_retries=0)), always_failing) as running,
        world.running(bus.consume(raw, "peer", mode="exclusive")) as peer,
    ):
        await world.until(lambda: len(running.taken) == len(peer.taken) == 43)
        await running.consumer.flush()
        await peer.consumer.flush()
        before = world.cursor("s")
        # The event itself is gone: a dead letter has a copy of its own.
        assert world.store.whole.log.trim(world.info().partitions[0], 40) > 1
        running.handle = acked
        assert world.replay("s") == 1
        await world.until(lambda: len(running.taken) == 44, within=1)
        assert running.taken[-1][:5] == (0, 1, b"b", 1, 1)
        await running.consumer.flush()
        await world.run(5)
        assert len(running.taken) == 44
        assert len(peer.taken) == 43
        after = world.cursor("s")
        assert (after.next_offset, after.generation) == (before.next_offset, before.generation)
        assert [row.state for row in world.rows("s")] == ["done"]
    records = world.records("s")
    assert [list(record.offsets("acked")) for record in records][-1:]
    assert world.outcomes("s")["dead"] == [1]
    assert 1 in world.outcomes("s")["acked"]


# --- the store does not take it ---------------------------------------------------------------


def without_parked(function: Hook, commits: Any) -> Any:
    """Refuse what would write a parked row, as a store does that is full of them."""
    return [StoreFull("parked rows") if commit.parked else function([commit])[0] for commit in commits]


async def test_a_dead_letter_that_the_store_refuses_is_neither_acked_nor_lost(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus)
    world.store.hooks["cursors.commit"] = without_parked
    consumer = bus.consume(raw, "s", mode="exclusive", retry=Retry(max_retries=0))
    async with world.running(consumer, always_failing) as running:
        await world.run(10)
        assert world.rows("s") == []
        assert world.cursor("s").next_offset <= 1
        assert "parked rows" in running.consumer.trouble[0]["commit"]
        world.store.heal()
        await world.until(lambda: world.cursor("s").next_offset == 5)
        assert [row.offset for row in world.rows("s", "dead")] == [1]
        assert running.consumer.trouble == {}
        await publish_keyed(world, bus, "z")
        await world.until(lambda: running.data[-1] == b"z", within=HEARTBEAT)
    assert world.outcomes("s") == {"acked": [0, 2, 3, 4, 5], "dead": [1]}


async def test_a_dead_letter_that_was_never_written_is_tried_again_after_a_kill(world: World) -> None:
    bus = world.bus()
    await publish_keyed(world, bus)
    world.store.hooks["cursors.commit"] = without_parked
    consumer = bus.consume(raw, "s", mode="exclusive", retry=Retry(max_retries=0), consumer_id="one")
    async with world.running(consumer, always_failing) as running:
        await world.run(5)
        await world.kill(bus, running)
    world.store.heal()
    async with world.running(world.bus().consume(raw, "s", mode="exclusive", consumer_id="one")) as running:
        await world.until(lambda: world.cursor("s").next_offset == 5)
        assert b"b" in running.data
    assert world.outcomes("s") == {"acked": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize("after", [False, True], ids=["not written", "written"])
async def test_a_commit_without_an_answer_reloads_the_shard_and_loses_nothing(world: World, after: bool) -> None:
    bus = world.bus()
    await bus.publish_batch(raw, [b"%d" % number for number in range(200)])

    async def failing_some(delivery: Any) -> None:
        if delivery.position.offset == 20 and not world.store.failed:
            world.store.fail("cursors.commit", OSError(5, "input/output error"), times=2, after=after)
        await delivery.ack()

    async with world.running(bus.consume(raw, "s", mode="exclusive"), failing_some) as running:
        await world.until(lambda: world.cursor("s").next_offset == 200)
        assert sorted(set(running.offsets)) == list(range(200))
        assert set(running.attempts) <= {1, 2}
        assert [row.state for row in world.rows("s")] == []
    assert world.outcomes("s") == {"acked": list(range(200))}


async def test_a_medium_that_fails_for_long_is_asked_at_growing_intervals(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1")
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: world.cursor("s").next_offset == 2)
        world.store.fail("cursors.commit", OSError(5, "input/output error"))
        await world.publish(bus, b"2")
        before = world.store.calls["cursors.commit"]
        await world.run(60)
        assert world.store.calls["cursors.commit"] - before < 25
        world.store.heal()
        await world.until(lambda: world.cursor("s").next_offset == 3, within=10)
        assert running.data[-1] == b"2"
    assert world.outcomes("s") == {"acked": [0, 1, 2]}


async def test_closing_while_the_store_fails_gives_up_in_time_and_is_not_clean(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1", b"2")
    async with world.running(bus.consume(raw, "s", mode="exclusive")) as running:
        await world.until(lambda: len(running.taken) == 3)
        await running.consumer.flush()
        world.store.fail("cursors.commit", StoreFull("nothing goes"))
        await world.publish(bus, b"3")
        await world.until(lambda: len(running.taken) == 4)
        begun = world.clock.monotonic()
        await world.done(running.consumer.close(), within=10)
        assert world.clock.monotonic() - begun <= 6
        assert world.lease_of("s") is None
    world.store.heal()
    async with world.running(world.bus().consume(raw, "s", mode="exclusive")) as running:
        [seat] = running.consumer._member.seats if running.consumer._member else []
        assert seat.lease is not None
        assert not seat.lease.clean
        await world.until(lambda: running.taken)
        assert running.data == [b"3"]
    assert world.outcomes("s") == {"acked": [0, 1, 2, 3]}


# --- an event that kills ----------------------------------------------------------------------


async def test_a_suspect_that_is_given_back_unharmed_is_not_blamed(world: World) -> None:
    bus = world.bus()
    await world.publish(bus, b"0", b"1")
    for _ in range(2):  # after which it is tried alone, and each attempt is counted first
        async with world.running(bus.consume(raw, "s", mode="exclusive", consumer_id="one"), kept) as running:
            await world.until(lambda: running.taken)
            await world.kill(bus, running)
        bus = world.bus()
    for _ in range(10):
        async with world.running(bus.consume(raw, "s", mode="exclusive", consumer_id="one"), kept) as running:
            await world.until(lambda: running.taken)
            assert running.taken[0][1:4] == (0, b"0", 1)
    async with world.running(bus.consume(raw, "s", mode="exclusive", consumer_id="one")) as running:
        await world.until(lambda: len(running.taken) == 2)
    assert world.rows("s") == []
    assert world.outcomes("s") == {"acked": [0, 1]}


@pytest.mark.parametrize(("poison", "keyed"), [(0, True), (37, False), (79, True)])
async def test_an_event_that_kills_its_process_each_time_ends_as_a_dead_letter(
    world: World, poison: int, keyed: bool
) -> None:
    bus = world.bus()
    for number in range(80):
        await bus.publish(raw, b"%d" % number, key=f"k{number % 7}" if keyed else None)
    handling = asyncio.Event()

    async def deadly(delivery: Any) -> None:
        if delivery.position.offset == poison:
            handling.set()
            await world.clock.pause(3600)  # the process is killed while it handles it
        await delivery.ack()

    deaths = 0
    while True:
        handling.clear()
        consumer = bus.consume(raw, "s", mode="exclusive", consumer_id="one")
        async with world.running(consumer, deadly) as running:
            await world.until(lambda: handling.is_set() or world.cursor("s").next_offset == 80)
            if not handling.is_set():
                break
            deaths += 1
            assert deaths < 10, "it is never over"
            await world.kill(bus, running)
        bus = world.bus()
    assert [(row.offset, row.error_type) for row in world.rows("s")] == [(poison, "ProcessDied")]
    assert deaths == 1 + 1 + 4  # unsuspected, in a group, and once for each attempt of its own
    outcomes = world.outcomes("s")
    assert outcomes["dead"] == [poison]
    assert outcomes["acked"] == [offset for offset in range(80) if offset != poison]
