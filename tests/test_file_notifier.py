from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from penstock.clock import VirtualClock
from penstock.errors import StoreClosed
from penstock.ports import Store
from penstock.rows import Partition
from penstock.stores.file import notifier as module
from penstock.stores.file.notifier import (
    LISTENERS_MAX,
    LOOK_SECONDS,
    FileNotifier,
    find_runtime_directory,
)
from penstock.stores.file.platform import Platform, SystemDisk
from penstock.stores.file.sockets import UnixDatagramSockets
from penstock.stores.memory import MemoryStore
from penstock.stores.memory.log import MemoryLog
from penstock.testing.conformance.notifier import NotifierConformance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.ports import Notifier

STORE_ID = "3f2a"
PARTITION = Partition(uuid4().hex, 3)
OTHER = Partition(uuid4().hex, 4)
PATIENCE_SECONDS = 30.0
HINTS_MAX = 100_000


@pytest.fixture
def directory() -> Iterator[Path]:
    # Not `tmp_path`: the path of a socket must be short.
    with tempfile.TemporaryDirectory(prefix="hints-", dir="/tmp") as made:
        yield Path(made)


def dead(_: int) -> bool:
    return False


def alive(_: int) -> bool:
    return True


def make(directory: Path | None, member: int = 1, **changed: Any) -> FileNotifier:
    arguments: dict[str, Any] = {"store_id": STORE_ID, "is_alive": alive, "platform": Platform()}
    return FileNotifier(directory=directory, member=member, **arguments | changed)


@contextmanager
def opened(directory: Path | None, member: int = 1, **changed: Any) -> Iterator[FileNotifier]:
    notifier = make(directory, member, **changed)
    try:
        yield notifier
    finally:
        notifier.close()


class Heard:
    """A callback that can be waited for."""

    def __init__(self) -> None:
        self.partitions: list[Partition] = []
        self._arrived = threading.Semaphore(0)

    def __call__(self, partition: Partition) -> None:
        self.partitions.append(partition)
        self._arrived.release()

    def wait(self) -> Partition:
        assert self._arrived.acquire(timeout=PATIENCE_SECONDS), "no hint came"
        return self.partitions[-1]


def sockets_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- the port, within a process and through sockets -------------------------------------------


class HintedStore(MemoryStore):
    """A memory store that gives its hints through file notifiers."""

    def __init__(self, clock: VirtualClock, notifier: Notifier, close: Callable[[], None]) -> None:
        super().__init__(clock=clock)
        self.notifier = notifier  # type: ignore[assignment]
        self.log = MemoryLog(self._state, self.notifier)
        self._close = close

    def close(self) -> None:
        self._close()
        super().close()


class TestWithinAProcess(NotifierConformance):
    @pytest.fixture(autouse=True)
    def use(self, directory: Path) -> None:
        self.directory = directory

    def open(self, clock: VirtualClock) -> Store:
        notifier = make(self.directory, platform=Platform(clock=clock))
        return HintedStore(clock, notifier, notifier.close)


class Pair:
    """Hints are given to one notifier and heard from another: all of them go through a socket."""

    def __init__(self, directory: Path) -> None:
        self.here, self.there = make(directory, 1), make(directory, 2)
        self.notify, self.listen = self.here.notify, self.there.listen

    def close(self) -> None:
        self.here.close()
        self.there.close()


class TestThroughSockets(NotifierConformance):
    @pytest.fixture(autouse=True)
    def use(self, directory: Path) -> None:
        self.directory = directory

    def open(self, clock: VirtualClock) -> Store:
        pair = Pair(self.directory)
        return HintedStore(clock, pair, pair.close)


# --- between processes ------------------------------------------------------------------------

LISTEN = """
import sys, threading
from pathlib import Path
from penstock.stores.file.notifier import FileNotifier
from penstock.stores.file.platform import Platform

heard, partitions = threading.Event(), []
def callback(partition):
    partitions.append(partition)
    heard.set()

notifier = FileNotifier(
    store_id=sys.argv[2], member=7, directory=Path(sys.argv[1]), is_alive=lambda _: True, platform=Platform()
)
notifier.listen(callback)
print("listening", flush=True)
assert heard.wait(30)
print(partitions[0], flush=True)
sys.stdin.read()
notifier.close()
"""


@contextmanager
def another_process(directory: Path, script: str = LISTEN) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, str(directory), STORE_ID]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_another_process_receives_a_hint_and_takes_its_socket_with_it(directory: Path) -> None:
    standing = Platform(clock=VirtualClock())  # so that who is there is looked up once
    with another_process(directory) as process, opened(directory, platform=standing) as notifier:
        assert line_of(process) == "listening"
        notifier.notify(PARTITION)
        assert line_of(process) == str(PARTITION)
        assert (notifier.sent, notifier.dropped) == (1, 0)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0
        assert sockets_in(directory) == []
        notifier.notify(PARTITION)  # it is gone, which harms nobody
        assert (notifier.sent, notifier.dropped) == (1, 1)


