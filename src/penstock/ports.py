"""The ports: what a store must do, and what a bus talks to.

Each docstring is the contract, and `penstock.testing.conformance` tests it. What holds for all of them:

* **Synchronous.** Spark workers, tools and the simulator use a store directly. A call may block on I/O;
  the bus calls it from a thread unless the store's capabilities say that it never blocks.
* **Thread-safe.** Every method may be called from any thread. Fork safety is a store's own matter.
* **Durable on return**, as far as the store is durable at all: a process killed right after the return, and
  a power cut, lose nothing of it. What raised a `PenstockError` was not written; only `append` can be
  *unknown*, when it ends with any other error.
* **All or nothing.** No call leaves a part of itself behind.
* **Keyed by log id, never by name.** A topic that is deleted and created anew is another log; a handle of
  the old one gets `TopicDeleted`.
* **Bounded.** What grows has a limit, and beyond it `StoreFull` is raised before anything is written.
* **Closing** flushes nothing, because nothing that returned was left unflushed; afterwards every call
  raises `StoreClosed`, but for `Notifier.notify`, which never raises. Closing twice is allowed.
* **A partition that a topic does not have** is a `UsageError`, and nothing of the call was done.

Times are microseconds since 1970 UTC where an event or a person sees them, and seconds of the store's own
monotonic clock for leases, so that a jump of the wall clock expires nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.batch import Batch
from penstock.errors import StoreError
from penstock.metrics import Reading
from penstock.offsets import Gap, Range
from penstock.producers import Run
from penstock.rows import (
    Appended,
    Commit,
    Cursor,
    Fence,
    Lease,
    Manifest,
    Parked,
    ParkedFilter,
    ParkedState,
    Partition,
    Scheduled,
    Settlement,
    Staged,
    StoreState,
    Subscription,
    Told,
    TopicInfo,
    TopicSettings,
    Waiting,
)

# --- the log ----------------------------------------------------------------------------------


class Heads(Protocol):
    """The ends of many partitions, to be asked again and again."""

    def read(self) -> npt.NDArray[np.int64]:
        """Return the readable end of each partition, in their order; -1 for one that was deleted.

        Takes no lock and never blocks: it is what the lag monitor looks at all the time.
        """


class Log(Protocol):
    """Topics, and their events in order: dense offsets 0, 1, 2, … per partition, for ever."""

    def create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        """Create a topic, or return it if it exists with these settings; else `TopicMismatch`.

        Another retention or compression is no mismatch: it is the topic's from then on.
        """

    def delete_topic(self, log_id: str) -> None:
        """Delete a topic with its events, subscriptions, all their state, and what is scheduled for it.

        `TopicDeleted` if it is gone.
        """

    def topics(self) -> list[TopicInfo]:
        """Return all topics by name, internal ones included."""

    def append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        """Append the batch's events, which `runs` cover exactly and in order; one answer per run.

        The runs that are accepted get consecutive offsets, in their order, and become readable together;
        then the store's notifier is told. A run that was stored before is not stored again: it is answered
        with its first offsets and `duplicate`. Sequences may have holes, and a hole may be filled later; a
        sequence is stored at most once. Refused, with nothing written for that run:

        * `ProducerConflict`: a sequence is taken by other content, or a run overlaps one in part;
        * `ProducerExpired`: nobody can tell whether it is a repeat. Either its process is not known here and
          was born more than `PRODUCER_IDLE_SECONDS` ago, so it may have been forgotten; or it has more than
          `PRODUCER_HOLES_MAX` holes, and this sequence is below those still known. A lasting producer (see
          `penstock.producers`) is never forgotten;
        * `ProducerFenced`: its epoch is lower than the producer's last.
        """

    def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        """Read from offset `start` on; what comes first begins exactly there, and nothing is left out.

        Returns at least one event if there is one, then as many as fit, `bytes_max` being the sum of their
        `Batch.sizes`. Empty at the end of the log.
        `Trimmed` below its beginning, `BeyondEnd` above its end; a client is never moved in silence.
        The result of a range never changes. Only durable events are returned.
        """

    def heads(self, partitions: Sequence[Partition]) -> Heads:
        """Return a reader of the ends of these partitions."""

    def bounds(self, partition: Partition) -> Range:
        """Return the offsets that can be read now."""

    def find_time(self, partition: Partition, time_us: int) -> int:
        """Return where to begin reading so as to miss nothing appended at or after this time.

        That is the first event with such a time, or the end of the log. Events of one append share their
        time. If the clock was set back meanwhile, some events behind it may carry an earlier time.
        """

    def trim(self, partition: Partition, before: int, *, force: bool = False) -> int:
        """Remove events below `before`, perhaps fewer, and return the new beginning.

        `TrimRefused` if a protected subscription has not passed them, unless forced: one of its cursors of
        this partition is below `before`, or it has none here. `BeyondEnd` above the end.
        """


# --- subscriptions ----------------------------------------------------------------------------


class Cursors(Protocol):
    """Subscriptions and their progress."""

    def put_subscription(
        self, subscription: Subscription, cursors: Sequence[Cursor] = (), *, existing: bool = False
    ) -> None:
        """Create a subscription with its first cursors, as one; or replace what it says of itself.

        With `existing` it is only replaced: `UnknownSubscription` if it is not there, so that a change of one that is
        deleted meanwhile does not bring it back.

        Give a cursor for every shard that it will have: retention protects what a cursor has not passed, and
        a shard without one is nobody's. Cursors that are there already stay as they are.
        """

    def delete_subscription(self, log_id: str, name: str) -> bool:
        """Delete a subscription with its cursors and parked rows; False if there is none."""

    def subscriptions(self, log_id: str | None = None) -> list[Subscription]:
        """Return the subscriptions of a log, or all, by log id and name."""

    def subscription(self, log_id: str, name: str) -> Subscription | None:
        """Return one subscription, or None; costs the same however many there are."""

    def revision(self) -> int:
        """Return a number that changes with what others than a shard's owner may do to it.

        It is another one after every subscription that was put or deleted (also with its topic), every commit that
        raised a cursor's generation (a shard without a cursor is at 0), and every `stamp`, `replay` and `purge` of
        parked rows that changed one; and the same after all other commits. It is read without waiting for anybody, so
        that it can be asked again and again.
        """

    def load(self, log_id: str, subscription: str) -> list[Cursor]:
        """Return all cursors of a subscription, by slot and partition; empty if none was committed.

        An error is raised, never read as "start from the beginning".
        """

    def commit(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        """Write each commit as a whole; together they cost one sync. One answer per commit.

        What was settled beside other owners is added to the cursor as `penstock.settling.settle` says, and what is
        claimed with it.

        A refused commit is answered with its error, nothing of it is written, and the others go on:
        `Fenced` for a stale epoch of any of its leases, `StaleCursor` for a cursor that would move back within its
        generation or to a lower one, `BeyondEnd` for one past the end of the log, `StoreFull` for parked
        rows over the limit, `TopicDeleted` and `UnknownSubscription` for what is gone.
        A cursor that goes to a higher generation must follow the one that is there: `StaleCursor` if its number
        is below that one's, or not above it though the commit has a settlement record.
        """

    def settlements(self, limit: int) -> list[Settlement]:
        """Return the oldest settlement records that were not forgotten, in the order of their commits."""

    def forget_settlements(self, up_to: int) -> None:
        """Drop records up to this number: the ledger has them."""


class ParkedRows(Protocol):
    """Parked events: looked at, brought back, removed. They are added by `Cursors.commit` alone.

    A log or subscription that is gone has no rows, and that is no error.
    """

    def page(
        self,
        filter: ParkedFilter,
        *,
        after: tuple[int, int] | None = None,
        limit: int = 100,
    ) -> list[Parked]:
        """Return rows ordered by (partition, offset), beginning after the given pair."""

    def places(
        self, filter: ParkedFilter, *, after: tuple[int, int] | None = None, limit: int = 100
    ) -> list[tuple[int, int]]:
        """Return the partition and offset of each row that `page` would return, without looking at its event."""

    def count(self, filter: ParkedFilter) -> dict[ParkedState, int]:
        """Return how many rows there are in each state; all three states are keys."""

    def due(self, filter: ParkedFilter, now: int, *, limit: int = 100) -> list[Parked]:
        """Return waiting rows whose time has come, by due time and then position."""

    def waiting(self, filter: ParkedFilter) -> list[Waiting]:
        """Return every waiting row that is meant, due or not, ordered by (partition, offset), without its event.

        A row that waits from the beginning of the call to its end is there once.
        """

    def stamp(self, filter: ParkedFilter, job: str) -> int:
        """Mark exactly these rows with a job, replacing an earlier one; return how many."""

    def replay(self, filter: ParkedFilter, now: int, *, limit: int | None = None) -> int:
        """Turn dead rows into waiting ones, due now, attempts 0 and `replay` one higher; return how many.

        They are marked with no job any more: one that dies again is not brought back by the same job once more. With a
        limit, the first ones by (partition, offset).
        """

    def purge(self, filter: ParkedFilter) -> int:
        """Remove rows that are dead or done, never waiting ones; return how many."""


# --- leases -----------------------------------------------------------------------------------


class Leases(Protocol):
    """Who may act; every acquisition has a higher epoch than all before it, for ever.

    A lease is held until it expires, or *under* another one: for as long as that one is held with the epoch that it
    had. So the renewal of one lease keeps any number of others. When the lease above is released, expires, or is
    acquired anew, by whomever, all that are under it are free at once, and not clean.
    """

    def acquire(self, name: str, owner: str, seconds: float, *, under: Lease | None = None) -> Lease | None:
        """Take the lease if it is free, expired, or the same owner's; else None.

        `under`: hold it under that lease; `seconds` does not matter then. `LeaseLost` if that one is not held with
        this epoch, whoever holds the other; `UsageError` if it is itself under another, or the same.
        """

    def acquire_some(self, names: Sequence[str], owner: str, most: int, *, under: Lease) -> list[Lease]:
        """Take those of these leases that nobody holds, in this order and at most so many, in one step.

        They are held under another one, as with `acquire`; what this owner holds already counts as held.
        """

    def renew(self, leases: Sequence[Lease], seconds: float) -> list[Lease]:
        """Prolong those that are still held, in one step; those missing from the answer are lost.

        One that is under another is not changed by it, only answered: renew the one above.
        """

    def release(self, lease: Lease, *, clean: bool = True) -> None:
        """Give it back; `LeaseLost` if it is not held any more. `clean`: nothing is in flight.

        One that has merely expired, or lost the one above, can still be given back if nobody took it since.
        """

    def release_some(self, leases: Sequence[Lease], *, clean: bool = True) -> list[Lease]:
        """Give back as many as can be, in one step; those missing from the answer are not held any more."""

    def holder(self, name: str) -> Lease | None:
        """Return the lease as it is now held, or None."""

    def held(self, prefix: str) -> list[Lease]:
        """Return all leases that are held now and whose names begin with this, by name."""

    def revision(self) -> int:
        """Return a number that is another one after every acquisition and release, and the same after all else.

        So one that expires, or whose owner dies, does not change it. It is read without waiting for anybody.
        """


# --- entrances and sinks ----------------------------------------------------------------------


class Schedule(Protocol):
    """Delayed publishes. A crash between claim and `done` is answered by claiming again."""

    def add(self, rows: Sequence[Scheduled]) -> None:
        """Store them all; an id that is there already is left as it is."""

    def cancel(self, id: str) -> bool:
        """Remove one that was not claimed yet; False if it was, or is not there."""

    def page(self, *, after: tuple[int, str] | None = None, limit: int = 100) -> list[Scheduled]:
        """Return rows ordered by (due_at, id), beginning after the given pair."""

    def next_due(self) -> int | None:
        """Return when the first row is due, claimed ones included, or None."""

    def pending(self) -> int:
        """Return how many rows there are, claimed ones included; costs the same however many."""

    def claim(self, now: int, limit: int, fence: Fence) -> list[Scheduled]:
        """Return rows that are due by (due_at, id), each with a lasting producer and a sequence of its own.

        They are the same at every call. `Fenced` if the lease's epoch is stale.
        """

    def done(self, ids: Sequence[str], fence: Fence) -> None:
        """Remove claimed rows: they are in the log. `Fenced` if the lease's epoch is stale."""


