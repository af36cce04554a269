"""The bus for code that is not asynchronous: the same answers, in any thread, and an end for everything that waits."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.deliveries import Faulty

from penstock import Bus, Event, Position, Receipt, Retry, SyncBus, SyncDelivery, Topic, event
from penstock.bus import consumer, delivered
from penstock.bus import sync as facades
from penstock.bus.dead_letters import DeadLetters
from penstock.bus.portal import Portal
from penstock.bus.publisher import Prepared
from penstock.errors import BusClosed, InvalidEvent, PublishUnknown, StaleDelivery, UnknownTopic, UsageError
from penstock.stores.memory import MemoryStore

sys.path.insert(0, str(Path(__file__).parent.parent))

from tools import sync_facade  # found through the line above


@event("sync.placed")
@dataclass(frozen=True)
class Placed:
    customer: str
    number: int


orders = Topic("orders", Placed, key=lambda value: value.customer, partitions=2)
raw = Topic("raw", bytes)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, root: Path) -> str:
    return "memory:" if request.param == "memory" else f"file:{root}"


@pytest.fixture
def bus(url: str) -> Iterator[SyncBus]:
    with Bus(url, topics=[orders, raw]).sync() as opened:
        yield opened


def loop_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-sync"]


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# --- one implementation ----------------------------------------------------------------------


def test_the_facade_is_what_is_made_from_the_bus_as_it_is() -> None:
    assert sync_facade.TARGET.read_text() == sync_facade.generate(), "run `make sync`"


@pytest.mark.parametrize(
    ("source", "facade", "omitted"),
    [
        (
            Bus,
            facades.SyncBus,
            {
                "publisher",
                "sync",
                "subscriber",
                "projection",
                "projections",
                "subscribers",
                "run",
                "lifespan",
                "open",
                "configure",
                "latest_metrics",
                "elsewhere",
            },
        ),
        (DeadLetters, facades.SyncDeadLetters, set()),
        (consumer.Consumer, facades.SyncConsumer, set()),
        (delivered.Delivery, facades.SyncDelivery, set()),
        (delivered.DeliveredBatch, facades.SyncDeliveredBatch, set()),
        (Prepared, facades.SyncPrepared, set()),
    ],
)
def test_everything_public_is_offered_and_nothing_of_it_is_to_be_awaited(
    source: type, facade: type, omitted: set[str]
) -> None:
    def public(cls: type) -> set[str]:
        return {name for name in dir(cls) if name[0] != "_"}

    assert public(source) - omitted <= public(facade)
    for name in public(facade):
        method = inspect.getattr_static(facade, name)
        assert not inspect.iscoroutinefunction(method)
        assert not inspect.isasyncgenfunction(method)
        original = inspect.getattr_static(source, name, None)
        if inspect.isfunction(original):
            assert list(inspect.signature(original).parameters) == list(inspect.signature(method).parameters)


# --- the same answers ------------------------------------------------------------------------


def test_what_is_published_is_read(bus: SyncBus) -> None:
    receipt = bus.publish(orders, Placed("ada", 1), headers={"a": "b"})
    assert isinstance(receipt, Receipt)
    together = bus.publish_batch(orders, [Placed("ada", number) for number in range(2, 1_500)])
    assert together.positions[-1].offset == 1_498
    partition = receipt.position.partition
    found = [orders.decode(each) for each in bus.read(orders, partition=partition)]
    assert found == [Placed("ada", number) for number in range(1, 1_500)]
    assert sum(len(batch) for batch in bus.read_batches(orders)) == 1_499
    assert [each.offset for each in bus.read(orders, partition=partition, start=3, stop=5)] == [3, 4]


def test_a_prepared_publish_is_stored_once(bus: SyncBus) -> None:
    prepared = bus.prepare(raw, b"once")
    assert (len(prepared), prepared.topic) == (1, "raw")
    first = prepared.send()
    again = prepared.send(timeout=60)
    assert first.position == again.position == Position("raw", 0, 0)
    assert again.duplicate
    assert len(bus.prepare_batch(raw, [b"x", b"y"]).send()) == 2


def test_events_are_delivered_settled_and_delivered_again(bus: SyncBus) -> None:
    bus.publish_batch(raw, [b"fine", b"again", b"never"], keys=["a", "b", "c"])
    seen: list[tuple[bytes, int]] = []
    with bus.consume(raw, "s", retry=Retry(delay=0)) as consumer:
        assert consumer.name == "s"
        for delivery in consumer:
            assert isinstance(delivery, SyncDelivery)
            seen.append((delivery.value, delivery.attempt))
            if delivery.value == b"never":
                delivery.reject("no")
            elif delivery.value == b"again" and delivery.attempt == 1:
                delivery.nack(reason=ValueError("once more"))
            else:
                delivery.ack()
            if len(seen) == 4:
                break
        consumer.flush()
        assert (consumer.active, consumer.trouble) == ([0], {})
    assert sorted(seen) == [(b"again", 1), (b"again", 2), (b"fine", 1), (b"never", 1)]
    assert [info.lag for info in bus.lag(raw, "s")] == [0]


def test_batches_are_delivered_and_settled(bus: SyncBus) -> None:
    bus.publish_batch(raw, [b"%d" % number for number in range(1_000)])
    left = set(range(1_000))
    with bus.consume(raw, "s", mode="exclusive") as consumer:
        for batch in consumer.batches(max_events=300):
            assert batch.partition == 0
            assert [int(each.data) for each in batch] == batch.offsets.tolist()
            assert batch.to_arrow().num_rows == len(batch) <= 300
            left -= set(batch.offsets.tolist())
            first, *rest = batch.offsets.tolist()
            batch.ack([first])
            batch.ack(up_to=rest[-1])
            if not left:
                break
    assert bus.lag(raw, "s")[0].lag == 0


def test_what_is_not_settled_is_given_back(bus: SyncBus) -> None:
    bus.publish(raw, b"x")
    with bus.consume(raw, "s", mode="exclusive") as consumer:
        kept = next(iter(consumer))
    with pytest.raises(StaleDelivery):
        kept.ack()
    with bus.consume(raw, "s", mode="exclusive") as consumer:
        delivery = next(iter(consumer))
        assert (delivery.event.data, delivery.attempt) == (b"x", 1)
        delivery.ack()


def test_subscriptions_are_looked_after(bus: SyncBus) -> None:
    bus.publish_batch(raw, [b"x"] * 10)
    with bus.consume(raw, "s", mode="exclusive"):
        pass
    assert [each.name for each in bus.subscriptions(raw)] == ["s"]
    assert bus.seek(raw, "s", 4) == {0: (0, 4)}
    assert bus.lag("raw")[0].lag == 6
    assert bus.change(raw, "s", window=500).policy["window_events"] == 500
    bus.pause(raw, "s")
    assert bus.subscriptions(raw)[0].policy["paused"] is True
    bus.resume(raw, "s")
    assert bus.delete_subscription(raw, "s") is True
    assert bus.delete_subscription(raw, "s") is False


def test_delayed_publishes_are_scheduled_and_cancelled(bus: SyncBus) -> None:
    receipt = bus.publish(raw, b"later", delay=3_600)
    assert bus.scheduled() == [receipt]
    assert bus.cancel_scheduled(receipt.id) is True
    assert bus.scheduled() == []


def test_staging_uses_the_connection_in_the_thread_that_it_belongs_to(url: str, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    connection = sqlite3.connect(path)  # which no other thread may use
    bus = Bus(url, topics=[raw], outbox=path).sync()
    with connection:
        bus.stage(connection, raw, b"staged", key="k")
    assert loop_threads() == []  # it needs none
    with bus, bus.consume(raw, "s") as consumer:
        assert next(iter(consumer)).event.data == b"staged"
    connection.close()
    before = Bus("memory:", topics=[raw], outbox=path).sync()
    with pytest.raises(InvalidEvent):
        before.stage(connection, raw, "text")  # type: ignore[misc]
    before.close()


def test_errors_are_raised_where_the_call_was_made(bus: SyncBus) -> None:
    with pytest.raises(UnknownTopic, match="did you mean 'raw'"):
        bus.publish("rwa", b"x")
    with pytest.raises(InvalidEvent):
        bus.publish(raw, "text")  # type: ignore[misc]
    with pytest.raises(UsageError, match="partitions 0 to 0"):
        list(bus.read(raw, partition=7))


@pytest.mark.parametrize("after", [False, True])
def test_an_unknown_publish_is_sent_again_without_awaiting(after: bool) -> None:
    store = Faulty(MemoryStore())
    with Bus("memory:", topics=[raw], store=store).sync() as bus:
        store.fail("log.append", OSError("no answer"), times=2, after=after)
        with pytest.raises(PublishUnknown) as caught:
            bus.publish(raw, b"x")
        with pytest.raises(PublishUnknown) as again:
            caught.value.prepared.send()
        assert again.value.prepared.send().duplicate is after
        assert [each.data for each in bus.read(raw)] == [b"x"]


def test_the_errors_of_a_whole_event_are_the_same(bus: SyncBus) -> None:
    bus.publish(raw, Event(data=b"x", key=b"k", subject="it"))
    (found,) = bus.read(raw)
    assert (found.subject, found.key) == ("it", b"k")


# --- threads ---------------------------------------------------------------------------------


def test_several_threads_publish_at_once(bus: SyncBus) -> None:
    receipts: list[Receipt] = []

    def publish(thread: int) -> None:
        receipts.extend(bus.publish(orders, Placed(f"c{thread}", number)) for number in range(50))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({receipt.position for receipt in receipts}) == 400
    found = [orders.decode(each) for each in bus.read(orders)]
    for number in range(8):
        mine = [value.number for value in found if value.customer == f"c{number}"]
        assert mine == list(range(50))


def test_several_threads_share_a_consumer(bus: SyncBus) -> None:
    bus.publish_batch(raw, [b"%d" % number for number in range(200)], keys=[f"k{number}" for number in range(200)])
    taken: Counter[bytes] = Counter()
    with bus.consume(raw, "s") as consumer:

        def work() -> None:
            for delivery in consumer:
                taken[delivery.value] += 1
                delivery.ack()
                if len(taken) == 200:
                    consumer.close()

        threads = [in_a_thread(work) for _ in range(4)]
        for thread in threads:
            thread.join()
    assert set(taken.values()) == {1}


async def test_a_loop_may_run_in_the_thread_that_calls(bus: SyncBus) -> None:
    bus.publish(raw, b"x")
    assert [each.data for each in bus.read(raw)] == [b"x"]


def test_a_call_sees_the_context_of_its_caller(bus: SyncBus) -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    variable.set("mine")

    async def look() -> str:
        return variable.get()

    assert bus._portal.call(look()) == "mine"


def test_the_thread_of_the_loop_cannot_wait_for_itself(bus: SyncBus) -> None:
    with pytest.raises(UsageError, match="cannot wait for itself"):
        bus._portal.run(bus.lag)
    with pytest.raises(UsageError, match="cannot wait for itself"):
        bus._portal.run(bus.close)
    bus.publish(raw, b"on")


# --- being interrupted -----------------------------------------------------------------------


def interrupted(work: Callable[[], object], started: threading.Event) -> None:
    """Do something that waits, and interrupt it as Ctrl-C does, once it has started."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        started.wait()
        signal.pthread_kill(main, signal.SIGINT)

    thread = in_a_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        work()
    thread.join()


