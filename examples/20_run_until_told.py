"""A service: `bus.run()` runs the subscribers until SIGTERM or SIGINT, and lets every handler end.

Here the program sends itself the signal, in the middle of a job, as a deployment does. Another one goes on.

It prints::

    job 1 begins, and the signal comes
    job 1 ends all the same
    the service has ended
    the next one begins with job 2, attempt 1
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from dataclasses import replace

from penstock import Bus, Delivery, Settings, Topic

jobs = Topic("jobs", bytes)
settings = Settings()  # instead of the environment and penstock.toml
settings = replace(settings, delivery=replace(settings.delivery, drain_seconds=10))  # so long may handlers take to end


async def main(url: str) -> None:
    publisher = Bus(url, topics=[jobs])
    await publisher.open()  # opened, and no subscriber runs: for a process that only publishes
    await publisher.publish_batch(jobs, [b"job 1", b"job 2"])
    await publisher.close()

    service = Bus(url, topics=[jobs], settings=settings)

    @service.subscriber(jobs, "work")
    async def work(job: bytes) -> None:
        print(job.decode(), "begins, and the signal comes")
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        print(job.decode(), "ends all the same")

    await service.run()
    print("the service has ended")

    successor = Bus(url, topics=[jobs], settings=settings)

    @successor.subscriber(jobs, "work")
    async def go_on(job: bytes, delivery: Delivery[bytes]) -> None:
        print(f"the next one begins with {job.decode()}, attempt {delivery.attempt}")
        os.kill(os.getpid(), signal.SIGTERM)

    await successor.run()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(f"file:{directory}"))
