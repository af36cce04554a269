"""What other processes do for this area, each a job of its own; see `bench.log.jobs`."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from penstock.cli.bench.delivery.consumers import consumers
from penstock.cli.bench.delivery.consuming import consume
from penstock.cli.bench.harness import sample
from penstock.cli.bench.log.events import Appender, a_store, a_topic, keyed_batch
from penstock.cli.bench.log.jobs import high_water_bytes, tell
from penstock.clock import SystemClock
from penstock.ports import Store

HEARTBEAT_SECONDS = 0.5


class CatchUp(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Consume the last few events of a log, all of it, and all without a ledger, in turn; say how long each took."""

    directory: str
    events: int
    few: int
    rounds: int

    def run(self) -> None:
        """Do it."""
        told: dict[str, list[float]] = {"near": [], "behind": [], "unrecorded": []}
        with a_store(Path(self.directory)) as store, asyncio.Runner() as runner:
            near = self.events - self.few
            runner.run(consume(store, self.few, start=near))  # to warm up
            for _ in range(self.rounds):
                told["near"].append(runner.run(consume(store, self.few, start=near)))
                told["behind"].append(runner.run(consume(store, self.events)))
                told["unrecorded"].append(runner.run(consume(store, self.events, ledger=False)))
        tell(told | {"memory": high_water_bytes()})


class Idle(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Begin many subscriptions, all at once, and keep them; say what they cost."""

    directory: str
    subscriptions: int
    topics: int
    passes: int
    seconds: float

    def run(self) -> None:
        """Do it."""
        with a_store(Path(self.directory)) as store:
            topics = [f"topic-{number}" for number in range(self.topics)]
            appender = Appender(store, keyed_batch(1))
            for topic in topics:
                appender.append(a_topic(store, name=topic).partitions[0])
            asyncio.run(self._run(store, topics))

    async def _run(self, store: Store, topics: list[str]) -> None:
        async with consumers(store, topics) as made, AsyncExitStack() as stack:
            everyone = [
                made.consumer(
                    f"s{number}",
                    topic=topics[number % len(topics)],
                    start="latest",
                    changes={"heartbeat_seconds": HEARTBEAT_SECONDS},
                )
                for number in range(self.subscriptions)
            ]
            gc.collect()
            memory = _resident_bytes()
            began = time.perf_counter()
            await asyncio.gather(*(stack.enter_async_context(consumer) for consumer in everyone))
            start = time.perf_counter() - began
            gc.collect()
            memory = _resident_bytes() - memory
            await asyncio.sleep(2 * HEARTBEAT_SECONDS)  # what beginning has left to do is done by then
            began, busy = time.perf_counter(), time.process_time()
            await asyncio.sleep(self.seconds)
            busy = (time.process_time() - busy) / (time.perf_counter() - began)
            monitor = (await made.dispatcher()).monitor
            now = SystemClock().monotonic()
            times = iter(range(1, self.passes + 1))
            # Each time one heartbeat later, so that all of them are due.
            [passes] = sample([lambda: monitor.look(now + next(times) * HEARTBEAT_SECONDS)], self.passes)
            tell({"start": start, "memory": memory, "busy": busy, "passes": passes})


def _resident_bytes() -> int:
    """Return how much memory this process has now."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # only Linux has this file
        return high_water_bytes()
    return pages * 4096


Job = CatchUp | Idle
