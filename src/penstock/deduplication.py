"""Deduplication: which sequences of each producer a partition has stored, exactly, and what a repeat is answered.

The same table serves every store that keeps its own log. What it promises:

* A sequence is stored at most once. Which ones are is known as ranges, never guessed from the highest.
* The last runs of a producer are answered with their offsets; older ones with the fact alone.
* A process's producer that was silent for a week is forgotten; when it comes again it is refused, because nobody
  could tell a repeat from news. Lasting producers are never forgotten. See `penstock.producers`.
* **Time never goes back here.** The latest time seen counts for what is forgotten and for what is too old, so that a
  wall clock that jumped ahead and back again cannot make a repeat look like news.
* The whole table fits into bytes and back, for stores that derive it from their log and take snapshots.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from typing import Self

import msgspec

from penstock.errors import IntegrityError, ProducerConflict, ProducerExpired, ProducerFenced, ProducerRefused
from penstock.offsets import Range, RangeSet
from penstock.producers import PRODUCER_HOLES_MAX, PRODUCER_IDLE_SECONDS, PRODUCER_RUNS_KEPT, Run, born_at
from penstock.rows import Appended

_IDLE_US = round(PRODUCER_IDLE_SECONDS * 1_000_000)


class _Snapshot(msgspec.Struct, array_like=True):
    """A producer as bytes; fields may be added at the end."""

    producer: bytes
    epoch: int
    floor: int
    used_at: int
    stored: bytes
    recent: list[tuple[int, int, int, int, int]]
    """Epoch, first sequence, length, digest and first offset of each run."""


# Built here: two threads must not build one type's at once.
_read_snapshots = msgspec.msgpack.Decoder(tuple[int, list[_Snapshot]]).decode


class _Producer:
    """Which sequences of a producer are stored, and where its last runs are."""

    __slots__ = ("end", "epoch", "floor", "recent", "stored", "used_at")

    def __init__(self) -> None:
        self.epoch = 0
        self.floor = 0  # below it nothing is known, so that nothing below it is accepted
        self.end = 0  # from it on nothing is stored, which is the usual case and quickly told
        self.stored = RangeSet()
        self.recent: deque[tuple[Run, Range]] = deque(maxlen=PRODUCER_RUNS_KEPT)
        self.used_at = 0

    def answer(self, run: Run) -> Appended | None:
        if run.epoch < self.epoch:
            return _refuse(ProducerFenced, run, f"has epoch {run.epoch}, which is over: it is {self.epoch} now")
        if run.first_sequence >= self.end:
            return None
        wanted = Range(run.first_sequence, run.end_sequence)
        if wanted.start < self.floor:
            return _refuse(ProducerExpired, run, "is too old to tell a repeat from news")
        return self._answer_among_stored(run, wanted)

    def _answer_among_stored(self, run: Run, wanted: Range) -> Appended | None:
        for stored, offsets in self.recent:
            if stored[2:] == run[2:]:
                return Appended(offsets, duplicate=True)
            if wanted.overlaps(Range(stored.first_sequence, stored.end_sequence)):
                return _refuse(ProducerConflict, run, "is stored already, with other content")
        overlap = len(RangeSet([wanted]) & self.stored)
        if overlap in {0, run.length}:
            return Appended(None, duplicate=True) if overlap else None
        return _refuse(ProducerConflict, run, "is stored already in part")

    def remember(self, run: Run, offsets: Range, now_us: int) -> None:
        self.epoch = run.epoch
        self.used_at = now_us
        self.stored.add(Range(run.first_sequence, run.end_sequence))
        self.recent.append((run, offsets))
        self.end = max(self.end, run.end_sequence)
        if self.stored.range_count > PRODUCER_HOLES_MAX:
            lowest = next(iter(self.stored))
            self.stored.discard(lowest)
            self.floor = lowest.stop


def _refuse(kind: type[ProducerRefused], run: Run, why: str) -> Appended:
    last = run.end_sequence - 1
    return Appended(None, refused=kind(f"producer {run.producer.hex()}: sequence {run.first_sequence} to {last} {why}"))


class ProducerTable:
    """The producers of one partition. Not safe for several threads at once."""

    def __init__(self) -> None:
        self._producers: dict[bytes, _Producer] = {}
        self._latest_us = 0
        self._none_idle_before_us = 0

    def __len__(self) -> int:
        return len(self._producers)

    def answer(self, run: Run, now_us: int) -> Appended | None:
        """Return the answer to a run that must not be stored, or None for news."""
        self._advance(now_us)
        known = self._producers.get(run.producer)
        if known is not None:
            return known.answer(run)
        born = born_at(run.producer)
        if born is not None and self._latest_us - born > _IDLE_US:
            return _refuse(ProducerExpired, run, "is of a producer so old that it may have been forgotten")
        return None

    def remember(self, run: Run, offsets: Range, now_us: int) -> None:
        """Note that a run was stored."""
        self._advance(now_us)
        producer = self._producers.pop(run.producer, None) or _Producer()
        producer.remember(run, offsets, self._latest_us)
        # At the end, so that the longest idle one comes first; a lasting one is never looked at for that.
        self._producers[run.producer] = producer

    def _advance(self, now_us: int) -> None:
        self._latest_us = max(self._latest_us, now_us)
        if self._latest_us < self._none_idle_before_us:
            return
        mortal = (name for name in self._producers if born_at(name) is not None)
        oldest = self._latest_us - _IDLE_US
        for name in list(takewhile(lambda name: self._producers[name].used_at < oldest, mortal)):
            del self._producers[name]
        # Whoever is used from now on is idle later than the one that has been idle longest.
        longest = next((self._producers[name].used_at for name in self._producers if born_at(name) is not None), None)
        self._none_idle_before_us = (self._latest_us if longest is None else longest) + _IDLE_US

    def to_bytes(self) -> bytes:
        """Return everything that is known, for `from_bytes`."""
        snapshots = [
            _Snapshot(
                producer=name,
                epoch=known.epoch,
                floor=known.floor,
                used_at=known.used_at,
                stored=known.stored.to_bytes(),
                recent=[(*run[1:], offsets.start) for run, offsets in known.recent],
            )
            for name, known in self._producers.items()
        ]
        return msgspec.msgpack.encode((self._latest_us, snapshots))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote; `IntegrityError` if these are other bytes."""
        table = cls()
        try:
            table._latest_us, snapshots = _read_snapshots(data)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise IntegrityError(f"these bytes are no table of producers: {error}") from None
        for snapshot in snapshots:
            known = table._producers[snapshot.producer] = _Producer()
            known.epoch, known.floor, known.used_at = snapshot.epoch, snapshot.floor, snapshot.used_at
            known.stored = RangeSet.from_bytes(snapshot.stored)
            known.end = max((span.stop for span in known.stored), default=0)
            for epoch, first, length, digest, start in snapshot.recent:
                run = Run(snapshot.producer, epoch, first, length, digest)
                known.recent.append((run, Range(start, start + length)))
        return table