def test_an_interrupt_cancels_the_call_and_nothing_else(bus: SyncBus) -> None:
    started, other_started, cancelled = threading.Event(), threading.Event(), threading.Event()
    answers: list[str] = []

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    gate = bus._portal.run(asyncio.Event)

    async def patient() -> str:
        other_started.set()
        await gate.wait()
        return "answered"

    other = in_a_thread(lambda: answers.append(bus._portal.call(patient())))
    other_started.wait()
    interrupted(lambda: bus._portal.call(endless()), started)
    assert cancelled.wait(60)
    bus._portal.run(gate.set)
    other.join()
    assert answers == ["answered"]


def test_a_consumer_that_was_interrupted_goes_on(bus: SyncBus) -> None:
    with bus.consume(raw, "s", mode="exclusive") as consumer:
        started = threading.Event()

        def look() -> None:
            while not bus._portal.run(lambda: [task for task in asyncio.all_tasks() if "_next" in repr(task)]):
                pass
            started.set()

        looking = in_a_thread(look)
        interrupted(lambda: next(iter(consumer)), started)
        looking.join()
        bus.publish(raw, b"x")
        delivery = next(iter(consumer))
        assert delivery.event.data == b"x"
        delivery.ack()


# --- the end ---------------------------------------------------------------------------------


