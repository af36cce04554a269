"""The checker finds every violation that is planted, names its invariant, and leaves healthy histories alone."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.testing.checker import _SPREAD, SPELLED_MAX, Violation, _earliest, _grouped, _out_of_order, _Spans, check
from penstock.testing.journal import Fact, Journal, Outcome, Place, Rows, event_id

if TYPE_CHECKING:
    from collections.abc import Callable

OK, FAILED, UNKNOWN = Outcome
HERE = ("orders", 0)
PLACE = Place(*HERE)
BILLING = ("billing", *HERE)
ABC = [b"a", b"b", b"c"]

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Of a method of a journal."""


def told(name: str, *positional: Any, **named: Any) -> Call:
    return name, positional, named


def tell(journal: Journal, history: list[Call]) -> Journal:
    for name, positional, named in history:
        getattr(journal, name)(*positional, **named)
    return journal


def invariants(violations: list[Violation]) -> set[str]:
    return {violation.invariant for violation in violations}


def a_journal() -> Journal:
    """Three events at 0, 1 and 2, acknowledged and read; each of the histories below begins with it."""
    journal = Journal()
    journal.published(*HERE, ABC, OK, offset=0)
    journal.stored(*HERE, 0, ABC)
    journal.bounds(*HERE, 0, 3)
    return journal


# --- healthy histories -------------------------------------------------------------------------------------------

