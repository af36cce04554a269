"""`penstock seek`: moving a subscription, whoever consumes it; it first shows what would be skipped or come again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import places
from penstock.cli.output import Json, Yes, print_json, print_table
from penstock.cli.session import Session, find_topic
from penstock.cli.subscriptions import Name, TopicName, find_subscription, still_there
from penstock.errors import StateMissing, SubscriptionMismatch, UsageError

if TYPE_CHECKING:
    from penstock.ports import Store
    from penstock.rows import Cursor, TopicInfo


def seek(
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    to: Annotated[str, typer.Option(metavar=places.METAVAR, help=f"Where to: {places.HELP}")],
    partition: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only this one.")] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Move a subscription; without --yes show from where to where.

    What it passes over counts as skipped, retries that wait there, too; what it goes back to is delivered again.
    """
    from penstock.clock import SystemClock
    from penstock.runtime import subscriptions

    wanted = places.place("--to", to)
    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        if find_subscription(store, info, name).external:
            raise SubscriptionMismatch(
                f"subscription {name!r} of topic {topic!r} is driven from outside: it is moved there"
            )
        offsets = subscriptions.positions(store, info, wanted, partition)
        rows = _preview(store, info, name, offsets)
        if yes:
            now_us = SystemClock().time_us()
            # By offsets: a time or an end that was looked up once means the same for what is shown and what is done.
            with still_there(info, name):
                moved = subscriptions.seek(store, info, name, offsets, now_us=now_us)
            for row in rows:
                row["from"], row["to"] = moved[row["partition"]]
    if as_json:
        print_json({"topic": topic, "name": name, "done": yes, "partitions": rows})
    else:
        print_table(
            ("partition", "from", "to", "skipped", "delivered again"),
            [
                (
                    f"{topic}/{row['partition']}",
                    str(row["from"]),
                    str(row["to"]),
                    f"{row['skipped']:,}",
                    f"{row['delivered_again']:,}",
                )
                for row in rows
            ],
            numbers={"from", "to", "skipped", "delivered again"},
        )
    if not yes:
        raise UsageError("nothing was moved: give --yes to do it")


def _preview(store: Store, info: TopicInfo, name: str, offsets: dict[int, int]) -> list[dict[str, Any]]:
    cursors = {cursor.shard.partition: cursor for cursor in store.cursors.load(info.log_id, name)}
    rows = []
    for number, to in sorted(offsets.items()):
        if number not in cursors:
            raise StateMissing(
                f"subscription {name!r} has no cursor of {info.name}/{number}, so that it cannot be moved there"
            )
        skipped, again = _counts(store, cursors[number], to)
        rows.append(
            {
                "partition": number,
                "from": cursors[number].next_offset,
                "to": to,
                "skipped": skipped,
                "delivered_again": again,
            }
        )
    return rows


def _counts(store: Store, cursor: Cursor, to: int) -> tuple[int, int]:
    """Return how many events a move would skip, and how many would be delivered although they are settled."""
    from penstock.offsets import Bitmap, Range
    from penstock.rows import ParkedFilter

    at, shard = cursor.next_offset, cursor.shard
    settled = Bitmap.from_bytes(at, cursor.settled)
    waiting = [
        row.offset
        for row in store.parked.waiting(
            ParkedFilter(
                log_id=shard.log_id,
                subscription=shard.subscription,
                slots=frozenset({shard.slot}),
                partition=shard.partition,
            )
        )
    ]
    behind = sum(offset < to for offset in waiting)
    between = Range(at, max(at, to))
    unsettled = len(settled.unset_in(between))
    # Settled is what lies before the cursor or is marked ahead of it; of what waits, the cursor says so, too.
    again = max(at - to, 0) + settled.count - (len(between) - unsettled) - (len(waiting) - behind)
    return unsettled + behind, max(again, 0)
