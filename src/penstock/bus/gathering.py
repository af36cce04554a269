"""Gathering: values that come one by one become the columns of one batch.

Each value is encoded when it comes, so that it may be changed afterwards, and what is wrong with it is told to whoever
brought it. Until the batch is made there are lists of bytes, keys and forms, and nothing else is kept of an event that
says no more than its value. Events that say more come as envelopes, and take their place among the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.batch import Batch
from penstock.clock import datetime_to_us

if TYPE_CHECKING:
    from penstock.bus.topic import Form
    from penstock.events import Event


class Gathering:
    """Rows of a batch that is not made yet, in the order in which they came."""

    __slots__ = ("_envelopes", "_expiries", "_forms", "_keys", "data")

    def __init__(self) -> None:
        self.data: list[bytes] = []
        """The payload of each event."""
        self._keys: list[bytes | None] = []
        self._forms: list[Form | None] = []  # None for an envelope, which says it itself
        self._envelopes: dict[int, Event] = {}
        self._expiries: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.data)

    def add(self, form: Form, data: bytes, key: bytes | None) -> None:
        """Add an event that says no more than its value."""
        self.data.append(data)
        self._keys.append(key)
        self._forms.append(form)

    def expire_last(self, time_us: int) -> None:
        """Say when the event that was added last expires."""
        self._expiries[len(self.data) - 1] = time_us

    def add_event(self, event: Event) -> None:
        """Add an event with whatever it says."""
        row = len(self.data)
        self.data.append(event.data)
        self._keys.append(event.key)
        self._forms.append(None)
        self._envelopes[row] = event
        if event.expires_at is not None:
            self._expiries[row] = datetime_to_us(event.expires_at)

    def clear(self) -> None:
        """Let go of all events."""
        self.data, self._keys, self._forms = [], [], []
        self._envelopes, self._expiries = {}, {}

    def to_batch(self) -> Batch:
        """Return all of it as one batch."""
        columns = self._alike() if not self._envelopes else None
        if columns is None:
            columns = self._mixed()
        if self._expiries:
            columns["expires_at"] = [self._expiries.get(row) for row in range(len(self))]
        return Batch.build(self.data, key=self._keys, **columns)

    def _alike(self) -> dict[str, Any] | None:
        """Return the columns that are one value repeated, if all events have one form; that is the rule."""
        form = self._forms[0]
        if form is None or self._forms.count(form) < len(self):
            return None
        headers = [form.headers] * len(self) if form.headers else None
        return {"type": form.type, "content_type": form.content_type, "headers": headers}

    def _mixed(self) -> dict[str, Any]:
        says = [self._envelopes[row] if form is None else form for row, form in enumerate(self._forms)]
        columns: dict[str, Any] = {
            "type": [each.type for each in says],
            "content_type": [each.content_type for each in says],
            "headers": [each.headers or None for each in says],
        }
        for name in ("id", "source", "subject", "time"):
            values: list[Any] = [None] * len(self)
            for row, event in self._envelopes.items():
                values[row] = getattr(event, name)
            columns[name] = values
        return columns
