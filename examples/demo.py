"""Eight processes publish a million events to one directory, two of them are killed, and nothing acknowledged is lost.

Each process holds a bus of its own on the same `file:` store. What a process was told is stored, it tells the parent,
which keeps a journal outside of the store. In the middle two processes are killed with SIGKILL, and new ones take their
place. In the end the log is opened anew, every byte of it is verified, and every acknowledged event is looked for at
the very offset that its publisher was given.

Then two processes share a subscription: one is given the events, the other stands by. The first one is killed in the
middle, and the second goes on where the first one's progress was written. Every event is delivered; those that were in
the first one's hands, twice.

At last Spark reads the same events as a stream, counts them by key, and writes the counts to a second topic, exactly
once. What that topic says is compared with the log.

    python examples/demo.py [events]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import penstock.spark
from penstock import Bus, Topic
from penstock.batch import Batch
from penstock.stores.file.platform import Platform
from penstock.stores.file.verify import verify

PROCESSES = 8
BATCH = 500
KILLED = (2, 5)
orders = Topic("orders", bytes, key=lambda payload: payload[-3:], partitions=4)
counts = Topic("counts", bytes, partitions=2)

Acknowledged = dict[int, tuple[int, int]]
"""Per partition, the first offset and the one after the last."""


# --- a publishing process ---------------------------------------------------------------------


def payloads(batch: int) -> list[bytes]:
    """Return the events of a batch; each says which batch it is of."""
    return [b"%08d/%03d" % (batch, number) for number in range(BATCH)]


def publish(url: str, batches: range, report: Connection) -> None:
    """Publish batches, and report each as soon as it is acknowledged."""

    async def run() -> None:
        async with Bus(url, topics=[orders]) as bus:
            for batch in batches:
                receipt = await bus.publish_batch(orders, payloads(batch))
                offsets = {index: (span.start, span.stop) for index, span in receipt.offsets.items() if span}
                report.send((batch, offsets))

    asyncio.run(run())


# --- the parent -------------------------------------------------------------------------------


@dataclass
class Worker:
    """One publishing process, and where it has got."""

    process: BaseProcess
    reports: Connection
    batches: range
    acknowledged: int = 0


@dataclass
class Demo:
    """Starts processes, kills some, and keeps the journal."""

    url: str
    total: int
    journal: dict[int, Acknowledged] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)
    context: multiprocessing.context.SpawnContext = field(default_factory=lambda: multiprocessing.get_context("spawn"))

    def run(self) -> None:
        """Publish everything."""
        batches = self.total // BATCH
        workers = [self.start(range(number, batches, PROCESSES)) for number in range(PROCESSES)]
        try:
            while workers:
                ready = wait([worker.reports for worker in workers], timeout=60)
                if not ready:
                    raise SystemExit("no process has reported for a minute")
                for worker in [worker for worker in workers if worker.reports in ready]:
                    self.listen(worker, workers)
                if not self.killed and len(self.journal) * 3 > batches:
                    self.kill(workers)
        finally:
            for worker in workers:
                worker.process.kill()
        show(len(self.journal) * BATCH, self.total, end="\n")

    def start(self, batches: range) -> Worker:
        """Start a process that publishes these batches."""
        reports, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=publish, args=(self.url, batches, sender))
        process.start()
        sender.close()
        return Worker(process, reports, batches)

    def listen(self, worker: Worker, workers: list[Worker]) -> None:
        """Note what a process has reported, or that it has ended."""
        try:
            batch, offsets = worker.reports.recv()
        except EOFError:
            worker.process.join()
            workers.remove(worker)
            self.replace(worker, workers)
            return
        self.journal[batch] = offsets
        worker.acknowledged += 1
        show(len(self.journal) * BATCH, self.total)

    def replace(self, worker: Worker, workers: list[Worker]) -> None:
        """Let a new process go on for a killed one. What that one had under way is unknown, and left alone here."""
        remaining = worker.batches[worker.acknowledged + 1 :]
        if worker.process.pid in self.killed and remaining:
            workers.append(self.start(remaining))
        elif worker.acknowledged < len(worker.batches) and worker.process.pid not in self.killed:
            raise SystemExit(f"process {worker.process.pid} ended with {worker.process.exitcode}")

    def kill(self, workers: list[Worker]) -> None:
        """Kill two of them, whatever they are doing."""
        for number in KILLED:
            process = workers[number].process
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            self.killed.append(process.pid)
        say(f"\n  SIGKILL to processes {self.killed[0]} and {self.killed[1]}")


# --- looking at the result ----------------------------------------------------------------------


async def stored_batches(url: str) -> dict[int, list[int]]:
    """Return, per partition, the batch of the event at each offset."""
    found: dict[int, list[int]] = {index: [] for index in range(orders.settings.partitions)}
    async with Bus(url, topics=[orders]) as bus:
        async for batch in bus.read_batches(orders):
            assert isinstance(batch, Batch), f"something is lost: {batch}"
            assert batch.place is not None
            of_partition = found[batch.place.partition]
            assert batch.start == len(of_partition), "the offsets are not dense"
            of_partition += [int(data[:8]) for data in batch.columns.column("data").to_pylist()]
    return found


def check(journal: dict[int, Acknowledged], stored: dict[int, list[int]], total: int) -> None:
    """Show that every acknowledged event is where its publisher was told."""
    missing = [
        batch
        for batch, offsets in journal.items()
        if any(stored[index][start:stop] != [batch] * (stop - start) for index, (start, stop) in offsets.items())
    ]
    assert not missing, f"LOST: batches {missing}"
    parts = [batch for index in stored for batch, _ in groupby(stored[index])]
    assert len(parts) == len({(index, batch) for index in stored for batch, _ in groupby(stored[index])}), "doubled"
    acknowledged = len(journal) * BATCH
    there = sum(map(len, stored.values()))
    say(f"  {acknowledged:,} events were acknowledged, and every one of them is at its offset")
    under_way = total - acknowledged
    say(f"  {under_way:,} were under way in the killed processes: {there - acknowledged:,} of them are stored")


# --- delivering them ----------------------------------------------------------------------------


def consume(url: str, name: str, report: Connection) -> None:
    """Consume batches until killed or told to end, and report each before it is acknowledged."""

    async def run() -> None:
        async with Bus(url, topics=[orders]) as bus, bus.consume(orders, "billing", mode="failover") as consumer:
            report.send((name, None, []))
            async for batch in consumer.batches():
                report.send((name, batch.partition, batch.offsets.tolist()))
                await batch.ack()
                if report.poll():
                    return

    asyncio.run(run())


@dataclass
class Delivery:
    """Starts two consumers, kills the one that is given the events, and counts what both were given."""

    url: str
    expected: dict[int, int]
    """How many events each partition has."""
    delivered: Counter[tuple[int, int]] = field(default_factory=Counter)
    killed_at: float = 0.0
    gap_seconds: float = 0.0

    def run(self) -> None:
        """Deliver everything."""
        total = sum(self.expected.values())
        context = multiprocessing.get_context("spawn")
        processes, pipes = {}, {}
        for name in ("first", "standby"):
            mine, theirs = context.Pipe()
            processes[name] = context.Process(target=consume, args=(self.url, name, theirs))
            processes[name].start()
            theirs.close()
            pipes[name] = mine
            assert mine.poll(60), "a consumer has not begun within a minute"
            mine.recv()
        try:
            while len(self.delivered) < total:
                ready = wait(list(pipes.values()), timeout=60)
                if not ready:
                    raise SystemExit("no event was delivered for a minute")
                for pipe in [pipe for pipe in pipes.values() if pipe in ready]:
                    self.listen(pipe, pipes)
                if not self.killed_at and len(self.delivered) * 3 > total:
                    processes["first"].kill()
                    self.killed_at = time.monotonic()
                    say(f"  SIGKILL to the consumer, process {processes['first'].pid}")
            for pipe in pipes.values():
                pipe.send("end")
        finally:
            for process in processes.values():
                process.kill()
                process.join()

    def listen(self, pipe: Connection, pipes: dict[str, Connection]) -> None:
        """Count what a consumer was given, or note that it is dead."""
        try:
            name, partition, offsets = pipe.recv()
        except (EOFError, ConnectionResetError):
            del pipes["first"]
            return
        if name == "standby" and not self.gap_seconds:
            self.gap_seconds = time.monotonic() - self.killed_at
        self.delivered.update((partition, offset) for offset in offsets)

    def tell(self) -> None:
        """Say what was delivered, and what was not."""
        lost = sum(self.expected.values()) - len(self.delivered)
        twice = sum(count > 1 for count in self.delivered.values())
        assert lost == 0, f"LOST: {lost}"
        say(f"  {len(self.delivered):,} events were delivered, lost 0, delivered twice {twice:,}")
        say(f"  the consumer that stood by went on after {self.gap_seconds * 1000:,.0f} ms")


# --- the same events in Spark -------------------------------------------------------------------


async def create(url: str) -> None:
    """Make the topic of counts: opening a bus that declares it is enough."""
    async with Bus(url, topics=[counts]):
        pass


def count_in_spark(url: str, checkpoint: Path) -> None:
    """Count the events by key in a streaming query, and write all counts to the topic `counts` with every batch."""
    spark = penstock.spark.session(app_name="penstock-demo")
    try:
        events = penstock.spark.stream(spark, url, orders, subscription="counting", maxRowsPerTrigger=400_000)
        found = events.groupBy("key").count().selectExpr("key", "cast(count as string) as data")
        query = (
            found.writeStream.format("penstock")
            .outputMode("complete")
            .options(url=url, topic=counts.name, sinkName="counting", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        batches = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
        say(f"  Spark has read {sum(batches):,} events in {len(batches)} batches and counted them by key")
    finally:
        spark.stop()


async def check_counts(url: str) -> None:
    """Show that the last count of every key is what the log says."""
    found: dict[bytes | None, int] = {}
    expected: Counter[bytes | None] = Counter()
    async with Bus(url, topics=[orders, counts]) as bus:
        async for batch in bus.read_batches(orders):
            assert isinstance(batch, Batch)
            expected.update(batch.columns.column("key").to_pylist())
        async for event in bus.read(counts):
            found[event.key] = int(event.data)  # a later batch counts more: the last one stays
    assert found == expected, "the counts differ from the log"
    say(f"  the counts of {len(found):,} keys, {sum(found.values()):,} events, equal the log")


def main(total: int) -> None:
    """Run the demonstration in a directory of its own, which is removed afterwards."""
    root = Path("penstock-data") / f"demo-{os.getpid()}"
    store = root / "store"
    url = f"file:{store}"
    total = max(total // (BATCH * PROCESSES), 10) * BATCH * PROCESSES
    say(f"{PROCESSES} processes publish {total:,} events to {url}")
    try:
        began = time.monotonic()
        demo = Demo(url, total)
        demo.run()
        say(f"  {len(demo.journal) * BATCH / (time.monotonic() - began):,.0f} durable events/s, starting included")
        report = verify(store, Platform())
        size = sum(partition.bytes for topic in report.topics for partition in topic.partitions)
        assert report.ok, report.damages
        say(f"  opened anew and verified: {size / 1e6:,.0f} MB, no damage")
        stored = asyncio.run(stored_batches(url))
        check(demo.journal, stored, total)
        delivery = Delivery(url, {index: len(batches) for index, batches in stored.items()})
        delivery.run()
        delivery.tell()
        asyncio.run(create(url))
        count_in_spark(url, root / "checkpoint")
        asyncio.run(check_counts(url))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def show(done: int, total: int, end: str = "") -> None:
    """Draw the progress, on a terminal only."""
    if sys.stdout.isatty():
        filled = 40 * done // total
        print(f"\r  [{'#' * filled}{'.' * (40 - filled)}] {done:>9,} acknowledged", end=end, flush=True)


def say(text: str) -> None:
    """Tell the person who watches."""
    print(text, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
