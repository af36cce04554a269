"""`penstock subscriptions`: which there are, how they do; making, changing and deleting them.

Nothing here needs a consumer to run. One that does, in whichever process, sees every change within a moment.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from penstock.cli import places
from penstock.cli.output import Json, Yes, print_json, print_table, say, shown_age, shown_text, shown_time_us
from penstock.cli.policies import (
    Backoff,
    BackoffMax,
    Checkpoint,
    Exhausted,
    Heartbeat,
    Jitter,
    MaxRetries,
    ParkedMax,
    Protect,
    Rate,
    ReadBytes,
    ReadEvents,
    Timeout,
    Window,
    WindowBytes,
    changes_of,
    policy_document,
    policy_rows,
    shown_value,
)
from penstock.cli.session import Session, find_topic
from penstock.errors import (
    IntegrityError,
    PenstockError,
    SubscriptionMismatch,
    TopicDeleted,
    UnknownSubscription,
    UsageError,
    did_you_mean,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.engine.lag import LagInfo
    from penstock.ports import Store
    from penstock.rows import Cursor, Subscription, TopicInfo


class Listing(TyperGroup):
    """A group for which a single word that is none of its commands is the topic to list."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is meant."""
        word, *others = args
        if self.get_command(ctx, word) is None and all(other.startswith("-") for other in others):
            return "ls", self.get_command(ctx, "ls"), args
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=Listing,
    help="List the subscriptions; show, create, change or delete one.",
    invoke_without_command=True,
    subcommand_metavar="[TOPIC] | COMMAND [ARGS]...",
)

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The subscription's name.")]
Mode = Annotated[
    Literal["key_shared", "shared", "exclusive", "failover"],
    typer.Option(help="Many consumers, by key or in no order; one; or one and standbys."),
]
NewMode = Annotated[
    Literal["key_shared", "shared", "exclusive", "failover"] | None,
    typer.Option("--mode", help="Another mode, while nobody consumes it."),
]
All = Annotated[bool, typer.Option("--all", help="Also of topics that Penstock keeps for itself.")]


# --- finding --------------------------------------------------------------------------------------


def find_subscription(store: Store, info: TopicInfo, name: str) -> Subscription:
    """Return the subscription of this name; `UsageError` if the topic has none such, naming the nearest."""
    found = store.cursors.subscription(info.log_id, name)
    if found is None:
        names = [each.name for each in store.cursors.subscriptions(info.log_id)]
        advice = f"`penstock subscriptions ls {info.name}` lists them" if names else "it has none"
        raise UsageError(f"topic {info.name!r} has no subscription {name!r}{did_you_mean(name, names)}; {advice}")
    return found


@contextmanager
def still_there(info: TopicInfo, name: str) -> Iterator[None]:
    """Say of a subscription that is deleted within the block whose it was."""
    try:
        yield
    except UnknownSubscription:
        raise PenstockError(f"subscription {name!r} of topic {info.name!r} was deleted meanwhile") from None


def each_lag(
    store: Store, wanted: list[tuple[TopicInfo, Subscription]], report: Callable[[IntegrityError], None]
) -> Iterator[tuple[TopicInfo, Subscription, list[LagInfo]]]:
    """Yield how far each subscription is behind; those of topics that are deleted meanwhile are left out.

    Damage is told to `report`; everything that it leaves known is yielded all the same.
    """
    from penstock.clock import SystemClock
    from penstock.runtime.subscriptions import lag

    now_us = SystemClock().time_us()
    for info, subscription in wanted:
        try:
            yield info, subscription, lag(store, info, subscription, now_us, damaged=report)
        except TopicDeleted:
            continue
        except IntegrityError as error:
            report(error)


def all_subscriptions(store: Store, *, internal: bool) -> list[tuple[TopicInfo, Subscription]]:
    """Return the subscriptions of all topics, by the names of both."""
    mine: dict[str, list[Subscription]] = {}
    for subscription in store.cursors.subscriptions():
        mine.setdefault(subscription.log_id, []).append(subscription)
    topics = [info for info in store.log.topics() if internal or not info.name.startswith("_")]
    return [(info, subscription) for info in topics for subscription in mine.get(info.log_id, ())]


