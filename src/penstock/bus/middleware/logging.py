"""Logged: one line in the log for each attempt at an event.

::

    billing orders/3@1700 order.placed, attempt 1: handled in 0.004 s
    billing orders/3@1701 order.placed, attempt 2: failed after 0.120 s, ValueError

What this promises: a line says which event it was, how its attempt ended and how long it took; of a failure, the kind
of error. It has neither payload, key nor headers, and not the text of an error, which may quote them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from penstock.clock import Clock, SystemClock
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.bus.delivered import Delivery
    from penstock.bus.middleware import Proceed


class Logged:
    """Middleware that logs each attempt.

    * `logger`: where to; `penstock.handlers` unless given.
    * `level`: of attempts that succeed, or were cancelled. Failures are warnings, unless this is higher.
    """

    def __init__(
        self, logger: logging.Logger | None = None, level: int = logging.INFO, *, clock: Clock | None = None
    ) -> None:
        if type(level) is not int:
            raise UsageError(f"level is a number, such as logging.INFO, and not {level!r}")
        self._logger = logger or logging.getLogger("penstock.handlers")
        self._level = level
        self._clock = clock or SystemClock()

    async def __call__(self, delivery: Delivery[Any], proceed: Proceed, /) -> None:
        """See `Middleware`."""
        began = self._clock.monotonic()
        try:
            await proceed()
        except asyncio.CancelledError:
            self._log(self._level, delivery, began, "cancelled after %.3f s")
            raise
        except BaseException as error:
            self._log(
                max(self._level, logging.WARNING), delivery, began, "failed after %.3f s, %s", type(error).__name__
            )
            raise
        self._log(self._level, delivery, began, "handled in %.3f s")

    def _log(self, level: int, delivery: Delivery[Any], began: float, ending: str, *more: object) -> None:
        if self._logger.isEnabledFor(level):
            replay = f", replay {delivery.replay}" if delivery.replay else ""
            self._logger.log(
                level,
                f"%s %s %s, attempt %d%s: {ending}",  # noqa: G004 - the ending is one of the formats above
                delivery.subscription,
                delivery.position,
                delivery.event.type,
                delivery.attempt,
                replay,
                self._clock.monotonic() - began,
                *more,
            )
