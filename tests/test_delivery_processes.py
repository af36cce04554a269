"""Delivery among real processes that are killed, frozen and woken up again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.deliveries import records_of
from tests.delivery_children import NAME, PATIENCE_SECONDS, Consuming, settings_of, topic

from penstock import Batch, Bus
from penstock.errors import WriterStalled
from penstock.offsets import RangeSet
from penstock.rows import ParkedFilter, Shard
from penstock.stores import open_store
from penstock.testing.checker import check
from penstock.testing.journal import Journal, Outcome

Start = Callable[..., Consuming]

PARTITIONS = 2


class Scene:
    """A store in a directory, consumers in other processes, and a journal of what happens."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.journal = Journal()
        self.log = ""
        self._children: list[Consuming] = []

    def bus(self, lease_seconds: float = 60.0) -> Bus:
        return Bus(settings=settings_of(self.root, lease_seconds), topics=[topic])

    async def publish(self, count: int, first: int = 0, *, keys: int = 7) -> None:
        """Publish so many events over a few keys."""
        async with self.bus() as bus:
            if not self.log:
                self.log = (await bus._directory.info(topic.name)).log_id
            for number in range(first, first + count):
                payload, key = b"%d" % number, f"k{number % keys}"
                receipt = await bus.publish(topic, payload, key=key)
                [(partition, offsets)] = receipt.offsets.items()
                assert offsets is not None
                self.journal.published(
                    self.log, partition, [payload], Outcome.OK, offset=offsets.start, keys=[key.encode()]
                )

    def start(self, **options: Any) -> Consuming:
        self._children.append(Consuming(self.root, self.journal, self.log, **options))
        return self._children[-1]

    async def freeze(self, child: Consuming) -> None:
        """Stop a process, but not while it has the turn to write: nobody else could write then, and would say so."""
        while True:
            child.signal(signal.SIGSTOP)
            try:
                await asyncio.to_thread(self._write)
            except WriterStalled:
                child.signal(signal.SIGCONT)
                # Stopped again at once, it would have the turn still: on a busy machine twenty times in a row.
                await asyncio.to_thread(self._write)
            else:
                return

    def _write(self) -> None:
        with closing(open_store(f"file:{self.root}", settings=settings_of(self.root, 60.0))) as store:
            lease = store.leases.acquire("written", "the test", 60.0)
            assert lease is not None
            store.leases.release(lease)

    def dispose(self) -> None:
        for child in self._children:
            child.dispose()

    async def drained(self, *children: Consuming) -> bool:
        """Wait until nothing is left of the subscription; False if one of these processes has ended before."""
        end = time.monotonic() + PATIENCE_SECONDS
        async with self.bus() as bus:
            while any(lag.lag for lag in await bus.lag(topic, NAME)):
                if any(child.facts("ended") for child in children):
                    return False
                assert time.monotonic() < end, "it is never over"
                await asyncio.sleep(0.05)
        return True

    def outcomes(self) -> dict[str, int]:
        """Return how many events had which outcome, once it is seen that each has exactly one, and that all chain."""
        found: dict[str, int] = defaultdict(int)
        with closing(open_store(f"file:{self.root}", settings=settings_of(self.root, 60.0))) as store:
            for partition in range(PARTITIONS):
                settled = RangeSet()
                for record in records_of(store, Shard(self.log, NAME, 0, partition)):
                    for outcome in record.outcomes:
                        offsets = record.offsets(outcome)
                        assert not settled & offsets
                        settled |= offsets
                        found[outcome] += sum(map(len, offsets))
        return dict(found)

    def dead(self) -> list[tuple[bytes, str, int]]:
        """Return payload, error and attempts of every dead letter."""
        with closing(open_store(f"file:{self.root}", settings=settings_of(self.root, 60.0))) as store:
            rows = store.parked.page(ParkedFilter(log_id=self.log, subscription=NAME), limit=1000)
            return [(row.event.data, row.error_type, row.attempts) for row in rows if row.state == "dead"]

    def verdict(self) -> list[Any]:
        """Return every violation of what is promised."""
        with closing(open_store(f"file:{self.root}", settings=settings_of(self.root, 60.0))) as store:
            [info] = [info for info in store.log.topics() if info.name == topic.name]
            for partition in info.partitions:
                bounds = store.log.bounds(partition)
                self.journal.bounds(self.log, partition.number, bounds.start, bounds.stop)
                for item in store.log.read(partition, 0, bytes_max=1 << 30):
                    assert isinstance(item, Batch)
                    self.journal.stored(self.log, partition.number, item.start, [event.data for event in item])
                # A process may be killed after a commit and before it could tell of it.
                for record in records_of(store, Shard(self.log, NAME, 0, partition.number)):
                    for span in record.offsets("acked"):
                        self.journal.settled(NAME, self.log, partition.number, span.start, span.stop, "acked")
        return check(self.journal)


@pytest.fixture
def scene(root: Path) -> Iterator[Scene]:
    made = Scene(root)
    yield made
    made.dispose()


