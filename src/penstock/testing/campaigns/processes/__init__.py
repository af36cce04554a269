"""C7: processes that share a store are killed and stopped, in a loop.

Eight writers publish, commit, read, roll and trim at once. A round lets them, until so many reports have come; then it
kills some of them with SIGKILL, whatever they are at, and others take their places; or it stops one with SIGSTOP for a
moment; or it stops one in the very middle of its turn to write. From time to time all rest, everything is read, and the
journal is checked. Promised is that

* what was acknowledged is there, once, in order, whoever died; what was refused is not; a repeat is recognised;
* others go on at once when a writer is killed in its turn;
* when one is stopped there, those who lose patience get `WriterStalled` with its process number, and nobody writes;
  when it goes on, so do all others, and nothing of it is doubled;
* no cursor goes back or beyond the end, and no commit is accepted under a lease that has a newer epoch;
* `verify` is clean.

A process that says nothing for a minute hangs, and is a finding.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.settings import FileSettings
from penstock.testing.campaigns.campaign import Campaign, Report
from penstock.testing.campaigns.processes import actor as acting
from penstock.testing.campaigns.processes import writer as writing
from penstock.testing.campaigns.processes.reports import Answered, Asked, Ledger, Publish
from penstock.testing.campaigns.processes.writer import InTurn, Resting
from penstock.testing.campaigns.zygote import ANSWER_SECONDS, BUFFER_BYTES, Child, Crashed, Silent, Zygote

if TYPE_CHECKING:
    from collections.abc import Collection

WRITERS: Final = 8
IMPATIENT_SECONDS: Final = 0.3
PATIENT_SECONDS: Final = 30.0
"""How long writers wait for a turn: every second one is impatient."""
STORE_ROUNDS: Final = 50
"""After so many rounds a new store is begun: what one journal holds is bounded."""
CHECK_ROUNDS: Final = 10
"""So often all rest and everything is looked at."""
REPORTS_MAX: Final = 60
"""A round ends after at most so many reports."""
LOOK_SECONDS: Final = 1.0
"""So often it is looked who is silent."""
STALLS_AWAITED: Final = 2
"""So many refusals are awaited while a writer is stopped in its turn."""
SPIN_SECONDS_MAX: Final = 0.003
STOP_SECONDS_MAX: Final = 0.3
REFUSALS: Final = frozenset({"WriterStalled", "TrimRefused", "Fenced"})
"""What a call may end with although nothing is wrong."""
MEMORY: Final = Path("/dev/shm")  # noqa: S108 - only a directory of its own is used there
MODULES: Final = (acting.__name__, writing.__name__)


def quick_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a new directory, in memory if the system has such a place; its path is short, as sockets need it."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else Path("/tmp")  # noqa: S108
    return tempfile.TemporaryDirectory(prefix="penstock-", dir=place)


def run(report: Report, seed: int, *, plant: str = "") -> None:
    """Run the campaign; `plant` names a function that puts a bug into the writers, as `module:function`."""
    with Zygote(*MODULES, plant=plant) as zygote:
        while report.done < report.rounds:
            with quick_directory() as directory:
                _run_store(report, seed, zygote, Path(directory))


def _run_store(report: Report, seed: int, zygote: Zygote, directory: Path) -> None:
    number = report.done
    chance = random.Random(f"{seed}-{number}")
    ledger = Ledger(report, lambda: f"seed {seed}, store of round {number}, round {report.done}", refusals=REFUSALS)
    crew = Crew(report, ledger, zygote, directory, chance)
    try:
        crew.found_store()
        crew.fill()
        rounds = min(STORE_ROUNDS, report.rounds - report.done)
        for index in range(1, rounds + 1):
            crew.play_round()
            if index % CHECK_ROUNDS == 0 and index < rounds:
                crew.rest()
                crew.survey()
                crew.tell_all("go")
            report.finish_round()
            if ledger.broken:
                return
        crew.end()
        crew.survey(boot_id=chance.randbytes(16))
    except (Silent, EOFError) as error:
        ledger.found(f"the processes of a store go on, but {error!r}")
    finally:
        crew.kill_all()


class Writer:
    """One of the crew."""

    def __init__(self, child: Child, number: int, generation: int) -> None:
        self.child = child
        self.number = number
        self.generation = generation
        self.is_stopped = False
        self.is_resting = False
        self.in_turn: InTurn | None = None
        self.heard_at = time.monotonic()

    def __str__(self) -> str:
        return f"writer {self.number}, process {self.child.pid}"


class Crew:
    """The writers of one store, and what is done to them."""

    def __init__(self, report: Report, ledger: Ledger, zygote: Zygote, directory: Path, chance: random.Random) -> None:
        self._report = report
        self._ledger = ledger
        self._zygote = zygote
        self._root = str(directory / "data")
        self._directory = directory
        self._chance = chance
        self._writers: dict[int, Writer] = {}
        # While one is held in its turn: who, and the calls of others to that partition which began since.
        self._held: Writer | None = None
        self._meanwhile: set[tuple[int, int]] = set()
        self._stalls = 0

    # --- beginning and ending -------------------------------------------------------------------

    def _settings(self, stall_seconds: float) -> FileSettings:
        return FileSettings(
            segment_bytes=256 << 10,
            allocate_bytes=64 << 10,
            marker_seconds=0.05,
            stall_seconds=stall_seconds,
            runtime_directory=str(self._directory),
        )

    def found_store(self) -> None:
        """Make the store."""
        self._hear_out(
            self._zygote.start(writing.found_store, root=self._root, settings=self._settings(PATIENT_SECONDS))
        )

    def fill(self) -> None:
        """Start all writers."""
        for number in range(WRITERS):
            self._start(number)

    def _start(self, number: int) -> None:
        before = self._writers.get(number)
        generation = before.generation + 1 if before else 0
        lasting = f"w{number}"
        child = self._zygote.start(
            writing.write,
            buffer_bytes=BUFFER_BYTES,
            root=self._root,
            settings=self._settings(PATIENT_SECONDS if number % 2 else IMPATIENT_SECONDS),
            seed=f"{self._chance.random()}",
            lasting=lasting,
            first=self._ledger.next_sequence(lasting),
            own=f"w{number}.{generation}",
            repeats=self._ledger.to_repeat([lasting]),
            trims=number == 0,
        )
        self._writers[number] = Writer(child, number, generation)
        self._report.count("processes started")

    def _hear_out(self, child: Child) -> None:
        """Take in all that a process says until it ends by itself."""
        try:
            for message in child.hear_rest():
                self._hear_message(child.pid, message)
            self._ledger.end_of(child.pid)
            if code := child.reap():
                self._ledger.found(f"process {child.pid} ends by itself with 0, but it ended with {code}")
        finally:
            child.kill()

    def end(self) -> None:
        """Let all writers close the store."""
        self.tell_all("end")
        for writer in self._writers.values():
            self._hear_out(writer.child)
        self._writers.clear()

    def kill_all(self) -> None:
        """Leave no process behind."""
        for writer in self._writers.values():
            writer.child.kill()

    # --- hearing --------------------------------------------------------------------------------

    def tell_all(self, word: str) -> None:
        """Send a word to all."""
        for writer in self._writers.values():
            writer.is_resting = False
            writer.child.tell(word)

    def _hear_some(self, seconds: float) -> int:
        """Take in one message of each writer that says something within this time; returns how many came."""
        by_connection: dict[Any, Writer] = {
            writer.child.connection: writer for writer in self._writers.values() if not writer.is_resting
        }
        ready = wait(list(by_connection), min(seconds, LOOK_SECONDS))
        for connection in ready:
            self._hear_writer(by_connection[connection])
        self._check_silence()
        return len(ready)

    def _hear_writer(self, writer: Writer) -> None:
        writer.heard_at = time.monotonic()
        try:
            message = writer.child.hear()
        except EOFError:
            self._ledger.found(f"{writer} ended by itself with {writer.child.reap()}")
            self._replace(writer)
            return
        if isinstance(message, Resting):
            writer.is_resting = True
        elif isinstance(message, InTurn):
            writer.in_turn = message
        else:
            self._check_turn(writer, message)
            self._hear_message(writer.child.pid, message)

    def _hear_message(self, pid: int, message: object) -> None:
        if isinstance(message, Crashed):
            self._ledger.found(f"process {pid} raised:\n{message.trace}")
        else:
            self._ledger.hear(pid, message)

    def _check_silence(self) -> None:
        now = time.monotonic()
        for writer in list(self._writers.values()):
            if writer.is_resting or writer.is_stopped or writer.in_turn:
                writer.heard_at = now
            elif now - writer.heard_at > ANSWER_SECONDS:
                self._ledger.found(f"{writer} has said nothing for {ANSWER_SECONDS:.0f} s")
                self._kill(writer)

    def _hear_until(self, count: int, *, seconds: float = ANSWER_SECONDS) -> None:
        """Take in so many reports, or those of so much time."""
        end = time.monotonic() + seconds
        while count > 0 and (left := end - time.monotonic()) > 0:
            count -= self._hear_some(left)

    def _hear_all_said(self) -> None:
        """Take in all that was said up to now."""
        while self._hear_some(0):
            pass

    # --- faults ---------------------------------------------------------------------------------

    def play_round(self) -> None:
        """Let them write, and do something to some of them."""
        self._hear_until(self._chance.randint(1, REPORTS_MAX))
        dice = self._chance.random()
        if dice < 0.60:
            self._kill_some(self._chance.sample(range(WRITERS), self._chance.choice([1, 1, 1, 2, 3, WRITERS])))
        elif dice < 0.85:
            self._stop(self._chance.randrange(WRITERS))
        else:
            self._hold(self._chance.randrange(WRITERS))

    def _spin(self) -> None:
        """Let a little time pass, so that what follows comes at no special moment."""
        end = time.perf_counter() + self._chance.random() * SPIN_SECONDS_MAX
        while time.perf_counter() < end:
            pass

    def _kill_some(self, numbers: Collection[int]) -> None:
        self._spin()
        victims = [self._writers[number] for number in numbers]
        for writer in victims:
            writer.child.signal(signal.SIGKILL)
        for writer in victims:
            self._replace(writer)

    def _kill(self, writer: Writer) -> None:
        writer.child.signal(signal.SIGKILL)
        self._replace(writer)

    def _replace(self, writer: Writer) -> None:
        """Start another process in the place of one that was killed."""
        writer.child.reap()
        for message in writer.child.hear_rest():
            if not isinstance(message, InTurn | Resting):
                self._hear_message(writer.child.pid, message)
        self._ledger.end_of(writer.child.pid)
        self._report.count("processes killed")
        self._start(writer.number)

    def _stop(self, number: int) -> None:
        """Stop a writer wherever it is, for a moment."""
        writer = self._writers[number]
        self._spin()
        self._set_stopped(writer, stopped=True)
        self._hear_until(self._chance.randint(1, REPORTS_MAX), seconds=self._chance.random() * STOP_SECONDS_MAX)
        self._set_stopped(writer, stopped=False)
        self._report.count("processes stopped somewhere")

    def _set_stopped(self, writer: Writer, *, stopped: bool) -> None:
        writer.child.signal(signal.SIGSTOP if stopped else signal.SIGCONT)
        writer.is_stopped = stopped

    def _hold(self, number: int) -> None:
        """Stop a writer that has the turn; see that others are told, that nobody writes, and that all go on then."""
        writer = self._writers[number]
        writer.child.tell("hold")
        while writer.in_turn is None:
            self._hear_some(LOOK_SECONDS)
            if self._writers[number] is not writer:  # it has ended, which is a finding already
                return
        self._set_stopped(writer, stopped=True)
        # Whatever is said after this began while it had the turn.
        self._hear_all_said()
        self._held, self._stalls = writer, 0
        end = time.monotonic() + ANSWER_SECONDS
        while self._stalls < STALLS_AWAITED and time.monotonic() < end:
            self._hear_some(LOOK_SECONDS)
        if self._stalls < STALLS_AWAITED:
            self._ledger.found(f"{writer} is stopped in its turn, but others do not get `WriterStalled`")
        self._release(writer)

    def _release(self, writer: Writer) -> None:
        self._held = None
        self._meanwhile.clear()
        self._set_stopped(writer, stopped=False)
        writer.in_turn = None
        if self._chance.random() < 0.3:
            self._report.count("processes killed in their turn")
            self._kill(writer)
        else:
            self._report.count("processes stopped in their turn")
            writer.child.tell("go")

    def _check_turn(self, writer: Writer, message: object) -> None:
        """See that nothing is written to a partition while somebody is stopped in its turn."""
        held = self._held
        if held is None or held.in_turn is None or writer is held:
            return
        if isinstance(message, Asked) and isinstance(message.call, Publish):
            if message.call[:2] == held.in_turn:
                self._meanwhile.add((writer.child.pid, message.number))
        elif isinstance(message, Answered) and (writer.child.pid, message.number) in self._meanwhile:
            if message.error == "WriterStalled" and message.pid == held.child.pid:
                self._stalls += 1
            else:
                self._ledger.found(f"{held} is stopped in the turn of {held.in_turn}, but {writer} got {message}")

    # --- looking --------------------------------------------------------------------------------

    def rest(self) -> None:
        """Let all writers finish what they are at, and wait."""
        self.tell_all("rest")
        end = time.monotonic() + ANSWER_SECONDS
        while not all(writer.is_resting for writer in self._writers.values()):
            if time.monotonic() > end:
                raise Silent("not all writers rest when they are told to")
            self._hear_some(LOOK_SECONDS)

    def survey(self, *, boot_id: bytes | None = None) -> None:
        """Read everything, and check the journal."""
        child = self._zygote.start(
            acting.survey,
            root=self._root,
            settings=self._settings(PATIENT_SECONDS),
            boot_id=boot_id,
            repeats=self._ledger.to_repeat() if boot_id else (),
            source="survey" if boot_id else "",
            first=0,
        )
        self._hear_out(child)
        self._ledger.check()


CAMPAIGN = Campaign(
    name="c7",
    title="writers are killed and stopped",
    unit="a kill or a stop among eight processes",
    small=6,
    full=500,
    run=run,
)
