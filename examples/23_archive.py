"""A Parquet lake: what is archived may be trimmed, and log and lake are read as one.

It prints::

    1000 events archived, 0 when it is repeated
    the log begins at 1000, and has 200 events
    log and lake together have 1200, in order and each once
    in the lake itself: 1000 rows, 25 customers
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.dataset

import penstock.spark
from penstock import Bus, Topic, open_store

orders = Topic("orders", bytes, key=lambda payload: payload.split()[0])


async def publish(url: str, first: int, count: int) -> None:
    async with Bus(url, topics=[orders]) as bus:
        await bus.publish_batch(orders, [b"customer-%d %d" % (n % 25, n) for n in range(first, first + count)])


async def numbers(url: str, lake: Path) -> list[int]:
    async with Bus(url, topics=[orders]) as bus:
        return [int(event.data.split()[1]) async for event in bus.read(orders, archive=lake)]


def trim(url: str) -> None:
    """Do what retention does by itself: remove what no protected subscription needs, and `archive` is one."""
    store = open_store(url)
    [partition] = next(info for info in store.log.topics() if info.name == "orders").partitions
    store.log.trim(partition, 1000)
    store.close()


def main(directory: Path) -> None:
    url, lake = f"file:{directory}/events", directory / "lake"
    asyncio.run(publish(url, 0, 1000))

    spark = penstock.spark.session("local[2]")
    first, second = (penstock.spark.archive(spark, url, orders, lake) for _ in range(2))
    spark.stop()
    print(f"{first.events} events archived, {second.events} when it is repeated")

    trim(url)
    asyncio.run(publish(url, 1000, 200))
    print("the log begins at 1000, and has 200 events")
    assert asyncio.run(numbers(url, lake)) == list(range(1200))
    print("log and lake together have 1200, in order and each once")

    table = pyarrow.dataset.dataset(lake, partitioning="hive").to_table(columns=["key", "topic", "date"])
    print(f"in the lake itself: {table.num_rows} rows, {len(table['key'].unique())} customers")


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        main(Path(made))
