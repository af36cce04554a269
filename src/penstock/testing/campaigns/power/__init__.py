"""C3: the power fails, for real, under a store on an ext4 of its own.

A round mounts the file system and lets a process use the store there. At some moment the power fails. What the process
tells before and after is in a journal outside; it is killed, the file system is mounted again, which replays its
journal, and the store is opened as after a boot of the machine; now and then the power fails again during that. Then

* what was acknowledged is there, with equal bytes at its offsets; what was refused is not; of what is unknown all or
  nothing of each publish is there, and sending it again stores it once;
* no cursor is lost or beyond the end, a created topic exists, a deleted one does not;
* nothing is declared lost, `verify` is clean, no error is logged, and publishing goes on.

The file system's options, its block size and the way in which the power fails differ from round to round. In about half
of the rounds the process works in step (`life`), so that no later sync makes up for a forgotten one.
"""

from __future__ import annotations

import random
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

from penstock.settings import FileSettings
from penstock.testing.campaigns.campaign import Campaign, Report
from penstock.testing.campaigns.power import life
from penstock.testing.campaigns.power.device import Cut, Device, obstacle
from penstock.testing.campaigns.processes import actor, quick_directory
from penstock.testing.campaigns.processes.reports import (
    Answered,
    Asked,
    Call,
    Create,
    Delete,
    Ledger,
    Publish,
    Settle,
    Subscribe,
    Trim,
)
from penstock.testing.campaigns.zygote import Child, Crashed, Silent, Zygote

IMAGE_ROUNDS: Final = 10
"""A file system, and the store on it, lives through so many failures."""
ANSWERS_MAX: Final = 40
"""The power fails after at most so many answers."""
SPIN_SECONDS_MAX: Final = 0.004
OPENING_SECONDS_MAX: Final = 0.05
AGAIN: Final = 0.2
"""How often the power fails during the recovery, too."""
OPTIONS: Final = (
    "data=ordered",
    "data=writeback",
    "data=journal",
    "data=ordered,noauto_da_alloc",
    "data=writeback,noauto_da_alloc,commit=1",
    "data=ordered,commit=30",
    "data=ordered,nodelalloc",
)
LAST_CALLS: Final[tuple[type[Call], ...]] = (Publish, Settle, Trim, Create, Subscribe, Delete)
"""What the power fails right after, in step; each is as likely."""
REFUSALS: Final = frozenset({"TopicDeleted", "TrimRefused", "UnknownSubscription"})
"""What a call may end with although the power is on: another thread deletes topics."""
MODULES: Final = (actor.__name__, life.__name__)


def run(report: Report, seed: int, *, plant: str = "") -> None:
    """Run the campaign; `plant` names a function that puts a bug into the processes, as `module:function`."""
    with Zygote(*MODULES, plant=plant) as zygote:
        while report.done < report.rounds:
            with quick_directory() as directory:
                _run_image(report, seed, zygote, Path(directory))


def _run_image(report: Report, seed: int, zygote: Zygote, directory: Path) -> None:
    number = report.done
    chance = random.Random(f"{seed}-{number}")
    ledger = Ledger(report, lambda: f"seed {seed}, image of round {number}, round {report.done}", refusals=REFUSALS)
    device = Device(directory)
    device.format(chance.choice([1024, 4096]))
    store = Store(report, ledger, zygote, device, chance)
    for _ in range(min(IMAGE_ROUNDS, report.rounds - report.done)):
        try:
            store.play_round(report.done)
        except Silent as error:
            ledger.found(f"a store is opened and used, but {error}")
        report.finish_round()
        if ledger.broken:
            return