def test_the_thread_begins_with_the_first_use_and_ends_with_the_block(url: str) -> None:
    bus = Bus(url, topics=[raw]).sync()
    assert loop_threads() == []
    with bus:
        assert len(loop_threads()) == 1
        bus.publish(raw, b"x")
    assert loop_threads() == []
    for _ in range(2):
        bus.close()
    for call in (lambda: bus.publish(raw, b"x"), lambda: list(bus.read(raw)), bus.__enter__):
        with pytest.raises(BusClosed, match="this bus is closed"):
            call()


def test_a_bus_that_was_never_used_is_closed_without_a_thread() -> None:
    bus = Bus("memory:", topics=[raw]).sync()
    bus.close()
    with pytest.raises(BusClosed):
        bus.publish(raw, b"x")
    assert "SyncBus" in repr(bus)


def test_closing_ends_what_other_threads_wait_for(url: str) -> None:
    bus = Bus(url, topics=[raw]).sync()
    ended: list[str] = []
    ready = threading.Event()

    def consume() -> None:
        with bus.consume(raw, "s") as consumer:
            ready.set()
            for _ in consumer:
                pass
        ended.append("consumer")

    async def endless() -> None:
        waiting.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(BusClosed, match="while something waited"):
            bus._portal.call(endless())
        ended.append("call")

    waiting = threading.Event()
    threads = [in_a_thread(consume), in_a_thread(wait)]
    ready.wait()
    waiting.wait()
    closing = [in_a_thread(bus.close) for _ in range(3)]
    for thread in (*threads, *closing):
        thread.join()
    assert sorted(ended) == ["call", "consumer"]
    assert loop_threads() == []


