"""Seat: this process's hold of one shard, from its lease to its engine; does what the engine decides.

A seat is *empty* until the lease is had and everything is loaded, and again once it is lost: somebody else took over
after this process was silent for too long, or the subscription was moved. What was handed over from a lost seat cannot
be settled any more, and whoever tries is told.

Everything here runs in one event loop; what may wait for I/O is done by `host.call`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.engine.messages import (
    Ack,
    Ask,
    ConsumerLeft,
    Declare,
    Deliver,
    Done,
    Fetch,
    Fetched,
    FetchFailed,
    Halted,
    HeadMoved,
    LogTrimmed,
    Now,
    Read,
    ReadDone,
    ReadFailed,
    Row,
    RowsSeen,
    Want,
)
from penstock.engine.shard import Shard as Engine
from penstock.engine.suspects import MARKED
from penstock.errors import (
    PenstockError,
    StateMissing,
    StoreClosed,
    TopicDeleted,
    Trimmed,
    UnknownSubscription,
)
from penstock.rows import ParkedFilter, Partition
from penstock.runtime.blocks import fetched_row, read_items
from penstock.runtime.ledger import TOPIC as LEDGER
from penstock.runtime.subscriptions import shard_lease

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from penstock.engine.division import Division
    from penstock.engine.messages import Input
    from penstock.engine.share import Slots
    from penstock.rows import Cursor, Fence, Lease, Parked, Shard, Subscription, TopicInfo, Waiting
    from penstock.runtime.dispatcher import Dispatcher
    from penstock.runtime.member import Member

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1
RETRY_SECONDS_MAX: Final = 5.0


def _row(waiting: Waiting) -> Row:
    return Row(*waiting[1:], slot=waiting.shard.slot)


class Seen(NamedTuple):
    """What a look at the store found of a shard."""

    cursor: Cursor
    rows: list[Waiting]


class Seat:
    """One shard of one consumer."""

    __slots__ = (
        "_changing",
        "_clock",
        "_dispatcher",
        "_host",
        "_marked",
        "_marked_rows",
        "_retry_seconds",
        "_tasks",
        "done_rows",
        "engine",
        "index",
        "lease",
        "lease_name",
        "lost_because",
        "lost_unwritten",
        "member",
        "partition",
        "recorded",
        "scope",
        "shard",
        "topic",
        "trouble",
    )

    def __init__(self, dispatcher: Dispatcher, member: Member, topic: TopicInfo, shard: Shard) -> None:
        self._dispatcher = dispatcher
        self._host = dispatcher.host
        self._clock = dispatcher.clock
        self.member = member
        self.topic = topic
        self.scope = f"{topic.name}/{shard.subscription}"
        """In whose name events are marked as handled."""
        self.shard = shard
        self.partition = Partition(shard.log_id, shard.partition)
        self.lease_name = shard_lease(shard)
        self.lease: Lease | None = None
        self.recorded = dispatcher.with_ledger and topic.name != LEDGER
        self.engine: Engine | None = None
        self.index = -1
        """Its place in the monitor's columns."""
        self.trouble: dict[str, str] = {}
        """What goes wrong at the moment, by what: `read`, `fetch`, `commit`."""
        self.done_rows: set[int] = set()
        self.lost_because = ""
        self.lost_unwritten = False
        """Whether something was settled that never was, or perhaps was not, written; until somebody is told."""
        self._marked: frozenset[int] = frozenset()
        """What was in the hands of a process that died: each of these is tried alone …"""
        self._marked_rows = False
        """… and there are such rows, too."""
        self._retry_seconds = RETRY_SECONDS
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()

    @property
    def fences(self) -> tuple[Fence, ...]:
        """What its writes carry."""
        return () if self.lease is None else (self.lease.fence,)

    @property
    def shares_cursor(self) -> bool:
        """Whether others write the same cursor."""
        return False

    @property
    def berth(self) -> int:
        """Which berth it has, where events are claimed; 0 for none."""
        return 0

    @property
    def slots(self) -> Slots | None:
        """Which slots it has, if it shares the partition with others."""
        return None

    @property
    def tries_alone(self) -> bool:
        """Whether it goes through what may have killed a process: each attempt is counted before it is made.

        Whatever else ends the process meanwhile is blamed on the one that is tried, so nothing else should be.
        """
        engine = self.engine
        if engine is None or not engine.suspecting or engine.standing:
            return False
        return self._marked_rows or not self._marked.isdisjoint(engine.progress.attempts)

    @property
    def suspecting(self) -> bool:
        """Whether it goes through what an unclean end has left behind, where every group waits for a commit."""
        return self.engine is not None and self.engine.suspecting

    @property
    def waits_for_commit(self) -> bool:
        """Whether nothing can be handed over before something is written, or not for long."""
        engine = self.engine
        return engine is not None and (engine.suspecting or engine.starving or engine.claiming or engine.overfull)

    @property
    def parted(self) -> bool:
        """Whether its events go to several owners, by their slots."""
        return False

    @property
    def division(self) -> Division | None:
        """Which of its events are for which consumer of this process, and which for none, if that matters."""
        return None

    @property
    def cursor_shard(self) -> Shard:
        """The shard whose cursor it writes."""
        return self.shard

    def __str__(self) -> str:
        return f"subscription {self.shard.subscription!r} at {self.topic.name}/{self.shard.partition}"

    def now(self) -> Now:
        """Return the time as the engine wants it."""
        return Now(self._clock.monotonic(), self._clock.time_us())

    # --- taking and losing --------------------------------------------------------------------

    async def take(self) -> bool:
        """Take the shard, if nobody has it; False if somebody has."""
        async with self._changing:
            return self.engine is not None or (not self.member.closed and await self._take())

    async def _take(self) -> bool:
        if self.lease is not None:
            # What was lost in this process's own life has killed nobody, and need not be suspected.
            await self._give_back(self.lease, clean=True)
            self.lease = None
        presence = self._dispatcher.presence
        lease = await self._acquire()
        if lease is None:
            return False
        losses = presence.losses
        looks = self.member.looks
        try:
            cursor, rows, head, subscription = await self._host.call(self._load)
        except BaseException:
            await self._give_back(lease, clean=lease.clean)
            raise
        if presence.lapsed or presence.losses != losses:
            # This process was silent for too long in between: somebody else may have the shard by now.
            await self._give_back(lease, clean=lease.clean)
            return False
        self.lease = lease
        if self.member.looks == looks:
            # It may be younger than what the consumer was told when it began to join. Once the watch has looked, it may
            # as well be older; and if it is not, the watch will see that by the revision.
            self.member.know(subscription)
        self._marked = frozenset(cursor.attempts)
        self._marked_rows = any(row.due_at == MARKED for row in rows)
        self.engine = self._make_engine(cursor, rows, head, clean=lease.clean)
        if cursor.next_offset > head:
            logger.error(
                "%s: its cursor is at %d, and the log ends at %d: acknowledged events are lost; new ones come above it",
                self, cursor.next_offset, head,
            )  # fmt: skip
        logger.debug("%s: consumer %s has it, epoch %d", self, self.member.owner, lease.epoch)
        self._dispatcher.monitor.add(self)
        if self.tries_alone:
            self.member.suspected[self] = None
        self.member.spread()
        self.tell(HeadMoved(head))
        return True

    def _make_engine(self, cursor: Cursor, rows: list[Waiting], head: int, *, clean: bool, **of_its_own: Any) -> Engine:
        return Engine(
            next_offset=cursor.next_offset,
            settled=cursor.settled,
            attempts=cursor.attempts,
            generation=cursor.generation,
            number=cursor.number,
            partition=self.shard.partition,
            policy=self.member.policy,
            rows=[_row(row) for row in rows],
            clean=clean,
            head=head,
            now=self.now(),
            rate=self.member.rate,
            slots=self.slots,
            **of_its_own,
        )

    async def _acquire(self) -> Lease | None:
        """Have the right to the shard; None if somebody else has it."""
        return await self._dispatcher.presence.acquire(self.lease_name, self.member.owner)

    async def _give_back(self, lease: Lease, *, clean: bool) -> None:
        await self._dispatcher.presence.give_back(lease, clean=clean)

    def _load(self) -> tuple[Cursor, list[Waiting], int, Subscription]:
        store, shard = self._host.store, self.shard
        subscription = store.cursors.subscription(shard.log_id, shard.subscription)
        if subscription is None:
            raise UnknownSubscription(shard.log_id, shard.subscription, topic=self.topic.name)
        cursor, rows = self._cursor(), store.parked.waiting(self._filter())
        return cursor, rows, store.log.bounds(self.partition).stop, subscription

    def _cursor(self) -> Cursor:
        shard = self.cursor_shard
        for cursor in self._host.store.cursors.load(shard.log_id, shard.subscription):
            if cursor.shard == shard:
                return cursor
        raise StateMissing(f"{shard} has no cursor, though its subscription is there: `penstock doctor` knows more")

    def _filter(self, offsets: frozenset[int] | None = None) -> ParkedFilter:
        shard = self.shard
        return ParkedFilter(
            log_id=shard.log_id,
            subscription=shard.subscription,
            states=frozenset({"waiting"}),
            slots=frozenset({shard.slot} if self.slots is None else np.flatnonzero(self.slots).tolist()),
            partition=shard.partition,
            offsets=offsets,
        )

    def lose(self, why: str) -> None:
        """Be empty: the lease is not ours any more, or what was loaded is not so any more."""
        if self.engine is None:
            return
        logger.warning("%s: consumer %s lost it: %s", self, self.member.owner, why)
        self.lost_because = why
        if self.engine.progress.dirty or self.engine.progress.writing:
            self.lost_unwritten = True
        self._dispatcher.monitor.remove(self)
        self._emptied()
        self.member.lost(self)

    async def leave(self, *, clean: bool = True) -> None:
        """Give the shard back: what is not settled is the next one's, and nothing is in flight."""
        async with self._changing:
            await self._leave(clean=clean)

    async def _leave(self, *, clean: bool) -> None:
        if self.engine is None:
            if self.lease is not None:
                await self._give_back(self.lease, clean=True)
                self.lease = None
            return
        self.tell(ConsumerLeft())
        saved = clean and await self._dispatcher.saved(self)
        engine = self._emptied()
        if engine is not None:
            self._dispatcher.monitor.remove(self)
            await self._dispatcher.committer.purge(self)
        if self.lease is not None:
            # It may have been lost while it was saved: the subscription was moved, and the lease is still held.
            clean = engine is None or (saved and not engine.suspecting)
            await self._give_back(self.lease, clean=clean)
            self.lease = None

    def _emptied(self) -> Engine | None:
        """Be empty, and return what was there."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self.member.tally.gaps += engine.gaps
        return engine

    # --- doing what the engine says -----------------------------------------------------------

    def tell(self, told: Input) -> Deliver | None:
        """Tell the engine something, and do what it answers; returns what is to be handed over."""
        engine = self.engine
        if engine is None:
            return None
        handed: Deliver | None = None
        for output in engine.handle(told, self.now()):
            match output:
                case Deliver():
                    handed = output
                    self.member.tally.delivered += output.events
                case Read():
                    self._spawn(self._read(engine, output))
                case Fetch():
                    self._spawn(self._fetch(engine, output))
                case Declare():
                    self.member.declare(output.gap, self)
                case Halted():
                    logger.error(
                        "%s halts at offset %d, every attempt of which failed (%s): `penstock resume` lets it go on",
                        self, output.offset, output.failure.kind,
                    )  # fmt: skip
        self._dispatcher.monitor.changed(self)
        if engine.progress.dirty:
            self._dispatcher.committer.mark(self)
        # Whoever asks looks at the answer himself; and an ack is news only for those who wait for one.
        if not isinstance(told, Ask | Want) and (engine.unanswered or not isinstance(told, Ack | Done)):
            engine.unanswered = False
            self.member.wake()
        return handed

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, engine: Engine, asked: Read) -> None:
        told: Input
        try:
            log = self._host.store.log
            items = await self._host.call(
                read_items, log, self.partition, asked.start, asked.events_max, asked.bytes_max,
                own_max=asked.own_max, slotted=self.parted, laned=engine.parked > 0 and not self.berth,
                division=self.division, wanted=engine.wanted,
            )  # fmt: skip
            told = ReadDone(asked.start, items)
            self._well("read")
        except Trimmed as trimmed:
            told = LogTrimmed(trimmed.first)
        except StoreClosed:
            return
        except TopicDeleted as deleted:
            self.member.end(deleted.of(self.topic.name))
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, the next attempt may succeed
            told = ReadFailed(asked.start, self._clock.monotonic() + self._ill("read", error))
        if self.engine is engine:
            self.tell(told)

    async def _fetch(self, engine: Engine, asked: Fetch) -> None:
        told: Input
        try:
            rows, cursor = await self._host.call(self._find_rows, asked.offsets)
            if cursor is not None and cursor.generation != engine.progress.generation:
                # They are not given up: somebody has moved the subscription, and what follows them must not begin.
                if self.engine is engine:
                    self.lose(f"it was moved to offset {cursor.next_offset}")
                return
            told = Fetched(asked.offsets, tuple(fetched_row(row, self.topic) for row in rows))
            self._well("fetch")
        except StoreClosed:
            return
        except Exception as error:  # noqa: BLE001 - the same
            told = FetchFailed(asked.offsets, self._clock.monotonic() + self._ill("fetch", error))
        if self.engine is engine:
            self.tell(told)

    def _find_rows(self, offsets: tuple[int, ...]) -> tuple[list[Parked], Cursor | None]:
        """Return parked rows, and where the cursor is by now if some of them are gone; called in a thread."""
        rows = self._host.store.parked.page(self._filter(frozenset(offsets)), limit=len(offsets))
        return rows, None if len(rows) == len(offsets) else self._cursor()

    def _well(self, what: str) -> None:
        if self.trouble.pop(what, None) is not None:
            logger.info("%s: %s goes on", self, what)
            self._retry_seconds = RETRY_SECONDS

    def _ill(self, what: str, error: Exception) -> float:
        """Note what goes wrong; returns after how many seconds to try again."""
        trouble = f"{type(error).__name__}: {error}"
        if self.trouble.get(what) != trouble:
            logger.warning("%s: %s failed, and will be tried again: %s", self, what, trouble)
        self.trouble[what] = trouble
        seconds, self._retry_seconds = self._retry_seconds, min(self._retry_seconds * 2, RETRY_SECONDS_MAX)
        return seconds

    # --- what others change -------------------------------------------------------------------

    def look_again(self) -> Seen | PenstockError:
        """Look at what somebody else may have changed: where the cursor is, and which rows wait; called in a thread."""
        try:
            return Seen(self._cursor(), self._host.store.parked.waiting(self._filter()))
        except PenstockError as error:
            return error

    def refresh(self, engine: Engine, seen: Seen | PenstockError) -> None:
        """Take what was seen, if it is still about what this seat has."""
        if self.engine is not engine:
            return
        if isinstance(seen, UnknownSubscription | TopicDeleted):
            self.member.end(seen.of(self.topic.name))
            return
        if isinstance(seen, PenstockError):
            logger.info("%s: could not be looked at, and will be again: %s", self, seen)
            return
        cursor, rows = seen
        if cursor.generation != engine.progress.generation:
            self.lose(f"it was moved to offset {cursor.next_offset}")
            return
        self.tell(RowsSeen(tuple(_row(row) for row in rows if row.replay)))
