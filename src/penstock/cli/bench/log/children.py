"""Other processes: started one by one, counted, and ended by their own process numbers, whatever happens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from penstock.errors import PenstockError

SECONDS_MAX = 300.0
"""No job may take longer."""
END_SECONDS = 30.0


class Child:
    """One process that does a job."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def tell(self, message: object) -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Return its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PenstockError(f"process {self.process.pid} of this bench ended early; stderr says why")
        return json.loads(line)

    def end(self) -> None:
        """Let it end by itself, as it does when nobody tells it anything more."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(END_SECONDS)


@contextmanager
def children(
    jobs: Sequence[msgspec.Struct], *, area: str = "log", seconds_max: float = SECONDS_MAX
) -> Iterator[list[Child]]:
    """Start a process for each job of an area; they are killed at the end of this block, if they still run."""
    with ExitStack() as stack:
        started = [Child(stack.enter_context(_process(job, area))) for job in jobs]
        watchdog = threading.Timer(seconds_max, _kill, [started])
        watchdog.start()
        stack.callback(watchdog.cancel)
        yield started


def _kill(started: Sequence[Child]) -> None:
    for child in started:
        child.process.kill()


@contextmanager
def _process(job: msgspec.Struct, area: str) -> Iterator[subprocess.Popen[str]]:
    described = msgspec.json.encode(job).decode()
    command = [sys.executable, "-m", f"penstock.cli.bench.{area}", described]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.kill()
