"""A nursery: one process that has imported everything, and forks a child for each piece of work.

Starting Python takes longer than most pieces of work. So one process starts, warms up, and from then on forks; each
child runs one function, alone, and ends. A child tells what it has to tell through memory that it shares with the
nursery: so it is known however the child ends, and telling makes no system call that could be made to fail.

A child may pause, until whoever asked for it lets it go on: a moment to attach a tracer, or to detach it.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe, wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable

TOLD_BYTES_MAX: Final = 8 << 20
START_SECONDS: Final = 60.0
END_SECONDS: Final = 10.0
_LENGTH_BYTES: Final = 8
_PAUSED: Final = b"p"
_GO: Final = b"g"


class Ended(NamedTuple):
    """How a child ended."""

    code: int
    """Its exit code; of a child that a signal has ended, the signal's number, negated."""
    told: list[Any]
    hung: bool
    """It did not end in time, and was killed for it."""


# --- in the nursery ---------------------------------------------------------------------------


class Child:
    """What a child can say to the outside."""

    def __init__(self, gate: socket.socket) -> None:
        self._memory = mmap.mmap(-1, TOLD_BYTES_MAX)
        self._gate = gate

    def tell(self, value: Any) -> None:
        """Add a value, which JSON can express, to what is known of this child. No system call is made."""
        line = json.dumps(value).encode() + b"\n"
        end = self._length + len(line)
        self._memory[self._length : end] = line
        # Last, so that what a killed child has told is always whole.
        self._memory[:_LENGTH_BYTES] = end.to_bytes(_LENGTH_BYTES, "little")

    def pause(self) -> None:
        """Wait to be let go on."""
        self._gate.send(_PAUSED)
        self._gate.recv(1)

    @property
    def _length(self) -> int:
        return int.from_bytes(self._memory[:_LENGTH_BYTES], "little") or _LENGTH_BYTES

    def forget(self) -> None:
        """Forget what an earlier child has told."""
        self._memory[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)

    def told(self) -> list[Any]:
        """Return all that was told."""
        return [json.loads(line) for line in self._memory[_LENGTH_BYTES : self._length].splitlines()]


def serve(requests: Connection, gate: socket.socket, warm_up: Callable[[], None]) -> None:
    """Fork a child for each request, until there are no more."""
    # Nobody reads the log here, and writing it would be calls that can be made to fail.
    logging.disable()
    sys.unraisablehook = lambda _: None
    warm_up()
    child = Child(gate)
    requests.send("ready")
    while True:
        try:
            work, arguments = requests.recv()
        except EOFError:
            return
        child.forget()
        number = os.fork()
        if number == 0:
            _work(child, work, arguments)
        requests.send(number)
        _, status = os.waitpid(number, 0)
        requests.send((os.waitstatus_to_exitcode(status), child.told()))


def _work(child: Child, work: str, arguments: dict[str, Any]) -> None:
    """Do what a child is for, and end."""
    code = 1
    try:
        named(work)(child, **arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - whoever asked for it reads it
        child.tell(traceback.format_exc())
    finally:
        os._exit(code)


def named(function: str) -> Callable[..., None]:
    """Return the function of a name such as `package.module:function`."""
    module, _, name = function.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), name)
    return found


# --- outside ----------------------------------------------------------------------------------


class Nursery:
    """A nursery in a process of its own, for as long as the block lasts. Functions are named as `module:function`."""

    def __init__(self, warm_up: str) -> None:
        self._warm_up = warm_up
        self._child = 0

    def __enter__(self) -> Self:
        self._requests, requests = Pipe()
        self._gate, gate = socket.socketpair()
        with requests, gate:
            inherited = [requests.fileno(), gate.fileno()]
            command = [sys.executable, "-m", __name__, *map(str, inherited), self._warm_up]
            self._process = subprocess.Popen(command, pass_fds=inherited)  # noqa: S603 - this Python, and this module
        if not self._requests.poll(START_SECONDS):
            self._process.kill()
        try:
            self._requests.recv()
        except EOFError:
            self.__exit__()
            raise RuntimeError("the nursery did not start") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._gate.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def begin(self, work: str, **arguments: Any) -> int:
        """Begin a piece of work in a child, and return its process number; `end` must follow."""
        self._requests.send((work, arguments))
        self._child = self._requests.recv()
        return self._child

    def pauses(self, seconds: float) -> bool:
        """Wait until the child pauses; False if it has ended instead, or takes longer."""
        if self._gate not in wait([self._requests, self._gate], seconds):
            return False
        self._gate.recv(1)
        return True

    def let_go(self) -> None:
        """Let a child go on that pauses."""
        self._gate.send(_GO)

    def end(self, seconds: float) -> Ended:
        """Wait until the child ends; one that takes longer is killed."""
        hung = not self._requests.poll(seconds)
        if hung:
            os.kill(self._child, signal.SIGKILL)
        code, told = self._requests.recv()
        return Ended(code, told, hung)

    def run(self, work: str, seconds: float, **arguments: Any) -> Ended:
        """Do a piece of work in a child, and return how it ended."""
        self.begin(work, **arguments)
        return self.end(seconds)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])), named(sys.argv[3]))
