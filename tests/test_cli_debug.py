"""The promises of `penstock debug`: the very event, the real handler, and a subscription that stays as it was."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.running import PATIENCE_SECONDS, clean_environment, told, write_application
from tests.test_cli import penstock

from penstock import Batch, Bus, Topic
from penstock.columns import digest
from penstock.producers import Run
from penstock.rows import ParkedFilter
from penstock.settings import FileSettings, Settings
from penstock.stores import open_store

SHOP = """
@bus.subscriber(orders, "billing", mode="exclusive")
async def bill(order: bytes, delivery: Delivery) -> None:
    count = len(order)
    tell("billed", order=order.decode(), attempt=delivery.attempt, position=str(delivery.position),
         subscription=delivery.subscription, replay=delivery.replay,
         tenant=delivery.headers.get("tenant", b"").decode())
    if order == b"ada-bad":
        await asyncio.sleep(0)
        raise ValueError(f"{count} letters are too many")


@bus.subscriber(orders, "plain")
def plain(order: bytes) -> None:
    letters = order.decode()
    tell("plain", order=letters)
    if letters == "ada-bad":
        raise Reject("no such customer")


@bus.subscriber(orders, "later")
async def later(order: bytes) -> None:
    raise RetryLater(90)


@bus.subscriber(orders, "talking", ack="manual")
async def talking(order: bytes, delivery: Delivery) -> None:
    if order == b"ada-good":
        return
    async with delivery.once(None) as first:
        assert first
    with delivery.once(None) as first:
        assert first
    await delivery.extend(5)
    await delivery.nack(delay=3)
    await delivery.reject("never")
    await delivery.ack()
    tell("said", said=delivery.said, stale=delivery.stale)


@bus.subscriber(orders, "publishing")
async def publishing(order: bytes) -> None:
    await bus.publish(orders, b"ada-new", key="ada")


def wrapping(function):
    from functools import wraps

    @wraps(function)
    async def wrapped(order: bytes) -> None:
        tell("around")
        await function(order)

    return wrapped


@bus.subscriber(orders, "decorated")
@wrapping
async def decorated(order: bytes) -> None:
    tell("inside")


@bus.subscriber(orders, "quoting")
def quote(order: bytes) -> None:
    evil = "\\x1b]0;pwned\\x07"
    raise type("Evil\\x1b[31m\\nX", (Exception,), {})(evil + order.decode())


also = Topic("also", bytes)


@bus.subscriber(also, "plain")
def also_plain(order: bytes) -> None: ...
"""

orders = Topic("orders", bytes, key=lambda data: data.split(b"-")[0], partitions=2)


@pytest.fixture(autouse=True)
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Write the application, publish a good event and a bad one, and return their partition."""
    for name in os.environ:
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    write_application(tmp_path, SHOP)

    async def publish() -> int:
        async with Bus("file:./data", topics=[orders, Topic("also", bytes)]) as bus:
            receipt = await bus.publish(orders, b"ada-good", headers={"tenant": "acme"})
            await bus.publish(orders, b"ada-bad")
            return receipt.positions[0].partition

    return asyncio.run(publish())


def debug(name: str, *argv: str, offset: int = 0, partition: int, topic: str = "orders") -> Any:
    return penstock(
        "debug", "shop:bus", name, "--topic", topic, "--offset", str(offset), "--partition", str(partition), *argv
    )


def state() -> Any:
    """Return everything that the store remembers of subscriptions, and how many events it has."""
    with closing(open_store("file:./data")) as store:
        [info] = [each for each in store.log.topics() if each.name == "orders"]
        subscriptions = store.cursors.subscriptions(info.log_id)
        return (
            [store.log.bounds(each) for each in info.partitions],
            [(each, store.cursors.load(info.log_id, each.name)) for each in subscriptions],
            [
                store.parked.page(ParkedFilter(log_id=info.log_id, subscription=each.name, states=None))
                for each in subscriptions
            ],
            store.cursors.settlements(100),
            [each.name for each in store.log.topics()],
        )


# --- without the debugger -------------------------------------------------------------------------


