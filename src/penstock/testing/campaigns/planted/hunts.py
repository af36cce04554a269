"""Hunts for planted bugs with campaigns, aimed at where a bug would show, and ended with the first finding.

Each returns what it found, in words, or None.
"""

from __future__ import annotations

import random
import re
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from penstock.testing.campaigns.campaign import Report
from penstock.testing.campaigns.virtual import faults
from penstock.testing.campaigns.virtual.aftermath import silence
from penstock.testing.campaigns.virtual.crashes import Crash, replay
from penstock.testing.campaigns.virtual.life import Life
from penstock.testing.machine import SURVIVALS, Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.testing.machine import Survival
    from penstock.testing.simulator.plan import Plan

    Hunt = Callable[[], str | None]

LIVES: Final = 20
CRASHES_PER_LIFE: Final = 3
CRASHES: Final = 100
BAD_DISKS: Final = 20
DELIVERIES: Final = 20
PATIENCE: Final = 40.0
EVERY_WAY: Final = (None, *SURVIVALS)
REORDERED: Final = SURVIVALS[-2:]
_MISFIT: Final = re.compile(r"(after a second crash: )?(TypeError|AttributeError|NameError)")


class Misfit(Exception):
    """A planted bug does not fit the code any more: what it breaks is itself."""


def _shown(lines: Iterable[str]) -> list[str]:
    """Return what a campaign found, which must not be a planted bug's own mistake."""
    found = [*lines]
    for line in found:
        if _MISFIT.match(line):
            raise Misfit(line)
    return found


# --- crashes --------------------------------------------------------------------------------------


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
            shown = _shown(replay(crash).splitlines())
            if shown[-1] != "nothing is wrong":
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
    with silence():
        life.run()
    machine.turn_off()
    return random.Random(seed).sample(found, min(len(found), CRASHES_PER_LIFE))


# --- disks ----------------------------------------------------------------------------------------


class _Enough(BaseException):
    """Ends a campaign with its first finding."""


class _Impatient(Report):
    def found(self, what: str, replay: str) -> None:
        super().found(what, replay)
        raise _Enough


def lives_on_a_bad_disk(fault: str) -> Hunt:
    """Hunt with C5: lives on disks that have this fault, alone or among others."""

    def hunt() -> str | None:
        mixtures = faults.MIXTURES
        seeds = [seed for seed in range(BAD_DISKS * len(mixtures)) if fault in mixtures[seed % len(mixtures)]]
        report = _Impatient(rounds=1)
        for seed in seeds[:BAD_DISKS]:
            with silence(), suppress(_Enough):
                faults.run(report, seed)
            for what, where in report.findings:
                return f"{_shown(what.splitlines())[0]} ({where})"
        return None

    return hunt


# --- lives of delivery ----------------------------------------------------------------------------


def lives_of_delivery(first: int, plan: Plan | None = None, **manner: Any) -> Hunt:
    """Hunt with C1: lives from this seed on, in a manner and with a plan of faults in which the bug would show."""

    def hunt() -> str | None:
        from penstock.testing.campaigns.simulated import live  # which uses what is planted, too

        for seed in range(first, first + DELIVERIES):
            problems, _, _ = live(seed, plan, **{"patience": PATIENCE, **manner})
            for what in _shown(problems):
                return f"{what} (seed {seed})"
        return None

    return hunt
