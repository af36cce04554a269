"""Manner: what a life tries besides what its plan lets go wrong. Each life tries some of it, and no two the same."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.policy import Policy

if TYPE_CHECKING:
    import random

RETRIES: Final = 2
LEASE_SECONDS: Final = 2.0
SECONDS: Final = 4.5
KINDS: Final = (*("good",) * 12, "flaky", "flaky", "slow", "bad")
DISTURBANCES: Final = ("kill", "kill", "kill within", "freeze", "freeze", "power", "power within", "nothing")
ACTS: Final = ("pause", "change", "seek", "replay")


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a life is lived."""

    mode: str = "failover"
    policy: Policy = field(default_factory=Policy)
    partitions: int = 1
    processes: int = 2
    consumers: int = 1
    """Of each process."""
    publishes: int = 6
    """How often each process publishes."""
    seconds: float = SECONDS
    """How long it lasts, until all faults end."""
    patience: float = 200.0
    """How long everything may take to come to rest then."""
    keys: tuple[bytes | None, ...] = (b"a", b"b", b"c", b"d", None)
    batches: bool = False
    """Consumers take batches, not single events."""
    kinds: tuple[str, ...] = KINDS
    """What becomes of events; one of them is drawn for each."""
    delays: tuple[float | None, ...] = (None, None, 0.1, 2.0)
    """With which delays events are given back that failed."""
    disturbances: tuple[str, ...] = DISTURBANCES
    acts: tuple[str, ...] = ()
    """What somebody does to the subscription meanwhile."""
    deaf: bool = False
    """No notification ever comes, also not when all faults have ended."""
    tired: float = 0.02
    """How likely a consumer ends by itself after an event."""

    @classmethod
    def drawn(cls, chance: random.Random, **given: Any) -> Manner:
        """Return a manner of its own for each seed."""
        policy = Policy(
            max_retries=RETRIES,
            backoff_seconds=chance.choice([0.1, 0.5, 2.0]),
            backoff_seconds_max=2.5,
            timeout_seconds=chance.choice([None, 1.0]),
            window_events=chance.choice([4, 20, 100]),
            read_events=chance.choice([3, 10, 50]),
            checkpoint_events=chance.choice([1, 1, 10]),
            checkpoint_seconds=chance.choice([0.0, 0.4]),
            heartbeat_seconds=chance.choice([0.5, 1.0]),
            rate_per_second=chance.choice([None, None, None, 20.0]),
        )
        kinds = (*KINDS, *(["killer"] if chance.random() < 0.3 else []))
        keys = (b"a", b"b", b"c", b"d", None)[: chance.choice([2, 4, 5])]
        manner = cls(
            mode=chance.choice(["exclusive", "failover", "failover"]),
            policy=policy,
            partitions=chance.choice([1, 1, 2]),
            processes=chance.choice([2, 2, 3]),
            keys=(None,) if chance.random() < 0.2 else keys,
            batches=chance.random() < 0.4,
            # One that never ends is ended by its timeout alone.
            kinds=kinds if policy.timeout_seconds is None else (*kinds, "stuck"),
            disturbances=(*DISTURBANCES, "clock", "clock") if chance.random() < 0.2 else DISTURBANCES,
            acts=tuple(act for act in ACTS if chance.random() < 0.15),
            deaf=chance.random() < 0.15,
        )
        if "policy" in given:
            given["policy"] = replace(policy, **given["policy"])
        if given.get("mode", "") is None:
            given["mode"] = chance.choice(["key_shared", "shared"])
        if given.get("consumers", 0) is None:
            given["consumers"] = chance.choice([1, 2, 3])
        return replace(manner, **given)
