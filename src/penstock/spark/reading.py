"""Reading: from a span of a log to the Arrow batches that Spark takes. This is what runs in tasks.

Blocks of a log are as large as what was published together, often a few events, while Spark wants thousands of rows at
a time. So neighbouring blocks are joined first, and what can be derived (topic, ids, sources) is then derived once for
all of them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock import columns as cols
from penstock.batch import STORED_SCHEMA, Batch
from penstock.errors import DataLost, Trimmed
from penstock.offsets import Gap
from penstock.rows import Partition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from penstock.ports import Log
    from penstock.spark.positions import Span

logger = logging.getLogger(__name__)

READ_BYTES: Final = 32 << 20
READ_EVENTS: Final = 40_000
"""How much is asked of the log at a time; no batch for Spark has more."""

BATCH_ROWS: Final = 10_000
"""A batch for Spark is handed over as soon as it has so many rows."""


class Reading(NamedTuple):
    """What of the events is wanted."""

    columns: tuple[str, ...]
    types: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    from_us: int | None = None
    to_us: int | None = None
    fail_on_data_loss: bool = True

    def batches(self, log: Log, span: Span) -> Iterator[pa.RecordBatch]:
        """Yield the events of a span that are wanted, in the order of their offsets."""
        partition = Partition(span.log_id, span.partition)
        start = span.start
        while start < span.stop:
            try:
                found = log.read(partition, start, bytes_max=READ_BYTES, events_max=min(span.stop - start, READ_EVENTS))
            except Trimmed as error:
                first = min(error.first, span.stop)
                self.lost(f"{span.where}: offsets {start} to {first - 1} were trimmed before they were read")
                start = first
                continue
            if not found:
                raise DataLost(f"{span.where}: the log ends at offset {start}, and was to be read up to {span.stop}")
            for group in _groups(found):
                if isinstance(group, Gap):
                    self.lost(f"{span.where}: offsets {group.range} are lost: {group.reason}")
                else:
                    yield from self._joined(group)
            start = found[-1].range.stop

    def lost(self, what: str) -> None:
        """Raise `DataLost`, or say what is passed over, as the option `failOnDataLoss` says."""
        if self.fail_on_data_loss:
            raise DataLost(f"{what}. To pass over what is lost, set the option failOnDataLoss to false")
        logger.warning("%s; the query goes on behind them", what)

    # --- columns ------------------------------------------------------------------------------

    def _joined(self, batches: Sequence[Batch]) -> Iterator[pa.RecordBatch]:
        joined = Batch(
            cols.concatenate([batch.columns for batch in batches]),
            start=batches[0].start,
            place=batches[0].place,
            runs=tuple(run for batch in batches for run in batch.runs),
        )
        appended = _append_times(batches)
        wanted = self._wanted(joined, appended)
        if wanted is not None:
            if not wanted.any():
                return
            joined, appended = joined.select(joined.offsets[wanted]), appended[wanted]
        rows = joined.to_arrow([name for name in self.columns if name != "appended_at"])
        if "appended_at" in self.columns:
            times = pa.Array.from_buffers(cols.TIMESTAMP, len(appended), [None, pa.py_buffer(appended)])
            rows = rows.add_column(self.columns.index("appended_at"), STORED_SCHEMA.field("appended_at"), times)
        yield rows

    def _wanted(self, batch: Batch, appended: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return which events are wanted; None for all."""
        wanted: npt.NDArray[np.bool_] | None = None
        if self.from_us is not None:
            wanted = appended >= self.from_us
        if self.to_us is not None:
            wanted = (appended < self.to_us) & (True if wanted is None else wanted)
        for name, values in (("type", self.types), ("key", self.keys)):
            if values:
                column = batch.to_arrow([name]).column(0)
                chosen = pc.is_in(column, pa.array(values, column.type)).to_numpy(zero_copy_only=False)
                wanted = chosen & (True if wanted is None else wanted)
        return wanted


def _groups(found: Sequence[Batch | Gap]) -> Iterator[list[Batch] | Gap]:
    """Yield gaps, and between them as many blocks as make a batch for Spark."""
    held: list[Batch] = []
    rows = 0
    for item in found:
        if isinstance(item, Batch):
            held.append(item)
            rows += len(item)
        if held and (isinstance(item, Gap) or rows >= BATCH_ROWS):
            yield held
            held, rows = [], 0
        if isinstance(item, Gap):
            yield item
    if held:
        yield held


def _append_times(batches: Sequence[Batch]) -> npt.NDArray[np.int64]:
    times = np.array([batch.place.appended_at if batch.place else 0 for batch in batches], np.int64)
    return np.repeat(times, [len(batch) for batch in batches])
