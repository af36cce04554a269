"""Subscriptions as rows: creating and changing them, where they begin, how far they are behind, and moving them.

Plain functions over a store, for the bus, for the command line and for tools. Nothing here needs a consumer to run; one
that does sees every change, in whichever process it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.batch import Batch
from penstock.clock import datetime_to_us
from penstock.engine.lag import LagInfo, lag_of
from penstock.engine.messages import Step
from penstock.engine.policy import Policy
from penstock.engine.states import Outcome
from penstock.errors import (
    IntegrityError,
    OffsetOutOfRange,
    StaleCursor,
    StoreError,
    SubscriptionMismatch,
    UnknownSubscription,
    UsageError,
)
from penstock.events import check_name
from penstock.offsets import Bitmap, Gap, Range, RangeSet
from penstock.rows import Commit, Cursor, Parked, ParkedFilter, Partition, Shard, Subscription
from penstock.runtime.ledger import record_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.ports import Store
    from penstock.rows import TopicInfo

logger = logging.getLogger(__name__)

Start: TypeAlias = "Literal['earliest', 'latest'] | int | datetime | Mapping[int, int]"
"""Where to begin: by name, at an offset (or offsets by partition), or at a time of appending."""

CLAIMED: Final = "shared"
"""The mode in which events go to whoever asks."""
SHARED: Final = ("key_shared", CLAIMED)
"""Modes in which several consumers have a subscription at a time."""
MODES: Final = ("exclusive", "failover", *SHARED)
DEFAULT_MODE: Final = "key_shared"
ROWS_AT_A_TIME: Final = 1_000
SEEK_TRIES: Final = 100
"""How often a seek is tried while the owner goes on to write."""
SLOT: Final = 0
"""The only slot of a subscription whose shards are its partitions."""


MEMBERS: Final = "member/"


def members_prefix(log_id: str, name: str) -> str:
    """Return how the names of the leases begin that say which consumers share a subscription."""
    return f"{MEMBERS}{log_id}/{name}/"


def subscription_of(member: str) -> str:
    """Return the part of the name of a consumer's lease that is its subscription's; the rest may be anything."""
    return member[: len(member) - len(member.split("/", 3)[3])]


def slots_prefix(log_id: str, name: str) -> str:
    """Return how the names of the leases of its slots begin; the number of the slot follows."""
    return f"slot/{log_id}/{name}/"


def shards_prefix(log_id: str, name: str) -> str:
    """Return how the names of the leases of its shards and berths begin; slot and partition follow."""
    return f"shard/{log_id}/{name}/"


def shard_lease(shard: Shard) -> str:
    """Return the name of the lease of a shard, or of a berth."""
    return f"{shards_prefix(shard.log_id, shard.subscription)}{shard.slot}/{shard.partition}"


def shard_of(topic: TopicInfo, name: str, partition: int) -> Shard:
    """Return the shard that has a whole partition."""
    return Shard(topic.log_id, name, SLOT, partition)


def ensure(
    store: Store,
    topic: TopicInfo,
    name: str,
    *,
    mode: str | None,
    changes: Mapping[str, Any],
    start: Start,
    protect: bool | None,
    now_us: int,
) -> tuple[Subscription, bool]:
    """Return the subscription, and whether it was created because it did not exist.

    What `changes` says of its policy holds from now on; all else stays as it was. `start` matters to a new one alone.
    Without a mode it is the one that it has.
    """
    check_name("subscription", name)
    if mode is not None and mode not in MODES:
        raise UsageError(f"a subscription's mode is one of {', '.join(MODES)}, not {mode!r}")
    found = store.cursors.subscription(topic.log_id, name)
    if found is not None:
        if mode is not None and found.mode != mode:
            raise SubscriptionMismatch(
                f"subscription {name!r} of topic {topic.name!r} has mode {found.mode!r}, not {mode!r}: use that one or "
                f"another name, or change it: `penstock subscriptions set {topic.name} {name} --mode {mode}`"
            )
        policy = Policy.of(found.policy).changed(changes)
        wanted = msgspec.structs.replace(
            found,
            policy={**found.policy, **_differences(found.policy, policy)},
            protect=found.protect if protect is None else protect,
        )
        if wanted != found:
            store.cursors.put_subscription(wanted, existing=True)
        return wanted, False
    policy = Policy().changed(changes)
    places = positions(store, topic, start)
    if isinstance(start, Mapping):
        # A partition without a cursor would be nobody's: those that are not named begin at the beginning.
        places = positions(store, topic, "earliest") | places
    subscription = Subscription(
        log_id=topic.log_id,
        name=name,
        mode=mode or DEFAULT_MODE,
        policy=policy.stored(),
        protect=protect is not False,
        created_at=now_us,
    )
    cursors = [
        Cursor(shard=shard_of(topic, name, number), next_offset=offset) for number, offset in sorted(places.items())
    ]
    store.cursors.put_subscription(subscription, cursors)
    return subscription, True


def _differences(stored: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """Return what a stored policy must say to be this one; what it knows and we do not is left alone."""
    before = asdict(Policy.of(stored))
    return {name: value for name, value in asdict(policy).items() if value != before[name]}


def find(store: Store, topic: TopicInfo, name: str) -> Subscription:
    """Return a subscription; `UnknownSubscription` if there is none."""
    found = store.cursors.subscription(topic.log_id, name)
    if found is None:
        raise UnknownSubscription(topic.log_id, name, topic=topic.name)
    return found


def change(store: Store, topic: TopicInfo, name: str, changes: Mapping[str, Any]) -> Subscription:
    """Change the policy of a subscription, whoever runs it."""
    found = find(store, topic, name)
    if found.external:
        raise SubscriptionMismatch(f"subscription {name!r} is driven from outside: it has no policy here")
    policy = Policy.of(found.policy).changed(changes)
    wanted = msgspec.structs.replace(found, policy={**found.policy, **_differences(found.policy, policy)})
    store.cursors.put_subscription(wanted, existing=True)
    return wanted


def resume(store: Store, topic: TopicInfo, name: str) -> Subscription:
    """Let a subscription that was paused, or has halted, go on."""
    policy = Policy.of(find(store, topic, name).policy)
    return change(store, topic, name, {"paused": False, "resumes": policy.resumes + 1})


# --- places -----------------------------------------------------------------------------------


def positions(store: Store, topic: TopicInfo, start: Start, partition: int | None = None) -> dict[int, int]:
    """Return the offset of each partition, or of one, that a start means now."""
    wanted = topic.partitions if partition is None else [_partition(topic, partition)]
    if isinstance(start, Mapping):
        unknown = [number for number in start if number not in {each.number for each in wanted}]
        if unknown:
            raise UsageError(
                f"topic {topic.name!r} has the partitions 0 to {len(topic.partitions) - 1}, not {unknown[0]}"
            )
        chosen = [each for each in wanted if each.number in start]
        return {each.number: _bounded(store, topic, each, start[each.number]) for each in chosen}
    if isinstance(start, int) and len(wanted) > 1:
        raise UsageError(f"topic {topic.name!r} has {len(wanted)} partitions: say which one offset {start} is of")
    return {each.number: _position(store, topic, each, start) for each in wanted}


def _partition(topic: TopicInfo, number: int) -> Partition:
    if not 0 <= number < len(topic.partitions):
        raise UsageError(f"topic {topic.name!r} has the partitions 0 to {len(topic.partitions) - 1}, not {number}")
    return topic.partitions[number]


def _position(store: Store, topic: TopicInfo, partition: Partition, start: Start) -> int:
    if isinstance(start, datetime):
        return store.log.find_time(partition, datetime_to_us(start))
    if isinstance(start, int) and not isinstance(start, bool):
        return _bounded(store, topic, partition, start)
    if start in {"earliest", "latest"}:
        bounds = store.log.bounds(partition)
        return bounds.start if start == "earliest" else bounds.stop
    raise UsageError(f"a start is 'earliest', 'latest', an offset, a datetime or offsets by partition, not {start!r}")


def _bounded(store: Store, topic: TopicInfo, partition: Partition, offset: int) -> int:
    bounds = store.log.bounds(partition)
    if not bounds.start <= offset <= bounds.stop:
        raise UsageError(f"{topic.name}/{partition.number} holds offsets {bounds}; {offset} is not among them")
    return offset


# --- moving -----------------------------------------------------------------------------------


def seek(
    store: Store, topic: TopicInfo, name: str, to: Start, *, partition: int | None = None, now_us: int
) -> dict[int, tuple[int, int]]:
    """Move a subscription, whoever runs it; returns for each partition where it was and where it is.

    What it passes over is settled as skipped, what waits aside with it; everything from the new place on is delivered,
    also what was settled ahead before. Dead letters stay. Whoever has the events in hand at this moment finds that they
    are not its any more.
    """
    subscription = find(store, topic, name)
    if subscription.external:
        raise SubscriptionMismatch(f"subscription {name!r} is driven from outside: it is moved there")
    places = positions(store, topic, to, partition)
    moved = {}
    for cursor in store.cursors.load(topic.log_id, name):
        number = cursor.shard.partition
        if number in places:
            moved[number] = (_seek_shard(store, cursor, places[number], now_us), places[number])
    return moved


def _seek_shard(store: Store, cursor: Cursor, to: int, now_us: int) -> int:
    """Move a shard, and return where it was; should its owner write between look and commit, it is looked at again."""
    for tries in count(1):
        try:
            _try_to_seek(store, cursor, to, now_us)
            break
        except StaleCursor:
            known = store.cursors.load(cursor.shard.log_id, cursor.shard.subscription)
            now = next((each for each in known if each.shard == cursor.shard), cursor)
            if tries == SEEK_TRIES or now.generation != cursor.generation:
                raise  # somebody else has moved it
            cursor = now
    return cursor.next_offset


def _try_to_seek(store: Store, cursor: Cursor, to: int, now_us: int) -> None:
    shard = cursor.shard
    wanted = ParkedFilter(
        log_id=shard.log_id,
        subscription=shard.subscription,
        states=frozenset({"waiting"}),
        partition=shard.partition,
    )
    rows = store.parked.page(wanted, limit=ROWS_AT_A_TIME)
    _check(store.cursors.commit([_seek_commit(cursor, to, rows, now_us)]))
    while len(rows) == ROWS_AT_A_TIME:
        # A crash before these leads to duplicates, never to a loss: the cursor has moved.
        rows = store.parked.page(wanted, limit=ROWS_AT_A_TIME)
        [moved] = [each for each in store.cursors.load(shard.log_id, shard.subscription) if each.shard == shard]
        _check(store.cursors.commit([_skip_commit(moved, to, rows, now_us)]))


def _skip_commit(cursor: Cursor, to: int, rows: Sequence[Parked], now_us: int) -> Commit:
    """Return the commit that lets rows be done that a seek has passed over; the cursor stays."""
    skipped = RangeSet(Range(row.offset, row.offset + 1) for row in rows if row.offset < to)
    step = Step(
        number=cursor.number + 1,
        generation=cursor.generation,
        begin=cursor.next_offset,
        next_offset=cursor.next_offset,
        settled=cursor.settled,
        attempts=dict(cursor.attempts),
        parks=(),
        outcomes={Outcome.SKIPPED: skipped},
        latencies=(),
        retried=0,
    )
    record = record_of(cursor.shard, step, now_us)
    moved = msgspec.structs.replace(cursor, number=step.number if record else cursor.number)
    return Commit(cursors=(moved,), parked=_done(rows), settlement=record)


def _seek_commit(cursor: Cursor, to: int, rows: Sequence[Parked], now_us: int) -> Commit:
    begin = cursor.next_offset
    skipped = RangeSet()
    if to > begin:
        skipped = Bitmap.from_bytes(begin, cursor.settled).unset_in(Range(begin, to))
    for row in rows:
        if row.offset < to:
            skipped.add(Range(row.offset, row.offset + 1))
    step = Step(
        number=cursor.number + 1,
        generation=cursor.generation + 1,
        begin=begin,
        next_offset=to,
        settled=b"",
        attempts={},
        parks=(),
        outcomes={Outcome.SKIPPED: skipped},
        latencies=(),
        retried=0,
    )
    record = record_of(cursor.shard, step, now_us)
    moved = Cursor(
        shard=cursor.shard,
        next_offset=to,
        generation=step.generation,
        number=step.number if record else cursor.number,
    )
    return Commit(cursors=(moved,), parked=_done(rows), settlement=record)


def _done(rows: Sequence[Parked]) -> tuple[Parked, ...]:
    return tuple(msgspec.structs.replace(row, state="done") for row in rows)


def _check(answers: Sequence[StoreError | None]) -> None:
    for answer in answers:
        if answer is not None:
            raise answer


# --- lag --------------------------------------------------------------------------------------


Look: TypeAlias = "Callable[[Store, Partition, int, Callable[[IntegrityError], None]], FirstEvent]"


def _warn_of(damage: IntegrityError) -> None:
    logger.warning("how old the event at a cursor is cannot be told: %s", damage)


def slowest_cursors(store: Store, topic: TopicInfo, name: str) -> dict[int, Cursor]:
    """Return the cursor of each partition that has one; of several, the one that has passed least."""
    slowest: dict[int, Cursor] = {}
    for cursor in store.cursors.load(topic.log_id, name):
        number = cursor.shard.partition
        if number not in slowest or cursor.next_offset < slowest[number].next_offset:
            slowest[number] = cursor
    return slowest


def lag(
    store: Store,
    topic: TopicInfo,
    subscription: Subscription,
    now_us: int,
    *,
    damaged: Callable[[IntegrityError], None] = _warn_of,
    cursors: Mapping[int, Cursor] | None = None,
    look: Look | None = None,
) -> list[LagInfo]:
    """Return how far a subscription is behind, partition by partition; the slowest shard of each counts.

    If the event at a cursor cannot be read, `damaged` is told, its age is 0, and the other figures are right. Whoever
    has loaded the `slowest_cursors` already gives them, and another `first_event` if it remembers what it has seen.
    """
    look = look or first_event
    slowest = slowest_cursors(store, topic, subscription.name) if cursors is None else cursors
    found = []
    for partition in topic.partitions:
        bounds = store.log.bounds(partition)
        cursor_here = slowest.get(partition.number)
        next_offset = bounds.start if cursor_here is None else cursor_here.next_offset
        settled = 0
        if cursor_here is not None and cursor_here.settled:
            settled = Bitmap.from_bytes(next_offset, cursor_here.settled).count
        rows = store.parked.count(
            ParkedFilter(log_id=topic.log_id, subscription=subscription.name, partition=partition.number)
        )
        left = lag_of(next_offset, bounds.stop)
        appended_at = look(store, partition, next_offset, damaged).appended_at if left else None
        found.append(
            LagInfo(
                topic=topic.name,
                subscription=subscription.name,
                partition=partition.number,
                next_offset=next_offset,
                head=bounds.stop,
                lag=left,
                unsettled=max(left - settled, 0),
                parked=rows["waiting"],
                dead=rows["dead"],
                oldest_seconds=0.0 if appended_at is None else max(now_us - appended_at, 0) / 1_000_000,
                external=subscription.external,
            )
        )
    return found


class FirstEvent(NamedTuple):
    """What is known of the event at an offset, or of the first one behind a hole; nothing if it cannot be read."""

    appended_at: int | None = None
    slot: int | None = None
    hole: Gap | None = None
    """The hole at the offset, if there is one."""


def first_event(
    store: Store, partition: Partition, offset: int, damaged: Callable[[IntegrityError], None]
) -> FirstEvent:
    """Look at the first event at or after an offset; damage is told, not raised."""
    start = store.log.bounds(partition).start
    hole = Gap(offset, start, "trimmed") if offset < start else None
    try:
        items = store.log.read(partition, max(offset, start), bytes_max=1, events_max=1)
    except OffsetOutOfRange:
        return FirstEvent()  # trimmed in this moment
    except IntegrityError as damage:
        damaged(damage)
        return FirstEvent()
    hole = hole or next((item for item in items[:1] if isinstance(item, Gap)), None)
    for item in items:
        if isinstance(item, Batch) and item.place is not None:
            return FirstEvent(item.place.appended_at, int(item.slots()[0]), hole)
    return FirstEvent(hole=hole)
