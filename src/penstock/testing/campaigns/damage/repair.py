"""Damaged stores as a whole: opened, read, repaired, opened again.

A repair declares exactly what was hit as lost, keeps all else, and leaves a store that verifies and goes on.
"""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.stores.file.repair import apply, plan
from penstock.stores.file.verify import verify
from penstock.testing.campaigns.damage.cases import DOUBLED
from penstock.testing.campaigns.damage.segments import read_around
from penstock.testing.campaigns.damage.specimen import BOOT, NEXT_BOOT, a_platform, open_store
from penstock.testing.conformance.builders import PLENTY, PRODUCER, a_part, append

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.stores.file.platform import Platform
    from penstock.testing.campaigns.campaign import Report
    from penstock.testing.campaigns.damage.segments import Case
    from penstock.testing.campaigns.damage.specimen import Specimen


def repair(specimen: Specimen, case: Case, hit: set[int], copy: Path, report: Report) -> None:
    """Damage a copy of the specimen in this way, read it, repair it and read it again."""
    shutil.copytree(specimen.root, copy)
    try:
        for path, data in case.files.items():
            damaged = copy / path.relative_to(specimen.root)
            damaged.unlink(missing_ok=True)
            if data is not None:
                damaged.write_bytes(data)
        wrong = _wrong_with(case, hit, copy)
    except (PenstockError, OSError) as error:
        wrong = f"it ended with {error!r}"
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    if wrong is not None:
        report.found(f"{case.what}: {wrong}", case.where)


def _wrong_with(case: Case, hit: set[int], copy: Path) -> str | None:
    lost = set() if case.what == DOUBLED else hit
    platform = a_platform(random.Random(1), BOOT)
    wrong = _read(case, hit, None, copy, platform)
    if wrong is not None:
        return f"opened: {wrong}"
    apply(copy, platform, plan(copy, platform))
    if not (report := verify(copy, platform)).ok:
        return f"repaired, and it still tells of {report.damages} {report.state}"
    for boot_id in (BOOT, NEXT_BOOT):
        wrong = _read(case, set(), lost, copy, a_platform(random.Random(2), boot_id))
        if wrong is not None:
            return f"repaired: {wrong}"
    return _goes_on(case, copy, platform)


def _read(case: Case, hit: set[int], lost: set[int] | None, copy: Path, platform: Platform) -> str | None:
    with closing(open_store(copy, platform)) as store:
        end = store.log.bounds(case.log.partition).stop
        return read_around(
            lambda start: store.log.read(case.log.partition, start, bytes_max=PLENTY), case.log, hit, end, lost=lost
        )


def _goes_on(case: Case, copy: Path, platform: Platform) -> str | None:
    with closing(open_store(copy, platform)) as store:
        [answer] = append(store, case.log.partition, a_part(b"next", producer=PRODUCER, first=case.log.end))
        offsets = None if answer.offsets is None else answer.offsets.start
    return None if offsets == case.log.end else f"the next event got offset {offsets}, and not {case.log.end}"
