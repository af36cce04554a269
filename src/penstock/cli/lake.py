"""`penstock lake`: what a Parquet lake holds, and whether it is what the log says."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import Json, print_json, print_table, progress, say, shown_size, shown_text, shown_time_us
from penstock.cli.session import Session
from penstock.errors import IntegrityError, UsageError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.lake.entries import Manifest
    from penstock.lake.verify import Report

app = typer.Typer(help="Look at a Parquet lake, or compare it with the log.", no_args_is_help=True)

Directory = Annotated[str, typer.Argument(metavar="DIR", help="The lake's directory.")]
Topics = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]…", help="Only these topics.")]


@app.command("show")
def show(directory: Directory, as_json: Json = False) -> None:
    """Show what a lake holds, partition by partition."""
    from penstock.lake.lake import Lake

    lake = Lake(directory)
    manifest = lake.manifest()
    partitions = _partitions(manifest)
    if as_json:
        facts = {"directory": str(lake.directory), "version": lake.version, "lake_id": manifest.lake_id}
        print_json({**facts, "partitions": partitions})
        return
    print_table(
        ("partition", "first", "end", "files", "events", "gaps", "size", "from", "to", "log"),
        [
            (
                f"{row['topic']}/{row['partition']}",
                str(row["start"]),
                str(row["end"]),
                f"{row['files']:,}",
                f"{row['events']:,}",
                f"{row['gaps']:,}",
                shown_size(row["bytes"]),
                _day(row["first_us"]),
                _day(row["last_us"]),
                row["log_id"],
            )
            for row in partitions
        ],
        numbers={"first", "end", "files", "events", "gaps", "size"},
    )


def _day(time_us: int | None) -> str:
    return "-" if time_us is None else shown_time_us(time_us)[:10]


def _partitions(manifest: Manifest) -> list[dict[str, Any]]:
    from penstock.lake.entries import LakeFile

    found = []
    for partition, entries in sorted(manifest.by_partition.items(), key=lambda each: (each[1][0].topic, each[0])):
        files = [entry for entry in entries if isinstance(entry, LakeFile)]
        found.append(
            {
                "topic": entries[0].topic,
                "log_id": partition.log_id,
                "partition": partition.number,
                "start": entries[0].start,
                "end": manifest.end(partition),
                "files": len(files),
                "events": sum(len(file.range) for file in files),
                "gaps": sum(len(entry.range) for entry in entries if not isinstance(entry, LakeFile)),
                "bytes": sum(file.size for file in files),
                "first_us": min((file.first_us for file in files), default=None),
                "last_us": max((file.last_us for file in files), default=None),
            }
        )
    return found


@app.command("verify")
def verify(
    context: typer.Context,
    directory: Directory,
    topics: Topics = None,
    alone: Annotated[bool, typer.Option("--alone", help="Do not compare with the log.")] = False,
    as_json: Json = False,
) -> None:
    """Compare a lake with the log; exits with 3 if anything is wrong.

    Every file is read. Where the log still has the same offsets the two are compared. No range may be there twice, or
    be missing in both.
    """
    from penstock.lake.lake import Lake
    from penstock.lake.verify import verify as verify_lake

    lake = Lake(directory)
    known = lake.manifest().topics()
    for name in topics or ():
        if name not in known:
            raise UsageError(f"the lake has no topic {name!r}{did_you_mean(name, known)}")
    opening = nullcontext() if alone else context.ensure_object(Session).open_store()
    with opening as opened, progress("verifying") as update:
        report = verify_lake(lake, None if opened is None else opened[0].log, topics or None, update)
    if as_json:
        print_json(_document(report))
    else:
        _print(report)
    if count := len(report.problems):
        raise IntegrityError(f"{count:,} {'problem' if count == 1 else 'problems'} found in {lake.directory}")


def _print(report: Report) -> None:
    print_table(
        ("partition", "first", "end", "files", "events", "compared", "gaps", "problems"),
        [
            (
                f"{each.topic}/{each.partition}",
                str(each.start),
                str(each.end),
                f"{each.files:,}",
                f"{each.events:,}",
                f"{each.compared:,}",
                f"{each.gaps:,}",
                str(len(each.problems)),
            )
            for each in report.partitions
        ],
        numbers={"first", "end", "files", "events", "compared", "gaps", "problems"},
    )
    for line in _lines(report):
        print(shown_text(line))
    waiting = sum(each.waiting for each in report.partitions)
    if waiting:
        say(f"{waiting:,} offsets between files are in the log, and are archived next")


def _lines(report: Report) -> Iterable[str]:
    for problem in report.problems:
        where = f"{problem.topic}/{problem.partition} offsets {problem.start} to {problem.stop - 1}"
        named = f", {problem.file}" if problem.file else ""
        yield f"{problem.kind}: {where}{named}: {problem.detail}"


def _document(report: Report) -> dict[str, Any]:
    from msgspec import to_builtins

    document: dict[str, Any] = to_builtins(report)
    return {**document, "ok": not report.problems}
