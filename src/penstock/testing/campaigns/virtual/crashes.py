"""C2: a crash before every single operation of a life, with every kind of loss, and another crash while recovering.

The life is that of `life.Life`: it creates, publishes, rolls, trims, deletes, schedules, stages, moves, closes and
opens. Before each operation that changes the medium the machine is copied, and each copy loses its power in its own
way, or its process is killed; `aftermath.Aftermath` says what must hold then. In some of them a second crash comes
while the store is being opened. When a life is over, some of its segments are damaged, and the repair crashes in the
same way: whatever it leaves can be repaired, and nothing is lost but what was damaged.

A finding is a `Crash`, as Python writes it. `replay` shows it again: the operations before it, what survived, and what
is wrong then.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.rows import Partition
from penstock.stores.file.repair import apply, plan
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.campaign import Campaign, Report
from penstock.testing.campaigns.virtual.aftermath import Aftermath, Damaged, silence
from penstock.testing.campaigns.virtual.life import SMALL, Act, Life
from penstock.testing.machine import ROOT, SURVIVALS, Machine, Survival

if TYPE_CHECKING:
    from collections.abc import Callable

KILL = "the process is killed"
ALL_FROM = 20_000
"""With so many rounds each operation is crashed in every way; with fewer, in some that the seed draws."""
SAMPLE = 3
SECOND_CRASH = 0.25
"""In this share of the states, another crash comes while the store recovers, or goes on."""
GOES_ON = 0.5
"""In this share of them the store is also verified, and used again."""
RECOVERY_STEPS = 60
FOR_EVER = 1 << 40
SHOWN = 12
"""So many operations before the crash are shown."""


class Crash(NamedTuple):
    """Where and how a scene ends."""

    seed: int
    scene: str
    """`life` or `repair`."""
    operation: int
    how: Survival | None
    """None if the process is killed."""
    second: tuple[int, Survival | None] | None = None
    """Before which operation after that it crashes again, and how."""


class _Enough(BaseException):
    """Ends a scene: so many rounds were asked for."""


@dataclass
class Scene:
    """Something that happens on a machine, and may be cut off anywhere."""

    machine: Machine
    play: Callable[[], None]
    history: list[Act]
    damages: list[Damaged]


# --- scenes -------------------------------------------------------------------------------------


def _scene(name: str, seed: int) -> Scene:
    machine = Machine(seed)
    life = Life(machine, seed)
    if name == "life":
        return Scene(machine, life.run, life.history, [])
    life.run()
    damaged = machine.after_power_loss(SURVIVALS[0], random.Random(seed))
    machine.turn_off()
    damages = _damage(damaged, random.Random(seed))

    def repair() -> None:
        apply(ROOT, damaged.platform, plan(ROOT, damaged.platform), settings=SMALL)

    return Scene(damaged, repair, life.history, damages)


def _damage(machine: Machine, chance: random.Random) -> list[Damaged]:
    """Damage some segments, and return what is lost by it; that `verify` is right there is tried elsewhere (c6)."""
    segments = [path for path in machine.disk.paths() if path.suffix == ".seg" and path.name != "unnamed.seg"]
    for path in chance.sample(segments, min(len(segments), 2)):
        content = bytearray(machine.disk.file(path).content)
        match chance.choice(["flip", "flip", "cut", "remove"]):
            case "flip":
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                machine.disk.file(path).replace(bytes(content))
            case "cut":
                machine.disk.file(path).replace(bytes(content[: chance.randrange(len(content))]))
            case _:
                machine.disk.remove(path)
                machine.disk.sync_directory(path.parent)
    machine.operations.clear()
    found = []
    for topic in verify(ROOT, machine.platform).topics:
        for partition in topic.partitions:
            for damage in partition.damages:
                stop = FOR_EVER if damage.stop is None else damage.stop
                found.append((Partition(topic.log_id, partition.number), damage.start, stop))
    return found


# --- crashing -----------------------------------------------------------------------------------


def run(report: Report, seed: int) -> None:
    """Crash scenes, one after the other, until there were enough rounds."""
    while report.done < report.rounds:
        for name in ("life", "repair"):
            _crash_everywhere(name, seed, report)
        seed += 1


def _crash_everywhere(name: str, seed: int, report: Report) -> None:
    with silence():
        scene = _scene(name, seed)
    machine = scene.machine
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
            at = Crash(seed, name, number, how, second)
            if problems := _examine(at, scene, report):
                report.found(_told(problems, machine, operation), str(at))
            report.finish_round()

    _play(scene, crash)
    report.count(f"scenes of {name}")


def _play(scene: Scene, on_step: Callable[[str], None]) -> None:
    scene.machine.on_step = on_step
    try:
        with silence():
            scene.play()
    except _Enough:
        pass
    finally:
        scene.machine.turn_off()


def _examine(crash: Crash, scene: Scene, report: Report) -> list[str]:
    """Crash a copy of the machine, and perhaps once more while it recovers; return what is wrong then."""
    chance = _chance_of(crash)
    after = _crashed(scene.machine, crash.how, chance)
    aftermath = Aftermath(after, scene.history, damages=scene.damages)
    left: list[tuple[Machine, Aftermath]] = []

    def crash_again(_operation: str) -> None:
        if crash.second is not None and len(after.operations) == crash.second[0]:
            again = _crashed(after, crash.second[1], chance)
            left.append((again, Aftermath(again, aftermath.history, aftermath.seen, damages=scene.damages)))

    def crash_at_last() -> None:
        # What was acknowledged and read since must outlast a power loss that takes all that was not synced.
        again = after.after_power_loss(SURVIVALS[1], chance)
        left.append((again, Aftermath(again, aftermath.history, aftermath.seen, damages=scene.damages)))

    after.on_step = crash_again
    aftermath.before_closing = crash_at_last
    problems = aftermath.examine(goes_on=chance.random() < GOES_ON)
    report.count("crash states")
    report.count(f"{crash.how or KILL}")
    after.turn_off()
    for again, second in left:
        problems += [f"after a second crash: {text}" for text in second.examine(goes_on=False)]
        report.count("crash states")
        report.count("crashed again")
        again.turn_off()
    return problems


def _chance_of(crash: Crash) -> random.Random:
    return random.Random(f"{crash.seed}/{crash.scene}/{crash.operation}/{crash.how}")


def _crashed(machine: Machine, how: Survival | None, chance: random.Random) -> Machine:
    return machine.after_kill() if how is None else machine.after_power_loss(how, chance)


def replay(crash: Crash) -> str:
    """Show a crash again: the operations up to it, what survived, and what is wrong after it."""
    with silence():
        scene = _scene(crash.scene, crash.seed)
    machine = scene.machine
    told: list[str] = []

    def stop(operation: str) -> None:
        if len(machine.operations) == crash.operation:
            after = _crashed(machine, crash.how, _chance_of(crash))
            told.extend([_told([], machine, operation), str(crash.how or KILL), *after.disk.differences(machine.disk)])
            told.extend(_examine(crash, scene, Report(rounds=1)) or ["nothing is wrong"])
            raise _Enough

    _play(scene, stop)
    return "\n".join(told)


def _told(problems: list[str], machine: Machine, operation: str) -> str:
    first = max(len(machine.operations) - SHOWN, 0)
    steps = [f"  {first + index}: {text}" for index, text in enumerate(machine.operations[first:])]
    return "\n".join([*problems, "after", *steps, f"and before {operation}"])


CAMPAIGN = Campaign(
    name="c2",
    title="a crash before every operation, with every loss, and again while recovering or repairing",
    unit="crash",
    small=4_000,
    full=20_000,
    run=run,
)
