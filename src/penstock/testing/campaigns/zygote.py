"""Processes that a campaign may kill, forked from one that has imported everything, so that each costs milliseconds.

The process of a campaign may have threads, so it never forks. It starts one helper, the zygote, which imports what the
programs need and then does nothing but fork. The zygote reaps a process only when it is asked to, so that a process
number never comes to mean another process. When the campaign ends, however it ends, the zygote kills what is left.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

ANSWER_SECONDS: Final = 60.0
"""Whoever says nothing for so long hangs."""
BUFFER_BYTES: Final = 16 << 10
"""Of what a process may have said without having been heard: none runs far ahead. A message that fits is sent as a
whole or not at all, also by a process that is killed or stopped."""
_MESSAGE_BYTES_MAX: Final = 4096
_START: Final = "from {module} import serve; serve(int(sys.argv[1]), sys.argv[2], sys.argv[3:])"


class Crashed(NamedTuple):
    """The last message of a program that has raised."""

    trace: str


class Silent(Exception):
    """Raised when a process that should say something does not."""


class Child:
    """A process that runs a program, and the connection to it."""

    def __init__(self, zygote: Zygote, pid: int, connection: Connection[Any, Any]) -> None:
        self._zygote = zygote
        self.pid = pid
        self.connection = connection
        self._status: int | None = None

    def hear(self) -> Any:
        """Return its next message; `EOFError` if it has ended, `Silent` if it hangs."""
        if not self.connection.poll(ANSWER_SECONDS):
            raise Silent(f"process {self.pid} has said nothing for {ANSWER_SECONDS:.0f} s")
        try:
            return self.connection.recv()
        except OSError as error:  # killed in the middle of a message
            raise EOFError from error

    def hear_rest(self) -> Iterator[Any]:
        """Yield what it says until it ends."""
        with suppress(EOFError):
            while True:
                yield self.hear()

    def tell(self, message: object) -> None:
        """Send it a message; one that has ended hears nothing."""
        with suppress(BrokenPipeError):
            self.connection.send(message)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it was reaped: its number may be another's then."""
        if self._status is None:
            os.kill(self.pid, number)

    def reap(self) -> int:
        """Wait until it has ended; returns its exit code, negative for a signal."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(self._zygote.ask(b"reap %d" % self.pid))
        return self._status

    def kill(self) -> None:
        """End it at once; what it has said can still be heard."""
        self.signal(signal.SIGKILL)
        self.reap()


class Zygote:
    """Starts processes.

    `plant` names a function that is called first in there, as `module:function`: it may put a bug into the code that
    the campaign tests, to see that the campaign finds it.
    """

    def __init__(self, *modules: str, plant: str = "") -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER_SECONDS)
        start = "import sys; sys.path[:] = {path!r}; " + _START
        command = [sys.executable, "-c", start.format(path=sys.path, module=__name__)]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this very interpreter
                [*command, str(theirs.fileno()), plant, *modules],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt from the keyboard is the campaign's
            )

    def start(self, program: Callable[..., None], *, buffer_bytes: int | None = None, **arguments: Any) -> Child:
        """Run a function in a process of its own; its first argument is the connection to this one."""
        ours, theirs = socket.socketpair()
        with theirs:
            if buffer_bytes is not None:
                theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            name = f"{program.__module__}:{program.__qualname__}"
            child = Child(self, self.ask(name.encode(), theirs.fileno()), Connection(ours.detach()))
        child.tell(arguments)
        return child

    def ask(self, request: bytes, *descriptors: int) -> int:
        """Ask for something, and return the answer."""
        socket.send_fds(self._control, [request], descriptors)
        answer = self._control.recv(_MESSAGE_BYTES_MAX)
        if not answer:
            raise Silent("the zygote has ended; stderr says why")
        return int(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        try:
            self._process.wait(ANSWER_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()


# --- in the zygote ----------------------------------------------------------------------------


def serve(descriptor: int, plant: str, modules: list[str]) -> None:
    """Be the zygote, until the other end is closed."""
    for module in modules:
        importlib.import_module(module)
    if plant:
        _named(plant)()
    living: set[int] = set()
    with socket.socket(fileno=descriptor) as control:
        try:
            while True:
                request, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES_MAX, 1)
                if not request:
                    return
                if descriptors:
                    pid = os.fork()
                    if pid == 0:
                        control.close()
                        _become(request.decode(), descriptors[0])
                    os.close(descriptors[0])
                    living.add(pid)
                    control.sendall(b"%d" % pid)
                else:
                    pid = int(request.removeprefix(b"reap "))
                    living.discard(pid)
                    control.sendall(b"%d" % os.waitpid(pid, 0)[1])
        finally:
            for pid in living:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _named(name: str) -> Callable[..., None]:
    module, _, function = name.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), function)
    return found


def _become(program: str, descriptor: int) -> None:
    """Run a program, and end."""
    status = 1
    try:
        connection: Connection[Any, Any] = Connection(descriptor)
        _run(program, connection)
        status = 0
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # nobody listens any more
    finally:
        os._exit(status)


def _run(program: str, connection: Connection[Any, Any]) -> None:
    try:
        _named(program)(connection, **connection.recv())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except BaseException:
        connection.send(Crashed(traceback.format_exc()[-_MESSAGE_BYTES_MAX // 2 :]))
        raise
