"""Hunts for planted bugs with campaigns, aimed at where a bug would show, and ended with the first finding.

Each returns what it found, in words, or None.
"""

from __future__ import annotations

import logging
import random
import re
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Final

from penstock.testing.campaigns import faults
from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.crashes import Crash, replay
from penstock.testing.campaigns.life import Life
from penstock.testing.machine import SURVIVALS, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.testing.machine import Survival

    Hunt = Callable[[], str | None]

LIVES: Final = 20
CRASHES_PER_LIFE: Final = 3
CRASHES: Final = 100
EVERY_WAY: Final = (None, *SURVIVALS)
REORDERED: Final = SURVIVALS[-2:]
BAD_DISKS: Final = 20


@contextmanager
def quietly() -> Iterator[None]:
    """Let nobody hear what a store says of harm that is done on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def crashes_during(act: str, *, after: str = "", before: str = "", ways: Sequence[Survival | None] = EVERY_WAY) -> Hunt:
    """Hunt with C2: crash during acts of a life that match a pattern, between two operations that match others."""

    def hunt() -> str | None:
        crashes = (
            Crash(seed=seed, scene="life", operation=number, how=how)
            for seed in range(LIVES)
            for number in _operations_during(act, after, before, seed)
            for how in ways
        )
        for crash in islice(crashes, CRASHES):
            shown = replay(crash).splitlines()
            if shown and shown[-1] != "nothing is wrong":
                return f"{shown[-1]} ({crash})"
        return None

    return hunt


def _operations_during(act: str, after: str, before: str, seed: int) -> list[int]:
    machine = Machine(seed)
    life = Life(machine, seed)
    found = []

    def note(operation: str) -> None:
        previous = machine.operations[-1] if machine.operations else ""
        if re.match(act, life.history[-1].what) and re.search(after, previous) and re.search(before, operation):
            found.append(len(machine.operations))

    machine.on_step = note
    with quietly():
        life.run()
    machine.turn_off()
    return random.Random(seed).sample(found, min(len(found), CRASHES_PER_LIFE))


class _Enough(BaseException):
    """Ends a campaign with its first finding."""


class _Impatient(Report):
    def found(self, what: str, replay: str) -> None:
        super().found(what, replay)
        raise _Enough


def _first_finding(run: Callable[[Report, int], None], rounds: int, seed: int) -> str | None:
    report = _Impatient(rounds)
    with quietly(), suppress(_Enough):
        run(report, seed)
    return f"{report.findings[0].what.splitlines()[0]} ({report.findings[0].replay})" if report.findings else None


def lives_on_a_bad_disk(fault: str) -> Hunt:
    """Hunt with C5: lives on disks that have this fault, alone or among others."""

    def hunt() -> str | None:
        mixtures = faults.MIXTURES
        seeds = [seed for seed in range(BAD_DISKS * len(mixtures)) if fault in mixtures[seed % len(mixtures)]]
        findings = (_first_finding(faults.run, 1, seed) for seed in seeds[:BAD_DISKS])
        return next((finding for finding in findings if finding is not None), None)

    return hunt
