"""One round of two processes at a time, which share a subscription until everything is settled.

The first one comes, begins, and waits; the second comes to it, and when it has its part the first one goes on, or is
killed. One of the two is ended at a step. Whoever is left goes on to the end; if nobody is, others come.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import defaultdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from penstock import columns as cols
from penstock.batch import Batch
from penstock.producers import Run, lasting_producer
from penstock.rows import TopicSettings
from penstock.testing.campaigns.deliveries import sharer as sharing
from penstock.testing.campaigns.deliveries.accounts import Accounts
from penstock.testing.campaigns.deliveries.books import Told
from penstock.testing.campaigns.deliveries.consumer import Logged, Said, Stuck, open_file_store
from penstock.testing.campaigns.deliveries.rounds import DEATHS_MAX, KILLED, SILENT_SECONDS, wait_until_stopped
from penstock.testing.campaigns.deliveries.script import ANYWHERE, TOPIC, Act, Did, FastClock, Fault, Scene
from penstock.testing.campaigns.deliveries.sharer import Armed, Handed, Stamped, Waits
from penstock.testing.campaigns.deliveries.steps import Doing, Ends
from penstock.testing.campaigns.processes import quick_directory
from penstock.testing.campaigns.zygote import Crashed, Silent, Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.campaigns.zygote import Child

MODULES: Final = (sharing.__name__, __name__)


class _Broken(Exception):
    """Raised when something was found while processes run: they may never come to an end."""


class Party:
    """One of the processes."""

    def __init__(self, number: int, child: Child) -> None:
        self.number = number
        self.child = child
        self.frozen = False
        self.ended = False
        self.waits = False
        self.given = False
        """Whether it was given anything."""
        self.armed = False

    @property
    def runs(self) -> bool:
        """Whether it goes on by itself."""
        return not (self.ended or self.frozen)


class Together:
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
        self._broken = False
        self._told_of = found
        self._count = count
        self._program = program
        self.accounts = Accounts(scene, self._found)
        self.steps: list[str] = []
        """The steps that were begun by the process that is to be ended."""
        self.reached: list[Ends] = []
        self._parties: list[Party] = []
        self._victim = 0
        self._kill_after = 0
        """After so many messages of the victim it is killed, whatever it is at; 0 for never."""

    def _found(self, what: str) -> None:
        self._broken = True
        self._told_of(what)

    def play(self, fault: Fault | None = None) -> None:
        """Let two processes consume, one of which is ended by a fault; then whoever is needed to come to the end."""
        with quick_directory() as directory:
            self._root = str(Path(directory) / "data")
            self._since_us = time.time_ns() // 1_000
            clock = FastClock(self._since_us)
            try:
                self._publish(clock)
                self._live(fault)
                self._live_to_the_end()
            except _Broken:
                return
            except (Silent, EOFError) as error:
                self._found(f"the processes of a round go on, but {error!r}")
                return
            finally:
                for party in self._parties:
                    party.child.kill()
            store = open_file_store(self._root, clock)
            try:
                self.accounts.check(store)
            finally:
                store.close()

    def _publish(self, clock: FastClock) -> None:
        store = open_file_store(self._root, clock)
        try:
            topic = store.log.create_topic(TOPIC, TopicSettings(partitions=self._scene.partitions))
            parts: defaultdict[int, list[Told]] = defaultdict(list)
            for number, line in enumerate(self._scene.script):
                partition = xxhash.xxh64_intdigest(line.key, cols.PARTITION_SEED) % self._scene.partitions
                parts[partition].append(Told(line.payload(number), line.key))
            for number, told in parts.items():
                batch = Batch.build([each.payload for each in told], key=[each.key for each in told])
                run = Run(lasting_producer(), 0, 0, len(told), cols.digest(batch.columns))
                store.log.append(topic.partitions[number], batch, [run])
                self.accounts.publish(topic.log_id, number, 0, told)
        finally:
            store.close()

    # --- lives --------------------------------------------------------------------------------

    def _start(self, fault: Fault | None = None, *, waits: bool = False) -> Party:
        self._count("processes started")
        child = self._zygote.start(
            self._program, root=self._root, since_us=self._since_us, scene=self._scene, fault=fault, waits=waits
        )
        self._parties.append(Party(len(self._parties), child))
        return self._parties[-1]

    def _live(self, fault: Fault | None) -> None:
        second_is_ended = self._scene.second
        if fault is not None and fault.side == ANYWHERE:
            self._kill_after = fault.comes
        first = self._start(None if second_is_ended else fault, waits=True)
        self._victim = int(second_is_ended)
        self._hear_until(lambda: first.waits or not first.runs)
        second = self._start(fault if second_is_ended else None)
        self._hear_until(lambda: second.given or not second.runs)
        if self._scene.kills_first and first.runs:
            if second.runs:
                second.child.tell("arm")
                self._hear_until(lambda: second.armed or not second.runs)
            self._kill(first)
        first.child.tell("go")
        self._hear_until(lambda: not (first.runs or second.runs))

    def _live_to_the_end(self) -> None:
        """Let processes come, if they are needed; then wake the frozen one, which must change nothing."""
        for _ in range(DEATHS_MAX):
            if self._is_done():
                break
            party = self._start()
            self._hear_until(lambda party=party: not party.runs)  # type: ignore[misc]
        else:
            self._found(f"after {DEATHS_MAX} processes more it is not done")
        for party in self._parties:
            if party.frozen:
                party.frozen = False
                party.child.signal(signal.SIGCONT)
        self._hear_until(lambda: not any(party.runs for party in self._parties))

    def _is_done(self) -> bool:
        """Tell whether a process has ended by itself: it does so when everything is settled."""
        return any(party.ended and party.child.reap() == 0 for party in self._parties)

    # --- hearing ------------------------------------------------------------------------------

    def _hear_until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            if self._broken:
                raise _Broken
            by_connection = {party.child.connection: party for party in self._parties if party.runs}
            ready = wait(list(by_connection), SILENT_SECONDS)
            if not ready:
                raise Silent(f"{len(by_connection)} processes have said nothing for {SILENT_SECONDS:.0f} s")
            for connection in ready:
                party = by_connection[connection]  # type: ignore[index] # it is one of them
                try:
                    stamped = party.child.hear()
                except EOFError:
                    self._end(party)
                else:
                    self._hear(party, stamped)

    def _end(self, party: Party) -> None:
        party.ended = True
        code = party.child.reap()
        if code not in {0, KILLED}:
            self._found(f"process {party.number} ended with {code}")

    def _kill(self, party: Party) -> None:
        """Kill a process from outside."""
        self.accounts.ended(party.number, time.monotonic_ns())
        self._count("killed anywhere, together")
        party.child.signal(signal.SIGKILL)

    def _hear(self, party: Party, stamped: Stamped | Crashed) -> None:
        if isinstance(stamped, Crashed):
            self._found(f"a process raised:\n{stamped.trace}")
            return
        self.accounts.hear(party.number, stamped)
        if party.number == self._victim:
            self._hear_victim(party, stamped)
        match stamped.message:
            case Said(_, _, _, Did.KILLED):
                self.accounts.ended(party.number, stamped.at)
                self._count("processes killed by an event")
                if all(line.act is not Act.KILL for line in self._scene.script):
                    self._found("a process was killed, and nobody did")
            case Waits():
                party.waits = True
            case Armed():
                party.armed = True
            case Handed():
                party.given = True
            case Stuck(why):
                self._found(f"a process does not go on: {why}")
            case Logged(level, text):
                self._count("logged")
                if level >= logging.ERROR:
                    self._found(f"nothing is wrong with the store, but it logs: {text}")

    def _hear_victim(self, party: Party, stamped: Stamped) -> None:
        if self._kill_after:
            self._kill_after -= 1
            if not self._kill_after:
                self._kill(party)
        match stamped.message:
            case Doing(step):
                self.steps.append(step)
            case Ends(fault, step):
                self.reached.append(stamped.message)
                self.accounts.ended(party.number, stamped.at)
                self._count(f"{'frozen' if fault.freeze else 'killed'} {fault.side} {step}, together")
                if fault.freeze:
                    wait_until_stopped(party.child.pid)
                    party.frozen = True
                    party.child.tell("go")


def play_together(
    zygote: Zygote,
    scene: Scene,
    fault: Fault | None = None,
    *,
    count: Callable[[str], None] = lambda _: None,
    program: Callable[..., None] = sharing.share,
) -> tuple[Together, list[str]]:
    """Play a round; returns it, and the promises that did not hold. `program` is what its processes run."""
    found: list[str] = []
    played = Together(zygote, scene, found=found.append, count=count, program=program)
    played.play(fault)
    return played, found
