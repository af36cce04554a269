"""Verdicts: what a handler says of its event by raising.

Returning is done, and raising anything is failed: the event is tried again as its subscription's policy says. These two
say more. They are no errors of Penstock, so that `except PenstockError` in a handler does not swallow them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.clock import seconds

if TYPE_CHECKING:
    from datetime import timedelta


class Reject(Exception):
    """Raised by a handler: no attempt at this event can succeed, so it becomes a dead letter at once."""


class RetryLater(Exception):
    """Raised by a handler: not now, but after this delay.

    It counts as one of the attempts that the policy allows; with `counted=False` it does not, and the event is tried
    again however often that happens: the other side is down for maintenance, say, which is not the event's fault.
    """

    def __init__(self, delay: float | timedelta, reason: str = "", *, counted: bool = True) -> None:
        self.delay_seconds = seconds(delay, "the delay of RetryLater")
        self.counted = counted
        super().__init__(reason or f"to be tried again in {self.delay_seconds:g} s")
