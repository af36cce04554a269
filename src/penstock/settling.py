"""How the progress of several owners becomes one cursor, and how what nobody has yet becomes somebody's.

Where a subscription is consumed by several at a time, each owner settles some of the offsets of a partition, and there
is one cursor for all of them. A store adds what an owner has settled to what is there, in the transaction that writes
it. That is a union, so that it does not matter in which order owners come, and a step that is written twice changes
nothing the second time, but for a claim: an owner that does not know whether it has one loads the cursor anew.

In mode `shared` nothing but the cursor says whose an event is. An owner has a *berth*, which is a number with a lease,
and *claims* ranges for it, in the same transactions: what others have given back, or the next offsets that nobody has
had. Whatever a berth has claimed and not settled is its next owner's when the lease has another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import StaleCursor, StoreFull, WindowFull
from penstock.offsets import Bitmap, Range, RangeSet

if TYPE_CHECKING:
    from penstock.rows import Claim, Cursor, Settling

FEW_RANGES: Final = 32
"""So few are set one by one; and with more of a berth, those that are settled are forgotten."""
NOBODY: Final = 0
"""The berth of what was given back."""


def settle(cursor: Cursor, settling: Settling) -> tuple[Cursor, bytes]:
    """Return the cursor with what was settled added to it, and the record of that; empty if there is none.

    `StaleCursor` if it was moved since; `StoreFull` for what is further ahead of it than a cursor can say.
    """
    if settling.generation != cursor.generation:
        raise StaleCursor(
            f"{cursor.shard} is of generation {cursor.generation}, and not {settling.generation} any more"
        )
    bitmap = Bitmap.from_bytes(cursor.next_offset, cursor.settled)
    if not cursor.settled:
        # The usual case: what follows the cursor need not be marked to be passed.
        bitmap.seek(settling.settled.first_missing(cursor.next_offset))
    try:
        if settling.settled.range_count <= FEW_RANGES:
            for span in settling.settled:
                bitmap.set_range(span)
        else:
            bitmap.set_many(settling.settled.to_offsets())
    except WindowFull as full:
        raise StoreFull(f"{cursor.shard}: {full}") from None
    next_offset = bitmap.advance()
    attempts = {
        offset: made
        for offset, made in {**cursor.attempts, **settling.attempts}.items()
        if made is not None and offset not in bitmap
    }
    after = msgspec.structs.replace(
        cursor,
        next_offset=next_offset,
        settled=bitmap.to_bytes() if bitmap.count else b"",
        attempts=attempts,
        number=cursor.number + 1,
    )
    if settling.berth or cursor.claims:
        after = _claimed(after, settling, bitmap)
    record = b"" if settling.record is None else settling.record(cursor, after)
    return (after, record) if record else (msgspec.structs.replace(after, number=cursor.number), b"")


# --- claims -----------------------------------------------------------------------------------


def frontier(cursor: Cursor) -> int:
    """Return the first offset that nobody has ever claimed."""
    return max(cursor.stop or 0, cursor.next_offset)


def claims_of(cursor: Cursor, berth: int) -> RangeSet:
    """Return what a berth has claimed, as far as it is remembered: some of it may be settled."""
    return RangeSet.from_bytes(cursor.claims.get(berth, b""))


def unsettled(cursor: Cursor, berth: int) -> RangeSet:
    """Return what a berth has claimed, and nobody has settled."""
    return _unsettled(Bitmap.from_bytes(cursor.next_offset, cursor.settled), claims_of(cursor, berth))


def _unsettled(bitmap: Bitmap, ranges: RangeSet) -> RangeSet:
    return RangeSet(left for span in ranges for left in bitmap.unset_in(span))


def _claimed(cursor: Cursor, settling: Settling, bitmap: Bitmap) -> Cursor:
    """Return the cursor with its claims as they are after this step."""
    berth = settling.berth
    claims = {each: RangeSet.from_bytes(body) for each, body in cursor.claims.items()}
    mine = claims.setdefault(berth, RangeSet())
    stop = cursor.stop
    if settling.freed:
        freed = mine & _unsettled(bitmap, settling.freed)
        claims[berth] = mine = mine - freed
        claims[NOBODY] = claims.get(NOBODY, RangeSet()) | freed
    if settling.claim is not None:
        free = claims.get(NOBODY, RangeSet())
        found = _next_free(cursor, free, settling.claim)
        free.discard(found)
        mine.add(found)
        stop = max(frontier(cursor), found.stop)
    passed = Range(0, cursor.next_offset)
    for each, ranges in claims.items():
        ranges.discard(passed)
        if ranges.range_count > FEW_RANGES:
            claims[each] = _unsettled(bitmap, ranges)
    return msgspec.structs.replace(
        cursor, claims={each: ranges.to_bytes() for each, ranges in sorted(claims.items()) if ranges}, stop=stop
    )


def _next_free(cursor: Cursor, free: RangeSet, claim: Claim) -> Range:
    """Return what fulfils a wish: what was given back first; empty if there is nothing."""
    for span in free:
        start = max(span.start, claim.above)
        if start < span.stop:
            return Range(start, min(span.stop, start + claim.most))
    start = frontier(cursor)
    return Range(start, max(start, min(start + claim.most, claim.end, cursor.next_offset + Bitmap.LIMIT)))
