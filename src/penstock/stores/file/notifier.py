"""Hints between processes: `FileNotifier`, the `Notifier` port by Unix datagrams.

A process that listens has a datagram socket in the runtime directory, and a process that appends sends one datagram
to each of the others'. Nothing rests on any of them: a hint that is lost costs a heartbeat, no more.

* **Nobody waits.** A datagram that does not fit into a receiver's queue is dropped and counted. New listeners are
  looked for every `LOOK_SECONDS`, and not at all in between: alone, a process pays next to nothing for a hint.
* **Nobody is harmed.** `notify` never raises. Whatever is wrong with sockets or their directory ends the hints between
  processes with one line in the log, and those within this process go on.
* **Nothing is left for long.** The socket of a process that was killed is removed by the first one that sends to it.
* **A forked child** has no part in it: it opens the store anew.

A socket is named `<store>-<member>-<random>.sock`. `<store>` is a hash of the store's id, since the system allows
about a hundred bytes for the whole path. The random part makes a name that is never used twice, so that whoever
removes that of a dead member cannot hit the socket of a process that has just begun with the same number.

A datagram is 25 bytes, big-endian: the magic `PSNH`, the version 1, the 16 bytes of the log id, the partition's number
as 32 bits. Anything else is ignored.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import stat
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import StoreClosed
from penstock.rows import Partition
from penstock.stores.file.platform import DIRECTORY_MODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.stores.file.platform import Platform
    from penstock.stores.file.sockets import DatagramSocket, DatagramSockets

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.2
"""How often a sender looks for new listeners."""
LISTENERS_MAX = 256
"""How many processes are told; those beyond have their heartbeats."""
CLOSE_SECONDS = 5.0
"""How long `close` waits for a callback to return."""

_DATAGRAM = struct.Struct(">4sB16sI")
_MAGIC = b"PSNH"
_VERSION = 1
_SUFFIX = ".sock"
_FULL = {errno.EAGAIN, errno.ENOBUFS}


def find_runtime_directory(chosen: Path | None, *, system: Path, temporary: Path, user: int) -> Path | None:
    """Return a directory for sockets that is this user's alone; None, with a line in the log, if there is none.

    `chosen` is what a setting or `XDG_RUNTIME_DIR` says; then comes `<system>/<user>`, where `system` is `/run/user`;
    then `<temporary>/penstock-<user>`, which is made. Processes that find different ones do not hear each other.
    """
    for found in (chosen, system / str(user)):
        if found is not None and _is_private(found, user):
            return found
    own = temporary / f"penstock-{user}"
    try:
        own.mkdir(DIRECTORY_MODE, exist_ok=True)
    except OSError as error:
        logger.warning("no hints between processes: %s cannot be made: %s", own, error)
        return None
    if _is_private(own, user):
        return own
    logger.warning("no hints between processes: %s is not a directory of user %d with mode 0700", own, user)
    return None


def _is_private(path: Path, user: int) -> bool:
    try:
        status = path.lstat()  # a link, which somebody else may have put there, is not followed
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & 0o077


# --- the port ---------------------------------------------------------------------------------


class FileNotifier:
    """The `Notifier` port among the processes that have opened one store.

    `directory` is the runtime directory, or None for hints within this process alone. `is_alive` says whether a member
    still runs, for those of this process, too. `sent`, `dropped` and `received` count datagrams.
    """

    def __init__(
        self,
        *,
        store_id: str,
        member: int,
        directory: Path | None,
        is_alive: Callable[[int], bool],
        platform: Platform,
        sockets: DatagramSockets | None = None,
    ) -> None:
        self._prefix = hashlib.blake2b(store_id.encode(), digest_size=6).hexdigest() + "-"
        # Without a directory nothing is ever done with this path.
        name = f"{self._prefix}{member}-{platform.random(3).hex()}{_SUFFIX}"
        self._own = Path(name) if directory is None else directory / name
        self._is_alive = is_alive
        self._platform = platform
        self._sockets = sockets or platform.sockets
        self._process = os.getpid()
        self._closed = False
        self._sends = directory is not None
        # Replaced as a whole, so that `notify` needs no lock; keyed by registration, not by callback.
        self._callbacks: dict[object, Callable[[Partition], None]] = {}
        # Guards all that follows. Nothing that is done with it held can wait.
        self._lock = threading.Lock()
        self._sender: DatagramSocket | None = None
        self._receiving: threading.Thread | None = None
        self._others: list[Path] = []
        self._look_at = -math.inf
        self.sent = 0
        self.dropped = 0
        self.received = 0

    def notify(self, partition: Partition) -> None:
        if self._closed or os.getpid() != self._process:
            return
        self._call_back(partition)
        if not self._sends or not (self._others or self._platform.clock.monotonic() >= self._look_at):
            return
        try:
            with self._lock:
                self._tell_others(partition)
        except Exception as error:  # noqa: BLE001 - a hint's fault must never reach the publisher
            self._turn_off(error)

    def listen(self, callback: Callable[[Partition], None]) -> Callable[[], None]:
        registration = object()
        self._check_open()
        with self._lock:
            self._check_open()
            self._callbacks = {**self._callbacks, registration: callback}
            if self._receiving is None and self._sends:
                try:
                    self._start_receiving()
                except (OSError, RuntimeError) as error:  # no socket, or no thread
                    self._turn_off(error)

        def stop() -> None:
            if os.getpid() != self._process:
                return
            with self._lock:
                self._callbacks = {key: kept for key, kept in self._callbacks.items() if key is not registration}

        return stop

    def close(self) -> None:
        """Stop receiving, and give up the sockets. In a forked child: leave the parent's alone."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._callbacks = {}
            receiving = self._receiving
            if receiving is not None:
                # An empty datagram wakes the receiver. One that does not fit is not needed, since others do that.
                with suppress(OSError):
                    self._send(b"", self._own)
                self._remove(self._own)
            if self._sender is not None:
                self._sender.close()
        if receiving is not None and receiving is not threading.current_thread():
            receiving.join(CLOSE_SECONDS)

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise StoreClosed("this store was opened before a fork: open it anew in the child")
        if self._closed:
            raise StoreClosed("this store is closed: open it anew")

    def _call_back(self, partition: Partition) -> None:
        for callback in self._callbacks.values():
            try:
                callback(partition)
            except Exception:
                # A listener's fault must not reach the publisher; heartbeats find what it missed.
                logger.exception("a notification's listener failed")

    def _turn_off(self, error: Exception) -> None:
        self._sends = False
        logger.warning("no hints between processes from now on, heartbeats do their work: %r", error)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):  # somebody else was quicker
            self._platform.disk.remove(path)

    # --- sending, with the lock held ---

    def _tell_others(self, partition: Partition) -> None:
        now = self._platform.clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._others = self._look()
        datagram = _encode(partition) if self._others else None
        if datagram is not None and not self._closed:
            self._others = [path for path in self._others if self._tell(path, datagram)]

    def _look(self) -> list[Path]:
        directory = self._own.parent
        names = self._platform.disk.names(directory)
        found = [directory / name for name in names if name.startswith(self._prefix) and name.endswith(_SUFFIX)]
        return [path for path in found if path != self._own][:LISTENERS_MAX]

    def _tell(self, path: Path, datagram: bytes) -> bool:
        """Send it, and say whether to send the next one, too, before looking again who is there."""
        try:
            self._send(datagram, path)
        except OSError as error:
            self.dropped += 1
            # Nobody listens: it was killed, or it is just beginning or closing. Or its queue is full: it is busy, or it
            # was killed and a child that it had forked keeps its socket open. The member tells which.
            refused, full = error.errno == errno.ECONNREFUSED, error.errno in _FULL
            alive = not (refused or full) or self._is_alive(_member(path.name))
            if not alive:
                self._remove(path)
            return full and alive
        self.sent += 1
        return True

    def _send(self, datagram: bytes, path: Path) -> None:
        if self._sender is None:
            self._sender = self._sockets.sender()
        self._sender.send(datagram, path)

    # --- receiving ---

    def _start_receiving(self) -> None:
        receiver = self._sockets.receiver(self._own)
        try:
            self._receiving = self._platform.spawn("penstock-hints", lambda: self._receive(receiver))
        except BaseException:
            receiver.close()
            self._remove(self._own)
            raise

    def _receive(self, receiver: DatagramSocket) -> None:
        try:
            while not self._closed:
                datagram = receiver.receive()
                if datagram is not None:
                    self.take(datagram)
        except OSError as error:
            self._turn_off(error)
        finally:
            receiver.close()
            self._remove(self._own)

    def take(self, datagram: bytes) -> None:
        """Do what the receiving thread does with a datagram, for whoever plays that thread."""
        partition = _decode(datagram)
        if partition is not None:
            self.received += 1
            self._call_back(partition)


def _encode(partition: Partition) -> bytes | None:
    """Return the datagram; None for a partition that no file store has."""
    try:
        log_id = bytes.fromhex(partition.log_id)
        return _DATAGRAM.pack(_MAGIC, _VERSION, log_id, partition.number) if len(log_id) == 16 else None
    except (ValueError, struct.error):
        return None


def _decode(datagram: bytes) -> Partition | None:
    if len(datagram) != _DATAGRAM.size:
        return None
    magic, version, log_id, number = _DATAGRAM.unpack(datagram)
    if (magic, version) != (_MAGIC, _VERSION):
        return None
    return Partition(log_id.hex(), number)


def _member(name: str) -> int:
    """Return the member that a socket's name tells; -1, which nobody is, for a foreign name."""
    number = name.split("-")[1:2]
    return int(number[0]) if number and number[0].isdecimal() else -1
