"""Repairing a store: what is lost is declared, and nothing is invented or renumbered.

`plan` says what would be done, `apply` does it, each partition under its turn. A damaged segment is written anew with a
GAP in place of what cannot be read; a segment that is missing is replaced by one that holds a GAP. Whatever is replaced
is kept in quarantine. Cursors and parked rows that are lost stay lost: their databases are made anew from the rows that
are sound, and the subscriptions whose progress is gone must be given it, by a seek or by creating them again.

A repair can be cut off at any moment: it leaves the old files or the new ones, and can be run again.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.deduplication import ProducerTable
from penstock.errors import IntegrityError, PenstockError, StoreError
from penstock.settings import FileSettings
from penstock.stores.file.files import replace_file
from penstock.stores.file.gate import PARTITIONS_GATE, TOPICS_GATE, shared_gates
from penstock.stores.file.recovery import recover, testified_end
from penstock.stores.file.rewrite import Blocks
from penstock.stores.file.scan import CORRUPT, FOREIGN, MISSING, TORN, Damage, walk
from penstock.stores.file.segment import Predecessor, SegmentName
from penstock.stores.file.state.rebuild import examine, rebuild
from penstock.stores.file.state.schema import CONTROL, IDENTITIES, SELECT_IDENTITY
from penstock.stores.file.store import FORMAT, LOCK_FILE, MARKER_FILE, Marker, read_marker
from penstock.stores.file.tail import State, Tails
from penstock.stores.file.topics import Topics
from penstock.stores.file.verify import PartitionReport, verify_partition

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from penstock.stores.file.block import Header
    from penstock.stores.file.files import PartitionFiles
    from penstock.stores.file.gate import Gates
    from penstock.stores.file.platform import Platform
    from penstock.stores.file.tail import Tail

REASON: Final = "damaged bytes, declared lost by a repair"


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do."""

    what: str
    topic: str = ""
    partition: int | None = None
    start: int | None = None
    stop: int | None = None
    loses: bool = False
    """Whether something that was stored is given up by it."""


# --- planning -----------------------------------------------------------------------------------


def plan(root: Path, platform: Platform) -> list[Action]:
    """Return what a repair would do; empty if nothing is wrong."""
    store_id = _store_id(root, platform)
    if store_id is None:
        return [
            Action(what=f"write {MARKER_FILE} anew, with the id that control.db holds"),
            *_plan_topics(root, platform),
        ]
    actions = [
        Action(what=f"make the small state anew from its sound rows: {problem}", loses=True)
        for problem in examine(root, store_id, platform)
    ]
    return actions + _plan_topics(root, platform)


def _plan_topics(root: Path, platform: Platform) -> list[Action]:
    return [_action(files, damage) for files, report in _reports(root, platform) for damage in report.damages]


def _reports(root: Path, platform: Platform) -> list[tuple[PartitionFiles, PartitionReport]]:
    tails = Tails(root / "tails", platform.disk)
    topics = Topics(platform, root, tails)
    every = [
        topics.files(entry.topic.log_id, number)
        for entry in topics.entries()
        for number in range(entry.topic.settings.partitions)
    ]
    return [(files, verify_partition(files, tails.read(files.slot))) for files in every]


def _action(files: PartitionFiles, damage: Damage) -> Action:
    what = {
        TORN: f"cut off what was never finished, at byte {damage.byte} of {damage.file}",
        CORRUPT: f"write {damage.file} anew without what is damaged at byte {damage.byte} ({damage.detail})",
        MISSING: f"declare lost what was in {damage.file}, which is missing",
        FOREIGN: f"move {damage.file} to quarantine ({damage.detail})",
    }[damage.kind]
    return Action(
        what=what,
        topic=files.topic.name,
        partition=files.number,
        start=damage.start,
        stop=damage.stop,
        loses=damage.kind != TORN and damage.start != damage.stop,
    )


def _store_id(root: Path, platform: Platform) -> str | None:
    """Return which store this is; None if the marker is lost or damaged."""
    try:
        return read_marker(root, platform).store_id
    except (FileNotFoundError, IntegrityError):
        return None


# --- doing --------------------------------------------------------------------------------------


