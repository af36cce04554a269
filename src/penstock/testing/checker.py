"""Compares a journal with what Penstock promises: `check` returns every violation of the invariants I1 to I10.

A publish is *OK*, *FAILED* or *UNKNOWN*. An event is *seen* where a reader or a handler got it. *Now* is since the last
`Journal.restarted`, or always if there was none. What the test trimmed, deleted or damaged need not be there.

I1
    No OK event is lost: each was read now; none is in a gap, or outside of the latest bounds that came after it.
I2
    Nothing is seen that nobody published to that partition, no event with another key than its own, and nothing is read
    from a log after its deletion. The bytes of an event are its name: an altered one was never published.
I3
    An event of which every publish FAILED is never seen.
I4
    An offset names one event for ever: all who saw it and all who published there agree, no event was ever seen in what
    is a gap, and the end of the log never moves back. An OK event is seen at the offset that its publisher was told.
    Events of one key keep their order: an event whose first publish came after another one's OK has the higher offset;
    a subscription's first deliveries of them ascend.
I5
    A cursor is never below a commit that was OK before, never below where it was seen before, never beyond the end of
    the log, and never beyond every position that was asked for (with another outcome than FAILED) or where it began.
I6
    No event has two offsets, as it is seen or as publishers were told. None is delivered after it was settled. With a
    `window`, at most so many different events of a partition are delivered to a subscription that had been delivered to
    it before, between one restart and the next; whether one of them is repeated once or often makes no difference.
I7
    For each subscription that told any state of events in a partition, every event read there now is exactly one of
    acked, dead, expired, discarded, parked, pending; parked and pending as they were told now. What was acked was
    delivered, if any delivery was told.
I8
    Damage is reported or declared as a gap, all of it, and nothing else is reported. Nothing is missing in silence:
    within the latest bounds now, every offset was read or declared as a gap now.
I9
    Within `soon_seconds` after faults ended there was progress, unless faults began again before.
I10
    No write was OK whose epoch was below one that had been granted before.

Everything is done in columns: sorts of integers, no Python for single events. Ten million take less than a minute.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.testing.journal import GRANTED, KEY_NOT_TOLD, NO_KEY, SETTLEMENTS, STATES, Fact, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.testing.journal import Events, Ids, Integers, Journal, Place, Rows

    Mask = npt.NDArray[np.bool_]

SPELLED_MAX = 20
"""So many violations of each invariant are spelled out; the others are counted."""


class Violation(NamedTuple):
    """A promise that did not hold."""

    invariant: str
    """`I1` to `I10`."""
    where: str
    """Such as `log orders, partition 0, offset 12`."""
    what: str
    """What was promised and what was seen, in one sentence."""


def check(
    journal: Journal,
    *,
    window: int | None = None,
    soon_seconds: float = 10.0,
    describe: Callable[[int], str] = "event {:016x}".format,
) -> list[Violation]:
    """Return every violation, by invariant; `describe` may say more of an event than its `event_id`."""
    found = _Found(describe)
    for place, subscriptions in journal.places().items():
        _PartitionCheck(journal, place, subscriptions, found).run()
        for subscription in subscriptions:
            _SubscriptionCheck(journal, place, subscription, found).run(window)
    _check_leases(journal, found)
    _check_progress(journal, soon_seconds, found)
    return found.listed()


class _Found:
    """The violations so far: the first ones in words, the others counted."""

    def __init__(self, describe: Callable[[int], str]) -> None:
        self.describe = describe
        self._spelled: list[Violation] = []
        self._counts: Counter[str] = Counter()

    def note(self, invariant: str, count: int, spelled: Iterable[tuple[str, str]]) -> None:
        """Note so many violations; where and what they are is asked of the first ones only."""
        room = max(0, SPELLED_MAX - self._counts[invariant])
        self._spelled += [Violation(invariant, where, what) for where, what in islice(spelled, room)]
        self._counts[invariant] += count

    def note_spans(self, invariant: str, where: object, spans: _Spans, what: str) -> None:
        """Note a violation for each of these ranges."""
        wheres = (f"{where}, offsets [{start}, {stop})" for start, stop in zip(spans.start, spans.stop, strict=True))
        self.note(invariant, len(spans.start), ((where, what) for where in wheres))

    def listed(self) -> list[Violation]:
        more = {name: count - SPELLED_MAX for name, count in self._counts.items() if count > SPELLED_MAX}
        rest = [Violation(name, "and elsewhere", f"{count:,} more violations") for name, count in more.items()]
        return sorted(self._spelled + rest, key=lambda violation: int(violation.invariant[1:]))


# --- ranges ----------------------------------------------------------------------------------------------------


class _Spans(NamedTuple):
    """A set of offsets as ranges in ascending order that neither overlap nor touch, in two columns."""

    start: Integers
    stop: Integers

    @classmethod
    def of(cls, *rows: Rows | _Spans) -> _Spans:
        """Return all offsets that are in any of these.

        Starts and stops are sorted apart from each other: an offset is covered where more starts than stops lie at or
        below it, whichever belong together.
        """
        start, stop = np.concatenate([row.start for row in rows]), np.concatenate([row.stop for row in rows])
        filled = start < stop
        start, stop = np.sort(start[filled]), np.sort(stop[filled])
        breaks = stop[:-1] < start[1:]
        ends = np.ones(min(len(start), 1), bool)
        return cls(start[np.concatenate([ends, breaks])], stop[np.concatenate([breaks, ends])])

    def holds(self, offsets: Integers) -> Mask:
        """Tell for each offset whether it is in one of the ranges."""
        at = np.searchsorted(self.start, offsets, side="right") - 1
        return (at >= 0) & (offsets < self.stop[at]) if len(self.stop) else np.zeros(len(offsets), bool)

    def both(self, other: _Spans) -> _Spans:
        """Return what is in both: where two more starts than stops lie at or below an offset."""
        start = np.sort(np.concatenate([self.start, other.start]))
        stop = np.sort(np.concatenate([self.stop, other.stop]))
        return _Spans.of(_Spans(start[1:], stop[:-1]))

    def without(self, other: _Spans) -> _Spans:
        """Return what is in this and not in the other."""
        return self.both(_Spans(np.concatenate([[-1], other.stop]), np.concatenate([other.start, [_MAX]])))


# --- a partition -----------------------------------------------------------------------------------------------


class _PartitionCheck:
    """What was published to one partition, against what was seen of it.

    All events are rows of the same columns: those that were published, then those that readers saw, then those that
    handlers saw. A row's `event` is equal where the payloads are.
    """

    def __init__(self, journal: Journal, place: Place, subscriptions: list[str], found: _Found) -> None:
        self._place, self._found = place, found
        self._deletion = journal.deletion(place.log)
        self._now = _last(journal.restarts())
        rows = {fact: journal.rows(fact, place) for fact in Fact}
        self._gaps, self._bounds, self._reads = rows[Fact.GAP], rows[Fact.BOUNDS], rows[Fact.STORED]
        numbers = self._bounds.number
        self._latest = self._bounds.where((numbers == _last(numbers)) & (numbers > self._now))
        self._acknowledged = _Spans.of(rows[Fact.PUBLISHED].where(rows[Fact.PUBLISHED].code == Outcome.OK))
        self._damaged, self._reported = _Spans.of(rows[Fact.DAMAGED]), _Spans.of(rows[Fact.REPORTED])
        self._gone = _Spans.of(rows[Fact.TRIMMED], _Spans(np.array([0]), np.array([_MAX if self._deletion else 0])))
        self._excused = _Spans.of(self._gone, self._damaged)

        published, stored = journal.events(Fact.PUBLISHED, place), journal.events(Fact.STORED, place)
        parts = [published, stored, *(journal.events(Fact.DELIVERED, place, name) for name in subscriptions)]
        self._id = np.concatenate([part.id for part in parts])
        self._key = np.concatenate([part.key for part in parts])
        self._offset = np.concatenate([part.offset for part in parts])
        self._published, self._seen = slice(len(published.id)), slice(len(published.id), None)
        self._published_number, self._published_code = published.number, published.code
        self._read_now = len(published.id) + np.flatnonzero(stored.number > self._now)
        del published, stored, parts  # they are large, and so is what comes now
        order, groups = _grouped(self._id)
        self._event = np.empty_like(groups)
        self._event[order] = groups
        self._count = int(self._event.max(initial=-1)) + 1
        self._told = np.flatnonzero(self._published_code == Outcome.OK)
        self._first_told = _first(self._event[self._told], self._told, self._count)

    def run(self) -> None:
        known = self._mask(self._published)[self._event[self._seen]]
        sighted, alien = (self._seen.start + np.flatnonzero(mask) for mask in (known, ~known))
        self._check_origin(sighted, alien)
        self._check_keys()
        self._check_agreement(sighted)
        self._check_doubles(sighted)
        self._check_losses(sighted, alien)
        self._check_key_order()
        self._check_ends()
        self._check_damage()

    def _mask(self, rows: Integers | slice) -> Mask:
        """Tell for each event whether it is in one of these rows."""
        mask = np.zeros(self._count, bool)
        mask[self._event[rows]] = True
        return mask

    def _name(self, row: int) -> str:
        return self._found.describe(int(self._id[row]))

    def _note(self, invariant: str, rows: Integers, what: str) -> None:
        """Note a violation at each offset of these rows."""
        rows = rows[np.unique(self._offset[rows], return_index=True)[1]]
        self._note_each(invariant, rows, (f"{self._name(row)} {what}" for row in rows))

    def _note_each(self, invariant: str, rows: Integers, whats: Iterable[str]) -> None:
        wheres = (f"{self._place}, offset {self._offset[row]}" for row in rows)
        self._found.note(invariant, len(rows), zip(wheres, whats, strict=False))

    def _check_origin(self, sighted: Integers, alien: Integers) -> None:
        self._note("I2", alien, "was seen, but never published here")
        possible = self._mask(np.flatnonzero(self._published_code != Outcome.FAILED))
        self._note("I3", sighted[~possible[self._event[sighted]]], "was seen, though every publish of it failed")
        if self._deletion:
            late = _Spans.of(self._reads.where(self._reads.number > self._deletion))
            self._found.note_spans("I2", self._place, late, "events were read from a log that had been deleted")

    def _check_keys(self) -> None:
        key = np.full(self._count, KEY_NOT_TOLD, np.uint64)
        key[self._event[self._published]] = self._key[self._published]
        own, seen = key[self._event[self._seen]], self._key[self._seen]
        other = (seen != own) & (seen != KEY_NOT_TOLD) & (own != KEY_NOT_TOLD)
        self._note("I2", self._seen.start + np.flatnonzero(other), "was seen with another key than its own")

    def _check_agreement(self, sighted: Integers) -> None:
        """Check that all who named an offset meant the same event."""
        rows = np.concatenate([sighted, self._told])
        slots = _dense(self._offset[rows])
        holder = _first(slots, rows, int(slots.max(initial=-1)) + 1)[slots]
        differs = np.flatnonzero(self._event[holder] != self._event[rows])
        differs = differs[np.unique(slots[differs], return_index=True)[1]]
        pairs = zip(holder[differs], rows[differs], strict=True)
        self._note_each("I4", rows[differs], (f"it held {self._name(a)}, and {self._name(b)}" for a, b in pairs))

    def _check_doubles(self, sighted: Integers) -> None:
        """Check that an event has one offset, in the eyes of all."""
        seen_at = _first(self._event[sighted], self._offset[sighted], self._count)
        again = sighted[self._offset[sighted] != seen_at[self._event[sighted]]]
        self._note("I6", again, "was seen at another offset, too")

        told_at = _first(self._event[self._told], self._offset[self._told], self._count)
        again = self._told[self._offset[self._told] != told_at[self._event[self._told]]]
        self._note("I6", again, "was published here, and before at another offset")

        there = self._mask(sighted[self._offset[sighted] == told_at[self._event[sighted]]])
        moved = self._first_told[(told_at >= 0) & (seen_at >= 0) & ~there]
        self._note("I4", moved, "was published here, but seen at another offset")

    def _check_losses(self, sighted: Integers, alien: Integers) -> None:
        rows = np.sort(self._first_told[self._first_told >= 0])
        offsets = self._offset[rows]
        gaps = _Spans.of(self._gaps)
        outside = np.zeros(len(rows), bool)
        if len(self._latest.number):
            outside = (offsets < self._latest.start) | (offsets >= self._latest.stop)
            outside &= self._published_number[rows] < self._latest.number
        # What is altered is told as I2; that the original is not there is no news then.
        unread = ~self._mask(self._read_now)[self._event[rows]] & ~np.isin(offsets, self._offset[alien])

        left = ~self._excused.holds(offsets)
        reasons = {"is in a gap": gaps.holds(offsets), "is outside of the log": outside, "was not read": unread}
        for reason, applies in reasons.items():
            self._note("I1", rows[left & applies], f"was acknowledged here, but {reason}")
            left &= ~applies

        others = sighted[self._first_told[self._event[sighted]] < 0]
        others = others[gaps.holds(self._offset[others]) & ~self._excused.holds(self._offset[others])]
        self._note("I4", others, "was seen, but its offset is in a gap")

    def _check_key_order(self) -> None:
        """Check that events of one key have offsets in the order of their publishes."""
        begun = _first(self._event[self._published], np.arange(self._published.stop), self._count)
        rows = np.sort(self._first_told[self._first_told >= 0])
        rows = rows[self._key[rows] > NO_KEY]
        late = rows[_out_of_order(self._key[rows], self._offset[rows], begun[self._event[rows]], rows)]
        self._note("I4", late, "is before an event of the same key that was published earlier")

    def _check_ends(self) -> None:
        stops = self._bounds.stop[self._bounds.number < (self._deletion or _MAX)]
        receded = _Spans.of(_Spans(stops, np.maximum.accumulate(stops))).without(self._damaged)
        self._found.note_spans("I4", self._place, receded, "the log had reached them, but later ended before")

    def _check_damage(self) -> None:
        declared, silent = self._gaps.where(self._gaps.code == 1), _Spans.of(self._gaps.where(self._gaps.code == 0))
        unreported = self._damaged.without(_Spans.of(self._reported, declared, self._gone))
        self._found.note_spans("I8", self._place, unreported, "they were damaged, but that was not reported")
        wrong = self._reported.without(self._damaged)
        self._found.note_spans("I8", self._place, wrong, "they were reported as damaged, but were not")

        reads, gaps = self._reads.where(self._reads.number > self._now), declared.where(declared.number > self._now)
        unread = _Spans.of(self._latest).without(_Spans.of(reads, gaps))
        silent = _Spans.of(silent, unread).without(_Spans.of(self._excused, self._acknowledged))  # the latter is I1
        self._found.note_spans("I8", self._place, silent, "nothing was read there, and no gap was declared")


# --- subscriptions, leases, progress ---------------------------------------------------------------------------


class _SubscriptionCheck:
    """What one subscription did with one partition."""

    def __init__(self, journal: Journal, place: Place, name: str, found: _Found) -> None:
        self._journal, self._place, self._name, self._found = journal, place, name, found
        self._where = f"{place}, subscription {name}"
        self._deletion = journal.deletion(place.log)

    def run(self, window: int | None) -> None:
        self._check_cursors()
        delivered = self._journal.events(Fact.DELIVERED, self._place, self._name)
        if len(delivered.id):
            self._check_deliveries(delivered, window)
        if self._deletion is None:
            self._check_states()

    def _rows(self, fact: Fact) -> Rows:
        rows = self._journal.rows(fact, self._place, self._name)
        return rows if self._deletion is None else rows.where(rows.number < self._deletion)

    def _check_cursors(self) -> None:
        cursors, commits = self._rows(Fact.CURSOR), self._rows(Fact.COMMITTED)
        if not len(cursors.number):
            return
        at = cursors.start
        done = commits.where(commits.code == Outcome.OK)
        floors = np.concatenate([[0], np.maximum.accumulate(done.start)])
        committed = floors[np.searchsorted(done.number, cursors.number)]
        before = np.maximum.accumulate(at)
        began = 0 if len(commits.number) and commits.number[0] < cursors.number[0] else int(at[0])
        asked = int(commits.start[commits.code != Outcome.FAILED].max(initial=began))
        self._note_cursors(at, at < committed, "a commit of {} had been OK", committed)
        self._note_cursors(at, at < before, "it had been at {} before", before)
        self._note_cursors(at, at > cursors.stop, "the log ended at {}", cursors.stop)
        self._note_cursors(at, at > asked, "nobody had asked for more than {}", np.full(len(at), asked))

    def _note_cursors(self, at: Integers, broken: Mask, why: str, limit: Integers) -> None:
        pairs = zip(at[broken], limit[broken], strict=True)
        told = ((self._where, f"the cursor was at {place}, but {why.format(bound)}") for place, bound in pairs)
        self._found.note("I5", int(broken.sum()), told)

    def _check_deliveries(self, delivered: Events, window: int | None) -> None:
        rows = np.arange(len(delivered.id))
        offsets, slots = np.unique(delivered.offset, return_inverse=True)
        first = _first(slots, rows, len(offsets))

        keyed = np.sort(first)
        keyed = keyed[delivered.key[keyed] > NO_KEY]
        late = keyed[_out_of_order(delivered.key[keyed], delivered.offset[keyed], keyed, keyed)]
        self._note("I4", delivered.offset[late], "its first delivery was after that of a later event of the same key")

        settlements = self._rows(Fact.SETTLED)
        settled = _earliest(offsets, settlements.where(settlements.code < len(SETTLEMENTS)))
        again = np.flatnonzero(delivered.number > settled[slots])
        self._note("I6", np.unique(delivered.offset[again]), "it was delivered after it had been settled")

        if window is not None:
            repeats = np.flatnonzero(first[slots] != rows)
            lives = np.searchsorted(self._journal.restarts(), delivered.number[repeats])
            repeated = np.bincount(np.unique(lives * len(offsets) + slots[repeats]) // len(offsets))
            over = np.flatnonzero(repeated > window)
            promise = f"events were delivered again in one go, but at most {window:,} may be"
            told = ((f"{self._where}, after restart {life}", f"{repeated[life]:,} {promise}") for life in over)
            self._found.note("I6", len(over), told)

    def _note(self, invariant: str, offsets: Integers, what: str) -> None:
        self._found.note(invariant, len(offsets), ((f"{self._where}, offset {offset}", what) for offset in offsets))

    def _check_states(self) -> None:
        rows = self._rows(Fact.SETTLED)
        if not len(rows.number):
            return
        now = _last(self._journal.restarts())
        excused = _Spans.of(*(self._journal.rows(fact, self._place) for fact in (Fact.TRIMMED, Fact.DAMAGED)))
        reads = self._journal.rows(Fact.STORED, self._place)
        stored = _Spans.of(reads.where(reads.number > now)).without(excused)
        told = rows.where((rows.number > now) | (rows.code < len(SETTLEMENTS)))
        states = [_Spans.of(told.where(told.code == code)) for code in range(len(STATES))]

        stateless = stored.without(_Spans.of(*states))
        self._found.note_spans("I7", self._where, stateless, "they are neither settled nor parked nor pending")
        for one in range(len(STATES)):
            for other in range(one):
                overlap = states[one].both(states[other]).both(stored)
                self._found.note_spans("I7", self._where, overlap, f"they are {STATES[other]} and {STATES[one]}")
        delivered = self._rows(Fact.DELIVERED)
        if len(delivered.number):
            unseen = states[STATES.index("acked")].without(_Spans.of(delivered))
            self._found.note_spans("I7", self._where, unseen, "they are acked, but were never delivered")


def _check_leases(journal: Journal, found: _Found) -> None:
    for name, rows in journal.leases().items():
        granted = np.maximum.accumulate(np.where(rows.code == GRANTED, rows.start, -1))
        stale = np.flatnonzero((rows.code == Outcome.OK) & (rows.start < granted))
        pairs = zip(rows.start[stale], granted[stale], strict=True)
        told = (f"a write with epoch {epoch} was OK, after {newer} had been granted" for epoch, newer in pairs)
        found.note("I10", len(stale), ((f"lease {name}", what) for what in told))


def _check_progress(journal: Journal, soon_seconds: float, found: _Found) -> None:
    ended, progressed = journal.times()
    next_progress = np.append(progressed, np.inf)[np.searchsorted(progressed, ended)]
    disturbed = np.append(ended[1:], np.inf)[: len(ended)] <= ended + soon_seconds
    slow = np.flatnonzero((next_progress > ended + soon_seconds) & ~disturbed)
    what = f"faults ended, but within {soon_seconds:g} s there was no progress"
    found.note("I9", len(slow), ((f"second {at:g}", what) for at in ended[slow]))


# --- columns ---------------------------------------------------------------------------------------------------

_MAX = int(np.iinfo(np.int64).max)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Multiplied by this, different numbers are different still, and small ones differ in their high bits, too."""