# --- ls -------------------------------------------------------------------------------------------


@app.callback()
def subscriptions(context: typer.Context, every: All = False, as_json: Json = False) -> None:
    """List the subscriptions; show, create, change or delete one."""
    if context.invoked_subcommand is not None:
        if every or as_json:
            raise UsageError(f"options of `penstock subscriptions {context.invoked_subcommand}` come after it")
        return
    _list(context.ensure_object(Session), None, every=every, as_json=as_json)


@app.command("ls")
def list_subscriptions(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="Only those of this topic.")] = None,
    every: All = False,
    as_json: Json = False,
) -> None:
    """List the subscriptions, of all topics or of one."""
    _list(context.ensure_object(Session), topic, every=every, as_json=as_json)


def _list(session: Session, topic: str | None, *, every: bool, as_json: bool) -> None:
    damages: list[IntegrityError] = []
    with session.open_store() as (store, _):
        if topic is None:
            wanted = all_subscriptions(store, internal=every)
        else:
            info = find_topic(store, topic)
            wanted = [(info, each) for each in store.cursors.subscriptions(info.log_id)]
        found = [document_of(*each) for each in each_lag(store, wanted, damages.append)]
    if as_json:
        print_json({"subscriptions": found})
    else:
        print_table(
            ("topic", "name", "mode", "lag", "unsettled", "parked", "dead", "oldest", "state", "protect"),
            [_row(document) for document in found],
            numbers={"lag", "unsettled", "parked", "dead", "oldest"},
        )
    if damages:
        raise damages[0]


def document_of(info: TopicInfo, subscription: Subscription, lags: list[LagInfo]) -> dict[str, Any]:
    """Return what is known of a subscription as a whole, for programs."""
    from penstock.engine.policy import Policy

    return {
        "topic": info.name,
        "name": subscription.name,
        "mode": subscription.mode,
        "lag": sum(each.lag for each in lags),
        "unsettled": sum(each.unsettled for each in lags),
        "parked": sum(each.parked for each in lags),
        "dead": sum(each.dead for each in lags),
        "oldest_seconds": max((each.oldest_seconds for each in lags), default=0.0),
        "paused": Policy.of(subscription.policy).paused,
        "external": subscription.external,
        "protect": subscription.protect,
    }


def _row(document: dict[str, Any]) -> tuple[str, ...]:
    state = "external" if document["external"] else "paused" if document["paused"] else "-"
    return (
        document["topic"],
        document["name"],
        document["mode"],
        *(f"{document[field]:,}" for field in ("lag", "unsettled", "parked", "dead")),
        shown_age(document["oldest_seconds"]),
        state,
        "yes" if document["protect"] else "no",
    )


# --- show -----------------------------------------------------------------------------------------


@app.command()
def show(context: typer.Context, topic: TopicName, name: Name, as_json: Json = False) -> None:
    """Show one subscription: its policy, owners, and what is in flight."""
    from penstock.bus.examination import Examiner
    from penstock.cli.sharing import documents_of, hindrances, in_hand_of
    from penstock.clock import SystemClock
    from penstock.runtime.subscriptions import lag, slowest_cursors

    with context.ensure_object(Session).open_store() as (store, settings):
        info = find_topic(store, topic)
        subscription = find_subscription(store, info, name)
        damages: list[IntegrityError] = []
        now_us, cursors = SystemClock().time_us(), slowest_cursors(store, info, name)
        lags = lag(store, info, subscription, now_us, damaged=damages.append, cursors=cursors)
        document = document_of(info, subscription, lags)
        document["log_id"] = info.log_id
        document["created_at"] = shown_time_us(subscription.created_at) if subscription.created_at else None
        document["policy"] = policy_document(subscription)
        document["partitions"] = _partitions(store, info, name, lags, cursors)
        document["sharing"] = documents_of(store, info, subscription, cursors)
        examiner = Examiner(store, now_us=now_us, stalled_after=settings.delivery.stalled_seconds)
        document["in_hand"] = in_hand_of(store, info, name, now_us)
        reasons = examiner.subscription(info, subscription).reasons
        document["waits"] = [*reasons, *hindrances(topic, document["in_hand"])]
    if as_json:
        print_json(document)
    else:
        _print_subscription(document)
    if damages:
        raise damages[0]


