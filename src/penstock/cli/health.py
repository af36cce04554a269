"""`penstock health`: whether events make progress where there are any, and why not. No consumer is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.arguments import duration
from penstock.cli.output import Json, print_json, print_table, shown_age, shown_size, shown_text, shown_time
from penstock.cli.session import Session, find_topic

if TYPE_CHECKING:
    from penstock.bus.health import Health, SubscriptionHealth

INTEGRITY = 3


def health(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only the subscriptions of this topic.")] = None,
    *,
    stalled_after: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="SECONDS", help="How long there may be no progress; a setting."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell how everything does; exits with 1 if something is stalled.

    Stalled is what waits and makes no progress for so long, and what has halted. Everything else that is worth a look
    is only told.
    """
    from msgspec import to_builtins

    from penstock.bus.examination import examine
    from penstock.clock import SystemClock

    with context.ensure_object(Session).open_store() as (store, settings):
        found = examine(
            store,
            None if topic is None else find_topic(store, topic),
            now_us=SystemClock().time_us(),
            stalled_after=settings.delivery.stalled_seconds if stalled_after is None else stalled_after,
        )
    if as_json:
        print_json(to_builtins(found))
    else:
        _print(found)
    if found.store.damage:
        raise typer.Exit(INTEGRITY)
    if found.state == "stalled":
        raise typer.Exit(1)


def _print(found: Health) -> None:
    print(found.state)
    print()
    print_table(
        ("topic", "subscription", "state", "mode", "lag", "oldest", "consumers", "blocked", "dead", "last progress"),
        [_row(each) for each in found.subscriptions],
        numbers={"lag", "oldest", "consumers", "blocked", "dead"},
    )
    store = found.store
    print()
    print_table(
        ("store", "state", "free", "opened by", "scheduled"),
        [
            (
                shown_text(store.url),
                store.state,
                "-" if store.free_bytes is None else shown_size(store.free_bytes),
                ", ".join(shown_text(f"{each.program} ({each.process})") for each in store.members) or "nobody else",
                f"{store.scheduled:,}",
            )
        ],
        numbers={"free", "scheduled"},
    )
    # What is damaged is told by the subscription that met it, and by the store.
    said = dict.fromkeys(
        [f"{each.topic} {each.name}: {reason}" for each in found.subscriptions for reason in each.reasons]
        + [line for each in found.subscriptions for line in _lane_lines(each)]
        + [f"store: {reason}" for reason in store.reasons]
    )
    if said:
        print()
    for line in said:
        print(shown_text(line))


def _row(each: SubscriptionHealth) -> tuple[str, ...]:
    return (
        each.topic,
        each.name,
        each.state,
        each.mode,
        f"{each.lag:,}",
        shown_age(each.oldest_seconds),
        str(len(each.consumers)),
        f"{each.blocked_lanes:,}",
        f"{each.dead:,}",
        "-" if each.last_progress_at is None else shown_time(each.last_progress_at),
    )


def _lane_lines(each: SubscriptionHealth) -> list[str]:
    lines = []
    for lane in each.lanes:
        key = "an event without order" if lane.key_hash is None else f"key {lane.key_hash}"
        due = "its turn" if lane.due_at is None else shown_time(lane.due_at)
        why = "an upgrade" if lane.upgrade else lane.error or "no reason given"
        lines.append(
            f"{each.topic} {each.name}: {key} waits at {each.topic}/{lane.partition}@{lane.offset} for {due}, with "
            f"{lane.events:,} in all; failed {lane.attempts} times: {why}"
        )
    return lines
