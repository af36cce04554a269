"""How the progress of several owners becomes one cursor.

Where a subscription is consumed by several at a time, each owner settles some of the offsets of a partition, and there
is one cursor for all of them. A store adds what an owner has settled to what is there, in the transaction that writes
it. That is a union, so that it does not matter in which order owners come, and a step that is written twice changes
nothing the second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import StaleCursor, StoreFull, WindowFull
from penstock.offsets import Bitmap

if TYPE_CHECKING:
    from penstock.rows import Cursor, Settling

FEW_RANGES: Final = 32
"""So few are set one by one."""


def settle(cursor: Cursor, settling: Settling) -> tuple[Cursor, bytes]:
    """Return the cursor with what was settled added to it, and the record of that; empty if there is none.

    `StaleCursor` if it was moved since; `StoreFull` for what is further ahead of it than a cursor can say.
    """
    if settling.generation != cursor.generation:
        raise StaleCursor(
            f"{cursor.shard} is of generation {cursor.generation}, and not {settling.generation} any more"
        )
    bitmap = Bitmap.from_bytes(cursor.next_offset, cursor.settled)
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
    record = b"" if settling.record is None else settling.record(cursor, after)
    return (after, record) if record else (msgspec.structs.replace(after, number=cursor.number), b"")
