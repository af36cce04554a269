"""Handlers in processes of their own, which end as processes do: by a signal, or by their own hand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from tests.shop import Placed, placed

from penstock import Bus
from penstock.rows import ParkedFilter
from penstock.stores import open_store

if TYPE_CHECKING:
    from pathlib import Path

CHILD = textwrap.dedent(
    """
    import asyncio, logging, os, sys

    import penstock
    from penstock import Bus, Delivery, Retry
    from tests.shop import Placed, placed

    url, journal, ends = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT), sys.argv[3]
    bus = Bus(url, topics=[placed])
    told = logging.getLogger("penstock.bus.signals")
    told.setLevel(logging.INFO)
    told.addHandler(logging.StreamHandler(sys.stdout))

    @bus.subscriber(placed, "s", retry=Retry(max_retries=2, delay=0.01), concurrency=4)
    async def handle(order: Placed, delivery: Delivery[Placed]) -> None:
        if order.number == 13 and ends == "kills":
            os._exit(9)
        if ends == "waits":
            print("begun", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, os.read, 0, 1)
        os.write(journal, b"%d %d\\n" % (order.number, delivery.attempt))

    async def until_all_is_settled() -> None:
        async with bus:
            while (await bus.lag(placed, "s"))[0].lag:
                await asyncio.sleep(0.01)

    asyncio.run(bus.run() if ends == "waits" else until_all_is_settled())
    """
)


def child(url: str, journal: Path, ends: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, url, str(journal), ends],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


async def publish(url: str, count: int) -> None:
    async with Bus(url, topics=[placed]) as bus:
        await bus.publish_batch(placed, [Placed("abcdefg"[number % 7], number) for number in range(count)])


def test_an_event_that_kills_its_process_each_time_ends_as_a_dead_letter_and_the_rest_flows(tmp_path: Path) -> None:
    url, journal = f"file:{tmp_path / 'store'}", tmp_path / "journal"
    asyncio.run(publish(url, 40))
    codes: list[int] = []
    while not codes or codes[-1]:
        assert len(codes) < 8, f"it kills for ever: {codes}"
        with child(url, journal, "kills") as process:
            codes.append(process.wait(60))
    assert codes[:-1] == [9] * (len(codes) - 1)
    assert len(codes) > 3
    handled = Counter(int(line.split()[0]) for line in journal.read_text().splitlines())
    assert set(handled) == set(range(40)) - {13}
    store = open_store(url)
    try:
        [info] = [info for info in store.log.topics() if info.name == "placed"]
        [row] = store.parked.page(ParkedFilter(log_id=info.log_id, subscription="s", states=frozenset({"dead"})))
    finally:
        store.close()
    assert (row.offset, row.error_type) == (13, "ProcessDied")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_handlers_end_and_gives_back_what_was_not_begun(tmp_path: Path, number: signal.Signals) -> None:
    url, journal = f"file:{tmp_path / 'store'}", tmp_path / "journal"
    asyncio.run(publish(url, 40))
    with child(url, journal, "waits") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        begun = [process.stdout.readline() for _ in range(4)]
        assert begun == ["begun\n"] * 4
        process.send_signal(number)
        assert process.stdout.readline().startswith(f"{number.name}: draining")
        process.stdin.write("....")
        process.stdin.flush()
        assert process.wait(60) == 0
        assert process.stdout.read() == "", "nothing more was begun"
    assert len(journal.read_text().splitlines()) == 4
    with child(url, journal, "settles") as process:
        assert process.wait(60) == 0
    lines = [line.split() for line in journal.read_text().splitlines()]
    assert sorted(int(number) for number, _ in lines) == list(range(40)), "each once: nothing was lost or done twice"
    assert {attempt for _, attempt in lines} == {"1"}


def test_a_second_signal_ends_handlers_at_once_and_their_events_come_again(tmp_path: Path) -> None:
    url, journal = f"file:{tmp_path / 'store'}", tmp_path / "journal"
    asyncio.run(publish(url, 8))
    with child(url, journal, "waits") as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        while not process.stdout.readline().startswith("SIGTERM: draining"):
            pass
        process.send_signal(signal.SIGINT)
        process.stdin.close()  # the threads that wait for it end, and with them the process
        assert process.wait(60) == 0
    with child(url, journal, "settles") as process:
        assert process.wait(60) == 0
    handled = Counter(line.split()[0] for line in journal.read_text().splitlines())
    assert set(handled) == {str(number) for number in range(8)}
