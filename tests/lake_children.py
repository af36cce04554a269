"""An archiver in a process of its own, without Spark, that may end by SIGKILL at any change of the disk.

Started as `python lake_children.py <arguments as JSON>`; it says `ready`, begins when it is told to by a line, and
prints what it has archived.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from typing import Any


class ArchivingChild:
    """The other end of it, for the test that starts it."""

    def __init__(self, **arguments: Any) -> None:
        command = [sys.executable, __file__, json.dumps(arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("begin\n")
        self._process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its code, and what it has said."""
        said, _ = self._process.communicate(timeout=60)
        return self._process.returncode, said

    def dispose(self) -> None:
        self._process.kill()
        self._process.communicate()


def _die_at(step: int) -> None:
    """End at the change of the disk with this number; only what is done in a lake counts."""
    made = 0

    def dying(real: Any) -> Any:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal made
            if any("lake" in str(arg) for arg in args):
                if made == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                made += 1
            return real(*args, **options)

        return change

    for name in ("link", "rename", "unlink", "mkdir", "open"):
        setattr(os, name, dying(getattr(os, name)))


def main(url: str, lake: str, file_bytes: int, die_at: int | None = None) -> None:
    from penstock.lake.lake import Lake
    from penstock.lake.plan import Aim
    from penstock.spark.pipelines.archive import Archiver, here
    from penstock.stores import open_store

    aim = Aim(file_bytes=file_bytes, file_bytes_min=file_bytes // 2, merged_files_min=4)
    with closing(open_store(url)) as store:
        where = Lake(lake)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        if die_at is not None:
            _die_at(die_at)
        done = Archiver(store, where, ["orders"], here(store, where, aim), aim=aim).everything()
        sys.stdout.write(json.dumps(done.document()))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