def apply(
    root: Path, platform: Platform, actions: Sequence[Action], *, settings: FileSettings | None = None
) -> list[str]:
    """Do what was planned; returns what was done, in words."""
    if not actions:
        return []
    stall_seconds = (settings or FileSettings()).stall_seconds
    gates = shared_gates(root / LOCK_FILE, platform)
    done: list[str] = []
    with gates.gate(TOPICS_GATE).turn("the store", stall_seconds):
        store_id = _store_id(root, platform)
        if store_id is None:
            store_id = _write_marker(root, platform)
            done.append(f"{MARKER_FILE} was written anew")
        if examine(root, store_id, platform):
            _check_alone(root, platform, gates)
        rebuilt = rebuild(root, store_id, platform)
        done += [
            f"{table}: {salvage.kept:,} rows kept, {'an unknown number' if salvage.lost is None else salvage.lost} lost"
            for table, salvage in rebuilt.tables.items()
        ]
        done += [f"kept {path}" for path in rebuilt.quarantined]
    wanted = {(action.topic, action.partition) for action in actions if action.partition is not None}
    tails = Tails(root / "tails", platform.disk)
    topics = Topics(platform, root, tails)
    for entry in topics.entries():
        for number in range(entry.topic.settings.partitions):
            if (entry.topic.name, number) in wanted:
                files = topics.files(entry.topic.log_id, number)
                with gates.gate(PARTITIONS_GATE + files.slot).turn(str(files), stall_seconds):
                    done += repair_partition(files, tails)
    return done


def _check_alone(root: Path, platform: Platform, gates: Gates) -> None:
    """Refuse to replace databases that somebody has open."""
    members = [name.removesuffix(".json") for name in platform.disk.names(root / "members")]
    alive = [member for member in members if member.isdigit() and gates.is_alive(int(member))]
    if alive:
        raise StoreError(
            f"{root} is in use by {len(alive)} others (members/{alive[0]}.json says by whom): close it there, as the "
            f"small state must be made anew. Nothing was changed"
        )


def _write_marker(root: Path, platform: Platform) -> str:
    try:
        with closing(platform.connect(root / CONTROL)) as connection:
            [row] = connection.execute(SELECT_IDENTITY).fetchall()
        store_id: str = IDENTITIES[CONTROL].checked(row)[1]
    except (sqlite3.Error, ValueError, PenstockError) as error:
        raise IntegrityError(
            f"{root}: neither {MARKER_FILE} nor control.db says which store this is ({error}): restore one of them"
        ) from None
    replace_file(platform, root / MARKER_FILE, msgspec.json.encode(Marker(format=FORMAT, store_id=store_id)))
    return store_id


def repair_partition(files: PartitionFiles, tails: Tails) -> list[str]:
    """Repair one partition, whose turn the caller holds."""
    tail = tails.read(files.slot)
    if tail is not None and tail.log_id != files.log_id:
        tail = None
    report = verify_partition(files, tail)
    if not report.damages:
        return []
    return _Repair(files, tails, tail, report).run()


class _Hole(NamedTuple):
    """Offsets that no segment holds."""

    start: int
    stop: int
    number: int
    """Of the block that takes their place."""
    latest_time: int
    """Of what is before them; what segments say of it never goes back, or a time would not be found."""


