"""What a shard is told, and what it answers: small frozen values.

Times are seconds of a monotonic clock, and microseconds of the wall clock where an event or a stored row carries one;
every call gives both as a `Now`. Offsets are a `Range`, or an array of int64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from penstock.engine.states import Outcome
from penstock.offsets import Gap, Range, RangeSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from penstock.engine.division import Divided
    from penstock.engine.policy import Policy

Offsets: TypeAlias = "Range | NDArray[np.int64]"


class Now(NamedTuple):
    """The time, as it is given with every input."""

    monotonic: float
    """Seconds; for delays, deadlines and rates."""
    wall_us: int
    """Microseconds since 1970 UTC; for expiry, and for rows that outlive the process."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """A few lanes whose events are looked for; who has looked for this very object need not look again."""

    lanes: NDArray[np.int64]
    keys: tuple[Any, ...] | None
    """The key of each, if all are known: to compare keys is faster than to find out the lanes of all events."""


class Found(NamedTuple):
    """Where in a chunk the events are that were looked for, ascending, and which lanes they are of."""

    wanted: Wanted
    rows: NDArray[np.int64]
    lanes: NDArray[np.int64]


class About(NamedTuple):
    """What decides whose one event is."""

    key: Any
    """Opaque; None if whoever reads does not look for keys."""
    slot: int


class Chunk:
    """A range of events that was read: columns, and where their payloads are.

    Lanes, slots, sizes and expiries are computed when they are first needed, which they mostly are not.
    """

    __slots__ = (
        "_lanes",
        "_sizes",
        "_slots",
        "about",
        "appended_at",
        "appended_between",
        "divided",
        "expiries",
        "found",
        "keyless",
        "nbytes",
        "source",
        "span",
    )

    def __init__(
        self,
        span: Range,
        *,
        nbytes: int,
        sizes: Callable[[], NDArray[np.int64]],
        lanes: Callable[[], NDArray[np.int64]] | None,
        slots: Callable[[], NDArray[np.int64]] | None = None,
        expiries: NDArray[np.int64] | None,
        appended_at: NDArray[np.int64],
        source: Any,
        divided: Divided | None = None,
        found: Found | None = None,
        about: Callable[[int], About] | None = None,
    ) -> None:
        self.span = span
        self.nbytes = nbytes
        """The sum of `sizes`."""
        self._sizes: NDArray[np.int64] | Callable[[], NDArray[np.int64]] = sizes
        self._lanes: NDArray[np.int64] | Callable[[], NDArray[np.int64]] | None = lanes
        self._slots: NDArray[np.int64] | Callable[[], NDArray[np.int64]] | None = slots
        self.keyless = lanes is None
        """No event of it has a key: all are of the partition's own lane."""
        self.expiries = expiries
        """When each expires, in microseconds of the wall clock; None if none does."""
        self.appended_at = appended_at
        """When each was appended, in microseconds of the wall clock …"""
        self.appended_between = int(appended_at.min()), int(appended_at.max())
        """… and when the first of them was, and the last."""
        self.source = source
        """Opaque; with `narrowed(rows)`, which returns a smaller one that still answers for these rows."""
        self.divided = divided
        """Its rows by whose they are, if there are several who ask."""
        self.found = found
        """Its rows of the lanes that were parked when it was read, if those were few."""
        self.about = about
        """Tells of one event what it would take long to find out of all."""

    def narrow(self, rows: NDArray[np.int64] | None) -> None:
        """Keep the payloads of these rows alone, or none; columns that nobody has looked at must not be needed."""
        self.source = None if rows is None else self.source.narrowed(rows)
        if self.about is not None:
            self.about = None if self.source is None else self.source.about

    def sizes(self) -> NDArray[np.int64]:
        """Return the bytes of each event."""
        if not isinstance(self._sizes, np.ndarray):
            self._sizes = self._sizes()
        return self._sizes

    def lanes(self, keyless: int) -> NDArray[np.int64]:
        """Return the lane of each event; `keyless` is the partition's own."""
        if self._lanes is None:
            self._lanes = np.full(len(self.span), keyless, np.int64)
        elif not isinstance(self._lanes, np.ndarray):
            self._lanes = self._lanes()
        return self._lanes

    def slots(self, keyless: int) -> NDArray[np.int64]:
        """Return the slot of each event, which says who it is for; `keyless` is that of events without a key."""
        if self._slots is None:
            self._slots = np.full(len(self.span), keyless, np.int64)
        elif not isinstance(self._slots, np.ndarray):
            self._slots = self._slots()
        return self._slots


