"""Stores with events for tests of the log, and how to look at and change the bytes of their segments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.file_children import Child, open_at, payload_of, send, the_partition

from penstock.rows import Partition
from penstock.settings import FileSettings
from penstock.stores.file.block import Header, Kind
from penstock.stores.file.platform import Platform, SystemDisk
from penstock.stores.file.scan import walk
from penstock.stores.file.segment import SegmentFile, SegmentName
from penstock.stores.file.store import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable

    Start = Callable[..., Child]

NEXT_BOOT = b"the next boot ..."[:16]


def after_boot(root: Path, **settings: Any) -> FileStore:
    """Open the store as after a restart of the machine, when nobody knows how its logs end."""
    options: dict[str, Any] = {"marker_seconds": 3600.0, "runtime_directory": str(root.parent)} | settings
    return FileStore(root, settings=FileSettings(**options), platform=Platform(boot_id=NEXT_BOOT))


def expected(count: int, number: int = 1) -> list[bytes]:
    return [payload_of(number, sequence) for sequence in range(count)]


def segments_of(root: Path, partition: Partition) -> list[Path]:
    return sorted((root / "topics" / partition.log_id / str(partition.number)).glob("*.seg"))


def opened(path: Path) -> SegmentFile:
    name = SegmentName.parse(path.name)
    assert name is not None
    return SegmentFile(SystemDisk(), path, name)


def data_blocks(path: Path) -> list[Header]:
    file = opened(path)
    headers = file.headers(file.first.end_position, walk(file).position)
    return [header for header, _ in headers if header.kind == Kind.DATA]


def change(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def filled(root: Path, events: int = 12, **settings: Any) -> Partition:
    """Make a store with so many events, one to a block, that was closed well."""
    store = open_at(root, **settings)
    partition = the_partition(store)
    for sequence in range(events):
        send(store, partition, 1, sequence, 1)
    store.close()
    return partition
