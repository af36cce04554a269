"""The durable steps of a delivery, by name; and how a process is ended exactly between two of them.

In a process that may be killed, every call that changes the store goes through here. Each has a name for what it does,
is told to the campaign before it begins and when it has returned, and one at a time is made: so at the moment of a kill
nothing else is under way. What a commit does is seen by comparing it with what the store has.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar

from penstock.engine.suspects import MARKED
from penstock.rows import ParkedFilter
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.testing.campaigns.deliveries.script import AFTER, BEFORE, HANDLER, Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.batch import Batch
    from penstock.errors import StoreError
    from penstock.producers import Run
    from penstock.rows import Commit, Cursor, Lease, Parked, Partition, Subscription, TopicInfo, TopicSettings
    from penstock.stores.file.store import FileStore

R = TypeVar("R")

COMMITS: Final = {
    "commit: seek": "moved back",
    "commit: seek, with what waits aside": "moved while events wait",
    "commit: attempt of a suspect, alone": "after two deaths",
    "commit: attempt of a parked suspect, alone": "after two deaths with parked events",
    "commit: marks suspects": "after a death",
    "commit: marks parked suspects": "after a death with parked events",
    "commit: gives back an attempt": "after two deaths, handed over",
    "commit: gives back an attempt at a parked row": "after two deaths with parked events, handed over",
    "commit: parks a retry with its followers": "a long delay with followers",
    "commit: parks a retry": "a long delay",
    "commit: parks followers": "followers are read later",
    "commit: a parked row fails again": "two long delays",
    "commit: a parked row is dead": "a dead letter after a long delay",
    "commit: a parked row is done": "a long delay with followers",
    "commit: a replayed letter is done": "dead letters come back",
    "commit: dead letter": "a dead letter",
    "commit: a timed-out attempt": "a handler takes too long",
    "commit: a failed attempt": "a retry",
    "commit: progress": "nothing fails",
}
"""Of a commit that does several of these, the first counts."""
STEPS: Final = COMMITS | {
    "create the subscription": "nothing fails",
    "change the subscription": "another policy",
    "lease of the process": "nothing fails",
    "lease of the shard": "nothing fails",
    "renewal of the process's lease": "two long delays",
    "release of the shard": "handed over",
    "release of the process": "handed over",
    "lease of the ledger": "nothing fails",
    "renewal of the ledger's lease": "two long delays",
    "release of the ledger": "nothing fails",
    "ledger: create its topic": "nothing fails",
    "ledger: append": "a retry",
    "ledger: forget": "a retry",
    "purge of done rows": "a long delay with followers",
    "replay of dead letters": "dead letters come back",
}
"""Every step that a delivery makes, and a scene that makes it."""

CHANGING: Final = {
    "log": ("create_topic", "delete_topic", "append", "trim"),
    "cursors": ("put_subscription", "delete_subscription", "commit", "forget_settlements"),
    "parked": ("stamp", "replay", "purge"),
    "leases": ("acquire", "acquire_some", "renew", "release", "release_some"),
    "schedule": ("add", "cancel", "claim", "done"),
    "manifests": ("prepare", "finish", "forget"),
}
"""Every call that changes a store, by port."""
_LEASES: Final = {"shard": "the shard", "process": "the process", "ledger": "the ledger"}
_RENEWALS: Final = {"process": "renewal of the process's lease", "ledger": "renewal of the ledger's lease"}


# --- what is told -----------------------------------------------------------------------------


class Doing(NamedTuple):
    """A step is about to begin."""

    step: str
    changes: tuple[object, ...] = ()
    """What will be told of it when it is done: nobody hears that of a process that is killed in the middle."""


class Ends(NamedTuple):
    """The process ends itself here, or is frozen."""

    fault: Fault
    step: str


class Took(NamedTuple):
    """The lease of a shard was acquired."""

    partition: int
    lease: str
    epoch: int


class Row(NamedTuple):
    """A parked row, as a commit writes it."""

    offset: int
    state: str
    attempts: int
    replay: int


class Wrote(NamedTuple):
    """A commit was answered."""

    partition: int
    cursor: tuple[int, bytes, dict[int, int], int, int]
    """Where it is, what is settled ahead of it, attempts, generation, and number of the last record."""
    rows: list[Row]
    record: bytes
    lease: str
    epoch: int
    """Of the lease that this process has, or believes to have; 0 for a seek, which needs none."""
    error: str
    """The name of the refusal's class; empty if it was written."""


class Purged(NamedTuple):
    """Rows that are done were removed."""

    partition: int
    offsets: list[int]


class Revived(NamedTuple):
    """Dead letters were brought back."""

    partition: int
    offsets: list[int]


# --- names ------------------------------------------------------------------------------------


class Failed(NamedTuple):
    """What failed in this process, by partition and offset."""

    said: set[tuple[int, int]]
    late: set[tuple[int, int]]


