"""What the campaign knows of a round, outside of what can break: what was published, handed over, and written.

From what processes tell before they die, the books hold what the store must hold; whoever looks at the store after a
death compares the two, and tells the journal what is there. Promised is, beside the journal's invariants, that

* what a commit was answered for is there, all of it and nothing else;
* no event is handed over while an earlier one of its key is open, in whichever process, but for dead letters that were
  brought back; and each attempt has the number that follows from those that are written;
* the records of the ledger are those that were written, each once, and chain by number and by position; an event has
  one final outcome in each generation, and each time that it is brought back;
* in the end every event has the state that the script gives it, and nothing else is a dead letter.

A subscription that is moved begins anew, as far as the journal is concerned: every generation is one of its own there,
and so is what was brought back from the dead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.offsets import Bitmap, Range
from penstock.rows import ParkedFilter
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.runtime.ledger import Record, decode_record
from penstock.testing.campaigns.deliveries.consumer import Given, Said
from penstock.testing.campaigns.deliveries.script import DEAD, SUBSCRIPTION, TOPIC, Act, Did, act_of
from penstock.testing.campaigns.deliveries.steps import Doing, Purged, Revived, Row, Took, Wrote
from penstock.testing.checker import check
from penstock.testing.journal import SETTLEMENTS, Journal, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.rows import Cursor, Parked, TopicInfo
    from penstock.stores.file.store import FileStore
    from penstock.testing.campaigns.deliveries.script import Scene

FINAL: Final = {"acked", "dead", "expired", "discarded", "skipped", "gap"}
PAGE_BYTES: Final = 1 << 20
SOON_SECONDS: Final = 10.0


class Place(NamedTuple):
    """An event."""

    partition: int
    offset: int


class Told(NamedTuple):
    """What was published."""

    payload: bytes
    key: bytes

    @property
    def act(self) -> Act:
        """What a handler does with it."""
        return act_of(self.payload)


@dataclass
class Written:
    """What the store has of a shard, if everything that was answered is there."""

    next_offset: int = 0
    settled: bytes = b""
    attempts: dict[int, int] = field(default_factory=dict)
    generation: int = 0
    number: int = 0
    begin: int = 0
    """Where its generation began."""


class Tenure:
    """What happened since a process took a shard."""

    def __init__(self, epoch: int, attempts: dict[int, int], closed: set[int]) -> None:
        self.epoch = epoch
        self.attempts = attempts
        """Those that were written when it began."""
        self.closed = closed
        """What is settled; the handler's word counts."""
        self.failures: Counter[tuple[int, int]] = Counter()
        self.open: set[tuple[int, int]] = set()
        """Handed over, and nothing was said of it."""


