"""What goes wrong in a world, and how often: probabilities of each call, operation of a disk, or datagram."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from penstock.testing.machine.faults import FAILING, FULL, SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = {
    "fails_before": 0.03,
    "fails_after": 0.03,
    "refused": 0.03,
    "stalled": 0.02,
    "killed": 0.02,
    "frozen": 0.02,
    "slow": 0.1,
    "lost": 0.5,
    "doubled": 0.3,
    "late": 0.3,
}
"""What `Plan.drawn` draws at most."""
MOST_ON_DISK = {SHORT: 0.03, FULL: 0.01, FAILING: 0.01}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The faults of a world; none by default. It may be replaced at any time: `world.plan = CALM`."""

    # --- calls of the store ---
    call_seconds: float = 0.002
    """How long a call takes at most on either side of its effect."""
    slow: float = 0.0
    """Takes up to `slow_seconds` instead."""
    slow_seconds: float = 3.0
    fails_before: float = 0.0
    """Ends with an `OSError`, and has done nothing."""
    fails_after: float = 0.0
    """Ends with an `OSError`, and has done everything."""
    refused: float = 0.0
    """Ends with a `StoreError`, and has done nothing."""
    stalled: float = 0.0
    """Ends with `WriterStalled`, and has done nothing."""
    killed: float = 0.0
    """Its process dies in the middle, before one of the next `killed_within` operations."""
    killed_within: int = 12
    frozen: float = 0.0
    """Its process stands still right after its effect, for up to `frozen_seconds`: longer than a lease lasts."""
    frozen_seconds: float = 12.0
    # --- operations of a process's disk ---
    disk: Mapping[str, float] = field(default_factory=dict)
    """By the names of `penstock.testing.machine.faults`: SHORT, FULL and FAILING."""
    # --- datagrams ---
    datagram_seconds: float = 0.001
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    """Comes after up to `slow_seconds`."""

    @classmethod
    def drawn(cls, seed: int, **given: Any) -> Plan:
        """Return a plan of its own for each seed: some faults often, some seldom, most of them not at all.

        Worlds that all have a little of everything would never show what needs a lot of one thing.
        """
        chance = random.Random(f"{seed}/plan")
        rates: dict[str, Any] = {name: most * _share(chance) for name, most in MOST.items()}
        rates["disk"] = {name: most * _share(chance) for name, most in MOST_ON_DISK.items()}
        return cls(**rates | given)

    def __str__(self) -> str:
        rates = {item.name: getattr(self, item.name) for item in fields(self) if item.name in MOST}
        told = [f"{name} {rate:.3f}" for name, rate in (rates | dict(self.disk)).items() if rate]
        return ", ".join(told) or "nothing goes wrong"


def _share(chance: random.Random) -> float:
    return chance.choice([0.0, 0.0, 0.1, 1.0])


CALM = Plan()
"""Nothing goes wrong."""
