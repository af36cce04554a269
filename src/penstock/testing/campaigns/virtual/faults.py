"""C5: a disk that misbehaves while the store lives on: short writes, full, failing, lying and slow syncs.

Whole lives on a `FaultyDisk`, with faults that the seed draws; then the process is killed, or the power is lost, and
the disk is a good one again. Whatever the store answered must hold then, as after any crash: an acknowledged event is
there, a refused one is not, and one whose sync failed is stored at most once.

A sync that lies is beyond any store: what it acknowledged can be gone after a power loss. What can be promised then
is that nothing else is wrong. What is there was published and is unchanged, it opens and goes on, and wherever
something testifies that there was more (a cursor, a parked row), the loss is declared and its offsets are never given
out again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.virtual.aftermath import Aftermath, silence
from penstock.testing.campaigns.virtual.life import Life
from penstock.testing.machine import SURVIVALS, Machine
from penstock.testing.machine.faults import FAILING, FULL, LYING, SHORT, SLOW, FaultyDisk

if TYPE_CHECKING:
    from penstock.testing.campaigns.campaign import Report

MIXTURES = (
    {SHORT: 0.03},
    {FULL: 0.03},
    {FAILING: 0.03},
    {SLOW: 0.2},
    {SHORT: 0.02, FULL: 0.02, FAILING: 0.02, SLOW: 0.05},
    {LYING: 0.3},
)
"""What is wrong with a disk, and how often."""


def run(report: Report, seed: int) -> None:
    """Live on one bad disk after the other."""
    for number in range(report.rounds):
        _live(report, seed + number)
        report.finish_round()


def _live(report: Report, seed: int) -> None:
    chance = random.Random(seed)
    rates = MIXTURES[seed % len(MIXTURES)]
    disk = FaultyDisk(chance, rates)
    machine = Machine(seed, disk=disk)
    disk.wait = machine.clock.advance
    life = Life(machine, seed)
    with silence():
        life.run()
    for fault, count in disk.counts.items():
        report.count(fault, count)
    ends = "the process is killed" if chance.random() < 0.3 else chance.choice(SURVIVALS)
    after = machine.after_kill() if isinstance(ends, str) else machine.after_power_loss(ends, chance)
    machine.turn_off()
    aftermath = Aftermath(after, life.history, trusts_syncs=LYING not in rates)
    if problems := aftermath.examine():
        report.found("\n".join(problems), f"seed {seed}, {', '.join(rates)}, then {ends}")
    after.turn_off()


CAMPAIGN = Campaign(
    name="c5",
    title="short writes, a full disk, failing, lying and slow syncs",
    unit="life on a bad disk",
    small=150,
    full=2_000,
    run=run,
)
