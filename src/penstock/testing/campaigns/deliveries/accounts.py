"""What the campaign knows of a round of several processes at a time, and what must hold of it.

What processes tell is put in the order of its times. What the store has in the end is the ledger: its records say what
was settled, and each was made in the transaction that wrote it, so that an event is settled at some moment between the
making of its record and the answer. Promised is that

* a record that was answered is in the ledger, once; one that no process has made is not; and they chain;
* an event has one final outcome, the one that its payload names, and is a dead letter only if that is;
* nothing is handed over again that was known to be settled, unless its process had lost it and could not know;
* no event is in two hands at a time, but for those of a process that was ended before;
* where keys have an order, none is handed over before all earlier ones of its key are settled: durably, or by the very
  process that is given the next;
* nothing is written in the name of a lease that another process has by then;
* no offset is claimed by two, or claimed and given back at the same time.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.columns import slot_of_key
from penstock.rows import ParkedFilter, Shard
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.runtime.ledger import Record, decode_record
from penstock.runtime.subscriptions import CLAIMED, shard_lease
from penstock.testing.campaigns.deliveries.books import FINAL, PAGE_BYTES, Place, Told
from penstock.testing.campaigns.deliveries.consumer import Said
from penstock.testing.campaigns.deliveries.moves import Answered, Claims, Made, TookSome, claims_in, lease_of
from penstock.testing.campaigns.deliveries.script import DEAD, SUBSCRIPTION, TOPIC, Did
from penstock.testing.campaigns.deliveries.sharer import Handed, Stamped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.rows import TopicInfo
    from penstock.stores.file.store import FileStore
    from penstock.testing.campaigns.deliveries.script import Scene

NEVER: Final = 1 << 63


class Hand(NamedTuple):
    """An event that a process was given."""

    process: int
    epoch: int


class Written(NamedTuple):
    """A record of the ledger: who made it, and between which times it was written."""

    process: int
    made: int
    answered: int
    berth: int


class Times(NamedTuple):
    """From when on events may have been settled, and from when on that was known."""

    made: dict[Place, int]
    answered: dict[Place, int]


class Accounts:
    """Everything that was told of one round."""

    def __init__(self, scene: Scene, found: Callable[[str], None]) -> None:
        self._scene = scene
        self._found = found
        self.log = ""
        self.published: dict[Place, Told] = {}
        self._told: list[tuple[int, int, object]] = []
        """The time, the process and the message."""
        self._over: dict[int, int] = {}
        """When processes were ended, or frozen."""
        self.counts: Counter[str] = Counter()

    def publish(self, log: str, partition: int, offset: int, told: Sequence[Told]) -> None:
        """Note what was published."""
        self.log = log
        for number, each in enumerate(told):
            self.published[Place(partition, offset + number)] = each

    def hear(self, process: int, stamped: Stamped) -> None:
        """Note what a process has told."""
        self._told.append((stamped.at, process, stamped.message))
        if isinstance(stamped.message, Claims):
            self._check_claims(stamped.message)

    def ended(self, process: int, at: int) -> None:
        """Note that a process was ended, or is about to be: from now on others may have what it had."""
        self._over.setdefault(process, at)

    # --- judging ------------------------------------------------------------------------------

    def check(self, store: FileStore) -> None:
        """Compare what was told with what the store has in the end."""
        self._told.sort(key=lambda each: each[:2])
        [topic] = [topic for topic in store.log.topics() if topic.name == TOPIC]
        records = self._ledger(store)
        written = self._written(records)
        self._check_chain([decode_record(record) for record in records])
        self._check_leases(written)
        self._check_hands(written)
        for cursor in store.cursors.load(topic.log_id, SUBSCRIPTION):
            self._check_claims(claims_in(cursor))
        self._check_end(store, topic, [decode_record(record) for record in records])

    def _of(self, *kinds: type) -> Iterator[tuple[int, int, object]]:
        return (each for each in self._told if isinstance(each[2], kinds))

    def _ledger(self, store: FileStore) -> list[bytes]:
        moved: list[bytes] = []
        for topic in store.log.topics():
            if topic.name == LEDGER:
                for item in store.log.read(topic.partitions[0], 0, bytes_max=PAGE_BYTES):
                    moved += item.columns.column("data").to_pylist()  # type: ignore[union-attr] # which a gap has not
        waiting = [record for _, record in store.cursors.settlements(10_000)]
        # What was appended and not forgotten yet is in both places.
        both = next(count for count in range(len(waiting), -1, -1) if waiting[:count] == moved[len(moved) - count :])
        return moved + waiting[both:]

    def _written(self, records: Sequence[bytes]) -> dict[bytes, Written]:
        """Return who has written each record of the ledger, and when."""
        found: dict[bytes, Written] = {}
        for at, process, message in self._of(Made, Answered):
            match message:
                case Made(record, berth):
                    found[record] = Written(process, at, NEVER, berth)
                case Answered(record, error):
                    if error:
                        self.counts[f"refused: {error}"] += 1
                        found.pop(record, None)
                    elif record:
                        found[record] = found[record]._replace(answered=at)
        there = Counter(records)
        for record, count in there.items():
            if record not in found or count > 1:
                self._found(
                    f"the ledger has {count} of {decode_record(record)}, which was made {record in found:d} times"
                )
        for record, each in found.items():
            if each.answered != NEVER and record not in there:
                self._found(f"the ledger has not {decode_record(record)}, which was answered")
        return {record: each for record, each in found.items() if record in there}

    def _check_chain(self, records: Sequence[Record]) -> None:
        last: dict[int, Record] = {}
        for record in records:
            before = last.get(record.partition)
            number, begin = (1, 0) if before is None else (before.number + 1, before.next_offset)
            if (record.number, record.begin) != (number, begin):
                self._found(f"after {before} comes {record}")
            last[record.partition] = record

    def _lease(self, place: Place, berth: int) -> str:
        """Return whose owner may settle an event."""
        if self._scene.mode == CLAIMED:
            return shard_lease(Shard(self.log, SUBSCRIPTION, berth, place.partition))
        return lease_of(self.log, SUBSCRIPTION, slot_of_key(self.published[place].key, place.partition))

    def _check_leases(self, written: dict[bytes, Written]) -> None:
        """See that nothing was written for a lease that another one had: a store writes one after the other."""
        taken: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for at, process, message in self._of(TookSome):
            assert isinstance(message, TookSome)
            for lease, epoch in message.leases:
                taken[lease].append((at, epoch, process))
        for data, each in written.items():
            record = decode_record(data)
            for place in _places(record):
                lease = self._lease(place, each.berth)
                before = [one for one in taken[lease] if one[0] < each.made]
                owner = max(before, key=lambda one: one[1], default=(0, 0, each.process))
                if owner[2] != each.process:
                    self._found(
                        f"I10: {place} is settled by process {each.process}, and {lease} is {owner[2]}'s: {record}"
                    )

    # --- hands --------------------------------------------------------------------------------

    def _check_hands(self, written: dict[bytes, Written]) -> None:
        times = self._settled_at(written)
        epochs: Counter[str] = Counter()
        hands: dict[Place, Hand] = {}
        closed: defaultdict[tuple[int, str, int], set[Place]] = defaultdict(set)
        """What a process has said to be done, for as long as it has a lease with an epoch."""
        given: dict[tuple[int, Place], tuple[str, int, int]] = {}
        for at, process, message in self._of(TookSome, Handed, Said):
            match message:
                case TookSome(leases):
                    for lease, epoch in leases:
                        epochs[lease] = max(epochs[lease], epoch)
                case Handed(partition, offset, payload, attempt, lease, epoch):
                    place = Place(partition, offset)
                    self.counts["events handed over"] += 1
                    if self.published.get(place, Told(b"", b"")).payload != payload:
                        self._found(f"{place} is handed over as {payload!r}, and is {self.published.get(place)}")
                    given[process, place] = (lease, epoch, attempt)
                    if epoch < epochs[lease] or at > self._over.get(process, NEVER):
                        self.counts["events handed over by a process that had lost them"] += 1
                        continue
                    self._check_holder(at, process, place, hands.get(place))
                    self._check_turn(at, process, place, times, closed[process, lease, epoch])
                    hands[place] = Hand(process, epoch)
                case Said(partition, offset, _, did):
                    place = Place(partition, offset)
                    lease, epoch, attempt = given[process, place]
                    if hands.get(place) == Hand(process, epoch):
                        del hands[place]
                    if did in {Did.ACKED, Did.REJECTED} or (did is Did.FAILED and attempt > self._scene.max_retries):
                        closed[process, lease, epoch].add(place)

    def _settled_at(self, written: dict[bytes, Written]) -> Times:
        times = Times({}, {})
        for data, each in written.items():
            for place in _places(decode_record(data), final=True):
                times.made[place] = min(times.made.get(place, NEVER), each.made)
                times.answered[place] = min(times.answered.get(place, NEVER), each.answered)
        return times

    def _check_holder(self, at: int, process: int, place: Place, holder: Hand | None) -> None:
        if holder is not None and at < self._over.get(holder.process, NEVER):
            event = self.published[place]
            self._found(f"{place} {event} is given to process {process}, and is in the hands of {holder}")

    def _check_turn(self, at: int, process: int, place: Place, times: Times, closed: set[Place]) -> None:
        event = self.published[place]
        if times.answered.get(place, NEVER) < at:
            self._found(f"{place} {event} is given to process {process} after it was settled")
        if self._scene.mode == CLAIMED:
            return
        for offset in range(place.offset):
            earlier = Place(place.partition, offset)
            before = self.published[earlier]
            if before.key == event.key and earlier not in closed and times.made.get(earlier, NEVER) > at:
                self._found(f"{place} {event} is given to process {process} while {earlier} {before} is open")

    # --- claims, and the end ------------------------------------------------------------------

    def _check_claims(self, claims: Claims) -> None:
        spans = sorted((start, stop, berth) for berth, ranges in claims.unsettled.items() for start, stop in ranges)
        for one, other in itertools.pairwise(spans):
            if other[0] < one[1]:
                self._found(f"partition {claims.partition}: berths {one[2]} and {other[2]} have the same: {claims}")

    def _check_end(self, store: FileStore, topic: TopicInfo, records: Sequence[Record]) -> None:
        for cursor in store.cursors.load(topic.log_id, SUBSCRIPTION):
            end = store.log.bounds(topic.partitions[cursor.shard.partition]).stop
            there = (cursor.next_offset, cursor.settled, dict(cursor.attempts), cursor.claims)
            if there != (end, b"", {}, {}):
                self._found(f"all is done, the log ends at {end}, and the cursor is {cursor}")
        outcomes: defaultdict[Place, list[str]] = defaultdict(list)
        for record in records:
            for how in record.outcomes:
                for span in record.offsets(how):
                    for offset in span:
                        outcomes[Place(record.partition, offset)].append(how)
        wanted = ParkedFilter(log_id=topic.log_id, subscription=SUBSCRIPTION)
        rows = {Place(row.shard.partition, row.offset): row.state for row in store.parked.page(wanted, limit=10_000)}
        for place, event in self.published.items():
            how = "dead" if event.act in DEAD else "acked"
            if [each for each in outcomes[place] if each in FINAL] != [how]:
                self._found(f"{place} {event} ends as {how}, but it is {outcomes[place]}")
            if (rows.get(place) == "dead") != (how == "dead"):
                self._found(f"{place} {event} ends as {how}, and its row is {rows.get(place)}")


def _places(record: Record, *, final: bool = False) -> Iterator[Place]:
    """Return the events that a record is about; only those that it settles for good, if asked for."""
    for how in record.outcomes:
        if how in FINAL or not final:
            for span in record.offsets(how):
                yield from (Place(record.partition, offset) for offset in span)
