"""The order shop under fire: processes are killed, notifications get lost, a mail server is away, an order is poisoned.

Four processes place orders, five run the three services of `examples/shop.py`. In the middle a producer and a service
are killed with SIGKILL, and others take their place. An order that inventory cannot handle becomes a dead letter;
somebody repairs inventory, and the order is replayed. In the end every order that was acknowledged to its producer must
have reached each of the three services, and the demonstration says how many did, how many did twice, and how long it
took.

Then Spark reads the same orders as a stream, counts them by customer, and writes the counts to a second topic, exactly
once; archives them to a Parquet lake; makes a table of what each customer has spent; and audits what was delivered,
event by event. Each result is compared with what it was made of. The report of the audit stays, for a browser.

    python -m examples.demo [orders]
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
from multiprocessing.process import BaseProcess
from pathlib import Path

from examples.shop import FIXED, UNHEARD_OF, Journal, OrderPlaced, lines_of, orders, service, some_order
from examples.spark_counts import check_counts, count_in_spark
from examples.spark_pipelines import archive, audit, project

import penstock.spark
from penstock import Bus
from penstock.stores.file.platform import Platform
from penstock.stores.file.verify import verify

PRODUCERS = 4
SERVICES = ("billing", "mail", "mail", "inventory", "inventory")
SUBSCRIPTIONS = ("billing", "mail", "inventory")
ORDERS_A_SECOND = 400
"""That each producer places: fast enough to keep everybody busy, slow enough for latencies to mean something."""
PATIENCE_SECONDS = 120.0


# --- the processes ----------------------------------------------------------------------------


def produce(url: str, directory: str, numbers: range, poison: int) -> None:
    """Place orders at a steady pace, and note each one that was acknowledged."""
    begun = Journal(Path(directory) / f"begun-{os.getpid()}.journal")
    journal = Journal(Path(directory) / f"placed-{os.getpid()}.journal")

    async def place(bus: Bus, number: int) -> None:
        begun.write(number)
        order = some_order(number)
        if number == poison:
            order = OrderPlaced(order.number, order.customer, UNHEARD_OF, order.placed_at)
        await bus.publish(orders, order)
        journal.write(number)

    async def run() -> None:
        bus = Bus(url, topics=[orders])
        await bus.open()
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for at, number in enumerate(numbers):
                tasks.create_task(place(bus, number))
                ahead = at / ORDERS_A_SECOND - (time.monotonic() - began)
                if ahead > 0.001:
                    await asyncio.sleep(ahead)
        await bus.close()

    asyncio.run(run())


def serve(name: str, url: str, directory: str) -> None:
    """Run a service until it is told to end."""
    asyncio.run(service(name, url, Path(directory)).run())


# --- the demonstration ------------------------------------------------------------------------


@dataclass
class Shop:
    """Starts processes, kills some, and looks at their journals."""

    url: str
    directory: Path
    total: int
    producers: dict[BaseProcess, range] = field(default_factory=dict)
    services: dict[BaseProcess, str] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    context: multiprocessing.context.SpawnContext = field(default_factory=lambda: multiprocessing.get_context("spawn"))

    @property
    def poison(self) -> int:
        """The number of the poisoned order: of the last producer, since the first may be killed before it is stored."""
        return self.total - self.total // 7

    def open(self) -> None:
        """Start everybody."""
        for name in SERVICES:
            self.serve(name)
        share = self.total // PRODUCERS
        for number in range(PRODUCERS):
            self.produce(range(number * share, (number + 1) * share))

    def serve(self, name: str) -> None:
        """Start a process of a service."""
        process = self.context.Process(target=serve, args=(name, self.url, str(self.directory)))
        process.start()
        self.services[process] = name

    def produce(self, numbers: range) -> None:
        """Start a process that places these orders."""
        process = self.context.Process(target=produce, args=(self.url, str(self.directory), numbers, self.poison))
        process.start()
        self.producers[process] = numbers

    def placed(self) -> set[int]:
        """Return the orders that were acknowledged to their producers."""
        return {int(words[0]) for words in lines_of(self.directory, "placed")}

    def done(self, name: str) -> Counter[int]:
        """Return how often a service has done each order."""
        return Counter(int(words[0]) for words in lines_of(self.directory, name))

    def run(self) -> None:
        """Place all orders, with two deaths on the way."""
        while any(process.is_alive() for process in self.producers):
            count = len(self.placed())
            show(count, self.total)
            if not self.killed and count * 3 > self.total:
                self.kill()
            time.sleep(0.1)
        show(len(self.placed()), self.total, end="\n")
        for process in self.producers:
            if process.exitcode not in {0, -signal.SIGKILL}:
                raise SystemExit(f"a producer ended with {process.exitcode}")

    def kill(self) -> None:
        """Kill a producer and a service, whatever they are doing, and let others take their place."""
        producer, numbers = next(iter(self.producers.items()))
        consumer = next(process for process, name in self.services.items() if name == "inventory")
        for what, process in (("a producer", producer), ("an inventory", consumer)):
            process.kill()
            process.join()
            self.killed.append(f"{what}, process {process.pid}")
        say(f"\n  SIGKILL to {' and to '.join(self.killed)}")
        # What the producer had under way is unknown, and left alone here: another one goes on behind it.
        begun = (int(words[0]) for words in lines_of(self.directory, "begun"))
        last = max((number for number in begun if number in numbers), default=numbers.start - 1)
        self.produce(range(last + 1, numbers.stop))
        del self.services[consumer]
        self.serve("inventory")

    def settle(self, *but: int) -> None:
        """Wait until every service has done every order that was acknowledged, but for some."""
        wanted = self.placed() - set(but)
        self.wait(lambda: all(wanted <= set(self.done(name)) for name in SUBSCRIPTIONS), "an order is LOST")

    def wait(self, condition: object, complaint: str) -> None:
        """Wait for something that must happen."""
        end = time.monotonic() + PATIENCE_SECONDS
        assert callable(condition)
        while not condition():
            if time.monotonic() > end:
                raise SystemExit(complaint)
            time.sleep(0.05)

    async def replay(self) -> int:
        """Find the dead letter, let somebody repair inventory, and replay it; returns how many there were."""
        bus = Bus(self.url, topics=[orders])
        while not await bus.dead_letters.count(orders, "inventory"):  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)
        for group in await bus.dead_letters.groups(orders, "inventory"):
            say(f"  {group.count} dead letter of inventory: {group.error_type} {group.message}, at {group.sample}")
        (self.directory / FIXED).touch()
        replayed = await bus.dead_letters.replay(orders, "inventory")
        say(f"  inventory is repaired, and {replayed.replayed} dead letter replayed")
        await bus.close()
        return replayed.replayed

    def examine(self, root: Path) -> None:
        """Look at all of it with Spark; ends with an error if anything is lost."""
        report = root.parent / "audit.html"
        spark = penstock.spark.session(app_name="penstock-demo")
        try:
            count_in_spark(spark, self.url, root / "checkpoint", say)
            asyncio.run(check_counts(self.url, say))
            archive(spark, self.url, root / "lake", say)
            project(spark, self.url, root / "tables", asyncio.run(self.ordered()), say)
            nothing_lost = audit(spark, self.url, report, say)
        finally:
            spark.stop()
        if not nothing_lost:
            raise SystemExit("LOST: the report says which")

    async def ordered(self) -> list[str]:
        """Return what was ordered, of every order in the log: also if its producer was killed before it was told."""
        bus = Bus(self.url, topics=[orders])
        found = [orders.decode(event).item async for event in bus.read(orders)]
        await bus.close()
        return found

    def close(self) -> None:
        """Let every service drain and end."""
        for process in self.services:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
        for process, name in self.services.items():
            process.join(PATIENCE_SECONDS)
            if process.exitcode != 0:
                raise SystemExit(f"{name} ended with {process.exitcode}")

    def end(self) -> None:
        """Leave nobody behind, whatever has happened."""
        for process in (*self.producers, *self.services):
            process.kill()

    def tell(self, dead: int) -> None:
        """Say what became of the orders."""
        placed = self.placed()
        say(f"\n  published     {len(placed):>9,}   orders that were acknowledged to their producers")
        for name in SUBSCRIPTIONS:
            done = self.done(name)
            lost = len(placed - set(done))
            took = sorted(int(words[3]) for words in lines_of(self.directory, name) if words[1:3] == ["1", "0"])
            p50, p99 = took[len(took) // 2] / 1000, took[len(took) * 99 // 100] / 1000
            twice = sum(count > 1 for count in done.values())
            say(
                f"  {name:<12}  {len(set(done) & placed):>9,}   delivered, lost {lost}, twice {twice:,}; "
                f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms"
            )
            assert not lost, f"LOST: {lost} of {name}"
        say(f"  dead letters  {dead:>9,}   replayed {dead:,}")


def main(total: int) -> None:
    """Run the demonstration in a directory of its own, which is removed afterwards."""
    root = Path("penstock-data") / f"demo-{os.getpid()}"
    store = root / "store"
    journals = root / "journals"
    journals.mkdir(parents=True)
    url = f"file:{store}"
    shop = Shop(url, journals, max(total // PRODUCERS, 250) * PRODUCERS)
    say(f"{PRODUCERS} processes place {shop.total:,} orders in {url}, {len(SERVICES)} run three services")
    try:
        asyncio.run(create(url))
        shop.open()
        shop.run()
        shop.settle(shop.poison)
        dead = asyncio.run(shop.replay())
        shop.settle()
        shop.close()
        shop.tell(dead)
        report = verify(store, Platform())
        size = sum(partition.bytes for topic in report.topics for partition in topic.partitions)
        assert report.ok, report.damages
        say(f"  opened anew and verified: {size / 1e6:,.0f} MB, no damage\n")
        shop.examine(root)
    finally:
        shop.end()
        shutil.rmtree(root, ignore_errors=True)


async def create(url: str) -> None:
    """Make the topic, before nine processes do at once."""
    bus = Bus(url, topics=[orders])
    await bus.open()
    await bus.close()


def show(done: int, total: int, end: str = "") -> None:
    """Draw the progress, on a terminal only."""
    if sys.stdout.isatty():
        filled = 40 * done // total
        print(f"\r  [{'#' * filled}{'.' * (40 - filled)}] {done:>9,} acknowledged", end=end, flush=True)


def say(text: str) -> None:
    """Tell the person who watches."""
    print(text, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 16_000)
