"""What people see of dead letters, as values; and what a filter over them says.

A letter is a copy: nothing that happens in the store changes it. Its payload, its error's message and its traceback
never appear in its `repr`. The payload is decoded when `value` is asked for, so that one that cannot be decoded can
still be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import msgspec

from penstock.clock import datetime_to_us, us_to_datetime
from penstock.errors import UsageError, did_you_mean
from penstock.events import utf8
from penstock.failures import fingerprint
from penstock.offsets import OFFSET_END, Position
from penstock.rows import Parked, ParkedFilter, ParkedState

if TYPE_CHECKING:
    from penstock.bus.topic import Topic
    from penstock.events import Event
    from penstock.rows import TopicInfo

OFFSETS_MAX = 100_000
"""A filter names at most so many offsets."""

_DERIVED_ID = re.compile(r"([0-9a-f]{32})-(\d+)")


class Origin(NamedTuple):
    """Where an event came from."""

    id: str | None
    """The event's id."""
    producer: str | None
    """Who published it, if the id was derived from that."""
    sequence: int | None
    """Which of the producer's events it is, if the id was derived from that."""
    source: str | None
    """The CloudEvents source."""
    appended_at: datetime | None
    """When it was appended, if that was looked up and the log still has the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event of a subscription that was kept aside, and why."""

    position: Position
    """Where it is in the log, or was: the letter has a copy of its own."""
    subscription: str
    state: ParkedState
    """`dead`; or `waiting` for its next attempt; or `done`, after a replay."""
    error_type: str
    """The name of the exception's class; empty if the event was refused with words alone."""
    error_message: str = field(repr=False)
    error_trace: str = field(repr=False)
    """The traceback, without values of variables; empty if there was none."""
    fingerprint: str
    """The same for all letters with the same cause: see `penstock.failures`."""
    attempts: int
    """How often it was tried, since it was parked or brought back."""
    replay: int
    """How many times it was brought back."""
    parked_at: datetime
    last_retry_at: datetime | None
    """When it was tried last, if it was tried at all."""
    job: str
    """The replay that has marked it, and has not brought it back yet; or empty."""
    event: Event = field(repr=False)
    """The event as it is stored."""
    appended_at: datetime | None = None
    """When the log took it, as far as `show` found out."""
    _topic: Topic[Any] = field(repr=False, compare=False)

    @property
    def topic(self) -> str:
        """The name of its topic."""
        return self.position.topic

    @property
    def value(self) -> Any:
        """The event as its class; `bytes` for a topic that is not declared. `DecodeError` if its bytes do not fit."""
        return self._topic.decode(self.event)

    @property
    def failed_at(self) -> datetime:
        """When it failed last."""
        return self.last_retry_at or self.parked_at

    @property
    def origin(self) -> Origin:
        """Where the event came from."""
        event = self.event
        derived = _DERIVED_ID.fullmatch(event.id or "")
        producer, sequence = (derived[1], int(derived[2])) if derived else (None, None)
        return Origin(event.id, producer, sequence, event.source, self.appended_at)


def a_letter(row: Parked, topic: Topic[Any]) -> DeadLetter:
    """Return a parked row as people see it."""
    return DeadLetter(
        position=Position(topic.name, row.shard.partition, row.offset),
        subscription=row.shard.subscription,
        state=row.state,
        error_type=row.error_type,
        error_message=row.error_message,
        error_trace=row.error_trace,
        fingerprint=fingerprint_of(row),
        attempts=row.attempts,
        replay=row.replay,
        parked_at=us_to_datetime(row.parked_at),
        last_retry_at=us_to_datetime(row.last_retry_at) if row.last_retry_at else None,
        job=row.job,
        event=row.event,
        _topic=topic,
    )


def fingerprint_of(row: Parked) -> str:
    """Return the fingerprint of a row's error."""
    return fingerprint(row.error_type, row.error_message, row.error_trace)


