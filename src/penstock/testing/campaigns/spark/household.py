"""All processes of one driver: Python, Java, and the workers that Java starts.

They are one session, which the driver leads. Its process groups are several, since Spark's daemons make their own; so
a session is looked for in `/proc`. Whatever is done to it is done to all: first everybody is stopped, so that
nobody starts another one meanwhile, then they are killed, or woken later. A process is waited for by its descriptor,
which can never mean another one.

Who is stopped notices nothing, not even that the campaign has ended. So a guard does, a process of its own that
outlives the campaign by a moment and kills whoever is left: `python -m penstock.testing.campaigns.spark.household`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import AF_UNIX, socket
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from penstock.testing.campaigns.spark.steps import GO, Ear, Point, Told
from penstock.testing.campaigns.zygote import Silent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.testing.campaigns.spark.driver import Query

PROC: Final = Path("/proc")
DRIVER: Final = "penstock.testing.campaigns.spark.driver"
SILENT_SECONDS: Final = 120.0
"""A driver that says nothing for so long hangs."""
DEATH_SECONDS: Final = 30.0
WORDS_BYTES: Final = 6000
"""So much of what a driver said last is shown."""


class Household:
    """The processes of a session."""

    def __init__(self, session: int) -> None:
        self._session = session

    def pids(self, *, awake: bool = False) -> set[int]:
        """Return who is alive; or only who is not stopped."""
        found = set()
        for entry in PROC.iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has ended meanwhile
                    state, _, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(session) == self._session and state not in ("ZXT" if awake else "ZX"):
                        found.add(int(entry.name))
        return found

    def stop(self) -> None:
        """Stop everybody."""
        end = time.monotonic() + DEATH_SECONDS
        while pids := self.pids(awake=True):
            _send(pids, signal.SIGSTOP)
            if time.monotonic() > end:
                raise Silent(f"processes {sorted(pids)} were stopped and run on")

    def wake(self) -> None:
        """Let everybody go on."""
        _send(self.pids(), signal.SIGCONT)

    def kill(self) -> None:
        """Kill everybody at once, and wait until nobody is left."""
        self.stop()
        with ExitStack() as stack:
            watched = select.poll()
            left = set()
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    stack.callback(os.close, descriptor)
                    watched.register(descriptor, select.POLLIN)
                    left.add(descriptor)
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            end = time.monotonic() + DEATH_SECONDS
            while left:
                for descriptor, _ in watched.poll(1000):
                    watched.unregister(descriptor)
                    left.remove(descriptor)
                if time.monotonic() > end:
                    raise Silent(f"processes of session {self._session} were killed and live on")


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Guard:
    """The process that sees to it that no driver outlives the campaign, however that ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, this module
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, start_new_session=True
        )

    def note(self, change: str, session: int) -> None:
        """Tell it that a driver was started, `+`, or that all of its processes have ended, `-`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{change}{session}\n".encode())
        self._process.stdin.flush()

    def end(self) -> None:
        """End it; it kills whoever is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEATH_SECONDS)


def guard() -> None:
    """Be the guard, until the campaign has ended."""
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    for session in sessions:
        Household(session).kill()


class Step(NamedTuple):
    """A step that a process has come to, where it waits."""

    told: Told
    ear: Ear

    @property
    def point(self) -> Point:
        """Which one."""
        assert self.told.point is not None
        return self.told.point

    def go(self) -> None:
        """Let it go on; one that was killed does not."""
        with suppress(OSError):
            self.ear.socket.sendall(GO)
        self.drop()

    def drop(self) -> None:
        """Never answer: the process is dead."""
        self.ear.socket.close()


class Outcome(NamedTuple):
    """How a query has ended."""

    failed: bool
    why: str


class Driver:
    """A driver, and what it and its workers say."""

    def __init__(self, query: Query, environment: Mapping[str, str], guard: Guard) -> None:
        self.query = query
        self._guard = guard
        self._words = Path(f"{query.post}.words")
        self._listener = socket(AF_UNIX)
        self._listener.bind(query.post)
        self._listener.listen(64)
        self._ears: dict[int, Ear] = {}
        self._heard: list[Step | Outcome] = []
        with self._words.open("wb") as words:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
                [sys.executable, "-m", DRIVER, msgspec.json.encode(query).decode()],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                cwd=query.scratch,
                env=dict(environment),
                start_new_session=True,
            )
        guard.note("+", self._process.pid)
        self.household = Household(self._process.pid)
        self._heard_at = time.monotonic()

    @property
    def words(self) -> str:
        """What it has said on stderr, the end of it."""
        return self._words.read_bytes()[-WORDS_BYTES:].decode(errors="replace")

    def hear(self, seconds: float = SILENT_SECONDS) -> Step | Outcome | None:
        """Return the next that is said, None if nothing was for so long; `Silent` if that is too long."""
        self._heard_at = time.monotonic()
        end = self._heard_at + seconds
        while not self._heard:
            now = time.monotonic()
            if now - self._heard_at > SILENT_SECONDS:
                raise Silent(f"a driver has said nothing for {SILENT_SECONDS:.0f} s:\n{self.words}")
            if now >= end:
                return None
            self._listen(min(end - now, 1.0))
        return self._heard.pop(0)

    def _listen(self, seconds: float) -> None:
        listening = self._listener.fileno()
        ready, _, _ = select.select([listening, *self._ears], [], [], seconds)
        for number in ready:
            if number == listening:
                connection, _ = self._listener.accept()
                self._ears[connection.fileno()] = Ear(connection)
            else:
                self._hear_ear(number)
        if self._process.poll() is not None and not ready and not self._ears:
            self._heard.append(Outcome(failed=True, why=f"it ended with {self._process.returncode}:\n{self.words}"))

    def _hear_ear(self, number: int) -> None:
        ear = self._ears[number]
        try:
            for told in ear.hear():
                self._heard_at = time.monotonic()
                if told.point is not None:
                    self._heard.append(Step(told, self._ears.pop(number)))
                elif told.driver != "running":
                    self._heard.append(Outcome(failed=told.driver == "failed", why=told.why))
        except EOFError:
            ear.socket.close()
            del self._ears[number]

    def end(self) -> None:
        """Kill all its processes, wherever they are."""
        self.household.kill()
        self._guard.note("-", self._process.pid)
        self._process.wait()  # only now may its number come to mean another one
        for ear in self._ears.values():
            ear.socket.close()
        for said in self._heard:
            if isinstance(said, Step):
                said.drop()
        self._ears.clear()
        self._heard.clear()
        self._listener.close()
        Path(self.query.post).unlink(missing_ok=True)


if __name__ == "__main__":
    guard()
