"""C4: every system call fails, once, for a while and for ever, and the process is killed there.

A child lives a short life with a store (`life`). At one step of it `strace` is attached, and makes one system call
fail: the n-th of its kind in this step, with an error that it may have in reality; either that one alone, or all from
there on until some steps later, or to the end. Or the process is killed right there. Then `strace` is detached, the
life goes on to its end, and what is left is judged (`judge`): nothing acknowledged is lost, nothing that was refused is
there, nothing is stored twice, nothing is damaged, and all goes on.

Which calls there are in which step is counted first, by a life in which nothing fails. What a round does is the n-th
entry of a list that the seed has shuffled, kind by kind of call in turn, so that the rare ones are tried, too.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.testing.campaigns.campaign import Campaign
from penstock.testing.campaigns.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.testing.campaigns.campaign import Report
    from penstock.testing.campaigns.nursery import Ended

LIVE: Final = "penstock.testing.campaigns.syscalls.life:live"
WARM_UP: Final = "penstock.testing.campaigns.syscalls.judge:warm_up"
JUDGE: Final = "penstock.testing.campaigns.syscalls.judge:judge"

YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
"""Says whether a process may trace another one that it did not start; missing where every one may."""
STEPS_MAX: Final = 100
"""More than a life has."""
LASTING_STEPS: Final = (1, 2, 4, STEPS_MAX)
"""How many steps a lasting fault may last; the last one is for ever."""
LIFE_SECONDS: Final = 60.0
"""No life takes as long, whatever fails: what is longer hangs."""
DETACH_SECONDS: Final = 10.0
KILL: Final = "SIGKILL"


class Faults(NamedTuple):
    """The errors that calls of a kind can have."""

    names: tuple[str, ...]
    """What the kernel calls them, on one machine or another."""
    once: tuple[str, ...]
    lasting: tuple[str, ...]


# An interrupted call is repeated by whoever made it, for ever if it must be. SQLite takes ENOLCK for "busy", and waits.
FAULTS: Final = (
    Faults(("openat",), ("EIO", "ENOSPC", "EMFILE", "EINTR"), ("EIO", "ENOSPC", "EMFILE")),
    Faults(("close",), ("EIO", "EINTR"), ("EIO",)),
    Faults(("pread64",), ("EIO", "EINTR"), ("EIO",)),
    Faults(("preadv", "preadv2"), ("EIO", "EINTR"), ("EIO",)),
    Faults(("read",), ("EIO", "EINTR"), ("EIO",)),
    Faults(("pwrite64",), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("pwritev", "pwritev2"), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("write",), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("fdatasync",), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("fsync",), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("fallocate",), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("ftruncate",), ("EIO", "ENOSPC", "EINTR"), ("EIO", "ENOSPC")),
    Faults(("rename", "renameat", "renameat2"), ("EIO", "ENOSPC"), ("EIO", "ENOSPC")),
    Faults(("unlink", "unlinkat", "rmdir"), ("EIO",), ("EIO",)),
    Faults(("mkdir", "mkdirat"), ("EIO", "ENOSPC"), ("EIO", "ENOSPC")),
    Faults(("getdents64",), ("EIO",), ("EIO",)),
    Faults(("newfstatat", "fstat", "stat", "lstat", "statx"), ("EIO",), ("EIO",)),
    Faults(("fstatfs", "statfs"), ("EIO",), ("EIO",)),
    Faults(("fcntl",), ("EIO", "ENOLCK", "EINTR"), ("EIO",)),
)


@dataclass(frozen=True)
class Injection:
    """One thing that goes wrong."""

    step: int
    call: str
    nth: int
    fault: str
    """An error's name, or `SIGKILL`."""
    lasting_steps: int = 0
    """How many steps it lasts; zero: this one call alone."""

    @property
    def rule(self) -> str:
        """What `strace` is told."""
        effect = f"signal={self.fault}" if self.fault == KILL else f"error={self.fault}"
        return f"{self.call}:{effect}:when={self.nth}{'+' if self.lasting_steps else ''}"

    @property
    def kind(self) -> str:
        """What the report counts."""
        lasting = " for ever" if self.lasting_steps == STEPS_MAX else " for a while" if self.lasting_steps else ""
        return f"{self.fault}{' at' if self.fault == KILL else ' from'} {self.call}{lasting}"

    def __str__(self) -> str:
        until = f", until {self.lasting_steps} steps later" if self.lasting_steps else ""
        return f"in step {self.step} of a life: strace -e inject={self.rule}{until}"


# --- what is tried ------------------------------------------------------------------------------


def injections(calls: Mapping[tuple[int, str], int], chance: random.Random) -> Iterator[Injection]:
    """Yield everything that can go wrong in a life with these calls (how many of a kind in a step), kinds in turn."""
    kinds: list[list[Injection]] = []
    for faults in FAULTS:
        counted = sorted((place, count) for place, count in calls.items() if place[1] in faults.names)
        places = [(*place, nth) for place, count in counted for nth in range(1, count + 1)]
        kind = [Injection(*place, fault) for place in places for fault in (*faults.once, KILL)]
        for place in places:
            kind += [Injection(*place, fault, chance.choice(LASTING_STEPS)) for fault in faults.lasting]
        chance.shuffle(kind)
        kinds.append(kind)
    in_turn = chain.from_iterable(zip_longest(*kinds))
    return (injection for injection in in_turn if injection is not None)


