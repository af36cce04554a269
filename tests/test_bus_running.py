"""What a bus promises to whoever runs it: when it ends, what it says then, and what may be decided before."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from textwrap import dedent

import pytest

from penstock import Bus, Delivery, Settings, Topic
from penstock.bus.loop import run_to_end
from penstock.bus.signals import Ending, caught
from penstock.bus.subscribers import announcement
from penstock.errors import UsageError
from penstock.settings import DeliverySettings, Limits

orders = Topic("orders", bytes)


class Shop:
    """A bus with one handler that waits for the test."""

    def __init__(self, drain_seconds: float = 30.0) -> None:
        settings = Settings(url="memory:", delivery=DeliverySettings(drain_seconds=drain_seconds))
        self.bus = Bus(settings=settings, topics=[orders])
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.ended = 0

        @self.bus.subscriber(orders, "billing")
        async def bill(order: bytes, delivery: Delivery[bytes]) -> None:
            self.begun.set()
            await self.may_end.wait()
            self.ended += 1


async def test_a_run_ends_when_its_event_is_set_and_says_that_all_handlers_have_ended() -> None:
    shop, until = Shop(), asyncio.Event()
    running = asyncio.ensure_future(shop.bus.run(until=until))
    await shop.bus.publish(orders, b"first")
    await shop.begun.wait()
    until.set()
    shop.may_end.set()
    assert await running is True
    assert shop.ended == 1


async def test_a_run_says_when_handlers_had_to_be_cancelled() -> None:
    shop, until = Shop(drain_seconds=0.0), asyncio.Event()
    running = asyncio.ensure_future(shop.bus.run(until=until))
    await shop.bus.publish(orders, b"first")
    await shop.begun.wait()
    until.set()
    assert await running is False
    assert shop.ended == 0


async def test_nothing_is_begun_after_an_end_was_asked_for_not_even_in_the_same_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending = Ending()
    monkeypatch.setattr("penstock.bus.bus.caught", lambda: nullcontext(ending))
    shop = Shop()
    running = asyncio.ensure_future(shop.bus.run())
    for number in range(3):  # of one lane, so that each waits for the one before
        await shop.bus.publish(orders, b"%d" % number)
    await shop.begun.wait()
    shop.may_end.set()  # first: whoever waits for this is woken before whoever waits for the end
    ending.ask()
    assert await running is True
    assert shop.ended == 1


async def test_a_signal_handler_from_elsewhere_than_python_is_not_restored_and_those_of_python_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ours(*_: object) -> None:
        """End nothing."""

    before = {number: signal.signal(number, ours) for number in (signal.SIGTERM, signal.SIGINT)}
    known = signal.getsignal
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else known(number))
            with pytest.raises(ZeroDivisionError), caught():
                raise ZeroDivisionError
        assert known(signal.SIGTERM) is signal.SIG_DFL
        assert known(signal.SIGINT) is ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def test_a_bus_is_configured_before_it_is_used_and_not_after(tmp_path: Path) -> None:
    bus = Bus(f"file:{tmp_path / 'here'}", topics=[orders])
    bus.configure(url="memory:", settings=Settings(limits=Limits(event_bytes_max=10)))
    assert (bus.url, bus.settings.limits.event_bytes_max) == ("memory:", 10)
    async with bus:
        with pytest.raises(UsageError, match="the limit is 10"):
            await bus.publish(orders, bytes(100))
        with pytest.raises(UsageError, match="is in use: configure it before it opens"):
            bus.configure(url="memory:")


def test_what_is_not_configured_stays_as_it_was() -> None:
    settings = Settings(url="memory:")
    bus = Bus("file:./nowhere", settings=settings)
    bus.configure()
    assert (bus.url, bus.settings) == ("file:./nowhere", settings)


def test_an_outbox_is_configured_before_anything_is_staged(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    bus = Bus("memory:", topics=[orders], outbox=tmp_path / "other.db")
    bus.configure(outbox=path)
    with closing(sqlite3.connect(path)) as connection:
        bus.stage(connection, orders, b"first")
    with pytest.raises(UsageError):
        bus.configure(outbox=tmp_path / "other.db")


def test_an_announcement_names_every_subscriber_and_hides_a_password() -> None:
    shop = Shop()
    first, second = announcement("postgresql://app:geheim@db/events", shop.bus.subscribers)
    assert first.endswith("runs 1 subscriber of postgresql://app:***@db/events:")
    assert second == "  orders → billing, 16 at a time: Shop.__init__.<locals>.bill"


def test_uvloop_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loop() -> str:
        return type(asyncio.get_running_loop()).__name__

    program = "import asyncio\n\n\nclass Loop(asyncio.SelectorEventLoop): ...\n\n\nnew_event_loop = Loop\n"
    (tmp_path / "uvloop.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "uvloop", raising=False)
    assert run_to_end(loop()) == "Loop"


def test_a_program_ends_although_a_task_of_it_does_not_let_itself_be_cancelled() -> None:
    program = dedent(
        """
        import asyncio
        from contextlib import suppress

        from penstock.bus.loop import run_to_end


        async def stubborn():
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()


        async def main():
            task = asyncio.create_task(stubborn())
            await asyncio.sleep(0)
            return task.get_name()


        print(bool(run_to_end(main())), flush=True)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
