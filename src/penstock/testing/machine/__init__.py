"""A machine in memory that can lose its power before any operation: disk, databases, clock, chance and boot.

    machine = Machine(seed=7)
    store = FileStore(ROOT, platform=machine.platform)
    ...
    after = machine.after_power_loss(Survival("torn", "torn"), random.Random(7))
    store = FileStore(ROOT, platform=after.platform)

The store is the real one; nothing of it is replaced. It has no threads here and no other processes, so that the same
seed does the same. `operations` names everything that changed the medium, in order, and `on_step` is called right
before each: whoever wants to crash there copies the machine.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clock import VirtualClock
from penstock.stores.file.platform import Platform
from penstock.testing.machine.databases import Databases
from penstock.testing.machine.disk import SURVIVALS, Survival, VirtualDisk

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ROOT", "SURVIVALS", "Machine", "Survival", "VirtualDisk"]

ROOT = Path("/store")
"""Where to put a store; any other path does as well."""


class Machine:
    """One boot of a machine, with one process at a time."""

    def __init__(self, seed: int = 0, *, disk: VirtualDisk | None = None, clock: VirtualClock | None = None) -> None:
        self.chance = random.Random(seed)
        self.disk = disk or VirtualDisk()
        self.disk.step = self._step
        self.clock = clock or VirtualClock()
        self.databases = Databases(self.disk)
        self.operations: list[str] = []
        self.on_step: Callable[[str], None] = lambda _: None
        self._boot_id = self.chance.randbytes(16)
        self._locks = _idle_locks.pop() if _idle_locks else NoLocks()
        self.platform = self._make_platform()

    def _make_platform(self) -> Platform:
        return Platform(
            disk=self.disk,
            clock=self.clock,
            boot_id=self._boot_id,
            random=self.chance.randbytes,
            spawn=lambda _name, _work: _NoThread(),
            record_locks=lambda _path: self._locks,
            connect=self.databases.connect,
            sockets=NoSockets(),
            check_directory=lambda _path: None,
        )

    def _step(self, operation: str) -> None:
        self.on_step(operation)
        self.operations.append(operation)

    def after_kill(self) -> Machine:
        """Return the machine as the next process finds it: of the same boot, with everything that was written."""
        clock = VirtualClock(self.clock.time_us() - round(self.clock.monotonic() * 1_000_000))
        clock.advance(self.clock.monotonic())
        after = Machine(disk=self.disk.after_kill(), clock=clock)
        after._boot_id = self._boot_id
        after.chance.seed(self.chance.getstate()[1][0] ^ len(self.operations))
        after.platform = after._make_platform()
        return after

    def after_power_loss(
        self, survival: Survival, chance: random.Random, *, clock: VirtualClock | None = None
    ) -> Machine:
        """Return the machine as it boots again; its clock goes on by itself, or is the given one."""
        disk = self.disk.after_power_loss(survival, chance)
        return Machine(chance.getrandbits(32), disk=disk, clock=clock or VirtualClock(self.clock.time_us()))

    def turn_off(self) -> None:
        """Give back what the machine holds of this process; nothing on its medium changes."""
        self.databases.close()
        self.on_step = lambda _: None
        _idle_locks.append(self._locks)


class NoLocks:
    """The record locks of a process that is alone."""

    def try_lock(self, byte: int) -> bool:
        return True

    def lock(self, byte: int) -> None:
        """Nobody else has it."""

    def unlock(self, byte: int) -> None:
        """Nobody else wants it."""

    def holder(self, byte: int) -> int | None:
        return None


# The store keeps what belongs to a lock file for the life of the process, so they are used again.
_idle_locks: list[NoLocks] = []


class _NoThread(threading.Thread):
    """A thread that never begins; whatever it would do is called by hand."""

    def join(self, timeout: float | None = None) -> None:
        """There is nothing to wait for."""


class NoSocket:
    """A socket to and from nobody."""

    def send(self, data: bytes, path: Path) -> None:
        """Nobody hears it."""

    def receive(self) -> bytes | None:
        return None

    def close(self) -> None:
        """There is nothing to close."""


class NoSockets:
    """The sockets of a process that is alone."""

    def sender(self) -> NoSocket:
        return NoSocket()

    def receiver(self, path: Path) -> NoSocket:
        return NoSocket()
