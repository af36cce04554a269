"""FileStore: the `Store` behind `file:`, put together.

Any number of processes, and of openings within one, may share a directory. A process that forks must not use the store
in the child: it says so there, and the child opens its own.
"""

from __future__ import annotations

import logging
import os
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from penstock.errors import IntegrityError, NewerFormat, StoreClosed, StoreUnavailable
from penstock.outbox import SqliteOutbox
from penstock.ports import Capabilities
from penstock.rows import StoreState
from penstock.settings import FileSettings
from penstock.stores.file.files import replace_file
from penstock.stores.file.filesystem import space_is_short
from penstock.stores.file.gate import TOPICS_GATE, Gates, shared_gates
from penstock.stores.file.keeper import Keeper
from penstock.stores.file.log import FileLog
from penstock.stores.file.measures import measure
from penstock.stores.file.members import Member
from penstock.stores.file.notifier import FileNotifier, find_runtime_directory
from penstock.stores.file.platform import Platform
from penstock.stores.file.state.cursors import FileCursors
from penstock.stores.file.state.database import open_databases
from penstock.stores.file.state.leases import FileLeases, check_fence
from penstock.stores.file.state.manifests import FileManifests
from penstock.stores.file.state.parked import FileParkedRows
from penstock.stores.file.state.payloads import Payloads
from penstock.stores.file.state.schedule import FileSchedule
from penstock.stores.file.state.schema import create_databases
from penstock.stores.file.state.witnesses import Witnesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.metrics import Reading
    from penstock.ports import Outbox
    from penstock.rows import Fence, Staged, Told
    from penstock.stores.file.state.database import Database

logger = logging.getLogger(__name__)

FORMAT: Final = 1
MARKER_FILE: Final = "penstock.json"
LOCK_FILE: Final = "locks"

_open_stores: weakref.WeakSet[FileStore] = weakref.WeakSet()


def _abandon_after_fork() -> None:
    for store in list(_open_stores):
        store.abandon()
    _open_stores.clear()


os.register_at_fork(after_in_child=_abandon_after_fork)


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What `penstock.json` says: that this directory is a store, and which."""

    format: int
    store_id: str


_read_marker = msgspec.json.Decoder(Marker).decode  # built here: two threads must not build one type's at once


class FileStore:
    """A store in a directory."""

    def __init__(
        self,
        root: Path,
        *,
        settings: FileSettings | None = None,
        platform: Platform | None = None,
        outbox: Path | None = None,
    ) -> None:
        """Open the store, making it if the directory is new or empty; `outbox` is an application's database."""
        self._settings = settings or FileSettings()
        self._platform = platform or Platform()
        self._root = root.absolute()
        self._process = os.getpid()
        self._unusable = ""
        self.url = f"file:{root}"
        self.capabilities = Capabilities(durable=True, shared=True, blocking=True)
        self._gates, self.store_id = open_directory(self._root, self._settings, self._platform)
        self._member = Member(self._root, self.store_id, self._gates, self._platform)
        try:
            self._assemble(outbox)
        except BaseException:
            self._member.leave()
            raise
        _open_stores.add(self)

    def _assemble(self, outbox: Path | None) -> None:
        platform, settings = self._platform, self._settings
        self.notifier = FileNotifier(
            store_id=self.store_id,
            member=self._member.number,
            directory=find_runtime_directory(
                None if settings.runtime_directory == "auto" else Path(settings.runtime_directory),
                system=Path("/run/user"),
                temporary=Path(tempfile.gettempdir()),
                user=os.geteuid(),
            ),
            is_alive=self._member.is_alive,
            platform=platform,
        )
        self._databases = open_databases(
            self._root, self.store_id, platform, self._gates, stall_seconds=settings.stall_seconds
        )
        control, payloads = self._databases.control, Payloads(self._databases.control, self._databases.bulk, platform)
        self._witnesses = Witnesses(control, payloads)
        self.log = FileLog(
            self._root,
            platform=platform,
            settings=settings,
            gates=self._gates,
            progress=self._witnesses,
            notifier=self.notifier,
            check_open=self.check_open,
        )
        view = self.log
        self.cursors = FileCursors(
            control, payloads, self._witnesses, view, platform.clock, parked_rows_max=settings.parked_rows_max
        )
        self.parked = FileParkedRows(control, payloads, view)
        self.leases = FileLeases(
            self._databases, view, platform, member=self._member.number, is_alive=self._member.is_alive
        )
        self.schedule = FileSchedule(self._databases, view, scheduled_rows_max=settings.scheduled_rows_max)
        self.manifests = FileManifests(control, view)
        self.outbox: Outbox | None = None if outbox is None else _StoreOutbox(outbox, control)
        self.log.tidy()
        self._keeper = Keeper(self.log, settings, platform, payloads.sweep)

    # --- the whole ------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `StoreClosed` once the store is closed, and in a child of the process that opened it."""
        if self._unusable:
            raise StoreClosed(f"{self._unusable} open_store({self.url!r})")

    def readings(self) -> list[Reading]:
        """See `Measured`."""
        return measure(self.inspect(), self.log)

    def inspect(self) -> StoreState:
        """See `Inspectable`."""
        self.check_open()
        disk = self._platform.disk
        descriptor = disk.open(self._root / MARKER_FILE, write=False)
        try:
            free, total = disk.free(descriptor)
        finally:
            disk.close(descriptor)
        return StoreState(
            free_bytes=free,
            total_bytes=total,
            space_is_short=space_is_short(free, total),
            members=tuple(self._member.others()),
            faults=tuple(self.log.faults()),
        )

    def tell(self, who: str, document: bytes) -> None:
        """See `Telling`."""
        self.check_open()
        self._member.tell(who, document)

    def told(self) -> list[Told]:
        """See `Telling`."""
        self.check_open()
        return self._member.told()

    def abandon(self) -> None:
        """Refuse every call, in a child of the process that opened it; nothing that was inherited is touched."""
        self._unusable = (
            f"this store was opened by process {self._process}, before a fork: this one opens its own, with"
        )

    def close(self) -> None:
        """Give the last blocks their witnesses, and give up files, sockets and threads."""
        if self._unusable:
            return
        self._unusable = "this store is closed: open it anew with"
        _open_stores.discard(self)
        self._keeper.stop()
        self.notifier.close()
        self.log.close()
        self._databases.close()
        if isinstance(self.outbox, SqliteOutbox):
            self.outbox.close()
        self._member.leave()


