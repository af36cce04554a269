"""The promises of `penstock run`, in real processes: what it runs, how it ends, what it leaves behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.running import Running, is_alive, told, wait_for, write_application
from tests.test_cli import penstock

from penstock import Bus, Topic
from penstock.cli.run import log_to_stderr
from penstock.rows import ParkedFilter
from penstock.stores import open_store

orders = Topic("orders", bytes, key=lambda data: data.split(b"-")[0], partitions=2)

Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("PENSTOCK_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start `penstock run` with these arguments."""
    running: list[Running] = []

    def start(*argv: str, before: tuple[str, ...] = (), **options: Any) -> Running:
        running.append(Running(tmp_path, "-m", "penstock", *before, "run", *argv, **options))
        return running[-1]

    yield start
    for each in running:
        each.dispose()


def publish(*texts: str, url: str = "file:./data") -> None:
    async def publish() -> None:
        async with Bus(url, topics=[orders]) as bus:
            for text in texts:
                await bus.publish(orders, text.encode())

    asyncio.run(publish())


def progress(name: str = "billing") -> tuple[int, int, dict[int, int]]:
    """Return how many events are settled, how many are dead letters, and the attempts on record."""
    with closing(open_store("file:./data")) as store:
        [info] = [each for each in store.log.topics() if each.name == "orders"]
        cursors = store.cursors.load(info.log_id, name)
        counts = store.parked.count(ParkedFilter(log_id=info.log_id, subscription=name))
        attempts = {offset: made for cursor in cursors for offset, made in cursor.attempts.items()}
        settled = sum(cursor.next_offset + bin(int.from_bytes(cursor.settled)).count("1") for cursor in cursors)
        return settled, counts["dead"], attempts


HOLDING = """
@bus.subscriber(orders, "billing", mode="exclusive", concurrency=1)
async def bill(order: bytes, delivery: Delivery) -> None:
    tell("begun", order=order.decode(), attempt=delivery.attempt)
    await asked("go")
    tell("ended", order=order.decode())
"""

HANDLING = """
@bus.subscriber(orders, "billing")
async def bill(order: bytes, delivery: Delivery) -> None:
    tell("handled", order=order.decode(), attempt=delivery.attempt)
"""


# --- one process ----------------------------------------------------------------------------------


def test_it_says_what_it_runs_runs_it_and_ends_with_0(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, HANDLING)
    publish("ada-1", "bob-1")
    running = start("shop:bus")
    assert {fact["order"] for fact in running.hears("handled", 2)} == {"ada-1", "bob-1"}
    running.signal()
    assert running.ends() == 0
    assert f"process {running.process.pid} runs 1 subscriber of file:./data:" in running.talk
    assert "orders → billing, 16 at a time: bill" in running.talk
    assert "SIGTERM: draining" in running.talk
    assert progress() == (2, 0, {})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_handler_end_and_what_was_not_begun_goes_back_uncounted(
    number: int, tmp_path: Path, start: Start
) -> None:
    write_application(tmp_path, HOLDING)
    publish("ada-1", "ada-2", "ada-3")
    running = start("shop:bus")
    running.hears("begun")
    running.signal(number)
    running.says("draining")
    assert running.process.poll() is None
    (tmp_path / "go").touch()
    assert running.ends() == 0
    assert [fact["order"] for fact in told(tmp_path, "ended")] == ["ada-1"]
    assert progress() == (1, 0, {})

    again = start("shop:bus")
    facts = again.hears("begun", 3)
    again.hears("ended", 3)
    again.signal()
    assert again.ends() == 0
    assert [(fact["order"], fact["attempt"]) for fact in facts] == [("ada-1", 1), ("ada-2", 1), ("ada-3", 1)]


