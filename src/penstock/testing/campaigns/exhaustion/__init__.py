"""C11: the disk is full, or descriptors are used up; then there is enough again.

Meanwhile errors are clear, what was acknowledged stays, and nothing that was refused appears. Afterwards the store goes
on by itself, without being opened anew. What publishing leaves free is enough to commit cursors and to trim. Errors
leave no descriptor open.

Each round runs in a process of its own: most on a small disk in memory, which a ballast fills to some degree from time
to time, one of four with hardly a descriptor to spare.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.campaigns.campaign import Report
    from penstock.testing.campaigns.nursery import Ended

ROUNDS: Final = "penstock.testing.campaigns.exhaustion.rounds"
ROUND_SECONDS: Final = 60.0
"""No round takes as long: what is longer hangs."""
DISK_BYTES: Final = 16 << 20


@contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """Mount a small disk in memory, for the time of this block."""
    directory.mkdir()
    options = f"size={DISK_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "penstock", str(directory)], check=True, timeout=30)  # noqa: S603, S607
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=30)  # noqa: S603, S607


def judge(report: Report, ended: Ended, replay: str) -> None:
    """Report what a round has told: complaints, and at its end what it tried."""
    for told in ended.told:
        if isinstance(told, str):
            report.found(told, replay)
        else:
            report.tried.update(told)
    if ended.hung:
        report.found(f"the process did not end within {ROUND_SECONDS:.0f} s", replay)
    elif ended.code < 0:
        report.found(f"the process was ended by signal {-ended.code}", replay)


def run(report: Report, seed: int) -> None:
    """Run the campaign."""
    chance = random.Random(seed)
    base = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    try:
        with mounted(base / "disk") as disk, Nursery(f"{ROUNDS}:warm_up") as nursery:
            for number in range(report.rounds):
                work = "use_up_descriptors" if number % 4 == 3 else "fill_disk"
                round_seed = chance.getrandbits(32)
                ended = nursery.run(f"{ROUNDS}:{work}", ROUND_SECONDS, directory=str(disk), seed=round_seed)
                judge(report, ended, f"{ROUNDS}:{work}, seed {round_seed}: round {number} of seed {seed}")
                report.finish_round()
    finally:
        shutil.rmtree(base)


def obstacle() -> str | None:
    """Say why it cannot run here, if so."""
    if sys.platform != "linux":
        return "a disk in memory is mounted as Linux does it"
    if os.geteuid() != 0:
        return "root is needed to mount a file system"
    return None


CAMPAIGN: Final = Campaign(
    name="c11",
    title="the disk is full, or descriptors are used up",
    unit="rounds",
    small=12,
    full=1_000,
    run=run,
    obstacle=obstacle,
)
