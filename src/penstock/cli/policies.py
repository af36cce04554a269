"""The policy of a subscription on the command line: its options, and how it is shown.

A field of `penstock.engine.policy.Policy` has one option. What an option does not say stays as it is, so `set` changes
what it names and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.arguments import duration, size
from penstock.cli.output import shown_size
from penstock.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.rows import Subscription


def _checkpoint(text: str) -> tuple[int, float]:
    """Return events and seconds for `each`, or for `1000,5s`."""
    if text == "each":
        return 1, 0.0
    count, comma, delay = text.partition(",")
    if not comma or not count.strip().isdecimal():
        raise typer.BadParameter(f"{text!r} is no checkpoint: write each, or how many events and how long: 1000,5s")
    return int(count), duration(delay)


MaxRetries = Annotated[int | None, typer.Option(metavar="N", help="How often a failed event is tried again.")]
Backoff = Annotated[
    float | None, typer.Option(parser=duration, metavar="TIME", help="Before the first retry; then doubled.")
]
BackoffMax = Annotated[float | None, typer.Option(parser=duration, metavar="TIME", help="The longest of these delays.")]
Jitter = Annotated[float | None, typer.Option(metavar="SHARE", help="By which a delay may be shorter: 0.1.")]
Exhausted = Annotated[
    Literal["dead", "halt", "discard"] | None, typer.Option(help="What follows the last failed attempt.")
]
Timeout = Annotated[
    float | None, typer.Option(parser=duration, metavar="TIME", help="Of a handler: 30s, 5m; 0 for any time.")
]
Heartbeat = Annotated[
    str | None, typer.Option(metavar="PROFILE", help="Such as normal; or seconds, or off: how often it looks.")
]
Window = Annotated[int | None, typer.Option(metavar="N", help="Events in memory, read and not settled.")]
WindowBytes = Annotated[int | None, typer.Option(parser=size, metavar="SIZE", help="The same in bytes: '16 MiB'.")]
ReadEvents = Annotated[int | None, typer.Option(metavar="N", help="Events that one read asks for.")]
ReadBytes = Annotated[int | None, typer.Option(parser=size, metavar="SIZE", help="The same in bytes: '1 MiB'.")]
Rate = Annotated[float | None, typer.Option(min=0, metavar="N", help="Events a second at most; 0 for any.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(parser=_checkpoint, metavar="WHEN", help="Progress is written: each, or 1000,5s."),
]
ParkedMax = Annotated[int | None, typer.Option(metavar="N", help="How many events may wait aside.")]
Protect = Annotated[bool | None, typer.Option("--protect/--no-protect", help="Whether retention waits for it.")]

_FIELDS = {
    "max_retries": "max_retries",
    "backoff": "backoff_seconds",
    "backoff_max": "backoff_seconds_max",
    "jitter": "jitter",
    "exhausted": "exhausted",
    "window": "window_events",
    "window_bytes": "window_bytes",
    "read_events": "read_events",
    "read_bytes": "read_bytes",
    "parked_max": "parked_max",
}
"""The options whose values are stored as they are, and the fields that they set."""


def changes_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the options of a command change; `options` is its `context.params`."""
    changes = {field: options[name] for name, field in _FIELDS.items() if options.get(name) is not None}
    if options.get("timeout") is not None:
        changes["timeout_seconds"] = options["timeout"] or None
    if options.get("rate") is not None:
        changes["rate_per_second"] = options["rate"] or None
    if options.get("heartbeat") is not None:
        changes["heartbeat_seconds"] = _heartbeat(options["heartbeat"])
    if options.get("checkpoint") is not None:
        changes["checkpoint_events"], changes["checkpoint_seconds"] = options["checkpoint"]
    return changes


def _heartbeat(text: str) -> float | None:
    from penstock.engine.policy import heartbeat_seconds

    try:
        return duration(text)
    except typer.BadParameter:
        try:
            return heartbeat_seconds(text)
        except UsageError as error:
            raise UsageError(f"--heartbeat: {error}") from None


# --- shown ----------------------------------------------------------------------------------------


def policy_document(subscription: Subscription) -> dict[str, Any]:
    """Return every field with its value, and whether that is the default."""
    from dataclasses import asdict

    from penstock.engine.policy import Policy

    defaults = asdict(Policy())
    # What a later version has stored is shown, too, though it means nothing here.
    policy = {**subscription.policy, **asdict(Policy.of(subscription.policy))}
    ordered = [*defaults, *sorted(policy.keys() - defaults.keys())]
    return {
        name: {"value": policy[name], "default": name in defaults and policy[name] == defaults[name]}
        for name in ordered
    }


def policy_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the same for people."""
    return [
        (name, shown_value(name, each["value"]), "default" if each["default"] else "set")
        for name, each in document.items()
    ]


def shown_value(field: str, value: Any) -> str:
    """Return the value of a field as a person reads it."""
    if value is None:
        return "off" if field == "heartbeat_seconds" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_bytes"):
        return shown_size(value)
    if field.endswith(("_seconds", "_seconds_max")):
        return f"{value:,g} s"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
