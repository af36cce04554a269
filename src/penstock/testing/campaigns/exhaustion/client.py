"""A program that uses a store while something runs out, and believes nothing.

Everything that it asks for, and everything that it is answered, goes into a journal. While the store has what it needs,
whatever is asked of it must work; while something is lacking, an error must say so clearly.
"""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.batch import Batch
from penstock.errors import PenstockError
from penstock.rows import ParkedFilter, Partition, Scheduled, Shard, Subscription, TopicSettings
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.stores.file.tail import State
from penstock.stores.file.verify import verify
from penstock.testing.checker import check
from penstock.testing.conformance.builders import PLENTY, a_cursor, a_parked, a_part, an_event, append, commit
from penstock.testing.journal import Journal, Outcome

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

SUBSCRIPTION: Final = "billing"
PAYLOAD_BYTES_MAX: Final = 48 << 10
SEGMENT_BYTES: Final = 256 << 10
ALLOCATE_BYTES: Final = 64 << 10


class Publish(NamedTuple):
    """What is published in one call, and what makes a repeat of it recognisable."""

    log: str
    first: int
    payloads: list[bytes]


class Client:
    """Uses a store, and complains."""

    def __init__(self, root: Path, chance: random.Random, is_clear: Callable[[Exception], bool]) -> None:
        """Open the store; `is_clear` says whether an error tells what is lacking."""
        self._root = root
        self._settings = FileSettings(
            segment_bytes=SEGMENT_BYTES,
            allocate_bytes=ALLOCATE_BYTES,
            marker_seconds=3600.0,
            runtime_directory=str(root.parent),
        )
        self._chance = chance
        self._is_clear = is_clear
        self._lacking = False
        self._journal = Journal()
        self._logs: list[str] = []
        self._published = 0
        self._unknown: list[Publish] = []
        self._rows: dict[tuple[str, object], set[bool]] = {}
        """Of every row that was parked or scheduled: whether it is there, as far as is known."""
        self.complaints: list[str] = []
        self.tried: Counter[str] = Counter()
        """What was done, and how it ended."""
        self.store = FileStore(self._root, settings=self._settings)

    def reopen(self) -> None:
        """Close the store, and open it anew."""
        self.store.close()
        self.store = FileStore(self._root, settings=self._settings)

    @contextmanager
    def lacking(self) -> Iterator[None]:
        """In this block something is lacking, and the store may say so."""
        self._lacking = True
        try:
            yield
        finally:
            self._lacking = False

    def tries(self, action: Callable[..., None], *arguments: object) -> bool:
        """Do something, and say whether it worked."""
        what = action.__name__.strip("_")
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - what it means is decided here
            if not self._lacking:
                self.complaints.append(f"it did not work, though nothing is lacking: {traceback.format_exc()}")
            elif not self._is_clear(error):
                self.complaints.append(f"an error that does not say what is lacking: {traceback.format_exc()}")
            self.tried[f"{what}: {type(error).__name__}"] += 1
            return False
        self.tried[f"{what}: ok{' all the same' if self._lacking else ''}"] += 1
        return True

    # --- what it does -----------------------------------------------------------------------------

    def create(self) -> None:
        """Create a topic with a subscription; or the one that could not be created before."""
        topic = self.store.log.create_topic(f"topic-{len(self._logs)}", TopicSettings())
        subscription = Subscription(log_id=topic.log_id, name=SUBSCRIPTION, mode="key_shared")
        self.store.cursors.put_subscription(subscription)
        self._logs.append(topic.log_id)

    def publish(self) -> None:
        """Publish a few events, small or large."""
        first, count = self._published, self._chance.randint(1, 3)
        size = self._chance.choice([10, 1000, PAYLOAD_BYTES_MAX])
        payloads = [b"%d:" % number + self._chance.randbytes(size) for number in range(first, first + count)]
        self._published += count
        self._send(Publish(self._any_log(), first, payloads))

    def _send(self, publish: Publish) -> None:
        offset = None

        def note(outcome: Outcome) -> None:
            self._journal.published(publish.log, 0, publish.payloads, outcome, offset=offset)
            if outcome == Outcome.UNKNOWN:
                self._unknown.append(publish)

        with _noted(note):
            part = a_part(*publish.payloads, first=publish.first)
            [answer] = append(self.store, Partition(publish.log, 0), part)
            assert answer.offsets is not None, answer
            offset = answer.offsets.start

    def commit(self) -> None:
        """Commit a cursor at the end of a log."""
        log = self._any_log()
        end = self.store.log.bounds(Partition(log, 0)).stop
        with _noted(lambda outcome: self._journal.committed(SUBSCRIPTION, log, 0, end, outcome)):
            _raise(commit(self.store, a_cursor(Shard(log, SUBSCRIPTION, 0, 0), end)))

    def park(self) -> None:
        """Park an event that can be read, if there is one."""
        log = self._any_log()
        bounds = self.store.log.bounds(Partition(log, 0))
        if bounds:
            offset = self._chance.randrange(bounds.start, bounds.stop)
            with _noted(lambda outcome: self._expect((log, offset), outcome)):
                _raise(commit(self.store, parked=(a_parked(Shard(log, SUBSCRIPTION, 0, 0), offset),)))

    def schedule(self) -> None:
        """Schedule an event."""
        log, id_ = self._any_log(), f"row-{len(self._rows)}"
        row = Scheduled(id=id_, log_id=log, partition=0, due_at=0, event=an_event())
        with _noted(lambda outcome: self._expect((log, id_), outcome)):
            self.store.schedule.add([row])

    def trim(self) -> None:
        """Remove what the subscription has passed."""
        log = self._any_log()
        before = max((cursor.next_offset for cursor in self.store.cursors.load(log, SUBSCRIPTION)), default=0)
        with _noted(lambda outcome: self._note_trimmed(log, before, outcome)):
            self.store.log.trim(Partition(log, 0), before, force=True)

    def read(self) -> None:
        """Read a log."""
        log = self._any_log()
        for start, payloads in self._stored_in(log):
            self._journal.stored(log, 0, start, payloads)

    def die_in_a_sync(self) -> None:
        """Leave a log as a process does that is killed during a sync: whoever writes next has to copy its end."""
        log = self.store.log
        handle = log.handle(Partition(self._any_log(), 0))
        log.tails.write(handle.files.slot, log.tail(handle), state=State.SYNCING)

    def _any_log(self) -> str:
        return self._chance.choice(self._logs)

    def _note_trimmed(self, log: str, before: int, outcome: Outcome) -> None:
        if outcome != Outcome.FAILED:
            self._journal.trimmed(log, 0, before)

    def _expect(self, row: tuple[str, object], outcome: Outcome) -> None:
        before = self._rows.get(row, {False})
        self._rows[row] = {Outcome.OK: {True}, Outcome.FAILED: before, Outcome.UNKNOWN: before | {True}}[outcome]

    # --- what it finds ----------------------------------------------------------------------------

    def settle(self) -> None:
        """Send again what nobody knows to be stored."""
        unknown, self._unknown = self._unknown, []
        for publish in unknown:
            self.tries(self._send, publish)

    def look(self) -> None:
        """Compare everything that is there with what was promised."""
        self._journal.restarted()
        there: set[tuple[str, object]] = set()
        for log in self._logs:
            bounds = self.store.log.bounds(Partition(log, 0))
            self._journal.bounds(log, 0, bounds.start, bounds.stop)
            for start, payloads in self._stored_in(log):
                self._journal.stored(log, 0, start, payloads)
            for cursor in self.store.cursors.load(log, SUBSCRIPTION):
                self._journal.cursor(SUBSCRIPTION, log, 0, cursor.next_offset, bounds.stop)
            rows = self.store.parked.page(ParkedFilter(log_id=log, subscription=SUBSCRIPTION), limit=10_000)
            there |= {(log, row.offset) for row in rows}
        there |= {(row.log_id, row.id) for row in self.store.schedule.page(limit=10_000)}
        for row, possible in self._rows.items():
            if (row in there) not in possible:
                self.complaints.append(
                    f"row {row} was {'refused and is there' if row in there else 'stored and is gone'}"
                )
        self.complaints += [f"nobody has stored row {row}" for row in there - self._rows.keys()]
        self.complaints += [f"{found.invariant}, {found.where}: {found.what}" for found in check(self._journal)]

    def verify(self) -> None:
        """Close the store, and look at every byte."""
        self.store.close()
        report = verify(self._root, Platform())
        self.complaints += [f"damage: {damage}" for damage in [*report.damages, *report.state]]

    def _stored_in(self, log: str) -> Iterator[tuple[int, list[bytes]]]:
        partition = Partition(log, 0)
        bounds = self.store.log.bounds(partition)
        start = bounds.start
        while start < bounds.stop:
            for item in self.store.log.read(partition, start, bytes_max=PLENTY):
                if isinstance(item, Batch):
                    yield item.start, [event.data for event in item]
                else:
                    self._journal.gap(log, 0, item.start, item.stop)
                start = item.range.stop


@contextmanager
def _noted(note: Callable[[Outcome], None]) -> Iterator[None]:
    """Note the outcome of what is done in this block."""
    try:
        yield
    except PenstockError:
        note(Outcome.FAILED)
        raise
    except BaseException:
        note(Outcome.UNKNOWN)
        raise
    note(Outcome.OK)


def _raise(refused: PenstockError | None) -> None:
    if refused is not None:
        raise refused