HEALTHY: dict[str, list[Call]] = {
    "nothing more": [],
    "bounds of earlier ask for nothing": [
        told("gap", *HERE, 3, 4),
        told("bounds", *HERE, 0, 4),
        told("restarted"),
        told("stored", *HERE, 0, ABC),
    ],
    "events without a key have no order": [
        told("published", *HERE, [b"d"], OK, offset=4, keys=[None]),
        told("published", *HERE, [b"e"], OK, offset=3, keys=[None]),
        told("stored", *HERE, 3, [b"e", b"d"]),
        told("delivered", *BILLING, 1, [b"b"], keys=[None]),
        told("delivered", *BILLING, 0, [b"a"], keys=[None]),
    ],
    "damage becomes a gap": [told("damaged", *HERE, 1, 2), told("gap", *HERE, 1, 2)],
    "damage cuts the end off": [
        told("damaged", *HERE, 2, 3),
        told("reported", *HERE, 2, 3),
        told("restarted"),
        told("stored", *HERE, 0, ABC[:2]),
        told("bounds", *HERE, 0, 2),
    ],
    "what was trimmed need not be read": [
        told("published", *HERE, [b"d"], UNKNOWN),
        told("stored", *HERE, 3, [b"d"]),
        told("trimmed", *HERE, 4),
        told("restarted"),
        told("bounds", *HERE, 2, 4),
    ],
    "one event is delivered again and again": [told("delivered", *BILLING, 0, [b"a"])] * 3,
    "an event is delivered again after each restart": [
        told("delivered", *BILLING, 0, ABC),
        told("delivered", *BILLING, 0, [b"a"]),
        told("restarted"),
        told("stored", *HERE, 0, ABC),
        told("delivered", *BILLING, 1, [b"b"]),
    ],
    "states are asked of what is there": [
        told("published", *HERE, [b"d"], UNKNOWN),
        told("stored", *HERE, 3, [b"d"]),
        told("trimmed", *HERE, 1),
        told("damaged", *HERE, 1, 2),
        told("reported", *HERE, 1, 2),
        told("restarted"),
        told("stored", *HERE, 0, ABC),
        told("pending", *BILLING, 2, 3),
    ],
    "states are asked of what is there, also if there are two": [
        told("trimmed", *HERE, 2),
        told("settled", *BILLING, 0, 2, "acked"),
        told("parked", *BILLING, 1, 2),
        told("pending", *BILLING, 2, 3),
    ],
    "an unknown publish is there": [
        told("published", *HERE, [b"d"], UNKNOWN),
        told("stored", *HERE, 3, [b"d"]),
        told("bounds", *HERE, 0, 4),
    ],
    "an unknown publish is not there": [told("published", *HERE, [b"d"], UNKNOWN)],
    "an unknown publish is retried": [
        told("published", *HERE, [b"d"], UNKNOWN),
        told("published", *HERE, [b"e"], OK, offset=4),
        told("published", *HERE, [b"d"], OK, offset=3),
        told("stored", *HERE, 3, [b"d", b"e"]),
    ],
    "an unknown publish fails when it is retried": [
        told("published", *HERE, [b"d"], UNKNOWN),
        told("published", *HERE, [b"d"], FAILED),
        told("stored", *HERE, 3, [b"d"]),
    ],
    "a failed publish is retried": [
        told("published", *HERE, [b"d"], FAILED),
        told("published", *HERE, [b"d"], OK, offset=3),
        told("stored", *HERE, 3, [b"d"]),
    ],
    "an answer is repeated": [told("published", *HERE, ABC, OK, offset=0)],
    "a key overtakes only what was retried": [
        told("published", *HERE, [b"d"], UNKNOWN, keys=[b"k"]),
        told("published", *HERE, [b"e", b"f"], OK, offset=3, keys=[b"k", None]),
        told("published", *HERE, [b"d"], OK, offset=5, keys=[b"k"]),
        told("stored", *HERE, 3, [b"e", b"f", b"d"], keys=[b"k", None, b"k"]),
    ],
    "all is read again": [
        told("restarted"),
        told("stored", *HERE, 0, ABC[:2]),
        told("stored", *HERE, 2, ABC[2:]),
        told("bounds", *HERE, 0, 3),
    ],
    "what was trimmed is gone": [
        told("trimmed", *HERE, 2),
        told("restarted"),
        told("stored", *HERE, 2, [b"c"]),
        told("bounds", *HERE, 2, 3),
    ],
    "no state is asked in a deleted log": [told("settled", *BILLING, 0, 1, "acked"), told("deleted", "orders")],
    "what was deleted is gone": [
        told("cursor", *BILLING, 0, 3),
        told("committed", *BILLING, 3, OK),
        told("damaged", *HERE, 1, 2),
        told("deleted", "orders"),
        told("restarted"),
        told("bounds", *HERE, 0, 0),
        told("cursor", *BILLING, 0, 0),
    ],
    "a gap holds nothing": [
        told("published", *HERE, [b"d"], UNKNOWN),
        told("published", *HERE, [b"e"], OK, offset=4),
        told("gap", *HERE, 3, 4),
        told("stored", *HERE, 4, [b"e"]),
        told("bounds", *HERE, 0, 5),
    ],
    "damage is reported and repaired": [
        told("damaged", *HERE, 1, 3),
        told("reported", *HERE, 1, 2),
        told("reported", *HERE, 2, 3),
        told("restarted"),
        told("stored", *HERE, 0, [b"a"]),
        told("gap", *HERE, 1, 3),
        told("bounds", *HERE, 0, 3),
    ],
    "cursors advance": [
        told("cursor", *BILLING, 0, 3),
        told("committed", *BILLING, 1, OK),
        told("cursor", *BILLING, 1, 3),
        told("committed", *BILLING, 2, UNKNOWN),
        told("cursor", *BILLING, 2, 3),
        told("committed", *BILLING, 3, FAILED),
        told("cursor", *BILLING, 2, 3),
    ],
    "a cursor begins in the middle": [
        told("cursor", *BILLING, 2, 3),
        told("committed", *BILLING, 1, FAILED),
        told("cursor", *BILLING, 2, 3),
    ],
    "a cursor stays when no commit succeeds": [told("committed", *BILLING, 3, FAILED), told("cursor", *BILLING, 0, 3)],
    "every event is settled parked or pending": [
        told("delivered", *BILLING, 0, ABC[:2], keys=[b"k", b"k"]),
        told("settled", *BILLING, 0, 1, "acked"),
        told("delivered", *BILLING, 1, [b"b"], keys=[b"k"]),
        told("pending", *BILLING, 1, 3),
        told("restarted"),
        told("stored", *HERE, 0, ABC),
        told("parked", *BILLING, 1, 2),
        told("pending", *BILLING, 2, 3),
    ],
    "only the holder of a lease writes": [
        told("granted", "mover", 1),
        told("wrote", "mover", 1, OK),
        told("granted", "mover", 2),
        told("wrote", "mover", 1, FAILED),
        told("wrote", "mover", 2, OK),
        told("wrote", "scheduler", 1, OK),
    ],
    "progress comes soon": [
        *(told("faults_ended", at) for at in (10.0, 15.0, 40.0)),
        *(told("progressed", at) for at in (9.0, 24.9, 41.0)),
    ],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_history_has_no_violation(name: str) -> None:
    assert check(tell(a_journal(), HEALTHY[name]), window=1) == []


def test_an_empty_journal_has_no_violation() -> None:
    assert check(Journal(), window=0) == []


# --- violations ----------------------------------------------------------------------------------------------------


VIOLATIONS: dict[str, tuple[str, list[Call]]] = {
    "an event was never read": ("I1", [told("published", *HERE, [b"d"], OK, offset=3)]),
    "an event is not read again": ("I1", [told("restarted"), told("stored", *HERE, 0, [b"a", b"b"])]),
    "an event is in a gap": ("I1", [told("gap", *HERE, 1, 2)]),
    "an event is missing in silence": (
        "I1",
        [told("restarted"), told("stored", *HERE, 0, ABC[:2]), told("gap", *HERE, 2, 3, False)],
    ),
    "the log begins above an event": ("I1", [told("bounds", *HERE, 1, 3)]),
    "the log ends below an event": (
        "I1",
        [told("published", *HERE, [b"d"], OK, offset=3), told("stored", *HERE, 3, [b"d"]), told("bounds", *HERE, 0, 3)],
    ),
    "more is gone than was trimmed": (
        "I1",
        [told("trimmed", *HERE, 1), told("restarted"), told("stored", *HERE, 2, [b"c"])],
    ),
    "nobody published it": ("I2", [told("stored", *HERE, 3, [b"x"])]),
    "an event was altered": ("I2", [told("restarted"), told("stored", *HERE, 0, [b"a", b"x", b"c"])]),
    "an altered event was delivered": ("I2", [told("delivered", *BILLING, 1, [b"x"])]),
    "it was published to another partition": (
        "I2",
        [told("published", "orders", 1, [b"d"], UNKNOWN), told("stored", *HERE, 3, [b"d"])],
    ),
    "it has another key": (
        "I2",
        [
            told("published", *HERE, ABC, OK, offset=0, keys=[b"j", b"k", None]),
            told("stored", *HERE, 0, ABC, keys=[b"j", b"j", None]),
        ],
    ),
    "a deleted log was read": ("I2", [told("deleted", "orders"), told("stored", *HERE, 0, ABC)]),
    "a failed publish is there": (
        "I3",
        [told("published", *HERE, [b"d"], FAILED)] * 2 + [told("stored", *HERE, 3, [b"d"])],
    ),
    "a failed publish was delivered": (
        "I3",
        [told("published", *HERE, [b"d"], FAILED), told("delivered", *BILLING, 3, [b"d"])],
    ),
    "two events are swapped": (
        "I4",
        [told("published", *HERE, [b"d", b"e"], OK, offset=3), told("stored", *HERE, 3, [b"e", b"d"])],
    ),
    "an offset changes its event": (
        "I4",
        [
            told("published", *HERE, [b"d", b"e"], UNKNOWN),
            told("stored", *HERE, 3, [b"d"]),
            told("stored", *HERE, 3, [b"e"]),
        ],
    ),
    "a handler gets another event than a reader": (
        "I4",
        [told("published", *HERE, [b"d"], UNKNOWN), told("delivered", *BILLING, 2, [b"d"])],
    ),
    "an offset is given twice": (
        "I4",
        [told("published", *HERE, [b"d"], OK, offset=2), told("stored", *HERE, 3, [b"d"])],
    ),
    "an event is not where its publisher was told": (
        "I4",
        [told("published", *HERE, [b"d"], OK, offset=3), told("stored", *HERE, 4, [b"d"])],
    ),
    "an event was seen in a gap": (
        "I4",
        [told("published", *HERE, [b"d"], UNKNOWN), told("stored", *HERE, 3, [b"d"]), told("gap", *HERE, 3, 4)],
    ),
    "the end moves back": (
        "I4",
        [told("bounds", *HERE, 0, 5), told("bounds", *HERE, 0, 4), told("gap", *HERE, 3, 5)],
    ),
    "a key is out of order": (
        "I4",
        [
            told("published", *HERE, [b"d"], OK, offset=4, keys=[b"k"]),
            told("published", *HERE, [b"e"], OK, offset=3, keys=[b"k"]),
            told("stored", *HERE, 3, [b"e", b"d"]),
        ],
    ),
    "a key is delivered out of order": (
        "I4",
        [told("delivered", *BILLING, offset, [ABC[offset]], keys=[b"k"]) for offset in (1, 0, 1)],
    ),
    "a cursor falls below a commit": (
        "I5",
        [told("cursor", *BILLING, 0, 3), told("committed", *BILLING, 2, OK), told("cursor", *BILLING, 1, 3)],
    ),
    "a cursor moves back": (
        "I5",
        [told("committed", *BILLING, 2, UNKNOWN), told("cursor", *BILLING, 2, 3), told("cursor", *BILLING, 0, 3)],
    ),
    "a cursor is beyond the end": ("I5", [told("committed", *BILLING, 4, OK), told("cursor", *BILLING, 4, 3)]),
    "a cursor is where nobody put it": ("I5", [told("committed", *BILLING, 1, OK), told("cursor", *BILLING, 2, 3)]),
    "a failed commit took effect": (
        "I5",
        [told("cursor", *BILLING, 0, 3), told("committed", *BILLING, 1, FAILED), told("cursor", *BILLING, 1, 3)],
    ),
    "an event is stored twice": ("I6", [told("stored", *HERE, 3, [b"b"])]),
    "a retry has another offset": ("I6", [told("published", *HERE, [b"c"], OK, offset=3)]),
    "it is delivered after it was settled": (
        "I6",
        [
            told("delivered", *BILLING, 0, ABC),
            told("settled", *BILLING, 0, 3, "acked"),
            told("delivered", *BILLING, 1, [b"b"]),
        ],
    ),
    "too many are delivered again": ("I6", [told("delivered", *BILLING, 0, ABC[:2])] * 2),
    "an event is neither settled nor pending": (
        "I7",
        [told("settled", *BILLING, 0, 1, "dead"), told("pending", *BILLING, 2, 3)],
    ),
    "a settled event is pending again": (
        "I7",
        [told("settled", *BILLING, 0, 2, "acked"), told("pending", *BILLING, 1, 3)],
    ),
    "an event is settled in two ways": (
        "I7",
        [told("settled", *BILLING, 0, 3, "acked"), told("settled", *BILLING, 2, 3, "expired")],
    ),
    "a parked event is forgotten": (
        "I7",
        [
            told("settled", *BILLING, 0, 2, "acked"),
            told("parked", *BILLING, 2, 3),
            told("restarted"),
            told("stored", *HERE, 0, ABC),
        ],
    ),
    "an event is acked that nobody got": (
        "I7",
        [told("delivered", *BILLING, 0, ABC[:2]), told("settled", *BILLING, 0, 3, "acked")],
    ),
    "damage is not reported": ("I8", [told("damaged", *HERE, 0, 2), told("reported", *HERE, 0, 1)]),
    "what is whole is reported": ("I8", [told("damaged", *HERE, 0, 1), told("reported", *HERE, 0, 2)]),
    "nothing is there, and no gap is declared": ("I8", [told("bounds", *HERE, 0, 4)]),
    "a gap is not declared again": (
        "I8",
        [told("gap", *HERE, 3, 4), told("restarted"), told("stored", *HERE, 0, ABC), told("bounds", *HERE, 0, 4)],
    ),
    "what was seen is not there again": (
        "I8",
        [
            told("published", *HERE, [b"d"], UNKNOWN),
            told("stored", *HERE, 3, [b"d"]),
            told("restarted"),
            told("stored", *HERE, 0, ABC),
            told("bounds", *HERE, 0, 4),
        ],
    ),
    "a reader is moved over a hole": ("I8", [told("gap", *HERE, 3, 4, False)]),
    "nothing moves after the faults": ("I9", [told("progressed", 9.0), told("faults_ended", 10.0)]),
    "it moves too late after the faults": ("I9", [told("faults_ended", 10.0), told("progressed", 20.1)]),
    "one who lost the lease writes": (
        "I10",
        [told("granted", "mover", 1), told("granted", "mover", 2), told("wrote", "mover", 1, OK)],
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_found_and_is_of_this_invariant_only(name: str) -> None:
    invariant, history = VIOLATIONS[name]
    assert invariants(check(tell(a_journal(), history), window=1)) == {invariant}


def test_every_invariant_is_violated_above() -> None:
    assert {invariant for invariant, _ in VIOLATIONS.values()} == {f"I{number}" for number in range(1, 11)}


# --- random histories ------------------------------------------------------------------------------------------------


class World:
    """A store that keeps its promises, in the order that chance decides, and the calls that tell of it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.calls: list[Call] = []
        self.slots: list[bytes | None] = []  # an offset without an event is in a gap
        self.keys: dict[bytes, bytes | None] = {}
        self.unanswered: list[tuple[list[bytes], int | None]] = []
        self.start = self.position = self.delivered = self.epoch = 0
        self.states: dict[int, str] = {}
        steps = [self.publish, self.publish, self.retry, self.skip, self.trim, self.damage]
        steps += [self.deliver, self.deliver, self.settle, self.commit, self.lease, self.look]
        for step in chance.choices(steps, k=chance.randint(0, 60)):
            step()
        self.send(OK)
        self.look()

    def tell(self, name: str, *positional: Any, **named: Any) -> None:
        self.calls.append(told(name, *positional, **named))

    def publish(self) -> None:
        self.send(self.chance.choice([OK, OK, FAILED, UNKNOWN]))

    def send(self, outcome: Outcome) -> None:
        payloads = [b"%d" % (len(self.keys) + number) for number in range(self.chance.randint(2, 4))]
        self.keys |= {payload: self.chance.choice([None, b"j", b"k"]) for payload in payloads}
        offset = self.append(payloads) if outcome is OK or (outcome is UNKNOWN and self.chance.random() < 0.5) else None
        self.answer(payloads, outcome, offset)
        if outcome is UNKNOWN:
            self.unanswered.append((payloads, offset))

    def append(self, payloads: list[bytes]) -> int:
        self.slots += payloads
        return len(self.slots) - len(payloads)

    def answer(self, payloads: list[bytes], outcome: Outcome, offset: int | None) -> None:
        keys = [self.keys[payload] for payload in payloads]
        self.tell("published", *HERE, payloads, outcome, offset=offset, keys=keys)

    def retry(self) -> None:
        if self.unanswered:
            payloads, offset = self.unanswered.pop(self.chance.randrange(len(self.unanswered)))
            self.answer(payloads, OK, self.append(payloads) if offset is None else offset)

    def skip(self) -> None:
        self.slots += [None] * self.chance.randint(1, 3)

    def trim(self) -> None:
        self.start = self.chance.randint(self.start, len(self.slots))
        self.tell("trimmed", *HERE, self.start)

    def damage(self) -> None:
        first = self.chance.randint(self.start, len(self.slots))
        last = min(first + 2, len(self.slots))
        self.slots[first:last] = [None] * (last - first)
        self.tell("damaged", *HERE, first, last)
        self.tell("reported", *HERE, first, last)

    def readable(self) -> list[int]:
        return [offset for offset in range(self.start, len(self.slots)) if self.slots[offset] is not None]

    def deliver(self) -> None:
        again = [offset for offset, state in self.states.items() if state == "pending" and offset in self.readable()]
        news = [offset for offset in self.readable() if offset >= self.delivered][:2]
        for offset in self.chance.sample(again, min(1, len(again))) + news:
            self.hand_out(offset)
            self.states.setdefault(offset, "pending")
            self.delivered = max(self.delivered, offset + 1)

    def hand_out(self, offset: int) -> None:
        payload = self.slots[offset]
        assert payload is not None
        self.tell("delivered", *BILLING, offset, [payload], keys=[self.keys[payload]])

    def settle(self) -> None:
        for offset, state in self.states.items():
            if state == "pending" and self.chance.random() < 0.5:
                self.states[offset] = self.chance.choice(["acked", "dead", "discarded", "parked"])
                if self.states[offset] != "parked":
                    self.tell("settled", *BILLING, offset, offset + 1, self.states[offset])

    def commit(self) -> None:
        asked = self.chance.randint(self.position, len(self.slots))
        outcome = self.chance.choice(list(Outcome))
        self.position = asked if outcome is OK or (outcome is UNKNOWN and asked % 2) else self.position
        self.tell("committed", *BILLING, asked, outcome)

    def lease(self) -> None:
        self.epoch += 1
        self.tell("granted", "mover", self.epoch)
        self.tell("wrote", "mover", self.epoch, OK)
        self.tell("wrote", "mover", self.epoch - 1, FAILED)

    def look(self) -> None:
        self.tell("restarted")
        for offset, payload in enumerate(self.slots[self.start :], self.start):
            if payload is None:
                self.tell("gap", *HERE, offset, offset + 1)
        readable = self.readable()
        gaps = {at for at in range(1, len(readable)) if readable[at] > readable[at - 1] + 1}
        cuts = {at for at in range(1, len(readable) - 1) if self.chance.random() < 0.1}
        for first, last in pairwise([0, *sorted(gaps | cuts), len(readable)]):
            payloads = [self.slots[at] for at in readable[first:last]]
            self.tell("stored", *HERE, readable[first] if readable else 0, payloads)
        self.tell("bounds", *HERE, self.start, len(self.slots))
        self.tell("cursor", *BILLING, self.position, len(self.slots))
        for offset in readable:
            state = self.states.get(offset, "pending")
            if state in {"pending", "parked"}:
                self.tell(state, *BILLING, offset, offset + 1)


def a_read(world: World) -> tuple[int, int, list[bytes]]:
    """Return a read of several events in the last look: where it is among the calls, its offset, its payloads."""
    last_look = max(at for at, (name, _, _) in enumerate(world.calls) if name == "restarted")
    reads = [at for at, (name, _, _) in enumerate(world.calls) if name == "stored" and at > last_look]
    at = world.chance.choice([at for at in reads if len(world.calls[at][1][3]) > 1])
    _, _, offset, payloads = world.calls[at][1]
    return at, offset, payloads


def lose(world: World) -> None:
    at, offset, payloads = a_read(world)
    lost = world.chance.randrange(len(payloads))
    halves = (offset, payloads[:lost]), (offset + lost + 1, payloads[lost + 1 :])
    world.calls[at : at + 1] = [told("stored", *HERE, *half) for half in halves]


def alter(world: World) -> None:
    at, offset, payloads = a_read(world)
    world.calls[at] = told("stored", *HERE, offset, [*payloads[:-1], b"altered"])


def rotate(world: World) -> None:
    _, offset, payloads = a_read(world)
    world.tell("stored", *HERE, offset, payloads[1:] + payloads[:1])


def store_twice(world: World) -> None:
    world.tell("stored", *HERE, len(world.slots), a_read(world)[2][:1])


def answer_anew(world: World) -> None:
    world.tell("published", *HERE, world.slots[-1:], OK, offset=len(world.slots))


def store_a_failed_one(world: World) -> None:
    world.tell("published", *HERE, [b"failed"], FAILED)
    world.tell("stored", *HERE, len(world.slots), [b"failed"])


def recede(world: World) -> None:
    world.tell("bounds", *HERE, world.start, len(world.slots) - 1)


def leap(world: World) -> None:
    world.tell("cursor", *BILLING, len(world.slots) + 1, len(world.slots))


def fall_back(world: World) -> None:
    world.tell("committed", *BILLING, len(world.slots), OK)
    world.tell("cursor", *BILLING, len(world.slots) - 1, len(world.slots))


def settle_and_hand_out(world: World) -> None:
    world.tell("settled", *BILLING, 0, len(world.slots), "acked")
    world.hand_out(world.chance.choice(world.readable()))


def forget(world: World) -> None:
    world.calls = [call for call in world.calls if call[0] not in {"settled", "parked", "pending"}]
    world.tell("pending", *BILLING, 0, world.chance.choice(world.readable()))


def settle_what_waits(world: World) -> None:
    offset = world.readable()[-1]  # nobody was given it
    world.tell("settled", *BILLING, offset, offset + 1, "expired")


def damage_in_silence(world: World) -> None:
    world.tell("damaged", *HERE, len(world.slots), len(world.slots) + 2)


def cry_wolf(world: World) -> None:
    world.tell("reported", *HERE, world.readable()[-1], len(world.slots))


def stop(world: World) -> None:
    world.tell("faults_ended", 1.0)


def write_late(world: World) -> None:
    world.lease()
    world.tell("wrote", "mover", world.epoch - 1, OK)


BREAKAGES: dict[Callable[[World], None], set[str]] = {
    lose: {"I1", "I8"},  # it may be one whose publish was unknown: then it is a hole
    alter: {"I2"},
    store_a_failed_one: {"I3"},
    rotate: {"I4"},
    recede: {"I4"},
    leap: {"I5"},
    fall_back: {"I5"},
    store_twice: {"I6"},
    answer_anew: {"I6"},
    settle_and_hand_out: {"I6"},
    forget: {"I7"},
    settle_what_waits: {"I7"},
    damage_in_silence: {"I8"},
    cry_wolf: {"I8"},
    stop: {"I9"},
    write_late: {"I10"},
}


@given(st.integers(0, 1 << 32))
def test_a_random_history_that_is_healthy_has_no_violation(seed: int) -> None:
    assert check(tell(Journal(), World(random.Random(seed)).calls)) == []


@given(st.integers(0, 1 << 32), st.sampled_from(list(BREAKAGES)))
def test_one_breakage_in_a_random_history_is_found(seed: int, breaks: Callable[[World], None]) -> None:
    world = World(random.Random(seed))
    breaks(world)
    assert invariants(check(tell(Journal(), world.calls))) & BREAKAGES[breaks]


# --- what a violation says -------------------------------------------------------------------------------------------


def test_a_violation_is_told_once_and_names_the_place_and_the_event() -> None:
    journal = a_journal()
    journal.restarted()
    journal.stored(*HERE, 0, [b"a"])
    journal.gap(*HERE, 1, 2)
    journal.stored(*HERE, 2, [b"c"])
    name = f"event {event_id(b'b'):016x}"
    assert check(journal) == [
        Violation("I1", "log orders, partition 0, offset 1", f"{name} was acknowledged here, but is in a gap")
    ]


def test_the_caller_can_describe_events() -> None:
    journal = a_journal()
    journal.gap(*HERE, 1, 2)
    names = {event_id(payload): f"order {payload.decode()}" for payload in ABC}
    [violation] = check(journal, describe=names.__getitem__)
    assert violation.what.startswith("order b was acknowledged")


def test_many_violations_are_counted_not_spelled() -> None:
    journal = Journal()
    journal.published(*HERE, [b"%d" % number for number in range(1000)], OK, offset=0)
    found = check(journal)
    assert len(found) == SPELLED_MAX + 1
    assert found[-1] == Violation("I1", "and elsewhere", "980 more violations")


def test_violations_are_ordered_by_invariant() -> None:
    journal = tell(Journal(), [*VIOLATIONS["one who lost the lease writes"][1], *VIOLATIONS["nobody published it"][1]])
    assert [violation.invariant for violation in check(journal)] == ["I2", "I10"]


# --- telling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_arrow_columns_say_the_same_as_bytes(kind: pa.DataType) -> None:
    journal = Journal()
    journal.published(*HERE, pa.array(ABC, kind), OK, offset=0, keys=pa.array([b"j", None, b"k"], kind))
    journal.stored(*HERE, 0, ABC, keys=[b"j", None, b"k"])
    journal.delivered(*BILLING, 0, pa.chunked_array([pa.array(ABC, kind)]))
    assert check(journal) == []


def test_integers_can_stand_for_payloads_and_keys() -> None:
    journal = Journal()
    ids, keys = np.arange(3, dtype=np.uint64), np.array([2, 2, 3], np.uint64)
    journal.published_ids(*HERE, ids, OK, offset=7, keys=keys)
    journal.stored_ids(*HERE, 7, ids, keys)
    journal.delivered_ids(*BILLING, 7, ids, keys)
    assert check(journal) == []
    journal.delivered_ids(*BILLING, 8, ids[:1])
    assert invariants(check(journal)) == {"I4", "I6"}


def test_offsets_may_be_as_large_as_they_get() -> None:
    top = (1 << 63) - 4
    journal = Journal()
    journal.published(*HERE, [b"a"], OK, offset=0, keys=[b"k"])
    journal.published(*HERE, [b"b", b"c"], OK, offset=top, keys=[b"k", b"k"])
    journal.stored(*HERE, 0, [b"a"])
    journal.gap(*HERE, 1, top)
    journal.stored(*HERE, top, [b"b", b"c"])
    journal.bounds(*HERE, 0, top + 2)
    assert check(journal) == []


@pytest.mark.parametrize(
    "call",
    [
        told("published", *HERE, ABC, OK),
        told("published", *HERE, ABC, OK, offset=-1),
        told("published", *HERE, ABC, OK, offset=0, keys=[b"k"]),
        told("gap", *HERE, 2, 1),
        told("settled", *BILLING, 0, 1, "lost"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Call) -> None:
    journal = Journal()
    with pytest.raises(ValueError, match=r"offset|keys|settled"):
        tell(journal, [call])
    assert check(journal) == []


def test_threads_can_tell_at_the_same_time() -> None:
    journal = Journal()
    start = threading.Barrier(4)

    def publish(thread: int) -> None:
        start.wait()
        for number in range(500):
            journal.published(
                *HERE, [b"%d/%d" % (thread, number)], OK, offset=thread * 500 + number, keys=[b"%d" % thread]
            )

    threads = [threading.Thread(target=publish, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.stored(*HERE, 0, [b"%d/%d" % (thread, number) for thread in range(4) for number in range(500)])
    assert check(journal) == []
    assert len(set(journal.rows(Fact.PUBLISHED, PLACE).number.tolist())) == 2000


# --- columns, each against plain Python ------------------------------------------------------------------------------

ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def rows_of(spans: list[tuple[int, int]]) -> Rows:
    start = np.array([start for start, _ in spans], np.int64)
    stop = np.array([start + length for start, length in spans], np.int64)
    return Rows(np.arange(len(spans)), start, stop, np.zeros(len(spans), np.int64))


def members(spans: _Spans) -> set[int]:
    edge = -1
    for start, stop in zip(spans.start, spans.stop, strict=True):
        assert edge < start < stop
        edge = stop
    return {offset for start, stop in zip(spans.start, spans.stop, strict=True) for offset in range(start, stop)}


@given(ranges, ranges)
def test_spans_are_sets_of_offsets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = ({offset for start, length in spans for offset in range(start, start + length)} for spans in (one, other))
    spans, others = _Spans.of(rows_of(one)), _Spans.of(rows_of(other))
    assert members(spans) == a
    assert members(_Spans.of(spans, others)) == a | b
    assert members(spans.both(others)) == a & b
    assert members(spans.without(others)) == a - b
    assert spans.holds(np.arange(40)).tolist() == [offset in a for offset in range(40)]


@given(ranges, st.sets(st.integers(0, 40)))
def test_the_earliest_row_of_an_offset_is_found(spans: list[tuple[int, int]], offsets: set[int]) -> None:
    found = _earliest(np.array(sorted(offsets), np.int64), rows_of(spans)).tolist()
    never = np.iinfo(np.int64).max
    for offset, number in zip(sorted(offsets), found, strict=True):
        covering = [at for at, (start, length) in enumerate(spans) if start <= offset < start + length]
        assert number == min(covering, default=never)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_equal_values_are_brought_together_in_the_order_of_their_rows(parts: list[tuple[int, int]]) -> None:
    # Numbers that differ in bits that a row takes the place of, once they are spread.
    spread = np.array([high << 60 | low for high, low in parts], np.uint64)
    values = spread * np.uint64(pow(int(_SPREAD), -1, 1 << 64))
    order, groups = _grouped(values)
    together = [[row for row in range(len(parts)) if parts[row] == part] for part in sorted(set(parts))]
    found = [order[groups == group].tolist() for group in range(int(groups.max(initial=-1)) + 1)]
    assert sorted(found) == sorted(together)
    assert (np.diff(groups) >= 0).all()


@given(st.data())
def test_what_is_out_of_order_is_found(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 8))
    offsets = np.array(data.draw(st.permutations(range(count))), np.int64) * data.draw(st.sampled_from([1, 1000]))
    keys = np.array(data.draw(st.lists(st.integers(2, 4), min_size=count, max_size=count)), np.uint64)
    done = np.cumsum(np.array(data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)), np.int64))
    begun = np.array([data.draw(st.integers(0, int(at))) for at in done], np.int64)
    late = [
        this
        for this in range(count)
        if any(
            keys[that] == keys[this] and done[that] < begun[this] and offsets[that] > offsets[this]
            for that in range(count)
        )
    ]
    assert _out_of_order(keys, offsets, begun, done).tolist() == late


# --- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_lost_event_among_ten_million_is_found() -> None:
    count, lost = 10_000_000, 7_654_321
    chance = np.random.default_rng(7)
    ids, keys = chance.permutation(count).astype(np.uint64), chance.integers(2, 1_000_000, count).astype(np.uint64)
    journal = Journal()
    for start in range(0, count, 1000):
        batch = slice(start, start + 1000)
        journal.published_ids(*HERE, ids[batch], OK, offset=start, keys=keys[batch])
        journal.delivered_ids(*BILLING, start, ids[batch], keys[batch])
        journal.settled(*BILLING, start, start + 1000, "acked")
    journal.stored_ids(*HERE, 0, ids[:lost], keys[:lost])
    journal.stored_ids(*HERE, lost + 1, ids[lost + 1 :], keys[lost + 1 :])
    journal.bounds(*HERE, 0, count)
    [violation] = check(journal, window=0)
    assert violation[:2] == ("I1", f"log orders, partition 0, offset {lost}")
