"""C1: the deterministic simulator. Processes with the production engine, runtime and store, on a machine in memory.

A seed decides everything: who does what when, what goes wrong, who dies, what a power loss takes along. The same seed
tells the same story, word for word; `replay` prints it.
"""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.engine import pages, work
from penstock.errors import PenstockError
from penstock.runtime import dispatcher, entrances
from penstock.runtime.entrances import Loop
from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.planted.tools import changed, original
from penstock.testing.campaigns.simulated.life import Life
from penstock.testing.campaigns.simulated.manner import Manner
from penstock.testing.simulator import Plan, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.campaigns.campaign import Report

STEPS_MAX = 200_000
FASTER = (
    (work, {"SHORT_DELAY_SECONDS": 1.5}),
    (dispatcher, {"STANDBY_SECONDS": 0.5}),
    (entrances, {"BACKOFF_SECONDS": 0.5, "BACKOFF_SECONDS_MAX": 4.0}),
    (pages, {"GONE_WINDOWS": 0.0}),
)
"""What would be waited for longer, and what only large events would bring about. Nothing else is different, and a
virtual second is not for nothing: everybody looks around several times in each."""
MISTAKES = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError, ValueError)
"""What loops outlive, and calls raise, only if the code is wrong."""
_MISTAKE = re.compile(rf"ends with ({'|'.join(kind.__name__ for kind in MISTAKES)}|KeyError|IndexError)\b")


@contextmanager
def _mistakes_noted() -> Iterator[list[str]]:
    """Note mistakes that a loop would outlive: it tries again, and nobody hears of it here."""
    found: list[str] = []
    right = original(Loop, "_failed")

    def failed(self: Any, error: Exception) -> float:
        if isinstance(error, MISTAKES) and not isinstance(error, PenstockError):
            found.append(f"{type(error).__name__}: {error}")
        seconds: float = right(self, error)
        return seconds

    with changed(Loop, _failed=failed):
        yield found


@contextmanager
def _faster() -> Iterator[None]:
    with ExitStack() as stack:
        for module, constants in FASTER:
            stack.enter_context(changed(module, **constants))
        yield


def live(seed: int, plan: Plan | None = None, **manner: Any) -> tuple[list[str], World, Life]:
    """Live the life of a seed; returns what is wrong, and the world with its trace.

    Without a plan the seed draws one; and of the manner, whatever is not given.
    """
    plan = plan or Plan.drawn(seed, slow_seconds=1.5, frozen_seconds=6.0)
    with _faster(), _mistakes_noted() as mistakes, World(seed, plan=Plan(), steps_max=STEPS_MAX) as world:
        drawn = Manner.drawn(world.chance, **manner)
        life = Life(world, replace(plan, lost=1.0) if drawn.deaf else plan, drawn)
        try:
            problems = world.run(life.run())
        except Exception as error:  # noqa: BLE001 - whatever a task of a process raises is found, and the next one lives
            problems = [f"{type(error).__name__}: {error}"]
    mistakes += [f"{match[1]}: {line}" for line in world.trace if (match := _MISTAKE.search(line))]
    return mistakes[:3] + problems, world, life


def replay(seed: int, plan: Plan | None = None, **manner: Any) -> str:
    """Print the story of a seed, and what is wrong after it; returns it, too."""
    problems, world, _ = live(seed, plan, **manner)
    story = "\n".join([*world.trace, "", *(problems or ["nothing is wrong"])])
    sys.stdout.write(f"{story}\n")
    return story


def run(report: Report, seed: int, **manner: Any) -> None:
    """Live the lives of consecutive seeds."""
    for each in range(seed, seed + report.rounds):
        problems, world, life = live(each, **manner)
        if problems:
            report.found("\n".join(problems[:10]), hint(each, **manner))
        report.count("events delivered", life.audit.deliveries)
        report.count("processes started", len(world.processes))
        report.count("power losses", sum(" the power is lost" in line for line in world.trace))
        report.count("steps of the loop", world.loop.steps)
        for act in life.manner.acts:
            report.count(f"lives in which somebody would {act}")
        report.finish_round()


def hint(seed: int, **manner: Any) -> str:
    """Say how to see a life again."""
    given = "".join(f", {name}={value!r}" for name, value in manner.items())
    return f'seed {seed}: python -c "from penstock.testing.campaigns.simulated import replay; replay({seed}{given})"'


CAMPAIGN = Campaign(
    name="c1",
    title="delivery in a deterministic simulator: everything that can go wrong, from a seed",
    unit="seed",
    small=500,
    full=20_000,
    run=run,
)
