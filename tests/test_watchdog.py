"""Who blocks the event loop is named; who only waits, or gets no processor, is not blamed."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from tests.shop import Placed, placed

from penstock import Bus
from penstock.bus import watchdog
from penstock.bus.watchdog import TICKS, Watchdog


async def test_a_handler_that_blocks_the_event_loop_is_named() -> None:
    told, words = threading.Event(), list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "blocks it" in record.getMessage():  # perhaps after it was short of a processor
                # Here, because other handlers, such as pytest's, are told later, when all of this may be over.
                words.append(record.getMessage())
                told.set()

    listener = Listener()
    logging.getLogger("penstock.bus.watchdog").addHandler(listener)
    bus = Bus("memory:", topics=[placed])
    ended = asyncio.Event()

    @bus.subscriber(placed, "s")
    async def computes(order: Placed) -> None:
        assert told.wait(30), "nobody has noticed"
        ended.set()

    try:
        async with bus:
            await bus.publish(placed, Placed("a", 1))
            await asyncio.wait_for(ended.wait(), 60)
    finally:
        logging.getLogger("penstock.bus.watchdog").removeHandler(listener)
    message = words[0]
    assert message.startswith("the event loop has not run for ")
    assert "computes blocks it at" in message
    assert "in wait" in message
    assert message.endswith("; a `def` handler runs in a thread, and may block")


async def test_a_loop_that_only_waits_is_not_called_blocked(caplog: pytest.LogCaptureFixture) -> None:
    loop, looked = asyncio.get_running_loop(), asyncio.Event()
    looks = 0

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal looks
            looks += 1
            if looks == 4 * TICKS:  # four times as long as it may be blocked
                loop.call_soon_threadsafe(looked.set)
            return super().wait(timeout)

    dog = Watchdog(list, blocked_seconds=0.2)
    dog._ended = Counting()
    dog.start()
    await looked.wait()
    dog.stop()
    assert dog.blocked == 0
    assert caplog.records == []


async def test_who_gets_no_processor_does_not_block_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, words = threading.Event(), list[str]()

    def hear(text: str, *_: object) -> None:
        words.append(text)
        told.set()

    monkeypatch.setattr(watchdog, "starved_seconds", lambda _thread: time.monotonic())  # all the time
    monkeypatch.setattr(watchdog.logger, "warning", hear)
    dog = Watchdog(list, blocked_seconds=0.2)
    dog.start()
    assert told.wait(30), "nobody has noticed"  # in the loop, which does not run meanwhile
    dog.stop()
    [text] = words
    assert "others had the processors" in text
    assert dog.blocked == 0


class Looks(threading.Event):
    """The looks of a watchdog, so long after the loop ticked last, and its clock."""

    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self._left = list(seconds)
        self.now = self._began = 100.0

    def wait(self, timeout: float | None = None) -> bool:
        if not self._left:
            return True
        self.now = self._began + self._left.pop(0)
        return False

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("starved", "times", "words"),
    [
        (0.0042, (1.001,), []),  # it hardly waited for a processor: the next look decides
        (0.0042, (1.001, 1.251), ["it is blocked at"]),
        (0.49, (1.25, 1.4), []),
        (0.5, (1.25, 1.4, 1.6), ["others had the processors for 0.5 s of it", "it is blocked at"]),
    ],
)
def test_others_are_blamed_only_if_they_had_the_processors_for_long(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    starved: float,
    times: tuple[float, ...],
    words: list[str],
) -> None:
    looks = Looks(*times)
    monkeypatch.setattr(watchdog, "time", looks)
    dog = Watchdog(list, blocked_seconds=1.0)
    dog._ended = looks
    monkeypatch.setattr(watchdog, "starved_seconds", lambda _thread: starved)  # since its last tick
    dog._watch(threading.get_ident())
    assert [said in text for said, text in zip(words, caplog.messages, strict=True)] == [True] * len(words)
    assert dog.blocked == sum("blocked" in said for said in words)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells who waits for a processor")
def test_it_is_known_for_how_long_a_thread_got_no_processor() -> None:
    thread, cpu = threading.get_native_id(), min(os.sched_getaffinity(0))
    before, everywhere = watchdog.starved_seconds(thread), os.sched_getaffinity(0)
    spinning = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spinning], stdout=subprocess.PIPE) as rival:
        try:
            assert rival.stdout is not None
            rival.stdout.readline()
            os.sched_setaffinity(0, {cpu})
            until = time.monotonic() + 30
            while watchdog.starved_seconds(thread) < before + 0.1:
                assert time.monotonic() < until, "two on one processor, and neither waits"
        finally:
            os.sched_setaffinity(0, everywhere)
            rival.kill()
