"""One of the processes that share a store and may be killed or stopped at any moment.

It does a bit of everything, as chance will have it: publishes batches and single events under a lasting producer and
under one of its own, publishes its last batch again, commits cursors under leases, reads, and trims if it may. It can
be told to rest, to go on, to end, and to stop in the middle of its turn to write.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.errors import WriterStalled
from penstock.producers import process_producer
from penstock.rows import Lease, Partition, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform, SystemDisk
from penstock.stores.file.store import FileStore
from penstock.testing.campaigns.processes.actor import Actor, Reporter, tell_what_is_logged
from penstock.testing.campaigns.processes.reports import Acquire, Publish, lasting_id
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

TOPICS: Final = {
    "orders": TopicSettings(partitions=3),
    "clicks": TopicSettings(partitions=1, durability="os", compression="zstd"),
}
BATCH_MAX: Final = 400
LOOK_EVENTS: Final = 12
"""Few enough for a message that is sent as a whole."""
LEASE_SECONDS: Final = 0.3


class Resting(NamedTuple):
    """A writer does nothing until it is told to go on."""


class InTurn(NamedTuple):
    """A writer holds the turn of a partition, and does nothing until it is told to go on."""

    log: str
    partition: int


class HoldingDisk(SystemDisk):
    """The machine's disk, where one sync of a segment may be held up."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._held: tuple[Path, Callable[[], None]] | None = None

    def hold(self, directory: Path, wait: Callable[[], None]) -> None:
        """Call `wait` before the next sync of a segment in this directory."""
        self._held = (directory, wait)

    @property
    def holds(self) -> bool:
        """Whether that is still to come."""
        return self._held is not None

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
        """See `Disk`."""
        descriptor = super().open(path, create=create, exclusive=exclusive, write=write)
        self._paths[descriptor] = path
        return descriptor

    def sync(self, descriptor: int) -> None:
        """See `Disk`."""
        if self._held is not None:
            directory, wait = self._held
            path = self._paths[descriptor]
            if path.parent == directory and path.suffix == ".seg":
                self._held = None
                wait()
        super().sync(descriptor)


class Source:
    """A producer, and where it is in its sequence."""

    def __init__(self, name: str, producer: bytes, first: int, *, lasting: bool) -> None:
        self.name = name
        self.producer = producer
        self.next = first
        self.lasting = lasting
        self.last: Publish | None = None
        """What it published last, if that was stored."""

    def following(self, partition: Partition, count: int) -> Publish:
        """Return a publish of what comes next."""
        call = Publish(*partition, self.name, self.next, count, self.lasting)
        self.next += count
        return call


class Writer:
    """Does things with a store."""

    def __init__(self, connection: Connection[Any, Any], root: Path, actor: Actor, disk: HoldingDisk) -> None:
        self._connection = connection
        self._root = root
        self._actor = actor
        self._disk = disk
        topics = {topic.name: topic for topic in actor.store.log.topics()}
        self._synced = topics["orders"].partitions
        self._partitions = [*self._synced, *topics["clicks"].partitions]
        self._leases: dict[str, Lease] = {}

    def publish(self, source: Source, partition: Partition, count: int) -> None:
        """Publish what comes next."""
        call = source.following(partition, count)
        answer = self._actor.publish(call, source.producer)
        source.last = call if answer.outcome == Outcome.OK else None

    def publish_again(self, source: Source) -> None:
        """Publish once more what was stored already."""
        if source.last is not None:
            self._actor.publish(source.last, source.producer)

    def hold(self, source: Source, chance: random.Random) -> None:
        """Publish, and stop in the middle of the turn until told to go on."""
        partition = chance.choice(self._synced)

        def wait() -> None:
            self._actor.reporter.tell(InTurn(*partition))
            self._connection.recv()

        self._disk.hold(self._root / "topics" / partition.log_id / str(partition.number), wait)
        while self._disk.holds:  # the turn itself may be refused
            self.publish(source, partition, 10)

    def settle(self, chance: random.Random) -> None:
        """Commit a cursor under the lease of its partition, if no other process has it."""
        partition = chance.choice(self._synced)
        name = f"lease-{partition.number}"
        if name not in self._leases or chance.random() < 0.2:
            lease = self._acquire(name)
            if lease is None:
                return
            self._leases[name] = lease
        bounds = self._actor.bounds(partition)
        if bounds is None or self._actor.settle(partition, bounds.stop, self._leases[name].fence).error:
            del self._leases[name]

    def _acquire(self, name: str) -> Lease | None:
        got: list[Lease] = []

        def work() -> int | None:
            lease = self._actor.store.leases.acquire(name, str(os.getpid()), LEASE_SECONDS)
            if lease is None:
                return None
            got.append(lease)
            return lease.epoch

        self._actor.reporter.call(Acquire(name), work)
        return got[0] if got else None

    def look(self, chance: random.Random) -> None:
        """Read a few events somewhere."""
        self._actor.look_around(chance.choice(self._partitions), chance, LOOK_EVENTS)

    def trim(self, chance: random.Random) -> None:
        """Remove the oldest part of a partition."""
        partition = chance.choice(self._partitions)
        bounds = self._actor.bounds(partition)
        if bounds is not None:
            self._actor.trim(partition, bounds.start + len(bounds) // 4, force=chance.random() < 0.3)

    def act(self, sources: Sequence[Source], chance: random.Random, *, trims: bool) -> None:
        """Do one thing."""
        source, dice = chance.choice(sources), chance.random()
        if dice < 0.65:
            self.publish(source, chance.choice(self._partitions), chance.randint(20, BATCH_MAX))
        elif dice < 0.75:
            self.publish(source, chance.choice(self._partitions), 1)
        elif dice < 0.80:
            self.publish_again(source)
        elif dice < 0.90:
            self.settle(chance)
        elif dice < 0.94 or not trims:
            self.look(chance)
        else:
            self.trim(chance)


def found_store(connection: Connection[Any, Any], *, root: str, settings: FileSettings) -> None:
    """Make the store and its topics, and end."""
    store = FileStore(Path(root), settings=settings)
    actor = Actor(store, Reporter(connection))
    for name, topic in TOPICS.items():
        actor.create(name, topic)
    store.close()


def write(
    connection: Connection[Any, Any],
    *,
    root: str,
    settings: FileSettings,
    seed: str,
    lasting: str,
    first: int,
    own: str,
    repeats: Sequence[Publish],
    trims: bool,
) -> None:
    """Be a writer: `lasting` and `own` name its sources, `repeats` is what the one before it left unknown."""
    chance = random.Random(seed)
    reporter = Reporter(connection)
    tell_what_is_logged(reporter)
    disk = HoldingDisk()
    store = _open(Path(root), settings, disk)
    actor = Actor(store, reporter)
    actor.repeat(repeats)
    writer = Writer(connection, Path(root), actor, disk)
    sources = [
        Source(lasting, lasting_id(lasting), first, lasting=True),
        Source(own, process_producer(Platform().clock.time_us()), 0, lasting=False),
    ]
    while True:
        if connection.poll():
            word = connection.recv()
            if word == "rest":
                reporter.tell(Resting())
                word = connection.recv()
            if word == "hold":
                writer.hold(sources[0], chance)
            if word == "end":
                store.close()
                return
        writer.act(sources, chance, trims=trims)


def _open(root: Path, settings: FileSettings, disk: SystemDisk) -> FileStore:
    while True:
        try:
            return FileStore(root, settings=settings, platform=Platform(disk=disk))
        except WriterStalled:
            continue  # whoever has the turn is slow, or stopped for a moment