class Books:
    """Everything that was told of one round."""

    def __init__(self, scene: Scene, found: Callable[[str], None]) -> None:
        self._scene = scene
        self._found = found
        self.journal = Journal()
        self.log = ""
        self.published: dict[Place, Told] = {}
        self._written = {partition: Written() for partition in range(scene.partitions)}
        self._rows: dict[Place, Row] = {}
        self.records: list[bytes] = []
        self._outcomes: dict[tuple[int, Place], list[str]] = {}
        """Of each generation and event: what the records say, one after the other."""
        self._revived: Counter[Place] = Counter()
        self._tenures: dict[int, Tenure] = {}
        self._epochs: Counter[int] = Counter()
        self._unanswered: list[object] = []
        self.counts: Counter[str] = Counter()

    # --- publishing ---------------------------------------------------------------------------

    def publish(self, log: str, partition: int, offset: int, told: Sequence[Told]) -> None:
        """Note what was published."""
        self.log = log
        for number, each in enumerate(told):
            self.published[Place(partition, offset + number)] = each
        payloads, keys = [each.payload for each in told], [each.key for each in told]
        self.journal.published(log, partition, payloads, Outcome.OK, offset=offset, keys=keys)

    # --- what processes tell ------------------------------------------------------------------

    def hear(self, message: object) -> None:
        """Take in what a process has told."""
        match message:
            case Doing(_, changes):
                self._unanswered = list(changes)
            case Given():
                self._hear_given(message)
            case Said():
                self._hear_said(message)
            case Took():
                self._hear_took(message)
            case Wrote() | Purged() | Revived():
                del self._unanswered[:1]
                self._hear_change(message)
            case _:
                raise TypeError(f"a process said {message!r}")

    def _hear_change(self, change: object) -> None:
        match change:
            case Wrote():
                self._hear_wrote(change)
            case Purged(partition, offsets):
                for offset in offsets:
                    self._rows.pop(Place(partition, offset), None)
            case Revived(partition, offsets):
                for offset in offsets:
                    self._revive(Place(partition, offset))

    def _revive(self, place: Place) -> None:
        row = self._rows[place]
        self._revived[place] += 1
        self._rows[place] = row._replace(state="waiting", attempts=0, replay=row.replay + 1)

    def _hear_took(self, took: Took) -> None:
        partition = took.partition
        self.journal.granted(took.lease, took.epoch)
        self._epochs[partition] = max(self._epochs[partition], took.epoch)
        written = self._written[partition]
        attempts = dict(written.attempts)
        attempts.update({place.offset: row.attempts for place, row in self._waiting(partition) if not row.replay})
        closed = {
            place.offset
            for place in self._places(partition)
            if FINAL & set(self._outcomes.get((written.generation, place), ()))
            or place.offset < written.begin
            # It has had all of its attempts: nobody will be given it.
            or attempts.get(place.offset, 0) > self._scene.max_retries
        }
        self._tenures[partition] = Tenure(took.epoch, attempts, closed)

    def _places(self, partition: int) -> Iterator[Place]:
        return (place for place in self.published if place.partition == partition)

    def _waiting(self, partition: int) -> Iterator[tuple[Place, Row]]:
        return ((at, row) for at, row in self._rows.items() if at.partition == partition and row.state == "waiting")

    def _hear_given(self, given: Given) -> None:
        partition = given.partition
        tenure = self._tenures[partition]
        if given.epoch != self._epochs[partition] or given.generation != self._written[partition].generation:
            # Frozen, and not aware yet that it is somebody else's, or elsewhere: nobody can keep it from that.
            self.counts["events handed over by a process that had lost them"] += len(given.events)
            return
        hand = {(offset, replay) for offset, _, _, _, replay in given.events}
        for offset, payload, key, attempt, replay in given.events:
            self.counts["events handed over"] += 1
            subject = self._subject(given.generation, replay)
            keys = None if replay else [key]
            self.journal.delivered(subject, self.log, partition, offset, [payload], keys)
            self._check_turn(tenure, Place(partition, offset), attempt, replay, hand)
            tenure.open.add((offset, replay))

    def _check_turn(self, tenure: Tenure, place: Place, attempt: int, replay: int, hand: set[tuple[int, int]]) -> None:
        """See that it is this event's turn, and which attempt this is."""
        partition, offset = place
        event = self.published.get(place)
        if event is None:
            return  # which the journal tells
        if (offset, replay) in tenure.open and not self._scene.timeout:
            self._found(f"{place} {event} is handed over while it is in somebody's hands")
        made = tenure.failures[offset, replay] + (0 if replay else tenure.attempts.get(offset, 0))
        if attempt != made + 1 and not self._scene.timeout:
            self._found(f"{place} {event} is handed over as attempt {attempt}, after {made}")
        if replay:
            return
        for earlier in range(offset):
            before = self.published[Place(partition, earlier)]
            if before.key == event.key and earlier not in tenure.closed and (earlier, 0) not in hand:
                self._found(f"{place} {event} is handed over while {earlier} {before} of its key is open")

    def _hear_said(self, said: Said) -> None:
        tenure = self._tenures[said.partition]
        what = (said.offset, said.replay)
        tenure.open.discard(what)
        if said.did in {Did.ACKED, Did.REJECTED}:
            tenure.closed.add(said.offset)
        elif said.did is not Did.KILLED:
            tenure.failures[what] += 1
            made = tenure.failures[what] + (0 if said.replay else tenure.attempts.get(said.offset, 0))
            if made > self._scene.max_retries:
                tenure.closed.add(said.offset)

    def _hear_wrote(self, wrote: Wrote) -> None:
        partition = wrote.partition
        next_offset, settled, attempts, generation, number = wrote.cursor
        outcome = Outcome.FAILED if wrote.error else Outcome.OK
        if wrote.lease:
            self.journal.wrote(wrote.lease, wrote.epoch, outcome)
        self.journal.committed(self._subject(generation), self.log, partition, next_offset, outcome)
        if wrote.error:
            self.counts[f"refused: {wrote.error}"] += 1
            return
        before = self._written[partition]
        begin = next_offset if generation > before.generation else before.begin
        self._written[partition] = Written(next_offset, settled, attempts, generation, number, begin)
        for row in wrote.rows:
            self._rows[Place(partition, row.offset)] = row
        if wrote.record:
            self.records.append(wrote.record)
            self._note(decode_record(wrote.record))

    # --- records ------------------------------------------------------------------------------

    def _note(self, record: Record) -> None:
        """Note what a record says became of events."""
        for how in sorted(record.outcomes):
            for span in record.offsets(how):
                for offset in span:
                    # What is passed over when a subscription is moved was of the generation before.
                    generation = record.generation - (how == "skipped")
                    self._note_outcome(generation, Place(record.partition, offset), how)

    def _note_outcome(self, generation: int, place: Place, how: str) -> None:
        said = self._outcomes.setdefault((generation, place), [])
        over = [each for each in said if each in FINAL]
        revived = self._revived[place] if generation == 0 else 0
        if how == "parked" and said:
            self._found(f"{place} is parked, after it was {said}")
        if how in FINAL and len(over) > revived:
            self._found(f"{place} is {how}, after it was {said}")
        said.append(how)
        if how in FINAL:
            told = how if how in SETTLEMENTS else "discarded"
            self._settle(self._subject(generation, len(over)), place, told)

    def _settle(self, subject: str, place: Place, how: str) -> None:
        self.journal.settled(subject, self.log, place.partition, place.offset, place.offset + 1, how)

    def _subject(self, generation: int, replay: int = 0) -> str:
        return f"{SUBSCRIPTION}, generation {generation}" + (f", replay {replay}" if replay else "")

    # --- looking ------------------------------------------------------------------------------

    def look(self, store: FileStore) -> None:
        """Compare the store with what was written, and tell the journal what is there."""
        topics = {topic.name: topic for topic in store.log.topics()}
        topic = topics[TOPIC]
        cursors = {cursor.shard.partition: cursor for cursor in store.cursors.load(topic.log_id, SUBSCRIPTION)}
        wanted = ParkedFilter(log_id=topic.log_id, subscription=SUBSCRIPTION)
        rows = {
            Place(row.shard.partition, row.offset): row for row in store.parked.page(wanted, limit=len(self.published))
        }
        self._resolve(cursors.values(), rows)
        self._compare_records(store, topics.get(LEDGER))
        self.journal.restarted()
        for place, row in rows.items():
            if row.event.data != self.published[place].payload or row.event.key != self.published[place].key:
                self._found(f"row {place} holds {row.event}, and {self.published[place]} was published")
        self._compare_rows(rows)
        for partition in topic.partitions:
            self._tell_stored(store, topic, partition.number)
            cursor = cursors.get(partition.number)
            if cursor is not None:
                self._compare_cursor(cursor)
                self._tell_states(cursor, rows, store.log.bounds(partition).stop)

    def _resolve(self, cursors: Iterable[Cursor], rows: dict[Place, Parked]) -> None:
        """Find out whether a step was made of which its process could not tell any more: all of it was, or nothing."""
        changes, self._unanswered = self._unanswered, []
        as_before = self._is_written(rows) and all(map(self._is_cursor_written, cursors))
        if changes and not as_before:
            self.counts["steps made by a process that was killed in the middle"] += 1
            for change in changes:
                self._hear_change(change)

    def _is_written(self, rows: dict[Place, Parked]) -> bool:
        return self._rows == {at: Row(row.offset, row.state, row.attempts, row.replay) for at, row in rows.items()}

    def _is_cursor_written(self, cursor: Cursor) -> bool:
        written = self._written[cursor.shard.partition]
        there = (cursor.next_offset, cursor.settled, dict(cursor.attempts), cursor.generation, cursor.number)
        return there == (written.next_offset, written.settled, written.attempts, written.generation, written.number)

    def _compare_rows(self, rows: dict[Place, Parked]) -> None:
        if not self._is_written(rows):
            there = {at: Row(row.offset, row.state, row.attempts, row.replay) for at, row in rows.items()}
            differing = sorted(set(there.items()) ^ set(self._rows.items()))
            self._found(f"the parked rows are not those that were written: {differing}")

    def _compare_cursor(self, cursor: Cursor) -> None:
        if not self._is_cursor_written(cursor):
            self._found(f"a cursor is {cursor}, and was written as {self._written[cursor.shard.partition]}")

    def _compare_records(self, store: FileStore, ledger: TopicInfo | None) -> None:
        moved: list[bytes] = []
        if ledger is not None:
            [partition] = ledger.partitions
            for item in store.log.read(partition, 0, bytes_max=PAGE_BYTES):
                moved += item.columns.column("data").to_pylist()  # type: ignore[union-attr] # which a gap has not
        waiting = [record for _, record in store.cursors.settlements(len(self.records) + 1)]
        # What was appended and not forgotten yet is in both places.
        both = next(count for count in range(len(waiting), -1, -1) if waiting[:count] == moved[len(moved) - count :])
        if moved + waiting[both:] != self.records:
            kept = [decode_record(record) for record in moved + waiting[both:]]
            self._found(f"the ledger is not what was written: {kept}, not {list(map(decode_record, self.records))}")
        self._check_chain(map(decode_record, self.records))

    def _check_chain(self, records: Iterable[Record]) -> None:
        last: dict[int, Record] = {}
        for record in records:
            before = last.get(record.partition)
            number, begin = (1, 0) if before is None else (before.number + 1, before.next_offset)
            # Where one is moved back to is in no record: nothing is settled by that.
            moved = before is not None and record.generation > before.generation
            if record.number != number or (record.begin != begin and not moved):
                self._found(f"after {before} comes {record}")
            last[record.partition] = record

    def _tell_stored(self, store: FileStore, topic: TopicInfo, number: int) -> None:
        partition = topic.partitions[number]
        bounds = store.log.bounds(partition)
        self.journal.bounds(self.log, number, bounds.start, bounds.stop)
        for item in store.log.read(partition, bounds.start, bytes_max=PAGE_BYTES):
            columns = item.columns  # type: ignore[union-attr] # which a gap has not
            self.journal.stored(self.log, number, item.start, columns.column("data"), columns.column("key"))

    def _tell_states(self, cursor: Cursor, rows: dict[Place, Parked], end: int) -> None:
        """Tell the journal what every event is, in each generation."""
        partition, now = cursor.shard.partition, cursor.generation
        self.journal.cursor(self._subject(now), self.log, partition, cursor.next_offset, end)
        ahead = Bitmap.from_bytes(cursor.next_offset, cursor.settled)
        pending = {offset for span in ahead.unset_in(Range(cursor.next_offset, end)) for offset in span}
        for generation in range(now + 1):
            for place in self._places(partition):
                row = rows.get(place)
                over = bool(FINAL & set(self._outcomes.get((generation, place), ())))
                if generation < now or place.offset < self._written[partition].begin:
                    if not over:  # it is not of this generation, or not any more
                        self._settle(self._subject(generation), place, "discarded")
                    continue
                span = (self._subject(generation), self.log, partition, place.offset, place.offset + 1)
                if place.offset in pending:
                    self.journal.pending(*span)
                if row is not None and row.state == "waiting" and not row.replay:
                    self.journal.parked(*span)
        self._tell_revived(partition, rows)

    def _tell_revived(self, partition: int, rows: dict[Place, Parked]) -> None:
        for replay in range(1, max((self._revived[place] for place in self._places(partition)), default=0) + 1):
            subject = self._subject(0, replay)
            for place in self._places(partition):
                row = rows.get(place)
                if self._revived[place] < replay:
                    self._settle(subject, place, "discarded")
                elif row is not None and row.state == "waiting" and row.replay == replay:
                    self.journal.parked(subject, self.log, partition, place.offset, place.offset + 1)

    # --- judging ------------------------------------------------------------------------------

    def check(self) -> None:
        """Look whether everything that was promised is so."""
        for violation in check(self.journal, soon_seconds=SOON_SECONDS):
            self._found(f"{violation.invariant}: {violation.where}: {violation.what}")

    def check_end(self) -> None:
        """Look whether every event has the state that the script gives it."""
        for partition, written in self._written.items():
            end = sum(place.partition == partition for place in self.published)
            if (written.next_offset, written.settled, written.attempts) != (end, b"", {}):
                self._found(f"partition {partition} ends at {end}, and all is done, but the cursor is {written}")
        for place, event in self.published.items():
            self._check_event(place, event)

    def _check_event(self, place: Place, event: Told) -> None:
        generation = self._written[place.partition].generation
        here = generation > 0 and place.offset >= self._written[place.partition].begin
        over = [how for how in self._outcomes.get((generation if here else 0, place), ()) if how in FINAL]
        wanted = ["dead" if event.act in DEAD and not here else "acked"] + ["acked"] * self._revived[place]
        if here:
            wanted = wanted[:1]
        if over != wanted and not (generation and not here and over == ["skipped"]):
            self._found(f"{place} {event} ends as {wanted}, but it is {over}")
        row = self._rows.get(place)
        if generation == 0 and (row is not None and row.state == "dead") != (wanted[-1] == "dead"):
            self._found(f"{place} {event} ends as {wanted}, and its row is {row}")
