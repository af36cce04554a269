"""Events are columns all the way: published, consumed and read as Arrow, without an object for each.

It prints::

    published [0, 10000) of clicks/0
    consumed 4 batches, 10,000 rows; the longest visit took 9999 ms
    clicks/0: lag 0
    read back 10,000 rows, the first of user-0
"""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pyarrow.compute as pc

from penstock import Batch, Bus, Checkpoint, Consumer, DeliveredBatch, Range, Topic

clicks = Topic("clicks", bytes, compression="zstd")
COUNT = 10_000


async def main() -> None:
    table = pa.table(
        {
            "data": [b"%d" % milliseconds for milliseconds in range(COUNT)],
            "key": [f"user-{number % 100}" for number in range(COUNT)],
        }
    )
    async with Bus("memory:", topics=[clicks]) as bus:
        receipt = await bus.publish_batch(clicks, Batch.from_arrow(table))
        assert receipt.offsets == {0: Range(0, COUNT)}
        print("published", receipt.offsets[0], "of clicks/0")

        batches = rows = longest = 0
        consumer: Consumer[bytes] = bus.consume(clicks, "lake", checkpoint=Checkpoint(size=5_000, delay=1))
        async with consumer:
            batch: DeliveredBatch
            async for batch in consumer.batches(max_events=2_500):
                columns = batch.to_arrow()
                visits = columns.column("data").cast(pa.string()).cast(pa.int64())
                longest = max(longest, pc.max(visits).as_py())
                batches, rows = batches + 1, rows + len(batch)
                await batch.ack()
                if rows == COUNT:
                    break
        print(f"consumed {batches} batches, {rows:,} rows; the longest visit took {longest} ms")
        [lag] = await bus.lag(clicks, "lake")
        print(f"clicks/0: lag {lag.lag}")

        found = [item async for item in bus.read_batches(clicks) if isinstance(item, Batch)]
        first = found[0].to_arrow(["key"]).column("key")[0].as_py().decode()
        print(f"read back {sum(len(batch) for batch in found):,} rows, the first of {first}")


if __name__ == "__main__":
    asyncio.run(main())
