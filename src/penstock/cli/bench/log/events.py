"""What is written: the events, the ready batches, and the bytes that they come to in the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from penstock import columns as cols
from penstock.batch import Batch
from penstock.cli.bench.batch import KEYS, PAYLOADS
from penstock.clock import SystemClock
from penstock.ports import Store
from penstock.producers import Run, process_producer
from penstock.rows import Durability, Partition, TopicInfo, TopicSettings
from penstock.settings import FileSettings, Settings
from penstock.stores import open_store
from penstock.stores.file.block import RUN_BYTES, aligned, block_length

TOPIC = "bench"


def keyed_batch(events: int) -> Batch:
    """Return a batch of 100-byte payloads with keys."""
    return Batch.build(PAYLOADS[:events], key=KEYS[:events])


def stored_bytes(batch: Batch) -> list[Any]:
    """Return as many bytes as a batch comes to in the log, its block's front before its body."""
    body = batch.to_bytes()
    return [bytes(block_length(aligned(RUN_BYTES), body.size) - body.size), body]


@contextmanager
def a_store(path: Path, **file_settings: int) -> Iterator[Store]:
    """Open a store in a directory."""
    settings = Settings(file=FileSettings(**file_settings))  # type: ignore[arg-type] # all that are given are numbers
    with closing(open_store(f"file:{path}", settings=settings)) as store:
        yield store


def a_topic(store: Store, *, name: str = TOPIC, partitions: int = 1, durability: Durability = "sync") -> TopicInfo:
    """Return a topic of the store, made if it does not exist."""
    return store.log.create_topic(name, TopicSettings(partitions=partitions, durability=durability))


class Appender:
    """Appends one ready batch again and again, as news each time: its digest is known, as a publisher knows it."""

    def __init__(self, store: Store, batch: Batch) -> None:
        self._log = store.log
        self._batch = batch
        self._digest = cols.digest(batch.columns)
        self._producer = process_producer(SystemClock().time_us())
        self._sequences = count(step=len(batch))

    def append(self, partition: Partition) -> None:
        """Append the batch once more."""
        run = Run(self._producer, 0, next(self._sequences), len(self._batch), self._digest)
        self._log.append(partition, self._batch, [run])
