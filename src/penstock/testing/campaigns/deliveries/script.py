"""What is delivered, and what a handler does with it: the same in every process, however many die.

What becomes of an event is written in its payload, and depends on nothing but which attempt it is. So a handler needs
no memory, and in the end every event must have the state that its payload names, whoever was killed at which moment.

Time runs fifty times as fast as on the wall, for the store and for delivery alike: a retry that is parked for 6 s comes
back after 120 ms.
"""

from __future__ import annotations

import asyncio
import random
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

from penstock.clock import SystemClock
from penstock.engine.policy import SHORT_DELAY_SECONDS
from penstock.runtime.subscriptions import SHARED

if TYPE_CHECKING:
    from collections.abc import Sequence

TOPIC: Final = "orders"
SUBSCRIPTION: Final = "billing"

FASTER: Final = 50
SHORT_SECONDS: Final = 1.0
LONG_SECONDS: Final = SHORT_DELAY_SECONDS + 1
TIMEOUT_SECONDS: Final = 15.0
"""Long enough that nobody is merely slow for so long: 300 ms."""
LEASE_SECONDS: Final = 100.0
FREEZE_LEASE_SECONDS: Final = 12.5
"""Of a process that is going to be frozen: its shards are free after 250 ms."""


class FastClock(SystemClock):
    """The machine's clock, as it would be if time had run faster since a moment. All processes of a round agree."""

    def __init__(self, since_us: int) -> None:
        self._since_us = since_us

    def time_us(self) -> int:
        """See `Clock`."""
        return self._since_us + FASTER * (super().time_us() - self._since_us)

    def monotonic(self) -> float:
        """See `Clock`."""
        return FASTER * super().monotonic()

    def sleep(self, seconds: float) -> None:
        """See `Clock`."""
        time.sleep(max(seconds / FASTER, 0.0))

    async def pause(self, seconds: float) -> None:
        """See `Clock`."""
        await asyncio.sleep(seconds / FASTER)


class Act(StrEnum):
    """What a handler does with an event."""

    ACK = "ack"
    RETRY = "retry"
    """Fails once, and is tried again soon."""
    RETRY_TWICE = "retry-twice"
    PARK = "park"
    """Fails once, and is kept aside, with what follows in its lane."""
    PARK_TWICE = "park-twice"
    PARK_THEN_REJECT = "park-then-reject"
    """A dead letter that was kept aside before."""
    REJECT = "reject"
    """A dead letter at once; acked if it is brought back."""
    EXHAUST = "exhaust"
    """Fails each time."""
    OVERTIME = "overtime"
    """Takes too long, once."""
    KILL = "kill"
    """Ends its process, each time."""


class Did(StrEnum):
    """What a handler said of an event."""

    ACKED = "acked"
    REJECTED = "rejected"
    FAILED = "failed"
    PARKED = "failed, with a long delay"
    TIMED_OUT = "timed out"
    KILLED = "killed its process"


DEAD: Final = {Act.PARK_THEN_REJECT, Act.REJECT, Act.EXHAUST, Act.KILL}
"""What ends as dead letters; all else is acked."""
_FAILURES: Final = {Act.RETRY: 1, Act.RETRY_TWICE: 2, Act.PARK: 1, Act.PARK_TWICE: 2, Act.PARK_THEN_REJECT: 1}


def verdict(act: Act, attempt: int, *, again: bool) -> Did:
    """Return what a handler says of an event at this attempt; `again` if it was brought back, or sought back to."""
    if act is Act.KILL:
        return Did.KILLED
    if again:
        return Did.ACKED
    if act is Act.EXHAUST:
        return Did.FAILED
    if act is Act.OVERTIME and attempt == 1:
        return Did.TIMED_OUT
    if attempt <= _FAILURES.get(act, 0):
        return Did.PARKED if "park" in act else Did.FAILED
    return Did.REJECTED if act in {Act.REJECT, Act.PARK_THEN_REJECT} else Did.ACKED


class Line(NamedTuple):
    """One event of a script."""

    key: bytes
    act: Act

    def payload(self, number: int) -> bytes:
        """Return its payload, which no other event has."""
        return b"%d:%b" % (number, self.act.encode())


def act_of(payload: bytes) -> Act:
    """Return what is to be done with an event."""
    return Act(payload.partition(b":")[2].decode())


def lines(text: str) -> tuple[Line, ...]:
    """Return the lines of a script such as `a:ack b:park a:retry`."""
    return tuple(Line(key.encode(), Act(act)) for key, _, act in (word.partition(":") for word in text.split()))


# --- faults -----------------------------------------------------------------------------------

BEFORE: Final = "before"
AFTER: Final = "after"
SIDES: Final = (BEFORE, AFTER)
ANYWHERE: Final = "anywhere"
"""By the campaign, whatever the process is at: perhaps in the middle of a step."""
HANDLER: Final = "a handler begins"
"""Not a step of the store, but somewhere to be killed, too."""


