"""C6: bytes change, are cut off, swapped, out of date, missing or another's, and all of it is told.

**Segments.** Every bit of every byte of a sealed segment, the active one, an index and the file `first` is flipped, and
each is cut to every length; pages and files are damaged as a whole (`cases`). Damage must be found, told as
torn, corrupt, missing or foreign, and located: file, byte, and the offsets of exactly the blocks that were hit
(`oracle`, which also names the few bytes that say nothing). All other events must be there, unchanged, and
nothing else. Each damage is walked over; a share of the flips and cuts, and all else, is verified, read and recovered
as well (`segments`), and some of it repaired in files (`repair`).

**Databases.** One bit of every byte of `control.db` and `bulk.db` is flipped, another one with the next seed, all eight
in eight seeds; and one of every fourth byte of their WALs. See `databases` for what is promised.

A round is a share of all this, so that `SHARES` rounds do all of it.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.damage.cases import bits_of, combined, cut, files, flipped, lengths_of, pages
from penstock.testing.campaigns.damage.databases import WALS, DatabaseLaboratory
from penstock.testing.campaigns.damage.repair import repair
from penstock.testing.campaigns.damage.segments import Laboratory
from penstock.testing.campaigns.damage.specimen import Specimen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.testing.campaigns.campaign import Report
    from penstock.testing.campaigns.damage.segments import Case

SHARES: Final = 256
THOROUGHLY: Final = 1 / 32
"""So many of the flips and cuts are looked at in every way."""
COMBINED: Final = 4
"""Combinations per round."""
IN_FILES: Final = 1 / 16
"""So many flips of databases are made in files."""


def run(report: Report, seed: int) -> None:
    """Run so many shares, in an order that the seed decides."""
    chance = random.Random(seed)
    order = list(range(SHARES))
    chance.shuffle(order)
    directory = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    try:
        with silence():
            shares = _Shares(directory, report, seed, chance)
            for number in range(report.rounds):
                shares.run(order[number % SHARES], number // SHARES)
                report.finish_round()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def silence() -> Iterator[None]:
    """Keep the store from telling each damage to the log of the program, too."""
    logger = logging.getLogger("penstock")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Shares:
    """All damages, a share at a time."""

    def __init__(self, directory: Path, report: Report, seed: int, chance: random.Random) -> None:
        self._report = report
        self._directory = directory
        self._seed = seed
        self._chance = chance
        self._specimen = Specimen(directory / "specimen")
        self._laboratory = Laboratory(report, chance)
        self._databases = DatabaseLaboratory(self._specimen, directory / "databases", report, chance)
        self._log = self._specimen.logs[0]
        self._layouts = {self._log.path(layout): layout for layout in self._log.layouts}
        self._bits = bits_of(self._log)
        self._lengths = lengths_of(self._log)
        self._whole = [*pages(self._specimen), *files(self._specimen)]

    def run(self, share: int, again: int) -> None:
        """Do one share; `again` counts how often all of them were done."""
        for place in islice(self._bits, share, None, SHARES):
            self._look(flipped(self._log, *place))
        for place in islice(self._lengths, share, None, SHARES):
            self._look(cut(self._log, *place))
        whole = self._whole[share::SHARES]
        for case in [*whole, *(combined(self._specimen, self._chance) for _ in range(COMBINED))]:
            self._report.count(case.what)
            self._laboratory.examine(case)
        self._repair(self._chance.choice([*whole, *(self._drawn() for _ in range(3))]))
        self._flip_databases(share, again)

    def _look(self, case: Case) -> None:
        self._report.count(case.what)
        layout = self._layouts.get(next(iter(case.files)))
        if layout is not None:
            self._laboratory.glance(case, layout)
        if layout is None or self._chance.random() < THOROUGHLY:
            self._laboratory.examine(case)

    def _drawn(self) -> Case:
        draws = (
            lambda: flipped(self._log, *self._chance.choice(self._bits)),
            lambda: cut(self._log, *self._chance.choice(self._lengths)),
            lambda: combined(self._specimen, self._chance),
        )
        return self._chance.choice(draws)()

    def _repair(self, case: Case) -> None:
        self._report.count("damage repaired")
        repair(self._specimen, case, self._laboratory.hit_by(case), self._directory / "copy", self._report)

    def _flip_databases(self, share: int, again: int) -> None:
        turn = self._seed + again
        for name, data in self._databases.files.items():
            for byte in range(share, len(data), SHARES):
                self._databases.flip(name, 8 * byte + turn % 8, in_files=self._chance.random() < IN_FILES)
        for name in WALS:
            for byte in range(share * 4 + turn % 4, len(self._databases.moments[-1][name]), SHARES * 4):
                self._databases.flip_in_wal(name, 8 * byte + self._chance.randrange(8))


CAMPAIGN = Campaign(
    name="c6",
    title="bytes change, are cut off, swapped, out of date, missing or another's",
    unit=f"one of {SHARES} shares of all damages",
    small=4,
    full=SHARES,
    run=run,
)
