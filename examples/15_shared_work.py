"""Work that is shared: any number of processes take whatever comes next. Two buses stand for two processes here.

It prints::

    both have worked
    every job was done once
    the third bus goes on: late job
"""

from __future__ import annotations

import asyncio
import tempfile

from penstock import Bus, Topic

jobs = Topic("jobs", bytes)
done: asyncio.Queue[tuple[str, str]] = asyncio.Queue()


def worker(name: str, url: str) -> Bus:
    bus = Bus(url, topics=[jobs])

    @bus.subscriber(jobs, "work", mode="shared", concurrency=4)
    async def work(job: bytes) -> None:
        await asyncio.sleep(0.01)
        done.put_nowait((name, job.decode()))

    return bus


async def main(url: str) -> None:
    async with worker("first", url) as first, worker("second", url):
        results: list[tuple[str, str]] = []
        while len({name for name, _ in results}) < 2:  # a job goes to whoever asks first
            await first.publish_batch(jobs, [b"job %d" % (len(results) + number) for number in range(20)])
            results += [await done.get() for _ in range(20)]
        print("both have worked")
    assert sorted(job for _, job in results) == sorted(f"job {number}" for number in range(len(results)))
    print("every job was done once")

    async with worker("third", url) as third:
        await third.publish(jobs, b"late job")
        print("the third bus goes on:", (await done.get())[1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(f"file:{directory}"))
