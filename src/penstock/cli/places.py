"""Places in a topic as people write them: `earliest`, `latest`, an offset, or a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from penstock.cli.arguments import moment
from penstock.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from penstock.runtime.subscriptions import Start

METAVAR = "PLACE"
HELP = "earliest, latest, OFFSET or TIME."


def place(option: str, text: str) -> Start:
    """Return the place that an option names."""
    match text:
        case "earliest" | "latest":
            return text
        case _ if text.isdecimal() and text.isascii():
            return int(text)
    try:
        return moment(text)
    except typer.BadParameter as error:
        if "time zone" in str(error):
            raise UsageError(f"{option}: {error}") from None
        near = did_you_mean(text, ["earliest", "latest"])
        raise UsageError(f"{option} is {text!r}{near}; or write an offset, or a time as 2026-01-31T12:00:00Z") from None