class _StoreOutbox(SqliteOutbox):
    """An application's outbox whose mover is refused as soon as this store's lease has a newer epoch."""

    def __init__(self, path: Path, control: Database) -> None:
        super().__init__(path)
        self._control = control

    def claim(self, limit: int, fence: Fence) -> list[Staged]:
        self._control.read(lambda connection: check_fence(connection, fence))
        return super().claim(limit, fence)

    def done(self, sequences: Sequence[int], fence: Fence) -> None:
        self._control.read(lambda connection: check_fence(connection, fence))
        super().done(sequences, fence)


def open_directory(root: Path, settings: FileSettings, platform: Platform) -> tuple[Gates, str]:
    """Make a directory a store, or see that it is one; returns its gates and its id."""
    platform.check_directory(root)
    disk = platform.disk
    names = disk.names(root)  # once, since another process may be making the store at this moment
    if MARKER_FILE not in names:
        ours = {LOCK_FILE, *_MADE_BEFORE_THE_MARKER}
        strangers = [name for name in names if name not in ours and not name.startswith(".")]
        if strangers:
            raise StoreUnavailable(
                f"{root} is not empty and no store ({strangers[0]} is there): name an empty or a new directory. If it "
                f"was a store, its {MARKER_FILE} is lost: `penstock repair` writes it anew"
            )
    for directory in (*reversed(root.parents), root):
        if not disk.exists(directory):
            disk.make_directory(directory)
    gates = shared_gates(root / LOCK_FILE, platform)
    with gates.gate(TOPICS_GATE).turn("the store", settings.stall_seconds):
        if disk.exists(root / MARKER_FILE):
            return gates, read_marker(root, platform).store_id
        return gates, _create(root, platform)


_MADE_BEFORE_THE_MARKER: Final = {
    *(f"{name}.db{side}" for name in ("control", "bulk") for side in ("", "-wal", "-shm", "-journal")),
    "topics",
}


def _create(root: Path, platform: Platform) -> str:
    # All of them, as whoever made one may have been killed before this; what is not ours may not be readable.
    for directory in root.parents:
        with suppress(PermissionError if directory == root.parent else OSError):
            platform.disk.sync_directory(directory)
    store_id = platform.random(16).hex()
    platform.disk.make_directory(root / "topics")
    create_databases(root, store_id, platform)
    replace_file(platform, root / MARKER_FILE, msgspec.json.encode(Marker(format=FORMAT, store_id=store_id)))
    return store_id


def read_marker(root: Path, platform: Platform) -> Marker:
    """Read `penstock.json`."""
    path = root / MARKER_FILE
    descriptor = platform.disk.open(path, write=False)
    try:
        data = platform.disk.read(descriptor, platform.disk.size(descriptor), 0)
    finally:
        platform.disk.close(descriptor)
    try:
        marker = _read_marker(data)
    except ValueError as error:  # what msgspec raises, and text that is no UTF-8
        raise IntegrityError(f"{path} cannot be read: {error}; `penstock repair` writes it anew") from None
    if marker.format > FORMAT:
        raise NewerFormat(f"{root} has format {marker.format}, this version knows {FORMAT}: upgrade Penstock")
    return marker