def _last(numbers: Integers) -> int:
    return int(numbers[-1]) if len(numbers) else 0


def _grouped(values: Ids) -> tuple[Integers, Integers]:
    """Return rows in an order that brings equal values together, and the number of the group that each is in.

    To sort numbers takes a fraction of the time that it takes to learn where they were. So each carries its row in its
    low bits; the few different values that are equal in the high ones are put in order afterwards.
    """
    bits = np.uint64(len(values).bit_length())
    packed = values * _SPREAD
    packed >>= bits
    packed <<= bits
    packed |= np.arange(len(values), dtype=np.uint64)
    packed.sort()
    order = (packed & (np.uint64(1) << bits) - np.uint64(1)).astype(np.int64)
    packed >>= bits
    ordered = values[order]
    confused = np.unique(packed[1:][(packed[1:] == packed[:-1]) & (ordered[1:] != ordered[:-1])])
    for start, stop in zip(*(np.searchsorted(packed, confused, side) for side in ("left", "right")), strict=True):
        order[start:stop] = order[start:stop][np.argsort(ordered[start:stop], kind="stable")]
        ordered[start:stop] = values[order[start:stop]]
    return order, np.concatenate([[0], np.cumsum(ordered[1:] != ordered[:-1])])[: len(values)]


def _dense(offsets: Integers) -> Integers:
    """Return slots for offsets, equal ones the same, so few that an array of them fits."""
    low, high = int(offsets.min(initial=_MAX)), int(offsets.max(initial=0))
    return offsets - low if high - low < 4 * len(offsets) else np.unique(offsets, return_inverse=True)[1]