def test_the_socket_of_a_killed_process_is_removed_by_who_sends_to_it(directory: Path) -> None:
    members: list[int] = []

    def is_alive(member: int) -> bool:
        members.append(member)
        return False

    with another_process(directory) as process, opened(directory, is_alive=is_alive) as notifier:
        assert line_of(process) == "listening"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(sockets_in(directory)) == 1
        notifier.notify(PARTITION)
        assert members == [7]
        assert sockets_in(directory) == []
        assert (notifier.sent, notifier.dropped) == (0, 1)


def test_a_socket_that_refuses_is_kept_while_its_member_lives(directory: Path) -> None:
    """It may be just beginning: its name is there a moment before it receives."""
    with opened(directory) as notifier:
        beginning = directory / f"{notifier._prefix}7-abcdef.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
            bound.bind(str(beginning))
        notifier.notify(PARTITION)
        assert sockets_in(directory) == [beginning.name]


FORK = """
import os, sys
from pathlib import Path
from penstock.errors import StoreClosed
from penstock.rows import Partition
from penstock.stores.file.notifier import FileNotifier
from penstock.stores.file.platform import Platform

called = []
def make(member):
    return FileNotifier(
        store_id=sys.argv[2], member=member, directory=Path(sys.argv[1]), is_alive=lambda _: False, platform=Platform()
    )
notifier, other = make(1), make(2)
stop = notifier.listen(called.append)
other.listen(called.append)
partition = Partition("00" * 16, 0)
notifier._lock.acquire()  # as a thread that the child does not have would
child = os.fork()
if child == 0:
    notifier.notify(partition)
    stop()
    try:
        notifier.listen(called.append)
    except StoreClosed:
        notifier.close()
        os._exit(0 if called == [] and notifier.sent == 0 else 1)
    os._exit(2)
notifier._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert len(os.listdir(sys.argv[1])) == 2
notifier.notify(partition)
assert called and notifier.sent == 1, notifier.sent
notifier.close()
other.close()
"""


def test_a_forked_child_does_nothing_and_leaves_the_parent_alone(directory: Path) -> None:
    # Some Pythons warn of a fork with threads, which is what this is about.
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(directory), STORE_ID]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sockets_in(directory) == []


# --- who is told, and what it costs -----------------------------------------------------------


class CountingDisk(SystemDisk):
    """Counts how often a directory is looked at, and adds names or fails."""

    def __init__(self, *added: str, fault: OSError | None = None) -> None:
        self.looks = 0
        self.added = added
        self.fault = fault

    def names(self, path: Path) -> list[str]:
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        return [*super().names(path), *self.added]


class FaultySockets(UnixDatagramSockets):
    """Sockets that fail to send, and tell to whom they should have."""

    def __init__(self, fault: int) -> None:
        self.fault = fault
        self.made = 0
        self.paths: list[Path] = []

    def sender(self) -> Any:
        self.made += 1
        return self

    def send(self, _: bytes, path: Path) -> None:
        self.paths.append(path)
        raise OSError(self.fault, "planted")

    def close(self) -> None:
        pass


def test_alone_nothing_is_sent_and_the_directory_is_looked_at_now_and_then(directory: Path) -> None:
    clock, disk, sockets = VirtualClock(), CountingDisk(), FaultySockets(errno.EIO)
    with opened(directory, platform=Platform(clock=clock, disk=disk), sockets=sockets) as notifier:
        for _ in range(100):
            notifier.notify(PARTITION)
        assert disk.looks == 1
        clock.advance(LOOK_SECONDS)
        for _ in range(100):
            notifier.notify(PARTITION)
        assert disk.looks == 2
        assert (notifier.sent, sockets.made) == (0, 0)
    assert sockets_in(directory) == []


def test_a_new_listener_is_found_at_the_next_look(directory: Path) -> None:
    clock = VirtualClock()
    with opened(directory, platform=Platform(clock=clock)) as here, opened(directory, 2) as there:
        here.notify(PARTITION)
        heard = Heard()
        there.listen(heard)
        here.notify(PARTITION)
        assert here.sent == 0
        clock.advance(LOOK_SECONDS)
        here.notify(OTHER)
        assert heard.wait() == OTHER
        assert (here.sent, there.received) == (1, 1)


def test_a_notifier_does_not_send_to_itself_and_not_to_other_stores(directory: Path) -> None:
    with opened(directory) as notifier, opened(directory, 2, store_id="another") as foreign:
        heard, wrong = Heard(), Heard()
        notifier.listen(heard)
        foreign.listen(wrong)
        notifier.notify(PARTITION)
        assert heard.partitions == [PARTITION]
        assert (notifier.sent, notifier.dropped) == (0, 0)