class Store:
    """A store on a disk whose power fails."""

    def __init__(self, report: Report, ledger: Ledger, zygote: Zygote, device: Device, chance: random.Random) -> None:
        self._report = report
        self._ledger = ledger
        self._zygote = zygote
        self._device = device
        self._chance = chance
        self._root = str(device.mount_point / "data")

    def play_round(self, number: int) -> None:
        """Use the store until the power fails, and see what is there then."""
        options = self._chance.choice(OPTIONS)
        self._report.count(f"mounted with {options}")
        with self._device.mounted(options):
            self._use(number)
        while self._chance.random() < AGAIN:
            with self._device.mounted(options):
                self._recover_in_vain()
        with self._device.mounted(options):
            self._survey()
        self._ledger.check()

    def _settings(self, marker_seconds: float) -> FileSettings:
        return FileSettings(
            segment_bytes=8 << 10,
            allocate_bytes=4 << 10,
            marker_seconds=marker_seconds,
            stall_seconds=30.0,
            runtime_directory=str(self._device.mount_point.parent),
        )

    # --- until the power fails ------------------------------------------------------------------

    def _use(self, number: int) -> None:
        in_step = self._chance.random() < 0.5
        lasting = ["t0"] if in_step else ["t0", "t1", "t2"]
        sources = {name: self._ledger.next_sequence(name) for name in lasting}
        if not in_step:
            sources[f"own{number}"] = 0
        child = self._zygote.start(
            life.live,
            root=self._root,
            settings=self._settings(3600.0 if in_step else self._chance.choice([3600.0, 0.005])),
            seed=f"{self._chance.random()}",
            sources=sources,
            in_step=in_step,
        )
        self._report.count("failures in step" if in_step else "failures among threads")
        try:
            count = self._chance.randrange(ANSWERS_MAX)
            if count == 0:
                wait([child.connection], self._chance.random() * OPENING_SECONDS_MAX)
            elif in_step:
                self._hear_in_step(child, count, self._chance.choice(LAST_CALLS))
            else:
                self._hear_answers(child, count)
            self._cut(0.0 if in_step else SPIN_SECONDS_MAX)
            self._end(child)
        finally:
            child.kill()

    def _hear_answers(self, child: Child, count: int) -> None:
        """Take in what a process says, until so many calls were answered."""
        for message in child.hear_rest():
            self._hear(child, message)
            count -= isinstance(message, Answered)
            if count == 0:
                return
        self._ledger.found(f"the power is on, but process {child.pid} has ended")

    def _hear_in_step(self, child: Child, count: int, last: type[Call]) -> None:
        """Take in what it says in step, until so many and then one of this kind were answered: it waits then."""
        call: Call | None = None
        for message in child.hear_rest():
            self._hear(child, message)
            if isinstance(message, Asked):
                call = message.call
            elif isinstance(message, Answered):
                count -= 1
                if count <= -ANSWERS_MAX or (count <= 0 and isinstance(call, last)):
                    return
                child.tell("go")
        self._ledger.found(f"the power is on, but process {child.pid} has ended")

    def _cut(self, spin_seconds: float) -> None:
        """Let the power fail, at no special moment."""
        end = time.perf_counter() + self._chance.random() * spin_seconds
        while time.perf_counter() < end:
            pass
        how = self._chance.choices(list(Cut), [1, 1, 6])[0]
        self._report.count(f"power failed {how.name.lower().replace('_', ' ')}")
        self._ledger.power_fails()
        self._device.cut(how)

    def _end(self, child: Child) -> None:
        """Take in what a process has said, and says until it is killed."""
        wait([child.connection], 0.002)  # errors are worth hearing, too
        child.kill()
        for message in child.hear_rest():
            self._hear(child, message)
        self._ledger.end_of(child.pid)

    def _hear(self, child: Child, message: object) -> None:
        if not isinstance(message, Crashed):
            self._ledger.hear(child.pid, message)
        elif self._ledger.has_power:
            self._ledger.found(f"a store is opened and used, but it raised:\n{message.trace}")

    # --- after it -------------------------------------------------------------------------------

    def _start_survey(self) -> Child:
        self._ledger.power_returns()
        return self._zygote.start(
            actor.survey,
            root=self._root,
            settings=self._settings(3600.0),
            boot_id=self._chance.randbytes(16),
            repeats=self._ledger.to_repeat(),
            source="survey",
            first=self._ledger.next_sequence("survey"),
        )

    def _recover_in_vain(self) -> None:
        child = self._start_survey()
        try:
            wait([child.connection], self._chance.random() * OPENING_SECONDS_MAX)
            self._cut(OPENING_SECONDS_MAX)
            self._end(child)
            self._report.count("power failed during a recovery")
        finally:
            child.kill()

    def _survey(self) -> None:
        child = self._start_survey()
        try:
            for message in child.hear_rest():
                self._hear(child, message)
            self._ledger.end_of(child.pid)
            if code := child.reap():
                self._ledger.found(f"a store opens after the power has failed, but its process ended with {code}")
        finally:
            child.kill()


CAMPAIGN = Campaign(
    name="c3",
    title="the power fails",
    unit="a power failure of a mounted ext4",
    small=4,
    full=1000,
    run=run,
    obstacle=obstacle,
)
