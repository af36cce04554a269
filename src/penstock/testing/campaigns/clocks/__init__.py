"""C12: the wall clock jumps by hours and years, forward and back, and stands still.

A store in files runs on a clock of its own, which is set between one step and the next, while it is open and while it
is closed. What must hold (`life`):

* events keep their order and offsets, and tell the wall time of their append, however wrong; the latest append time
  that the log knows never goes back, so that looking for a time misses nothing;
* what was stored is never stored again, whatever the clock says of its producer's age;
* a lease follows the boot clock alone;
* what is scheduled is due by the wall clock;
* retention removes by age only what is too old by the wall clock, all of it, and nothing while the two clocks disagree
  by more than an hour since the store was opened: then it raises an alarm. What was appended while both could be
  trusted is too old by the boot clock, too. What was appended while the clock was wrong may go before its time, and is
  counted.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.clocks.life import Life, Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.campaigns.campaign import Report

STEPS: Final = 60
"""In a round."""


def run(report: Report, seed: int) -> None:
    """Live so many lives."""
    with _listening() as listener:
        for number in range(report.rounds):
            _live(report, f"{seed}/{number}", listener)
            report.finish_round()


@contextmanager
def _listening() -> Iterator[Listener]:
    """Hear what the store says to the log of the program, instead of whoever else would."""
    logger, listener = logging.getLogger("penstock"), Listener()
    logger.addHandler(listener)
    before, logger.propagate = logger.propagate, False
    try:
        yield listener
    finally:
        logger.removeHandler(listener)
        logger.propagate = before


def _live(report: Report, seed: str, listener: Listener) -> None:
    """Live one life; the first promise that does not hold ends it."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    steps: list[str] = []
    try:
        life = Life(directory / "store", report, random.Random(seed), listener, steps)
        try:
            for _ in range(STEPS):
                life.step()
        finally:
            life.close()
    except Exception as error:  # noqa: BLE001 - whatever it is, no clock may cause it
        report.found(f"{type(error).__name__}: {error}", f"life {seed}, after {', '.join(steps)}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


CAMPAIGN = Campaign(
    name="c12",
    title="the wall clock jumps forward and back, and stands still",
    unit=f"a life of {STEPS} steps",
    small=10,
    full=500,
    run=run,
)
