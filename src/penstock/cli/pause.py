"""`penstock pause` and `penstock resume`: whether a subscription hands anything over, whoever consumes it."""

from __future__ import annotations

import typer

from penstock.cli.output import say
from penstock.cli.session import Session, find_topic
from penstock.cli.subscriptions import Name, TopicName, find_subscription, still_there


def pause(context: typer.Context, topic: TopicName, name: Name) -> None:
    """Let a subscription hand nothing over until it is resumed.

    What consumers have in hand goes on.
    """
    from penstock.engine.policy import Policy
    from penstock.runtime.subscriptions import change

    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        was_paused = Policy.of(find_subscription(store, info, name).policy).paused
        with still_there(info, name):
            change(store, info, name, {"paused": True})
    say(f"subscription {name!r} of topic {topic!r} is paused{' already' if was_paused else ''}")


def resume(context: typer.Context, topic: TopicName, name: Name) -> None:
    """Let a subscription go on that was paused, or has halted at an event."""
    from penstock.engine.policy import Policy
    from penstock.runtime import subscriptions

    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        was_paused = Policy.of(find_subscription(store, info, name).policy).paused
        with still_there(info, name):
            subscriptions.resume(store, info, name)
    say(
        f"subscription {name!r} of topic {topic!r} "
        + ("goes on" if was_paused else "was not paused; if it had halted, it tries anew")
    )
