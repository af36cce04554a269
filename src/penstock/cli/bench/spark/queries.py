"""Queries, each from its start to its end."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

_numbers = count()


def read_batch(spark: SparkSession, source: str, options: Mapping[str, str]) -> None:
    """Read all columns of all rows, and drop them."""
    spark.read.format(source).options(**options).load().write.format("noop").mode("overwrite").save()


def read_stream(spark: SparkSession, directory: Path, source: str, options: Mapping[str, str], *, rows: int) -> None:
    """Read so many rows as a stream, all columns of them, and drop them."""
    run(spark.readStream.format(source).options(**options).load(), directory, "noop", {}, rows=rows)


def run(frame: DataFrame, directory: Path, sink: str, options: Mapping[str, str], *, rows: int) -> None:
    """Run a query that has never run before until it has read all there is, which is so many rows."""
    writer = frame.writeStream.format(sink).options(**options).trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(directory / f"checkpoint-{next(_numbers)}")).start()
    query.awaitTermination()
    read = sum(progress.numInputRows for progress in query.recentProgress)
    if read != rows:
        raise PenstockError(
            f"the query into {sink!r} has read {read} rows, and there are {rows}: the time tells nothing"
        )