def _first(slots: Integers, values: Integers, count: int) -> Integers:
    """Return for each slot the first of its values; -1 for one that has none."""
    first = np.full(count, -1)
    first[slots[::-1]] = values[::-1]  # of several for one slot the last stays
    return first


def _out_of_order(keys: Ids, offsets: Integers, begun: Integers, done: Integers) -> Integers:
    """Return which events have an offset below that of one of their key that was done before they were begun.

    They are given in the order in which they were done.
    """
    order, segment = _grouped(keys)
    segment <<= 32
    # A key's segment in the high bits keeps the running maximum from reaching into the next key.
    rank = segment | _dense(offsets)[order]
    highest = np.concatenate([[-1], np.maximum.accumulate(rank)])
    earlier = np.arange(len(keys))
    retried = np.flatnonzero(begun[order] < done[order])
    earlier[retried] = np.searchsorted(segment | done[order], segment[retried] | begun[order][retried])
    return np.sort(order[highest[earlier] > rank])


def _earliest(offsets: Integers, rows: Rows) -> Integers:
    """Return for each of these ascending offsets the lowest number of a row that covers it.

    A range is the union of two ranges, each as long as the same power of two. So rows are noted by their two ranges,
    by length; and from the longest on, what is noted for a range is handed to its halves.
    """
    low, high = np.searchsorted(offsets, rows.start), np.searchsorted(offsets, rows.stop)
    level = np.frexp(high - low)[1] - 1  # -1 for what covers none of them
    noted = np.full(len(offsets), _MAX)
    for length_log in range(int(level.max(initial=-1)), -1, -1):
        chosen = level == length_log
        np.minimum.at(noted, low[chosen], rows.number[chosen])
        np.minimum.at(noted, high[chosen] - (1 << length_log), rows.number[chosen])
        if half := 1 << length_log >> 1:
            noted[half:] = np.minimum(noted[half:], noted[:-half])
    return noted
