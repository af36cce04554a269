"""Damaged partitions, and what the store says of them: walking, verifying, reading, recovering.

All of it runs over a disk in memory, so that every bit of every byte can be flipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.batch import Batch
from penstock.clock import VirtualClock
from penstock.errors import Corruption
from penstock.stores.file.block import Blank, Broken
from penstock.stores.file.files import PartitionFiles
from penstock.stores.file.platform import Platform
from penstock.stores.file.reader import PartitionReader
from penstock.stores.file.recovery import recover
from penstock.stores.file.scan import CORRUPT, MISSING, Damage, walk
from penstock.stores.file.segment import SegmentFile
from penstock.stores.file.tail import State
from penstock.stores.file.verify import verify_partition
from penstock.testing.campaigns.damage.oracle import Changes, Expected, damages_of, offsets_of, seeming_end, why_unseen
from penstock.testing.campaigns.damage.specimen import BOOT, NEXT_BOOT, Layout, Log
from penstock.testing.conformance.builders import PLENTY
from penstock.testing.machine.plain import MemoryDisk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.offsets import Gap
    from penstock.stores.file.tail import Tail
    from penstock.testing.campaigns.campaign import Report

EVENT, GAP, DAMAGED = "the event", "a gap", "damaged"


class Case(NamedTuple):
    """A partition with damage."""

    what: str
    """Such as `a bit flipped`."""
    where: str
    """What shows it again."""
    log: Log
    files: Mapping[Path, bytes | None]
    """The files that are different, or gone."""
    told: tuple[Expected, ...] | None = None
    """What must be told, if bytes do not say it: of files that are missing, or not what they are called."""


class Laboratory:
    """Looks at one case after the other."""

    def __init__(self, report: Report, chance: random.Random) -> None:
        self._report = report
        self._disk = MemoryDisk()
        self._platforms = {
            boot_id: Platform(disk=self._disk, clock=VirtualClock(), boot_id=boot_id, random=chance.randbytes)
            for boot_id in (BOOT, NEXT_BOOT)
        }

    def glance(self, case: Case, layout: Layout) -> None:
        """Walk over the one segment that is damaged, with and without a tail that knows where the log ends."""
        [(path, after)] = case.files.items()
        assert after is not None
        changes = Changes(case.log.files[path], after)
        self._disk.hold({path: after}, case.log.inodes)
        for believed in (True, False) if layout.next_base is None else (True,):
            expected = self._told_of(layout, path, changes, believed=believed)
            try:
                told = [_as_expected(damage) for damage in self._walk(case.log, layout, path, believed=believed)]
            except Exception as error:  # noqa: BLE001 - no damage may end it
                self._found(case, f"walking ended with {error!r}")
                return
            if told != expected:
                self._found(case, f"walking told {told} and must tell {expected} (the tail is believed: {believed})")

    def _walk(self, log: Log, layout: Layout, path: Path, *, believed: bool) -> list[Damage]:
        """Walk over a segment as `verify` does."""
        try:
            file = SegmentFile(self._disk, path, layout.name)
        except (Blank, Broken) as error:
            return [Damage(CORRUPT, str(path), 0, 0, layout.name.base, layout.next_base, str(error))]
        if layout.next_base is not None:
            walked = walk(file, sealed_at=layout.end_position, stop_offset=layout.next_base)
        else:
            walked = walk(file, proven_to=layout.end_position if believed else None)
        return sorted(walked.damages, key=lambda damage: (damage.start, damage.byte))

    def examine(self, case: Case) -> None:
        """Verify a damaged partition, read it, and recover it as after a boot."""
        hit = self._verify(case, BOOT)
        self._check_reading(case, hit, case.log.tail, "read")
        if case.told is not None or case.log.path(case.log.layouts[-1]) in case.files:
            if case.told is None:
                self._verify(case, NEXT_BOOT)
            self._recover(case, hit)

    def _hold(self, case: Case, boot_id: bytes) -> PartitionFiles:
        log = case.log
        files = {path: data for path, data in {**log.files, **case.files}.items() if data is not None}
        self._disk.hold(files, log.inodes)
        return PartitionFiles(
            self._platforms[boot_id],
            log.directory,
            quarantine=log.directory.parent.parent / "quarantine",
            topic=log.topic,
            number=log.number,
            slot=log.slot,
        )

    # --- verifying ------------------------------------------------------------------------------

    def hit_by(self, case: Case) -> set[int]:
        """Return the offsets that cannot be read, or not before a repair."""
        return offsets_of(self._expected(case, believed=True), case.log.end)

    def _verify(self, case: Case, boot_id: bytes) -> set[int]:
        """Compare what verifying tells with what it must tell; returns the offsets that were hit."""
        files, believed = self._hold(case, boot_id), boot_id == BOOT
        expected = self._expected(case, believed=believed)
        try:
            damages = verify_partition(files, case.log.tail).damages
        except Exception as error:  # noqa: BLE001 - no damage may end it
            self._found(case, f"verifying ended with {error!r}")
            return offsets_of(expected, case.log.end)
        told = [_as_expected(damage) for damage in damages]
        hit = offsets_of(expected, case.log.end)
        if sorted(told, key=str) != sorted(expected, key=str) and not (
            self._is_entangled(case) and hit <= offsets_of(told, case.log.end)
        ):
            self._found(
                case, f"verifying told {told} and must tell {list(expected)} (the tail is believed: {believed})"
            )
        return hit

    def _expected(self, case: Case, *, believed: bool) -> tuple[Expected, ...]:
        if case.told is not None:
            return case.told
        found: list[Expected] = []
        for layout in case.log.layouts:
            path = case.log.path(layout)
            after = case.files.get(path)
            if after is None:
                continue
            changes = Changes(case.log.files[path], after)
            found += self._told_of(layout, path, changes, believed=believed)
            end = None if believed or layout.next_base is not None else seeming_end(layout, changes)
            if end is not None and end < case.log.end:
                found.append(Expected(MISSING, str(case.log.directory), 0, end, case.log.end))
        return tuple(found)

    def _told_of(self, layout: Layout, path: Path, changes: Changes, *, believed: bool) -> list[Expected]:
        damages = damages_of(layout, str(path), changes, believed=believed)
        if not damages and (reason := why_unseen(layout, changes)):
            self._report.count(reason)
        return damages

    def _is_entangled(self, case: Case) -> bool:
        """Say whether several files are damaged: what one of them would tell of another may be lost with it."""
        return len(case.files) > 1

    # --- reading --------------------------------------------------------------------------------

    def _check_reading(self, case: Case, hit: set[int], tail: Tail | None, after: str) -> None:
        assert tail is not None
        log = case.log
        reader = PartitionReader(self._disk, log.directory, log.topic, log.number)
        reader.refresh(tail)
        end = max(tail.end, tail.durable_end)
        if end != log.end:
            self._found(case, f"{after}: the log ends at {end}, so that offsets up to {log.end} would be given again")
        wrong = read_around(lambda start: reader.read(start, end, PLENTY, None), log, hit, end)
        if wrong is not None:
            self._found(case, f"{after}: {wrong}")

    # --- recovering -----------------------------------------------------------------------------

    def _recover(self, case: Case, hit: set[int]) -> None:
        """Recover the partition as after a boot, with the tail of before as a witness, and read it."""
        files = self._hold(case, NEXT_BOOT)
        try:
            recovered = recover(files, case.log.tail, 0)
        except Exception as error:  # noqa: BLE001 - no damage may end it
            self._found(case, f"recovering ended with {error!r}")
            return
        if (recovered.tail.state == State.DAMAGED) != bool(recovered.damages):
            self._found(case, f"the tail says {recovered.tail.state!r}, and damaged are {recovered.damages}")
        self._check_reading(case, hit, recovered.tail, "recovered and read")

    def _found(self, case: Case, what: str) -> None:
        self._report.found(f"{case.what}: {what}", case.where)


def _as_expected(damage: Damage) -> Expected:
    return Expected(damage.kind, damage.file, damage.byte, damage.start, damage.stop)


def read_around(
    read: Callable[[int], list[Batch | Gap]], log: Log, hit: set[int], end: int, *, lost: set[int] | None = None
) -> str | None:
    """Read all that can be read, and return what is wrong with it.

    Offsets that were hit must be told of as damaged, be a gap, or be beyond the end of a log that is shorter now;
    `lost` ones must be a gap, and all others be there.
    """
    seen: dict[int, str] = {}
    start = log.first
    while start < end:
        try:
            for item in read(start):
                found = [GAP] * len(item.range)
                if isinstance(item, Batch):
                    data = item.columns.column("data").to_pylist()
                    found = [EVENT if log.payloads.get(at) == each else "" for at, each in enumerate(data, item.start)]
                seen.update(enumerate(found, item.range.start))
                start = item.range.stop
        except Corruption as error:
            stop = end if error.stop is None else error.stop
            if error.start != start or stop <= start:
                return f"asked for offset {start}, it told of {error}"
            seen.update(dict.fromkeys(range(start, stop), DAMAGED))
            start = stop
        except Exception as error:  # noqa: BLE001 - no damage may end it
            return f"asked for offset {start}, it ended with {error!r}"
    allowed = {offset: {GAP, DAMAGED} for offset in hit} | {offset: {GAP} for offset in lost or ()}
    wrong = [
        f"offset {offset}: {seen.get(offset, 'nothing') or 'another event'}"
        for offset in range(log.first, log.end)
        if seen.get(offset) not in allowed.get(offset, {EVENT}) and not (offset in hit and offset >= end)
    ]
    if wrong or end > log.end:
        return f"the log ends at {end}, and {', '.join(wrong[:8])}; hit were {sorted(hit)}"
    return None
