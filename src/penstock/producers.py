"""Producers: who published, and which run of its events, so that a repeat is recognised.

A producer is a UUID, and its version says what kind it is:

* **Version 7**, a process: it lives as long as a program does, so a store may forget it when it was silent for
  long. Its id carries when it was born. A store that does not know it can therefore tell one that it may have
  forgotten, which it refuses, from one that is new, which it accepts. Nothing is ever guessed.
* **Version 4**, a lasting one: an outbox, a schedule, a sink. It may be silent for months and then repeat what it
  did last, so a store never forgets it. There are few of them.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from typing import NamedTuple

PRODUCER_RUNS_KEPT = 64
"""So many last runs of a producer are answered with their offsets when they are repeated."""

PRODUCER_IDLE_SECONDS = 7 * 24 * 3600.0
"""A process's producer that was silent for longer is forgotten, and then refused."""

PRODUCER_HOLES_MAX = 1024
"""With more holes than this in a producer's sequences the oldest part is forgotten, and then refused."""

_VERSION_7, _VARIANT = 0x7, 0b10


class Run(NamedTuple):
    """Consecutive events of one producer: what makes a repeated publish recognisable.

    A producer's sequences only grow when it does something new; holes between runs are allowed. `digest` is
    `columns.digest` of exactly these events.
    """

    producer: bytes
    epoch: int
    first_sequence: int
    length: int
    digest: int

    @property
    def end_sequence(self) -> int:
        """The sequence after its last."""
        return self.first_sequence + self.length

    def derived_ids(self) -> list[str]:
        """Return the ids of the run's events, for those whose publisher gave none."""
        prefix = self.id_prefix
        return [f"{prefix}{sequence}" for sequence in self.sequences]

    @property
    def id_prefix(self) -> str:
        """What such an id begins with; the sequence follows."""
        return f"{self.producer.hex()}-"

    @property
    def sequences(self) -> Sequence[int]:
        """The sequences of its events."""
        return range(self.first_sequence, self.end_sequence)


def process_producer(now_us: int) -> bytes:
    """Return a new producer for this process, born now."""
    born_ms = now_us // 1000
    chance = secrets.randbits(74)
    number = born_ms << 80 | _VERSION_7 << 76 | (chance >> 62) << 64 | _VARIANT << 62 | chance & (1 << 62) - 1
    return number.to_bytes(16, "big")


def lasting_producer() -> bytes:
    """Return a new producer that no store ever forgets."""
    return uuid.uuid4().bytes


def born_at(producer: bytes) -> int | None:
    """Return when a process's producer was born, in microseconds since 1970 UTC; None for a lasting one."""
    if producer[6] >> 4 != _VERSION_7:
        return None
    return int.from_bytes(producer[:6], "big") * 1000
