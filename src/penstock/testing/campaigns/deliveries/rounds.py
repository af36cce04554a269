"""One round: a store, what is published to it, and the processes that consume it until everything is settled.

Every process but the last is ended at a step. After each death the store is looked at, and compared with what was
written; after the last, every event must have the state that the script gives it.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from penstock import columns as cols
from penstock.batch import Batch
from penstock.producers import Run, lasting_producer
from penstock.rows import TopicSettings
from penstock.testing.campaigns.deliveries import consumer as consuming
from penstock.testing.campaigns.deliveries import steps as stepping
from penstock.testing.campaigns.deliveries.books import Books, Told
from penstock.testing.campaigns.deliveries.consumer import Ended, Logged, Stale, Stuck, open_file_store
from penstock.testing.campaigns.deliveries.script import ANYWHERE, TOPIC, Act, FastClock, Fault, Scene
from penstock.testing.campaigns.deliveries.steps import Doing, Ends
from penstock.testing.campaigns.processes import quick_directory
from penstock.testing.campaigns.zygote import Crashed, Silent, Zygote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.testing.campaigns.zygote import Child

MODULES: Final = ("penstock.testing.campaigns.deliveries.warm", consuming.__name__, stepping.__name__)
SILENT_SECONDS: Final = 30.0
DEATHS_MAX: Final = 12
"""So many deaths in a row of a process that is not told to die, and it dies for ever."""
KILLED: Final = -signal.SIGKILL


class Round:
    """A round, as it goes on."""

    def __init__(
        self,
        zygote: Zygote,
        scene: Scene,
        *,
        found: Callable[[str], None],
        count: Callable[[str], None],
        program: Callable[..., None],
    ) -> None:
        self._zygote = zygote
        self._scene = scene
        self._found = found
        self._count = count
        self._program = program
        self.books = Books(scene, found)
        self.steps: list[str] = []
        """The steps that were begun, by all processes."""
        self.reached: list[Ends] = []
        """Where processes were ended."""

    def play(self, *faults: Fault) -> None:
        """Let one process after the other consume, each ended by a fault; then one that goes on to the end."""
        with quick_directory() as directory:
            self._root = str(Path(directory) / "data")
            self._since_us = time.time_ns() // 1_000
            self._clock = FastClock(self._since_us)
            try:
                self._publish()
                for fault in self._scene.before:
                    self._live(fault)
                lives: Sequence[Fault | None] = faults or [None] * (self._scene.leaves_at > 0)
                for index, life in enumerate(lives):
                    self._live(life, leaves=index == 0)
                self._live_to_the_end()
                self._look()
                self.books.check()
                self.books.check_end()
            except (Silent, EOFError) as error:
                self._found(f"the processes of a round go on, but {error!r}")

    def _publish(self) -> None:
        store = open_file_store(self._root, self._clock)
        try:
            topic = store.log.create_topic(TOPIC, TopicSettings(partitions=self._scene.partitions))
            parts: defaultdict[int, list[Told]] = defaultdict(list)
            for number, line in enumerate(self._scene.script):
                partition = xxhash.xxh64_intdigest(line.key, cols.PARTITION_SEED) % self._scene.partitions
                parts[partition].append(Told(line.payload(number), line.key))
            for number, told in parts.items():
                # In two appends, as blocks are where reads end.
                for some in (told[: len(told) // 2], told[len(told) // 2 :]):
                    if some:
                        batch = Batch.build([each.payload for each in some], key=[each.key for each in some])
                        run = Run(lasting_producer(), 0, 0, len(some), cols.digest(batch.columns))
                        [answer] = store.log.append(topic.partitions[number], batch, [run])
                        assert answer.offsets is not None
                        self.books.publish(topic.log_id, number, answer.offsets.start, some)
        finally:
            store.close()

    # --- lives --------------------------------------------------------------------------------

    def _start(self, fault: Fault | None = None, *, leaves: bool = False) -> Child:
        self._count("processes started")
        return self._zygote.start(
            self._program, root=self._root, since_us=self._since_us, scene=self._scene, fault=fault, leaves=leaves
        )

    def _live(self, fault: Fault | None, *, leaves: bool = False) -> None:
        """Let a process live until its fault; or until it leaves, or all is done, if it does not come there."""
        child = self._start(fault, leaves=leaves)
        try:
            if self._hear(child, fault) is not None:
                self._stand_in(child)
            code = child.reap()
            if fault is not None and not fault.freeze and code == 0:
                self._count("processes that were not killed")
            elif code not in {0, KILLED}:
                self._found(f"a process ended with {code}")
        finally:
            child.kill()
        self._look()

    def _live_to_the_end(self) -> None:
        """Let processes live that are not told to die; only an event that kills may kill them."""
        self.books.journal.faults_ended(time.monotonic())
        for _ in range(DEATHS_MAX):
            child = self._start()
            try:
                self._hear(child)
                code = child.reap()
            finally:
                child.kill()
            if code != KILLED:
                break
            self._look()
            self._count("processes killed by an event")
            if all(line.act is not Act.KILL for line in self._scene.script):
                self._found("a process was killed, and nobody did")
        else:
            self._found(f"an event that kills its process goes on to do so after {DEATHS_MAX} deaths")

    def _hear(self, child: Child, fault: Fault | None = None) -> Ends | None:
        """Take in what a process says until it ends; or until it is frozen, which is returned."""
        for number, message in enumerate(self._messages(child), 1):
            if fault is not None and fault.side == ANYWHERE and number == fault.comes:
                self._count("killed anywhere")
                child.signal(signal.SIGKILL)
            match message:
                case Ends():
                    self.reached.append(message)
                    self._count(f"{'frozen' if message.fault.freeze else 'killed'} {message.fault.side} {message.step}")
                    if message.fault.freeze:
                        return message
                case Doing(step):
                    self.steps.append(step)
                    self.books.hear(message)
                case Crashed(trace):
                    self._found(f"a process raised:\n{trace}")
                case Stuck(why):
                    self._found(f"a process does not go on: {why}")
                case Logged(level, text):
                    self._hear_logged(level, text)
                case Ended():
                    pass
                case Stale():
                    self._count("settled too late")
                case _:
                    self.books.journal.progressed(time.monotonic())
                    self.books.hear(message)
        return None

    def _hear_logged(self, level: int, text: str) -> None:
        self._count("logged")
        if level >= logging.ERROR:
            self._found(f"nothing is wrong with the store, but it logs: {text}")

    def _messages(self, child: Child) -> Iterator[object]:
        while True:
            if not child.connection.poll(SILENT_SECONDS):
                raise Silent(f"process {child.pid} has said nothing for {SILENT_SECONDS:.0f} s")
            try:
                yield child.hear()
            except EOFError:
                return

    def _stand_in(self, frozen: Child) -> None:
        """Let another process take over from a frozen one, and wake that then: it must change nothing."""
        wait_until_stopped(frozen.pid)
        self._live(None)
        frozen.signal(signal.SIGCONT)
        before = len(self.books.records)
        self._hear(frozen)
        # But for a seek that it had been asked for: that is made late, and what follows from it.
        if len(self.books.records) != before and self._scene.seeks_to is None:
            self._found("a process that was taken over has settled something")

    # --- looking ------------------------------------------------------------------------------

    def _look(self) -> None:
        store = open_file_store(self._root, self._clock)
        try:
            self.books.look(store)
        finally:
            store.close()


def wait_until_stopped(pid: int) -> None:
    """Return when all threads of a process stand still, as it has asked for itself."""
    status = Path(f"/proc/{pid}/stat")
    end = time.monotonic() + SILENT_SECONDS
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "Tt":
        if time.monotonic() > end:
            raise Silent(f"process {pid} does not stop")
        time.sleep(0.001)
    if not status.exists():  # not Linux
        time.sleep(0.1)


def play(
    zygote: Zygote,
    scene: Scene,
    faults: Sequence[Fault] = (),
    *,
    count: Callable[[str], None] = lambda _: None,
    program: Callable[..., None] = consuming.consume,
) -> tuple[Round, list[str]]:
    """Play a round; returns it, and the promises that did not hold. `program` is what its processes run."""
    found: list[str] = []
    played = Round(zygote, scene, found=found.append, count=count, program=program)
    played.play(*faults)
    return played, found
