"""Timers: when something is due, by a number that names it; each has one time, which may change."""

from __future__ import annotations

import heapq


class Timers:
    """Times by key. What was moved or dropped stays in the heap until its turn, and is passed over then."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: int) -> bool:
        return key in self._at

    def at(self, key: int) -> float | None:
        """Return when a key is due; None if it is not timed."""
        return self._at.get(key)

    def set(self, key: int, at: float) -> None:
        """Let a key be due at this time, and at no other."""
        if self._at.get(key) != at:
            self._at[key] = at
            heapq.heappush(self._heap, (at, key))
            if len(self._heap) > 2 * len(self._at) + 64:
                self._heap = [(at, key) for key, at in self._at.items()]
                heapq.heapify(self._heap)

    def drop(self, key: int) -> None:
        """Let a key never be due."""
        self._at.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._at.clear()
        self._heap.clear()

    def first(self) -> float | None:
        """Return when the next one is due."""
        heap, times = self._heap, self._at
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> list[int]:
        """Take those that are due, in the order of their times."""
        due = []
        while (first := self.first()) is not None and first <= now:
            key = heapq.heappop(self._heap)[1]
            del self._at[key]
            due.append(key)
        return due