def test_the_handler_gets_the_very_event_and_the_subscription_stays_as_it_was(shop: int, tmp_path: Path) -> None:
    before = state()
    done = debug("billing", "--no-pdb", partition=shop)
    assert (done.returncode, done.stdout) == (0, "done: it would be acknowledged\n")
    assert done.stderr == f"orders/{shop}@0, attempt 1: bill\n"
    [fact] = told(tmp_path, "billed")
    assert fact["position"] == f"orders/{shop}@0"
    assert (fact["order"], fact["attempt"], fact["subscription"], fact["replay"], fact["tenant"]) == (
        "ada-good", 1, "billing", 0, "acme",
    )  # fmt: skip
    assert state() == before


def test_an_event_is_named_by_its_position_as_it_is_shown_everywhere(shop: int) -> None:
    done = penstock("debug", "shop:bus", "plain", "--offset", f"orders/{shop}@0", "--no-pdb")
    assert done.stderr.startswith(f"orders/{shop}@0, attempt 1: plain\n")
    other = penstock("debug", "shop:bus", "billing", "--offset", "also/0@0", "--no-pdb")
    assert (other.returncode, "subscriber 'billing' is not of topic 'also'" in other.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "function", "line", "outcome"),
    [
        ("billing", "bill", "raise ValueError", "failed: it would be tried again, as the policy says (ValueError: 7 "),
        (
            "plain",
            "plain",
            "raise Reject",
            "rejected: it would become a dead letter at once (Reject: no such customer)",
        ),
        ("later", "later", "raise RetryLater", "failed: it would be tried again in 90 s"),
    ],
)
def test_what_a_handler_raises_is_shown_with_its_outcome_and_changes_nothing(
    name: str, function: str, line: str, outcome: str, shop: int
) -> None:
    before = state()
    done = debug(name, "--no-pdb", offset=1, partition=shop)
    assert done.returncode == 1
    assert done.stdout.startswith(outcome)
    assert line in done.stderr
    assert f"in {function}" in done.stderr
    assert "debug.py" not in done.stderr
    assert state() == before


def test_what_a_handler_raises_cannot_speak_to_the_terminal(shop: int) -> None:
    done = debug("quoting", "--no-pdb", offset=1, partition=shop)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        r"failed: it would be tried again, as the policy says (Evil\x1b[31m X: \x1b]0;pwned\x07ada-bad)"
    ]
    assert "in quote\n    raise type(" in done.stderr


def test_whatever_is_said_of_the_delivery_is_inert_and_says_so(shop: int, tmp_path: Path) -> None:
    before = state()
    done = debug("talking", "--no-pdb", offset=1, partition=shop)
    assert (done.returncode, done.stdout) == (0, "done: it would be acknowledged\n")
    notices = [line for line in done.stderr.splitlines() if line.startswith("this is a trial: ")]
    words = [notice.split(": ")[1].split()[0] for notice in notices]
    assert words == ["once", "once", "extend", "nack", "reject", "ack"]
    [fact] = told(tmp_path, "said")
    assert (fact["said"], fact["stale"]) == (True, False)
    assert state() == before


def test_a_manual_handler_that_says_nothing_is_told_so(shop: int) -> None:
    done = debug("talking", "--no-pdb", partition=shop)
    assert (done.returncode, done.stdout) == (0, "it returned, and said nothing: it would stay in hand\n")


def test_a_handler_may_publish_and_that_is_real(shop: int) -> None:
    before = state()
    done = debug("publishing", "--no-pdb", partition=shop)
    assert done.returncode == 0, done.stderr
    assert [bounds.stop for bounds in before[0]] != [bounds.stop for bounds in state()[0]]
    assert state()[1:] == before[1:]


def test_attempts_on_record_are_counted_on(shop: int, tmp_path: Path) -> None:
    fail_all(retries=3, failures=1)
    debug("billing", "--no-pdb", offset=1, partition=shop)
    assert told(tmp_path, "billed")[-1]["attempt"] == 2