def failed_at_us(row: Parked) -> int:
    """Return when a row failed last."""
    return max(row.last_retry_at, row.parked_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadGroup:
    """Dead letters with the same cause."""

    fingerprint: str
    """Empty for all that were too many to be told apart."""
    error_type: str
    count: int
    first: datetime
    """When the first of them was parked."""
    last: datetime
    """When one of them failed last."""
    message: str = field(repr=False)
    """The beginning of what that one says."""
    sample: Position
    """Where that one is."""


class DeadStats(NamedTuple):
    """The parked events of a subscription, counted."""

    topic: str
    subscription: str
    dead: int
    waiting: int
    done: int
    oldest: datetime | None
    """When the first of the dead ones was parked."""
    newest: datetime | None
    """When one of them failed last."""
    errors: Mapping[str, int]
    """How many are dead of each type of error, most frequent first."""


class Replayed(NamedTuple):
    """What a replay has done, or would do."""

    job: str
    """What the letters are marked with: `replay(…, job=…)` brings back those that are left, and no others."""
    matched: int
    """How many were marked."""
    replayed: int
    """How many were brought back by this call. Fewer if they were purged meanwhile, or marked by another replay."""


# --- filters ----------------------------------------------------------------------------------


class Where(TypedDict, total=False):
    """Which letters are meant; what is not given, or None, does not matter."""

    error: str | None
    """The type of the error."""
    fingerprint: str | None
    """The cause, as `groups` shows it."""
    contains: str | None
    """What the error's message contains."""
    partition: int | None
    offsets: Iterable[int] | None
    """Of the given partition; it need not be given if the topic has one."""
    key: str | bytes | None
    """The key of the event."""
    since: datetime | None
    """Parked at this time or later."""
    until: datetime | None
    """Parked before this time."""


class Chosen(NamedTuple):
    """A filter: what the store can tell, and what has to be looked at row by row."""

    rows: ParkedFilter
    fits: Callable[[Parked], bool] | None
    """None if the store can tell all of it."""

    def of(self, rows: Iterable[Parked]) -> list[Parked]:
        """Return those rows of a page that are meant."""
        return list(rows) if self.fits is None else [row for row in rows if self.fits(row)]


def chosen(info: TopicInfo, name: str, states: Iterable[ParkedState], where: Where) -> Chosen:
    """Return what a filter means; `UsageError` if it cannot mean anything."""
    for given in where:
        if given not in Where.__annotations__:
            raise UsageError(f"dead letters have no filter {given!r}{did_you_mean(given, Where.__annotations__)}")
    since, until = where.get("since"), where.get("until")
    rows = ParkedFilter(
        log_id=info.log_id,
        subscription=name,
        states=frozenset(states),
        partition=checked_partition(info, where.get("partition")),
        error_type=where.get("error"),
        parked_from=None if since is None else datetime_to_us(since),
        parked_until=None if until is None else datetime_to_us(until),
    )
    if (offsets := where.get("offsets")) is not None:
        rows = msgspec.structs.replace(
            rows, offsets=_checked_offsets(offsets), partition=only_partition(info, rows.partition)
        )
    return Chosen(rows, _row_by_row(where))


def _row_by_row(where: Where) -> Callable[[Parked], bool] | None:
    cause, contains, wanted = where.get("fingerprint"), where.get("contains"), where.get("key")
    if cause is contains is wanted is None:
        return None
    # Not by its lane: that is another one in every mode.
    key = None if wanted is None else utf8("key", wanted)

    def fits(row: Parked) -> bool:
        return (
            (key is None or row.event.key == key)
            and (contains is None or contains in row.error_message)
            and (cause is None or fingerprint_of(row) == cause)
        )

    return fits


def checked_partition(info: TopicInfo, partition: int | None) -> int | None:
    """Return a partition that the topic has, or None if none is named."""
    count = info.settings.partitions
    if partition is not None and not 0 <= partition < count:
        raise UsageError(f"topic {info.name!r} has the partitions 0 to {count - 1}, not {partition}")
    return partition


def only_partition(info: TopicInfo, partition: int | None) -> int:
    """Return the partition that offsets are of: the one that is named, or the only one."""
    count = info.settings.partitions
    if partition is None and count > 1:
        raise UsageError(f"topic {info.name!r} has {count} partitions: say which `partition` the offset is of")
    return partition or 0


def _checked_offsets(offsets: Iterable[int]) -> frozenset[int]:
    found = frozenset(offsets)
    if not all(type(offset) is int and 0 <= offset < OFFSET_END for offset in found):
        raise UsageError("`offsets` are whole numbers of at least 0, as positions have them")
    if len(found) > OFFSETS_MAX:
        raise UsageError(f"a filter names at most {OFFSETS_MAX:,} offsets, not {len(found):,}: filter by time or error")
    return found
