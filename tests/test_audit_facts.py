"""Looking at a store: whatever its consumers, its ledger and its seeks do meanwhile, nothing looks lost."""

from __future__ import annotations

import asyncio
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.audit_model import KEY, NAME, History, encode, exploded

from penstock import Bus, Delivery, Reject, Retry, Topic
from penstock.audit import facts as looking
from penstock.audit import spans
from penstock.audit.evidence import parts_of
from penstock.audit.facts import ShardFacts, declared_gaps, look
from penstock.audit.judging import Judged, judge
from penstock.audit.records import columns_of
from penstock.batch import Batch
from penstock.bus.local import Local
from penstock.errors import UsageError
from penstock.events import Event
from penstock.offsets import Gap
from penstock.rows import Commit, Cursor, Parked, Shard, Subscription, TopicSettings
from penstock.runtime.ledger import SETTINGS, TOPIC, _append, producer_of
from penstock.stores import open_store
from penstock.testing.conformance.builders import a_part, append

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.audit.facts import Facts
    from penstock.ports import Store


def ledger_of(store: Store, facts: Facts) -> tuple[list[bytes], list[int]]:
    """Return the records of the ledger that belong to a look, and their places."""
    found: list[bytes] = []
    for topic in store.log.topics():
        at = facts.ledger.start
        while topic.name == TOPIC and at < facts.ledger.stop:
            for item in store.log.read(topic.partitions[0], at, bytes_max=1 << 20, events_max=facts.ledger.stop - at):
                assert isinstance(item, Batch)
                found += [event.data for event in item]
                at = item.range.stop
    return found, list(range(facts.ledger.start, facts.ledger.start + len(found)))


def audited(store: Store, facts: Facts) -> dict[int, Judged]:
    """Judge every partition by what was looked at, without Spark."""
    shards = facts.shards
    moved, places = ledger_of(store, facts)
    data = [*moved, *facts.unmoved]
    positions = np.array([*places, *range(facts.ledger.stop, facts.ledger.stop + len(facts.unmoved))], np.int64)
    known = {shard.key: index for index, shard in enumerate(shards)}
    parts = parts_of(columns_of(data, positions, known), looking.cursors_of(shards))
    return {
        shard.partition: judge(shard, [part for part in parts if part.shard == index])
        for index, shard in enumerate(shards)
    }


# --- a store that does not stand still ------------------------------------------------------------


class Restless:
    """A store in memory with one subscription, in which something happens before every call of a port."""

    EVENTS = 40

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw
        self.store = open_store("memory:")
        topic = self.store.log.create_topic("orders", TopicSettings())
        append(self.store, topic.partitions[0], a_part(*[b"x"] * self.EVENTS))
        self.shard = Shard(topic.log_id, NAME, 0, 0)
        self.history = History(log_id=topic.log_id, end=self.EVENTS)
        subscription = Subscription(log_id=topic.log_id, name=NAME, mode="exclusive")
        self.store.cursors.put_subscription(subscription, [Cursor(shard=self.shard, next_offset=0)])
        self._appended = 0

    def happen(self) -> None:
        """Let a few things happen, as consumers, people and the ledger do them."""
        for _ in range(self._draw(st.integers(0, 2))):
            act = self._draw(st.sampled_from(["settle"] * 4 + ["aside"] * 3 + ["append", "move", "move", "seek"]))
            if act in {"append", "move"}:
                self._move(forget=act == "move")
            elif act == "seek":
                self._change(lambda: self.history.seek(self._draw(st.integers(0, self.EVENTS))))
            else:
                self._change(partial(self._step, act))

    def _step(self, act: str) -> None:
        history = self.history
        among = history.unsettled() if act == "settle" else sorted(history.waiting)
        outcomes: dict[str, list[int]] = {}
        for offset in among:
            kind = self._draw(st.sampled_from(["acked", "acked", "parked", ""]))
            if kind and (act == "settle" or kind == "acked"):
                outcomes.setdefault(kind, []).append(offset)
        history.step({kind: sorted(found) for kind, found in outcomes.items()})

    def _change(self, change: Callable[[], None]) -> None:
        """Write what a change has come to, in one commit: cursor, parked rows, record."""
        history = self.history
        before, waited = len(history.records), set(history.waiting)
        change()
        cursor = Cursor(
            shard=self.shard,
            next_offset=history.next_offset,
            generation=history.generation,
            number=history.number,
        )
        rows = [self._row(offset, "waiting") for offset in history.waiting - waited]
        rows += [self._row(offset, "done") for offset in waited - history.waiting]
        record = encode(history.records[-1]) if len(history.records) > before else b""
        [answer] = self.store.cursors.commit([Commit(cursors=(cursor,), parked=tuple(rows), settlement=record)])
        assert answer is None, answer

    def _row(self, offset: int, state: Any) -> Parked:
        return Parked(shard=self.shard, offset=offset, state=state, lane=0, event=Event(data=b""))

    def _move(self, *, forget: bool) -> None:
        """Move records to the ledger; one that is killed between has appended, and not forgotten."""
        records = self.store.cursors.settlements(self._draw(st.integers(1, 5)))
        if records:
            topic = self.store.log.create_topic(TOPIC, SETTINGS)
            _append(self.store.log, topic.partitions[0], records, producer_of(topic.log_id))
            if forget:
                self.store.cursors.forget_settlements(records[-1].number)

    def __getattr__(self, name: str) -> Any:
        return Between(getattr(self.store, name), self.happen)