def test_a_second_signal_cancels_the_handler_whose_event_goes_back_uncounted_and_the_exit_code_is_1(
    tmp_path: Path, start: Start
) -> None:
    write_application(tmp_path, HOLDING)
    publish("ada-1")
    running = start("shop:bus")
    running.hears("begun")
    running.signal()
    running.says("draining")
    running.signal()
    assert running.ends() == 1
    assert "a handler is cancelled, since this process ends" in running.talk
    assert told(tmp_path, "ended") == []
    assert progress() == (0, 0, {})
    (tmp_path / "go").touch()
    again = start("shop:bus")
    again.hears("ended")
    assert [fact["attempt"] for fact in told(tmp_path, "begun")] == [1, 1]


def test_a_handler_that_takes_longer_than_drain_seconds_is_cancelled(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, HOLDING)
    publish("ada-1")
    running = start("shop:bus", env={"PENSTOCK_DELIVERY__DRAIN_SECONDS": "0.05"})
    running.hears("begun")
    running.signal()
    assert running.ends() == 1
    assert progress() == (0, 0, {})


def test_a_def_handler_ends_in_its_thread_before_the_process_does(tmp_path: Path, start: Start) -> None:
    write_application(
        tmp_path,
        """
        @bus.subscriber(orders, "billing")
        def bill(order: bytes) -> None:
            tell("begun")
            asked_blocking("go")
            tell("ended")
        """,
    )
    publish("ada-1")
    running = start("shop:bus")
    running.hears("begun")
    running.signal()
    running.says("draining")
    (tmp_path / "go").touch()
    assert running.ends() == 0
    assert len(told(tmp_path, "ended")) == 1
    assert progress() == (1, 0, {})


def test_a_subscriber_that_can_go_on_no_more_ends_it_with_1_and_the_reason(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, HANDLING)
    publish("ada-1")
    running = start("shop:bus")
    running.hears("handled")
    assert penstock("--url", "file:./data", "topics", "delete", "orders", "--yes").returncode == 0
    assert running.ends() == 1
    assert "error: " in running.talk.splitlines()[-1]
    assert "deleted" in running.talk.splitlines()[-1]


# --- which bus, which store -----------------------------------------------------------------------


@pytest.mark.parametrize("target", ["shop", "shop:make_bus"])
def test_a_module_alone_means_its_only_bus_and_a_function_may_make_it(
    target: str, tmp_path: Path, start: Start
) -> None:
    write_application(tmp_path, HANDLING + "\n\nalias = bus\n\n\ndef make_bus():\n    return bus\n")
    publish("ada-1")
    running = start(target)
    running.hears("handled")
    running.signal()
    assert running.ends() == 0


def test_the_bus_decides_on_its_store_unless_url_is_given(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, HANDLING)
    publish("ada-here")
    publish("ada-there", url="file:./other")
    running = start("shop:bus", env={"PENSTOCK_URL": "file:./nowhere"})
    assert running.hears("handled")[-1]["order"] == "ada-here"
    running.signal()
    assert running.ends() == 0
    running = start("shop:bus", before=("--url", "file:./other"))
    assert running.hears("handled", 2)[-1]["order"] == "ada-there"
    running.signal()
    assert running.ends() == 0
    assert not Path("nowhere").exists()


def test_the_application_decides_how_it_logs_and_otherwise_the_level_is_an_option(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, HANDLING)
    running = start("shop:bus", "--log-level", "error")
    running.says("runs 1 subscriber")
    running.signal()
    running.ends()
    assert "draining" not in running.talk
    mine = "import logging\nlogging.basicConfig(format='MINE %(message)s', level='INFO')\n"
    write_application(tmp_path, mine + HANDLING.replace("billing", "other"))
    publish("ada-1")
    running = start("shop:bus")
    running.hears("handled")
    running.signal()
    assert running.ends() == 0
    assert "MINE SIGTERM: draining" in running.talk


