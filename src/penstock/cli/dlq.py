"""`penstock dlq`: dead letters, listed, shown, grouped by cause, brought back and removed.

Nothing here needs a consumer to run. What a filter matches is meant as a whole, however much is shown of it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Unpack, cast

import typer

from penstock.cli import arguments
from penstock.cli.arguments import Spot, moment, spot
from penstock.cli.letters import cloud_event, document_of, group_document, print_groups, print_letter, print_letters
from penstock.cli.output import Json, Yes, print_json, print_table, say, shown_text, shown_time
from penstock.cli.session import Session, find_topic
from penstock.cli.subscriptions import Name, TopicName, find_subscription, still_there
from penstock.errors import PenstockError, UsageError

if TYPE_CHECKING:
    from penstock.bus.dead_letters import DeadLetters
    from penstock.bus.letters import DeadLetter, DeadStats, Where
    from penstock.ports import Store
    from penstock.rows import ParkedState
    from penstock.settings import Settings

R = TypeVar("R")

app = typer.Typer(help="Look at dead letters; replay or remove them.", no_args_is_help=True)

JOB = re.compile(r"(replay-[0-9]{8}T[0-9]{6}|redrive-[0-9]{8}T[0-9]{6}-[0-9]+)-[0-9a-f]{8}")
"""The names of jobs, as a replay makes them and as `penstock pipeline redrive` does."""
SAMPLES = 5
ERRORS_SHOWN = 3

Error = Annotated[str | None, typer.Option(metavar="TYPE", help="Of this type of error: KeyError.")]
Fingerprint = Annotated[str | None, typer.Option(metavar="HEX", help="Of this cause, as `groups` shows it.")]
Contains = Annotated[str | None, typer.Option(metavar="TEXT", help="Whose error message contains this.")]
InPartition = Annotated[int | None, typer.Option(min=0, metavar="N", help="Of this one only.")]
Offset = Annotated[
    list[int] | None, typer.Option(parser=arguments.offset, metavar="N", help="At this one; may be repeated.")
]
Key = Annotated[str | None, typer.Option(metavar="TEXT", help="Of events with this key.")]
Since = Annotated[datetime | None, typer.Option(parser=moment, metavar="TIME", help="Parked then or later.")]
Until = Annotated[datetime | None, typer.Option(parser=moment, metavar="TIME", help="Parked before.")]


def _where(given: Mapping[str, Any]) -> Where:
    """Return the filter that the options of a command say."""
    names = ("error", "fingerprint", "contains", "partition", "key", "since", "until")
    found = {name: given[name] for name in names if given[name] is not None}
    return cast("Where", found | ({"offsets": given["offset"]} if given["offset"] else {}))


def _ask(context: typer.Context, topic: str | None, name: str | None, work: Callable[[DeadLetters], Awaitable[R]]) -> R:
    """Open the store, make sure that what is named is there, and ask for its dead letters."""
    with context.ensure_object(Session).open_store() as (store, settings):
        info = None if topic is None else find_topic(store, topic)
        if info is None or name is None:
            return asyncio.run(_asked(store, settings, work))
        find_subscription(store, info, name)
        with still_there(info, name):
            return asyncio.run(_asked(store, settings, work))


async def _asked(store: Store, settings: Settings, work: Callable[[DeadLetters], Awaitable[R]]) -> R:
    from penstock.bus.dead_letters import DeadLetters
    from penstock.bus.directory import TopicDirectory
    from penstock.bus.local import Local
    from penstock.clock import SystemClock

    # Without a bus: its loops would begin to work for whoever only looks.
    backend = Local(settings.url, settings=settings, store=store)
    await backend.open()

    async def opened() -> Local:
        return backend

    try:
        return await work(DeadLetters(TopicDirectory({}, opened), SystemClock(), opened))
    finally:
        await backend.close()


# --- ls and show ----------------------------------------------------------------------------------


@app.command("ls")
def list_letters(  # what is not used below is taken from the context, all at once
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    error: Error = None,
    fingerprint: Fingerprint = None,
    contains: Contains = None,
    partition: InPartition = None,
    offset: Offset = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    state: Annotated[Literal["dead", "waiting", "done"], typer.Option(help="Also retries, or what is done.")] = "dead",
    limit: Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="How many to list at most.")] = 100,
    as_json: Json = False,
) -> None:
    """List dead letters, by position."""
    # One more than is shown tells whether there are more.
    letters = _ask(
        context,
        topic,
        name,
        lambda found: _listed(found, topic, name, state, limit=limit + 1, **_where(context.params)),
    )
    if as_json:
        print_json({"letters": [document_of(letter) for letter in letters[:limit]], "more": len(letters) > limit})
        return
    print_letters(letters[:limit])
    if len(letters) > limit:
        say(f"there are more: these are the first {limit:,}, --limit shows others")


async def _listed(
    letters: DeadLetters, topic: str, name: str, state: ParkedState, *, limit: int, **where: Unpack[Where]
) -> list[DeadLetter]:
    """Return so many letters, page by page."""
    from penstock.bus.dead_letters import LIST_MAX

    found: list[DeadLetter] = []
    while len(found) < limit:
        wanted = min(limit - len(found), LIST_MAX)
        after = found[-1].position if found else None
        page = await letters.ls(topic, name, states=[state], after=after, limit=wanted, **where)
        found += page
        if len(page) < wanted:
            break
    return found


@app.command()
def show(
    context: typer.Context,
    topic: TopicName,
    name: Name,
    at: Annotated[
        Spot, typer.Argument(parser=spot, metavar="POSITION", help="As `penstock dlq ls` shows it, or the offset.")
    ],
    *,
    partition: Annotated[int | None, typer.Option(min=0, metavar="N", help="The partition of the offset.")] = None,
    as_json: Json = False,
) -> None:
    """Show one dead letter: payload, error, traceback, origin."""
    partition = at.partition(topic, partition)
    letter = _ask(context, topic, name, lambda found: found.show(topic, name, at.offset, partition=partition))
    if as_json:
        print_json({**document_of(letter), "error_trace": letter.error_trace or None, "event": cloud_event(letter)})
        return
    print_letter(letter)


# --- groups and stats -----------------------------------------------------------------------------


@app.command()
def groups(  # the same
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    error: Error = None,
    fingerprint: Fingerprint = None,
    contains: Contains = None,
    partition: InPartition = None,
    offset: Offset = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Group dead letters by the cause of their error."""
    found = _ask(context, topic, name, lambda letters: letters.groups(topic, name, **_where(context.params)))
    if as_json:
        print_json({"groups": [group_document(each) for each in found]})
        return
    print_groups(found)


