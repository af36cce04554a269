"""Applications that are run by `penstock run` and the like, in processes of their own; and the other end of them.

An application tells what happens by lines in a file, `told`, which all its processes share; the test waits for them
there. It is told to go on by a file that appears, so that nothing depends on time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.01

PRELUDE = '''
import asyncio
import json
import os
import time
from pathlib import Path

from penstock import Bus, Delivery, Reject, RetryLater, Topic


def tell(what, **more):
    """Tell the test something, in one write, so that lines of several processes do not mix."""
    line = json.dumps({"what": what, "pid": os.getpid(), **more}) + "\\n"
    descriptor = os.open("told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


async def asked(name):
    """Wait until the test has made a file of this name."""
    while not Path(name).exists():
        await asyncio.sleep(0.01)


def asked_blocking(name):
    while not Path(name).exists():
        time.sleep(0.01)


orders = Topic("orders", bytes, key=lambda data: data.split(b"-")[0], partitions=2)
bus = Bus("file:./data", topics=[orders])
'''


def write_application(directory: Path, program: str, name: str = "shop") -> None:
    """Write a module that has the names above."""
    (directory / f"{name}.py").write_text(PRELUDE + dedent(program))


def told(directory: Path, what: str) -> list[dict[str, Any]]:
    """Return what the application has told of one kind so far."""
    path = directory / "told"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    facts = [json.loads(line) for line in lines if line.endswith("\n")]
    return [fact for fact in facts if fact["what"] == what]


def wait_for(condition: Any, failed: Any = lambda: "it did not happen") -> None:
    """Return when a condition holds, or fail after a long time."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, failed()
        time.sleep(LOOK_SECONDS)


class Running:
    """A command in a process of its own."""

    def __init__(self, directory: Path, *command: str, env: dict[str, str] | None = None) -> None:
        self.directory = directory
        self._talk = directory / f"talk-{len(list(directory.glob('talk-*')))}"
        with self._talk.open("wb") as talk:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=talk,
                stderr=subprocess.STDOUT,
                env={**clean_environment(), **(env or {})},
            )

    @property
    def talk(self) -> str:
        """What it has printed so far, to stdout and stderr."""
        return self._talk.read_text()

    def hears(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until the application has told so many facts of a kind, and return them."""
        wait_for(lambda: len(told(self.directory, what)) >= count or self.process.poll() is not None, lambda: self.talk)
        found = told(self.directory, what)
        assert len(found) >= count, f"{found} of {what} {count}: {self.talk}"
        return found

    def says(self, text: str, count: int = 1) -> None:
        """Wait until it has printed a text so often."""
        wait_for(lambda: self.talk.count(text) >= count, lambda: f"{text!r} was not said: {self.talk}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def ends(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(PATIENCE_SECONDS)

    def dispose(self) -> None:
        """Leave nothing of it behind; workers of a supervisor that is gone end by themselves."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def clean_environment() -> dict[str, str]:
    """Return the environment without settings of the machine."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "DJANGO_"))}


def is_alive(pid: int) -> bool:
    """Say whether there is such a process, other than one whose end nobody has asked for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
