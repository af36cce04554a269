"""The content of a lake's file: its columns, and the digest by which it is compared with the log.

The columns are those that `format("penstock")` reads, without `topic`. Everything is filled in that a log derives (ids,
sources, content types), so that a file explains itself.

**The digest** is of values, whatever batches they come in and however they are stored: for each column two running
xxh3 of 128 bits, of the lengths (little-endian int32, -1 for no value) and of the bytes; a time is an int64, its
minimum for no value; headers are counts, names and values. The digest is the xxh3 of all of these, in the order of the
columns. Offsets are not part of it, since they are dense and the range says them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import xxhash

from penstock import columns as cols
from penstock.batch import STORED_SCHEMA

FILE_SCHEMA: Final = pa.schema([field for field in STORED_SCHEMA if field.name != "topic"])
"""The columns of a file, in their order."""

CONTENT: Final = tuple(name for name in FILE_SCHEMA.names if name not in {"partition", "offset"})
"""The columns that a digest is of."""

_NO_TIME: Final = np.iinfo(np.int64).min


class Content:
    """The digest of rows that come one batch after the other."""

    def __init__(self) -> None:
        self._states = {name: tuple(xxhash.xxh3_128() for _ in range(5)) for name in CONTENT}

    def update(self, rows: pa.RecordBatch) -> None:
        """Add rows, which have all columns of `CONTENT`."""
        for name, (lengths, values, *inner) in self._states.items():
            array = rows.column(name)
            if array.type == cols.TIMESTAMP:
                values.update(cols.times(array, _NO_TIME).tobytes())
                continue
            lengths.update(cols.lengths_or_absent(array).tobytes())
            # What stands in the buffers where there is no value means nothing, and is gone after a file.
            filled = array.drop_null() if array.null_count else array
            if name == "headers":
                entries = cols.offsets_of(filled)
                within = slice(int(entries[0]), int(entries[-1]))
                names, items = filled.keys[within], filled.items[within]
                inner[0].update(cols.lengths_or_absent(names).tobytes())
                inner[1].update(cols.bytes_of(names).data)
                inner[2].update(cols.lengths_or_absent(items).tobytes())
                values.update(cols.bytes_of(items).data)
            else:
                values.update(cols.bytes_of(filled).data)

    def digest(self) -> bytes:
        """Return the digest of all rows so far."""
        whole = xxhash.xxh3_128()
        for states in self._states.values():
            for state in states:
                whole.update(state.digest())
        return whole.digest()