@app.command()
def stats(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Only this one.")] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this subscription.")] = None,
    as_json: Json = False,
) -> None:
    """Count dead letters, retries and what is done, by subscription."""
    found = _ask(context, topic, name, lambda letters: letters.stats(topic, name))
    if as_json:
        print_json({"stats": [_stats(each) for each in found]})
        return
    print_table(
        ("topic", "name", "dead", "waiting", "done", "oldest", "newest", "errors"),
        [
            (
                each.topic,
                each.subscription,
                *(f"{count:,}" for count in (each.dead, each.waiting, each.done)),
                *("-" if time is None else shown_time(time) for time in (each.oldest, each.newest)),
                _errors(each),
            )
            for each in found
        ],
        numbers={"dead", "waiting", "done"},
    )


def _stats(stats: DeadStats) -> dict[str, Any]:
    return {
        "topic": stats.topic,
        "name": stats.subscription,
        "dead": stats.dead,
        "waiting": stats.waiting,
        "done": stats.done,
        "oldest": None if stats.oldest is None else shown_time(stats.oldest),
        "newest": None if stats.newest is None else shown_time(stats.newest),
        "errors": dict(stats.errors),
    }


def _errors(stats: DeadStats) -> str:
    shown = [f"{shown_text(error) or '-'} {count:,}" for error, count in list(stats.errors.items())[:ERRORS_SHOWN]]
    return ", ".join([*shown, *(["…"] if len(stats.errors) > ERRORS_SHOWN else [])]) or "-"


# --- replay and purge -----------------------------------------------------------------------------


