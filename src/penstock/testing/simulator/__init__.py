"""The deterministic simulator: several processes with the production code, on one machine that a seed decides over.

    with World(seed=7, plan=Plan.drawn(7)) as world:
        world.run(story(world))
    problems = check(world.journal)
    print(*world.trace, sep=os.linesep)

Everything that could differ between two runs is virtual: time, the order of tasks, the disk and its databases, locks,
datagrams, random numbers, errors, deaths. The same seed tells the same story, word for word.
"""

from penstock.testing.simulator.loop import Deadlock, EndlessRun, Killed, LoopClock, VirtualLoop
from penstock.testing.simulator.plan import CALM, Plan
from penstock.testing.simulator.process import Process, ProcessDied
from penstock.testing.simulator.world import World

__all__ = [
    "CALM",
    "Deadlock",
    "EndlessRun",
    "Killed",
    "LoopClock",
    "Plan",
    "Process",
    "ProcessDied",
    "VirtualLoop",
    "World",
]
