"""Metrics: everything that a bus counts, as plain values. With the extra `metrics` they are there for Prometheus.

It prints::

    penstock_messages_published_total ('orders',) 3
    penstock_process_failures_total ('orders', 'billing', 'ConnectionError') 1
    penstock_subscription_lag_messages ('orders', 'billing', '0') 0
    the version is the one that is installed
"""

from __future__ import annotations

import asyncio

import penstock
from penstock import Bus, Delivery, Metric, Retry, Topic
from penstock.bus.middleware.metrics import measured

SHOWN = (
    "penstock_messages_published_total",
    "penstock_process_failures_total",
    "penstock_subscription_lag_messages",
)

orders = Topic("orders", bytes)
bus = Bus("memory:", topics=[orders], middleware=[measured])
billed: asyncio.Queue[bytes] = asyncio.Queue()


@bus.subscriber(orders, "billing", retry=Retry(delay=0.01))
async def bill(order: bytes, delivery: Delivery[bytes]) -> None:
    if order == b"second" and delivery.attempt == 1:
        raise ConnectionError("nobody answers")
    billed.put_nowait(order)


async def main() -> None:
    async with bus:
        await bus.publish_batch(orders, [b"first", b"second", b"third"])
        for _ in range(3):
            await billed.get()
        while (await bus.lag(orders, "billing"))[0].has_lag:  # noqa: ASYNC110 - the last ack is just being written
            await asyncio.sleep(0.01)
        metrics: dict[str, Metric] = {metric.name: metric for metric in await bus.metrics()}
    for name in SHOWN:
        for sample in metrics[name].samples:
            print(name, sample.labels, sample.value)
    assert metrics["penstock_build_info"].samples[0].labels == (penstock.__version__,)
    print("the version is the one that is installed")


if __name__ == "__main__":
    asyncio.run(main())