def test_threads_use_a_bus_that_is_open_in_its_own_loop_and_do_not_close_it(url: str) -> None:
    bus = Bus(url, topics=[raw])
    shared = bus.sync()
    handled: list[bytes] = []
    ended = threading.Event()

    @bus.subscriber(raw, "again")
    def handle(data: bytes) -> None:
        with bus.sync() as own:  # which is closed at the end, and the bus is not
            handled.append(data)
            if len(data) < 3:
                own.publish(raw, data + b"x")
                shared.publish(raw, data + b"y")
        if len(handled) == 7:
            ended.set()

    async def use() -> None:
        async with bus:
            await bus.publish(raw, b"a")
            assert await asyncio.to_thread(ended.wait, 60)
            with pytest.raises(UsageError, match="cannot wait for itself"):
                shared.publish(raw, b"x")
            assert loop_threads() == []

    asyncio.run(use())
    assert sorted(handled) == [b"a", b"ax", b"axx", b"axy", b"ay", b"ayx", b"ayy"]
    for closed in (shared, bus.sync()):
        with pytest.raises(BusClosed):
            closed.publish(raw, b"x")


def test_a_bus_that_was_left_open_in_a_loop_that_has_ended_is_refused() -> None:
    bus = Bus("memory:", topics=[raw])
    asyncio.run(bus.publish(raw, b"x"))
    with pytest.raises(UsageError, match="left open in an event loop that has ended"):
        bus.sync().publish(raw, b"x")


def test_what_was_iterated_before_an_error_is_given_first() -> None:
    closed = threading.Event()

    async def items() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
            raise ZeroDivisionError
        finally:
            closed.set()

    async def end() -> None:
        pass

    portal = Portal(lambda: None, end, lambda _portal, prepared: prepared)
    found: list[int] = []
    with pytest.raises(ZeroDivisionError):
        found.extend(portal.iterate(items(), at_once=10))
    assert found == [1, 2]
    closed.clear()
    found.clear()
    for item in portal.iterate(items(), at_once=10):
        found.append(item)
        if item == 2:
            break
    assert found == [1, 2]
    assert closed.wait(60)
    closed.clear()
    for item in portal.iterate(items()):
        assert item == 1
        break
    assert closed.wait(60)  # also a generator that was left
    portal.stop()


# --- processes -------------------------------------------------------------------------------


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_the_interpreter_closes_at_exit_what_nobody_has_closed(root: Path) -> None:
    done = run(
        """
import sys
from penstock import Bus, Checkpoint, Topic
raw = Topic("raw", bytes)
bus = Bus("file:" + sys.argv[1], topics=[raw]).sync()
bus.publish_batch(raw, [b"%d" % number for number in range(10)])
consumer = bus.consume(raw, "s", mode="exclusive", checkpoint=Checkpoint(1_000, 3_600))
consumer.__enter__()
deliveries = iter(consumer)
for number in range(5):
    next(deliveries).ack()
print("done")
""",
        str(root),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    with Bus(f"file:{root}", topics=[raw]).sync() as bus:
        assert bus.lag(raw, "s")[0].lag == 5  # which only closing has written


def test_a_bus_that_was_made_before_a_fork_works_in_every_child(root: Path) -> None:
    done = run(
        """
import os, sys
from penstock import Bus, Topic
raw = Topic("raw", bytes)
bus = Bus("file:" + sys.argv[1], topics=[raw]).sync()
children = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        bus.publish(raw, b"%d" % number)
        sys.exit(0)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(codes, sorted(found.data for found in bus.read(raw)))
""",
        str(root),
    )
    assert (done.stdout, done.stderr) == ("[0, 0, 0] [b'0', b'1', b'2']\n", "")


def test_in_a_child_of_a_process_that_has_used_it_it_says_so_and_harms_nothing(root: Path) -> None:
    with Bus(f"file:{root}", topics=[raw]).sync() as bus:
        bus.publish(raw, b"before")
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # it ends by itself, whatever happens
            told = b"nothing"
            try:
                try:
                    bus.publish(raw, b"child")
                except UsageError as error:
                    told = str(error).encode()
                bus.close()
            except BaseException as error:  # noqa: BLE001 - the child must end here, whatever happens
                told = repr(error).encode()
            os.write(writing, told)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        assert told.startswith(b"this bus was opened by process %d, before a fork" % os.getpid())
        bus.publish(raw, b"after")
        assert [found.data for found in bus.read(raw)] == [b"before", b"after"]
