"""The small state of a file store over a log in memory, for the tests of the state alone."""

from __future__ import annotations

import os
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    TopicDeleted,
)
from penstock.ports import Capabilities
from penstock.rows import Manifest, ParkedFilter, Partition, Scheduled, TopicInfo
from penstock.settings import FileSettings
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.platform import Platform, connect_sqlite
from penstock.stores.file.state.cursors import FileCursors
from penstock.stores.file.state.database import open_databases
from penstock.stores.file.state.leases import FileLeases
from penstock.stores.file.state.manifests import FileManifests
from penstock.stores.file.state.parked import FileParkedRows
from penstock.stores.file.state.payloads import Payloads
from penstock.stores.file.state.schedule import FileSchedule
from penstock.stores.file.state.schema import create_databases
from penstock.stores.file.state.witnesses import Witnesses
from penstock.stores.memory import MemoryStore
from penstock.testing.conformance.builders import (
    a_cursor,
    a_parked,
    a_shard,
    acquired,
    an_event,
    commit,
    fill,
    park,
    subscribe,
)
from penstock.testing.conformance.opening import a_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.clock import VirtualClock
    from penstock.offsets import Range

STORE_ID = "5e" * 16
LIMITS = FileSettings()


@contextmanager
def state_stores(directory: Path, clock: VirtualClock) -> Iterator[Callable[..., StateStore]]:
    """Open stores over one directory and one log, as several processes would, and close them at the end."""
    create_databases(directory, STORE_ID, Platform(clock=clock))
    memory = MemoryStore(clock=clock)
    opened: list[StateStore] = []

    def open_store(platform: Platform | None = None, **stated: Any) -> StateStore:
        opened.append(StateStore(directory, memory, platform or Platform(clock=clock), **stated))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()


class LogOfMemory:
    """A log in memory that forgets topics in the small state, too."""

    def __init__(self, memory: MemoryStore, witnesses: Witnesses) -> None:
        self._memory = memory
        self._witnesses = witnesses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory.log, name)

    def delete_topic(self, log_id: str) -> None:
        self._memory.log.delete_topic(log_id)
        self._witnesses.forget_log(log_id)


class ViewOfMemory:
    """The `LogView` of a log in memory, which is always as durable as it gets."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory
        self.synced: list[tuple[Partition, int]] = []

    def check_open(self) -> None:
        self._memory._state.check_open()

    def check_topic(self, log_id: str) -> None:
        if log_id not in self._memory._state.topics:
            raise TopicDeleted(log_id)

    def check_partition(self, partition: Partition) -> None:
        self._memory._state.partition(partition)

    def bounds_synced(self, partition: Partition, up_to: int) -> Range:
        self.synced.append((partition, up_to))
        return self._memory.log.bounds(partition)


class StateStore:
    """The log of a memory store, and everything else in the files of a directory."""

    def __init__(
        self,
        directory: Path,
        memory: MemoryStore,
        platform: Platform,
        *,
        member: int = 0,
        limits: FileSettings = LIMITS,
        alive: Callable[[int], bool] = lambda _: True,
        stall_seconds: float = 5.0,
    ) -> None:
        self.url = f"file:{directory}"
        self.capabilities = Capabilities(durable=True, shared=False, blocking=True)
        self.directory, self.memory, self.platform = directory, memory, platform
        gates = shared_gates(directory / "locks", platform)
        self.databases = open_databases(directory, STORE_ID, platform, gates, stall_seconds=stall_seconds)
        control, bulk, _ = self.databases
        self.view = ViewOfMemory(memory)
        self.payloads = Payloads(control, bulk, platform)
        self.witnesses = Witnesses(control, self.payloads)
        self.log: Any = LogOfMemory(memory, self.witnesses)
        self.notifier, self.outbox = memory.notifier, None
        self.cursors = FileCursors(
            control, self.payloads, self.witnesses, self.view, platform.clock, parked_rows_max=limits.parked_rows_max
        )
        self.parked = FileParkedRows(control, self.payloads, self.view)
        self.leases = FileLeases(self.databases, self.view, platform, member=member, is_alive=alive)
        self.schedule = FileSchedule(self.databases, self.view, scheduled_rows_max=limits.scheduled_rows_max)
        self.manifests = FileManifests(control, self.view)

    def close(self) -> None:
        self.memory.close()
        self.databases.close()


def populated(store: StateStore) -> TopicInfo:
    """Put a row into every table."""
    topic = a_topic(store)
    fill(store, topic.partitions[0], 5)
    subscribe(store, topic, policy={"max": 3})
    shard = a_shard(topic)
    commit(store, a_cursor(shard, 2, settled=b"\2", attempts={3: 1}), settlement=b"to 2")
    park(store, a_parked(shard, 1, error_type="ValueError", error_message="text", job="job"))
    lease = acquired(store)
    store.schedule.add(
        [Scheduled(id=name, log_id=topic.log_id, partition=0, due_at=5, event=an_event()) for name in "ab"]
    )
    store.schedule.claim(5, 1, lease.fence)
    store.manifests.prepare(Manifest(sink="lake", query="q", batch=0, body=b"body"))
    return topic


def use_everything(store: StateStore, topic: TopicInfo) -> None:
    """Read every table in some way."""
    store.cursors.subscriptions()
    store.cursors.load(topic.log_id, "billing")
    store.cursors.settlements(10)
    store.parked.page(billing(topic))
    store.leases.holder("lease")
    store.schedule.page()
    another = Scheduled(id=os.urandom(8).hex(), log_id=topic.log_id, partition=0, due_at=5, event=an_event())
    store.schedule.add([another])
    store.schedule.claim(5, 10, acquired(store, "scheduler").fence)
    store.manifests.last("lake")
    store.manifests.unfinished()
    store.payloads.sweep()


def billing(topic: TopicInfo, **wanted: Any) -> ParkedFilter:
    return ParkedFilter(log_id=topic.log_id, subscription="billing", **wanted)


def damage(directory: Path, file: str, statement: str) -> None:
    with closing(connect_sqlite(directory / file)) as connection:
        assert connection.execute(statement).rowcount == 1, statement
