"""The mover alone, on a virtual clock; under a bus, with threads; and in processes that are killed."""

from __future__ import annotations

import asyncio
import logging
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.growth import growth

from penstock import Batch, Bus, Event, Topic
from penstock.bus.directory import TopicDirectory
from penstock.bus.local import Local
from penstock.clock import VirtualClock
from penstock.columns import digest
from penstock.errors import (
    BusClosed,
    Fenced,
    InvalidEvent,
    PenstockError,
    TooLarge,
    UnknownTopic,
    UsageError,
)
from penstock.outbox import SqliteOutbox
from penstock.ports import Store
from penstock.producers import Run
from penstock.rows import Fence, Partition, Staged
from penstock.runtime.mover import Mover
from penstock.settings import Limits, Settings
from penstock.stores.memory import MemoryStore

raw = Topic("raw", bytes)
keyed = Topic("keyed", bytes, partitions=4)


def connected(path: Path, **options: Any) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, **options))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


def staged(*payloads: bytes, topic: str = "raw", **fields: Any) -> list[Staged]:
    return [Staged(topic=topic, event=Event(data=payload, **fields)) for payload in payloads]


# --- the mover, step by step -----------------------------------------------------------------


class World:
    """A store and an application's file, whose movers make every call at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = VirtualClock()
        self.store = MemoryStore(clock=self.clock)
        self.movers: list[Mover] = []
        self.outboxes: list[SqliteOutbox] = []
        self.an_outbox().pending()
        for topic in (raw, keyed):
            self.store.log.create_topic(topic.name, topic.settings)

    def an_outbox(self) -> SqliteOutbox:
        self.outboxes.append(SqliteOutbox(self.path))
        return self.outboxes[-1]

    def mover(self, owner: str = "one", *, outbox: SqliteOutbox | None = None) -> Mover:
        """Start a mover."""
        host = Local("memory:", settings=Settings(), clock=self.clock, store=self.store)
        host._store = self.store  # open, without threads

        async def opened() -> Local:
            return host

        self.movers.append(
            Mover(
                outbox or self.an_outbox(),
                host,
                TopicDirectory({}, opened),
                owner=owner,
                clock=self.clock,
                jitter=lambda: 0.0,
                executor=None,
            )
        )
        self.movers[-1].start()
        return self.movers[-1]

    async def crash(self, mover: Mover) -> None:
        """End a mover with nothing given back."""
        assert mover._task is not None
        mover._task.cancel()
        await asyncio.wait([mover._task])

    def stage(self, *payloads: bytes, topic: str = "raw", **fields: Any) -> None:
        with connected(self.path) as connection, connection:
            self.outboxes[0].stage(connection, staged(*payloads, topic=topic, **fields))

    def log(self, topic: str = "raw") -> list[bytes]:
        [info] = [info for info in self.store.log.topics() if info.name == topic]
        found = []
        for partition in info.partitions:
            for batch in self.store.log.read(partition, 0, bytes_max=1 << 40):
                assert isinstance(batch, Batch)
                found += [event.data for event in batch]
        return found

    async def close(self) -> None:
        for mover in self.movers:
            await mover.stop()
        for outbox in self.outboxes:
            outbox.close()


@pytest.fixture
async def world(path: Path) -> AsyncIterator[World]:
    made = World(path)
    yield made
    await made.close()


async def test_what_is_committed_is_moved_in_its_order_and_once(world: World) -> None:
    world.mover()
    for number in range(0, 30, 3):
        world.stage(*[b"%d" % n for n in range(number, number + 3)])
        await world.clock.advance_async(0.1)
    assert list(map(int, world.log())) == list(range(30))
    assert world.outboxes[0].pending() == 0


async def test_a_transaction_that_is_open_or_rolled_back_moves_nothing(world: World) -> None:
    world.mover()
    with connected(world.path) as connection:
        world.outboxes[0].stage(connection, staged(b"x"))
        await world.clock.advance_async(1)
        assert world.log() == []
        connection.rollback()
        await world.clock.advance_async(1)
        assert world.log() == []


async def test_a_key_goes_to_its_partition_and_events_without_one_go_round(world: World) -> None:
    for number in range(40):
        world.stage(b"%d" % number, topic="keyed", key=b"k%d" % (number % 10))
    world.mover()
    await world.clock.advance_async(0.1)
    [info] = [info for info in world.store.log.topics() if info.name == "keyed"]
    for partition in info.partitions:
        for batch in world.store.log.read(partition, 0, bytes_max=1 << 40):
            assert isinstance(batch, Batch)
            for event in batch:
                assert event.key is not None
                assert xxhash.xxh64_intdigest(event.key, 0) % 4 == partition.number
    for number in range(10):
        mine = [int(data) for data in world.log("keyed") if int(data) % 10 == number]
        assert mine == sorted(mine)
        assert len(mine) == 4
    before = [world.store.log.bounds(partition).stop for partition in info.partitions]
    world.stage(*[b"x"] * 8, topic="keyed")
    await world.clock.advance_async(0.1)
    after = [world.store.log.bounds(partition).stop for partition in info.partitions]
    assert [end - start for start, end in zip(before, after, strict=True)] == [2, 2, 2, 2]


async def test_thousands_are_moved_page_by_page(world: World) -> None:
    world.stage(*[b"%d" % number for number in range(2_345)])
    world.mover()
    await world.clock.advance_async(0.1)
    assert list(map(int, world.log())) == list(range(2_345))


def breaking(function: Callable[..., Any], *, after: bool, error: BaseException) -> Callable[..., Any]:
    """Return the function, broken at its second call, before or after its work."""
    calls = 0

    def broken(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != 2:
            return function(*args, **options)
        if after:
            function(*args, **options)
        raise error

    return broken


STEPS = ["waiting", "claim", "append", "done"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", [OSError("broken"), asyncio.CancelledError()], ids=["error", "crash"])
async def test_whatever_breaks_at_whichever_step_every_event_is_moved_once(
    world: World, monkeypatch: pytest.MonkeyPatch, step: str, after: bool, error: BaseException
) -> None:
    outbox = world.an_outbox()
    target: Any = world.store.log if step == "append" else outbox
    monkeypatch.setattr(target, step, breaking(getattr(target, step), after=after, error=error))
    world.mover(outbox=outbox)
    for number in range(20):
        world.stage(b"%d" % number)
        world.stage(b"%d" % number, topic="keyed", key=b"k%d" % (number % 5))
        world.stage(b"%d" % (20 + number), topic="keyed")
        await world.clock.advance_async(0.1)
    world.mover("the next one")
    await world.clock.advance_async(12)
    assert list(map(int, world.log())) == list(range(20))
    assert sorted(map(int, world.log("keyed"))) == list(range(40))
    assert (world.outboxes[0].pending(), world.outboxes[0].failed()) == (0, [])


async def test_two_movers_and_a_frozen_one_move_every_event_once(world: World) -> None:
    movers = [world.mover("one"), world.mover("two")]
    for number in range(50):
        world.stage(b"%d" % number, topic="keyed", key=b"k%d" % (number % 5))
        await world.clock.advance_async(0.3)
        if number == 20:
            await world.crash(movers[0])
        if number == 30:
            movers.append(world.mover("three"))
    await world.clock.advance_async(11)
    assert sorted(map(int, world.log("keyed"))) == list(range(50))
    assert world.outboxes[0].failed() == []


async def test_what_another_mover_left_half_done_is_a_repeat_to_one_that_worked_before_it(world: World) -> None:
    world.stage(b"0")
    world.mover("first")
    await world.clock.advance_async(1)
    second = world.an_outbox()
    lease = None
    while lease is None:  # the first one is idle, and its lease expires
        await world.clock.advance_async(1)
        lease = world.store.leases.acquire(f"outbox:{second.producer.hex()}", "second", 5)
    world.stage(b"1")
    await world.clock.advance_async(1)
    [row] = second.claim(10, lease.fence)
    [info] = [info for info in world.store.log.topics() if info.name == "raw"]
    batch = Batch.from_events([row.event])
    run = Run(second.producer, 0, row.sequence, 1, digest(batch.columns))
    [answer] = world.store.log.append(info.partitions[0], batch, [run])
    assert not answer.duplicate
    await world.clock.advance_async(10)  # the second one is gone, and the first takes over again
    assert world.log() == [b"0", b"1"]
    assert (second.pending(), second.failed()) == (0, [])


async def test_a_stale_mover_that_wakes_up_changes_nothing(world: World) -> None:
    world.stage(b"0", b"1")
    stale = world.an_outbox()
    stale_fence = world.store.leases.acquire(f"outbox:{stale.producer.hex()}", "stale", 10)
    assert stale_fence is not None
    claimed = stale.claim(10, stale_fence.fence)
    await world.clock.advance_async(11)
    world.mover("fresh")
    await world.clock.advance_async(1)
    assert world.log() == [b"0", b"1"]
    world.stage(b"2")
    with pytest.raises(Fenced):
        stale.done([row.sequence for row in claimed], stale_fence.fence)
    await world.clock.advance_async(1)
    assert world.log() == [b"0", b"1", b"2"]


async def test_an_idle_mover_writes_nothing_anywhere(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.mover()
    world.stage(b"x")
    await world.clock.advance_async(1)
    with connected(world.path) as connection:
        version = connection.execute("PRAGMA data_version").fetchone()
        for name in ("acquire", "renew"):
            monkeypatch.setattr(world.store.leases, name, lambda *_: pytest.fail("an idle mover touched its lease"))
        await world.clock.advance_async(60)
        assert connection.execute("PRAGMA data_version").fetchone() == version


# --- rows that cannot move -------------------------------------------------------------------


async def test_rows_for_an_unknown_topic_are_set_aside_and_the_others_move(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = world.outboxes[0]
    world.mover()
    world.stage(b"0")
    world.stage(b"lost?", topic="rwa")
    world.stage(b"1")
    await world.clock.advance_async(1)
    assert world.log() == [b"0", b"1"]
    [failed] = outbox.failed()
    assert (failed.topic, failed.event) == ("rwa", Event(data=b"lost?"))
    assert "UnknownTopic: there is no topic 'rwa'; did you mean 'raw'?" in failed.reason
    assert outbox.pending() == 0
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "lost?" not in record.getMessage()
    world.store.log.create_topic("rwa", raw.settings)
    assert outbox.retry([failed.sequence]) == 1
    await world.clock.advance_async(1)
    assert world.log("rwa") == [b"lost?"]


async def test_a_row_that_the_log_refuses_is_set_aside_and_the_others_move(world: World) -> None:
    outbox = world.outboxes[0]
    world.stage(b"0")
    mover = world.mover()
    await world.clock.advance_async(1)
    # As after restoring a copy in which row 1 was still to come: its number is given out again.
    with connected(world.path) as connection, connection:
        connection.execute("UPDATE sqlite_sequence SET seq = 0 WHERE name = 'penstock_outbox'")
    world.stage(b"other content", b"1")
    await world.clock.advance_async(1)
    assert world.log() == [b"0", b"1"]
    [failed] = outbox.failed()
    assert "ProducerConflict" in failed.reason
    await world.crash(mover)


async def test_a_file_restored_from_an_older_copy_loses_no_row_in_silence(world: World, path: Path) -> None:
    outbox = world.outboxes[0]
    world.stage(b"before")
    world.mover()
    await world.clock.advance_async(1)
    with connected(path) as source, connected(path.with_name("copy.db")) as copy:
        source.backup(copy)
    # So many that the log does not remember the content of the first ones, only that their numbers are taken.
    world.stage(*[b"%d" % number for number in range(100)])
    await world.clock.advance_async(1)
    await world.close()
    path.with_name("copy.db").replace(path)
    world.movers, world.outboxes = [], []
    outbox = world.an_outbox()
    world.stage(b"after")
    mover = world.mover("after")
    await world.clock.advance_async(1)
    assert b"after" not in world.log()
    [failed] = outbox.failed()
    assert "restored from an older copy" in failed.reason
    await mover.stop()
    outbox.renew_identity()
    outbox.retry([failed.sequence])
    world.mover("renewed")
    await world.clock.advance_async(1)
    assert world.log()[-1] == b"after"
    assert len(world.log()) == 102


async def test_rows_for_a_topic_made_anew_go_to_the_new_one(world: World) -> None:
    world.mover()
    world.stage(b"old")
    await world.clock.advance_async(1)
    [info] = [info for info in world.store.log.topics() if info.name == "raw"]
    world.store.log.delete_topic(info.log_id)
    world.store.log.create_topic("raw", raw.settings)
    world.stage(b"new")
    await world.clock.advance_async(5)
    assert world.log() == [b"new"]
    assert world.outboxes[0].failed() == []


async def test_a_store_made_anew_is_used_although_its_leases_begin_anew(world: World) -> None:
    world.outboxes[0].claim(0, Fence("outbox", 500))
    world.stage(b"x")
    world.mover()
    await world.clock.advance_async(60)
    assert world.log() == [b"x"]


async def test_a_partition_that_cannot_be_written_does_not_hold_up_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = world.store.log.append

    def failing(partition: Partition, batch: Any, runs: Any) -> Any:
        if partition.number == 2:
            raise OSError("broken")
        return append(partition, batch, runs)

    for number in range(40):
        world.stage(b"%d" % number, topic="keyed", key=b"k%d" % (number % 10))
    with monkeypatch.context() as patch:
        patch.setattr(world.store.log, "append", failing)
        world.mover()
        await world.clock.advance_async(1)
        assert 0 < len(world.log("keyed")) == 40 - world.outboxes[0].pending() < 40
    await world.clock.advance_async(30)
    assert sorted(map(int, world.log("keyed"))) == list(range(40))
    for number in range(10):
        mine = [int(data) for data in world.log("keyed") if int(data) % 10 == number]
        assert mine == sorted(mine)


# --- the bus ---------------------------------------------------------------------------------


async def appended(store: Store, count: int, topic: str = "raw") -> None:
    """Return when so many events are in a topic of one partition."""
    [info] = [info for info in store.log.topics() if info.name == topic]
    loop, grown = asyncio.get_running_loop(), asyncio.Event()
    assert store.notifier is not None

    def grows(_: Partition) -> None:
        loop.call_soon_threadsafe(grown.set)

    stop = store.notifier.listen(grows)
    try:
        while store.log.bounds(info.partitions[0]).stop < count:
            await grown.wait()
            grown.clear()
    finally:
        stop()


async def test_a_bus_publishes_what_is_staged_when_it_is_committed(path: Path) -> None:
    store = MemoryStore()
    async with Bus("memory:", topics=[raw], store=store, outbox=path) as bus:
        with connected(path) as connection:
            connection.execute("CREATE TABLE business (name TEXT)")
            connection.execute("INSERT INTO business VALUES ('ada')")
            bus.stage(connection, raw, b"staged", headers={"a": "b"}, ttl=60)
            bus.stage(connection, "raw", b"by name")
            connection.commit()
        await appended(store, 2)
        first, second = [event async for event in bus.read(raw)]
        assert (first.data, first.headers, second.data) == (b"staged", {"a": b"b"}, b"by name")
        assert first.expires_at is not None
        with closing(SqliteOutbox(path)) as outbox:
            producer = outbox.producer
        assert store.leases.holder(f"outbox:{producer.hex()}") is not None
    assert store.leases.holder(f"outbox:{producer.hex()}") is None
    with connected(path, timeout=0) as connection:  # nobody has the file open any more
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        connection.rollback()
    with connected(path) as connection, pytest.raises(BusClosed):
        bus.stage(connection, raw, b"x")


async def test_staging_needs_no_open_bus_and_a_later_one_moves_it(path: Path) -> None:
    staging = Bus("memory:", topics=[raw], outbox=str(path))
    with connected(path) as connection:
        staging.stage(connection, raw, b"x")
        connection.commit()
    store = MemoryStore()
    async with Bus("memory:", topics=[raw], store=store, outbox=path):
        await appended(store, 1)


async def test_a_transaction_that_stays_open_holds_up_neither_the_bus_nor_its_event_loop(path: Path) -> None:
    store = MemoryStore()
    async with Bus("memory:", topics=[raw], store=store, outbox=path) as bus:
        with connected(path) as connection:
            bus.stage(connection, raw, b"first")
            connection.commit()
            await appended(store, 1)
            bus.stage(connection, raw, b"staged")
            await bus.publish(raw, b"direct")
            connection.commit()
        await appended(store, 3)
        assert [event.data async for event in bus.read(raw)] == [b"first", b"direct", b"staged"]


def test_what_a_publish_refuses_staging_refuses(path: Path) -> None:
    bus = Bus("memory:", topics=[raw], outbox=path, settings=Settings(limits=Limits(event_bytes_max=100)))
    other = Topic("other", bytes)
    with connected(path) as connection:
        connection.execute("CREATE TABLE business (name TEXT)")
        wrong: list[tuple[type[PenstockError], Any, Any, dict[str, Any]]] = [
            (TooLarge, raw, b"x" * 101, {}),
            (TooLarge, "by-name", b"x" * 101, {}),
            (InvalidEvent, raw, "text", {}),
            (UsageError, raw, b"x", {"kye": "x"}),
            (UnknownTopic, other, b"x", {}),
            (UsageError, "No Name", b"x", {}),
        ]
        for kind, topic, value, fields in wrong:
            with pytest.raises(kind):
                bus.stage(connection, topic, value, **fields)
        assert not connection.in_transaction
        with pytest.raises(UsageError, match="this bus has no outbox"):
            Bus("memory:", topics=[raw]).stage(connection, raw, b"x")


# --- processes that are killed ---------------------------------------------------------------

CHILD = """
    import asyncio, os, signal, sqlite3, sys
    from penstock import Bus, Topic
    from penstock.outbox import SqliteOutbox

    url, path, step, moment = sys.argv[1:]
    raw = Topic("raw", bytes)

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(function):
        def call(*args, **options):
            if moment == "before":
                die()
            function(*args, **options)
            die()
        return call

    async def main():
        bus = Bus(url, topics=[raw], outbox=path)
        await bus.publish(raw, b"opened")
        if step in {"claimed", "claim", "done"}:
            setattr(SqliteOutbox, step, dying(getattr(SqliteOutbox, step)))
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE IF NOT EXISTS business (number INTEGER)")
        log = bus._backend.store.log
        if step == "append":
            type(log).append = dying(type(log).append)
        for number in range(3):
            connection.execute("INSERT INTO business VALUES (?)", (number,))
            bus.stage(connection, raw, b"%d" % number)
        if step == "commit":
            connection = type("Dying", (), {"commit": dying(connection.commit)})
        connection.commit()
        await asyncio.Event().wait()

    asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["commit", "claimed", "claim", "append", "done"])
async def test_a_process_killed_at_any_step_leaves_neither_or_both_and_a_restart_moves_each_once(
    path: Path, tmp_path: Path, step: str, moment: str
) -> None:
    url = f"file:{tmp_path / 'store'}"
    child = [sys.executable, "-c", textwrap.dedent(CHILD), url, str(path), step, moment]
    killed = await asyncio.to_thread(subprocess.run, child, capture_output=True, check=False, timeout=100)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with connected(path) as connection:
        business = [b"%d" % number for (number,) in connection.execute("SELECT number FROM business ORDER BY number")]
    assert business == ([] if (step, moment) == ("commit", "before") else [b"0", b"1", b"2"])
    async with Bus(url, topics=[raw], outbox=path) as bus:
        with growth(bus) as grown:
            with connected(path) as connection:
                bus.stage(connection, raw, b"last")
                connection.commit()
            found: list[bytes] = []
            while found[-1:] != [b"last"]:
                await grown()
                found = [event.data async for event in bus.read(raw)]
    assert found == [b"opened", *business, b"last"]
    with closing(SqliteOutbox(path)) as outbox:
        assert (outbox.pending(), outbox.failed()) == (0, [])
