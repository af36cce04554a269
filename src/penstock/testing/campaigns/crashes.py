"""C2: a crash before every single operation of a life, with every kind of loss, and another crash while recovering.

The life is that of `life.Life`: it creates, publishes, rolls, trims, deletes, schedules, stages, moves, closes and
opens. Before each operation that changes the medium the machine is copied, and each copy loses its power in its own
way, or its process is killed; `aftermath.Aftermath` says what must hold then. In some of them a second crash comes
while the store is being opened.

A finding is a `Crash`, as Python writes it. `replay` shows it again: the operations before it, what survived, and what
is wrong then.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from penstock.testing.campaigns.aftermath import Aftermath
from penstock.testing.campaigns.campaign import Campaign, Report
from penstock.testing.campaigns.life import Life
from penstock.testing.machine import SURVIVALS, Machine, Survival

KILL = "the process is killed"
ALL_FROM = 20_000
"""With so many rounds each operation is crashed in every way; with fewer, in some that the seed draws."""
SAMPLE = 3
SECOND_CRASH = 0.25
"""In this share of the states, another crash comes during recovery."""
GOES_ON = 0.5
"""In this share of them the store is also verified, and used again."""
RECOVERY_STEPS = 40
SHOWN = 12
"""So many operations before the crash are shown."""


class Crash(NamedTuple):
    """Where and how a life ends."""

    seed: int
    operation: int
    how: Survival | None
    """None if the process is killed."""
    second: tuple[int, Survival | None] | None = None
    """Before which operation of the recovery it crashes again, and how."""


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
                second = (chance.randrange(RECOVERY_STEPS), chance.choice(ways))
            at = Crash(seed, number, how, second)
            if problems := _examine(at, machine, life, report):
                report.found(_told(problems, machine, operation), str(at))
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
    chance = _chance_of(crash)
    after = _crashed(machine, crash.how, chance)
    aftermath = Aftermath(after, life.history)
    left: list[tuple[Machine, Aftermath]] = []

    def crash_again(_operation: str) -> None:
        if aftermath.opening and crash.second is not None and len(after.operations) == crash.second[0]:
            again = _crashed(after, crash.second[1], chance)
            left.append((again, Aftermath(again, life.history, aftermath.seen)))

    after.on_step = crash_again
    problems = aftermath.examine(goes_on=chance.random() < GOES_ON)
    report.count("crash states")
    report.count(f"{crash.how or KILL}")
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


def _chance_of(crash: Crash) -> random.Random:
    return random.Random(f"{crash.seed}/{crash.operation}/{crash.how}")


def _crashed(machine: Machine, how: Survival | None, chance: random.Random) -> Machine:
    return machine.after_kill() if how is None else machine.after_power_loss(how, chance)


def replay(crash: Crash) -> str:
    """Show a crash again: the operations up to it, what survived, and what is wrong after it."""
    machine = Machine(crash.seed)
    life = Life(machine, crash.seed)
    told: list[str] = []

    def stop(operation: str) -> None:
        if len(machine.operations) == crash.operation:
            after = _crashed(machine, crash.how, _chance_of(crash))
            told.extend([_told([], machine, operation), str(crash.how or KILL), *after.disk.differences(machine.disk)])
            told.extend(_examine(crash, machine, life, Report(rounds=1)) or ["nothing is wrong"])
            raise _Enough

    machine.on_step = stop
    try:
        life.run()
    except _Enough:
        pass
    finally:
        machine.turn_off()
    return "\n".join(told)


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
