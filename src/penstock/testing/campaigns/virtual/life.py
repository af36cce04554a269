"""A small life of a file store on a virtual machine, and what it was told: everything that a store does, in some order.

A seed decides the order, the sizes and the topics. Each act is noted before it begins, so that at any moment it is
known what was acknowledged, what was refused, and what was under way.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock import columns
from penstock.batch import Batch
from penstock.errors import PenstockError, UnknownTopic, WritingStopped
from penstock.events import Event
from penstock.outbox import SqliteOutbox
from penstock.producers import Run
from penstock.rows import (
    Commit,
    Cursor,
    Manifest,
    Parked,
    Partition,
    Scheduled,
    Shard,
    Staged,
    Subscription,
    TopicInfo,
    TopicSettings,
)
from penstock.runtime.entrances import Loop
from penstock.runtime.mover import Mover
from penstock.runtime.scheduler import Scheduler
from penstock.settings import FileSettings
from penstock.stores.file.store import FileStore
from penstock.testing.journal import Outcome
from penstock.testing.machine import ROOT, Machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from penstock.testing.journal import Journal

R = TypeVar("R")

SMALL = FileSettings(segment_bytes=3_000, allocate_bytes=1_024, marker_seconds=3600.0, runtime_directory="/nowhere")
"""Segments of a few blocks, so that every act soon meets the end of one."""

APPLICATION = Path("/application.db")
SUBSCRIPTION = "billing"
NAMES = ("orders", "payments")
ACTS = (
    *("publish",) * 14, *("commit",) * 3, *("park",) * 2, *("trim",) * 2, *("mark",) * 2, *("reopen",) * 2,
    *("schedule",) * 3, "cancel", *("run_schedule",) * 2, *("stage",) * 3, *("move",) * 2, *("delete",) * 2,
    *("create",) * 3, *("lease",) * 2, *("prepare",) * 2, "finish", "settle", "retain",
)  # fmt: skip
"""What happens in a life, shuffled; it begins with a topic and some events."""


# --- acts ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Act:
    """Something that was asked of the store, and what became of it."""

    what: str
    outcome: Outcome = Outcome.UNKNOWN
    answer: Any = None

    def tell(self, journal: Journal) -> None:
        """Tell the journal, if this is anything of its."""


@dataclass(kw_only=True)
class Published(Act):
    """Events that were sent to a partition."""

    partition: Partition
    payloads: list[bytes]
    producer: bytes
    first: int

    def tell(self, journal: Journal) -> None:
        journal.published(*self.partition, self.payloads, self.outcome, offset=self.answer)


@dataclass(kw_only=True)
class Created(Act):
    """A topic that was created; the answer is its `TopicInfo`."""

    name: str


@dataclass(kw_only=True)
class Deleted(Act):
    """A topic that was deleted."""

    log_id: str

    def tell(self, journal: Journal) -> None:
        if self.outcome is Outcome.OK:
            journal.deleted(self.log_id)


@dataclass(kw_only=True)
class TrimmedBelow(Act):
    """Events that may be gone, from the moment when this was asked."""

    partition: Partition
    before: int

    def tell(self, journal: Journal) -> None:
        journal.trimmed(*self.partition, self.before)


@dataclass(kw_only=True)
class Committed(Act):
    """A cursor that was moved."""

    partition: Partition
    position: int

    def tell(self, journal: Journal) -> None:
        journal.committed(SUBSCRIPTION, *self.partition, self.position, self.outcome)


@dataclass(kw_only=True)
class ParkedOne(Act):
    """A row that was parked."""

    row: Parked


@dataclass(kw_only=True)
class Entering(Act):
    """An event that will enter a log by itself: it was scheduled, or staged by an application's transaction."""

    log_id: str
    payload: bytes
    id: str = ""


@dataclass(kw_only=True)
class Cancelled(Act):
    """A scheduled event that was cancelled; the answer says whether it was in time."""

    id: str


