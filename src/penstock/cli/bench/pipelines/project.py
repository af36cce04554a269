"""`project`: a projection over many events of many keys, against the least that Spark needs to bring each key together.

The ceiling reads the same rows from the same topic, sends each to the partition of its key and sorts it there by
partition and offset, as any fold must, and drops it. The projection does that, too, and decodes every payload, calls
the function, and writes the table. Its states have the keys of the events themselves; a `key` of its own, which is a
function, would decode every payload once more, before the shuffle. Every round makes a new table of all events.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.cli.bench.harness import Figure, sample
from penstock.cli.bench.pipelines.sizes import Sizes
from penstock.errors import PenstockError
from penstock.events import event
from penstock.settings import Settings
from penstock.spark.pipelines.project import events_of, project, usual_kind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "spending"
PUBLISHES_AT_ONCE = 8


@event("penstock.bench.paid")
class Paid(msgspec.Struct, frozen=True):
    """What is folded."""

    customer: str
    cents: int
    currency: str
    note: str


class Spent(msgspec.Struct, frozen=True):
    """What it is folded into."""

    cents: int
    payments: int


def figures(spark: SparkSession, directory: Path, sizes: Sizes, rounds: int) -> Iterator[Figure]:
    """Measure `project`."""
    contest = Contest(spark, directory, sizes)
    contestants = [contest.project, contest.bare]
    sample(contestants, sizes.warm_ups)
    subject, ceiling = map(median, sample(contestants, rounds))
    rows = sizes.project_rows
    yield Figure.of("project", rows / subject, "rows/s", goal="value >= 200000 rows/s")
    yield Figure.of(
        "project.share", rows / subject, "rows/s",
        goal="ratio >= 0.4", ceiling=rows / ceiling, ratio=ceiling / subject,
    )  # fmt: skip


class Contest:
    """A topic, and the two things that are done with it."""

    def __init__(self, spark: SparkSession, directory: Path, sizes: Sizes) -> None:
        self._spark = spark
        self._sizes = sizes
        self._tables = (directory / f"table-{number}" for number in count())
        topic: Topic[Paid] = Topic(
            "paid", Paid, key=lambda paid: paid.customer, partitions=sizes.project_partitions, durability="os"
        )
        self._topic = topic
        self._bus = Bus(f"file:{directory / 'store'}", topics=[topic], settings=Settings())

        @self._bus.projection(topic, NAME, embedded=False)
        def spending(spent: Spent | None, paid: Paid) -> Spent | None:
            if spent is None:
                return Spent(paid.cents, 1)
            return Spent(spent.cents + paid.cents, spent.payments + 1)

        asyncio.run(_publish(self._bus, topic, sizes))

    def project(self) -> None:
        """Fold everything into a new table, and make sure that it is everything."""
        directory = next(self._tables)
        done = project(self._spark, self._bus, NAME, directory, step_rows=self._sizes.project_step_rows)
        if (done.events, done.keys) != (self._sizes.project_rows, self._sizes.project_keys):
            raise PenstockError(f"{done.events} events were folded into {done.keys} states: the time tells nothing")
        shutil.rmtree(directory, ignore_errors=True)

    def bare(self) -> None:
        """Bring the rows of each key together, and drop them."""
        options = {"url": self._bus.url, "topic": self._topic.name}
        events = events_of(self._spark, options, usual_kind(self._bus.projections[0]))
        sorted_rows = events.repartition("key").sortWithinPartitions("partition", "offset")
        sorted_rows.write.format("noop").mode("overwrite").save()


async def _publish(bus: Bus, topic: Topic[Paid], sizes: Sizes) -> None:
    """Publish events of keys that come again and again, in an order that is far from theirs."""
    rows, keys, batch = sizes.project_rows, sizes.project_keys, sizes.project_batch
    note = "x" * 40
    async with bus:
        for start in range(0, rows, batch * PUBLISHES_AT_ONCE):
            await asyncio.gather(
                *(
                    bus.publish_batch(
                        topic,
                        [
                            Paid(f"customer-{number * 7919 % keys:06d}", number % 10_000, "EUR", note)
                            for number in range(first, min(first + batch, rows))
                        ],
                    )
                    for first in range(start, min(start + batch * PUBLISHES_AT_ONCE, rows), batch)
                )
            )
