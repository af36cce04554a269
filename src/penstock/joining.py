"""Joining: what a log hands out block by block becomes rows by the thousand, with everything filled in.

Blocks are as large as what was published together, often a few events, while whoever moves events in bulk wants
thousands of rows at a time. So neighbouring blocks are joined first, and what can be derived (topic, ids, sources) is
then derived once for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import pyarrow as pa

from penstock import columns as cols
from penstock.batch import STORED_SCHEMA, Batch
from penstock.offsets import Gap, Range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


class Joined(NamedTuple):
    """Neighbouring blocks as one batch, and when each of its events was appended, in microseconds."""

    batch: Batch
    appended: npt.NDArray[np.int64]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Self:
        """Join blocks of one partition that follow each other."""
        joined = Batch(
            cols.concatenate([batch.columns for batch in batches]),
            start=batches[0].start,
            place=batches[0].place,
            runs=tuple(run for batch in batches for run in batch.runs),
        )
        times = np.array([batch.place.appended_at if batch.place else 0 for batch in batches], np.int64)
        return cls(joined, np.repeat(times, [len(batch) for batch in batches]))

    def select(self, wanted: npt.NDArray[np.bool_]) -> Joined:
        """Return those of the events that are marked."""
        return Joined(self.batch.select(self.batch.offsets[wanted]), self.appended[wanted])

    def rows(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Return these columns of `STORED_SCHEMA`."""
        rows = self.batch.to_arrow([name for name in columns if name != "appended_at"])
        if "appended_at" in columns:
            times = pa.Array.from_buffers(cols.TIMESTAMP, len(self.appended), [None, pa.py_buffer(self.appended)])
            rows = rows.add_column(columns.index("appended_at"), STORED_SCHEMA.field("appended_at"), times)
        return rows


def before(found: Sequence[Batch | Gap], stop: int) -> list[Batch | Gap]:
    """Return what was read without anything from `stop` on.

    A log counts the events that it was asked for, and a gap has none: behind one it hands out some that were not meant.
    """
    kept: list[Batch | Gap] = []
    for item in found:
        if item.range.stop <= stop:
            kept.append(item)
        elif item.range.start < stop:
            kept.append(
                Gap(item.start, stop, item.reason) if isinstance(item, Gap) else item.slice(Range(item.start, stop))
            )
    return kept


def groups(found: Sequence[Batch | Gap], rows_wanted: int) -> Iterator[Joined | Gap]:
    """Yield gaps, and between them blocks that were joined until they had so many rows."""
    held: list[Batch] = []
    rows = 0
    for item in found:
        if isinstance(item, Batch):
            held.append(item)
            rows += len(item)
        if held and (isinstance(item, Gap) or rows >= rows_wanted):
            yield Joined.of(held)
            held, rows = [], 0
        if isinstance(item, Gap):
            yield item
    if held:
        yield Joined.of(held)
