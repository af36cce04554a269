"""Record locks among simulated processes: one table for all of them, which forgets a process when it dies.

Calls of a store are atomic here, so no turn is ever found taken. What the table is for is the bytes of members, which
tell who is alive: a frozen process keeps its byte, a dead one has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.stores.file import gate

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.stores.file.gate import Gates
    from penstock.stores.file.platform import RecordLocks
    from penstock.testing.simulator.process import Process


class LockTable:
    """Who holds which byte of which file, in one boot of a machine."""

    def __init__(self) -> None:
        self._holders: dict[tuple[Path, int], Process] = {}

    def holder(self, path: Path, byte: int) -> Process | None:
        """Return the process that holds a byte."""
        return self._holders.get((path, byte))

    def take(self, path: Path, byte: int, process: Process) -> bool:
        """Let a process have a byte, unless another one has it, or it is dead itself."""
        return not process.dead and self._holders.setdefault((path, byte), process) is process

    def give_back(self, path: Path, byte: int, process: Process) -> None:
        """Let a process have the byte no longer."""
        if self.holder(path, byte) is process:
            del self._holders[path, byte]

    def forget(self, process: Process) -> None:
        """Give back everything that a process has: it is dead."""
        self._holders = {key: holder for key, holder in self._holders.items() if holder is not process}


class ProcessLocks:
    """The `RecordLocks` of a simulated process on one file."""

    def __init__(self, table: LockTable, path: Path, process: Process) -> None:
        self._table, self._path, self._process = table, path, process

    def try_lock(self, byte: int) -> bool:
        return self._table.take(self._path, byte, self._process)

    def lock(self, byte: int) -> None:
        if not self.try_lock(byte):
            raise AssertionError(f"{self._process.name} would wait for byte {byte} for ever: calls are atomic here")

    def unlock(self, byte: int) -> None:
        self._table.give_back(self._path, byte, self._process)

    def holder(self, byte: int) -> int | None:
        """Return the number of the process that has it, this one included: see `Process.open`."""
        holder = self._table.holder(self._path, byte)
        return None if holder is None else holder.number


def forget_gates(locks: ProcessLocks) -> None:
    """Forget what the store keeps of such an object for the life of the real process: this one's is over."""
    shared: dict[RecordLocks, Gates] = vars(gate)["_shared"]
    shared.pop(locks, None)