async def test_a_second_exclusive_process_is_refused_and_told_who_has_it_until_that_one_is_killed(scene: Scene) -> None:
    await scene.publish(10)
    first = scene.start(mode="exclusive", consumer_id="first-of-all")
    await first.hears("ready")
    second = scene.start(mode="exclusive")
    [busy] = await second.hears("busy")
    assert "first-of-all" in busy["text"]
    await first.hears("settled", 10)
    await first.killed()
    await scene.publish(5, 10)
    # The dead one's lease would last for a minute.
    third = scene.start(mode="exclusive")
    await third.hears("settled", 5)
    assert await third.end() == 0
    assert scene.outcomes() == {"acked": 15}
    assert scene.verdict() == []


async def test_the_same_consumer_id_takes_over_from_its_frozen_ghost_which_is_told_when_it_wakes(scene: Scene) -> None:
    await scene.publish(20)
    ghost = scene.start(mode="exclusive", consumer_id="worker-1", hold=True)
    held = await ghost.hears("delivered")
    await scene.freeze(ghost)
    successor = scene.start(mode="exclusive", consumer_id="worker-1")
    await successor.hears("ready")
    assert await scene.drained(successor)
    ghost.journal = None  # what it had fetched before, it may handle before it learns that it was replaced
    ghost.signal(signal.SIGCONT)
    ghost.tell("go")
    stale, *_ = await ghost.hears("stale")  # and of what it had fetched besides, perhaps
    assert (stale["partition"], stale["offset"]) == (held[0]["partition"], held[0]["offset"])
    await ghost.hears("replaced")
    await ghost.hears("ended")
    assert await successor.end() == 0
    assert scene.outcomes() == {"acked": 20}
    assert scene.verdict() == []


async def test_failover_after_a_kill_goes_on_from_the_last_settled_offset(scene: Scene) -> None:
    await scene.publish(60)
    active = scene.start(mode="failover", hold=True)
    [ready] = await active.hears("ready")
    assert ready["active"] == [0, 1]
    standby = scene.start(mode="failover")
    [ready] = await standby.hears("ready")
    assert ready["active"] == []
    active.tell("go")
    await active.hears("settled", 20)
    await active.killed()
    begun = time.monotonic()
    at = len(active.facts("settled"))
    await standby.hears("delivered")
    print(f"\ntakeover after a kill: {time.monotonic() - begun:.2f} s")  # noqa: T201 - a figure for people
    assert await scene.drained(standby)
    # One may have been settled and not told of, or handed over and not settled.
    assert abs(len(standby.facts("delivered")) - (60 - at)) <= 1
    assert {fact["attempt"] for fact in standby.facts("delivered")} == {1}
    assert await standby.end() == 0
    assert scene.outcomes() == {"acked": 60}
    assert scene.verdict() == []


async def test_a_frozen_process_is_replaced_within_two_leases_and_refused_when_it_wakes(scene: Scene) -> None:
    await scene.publish(60)
    frozen = scene.start(mode="failover", lease_seconds=1.0, hold=True)
    held = await frozen.hears("delivered")
    standby = scene.start(mode="failover", lease_seconds=1.0)
    await standby.hears("ready")
    await scene.freeze(frozen)
    begun = time.monotonic()
    await standby.hears("delivered")
    print(f"\ntakeover after a freeze, with a lease of 1 s: {time.monotonic() - begun:.2f} s")  # noqa: T201 - a figure for people
    assert await scene.drained(standby)
    frozen.journal = None  # the same
    frozen.tell("go")
    frozen.signal(signal.SIGCONT)
    stale = await frozen.hears("stale")
    assert (stale[0]["partition"], stale[0]["offset"]) == (held[0]["partition"], held[0]["offset"])
    assert frozen.facts("settled") == []
    # It stands by now, and takes over in its turn.
    await standby.killed()
    frozen.journal = scene.journal
    await scene.publish(10, 60)
    assert await scene.drained(frozen)
    assert len(frozen.facts("settled")) >= 1
    assert await frozen.end() == 0
    assert scene.outcomes() == {"acked": 70}
    assert scene.verdict() == []


async def test_consumers_that_are_killed_at_any_moment_lose_nothing_and_repeat_nothing_that_was_settled(
    scene: Scene,
) -> None:
    await scene.publish(120)
    children = []
    for life in range(4):
        child = scene.start(mode="exclusive", consumer_id="worker")
        children.append(child)
        if life < 3:
            await child.until(lambda: len(child.facts("settled")) >= 7 * (life + 1))  # noqa: B023 - used at once
            await child.killed()
    assert await scene.drained(children[-1])
    assert await children[-1].end() == 0
    assert scene.outcomes() == {"acked": 120}
    assert scene.dead() == []
    assert scene.verdict() == []


async def test_an_event_that_kills_its_process_each_time_is_a_dead_letter_and_the_rest_flows(scene: Scene) -> None:
    await scene.publish(40)
    deaths = 0
    while True:
        child = scene.start(mode="exclusive", consumer_id="worker", deadly="17")
        await child.hears("ready")
        if await scene.drained(child):
            break
        deaths += 1
        assert deaths < 10, "it is never over"
    assert await child.end() == 0
    assert scene.dead() == [(b"17", "ProcessDied", 4)]
    assert scene.outcomes() == {"acked": 39, "dead": 1}
    assert deaths == 6
