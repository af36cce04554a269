"""What must be said of a partition whose bytes have changed, from what they were alone.

A block is *hit* if a byte of it changed or is cut off, its filling aside. Blocks that were hit one after the other are
one damage: it begins at the byte and offset of the first, and ends at the offset of the next whole block. In a sealed
segment, and below the durable end that a believed tail knows, it is corrupt. Without such a tail it is corrupt if a
whole block follows, which is its witness, and torn at the end of the log; a log that ends with zeros, or with its file,
looks like one that was never longer, but a tail that is not believed still testifies that something is missing.

Bytes that say nothing may change unseen, and these are all of them:

* the filling of a segment's first block, which nothing reads: the block's own length ends before it;
* zeros allocated ahead, behind the durable end that a believed tail knows: the next block is written over them;
* a marker behind the last event of a sealed segment: it testified that the event is durable, as the next segment's
  first block does since.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.stores.file.block import PREFIX_BYTES
from penstock.stores.file.scan import CORRUPT, TORN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.testing.campaigns.damage.specimen import Block, Layout

FIRST_FILLING: Final = "unseen, and nothing is changed by it: the filling of a segment's first block"
ALLOCATED: Final = "unseen, and nothing is changed by it: zeros allocated ahead"
LAST_MARKER: Final = "unseen, and nothing is changed by it: a marker behind the last event of a sealed segment"


class Expected(NamedTuple):
    """One damage, as it must be told."""

    kind: str
    file: str
    byte: int
    start: int
    stop: int | None


class Changes:
    """Which bytes of a file have changed."""

    def __init__(self, before: bytes, after: bytes) -> None:
        self._after = after
        self.length = len(after)
        same = min(len(before), len(after))
        view = np.frombuffer(before, np.uint8, count=same) != np.frombuffer(after, np.uint8, count=same)
        self.bytes = np.flatnonzero(view)

    def touch(self, start: int, stop: int) -> bool:
        """Say whether a byte in between has another value."""
        found = np.searchsorted(self.bytes, (start, stop))
        return bool(found[0] < found[1])

    def looks_ended(self, position: int) -> bool:
        """Say whether nothing but zeros follows; too few of them for a prefix are a file that was cut."""
        return not self._after[position:].strip(b"\0") and not 0 < self.length - position < PREFIX_BYTES

    def hit(self, start: int, stop: int) -> bool:
        """Say whether a byte in between has another value, or is cut off."""
        return self.length < stop or self.touch(start, stop)


def damages_of(layout: Layout, file: str, changes: Changes, *, believed: bool) -> list[Expected]:
    """Return what must be told of a segment; `believed`: there is a tail that knows where the log ends."""
    first, *rest = layout.blocks
    if changes.hit(0, first.content_stop):
        return [Expected(CORRUPT, file, 0, layout.name.base, layout.next_base)]
    return list(_in_blocks(layout, rest, file, changes, believed=believed))


def _in_blocks(
    layout: Layout, blocks: list[Block], file: str, changes: Changes, *, believed: bool
) -> Iterator[Expected]:
    sealed = layout.next_base is not None
    run: Block | None = None  # the first of those hit one after the other
    seen, end = False, layout.blocks[0].end_position
    for block in blocks:
        if block.start == layout.next_base:
            break  # the marker behind the last event
        if changes.hit(block.position, block.content_stop):
            run = run or block
        else:
            if run is not None:
                yield Expected(CORRUPT, file, run.position, run.start, block.start)
            run, end = None, block.end_position
            if changes.touch(block.content_stop, block.end_position):
                seen = True
                yield Expected(CORRUPT, file, block.content_stop, block.stop, block.stop)
        seen = seen or run is not None
    if run is not None and (sealed or believed):
        yield Expected(CORRUPT, file, run.position, run.start, layout.next_base)
    elif sealed and not seen and changes.length < layout.end_position:
        yield Expected(CORRUPT, file, end, layout.next_base or 0, layout.next_base)
    elif not sealed and not believed and not changes.looks_ended(end):
        yield Expected(TORN, file, end, run.start if run is not None else layout.blocks[-1].stop, None)


def seeming_end(layout: Layout, changes: Changes) -> int | None:
    """Return the offset at which an active segment seems to end, although it went on; None if it does not seem so."""
    damages = damages_of(layout, "", changes, believed=True)
    if not damages or damages[-1].stop is not None or damages[-1].byte == 0:
        return None
    return damages[-1].start if changes.looks_ended(damages[-1].byte) else None


def why_unseen(layout: Layout, changes: Changes) -> str | None:
    """Return the reason why changes need not be told of, if there is one."""
    places = {
        FIRST_FILLING: (layout.blocks[0].content_stop, layout.blocks[0].end_position),
        ALLOCATED: (layout.end_position, 1 << 62),
    }
    last = layout.blocks[-1]
    if last.start == layout.next_base:
        places[LAST_MARKER] = (last.position, last.end_position)
    return next((reason for reason, place in places.items() if changes.touch(*place)), None)


def offsets_of(damages: Iterable[Expected], end: int) -> set[int]:
    """Return the offsets that damage concerns, in a log that ends at `end`."""
    return {offset for damage in damages for offset in range(damage.start, end if damage.stop is None else damage.stop)}
