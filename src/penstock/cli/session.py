"""Session: what the options of `penstock` itself say, for whichever command follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.settings import resolve

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.settings import Resolved


@dataclass(slots=True)
class Session:
    """One run of the command line. A command gets it by `context.ensure_object(Session)`."""

    url: str | None = None
    config: Path | None = None
    debug: bool = False

    def resolve(self) -> Resolved:
        """Return the settings in force; whatever was given as an option wins over all other sources."""
        return resolve({"url": self.url, "config": self.config})
