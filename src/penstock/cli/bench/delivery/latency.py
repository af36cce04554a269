"""How long an event takes from just before `publish` to its consumer, durably and under load; told, and not told.

The unit is a bare sync of an event's bytes in the same run, which the rounds under load alternate with.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.batch import Batch
from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.cli.bench.batch import KEYS, PAYLOADS
from penstock.cli.bench.delivery.consumers import consumers
from penstock.cli.bench.delivery.sizes import Sizes
from penstock.cli.bench.harness import Figure, percentile, sample
from penstock.cli.bench.log.bare import BareFile
from penstock.cli.bench.log.events import TOPIC, a_store, stored_bytes
from penstock.engine.policy import HEARTBEATS
from penstock.errors import PenstockError
from penstock.ports import Notifier, Store
from penstock.rows import Partition
from penstock.settings import Settings

PROFILE = "high_priority"
PATIENCE_SECONDS = 30.0
_TOPIC = Topic(TOPIC, bytes)
_TIME = struct.Struct("d")
_REST = PAYLOADS[0][_TIME.size :]


def figures(directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure latency."""
    with closing(BareFile(directory / "bare")) as bare, asyncio.Runner() as runner:
        parts = stored_bytes(Batch.build(PAYLOADS[:1]))
        with a_store(directory / "notified") as store:
            yield from _notified(store, runner, sizes, rounds, lambda: bare.write(parts))
    with a_store(directory / "dropped") as store, asyncio.Runner() as runner:
        yield runner.run(_dropped(without_notifications(store), sizes))


def _notified(
    store: Store, runner: asyncio.Runner, sizes: Sizes, rounds: int, sync: Callable[[], None]
) -> Iterator[Figure]:
    bare: list[float] = []
    waits: list[float] = []
    polls = fallbacks = 0
    for _ in range(max(min(rounds, sizes.load_rounds), 1)):
        bare += sample([sync], sizes.bare_syncs)[0]
        load = runner.run(
            under_load(
                store,
                tasks=sizes.tasks,
                per_second=sizes.events_per_second,
                seconds=sizes.load_seconds,
                heartbeat="normal",
            )
        )
        waits += load.waits
        polls += load.polls
        fallbacks += load.fallbacks
    unit = percentile(bare, 50)
    yield Figure.of("latency.notified.p50", percentile(waits, 50) / unit, "syncs", goal="value <= 6 syncs")
    yield Figure.of("latency.notified.p99", percentile(waits, 99) / unit, "syncs", goal="value <= 20 syncs")
    yield Figure.of("latency.fallback", fallbacks / max(polls, 1) * 100, "%", goal="value <= 1 %")


async def _dropped(store: Store, sizes: Sizes) -> Figure:
    load = await under_load(
        store,
        tasks=sizes.tasks,
        per_second=sizes.dropped_per_second,
        seconds=sizes.dropped_seconds,
        heartbeat=PROFILE,
    )
    longest = HEARTBEATS[PROFILE] * 1e3 + 50
    wait = percentile(load.waits, 99) * 1e3
    return Figure.of("latency.dropped.p99", wait, "ms", goal=f"value <= {longest:g} ms")


class Load(NamedTuple):
    """What became of the events of a round."""

    waits: list[float]
    polls: int
    """How often the consumer was woken, by a notification or a heartbeat."""
    fallbacks: int
    """How often of these a heartbeat found what no notification had told."""


async def under_load(store: Store, *, tasks: int, per_second: int, seconds: float, heartbeat: str) -> Load:
    """Publish events at a pace, one by one from many tasks, and consume them one by one; none may be lost."""
    each = max(round(per_second * seconds / tasks), 1)
    waits: list[float] = []
    name, changes = f"s{time.time_ns()}", {"heartbeat_seconds": HEARTBEATS[heartbeat]}
    async with (
        Bus(topics=[_TOPIC], settings=Settings(), store=store) as bus,
        consumers(store) as made,
        made.consumer(name, start="latest", changes=changes) as consumer,
    ):
        # Well under way before it begins, so that all tasks keep to one pace from the first event on.
        begin = time.perf_counter() + 0.1

        async def publish(number: int) -> None:
            for index in range(each):
                due = begin + (index + number / tasks) * tasks / per_second
                await asyncio.sleep(max(due - time.perf_counter(), 0.0))
                key = KEYS[(index * tasks + number) % len(KEYS)]
                await bus.publish(_TOPIC, _TIME.pack(time.perf_counter()) + _REST, key=key)

        async def take() -> None:
            async for delivery in consumer:
                waits.append(time.perf_counter() - _TIME.unpack_from(delivery.event.data)[0])
                await delivery.ack()
                if len(waits) == each * tasks:
                    break

        taking = asyncio.ensure_future(take())
        await asyncio.gather(*(publish(number) for number in range(tasks)))
        done, _ = await asyncio.wait([taking], timeout=PATIENCE_SECONDS)
        counts = (await made.dispatcher()).monitor.counts
        if not done:
            taking.cancel()
            raise PenstockError(f"{each * tasks - len(waits):,} of {each * tasks:,} events did not come")
        taking.result()
        polls = counts.dispatcher_notifier_polls_total + counts.dispatcher_heartbeat_polls_total
        return Load(waits, polls, counts.subscription_fallback_polls_total)


def without_notifications(store: Store) -> Store:
    """Return a store of which no notification ever arrives."""
    return cast("Store", _Deaf(store))


class _Deaf:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.notifier: Notifier = _Silent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Silent:
    """A notifier that never calls back."""

    def notify(self, partition: Partition) -> None:
        """Tell nobody."""

    def listen(self, callback: Callable[[Partition], None]) -> Callable[[], None]:
        """Listen in vain."""
        return lambda: None
