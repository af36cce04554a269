"""Datagrams among simulated processes, as Unix sockets carry them: by path, to whoever has bound it.

A path stays when its process dies, and sending to it is refused then, until somebody removes it. What was sent comes in
any order, twice or not at all, as the plan says; a real socket loses nothing, but nothing may rest on that.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from penstock.testing.simulator.process import Process
    from penstock.testing.simulator.world import World

QUEUE_MAX = 10
"""So many datagrams wait for a receiver; the system's own limit."""
SUFFIX = ".sock"


class _Bound:
    """A path that somebody has bound."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.open = True
        self.waiting = 0


class Network:
    """The sockets of one boot of a machine."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._bound: dict[Path, _Bound] = {}

    def names(self, directory: Path) -> list[str]:
        """Return the names of the sockets in a directory."""
        return sorted(path.name for path in self._bound if path.parent == directory)

    def remove(self, path: Path) -> None:
        """Remove a path; what was sent to it still comes."""
        if self._bound.pop(path, None) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    def bind(self, path: Path, process: Process) -> None:
        """Let a process receive what is sent to a path."""
        if path in self._bound:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), str(path))
        self._bound[path] = _Bound(process)

    def close(self, path: Path) -> None:
        """Let nobody receive there any more; the path stays."""
        if path in self._bound:
            self._bound[path].open = False

    def send(self, data: bytes, path: Path) -> None:
        """Send a datagram, without waiting; the plan says what becomes of it."""
        bound = self._bound.get(path)
        if bound is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if bound.process.dead or not bound.open:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED), str(path))
        if bound.waiting >= QUEUE_MAX:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        plan, chance = self._world.plan, self._chance
        copies = 0 if chance.random() < plan.lost else 1 + (chance.random() < plan.doubled)
        for _ in range(copies):
            most = plan.slow_seconds if chance.random() < plan.late else plan.datagram_seconds
            bound.waiting += 1
            # In the context of the receiver: while that is frozen, it waits.
            self._world.loop.call_later(
                most * chance.random(), _deliver, bound, data, context=bound.process.context.copy()
            )


def _deliver(bound: _Bound, data: bytes) -> None:
    bound.waiting -= 1
    if bound.open:
        bound.process.receive(data)


class ProcessSockets:
    """The `DatagramSockets` of a simulated process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def sender(self) -> _Socket:
        return _Socket(self._network, None)

    def receiver(self, path: Path) -> _Socket:
        self._network.bind(path, self._process)
        return _Socket(self._network, path)


class _Socket:
    """A `DatagramSocket`; what comes is given to the process, by the loop."""

    def __init__(self, network: Network, path: Path | None) -> None:
        self._network = network
        self._path = path

    def send(self, data: bytes, path: Path) -> None:
        self._network.send(data, path)

    def receive(self) -> bytes | None:
        raise AssertionError("there is no thread that could wait for a datagram")

    def close(self) -> None:
        if self._path is not None:
            self._network.close(self._path)
