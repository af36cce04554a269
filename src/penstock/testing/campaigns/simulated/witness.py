"""What is written of a subscription, told to the journal in the very step in which it is written.

A seek begins a new life of a shard: whatever was settled may come again. So the journal knows each generation of a
shard as a subscription of its own. A dead letter that is brought back has had its end; what becomes of it then is not
the journal's.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from penstock.offsets import Bitmap, Range
from penstock.runtime.ledger import decode_record
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.errors import StoreError
    from penstock.ports import Cursors
    from penstock.rows import Commit, Cursor
    from penstock.runtime.ledger import Record
    from penstock.testing.journal import Journal

SUBSCRIPTION: Final = "billing"
SETTLED: Final = ("acked", "dead", "expired", "discarded")


def named(generation: int) -> str:
    """Return as what the journal knows a generation of the subscription."""
    return f"{SUBSCRIPTION}, moved {generation} times" if generation else SUBSCRIPTION


class Witness:
    """What was seen of all commits, whichever process has made them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._brought_back: dict[tuple[int, int], set[int]] = {}
        """Which offsets of a record had been dead letters before."""
        self.began: dict[tuple[int, int], int] = {}
        """Where each generation of a partition began that a seek has made."""
        self._ended: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        """What had its end in a generation of a partition, as far as anybody has asked for it."""

    def asked(self, commit: Commit) -> None:
        """Take a commit before it is made: its process may die in the middle of it."""
        for cursor in commit.cursors:
            self._tell_cursor(cursor, Outcome.UNKNOWN)
            if not commit.fences and cursor.generation:
                self.began[cursor.shard.partition, cursor.generation] = cursor.next_offset
        if commit.settlement:
            self._asked_record(commit, commit.cursors[0], commit.settlement)

    def asked_settling(self, commit: Commit, after: Cursor, record: bytes) -> None:
        """Take what becomes of a shared cursor, in the transaction that writes it."""
        self._tell_cursor(after, Outcome.UNKNOWN)
        if record:
            self._asked_record(commit, after, record)

    def _asked_record(self, commit: Commit, cursor: Cursor, settlement: bytes) -> None:
        record = decode_record(settlement)
        life = (record.partition, record.generation)
        # After a seek, an event whose dead letter was brought back may come from the log as well. What becomes of its
        # row is its end in this life only if the cursor has passed it; else the event itself is still to come.
        began, ended = self.began.get(life, 0), self._ended[life]
        passed = Bitmap.from_bytes(cursor.next_offset, cursor.settled)
        again = {
            row.offset
            for row in commit.parked
            if row.replay and (row.offset < began or row.offset in ended or row.offset not in passed)
        }
        self._brought_back[record.partition, record.number] = again
        ended.update(*(span for _, span in self.settled(record)))

    def answered(self, commit: Commit, answer: StoreError | None, settled: tuple[Cursor, bytes] | None = None) -> None:
        """Take what became of it; of a shared cursor, and of the record of that."""
        outcome = Outcome.OK if answer is None else Outcome.FAILED
        for fence in commit.fences:
            self._journal.wrote(*fence, outcome)
        cursors, settlement = (commit.cursors, commit.settlement) if settled is None else ((settled[0],), settled[1])
        if answer is None:
            for cursor in cursors:
                self._tell_cursor(cursor, outcome)
            if settlement:
                self.tell_record(decode_record(settlement))
        elif settlement:
            record = decode_record(settlement)
            self._ended[record.partition, record.generation].difference_update(
                *(span for _, span in self.settled(record))
            )

    def _tell_cursor(self, cursor: Any, outcome: Outcome) -> None:
        shard = cursor.shard
        self._journal.committed(named(cursor.generation), shard.log_id, shard.partition, cursor.next_offset, outcome)

    def tell_record(self, record: Record) -> None:
        """Tell what a record says was settled."""
        for outcome, span in self.settled(record):
            self._journal.settled(
                named(record.generation), record.log_id, record.partition, span.start, span.stop, outcome
            )

    def settled(self, record: Record) -> Iterator[tuple[str, Range]]:
        """Return what a record has settled for the first time, and how."""
        again = self._brought_back.get((record.partition, record.number), set())
        for outcome in SETTLED:
            for span in record.offsets(outcome):
                if again.isdisjoint(span):
                    yield outcome, span
                else:
                    yield from ((outcome, Range(offset, offset + 1)) for offset in span if offset not in again)


class WitnessedCursors:
    """The `Cursors` of a process, whose commits the witness hears of, whatever their caller is told."""

    def __init__(self, cursors: Cursors, witness: Witness) -> None:
        self._cursors = cursors
        self._witness = witness

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursors, name)

    def commit(self, commits: Sequence[Commit]) -> list[StoreError | None]:
        """Commit, and tell."""
        settled: dict[int, tuple[Cursor, bytes]] = {}
        watched = []
        for at, commit in enumerate(commits):
            self._witness.asked(commit)
            settling = commit.settling
            if settling is not None:
                settling = replace(settling, record=partial(self._record, commit, at, settled))
            watched.append(replace(commit, settling=settling))
        answers = self._cursors.commit(watched)
        for at, (commit, answer) in enumerate(zip(commits, answers, strict=True)):
            self._witness.answered(commit, answer, settled.get(at))
        return answers

    def _record(
        self, commit: Commit, at: int, settled: dict[int, tuple[Cursor, bytes]], before: Cursor, after: Cursor
    ) -> bytes:
        assert commit.settling is not None
        assert commit.settling.record is not None
        record = commit.settling.record(before, after)
        settled[at] = (after, record)
        self._witness.asked_settling(commit, after, record)
        return record
