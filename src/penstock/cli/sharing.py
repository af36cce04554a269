"""Who shares a subscription: the processes that have consumers of it, and the slots of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from penstock.cli.output import print_table, shown_text
from penstock.engine.share import SLOTS
from penstock.rows import ParkedFilter
from penstock.runtime.subscriptions import members_prefix, slots_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ports import Store
    from penstock.rows import TopicInfo

NOBODY = ""
"""Has the slots that are free, on their way from one owner to the next."""


def processes(store: Store, info: TopicInfo, name: str) -> list[dict[str, Any]]:
    """Return for each process its consumers, its slots with their epochs, and how many of their events wait aside."""
    slots, epochs = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    consumers = defaultdict[str, list[str]](list)
    prefix = slots_prefix(info.log_id, name)
    free = set(range(SLOTS))
    for lease in store.leases.held(prefix):
        process = lease.under.lease if lease.under else lease.owner
        slot = int(lease.name.removeprefix(prefix))
        slots[process].append(slot)
        epochs[process].append(lease.epoch)
        free.discard(slot)
    if free:
        slots[NOBODY] = sorted(free)
    for lease in store.leases.held(members_prefix(info.log_id, name)):
        consumers[lease.under.lease if lease.under else lease.owner].append(lease.owner)
    waiting = ParkedFilter(log_id=info.log_id, subscription=name, states=frozenset({"waiting"}))
    parked = Counter(row.shard.slot for row in store.parked.waiting(waiting))
    return [
        {
            "process": process or None,
            "consumers": sorted(consumers[process]),
            "slots": sorted(slots[process]),
            "epochs": [min(epochs[process]), max(epochs[process])] if epochs[process] else None,
            "parked": sum(parked[slot] for slot in slots[process]),
        }
        for process in sorted({*slots, *consumers})
    ]


def print_processes(found: list[dict[str, Any]]) -> None:
    """Print who shares a subscription, for people."""
    print_table(
        ("process", "consumers", "slots", "which", "epochs", "parked"),
        [
            (
                "nobody yet" if each["process"] is None else shown_text(each["process"]),
                ", ".join(map(shown_text, each["consumers"])) or "-",
                str(len(each["slots"])),
                _ranges(each["slots"]),
                "-" if each["epochs"] is None else "-".join(map(str, dict.fromkeys(each["epochs"]))),
                str(each["parked"]),
            )
            for each in found
        ],
        numbers={"slots", "parked"},
    )


def _ranges(numbers: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans) or "-"