@app.command()
def replay(  # the same
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    error: Error = None,
    fingerprint: Fingerprint = None,
    contains: Contains = None,
    partition: InPartition = None,
    offset: Offset = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    rate: Annotated[float | None, typer.Option(metavar="N", help="Events a second at most.")] = None,
    mark: Annotated[bool, typer.Option("--mark", help="Only mark them, for --job.")] = False,
    job: Annotated[str | None, typer.Option(metavar="ID", help="What was marked, instead of a filter.")] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Deliver dead letters again; without --yes show which.

    They come to this subscription alone, where they were. `--mark` keeps exactly those that there are now for a replay
    by `--job`; what dies later is not part of it. A replay that was interrupted goes on by its job, too.
    """
    from penstock.bus.dead_letters import check_rate

    where = _where(context.params)
    if mark and (yes or job is not None):
        raise UsageError("--mark only marks them: give it without --yes and --job")
    # Before anything is marked: that takes letters away from another job.
    check_rate(rate)

    async def work(letters: DeadLetters) -> dict[str, Any]:
        if not yes and not mark and job is None:
            matched, samples = await _preview(letters, topic, name, states=["dead"], **where)
            return {"done": False, "job": None, "matched": matched, "replayed": 0, "samples": samples}
        marked = await letters.replay(topic, name, dry_run=True, job=job, **where)
        document = {"done": yes, "job": marked.job, "matched": marked.matched, "replayed": 0}
        if yes and marked.matched:
            pace = "" if rate is None else f", which takes about {marked.matched / rate:,.0f} s"
            say(f"job {marked.job} brings {marked.matched:,} back{pace}")
            document["replayed"] = (await letters.replay(topic, name, job=marked.job, rate=rate)).replayed
        return document

    document = _ask(context, topic, name, work)
    if job is not None and not document["matched"]:
        _nothing_marked(job)
    samples = document.pop("samples", [])
    if as_json:
        print_json({"topic": topic, "name": name, **document, "samples": list(map(document_of, samples))})
    elif yes:
        print(f"{document['replayed']:,} of {document['matched']:,} dead letters are delivered again")
    elif mark:
        print(document["job"])
        say(f"{document['matched']:,} dead letters are marked: --job {document['job']} --yes replays them")
    else:
        _print_preview(document["matched"], samples, "would be delivered again")
    if not yes and not mark:
        raise UsageError("nothing was replayed: give --yes to do it")


def _nothing_marked(job: str) -> None:
    """Tell that a job has no letters; an error if that can be no job's name, and else it may just be done.

    Letters lose their mark as they come back, so that only its name tells a job that is done from a typing error.
    """
    what = f"no dead letters are marked for job {job!r}"
    if JOB.fullmatch(job) is None:
        raise PenstockError(f"{what}, and no job has such a name: `--mark` prints it")
    say(f"{what}: all of it was delivered again already, or marked by another replay since, or there was never any")


@app.command()
def purge(  # the same
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    error: Error = None,
    fingerprint: Fingerprint = None,
    contains: Contains = None,
    partition: InPartition = None,
    offset: Offset = None,
    key: Key = None,
    since: Since = None,
    until: Until = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove dead letters; without --yes show which.

    Those that are done after a replay go with them. What waits for its next attempt is never removed.
    """
    where = _where(context.params)

    async def work(letters: DeadLetters) -> tuple[int, list[DeadLetter]]:
        if yes:
            return await letters.purge(topic, name, **where), []
        return await _preview(letters, topic, name, states=["dead", "done"], **where)

    count, samples = _ask(context, topic, name, work)
    if as_json:
        document = {"topic": topic, "name": name, "done": yes, "count": count}
        print_json({**document, "samples": list(map(document_of, samples))})
    elif yes:
        print(f"{count:,} are removed")
    else:
        _print_preview(count, samples, "would be removed")
    if not yes:
        raise UsageError("nothing was removed: this cannot be undone; give --yes to do it")


async def _preview(
    letters: DeadLetters, topic: str, name: str, *, states: list[ParkedState], **where: Unpack[Where]
) -> tuple[int, list[DeadLetter]]:
    """Return how many are meant, and the first of them."""
    count = await letters.count(topic, name, states=states, **where)
    return count, await letters.ls(topic, name, states=states, limit=SAMPLES, **where)


def _print_preview(count: int, samples: list[DeadLetter], what: str) -> None:
    if samples:
        print_letters(samples)
        print()
    print(f"{count:,} {what}{f'; these are the first {len(samples)}' if samples and count > len(samples) else ''}")
