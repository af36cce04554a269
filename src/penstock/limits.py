"""How large an event may be, checked in one place for all that comes in.

A publish and a sink check the same limits, the settings `limits.*`, before anything is written. Beyond one of them
`TooLarge` says which event, what the limit is, and which setting changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock import columns as cols
from penstock.errors import TooLarge

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.batch import Batch
    from penstock.settings import Limits


class EventLimit(NamedTuple):
    """How much of something an event may have."""

    limit: int
    unit: str
    advice: str

    def check(self, found: int, event: int = 0) -> None:
        """Raise `TooLarge` if the event, of this number in its publish, has more."""
        if found > self.limit:
            raise TooLarge(f"event {event} of this publish", found, self.limit, self.advice, unit=self.unit)

    def check_each(self, found: npt.NDArray[np.int64]) -> None:
        """Raise `TooLarge` for the event that has the most of it, if that is too much."""
        if len(found):
            worst = int(found.argmax())
            self.check(int(found[worst]), worst)


class EventLimits:
    """What one event may have of everything."""

    def __init__(self, limits: Limits) -> None:
        elsewhere = "store large things elsewhere and publish where they are (limits.event_bytes_max)"
        self.size = EventLimit(limits.event_bytes_max, "bytes", elsewhere)
        self.headers = EventLimit(limits.headers_max, "headers", "limits.headers_max")
        self.header_bytes = EventLimit(limits.headers_bytes_max, "bytes of headers", "limits.headers_bytes_max")

    def check(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the size of each event, or raise `TooLarge`; no selection, as all columns are looked at."""
        sizes = batch.sizes
        self.size.check_each(sizes)
        if batch.has("headers"):
            headers = batch.columns.column("headers")
            self.headers.check_each(cols.header_counts(headers))
            self.header_bytes.check_each(cols.header_sizes(headers))
        return sizes