@dataclass(kw_only=True)
class Granted(Act):
    """A lease that was acquired; the answer is its epoch."""


@dataclass(kw_only=True)
class Prepared(Act):
    """A manifest that was prepared; the answer is the one that counts."""

    manifest: Manifest


# --- the life -----------------------------------------------------------------------------------


@dataclass
class Life:
    """One process that uses a store, act by act."""

    machine: Machine
    seed: int
    history: list[Act] = field(default_factory=list)
    topics: dict[str, TopicInfo] = field(default_factory=dict)
    """The topics that are there for sure."""
    ends: dict[Partition, int] = field(default_factory=dict)
    """Where each partition ends, as far as this process was told."""
    store: FileStore = field(init=False)
    stopped: bool = True
    """Whether the store must be opened before anything can be asked of it."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._sequences: dict[bytes, int] = {}
        self._number = 0
        self._outbox = MachineOutbox(self.machine)

    def open(self) -> None:
        """Open the store, making it at first."""

        def work() -> None:
            self.stopped = True
            self.store = FileStore(ROOT, settings=SMALL, platform=self.machine.platform)
            self.stopped = False

        self._perform(Act(what="open the store"), work)

    def run(self) -> None:
        """Live it."""
        acts = list(ACTS)
        self.chance.shuffle(acts)
        self.open()
        for name in ("create", "publish", "publish", *acts):
            if self.stopped:
                self.reopen()
            if not self.stopped:
                getattr(self, name)()
            self.machine.clock.advance(0.5)
        if not self.stopped:
            self.close()

    def close(self) -> None:
        """End this process well."""
        self._outbox.close()
        self.store.close()

    def _perform(self, act: Act, work: Callable[[], Any]) -> None:
        self.history.append(act)
        try:
            act.answer = work()
            act.outcome = Outcome.OK
        except WritingStopped:
            act.outcome, self.stopped = Outcome.FAILED, True
        except PenstockError:
            act.outcome = Outcome.FAILED
        except OSError:
            pass  # unknown, as it was noted

    # --- the log --------------------------------------------------------------------------------

    def create(self) -> None:
        """Create a topic that is not there, if there is one."""
        missing = [name for name in NAMES if name not in self.topics]
        if missing:
            act = Created(what=f"create topic {missing[0]}", name=missing[0])
            settings = TopicSettings(partitions=self.chance.choice([1, 2]))
            self._perform(act, lambda: self.store.log.create_topic(act.name, settings))
            if act.outcome is Outcome.OK:
                self.topics[act.name] = act.answer
                self.ends.update(dict.fromkeys(act.answer.partitions, 0))
                self._subscribe(act.answer)

    def _subscribe(self, topic: TopicInfo) -> None:
        subscription = Subscription(log_id=topic.log_id, name=SUBSCRIPTION, mode="exclusive", protect=False)
        cursors = [Cursor(shard=_shard(partition), next_offset=0) for partition in topic.partitions]
        self._perform(
            Act(what="create the subscription"), lambda: self.store.cursors.put_subscription(subscription, cursors)
        )

    def _topic(self) -> TopicInfo | None:
        return self.chance.choice([*self.topics.values()]) if self.topics else None

    def _partition(self) -> Partition | None:
        topic = self._topic()
        return self.chance.choice(topic.partitions) if topic else None

    def _payload(self) -> bytes:
        self._number += 1
        return b"%d/%d:" % (self.seed, self._number) + bytes([self._number % 251]) * self.chance.choice([0, 30, 400])

    def publish(self) -> None:
        """Publish a few events, now and then enough for a segment of their own."""
        partition = self._partition()
        if partition is None:
            return
        count = self.chance.choice([1, 1, 2, 5, 12])
        producer = bytes([self.chance.choice([1, 2])]) * 6 + b"\x40" + bytes(9)
        first = self._sequences.get(producer, 0)
        self._sequences[producer] = first + count
        payloads = [self._payload() for _ in range(count)]
        act = Published(
            what=f"publish {count} to {partition.number} of {partition.log_id[:6]}",
            partition=partition,
            payloads=payloads,
            producer=producer,
            first=first,
        )
        self._perform(act, lambda: send(self.store, act))
        if act.outcome is Outcome.OK:
            self.ends[partition] = act.answer + count

    def trim(self) -> None:
        """Let go of what is old."""
        partition = self._partition()
        if partition is not None and self.ends[partition]:
            before = self.chance.randint(1, self.ends[partition])
            act = TrimmedBelow(what=f"trim below {before}", partition=partition, before=before)
            self._perform(act, lambda: self.store.log.trim(partition, before))

    def mark(self) -> None:
        """Give the last blocks their witnesses, as the keeper does."""
        self._perform(Act(what="mark"), lambda: self.store.log.mark_idle(0.0))

    def reopen(self) -> None:
        """Close the store, if it was ever opened, and open it again."""
        if hasattr(self, "store"):
            self._perform(Act(what="close the store"), self.store.close)
        self.open()

    def delete(self) -> None:
        """Delete a topic, if it is not the only one."""
        if len(self.topics) > 1:
            name, topic = self.chance.choice([*self.topics.items()])
            del self.topics[name]
            act = Deleted(what=f"delete {name}", log_id=topic.log_id)
            self._perform(act, lambda: self.store.log.delete_topic(topic.log_id))

    # --- the small state ------------------------------------------------------------------------

    def commit(self) -> None:
        """Move a cursor."""
        partition = self._partition()
        if partition is not None:
            position = self.chance.randint(0, self.ends[partition])
            position = max([position, *self._positions(partition)])
            act = Committed(what=f"commit {position}", partition=partition, position=position)
            self._perform(
                act, lambda: _commit(self.store, cursors=(Cursor(shard=_shard(partition), next_offset=position),))
            )

    def _positions(self, partition: Partition) -> list[int]:
        return [act.position for act in self.history if isinstance(act, Committed) and act.partition == partition]

    def park(self) -> None:
        """Park a copy of an event."""
        partition = self._partition()
        if partition is not None and self.ends[partition]:
            offset = self.chance.randrange(self.ends[partition])
            event = Event(type="parked", data=self._payload())
            row = Parked(shard=_shard(partition), offset=offset, state="dead", lane=1, event=event, attempts=3)
            self._perform(ParkedOne(what=f"park {offset}", row=row), lambda: _commit(self.store, parked=(row,)))

    def settle(self) -> None:
        """Write a settlement record."""
        partition = self._partition()
        if partition is not None:
            self._perform(Act(what="settle"), lambda: _commit(self.store, settlement=b"a record"))

    def retain(self) -> None:
        """Let retention look, which has nothing to remove here."""
        self._perform(Act(what="retain"), self.store.log.retain)

    def lease(self) -> None:
        """Acquire a lease."""

        def work() -> int | None:
            lease = self.store.leases.acquire("lease", "me", 1.0)
            return lease.epoch if lease else None

        self._perform(Granted(what="acquire a lease"), work)

    def prepare(self) -> None:
        """Prepare a manifest."""
        self._number += 1
        manifest = Manifest(sink="lake", query="q", batch=self._number, body=b"%d" % self._number)
        act = Prepared(what=f"prepare batch {self._number}", manifest=manifest)
        self._perform(act, lambda: self.store.manifests.prepare(manifest))

    def finish(self) -> None:
        """Finish a manifest that is prepared."""
        unfinished = self.store.manifests.unfinished()
        if unfinished:
            batch = unfinished[0].batch
            self._perform(Act(what=f"finish batch {batch}"), lambda: self.store.manifests.finish("lake", "q", batch))

    # --- entrances ------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Schedule an event for a little later."""
        partition = self._partition()
        if partition is not None:
            payload = self._payload()
            due = self.machine.clock.time_us() + self.chance.choice([0, 1_000_000])
            row = Scheduled(
                id=f"id-{self._number}",
                log_id=partition.log_id,
                partition=partition.number,
                due_at=due,
                event=Event(type="scheduled", data=payload),
            )
            act = Entering(what=f"schedule {row.id}", log_id=partition.log_id, payload=payload, id=row.id)
            self._perform(act, lambda: self.store.schedule.add([row]))

    def cancel(self) -> None:
        """Cancel the last one that was scheduled."""
        ids = [act.id for act in self.history if isinstance(act, Entering) and act.id]
        if ids:
            self._perform(Cancelled(what=f"cancel {ids[-1]}", id=ids[-1]), lambda: self.store.schedule.cancel(ids[-1]))

    def run_schedule(self) -> None:
        """Let what is due enter the log."""
        self._perform(Act(what="run the scheduler"), lambda: run_scheduler(self.store, self.machine))

    def stage(self) -> None:
        """Stage an event in a transaction of an application."""
        topic = self._topic()
        if topic is not None:
            payload = self._payload()
            act = Entering(what=f"stage {self._number}", log_id=topic.log_id, payload=payload)
            staged = Staged(topic=topic.name, event=Event(type="staged", data=payload))

            def work() -> None:
                with closing(self.machine.databases.connect_application(APPLICATION)) as connection:
                    self._outbox.stage(connection, [staged])
                    connection.commit()

            self._perform(act, work)

    def move(self) -> None:
        """Let what was staged enter the log."""
        self._perform(Act(what="run the mover"), lambda: run_mover(self.store, self._outbox, self.machine))


