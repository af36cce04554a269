"""The steps of a delivery, what happens at them, and how a process of Spark's tells which one it has come to.

Whoever comes to a step says so through the socket of its driver, and waits for the answer. So the campaign knows where
every process is without watching a clock, and decides there: it may go on, or it is killed or frozen at this very
place. No answer, because the campaign has ended, is an error for whoever waits.
"""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

GO: Final = b"go\n"
RECEIVE_BYTES: Final = 64 << 10


class Point(StrEnum):
    """Where a process may be stopped; in the order in which a batch comes to them."""

    IN_TASK = "in_task"
    """A task has staged some of its parts, and reported none."""
    AFTER_STAGING = "after_staging"
    """All tasks have reported; nothing is prepared."""
    AFTER_MANIFEST = "after_manifest"
    """The manifest is there, and nothing is appended."""
    IN_APPEND = "in_append"
    """Some partitions of the topic have their part of the batch, others do not."""
    BEFORE_DONE = "before_done"
    """Everything is appended, and nobody knows."""
    BEFORE_TRIM = "before_trim"
    """The manifest is finished, and what was staged is still there."""
    AFTER_DONE = "after_done"
    """The sink is done, and Spark has not noted the batch."""
    ANYWHERE = "anywhere"
    """At no special moment. Nobody says that it has come to this one."""


class Round(NamedTuple):
    """What happens in a round."""

    point: Point
    freeze: bool = False
    """The driver is not killed but frozen; another one takes over and ends; then the first one is woken."""
    swept: bool = False
    """What is staged and not prepared is removed, as after a day."""
    completed: bool = False
    """What is prepared is completed by another process, as an open bus does."""
    comes: int = 1
    """At which time that the driver comes to the point."""

    def __str__(self) -> str:
        return f"{'frozen' if self.freeze else 'killed'} {self.point.value.replace('_', ' ')}"


class Told(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process says: that it has come to a step; or a driver, how it goes."""

    pid: int
    point: Point | None = None
    batch: int = -1
    number: int = 0
    """How many parts are staged, or partitions appended to."""
    task: int = 0
    attempt: int = 0
    driver: str = ""
    """Of a driver: `running`, `ended` or `failed`."""
    why: str = ""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Told).decode


class Post:
    """A process's connection to the campaign."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)

    def say(self, told: Told) -> None:
        """Say something, without waiting."""
        self.socket.sendall(_encode(told) + b"\n")

    def close(self) -> None:
        """Hang up."""
        self.socket.close()


def come_to(path: str, point: Point, batch: int, *, number: int = 0, task: int = 0, attempt: int = 0) -> None:
    """Say that this process has come to a step, and wait until it may go on."""
    post = Post(path)
    try:
        post.say(Told(pid=os.getpid(), point=point, batch=batch, number=number, task=task, attempt=attempt))
        if post.socket.recv(len(GO)) != GO:
            raise ConnectionAbortedError(f"nobody answers at {point.value}: the campaign has ended")
    finally:
        post.close()


class Ear:
    """The campaign's end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._rest = b""

    def hear(self) -> Iterator[Told]:
        """Yield what was said meanwhile; `EOFError` if the other end is gone."""
        try:
            received = self.socket.recv(RECEIVE_BYTES)
        except ConnectionResetError:
            received = b""
        if not received:
            raise EOFError
        *lines, self._rest = (self._rest + received).split(b"\n")
        yield from map(_decode, lines)
