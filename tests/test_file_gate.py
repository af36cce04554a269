"""Turns: one at a time, given up when nothing moves, and never lost."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.errors import WriterStalled
from penstock.stores.file.gate import Gate, Gates, shared_gates
from penstock.stores.file.platform import Platform, system_record_locks

HOLDER = """
import sys
from pathlib import Path
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.platform import Platform
gates = shared_gates(Path(sys.argv[1]), Platform())
gates.enter(7)
with gates.gate(3).turn("held", 5.0):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
sys.stdin.readline()
"""

LOOK = """
import sys
from pathlib import Path
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.platform import Platform
if shared_gates(Path(sys.argv[1]), Platform()).is_alive(8):
    print("8 is alive")
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "locks"


@pytest.fixture
def gates(path: Path) -> Gates:
    return shared_gates(path, Platform())


@pytest.fixture
def gate(gates: Gates) -> Gate:
    return gates.gate(3)


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the turn until it is told to let go."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_process_opens_a_lock_file_once(path: Path) -> None:
    assert system_record_locks(path) is system_record_locks(path)
    assert shared_gates(path, Platform()) is shared_gates(path, Platform())


def test_threads_have_the_turn_one_at_a_time(gate: Gate) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with gate.turn("mine", 5.0):
                inside += 1
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_whoever_waits_for_a_holder_that_does_not_move_is_told_its_process(
    gate: Gate, holder: subprocess.Popen[str]
) -> None:
    for _ in range(2):  # the second one finds a thread that waits already
        with pytest.raises(WriterStalled) as caught, gate.turn("mine", 0.2):
            pytest.fail("the turn is another's")
        assert caught.value.pid == holder.pid
        assert str(holder.pid) in str(caught.value)
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    with gate.turn("mine", 30.0):  # and when it moves, the turn is had
        pass


def test_a_holder_that_moves_is_waited_for_however_long_it_takes(gate: Gate, holder: subprocess.Popen[str]) -> None:
    looks = []

    def progress() -> int:
        looks.append(0)
        if len(looks) == 12:  # more than twice of what makes a stall
            assert holder.stdin is not None
            holder.stdin.write("\n")
            holder.stdin.flush()
        return len(looks)

    with gate.turn("mine", 0.2, progress=progress):
        assert len(looks) >= 12


def test_a_killed_holder_harms_nobody(gate: Gate, gates: Gates, holder: subprocess.Popen[str]) -> None:
    assert gate.holder() == holder.pid
    assert gates.is_alive(7)
    holder.kill()
    holder.wait()
    with gate.turn("mine", 30.0):
        assert gate.holder() is None
    assert not gates.is_alive(7)


