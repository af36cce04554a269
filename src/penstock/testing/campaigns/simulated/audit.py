"""Audit: what handlers were given and when, compared with what was written, and with what was promised.

Everything is kept by partition and generation: a seek begins anew, and what comes after it may have come before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from penstock.engine.states import Outcome
from penstock.offsets import Gap, Range, RangeSet
from penstock.rows import ParkedFilter
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.runtime.ledger import decode_record
from penstock.testing.campaigns.simulated.witness import SUBSCRIPTION, Witness, named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.rows import TopicInfo
    from penstock.runtime.ledger import Record
    from penstock.testing.simulator import Process, World

    Life = tuple[int, int]
    """A partition, and its generation."""


class Audit:
    """What was seen of the deliveries of a life."""

    def __init__(self, world: World, topic: TopicInfo, *, ordered: bool = True) -> None:
        self._world = world
        self._topic = topic
        self._ordered = ordered
        """Whether events of a key are promised to come in their order."""
        self.witness = Witness(world.journal)
        self._keys: defaultdict[Life, dict[int, bytes | None]] = defaultdict(dict)
        self._done: defaultdict[Life, set[int]] = defaultdict(set)
        self._acked: defaultdict[Any, set[int]] = defaultdict(set)
        """By the engine that has taken the ack."""
        self._acked_in: defaultdict[Life, set[int]] = defaultdict(set)
        self._begun: dict[tuple[Life, int], int] = {}
        self._overtakes: list[tuple[Life, int, int, int]] = []
        """What was begun before an earlier event of its lane was done by any hand, and which, and when."""
        self.deliveries = 0
        self.problems: list[str] = []

    # --- while it lives -----------------------------------------------------------------------

    def handed(self, process: Process, number: int, hand: Any, event: Any, attempt: int) -> None:
        """Tell the journal what somebody is given."""
        offset = event.offset
        self.deliveries += 1
        self._world.journal.progressed(self._world.loop.time())
        replay = replay_of(hand, offset)
        again = f", brought back {replay} times" if replay else ""
        process.note(f"is given {number}@{offset} {event.data!r}, attempt {attempt}{again}")
        if replay:
            return  # it has had its end, and keeps nobody waiting
        if offset in self._acked[hand._engine]:  # noqa: SLF001 - a hand tells nobody else
            self.problems.append(f"{number}@{offset} was handed over again, after its ack was taken")
        partition = self._topic.partitions[number]
        keys = [event.key] if self._ordered else None
        self._world.journal.delivered(named(generation_of(hand)), *partition, offset, [event.data], keys=keys)

    def begun(self, number: int, hand: Any, event: Any) -> None:
        """Look at the order of a lane: a handler begins."""
        offset = event.offset
        if replay_of(hand, offset) or not self._ordered:
            return
        life = (number, generation_of(hand))
        known = self._keys[life]
        known[offset] = event.key
        self._begun[life, offset] = self.deliveries
        early = [
            other
            for other, key in known.items()
            if key == event.key and other < offset and other not in self._done[life] and not _is_dead(hand, other)
        ]
        self._overtakes += [(life, offset, other, self.deliveries) for other in early]

    def done(self, hand: Any, offset: int) -> None:
        """Note that somebody is about to say that an event is over."""
        self._done[hand._seat.shard.partition, generation_of(hand)].add(offset)  # noqa: SLF001 - a hand tells nobody else

    def acked(self, hand: Any, offset: int) -> None:
        """Note that an ack was taken."""
        self.done(hand, offset)
        self._acked_in[hand._seat.shard.partition, generation_of(hand)].add(offset)  # noqa: SLF001 - the same
        if not replay_of(hand, offset):
            self._acked[hand._engine].add(offset)  # noqa: SLF001 - a hand tells nobody else

    # --- when it is at rest -------------------------------------------------------------------

    def examine(self, store: Any) -> None:
        """Look at everything that is written, and tell the journal."""
        records = self._records(store)
        self._check_chains(records)
        for record in records:
            if record.log_id == self._topic.log_id:
                self.witness.tell_record(record)
        self._check_overtakes(records)
        self._check_outcomes(store, records)
        self._tell_states(store, records)

    def _records(self, store: Any) -> list[Record]:
        """Return all records, those that were moved to the ledger and those that were not yet."""
        found: list[Record] = []
        for topic in store.log.topics():
            if topic.name == LEDGER:
                [partition] = topic.partitions
                bounds = store.log.bounds(partition)
                position = bounds.start
                while position < bounds.stop:
                    for item in store.log.read(partition, position, bytes_max=1 << 24):
                        if isinstance(item, Gap):
                            self.problems.append(f"records are lost: {item}")
                        else:
                            found += [decode_record(event.data) for event in item]
                        position = item.range.stop
        moved = {(record.partition, record.number) for record in found}
        rest = [decode_record(record) for _, record in store.cursors.settlements(1 << 20)]
        # A mover that was cut off has appended some that the store still has.
        return found + [record for record in rest if (record.partition, record.number) not in moved]

    def _check_overtakes(self, records: Sequence[Record]) -> None:
        """Look at what was begun early: that is right only behind an event that was dead by then, or skipped by a seek.

        Nobody's hand has done it: its last attempt was its process's end, or took too long; or somebody has moved the
        subscription, and whoever had the shard had not noticed all of it yet.
        """
        skipped = {
            (record.partition, offset) for record in records for span in record.offsets("skipped") for offset in span
        }
        dead = {
            (record.partition, record.generation, offset)
            for record in records
            for span in record.offsets("dead")
            for offset in span
        }
        for life, offset, early, at in self._overtakes:
            if (life[0], early) in skipped:
                continue
            if (*life, early) not in dead or self._begun[life, early] > at:
                self.problems.append(f"{life[0]}@{offset} was begun before {early} of its lane was done")

    def _check_outcomes(self, store: Any, records: Sequence[Record]) -> None:
        """Look whether somebody has acked what is acked, and whether there is a dead letter of what is dead."""
        wanted = ParkedFilter(log_id=self._topic.log_id, subscription=SUBSCRIPTION)
        letters = {(row.shard.partition, row.offset) for row in store.parked.page(wanted, limit=1 << 20)}
        for record in records:
            place = f"partition {record.partition}, record {record.number}"
            for outcome, span in self.witness.settled(record):
                if outcome == "acked" and not self._acked_in[record.partition, record.generation].issuperset(span):
                    self.problems.append(f"{place}: nobody has acked all of {span}")
                # After a seek an event may become something else, and its row with it.
                gone = [offset for offset in span if (record.partition, offset) not in letters]
                if outcome == "dead" and gone and not self.witness.began:
                    self.problems.append(f"{place}: there is no dead letter of {gone}")
                if outcome == "discarded":
                    self.problems.append(f"{place}: {span} was discarded, which nobody wanted")

    def _tell_states(self, store: Any, records: Sequence[Record]) -> None:
        journal = self._world.journal
        settled: defaultdict[Life, RangeSet] = defaultdict(RangeSet)
        for record in records:
            if record.log_id == self._topic.log_id:
                for _, span in self.witness.settled(record):
                    settled[record.partition, record.generation].add(span)
        wanted = ParkedFilter(log_id=self._topic.log_id, subscription=SUBSCRIPTION, states=frozenset({"waiting"}))
        rows = [row for row in store.parked.waiting(wanted) if not row.replay]
        for cursor in store.cursors.load(self._topic.log_id, SUBSCRIPTION):
            number = cursor.shard.partition
            partition = self._topic.partitions[number]
            end = store.log.bounds(partition).stop
            journal.cursor(named(cursor.generation), partition.log_id, number, cursor.next_offset, end)
            for row in rows:
                if row.shard.partition == number:
                    journal.parked(named(cursor.generation), partition.log_id, number, row.offset, row.offset + 1)
            for generation in range(cursor.generation + 1):
                # What a seek has passed over, and what an earlier life had not come to, is nobody's business there.
                last = generation == cursor.generation
                ours = self.witness.began.get((number, generation), 0) if last else end
                for span in settled[number, generation].missing(Range(0, min(ours, end))):
                    journal.pending(named(generation), partition.log_id, number, span.start, span.stop)

    def _check_chains(self, records: Sequence[Record]) -> None:
        """Look whether the records of each shard follow each other without a hole; a seek may leave none."""
        by_shard: defaultdict[int, list[Record]] = defaultdict(list)
        for record in records:
            by_shard[record.partition].append(record)
        for partition, mine in by_shard.items():
            position, number, generation = 0, 0, 0
            for record in mine:
                moved = record.generation > generation
                if record.number != number + 1 or (record.begin != position and not moved):
                    self.problems.append(
                        f"the records of partition {partition} are no chain: {record.number} from {record.begin} comes "
                        f"after {number}, which ended at {position}"
                    )
                    return
                position, number, generation = record.next_offset, record.number, record.generation


def _is_dead(hand: Any, offset: int) -> bool:
    """Return whether an event has had its last attempt, and its death is decided and not written yet."""
    progress = hand._engine.progress  # noqa: SLF001 - a hand tells nobody else
    steps = [progress._outcomes, progress._writing.outcomes if progress._writing else {}]  # noqa: SLF001 - the same
    return any(offset in outcomes[Outcome.DEAD] for outcomes in steps if Outcome.DEAD in outcomes)


def replay_of(hand: Any, offset: int) -> int:
    """Return how often an event in a hand was brought back from the dead letters."""
    times: int = hand.replays.get(offset, 0) if hasattr(hand, "replays") else hand.replay
    return times


def generation_of(hand: Any) -> int:
    """Return the generation of the shard from which something was handed over."""
    generation: int = hand._engine.progress.generation  # noqa: SLF001 - a hand tells nobody else
    return generation