def test_two_openings_with_one_number_hear_each_other(directory: Path) -> None:
    with opened(directory) as here, opened(directory) as there:
        heard = Heard()
        there.listen(heard)
        here.notify(PARTITION)
        assert heard.wait() == PARTITION


def test_a_full_queue_drops_hints_and_never_blocks(directory: Path) -> None:
    standing = Platform(clock=VirtualClock())
    with (
        opened(directory, platform=standing) as notifier,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as busy,
    ):
        busy.bind(str(directory / f"{notifier._prefix}7-abcdef.sock"))
        for _ in range(HINTS_MAX):
            notifier.notify(PARTITION)
            if notifier.dropped:
                break
        assert notifier.dropped == 1
        sent = notifier.sent
        busy.recv(100)
        notifier.notify(PARTITION)
        assert (notifier.sent, notifier.dropped) == (sent + 1, 1)
        assert len(sockets_in(directory)) == 1


@pytest.mark.parametrize("fault", [errno.EAGAIN, errno.ENOBUFS])
def test_a_full_queue_that_nobody_will_ever_read_is_removed(directory: Path, fault: int) -> None:
    sockets = FaultySockets(fault)
    with opened(directory, sockets=sockets, is_alive=dead) as notifier:
        left = directory / f"{notifier._prefix}7-abcdef.sock"
        left.touch()
        notifier.notify(PARTITION)
        notifier.notify(PARTITION)
        assert sockets.paths == [left]
        assert not left.exists()


@pytest.mark.parametrize("fault", [errno.EACCES, errno.EMFILE, errno.ENOENT, errno.EPROTOTYPE])
def test_other_errors_are_counted_and_remove_nothing(directory: Path, fault: int) -> None:
    clock = VirtualClock()
    with opened(directory, sockets=FaultySockets(fault), is_alive=dead, platform=Platform(clock=clock)) as notifier:
        left = directory / f"{notifier._prefix}7-abcdef.sock"
        left.touch()
        for _ in range(3):
            notifier.notify(PARTITION)  # once only, until the next look
        assert notifier.dropped == 1
        clock.advance(LOOK_SECONDS)
        notifier.notify(PARTITION)
        assert notifier.dropped == 2
        assert left.exists()


def test_no_more_than_so_many_listeners_are_told(directory: Path) -> None:
    sockets = FaultySockets(errno.EAGAIN)
    notifier = make(directory, sockets=sockets)
    many = [f"{notifier._prefix}{number}-abcdef.sock" for number in range(2, LISTENERS_MAX + 50)]
    with opened(directory, platform=Platform(disk=CountingDisk(*many)), sockets=sockets) as notifier:
        notifier.notify(PARTITION)
        assert len(sockets.paths) == LISTENERS_MAX


@pytest.mark.parametrize("name", ["-7.sock.sock", "-.sock", "-x-y.sock", "-7-abcdef.txt", ".sock"])
def test_strange_names_in_the_directory_harm_nobody(directory: Path, name: str) -> None:
    with opened(directory, is_alive=lambda member: member < 0) as notifier:
        (directory / (notifier._prefix.rstrip("-") + name)).touch()
        heard = Heard()
        notifier.listen(heard)
        notifier.notify(PARTITION)
        assert heard.partitions == [PARTITION]
        assert notifier._sends


@pytest.mark.parametrize("partition", [Partition("orders", 0), Partition("00", 0), Partition("00" * 16, 1 << 32)])
def test_what_no_file_store_has_is_told_here_only(
    directory: Path, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "penstock.stores.file.sockets.RECEIVE_SECONDS", 0.01
    )  # these sockets cannot send the receiver its alarm
    sockets = FaultySockets(errno.EIO)
    with opened(directory, sockets=sockets) as notifier, opened(directory, 2) as there:
        heard = Heard()
        notifier.listen(heard)
        there.listen(Heard())
        notifier.notify(partition)
        assert heard.partitions == [partition]
        assert sockets.paths == []


# --- what arrives -----------------------------------------------------------------------------


def test_garbage_is_ignored(directory: Path) -> None:
    with opened(directory) as notifier, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        heard = Heard()
        notifier.listen(heard)
        hint, last = module._encode(PARTITION), module._encode(OTHER)
        assert hint is not None
        assert last is not None
        assert len(hint) == 25
        wrong = [b"", b"x", b"x" * 10_000, hint[:-1], hint + b"x", b"QSNH" + hint[4:], b"PSNH\x02" + hint[5:]]
        for datagram in [*wrong, last]:
            sender.sendto(datagram, str(notifier._own))
        heard.wait()
        assert heard.partitions == [OTHER]
        assert notifier.received == 1


