"""`penstock config`: which settings are in force, and why."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import typer

from penstock.cli.output import Json, print_json, print_table
from penstock.cli.session import Session
from penstock.settings import SETTINGS, Resolved

app = typer.Typer(help="Look at the settings.", no_args_is_help=True)


@app.command()
def show(
    context: typer.Context,
    with_origin: Annotated[bool, typer.Option("--origin", help="Say where each value came from.")] = False,
    as_json: Json = False,
) -> None:
    """Print every setting and its value; secrets are replaced by ***."""
    resolved = context.ensure_object(Session).resolve()
    if as_json:
        print_json(_document(resolved, with_origin=with_origin))
    elif with_origin:
        rows = [(row.name, row.value, row.origin.where) for row in resolved.rows()]
        print_table(("setting", "value", "origin"), rows)
    else:
        print_table(("setting", "value"), [(row.name, row.value) for row in resolved.rows()])


def _document(resolved: Resolved, *, with_origin: bool) -> dict[str, dict[str, Any]]:
    document: dict[str, dict[str, Any]] = {}
    for row in resolved.rows():
        # A program wants 1048576, not "1 MiB"; only a secret is taken as it is shown to people.
        plain = attrgetter(row.name)(resolved.settings)
        document[row.name] = {"value": row.value if SETTINGS[row.name].redact else plain}
        if with_origin:
            document[row.name]["origin"] = {"kind": row.origin.kind, "where": row.origin.where}
    return document