class Failure(NamedTuple):
    """Why an event failed, for people."""

    kind: str = ""
    """Such as the name of an exception's class."""
    message: str = ""
    trace: str = ""
    """Where it happened: a traceback, as text."""


NO_FAILURE: Final = Failure()

# --- inputs -----------------------------------------------------------------------------------


class HeadMoved(NamedTuple):
    """The log ends here by now."""

    head: int


@dataclass(frozen=True, slots=True)
class ReadDone:
    """What a read found, from where it was asked on; nothing, if there was nothing."""

    start: int
    items: tuple[Chunk | Gap, ...]


class ReadFailed(NamedTuple):
    """A read ended with an error; it is tried again at `retry_at`, on the monotonic clock."""

    start: int
    retry_at: float


class LogTrimmed(NamedTuple):
    """The log begins here by now: what is below can never be read."""

    first: int


class Ask(NamedTuple):
    """A consumer has credit."""

    events_max: int
    bytes_max: int
    singly: bool = False
    """Events are handed over one by one, each with a hand of its own; at most one of a lane at a time."""
    consumer: int = 0
    """Which one, where there are several."""
    slots: NDArray[np.bool_] | None = None
    """Which slots it is for; None for all."""


@dataclass(frozen=True, slots=True)
class Ack:
    """These are done. Valid for everything that was handed over in this life, also late, also twice."""

    offsets: Offsets
    outcome: Outcome = Outcome.ACKED
    """Or `DISCARDED`: the consumer has no use for them."""


@dataclass(frozen=True, slots=True)
class Done:
    """All that this hand was given is done: the same as an `Ack` of each of these, and much faster."""

    hand: int
    offsets: tuple[Offsets, ...]


@dataclass(frozen=True, slots=True)
class Nack:
    """These failed while this hand held them; ignored for those that it does not hold any more."""

    hand: int
    offsets: Offsets
    failure: Failure = NO_FAILURE
    delay_seconds: float | None = None
    """Instead of the policy's backoff."""
    retry: bool = True
    """False: no attempt can succeed, so it is a dead letter at once, whatever the policy says of exhausted retries."""
    counted: bool = True
    """False: it is not the event's fault, so it is tried again however often, as if this attempt had not been made."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """These were not begun: they are handed over again, to whoever asks, and no attempt is counted."""

    hand: int
    offsets: Offsets


class Started(NamedTuple):
    """The handler of this hand begins: its time runs from now on."""

    hand: int


class Extend(NamedTuple):
    """The handler of this hand needs so much longer, from now on."""

    hand: int
    seconds: float


class Tick(NamedTuple):
    """Time has passed."""


class Row(NamedTuple):
    """An event that waits aside in the store."""

    offset: int
    lane: int
    due_at: int
    """In microseconds of the wall clock."""
    attempts: int
    replay: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class FetchedRow:
    """The content of a parked row."""

    offset: int
    nbytes: int
    expiry: int | None
    source: Any


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a `Fetch` found; rows that are missing from it are gone."""

    asked: tuple[int, ...]
    rows: tuple[FetchedRow, ...]


class FetchFailed(NamedTuple):
    """A fetch ended with an error; it is tried again at `retry_at`."""

    asked: tuple[int, ...]
    retry_at: float


@dataclass(frozen=True, slots=True)
class RowsSeen:
    """The rows that wait in the store, all of them: somebody else may have replayed some."""

    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """The policy is another one from now on."""

    policy: Policy


class ConsumerLeft(NamedTuple):
    """Whoever held events holds none any more: what was not settled is given back, uncounted."""

    consumer: int | None = None
    """Which one; None for all."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """These slots are to go to another owner: nothing more of them is handed over. Replaces what was said before."""

    slots: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Left:
    """These slots have another owner: whatever is not settled of them is not this one's any more."""

    slots: NDArray[np.bool_]


