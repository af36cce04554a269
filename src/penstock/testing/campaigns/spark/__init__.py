"""C8: Spark's driver and its workers are killed and frozen; the output equals the input all the same.

A query copies a topic with four partitions to one with three, batch by batch, through the production source and sink. A
round stops it at one point of a delivery: the driver with all its processes is killed there, or one worker is, or all
are frozen while another driver goes on with the same checkpoint, and woken when that has ended. Every driver goes on
where the one before was stopped. Now and then what a dead driver has prepared is completed by another process, or what
it has staged is swept away.

After some rounds a driver runs to its end. Then every event of the input is in the output, once, byte for byte, in
order per key; no manifest is unfinished, nothing is left staged, and no damage is found.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.spark.steps import Point, Round

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.campaigns.campaign import Report

# Spark's workers import this package, and start again and again: what only the campaign needs is imported where it is.

COMES_MAX: Final = 3
"""A round stops at the first, second or third time that a driver comes to its point."""
STORE_ROUNDS: Final = 10
"""After so many rounds everything is compared, and a new store is begun."""
FREEZE_SHARE: Final = 0.15
MEDDLE_SHARE: Final = 0.2
WEIGHTS: Final = {point: 4 if point == Point.AFTER_DONE else 1 for point in Point}
"""Between sink and batch commit is where it matters most."""
EACH_ONCE: Final = (
    Round(Point.AFTER_STAGING),
    Round(Point.IN_TASK),
    Round(Point.AFTER_MANIFEST),
    Round(Point.IN_APPEND),
    Round(Point.BEFORE_DONE),
    Round(Point.AFTER_DONE),
    Round(Point.AFTER_MANIFEST, freeze=True),
)
"""What a campaign begins with, however small it is; each costs a driver or two, so it is what matters most."""


def rounds(chance: random.Random) -> Iterator[Round]:
    """Yield what happens, round after round."""
    yield from EACH_ONCE
    while True:
        [point] = chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        meddle = chance.random() < MEDDLE_SHARE
        yield Round(
            point,
            freeze=point != Point.ANYWHERE and chance.random() < FREEZE_SHARE,
            swept=meddle and point == Point.AFTER_STAGING,
            completed=meddle and point in {Point.AFTER_MANIFEST, Point.IN_APPEND, Point.BEFORE_DONE},
            comes=chance.randint(1, COMES_MAX),
        )


def run(report: Report, seed: int, *, plant: str = "") -> None:
    """Run the campaign; `plant` names a function that puts a bug into the sink's processes, as `module:function`."""
    from penstock.testing.campaigns.processes import quick_directory

    coming = rounds(random.Random(seed))
    while report.done < report.rounds:
        with quick_directory() as directory:
            _run_store(report, seed, coming, Path(directory), plant)


def _run_store(report: Report, seed: int, coming: Iterator[Round], directory: Path, plant: str) -> None:
    from penstock.testing.campaigns.spark.life import Life, Unexpected
    from penstock.testing.campaigns.zygote import Silent

    number = report.done
    life = Life(report, directory, random.Random(f"{seed}-{number}"), plant=plant)
    played: list[str] = []

    def found(what: str) -> None:
        report.found(what, f"seed {seed}, store of round {number}, then: {'; '.join(played)}")

    try:
        for _ in range(min(STORE_ROUNDS, report.rounds - number)):
            round_ = next(coming)
            played.append(str(round_))
            life.play(round_)
            report.finish_round()
            if complaints := life.complaints(complete=False):
                found("\n".join(complaints))
                return
        life.finish()
        for complaint in life.complaints(complete=True):
            found(complaint)
    except (Silent, Unexpected) as error:
        report.finish_round()
        found(f"{error}")
    finally:
        life.end()


def obstacle() -> str | None:
    """Say why it cannot run here, if so."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return "processes of a session are found and waited for as Linux does it"
    from penstock.errors import SparkUnavailable
    from penstock.spark.java import find_java
    from penstock.spark.session import require_pyspark

    try:
        require_pyspark()
        find_java()
    except SparkUnavailable as error:
        return str(error).splitlines()[0]
    return None


CAMPAIGN: Final = Campaign(
    name="c8",
    title="Spark's driver and its workers are killed and frozen",
    unit="a driver or a worker stopped at a point of a delivery",
    small=len(EACH_ONCE),
    full=300,
    run=run,
    obstacle=obstacle,
)