WRONG = {
    "no module": ("shopp:bus", 2, "there is no module 'shopp'; did you mean 'shop'?; it is searched in "),
    "no attribute": ("shop:buss", 2, "shop:buss is not there: module 'shop' has no 'buss'; did you mean 'bus'?"),
    "no bus": ("shop:orders", 2, "shop:orders is a Topic, not a Bus; buses of that module: bus, empty"),
    "a function with arguments": ("shop:tell", 2, "shop:tell is a function 'tell', not a Bus"),
    "a function that makes none": ("shop:make_none", 2, "shop:make_none is a NoneType, not a Bus"),
    "several": ("shop", 2, "module 'shop' has several buses: bus, empty; say which, as shop:bus"),
    "none at all": ("json", 2, "module 'json' has no bus: write bus = Bus(…) there"),
    "nothing to run": ("shop:empty", 2, "shop:empty has nothing to run: declare handlers with @bus.subscriber"),
    "a file": ("shop.py:bus", 2, "'shop.py' is a file: name its module, such as shop:bus"),
    "relative": ("..shop:bus", 2, "'..shop' is no module: write its whole name, such as shop.events"),
    "a gap": ("shop..events:bus", 2, "'shop..events' is no module"),
    "no syntax": ("unreadable:bus", 1, "importing 'unreadable' failed: SyntaxError: invalid syntax, at "),
    "speaking": ("speaking:bus", 1, r"importing 'speaking' failed: Evil\x1b[31m X: \x1b[2J, at "),
    "half": ("shop:", 2, "'shop:' is no bus: write module:name"),
    "broken": ("broken:bus", 1, "importing 'broken' failed: ZeroDivisionError: division by zero, at "),
    "lacking": ("lacking:bus", 1, "importing 'lacking' failed: ModuleNotFoundError: No module named 'no_such_thing'"),
    "a broken function": ("shop:make_trouble", 1, "calling shop:make_trouble failed: KeyError: 'x', at "),
    "wrong handler": ("wrong:bus", 2, "handler bill takes 3 parameters"),
    "missing handler": ("missing:bus", 2, "has no handler of B: add one, or say ignore_others=True"),
}


@pytest.mark.parametrize(("target", "code", "message"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_run_is_told_in_one_line(target: str, code: int, message: str, tmp_path: Path) -> None:
    more = """
        empty = Bus("memory:", topics=[orders])

        def make_none():
            return None

        def make_trouble():
            raise KeyError("x")
    """
    write_application(tmp_path, HANDLING)
    with (tmp_path / "shop.py").open("a") as file:
        file.write("\n".join(line[8:] for line in more.splitlines()))
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "lacking.py").write_text("import no_such_thing\n")
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    (tmp_path / "speaking.py").write_text('raise type("Evil\\x1b[31m\\nX", (Exception,), {})("\\x1b[2J")\n')
    write_application(tmp_path, "@bus.subscriber(orders, 'billing')\ndef bill(a, b, c): ...\n", "wrong")
    classes = "import penstock\nfrom dataclasses import dataclass\n" + "".join(
        f"\n@penstock.event('{name.lower()}')\n@dataclass\nclass {name}:\n    x: int\n" for name in "AB"
    )
    some = "both = Topic('both', (A, B))\n\n@bus.subscriber(both, 'billing')\ndef bill(a: A): ...\n"
    write_application(tmp_path, classes + some, "missing")
    done = penstock("run", target)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"error: {message}") or message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_place_of_a_syntax_error_is_the_line_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "unreadable.py").write_text("x = 1\n\ndef f(:\n")
    (tmp_path / "importing.py").write_text("from unreadable import x\n")
    (tmp_path / "evaluating.py").write_text("\neval('1 +')\n")
    (tmp_path / "zeros.py").write_text("x = 1\0\n")
    for module, place in {
        "unreadable": f"invalid syntax, at {tmp_path}/unreadable.py:3 (`penstock --debug",
        "importing": f"invalid syntax, at {tmp_path}/unreadable.py:3 (`penstock --debug",
        "evaluating": f"invalid syntax, at {tmp_path}/evaluating.py:2 (`penstock --debug",
        "zeros": "source code string cannot contain null bytes (`penstock --debug",
    }.items():
        done = penstock("run", f"{module}:bus")
        assert done.returncode == 1
        assert f"failed: SyntaxError: {place}" in done.stderr


