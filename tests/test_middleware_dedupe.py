"""Dedupe: what was handled is not handled again, as far as marks reach; and it says how far."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from contextlib import asynccontextmanager, closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from tests.deliveries import kept, raw
from xxhash import xxh3_128_digest

from penstock import Delivery, Retry
from penstock.bus.middleware.dedupe import MARK_BYTES, ROWS_MAX, Dedupe, _Memory
from penstock.clock import VirtualClock
from penstock.errors import StoreUnavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.deliveries import World

    from penstock.bus.middleware import Middleware

ROOT = Path(__file__).parent.parent


class Handled:
    """A handler that counts its calls by event."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def has(self, count: int) -> bool:
        return len(self.data) >= count

    async def through(self, middleware: Middleware, delivery: Delivery[Any]) -> None:
        async def proceed() -> None:
            self.data.append(delivery.event.data)

        await middleware(delivery, proceed)


async def deliveries(world: World, *payloads: bytes, name: str = "mails", **fields: Any) -> list[Delivery[Any]]:
    """Return deliveries of a bus, one for each payload, of keys of their own."""
    bus = world.bus()
    for number, payload in enumerate(payloads):
        await world.publish(bus, payload, key=f"{number}", **fields)
    async with world.running(bus.consume(raw, name, mode="shared"), kept) as running:
        await world.until(lambda: len(running.taken) == len(payloads))
    return sorted(running.deliveries, key=lambda delivery: delivery.position.offset)


class Fake:
    """As much of a delivery as middleware asks for, where there must be very many."""

    def __init__(self, number: int) -> None:
        self._digest = xxh3_128_digest(b"raw/mails\0penstock:raw\0%d" % number)
        self.subscription = "mails"
        self.position = number
        self._by_hand = False
        self._succeeded = True


async def done() -> None:
    """Handle an event."""


async def mark(dedupe: Dedupe, *numbers: int) -> None:
    for number in numbers:
        delivery: Any = Fake(number)
        await dedupe(delivery, done)


async def known(dedupe: Dedupe, *numbers: int) -> list[int]:
    """Return which of these events would not be handled."""
    found = []
    for number in numbers:
        handled = False

        async def fail() -> None:
            nonlocal handled
            handled = True
            raise ZeroDivisionError  # so that asking leaves no mark

        delivery: Any = Fake(number)
        try:
            await dedupe(delivery, fail)
        except ZeroDivisionError:
            assert handled
        else:
            found.append(number)
    return found