class Fault(NamedTuple):
    """Where a process is ended."""

    step: str = ""
    """The name of a step; empty for whichever."""
    side: str = BEFORE
    comes: int = 1
    """At which time that it comes there; or after how many messages, if it is killed anywhere."""
    freeze: bool = False
    """It is not killed but stopped; another one takes over, then it is woken."""

    def __str__(self) -> str:
        what = "frozen" if self.freeze else "killed"
        if self.side == ANYWHERE:
            return f"{what} anywhere, after message {self.comes}"
        return f"{what} {self.side} {self.step or 'any step'}, the time of which is {self.comes}"


class Scene(NamedTuple):
    """A delivery, and how it comes to where it is looked at."""

    script: tuple[Line, ...]
    before: tuple[Fault, ...] = ()
    """How the processes ended that were there before."""
    mode: str = "failover"
    named: bool = False
    """All processes are the same consumer, so that each takes over from the one before at once."""
    window: int = 1_000
    max_retries: int = 5
    """More than any script fails, and any round kills."""
    timeout: float = 0.0
    batch: int = 0
    """So many events are taken at a time; 0 for one by one."""
    partitions: int = 1
    leaves_at: int = 0
    """At this delivery the process ends, without a word about it: the next one has it."""
    replays: bool = False
    """When all is done, dead letters are brought back."""
    seeks_to: int | None = None
    """When all is done, the subscription is moved here."""
    seeks_at: int = 0
    """Not when all is done, but at this delivery …"""
    seeks_parked: bool = False
    """… or as soon as something waits aside."""
    changes: bool = False
    """When all is done, its policy is changed."""
    lease_seconds: float = LEASE_SECONDS
    second: bool = False
    """Of two processes at a time, the one that comes later is ended, and not the one that was there."""
    kills_first: bool = False
    """The one that was there is killed, too, once the other has its part."""

    def freezing(self) -> Scene:
        """Return the scene for processes that are frozen: others can take over, and soon."""
        mode = self.mode if self.named or self.mode in SHARED else "failover"
        return self._replace(mode=mode, lease_seconds=FREEZE_LEASE_SECONDS)


MIXTURE: Final = lines(
    "a:ack b:park c:retry a:retry d:reject b:ack c:ack e:ack a:ack b:reject f:exhaust d:ack e:park-twice f:ack e:ack "
    "g:park-then-reject g:ack a:ack b:ack h:ack"
)
"""A bit of everything."""
SHORT: Final = lines("a:ack b:ack c:retry a:ack d:ack b:retry")
PARKING: Final = lines("a:park b:ack a:ack b:ack")
IN_HAND: Final = Fault(HANDLER, comes=3)
"""Ends with events in hand, of which some are settled."""
ROW_IN_HAND: Final = Fault("commit: a parked row is done")
MARKED: Final = Fault("commit: marks suspects", AFTER)
ROW_MARKED: Final = Fault("commit: marks parked suspects", AFTER)

SCENES: Final = {
    "a bit of everything": Scene(MIXTURE, window=10),
    "in batches": Scene(MIXTURE, window=10, batch=4),
    "several partitions": Scene(MIXTURE, partitions=3),
    "nothing fails": Scene(lines("a:ack b:ack"), mode="exclusive"),
    "the same consumer again": Scene(SHORT, mode="exclusive", named=True),
    "a retry": Scene(lines("a:retry b:ack")),
    "a long delay": Scene(lines("a:park b:ack")),
    "a long delay with followers": Scene(lines("a:park a:ack b:ack")),
    "followers are read later": Scene(lines("a:park b:ack b:ack b:ack b:ack b:ack a:ack a:ack"), window=4),
    "two long delays": Scene(lines("a:park-twice b:ack a:ack"), lease_seconds=25.0),
    "a dead letter": Scene(lines("a:reject a:ack")),
    "a dead letter after a long delay": Scene(lines("a:park-then-reject a:ack")),
    "dead letters come back": Scene(lines("a:reject a:ack b:reject b:ack"), replays=True),
    "moved back": Scene(SHORT, seeks_to=2),
    "moved while events wait": Scene(PARKING, seeks_to=0, seeks_parked=True),
    "another policy": Scene(SHORT, changes=True),
    "a handler takes too long": Scene(lines("a:overtime b:ack a:ack"), timeout=TIMEOUT_SECONDS),
    "handed over": Scene(SHORT, leaves_at=3),
    "after a death": Scene(SHORT, (IN_HAND,)),
    "after two deaths": Scene(SHORT, (IN_HAND, MARKED)),
    "after two deaths, handed over": Scene(SHORT, (IN_HAND, MARKED), leaves_at=1),
    "after a death with parked events": Scene(PARKING, (ROW_IN_HAND,)),
    "after two deaths with parked events": Scene(PARKING, (ROW_IN_HAND, ROW_MARKED)),
    "after two deaths with parked events, handed over": Scene(PARKING, (ROW_IN_HAND, ROW_MARKED), leaves_at=1),
    "an event that kills": Scene(lines("a:ack b:kill a:ack b:ack c:ack d:retry"), max_retries=1),
    "an event that kills, beside other partitions": Scene(
        lines("a:ack b:kill c:ack d:ack e:ack f:ack g:ack h:ack b:ack a:ack"), max_retries=1, partitions=3
    ),
    "a parked event that kills": Scene(lines("a:park a:kill b:ack a:ack"), max_retries=1),
}