def test_what_penstock_refuses_while_an_application_is_imported_tells_its_line(tmp_path: Path) -> None:
    bare = "from penstock import Topic\n\nclass Order:\n    id: str\n\norders = Topic('orders', Order)\n"
    (tmp_path / "bare.py").write_text(bare)
    (tmp_path / "importing.py").write_text("from bare import orders\n")
    (tmp_path / "making.py").write_text("def make():\n    import bare\n")
    for target in ("bare:bus", "importing:bus", "making:make"):
        done = penstock("run", target)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: class Order is not an event: decorate it with @penstock.event(")
        assert done.stderr.endswith(f", at {tmp_path}/bare.py:6\n"), target


def test_the_place_of_an_error_is_a_line_of_the_application_whatever_has_raised_it(tmp_path: Path) -> None:
    (tmp_path / "parsing.py").write_text("import json\n\njson.loads('{')\n")
    asking = "import asyncio\nfrom penstock import Bus\n\nasyncio.run(Bus('memory:').pause('nowhere', 'billing'))\n"
    (tmp_path / "asking.py").write_text(asking)
    for module, place in {"parsing": f"{tmp_path}/parsing.py:3 (", "asking": f"{tmp_path}/asking.py:4\n"}.items():
        done = penstock("run", f"{module}:bus")
        assert f", at {place}" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["bogus:", "/tmp", "memory:x"])
def test_a_url_of_no_store_is_wrong_usage_before_any_code_of_the_application_runs(url: str, tmp_path: Path) -> None:
    write_application(tmp_path, "tell('imported')\n" + HANDLING)
    (tmp_path / "mine.toml").write_text(f"url = {url!r}\n")
    for argv in (["--url", url], ["--config", "mine.toml"]):
        done = penstock(*argv, "run", "shop:bus")
        assert (done.returncode, done.stdout) == (2, "")
        assert url in done.stderr
    assert told(tmp_path, "imported") == []


def test_wrong_settings_end_what_is_run_with_2_but_a_worker_is_tried_again(tmp_path: Path) -> None:
    write_application(tmp_path, HANDLING)
    (tmp_path / "penstock.toml").write_text("ulr = 'memory:'\n")
    for argv, code in {(): 2, ("--workers", "2"): 2, ("--worker", "2"): 1}.items():
        done = penstock("run", "shop:bus", *argv)
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr == "error: there is no setting 'ulr' in penstock.toml; did you mean 'url'?\n", argv


SPEAKING = """
Evil = type("Evil\\x1b[31m\\nX", (Exception,), {})

@bus.subscriber(orders, "billing")
async def bill(order: bytes) -> None:
    raise Evil(order.decode())
"""


def test_no_payload_can_speak_to_the_terminal_through_the_log(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SPEAKING)
    publish("ada-\x1b]0;pwned\x07")
    running = start("shop:bus", "--log-level", "debug")
    running.says(r"ada-\x1b]0;pwned\x07")
    running.signal()
    assert running.ends() == 0
    assert "\x1b" not in running.talk
    assert "\x07" not in running.talk
    # A record is one line, and its traceback is below it as ever.
    assert [line for line in running.talk.splitlines() if " INFO " in line and r"Evil\x1b[31m\nX" in line]
    assert "\nTraceback (most recent call last):\n" in running.talk
    assert ", in bill\n    raise Evil(order.decode())\n" in running.talk


