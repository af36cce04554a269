"""Who shares a subscription: the processes that have consumers of it, what each of them has, and why nothing moves."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from penstock.cli.output import print_table, shown_text
from penstock.engine.share import SLOTS
from penstock.rows import ParkedFilter, Shard
from penstock.runtime.slots import dues
from penstock.runtime.subscriptions import CLAIMED, members_prefix, shards_prefix, slots_prefix
from penstock.settling import NOBODY as FREE
from penstock.settling import unsettled

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.ports import Store
    from penstock.rows import Lease, Subscription, TopicInfo

NOBODY = ""
"""Has what is free, on its way from one owner to the next."""


def processes(store: Store, info: TopicInfo, subscription: Subscription) -> list[dict[str, Any]]:
    """Return for each process its consumers, what it has, its leases' epochs, and how many of its events wait aside."""
    name = subscription.name
    leases: defaultdict[str, list[Lease]] = defaultdict(list)
    for lease in store.leases.held(members_prefix(info.log_id, name)):
        leases[_process(lease)].append(lease)
    waiting = ParkedFilter(log_id=info.log_id, subscription=name, states=frozenset({"waiting"}))
    parked = Counter(row.shard for row in store.parked.waiting(waiting))
    found = (_with_berths if subscription.mode == CLAIMED else _with_slots)(store, info, name, leases, parked)
    return [
        {
            "process": process or None,
            "consumers": sorted(lease.owner for lease in leases[process]),
            **found[process],
        }
        for process in sorted(found)
    ]


def _process(lease: Lease) -> str:
    return lease.under.lease if lease.under else lease.owner


def _with_slots(
    store: Store, info: TopicInfo, name: str, consumers: dict[str, list[Lease]], parked: Counter[Shard]
) -> dict[str, dict[str, Any]]:
    prefix = slots_prefix(info.log_id, name)
    slots, epochs = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    free = set(range(SLOTS))
    for lease in store.leases.held(prefix):
        slot = int(lease.name.removeprefix(prefix))
        slots[_process(lease)].append(slot)
        epochs[_process(lease)].append(lease.epoch)
        free.discard(slot)
    if free:
        slots[NOBODY] = sorted(free)
    aside = Counter[int]()
    for shard, count in parked.items():
        aside[shard.slot] += count
    everyone = [lease.name for leases in consumers.values() for lease in leases]
    due = dues(everyone) if everyone else {}
    return {
        process: {
            "slots": sorted(slots[process]),
            "due": sum(due[lease.name] for lease in consumers.get(process, ())),
            "epochs": [min(epochs[process]), max(epochs[process])] if epochs[process] else None,
            "parked": sum(aside[slot] for slot in slots[process]),
        }
        for process in {*slots, *consumers}
    }


def _with_berths(
    store: Store, info: TopicInfo, name: str, consumers: dict[str, list[Lease]], parked: Counter[Shard]
) -> dict[str, dict[str, Any]]:
    prefix = shards_prefix(info.log_id, name)
    owners = {lease.name.removeprefix(prefix): lease for lease in store.leases.held(prefix)}
    claimed = Counter[Shard]()
    for cursor in store.cursors.load(info.log_id, name):
        for berth in cursor.claims:
            claimed[cursor.shard._replace(slot=berth)] = len(unsettled(cursor, berth))
    found: dict[str, dict[str, Any]] = {
        process: {"berths": [], "claimed": 0, "epochs": None, "parked": 0} for process in consumers
    }
    berths = {Shard(info.log_id, name, *map(int, place.split("/"))): lease for place, lease in owners.items()}
    for shard in sorted({*berths, *(shard for shard, count in (claimed + parked).items() if count)}):
        lease = berths.get(shard)
        process = NOBODY if lease is None else _process(lease)
        here = found.setdefault(process, {"berths": [], "claimed": 0, "epochs": None, "parked": 0})
        here["claimed"] += claimed[shard]
        here["parked"] += parked[shard]
        if shard.slot != FREE:
            here["berths"].append(f"{shard.slot}/{shard.partition}")
        if lease is not None:
            low, high = here["epochs"] or (lease.epoch, lease.epoch)
            here["epochs"] = [min(low, lease.epoch), max(high, lease.epoch)]
    return found


def reasons(document: dict[str, Any]) -> list[str]:
    """Return why a subscription, or a part of it, does not move, as far as the store can tell."""
    found = []
    behind = document["unsettled"] or document["parked"]
    if document["external"]:
        return []
    if document["paused"]:
        found.append(f"it is paused: `penstock resume {document['topic']} {document['name']}` lets it go on")
    consumed = any(each["consumers"] for each in document["sharing"]) or any(
        each["owner"] for each in document["partitions"]
    )
    if behind and not consumed:
        found.append("nobody consumes it")
    for each in document["sharing"]:
        process = "nobody" if each["process"] is None else shown_text(each["process"])
        extra = len(each.get("slots", ())) - each.get("due", 0)
        if each["process"] is not None and extra > 0:
            found.append(f"{process} has {extra} slots more than its due: each goes when its handlers are done")
        elif each["process"] is None and consumed and (each.get("slots") or each["claimed"] or each["parked"]):
            what = f"{len(each['slots'])} slots" if "slots" in each else f"{each['claimed']:,} claimed events"
            found.append(f"{what} have no owner at the moment: whoever is there takes them within a second")
    return found


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
