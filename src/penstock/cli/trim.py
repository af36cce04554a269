"""`penstock trim`: removing a partition's oldest events by hand; it first shows what would go, and who needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import Yes, print_table
from penstock.cli.session import Session, find_topic
from penstock.errors import BeyondEnd, TrimRefused, UsageError

if TYPE_CHECKING:
    from penstock.ports import Store
    from penstock.rows import Partition, TopicInfo


def trim(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")],
    *,
    before: Annotated[int, typer.Option(min=0, metavar="OFFSET", help="Events below this offset may go.")],
    partition: Annotated[int | None, typer.Option(min=0, metavar="N", help="The partition of the offset.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also what a subscription has not passed.")] = False,
    yes: Yes = False,
) -> None:
    """Remove the oldest events of a partition; without --yes show what would go.

    Whole files are removed, so that somewhat more may be kept than is asked for.
    """
    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        chosen = chosen_partition(info, partition)
        if yes:
            try:
                first = store.log.trim(chosen, before, force=force)
            except TrimRefused as error:
                raise TrimRefused(f"{error}; --force removes them all the same") from None
            print(f"{topic}/{chosen.number} begins at {first}")
            return
        _preview(store, info, chosen, before, force=force)
    raise UsageError("nothing was removed: give --yes to do it")


def chosen_partition(info: TopicInfo, number: int | None) -> Partition:
    """Return the partition that is meant; without a number it is the only one."""
    count = info.settings.partitions
    if number is None and count > 1:
        raise UsageError(f"topic {info.name!r} has {count} partitions: say with --partition which the offset is of")
    if number is not None and number >= count:
        raise UsageError(f"topic {info.name!r} has the partitions 0 to {count - 1}, not {number}")
    return info.partitions[number or 0]


def _preview(store: Store, info: TopicInfo, partition: Partition, before: int, *, force: bool) -> None:
    """Print what would go; `BeyondEnd` if that would be refused with --yes as well."""
    bounds = store.log.bounds(partition)
    if before > bounds.stop:
        raise BeyondEnd.at(f"{info.name}/{partition.number}", before, bounds.start, bounds.stop)
    goes = max(before - bounds.start, 0)
    print_table(
        ("partition", "first", "end", "before", "events that may go"),
        [(f"{info.name}/{partition.number}", str(bounds.start), str(bounds.stop), str(before), f"{goes:,}")],
        numbers={"first", "end", "before", "events that may go"},
    )
    rows = []
    in_the_way = "no, but by --force" if force else "no: --force is needed"
    for name, passed in _protected(store, partition, bounds.start):
        rows.append((name, str(passed), "yes" if passed >= before else in_the_way))
    if rows:
        print()
        print_table(("protected subscription", "has passed", "lets them go"), rows, numbers={"has passed"})


def _protected(store: Store, partition: Partition, first: int) -> list[tuple[str, int]]:
    """Return the subscriptions that retention waits for, and how far each has come in the partition."""
    found = []
    for subscription in store.cursors.subscriptions(partition.log_id):
        if subscription.protect:
            cursors = store.cursors.load(partition.log_id, subscription.name)
            offsets = [cursor.next_offset for cursor in cursors if cursor.shard.partition == partition.number]
            found.append((subscription.name, min(offsets, default=first)))
    return found
