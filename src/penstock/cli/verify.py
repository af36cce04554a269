"""`penstock verify`: every byte of a `file:` store looked at, also while it is in use; nothing is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import Json, print_json, print_table, progress, say, shown_size, shown_text
from penstock.cli.session import Session, check_store
from penstock.errors import IntegrityError, UsageError, did_you_mean

if TYPE_CHECKING:
    from penstock.stores.file.scan import Damage
    from penstock.stores.file.verify import Report


def verify(
    context: typer.Context,
    topics: Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]…", help="Only these topics.")] = None,
    as_json: Json = False,
) -> None:
    """Look for damage in a store; exits with 3 if there is any."""
    from penstock.stores.file.platform import Platform
    from penstock.stores.file.verify import verify as verify_store

    root, _ = context.ensure_object(Session).directory()
    check_store(root)
    with progress("verifying") as update:
        report = verify_store(root, Platform(), topics or None, update)
    known = [topic.name for topic in report.topics]
    for name in topics or ():
        if name not in known:
            raise UsageError(f"there is no topic {name!r}{did_you_mean(name, known)}; `penstock topics` lists them")
    if as_json:
        print_json(_document(report))
    else:
        _print(report)
    if not report.ok:
        found = len(report.damages) + len(report.state)
        raise IntegrityError(
            f"{found:,} {'problem' if found == 1 else 'problems'} found; `penstock repair` says what helps"
        )


def line_of(damage: Damage) -> str:
    """Return one damage as a line."""
    until = "the end" if damage.stop is None else damage.stop
    where = f"{damage.file} at byte {damage.byte}, offsets {damage.start} to {until}"
    return shown_text(f"{damage.kind}: {where}: {damage.detail}")


def _print(report: Report) -> None:
    print_table(
        ("partition", "first", "end", "segments", "blocks", "events", "gaps", "size", "damages"),
        [
            (
                f"{topic.name}/{partition.number}",
                str(partition.first),
                str(partition.end),
                f"{partition.segments:,}",
                f"{partition.blocks:,}",
                f"{partition.events:,}",
                f"{partition.gaps:,}",
                shown_size(partition.bytes),
                str(len(partition.damages)),
            )
            for topic in report.topics
            for partition in topic.partitions
        ],
        numbers={"first", "end", "segments", "blocks", "events", "gaps", "size", "damages"},
    )
    for damage in report.damages:
        print(line_of(damage))
    for problem in report.state:
        print(shown_text(f"state: {problem}"))
    for file in report.leftovers:
        say(f"left over, and harmless: {file}")


def _document(report: Report) -> dict[str, Any]:
    from msgspec import structs

    return {
        "store": report.store,
        "ok": report.ok,
        "topics": [
            {
                "name": topic.name,
                "log_id": topic.log_id,
                "partitions": [
                    {
                        **structs.asdict(partition),
                        "damages": [damage._asdict() for damage in partition.damages],
                    }
                    for partition in topic.partitions
                ],
            }
            for topic in report.topics
        ],
        "state": report.state,
        "leftovers": report.leftovers,
    }