def _partitions(
    store: Store, info: TopicInfo, name: str, lags: list[LagInfo], cursors: dict[int, Cursor]
) -> list[dict[str, Any]]:
    from penstock.runtime.sharing import whole_holder

    found = []
    for each in lags:
        here = cursors.get(each.partition)
        lease = whole_holder(store, info, name, each.partition)
        found.append(
            {
                "partition": each.partition,
                "cursor": here.next_offset if here else None,
                "head": each.head,
                "lag": each.lag,
                "unsettled": each.unsettled,
                "parked": each.parked,
                "dead": each.dead,
                "oldest_seconds": each.oldest_seconds,
                "owner": lease.owner if lease else None,
                "epoch": lease.epoch if lease else None,
                "generation": here.generation if here else None,
                "updated_at": shown_time_us(here.updated_at) if here and here.updated_at else None,
            }
        )
    return found


def _print_subscription(document: dict[str, Any]) -> None:
    print_table(
        ("what", "value"),
        [
            ("topic", document["topic"]),
            ("subscription", document["name"]),
            ("log", document["log_id"]),
            ("mode", document["mode"]),
            ("progress is kept", "elsewhere" if document["external"] else "here"),
            ("retention waits for it", "yes" if document["protect"] else "no"),
            ("created", document["created_at"] or "-"),
        ],
    )
    if not document["external"]:
        print()
        print_table(("policy", "value", "origin"), policy_rows(document["policy"]))
    columns = ("cursor", "head", "lag", "unsettled", "parked", "dead")
    print()
    print_table(
        ("partition", *columns, "oldest", "consumer", "epoch", "generation", "written"),
        [
            (
                str(each["partition"]),
                *("-" if each[column] is None else str(each[column]) for column in columns),
                shown_age(each["oldest_seconds"]),
                "-" if each["owner"] is None else shown_text(each["owner"]),
                *("-" if each[column] is None else str(each[column]) for column in ("epoch", "generation")),
                each["updated_at"] or "-",
            )
            for each in document["partitions"]
        ],
        numbers={"partition", *columns, "oldest", "epoch", "generation"},
    )
    if document["sharing"]:
        from penstock.cli.sharing import print_processes

        print()
        print_processes(document["mode"], document["sharing"])
    if document["in_hand"]:
        from penstock.cli.sharing import print_in_hand

        print()
        print_in_hand(document["topic"], document["in_hand"])
    for reason in document["waits"]:
        print(f"\n{shown_text(reason)}")


# --- create, set and rm ---------------------------------------------------------------------------


@app.command()
def create(  # what is not used below is taken from the context, all at once
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    mode: Mode = "key_shared",
    start: Annotated[str | None, typer.Option(metavar=places.METAVAR, help=f"Where it begins: {places.HELP}")] = None,
    max_retries: MaxRetries = None,
    backoff: Backoff = None,
    backoff_max: BackoffMax = None,
    jitter: Jitter = None,
    exhausted: Exhausted = None,
    timeout: Timeout = None,
    heartbeat: Heartbeat = None,
    window: Window = None,
    window_bytes: WindowBytes = None,
    read_events: ReadEvents = None,
    read_bytes: ReadBytes = None,
    rate: Rate = None,
    checkpoint: Checkpoint = None,
    parked_max: ParkedMax = None,
    protect: Protect = None,
) -> None:
    """Create a subscription, which begins with the earliest event.

    If it exists in this mode, what the options say of its policy holds from now on; where it is does not change.
    """
    from penstock.clock import SystemClock
    from penstock.runtime.subscriptions import ensure

    begin = places.place("--start", "earliest" if start is None else start)
    changes = changes_of(context.params)
    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        before = store.cursors.subscription(info.log_id, name)
        after, _ = ensure(
            store,
            info,
            name,
            mode=mode,
            changes=changes,
            start=begin,
            protect=protect,
            now_us=SystemClock().time_us(),
        )
    existing = "exists already, as it should be" if after == before else "exists; it is changed"
    say(f"subscription {name!r} of topic {topic!r} {'is created' if before is None else existing}")
    if before is not None and start is not None:
        say(f"where it is stays as it is: `penstock seek {topic} {name} --to {start}` moves it")


