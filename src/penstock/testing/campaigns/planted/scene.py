"""A scene: a topic of one partition, in a store on a virtual machine, and what was acknowledged there.

Whoever hunts for a planted bug sets one, does a few things, crashes it, and looks at what is left.
"""

from __future__ import annotations

import random
import re
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.offsets import Gap
from penstock.rows import Commit, Cursor, Shard, Subscription, TopicSettings
from penstock.stores.file.segment import segment_names
from penstock.stores.file.store import FileStore
from penstock.testing.campaigns.virtual.aftermath import silence
from penstock.testing.campaigns.virtual.life import SMALL, SUBSCRIPTION, Published, send
from penstock.testing.machine import ROOT, Machine, Survival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.stores.file.tail import Tail

LOST: Final = Survival("dropped", "dropped")
"""A power loss that takes everything that was not synced."""
KEPT: Final = Survival("kept", "kept")
READ_BYTES: Final = 1 << 26
PRODUCER: Final = b"\1" * 6 + b"\x40" + bytes(9)
OTHER_PRODUCER: Final = b"\2" * 6 + b"\x40" + bytes(9)


class Scene:
    """A small log, and the machines that it is on."""

    def __init__(self, **settings: Any) -> None:
        self.machine = Machine(1)
        self._machines = [self.machine]
        self.store = self.open()
        self.topic = self.store.log.create_topic("orders", TopicSettings(**settings))
        self.partition = self.topic.partitions[0]
        self.directory = ROOT / "topics" / self.topic.log_id / "0"
        self.shard = Shard(self.topic.log_id, SUBSCRIPTION, 0, 0)
        subscription = Subscription(log_id=self.topic.log_id, name=SUBSCRIPTION, mode="exclusive", protect=False)
        self.store.cursors.put_subscription(subscription, [Cursor(shard=self.shard, next_offset=0)])
        self.stored: dict[int, bytes] = {}

    def end(self) -> None:
        """Turn all machines off."""
        for machine in self._machines:
            machine.turn_off()

    # --- what happens ---------------------------------------------------------------------------

    def open(self, machine: Machine | None = None) -> FileStore:
        """Open the store, as another process."""
        return FileStore(ROOT, settings=SMALL, platform=(machine or self.machine).platform)

    def act(self, payloads: list[bytes], producer: bytes, first: int) -> Published:
        """Return a publish that is still to be sent."""
        return Published(what="publish", partition=self.partition, payloads=payloads, producer=producer, first=first)

    def publish(self, *payloads: bytes, store: FileStore | None = None) -> Published:
        """Publish, with the sequences that follow."""
        act = self.act([*payloads], PRODUCER, len(self.stored))
        act.answer = send(store or self.store, act)
        self.stored.update(enumerate(payloads, act.answer))
        return act

    def fill(self) -> None:
        """Publish so much that there are several segments."""
        for number in range(12):
            self.publish(b"%d" % number * 300, b"%d" % number * 100)

    def commit(self, offset: int, **stated: Any) -> PenstockError | None:
        """Move the cursor; returns why it was refused."""
        cursors = (Cursor(shard=self.shard, next_offset=offset),)
        [refusal] = self.store.cursors.commit([Commit(cursors=cursors, **stated)])
        return refusal

    @contextmanager
    def killed_before(self, operation: str) -> Iterator[None]:
        """Kill whoever does such an operation in this block, right before it."""

        def kill(text: str) -> None:
            if re.search(operation, text):
                raise _Killed

        self.machine.on_step = kill
        try:
            with suppress(_Killed):
                yield
        finally:
            self.machine.on_step = lambda _: None

    def after_kill(self, machine: Machine | None = None) -> Machine:
        """Return the machine as the next process finds it."""
        self._machines.append((machine or self.machine).after_kill())
        return self._machines[-1]

    def after_power_loss(self, survival: Survival, machine: Machine | None = None) -> Machine:
        """Return the machine as it boots again."""
        self._machines.append((machine or self.machine).after_power_loss(survival, random.Random(0)))
        return self._machines[-1]

    # --- what is there --------------------------------------------------------------------------

    def segments(self, machine: Machine) -> list[Path]:
        """Return the partition's segments."""
        return [self.directory / str(name) for name in segment_names(machine.disk, self.directory)]

    def tail(self, store: FileStore) -> Tail:
        """Return how the log ends."""
        return store.log.tail(store.log.handle(self.partition))

    def read(self, store: FileStore) -> dict[int, bytes]:
        """Return what can be read, by offset."""
        found: dict[int, bytes] = {}
        bounds = store.log.bounds(self.partition)
        position = bounds.start
        while position < bounds.stop:
            for item in store.log.read(self.partition, position, bytes_max=READ_BYTES):
                if not isinstance(item, Gap):
                    found.update(enumerate((event.data for event in item), item.start))
                position = item.range.stop
        return found

    def read_one(self, store: FileStore, offset: int) -> bytes | None:
        """Return the event at an offset; None if it is declared lost."""
        [item] = store.log.read(self.partition, offset, bytes_max=READ_BYTES, events_max=1)
        return None if isinstance(item, Gap) else next(event.data for event in item)

    def wrong_on(self, machine: Machine, wanted: dict[int, bytes] | None = None) -> str | None:
        """Open the store on this machine, go on, and say which events are not as they were acknowledged."""
        try:
            store = self.open(machine)
            found = self.read(store)
            send(store, self.act([b"new"], OTHER_PRODUCER, 0))
        except PenstockError as error:
            return f"{type(error).__name__}: {error}"
        wanted = self.stored if wanted is None else wanted
        wrong = sorted(offset for offset, payload in wanted.items() if found.get(offset) != payload)
        return f"offsets {wrong} are not as they were" if wrong else None


class _Killed(BaseException):
    """Ends a process of a virtual machine."""


def in_a_scene(**settings: Any) -> Callable[[Callable[[Scene], str | None]], Callable[[], str | None]]:
    """Let a function play in a scene of its own, whose topic has these settings."""

    def decorate(play: Callable[[Scene], str | None]) -> Callable[[], str | None]:
        @wraps(play)
        def hunt() -> str | None:
            with silence():
                scene = Scene(**settings)
                try:
                    return play(scene)
                finally:
                    scene.end()

        return hunt

    return decorate