class CursorSeen(NamedTuple):
    """The cursor that this owner shares with others is here by now."""

    next_offset: int


class Want(NamedTuple):
    """Somebody has asked for so many events and got none: claim some, where events are claimed."""

    events: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """What the step that was written has claimed, behind whatever is open; or nothing."""

    ranges: tuple[Range, ...]
    frontier: int
    """The first offset that nobody has claimed."""


class Freed(NamedTuple):
    """Others have given back something that they had claimed: there is more to claim than the log tells."""


class Shed(NamedTuple):
    """Nobody asks any more: what was claimed and not handed over is for others, as far as nothing is known of it."""


@dataclass(frozen=True, slots=True)
class Written:
    """A step is on the medium."""

    step: Step


@dataclass(frozen=True, slots=True)
class NotWritten:
    """A step was refused or failed, surely without an effect; it becomes part of the next one."""

    step: Step


Input: TypeAlias = (
    HeadMoved | ReadDone | ReadFailed | LogTrimmed | Ask | Ack | Done | Nack | GiveBack | Started | Extend | Tick
    | Fetched | FetchFailed | RowsSeen | PolicyChanged | ConsumerLeft | Leaving | Left | CursorSeen | Want | Claimed
    | Freed | Shed | Written | NotWritten
)  # fmt: skip


# --- outputs ----------------------------------------------------------------------------------


class Read(NamedTuple):
    """Read from this offset on; one read at a time."""

    start: int
    events_max: int
    bytes_max: int
    own_max: int
    """Of those that are this owner's no more than so many, where others have the rest."""


class Fetch(NamedTuple):
    """Fetch these parked rows."""

    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some events of a chunk, or one parked row."""

    source: Any
    offsets: Offsets
    rows: slice | NDArray[np.int64]
    """Which rows of the source's chunk; of a parked row, its only one."""
    start: int
    """The offset of the source's first row, as it was read."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these over."""

    hand: int
    """Of all of them together; singly, of the first, and the following ones have the following numbers."""
    events: int
    """How many."""
    pieces: tuple[Piece, ...]
    attempts: dict[int, int] = field(default_factory=dict)
    """Which attempt this is, for those that it is not the first of."""
    replays: dict[int, int] = field(default_factory=dict)
    """How many times it was brought back from the dead, for those that were."""


class Declare(NamedTuple):
    """Tell the subscriber of a hole."""

    gap: Gap


class Halted(NamedTuple):
    """The shard stands still at this event, until somebody resumes it."""

    offset: int
    failure: Failure


Output: TypeAlias = Read | Fetch | Deliver | Declare | Halted


# --- what is to be written --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Park:
    """A row to write: kept aside, dead, or done."""

    row: Row
    state: str
    """`waiting`, `dead` or `done`."""
    source: Any
    """Where its event is: the source of its piece."""
    index: int
    """Which row of the source's chunk, counted from its start; -1 for one that was a parked row already."""
    failure: Failure = NO_FAILURE


class Wish(NamedTuple):
    """What is to be claimed with a step: at most so many events, of a log that ends here, and none before this."""

    most: int
    end: int
    above: int


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Progress to be written as one: the cursor, the rows beside it, and the record of what was settled how."""

    number: int
    """Of the shard's settlement records; they are dense."""
    generation: int
    begin: int
    """Where the cursor was."""
    next_offset: int
    settled: bytes
    """Settled ahead of `next_offset`, as `Bitmap.to_bytes()`."""
    attempts: dict[int, int]
    parks: tuple[Park, ...]
    outcomes: Mapping[Outcome, RangeSet]
    latencies: tuple[int, ...]
    """How many were acked within 1, 2, 4, … microseconds of their append; the last one counts all that took longer."""
    retried: int
    """How many of the settled ones had failed before."""
    changed_attempts: dict[int, int | None] = field(default_factory=dict)
    """Attempts that are not as they were written, for a cursor that is shared; None for none any more."""
    freed: RangeSet = field(default_factory=RangeSet)
    """What was claimed, and is for others now."""
    wish: Wish | None = None