def name_of_rows(rows: Iterable[tuple[Parked, Parked | None]]) -> set[str]:
    """Return the names of what a commit does to parked rows, each given as it will be and as it was."""
    found = set()
    new = [row for row, before in rows if row.state == "waiting" and not _waits(before)]
    retries = [row for row in new if row.attempts]
    if retries:
        lanes = {row.lane for row in retries}
        followed = any(row.lane in lanes for row in new if not row.attempts)
        found.add(f"commit: parks a retry{' with its followers' if followed else ''}")
    elif new:
        found.add("commit: parks followers")
    for row, before in rows:
        if row.state == "dead":
            found.add("commit: a parked row is dead" if _waits(before) else "commit: dead letter")
        elif row.state == "done":
            found.add("commit: a replayed letter is done" if row.replay else "commit: a parked row is done")
        elif before is not None and _waits(before):
            found.add(_name_of_change(row, before))
    return found


def _waits(row: Parked | None) -> bool:
    return row is not None and row.state == "waiting"


def _name_of_change(row: Parked, before: Parked) -> str:
    if row.attempts < before.attempts:
        return "commit: gives back an attempt at a parked row"
    if row.due_at == MARKED:
        if row.attempts > before.attempts:
            return "commit: attempt of a parked suspect, alone"
        return "commit: marks parked suspects"
    return "commit: a parked row fails again"


def name_of_attempts(cursor: Cursor, before: Cursor, failed: Failed) -> set[str]:
    """Return the names of what a commit does to attempts."""
    found = set()
    partition = cursor.shard.partition
    for offset, attempts in cursor.attempts.items():
        was = before.attempts.get(offset)
        place = (partition, offset)
        if was is None and attempts == 0:
            found.add("commit: marks suspects")
        elif attempts > (was or 0):
            if place in failed.late:
                found.add("commit: a timed-out attempt")
            else:
                found.add(f"commit: {'a failed attempt' if place in failed.said else 'attempt of a suspect, alone'}")
        elif was is not None and attempts < was:
            found.add("commit: gives back an attempt")
    return found


# --- in the process ---------------------------------------------------------------------------