class MachineOutbox(SqliteOutbox):
    """The outbox in the application's database of a machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(APPLICATION, connect=machine.databases.connect)

    def _check_file(self, cursor: sqlite3.Cursor) -> None:
        """Believe the caller: a database in memory has no path that could be compared."""


# --- what a life and its aftermath share ----------------------------------------------------------


def send(store: FileStore, act: Published) -> int:
    """Append the events of an act, or append them again; returns their first offset."""
    batch = Batch.build(act.payloads)
    run = Run(act.producer, 0, act.first, len(batch), columns.digest(batch.columns))
    [answer] = store.log.append(act.partition, batch, [run])
    if answer.refused is not None:
        raise answer.refused
    assert answer.offsets is not None
    return answer.offsets.start


def _shard(partition: Partition) -> Shard:
    return Shard(partition.log_id, SUBSCRIPTION, 0, partition.number)


def _commit(store: FileStore, **commit: Any) -> None:
    [refused] = store.cursors.commit([Commit(**commit)])
    if refused is not None:
        raise refused


class _Host:
    """What the loops of the runtime need, without an event loop's threads."""

    def __init__(self, store: FileStore) -> None:
        self.store = store

    async def call(self, function: Callable[..., R], *args: Any, **options: Any) -> R:
        return function(*args, **options)

    async def info(self, name: str) -> TopicInfo:
        topics = {topic.name: topic for topic in self.store.log.topics()}
        if name not in topics:
            raise UnknownTopic(name, topics)
        return topics[name]

    def forgotten_if_deleted(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def run_scheduler(store: FileStore, machine: Machine) -> None:
    """Let the scheduler make one round, as a process of its own."""
    scheduler = Scheduler(_Host(store), owner="scheduler", clock=machine.clock, jitter=lambda: 0.0)
    _make_round(scheduler)


def run_mover(store: FileStore, outbox: SqliteOutbox, machine: Machine) -> None:
    """Let the mover make one round, as a process of its own."""
    host = _Host(store)
    mover = Mover(outbox, host, host, owner="mover", clock=machine.clock, jitter=lambda: 0.0, executor=None)
    _make_round(mover)


def _make_round(loop: Loop) -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(loop.once())
    else:
        # Another machine is in the middle of a round, and this thread's event loop is its.
        with ThreadPoolExecutor(1) as executor:
            executor.submit(lambda: asyncio.run(loop.once())).result()