class _Repair:
    """The repair of one partition."""

    def __init__(self, files: PartitionFiles, tails: Tails, tail: Tail | None, report: PartitionReport) -> None:
        self._files = files
        self._tails = tails
        self._tail = tail
        self._report = report
        self._done: list[str] = []
        self._epoch = 1 + max([tail.epoch if tail else 0, *(name.epoch for name in files.names())])
        # Of a segment that cannot be read, perhaps nobody but the tail knows where it ended.
        stops = [damage.stop or 0 for damage in report.damages]
        self._goal = max([report.end, 0 if tail is None else testified_end(tail), *stops])

    def run(self) -> list[str]:
        if self._report.first:
            # If what says so is damaged, the first segment does, which may be put away.
            self._files.write_first(self._report.first)
        self._put_away()
        names = self._files.names()
        for index, name in enumerate(names):
            stop = names[index + 1].base if index + 1 < len(names) else None
            if any(self._is_in(damage, name) and damage.kind == CORRUPT for damage in self._report.damages):
                self._rewrite(name, stop)
        self._fill_holes()
        # The tail is found anew from what is there now; a torn end is cut off on the way.
        recovered = recover(self._files, self._tail, self._goal)
        if recovered.damages:
            raise recovered.damages[0].error()
        # Of no boot, so that whoever comes next recovers the log once more, and asks the cursors how far it went.
        tail = recovered.tail._replace(boot_id=bytes(16), state=State.OPEN)
        self._tails.write(self._files.slot, tail._replace(epoch=max(tail.epoch, self._epoch)))
        self._done += [
            f"{self._files}: {damage.kind} at byte {damage.byte} of {damage.file}: " + _outcome(damage)
            for damage in self._report.damages
        ]
        return self._done

    def _is_in(self, damage: Damage, name: SegmentName) -> bool:
        return damage.file == str(self._files.directory / str(name))

    def _put_away(self) -> None:
        """Move files to quarantine that are not ours, or whose first block cannot be read."""
        for damage in self._report.damages:
            path = next(
                (self._files.directory / str(name) for name in self._files.names() if self._is_in(damage, name)), None
            )
            unreadable = damage.kind == CORRUPT and damage.byte == 0
            if path is not None and (damage.kind == FOREIGN or unreadable):
                kept = self._files.quarantine_file(path)
                self._done.append(f"{self._files}: {path.name} is kept as {kept}")

    # --- segments -------------------------------------------------------------------------------

    def _rewrite(self, name: SegmentName, stop: int | None) -> None:
        """Write a segment anew, with a gap for everything in it that cannot be read."""
        old = self._files.open(name)
        now = self._files.platform.clock.time_us()
        blocks = Blocks(offset=name.base, number=old.first.number + 1, epoch=self._epoch)

        def take(header: Header, content: pa.Buffer) -> None:
            blocks.declare_lost(header.offset, REASON, now)
            blocks.add(header, content)

        walked = walk(old, stop_offset=stop, visit=take)
        end = stop
        if end is None:
            end = max(
                walked.end, *(damage.stop or 0 for damage in self._report.damages if self._is_in(damage, name)), 0
            )
        blocks.declare_lost(end, REASON, now)
        self._files.create_segment(
            SegmentName(name.base, self._epoch),
            number=old.first.number,
            max_time=old.facts.max_time,
            producers=old.producers(),
            predecessor=old.facts.predecessor,
            blocks=blocks.encode,
        )
        kept = self._files.quarantine_file(old.path)
        self._done.append(f"{self._files}: {name} was written anew; the damaged file is kept as {kept}")

    def _fill_holes(self) -> None:
        """Put a segment with a gap wherever one is missing."""
        end, producers, number, before, latest = self._report.first, ProducerTable(), 0, None, 0
        for name in self._files.names():
            file = self._files.open(name)
            if name.base > end:
                hole = _Hole(end, name.base, file.first.number - 2, latest)
                self._declare(hole, file.producers(), file.facts.predecessor)
            walked = walk(file)
            end, number, latest = walked.end, walked.number, walked.max_time
            before = Predecessor(name.base, name.epoch, walked.position, walked.end, walked.number)
            producers = file.producers()
        if end < self._goal:
            self._declare(_Hole(end, self._goal, number, latest), producers, before)

    def _declare(self, hole: _Hole, producers: ProducerTable, before: Predecessor | None) -> None:
        number = max(hole.number, 0)
        blocks = Blocks(offset=hole.start, number=number + 1, epoch=self._epoch)
        blocks.declare_lost(hole.stop, REASON, self._files.platform.clock.time_us())
        self._files.create_segment(
            SegmentName(hole.start, self._epoch),
            number=number,
            max_time=hole.latest_time,
            producers=producers,
            predecessor=before if before is not None and before.end_offset <= hole.start else None,
            blocks=blocks.encode,
        )


def _outcome(damage: Damage) -> str:
    if damage.kind == TORN:
        return "it was cut off"
    if damage.start == damage.stop:
        return "no event was lost"
    return f"offsets {damage.start} to {damage.stop} are declared lost"