class Outbox(Protocol):
    """Publishing inside the caller's own transaction."""

    @property
    def producer(self) -> bytes:
        """The lasting producer of all that leaves this outbox, to whichever partitions."""

    def stage(self, transaction: Any, rows: Sequence[Staged]) -> None:
        """Add rows inside the caller's transaction: they exist if and when it commits."""

    def claim(self, limit: int, fence: Fence) -> list[Staged]:
        """Return the oldest committed rows by sequence, the same at every call until `done`.

        `Fenced` if the lease's epoch is stale.
        """

    def done(self, sequences: Sequence[int], fence: Fence) -> None:
        """Remove claimed rows: they are in the log. `Fenced` if the lease's epoch is stale."""

    def pending(self) -> int:
        """Return how many committed rows wait."""


class Manifests(Protocol):
    """The memory of exactly-once sinks: of several attempts at a batch, the first manifest wins.

    A sink belongs to one query at a time, and the batches of a query come in rising order. Of each sink
    every manifest is kept that is not done, and of those that are done the newest `rows.MANIFESTS_KEPT`,
    by the order in which they were prepared, whichever query they are of. Older ones are forgotten when a
    new one is prepared; a batch of the sink's query that may be forgotten is refused, never taken for new.
    """

    def prepare(self, manifest: Manifest, *, adopt: bool = False) -> Manifest:
        """Store the manifest, or return the one that was first for this sink, query and batch.

        `SinkConflict` if the sink belongs to another query, unless adopted; the former owner is then
        refused, also with batches that it had prepared. `SinkConflict` if the batch is not remembered and
        below the highest one that is remembered of its query: it was done and is forgotten, or the query's
        checkpoint is older than the sink. Adopting does not help there; a query that adopts a sink which
        it owned before is judged in the same way, by what is still remembered of it. If nothing is, all its
        batches are new.

        All of it happens, or nothing: also adopting, and forgetting what is old.
        """

    def finish(self, sink: str, query: str, batch: int) -> None:
        """Mark it done: its events are in the log. Repeating it changes nothing.

        The query need not own the sink any more. `UsageError` if it was never prepared, or is forgotten.
        """

    def unfinished(self) -> list[Manifest]:
        """Return the manifests that are prepared and not done, of former owners too, oldest first: finish them."""

    def last(self, sink: str) -> Manifest | None:
        """Return the manifest of the highest batch of the sink's present query, or None."""

    def forget(self, sink: str) -> None:
        """Remove the sink and everything that is remembered of it: its name is free for any query and batch.

        `UsageError` if one of its manifests is not done, and nothing is removed. A sink that is not there is
        no error.
        """