def fail_all(*, retries: int, failures: int) -> None:
    """Let the bad event fail so often, and leave it where the policy puts it; the good one is done."""

    async def fail_all() -> None:
        from penstock import Retry

        async with Bus("file:./data", topics=[orders]) as bus:
            retry = Retry(max_retries=retries, delay=0.001 if retries < failures else 3600, max_delay=3600)
            async with bus.consume(orders, "billing", mode="exclusive", retry=retry) as consumer:
                failed = 0
                async for delivery in consumer:
                    if delivery.value == b"ada-good":
                        await delivery.ack()
                        continue
                    await delivery.nack(reason=KeyError("x"))
                    failed += 1
                    if failed == failures:
                        break
                await consumer.flush()

    asyncio.run(fail_all())


def forget_all(partition: Any) -> None:
    """Trim a partition, after enough was written that its first events are in a file of their own."""
    settings = Settings(file=FileSettings(segment_bytes=4096, allocate_bytes=4096))
    with closing(open_store("file:./data", settings=settings)) as store:
        for number in range(4):
            batch = Batch.build(data=[bytes(4096)])
            store.log.append(partition, batch, [Run(bytes([number] * 16), 0, 0, 1, digest(batch.columns))])
        assert store.log.trim(partition, 3, force=True) >= 2


def test_a_dead_letter_is_taken_from_its_own_copy_also_when_the_log_has_it_no_more(shop: int, tmp_path: Path) -> None:
    fail_all(retries=1, failures=2)
    with closing(open_store("file:./data")) as store:
        [info] = [each for each in store.log.topics() if each.name == "orders"]
        counts = store.parked.count(ParkedFilter(log_id=info.log_id, subscription="billing"))
        assert counts["dead"] == 1
        [partition] = [each for each in info.partitions if each.number == shop]
    forget_all(partition)
    before = state()
    gone = debug("billing", "--no-pdb", offset=1, partition=shop)
    assert gone.returncode == 1
    assert gone.stderr.endswith("a dead letter has a copy of its own: --dead\n")
    done = debug("billing", "--no-pdb", "--dead", offset=1, partition=shop)
    assert done.returncode == 1
    assert "ValueError" in done.stdout
    [fact] = told(tmp_path, "billed")
    assert (fact["order"], fact["attempt"], fact["position"]) == ("ada-bad", 2, f"orders/{shop}@1")
    assert state() == before


def test_what_is_not_there_is_named(shop: int) -> None:
    for argv, message in {
        ("biling", "--offset", "0"): "the bus has no subscriber 'biling'; did you mean 'billing'?",
        ("plain", "--offset", "0"): "several topics have a subscriber 'plain': orders, also; say which with --topic",
        ("billing", "--topic", "also", "--offset", "0"): "subscriber 'billing' is not of topic 'also'",
        ("billing", "--offset", "0"): "topic 'orders' has 2 partitions",
        ("billing", "--offset", "7", "--partition", f"{shop}"): f"there is no event orders/{shop}@7",
        ("billing", "--offset", "0", "--partition", f"{shop}", "--dead"): "has no dead letter",
    }.items():
        done = penstock("debug", "shop:bus", *argv)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr


def test_an_application_on_a_store_that_does_not_exist_does_not_make_one(tmp_path: Path) -> None:
    done = penstock("--url", "file:./nowhere", "debug", "shop:bus", "billing", "--offset", "0")
    assert done.returncode == 1
    assert "there is no store in nowhere" in done.stderr
    assert not Path("nowhere").exists()


# --- under the debugger ---------------------------------------------------------------------------


