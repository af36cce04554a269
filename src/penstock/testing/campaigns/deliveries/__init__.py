"""C7, deliveries: consumers are killed and frozen between each two durable steps of a delivery.

A consumer is a real process with a real `Bus`, on a `file:` store that it shares with others. It does with each event
what the event's own payload says: acks, short and long retries, dead letters. Every call of it that changes the store
has a name (`steps.STEPS`), and the process ends itself with SIGKILL exactly before or after one of them; or stops
itself with SIGSTOP there, another one takes over, and it is woken when that one is done; or it is killed from outside
at any moment, perhaps in the middle of a step. Others go on, and may be killed again. The last one goes on to the end.

Promised is what `books` says: nothing that was settled durably is delivered again, keys keep their order over all
deaths, whoever was taken over changes nothing, the ledger has exactly what was settled, and in the end every event is
what its payload says. An event that kills its process each time is a dead letter in the end, and no other is.

Of a subscription that is shared two consumers are there at a time (`together`). One comes to the other, or takes over
from it, and one of them is ended at a step of that: when it comes, has slots or claims, lets them go, or takes over
those of a dead one. Promised is what `accounts` says.

A round names its scene and where processes end by its seed alone. Which of several events is settled first is the
system's, so that the same seed does nearly the same.
"""

from __future__ import annotations

import random

from penstock.runtime.subscriptions import SHARED
from penstock.testing.campaigns.campaign import Campaign, Report
from penstock.testing.campaigns.deliveries import moves, rounds, together
from penstock.testing.campaigns.deliveries.rounds import play
from penstock.testing.campaigns.deliveries.script import (
    SCENES,
    SIDES,
    TOGETHER,
    Fault,
    Scene,
    any_faults,
    any_scene,
    any_shared_scene,
)
from penstock.testing.campaigns.deliveries.steps import STEPS
from penstock.testing.campaigns.deliveries.together import play_together
from penstock.testing.campaigns.zygote import Zygote

MODULES = (*rounds.MODULES, *together.MODULES)
NAMED_SHARE = 0.4
"""Of the rounds: at a named step, in a scene that makes it. The others are as chance will have it."""
SHARED_SHARE = 0.4
"""Of the rounds: of a subscription that is shared."""


def run(report: Report, seed: int, *, plant: str = "") -> None:
    """Run the campaign; `plant` names a function that puts a bug into the consumers, as `module:function`."""
    with Zygote(*MODULES, plant=plant) as zygote:
        while report.done < report.rounds:
            scene, faults = any_round(f"{seed}-{report.done}")
            told = ", then ".join(map(str, (*scene.before, *faults)))
            if scene.mode in SHARED:
                beside, found = play_together(zygote, scene, *faults, count=report.count)
                counts = beside.accounts.counts
            else:
                played, found = play(zygote, scene, faults, count=report.count)
                counts = played.books.counts
            for what in found:
                report.found(f"{what}\nin {scene}", f"seed {seed}, round {report.done}: {told}")
            for what, times in counts.items():
                report.count(what, times)
            report.finish_round()


def any_round(seed: str) -> tuple[Scene, tuple[Fault, ...]]:
    """Return what happens in the round of a seed."""
    chance = random.Random(seed)
    faults: tuple[Fault, ...]
    named, shared = chance.random() < NAMED_SHARE, chance.random() < SHARED_SHARE
    if named:
        known, scenes = (moves.STEPS, TOGETHER) if shared else (STEPS, SCENES)
        step = chance.choice(list(known))
        scene = scenes[known[step]]
        faults = (Fault(step, chance.choice(SIDES), freeze=chance.random() < 0.3),)
    elif shared:
        scene = any_shared_scene(chance)
        faults = any_faults(chance, scene)[:1]
    else:
        scene = any_scene(chance)
        faults = any_faults(chance, scene)
    return scene.freezing() if any(fault.freeze for fault in faults) else scene, faults


CAMPAIGN = Campaign(
    name="c7d",
    title="consumers are killed and frozen between the steps of a delivery",
    unit="a delivery whose processes die at one to four steps",
    small=6,
    full=1_000,
    run=run,
)
