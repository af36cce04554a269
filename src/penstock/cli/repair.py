"""`penstock repair`: damage in a `file:` store is replaced by declared gaps; first it shows what would be done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import Json, Yes, print_json, print_table, say, shown_text
from penstock.cli.session import Session
from penstock.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from penstock.stores.file.repair import Action


def repair(
    context: typer.Context,
    yes: Yes = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show it, which is the default.")] = False,
    as_json: Json = False,
) -> None:
    """Repair a damaged store; without --yes show what would be done.

    What is replaced is kept in the store's directory quarantine. Exits with 3 if something is still to be repaired.
    """
    if yes and dry_run:
        raise UsageError("--yes does it and --dry-run only shows it: give one of them")
    from penstock.stores.file import repair as tool
    from penstock.stores.file.platform import Platform

    root, settings = context.ensure_object(Session).directory()
    platform = Platform()
    actions = tool.plan(root, platform)
    done = tool.apply(root, platform, actions, settings=settings.file) if yes else []
    if as_json:
        print_json({"actions": [_document(action) for action in actions], "done": done})
    elif not actions:
        say("nothing is to be repaired")
    elif yes:
        for line in done:
            print(shown_text(line))
    else:
        print_table(
            ("what", "partition", "offsets", "loses events"),
            [_row(action) for action in actions],
        )
    if actions and not yes:
        raise IntegrityError("nothing was changed: give --yes to repair this")


def _document(action: Action) -> dict[str, Any]:
    from msgspec import structs

    return structs.asdict(action)


def _row(action: Action) -> tuple[str, ...]:
    where = "-" if action.partition is None else f"{action.topic}/{action.partition}"
    offsets = "-"
    if action.start is not None:
        offsets = f"{action.start} to {'the end' if action.stop is None else action.stop}"
    return shown_text(action.what), where, offsets, "yes" if action.loses else "no"