class Terminal:
    """A command on a terminal of its own, with somebody who types."""

    def __init__(self, *argv: str) -> None:
        self._ours, theirs = pty.openpty()
        self.seen = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**clean_environment(), "TERM": "dumb", "HOME": str(Path.cwd())},
        )
        os.close(theirs)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], PATIENCE_SECONDS)
        assert ready, f"nothing more came: {self.seen}"
        data = b""
        with suppress(OSError):  # that is how Linux says that nobody has the other end any more
            data = os.read(self._ours, 1 << 16)
        self.seen += data.decode().replace("\r", "")
        return bool(data)

    def types(self, line: str = "") -> str:
        """Wait for the prompt, type a line, and return what was seen before it."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.seen.endswith("(Pdb) "):
            assert self._read() or time.monotonic() < until, self.seen
        seen, self.seen = self.seen, ""
        os.write(self._ours, f"{line}\n".encode())
        return seen

    def ends(self) -> tuple[int, str]:
        """Wait for the end, and return the exit code and what was seen last."""
        while self._read():
            pass
        code = self._process.wait(PATIENCE_SECONDS)
        os.close(self._ours)
        return code, self.seen


def at_terminal(name: str, *argv: str, offset: int = 0, partition: int) -> Terminal:
    return Terminal(
        "debug", "shop:bus", name, "--topic", "orders", "--offset", str(offset), "--partition", str(partition), *argv
    )


@pytest.mark.parametrize(
    ("name", "first", "variable"),
    [("billing", "count = len(order)", "count"), ("plain", "letters = order.decode()", "letters")],
)
def test_the_debugger_stops_at_the_first_line_of_the_handler_and_goes_on_to_its_outcome(
    name: str, first: str, variable: str, shop: int, tmp_path: Path
) -> None:
    before = state()
    terminal = at_terminal(name, partition=shop)
    assert terminal.types("n").rstrip().endswith(f"-> {first}\n(Pdb)")
    assert told(tmp_path, "billed") + told(tmp_path, "plain") == []
    terminal.types(f"p {variable}")
    assert re.search(r"^(8|'ada-good')$", terminal.types("c"), re.MULTILINE)
    code, seen = terminal.ends()
    assert code == 0, seen
    assert "done: it would be acknowledged" in seen
    assert state() == before


@pytest.mark.parametrize(("name", "raised"), [("billing", "raise ValueError"), ("plain", "raise Reject")])
def test_after_an_error_the_debugger_is_where_it_was_raised(name: str, raised: str, shop: int) -> None:
    terminal = at_terminal(name, offset=1, partition=shop)
    terminal.types("c")
    seen = terminal.types("p order")
    assert "Traceback" in seen
    assert "post mortem" in seen
    assert f"-> {raised}" in seen
    assert "b'ada-bad'" in terminal.types("q")
    code, seen = terminal.ends()
    assert code == 1
    assert "would be" in seen


def test_no_error_can_speak_to_the_terminal_through_the_debugger(shop: int) -> None:
    terminal = at_terminal("quoting", offset=1, partition=shop)
    lines = ("n", "n", "evil + 1", "raise Evil", "c", "q")
    _, _, stepped, caught, unknown, mortem = [terminal.types(line) for line in lines]
    assert r"X: \x1b]0;pwned\x07ada-bad" in stepped  # as the debugger tells what is raised
    assert "can only concatenate" in caught
    assert "*** NameError" in unknown
    assert "post mortem" in mortem
    code, end = terminal.ends()
    assert code == 1
    told = stepped + caught + unknown + mortem + end
    assert "\x1b" not in told
    assert "\x07" not in told


def test_a_handler_that_is_left_in_the_debugger_has_no_outcome(shop: int, tmp_path: Path) -> None:
    terminal = at_terminal("billing", partition=shop)
    terminal.types("q")
    code, seen = terminal.ends()
    assert code == 1
    assert "it was left in the debugger, and has no outcome" in seen
    assert "Traceback" not in seen
    assert told(tmp_path, "billed") == []


def test_the_debugger_stops_in_the_function_and_not_in_what_decorates_it(shop: int, tmp_path: Path) -> None:
    terminal = at_terminal("decorated", partition=shop)
    assert terminal.types("c").rstrip().endswith('-> tell("inside")\n(Pdb)')
    assert told(tmp_path, "around")
    assert terminal.ends()[0] == 0


def test_without_a_terminal_the_debugger_takes_its_commands_from_stdin(shop: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "debug", "shop:bus", "billing", "--offset", "0", "--partition", str(shop)],
        input=dedent("""\
            p order
            c
        """),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "b'ada-good'" in done.stdout