class Between:
    """A port, before every call of which something happens."""

    def __init__(self, port: Any, happen: Callable[[], None]) -> None:
        self._port = port
        self._happen = happen

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self._happen()
            return getattr(self._port, name)(*args, **options)

        return call


@given(st.data())
def test_an_audit_while_everything_moves_never_says_lost(data: st.DataObject) -> None:
    restless: Any = Restless(data.draw)
    for _ in range(6):
        restless.happen()
    facts = look(restless)
    [found] = audited(restless.store, facts).values()
    assert not found.lost
    assert not found.twice
    [shard] = facts.shards
    if shard.steady:
        assert not found.unproven
        assert not found.breaks
    assert len(set(facts.unmoved)) == len(facts.unmoved)
    # What was moved and not forgotten is not counted twice.
    assert not set(ledger_of(restless.store, facts)[0]) & set(facts.unmoved)


# --- a bus at work --------------------------------------------------------------------------------

jobs = Topic("jobs", bytes, partitions=2)


@pytest.mark.parametrize("mode", ["exclusive", "key_shared", "shared"])
async def test_retries_deaths_replays_and_seeks_are_all_proven(mode: Any) -> None:
    bus = Bus("memory:", topics=[jobs])
    repaired = False
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    @bus.subscriber(jobs, "s", mode=mode, retry=Retry(max_retries=1, delay=0.001))
    async def work(data: bytes, delivery: Delivery[bytes]) -> None:
        seen.put_nowait(data)
        if data.endswith(b"3") and not repaired:
            raise Reject("no")
        if data.endswith(b"5") and delivery.attempt == 1:
            raise ConnectionError("nobody answers")

    async def caught_up() -> None:
        while any(lag.has_lag for lag in await bus.lag(jobs, "s")):  # noqa: ASYNC110 - another task consumes
            await asyncio.sleep(0.005)

    async with bus:
        for number in range(40):
            await bus.publish(jobs, b"%d" % number, key=b"k%d" % (number % 7))
        await caught_up()
        repaired = True
        await bus.dead_letters.replay(jobs, "s")
        while await bus.dead_letters.count(jobs, "s"):  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.005)
        await bus.seek(jobs, "s", {0: 2, 1: 0})
        await caught_up()
        assert isinstance(bus._backend, Local)
        store = bus._backend.store
        found = audited(store, look(store))
        end = sum(len(store.log.bounds(partition)) for partition in store.log.topics()[-1].partitions)
    counts = {
        name: sum(len(exploded(judged.outcomes[name])) for judged in found.values()) for name in ("acked", "dead")
    }
    assert sum(counts.values()) == end == 40
    for judged in found.values():
        for kind in ("lost", "unproven", "twice", "parked", "pending", "breaks"):
            assert not getattr(judged, kind), kind


# --- what else is looked at -----------------------------------------------------------------------


def test_what_the_log_declares_to_be_a_gap_is_not_lost() -> None:
    class Holey:
        def read(self, _: Any, start: int, **__: Any) -> list[Any]:
            edge = 5 if start < 5 else 8 if start < 8 else 20
            return [Gap(start, edge, "torn") if start in {5, 6, 7} else a_batch(start, edge)]

    def a_batch(start: int, stop: int) -> Batch:
        return Batch.build([b"x"] * (stop - start)).at(start, None, ())  # type: ignore[arg-type]  # nobody asks where

    shard = ShardFacts(
        topic="t",
        log_id=KEY[0],
        subscription=NAME,
        partition=0,
        next_offset=20,
        generation=0,
        number=0,
        first=0,
        end=20,
    )
    found = declared_gaps(Holey(), shard, spans.span(3, 12))  # type: ignore[arg-type]  # it only reads
    assert exploded(found) == {5, 6, 7}


def test_names_that_are_not_there_are_errors_with_the_nearest_one() -> None:
    with closing(open_store("memory:")) as store:
        store.log.create_topic("orders", TopicSettings())
        with pytest.raises(UsageError, match=r"no topic 'order'; did you mean 'orders'\?"):
            look(store, ["order"])
        with pytest.raises(UsageError, match="no subscription is named 'nobody'"):
            look(store, subscription="nobody")
        assert look(store).subscriptions == []
