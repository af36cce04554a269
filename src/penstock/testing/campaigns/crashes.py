"""C2: a crash before every single operation of a life, with every kind of loss, and another crash while recovering.

The life is that of `life.Life`: it creates, publishes, rolls, trims, deletes, schedules, stages, moves, closes and
opens. Before each operation that changes the medium the machine is copied, and each copy loses its power in its own
way, or its process is killed; `aftermath.Aftermath` says what must hold then. In some of them a second crash comes
while the store is being opened.

A finding names the seed, the operation and the survival, and lists the last operations: `replay` shows it again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from penstock.testing.campaigns.aftermath import Aftermath
from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.life import Life
from penstock.testing.machine import SURVIVALS, Machine, Survival

if TYPE_CHECKING:
    from penstock.testing.campaigns.campaign import Report

KILL = "the process is killed"
ALL_FROM = 20_000
"""With so many rounds each operation is crashed in every way; with fewer, in some that the seed draws."""
SAMPLE = 3
SECOND_CRASH = 0.25
"""In this share of the states, another crash comes during recovery."""
RECOVERY_STEPS = 40
SHOWN = 12
"""So many operations before the crash are shown."""


class Crash(NamedTuple):
    """Where and how a life ends."""

    seed: int
    operation: int
    how: Survival | None
    """None if the process is killed."""
    second: tuple[int, Survival] | None = None
    """Before which operation of the recovery the power is lost again, and what survives."""

    def __str__(self) -> str:
        text = f"seed {self.seed}, crash before operation {self.operation}, {self.how or KILL}"
        if self.second is not None:
            text += f"; again before operation {self.second[0]} of the recovery, {self.second[1]}"
        return text


class _Enough(BaseException):
    """Ends a life: so many rounds were asked for."""


def run(report: Report, seed: int) -> None:
    """Crash lives, one after the other, until there were enough rounds."""
    while report.done < report.rounds:
        _crash_everywhere(seed, report)
        seed += 1


def _crash_everywhere(seed: int, report: Report) -> None:
    machine = Machine(seed)
    life = Life(machine, seed)
    chance = random.Random(seed)
    ways: list[Survival | None] = [None, *SURVIVALS]

    def crash(operation: str) -> None:
        number = len(machine.operations)
        report.count("operations crashed at")
        for how in ways if report.rounds >= ALL_FROM else chance.sample(ways, SAMPLE):
            if report.done >= report.rounds:
                raise _Enough
            second = None
            if chance.random() < SECOND_CRASH:
                second = (chance.randrange(RECOVERY_STEPS), chance.choice(SURVIVALS))
            problems = _examine(Crash(seed, number, how, second), machine, life, report)
            if problems:
                report.found(_told(problems, machine, operation), str(Crash(seed, number, how, second)))
            report.finish_round()

    machine.on_step = crash
    try:
        life.run()
    except _Enough:
        pass
    finally:
        machine.on_step = lambda _: None
        machine.turn_off()
    report.count("lives")


def _examine(crash: Crash, machine: Machine, life: Life, report: Report) -> list[str]:
    """Crash a copy of the machine, and perhaps once more while it recovers; return what is wrong then."""
    chance = random.Random(f"{crash.seed}/{crash.operation}/{crash.how}")
    after = machine.after_kill() if crash.how is None else machine.after_power_loss(crash.how, chance)
    aftermath = Aftermath(after, life.history)
    left: list[tuple[Machine, Aftermath]] = []

    def crash_again(_operation: str) -> None:
        if aftermath.opening and crash.second is not None and len(after.operations) == crash.second[0]:
            again = after.after_power_loss(crash.second[1], chance)
            left.append((again, Aftermath(again, life.history, aftermath.seen)))

    after.on_step = crash_again
    problems = aftermath.examine()
    report.count("crash states")
    report.count(f"crashed: {crash.how or KILL}")
    # What was acknowledged and read since must outlast the next power loss, which takes all that was not synced.
    if crash.operation % 4 == 0:
        again = after.after_power_loss(SURVIVALS[1], chance)
        left.append((again, Aftermath(again, aftermath.history, aftermath.seen)))
    after.turn_off()
    for again, second in left:
        problems += [f"after a second crash: {text}" for text in second.examine()]
        report.count("crash states")
        report.count("crashed again")
        again.turn_off()
    return problems


def replay(crash: Crash) -> list[str]:
    """Show a crash again: return the operations up to it, and what is wrong after it."""
    machine = Machine(crash.seed)
    life = Life(machine, crash.seed)
    found: list[str] = []

    def stop(operation: str) -> None:
        if len(machine.operations) == crash.operation:
            from penstock.testing.campaigns.campaign import Report

            found.append(_told(_examine(crash, machine, life, Report(rounds=1)), machine, operation))
            raise _Enough

    machine.on_step = stop
    try:
        life.run()
    except _Enough:
        pass
    finally:
        machine.turn_off()
    return found


def _told(problems: list[str], machine: Machine, operation: str) -> str:
    first = max(len(machine.operations) - SHOWN, 0)
    steps = [f"  {first + index}: {text}" for index, text in enumerate(machine.operations[first:])]
    return "\n".join([*problems, "after", *steps, f"and before {operation}"])


CAMPAIGN = Campaign(
    name="c2",
    title="a crash before every operation, with every loss, and again while recovering",
    unit="crash",
    small=4_000,
    full=100_000,
    run=run,
)
