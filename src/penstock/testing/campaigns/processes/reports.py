"""What processes that may be killed tell the campaign, and what it makes of that.

A process tells of every call before it begins and of its outcome afterwards. The campaign, which is never killed, keeps
the journal of it in a `Ledger`: a call without an outcome, because its process is dead, is unknown. Events are not sent
but made again: a source's name and a sequence give the payload.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.testing.checker import check
from penstock.testing.journal import Journal, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from penstock.testing.campaigns.campaign import Report

SUBSCRIPTION: Final = "billing"
_FILLING: Final = bytes(range(256))


# --- events -----------------------------------------------------------------------------------


def payloads_of(source: str, first: int, count: int) -> list[bytes]:
    """Return the payloads of a source's events, which differ in length and from all others."""
    name = source.encode()
    return [b"%b:%d:" % (name, sequence) + _FILLING[: sequence * 37 % 200] for sequence in range(first, first + count)]


def lasting_id(source: str) -> bytes:
    """Return the id of a producer that no store forgets, the same one in every process."""
    digest = bytearray(hashlib.blake2b(source.encode(), digest_size=16).digest())
    digest[6] = digest[6] & 0x0F | 0x40
    return bytes(digest)


# --- calls ------------------------------------------------------------------------------------


class Publish(NamedTuple):
    """Append events of a source; answered with the offset of the first."""

    log: str
    partition: int
    source: str
    first: int
    length: int
    lasting: bool
    """Whether another process may send it again."""


class Settle(NamedTuple):
    """Commit a cursor, under a lease if it has a name."""

    log: str
    partition: int
    position: int
    lease: str
    epoch: int


class Acquire(NamedTuple):
    """Ask for a lease; answered with its epoch, or None if another has it."""

    lease: str


class Trim(NamedTuple):
    """Forget what is below an offset."""

    log: str
    partition: int
    before: int


class Create(NamedTuple):
    """Create a topic; answered with its log id."""

    topic: str


class Subscribe(NamedTuple):
    """Create the subscription of a log, with cursors at the beginning."""

    log: str
    partitions: int


class Delete(NamedTuple):
    """Delete a topic."""

    log: str


Call = Publish | Settle | Acquire | Trim | Create | Subscribe | Delete


# --- messages ---------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A call is about to begin."""

    number: int
    at: int
    call: Call


class Answered(NamedTuple):
    """It has ended."""

    number: int
    at: int
    outcome: Outcome
    value: int | str | None = None
    error: str = ""
    """The name of the error's class."""
    text: str = ""
    clear: bool = True
    """Whether that is an error which a caller may get: one of Penstock's or of the system's."""
    pid: int | None = None
    """Who has the turn, if it could not be had."""


class Seen(NamedTuple):
    """A reader got these events."""

    log: str
    partition: int
    offset: int
    payloads: list[bytes]


class Unreadable(NamedTuple):
    """A reader got an error."""

    log: str
    partition: int
    error: str


class Hole(NamedTuple):
    """A reader got a gap."""

    log: str
    partition: int
    start: int
    stop: int


class Bounds(NamedTuple):
    """Where a partition begins and ends."""

    log: str
    partition: int
    start: int
    stop: int


class Progress(NamedTuple):
    """Where a cursor is, and where its partition ends."""

    log: str
    partition: int
    position: int
    end: int


class Topics(NamedTuple):
    """The topics that there are, as log ids, and those of them that have their subscription."""

    logs: set[str]
    subscribed: set[str]


class Verified(NamedTuple):
    """What `verify` has found."""

    damages: list[str]


class Logged(NamedTuple):
    """The store has logged a warning or an error."""

    is_error: bool
    kind: str
    """What all of its kind say."""
    text: str


def now() -> int:
    """Return the time on the clock that all processes share."""
    return time.monotonic_ns()


# --- the campaign's side ----------------------------------------------------------------------


