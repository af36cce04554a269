"""The conformance suite on `file:`, with segments so small that every few appends begin a new one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.clock import VirtualClock
from penstock.ports import Store
from penstock.settings import FileSettings
from penstock.stores.file.platform import Platform
from penstock.stores.file.store import FileStore
from penstock.testing.conformance import StoreConformance


class TestFileStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def open(self, clock: VirtualClock) -> Store:
        with closing(sqlite3.connect(self.directory / "app.db")) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
        store = FileStore(
            self.directory / "data",
            settings=FileSettings(segment_bytes=1500, allocate_bytes=4096),
            platform=Platform(clock=clock),
            outbox=self.directory / "app.db",
        )
        assert store.outbox is not None
        store.outbox.pending()  # which makes its tables
        return store

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        return self.open(clock)

    @contextmanager
    def transaction(self, store: Store) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.directory / "app.db")) as connection, connection:
            yield connection