def test_a_traceback_that_another_handler_has_formatted_is_escaped_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.Logger("a root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging, "getLogger", lambda _name=None: root)
    log_to_stderr("info")
    error = ValueError("\x1b[2J")
    about = (ValueError, error, None)
    record = root.makeRecord("a", logging.INFO, "f", 1, "two\nlines\x07", (), about, sinfo="at\n\x1b")
    logging.Formatter().format(record)
    root.handle(record)
    err = capsys.readouterr().err
    assert r" INFO a: two\nlines\x07" in err
    assert err.endswith("ValueError: \\x1b[2J\nat\n\\x1b\n")
    assert record.exc_text is not None
    assert "\x1b" in record.exc_text


def test_the_traceback_of_an_application_is_shown_with_debug(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert "Traceback" not in penstock("run", "broken").stderr
    assert 'broken.py", line 1' in penstock("--debug", "run", "broken").stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("shop:bus", "--workers", "0"), "Invalid value"),
        (("shop:bus", "--workers", "2", "--reload"), "--reload is for development, with one process"),
        (("shop:bus", "--log-level", "loud"), "Invalid value"),
        ((), "Missing argument"),
    ],
)
def test_wrong_arguments_are_a_usage_error(argv: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_application(tmp_path, HANDLING)
    done = penstock("run", *argv)
    assert done.returncode == 2
    assert message in done.stderr


def test_workers_cannot_share_a_store_in_memory(tmp_path: Path) -> None:
    write_application(tmp_path, HANDLING.replace("@bus", "bus = Bus('memory:', topics=[orders])\n\n@bus"))
    done = penstock("run", "shop:bus", "--workers", "2")
    assert done.returncode == 2
    assert "a memory: store cannot be shared" in done.stderr


# --- several processes ----------------------------------------------------------------------------

SHARING = """
@bus.subscriber(orders, "billing", mode="key_shared", concurrency=64)
async def bill(order: bytes, delivery: Delivery) -> None:
    tell("begun", order=order.decode())
    if order.endswith(b"-wait"):
        await asked("go")
    tell("ended", order=order.decode())
"""

NAMES = [f"customer{number}" for number in range(40)]


def workers_of(running: Running, count: int = 2) -> list[int]:
    """Return the processes of the workers, once all of them have told who they are."""
    running.says("is process", count)
    return [int(line.rsplit(" ", 1)[1]) for line in running.talk.splitlines() if " is process " in line]


def shared_out(running: Running, pids: list[int]) -> None:
    """Publish events of many keys, and wait until all are handled, until each of these processes has had some."""

    def handled() -> set[str]:
        return {fact["order"] for fact in told(running.directory, "ended")}  # one may be handled twice, after a kill

    while not set(pids) <= {fact["pid"] for fact in told(running.directory, "ended")}:
        orders = {f"{name}-{len(handled())}" for name in NAMES}
        publish(*orders)
        wait_for(lambda orders=orders: orders <= handled(), lambda: running.talk)


def test_workers_share_a_subscription_and_one_that_is_killed_is_replaced(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SHARING)
    publish("ada-0")
    running = start("shop:bus", "--workers", "2")
    first, second = workers_of(running)
    shared_out(running, [first, second])
    os.kill(first, signal.SIGKILL)
    running.says(f"worker 1, process {first}, was killed by SIGKILL; another one is started in 1 s")
    *_, third = workers_of(running, 3)
    assert third not in {first, second}
    shared_out(running, [second, third])
    with closing(open_store("file:./data")) as store:
        [info] = [each for each in store.log.topics() if each.name == "orders"]
        ends = sum(store.log.bounds(each).stop for each in info.partitions)
    wait_for(lambda: progress() == (ends, 0, {}), lambda: f"{progress()} of {ends}")
    running.signal()
    assert running.ends() == 0
    assert not any(is_alive(pid) for pid in (first, second, third))
    assert progress() == (ends, 0, {})


def test_a_signal_lets_all_workers_drain(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SHARING)
    publish("ada-0")
    running = start("shop:bus", "--workers", "2")
    pids = workers_of(running)
    shared_out(running, pids)
    done = len(told(tmp_path, "ended"))
    publish(*(f"{name}-wait" for name in NAMES))
    running.hears("begun", done + len(NAMES))
    running.signal()
    running.says("asked to end: draining", 2)
    assert all(is_alive(pid) for pid in pids)
    (tmp_path / "go").touch()
    assert running.ends() == 0
    assert len(told(tmp_path, "ended")) == done + len(NAMES)


def test_a_signal_to_every_process_of_a_service_is_still_only_the_first_one(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SHARING)
    publish("ada-0")
    running = start("shop:bus", "--workers", "2")
    pids = workers_of(running)
    shared_out(running, pids)
    done = len(told(tmp_path, "ended"))
    publish(*(f"{name}-wait" for name in NAMES))
    running.hears("begun", done + len(NAMES))
    for pid in pids:
        os.kill(pid, signal.SIGTERM)  # as the manager of a service does that ends all of a control group
    running.signal()
    running.says("SIGTERM: draining", 3)
    (tmp_path / "go").touch()
    assert running.ends() == 0
    assert len(told(tmp_path, "ended")) == done + len(NAMES)


def test_a_second_signal_makes_all_workers_cancel_their_handlers(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SHARING)
    publish("ada-wait", "bob-wait")
    running = start("shop:bus", "--workers", "2")
    pids = workers_of(running)
    running.hears("begun", 2)
    running.signal()
    running.says("asked to end: draining", 2)
    running.signal()
    assert running.ends() == 1
    assert not any(is_alive(pid) for pid in pids)
    assert told(tmp_path, "ended") == []
    assert progress() == (0, 0, {})


def test_workers_drain_and_end_when_their_supervisor_is_killed(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SHARING)
    publish("ada-wait")
    running = start("shop:bus", "--workers", "2")
    pids = workers_of(running)
    running.hears("begun")
    running.signal(signal.SIGKILL)
    running.ends()
    running.says("asked to end: draining", 2)
    (tmp_path / "go").touch()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    assert len(told(tmp_path, "ended")) == 1
    assert progress() == (1, 0, {})


def test_all_end_with_2_when_a_worker_says_that_it_cannot_be_run_at_all(tmp_path: Path, start: Start) -> None:
    write_application(tmp_path, SHARING)
    publish("ada-0")
    running = start("shop:bus", "--workers", "2")
    first, second = workers_of(running)
    running.hears("ended")
    write_application(tmp_path, "")
    os.kill(first, signal.SIGKILL)
    assert running.ends() == 2
    assert "shop:bus has nothing to run" in running.talk
    assert not is_alive(second)


# --- reloading ------------------------------------------------------------------------------------


def test_a_changed_file_lets_handlers_end_and_begins_anew_and_a_broken_one_is_waited_for(
    tmp_path: Path, start: Start
) -> None:
    write_application(tmp_path, HOLDING)
    publish("ada-1")
    running = start("shop:bus", "--reload")
    [first] = running.hears("begun")
    (tmp_path / "shop.py").write_text("this is no Python\n")
    running.says("files have changed: draining")
    assert told(tmp_path, "ended") == []
    (tmp_path / "go").touch()
    running.hears("ended")
    running.says("has ended with 1; it is started again when a file has changed")
    assert "SyntaxError" in running.talk
    write_application(tmp_path, HANDLING.replace("billing", "another"))
    [second] = running.hears("handled")
    assert (second["order"], second["pid"] != first["pid"]) == ("ada-1", True)
    running.signal()
    assert running.ends() == 0
    assert not is_alive(second["pid"])
    assert progress() == (1, 0, {})


def test_files_of_an_environment_or_hidden_ones_are_not_looked_at(tmp_path: Path) -> None:
    from penstock.cli.supervising import _sources

    for path in ("shop.py", "shop/events.py", "env/lib/x.py", ".git/x.py", "shop/data.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert {str(path.relative_to(tmp_path)) for path in _sources(tmp_path)} == {"shop.py", "shop/events.py"}
