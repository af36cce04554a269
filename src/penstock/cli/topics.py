"""`penstock topics`: which topics there are and what they hold; making and deleting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.arguments import duration, size
from penstock.cli.output import Json, Yes, print_json, print_table, say, shown_size, shown_time_us
from penstock.cli.session import Session, directory_of, find_topic
from penstock.errors import IntegrityError, TopicDeleted, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.offsets import Range
    from penstock.ports import Store
    from penstock.rows import Partition, Retention, Subscription, TopicInfo

app = typer.Typer(help="List the topics; show, create or delete one.", invoke_without_command=True)

RANGES_SHOWN = 3
"""The offsets of so many partitions are listed; `show` has all of them."""

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]


All = Annotated[bool, typer.Option("--all", help="Also those that Penstock keeps for itself.")]


@app.callback()
def topics(context: typer.Context, every: All = False, as_json: Json = False) -> None:
    """List the topics; show, create or delete one."""
    if context.invoked_subcommand is None:
        ls(context, every, as_json)
    elif every or as_json:
        raise UsageError(f"options of `penstock topics {context.invoked_subcommand}` come after it")


@app.command()
def ls(context: typer.Context, every: All = False, as_json: Json = False) -> None:
    """List the topics."""
    with context.ensure_object(Session).open_store() as (store, settings):
        found = list(_documents(store, settings.url, every=every))
    if as_json:
        print_json({"topics": found})
        return
    print_table(
        ("topic", "partitions", "events", "offsets", "size", "durability", "retention", "created"),
        [_row(document) for document in found],
        numbers={"partitions", "events", "size"},
    )


def _documents(store: Store, url: str, *, every: bool) -> Iterator[dict[str, Any]]:
    for info in store.log.topics():
        if info.name.startswith("_") and not every:
            continue
        try:
            yield document_of(store, info, url)
        except TopicDeleted:
            continue  # since they were listed


def document_of(store: Store, info: TopicInfo, url: str) -> dict[str, Any]:
    """Return what is known of a topic, for programs."""
    bounds = [store.log.bounds(partition) for partition in info.partitions]
    return {
        "name": info.name,
        "log_id": info.log_id,
        "partitions": [
            {"partition": number, "first": each.start, "end": each.stop} for number, each in enumerate(bounds)
        ],
        "events": sum(map(len, bounds)),
        "bytes": bytes_on_disk(info, url),
        "durability": info.settings.durability,
        "retention": {
            "age_seconds": info.settings.retention.age_seconds,
            "bytes_max": info.settings.retention.bytes_max,
            "hard_bytes_max": info.settings.retention.hard_bytes_max,
        },
        "content_type": info.settings.content_type,
        "source": info.settings.source or f"penstock:{info.name}",
        "created_at": shown_time_us(info.created_at),
    }


def bytes_on_disk(info: TopicInfo, url: str) -> int | None:
    """Return what the topic takes, with what is allocated ahead; None if the store has no files of its own."""
    if not url.startswith("file:"):
        return None
    total = 0
    for path in (directory_of(url) / "topics" / info.log_id).rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # retention removes files while we look
            continue
    return total


def _row(document: dict[str, Any]) -> tuple[str, ...]:
    partitions = document["partitions"]
    ranges = [f"{each['first']}…{each['end']}" for each in partitions[:RANGES_SHOWN]]
    return (
        document["name"],
        str(len(partitions)),
        f"{document['events']:,}",
        ", ".join([*ranges, *(["…"] if len(partitions) > RANGES_SHOWN else [])]),
        "-" if document["bytes"] is None else shown_size(document["bytes"]),
        document["durability"],
        _retention(document["retention"]),
        document["created_at"],
    )


def _retention(document: dict[str, Any]) -> str:
    parts = []
    if document["age_seconds"] is not None:
        parts.append(f"{document['age_seconds'] / 86_400:.4g} d")
    if document["bytes_max"] is not None:
        parts.append(shown_size(document["bytes_max"]))
    if document["hard_bytes_max"] is not None:
        parts.append(f"at most {shown_size(document['hard_bytes_max'])}")
    return ", ".join(parts) or "everything"


# --- show -------------------------------------------------------------------------------------


@app.command()
def show(context: typer.Context, name: Name, as_json: Json = False) -> None:
    """Show one topic, partition by partition."""
    damage: IntegrityError | None = None
    with context.ensure_object(Session).open_store() as (store, settings):
        info = find_topic(store, name)
        document = document_of(store, info, settings.url)
        document["subscriptions"] = [
            _subscription(store, info, each) for each in store.cursors.subscriptions(info.log_id)
        ]
        for partition, each in zip(info.partitions, document["partitions"], strict=True):
            try:
                each["last_appended_at"] = _last_appended_at(store, partition, store.log.bounds(partition))
            except IntegrityError as error:
                each["last_appended_at"] = None
                damage = damage or error
    if as_json:
        print_json(document)
    else:
        _print_topic(document)
    if damage is not None:
        raise damage


def _subscription(store: Store, info: TopicInfo, subscription: Subscription) -> dict[str, Any]:
    """Return how far a subscription has come; its lag is what lies behind the slowest cursor of each partition."""
    passed: dict[int, int] = {}
    for cursor in store.cursors.load(info.log_id, subscription.name):
        number = cursor.shard.partition
        passed[number] = min(cursor.next_offset, passed.get(number, cursor.next_offset))
    lag = 0
    for partition in info.partitions:
        bounds = store.log.bounds(partition)
        lag += bounds.stop - min(max(passed.get(partition.number, bounds.start), bounds.start), bounds.stop)
    return {
        "name": subscription.name,
        "mode": subscription.mode,
        "external": subscription.external,
        "protect": subscription.protect,
        "lag": lag,
    }


def _last_appended_at(store: Store, partition: Partition, bounds: Range) -> str | None:
    """Return when the last event was appended; None if there is none, or a gap in its place."""
    from penstock.batch import Batch

    if not bounds:
        return None
    (last, *_) = store.log.read(partition, bounds.stop - 1, bytes_max=1, events_max=1)
    return shown_time_us(last.place.appended_at) if isinstance(last, Batch) and last.place else None


def _print_topic(document: dict[str, Any]) -> None:
    print_table(
        ("what", "value"),
        [
            ("topic", document["name"]),
            ("log", document["log_id"]),
            ("events", f"{document['events']:,}"),
            ("size", "-" if document["bytes"] is None else shown_size(document["bytes"])),
            ("durability", document["durability"]),
            ("retention", _retention(document["retention"])),
            ("content type", document["content_type"]),
            ("source", document["source"]),
            ("created", document["created_at"]),
        ],
    )
    print()
    print_table(
        ("partition", "first", "end", "events", "last append"),
        [
            (
                str(each["partition"]),
                str(each["first"]),
                str(each["end"]),
                f"{each['end'] - each['first']:,}",
                each["last_appended_at"] or "-",
            )
            for each in document["partitions"]
        ],
        numbers={"partition", "first", "end", "events"},
    )
    if document["subscriptions"]:
        print()
        print_table(
            ("subscription", "mode", "lag", "retention waits for it"),
            [
                (each["name"], each["mode"], f"{each['lag']:,}", "yes" if each["protect"] else "no")
                for each in document["subscriptions"]
            ],
            numbers={"lag"},
        )


# --- create and delete --------------------------------------------------------------------------


@app.command()
def create(
    context: typer.Context,
    name: Name,
    *,
    partitions: Annotated[int, typer.Option(min=1, metavar="N", help="How many; fixed for ever.")] = 1,
    durability: Annotated[
        Literal["sync", "os"], typer.Option(help="When a publish is answered: on the medium, or with the system.")
    ] = "sync",
    retain_age: Annotated[
        float | None, typer.Option(parser=duration, metavar="TIME", help="Older events may go: 7d, 12h.")
    ] = None,
    retain_bytes: Annotated[
        int | None, typer.Option(parser=size, metavar="SIZE", help="What a partition may hold: '10 GiB'.")
    ] = None,
    content_type: Annotated[
        str, typer.Option(metavar="TYPE", help="Of events that do not say it.")
    ] = "application/octet-stream",
    source: Annotated[str, typer.Option(metavar="URI", help="Of events that do not say it.")] = "",
) -> None:
    """Create a topic, and the store if there is none yet.

    If the topic exists with these settings, only its retention is set anew.
    """
    from penstock.bus.topic import PARTITIONS_MAX
    from penstock.events import Event, check_event, check_name
    from penstock.rows import Retention, TopicSettings

    check_name("topic", name)
    check_event(Event(content_type=content_type, source=source or None))
    if partitions > PARTITIONS_MAX:
        raise UsageError(f"a topic has at most {PARTITIONS_MAX:,} partitions, not {partitions:,}")
    settings = TopicSettings(
        partitions=partitions,
        content_type=content_type,
        source=source,
        durability=durability,
        retention=Retention(age_seconds=retain_age, bytes_max=retain_bytes),
    )
    with context.ensure_object(Session).open_store(create=True) as (store, _):
        before = {info.name: info.settings.retention for info in store.log.topics()}
        store.log.create_topic(name, settings)
    say(f"topic {name!r} {_outcome(before, name, settings.retention)}")


def _outcome(before: dict[str, Retention], name: str, retention: Retention) -> str:
    if name not in before:
        return "is created"
    return "exists already, as it should be" if before[name] == retention else "exists; its retention is set anew"


@app.command()
def delete(context: typer.Context, name: Name, yes: Yes = False) -> None:
    """Delete a topic with all of its events and subscriptions."""
    with context.ensure_object(Session).open_store() as (store, settings):
        info = find_topic(store, name)
        if name.startswith("_"):
            raise UsageError(f"topic {name!r} is kept by Penstock for itself, and is not deleted by hand")
        document = document_of(store, info, settings.url)
        subscriptions = [subscription.name for subscription in store.cursors.subscriptions(info.log_id)]
        if yes:
            store.log.delete_topic(info.log_id)
            say(f"topic {name!r} is deleted")
            return
    print_table(
        ("topic", "partitions", "events", "offsets", "size", "subscriptions"),
        [(*_row(document)[:5], ", ".join(subscriptions) or "-")],
        numbers={"partitions", "events", "size"},
    )
    raise UsageError("nothing was deleted: this cannot be undone; give --yes to do it")
