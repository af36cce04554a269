"""C1: the deterministic simulator. Processes with the production engine, runtime and file store, on a machine in memory.

A seed decides everything: who does what when, what goes wrong, who dies, what a power loss takes along. The same seed tells the
same story, word for word; `replay` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.simulated.life import Life
from penstock.testing.simulator import Plan, World

if TYPE_CHECKING:
    from penstock.testing.campaigns.campaign import Report


def live(seed: int) -> tuple[list[str], World, Life]:
    """Live the life of a seed; returns what is wrong, and the world with its trace."""
    plan = Plan.drawn(seed)
    with World(seed, plan=Plan()) as world:
        life = Life(world, plan)
        problems = world.run(life.run())
    return problems, world, life


def replay(seed: int) -> str:
    """Return the story of a seed, and what is wrong after it."""
    problems, world, _ = live(seed)
    return "\n".join([*world.trace, "", *(problems or ["nothing is wrong"])])


def run(report: Report, seed: int) -> None:
    """Live the lives of consecutive seeds."""
    for each in range(seed, seed + report.rounds):
        problems, world, life = live(each)
        if problems:
            report.found("\n".join(problems[:10]), f"seed {each}")
        report.count("events delivered", life.deliveries)
        report.count("processes started", len(world.processes))
        report.count("steps of the loop", world.loop.steps)
        report.finish_round()


CAMPAIGN = Campaign(
    name="c1",
    title="delivery in a deterministic simulator: everything that can go wrong, from a seed",
    unit="seed",
    small=500,
    full=20_000,
    run=run,
)
