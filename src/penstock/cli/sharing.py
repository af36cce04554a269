"""Who shares a subscription, and what each process has in hand, as `penstock subscriptions show` prints it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.cli.output import print_table, shown_age, shown_text
from penstock.rows import ParkedFilter
from penstock.runtime.subscriptions import CLAIMED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.ports import Store
    from penstock.rows import Cursor, Subscription, TopicInfo
    from penstock.runtime.telling import Doing

PLACES_SHOWN: Final = 8
"""Of those where a process has something in hand; programs get all."""


def documents_of(
    store: Store, info: TopicInfo, subscription: Subscription, cursors: dict[int, Cursor]
) -> list[dict[str, Any]]:
    """Return for each process its consumers, what it has, its leases' epochs, and how many of its events wait aside."""
    from msgspec import to_builtins

    from penstock.runtime.sharing import parts_of

    waiting = ParkedFilter(log_id=info.log_id, subscription=subscription.name, states=frozenset({"waiting"}))
    parts = parts_of(store, info, subscription, cursors.values(), store.parked.waiting(waiting))
    return [dict(to_builtins(part)) for part in parts]


def in_hand_of(store: Store, info: TopicInfo, name: str, now_us: int) -> list[dict[str, Any]]:
    """Return for each process what it has in hand of a subscription, as it tells itself, and how long ago it did."""
    from penstock.runtime.sharing import consumers_of, process_of
    from penstock.runtime.telling import hear

    consumers = consumers_of(store, info, name)
    found = []
    for heard in hear(store, now_us):
        doing = heard.of(info.log_id, name)
        if doing is not None:
            process = heard.document.process
            found.append(
                {
                    "process": process,
                    "pid": heard.document.pid,
                    "consumers": [lease.owner for lease in consumers if process_of(lease) == process],
                    "told_seconds_ago": heard.age_seconds,
                    "silent": heard.silent,
                    "present": heard.present,
                    **_doing_document(doing, now_us),
                }
            )
    return found


def _doing_document(doing: Doing, now_us: int) -> dict[str, Any]:
    from msgspec import to_builtins

    def aged(row: Any) -> dict[str, Any]:
        fields = dict(to_builtins(row))
        return fields | {"seconds": max(now_us - fields.pop("since_us"), 0) / 1_000_000}

    shards = [aged(each) for each in doing.shards]
    return {
        "in_flight": doing.in_flight,
        "oldest_seconds": max((each["seconds"] for each in shards), default=None),
        "shards": shards,
        "handlers": [aged(each) for each in doing.handlers],
        "handlers_long": doing.handlers_long,
        "staying": [aged(each) for each in doing.staying],
    }


def hindrances(topic: str, found: Iterable[dict[str, Any]]) -> list[str]:
    """Return in words why something does not move, as far as processes tell, and which of them tell nothing more."""
    words = []
    for each in found:
        process, age = each["process"], shown_age(each["told_seconds_ago"])
        for staying in each["staying"]:
            slots, seconds = _ranges(staying["slots"]), shown_age(staying["seconds"])
            why = "; ".join(_why_staying(topic, each, staying))
            words.append(f"{process}: slots {slots} are another process's due for {seconds}, and stay: {why}")
        if each["silent"]:
            words.append(f"{process} has told nothing for {age}: it is stopped, or something blocks its event loop")
        if not each["present"]:
            words.append(f"{process} has not renewed its lease in time: what it has in hand may be given to others")
    return words


def _why_staying(topic: str, process: dict[str, Any], staying: dict[str, Any]) -> Iterator[str]:
    named = [each for each in process["handlers"] if each["slot"] in staying["slots"]]
    yield from (f"handler {each['handler']} has not ended at {_place(topic, each)}" for each in named)
    if staying["in_hand"] and not named:
        yield "some of their events are in hand"
    elif not staying["in_hand"]:
        yield f"what was settled is not written{': ' if staying['trouble'] else ''}{staying['trouble']}"


def _place(topic: str, handler: dict[str, Any]) -> str:
    return f"{topic}/{handler['partition']}@{handler['offset']}"


def print_in_hand(topic: str, found: list[dict[str, Any]]) -> None:
    """Print what each process has in hand, and the handlers that take long, for people."""
    print_table(
        ("process", "pid", "in flight", "oldest", "where", "told"),
        [
            (
                shown_text(each["process"]),
                str(each["pid"]),
                f"{each['in_flight']:,}",
                "-" if each["oldest_seconds"] is None else shown_age(each["oldest_seconds"]),
                _places(each["shards"]),
                f"{shown_age(each['told_seconds_ago'])} ago",
            )
            for each in found
        ],
        numbers={"pid", "in flight", "oldest"},
    )
    rows = [(each, handler) for each in found for handler in each["handlers"]]
    if rows:
        print()
        print_table(
            ("handler", "runs for", "at", "slot", "process", "besides"),
            [
                (
                    shown_text(handler["handler"]),
                    shown_age(handler["seconds"]),
                    _place(topic, handler),
                    "-" if handler["slot"] is None else str(handler["slot"]),
                    shown_text(each["process"]),
                    handler["how"] or "-",
                )
                for each, handler in rows
            ],
            numbers={"runs for", "slot"},
        )
    more = sum(each["handlers_long"] - len(each["handlers"]) for each in found)
    if more:
        print(f"and {more:,} handlers more that take long")


def _places(shards: list[dict[str, Any]]) -> str:
    """Return where something is in hand, as `slot/partition` where there are slots or berths."""
    places = [
        str(each["partition"]) if each["slot"] is None else f"{each['slot']}/{each['partition']}" for each in shards
    ]
    more = len(places) - PLACES_SHOWN
    return ", ".join(places[:PLACES_SHOWN]) + (f" and {more} more" if more > 0 else "") or "-"


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
