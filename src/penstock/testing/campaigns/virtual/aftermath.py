"""After a crash: opens what is left of a store, and holds it against what its life was told.

What a machine must show after any crash:

* it opens, by itself, and `verify` finds nothing wrong;
* everything that was acknowledged is there, with the same bytes at the same offsets; nothing that was refused is;
  nothing that nobody published is; and what was read once is read again after the next crash;
* topics, cursors, parked rows, manifests and leases are as they were acknowledged; an epoch never comes again;
* what was scheduled or staged enters the log, once;
* no data loss is declared, because there was none;
* it goes on: what was under way can be sent again and is stored once, and new events are taken.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.offsets import Gap
from penstock.rows import ParkedFilter, Partition
from penstock.stores.file.repair import apply, plan
from penstock.stores.file.store import FileStore
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.virtual.life import (
    SMALL,
    SUBSCRIPTION,
    Act,
    Cancelled,
    Committed,
    Created,
    Deleted,
    Entering,
    Granted,
    MachineOutbox,
    ParkedOne,
    Prepared,
    Published,
    TrimmedBelow,
    run_mover,
    run_scheduler,
    send,
)
from penstock.testing.checker import check
from penstock.testing.journal import Journal, Outcome
from penstock.testing.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.batch import Batch
    from penstock.testing.machine import Machine

READ_BYTES = 1 << 26
REPAIRS_MAX = 3
ROUNDS = 3
"""So often the loops may run until everything has entered the log."""

Damaged = tuple[Partition, int, int]
"""Offsets whose bytes were damaged on purpose: from the first to the one behind the last."""
Seen = tuple[Partition, int, list[bytes]]
"""What was read: the first offset, and the payloads from there on."""


class Aftermath:
    """What is left of a life, on a machine that has crashed."""

    def __init__(
        self,
        machine: Machine,
        history: Sequence[Act],
        seen: Sequence[Seen] = (),
        *,
        trusts_syncs: bool = True,
        damages: Sequence[Damaged] = (),
    ) -> None:
        """Begin; without trust in syncs, what was acknowledged may be lost; what is damaged is repaired first."""
        self._machine = machine
        self._trusts_syncs = trusts_syncs
        self._intact = trusts_syncs and not damages
        """Whether nothing at all may be lost."""
        self.history = [*history]
        """With what was done since."""
        self._journal = Journal()
        self.problems: list[str] = []
        self.seen = [*seen]
        self.before_closing: Callable[[], None] = lambda: None
        """Called when the store has gone on, and nothing was tidied up yet."""
        for act in history:
            doubted = isinstance(act, Published) and not trusts_syncs
            (replace(act, outcome=Outcome.UNKNOWN) if doubted else act).tell(self._journal)
        for partition, offset, payloads in seen:
            self._stored(partition, offset, payloads)
        for partition, start, stop in damages:
            self._journal.damaged(*partition, start, stop)
            self._journal.reported(*partition, start, stop)

    def examine(self, *, goes_on: bool = True) -> list[str]:
        """Return what is wrong, in words; nothing, as it should be. Going on is most of the work."""
        with silence():
            try:
                self._examine(goes_on=goes_on)
            except Exception as error:  # noqa: BLE001 - whatever it is, it should not be
                where = traceback.extract_tb(error.__traceback__)[-1]
                self.problems.append(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")
        self.problems += [
            f"{violation.invariant}, {violation.where}: {violation.what}" for violation in check(self._journal)
        ]
        return self.problems

    def _examine(self, *, goes_on: bool) -> None:
        if not self._intact:
            self._repair()
        store = FileStore(ROOT, settings=SMALL, platform=self._machine.platform)
        try:
            self._read(store)
            self._check_cursors(store)
            if self._trusts_syncs:
                self._check_topics(store)
                self._check_parked(store)
                self._check_manifests(store)
            if goes_on:
                report = verify(ROOT, self._machine.platform)
                if not report.ok:
                    self.problems.append(f"verify: {report.damages} {report.state}")
                self._check_leases(store)
                self._go_on(store)
                if self._intact:
                    self._enter(store)
                self._read(store)
                self.before_closing()
        finally:
            store.close()

    def _repair(self) -> None:
        """Repair what is damaged, as a person would: look, do, open, and look again.

        That a log was longer may be known to cursors alone, which are asked when it is opened.
        """
        for _ in range(REPAIRS_MAX):
            apply(ROOT, self._machine.platform, plan(ROOT, self._machine.platform), settings=SMALL)
            store = FileStore(ROOT, settings=SMALL, platform=self._machine.platform)
            for topic in store.log.topics():
                for partition in topic.partitions:
                    store.log.bounds(partition)
            store.close()
        if left := plan(ROOT, self._machine.platform):
            self.problems.append(f"after {REPAIRS_MAX} repairs there is still something to repair: {left}")

    def _told(self, kind: type[Act], log_id: str) -> bool:
        """Say whether something of this kind was begun with a log."""
        for act in self.history:
            if isinstance(act, kind):
                of = act.log_id if isinstance(act, Deleted) else getattr(act, "partition", ("",))[0]
                if of == log_id:
                    return True
        return False

    # --- looking --------------------------------------------------------------------------------

    def _read(self, store: FileStore) -> None:
        self._journal.restarted()  # what was read before must be read again
        topics = {topic.log_id: topic for topic in store.log.topics()}
        for act in self.history:
            if isinstance(act, Deleted) and act.log_id not in topics:
                self._journal.deleted(act.log_id)  # under way, and done since
        for topic in topics.values():
            for partition in topic.partitions:
                bounds = store.log.bounds(partition)
                self._journal.bounds(*partition, bounds.start, bounds.stop)
        for partition, item in _items(store):
            if isinstance(item, Gap):
                if self._intact:
                    self.problems.append(f"{partition}: {item.range} is declared lost, and was not")
                self._journal.gap(*partition, item.range.start, item.range.stop)
            else:
                payloads = [event.data for event in item]
                self._stored(partition, item.start, payloads)
                self.seen.append((partition, item.start, payloads))

    def _stored(self, partition: Partition, offset: int, payloads: list[bytes]) -> None:
        """Tell the journal what was read; what enters by itself is published wherever it turns up."""
        entering = {act.payload for act in self.history if isinstance(act, Entering)}
        for payload in entering.intersection(payloads):
            self._journal.published(*partition, [payload], Outcome.UNKNOWN)
        self._journal.stored(*partition, offset, payloads)

    def _check_topics(self, store: FileStore) -> None:
        there = {topic.log_id for topic in store.log.topics()}
        for act in self.history:
            if isinstance(act, Created) and act.outcome is Outcome.OK and not self._told(Deleted, act.answer.log_id):
                if act.answer.log_id not in there:
                    self.problems.append(f"topic {act.name} was created, and is not there")
            elif isinstance(act, Deleted) and act.outcome is Outcome.OK and act.log_id in there:
                self.problems.append(f"log {act.log_id} was deleted, and is there")

    def _check_cursors(self, store: FileStore) -> None:
        for topic in store.log.topics():
            cursors = {cursor.shard.partition: cursor for cursor in store.cursors.load(topic.log_id, SUBSCRIPTION)}
            for partition in topic.partitions:
                end = store.log.bounds(partition).stop
                if partition.number in cursors:
                    position = cursors[partition.number].next_offset
                    self._journal.cursor(SUBSCRIPTION, *partition, position, end)
                elif any(
                    isinstance(act, Committed) and act.partition == partition and act.outcome is Outcome.OK
                    for act in self.history
                ):
                    self.problems.append(f"the cursor of {partition} is gone")

    def _check_parked(self, store: FileStore) -> None:
        there = {topic.log_id for topic in store.log.topics()}
        wanted: dict[tuple[str, int, int], set[bytes | None]] = defaultdict(lambda: {None})
        for act in self.history:
            if isinstance(act, ParkedOne) and act.row.shard.log_id in there and act.outcome is not Outcome.FAILED:
                key = (act.row.shard.log_id, act.row.shard.partition, act.row.offset)
                before = set() if act.outcome is Outcome.OK else wanted[key]
                wanted[key] = before | {act.row.event.data}
        found = {
            (log_id, row.shard.partition, row.offset): row.event.data
            for log_id in there
            for row in store.parked.page(ParkedFilter(log_id=log_id, subscription=SUBSCRIPTION), limit=1_000)
        }
        for key in found.keys() | wanted.keys():
            if found.get(key) not in wanted[key]:
                self.problems.append(f"the parked row {key} is not as it was committed")

    # --- going on -------------------------------------------------------------------------------

    def _check_manifests(self, store: FileStore) -> None:
        for act in self.history:
            if isinstance(act, Prepared) and act.outcome is Outcome.OK:
                counts = store.manifests.prepare(msgspec.structs.replace(act.manifest, body=b"another attempt"))
                if counts.body != act.answer.body:
                    self.problems.append(f"batch {act.manifest.batch}: its manifest was prepared, and is another")

    def _check_leases(self, store: FileStore) -> None:
        epochs = [act.answer for act in self.history if isinstance(act, Granted) and act.answer is not None]
        self._machine.clock.advance(2.0)
        lease = store.leases.acquire("lease", "somebody else", 1.0)
        self.history.append(Granted(what="acquire it again", outcome=Outcome.OK, answer=lease.epoch if lease else None))
        if lease is None or lease.epoch <= max(epochs, default=0):
            self.problems.append(f"a lease that had epochs {epochs} was granted as {lease}")

    def _go_on(self, store: FileStore) -> None:
        """Send again what nobody knows of, and something new."""
        topics = store.log.topics()
        there = {topic.log_id for topic in topics}
        acts = [
            act
            for act in self.history
            if isinstance(act, Published) and act.outcome is Outcome.UNKNOWN and act.partition.log_id in there
        ]
        acts += [
            Published(
                what="publish something new",
                partition=partition,
                payloads=[b"new in %s/%d of boot %s" % (partition.log_id.encode(), partition.number, new)],
                producer=new[:6] + b"\x40" + new[7:],
                first=0,
            )
            for topic in topics
            for partition in topic.partitions
            for new in [self._machine.chance.randbytes(16)]
        ]
        for act in acts:
            again = replace(act, outcome=Outcome.UNKNOWN)
            self.history.append(again)  # before it is done: it may crash again meanwhile
            again.answer = send(store, act)
            again.outcome = Outcome.OK
            again.tell(self._journal)

    def _enter(self, store: FileStore) -> None:
        """Let everything that waits enter the log, and see that it does so once."""
        outbox = MachineOutbox(self._machine)
        try:
            for _ in range(ROUNDS):
                self._machine.clock.advance(20.0)  # leases of those who crashed have expired
                if store.schedule.page():
                    run_scheduler(store, self._machine)
                if outbox.pending():
                    run_mover(store, outbox, self._machine)
            if left := len(store.schedule.page()) + outbox.pending():
                self.problems.append(f"{left} events wait for ever to enter the log")
        finally:
            outbox.close()
        cancelled = {act.id: act for act in self.history if isinstance(act, Cancelled)}
        counts = Counter(event.data for _, item in _items(store) if not isinstance(item, Gap) for event in item)
        there = {topic.log_id for topic in store.log.topics()}
        for act in self.history:
            if isinstance(act, Entering):
                least = most = 1
                if act.outcome is Outcome.FAILED:
                    least = most = 0
                elif act.id in cancelled and act.id:
                    cancel = cancelled[act.id]
                    least, most = (0, 1) if cancel.outcome is not Outcome.OK else (int(not cancel.answer),) * 2
                if act.outcome is Outcome.UNKNOWN or self._told(Deleted, act.log_id) or act.log_id not in there:
                    least = 0
                if self._told(TrimmedBelow, act.log_id):
                    least = 0
                if not least <= counts[act.payload] <= most:
                    self.problems.append(f"{act.what}: the event is {counts[act.payload]} times in the log")


def _items(store: FileStore) -> Iterator[tuple[Partition, Batch | Gap]]:
    """Read all partitions of all topics."""
    for topic in store.log.topics():
        for partition in topic.partitions:
            bounds = store.log.bounds(partition)
            position = bounds.start
            while position < bounds.stop:
                for item in store.log.read(partition, position, bytes_max=READ_BYTES):
                    yield partition, item
                    position = item.range.stop


@contextmanager
def silence() -> Iterator[None]:
    """Let nobody hear what a store says of its recovery; there are thousands of them."""
    logger = logging.getLogger("penstock")
    before, logger.disabled = logger.disabled, True
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logger.disabled = before
        logging.disable(disabled)
