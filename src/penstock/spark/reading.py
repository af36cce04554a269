"""Reading: from a span of a log to the Arrow batches that Spark takes. This is what runs in tasks.

Blocks of a log are as large as what was published together, often a few events, while Spark wants thousands of rows at
a time: `penstock.joining` makes one of the other. A log that is read together with its archive is a log like any other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataLost, Trimmed
from penstock.joining import Joined, before, groups
from penstock.offsets import Gap
from penstock.rows import Partition

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import numpy.typing as npt

    from penstock.batch import Batch
    from penstock.lake.reading import Readable
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

    def batches(self, log: Readable, span: Span) -> Iterator[pa.RecordBatch]:
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
            for group in groups(before(found, span.stop), BATCH_ROWS):
                if isinstance(group, Gap):
                    self.lost(f"{span.where}: offsets {group.range} are lost: {group.reason}")
                else:
                    yield from self._rows(group)
            start = found[-1].range.stop

    def lost(self, what: str) -> None:
        """Raise `DataLost`, or say what is passed over, as the option `failOnDataLoss` says."""
        if self.fail_on_data_loss:
            raise DataLost(f"{what}. To pass over what is lost, set the option failOnDataLoss to false")
        logger.warning("%s; the query goes on behind them", what)

    # --- columns ------------------------------------------------------------------------------

    def _rows(self, joined: Joined) -> Iterator[pa.RecordBatch]:
        wanted = self._wanted(joined.batch, joined.appended)
        if wanted is not None:
            if not wanted.any():
                return
            joined = joined.select(wanted)
        yield joined.rows(self.columns)

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
