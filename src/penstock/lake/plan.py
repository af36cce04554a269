"""Plans: what is to be archived now, in which pieces, and which files are worth merging. Pure functions.

What was not archived yet is what the log has less what the manifest names. There is nothing else to remember: a plan is
made anew each time, of ranges alone, and never of events.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from penstock.offsets import Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.lake.entries import LakeFile


class Aim(NamedTuple):
    """How large files should be, and how long to wait for that."""

    file_bytes: int = 128 << 20
    """Of events, as the log counts them: files are somewhat smaller."""
    file_bytes_min: int = 16 << 20
    """Less than this is no file worth writing, unless everything is wanted, or it has waited for long."""
    age_seconds: float = 900.0
    """For so long an event waits at most for others to share its file."""
    merged_files_min: int = 8
    """So many small neighbours are worth merging."""


class Backlog(NamedTuple):
    """What of one partition is not in the lake yet."""

    topic: str
    log_id: str
    partition: int
    missing: tuple[Range, ...]
    """In their order; only one that ends at `end` can still grow."""
    end: int
    """Of the log."""
    event_bytes: float
    """About how large an event is."""
    waiting_since_us: int
    """When the first event of the last range was appended."""


class Piece(NamedTuple):
    """Consecutive events of one partition, for one task to archive."""

    topic: str
    log_id: str
    partition: int
    start: int
    stop: int


def missing(archived: RangeSet, bounds: Range) -> tuple[Range, ...]:
    """Return what the log has and the lake has not."""
    return tuple(archived.missing(bounds))


def lost(archived: RangeSet, bounds: Range) -> tuple[Range, ...]:
    """Return what neither has, though it is behind the lake's beginning: it was trimmed before it was archived."""
    beginning = next(iter(archived), None)
    if beginning is None or beginning.start >= bounds.start:
        return ()
    return tuple(archived.missing(Range(beginning.start, bounds.start)))


def pieces(backlogs: Iterable[Backlog], aim: Aim, *, tasks: int, everything: bool, now_us: int) -> list[Piece]:
    """Return what to archive now, the beginnings of all partitions first.

    A piece is about as large as a file should be; smaller where there is too little to keep `tasks` tasks busy, but
    never so small that its file would not be worth writing, unless that is all there is.
    """
    wanted = [
        (backlog, span)
        for backlog in backlogs
        for span in backlog.missing
        if everything or _is_worth_it(backlog, span, aim, now_us)
    ]
    total = sum(len(span) * backlog.event_bytes for backlog, span in wanted)
    size = min(max(total / max(tasks, 1), aim.file_bytes_min), aim.file_bytes)
    found: list[tuple[int, Piece]] = []
    place: dict[tuple[str, int], int] = {}
    for backlog, span in wanted:
        whose = (backlog.log_id, backlog.partition)
        for part in _divide(span, max(round(len(span) * backlog.event_bytes / size), 1)):
            turn = place[whose] = place.get(whose, -1) + 1
            found.append((turn, Piece(backlog.topic, backlog.log_id, backlog.partition, part.start, part.stop)))
    return [piece for _, piece in sorted(found)]


def _is_worth_it(backlog: Backlog, span: Range, aim: Aim, now_us: int) -> bool:
    return (
        span.stop < backlog.end  # nothing will ever be added to it
        or len(span) * backlog.event_bytes >= aim.file_bytes_min
        or now_us - backlog.waiting_since_us >= aim.age_seconds * 1e6
    )


def _divide(span: Range, parts: int) -> list[Range]:
    parts = min(parts, len(span))
    edges = [span.start + len(span) * part // parts for part in range(parts + 1)]
    return [Range(start, stop) for start, stop in pairwise(edges)]


def merges(files: Iterable[LakeFile], aim: Aim) -> list[list[LakeFile]]:
    """Return groups of small files that follow each other, of one partition and day, each to become one file.

    No file of a group has more than half of it: so an event is written again only when the file that it is in at least
    doubles, and not each time that a small one comes.
    """
    small = sorted(file for file in files if file.event_bytes < aim.file_bytes // 2)
    runs: list[list[LakeFile]] = []
    for file in small:
        last = runs[-1][-1] if runs else None
        if last is None or not _are_neighbours(last, file) or _size(runs[-1]) + file.event_bytes > aim.file_bytes:
            runs.append([])
        runs[-1].append(file)
    return [group for run in runs for group in _balanced(run, aim.merged_files_min)]


def _are_neighbours(one: LakeFile, other: LakeFile) -> bool:
    return one.place == other.place and one.stop == other.start and one.date == other.date


def _size(group: Sequence[LakeFile]) -> int:
    return sum(file.event_bytes for file in group)


def _balanced(group: list[LakeFile], least: int) -> list[list[LakeFile]]:
    if len(group) < max(least, 2):
        return []
    largest = max(range(len(group)), key=lambda index: group[index].event_bytes)
    if 2 * group[largest].event_bytes <= _size(group):
        return [group]
    return _balanced(group[:largest], least) + _balanced(group[largest + 1 :], least)
