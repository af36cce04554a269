"""The same bus without `async`, for Django, Flask, scripts and notebooks; from any number of threads.

It prints::

    jobs/0@0 is stored, and sent again it is a duplicate: True
    8 threads have published 8 more
    one by one: job 0
    as a batch: 8 jobs
    lag: 0
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock import Bus, SyncBus, SyncConsumer, SyncDeliveredBatch, SyncDelivery, SyncPrepared, Topic

jobs = Topic("jobs", bytes)


def main() -> None:
    bus: SyncBus
    with Bus("memory:", topics=[jobs]).sync() as bus:
        prepared: SyncPrepared = bus.prepare(jobs, b"job 0")
        receipt = prepared.send()
        print(f"{receipt.position} is stored, and sent again it is a duplicate: {prepared.send().duplicate}")

        with ThreadPoolExecutor(8) as threads:
            stored = list(threads.map(lambda number: bus.publish(jobs, b"job %d" % number), range(1, 9)))
        print("8 threads have published", len(stored), "more")

        consumer: SyncConsumer[bytes]
        with bus.consume(jobs, "work", mode="exclusive") as consumer:
            delivery: SyncDelivery[bytes]
            for delivery in consumer:
                print("one by one:", delivery.value.decode())
                delivery.ack()
                break
            batch: SyncDeliveredBatch
            for batch in consumer.batches():
                print("as a batch:", len(batch), "jobs")
                batch.ack()
                break
        print("lag:", bus.lag(jobs, "work")[0].lag)


if __name__ == "__main__":
    main()
