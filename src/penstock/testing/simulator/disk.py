"""The disk of the machine as one simulated process sees it: with its faults, and with the sockets beside the files."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

from penstock.testing.machine.faults import FAILING, FULL, SHORT
from penstock.testing.simulator.network import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _typeshed import ReadableBuffer

    from penstock.testing.machine import VirtualDisk
    from penstock.testing.simulator.network import Network
    from penstock.testing.simulator.process import Process


class ProcessDisk:
    """The `Disk` of a simulated process: what is not said here is the machine's."""

    def __init__(self, disk: VirtualDisk, network: Network, process: Process) -> None:
        self._disk = disk
        self._network = network
        self._process = process

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._disk, name)
        setattr(self, name, operation)  # so that this is asked once for each
        return operation

    def _strikes(self, fault: str) -> bool:
        rate = self._process.world.plan.disk.get(fault, 0.0)
        strikes = rate > 0 and self._process.chance.random() < rate
        if strikes:
            self._process.note(fault)
        return strikes

    def write(self, descriptor: int, data: ReadableBuffer, position: int) -> int:
        return self.write_many(descriptor, [data], position)

    def write_many(self, descriptor: int, buffers: Sequence[ReadableBuffer], position: int) -> int:
        if self._strikes(FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._strikes(SHORT):
            data = b"".join(map(bytes, buffers))
            count = self._process.chance.randrange(len(data)) if data else 0
            return self._disk.write_many(descriptor, [data[:count]], position) if count else 0
        return self._disk.write_many(descriptor, buffers, position)

    def allocate(self, descriptor: int, position: int, count: int) -> None:
        if self._strikes(FULL):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._disk.allocate(descriptor, position, count)

    def sync(self, descriptor: int) -> None:
        if self._strikes(FAILING):
            self._disk.sync_in_vain(descriptor, self._process.chance)
        self._disk.sync(descriptor)

    def names(self, path: Path) -> list[str]:
        return sorted([*self._disk.names(path), *self._network.names(path)])

    def remove(self, path: Path) -> None:
        if path.suffix == SUFFIX:
            self._network.remove(path)
        else:
            self._disk.remove(path)