class Steps:
    """Takes the place of what changes a store, names each call, and ends the process where it is told to."""

    def __init__(self, store: FileStore, tell: Callable[[object], None], fault: Fault | None) -> None:
        self._store = store
        self._tell = tell
        self._fault = fault
        self._came = 0
        self.armed = True
        """Whether it is counted how often the process comes where it is ended."""
        self._turn = threading.Lock()
        self._epochs: dict[int, tuple[str, int]] = {}
        self.failed = Failed(set(), set())
        self._ledger = ""
        # Taken before they are replaced: what is made here must not be told as a step.
        self._log, self._cursors, self._parked, self._leases = store.log, store.cursors, store.parked, store.leases
        self._append, self._create = store.log.append, store.log.create_topic
        self._commit, self._put = store.cursors.commit, store.cursors.put_subscription
        self._forget = store.cursors.forget_settlements
        self._purge, self._replay = store.parked.purge, store.parked.replay
        self._acquire, self._renew = store.leases.acquire, store.leases.renew
        self._release, self._release_some = store.leases.release, store.leases.release_some

    NAMED: ClassVar = {
        "log.create_topic", "log.append", "cursors.put_subscription", "cursors.commit", "cursors.forget_settlements",
        "parked.replay", "parked.purge", "leases.acquire", "leases.renew", "leases.release", "leases.release_some",
    }  # fmt: skip
    """Those that a delivery makes."""

    def wrap(self) -> None:
        """Be asked from now on."""
        for port, names in CHANGING.items():
            for name in names:
                mine = f"{port}.{name}" in self.NAMED
                setattr(getattr(self._store, port), name, getattr(self, name) if mine else self._nameless(name))

    def _nameless(self, name: str) -> Callable[..., None]:
        """Return what stands for a call that no delivery makes."""

        def refuse(*_args: object, **_options: object) -> None:
            self._tell(Doing(f"{name}, which has no name"))
            raise NotImplementedError(name)

        return refuse

    def reach_handler(self) -> None:
        """Be where a handler begins."""
        with self._turn:
            self._come(HANDLER, BEFORE)

    def _step(
        self,
        step: str,
        work: Callable[[], R],
        told: Callable[[R], Iterable[object]] = lambda _: (),
        changes: Iterable[object] = (),
    ) -> R:
        """Make a step; the turn is held."""
        self._tell(Doing(step, tuple(changes)))
        self._come(step, BEFORE)
        answer = work()
        for message in told(answer):
            self._tell(message)
        self._come(step, AFTER)
        return answer

    def _come(self, step: str, side: str) -> None:
        fault = self._fault
        if (
            fault is None
            or not self.armed
            or side != fault.side
            or (fault.step or step) != step
            or (not fault.step and step == HANDLER)
        ):
            return
        self._came += 1
        if self._came == fault.comes:
            self._tell(Ends(fault, step))
            if fault.freeze:
                # To this very thread, so that it stops here and not a moment later.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    # --- the log ------------------------------------------------------------------------------

    def create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        with self._turn:
            step = "ledger: create its topic" if name == LEDGER else f"create topic {name!r}, which has no name"
            topic = self._step(step, lambda: self._create(name, settings))
            self._ledger = topic.log_id
            return topic

    def append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Any]:
        with self._turn:
            step = "ledger: append" if partition.log_id == self._ledger else "an append, which has no name"
            return self._step(step, lambda: self._append(partition, batch, runs))

    # --- cursors ------------------------------------------------------------------------------

    def put_subscription(
        self, subscription: Subscription, cursors: Sequence[Cursor] = (), *, existing: bool = False
    ) -> None:
        with self._turn:
            step = f"{'create' if cursors else 'change'} the subscription"
            self._step(step, lambda: self._put(subscription, cursors, existing=existing))

    def forget_settlements(self, up_to: int) -> None:
        with self._turn:
            self._step("ledger: forget", lambda: self._forget(up_to))

    def commit(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        with self._turn:
            names = set().union(*(self._names_of(commit) for commit in commits))
            step = next((name for name in COMMITS if name in names), f"{sorted(names)}, which have no name")
            return self._step(
                step,
                lambda: self._commit(commits),
                lambda answers: self._wrote(step, commits, answers),
                self._wrote(step, commits, [None] * len(commits)),
            )

    def _names_of(self, commit: Commit) -> set[str]:
        found = {"commit: progress"}
        for cursor in commit.cursors:
            shard = cursor.shard
            known = self._cursors.load(shard.log_id, shard.subscription)
            before = next(each for each in known if each.shard == shard)
            if cursor.generation > before.generation:
                return {f"commit: seek{', with what waits aside' if commit.parked else ''}"}
            found |= name_of_attempts(cursor, before, self.failed)
        if commit.parked:
            shard = commit.parked[0].shard
            wanted = ParkedFilter(
                log_id=shard.log_id,
                subscription=shard.subscription,
                partition=shard.partition,
                offsets=frozenset(row.offset for row in commit.parked),
            )
            rows = {row.offset: row for row in self._parked.page(wanted, limit=len(commit.parked))}
            found |= name_of_rows([(row, rows.get(row.offset)) for row in commit.parked])
        return found

    def _wrote(self, step: str, commits: Sequence[Commit], answers: Sequence[StoreError | None]) -> Iterable[Wrote]:
        for commit, answer in zip(commits, answers, strict=True):
            [cursor] = commit.cursors
            partition = cursor.shard.partition
            # Whatever fence it carries: it is written by whoever has this lease, or believes so.
            lease, epoch = ("", 0) if step.startswith("commit: seek") else self._epochs[partition]
            yield Wrote(
                partition,
                (cursor.next_offset, cursor.settled, dict(cursor.attempts), cursor.generation, cursor.number),
                [Row(row.offset, row.state, row.attempts, row.replay) for row in commit.parked],
                commit.settlement,
                lease,
                epoch,
                "" if answer is None else type(answer).__name__,
            )

    # --- parked rows --------------------------------------------------------------------------

    def purge(self, filter: ParkedFilter) -> int:
        with self._turn:
            purged = [Purged(*_meant(filter))]
            return self._step("purge of done rows", lambda: self._purge(filter), lambda _: purged, purged)

    def replay(self, filter: ParkedFilter, now: int, *, limit: int | None = None) -> int:
        with self._turn:
            revived = [Revived(*_meant(filter))]
            return self._step(
                "replay of dead letters",
                lambda: self._replay(filter, now, limit=limit),
                lambda count: revived if count else (),  # somebody else may have brought them back already
                revived,
            )

    # --- leases -------------------------------------------------------------------------------

    def acquire(self, name: str, owner: str, seconds: float, *, under: Lease | None = None) -> Lease | None:
        with self._turn:
            step = f"lease of {self._whose(name)}"
            return self._step(step, lambda: self._acquire(name, owner, seconds, under=under), self._took)

    def _took(self, lease: Lease | None) -> Iterable[Took]:
        if lease is not None and lease.name.startswith("shard/"):
            partition = int(lease.name.rpartition("/")[2])
            self._epochs[partition] = (lease.name, lease.epoch)
            yield Took(partition, lease.name, lease.epoch)

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        with self._turn:
            [kind] = {lease.name.partition("/")[0] for lease in leases}
            step = _RENEWALS.get(kind, f"renewal of {kind}, which has no name")
            return self._step(step, lambda: self._renew(leases, seconds))

    def _whose(self, name: str) -> str:
        """Return what a lease is of."""
        return _LEASES.get(name.partition("/")[0], f"{name}, which has no name")

    def release(self, lease: Lease, *, clean: bool = True) -> None:
        with self._turn:
            step = f"release of {self._whose(lease.name)}"
            self._step(step, lambda: self._release(lease, clean=clean))

    def release_some(self, leases: Sequence[Lease], *, clean: bool = True) -> list[Lease]:
        with self._turn:
            [whose] = {self._whose(lease.name) for lease in leases}
            return self._step(f"release of {whose}", lambda: self._release_some(leases, clean=clean))

    def epoch(self, partition: int) -> int:
        """Return the epoch that this process has of a shard."""
        return self._epochs[partition][1]


def _meant(filter: ParkedFilter) -> tuple[int, list[int]]:
    assert filter.partition is not None
    assert filter.offsets is not None
    return filter.partition, sorted(filter.offsets)
