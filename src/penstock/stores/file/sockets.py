"""Datagram sockets between the processes of one machine, as small as the notifier needs them."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from pathlib import Path

RECEIVE_SECONDS = 1.0
"""How long a receiver waits at most before it looks whether it should end: its alarm may have been lost."""

DATAGRAM_BYTES_MAX: Final = 64
"""What is longer is cut; nobody of ours sends so much."""

SOCKET_MODE: Final = 0o600


class DatagramSocket(Protocol):
    """One datagram socket. Errors are `OSError`, as the system gives them."""

    def send(self, data: bytes, path: Path) -> None:
        """Send to the socket of this path, without waiting."""

    def receive(self) -> bytes | None:
        """Return the next datagram, or None if none came within `RECEIVE_SECONDS`."""

    def close(self) -> None:
        """Close it; the path of a receiver stays."""


class DatagramSockets(Protocol):
    """What makes them."""

    def sender(self) -> DatagramSocket:
        """Return a socket without a name, to send from."""

    def receiver(self, path: Path) -> DatagramSocket:
        """Return a socket that receives what is sent to this path, which must be free."""


class UnixDatagramSocket:
    """A socket of this machine."""

    def __init__(self, timeout_seconds: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(timeout_seconds)

    def bind(self, path: Path) -> None:
        """Take a name; only this user may send to it."""
        self._socket.bind(os.fspath(path))
        path.chmod(SOCKET_MODE)

    def send(self, data: bytes, path: Path) -> None:
        self._socket.sendto(data, os.fspath(path))

    def receive(self) -> bytes | None:
        try:
            return self._socket.recv(DATAGRAM_BYTES_MAX)
        except TimeoutError:
            return None

    def close(self) -> None:
        self._socket.close()


class UnixDatagramSockets:
    """The sockets of this machine."""

    def sender(self) -> UnixDatagramSocket:
        return UnixDatagramSocket(0.0)

    def receiver(self, path: Path) -> UnixDatagramSocket:
        made = UnixDatagramSocket(RECEIVE_SECONDS)
        try:
            made.bind(path)
        except BaseException:
            made.close()
            raise
        return made