def count_calls(nursery: Nursery, directory: Path) -> Counter[tuple[int, str]]:
    """Live once without any failure, and return how many calls of which kind each step makes."""
    trace = directory / "trace"
    child = nursery.begin(LIVE, root=str(directory / "data"), pauses=list(range(STEPS_MAX)))
    nursery.pauses(LIFE_SECONDS)
    names = ",".join(f"?{name}" for faults in FAULTS for name in faults.names)  # `?`: if this machine has it
    with strace(child, "-o", str(trace), "-e", f"trace=sendto,{names}"):
        nursery.let_go()
        while nursery.pauses(LIFE_SECONDS):
            nursery.let_go()
    ended = nursery.end(LIFE_SECONDS)
    if ended.code != 0:
        raise RuntimeError(f"a life without failures ended with {ended.code}: {ended.told[-1:]}")
    calls: Counter[tuple[int, str]] = Counter()
    step = 0
    for line in trace.read_text().splitlines():
        traced = re.match(rf"{child} +(\w+)\(", line)  # only the thread that lives; `strace` counts by thread
        if traced and traced[1] == "sendto":  # a pause
            step += 1
        elif traced:
            calls[step, traced[1]] += 1
    return calls


# --- trying it ----------------------------------------------------------------------------------


@contextmanager
def strace(child: int, *options: str) -> Iterator[None]:
    """Trace a process, its threads included, in this block."""
    command = ["strace", "-f", "-p", str(child), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as tracer:  # noqa: S603 - a fixed program
        try:
            assert tracer.stderr is not None
            attached = tracer.stderr.readline()
            if b"attached" not in attached:
                raise RuntimeError(f"strace cannot be attached: {attached.decode()}")
            yield
        finally:
            tracer.send_signal(signal.SIGINT)  # it detaches
            try:
                tracer.wait(DETACH_SECONDS)
            except subprocess.TimeoutExpired:
                tracer.kill()


def suffer(nursery: Nursery, root: Path, injection: Injection) -> Ended:
    """Live a life in which something goes wrong."""
    first, last = injection.step, injection.step + max(injection.lasting_steps, 1)
    child = nursery.begin(LIVE, root=str(root), pauses=[first, last])
    if nursery.pauses(LIFE_SECONDS):
        with strace(child, "-o", os.devnull, "-e", f"trace={injection.call}", "-e", f"inject={injection.rule}"):
            nursery.let_go()
            survived = nursery.pauses(LIFE_SECONDS)
        if survived:
            nursery.let_go()
    return nursery.end(LIFE_SECONDS)


def findings(nursery: Nursery, root: Path, injection: Injection, *, rebooted: bool) -> Iterator[str]:
    """Try one injection, and yield every promise that did not hold."""
    ended = suffer(nursery, root, injection)
    if ended.hung:
        yield f"it did not end within {LIFE_SECONDS:.0f} s; the last that it told: {ended.told[-1:]}"
    elif ended.code not in ({0, -signal.SIGKILL} if injection.fault == KILL else {0}):
        yield f"it ended with {ended.code}; the last that it told: {ended.told[-1:]}"
        return
    once = not injection.lasting_steps and not ended.hung
    judged = nursery.run(JUDGE, LIFE_SECONDS, root=str(root), told=ended.told, rebooted=rebooted, once=once)
    yield from map(str, judged.told)
    if judged.hung:
        yield f"what opened the store afterwards did not end within {LIFE_SECONDS:.0f} s"


def run(report: Report, seed: int) -> None:
    """Run the campaign."""
    chance = random.Random(seed)
    base = Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))
    try:
        with Nursery(WARM_UP) as nursery:
            base.joinpath("counted").mkdir()
            remaining = injections(count_calls(nursery, base / "counted"), chance)
            for number in range(report.rounds):
                injection = next(remaining, None)
                if injection is None:
                    break
                root = base / str(number) / "data"
                root.parent.mkdir()
                rebooted = chance.random() < 0.5
                for finding in findings(nursery, root, injection, rebooted=rebooted):
                    report.found(finding, f"seed {seed}, {injection}{', then a reboot' if rebooted else ''}")
                report.count(injection.kind)
                report.finish_round()
                shutil.rmtree(root.parent)
    finally:
        shutil.rmtree(base)


def obstacle() -> str | None:
    """Say why it cannot run here, if so."""
    if sys.platform != "linux":
        return "strace is a tool of Linux"
    if shutil.which("strace") is None:
        return "strace is needed: apt-get install strace"
    if YAMA.exists() and YAMA.read_text().strip() != "0" and os.geteuid() != 0:
        return "strace may not be attached here: run as root, or set kernel.yama.ptrace_scope to 0"
    command = ["strace", "-o", os.devnull, "true"]
    tried = subprocess.run(command, capture_output=True, timeout=30, check=False)  # noqa: S603 - a fixed program
    if tried.returncode != 0:
        return f"strace may not trace here: {tried.stderr.decode().strip()}"
    return None


CAMPAIGN: Final = Campaign(
    name="c4",
    title="every system call fails, once, for a while and for ever, or the process is killed there",
    unit="an injection",
    small=60,
    full=2_400,
    run=run,
    obstacle=obstacle,
)