def test_a_turn_that_came_too_late_is_given_back(gate: Gate, path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(WriterStalled), gate.turn("mine", 0.1):
        pytest.fail("the turn is another's")
    holder.kill()
    holder.wait()
    # The thread that still waited has got it, for nobody; another process must be able to have it.
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as another:
        assert another.stdout is not None
        assert another.stdout.readline() == "held\n"
        another.kill()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 dislikes what is tested here
def test_a_child_of_a_fork_does_not_take_the_parents_turn_along(gate: Gate, path: Path) -> None:
    with gate.turn("mine", 5.0):
        child = os.fork()
        if child == 0:  # pragma: no cover - in another process
            try:
                shared_gates(path, Platform()).gate(3).turn("the child's", 0.2).__enter__()
            except WriterStalled as stalled:
                os._exit(0 if stalled.pid == os.getppid() else 2)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        # The child has ended, and closed what it inherited; the turn is still the parent's.
        with subprocess.Popen(
            [sys.executable, "-c", HOLDER.replace("5.0", "0.2"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as another:
            _, errors = another.communicate()
            assert "WriterStalled" in errors


# --- work that is done in a turn ----------------------------------------------------------------


def let_go(holder: subprocess.Popen[str]) -> None:
    assert holder.stdin is not None
    holder.stdin.write("\n")
    holder.stdin.flush()


def test_work_in_a_turn_that_is_free_is_done_at_once(gate: Gate) -> None:
    done: list[int] = []
    gate.run(lambda: done.append(threading.get_ident()), "mine", 5.0)
    assert done == [threading.get_ident()]


def test_work_in_a_turn_that_is_waited_for_is_prepared_and_done_once(gate: Gate, holder: subprocess.Popen[str]) -> None:
    done: list[str] = []

    def prepare() -> None:
        done.append("prepare")
        let_go(holder)

    gate.run(lambda: done.append("work"), "mine", 30.0, prepare=prepare)
    assert done == ["prepare", "work"]


@pytest.mark.parametrize("waits", [True, False])
def test_what_the_work_raises_is_raised_and_the_turn_is_given_back(
    gate: Gate, path: Path, holder: subprocess.Popen[str], waits: bool
) -> None:
    def fail() -> None:
        raise ValueError("the work failed")

    if not waits:
        holder.kill()
        holder.wait()
    with pytest.raises(ValueError, match="the work failed"):
        gate.run(fail, "mine", 30.0, prepare=lambda: let_go(holder))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as another:
        assert another.stdout is not None
        assert another.stdout.readline() == "held\n"
        another.kill()


def test_one_thread_at_most_stays_to_wait_for_the_next_turn(gate: Gate) -> None:
    # Two of them would both be woken, both have the turn, and one give it back while the other is in it.
    with gate._changed:
        gate._idle = True
        assert gate._rest()
        assert gate._idle


def test_work_that_was_given_up_is_never_done(gate: Gate, holder: subprocess.Popen[str]) -> None:
    done: list[int] = []
    with pytest.raises(WriterStalled) as caught:
        gate.run(lambda: done.append(1), "mine", 0.1)
    assert caught.value.pid == holder.pid
    holder.kill()
    holder.wait()
    gate.run(lambda: done.append(2), "mine", 30.0)
    assert done == [2]


COUNTING = """
import sys, threading
from pathlib import Path
from penstock.errors import WriterStalled
from penstock.stores.file.gate import shared_gates
from penstock.stores.file.platform import Platform

gate, number = shared_gates(Path(sys.argv[1]), Platform()).gate(3), Path(sys.argv[2])

def add():
    number.write_text(str(int(number.read_text()) + 1))

def count(patience, in_block):
    for _ in range(60):
        while True:
            try:
                if in_block:
                    with gate.turn("a number", patience):
                        add()
                else:
                    gate.run(add, "a number", patience)
            except WriterStalled:
                continue
            break

threads = [threading.Thread(target=count, args=how) for how in ((30.0, False), (0.001, False), (0.001, True))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_nobody_is_in_a_turn_with_another_however_often_some_lose_patience(path: Path, tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", COUNTING, str(path), str(number)]) for _ in range(3)]
    try:
        assert [process.wait(100) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert number.read_text() == str(3 * 3 * 60)


# --- locks that the system does not give back ---------------------------------------------------


def fail_to_unlock(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the next unlocking of the turn itself fail, once."""
    unlock, left = gate._locks.unlock, [1]

    def failing(byte: int) -> None:
        if byte == gate._write_byte and left:
            left.pop()
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        unlock(byte)

    monkeypatch.setattr(gate._locks, "unlock", failing)
    return left


def test_a_turn_that_cannot_be_given_back_says_so_and_the_next_one_is_had(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = fail_to_unlock(gate, monkeypatch)
    with pytest.raises(OSError, match="No locks available"), gate.turn("it", 5.0):
        pass
    assert not left
    with gate.turn("it", 5.0):
        pass


def test_work_is_answered_also_if_its_turn_cannot_be_given_back(
    gate: Gate, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = fail_to_unlock(gate, monkeypatch)
    done: list[str] = []
    with pytest.raises(OSError, match="No locks available"):
        gate.run(lambda: done.append("done"), "it", 30.0, prepare=lambda: let_go(holder))
    assert (done, left) == (["done"], [])
    gate.run(lambda: done.append("again"), "it", 30.0)
    assert done == ["done", "again"]


def open_files(directory: Path) -> list[str]:
    """Return which files of a directory this process has open."""
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor that looks is gone when it is looked at
            opened.append(descriptor.readlink())
    return sorted(file.name for file in opened if file.parent == directory)


def test_locks_of_files_that_were_removed_are_closed_and_no_others(
    path: Path, gates: Gates, holder: subprocess.Popen[str]
) -> None:
    gates.enter(8)
    removed = path.with_name("removed")
    gone = system_record_locks(removed)
    assert gone.try_lock(1)
    removed.unlink()
    others = [path.with_name(f"other-{number}") for number in range(20)]
    for other in others:
        assert system_record_locks(other).try_lock(1)
        other.unlink()
    # The last one is there until the next file is opened; of what other tests have left open nothing is said.
    assert open_files(path.parent) == [path.name, f"{others[-1].name} (deleted)"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        gone.try_lock(1)
    assert gates.is_alive(7)
    told = subprocess.run([sys.executable, "-c", LOOK, str(path)], check=True, capture_output=True, text=True)
    assert told.stdout == "8 is alive\n"