class Ledger:
    """Everything that was told of one store."""

    def __init__(self, report: Report, replay: Callable[[], str], *, refusals: Collection[str]) -> None:
        self._report = report
        self._replay = replay
        self._refusals = refusals
        self.journal = Journal()
        self.broken = False
        """Whether a promise did not hold: what follows on this store teaches nothing more."""
        self._failed_at: int | None = None
        self._under_way: dict[tuple[int, int], Asked] = {}
        self._unknown: dict[tuple[str, int], Publish] = {}
        self._sequences: dict[str, int] = {}
        self._created: set[str] = set()
        self._subscribed: set[str] = set()
        self._deleting: set[str] = set()
        self._deleted: set[str] = set()
        # Processes are not heard in the order in which things happened.
        self._timed: list[tuple[int, Callable[[], None]]] = []

    def found(self, what: str) -> None:
        """Note a promise that did not hold."""
        self.broken = True
        self._report.found(what, self._replay())

    def next_sequence(self, source: str) -> int:
        """Return the sequence from which on a source has not published anything."""
        return self._sequences.get(source, 0)

    def to_repeat(self, sources: Collection[str] | None = None) -> list[Publish]:
        """Return the publishes, of all or some sources, of which nobody knows whether they were stored."""
        return [call for call in self._unknown.values() if sources is None or call.source in sources]

    # --- the power ------------------------------------------------------------------------------

    @property
    def has_power(self) -> bool:
        """Whether the disk works; any call may fail without."""
        return self._failed_at is None

    def power_fails(self) -> None:
        """Note that the power fails from now on.

        With a real machine nobody would hear anything of it after this. Here processes go on for a moment, and while a
        file system is being shut down a sync may well return without an error and without having done anything. So
        what is answered from now on is unknown, and what is seen counts for nothing.
        """
        self._failed_at = now()

    def power_returns(self) -> None:
        """Note that the disk works."""
        self._failed_at = None

    # --- hearing --------------------------------------------------------------------------------

    def hear(self, pid: int, message: object) -> None:
        """Take in a message of a process."""
        if isinstance(message, Asked):
            self._hear_asked(pid, message)
        elif isinstance(message, Answered):
            if message.outcome == Outcome.OK and self._failed_at is not None and message.at >= self._failed_at:
                message = Answered(message.number, message.at, Outcome.UNKNOWN)
            self._answered(self._under_way.pop((pid, message.number)), message)
        elif self.has_power:
            self._hear_seen(message)

    def _hear_seen(self, message: object) -> None:
        if isinstance(message, Seen):
            self.journal.stored(*message)
            self._report.count("events read", len(message.payloads))
        elif isinstance(message, Bounds):
            self.journal.bounds(*message)
        elif isinstance(message, Progress):
            self._timed.append((now(), lambda: self.journal.cursor(SUBSCRIPTION, *message)))
        elif isinstance(message, Hole):
            self.journal.gap(*message)
            self.found(f"nothing was damaged, but {message} is declared lost")
        elif isinstance(message, Unreadable):
            self.found(f"nothing was damaged, but {message}")
        elif isinstance(message, Topics):
            self._hear_topics(message.logs, message.subscribed)
        elif isinstance(message, Verified):
            for damage in message.damages:
                self.found(f"verify is clean, but it says: {damage}")
        elif isinstance(message, Logged):
            self._hear_logged(message)
        else:
            raise TypeError(f"a process said {message!r}")

    def _hear_asked(self, pid: int, asked: Asked) -> None:
        self._under_way[pid, asked.number] = asked
        call = asked.call
        if isinstance(call, Publish):
            self._sequences[call.source] = max(self.next_sequence(call.source), call.first + call.length)
        elif isinstance(call, Delete):
            self._deleting.add(call.log)

    def _hear_logged(self, logged: Logged) -> None:
        if logged.is_error:
            self.found(f"nothing is wrong with the store, but it logs: {logged.text}")
        self._report.count(f"logged: {logged.kind}")

    def end_of(self, pid: int) -> None:
        """Note that a process is dead: what it was doing is unknown."""
        for key in [key for key in self._under_way if key[0] == pid]:
            asked = self._under_way.pop(key)
            self._report.count("calls cut off")
            self._answered(asked, Answered(asked.number, now(), Outcome.UNKNOWN))

    def _answered(self, asked: Asked, answer: Answered) -> None:
        call, outcome = asked.call, answer.outcome
        self._report.count(f"{type(call).__name__.lower()}: {outcome.name}")
        if answer.error:
            self._check_error(call, answer)
        if isinstance(call, Publish):
            self._published(call, answer)
        elif isinstance(call, Trim) and outcome != Outcome.FAILED:
            self.journal.trimmed(*call)
        elif isinstance(call, Settle):
            self._timed.append((asked.at, lambda: self._settled(call, outcome)))
        elif isinstance(call, Acquire) and isinstance(epoch := answer.value, int):
            self._timed.append((answer.at, lambda: self.journal.granted(call.lease, epoch)))
        elif isinstance(call, Subscribe) and outcome == Outcome.OK:
            self._subscribed.add(call.log)
            for partition in range(call.partitions):
                self.journal.committed(SUBSCRIPTION, call.log, partition, 0, outcome)
        elif isinstance(call, Create) and isinstance(answer.value, str):
            self._created.add(answer.value)
        elif isinstance(call, Delete) and outcome == Outcome.OK:
            self._deleted.add(call.log)

    def _check_error(self, call: Call, answer: Answered) -> None:
        if not answer.clear or (self.has_power and answer.error not in self._refusals):
            self.found(f"nothing is wrong, but {call} ended with {answer.error}: {answer.text}")

    def _published(self, call: Publish, answer: Answered) -> None:
        payloads = payloads_of(call.source, call.first, call.length)
        offset = answer.value if isinstance(answer.value, int) else None
        # A source publishes one thing after the other, so its events are in that order.
        keys = [call.source.encode()] * call.length
        self.journal.published(call.log, call.partition, payloads, answer.outcome, offset=offset, keys=keys)
        if answer.outcome == Outcome.OK:
            self._report.count("events acknowledged", call.length)
        if answer.outcome == Outcome.UNKNOWN and call.lasting:
            self._unknown[call.source, call.first] = call
        elif answer.outcome == Outcome.OK or answer.error == "TopicDeleted":
            self._unknown.pop((call.source, call.first), None)

    def _settled(self, call: Settle, outcome: Outcome) -> None:
        self.journal.committed(SUBSCRIPTION, call.log, call.partition, call.position, outcome)
        if call.lease:
            self.journal.wrote(call.lease, call.epoch, outcome)

    def _hear_topics(self, logs: set[str], subscribed: set[str]) -> None:
        self.journal.restarted()  # all of the store is told anew after this
        for log in self._created - self._deleting - logs:
            self.found(f"log {log} was created and is not there")
        for log in (self._subscribed & logs) - subscribed:
            self.found(f"log {log} got its subscription and has none")
        for log in self._deleted & logs:
            self.found(f"log {log} was deleted and is there again")
        for log in self._deleting - logs:
            self.journal.deleted(log)
        self._deleted |= self._deleting - logs
        # One that is still there was not deleted, whoever asked for it.
        self._deleting &= self._deleted
        self._created -= self._deleted

    def check(self) -> None:
        """Look whether everything that was promised is so."""
        for _, note in sorted(self._timed, key=lambda timed: timed[0]):
            note()
        self._timed.clear()
        self._report.count("checks of the journal")
        for violation in check(self.journal):
            self.found(f"{violation.invariant}: {violation.where}: {violation.what}")
