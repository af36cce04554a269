"""What processes tell of what they have in hand: on a virtual clock, and in real ones that hang, die and freeze."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.deliveries import World, kept, raw
from tests.shop import Placed, placed

from penstock import Bus, Delivery
from penstock.columns import slot_of_key
from penstock.engine.held import NOTE_SECONDS, NOTES_MAX, Beginnings
from penstock.ports import Telling
from penstock.rows import TOLD_BYTES_MAX
from penstock.runtime.telling import (
    CONFIRM_SECONDS,
    HANDLERS_TOLD,
    LOOK_SECONDS,
    SHARDS_TOLD,
    SILENT_SECONDS,
    Document,
    Doing,
    Heard,
    InHand,
    RunningHandler,
    encoded,
    hear,
)
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

MODES = ("exclusive", "failover", "key_shared", "shared")


# --- when hands began -------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=40), st.sampled_from([1, 10]), st.data())
def test_a_hand_is_never_said_to_be_younger_than_it_is_and_the_oldest_is_known(
    some: list[float], times: int, data: st.DataObject
) -> None:
    beginnings, began, now = Beginnings(), dict[int, float](), 0.0
    pauses = some * times  # many more than are noted
    oldest = 1
    for hand, pause in enumerate(pauses, 1):
        now += pause
        beginnings.note(hand, now)
        began[hand] = now
        if hand % 50 == 0 and data.draw(st.booleans()):
            oldest = data.draw(st.integers(oldest, hand))
            beginnings.forget_before(oldest)
    assert len(beginnings._hands) <= NOTES_MAX
    assert all(beginnings.of(hand) <= at for hand, at in began.items() if hand >= oldest)
    if oldest == 1:
        assert beginnings.of(1) == began[1]
    if len(pauses) <= NOTES_MAX:
        assert all(at - beginnings.of(hand) < NOTE_SECONDS for hand, at in began.items() if hand >= oldest)


# --- documents --------------------------------------------------------------------------------


def a_document(subscriptions: int) -> Document:
    in_hand = InHand(partition=7, slot=63, events=1, since_us=1 << 50)
    handler = RunningHandler(handler="h" * 200, partition=7, offset=1 << 40, slot=1, since_us=1 << 50, how="")
    return Document(
        process="process/p",
        pid=1,
        subscriptions=tuple(
            Doing(
                log_id="0" * 32,
                subscription=f"s{number}",
                in_flight=9,
                shards=(in_hand,) * SHARDS_TOLD,
                handlers=(handler,) * HANDLERS_TOLD,
            )
            for number in range(subscriptions)
        ),
    )


@pytest.mark.parametrize("count", [0, 1, 4, 200])
def test_however_much_is_in_hand_what_is_told_has_an_end(count: int) -> None:
    data = encoded(a_document(count))
    assert len(data) <= TOLD_BYTES_MAX
    told = msgspec.json.decode(data, type=Document)
    assert len(told.subscriptions) + told.left_out == count
    assert bool(told.subscriptions) == bool(count), "the oldest is told in any case"


def test_what_nobody_understands_is_not_heard() -> None:
    store = open_store("memory:")
    assert isinstance(store, Telling)
    store.tell("a", b"of another version")
    store.tell("b", encoded(a_document(1)))
    [heard] = hear(store, time.time_ns() // 1_000)
    assert (heard.document.process, heard.present) == ("process/p", False)
    store.close()


# --- telling, on a virtual clock --------------------------------------------------------------


@pytest.fixture(params=["memory", "file"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    made = World(request.param, tmp_path / "store")
    yield made
    await made.close()


def heard_in(world: World) -> list[Heard]:
    return hear(world.store.whole, world.clock.time_us())


@pytest.mark.parametrize("mode", MODES)
async def test_what_is_in_hand_is_told_within_a_second_and_no_more_when_it_is_settled(world: World, mode: Any) -> None:
    bus = world.bus()
    held: list[Delivery[Any]] = []

    async def hold(delivery: Delivery[Any]) -> None:
        held.append(delivery)

    async with world.running(bus.consume(raw, "s", mode=mode), hold):
        await world.publish(bus, b"a", b"b")
        await world.until(lambda: held)
        began = world.clock.time_us()
        await world.until(lambda: heard_in(world), within=LOOK_SECONDS + 0.1)
        await world.run(3 * LOOK_SECONDS)
        [heard] = heard_in(world)
        doing = heard.of(world.info().log_id, "s")
        assert doing is not None
        assert doing.in_flight == sum(each.events for each in doing.shards) == len(held)
        assert abs(doing.shards[0].since_us - began) < 1_000_000
        slots = {each.slot for each in doing.shards}
        assert (slots == {None}) is (mode in {"exclusive", "failover"})
        assert heard.present
        for count in (1, 2):
            await world.until(lambda count=count: len(held) >= count)  # type: ignore[misc]
            await held[count - 1].ack()
        await world.until(lambda: not heard_in(world), within=2 * LOOK_SECONDS)


async def test_what_stays_the_same_is_told_again_only_so_often_and_ages_when_its_process_is_frozen(
    world: World,
) -> None:
    bus = world.bus()
    tells: list[float] = []
    tell = world.store.tell

    def counted(who: str, document: bytes) -> None:
        tells.append(world.clock.monotonic())
        tell(who, document)

    world.store.tell = counted
    async with world.running(bus.consume(raw, "s"), kept):
        await world.publish(bus, b"a")
        await world.until(lambda: tells, within=2 * LOOK_SECONDS)
        await world.run(60)
        assert 60 / CONFIRM_SECONDS - 3 <= len(tells) <= 60 / CONFIRM_SECONDS + 1
        assert not heard_in(world)[0].silent
        assert heard_in(world)[0].age_seconds <= CONFIRM_SECONDS + LOOK_SECONDS
        thaw = world.freeze(bus)
        await world.run(SILENT_SECONDS + CONFIRM_SECONDS)
        [heard] = heard_in(world)
        assert heard.silent
        assert not heard.present, "its lease is over, too"
        thaw.set()
        await world.until(lambda: not heard_in(world)[0].silent)
        await world.done(bus.close())
        assert heard_in(world) == [], "whoever ends takes it along"


async def test_delivery_goes_on_when_nothing_can_be_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    def fail(who: str, document: bytes) -> None:
        raise OSError("no space left")

    world.store.tell = fail
    bus = world.bus()
    async with world.running(bus.consume(raw, "s"), kept) as running:
        await world.publish(bus, b"a")
        await world.run(30)
        assert running.data == [b"a"]
    assert "in hand" not in caplog.text


# --- real processes ---------------------------------------------------------------------------

CHILD = textwrap.dedent(
    """
    import asyncio, sys, threading

    from penstock import Bus
    from penstock.settings import DeliverySettings, Settings
    from tests.shop import Placed, placed

    url, mode = sys.argv[1:]
    bus = Bus(url, topics=[placed], settings=Settings(delivery=DeliverySettings(lease_seconds=60.0)))

    @bus.subscriber(placed, "billing", mode=mode, concurrency=2)
    async def send_the_bill(order: Placed) -> None:
        print(order.number, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)

    async def main() -> None:
        async with bus:
            print("ready", flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
    """
)


class Hanging:
    """A process whose handlers never end."""

    def __init__(self, url: str, mode: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", CHILD, url, mode]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def line(self) -> str:
        """Return what it prints next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file:{tmp_path / 'store'}"

    async def publish() -> None:
        async with Bus(url, topics=[placed]) as bus:
            # Whoever has all slots begins with some of the last ones, which are the first that another one is due.
            keys = sorted((f"k{number}" for number in range(60)), key=lambda key: -slot_of_key(key.encode(), 0))
            await bus.publish_batch(placed, [Placed(key, number) for number, key in enumerate(keys)])

    asyncio.run(publish())
    return url


@pytest.fixture
def start(url: str) -> Iterator[Callable[[str], Hanging]]:
    children: list[Hanging] = []

    def begin(mode: str) -> Hanging:
        children.append(Hanging(url, mode))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.process.wait()
        assert child.process.stdout is not None
        child.process.stdout.close()


def penstock(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Look from a process of its own."""
    command = [sys.executable, "-m", "penstock", "--url", url, *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


def show(url: str, *options: str) -> str:
    done = penstock(url, "subscriptions", "show", "placed", "billing", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def shown_until(url: str, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Look again and again until it is as it should be; whoever waits in vain is ended by the test's own time."""
    while True:
        document: dict[str, Any] = json.loads(show(url, "--json"))
        if condition(document):
            return document


def by_pid(document: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {each["pid"]: each for each in document["in_hand"]}


def test_show_tells_what_hangs_in_other_processes_and_why_slots_stay(url: str, start: Callable[[str], Hanging]) -> None:
    first = start("key_shared")
    assert {first.line() for _ in range(3)} >= {"ready"}, "both of its handlers hang, and the rest is for others"
    second = start("key_shared")
    assert {second.line() for _ in range(3)} >= {"ready"}
    pids = {first.process.pid, second.process.pid}

    def stands(document: dict[str, Any]) -> bool:
        told = by_pid(document)
        return (
            told.keys() == pids
            and all(len(each["handlers"]) == 2 for each in told.values())
            and bool(told[first.process.pid]["staying"])
        )

    document = shown_until(url, stands)
    told = by_pid(document)[first.process.pid]
    [staying] = told["staying"]
    assert set(staying["slots"]) == {handler["slot"] for handler in told["handlers"]}
    [why] = [reason for reason in document["waits"] if "another process's due" in reason]
    assert why.startswith(told["process"])
    assert "handler send_the_bill has not ended at placed/0@0" in why
    owners = {each["process"]: each["slots"] for each in document["sharing"]}
    for each in document["in_hand"]:
        assert {handler["handler"] for handler in each["handlers"]} == {"send_the_bill"}
        assert each["handlers"][0]["seconds"] >= 1
        assert {handler["slot"] for handler in each["handlers"]} <= set(owners[each["process"]])
        assert {shard["slot"] for shard in each["shards"]} <= set(owners[each["process"]])
        assert each["in_flight"] == sum(shard["events"] for shard in each["shards"]) >= 2
        assert len(each["consumers"]) == 1
        assert each["present"]
        assert not each["silent"]
    text = show(url)
    assert text.count("send_the_bill") >= 4
    assert all(f" {pid} " in text for pid in pids)

    # Killed: what it told is not believed any more, at once, whoever has its slots by then.
    reader = open_store(url)  # whoever opens it later would sweep what the dead have left
    second.signal(signal.SIGKILL)
    second.process.wait()
    assert {heard.document.pid for heard in hear(reader, 0)} == {first.process.pid}
    reader.close()
    assert by_pid(json.loads(show(url, "--json"))).keys() == {first.process.pid}

    # Frozen: it lives and has its lease, so that it is shown; its age tells that it says nothing any more.
    first.signal(signal.SIGSTOP)
    document = shown_until(url, lambda document: by_pid(document)[first.process.pid]["silent"])
    assert by_pid(document)[first.process.pid]["told_seconds_ago"] > SILENT_SECONDS
    assert any("has told nothing for" in reason for reason in document["waits"])
    assert f"{by_pid(document)[first.process.pid]['process']} " in show(url)
    first.signal(signal.SIGCONT)
    shown_until(url, lambda document: not by_pid(document)[first.process.pid]["silent"])


@pytest.mark.parametrize("mode", ["exclusive", "shared"])
def test_show_names_a_handler_that_hangs_in_whichever_mode(
    url: str, start: Callable[[str], Hanging], mode: str
) -> None:
    child = start(mode)
    assert {child.line() for _ in range(3)} >= {"ready"}
    document = shown_until(url, lambda document: document["in_hand"] and document["in_hand"][0]["handlers"])
    [told] = document["in_hand"]
    assert told["pid"] == child.process.pid
    assert told["handlers"][0]["handler"] == "send_the_bill"
    if mode == "exclusive":
        assert {shard["slot"] for shard in told["shards"]} == {None}
        assert told["consumers"] == [document["partitions"][0]["owner"]]
        while "handler send_the_bill runs on it" not in penstock(url, "health", "--stalled-after", "1s").stdout:
            pass  # until health calls it stalled
    else:
        assert {f"{shard['slot']}/{shard['partition']}" for shard in told["shards"]} <= set(
            document["sharing"][0]["berths"]
        )
