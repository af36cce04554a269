"""Who shares a subscription, as `penstock subscriptions show` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cli.output import print_table, shown_text
from penstock.rows import ParkedFilter
from penstock.runtime.subscriptions import CLAIMED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ports import Store
    from penstock.rows import Cursor, Subscription, TopicInfo


def documents_of(
    store: Store, info: TopicInfo, subscription: Subscription, cursors: dict[int, Cursor]
) -> list[dict[str, Any]]:
    """Return for each process its consumers, what it has, its leases' epochs, and how many of its events wait aside."""
    from msgspec import to_builtins

    from penstock.runtime.sharing import parts_of

    waiting = ParkedFilter(log_id=info.log_id, subscription=subscription.name, states=frozenset({"waiting"}))
    parts = parts_of(store, info, subscription, cursors.values(), store.parked.waiting(waiting))
    return [dict(to_builtins(part)) for part in parts]


def print_processes(mode: str, found: list[dict[str, Any]]) -> None:
    """Print who shares a subscription, for people."""
    had = ("berths", "claimed") if mode == CLAIMED else ("slots", "due", "which")
    print_table(
        ("process", "consumers", *had, "epochs", "parked"),
        [
            (
                "nobody yet" if each["process"] is None else shown_text(each["process"]),
                ", ".join(map(shown_text, each["consumers"])) or "-",
                *(
                    (", ".join(each["berths"]) or "-", f"{each['claimed']:,}")
                    if mode == CLAIMED
                    else (str(len(each["slots"])), str(each["due"]), _ranges(each["slots"]))
                ),
                "-" if each["epochs"] is None else "-".join(map(str, dict.fromkeys(each["epochs"]))),
                str(each["parked"]),
            )
            for each in found
        ],
        numbers={"slots", "due", "claimed", "parked"},
    )


def _ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans) or "-"