@pytest.fixture(params=["memory", "file"])
def dedupe(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Dedupe]:
    with Dedupe(tmp_path / "marks.db" if request.param == "file" else None) as made:
        yield made


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the thread of a Dedupe begins to write, and so takes no marks before it has the file."""
    connect, writing = sqlite3.connect, threading.Event()

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **options)
        connection.set_trace_callback(lambda statement: writing.set() if statement == "BEGIN IMMEDIATE" else None)
        return connection

    monkeypatch.setattr("penstock.bus.middleware.dedupe.sqlite3.connect", traced)
    return writing


@asynccontextmanager
async def locked(path: Path, dedupe: Dedupe, writing: threading.Event) -> AsyncIterator[None]:
    """Hold the lock of the file, for which the thread waits; event -1 is marked for that."""
    await dedupe.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writing.clear()
        await mark(dedupe, -1)
        assert await asyncio.to_thread(writing.wait, 30)
        yield


# --- what it gives ----------------------------------------------------------------------------


async def test_what_was_handled_is_not_handled_again(world: World, dedupe: Dedupe) -> None:
    one, two = await deliveries(world, b"one", b"two")
    handled = Handled()
    for delivery in (one, two, one, two, two):
        await handled.through(dedupe, delivery)
    assert handled.data == [b"one", b"two"]
    assert dedupe.duplicates == 3


async def test_an_event_that_was_published_twice_with_one_id_is_handled_once(world: World, dedupe: Dedupe) -> None:
    handled = Handled()
    for delivery in await deliveries(world, b"one", b"two", id="payment-1", source="bank"):
        await handled.through(dedupe, delivery)
    assert handled.data == [b"one"]


async def test_every_subscription_handles_it(world: World, dedupe: Dedupe) -> None:
    bus, handled = world.bus(), Handled()
    await world.publish(bus, b"one", id="e-1")
    await dedupe.flush()  # it is open from now on: a thread does not wait for the time of a test
    for count, name in enumerate(("mails", "prints"), 1):
        async with world.running(bus.consume(raw, name), partial(handled.through, dedupe)):
            await world.until(partial(handled.has, count))
    assert handled.data == [b"one", b"one"]


async def test_what_failed_is_not_marked_and_its_error_is_raised(dedupe: Dedupe) -> None:
    assert await known(dedupe, 1) == []
    assert await known(dedupe, 1) == []
    await mark(dedupe, 1)
    assert await known(dedupe, 1) == [1]


@pytest.mark.parametrize("ack", ["auto", "manual"])
@pytest.mark.parametrize("how", ["nack", "reject", "raise"])
async def test_what_is_refused_by_hand_is_not_marked_and_is_handled_when_it_comes_again(
    world: World, dedupe: Dedupe, how: str, ack: Literal["auto", "manual"]
) -> None:
    bus, handled = world.bus(raw), list[int]()

    @bus.subscriber(raw, "mails", middleware=[dedupe], ack=ack, retry=Retry(max_retries=1, delay=1, jitter=0))
    async def handle(data: bytes, delivery: Delivery[bytes]) -> None:
        handled.append(delivery.attempt + 10 * delivery.replay)
        match how if len(handled) == 1 else "ack":
            case "ack":
                await delivery.ack()
            case "nack":
                await delivery.nack(reason="not yet")
            case "reject":
                await delivery.reject("no use")
            case _:
                raise ValueError("not yet")

    await dedupe.flush()  # which opens its file
    await world.done(bus.__aenter__())
    await bus.publish(raw, b"0", key="k")
    await world.run(5)
    if how == "reject":
        assert await world.done(bus.dead_letters.replay(raw, "mails"))
        await world.run(5)
    await bus.publish(raw, b"1", key="k")
    await world.run(5)
    assert handled == ([1, 11, 1] if how == "reject" else [1, 2, 1])
    assert [lag.lag for lag in await world.done(bus.lag(raw, "mails"))] == [0]


async def test_what_comes_again_is_acked_where_handlers_ack_by_hand(world: World, dedupe: Dedupe) -> None:
    bus, handled = world.bus(raw), list[bytes]()

    @bus.subscriber(raw, "mails", middleware=[dedupe], ack="manual")
    async def handle(data: bytes, delivery: Delivery[bytes]) -> None:
        handled.append(data)
        await delivery.ack()

    await dedupe.flush()  # which opens its file
    await world.done(bus.__aenter__())
    for data in (b"0", b"0", b"1"):
        await bus.publish(raw, data, key="k", id=data.decode(), source="shop")
    await world.run(5)
    assert handled == [b"0", b"1"]
    assert [lag.lag for lag in await world.done(bus.lag(raw, "mails"))] == [0]


async def test_what_is_acked_after_its_handler_has_returned_is_not_marked(world: World, dedupe: Dedupe) -> None:
    bus, handled = world.bus(raw), list[Delivery[bytes]]()

    @bus.subscriber(raw, "mails", middleware=[dedupe], ack="manual", retry=Retry(max_retries=1, delay=1, jitter=0))
    async def handle(data: bytes, delivery: Delivery[bytes]) -> None:
        handled.append(delivery)

    await dedupe.flush()  # which opens its file
    await world.done(bus.__aenter__())
    await bus.publish(raw, b"0", key="k")
    await world.run(1)
    await handled[0].nack(reason="somebody said no")
    await world.run(5)
    await handled[1].ack()
    await world.run(1)
    assert [delivery.attempt for delivery in handled] == [1, 2]
    assert [lag.lag for lag in await world.done(bus.lag(raw, "mails"))] == [0]


async def test_a_second_attempt_at_the_same_time_waits_and_handles_it_only_if_the_first_failed(dedupe: Dedupe) -> None:
    for fails in (True, False):
        go, begun = asyncio.Event(), asyncio.Event()
        calls: list[str] = []

        async def first(fails: bool = fails, go: asyncio.Event = go, begun: asyncio.Event = begun) -> None:
            begun.set()
            await go.wait()
            if fails:
                raise ZeroDivisionError

        async def second(calls: list[str] = calls) -> None:
            calls.append("second")

        delivery: Any = Fake(int(fails))
        one = asyncio.create_task(dedupe(delivery, first))
        await begun.wait()
        others = [asyncio.create_task(dedupe(delivery, second)) for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert calls == []
        go.set()
        await asyncio.gather(one, *others, return_exceptions=True)
        assert calls == (["second"] if fails else [])


async def test_what_was_cancelled_is_not_marked(dedupe: Dedupe) -> None:
    begun = asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    delivery: Any = Fake(1)
    task = asyncio.create_task(dedupe(delivery, hang))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await known(dedupe, 1) == []


# --- bounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True])
async def test_no_more_are_remembered_than_most_and_the_oldest_go_first(tmp_path: Path, file: bool) -> None:
    with Dedupe(tmp_path / "marks.db" if file else None, most=100) as dedupe:
        for number in range(1_000):
            await mark(dedupe, number)
            if number % 50 == 0:
                await dedupe.flush()
        await dedupe.flush()
        still = await known(dedupe, *range(1_000))
        assert still == list(range(1_000 - len(still), 1_000))
        assert 90 <= len(still) <= 100


def test_of_many_marks_that_come_at_once_the_last_ones_are_remembered() -> None:
    memory = _Memory(keep_us=1_000_000, most=100)
    marks = [b"%d" % number for number in range(250)]
    memory.marks.update(marks)
    memory.note(marks, 0)
    still = [mark for mark in marks if memory.knows(mark, 0)]
    assert still == marks[-len(still) :]
    assert 90 <= len(still) <= 100


@pytest.mark.parametrize("most", [1, 100])
async def test_while_the_file_is_locked_no_more_are_remembered_than_most_and_the_oldest_go_first(
    tmp_path: Path, writing: threading.Event, most: int
) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path, most=most) as dedupe:
        await mark(dedupe, *range(50))
        async with locked(path, dedupe, writing):
            await mark(dedupe, *range(50, 500))
            assert len(dedupe._marks) <= 2 * most  # though nothing was asked for, and so nothing forgotten but these
            for number in range(500, 1_000):
                await mark(dedupe, number, number)
            assert dedupe.duplicates == 500
            assert await known(dedupe, *range(1_000)) == list(range(1_000 - most, 1_000))
            await mark(dedupe, 999 - most)  # it was forgotten, and so it comes as if it were new
            assert await known(dedupe, 999 - most) == [999 - most]


@pytest.mark.parametrize("most", [1, 100])
async def test_after_more_than_most_came_while_the_file_was_locked_it_goes_on_as_before(
    tmp_path: Path, writing: threading.Event, most: int
) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path, most=most) as dedupe:
        async with locked(path, dedupe, writing):
            await mark(dedupe, *range(1_000))
        await dedupe.flush()
        for number in range(1_000, 1_020):
            await mark(dedupe, number)
            await dedupe.flush()
            assert await known(dedupe, number) == [number]
        still = await known(dedupe, *range(1_020))
        assert still == list(range(1_020 - len(still), 1_020))
        assert most * 0.9 <= len(still) <= most
    with Dedupe(path, most=most) as again:
        assert await known(again, *still) == still


async def test_what_was_marked_while_the_file_was_locked_is_forgotten_in_its_time(
    tmp_path: Path, writing: threading.Event
) -> None:
    clock, path = VirtualClock(), tmp_path / "marks.db"
    with Dedupe(path, keep=timedelta(hours=64), most=100, clock=clock) as dedupe:
        async with locked(path, dedupe, writing):
            await mark(dedupe, *range(250))
        await dedupe.flush()
        clock.advance(timedelta(hours=63))
        assert 249 in await known(dedupe, *range(250))
        clock.advance(timedelta(hours=3))
        assert await known(dedupe, *range(250)) == []


@pytest.mark.parametrize("file", [False, True])
async def test_marks_are_kept_for_their_time_and_little_longer(tmp_path: Path, file: bool) -> None:
    clock = VirtualClock()
    path = tmp_path / "marks.db" if file else None
    with Dedupe(path, keep=timedelta(hours=64), clock=clock) as dedupe:
        await mark(dedupe, 1)
        await dedupe.flush()
        clock.advance(timedelta(hours=63))
        await mark(dedupe, 2)
        await dedupe.flush()
        assert await known(dedupe, 1, 2) == [1, 2]
        clock.advance(timedelta(hours=3))  # nothing is marked meanwhile
        assert await known(dedupe, 1, 2) == [2]


async def test_the_file_does_not_grow_beyond_what_is_kept(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "marks.db"

    def stored() -> int:
        with closing(sqlite3.connect(path)) as connection:
            [size] = connection.execute("SELECT SUM(LENGTH(mark)) FROM penstock_dedupe").fetchone()
            return int(size) // MARK_BYTES

    with Dedupe(path, keep=3600, most=ROWS_MAX * 10, clock=clock) as dedupe:
        await mark(dedupe, *range(ROWS_MAX + 500))
        await dedupe.flush()
        assert stored() == ROWS_MAX + 500
        clock.advance(3601)
        await mark(dedupe, -1)
        await dedupe.flush()
        await dedupe.flush()  # what is removed at a time is limited, too
        assert stored() == 1
    with Dedupe(path, keep=3600, most=10, clock=clock) as dedupe:
        await mark(dedupe, *range(100))
        clock.advance(61)
        await dedupe.flush()
        await dedupe.flush()
        assert stored() == 10


# --- the file ---------------------------------------------------------------------------------


async def test_rows_of_single_marks_are_read_however_many_there_are(tmp_path: Path) -> None:
    path, count = tmp_path / "marks.db", ROWS_MAX * 2 + 10
    with Dedupe(path) as dedupe:
        await mark(dedupe, -1)
    marks = [Fake(number)._digest for number in range(count)]
    with closing(sqlite3.connect(path)) as connection, connection:
        [(at,)] = connection.execute("SELECT marked_at FROM penstock_dedupe").fetchall()
        rows = [(each, at) for each in marks]
        connection.executemany("INSERT INTO penstock_dedupe (mark, marked_at) VALUES (?, ?)", rows)
    with Dedupe(path) as dedupe:
        assert await known(dedupe, -1, 0, ROWS_MAX, count - 1, count) == [-1, 0, ROWS_MAX, count - 1]


async def test_marks_outlive_their_process_once_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path) as dedupe:
        await mark(dedupe, *range(ROWS_MAX + 10))
    with Dedupe(path) as dedupe:
        assert await known(dedupe, 0, 5, ROWS_MAX + 9, ROWS_MAX + 10) == [0, 5, ROWS_MAX + 9]


PROCESS = """
    import asyncio, os, signal, sys
    from xxhash import xxh3_128_digest
    from penstock.bus.middleware.dedupe import Dedupe

    class Event:
        _digest = xxh3_128_digest(bytes(1).join([b"raw/mails", b"penstock:raw", sys.argv[2].encode()]))
        subscription, position, _by_hand, _succeeded = "mails", 0, False, True

    async def handle():
        if sys.argv[3] == "dies":
            print("the mail is sent", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    async def main():
        dedupe = Dedupe(sys.argv[1])
        await dedupe(Event, handle)
        if sys.argv[3] == "dies later":
            await dedupe.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())
