"""`penstock pipeline audit`: what became of every event, as tables, as JSON and as a page."""

from __future__ import annotations

import os
import uuid
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.arguments import moment
from penstock.cli.output import Json, print_json, print_json_line, print_table, say, shown_text
from penstock.cli.pipelines.running import DEFAULT_MASTER, Continuous, Master, running, tasks_shown
from penstock.cli.session import Session
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.audit.results import Audit, SubscriptionAudit

FOUND_LOST = 3
SHOWN = 20
"""So many lost ranges, and so many broken chains, are shown on the terminal; JSON and the page have more."""

ALWAYS_SHOWN = ("events", "proven", "pending", "lost")
COUNTED = ("events", "proven", "dead", "expired", "parked", "pending", "unproven", "lost", "duplicates")

Topics = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]...", help="Only these; all, if none is named.")]
Subscription = Annotated[str | None, typer.Option(metavar="NAME", help="Only subscriptions of this name.")]
Since = Annotated[
    datetime | None, typer.Option(parser=moment, metavar="TIME", help="Only events that were appended then or later.")
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write a page to this file.")]


def audit(
    context: typer.Context,
    topics: Topics = None,
    *,
    subscription: Subscription = None,
    since: Since = None,
    html: Html = None,
    master: Master = DEFAULT_MASTER,
    continuous: Continuous = False,
    as_json: Json = False,
) -> None:
    """Prove what became of every event; exit 3 if any is lost.

    The settlement records of each subscription are compared with its cursor. What is proven, a record says the end of.
    What is unproven, the cursor has passed, and a record is missing that may have said how. What is lost, the cursor
    has passed, and no record says how though none is missing. It changes nothing, and consumers may run meanwhile.
    """
    from penstock.spark.pipelines.audit import audit as run
    from penstock.spark.pipelines.rounds import rounds

    session = context.ensure_object(Session)
    names = topics or []
    _check(session, names, subscription, html)
    lost, before = False, None
    with running(session, master, "audit") as world:

        def look() -> Audit:
            with tasks_shown(world.spark, "tasks"):
                return run(
                    world.spark,
                    world.settings.url,
                    names,
                    subscription=subscription,
                    since=since,
                    settings=world.settings,
                )

        for found in rounds(look, continuous=continuous, ending=world.ending):
            lost = lost or bool(found.lost)
            if html is not None:
                _write(html, found.html())
            if continuous and before is not None and _same(found, before):
                continue
            before = found
            _print(found, as_json=as_json, line=continuous)
    if html is not None:
        say(f"{html} is written")
    if lost:
        raise typer.Exit(FOUND_LOST)


def _check(session: Session, topics: Sequence[str], subscription: str | None, html: Path | None) -> None:
    """Find what is wrong with the arguments before Spark starts."""
    from penstock.audit.facts import no_subscription, topics_of

    with session.open_store() as (store, _):
        known = topics_of(store, topics)
        if subscription is not None and not any(
            store.cursors.subscription(topic.log_id, subscription) for topic in known
        ):
            raise no_subscription(subscription)
    if html is not None and not html.absolute().parent.is_dir():
        raise UsageError(f"{html} cannot be written: there is no directory {html.absolute().parent}")


def _write(path: Path, page: str) -> None:
    """Write a page, whole or not at all: somebody may be looking at it."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(page, encoding="utf-8")
        os.replace(draft, path)  # noqa: PTH105 - the same as Path.replace, and says that it replaces
    finally:
        draft.unlink(missing_ok=True)


def _same(one: Audit, other: Audit) -> bool:
    return one.counts == other.counts and one.records == other.records


# --- on the terminal ------------------------------------------------------------------------------


def _print(found: Audit, *, as_json: bool, line: bool) -> None:
    import msgspec

    if as_json and line:
        print_json_line(msgspec.json.encode(found))
    elif as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _print_tables(found)


def _print_tables(found: Audit) -> None:
    # What there is none of anywhere needs no column: a window is not wide.
    counted = [name for name in COUNTED if name in ALWAYS_SHOWN or getattr(found.counts, name)]
    print_table(
        ("topic", "subscription", "verdict", *counted),
        [
            (each.topic, each.subscription, each.verdict, *(f"{getattr(each.counts, name):,}" for name in counted))
            for each in found.subscriptions
        ],
        numbers=set(counted),
    )
    timed = [each for each in found.subscriptions if each.latency.events]
    if timed:
        print()
        bounds = ("p50", "p95", "p99", "max")
        retried = ["retried"] if found.counts.retried else []
        print_table(
            ("topic", "subscription", "acked", *retried, *bounds),
            [
                (
                    each.topic,
                    each.subscription,
                    f"{each.latency.events:,}",
                    *(f"{each.counts.retried:,}" for _ in retried),
                    *(shown_bound(getattr(each.latency, f"{name}_us")) for name in bounds),
                )
                for each in timed
            ],
            numbers={"acked", "retried", *bounds},
        )
    lost = list(_lost(found.subscriptions))
    if lost:
        print()
        print_table(("lost", "subscription", "to see the first"), lost[:SHOWN])
    for text in _breaks(found.subscriptions)[:SHOWN]:
        print(shown_text(text))
    print(f"\n{found.sentence}")
    if found.unreadable:
        say(f"{found.unreadable:,} records of the ledger could not be read, and count as missing")


def _lost(subscriptions: Sequence[SubscriptionAudit]) -> Iterator[tuple[str, str, str]]:
    for each in subscriptions:
        for partition in each.partitions:
            for start, stop in partition.lost:
                where = f"{each.topic}/{partition.partition} [{start}, {stop})"
                command = f"penstock read {each.topic} --partition {partition.partition} --from {start} --limit 1"
                yield where, each.subscription, command


def _breaks(subscriptions: Sequence[SubscriptionAudit]) -> list[str]:
    return [
        f"{each.topic}/{partition.partition}, {each.subscription}: {text}"
        for each in subscriptions
        for partition in each.partitions
        for text in partition.breaks
    ]


def shown_bound(bound_us: int | None) -> str:
    """Return a time that something took at most, in a unit that people read."""
    if bound_us is None:
        return "-"
    for unit, scale in (("d", 86_400e6), ("h", 3_600e6), ("min", 60e6), ("s", 1e6), ("ms", 1e3)):
        if bound_us >= scale:
            return f"≤ {bound_us / scale:.3g} {unit}"
    return f"≤ {bound_us} µs"