def test_the_socket_is_this_users_alone(directory: Path) -> None:
    with opened(directory) as notifier:
        notifier.listen(Heard())
        assert notifier._own.stat().st_mode & 0o777 == 0o600


# --- closing ----------------------------------------------------------------------------------


def receiving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-hints"]


def test_closing_ends_the_thread_and_removes_the_socket(directory: Path) -> None:
    notifier, heard = make(directory), Heard()
    stop = notifier.listen(heard)
    notifier.listen(heard)
    assert len(sockets_in(directory)) == len(receiving_threads()) == 1
    notifier.close()
    assert sockets_in(directory) == []
    assert receiving_threads() == []
    notifier.close()
    notifier.notify(PARTITION)
    stop()
    assert heard.partitions == []
    with pytest.raises(StoreClosed):
        notifier.listen(heard)


def test_a_receiver_whose_alarm_is_lost_ends_nevertheless(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stores.file.sockets.RECEIVE_SECONDS", 0.01)
    notifier = make(directory)
    notifier.listen(Heard())
    notifier._own.unlink()
    notifier.close()
    assert receiving_threads() == []


def test_a_callback_may_close_its_own_notifier(directory: Path) -> None:
    with opened(directory) as here:
        there, heard = make(directory, 2), Heard()

        def callback(partition: Partition) -> None:
            there.close()
            heard(partition)

        there.listen(callback)
        [receiving] = receiving_threads()
        here.notify(PARTITION)
        heard.wait()
        receiving.join(PATIENCE_SECONDS)
        assert not receiving.is_alive()


# --- what is wrong with the surroundings ends the hints between processes, and nothing else ----


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_without_a_directory_hints_stay_in_the_process() -> None:
    heard = Heard()
    with opened(None) as notifier:
        notifier.listen(heard)
        notifier.notify(PARTITION)
        assert heard.partitions == [PARTITION]
        assert receiving_threads() == []


def no_thread(*_: Any) -> threading.Thread:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("below", "changed"),
    [
        ("x" * 120, {}),
        ("missing", {}),
        ("", {"platform": Platform(disk=CountingDisk(fault=PermissionError(errno.EACCES, "planted")))}),
        ("", {"platform": Platform(spawn=no_thread)}),
    ],
)
def test_a_fault_is_told_once_and_hints_in_the_process_go_on(
    directory: Path, below: str, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    with opened(directory / below, **changed) as notifier:
        notifier.listen(heard)
        notifier.notify(PARTITION)
        notifier.listen(Heard())
        notifier.notify(OTHER)
    assert heard.partitions == [PARTITION, OTHER]
    [told] = warnings_in(caplog)
    assert "no hints between processes" in told
    assert sockets_in(directory) == []


def test_a_question_for_the_living_that_fails_reaches_nobody(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    def is_alive(_: int) -> bool:
        raise ZeroDivisionError("planted")

    with opened(directory, is_alive=is_alive, sockets=FaultySockets(errno.EAGAIN)) as notifier:
        (directory / f"{notifier._prefix}7-abcdef.sock").touch()
        notifier.notify(PARTITION)
        notifier.notify(PARTITION)
    assert len(warnings_in(caplog)) == 1


# --- the runtime directory --------------------------------------------------------------------


def find(directory: Path, chosen: Path | None = None, user: int | None = None) -> Path | None:
    (directory / "run").mkdir(exist_ok=True)
    return find_runtime_directory(
        chosen, system=directory / "run", temporary=directory, user=os.geteuid() if user is None else user
    )


def test_the_chosen_directory_comes_first_then_the_systems_then_one_of_our_own(directory: Path) -> None:
    user = os.geteuid()
    own = directory / f"penstock-{user}"
    assert find(directory, directory / "missing") == own
    assert own.stat().st_mode & 0o777 == 0o700
    assert find(directory) == own
    systems = directory / "run" / str(user)
    systems.mkdir(0o700)
    assert find(directory, directory / "missing") == systems
    chosen = directory / "chosen"
    chosen.mkdir(0o700)
    assert find(directory, chosen) == chosen
    chosen.chmod(0o750)
    assert find(directory, chosen) == systems


def test_a_directory_that_others_can_write_to_or_have_put_there_is_not_used(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = directory / f"penstock-{os.geteuid()}"
    own.mkdir()
    own.chmod(0o770)
    assert find(directory) is None
    own.rmdir()
    elsewhere = directory / "elsewhere"
    elsewhere.mkdir(0o700)
    own.symlink_to(elsewhere)
    assert find(directory) is None
    own.unlink()
    own.touch()
    assert find(directory) is None
    assert find(directory, user=os.geteuid() + 1) is None
    assert len(warnings_in(caplog)) == 4
