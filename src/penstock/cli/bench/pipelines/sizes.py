"""How much the bench of the pipelines does; tests make it small."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """So much of everything."""

    rounds_max: int = 3
    """Each round takes many seconds."""
