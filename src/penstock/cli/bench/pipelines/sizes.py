"""How much the bench of the pipelines does; tests make it small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """So much of everything."""

    rounds_max: int = 3
    """Each round takes many seconds."""
    redrive_letters: int = 100_000
    redrive_partitions: int = 4
