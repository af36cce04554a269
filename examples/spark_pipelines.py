"""What the shop has done, looked at with Spark: archived, made into a table of revenues, and proven event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
from examples.shop import PRICES, orders, revenues
from pyspark.sql import SparkSession

import penstock.spark
from penstock import open_store
from penstock.lake.lake import Lake
from penstock.lake.verify import verify


def archive(spark: SparkSession, url: str, directory: Path, say: Callable[[str], None]) -> None:
    """Move all orders to a lake, and compare it with the log, byte for byte."""
    done = penstock.spark.archive(spark, url, orders, directory)
    with closing(open_store(url)) as store:
        report = verify(Lake(directory), store.log)
    assert not report.problems, report.problems
    say(f"  archive   {done.events:>9,} orders in {done.files} Parquet files, which equal the log byte for byte")


def project(spark: SparkSession, url: str, directory: Path, items: Iterable[str], say: Callable[[str], None]) -> None:
    """Fold all orders into the revenue of each customer, and compare the sum with what was ordered."""
    done = penstock.spark.project(spark, revenues(url), "revenue", directory)
    table = pq.read_table(directory / "revenue" / "latest")
    found = dict(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))
    expected = sum(PRICES[item] * count for item, count in Counter(items).items())
    assert sum(found.values()) == expected, "the revenue differs from what was ordered"
    best = max(found, key=found.__getitem__)
    say(
        f"  project   {done.events:>9,} orders of {done.keys:,} customers, revenue {expected / 100:,.2f}; "
        f"the best one is {best} with {found[best] / 100:,.2f}"
    )


def audit(spark: SparkSession, url: str, report: Path, say: Callable[[str], None]) -> bool:
    """Prove what became of every order, and write a page about it; returns whether nothing is lost."""
    found = penstock.spark.audit(spark, url, orders)
    report.write_text(found.html(), encoding="utf-8")
    say(
        f"  audit     {found.counts.acked:>9,} deliveries, by {found.records:,} records: "
        f"{found.verdict}, lost {found.lost:,}"
    )
    say(f"            {found.sentence}")
    say(f"            the report is {report}")
    return not found.lost
