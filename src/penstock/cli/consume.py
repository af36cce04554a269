"""`penstock consume`: the events of a subscription, printed as `penstock read` does, and settled once printed."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli import places
from penstock.cli.arguments import duration
from penstock.cli.output import JsonLines
from penstock.cli.session import Session, find_topic
from penstock.cli.subscriptions import Mode, Name, TopicName, still_there
from penstock.errors import UsageError


def consume(
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    mode: Mode | None = None,
    start: Annotated[
        str, typer.Option(metavar=places.METAVAR, help=f"Where a new one begins: {places.HELP}")
    ] = "earliest",
    events_max: Annotated[int | None, typer.Option("--max", min=1, metavar="N", help="End after so many.")] = None,
    batch: Annotated[bool, typer.Option("--batch", help="Print and settle many at a time: faster.")] = False,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Whether what is printed is done, or given back.")] = True,
    wait: Annotated[
        float | None, typer.Option(parser=duration, metavar="SECONDS", help="End after so long without any event.")
    ] = None,
    consumer_id: Annotated[
        str | None, typer.Option("--id", metavar="TEXT", help="Who this is; the same one again takes over.")
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Consume a subscription: print each event, then settle it.

    The subscription is created if there is none. It goes on until Ctrl-C: what was printed by then is settled, the rest
    is given back.
    """
    from penstock.cli.consuming import Wanted, consumed

    if wait == 0:
        raise UsageError("--wait is how long to wait for an event, and 0 would be no time for any")
    wanted = Wanted(mode, places.place("--start", start), events_max, batch, ack, wait, as_json, consumer_id)
    with context.ensure_object(Session).open_store() as (store, settings):
        info = find_topic(store, topic)
        with still_there(info, name):
            code = consumed(store, settings, info, name, wanted)
    if code:
        raise typer.Exit(code)