# --- waking up --------------------------------------------------------------------------------


class Notifier(Protocol):
    """A hint that a partition has grown. It may be lost, repeated or merged; nothing rests on it."""

    def notify(self, partition: Partition) -> None:
        """Tell all listeners, those of other processes too; never blocks, never raises."""

    def listen(self, callback: Callable[[Partition], None]) -> Callable[[], None]:
        """Call back on every hint, from any thread, until the returned function is called."""


# --- the whole --------------------------------------------------------------------------------


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a store can do beyond the ports; conformance tests of what it cannot are skipped by name."""

    durable: bool
    """What was written is there after closing and opening the same URL."""
    shared: bool
    """Several processes may open the same URL."""
    blocking: bool
    """Calls may wait for I/O, so an event loop must not make them itself."""


@runtime_checkable
class Store(Protocol):
    """What remembers: one of each port over the same state."""

    @property
    def url(self) -> str:
        """What it was opened with, without secrets."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do beyond the ports."""

    @property
    def log(self) -> Log:
        """Topics and events."""

    @property
    def cursors(self) -> Cursors:
        """Subscriptions and their progress."""

    @property
    def parked(self) -> ParkedRows:
        """Retries that wait, and dead letters."""

    @property
    def leases(self) -> Leases:
        """Who may act."""

    @property
    def schedule(self) -> Schedule:
        """Delayed publishes."""

    @property
    def outbox(self) -> Outbox | None:
        """Publishing inside a transaction; None if the store has none of its own."""

    @property
    def manifests(self) -> Manifests:
        """The memory of exactly-once sinks."""

    @property
    def notifier(self) -> Notifier | None:
        """The fast path of waking up; without one, heartbeats find everything."""

    def close(self) -> None:
        """Give up files, sockets and threads."""


