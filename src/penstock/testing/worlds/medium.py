"""The medium: a store in memory that outlives the processes of a world, and what was seen to be written to it.

Each process reaches it through a `Process`, a store of its own kind: once that is dead, every call is refused, so that
nothing of a dead process is ever written, however long its tasks take to end. Calls can be made to fail, the next ones
by name or each by a plan. What is durable is noted in the order in which it became so.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from penstock.batch import Batch
from penstock.bus.delayed import number_in
from penstock.bus.states import States
from penstock.errors import StoreClosed, StoreError, UsageError
from penstock.rows import Partition
from penstock.runtime.ledger import decode_record
from penstock.stores.memory import MemoryStore
from penstock.testing.worlds.faults import Kind, Point, Spot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.batch import StoredEvent
    from penstock.clock import Clock
    from penstock.offsets import Range
    from penstock.ports import Store
    from penstock.rows import Commit, Cursor, Scheduled, Shard, TopicInfo
    from penstock.settings import MemorySettings
    from penstock.testing.worlds.faults import Faults

Call = Literal["publish", "read", "commit", "schedule"]

CALLS: Final[dict[Call, str]] = {
    "publish": "log.append",
    "read": "log.read",
    "commit": "cursors.commit",
    "schedule": "schedule.add",
}
FOR_EVER: Final = 1 << 62


class Failed(OSError):
    """What a store raises that was told to fail: nobody can tell whether it has written."""


class Settled(NamedTuple):
    """What became of an event in a subscription, durably."""

    log_id: str
    subscription: str
    partition: int
    offset: int
    outcome: str
    number: int
    """In the order of all that happens; what became durable together has the same."""


class _Failing(NamedTuple):
    left: int
    written: bool


class Medium:
    """The store of a world."""

    def __init__(self, clock: Clock, limits: MemorySettings, faults: Faults, numbers: Iterator[int]) -> None:
        self.store: Store = MemoryStore(clock=clock, limits=limits)
        self.states = States(None)
        """What the projections of the world's bus have come to."""
        self.delayed = count()
        """Numbers delayed publishes, through all lives, so that no two of a moment are ordered by chance."""
        self._faults = faults
        self._numbers = numbers
        self.calls = 0
        """How often it was called, for whatever."""
        self.progress = 0
        """How often something was written, or failed."""
        self.appended: list[tuple[Partition, Range]] = []
        self.settled: list[Settled] = []
        self._failing: dict[str, _Failing] = {}
        self._deaf = 0
        """So many notifications to come get lost."""
        self._names: dict[str, str] = {}

    # --- what fails ---------------------------------------------------------------------------

    def fail(self, call: Call, times: int, *, written: bool) -> None:
        """Let the next calls of a kind fail: before they do anything, or when they have done it."""
        where = CALLS.get(call)
        if where is None:
            raise UsageError(f"what can fail is {', '.join(map(repr, CALLS))}, not {call!r}")
        if times < 1:
            raise UsageError(f"{times} failures make no sense: one, or more")
        self._failing[where] = _Failing(times, written)

    def lose_notifications(self, times: int | None) -> None:
        """Let so many notifications get lost, or all from now on."""
        self._deaf = FOR_EVER if times is None else times

    def heal(self) -> None:
        """Let nothing fail any more that was told to."""
        self._failing.clear()
        self._deaf = 0

    # --- what is called -----------------------------------------------------------------------

    def call(self, where: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the store, or fail."""
        self.calls += 1
        match where:
            case "cursors.commit":
                return self._commit(function, args[0])
            case "log.append" | "log.read" | "schedule.add":
                if where == "schedule.add":
                    args = ([self._with_partition(row) for row in args[0]], *args[1:])
                failing = self._next_failure(where, args)
                if failing is not None and not failing.written:
                    raise Failed(f"{where} was told to fail, and has done nothing")
                if where == "log.read":
                    self._check_read(*args[:2])
                answer = function(*args, **options)
                self._note(where, args, answer)
                if failing is not None:
                    raise Failed(f"{where} was told to fail, and has done its work")
                return answer
            case _:
                return function(*args, **options)

    def _next_failure(self, where: str, args: tuple[Any, ...]) -> _Failing | None:
        failing = self._failing.get(where)
        internal = bool(args) and isinstance(args[0], Partition) and self.name_of(args[0].log_id).startswith("_")
        if failing is None or internal:
            return None
        self.progress += 1
        if failing.left > 1:
            self._failing[where] = failing._replace(left=failing.left - 1)
        else:
            del self._failing[where]
        return failing

    def _with_partition(self, row: Scheduled) -> Scheduled:
        """Return a delayed publish as it is in every run; elsewhere the partition of one without a key is chance."""
        info = next((info for info in self.store.log.topics() if info.log_id == row.log_id), None)
        if row.event.key is not None or info is None:
            return row
        return msgspec.structs.replace(row, partition=number_in(row.id) % info.settings.partitions)

    def _check_read(self, partition: Partition, start: int) -> None:
        if self._fails(Point.READ, partition, start):
            raise Failed("a read was to fail here")

    def _fails(self, point: Point, partition: Partition, offset: int) -> bool:
        topic = self.name_of(partition.log_id)
        return not topic.startswith("_") and self._fault(Spot(point, topic, partition.number, offset)) is not None

    def _fault(self, spot: Spot) -> Kind | None:
        fault = self._faults.at(spot)
        if fault is None:
            return None
        self._faults.note(fault)
        self.progress += 1
        return fault.kind

    def _note(self, where: str, args: tuple[Any, ...], answer: Any) -> None:
        if where == "log.read":
            return
        self.progress += 1
        if where == "log.append":
            fresh = [each.offsets for each in answer if each.offsets is not None and not each.duplicate]
            self.appended += [(args[0], offsets) for offsets in fresh]

    def _commit(self, function: Callable[..., Any], commits: Sequence[Commit]) -> list[StoreError | None]:
        failing = self._next_failure("cursors.commit", ())
        if failing is not None and not failing.written:
            raise Failed("cursors.commit was told to fail, and has written nothing")
        kinds = [self._commit_fault(commit) for commit in commits]
        noted = [_Noted(commit) for commit, kind in zip(commits, kinds, strict=True) if kind is not Kind.COMMIT_REFUSED]
        answers: list[StoreError | None] = function([each.commit for each in noted]) if noted else []
        self.progress += 1
        for each, answer in zip(noted, answers, strict=True):
            if answer is None:
                self._note_settled(each.record)
        if failing is not None or Kind.COMMIT_UNANSWERED in kinds:
            raise Failed("a commit was to end without an answer")
        told = iter(answers)
        return [
            StoreError("a commit was to be refused here") if kind is Kind.COMMIT_REFUSED else next(told)
            for kind in kinds
        ]

    def _commit_fault(self, commit: Commit) -> Kind | None:
        for shard, offset in _settled_by(commit):
            spot = Spot(Point.COMMIT, self.name_of(shard.log_id), shard.partition, offset, shard.subscription)
            if (kind := self._fault(spot)) is not None:
                return kind
        return None

    def _note_settled(self, encoded: bytes) -> None:
        if not encoded:
            return
        number = next(self._numbers)
        record = decode_record(encoded)
        self.settled += [
            Settled(record.log_id, record.subscription, record.partition, offset, outcome, number)
            for outcome in record.outcomes
            for span in record.offsets(outcome)
            for offset in span
        ]

    def hears(self, partition: Partition) -> bool:
        """Say whether a notification arrives."""
        if self._deaf:
            self._deaf -= 1
            self.progress += 1
            return False
        return not self._fails(Point.HINT, partition, self.store.log.bounds(partition).stop - 1)

    # --- what is there ------------------------------------------------------------------------

    def name_of(self, log_id: str) -> str:
        """Return the topic's name; empty if it is deleted."""
        if log_id not in self._names:
            self._names.update({info.log_id: info.name for info in self.store.log.topics()})
        return self._names.get(log_id, "")

    def topic(self, name: str) -> TopicInfo | None:
        """Return a topic as it is stored."""
        return next((info for info in self.store.log.topics() if info.name == name), None)

    def event(self, partition: Partition, offset: int) -> StoredEvent | None:
        """Return an event; None if it was trimmed, or is a gap."""
        if offset not in self.store.log.bounds(partition):
            return None
        [found] = self.store.log.read(partition, offset, bytes_max=1, events_max=1)
        return next(iter(found)) if isinstance(found, Batch) else None

    def bury(self) -> None:
        """Free whatever the dead hold: a process that is killed is seen to be dead at once, and nothing is clean."""
        for lease in self.store.leases.held(""):
            self.store.leases.release(lease, clean=False)


def _settled_by(commit: Commit) -> list[tuple[Shard, int]]:
    """Return the last event that each cursor of a commit settles; none if it settles nothing."""
    found = [(cursor.shard, cursor.next_offset - 1) for cursor in commit.cursors]
    if commit.settling is not None:
        found.append((commit.settling.shard, commit.settling.settled.end - 1))
    return [(shard, offset) for shard, offset in found if offset >= 0]


class _Noted:
    """A commit, and the record that is written with it."""

    def __init__(self, commit: Commit) -> None:
        self.record = commit.settlement
        settling = commit.settling
        if settling is not None and settling.record is not None:
            make = settling.record

            def note(before: Cursor, after: Cursor) -> bytes:
                self.record = make(before, after)
                return self.record

            commit = msgspec.structs.replace(commit, settling=msgspec.structs.replace(settling, record=note))
        self.commit = commit


class _Port:
    """One port of a process's store."""

    def __init__(self, process: Process, name: str, port: Any) -> None:
        self._process = process
        self._name = name
        self._port = port

    def __getattr__(self, name: str) -> Any:
        function, where, process = getattr(self._port, name), f"{self._name}.{name}", self._process

        def call(*args: Any, **options: Any) -> Any:
            process.check_alive()
            return process.medium.call(where, function, args, options)

        call.__name__ = name
        return call


class _Notifications:
    """The notifier of a process."""

    def __init__(self, process: Process, notifier: Any) -> None:
        self._process = process
        self._notifier = notifier

    def notify(self, partition: Partition) -> None:
        """See `Notifier`."""
        self._notifier.notify(partition)

    def listen(self, callback: Callable[[Partition], None]) -> Callable[[], None]:
        """See `Notifier`."""
        process = self._process
        process.check_alive()

        def hear(partition: Partition) -> None:
            if not process.dead and process.medium.hears(partition):
                callback(partition)

        stop: Callable[[], None] = self._notifier.listen(hear)
        return stop


class Process:
    """The store as one process has it."""

    def __init__(self, medium: Medium) -> None:
        store = medium.store
        self.medium = medium
        self.dead = False
        self.url = store.url
        self.capabilities = store.capabilities
        self.log: Any = _Port(self, "log", store.log)
        self.cursors: Any = _Port(self, "cursors", store.cursors)
        self.parked: Any = _Port(self, "parked", store.parked)
        self.leases: Any = _Port(self, "leases", store.leases)
        self.schedule: Any = _Port(self, "schedule", store.schedule)
        self.manifests: Any = _Port(self, "manifests", store.manifests)
        self.notifier = _Notifications(self, store.notifier)
        self.outbox = store.outbox

    def check_alive(self) -> None:
        """Refuse the calls of the dead."""
        if self.dead:
            raise StoreClosed("this process has died")

    def close(self) -> None:
        """Do nothing: the medium stays."""
