"""Events in memory: what was read and is not settled, page by page.

A page goes when none of its events is open any more. Those that a few slow events keep alive are narrowed to them, so
that they do not keep the memory of thousands.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from penstock.engine.page import DELAYED, GONE, HELD, READY, Page, Some
from penstock.offsets import Range

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from penstock.engine.messages import Chunk, Offsets

NARROW_FROM: Final = 8
"""A page may be narrowed when no more than one of so many of its events is open …"""
GONE_WINDOWS: Final = 1.0
"""… and is, when all pages together keep more of events that are gone than so many windows have bytes. Most pages go
before that, and to narrow one copies each event that is left."""


class Watcher(Protocol):
    """Whoever wants to know of every event that comes, and of every change of its state."""

    def came(self, page: Page, first: int) -> None:
        """Note that a page has new rows, from this one on."""

    def moved(self, page: Page, row: int, before: int, to: int) -> None:
        """Note that a row has moved from one state to another."""


class Pages:
    """The pages of a shard, by offset."""

    def __init__(self, lane: int, slot: int = 0) -> None:
        self.lane, self.slot = lane, slot
        """The lane of events without a key, and their slot."""
        self._pages: list[Page] = []
        self._starts: list[int] = []
        self._touched: set[Page] = set()
        self._sparse: dict[Page, None] = {}
        """Pages that may be narrowed, in the order in which they became so."""
        self.gone_bytes = 0
        self.watcher: Watcher | None = None
        self.ready = 0
        self.held = 0
        self.delayed = 0
        self.open_bytes = 0

    @property
    def open(self) -> int:
        """How many events are in memory."""
        return self.ready + self.held + self.delayed

    def __iter__(self) -> Iterator[Page]:
        return iter(self._pages)

    def add(self, chunk: Chunk) -> Some:
        """Take a chunk that was read; its events are ready."""
        page = self._pages[-1] if self._pages else None
        if page is not None and page.fits(chunk):
            page.join(chunk)
        else:
            page = Page(chunk, self.lane, self.slot)
            self._pages.append(page)
            self._starts.append(page.start)
        count = len(chunk.span)
        self.ready += count
        self.open_bytes += chunk.nbytes
        if self.watcher is not None:
            self.watcher.came(page, page.size - count)
        return Some(page, slice(page.size - count, page.size))

    def move(self, some: Some, to: int) -> None:
        """Let these events, all of which are open, be in another state."""
        page = some.page
        ready, held, delayed = page.ready, page.held, page.delayed
        before = page.state[some.rows].tolist() if self.watcher is not None else []
        page.move(some, to)
        self.ready += page.ready - ready
        self.held += page.held - held
        self.delayed += page.delayed - delayed
        if to == GONE:
            self._count_gone(page, some.nbytes)
        if self.watcher is not None:
            for row, was in zip(some.indexes.tolist(), before, strict=True):
                self.watcher.moved(page, row, was, to)

    def move_one(self, page: Page, row: int, to: int) -> None:
        """Let one event, which is open, be in another state; the same as `move`, and faster."""
        before = page.move_one(row, to)
        for counts in (page, self):
            if before == READY:
                counts.ready -= 1
            elif before == HELD:
                counts.held -= 1
            else:
                counts.delayed -= 1
            if to == READY:
                counts.ready += 1
            elif to == HELD:
                counts.held += 1
            elif to == DELAYED:
                counts.delayed += 1
        if to == GONE:
            self._count_gone(page, int(page.sizes[row]))
        if self.watcher is not None:
            self.watcher.moved(page, row, before, to)

    def _count_gone(self, page: Page, nbytes: int) -> None:
        # What is said may be about right: it comes right when the page is narrowed, or the last one goes.
        nbytes = min(nbytes, page.open_bytes) if page.open else page.open_bytes
        page.open_bytes -= nbytes
        self.open_bytes -= nbytes
        self._touched.add(page)
        if not page.narrowed:
            page.gone_bytes += nbytes
            self.gone_bytes += nbytes

    def sweep(self, window_bytes: int) -> None:
        """Drop pages of which nothing is open any more, and narrow those of which little is, if they keep much."""
        if not self._touched:
            return
        dropped = False
        for page in self._touched:
            if page.open == 0:
                dropped = True
                self.gone_bytes -= page.gone_bytes
                self._sparse.pop(page, None)
            elif not page.narrowed and page.open * NARROW_FROM <= page.size:
                self._sparse[page] = None
        self._touched.clear()
        if dropped:
            self._pages = [page for page in self._pages if page.open]
            self._starts = [page.start for page in self._pages]
        while self._sparse and self.gone_bytes > GONE_WINDOWS * window_bytes:
            page = next(iter(self._sparse))
            del self._sparse[page]
            # A page that has grown by what was joined to it since comes again when that is gone.
            if page.open * NARROW_FROM <= page.size:
                self.gone_bytes -= page.gone_bytes
                self.open_bytes += page.narrow()

    # --- finding ------------------------------------------------------------------------------

    def at(self, offset: int) -> tuple[Page, int] | None:
        """Return the page of an offset, and its row there."""
        index = bisect_right(self._starts, offset) - 1
        if index < 0:
            return None
        page = self._pages[index]
        return (page, offset - page.start) if offset < page.stop else None

    def find(self, offsets: Offsets) -> list[Some]:
        """Return the rows of these offsets, page by page; what is in no page is left out. They are ascending."""
        if not len(offsets):
            return []
        first, last = (
            (offsets.start, offsets.stop - 1) if isinstance(offsets, Range) else (int(offsets[0]), int(offsets[-1]))
        )
        found = []
        for page in self._pages[max(bisect_right(self._starts, first) - 1, 0) : bisect_right(self._starts, last)]:
            if isinstance(offsets, Range):
                low, high = max(first, page.start), min(last + 1, page.stop)
                if high - low == page.size:
                    found.append(Some(page, slice(0, page.size), page.part_of(None)))
                elif low < high:
                    found.append(Some(page, slice(low - page.start, high - page.start)))
            elif page.start <= first and last < page.stop:
                found.append(Some(page, offsets - page.start))
            else:
                low, high = np.searchsorted(offsets, (page.start, page.stop)).tolist()
                if low < high:
                    found.append(Some(page, offsets[low:high] - page.start))
        return found

    def state_of(self, offset: int) -> int:
        """Return the state of one event; `GONE` for what is in no page."""
        at = self.at(offset)
        return GONE if at is None else int(at[0].state[at[1]])

    def held_by(self, hand: int) -> list[Some]:
        """Return what a hand holds."""
        found = [
            Some(page, np.flatnonzero((page.hand == hand) & (page.state == HELD))) for page in self._pages if page.held
        ]
        return [some for some in found if some.size]

    def all_held(self) -> list[Some]:
        """Return all that is handed over."""
        return [Some(page, page.in_state(HELD)) for page in self._pages if page.held]

    def expired(self, wall_us: int) -> list[Some]:
        """Return what is ready and expired."""
        found = []
        for page in self._pages:
            if page.expires_at <= wall_us and page.ready:
                rows = np.flatnonzero((page.state == READY) & (page.expiries <= wall_us))
                if len(rows):
                    found.append(Some(page, rows))
        return found

    def source_of(self, some: Some) -> dict[int, tuple[Any, int]]:
        """Return for each row where its payload is, and at which index there, without keeping the memory of others."""
        found: dict[int, tuple[Any, int]] = {}
        for stretch in some.page.in_chunks(some):
            chunk, rows = stretch.chunk, stretch.indexes
            source = chunk.source if len(rows) * NARROW_FROM > len(chunk.span) else chunk.source.narrowed(rows)
            base = chunk.span.start - some.page.start
            found.update((base + row, (source, row)) for row in rows.tolist())
        return found
