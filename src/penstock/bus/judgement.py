"""Judgement: from what is known of a subscription to its state and the reasons, in words. No I/O; see `health`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.bus.health import worst
from penstock.engine.suspects import MARKED
from penstock.runtime.sharing import ClaimPart, SlotPart
from penstock.runtime.subscriptions import CLAIMED

if TYPE_CHECKING:
    from penstock.bus.health import HaltedAt, State, StoreHealth
    from penstock.engine.lag import LagInfo
    from penstock.engine.policy import Policy
    from penstock.offsets import Gap
    from penstock.rows import Cursor, Subscription, Waiting
    from penstock.runtime.sharing import Part

HEARTBEATS: Final = 3
"""So many must have passed, at least, before the absence of progress means anything."""


class Here(NamedTuple):
    """What this process knows by itself of a subscription."""

    process: str = ""
    in_flight: int = 0
    halted: Mapping[tuple[int, int], str] = {}
    """The type of the error, by partition and offset."""
    trouble: Mapping[tuple[str, str], str] = {}
    """What goes wrong, by partition and by what: `read`, `fetch`, `commit`."""


class PartitionFacts(NamedTuple):
    """What is known of one partition of a subscription."""

    lag: LagInfo
    cursor: Cursor | None
    moved_at: int
    """When its cursor last moved."""
    stands_since: int
    """When it was first seen where it is."""
    appended_at: int | None
    """When the event at the cursor was appended."""
    oldest_at: int | None
    """The same of the first event that is not settled, also if it waits aside."""
    whose: str
    """Who has the event at the cursor, in words."""
    hole: Gap | None
    """The hole that the cursor stands before."""
    rows: Sequence[Waiting]


class Facts(NamedTuple):
    """What is known of a subscription."""

    topic: str
    subscription: Subscription
    policy: Policy
    now_us: int
    stalled_after: float
    partitions: Sequence[PartitionFacts]
    consumed: bool
    used: bool
    """Whether anything of it was ever settled."""
    halted: tuple[HaltedAt, ...]
    lanes: Mapping[tuple[int, int], Sequence[Waiting]]
    """What waits aside, by partition and lane."""
    upgrades: int
    parts: Sequence[Part]
    here: Here
    damages: Sequence[str]

    @property
    def behind(self) -> bool:
        """Whether anything is left to do."""
        return any(each.lag.unsettled or each.rows for each in self.partitions)

    @property
    def patience(self) -> float:
        """After how many seconds without progress it is stalled, as slow as its own policy lets it be."""
        policy = self.policy
        least = max(policy.timeout_seconds or 0.0, HEARTBEATS * (policy.heartbeat_seconds or 0.0))
        turns = len(self.partitions) / policy.rate_per_second if policy.rate_per_second else 0.0
        return max(self.stalled_after, least) + policy.checkpoint_seconds + turns


def judge(facts: Facts) -> tuple[State, tuple[str, ...]]:
    """Return the state of a subscription, and why it is not `ok`."""
    if facts.subscription.external:
        return "ok", ()
    found: list[tuple[State, str]] = [("degraded", damage) for damage in facts.damages]
    if facts.policy.paused:
        name = f"{facts.topic} {facts.subscription.name}"
        # Nobody is called for what somebody has decided; with nothing to do it makes no difference.
        found.append(("degraded" if facts.behind else "ok", f"it is paused: `penstock resume {name}` lets it go on"))
    else:
        found += _halts(facts)
        found += _stands(facts)
    found += _troubles(facts)
    found += _aside(facts)
    found += _absences(facts)
    found += _sharing(facts)
    return worst(*(state for state, _ in found)), tuple(dict.fromkeys(reason for _, reason in found))


def _halts(facts: Facts) -> list[tuple[State, str]]:
    found: list[tuple[State, str]] = []
    for halted in facts.halted:
        why = "a hole in the log" if halted.error == "Gap" else "every attempt failed"
        kind = f" ({halted.error})" if halted.error not in {"", "Gap"} else ""
        name = f"{facts.topic} {facts.subscription.name}"
        found.append(
            (
                "stalled",
                f"it has halted at {facts.topic}/{halted.partition}@{halted.offset}: {why}{kind}; `penstock resume "
                f"{name}` lets it try again",
            )
        )
    return found


# --- progress ---------------------------------------------------------------------------------


def _stands(facts: Facts) -> list[tuple[State, str]]:
    """Return which partitions do not move though somebody consumes, or should: those that have halted are known."""
    found: list[tuple[State, str]] = []
    halted = {each.partition for each in facts.halted}
    for each in facts.partitions:
        if each.lag.partition in halted:
            continue
        stuck = _stuck_seconds(each, facts.now_us)
        if stuck >= facts.patience and (facts.consumed or facts.used):
            found.append(("stalled", _stuck_words(facts, each, stuck)))
        elif facts.consumed and (held := _held_up(facts, each)):
            found.append(("degraded", held))
    return found


def _stuck_seconds(each: PartitionFacts, now_us: int) -> float:
    """Return for how long something could have been settled, and nothing was."""
    since = [at for at in (_waits_since(each), _due_since(each)) if at is not None]
    return max(now_us - max(min(since), each.moved_at), 0) / 1_000_000 if since else 0.0


def _waits_since(each: PartitionFacts) -> int | None:
    """Return since when the event at the cursor is there; nobody knows of one that cannot be read, but it waits."""
    if not each.lag.unsettled:
        return None
    return each.moved_at if each.appended_at is None else each.appended_at


def _due_since(each: PartitionFacts) -> int | None:
    """Return since when the first event that waits aside could be tried again; of each lane only the first can."""
    first: dict[int, Waiting] = {}
    for row in each.rows:
        first.setdefault(-1 - row.offset if row.replay else row.lane, row)
    # Those without a time of their own wait for their turn alone, since they were set aside.
    return min((each.moved_at if row.due_at <= MARKED else row.due_at for row in first.values()), default=None)


def _stuck_words(facts: Facts, each: PartitionFacts, stuck: float) -> str:
    where = f"{facts.topic}/{each.lag.partition}"
    if not each.lag.unsettled:
        waiting = _many(len(each.rows), "event waits", "events wait")
        return f"{where}: {waiting} aside, and nothing was settled for {duration(stuck)}"
    # An event without a key is never set aside: it is tried again where it is, and everything waits behind it.
    failed = 0 if each.cursor is None else each.cursor.attempts.get(each.lag.next_offset, 0)
    tried = f"; it has failed {_many(failed, 'time', 'times')}, and is tried again" if failed else ""
    hands = f"; {_many(facts.here.in_flight, 'event is', 'events are')} in hand here" if facts.here.in_flight else ""
    return f"{where} stands at offset {each.lag.next_offset} for {duration(stuck)}: {each.whose}{tried}{hands}"


def _held_up(facts: Facts, each: PartitionFacts) -> str:
    """Return what holds a cursor back while events behind it are settled; only a second look can tell."""
    stood = (facts.now_us - each.stands_since) / 1_000_000
    if not each.lag.unsettled or each.cursor is None or not each.cursor.settled or stood < facts.patience:
        return ""
    where = f"{facts.topic}/{each.lag.partition}@{each.lag.next_offset}"
    return f"{where} is not settled for {duration(stood)}, while later ones are: {each.whose}"


# --- what else is wrong -----------------------------------------------------------------------


def _troubles(facts: Facts) -> list[tuple[State, str]]:
    return [("degraded", f"{where}: a {what} fails here: {why}") for (where, what), why in facts.here.trouble.items()]


def _aside(facts: Facts) -> list[tuple[State, str]]:
    full = [each for each in facts.partitions if len(each.rows) >= max(facts.policy.parked_max, 1)]
    found: list[tuple[State, str]] = [("degraded", _full_words(facts, each)) for each in full]
    if facts.upgrades:
        lanes = _many(facts.upgrades, "key waits", "keys wait")
        found.append(("degraded", f"upgrade: {lanes} for a program that knows a newer version of the event"))
    others = len(facts.lanes) - facts.upgrades
    if others > 0:
        what = ("event waits", "events wait") if facts.subscription.mode == CLAIMED else ("key waits", "keys wait")
        found.append(("degraded", f"{_many(others, *what)} for another attempt"))
    return found


def _full_words(facts: Facts, each: PartitionFacts) -> str:
    return (
        f"{facts.topic}/{each.lag.partition}: {len(each.rows):,} events wait aside, and no more may (parked_max): the "
        f"first key that is blocked is that of offset {each.rows[0].offset}, and nothing behind it goes on"
    )


def _absences(facts: Facts) -> list[tuple[State, str]]:
    if facts.consumed or not facts.behind:
        return []
    if not facts.used:
        return [("degraded", "idle: nobody consumes it, and nobody has yet")]
    return [("degraded", "nobody consumes it")]


def _sharing(facts: Facts) -> list[tuple[State, str]]:
    """Return what is not where it should be. It is on its way, unless nothing moves: then that is said, too."""
    found: list[tuple[State, str]] = []
    moment = "at the moment: whoever is there takes them within a second"
    for part in facts.parts:
        match part:
            case SlotPart(process=None, slots=slots) if facts.consumed and slots:
                found.append(("degraded", f"{len(slots)} slots have no owner {moment}"))
            case ClaimPart(process=None, claimed=claimed, parked=parked) if facts.consumed and (claimed or parked):
                found.append(("degraded", f"{claimed:,} claimed events have no owner {moment}"))
            case SlotPart(process=str(process), slots=slots, due=due) if len(slots) > due:
                more = len(slots) - due
                found.append(
                    ("ok", f"{process} has {more} slots more than its due: each goes when its handlers are done")
                )
    return found


# --- the store --------------------------------------------------------------------------------


def judge_store(how: StoreHealth, stalled_after: float, *, short: bool) -> tuple[State, tuple[str, ...]]:
    """Return the state of a store, and why it is not `ok`."""
    found = [f"{fault.topic}/{fault.partition}: {fault.fault}" for fault in how.faults]
    found += how.damage
    if short and how.free_bytes is not None:
        found.append(f"only {how.free_bytes >> 20:,} MiB are free where the store is: make room, or set a retention")
    if 0 < how.scheduled_overdue_seconds >= stalled_after:
        late = duration(how.scheduled_overdue_seconds)
        found.append(f"delayed publishes should have been made {late} ago: no open bus of this store makes them")
    return ("degraded" if found else "ok"), tuple(found)


def duration(seconds: float) -> str:
    """Return a time in the largest unit that it fills."""
    for unit, scale in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= scale:
            return f"{seconds / scale:.1f} {unit}"
    return f"{seconds:.1f} s"


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
