"""What other processes do for this area, each a job of its own.

A job talks to whoever started it in lines of JSON on stdout. Its first line says that it is ready.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from pathlib import Path

import msgspec

from penstock.bus.bus import Bus
from penstock.bus.topic import Topic
from penstock.cli.bench.batch import KEYS, PAYLOADS
from penstock.cli.bench.log.events import TOPIC, Appender, a_store, a_topic, keyed_batch, stored_bytes
from penstock.cli.bench.log.reading import read_all
from penstock.settings import Settings


class Publish(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Publish during the times that stdin tells, and say how long each publish waited."""

    directory: str
    events: int
    """Of a batch; 1 publishes single events."""

    def run(self) -> None:
        """Do it until stdin ends."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        topic = Topic(TOPIC, bytes)
        values, keys = PAYLOADS[: self.events], KEYS[: self.events]
        async with Bus(f"file:{self.directory}", topics=[topic], settings=Settings()) as bus:

            async def publish() -> None:
                if self.events == 1:
                    await bus.publish(topic, values[0])
                else:
                    await bus.publish_batch(topic, values, keys=keys)

            await publish()
            tell("ready")
            # Nothing else runs here meanwhile, so that waiting for a line may block.
            for line in sys.stdin:
                start, stop = json.loads(line)
                await publish()  # to learn what the others have written since this one's last turn
                time.sleep(max(start - time.monotonic(), 0.0))  # noqa: ASYNC251 - see above
                waits = []
                began = time.monotonic()
                while began < stop:
                    await publish()
                    ended = time.monotonic()
                    waits.append(ended - began)
                    began = ended
                tell(waits)


class FillSegments(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Fill a store in each directory until its log has so many segments; go on writing until killed."""

    directories: dict[str, int]
    """And how many segments."""
    segment_bytes: int

    def run(self) -> None:
        """Do it, all at the same time, so that all are writing in the moment of the kill."""
        filled = threading.Barrier(len(self.directories) + 1)
        for directory, segments in self.directories.items():
            threading.Thread(target=self._write, args=(Path(directory), segments, filled), daemon=True).start()
        filled.wait()
        tell("ready")
        threading.Event().wait()

    def _write(self, directory: Path, segments: int, filled: threading.Barrier) -> None:
        try:
            with a_store(directory, segment_bytes=self.segment_bytes) as store:
                (partition,) = a_topic(store).partitions
                half_a_segment = Appender(store, keyed_batch(max(self.segment_bytes // 300, 1)))
                while len(list(directory.rglob("*.seg"))) < segments:
                    half_a_segment.append(partition)
                event = Appender(store, keyed_batch(1))
                event.append(partition)
                filled.wait()
                while True:
                    event.append(partition)
        except BaseException:
            filled.abort()  # ends this process, since nobody kills one that is not ready
            raise


class Move(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Write or read much, and say how much that was, and how much memory it took at most."""

    directory: str
    batch_events: int
    bytes: int
    """To write; 0 reads all that is there."""

    def run(self) -> None:
        """Do it."""
        with a_store(Path(self.directory)) as store:
            (partition,) = a_topic(store).partitions
            if self.bytes:
                batch = keyed_batch(self.batch_events)
                appender, length = Appender(store, batch), sum(map(len, stored_bytes(batch)))
                for _ in range(-(-self.bytes // length)):
                    appender.append(partition)
            events = store.log.bounds(partition).stop if self.bytes else read_all(store, partition)
        tell({"events": events, "memory": high_water_bytes()})


def high_water_bytes() -> int:
    """Return the most memory that this process has had at once."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:  # only Linux has this file
        pass
    # Less good, since a program begins with that of the one that started it.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def tell(message: object) -> None:
    """Tell whoever started this."""
    print(json.dumps(message), flush=True)


Job = Publish | FillSegments | Move