# --- subscriptions that are shared ------------------------------------------------------------

MANY: Final = lines(
    "a:ack b:ack c:retry d:ack e:ack f:ack g:ack h:ack i:ack j:ack k:retry l:ack m:ack n:ack o:ack p:ack "
    "a:ack b:ack c:ack d:ack e:ack f:retry g:ack h:ack i:ack j:ack k:ack l:ack m:ack n:ack o:ack p:ack"
)
"""Keys of so many slots that each of two processes has several."""
MIXED: Final = lines(
    "a:ack b:park c:retry d:reject e:ack f:ack g:park-twice h:ack i:exhaust j:ack k:retry l:ack m:ack n:park o:ack "
    "p:ack a:ack b:ack c:ack d:ack e:ack f:retry g:ack h:ack i:ack j:ack k:ack l:ack m:reject n:ack o:ack p:ack"
)
KILLING: Final = lines("a:ack b:ack c:kill d:ack e:ack f:ack g:ack h:ack c:ack a:ack b:ack")

TOGETHER: Final = {
    f"{name}, {mode}": scene._replace(mode=mode)
    for mode in SHARED
    for name, scene in {
        "another one comes": Scene(MANY),
        "comes to another one": Scene(MANY, second=True),
        "takes over": Scene(MANY, second=True, kills_first=True),
        "a bit of everything": Scene(MIXED, window=10),
        "a bit of everything, taken over": Scene(MIXED, second=True, kills_first=True, window=10, partitions=2),
        "an event that kills": Scene(KILLING, max_retries=1),
    }.items()
}
"""Scenes of two processes at a time that share a subscription."""


def any_shared_scene(chance: random.Random) -> Scene:
    """Return a scene of a shared subscription as chance will have it."""
    acts = [act for act in Act if act not in {Act.KILL, Act.OVERTIME}]
    weights = [6 if act is Act.ACK else 1 for act in acts]
    count = chance.randint(8, 40)
    keys = "abcdefghijklmnop"[: chance.randint(4, 16)]
    return Scene(
        tuple(Line(chance.choice(keys).encode(), act) for act in chance.choices(acts, weights, k=count)),
        mode=chance.choice(SHARED),
        window=chance.choice([4, 10, 1_000]),
        max_retries=8,
        partitions=chance.choice([1, 1, 2]),
        second=chance.random() < 0.5,
        kills_first=chance.random() < 0.5,
    )


def any_scene(chance: random.Random) -> Scene:
    """Return a scene as chance will have it."""
    acts: Sequence[Act] = [act for act in Act if act not in {Act.KILL, Act.OVERTIME}]
    weights = [4 if act is Act.ACK else 1 for act in acts]
    count = chance.randint(4, 24)
    keys = "abcdefgh"[: chance.randint(2, 8)]
    script = [Line(chance.choice(keys).encode(), act) for act in chance.choices(acts, weights, k=count)]
    kills = chance.random() < 0.1
    if kills:
        script.insert(chance.randrange(count), Line(chance.choice(keys).encode(), Act.KILL))
    moves = chance.choice(["", "", "", "replays", "seeks", "seeks early", "seeks parked"])
    return Scene(
        tuple(script),
        mode=chance.choice(["failover", "exclusive"]),
        named=chance.random() < 0.3,
        window=chance.choice([4, 10, 1_000]),
        max_retries=5 if kills else 8,
        batch=0 if kills else chance.choice([0, 0, 3, 50]),
        partitions=chance.choice([1, 1, 2]),
        leaves_at=chance.choice([0, 0, 0, chance.randint(1, count)]),
        replays=moves == "replays",
        seeks_to=chance.randrange(4) if moves.startswith("seeks") and not kills else None,
        seeks_at=chance.randint(2, count) if moves == "seeks early" else 0,
        seeks_parked=moves == "seeks parked",
    )


def any_faults(chance: random.Random, scene: Scene) -> tuple[Fault, ...]:
    """Return how processes end, one after the other, as chance will have it."""
    kills = any(line.act is Act.KILL for line in scene.script)
    faults = []
    for _ in range(1 if kills else chance.randint(1, 4)):
        freeze = not kills and chance.random() < 0.2
        side = chance.choice(SIDES if freeze else (*SIDES, ANYWHERE))
        faults.append(Fault(side=side, comes=chance.randint(1, 100 if side == ANYWHERE else 25), freeze=freeze))
    return tuple(faults)
