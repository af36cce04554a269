"""`penstock lag`: how far subscriptions are behind, partition by partition, once or again and again."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.cli.arguments import duration
from penstock.cli.output import print_json, print_json_line, print_table, say, shown_age, shown_time_us
from penstock.cli.session import Session, find_topic
from penstock.cli.subscriptions import all_subscriptions, each_lag, find_subscription
from penstock.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.ports import Store
    from penstock.rows import Subscription, TopicInfo

WATCH_SECONDS = 2.0
WATCH_SECONDS_MIN = 0.05
HOME = "\x1b[H\x1b[J"
"""Brings the cursor to the window's first line, and removes everything from there on."""


class Watching(TyperCommand):
    """A command of which `--watch` has a value if it is followed by a duration, and else its usual one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with a value for every `--watch`."""
        return super().parse_args(ctx, list(_with_values(args)))


def _with_values(args: list[str]) -> Iterator[str]:
    for position, word in enumerate(args):
        if word == "--watch" and not _is_duration(args[position + 1 : position + 2]):
            yield f"--watch={WATCH_SECONDS:g}"
        else:
            yield word


def _is_duration(words: Iterable[str]) -> bool:
    for word in words:
        try:
            duration(word)
        except typer.BadParameter:
            return False
        return True
    return False


def lag(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only of this topic.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Only of this subscription.")] = None,
    *,
    watch: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="[SECONDS]", help="Look again so often, until Ctrl-C; every 2 s."),
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, metavar="N", help="With --watch: look so many times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, or one for each look.")] = False,
) -> None:
    """Show how far subscriptions are behind, partition by partition."""
    if count is not None and watch is None:
        raise UsageError("--count goes with --watch")
    if watch is not None and watch < WATCH_SECONDS_MIN:
        raise UsageError(f"--watch is at least {WATCH_SECONDS_MIN:g} seconds, not {watch:g}")
    with context.ensure_object(Session).open_store() as (store, _):
        if watch is None:
            damages: list[IntegrityError] = []
            document = _look(store, topic, name, damages)
            _print(document, as_json=as_json)
            if damages:
                raise damages[0]
            return
        _watch(store, topic, name, watch, count, as_json=as_json)


def _watch(
    store: Store, topic: str | None, name: str | None, seconds: float, count: int | None, *, as_json: bool
) -> None:
    redraws = not as_json and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    never = threading.Event()
    looks = 0
    told: set[str] = set()
    while True:
        damages: list[IntegrityError] = []
        document = _look(store, topic, name, damages)
        if as_json:
            _print_line(document)
        else:
            if redraws:
                print(HOME, end="")
            elif looks:
                print()
            print(document["at"])
            _print(document, as_json=False)
        sys.stdout.flush()
        for damage in damages:
            if str(damage) not in told:
                told.add(str(damage))
                say(f"error: {damage}")
        looks += 1
        if looks == count:
            if damages:
                raise damages[0]
            return
        never.wait(seconds)  # Ctrl-C interrupts it


def _look(store: Store, topic: str | None, name: str | None, damages: list[IntegrityError]) -> dict[str, Any]:
    from penstock.clock import SystemClock

    at = shown_time_us(SystemClock().time_us())
    lags = [each for _, _, found in each_lag(store, _wanted(store, topic, name), damages.append) for each in found]
    return {"at": at, "lag": [each._asdict() for each in lags]}


def _wanted(store: Store, topic: str | None, name: str | None) -> list[tuple[TopicInfo, Subscription]]:
    if topic is None:
        return all_subscriptions(store, internal=False)
    info = find_topic(store, topic)
    if name is not None:
        return [(info, find_subscription(store, info, name))]
    return [(info, subscription) for subscription in store.cursors.subscriptions(info.log_id)]


def _print_line(document: dict[str, Any]) -> None:
    from msgspec import json

    print_json_line(json.encode(document))


def _print(document: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    columns = ("partition", "next_offset", "head", "lag", "unsettled", "parked", "dead")
    headers = ("partition", "cursor", "head", "lag", "unsettled", "parked", "dead")
    print_table(
        ("topic", "subscription", *headers, "oldest", "kept"),
        [
            (
                each["topic"],
                each["subscription"],
                *(str(each[column]) for column in columns),
                shown_age(each["oldest_seconds"]),
                "elsewhere" if each["external"] else "here",
            )
            for each in document["lag"]
        ],
        numbers={*headers, "oldest"},
    )
