"""Dead letters chosen with SQL in Spark, looked at, and brought back, each once; needs Java 17 and the extra `spark`.

It prints::

    6 dead letters, of 2 causes
    planned 2: TimeoutError 2
    2 came back: order 4 of EUR, order 8 of EUR
    once more: 0
    4 dead
"""

from __future__ import annotations

import asyncio
import tempfile

import penstock.spark
from penstock import Bus, Retry, Topic

orders = Topic("orders", bytes, partitions=2)


async def fail(url: str) -> None:
    async with Bus(url, topics=[orders]) as bus:
        for number in range(4, 10):
            currency = "EUR" if number % 4 == 0 else "USD"
            await bus.publish(orders, b"order %d of %s" % (number, currency.encode()), key=str(number))
        async with bus.consume(orders, "billing", retry=Retry(max_retries=0)) as consumer:
            deliveries = aiter(consumer)
            for _ in range(6):
                delivery = await anext(deliveries)
                odd = int(delivery.value.split()[1]) % 2
                await delivery.nack(reason=KeyError("customer") if odd else TimeoutError("the bank is silent"))


async def bill(url: str, count: int) -> tuple[list[str], int]:
    async with Bus(url, topics=[orders]) as bus:
        async with bus.consume(orders, "billing") as consumer:
            deliveries = aiter(consumer)
            came = [await anext(deliveries) for _ in range(count)]
            for delivery in came:
                assert delivery.replay == 1
                await delivery.ack()
        return sorted(delivery.value.decode() for delivery in came), await bus.dead_letters.count(orders, "billing")


def main(url: str) -> None:
    asyncio.run(fail(url))
    spark = penstock.spark.session("local[2]")
    letters = penstock.spark.dead_letters(spark, url, orders, "billing")
    print(f"{letters.count()} dead letters, of {letters.select('fingerprint').distinct().count()} causes")
    job = penstock.spark.preview_redrive(
        spark, url, orders, "billing", where="error_type = 'TimeoutError' and cast(data as string) like '%EUR'"
    )
    spark.stop()
    print(f"planned {job.planned}:", ", ".join(f"{group.error_type} {group.count}" for group in job.groups))
    done = penstock.spark.redrive(url, job.id, rate=100)  # job.run() is the same, as long as there is a `job`
    came, dead = asyncio.run(bill(url, done.replayed))
    print(f"{done.replayed} came back:", ", ".join(came))
    print("once more:", penstock.spark.redrive(url, job.id).replayed)
    print(dead, "dead")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(f"file:{directory}/events")