@app.command("set")
def change(  # the same
    context: typer.Context,
    topic: TopicName,
    name: Name,
    *,
    max_retries: MaxRetries = None,
    backoff: Backoff = None,
    backoff_max: BackoffMax = None,
    jitter: Jitter = None,
    exhausted: Exhausted = None,
    timeout: Timeout = None,
    heartbeat: Heartbeat = None,
    window: Window = None,
    window_bytes: WindowBytes = None,
    read_events: ReadEvents = None,
    read_bytes: ReadBytes = None,
    rate: Rate = None,
    checkpoint: Checkpoint = None,
    parked_max: ParkedMax = None,
    protect: Protect = None,
    mode: NewMode = None,
) -> None:
    """Change the policy of a subscription, also while it is consumed.

    Its mode can be changed while nobody consumes it.
    """
    from penstock.clock import SystemClock
    from penstock.runtime.modes import change_mode
    from penstock.runtime.subscriptions import ensure

    changes = changes_of(context.params)
    if not changes and protect is None and mode is None:
        raise UsageError("nothing to change: give --max-retries, --heartbeat or another option; --help lists them")
    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        before = find_subscription(store, info, name)
        if before.external:
            raise SubscriptionMismatch(
                f"subscription {name!r} of topic {topic!r} is driven from outside: it has no policy here"
            )
        if mode is not None:
            change_mode(store, info, name, mode)
        after, _ = ensure(
            store,
            info,
            name,
            mode=mode or before.mode,
            changes=changes,
            start="latest",
            protect=protect,
            now_us=SystemClock().time_us(),
        )
    differences = _differences(before, after)
    say(f"subscription {name!r} of topic {topic!r} {'is changed' if differences else 'is so already'}")
    for line in differences:
        say(f"  {line}")


def _differences(before: Subscription, after: Subscription) -> list[str]:
    was, now = policy_document(before), policy_document(after)
    lines = [
        f"{field}: {shown_value(field, was[field]['value'])} → {shown_value(field, each['value'])}"
        for field, each in now.items()
        if was[field] != each
    ]
    if before.mode != after.mode:
        lines.append(f"mode: {before.mode} → {after.mode}")
    if before.protect != after.protect:
        lines.append(f"retention waits for it: {'yes' if after.protect else 'no'}")
    return lines


@app.command("rm")
def remove(context: typer.Context, topic: TopicName, name: Name, yes: Yes = False) -> None:
    """Delete a subscription with its progress and its dead letters."""
    from penstock.clock import SystemClock
    from penstock.runtime.sharing import consumers_of
    from penstock.runtime.subscriptions import lag

    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        subscription = find_subscription(store, info, name)
        if yes:
            if not store.cursors.delete_subscription(info.log_id, name):
                raise PenstockError(f"subscription {name!r} of topic {topic!r} was deleted meanwhile")
            say(f"subscription {name!r} of topic {topic!r} is deleted")
            return
        document = document_of(info, subscription, lag(store, info, subscription, SystemClock().time_us()))
        owners = [shown_text(lease.owner) for lease in consumers_of(store, info, name)]
    print_table(
        ("topic", "subscription", "mode", "not settled", "retries that wait", "dead letters", "consumers"),
        [
            (
                topic,
                name,
                document["mode"],
                *(f"{document[field]:,}" for field in ("unsettled", "parked", "dead")),
                ", ".join(owners) or "-",
            )
        ],
        numbers={"not settled", "retries that wait", "dead letters"},
    )
    raise UsageError(
        "nothing was deleted: where it is, its retries and dead letters would be lost, the topic's events would "
        "stay; give --yes to do it"
    )
