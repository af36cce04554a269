"""What is written of a subscription, told to the journal in the very step in which it is written.

A seek begins a new life of a shard: whatever was settled may come again. So the journal knows each generation of a
shard as a subscription of its own. A dead letter that is brought back has had its end; what becomes of it then is not
the journal's.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from penstock.offsets import Range
from penstock.runtime.ledger import decode_record
from penstock.testing.journal import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.errors import StoreError
    from penstock.ports import Cursors
    from penstock.rows import Commit
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
            record = decode_record(commit.settlement)
            life = (record.partition, record.generation)
            # After a seek, one that was brought back may come once more, and has its end in this life yet to come.
            began, ended = self.began.get(life, 0), self._ended[life]
            again = {row.offset for row in commit.parked if row.replay and (row.offset in ended or row.offset < began)}
            self._brought_back[record.partition, record.number] = again
            ended.update(*(span for _, span in self.settled(record)))

    def answered(self, commit: Commit, answer: StoreError | None) -> None:
        """Take what became of it."""
        outcome = Outcome.OK if answer is None else Outcome.FAILED
        for fence in commit.fences:
            self._journal.wrote(*fence, outcome)
        if answer is None:
            for cursor in commit.cursors:
                self._tell_cursor(cursor, outcome)
            if commit.settlement:
                self.tell_record(decode_record(commit.settlement))
        elif commit.settlement:
            record = decode_record(commit.settlement)
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
        for commit in commits:
            self._witness.asked(commit)
        answers = self._cursors.commit(commits)
        for commit, answer in zip(commits, answers, strict=True):
            self._witness.answered(commit, answer)
        return answers
