"""`penstock schedule`: delayed publishes that wait for their time."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.output import Json, print_json, print_table, say, shown_bytes, shown_text, shown_time_us
from penstock.cli.session import Session
from penstock.errors import PenstockError

app = typer.Typer(help="Look at delayed publishes, and cancel them.", no_args_is_help=True)


@app.command("ls")
def list_scheduled(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="How many to list at most.")] = 100,
    as_json: Json = False,
) -> None:
    """List what waits, by when it is due."""
    with context.ensure_object(Session).open_store() as (store, _):
        names = {info.log_id: info.name for info in store.log.topics()}
        # One more than is shown tells whether there are more.
        rows = store.schedule.page(limit=limit + 1)
    found = [
        {
            "id": row.id,
            "due_at": shown_time_us(row.due_at),
            "topic": names.get(row.log_id),
            "partition": row.partition,
            "type": row.event.type,
            "key": None if row.event.key is None else shown_bytes(row.event.key),
            "bytes": len(row.event.data),
        }
        for row in rows[:limit]
    ]
    if as_json:
        print_json({"scheduled": found, "more": len(rows) > limit})
        return
    print_table(
        ("id", "due", "topic", "partition", "type", "key", "bytes"),
        [tuple("-" if value is None else shown_text(str(value)) for value in row.values()) for row in found],
        numbers={"partition", "bytes"},
    )
    if len(rows) > limit:
        say(f"there are more: these are the first {limit:,}, --limit shows others")


@app.command()
def cancel(
    context: typer.Context,
    id: Annotated[str, typer.Argument(metavar="ID", help="As `penstock schedule ls` shows it.")],
) -> None:
    """Cancel a delayed publish."""
    with context.ensure_object(Session).open_store() as (store, _):
        if not store.schedule.cancel(id):
            raise PenstockError(f"{id!r} does not wait: it is published, or being published, or was never scheduled")
    say(f"{id} is cancelled")
