"""The ceilings: the least that any data source, and any sink, written in Python could cost.

The source has a batch of rows in memory, a file that is mapped, and yields it again and again without even looking at
it. The sink counts what it is given. Both are classes made inside of functions, so that they travel to Spark's workers
as they are, and these import nothing for them but what every Arrow source needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

SINK = "penstock_bench_nothing"


def memory_source(
    name: str, template: pa.RecordBatch, schema: StructType, file: Path, rows: Sequence[int]
) -> type[DataSource]:
    """Return a source of this name, with a partition for each of `rows`, of so many rows: `template`, repeated.

    `file` is where the template is kept; it must stay as long as the source is used.
    """
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, template.schema) as writer:
        writer.write_batch(template)
    source, path = name, str(file)  # names that no method below has

    def read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
        left = partition.value
        with pa.memory_map(path) as mapped:
            batch = pa.ipc.open_file(mapped).get_batch(0)
            while left > 0:
                yield batch if left >= len(batch) else batch.slice(0, left)
                left -= len(batch)

    def partitions() -> list[InputPartition]:
        return [InputPartition(count) for count in rows]

    class Reader(DataSourceReader):
        def partitions(self) -> Sequence[InputPartition]:
            return partitions()

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            return read(partition)

    class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
        """All of it is there from the beginning: a stream of one batch."""

        def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
            return {"read": 0}

        def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
            return {"read": 1}

        def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
            pass

        def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
            return partitions()

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            return read(partition)

    class Memory(DataSource):
        @classmethod
        def name(cls) -> str:
            return source

        def schema(self) -> StructType:
            return schema

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

        def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
            return StreamReader()

    return Memory


def nothing_sink() -> type[DataSource]:
    """Return a sink for streams that takes rows as Arrow and drops them."""

    @dataclass
    class Taken(WriterCommitMessage):
        rows: int

    class Writer(DataSourceStreamArrowWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            return Taken(sum(len(batch) for batch in iterator))

    class Nothing(DataSource):
        @classmethod
        def name(cls) -> str:
            return SINK

        def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
            return Writer()

    return Nothing
