"""Intake: what the workers of a subscriber do next: events in the order of their lanes.

Many events are handed over at a time, and several of them may be of one lane. One of each lane is begun; those behind
it wait here, and the worker that has done it goes on with the next. If it was not done, those behind it go back, to
come again in their order after it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.bus.consumer import Consumer
    from penstock.bus.delivered import Delivery


class Intake:
    """What was handed over to a consumer and is not begun, lane by lane."""

    def __init__(self, consumer: Consumer[Any]) -> None:
        self._consumer = consumer
        self._behind: dict[bytes | int, deque[Delivery[Any]] | None] = {}
        """For each lane of which one is begun, those that wait for it."""

    def take(self, now: float) -> Delivery[Any] | None:
        """Return an event that may begin now; None if none may."""
        behind = self._behind
        while (delivery := self._consumer._taken(now)) is not None:
            lane = delivery._lane
            if lane is None:
                return delivery
            if lane not in behind:
                behind[lane] = None
                return delivery
            waiting = behind[lane]
            if waiting is None:
                waiting = behind[lane] = deque()
            waiting.append(delivery)
        return None

    def after(self, delivery: Delivery[Any]) -> Delivery[Any] | None:
        """Return what is to be begun after this one, which has ended; None if nothing of its lane waits here."""
        lane = delivery._lane
        if lane is None:
            return None
        waiting = self._behind.pop(lane)
        if waiting:
            if delivery._done and not waiting[0].stale and not waiting[0]._paused:
                self._behind[lane] = waiting
                return waiting.popleft()
            _return(waiting)
        if not delivery._done:
            self._consumer._give_back(lane)
        return None

    def leave(self, delivery: Delivery[Any]) -> None:
        """Let others have what is behind this one, which has ended with the worker that did it."""
        behind = self.after(delivery)
        if behind is not None:
            behind._return()
            self.after(behind)

    def give_back(self) -> None:
        """Let others have all that was not begun."""
        self._consumer._give_back()
        for waiting in self._behind.values():
            if waiting:
                _return(waiting)


def _return(waiting: deque[Delivery[Any]]) -> None:
    while waiting:
        waiting.popleft()._return()
