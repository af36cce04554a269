"""Progress: what is settled or parked, and the part of it that is not written yet.

A step is taken, written, and then told as written or not. What settles meanwhile goes into the next step; one that was
not written becomes part of the next, so that records stay a chain without holes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.engine.messages import Park, Step
from penstock.engine.states import Outcome
from penstock.offsets import Bitmap, Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.engine.messages import Offsets, Wish

LATENCIES: Final = 40
"""How many buckets there are: the last but one ends at 2**38 microseconds, about three days."""
UNNOTED_MAX: Final = 1 << 16
"""So many events may be acked, or passed over, and not in the bitmap yet."""


class Outcomes(Mapping[Outcome, RangeSet]):
    """What a step has settled, and how; what was acked becomes ranges when somebody looks: in a thread, as a rule."""

    def __init__(self, ranges: dict[Outcome, RangeSet], acked: list[NDArray[np.int64]]) -> None:
        self._ranges = ranges
        self._acked = acked

    def _known(self) -> dict[Outcome, RangeSet]:
        if self._acked:
            acked = RangeSet.from_offsets(_joined(self._acked))
            self._ranges[Outcome.ACKED] = self._ranges.get(Outcome.ACKED, RangeSet()) | acked
            self._acked = []
        return self._ranges

    def __getitem__(self, outcome: Outcome) -> RangeSet:
        return self._known()[outcome]

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())


class Progress:
    """The cursor of a shard as it is decided, and what of it is unwritten."""

    def __init__(
        self,
        *,
        next_offset: int,
        settled: bytes,
        attempts: Mapping[int, int],
        generation: int,
        number: int,
        shared: bool = False,
    ) -> None:
        self._shared = shared
        """Whether others write the same cursor: then a step only says what it adds to it."""
        self._bitmap = Bitmap.from_bytes(next_offset, settled)
        self._bitmap.advance()
        self.attempts = dict(attempts)
        """Attempts that were made, for unsettled events that had one; 0 marks a suspect that is tried in a group."""
        self.generation = generation
        self._attempts_written = dict(attempts)
        self._forgotten: set[int] = set()
        """What was found to be others' while a step was written."""
        self._number = number
        self._begin = next_offset
        self._reset()
        self._gathering: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
        """Ranges of which some was acked, and not all: as a rule the rest is soon, and then it is one range …"""
        self._unnoted: list[NDArray[np.int64]] = []
        """Acked, or others', and not in the bitmap yet: together they cost less …"""
        self._unnoted_events = 0
        """… and how many that are."""
        self._writing: Step | None = None
        self._taken = 0
        self._written = 0
        self.slots_touched: set[int] = set()
        """Slots of which something was settled since the last step, if anybody notes it …"""
        self._slots_writing: set[int] = set()
        """… and in the step that is being written."""
        self._wish: Wish | None = None
        self._freed = RangeSet()

    def _reset(self) -> None:
        self.unwritten = 0
        """How many events were settled or parked since the last step."""
        self._outcomes: defaultdict[Outcome, RangeSet] = defaultdict(RangeSet)
        self._acked_singly: list[int] = []
        self._acked_many: list[NDArray[np.int64]] = []
        """Acked, and not among the outcomes yet: together they cost less, and are fewer ranges."""
        self.parks: dict[int, Park] = {}
        self._latencies = [0] * LATENCIES
        self._retried = 0
        self._touched = False

    @property
    def bitmap(self) -> Bitmap:
        """What is settled or parked, or others'."""
        self._end_gathering()
        if self._unnoted:
            self._bitmap.set_new(_joined(self._unnoted))
            self._bitmap.advance()
            self._unnoted, self._unnoted_events = [], 0
        return self._bitmap

    @property
    def next_offset(self) -> int:
        """The first offset that is neither settled nor parked."""
        return self.bitmap.start

    @property
    def least_next_offset(self) -> int:
        """What `next_offset` is at least, for whoever asks often: a recent one."""
        bitmap = self.bitmap if self._unnoted_events > UNNOTED_MAX else self._bitmap
        return bitmap.start

    @property
    def known_until(self) -> int:
        """One beyond all that was settled, or others', before it was read."""
        return self._bitmap.end

    @property
    def dirty(self) -> bool:
        """Whether there is anything to write."""
        return self._touched

    @property
    def writing(self) -> bool:
        """Whether a step is being written."""
        return self._writing is not None

    @property
    def slots_unwritten(self) -> set[int]:
        """Slots of which something that was noted is not written."""
        return self.slots_touched | self._slots_writing

    def mark(self) -> int:
        """Return what `passed` will be asked: everything that is settled now."""
        return self._taken + self._touched

    def passed(self, mark: int) -> bool:
        """Whether everything is written that was settled when this was marked."""
        return self._written >= mark

    # --- settling -----------------------------------------------------------------------------

    def settle(self, outcome: Outcome, offsets: Offsets) -> None:
        """Let the cursor pass these, which it has not passed and which ascend: settled, or parked, in this way."""
        if isinstance(offsets, Range):
            bitmap = self.bitmap
            if offsets.start == bitmap.start and not bitmap.count:
                bitmap.seek(offsets.stop)  # the usual case: nothing is settled ahead
            else:
                bitmap.set_range(offsets)
                bitmap.advance()
            self._outcomes[outcome].add(offsets)
        elif outcome is Outcome.ACKED:
            self._note_acked(offsets)
        else:
            self.bitmap.set_new(offsets)
            self.bitmap.advance()
            self._outcomes[outcome] |= RangeSet.from_offsets(offsets)
        self._count_settled(outcome, offsets)

    def settle_part(self, start: int, stop: int, offsets: NDArray[np.int64]) -> None:
        """Let the cursor pass a part of a range, which was acked; the other parts of it are others' to ack."""
        parts = self._gathering.setdefault((start, stop), [])
        parts.append(offsets)
        gathered = sum(map(len, parts))
        if gathered < stop - start:
            self._count_settled(Outcome.ACKED, offsets)
            return
        del self._gathering[start, stop]
        self.unwritten -= gathered - len(offsets)
        self.settle(Outcome.ACKED, Range(start, stop))

    def _count_settled(self, outcome: Outcome, offsets: Offsets) -> None:
        self.unwritten += len(offsets)
        self._touched = True
        if self.attempts:
            failed = self._forget_attempts(offsets)
            self._retried += failed if outcome is not Outcome.PARKED else 0

    def _note_acked(self, offsets: NDArray[np.int64]) -> None:
        self._acked_many.append(offsets)
        self._note(offsets)

    def _note(self, offsets: NDArray[np.int64]) -> None:
        self._unnoted.append(offsets)
        self._unnoted_events += len(offsets)

    def _end_gathering(self) -> None:
        """Wait no longer for the rest of what was acked in part."""
        if self._gathering:
            for parts in self._gathering.values():
                for offsets in parts:
                    self._note_acked(offsets)
            self._gathering = {}

    def settle_one(self, outcome: Outcome, offset: int) -> None:
        """Let the cursor pass one; the same as `settle`, and faster."""
        self.bitmap.set(offset)
        self.bitmap.advance()
        if outcome is Outcome.ACKED:
            self._acked_singly.append(offset)
        else:
            self._outcomes[outcome].add(Range(offset, offset + 1))
        self.unwritten += 1
        self._touched = True
        if self.attempts and self.attempts.pop(offset, 0) and outcome is not Outcome.PARKED:
            self._retried += 1

    def resolve(self, outcome: Outcome, offset: int, *, retried: bool) -> None:
        """Note how an event ended that the cursor had passed when it was parked."""
        self._outcomes[outcome].add(Range(offset, offset + 1))
        self.unwritten += 1
        self._retried += retried
        self._touched = True

    def _forget_attempts(self, offsets: Offsets) -> int:
        """Forget the attempts of these; returns how many of them had failed."""
        attempts = self.attempts
        if len(offsets) <= len(attempts):
            gone = [
                offset for offset in (offsets if isinstance(offsets, Range) else offsets.tolist()) if offset in attempts
            ]
        elif isinstance(offsets, Range):
            gone = [offset for offset in attempts if offset in offsets]
        else:
            wanted = set(offsets.tolist())
            gone = [offset for offset in attempts if offset in wanted]
        return sum(attempts.pop(offset) > 0 for offset in gone)

    def pass_over(self, offsets: Offsets) -> None:
        """Let the cursor of this owner pass what is not its own, in memory only: others settle it."""
        bitmap = self.bitmap
        if isinstance(offsets, Range):
            bitmap.set_range(offsets)
        else:
            bitmap.set_many(offsets)
        bitmap.advance()

    def pass_read(self, offsets: Offsets) -> None:
        """Do the same for what was read, and was neither settled nor passed over since."""
        if isinstance(offsets, Range) or not len(offsets) or int(offsets[0]) < self.known_until:
            self.pass_over(offsets)
        else:
            self._note(offsets)  # the usual case: nothing of it was settled before it was read

    def forget(self, offsets: Iterable[int]) -> None:
        """Forget attempts at what is not this owner's: they are others' to count."""
        for offset in offsets:
            if self.attempts.pop(offset, None) is not None:
                self._attempts_written.pop(offset, None)
                self._forgotten.add(offset)

    def park(self, park: Park) -> None:
        """Write a row with the next step."""
        self.parks[park.row.offset] = park
        self._touched = True

    def claim(self, wish: Wish) -> None:
        """Claim with the next step; should that not be written, it is to be wished anew."""
        self._wish = wish
        self._touched = True

    def free(self, offsets: Offsets) -> None:
        """Let others have what was claimed."""
        self.pass_over(offsets)
        self._freed |= RangeSet([offsets]) if isinstance(offsets, Range) else RangeSet.from_offsets(offsets)
        self._touched = True

    def touch(self) -> None:
        """Write the cursor with the next step though nothing was settled: its attempts have changed."""
        self._touched = True

    def note_latency_of_all(self, count: int, between: tuple[int, int], wall_us: int) -> bool:
        """Count how long so many took, if all that were appended between these times took as long."""
        first, last = between
        slowest = _bucket(wall_us - first)
        if slowest != _bucket(wall_us - last):
            return False
        self._latencies[slowest] += count  # as a rule, the more so the further it is behind
        return True

    def note_latency(self, appended_at: NDArray[np.int64], wall_us: int) -> None:
        """Count how long these took from their append to their ack."""
        if not len(appended_at):
            return
        # What was appended together has one time, so there are far fewer times than events.
        starts = np.flatnonzero(appended_at[1:] != appended_at[:-1]) + 1
        counts = np.diff(starts, prepend=0, append=len(appended_at))
        took = np.maximum(wall_us - appended_at[np.append(0, starts)], 0).astype(np.float64)
        buckets = np.minimum(np.frexp(took)[1], LATENCIES - 1)
        self._add_latencies(np.bincount(buckets, weights=counts, minlength=LATENCIES).astype(np.int64).tolist())

    def _add_latencies(self, counts: Sequence[int]) -> None:
        self._latencies = [before + more for before, more in zip(self._latencies, counts, strict=True)]

    def note_latency_of_one(self, appended_at: int, wall_us: int) -> None:
        """Count how long one took."""
        self._latencies[_bucket(wall_us - appended_at)] += 1

    # --- writing ------------------------------------------------------------------------------

    def take(self) -> Step | None:
        """Return what is to be written now; None if nothing is, or a step is under way."""
        if not self._touched or self._writing is not None:
            return None
        self._end_gathering()
        acked = self._acked_many
        if self._acked_singly:
            acked.append(np.array(self._acked_singly, np.int64))
        recorded = bool(acked) or any(self._outcomes.values())
        alone = not self._shared
        step = Step(
            number=self._number + 1 if recorded else self._number,
            generation=self.generation,
            begin=self._begin,
            next_offset=self.next_offset if alone else self.least_next_offset,
            settled=self.bitmap.to_bytes() if alone and self._bitmap.count else b"",
            attempts=dict(self.attempts),
            changed_attempts=self._changed_attempts(),
            parks=tuple(self.parks.values()),
            outcomes=Outcomes(dict(self._outcomes), acked),
            latencies=tuple(self._latencies),
            retried=self._retried,
            freed=self._freed,
            wish=self._wish,
        )
        self._wish, self._freed = None, RangeSet()
        self._writing = step
        self._taken += 1
        self._slots_writing, self.slots_touched = self.slots_touched, set()
        self._reset()
        return step

    def _changed_attempts(self) -> dict[int, int | None]:
        before, now = self._attempts_written, self.attempts
        if not before and not now:
            return {}
        changed: dict[int, int | None] = {offset: made for offset, made in now.items() if before.get(offset) != made}
        changed.update((offset, None) for offset in before if offset not in now)
        return changed

    def written(self, step: Step) -> None:
        """Note that a step is on the medium."""
        assert step is self._writing, "a step is told as written that is not being written"
        self._writing = None
        self._written = self._taken  # what was not written before is part of it
        self._slots_writing = set()
        for offset, made in step.changed_attempts.items():
            if made is None:
                self._attempts_written.pop(offset, None)
            elif offset not in self._forgotten:
                self._attempts_written[offset] = made
        self._forgotten.clear()
        self._number = step.number
        self._begin = step.next_offset

    def not_written(self, step: Step) -> None:
        """Put a step that was not written before what came since."""
        assert step is self._writing, "a step is told as not written that is not being written"
        self._writing = None
        self._touched = True
        self._freed |= step.freed
        self.slots_touched |= self._slots_writing
        self._slots_writing = set()
        for outcome, offsets in step.outcomes.items():
            self._outcomes[outcome] = offsets | self._outcomes[outcome]
            self.unwritten += len(offsets)
        self.parks = {park.row.offset: park for park in step.parks} | self.parks
        self._add_latencies(step.latencies)
        self._retried += step.retried


def _joined(offsets: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return offsets[0] if len(offsets) == 1 else np.concatenate(offsets)


def _bucket(took_us: int) -> int:
    return min(max(took_us, 0).bit_length(), LATENCIES - 1)
