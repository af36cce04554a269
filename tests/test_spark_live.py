"""What Spark reads is what was published, byte for byte, while eight writers go on and the query stops and starts."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from tests.file_children import TOPIC, open_at, the_partition
from tests.spark_topics import rows_of, stored

from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from tests.file_children import Child

pytestmark = pytest.mark.spark

WRITERS = 8
LIVES = 3
EVENTS_MAX = 5_000
"""Of each writer, should the query be very slow."""
PAUSE_SECONDS = 0.05
"""Between two publishes of a writer, so that it is still at it when the query stops and starts."""


class Writer(threading.Thread):
    """Has a process of its own publish, a few events at a time, until it is told to stop."""

    def __init__(self, number: int, child: Child) -> None:
        super().__init__(name=f"writer {number}")
        self.number = number
        self.published = 0
        self._child = child
        self._enough = threading.Event()

    def run(self) -> None:
        chance = random.Random(self.number)
        assert self._child.hear() == "ready"
        while not self._enough.wait(PAUSE_SECONDS) and self.published < EVENTS_MAX:
            count = chance.randint(1, 20)
            answer = self._child.ask("send", self.number, self.published, count)
            assert "error" not in answer, answer
            self.published += count

    def stop(self) -> None:
        self._enough.set()
        self.join()


class Query:
    """A streaming query that keeps its batches; one that Spark repeats must be what it was."""

    def __init__(self, spark: SparkSession, url: str, checkpoint: Path) -> None:
        self._spark = spark
        self._options = {"url": url, "topic": TOPIC, "maxRowsPerTrigger": "2000", "subscription": "live"}
        self._checkpoint = str(checkpoint)
        self.batches: dict[int, list[dict[str, Any]]] = {}
        self._left = 0
        self._reached = threading.Event()

    def _keep(self, batch: DataFrame, number: int) -> None:
        rows = rows_of(batch)
        assert self.batches.setdefault(number, rows) == rows, "a repeated batch differs"
        self._left -= 1
        if self._left <= 0:
            self._reached.set()

    def live(self, batches: int | None) -> None:
        """Run for so many batches and stop in the middle of things, or, for None, run to the end of the log."""
        self._left = batches or 0
        self._reached.clear()
        frame = self._spark.readStream.format("penstock").options(**self._options).load()
        writer = frame.writeStream.foreachBatch(self._keep).option("checkpointLocation", self._checkpoint)
        query = writer.trigger(availableNow=True).start() if batches is None else writer.start()
        try:
            if batches is None:
                query.awaitTermination()
            else:
                assert self._reached.wait(90), query.exception()
        finally:
            query.stop()
        assert query.exception() is None


@pytest.mark.timeout(300)
def test_everything_is_read_once_while_eight_writers_go_on(
    spark: SparkSession, root: Path, tmp_path: Path, start: Callable[..., Child]
) -> None:
    with closing(open_at(root)) as store:
        the_partition(store)
    writers = [Writer(number, start("obey", root=str(root))) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    chance = random.Random(7)
    query = Query(spark, f"file:{root}", tmp_path)
    try:
        for _ in range(LIVES):
            query.live(chance.randint(1, 3))
    finally:
        for writer in writers:
            writer.stop()
    assert all(writer.published for writer in writers)
    query.live(None)
    found = sorted((row for rows in query.batches.values() for row in rows), key=lambda row: row["offset"])
    assert len(found) == sum(writer.published for writer in writers)
    assert found == stored(f"file:{root}", TOPIC)
    with closing(open_store(f"file:{root}")) as store:
        assert [each.name for each in store.cursors.subscriptions()] == ["live"]