"""


def process(path: Path, number: int, end: str) -> int:
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(path), str(number), end]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, check=False).returncode


async def test_another_process_sees_the_mark_without_being_told(tmp_path: Path) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path) as dedupe:
        assert await known(dedupe, 1) == []
        assert await asyncio.to_thread(process, path, 1, "ends and forgets to close") == 0
        while not await known(dedupe, 1):  # noqa: ASYNC110 - the thread that learns of it tells nobody
            await asyncio.sleep(0)
        assert await asyncio.to_thread(process, path, 2, "dies later") == -signal.SIGKILL
        await dedupe.flush()
        assert await known(dedupe, 1, 2) == [1, 2]


async def test_a_process_that_dies_before_the_mark_gives_a_duplicate_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "marks.db"
    assert await asyncio.to_thread(process, path, 1, "dies") == -signal.SIGKILL
    with Dedupe(path) as dedupe:
        assert await known(dedupe, 1) == []


async def test_two_that_write_by_turns_know_all_marks_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path) as one, Dedupe(path) as two:
        await asyncio.gather(one.flush(), two.flush())

        async def work(mine: Dedupe, numbers: range) -> None:
            for number in numbers:
                await mark(mine, number)
                if number % 7 == 0:
                    await mine.flush()

        await asyncio.gather(work(one, range(0, 400, 2)), work(two, range(1, 400, 2)))
        await asyncio.gather(one.flush(), two.flush())
        await asyncio.gather(one.flush(), two.flush())
        for each in (one, two):
            assert await known(each, *range(400)) == list(range(400))


async def test_many_that_open_a_new_file_at_once_all_do(tmp_path: Path) -> None:
    for number in range(60):
        several = [Dedupe(tmp_path / f"{number}.db") for _ in range(2)]
        await asyncio.gather(*(each.flush() for each in several))
        for each in several:
            each.close()


async def test_what_nobody_closes_is_written_when_it_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "marks.db"
    dedupe = Dedupe(path)
    await mark(dedupe, 1)
    del dedupe
    gc.collect()
    with Dedupe(path) as again:
        assert await known(again, 1) == [1]


async def test_making_one_does_no_io_and_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path) as dedupe:
        assert not path.exists()
        await mark(dedupe, 1)
        await dedupe.flush()
        for name in ("marks.db", "marks.db-wal", "marks.db-shm"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("trouble", "remedy"),
    [
        ("ALTER TABLE penstock_dedupe RENAME TO hidden", "ALTER TABLE hidden RENAME TO penstock_dedupe"),
        (
            "CREATE TRIGGER full BEFORE INSERT ON penstock_dedupe BEGIN SELECT RAISE(ABORT, 'full'); END",
            "DROP TRIGGER full",
        ),
    ],
    ids=["reading", "writing"],
)
async def test_while_the_file_takes_nothing_marks_are_in_memory_and_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: str, remedy: str
) -> None:
    path = tmp_path / "marks.db"
    with Dedupe(path) as dedupe:
        await dedupe.flush()
        with closing(sqlite3.connect(path)) as other:
            other.execute(trouble)
            await mark(dedupe, 1)
            await dedupe.flush()
            await dedupe.flush()
            assert await known(dedupe, 1) == [1]
            [record] = caplog.records
            assert (record.levelno, str(path) in record.getMessage()) == (logging.WARNING, True)
            other.execute(remedy)
        await dedupe.flush()
    with Dedupe(path) as again:
        assert await known(again, 1) == [1]


@pytest.mark.parametrize("what", ["no directory", "no database", "a directory"])
async def test_a_file_that_cannot_be_used_is_an_error_until_it_can(tmp_path: Path, what: str) -> None:
    path = tmp_path / "nowhere" / "marks.db" if what == "no directory" else tmp_path / "marks.db"
    if what == "no database":
        path.write_bytes(b"this is a text, and a rather long one, as every text that is no database" * 20)
    elif what == "a directory":
        path.mkdir()
    with Dedupe(path) as dedupe:
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"marks\.db cannot be opened.*a file of its own"):
                await mark(dedupe, 1)
        if what == "no directory":
            path.parent.mkdir()
        elif what == "no database":
            path.unlink()
        else:
            path.rmdir()
        await mark(dedupe, 1)
        assert await known(dedupe, 1) == [1]


async def test_a_call_that_is_cancelled_while_the_file_is_opened_does_not_matter_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, opening, go, opened = sqlite3.connect, threading.Event(), threading.Event(), []

    def slow(*args: Any, **options: Any) -> Any:
        opening.set()
        assert go.wait(30)
        opened.append(args)
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", slow)
    with Dedupe(tmp_path / "marks.db") as dedupe:
        first = asyncio.create_task(mark(dedupe, 1))
        await asyncio.to_thread(opening.wait)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        others = [asyncio.create_task(mark(dedupe, number)) for number in (2, 3)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*others)
        assert len(opened) == 1
        assert await known(dedupe, 1, 2, 3) == [2, 3]


async def test_one_that_is_closed_while_it_is_opened_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, opening, go = sqlite3.connect, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        opening.set()
        assert go.wait(30)
        return connect(*args, **options)

    monkeypatch.setattr(sqlite3, "connect", slow)
    dedupe = Dedupe(tmp_path / "marks.db")
    first = asyncio.create_task(mark(dedupe, 1))
    await asyncio.to_thread(opening.wait)
    closing = asyncio.create_task(asyncio.to_thread(dedupe.close))
    go.set()
    await closing
    with suppress(UsageError):  # it depends on which of the two was sooner
        await first
    assert not any(thread.name == "penstock-dedupe" for thread in threading.enumerate())


async def test_after_close_it_says_so_and_closing_twice_is_fine(tmp_path: Path) -> None:
    for path in (None, tmp_path / "marks.db"):
        dedupe = Dedupe(path)
        await mark(dedupe, 1)
        dedupe.close()
        dedupe.close()
        with pytest.raises(UsageError, match="is closed: make another one"):
            await mark(dedupe, 2)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}, {"keep": "a week"}, {"most": 0}, {"most": 1.5}])
def test_what_is_kept_is_said_rightly(options: Any) -> None:
    with pytest.raises(UsageError):
        Dedupe(**options)
