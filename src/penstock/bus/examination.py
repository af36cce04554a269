"""Examination: what the store, and this process, can tell of a subscription at one moment. See `health`.

Plain functions over a store, for the bus and for the command line; no consumer is needed, and nothing is changed. What
is found is judged by `judgement`, which does no I/O. A `History` remembers the look before: it makes rates of counts,
and tells a cursor that was moved from one that was only written.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.bus.health import (
    LANES_SHOWN,
    UPGRADE,
    BlockedLane,
    ConsumerHealth,
    HaltedAt,
    Health,
    MemberHealth,
    StoreHealth,
    SubscriptionHealth,
    worst,
)
from penstock.bus.judgement import Facts, Here, PartitionFacts, duration, judge, judge_store
from penstock.clock import us_to_datetime
from penstock.engine.policy import Policy
from penstock.engine.suspects import MARKED
from penstock.errors import IntegrityError, TopicDeleted
from penstock.ports import Inspectable
from penstock.rows import ParkedFilter
from penstock.runtime import sharing, telling
from penstock.runtime.subscriptions import CLAIMED, first_event, lag, slowest_cursors
from penstock.settings import redact_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.engine.lag import LagInfo
    from penstock.ports import Store
    from penstock.rows import Cursor, Lease, Parked, Partition, Subscription, TopicInfo, Waiting
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.subscriptions import FirstEvent

Key = tuple[str, str]
"""Of a subscription: its log and its name."""


# --- what was seen before ---------------------------------------------------------------------


class _Stand(NamedTuple):
    """Where a cursor was."""

    position: tuple[int, int, bytes, int]
    """What changes with progress: its generation, its offset, what is settled ahead, and its last record."""
    moved_at: int
    seen_at: int
    """When it was first seen at this offset."""


class _Seen(NamedTuple):
    """What a look saw of a subscription."""

    at: int
    lag: int
    settled: int
    generations: int
    stands: dict[int, _Stand]


class History:
    """The last look at each subscription. As many are remembered as there are."""

    def __init__(self) -> None:
        self._seen: dict[Key, _Seen] = {}

    def stand(self, key: Key, cursor: Cursor, now_us: int) -> _Stand:
        """Return where a cursor stands, and since when as far as it is known."""
        position = (cursor.generation, cursor.next_offset, cursor.settled, cursor.number)
        seen = self._seen.get(key)
        before = None if seen is None else seen.stands.get(cursor.shard.partition)
        if before is None:
            return _Stand(position, cursor.updated_at, now_us)
        # What is written without a move is no progress: an attempt that failed, or a claim.
        moved_at = before.moved_at if before.position == position else cursor.updated_at
        return _Stand(position, moved_at, before.seen_at if before.position[:2] == position[:2] else now_us)

    def rates(self, key: Key, now: _Seen) -> tuple[float | None, float | None]:
        """Return how the lag grew and how much was settled in a second, since the last look."""
        before = self._seen.get(key)
        if before is None or now.at <= before.at:
            return None, None
        seconds = (now.at - before.at) / 1_000_000
        settled = (now.settled - before.settled) / seconds if now.generations == before.generations else None
        return (now.lag - before.lag) / seconds, settled

    def remember(self, looked_at: Sequence[TopicInfo], seen: Mapping[Key, _Seen], *, everything: bool) -> None:
        """Take what was seen for the last look, and forget what is not there any more."""
        logs = {info.log_id for info in looked_at}
        kept = {} if everything else {key: each for key, each in self._seen.items() if key[0] not in logs}
        self._seen = {**kept, **seen}


# --- this process -----------------------------------------------------------------------------


def here_of(dispatcher: Dispatcher | None) -> dict[Key, Here]:
    """Return what this process itself knows of the subscriptions that it consumes; called in its event loop."""
    found: dict[Key, Here] = {}
    for member in () if dispatcher is None else dispatcher.members:
        key = (member.topic.log_id, member.subscription.name)
        before = found.get(key, Here(dispatcher.presence.name if dispatcher else ""))
        in_flight, halted, trouble = before.in_flight, dict(before.halted), dict(before.trouble)
        for seat in member.seats:
            partition = seat.shard.partition
            for what, why in seat.trouble.items():
                trouble[f"{member.topic.name}/{partition}", what] = why
            if seat.engine is not None:
                in_flight += seat.engine.in_flight
                if seat.engine.halted is not None:
                    failure = seat.engine.halted.failure
                    halted[partition, seat.engine.halted.offset] = failure.kind
        found[key] = Here(before.process, in_flight, halted, trouble)
    return found


# --- a subscription ---------------------------------------------------------------------------


class Examiner:
    """One look at a store."""

    def __init__(
        self,
        store: Store,
        *,
        now_us: int,
        stalled_after: float,
        history: History | None = None,
        here: Mapping[Key, Here] | None = None,
    ) -> None:
        self._store = store
        self._now = now_us
        self._stalled_after = stalled_after
        self._history = history or History()
        self._here = here or {}
        self._first: dict[tuple[Partition, int], tuple[FirstEvent, list[IntegrityError]]] = {}
        self._heard: list[telling.Heard] | None = None
        """What processes tell, once it was asked for."""
        self.seen: dict[Key, _Seen] = {}
        self.damage: dict[str, None] = {}

    def topic(self, topic: TopicInfo) -> list[SubscriptionHealth]:
        """Return how the subscriptions of a topic do; of those whose state is damaged nothing can be said but that."""
        found = []
        try:
            for subscription in self._store.cursors.subscriptions(topic.log_id):
                try:
                    found.append(self.subscription(topic, subscription))
                except IntegrityError as error:
                    self.damage[str(error)] = None
        except TopicDeleted:
            return []  # while it was looked at
        except IntegrityError as error:
            self.damage[str(error)] = None
        return found

    def subscription(self, topic: TopicInfo, subscription: Subscription) -> SubscriptionHealth:
        """Return how a subscription does; `TopicDeleted` if its topic is gone."""
        store, name = self._store, subscription.name
        key = (topic.log_id, name)
        damages: list[str] = []

        def damaged(error: IntegrityError) -> None:
            damages.append(str(error))
            self.damage[str(error)] = None

        cursors = slowest_cursors(store, topic, name)
        lags = lag(store, topic, subscription, self._now, damaged=damaged, cursors=cursors, look=self._first_event)
        rows = store.parked.waiting(_rows(topic, name)) if any(each.parked for each in lags) else []
        policy = Policy.of(subscription.policy)
        stands = {number: self._history.stand(key, cursor, self._now) for number, cursor in cursors.items()}
        partitions = [
            self._partition(
                topic,
                subscription,
                each,
                cursor=cursors.get(each.partition),
                stand=stands.get(each.partition),
                rows=[row for row in rows if row.shard.partition == each.partition],
            )
            for each in lags
        ]
        here = self._here.get(key, Here())
        leases = sharing.consumers_of(store, topic, name)
        facts = Facts(
            topic=topic.name,
            subscription=subscription,
            policy=policy,
            now_us=self._now,
            stalled_after=self._stalled_after,
            partitions=partitions,
            consumed=bool(leases),
            used=any(cursor.number for cursor in cursors.values()) or any(each.parked or each.dead for each in lags),
            halted=_halted(policy, partitions, here, consumed=bool(leases)),
            lanes=_lanes(subscription, rows),
            upgrades=self._upgrades(topic, name) if rows else 0,
            parts=sharing.parts_of(store, topic, subscription, cursors.values(), rows),
            here=here,
            damages=damages,
        )
        return self._health(topic, facts, leases, stands)

    def _partition(
        self,
        topic: TopicInfo,
        subscription: Subscription,
        behind: LagInfo,
        *,
        cursor: Cursor | None,
        stand: _Stand | None,
        rows: Sequence[Waiting],
    ) -> PartitionFacts:
        partition = topic.partitions[behind.partition]
        at_cursor = hole = None
        whose = ""
        if behind.unsettled and not subscription.external:
            first = self._first_event(self._store, partition, behind.next_offset, _told_before)
            at_cursor, hole = first.appended_at, first.hole
            if cursor is not None:
                whose = sharing.whose(self._store, topic, subscription, cursor, first.slot)
                whose += self._running(topic, subscription.name, behind.partition, behind.next_offset)
        elif behind.lag:
            at_cursor = self._now - round(behind.oldest_seconds * 1_000_000)
        oldest_at = at_cursor
        if rows:
            row_at = self._row_appended_at(topic, subscription.name, behind.partition, rows[0].offset)
            oldest_at = row_at if oldest_at is None else min(oldest_at, row_at)
        return PartitionFacts(
            lag=behind,
            cursor=cursor,
            moved_at=0 if stand is None else stand.moved_at,
            stands_since=self._now if stand is None else stand.seen_at,
            appended_at=at_cursor,
            oldest_at=oldest_at,
            whose=whose,
            hole=hole,
            rows=rows,
        )

    def _running(self, topic: TopicInfo, name: str, partition: int, offset: int) -> str:
        """Return in words which handler runs on an event for long, in whichever process, if one does."""
        if self._heard is None:
            self._heard = telling.hear(self._store, self._now)
        for heard in self._heard:
            doing = heard.of(topic.log_id, name)
            for each in () if doing is None else doing.handlers:
                if (each.partition, each.offset) == (partition, offset):
                    seconds = duration(max(self._now - each.since_us, 0) / 1_000_000)
                    return f"; handler {each.handler} runs on it for {seconds} in {heard.document.process}"
        return ""

    def _row_appended_at(self, topic: TopicInfo, name: str, partition: int, offset: int) -> int:
        """Return when an event that waits aside was appended; when it was set aside, if the log has it no more."""
        log = topic.partitions[partition]
        if offset >= self._store.log.bounds(log).start:
            appended_at = self._first_event(self._store, log, offset, _told_before).appended_at
            if appended_at is not None:
                return appended_at
        wanted = _rows(topic, name, partition=partition, offsets=frozenset({offset}))
        return min((row.parked_at for row in self._store.parked.page(wanted, limit=1)), default=self._now)

    def _first_event(
        self, store: Store, partition: Partition, offset: int, damaged: Callable[[IntegrityError], None]
    ) -> FirstEvent:
        """Look at an event once, however many subscriptions stand at it: that is most of what a look costs."""
        key = (partition, offset)
        if key not in self._first:
            errors: list[IntegrityError] = []
            self._first[key] = first_event(store, partition, offset, errors.append), errors
        found, errors = self._first[key]
        for error in errors:
            damaged(error)
        return found

    def _upgrades(self, topic: TopicInfo, name: str) -> int:
        return self._store.parked.count(_rows(topic, name, error_type=UPGRADE))["waiting"]

    def _health(
        self, topic: TopicInfo, facts: Facts, leases: Sequence[Lease], stands: dict[int, _Stand]
    ) -> SubscriptionHealth:
        subscription, lags = facts.subscription, [each.lag for each in facts.partitions]
        key = (topic.log_id, subscription.name)
        seen = self.seen[key] = _Seen(
            at=self._now,
            lag=sum(each.lag for each in lags),
            settled=sum(each.head - each.unsettled for each in lags),
            generations=sum(stand.position[0] for stand in stands.values()),
            stands=stands,
        )
        lag_per_second, settled_per_second = self._history.rates(key, seen)
        oldest_at = min((each.oldest_at for each in facts.partitions if each.oldest_at is not None), default=None)
        moved = facts.used or subscription.external
        moved_at = max((stand.moved_at for stand in stands.values()), default=0) if moved else 0
        state, reasons = judge(facts)
        return SubscriptionHealth(
            topic=topic.name,
            name=subscription.name,
            mode=subscription.mode,
            external=subscription.external,
            state=state,
            reasons=reasons,
            lag=seen.lag,
            unsettled=sum(each.unsettled for each in lags),
            oldest_seconds=0.0 if oldest_at is None else max(self._now - oldest_at, 0) / 1_000_000,
            lag_per_second=lag_per_second,
            settled_per_second=settled_per_second,
            last_progress_at=us_to_datetime(moved_at) if moved_at else None,
            consumers=tuple(
                ConsumerHealth(
                    owner=lease.owner,
                    process=sharing.process_of(lease),
                    here=sharing.process_of(lease) == facts.here.process,
                )
                for lease in leases
            ),
            in_flight=facts.here.in_flight,
            paused=facts.policy.paused,
            halted=facts.halted,
            waiting=sum(len(each.rows) for each in facts.partitions),
            dead=sum(each.dead for each in lags),
            blocked_lanes=len(facts.lanes),
            upgrades=facts.upgrades,
            lanes=self._shown_lanes(topic, facts),
        )

    def _shown_lanes(self, topic: TopicInfo, facts: Facts) -> tuple[BlockedLane, ...]:
        """Return the first lanes, and the first of those that wait for an upgrade, with their errors."""
        name = facts.subscription.name
        first = sorted(facts.lanes.items(), key=lambda each: (each[0][0], each[1][0].offset))[:LANES_SHOWN]
        offsets = frozenset(rows[0].offset for _, rows in first)
        found: dict[tuple[int, int], Parked] = {}
        if first:
            wanted = _rows(topic, name, offsets=offsets)
            found = {_place(row): row for row in self._store.parked.page(wanted, limit=len(offsets) * 8)}
        if facts.upgrades:
            for row in self._store.parked.page(_rows(topic, name, error_type=UPGRADE), limit=LANES_SHOWN):
                found[_place(row)] = row
        heads = {(partition, rows[0].offset): (lane, rows) for (partition, lane), rows in facts.lanes.items()}
        return tuple(
            BlockedLane(
                partition=partition,
                key_hash=_key_hash(facts.subscription, lane, partition),
                offset=offset,
                events=len(rows),
                attempts=row.attempts,
                error=row.error_type,
                due_at=us_to_datetime(row.due_at) if row.due_at > MARKED else None,
            )
            for (partition, offset), row in sorted(found.items())
            if (partition, offset) in heads
            for lane, rows in [heads[partition, offset]]
        )


def _told_before(_damage: IntegrityError) -> None:
    """Do nothing: it was told when the lag was looked at."""


def _rows(topic: TopicInfo, name: str, **more: Any) -> ParkedFilter:
    return ParkedFilter(log_id=topic.log_id, subscription=name, states=frozenset({"waiting"}), **more)


def _place(row: Parked) -> tuple[int, int]:
    return row.shard.partition, row.offset


def _key_hash(subscription: Subscription, lane: int, partition: int) -> str | None:
    # In mode `shared` every event is a lane of its own; one without a key has its partition's.
    return None if subscription.mode == CLAIMED or lane == partition else f"{lane & (1 << 64) - 1:016x}"


def _lanes(subscription: Subscription, rows: Sequence[Waiting]) -> dict[tuple[int, int], list[Waiting]]:
    """Return the rows of each lane, in their order. What was brought back from the dead keeps nobody waiting."""
    found: defaultdict[tuple[int, int], list[Waiting]] = defaultdict(list)
    for row in rows:
        if not row.replay:
            found[row.shard.partition, row.offset if subscription.mode == CLAIMED else row.lane].append(row)
    return dict(found)


def _halted(
    policy: Policy, partitions: Sequence[PartitionFacts], here: Here, *, consumed: bool
) -> tuple[HaltedAt, ...]:
    """Return where it has halted: what this process knows, and else what follows from the attempts that were made."""
    found = dict(here.halted)
    if policy.exhausted == "halt":
        for each in partitions:
            number = each.lag.partition
            attempts = {} if each.cursor is None else dict(each.cursor.attempts)
            attempts |= {row.offset: row.attempts for row in each.rows}
            for offset, made in attempts.items():
                if made > policy.max_retries:
                    found.setdefault((number, offset), "")
            if each.hole is not None and consumed:  # it is met by whoever reads
                found.setdefault((number, each.hole.start), "Gap")
    return tuple(
        HaltedAt(partition=partition, offset=offset, error=error)
        for (partition, offset), error in sorted(found.items())
    )


# --- everything -------------------------------------------------------------------------------


def examine(
    store: Store,
    topic: TopicInfo | None = None,
    *,
    now_us: int,
    stalled_after: float,
    history: History | None = None,
    here: Mapping[Key, Here] | None = None,
    staged: int | None = None,
) -> Health:
    """Return how all subscriptions do, or those of a topic, and how the store does.

    `staged` is what waits in an outbox that is not the store's own. What Penstock keeps for itself is left out, unless
    it is the topic that is asked for.
    """
    topics = [info for info in store.log.topics() if not info.name.startswith("_")] if topic is None else [topic]
    examiner = Examiner(store, now_us=now_us, stalled_after=stalled_after, history=history, here=here)
    found = []
    for info in topics:
        found += examiner.topic(info)
    if history is not None:
        history.remember(topics, examiner.seen, everything=topic is None)
    how = _store(store, now_us, stalled_after, staged, tuple(examiner.damage))
    return Health(
        at=us_to_datetime(now_us),
        state=worst(how.state, *(each.state for each in found)),
        stalled_after_seconds=stalled_after,
        subscriptions=tuple(found),
        store=how,
    )


def _store(store: Store, now_us: int, stalled_after: float, staged: int | None, damage: tuple[str, ...]) -> StoreHealth:
    inspected = store.inspect() if isinstance(store, Inspectable) else None
    due_at = store.schedule.next_due()
    if staged is None and store.outbox is not None:
        staged = store.outbox.pending()
    how = StoreHealth(
        url=redact_url(store.url),
        kind=store.url.partition(":")[0],
        state="ok",
        reasons=(),
        free_bytes=None if inspected is None else inspected.free_bytes,
        total_bytes=None if inspected is None else inspected.total_bytes,
        members=tuple(
            MemberHealth(process=each.process, program=each.program, opened_at=us_to_datetime(each.opened_at))
            for each in (() if inspected is None else inspected.members)
        ),
        faults=() if inspected is None else inspected.faults,
        damage=damage,
        scheduled=store.schedule.pending(),
        scheduled_overdue_seconds=0.0 if due_at is None else max(now_us - due_at, 0) / 1_000_000,
        staged=staged,
    )
    state, reasons = judge_store(how, stalled_after, short=inspected is not None and inspected.space_is_short)
    return msgspec.structs.replace(how, state=state, reasons=reasons)