@runtime_checkable
class Measured(Protocol):
    """What a store may do besides: tell of its medium. One that does not is not asked."""

    def readings(self) -> list[Reading]:
        """Return what it has counted and how its medium is, by names of `penstock.metrics.CATALOGUE`."""


@runtime_checkable
class Inspectable(Protocol):
    """What a store may have besides: it can tell how it does itself. Health shows it where it is there."""

    def inspect(self) -> StoreState:
        """Return how the store does, as far as that is cheap: nothing is read in full, and nothing is changed."""


@runtime_checkable
class Telling(Protocol):
    """What a store may do besides: those who have it open tell each other what they do. Nothing rests on it.

    What is told is small, need not outlive anything, and costs no sync.
    """

    def tell(self, who: str, document: bytes) -> None:
        """Let this be what others hear of `who`, as a whole and instead of what was told before; empty: nothing.

        `UsageError` for more than `rows.TOLD_BYTES_MAX` bytes, and for more than `rows.TELLERS_MAX` who tell something
        through this opening.
        """

    def told(self) -> list[Told]:
        """Return what is told now by all who have the store open, this opening too, by `who`.

        What was told through an opening that is closed, or whose process has died, is not there any more. What cannot
        be read is left out.
        """


class Backend(Protocol):
    """What a bus talks to: a store in this process, or a daemon. Never blocks the event loop."""

    async def open(self) -> None:
        """Connect; called once, before anything else."""

    async def close(self) -> None:
        """Disconnect; called once, after everything else has returned."""

    async def create_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        """See `Log.create_topic`."""

    async def topics(self) -> list[TopicInfo]:
        """See `Log.topics`."""

    async def append(self, partition: Partition, batch: Batch, runs: Sequence[Run]) -> list[Appended]:
        """See `Log.append`; a cancelled call may still have written."""

    async def read(
        self, partition: Partition, start: int, *, bytes_max: int, events_max: int | None = None
    ) -> list[Batch | Gap]:
        """See `Log.read`."""

    async def bounds(self, partition: Partition) -> Range:
        """See `Log.bounds`."""

    async def find_time(self, partition: Partition, time_us: int) -> int:
        """See `Log.find_time`."""

    async def schedule_add(self, rows: Sequence[Scheduled]) -> None:
        """See `Schedule.add`; a cancelled call may still have stored them."""

    async def schedule_cancel(self, id: str) -> bool:
        """See `Schedule.cancel`."""

    async def schedule_page(self, *, after: tuple[int, str] | None = None, limit: int = 100) -> list[Scheduled]:
        """See `Schedule.page`."""
